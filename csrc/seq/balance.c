// Which rank holds which chunk of tokens, so that all ranks do the same work and few keys travel.
//
// Attention costs what the mask lets attend, so the work of a chunk of queries is a sum over the mask, and the keys
// that it needs lie between its smallest begin and its largest end. Every rank gets as many chunks as another (give or
// take one): what a layer does token by token is then even too.
//
// Chunks are parted between two halves of the ranks, and each part again. They lie on a circle, in the order of the
// sequence; one half of the ranks gets a window of it, the other one the rest. All windows of a length together do
// their share of the work on average, and two neighbours differ by two chunks: so one does its share, give or take a
// chunk. Of the windows that are even enough, the search takes the one whose two ends cut the fewest keys off. A rank
// ends with few runs, and ranks next to each other (of one host) share documents.
//
// Shapes: S global tokens, W ranks, C chunks of tokens.
#include "../arrays.h"
#include "../ringtile.h"

#include <string.h>

#define TOLERANCE 0.03 // what the busiest rank may do above the mean
// A key that a rank receives takes as long as so many pairs. A pair is 14 H D flops, forward and backward; a key is
// 16 G D bytes (k and v in 16 bits twice, dk and dv in 32), with H = 4 G, at 1,000 flops for each byte sent.
enum { PAIRS_PER_KEY = 256 };
enum { MAX_WINDOWS = 8192 }; // tried for a part, evenly spread

typedef struct table {
    const rt_balance_params *p;
    int64_t num_chunks, all_work;
    int64_t *work;          // (C) unmasked pairs
    int32_t *first, *last;  // (C) chunk c needs the keys of chunks first[c] .. last[c] - 1
    int32_t *order, *other; // (C) the chunks of each part, in the order of the sequence; scratch
    int64_t *sums;          // (C + 1) the work of a part's chunks before each; or how many chunks have a `first` below
    int64_t *loads;         // (W) the work of each rank
    int32_t *after, *needs; // (W) of the keys that a rank needs: the last plus 1 counted so far, and how many
    int64_t *owner;         // (C)
} table;

static rt_status check_params(const rt_balance_params *p) {
    if (p == NULL) return rt_wrong(RT_BAD_POINTER, "p");
    if (p->num_ranks < 1 || p->seq_len < 1 || p->seq_len > INT32_MAX || p->mask_batch < 0 || p->chunk < 1 ||
        (p->seq_len - 1) / p->chunk + 1 < p->num_ranks)
        return rt_wrong(RT_BAD_SHAPE, "num_ranks, seq_len, mask_batch or chunk");
    const int64_t of_mask[] = {p->mask_batch, p->seq_len}, S = p->seq_len;
    if (!rt_array_fits(2, of_mask, NULL, sizeof(int64_t)) || p->mask_batch > INT64_MAX / S / S / PAIRS_PER_KEY)
        return rt_wrong(RT_TOO_LARGE, "mask_batch and seq_len");
    if (p->mask_batch == 0) return RT_OK;
    if (!rt_points_to(p->begin, sizeof(int32_t)) || !rt_points_to(p->end, sizeof(int32_t)))
        return rt_wrong(RT_BAD_POINTER, "begin or end");
    return (uintptr_t)p->num_keys % sizeof(int64_t) == 0 ? RT_OK : rt_wrong(RT_BAD_POINTER, "num_keys");
}

// Returns the bytes of the table, of params that pass, and sets t to it unless it is NULL.
static int64_t lay_out(const rt_balance_params *p, table *t) {
    const int64_t W = p->num_ranks, C = (p->seq_len - 1) / p->chunk + 1;
    const int64_t sizes[] = {8 * C, 4 * C, 4 * C, 4 * C, 4 * C, 8 * (C + 1), 8 * W, 4 * W, 4 * W};
    enum { NUM_PARTS = sizeof(sizes) / sizeof(*sizes) };
    void *at[NUM_PARTS];
    const int64_t num_bytes = rt_lay_out(t == NULL ? NULL : p->workspace, NUM_PARTS, sizes, at);
    if (t != NULL) *t = (table){p, C, 0, at[0], at[1], at[2], at[3], at[4], at[5], at[6], at[7], at[8], NULL};
    return num_bytes;
}

int64_t rt_balance_workspace_bytes(const rt_balance_params *p) {
    return check_params(p) == RT_OK ? lay_out(p, NULL) : 0;
}

