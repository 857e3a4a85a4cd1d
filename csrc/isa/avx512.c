// AVX-512: vectors of 64 bytes.
#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c")
#define RT_VECTOR_BYTES 64
#define RT_PANEL_VECS 4
#define RT_REAL_BITS 32
#define RT_KERNELS rt_kernels_avx512
#include "bodies.h"
#else
typedef int rt_no_avx512; // ISO C wants a declaration in every file
#endif
