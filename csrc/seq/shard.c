// shard and unshard: strided copies between a global and a local tensor, of any number of dims and any dtype.
#include "shard.h"
#include "../arrays.h"
#include "../parallel.h"
#include "runs.h"

#include <string.h>

typedef struct shard_job {
    const rt_shard_params *p;
    const char *from;
    char *to;
    bool to_global;
    int64_t num_tasks;
} shard_job;

rt_strided_copy rt_copy_of_run(const rt_shard_params *p, const rt_run *run, const void *from, void *to,
                               bool to_global) {
    rt_strided_copy copy = {.element_bytes = p->element_bytes, .num_elements = 1};
    for (int64_t d = 0; d < p->ndim; d++) {
        const bool sharded = d == p->dim;
        const int64_t size = sharded ? run->length : p->sizes[d];
        copy.num_elements *= size;
        if (size == 1) continue;
        const int64_t global_step = p->global_strides[d] * p->element_bytes * (sharded ? run->stride : 1);
        const int64_t local_step = p->local_strides[d] * p->element_bytes;
        const int64_t from_step = to_global ? local_step : global_step;
        const int64_t to_step = to_global ? global_step : local_step;
        const int64_t last = copy.ndim - 1;
        if (last >= 0 && copy.from_step[last] == size * from_step && copy.to_step[last] == size * to_step) {
            copy.size[last] *= size;
        } else {
            copy.size[copy.ndim++] = size;
        }
        copy.from_step[copy.ndim - 1] = from_step;
        copy.to_step[copy.ndim - 1] = to_step;
    }
    if (copy.ndim == 0) copy.size[copy.ndim++] = 1; // one element: its step is never taken

    const int64_t global_begin = run->global_begin * p->global_strides[p->dim] * p->element_bytes;
    const int64_t local_begin = run->local_begin * p->local_strides[p->dim] * p->element_bytes;
    copy.from = (const char *)from + (to_global ? local_begin : global_begin);
    copy.to = (char *)to + (to_global ? global_begin : local_begin);
    return copy;
}

// A memcpy of a constant size is one load and one store.
#define RT_COPY_ELEMENTS(bytes)                                                                                        \
    for (int64_t i = 0; i < num_elements; i++) memcpy(to + i * to_step, from + i * from_step, (size_t)(bytes))

static void copy_row(char *to, int64_t to_step, const char *from, int64_t from_step, int64_t num_elements,
                     int64_t element_bytes) {
    if (to_step == element_bytes && from_step == element_bytes) {
        memcpy(to, from, (size_t)(num_elements * element_bytes));
        return;
    }
    switch (element_bytes) {
    case 1:
        RT_COPY_ELEMENTS(1);
        break;
    case 2:
        RT_COPY_ELEMENTS(2);
        break;
    case 4:
        RT_COPY_ELEMENTS(4);
        break;
    case 8:
        RT_COPY_ELEMENTS(8);
        break;
    case 16:
        RT_COPY_ELEMENTS(16);
        break;
    default:
        RT_COPY_ELEMENTS(element_bytes);
        break;
    }
}

// Copies the elements first .. last - 1, counted in the order of the loops.
static void copy_range(const rt_strided_copy *copy, int64_t first, int64_t last) {
    const int64_t inner = copy->ndim - 1;
    while (first < last) {
        int64_t index = first / copy->size[inner];
        const int64_t column = first % copy->size[inner];
        int64_t count = copy->size[inner] - column;
        if (count > last - first) count = last - first;
        const char *from = copy->from + column * copy->from_step[inner];
        char *to = copy->to + column * copy->to_step[inner];
        for (int64_t d = inner - 1; d >= 0; d--) {
            from += index % copy->size[d] * copy->from_step[d];
            to += index % copy->size[d] * copy->to_step[d];
            index /= copy->size[d];
        }
        copy_row(to, copy->to_step[inner], from, copy->from_step[inner], count, copy->element_bytes);
        first += count;
    }
}

// The first element of a task when num_tasks tasks share num_elements evenly.
static int64_t share(int64_t num_elements, int64_t task, int64_t num_tasks) {
    return num_elements / num_tasks * task + num_elements % num_tasks * task / num_tasks;
}

