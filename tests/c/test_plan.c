// The plan against an oracle that tries every query with every key, and the digest.
#include "layouts.h"

typedef struct mask {
    int64_t batch, seq_len;
    int32_t *begin, *end;         // (batch, S)
    int32_t *key_begin, *key_end; // (batch, S), or NULL
} mask;

// Somewhere near 0..S, now and then at the end of int32.
static int32_t noise(uint64_t *state, int64_t seq_len) {
    if (random_int(state, 0, 9) == 0) return random_int(state, 0, 1) ? INT32_MIN : INT32_MAX;
    return (int32_t)random_int(state, -5, seq_len + 5);
}

// Causal, documents, windows, noise, or empty; half of them with a second side of noise.
static mask random_mask(uint64_t *state, int64_t seq_len) {
    mask m = {.batch = random_int(state, 1, 3), .seq_len = seq_len};
    const size_t num_bytes = (size_t)(m.batch * seq_len) * sizeof(int32_t);
    m.begin = must_alloc(num_bytes);
    m.end = must_alloc(num_bytes);
    for (int64_t b = 0; b < m.batch; b++) {
        const int64_t kind = random_int(state, 0, 4);
        const int32_t window = (int32_t)random_int(state, 1, 8);
        int32_t document = 0;
        for (int32_t i = 0; i < seq_len; i++) {
            int32_t *begin = &m.begin[b * seq_len + i], *end = &m.end[b * seq_len + i];
            if (kind == 1 && random_int(state, 0, 9) == 0) document = i;
            *begin = kind == 2 ? i - window : document;
            *end = i + 1;
            if (kind == 3) {
                *begin = noise(state, seq_len);
                *end = noise(state, seq_len);
            }
            if (kind == 4) *end = *begin;
        }
    }
    if (random_int(state, 0, 1)) return m;
    m.key_begin = must_alloc(num_bytes), m.key_end = must_alloc(num_bytes);
    for (int64_t i = 0; i < m.batch * seq_len; i++) {
        m.key_begin[i] = random_int(state, 0, 1) ? 0 : noise(state, seq_len);
        m.key_end[i] = random_int(state, 0, 1) ? (int32_t)seq_len : noise(state, seq_len);
    }
    return m;
}

static bool attends(const mask *m, int64_t b, int64_t query, int64_t key) {
    const int64_t at = b * m->seq_len;
    if (m->begin[at + query] > key || key >= m->end[at + query]) return false;
    return m->key_begin == NULL || (m->key_begin[at + key] <= query && query < m->key_end[at + key]);
}

// What rank `query_rank` attends, query by query: attended[j], over all rows, of global position j.
static void attended_by(const layout *l, const mask *m, int64_t query_rank, int64_t *attended) {
    memset(attended, 0, (size_t)m->seq_len * sizeof(*attended));
    for (int64_t r = l->run_offsets[query_rank]; r < l->run_offsets[query_rank + 1]; r++)
        for (int64_t i = 0; i < l->runs[r].length; i++)
            for (int64_t b = 0; b < m->batch; b++)
                for (int64_t key = 0; key < m->seq_len; key++)
                    attended[key] += attends(m, b, l->runs[r].global_begin + i * l->runs[r].stride, key);
}

// The keys of a rank that are attended, each a run of its own, in local order; then those that continue each other are
// joined. Returns how many runs there are, and adds up keys and pairs.
static int64_t needed_of(const layout *l, int64_t key_rank, const int64_t *attended, rt_run *needed, int64_t *num_keys,
                         int64_t *num_pairs) {
    int64_t count = 0;
    for (int64_t local = 0; local < local_len_of(l, key_rank); local++) {
        const rt_run *run = &l->runs[l->run_offsets[key_rank]];
        while (local < run->local_begin || local >= run->local_begin + run->length) run++;
        const int64_t position = run->global_begin + (local - run->local_begin) * run->stride;
        if (attended[position] == 0) continue;
        ++*num_keys, *num_pairs += attended[position];
        rt_run *last = count > 0 ? &needed[count - 1] : NULL;
        if (last != NULL && last->stride == run->stride && last->local_begin + last->length == local &&
            last->global_begin + last->length * last->stride == position)
            last->length++;
        else
            needed[count++] = (rt_run){position, run->stride, local, 1};
    }
    return count;
}

