// Forward of a recurrence, chunk by chunk (the UT transform, arXiv:2412.06464, section 3.3).
//
// With S the state before a chunk, e_t the decay from it to token t, f_s from token s to the chunk's end and E_ts from
// s to t, the recurrence of ringtile.h sums up to
//   u_t = beta_t (v_t - e_t S^T k_t - sum over s < t of E_ts (k_t.k_s) u_s)      a triangular system
//   out_t = scale (e_t S^T q_t + sum over s <= t of E_ts (q_t.k_s) u_s)
//   S <- e_n S + sum over s of f_s k_s u_s^T
#ifndef RINGTILE_SCAN_FORWARD_H
#define RINGTILE_SCAN_FORWARD_H

#include "channel_decay.h"

// Element 0 of row (batch, head) of a state (B, H, K, V), as an index.
static inline int64_t state_at(const rt_scan_params *p, int64_t batch, int64_t head) {
    return (batch * p->num_heads + head) * p->head_dim * p->v_head_dim;
}

static inline int64_t kept_state_at(const rt_scan_params *p, int64_t batch, int64_t head, int64_t state) {
    return ((batch * p->num_heads + head) * rt_scan_num_states(p->num_tokens) + state) * p->head_dim * p->v_head_dim;
}

// state (d, dv), padded with zeros, = from (K, V); NULL: 0.
static void read_state(const rt_scan_params *p, const scan_scratch *s, const real *from, real *state) {
    memset(state, 0, (size_t)(s->d * s->dv) * sizeof(real));
    if (from == NULL) return;
    for (int64_t i = 0; i < p->head_dim; i++)
        memcpy(state + i * s->dv, from + i * p->v_head_dim, (size_t)p->v_head_dim * sizeof(real));
}

static void write_state(const rt_scan_params *p, const scan_scratch *s, const real *state, real *to) {
    for (int64_t i = 0; i < p->head_dim; i++)
        memcpy(to + i * p->v_head_dim, state + i * s->dv, (size_t)p->v_head_dim * sizeof(real));
}

// Loads a chunk, and finds all that does not depend on the state.
static void begin_chunk(const rt_scan_params *p, const rt_chunks *chunks, int64_t index, int64_t batch, int64_t head,
                        scan_scratch *s) {
    const rt_chunk *chunk = &chunks->chunks[index];
    const int64_t k_head = head / (p->num_heads / p->num_k_heads), g_dim = p->channel_decay ? p->head_dim : 1;
    s->n = chunk[1].first - chunk->first, s->tokens = chunks->tokens + chunk->first;
    scan_load_rows(s, p->dtype, p->q, p->q_stride, batch, k_head, p->head_dim, s->q);
    scan_load_rows(s, p->dtype, p->k, p->k_stride, batch, k_head, p->head_dim, s->k);
    scan_load_rows(s, p->dtype, p->v, p->v_stride, batch, head, p->v_head_dim, s->v);
    const vec scale = vec_set((real)p->scale);
    for (int64_t i = 0; i < s->n * s->d; i += LANES) vec_store(s->q + i, vec_load(s->q + i) * scale);
    for (int64_t t = 0; t < s->n; t++) {
        const int64_t at = (batch * p->num_tokens + s->tokens[t]) * p->num_heads + head;
        const real *beta = p->beta, *dt = p->dt, *g = p->g;
        s->beta[t] = beta != NULL ? beta[at] : dt != NULL ? dt[at] : 1;
        if (!p->channel_decay) {
            s->g[t] = g[at];
            continue;
        }
        memcpy(s->g + t * s->d, g + at * g_dim, (size_t)g_dim * sizeof(real));
        memset(s->g + t * s->d + g_dim, 0, (size_t)(s->d - g_dim) * sizeof(real));
    }
    if (p->channel_decay) {
        find_channel_decays(s);
        find_channel_pairs(p, s);
    } else {
        find_decays(s);
        find_pairs(p, s);
    }
    scan_multiply(s->n * s->d, s->q, s->decay_in, s->q_in);
    scan_multiply(s->n * s->d, s->k, s->decay_in, s->k_in);
    scan_multiply(s->n * s->d, s->k, s->decay_out, s->k_out);
}

// rows_t (n, dv) += sum over s of pairs_ts rows_s, for s < t in order, or with `backward` s > t of pairs_st in reverse:
// forward substitution with I - pairs, backward substitution with its transpose. pairs is strictly lower.
static void solve(const scan_scratch *s, const real *pairs, bool backward, real *rows) {
    const int64_t num_blocks = (s->n + BLOCK_ROWS - 1) / BLOCK_ROWS, dv = s->dv;
    for (int64_t i = 0; i < num_blocks; i++) {
        const int64_t begin = (backward ? num_blocks - 1 - i : i) * BLOCK_ROWS, end = min64(begin + BLOCK_ROWS, s->n);
        const int64_t first = backward ? end : 0, depth = backward ? s->n - end : begin;
        if (depth > 0) // rows of other blocks, which are done
            gemm(end - begin, dv, depth, pairs_at(pairs, backward, begin, first), rows + first * dv, rows + begin * dv,
                 dv, true);
        for (int64_t j = 1; j < end - begin; j++) {
            const int64_t t = backward ? end - 1 - j : begin + j, from = backward ? t + 1 : begin;
            gemm(1, dv, j, pairs_at(pairs, backward, t, from), rows + from * dv, rows + t * dv, dv, true);
        }
    }
}

