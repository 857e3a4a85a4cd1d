// The convolution's entry points: they check, then hand channels to the workers.
#include "scan.h"

#include "../isa/kernels.h"
#include "../parallel.h"

enum { TASK_CHANNELS = 256 };

typedef struct job {
    const rt_conv_params *p;
    void (*kernel)(const rt_conv_params *p, int64_t first, int64_t last);
} job;

static void run_channels(const void *ctx, int64_t first, int64_t last) {
    const job *j = ctx;
    j->kernel(j->p, first, last);
}

static rt_status run_conv(const rt_conv_params *p, bool backward, rt_parallel parallel) {
    const rt_kernels *kernels;
    rt_status status = rt_conv_check(p, backward);
    if (status == RT_OK) status = rt_kernels_for(p->dtype, &kernels);
    if (status != RT_OK) return status;
    rt_conv_params params = *p;
    if (p->num_tokens == 0 && p->width == 1) params.batch = 0; // rows of nothing, of any number
    const job j = {&params, backward ? kernels->conv_backward : kernels->conv_forward};
    rt_for_rows(parallel, p->num_channels, TASK_CHANNELS, run_channels, &j);
    return RT_OK;
}

rt_status rt_conv_fwd(const rt_conv_params *p, rt_parallel parallel) { return run_conv(p, false, parallel); }
rt_status rt_conv_bwd(const rt_conv_params *p, rt_parallel parallel) { return run_conv(p, true, parallel); }
