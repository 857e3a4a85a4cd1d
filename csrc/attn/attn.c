// Attention's entry points on the CPU: they check, then hand the tasks to the caller's threads.
#include "attn.h"

#include "../arrays.h"
#include "../isa/kernels.h"
#include "../parallel.h"

#include <stdatomic.h>
#include <string.h>

typedef struct job {
    const rt_attn_params *p;
    const rt_kernels *kernels;
    char *scratch; // of worker 0; the other workers' follows
    int64_t scratch_bytes;
    _Atomic int64_t *progress;
} job;

// Bytes of `front`, then scratch for each worker; RT_TOO_LARGE if that is more than any array may have.
static rt_status workspace_bytes(int64_t front, int64_t scratch_bytes, int64_t num_workers, int64_t *num_bytes) {
    *num_bytes = scratch_bytes;
    if (!rt_multiply_fits(num_bytes, num_workers) || *num_bytes > RT_MAX_BYTES - front) return RT_TOO_LARGE;
    *num_bytes += front;
    return RT_OK;
}

static bool holds_workspace(const rt_attn_params *p, int64_t num_bytes) {
    return p->workspace != NULL && (uintptr_t)p->workspace % 64 == 0 && p->workspace_bytes >= num_bytes;
}

// ---- forward -----------------------------------------------------------------------------------

int64_t rt_attn_fwd_workspace_bytes(const rt_attn_params *p, int64_t num_workers) {
    const rt_kernels *kernels;
    if (num_workers < 1 || rt_attn_check_sizes(p) != RT_OK || rt_kernels_for(p->dtype, &kernels) != RT_OK) return 0;
    int64_t num_bytes;
    const int64_t scratch_bytes = rt_round_up_64(kernels->attn_forward_scratch_bytes(p));
    return workspace_bytes(0, scratch_bytes, num_workers, &num_bytes) == RT_OK ? num_bytes : 0;
}

static void forward_task(void *ctx, int64_t task, int64_t worker) {
    const job *j = ctx;
    j->kernels->attn_forward(j->p, task, j->scratch + worker * j->scratch_bytes);
}

rt_status rt_attn_fwd(const rt_attn_params *p, rt_parallel parallel) {
    job j = {.p = p};
    rt_status status = rt_attn_check_fwd(p);
    if (status == RT_OK) status = rt_kernels_for(p->dtype, &j.kernels);
    if (status != RT_OK) return status;
    j.scratch_bytes = rt_round_up_64(j.kernels->attn_forward_scratch_bytes(p));
    int64_t needed;
    status = workspace_bytes(0, j.scratch_bytes, rt_num_workers(parallel), &needed);
    if (status != RT_OK) return status;
    if (!holds_workspace(p, needed)) return RT_WORKSPACE;
    j.scratch = p->workspace;
    rt_for_each(parallel, j.kernels->attn_num_tasks(p), forward_task, &j);
    return RT_OK;
}

// ---- backward ----------------------------------------------------------------------------------

// Every task has a counter, in front of the workers' scratch.
static int64_t progress_bytes(const rt_attn_params *p, const rt_kernels *kernels) {
    return rt_round_up_64(kernels->attn_num_tasks(p) * (int64_t)sizeof(_Atomic int64_t));
}

int64_t rt_attn_bwd_workspace_bytes(const rt_attn_params *p, int64_t num_workers) {
    const rt_kernels *kernels;
    if (num_workers < 1 || rt_attn_check_sizes(p) != RT_OK || rt_kernels_for(p->dtype, &kernels) != RT_OK) return 0;
    int64_t num_bytes;
    const int64_t scratch_bytes = rt_round_up_64(kernels->attn_backward_scratch_bytes(p));
    return workspace_bytes(progress_bytes(p, kernels), scratch_bytes, num_workers, &num_bytes) == RT_OK ? num_bytes : 0;
}

// Before and after the tasks: zeroes fresh dk and dv; rounds them. A task has some rows of k, counted over all batches.
typedef struct key_job {
    const rt_attn_params *p;
    const rt_kernels *kernels;
    int64_t num_rows, rows_per_task;
} key_job;

