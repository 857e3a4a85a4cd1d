// Backward: each task adds its query rows' part of dq, dk and dv (FlashAttention, arXiv:2205.14135, algorithm 4).
//
// With scores S = scale q k^T (then the softcap), P = exp(S - lse) and out = P v:
//   dv += P^T dout,   dP = dout v^T,   dS = P (dP - delta) (1 - (S / softcap)^2),
//   dq += scale dS k,   dk += scale dS^T q.
// With dropout, by factors Z, out = (P Z) v:   dv += (P Z)^T dout,   dP = Z (dout v^T).
//
// Every product is computed once, so many tasks add to the same dk and dv. They do so in task order: a task adds to a
// tile of keys only after all earlier tasks of the same (batch, kv head) have passed it. Tasks start in order, so those
// earlier tasks are running or done, and the sums do not depend on the number of workers.
#ifndef RINGTILE_ATTN_BACKWARD_H
#define RINGTILE_ATTN_BACKWARD_H

#include "packed_keys.h"
#include "scores.h"

typedef struct backward_scratch {
    key_ranges ranges;
    dropout_rows dropout;
    real lse[TILE_ROWS],
        lse_rest[TILE_ROWS];  // lse rounded, and the rounding error; +inf and 0 in unused lanes
    real delta[TILE_ROWS];    // 0 in unused lanes
    bool finite[TILE_PANELS]; // q and dout of the panel
    real *q, *dout;           // (TILE_ROWS, D padded) scaled, (TILE_ROWS, Dv padded). For tiles only room for a panel
    // The same, transposed: (TILE_PANELS, D, PANEL), (TILE_PANELS, Dv, PANEL). Pairs: (TILE_PANELS, D / 2, PANEL)
    // and so on, not scaled.
    real *q_panels, *dout_panels;
    real *dq; // (TILE_ROWS, D padded)
    shared_keys shared;
    key_block own;           // where a task packs for itself
    real *dk, *dv;           // (TILE_KEYS, D padded), (TILE_KEYS, Dv padded)
    real *weights, *dscores; // (TILE_KEYS, PANEL): P (P Z), dS
    real *factors;           // (TILE_KEYS, PANEL): Z, if there is dropout
    // For tiles, which leave q and dk without the scale, and sum dq in panels of columns: pairs of rows
    // (TILE_ROWS / 2, D padded) and (TILE_ROWS / 2, Dv padded).
    real *q_pairs, *dout_pairs;
    real *row_pairs; // for tiles: (TILE_KEYS, 2, TILE_ROWS / 2), P and dS of all panels in pairs of rows
} backward_scratch;

// As forward_lay_out.
static int64_t backward_lay_out(const rt_attn_params *p, char *workspace, backward_scratch *s) {
    const int64_t d = round_up(p->head_dim, LANES), dv = round_up(p->v_head_dim, LANES);
    const word_kind kind = input_kind(p);
    const int64_t d_words = row_words(kind, p->head_dim), dv_words = row_words(kind, p->v_head_dim);
    arena space = {workspace, round_up((int64_t)sizeof(*s), 64)}, *const at = &space;
    const int64_t num_rows = kind == TILE_PAIRS ? PANEL : TILE_ROWS;
    s->q = take(at, num_rows * d);
    s->q_panels = take(at, TILE_ROWS * d_words);
    s->dq = take(at, TILE_ROWS * d);
    s->dout = take(at, num_rows * dv);
    s->dout_panels = take(at, TILE_ROWS * dv_words);
    take_block(p, true, false, at, &s->own);
    s->dk = take(at, TILE_KEYS * d);
    s->dv = take(at, TILE_KEYS * dv);
    s->weights = take(at, TILE_KEYS * PANEL);
    s->dscores = take(at, TILE_KEYS * PANEL);
    s->factors = take(at, num_factors(p));
    s->q_pairs = take(at, for_tiles(p, TILE_ROWS / 2 * d));
    s->dout_pairs = take(at, for_tiles(p, TILE_ROWS / 2 * dv));
    s->row_pairs = take(at, for_tiles(p, TILE_KEYS * TILE_ROWS));
    return space.num_bytes;
}

