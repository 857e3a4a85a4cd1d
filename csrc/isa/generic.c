#include "generic.h"
#define RT_KERNELS rt_kernels_generic
#include "kernel_table.h"
