// Every precondition of attention, which each call checks.
#include "attn.h"

#include "../arrays.h"
#include "../dtype.h"

rt_status rt_attn_check_sizes(const rt_attn_block *p) {
    if (!rt_is_dtype(p->dtype)) return RT_BAD_DTYPE;
    if (p->batch < 0 || p->num_queries < 0 || p->num_keys < 0 || p->num_k_runs < 0)
        return rt_wrong(RT_BAD_SHAPE, "batch, num_queries, num_keys or num_k_runs");
    if (p->num_kv_heads < 1 || p->num_heads < 1 || p->num_heads % p->num_kv_heads != 0) return RT_BAD_HEADS;
    if (p->head_dim < 1 || p->head_dim > RT_MAX_HEAD_DIM || p->v_head_dim < 1 || p->v_head_dim > RT_MAX_HEAD_DIM)
        return RT_BAD_HEAD_DIM;
    const int64_t rows[] = {p->batch, p->num_heads, p->num_queries};
    return rt_array_fits(3, rows, NULL, rt_state_bytes(p->dtype)) ? RT_OK : rt_wrong(RT_TOO_LARGE, "lse");
}

// The block, and all arrays of a pass: its own come first.
static rt_status check(const rt_attn_block *p, rt_arrays *all) {
    const rt_status sizes = rt_attn_check_sizes(p);
    if (sizes != RT_OK) return sizes;
    if (!rt_is_finite(p->dtype, p->scale) || !rt_is_softcap(p->dtype, p->softcap))
        return rt_wrong(RT_BAD_SCALE, "scale or softcap");
    if (!(p->dropout >= 0 && p->dropout <= 1)) return RT_BAD_PROBABILITY;
    if (p->mask_batch_stride != 0 && p->mask_batch_stride != p->num_queries) return RT_BAD_MASK;
    const bool two_sides = p->key_begin != NULL, drops = p->dropout > 0;
    if (two_sides != (p->key_end != NULL)) return RT_BAD_MASK;
    if (two_sides && p->key_mask_batch_stride != 0 && p->key_mask_batch_stride != p->num_keys) return RT_BAD_MASK;

    const int64_t B = p->batch, N = p->num_queries, K = p->num_keys, H = p->num_heads, G = p->num_kv_heads;
    const int64_t D = p->head_dim, Dv = p->v_head_dim, input = rt_element_bytes(p->dtype);
    const int64_t mask[] = {p->mask_batch_stride}, key_mask[] = {p->key_mask_batch_stride};
    rt_add_array(all, false, RT_ARRAY(p, q, input, 4, {B, N, H, D}, p->q_stride, false));
    rt_add_array(all, false, RT_ARRAY(p, k, input, 4, {B, K, G, D}, p->k_stride, false));
    rt_add_array(all, false, RT_ARRAY(p, v, input, 4, {B, K, G, Dv}, p->v_stride, false));
    rt_add_array(all, false, RT_ARRAY(p, begin, 4, 2, {B, N}, mask, false));
    rt_add_array(all, false, RT_ARRAY(p, end, 4, 2, {B, N}, mask, false));
    rt_add_array(all, false, RT_ARRAY(p, key_begin, 4, 2, {B, K}, key_mask, true));
    rt_add_array(all, false, RT_ARRAY(p, key_end, 4, 2, {B, K}, key_mask, true));
    rt_add_array(all, false, RT_ARRAY(p, q_positions, 8, 1, {drops || two_sides ? N : 0}, NULL, false));
    rt_add_array(all, false, RT_ARRAY(p, dropout_rows, 8, 1, {drops ? B : 0}, NULL, false));
    const rt_status status = rt_check_arrays(all);
    return status == RT_OK ? rt_runs_check(p->k_runs, p->num_k_runs, p->num_keys) : status;
}

