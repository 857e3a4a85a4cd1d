// Steps of a panel that forward and backward share: scores, softcap, weights; and the caller's log-sum-exp.
#ifndef RINGTILE_ATTN_SCORES_H
#define RINGTILE_ATTN_SCORES_H

#include "key_ranges.h"
#include "pack.h"
#include "weight_dropout.h"

// Where the keys of panels and of spans begin and end. Tiles take pairs of keys from whole blocks.
static inline int64_t panel_block(word_kind kind) { return kind == TILE_PAIRS ? TILE_DEPTH : 1; }
static inline int64_t span_block(word_kind kind) { return kind == TILE_PAIRS ? TILE_DEPTH : SPAN_KEYS; }

// weights (n keys, PANEL) become pairs of keys (n / 2, PANEL), rounded to bf16; beyond n, a whole block is 0.
static void pair_keys(int64_t n, real *weights) {
    const int64_t padded = round_up(n, TILE_DEPTH);
    memset(weights + n * PANEL, 0, (size_t)((padded - n) * PANEL) * sizeof(real));
    real *to = weights;
    for (int64_t key = 0; key < padded; key += 2)
        for (int64_t j = 0; j < PANEL; j += LANES, to += LANES)
            vec_store(to, pair_lanes(vec_load(weights + key * PANEL + j), vec_load(weights + (key + 1) * PANEL + j)));
}

// What the scores of a panel have yet to be multiplied by. Packed numbers of q include the scale, pairs only its sign.
static inline real score_factor(const rt_attn_block *p) { return input_kind(p) == REALS ? 1 : (real)fabs(p->scale); }

// c (keys, PANEL) = k q^T of rows of dim numbers, within a span of a packed panel.
static product span_product(const rt_attn_block *p, const attn_span *at, int64_t dim, const real *k, const real *q,
                            real *c) {
    const word_kind kind = input_kind(p);
    const int64_t words = row_words(kind, dim);
    return (product){kind,
                     at->num_keys,
                     round_up(at->num_rows, LANES),
                     num_words(kind, dim),
                     k + at->key * words,
                     words,
                     1,
                     q + at->row,
                     c + at->key * PANEL + at->row,
                     PANEL,
                     false};
}

// Applies the softcap to n keys of a panel: softcap * tanh(factor * scores / softcap). Returns what the scores have yet
// to be multiplied by, which is above 0: masked scores, of -inf, stay so.
static real cap_scores(const rt_attn_block *p, int64_t n, real *scores) {
    const real softcap = (real)p->softcap, factor = score_factor(p);
    const vec inverse = vec_set(factor / softcap);
    for (int64_t i = 0; i < n * PANEL && softcap > 0; i += LANES)
        vec_store(scores + i, softcap * vec_tanh(vec_load(scores + i) * inverse));
    for (int64_t i = 0; i < n * PANEL && factor == 0; i += LANES) vec_store(scores + i, vec_load(scores + i) * 0);
    return softcap > 0 || factor == 0 ? 1 : factor;
}

// exp of a score minus the maximum (or the log-sum-exp), so x exceeds 0 by a rounding error at most. Flushes results
// below the smallest normal number to 0; NaN gives NaN.
static inline vec weight_exp(vec x) {
#if RT_REAL_BITS == 64
    return vec_exp(x);
#else
    vec_bits power;
    const vec fraction = vec_exp_split(x, 127, &power); // the low bits of power are those of n + 127
    return vec_select(x < -87, vec_set(0), fraction * (vec)(power << 23));
#endif
}

static inline bool lse_is_f64(const rt_attn_block *p) { return p->lse_f64 || p->dtype == RT_F64; }

static inline double load_lse(const rt_attn_block *p, const void *lse, int64_t i) {
    return lse_is_f64(p) ? ((const double *)lse)[i] : (double)((const float *)lse)[i];
}

#endif // RINGTILE_ATTN_SCORES_H
