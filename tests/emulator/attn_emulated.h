// Attention problems for the CUDA kernels on the emulator, and their error bounds against the f64 reference.
//
// The bounds are those of tests/c/attn_bounds.h with u = 2^-23 (one rounding there is an ex2_approx_ftz here, which
// is off by 2 ulp). 16-bit kernels add the rounding of weights and of dS to the dtype: relative 2^-8 or 2^-11, and
// for f16 an absolute 2^-25 below its normal numbers. tanh_approx adds 2^-21 to tanh(x), hence softcap * 2^-21 to a
// score.
#ifndef RINGTILE_TESTS_ATTN_EMULATED_H
#define RINGTILE_TESTS_ATTN_EMULATED_H

#include "../../cuda/ringtile_cuda.h"
#include "../c/attn_check.h"

void emulator_lend(const void *begin, int64_t num_bytes, bool writable);
void emulator_take_back_all(void);
int64_t emulator_reads(const void *begin); // of the last call: loads from a lent array
void emulator_run_concurrently(int num_ctas, uint32_t seed);
int64_t emulator_ctas(void);                          // that have started
int64_t emulator_bank_conflicts(const char *prefix);  // of kernels that files of this name launch
void emulator_count_banks(bool on);                   // of loads and stores; always of ldmatrix
void emulator_set_compute_capability(int capability); // 80 until the first call
void emulator_set_num_multiprocessors(int number);    // 132 until the first call
int64_t emulator_group_products(void);                // of warp groups: only sm_90a kernels have any

static inline bool all_tests(void) {
    const char *const tests = getenv("RINGTILE_TESTS");
    return tests != NULL && strcmp(tests, "all") == 0;
}

// Lends all arrays, but of k and v only the rows [first_key, last_key).
static inline void lend_case(const attn_case *c, int64_t first_key, int64_t last_key) {
    emulator_take_back_all();
    for (int i = 0; i < NUM_ARRAYS; i++) {
        const tensor *x = &c->x[i];
        if (x->data == NULL) continue; // out, where a forward rounds
        const int64_t bytes = (int64_t)dtype_bytes(x->dtype);
        const bool part = (i == K || i == V) && last_key - first_key < c->p.num_keys;
        const int64_t first = part ? first_key * x->stride[1] : 0;
        const int64_t last = part ? (last_key - 1) * x->stride[1] + x->size[3] : x->num_elements;
        emulator_lend((char *)x->data + first * bytes, (last - first) * bytes, i >= OUT);
    }
    const int64_t num_intervals = (c->p.mask_batch_stride > 0 ? c->p.batch : 1) * c->p.num_queries;
    emulator_lend(c->begin, num_intervals * (int64_t)sizeof(int32_t), false);
    emulator_lend(c->end, num_intervals * (int64_t)sizeof(int32_t), false);
    for (int i = 0; i < NUM_ARRAYS; i++)
        if (c->rounded[i] != NULL)
            emulator_lend(c->rounded[i], num_numbers(&c->x[i]) * (int64_t)dtype_bytes(c->p.dtype), true);
    const int64_t num_key_intervals = (c->p.key_mask_batch_stride > 0 ? c->p.batch : 1) * c->p.num_keys;
    if (c->key_begin != NULL) {
        emulator_lend(c->key_begin, num_key_intervals * (int64_t)sizeof(int32_t), false);
        emulator_lend(c->key_end, num_key_intervals * (int64_t)sizeof(int32_t), false);
    }
    if (c->p.dropout > 0) emulator_lend(c->dropout_rows, c->p.batch * (int64_t)sizeof(int64_t), false);
    if (c->p.dropout > 0 || c->key_begin != NULL)
        emulator_lend(c->q_positions, c->p.num_queries * (int64_t)sizeof(int64_t), false);
}

static inline bool is_16_bit(rt_dtype dtype) { return dtype == RT_BF16 || dtype == RT_F16; }

// Error of rounding a weight, or a dS, to the dtype.
static inline double rounding_of(rt_dtype dtype, double x) {
    return is_16_bit(dtype) ? unit_roundoff(dtype) * fabs(x) + (dtype == RT_F16 ? 0x1p-25 : 0) : 0;
}

