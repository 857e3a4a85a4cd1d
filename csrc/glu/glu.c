// The gated MLP's entry points: they check, then hand rows to the workers.
#include "glu.h"
#include "../arrays.h"
#include "../dtype.h"
#include "../isa/kernels.h"
#include "../parallel.h"

typedef struct glu_job {
    const rt_glu_params *p;
    const rt_glu_arrays *arrays;
    const rt_kernels *kernels;
    int64_t rows_per_task;
} glu_job;

static void run_task(void *ctx, int64_t task, int64_t worker) {
    (void)worker;
    const glu_job *job = ctx;
    const int64_t first = task * job->rows_per_task, last = first + job->rows_per_task;
    job->kernels->glu(job->p, job->arrays, first, last < job->p->num_rows ? last : job->p->num_rows);
}

// One array of rows: it fits, its pointer is usable, and as an output it does not overlap itself.
static rt_status check_rows(const rt_glu_params *p, const void *array, int64_t stride, bool is_output,
                            rt_bytes *bytes) {
    const int64_t sizes[] = {p->num_rows, p->num_cols}, strides[] = {stride, 1};
    const int64_t element_bytes = rt_element_bytes(p->dtype);
    if (!rt_array_fits(2, sizes, strides, element_bytes)) return RT_TOO_LARGE;
    if (is_output && rt_overlaps(2, sizes, strides)) return RT_BAD_STRIDE;
    *bytes = rt_bytes_of(array, 2, sizes, strides, element_bytes);
    const bool empty = p->num_rows == 0 || p->num_cols == 0;
    return empty || rt_points_to(array, element_bytes) ? RT_OK : RT_BAD_POINTER;
}

rt_status rt_glu_check(const rt_glu_params *p, const void *gate, const void *up, const void *prod, bool backward) {
    if (p == NULL) return RT_BAD_POINTER;
    if (!rt_is_dtype(p->dtype)) return RT_BAD_DTYPE;
    switch (p->kind) {
    case RT_GLU_SILU:
    case RT_GLU_GELU:
    case RT_GLU_GELU_TANH:
    case RT_GLU_RELU:
        break;
    default:
        return RT_BAD_KIND;
    }
    if (p->num_rows < 0 || p->num_cols < 0) return RT_BAD_SHAPE;
    rt_bytes bytes[3];
    rt_status status = check_rows(p, prod, p->prod_stride, true, &bytes[0]);
    if (status == RT_OK) status = check_rows(p, gate, p->gate_stride, backward, &bytes[1]);
    if (status == RT_OK) status = check_rows(p, up, p->up_stride, backward, &bytes[2]);
    if (status != RT_OK) return status;
    return rt_outputs_share_memory(bytes, backward ? 3 : 1, 3) ? RT_SHARED_MEMORY : RT_OK;
}

static rt_status run_glu(const rt_glu_params *p, const rt_glu_arrays *arrays, bool backward, rt_parallel parallel) {
    const rt_kernels *kernels;
    rt_status status = rt_glu_check(p, arrays->gate, arrays->up, arrays->prod, backward);
    if (status == RT_OK) status = rt_kernels_for(p->dtype, &kernels);
    if (status != RT_OK || p->num_rows == 0 || p->num_cols == 0) return status;

    glu_job job = {p, arrays, kernels, rt_rows_per_task(p->num_cols)};
    rt_for_each(parallel, rt_num_tasks(p->num_rows, job.rows_per_task), run_task, &job);
    return RT_OK;
}

rt_status rt_glu_fwd(const rt_glu_params *p, const void *gate, const void *up, void *prod, rt_parallel parallel) {
    const rt_glu_arrays arrays = {.gate = gate, .up = up, .prod = prod};
    return run_glu(p, &arrays, false, parallel);
}

rt_status rt_glu_bwd(const rt_glu_params *p, void *gate, void *up, void *dprod, rt_parallel parallel) {
    const rt_glu_arrays arrays = {.gate = gate, .up = up, .dprod = dprod, .dgate = gate, .dup = up, .prod = dprod};
    return run_glu(p, &arrays, true, parallel);
}
