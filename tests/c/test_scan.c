// Recurrences and their convolution against scan_reference.h, for every dtype, kind, tail of a chunk and of a vector.
#include "scan_reference.h"

// ---- random problems ---------------------------------------------------------------------------------------

typedef enum kind { DELTA, KDA, SSD, PLAIN, NUM_KINDS } kind; // PLAIN: a decay of each channel, and nothing else

typedef struct shape {
    int64_t batch, num_tokens, k_heads, group, head_dim, v_head_dim;
} shape;

// Arrays of a case: as many as a call can have.
enum {
    Q,
    K,
    V,
    LOG_DECAY,
    FACTOR,
    SKIP,
    INITIAL,
    DOUT,
    DFINAL,
    NUM_INPUTS,
    OUT = NUM_INPUTS,
    FINAL,
    STATES,
    DQ,
    DK,
    DV,
    DLOG_DECAY,
    DFACTOR,
    DSKIP,
    DINITIAL,
    NUM_ARRAYS
};

typedef struct scan_case {
    rt_scan_params p;
    int64_t count[NUM_ARRAYS];
    rt_dtype dtype[NUM_ARRAYS];
    void *x[NUM_ARRAYS];
    int32_t *seq_idx;
} scan_case;

static void bind(scan_case *c, kind which) {
    rt_scan_params *p = &c->p;
    p->q = c->x[Q], p->k = c->x[K], p->v = c->x[V], p->g = c->x[LOG_DECAY], p->initial_state = c->x[INITIAL];
    p->dout = c->x[DOUT], p->dfinal_state = c->x[DFINAL], p->out = c->x[OUT], p->final_state = c->x[FINAL];
    p->states = c->x[STATES], p->dq = c->x[DQ], p->dk = c->x[DK], p->dv = c->x[DV], p->dg = c->x[DLOG_DECAY];
    p->dinitial_state = c->x[DINITIAL];
    if (which <= KDA) p->beta = c->x[FACTOR], p->dbeta = c->x[DFACTOR];
    if (which == SSD) p->dt = c->x[FACTOR], p->ddt = c->x[DFACTOR], p->D = c->x[SKIP], p->dD = c->x[DSKIP];
}

// Keys of length below 1 and beta in [0, 1): a step then never lengthens the state, and errors add up at most.
static scan_case new_case(uint64_t *state, rt_dtype dtype, kind which, shape s, double documents, double padding) {
    const int64_t B = s.batch, N = s.num_tokens, G = s.k_heads, H = G * s.group, D = s.head_dim, Dv = s.v_head_dim;
    const rt_dtype wide = state_of(dtype);
    const bool channels = which == KDA || which == PLAIN;
    const int64_t gap = random_int(state, 0, 1);
    scan_case c = {.p = {.dtype = dtype,
                         .batch = B,
                         .num_tokens = N,
                         .num_heads = H,
                         .num_k_heads = G,
                         .head_dim = D,
                         .v_head_dim = Dv,
                         .channel_decay = channels,
                         .scale = 0.7}};
    const int64_t rows = B * N * (H + gap) * (Dv + gap), shared = B * N * (G + gap) * (D + gap);
    const int64_t decays = channels ? B * N * H * D : B * N * H, states = B * H * D * Dv;
    const int64_t counts[NUM_ARRAYS] = {
        shared,        shared,        rows,           decays,         B * N * H, H,
        states,        rows,          states,         B * N * H * Dv, states,    B * H * rt_scan_num_states(N) * D * Dv,
        B * N * G * D, B * N * G * D, B * N * H * Dv, decays,         B * N * H, B * N * H,
        states};
    for (int i = 0; i < NUM_ARRAYS; i++) {
        const bool is_row = i == Q || i == K || i == V || i == DOUT || i == OUT;
        c.count[i] = counts[i], c.dtype[i] = is_row ? dtype : wide;
        c.x[i] = must_alloc((size_t)counts[i] * dtype_bytes(c.dtype[i]));
        for (int64_t j = 0; j < counts[i]; j++) {
            double x = i < NUM_INPUTS ? random_unit(state) : NAN;
            if (i == K) x /= sqrt((double)D);
            if (i == FACTOR) x = fabs(x);
            if (i == LOG_DECAY) { // none, gentle, strong, and what even f64 takes for 0
                const int64_t strength = random_int(state, 0, 9);
                x = strength == 0 ? 0 : strength == 1 ? -1e4 : strength == 2 ? -INFINITY : -fabs(x);
            }
            store_element(c.dtype[i], c.x[i], j, x);
        }
    }
    const int64_t of_q[] = {N * (G + gap) * (D + gap), (G + gap) * (D + gap), D + gap};
    const int64_t of_v[] = {N * (H + gap) * (Dv + gap), (H + gap) * (Dv + gap), Dv + gap};
    memcpy(c.p.q_stride, of_q, sizeof(of_q)), memcpy(c.p.k_stride, of_q, sizeof(of_q));
    memcpy(c.p.v_stride, of_v, sizeof(of_v)), memcpy(c.p.dout_stride, of_v, sizeof(of_v));
    c.p.seq_idx_batch_stride = random_int(state, 0, 1) ? N : 0;
    c.p.seq_idx = c.seq_idx = random_seq_idx(state, c.p.seq_idx_batch_stride ? B : 1, N, documents, padding);
    bind(&c, which);
    if (random_int(state, 0, 3) == 0) c.p.initial_state = NULL;
    if (random_int(state, 0, 3) == 0) c.p.dfinal_state = NULL;
    return c;
}

