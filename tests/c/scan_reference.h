// Recurrences and their convolution from their definitions in ringtile.h, in f64, token by token: the oracle of the C
// tests. They know nothing of chunks. The params are valid.
#ifndef RINGTILE_TESTS_SCAN_REFERENCE_H
#define RINGTILE_TESTS_SCAN_REFERENCE_H

#include "check.h"

static inline rt_dtype state_of(rt_dtype dtype) { return dtype == RT_F64 ? RT_F64 : RT_F32; }

static inline double number(rt_dtype dtype, const void *array, int64_t i, double otherwise) {
    return array == NULL ? otherwise : load_element(dtype, array, i);
}

// Random documents and padding of each row, (rows, num_tokens).
static inline int32_t *random_seq_idx(uint64_t *state, int64_t rows, int64_t num_tokens, double documents,
                                      double padding) {
    int32_t *seq_idx = must_alloc((size_t)(rows * num_tokens) * sizeof(int32_t));
    for (int64_t row = 0; row < rows; row++)
        for (int64_t t = 0, document = 0; t < num_tokens; t++) {
            document += fabs(random_unit(state)) < documents;
            seq_idx[row * num_tokens + t] = fabs(random_unit(state)) < padding ? -1 : (int32_t)document;
        }
    return seq_idx;
}

// One head of one row.
typedef struct scan_head {
    const rt_scan_params *p;
    int64_t batch, head, k_head;
    double *states; // (2 N + 1, K, V): before and after each token, in turn; a document's begin changes only the former
    double *gradient; // (K, V) of the state
    double *decays;   // (N) or (N, K): exp(g)
} scan_head;

static inline int64_t at_token(const scan_head *s, int64_t t) {
    return (s->batch * s->p->num_tokens + t) * s->p->num_heads + s->head;
}
static inline double at_row(const rt_scan_params *p, const void *x, const int64_t stride[3], int64_t batch, int64_t t,
                            int64_t head, int64_t i) {
    return load_element(p->dtype, x, batch * stride[0] + t * stride[1] + head * stride[2] + i);
}
static inline double q_of(const scan_head *s, int64_t t, int64_t i) {
    return at_row(s->p, s->p->q, s->p->q_stride, s->batch, t, s->k_head, i);
}
static inline double k_of(const scan_head *s, int64_t t, int64_t i) {
    return at_row(s->p, s->p->k, s->p->k_stride, s->batch, t, s->k_head, i);
}
static inline double v_of(const scan_head *s, int64_t t, int64_t j) {
    return at_row(s->p, s->p->v, s->p->v_stride, s->batch, t, s->head, j);
}
static inline double dout_of(const scan_head *s, int64_t t, int64_t j) {
    return at_row(s->p, s->p->dout, s->p->dout_stride, s->batch, t, s->head, j);
}
static inline double decay_of(const scan_head *s, int64_t t, int64_t i) {
    return s->decays[s->p->channel_decay ? t * s->p->head_dim + i : t];
}
static inline bool is_padding(const int32_t *seq_idx, int64_t stride, int64_t batch, int64_t t) {
    return seq_idx[batch * stride + t] < 0;
}
// Whether a document other than that of the initial state begins at a token.
static inline bool begins(const int32_t *seq_idx, int64_t stride, int64_t batch, int64_t t) {
    const int32_t *row = seq_idx + batch * stride;
    int64_t before = t - 1;
    while (before >= 0 && row[before] < 0) before--;
    return row[t] >= 0 && row[t] != (before < 0 ? 0 : row[before]);
}
static inline bool pads(const scan_head *s, int64_t t) {
    return is_padding(s->p->seq_idx, s->p->seq_idx_batch_stride, s->batch, t);
}
static inline bool restarts(const scan_head *s, int64_t t) {
    return begins(s->p->seq_idx, s->p->seq_idx_batch_stride, s->batch, t);
}

// v - (decayed state)^T k, with beta; else v.
static inline double surprise(const scan_head *s, int64_t t, int64_t j) {
    const int64_t K = s->p->head_dim, V = s->p->v_head_dim;
    double x = v_of(s, t, j);
    for (int64_t i = 0; i < K && s->p->beta != NULL; i++)
        x -= decay_of(s, t, i) * s->states[(2 * t * K + i) * V + j] * k_of(s, t, i);
    return x;
}

