// Attention problems with random shapes, memory layouts, masks and runs. Shape letters as in ringtile.h.
#ifndef RINGTILE_TESTS_ATTN_CASE_H
#define RINGTILE_TESTS_ATTN_CASE_H

#include "layouts.h"

#include "../../csrc/attn/philox.h"

// ---- tensors -----------------------------------------------------------------------------------------------

// (B, T, H, D) with the first three dims in any order in memory. Nothing may write to the gaps between rows.
typedef struct tensor {
    rt_dtype dtype;
    int64_t size[4], stride[3], num_elements; // stride: batch, token, head
    void *data;
} tensor;

static const double GAP = 77;

static inline tensor new_tensor(uint64_t *state, rt_dtype dtype, int64_t num_batches, int64_t num_tokens,
                                int64_t num_heads, int64_t dim) {
    tensor t = {.dtype = dtype, .size = {num_batches, num_tokens, num_heads, dim}};
    int order[3] = {0, 1, 2}; // outermost first
    for (int i = 2; i > 0; i--) {
        const int other = (int)random_int(state, 0, i), kept = order[i];
        order[i] = order[other];
        order[other] = kept;
    }
    int64_t step = dim + random_int(state, 0, 1) * random_int(state, 0, 5);
    for (int i = 2; i >= 0; i--) {
        t.stride[order[i]] = step;
        step *= t.size[order[i]];
    }
    if (num_batches > 0 && num_tokens > 0) { // ends at the last element, for the address sanitizer
        t.num_elements = dim;
        for (int i = 0; i < 3; i++) t.num_elements += (t.size[i] - 1) * t.stride[i];
    }
    t.data = must_alloc((size_t)t.num_elements * dtype_bytes(dtype));
    for (int64_t i = 0; i < t.num_elements; i++) store_element(dtype, t.data, i, GAP);
    return t;
}

static inline int64_t row_of(const tensor *t, int64_t b, int64_t token, int64_t head) {
    return b * t->stride[0] + token * t->stride[1] + head * t->stride[2];
}

static inline double get(const tensor *t, int64_t b, int64_t token, int64_t head, int64_t d) {
    return load_element(t->dtype, t->data, row_of(t, b, token, head) + d);
}

static inline void set(tensor *t, int64_t b, int64_t token, int64_t head, int64_t d, double value) {
    store_element(t->dtype, t->data, row_of(t, b, token, head) + d, value);
}

static inline void add(tensor *t, int64_t b, int64_t token, int64_t head, int64_t d, double value) {
    set(t, b, token, head, d, get(t, b, token, head, d) + value);
}

#define FOR_EACH_ELEMENT(t, b, token, head, d)                                                                         \
    for (int64_t b = 0; b < (t)->size[0]; b++)                                                                         \
        for (int64_t token = 0; token < (t)->size[1]; token++)                                                         \
            for (int64_t head = 0; head < (t)->size[2]; head++)                                                        \
                for (int64_t d = 0; d < (t)->size[3]; d++)

static inline void fill(tensor *t, double value) {
    FOR_EACH_ELEMENT(t, b, token, head, d) set(t, b, token, head, d, value);
}

static inline void fill_random(tensor *t, uint64_t *state, double magnitude) {
    FOR_EACH_ELEMENT(t, b, token, head, d) set(t, b, token, head, d, magnitude * random_unit(state));
}

static inline tensor copy_as(const tensor *t, rt_dtype dtype, uint64_t *state) {
    tensor copy = new_tensor(state, dtype, t->size[0], t->size[1], t->size[2], t->size[3]);
    FOR_EACH_ELEMENT(t, b, token, head, d) set(&copy, b, token, head, d, get(t, b, token, head, d));
    return copy;
}

// Whether the memory between the rows still holds GAP.
static inline bool gaps_are_intact(const tensor *t) {
    uint8_t *used = calloc((size_t)t->num_elements + 1, 1);
    if (used == NULL) exit(1);
    FOR_EACH_ELEMENT(t, b, token, head, d) used[row_of(t, b, token, head) + d] = 1;
    bool intact = true;
    for (int64_t i = 0; i < t->num_elements; i++) intact &= used[i] || load_element(t->dtype, t->data, i) == GAP;
    free(used);
    return intact;
}

