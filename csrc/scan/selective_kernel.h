// The selective scan, compiled once per instruction set for its math type (vec.h). A task walks all rows with its
// channels, chunk by chunk; a vector holds LANES channels, and the state dim is a loop.
//
// The backward takes the chunks in reverse. Each recomputes its states from the one that the forward kept; with dS the
// gradient of the state after a token, u = dt x, and E = exp(dt A):
//   dS_k += C_k dout,  dC_k = sum over channels of S_k dout,  dB_k = sum over channels of dS_k u,
//   du = sum over k of dS_k B_k,  dx = du dt + D dout,
//   ddt = du x + sum over k of dS_k E_k S'_k A_k    (S': the state before the token),
//   dA_k = sum over t of dS_k E_k S'_k dt,  dS_k <- dS_k E_k.
#ifndef RINGTILE_SCAN_SELECTIVE_KERNEL_H
#define RINGTILE_SCAN_SELECTIVE_KERNEL_H

#include "../dtype.h"
#include "backward.h"

typedef struct selective_scratch {
    int64_t first, count, width; // channels; width: padded to whole vectors
    int64_t num_states, n;       // tokens of the chunk
    const int64_t *tokens;
    real *x, *dt, *out; // (CHUNK_ROWS, width); in the backward, out is dout
    real *B, *C;        // (CHUNK_ROWS, K)
    real *A, *state;    // (K, width)
    real *D;            // (width)

    // Backward only.
    real *dx, *ddt;    // (CHUNK_ROWS, width)
    real *dstate;      // (K, width)
    real *dA, *dA_sum; // (K, width); sum: of one chunk, so that no sum takes too many terms in a row
    real *dD, *dD_sum; // (width)
    real *decays;      // (CHUNK_ROWS, K, LANES), of one vector of channels
    real *states;      // (CHUNK_ROWS + 1, K, LANES): before the first token, and after each
    real *dB, *dC;     // (CHUNK_ROWS, K, LANES): the sums of every LANES-th channel
} selective_scratch;

static int64_t selective_lay_out(const rt_selective_params *p, bool backward, int64_t first, int64_t last,
                                 char *workspace, selective_scratch *s) {
    const int64_t width = RT_SELECTIVE_CHANNELS, K = p->state_dim, rows = CHUNK_ROWS * width;
    *s = (selective_scratch){.first = first, .count = last - first, .width = width};
    s->num_states = rt_scan_num_states(p->num_tokens);
    arena space = {workspace, 0}, *const at = &space;
    s->x = take(at, rows), s->dt = take(at, rows), s->out = take(at, rows);
    s->C = take(at, CHUNK_ROWS * K), s->B = take(at, CHUNK_ROWS * K);
    s->A = take(at, K * width), s->state = take(at, K * width), s->D = take(at, width);
    if (!backward) return space.num_bytes;
    s->dx = take(at, rows), s->ddt = take(at, rows), s->dstate = take(at, K * width);
    s->dA = take(at, K * width), s->dA_sum = take(at, K * width);
    s->dD = take(at, width), s->dD_sum = take(at, width);
    s->decays = take(at, CHUNK_ROWS * K * LANES);
    s->states = take(at, (CHUNK_ROWS + 1) * K * LANES);
    s->dC = take(at, CHUNK_ROWS * K * LANES), s->dB = take(at, CHUNK_ROWS * K * LANES);
    return space.num_bytes;
}

static int64_t selective_scratch_bytes(const rt_selective_params *p, bool backward) {
    selective_scratch s;
    return selective_lay_out(p, backward, 0, 0, NULL, &s);
}

static rt_dtype selective_state_dtype(const rt_selective_params *p) { return p->dtype == RT_F64 ? RT_F64 : RT_F32; }

// to (rows, width), padded with zeros, = this task's channels of an array (rows, channels) of the state dtype; NULL: 0.
static void load_columns(const rt_selective_params *p, const selective_scratch *s, const void *array, int64_t first_row,
                         int64_t num_rows, real *to) {
    memset(to, 0, (size_t)(num_rows * s->width) * sizeof(real));
    for (int64_t i = 0; i < num_rows && array != NULL; i++)
        memcpy(to + i * s->width, (const real *)array + (first_row + i) * p->num_channels + s->first,
               (size_t)s->count * sizeof(real));
}

