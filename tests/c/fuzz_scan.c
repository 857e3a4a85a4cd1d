// Recurrences and their convolution.
#include "fuzz.h"

static rt_dtype state_of(rt_dtype dtype) { return dtype == RT_F64 ? RT_F64 : RT_F32; }

static void fill_seq_idx(const block *x, uint64_t *state) {
    int32_t document = 0, *const seq_idx = (int32_t *)(void *)x->memory;
    for (size_t i = 0; i < x->num_bytes / sizeof(int32_t); i++) {
        if (random_int(state, 0, 9) == 0) document = (int32_t)random_int(state, 0, 3);
        seq_idx[i] = random_int(state, 0, 5) == 0 ? -1 : document;
    }
}

// ---- recurrences -------------------------------------------------------------------------------------------

typedef struct scan_call {
    rt_scan_params p;
    bool backward;
} scan_call;

static rt_status call_scan(void *call, const arrays *all, rt_parallel parallel) {
    const scan_call *c = call;
    rt_scan_params p = c->p;
    p.workspace_bytes = c->backward ? rt_scan_bwd_workspace_bytes(&p, workers_of(parallel))
                                    : rt_scan_fwd_workspace_bytes(&p, workers_of(parallel));
    void *const workspace = p.workspace = give_workspace(&p.workspace_bytes, all);
    const rt_scan_params *given = all->no_params ? NULL : &p;
    const rt_status status = c->backward ? rt_scan_bwd(given, parallel) : rt_scan_fwd(given, parallel);
    free(workspace);
    return status;
}

