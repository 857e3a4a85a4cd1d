// Forward: each task merges the block of keys into out and lse of its query rows (FlashAttention, arXiv:2205.14135).
#ifndef RINGTILE_ATTN_FORWARD_H
#define RINGTILE_ATTN_FORWARD_H

#include "packed_keys.h"
#include "scores.h"

#include <tgmath.h>

typedef struct forward_scratch {
    key_ranges ranges;
    dropout_rows dropout;
    real max[TILE_ROWS], sum[TILE_ROWS], rescale[TILE_ROWS]; // of each row's scores so far
    real *q_panels; // (TILE_PANELS, D, PANEL) scaled; pairs are (TILE_PANELS, D / 2, PANEL) and not scaled
    real *out; // (TILE_ROWS, Dv padded): sum of weights times values, relative to max; in panels of columns for tiles
    shared_keys shared;
    key_block own;    // where a task packs for itself
    real *weights[2]; // (TILE_KEYS, PANEL), of this panel and the next: scores, then exp(scores - max)
    real *factors;    // (TILE_KEYS, PANEL) of dropout, if there is any
} forward_scratch;

// Lays the scratch out in a workspace, in which it comes first, or with NULL only counts; returns the bytes.
static int64_t forward_lay_out(const rt_attn_params *p, char *workspace, forward_scratch *s) {
    const int64_t d = row_words(input_kind(p), p->head_dim), dv = round_up(p->v_head_dim, LANES);
    arena space = {workspace, round_up((int64_t)sizeof(*s), 64)}, *const at = &space;
    s->q_panels = take(at, TILE_ROWS * d);
    s->out = take(at, TILE_ROWS * dv);
    take_block(p, false, false, at, &s->own);
    s->weights[0] = take(at, TILE_KEYS * PANEL);
    s->weights[1] = input_kind(p) == TILE_PAIRS ? take(at, TILE_KEYS * PANEL) : s->weights[0];
    s->factors = take(at, num_factors(p));
    return space.num_bytes;
}

static int64_t forward_scratch_bytes(const rt_attn_params *p) {
    forward_scratch s;
    return forward_lay_out(p, NULL, &s);
}

// Scores (keys, PANEL) that become weights, exp(factor * score - reference).
typedef struct softmax_work {
    real factor, *weights, *sum;                 // the weights of all keys are added to sum (PANEL)
    vec reference[PANEL_VECS], part[PANEL_VECS]; // part: of sum, of up to SUM_LEN keys
} softmax_work;

// The online softmax of a panel goes on to n keys: updates the running max, and the sum to it; the caller multiplies
// out by rescale.
static void move_reference(int64_t n, real *max, real *rescale, softmax_work *w) {
    vec top[PANEL_VECS];
#pragma GCC unroll 4
    for (int j = 0; j < PANEL_VECS; j++) top[j] = vec_set(-(real)INFINITY);
    for (int64_t k = 0; k < n; k++)
#pragma GCC unroll 4
        for (int j = 0; j < PANEL_VECS; j++) top[j] = vec_max(top[j], vec_load(w->weights + k * PANEL + j * LANES));
#pragma GCC unroll 4
    for (int j = 0; j < PANEL_VECS; j++) {
        top[j] = vec_max(vec_load(max + j * LANES), top[j] * w->factor);
        // A row without a key so far, or with scores of -inf only: any finite reference makes its weights 0.
        w->reference[j] = vec_select(top[j] == -(real)INFINITY, vec_set(0), top[j]);
        const vec shrink = weight_exp(vec_load(max + j * LANES) - w->reference[j]);
        vec_store(max + j * LANES, top[j]);
        vec_store(w->sum + j * LANES, vec_load(w->sum + j * LANES) * shrink);
        vec_store(rescale + j * LANES, shrink);
    }
}

ALWAYS_INLINE void add_part(softmax_work *w) {
#pragma GCC unroll 4
    for (int j = 0; j < PANEL_VECS; j++) {
        vec_store(w->sum + j * LANES, vec_load(w->sum + j * LANES) + w->part[j]);
        w->part[j] = vec_set(0);
    }
}

// Of keys [first, last); in_pairs: of so many pairs of keys, whose weights become pairs (keys / 2, PANEL) of bf16.
ALWAYS_INLINE void exponentiate(softmax_work *w, int64_t first, int64_t last, bool in_pairs) {
    for (int64_t i = first; i < last; i++)
#pragma GCC unroll 4
        for (int j = 0; j < PANEL_VECS; j++) {
            const real *at = w->weights + (in_pairs ? 2 * i : i) * PANEL + j * LANES;
            vec weight = weight_exp(vec_load(at) * w->factor - w->reference[j]);
            w->part[j] += weight;
            if (in_pairs) {
                const vec odd = weight_exp(vec_load(at + PANEL) * w->factor - w->reference[j]);
                w->part[j] += odd;
                weight = pair_lanes(weight, odd);
            }
            vec_store(w->weights + i * PANEL + j * LANES, weight);
        }
}