static void store_columns(const rt_selective_params *p, const selective_scratch *s, const real *from, int64_t first_row,
                          int64_t num_rows, void *array) {
    for (int64_t i = 0; i < num_rows; i++)
        memcpy((real *)array + (first_row + i) * p->num_channels + s->first, from + i * s->width,
               (size_t)s->count * sizeof(real));
}

// The first row of a kept state, as if all were rows of one array (rows, channels).
static int64_t kept_row(const rt_selective_params *p, const selective_scratch *s, int64_t batch, int64_t state) {
    return (batch * s->num_states + state) * p->state_dim;
}

// Loads the state before a chunk.
static void load_state(const rt_selective_params *p, selective_scratch *s, int64_t batch, int64_t state) {
    const bool kept = state >= 0;
    load_columns(p, s,
                 kept                        ? p->states
                 : state == RT_STATE_INITIAL ? p->initial_state
                                             : NULL,
                 kept ? kept_row(p, s, batch, state) : batch * p->state_dim, p->state_dim, s->state);
}

// to (n, row) = `count` elements, from `first` on, of the chunk's rows of an array (B, N, any), widened.
static void load_tokens(const selective_scratch *s, rt_dtype dtype, const void *array, const int64_t stride[2],
                        int64_t batch, int64_t first, int64_t count, int64_t row, real *to) {
    real whole[CHUNK];
    for (int64_t t = 0; t < s->n; t++) {
        load_chunk(dtype, array, batch * stride[0] + s->tokens[t] * stride[1] + first, count, whole);
        memset(to + t * row, 0, (size_t)row * sizeof(real));
        memcpy(to + t * row, whole, (size_t)count * sizeof(real));
    }
}

static void begin_selective_chunk(const rt_selective_params *p, const rt_chunk *chunk, const int64_t *tokens,
                                  int64_t batch, selective_scratch *s) {
    const int64_t dim = p->num_channels, K = p->state_dim, rows[2] = {p->num_tokens * dim, dim};
    s->n = chunk[1].first - chunk->first, s->tokens = tokens + chunk->first;
    load_tokens(s, p->dtype, p->x, p->x_stride, batch, s->first, s->count, s->width, s->x);
    load_tokens(s, selective_state_dtype(p), p->dt, rows, batch, s->first, s->count, s->width, s->dt);
    load_tokens(s, p->dtype, p->C, p->C_stride, batch, 0, K, K, s->C);
    load_tokens(s, p->dtype, p->B, p->B_stride, batch, 0, K, K, s->B);
}

static void load_constants(const rt_selective_params *p, selective_scratch *s) {
    load_columns(p, s, p->A, 0, p->state_dim, s->A);
    load_columns(p, s, p->D, 0, 1, s->D);
}

// ---- forward -------------------------------------------------------------------------------------

static void selective_forward_chunk(const rt_selective_params *p, selective_scratch *s) {
    const int64_t K = p->state_dim;
    for (int64_t c = 0; c < s->count; c += LANES)
        for (int64_t t = 0; t < s->n; t++) {
            const vec x = vec_load(s->x + t * s->width + c), dt = vec_load(s->dt + t * s->width + c);
            const vec u = dt * x;
            vec out = vec_load(s->D + c) * x;
            for (int64_t i = 0; i < K; i++) {
                real *const at = s->state + i * s->width + c;
                const vec decay = vec_exp(dt * vec_load(s->A + i * s->width + c));
                const vec state = decay * vec_load(at) + u * s->B[t * K + i];
                vec_store(at, state);
                out += state * s->C[t * K + i];
            }
            vec_store(s->out + t * s->width + c, out);
        }
}

static void clear_selective_padding(const rt_selective_params *p, int64_t batch, int64_t first, int64_t count,
                                    int64_t row, int64_t element_bytes, void *array) {
    for (int64_t t = 0; t < p->num_tokens; t++)
        if (p->seq_idx[batch * p->seq_idx_batch_stride + t] < 0)
            memset((char *)array + ((batch * p->num_tokens + t) * row + first) * element_bytes, 0,
                   (size_t)(count * element_bytes));
}

