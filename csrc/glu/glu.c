// The gated MLP's entry points: they check, then hand rows to the workers.
#include "glu.h"
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

static bool rows_overlap(const rt_glu_params *p, int64_t stride) {
    return p->num_rows > 1 && stride < p->num_cols;
}

rt_status rt_glu_check(const rt_glu_params *p, const void *gate, const void *up, const void *prod,
                       bool backward) {
    if (p->dtype != RT_F64 && p->dtype != RT_F32 && p->dtype != RT_BF16 && p->dtype != RT_F16)
        return RT_BAD_DTYPE;
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
    if (rows_overlap(p, p->prod_stride)) return RT_BAD_STRIDE;
    if (backward && (rows_overlap(p, p->gate_stride) || rows_overlap(p, p->up_stride))) return RT_BAD_STRIDE;
    const bool empty = p->num_rows == 0 || p->num_cols == 0;
    return !empty && (gate == NULL || up == NULL || prod == NULL) ? RT_BAD_POINTER : RT_OK;
}

static rt_status run_glu(const rt_glu_params *p, const rt_glu_arrays *arrays, bool backward,
                         rt_parallel parallel) {
    const rt_kernels *kernels;
    rt_status status = rt_glu_check(p, arrays->gate, arrays->up, arrays->prod, backward);
    if (status == RT_OK) status = rt_kernels_for(p->dtype, &kernels);
    if (status != RT_OK || p->num_rows == 0 || p->num_cols == 0) return status;

    glu_job job = {p, arrays, kernels, rt_rows_per_task(p->num_cols)};
    rt_for_each(parallel, rt_num_tasks(p->num_rows, job.rows_per_task), run_task, &job);
    return RT_OK;
}

rt_status rt_glu_fwd(const rt_glu_params *p, const void *gate, const void *up, void *prod,
                     rt_parallel parallel) {
    const rt_glu_arrays arrays = {.gate = gate, .up = up, .prod = prod};
    return run_glu(p, &arrays, false, parallel);
}

rt_status rt_glu_bwd(const rt_glu_params *p, void *gate, void *up, void *dprod, rt_parallel parallel) {
    const rt_glu_arrays arrays = {
        .gate = gate, .up = up, .dprod = dprod, .dgate = gate, .dup = up, .prod = dprod};
    return run_glu(p, &arrays, true, parallel);
}
