// Every precondition of recurrences and convolutions; the entry points check them once.
#include "scan.h"

#include "../arrays.h"
#include "../dtype.h"

// An array of one call: contiguous if stride is NULL, else `stride` counts the steps of all dims but the last.
typedef struct array {
    const void *data;
    int64_t element_bytes;
    int64_t ndim, sizes[5];
    const int64_t *stride;
    bool is_optional;
} array;

enum { MAX_ARRAYS = 24 };

// Outputs are listed first.
typedef struct arrays {
    int64_t num_outputs, count;
    array list[MAX_ARRAYS];
} arrays;

static void add(arrays *all, bool is_output, array x) {
    all->list[all->count++] = x;
    if (is_output) all->num_outputs = all->count;
}

// RT_TOO_LARGE, RT_BAD_POINTER, RT_SHARED_MEMORY
static rt_status check_arrays(const arrays *all) {
    rt_bytes bytes[MAX_ARRAYS];
    for (int64_t i = 0; i < all->count; i++) {
        const array *x = &all->list[i];
        int64_t strides[5];
        for (int64_t d = 0; d < x->ndim; d++)
            strides[d] = x->stride == NULL || d == x->ndim - 1 ? 1 : x->stride[d];
        const int64_t *steps = x->stride == NULL ? NULL : strides;
        if (!rt_array_fits(x->ndim, x->sizes, steps, x->element_bytes)) return RT_TOO_LARGE;
        bool empty = x->is_optional && x->data == NULL;
        for (int64_t d = 0; d < x->ndim; d++) empty = empty || x->sizes[d] == 0;
        if (!empty && !rt_points_to(x->data, x->element_bytes)) return RT_BAD_POINTER;
        bytes[i] = rt_bytes_of(x->data, x->ndim, x->sizes, steps, x->element_bytes);
        if (empty) bytes[i].end = bytes[i].begin;
    }
    return rt_outputs_share_memory(bytes, all->num_outputs, all->count) ? RT_SHARED_MEMORY : RT_OK;
}

rt_status rt_scan_check(const rt_scan_params *p, bool backward) {
    if (p == NULL) return RT_BAD_POINTER;
    if (!rt_is_dtype(p->dtype)) return RT_BAD_DTYPE;
    if (p->batch < 0 || p->num_tokens < 0) return RT_BAD_SHAPE;
    if (p->num_kv_heads < 1 || p->num_heads < 1 || p->num_heads % p->num_kv_heads != 0) return RT_BAD_HEADS;
    if (p->head_dim < 1 || p->head_dim > RT_MAX_HEAD_DIM || p->v_head_dim < 1 ||
        p->v_head_dim > RT_MAX_HEAD_DIM)
        return RT_BAD_HEAD_DIM;
    if (!rt_is_finite(p->dtype, p->scale)) return RT_BAD_SCALE;
    if (p->resets_batch_stride != 0 && p->resets_batch_stride != p->num_tokens) return RT_BAD_MASK;
    if (p->beta != NULL && (p->step != NULL || p->skip != NULL)) return RT_BAD_POINTER;

    const int64_t B = p->batch, N = p->num_tokens, H = p->num_heads, G = p->num_kv_heads, D = p->head_dim,
                  Dv = p->v_head_dim, bytes = rt_element_bytes(p->dtype), wide = rt_state_bytes(p->dtype);
    const int64_t decay_dims = p->channel_decay ? 4 : 3, resets[] = {p->resets_batch_stride};
    const array states = {p->states, wide, 5, {B, H, rt_scan_num_states(N), D, Dv}, NULL, !backward};
    arrays all = {0};
    if (backward) {
        add(&all, true, (array){p->dq, wide, 4, {B, N, G, D}, NULL, false});
        add(&all, true, (array){p->dk, wide, 4, {B, N, G, D}, NULL, false});
        add(&all, true, (array){p->dv, wide, 4, {B, N, H, Dv}, NULL, false});
        add(&all, true, (array){p->ddecay, wide, decay_dims, {B, N, H, D}, NULL, false});
        add(&all, true, (array){p->dbeta, wide, 3, {B, N, H}, NULL, p->beta == NULL});
        add(&all, true, (array){p->dstep, wide, 3, {B, N, H}, NULL, p->step == NULL});
        add(&all, true, (array){p->dskip, wide, 3, {B, N, H}, NULL, p->skip == NULL});
        add(&all, true, (array){p->dinitial_state, wide, 4, {B, H, D, Dv}, NULL, false});
        add(&all, false, (array){p->dout, bytes, 4, {B, N, H, Dv}, p->dout_stride, false});
        add(&all, false, (array){p->dfinal_state, wide, 4, {B, H, D, Dv}, NULL, true});
    } else {
        add(&all, true, (array){p->out, bytes, 4, {B, N, H, Dv}, NULL, false});
        add(&all, true, (array){p->final_state, wide, 4, {B, H, D, Dv}, NULL, false});
    }
    add(&all, !backward, states);
    add(&all, false, (array){p->q, bytes, 4, {B, N, G, D}, p->q_stride, false});
    add(&all, false, (array){p->k, bytes, 4, {B, N, G, D}, p->k_stride, false});
    add(&all, false, (array){p->v, bytes, 4, {B, N, H, Dv}, p->v_stride, false});
    add(&all, false, (array){p->decay, wide, decay_dims, {B, N, H, D}, NULL, false});
    add(&all, false, (array){p->beta, wide, 3, {B, N, H}, NULL, true});
    add(&all, false, (array){p->step, wide, 3, {B, N, H}, NULL, true});
    add(&all, false, (array){p->skip, wide, 1, {H}, NULL, true});
    add(&all, false, (array){p->resets, 1, 2, {B, N}, resets, false});
    add(&all, false, (array){p->initial_state, wide, 4, {B, H, D, Dv}, NULL, true});
    return check_arrays(&all);
}

