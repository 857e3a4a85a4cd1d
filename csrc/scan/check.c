// Every precondition of recurrences and convolutions; the entry points check them once.
#include "scan.h"

#include "../arrays.h"
#include "../dtype.h"

rt_status rt_scan_check_sizes(const rt_scan_params *p) {
    if (p == NULL) return rt_wrong(RT_BAD_POINTER, "p");
    if (!rt_is_dtype(p->dtype)) return RT_BAD_DTYPE;
    if (p->batch < 0 || p->num_tokens < 0) return rt_wrong(RT_BAD_SHAPE, "batch or num_tokens");
    if (p->num_k_heads < 1 || p->num_heads < 1 || p->num_heads % p->num_k_heads != 0) return RT_BAD_HEADS;
    if (p->head_dim < 1 || p->head_dim > RT_MAX_HEAD_DIM || p->v_head_dim < 1 || p->v_head_dim > RT_MAX_HEAD_DIM)
        return RT_BAD_HEAD_DIM;
    return p->seq_idx_batch_stride != 0 && p->seq_idx_batch_stride != p->num_tokens ? RT_BAD_MASK : RT_OK;
}

rt_status rt_scan_check(const rt_scan_params *p, bool backward) {
    const rt_status status = rt_scan_check_sizes(p);
    if (status != RT_OK) return status;
    if (!rt_is_finite(p->dtype, p->scale)) return rt_wrong(RT_BAD_SCALE, "scale");
    if (p->beta != NULL && (p->dt != NULL || p->D != NULL)) return rt_wrong(RT_BAD_POINTER, "beta, dt or D");

    const int64_t B = p->batch, N = p->num_tokens, H = p->num_heads, G = p->num_k_heads, K = p->head_dim,
                  V = p->v_head_dim, bytes = rt_element_bytes(p->dtype), wide = rt_state_bytes(p->dtype);
    const int64_t g_dims = p->channel_decay ? 4 : 3, seq_idx[] = {p->seq_idx_batch_stride};
    const rt_array states = {"states", p->states, wide, 5, {B, H, rt_scan_num_states(N), K, V}, NULL, !backward};
    rt_arrays all = {0};
    if (backward) {
        rt_add_array(&all, true, RT_ARRAY(p, dq, wide, 4, {B, N, G, K}, NULL, false));
        rt_add_array(&all, true, RT_ARRAY(p, dk, wide, 4, {B, N, G, K}, NULL, false));
        rt_add_array(&all, true, RT_ARRAY(p, dv, wide, 4, {B, N, H, V}, NULL, false));
        rt_add_array(&all, true, RT_ARRAY(p, dg, wide, g_dims, {B, N, H, K}, NULL, false));
        rt_add_array(&all, true, RT_ARRAY(p, dbeta, wide, 3, {B, N, H}, NULL, p->beta == NULL));
        rt_add_array(&all, true, RT_ARRAY(p, ddt, wide, 3, {B, N, H}, NULL, p->dt == NULL));
        rt_add_array(&all, true, RT_ARRAY(p, dD, wide, 3, {B, N, H}, NULL, p->D == NULL));
        rt_add_array(&all, true, RT_ARRAY(p, dinitial_state, wide, 4, {B, H, K, V}, NULL, false));
        rt_add_array(&all, false, RT_ARRAY(p, dout, bytes, 4, {B, N, H, V}, p->dout_stride, false));
        rt_add_array(&all, false, RT_ARRAY(p, dfinal_state, wide, 4, {B, H, K, V}, NULL, true));
    } else {
        rt_add_array(&all, true, RT_ARRAY(p, out, bytes, 4, {B, N, H, V}, NULL, false));
        rt_add_array(&all, true, RT_ARRAY(p, final_state, wide, 4, {B, H, K, V}, NULL, false));
    }
    rt_add_array(&all, !backward, states);
    rt_add_array(&all, false, RT_ARRAY(p, q, bytes, 4, {B, N, G, K}, p->q_stride, false));
    rt_add_array(&all, false, RT_ARRAY(p, k, bytes, 4, {B, N, G, K}, p->k_stride, false));
    rt_add_array(&all, false, RT_ARRAY(p, v, bytes, 4, {B, N, H, V}, p->v_stride, false));
    rt_add_array(&all, false, RT_ARRAY(p, g, wide, g_dims, {B, N, H, K}, NULL, false));
    rt_add_array(&all, false, RT_ARRAY(p, beta, wide, 3, {B, N, H}, NULL, true));
    rt_add_array(&all, false, RT_ARRAY(p, dt, wide, 3, {B, N, H}, NULL, true));
    rt_add_array(&all, false, RT_ARRAY(p, D, wide, 1, {H}, NULL, true));
    rt_add_array(&all, false, RT_ARRAY(p, seq_idx, 4, 2, {B, N}, seq_idx, false));
    rt_add_array(&all, false, RT_ARRAY(p, initial_state, wide, 4, {B, H, K, V}, NULL, true));
    return rt_check_arrays(&all);
}

