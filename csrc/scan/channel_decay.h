// The same as decay.h for a decay of each channel (KDA), where a pair's product is a sum of differently decayed terms.
//
// Rows are taken in blocks. Within a block the decay of a pair is a running product of exp g, which can only sink.
// Against tokens before the block it is split at the block's beginning: both factors are at most 1, so where one
// underflows, so does the true decay.
#ifndef RINGTILE_SCAN_CHANNEL_DECAY_H
#define RINGTILE_SCAN_CHANNEL_DECAY_H

#include "decay.h"

static void add_to_sums(int64_t count, const real *g, double *sums) {
    for (int64_t i = 0; i < count; i++) sums[i] += (double)g[i];
}

static void find_channel_decays(scan_scratch *s) {
    const int64_t d = s->d;
    memset(s->sums, 0, (size_t)d * sizeof(double));
    for (int64_t t = 0; t < s->n; t++) {
        add_to_sums(d, s->g + t * d, s->sums);
        exp_of_sums(d, s->sums, s->decay_in + t * d);
    }
    memcpy(s->decay_all, s->decay_in + (s->n - 1) * d, (size_t)d * sizeof(real));
    memset(s->sums, 0, (size_t)d * sizeof(double));
    for (int64_t t = s->n - 1; t >= 0; t--) {
        exp_of_sums(d, s->sums, s->decay_out + t * d);
        add_to_sums(d, s->g + t * d, s->sums);
    }
}

// The block's decays. Before it, row i < begin of sums holds the sum of g of tokens i + 1 .. begin - 1; then of ..end
// - 1. column_decay and rows = k column_decay are of the tokens before the block.
static void begin_block(scan_scratch *s, int64_t begin, int64_t end) {
    const int64_t d = s->d;
    for (int64_t i = 0; i < begin; i++) {
        exp_of_sums(d, s->sums + i * d, s->column_decay + i * d);
        scan_multiply(d, s->k + i * d, s->column_decay + i * d, s->rows + i * d);
    }
    double *all = s->sums + (end - 1) * d;
    memset(all, 0, (size_t)d * sizeof(double));
    for (int64_t t = begin; t < end; t++) {
        add_to_sums(d, s->g + t * d, all);
        exp_of_sums(d, all, s->row_decay + t * d);
        for (int64_t c = 0; c < d; c += LANES)
            vec_store(s->token_decay + (t - begin) * d + c, vec_exp(vec_load(s->g + t * d + c)));
    }
    for (int64_t i = 0; i < begin; i++)
        for (int64_t c = 0; c < d; c++) s->sums[i * d + c] += all[c];
    memset(all, 0, (size_t)d * sizeof(double));
    for (int64_t t = end - 2; t >= begin; t--) {
        memcpy(s->sums + t * d, s->sums + (t + 1) * d, (size_t)d * sizeof(double));
        add_to_sums(d, s->g + (t + 1) * d, s->sums + t * d);
    }
}

// pairs of the block with the tokens before it: (rows decayed from its beginning) k_columns.
static void pairs_before_block(scan_scratch *s, int64_t begin, int64_t end, const real *rows, real *pairs) {
    const int64_t d = s->d;
    scan_multiply((end - begin) * d, rows + begin * d, s->row_decay + begin * d, s->rows_2);
    gemm(end - begin, begin, d, rows_of(s->rows_2, d), s->k_columns, pairs + begin * CHUNK_ROWS, CHUNK_ROWS, false);
}

static void pairs_within_block(scan_scratch *s, int64_t begin, int64_t end) {
    const int64_t d = s->d;
    real decayed[RT_MAX_HEAD_DIM];
    for (int64_t i = begin; i < end; i++) {
        memcpy(decayed, s->k + i * d, (size_t)d * sizeof(real));
        s->qk[i * CHUNK_ROWS + i] = scan_dot(d, s->q + i * d, decayed);
        for (int64_t t = i + 1; t < end; t++) {
            vec qk = vec_set(0), kk = vec_set(0);
            for (int64_t c = 0; c < d; c += LANES) {
                const vec key = vec_load(decayed + c) * vec_load(s->token_decay + (t - begin) * d + c);
                vec_store(decayed + c, key);
                qk += vec_load(s->q + t * d + c) * key, kk += vec_load(s->k + t * d + c) * key;
            }
            s->qk[t * CHUNK_ROWS + i] = vec_reduce_sum(qk);
            s->kk[t * CHUNK_ROWS + i] = vec_reduce_sum(kk);
        }
    }
}

static void find_channel_pairs(const rt_scan_params *p, scan_scratch *s) {
    const size_t bytes = (size_t)(s->n * CHUNK_ROWS) * sizeof(real);
    memset(s->qk, 0, bytes), memset(s->kk, 0, bytes);
    for (int64_t begin = 0; begin < s->n; begin += BLOCK_ROWS) {
        const int64_t end = min64(begin + BLOCK_ROWS, s->n);
        begin_block(s, begin, end);
        if (begin > 0) {
            transpose(s->rows, begin, s->d, s->k_columns, CHUNK_ROWS);
            pairs_before_block(s, begin, end, s->q, s->qk);
            if (p->beta != NULL) pairs_before_block(s, begin, end, s->k, s->kk);
        }
        pairs_within_block(s, begin, end);
    }
}

