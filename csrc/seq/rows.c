// Rows of tensors packed, unpacked and added: strided copies of any number of dims and any dtype.
#include "rows.h"
#include "../parallel.h"
#include "runs.h"

#include <string.h>

typedef struct rows_job {
    const rt_rows_params *p;
    rt_rows_pass pass;
    int64_t num_tasks;
} rows_job;

// A copy of num_elements elements, as nested loops; dim 0 is the outermost. Steps are in bytes.
typedef struct strided_copy {
    int64_t ndim, element_bytes, num_elements;
    int64_t size[RT_MAX_DIMS], from_step[RT_MAX_DIMS], to_step[RT_MAX_DIMS];
    const char *from;
    char *to;
} strided_copy;

// The copy of one run, with as few loops as possible: dims of size 1 are dropped, and neighbouring dims that are
// contiguous in both tensors are merged. At least one loop remains.
static strided_copy copy_of_run(const rt_rows_tensor *x, const rt_run *run, bool to_global) {
    strided_copy copy = {.element_bytes = x->element_bytes, .num_elements = 1};
    for (int64_t d = 0; d < x->ndim; d++) {
        const bool sharded = d == x->dim;
        const int64_t size = sharded ? run->length : x->sizes[d];
        copy.num_elements *= size;
        if (size == 1) continue;
        const int64_t global_step = x->global_strides[d] * x->element_bytes * (sharded ? run->stride : 1);
        const int64_t local_step = x->local_strides[d] * x->element_bytes;
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
    if (copy.num_elements == 0) return copy;        // of arrays that may be NULL
    if (copy.ndim == 0) copy.size[copy.ndim++] = 1; // one element: its step is never taken

    char *const global = (char *)x->global + run->global_begin * x->global_strides[x->dim] * x->element_bytes;
    char *const local = (char *)x->local + run->local_begin * x->local_strides[x->dim] * x->element_bytes;
    copy.from = to_global ? local : global;
    copy.to = to_global ? global : local;
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

// Numbers of a power of 2 bytes are aligned to them, as the check demands.
static void add_row(char *to, int64_t to_step, const char *from, int64_t from_step, int64_t num_elements,
                    int64_t element_bytes) {
    if (element_bytes == sizeof(double)) {
        for (int64_t i = 0; i < num_elements; i++)
            *(double *)(to + i * to_step) += *(const double *)(from + i * from_step);
    } else if (to_step == sizeof(float) && from_step == sizeof(float)) {
        for (int64_t i = 0; i < num_elements; i++) ((float *)to)[i] += ((const float *)from)[i];
    } else {
        for (int64_t i = 0; i < num_elements; i++)
            *(float *)(to + i * to_step) += *(const float *)(from + i * from_step);
    }
}

// Copies, or adds, the elements first .. last - 1, counted in the order of the loops.
static void copy_range(const strided_copy *copy, bool adds, int64_t first, int64_t last) {
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
        (adds ? add_row : copy_row)(to, copy->to_step[inner], from, copy->from_step[inner], count, copy->element_bytes);
        first += count;
    }
}

// The first element of a task when num_tasks tasks share num_elements evenly.
static int64_t share(int64_t num_elements, int64_t task, int64_t num_tasks) {
    return num_elements / num_tasks * task + num_elements % num_tasks * task / num_tasks;
}

// A task copies its share of every run of every tensor.
static void run_task(void *ctx, int64_t task, int64_t worker) {
    (void)worker;
    const rows_job *job = ctx;
    for (int64_t i = 0; i < job->p->num_tensors; i++)
        for (int64_t r = 0; r < job->p->num_runs; r++) {
            const strided_copy copy = copy_of_run(&job->p->tensors[i], &job->p->runs[r], job->pass != RT_ROWS_PACK);
            copy_range(&copy, job->pass == RT_ROWS_ADD, share(copy.num_elements, task, job->num_tasks),
                       share(copy.num_elements, task + 1, job->num_tasks));
        }
}

// arrays: the bytes of global and of local.
static rt_status check_tensor(const rt_rows_tensor *x, const rt_rows_params *p, bool to_global, int64_t *num_bytes,
                              rt_bytes arrays[2]) {
    if (x->ndim < 1 || x->ndim > RT_MAX_DIMS || x->dim < 0 || x->dim >= x->ndim) return RT_BAD_DIM;
    if (!rt_points_to(x->sizes, sizeof(int64_t)) || !rt_points_to(x->global_strides, sizeof(int64_t)) ||
        !rt_points_to(x->local_strides, sizeof(int64_t)))
        return rt_wrong(RT_BAD_POINTER, "sizes, global_strides or local_strides");
    if (x->element_bytes < 1 || x->global_len < 0) return rt_wrong(RT_BAD_SHAPE, "element_bytes or global_len");
    int64_t global_sizes[RT_MAX_DIMS];
    for (int64_t d = 0; d < x->ndim; d++) {
        if (x->sizes[d] < 0) return rt_wrong(RT_BAD_SHAPE, "sizes");
        global_sizes[d] = d == x->dim ? x->global_len : x->sizes[d];
    }
    if (!rt_array_fits(x->ndim, x->sizes, x->local_strides, x->element_bytes)) return rt_wrong(RT_TOO_LARGE, "local");
    if (!rt_array_fits(x->ndim, global_sizes, x->global_strides, x->element_bytes))
        return rt_wrong(RT_TOO_LARGE, "global");
    if (to_global ? rt_overlaps(x->ndim, global_sizes, x->global_strides)
                  : rt_overlaps(x->ndim, x->sizes, x->local_strides))
        return rt_wrong(RT_BAD_STRIDE, to_global ? "global" : "local");
    const rt_status status = rt_runs_check_inside(p->runs, p->num_runs, x->sizes[x->dim], x->global_len);
    if (status != RT_OK) return status;
    *num_bytes = p->num_runs == 0 ? 0 : x->element_bytes;
    for (int64_t d = 0; d < x->ndim; d++) *num_bytes *= x->sizes[d];
    if (*num_bytes > 0 && (x->global == NULL || x->local == NULL))
        return rt_wrong(RT_BAD_POINTER, x->global == NULL ? "global" : "local");
    arrays[0] = rt_bytes_of("global", x->global, x->ndim, global_sizes, x->global_strides, x->element_bytes);
    arrays[1] = rt_bytes_of("local", x->local, x->ndim, x->sizes, x->local_strides, x->element_bytes);
    for (int i = 0; i < 2 && *num_bytes == 0; i++) arrays[i].end = arrays[i].begin; // neither read nor written
    return RT_OK;
}

rt_status rt_rows_check(const rt_rows_params *p, rt_rows_pass pass, rt_dtype dtype, int64_t *num_bytes) {
    *num_bytes = 0;
    if (p == NULL) return rt_wrong(RT_BAD_POINTER, "p");
    if (p->num_tensors < 0 || p->num_tensors > RT_MAX_ROWS_TENSORS) return rt_wrong(RT_BAD_SHAPE, "num_tensors");
    if (p->num_tensors > 0 && !rt_points_to(p->tensors, sizeof(int64_t))) return rt_wrong(RT_BAD_POINTER, "tensors");
    if (pass == RT_ROWS_ADD && dtype != RT_F32 && dtype != RT_F64) return RT_BAD_DTYPE;
    rt_bytes arrays[2 * RT_MAX_ROWS_TENSORS]; // first those that are written
    for (int64_t i = 0; i < p->num_tensors; i++) {
        const rt_rows_tensor *const x = &p->tensors[i];
        int64_t tensor_bytes = 0;
        rt_bytes of_tensor[2];
        const rt_status status = check_tensor(x, p, pass != RT_ROWS_PACK, &tensor_bytes, of_tensor);
        if (status != RT_OK) return status;
        if (pass == RT_ROWS_ADD) {
            const int64_t width = dtype == RT_F64 ? 8 : 4;
            if (x->element_bytes != width) return RT_BAD_DTYPE;
            if (tensor_bytes > 0 && (!rt_points_to(x->global, width) || !rt_points_to(x->local, width)))
                return rt_wrong(RT_BAD_POINTER, "global or local");
        }
        arrays[i] = of_tensor[pass == RT_ROWS_PACK];
        arrays[p->num_tensors + i] = of_tensor[pass != RT_ROWS_PACK];
        *num_bytes += tensor_bytes;
        if (*num_bytes > RT_MAX_BYTES) return rt_wrong(RT_TOO_LARGE, "tensors");
    }
    return rt_outputs_share_memory(arrays, p->num_tensors, 2 * p->num_tensors);
}

static rt_status copy_rows(const rt_rows_params *p, rt_rows_pass pass, rt_dtype dtype, rt_parallel parallel) {
    int64_t num_bytes;
    const rt_status status = rt_rows_check(p, pass, dtype, &num_bytes);
    if (status != RT_OK || num_bytes == 0) return status;

    // Waking a worker costs about as much as copying this many bytes.
    enum { TASK_BYTES = 64 * 1024 };
    int64_t num_tasks = num_bytes / TASK_BYTES;
    if (num_tasks > parallel.num_workers) num_tasks = parallel.num_workers;
    if (num_tasks < 1) num_tasks = 1;
    rows_job job = {.p = p, .pass = pass, .num_tasks = num_tasks};
    rt_for_each(parallel, num_tasks, run_task, &job);
    return RT_OK;
}

rt_status rt_rows_pack(const rt_rows_params *p, rt_parallel parallel) {
    return copy_rows(p, RT_ROWS_PACK, RT_F32, parallel);
}

rt_status rt_rows_unpack(const rt_rows_params *p, rt_parallel parallel) {
    return copy_rows(p, RT_ROWS_UNPACK, RT_F32, parallel);
}

rt_status rt_rows_add(const rt_rows_params *p, rt_dtype dtype, rt_parallel parallel) {
    return copy_rows(p, RT_ROWS_ADD, dtype, parallel);
}
