// The decays within a chunk, and the products of pairs of tokens that they scale.
//
// The decay from token s to token t is exp of the sum of g of tokens s + 1 .. t. Every such sum is added up from its
// own terms, in float64: the difference of two sums from the chunk's beginning would cancel where the decay is strong,
// and the quotient of two exponentials overflow. A g of -inf is a sum of -inf, and never inf - inf.
#ifndef RINGTILE_SCAN_DECAY_H
#define RINGTILE_SCAN_DECAY_H

#include "scratch.h"

// row (count) = exp of the sums.
static void exp_of_sums(int64_t count, const double *sums, real *row) {
    for (int64_t i = 0; i < count; i++) row[i] = (real)sums[i];
    for (int64_t i = 0; i < count; i += LANES) vec_store(row + i, vec_exp(vec_load(row + i)));
}

static void fill(int64_t count, real x, real *row) {
    for (int64_t i = 0; i < count; i += LANES) vec_store(row + i, vec_set(x));
}

// ---- one decay for all channels ------------------------------------------------------------------

static void find_decays(scan_scratch *s) {
    double sums[CHUNK_ROWS] = {0}, in[CHUNK_ROWS] = {0}, out[CHUNK_ROWS] = {0}, sum = 0;
    for (int64_t t = 0; t < s->n; t++) {
        sum += (double)s->g[t], in[t] = sum;
        for (int64_t i = 0; i < t; i++) sums[i] += (double)s->g[t];
        real *row = s->pair_decay + t * CHUNK_ROWS;
        exp_of_sums(round_up(t + 1, LANES), sums, row);
        for (int64_t i = t + 1; i < CHUNK_ROWS; i++) row[i] = 0;
    }
    for (int64_t t = 0; t < s->n; t++) out[t] = sums[t];
    real factors[CHUNK_ROWS];
    exp_of_sums(CHUNK_ROWS, in, factors);
    for (int64_t t = 0; t < s->n; t++) fill(s->d, factors[t], s->decay_in + t * s->d);
    fill(s->d, factors[s->n - 1], s->decay_all);
    exp_of_sums(CHUNK_ROWS, out, factors);
    for (int64_t t = 0; t < s->n; t++) fill(s->d, factors[t], s->decay_out + t * s->d);
}

enum { PAIR_BLOCK = CHUNK_ROWS / 2 };

// to (CHUNK_ROWS, CHUNK_ROWS) = rows (n, d) columns (d, CHUNK_ROWS), where a block of rows needs no later column.
static void pair_products(const scan_scratch *s, int64_t depth, int64_t row_len, const real *rows, const real *columns,
                          real *to) {
    for (int64_t t = 0; t < s->n; t += PAIR_BLOCK)
        gemm(min64(PAIR_BLOCK, s->n - t), t + PAIR_BLOCK, depth, rows_of(rows + t * row_len, row_len), columns,
             to + t * CHUNK_ROWS, CHUNK_ROWS, false);
}

// pairs_ts = from_ts decay_ts for tokens s < t, or s <= t; 0 for later ones, whatever from is there.
static void decay_pairs(const scan_scratch *s, bool with_own, const real *from, real *pairs) {
    for (int64_t t = 0; t < s->n; t++) {
        const int64_t count = t + with_own;
        const real *decay = s->pair_decay + t * CHUNK_ROWS;
        for (int64_t i = 0; i < count; i++) pairs[t * CHUNK_ROWS + i] = from[t * CHUNK_ROWS + i] * decay[i];
        for (int64_t i = count; i < CHUNK_ROWS; i++) pairs[t * CHUNK_ROWS + i] = 0;
    }
}

static void find_pairs(const rt_scan_params *p, scan_scratch *s) {
    scan_pad_rows(s, s->d, s->k);
    transpose(s->k, round_up(s->n, LANES), s->d, s->k_columns, CHUNK_ROWS);
    for (int64_t c = 0; c < s->d; c++) // columns that the last block of rows reads
        for (int64_t t = round_up(s->n, LANES); t < round_up(s->n, PAIR_BLOCK); t++)
            s->k_columns[c * CHUNK_ROWS + t] = 0;
    pair_products(s, p->head_dim, s->d, s->q, s->k_columns, s->qk);
    decay_pairs(s, true, s->qk, s->qk);
    if (p->beta == NULL) return;
    pair_products(s, p->head_dim, s->d, s->k, s->k_columns, s->kk);
    decay_pairs(s, false, s->kk, s->kk);
}

// pairs (CHUNK_ROWS, CHUNK_ROWS), or their transpose, from element (i, j) on.
static matrix pairs_at(const real *pairs, bool turned, int64_t i, int64_t j) {
    return turned ? transposed(pairs + j * CHUNK_ROWS + i, CHUNK_ROWS)
                  : rows_of(pairs + i * CHUNK_ROWS + j, CHUNK_ROWS);
}

// to (n, d) += pairs (n, n) rows (n, d), or their transpose.
static void add_pair_rows(const scan_scratch *s, bool turned, const real *pairs, const real *rows, real *to) {
    gemm(s->n, s->d, s->n, pairs_at(pairs, turned, 0, 0), rows, to, s->d, true);
}

// Given dqk and dkk, the gradients of qk and kk: adds to dq and dk; flow gains d qk . qk + d kk . kk from s + 1 to t.
static void add_pair_gradients(const rt_scan_params *p, scan_scratch *s) {
    for (int64_t t = 0; t < s->n; t++)
        for (int64_t i = 0; i < t; i++) {
            const int64_t at = t * CHUNK_ROWS + i;
            double part = (double)s->dqk[at] * (double)s->qk[at];
            if (p->beta != NULL) part += (double)s->dkk[at] * (double)s->kk[at];
            s->flow[i + 1] += part, s->flow[t + 1] -= part;
        }
    decay_pairs(s, true, s->dqk, s->dqk);
    add_pair_rows(s, false, s->dqk, s->k, s->dq);
    add_pair_rows(s, true, s->dqk, s->q, s->dk);
    if (p->beta == NULL) return;
    decay_pairs(s, false, s->dkk, s->dkk);
    add_pair_rows(s, false, s->dkk, s->k, s->dk);
    add_pair_rows(s, true, s->dkk, s->k, s->dk);
}

#endif // RINGTILE_SCAN_DECAY_H
