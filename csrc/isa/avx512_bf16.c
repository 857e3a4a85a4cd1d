// AVX-512 with vdpbf16ps, the dot product of bf16 pairs. Attention and weight gradients use it where both
// operands are bf16.
#if defined(__x86_64__)
#include "avx512.h"
RT_AVX512(",avx512bf16")
#define RT_BF16_PAIRS
#define RT_KERNELS rt_kernels_avx512_bf16
#include "kernel_table.inc"
RT_TARGET_END
#else
typedef int rt_no_avx512_bf16; // ISO C forbids an empty translation unit
#endif
