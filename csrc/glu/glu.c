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
} glu_job;

static void run_rows(const void *ctx, int64_t first, int64_t last) {
    const glu_job *job = ctx;
    job->kernels->glu(job->p, job->arrays, first, last);
}

rt_status rt_glu_check(const rt_glu_params *p, const void *gate, const void *up, const void *prod, bool backward) {
    if (p == NULL) return rt_wrong(RT_BAD_POINTER, "p");
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
    if (p->num_rows < 0 || p->num_cols < 0) return rt_wrong(RT_BAD_SHAPE, "num_rows or num_cols");
    const int64_t element_bytes = rt_element_bytes(p->dtype), rows = p->num_rows, cols = p->num_cols;
    rt_arrays all = {0};
    rt_add_array(&all, true, (rt_array){"prod", prod, element_bytes, 2, {rows, cols}, &p->prod_stride, false});
    rt_add_array(&all, backward, (rt_array){"gate", gate, element_bytes, 2, {rows, cols}, &p->gate_stride, false});
    rt_add_array(&all, backward, (rt_array){"up", up, element_bytes, 2, {rows, cols}, &p->up_stride, false});
    return rt_check_arrays(&all);
}

static rt_status run_glu(const rt_glu_params *p, const rt_glu_arrays *arrays, bool backward, rt_parallel parallel) {
    const rt_kernels *kernels;
    rt_status status = rt_glu_check(p, arrays->gate, arrays->up, arrays->prod, backward);
    if (status == RT_OK) status = rt_kernels_for(p->dtype, &kernels);
    if (status != RT_OK || p->num_rows == 0 || p->num_cols == 0) return status;

    const glu_job job = {p, arrays, kernels};
    rt_for_rows(parallel, p->num_rows, rt_rows_per_task(p->num_cols), run_rows, &job);
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
