// What one rank does in each round, and the digest by which ranks notice that they disagree.
// Shapes: S global tokens, W ranks, R runs of all ranks; mask rows are (mask_batch, S).
#include "../arrays.h"
#include "../ringtile.h"

#include <string.h>

// ---- workspace -----------------------------------------------------------------------------------

// How many intervals begin, or end, at a position.
typedef struct step {
    int32_t at, num;
} step;

// Positions from .. to - 1, each attended by so many queries, over all rows of the mask.
typedef struct span {
    int32_t from, to;
    int64_t queries;
} span;

typedef struct parts {
    const rt_plan_params *p;
    bool two_sides;
    rt_layout_place *places;     // (R)
    step *begins, *ends, *spare; // (M) for the M intervals of a rank's queries
    span *spans;                 // what some rank attends, rising
    int64_t num_spans;
    // With two sides: the positions of each rank, rising, rank after rank; and what rt_meetings writes.
    int64_t *first;          // (W + 1)
    int64_t *met, *attended; // (S)
    int32_t *positions, *scratch;
} parts;

// The tokens of the rank with most of them; 0 for a list that rt_layout_check refuses.
static int64_t most_tokens(const rt_plan_params *p) {
    int64_t most = 0;
    for (int64_t rank = 0, r = 0; rank < p->num_ranks; rank++) {
        if (p->run_offsets[rank] != r || p->run_offsets[rank + 1] < r || p->run_offsets[rank + 1] > p->seq_len)
            return 0;
        int64_t num_tokens = 0;
        for (; r < p->run_offsets[rank + 1]; r++) {
            if (p->runs[r].length < 1 || p->runs[r].length > p->seq_len - num_tokens) return 0;
            num_tokens += p->runs[r].length;
        }
        most = num_tokens > most ? num_tokens : most;
    }
    return most;
}

static rt_status check_params(const rt_plan_params *p) {
    if (p == NULL) return rt_wrong(RT_BAD_POINTER, "p");
    if (p->num_ranks < 1 || p->seq_len < 0 || p->seq_len > INT32_MAX || p->mask_batch < 0)
        return rt_wrong(RT_BAD_SHAPE, "num_ranks, seq_len or mask_batch");
    if (!rt_points_to(p->run_offsets, sizeof(int64_t))) return rt_wrong(RT_BAD_POINTER, "run_offsets");
    if (!rt_array_fits(1, &p->num_ranks, NULL, 2 * sizeof(rt_transfer))) return rt_wrong(RT_TOO_LARGE, "num_ranks");
    const int64_t sizes[] = {p->mask_batch, p->seq_len};
    if (!rt_array_fits(2, sizes, NULL, sizeof(step) + sizeof(span)))
        return rt_wrong(RT_TOO_LARGE, "mask_batch and seq_len");
    const int64_t num_runs = p->run_offsets[p->num_ranks];
    if (num_runs < 0 || num_runs > p->seq_len) return RT_BAD_LAYOUT; // each holds a position of its own
    if (num_runs > 0 && !rt_points_to(p->runs, sizeof(int64_t))) return rt_wrong(RT_BAD_POINTER, "runs");
    const int64_t num_intervals = p->mask_batch * p->seq_len;
    if (num_intervals == 0) return RT_OK;
    if (num_intervals > INT64_MAX / p->seq_len) return rt_wrong(RT_TOO_LARGE, "mask_batch and seq_len"); // pairs
    const int32_t *const bounds[] = {p->begin, p->end, p->key_begin, p->key_end};
    for (int i = 0; i < (p->key_begin == NULL && p->key_end == NULL ? 2 : 4); i++)
        if (!rt_points_to(bounds[i], sizeof(int32_t)))
            return rt_wrong(RT_BAD_POINTER, "begin, end, key_begin or key_end");
    return RT_OK;
}