static bool equal_runs(const rt_run *a, const rt_run *b, int64_t num_runs) {
    return num_runs == 0 || memcmp(a, b, (size_t)num_runs * sizeof(*a)) == 0;
}

// A workspace of exactly the size asked for, filled with what no count is.
static void give_workspace(rt_plan_params *p) {
    p->workspace_bytes = rt_plan_workspace_bytes(p);
    CHECK(p->workspace_bytes > 0 && p->workspace_bytes % 64 == 0);
    p->workspace = aligned_alloc(64, (size_t)p->workspace_bytes);
    if (p->workspace == NULL) exit(1);
    memset(p->workspace, 0xff, (size_t)p->workspace_bytes);
}

// The rows of a message are its runs one after another; those of the block or of k, in which each begins, as given.
static void check_transfer(const rt_transfer *t, const rt_run *runs, const rt_run *needed, int64_t num_needed,
                           const int64_t *rows) {
    int64_t packed = 0;
    bool head = true, exact = t->num_runs == num_needed;
    for (int64_t r = 0; exact && r < num_needed; r++) {
        const rt_run want = {rows[r], 1, packed, needed[r].length};
        exact &= equal_runs(&runs[t->first_run + r], &want, 1);
        head &= rows[r] == packed;
        packed += needed[r].length;
    }
    CHECK(exact && t->num_keys == packed && t->is_head == head);
}

static void check_rank(const layout *l, const mask *m, const rt_plan_params *p, int64_t rank, bool at_once) {
    const int64_t W = l->num_ranks, S = l->seq_len, num_rounds = at_once ? 1 : W;
    rt_rank_plan plan = {0};
    plan.rounds = must_alloc((size_t)num_rounds * sizeof(rt_round));
    plan.incoming = must_alloc((size_t)W * sizeof(rt_transfer));
    plan.outgoing = must_alloc((size_t)W * sizeof(rt_transfer));
    rt_status status = rt_plan_rank(p, rank, at_once, &plan);
    CHECK_STATUS(status, plan.num_runs > 0 ? RT_CAPACITY : RT_OK);
    if (plan.num_runs > 1) { // one is too few, but where runs are joined
        plan.capacity = plan.num_runs - 1;
        plan.runs = must_alloc((size_t)plan.capacity * sizeof(*plan.runs));
        status = rt_plan_rank(p, rank, at_once, &plan);
        CHECK(status == RT_CAPACITY ? plan.num_runs == plan.capacity + 1 : plan.num_runs <= plan.capacity);
        free(plan.runs);
    }
    plan.capacity = plan.num_runs;
    plan.runs = must_alloc((size_t)plan.capacity * sizeof(*plan.runs));
    CHECK_STATUS(rt_plan_rank(p, rank, at_once, &plan), RT_OK);

    int64_t *attended = must_alloc((size_t)S * sizeof(int64_t)), *rows = must_alloc((size_t)S * sizeof(int64_t));
    rt_run *in = must_alloc((size_t)S * sizeof(*in)), *out = must_alloc((size_t)S * sizeof(*out));
    for (int64_t i = 0; i < num_rounds; i++) {
        const rt_round *round = &plan.rounds[i];
        const rt_run *block = plan.runs + round->first_run;
        int64_t num_in = 0, num_keys = 0, num_pairs = 0, firsts[MAX_RANKS + 1] = {0};
        bool travels = false;
        attended_by(l, m, rank, attended);
        for (int64_t j = 0; j < (at_once ? W : 1); j++) {
            const int64_t key_rank = at_once ? j : (rank - i + W) % W, before = num_keys;
            CHECK_INT(plan.incoming[i + j].rank, key_rank);
            num_in += needed_of(l, key_rank, attended, in + num_in, &num_keys, &num_pairs);
            firsts[j + 1] = num_in;
            travels |= key_rank != rank && num_keys > before;
        }
        for (int64_t other = 0; other < W; other++) {
            int64_t num_sent = 0, unused = 0;
            if (other == rank || !(at_once || other == (rank + i) % W)) continue;
            attended_by(l, m, other, attended);
            needed_of(l, rank, attended, out, &num_sent, &unused);
            travels |= num_sent > 0;
        }
        CHECK(round->num_keys == num_keys && round->num_pairs == num_pairs);
        CHECK_INT(round->in_place, at_once ? !travels : i == 0);
        if (round->in_place) CHECK(round->num_runs == num_in && equal_runs(block, in, num_in));
        // The block has the same keys, in the order of positions at once, else in local order; runs that continue each
        // other are one: `used` is how much of it has been found.
        int64_t row = 0, at = 0, used = 0, last = -1;
        bool exact = true;
        for (int64_t r = 0; !round->in_place && exact && r < num_in; r++) {
            int64_t of = r;
            for (int64_t other = 0, first = S; at_once && other < num_in; other++)
                if (in[other].global_begin > last && in[other].global_begin < first)
                    of = other, first = in[other].global_begin;
            const rt_run *run = &block[at], *before = run - 1;
            last = in[of].global_begin, rows[of] = row;
            exact = at < round->num_runs && run->global_begin + used * run->stride == last &&
                    run->local_begin + used == row && run->stride == in[of].stride &&
                    used + in[of].length <= run->length;
            if (exact && used == 0 && at > 0) // else both would be one
                exact = before->stride != run->stride || last - before->global_begin != before->length * before->stride;
            row += in[of].length, used += in[of].length;
            if (exact && used == run->length) at++, used = 0;
        }
        CHECK(round->in_place || at == round->num_runs);
        CHECK(exact);
        for (int64_t j = 0; exact && j < (at_once ? W : 1); j++) {
            const rt_transfer *incoming = &plan.incoming[i + j], *outgoing = &plan.outgoing[i + j];
            const int64_t first = firsts[j], num = round->in_place ? 0 : firsts[j + 1] - first;
            check_transfer(incoming, plan.runs, in + first, num, rows + first);
            CHECK_INT(outgoing->rank, at_once ? j : (rank + i) % W);
            attended_by(l, m, outgoing->rank, attended);
            int64_t unused = 0, num_out = needed_of(l, rank, attended, out, &unused, &unused);
            int64_t *of_k = must_alloc((size_t)S * sizeof(*of_k));
            for (int64_t r = 0; r < num_out; r++) of_k[r] = out[r].local_begin;
            check_transfer(outgoing, plan.runs, out, round->in_place ? 0 : num_out, of_k);
            free(of_k);
        }
    }
    free(plan.rounds), free(plan.incoming), free(plan.outgoing), free(plan.runs);
    free(attended), free(rows), free(in), free(out);
}

