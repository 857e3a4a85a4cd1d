// Attention's entry points: every precondition is checked here, once, then the tasks go to the caller's threads.
#include "attn.h"

#include "../isa/kernels.h"
#include "../overlap.h"
#include "../parallel.h"
#include "../seq/runs.h"

#include <math.h>
#include <stdatomic.h>

static int64_t round_up_64(int64_t bytes) { return (bytes + 63) / 64 * 64; }

static rt_status check(const rt_attn_params *p) {
    if (p->dtype != RT_F64 && p->dtype != RT_F32 && p->dtype != RT_BF16 && p->dtype != RT_F16)
        return RT_BAD_DTYPE;
    if (p->batch < 0 || p->num_queries < 0 || p->num_keys < 0 || p->num_k_runs < 0) return RT_BAD_SHAPE;
    if (p->num_kv_heads < 1 || p->num_heads < 1 || p->num_heads % p->num_kv_heads != 0) return RT_BAD_HEADS;
    if (p->head_dim < 1 || p->head_dim > 256 || p->v_head_dim < 1 || p->v_head_dim > 256)
        return RT_BAD_HEAD_DIM;
    if (!isfinite(p->scale) || !isfinite(p->softcap) || p->softcap < 0) return RT_BAD_SCALE;
    const bool queries = p->batch > 0 && p->num_queries > 0, keys = p->batch > 0 && p->num_keys > 0;
    if (queries && (p->q == NULL || p->begin == NULL || p->end == NULL || p->lse == NULL))
        return RT_BAD_POINTER;
    if (keys && (p->k == NULL || p->v == NULL)) return RT_BAD_POINTER;
    if (p->num_k_runs > 0 && p->k_runs == NULL) return RT_BAD_POINTER;
    return rt_runs_check(p->k_runs, p->num_k_runs, p->num_keys);
}

// Of an array that is written: (B, tokens, heads, dim).
static bool overlaps(const rt_attn_params *p, int64_t num_tokens, int64_t num_heads, int64_t dim,
                     const int64_t stride[3]) {
    return rt_overlaps(4, (const int64_t[]){p->batch, num_tokens, num_heads, dim},
                       (const int64_t[]){stride[0], stride[1], stride[2], 1});
}

rt_status rt_attn_check_fwd(const rt_attn_params *p) {
    const rt_status status = check(p);
    if (status != RT_OK) return status;
    if (p->batch > 0 && p->num_queries > 0 && p->out == NULL) return RT_BAD_POINTER;
    return overlaps(p, p->num_queries, p->num_heads, p->v_head_dim, p->out_stride) ? RT_BAD_STRIDE : RT_OK;
}

rt_status rt_attn_check_bwd(const rt_attn_params *p) {
    const rt_status status = check(p);
    if (status != RT_OK) return status;
    const bool queries = p->batch > 0 && p->num_queries > 0, keys = p->batch > 0 && p->num_keys > 0;
    if (queries && (p->dout == NULL || p->delta == NULL || p->dq == NULL)) return RT_BAD_POINTER;
    if (keys && (p->dk == NULL || p->dv == NULL)) return RT_BAD_POINTER;
    return overlaps(p, p->num_queries, p->num_heads, p->head_dim, p->dq_stride) ||
                   overlaps(p, p->num_keys, p->num_kv_heads, p->head_dim, p->dk_stride) ||
                   overlaps(p, p->num_keys, p->num_kv_heads, p->v_head_dim, p->dv_stride)
               ? RT_BAD_STRIDE
               : RT_OK;
}

typedef struct job {
    const rt_attn_params *p;
    const rt_kernels *kernels;
    char *scratch; // of worker 0; the others follow
    int64_t scratch_bytes;
    _Atomic int64_t *progress;
} job;

static int64_t workers_of(rt_parallel parallel) {
    return parallel.run == NULL || parallel.num_workers < 1 ? 1 : parallel.num_workers;
}

static bool holds_workspace(const rt_attn_params *p, int64_t num_bytes) {
    return p->workspace != NULL && (uintptr_t)p->workspace % 64 == 0 && p->workspace_bytes >= num_bytes;
}

// ---- forward -----------------------------------------------------------------------------------

int64_t rt_attn_fwd_workspace_bytes(const rt_attn_params *p, int64_t num_workers) {
    const rt_kernels *kernels;
    if (num_workers < 1 || rt_attn_check_fwd(p) != RT_OK || rt_kernels_for(p->dtype, &kernels) != RT_OK)
        return 0;
    return num_workers * round_up_64(kernels->attn_forward_scratch_bytes(p));
}

static void forward_task(void *ctx, int64_t task, int64_t worker) {
    const job *j = ctx;
    j->kernels->attn_forward(j->p, task, j->scratch + worker * j->scratch_bytes);
}

rt_status rt_attn_fwd(const rt_attn_params *p, rt_parallel parallel) {
    job j = {.p = p, .scratch = p->workspace};
    rt_status status = rt_attn_check_fwd(p);
    if (status == RT_OK) status = rt_kernels_for(p->dtype, &j.kernels);
    if (status != RT_OK) return status;
    j.scratch_bytes = round_up_64(j.kernels->attn_forward_scratch_bytes(p));
    if (!holds_workspace(p, workers_of(parallel) * j.scratch_bytes)) return RT_WORKSPACE;
    rt_for_each(parallel, j.kernels->attn_num_tasks(p), forward_task, &j);
    return RT_OK;
}

// ---- backward ----------------------------------------------------------------------------------

// One counter a task in front of the workers' scratch: 8 bytes for a block of query rows.
static int64_t progress_bytes(const rt_attn_params *p, const rt_kernels *kernels) {
    return round_up_64(kernels->attn_num_tasks(p) * (int64_t)sizeof(_Atomic int64_t));
}

int64_t rt_attn_bwd_workspace_bytes(const rt_attn_params *p, int64_t num_workers) {
    const rt_kernels *kernels;
    if (num_workers < 1 || rt_attn_check_bwd(p) != RT_OK || rt_kernels_for(p->dtype, &kernels) != RT_OK)
        return 0;
    return progress_bytes(p, kernels) + num_workers * round_up_64(kernels->attn_backward_scratch_bytes(p));
}

static void backward_task(void *ctx, int64_t task, int64_t worker) {
    const job *j = ctx;
    j->kernels->attn_backward(j->p, task, j->progress, j->scratch + worker * j->scratch_bytes);
}

rt_status rt_attn_bwd(const rt_attn_params *p, rt_parallel parallel) {
    job j = {.p = p};
    rt_status status = rt_attn_check_bwd(p);
    if (status == RT_OK) status = rt_kernels_for(p->dtype, &j.kernels);
    if (status != RT_OK) return status;
    const int64_t num_tasks = j.kernels->attn_num_tasks(p);
    j.scratch_bytes = round_up_64(j.kernels->attn_backward_scratch_bytes(p));
    const int64_t needed = progress_bytes(p, j.kernels) + workers_of(parallel) * j.scratch_bytes;
    if (!holds_workspace(p, needed)) return RT_WORKSPACE;
    j.progress = p->workspace;
    j.scratch = (char *)p->workspace + progress_bytes(p, j.kernels);
    for (int64_t task = 0; task < num_tasks; task++) atomic_init(&j.progress[task], 0);
    rt_for_each(parallel, num_tasks, backward_task, &j);
    return RT_OK;
}