// With two sides a chunk may need fewer keys: the pairs are exact, what travels is an estimate.
static void find_needs(table *t) {
    const rt_balance_params *p = t->p;
    const int64_t S = p->seq_len;
    for (int64_t c = 0; c < t->num_chunks; c++) {
        const int64_t from = c * p->chunk, to = from + p->chunk < S ? from + p->chunk : S;
        int64_t smallest = S, largest = 0, pairs = 0;
        for (int64_t row = 0; row < p->mask_batch; row++)
            for (int64_t i = row * S + from; i < row * S + to; i++) {
                const int64_t begin = rt_clamp(p->begin[i], S), end = rt_clamp(p->end[i], S);
                if (end <= begin) continue;
                smallest = begin < smallest ? begin : smallest, largest = end > largest ? end : largest;
                pairs += p->num_keys == NULL ? end - begin : rt_clamp(p->num_keys[i], S);
            }
        t->work[c] = pairs, t->all_work += pairs;
        t->last[c] = (int32_t)((largest + p->chunk - 1) / p->chunk);
        t->first[c] = (int32_t)(smallest < largest ? smallest / p->chunk : t->last[c]);
    }
}

// The chunks of ranks 0 .. rank - 1 together: as many for each rank, give or take one.
static int64_t chunks_below(const table *t, int64_t rank) {
    return (t->num_chunks * rank + t->p->num_ranks - 1) / t->p->num_ranks;
}

// Returns how many of num rising numbers are below x.
static int64_t count_below(const int32_t *numbers, int64_t num, int64_t x) {
    int64_t from = 0;
    while (num > 0) {
        const int64_t half = num / 2;
        const bool is_below = numbers[from + half] < x;
        from = is_below ? from + half + 1 : from;
        num = is_below ? num - half - 1 : half;
    }
    return from;
}

// How many chunks of a part one side needs of the other if the part is cut before its chunk `at`.
static int64_t cut_keys(const table *t, const int32_t *chunks, int64_t num, int64_t at) {
    if (at == 0 || at == num) return 0;
    const int64_t before = at - count_below(chunks, at, t->first[chunks[at]]);
    return before + count_below(chunks + at, num - at, t->last[chunks[at - 1]]);
}

static double most_of(double a, double b) { return a > b ? a : b; }

// Returns where the window of `window` chunks begins that ranks_inside get; ranks_outside get the others. The more
// ranks will part chunks again, the more even they must be.
static int64_t find_window(table *t, int64_t ranks_inside, int64_t ranks_outside, const int32_t *chunks, int64_t num,
                           int64_t window) {
    const double mean = (double)t->all_work / (double)t->p->num_ranks;
    const double limit = mean + TOLERANCE * mean / (double)ranks_inside;
    int64_t *const sums = t->sums;
    sums[0] = 0;
    for (int64_t i = 0; i < num; i++) sums[i + 1] = sums[i] + t->work[chunks[i]];
    int64_t best = 0, fewest = INT64_MAX;
    double least = 0;
    const int64_t step = (num - 1) / MAX_WINDOWS + 1;
    for (int64_t from = 0; from < num; from += step) {
        const int64_t past = from + window, to = past < num ? past : past - num;
        const int64_t inside = past < num ? sums[to] - sums[from] : sums[num] - sums[from] + sums[to];
        const double most =
            most_of((double)inside / (double)ranks_inside, (double)(sums[num] - inside) / (double)ranks_outside);
        if (fewest < INT64_MAX && most > limit && most >= least) continue;
        const bool is_even = most <= limit;
        const int64_t keys = is_even ? cut_keys(t, chunks, num, from) + cut_keys(t, chunks, num, to) : INT64_MAX - 1;
        if (keys > fewest || (keys == fewest && most >= least)) continue;
        best = from, fewest = keys, least = most;
    }
    return best;
}

static int64_t power_of_two_below(int64_t n) {
    int64_t power = 1;
    while (2 * power < n) power *= 2;
    return power;
}

// Parts the chunks of ranks first_rank .. first_rank + num_ranks - 1 among them.
static void part_chunks(table *t, int64_t first_rank, int64_t num_ranks) {
    const int64_t begin = chunks_below(t, first_rank), num = chunks_below(t, first_rank + num_ranks) - begin;
    int32_t *const chunks = t->order + begin;
    if (num_ranks == 1) {
        for (int64_t i = 0; i < num; i++) t->owner[chunks[i]] = first_rank;
        return;
    }
    const int64_t ranks_inside = power_of_two_below(num_ranks); // hosts of 2, 4, 8 ranks stay together
    const int64_t ranks_outside = num_ranks - ranks_inside;
    const int64_t window = chunks_below(t, first_rank + ranks_inside) - begin;
    const int64_t from = find_window(t, ranks_inside, ranks_outside, chunks, num, window);
    const int64_t past = from + window - num; // > 0: the window goes on at the start
    memcpy(t->other, chunks, (size_t)num * sizeof(*chunks));
    int64_t inside = 0, outside = window;
    for (int64_t i = 0; i < num; i++) {
        const bool is_inside = i < past || (i >= from && i < from + window);
        chunks[is_inside ? inside++ : outside++] = t->other[i];
    }
    part_chunks(t, first_rank, ranks_inside);
    part_chunks(t, first_rank + ranks_inside, ranks_outside);
}

