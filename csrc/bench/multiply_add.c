// The entry point of the multiply-add peak: one task per worker.
#include "multiply_add.h"
#include "../arrays.h"
#include "../isa/kernels.h"
#include "../parallel.h"

typedef struct multiply_add_job {
    const rt_multiply_add_kernel *kernel;
    int64_t iterations;
} multiply_add_job;

static void run_task(void *ctx, int64_t task, int64_t worker) {
    (void)task, (void)worker;
    const multiply_add_job *job = ctx;
    job->kernel->run(job->iterations);
}

static const rt_multiply_add_kernel *kernel_for(rt_isa isa) {
    switch (isa) {
    case RT_ISA_GENERIC:
        return &rt_multiply_add_generic;
#if defined(__x86_64__)
    case RT_ISA_AVX2:
        return &rt_multiply_add_avx2;
    case RT_ISA_AVX512:
    case RT_ISA_AVX512_BF16: // adds no f32 instruction
        return &rt_multiply_add_avx512;
#endif
    default:
        return NULL;
    }
}

rt_status rt_multiply_add(rt_isa isa, int64_t iterations, double *flops, rt_parallel parallel) {
    if (iterations < 0) return RT_BAD_SHAPE;
    if (iterations > INT64_C(1) << 32) return RT_TOO_LARGE;
    if (!rt_points_to(flops, sizeof(*flops))) return RT_BAD_POINTER;
    multiply_add_job job = {kernel_for(isa), iterations};
    if (job.kernel == NULL) return RT_BAD_ISA;
    if (!rt_cpu_has(isa)) return RT_ISA_MISSING;
    const int64_t num_workers = rt_num_workers(parallel);
    rt_for_each(parallel, num_workers, run_task, &job);
    *flops = (double)iterations * (double)num_workers * (double)job.kernel->flops;
    return RT_OK;
}
