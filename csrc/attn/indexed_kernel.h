// Attention over chosen keys, compiled once per instruction set for its math type (vec.h). Keys are read where they
// lie, INDEXED_KEYS at a time; query heads that share a kv head share the reading.

#include "../chunk.h"
#include "../isa/kernels.h"

enum { INDEXED_KEYS = 4, INDEXED_PAD = 16 };

// What one worker needs for a query and the heads of one kv head. Numbers for each head lie pad apart.
typedef struct indexed_scratch {
    int32_t *keys;                  // (I)
    int64_t q_pad, v_pad, keys_pad; // at least D, Dv, I: whole vecs
    real *q, *dout, *dq, *out;      // (heads, q_pad or v_pad)
    real *scores, *dweights;        // (heads, keys_pad): then the weights and the gradients of scores
} indexed_scratch;

static int64_t indexed_padded(int64_t count) { return (count + INDEXED_PAD - 1) / INDEXED_PAD * INDEXED_PAD; }

static int64_t indexed_attn_scratch_bytes(const rt_indexed_attn_params *p) {
    const int64_t heads = p->num_heads / p->num_kv_heads, keys_pad = indexed_padded(p->num_indices);
    const int64_t per_head = 2 * (indexed_padded(p->head_dim) + indexed_padded(p->v_head_dim) + keys_pad);
    return heads * per_head * (int64_t)sizeof(real) + keys_pad * (int64_t)sizeof(int32_t);
}

static indexed_scratch indexed_scratch_of(const rt_indexed_attn_params *p, char *workspace) {
    indexed_scratch s = {.q_pad = indexed_padded(p->head_dim),
                         .v_pad = indexed_padded(p->v_head_dim),
                         .keys_pad = indexed_padded(p->num_indices)};
    const int64_t heads = p->num_heads / p->num_kv_heads;
    s.q = (real *)workspace;
    s.dq = s.q + heads * s.q_pad;
    s.dout = s.dq + heads * s.q_pad;
    s.out = s.dout + heads * s.v_pad;
    s.scores = s.out + heads * s.v_pad;
    s.dweights = s.scores + heads * s.keys_pad;
    s.keys = (int32_t *)(s.dweights + heads * s.keys_pad);
    return s;
}

static const real indexed_no_key[CHUNK];

// INDEXED_KEYS keys of a head as reals with zeros up to a whole vec: where they lie, or widened.
typedef struct indexed_rows {
    const real *row[INDEXED_KEYS];
    real wide[INDEXED_KEYS][CHUNK];
} indexed_rows;

// first: the element of array with which the keys of the head begin.
static inline void indexed_load(rt_dtype dtype, const void *array, int64_t first, int64_t stride, int64_t dim,
                                const int32_t *keys, int64_t num_keys, indexed_rows *to) {
    const bool widens = (dtype != RT_F32 && dtype != RT_F64) || dim % LANES != 0;
    for (int64_t j = 0; j < INDEXED_KEYS; j++) {
        to->row[j] = indexed_no_key;
        if (j >= num_keys) continue;
        const int64_t at = first + keys[j] * stride;
        if (widens) load_chunk(dtype, array, at, dim, to->wide[j]);
        to->row[j] = widens ? to->wide[j] : (const real *)array + at;
    }
}

// to[j] = x . row j
static inline void indexed_dots(const real *x, const indexed_rows *rows, int64_t dim, real *to) {
    vec sum[INDEXED_KEYS];
    for (int j = 0; j < INDEXED_KEYS; j++) sum[j] = vec_set(0);
    for (int64_t d = 0; d < dim; d += LANES)
        for (int j = 0; j < INDEXED_KEYS; j++) sum[j] += vec_load(x + d) * vec_load(rows->row[j] + d);
    for (int j = 0; j < INDEXED_KEYS; j++) to[j] = vec_reduce_sum(sum[j]);
}

// to += the sum over j of weights[j] * row j
static inline void indexed_add_rows(real *to, const real *weights, const indexed_rows *rows, int64_t dim) {
    for (int64_t d = 0; d < dim; d += LANES) {
        vec sum = vec_set(0);
        for (int j = 0; j < INDEXED_KEYS; j++) sum += weights[j] * vec_load(rows->row[j] + d);
        vec_store(to + d, vec_load(to + d) + sum);
    }
}

// to += factor * from, of exactly dim numbers
static inline void indexed_add(real *to, real factor, const real *from, int64_t dim) {
    int64_t d = 0;
    for (; d + LANES <= dim; d += LANES) vec_store(to + d, vec_load(to + d) + factor * vec_load(from + d));
    for (; d < dim; d++) to[d] += factor * from[d];
}