// What no call may read: the rows of padding hold NaN.
static void spoil_padding(scan_case *c) {
    const rt_scan_params *p = &c->p;
    for (int64_t b = 0; b < p->batch; b++)
        for (int64_t t = 0; t < p->num_tokens; t++) {
            if (!is_padding(p->seq_idx, p->seq_idx_batch_stride, b, t)) continue;
            for (int64_t h = 0; h < p->num_heads; h++) {
                const int64_t at = (b * p->num_tokens + t) * p->num_heads + h;
                for (int64_t j = 0; j < p->v_head_dim; j++) {
                    store_element(p->dtype, c->x[V], b * p->v_stride[0] + t * p->v_stride[1] + h * p->v_stride[2] + j,
                                  NAN);
                    store_element(p->dtype, c->x[DOUT],
                                  b * p->v_stride[0] + t * p->v_stride[1] + h * p->v_stride[2] + j, NAN);
                }
                store_element(state_of(p->dtype), c->x[FACTOR], at, NAN);
                for (int64_t i = 0; i < (p->channel_decay ? p->head_dim : 1); i++)
                    store_element(state_of(p->dtype), c->x[LOG_DECAY], p->channel_decay ? at * p->head_dim + i : at,
                                  NAN);
            }
            for (int64_t g = 0; g < p->num_k_heads; g++)
                for (int64_t i = 0; i < p->head_dim; i++) {
                    const int64_t at = b * p->q_stride[0] + t * p->q_stride[1] + g * p->q_stride[2] + i;
                    store_element(p->dtype, c->x[Q], at, NAN), store_element(p->dtype, c->x[K], at, NAN);
                }
        }
}

static rt_status run(rt_scan_params p, bool backward, rt_parallel parallel) {
    const int64_t workers = parallel.run == NULL ? 1 : parallel.num_workers;
    p.workspace_bytes = backward ? rt_scan_bwd_workspace_bytes(&p, workers) : rt_scan_fwd_workspace_bytes(&p, workers);
    CHECK(p.workspace_bytes % 64 == 0);
    p.workspace = aligned_alloc(64, (size_t)p.workspace_bytes + 64);
    memset(p.workspace, 0xff, (size_t)p.workspace_bytes); // NaN
    const rt_status status = backward ? rt_scan_bwd(&p, parallel) : rt_scan_fwd(&p, parallel);
    free(p.workspace);
    return status;
}

