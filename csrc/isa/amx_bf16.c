// AVX-512 with AMX, which multiplies tiles of bf16 pairs. Attention in bf16 uses it.
#include "avx512.h"
#ifdef RT_HAS_AMX
#ifndef RT_TILE_MODEL // vectors of 64 bytes run on any CPU
RT_TARGET(RT_AVX512 ",avx512bf16,amx-tile,amx-bf16")
#endif
#define RT_TILES
#define RT_KERNELS rt_kernels_amx_bf16
#include "kernel_table.h"
#ifndef RT_TILE_MODEL
RT_TARGET_END
#endif
#else
#ifdef __x86_64__
#pragma message("ringtile is built without amx_bf16: this compiler lacks AMX, which GCC has from version 11 on")
#endif
typedef int rt_no_amx_bf16; // ISO C forbids an empty translation unit
#endif
