// The preconditions of attention. The entry points of the CPU and CUDA kernels check them.
#ifndef RINGTILE_ATTN_ATTN_H
#define RINGTILE_ATTN_ATTN_H

#include "../ringtile.h"

#ifdef __cplusplus
extern "C" {
#endif

// What the size of the workspace depends on; the entry points check it once, with all else.
//   RT_BAD_DTYPE, RT_BAD_SHAPE, RT_BAD_HEADS, RT_BAD_HEAD_DIM, RT_TOO_LARGE
rt_status rt_attn_check_sizes(const rt_attn_block *p);
//   RT_BAD_DTYPE, RT_BAD_SHAPE, RT_BAD_HEADS, RT_BAD_HEAD_DIM, RT_BAD_SCALE, RT_BAD_PROBABILITY, RT_BAD_MASK,
//   RT_TOO_LARGE, RT_BAD_POINTER, RT_BAD_RUN, RT_BAD_STRIDE, RT_SHARED_MEMORY; backward: RT_BAD_FRESH
rt_status rt_attn_check_fwd(const rt_attn_fwd_params *p);
rt_status rt_attn_check_bwd(const rt_attn_bwd_params *p);
//   RT_BAD_DTYPE, RT_BAD_SHAPE, RT_BAD_HEAD_DIM, RT_TOO_LARGE, RT_BAD_POINTER,
//   RT_SHARED_MEMORY
rt_status rt_attn_check_delta(const rt_attn_delta_params *p, const void *dout, const void *out, const double *dlse,
                              const void *delta);
// The numbers in rows are left to the kernel.
//   RT_BAD_DTYPE, RT_BAD_SHAPE, RT_BAD_HEAD_DIM, RT_TOO_LARGE, RT_BAD_POSITIONS, RT_BAD_POINTER, RT_SHARED_MEMORY
rt_status rt_attn_check_merge(const rt_attn_merge_params *p);

#ifdef __cplusplus
}
#endif

#endif // RINGTILE_ATTN_ATTN_H