static void try_scan(uint64_t *state) {
    const int64_t groups = random_int(state, 1, 2);
    scan_call c = {.p = {.dtype = all_dtypes[random_int(state, 0, 3)],
                         .batch = random_int(state, 0, 2),
                         .num_tokens = random_int(state, 0, random_int(state, 0, 3) ? 20 : 90),
                         .num_heads = groups * random_int(state, 1, 3),
                         .num_k_heads = groups,
                         .head_dim = random_int(state, 1, 9),
                         .v_head_dim = random_int(state, 1, 9),
                         .channel_decay = random_int(state, 0, 1),
                         .scale = 0.5},
                   .backward = random_int(state, 0, 1)};
    rt_scan_params *p = &c.p;
    const bool delta = random_int(state, 0, 1), has_dt = !delta && random_int(state, 0, 1);
    p->seq_idx_batch_stride = random_int(state, 0, 1) * p->num_tokens;
    int64_t *const fields[] = {&p->batch,      &p->num_tokens, &p->num_heads,   &p->num_k_heads,
                               &p->head_dim,   &p->v_head_dim, &p->q_stride[0], &p->seq_idx_batch_stride,
                               &p->v_stride[1]};
    double *const reals[] = {&p->scale};
    const int64_t of_q[] = {p->batch, p->num_tokens, p->num_k_heads, p->head_dim};
    const int64_t of_v[] = {p->batch, p->num_tokens, p->num_heads, p->v_head_dim};
    random_row_strides(state, 4, of_q, p->q_stride), random_row_strides(state, 4, of_q, p->k_stride);
    random_row_strides(state, 4, of_v, p->v_stride), random_row_strides(state, 4, of_v, p->dout_stride);
    rt_parallel parallel = {.run = run_in_turn, .num_workers = random_int(state, 1, 3)};
    arrays all = no_arrays();
    verdict expected = spoil(state, &all, &p->dtype, fields, 9, reals, 1, &parallel);
    if (all.small_workspace) expected = FORBIDDEN;
    const int64_t B = p->batch, N = p->num_tokens, H = p->num_heads, G = p->num_k_heads, D = p->head_dim,
                  Dv = p->v_head_dim;
    const rt_dtype dtype = p->dtype, wide = state_of(dtype);
    const int64_t q[] = {B, N, G, D}, v[] = {B, N, H, Dv}, decay[] = {B, N, H, D}, states[] = {B, H, D, Dv};
    const int64_t kept[] = {B, H, rt_scan_num_states(N), D, Dv}, tokens[] = {B, N};
    const int64_t decay_dims = p->channel_decay ? 4 : 3;
    add(&all, false, dtype, &p->q, 4, q, p->q_stride), add(&all, false, dtype, &p->k, 4, q, p->k_stride);
    add(&all, false, dtype, &p->v, 4, v, p->v_stride), add(&all, false, wide, &p->g, decay_dims, decay, NULL);
    if (delta || has_dt) add_optional(&all, false, wide, delta ? &p->beta : &p->dt, 3, v);
    if (has_dt) add_optional(&all, false, wide, &p->D, 1, &H);
    const block *seq_idx = add(&all, false, RT_F32, &p->seq_idx, 2, tokens, &p->seq_idx_batch_stride);
    if (random_int(state, 0, 1)) add_optional(&all, false, wide, &p->initial_state, 4, states);
    all.scratch_at = all.count;
    add_optional(&all, !c.backward, wide, &p->states, 5, kept);
    if (c.backward) {
        all.optional[all.count - 1] = false; // it reads the states that a forward kept: here any
        add(&all, false, dtype, &p->dout, 4, v, p->dout_stride);
        if (random_int(state, 0, 1)) add_optional(&all, false, wide, &p->dfinal_state, 4, states);
        add(&all, true, wide, &p->dq, 4, q, NULL), add(&all, true, wide, &p->dk, 4, q, NULL);
        add(&all, true, wide, &p->dv, 4, v, NULL), add(&all, true, wide, &p->dg, decay_dims, decay, NULL);
        if (delta) add(&all, true, wide, &p->dbeta, 3, v, NULL);
        if (has_dt) add(&all, true, wide, &p->ddt, 3, v, NULL), add(&all, true, wide, &p->dD, 3, v, NULL);
        add(&all, true, wide, &p->dinitial_state, 4, states, NULL);
    } else {
        add(&all, true, dtype, &p->out, 4, v, NULL), add(&all, true, wide, &p->final_state, 4, states, NULL);
    }
    const bool forbidden = H < 1 || G < 1 || H % (G > 0 ? G : 1) != 0 || D < 1 || D > 512 || Dv < 1 || Dv > 512 ||
                           !is_real(dtype, p->scale) || (p->seq_idx_batch_stride != 0 && p->seq_idx_batch_stride != N);
    if (!make(&all, state, forbidden, &expected)) return;
    fill_seq_idx(seq_idx, state);
    try_call(state, c.backward ? "rt_scan_bwd" : "rt_scan_fwd", &all, &c, call_scan, expected, parallel);
}

// ---- convolution -------------------------------------------------------------------------------------------

typedef struct conv_call {
    rt_conv_params p;
    bool backward;
} conv_call;

static rt_status call_conv(void *call, const arrays *all, rt_parallel parallel) {
    const conv_call *c = call;
    const rt_conv_params *p = all->no_params ? NULL : &c->p;
    return c->backward ? rt_conv_bwd(p, parallel) : rt_conv_fwd(p, parallel);
}