static int64_t last_row(const key_job *j, int64_t task) {
    const int64_t last = (task + 1) * j->rows_per_task;
    return last < j->num_rows ? last : j->num_rows;
}

static void clear_rows(const rt_attn_params *p, void *array, const int64_t stride[3], int64_t dim, int64_t first,
                       int64_t last) {
    const int64_t bytes = p->dtype == RT_F64 ? 8 : 4;
    for (int64_t i = first; i < last; i++)
        for (int64_t head = 0; head < p->num_kv_heads; head++) {
            const int64_t at = i / p->num_keys * stride[0] + i % p->num_keys * stride[1] + head * stride[2];
            memset((char *)array + at * bytes, 0, (size_t)(dim * bytes));
        }
}

static void clear_task(void *ctx, int64_t task, int64_t worker) {
    (void)worker;
    const key_job *j = ctx;
    const rt_attn_params *p = j->p;
    const int64_t first = task * j->rows_per_task, last = last_row(j, task);
    clear_rows(p, p->dk, p->dk_stride, p->head_dim, first, last);
    clear_rows(p, p->dv, p->dv_stride, p->v_head_dim, first, last);
}

static void round_task(void *ctx, int64_t task, int64_t worker) {
    (void)worker;
    const key_job *j = ctx;
    j->kernels->attn_round_keys(j->p, task * j->rows_per_task, last_row(j, task));
}

static void for_keys(const job *of, rt_parallel parallel, void (*work)(void *ctx, int64_t task, int64_t worker)) {
    const rt_attn_params *p = of->p;
    key_job j = {p, of->kernels, p->batch * p->num_keys,
                 rt_rows_per_task(p->num_kv_heads * (p->head_dim + p->v_head_dim))};
    rt_for_each(parallel, rt_num_tasks(j.num_rows, j.rows_per_task), work, &j);
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
    j.scratch_bytes = rt_round_up_64(j.kernels->attn_backward_scratch_bytes(p));
    int64_t needed;
    status = workspace_bytes(progress_bytes(p, j.kernels), j.scratch_bytes, rt_num_workers(parallel), &needed);
    if (status != RT_OK) return status;
    if (!holds_workspace(p, needed)) return RT_WORKSPACE;
    j.progress = p->workspace;
    j.scratch = (char *)p->workspace + progress_bytes(p, j.kernels);
    for (int64_t task = 0; task < num_tasks; task++) atomic_init(&j.progress[task], 0);
    if (p->fresh) for_keys(&j, parallel, clear_task);
    rt_for_each(parallel, num_tasks, backward_task, &j);
    if (p->rounded_dk != NULL) for_keys(&j, parallel, round_task);
    return RT_OK;
}

// ---- delta -------------------------------------------------------------------------------------

typedef struct delta_job {
    const rt_attn_delta_params *p;
    const void *dout, *out;
    const double *dlse;
    void *delta;
    const rt_kernels *kernels;
    int64_t num_tokens, tokens_per_task;
} delta_job;

static void delta_task(void *ctx, int64_t task, int64_t worker) {
    (void)worker;
    const delta_job *j = ctx;
    const int64_t first = task * j->tokens_per_task, last = first + j->tokens_per_task;
    j->kernels->attn_delta(j->p, j->dout, j->out, j->dlse, j->delta, first,
                           last < j->num_tokens ? last : j->num_tokens);
}

rt_status rt_attn_delta(const rt_attn_delta_params *p, const void *dout, const void *out, const double *dlse,
                        void *delta, rt_parallel parallel) {
    delta_job j = {.p = p, .dout = dout, .out = out, .dlse = dlse, .delta = delta};
    rt_status status = rt_attn_check_delta(p, dout, out, dlse, delta);
    if (status == RT_OK) status = rt_kernels_for(p->dtype, &j.kernels);
    if (status != RT_OK) return status;
    j.num_tokens = p->batch * p->num_queries;
    j.tokens_per_task = rt_rows_per_task(p->num_heads * p->v_head_dim);
    rt_for_each(parallel, rt_num_tasks(j.num_tokens, j.tokens_per_task), delta_task, &j);
    return RT_OK;
}