// ---- problems ----------------------------------------------------------------------------------------------

typedef enum array_name { Q, K, V, DOUT, OUT, LSE, DELTA, DQ, DK, DV, NUM_ARRAYS } array_name;

typedef struct attn_case {
    rt_attn_block p;
    bool fresh;                                 // out and lse, or dk and dv
    tensor x[NUM_ARRAYS];                       // lse and delta as (B, N, H, 1), laid out as (B, H, N)
    void *rounded[NUM_ARRAYS];                  // results rounded to dtype, of OUT, DK and DV; or NULL
    int32_t *begin, *end, *key_begin, *key_end; // the last two NULL in a mask with one side
    rt_run *runs;                               // (2 MAX_RUNS)
    int64_t *dropout_rows, *q_positions;        // NULL where nothing reads them
    double weight_roundoff;                     // of weights and their gradients before they are multiplied
} attn_case;

// Tiles multiply bf16, to which they round P and dS; vectors keep them.
static inline double weight_roundoff(rt_dtype dtype) {
    rt_isa isa = RT_ISA_GENERIC;
    rt_cpu_isa(&isa);
    return dtype == RT_BF16 && isa == RT_ISA_AMX_BF16 ? 0x1p-8 : 0;
}

typedef struct attn_shape {
    rt_dtype dtype;
    int64_t batch, num_queries, seq_len, group, num_kv_heads, head_dim, v_head_dim;
    bool one_run; // the keys are 0..seq_len-1, in one run
} attn_shape;

static inline rt_dtype state_dtype(rt_dtype dtype) { return dtype == RT_F64 ? RT_F64 : RT_F32; }

static inline void copy_stride(int64_t to[3], const tensor *x) { memcpy(to, x->stride, sizeof(x->stride)); }

// Points the block at the arrays that it reads.
static inline void bind(attn_case *c) {
    rt_attn_block *p = &c->p;
    p->q = c->x[Q].data, p->k = c->x[K].data, p->v = c->x[V].data;
    copy_stride(p->q_stride, &c->x[Q]), copy_stride(p->k_stride, &c->x[K]), copy_stride(p->v_stride, &c->x[V]);
    p->k_runs = c->runs, p->begin = c->begin, p->end = c->end;
}

static inline rt_attn_fwd_params forward_of(const attn_case *c) {
    rt_attn_fwd_params p = {c->p, c->fresh, c->x[OUT].data, c->x[LSE].data, {0}, c->rounded[OUT]};
    copy_stride(p.out_stride, &c->x[OUT]);
    return p;
}

static inline rt_attn_bwd_params backward_of(const attn_case *c) {
    const tensor *x = c->x;
    rt_attn_bwd_params p = {.block = c->p, .fresh = c->fresh, .lse = x[LSE].data, .delta = x[DELTA].data};
    p.dout = x[DOUT].data, p.dq = x[DQ].data, p.dk = x[DK].data, p.dv = x[DV].data;
    copy_stride(p.dout_stride, &x[DOUT]), copy_stride(p.dq_stride, &x[DQ]);
    copy_stride(p.dk_stride, &x[DK]), copy_stride(p.dv_stride, &x[DV]);
    p.rounded_dk = c->rounded[DK], p.rounded_dv = c->rounded[DV];
    return p;
}

// lse or delta: (B, H, N) contiguous.
static inline tensor new_row_numbers(rt_dtype dtype, int64_t num_batches, int64_t num_tokens, int64_t num_heads) {
    const int64_t num_elements = num_batches * num_tokens * num_heads;
    tensor t = {.dtype = dtype,
                .size = {num_batches, num_tokens, num_heads, 1},
                .stride = {num_heads * num_tokens, 1, num_tokens},
                .num_elements = num_elements,
                .data = must_alloc((size_t)num_elements * dtype_bytes(dtype))};
    return t;
}

