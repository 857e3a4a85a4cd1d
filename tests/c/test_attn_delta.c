// The delta of the attention backward against its formula in long double, for any shape, memory layout and dtype.
#include "attn_case.h"

// dlse, or NULL, and delta: (B, H, N) contiguous.
static rt_status run_delta(const tensor *dout, const tensor *out, const tensor *dlse, tensor *delta,
                           rt_parallel parallel) {
    rt_attn_delta_params p = {.dtype = dout->dtype,
                              .batch = dout->size[0],
                              .num_queries = dout->size[1],
                              .num_heads = dout->size[2],
                              .v_head_dim = dout->size[3]};
    memcpy(p.dout_stride, dout->stride, sizeof(p.dout_stride));
    memcpy(p.out_stride, out->stride, sizeof(p.out_stride));
    return rt_attn_delta(&p, dout->data, out->data, dlse == NULL ? NULL : dlse->data, delta->data, parallel);
}

// A sum of Dv products, in any order, is off by at most Dv u times the sum of their absolute values. Subtracting dlse
// and rounding to the state dtype add u times the result each.
static void check_delta(const tensor *dout, const tensor *out, const tensor *dlse, rt_parallel parallel) {
    const rt_dtype state = state_dtype(dout->dtype);
    tensor delta = new_row_numbers(state, dout->size[0], dout->size[1], dout->size[2]);
    CHECK_STATUS(run_delta(dout, out, dlse, &delta, parallel), RT_OK);
    FOR_EACH_ELEMENT(&delta, b, token, head, unit) {
        long double sum = 0, magnitude = 0;
        for (int64_t d = 0; d < dout->size[3]; d++) {
            const long double term = (long double)get(dout, b, token, head, d) * get(out, b, token, head, d);
            sum += term, magnitude += fabsl(term);
        }
        const long double want = sum - (dlse == NULL ? 0 : get(dlse, b, token, head, unit));
        const double bound = unit_roundoff(state) * (double)((long double)dout->size[3] * magnitude + 2 * fabsl(want));
        const double got = get(&delta, b, token, head, unit);
        if (isfinite((double)want))
            CHECK_CLOSE(got, (double)want, bound + smallest(state));
        else
            CHECK(!isfinite(got));
    }
    free(delta.data);
}

typedef struct delta_case {
    tensor dout, out, dlse;
} delta_case;

static delta_case new_delta_case(uint64_t *state, rt_dtype dtype, int64_t num_batches, int64_t num_tokens,
                                 int64_t num_heads, int64_t dim) {
    delta_case c = {new_tensor(state, dtype, num_batches, num_tokens, num_heads, dim),
                    new_tensor(state, dtype, num_batches, num_tokens, num_heads, dim),
                    new_row_numbers(RT_F64, num_batches, num_tokens, num_heads)};
    fill_random(&c.dout, state, 2);
    fill_random(&c.out, state, 1);
    fill_random(&c.dlse, state, 3);
    return c;
}

static void free_delta_case(delta_case *c) {
    free(c->dout.data);
    free(c->out.data);
    free(c->dlse.data);
}

static void test_every_head_dim_of_every_dtype(void) {
    uint64_t state = 17;
    const int64_t dims[] = {1, 2, 3, 7, 8, 15, 16, 17, 33, 64, 72, 96, 100, 127, 128, 192, 255, 256, 257, 512};
    for (int i = 0; i < (int)(sizeof(dims) / sizeof(dims[0])) * NUM_DTYPES; i++) {
        delta_case c = new_delta_case(&state, all_dtypes[i % NUM_DTYPES], random_int(&state, 1, 2),
                                      random_int(&state, 1, 70), random_int(&state, 1, 3), dims[i / NUM_DTYPES]);
        check_delta(&c.dout, &c.out, &c.dlse, threads_of(1 + i % 3));
        check_delta(&c.dout, &c.out, NULL, threads_of(1 + i % 3));
        free_delta_case(&c);
    }
}

// One gradient for all heads and tokens, as an expanded tensor has it.
static void test_strides_of_zero(void) {
    uint64_t state = 18;
    for (int i = 0; i < NUM_DTYPES; i++) {
        delta_case c = new_delta_case(&state, all_dtypes[i], 2, 40, 3, 16);
        for (int dim = 0; dim < 3; dim++) c.dout.stride[dim] = 0;
        check_delta(&c.dout, &c.out, &c.dlse, no_threads());
        free_delta_case(&c);
    }
}

static void test_non_finite_values_stay_in_their_row(void) {
    uint64_t state = 19;
    for (int i = 0; i < NUM_DTYPES; i++) {
        delta_case c = new_delta_case(&state, all_dtypes[i], 1, 40, 2, 24);
        set(&c.dout, 0, 3, 1, 23, NAN);
        set(&c.out, 0, 7, 0, 0, INFINITY);
        set(&c.dlse, 0, 39, 1, 0, -INFINITY);
        check_delta(&c.dout, &c.out, &c.dlse, threads_of(2));
        free_delta_case(&c);
    }
}

static void test_no_batch_and_no_query(void) {
    uint64_t state = 20;
    for (int i = 0; i < 2; i++) {
        delta_case c = new_delta_case(&state, RT_F32, i, 5 * (1 - i), 2, 8);
        check_delta(&c.dout, &c.out, &c.dlse, no_threads());
        free_delta_case(&c);
    }
}

static void test_malformed_params_are_refused(void) {
    float dout[4] = {0}, out[4] = {0}, delta[1] = {7};
    const double dlse[1] = {0};
    const rt_attn_delta_params good = {RT_F32, 1, 1, 1, 4, {4, 4, 4}, {4, 4, 4}};
#define REFUSED(field, value, status)                                                                                  \
    CHECK_REFUSED(rt_attn_delta_params, good, field, value, rt_attn_delta(&bad, dout, out, dlse, delta, no_threads()), \
                  status)
    REFUSED(dtype, (rt_dtype)4, RT_BAD_DTYPE);
    REFUSED(batch, -1, RT_BAD_SHAPE);
    REFUSED(num_queries, -1, RT_BAD_SHAPE);
    REFUSED(num_heads, 0, RT_BAD_SHAPE);
    REFUSED(v_head_dim, 0, RT_BAD_HEAD_DIM);
    REFUSED(v_head_dim, RT_MAX_HEAD_DIM + 1, RT_BAD_HEAD_DIM);
    REFUSED(batch, INT64_MAX, RT_TOO_LARGE);
    REFUSED(num_heads, INT64_MAX, RT_TOO_LARGE);
#undef REFUSED
    CHECK_STATUS(rt_attn_delta(&good, NULL, out, dlse, delta, no_threads()), RT_BAD_POINTER);
    CHECK_STATUS(rt_attn_delta(&good, dout, NULL, dlse, delta, no_threads()), RT_BAD_POINTER);
    CHECK_STATUS(rt_attn_delta(&good, dout, out, dlse, NULL, no_threads()), RT_BAD_POINTER);
    CHECK_STATUS(rt_attn_delta(&good, dout, out, dlse, out + 1, no_threads()), RT_SHARED_MEMORY);
    CHECK(delta[0] == 7);
    CHECK_STATUS(rt_attn_delta(&good, dout, out, dlse, delta, no_threads()), RT_OK);
    CHECK(delta[0] == 0);
}

int main(void) {
    check_isa_or_skip();
    test_every_head_dim_of_every_dtype();
    test_strides_of_zero();
    test_non_finite_values_stay_in_their_row();
    test_no_batch_and_no_query();
    test_malformed_params_are_refused();
    return check_finish();
}
