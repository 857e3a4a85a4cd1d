// Attention straight from the formula, in f64, one query and one key at a time: the oracle of the C tests. It has
// neither tiles nor vectors, and reads only the keys that a query attends.
#include "attn_reference.h"

#include "../../csrc/attn/attn.h"
#include "../../csrc/attn/philox.h"
#include "../../csrc/half.h"

#include <math.h>

static double load(rt_dtype dtype, const void *array, int64_t i) {
    switch (dtype) {
    case RT_F64:
        return ((const double *)array)[i];
    case RT_F32:
        return (double)((const float *)array)[i];
    case RT_BF16:
        return (double)bf16_to_f32(((const uint16_t *)array)[i]);
    default:
        return (double)((const half *)array)[i];
    }
}

// State and gradients are f64 when the inputs are, else f32.
static double load_state(const rt_attn_block *p, const void *array, int64_t i) {
    return load(p->dtype == RT_F64 ? RT_F64 : RT_F32, array, i);
}

static void store_state(const rt_attn_block *p, void *array, int64_t i, double x) {
    if (p->dtype == RT_F64)
        ((double *)array)[i] = x;
    else
        ((float *)array)[i] = (float)x;
}

static rt_dtype lse_dtype(const rt_attn_block *p) { return p->lse_f64 || p->dtype == RT_F64 ? RT_F64 : RT_F32; }

static void store_lse(const rt_attn_fwd_params *p, int64_t i, double lse) {
    if (lse_dtype(&p->block) == RT_F64)
        ((double *)p->lse)[i] = lse;
    else
        ((float *)p->lse)[i] = (float)lse;
}

static int64_t offset(const int64_t stride[3], int64_t batch, int64_t token, int64_t head) {
    return batch * stride[0] + token * stride[1] + head * stride[2];
}

typedef struct query {
    int64_t batch, token, head, kv_head, row; // row: of lse and delta
} query;

static bool attends(const rt_attn_block *p, const query *i, const rt_run *run, int64_t j) {
    const int64_t at = i->batch * p->mask_batch_stride + i->token, position = run->global_begin + j * run->stride;
    if (position < p->begin[at] || position >= p->end[at]) return false;
    if (p->key_begin == NULL) return true;
    const int64_t key = i->batch * p->key_mask_batch_stride + run->local_begin + j, query = p->q_positions[i->token];
    return query >= p->key_begin[key] && query < p->key_end[key];
}

// softcap * tanh(scale q.k / softcap), or scale q.k.
static double score(const rt_attn_block *p, const query *i, int64_t row) {
    const int64_t q = offset(p->q_stride, i->batch, i->token, i->head);
    const int64_t k = offset(p->k_stride, i->batch, row, i->kv_head);
    double dot = 0;
    for (int64_t d = 0; d < p->head_dim; d++) dot += load(p->dtype, p->q, q + d) * load(p->dtype, p->k, k + d);
    const double scaled = p->scale * dot;
    return p->softcap > 0 ? p->softcap * tanh(scaled / p->softcap) : scaled;
}

// A key: its row of k and its position in the sequence.
typedef struct key {
    int64_t row, position;
} key;

// What dropout multiplies the weight of a pair by.
static double factor(const rt_attn_block *p, const query *i, key j) {
    if (p->dropout == 0) return 1;
    const rt_dropout_rule rule = rt_dropout_rule_of(p->dropout);
    const rt_philox counter = {{(uint32_t)(j.position / 4), (uint32_t)p->q_positions[i->token],
                                rt_dropout_row(p->dropout_rows[i->batch], i->head), p->stream}};
    const uint32_t word = rt_philox4x32(counter, p->seed, p->step).word[j.position % 4];
    return word <= rule.last_kept ? rule.scale : 0;
}

// Calls body(p, i, j, ctx) for every key j that query i attends.
typedef void (*pair_body)(const rt_attn_block *p, const query *i, key j, void *ctx);

static void for_attended_keys(const rt_attn_block *p, const query *i, pair_body body, void *ctx) {
    for (const rt_run *run = p->k_runs; run < p->k_runs + p->num_k_runs; run++)
        for (int64_t j = 0; j < run->length; j++)
            if (attends(p, i, run, j))
                body(p, i, (key){run->local_begin + j, run->global_begin + j * run->stride}, ctx);
}

static int64_t num_queries(const rt_attn_block *p) { return p->batch * p->num_heads * p->num_queries; } // of all heads

static query query_at(const rt_attn_block *p, int64_t row) {
    const int64_t head = row / p->num_queries % p->num_heads, kv_head = head / (p->num_heads / p->num_kv_heads);
    return (query){row / p->num_queries / p->num_heads, row % p->num_queries, head, kv_head, row};
}

// ---- forward -----------------------------------------------------------------------------------

typedef struct softmax {
    double top, sum;
    double values[RT_MAX_HEAD_DIM]; // sum of exp(score - top) v, without what is dropped
} softmax;

static void find_top(const rt_attn_block *p, const query *i, key j, void *ctx) {
    softmax *s = ctx;
    s->top = fmax(s->top, score(p, i, j.row));
}

static void add_value(const rt_attn_block *p, const query *i, key j, void *ctx) {
    softmax *s = ctx;
    const double weight = exp(score(p, i, j.row) - s->top), kept = weight * factor(p, i, j);
    const int64_t v = offset(p->v_stride, i->batch, j.row, i->kv_head);
    s->sum += weight;
    for (int64_t d = 0; d < p->v_head_dim; d++) s->values[d] += kept * load(p->dtype, p->v, v + d);
}

