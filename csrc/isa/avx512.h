// AVX-512: vectors of 64 bytes, 32 registers.
#include "target.h"
#define RT_AVX512 "avx512f,avx512bw,avx512dq,avx512vl,fma,f16c"
#define RT_VECTOR_BYTES 64
#define RT_PANEL_VECS 4
#define RT_REAL_BITS 32