rt_status rt_selective_check(const rt_selective_params *p, bool backward) {
    if (p == NULL) return RT_BAD_POINTER;
    if (!rt_is_dtype(p->dtype)) return RT_BAD_DTYPE;
    if (p->batch < 0 || p->num_tokens < 0 || p->num_channels < 1) return RT_BAD_SHAPE;
    if (p->state_dim < 1 || p->state_dim > RT_MAX_HEAD_DIM) return RT_BAD_HEAD_DIM;
    if (p->resets_batch_stride != 0 && p->resets_batch_stride != p->num_tokens) return RT_BAD_MASK;

    const int64_t B = p->batch, N = p->num_tokens, C = p->num_channels, K = p->state_dim,
                  bytes = rt_element_bytes(p->dtype), wide = rt_state_bytes(p->dtype);
    const int64_t resets[] = {p->resets_batch_stride};
    const array states = {p->states, wide, 4, {B, rt_scan_num_states(N), K, C}, NULL, !backward};
    arrays all = {0};
    if (backward) {
        add(&all, true, (array){p->dx, wide, 3, {B, N, C}, NULL, false});
        add(&all, true, (array){p->dstep, wide, 3, {B, N, C}, NULL, false});
        add(&all, true, (array){p->dq, wide, 3, {B, N, K}, NULL, false});
        add(&all, true, (array){p->dk, wide, 3, {B, N, K}, NULL, false});
        add(&all, true, (array){p->drate, wide, 2, {K, C}, NULL, false});
        add(&all, true, (array){p->dskip, wide, 1, {C}, NULL, p->skip == NULL});
        add(&all, true, (array){p->dinitial_state, wide, 3, {B, K, C}, NULL, false});
        add(&all, false, (array){p->dout, bytes, 3, {B, N, C}, p->dout_stride, false});
        add(&all, false, (array){p->dfinal_state, wide, 3, {B, K, C}, NULL, true});
    } else {
        add(&all, true, (array){p->out, bytes, 3, {B, N, C}, NULL, false});
        add(&all, true, (array){p->final_state, wide, 3, {B, K, C}, NULL, false});
    }
    add(&all, !backward, states);
    add(&all, false, (array){p->x, bytes, 3, {B, N, C}, p->x_stride, false});
    add(&all, false, (array){p->q, bytes, 3, {B, N, K}, p->q_stride, false});
    add(&all, false, (array){p->k, bytes, 3, {B, N, K}, p->k_stride, false});
    add(&all, false, (array){p->step, wide, 3, {B, N, C}, NULL, false});
    add(&all, false, (array){p->rate, wide, 2, {K, C}, NULL, false});
    add(&all, false, (array){p->skip, wide, 1, {C}, NULL, true});
    add(&all, false, (array){p->resets, 1, 2, {B, N}, resets, false});
    add(&all, false, (array){p->initial_state, wide, 3, {B, K, C}, NULL, true});
    return check_arrays(&all);
}

rt_status rt_conv_check(const rt_conv_params *p, bool backward) {
    if (p == NULL) return RT_BAD_POINTER;
    if (!rt_is_dtype(p->dtype)) return RT_BAD_DTYPE;
    if (p->batch < 0 || p->num_tokens < 0 || p->num_channels < 0) return RT_BAD_SHAPE;
    if (p->width < 1 || p->width > RT_MAX_CONV_WIDTH) return RT_BAD_WIDTH;
    if (p->resets_batch_stride != 0 && p->resets_batch_stride != p->num_tokens) return RT_BAD_MASK;

    const int64_t B = p->batch, N = p->num_tokens, C = p->num_channels, K = p->width,
                  bytes = rt_element_bytes(p->dtype), wide = rt_state_bytes(p->dtype);
    const int64_t resets[] = {p->resets_batch_stride};
    arrays all = {0};
    if (backward) {
        add(&all, true, (array){p->dx, bytes, 3, {B, N, C}, NULL, false});
        add(&all, true, (array){p->dweight, wide, 2, {C, K}, NULL, false});
        add(&all, true, (array){p->dbias, wide, 1, {C}, NULL, p->bias == NULL});
        add(&all, true, (array){p->dinitial_state, wide, 3, {B, K - 1, C}, NULL, false});
        add(&all, false, (array){p->dy, bytes, 3, {B, N, C}, p->dy_stride, false});
        add(&all, false, (array){p->dfinal_state, wide, 3, {B, K - 1, C}, NULL, true});
    } else {
        add(&all, true, (array){p->y, bytes, 3, {B, N, C}, NULL, false});
        add(&all, true, (array){p->final_state, wide, 3, {B, K - 1, C}, NULL, false});
    }
    add(&all, false, (array){p->x, bytes, 3, {B, N, C}, p->x_stride, false});
    add(&all, false, (array){p->weight, wide, 2, {C, K}, NULL, false});
    add(&all, false, (array){p->bias, wide, 1, {C}, NULL, true});
    add(&all, false, (array){p->resets, 1, 2, {B, N}, resets, false});
    add(&all, false, (array){p->initial_state, wide, 3, {B, K - 1, C}, NULL, true});
    return check_arrays(&all);
}