rt_status rt_attn_check_fwd(const rt_attn_fwd_params *p) {
    if (p == NULL) return rt_wrong(RT_BAD_POINTER, "p");
    const rt_attn_block *b = &p->block;
    const bool only_rounded = p->fresh && p->rounded_out != NULL; // nothing is read from out, or left in it
    const int64_t B = b->batch, N = b->num_queries, H = b->num_heads, Dv = b->v_head_dim;
    const int64_t input = rt_element_bytes(b->dtype), state = rt_state_bytes(b->dtype);
    rt_arrays all = {0};
    rt_add_array(&all, true, RT_ARRAY(p, out, state, 4, {B, N, H, Dv}, p->out_stride, only_rounded));
    rt_add_array(&all, true, RT_ARRAY(p, rounded_out, input, 4, {B, N, H, Dv}, NULL, true));
    rt_add_array(&all, true, RT_ARRAY(p, lse, b->lse_f64 ? 8 : state, 3, {B, H, N}, NULL, false));
    return check(b, &all);
}

// Exact, because no key is in two runs.
static int64_t keys_in_runs(const rt_attn_block *p) {
    int64_t num_keys = 0;
    for (int64_t i = 0; i < p->num_k_runs; i++) num_keys += p->k_runs[i].length;
    return num_keys;
}

rt_status rt_attn_check_bwd(const rt_attn_bwd_params *p) {
    if (p == NULL) return rt_wrong(RT_BAD_POINTER, "p");
    const bool rounds = p->rounded_dk != NULL;
    if (rounds != (p->rounded_dv != NULL) || (rounds && !p->fresh)) return RT_BAD_FRESH;
    const rt_attn_block *b = &p->block;
    const int64_t B = b->batch, N = b->num_queries, K = b->num_keys, H = b->num_heads, G = b->num_kv_heads;
    const int64_t D = b->head_dim, Dv = b->v_head_dim;
    const int64_t input = rt_element_bytes(b->dtype), state = rt_state_bytes(b->dtype);
    rt_arrays all = {0};
    rt_add_array(&all, true, RT_ARRAY(p, dq, state, 4, {B, N, H, D}, p->dq_stride, false));
    rt_add_array(&all, true, RT_ARRAY(p, dk, state, 4, {B, K, G, D}, p->dk_stride, false));
    rt_add_array(&all, true, RT_ARRAY(p, dv, state, 4, {B, K, G, Dv}, p->dv_stride, false));
    rt_add_array(&all, true, RT_ARRAY(p, rounded_dk, input, 4, {B, K, G, D}, NULL, true));
    rt_add_array(&all, true, RT_ARRAY(p, rounded_dv, input, 4, {B, K, G, Dv}, NULL, true));
    rt_add_array(&all, false, RT_ARRAY(p, dout, input, 4, {B, N, H, Dv}, p->dout_stride, false));
    rt_add_array(&all, false, RT_ARRAY(p, delta, state, 3, {B, H, N}, NULL, false));
    rt_add_array(&all, false, RT_ARRAY(p, lse, b->lse_f64 ? 8 : state, 3, {B, H, N}, NULL, false));
    const rt_status status = check(b, &all);
    return status == RT_OK && p->fresh && keys_in_runs(b) != b->num_keys ? RT_BAD_FRESH : status;
}

rt_status rt_attn_check_delta(const rt_attn_delta_params *p, const void *dout, const void *out, const double *dlse,
                              const void *delta) {
    if (p == NULL) return rt_wrong(RT_BAD_POINTER, "p");
    if (!rt_is_dtype(p->dtype)) return RT_BAD_DTYPE;
    if (p->batch < 0 || p->num_queries < 0 || p->num_heads < 1)
        return rt_wrong(RT_BAD_SHAPE, "batch, num_queries or num_heads");
    if (p->v_head_dim < 1 || p->v_head_dim > RT_MAX_HEAD_DIM) return RT_BAD_HEAD_DIM;
    const int64_t B = p->batch, N = p->num_queries, H = p->num_heads, D = p->v_head_dim;
    const int64_t input = rt_element_bytes(p->dtype);
    rt_arrays all = {0};
    rt_add_array(&all, true, (rt_array){"delta", delta, rt_state_bytes(p->dtype), 3, {B, H, N}, NULL, false});
    rt_add_array(&all, false, (rt_array){"dlse", dlse, sizeof(*dlse), 3, {B, H, N}, NULL, true});
    rt_add_array(&all, false, (rt_array){"dout", dout, input, 4, {B, N, H, D}, p->dout_stride, false});
    rt_add_array(&all, false, (rt_array){"out", out, input, 4, {B, N, H, D}, p->out_stride, false});
    return rt_check_arrays(&all);
}
