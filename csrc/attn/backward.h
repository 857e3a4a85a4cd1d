// Backward: each task adds its query rows' part of dq, dk and dv (FlashAttention, arXiv:2205.14135, algorithm 4).
//
// With scores S = scale q k^T (then the softcap), P = exp(S - lse) and out = P v:
//   dv += P^T dout,   dP = dout v^T,   dS = P (dP - delta) (1 - (S / softcap)^2),   dq += scale dS k,   dk += scale dS^T q.
//
// Every product is computed once, so many tasks add to the same dk and dv. They do so in the order of the tasks: a task
// adds to a tile of keys only after the task before it on the same (batch, kv head) has passed that tile. Tasks start in
// order, so the one waited for is running or done, and the sums do not depend on the number of workers.
#ifndef RINGTILE_ATTN_BACKWARD_H
#define RINGTILE_ATTN_BACKWARD_H

#include "block.h"

#include <sched.h>
#include <stdatomic.h>

typedef struct backward_scratch {
    key_ranges ranges;
    real lse[BLOCK_ROWS],
        lse_rest[BLOCK_ROWS];  // lse rounded, and what that left out; +inf, 0 in lanes without a row
    real delta[BLOCK_ROWS];    // 0 there
    bool finite[BLOCK_PANELS]; // q and dout of the panel
    real *q, *dout;            // (BLOCK_ROWS, D padded) scaled, (BLOCK_ROWS, Dv padded)
    // The same, transposed: (BLOCK_PANELS, D, PANEL), (BLOCK_PANELS, Dv, PANEL). In pairs (BLOCK_PANELS, D / 2, PANEL)
    // and so on, not scaled.
    real *q_panels, *dout_panels;
    real *dq;                // (BLOCK_ROWS, D padded)
    real *k_words, *v_words; // (TILE_KEYS, words of D), (TILE_KEYS, words of Dv)
    real *k;                 // (TILE_KEYS, D padded): k_words themselves unless they are pairs
    real *dk, *dv;           // (TILE_KEYS, D padded), (TILE_KEYS, Dv padded)
    real *weights, *dscores; // (TILE_KEYS, PANEL): P, dS
} backward_scratch;

static int64_t backward_scratch_bytes(const rt_attn_params *p) {
    const int64_t d = round_up(p->head_dim, LANES), dv = round_up(p->v_head_dim, LANES);
    const word_kind kind = input_kind(p);
    const int64_t d_words = row_words(kind, p->head_dim), dv_words = row_words(kind, p->v_head_dim);
    const int64_t reals = BLOCK_ROWS * (2 * d + dv + d_words + dv_words) +
                          TILE_KEYS * (2 * d + dv + (kind == REALS ? 0 : d_words) + dv_words + 2 * PANEL);
    return round_up((int64_t)sizeof(backward_scratch), 64) + reals * (int64_t)sizeof(real);
}

static backward_scratch *backward_scratch_at(const rt_attn_params *p, char *workspace) {
    const int64_t d = round_up(p->head_dim, LANES), dv = round_up(p->v_head_dim, LANES);
    const word_kind kind = input_kind(p);
    const int64_t d_words = row_words(kind, p->head_dim), dv_words = row_words(kind, p->v_head_dim);
    backward_scratch *s = (backward_scratch *)(void *)workspace;
    workspace += round_up((int64_t)sizeof(*s), 64);
    s->q = take(&workspace, BLOCK_ROWS * d);
    s->q_panels = take(&workspace, BLOCK_ROWS * d_words);
    s->dq = take(&workspace, BLOCK_ROWS * d);
    s->dout = take(&workspace, BLOCK_ROWS * dv);
    s->dout_panels = take(&workspace, BLOCK_ROWS * dv_words);
    s->k = take(&workspace, TILE_KEYS * d);
    s->k_words = kind == REALS ? s->k : take(&workspace, TILE_KEYS * d_words);
    s->dk = take(&workspace, TILE_KEYS * d);
    s->v_words = take(&workspace, TILE_KEYS * dv_words);
    s->dv = take(&workspace, TILE_KEYS * dv);
    s->weights = take(&workspace, TILE_KEYS * PANEL);
    s->dscores = take(&workspace, TILE_KEYS * PANEL);
    return s;
}

