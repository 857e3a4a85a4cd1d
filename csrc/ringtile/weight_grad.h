// The gradient of a linear layer's weight.
#ifndef RINGTILE_API_WEIGHT_GRAD_H
#define RINGTILE_API_WEIGHT_GRAD_H

#include "base.h"

#ifdef __cplusplus
extern "C" {
#endif

// Row-strided matrices, of T tokens, F outputs and E inputs of the layer.
typedef struct rt_weight_grad_params {
    rt_dtype dtype; // of dout and x
    int64_t num_tokens, num_outputs, num_inputs;
    const void *dout; // (T, F)
    const void *x;    // (T, E)
    void *sum;        // (F, E) f32, or f64 if dtype is RT_F64: added to
    int64_t dout_stride, x_stride, sum_stride;

    void *workspace; // 64-byte aligned
    int64_t workspace_bytes;
} rt_weight_grad_params;

// Bytes of workspace for p with num_workers workers, by its dtype and sizes; 0 if there is nothing to add, or if they
// are malformed or too large.
int64_t rt_weight_grad_workspace_bytes(const rt_weight_grad_params *p, int64_t num_workers);

// sum += dout^T x. Products of two bf16 or f16 are exact, and are summed as sum is. Where the CPU multiplies pairs of
// bf16, it reads subnormal inputs as 0, and subnormal sums become 0.
//   RT_BAD_DTYPE, RT_BAD_SHAPE, RT_BAD_STRIDE, RT_WORKSPACE
rt_status rt_weight_grad_add(const rt_weight_grad_params *p, rt_parallel parallel);

#ifdef __cplusplus
}
#endif

#endif // RINGTILE_API_WEIGHT_GRAD_H