// Adds the errors of rounding weights and of tanh to the bounds of out and lse.
static inline void add_forward_rounding(const attn_case *c, rt_dtype dtype, attn_case *bounds) {
    const rt_attn_block *p = &c->p;
    int64_t *rows = must_alloc((size_t)p->num_keys * sizeof(*rows));
    double *weights = must_alloc((size_t)p->num_keys * sizeof(*weights));
    for (int64_t b = 0; b < p->batch; b++)
        for (int64_t token = 0; token < p->num_queries; token++) {
            const int64_t n = attended_keys(c, b, token, rows);
            for (int64_t head = 0; n > 0 && head < p->num_heads; head++) {
                double top = -INFINITY, sum = 0, max_value = 0;
                for (int64_t j = 0; j < n; j++)
                    top = fmax(top, weights[j] = score_of(c, 0, b, token, head, rows[j]).score);
                for (int64_t j = 0; j < n; j++) sum += weights[j] = exp(weights[j] - top);
                const double cap_error = 2 * p->softcap * 0x1p-21;
                add(&bounds->x[LSE], b, token, head, 0, cap_error);
                for (int64_t d = 0; d < p->v_head_dim; d++) {
                    double error = 0;
                    max_value = fabs(get(&c->x[OUT], b, token, head, d));
                    for (int64_t j = 0; j < n; j++) {
                        const double v = fabs(get(&c->x[V], b, rows[j], head / (p->num_heads / p->num_kv_heads), d));
                        error += (rounding_of(dtype, weights[j]) + cap_error * weights[j]) / sum * v;
                        max_value = fmax(max_value, v);
                    }
                    add(&bounds->x[OUT], b, token, head, d, error + 2 * cap_error * max_value);
                }
            }
        }
    free(weights);
    free(rows);
}

static inline rt_status call_cuda(pass pass, const attn_case *c) {
    const rt_attn_fwd_params forward = forward_of(c);
    const rt_attn_bwd_params backward = backward_of(c);
    return pass == FORWARD ? rt_cuda_attn_fwd(&forward, NULL) : rt_cuda_attn_bwd(&backward, NULL);
}

// In a workspace of the exact size, which it returns.
static inline void *run_in_workspace(pass pass, attn_case c) {
    rt_attn_fwd_params forward = forward_of(&c);
    rt_attn_bwd_params backward = backward_of(&c);
    rt_attn_block *p = pass == FORWARD ? &forward.block : &backward.block;
    p->workspace_bytes =
        pass == FORWARD ? rt_cuda_attn_fwd_workspace_bytes(&forward) : rt_cuda_attn_bwd_workspace_bytes(&backward);
    p->workspace = aligned_alloc(64, (size_t)(p->workspace_bytes + 63) / 64 * 64);
    lend_case(&c, 0, p->num_keys);
    emulator_lend(p->workspace, p->workspace_bytes, true);
    emulator_count_banks(is_16_bit(p->dtype)); // the kernels for f32 have conflicts
    CHECK_STATUS(pass == FORWARD ? rt_cuda_attn_fwd(&forward, NULL) : rt_cuda_attn_bwd(&backward, NULL), RT_OK);
    return p->workspace;
}

// Splits the runs of the case over num_calls calls.
static inline void run_on_emulator(pass pass, const attn_case *c, int64_t num_calls) {
    for (int64_t call = 0; call < num_calls; call++) free(run_in_workspace(pass, part_of(c, call, num_calls)));
}

// out holds nothing valid before a row has attended a key: it must not be read.
static inline void poison_empty_rows(attn_case *c) {
    FOR_EACH_ELEMENT(&c->x[OUT], b, token, head, d)
    if (get(&c->x[LSE], b, token, head, 0) == -INFINITY) set(&c->x[OUT], b, token, head, d, NAN);
}

// What keys outside every run hold: NaN where they must not be read, and a large number where bulk copies bring what
// follows a run in memory, and weights of 0 leave it out.
static double keys_in_no_run = NAN;

static inline void poison_keys_in_no_run(attn_case *c) {
    bool *used = keys_in_runs(c);
    for (int i = K; i <= V; i++) FOR_EACH_ELEMENT(&c->x[i], b, token, head, d)
    if (!used[token]) set(&c->x[i], b, token, head, d, keys_in_no_run);
    free(used);
}

