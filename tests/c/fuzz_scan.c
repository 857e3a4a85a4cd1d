// Recurrences and their convolution.
#include "fuzz.h"
#include "selective_reference.h"

static bool is_dtype(rt_dtype dtype) { return (int)dtype >= 0 && dtype <= RT_F16; }

enum { MOST_ARRAYS = 20 };

// The arrays of a call: what the params point to, and a copy of each for the reference.
typedef struct arrays {
    int64_t count;
    block x[MOST_ARRAYS], copies[MOST_ARRAYS];
    rt_dtype dtype[MOST_ARRAYS];
    const void **pointer[MOST_ARRAYS]; // a field of the params
} arrays;

// strides: NULL if contiguous. Products of hostile sizes may wrap; judge_block refuses those by their sizes.
static block *add(arrays *all, bool is_output, rt_dtype dtype, const void *field, int64_t ndim, const int64_t *sizes,
                  const int64_t *strides) {
    const int64_t i = all->count++;
    block *x = &all->x[i];
    x->element_bytes = (int64_t)dtype_bytes(dtype), x->ndim = ndim, x->is_output = is_output;
    all->dtype[i] = dtype, all->pointer[i] = (const void **)(uintptr_t)field;
    uint64_t step = 1;
    for (int64_t d = ndim - 1; d >= 0; d--) {
        x->sizes[d] = sizes[d];
        x->strides[d] = strides != NULL && d < ndim - 1 ? strides[d] : (int64_t)step;
        step *= sizes[d] > 0 ? (uint64_t)sizes[d] : 1;
    }
    return x;
}

static verdict judge_arrays(const arrays *all, verdict result) {
    for (int64_t i = 0; i < all->count; i++) {
        const verdict of_block = judge_block(&all->x[i]);
        result = worse(result, of_block == UNKNOWN ? result : of_block);
    }
    return result;
}

static void make_arrays(arrays *all, uint64_t *state, bool fair) {
    for (int64_t i = 0; i < all->count; i++) {
        make_block(&all->x[i], state);
        if (fair && all->x[i].element_bytes > 1) fill_units(&all->x[i], all->dtype[i], state);
    }
}

static void scale_numbers(block *x, rt_dtype dtype, double factor, bool absolute) {
    for (int64_t i = 0; i < (int64_t)(x->num_bytes / dtype_bytes(dtype)); i++) {
        const double value = load_element(dtype, x->memory, i);
        store_element(dtype, x->memory, i, factor * (absolute ? fabs(value) : value));
    }
}

// Points the params to the arrays, or to their copies.
static void point(arrays *all, bool to_copies) {
    for (int64_t i = 0; i < all->count; i++) *all->pointer[i] = to_copies ? all->copies[i].data : all->x[i].data;
}

static void free_arrays(arrays *all) {
    for (int64_t i = 0; i < all->count; i++) free(all->x[i].memory), free(all->copies[i].memory);
}

static void fill_seq_idx(block *x, uint64_t *state) {
    int32_t document = 0, *const seq_idx = (int32_t *)(void *)x->memory;
    for (size_t i = 0; i < x->num_bytes / sizeof(int32_t); i++) {
        if (random_int(state, 0, 9) == 0) document = (int32_t)random_int(state, 0, 3);
        seq_idx[i] = random_int(state, 0, 5) == 0 ? -1 : document;
    }
}

static void call_and_compare(arrays *all, const char *name, verdict expected, bool fair, rt_status status,
                             void (*reference)(const void *p), const void *p) {
    if (!judge(name, expected, status) || !fair) return;
    point(all, true);
    reference(p);
    for (int64_t i = 0; i < all->count; i++)
        if (all->x[i].is_output) {
            const double u = unit_roundoff(all->dtype[i]);
            compare(name, all->dtype[i], &all->x[i], &all->copies[i], 4 * u + (all->dtype[i] == RT_F64 ? 1e-12 : 1e-4));
        }
}

