// Every precondition of attention, which each call checks.
#include "attn.h"

#include "../arrays.h"
#include "../dtype.h"
#include "../seq/runs.h"

// An array (B, tokens, heads, dim).
typedef struct rows {
    const void *array;
    int64_t element_bytes, batch, num_tokens, num_heads, dim;
    const int64_t *stride; // batch, token, head
} rows;

// Whether the array fits, its pointer is usable, and, if it is an output, it does not overlap itself.
//   RT_TOO_LARGE, RT_BAD_POINTER, RT_BAD_STRIDE
static rt_status check_rows(rows x, bool is_output, rt_bytes *bytes) {
    const int64_t sizes[] = {x.batch, x.num_tokens, x.num_heads, x.dim};
    const int64_t strides[] = {x.stride[0], x.stride[1], x.stride[2], 1};
    if (!rt_array_fits(4, sizes, strides, x.element_bytes)) return RT_TOO_LARGE;
    const bool empty = x.batch == 0 || x.num_tokens == 0;
    if (!empty && !rt_points_to(x.array, x.element_bytes)) return RT_BAD_POINTER;
    *bytes = rt_bytes_of(x.array, 4, sizes, strides, x.element_bytes);
    return is_output && rt_overlaps(4, sizes, strides) ? RT_BAD_STRIDE : RT_OK;
}

static rows query_rows(const rt_attn_params *p, const void *array, int64_t element_bytes, int64_t dim,
                       const int64_t stride[3]) {
    return (rows){array, element_bytes, p->batch, p->num_queries, p->num_heads, dim, stride};
}

static rows key_rows(const rt_attn_params *p, const void *array, int64_t element_bytes, int64_t dim,
                     const int64_t stride[3]) {
    return (rows){array, element_bytes, p->batch, p->num_keys, p->num_kv_heads, dim, stride};
}

// A contiguous (B, tokens, heads, dim) of the dtype; an array of no bytes if it is NULL, which asks for none.
static rows rounded_rows(const rt_attn_params *p, const void *array, int64_t num_tokens, int64_t num_heads, int64_t dim,
                         int64_t stride[3]) {
    // Wraps only if the array that is rounded is too large, which is found first.
    stride[2] = dim, stride[1] = (int64_t)((uint64_t)num_heads * (uint64_t)dim);
    stride[0] = (int64_t)((uint64_t)num_tokens * (uint64_t)stride[1]);
    return (rows){array, rt_element_bytes(p->dtype), array != NULL ? p->batch : 0, num_tokens, num_heads, dim, stride};
}

// A contiguous (B, H, N): one number for each row of q.
static rows row_numbers(const void *array, int64_t element_bytes, int64_t batch, int64_t num_queries, int64_t num_heads,
                        int64_t stride[3]) {
    // Wraps only if the number of elements is too large by itself.
    stride[0] = (int64_t)((uint64_t)num_heads * (uint64_t)num_queries), stride[1] = 1, stride[2] = num_queries;
    return (rows){array, element_bytes, batch, num_queries, num_heads, 1, stride};
}

// begin and end: (B or 1, N).
static rows mask_rows(const rt_attn_params *p, const int32_t *bounds, int64_t stride[3]) {
    stride[0] = p->mask_batch_stride, stride[1] = 1, stride[2] = 0;
    return (rows){bounds, sizeof(*bounds), p->batch, p->num_queries, 1, 1, stride};
}

// key_begin and key_end: (B or 1, K); arrays of no bytes if there are none.
static rows key_mask_rows(const rt_attn_params *p, const int32_t *bounds, int64_t stride[3]) {
    stride[0] = p->key_mask_batch_stride, stride[1] = 1, stride[2] = 0;
    return (rows){bounds, sizeof(*bounds), bounds != NULL ? p->batch : 0, p->num_keys, 1, 1, stride};
}

