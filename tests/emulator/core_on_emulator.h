// Lets the C tests of tests/c run the CUDA kernels on the emulator: included before them, it replaces the CPU's
// functions by the CUDA ones.
#ifndef RINGTILE_TESTS_CORE_ON_EMULATOR_H
#define RINGTILE_TESTS_CORE_ON_EMULATOR_H

#include "../../csrc/ringtile.h"

#ifdef __cplusplus
extern "C" {
#endif

// Each lends the kernels the arrays that the params describe, and no other bytes.
rt_status emulated_shard(const rt_shard_params *p, const void *global, void *local, rt_parallel parallel);
rt_status emulated_unshard(const rt_shard_params *p, const void *local, void *global, rt_parallel parallel);
rt_status emulated_glu_fwd(const rt_glu_params *p, const void *gate, const void *up, void *prod, rt_parallel parallel);
rt_status emulated_glu_bwd(const rt_glu_params *p, void *gate, void *up, void *dprod, rt_parallel parallel);
rt_status emulated_cross_entropy_fwd_bwd(const rt_cross_entropy_params *p, void *logits, const int64_t *labels,
                                         void *loss, void *lse, rt_parallel parallel);
rt_status emulated_dropout(const rt_dropout_params *p, const void *x, const int64_t *places, void *y,
                           rt_parallel parallel);
rt_status emulated_attn_delta(const rt_attn_delta_params *p, const void *dout, const void *out, const double *dlse,
                              void *delta, rt_parallel parallel);

#ifdef __cplusplus
}
#else
#define rt_shard emulated_shard
#define rt_unshard emulated_unshard
#define rt_glu_fwd emulated_glu_fwd
#define rt_glu_bwd emulated_glu_bwd
#define rt_cross_entropy_fwd_bwd emulated_cross_entropy_fwd_bwd
#define rt_dropout emulated_dropout
#define rt_attn_delta emulated_attn_delta
#endif
#endif // RINGTILE_TESTS_CORE_ON_EMULATOR_H