static void forward_query(const rt_attn_fwd_params *p, const query *i) {
    const rt_attn_block *b = &p->block;
    softmax s = {.top = -INFINITY};
    for_attended_keys(b, i, find_top, &s);
    if (s.top == -INFINITY) s.top = 0; // no key, or scores of -inf only
    for_attended_keys(b, i, add_value, &s);
    const int64_t out = offset(p->out_stride, i->batch, i->token, i->head);
    if (s.sum == 0) { // no weight: 0, but an infinite value times 0
        for (int64_t d = 0; d < b->v_head_dim; d++)
            store_state(b, p->out, out + d, load_state(b, p->out, out + d) + s.values[d]);
        return;
    }
    // A softmax over two sets of keys weighs each set's mean by exp(lse_set - lse).
    const double before = load(lse_dtype(b), p->lse, i->row), block = s.top + log(s.sum);
    const double top = fmax(before, block), lse = top + log(exp(before - top) + exp(block - top));
    for (int64_t d = 0; d < b->v_head_dim; d++) {
        const double old = load_state(b, p->out, out + d), weight = before == -INFINITY ? 1 : exp(before - lse);
        store_state(b, p->out, out + d, weight * old + exp(block - lse) * s.values[d] / s.sum);
    }
    store_lse(p, i->row, lse);
}

// out = 0 and lse = -inf, the state before the first block.
static void clear_query(const rt_attn_fwd_params *p, const query *i) {
    store_lse(p, i->row, -INFINITY);
    const int64_t out = offset(p->out_stride, i->batch, i->token, i->head);
    for (int64_t d = 0; d < p->block.v_head_dim; d++) store_state(&p->block, p->out, out + d, 0);
}

rt_status rt_attn_fwd_reference(const rt_attn_fwd_params *p) {
    const rt_status status = rt_attn_check_fwd(p);
    if (status != RT_OK) return status;
    for (int64_t row = 0; row < num_queries(&p->block); row++) {
        const query i = query_at(&p->block, row);
        if (p->fresh) clear_query(p, &i);
        forward_query(p, &i);
    }
    return RT_OK;
}

// ---- backward ----------------------------------------------------------------------------------

static void add_to(const rt_attn_block *p, void *array, int64_t i, double x) {
    store_state(p, array, i, load_state(p, array, i) + x);
}

static void backward_pair(const rt_attn_block *b, const query *i, key j, void *ctx) {
    const rt_attn_bwd_params *p = ctx;
    const int64_t row = j.row;
    const double z = factor(b, i, j);
    const double s = score(b, i, row), weight = exp(s - load(lse_dtype(b), p->lse, i->row));
    const int64_t dout = offset(p->dout_stride, i->batch, i->token, i->head);
    const int64_t v = offset(b->v_stride, i->batch, row, i->kv_head);
    const int64_t dv = offset(p->dv_stride, i->batch, row, i->kv_head);
    double dweight = 0; // out = sum of weight z v
    for (int64_t d = 0; d < b->v_head_dim; d++) {
        dweight += z * load(b->dtype, p->dout, dout + d) * load(b->dtype, b->v, v + d);
        add_to(b, p->dv, dv + d, weight * z * load(b->dtype, p->dout, dout + d));
    }
    double dscore = weight * (dweight - load_state(b, p->delta, i->row));
    if (b->softcap > 0) dscore *= 1 - s / b->softcap * (s / b->softcap);
    const int64_t q = offset(b->q_stride, i->batch, i->token, i->head);
    const int64_t dq = offset(p->dq_stride, i->batch, i->token, i->head);
    const int64_t k = offset(b->k_stride, i->batch, row, i->kv_head);
    const int64_t dk = offset(p->dk_stride, i->batch, row, i->kv_head);
    for (int64_t d = 0; d < b->head_dim; d++) { // score = scale q.k
        add_to(b, p->dq, dq + d, b->scale * dscore * load(b->dtype, b->k, k + d));
        add_to(b, p->dk, dk + d, b->scale * dscore * load(b->dtype, b->q, q + d));
    }
}

static void clear_key_rows(const rt_attn_block *p, void *array, const int64_t stride[3], int64_t dim) {
    if (p->num_keys == 0) return;
    for (int64_t batch = 0; batch < p->batch; batch++)
        for (int64_t row = 0; row < p->num_keys; row++)
            for (int64_t head = 0; head < p->num_kv_heads; head++)
                for (int64_t d = 0; d < dim; d++) store_state(p, array, offset(stride, batch, row, head) + d, 0);
}

rt_status rt_attn_bwd_reference(const rt_attn_bwd_params *p) {
    const rt_status status = rt_attn_check_bwd(p);
    if (status != RT_OK) return status;
    if (p->fresh) {
        clear_key_rows(&p->block, p->dk, p->dk_stride, p->block.head_dim);
        clear_key_rows(&p->block, p->dv, p->dv_stride, p->block.v_head_dim);
    }
    for (int64_t row = 0; row < num_queries(&p->block); row++) {
        const query i = query_at(&p->block, row);
        for_attended_keys(&p->block, &i, backward_pair, (void *)(uintptr_t)p);
    }
    return RT_OK;
}
