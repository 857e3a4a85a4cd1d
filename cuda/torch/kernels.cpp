// The ops on CUDA tensors: compiles the same bindings for the CUDA core.
#include <Python.h> // first, as its documentation asks

#include "../ringtile_cuda.h"

#define RINGTILE_CUDA
#include "../../csrc/torch/kernels.cpp"
