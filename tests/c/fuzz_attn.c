// Attention: forward, backward, delta and the sizes of their workspaces.
#include "fuzz.h"

enum { RUNS = 4 };
typedef enum pass { FORWARD, BACKWARD, DELTA_PASS } pass;

typedef struct attn_call {
    pass pass;
    rt_attn_fwd_params forward;  // whose block and fresh are those of any pass; the delta's out, too
    rt_attn_bwd_params backward; // the delta's dout, dlse and delta, too
    rt_run runs[RUNS];
} attn_call;

// ---- fields ------------------------------------------------------------------------------------------------

enum {
    NOTHING,
    BATCH,
    QUERIES,
    KEYS,
    HEADS,
    KV_HEADS,
    HEAD_DIM,
    V_HEAD_DIM,
    NUM_RUNS,
    MASK_STRIDE,
    KEY_STRIDE,
    STRIDES
};
enum { NUM_STRIDED = 8, RUN_FIELDS = STRIDES + NUM_STRIDED * 3, NUM_FIELDS = RUN_FIELDS + RUNS * 4 };

// Of q, k, v, dout, out, dq, dk, dv.
static int64_t *strides_of(attn_call *c, int i) {
    rt_attn_block *p = &c->forward.block;
    rt_attn_bwd_params *b = &c->backward;
    int64_t *const strides[NUM_STRIDED] = {p->q_stride,           p->k_stride,  p->v_stride,  b->dout_stride,
                                           c->forward.out_stride, b->dq_stride, b->dk_stride, b->dv_stride};
    return strides[i];
}

static int64_t *field_of(attn_call *c, int i) {
    rt_attn_block *p = &c->forward.block;
    int64_t *const fields[] = {NULL,
                               &p->batch,
                               &p->num_queries,
                               &p->num_keys,
                               &p->num_heads,
                               &p->num_kv_heads,
                               &p->head_dim,
                               &p->v_head_dim,
                               &p->num_k_runs,
                               &p->mask_batch_stride,
                               &p->key_mask_batch_stride};
    if (i < STRIDES) return fields[i];
    if (i < RUN_FIELDS) return &strides_of(c, (i - STRIDES) / 3)[(i - STRIDES) % 3];
    return field_of_run(&c->runs[(i - RUN_FIELDS) / 4], (i - RUN_FIELDS) % 4);
}

// Calls that once overflowed or divided by zero: fields of a valid problem, and their values.
typedef struct found {
    pass pass;
    struct {
        int field;
        int64_t value;
    } set[4];
    int64_t num_workers;
} found;

static const found corpus[] = {
    // batch * heads * queries wraps to 0: no tile, and a division by the size of one
    {FORWARD, {{BATCH, 1LL << 32}, {QUERIES, 1LL << 32}}, 1},
    {BACKWARD, {{BATCH, 1LL << 32}, {QUERIES, 1LL << 32}}, 1},
    {FORWARD, {{QUERIES, INT64_MAX}}, 1},
    {BACKWARD, {{QUERIES, INT64_MAX}, {KEYS, INT64_MAX}}, 1},
    {FORWARD, {{HEADS, INT64_MAX - 1}, {KV_HEADS, 1}}, 1},
    {BACKWARD, {{HEADS, 1LL << 62}, {KV_HEADS, 1LL << 62}, {KEYS, 0}, {NUM_RUNS, 0}}, 1},
    {DELTA_PASS, {{HEADS, 1LL << 62}, {BATCH, 0}}, 1},
    {DELTA_PASS, {{QUERIES, 1LL << 61}, {BATCH, 8}}, 1},
    // strides of an output whose reach wraps to something small
    {FORWARD, {{STRIDES + 4 * 3, 1LL << 62}, {BATCH, 5}}, 1},
    {BACKWARD, {{STRIDES + 5 * 3 + 1, INT64_MAX}}, 1},
    {FORWARD, {{STRIDES, INT64_MIN}}, 1},
    {FORWARD, {{MASK_STRIDE, INT64_MAX}}, 1},
    // workers times scratch
    {FORWARD, {{BATCH, 1}}, INT64_MAX},
    {BACKWARD, {{BATCH, 1}}, INT64_MAX / 64},
};

