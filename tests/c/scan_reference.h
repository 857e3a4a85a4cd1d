// Recurrences and their convolution from their definitions in ringtile.h, in f64, token by token: the oracle of the C
// tests. They know nothing of chunks. The params are valid.
#ifndef RINGTILE_TESTS_SCAN_REFERENCE_H
#define RINGTILE_TESTS_SCAN_REFERENCE_H

#include "check.h"

static inline rt_dtype state_of(rt_dtype dtype) { return dtype == RT_F64 ? RT_F64 : RT_F32; }

static inline double number(rt_dtype dtype, const void *array, int64_t i, double otherwise) {
    return array == NULL ? otherwise : load_element(dtype, array, i);
}

// One head of one row.
typedef struct scan_head {
    const rt_scan_params *p;
    int64_t batch, head, kv_head;
    double *
        states; // (2 N + 1, D, Dv): before and after each token, in turn; a document's begin changes only the former
    double *gradient; // (D, Dv) of the state
} scan_head;

static inline int64_t at_token(const scan_head *s, int64_t t) {
    return (s->batch * s->p->num_tokens + t) * s->p->num_heads + s->head;
}
static inline double at_row(const rt_scan_params *p, const void *x, const int64_t stride[3], int64_t batch,
                            int64_t t, int64_t head, int64_t i) {
    return load_element(p->dtype, x, batch * stride[0] + t * stride[1] + head * stride[2] + i);
}
static inline double q_of(const scan_head *s, int64_t t, int64_t i) {
    return at_row(s->p, s->p->q, s->p->q_stride, s->batch, t, s->kv_head, i);
}
static inline double k_of(const scan_head *s, int64_t t, int64_t i) {
    return at_row(s->p, s->p->k, s->p->k_stride, s->batch, t, s->kv_head, i);
}
static inline double v_of(const scan_head *s, int64_t t, int64_t j) {
    return at_row(s->p, s->p->v, s->p->v_stride, s->batch, t, s->head, j);
}
static inline double dout_of(const scan_head *s, int64_t t, int64_t j) {
    return at_row(s->p, s->p->dout, s->p->dout_stride, s->batch, t, s->head, j);
}
static inline double decay_of(const scan_head *s, int64_t t, int64_t i) {
    const int64_t at = s->p->channel_decay ? at_token(s, t) * s->p->head_dim + i : at_token(s, t);
    return exp(load_element(state_of(s->p->dtype), s->p->decay, at));
}
static inline uint8_t reset_of(const scan_head *s, int64_t t) {
    return s->p->resets[s->batch * s->p->resets_batch_stride + t];
}

// v - (decayed state)^T k, with beta; else v.
static inline double surprise(const scan_head *s, int64_t t, int64_t j) {
    const int64_t D = s->p->head_dim, Dv = s->p->v_head_dim;
    double x = v_of(s, t, j);
    for (int64_t i = 0; i < D && s->p->beta != NULL; i++)
        x -= decay_of(s, t, i) * s->states[(2 * t * D + i) * Dv + j] * k_of(s, t, i);
    return x;
}

static inline double factor_of(const scan_head *s, int64_t t) {
    const void *factor = s->p->beta != NULL ? s->p->beta : s->p->step;
    return number(state_of(s->p->dtype), factor, at_token(s, t), 1);
}

static inline scan_head walk_forward(const rt_scan_params *p, int64_t batch, int64_t head) {
    const int64_t D = p->head_dim, Dv = p->v_head_dim, size = D * Dv;
    scan_head s = {p,
                   batch,
                   head,
                   head / (p->num_heads / p->num_kv_heads),
                   must_alloc((size_t)((2 * p->num_tokens + 1) * size) * sizeof(double)),
                   must_alloc((size_t)size * sizeof(double))};
    for (int64_t i = 0; i < size; i++)
        s.states[i] =
            number(state_of(p->dtype), p->initial_state, (batch * p->num_heads + head) * size + i, 0);
    for (int64_t t = 0; t < p->num_tokens; t++) {
        double *before = s.states + 2 * t * size, *after = before + size, *next = after + size;
        if (reset_of(&s, t) & RT_DOCUMENT_BEGIN) memset(before, 0, (size_t)size * sizeof(double));
        for (int64_t i = 0; i < size; i++) after[i] = before[i];
        for (int64_t j = 0; j < Dv && !(reset_of(&s, t) & RT_PADDING); j++) {
            const double u = factor_of(&s, t) * surprise(&s, t, j);
            for (int64_t i = 0; i < D; i++)
                after[i * Dv + j] = decay_of(&s, t, i) * before[i * Dv + j] + k_of(&s, t, i) * u;
        }
        for (int64_t i = 0; i < size; i++) next[i] = after[i];
    }
    return s;
}