static void check_counts(const layout *l, const mask *m, const rt_plan_params *p) {
    const int64_t W = l->num_ranks;
    int64_t *attended = must_alloc((size_t)l->seq_len * sizeof(*attended));
    int64_t keys[MAX_RANKS * MAX_RANKS], pairs[MAX_RANKS * MAX_RANKS];
    rt_run *needed = must_alloc((size_t)l->seq_len * sizeof(*needed));
    CHECK_STATUS(rt_plan_counts(p, keys, pairs), RT_OK);
    for (int64_t at = 0; at < W * W; at++) {
        int64_t num_keys = 0, num_pairs = 0;
        attended_by(l, m, at / W, attended);
        needed_of(l, at % W, attended, needed, &num_keys, &num_pairs);
        CHECK(keys[at] == num_keys && pairs[at] == num_pairs);
    }
    free(attended), free(needed);
}

static void check_plan(uint64_t *state, int64_t seq_len) {
    const layout l = random_layout(state, seq_len);
    const mask m = random_mask(state, seq_len);
    rt_plan_params p = {.num_ranks = l.num_ranks,
                        .seq_len = seq_len,
                        .mask_batch = m.batch,
                        .runs = l.runs,
                        .run_offsets = l.run_offsets,
                        .begin = m.begin,
                        .end = m.end,
                        .key_begin = m.key_begin,
                        .key_end = m.key_end};
    give_workspace(&p);
    for (int64_t rank = 0; rank < l.num_ranks; rank++)
        for (int at_once = 0; at_once < 2; at_once++) check_rank(&l, &m, &p, rank, at_once);
    check_counts(&l, &m, &p);
    free(m.begin), free(m.end), free(m.key_begin), free(m.key_end);
    free(p.workspace);
}

