// Dropout whose random numbers do not depend on how the work is shared.
#ifndef RINGTILE_API_DROPOUT_H
#define RINGTILE_API_DROPOUT_H

#include "base.h"

#ifdef __cplusplus
extern "C" {
#endif

// Dropout whose random numbers are a function of what is dropped, in whatever order, array and process it is computed.
// Word feature % 4 of Philox4x32-10 with the key (seed, step) and the counter (feature / 4, position, row, stream)
// decides about a feature of a token; places beyond 32 bits count modulo 2^32.
typedef struct rt_dropout_params {
    rt_dtype dtype;
    int64_t num_tokens, num_features, x_stride; // elements between tokens
    double probability;                         // of a 0; rounded to a multiple of 2^-32
    uint32_t seed, step, stream;
} rt_dropout_params;

// y = x / (1 - probability) where the word is below (1 - probability) 2^32, else y = 0 x. The backward is the same
// function of dy. Computes in f32 (f64 if dtype is RT_F64) and rounds to dtype once.
//   x (T, F)    places (T, 2): the row and the position of each token    y (T, F), contiguous
//   RT_BAD_DTYPE, RT_BAD_SHAPE, RT_BAD_PROBABILITY
rt_status rt_dropout(const rt_dropout_params *p, const void *x, const int64_t *places, void *y, rt_parallel parallel);

#ifdef __cplusplus
}
#endif

#endif // RINGTILE_API_DROPOUT_H
