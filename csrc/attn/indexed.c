// Entry points of attention over chosen keys: they check, then hand queries or heads to the caller's threads.
#include "../arrays.h"
#include "../dtype.h"
#include "../isa/kernels.h"
#include "../parallel.h"

enum { QUERIES_PER_TASK = 4 };

typedef struct indexed_job {
    const rt_indexed_attn_params *p;
    const rt_kernels *kernels;
    int64_t scratch_bytes;
} indexed_job;

static char *scratch_of(const indexed_job *j, int64_t worker) {
    return (char *)j->p->workspace + worker * j->scratch_bytes;
}

// The tasks of a kv head follow each other, so that its keys stay in the cache.
static void forward_task(void *ctx, int64_t task, int64_t worker) {
    const indexed_job *j = ctx;
    const int64_t per_head = rt_num_tasks(j->p->num_queries, QUERIES_PER_TASK), head = task / per_head;
    const int64_t heads = j->p->num_kv_heads, N = j->p->num_queries, first = task % per_head * QUERIES_PER_TASK;
    const int64_t last = N - first < QUERIES_PER_TASK ? N : first + QUERIES_PER_TASK;
    j->kernels->indexed_attn_forward(j->p, head / heads, head % heads, first, last, scratch_of(j, worker));
}

static void backward_task(void *ctx, int64_t task, int64_t worker) {
    const indexed_job *j = ctx;
    const int64_t heads = j->p->num_kv_heads;
    j->kernels->indexed_attn_backward(j->p, task / heads, task % heads, scratch_of(j, worker));
}

static rt_status check_sizes(const rt_indexed_attn_params *p) {
    if (p == NULL) return RT_BAD_POINTER;
    if (!rt_is_dtype(p->dtype)) return RT_BAD_DTYPE;
    if (p->batch < 0 || p->num_queries < 0 || p->num_keys < 0 || p->num_indices < 0) return RT_BAD_SHAPE;
    if (p->num_kv_heads < 1 || p->num_heads < 1 || p->num_heads % p->num_kv_heads != 0) return RT_BAD_HEADS;
    if (p->head_dim < 1 || p->head_dim > RT_MAX_HEAD_DIM || p->v_head_dim < 1 || p->v_head_dim > RT_MAX_HEAD_DIM)
        return RT_BAD_HEAD_DIM;
    // Also of what no array holds: the scores of one query, with their gradients and padding.
    const int64_t rows[] = {p->batch, p->num_queries, p->num_heads, 1 + RT_MAX_HEAD_DIM};
    const int64_t scores[] = {p->num_heads, p->num_indices, 8}, tasks[] = {p->batch, p->num_keys, p->num_heads, 512};
    return rt_array_fits(4, rows, NULL, 8) && rt_array_fits(3, scores, NULL, 8) && rt_array_fits(4, tasks, NULL, 8)
               ? RT_OK
               : RT_TOO_LARGE;
}

static rt_status check(const rt_indexed_attn_params *p, bool backward) {
    const rt_status status = check_sizes(p);
    if (status != RT_OK) return status;
    if (!rt_is_finite(p->dtype, p->scale)) return RT_BAD_SCALE;
    const int64_t input = rt_element_bytes(p->dtype), state = rt_state_bytes(p->dtype);
    const int64_t B = p->batch, N = p->num_queries, K = p->num_keys, H = p->num_heads, G = p->num_kv_heads;
    const int64_t D = p->head_dim, Dv = p->v_head_dim;
    rt_arrays all = {0};
    if (backward) {
        rt_add_array(&all, true, (rt_array){p->dq, input, 4, {B, N, H, D}, NULL, false});
        rt_add_array(&all, true, (rt_array){p->dk, state, 4, {B, G, K, D}, NULL, false});
        rt_add_array(&all, true, (rt_array){p->dv, state, 4, {B, G, K, Dv}, NULL, false});
        rt_add_array(&all, false, (rt_array){p->dout, input, 4, {B, N, H, Dv}, NULL, false});
        rt_add_array(&all, false, (rt_array){p->dlse, 8, 3, {B, H, N}, NULL, false});
    }
    rt_add_array(&all, !backward, (rt_array){p->out, input, 4, {B, N, H, Dv}, NULL, false});
    rt_add_array(&all, !backward, (rt_array){p->lse, 8, 3, {B, H, N}, NULL, false});
    rt_add_array(&all, false, (rt_array){p->q, input, 4, {B, N, H, D}, NULL, false});
    rt_add_array(&all, false, (rt_array){p->k, input, 4, {B, K, G, D}, p->k_stride, false});
    rt_add_array(&all, false, (rt_array){p->v, input, 4, {B, K, G, Dv}, p->v_stride, false});
    rt_add_array(&all, false, (rt_array){p->indices, 4, 3, {B, N, p->num_indices}, NULL, false});
    return rt_check_arrays(&all);
}

// Bytes for all workers, and for each of them.
static rt_status workspace_of(const rt_indexed_attn_params *p, int64_t num_workers, indexed_job *j, int64_t *bytes) {
    const rt_status status = rt_kernels_for(p->dtype, &j->kernels);
    if (status != RT_OK) return status;
    *bytes = j->scratch_bytes = rt_round_up_64(j->kernels->indexed_attn_scratch_bytes(p));
    return rt_multiply_fits(bytes, num_workers) ? RT_OK : RT_TOO_LARGE;
}

int64_t rt_indexed_attn_workspace_bytes(const rt_indexed_attn_params *p, int64_t num_workers) {
    indexed_job j;
    int64_t bytes;
    if (num_workers < 1 || check_sizes(p) != RT_OK || workspace_of(p, num_workers, &j, &bytes) != RT_OK) return 0;
    return bytes;
}

static rt_status run(const rt_indexed_attn_params *p, bool backward, rt_parallel parallel) {
    indexed_job j = {.p = p};
    int64_t bytes;
    rt_status status = check(p, backward);
    if (status == RT_OK) status = workspace_of(p, rt_num_workers(parallel), &j, &bytes);
    if (status != RT_OK) return status;
    if (!rt_points_to(p->workspace, 64) || p->workspace_bytes < bytes) return RT_WORKSPACE;
    if (backward)
        rt_for_each(parallel, p->batch * p->num_kv_heads, backward_task, &j);
    else
        rt_for_each(parallel, p->batch * p->num_kv_heads * rt_num_tasks(p->num_queries, QUERIES_PER_TASK), forward_task,
                    &j);
    return RT_OK;
}

rt_status rt_indexed_attn_fwd(const rt_indexed_attn_params *p, rt_parallel parallel) { return run(p, false, parallel); }

rt_status rt_indexed_attn_bwd(const rt_indexed_attn_params *p, rt_parallel parallel) { return run(p, true, parallel); }
