// The merge of a block of attention against its formula in long double, for any shape, memory layout, rows and dtype.
#include "attn_case.h"

typedef struct merge_case {
    rt_attn_merge_params p;
    tensor part, part_lse, out, lse, rounded; // the log-sum-exps as (B, N, H, 1), laid out as (B, H, N)
    int64_t *rows;                            // as the params say or, without rows, as first_row does
} merge_case;

static tensor contiguous(rt_dtype dtype, int64_t num_batches, int64_t num_tokens, int64_t num_heads, int64_t dim) {
    tensor t = new_row_numbers(dtype, num_batches, num_tokens, num_heads * dim);
    t.size[2] = num_heads, t.size[3] = dim;
    t.stride[0] = num_tokens * num_heads * dim, t.stride[1] = num_heads * dim, t.stride[2] = dim;
    return t;
}

// P batches of M queries of part into B of N, from first_row on; or, with_rows, into some M of all B N.
static merge_case new_merge_case(uint64_t *state, rt_dtype dtype, int64_t B, int64_t N, int64_t H, int64_t dim,
                                 int64_t P, int64_t M, int64_t first_row, bool with_rows, bool fresh, bool rounds) {
    merge_case c = {.part = new_tensor(state, dtype, P, M, H, dim),
                    .part_lse = new_row_numbers(state_dtype(dtype), P, M, H),
                    .out = contiguous(state_dtype(dtype), B, N, H, dim),
                    .lse = new_row_numbers(RT_F64, B, N, H),
                    .rounded = contiguous(dtype, rounds ? B : 0, N, H, dim),
                    .rows = must_alloc((size_t)(P * M) * sizeof(int64_t))};
    fill_random(&c.part, state, 2), fill_random(&c.part_lse, state, 4);
    fill_random(&c.out, state, 2), fill_random(&c.lse, state, 4), fill(&c.rounded, GAP);
    int64_t left = P * M; // each of the B N rows is taken with the share of those left to take
    for (int64_t row = 0; with_rows && left > 0; row++)
        if (random_int(state, 1, B * N - row) <= left) c.rows[P * M - left--] = row;
    for (int64_t i = 0; !with_rows && i < P * M; i++) c.rows[i] = first_row + i / M * N + i % M;
    c.p = (rt_attn_merge_params){.dtype = dtype,
                                 .batch = B,
                                 .num_queries = N,
                                 .num_heads = H,
                                 .v_head_dim = dim,
                                 .part_batch = P,
                                 .part_queries = M,
                                 .first_row = first_row,
                                 .rows = with_rows ? c.rows : NULL,
                                 .fresh = fresh,
                                 .part = c.part.data,
                                 .part_lse = c.part_lse.data,
                                 .out = c.out.data,
                                 .lse = c.lse.data,
                                 .rounded = rounds ? c.rounded.data : NULL};
    memcpy(c.p.part_stride, c.part.stride, sizeof(c.p.part_stride));
    return c;
}

static void free_merge_case(merge_case *c) {
    free(c->part.data), free(c->part_lse.data), free(c->out.data), free(c->lse.data), free(c->rounded.data);
    free(c->rows);
}