static void test_random_plans_equal_the_oracle(void) {
    uint64_t state = 3;
    for (int round = 0; round < 400; round++) check_plan(&state, random_int(&state, 0, 30));
    for (int round = 0; round < 4; round++) check_plan(&state, random_int(&state, 100, 150));
}

// Rank 0 holds 0-3 and 12-15, rank 1 holds 4-11.
static void test_causal_zigzag_over_two_ranks(void) {
    const rt_run layout_runs[] = {{0, 1, 0, 4}, {12, 1, 4, 4}, {4, 1, 0, 8}};
    int32_t begin[16] = {0}, end[16];
    for (int32_t i = 0; i < 16; i++) end[i] = i + 1;
    rt_plan_params p = {.num_ranks = 2, .seq_len = 16, .mask_batch = 1, .runs = layout_runs, .begin = begin};
    p.run_offsets = (int64_t[]){0, 2, 3}, p.end = end;
    give_workspace(&p);
    rt_round rounds[2];
    rt_transfer in[2], out[2];
    rt_run runs[8];
    rt_rank_plan plan = {rounds, in, out, runs, 8, 0};
    CHECK_STATUS(rt_plan_rank(&p, 0, false, &plan), RT_OK);
    CHECK(rounds[0].in_place && rounds[0].num_keys == 8 && rounds[0].num_runs == 2);
    CHECK_INT(rounds[0].num_pairs, (1 + 2 + 3 + 4) + (13 + 14 + 15 + 16) - 4 * 8);
    CHECK(!rounds[1].in_place && rounds[1].num_pairs == 4 * 8);
    CHECK(equal_runs(&runs[rounds[1].first_run], &(rt_run){4, 1, 0, 8}, 1));
    CHECK(in[1].rank == 1 && in[1].num_keys == 8 && in[1].is_head);
    CHECK(out[1].rank == 1 && out[1].num_keys == 4 && out[1].is_head);
    CHECK(equal_runs(&runs[out[1].first_run], &(rt_run){0, 1, 0, 4}, 1));

    CHECK_STATUS(rt_plan_rank(&p, 1, true, &plan), RT_OK); // the block: 0-3 of rank 0, its own 4-11
    CHECK(!rounds[0].in_place && rounds[0].num_keys == 12 && rounds[0].num_runs == 1);
    CHECK(equal_runs(&runs[rounds[0].first_run], &(rt_run){0, 1, 0, 12}, 1));
    CHECK(in[0].num_keys == 4 && in[0].is_head && in[1].num_keys == 8 && !in[1].is_head);
    CHECK(equal_runs(&runs[in[1].first_run], &(rt_run){4, 1, 0, 8}, 1));
    free(p.workspace);
}

// The stride of a single token is any number: a step past it would overflow.
static void test_a_single_token_has_any_stride(void) {
    const rt_run runs[] = {{0, INT64_MAX, 0, 1}, {1, INT64_MAX, 0, 1}};
    const int64_t run_offsets[] = {0, 1, 2};
    const int32_t begin[2] = {0, 0}, end[2] = {2, 2};
    rt_plan_params p = {.num_ranks = 2,
                        .seq_len = 2,
                        .mask_batch = 1,
                        .runs = runs,
                        .run_offsets = run_offsets,
                        .begin = begin,
                        .end = end};
    give_workspace(&p);
    int64_t keys[4], pairs[4];
    CHECK_STATUS(rt_plan_counts(&p, keys, pairs), RT_OK);
    rt_round rounds[2];
    rt_transfer incoming[2], outgoing[2];
    rt_run needed[8];
    rt_rank_plan plan = {.rounds = rounds, .incoming = incoming, .outgoing = outgoing, .runs = needed, .capacity = 8};
    CHECK_STATUS(rt_plan_rank(&p, 1, false, &plan), RT_OK);
    CHECK(rounds[1].num_keys == 1 && incoming[1].rank == 0 && pairs[1] == 1);
    free(p.workspace);
}

