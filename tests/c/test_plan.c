// The plan against an oracle that tries every query with every key, and the digest.
#include "layouts.h"

typedef struct mask {
    int64_t batch, seq_len;
    int32_t *begin, *end; // (batch, S)
} mask;

// Causal, documents, windows, noise (with bounds outside 0..S too, up to the ends of int32), or empty.
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
                *begin = (int32_t)random_int(state, -5, seq_len + 5);
                *end = (int32_t)random_int(state, -5, seq_len + 5);
                if (random_int(state, 0, 9) == 0) *begin = INT32_MIN;
                if (random_int(state, 0, 9) == 0) *end = random_int(state, 0, 1) ? INT32_MIN : INT32_MAX;
            }
            if (kind == 4) *end = *begin;
        }
    }
    return m;
}

static bool attends(const mask *m, int64_t b, int64_t query, int64_t key) {
    return m->begin[b * m->seq_len + query] <= key && key < m->end[b * m->seq_len + query];
}

static int64_t *positions_of(const layout *l, int64_t rank) {
    const int64_t local_len = local_len_of(l, rank);
    int64_t *positions = must_alloc((size_t)local_len * sizeof(*positions));
    const int64_t first = l->run_offsets[rank];
    CHECK_STATUS(rt_runs_positions(l->runs + first, l->run_offsets[rank + 1] - first, positions, local_len), RT_OK);
    return positions;
}

// The needed runs hold exactly the attended keys, in local order, and no two of them could be one run.
static void check_needed(const rt_run *needed, int64_t num_needed, const int64_t *keys, int64_t num_keys,
                         const int64_t *attended) {
    int64_t local = 0;
    bool exact = true, maximal = true;
    for (int64_t r = 0; r < num_needed; r++) {
        const rt_run run = needed[r];
        for (; local < run.local_begin; local++) exact &= !attended[keys[local]];
        exact &= run.length >= 1 && run.stride >= 1 && run.local_begin + run.length <= num_keys;
        for (int64_t j = 0; exact && j < run.length; j++, local++)
            exact &= attended[keys[local]] > 0 && keys[local] == run.global_begin + j * run.stride;
        if (r == 0) continue;
        const rt_run before = needed[r - 1];
        maximal &= before.stride != run.stride || before.local_begin + before.length != run.local_begin ||
                   before.global_begin + before.length * before.stride != run.global_begin;
    }
    for (; local < num_keys; local++) exact &= !attended[keys[local]];
    CHECK(exact);
    CHECK(maximal);
}

