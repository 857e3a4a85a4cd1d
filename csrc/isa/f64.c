// The f64 kernels of every CPU. They check the others, so they are portable rather than fast.
#define RT_VECTOR_BYTES 16
#define RT_PANEL_VECS 2
#define RT_REAL_BITS 64
#define RT_KERNELS rt_kernels_f64
#include "kernel_table.inc"