// A task copies its share of every run.
static void run_task(void *ctx, int64_t task, int64_t worker) {
    (void)worker;
    const shard_job *job = ctx;
    for (int64_t r = 0; r < job->p->num_runs; r++) {
        const rt_strided_copy copy = rt_copy_of_run(job->p, &job->p->runs[r], job->from, job->to, job->to_global);
        copy_range(&copy, share(copy.num_elements, task, job->num_tasks),
                   share(copy.num_elements, task + 1, job->num_tasks));
    }
}

rt_status rt_shard_check(const rt_shard_params *p, const void *from, const void *to, bool to_global,
                         int64_t *num_bytes) {
    *num_bytes = 0;
    if (p == NULL) return RT_BAD_POINTER;
    if (p->ndim < 1 || p->ndim > RT_MAX_DIMS || p->dim < 0 || p->dim >= p->ndim) return RT_BAD_DIM;
    if (!rt_points_to(p->sizes, sizeof(int64_t)) || !rt_points_to(p->global_strides, sizeof(int64_t)) ||
        !rt_points_to(p->local_strides, sizeof(int64_t)))
        return RT_BAD_POINTER;
    if (p->element_bytes < 1 || p->global_len < 0) return RT_BAD_SHAPE;
    int64_t global_sizes[RT_MAX_DIMS];
    for (int64_t d = 0; d < p->ndim; d++) {
        if (p->sizes[d] < 0) return RT_BAD_SHAPE;
        global_sizes[d] = d == p->dim ? p->global_len : p->sizes[d];
    }
    if (!rt_array_fits(p->ndim, p->sizes, p->local_strides, p->element_bytes) ||
        !rt_array_fits(p->ndim, global_sizes, p->global_strides, p->element_bytes))
        return RT_TOO_LARGE;
    if (to_global ? rt_overlaps(p->ndim, global_sizes, p->global_strides)
                  : rt_overlaps(p->ndim, p->sizes, p->local_strides))
        return RT_BAD_STRIDE;
    const rt_status status = rt_runs_check_inside(p->runs, p->num_runs, p->sizes[p->dim], p->global_len);
    if (status != RT_OK) return status;
    if (p->num_runs == 0) return RT_OK;
    *num_bytes = p->element_bytes;
    for (int64_t d = 0; d < p->ndim; d++) *num_bytes *= p->sizes[d];
    if (*num_bytes == 0) return RT_OK;
    if (from == NULL || to == NULL) return RT_BAD_POINTER;
    const void *const global = to_global ? to : from, *const local = to_global ? from : to;
    const bool shared = rt_share_memory(rt_bytes_of(global, p->ndim, global_sizes, p->global_strides, p->element_bytes),
                                        rt_bytes_of(local, p->ndim, p->sizes, p->local_strides, p->element_bytes));
    return shared ? RT_SHARED_MEMORY : RT_OK;
}

static rt_status copy_runs(const rt_shard_params *p, const void *from, void *to, bool to_global, rt_parallel parallel) {
    int64_t num_bytes;
    const rt_status status = rt_shard_check(p, from, to, to_global, &num_bytes);
    if (status != RT_OK || num_bytes == 0) return status;

    // Waking a worker costs about as much as copying this many bytes.
    enum { TASK_BYTES = 64 * 1024 };
    int64_t num_tasks = num_bytes / TASK_BYTES;
    if (num_tasks > parallel.num_workers) num_tasks = parallel.num_workers;
    if (num_tasks < 1) num_tasks = 1;
    shard_job job = {.p = p, .from = from, .to = to, .to_global = to_global, .num_tasks = num_tasks};
    rt_for_each(parallel, num_tasks, run_task, &job);
    return RT_OK;
}

rt_status rt_shard(const rt_shard_params *p, const void *global, void *local, rt_parallel parallel) {
    return copy_runs(p, global, local, false, parallel);
}

rt_status rt_unshard(const rt_shard_params *p, const void *local, void *global, rt_parallel parallel) {
    return copy_runs(p, local, global, true, parallel);
}