static inline void check_forward(attn_case *c, uint64_t *state, int64_t num_calls) {
    poison_keys_in_no_run(c);
    attn_case want = widen(c, state), bounds = widen(c, state);
    forward_bounds(&want, 0x1p-23, num_calls, &bounds);
    add_forward_rounding(&want, c->p.dtype, &bounds);
    poison_empty_rows(c);
    poison_fresh(c, &want, OUT, LSE);
    run_on_emulator(FORWARD, c, num_calls);
    CHECK_STATUS(run_reference(FORWARD, &want), RT_OK);
    FOR_EACH_ELEMENT(&c->x[OUT], b, token, head,
                     d) // rows that attend no key keep the poison, or become 0 if fresh
    if (get(&want.x[LSE], b, token, head, 0) == -INFINITY) {
        const double x = get(&c->x[OUT], b, token, head, d);
        CHECK(c->fresh ? x == 0 : isnan(x));
        set(&c->x[OUT], b, token, head, d, get(&want.x[OUT], b, token, head, d));
    }
    check_array(OUT, c, &want, &bounds);
    check_array(LSE, c, &want, &bounds);
    free_arrays(&want);
    free_arrays(&bounds);
}

// Adds the errors of rounding P and dS and of tanh to the bounds of dq, dk and dv.
static inline void add_backward_rounding(const attn_case *c, rt_dtype dtype, attn_case *bounds) {
    const rt_attn_block *p = &c->p;
    int64_t *rows = must_alloc((size_t)p->num_keys * sizeof(*rows));
    for (int64_t b = 0; b < p->batch; b++)
        for (int64_t token = 0; token < p->num_queries; token++) {
            const int64_t n = attended_keys(c, b, token, rows);
            for (int64_t head = 0; head < p->num_heads; head++)
                for (int64_t j = 0; j < n; j++) {
                    const int64_t row = rows[j], kv_head = head / (p->num_heads / p->num_kv_heads);
                    const double score = score_of(c, 0, b, token, head, row).score,
                                 weight = exp(score - get(&c->x[LSE], b, token, head, 0));
                    double dweight = -get(&c->x[DELTA], b, token, head, 0);
                    for (int64_t d = 0; d < p->v_head_dim; d++)
                        dweight += get(&c->x[DOUT], b, token, head, d) * get(&c->x[V], b, row, kv_head, d);
                    const double tanh_x = p->softcap > 0 ? score / p->softcap : 0, slope = 1 - tanh_x * tanh_x;
                    const double cap_error = p->softcap * 0x1p-21 * weight; // in the weight
                    const double slope_error = p->softcap > 0 ? 2 * 0x1p-21 * weight : 0;
                    const double weight_error = rounding_of(dtype, weight) + cap_error;
                    const double dscore_error = rounding_of(dtype, weight * slope * dweight) +
                                                fabs(dweight) * (cap_error * slope + slope_error);
                    for (int64_t d = 0; d < p->v_head_dim; d++)
                        add(&bounds->x[DV], b, row, kv_head, d,
                            weight_error * fabs(get(&c->x[DOUT], b, token, head, d)));
                    for (int64_t d = 0; d < p->head_dim; d++) {
                        add(&bounds->x[DQ], b, token, head, d,
                            dscore_error * fabs(p->scale * get(&c->x[K], b, row, kv_head, d)));
                        add(&bounds->x[DK], b, row, kv_head, d,
                            dscore_error * fabs(p->scale * get(&c->x[Q], b, token, head, d)));
                    }
                }
        }
    free(rows);
}

// Runs the backward with concurrent CTAs, then, in every third problem or in all, again with one CTA at a time: both
// must give the same bits. The number of multiprocessors decides into how many parts a group of query heads is divided.
static inline void run_backward_in_any_order(const attn_case *c, uint32_t seed, int64_t num_calls) {
    emulator_set_num_multiprocessors((const int[]){1, 4, 132}[seed % 3]);
    emulator_run_concurrently(4, seed);
    if (seed / 3 % 3 > 0 && !all_tests()) {
        run_on_emulator(BACKWARD, c, num_calls);
        emulator_run_concurrently(1, 0);
        return;
    }
    void *before[3], *concurrent[3];
    for (int i = 0; i < 3; i++) before[i] = copy_bytes(&c->x[DQ + i]);
    run_on_emulator(BACKWARD, c, num_calls);
    for (int i = 0; i < 3; i++) {
        const tensor *x = &c->x[DQ + i];
        concurrent[i] = copy_bytes(x);
        memcpy(x->data, before[i], bytes_of(x));
    }
    emulator_run_concurrently(1, 0);
    run_on_emulator(BACKWARD, c, num_calls);
    for (int i = 0; i < 3; i++) {
        CHECK(memcmp(c->x[DQ + i].data, concurrent[i], bytes_of(&c->x[DQ + i])) == 0);
        free(before[i]);
        free(concurrent[i]);
    }
}

