// Vector arithmetic on GCC's and Clang's vector extensions: a `vec` holds LANES numbers of the math type `real`. A file
// of csrc/isa defines RT_VECTOR_BYTES and RT_REAL_BITS (32 or 64), then includes this and the kernels.
#ifndef RINGTILE_VEC_H
#define RINGTILE_VEC_H

#include "ringtile.h"

#include <math.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if RT_REAL_BITS == 64
typedef double real;
typedef int64_t real_bits;
#else
typedef float real;
typedef int32_t real_bits;
#endif
enum { LANES = RT_VECTOR_BYTES / sizeof(real) };

typedef real vec __attribute__((vector_size(RT_VECTOR_BYTES)));
typedef real_bits vec_bits __attribute__((vector_size(RT_VECTOR_BYTES))); // a comparison gives 0 or -1 per lane

static inline vec vec_set(real x) { return x - (vec){0}; }

static inline vec vec_load(const real *from) {
    vec v;
    memcpy(&v, from, sizeof(v));
    return v;
}

static inline void vec_store(real *to, vec v) { memcpy(to, &v, sizeof(v)); }

static inline vec vec_select(vec_bits mask, vec yes, vec no) {
    return (vec)(((vec_bits)yes & mask) | ((vec_bits)no & ~mask));
}

// Lane l is a[l + offset] where l lacks the bit `half`, else b[l - half + offset].
static inline __attribute__((always_inline)) vec vec_weave(vec a, vec b, int half, int offset) {
#if defined(__clang__) // which makes one shuffle of the loop; GCC would not
    vec woven;
#pragma GCC unroll 16
    for (int l = 0; l < LANES; l++) woven[l] = l & half ? b[l - half + offset] : a[l + offset];
    return woven;
#else
    vec_bits from = {0};
#pragma GCC unroll 16
    for (int l = 0; l < LANES; l++) from[l] = (l & half ? LANES + l - half : l) + offset;
    return __builtin_shuffle(a, b, from);
#endif
}

static inline vec vec_abs(vec x) { return (vec)((vec_bits)x & ~(vec_bits)(vec_set((real)-0.0))); }

// The larger number; `b` where either is NaN.
static inline vec vec_max(vec a, vec b) {
#if RT_REAL_BITS == 32 && RT_VECTOR_BYTES == 32 && defined(__x86_64__) // one instruction in place of two or three
    return (vec)_mm256_max_ps((__m256)a, (__m256)b);
#elif RT_REAL_BITS == 32 && RT_VECTOR_BYTES == 64 && !defined(RT_ISA_MODEL)
    return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return vec_select(a > b, a, b);
#endif
}

static inline real vec_reduce_max(vec v) {
    real max = v[0];
    for (int i = 1; i < LANES; i++) max = v[i] > max ? v[i] : max;
    return max;
}

static inline real vec_reduce_sum(vec v) {
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) v[i] += v[i + half];
    return v[0];
}

#if RT_REAL_BITS == 64

static inline vec vec_exp(vec x) {
    for (int i = 0; i < LANES; i++) x[i] = exp(x[i]);
    return x;
}

static inline vec vec_tanh(vec x) {
    for (int i = 0; i < LANES; i++) x[i] = tanh(x[i]);
    return x;
}

#else

// The two factors of exp x = 2^n exp r, with x = n ln 2 + r and |r| <= ln 2 / 2. Returns exp r; the low bits of *power
// are n + offset.
static inline vec vec_exp_split(vec x, int offset, vec_bits *power) {
    const vec shift = vec_set(0x1.8p23f + (float)offset); // adding it rounds to an integer, in the low bits
    const vec shifted = x * 0x1.715476p+0f + shift, n = shifted - shift;
    const vec r = (x - n * 0x1.62e4p-1f) - n * 0x1.7f7d1cp-20f; // ln 2 in two parts; the first product is exact
    vec p = vec_set(1.39269266e-3f);
    p = p * r + 8.36377387e-3f;
    p = p * r + 4.16665501e-2f;
    p = p * r + 1.66665734e-1f;
    p = p * r + 0.5f;
    *power = (vec_bits)shifted;
    return p * (r * r) + r + 1;
}

// exp to 1.1 ulp over all of f32: x = n ln 2 + r, |r| <= ln 2 / 2, exp x = 2^n exp r. 2^n is applied in two halves, so
// that subnormal results are right too. NaN gives NaN.
static inline vec vec_exp(vec x) {
    x = vec_select(x > 89, vec_set(89), vec_select(x < -105, vec_set(-105), x));
    vec_bits power;
    const vec fraction = vec_exp_split(x, 0, &power);
    const vec_bits exponent = power - (vec_bits)vec_set(0x1.8p23f), half = exponent >> 1;
    return fraction * (vec)((half + 127) << 23) * (vec)((exponent - half + 127) << 23);
}

// tanh to 1.6 ulp: a polynomial near 0, where 1 - exp(-2 |x|) would cancel.
static inline vec vec_tanh(vec x) {
    const vec y = x * x;
    vec p = vec_set(-6.09671417e-3f);
    p = p * y + 2.0997179e-2f;
    p = p * y - 5.38509096e-2f;
    p = p * y + 1.33327697e-1f;
    p = p * y - 3.33333289e-1f;
    const vec near = x + x * y * p, size = vec_abs(x), e = vec_exp(size * -2), far = (1 - e) / (1 + e);
    return vec_select(size < 0.625f, near, vec_select(x < 0, -far, far));
}

#endif
#endif // RINGTILE_VEC_H