static int64_t backward_scratch_bytes(const rt_attn_params *p) {
    backward_scratch s;
    return backward_lay_out(p, NULL, &s);
}

// ---- one panel ---------------------------------------------------------------------------------

// For n keys of a panel: weights, S but for its factor, becomes P; dscores, dP, becomes dS.
static void softmax_gradient(real softcap, real factor, const real *lse, const real *lse_rest, const real *delta,
                             int64_t n, real *weights, real *dscores) {
    const vec inverse_cap = vec_set(softcap > 0 ? 1 / softcap : 0);
    for (int64_t j = 0; j < PANEL; j += LANES) {
        const vec lse_vec = vec_load(lse + j), rest_vec = vec_load(lse_rest + j), delta_vec = vec_load(delta + j);
        for (int64_t i = j; i < n * PANEL; i += PANEL) {
            const vec score = vec_load(weights + i) * factor, weight = weight_exp((score - lse_vec) - rest_vec),
                      tanh_vec = score * inverse_cap;
            vec_store(weights + i, weight);
            vec dscore = weight * (vec_load(dscores + i) - delta_vec);
            if (softcap > 0) dscore *= 1 - tanh_vec * tanh_vec;
            vec_store(dscores + i, dscore);
        }
    }
}

// The part of a block that one panel looks at: keys [begin, end) of the run, and their rows in block and scratch.
typedef struct panel_part {
    const run_blocks *blocks;
    int64_t panel, begin, end;
    const real *k_words, *v_words, *k_columns;
    real *k, *dk, *dv, *row_pairs;
} panel_part;

// The last three products over attended pairs only: a weight of 0 would not silence a masked number that is not finite.
static void add_attended_gradients(const rt_attn_params *p, const panel_part *part, backward_scratch *s) {
    const int64_t d = round_up(p->head_dim, LANES), dv = round_up(p->v_head_dim, LANES);
    const bool columns = input_kind(p) == TILE_PAIRS;
    const real *q = s->q + (columns ? 0 : part->panel * PANEL * d),
               *dout = s->dout + (columns ? 0 : part->panel * PANEL * dv);
    for (int64_t i = 0; i < PANEL; i++) {
        const int64_t row = part->panel * PANEL + i;
        const int64_t lo = max64(part->begin, s->ranges.lo[row]), hi = min64(part->end, s->ranges.hi[row]);
        real *dq = s->dq + part->panel * PANEL * d + (columns ? i : i * d);
        for (int64_t key = lo - part->begin; key < hi - part->begin; key++) {
            if (!key_meets_row(&s->ranges, row, part->begin + key)) continue;
            const real weight = s->weights[key * PANEL + i], dscore = s->dscores[key * PANEL + i];
            for (int64_t j = 0; j < dv; j++) part->dv[key * dv + j] += weight * dout[i * dv + j];
            for (int64_t j = 0; j < d; j++) {
                part->dk[key * d + j] += dscore * q[i * d + j];
                dq[columns ? j * PANEL : j] += dscore * part->k[key * d + j];
            }
        }
    }
}

// The last three products of a span: dv += P^T dout, dk += dS^T (scale q), dq += dS k.
static void add_span_gradients(const rt_attn_params *p, const panel_part *part, const attn_span *at,
                               backward_scratch *s) {
    const int64_t d = round_up(p->head_dim, LANES), dv = round_up(p->v_head_dim, LANES);
    const int64_t row = part->panel * PANEL + at->row;
    const real *weights = s->weights + at->key * PANEL + at->row, *dscores = s->dscores + at->key * PANEL + at->row;
    gemm(at->num_keys, dv, at->num_rows, rows_of(weights, PANEL), s->dout + row * dv, part->dv + at->key * dv, dv,
         true);
    gemm(at->num_keys, d, at->num_rows, rows_of(dscores, PANEL), s->q + row * d, part->dk + at->key * d, d, true);
    gemm(at->num_rows, d, at->num_keys, transposed(dscores, PANEL), part->k + at->key * d, s->dq + row * d, d, true);
}

