// The ops on CUDA tensors: the same bindings, over the CUDA core.
#define RINGTILE_CUDA
#include "../csrc/bindings.cpp"