static void test_plan_refuses_malformed_params(void) {
    const rt_run layout_runs[] = {{0, 1, 0, 4}, {4, 1, 0, 4}};
    const int32_t begin[8] = {0}, end[8] = {8};
    rt_plan_params good = {.num_ranks = 2, .seq_len = 8, .mask_batch = 1, .runs = layout_runs, .begin = begin};
    good.run_offsets = (int64_t[]){0, 1, 2}, good.end = end;
    give_workspace(&good);
    int64_t keys[4], pairs[4];
    rt_round rounds[2];
    rt_transfer in[2], out[2];
    rt_run runs[8];
    const rt_rank_plan room = {rounds, in, out, runs, 8, 0};
    rt_rank_plan plan = room;
    CHECK_STATUS(rt_plan_rank(&good, 1, false, &plan), RT_OK);
    CHECK_STATUS(rt_plan_counts(&good, keys, pairs), RT_OK);

#define REFUSED(field, value, status)                                                                                  \
    do {                                                                                                               \
        rt_plan_params bad = good;                                                                                     \
        bad.field = value;                                                                                             \
        CHECK_STATUS(rt_plan_rank(&bad, 1, false, &plan), status);                                                     \
        CHECK_STATUS(rt_plan_counts(&bad, keys, pairs), status);                                                       \
    } while (0)
    REFUSED(num_ranks, 0, RT_BAD_SHAPE);
    REFUSED(num_ranks, 1, RT_BAD_LAYOUT);
    REFUSED(seq_len, -1, RT_BAD_SHAPE);
    REFUSED(seq_len, (int64_t)INT32_MAX + 1, RT_BAD_SHAPE);
    REFUSED(seq_len, 1, RT_BAD_LAYOUT);
    REFUSED(seq_len, 7, RT_BAD_LAYOUT);
    REFUSED(mask_batch, -1, RT_BAD_SHAPE);
    REFUSED(mask_batch, INT64_MAX / 16, RT_TOO_LARGE);
    REFUSED(run_offsets, ((const int64_t[]){0, INT64_MIN, 2}), RT_BAD_LAYOUT);
    REFUSED(run_offsets, ((const int64_t[]){0, 1, INT64_MAX}), RT_BAD_LAYOUT);
    REFUSED(run_offsets, ((const int64_t[]){0, 1, 0}), RT_BAD_LAYOUT);
    REFUSED(run_offsets, NULL, RT_BAD_POINTER);
    REFUSED(runs, NULL, RT_BAD_POINTER);
    REFUSED(begin, NULL, RT_BAD_POINTER);
    REFUSED(end, NULL, RT_BAD_POINTER);
    REFUSED(key_begin, begin, RT_BAD_POINTER); // without key_end
    REFUSED(key_end, end, RT_BAD_POINTER);
    REFUSED(runs, ((const rt_run[]){{0, 1, 0, 4}, {4, 0, 0, 4}}), RT_BAD_RUN);
    REFUSED(runs, ((const rt_run[]){{0, 1, 0, 4}, {3, 1, 0, 4}}), RT_BAD_LAYOUT);
    REFUSED(workspace, NULL, RT_WORKSPACE);
    REFUSED(workspace, (char *)good.workspace + 8, RT_WORKSPACE);
    REFUSED(workspace_bytes, good.workspace_bytes - 1, RT_WORKSPACE);
#undef REFUSED
    rt_plan_params bad = good;
    bad.num_ranks = 0;
    CHECK(rt_plan_workspace_bytes(NULL) == 0 && rt_plan_workspace_bytes(&bad) == 0);
    CHECK_STATUS(rt_plan_rank(NULL, 0, false, &plan), RT_BAD_POINTER);
    CHECK_STATUS(rt_plan_rank(&good, -1, false, &plan), RT_BAD_RANK);
    CHECK_STATUS(rt_plan_rank(&good, 2, false, &plan), RT_BAD_RANK);
    CHECK_STATUS(rt_plan_rank(&good, 1, false, NULL), RT_BAD_POINTER);
    CHECK_STATUS(rt_plan_counts(&good, NULL, pairs), RT_BAD_POINTER);
    CHECK_STATUS(rt_plan_counts(&good, keys, NULL), RT_BAD_POINTER);

#define REFUSED(field, value, status)                                                                                  \
    do {                                                                                                               \
        plan = room;                                                                                                   \
        plan.field = value;                                                                                            \
        CHECK_STATUS(rt_plan_rank(&good, 0, false, &plan), status);                                                    \
    } while (0)
    REFUSED(rounds, NULL, RT_BAD_POINTER);
    REFUSED(incoming, NULL, RT_BAD_POINTER);
    REFUSED(outgoing, NULL, RT_BAD_POINTER);
    REFUSED(runs, NULL, RT_BAD_POINTER);
    REFUSED(capacity, -1, RT_BAD_SHAPE);
    REFUSED(capacity, INT64_MAX, RT_TOO_LARGE);
    REFUSED(capacity, 1, RT_CAPACITY);
    CHECK_INT(plan.num_runs, 3); // of its own keys, of those of rank 1, and of the block that these are
#undef REFUSED
    free(good.workspace);

    uint64_t digest;
    CHECK_STATUS(rt_digest("", -1, 0, &digest), RT_BAD_SHAPE);
    CHECK_STATUS(rt_digest(NULL, 1, 0, &digest), RT_BAD_POINTER);
    CHECK_STATUS(rt_digest("", 1, 0, NULL), RT_BAD_POINTER);
}

