// The boundary of the multiply-add peak: one task a worker.
#include "../isa/kernels.h"
#include "../parallel.h"

typedef struct multiply_add_job {
    const rt_kernels *kernels;
    int64_t iterations;
} multiply_add_job;

static void run_task(void *ctx, int64_t task, int64_t worker) {
    (void)task, (void)worker;
    const multiply_add_job *job = ctx;
    job->kernels->multiply_add(job->iterations);
}

rt_status rt_multiply_add(int64_t iterations, double *flops, rt_parallel parallel) {
    if (iterations < 0) return RT_BAD_SHAPE;
    if (flops == NULL) return RT_BAD_POINTER;
    multiply_add_job job = {.iterations = iterations};
    const rt_status status = rt_kernels_for(RT_F32, &job.kernels);
    if (status != RT_OK) return status;
    const int64_t num_workers = parallel.run == NULL ? 1 : parallel.num_workers;
    rt_for_each(parallel, num_workers, run_task, &job);
    *flops = (double)iterations * (double)num_workers * (double)job.kernels->multiply_add_flops;
    return RT_OK;
}
