// Compiles every kernel for the instruction set and math type of the including file, and lists them in one table.
#include "../attn/attn_kernel.h"
#include "../glu/glu_kernel.h"
#include "../loss/cross_entropy_kernel.h"
#include "../scan/conv_kernel.h"
#include "../scan/scan_kernel.h"
#include "../scan/selective_kernel.h"
#include "kernels.h"

const rt_kernels RT_KERNELS = {
    .glu = glu,
    .cross_entropy = cross_entropy,
    .attn_num_tasks = attn_num_tasks,
    .attn_forward_scratch_bytes = forward_scratch_bytes,
    .attn_backward_scratch_bytes = backward_scratch_bytes,
    .attn_shared_bytes = attn_shared_bytes,
    .attn_open_shared = attn_open_shared,
    .attn_forward = attn_forward,
    .attn_backward = attn_backward,
    .attn_round_keys = attn_round_keys,
    .attn_delta = attn_delta,
    .attn_merge = attn_merge,
    .scan_scratch_bytes = scan_scratch_bytes,
    .scan_forward = scan_forward,
    .scan_backward = scan_backward,
    .selective_scratch_bytes = selective_scratch_bytes,
    .selective_forward = selective_forward,
    .selective_backward = selective_backward,
    .conv_forward = conv_forward,
    .conv_backward = conv_backward,
};