rt_status rt_selective_check_sizes(const rt_selective_params *p) {
    if (p == NULL) return rt_wrong(RT_BAD_POINTER, "p");
    if (!rt_is_dtype(p->dtype)) return RT_BAD_DTYPE;
    if (p->batch < 0 || p->num_tokens < 0 || p->num_channels < 1)
        return rt_wrong(RT_BAD_SHAPE, "batch, num_tokens or num_channels");
    if (p->state_dim < 1 || p->state_dim > RT_MAX_HEAD_DIM) return RT_BAD_HEAD_DIM;
    return p->seq_idx_batch_stride != 0 && p->seq_idx_batch_stride != p->num_tokens ? RT_BAD_MASK : RT_OK;
}

rt_status rt_selective_check(const rt_selective_params *p, bool backward) {
    const rt_status status = rt_selective_check_sizes(p);
    if (status != RT_OK) return status;
    const int64_t rows = p->batch, N = p->num_tokens, dim = p->num_channels, K = p->state_dim,
                  bytes = rt_element_bytes(p->dtype), wide = rt_state_bytes(p->dtype);
    const int64_t seq_idx[] = {p->seq_idx_batch_stride};
    const rt_array states = {"states", p->states, wide, 4, {rows, rt_scan_num_states(N), K, dim}, NULL, !backward};
    rt_arrays all = {0};
    if (backward) {
        rt_add_array(&all, true, RT_ARRAY(p, dx, wide, 3, {rows, N, dim}, NULL, false));
        rt_add_array(&all, true, RT_ARRAY(p, ddt, wide, 3, {rows, N, dim}, NULL, false));
        rt_add_array(&all, true, RT_ARRAY(p, dC, wide, 3, {rows, N, K}, NULL, false));
        rt_add_array(&all, true, RT_ARRAY(p, dB, wide, 3, {rows, N, K}, NULL, false));
        rt_add_array(&all, true, RT_ARRAY(p, dA, wide, 2, {K, dim}, NULL, false));
        rt_add_array(&all, true, RT_ARRAY(p, dD, wide, 1, {dim}, NULL, p->D == NULL));
        rt_add_array(&all, true, RT_ARRAY(p, dinitial_state, wide, 3, {rows, K, dim}, NULL, false));
        rt_add_array(&all, false, RT_ARRAY(p, dout, bytes, 3, {rows, N, dim}, p->dout_stride, false));
        rt_add_array(&all, false, RT_ARRAY(p, dfinal_state, wide, 3, {rows, K, dim}, NULL, true));
    } else {
        rt_add_array(&all, true, RT_ARRAY(p, out, bytes, 3, {rows, N, dim}, NULL, false));
        rt_add_array(&all, true, RT_ARRAY(p, final_state, wide, 3, {rows, K, dim}, NULL, false));
    }
    rt_add_array(&all, !backward, states);
    rt_add_array(&all, false, RT_ARRAY(p, x, bytes, 3, {rows, N, dim}, p->x_stride, false));
    rt_add_array(&all, false, RT_ARRAY(p, C, bytes, 3, {rows, N, K}, p->C_stride, false));
    rt_add_array(&all, false, RT_ARRAY(p, B, bytes, 3, {rows, N, K}, p->B_stride, false));
    rt_add_array(&all, false, RT_ARRAY(p, dt, wide, 3, {rows, N, dim}, NULL, false));
    rt_add_array(&all, false, RT_ARRAY(p, A, wide, 2, {K, dim}, NULL, false));
    rt_add_array(&all, false, RT_ARRAY(p, D, wide, 1, {dim}, NULL, true));
    rt_add_array(&all, false, RT_ARRAY(p, seq_idx, 4, 2, {rows, N}, seq_idx, false));
    rt_add_array(&all, false, RT_ARRAY(p, initial_state, wide, 3, {rows, K, dim}, NULL, true));
    return rt_check_arrays(&all);
}