ALWAYS_INLINE void exponentiate_pairs(void *ctx, int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i++) {
        exponentiate(ctx, i, i + 1, true);
        if ((i + 1) % (SUM_LEN / 2) == 0) add_part(ctx);
    }
}

// Exponentiates the scores of n keys. in_pairs: as pairs, while tiles multiply the products, which are of other arrays;
// weights beyond n, up to a whole block, become 0.
static void softmax_step(softmax_work w, int64_t n, bool in_pairs, const product *products, int64_t num_products) {
    if (!in_pairs) {
        for (int64_t k = 0; k < n; k += SUM_LEN) {
            exponentiate(&w, k, min64(k + SUM_LEN, n), false);
            add_part(&w);
        }
        gemm_tiles(products, num_products);
        return;
    }
    for (int64_t j = 0; j < PANEL && n % 2 != 0; j += LANES)
        vec_store(w.weights + n * PANEL + j, vec_set(-(real)INFINITY));
    const int64_t num_pairs = (n + 1) / 2, padded = round_up(n, TILE_DEPTH) / 2;
    gemm_tiles_while(products, num_products, exponentiate_pairs, &w, num_pairs);
    add_part(&w);
    memset(w.weights + num_pairs * PANEL, 0, (size_t)((padded - num_pairs) * PANEL) * sizeof(real));
}

static void scale_rows(const real *factors, int64_t num_rows, int64_t width, real *rows) {
    for (int64_t i = 0; i < num_rows; i++) {
        if (factors[i] == 1) continue;
        for (int64_t j = 0; j < width; j += LANES)
            vec_store(rows + i * width + j, vec_load(rows + i * width + j) * factors[i]);
    }
}

// The same of columns (width, PANEL).
static void scale_columns(const real *factors, int64_t width, real *columns) {
    vec factor[PANEL_VECS];
    vec_bits all = ~(vec_bits){0};
    for (int j = 0; j < PANEL_VECS; j++) factor[j] = vec_load(factors + j * LANES), all &= factor[j] == 1;
    bool is_one = true;
    for (int l = 0; l < LANES; l++) is_one &= all[l] != 0;
    for (int64_t i = 0; i < width && !is_one; i++)
        for (int j = 0; j < PANEL_VECS; j++) {
            real *at = columns + i * PANEL + j * LANES;
            vec_store(at, vec_load(at) * factor[j]);
        }
}

// out[row] += weights[key, row] * v[key] over attended keys only: a weight of 0 would not silence a masked value that
// is not finite. Element j of a row is out[row * out_row + j * out_col].
static void add_attended_values(const key_ranges *ranges, int64_t panel, int64_t begin, int64_t end,
                                const real *weights, const real *v, int64_t width, real *out, int64_t out_row,
                                int64_t out_col) {
    for (int64_t row = 0; row < PANEL; row++) {
        const int64_t lo = max64(begin, ranges->lo[panel * PANEL + row]),
                      hi = min64(end, ranges->hi[panel * PANEL + row]);
        for (int64_t key = lo; key < hi; key++) {
            if (!key_meets_row(ranges, panel * PANEL + row, key)) continue;
            for (int64_t j = 0; j < width; j++)
                out[row * out_row + j * out_col] += weights[(key - begin) * PANEL + row] * v[(key - begin) * width + j];
        }
    }
}

// A panel of queries against a block of keys, of which it attends keys [begin, end) of the run.
typedef struct panel_step {
    int64_t panel, begin, end, num_spans;
    attn_span spans[MAX_SPANS];
} panel_step;

// The products of the panel's scores with the block, whose first key is tile_begin; returns how many.
static int64_t score_products(const rt_attn_params *p, const panel_step *at, const key_block *block, int64_t tile_begin,
                              const forward_scratch *s, real *weights, product *products) {
    const int64_t d = row_words(input_kind(p), p->head_dim);
    const real *k = block->k_words + (at->begin - tile_begin) * d, *q = s->q_panels + at->panel * PANEL * d;
    for (int64_t i = 0; i < at->num_spans; i++)
        products[i] = span_product(p, &at->spans[i], p->head_dim, k, q, weights);
    return at->num_spans;
}