// The n keys' P and dS of a panel rounded to bf16: into its pairs of rows, and dscores in place, whose row i then holds
// keys 2 i and 2 i + 1.
static void pair_gradients(int64_t n, const real *weights, real *dscores, real *row_pairs) {
    for (int64_t key = 0; key < n; key++, row_pairs += TILE_ROWS)
        for (int64_t j = 0; j < PANEL; j += 2 * LANES) {
            const real *weight = weights + key * PANEL + j, *dscore = dscores + key * PANEL + j;
            vec_store(row_pairs + j / 2, pair_neighbours(vec_load(weight), vec_load(weight + LANES)));
            vec_store(row_pairs + (TILE_ROWS + j) / 2, pair_neighbours(vec_load(dscore), vec_load(dscore + LANES)));
        }
    pair_keys(n, dscores);
}

// In tiles, dv and dk of a tile of n keys, once for all panels in a row that have pairs of a block of keys: each
// product loads and stores its sums, which costs as much as two of its steps. panels: by block a bit for each such
// panel.
static void add_keys_in_tiles(const rt_attn_params *p, int64_t n, const uint32_t *panels, backward_scratch *s) {
    const int64_t d = round_up(p->head_dim, LANES), dv = round_up(p->v_head_dim, LANES);
    for (int64_t key = 0; key < n; key += TILE_DEPTH)
        for (int64_t panel = 0, end; panel < TILE_PANELS; panel = end + 1) {
            for (end = panel; panels[key / TILE_DEPTH] >> end & 1;) end++;
            if (end == panel) continue;
            const int64_t num_keys = min64(TILE_DEPTH, n - key), pairs = panel * PANEL / 2;
            const int64_t depth = (end - panel) * PANEL / 2;
            const real *weights = s->row_pairs + key * TILE_ROWS + pairs, *dscores = weights + TILE_ROWS / 2;
            gemm_add_tiles(num_keys, dv, depth, rows_of(weights, TILE_ROWS), s->dout_pairs + pairs * dv,
                           s->dv + key * dv, dv);
            gemm_add_tiles(num_keys, d, depth, rows_of(dscores, TILE_ROWS), s->q_pairs + pairs * d, s->dk + key * d, d);
        }
}

