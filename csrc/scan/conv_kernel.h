// The causal convolution, compiled once per instruction set for its math type (vec.h). A worker walks the tokens of its
// channels in order, with the last `width` tokens of the document in a ring; padding never enters it.
#ifndef RINGTILE_SCAN_CONV_KERNEL_H
#define RINGTILE_SCAN_CONV_KERNEL_H

#include "../chunk.h"
#include "../sigmoid.h"

enum {
    CONV_CHANNELS = 256,
    CONV_SUM_LEN = 64, // tokens that one running sum of dweight takes before it is added to the result
};

typedef struct conv_ring {
    int64_t first, count, width; // channels
    int64_t num_tokens;          // so far, counting the width - 1 before the first
    int32_t document;            // of the youngest token
    real weight[RT_MAX_CONV_WIDTH][CONV_CHANNELS], bias[CONV_CHANNELS];
    real x[RT_MAX_CONV_WIDTH][CONV_CHANNELS]; // row num_tokens % width is the oldest
} conv_ring;

// The row of the token `ago` tokens before the next one.
static inline int64_t ring_row(const conv_ring *r, int64_t ago) { return (r->num_tokens - ago) % r->width; }

static void ring_load(const conv_ring *r, rt_dtype dtype, const void *array, int64_t at, real *to) {
    load_chunk(dtype, array, at + r->first, r->count, to);
}

static rt_dtype conv_state_dtype(const rt_conv_params *p) { return p->dtype == RT_F64 ? RT_F64 : RT_F32; }

// Index of row `row` of a state (B, width - 1, C).
static int64_t conv_state_at(const rt_conv_params *p, int64_t batch, int64_t row) {
    return (batch * (p->width - 1) + row) * p->num_channels;
}

static void load_weights(const rt_conv_params *p, int64_t first, int64_t last, conv_ring *r) {
    *r = (conv_ring){.first = first, .count = last - first, .width = p->width};
    const real *weight = p->weight;
    for (int64_t c = 0; c < r->count; c++)
        for (int64_t i = 0; i < p->width; i++) r->weight[i][c] = weight[(first + c) * p->width + i];
    if (p->bias != NULL) ring_load(r, conv_state_dtype(p), p->bias, 0, r->bias);
}

// The tokens before the first of a row.
static void load_window(const rt_conv_params *p, int64_t batch, conv_ring *r) {
    memset(r->x, 0, sizeof(r->x));
    r->num_tokens = p->width - 1, r->document = 0;
    for (int64_t i = 0; i < p->width - 1 && p->initial_state != NULL; i++)
        ring_load(r, conv_state_dtype(p), p->initial_state, conv_state_at(p, batch, i), r->x[i]);
}

// Takes a token into the ring. Returns its row.
static int64_t push_token(const rt_conv_params *p, int64_t batch, int64_t token, conv_ring *r) {
    const int64_t row = ring_row(r, 0);
    ring_load(r, p->dtype, p->x, batch * p->x_stride[0] + token * p->x_stride[1], r->x[row]);
    r->num_tokens++;
    return row;
}

// Before the activation: of the youngest token, LANES channels from c on.
static inline vec conv_at(const conv_ring *r, int64_t c) {
    vec sum = vec_load(r->bias + c);
    for (int64_t i = 0; i < r->width; i++)
        sum += vec_load(r->weight[i] + c) * vec_load(r->x[ring_row(r, r->width - i)] + c);
    return sum;
}

static void clear_conv_padding(const rt_conv_params *p, const conv_ring *r, int64_t row, void *array) {
    const int64_t bytes = p->dtype == RT_F64 ? 8 : p->dtype == RT_F32 ? 4 : 2;
    memset((char *)array + (row * p->num_channels + r->first) * bytes, 0, (size_t)(r->count * bytes));
}

static void conv_forward(const rt_conv_params *p, int64_t first, int64_t last) {
    conv_ring r;
    load_weights(p, first, last, &r);
    for (int64_t batch = 0; batch < p->batch; batch++) {
        load_window(p, batch, &r);
        for (int64_t t = 0; t < p->num_tokens; t++) {
            const int32_t seq_idx = p->seq_idx[batch * p->seq_idx_batch_stride + t];
            const int64_t at = batch * p->num_tokens + t;
            if (seq_idx < 0) {
                clear_conv_padding(p, &r, at, p->y);
                continue;
            }
            if (seq_idx != r.document) memset(r.x, 0, sizeof(r.x)), r.document = seq_idx;
            push_token(p, batch, t, &r);
            real y[CONV_CHANNELS];
            for (int64_t c = 0; c < r.count; c += LANES) {
                const vec z = conv_at(&r, c);
                vec_store(y + c, p->silu ? sigmoid_gate(z, z, vec_set(1)).value : z);
            }
            store_chunk(p->dtype, p->y, at * p->num_channels + first, r.count, y);
        }
        for (int64_t i = 0; i < p->width - 1; i++)
            store_chunk(conv_state_dtype(p), p->final_state, conv_state_at(p, batch, i) + first, r.count,
                        r.x[ring_row(&r, p->width - 1 - i)]);
    }
}

// ---- backward ------------------------------------------------------------------------------------

enum { NO_TOKEN = -1 - RT_MAX_CONV_WIDTH };

