// The recurrences' entry points: they check, find the chunks of every row, and hand heads to the workers.
#include "scan.h"

#include "../arrays.h"
#include "../dtype.h"
#include "../isa/kernels.h"
#include "../parallel.h"
#include "chunks.h"

static int64_t round_up_64(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// ---- workspace: the chunks of each row, the turns of each head, the scratch of each worker -------------------------

typedef struct layout {
    rt_chunk_rows rows;
    int64_t turn_bytes, scratch_bytes, total;
} layout;

static rt_status lay_out(const rt_scan_params *p, const rt_kernels *kernels, bool backward,
                         int64_t num_workers, layout *at) {
    const int64_t of_heads[] = {p->batch, p->num_heads, 8};
    if (!rt_chunk_rows_fit(p->batch, p->num_tokens, p->resets_batch_stride, &at->rows) ||
        !rt_array_fits(3, of_heads, NULL, 1))
        return RT_TOO_LARGE;
    at->turn_bytes = round_up_64(p->batch * p->num_heads * (int64_t)sizeof(_Atomic int64_t));
    at->scratch_bytes = round_up_64(kernels->scan_scratch_bytes(p, backward));
    int64_t scratch = at->scratch_bytes;
    if (!rt_multiply_fits(&scratch, num_workers)) return RT_TOO_LARGE;
    if (scratch > RT_MAX_BYTES - at->rows.num_bytes - at->turn_bytes) return RT_TOO_LARGE;
    at->total = at->rows.num_bytes + at->turn_bytes + scratch;
    return RT_OK;
}

static int64_t workspace_bytes(const rt_scan_params *p, bool backward, int64_t num_workers) {
    const rt_kernels *kernels;
    layout at;
    if (num_workers < 1 || rt_scan_check(p, backward) != RT_OK || rt_kernels_for(p->dtype, &kernels) != RT_OK)
        return 0;
    return lay_out(p, kernels, backward, num_workers, &at) == RT_OK ? at.total : 0;
}

int64_t rt_scan_fwd_workspace_bytes(const rt_scan_params *p, int64_t num_workers) {
    return workspace_bytes(p, false, num_workers);
}

int64_t rt_scan_bwd_workspace_bytes(const rt_scan_params *p, int64_t num_workers) {
    return workspace_bytes(p, true, num_workers);
}

// ---- tasks -----------------------------------------------------------------------------------------------------------

typedef struct job {
    const rt_scan_params *p;
    const rt_kernels *kernels;
    layout at;
    char *scratch;
    _Atomic int64_t *turns; // (B, H)
} job;

// Tasks of the heads that share q and k are as far apart as can be, so that they seldom wait for each other.
static void run_task(const job *j, bool backward, int64_t task, int64_t worker) {
    const rt_scan_params *p = j->p;
    const int64_t pairs = p->batch * p->num_kv_heads, group = p->num_heads / p->num_kv_heads;
    const int64_t pair = task % pairs, batch = pair / p->num_kv_heads,
                  head = pair % p->num_kv_heads * group + task / pairs;
    const rt_chunks *chunks = rt_chunks_of(&j->at.rows, batch);
    char *scratch = j->scratch + worker * j->at.scratch_bytes;
    if (!backward) {
        j->kernels->scan_forward(p, chunks, batch, head, scratch);
        return;
    }
    _Atomic int64_t *own = j->turns + batch * p->num_heads + head;
    const rt_scan_turn turn = {head % group == 0 ? NULL : own - 1, own};
    j->kernels->scan_backward(p, chunks, batch, head, &turn, scratch);
}

static void forward_task(void *ctx, int64_t task, int64_t worker) { run_task(ctx, false, task, worker); }
static void backward_task(void *ctx, int64_t task, int64_t worker) { run_task(ctx, true, task, worker); }

static rt_status run_scan(const rt_scan_params *p, bool backward, rt_parallel parallel) {
    job j = {.p = p};
    rt_status status = rt_scan_check(p, backward);
    if (status == RT_OK) status = rt_kernels_for(p->dtype, &j.kernels);
    if (status == RT_OK) status = lay_out(p, j.kernels, backward, rt_num_workers(parallel), &j.at);
    if (status != RT_OK) return status;
    if (p->workspace == NULL || (uintptr_t)p->workspace % 64 != 0 || p->workspace_bytes < j.at.total)
        return RT_WORKSPACE;
    rt_find_chunks(&j.at.rows, p->workspace, p->resets, p->num_tokens);
    j.turns = (_Atomic int64_t *)(void *)(j.at.rows.memory + j.at.rows.num_bytes);
    j.scratch = (char *)j.turns + j.at.turn_bytes;
    for (int64_t i = 0; i < p->batch * p->num_heads; i++) atomic_init(&j.turns[i], 0);
    rt_for_each(parallel, p->batch * p->num_heads, backward ? backward_task : forward_task, &j);
    return RT_OK;
}

rt_status rt_scan_fwd(const rt_scan_params *p, rt_parallel parallel) { return run_scan(p, false, parallel); }
rt_status rt_scan_bwd(const rt_scan_params *p, rt_parallel parallel) { return run_scan(p, true, parallel); }