// weights: S becomes P; dscores: dP becomes dS, for n keys of a panel.
static void softmax_gradient(real softcap, const real *lse, const real *lse_rest, const real *delta,
                             int64_t n, real *weights, real *dscores) {
    const vec inverse_cap = vec_set(softcap > 0 ? 1 / softcap : 0);
    for (int64_t j = 0; j < PANEL; j += LANES) {
        const vec lse_vec = vec_load(lse + j), rest_vec = vec_load(lse_rest + j),
                  delta_vec = vec_load(delta + j);
        for (int64_t i = j; i < n * PANEL; i += PANEL) {
            const vec score = vec_load(weights + i), weight = weight_exp((score - lse_vec) - rest_vec),
                      tanh_vec = score * inverse_cap;
            vec_store(weights + i, weight);
            vec dscore = weight * (vec_load(dscores + i) - delta_vec);
            if (softcap > 0) dscore *= 1 - tanh_vec * tanh_vec;
            vec_store(dscores + i, dscore);
        }
    }
}

// The three products of a panel with a partial tile, over attended pairs only: where a masked number is not finite, a
// weight of 0 would not silence it.
static void add_gradients_within(const key_ranges *ranges, int64_t panel, int64_t begin, int64_t end,
                                 int64_t d, int64_t dv, backward_scratch *s, const real *k, real *dk_tile,
                                 real *dv_tile) {
    for (int64_t i = 0; i < PANEL; i++) {
        const int64_t row = panel * PANEL + i;
        const int64_t lo = max64(begin, ranges->lo[row]), hi = min64(end, ranges->hi[row]);
        for (int64_t key = lo - begin; key < hi - begin; key++) {
            const real weight = s->weights[key * PANEL + i], dscore = s->dscores[key * PANEL + i];
            for (int64_t j = 0; j < dv; j++) dv_tile[key * dv + j] += weight * s->dout[row * dv + j];
            for (int64_t j = 0; j < d; j++) {
                dk_tile[key * d + j] += dscore * s->q[row * d + j];
                s->dq[row * d + j] += dscore * k[key * d + j];
            }
        }
    }
}

// Gradients of one panel and one tile; s->dk and s->dv collect those of the tile.
static void backward_panel(const rt_attn_params *p, const block *b, int64_t panel, int64_t tile_begin,
                           int64_t begin, int64_t end, bool keys_finite, backward_scratch *s) {
    const int64_t d = round_up(p->head_dim, LANES), dv = round_up(p->v_head_dim, LANES);
    const int64_t n = end - begin, first_key = begin - tile_begin, rows = panel * PANEL;
    const word_kind kind = input_kind(p);
    const int64_t d_words = row_words(kind, p->head_dim), dv_words = row_words(kind, p->v_head_dim);
    const bool full = panel_is_full(&s->ranges, panel, begin, end);
    const real *k = s->k + first_key * d, *v_words = s->v_words + first_key * dv_words;
    real *dk = s->dk + first_key * d, *dv_tile = s->dv + first_key * dv;

    span spans[MAX_SPANS];
    const int64_t num_spans = find_spans(&s->ranges, b, panel, begin, end, spans);
    for (int64_t i = 0; i < num_spans; i++) {
        const span at = spans[i];
        score_span(p, &at, s->k_words + first_key * d_words, s->q_panels + rows * d_words, s->weights); // S^T
        gemm_inputs(kind, 1, at.num_keys, round_up(at.num_rows, LANES), num_words(kind, p->v_head_dim),
                    v_words + at.key * dv_words, dv_words, s->dout_panels + rows * dv_words + at.row,
                    s->dscores + at.key * PANEL + at.row); // dP^T
    }
    if (p->softcap > 0) softcap_panel((real)p->softcap, n, s->weights);
    if (!full) mask_panel(&s->ranges, panel, begin, end, -(real)INFINITY, s->weights);
    softmax_gradient((real)p->softcap, s->lse + rows, s->lse_rest + rows, s->delta + rows, n, s->weights,
                     s->dscores);
    if (!full) {
        mask_panel(&s->ranges, panel, begin, end, 0,
                   s->weights); // exp(-inf - lse) is NaN where lse is -inf or NaN
        mask_panel(&s->ranges, panel, begin, end, 0, s->dscores);
        if (!keys_finite || !s->finite[panel]) {
            add_gradients_within(&s->ranges, panel, begin, end, d, dv, s, k, dk, dv_tile);
            return;
        }
    }
    for (int64_t i = 0; i < num_spans; i++) {
        const span at = spans[i];
        const real *weights = s->weights + at.key * PANEL + at.row,
                   *dscores = s->dscores + at.key * PANEL + at.row;
        const real *q = s->q + (rows + at.row) * d, *dout = s->dout + (rows + at.row) * dv;
        real *dq = s->dq + (rows + at.row) * d;
        gemm(at.num_keys, dv, at.num_rows, weights, PANEL, 1, dout, dv, dv_tile + at.key * dv, dv,
             true); // dv += P^T dout
        gemm(at.num_keys, d, at.num_rows, dscores, PANEL, 1, q, d, dk + at.key * d, d,
             true); // dk += dS^T (scale q)
        gemm(at.num_rows, d, at.num_keys, dscores, 1, PANEL, k + at.key * d, d, dq, d, true); // dq += dS k
    }
}

