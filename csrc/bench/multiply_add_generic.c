#include "../isa/generic.h"
#define RT_MULTIPLY_ADD rt_multiply_add_generic
#include "multiply_add_kernel.h"