// One int64 for each of n queries or batches; an array of no bytes where none is read.
static rows numbers_of(const int64_t *array, int64_t n, bool is_read) {
    static const int64_t stride[3] = {0, 1, 0};
    return (rows){array, sizeof(*array), is_read ? 1 : 0, n, 1, 1, stride};
}

rt_status rt_attn_check_sizes(const rt_attn_params *p) {
    if (p == NULL) return RT_BAD_POINTER;
    if (!rt_is_dtype(p->dtype)) return RT_BAD_DTYPE;
    if (p->batch < 0 || p->num_queries < 0 || p->num_keys < 0 || p->num_k_runs < 0) return RT_BAD_SHAPE;
    if (p->num_kv_heads < 1 || p->num_heads < 1 || p->num_heads % p->num_kv_heads != 0) return RT_BAD_HEADS;
    if (p->head_dim < 1 || p->head_dim > RT_MAX_HEAD_DIM || p->v_head_dim < 1 || p->v_head_dim > RT_MAX_HEAD_DIM)
        return RT_BAD_HEAD_DIM;
    const int64_t rows[] = {p->batch, p->num_heads, p->num_queries};
    return rt_array_fits(3, rows, NULL, rt_state_bytes(p->dtype)) ? RT_OK : RT_TOO_LARGE;
}

// Checks what forward and backward share; bytes: of lse, the only output among them, then of the inputs.
enum { NUM_COMMON = 10 };
static rt_status check(const rt_attn_params *p, rt_bytes bytes[NUM_COMMON]) {
    const rt_status sizes = rt_attn_check_sizes(p);
    if (sizes != RT_OK) return sizes;
    if (!rt_is_finite(p->dtype, p->scale) || !rt_is_softcap(p->dtype, p->softcap)) return RT_BAD_SCALE;
    if (!(p->dropout >= 0 && p->dropout <= 1)) return RT_BAD_PROBABILITY;
    if (p->mask_batch_stride != 0 && p->mask_batch_stride != p->num_queries) return RT_BAD_MASK;
    const bool two_sides = p->key_begin != NULL;
    if (two_sides != (p->key_end != NULL)) return RT_BAD_MASK;
    if (two_sides && p->key_mask_batch_stride != 0 && p->key_mask_batch_stride != p->num_keys) return RT_BAD_MASK;
    int64_t mask[3], key_mask[3], numbers[3];
    const int64_t input = rt_element_bytes(p->dtype), lse = p->lse_f64 ? 8 : rt_state_bytes(p->dtype);
    const rows arrays[NUM_COMMON] = {
        row_numbers(p->lse, lse, p->batch, p->num_queries, p->num_heads, numbers),
        query_rows(p, p->q, input, p->head_dim, p->q_stride),
        key_rows(p, p->k, input, p->head_dim, p->k_stride),
        key_rows(p, p->v, input, p->v_head_dim, p->v_stride),
        mask_rows(p, p->begin, mask),
        mask_rows(p, p->end, mask),
        key_mask_rows(p, p->key_begin, key_mask),
        key_mask_rows(p, p->key_end, key_mask),
        numbers_of(p->q_positions, p->num_queries, p->dropout > 0 || two_sides),
        numbers_of(p->dropout_rows, p->batch, p->dropout > 0),
    };
    for (int i = 0; i < NUM_COMMON; i++) {
        const rt_status status = check_rows(arrays[i], false, &bytes[i]);
        if (status != RT_OK) return status;
    }
    return rt_runs_check(p->k_runs, p->num_k_runs, p->num_keys);
}

rt_status rt_attn_check_fwd(const rt_attn_params *p) {
    enum { OWN = 2, OUTPUTS = OWN + 1, ALL = OWN + NUM_COMMON };
    rt_bytes bytes[ALL];
    rt_status status = check(p, bytes + OWN);
    if (status != RT_OK) return status;
    int64_t stride[3];
    const rows arrays[OWN] = {
        query_rows(p, p->out, rt_state_bytes(p->dtype), p->v_head_dim, p->out_stride),
        rounded_rows(p, p->rounded_out, p->num_queries, p->num_heads, p->v_head_dim, stride),
    };
    for (int i = 0; i < OWN; i++) {
        status = check_rows(arrays[i], true, &bytes[i]);
        if (status != RT_OK) return status;
    }
    return rt_outputs_share_memory(bytes, OUTPUTS, ALL) ? RT_SHARED_MEMORY : RT_OK;
}

