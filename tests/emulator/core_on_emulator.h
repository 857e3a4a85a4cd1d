// Lets the C tests of tests/c run the CUDA kernels on the emulator: included before them, it replaces the CPU's
// functions by the CUDA ones.
#ifndef RINGTILE_TESTS_CORE_ON_EMULATOR_H
#define RINGTILE_TESTS_CORE_ON_EMULATOR_H

#include "../../csrc/ringtile.h"

#ifdef __cplusplus
extern "C" {
#endif

// Each lends the kernels the arrays that the params describe, and no other bytes.
rt_status emulated_rows_pack(const rt_rows_params *p, rt_parallel parallel);
rt_status emulated_rows_unpack(const rt_rows_params *p, rt_parallel parallel);
rt_status emulated_rows_add(const rt_rows_params *p, rt_dtype dtype, rt_parallel parallel);
rt_status emulated_glu_fwd(const rt_glu_params *p, const void *gate, const void *up, void *prod, rt_parallel parallel);
rt_status emulated_glu_bwd(const rt_glu_params *p, void *gate, void *up, void *dprod, rt_parallel parallel);
rt_status emulated_cross_entropy_fwd_bwd(const rt_cross_entropy_params *p, void *logits, const int64_t *labels,
                                         void *loss, void *lse, rt_parallel parallel);
rt_status emulated_attn_delta(const rt_attn_delta_params *p, const void *dout, const void *out, const double *dlse,
                              void *delta, rt_parallel parallel);
rt_status emulated_attn_merge(const rt_attn_merge_params *p, rt_parallel parallel);

#ifdef __cplusplus
}
#else
#define rt_rows_pack emulated_rows_pack
#define rt_rows_unpack emulated_rows_unpack
#define rt_rows_add emulated_rows_add
#define rt_glu_fwd emulated_glu_fwd
#define rt_glu_bwd emulated_glu_bwd
#define rt_cross_entropy_fwd_bwd emulated_cross_entropy_fwd_bwd
#define rt_attn_delta emulated_attn_delta
#define rt_attn_merge emulated_attn_merge
#endif
#endif // RINGTILE_TESTS_CORE_ON_EMULATOR_H
