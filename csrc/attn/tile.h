// The words of matrix tiles: eight registers of TILE_SIDE rows by TILE_SIDE 32-bit words, which one instruction
// multiplies. They are those of AMX, or of a header that tests name, which says the same in plain C.
//
// tile_dot_bf16(c, a, b): c += a b, where c is f32 (16, 16), and a word of a (16, 16) and of b (16, 16) is two bf16,
// neighbours along the depth. For each number of c, the products of the low halves are summed in the order of the
// words, by fused multiply-adds that begin at 0, and so are those of the high halves; the two sums are added, and that
// to c. Every step rounds to nearest, reads subnormal numbers as 0 and gives 0 instead of them, in any floating-point
// mode.
#ifndef RINGTILE_ATTN_TILE_H
#define RINGTILE_ATTN_TILE_H

#include "../vec.h"

#include <float.h>

enum {
    TILE_SIDE = 16,
    TILE_DEPTH = 2 * TILE_SIDE, // numbers along the depth of one product of tiles
};

#if defined(RT_TILES) && !defined(RT_ISA_MODEL)
#include <immintrin.h>

#define tile_zero(t) _tile_zero(t)
#define tile_load(t, from, row_bytes) _tile_loadd(t, from, row_bytes)
#define tile_dot_bf16(c, a, b) _tile_dpbf16ps(c, a, b)
#define tile_store(t, to, row_bytes) _tile_stored(t, to, row_bytes)
#define tile_release() _tile_release()

// What was stored so far is there to be loaded into tiles: the compiler does not know that tile_load reads memory.
static inline void tile_fence(void) { __asm__ volatile("" ::: "memory"); }

// Makes the tiles usable in this thread, until tile_release.
static inline void tile_configure(void) {
    static const struct {
        uint8_t palette, first_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t num_rows[16];
    } shapes = {.palette = 1,
                .row_bytes = {64, 64, 64, 64, 64, 64, 64, 64},
                .num_rows = {TILE_SIDE, TILE_SIDE, TILE_SIDE, TILE_SIDE, TILE_SIDE, TILE_SIDE, TILE_SIDE, TILE_SIDE}};
    _tile_loadconfig(&shapes);
}

// Words of two numbers rounded to bf16: word l is (x[2 l], x[2 l + 1]), where x is low, then high.
static inline vec pair_neighbours(vec low, vec high) { return (vec)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low); }

// Word l is (low[l], high[l]).
static inline vec pair_lanes(vec low, vec high) {
    const __m512i lanes = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return (vec)_mm512_permutexvar_epi16(lanes, (__m512i)pair_neighbours(low, high));
}

#else // the same without such instructions; an instruction set without tiles compiles it and never calls it

#ifdef RT_ISA_MODEL
#include RT_ISA_MODEL
#else
#define tile_configure() ((void)0)
#define tile_release() ((void)0)
#endif

// The bits of x rounded to bf16, in the upper half of each 32-bit lane; subnormal numbers become 0.
static inline vec_bits round_to_bf16(vec x) {
    const vec_bits bits = (vec_bits)x, rounded = bits + 0x7fff + ((bits >> 16) & 1), quiet = bits | 1 << 22;
    const vec normal = vec_select(x == x, (vec)rounded, (vec)quiet);
    return (vec_bits)vec_select(vec_abs(x) < (real)FLT_MIN, x * 0, normal) & ~(vec_bits){0} << 16;
}

static inline vec pair_lanes(vec low, vec high) {
    return (vec)(((round_to_bf16(low) >> 16) & 0xffff) | round_to_bf16(high));
}

static inline vec pair_neighbours(vec low, vec high) {
    vec even, odd;
    for (int l = 0; l < LANES; l++) {
        const vec *from = l < LANES / 2 ? &low : &high;
        even[l] = (*from)[2 * l % LANES], odd[l] = (*from)[2 * l % LANES + 1];
    }
    return pair_lanes(even, odd);
}

#endif
#endif // RINGTILE_ATTN_TILE_H
