// AVX2: vectors of 32 bytes, 16 registers.
#include "target.h"
#define RT_AVX2 "avx2,fma,f16c"
#define RT_VECTOR_BYTES 32
#define RT_PANEL_VECS 2
#define RT_REAL_BITS 32