// A call of hostile sizes may ask for more than there is; it gets less, and must refuse.
static void *give_workspace(int64_t *num_bytes, verdict *expected) {
    if (*num_bytes > (int64_t)1 << 30) *num_bytes = 0, *expected = FORBIDDEN;
    return aligned_alloc(64, (size_t)*num_bytes + 64);
}

// ---- recurrences -------------------------------------------------------------------------------------------

static void forward_reference(const void *p) { scan_reference_fwd(p); }
static void backward_reference(const void *p) { scan_reference_bwd(p); }

static void try_scan(uint64_t *state) {
    const bool backward = random_int(state, 0, 1);
    verdict expected = VALID;
    const int64_t groups = random_int(state, 1, 2);
    rt_scan_params p = {.dtype = all_dtypes[random_int(state, 0, 3)],
                        .batch = random_int(state, 0, 2),
                        .num_tokens = random_int(state, 0, random_int(state, 0, 3) ? 20 : 90),
                        .num_heads = groups * random_int(state, 1, 3),
                        .num_k_heads = groups,
                        .head_dim = random_int(state, 1, 9),
                        .v_head_dim = random_int(state, 1, 9),
                        .channel_decay = random_int(state, 0, 1),
                        .scale = 0.5};
    const bool delta = random_int(state, 0, 1), has_dt = !delta && random_int(state, 0, 1);
    p.seq_idx_batch_stride = random_int(state, 0, 1) * p.num_tokens;
    int64_t *const fields[] = {&p.batch,      &p.num_tokens, &p.num_heads,   &p.num_k_heads,
                               &p.head_dim,   &p.v_head_dim, &p.q_stride[0], &p.seq_idx_batch_stride,
                               &p.v_stride[1]};
    const int64_t of_q[] = {p.batch, p.num_tokens, p.num_k_heads, p.head_dim};
    const int64_t of_v[] = {p.batch, p.num_tokens, p.num_heads, p.v_head_dim};
    int64_t strides[4][4];
    random_strides(state, 4, of_q, strides[0]), random_strides(state, 4, of_q, strides[1]);
    random_strides(state, 4, of_v, strides[2]), random_strides(state, 4, of_v, strides[3]);
    int64_t *const into[] = {p.q_stride, p.k_stride, p.v_stride, p.dout_stride};
    for (int i = 0; i < 4; i++) {
        if (strides[i][3] != 1) { // the last dim has unit stride
            const int64_t *sizes = i < 2 ? of_q : of_v;
            strides[i][2] = sizes[3], strides[i][1] = sizes[2] * sizes[3],
            strides[i][0] = sizes[1] * sizes[2] * sizes[3];
        }
        memcpy(into[i], strides[i], 3 * sizeof(int64_t));
    }
    rt_parallel parallel = {.run = run_in_turn, .num_workers = random_int(state, 1, 3)};
    bool no_params = false, small_workspace = false;
    int64_t spoil = -1, spoil_kind = 0;
    for (int64_t times = random_int(state, 0, 2); times > 0; times--) {
        expected = UNKNOWN;
        const int64_t kind = random_int(state, 0, 12);
        if (kind == 0) p.dtype = (rt_dtype)random_int(state, -1, 5);
        if (kind == 1) p.scale = hostile_real(state);
        if (kind == 2 || kind == 3) spoil = random_int(state, 0, 11), spoil_kind = kind;
        if (kind == 4) no_params = random_int(state, 0, 3) == 0;
        if (kind == 5) small_workspace = true;
        if (kind > 5) {
            int64_t *field = fields[random_int(state, 0, 8)];
            *field = hostile(state, *field);
        }
    }
    const int64_t B = p.batch, N = p.num_tokens, H = p.num_heads, G = p.num_k_heads, D = p.head_dim, Dv = p.v_head_dim;
    const rt_dtype dtype = p.dtype, wide = state_of(dtype);
    const int64_t q[] = {B, N, G, D}, v[] = {B, N, H, Dv}, decay[] = {B, N, H, D}, states[] = {B, H, D, Dv};
    const int64_t kept[] = {B, H, rt_scan_num_states(N), D, Dv}, stride[] = {p.seq_idx_batch_stride};
    const int64_t tokens[] = {B, N};
    arrays all = {0};
    add(&all, false, dtype, &p.q, 4, q, p.q_stride);
    block *k = add(&all, false, dtype, &p.k, 4, q, p.k_stride);
    add(&all, false, dtype, &p.v, 4, v, p.v_stride);
    block *decays = add(&all, false, wide, &p.g, p.channel_decay ? 4 : 3, decay, NULL);
    block *factor = NULL;
    if (delta || has_dt) factor = add(&all, false, wide, delta ? &p.beta : &p.dt, 3, v, NULL);
    if (has_dt) add(&all, false, wide, &p.D, 1, &H, NULL);
    block *seq_idx = add(&all, false, RT_F32, &p.seq_idx, 2, tokens, stride);
    if (random_int(state, 0, 1)) add(&all, false, wide, &p.initial_state, 4, states, NULL);
    const int64_t first_state = all.count;
    add(&all, !backward, wide, &p.states, 5, kept, NULL);
    if (backward) {
        add(&all, false, dtype, &p.dout, 4, v, p.dout_stride);
        if (random_int(state, 0, 1)) add(&all, false, wide, &p.dfinal_state, 4, states, NULL);
        add(&all, true, wide, &p.dq, 4, q, NULL), add(&all, true, wide, &p.dk, 4, q, NULL);
        add(&all, true, wide, &p.dv, 4, v, NULL);
        add(&all, true, wide, &p.dg, p.channel_decay ? 4 : 3, decay, NULL);
        if (delta) add(&all, true, wide, &p.dbeta, 3, v, NULL);
        if (has_dt) add(&all, true, wide, &p.ddt, 3, v, NULL), add(&all, true, wide, &p.dD, 3, v, NULL);
        add(&all, true, wide, &p.dinitial_state, 4, states, NULL);
    } else {
        add(&all, true, dtype, &p.out, 4, v, NULL), add(&all, true, wide, &p.final_state, 4, states, NULL);
    }
    const bool optional = spoil >= 0 && spoil < all.count &&
                          (&all.x[spoil] == factor || all.pointer[spoil] == (const void **)(uintptr_t)&p.D ||
                           all.pointer[spoil] == (const void **)(uintptr_t)&p.initial_state ||
                           all.pointer[spoil] == (const void **)(uintptr_t)&p.dfinal_state || spoil == first_state);
    if (spoil >= 0 && spoil < all.count && !optional) {
        if (spoil_kind == 2) all.x[spoil].is_null = true;
        if (spoil_kind == 3) all.x[spoil].is_skewed = all.x[spoil].element_bytes > 1;
    }
    const bool forbidden = no_params || !is_dtype(dtype) || H < 1 || G < 1 || H % (G > 0 ? G : 1) != 0 || D < 1 ||
                           D > 512 || Dv < 1 || Dv > 512 || !is_real(dtype, p.scale) ||
                           (p.seq_idx_batch_stride != 0 && p.seq_idx_batch_stride != N);
    expected = judge_arrays(&all, forbidden ? FORBIDDEN : expected);
    if (expected == IMPOSSIBLE) {
        num_skipped++;
        return;
    }
    const bool fair = random_int(state, 0, 9) > 0 && !forbidden && fabs(p.scale) < 10;
    make_arrays(&all, state, fair);
    if (fair) {
        scale_numbers(k, dtype, 1 / sqrt((double)D), false), scale_numbers(decays, wide, -1, true);
        if (factor != NULL) scale_numbers(factor, wide, 1, true);
    }
    fill_seq_idx(seq_idx, state);
    for (int64_t i = 0; i < all.count; i++) all.copies[i] = copy_of(&all.x[i]);
    point(&all, false);
    // A backward reads the states that its forward kept.
    rt_scan_params forward = p;
    block out = {.element_bytes = (int64_t)dtype_bytes(dtype), .ndim = 4}, final = {.element_bytes = 8, .ndim = 4};
    if (backward && fair && expected != FORBIDDEN) {
        out.num_bytes = (size_t)(B * N * H * Dv) * dtype_bytes(dtype), final.num_bytes = (size_t)(B * H * D * Dv) * 8;
        forward.out = must_alloc(out.num_bytes), forward.final_state = must_alloc(final.num_bytes);
        forward.workspace_bytes = rt_scan_fwd_workspace_bytes(&forward, 1);
        forward.workspace = aligned_alloc(64, (size_t)forward.workspace_bytes + 64);
        judge("rt_scan_fwd", expected, rt_scan_fwd(&forward, no_threads()));
        free(forward.out), free(forward.final_state), free(forward.workspace);
        if (all.x[first_state].num_bytes > 0)
            memcpy(all.copies[first_state].memory, all.x[first_state].memory, all.x[first_state].num_bytes);
    }
    p.workspace_bytes = backward ? rt_scan_bwd_workspace_bytes(&p, parallel.num_workers)
                                 : rt_scan_fwd_workspace_bytes(&p, parallel.num_workers);
    void *const workspace = give_workspace(&p.workspace_bytes, &expected);
    p.workspace = workspace;
    if (small_workspace) p.workspace_bytes -= 64, expected = FORBIDDEN;
    if (random_int(state, 0, 19) == 0 && expected != FORBIDDEN) {
        const int64_t output = all.count - 1, other = random_int(state, 0, all.count - 2);
        if (alias(all.x, output, other)) expected = FORBIDDEN;
        *all.pointer[output] = all.x[output].data;
    }
    const rt_scan_params *given = no_params ? NULL : &p;
    const rt_status status = backward ? rt_scan_bwd(given, parallel) : rt_scan_fwd(given, parallel);
    all.x[first_state].is_output = false;
    call_and_compare(&all, backward ? "rt_scan_bwd" : "rt_scan_fwd", expected, fair, status,
                     backward ? backward_reference : forward_reference, &p);
    free(workspace), free_arrays(&all);
}

