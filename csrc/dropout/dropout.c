// Dropout's entry point: it checks, then hands tokens to the workers.
#include "dropout.h"
#include "../arrays.h"
#include "../dtype.h"
#include "../isa/kernels.h"
#include "../parallel.h"

typedef struct dropout_job {
    const rt_dropout_params *p;
    const rt_kernels *kernels;
    const void *x;
    const int64_t *places;
    void *y;
    int64_t tokens_per_task;
} dropout_job;

static void run_task(void *ctx, int64_t task, int64_t worker) {
    (void)worker;
    const dropout_job *job = ctx;
    const int64_t first = task * job->tokens_per_task, last = first + job->tokens_per_task;
    job->kernels->dropout(job->p, job->x, job->places, job->y, first,
                          last < job->p->num_tokens ? last : job->p->num_tokens);
}

rt_dropout_rule rt_dropout_rule_of(double probability) {
    const double num_kept = nearbyint((1 - probability) * 0x1p32); // of the 2^32 random numbers
    if (num_kept < 1) return (rt_dropout_rule){0, 0};
    return (rt_dropout_rule){(uint32_t)(num_kept - 1), 1 / (1 - probability)};
}

rt_status rt_dropout_check(const rt_dropout_params *p, const void *x, const int64_t *places, const void *y) {
    if (p == NULL) return RT_BAD_POINTER;
    if (!rt_is_dtype(p->dtype)) return RT_BAD_DTYPE;
    if (p->num_tokens < 0 || p->num_features < 0) return RT_BAD_SHAPE;
    if (!(p->probability >= 0 && p->probability <= 1)) return RT_BAD_PROBABILITY;
    if (p->num_features > INT64_C(4) << 32) return RT_TOO_LARGE; // a counter holds feature / 4 in 32 bits
    const int64_t sizes[] = {p->num_tokens, p->num_features}, strides[] = {p->x_stride, 1};
    const int64_t pairs[] = {p->num_tokens, 2}, element_bytes = rt_element_bytes(p->dtype);
    if (!rt_array_fits(2, sizes, strides, element_bytes) || !rt_array_fits(2, sizes, NULL, element_bytes) ||
        !rt_array_fits(2, pairs, NULL, 8))
        return RT_TOO_LARGE;
    if (p->num_tokens > 0 && !rt_points_to(places, 8)) return RT_BAD_POINTER;
    const bool empty = p->num_tokens == 0 || p->num_features == 0;
    if (!empty && (!rt_points_to(x, element_bytes) || !rt_points_to(y, element_bytes))) return RT_BAD_POINTER;
    const rt_bytes bytes[] = {rt_bytes_of(y, 2, sizes, NULL, element_bytes),
                              rt_bytes_of(x, 2, sizes, strides, element_bytes), rt_bytes_of(places, 2, pairs, NULL, 8)};
    return rt_outputs_share_memory(bytes, 1, 3) ? RT_SHARED_MEMORY : RT_OK;
}

rt_status rt_dropout(const rt_dropout_params *p, const void *x, const int64_t *places, void *y, rt_parallel parallel) {
    const rt_kernels *kernels;
    rt_status status = rt_dropout_check(p, x, places, y);
    if (status == RT_OK) status = rt_kernels_for(p->dtype, &kernels);
    if (status != RT_OK || p->num_tokens == 0 || p->num_features == 0) return status;
    dropout_job job = {p, kernels, x, places, y, rt_rows_per_task(p->num_features)};
    rt_for_each(parallel, rt_num_tasks(p->num_tokens, job.tokens_per_task), run_task, &job);
    return RT_OK;
}