static void selective_forward(const rt_selective_params *p, const rt_chunk_rows *rows, int64_t first, int64_t last,
                              char *workspace) {
    selective_scratch s;
    selective_lay_out(p, false, first, last, workspace, &s);
    const int64_t dim = p->num_channels, K = p->state_dim;
    load_constants(p, &s);
    for (int64_t batch = 0; batch < p->batch; batch++) {
        const rt_chunks *chunks = rt_chunks_of(rows, batch);
        clear_selective_padding(p, batch, first, s.count, dim, rt_element_bytes(p->dtype), p->out);
        load_state(p, &s, batch, RT_STATE_INITIAL);
        for (int64_t i = 0; i < chunks->num_chunks; i++) {
            const int64_t before = chunks->chunks[i].state;
            if (before == RT_STATE_ZERO) load_state(p, &s, batch, before);
            if (before >= 0 && p->states != NULL)
                store_columns(p, &s, s.state, kept_row(p, &s, batch, before), K, p->states);
            begin_selective_chunk(p, &chunks->chunks[i], chunks->tokens, batch, &s);
            selective_forward_chunk(p, &s);
            for (int64_t t = 0; t < s.n; t++)
                store_chunk(p->dtype, p->out, (batch * p->num_tokens + s.tokens[t]) * dim + first, s.count,
                            s.out + t * s.width);
        }
        store_columns(p, &s, s.state, batch * K, K, p->final_state);
    }
}

// ---- backward ------------------------------------------------------------------------------------

// decays and states of the chunk's tokens, for LANES channels from c on.
static void find_states(const selective_scratch *s, int64_t K, int64_t c) {
    for (int64_t i = 0; i < K; i++) vec_store(s->states + i * LANES, vec_load(s->state + i * s->width + c));
    for (int64_t t = 0; t < s->n; t++) {
        const vec dt = vec_load(s->dt + t * s->width + c), u = dt * vec_load(s->x + t * s->width + c);
        for (int64_t i = 0; i < K; i++) {
            const int64_t at = (t * K + i) * LANES;
            const vec decay = vec_exp(dt * vec_load(s->A + i * s->width + c));
            vec_store(s->decays + at, decay);
            vec_store(s->states + at + K * LANES, decay * vec_load(s->states + at) + u * s->B[t * K + i]);
        }
    }
}

static inline void add_to(real *to, vec x) { vec_store(to, vec_load(to) + x); }

static void selective_backward_vector(const selective_scratch *s, int64_t K, int64_t c) {
    find_states(s, K, c);
    for (int64_t t = s->n - 1; t >= 0; t--) {
        const int64_t row = t * s->width + c;
        const vec x = vec_load(s->x + row), dt = vec_load(s->dt + row), dout = vec_load(s->out + row);
        const vec u = dt * x;
        vec du = vec_set(0), ddt = vec_set(0);
        for (int64_t i = 0; i < K; i++) {
            const int64_t at = (t * K + i) * LANES, of_state = i * s->width + c;
            const vec dstate = vec_load(s->dstate + of_state) + dout * s->C[t * K + i];
            const vec before = dstate * vec_load(s->decays + at), moved = before * vec_load(s->states + at);
            add_to(s->dC + at, dout * vec_load(s->states + at + K * LANES));
            add_to(s->dB + at, dstate * u);
            du += dstate * s->B[t * K + i];
            ddt += moved * vec_load(s->A + of_state);
            add_to(s->dA_sum + of_state, moved * dt);
            vec_store(s->dstate + of_state, before);
        }
        vec_store(s->dx + row, du * dt + vec_load(s->D + c) * dout);
        vec_store(s->ddt + row, du * x + ddt);
        add_to(s->dD_sum + c, dout * x);
    }
}

static void add_sums_of_chunk(int64_t count, real *sum, real *total) {
    for (int64_t i = 0; i < count; i += LANES) {
        add_to(total + i, vec_load(sum + i));
        vec_store(sum + i, vec_set(0));
    }
}