// Returns whether the panel's part of dk and dv is yet to be added, by add_keys_in_tiles.
static bool backward_panel(const rt_attn_params *p, const query_tile *queries, const panel_part *part, bool keys_finite,
                           backward_scratch *s) {
    const int64_t panel = part->panel, begin = part->begin, end = part->end;
    const int64_t n = end - begin, rows = panel * PANEL;
    const word_kind kind = input_kind(p);
    const int64_t d_words = row_words(kind, p->head_dim), dv_words = row_words(kind, p->v_head_dim);
    const bool full = panel_is_full(&s->ranges, panel, begin, end);

    attn_span spans[MAX_SPANS];
    const int64_t num_spans = find_spans(&s->ranges, queries, panel, begin, end, span_block(kind), spans);
    for (int64_t i = 0; i < num_spans; i++) {
        const real *q = s->q_panels + rows * d_words, *dout = s->dout_panels + rows * dv_words;
        gemm_inputs(span_product(p, &spans[i], p->head_dim, part->k_words, q, s->weights));      // S^T
        gemm_inputs(span_product(p, &spans[i], p->v_head_dim, part->v_words, dout, s->dscores)); // dP^T
    }
    const real factor = cap_scores(p, n, s->weights);
    if (!full) mask_panel(&s->ranges, panel, begin, end, -(real)INFINITY, s->weights);
    if (drops(p)) {
        dropout_panel(p, &s->dropout, part->blocks->run, panel, begin, end, s->factors);
        multiply_panel(n, s->factors, s->dscores);
    }
    softmax_gradient((real)p->softcap, factor, s->lse + rows, s->lse_rest + rows, s->delta + rows, n, s->weights,
                     s->dscores);
    if (drops(p)) multiply_panel(n, s->factors, s->weights);
    if (!full) {
        // Masked weights again: exp(-inf - lse) is NaN where lse is -inf or NaN.
        mask_panel(&s->ranges, panel, begin, end, 0, s->weights);
        mask_panel(&s->ranges, panel, begin, end, 0, s->dscores);
        if (!keys_finite || !s->finite[panel]) {
            if (kind == TILE_PAIRS) {
                unpack_numbers(p, true, queries, part->blocks, begin, end, part->k);
                pack_queries(p, queries, REALS, input_q(p), panel, s->q);
                pack_queries(p, queries, REALS, input_dout(p), panel, s->dout);
            }
            add_attended_gradients(p, part, s);
            return false;
        }
    }
    if (kind == TILE_PAIRS) {
        pair_gradients(n, s->weights, s->dscores, part->row_pairs);
        for (const attn_span *at = spans; at < spans + num_spans; at++) // dq += dS k
            gemm_add_tiles(round_up(p->head_dim, LANES), round_up(at->num_rows, LANES), (at->num_keys + 1) / 2,
                           rows_of(part->k_columns + at->key / 2, TILE_KEYS / 2),
                           s->dscores + at->key / 2 * PANEL + at->row,
                           s->dq + rows * round_up(p->head_dim, LANES) + at->row, PANEL);
        return true;
    }
    for (int64_t i = 0; i < num_spans; i++) add_span_gradients(p, part, &spans[i], s);
    return false;
}

// Adds factor times n packed rows to the gradient of one kv head, at rows first_row ...
static void add_key_rows(const query_tile *queries, const int64_t stride[3], int64_t dim, int64_t first_row, int64_t n,
                         real factor, const real *rows, void *gradient) {
    const int64_t padded = round_up(dim, LANES);
    real *to = (real *)gradient + queries->batch * stride[0] + queries->kv_head * stride[2] + first_row * stride[1];
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < dim; j++) to[i * stride[1] + j] += factor * rows[i * padded + j];
}

// ---- turns -------------------------------------------------------------------------------------

// The keys of a call are counted over its runs in order; progress[task] says how many of them a task has passed.
typedef struct attn_turn {
    _Atomic int64_t *progress; // (num_tasks)
    int64_t task;
    int64_t num_pairs; // (batch, kv head) pairs: tasks of one pair are this far apart
} attn_turn;

static inline void pass_keys(const attn_turn *t, int64_t num_keys) {
    atomic_store_explicit(&t->progress[t->task], num_keys, memory_order_release);
}

// Waits until every earlier task of the same (batch, kv head) has passed num_keys keys.
static void wait_for_turn(const attn_turn *t, int64_t num_keys) {
    for (int64_t before = t->task - t->num_pairs; before >= 0; before -= t->num_pairs)
        while (atomic_load_explicit(&t->progress[before], memory_order_acquire) < num_keys) sched_yield();
}

// ---- the task ----------------------------------------------------------------------------------

