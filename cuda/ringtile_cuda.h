// The core on CUDA devices: the functions of ringtile.h with a stream in place of threads. The params are the same;
// arrays are in the memory of the current device, but runs, and the sizes and strides of rows, are in host
// memory and are read before the call returns. Kernels are launched on `stream` (a cudaStream_t). No call allocates
// or waits for the device, and each can be captured in a CUDA graph. Besides the errors of ringtile.h:
//   RT_CUDA           the CUDA runtime refused; rt_cuda_last_error() says what, and why
//   RT_BAD_CUDA_ISA   attention in bf16 and f16: RINGTILE_CUDA_ISA names kernels that do not exist or cannot run here
#ifndef RINGTILE_CUDA_H
#define RINGTILE_CUDA_H

#include "../csrc/ringtile.h"

#ifdef __cplusplus
extern "C" {
#endif

// About the last RT_CUDA of this thread: the CUDA runtime's text, the kernel, its grid, the device and versions. Never
// NULL; "" if there was none. It stays until the next one. Nothing else here is kept between calls.
const char *rt_cuda_last_error(void);

// One launch for up to four tensors, and for every RT_CUDA_MAX_RUNS runs; for all runs if there is a table.
//   table (num_runs)   the same runs in the memory of the device, or NULL
enum { RT_CUDA_MAX_RUNS = 64 };
rt_status rt_cuda_rows_pack(const rt_rows_params *p, const rt_run *table, void *stream);
rt_status rt_cuda_rows_unpack(const rt_rows_params *p, const rt_run *table, void *stream);
rt_status rt_cuda_rows_add(const rt_rows_params *p, rt_dtype dtype, const rt_run *table, void *stream);

rt_status rt_cuda_glu_fwd(const rt_glu_params *p, const void *gate, const void *up, void *prod, void *stream);
rt_status rt_cuda_glu_bwd(const rt_glu_params *p, void *gate, void *up, void *dprod, void *stream);

// Labels are on the device, so a bad one is not RT_BAD_LABEL: the loss, lse and gradient of its token are NaN.
rt_status rt_cuda_cross_entropy_fwd_bwd(const rt_cross_entropy_params *p, void *logits, const int64_t *labels,
                                        void *loss, void *lse, void *stream);

// bf16 and f16 use tensor cores, with f32 sums and weights rounded to the dtype. Any strides that the CPU accepts
// work; rows of q, k, v and dout that begin at multiples of 16 bytes are fast.
//   RT_BAD_SHAPE   also if num_queries or num_keys exceeds 2^31 - 1025, or num_kv_heads or batch exceeds 65535
//   RT_WORKSPACE   workspace is not device memory of rt_cuda_attn_fwd_workspace_bytes
rt_status rt_cuda_attn_fwd(const rt_attn_fwd_params *p, void *stream);
int64_t rt_cuda_attn_fwd_workspace_bytes(const rt_attn_fwd_params *p); // 0 also if p is malformed
// Deterministic: every gradient is summed in one order. dP = dout v^T, and P and dS are rounded to the dtype before
// they are multiplied; where a weight P is 0, dS is 0.
//   RT_WORKSPACE   workspace is not device memory of rt_cuda_attn_bwd_workspace_bytes
rt_status rt_cuda_attn_bwd(const rt_attn_bwd_params *p, void *stream);
int64_t rt_cuda_attn_bwd_workspace_bytes(const rt_attn_bwd_params *p); // 0 also if p is malformed

// batch is at most 65535.
rt_status rt_cuda_attn_delta(const rt_attn_delta_params *p, const void *dout, const void *out, const double *dlse,
                             void *delta, void *stream);

// rows are on the device: those that are not of out are left out.
rt_status rt_cuda_attn_merge(const rt_attn_merge_params *p, void *stream);

// Of the toolkit that compiled this, 1000 major + 10 minor: a driver for an older major runs none of it.
int rt_cuda_runtime_version(void);
int rt_cuda_driver_version(void); // the newest that the driver runs, likewise; 0 without a driver

#ifdef __cplusplus
}
#endif

#endif // RINGTILE_CUDA_H