// Adds (first channels: writes) the chunk's rows to dC or dB.
static void add_reduced_rows(const selective_scratch *s, int64_t num_tokens, int64_t K, int64_t batch, bool add,
                             const real *rows, real *to) {
    for (int64_t t = 0; t < s->n; t++) {
        real *row = to + (batch * num_tokens + s->tokens[t]) * K;
        for (int64_t i = 0; i < K; i++) {
            const real x = vec_reduce_sum(vec_load(rows + (t * K + i) * LANES));
            row[i] = add ? row[i] + x : x;
        }
    }
}

static void selective_backward_chunk(const rt_selective_params *p, int64_t batch, selective_scratch *s) {
    const int64_t dim = p->num_channels, K = p->state_dim, rows[2] = {p->num_tokens * dim, dim};
    load_tokens(s, p->dtype, p->dout, p->dout_stride, batch, s->first, s->count, s->width, s->out);
    memset(s->dC, 0, (size_t)(s->n * K * LANES) * sizeof(real));
    memset(s->dB, 0, (size_t)(s->n * K * LANES) * sizeof(real));
    for (int64_t c = 0; c < s->count; c += LANES) selective_backward_vector(s, K, c);
    for (int64_t t = 0; t < s->n; t++) {
        const int64_t at = batch * rows[0] + s->tokens[t] * dim + s->first;
        memcpy((real *)p->dx + at, s->dx + t * s->width, (size_t)s->count * sizeof(real));
        memcpy((real *)p->ddt + at, s->ddt + t * s->width, (size_t)s->count * sizeof(real));
    }
    add_sums_of_chunk(K * s->width, s->dA_sum, s->dA);
    add_sums_of_chunk(s->width, s->dD_sum, s->dD);
}

static void selective_backward(const rt_selective_params *p, const rt_chunk_rows *rows, int64_t first, int64_t last,
                               const rt_scan_turn *turn, char *workspace) {
    selective_scratch s;
    selective_lay_out(p, true, first, last, workspace, &s);
    const int64_t dim = p->num_channels, K = p->state_dim, bytes = sizeof(real);
    const bool add = turn->before != NULL;
    int64_t num_passed = 0; // chunks, of all rows
    load_constants(p, &s);
    real *const sums[] = {s.dA, s.dA_sum, s.dD, s.dD_sum};
    for (int i = 0; i < 4; i++) memset(sums[i], 0, (size_t)((i < 2 ? K : 1) * s.width * bytes));
    for (int64_t batch = 0; batch < p->batch; batch++) {
        const rt_chunks *chunks = rt_chunks_of(rows, batch);
        clear_selective_padding(p, batch, first, s.count, dim, bytes, p->dx);
        clear_selective_padding(p, batch, first, s.count, dim, bytes, p->ddt);
        if (!add) clear_selective_padding(p, batch, 0, K, K, bytes, p->dC);
        if (!add) clear_selective_padding(p, batch, 0, K, K, bytes, p->dB);
        load_columns(p, &s, p->dfinal_state, batch * K, K, s.dstate);
        for (int64_t i = chunks->num_chunks - 1; i >= 0; i--) {
            const int64_t before = chunks->chunks[i].state;
            load_state(p, &s, batch, before);
            begin_selective_chunk(p, &chunks->chunks[i], chunks->tokens, batch, &s);
            selective_backward_chunk(p, batch, &s);
            wait_for_head_before(turn, ++num_passed);
            add_reduced_rows(&s, p->num_tokens, K, batch, add, s.dC, p->dC);
            add_reduced_rows(&s, p->num_tokens, K, batch, add, s.dB, p->dB);
            atomic_store_explicit(turn->own, num_passed, memory_order_release);
            if (before == RT_STATE_ZERO) load_columns(p, &s, NULL, 0, K, s.dstate);
        }
        store_columns(p, &s, s.dstate, batch * K, K, p->dinitial_state);
    }
    store_columns(p, &s, s.dA, 0, K, p->dA);
    if (p->D != NULL) store_columns(p, &s, s.dD, 0, 1, p->dD);
}

#endif // RINGTILE_SCAN_SELECTIVE_KERNEL_H