static void try_conv(uint64_t *state) {
    conv_call c = {.p = {.dtype = all_dtypes[random_int(state, 0, 3)],
                         .batch = random_int(state, 0, 2),
                         .num_tokens = random_int(state, 0, 20),
                         .num_channels = random_int(state, 0, random_int(state, 0, 3) ? 20 : 300),
                         .width = random_int(state, 1, 8),
                         .silu = random_int(state, 0, 1)},
                   .backward = random_int(state, 0, 1)};
    rt_conv_params *p = &c.p;
    p->seq_idx_batch_stride = random_int(state, 0, 1) * p->num_tokens;
    p->x_stride[1] = p->dy_stride[1] = p->num_channels + random_int(state, 0, 2);
    p->x_stride[0] = p->dy_stride[0] = p->num_tokens * p->x_stride[1] + random_int(state, 0, 2);
    int64_t *const fields[] = {&p->batch, &p->num_tokens,  &p->num_channels,
                               &p->width, &p->x_stride[1], &p->seq_idx_batch_stride};
    rt_parallel parallel = {.run = run_in_turn, .num_workers = random_int(state, 1, 3)};
    arrays all = no_arrays();
    verdict expected = spoil(state, &all, &p->dtype, fields, 6, NULL, 0, &parallel);
    const int64_t B = p->batch, N = p->num_tokens, C = p->num_channels;
    // Of a hostile width, sizes that exist: it is refused before they are looked at.
    const int64_t width = p->width >= 1 && p->width <= 8 ? p->width : 1;
    const rt_dtype dtype = p->dtype, wide = state_of(dtype);
    const int64_t rows[] = {B, N, C}, weights[] = {C, width}, states[] = {B, width - 1, C}, tokens[] = {B, N};
    add(&all, false, dtype, &p->x, 3, rows, p->x_stride), add(&all, false, wide, &p->weight, 2, weights, NULL);
    const block *seq_idx = add(&all, false, RT_F32, &p->seq_idx, 2, tokens, &p->seq_idx_batch_stride);
    const bool biased = random_int(state, 0, 1);
    if (biased) add_optional(&all, false, wide, &p->bias, 1, &C);
    if (random_int(state, 0, 1)) add_optional(&all, false, wide, &p->initial_state, 3, states);
    if (c.backward) {
        add(&all, false, dtype, &p->dy, 3, rows, p->dy_stride);
        if (random_int(state, 0, 1)) add_optional(&all, false, wide, &p->dfinal_state, 3, states);
        if (biased) add(&all, true, wide, &p->dbias, 1, &C, NULL);
        add(&all, true, wide, &p->dweight, 2, weights, NULL);
        add(&all, true, wide, &p->dinitial_state, 3, states, NULL), add(&all, true, dtype, &p->dx, 3, rows, NULL);
    } else {
        add(&all, true, wide, &p->final_state, 3, states, NULL), add(&all, true, dtype, &p->y, 3, rows, NULL);
    }
    const bool forbidden =
        p->width != width || (p->seq_idx_batch_stride != 0 && p->seq_idx_batch_stride != p->num_tokens);
    if (!make(&all, state, forbidden, &expected)) return;
    fill_seq_idx(seq_idx, state);
    try_call(state, c.backward ? "rt_conv_bwd" : "rt_conv_fwd", &all, &c, call_conv, expected, parallel);
}

// ---- selective scan ----------------------------------------------------------------------------------------

typedef struct selective_call {
    rt_selective_params p;
    bool backward;
} selective_call;

static rt_status call_selective(void *call, const arrays *all, rt_parallel parallel) {
    const selective_call *c = call;
    rt_selective_params p = c->p;
    p.workspace_bytes = c->backward ? rt_selective_bwd_workspace_bytes(&p, workers_of(parallel))
                                    : rt_selective_fwd_workspace_bytes(&p, workers_of(parallel));
    void *const workspace = p.workspace = give_workspace(&p.workspace_bytes, all);
    const rt_selective_params *given = all->no_params ? NULL : &p;
    const rt_status status = c->backward ? rt_selective_bwd(given, parallel) : rt_selective_fwd(given, parallel);
    free(workspace);
    return status;
}