// Takes lse and delta from the forward, and a random gradient of lse.
static inline void check_backward(attn_case *c, uint64_t *state, int64_t num_calls) {
    if (c->fresh) num_calls = 1; // one call must see every key
    for (int i = DK; i <= DV && c->fresh; i++) fill(&c->x[i], 0);
    attn_case want = widen(c, state);
    fill(&want.x[OUT], 0);
    fill(&want.x[LSE], -INFINITY);
    CHECK_STATUS(run_reference(FORWARD, &want), RT_OK);
    FOR_EACH_ELEMENT(&c->x[LSE], b, token, head, unit) {
        double delta = random_unit(state);
        for (int64_t d = 0; d < c->p.v_head_dim; d++)
            delta += get(&want.x[DOUT], b, token, head, d) * get(&want.x[OUT], b, token, head, d);
        set(&c->x[LSE], b, token, head, unit, get(&want.x[LSE], b, token, head, unit));
        set(&c->x[DELTA], b, token, head, unit, delta);
    }
    free_arrays(&want);
    want = widen(c, state);
    attn_case bounds = widen(c, state);
    backward_bounds(&want, 0x1p-23, num_calls, &bounds);
    add_backward_rounding(&want, c->p.dtype, &bounds);
    poison_fresh(c, &want, DK, DV);
    if (is_16_bit(c->p.dtype)) // semaphores order the additions to dq
        run_backward_in_any_order(c, (uint32_t)*state, num_calls);
    else
        run_on_emulator(BACKWARD, c, num_calls);
    CHECK_STATUS(run_reference(BACKWARD, &want), RT_OK);
    for (int i = DQ; i <= DV; i++) check_array((array_name)i, c, &want, &bounds);
    free_arrays(&want);
    free_arrays(&bounds);
}

// ---- problems ----------------------------------------------------------------------------------------------

typedef struct head_dims {
    int64_t head_dim, v_head_dim;
} head_dims;

// The range of a test's random problems.
typedef struct case_range {
    const head_dims *dims;
    const rt_dtype *dtypes;
    int num_dims, num_dtypes;
    int64_t max_queries, max_keys; // of every seventh problem; the others have at most half as many
    bool aligned; // all rows, dq's included, begin at multiples of 16 bytes; else only under every second mask
} case_range;

// In threes, for is_in_this_run: of each three the tile is the same, but 192 has two and 128 has four.
static const head_dims all_dims[] = {{64, 64},   {1, 3},     {40, 64},   // tile 64
                                     {96, 96},   {72, 96},   {80, 80},   // tile 96
                                     {128, 128}, {100, 17},  {128, 64},  // tile 128
                                     {192, 128}, {136, 128}, {64, 128},  // tile 192, 192, 128
                                     {256, 256}, {192, 192}, {250, 129}, // tile 256
                                     {512, 512}, {257, 64},  {80, 400}}; // plain
static const rt_dtype all_cuda_dtypes[] = {RT_BF16, RT_F16, RT_F32};     // tensor cores take the first two
enum { NUM_DIMS = sizeof(all_dims) / sizeof(all_dims[0]), NUM_ROUNDS = NUM_DIMS * NUM_MASKS };
static const head_dims sm90_dims[] = {
    {64, 64},  {128, 128}, {8, 24},    {128, 64}, {40, 64},
    {64, 128}, {96, 88},   {192, 128}, {200, 256}}; // the last two in the forward only
enum { NUM_FWD_SM90_DIMS = sizeof(sm90_dims) / sizeof(sm90_dims[0]), NUM_BWD_SM90_DIMS = NUM_FWD_SM90_DIMS - 2 };
static const case_range everything = {all_dims, all_cuda_dtypes, NUM_DIMS, 3, 140, 300, false};

// Whether all rows of an array begin at multiples of 16 bytes.
static inline bool is_aligned(const tensor *x) {
    bool aligned = true;
    for (int dim = 0; dim < 3; dim++) aligned &= x->stride[dim] * (int64_t)dtype_bytes(x->dtype) % 16 == 0;
    return aligned;
}
// Whether the kernels may copy the inputs' rows in chunks of 16 bytes.
static inline bool rows_are_aligned(const attn_case *c) {
    bool aligned = true;
    for (int i = Q; i <= DOUT; i++) aligned &= is_aligned(&c->x[i]);
    return aligned;
}

