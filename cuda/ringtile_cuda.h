// The core on CUDA devices: the functions of ringtile.h with a stream in place of threads, and the same params, whose
// arrays lie in the memory of the current device; runs and the sizes and strides of a shard lie in host memory, and
// are read before the call returns. Launches go to `stream` (a cudaStream_t), nothing allocates or waits for the device,
// and a call can be captured in a CUDA graph.
//   RT_CUDA   besides the errors of ringtile.h: the CUDA runtime refused
//   RT_BAD_CUDA_ISA   attention in bf16 and f16: RINGTILE_CUDA_ISA names kernels that are not there, or not for this device
#ifndef RINGTILE_CUDA_H
#define RINGTILE_CUDA_H

#include "../csrc/ringtile.h"

#ifdef __cplusplus
extern "C" {
#endif

rt_status rt_cuda_shard(const rt_shard_params *p, const void *global, void *local, void *stream);
rt_status rt_cuda_unshard(const rt_shard_params *p, const void *local, void *global, void *stream);

rt_status rt_cuda_glu_fwd(const rt_glu_params *p, const void *gate, const void *up, void *prod, void *stream);
rt_status rt_cuda_glu_bwd(const rt_glu_params *p, void *gate, void *up, void *dprod, void *stream);

// Labels lie on the device, so that a bad one gives no RT_BAD_LABEL: the loss, lse and gradient of its token are NaN.
rt_status rt_cuda_cross_entropy_fwd_bwd(const rt_cross_entropy_params *p, void *logits, const int64_t *labels,
                                        void *loss, void *lse, void *stream);

// bf16 and f16 multiply in tensor cores, with f32 sums and weights rounded to the dtype. Strides are as free as on the
// CPU; rows of q, k, v and dout that begin at multiples of 16 bytes are the fast case.
//   RT_BAD_SHAPE   also where num_queries or num_keys is above 2^31 - 1025, or num_kv_heads or batch above 65535
rt_status rt_cuda_attn_fwd(const rt_attn_params *p, void *stream);
// Deterministic: every gradient is summed in one order. dP = dout v^T and the products with P and dS are those
// of the dtype; where a weight P is 0, dS is 0.
//   RT_WORKSPACE   p->workspace is device memory, of rt_cuda_attn_bwd_workspace_bytes
rt_status rt_cuda_attn_bwd(const rt_attn_params *p, void *stream);
int64_t rt_cuda_attn_bwd_workspace_bytes(const rt_attn_params *p); // 0 also where p is malformed

// The arrays lie on the device; batch is at most 65535.
rt_status rt_cuda_attn_delta(const rt_attn_delta_params *p, const void *dout, const void *out,
                             const double *dlse, void *delta, void *stream);

#ifdef __cplusplus
}
#endif

#endif // RINGTILE_CUDA_H
