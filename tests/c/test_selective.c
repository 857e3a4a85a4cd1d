// The selective scan against selective_reference.h, for every dtype, tail of a chunk, of a vector and of a task.
#include "selective_case.h"

static double largest(rt_dtype dtype, const void *x, int64_t count) {
    double most = 0;
    for (int64_t i = 0; i < count; i++) most = fmax(most, fabs(load_element(dtype, x, i)));
    return most;
}

// A state takes N steps, each of a few roundings and an exp; a gradient is a sum over B N tokens, C channels or K
// states. Errors are relative to what is summed, at most the largest of the results or the states, which grow to N.
static void compare_selective(int line, const selective_case *c, int i, const void *want) {
    const rt_selective_params *p = &c->p;
    const int64_t terms = p->batch * p->num_tokens + p->num_channels + p->state_dim;
    const double u = unit_roundoff(state_of(p->dtype)), own = unit_roundoff(c->dtype[i]);
    const double size = 1 + largest(c->dtype[i], want, c->count[i]);
    for (int64_t j = 0; j < c->count[i]; j++) {
        const double x = load_element(c->dtype[i], c->x[i], j), y = load_element(c->dtype[i], want, j);
        if (check_failed(is_close(x, y, 4 * u * (double)terms * size + 2 * own * fabs(y)))) {
            printf("line %d, array %d, element %" PRId64 ": got %.9g, expected %.9g\n", line, i, j, x, y);
            return;
        }
    }
}

// What no call may read: the tokens that are padding hold NaN.
static void spoil_selective_padding(selective_case *c) {
    const rt_selective_params *p = &c->p;
    for (int64_t b = 0; b < p->batch; b++)
        for (int64_t t = 0; t < p->num_tokens; t++) {
            if (!selective_pads(p, b, t)) continue;
            for (int64_t i = 0; i < p->num_channels; i++) {
                const int64_t at = b * p->x_stride[0] + t * p->x_stride[1] + i;
                store_element(p->dtype, c->x[SEL_X], at, NAN), store_element(p->dtype, c->x[SEL_DOUT], at, NAN);
                store_element(state_of(p->dtype), c->x[SEL_DT], (b * p->num_tokens + t) * p->num_channels + i, NAN);
            }
            for (int64_t i = 0; i < p->state_dim; i++) {
                const int64_t at = b * p->C_stride[0] + t * p->C_stride[1] + i;
                store_element(p->dtype, c->x[SEL_C], at, NAN), store_element(p->dtype, c->x[SEL_B], at, NAN);
            }
        }
}

static void check_selective(int line, uint64_t *state, rt_dtype dtype, selective_shape s, double documents,
                            double padding, rt_parallel parallel) {
    selective_case c = new_selective(state, dtype, s, documents, padding);
    spoil_selective_padding(&c);
    CHECK_STATUS(run_selective_case(c.p, false, parallel), RT_OK);
    CHECK_STATUS(run_selective_case(c.p, true, parallel), RT_OK);
    selective_case want = c;
    for (int i = SEL_OUT; i < SEL_ARRAYS; i++) want.x[i] = must_alloc((size_t)c.count[i] * dtype_bytes(c.dtype[i]));
    bind_selective(&want);
    want.p.initial_state = c.p.initial_state, want.p.dfinal_state = c.p.dfinal_state;
    want.p.D = c.p.D;
    selective_reference_fwd(&want.p);
    selective_reference_bwd(&want.p);
    for (int i = SEL_OUT; i < SEL_ARRAYS; i++) {
        if (i != SEL_STATES && (i != SEL_DD || c.p.D != NULL)) compare_selective(line, &c, i, want.x[i]);
        free(want.x[i]);
    }
    free_selective(&c);
}

static void test_every_tail_of_a_chunk(void) {
    static const int64_t lengths[] = {0, 1, 2, 31, 63, 64, 65, 130};
    uint64_t state = 1;
    for (int i = 0; i < 8; i++) {
        check_selective(__LINE__, &state, RT_F32, (selective_shape){1, lengths[i], 5, 3}, 0, 0, no_threads());
        check_selective(__LINE__, &state, all_dtypes[i % NUM_DTYPES], (selective_shape){2, lengths[i], 7, 4}, 0.1, 0.2,
                        no_threads());
    }
}

static void test_every_tail_of_a_vector_and_a_task(void) {
    static const int64_t widths[] = {1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 127, 130, 200};
    uint64_t state = 2;
    for (int i = 0; i < 18; i++)
        check_selective(__LINE__, &state, all_dtypes[i % NUM_DTYPES], (selective_shape){1, 20, widths[i], 1 + i}, 0.05,
                        0.05, no_threads());
}

static void test_documents_padding_and_rows_on_threads(void) {
    uint64_t state = 3;
    for (int i = 0; i < 12; i++)
        check_selective(__LINE__, &state, all_dtypes[i % NUM_DTYPES],
                        (selective_shape){random_int(&state, 0, 3), random_int(&state, 1, 150),
                                          random_int(&state, 1, 150), random_int(&state, 1, 17)},
                        i % 5 == 0 ? 0.6 : 0.03, i % 3 == 0 ? 0.5 : 0.1, threads_of(3));
}

static void test_the_largest_state(void) {
    uint64_t state = 4;
    check_selective(__LINE__, &state, RT_F32, (selective_shape){1, 3, 2, 512}, 0, 0, no_threads());
}