// In the state dtype the share, the way from one to the other, and the sum are rounded: 3 u of numbers as large as
// both; rounding to dtype adds one of the result. A log-sum-exp has 4 roundings in f64 of numbers below 16.
static void check_merge(merge_case *c, rt_parallel parallel) {
    uint64_t unused = 1;
    tensor before = copy_as(&c->out, RT_F64, &unused), lse_before = copy_as(&c->lse, RT_F64, &unused);
    CHECK_STATUS(rt_attn_merge(&c->p, parallel), RT_OK);
    const int64_t N = c->out.size[1], M = c->part.size[1];
    const double u = unit_roundoff(c->out.dtype), half = c->p.rounded != NULL ? unit_roundoff(c->part.dtype) : 0;
    FOR_EACH_ELEMENT(&c->out, b, token, head, d) {
        int64_t i = 0;
        while (i < c->part.size[0] * M && c->rows[i] != b * N + token) i++;
        const bool merges = i < c->part.size[0] * M;
        const long double lse = c->p.fresh ? (long double)-INFINITY : (long double)get(&lse_before, b, token, head, 0);
        const long double y = c->p.fresh ? 0 : (long double)get(&before, b, token, head, d);
        long double share = 0, want = y, want_lse = lse;
        if (merges) {
            const long double new = get(&c->part_lse, i / M, i % M, head, 0), x = get(&c->part, i / M, i % M, head, d);
            if (!isinf(new)) share = 1 / (1 + expl(lse - new)), want_lse = logl(expl(lse) + expl(new));
            want = y + share * (x - y);
            if (!(want_lse == -INFINITY)) {
                CHECK_CLOSE(get(&c->lse, b, token, head, 0), (double)want_lse, 0x1p-47);
            } else {
                CHECK(get(&c->lse, b, token, head, 0) == -INFINITY);
            }
            const tensor *written = c->p.rounded != NULL ? &c->rounded : &c->out;
            const double got = get(written, b, token, head, d), size = (double)(fabsl(x) + fabsl(y));
            if (isnan((double)want)) {
                CHECK(isnan(got));
            } else {
                CHECK_CLOSE(got, (double)want, 3 * u * size + half * fabs((double)want) + smallest(c->part.dtype));
            }
        }
        if (!merges || c->p.rounded != NULL) CHECK(get(&c->out, b, token, head, d) == get(&before, b, token, head, d));
        if (!merges) {
            CHECK(get(&c->lse, b, token, head, 0) == get(&lse_before, b, token, head, 0));
            if (c->p.rounded != NULL) CHECK(get(&c->rounded, b, token, head, d) == GAP);
        }
    }
    free(before.data), free(lse_before.data);
}

static void test_every_head_dim_of_every_dtype(void) {
    uint64_t state = 23;
    const int64_t dims[] = {1, 2, 7, 8, 16, 17, 64, 100, 128, 192, 256, 512};
    for (int i = 0; i < (int)(sizeof(dims) / sizeof(dims[0])) * NUM_DTYPES * 2; i++) {
        const int64_t B = random_int(&state, 1, 2), N = random_int(&state, 1, 50), M = random_int(&state, 1, N);
        const int64_t first = random_int(&state, 0, N - M), P = random_int(&state, 1, B);
        merge_case c =
            new_merge_case(&state, all_dtypes[i % NUM_DTYPES], B, N, random_int(&state, 1, 3), dims[i / NUM_DTYPES / 2],
                           P, M, first, i / NUM_DTYPES % 2, random_int(&state, 0, 1), random_int(&state, 0, 1));
        check_merge(&c, threads_of(1 + i % 3));
        free_merge_case(&c);
    }
}

// One stretch of rows over the end of a batch, as packed sequences of two batches have it.
static void test_a_stretch_over_two_batches(void) {
    uint64_t state = 24;
    for (int i = 0; i < NUM_DTYPES; i++) {
        merge_case c = new_merge_case(&state, all_dtypes[i], 2, 20, 2, 16, 1, 25, 9, false, i % 2, false);
        check_merge(&c, no_threads());
        free_merge_case(&c);
    }
}

// No key before, none now, both; a share of 0 and of 1 to the last bit; NaN stays, also in a row without a weight.
static void test_rows_without_a_weight(void) {
    uint64_t state = 25;
    for (int i = 0; i < NUM_DTYPES * 2; i++) {
        merge_case c = new_merge_case(&state, all_dtypes[i / 2], 1, 12, 2, 24, 1, 12, 0, false, i % 2, false);
        const double part[] = {-INFINITY, INFINITY, 1, -INFINITY, -900, 900, INFINITY};
        const double before[] = {1, 1, -INFINITY, -INFINITY, 0, 0, 1};
        for (int row = 0; row < 7; row++) {
            set(&c.part_lse, 0, row, 1, 0, part[row]);
            set(&c.lse, 0, row, 1, 0, before[row]);
        }
        set(&c.part, 0, 6, 1, 3, NAN);
        check_merge(&c, threads_of(2));
        free_merge_case(&c);
    }
}

