// Attention's entry points on the CPU: they check, then hand the tasks to the caller's threads.
#include "attn.h"

#include "../arrays.h"
#include "../isa/kernels.h"
#include "../parallel.h"

#include <stdatomic.h>
#include <string.h>

typedef struct job {
    const void *p; // rt_attn_fwd_params or rt_attn_bwd_params
    const rt_kernels *kernels;
    _Atomic int64_t *progress; // backward: a counter for each task
    char *shared;              // by all tasks, or NULL
    char *scratch;             // of worker 0; the other workers' follows
    int64_t num_tasks, progress_bytes, shared_bytes, scratch_bytes;
} job;

// num_bytes: of the workspace.    RT_TOO_LARGE: more than any array may have
static rt_status lay_out(const rt_attn_block *p, bool backward, int64_t num_workers, job *j, int64_t *num_bytes) {
    const rt_status status = rt_kernels_for(p->dtype, &j->kernels);
    if (status != RT_OK) return status;
    j->num_tasks = j->kernels->attn_num_tasks(p);
    if (backward) j->progress_bytes = rt_round_up_64(j->num_tasks * (int64_t)sizeof(*j->progress));
    j->shared_bytes = rt_round_up_64(j->kernels->attn_shared_bytes(p, backward));
    j->scratch_bytes = rt_round_up_64(j->kernels->attn_scratch_bytes(p, backward));
    return rt_workspace_fits(j->progress_bytes + j->shared_bytes, j->scratch_bytes, num_workers, num_bytes);
}

static int64_t workspace_bytes(const rt_attn_block *p, bool backward, int64_t num_workers) {
    job j = {0};
    int64_t num_bytes;
    if (p == NULL || num_workers < 1 || rt_attn_check_sizes(p) != RT_OK) return 0;
    return lay_out(p, backward, num_workers, &j, &num_bytes) == RT_OK ? num_bytes : 0;
}

int64_t rt_attn_fwd_workspace_bytes(const rt_attn_block *p, int64_t num_workers) {
    return workspace_bytes(p, false, num_workers);
}

int64_t rt_attn_bwd_workspace_bytes(const rt_attn_block *p, int64_t num_workers) {
    return workspace_bytes(p, true, num_workers);
}

static rt_status open_job(const rt_attn_block *p, bool backward, rt_parallel parallel, job *j) {
    int64_t num_bytes;
    const rt_status status = lay_out(p, backward, rt_num_workers(parallel), j, &num_bytes);
    if (status != RT_OK) return status;
    if (!rt_points_to(p->workspace, 64) || p->workspace_bytes < num_bytes) return RT_WORKSPACE;
    j->progress = p->workspace, j->scratch = (char *)p->workspace + j->progress_bytes + j->shared_bytes;
    if (j->shared_bytes == 0) return RT_OK;
    j->shared = (char *)p->workspace + j->progress_bytes;
    j->kernels->attn_open_shared(p, backward, j->shared);
    return RT_OK;
}

// ---- forward -----------------------------------------------------------------------------------

static void forward_task(void *ctx, int64_t task, int64_t worker) {
    const job *j = ctx;
    j->kernels->attn_forward(j->p, task, j->shared, j->scratch + worker * j->scratch_bytes);
}

rt_status rt_attn_fwd(const rt_attn_fwd_params *p, rt_parallel parallel) {
    job j = {.p = p};
    rt_status status = rt_attn_check_fwd(p);
    if (status == RT_OK) status = open_job(&p->block, false, parallel, &j);
    if (status == RT_OK) rt_for_each(parallel, j.num_tasks, forward_task, &j);
    return status;
}

// ---- backward ----------------------------------------------------------------------------------

static void clear_rows(const rt_attn_block *p, void *array, const int64_t stride[3], int64_t dim, int64_t first,
                       int64_t last) {
    const int64_t bytes = p->dtype == RT_F64 ? 8 : 4;
    for (int64_t i = first; i < last; i++)
        for (int64_t head = 0; head < p->num_kv_heads; head++) {
            const int64_t at = i / p->num_keys * stride[0] + i % p->num_keys * stride[1] + head * stride[2];
            memset((char *)array + at * bytes, 0, (size_t)(dim * bytes));
        }
}

// Before and after the tasks: zeroes fresh dk and dv; rounds them. Rows are those of k, counted over all batches.
static void clear_keys(const void *ctx, int64_t first, int64_t last) {
    const rt_attn_bwd_params *p = ((const job *)ctx)->p;
    clear_rows(&p->block, p->dk, p->dk_stride, p->block.head_dim, first, last);
    clear_rows(&p->block, p->dv, p->dv_stride, p->block.v_head_dim, first, last);
}

static void round_keys(const void *ctx, int64_t first, int64_t last) {
    const job *j = ctx;
    j->kernels->attn_round_keys(j->p, first, last);
}

static void backward_task(void *ctx, int64_t task, int64_t worker) {
    const job *j = ctx;
    j->kernels->attn_backward(j->p, task, j->progress, j->shared, j->scratch + worker * j->scratch_bytes);
}

rt_status rt_attn_bwd(const rt_attn_bwd_params *p, rt_parallel parallel) {
    job j = {.p = p};
    rt_status status = rt_attn_check_bwd(p);
    if (status == RT_OK) status = open_job(&p->block, true, parallel, &j);
    if (status != RT_OK) return status;
    const rt_attn_block *b = &p->block;
    const int64_t num_keys = b->batch * b->num_keys;
    const int64_t keys_per_task = rt_rows_per_task(b->num_kv_heads * (b->head_dim + b->v_head_dim));
    for (int64_t task = 0; task < j.num_tasks; task++) atomic_init(&j.progress[task], 0);
    if (p->fresh) rt_for_rows(parallel, num_keys, keys_per_task, clear_keys, &j);
    rt_for_each(parallel, j.num_tasks, backward_task, &j);
    if (p->rounded_dk != NULL) rt_for_rows(parallel, num_keys, keys_per_task, round_keys, &j);
    return RT_OK;
}

// ---- delta -------------------------------------------------------------------------------------

typedef struct delta_job {
    const rt_attn_delta_params *p;
    const void *dout, *out;
    const double *dlse;
    void *delta;
    const rt_kernels *kernels;
} delta_job;

static void delta_tokens(const void *ctx, int64_t first, int64_t last) {
    const delta_job *j = ctx;
    j->kernels->attn_delta(j->p, j->dout, j->out, j->dlse, j->delta, first, last);
}

rt_status rt_attn_delta(const rt_attn_delta_params *p, const void *dout, const void *out, const double *dlse,
                        void *delta, rt_parallel parallel) {
    delta_job j = {.p = p, .dout = dout, .out = out, .dlse = dlse, .delta = delta};
    rt_status status = rt_attn_check_delta(p, dout, out, dlse, delta);
    if (status == RT_OK) status = rt_kernels_for(p->dtype, &j.kernels);
    if (status != RT_OK) return status;
    rt_for_rows(parallel, p->batch * p->num_queries, rt_rows_per_task(p->num_heads * p->v_head_dim), delta_tokens, &j);
    return RT_OK;
}