static void test_any_number_of_workers_gives_the_same_bits(void) {
    uint64_t state = 5;
    check_selective_threads(&state, RT_F32), check_selective_threads(&state, RT_BF16);
}

// A vector holds channels, and a task loops over them: what is not finite in one must not reach another, nor a document
// another one.
static void test_documents_and_channels_do_not_leak(void) {
    enum { N = 40, C = 20, K = 4 };
    uint64_t state = 6;
    selective_case c = new_selective(&state, RT_F32, (selective_shape){1, N, C, K}, 0, 0);
    for (int t = 0; t < N; t++) c.seq_idx[t] = (t >= 13) + (t >= 27);
    c.p.initial_state = NULL, c.p.dfinal_state = NULL;
    float *out = must_alloc(N * C * sizeof(float)), *dx = must_alloc(N * C * sizeof(float));
    for (int spoilt = 0; spoilt < 2; spoilt++) {
        if (spoilt) store_element(RT_F32, c.x[SEL_X], 15 * c.p.x_stride[1] + 2, NAN);
        CHECK_STATUS(run_selective_case(c.p, false, no_threads()), RT_OK);
        CHECK_STATUS(run_selective_case(c.p, true, no_threads()), RT_OK);
        if (!spoilt) memcpy(out, c.x[SEL_OUT], N * C * sizeof(float)), memcpy(dx, c.x[SEL_DX], N * C * sizeof(float));
    }
    CHECK(isnan(((float *)c.x[SEL_OUT])[26 * C + 2]));
    for (int64_t t = 0; t < N; t++)
        for (int64_t i = 0; i < C; i++)
            if (t < 15 || t >= 27 || i != 2) {
                CHECK(memcmp(&out[t * C + i], (float *)c.x[SEL_OUT] + t * C + i, sizeof(float)) == 0);
                CHECK(memcmp(&dx[t * C + i], (float *)c.x[SEL_DX] + t * C + i, sizeof(float)) == 0);
            }
    free(out), free(dx), free_selective(&c);
}

static void test_malformed_params_are_refused(void) {
    uint64_t state = 7;
    selective_case c = new_selective(&state, RT_F32, (selective_shape){1, 4, 3, 5}, 0, 0);
    c.p.D = c.x[SEL_D], c.p.dD = c.x[SEL_DD];
#define REFUSED(field, value, status)                                                                                  \
    do {                                                                                                               \
        rt_selective_params bad = c.p;                                                                                 \
        bad.field = value;                                                                                             \
        CHECK_STATUS(rt_selective_fwd(&bad, no_threads()), status);                                                    \
        CHECK_STATUS(rt_selective_bwd(&bad, no_threads()), status);                                                    \
        if (status != RT_BAD_POINTER && status != RT_TOO_LARGE) /* not of an array */                                  \
            CHECK_INT(rt_selective_fwd_workspace_bytes(&bad, 1), 0);                                                   \
    } while (0)
    REFUSED(dtype, (rt_dtype)4, RT_BAD_DTYPE);
    REFUSED(batch, -1, RT_BAD_SHAPE);
    REFUSED(num_tokens, -1, RT_BAD_SHAPE);
    REFUSED(num_channels, 0, RT_BAD_SHAPE);
    REFUSED(state_dim, 0, RT_BAD_HEAD_DIM);
    REFUSED(state_dim, 513, RT_BAD_HEAD_DIM);
    REFUSED(seq_idx_batch_stride, 3, RT_BAD_MASK);
    REFUSED(A, NULL, RT_BAD_POINTER);
    REFUSED(x, (const char *)c.x[SEL_X] + 1, RT_BAD_POINTER);
    REFUSED(x_stride[1], INT64_MAX, RT_TOO_LARGE);
    REFUSED(batch, INT64_MAX, RT_TOO_LARGE);
#undef REFUSED
    CHECK_STATUS(rt_selective_fwd(NULL, no_threads()), RT_BAD_POINTER);
    CHECK_STATUS(rt_selective_fwd(&c.p, no_threads()), RT_WORKSPACE);
    rt_selective_params bad = c.p;
    bad.num_channels = INT64_MAX;
    CHECK_INT(rt_selective_fwd_workspace_bytes(&bad, 1), 0);
    CHECK_STATUS(rt_selective_fwd(&bad, no_threads()), RT_TOO_LARGE);
    bad = c.p;
    bad.out = c.x[SEL_X];
    CHECK_STATUS(run_selective_case(bad, false, no_threads()), RT_SHARED_MEMORY);
    bad = c.p, bad.dB = c.x[SEL_DC];
    CHECK_STATUS(run_selective_case(bad, true, no_threads()), RT_SHARED_MEMORY);
    bad = c.p, bad.states = NULL;
    CHECK_STATUS(run_selective_case(bad, false, no_threads()), RT_OK);
    free_selective(&c);
}

int main(void) {
    check_isa_or_skip();
    test_every_tail_of_a_chunk();
    test_every_tail_of_a_vector_and_a_task();
    test_documents_padding_and_rows_on_threads();
    test_the_largest_state();
    test_any_number_of_workers_gives_the_same_bits();
    test_documents_and_channels_do_not_leak();
    test_malformed_params_are_refused();
    return check_finish();
}