static void check_plan(uint64_t *state, int64_t seq_len) {
    const layout l = random_layout(state, seq_len);
    const mask m = random_mask(state, seq_len);
    const rt_plan_params p = {.num_ranks = l.num_ranks,
                              .seq_len = seq_len,
                              .mask_batch = m.batch,
                              .runs = l.runs,
                              .run_offsets = l.run_offsets,
                              .begin = m.begin,
                              .end = m.end};
    const size_t counts_bytes = (size_t)(seq_len + 1) * sizeof(int64_t);
    int64_t *attended = must_alloc(counts_bytes), *attended_of_rank = must_alloc(counts_bytes);
    int64_t *want = must_alloc(counts_bytes);
    int32_t *below = must_alloc((size_t)(seq_len + 1) * sizeof(*below));
    rt_run *needed = must_alloc((size_t)seq_len * sizeof(*needed));
    rt_run *needed_of_rank = must_alloc((size_t)seq_len * sizeof(*needed));

    for (int64_t query_rank = 0; query_rank < l.num_ranks; query_rank++) {
        const int64_t num_queries = local_len_of(&l, query_rank);
        int64_t *queries = positions_of(&l, query_rank);
        memset(want, 0, counts_bytes);
        for (int64_t key = 0; key < seq_len; key++)
            for (int64_t b = 0; b < m.batch; b++)
                for (int64_t i = 0; i < num_queries; i++) want[key] += attends(&m, b, queries[i], key);
        CHECK_STATUS(rt_plan_attended(&p, query_rank, NULL, attended), RT_OK);
        CHECK(memcmp(attended, want, (size_t)seq_len * sizeof(*want)) == 0);

        for (int64_t key_rank = 0; key_rank < l.num_ranks; key_rank++) {
            const int64_t num_keys = local_len_of(&l, key_rank);
            int64_t *keys = positions_of(&l, key_rank);
            int64_t want_pairs = 0, num_needed, num_needed_of_rank, num_pairs;
            for (int64_t j = 0; j < num_keys; j++) want_pairs += want[keys[j]];
            CHECK_STATUS(rt_plan_needed(&p, key_rank, NULL, attended, needed, seq_len, &num_needed, &num_pairs), RT_OK);
            CHECK_INT(num_pairs, want_pairs);
            check_needed(needed, num_needed, keys, num_keys, attended);
            int64_t counted = -1;
            CHECK_STATUS(rt_plan_needed(&p, key_rank, NULL, attended, NULL, 0, &counted, &num_pairs),
                         num_needed > 0 ? RT_CAPACITY : RT_OK);
            CHECK_INT(counted, num_needed);

            // The same result when only this rank's keys are counted.
            CHECK_STATUS(rt_plan_below(&p, key_rank, below), RT_OK);
            CHECK_INT(below[seq_len], num_keys);
            CHECK_STATUS(rt_plan_attended(&p, query_rank, below, attended_of_rank), RT_OK);
            CHECK_STATUS(rt_plan_needed(&p, key_rank, below, attended_of_rank, needed_of_rank, seq_len,
                                        &num_needed_of_rank, &num_pairs),
                         RT_OK);
            CHECK_INT(num_pairs, want_pairs);
            CHECK_INT(num_needed_of_rank, num_needed);
            CHECK(memcmp(needed_of_rank, needed, (size_t)num_needed * sizeof(*needed)) == 0);
            free(keys);
        }
        free(queries);
    }
    free(m.begin);
    free(m.end);
    free(attended);
    free(attended_of_rank);
    free(want);
    free(below);
    free(needed);
    free(needed_of_rank);
}

static void test_random_plans_equal_the_oracle(void) {
    uint64_t state = 3;
    for (int round = 0; round < 400; round++) check_plan(&state, random_int(&state, 0, 50));
    for (int round = 0; round < 10; round++) check_plan(&state, random_int(&state, 150, 250));
}

// Rank 0 holds 0-3 and 12-15, rank 1 holds 4-11.
static void test_causal_zigzag_over_two_ranks(void) {
    const rt_run runs[] = {{0, 1, 0, 4}, {12, 1, 4, 4}, {4, 1, 0, 8}};
    int32_t begin[16] = {0}, end[16];
    for (int32_t i = 0; i < 16; i++) end[i] = i + 1;
    const rt_plan_params p = {2, 16, 1, runs, (int64_t[]){0, 2, 3}, begin, end};
    int64_t attended[17];
    rt_run needed[2];
    int64_t num_needed, num_pairs;

    CHECK_STATUS(rt_plan_attended(&p, 1, NULL, attended), RT_OK);
    for (int g = 0; g < 16; g++) CHECK_INT(attended[g], g < 4 ? 8 : g < 12 ? 12 - g : 0);
    CHECK_STATUS(rt_plan_needed(&p, 0, NULL, attended, needed, 2, &num_needed, &num_pairs), RT_OK);
    CHECK_INT(num_needed, 1);
    CHECK(memcmp(&needed[0], &(rt_run){0, 1, 0, 4}, sizeof(rt_run)) == 0);
    CHECK_INT(num_pairs, 8 * 4);

    CHECK_STATUS(rt_plan_attended(&p, 0, NULL, attended), RT_OK);
    CHECK_STATUS(rt_plan_needed(&p, 0, NULL, attended, needed, 2, &num_needed, &num_pairs), RT_OK);
    CHECK_INT(num_needed, 2);
    CHECK_INT(num_pairs, (1 + 2 + 3 + 4) + (13 + 14 + 15 + 16) - 4 * 8);
}