static void free_case(scan_case *c) {
    for (int i = 0; i < NUM_ARRAYS; i++) free(c->x[i]);
    free(c->seq_idx);
}

// ---- recurrences -------------------------------------------------------------------------------------------

static void run_both(const void *of_case, rt_parallel parallel) {
    const scan_case *c = of_case;
    CHECK_STATUS(run(c->p, false, parallel), RT_OK);
    CHECK_STATUS(run(c->p, true, parallel), RT_OK);
}

// Errors of the N steps add up, each of sums of D and of Dv terms, relative to what is summed: at most the largest of
// the results, or of the states, which are sums of values of at most 1.
static void compare(int line, const scan_case *c, int i, const void *want) {
    const int64_t terms = c->p.num_tokens + c->p.head_dim + c->p.v_head_dim;
    const double size = 1 + largest(c->dtype[i], want, c->count[i]);
    check_array(line, i, c->dtype[i], c->x[i], want, c->count[i],
                4 * unit_roundoff(state_of(c->p.dtype)) * (double)terms * size);
}

static void check_case(int line, uint64_t *state, rt_dtype dtype, kind which, shape s, double documents, double padding,
                       rt_parallel parallel) {
    scan_case c = new_case(state, dtype, which, s, documents, padding);
    spoil_padding(&c);
    run_both(&c, parallel);
    scan_case want = c;
    for (int i = OUT; i < NUM_ARRAYS; i++) want.x[i] = must_alloc((size_t)c.count[i] * dtype_bytes(c.dtype[i]));
    rt_scan_params kept = c.p;
    bind(&want, which);
    want.p.initial_state = kept.initial_state, want.p.dfinal_state = kept.dfinal_state;
    scan_reference_fwd(&want.p);
    scan_reference_bwd(&want.p);
    for (int i = OUT; i < NUM_ARRAYS; i++) {
        const bool unused = i == STATES || (i == DFACTOR && which == PLAIN) || (i == DSKIP && which != SSD);
        if (!unused) compare(line, &c, i, want.x[i]);
        free(want.x[i]);
    }
    free_case(&c);
}

static void test_every_tail_of_a_chunk(void) {
    static const int64_t lengths[] = {0, 1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 130};
    uint64_t state = 1;
    for (int which = 0; which < NUM_KINDS; which++)
        for (int i = 0; i < 12; i++) {
            check_case(__LINE__, &state, RT_F32, (kind)which, (shape){1, lengths[i], 1, 1, 9, 5}, 0, 0, no_threads());
            check_case(__LINE__, &state, all_dtypes[i % NUM_DTYPES], (kind)which, (shape){1, lengths[i], 1, 2, 6, 7},
                       0.1, 0.2, no_threads());
        }
}

static void test_every_tail_of_a_vector(void) {
    uint64_t state = 2;
    for (int64_t dim = 1; dim <= 34; dim++)
        check_case(__LINE__, &state, all_dtypes[dim % NUM_DTYPES], (kind)(dim % 3 + dim / 17 % 2),
                   (shape){1, 20, 1, 1, dim, 35 - dim}, 0.05, 0.05, no_threads());
}

static void test_documents_padding_groups_and_rows_on_threads(void) {
    uint64_t state = 3;
    for (int i = 0; i < 24; i++)
        check_case(__LINE__, &state, all_dtypes[i / 4 % 3], (kind)(i % NUM_KINDS),
                   (shape){random_int(&state, 1, 3), random_int(&state, 1, 150), random_int(&state, 1, 2),
                           random_int(&state, 1, 3), random_int(&state, 1, 20), random_int(&state, 1, 40)},
                   i % 5 == 0 ? 0.6 : 0.03, i % 3 == 0 ? 0.5 : 0.1, threads_of(3));
}

