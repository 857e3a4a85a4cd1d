// The selective scan from its definition in ringtile.h, in f64, channel by channel and token by token: the oracle of
// the C tests. It knows nothing of chunks. The params are valid.
#ifndef RINGTILE_TESTS_SELECTIVE_REFERENCE_H
#define RINGTILE_TESTS_SELECTIVE_REFERENCE_H

#include "scan_reference.h"

// One number of the state of one row: channel c, place i of the state dim.
typedef struct selective_walk {
    const rt_selective_params *p;
    int64_t batch, c, i;
    double *before, *after; // (N) the state before and after each token
    double last;            // after all
} selective_walk;

static inline bool selective_pads(const rt_selective_params *p, int64_t batch, int64_t t) {
    return is_padding(p->seq_idx, p->seq_idx_batch_stride, batch, t);
}
static inline bool selective_restarts(const rt_selective_params *p, int64_t batch, int64_t t) {
    return begins(p->seq_idx, p->seq_idx_batch_stride, batch, t);
}
static inline double row_of(const rt_selective_params *p, const void *x, const int64_t stride[2], int64_t batch,
                            int64_t t, int64_t i) {
    return load_element(p->dtype, x, batch * stride[0] + t * stride[1] + i);
}
static inline double dt_of(const rt_selective_params *p, int64_t batch, int64_t t, int64_t c) {
    return load_element(state_of(p->dtype), p->dt, (batch * p->num_tokens + t) * p->num_channels + c);
}
static inline double A_of(const rt_selective_params *p, int64_t i, int64_t c) {
    return load_element(state_of(p->dtype), p->A, i * p->num_channels + c);
}

static inline void walk_states(selective_walk *w) {
    const rt_selective_params *p = w->p;
    double now =
        number(state_of(p->dtype), p->initial_state, (w->batch * p->state_dim + w->i) * p->num_channels + w->c, 0);
    for (int64_t t = 0; t < p->num_tokens; t++) {
        if (selective_restarts(p, w->batch, t)) now = 0;
        w->before[t] = now;
        if (!selective_pads(p, w->batch, t)) {
            const double dt = dt_of(p, w->batch, t, w->c);
            now = exp(dt * A_of(p, w->i, w->c)) * now + row_of(p, p->B, p->B_stride, w->batch, t, w->i) * dt *
                                                            row_of(p, p->x, p->x_stride, w->batch, t, w->c);
        }
        w->after[t] = now;
    }
    w->last = now;
}

static inline void selective_reference_fwd(const rt_selective_params *p) {
    const int64_t N = p->batch > 0 ? p->num_tokens : 0, C = p->num_channels, K = p->state_dim;
    const rt_dtype wide = state_of(p->dtype);
    double *const numbers = must_alloc((size_t)(3 * N) * sizeof(double)), *const out = numbers + 2 * N;
    for (int64_t b = 0; b < p->batch; b++)
        for (int64_t c = 0; c < C; c++) {
            for (int64_t t = 0; t < N; t++)
                out[t] = selective_pads(p, b, t) ? 0 : number(wide, p->D, c, 0) * row_of(p, p->x, p->x_stride, b, t, c);
            for (int64_t i = 0; i < K; i++) {
                selective_walk w = {p, b, c, i, numbers, numbers + N, 0};
                walk_states(&w);
                for (int64_t t = 0; t < N; t++)
                    if (!selective_pads(p, b, t)) out[t] += row_of(p, p->C, p->C_stride, b, t, i) * w.after[t];
                store_element(wide, p->final_state, (b * K + i) * C + c, w.last);
            }
            for (int64_t t = 0; t < N; t++) store_element(p->dtype, p->out, (b * N + t) * C + c, out[t]);
        }
    free(numbers);
}

// Sums in f64; every gradient is rounded once, at the end.
typedef struct selective_sums {
    double *dx, *ddt, *dC, *dB; // (N C), (N K) of one row
    double *dA, *dD;            // (K C), (C)
} selective_sums;