// The query tile against the block of keys [tile_begin, tile_end) of the run. keys_before: of the call's earlier runs.
static void backward_tile(const rt_attn_params *p, const query_tile *queries, const run_blocks *blocks,
                          int64_t keys_before, int64_t tile_begin, int64_t tile_end, const attn_turn *t,
                          backward_scratch *s) {
    const int64_t d = round_up(p->head_dim, LANES), dv = round_up(p->v_head_dim, LANES);
    const int64_t n = tile_end - tile_begin, skipped = max64(blocks->first - tile_begin, 0);
    const word_kind kind = input_kind(p);
    const int64_t d_words = row_words(kind, p->head_dim), dv_words = row_words(kind, p->v_head_dim);
    key_block block = {0};
    bool packed = false;
    uint32_t panels[TILE_KEYS / TILE_DEPTH] = {0}; // by block of keys, those that add_keys_in_tiles is to add
    pass_keys(t, keys_before + tile_begin);
    for (int64_t panel = 0; panel < queries->num_panels; panel++) {
        int64_t begin, end;
        if (!panel_keys(&s->ranges, panel, tile_begin, tile_end, panel_block(kind), &begin, &end)) continue;
        if (!packed) {
            block = find_block(p, true, queries, &s->shared, blocks, tile_begin, tile_end, &s->own);
            memset(s->dk, 0, (size_t)(n * d) * sizeof(real));
            memset(s->dv, 0, (size_t)(n * dv) * sizeof(real));
            packed = true;
        }
        const int64_t key = begin - tile_begin;
        const panel_part part = {.blocks = blocks,
                                 .panel = panel,
                                 .begin = begin,
                                 .end = end,
                                 .k = block.numbers + key * d,
                                 .k_words = block.k_words + key * d_words,
                                 .v_words = block.v_words + key * dv_words,
                                 .k_columns = block.columns + key / 2,
                                 .dk = s->dk + key * d,
                                 .dv = s->dv + key * dv,
                                 .row_pairs = s->row_pairs + key * TILE_ROWS + panel * PANEL / 2};
        if (!backward_panel(p, queries, &part, block.finite, s)) continue;
        for (int64_t block = key / TILE_DEPTH; block * TILE_DEPTH < end - tile_begin; block++)
            panels[block] |= UINT32_C(1) << panel;
    }
    if (!packed) return;
    if (kind == TILE_PAIRS) add_keys_in_tiles(p, n, panels, s);
    wait_for_turn(t, keys_before + tile_end);
    const int64_t first_row = blocks->run->local_begin + tile_begin + skipped;
    add_key_rows(queries, p->dk_stride, p->head_dim, first_row, n - skipped, kind == TILE_PAIRS ? (real)p->scale : 1,
                 s->dk + skipped * d, p->dk);
    add_key_rows(queries, p->dv_stride, p->v_head_dim, first_row, n - skipped, 1, s->dv + skipped * dv, p->dv);
}

