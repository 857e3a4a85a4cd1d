// Backward of a recurrence: the chunks in reverse. Each recomputes its forward from the state before it, which the
// forward kept. With dS the gradient of the state after the chunk and the letters of forward.h:
//   du = qk^T dout + (f k) dS                    dr = (I + A)^-T du,  A_ts = beta_t kk_ts     (without beta: dr = du)
//   dbeta_t = dr_t.v_t - dr_t.(sum over s of kk_ts u_s)    dv = beta dr
//   dqk = dout u^T,  dkk_ts = -beta_t dr_t.u_s
//   d(e q) = dout S^T,  d(e k) = -dv S^T,  d(f k) = u dS^T
//   dS <- e_n dS + (e q)^T dout - (e k)^T dv
// where v is v - S^T k. The decay of r is a part of every E_ts with s < r <= t, e_t with r <= t, f_s with s < r, and
// e_n: flow[r] is what its gradient gains over that of r - 1.
#ifndef RINGTILE_SCAN_BACKWARD_H
#define RINGTILE_SCAN_BACKWARD_H

#include "forward.h"

#include <sched.h>

// du, which becomes dr and then dv (times beta or dt); and dbeta or ddt.
static void find_dv(const rt_scan_params *p, scan_scratch *s) {
    const int64_t dv = s->dv;
    gemm(s->n, dv, s->n, transposed(s->qk, CHUNK_ROWS), s->out, s->du, dv, false);
    if (s->has_dstate) gemm(s->n, dv, p->head_dim, rows_of(s->k_out, s->d), s->dstate, s->du, dv, true);
    if (p->beta != NULL) solve(s, s->solver, true, s->du);
    for (int64_t t = 0; t < s->n; t++) s->dbeta[t] = scan_dot(dv, s->du + t * dv, s->v + t * dv);
}

// dqk, dkk, dbeta.
static void find_pair_gradients(const rt_scan_params *p, scan_scratch *s) {
    const int64_t squares = round_up(s->n, LANES), used = round_up(s->n, PAIR_BLOCK);
    scan_pad_rows(s, s->dv, s->u);
    transpose(s->u, squares, s->dv, s->u_columns, CHUNK_ROWS);
    for (int64_t j = 0; j < s->dv && squares < used; j++)
        memset(s->u_columns + j * CHUNK_ROWS + squares, 0, (size_t)(used - squares) * sizeof(real));
    pair_products(s, p->v_head_dim, s->dv, s->out, s->u_columns, s->dqk);
    if (p->beta == NULL) return;
    pair_products(s, p->v_head_dim, s->dv, s->du, s->u_columns, s->dkk);
    for (int64_t t = 0; t < s->n; t++) {
        real dbeta = 0;
        for (int64_t i = 0; i < t; i++) {
            const int64_t at = t * CHUNK_ROWS + i;
            dbeta += s->dkk[at] * s->kk[at];
            s->dkk[at] *= -s->beta[t];
        }
        s->dbeta[t] -= dbeta;
    }
}

// to (n, d) = rows (n, dv) columns (dv, d).
static void to_channels(const rt_scan_params *p, const scan_scratch *s, const real *rows, real *to) {
    gemm(s->n, s->d, p->v_head_dim, rows_of(rows, s->dv), s->state_columns, to, s->d, false);
}

// Adds x y of one token, summed over the channels that share a decay, to the flow between the decays `from` and
// `until`.
static void add_flow(const rt_scan_params *p, const scan_scratch *s, int64_t from, int64_t until, const real *x,
                     const real *y) {
    if (p->channel_decay) {
        for (int64_t c = 0; c < p->head_dim; c++) {
            const double part = (double)x[c] * (double)y[c];
            s->flow[from * s->d + c] += part, s->flow[until * s->d + c] -= part;
        }
        return;
    }
    const double sum = (double)scan_dot(s->d, x, y);
    s->flow[from] += sum, s->flow[until] -= sum;
}