// Adds (n, padded) rows of a tile to the gradient of one kv head.
static void add_tile(const block *b, const int64_t stride[3], int64_t dim, int64_t row0, int64_t n,
                     const real *tile, void *gradient) {
    const int64_t padded = round_up(dim, LANES);
    real *to = (real *)gradient + b->batch * stride[0] + b->kv_head * stride[2] + row0 * stride[1];
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < dim; j++) to[i * stride[1] + j] += tile[i * padded + j];
}

// ---- turns: who may add to a key ---------------------------------------------------------------

// progress[task] (num_tasks): keys of the call, counted over its runs in order, that the task is done with.
static inline void pass_keys(_Atomic int64_t *progress, int64_t task, int64_t num_keys) {
    atomic_store_explicit(&progress[task], num_keys, memory_order_release);
}

// Waits until every earlier task of the chain has passed num_keys keys.
static void wait_for_turn(const _Atomic int64_t *progress, int64_t task, int64_t num_chains,
                          int64_t num_keys) {
    for (int64_t before = task - num_chains; before >= 0; before -= num_chains)
        while (atomic_load_explicit(&progress[before], memory_order_acquire) < num_keys) sched_yield();
}

typedef struct turn {
    _Atomic int64_t *progress;
    int64_t task, num_chains;
} turn;

// keys_before: of the call's earlier runs.
static void backward_tile(const rt_attn_params *p, const block *b, const rt_run *run, int64_t keys_before,
                          int64_t tile_begin, int64_t tile_end, const turn *t, backward_scratch *s) {
    const int64_t d = round_up(p->head_dim, LANES), dv = round_up(p->v_head_dim, LANES);
    const int64_t row0 = run->local_begin + tile_begin, n = tile_end - tile_begin;
    const word_kind kind = input_kind(p);
    bool packed = false, keys_finite = true;
    pass_keys(t->progress, t->task, keys_before + tile_begin);
    for (int64_t panel = 0; panel < b->num_panels; panel++) {
        int64_t begin, end;
        if (!panel_keys(&s->ranges, panel, tile_begin, tile_end, &begin, &end)) continue;
        if (!packed) {
            keys_finite = pack_keys(p, b, REALS, p->k, p->k_stride, p->head_dim, row0, n, s->k);
            if (kind != REALS) pack_keys(p, b, kind, p->k, p->k_stride, p->head_dim, row0, n, s->k_words);
            pack_keys(p, b, kind, p->v, p->v_stride, p->v_head_dim, row0, n, s->v_words);
            memset(s->dk, 0, (size_t)(n * d) * sizeof(real));
            memset(s->dv, 0, (size_t)(n * dv) * sizeof(real));
            packed = true;
        }
        backward_panel(p, b, panel, tile_begin, begin, end, keys_finite, s);
    }
    if (!packed) return;
    wait_for_turn(t->progress, t->task, t->num_chains, keys_before + tile_end);
    add_tile(b, p->dk_stride, p->head_dim, row0, n, s->dk, p->dk);
    add_tile(b, p->dv_stride, p->v_head_dim, row0, n, s->dv, p->dv);
}

