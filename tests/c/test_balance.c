// Chunks of tokens dealt to ranks.
#include "check.h"

enum { MAX_RANKS = 6, MAX_CHUNKS = 60, MAX_TOKENS = 200, MAX_ROWS = 2 };

static int64_t most_of(int64_t num_ranks, int64_t num_chunks, const int64_t *work, const int64_t *owner) {
    int64_t loads[MAX_RANKS] = {0}, most = 0;
    for (int64_t c = 0; c < num_chunks; c++) loads[owner[c]] += work[c];
    for (int64_t rank = 0; rank < num_ranks; rank++) most = loads[rank] > most ? loads[rank] : most;
    return most;
}

static void test_ranks_get_as_many_chunks_and_no_more_work_than_neighbours_have(void) {
    uint64_t state = 5;
    for (int round = 0; round < 2000; round++) {
        int32_t begin[MAX_ROWS * MAX_TOKENS], end[MAX_ROWS * MAX_TOKENS];
        int64_t num_keys[MAX_ROWS * MAX_TOKENS], work[MAX_CHUNKS] = {0}, all = 0;
        rt_balance_params p = {.num_ranks = random_int(&state, 1, MAX_RANKS), .chunk = random_int(&state, 1, 9)};
        const int64_t C = random_int(&state, p.num_ranks, 20);
        p.seq_len = (C - 1) * p.chunk + random_int(&state, 1, p.chunk), p.mask_batch = random_int(&state, 0, MAX_ROWS);
        for (int64_t i = 0; i < p.mask_batch * p.seq_len; i++) {
            begin[i] = (int32_t)random_int(&state, -2, p.seq_len), end[i] = (int32_t)random_int(&state, 0, p.seq_len);
            const int64_t first = begin[i] < 0 ? 0 : begin[i];
            num_keys[i] = end[i] > first ? end[i] - first : 0;
            work[i % p.seq_len / p.chunk] += num_keys[i], all += num_keys[i];
        }
        p.begin = begin, p.end = end, p.num_keys = random_int(&state, 0, 1) ? num_keys : NULL;
        p.workspace_bytes = rt_balance_workspace_bytes(&p), p.workspace = aligned_alloc(64, (size_t)p.workspace_bytes);
        int64_t owner[MAX_CHUNKS], loads[MAX_RANKS], neighbours[MAX_CHUNKS], counts[MAX_RANKS] = {0};
        CHECK_STATUS(rt_balance(&p, owner, loads), RT_OK);
        free(p.workspace);
        for (int64_t c = 0; c < C; c++) {
            neighbours[c] = c * p.num_ranks / C;
            CHECK(0 <= owner[c] && owner[c] < p.num_ranks);
            counts[owner[c]]++;
        }
        int64_t expected[MAX_RANKS] = {0};
        for (int64_t c = 0; c < C; c++) expected[owner[c]] += work[c];
        for (int64_t rank = 0; rank < p.num_ranks; rank++) {
            CHECK(counts[rank] == C / p.num_ranks || counts[rank] == (C - 1) / p.num_ranks + 1);
            CHECK_INT(loads[rank], expected[rank]);
        }
        const int64_t most = most_of(p.num_ranks, C, work, owner);
        const int64_t before = most_of(p.num_ranks, C, work, neighbours);
        CHECK(most <= before || (double)most * (double)p.num_ranks <= 1.03 * (double)all);
    }
}

// Ranks share one long document and short ones; chunks of the long one do up to 100 times the work of others.
static void test_many_ranks_do_the_same(void) {
    enum { S = 1 << 18, W = 128, CHUNK = 8, C = S / CHUNK, LONG = 100000, SHORT = 1000 };
    int32_t *begin = must_alloc(S * sizeof(*begin)), *end = must_alloc(S * sizeof(*end));
    int64_t *owner = must_alloc(C * sizeof(*owner)), loads[W], all = 0, most = 0, num_runs = 1;
    for (int32_t i = 0; i < S; i++) begin[i] = i < LONG ? 0 : i - i % SHORT, end[i] = i + 1;
    rt_balance_params p = {.num_ranks = W, .seq_len = S, .mask_batch = 1, .chunk = CHUNK, .begin = begin, .end = end};
    p.workspace_bytes = rt_balance_workspace_bytes(&p);
    CHECK(p.workspace_bytes < 48 * C + 64 * W);
    p.workspace = aligned_alloc(64, (size_t)p.workspace_bytes);
    CHECK_STATUS(rt_balance(&p, owner, loads), RT_OK);
    for (int64_t rank = 0; rank < W; rank++) all += loads[rank], most = loads[rank] > most ? loads[rank] : most;
    for (int64_t c = 1; c < C; c++) num_runs += owner[c] != owner[c - 1];
    CHECK((double)most * W <= 1.03 * (double)all);
    CHECK(num_runs <= 2 * W);
    free(begin), free(end), free(owner), free(p.workspace);
}

static void test_malformed_params_are_refused(void) {
    int32_t begin[8] = {0}, end[8] = {1, 2, 3, 4, 5, 6, 7, 8};
    int64_t owner[4], loads[2], num_keys[8] = {0};
    rt_balance_params good = {.num_ranks = 2, .seq_len = 8, .mask_batch = 1, .chunk = 2, .begin = begin, .end = end};
    good.workspace_bytes = rt_balance_workspace_bytes(&good),
    good.workspace = aligned_alloc(64, (size_t)good.workspace_bytes);
    CHECK_STATUS(rt_balance(&good, owner, loads), RT_OK);
    CHECK_STATUS(rt_balance(NULL, owner, loads), RT_BAD_POINTER);
    CHECK_STATUS(rt_balance(&good, NULL, loads), RT_BAD_POINTER);
    CHECK_STATUS(rt_balance(&good, owner, NULL), RT_BAD_POINTER);
#define REFUSED(field, value, status)                                                                                  \
    CHECK_REFUSED(rt_balance_params, good, field, value, rt_balance(&bad, owner, loads), status)
    REFUSED(num_ranks, 0, RT_BAD_SHAPE);
    REFUSED(num_ranks, 5, RT_BAD_SHAPE);
    REFUSED(seq_len, 0, RT_BAD_SHAPE);
    REFUSED(seq_len, (int64_t)INT32_MAX + 1, RT_BAD_SHAPE);
    REFUSED(mask_batch, -1, RT_BAD_SHAPE);
    REFUSED(mask_batch, INT64_MAX / 8, RT_TOO_LARGE);
    REFUSED(chunk, 0, RT_BAD_SHAPE);
    REFUSED(begin, NULL, RT_BAD_POINTER);
    REFUSED(end, NULL, RT_BAD_POINTER);
    REFUSED(num_keys, (const int64_t *)((const char *)num_keys + 1), RT_BAD_POINTER);
    REFUSED(workspace, NULL, RT_WORKSPACE);
    REFUSED(workspace_bytes, good.workspace_bytes - 1, RT_WORKSPACE);
#undef REFUSED
    rt_balance_params many = good;
    many.seq_len = many.num_ranks = INT32_MAX, many.chunk = 1;
    CHECK_INT(rt_balance_workspace_bytes(&many), 0);
    free(good.workspace);
}

int main(void) {
    test_ranks_get_as_many_chunks_and_no_more_work_than_neighbours_have();
    test_many_ranks_do_the_same();
    test_malformed_params_are_refused();
    return check_finish();
}
