// The selective scan against its definition in ringtile.h, in f64, channel by channel and token by token, for every
// dtype, tail of a chunk, of a vector and of a task.
#include "scan_reference.h"

// ---- the definition ---------------------------------------------------------------------------------------

static bool selective_pads(const rt_selective_params *p, int64_t batch, int64_t t) {
    return is_padding(p->seq_idx, p->seq_idx_batch_stride, batch, t);
}

// Each channel is a head of scan_reference.h with one value, whose state decays by exp(dt A) in each place and takes in
// dt B x. In f64; every number is rounded once, at the end. Of padding nothing is read, but moved.
static void selective_reference(const rt_selective_params *p) {
    enum { X, DOUT, DT, G, OUT, DX, DDT, DG, DD, OF_C, OF_B, DC, DB, SKIP, INITIAL, DFINAL, FINAL, DINITIAL, COUNT };
    const int64_t B = p->batch, N = p->num_tokens, C = p->num_channels, K = p->state_dim, rows = B * N * C;
    const rt_dtype wide = state_of(p->dtype);
    double *x[COUNT], *dA = must_alloc((size_t)(K * C) * sizeof(double));
    for (int i = 0; i < COUNT; i++) {
        const int64_t count = i == G || i == DG ? rows * K : i < OF_C ? rows : i < SKIP ? B * N * K : C * (B * K + 1);
        x[i] = must_alloc((size_t)count * sizeof(double));
    }
    for (int64_t at = 0; at < rows; at++) {
        const int64_t b = at / C / N, t = at / C % N, c = at % C;
        x[X][at] = load_element(p->dtype, p->x, b * p->x_stride[0] + t * p->x_stride[1] + c);
        x[DOUT][at] = load_element(p->dtype, p->dout, b * p->dout_stride[0] + t * p->dout_stride[1] + c);
        x[DT][at] = load_element(wide, p->dt, at);
        for (int64_t i = 0; i < K; i++) x[G][at * K + i] = x[DT][at] * load_element(wide, p->A, i * C + c);
    }
    for (int64_t at = 0; at < B * N * K; at++) {
        const int64_t b = at / K / N, t = at / K % N, i = at % K;
        x[OF_C][at] = load_element(p->dtype, p->C, b * p->C_stride[0] + t * p->C_stride[1] + i);
        x[OF_B][at] = load_element(p->dtype, p->B, b * p->B_stride[0] + t * p->B_stride[1] + i);
    }
    for (int64_t c = 0; c < C; c++) x[SKIP][c] = number(wide, p->D, c, 0);
    for (int64_t at = 0; at < B * C * K; at++) { // (B, C, K) there, (B, K, C) here
        const int64_t here = at / (C * K) * C * K + at % K * C + at / K % C;
        x[INITIAL][at] = number(wide, p->initial_state, here, 0);
        x[DFINAL][at] = number(wide, p->dfinal_state, here, 0);
    }
    const rt_scan_params scan = {.dtype = RT_F64,
                                 .batch = B,
                                 .num_tokens = N,
                                 .num_heads = C,
                                 .num_k_heads = 1,
                                 .head_dim = K,
                                 .v_head_dim = 1,
                                 .channel_decay = true,
                                 .scale = 1,
                                 .q = x[OF_C],
                                 .k = x[OF_B],
                                 .v = x[X],
                                 .g = x[G],
                                 .dt = x[DT],
                                 .D = x[SKIP],
                                 .q_stride = {N * K, K, K},
                                 .k_stride = {N * K, K, K},
                                 .v_stride = {N * C, C, 1},
                                 .dout_stride = {N * C, C, 1},
                                 .seq_idx = p->seq_idx,
                                 .seq_idx_batch_stride = p->seq_idx_batch_stride,
                                 .initial_state = x[INITIAL],
                                 .out = x[OUT],
                                 .final_state = x[FINAL],
                                 .dout = x[DOUT],
                                 .dfinal_state = x[DFINAL],
                                 .dq = x[DC],
                                 .dk = x[DB],
                                 .dv = x[DX],
                                 .dg = x[DG],
                                 .ddt = x[DDT],
                                 .dD = x[DD],
                                 .dinitial_state = x[DINITIAL]};
    scan_reference_fwd(&scan);
    scan_reference_bwd(&scan);
    double *const dD = x[SKIP];
    for (int64_t i = 0; i < K * C; i++) dA[i] = 0;
    for (int64_t c = 0; c < C; c++) dD[c] = 0;
    for (int64_t at = 0; at < rows; at++) {
        if (!selective_pads(p, at / C / N, at / C % N)) {
            dD[at % C] += x[DD][at];
            for (int64_t i = 0; i < K; i++) {
                x[DDT][at] += x[DG][at * K + i] * load_element(wide, p->A, i * C + at % C);
                dA[i * C + at % C] += x[DG][at * K + i] * x[DT][at];
            }
        }
        store_element(p->dtype, p->out, at, x[OUT][at]);
        store_element(wide, p->dx, at, x[DX][at]), store_element(wide, p->ddt, at, x[DDT][at]);
    }
    for (int64_t at = 0; at < B * N * K; at++)
        store_element(wide, p->dC, at, x[DC][at]), store_element(wide, p->dB, at, x[DB][at]);
    for (int64_t at = 0; at < B * C * K; at++) {
        const int64_t here = at / (C * K) * C * K + at % K * C + at / K % C;
        store_element(wide, p->final_state, here, x[FINAL][at]);
        store_element(wide, p->dinitial_state, here, x[DINITIAL][at]);
    }
    for (int64_t i = 0; i < K * C; i++) store_element(wide, p->dA, i, dA[i]);
    for (int64_t c = 0; c < C && p->dD != NULL; c++) store_element(wide, p->dD, c, dD[c]);
    for (int i = 0; i < COUNT; i++) free(x[i]);
    free(dA);
}