// u, and with beta v <- v - S^T k.
static void find_u(const rt_scan_params *p, scan_scratch *s) {
    if (p->beta != NULL && s->has_state) {
        gemm(s->n, s->dv, p->head_dim, rows_of(s->k_in, s->d), s->state, s->u, s->dv, false);
        scan_add_scaled(s->n * s->dv, -1, s->u, s->v);
    }
    for (int64_t t = 0; t < s->n; t++) {
        const vec beta = vec_set(s->beta[t]);
        for (int64_t j = 0; j < s->dv; j += LANES)
            vec_store(s->u + t * s->dv + j, vec_load(s->v + t * s->dv + j) * beta);
        if (p->beta == NULL) continue;
        for (int64_t i = 0; i < CHUNK_ROWS; i += LANES)
            vec_store(s->solver + t * CHUNK_ROWS + i, vec_load(s->kk + t * CHUNK_ROWS + i) * -beta);
    }
    if (p->beta != NULL) solve(s, s->solver, false, s->u);
}

// Writes out of the chunk's tokens.
static void find_out(const rt_scan_params *p, scan_scratch *s, int64_t batch, int64_t head) {
    const int64_t dv = s->dv;
    real *out = s->out;
    if (s->has_state) gemm(s->n, dv, p->head_dim, rows_of(s->q_in, s->d), s->state, out, dv, false);
    for (int64_t t = 0; t < s->n; t += PAIR_BLOCK) // no row needs a later token
        gemm(min64(PAIR_BLOCK, s->n - t), dv, min64(t + PAIR_BLOCK, s->n), rows_of(s->qk + t * CHUNK_ROWS, CHUNK_ROWS),
             s->u, out + t * dv, dv, s->has_state);
    for (int64_t t = 0; t < s->n; t++) {
        if (p->D != NULL) scan_add_scaled(dv, ((const real *)p->D)[head], s->v + t * dv, out + t * dv);
        const int64_t at = ((batch * p->num_tokens + s->tokens[t]) * p->num_heads + head) * p->v_head_dim;
        store_chunk(p->dtype, p->out, at, p->v_head_dim, out + t * dv);
    }
}

// state (K, dv) <- decay_all state + rows^T columns.
static void advance_state(const rt_scan_params *p, const scan_scratch *s, bool has_state, const real *rows,
                          const real *columns, real *state) {
    for (int64_t i = 0; i < p->head_dim && has_state; i++) {
        const vec decay = vec_set(s->decay_all[i]);
        for (int64_t j = 0; j < s->dv; j += LANES)
            vec_store(state + i * s->dv + j, vec_load(state + i * s->dv + j) * decay);
    }
    gemm(p->head_dim, s->dv, s->n, transposed(rows, s->d), columns, state, s->dv, has_state);
}

// Zeros the rows of padding of an array (B, N, heads, dim), contiguous.
static void clear_padding(const rt_scan_params *p, int64_t num_heads, int64_t dim, int64_t element_bytes, int64_t batch,
                          int64_t head, void *array) {
    for (int64_t t = 0; t < p->num_tokens; t++)
        if (p->seq_idx[batch * p->seq_idx_batch_stride + t] < 0)
            memset((char *)array + ((batch * p->num_tokens + t) * num_heads + head) * dim * element_bytes, 0,
                   (size_t)(dim * element_bytes));
}

static void scan_forward(const rt_scan_params *p, const rt_chunks *chunks, int64_t batch, int64_t head,
                         char *workspace) {
    scan_scratch s;
    scan_lay_out(p, false, workspace, &s);
    const real *initial = p->initial_state;
    real *const states = p->states;
    if (initial != NULL) initial += state_at(p, batch, head);
    const int64_t element_bytes = p->dtype == RT_F64 ? 8 : p->dtype == RT_F32 ? 4 : 2;
    clear_padding(p, p->num_heads, p->v_head_dim, element_bytes, batch, head, p->out);
    read_state(p, &s, initial, s.state);
    for (int64_t i = 0; i < chunks->num_chunks; i++) {
        const int64_t state = chunks->chunks[i].state;
        s.has_state = state >= 0 || (state == RT_STATE_INITIAL && initial != NULL);
        if (state >= 0 && states != NULL) write_state(p, &s, s.state, states + kept_state_at(p, batch, head, state));
        begin_chunk(p, chunks, i, batch, head, &s);
        find_u(p, &s);
        find_out(p, &s, batch, head);
        advance_state(p, &s, s.has_state, s.k_out, s.u, s.state);
    }
    write_state(p, &s, s.state, (real *)p->final_state + state_at(p, batch, head));
}

#endif // RINGTILE_SCAN_FORWARD_H