static inline double factor_of(const scan_head *s, int64_t t) {
    const void *factor = s->p->beta != NULL ? s->p->beta : s->p->dt;
    return number(state_of(s->p->dtype), factor, at_token(s, t), 1);
}

static inline scan_head walk_forward(const rt_scan_params *p, int64_t batch, int64_t head) {
    const int64_t K = p->head_dim, V = p->v_head_dim, size = K * V;
    scan_head s = {p,
                   batch,
                   head,
                   head / (p->num_heads / p->num_k_heads),
                   must_alloc((size_t)((2 * p->num_tokens + 1) * size) * sizeof(double)),
                   must_alloc((size_t)size * sizeof(double)),
                   must_alloc((size_t)(p->num_tokens * (p->channel_decay ? K : 1)) * sizeof(double))};
    for (int64_t t = 0, at = 0; t < p->num_tokens; t++)
        for (int64_t i = 0; i < (p->channel_decay ? K : 1); i++) {
            const int64_t element = p->channel_decay ? at_token(&s, t) * K + i : at_token(&s, t);
            s.decays[at++] = exp(load_element(state_of(p->dtype), p->g, element));
        }
    for (int64_t i = 0; i < size; i++)
        s.states[i] = number(state_of(p->dtype), p->initial_state, (batch * p->num_heads + head) * size + i, 0);
    for (int64_t t = 0; t < p->num_tokens; t++) {
        double *before = s.states + 2 * t * size, *after = before + size, *next = after + size;
        if (restarts(&s, t)) memset(before, 0, (size_t)size * sizeof(double));
        for (int64_t i = 0; i < size; i++) after[i] = before[i];
        for (int64_t j = 0; j < V && !pads(&s, t); j++) {
            const double u = factor_of(&s, t) * surprise(&s, t, j);
            for (int64_t i = 0; i < K; i++)
                after[i * V + j] = decay_of(&s, t, i) * before[i * V + j] + k_of(&s, t, i) * u;
        }
        for (int64_t i = 0; i < size; i++) next[i] = after[i];
    }
    return s;
}

static inline void scan_reference_fwd(const rt_scan_params *p) {
    const int64_t K = p->head_dim, V = p->v_head_dim, N = p->num_tokens;
    for (int64_t row = 0; row < p->batch * p->num_heads; row++) {
        scan_head s = walk_forward(p, row / p->num_heads, row % p->num_heads);
        for (int64_t t = 0; t < N; t++)
            for (int64_t j = 0; j < V; j++) {
                const bool padding = pads(&s, t);
                double out =
                    padding || p->D == NULL ? 0 : load_element(state_of(p->dtype), p->D, s.head) * v_of(&s, t, j);
                for (int64_t i = 0; i < K && !padding; i++)
                    out += p->scale * q_of(&s, t, i) * s.states[((2 * t + 1) * K + i) * V + j];
                store_element(p->dtype, p->out, at_token(&s, t) * V + j, out);
            }
        for (int64_t i = 0; i < K * V; i++)
            store_element(state_of(p->dtype), p->final_state, row * K * V + i, s.states[2 * N * K * V + i]);
        free(s.states), free(s.gradient), free(s.decays);
    }
}

// Adds to an element of a gradient; NULL: there is none.
static inline void add_element(rt_dtype dtype, void *array, int64_t i, double x) {
    if (array != NULL) store_element(dtype, array, i, load_element(dtype, array, i) + x);
}