// ---- convolution -------------------------------------------------------------------------------------------

static void conv_forward_reference(const void *p) { conv_reference_fwd(p); }
static void conv_backward_reference(const void *p) { conv_reference_bwd(p); }

static void try_conv(uint64_t *state) {
    const bool backward = random_int(state, 0, 1);
    verdict expected = VALID;
    rt_conv_params p = {.dtype = all_dtypes[random_int(state, 0, 3)],
                        .batch = random_int(state, 0, 2),
                        .num_tokens = random_int(state, 0, 20),
                        .num_channels = random_int(state, 0, random_int(state, 0, 3) ? 20 : 300),
                        .width = random_int(state, 1, 8),
                        .silu = random_int(state, 0, 1)};
    p.seq_idx_batch_stride = random_int(state, 0, 1) * p.num_tokens;
    p.x_stride[1] = p.dy_stride[1] = p.num_channels + random_int(state, 0, 2);
    p.x_stride[0] = p.dy_stride[0] = p.num_tokens * p.x_stride[1] + random_int(state, 0, 2);
    int64_t *const fields[] = {&p.batch, &p.num_tokens,  &p.num_channels,
                               &p.width, &p.x_stride[1], &p.seq_idx_batch_stride};
    rt_parallel parallel = {.run = run_in_turn, .num_workers = random_int(state, 1, 3)};
    bool no_params = false;
    int64_t spoil = -1, spoil_kind = 0;
    for (int64_t times = random_int(state, 0, 2); times > 0; times--) {
        expected = UNKNOWN;
        const int64_t kind = random_int(state, 0, 9);
        if (kind == 0) p.dtype = (rt_dtype)random_int(state, -1, 5);
        if (kind == 1 || kind == 2) spoil = random_int(state, 0, 2), spoil_kind = kind;
        if (kind == 3) no_params = random_int(state, 0, 3) == 0;
        if (kind == 4) parallel = random_workers(state);
        if (kind > 4) {
            int64_t *field = fields[random_int(state, 0, 5)];
            *field = hostile(state, *field);
        }
    }
    const int64_t B = p.batch, N = p.num_tokens, C = p.num_channels;
    // Of a hostile width, sizes that exist: it is refused before they are looked at.
    const int64_t width = p.width >= 1 && p.width <= 8 ? p.width : 1;
    const rt_dtype dtype = p.dtype, wide = state_of(dtype);
    const int64_t rows[] = {B, N, C}, weights[] = {C, width}, states[] = {B, width - 1, C}, tokens[] = {B, N};
    arrays all = {0};
    add(&all, false, dtype, &p.x, 3, rows, p.x_stride);
    add(&all, false, wide, &p.weight, 2, weights, NULL);
    block *seq_idx = add(&all, false, RT_F32, &p.seq_idx, 2, tokens, &p.seq_idx_batch_stride);
    const bool biased = random_int(state, 0, 1);
    if (biased) add(&all, false, wide, &p.bias, 1, &C, NULL);
    if (random_int(state, 0, 1)) add(&all, false, wide, &p.initial_state, 3, states, NULL);
    if (backward) {
        add(&all, false, dtype, &p.dy, 3, rows, p.dy_stride);
        if (random_int(state, 0, 1)) add(&all, false, wide, &p.dfinal_state, 3, states, NULL);
        if (biased) add(&all, true, wide, &p.dbias, 1, &C, NULL);
        add(&all, true, wide, &p.dweight, 2, weights, NULL), add(&all, true, wide, &p.dinitial_state, 3, states, NULL);
        add(&all, true, dtype, &p.dx, 3, rows, NULL);
    } else {
        add(&all, true, wide, &p.final_state, 3, states, NULL), add(&all, true, dtype, &p.y, 3, rows, NULL);
    }
    if (spoil_kind == 1) all.x[spoil].is_null = true;
    if (spoil_kind == 2) all.x[spoil].is_skewed = all.x[spoil].element_bytes > 1;
    const bool forbidden = no_params || !is_dtype(dtype) || p.width != width ||
                           (p.seq_idx_batch_stride != 0 && p.seq_idx_batch_stride != N);
    expected = judge_arrays(&all, forbidden ? FORBIDDEN : expected);
    if (expected == IMPOSSIBLE) {
        num_skipped++;
        return;
    }
    const bool fair = random_int(state, 0, 9) > 0 && !forbidden;
    make_arrays(&all, state, fair);
    fill_seq_idx(seq_idx, state);
    for (int64_t i = 0; i < all.count; i++) all.copies[i] = copy_of(&all.x[i]);
    point(&all, false);
    if (random_int(state, 0, 19) == 0 && expected != FORBIDDEN) {
        if (alias(all.x, all.count - 1, random_int(state, 0, all.count - 2))) expected = FORBIDDEN;
        *all.pointer[all.count - 1] = all.x[all.count - 1].data;
    }
    const rt_conv_params *given = no_params ? NULL : &p;
    const rt_status status = backward ? rt_conv_bwd(given, parallel) : rt_conv_fwd(given, parallel);
    call_and_compare(&all, backward ? "rt_conv_bwd" : "rt_conv_fwd", expected, fair, status,
                     backward ? conv_backward_reference : conv_forward_reference, &p);
    free_arrays(&all);
}

