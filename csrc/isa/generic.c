// Any CPU: vectors of 16 bytes.
#define RT_VECTOR_BYTES 16
#if defined(__aarch64__) // 32 registers
#define RT_PANEL_VECS 4
#else
#define RT_PANEL_VECS 2
#endif
#define RT_REAL_BITS 32
#define RT_KERNELS rt_kernels_generic
#include "kernel_table.inc"