static inline void walk_gradients(const selective_walk *w, const selective_sums *s) {
    const rt_selective_params *p = w->p;
    const int64_t C = p->num_channels, K = p->state_dim, b = w->batch, c = w->c, i = w->i;
    const rt_dtype wide = state_of(p->dtype);
    const double A = A_of(p, i, c);
    double dstate = number(wide, p->dfinal_state, (b * K + i) * C + c, 0);
    for (int64_t t = p->num_tokens - 1; t >= 0; t--) {
        if (!selective_pads(p, b, t)) {
            const double x = row_of(p, p->x, p->x_stride, b, t, c), dt = dt_of(p, b, t, c),
                         B = row_of(p, p->B, p->B_stride, b, t, i), dout = row_of(p, p->dout, p->dout_stride, b, t, c),
                         decay = exp(dt * A);
            dstate += row_of(p, p->C, p->C_stride, b, t, i) * dout;
            s->dC[t * K + i] += dout * w->after[t];
            s->dB[t * K + i] += dstate * dt * x;
            s->dx[t * C + c] += dstate * B * dt;
            s->ddt[t * C + c] += dstate * (B * x + decay * w->before[t] * A);
            s->dA[i * C + c] += dstate * decay * w->before[t] * dt;
            dstate *= decay;
        }
        if (selective_restarts(p, b, t)) dstate = 0;
    }
    store_element(wide, p->dinitial_state, (b * K + i) * C + c, dstate);
}

static inline void store_sums(rt_dtype dtype, void *array, int64_t first, const double *sums, int64_t count) {
    for (int64_t i = 0; i < count && array != NULL; i++) store_element(dtype, array, first + i, sums[i]);
}

static inline void selective_reference_bwd(const rt_selective_params *p) {
    const int64_t N = p->batch > 0 ? p->num_tokens : 0, C = p->num_channels, K = p->state_dim;
    const rt_dtype wide = state_of(p->dtype);
    double *const states = must_alloc((size_t)(2 * N) * sizeof(double));
    double *const sums = must_alloc((size_t)(2 * N * (C + K) + (K + 1) * C) * sizeof(double));
    const selective_sums s = {sums,
                              sums + N * C,
                              sums + 2 * N * C,
                              sums + N * (2 * C + K),
                              sums + 2 * N * (C + K),
                              sums + 2 * N * (C + K) + K * C};
    for (int64_t i = 0; i < (K + 1) * C; i++) s.dA[i] = 0;
    for (int64_t b = 0; b < p->batch; b++) {
        for (int64_t i = 0; i < 2 * N * (C + K); i++) sums[i] = 0;
        for (int64_t c = 0; c < C; c++) {
            for (int64_t t = 0; t < N; t++) {
                if (selective_pads(p, b, t)) continue;
                const double dout = row_of(p, p->dout, p->dout_stride, b, t, c);
                s.dD[c] += dout * row_of(p, p->x, p->x_stride, b, t, c);
                s.dx[t * C + c] += dout * number(wide, p->D, c, 0);
            }
            for (int64_t i = 0; i < K; i++) {
                selective_walk w = {p, b, c, i, states, states + N, 0};
                walk_states(&w);
                walk_gradients(&w, &s);
            }
        }
        store_sums(wide, p->dx, b * N * C, s.dx, N * C), store_sums(wide, p->ddt, b * N * C, s.ddt, N * C);
        store_sums(wide, p->dC, b * N * K, s.dC, N * K), store_sums(wide, p->dB, b * N * K, s.dB, N * K);
    }
    store_sums(wide, p->dA, 0, s.dA, K * C), store_sums(wide, p->dD, 0, s.dD, C);
    free(states), free(sums);
}

#endif // RINGTILE_TESTS_SELECTIVE_REFERENCE_H