rt_status rt_conv_check(const rt_conv_params *p, bool backward) {
    if (p == NULL) return rt_wrong(RT_BAD_POINTER, "p");
    if (!rt_is_dtype(p->dtype)) return RT_BAD_DTYPE;
    if (p->batch < 0 || p->num_tokens < 0 || p->num_channels < 0)
        return rt_wrong(RT_BAD_SHAPE, "batch, num_tokens or num_channels");
    if (p->width < 1 || p->width > RT_MAX_CONV_WIDTH) return RT_BAD_WIDTH;
    if (p->seq_idx_batch_stride != 0 && p->seq_idx_batch_stride != p->num_tokens) return RT_BAD_MASK;

    const int64_t B = p->batch, N = p->num_tokens, C = p->num_channels, K = p->width,
                  bytes = rt_element_bytes(p->dtype), wide = rt_state_bytes(p->dtype);
    const int64_t seq_idx[] = {p->seq_idx_batch_stride};
    rt_arrays all = {0};
    if (backward) {
        rt_add_array(&all, true, RT_ARRAY(p, dx, bytes, 3, {B, N, C}, NULL, false));
        rt_add_array(&all, true, RT_ARRAY(p, dweight, wide, 2, {C, K}, NULL, false));
        rt_add_array(&all, true, RT_ARRAY(p, dbias, wide, 1, {C}, NULL, p->bias == NULL));
        rt_add_array(&all, true, RT_ARRAY(p, dinitial_state, wide, 3, {B, K - 1, C}, NULL, false));
        rt_add_array(&all, false, RT_ARRAY(p, dy, bytes, 3, {B, N, C}, p->dy_stride, false));
        rt_add_array(&all, false, RT_ARRAY(p, dfinal_state, wide, 3, {B, K - 1, C}, NULL, true));
    } else {
        rt_add_array(&all, true, RT_ARRAY(p, y, bytes, 3, {B, N, C}, NULL, false));
        rt_add_array(&all, true, RT_ARRAY(p, final_state, wide, 3, {B, K - 1, C}, NULL, false));
    }
    rt_add_array(&all, false, RT_ARRAY(p, x, bytes, 3, {B, N, C}, p->x_stride, false));
    rt_add_array(&all, false, RT_ARRAY(p, weight, wide, 2, {C, K}, NULL, false));
    rt_add_array(&all, false, RT_ARRAY(p, bias, wide, 1, {C}, NULL, true));
    rt_add_array(&all, false, RT_ARRAY(p, seq_idx, 4, 2, {B, N}, seq_idx, false));
    rt_add_array(&all, false, RT_ARRAY(p, initial_state, wide, 3, {B, K - 1, C}, NULL, true));
    return rt_check_arrays(&all);
}