// ---- random problems --------------------------------------------------------------------------------------

typedef struct selective_shape {
    int64_t batch, num_tokens, num_channels, state_dim;
} selective_shape;

// Arrays of a case.
enum {
    SEL_X,
    SEL_C,
    SEL_B,
    SEL_DOUT,
    SEL_DT,
    SEL_A,
    SEL_D,
    SEL_INITIAL,
    SEL_DFINAL,
    SEL_INPUTS,
    SEL_OUT = SEL_INPUTS,
    SEL_FINAL,
    SEL_DX,
    SEL_DDT,
    SEL_DC,
    SEL_DB,
    SEL_DA,
    SEL_DD,
    SEL_DINITIAL,
    SEL_STATES,
    SEL_ARRAYS
};

typedef struct selective_case {
    rt_selective_params p;
    int64_t count[SEL_ARRAYS];
    rt_dtype dtype[SEL_ARRAYS];
    void *x[SEL_ARRAYS];
    int32_t *seq_idx;
} selective_case;

static void bind_selective(selective_case *c) {
    rt_selective_params *p = &c->p;
    void **x = c->x;
    p->x = x[SEL_X], p->C = x[SEL_C], p->B = x[SEL_B], p->dout = x[SEL_DOUT], p->dt = x[SEL_DT];
    p->A = x[SEL_A], p->D = x[SEL_D], p->initial_state = x[SEL_INITIAL];
    p->dfinal_state = x[SEL_DFINAL], p->out = x[SEL_OUT], p->final_state = x[SEL_FINAL];
    p->states = x[SEL_STATES], p->dx = x[SEL_DX], p->ddt = x[SEL_DDT], p->dC = x[SEL_DC];
    p->dB = x[SEL_DB], p->dA = x[SEL_DA], p->dD = x[SEL_DD];
    p->dinitial_state = x[SEL_DINITIAL];
}