// A problem whose rows may be copied so.
static inline attn_case new_aligned_case(uint64_t *state, attn_shape shape, mask_kind mask) {
    attn_case c = new_case(state, shape, mask, 1);
    while (!rows_are_aligned(&c)) {
        free_case(&c);
        c = new_case(state, shape, mask, 1);
    }
    return c;
}

// The keys and values of two of the four kv heads fill a section (key_walk.cuh): most of them are in no run, and need
// no memory here.
static inline void check_that_heads_in_sections_agree(void) {
    const attn_shape shape = {RT_BF16, 2, 150, 140, 2, 4, 64, 64, false};
    uint64_t state = 9;
    attn_case c = new_aligned_case(&state, shape, MASK_CAUSAL);
    c.p.num_keys = (24 << 20) / (2 * (64 + 64) * 2);
    for (int i = K; i <= V; i++) { // no output lies between their rows
        tensor *const x = &c.x[i];
        void *const sparse = calloc((size_t)(c.p.num_keys * x->stride[1] + x->num_elements), 2);
        memcpy(sparse, x->data, (size_t)x->num_elements * 2);
        free(x->data);
        x->data = sparse;
        x->num_elements += 128 * x->stride[1]; // a bulk copy may bring a tile behind the last run
    }
    bind(&c);
    check_forward(&c, &state, 1);
    free_case(&c);
}

// Rounds of range->num_dims * NUM_MASKS: every head dim with every mask if RINGTILE_TESTS is "all". Otherwise a third
// of them: every dtype still meets every head dim and every mask, and every mask meets six head dims, one of each tile.
static inline bool is_in_this_run(const case_range *range, int round) {
    const int mask = round / range->num_dims, dim = round % range->num_dims;
    return all_tests() || (dim + mask) % 3 == mask / 3;
}

// The problem of a round, in any memory layout, over any runs.
static inline attn_case draw_case(uint64_t *state, const case_range *range, int round) {
    const int mask = round / range->num_dims, dim = round % range->num_dims, part = round % 7 == 0 ? 1 : 2;
    const head_dims dims = range->dims[dim];
    const attn_shape shape = {.dtype = range->dtypes[(dim + mask + dim / 3) % range->num_dtypes],
                              .batch = random_int(state, 1, 2),
                              .num_queries = random_int(state, 1, range->max_queries / part),
                              .seq_len = random_int(state, 1, range->max_keys / part),
                              .group = random_int(state, 1, 3),
                              .num_kv_heads = random_int(state, 1, 2),
                              .head_dim = dims.head_dim,
                              .v_head_dim = dims.v_head_dim};
    const bool want_aligned = range->aligned || (mask % 2 == 0 && shape.head_dim % 8 == 0 && shape.v_head_dim % 8 == 0);
    attn_case c = new_case(state, shape, (mask_kind)mask, round % 4 ? 1 : 3);
    while (want_aligned && !(rows_are_aligned(&c) && (!range->aligned || is_aligned(&c.x[DQ])))) {
        free_case(&c);
        c = new_case(state, shape, (mask_kind)mask, round % 4 ? 1 : 3);
    }
    if (random_int(state, 0, 1)) make_fresh(&c, shape.seq_len);
    if (round % 4 == 1) c.p.softcap = 1 + 20 * fabs(random_unit(state));
    if (round % 8 == 3) c.p.scale *= (double)random_int(state, -1, 0);
    if (round % 3 == 0) draw_key_mask(state, &c, shape.seq_len);
    // Which the plain kernels compute in every dtype.
    if ((round % 6 == 5 || round % 12 == 3) && !range->aligned) draw_dropout(state, &c);
    if (round % 5 == 2) { // f64 lse
        free(c.x[LSE].data);
        c.x[LSE] = new_row_numbers(RT_F64, shape.batch, shape.num_queries, c.p.num_heads);
        fill(&c.x[LSE], -INFINITY);
        c.p.lse_f64 = true;
    }
    return c;
}

