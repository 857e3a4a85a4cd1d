// One worker's scratch for a chunk of a recurrence: rows of tokens, widened to the math type and padded to whole
// vectors.
//
// Letters: n tokens of the chunk (at most CHUNK_ROWS), K and V the head dims of k and v; padded dims are multiples of
// LANES.
#ifndef RINGTILE_SCAN_SCRATCH_H
#define RINGTILE_SCAN_SCRATCH_H

#include "../attn/pack.h"
#include "chunks.h"

enum { CHUNK_ROWS = RT_CHUNK_TOKENS, BLOCK_ROWS = 16 };

typedef struct scan_scratch {
    int64_t d, dv; // padded
    int64_t n;     // tokens of the chunk
    const int64_t *tokens;
    bool has_state, has_dstate; // false: 0, and no product with it is computed

    real *q, *k;           // (CHUNK_ROWS, d); q is scaled
    real *k_columns;       // (d, CHUNK_ROWS)
    real *decay_in;        // (CHUNK_ROWS, d): decay from the state before the chunk to each token
    real *decay_out;       // (CHUNK_ROWS, d): from each token to the state after the chunk
    real *decay_all;       // (d): from the state before the chunk to the one after
    real *q_in, *k_in;     // (CHUNK_ROWS, d): q and k times decay_in
    real *k_out;           // (CHUNK_ROWS, d): k times decay_out
    real *v, *u;           // (CHUNK_ROWS, dv); with beta, v becomes v - S^T k
    real *out;             // (CHUNK_ROWS, dv): in the backward, dout
    real *qk, *kk;         // (CHUNK_ROWS, CHUNK_ROWS): decayed q.k of tokens s <= t, k.k of s < t; else 0
    real *solver;          // (CHUNK_ROWS, CHUNK_ROWS): -beta_t kk
    real *state;           // (d, dv), rows from K on are 0
    real *pair_decay;      // (CHUNK_ROWS, CHUNK_ROWS), one decay for all channels: of tokens s <= t, else 0
    real *row_decay;       // (CHUNK_ROWS, d), a decay of each channel: from the end of the block before to each token
    real *column_decay;    // (CHUNK_ROWS, d): from each token to the end of the block before the current one
    real *rows, *rows_2;   // (CHUNK_ROWS, d): free
    real *token_decay;     // (BLOCK_ROWS, d): exp g_t of a block
    real *g;               // (CHUNK_ROWS, d or 1): as given
    double *sums;          // (CHUNK_ROWS, d): sums of g
    real beta[CHUNK_ROWS]; // beta or dt

    // Backward only.
    real *du;                     // (CHUNK_ROWS, dv)
    real *u_columns;              // (dv, CHUNK_ROWS)
    real *dqk, *dkk;              // (CHUNK_ROWS, CHUNK_ROWS)
    real *dq, *dk;                // (CHUNK_ROWS, d)
    real *dq_in, *dk_in, *dk_out; // (CHUNK_ROWS, d)
    real *dstate;                 // (d, dv)
    real *state_columns;          // (dv, d)
    double *flow;                 // (CHUNK_ROWS + 1, d or 1): what dg gains from one token to the next
    real dbeta[CHUNK_ROWS];
} scan_scratch;

static double *scan_take_doubles(arena *from, int64_t n) {
    return (double *)(void *)take(from, n * (int64_t)(sizeof(double) / sizeof(real)));
}

// Lays the scratch out in a workspace, or with NULL only counts; returns its bytes.
static int64_t scan_lay_out(const rt_scan_params *p, bool backward, char *workspace, scan_scratch *s) {
    const int64_t d = round_up(p->head_dim, LANES), dv = round_up(p->v_head_dim, LANES);
    const int64_t rows = CHUNK_ROWS * d, v_rows = CHUNK_ROWS * dv, pairs = CHUNK_ROWS * CHUNK_ROWS;
    *s = (scan_scratch){.d = d, .dv = dv};
    arena space = {workspace, 0}, *const at = &space;
    s->q = take(at, rows), s->k = take(at, rows), s->k_columns = take(at, rows);
    s->decay_in = take(at, rows), s->decay_out = take(at, rows), s->decay_all = take(at, d);
    s->q_in = take(at, rows), s->k_in = take(at, rows), s->k_out = take(at, rows);
    s->v = take(at, v_rows), s->u = take(at, v_rows), s->out = take(at, v_rows);
    s->qk = take(at, pairs), s->kk = take(at, pairs), s->solver = take(at, pairs);
    s->pair_decay = take(at, pairs), s->state = take(at, d * dv);
    s->g = take(at, rows);
    if (p->channel_decay) {
        s->row_decay = take(at, rows), s->column_decay = take(at, rows);
        s->rows = take(at, rows), s->rows_2 = take(at, rows);
        s->token_decay = take(at, BLOCK_ROWS * d);
        s->sums = scan_take_doubles(at, rows);
    }
    if (!backward) return space.num_bytes;
    s->du = take(at, v_rows), s->u_columns = take(at, v_rows);
    s->dqk = take(at, pairs), s->dkk = take(at, pairs);
    s->dq = take(at, rows), s->dk = take(at, rows);
    s->dq_in = take(at, rows), s->dk_in = take(at, rows), s->dk_out = take(at, rows);
    s->dstate = take(at, d * dv), s->state_columns = take(at, d * dv);
    s->flow = scan_take_doubles(at, (CHUNK_ROWS + 1) * (p->channel_decay ? d : 1));
    return space.num_bytes;
}

static int64_t scan_scratch_bytes(const rt_scan_params *p, bool backward) {
    scan_scratch s;
    return scan_lay_out(p, backward, NULL, &s);
}

// ---- rows ----------------------------------------------------------------------------------------

// to (n, padded) = the chunk's rows of one head of an array (B, N, heads, dim), widened.
static void scan_load_rows(const scan_scratch *s, rt_dtype dtype, const void *array, const int64_t stride[3],
                           int64_t batch, int64_t head, int64_t dim, real *to) {
    const int64_t padded = round_up(dim, LANES);
    vec finite = vec_set(0);
    for (int64_t t = 0; t < s->n; t++)
        pack_row(REALS, dtype, array, batch * stride[0] + s->tokens[t] * stride[1] + head * stride[2], dim, padded,
                 to + t * padded, &finite);
}

// Zeros after the last row, up to a whole square of a transposition.
static void scan_pad_rows(const scan_scratch *s, int64_t padded, real *rows) {
    memset(rows + s->n * padded, 0, (size_t)((round_up(s->n, LANES) - s->n) * padded) * sizeof(real));
}

// to (n, cols) = a * b, element by element.
static void scan_multiply(int64_t count, const real *a, const real *b, real *to) {
    for (int64_t i = 0; i < count; i += LANES) vec_store(to + i, vec_load(a + i) * vec_load(b + i));
}

// Of two rows of a padded dim.
static real scan_dot(int64_t padded, const real *a, const real *b) {
    vec sum = vec_set(0);
    for (int64_t i = 0; i < padded; i += LANES) sum += vec_load(a + i) * vec_load(b + i);
    return vec_reduce_sum(sum);
}

static void scan_add_scaled(int64_t padded, real factor, const real *from, real *to) {
    for (int64_t i = 0; i < padded; i += LANES) vec_store(to + i, vec_load(to + i) + vec_load(from + i) * factor);
}

#endif // RINGTILE_SCAN_SCRATCH_H
