// The preconditions of the gated MLP, on every device.
#ifndef RINGTILE_GLU_GLU_H
#define RINGTILE_GLU_GLU_H

#include "../ringtile.h"

#ifdef __cplusplus
extern "C" {
#endif

// prod: in the backward, dprod.
//   RT_BAD_DTYPE, RT_BAD_KIND, RT_BAD_SHAPE, RT_BAD_STRIDE, RT_BAD_POINTER
rt_status rt_glu_check(const rt_glu_params *p, const void *gate, const void *up, const void *prod, bool backward);

#ifdef __cplusplus
}
#endif
#endif // RINGTILE_GLU_GLU_H