static inline void walk_token_back(scan_head *s, int64_t t) {
    const rt_scan_params *p = s->p;
    const rt_dtype wide = state_of(p->dtype);
    const int64_t K = p->head_dim, V = p->v_head_dim, at = at_token(s, t);
    const double *before = s->states + 2 * t * K * V, *after = before + K * V;
    const double D = number(wide, p->D, s->head, 0), factor = factor_of(s, t);
    for (int64_t j = 0; j < V; j++) {
        const double dout = dout_of(s, t, j), v = v_of(s, t, j), x = surprise(s, t, j);
        double du = 0;
        for (int64_t i = 0; i < K; i++) {
            const int64_t shared = ((s->batch * p->num_tokens + t) * p->num_k_heads + s->k_head) * K + i;
            double *dstate = &s->gradient[i * V + j];
            *dstate += p->scale * q_of(s, t, i) * dout;
            add_element(wide, p->dq, shared, p->scale * after[i * V + j] * dout);
            add_element(wide, p->dk, shared, *dstate * factor * x);
            du += *dstate * k_of(s, t, i);
        }
        add_element(wide, p->beta != NULL ? p->dbeta : p->ddt, at, du * x);
        add_element(wide, p->dD, at, dout * v);
        add_element(wide, p->dv, at * V + j, factor * du + D * dout);
        for (int64_t i = 0; i < K; i++) {
            const int64_t shared = ((s->batch * p->num_tokens + t) * p->num_k_heads + s->k_head) * K + i;
            const double decayed = decay_of(s, t, i) * before[i * V + j];
            double *dstate = &s->gradient[i * V + j];
            if (p->beta != NULL) {
                *dstate -= k_of(s, t, i) * factor * du;
                add_element(wide, p->dk, shared, -decayed * factor * du);
            }
            add_element(wide, p->dg, p->channel_decay ? at * K + i : at, *dstate * decayed);
            *dstate *= decay_of(s, t, i);
        }
    }
}

static inline void scan_reference_bwd(const rt_scan_params *p) {
    const rt_dtype wide = state_of(p->dtype);
    const int64_t B = p->batch, N = p->num_tokens, H = p->num_heads, G = p->num_k_heads, K = p->head_dim,
                  V = p->v_head_dim, bytes = (int64_t)dtype_bytes(wide);
    struct {
        void *array;
        int64_t count;
    } gradients[] = {{p->dq, G * K}, {p->dk, G * K}, {p->dv, H * V}, {p->dg, p->channel_decay ? H * K : H},
                     {p->dbeta, H},  {p->ddt, H},    {p->dD, H}};
    for (int i = 0; i < 7; i++)
        if (gradients[i].array != NULL) memset(gradients[i].array, 0, (size_t)(B * N * gradients[i].count * bytes));
    for (int64_t row = 0; row < B * H; row++) {
        scan_head s = walk_forward(p, row / H, row % H);
        for (int64_t i = 0; i < K * V; i++) s.gradient[i] = number(wide, p->dfinal_state, row * K * V + i, 0);
        for (int64_t t = N - 1; t >= 0; t--) {
            if (!pads(&s, t)) walk_token_back(&s, t);
            if (restarts(&s, t)) memset(s.gradient, 0, (size_t)(K * V) * sizeof(double));
        }
        for (int64_t i = 0; i < K * V; i++) store_element(wide, p->dinitial_state, row * K * V + i, s.gradient[i]);
        free(s.states), free(s.gradient), free(s.decays);
    }
}

// ---- convolution -------------------------------------------------------------------------------------------

// The place of the token `ago` tokens before t in its document: >= 0, -1 - i for row i of the initial state, else NONE.
enum { NONE = -100 };

static inline int64_t token_before(const rt_conv_params *p, int64_t batch, int64_t t, int64_t ago) {
    while (ago > 0) {
        if (t < p->num_tokens && begins(p->seq_idx, p->seq_idx_batch_stride, batch, t)) return NONE;
        if (--t < 0) return ago <= p->width - 1 ? -1 - (p->width - 1 - ago) : NONE;
        if (!is_padding(p->seq_idx, p->seq_idx_batch_stride, batch, t)) ago--;
    }
    return t;
}

// Calls for the token before the first of a row, too: of the places that hold no token, 0.
static inline double conv_input(const rt_conv_params *p, int64_t batch, int64_t place, int64_t c) {
    if (place == NONE) return 0;
    if (place >= 0) return load_element(p->dtype, p->x, batch * p->x_stride[0] + place * p->x_stride[1] + c);
    return number(state_of(p->dtype), p->initial_state, (batch * (p->width - 1) - 1 - place) * p->num_channels + c, 0);
}

static inline double conv_reference_z(const rt_conv_params *p, int64_t batch, int64_t t, int64_t c) {
    double z = number(state_of(p->dtype), p->bias, c, 0);
    for (int64_t i = 0; i < p->width; i++)
        z += load_element(state_of(p->dtype), p->weight, c * p->width + i) *
             conv_input(p, batch, token_before(p, batch, t, p->width - 1 - i), c);
    return z;
}

