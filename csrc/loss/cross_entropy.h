// The preconditions of softmax cross entropy on every device, all but the labels' values.
#ifndef RINGTILE_LOSS_CROSS_ENTROPY_H
#define RINGTILE_LOSS_CROSS_ENTROPY_H

#include "../ringtile.h"

#ifdef __cplusplus
extern "C" {
#endif

//   RT_BAD_DTYPE, RT_BAD_SHAPE, RT_BAD_STRIDE, RT_BAD_SCALE, RT_BAD_POINTER
rt_status rt_cross_entropy_check(const rt_cross_entropy_params *p, const void *logits, const void *labels,
                                 const void *loss, const void *lse);

#ifdef __cplusplus
}
#endif
#endif // RINGTILE_LOSS_CROSS_ENTROPY_H