// Marks the nodes of a random tree in the positions [begin, end), depth first: of each position where its root and its
// node begin, and where its node and its subtree end.
typedef struct tree_place {
    int64_t root, node, node_end, subtree_end;
} tree_place;
static inline void draw_subtree(uint64_t *state, int64_t begin, int64_t end, int64_t root, tree_place *of) {
    int64_t at = begin + random_int(state, 1, end - begin > 100 ? (end - begin) / 2 : end - begin);
    for (int64_t i = begin; i < at; i++) of[i] = (tree_place){root, begin, at, end};
    for (int64_t child; at < end; at = child) {
        child = at + random_int(state, 1, end - at);
        draw_subtree(state, at, child, root, of);
    }
}
// The mask of several trees, and of tokens that attend nothing: a query attends its ancestors, and of its own node what
// comes before it (causal) or all of it. Queries are every stride-th token.
static inline void draw_trees(uint64_t *state, attn_case *c, int64_t seq_len, bool causal) {
    rt_attn_block *p = &c->p;
    tree_place *of = must_alloc((size_t)seq_len * sizeof(*of));
    const int64_t padding = random_int(state, 0, seq_len / 8);
    for (int64_t begin = 0, end; begin < seq_len - padding; begin = end) {
        end = begin + random_int(state, (seq_len - padding - begin + 1) / 2, seq_len - padding - begin);
        draw_subtree(state, begin, end, begin, of);
    }
    for (int64_t i = seq_len - padding; i < seq_len; i++) of[i] = (tree_place){i, i, i, i};
    draw_key_mask(state, c, seq_len);
    p->mask_batch_stride = p->key_mask_batch_stride = 0;
    const int64_t stride = random_int(state, 1, seq_len / p->num_queries), rest = seq_len - stride * p->num_queries;
    const int64_t first = random_int(state, 0, rest);
    for (int64_t i = 0; i < p->num_queries; i++) {
        const int64_t x = c->q_positions[i] = first + i * stride;
        c->begin[i] = (int32_t)of[x].root, c->end[i] = (int32_t)(of[x].node_end == x ? x
                                                                 : causal            ? x + 1
                                                                                     : of[x].node_end);
    }
    for (int64_t r = 0; r < p->num_k_runs; r++)
        for (int64_t i = 0; i < c->runs[r].length; i++) {
            const int64_t x = c->runs[r].global_begin + i * c->runs[r].stride, key = c->runs[r].local_begin + i;
            c->key_begin[key] = x < seq_len ? (int32_t)(causal ? 0 : of[x].node) : 0;
            c->key_end[key] = x < seq_len ? (int32_t)of[x].subtree_end : 0;
        }
    free(of);
}

// Trees over several tiles in every direction.
static const head_dims dims_of_trees[] = {{64, 64}, {96, 96}, {128, 128}, {192, 128}, {256, 256}};
static inline void check_trees(pass pass, int num_dims, bool aligned) {
    uint64_t state = 11;
    for (int i = 0; i < 2 * num_dims; i++) {
        const int64_t length = random_int(&state, 300, 600);
        const attn_shape shape = {all_cuda_dtypes[i / 2 % 2],
                                  1 + i % 3 / 2,
                                  random_int(&state, 130, 300),
                                  length,
                                  1 + i % 3,
                                  1,
                                  dims_of_trees[i / 2].head_dim,
                                  dims_of_trees[i / 2].v_head_dim,
                                  i % 4 == 0};
        attn_case c = new_case(&state, shape, MASK_FULL, 1);
        while (aligned && !(rows_are_aligned(&c) && is_aligned(&c.x[DQ]))) {
            free_case(&c);
            c = new_case(&state, shape, MASK_FULL, 1);
        }
        draw_trees(&state, &c, length, i % 2 == 0);
        if (i % 3 > 0) make_fresh(&c, length);
        if (i % 5 == 3) c.p.softcap = 3;
        if (pass == BACKWARD)
            check_backward(&c, &state, 1 + i % 2);
        else
            check_forward(&c, &state, 1 + i % 2);
        free_case(&c);
    }
}

// The tables of a mask with two sides read each interval and each position once, and the kernels none where the second
// side leaves every pair.
static inline void check_that_full_tiles_are_not_compared(pass pass, rt_dtype dtype) {
    uint64_t state = 12;
    const attn_shape shape = {dtype, 1, 256, 512, 2, 1, 64, 64, true};
    attn_case c = new_case(&state, shape, MASK_CAUSAL, 1);
    while (!rows_are_aligned(&c) || !is_aligned(&c.x[DQ])) {
        free_case(&c);
        c = new_case(&state, shape, MASK_CAUSAL, 1);
    }
    draw_key_mask(&state, &c, 512);
    c.p.key_mask_batch_stride = 0;
    for (int64_t i = 0; i < 256; i++) c.q_positions[i] = 256 + i;
    for (int64_t i = 0; i < 512; i++) c.key_begin[i] = 256, c.key_end[i] = 512;
    fill(&c.x[LSE], pass == FORWARD ? -INFINITY : 5);
    fill(&c.x[DELTA], 0);
    run_on_emulator(pass, &c, 1);
    CHECK_INT(emulator_reads(c.key_begin), 512);
    CHECK_INT(emulator_reads(c.q_positions), 256);
    free_case(&c);
}