static void test_largest_heads(void) {
    uint64_t state = 4;
    check_case(__LINE__, &state, RT_F32, DELTA, (shape){1, 5, 1, 1, 256, 256}, 0, 0, no_threads());
    check_case(__LINE__, &state, RT_F32, KDA, (shape){1, 18, 1, 1, 512, 3}, 0, 0, no_threads());
}

static void test_any_number_of_workers_gives_the_same_bits(void) {
    uint64_t state = 5;
    for (int which = 0; which < NUM_KINDS; which++) {
        scan_case c = new_case(&state, all_dtypes[which], (kind)which, (shape){2, 150, 1, 3, 16, 16}, 0.02, 0.1);
        check_threads(c.x, c.count, c.dtype, OUT, NUM_ARRAYS, run_both, &c);
        free_case(&c);
    }
}

// A chunk's tokens would meet in one product; what is not finite in one document must not reach another.
static void test_documents_and_padding_do_not_leak(void) {
    uint64_t state = 6;
    for (int which = 0; which < NUM_KINDS; which++) {
        scan_case c = new_case(&state, RT_F32, (kind)which, (shape){1, 40, 1, 1, 8, 8}, 0, 0);
        for (int t = 0; t < 40; t++) c.seq_idx[t] = t == 20 ? -1 : (t >= 13) + (t >= 27);
        c.p.initial_state = NULL, c.p.dfinal_state = NULL;
        run_both(&c, no_threads());
        float *out = must_alloc(40 * 8 * sizeof(float)), *dv = must_alloc(40 * 8 * sizeof(float));
        memcpy(out, c.x[OUT], 40 * 8 * sizeof(float)), memcpy(dv, c.x[DV], 40 * 8 * sizeof(float));
        store_element(RT_F32, c.x[K], 15 * c.p.k_stride[1], NAN);
        run_both(&c, no_threads());
        CHECK(isnan(((float *)c.x[OUT])[15 * 8]) && ((float *)c.x[OUT])[20 * 8] == 0);
        for (int part = 0; part < 2; part++) { // documents 0 and 2
            const size_t at = part * 27 * 8, bytes = 13 * 8 * sizeof(float);
            CHECK(memcmp(out + at, (float *)c.x[OUT] + at, bytes) == 0);
            CHECK(memcmp(dv + at, (float *)c.x[DV] + at, bytes) == 0);
        }
        free(out), free(dv), free_case(&c);
    }
}

static void test_malformed_params_are_refused(void) {
    uint64_t state = 7;
    scan_case c = new_case(&state, RT_F32, DELTA, (shape){1, 4, 1, 2, 3, 5}, 0, 0);
#define REFUSED(field, value, status)                                                                                  \
    do {                                                                                                               \
        rt_scan_params bad = c.p;                                                                                      \
        bad.field = value;                                                                                             \
        CHECK_STATUS(rt_scan_fwd(&bad, no_threads()), status);                                                         \
        CHECK_STATUS(rt_scan_bwd(&bad, no_threads()), status);                                                         \
        CHECK_NAMED(status, field);                                                                                    \
        if (status != RT_BAD_SCALE && status != RT_BAD_POINTER && bad.v_stride[1] != INT64_MAX) /* not of an array */  \
            CHECK_INT(rt_scan_fwd_workspace_bytes(&bad, 1), 0);                                                        \
    } while (0)
    REFUSED(dtype, (rt_dtype)4, RT_BAD_DTYPE);
    REFUSED(batch, -1, RT_BAD_SHAPE);
    REFUSED(num_tokens, -1, RT_BAD_SHAPE);
    REFUSED(num_heads, 0, RT_BAD_HEADS);
    REFUSED(num_k_heads, 3, RT_BAD_HEADS);
    REFUSED(head_dim, 0, RT_BAD_HEAD_DIM);
    REFUSED(v_head_dim, 513, RT_BAD_HEAD_DIM);
    REFUSED(scale, INFINITY, RT_BAD_SCALE);
    REFUSED(seq_idx_batch_stride, 3, RT_BAD_MASK);
    REFUSED(dt, c.x[FACTOR], RT_BAD_POINTER);
    REFUSED(k, NULL, RT_BAD_POINTER);
    REFUSED(v, (const char *)c.x[V] + 1, RT_BAD_POINTER);
    REFUSED(v_stride[1], INT64_MAX, RT_TOO_LARGE);
    REFUSED(batch, INT64_MAX, RT_TOO_LARGE);
#undef REFUSED
    CHECK_STATUS(rt_scan_fwd(NULL, no_threads()), RT_BAD_POINTER);
    CHECK_STATUS(rt_scan_fwd(&c.p, no_threads()), RT_WORKSPACE);
    rt_scan_params shared = c.p;
    shared.out = c.x[V];
    CHECK_STATUS(run(shared, false, no_threads()), RT_SHARED_MEMORY);
    shared = c.p, shared.dk = c.x[DQ];
    CHECK_STATUS(run(shared, true, no_threads()), RT_SHARED_MEMORY);
    CHECK_STATUS(run(c.p, false, no_threads()), RT_OK);
    rt_scan_params unkept = c.p;
    unkept.states = NULL;
    CHECK_STATUS(run(unkept, false, no_threads()), RT_OK);
    free_case(&c);
}

