// The multiply-add peak of this CPU: the ceiling the kernels are held against. benchmarks/peak.py compiles it with the
// register tile of one instruction set.
#include "attn/register_tile.h"
#include "attn/tile.h"

#ifdef RT_TILES // the peak of bf16 where AMX multiplies it

int64_t flops_per_iteration(void) { return 4 * 2 * TILE_SIDE * TILE_SIDE * TILE_DEPTH; }

// The same of the unit of tiles: the kernels' two by two sums, from registers alone, of zeros.
double multiply_add(int64_t iterations) {
    tile_configure();
    for (int64_t n = 0; n < iterations; n++) {
        tile_dot_bf16(0, 4, 6);
        tile_dot_bf16(1, 4, 7);
        tile_dot_bf16(2, 5, 6);
        tile_dot_bf16(3, 5, 7);
    }
    tile_release();
    return 0;
}

#else

int64_t flops_per_iteration(void) { return 2 * GEMM_ROWS * PANEL; }

// Keeps the f32 multiply-add units of the caller's core busy for so many rounds, from registers alone. As many
// independent sums as hide the latency of one. Each starts at another value and none at 2, their common limit, so the
// compiler can neither merge them nor fold them into a constant; the returned total keeps them all alive.
double multiply_add(int64_t iterations) {
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

#endif