// Runs that continue each other, locally and globally, travel as one.
static void test_runs_that_touch_are_merged(void) {
    const rt_run runs[] = {{4, 2, 2, 2}, {0, 2, 0, 2}, {1, 2, 0, 4}};
    const int32_t begin[8] = {0}, end[8] = {0, 8};
    const rt_plan_params p = {2, 8, 1, runs, (int64_t[]){0, 2, 3}, begin, end};
    int64_t attended[9];
    rt_run needed;
    int64_t num_needed, num_pairs;
    CHECK_STATUS(rt_plan_attended(&p, 1, NULL, attended), RT_OK);
    CHECK_STATUS(rt_plan_needed(&p, 0, NULL, attended, &needed, 1, &num_needed, &num_pairs), RT_OK);
    CHECK_INT(num_needed, 1);
    CHECK(memcmp(&needed, &(rt_run){0, 2, 0, 4}, sizeof(rt_run)) == 0);
    CHECK_INT(num_pairs, 4);
}

static void test_plan_refuses_malformed_params(void) {
    const rt_run runs[] = {{0, 1, 0, 4}, {4, 1, 0, 4}};
    const int32_t begin[8] = {0}, end[8] = {0};
    const rt_plan_params good = {2, 8, 1, runs, (int64_t[]){0, 1, 2}, begin, end};
    int64_t attended[9];
    int32_t below[9];
    int64_t num_needed, num_pairs;
    CHECK_STATUS(rt_plan_attended(&good, 1, NULL, attended), RT_OK);

#define REFUSED(field, value, status)                                                                                  \
    do {                                                                                                               \
        rt_plan_params bad = good;                                                                                     \
        bad.field = value;                                                                                             \
        CHECK_STATUS(rt_plan_below(&bad, 1, below), status);                                                           \
        CHECK_STATUS(rt_plan_attended(&bad, 1, NULL, attended), status);                                               \
        CHECK_STATUS(rt_plan_needed(&bad, 1, NULL, attended, NULL, 0, &num_needed, &num_pairs), status);               \
    } while (0)
    REFUSED(num_ranks, 0, RT_BAD_SHAPE);
    REFUSED(num_ranks, 1, RT_BAD_RANK);
    REFUSED(seq_len, -1, RT_BAD_SHAPE);
    REFUSED(seq_len, (int64_t)INT32_MAX + 1, RT_BAD_SHAPE);
    REFUSED(seq_len, 3, RT_BAD_LAYOUT);
    REFUSED(seq_len, 7, RT_BAD_RUN);
    REFUSED(mask_batch, -1, RT_BAD_SHAPE);
    REFUSED(mask_batch, INT64_MAX / 16, RT_TOO_LARGE);
    REFUSED(run_offsets, ((const int64_t[]){0, INT64_MIN, INT64_MAX}), RT_BAD_LAYOUT);
    REFUSED(runs, NULL, RT_BAD_POINTER);
    REFUSED(begin, NULL, RT_BAD_POINTER);
    REFUSED(end, NULL, RT_BAD_POINTER);
    REFUSED(run_offsets, NULL, RT_BAD_POINTER);
    REFUSED(run_offsets, ((const int64_t[]){0, 1, 0}), RT_BAD_LAYOUT);
    REFUSED(runs, ((const rt_run[]){{0, 1, 0, 4}, {4, 0, 0, 4}}), RT_BAD_RUN);
#undef REFUSED
    CHECK_STATUS(rt_plan_attended(&good, -1, NULL, attended), RT_BAD_RANK);
    CHECK_STATUS(rt_plan_attended(&good, 2, NULL, attended), RT_BAD_RANK);
    CHECK_STATUS(rt_plan_attended(&good, 0, NULL, NULL), RT_BAD_POINTER);
    CHECK_STATUS(rt_plan_below(&good, 2, below), RT_BAD_RANK);
    CHECK_STATUS(rt_plan_below(&good, 0, NULL), RT_BAD_POINTER);
    CHECK_STATUS(rt_plan_needed(&good, 2, NULL, attended, NULL, 0, &num_needed, &num_pairs), RT_BAD_RANK);
    CHECK_STATUS(rt_plan_needed(&good, 1, NULL, NULL, NULL, 0, &num_needed, &num_pairs), RT_BAD_POINTER);
    CHECK_STATUS(rt_plan_needed(&good, 1, NULL, attended, NULL, 1, &num_needed, &num_pairs), RT_BAD_POINTER);
    CHECK_STATUS(rt_plan_needed(&good, 1, NULL, attended, NULL, 0, NULL, &num_pairs), RT_BAD_POINTER);
    CHECK_STATUS(rt_plan_needed(&good, 1, NULL, attended, NULL, 0, &num_needed, NULL), RT_BAD_POINTER);
    CHECK_STATUS(rt_plan_needed(&good, 1, NULL, attended, NULL, -1, &num_needed, &num_pairs), RT_BAD_SHAPE);

    // Arrays that rt_plan_below and rt_plan_attended cannot have written.
    const int32_t too_many[9] = {0, 1, 2, 3, 4, 5, 6, 7, 9}, inside[9] = {0, 0, 0, 0, 0, 100, 2, 3, 4};
    const int64_t too_often[9] = {9, 9, 9, 9, 9, 9, 9, 9, 9};
    const int32_t all[8] = {8, 8, 8, 8, 8, 8, 8, 8}, fives[8] = {5, 5, 5, 5, 5, 5, 5, 5};
    rt_plan_params busy = good;
    busy.begin = fives, busy.end = all;
    CHECK_STATUS(rt_plan_attended(&good, 1, too_many, attended), RT_BAD_PLAN);
    CHECK_STATUS(rt_plan_attended(&busy, 1, inside, attended), RT_BAD_PLAN);
    CHECK_STATUS(rt_plan_needed(&good, 1, inside, attended, NULL, 0, &num_needed, &num_pairs), RT_BAD_PLAN);
    CHECK_STATUS(rt_plan_needed(&good, 1, NULL, too_often, NULL, 0, &num_needed, &num_pairs), RT_BAD_PLAN);
    uint64_t digest;
    CHECK_STATUS(rt_digest("", -1, 0, &digest), RT_BAD_SHAPE);
    CHECK_STATUS(rt_digest(NULL, 1, 0, &digest), RT_BAD_POINTER);
    CHECK_STATUS(rt_digest("", 1, 0, NULL), RT_BAD_POINTER);

    // Two runs of one rank at the same local tokens.
    const rt_run overlap[] = {{0, 1, 0, 4}, {4, 1, 0, 2}, {6, 1, 0, 2}};
    const rt_plan_params broken = {2, 8, 1, overlap, (int64_t[]){0, 1, 3}, begin, end};
    CHECK_STATUS(rt_plan_needed(&broken, 1, NULL, attended, NULL, 0, &num_needed, &num_pairs), RT_BAD_RUN);
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
    CHECK_STATUS(rt_meetings(&some, counts, NULL, NULL, scratch), RT_BAD_PLAN);
    some.x = outside;
    CHECK_STATUS(rt_meetings(&some, counts, NULL, NULL, scratch), RT_BAD_PLAN);
#undef REFUSED
}

int main(void) {
    test_random_plans_equal_the_oracle();
    test_causal_zigzag_over_two_ranks();
    test_runs_that_touch_are_merged();
    test_plan_refuses_malformed_params();
    test_digest_sees_every_change();
    test_meetings_are_counted_pair_by_pair();
    test_meetings_refuse_malformed_params();
    return check_finish();
}