// dt in [0, 1) and A <= 0: no, gentle and strong decay, and one that even f64 takes for 0.
static selective_case new_selective(uint64_t *state, rt_dtype dtype, selective_shape s, double documents,
                                    double padding) {
    const int64_t B = s.batch, N = s.num_tokens, C = s.num_channels, K = s.state_dim;
    const int64_t gap = random_int(state, 0, 1), rows = B * N * (C + gap), shared = B * N * (K + gap);
    const int64_t counts[SEL_ARRAYS] = {rows,
                                        shared,
                                        shared,
                                        rows,
                                        B * N * C,
                                        K * C,
                                        C,
                                        B * K * C,
                                        B * K * C,
                                        B * N * C,
                                        B * K * C,
                                        B * N * C,
                                        B * N * C,
                                        B * N * K,
                                        B * N * K,
                                        K * C,
                                        C,
                                        B * K * C,
                                        B * rt_scan_num_states(N) * K * C};
    selective_case c = {.p = {.dtype = dtype, .batch = B, .num_tokens = N, .num_channels = C, .state_dim = K}};
    for (int i = 0; i < SEL_ARRAYS; i++) {
        c.count[i] = counts[i], c.dtype[i] = i < SEL_DT || i == SEL_OUT ? dtype : state_of(dtype);
        c.x[i] = must_alloc((size_t)counts[i] * dtype_bytes(c.dtype[i]));
        for (int64_t j = 0; j < counts[i]; j++) {
            double x = i < SEL_INPUTS ? random_unit(state) : NAN;
            if (i == SEL_DT) x = fabs(x);
            if (i == SEL_A) {
                const int64_t strength = random_int(state, 0, 9);
                x = strength == 0 ? 0 : strength == 1 ? -1e4 : -fabs(x);
            }
            store_element(c.dtype[i], c.x[i], j, x);
        }
    }
    const int64_t of_x[] = {N * (C + gap), C + gap}, of_k[] = {N * (K + gap), K + gap};
    memcpy(c.p.x_stride, of_x, sizeof(of_x)), memcpy(c.p.dout_stride, of_x, sizeof(of_x));
    memcpy(c.p.C_stride, of_k, sizeof(of_k)), memcpy(c.p.B_stride, of_k, sizeof(of_k));
    c.p.seq_idx_batch_stride = random_int(state, 0, 1) ? N : 0;
    c.p.seq_idx = c.seq_idx = random_seq_idx(state, c.p.seq_idx_batch_stride ? B : 1, N, documents, padding);
    bind_selective(&c);
    if (random_int(state, 0, 3) == 0) c.p.initial_state = NULL;
    if (random_int(state, 0, 3) == 0) c.p.dfinal_state = NULL;
    if (random_int(state, 0, 3) == 0) c.p.D = c.p.dD = NULL;
    return c;
}

static rt_status run_selective_case(rt_selective_params p, bool backward, rt_parallel parallel) {
    const int64_t workers = parallel.run == NULL ? 1 : parallel.num_workers;
    p.workspace_bytes =
        backward ? rt_selective_bwd_workspace_bytes(&p, workers) : rt_selective_fwd_workspace_bytes(&p, workers);
    CHECK(p.workspace_bytes % 64 == 0);
    p.workspace = aligned_alloc(64, (size_t)p.workspace_bytes + 64);
    memset(p.workspace, 0xff, (size_t)p.workspace_bytes); // NaN
    const rt_status status = backward ? rt_selective_bwd(&p, parallel) : rt_selective_fwd(&p, parallel);
    free(p.workspace);
    return status;
}

static void free_selective(selective_case *c) {
    for (int i = 0; i < SEL_ARRAYS; i++) free(c->x[i]);
    free(c->seq_idx);
}

// ---- the kernels ------------------------------------------------------------------------------------------

static void run_both(const void *of_case, rt_parallel parallel) {
    const selective_case *c = of_case;
    CHECK_STATUS(run_selective_case(c->p, false, parallel), RT_OK);
    CHECK_STATUS(run_selective_case(c->p, true, parallel), RT_OK);
}

// A state takes N steps, each of a few roundings and an exp; a gradient is a sum over B N tokens, C channels or K
// states. Errors are relative to what is summed, at most the largest of the results or the states, which grow to N.
static void compare_selective(int line, const selective_case *c, int i, const void *want) {
    const rt_selective_params *p = &c->p;
    const int64_t terms = p->batch * p->num_tokens + p->num_channels + p->state_dim;
    const double size = 1 + largest(c->dtype[i], want, c->count[i]);
    check_array(line, i, c->dtype[i], c->x[i], want, c->count[i],
                4 * unit_roundoff(state_of(p->dtype)) * (double)terms * size);
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
    run_both(&c, parallel);
    selective_case want = c;
    for (int i = SEL_OUT; i < SEL_ARRAYS; i++) want.x[i] = must_alloc((size_t)c.count[i] * dtype_bytes(c.dtype[i]));
    bind_selective(&want);
    want.p.initial_state = c.p.initial_state, want.p.dfinal_state = c.p.dfinal_state;
    want.p.D = c.p.D;
    selective_reference(&want.p);
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
    for (int dtype = RT_F32; dtype <= RT_BF16; dtype++) {
        selective_case c = new_selective(&state, (rt_dtype)dtype, (selective_shape){2, 150, 300, 5}, 0.02, 0.1);
        check_threads(c.x, c.count, c.dtype, SEL_OUT, SEL_STATES, run_both, &c);
        free_selective(&c);
    }
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
        run_both(&c, no_threads());
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
        CHECK_NAMED(status, field);                                                                                    \
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
