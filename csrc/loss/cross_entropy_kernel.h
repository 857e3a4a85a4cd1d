// Softmax cross entropy, compiled once per instruction set for its math type (vec.h). It makes two passes over the
// logits x of a token, chunk by chunk: pass 1 keeps a running max of x' and sum of exp(x' - max), pass 2 replaces x by
// the gradient. Sums over the vocabulary are f64 between chunks.

#include "../chunk.h"
#include "../isa/kernels.h"

typedef struct softmax_state {
    real max;     // of x'
    double sum;   // of exp(x' - max)
    double total; // of x'
} softmax_state;

// Loads one chunk of x', with `tail` in the unused lanes of its last vec. slope: dx'/dx = 1 - tanh^2, or NULL.
static void load_logits(const rt_cross_entropy_params *p, const void *logits, int64_t first, int64_t count, real tail,
                        real *x, real *slope) {
    load_chunk(p->dtype, logits, first, count, x);
    if (p->softcap > 0) {
        const real softcap = (real)p->softcap, inverse = (real)(1 / p->softcap);
        for (int64_t i = 0; i < count; i += LANES) {
            const vec t = vec_tanh(vec_load(x + i) * inverse);
            vec_store(x + i, t * softcap);
            if (slope != NULL) vec_store(slope + i, 1 - t * t);
        }
    }
    for (int64_t i = count; i % LANES != 0; i++) x[i] = tail;
}

// Exponents are relative to this: the max, or 0 while every logit is -inf, because -inf - -inf would be NaN.
static real shift_of(const softmax_state *state) { return state->max == -INFINITY ? 0 : state->max; }

static void add_chunk(softmax_state *state, const real *x, int64_t count) {
    vec lane_max = vec_set(-INFINITY), lane_sum = {0};
    for (int64_t i = 0; i < count; i += LANES) lane_max = vec_max(vec_load(x + i), lane_max);
    const real before = state->max, chunk_max = vec_reduce_max(lane_max);
    if (chunk_max > before) state->max = chunk_max;

    const real shift = shift_of(state);
    for (int64_t i = 0; i < count; i += LANES) lane_sum += vec_exp(vec_load(x + i) - shift);
    state->sum = state->sum * exp((double)before - (double)shift) + (double)vec_reduce_sum(lane_sum);
}

static void add_total(softmax_state *state, const real *x, int64_t count) {
    vec lane_total = {0};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) lane_total += vec_load(x + i);
    state->total += (double)vec_reduce_sum(lane_total);
    for (; i < count; i++) state->total += (double)x[i];
}

static void store_state(rt_dtype dtype, void *array, int64_t token, double value) {
    if (dtype == RT_F64)
        ((double *)array)[token] = value;
    else
        ((float *)array)[token] = (float)value;
}

static void cross_entropy_token(const rt_cross_entropy_params *p, void *logits, int64_t label, int64_t token,
                                void *loss, void *lse_out) {
    const int64_t V = p->vocab_size, row = token * p->logits_stride;
    const double smoothing = p->label_smoothing, z_loss = p->z_loss;
    real x[CHUNK], slope[CHUNK];

    // Pass 1.
    softmax_state state = {.max = -INFINITY};
    double label_logit = 0;
    for (int64_t col = 0; col < V; col += CHUNK) {
        const int64_t count = V - col < CHUNK ? V - col : CHUNK;
        load_logits(p, logits, row + col, count, -INFINITY, x, NULL);
        add_chunk(&state, x, count);
        if (smoothing > 0) add_total(&state, x, count);
        if (label >= col && label < col + count) label_logit = (double)x[label - col];
    }
    // Subtracts from the max first, so that logits far from 0 keep their precision.
    const real shift = shift_of(&state);
    const double log_sum = log(state.sum), lse = (double)shift + log_sum, mean = state.total / (double)V;
    const double token_loss = (1 - smoothing) * (log_sum + ((double)shift - label_logit)) +
                              smoothing * (log_sum + ((double)shift - mean)) + z_loss * lse * lse;
    store_state(p->dtype, loss, token, token_loss);
    store_state(p->dtype, lse_out, token, lse);
    if (!p->want_grad) return;

    // Pass 2: d loss / d x' = p (1 + 2 z_loss lse) - (1 - smoothing) [label] - smoothing / V, p = exp(x' - lse).
    const real scale = (real)((1 + 2 * z_loss * lse) / state.sum), uniform = (real)(smoothing / (double)V);
    for (int64_t col = 0; col < V; col += CHUNK) {
        const int64_t count = V - col < CHUNK ? V - col : CHUNK;
        load_logits(p, logits, row + col, count, 0, x, slope);
        for (int64_t i = 0; i < count; i += LANES) vec_store(x + i, vec_exp(vec_load(x + i) - shift) * scale - uniform);
        if (label >= col && label < col + count) x[label - col] -= (real)(1 - smoothing);
        for (int64_t i = 0; p->softcap > 0 && i < count; i += LANES)
            vec_store(x + i, vec_load(x + i) * vec_load(slope + i));
        store_chunk(p->dtype, logits, row + col, count, x);
    }
}

static void ignore_token(const rt_cross_entropy_params *p, void *logits, int64_t token, void *loss, void *lse) {
    const real zeros[CHUNK] = {0};
    store_state(p->dtype, loss, token, 0);
    store_state(p->dtype, lse, token, 0);
    for (int64_t col = 0; p->want_grad && col < p->vocab_size; col += CHUNK) {
        const int64_t left = p->vocab_size - col;
        store_chunk(p->dtype, logits, token * p->logits_stride + col, left < CHUNK ? left : CHUNK, zeros);
    }
}

static void cross_entropy(const rt_cross_entropy_params *p, void *logits, const int64_t *labels, void *loss, void *lse,
                          int64_t first_token, int64_t last_token) {
    for (int64_t token = first_token; token < last_token; token++) {
        if (labels[token] == p->ignore_index)
            ignore_token(p, logits, token, loss, lse);
        else
            cross_entropy_token(p, logits, labels[token], token, loss, lse);
    }
}