// Returns the bytes of the parts, of params that pass, and sets x to them unless it is NULL.
static int64_t lay_out(const rt_plan_params *p, parts *x) {
    const bool two_sides = p->key_begin != NULL;
    const int64_t S = p->seq_len, dense = two_sides ? S : 0;
    const int64_t steps = two_sides ? 0 : p->mask_batch * most_tokens(p); // a begin and an end of each interval
    const int64_t spans = two_sides || 2 * steps > S ? S : 2 * steps;
    const int64_t of_steps = steps * (int64_t)sizeof(step);
    const int64_t sizes[] = {p->run_offsets[p->num_ranks] * (int64_t)sizeof(rt_layout_place),
                             of_steps,
                             of_steps,
                             of_steps,
                             (spans + 1) * (int64_t)sizeof(span), // never no bytes at all
                             two_sides ? (p->num_ranks + 1) * (int64_t)sizeof(int64_t) : 0,
                             dense * (int64_t)sizeof(int64_t),
                             dense * (int64_t)sizeof(int64_t),
                             dense * (int64_t)sizeof(int32_t),
                             two_sides ? rt_meetings_scratch_len(S, S) * (int64_t)sizeof(int32_t) : 0};
    enum { NUM_PARTS = sizeof(sizes) / sizeof(*sizes) };
    void *at[NUM_PARTS];
    const int64_t num_bytes = rt_lay_out(x == NULL ? NULL : p->workspace, NUM_PARTS, sizes, at);
    if (x != NULL) *x = (parts){p, two_sides, at[0], at[1], at[2], at[3], at[4], 0, at[5], at[6], at[7], at[8], at[9]};
    return num_bytes;
}

int64_t rt_plan_workspace_bytes(const rt_plan_params *p) { return check_params(p) == RT_OK ? lay_out(p, NULL) : 0; }

static void list_positions(const parts *x) {
    const rt_plan_params *p = x->p;
    int32_t *const rank_of = x->scratch;
    x->first[0] = 0;
    for (int64_t rank = 0; rank < p->num_ranks; rank++) {
        int64_t num_tokens = 0;
        for (int64_t r = p->run_offsets[rank]; r < p->run_offsets[rank + 1]; r++) {
            const rt_run run = p->runs[r];
            for (int64_t j = 0; j < run.length; j++) rank_of[run.global_begin + j * run.stride] = (int32_t)rank;
            num_tokens += run.length;
        }
        x->first[rank + 1] = x->first[rank] + num_tokens;
    }
    // Up to here first[r] is where the positions of rank r begin; while they are filled in, where the next one goes.
    for (int64_t g = 0; g < p->seq_len; g++) x->positions[x->first[rank_of[g]]++] = (int32_t)g;
    for (int64_t rank = p->num_ranks; rank > 0; rank--) x->first[rank] = x->first[rank - 1];
    x->first[0] = 0;
}

static rt_status open_workspace(const rt_plan_params *p, parts *x) {
    rt_status status = check_params(p);
    if (status != RT_OK) return status;
    if (!rt_points_to(p->workspace, 64) || p->workspace_bytes < lay_out(p, NULL)) return RT_WORKSPACE;
    lay_out(p, x);
    status = rt_layout_check(p->runs, p->run_offsets, p->num_ranks, p->seq_len, x->places);
    if (status == RT_OK && x->two_sides) list_positions(x);
    return status;
}

// ---- who attends which keys ----------------------------------------------------------------------

// From one position of a run to the next: the stride of a single one may be any number, and a step past it overflow.
static int64_t step_of(const rt_run *run) { return run->length > 1 ? run->stride : 0; }

static void add_step(step *steps, int64_t *num, int64_t at) {
    step *const last = *num > 0 ? &steps[*num - 1] : NULL;
    if (last != NULL && last->at == at && last->num < INT32_MAX)
        last->num++;
    else
        steps[(*num)++] = (step){(int32_t)at, 1};
}

// Where the rising stretch that starts at `from` ends.
static int64_t end_of_stretch(const step *steps, int64_t from, int64_t num) {
    int64_t end = from + (from < num);
    while (end < num && steps[end].at >= steps[end - 1].at) end++;
    return end;
}

// Merges stretches that rise, two by two, until one is left (Knuth, 5.2.4): those of a row of documents or windows do.
static void sort_steps(step **steps, step **spare, int64_t num) {
    while (end_of_stretch(*steps, 0, num) < num) {
        const step *const from = *steps;
        step *to = *spare;
        for (int64_t begin = 0; begin < num;) {
            const int64_t middle = end_of_stretch(from, begin, num), end = end_of_stretch(from, middle, num);
            for (int64_t i = begin, j = middle; i < middle || j < end;)
                *to++ = j == end || (i < middle && from[i].at <= from[j].at) ? from[i++] : from[j++];
            begin = end;
        }
        step *const sorted = *spare;
        *spare = *steps, *steps = sorted;
    }
}

