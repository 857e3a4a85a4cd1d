// AVX-512 with dot products of bf16 pairs (vdpbf16ps), which attention takes where both operands are bf16.
#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma,f16c")
#define RT_VECTOR_BYTES 64
#define RT_PANEL_VECS 4
#define RT_REAL_BITS 32
#define RT_BF16_PAIRS
#define RT_KERNELS rt_kernels_avx512_bf16
#include "bodies.h"
#else
typedef int rt_no_avx512_bf16; // ISO C wants a declaration in every file
#endif
