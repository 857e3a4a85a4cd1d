// AVX2: vectors of 32 bytes.
#if defined(__x86_64__)
#pragma GCC target("avx2,fma,f16c")
#define RT_VECTOR_BYTES 32
#define RT_PANEL_VECS 2
#define RT_REAL_BITS 32
#define RT_KERNELS rt_kernels_avx2
#include "bodies.h"
#else
typedef int rt_no_avx2; // ISO C wants a declaration in every file
#endif