// ---- gradients -----------------------------------------------------------------------------------

static void move_flow(const scan_scratch *s, int64_t token, int64_t sign, const real *x, const real *y) {
    double *flow = s->flow + (token + 1) * s->d;
    for (int64_t c = 0; c < s->d; c++) flow[c] += (double)sign * (double)x[c] * (double)y[c];
}

// drows_t += decay_t (dpairs rows)_t for the tokens of the block; free: (BLOCK_ROWS, d).
static void add_row_gradients(scan_scratch *s, int64_t begin, int64_t end, const real *dpairs, const real *rows,
                              real *drows) {
    const int64_t d = s->d;
    gemm(end - begin, d, begin, rows_of(dpairs + begin * CHUNK_ROWS, CHUNK_ROWS), s->rows, s->rows_2, d, false);
    scan_multiply((end - begin) * d, s->rows_2, s->row_decay + begin * d, s->rows_2);
    for (int64_t t = begin; t < end; t++) {
        const real *part = s->rows_2 + (t - begin) * d;
        scan_add_scaled(d, 1, part, drows + t * d);
        move_flow(s, t, -1, rows + t * d, part);
    }
}

// to (begin, d) += dpairs^T (rows decayed from the block's beginning).
static void add_column_gradients(scan_scratch *s, int64_t begin, int64_t end, const real *dpairs, const real *rows,
                                 bool add, real *to) {
    const int64_t d = s->d;
    scan_multiply((end - begin) * d, rows + begin * d, s->row_decay + begin * d, s->rows_2);
    gemm(begin, d, end - begin, transposed(dpairs + begin * CHUNK_ROWS, CHUNK_ROWS), s->rows_2, to, d, add);
}

static void add_gradients_within_block(const rt_scan_params *p, scan_scratch *s, int64_t begin, int64_t end) {
    const int64_t d = s->d;
    real decay[RT_MAX_HEAD_DIM], dkey[RT_MAX_HEAD_DIM];
    for (int64_t i = begin; i < end; i++) {
        const real *key = s->k + i * d, own = s->dqk[i * CHUNK_ROWS + i];
        scan_add_scaled(d, own, key, s->dq + i * d);
        scan_add_scaled(d, own, s->q + i * d, s->dk + i * d);
        fill(d, 1, decay), fill(d, 0, dkey);
        for (int64_t t = i + 1; t < end; t++) {
            const real dqk = s->dqk[t * CHUNK_ROWS + i], dkk = p->beta == NULL ? 0 : s->dkk[t * CHUNK_ROWS + i];
            double *flow = s->flow + (t + 1) * d;
            for (int64_t c = 0; c < d; c += LANES) {
                const int64_t at = t * d + c;
                const vec factor = vec_load(decay + c) * vec_load(s->token_decay + (t - begin) * d + c);
                const vec part = factor * (vec_load(s->q + at) * dqk + vec_load(s->k + at) * dkk);
                const vec decayed = vec_load(key + c) * factor, moved = vec_load(key + c) * part;
                vec_store(decay + c, factor);
                vec_store(dkey + c, vec_load(dkey + c) + part);
                vec_store(s->dq + at, vec_load(s->dq + at) + decayed * dqk);
                vec_store(s->dk + at, vec_load(s->dk + at) + decayed * dkk);
                for (int l = 0; l < LANES; l++) flow[c + l] -= (double)moved[l];
            }
        }
        scan_add_scaled(d, 1, dkey, s->dk + i * d);
        move_flow(s, i, 1, key, dkey);
    }
}

// As add_pair_gradients.
static void add_channel_pair_gradients(const rt_scan_params *p, scan_scratch *s) {
    const int64_t d = s->d;
    for (int64_t begin = 0; begin < s->n; begin += BLOCK_ROWS) {
        const int64_t end = min64(begin + BLOCK_ROWS, s->n);
        begin_block(s, begin, end);
        if (begin > 0) {
            add_row_gradients(s, begin, end, s->dqk, s->q, s->dq);
            if (p->beta != NULL) add_row_gradients(s, begin, end, s->dkk, s->k, s->dk);
            // The decayed keys of the earlier tokens are done with: their place takes the gradients.
            add_column_gradients(s, begin, end, s->dqk, s->q, false, s->rows);
            if (p->beta != NULL) add_column_gradients(s, begin, end, s->dkk, s->k, true, s->rows);
            scan_multiply(begin * d, s->rows, s->column_decay, s->rows);
            for (int64_t i = 0; i < begin; i++) {
                scan_add_scaled(d, 1, s->rows + i * d, s->dk + i * d);
                move_flow(s, i, 1, s->k + i * d, s->rows + i * d);
            }
        }
        add_gradients_within_block(p, s, begin, end);
    }
}

#endif // RINGTILE_SCAN_CHANNEL_DECAY_H
