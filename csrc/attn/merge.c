// The merge of a block that another kernel has computed: its preconditions, and rows in parallel.
#include "../arrays.h"
#include "../dtype.h"
#include "../isa/kernels.h"
#include "../parallel.h"
#include "attn.h"

rt_status rt_attn_check_merge(const rt_attn_merge_params *p) {
    if (p == NULL) return rt_wrong(RT_BAD_POINTER, "p");
    if (!rt_is_dtype(p->dtype)) return RT_BAD_DTYPE;
    const int64_t B = p->batch, N = p->num_queries, H = p->num_heads, D = p->v_head_dim;
    const int64_t part_batch = p->part_batch, M = p->part_queries;
    if (B < 0 || N < 0 || H < 1 || part_batch < 0 || M < 0)
        return rt_wrong(RT_BAD_SHAPE, "batch, num_queries, num_heads, part_batch or part_queries");
    if (D < 1 || D > RT_MAX_HEAD_DIM) return RT_BAD_HEAD_DIM;
    const int64_t sizes[] = {part_batch, M, H, D}, of_out[] = {B, N, H, D};
    const int64_t strides[] = {p->part_stride[0], p->part_stride[1], p->part_stride[2], 1};
    const int64_t input = rt_element_bytes(p->dtype), state = rt_state_bytes(p->dtype);
    if (!rt_array_fits(4, sizes, strides, input) || !rt_array_fits(4, of_out, NULL, sizeof(double)) ||
        !rt_array_fits(3, sizes, NULL, sizeof(double)))
        return rt_wrong(RT_TOO_LARGE, "part, out or lse");
    if (part_batch == 0 || M == 0) return RT_OK;
    if (part_batch * M > B * N) return rt_wrong(RT_BAD_POSITIONS, "part_batch or part_queries");
    if (p->rows == NULL &&
        ((part_batch > 1 && M > N) || p->first_row < 0 || p->first_row > B * N - (part_batch - 1) * N - M))
        return rt_wrong(RT_BAD_POSITIONS, "first_row");
    rt_arrays all = {0};
    rt_add_array(&all, true, RT_ARRAY(p, lse, sizeof(double), 3, {B, H, N}, NULL, false));
    rt_add_array(&all, true, RT_ARRAY(p, out, state, 4, {B, N, H, D}, NULL, false));
    rt_add_array(&all, true, RT_ARRAY(p, rounded, input, 4, {B, N, H, D}, NULL, true));
    rt_add_array(&all, false, RT_ARRAY(p, part, input, 4, {part_batch, M, H, D}, p->part_stride, false));
    rt_add_array(&all, false, RT_ARRAY(p, part_lse, state, 3, {part_batch, H, M}, NULL, false));
    rt_add_array(&all, false, RT_ARRAY(p, rows, sizeof(*p->rows), 1, {part_batch * M}, NULL, true));
    return rt_check_arrays(&all);
}

typedef struct merge_job {
    const rt_attn_merge_params *p;
    const rt_kernels *kernels;
} merge_job;

static void merge_rows(const void *ctx, int64_t first, int64_t last) {
    const merge_job *j = ctx;
    j->kernels->attn_merge(j->p, first, last);
}

rt_status rt_attn_merge(const rt_attn_merge_params *p, rt_parallel parallel) {
    merge_job j = {.p = p};
    rt_status status = rt_attn_check_merge(p);
    if (status == RT_OK) status = rt_kernels_for(p->dtype, &j.kernels);
    if (status != RT_OK) return status;
    const int64_t num_rows = p->part_batch * p->part_queries;
    for (int64_t i = 0, least = 0; p->rows != NULL && i < num_rows; i++) {
        if (p->rows[i] < least || p->rows[i] >= p->batch * p->num_queries) return rt_wrong(RT_BAD_POSITIONS, "rows");
        least = p->rows[i] + 1;
    }
    rt_for_rows(parallel, num_rows, rt_rows_per_task(p->num_heads * p->v_head_dim), merge_rows, &j);
    return RT_OK;
}
