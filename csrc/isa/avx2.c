// AVX2: vectors of 32 bytes, 16 registers.
#if defined(__x86_64__)
#include "target.h"
#define RT_VECTOR_BYTES 32
#define RT_PANEL_VECS 2
#define RT_REAL_BITS 32
RT_TARGET("avx2,fma,f16c")
#define RT_KERNELS rt_kernels_avx2
#include "kernel_table.inc"
RT_TARGET_END
#else
typedef int rt_no_avx2; // ISO C forbids an empty translation unit
#endif