// ---- drawing -----------------------------------------------------------------------------------------------

static void draw_valid(attn_call *c, uint64_t *state) {
    rt_attn_block *p = &c->forward.block;
    *c = (attn_call){.pass = (pass)random_int(state, FORWARD, DELTA_PASS)};
    p->dtype = all_dtypes[random_int(state, 0, NUM_DTYPES - 1)];
    p->batch = random_int(state, 0, 5) ? random_int(state, 1, 2) : 0;
    p->num_queries = random_int(state, 0, 9) ? random_int(state, 1, 12) : 0;
    p->num_kv_heads = random_int(state, 1, 2);
    p->num_heads = p->num_kv_heads * random_int(state, 1, 3);
    p->head_dim = random_int(state, 0, 9) ? random_int(state, 1, 20) : random_int(state, 1, RT_MAX_HEAD_DIM);
    p->v_head_dim = random_int(state, 0, 9) ? random_int(state, 1, 20) : random_int(state, 1, RT_MAX_HEAD_DIM);
    p->scale = random_unit(state) / sqrt((double)p->head_dim);
    p->softcap = random_int(state, 0, 2) ? 0 : 3;
    c->forward.fresh = random_int(state, 0, 1);
    p->lse_f64 = random_int(state, 0, 1);
    p->dropout = random_int(state, 0, 2) ? 0 : 0.5 + 0.4 * random_unit(state);
    p->seed = (uint32_t)random_bits(state), p->step = (uint32_t)random_bits(state);
    p->stream = (uint32_t)random_bits(state);
    p->num_k_runs = random_int(state, 0, RUNS);
    int64_t position = random_int(state, 0, 3);
    for (int r = 0; r < p->num_k_runs; r++) {
        c->runs[r] = (rt_run){position, random_int(state, 1, 3), p->num_keys, random_int(state, 1, 6)};
        position += c->runs[r].length * c->runs[r].stride;
        p->num_keys += c->runs[r].length;
    }
    if (!c->forward.fresh && random_int(state, 0, 3) == 0) p->num_keys += random_int(state, 0, 2);
    p->mask_batch_stride = random_int(state, 0, 1) ? p->num_queries : 0;
    p->key_mask_batch_stride = random_int(state, 0, 1) ? p->num_keys : 0;
    for (int i = 0; i < NUM_STRIDED; i++) {
        const bool of_keys = i == 1 || i == 2 || i > 5, of_values = i == 2 || i == 3 || i == 4 || i == 7;
        const int64_t sizes[] = {p->batch, of_keys ? p->num_keys : p->num_queries,
                                 of_keys ? p->num_kv_heads : p->num_heads, of_values ? p->v_head_dim : p->head_dim};
        random_row_strides(state, 4, sizes, strides_of(c, i));
        if (i < 4 && random_int(state, 0, 9) == 0) strides_of(c, i)[random_int(state, 0, 2)] = 0; // expanded
    }
}

static bool is_forbidden(const attn_call *c, bool two_sides, verdict *of_runs) {
    const rt_attn_block *p = &c->forward.block;
    if ((int)p->dtype < 0 || p->dtype > RT_F16) return true;
    if (p->num_heads < 1 || p->v_head_dim < 1 || p->v_head_dim > RT_MAX_HEAD_DIM) return true;
    if (c->pass == DELTA_PASS) return false;
    if (p->num_kv_heads < 1 || p->num_heads % p->num_kv_heads != 0) return true;
    if (p->head_dim < 1 || p->head_dim > RT_MAX_HEAD_DIM || p->num_k_runs < 0) return true;
    if (!is_real(p->dtype, p->scale) || !is_softcap(p->dtype, p->softcap)) return true;
    if (!(p->dropout >= 0 && p->dropout <= 1)) return true;
    if (p->mask_batch_stride != 0 && p->mask_batch_stride != p->num_queries) return true;
    if (two_sides && p->key_mask_batch_stride != 0 && p->key_mask_batch_stride != p->num_keys) return true;
    *of_runs = judge_runs(c->runs, p->num_k_runs, p->num_keys, INT64_MAX, true);
    int64_t num_keys = 0;
    for (int64_t r = 0; *of_runs == VALID && r < p->num_k_runs; r++) num_keys += c->runs[r].length;
    return *of_runs == FORBIDDEN ||
           (*of_runs == VALID && c->pass == BACKWARD && c->forward.fresh && num_keys != p->num_keys);
}