static void try_selective(uint64_t *state) {
    selective_call c = {.p = {.dtype = all_dtypes[random_int(state, 0, 3)],
                              .batch = random_int(state, 0, 2),
                              .num_tokens = random_int(state, 0, random_int(state, 0, 3) ? 20 : 90),
                              .num_channels = random_int(state, 1, random_int(state, 0, 3) ? 20 : 70),
                              .state_dim = random_int(state, 1, 5)},
                        .backward = random_int(state, 0, 1)};
    rt_selective_params *p = &c.p;
    p->seq_idx_batch_stride = random_int(state, 0, 1) * p->num_tokens;
    p->x_stride[1] = p->dout_stride[1] = p->num_channels + random_int(state, 0, 2);
    p->C_stride[1] = p->B_stride[1] = p->state_dim + random_int(state, 0, 2);
    p->x_stride[0] = p->dout_stride[0] = p->num_tokens * p->x_stride[1] + random_int(state, 0, 2);
    p->C_stride[0] = p->B_stride[0] = p->num_tokens * p->C_stride[1] + random_int(state, 0, 2);
    int64_t *const fields[] = {&p->batch,     &p->num_tokens,  &p->num_channels,
                               &p->state_dim, &p->x_stride[1], &p->seq_idx_batch_stride};
    rt_parallel parallel = {.run = run_in_turn, .num_workers = random_int(state, 1, 3)};
    arrays all = no_arrays();
    verdict expected = spoil(state, &all, &p->dtype, fields, 6, NULL, 0, &parallel);
    if (all.small_workspace) expected = FORBIDDEN;
    const int64_t B = p->batch, N = p->num_tokens, C = p->num_channels, K = p->state_dim;
    const rt_dtype dtype = p->dtype, wide = state_of(dtype);
    const int64_t rows[] = {B, N, C}, shared[] = {B, N, K}, states[] = {B, K, C}, rates[] = {K, C},
                  kept[] = {B, rt_scan_num_states(N), K, C}, tokens[] = {B, N};
    add(&all, false, dtype, &p->x, 3, rows, p->x_stride);
    add(&all, false, dtype, &p->C, 3, shared, p->C_stride), add(&all, false, dtype, &p->B, 3, shared, p->B_stride);
    add(&all, false, wide, &p->dt, 3, rows, NULL), add(&all, false, wide, &p->A, 2, rates, NULL);
    const block *seq_idx = add(&all, false, RT_F32, &p->seq_idx, 2, tokens, &p->seq_idx_batch_stride);
    const bool has_D = random_int(state, 0, 1);
    if (has_D) add_optional(&all, false, wide, &p->D, 1, &C);
    if (random_int(state, 0, 1)) add_optional(&all, false, wide, &p->initial_state, 3, states);
    all.scratch_at = all.count;
    add_optional(&all, !c.backward, wide, &p->states, 4, kept);
    if (c.backward) {
        all.optional[all.count - 1] = false; // it reads the states that a forward kept: here any
        add(&all, false, dtype, &p->dout, 3, rows, p->dout_stride);
        if (random_int(state, 0, 1)) add_optional(&all, false, wide, &p->dfinal_state, 3, states);
        if (has_D) add(&all, true, wide, &p->dD, 1, &C, NULL);
        add(&all, true, wide, &p->dx, 3, rows, NULL), add(&all, true, wide, &p->ddt, 3, rows, NULL);
        add(&all, true, wide, &p->dC, 3, shared, NULL), add(&all, true, wide, &p->dB, 3, shared, NULL);
        add(&all, true, wide, &p->dA, 2, rates, NULL), add(&all, true, wide, &p->dinitial_state, 3, states, NULL);
    } else {
        add(&all, true, dtype, &p->out, 3, rows, NULL), add(&all, true, wide, &p->final_state, 3, states, NULL);
    }
    const bool forbidden = C < 1 || K < 1 || K > 512 || (p->seq_idx_batch_stride != 0 && p->seq_idx_batch_stride != N);
    if (!make(&all, state, forbidden, &expected)) return;
    fill_seq_idx(seq_idx, state);
    try_call(state, c.backward ? "rt_selective_bwd" : "rt_selective_fwd", &all, &c, call_selective, expected, parallel);
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