// What passes through the states: starts dq, dk and flow.
static void find_state_gradients(const rt_scan_params *p, scan_scratch *s) {
    const int64_t d = s->d, all = s->n * d, end = s->n;
    memset(s->dq, 0, (size_t)all * sizeof(real)), memset(s->dk, 0, (size_t)all * sizeof(real));
    memset(s->flow, 0, (size_t)((end + 1) * (p->channel_decay ? d : 1)) * sizeof(double));
    if (s->has_state) {
        transpose(s->state, d, s->dv, s->state_columns, d);
        to_channels(p, s, s->out, s->dq_in);
        scan_multiply(all, s->dq_in, s->decay_in, s->dq);
        for (int64_t t = 0; t < s->n; t++) add_flow(p, s, 0, t + 1, s->dq + t * d, s->q + t * d);
        if (p->beta != NULL) {
            to_channels(p, s, s->du, s->dk_in);
            for (int64_t i = 0; i < all; i += LANES)
                vec_store(s->dk + i, -vec_load(s->dk_in + i) * vec_load(s->decay_in + i));
            for (int64_t t = 0; t < s->n; t++) add_flow(p, s, 0, t + 1, s->dk + t * d, s->k + t * d);
        }
    }
    if (s->has_dstate) {
        transpose(s->dstate, d, s->dv, s->state_columns, d);
        to_channels(p, s, s->u, s->dk_out);
        scan_multiply(all, s->dk_out, s->decay_out, s->dk_out);
        for (int64_t t = 0; t < s->n; t++) {
            scan_add_scaled(d, 1, s->dk_out + t * d, s->dk + t * d);
            add_flow(p, s, t + 1, end, s->dk_out + t * d, s->k + t * d);
        }
    }
    if (s->has_state && s->has_dstate)
        for (int64_t c = 0; c < p->head_dim; c++)
            s->flow[p->channel_decay ? c : 0] +=
                (double)(scan_dot(s->dv, s->state + c * s->dv, s->dstate + c * s->dv) * s->decay_all[c]);
}

// dstate, of the state after the chunk, becomes that of the state before it.
static void retreat_state(const rt_scan_params *p, scan_scratch *s) {
    advance_state(p, s, s->has_dstate, s->q_in, s->out, s->dstate);
    if (p->beta == NULL) return;
    for (int64_t i = 0; i < s->n * s->dv; i += LANES) vec_store(s->du + i, -vec_load(s->du + i));
    gemm(p->head_dim, s->dv, s->n, transposed(s->k_in, s->d), s->du, s->dstate, s->dv, true);
}

// ---- results ---------------------------------------------------------------------------------------

// The chunk's rows of dv, dg, dbeta, ddt and dD, which this head alone writes.
static void store_own_gradients(const rt_scan_params *p, const scan_scratch *s, int64_t batch, int64_t head) {
    const int64_t dim = p->v_head_dim, channels = p->channel_decay ? p->head_dim : 1;
    const int64_t flow_row = p->channel_decay ? s->d : 1;
    real *dv = p->dv, *dg = p->dg, *dbeta = p->dbeta, *ddt = p->ddt;
    double gradient[RT_MAX_HEAD_DIM] = {0};
    for (int64_t t = 0; t < s->n; t++) {
        const int64_t at = (batch * p->num_tokens + s->tokens[t]) * p->num_heads + head;
        memcpy(dv + at * dim, s->du + t * s->dv, (size_t)dim * sizeof(real));
        for (int64_t c = 0; c < channels; c++) {
            gradient[c] += s->flow[t * flow_row + c];
            dg[at * channels + c] = (real)gradient[c];
        }
        if (p->beta != NULL) dbeta[at] = s->dbeta[t];
        if (p->dt != NULL) ddt[at] = s->dbeta[t];
    }
}

static void wait_for_head_before(const rt_scan_turn *turn, int64_t num_chunks) {
    if (turn->before != NULL)
        while (atomic_load_explicit(turn->before, memory_order_acquire) < num_chunks) sched_yield();
}

// Adds (first head of its group: writes) the chunk's rows to dq or dk.
static void add_shared_rows(const rt_scan_params *p, const scan_scratch *s, int64_t batch, int64_t k_head, bool add,
                            real factor, const real *rows, real *to) {
    for (int64_t t = 0; t < s->n; t++) {
        real *row = to + ((batch * p->num_tokens + s->tokens[t]) * p->num_k_heads + k_head) * p->head_dim;
        for (int64_t c = 0; c < p->head_dim; c++) {
            const real x = rows[t * s->d + c] * factor;
            row[c] = add ? row[c] + x : x;
        }
    }
}

