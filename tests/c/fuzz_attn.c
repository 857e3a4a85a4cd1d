// Attention: forward, backward, delta and the sizes of their workspaces.
#include "attn_reference.h"
#include "fuzz.h"

enum {
    RUNS = 4,
    Q = 0,
    K,
    V,
    DOUT,
    OUT,
    LSE,
    DELTA,
    DQ,
    DK,
    DV,
    BEGIN,
    END,
    KEY_BEGIN,
    KEY_END,
    POSITIONS,
    ROWS,
    ROUNDED,
    NUM_BLOCKS = ROUNDED + 3
};
static const int rounded_from[3] = {OUT, DK, DV}; // of the blocks from ROUNDED on
typedef enum pass { FORWARD, BACKWARD, DELTA_PASS } pass;

typedef struct problem {
    pass pass;
    rt_attn_params p;
    rt_parallel parallel;
    rt_run runs[RUNS];
    int64_t num_runs; // that exist
    block x[NUM_BLOCKS];
    bool rounds, two_sides, valid, no_params;
} problem;

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
enum { RUN_FIELDS = STRIDES + 8 * 3, NUM_FIELDS = RUN_FIELDS + RUNS * 4 };

static int64_t *strides_of(rt_attn_params *p, int array) {
    int64_t *const strides[] = {[Q] = p->q_stride,       [K] = p->k_stride,     [V] = p->v_stride,
                                [DOUT] = p->dout_stride, [OUT] = p->out_stride, [DQ] = p->dq_stride,
                                [DK] = p->dk_stride,     [DV] = p->dv_stride};
    return strides[array];
}

