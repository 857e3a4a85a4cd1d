// AVX-512: vectors of 64 bytes, 32 registers. RT_AVX512(more) is RT_TARGET of it and of more instructions.
#include "target.h"
#ifdef RT_ISA_MODEL
#define RT_AVX512(more) RT_TARGET("avx2,fma,f16c")
#else
#define RT_AVX512(more) RT_TARGET("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c" more)
#endif
#define RT_VECTOR_BYTES 64
#define RT_PANEL_VECS 4
#define RT_REAL_BITS 32
