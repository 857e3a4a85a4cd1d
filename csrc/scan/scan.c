// The recurrences' entry points: they check, find the chunks of every row, and hand heads to the workers.
#include "scan.h"

#include "../arrays.h"
#include "../isa/kernels.h"
#include "../parallel.h"
#include "chunks.h"

typedef struct job {
    const rt_scan_params *p;
    bool backward;
    const rt_kernels *kernels;
    rt_scan_space space; // a turn for each (B, H)
} job;

static rt_status lay_out(job *j, int64_t num_workers) {
    const rt_scan_params *p = j->p;
    const int64_t of_heads[] = {p->batch, p->num_heads, 8};
    const rt_status status = rt_kernels_for(p->dtype, &j->kernels);
    if (status != RT_OK) return status;
    if (!rt_array_fits(3, of_heads, NULL, 1)) return rt_wrong(RT_TOO_LARGE, "batch, num_heads and num_tokens");
    return rt_scan_space_of(p->batch, p->num_tokens, p->seq_idx_batch_stride, p->batch * p->num_heads,
                            j->kernels->scan_scratch_bytes(p, j->backward), num_workers, &j->space);
}

static int64_t workspace_bytes(const rt_scan_params *p, bool backward, int64_t num_workers) {
    job j = {.p = p, .backward = backward};
    if (num_workers < 1 || rt_scan_check_sizes(p) != RT_OK) return 0;
    return lay_out(&j, num_workers) == RT_OK ? j.space.num_bytes : 0;
}

int64_t rt_scan_fwd_workspace_bytes(const rt_scan_params *p, int64_t num_workers) {
    return workspace_bytes(p, false, num_workers);
}

int64_t rt_scan_bwd_workspace_bytes(const rt_scan_params *p, int64_t num_workers) {
    return workspace_bytes(p, true, num_workers);
}

// Tasks of the heads that share q and k are as far apart as can be, so that they seldom wait for each other.
static void run_task(void *ctx, int64_t task, int64_t worker) {
    const job *j = ctx;
    const rt_scan_params *p = j->p;
    const int64_t pairs = p->batch * p->num_k_heads, group = p->num_heads / p->num_k_heads;
    const int64_t pair = task % pairs, batch = pair / p->num_k_heads,
                  head = pair % p->num_k_heads * group + task / pairs;
    const rt_chunks *chunks = rt_chunks_of(&j->space.rows, batch);
    char *scratch = j->space.scratch + worker * j->space.scratch_bytes;
    _Atomic int64_t *own = j->space.turns + batch * p->num_heads + head;
    const rt_scan_turn turn = {head % group == 0 ? NULL : own - 1, own};
    if (j->backward)
        j->kernels->scan_backward(p, chunks, batch, head, &turn, scratch);
    else
        j->kernels->scan_forward(p, chunks, batch, head, scratch);
}

static rt_status run_scan(const rt_scan_params *p, bool backward, rt_parallel parallel) {
    job j = {.p = p, .backward = backward};
    rt_status status = rt_scan_check(p, backward);
    if (status == RT_OK) status = lay_out(&j, rt_num_workers(parallel));
    if (status == RT_OK)
        status = rt_scan_space_open(&j.space, p->workspace, p->workspace_bytes, p->seq_idx, p->num_tokens);
    if (status == RT_OK) rt_for_each(parallel, j.space.num_turns, run_task, &j);
    return status;
}

rt_status rt_scan_fwd(const rt_scan_params *p, rt_parallel parallel) { return run_scan(p, false, parallel); }
rt_status rt_scan_bwd(const rt_scan_params *p, rt_parallel parallel) { return run_scan(p, true, parallel); }
