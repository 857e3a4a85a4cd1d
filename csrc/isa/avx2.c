#if defined(__x86_64__)
#include "avx2.h"
RT_TARGET(RT_AVX2)
#define RT_KERNELS rt_kernels_avx2
#include "kernel_table.h"
RT_TARGET_END
#else
typedef int rt_no_avx2; // ISO C forbids an empty translation unit
#endif