// Exact, because no key is in two runs.
static int64_t keys_in_runs(const rt_attn_params *p) {
    int64_t num_keys = 0;
    for (int64_t i = 0; i < p->num_k_runs; i++) num_keys += p->k_runs[i].length;
    return num_keys;
}

rt_status rt_attn_check_bwd(const rt_attn_params *p) {
    enum { OUTPUTS = 5, OWN = OUTPUTS + 2, ALL = OWN + NUM_COMMON };
    rt_bytes bytes[ALL];
    rt_status status = check(p, bytes + OWN);
    if (status != RT_OK) return status;
    if (p->fresh && keys_in_runs(p) != p->num_keys) return RT_BAD_FRESH;
    const bool rounds = p->rounded_dk != NULL;
    if (rounds != (p->rounded_dv != NULL) || (rounds && !p->fresh)) return RT_BAD_FRESH;
    int64_t numbers[3], dk[3], dv[3];
    const int64_t input = rt_element_bytes(p->dtype), state = rt_state_bytes(p->dtype);
    const rows arrays[OWN] = {
        query_rows(p, p->dq, state, p->head_dim, p->dq_stride),
        key_rows(p, p->dk, state, p->head_dim, p->dk_stride),
        key_rows(p, p->dv, state, p->v_head_dim, p->dv_stride),
        rounded_rows(p, p->rounded_dk, p->num_keys, p->num_kv_heads, p->head_dim, dk),
        rounded_rows(p, p->rounded_dv, p->num_keys, p->num_kv_heads, p->v_head_dim, dv),
        query_rows(p, p->dout, input, p->v_head_dim, p->dout_stride),
        row_numbers(p->delta, state, p->batch, p->num_queries, p->num_heads, numbers),
    };
    for (int i = 0; i < OWN; i++) {
        status = check_rows(arrays[i], i < OUTPUTS, &bytes[i]);
        if (status != RT_OK) return status;
    }
    return rt_outputs_share_memory(bytes, OUTPUTS, ALL) ? RT_SHARED_MEMORY : RT_OK;
}

rt_status rt_attn_check_delta(const rt_attn_delta_params *p, const void *dout, const void *out, const double *dlse,
                              const void *delta) {
    enum { OUTPUTS = 1, ALL = 4 };
    if (p == NULL) return RT_BAD_POINTER;
    if (!rt_is_dtype(p->dtype)) return RT_BAD_DTYPE;
    if (p->batch < 0 || p->num_queries < 0 || p->num_heads < 1) return RT_BAD_SHAPE;
    if (p->v_head_dim < 1 || p->v_head_dim > RT_MAX_HEAD_DIM) return RT_BAD_HEAD_DIM;
    int64_t numbers[3];
    const int64_t B = p->batch, N = p->num_queries, H = p->num_heads, input = rt_element_bytes(p->dtype);
    const rows arrays[ALL] = {
        row_numbers(delta, rt_state_bytes(p->dtype), B, N, H, numbers),
        row_numbers(dlse, sizeof(*dlse), B, N, H, numbers),
        {dout, input, B, N, H, p->v_head_dim, p->dout_stride},
        {out, input, B, N, H, p->v_head_dim, p->out_stride},
    };
    rt_bytes bytes[ALL];
    for (int i = 0; i < ALL; i++) {
        const rt_status status = check_rows(arrays[i], i < OUTPUTS, &bytes[i]);
        if (status != RT_OK) return status;
    }
    return rt_outputs_share_memory(bytes, OUTPUTS, ALL) ? RT_SHARED_MEMORY : RT_OK;
}
