// The preconditions of dropout, and its threshold, on every device.
#ifndef RINGTILE_DROPOUT_DROPOUT_H
#define RINGTILE_DROPOUT_DROPOUT_H

#include "../ringtile.h"

#ifdef __cplusplus
extern "C" {
#endif

//   RT_BAD_DTYPE, RT_BAD_SHAPE, RT_BAD_PROBABILITY, RT_BAD_POINTER
rt_status rt_dropout_check(const rt_dropout_params *p, const void *x, const int64_t *places, const void *y);

// A feature is kept if its random number is at most last_kept, and then multiplied by scale; scale is 0 if none is
// kept.
typedef struct rt_dropout_rule {
    uint32_t last_kept;
    double scale;
} rt_dropout_rule;

rt_dropout_rule rt_dropout_rule_of(double probability);

#ifdef __cplusplus
}
#endif
#endif // RINGTILE_DROPOUT_DROPOUT_H