// The same problem in f64, so that the reference does not round its state; all values are exact. It shares mask and
// runs with c: release it with free_arrays.
static inline attn_case widen(const attn_case *c, uint64_t *state) {
    attn_case wide = *c;
    wide.p.dtype = RT_F64;
    for (int i = 0; i < NUM_ARRAYS; i++) {
        const tensor *from = &c->x[i];
        if (i == LSE || i == DELTA) {
            wide.x[i] = new_row_numbers(RT_F64, from->size[0], from->size[1], from->size[2]);
            for (int64_t j = 0; j < from->num_elements; j++)
                store_element(RT_F64, wide.x[i].data, j, load_element(from->dtype, from->data, j));
        } else {
            wide.x[i] = copy_as(from, RT_F64, state);
        }
    }
    bind(&wide);
    return wide;
}

static inline void free_arrays(attn_case *c) {
    for (int i = 0; i < NUM_ARRAYS; i++) free(c->x[i].data);
}

static inline void free_case(attn_case *c) {
    free_arrays(c);
    free(c->dropout_rows);
    free(c->q_positions);
    free(c->begin);
    free(c->end);
    free(c->key_begin);
    free(c->key_end);
    free(c->runs);
}

typedef enum mask_kind {
    MASK_FULL,
    MASK_CAUSAL,
    MASK_WINDOW,
    MASK_DOCUMENTS,
    MASK_CAUSAL_DOCUMENTS,
    MASK_SOME_EMPTY,
    MASK_EMPTY,
    MASK_RANDOM,
    MASK_WILD,
    NUM_MASKS
} mask_kind;

// [begin, end) of a query at global position x.
static inline void draw_interval(uint64_t *state, mask_kind kind, int64_t seq_len, int64_t x, int32_t *begin,
                                 int32_t *end) {
    const int64_t window = seq_len / 5 + 1, document = x / window * window;
    int64_t from = 0, to = seq_len;
    if (kind == MASK_CAUSAL || kind == MASK_SOME_EMPTY) to = x + 1;
    if (kind == MASK_WINDOW) from = x - window + 1, to = x + 1;          // begins below 0
    if (kind == MASK_DOCUMENTS) from = document, to = document + window; // ends after seq_len
    if (kind == MASK_CAUSAL_DOCUMENTS) from = document, to = x + 1;
    if (kind == MASK_EMPTY || (kind == MASK_SOME_EMPTY && random_int(state, 0, 1))) to = from;
    if (kind == MASK_RANDOM) from = random_int(state, 0, seq_len), to = random_int(state, 0, seq_len);
    if (kind == MASK_WILD) { // the ends of int32, in any order
        const int64_t bounds[] = {INT32_MIN, -1, 0, seq_len / 2, seq_len, INT32_MAX};
        from = bounds[random_int(state, 0, 5)], to = bounds[random_int(state, 0, 5)];
    }
    *begin = (int32_t)from, *end = (int32_t)to;
}

// Part of 0..seq_len-1, as arithmetic progressions in any order, with keys in no run between them.
static inline void draw_runs(uint64_t *state, int64_t seq_len, attn_case *c) {
    rt_run pieces[MAX_RUNS];
    const int64_t num_pieces = random_pieces(state, seq_len, pieces);
    shuffle_runs(state, pieces, num_pieces);
    c->p.num_k_runs = c->p.num_keys = 0;
    for (int64_t i = 0; i < num_pieces; i++) {
        if (num_pieces > 1 && random_int(state, 0, 4) == 0) continue; // held by another rank
        c->p.num_keys += random_int(state, 0, 1) * random_int(state, 0, 3);
        pieces[i].local_begin = c->p.num_keys;
        c->runs[c->p.num_k_runs++] = pieces[i];
        c->p.num_keys += pieces[i].length;
    }
    shuffle_runs(state, c->runs, c->p.num_k_runs);
}

