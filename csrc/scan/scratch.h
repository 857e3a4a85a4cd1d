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

// A workspace, of which num_bytes are taken; if its memory is NULL, they are only counted.
typedef struct scan_arena {
    char *memory;
    int64_t num_bytes;
} scan_arena;

// Takes n numbers off a workspace.
static real *scan_take(scan_arena *arena, int64_t n) {
    char *const array = arena->memory == NULL ? NULL : arena->memory + arena->num_bytes;
    arena->num_bytes += round_up(n * (int64_t)sizeof(real), 64);
    return (real *)(void *)array;
}

static double *scan_take_doubles(scan_arena *arena, int64_t n) {
    return (double *)(void *)scan_take(arena, n * (int64_t)(sizeof(double) / sizeof(real)));
}

// Lays the scratch out in a workspace, or with NULL only counts; returns its bytes.
static int64_t scan_lay_out(const rt_scan_params *p, bool backward, char *workspace, scan_scratch *s) {
    const int64_t d = round_up(p->head_dim, LANES), dv = round_up(p->v_head_dim, LANES);
    const int64_t rows = CHUNK_ROWS * d, v_rows = CHUNK_ROWS * dv, pairs = CHUNK_ROWS * CHUNK_ROWS;
    *s = (scan_scratch){.d = d, .dv = dv};
    scan_arena arena = {workspace, 0}, *const at = &arena;
    s->q = scan_take(at, rows), s->k = scan_take(at, rows), s->k_columns = scan_take(at, rows);
    s->decay_in = scan_take(at, rows), s->decay_out = scan_take(at, rows), s->decay_all = scan_take(at, d);
    s->q_in = scan_take(at, rows), s->k_in = scan_take(at, rows), s->k_out = scan_take(at, rows);
    s->v = scan_take(at, v_rows), s->u = scan_take(at, v_rows), s->out = scan_take(at, v_rows);
    s->qk = scan_take(at, pairs), s->kk = scan_take(at, pairs), s->solver = scan_take(at, pairs);
    s->pair_decay = scan_take(at, pairs), s->state = scan_take(at, d * dv);
    s->g = scan_take(at, rows);
    if (p->channel_decay) {
        s->row_decay = scan_take(at, rows), s->column_decay = scan_take(at, rows);
        s->rows = scan_take(at, rows), s->rows_2 = scan_take(at, rows);
        s->token_decay = scan_take(at, BLOCK_ROWS * d);
        s->sums = scan_take_doubles(at, rows);
    }
    if (!backward) return arena.num_bytes;
    s->du = scan_take(at, v_rows), s->u_columns = scan_take(at, v_rows);
    s->dqk = scan_take(at, pairs), s->dkk = scan_take(at, pairs);
    s->dq = scan_take(at, rows), s->dk = scan_take(at, rows);
    s->dq_in = scan_take(at, rows), s->dk_in = scan_take(at, rows), s->dk_out = scan_take(at, rows);
    s->dstate = scan_take(at, d * dv), s->state_columns = scan_take(at, d * dv);
    s->flow = scan_take_doubles(at, (CHUNK_ROWS + 1) * (p->channel_decay ? d : 1));
    return arena.num_bytes;
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

// to (cols, to_row) = from (rows, cols) transposed; both multiples of LANES.
static void scan_transpose(const real *from, int64_t rows, int64_t cols, real *to, int64_t to_row) {
    for (int64_t i = 0; i < rows; i += LANES)
        for (int64_t j = 0; j < cols; j += LANES)
            transpose_square(from + i * cols + j, cols, to + j * to_row + i, to_row);
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