static uint64_t digest_of(const void *bytes, int64_t num_bytes, uint64_t seed) {
    uint64_t digest = 0;
    CHECK_STATUS(rt_digest(bytes, num_bytes, seed, &digest), RT_OK);
    return digest;
}

// A flipped bit, two swapped words, an added zero byte and another seed each change the digest.
static void test_digest_sees_every_change(void) {
    uint8_t bytes[101];
    uint64_t state = 4;
    for (int64_t length = 0; length <= 100; length++) {
        for (int64_t i = 0; i < length; i++) bytes[i] = (uint8_t)random_bits(&state);
        const uint64_t want = digest_of(bytes, length, 7);
        CHECK(want == digest_of(bytes, length, 7));
        CHECK(want != digest_of(bytes, length, 8));
        bytes[length] = 0;
        CHECK(want != digest_of(bytes, length + 1, 7));
        for (int64_t bit = 0; bit < 8 * length; bit++) {
            bytes[bit / 8] ^= (uint8_t)(1 << bit % 8);
            CHECK(want != digest_of(bytes, length, 7));
            bytes[bit / 8] ^= (uint8_t)(1 << bit % 8);
        }
        for (int64_t other = 8; other + 8 <= length; other += 8) {
            uint8_t swapped[100];
            memcpy(swapped, bytes, (size_t)length);
            memcpy(swapped, bytes + other, 8);
            memcpy(swapped + other, bytes, 8);
            CHECK(want != digest_of(swapped, length, 7));
        }
    }
    const uint64_t first = digest_of("ring", 4, 0), second = digest_of("tile", 4, 0);
    CHECK(digest_of("tile", 4, first) != digest_of("ring", 4, second));
    CHECK(digest_of(NULL, 0, 1) != digest_of(NULL, 0, 2));
}

// ---- masks with two sides ----------------------------------------------------------------------------------

static bool is_within(const int32_t *begin, const int32_t *end, int64_t of, int64_t position) {
    return begin[of] <= position && position < end[of];
}

