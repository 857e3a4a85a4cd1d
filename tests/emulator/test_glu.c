// Runs tests/c/test_glu.c on the CUDA kernels.
#include "core_on_emulator.h"

#include "../c/test_glu.c"
