// Runs tests/c/test_attn_merge.c on the CUDA kernels.
#include "core_on_emulator.h"

#include "../c/test_attn_merge.c"