// ---- calling -----------------------------------------------------------------------------------------------

static rt_status call_attn(void *call, const arrays *all, rt_parallel parallel) {
    attn_call c = *(const attn_call *)call;
    rt_attn_fwd_params *f = all->no_params ? NULL : &c.forward;
    rt_attn_bwd_params *b = all->no_params ? NULL : &c.backward;
    rt_attn_block *p = &c.forward.block;
    if (c.pass == DELTA_PASS) {
        rt_attn_delta_params delta = {p->dtype, p->batch, p->num_queries, p->num_heads, p->v_head_dim, {0}, {0}};
        memcpy(delta.dout_stride, c.backward.dout_stride, sizeof(delta.dout_stride));
        memcpy(delta.out_stride, c.forward.out_stride, sizeof(delta.out_stride));
        return rt_attn_delta(all->no_params ? NULL : &delta, c.backward.dout, c.forward.out, c.backward.lse,
                             (void *)(uintptr_t)c.backward.delta, parallel);
    }
    p->workspace_bytes = c.pass == FORWARD ? rt_attn_fwd_workspace_bytes(p, workers_of(parallel))
                                           : rt_attn_bwd_workspace_bytes(p, workers_of(parallel));
    void *const workspace = p->workspace = give_workspace(&p->workspace_bytes, all);
    c.backward.block = *p, c.backward.fresh = c.forward.fresh;
    const rt_status status = c.pass == FORWARD ? rt_attn_fwd(f, parallel) : rt_attn_bwd(b, parallel);
    free(workspace);
    return status;
}

// Bounds and positions near 0..20, or any bits.
static void fill_places(arrays *all, int64_t first, int64_t last, uint64_t *state) {
    const bool fair = random_int(state, 0, 9) > 0;
    for (int64_t i = first; i < last && fair; i++)
        for (int64_t j = 0; j < (int64_t)all->x[i].num_bytes / all->x[i].element_bytes; j++) {
            const int64_t place = random_int(state, -2, 20);
            if (all->x[i].element_bytes == 8)
                ((int64_t *)(void *)all->x[i].memory)[j] = place;
            else
                ((int32_t *)(void *)all->x[i].memory)[j] = (int32_t)place;
        }
}