// Whether the rows hold nothing: there may be any number of them.
static inline bool conv_rows_are_empty(const rt_conv_params *p) {
    return p->num_channels == 0 || (p->num_tokens == 0 && p->width == 1);
}

static inline void conv_reference_fwd(const rt_conv_params *p) {
    for (int64_t b = 0; b < p->batch && !conv_rows_are_empty(p); b++)
        for (int64_t c = 0; c < p->num_channels; c++) {
            for (int64_t t = 0; t < p->num_tokens; t++) {
                const bool padding = is_padding(p->seq_idx, p->seq_idx_batch_stride, b, t);
                const double z = padding ? 0 : conv_reference_z(p, b, t, c);
                store_element(p->dtype, p->y, (b * p->num_tokens + t) * p->num_channels + c,
                              p->silu ? z / (1 + exp(-z)) : z);
            }
            for (int64_t i = 0; i < p->width - 1; i++)
                store_element(state_of(p->dtype), p->final_state, (b * (p->width - 1) + i) * p->num_channels + c,
                              conv_input(p, b, token_before(p, b, p->num_tokens, p->width - 1 - i), c));
        }
}

// dx of one channel of a row is summed up in f64 before it is rounded.
static inline void conv_reference_bwd(const rt_conv_params *p) {
    const int64_t B = conv_rows_are_empty(p) ? 0 : p->batch, N = p->num_tokens, C = p->num_channels, K = p->width;
    const rt_dtype wide = state_of(p->dtype);
    double *dx = must_alloc((size_t)((B > 0 && C > 0 ? N : 0) + K) * sizeof(double));
    for (int64_t c = 0; c < C; c++) {
        double dweight[RT_MAX_CONV_WIDTH] = {0}, dbias = 0;
        for (int64_t b = 0; b < B; b++) {
            for (int64_t i = 0; i < N + K; i++) dx[i] = 0;
            for (int64_t t = 0; t < N; t++) {
                if (is_padding(p->seq_idx, p->seq_idx_batch_stride, b, t)) continue;
                const double z = conv_reference_z(p, b, t, c), s = 1 / (1 + exp(-z));
                const double dy = load_element(p->dtype, p->dy, b * p->dy_stride[0] + t * p->dy_stride[1] + c);
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
                if (place != NONE) dx[K + place] += number(wide, p->dfinal_state, (b * (K - 1) + i) * C + c, 0);
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

// ---- results -----------------------------------------------------------------------------------------------

static inline double largest(rt_dtype dtype, const void *x, int64_t count) {
    double most = 0;
    for (int64_t i = 0; i < count; i++) most = fmax(most, fabs(load_element(dtype, x, i)));
    return most;
}

// bound: besides the rounding to dtype.
static inline void check_array(int line, int array, rt_dtype dtype, const void *got, const void *want, int64_t count,
                               double bound) {
    for (int64_t i = 0; i < count; i++) {
        const double x = load_element(dtype, got, i), y = load_element(dtype, want, i);
        if (check_failed(is_close(x, y, bound + 2 * unit_roundoff(dtype) * fabs(y)))) {
            printf("line %d, array %d, element %" PRId64 ": got %.9g, expected %.9g\n", line, array, i, x, y);
            return;
        }
    }
}

// The results on threads are those of one, bit for bit: the arrays from first to last, of a case that run() computes.
static inline void check_threads(void *const *x, const int64_t *count, const rt_dtype *dtype, int first, int last,
                                 void (*run)(const void *c, rt_parallel parallel), const void *c) {
    void *one[32];
    for (int pass = 0; pass < 2; pass++) {
        for (int i = first; i < last; i++) memset(x[i], 0x7f, (size_t)count[i] * dtype_bytes(dtype[i]));
        run(c, pass == 0 ? no_threads() : threads_of(4));
        for (int i = first; i < last; i++) {
            const size_t bytes = (size_t)count[i] * dtype_bytes(dtype[i]);
            if (pass == 0) one[i] = memcpy(must_alloc(bytes), x[i], bytes);
            CHECK(memcmp(one[i], x[i], bytes) == 0);
            if (pass == 1) free(one[i]);
        }
    }
}

#endif // RINGTILE_TESTS_SCAN_REFERENCE_H
