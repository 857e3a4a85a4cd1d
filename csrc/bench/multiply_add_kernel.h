// The work of rt_multiply_add: gemm's register tile, fed from registers only.
#ifndef RINGTILE_BENCH_MULTIPLY_ADD_KERNEL_H
#define RINGTILE_BENCH_MULTIPLY_ADD_KERNEL_H

#include "../attn/gemm.h"

enum { MULTIPLY_ADD_FLOPS = 2 * GEMM_ROWS * PANEL }; // of one iteration

// Independent sums, as many as hide the latency of one. They start differently, none at 2, where all of them go, so
// that no compiler makes them one or a constant; and their total is returned, so that none drops them.
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

#endif // RINGTILE_BENCH_MULTIPLY_ADD_KERNEL_H