// The query tile against the block of keys [tile_begin, tile_end) of the run.
static void forward_tile(const rt_attn_params *p, const query_tile *queries, const run_blocks *blocks,
                         int64_t tile_begin, int64_t tile_end, forward_scratch *s) {
    const word_kind kind = input_kind(p);
    const int64_t dv = round_up(p->v_head_dim, LANES);
    panel_step steps[TILE_PANELS];
    int64_t num_steps = 0;
    for (int64_t panel = 0; panel < queries->num_panels; panel++) {
        panel_step *at = &steps[num_steps];
        if (!panel_keys(&s->ranges, panel, tile_begin, tile_end, panel_block(kind), &at->begin, &at->end)) continue;
        at->panel = panel, num_steps++;
        at->num_spans = find_spans(&s->ranges, queries, panel, at->begin, at->end, span_block(kind), at->spans);
    }
    if (num_steps == 0) return;
    const key_block block = find_block(p, false, queries, &s->shared, blocks, tile_begin, tile_end, &s->own);
    for (int64_t i = 0; i < num_steps; i++) {
        const panel_step *at = &steps[i];
        const int64_t begin = at->begin, end = at->end, n = end - begin, rows = at->panel * PANEL;
        const bool full = panel_is_full(&s->ranges, at->panel, begin, end), v_finite = block.finite;
        real *v = block.numbers + (begin - tile_begin) * dv, *out = s->out + rows * dv, *weights = s->weights[i % 2];
        product scores[MAX_SPANS];
        int64_t num_scores = 0;
        if (kind != TILE_PAIRS || i == 0) num_scores = score_products(p, at, &block, tile_begin, s, weights, scores);
        for (int64_t j = 0; j < num_scores; j++) gemm_inputs(scores[j]);
        num_scores = 0;
        if (kind == TILE_PAIRS && i + 1 < num_steps) // those of the next panel, while vectors exponentiate these
            num_scores = score_products(p, at + 1, &block, tile_begin, s, s->weights[(i + 1) % 2], scores);
        const real factor = cap_scores(p, n, weights);
        if (!full) mask_panel(&s->ranges, at->panel, begin, end, -(real)INFINITY, weights);
        const bool in_pairs = kind == TILE_PAIRS && !drops(p) && (full || v_finite);
        softmax_work work = {.factor = factor, .weights = weights, .sum = s->sum + rows};
        move_reference(n, s->max + rows, s->rescale + rows, &work);
        softmax_step(work, n, in_pairs, scores, num_scores);
        if (drops(p)) { // the sums are those of all keys
            dropout_panel(p, &s->dropout, blocks->run, at->panel, begin, end, s->factors);
            multiply_panel(n, s->factors, weights);
        }
        if (kind == TILE_PAIRS)
            scale_columns(s->rescale + rows, dv, out);
        else
            scale_rows(s->rescale + rows, PANEL, dv, out);
        if (!full && !v_finite) {
            if (kind == TILE_PAIRS) unpack_numbers(p, false, queries, blocks, begin, end, v);
            add_attended_values(&s->ranges, at->panel, begin, end, weights, v, dv, out, kind == TILE_PAIRS ? 1 : dv,
                                kind == TILE_PAIRS ? PANEL : 1);
            continue;
        }
        if (kind == TILE_PAIRS && !in_pairs) pair_keys(n, weights);
        for (const attn_span *span = at->spans; span < at->spans + at->num_spans; span++) { // out += weights v
            if (kind == TILE_PAIRS)
                gemm_add_tiles(dv, round_up(span->num_rows, LANES), (span->num_keys + 1) / 2,
                               rows_of(block.columns + (begin - tile_begin + span->key) / 2, TILE_KEYS / 2),
                               weights + span->key / 2 * PANEL + span->row, out + span->row, PANEL);
            else
                gemm(span->num_rows, dv, span->num_keys, transposed(weights + span->key * PANEL + span->row, PANEL),
                     v + span->key * dv, out + span->row * dv, dv, true);
        }
    }
}

// The row of the caller's out; without one, the block's own.
static real *out_row(const rt_attn_params *p, const query_tile *queries, int64_t row, const forward_scratch *s) {
    if (p->out == NULL) return s->out + row * round_up(p->v_head_dim, LANES);
    return (real *)p->out + queries->batch * p->out_stride[0] + row_token(queries, row) * p->out_stride[1] +
           row_head(queries, row) * p->out_stride[2];
}

static void round_row(const rt_attn_params *p, const query_tile *queries, int64_t row, const forward_scratch *s) {
    const int64_t token = queries->batch * p->num_queries + row_token(queries, row);
    const int64_t at = (token * p->num_heads + row_head(queries, row)) * p->v_head_dim;
    store_chunk(p->dtype, p->rounded_out, at, p->v_head_dim, out_row(p, queries, row, s));
}

