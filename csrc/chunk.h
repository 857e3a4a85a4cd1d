// Chunks: a stretch of a row, widened to the math type in a buffer on the stack, so that kernels see neither dtypes nor
// tails.
#ifndef RINGTILE_CHUNK_H
#define RINGTILE_CHUNK_H

#include "half.h"
#include "vec.h"

enum { CHUNK = 512 }; // elements; three chunks of f32 are 6 KiB, a fraction of any L1 cache

// Widens elements first .. first + num_elements - 1 of an array into `to`, then adds zeros up to a whole vec.
static inline void load_chunk(rt_dtype dtype, const void *array, int64_t first, int64_t num_elements, real *to) {
    for (int64_t i = num_elements; i % LANES != 0; i++) to[i] = 0;
    const uint16_t *bf16 = array;
    const half *f16 = array;
    if (dtype == RT_BF16)
        for (int64_t i = 0; i < num_elements; i++) to[i] = bf16_to_f32(bf16[first + i]);
    else if (dtype == RT_F16)
        for (int64_t i = 0; i < num_elements; i++) to[i] = (real)f16[first + i];
    else
        memcpy(to, (const real *)array + first, (size_t)num_elements * sizeof(real));
}

static inline void store_chunk(rt_dtype dtype, void *array, int64_t first, int64_t num_elements, const real *from) {
    uint16_t *bf16 = array;
    half *f16 = array;
    if (dtype == RT_BF16)
        for (int64_t i = 0; i < num_elements; i++) bf16[first + i] = f32_to_bf16((float)from[i]);
    else if (dtype == RT_F16)
        for (int64_t i = 0; i < num_elements; i++) f16[first + i] = (half)from[i];
    else
        memcpy((real *)array + first, from, (size_t)num_elements * sizeof(real));
}

#endif // RINGTILE_CHUNK_H
