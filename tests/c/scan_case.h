// Random problems of recurrences, for test_scan.c and race_scan.c.
#ifndef RINGTILE_TESTS_SCAN_CASE_H
#define RINGTILE_TESTS_SCAN_CASE_H

#include "scan_reference.h"

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

static inline void bind(scan_case *c, kind which) {
    rt_scan_params *p = &c->p;
    p->q = c->x[Q], p->k = c->x[K], p->v = c->x[V], p->g = c->x[LOG_DECAY], p->initial_state = c->x[INITIAL];
    p->dout = c->x[DOUT], p->dfinal_state = c->x[DFINAL], p->out = c->x[OUT], p->final_state = c->x[FINAL];
    p->states = c->x[STATES], p->dq = c->x[DQ], p->dk = c->x[DK], p->dv = c->x[DV], p->dg = c->x[DLOG_DECAY];
    p->dinitial_state = c->x[DINITIAL];
    if (which <= KDA) p->beta = c->x[FACTOR], p->dbeta = c->x[DFACTOR];
    if (which == SSD) p->dt = c->x[FACTOR], p->ddt = c->x[DFACTOR], p->D = c->x[SKIP], p->dD = c->x[DSKIP];
}

// Keys of length below 1 and beta in [0, 1): a step then never lengthens the state, and errors add up at most.
static inline scan_case new_case(uint64_t *state, rt_dtype dtype, kind which, shape s, double documents,
                                 double padding) {
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
static inline void spoil_padding(scan_case *c) {
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

static inline rt_status run(rt_scan_params p, bool backward, rt_parallel parallel) {
    const int64_t workers = parallel.run == NULL ? 1 : parallel.num_workers;
    p.workspace_bytes = backward ? rt_scan_bwd_workspace_bytes(&p, workers) : rt_scan_fwd_workspace_bytes(&p, workers);
    CHECK(p.workspace_bytes % 64 == 0);
    p.workspace = aligned_alloc(64, (size_t)p.workspace_bytes + 64);
    memset(p.workspace, 0xff, (size_t)p.workspace_bytes); // NaN
    const rt_status status = backward ? rt_scan_bwd(&p, parallel) : rt_scan_fwd(&p, parallel);
    free(p.workspace);
    return status;
}

static inline void free_case(scan_case *c) {
    for (int i = 0; i < NUM_ARRAYS; i++) free(c->x[i]);
    free(c->seq_idx);
}

// The results on threads are those of one, bit for bit.
static inline void check_threads(uint64_t *state, rt_dtype dtype, kind which) {
    scan_case c = new_case(state, dtype, which, (shape){2, 150, 1, 3, 16, 16}, 0.02, 0.1);
    void *one[NUM_ARRAYS] = {0};
    CHECK_STATUS(run(c.p, false, no_threads()), RT_OK);
    CHECK_STATUS(run(c.p, true, no_threads()), RT_OK);
    for (int i = OUT; i < NUM_ARRAYS; i++) {
        const size_t bytes = (size_t)c.count[i] * dtype_bytes(c.dtype[i]);
        one[i] = must_alloc(bytes);
        memcpy(one[i], c.x[i], bytes);
        if (i != STATES) memset(c.x[i], 0x7f, bytes);
    }
    CHECK_STATUS(run(c.p, false, threads_of(4)), RT_OK);
    CHECK_STATUS(run(c.p, true, threads_of(4)), RT_OK);
    const int used[] = {OUT, FINAL, DQ, DK, DV, DLOG_DECAY, DINITIAL};
    for (int i = 0; i < 7; i++)
        CHECK(memcmp(one[used[i]], c.x[used[i]], (size_t)c.count[used[i]] * dtype_bytes(c.dtype[used[i]])) == 0);
    for (int i = OUT; i < NUM_ARRAYS; i++) free(one[i]);
    free_case(&c);
}

#endif // RINGTILE_TESTS_SCAN_CASE_H