// Zeros all gradients of padding.
static void clear_padding_gradients(const rt_scan_params *p, int64_t batch, int64_t head, bool shared) {
    const int64_t H = p->num_heads, G = p->num_k_heads, bytes = sizeof(real);
    clear_padding(p, H, p->v_head_dim, bytes, batch, head, p->dv);
    clear_padding(p, H, p->channel_decay ? p->head_dim : 1, bytes, batch, head, p->dg);
    if (p->beta != NULL) clear_padding(p, H, 1, bytes, batch, head, p->dbeta);
    if (p->dt != NULL) clear_padding(p, H, 1, bytes, batch, head, p->ddt);
    if (p->D != NULL) clear_padding(p, H, 1, bytes, batch, head, p->dD);
    if (!shared) return;
    clear_padding(p, G, p->head_dim, bytes, batch, head / (H / G), p->dq);
    clear_padding(p, G, p->head_dim, bytes, batch, head / (H / G), p->dk);
}

static void backward_chunk(const rt_scan_params *p, int64_t batch, int64_t head, scan_scratch *s) {
    scan_load_rows(s, p->dtype, p->dout, p->dout_stride, batch, head, p->v_head_dim, s->out);
    find_u(p, s);
    find_dv(p, s);
    find_pair_gradients(p, s);
    for (int64_t t = 0; t < s->n; t++) { // dr becomes dv
        const vec beta = vec_set(s->beta[t]);
        for (int64_t j = t * s->dv; j < (t + 1) * s->dv; j += LANES) vec_store(s->du + j, vec_load(s->du + j) * beta);
    }
    find_state_gradients(p, s);
    if (p->channel_decay)
        add_channel_pair_gradients(p, s);
    else
        add_pair_gradients(p, s);
    if (p->D != NULL)
        for (int64_t t = 0; t < s->n; t++) {
            const int64_t at = (batch * p->num_tokens + s->tokens[t]) * p->num_heads + head;
            ((real *)p->dD)[at] = scan_dot(s->dv, s->out + t * s->dv, s->v + t * s->dv);
            scan_add_scaled(s->dv, ((const real *)p->D)[head], s->out + t * s->dv, s->du + t * s->dv);
        }
    store_own_gradients(p, s, batch, head);
}

static void scan_backward(const rt_scan_params *p, const rt_chunks *chunks, int64_t batch, int64_t head,
                          const rt_scan_turn *turn, char *workspace) {
    scan_scratch s;
    scan_lay_out(p, true, workspace, &s);
    const real *initial = p->initial_state, *states = p->states, *dfinal = p->dfinal_state;
    if (initial != NULL) initial += state_at(p, batch, head);
    if (dfinal != NULL) dfinal += state_at(p, batch, head);
    const bool add = turn->before != NULL;
    const int64_t k_head = head / (p->num_heads / p->num_k_heads);
    clear_padding_gradients(p, batch, head, !add);
    read_state(p, &s, dfinal, s.dstate);
    s.has_dstate = dfinal != NULL;
    for (int64_t i = chunks->num_chunks - 1; i >= 0; i--) {
        const int64_t state = chunks->chunks[i].state;
        const real *before = state >= 0                  ? states + kept_state_at(p, batch, head, state)
                             : state == RT_STATE_INITIAL ? initial
                                                         : NULL;
        s.has_state = before != NULL;
        read_state(p, &s, before, s.state);
        begin_chunk(p, chunks, i, batch, head, &s);
        backward_chunk(p, batch, head, &s);
        wait_for_head_before(turn, chunks->num_chunks - i);
        add_shared_rows(p, &s, batch, k_head, add, (real)p->scale, s.dq, p->dq);
        add_shared_rows(p, &s, batch, k_head, add, 1, s.dk, p->dk);
        atomic_store_explicit(turn->own, chunks->num_chunks - i, memory_order_release);
        if (state == RT_STATE_ZERO)
            read_state(p, &s, NULL, s.dstate);
        else
            retreat_state(p, &s);
        s.has_dstate = state != RT_STATE_ZERO;
    }
    write_state(p, &s, s.dstate, (real *)p->dinitial_state + state_at(p, batch, head));
}

#endif // RINGTILE_SCAN_BACKWARD_H
