// Compiles every body for the instruction set and math type of the including file, into one table.
#include "../attn/attn_kernel.h"
#include "../bench/multiply_add_kernel.h"
#include "../loss/cross_entropy_kernel.h"
#include "../mlp/glu_kernel.h"
#include "kernels.h"

const rt_kernels RT_KERNELS = {
    .glu = glu,
    .cross_entropy = cross_entropy,
    .attn_num_tasks = attn_num_tasks,
    .attn_forward_scratch_bytes = forward_scratch_bytes,
    .attn_backward_scratch_bytes = backward_scratch_bytes,
    .attn_forward = attn_forward,
    .attn_backward = attn_backward,
    .attn_delta = attn_delta,
    .multiply_add = multiply_add,
    .multiply_add_flops = MULTIPLY_ADD_FLOPS,
};