static void attn_backward(const rt_attn_params *p, int64_t task, _Atomic int64_t *progress, char *shared,
                          char *workspace) {
    const attn_grid g = grid_of(p);
    const query_tile queries = query_tile_of(p, &g, task);
    const attn_turn t = {progress, task, p->batch * p->num_kv_heads};
    const int64_t d = round_up(p->head_dim, LANES), dv = round_up(p->v_head_dim, LANES);
    const word_kind kind = input_kind(p);
    const int64_t d_words = row_words(kind, p->head_dim), dv_words = row_words(kind, p->v_head_dim);
    backward_scratch *s = (backward_scratch *)(void *)workspace;
    backward_lay_out(p, workspace, s);
    shared_lay_out(p, true, shared, &s->shared);
    for (int64_t panel = 0; panel < queries.num_panels; panel++) {
        real *q = s->own.k_words, *dout = s->own.v_words; // free until the first block
        if (kind != REALS) {
            pack_queries(p, &queries, kind, input_q(p), panel, q);
            pack_queries(p, &queries, kind, input_dout(p), panel, dout);
        }
        if (kind == TILE_PAIRS) {
            s->finite[panel] = pair_rows(q, PANEL, d, d_words, s->q_pairs + panel * PANEL / 2 * d);
            s->finite[panel] &= pair_rows(dout, PANEL, dv, dv_words, s->dout_pairs + panel * PANEL / 2 * dv);
        } else {
            real *scaled = s->q + panel * PANEL * d, *numbers = s->dout + panel * PANEL * dv;
            s->finite[panel] = pack_queries(p, &queries, REALS, input_q(p), panel, scaled);
            s->finite[panel] &= pack_queries(p, &queries, REALS, input_dout(p), panel, numbers);
            for (int64_t i = 0; i < PANEL * d; i += LANES) vec_store(scaled + i, vec_load(scaled + i) * (real)p->scale);
            if (kind == REALS) q = scaled, dout = numbers;
        }
        if (kind != REALS) sign_pairs(p->scale, PANEL * d_words, q);
        transpose(q, PANEL, d_words, s->q_panels + panel * PANEL * d_words, PANEL);
        transpose(dout, PANEL, dv_words, s->dout_panels + panel * PANEL * dv_words, PANEL);
    }
    if (kind == TILE_PAIRS) tile_configure();
    if (drops(p)) find_dropout_rows(p, &queries, &s->dropout);
    for (int64_t row = 0; row < queries.num_panels * PANEL; row++) {
        const int64_t at =
            (queries.batch * p->num_heads + row_head(&queries, row)) * p->num_queries + row_token(&queries, row);
        const double lse = row < queries.num_rows ? load_lse(p, at) : INFINITY;
        s->lse[row] = (real)lse;
        s->lse_rest[row] = isfinite(lse) ? (real)(lse - (double)s->lse[row]) : 0;
        s->delta[row] = row < queries.num_rows ? ((const real *)p->delta)[at] : 0;
    }
    memset(s->dq, 0, (size_t)(queries.num_panels * PANEL * d) * sizeof(real));

    const position_range range = find_position_range(p, &queries);
    int64_t keys_before = 0, index = 0;
    for (const rt_run *run = p->k_runs; run < p->k_runs + p->num_k_runs;
         index += num_run_blocks(run), keys_before += run++->length) {
        if (!run_meets(run, range)) continue;
        find_ranges(p, &queries, run, &s->ranges);
        const run_blocks blocks = find_blocks(&s->shared, &queries, run, index, &s->ranges);
        for (int64_t begin = first_block_key(p, &s->ranges); begin < s->ranges.last; begin += TILE_KEYS)
            backward_tile(p, &queries, &blocks, keys_before, begin, min64(begin + TILE_KEYS, blocks.last), &t, s);
    }
    pass_keys(&t, INT64_MAX);
    if (kind == TILE_PAIRS) {
        tile_release();
        for (int64_t panel = 0; panel < queries.num_panels; panel++)
            turn_panel(d, s->dq + panel * PANEL * d, s->own.numbers);
    }

    for (int64_t row = 0; row < queries.num_rows; row++) {
        real *dq = (real *)p->dq + queries.batch * p->dq_stride[0] + row_token(&queries, row) * p->dq_stride[1] +
                   row_head(&queries, row) * p->dq_stride[2];
        for (int64_t j = 0; j < p->head_dim; j++) dq[j] += (real)p->scale * s->dq[row * d + j];
    }
}

// Rounds rows [first, last) of dk and dv, counted over all batches.
static void attn_round_keys(const rt_attn_params *p, int64_t first, int64_t last) {
    for (int64_t i = first * p->num_kv_heads; i < last * p->num_kv_heads; i++) {
        const int64_t token = i / p->num_kv_heads, head = i % p->num_kv_heads;
        const int64_t batch = token / p->num_keys, key = token % p->num_keys;
        store_chunk(p->dtype, p->rounded_dk, i * p->head_dim, p->head_dim,
                    (const real *)p->dk + batch * p->dk_stride[0] + key * p->dk_stride[1] + head * p->dk_stride[2]);
        store_chunk(p->dtype, p->rounded_dv, i * p->v_head_dim, p->v_head_dim,
                    (const real *)p->dv + batch * p->dv_stride[0] + key * p->dv_stride[1] + head * p->dv_stride[2]);
    }
}

#endif // RINGTILE_ATTN_BACKWARD_H
