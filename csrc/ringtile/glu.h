// The gated product of an MLP: SwiGLU, GeGLU and their like.
#ifndef RINGTILE_API_GLU_H
#define RINGTILE_API_GLU_H

#include "base.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum rt_glu_kind { RT_GLU_SILU, RT_GLU_GELU, RT_GLU_GELU_TANH, RT_GLU_RELU } rt_glu_kind;

// Row-strided matrices of T rows and F columns.
typedef struct rt_glu_params {
    rt_dtype dtype;
    rt_glu_kind kind;
    int64_t num_rows, num_cols;
    int64_t gate_stride, up_stride, prod_stride; // elements between rows
} rt_glu_params;

// Both functions compute in f32 (f64 if dtype is RT_F64) and round to dtype once.
//   RT_BAD_DTYPE, RT_BAD_KIND, RT_BAD_SHAPE, RT_BAD_STRIDE

// prod = act(gate) * up                                (SwiGLU, GeGLU: arXiv:2002.05202)
rt_status rt_glu_fwd(const rt_glu_params *p, const void *gate, const void *up, void *prod, rt_parallel parallel);
// In place, one pass: gate <- dprod * up * act'(gate), up <- dprod * act(gate), dprod <- act(gate) * up. The weight
// gradient of the down projection needs that product next.
rt_status rt_glu_bwd(const rt_glu_params *p, void *gate, void *up, void *dprod, rt_parallel parallel);

#ifdef __cplusplus
}
#endif

#endif // RINGTILE_API_GLU_H
