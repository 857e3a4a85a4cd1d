#if defined(__x86_64__)
#include "avx512.h"
RT_AVX512("")
#define RT_KERNELS rt_kernels_avx512
#include "kernel_table.inc"
RT_TARGET_END
#else
typedef int rt_no_avx512; // ISO C forbids an empty translation unit
#endif
