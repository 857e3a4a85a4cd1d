// AVX-512 with AMX, which multiplies tiles of bf16 pairs. Attention and weight gradients in bf16 use it.
#include "avx512.h"
#ifdef RT_HAS_AMX
RT_AVX512(",avx512bf16,amx-tile,amx-bf16")
#define RT_TILES
#define RT_KERNELS rt_kernels_amx_bf16
#include "kernel_table.inc"
RT_TARGET_END
#else
#ifdef __x86_64__
#pragma message("ringtile is built without amx_bf16: this compiler lacks AMX, which GCC has from version 11 on")
#endif
typedef int rt_no_amx_bf16; // ISO C forbids an empty translation unit
#endif