// Results that a call rounds, with head dims of every kernel: fresh or merged, in one call or two, from parts of a
// group or whole.
static inline void check_rounded_results(pass pass) {
    const head_dims dims[] = {{100, 17}, {64, 64}, {128, 64}, {192, 128}, {257, 64}, {96, 88}, {200, 256}};
    const mask_kind masks[] = {MASK_WINDOW, MASK_SOME_EMPTY, MASK_CAUSAL_DOCUMENTS, MASK_EMPTY, MASK_RANDOM};
    uint64_t state = 10;
    for (int i = 0; i < 7; i++) {
        const int64_t length = i == 1 ? 140 : random_int(&state, 10, 40);
        const attn_shape shape = {all_cuda_dtypes[i % 2], 1 + i / 2 % 2,      length, length + 10, 2, 1,
                                  dims[i].head_dim,       dims[i].v_head_dim, false};
        attn_case c = new_case(&state, shape, masks[i % 5], 1);
        while (i % 4 > 0 && !(rows_are_aligned(&c) && is_aligned(&c.x[DQ]) && is_aligned(&c.x[OUT]))) {
            free_case(&c);
            c = new_case(&state, shape, masks[i % 5], 1);
        }
        if (pass == BACKWARD || i % 2 == 0) make_fresh(&c, shape.seq_len);
        fill_random(&c.x[OUT], &state, 1);
        fill_random(&c.x[LSE], &state, 4);
        for (int64_t row = 0; row < c.x[LSE].num_elements && pass == FORWARD; row += 3)
            store_element(c.x[LSE].dtype, c.x[LSE].data, row, -INFINITY);
        fill_random(&c.x[DELTA], &state, 1);
        emulator_set_num_multiprocessors(i % 3 ? 132 : 1);
        check_rounding(pass, &c, pass == FORWARD ? 1 + i % 2 : 1, run_on_emulator);
        free_case(&c);
    }
}

// out and lse are written even if there are no keys, dk and dv even if there are no queries.
static inline void check_fresh_outputs_of_nothing(pass pass) {
    uint64_t state = 8;
    for (int i = 0; i < 2 * 3; i++) {
        const int64_t dim = i < 3 ? 64 : 256, num_queries = pass == FORWARD ? 70 : 0, num_keys = 70 - num_queries;
        const attn_shape shape = {all_cuda_dtypes[i % 3], 2, num_queries, num_keys, 2, 2, dim, dim, false};
        attn_case c = new_case(&state, shape, MASK_FULL, 1);
        make_fresh(&c, num_keys);
        if (pass == FORWARD)
            check_forward(&c, &state, 1);
        else
            check_backward(&c, &state, 1);
        free_case(&c);
    }
}

// Whether some query attends some key.
static inline bool any_pair(const attn_case *c) {
    int64_t *rows = must_alloc((size_t)c->p.num_keys * sizeof(*rows)), n = 0;
    for (int64_t b = 0; b < c->p.batch; b++)
        for (int64_t token = 0; token < c->p.num_queries; token++) n += attended_keys(c, b, token, rows);
    free(rows);
    return n > 0;
}