static int64_t *field_of(problem *c, int i) {
    static const int strided[] = {Q, K, V, DOUT, OUT, DQ, DK, DV};
    rt_attn_params *p = &c->p;
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
    if (i < RUN_FIELDS) return &strides_of(p, strided[(i - STRIDES) / 3])[(i - STRIDES) % 3];
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

static void draw_valid(problem *c, uint64_t *state) {
    rt_attn_params *p = &c->p;
    *c = (problem){.pass = (pass)random_int(state, FORWARD, DELTA_PASS), .valid = true};
    p->dtype = all_dtypes[random_int(state, 0, NUM_DTYPES - 1)];
    p->batch = random_int(state, 0, 5) ? random_int(state, 1, 2) : 0;
    p->num_queries = random_int(state, 0, 9) ? random_int(state, 1, 12) : 0;
    p->num_kv_heads = random_int(state, 1, 2);
    p->num_heads = p->num_kv_heads * random_int(state, 1, 3);
    p->head_dim = random_int(state, 0, 9) ? random_int(state, 1, 20) : random_int(state, 1, RT_MAX_HEAD_DIM);
    p->v_head_dim = random_int(state, 0, 9) ? random_int(state, 1, 20) : random_int(state, 1, RT_MAX_HEAD_DIM);
    p->scale = random_unit(state) / sqrt((double)p->head_dim);
    p->softcap = random_int(state, 0, 2) ? 0 : 3;
    p->fresh = random_int(state, 0, 1);
    c->rounds = (c->pass == FORWARD || p->fresh) && random_int(state, 0, 1);
    p->lse_f64 = random_int(state, 0, 1);
    p->dropout = random_int(state, 0, 2) ? 0 : 0.5 + 0.4 * random_unit(state);
    p->seed = (uint32_t)random_bits(state), p->step = (uint32_t)random_bits(state);
    p->stream = (uint32_t)random_bits(state);
    c->num_runs = p->num_k_runs = random_int(state, 0, RUNS);
    int64_t position = random_int(state, 0, 3);
    for (int r = 0; r < p->num_k_runs; r++) {
        c->runs[r] = (rt_run){position, random_int(state, 1, 3), p->num_keys, random_int(state, 1, 6)};
        position += c->runs[r].length * c->runs[r].stride;
        p->num_keys += c->runs[r].length;
    }
    if (!p->fresh && random_int(state, 0, 3) == 0) p->num_keys += random_int(state, 0, 2);
    p->mask_batch_stride = random_int(state, 0, 1) ? p->num_queries : 0;
    c->two_sides = random_int(state, 0, 1);
    p->key_mask_batch_stride = random_int(state, 0, 1) ? p->num_keys : 0;
    c->parallel =
        (rt_parallel){.run = random_int(state, 0, 1) ? run_in_turn : NULL, .num_workers = random_int(state, 0, 3)};
    const int64_t q[] = {p->batch, p->num_queries, p->num_heads, p->head_dim},
                  k[] = {p->batch, p->num_keys, p->num_kv_heads, p->head_dim};
    for (int i = 0; i < BEGIN; i++) {
        if (i == LSE || i == DELTA) continue;
        const bool of_keys = i == K || i == V || i == DK || i == DV, of_values = i != Q && i != K && i != DQ && i != DK;
        int64_t sizes[4];
        memcpy(sizes, of_keys ? k : q, sizeof(sizes));
        if (of_values) sizes[3] = p->v_head_dim;
        random_row_strides(state, 4, sizes, strides_of(p, i));
        if (i < OUT && random_int(state, 0, 9) == 0) strides_of(p, i)[random_int(state, 0, 2)] = 0; // expanded
    }
}

// Breaks up to three things.
static void spoil_problem(problem *c, uint64_t *state) {
    for (int64_t times = random_int(state, 0, 3); times > 0; times--) {
        c->valid = false;
        const int64_t kind = random_int(state, 0, 20);
        if (kind == 0) c->p.dtype = (rt_dtype)random_int(state, -1, 5);
        if (kind == 1) c->p.scale = hostile_real(state);
        if (kind == 2) c->p.softcap = hostile_real(state);
        if (kind == 3) c->x[random_int(state, 0, ROUNDED - 1)].is_null = true;
        if (kind == 4) c->x[random_int(state, 0, NUM_BLOCKS - 1)].is_skewed = true;
        if (kind == 5) c->parallel = random_workers(state);
        if (kind == 6) c->no_params = random_int(state, 0, 4) == 0;
        if (kind == 7) c->p.fresh = !c->p.fresh;
        if (kind == 20) c->p.dropout = hostile_real(state);
        if (kind < 8 || kind == 20) continue;
        int64_t *field = field_of(c, (int)random_int(state, 1, kind < 14 ? STRIDES - 1 : NUM_FIELDS - 1));
        *field = hostile(state, *field);
    }
}

// The arrays that the params describe.
static void draw_blocks(problem *c) {
    rt_attn_params *p = &c->p;
    const int64_t bytes = (int64_t)dtype_bytes(p->dtype), state_bytes = p->dtype == RT_F64 ? 8 : 4;
    for (int i = 0; i < NUM_BLOCKS; i++) {
        block *x = &c->x[i];
        const bool of_keys = i == K || i == V || i == DK || i == DV || i == KEY_BEGIN || i == KEY_END;
        x->ndim = 4;
        x->sizes[0] = p->batch, x->sizes[1] = of_keys ? p->num_keys : p->num_queries;
        x->sizes[2] = of_keys ? p->num_kv_heads : p->num_heads;
        x->sizes[3] = i == Q || i == K || i == DQ || i == DK ? p->head_dim : p->v_head_dim;
        x->element_bytes = i < OUT ? bytes : state_bytes;
        x->is_output = i == OUT || i >= DQ;
        x->strides[3] = 1;
        if (i == LSE || i == DELTA || i >= BEGIN) { // the judge refuses strides that wrap here by the number alone
            const bool number = i < BEGIN;
            x->sizes[3] = 1, x->sizes[2] = number ? p->num_heads : 1;
            x->strides[0] =
                number ? (int64_t)((uint64_t)p->num_heads * (uint64_t)p->num_queries) : p->mask_batch_stride;
            if (i == KEY_BEGIN || i == KEY_END) x->strides[0] = p->key_mask_batch_stride;
            x->strides[1] = 1, x->strides[2] = p->num_queries;
            x->is_output = false;
        } else {
            memcpy(x->strides, strides_of(p, i), 3 * sizeof(int64_t));
        }
        if (i == LSE && p->lse_f64) x->element_bytes = 8;
        if (i == LSE && c->pass == DELTA_PASS) x->element_bytes = 8; // dlse
        if (i == OUT && c->pass == DELTA_PASS) x->element_bytes = bytes, x->is_output = false;
        if (i >= BEGIN) x->element_bytes = 4;
        if (i >= ROUNDED) { // as what is rounded, but contiguous and of the dtype
            memcpy(x->sizes, c->x[rounded_from[i - ROUNDED]].sizes, sizeof(x->sizes));
            x->element_bytes = bytes, x->is_output = true;
            for (int d = 2; d >= 0; d--)
                x->strides[d] = (int64_t)((uint64_t)x->strides[d + 1] * (uint64_t)x->sizes[d + 1]);
            continue;
        }
        if (i < POSITIONS) continue;
        x->element_bytes = 8;
        x->sizes[0] = i == ROWS ? p->batch : 1, x->sizes[1] = i == ROWS ? 1 : p->num_queries;
        x->strides[0] = 1;
    }
}

// ---- judging -----------------------------------------------------------------------------------------------

static bool is_used(const problem *c, int i) {
    const pass pass = c->pass;
    if (i >= ROUNDED) return c->rounds && pass == (i == ROUNDED ? FORWARD : BACKWARD);
    if (i == POSITIONS) return pass != DELTA_PASS && (c->p.dropout > 0 || c->two_sides);
    if (i >= POSITIONS) return pass != DELTA_PASS && c->p.dropout > 0;
    if (i >= KEY_BEGIN) return pass != DELTA_PASS && c->two_sides;
    if (pass == DELTA_PASS) return i == DOUT || i == OUT || i == LSE || i == DELTA;
    const bool backward = i == DOUT || i == DELTA || i == DQ || i == DK || i == DV;
    return backward ? pass == BACKWARD : i != OUT || pass == FORWARD;
}

static verdict judge_problem(const problem *c) {
    const rt_attn_params *p = &c->p;
    verdict result = c->valid ? VALID : UNKNOWN;
    if (c->no_params || (int)p->dtype < 0 || p->dtype > RT_F16) return FORBIDDEN;
    if (p->num_heads < 1 || p->v_head_dim < 1 || p->v_head_dim > RT_MAX_HEAD_DIM) return FORBIDDEN;
    for (int i = 0; i < NUM_BLOCKS; i++)
        if (is_used(c, i)) {
            const verdict of_block = judge_block(&c->x[i]);
            result = worse(result, of_block == UNKNOWN ? result : of_block);
        }
    if (c->pass == DELTA_PASS) return result;
    if (p->num_kv_heads < 1 || p->num_heads % p->num_kv_heads != 0) return FORBIDDEN;
    if (p->head_dim < 1 || p->head_dim > RT_MAX_HEAD_DIM || p->num_k_runs < 0) return FORBIDDEN;
    if (!is_real(p->dtype, p->scale) || !is_softcap(p->dtype, p->softcap)) return FORBIDDEN;
    if (!(p->dropout >= 0 && p->dropout <= 1)) return FORBIDDEN;
    if (p->mask_batch_stride != 0 && p->mask_batch_stride != p->num_queries) return FORBIDDEN;
    if (c->two_sides && p->key_mask_batch_stride != 0 && p->key_mask_batch_stride != p->num_keys) return FORBIDDEN;
    if (p->num_k_runs > c->num_runs) return IMPOSSIBLE;
    const verdict of_runs = judge_runs(c->runs, p->num_k_runs, p->num_keys, INT64_MAX, true);
    if (of_runs == UNKNOWN) return result == FORBIDDEN ? FORBIDDEN : IMPOSSIBLE; // billions of keys
    int64_t num_keys = 0;
    for (int64_t r = 0; of_runs == VALID && r < p->num_k_runs; r++) num_keys += c->runs[r].length;
    if (c->pass == BACKWARD && p->fresh && num_keys != p->num_keys) return FORBIDDEN;
    if (c->pass == BACKWARD && c->rounds && !p->fresh) return FORBIDDEN;
    return worse(result, of_runs);
}

static void bind(rt_attn_params *p, const block *x, const rt_run *runs) {
    p->q = x[Q].data, p->k = x[K].data, p->v = x[V].data, p->dout = x[DOUT].data, p->out = x[OUT].data;
    p->lse = x[LSE].data, p->delta = x[DELTA].data;
    p->dq = x[DQ].data, p->dk = x[DK].data, p->dv = x[DV].data;
    p->begin = (const int32_t *)(const void *)x[BEGIN].data, p->end = (const int32_t *)(const void *)x[END].data;
    p->key_begin = (const int32_t *)(const void *)x[KEY_BEGIN].data;
    p->key_end = (const int32_t *)(const void *)x[KEY_END].data;
    p->q_positions = (const int64_t *)(const void *)x[POSITIONS].data,
    p->dropout_rows = (const int64_t *)(const void *)x[ROWS].data;
    p->rounded_out = x[ROUNDED].data, p->rounded_dk = x[ROUNDED + 1].data, p->rounded_dv = x[ROUNDED + 2].data;
    p->k_runs = runs;
}

static rt_attn_delta_params delta_params(const rt_attn_params *p) {
    rt_attn_delta_params delta = {p->dtype, p->batch, p->num_queries, p->num_heads, p->v_head_dim, {0}, {0}};
    memcpy(delta.dout_stride, p->dout_stride, sizeof(delta.dout_stride));
    memcpy(delta.out_stride, p->out_stride, sizeof(delta.out_stride));
    return delta;
}

// ---- calling -----------------------------------------------------------------------------------------------

enum { MOST_WORKSPACE = 1 << 25 };
static char *workspace;

static rt_status call(problem *c, verdict *expected) {
    rt_attn_params *p = &c->p;
    const rt_attn_params *given = c->no_params ? NULL : p;
    if (c->pass == DELTA_PASS) {
        rt_attn_delta_params delta = delta_params(p);
        return rt_attn_delta(c->no_params ? NULL : &delta, c->x[DOUT].data, c->x[OUT].data,
                             (const double *)(const void *)c->x[LSE].data, c->x[DELTA].data, c->parallel);
    }
    const int64_t num_workers = c->parallel.run == NULL || c->parallel.num_workers < 1 ? 1 : c->parallel.num_workers;
    p->workspace_bytes = c->pass == FORWARD ? rt_attn_fwd_workspace_bytes(given, num_workers)
                                            : rt_attn_bwd_workspace_bytes(given, num_workers);
    p->workspace = workspace;
    if (p->workspace_bytes > MOST_WORKSPACE) p->workspace_bytes = MOST_WORKSPACE, *expected = FORBIDDEN;
    return c->pass == FORWARD ? rt_attn_fwd(given, c->parallel) : rt_attn_bwd(given, c->parallel);
}

static void trial(uint64_t *state, int64_t entry) {
    problem c;
    draw_valid(&c, state);
    if (entry >= 0) {
        const found *f = &corpus[entry];
        c.pass = f->pass, c.valid = false;
        c.parallel.run = run_in_turn, c.parallel.num_workers = f->num_workers;
        for (int i = 0; i < 4; i++)
            if (f->set[i].field != NOTHING) *field_of(&c, f->set[i].field) = f->set[i].value;
    } else {
        spoil_problem(&c, state);
    }
    if (c.x[KEY_BEGIN].is_null && c.x[KEY_END].is_null) c.two_sides = false;
    const bool is_dtype = (int)c.p.dtype >= 0 && c.p.dtype <= RT_F16;
    draw_blocks(&c);
    verdict expected = judge_problem(&c);
    if (expected == IMPOSSIBLE) {
        num_skipped++;
        return;
    }
    const rt_dtype sums = c.p.dtype == RT_F64 ? RT_F64 : RT_F32;
    const bool fair = random_int(state, 0, 9) > 0; // else the arrays hold any bits
    block copies[NUM_BLOCKS];
    for (int i = 0; i < NUM_BLOCKS; i++) {
        if (!is_used(&c, i)) c.x[i].is_null = true;
        make_block(&c.x[i], state);
        const bool is_mask = i >= BEGIN && i <= KEY_END, is_place = i == POSITIONS || i == ROWS,
                   of_dlse = i == LSE && c.pass == DELTA_PASS;
        const rt_dtype dtype = i < OUT || i >= ROUNDED || (i == OUT && c.pass == DELTA_PASS) ? c.p.dtype
                               : i == LSE && (c.p.lse_f64 || of_dlse)                        ? RT_F64
                                                                                             : sums;
        const bool ignored = c.p.fresh && (c.pass == FORWARD ? i == OUT || i == LSE : i == DK || i == DV);
        if (is_dtype && fair && !is_mask && !is_place && !(ignored && c.pass != DELTA_PASS))
            fill_units(&c.x[i], dtype, state);
        for (int64_t j = 0; is_mask && fair && j < (int64_t)c.x[i].num_bytes / 4; j++)
            ((int32_t *)(void *)c.x[i].memory)[j] = (int32_t)random_int(state, -2, 20);
        for (int64_t j = 0; i == POSITIONS && fair && j < (int64_t)c.x[i].num_bytes / 8; j++)
            ((int64_t *)(void *)c.x[i].memory)[j] = random_int(state, -2, 20);
        copies[i] = copy_of(&c.x[i]);
    }
    if (random_int(state, 0, 19) == 0 && expected != FORBIDDEN) {
        static const int outputs[][3] = {{OUT, LSE, OUT}, {DQ, DK, DV}, {DELTA, DELTA, DELTA}};
        const int output = outputs[c.pass][random_int(state, 0, 2)];
        if (alias(c.x, output, random_int(state, 0, NUM_BLOCKS - 1))) expected = FORBIDDEN;
    }
    bind(&c.p, c.x, c.runs);
    static const char *const functions[] = {"rt_attn_fwd", "rt_attn_bwd", "rt_attn_delta"};
    const char *function = functions[c.pass];
    const rt_status status = call(&c, &expected);
    const bool ordinary =
        fair && fabs(c.p.scale) * (double)c.p.head_dim <= 16 && (c.p.softcap == 0 || c.p.softcap >= 1);
    // test_attn_delta.c has the numbers of the delta.
    if (judge(function, expected, status) && ordinary && c.pass != DELTA_PASS) {
        rt_attn_params want = c.p;
        bind(&want, copies, c.runs);
        if ((c.pass == FORWARD ? rt_attn_fwd_reference(&want) : rt_attn_bwd_reference(&want)) != RT_OK)
            wrong(function, "was refused by the reference");
        rt_isa isa = RT_ISA_GENERIC;
        rt_cpu_isa(&isa);
        const bool in_tiles = isa == RT_ISA_AMX_BF16 && c.p.dtype == RT_BF16; // P and dS are rounded to bf16
        for (int i = OUT; i < BEGIN; i++)
            compare(function, i == LSE && c.p.lse_f64 ? RT_F64 : sums, &c.x[i], &copies[i], in_tiles ? 0.25 : 1e-3);
    }
    for (int i = 0; i < NUM_BLOCKS; i++) free(c.x[i].memory), free(copies[i].memory);
}

int main(int argc, char **argv) {
    workspace = aligned_alloc(64, MOST_WORKSPACE);
    if (workspace == NULL) return 1;
    return fuzz_main(argc, argv, 4000, sizeof(corpus) / sizeof(corpus[0]), trial);
}
