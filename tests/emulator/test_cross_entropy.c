// Runs tests/c/test_cross_entropy.c on the CUDA kernels.
#include "core_on_emulator.h"

#include "../c/test_cross_entropy.c"
