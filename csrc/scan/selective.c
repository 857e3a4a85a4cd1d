// The selective scan's entry points: they check, find the chunks of every row, and hand channels to the workers.
#include "scan.h"

#include "../arrays.h"
#include "../isa/kernels.h"
#include "../parallel.h"

static rt_status lay_out(const rt_selective_params *p, const rt_kernels *kernels, bool backward, int64_t num_workers,
                         rt_scan_space *space) {
    if (!rt_chunk_rows_fit(p->batch, p->num_tokens, p->seq_idx_batch_stride, &space->rows)) return RT_TOO_LARGE;
    const int64_t num_tasks = rt_num_tasks(p->num_channels, RT_SELECTIVE_CHANNELS),
                  scratch_bytes = kernels->selective_scratch_bytes(p, backward);
    return rt_scan_space_fits(space, num_tasks, scratch_bytes, num_workers) ? RT_OK : RT_TOO_LARGE;
}

static int64_t workspace_bytes(const rt_selective_params *p, bool backward, int64_t num_workers) {
    const rt_kernels *kernels;
    rt_scan_space space;
    if (num_workers < 1 || rt_selective_check_sizes(p) != RT_OK || rt_kernels_for(p->dtype, &kernels) != RT_OK)
        return 0;
    return lay_out(p, kernels, backward, num_workers, &space) == RT_OK ? space.num_bytes : 0;
}

int64_t rt_selective_fwd_workspace_bytes(const rt_selective_params *p, int64_t num_workers) {
    return workspace_bytes(p, false, num_workers);
}

int64_t rt_selective_bwd_workspace_bytes(const rt_selective_params *p, int64_t num_workers) {
    return workspace_bytes(p, true, num_workers);
}

typedef struct job {
    const rt_selective_params *p;
    const rt_kernels *kernels;
    rt_scan_space space; // a turn for each task
} job;

static void run_task(const job *j, bool backward, int64_t task, int64_t worker) {
    const int64_t first = task * RT_SELECTIVE_CHANNELS, end = first + RT_SELECTIVE_CHANNELS,
                  last = end < j->p->num_channels ? end : j->p->num_channels;
    char *scratch = j->space.scratch + worker * j->space.scratch_bytes;
    const rt_scan_turn turn = {task == 0 ? NULL : j->space.turns + task - 1, j->space.turns + task};
    if (backward)
        j->kernels->selective_backward(j->p, &j->space.rows, first, last, &turn, scratch);
    else
        j->kernels->selective_forward(j->p, &j->space.rows, first, last, scratch);
}

static void forward_task(void *ctx, int64_t task, int64_t worker) { run_task(ctx, false, task, worker); }
static void backward_task(void *ctx, int64_t task, int64_t worker) { run_task(ctx, true, task, worker); }

static rt_status run_selective(const rt_selective_params *p, bool backward, rt_parallel parallel) {
    job j = {.p = p};
    rt_status status = rt_selective_check(p, backward);
    if (status == RT_OK) status = rt_kernels_for(p->dtype, &j.kernels);
    if (status == RT_OK) status = lay_out(p, j.kernels, backward, rt_num_workers(parallel), &j.space);
    if (status == RT_OK)
        status = rt_scan_space_open(&j.space, p->workspace, p->workspace_bytes, p->seq_idx, p->num_tokens);
    if (status != RT_OK) return status;
    rt_for_each(parallel, j.space.num_turns, backward ? backward_task : forward_task, &j);
    return RT_OK;
}

rt_status rt_selective_fwd(const rt_selective_params *p, rt_parallel parallel) {
    return run_selective(p, false, parallel);
}
rt_status rt_selective_bwd(const rt_selective_params *p, rt_parallel parallel) {
    return run_selective(p, true, parallel);
}
