// What plans and meetings are of small cases and of malformed ones, and the digest. tests/sequence/test_plan.py
// compares random plans with every pair of a query and a key; fuzz_seq.c makes as many under the sanitizers.
#include "check.h"

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

// Rank 0 holds 12-15 before 0-3, rank 1 holds 4-11.
static void test_causal_zigzag_over_two_ranks(void) {
    const rt_run layout_runs[] = {{12, 1, 0, 4}, {0, 1, 4, 4}, {4, 1, 0, 8}};
    int32_t begin[16] = {0}, end[16];
    for (int32_t i = 0; i < 16; i++) end[i] = i + 1;
    rt_plan_params p = {.num_ranks = 2, .seq_len = 16, .mask_batch = 1, .runs = layout_runs, .begin = begin};
    p.run_offsets = (int64_t[]){0, 2, 3}, p.end = end;
    give_workspace(&p);
    rt_round rounds[2];
    rt_transfer in[2], out[2];
    rt_run runs[16];
    rt_rank_plan plan = {rounds, in, out, runs, 16, 0};
    CHECK_STATUS(rt_plan_rank(&p, 0, false, &plan), RT_OK);
    CHECK(rounds[0].in_place && rounds[0].num_keys == 8 && rounds[0].num_runs == 2);
    CHECK_INT(rounds[0].num_pairs, (1 + 2 + 3 + 4) + (13 + 14 + 15 + 16) - 4 * 8);
    CHECK(!rounds[1].in_place && rounds[1].num_pairs == 4 * 8);
    CHECK(equal_runs(&runs[rounds[1].first_run], &(rt_run){4, 1, 0, 8}, 1));
    CHECK(in[1].rank == 1 && in[1].num_keys == 8 && in[1].is_head);
    CHECK(out[1].rank == 1 && out[1].num_keys == 4 && !out[1].is_head);
    CHECK(equal_runs(&runs[out[1].first_run], &(rt_run){4, 1, 0, 4}, 1));

    CHECK_STATUS(rt_plan_rank(&p, 1, false, &plan), RT_OK);
    CHECK(equal_runs(&runs[rounds[1].first_run], &(rt_run){0, 1, 0, 4}, 1)); // not at rank 0's own rows
    CHECK_STATUS(rt_plan_rank(&p, 1, true, &plan), RT_OK);                   // the block: 0-3 of rank 0, its own 4-11
    CHECK(!rounds[0].in_place && rounds[0].num_keys == 12 && rounds[0].num_runs == 1);
    CHECK(equal_runs(&runs[rounds[0].first_run], &(rt_run){0, 1, 0, 12}, 1));
    CHECK(in[0].num_keys == 4 && in[0].is_head && in[1].num_keys == 8 && !in[1].is_head);
    CHECK(equal_runs(&runs[in[1].first_run], &(rt_run){4, 1, 0, 8}, 1));
    for (int64_t i = 12; i < 16; i++) begin[i] = 6; // what rank 0 needs, 6-11, does not continue its own 0-3
    CHECK_STATUS(rt_plan_rank(&p, 0, true, &plan), RT_OK);
    CHECK(rounds[0].num_runs == 2);
    CHECK(equal_runs(&runs[rounds[0].first_run], (rt_run[]){{0, 1, 0, 4}, {6, 1, 4, 10}}, 2));
    free(p.workspace);
}

// At 1,024 ranks a rank's share of the workspace, not the sequence's.
static void test_the_workspace_is_that_of_one_rank(void) {
    enum { RANKS = 1024, SHARE = 128 };
    static rt_run runs[RANKS];
    static int64_t run_offsets[RANKS + 1];
    static int32_t begin[RANKS * SHARE], end[RANKS * SHARE];
    for (int64_t r = 0; r < RANKS; r++) runs[r] = (rt_run){r * SHARE, 1, 0, SHARE}, run_offsets[r + 1] = r + 1;
    rt_plan_params p = {.num_ranks = RANKS,
                        .seq_len = RANKS * SHARE,
                        .mask_batch = 1,
                        .runs = runs,
                        .run_offsets = run_offsets,
                        .begin = begin,
                        .end = end};
    CHECK(rt_plan_workspace_bytes(&p) <= RANKS * (int64_t)sizeof(rt_layout_place) + 64 * SHARE + 1024);
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
    CHECK_REFUSED(rt_meetings_params, good, field, value, rt_meetings(&bad, counts, NULL, NULL, scratch), status)
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
    test_causal_zigzag_over_two_ranks();
    test_the_workspace_is_that_of_one_rank();
    test_a_single_token_has_any_stride();
    test_plan_refuses_malformed_params();
    test_digest_sees_every_change();
    test_meetings_are_counted_pair_by_pair();
    test_meetings_refuse_malformed_params();
    return check_finish();
}