// Lists the chunks in t->order, in the order of their `first`.
static void sort_by_first(table *t) {
    const int64_t C = t->num_chunks;
    memset(t->sums, 0, (size_t)(C + 1) * sizeof(*t->sums));
    for (int64_t c = 0; c < C; c++) t->sums[t->first[c]]++;
    int64_t below = 0;
    for (int64_t first = 0; first <= C; first++) {
        const int64_t num = t->sums[first];
        t->sums[first] = below;
        below += num;
    }
    for (int64_t c = 0; c < C; c++) t->order[t->sums[t->first[c]]++] = (int32_t)c;
}

typedef struct cost {
    bool is_uneven; // the busiest rank does more than TOLERANCE above the mean
    double pairs; // of the busiest rank; if even, or those that take as long as the keys that a rank receives, if more
} cost;

// Sets loads. With two sides a rank may receive fewer keys.
static cost cost_of(table *t) {
    const int64_t W = t->p->num_ranks;
    memset(t->loads, 0, (size_t)W * sizeof(*t->loads));
    memset(t->after, 0, (size_t)W * sizeof(*t->after));
    memset(t->needs, 0, (size_t)W * sizeof(*t->needs));
    for (int64_t i = 0; i < t->num_chunks; i++) {
        const int32_t c = t->order[i], first = t->first[c], last = t->last[c];
        const int64_t rank = t->owner[c];
        const int32_t after = t->after[rank];
        t->loads[rank] += t->work[c];
        t->needs[rank] -= first <= c && c < last; // its own keys
        if (last <= after) continue;
        t->needs[rank] += last - (first > after ? first : after);
        t->after[rank] = last;
    }
    double work = 0, keys = 0;
    for (int64_t rank = 0; rank < W; rank++) {
        work = most_of(work, (double)t->loads[rank]);
        keys = most_of(keys, (double)t->needs[rank]);
    }
    keys *= (double)PAIRS_PER_KEY * (double)t->p->mask_batch * (double)t->p->chunk;
    const bool is_uneven = work * (double)W > (1 + TOLERANCE) * (double)t->all_work;
    return (cost){is_uneven, is_uneven ? work : most_of(work, keys)};
}

static bool deal_contiguous(table *t) {
    for (int64_t rank = 0; rank < t->p->num_ranks; rank++)
        for (int64_t c = chunks_below(t, rank); c < chunks_below(t, rank + 1); c++) t->owner[c] = rank;
    return true;
}

// Returns whether ranks get as many chunks, give or take one.
static bool deal_zigzag(table *t) {
    const int64_t W = t->p->num_ranks, C = t->num_chunks;
    int64_t *const counts = t->loads, fewest = C / W;
    memset(counts, 0, (size_t)W * sizeof(*counts));
    for (int64_t c = 0; c < C; c++) {
        const int64_t half = c * 2 * W / C;
        t->owner[c] = half < W ? half : 2 * W - 1 - half;
        counts[t->owner[c]]++;
    }
    bool is_even = true;
    for (int64_t rank = 0; rank < W; rank++) is_even &= counts[rank] == fewest || counts[rank] == fewest + (C % W > 0);
    return is_even;
}

static bool deal_parts(table *t) {
    for (int64_t c = 0; c < t->num_chunks; c++) t->order[c] = (int32_t)c;
    part_chunks(t, 0, t->p->num_ranks);
    return true;
}

rt_status rt_balance(const rt_balance_params *p, int64_t *owner, int64_t *loads) {
    const rt_status status = check_params(p);
    if (status != RT_OK) return status;
    if (!rt_points_to(owner, sizeof(*owner)) || !rt_points_to(loads, sizeof(*loads)))
        return rt_wrong(RT_BAD_POINTER, "owner or loads");
    if (!rt_points_to(p->workspace, 64) || p->workspace_bytes < lay_out(p, NULL)) return RT_WORKSPACE;
    table t;
    lay_out(p, &t);
    t.owner = owner, t.loads = loads;
    find_needs(&t);
    // The named layouts come first, and stay where the parts are no faster.
    static bool (*const deals[])(table *) = {deal_contiguous, deal_zigzag, deal_parts};
    enum { NUM_DEALS = sizeof(deals) / sizeof(*deals) };
    int best = -1;
    cost least = {0};
    for (int i = 0; i < NUM_DEALS; i++) {
        if (!deals[i](&t)) continue;
        sort_by_first(&t);
        const cost found = cost_of(&t);
        const bool is_better = found.is_uneven == least.is_uneven ? found.pairs < least.pairs : least.is_uneven;
        if (best < 0 || is_better) best = i, least = found;
    }
    if (best == NUM_DEALS - 1) return RT_OK; // the last is in place
    deals[best](&t);
    sort_by_first(&t);
    cost_of(&t);
    return RT_OK;
}
