// Random problems of the selective scan, for test_selective.c and race_scan.c.
#ifndef RINGTILE_TESTS_SELECTIVE_CASE_H
#define RINGTILE_TESTS_SELECTIVE_CASE_H

#include "selective_reference.h"

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

static inline void bind_selective(selective_case *c) {
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
static inline selective_case new_selective(uint64_t *state, rt_dtype dtype, selective_shape s, double documents,
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

static inline rt_status run_selective_case(rt_selective_params p, bool backward, rt_parallel parallel) {
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

static inline void free_selective(selective_case *c) {
    for (int i = 0; i < SEL_ARRAYS; i++) free(c->x[i]);
    free(c->seq_idx);
}

// The results on threads are those of one, bit for bit.
static inline void check_selective_threads(uint64_t *state, rt_dtype dtype) {
    selective_case c = new_selective(state, dtype, (selective_shape){2, 150, 300, 5}, 0.02, 0.1);
    void *one[SEL_ARRAYS] = {0};
    CHECK_STATUS(run_selective_case(c.p, false, no_threads()), RT_OK);
    CHECK_STATUS(run_selective_case(c.p, true, no_threads()), RT_OK);
    for (int i = SEL_OUT; i < SEL_STATES; i++) {
        const size_t bytes = (size_t)c.count[i] * dtype_bytes(c.dtype[i]);
        one[i] = must_alloc(bytes);
        memcpy(one[i], c.x[i], bytes);
        if (i != SEL_DD || c.p.D != NULL) memset(c.x[i], 0x7f, bytes);
    }
    CHECK_STATUS(run_selective_case(c.p, false, threads_of(4)), RT_OK);
    CHECK_STATUS(run_selective_case(c.p, true, threads_of(4)), RT_OK);
    for (int i = SEL_OUT; i < SEL_STATES; i++) {
        CHECK(memcmp(one[i], c.x[i], (size_t)c.count[i] * dtype_bytes(c.dtype[i])) == 0);
        free(one[i]);
    }
    free_selective(&c);
}

#endif // RINGTILE_TESTS_SELECTIVE_CASE_H
