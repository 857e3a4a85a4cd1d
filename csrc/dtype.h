// Element types: which exist, how large they are, and which numbers the kernels can compute with.
#ifndef RINGTILE_DTYPE_H
#define RINGTILE_DTYPE_H

#include "ringtile.h"

#include <math.h>

static inline bool rt_is_dtype(rt_dtype dtype) {
    return dtype == RT_F64 || dtype == RT_F32 || dtype == RT_BF16 || dtype == RT_F16;
}

static inline int64_t rt_element_bytes(rt_dtype dtype) { return dtype == RT_F64 ? 8 : dtype == RT_F32 ? 4 : 2; }

// Of state and gradients, and of loss and lse.
static inline int64_t rt_state_bytes(rt_dtype dtype) { return dtype == RT_F64 ? 8 : 4; }

// Whether x is finite in the math type, which is f32 unless dtype is RT_F64.
static inline bool rt_is_finite(rt_dtype dtype, double x) { return dtype == RT_F64 ? isfinite(x) : isfinite((float)x); }

// 0, or a positive number that is finite in the math type, and so is its inverse.
static inline bool rt_is_softcap(rt_dtype dtype, double x) {
    return x == 0 || (x > 0 && rt_is_finite(dtype, x) && rt_is_finite(dtype, 1 / x));
}

#endif // RINGTILE_DTYPE_H