static inline void scan_reference_fwd(const rt_scan_params *p) {
    const int64_t D = p->head_dim, Dv = p->v_head_dim, N = p->num_tokens;
    for (int64_t row = 0; row < p->batch * p->num_heads; row++) {
        scan_head s = walk_forward(p, row / p->num_heads, row % p->num_heads);
        for (int64_t t = 0; t < N; t++)
            for (int64_t j = 0; j < Dv; j++) {
                const bool padding = reset_of(&s, t) & RT_PADDING;
                double out = padding || p->skip == NULL
                                 ? 0
                                 : load_element(state_of(p->dtype), p->skip, s.head) * v_of(&s, t, j);
                for (int64_t i = 0; i < D && !padding; i++)
                    out += p->scale * q_of(&s, t, i) * s.states[((2 * t + 1) * D + i) * Dv + j];
                store_element(p->dtype, p->out, at_token(&s, t) * Dv + j, out);
            }
        // A document may begin at a token that is padding, after the last one that is not.
        for (int64_t i = 0; i < D * Dv; i++)
            store_element(state_of(p->dtype), p->final_state, row * D * Dv + i, s.states[2 * N * D * Dv + i]);
        free(s.states), free(s.gradient);
    }
}

// Adds to an element of a gradient; NULL: there is none.
static inline void add_element(rt_dtype dtype, void *array, int64_t i, double x) {
    if (array != NULL) store_element(dtype, array, i, load_element(dtype, array, i) + x);
}

static inline void walk_token_back(scan_head *s, int64_t t) {
    const rt_scan_params *p = s->p;
    const rt_dtype wide = state_of(p->dtype);
    const int64_t D = p->head_dim, Dv = p->v_head_dim, at = at_token(s, t);
    const double *before = s->states + 2 * t * D * Dv, *after = before + D * Dv;
    const double skip = number(wide, p->skip, s->head, 0), factor = factor_of(s, t);
    for (int64_t j = 0; j < Dv; j++) {
        const double dout = dout_of(s, t, j), v = v_of(s, t, j), x = surprise(s, t, j);
        double du = 0;
        for (int64_t i = 0; i < D; i++) {
            const int64_t shared = ((s->batch * p->num_tokens + t) * p->num_kv_heads + s->kv_head) * D + i;
            double *dstate = &s->gradient[i * Dv + j];
            *dstate += p->scale * q_of(s, t, i) * dout;
            add_element(wide, p->dq, shared, p->scale * after[i * Dv + j] * dout);
            add_element(wide, p->dk, shared, *dstate * factor * x);
            du += *dstate * k_of(s, t, i);
        }
        add_element(wide, p->beta != NULL ? p->dbeta : p->dstep, at, du * x);
        add_element(wide, p->dskip, at, dout * v);
        add_element(wide, p->dv, at * Dv + j, factor * du + skip * dout);
        for (int64_t i = 0; i < D; i++) {
            const int64_t shared = ((s->batch * p->num_tokens + t) * p->num_kv_heads + s->kv_head) * D + i;
            const double decayed = decay_of(s, t, i) * before[i * Dv + j];
            double *dstate = &s->gradient[i * Dv + j];
            if (p->beta != NULL) {
                *dstate -= k_of(s, t, i) * factor * du;
                add_element(wide, p->dk, shared, -decayed * factor * du);
            }
            add_element(wide, p->ddecay, p->channel_decay ? at * D + i : at, *dstate * decayed);
            *dstate *= decay_of(s, t, i);
        }
    }
}

static inline void scan_reference_bwd(const rt_scan_params *p) {
    const rt_dtype wide = state_of(p->dtype);
    const int64_t B = p->batch, N = p->num_tokens, H = p->num_heads, G = p->num_kv_heads, D = p->head_dim,
                  Dv = p->v_head_dim, bytes = (int64_t)dtype_bytes(wide);
    struct {
        void *array;
        int64_t count;
    } gradients[] = {
        {p->dq, G * D}, {p->dk, G * D}, {p->dv, H * Dv}, {p->ddecay, p->channel_decay ? H * D : H},
        {p->dbeta, H},  {p->dstep, H},  {p->dskip, H}};
    for (int i = 0; i < 7; i++)
        if (gradients[i].array != NULL)
            memset(gradients[i].array, 0, (size_t)(B * N * gradients[i].count * bytes));
    for (int64_t row = 0; row < B * H; row++) {
        scan_head s = walk_forward(p, row / H, row % H);
        for (int64_t i = 0; i < D * Dv; i++)
            s.gradient[i] = number(wide, p->dfinal_state, row * D * Dv + i, 0);
        for (int64_t t = N - 1; t >= 0; t--) {
            if (!(reset_of(&s, t) & RT_PADDING)) walk_token_back(&s, t);
            if (reset_of(&s, t) & RT_DOCUMENT_BEGIN) memset(s.gradient, 0, (size_t)(D * Dv) * sizeof(double));
        }
        for (int64_t i = 0; i < D * Dv; i++)
            store_element(wide, p->dinitial_state, row * D * Dv + i, s.gradient[i]);
        free(s.states), free(s.gradient);
    }
}