// ---- convolution -------------------------------------------------------------------------------------------

static void check_conv(int line, uint64_t *state, rt_dtype dtype, int64_t B, int64_t N, int64_t C, int64_t width,
                       double documents, double padding, rt_parallel parallel) {
    enum { X, WEIGHT, BIAS, BEFORE, DY, DAFTER, Y, AFTER, DX, DWEIGHT, DBIAS, DBEFORE, COUNT };
    const rt_dtype wide = state_of(dtype);
    const int64_t states = B * (width - 1) * C, rows = B * N * C;
    const int64_t counts[COUNT] = {rows, C * width, C, states, rows, states, rows, states, rows, C * width, C, states};
    void *x[COUNT], *want[COUNT] = {0};
    rt_dtype dtypes[COUNT];
    for (int i = 0; i < COUNT; i++) {
        dtypes[i] = i == X || i == DY || i == Y || i == DX ? dtype : wide;
        x[i] = must_alloc((size_t)counts[i] * dtype_bytes(dtypes[i]));
        if (i >= Y) want[i] = must_alloc((size_t)counts[i] * dtype_bytes(dtypes[i]));
        for (int64_t j = 0; j < counts[i]; j++) store_element(dtypes[i], x[i], j, i < Y ? random_unit(state) : NAN);
    }
    const bool own_rows = random_int(state, 0, 1), biased = random_int(state, 0, 3), before = random_int(state, 0, 2);
    int32_t *seq_idx = random_seq_idx(state, own_rows ? B : 1, N, documents, padding);
    for (int64_t i = 0; i < rows; i++)
        if (seq_idx[own_rows ? i / C : i / C % N] < 0)
            store_element(dtype, x[X], i, NAN), store_element(dtype, x[DY], i, NAN);
    rt_conv_params p = {.dtype = dtype,
                        .batch = B,
                        .num_tokens = N,
                        .num_channels = C,
                        .width = width,
                        .silu = random_int(state, 0, 1),
                        .x = x[X],
                        .weight = x[WEIGHT],
                        .bias = biased ? x[BIAS] : NULL,
                        .x_stride = {N * C, C},
                        .dy_stride = {N * C, C},
                        .seq_idx = seq_idx,
                        .seq_idx_batch_stride = own_rows ? N : 0,
                        .initial_state = before ? x[BEFORE] : NULL,
                        .y = x[Y],
                        .final_state = x[AFTER],
                        .dy = x[DY],
                        .dfinal_state = before ? x[DAFTER] : NULL,
                        .dx = x[DX],
                        .dweight = x[DWEIGHT],
                        .dbias = biased ? x[DBIAS] : NULL,
                        .dinitial_state = x[DBEFORE]};
    CHECK_STATUS(rt_conv_fwd(&p, parallel), RT_OK);
    CHECK_STATUS(rt_conv_bwd(&p, parallel), RT_OK);
    p.y = want[Y], p.final_state = want[AFTER], p.dx = want[DX], p.dweight = want[DWEIGHT];
    p.dbias = biased ? want[DBIAS] : NULL, p.dinitial_state = want[DBEFORE];
    conv_reference_fwd(&p);
    conv_reference_bwd(&p);
    // Sums of at most width + 1 terms of at most 1, but for dweight and dbias, of B N terms; silu moves a few ulp.
    const double u = unit_roundoff(wide);
    for (int i = Y; i < COUNT; i++) {
        const double terms = i == DWEIGHT || i == DBIAS ? (double)(B * N + 8) : 8.0 * (double)width;
        if (biased || i != DBIAS) check_array(line, i, dtypes[i], x[i], want[i], counts[i], 8 * u * terms);
        free(want[i]);
    }
    for (int i = 0; i < COUNT; i++) free(x[i]);
    free(seq_idx);
}