static void add_span(parts *x, int64_t from, int64_t to, int64_t queries) {
    if (from == to || queries == 0) return;
    span *const last = x->num_spans > 0 ? &x->spans[x->num_spans - 1] : NULL;
    if (last != NULL && last->to == from && last->queries == queries)
        last->to = (int32_t)to;
    else
        x->spans[x->num_spans++] = (span){(int32_t)from, (int32_t)to, queries};
}

// Linear in the queries of the rank, whatever S is, where their intervals rise with them.
static void find_spans_of_one_side(parts *x, int64_t query_rank, int64_t least, int64_t most) {
    const rt_plan_params *p = x->p;
    int64_t num_begins = 0, num_ends = 0;
    for (int64_t row = 0; row < p->mask_batch; row++) {
        const int32_t *const begin = p->begin + row * p->seq_len, *const end = p->end + row * p->seq_len;
        for (int64_t r = p->run_offsets[query_rank]; r < p->run_offsets[query_rank + 1]; r++) {
            const rt_run run = p->runs[r];
            const int64_t stride = step_of(&run);
            for (int64_t j = 0, i = run.global_begin; j < run.length; j++, i += stride) {
                if (begin[i] >= end[i] || begin[i] >= most || end[i] <= least) continue;
                add_step(x->begins, &num_begins, begin[i] < least ? least : begin[i]);
                add_step(x->ends, &num_ends, end[i] > most ? most : end[i]);
            }
        }
    }
    sort_steps(&x->begins, &x->spare, num_begins);
    sort_steps(&x->ends, &x->spare, num_ends);
    int64_t from = 0, queries = 0;
    for (int64_t i = 0, j = 0; j < num_ends;) { // whatever begins ends
        const int64_t end = x->ends[j].at, to = i < num_begins && x->begins[i].at < end ? x->begins[i].at : end;
        add_span(x, from, to, queries);
        for (; i < num_begins && x->begins[i].at == to; i++) queries += x->begins[i].num;
        for (; j < num_ends && x->ends[j].at == to; j++) queries -= x->ends[j].num;
        from = to;
    }
}

static rt_status find_spans_of_two_sides(parts *x, int64_t query_rank, int64_t key_rank) {
    const rt_plan_params *p = x->p;
    rt_meetings_params m = {.seq_len = p->seq_len, .num_x = p->seq_len};
    if (key_rank >= 0) m.num_x = x->first[key_rank + 1] - x->first[key_rank];
    m.num_y = x->first[query_rank + 1] - x->first[query_rank];
    m.x = key_rank < 0 ? NULL : x->positions + x->first[key_rank];
    m.y = x->positions + x->first[query_rank];
    memset(x->attended, 0, (size_t)m.num_x * sizeof(*x->attended));
    for (int64_t row = 0; row < p->mask_batch; row++) {
        const int64_t at = row * p->seq_len;
        m.x_begin = p->key_begin + at, m.x_end = p->key_end + at;
        m.y_begin = p->begin + at, m.y_end = p->end + at;
        const rt_status status = rt_meetings(&m, x->met, NULL, NULL, x->scratch);
        if (status != RT_OK) return status;
        for (int64_t key = 0; key < m.num_x; key++) x->attended[key] += x->met[key];
    }
    for (int64_t key = 0; key < m.num_x; key++) {
        const int64_t position = m.x == NULL ? key : m.x[key];
        add_span(x, position, position + 1, x->attended[key]);
    }
    return RT_OK;
}

// Sets x->spans to what the queries of query_rank attend; if key_rank is not -1, to a part that has all of its keys.
static rt_status find_spans(parts *x, int64_t query_rank, int64_t key_rank) {
    const rt_plan_params *p = x->p;
    x->num_spans = 0;
    if (p->seq_len == 0) return RT_OK; // the mask may be NULL
    if (x->two_sides) return find_spans_of_two_sides(x, query_rank, key_rank);
    int64_t least = key_rank < 0 ? 0 : p->seq_len, most = key_rank < 0 ? p->seq_len : 0;
    for (int64_t r = key_rank < 0 ? 0 : p->run_offsets[key_rank]; key_rank >= 0 && r < p->run_offsets[key_rank + 1];
         r++) {
        const rt_run run = p->runs[r];
        const int64_t end = run.global_begin + (run.length - 1) * step_of(&run) + 1;
        least = run.global_begin < least ? run.global_begin : least, most = end > most ? end : most;
    }
    find_spans_of_one_side(x, query_rank, least, most);
    return RT_OK;
}