// ---- convolution -------------------------------------------------------------------------------------------

// The place of the token `ago` tokens before t in its document: >= 0, -1 - i for row i of the initial state, else NONE.
enum { NONE = -100 };

static inline int64_t token_before(const rt_conv_params *p, int64_t batch, int64_t t, int64_t ago) {
    const uint8_t *resets = p->resets + batch * p->resets_batch_stride;
    while (ago > 0) {
        if (t < p->num_tokens && (resets[t] & RT_DOCUMENT_BEGIN)) return NONE;
        if (--t < 0) return ago <= p->width - 1 ? -1 - (p->width - 1 - ago) : NONE;
        if (!(resets[t] & RT_PADDING)) ago--;
    }
    return t;
}

// Calls for the token before the first of a row, too: of the places that hold no token, 0.
static inline double conv_input(const rt_conv_params *p, int64_t batch, int64_t place, int64_t c) {
    if (place == NONE) return 0;
    if (place >= 0) return load_element(p->dtype, p->x, batch * p->x_stride[0] + place * p->x_stride[1] + c);
    return number(state_of(p->dtype), p->initial_state,
                  (batch * (p->width - 1) - 1 - place) * p->num_channels + c, 0);
}

static inline double conv_reference_z(const rt_conv_params *p, int64_t batch, int64_t t, int64_t c) {
    double z = number(state_of(p->dtype), p->bias, c, 0);
    for (int64_t i = 0; i < p->width; i++)
        z += load_element(state_of(p->dtype), p->weight, c * p->width + i) *
             conv_input(p, batch, token_before(p, batch, t, p->width - 1 - i), c);
    return z;
}

static inline void conv_reference_fwd(const rt_conv_params *p) {
    for (int64_t b = 0; b < p->batch; b++)
        for (int64_t c = 0; c < p->num_channels; c++) {
            for (int64_t t = 0; t < p->num_tokens; t++) {
                const bool padding = p->resets[b * p->resets_batch_stride + t] & RT_PADDING;
                const double z = padding ? 0 : conv_reference_z(p, b, t, c);
                store_element(p->dtype, p->y, (b * p->num_tokens + t) * p->num_channels + c,
                              p->silu ? z / (1 + exp(-z)) : z);
            }
            for (int64_t i = 0; i < p->width - 1; i++)
                store_element(state_of(p->dtype), p->final_state,
                              (b * (p->width - 1) + i) * p->num_channels + c,
                              conv_input(p, b, token_before(p, b, p->num_tokens, p->width - 1 - i), c));
        }
}

// dx of one channel of a row is summed up in f64 before it is rounded.
static inline void conv_reference_bwd(const rt_conv_params *p) {
    const int64_t B = p->batch, N = p->num_tokens, C = p->num_channels, K = p->width;
    const rt_dtype wide = state_of(p->dtype);
    double *dx = must_alloc((size_t)((B > 0 && C > 0 ? N : 0) + K) * sizeof(double));
    for (int64_t c = 0; c < C; c++) {
        double dweight[RT_MAX_CONV_WIDTH] = {0}, dbias = 0;
        for (int64_t b = 0; b < B; b++) {
            for (int64_t i = 0; i < N + K; i++) dx[i] = 0;
            for (int64_t t = 0; t < N; t++) {
                if (p->resets[b * p->resets_batch_stride + t] & RT_PADDING) continue;
                const double z = conv_reference_z(p, b, t, c), s = 1 / (1 + exp(-z));
                const double dy =
                    load_element(p->dtype, p->dy, b * p->dy_stride[0] + t * p->dy_stride[1] + c);
                const double dz = p->silu ? dy * (s + z * s * (1 - s)) : dy;
                dbias += dz;
                for (int64_t i = 0; i < K; i++) {
                    const int64_t place = token_before(p, b, t, K - 1 - i);
                    dweight[i] += dz * conv_input(p, b, place, c);
                    if (place != NONE) dx[K + place] += dz * load_element(wide, p->weight, c * K + i);
                }
            }
            for (int64_t i = 0; i < K - 1; i++) {
                const int64_t place = token_before(p, b, N, K - 1 - i);
                if (place != NONE)
                    dx[K + place] += number(wide, p->dfinal_state, (b * (K - 1) + i) * C + c, 0);
            }
            for (int64_t t = 0; t < N; t++) store_element(p->dtype, p->dx, (b * N + t) * C + c, dx[K + t]);
            for (int64_t i = 0; i < K - 1; i++)
                store_element(wide, p->dinitial_state, (b * (K - 1) + i) * C + c, dx[K - 1 - i]);
        }
        for (int64_t i = 0; i < K; i++) store_element(wide, p->dweight, c * K + i, dweight[i]);
        if (p->dbias != NULL) store_element(wide, p->dbias, c, dbias);
    }
    free(dx);
}

#endif // RINGTILE_TESTS_SCAN_REFERENCE_H
