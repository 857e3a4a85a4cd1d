// The selective scan's entry points: they check, find the chunks of every row, and hand channels to the workers.
#include "scan.h"

#include "../arrays.h"
#include "../isa/kernels.h"
#include "../parallel.h"

typedef struct layout {
    rt_chunk_rows rows;
    int64_t num_tasks, turn_bytes, scratch_bytes, total;
} layout;

static rt_status lay_out(const rt_selective_params *p, const rt_kernels *kernels, bool backward,
                         int64_t num_workers, layout *at) {
    if (!rt_chunk_rows_fit(p->batch, p->num_tokens, p->resets_batch_stride, &at->rows)) return RT_TOO_LARGE;
    at->num_tasks = rt_num_tasks(p->num_channels, RT_SELECTIVE_CHANNELS);
    at->turn_bytes = (at->num_tasks + 7) / 8 * 64;
    at->scratch_bytes = kernels->selective_scratch_bytes(p, backward);
    int64_t scratch = at->scratch_bytes;
    if (!rt_multiply_fits(&scratch, num_workers)) return RT_TOO_LARGE;
    if (scratch > RT_MAX_BYTES - at->rows.num_bytes - at->turn_bytes) return RT_TOO_LARGE;
    at->total = at->rows.num_bytes + at->turn_bytes + scratch;
    return RT_OK;
}

static int64_t workspace_bytes(const rt_selective_params *p, bool backward, int64_t num_workers) {
    const rt_kernels *kernels;
    layout at;
    if (num_workers < 1 || rt_selective_check(p, backward) != RT_OK ||
        rt_kernels_for(p->dtype, &kernels) != RT_OK)
        return 0;
    return lay_out(p, kernels, backward, num_workers, &at) == RT_OK ? at.total : 0;
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
    layout at;
    _Atomic int64_t *turns; // (num_tasks)
    char *scratch;
} job;

static void run_task(const job *j, bool backward, int64_t task, int64_t worker) {
    const int64_t first = task * RT_SELECTIVE_CHANNELS, end = first + RT_SELECTIVE_CHANNELS,
                  last = end < j->p->num_channels ? end : j->p->num_channels;
    char *scratch = j->scratch + worker * j->at.scratch_bytes;
    const rt_scan_turn turn = {task == 0 ? NULL : j->turns + task - 1, j->turns + task};
    if (backward)
        j->kernels->selective_backward(j->p, &j->at.rows, first, last, &turn, scratch);
    else
        j->kernels->selective_forward(j->p, &j->at.rows, first, last, scratch);
}

static void forward_task(void *ctx, int64_t task, int64_t worker) { run_task(ctx, false, task, worker); }
static void backward_task(void *ctx, int64_t task, int64_t worker) { run_task(ctx, true, task, worker); }

static rt_status run_selective(const rt_selective_params *p, bool backward, rt_parallel parallel) {
    job j = {.p = p};
    rt_status status = rt_selective_check(p, backward);
    if (status == RT_OK) status = rt_kernels_for(p->dtype, &j.kernels);
    if (status == RT_OK) status = lay_out(p, j.kernels, backward, rt_num_workers(parallel), &j.at);
    if (status != RT_OK) return status;
    if (p->workspace == NULL || (uintptr_t)p->workspace % 64 != 0 || p->workspace_bytes < j.at.total)
        return RT_WORKSPACE;
    rt_find_chunks(&j.at.rows, p->workspace, p->resets, p->num_tokens);
    j.turns = (_Atomic int64_t *)(void *)(j.at.rows.memory + j.at.rows.num_bytes);
    j.scratch = (char *)j.turns + j.at.turn_bytes;
    for (int64_t i = 0; i < j.at.num_tasks; i++) atomic_init(&j.turns[i], 0);
    rt_for_each(parallel, j.at.num_tasks, backward ? backward_task : forward_task, &j);
    return RT_OK;
}

rt_status rt_selective_fwd(const rt_selective_params *p, rt_parallel parallel) {
    return run_selective(p, false, parallel);
}
rt_status rt_selective_bwd(const rt_selective_params *p, rt_parallel parallel) {
    return run_selective(p, true, parallel);
}