// The keys of a query that are there.
static int64_t indexed_keys(const rt_indexed_attn_params *p, int64_t batch, int64_t query, int32_t *keys) {
    const int32_t *indices = p->indices + (batch * p->num_queries + query) * p->num_indices;
    int64_t count = 0;
    for (int64_t i = 0; i < p->num_indices; i++)
        if (indices[i] >= 0 && indices[i] < p->num_keys) keys[count++] = indices[i];
    return count;
}

// Rows first_row and those of the next heads of an array (B, N, H, dim), widened; pad apart.
static void indexed_load_query(const rt_indexed_attn_params *p, const void *array, int64_t dim, int64_t pad,
                               int64_t first_row, int64_t heads, real *to) {
    for (int64_t h = 0; h < heads; h++) load_chunk(p->dtype, array, (first_row + h) * dim, dim, to + h * pad);
}

// scores (heads, keys_pad) = scale q K^T, and -inf where there is no key. k_first: as of indexed_load.
static void indexed_scores(const rt_indexed_attn_params *p, const indexed_scratch *s, int64_t k_first, int64_t heads,
                           int64_t count) {
    indexed_rows k;
    for (int64_t i = 0; i < count; i += INDEXED_KEYS) {
        indexed_load(p->dtype, p->k, k_first, p->k_stride[1], p->head_dim, s->keys + i, count - i, &k);
        for (int64_t h = 0; h < heads; h++)
            indexed_dots(s->q + h * s->q_pad, &k, p->head_dim, s->scores + h * s->keys_pad + i);
    }
    for (int64_t h = 0; h < heads; h++) {
        real *scores = s->scores + h * s->keys_pad;
        for (int64_t i = 0; i < count; i++) scores[i] *= (real)p->scale;
        for (int64_t i = count; i < indexed_padded(count); i++) scores[i] = (real)-INFINITY;
    }
}

// scores -> exp(scores - their largest), whose sum is *total. Returns the largest; -inf if no score is above it.
static real indexed_softmax(real *scores, int64_t count, real *total) {
    vec max = vec_set((real)-INFINITY), sum = vec_set(0);
    for (int64_t i = 0; i < count; i += LANES) max = vec_max(vec_load(scores + i), max);
    const real largest = vec_reduce_max(max), shift = largest == (real)-INFINITY ? 0 : largest;
    for (int64_t i = 0; i < count; i += LANES) {
        const vec weights = vec_exp(vec_load(scores + i) - shift);
        vec_store(scores + i, weights);
        sum += weights;
    }
    *total = vec_reduce_sum(sum);
    return largest;
}

// Queries [first, last) of a batch, with the heads of one kv head.
static void indexed_attn_forward(const rt_indexed_attn_params *p, int64_t batch, int64_t kv_head, int64_t first,
                                 int64_t last, char *workspace) {
    const indexed_scratch s = indexed_scratch_of(p, workspace);
    const int64_t heads = p->num_heads / p->num_kv_heads, first_head = kv_head * heads, Dv = p->v_head_dim;
    const int64_t k_first = batch * p->k_stride[0] + kv_head * p->k_stride[2];
    const int64_t v_first = batch * p->v_stride[0] + kv_head * p->v_stride[2];
    indexed_rows v;
    for (int64_t query = first; query < last; query++) {
        const int64_t row = (batch * p->num_queries + query) * p->num_heads + first_head;
        const int64_t count = indexed_keys(p, batch, query, s.keys);
        indexed_load_query(p, p->q, p->head_dim, s.q_pad, row, heads, s.q);
        indexed_scores(p, &s, k_first, heads, count);
        for (int64_t h = 0; h < heads; h++) {
            real total, *weights = s.scores + h * s.keys_pad;
            const real largest = indexed_softmax(weights, indexed_padded(count), &total);
            const bool attends = count > 0 && largest != (real)-INFINITY;
            p->lse[(batch * p->num_heads + first_head + h) * p->num_queries + query] =
                attends ? (double)largest + log((double)total) : -INFINITY;
            const real factor = attends ? 1 / total : 0;
            for (int64_t i = 0; i < indexed_padded(count); i++) weights[i] *= factor;
        }
        memset(s.out, 0, (size_t)(heads * s.v_pad) * sizeof(real));
        for (int64_t i = 0; i < count; i += INDEXED_KEYS) {
            indexed_load(p->dtype, p->v, v_first, p->v_stride[1], Dv, s.keys + i, count - i, &v);
            for (int64_t h = 0; h < heads; h++)
                indexed_add_rows(s.out + h * s.v_pad, s.scores + h * s.keys_pad + i, &v, Dv);
        }
        for (int64_t h = 0; h < heads; h++) store_chunk(p->dtype, p->out, (row + h) * Dv, Dv, s.out + h * s.v_pad);
    }
}