// Keys j .. j + num - 1 of a run, each attended by so many queries.
typedef struct keys_of_span {
    int64_t j, num, queries;
} keys_of_span;

// The first span that may hold a key of a run.
static int64_t first_span(const parts *x, const rt_run *run) {
    int64_t low = 0, high = x->num_spans;
    while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        if (x->spans[middle].to <= run->global_begin)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

// How many positions of a run are below `bound`.
static int64_t num_below(const rt_run *run, int64_t bound) {
    if (bound <= run->global_begin) return 0;
    if (run->length == 1) return 1;
    const int64_t way = bound - 1 - run->global_begin;
    const int64_t steps = run->stride == 1 ? way : way / run->stride; // a division takes most of the time
    return steps < run->length ? steps + 1 : run->length;
}

// Sets `keys` to those of the run in the next span that has any, from *at on; false if no span has.
static bool next_keys(const parts *x, const rt_run *run, int64_t *at, keys_of_span *keys) {
    const int64_t past = run->global_begin + (run->length - 1) * step_of(run) + 1;
    while (*at < x->num_spans && x->spans[*at].from < past) {
        const span s = x->spans[(*at)++];
        const int64_t j = num_below(run, s.from), end = num_below(run, s.to);
        *keys = (keys_of_span){j, end - j, s.queries};
        if (end > j) return true;
    }
    return false;
}

// ---- one rank ------------------------------------------------------------------------------------

typedef struct run_list {
    rt_run *runs;
    int64_t capacity, count;
} run_list;

static void append(run_list *list, rt_run run) {
    if (list->count < list->capacity) list->runs[list->count] = run;
    list->count++;
}

// The run of a rank that begins at a local token; it exists, because the runs fill the local tokens. The search starts
// at `guess`, which is already right when the runs are listed in local order.
static const rt_run *run_at(const rt_run *runs, int64_t num_runs, int64_t local_begin, int64_t guess) {
    while (runs[guess].local_begin != local_begin) guess = (guess + 1) % num_runs;
    return &runs[guess];
}

// Whether a key, of a run of this stride, is the one after `piece`, which may be empty.
static bool continues(const rt_run *piece, int64_t stride, int64_t local, int64_t global) {
    return piece->length > 0 && piece->stride == stride && piece->local_begin + piece->length == local &&
           global - piece->global_begin == piece->length * piece->stride; // cannot overflow
}

// Append the keys of key_rank that are attended, as the fewest possible runs in local order, and return the pairs.
static int64_t append_needed(const parts *x, int64_t key_rank, run_list *list, rt_transfer *needed) {
    const rt_plan_params *p = x->p;
    const int64_t num_runs = p->run_offsets[key_rank + 1] - p->run_offsets[key_rank];
    const rt_run *const runs = num_runs > 0 ? p->runs + p->run_offsets[key_rank] : NULL;
    needed->num_keys = 0, needed->first_run = list->count;
    // `piece` is the run being grown. A key that does not continue it, because a key in between is not needed or a run
    // of the layout ended, starts a new one.
    rt_run piece = {0, 1, 0, 0};
    int64_t pairs = 0, local = 0;
    for (int64_t r = 0; r < num_runs; r++) {
        const rt_run *run = run_at(runs, num_runs, local, r);
        int64_t at = first_span(x, run);
        for (keys_of_span keys; next_keys(x, run, &at, &keys);) {
            const int64_t global = run->global_begin + keys.j * step_of(run);
            if (!continues(&piece, run->stride, local + keys.j, global)) {
                if (piece.length > 0) append(list, piece);
                piece = (rt_run){.global_begin = global, .stride = run->stride, .local_begin = local + keys.j};
            }
            piece.length += keys.num, needed->num_keys += keys.num, pairs += keys.num * keys.queries;
        }
        local += run->length;
    }
    if (piece.length > 0) append(list, piece);
    needed->num_runs = list->count - needed->first_run;
    return pairs;
}

// The runs that append_needed found become those of rows of the owner's k.
static void to_rows(rt_run *runs, const rt_transfer *keys) {
    for (rt_run *run = runs + keys->first_run; run < runs + keys->first_run + keys->num_runs; run++)
        run->global_begin = run->local_begin, run->stride = 1;
}

// Sorts runs by their first position (Shell, 1959): those of each owner mostly rise.
static void sort_by_position(rt_run *runs, int64_t num) {
    int64_t gap = 1;
    while (gap < num / 3) gap = 3 * gap + 1;
    for (; gap > 0; gap /= 3)
        for (int64_t i = gap; i < num; i++) {
            const rt_run run = runs[i];
            int64_t j = i;
            for (; j >= gap && runs[j - gap].global_begin > run.global_begin; j -= gap) runs[j] = runs[j - gap];
            runs[j] = run;
        }
}

// From the runs that append_needed found of one owner or all: `block`, the runs of the round, in the order of positions
// if they are of all; and in place of those found, their rows in the block, and in the message of their owner.
// Return how many runs the block has: those of several owners may continue each other.
static int64_t lay_block(rt_run *found, int64_t num_runs, rt_run *block, bool of_all) {
    for (int64_t r = 0; r < num_runs; r++) {
        block[r] = found[r];
        block[r].local_begin = r;
    }
    if (of_all) sort_by_position(block, num_runs);
    int64_t row = 0, count = 0;
    for (int64_t i = 0; i < num_runs; i++) {
        const rt_run run = block[i];
        rt_run *const of_owner = &found[run.local_begin];
        if (count > 0 && continues(&block[count - 1], run.stride, row, run.global_begin))
            block[count - 1].length += run.length;
        else
            block[count++] = (rt_run){run.global_begin, run.stride, row, run.length};
        of_owner->global_begin = row, of_owner->stride = 1;
        row += run.length;
    }
    return count;
}

// Returns whether the rows of the block, or of k, are those of the message, which are written here.
static bool count_rows(rt_run *runs, const rt_transfer *keys) {
    bool same = true;
    int64_t row = 0;
    for (int64_t r = keys->first_run; r < keys->first_run + keys->num_runs; r++) {
        same &= runs[r].global_begin == row;
        runs[r].local_begin = row;
        row += runs[r].length;
    }
    return same;
}

static rt_status check_rank_plan(const rt_rank_plan *plan) {
    if (plan == NULL) return rt_wrong(RT_BAD_POINTER, "plan");
    if (plan->capacity < 0) return rt_wrong(RT_BAD_SHAPE, "capacity");
    if (!rt_array_fits(1, &plan->capacity, NULL, sizeof(*plan->runs))) return rt_wrong(RT_TOO_LARGE, "capacity");
    const bool points = rt_points_to(plan->rounds, sizeof(int64_t)) && rt_points_to(plan->incoming, sizeof(int64_t)) &&
                        rt_points_to(plan->outgoing, sizeof(int64_t)) &&
                        (plan->capacity == 0 || rt_points_to(plan->runs, sizeof(int64_t)));
    return points ? RT_OK : rt_wrong(RT_BAD_POINTER, "rounds, incoming, outgoing or runs");
}

rt_status rt_plan_rank(const rt_plan_params *p, int64_t rank, bool at_once, rt_rank_plan *plan) {
    parts x;
    rt_status status = open_workspace(p, &x);
    if (status == RT_OK) status = check_rank_plan(plan);
    if (status != RT_OK) return status;
    const int64_t W = p->num_ranks;
    if (rank < 0 || rank >= W) return RT_BAD_RANK;
    run_list list = {plan->runs, plan->capacity, 0};
    for (int64_t i = 0; i < (at_once ? 1 : W); i++) plan->rounds[i] = (rt_round){.in_place = i == 0};

    // What this rank attends, of each rank.
    status = find_spans(&x, rank, -1);
    for (int64_t i = 0; status == RT_OK && i < W; i++) {
        rt_round *const round = &plan->rounds[at_once ? 0 : i];
        rt_transfer *const keys = &plan->incoming[i];
        keys->rank = at_once ? i : (rank - i + W) % W;
        round->num_pairs += append_needed(&x, keys->rank, &list, keys);
        round->num_keys += keys->num_keys, round->num_runs += keys->num_runs;
        if (keys->rank != rank && keys->num_keys > 0) round->in_place = false;
    }
    // What each rank attends of this one's keys.
    for (int64_t i = 0; status == RT_OK && i < W; i++) {
        rt_transfer *const keys = &plan->outgoing[i];
        *keys = (rt_transfer){.rank = at_once ? i : (rank + i) % W};
        if (keys->rank == rank && !at_once) continue; // they stay where they are
        status = find_spans(&x, keys->rank, rank);
        append_needed(&x, rank, &list, keys);
        if (keys->rank != rank && keys->num_keys > 0) plan->rounds[at_once ? 0 : i].in_place = false;
    }
    if (status != RT_OK) return status;

    for (int64_t i = 0; i < (at_once ? 1 : W); i++) {
        rt_round *const round = &plan->rounds[i];
        const int64_t found = plan->incoming[i].first_run;
        round->first_run = round->in_place ? found : list.count;
        if (round->in_place) continue;
        if (list.count + round->num_runs <= list.capacity && round->num_runs > 0)
            round->num_runs = lay_block(list.runs + found, round->num_runs, list.runs + round->first_run, at_once);
        list.count += round->num_runs;
    }
    plan->num_runs = list.count;
    if (list.count > list.capacity) return RT_CAPACITY;
    for (int64_t i = 0; i < W; i++) {
        rt_transfer *const in = &plan->incoming[i], *const out = &plan->outgoing[i];
        if (plan->rounds[at_once ? 0 : i].in_place) in->num_keys = in->num_runs = out->num_keys = out->num_runs = 0;
        to_rows(list.runs, out);
        in->is_head = count_rows(list.runs, in), out->is_head = count_rows(list.runs, out);
    }
    return RT_OK;
}

rt_status rt_plan_counts(const rt_plan_params *p, int64_t *keys, int64_t *pairs) {
    parts x;
    rt_status status = open_workspace(p, &x);
    if (status != RT_OK) return status;
    const int64_t W = p->num_ranks;
    if (!rt_points_to(keys, sizeof(*keys)) || !rt_points_to(pairs, sizeof(*pairs)))
        return rt_wrong(RT_BAD_POINTER, "keys or pairs");
    for (int64_t query_rank = 0; query_rank < W; query_rank++) {
        status = find_spans(&x, query_rank, -1);
        if (status != RT_OK) return status;
        for (int64_t key_rank = 0, cell = query_rank * W; key_rank < W; key_rank++, cell++) {
            keys[cell] = pairs[cell] = 0;
            for (int64_t r = p->run_offsets[key_rank]; r < p->run_offsets[key_rank + 1]; r++) {
                int64_t at = first_span(&x, &p->runs[r]);
                for (keys_of_span found; next_keys(&x, &p->runs[r], &at, &found);)
                    keys[cell] += found.num, pairs[cell] += found.num * found.queries;
            }
        }
    }
    return RT_OK;
}

// ---- digest --------------------------------------------------------------------------------------

// Multiplication by an odd number and h ^ (h >> n) are both bijections of 64 bits, so arrays that differ in one word
// never collide. A word's place counts, because every later word multiplies it again.
static uint64_t mix(uint64_t hash, uint64_t word) {
    hash = (hash ^ word) * UINT64_C(0x9e3779b97f4a7c15);
    return hash ^ (hash >> 32);
}

rt_status rt_digest(const void *bytes, int64_t num_bytes, uint64_t seed, uint64_t *digest) {
    if (num_bytes < 0) return rt_wrong(RT_BAD_SHAPE, "num_bytes");
    if ((num_bytes > 0 && bytes == NULL) || !rt_points_to(digest, sizeof(*digest)))
        return rt_wrong(RT_BAD_POINTER, "bytes or digest");
    enum { LANES = 4, STEP_BYTES = LANES * (int)sizeof(uint64_t) };
    // Independent lanes, because a single chain of multiplications would be bound by its latency.
    uint64_t lane[LANES], word[LANES];
    for (int i = 0; i < LANES; i++) lane[i] = mix(seed, (uint64_t)i + 1);

    const char *at = bytes;
    int64_t left = num_bytes;
    for (; left >= STEP_BYTES; left -= STEP_BYTES, at += STEP_BYTES) {
        memcpy(word, at, STEP_BYTES);
        for (int i = 0; i < LANES; i++) lane[i] = mix(lane[i], word[i]);
    }
    if (left > 0) {
        memset(word, 0, STEP_BYTES);
        memcpy(word, at, (size_t)left);
        for (int i = 0; i < LANES; i++) lane[i] = mix(lane[i], word[i]);
    }
    uint64_t hash = mix(seed, (uint64_t)num_bytes); // distinguishes a tail of zeros from no tail
    for (int i = 0; i < LANES; i++) hash = mix(hash, lane[i]);
    *digest = mix(hash, hash >> 32);
    return RT_OK;
}