static void attn_backward(const rt_attn_params *p, int64_t task, _Atomic int64_t *progress, char *workspace) {
    const grid g = grid_of(p);
    const block b = block_of(p, &g, task);
    const turn t = {progress, task, p->batch * p->num_kv_heads};
    const int64_t d = round_up(p->head_dim, LANES), dv = round_up(p->v_head_dim, LANES);
    const word_kind kind = input_kind(p);
    const int64_t d_words = row_words(kind, p->head_dim), dv_words = row_words(kind, p->v_head_dim);
    backward_scratch *s = backward_scratch_at(p, workspace);
    for (int64_t panel = 0; panel < b.num_panels; panel++) {
        real *q = s->q + panel * PANEL * d, *dout = s->dout + panel * PANEL * dv;
        s->finite[panel] = pack_queries(p, &b, REALS, p->q, p->q_stride, p->head_dim, panel, q);
        s->finite[panel] &= pack_queries(p, &b, REALS, p->dout, p->dout_stride, p->v_head_dim, panel, dout);
        for (int64_t i = 0; i < PANEL * d; i += LANES) vec_store(q + i, vec_load(q + i) * (real)p->scale);
        if (kind != REALS) { // k_words and v_words are free until the first tile
            pack_queries(p, &b, kind, p->q, p->q_stride, p->head_dim, panel, s->k_words);
            pack_queries(p, &b, kind, p->dout, p->dout_stride, p->v_head_dim, panel, s->v_words);
            q = s->k_words, dout = s->v_words;
        }
        transpose_panel(q, d_words, s->q_panels + panel * PANEL * d_words);
        transpose_panel(dout, dv_words, s->dout_panels + panel * PANEL * dv_words);
    }
    for (int64_t row = 0; row < b.num_panels * PANEL; row++) {
        const int64_t at = (b.batch * p->num_heads + row_head(&b, row)) * p->num_queries + row_token(&b, row);
        const double lse = row < b.num_rows ? load_lse(p, at) : INFINITY;
        s->lse[row] = (real)lse;
        s->lse_rest[row] = isfinite(lse) ? (real)(lse - (double)s->lse[row]) : 0;
        s->delta[row] = row < b.num_rows ? ((const real *)p->delta)[at] : 0;
    }
    memset(s->dq, 0, (size_t)(b.num_panels * PANEL * d) * sizeof(real));

    int64_t keys_before = 0;
    for (int64_t i = 0; i < p->num_k_runs; i++) {
        const rt_run *run = &p->k_runs[i];
        find_ranges(p, &b, run, &s->ranges);
        for (int64_t begin = s->ranges.first; begin < s->ranges.last; begin += TILE_KEYS)
            backward_tile(p, &b, run, keys_before, begin, min64(begin + TILE_KEYS, s->ranges.last), &t, s);
        keys_before += run->length;
    }
    pass_keys(progress, task, INT64_MAX);

    for (int64_t row = 0; row < b.num_rows; row++) {
        real *dq = (real *)p->dq + b.batch * p->dq_stride[0] + row_token(&b, row) * p->dq_stride[1] +
                   row_head(&b, row) * p->dq_stride[2];
        for (int64_t j = 0; j < p->head_dim; j++) dq[j] += (real)p->scale * s->dq[row * d + j];
    }
}

#endif // RINGTILE_ATTN_BACKWARD_H
