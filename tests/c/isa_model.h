// AMX (the words of csrc/attn/tile.h) and AVX512-BF16 (pair_dot of csrc/attn/gemm.h) in plain C: what Intel's manual
// says of them, step by step. All numbers are those of the instructions, but the payload of a NaN, and the side of 0 to
// which a product of two normal numbers below 2^-126 rounds. It says nothing of speed, nor of what the processor does
// where its manual is wrong.
//
// Every use of tiles by a thread must lie between tile_configure and tile_release, or the program ends.
#ifndef RINGTILE_TESTS_ISA_MODEL_H
#define RINGTILE_TESTS_ISA_MODEL_H

#include "../../csrc/half.h"
#include "tile_counts.h"

#include <stdlib.h>

typedef struct model_tile {
    uint32_t word[16][16];
} model_tile;

static _Thread_local struct {
    bool usable;
    model_tile tile[8];
} model;

static inline model_tile *model_at(int t) {
    if (!model.usable) abort();
    return &model.tile[t];
}

static inline void tile_fence(void) {}

static inline void tile_configure(void) {
    if (model.usable) abort();
    memset(&model, 0, sizeof(model));
    model.usable = true;
}

static inline void tile_release(void) {
    if (!model.usable) abort();
    model.usable = false;
}

static inline void tile_zero(int t) { memset(model_at(t), 0, sizeof(model_tile)); }

static inline void tile_load(int t, const void *from, int64_t row_bytes) {
    atomic_fetch_add_explicit(&counted_tiles.loads, 1, memory_order_relaxed);
    for (int i = 0; i < 16; i++) memcpy(model_at(t)->word[i], (const char *)from + i * row_bytes, 64);
}

static inline void tile_store(int t, void *to, int64_t row_bytes) {
    atomic_fetch_add_explicit(&counted_tiles.stores, 1, memory_order_relaxed);
    for (int i = 0; i < 16; i++) memcpy((char *)to + i * row_bytes, model_at(t)->word[i], 64);
}

static inline float model_flush(float x) { return fabsf(x) < FLT_MIN ? copysignf(0, x) : x; }

static inline void tile_dot_bf16(int c_tile, int a_tile, int b_tile) {
    const model_tile *a = model_at(a_tile), *b = model_at(b_tile);
    model_tile *c = model_at(c_tile);
    atomic_fetch_add_explicit(&counted_tiles.products, 1, memory_order_relaxed);
    float b_half[2][16][16];
    for (int half = 0; half < 2; half++)
        for (int k = 0; k < 16; k++)
            for (int n = 0; n < 16; n++)
                b_half[half][k][n] = model_flush(bf16_to_f32((uint16_t)(b->word[k][n] >> 16 * half)));
    for (int m = 0; m < 16; m++) {
        float sum[2][16] = {{0}}, row[16];
        for (int k = 0; k < 16; k++)
            for (int half = 0; half < 2; half++) {
                const float a_half = model_flush(bf16_to_f32((uint16_t)(a->word[m][k] >> 16 * half)));
                for (int n = 0; n < 16; n++) sum[half][n] = model_flush(fmaf(a_half, b_half[half][k][n], sum[half][n]));
            }
        memcpy(row, c->word[m], sizeof(row));
        for (int n = 0; n < 16; n++) row[n] = model_flush(model_flush(row[n]) + model_flush(sum[0][n] + sum[1][n]));
        memcpy(c->word[m], row, sizeof(row));
    }
}

#ifdef RT_BF16_PAIRS
static inline vec model_flush_vec(vec x) { return vec_select(vec_abs(x) < (real)FLT_MIN, x * 0, x); }

// A call: the compiler would take minutes where it is unrolled.
static __attribute__((noinline)) vec pair_dot(vec sum, vec a, vec b) {
    const vec a_high = model_flush_vec((vec)((vec_bits)a >> 16 << 16)),
              a_low = model_flush_vec((vec)((vec_bits)a << 16));
    const vec b_high = model_flush_vec((vec)((vec_bits)b >> 16 << 16)),
              b_low = model_flush_vec((vec)((vec_bits)b << 16));
    sum = model_flush_vec(model_flush_vec(sum) + a_high * b_high);
    return model_flush_vec(sum + a_low * b_low);
}
#endif

#endif // RINGTILE_TESTS_ISA_MODEL_H
