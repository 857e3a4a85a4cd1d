// Runs tests/c/test_dropout.c on the CUDA kernels.
#include "core_on_emulator.h"

#include "../c/test_dropout.c"
