// The loop of rt_multiply_add: gemm's register tile, fed from registers only. Compiled per instruction set into the
// table RT_MULTIPLY_ADD.
#include "../attn/register_tile.h"
#include "multiply_add.h"

// As many independent sums as hide the latency of one. Each starts at another value and none at 2, their common limit,
// so the compiler can neither merge them nor fold them into a constant; the returned total keeps them all alive.
static double multiply_add(int64_t iterations) {
    const vec factor = vec_set((real)0.5), term = vec_set(1);
    vec sum[GEMM_ROWS][PANEL_VECS];
#pragma GCC unroll 6
    for (int i = 0; i < GEMM_ROWS; i++)
#pragma GCC unroll 4
        for (int j = 0; j < PANEL_VECS; j++) sum[i][j] = vec_set((real)(-i * PANEL_VECS - j));
    for (int64_t n = 0; n < iterations; n++)
#pragma GCC unroll 6
        for (int i = 0; i < GEMM_ROWS; i++)
#pragma GCC unroll 4
            for (int j = 0; j < PANEL_VECS; j++) sum[i][j] = sum[i][j] * factor + term;
    vec total = vec_set(0);
    for (int i = 0; i < GEMM_ROWS; i++)
        for (int j = 0; j < PANEL_VECS; j++) total += sum[i][j];
    return vec_reduce_sum(total);
}

const rt_multiply_add_kernel RT_MULTIPLY_ADD = {multiply_add, 2 * GEMM_ROWS * PANEL};