// Merges the block's (out, lse) into the caller's: out -= sigmoid(lse_block - lse) (out - out_block). In f64, because
// rounding an lse above 4 to f32 would put a relative error of 2^-22 into every weight.
static void merge_row(const rt_attn_params *p, const query_tile *queries, int64_t row, const forward_scratch *s) {
    const real sum = s->sum[row];
    const int64_t head = row_head(queries, row), token = row_token(queries, row), dv = round_up(p->v_head_dim, LANES);
    const int64_t at = (queries->batch * p->num_heads + head) * p->num_queries + token;
    real *out = out_row(p, queries, row, s);
    const real *out_block = s->out + row * dv;
    if (sum == 0) { // no key, or scores of -inf only: 0, or not a number where an attended value is not finite
        for (int64_t j = 0; j < p->v_head_dim; j++)
            if (p->fresh || out_block[j] != 0) out[j] = out_block[j];
        if (p->fresh) store_lse(p, at, -INFINITY);
        return;
    }
    const double lse_before = p->fresh ? -INFINITY : load_lse(p, at),
                 lse_block = (double)s->max[row] + log((double)sum);
    if (lse_before == -INFINITY) {
        for (int64_t j = 0; j < p->v_head_dim; j++)
            out[j] = (p->fresh || out[j] == out[j] ? 0 : out[j]) + out_block[j] / sum; // a NaN of scores of -inf stays
        store_lse(p, at, lse_block);
        return;
    }
    const double high = lse_before > lse_block ? lse_before : lse_block,
                 low = lse_before > lse_block ? lse_block : lse_before;
    const real share = (real)(1 / (1 + exp(lse_before - lse_block))); // sigmoid(lse_block - lse)
    for (int64_t j = 0; j < p->v_head_dim; j++) out[j] -= share * (out[j] - out_block[j] / sum);
    store_lse(p, at, high + log1p(exp(low - high)));
}

static void attn_forward(const rt_attn_params *p, int64_t task, char *shared, char *workspace) {
    const attn_grid g = grid_of(p);
    const query_tile queries = query_tile_of(p, &g, task);
    const word_kind kind = input_kind(p);
    const int64_t d = row_words(kind, p->head_dim), dv = round_up(p->v_head_dim, LANES);
    forward_scratch *s = (forward_scratch *)(void *)workspace;
    forward_lay_out(p, workspace, s);
    shared_lay_out(p, false, shared, &s->shared);
    real *const q = s->own.k_words, *const turned = s->own.numbers; // free until the first block, and after the last
    for (int64_t panel = 0; panel < queries.num_panels; panel++) {
        pack_queries(p, &queries, kind, input_q(p), panel, q);
        if (kind == REALS)
            for (int64_t i = 0; i < PANEL * d; i += LANES) vec_store(q + i, vec_load(q + i) * (real)p->scale);
        else
            sign_pairs(p->scale, PANEL * d, q);
        transpose(q, PANEL, d, s->q_panels + panel * PANEL * d, PANEL);
    }
    if (kind == TILE_PAIRS) tile_configure();
    if (drops(p)) find_dropout_rows(p, &queries, &s->dropout);
    for (int64_t row = 0; row < queries.num_panels * PANEL; row++) s->max[row] = -(real)INFINITY, s->sum[row] = 0;
    memset(s->out, 0, (size_t)(queries.num_panels * PANEL * dv) * sizeof(real));
    const position_range range = find_position_range(p, &queries);
    int64_t index = 0;
    for (const rt_run *run = p->k_runs; run < p->k_runs + p->num_k_runs; index += num_run_blocks(run++)) {
        if (!run_meets(run, range)) continue;
        find_ranges(p, &queries, run, &s->ranges);
        const run_blocks blocks = find_blocks(&s->shared, &queries, run, index, &s->ranges);
        for (int64_t begin = first_block_key(p, &s->ranges); begin < s->ranges.last; begin += TILE_KEYS)
            forward_tile(p, &queries, &blocks, begin, min64(begin + TILE_KEYS, blocks.last), s);
    }
    if (kind == TILE_PAIRS) {
        tile_release();
        for (int64_t panel = 0; panel < queries.num_panels; panel++)
            turn_panel(dv, s->out + panel * PANEL * dv, turned);
    }
    for (int64_t row = 0; row < queries.num_rows; row++) {
        merge_row(p, &queries, row, s);
        if (p->rounded_out != NULL) round_row(p, &queries, row, s);
    }
}

#endif // RINGTILE_ATTN_FORWARD_H
