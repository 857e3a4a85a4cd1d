// Any CPU: vectors of 16 bytes.
#define RT_VECTOR_BYTES 16
#define RT_PANEL_VECS 2
#define RT_REAL_BITS 32
#define RT_KERNELS rt_kernels_generic
#include "bodies.h"