static inline attn_case new_case(uint64_t *state, attn_shape s, mask_kind mask, double magnitude) {
    attn_case c = {.p = {.dtype = s.dtype,
                         .batch = s.batch,
                         .num_queries = s.num_queries,
                         .num_heads = s.num_kv_heads * s.group,
                         .num_kv_heads = s.num_kv_heads,
                         .head_dim = s.head_dim,
                         .v_head_dim = s.v_head_dim},
                   .weight_roundoff = weight_roundoff(s.dtype)};
    rt_attn_block *p = &c.p;
    p->scale = 1 / sqrt((double)s.head_dim);
    c.runs = must_alloc(2 * MAX_RUNS * sizeof(*c.runs));
    if (s.one_run) {
        c.runs[0] = (rt_run){.stride = 1, .length = s.seq_len};
        p->num_k_runs = 1, p->num_keys = s.seq_len;
    } else {
        draw_runs(state, s.seq_len, &c);
    }

    const int64_t mask_rows = random_int(state, 0, 1) ? s.batch : 1, num_intervals = mask_rows * s.num_queries;
    p->mask_batch_stride = mask_rows > 1 ? s.num_queries : 0;
    c.begin = must_alloc((size_t)num_intervals * sizeof(*c.begin));
    c.end = must_alloc((size_t)num_intervals * sizeof(*c.end));
    for (int64_t i = 0; i < num_intervals; i++)
        draw_interval(state, mask, s.seq_len, s.seq_len > 0 ? random_int(state, 0, s.seq_len - 1) : 0, &c.begin[i],
                      &c.end[i]);

    const rt_dtype sum = state_dtype(s.dtype);
    const int64_t B = s.batch, N = s.num_queries, H = p->num_heads, G = s.num_kv_heads;
    c.x[Q] = new_tensor(state, s.dtype, B, N, H, s.head_dim);
    c.x[K] = new_tensor(state, s.dtype, B, p->num_keys, G, s.head_dim);
    c.x[V] = new_tensor(state, s.dtype, B, p->num_keys, G, s.v_head_dim);
    c.x[DOUT] = new_tensor(state, s.dtype, B, N, H, s.v_head_dim);
    c.x[OUT] = new_tensor(state, sum, B, N, H, s.v_head_dim);
    c.x[DQ] = new_tensor(state, sum, B, N, H, s.head_dim);
    c.x[DK] = new_tensor(state, sum, B, p->num_keys, G, s.head_dim);
    c.x[DV] = new_tensor(state, sum, B, p->num_keys, G, s.v_head_dim);
    c.x[LSE] = new_row_numbers(sum, B, N, H);
    c.x[DELTA] = new_row_numbers(sum, B, N, H);
    for (int i = Q; i <= DOUT; i++) fill_random(&c.x[i], state, magnitude);
    for (int i = DQ; i <= DV; i++) fill_random(&c.x[i], state, 1); // gradients are added to
    fill(&c.x[OUT], 0);
    fill(&c.x[LSE], -INFINITY);
    bind(&c);
    return c;
}

// Intervals of keys, and positions of queries that they may hold: nested, as those of a tree, or any.
static inline void draw_key_mask(uint64_t *state, attn_case *c, int64_t seq_len) {
    rt_attn_block *p = &c->p;
    const int64_t rows = random_int(state, 0, 1) ? p->batch : 1, num_intervals = rows * p->num_keys;
    p->key_mask_batch_stride = rows > 1 ? p->num_keys : 0;
    c->key_begin = must_alloc((size_t)num_intervals * sizeof(int32_t) + 1);
    c->key_end = must_alloc((size_t)num_intervals * sizeof(int32_t) + 1);
    const bool any = random_int(state, 0, 2) == 0;
    const int64_t node = random_int(state, 1, seq_len / 3 + 2);
    for (int64_t i = 0; i < num_intervals; i++) {
        const int64_t begin = i % p->num_keys / node * node, end = begin + node * (1 + (begin / node) % 3);
        c->key_begin[i] = (int32_t)begin, c->key_end[i] = (int32_t)(end);
        if (any)
            draw_interval(state, random_int(state, 0, 5) ? MASK_RANDOM : MASK_WILD, seq_len, 0, &c->key_begin[i],
                          &c->key_end[i]);
    }
    c->q_positions = must_alloc((size_t)p->num_queries * sizeof(int64_t));
    const bool in_order = random_int(state, 0, 1);
    for (int64_t i = 0; i < p->num_queries; i++)
        c->q_positions[i] = in_order                  ? i
                            : random_int(state, 0, 9) ? random_int(state, 0, seq_len)
                                                      : random_int(state, -1, 1) * (INT64_C(1) << 33);
    p->key_begin = c->key_begin, p->key_end = c->key_end, p->q_positions = c->q_positions;
}