static void test_convolution(void) {
    uint64_t state = 8;
    for (int64_t width = 1; width <= RT_MAX_CONV_WIDTH; width++)
        for (int64_t N = 0; N < 12; N++)
            check_conv(__LINE__, &state, all_dtypes[N % NUM_DTYPES], 1 + N % 2, N, 1 + 3 * width + N, width,
                       N % 3 * 0.2, N % 4 * 0.2, no_threads());
    check_conv(__LINE__, &state, RT_F32, 2, 150, 517, 4, 0.02, 0.1, threads_of(3));
    check_conv(__LINE__, &state, RT_BF16, 1, 70, 256, 4, 0, 0, threads_of(2));
}

static void test_malformed_convolutions_are_refused(void) {
    float x[8] = {0}, weight[8] = {0}, y[8], state[8];
    const int32_t seq_idx[4] = {0};
    const rt_conv_params good = {.dtype = RT_F32,
                                 .batch = 1,
                                 .num_tokens = 4,
                                 .num_channels = 2,
                                 .width = 2,
                                 .x = x,
                                 .weight = weight,
                                 .x_stride = {8, 2},
                                 .seq_idx = seq_idx,
                                 .y = y,
                                 .final_state = state};
    CHECK_STATUS(rt_conv_fwd(&good, no_threads()), RT_OK);
#define REFUSED(field, value, status)                                                                                  \
    CHECK_REFUSED(rt_conv_params, good, field, value, rt_conv_fwd(&bad, no_threads()), status)
    REFUSED(dtype, (rt_dtype)-1, RT_BAD_DTYPE);
    REFUSED(num_channels, -1, RT_BAD_SHAPE);
    REFUSED(width, 0, RT_BAD_WIDTH);
    REFUSED(width, 9, RT_BAD_WIDTH);
    REFUSED(seq_idx_batch_stride, 1, RT_BAD_MASK);
    REFUSED(weight, NULL, RT_BAD_POINTER);
    REFUSED(y, x, RT_SHARED_MEMORY);
    REFUSED(num_tokens, INT64_MAX, RT_TOO_LARGE);
#undef REFUSED
    CHECK_STATUS(rt_conv_fwd(NULL, no_threads()), RT_BAD_POINTER);
}

int main(void) {
    check_isa_or_skip();
    test_every_tail_of_a_chunk();
    test_every_tail_of_a_vector();
    test_documents_padding_groups_and_rows_on_threads();
    test_largest_heads();
    test_any_number_of_workers_gives_the_same_bits();
    test_documents_and_padding_do_not_leak();
    test_malformed_params_are_refused();
    test_convolution();
    test_malformed_convolutions_are_refused();
    return check_finish();
}