// 64 queries attend 192 of 1024 keys each, or with two sides of the mask up to 256. Of k and v only the tiles of 64 or
// 128 keys that hold attended keys may be read.
static inline void check_that_unattended_tiles_stay_unread_by(int num_sides, pass pass, rt_dtype dtype) {
    enum { KEYS = 1024, FIRST = 384, LAST = 640, DIM = 64 };
    uint64_t state = 5;
    attn_case c = new_aligned_case(&state, (attn_shape){dtype, 1, 64, KEYS, 2, 1, DIM, DIM, true}, MASK_EMPTY);
    c.p.mask_batch_stride = 0;
    for (int32_t i = 0; i < 64; i++) c.begin[i] = LAST - 255 + i, c.end[i] = LAST - 63 + i;
    if (num_sides == 2) {
        draw_key_mask(&state, &c, KEYS);
        c.p.key_mask_batch_stride = 0;
        for (int32_t i = 0; i < 64; i++) c.begin[i] = 0, c.end[i] = KEYS, c.q_positions[i] = 2000 + i;
        for (int32_t i = 0; i < KEYS; i++) { // those of other tiles end with the first query, or begin after the last
            const bool attended = i >= FIRST && i < LAST;
            c.key_begin[i] = attended ? 2000 + i % 64 : i < FIRST ? 0 : 2064;
            c.key_end[i] = attended ? 2064 : i < FIRST ? 2000 : 3000;
        }
    }
    fill(&c.x[LSE], pass == FORWARD ? -INFINITY : 5);
    fill(&c.x[DELTA], 0);
    char workspace[8192] __attribute__((aligned(64)));
    c.p.workspace = workspace, c.p.workspace_bytes = sizeof(workspace);
    lend_case(&c, FIRST, LAST);
    emulator_lend(workspace, sizeof(workspace), true);
    CHECK_STATUS(call_cuda(pass, &c), RT_OK);
    free_case(&c);
}
static inline void check_that_unattended_tiles_stay_unread(pass pass, rt_dtype dtype) {
    check_that_unattended_tiles_stay_unread_by(1, pass, dtype);
    check_that_unattended_tiles_stay_unread_by(2, pass, dtype);
}

// Where a weight is 0, so is dS: a value that is infinite reaches dq of the only query that attends its key, and dk of
// that key, and nothing else.
static inline void check_that_a_weight_of_0_silences(rt_dtype dtype) {
    enum { N = 128, DIM = 64 };
    const attn_shape shape = {dtype, 1, N, N, 1, 1, DIM, DIM, true};
    uint64_t state = 8;
    attn_case c = new_aligned_case(&state, shape, MASK_EMPTY);
    c.p.mask_batch_stride = 0, c.fresh = false;
    for (int32_t i = 0; i < N; i++) c.begin[i] = 0, c.end[i] = i == N - 1 ? N : N - 1;
    fill(&c.x[LSE], 5);
    for (int i = DELTA; i <= DV; i++) fill(&c.x[i], 0);
    for (int64_t d = 0; d < DIM; d++) set(&c.x[V], 0, N - 1, 0, d, INFINITY);
    run_on_emulator(BACKWARD, &c, 1);
    for (int i = DQ; i <= DK; i++) FOR_EACH_ELEMENT(&c.x[i], b, token, head, d)
    CHECK_INT(isfinite(get(&c.x[i], b, token, head, d)), token < N - 1);
    free_case(&c);
}

// The largest weight of a row is 1, which its dtype holds exactly: where the other values are 0, out has no error of
// 16 bits. The row's max rises late, by up to 2^8, from a score whose weights are not negligible.
static inline void check_that_the_largest_weight_is_exact(rt_dtype dtype) {
    enum { KEYS = 256, LARGEST = 200, QUERIES = 64, DIM = 64 };
    uint64_t state = 9;
    attn_case c = new_case(&state, (attn_shape){dtype, 1, QUERIES, KEYS, 1, 1, DIM, DIM, true}, MASK_FULL, 1);
    c.p.scale = 1, c.p.softcap = 0;
    for (int i = Q; i <= V; i++) fill(&c.x[i], 0);
    set(&c.x[K], 0, LARGEST, 0, 0, 2.75);
    for (int64_t d = 0; d < DIM; d++) set(&c.x[V], 0, LARGEST, 0, d, 1 + (double)d / DIM);
    for (int64_t token = 0; token < QUERIES; token++) set(&c.x[Q], 0, token, 0, 0, 1 + (double)token / QUERIES);
    make_fresh(&c, KEYS);
    run_on_emulator(FORWARD, &c, 1);
    for (int64_t token = 0; token < QUERIES; token++)
        for (int64_t d = 0; d < DIM; d++) {
            const double others = (KEYS - 1) * exp(-2.75 * (1 + (double)token / QUERIES));
            const double want = (1 + (double)d / DIM) / (1 + others);
            // A sum of KEYS terms, each off by 2 ulp, a division and a product, all in f32.
            CHECK(fabs(get(&c.x[OUT], 0, token, 0, d) - want) <= (KEYS + 8) * 0x1p-23 * want);
        }
    free_case(&c);
}

#endif // RINGTILE_TESTS_ATTN_EMULATED_H
