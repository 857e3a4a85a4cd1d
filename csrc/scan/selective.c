// The selective scan's entry points: they check, find the chunks of every row, and hand channels to the workers.
#include "scan.h"

#include "../arrays.h"
#include "../isa/kernels.h"
#include "../parallel.h"

typedef struct job {
    const rt_selective_params *p;
    bool backward;
    const rt_kernels *kernels;
    rt_scan_space space; // a turn for each task
} job;

static rt_status lay_out(job *j, int64_t num_workers) {
    const rt_selective_params *p = j->p;
    const rt_status status = rt_kernels_for(p->dtype, &j->kernels);
    if (status != RT_OK) return status;
    return rt_scan_space_of(p->batch, p->num_tokens, p->seq_idx_batch_stride,
                            rt_num_tasks(p->num_channels, RT_SELECTIVE_CHANNELS),
                            j->kernels->selective_scratch_bytes(p, j->backward), num_workers, &j->space);
}

static int64_t workspace_bytes(const rt_selective_params *p, bool backward, int64_t num_workers) {
    job j = {.p = p, .backward = backward};
    if (num_workers < 1 || rt_selective_check_sizes(p) != RT_OK) return 0;
    return lay_out(&j, num_workers) == RT_OK ? j.space.num_bytes : 0;
}

int64_t rt_selective_fwd_workspace_bytes(const rt_selective_params *p, int64_t num_workers) {
    return workspace_bytes(p, false, num_workers);
}

int64_t rt_selective_bwd_workspace_bytes(const rt_selective_params *p, int64_t num_workers) {
    return workspace_bytes(p, true, num_workers);
}

static void run_task(void *ctx, int64_t task, int64_t worker) {
    const job *j = ctx;
    const int64_t first = task * RT_SELECTIVE_CHANNELS, end = first + RT_SELECTIVE_CHANNELS,
                  last = end < j->p->num_channels ? end : j->p->num_channels;
    char *scratch = j->space.scratch + worker * j->space.scratch_bytes;
    const rt_scan_turn turn = {task == 0 ? NULL : j->space.turns + task - 1, j->space.turns + task};
    if (j->backward)
        j->kernels->selective_backward(j->p, &j->space.rows, first, last, &turn, scratch);
    else
        j->kernels->selective_forward(j->p, &j->space.rows, first, last, scratch);
}

static rt_status run_selective(const rt_selective_params *p, bool backward, rt_parallel parallel) {
    job j = {.p = p, .backward = backward};
    rt_status status = rt_selective_check(p, backward);
    if (status == RT_OK) status = lay_out(&j, rt_num_workers(parallel));
    if (status == RT_OK)
        status = rt_scan_space_open(&j.space, p->workspace, p->workspace_bytes, p->seq_idx, p->num_tokens);
    if (status == RT_OK) rt_for_each(parallel, j.space.num_turns, run_task, &j);
    return status;
}

rt_status rt_selective_fwd(const rt_selective_params *p, rt_parallel parallel) {
    return run_selective(p, false, parallel);
}
rt_status rt_selective_bwd(const rt_selective_params *p, rt_parallel parallel) {
    return run_selective(p, true, parallel);
}