static void test_malformed_params_are_refused(void) {
    float part[8] = {0}, part_lse[2] = {0}, out[8] = {7}, rounded[8];
    double lse[2] = {0};
    const int64_t twice[2] = {1, 1}, beyond[2] = {0, 2};
    const rt_attn_merge_params good = {.dtype = RT_F32,
                                       .batch = 1,
                                       .num_queries = 2,
                                       .num_heads = 1,
                                       .v_head_dim = 4,
                                       .part_batch = 1,
                                       .part_queries = 2,
                                       .part_stride = {8, 4, 4},
                                       .part = part,
                                       .part_lse = part_lse,
                                       .out = out,
                                       .lse = lse};
#define REFUSED(field, value, status)                                                                                  \
    CHECK_REFUSED(rt_attn_merge_params, good, field, value, rt_attn_merge(&bad, no_threads()), status)
    REFUSED(dtype, (rt_dtype)4, RT_BAD_DTYPE);
    REFUSED(batch, -1, RT_BAD_SHAPE);
    REFUSED(part_queries, -1, RT_BAD_SHAPE);
    REFUSED(num_heads, 0, RT_BAD_SHAPE);
    REFUSED(v_head_dim, 0, RT_BAD_HEAD_DIM);
    REFUSED(v_head_dim, RT_MAX_HEAD_DIM + 1, RT_BAD_HEAD_DIM);
    REFUSED(batch, INT64_MAX, RT_TOO_LARGE);
    REFUSED(part_batch, INT64_MAX, RT_TOO_LARGE);
    REFUSED(part_queries, 3, RT_BAD_POSITIONS);
    REFUSED(part_batch, 2, RT_BAD_POSITIONS);
    REFUSED(first_row, 1, RT_BAD_POSITIONS);
    REFUSED(first_row, -1, RT_BAD_POSITIONS);
    REFUSED(first_row, INT64_MAX, RT_BAD_POSITIONS);
    REFUSED(part, NULL, RT_BAD_POINTER);
    REFUSED(part_lse, NULL, RT_BAD_POINTER);
    REFUSED(out, NULL, RT_BAD_POINTER);
    REFUSED(lse, NULL, RT_BAD_POINTER);
    REFUSED(rows, (const int64_t *)(const void *)((const char *)twice + 4), RT_BAD_POINTER);
    REFUSED(part, out, RT_SHARED_MEMORY);
    CHECK(strcmp(rt_wrong_argument(RT_SHARED_MEMORY, 0), "out") == 0);
    CHECK(strcmp(rt_wrong_argument(RT_SHARED_MEMORY, 1), "part") == 0);
    CHECK(strcmp(rt_wrong_argument(RT_BAD_POINTER, 0), "") == 0); // another status: the name is not of it
    REFUSED(rounded, part + 1, RT_SHARED_MEMORY);
#ifndef RINGTILE_TESTS_CORE_ON_EMULATOR_H // a device's numbers are not read before the launch
    REFUSED(rows, twice, RT_BAD_POSITIONS);
    REFUSED(rows, beyond, RT_BAD_POSITIONS);
#else
    (void)beyond;
#endif
#undef REFUSED
    CHECK_STATUS(rt_attn_merge(NULL, no_threads()), RT_BAD_POINTER);
    CHECK(out[0] == 7);
    rt_attn_merge_params ok = good;
    ok.rounded = rounded;
    CHECK_STATUS(rt_attn_merge(&ok, no_threads()), RT_OK);
    CHECK(out[0] == 7 && rounded[0] == 3.5F);
    ok.part_queries = 0;
    CHECK_STATUS(rt_attn_merge(&ok, no_threads()), RT_OK);
}

int main(void) {
    check_isa_or_skip();
    test_every_head_dim_of_every_dtype();
    test_a_stretch_over_two_batches();
    test_rows_without_a_weight();
    test_malformed_params_are_refused();
    return check_finish();
}
