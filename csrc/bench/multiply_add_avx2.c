#if defined(__x86_64__)
#include "../isa/avx2.h"
RT_TARGET(RT_AVX2)
#define RT_MULTIPLY_ADD rt_multiply_add_avx2
#include "multiply_add_kernel.h"
RT_TARGET_END
#else
typedef int rt_no_multiply_add_avx2; // ISO C forbids an empty translation unit
#endif