static void trial(uint64_t *state, int64_t entry) {
    attn_call c;
    rt_attn_fwd_params *f = &c.forward;
    rt_attn_block *p = &f->block;
    rt_attn_bwd_params *b = &c.backward;
    draw_valid(&c, state);
    rt_parallel parallel = {.run = random_int(state, 0, 1) ? run_in_turn : NULL,
                            .num_workers = random_int(state, 0, 3)};
    const int64_t existing = p->num_k_runs;
    arrays all = no_arrays();
    verdict expected = UNKNOWN, of_runs = VALID;
    if (entry >= 0) {
        const found *of = &corpus[entry];
        c.pass = of->pass, parallel.run = run_in_turn, parallel.num_workers = of->num_workers;
        for (int i = 0; i < 4; i++)
            if (of->set[i].field != NOTHING) *field_of(&c, of->set[i].field) = of->set[i].value;
    } else {
        int64_t *fields[NUM_FIELDS];
        double *const reals[] = {&p->scale, &p->softcap, &p->dropout};
        for (int i = 1; i < NUM_FIELDS; i++) fields[i - 1] = field_of(&c, i);
        expected = spoil(state, &all, &p->dtype, fields, NUM_FIELDS - 1, reals, 3, &parallel);
    }
    if (p->num_k_runs > existing) p->num_k_runs = existing;
    p->k_runs = c.runs;
    const bool backward = c.pass == BACKWARD, of_delta = c.pass == DELTA_PASS, two_sides = random_int(state, 0, 1);
    const bool rounds = (!backward || f->fresh) && random_int(state, 0, 1);
    const rt_dtype dtype = p->dtype, sums = dtype == RT_F64 ? RT_F64 : RT_F32;
    const int64_t B = p->batch, N = p->num_queries, K = p->num_keys, H = p->num_heads, G = p->num_kv_heads;
    const int64_t q[] = {B, N, H, p->head_dim}, k[] = {B, K, G, p->head_dim}, v[] = {B, K, G, p->v_head_dim};
    const int64_t out[] = {B, N, H, p->v_head_dim}, row[] = {B, H, N}, mask[] = {B, N}, key_mask[] = {B, K};
    if (c.pass != FORWARD) add(&all, false, dtype, &b->dout, 4, out, b->dout_stride);
    all.optional[all.count] = c.pass == FORWARD && f->fresh && rounds; // then rounded_out is enough
    if (!backward) add(&all, !of_delta, of_delta ? dtype : sums, &f->out, 4, out, f->out_stride);
    all.optional[all.count] = of_delta;
    const void *lse = c.pass == FORWARD ? (const void *)&f->lse : &b->lse; // the delta's dlse, too
    add(&all, c.pass == FORWARD, of_delta || p->lse_f64 ? RT_F64 : sums, lse, 3, row, NULL);
    if (c.pass != FORWARD) add(&all, of_delta, sums, &b->delta, 3, row, NULL);
    const int64_t first = all.count;
    if (!of_delta) {
        add(&all, false, RT_F32, &p->begin, 2, mask, &p->mask_batch_stride);
        add(&all, false, RT_F32, &p->end, 2, mask, &p->mask_batch_stride);
        if (two_sides) add(&all, false, RT_F32, &p->key_begin, 2, key_mask, &p->key_mask_batch_stride);
        if (two_sides) add(&all, false, RT_F32, &p->key_end, 2, key_mask, &p->key_mask_batch_stride);
        if (two_sides || p->dropout > 0) add(&all, false, RT_F64, &p->q_positions, 1, &N, NULL); // of 8 bytes, too
    }
    const int64_t last = all.count;
    if (!of_delta) {
        if (p->dropout > 0) add(&all, false, RT_F64, &p->dropout_rows, 1, &B, NULL); // any bits
        add(&all, false, dtype, &p->q, 4, q, p->q_stride), add(&all, false, dtype, &p->k, 4, k, p->k_stride);
        add(&all, false, dtype, &p->v, 4, v, p->v_stride);
    }
    if (backward) {
        add(&all, true, sums, &b->dq, 4, q, b->dq_stride), add(&all, true, sums, &b->dk, 4, k, b->dk_stride);
        add(&all, true, sums, &b->dv, 4, v, b->dv_stride);
        if (rounds)
            add(&all, true, dtype, &b->rounded_dk, 4, k, NULL), add(&all, true, dtype, &b->rounded_dv, 4, v, NULL);
    } else if (rounds && !of_delta) {
        add_optional(&all, true, dtype, &f->rounded_out, 4, out);
    }
    if (all.small_workspace && !of_delta) expected = FORBIDDEN;
    const bool forbidden = is_forbidden(&c, two_sides, &of_runs);
    if (of_runs == UNKNOWN) expected = worse(expected, IMPOSSIBLE); // billions of keys
    if (!make(&all, state, forbidden, &expected)) return;
    fill_places(&all, first, last, state);
    static const char *const functions[] = {"rt_attn_fwd", "rt_attn_bwd", "rt_attn_delta"};
    try_call(state, functions[c.pass], &all, &c, call_attn, expected, parallel);
}

int main(int argc, char **argv) { return fuzz_main(argc, argv, 4000, sizeof(corpus) / sizeof(corpus[0]), trial); }