// ---- selective scan ----------------------------------------------------------------------------------------

static void selective_forward_reference(const void *p) { selective_reference_fwd(p); }
static void selective_backward_reference(const void *p) { selective_reference_bwd(p); }

static void try_selective(uint64_t *state) {
    const bool backward = random_int(state, 0, 1);
    verdict expected = VALID;
    rt_selective_params p = {.dtype = all_dtypes[random_int(state, 0, 3)],
                             .batch = random_int(state, 0, 2),
                             .num_tokens = random_int(state, 0, random_int(state, 0, 3) ? 20 : 90),
                             .num_channels = random_int(state, 1, random_int(state, 0, 3) ? 20 : 70),
                             .state_dim = random_int(state, 1, 5)};
    p.seq_idx_batch_stride = random_int(state, 0, 1) * p.num_tokens;
    p.x_stride[1] = p.dout_stride[1] = p.num_channels + random_int(state, 0, 2);
    p.C_stride[1] = p.B_stride[1] = p.state_dim + random_int(state, 0, 2);
    p.x_stride[0] = p.dout_stride[0] = p.num_tokens * p.x_stride[1] + random_int(state, 0, 2);
    p.C_stride[0] = p.B_stride[0] = p.num_tokens * p.C_stride[1] + random_int(state, 0, 2);
    int64_t *const fields[] = {&p.batch,     &p.num_tokens,  &p.num_channels,
                               &p.state_dim, &p.x_stride[1], &p.seq_idx_batch_stride};
    rt_parallel parallel = {.run = run_in_turn, .num_workers = random_int(state, 1, 3)};
    bool no_params = false, small_workspace = false;
    int64_t spoil = -1, spoil_kind = 0;
    for (int64_t times = random_int(state, 0, 2); times > 0; times--) {
        expected = UNKNOWN;
        const int64_t kind = random_int(state, 0, 10);
        if (kind == 0) p.dtype = (rt_dtype)random_int(state, -1, 5);
        if (kind == 1 || kind == 2) spoil = random_int(state, 0, 5), spoil_kind = kind;
        if (kind == 3) no_params = random_int(state, 0, 3) == 0;
        if (kind == 4) small_workspace = true;
        if (kind > 4) {
            int64_t *field = fields[random_int(state, 0, 5)];
            *field = hostile(state, *field);
        }
    }
    const int64_t B = p.batch, N = p.num_tokens, C = p.num_channels, K = p.state_dim;
    const rt_dtype dtype = p.dtype, wide = state_of(dtype);
    const int64_t rows[] = {B, N, C}, shared[] = {B, N, K}, states[] = {B, K, C}, rates[] = {K, C},
                  kept[] = {B, rt_scan_num_states(N), K, C}, tokens[] = {B, N};
    arrays all = {0};
    add(&all, false, dtype, &p.x, 3, rows, p.x_stride);
    add(&all, false, dtype, &p.C, 3, shared, p.C_stride), add(&all, false, dtype, &p.B, 3, shared, p.B_stride);
    block *dt = add(&all, false, wide, &p.dt, 3, rows, NULL);
    block *A = add(&all, false, wide, &p.A, 2, rates, NULL);
    block *seq_idx = add(&all, false, RT_F32, &p.seq_idx, 2, tokens, &p.seq_idx_batch_stride);
    const bool has_D = random_int(state, 0, 1);
    if (has_D) add(&all, false, wide, &p.D, 1, &C, NULL);
    if (random_int(state, 0, 1)) add(&all, false, wide, &p.initial_state, 3, states, NULL);
    const int64_t first_state = all.count;
    add(&all, !backward, wide, &p.states, 4, kept, NULL);
    if (backward) {
        add(&all, false, dtype, &p.dout, 3, rows, p.dout_stride);
        if (random_int(state, 0, 1)) add(&all, false, wide, &p.dfinal_state, 3, states, NULL);
        if (has_D) add(&all, true, wide, &p.dD, 1, &C, NULL);
        add(&all, true, wide, &p.dx, 3, rows, NULL), add(&all, true, wide, &p.ddt, 3, rows, NULL);
        add(&all, true, wide, &p.dC, 3, shared, NULL), add(&all, true, wide, &p.dB, 3, shared, NULL);
        add(&all, true, wide, &p.dA, 2, rates, NULL);
        add(&all, true, wide, &p.dinitial_state, 3, states, NULL);
    } else {
        add(&all, true, dtype, &p.out, 3, rows, NULL), add(&all, true, wide, &p.final_state, 3, states, NULL);
    }
    if (spoil_kind == 1) all.x[spoil].is_null = true;
    if (spoil_kind == 2) all.x[spoil].is_skewed = all.x[spoil].element_bytes > 1;
    const bool forbidden = no_params || !is_dtype(dtype) || C < 1 || K < 1 || K > 512 ||
                           (p.seq_idx_batch_stride != 0 && p.seq_idx_batch_stride != N);
    expected = judge_arrays(&all, forbidden ? FORBIDDEN : expected);
    if (expected == IMPOSSIBLE) {
        num_skipped++;
        return;
    }
    const bool fair = random_int(state, 0, 9) > 0 && !forbidden;
    make_arrays(&all, state, fair);
    if (fair) scale_numbers(dt, wide, 1, true), scale_numbers(A, wide, -1, true);
    fill_seq_idx(seq_idx, state);
    for (int64_t i = 0; i < all.count; i++) all.copies[i] = copy_of(&all.x[i]);
    point(&all, false);
    if (backward && fair && expected != FORBIDDEN) { // it reads the states that its forward kept
        rt_selective_params forward = p;
        forward.out = must_alloc((size_t)(B * N * C) * dtype_bytes(dtype));
        forward.final_state = must_alloc((size_t)(B * K * C) * 8);
        forward.workspace_bytes = rt_selective_fwd_workspace_bytes(&forward, 1);
        forward.workspace = aligned_alloc(64, (size_t)forward.workspace_bytes + 64);
        judge("rt_selective_fwd", expected, rt_selective_fwd(&forward, no_threads()));
        free(forward.out), free(forward.final_state), free(forward.workspace);
        if (all.x[first_state].num_bytes > 0)
            memcpy(all.copies[first_state].memory, all.x[first_state].memory, all.x[first_state].num_bytes);
    }
    p.workspace_bytes = backward ? rt_selective_bwd_workspace_bytes(&p, parallel.num_workers)
                                 : rt_selective_fwd_workspace_bytes(&p, parallel.num_workers);
    void *const workspace = give_workspace(&p.workspace_bytes, &expected);
    p.workspace = workspace;
    if (small_workspace) p.workspace_bytes -= 64, expected = FORBIDDEN;
    if (random_int(state, 0, 19) == 0 && expected != FORBIDDEN) {
        const int64_t output = all.count - 1;
        if (alias(all.x, output, random_int(state, 0, all.count - 2))) expected = FORBIDDEN;
        *all.pointer[output] = all.x[output].data;
    }
    const rt_selective_params *given = no_params ? NULL : &p;
    const rt_status status = backward ? rt_selective_bwd(given, parallel) : rt_selective_fwd(given, parallel);
    all.x[first_state].is_output = false;
    call_and_compare(&all, backward ? "rt_selective_bwd" : "rt_selective_fwd", expected, fair, status,
                     backward ? selective_backward_reference : selective_forward_reference, &p);
    free(workspace), free_arrays(&all);
}

static void trial(uint64_t *state, int64_t entry) {
    (void)entry;
    if (trial_number % 4 == 0)
        try_conv(state);
    else if (trial_number % 4 == 1)
        try_selective(state);
    else
        try_scan(state);
}

int main(int argc, char **argv) { return fuzz_main(argc, argv, 1500, 0, trial); }