// Any intervals, of all positions or of some.
static void test_meetings_are_counted_pair_by_pair(void) {
    uint64_t state = 31;
    for (int round = 0; round < 400; round++) {
        const int64_t S = random_int(&state, 0, 40);
        int32_t *bounds[4], *at[2];
        int64_t num[2];
        for (int i = 0; i < 4; i++) {
            bounds[i] = must_alloc((size_t)S * sizeof(int32_t));
            for (int64_t j = 0; j < S; j++)
                bounds[i][j] = (int32_t)(random_int(&state, 0, 9) ? random_int(&state, -1, S + 1) : INT32_MIN);
        }
        for (int i = 0; i < 2; i++) {
            const bool all = random_int(&state, 0, 2) == 0;
            at[i] = must_alloc((size_t)S * sizeof(int32_t));
            num[i] = 0;
            for (int32_t j = 0; j < S; j++)
                if (all || random_int(&state, 0, 1)) at[i][num[i]++] = j;
            if (all && random_int(&state, 0, 1)) free(at[i]), at[i] = NULL;
        }
        const rt_meetings_params p = {S,         num[0],    num[1],    at[0],     at[1],
                                      bounds[0], bounds[1], bounds[2], bounds[3], random_int(&state, 0, 5)};
        const int64_t scratch_len = rt_meetings_scratch_len(num[0], num[1]);
        int32_t *scratch = must_alloc((size_t)scratch_len * sizeof(int32_t));
        int32_t *first = must_alloc((size_t)num[0] * sizeof(int32_t) + 4);
        int32_t *after = must_alloc((size_t)num[0] * sizeof(int32_t) + 4);
        int64_t *counts = must_alloc((size_t)num[0] * sizeof(int64_t) + 8);
        const bool hulls = random_int(&state, 0, 1);
        CHECK_STATUS(rt_meetings(&p, counts, hulls ? first : NULL, hulls ? after : NULL, scratch), RT_OK);
        for (int64_t i = 0; i < num[0]; i++) {
            const int64_t x = at[0] == NULL ? i : at[0][i];
            int64_t count = 0, least = 0, most = 0;
            for (int64_t j = num[1] - 1; j >= 0; j--) { // the last first
                const int64_t y = at[1] == NULL ? j : at[1][j];
                if (!is_within(bounds[0], bounds[1], x, y) || !is_within(bounds[2], bounds[3], y, x)) continue;
                if (count == p.last && p.last > 0) break;
                if (count++ == 0) most = y + 1;
                least = y;
            }
            CHECK(counts[i] == count && (!hulls || (first[i] == least && after[i] == most)));
        }
        for (int i = 0; i < 4; i++) free(bounds[i]);
        free(at[0]), free(at[1]), free(scratch), free(first), free(after), free(counts);
    }
}

static void test_meetings_refuse_malformed_params(void) {
    const int32_t bounds[4] = {0}, falling[2] = {2, 1}, outside[2] = {0, 4};
    int64_t counts[4];
    int32_t scratch[32], hull[4];
    const rt_meetings_params good = {4, 4, 4, NULL, NULL, bounds, bounds, bounds, bounds, 0};
    CHECK_STATUS(rt_meetings(&good, counts, NULL, NULL, scratch), RT_OK);
    CHECK_STATUS(rt_meetings(NULL, counts, NULL, NULL, scratch), RT_BAD_POINTER);
    CHECK_STATUS(rt_meetings(&good, NULL, NULL, NULL, scratch), RT_BAD_POINTER);
    CHECK_STATUS(rt_meetings(&good, counts, NULL, NULL, NULL), RT_BAD_POINTER);
    CHECK_STATUS(rt_meetings(&good, counts, hull, NULL, scratch), RT_BAD_POINTER);
    CHECK(rt_meetings_scratch_len(-1, 0) == 0 && rt_meetings_scratch_len(0, INT64_MAX) == 0);
#define REFUSED(field, value, status)                                                                                  \
    do {                                                                                                               \
        rt_meetings_params bad = good;                                                                                 \
        bad.field = value;                                                                                             \
        CHECK_STATUS(rt_meetings(&bad, counts, NULL, NULL, scratch), status);                                          \
    } while (0)
    REFUSED(seq_len, -1, RT_BAD_SHAPE);
    REFUSED(seq_len, INT64_MAX, RT_BAD_SHAPE);
    REFUSED(last, -1, RT_BAD_SHAPE);
    REFUSED(num_x, 5, RT_BAD_SHAPE);
    REFUSED(num_y, 3, RT_BAD_SHAPE); // not all, and no positions
    REFUSED(x_begin, NULL, RT_BAD_POINTER);
    REFUSED(y_end, NULL, RT_BAD_POINTER);
    rt_meetings_params some = good;
    some.x = falling, some.num_x = 2;
    CHECK_STATUS(rt_meetings(&some, counts, NULL, NULL, scratch), RT_BAD_POSITIONS);
    some.x = outside;
    CHECK_STATUS(rt_meetings(&some, counts, NULL, NULL, scratch), RT_BAD_POSITIONS);
#undef REFUSED
}

int main(void) {
    test_random_plans_equal_the_oracle();
    test_causal_zigzag_over_two_ranks();
    test_a_single_token_has_any_stride();
    test_plan_refuses_malformed_params();
    test_digest_sees_every_change();
    test_meetings_are_counted_pair_by_pair();
    test_meetings_refuse_malformed_params();
    return check_finish();
}