// scores and dweights (dO V^T) of one head -> the weights P and scale * dS.
static void indexed_score_gradients(const rt_indexed_attn_params *p, const indexed_scratch *s, int64_t head,
                                    int64_t count, double lse, double delta) {
    real *scores = s->scores + head * s->keys_pad, *dweights = s->dweights + head * s->keys_pad;
    // lse in two parts, so that it is not rounded before the difference.
    const bool attends = lse != -INFINITY;
    const real high = attends ? (real)lse : 0, low = attends ? (real)(lse - (double)high) : 0;
    for (int64_t i = 0; i < indexed_padded(count); i += LANES) {
        const vec weights = vec_exp((vec_load(scores + i) - high) - low);
        vec_store(scores + i, weights);
        vec_store(dweights + i, (real)p->scale * weights * (vec_load(dweights + i) - (real)delta));
    }
}

// All queries of one batch, with the heads of one kv head, in order.
static void indexed_attn_backward(const rt_indexed_attn_params *p, int64_t batch, int64_t kv_head, char *workspace) {
    const indexed_scratch s = indexed_scratch_of(p, workspace);
    const int64_t heads = p->num_heads / p->num_kv_heads, first_head = kv_head * heads;
    const int64_t D = p->head_dim, Dv = p->v_head_dim, K = p->num_keys;
    const int64_t k_first = batch * p->k_stride[0] + kv_head * p->k_stride[2];
    const int64_t v_first = batch * p->v_stride[0] + kv_head * p->v_stride[2];
    real *dk = (real *)p->dk + (batch * p->num_kv_heads + kv_head) * K * D;
    real *dv = (real *)p->dv + (batch * p->num_kv_heads + kv_head) * K * Dv;
    if (K == 0) dk = dv = s.q; // there is none to clear
    memset(dk, 0, (size_t)(K * D) * sizeof(real));
    memset(dv, 0, (size_t)(K * Dv) * sizeof(real));
    indexed_rows k, v;
    for (int64_t query = 0; query < p->num_queries; query++) {
        const int64_t row = (batch * p->num_queries + query) * p->num_heads + first_head;
        const int64_t count = indexed_keys(p, batch, query, s.keys);
        indexed_load_query(p, p->q, D, s.q_pad, row, heads, s.q);
        indexed_load_query(p, p->dout, Dv, s.v_pad, row, heads, s.dout);
        indexed_load_query(p, p->out, Dv, s.v_pad, row, heads, s.out);
        indexed_scores(p, &s, k_first, heads, count);
        for (int64_t i = 0; i < count; i += INDEXED_KEYS) {
            indexed_load(p->dtype, p->v, v_first, p->v_stride[1], Dv, s.keys + i, count - i, &v);
            for (int64_t h = 0; h < heads; h++)
                indexed_dots(s.dout + h * s.v_pad, &v, Dv, s.dweights + h * s.keys_pad + i);
        }
        for (int64_t h = 0; h < heads; h++) {
            const int64_t at = (batch * p->num_heads + first_head + h) * p->num_queries + query;
            vec sum = vec_set(0);
            for (int64_t d = 0; d < Dv; d += LANES)
                sum += vec_load(s.dout + h * s.v_pad + d) * vec_load(s.out + h * s.v_pad + d);
            for (int64_t i = count; i < indexed_padded(count); i++) s.dweights[h * s.keys_pad + i] = 0;
            indexed_score_gradients(p, &s, h, count, p->lse[at], (double)vec_reduce_sum(sum) - p->dlse[at]);
        }
        memset(s.dq, 0, (size_t)(heads * s.q_pad) * sizeof(real));
        for (int64_t i = 0; i < count; i += INDEXED_KEYS) {
            indexed_load(p->dtype, p->k, k_first, p->k_stride[1], D, s.keys + i, count - i, &k);
            for (int64_t h = 0; h < heads; h++) {
                const real *weights = s.scores + h * s.keys_pad + i, *dscores = s.dweights + h * s.keys_pad + i;
                indexed_add_rows(s.dq + h * s.q_pad, dscores, &k, D);
                for (int64_t j = 0; j < INDEXED_KEYS && i + j < count; j++) {
                    indexed_add(dk + s.keys[i + j] * D, dscores[j], s.q + h * s.q_pad, D);
                    indexed_add(dv + s.keys[i + j] * Dv, weights[j], s.dout + h * s.v_pad, Dv);
                }
            }
        }
        for (int64_t h = 0; h < heads; h++) store_chunk(p->dtype, p->dq, (row + h) * D, D, s.dq + h * s.q_pad);
    }
}
