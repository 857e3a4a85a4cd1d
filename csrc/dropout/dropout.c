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
} dropout_job;

static void run_tokens(const void *ctx, int64_t first, int64_t last) {
    const dropout_job *job = ctx;
    job->kernels->dropout(job->p, job->x, job->places, job->y, first, last);
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
    const int64_t T = p->num_tokens, F = p->num_features, element_bytes = rt_element_bytes(p->dtype);
    rt_arrays all = {0};
    rt_add_array(&all, true, (rt_array){y, element_bytes, 2, {T, F}, NULL, false});
    rt_add_array(&all, false, (rt_array){x, element_bytes, 2, {T, F}, &p->x_stride, false});
    rt_add_array(&all, false, (rt_array){places, sizeof(*places), 2, {T, 2}, NULL, false});
    return rt_check_arrays(&all);
}

rt_status rt_dropout(const rt_dropout_params *p, const void *x, const int64_t *places, void *y, rt_parallel parallel) {
    const rt_kernels *kernels;
    rt_status status = rt_dropout_check(p, x, places, y);
    if (status == RT_OK) status = rt_kernels_for(p->dtype, &kernels);
    if (status != RT_OK || p->num_tokens == 0 || p->num_features == 0) return status;
    const dropout_job job = {p, kernels, x, places, y};
    rt_for_rows(parallel, p->num_tokens, rt_rows_per_task(p->num_features), run_tokens, &job);
    return RT_OK;
}
