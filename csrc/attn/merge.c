// The merge of a block that another kernel has computed: its preconditions, and rows in parallel.
#include "../arrays.h"
#include "../dtype.h"
#include "../isa/kernels.h"
#include "../parallel.h"
#include "attn.h"

rt_status rt_attn_check_merge(const rt_attn_merge_params *p) {
    if (p == NULL) return RT_BAD_POINTER;
    if (!rt_is_dtype(p->dtype)) return RT_BAD_DTYPE;
    const int64_t B = p->batch, N = p->num_queries, H = p->num_heads, D = p->v_head_dim;
    const int64_t part_batch = p->part_batch, M = p->part_queries;
    if (B < 0 || N < 0 || H < 1 || part_batch < 0 || M < 0) return RT_BAD_SHAPE;
    if (D < 1 || D > RT_MAX_HEAD_DIM) return RT_BAD_HEAD_DIM;
    const int64_t sizes[] = {part_batch, M, H, D}, of_out[] = {B, N, H, D};
    const int64_t strides[] = {p->part_stride[0], p->part_stride[1], p->part_stride[2], 1};
    const int64_t input = rt_element_bytes(p->dtype), state = rt_state_bytes(p->dtype);
    if (!rt_array_fits(4, sizes, strides, input) || !rt_array_fits(4, of_out, NULL, sizeof(double)) ||
        !rt_array_fits(3, sizes, NULL, sizeof(double)))
        return RT_TOO_LARGE;
    if (part_batch == 0 || M == 0) return RT_OK;
    if (part_batch * M > B * N) return RT_BAD_POSITIONS;
    if (p->rows == NULL &&
        ((part_batch > 1 && M > N) || p->first_row < 0 || p->first_row > B * N - (part_batch - 1) * N - M))
        return RT_BAD_POSITIONS;
    const void *const written = p->rounded != NULL ? p->rounded : p->out;
    const int64_t written_bytes = p->rounded != NULL ? input : state;
    if (!rt_points_to(p->lse, sizeof(double)) || !rt_points_to(written, written_bytes) ||
        !rt_points_to(p->out, state) || !rt_points_to(p->part, input) || !rt_points_to(p->part_lse, state) ||
        (uintptr_t)p->rows % sizeof(*p->rows) != 0)
        return RT_BAD_POINTER;
    const int64_t num_rows[] = {p->rows != NULL ? part_batch * M : 0};
    const int64_t of_rounded[] = {p->rounded != NULL ? B : 0, N, H, D};
    const rt_bytes arrays[] = {
        rt_bytes_of(p->lse, 3, of_out, NULL, sizeof(double)), rt_bytes_of(p->out, 4, of_out, NULL, state),
        rt_bytes_of(p->rounded, 4, of_rounded, NULL, input),  rt_bytes_of(p->part, 4, sizes, strides, input),
        rt_bytes_of(p->part_lse, 3, sizes, NULL, state),      rt_bytes_of(p->rows, 1, num_rows, NULL, sizeof(*p->rows)),
    };
    return rt_outputs_share_memory(arrays, 3, 6) ? RT_SHARED_MEMORY : RT_OK;
}

typedef struct merge_job {
    const rt_attn_merge_params *p;
    const rt_kernels *kernels;
    int64_t num_rows, rows_per_task;
} merge_job;

static void merge_task(void *ctx, int64_t task, int64_t worker) {
    (void)worker;
    const merge_job *j = ctx;
    const int64_t first = task * j->rows_per_task, last = first + j->rows_per_task;
    j->kernels->attn_merge(j->p, first, last < j->num_rows ? last : j->num_rows);
}

rt_status rt_attn_merge(const rt_attn_merge_params *p, rt_parallel parallel) {
    merge_job j = {.p = p};
    rt_status status = rt_attn_check_merge(p);
    if (status == RT_OK) status = rt_kernels_for(p->dtype, &j.kernels);
    if (status != RT_OK) return status;
    j.num_rows = p->part_batch * p->part_queries;
    for (int64_t i = 0, least = 0; p->rows != NULL && i < j.num_rows; i++) {
        if (p->rows[i] < least || p->rows[i] >= p->batch * p->num_queries) return RT_BAD_POSITIONS;
        least = p->rows[i] + 1;
    }
    j.rows_per_task = rt_rows_per_task(p->num_heads * p->v_head_dim);
    rt_for_each(parallel, rt_num_tasks(j.num_rows, j.rows_per_task), merge_task, &j);
    return RT_OK;
}