// Any probability but 0, rows and positions of any size.
static inline void draw_dropout(uint64_t *state, attn_case *c) {
    const double probabilities[] = {0.1, 0.5, 0.9, 1e-9, 1 - 1e-9, 1};
    rt_attn_block *p = &c->p;
    p->dropout = probabilities[random_int(state, 0, 5)];
    p->seed = (uint32_t)random_int(state, 0, UINT32_MAX), p->step = (uint32_t)random_int(state, 0, 100);
    p->stream = (uint32_t)random_int(state, 0, UINT32_MAX);
    c->dropout_rows = must_alloc((size_t)p->batch * sizeof(int64_t));
    const bool drawn = c->q_positions != NULL;
    if (!drawn) c->q_positions = must_alloc((size_t)p->num_queries * sizeof(int64_t));
    for (int64_t i = 0; i < p->batch; i++) c->dropout_rows[i] = random_int(state, 0, INT64_C(1) << 33);
    for (int64_t i = 0; i < p->num_queries && !drawn; i++) c->q_positions[i] = random_int(state, 0, INT64_C(1) << 33);
    p->dropout_rows = c->dropout_rows, p->q_positions = c->q_positions;
}

// What dropout multiplies the weight of a pair by; row: of k.
static inline double dropout_factor(const attn_case *c, int64_t b, int64_t token, int64_t head, int64_t row) {
    const rt_attn_block *p = &c->p;
    if (p->dropout == 0) return 1;
    for (const rt_run *run = p->k_runs; run < p->k_runs + p->num_k_runs; run++) {
        const int64_t j = row - run->local_begin;
        if (j < 0 || j >= run->length) continue;
        const uint64_t position = (uint64_t)(run->global_begin + j * run->stride);
        const uint32_t of_head = (uint32_t)p->dropout_rows[b] + ((uint32_t)head << 20);
        const rt_philox counter = {{(uint32_t)(position / 4), (uint32_t)p->q_positions[token], of_head, p->stream}};
        const uint32_t word = rt_philox4x32(counter, p->seed, p->step).word[position % 4];
        return word < nearbyint((1 - p->dropout) * 0x1p32) ? 1 / (1 - p->dropout) : 0;
    }
    return 0;
}

// Which rows of k are in a run: (K), to be freed.
static inline bool *keys_in_runs(const attn_case *c) {
    bool *used = calloc((size_t)c->p.num_keys + 1, sizeof(*used));
    if (used == NULL) exit(1);
    for (int64_t r = 0; r < c->p.num_k_runs; r++)
        for (int64_t i = 0; i < c->runs[r].length; i++) used[c->runs[r].local_begin + i] = true;
    return used;
}

// Marks the outputs as uninitialized. Keys in no run get one, at positions after the sequence.
static inline void make_fresh(attn_case *c, int64_t seq_len) {
    bool *used = keys_in_runs(c);
    for (int64_t row = 0, end; row < c->p.num_keys; row = end) {
        for (end = row + 1; end < c->p.num_keys && used[end] == used[row]; end++) {
        }
        if (!used[row]) c->runs[c->p.num_k_runs++] = (rt_run){seq_len + row, 1, row, end - row};
    }
    free(used);
    c->fresh = true;
}

static inline attn_shape random_shape(uint64_t *state) {
    return (attn_shape){.dtype = all_dtypes[random_int(state, 0, NUM_DTYPES - 1)],
                        .batch = random_int(state, 1, 2),
                        .num_queries = random_int(state, 1, 40),
                        .seq_len = random_int(state, 1, 160),
                        .group = random_int(state, 1, 3),
                        .num_kv_heads = random_int(state, 1, 2),
                        .head_dim = random_int(state, 1, 40),
                        .v_head_dim = random_int(state, 1, 40)};
}

#endif // RINGTILE_TESTS_ATTN_CASE_H
