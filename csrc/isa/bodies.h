// Compiles every body for the instruction set and math type of the including file, into one table.
#include "../loss/cross_entropy_kernel.h"
#include "../mlp/glu_kernel.h"
#include "kernels.h"

const rt_kernels RT_KERNELS = {.glu = glu, .cross_entropy = cross_entropy};