typedef struct conv_gradients {
    real dx[RT_MAX_CONV_WIDTH][CONV_CHANNELS]; // of the tokens in the ring
    int64_t token[RT_MAX_CONV_WIDTH];          // whose: >= 0 of the row; -1 - i row i of the initial state; NO_TOKEN
    real dweight[RT_MAX_CONV_WIDTH][CONV_CHANNELS], dbias[CONV_CHANNELS];
    real dweight_sum[RT_MAX_CONV_WIDTH][CONV_CHANNELS],
        dbias_sum[CONV_CHANNELS]; // of the last CONV_SUM_LEN tokens
} conv_gradients;

// No later token reads the one in this row of the ring: its gradient is done.
static void store_dx(const rt_conv_params *p, const conv_ring *r, int64_t batch, int64_t row, conv_gradients *g) {
    const int64_t token = g->token[row];
    if (token >= 0)
        store_chunk(p->dtype, p->dx, (batch * p->num_tokens + token) * p->num_channels + r->first, r->count,
                    g->dx[row]);
    else if (token != NO_TOKEN)
        store_chunk(conv_state_dtype(p), p->dinitial_state, conv_state_at(p, batch, -1 - token) + r->first, r->count,
                    g->dx[row]);
    memset(g->dx[row], 0, sizeof(g->dx[row]));
    g->token[row] = NO_TOKEN;
}

static void store_all_dx(const rt_conv_params *p, const conv_ring *r, int64_t batch, conv_gradients *g) {
    for (int64_t row = 0; row < p->width; row++) store_dx(p, r, batch, row, g);
}

static void add_sums(const rt_conv_params *p, conv_gradients *g) {
    for (int64_t c = 0; c < CONV_CHANNELS; c++) g->dbias[c] += g->dbias_sum[c], g->dbias_sum[c] = 0;
    for (int64_t i = 0; i < p->width; i++)
        for (int64_t c = 0; c < CONV_CHANNELS; c++) g->dweight[i][c] += g->dweight_sum[i][c], g->dweight_sum[i][c] = 0;
}

static void backward_token(const rt_conv_params *p, const conv_ring *r, const real *dy, conv_gradients *g) {
    for (int64_t c = 0; c < r->count; c += LANES) {
        vec dz = vec_load(dy + c);
        if (p->silu) {
            const vec z = conv_at(r, c);
            dz *= sigmoid_gate(z, z, vec_set(1)).slope;
        }
        vec_store(g->dbias_sum + c, vec_load(g->dbias_sum + c) + dz);
        for (int64_t i = 0; i < p->width; i++) {
            const int64_t row = ring_row(r, p->width - i);
            vec_store(g->dx[row] + c, vec_load(g->dx[row] + c) + vec_load(r->weight[i] + c) * dz);
            vec_store(g->dweight_sum[i] + c, vec_load(g->dweight_sum[i] + c) + vec_load(r->x[row] + c) * dz);
        }
    }
}

static void conv_backward(const rt_conv_params *p, int64_t first, int64_t last) {
    conv_ring r;
    conv_gradients g;
    load_weights(p, first, last, &r);
    memset(&g, 0, sizeof(g));
    for (int64_t batch = 0; batch < p->batch; batch++) {
        load_window(p, batch, &r);
        for (int64_t i = 0; i < RT_MAX_CONV_WIDTH; i++) g.token[i] = i < p->width - 1 ? -1 - i : NO_TOKEN;
        for (int64_t t = 0; t < p->num_tokens; t++) {
            const int32_t seq_idx = p->seq_idx[batch * p->seq_idx_batch_stride + t];
            if (seq_idx < 0) {
                clear_conv_padding(p, &r, batch * p->num_tokens + t, p->dx);
                continue;
            }
            if (seq_idx != r.document) {
                store_all_dx(p, &r, batch, &g);
                memset(r.x, 0, sizeof(r.x)), r.document = seq_idx;
            }
            store_dx(p, &r, batch, ring_row(&r, 0), &g);
            g.token[push_token(p, batch, t, &r)] = t;
            real dy[CONV_CHANNELS];
            ring_load(&r, p->dtype, p->dy, batch * p->dy_stride[0] + t * p->dy_stride[1], dy);
            backward_token(p, &r, dy, &g);
            if (t % CONV_SUM_LEN == 0) add_sums(p, &g);
        }
        for (int64_t i = 0; i < p->width - 1 && p->dfinal_state != NULL; i++) {
            real dfinal[CONV_CHANNELS], *dx = g.dx[ring_row(&r, p->width - 1 - i)];
            ring_load(&r, conv_state_dtype(p), p->dfinal_state, conv_state_at(p, batch, i), dfinal);
            for (int64_t c = 0; c < r.count; c++) dx[c] += dfinal[c];
        }
        store_all_dx(p, &r, batch, &g);
    }
    add_sums(p, &g);
    real *dweight = p->dweight;
    for (int64_t c = 0; c < r.count; c++)
        for (int64_t i = 0; i < p->width; i++) dweight[(first + c) * p->width + i] = g.dweight[i][c];
    if (p->bias != NULL) store_chunk(conv_state_dtype(p), p->dbias, first, r.count, g.dbias);
}

#endif // RINGTILE_SCAN_CONV_KERNEL_H
