// The one matrix product of the attention kernels, as a register tile of 6 rows by PANEL_VECS vectors. Every operand
// lies in a packed panel, so there is neither a dtype nor a stride of the caller here. Included after vec.h.
#ifndef RINGTILE_ATTN_GEMM_H
#define RINGTILE_ATTN_GEMM_H

#include "../vec.h"

#ifdef RT_BF16_PAIRS
#include <immintrin.h>
#endif

// RT_PANEL_VECS is set by the instruction set: 6 x PANEL_VECS sums, one row of B and one number of A fill its registers.
enum {
    PANEL_VECS = RT_PANEL_VECS,
    PANEL = PANEL_VECS * LANES,
    GEMM_ROWS = 6,
    SUM_LEN =
        32, // terms that are summed in one go; such sums are then added: a quarter of the rounding error of one
            // long sum at 512 terms, for 2 % of the time
};

#define ALWAYS_INLINE static inline __attribute__((always_inline))

// What the words of a and b hold, a word having the size of a real: a number, or two bf16 that are neighbours along
// the depth.
typedef enum word_kind { REALS, BF16_PAIRS } word_kind;

// The word in every lane. As a number, a pair may be subnormal or NaN, so none is computed with.
ALWAYS_INLINE vec broadcast(word_kind kind, const real *word) {
    if (kind == REALS) return vec_set(*word);
    real_bits bits;
    memcpy(&bits, word, sizeof(bits));
    return (vec)(bits - (vec_bits){0});
}

// sum + a b. Of pairs both products are added, with a rounding each.
ALWAYS_INLINE vec add_product(word_kind kind, vec sum, vec a, vec b) {
#ifdef RT_BF16_PAIRS
    if (kind == BF16_PAIRS) return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
    (void)kind;
#endif
    return sum + a * b;
}

// One register tile: c (rows, vecs) = or += factor a (rows, depth) b (depth, vecs).
ALWAYS_INLINE void gemm_tile(word_kind kind, real factor, int rows, int vecs, int64_t depth, const real *a,
                             int64_t a_row, int64_t a_col, const real *b, int64_t b_row, real *c,
                             int64_t c_row, bool add) {
    vec sum[GEMM_ROWS][PANEL_VECS];
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < vecs; j++) sum[i][j] = vec_set(0);
    for (int64_t k = 0; k < depth; k++) {
        vec b_vec[PANEL_VECS];
#pragma GCC unroll 4
        for (int j = 0; j < vecs; j++) b_vec[j] = vec_load(b + k * b_row + j * LANES);
#pragma GCC unroll 6
        for (int i = 0; i < rows; i++) {
            const vec a_vec = broadcast(kind, &a[i * a_row + k * a_col]);
#pragma GCC unroll 4
            for (int j = 0; j < vecs; j++) sum[i][j] = add_product(kind, sum[i][j], a_vec, b_vec[j]);
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < vecs; j++) {
            real *to = c + i * c_row + j * LANES;
            vec_store(to, add ? vec_load(to) + sum[i][j] * factor : sum[i][j] * factor);
        }
}

// The same for a number of rows that is only known now, so that the tile's loops unroll.
ALWAYS_INLINE void gemm_rows(word_kind kind, real factor, int rows, int vecs, int64_t depth, const real *a,
                             int64_t a_row, int64_t a_col, const real *b, int64_t b_row, real *c,
                             int64_t c_row, bool add) {
    switch (rows) {
    case 1:
        gemm_tile(kind, factor, 1, vecs, depth, a, a_row, a_col, b, b_row, c, c_row, add);
        break;
    case 2:
        gemm_tile(kind, factor, 2, vecs, depth, a, a_row, a_col, b, b_row, c, c_row, add);
        break;
    case 3:
        gemm_tile(kind, factor, 3, vecs, depth, a, a_row, a_col, b, b_row, c, c_row, add);
        break;
    case 4:
        gemm_tile(kind, factor, 4, vecs, depth, a, a_row, a_col, b, b_row, c, c_row, add);
        break;
    case 5:
        gemm_tile(kind, factor, 5, vecs, depth, a, a_row, a_col, b, b_row, c, c_row, add);
        break;
    default:
        gemm_tile(kind, factor, 6, vecs, depth, a, a_row, a_col, b, b_row, c, c_row, add);
        break;
    }
}

// c (m, n) = or += factor a (m, depth) b (depth, n), each sum in one go.
ALWAYS_INLINE void gemm_sums(word_kind kind, real factor, int64_t m, int64_t n, int64_t depth, const real *a,
                             int64_t a_row, int64_t a_col, const real *b, int64_t b_row, real *c,
                             int64_t c_row, bool add) {
    for (int64_t j = 0; j < n; j += PANEL) {
        const int vecs = n - j < PANEL ? (int)(n - j) / LANES : PANEL_VECS;
        for (int64_t i = 0; i < m; i += GEMM_ROWS) {
            const int rows = m - i < GEMM_ROWS ? (int)(m - i) : GEMM_ROWS;
            const real *a_tile = a + i * a_row, *b_tile = b + j;
            real *c_tile = c + i * c_row + j;
            switch (vecs) {
            case 1:
                gemm_rows(kind, factor, rows, 1, depth, a_tile, a_row, a_col, b_tile, b_row, c_tile, c_row,
                          add);
                break;
#if RT_PANEL_VECS > 2
            case 2:
                gemm_rows(kind, factor, rows, 2, depth, a_tile, a_row, a_col, b_tile, b_row, c_tile, c_row,
                          add);
                break;
            case 3:
                gemm_rows(kind, factor, rows, 3, depth, a_tile, a_row, a_col, b_tile, b_row, c_tile, c_row,
                          add);
                break;
#endif
            default:
                gemm_rows(kind, factor, rows, PANEL_VECS, depth, a_tile, a_row, a_col, b_tile, b_row, c_tile,
                          c_row, add);
                break;
            }
        }
    }
}

// The same in several sums. Every one has the same order, whatever the tile it falls in.
ALWAYS_INLINE void gemm_words(word_kind kind, real factor, int64_t m, int64_t n, int64_t depth, const real *a,
                              int64_t a_row, int64_t a_col, const real *b, int64_t b_row, real *c,
                              int64_t c_row, bool add) {
    const int64_t terms = kind == REALS ? 1 : 2; // of a word
    const int64_t sum_len = (depth * terms < 2 * SUM_LEN ? SUM_LEN / 2 : SUM_LEN) / terms;
    for (int64_t k = 0; k < depth; k += sum_len) {
        const int64_t len = depth - k < sum_len ? depth - k : sum_len;
        gemm_sums(kind, factor, m, n, len, a + k * a_col, a_row, a_col, b + k * b_row, b_row, c, c_row,
                  add || k > 0);
    }
}

// c (m, n) = or += a (m, depth) b (depth, n). a is read at a[i * a_row + k * a_col]; rows of b and c have unit stride,
// and n is a multiple of LANES.
static void gemm(int64_t m, int64_t n, int64_t depth, const real *a, int64_t a_row, int64_t a_col,
                 const real *b, int64_t b_row, real *c, int64_t c_row, bool add) {
    gemm_words(REALS, 1, m, n, depth, a, a_row, a_col, b, b_row, c, c_row, add);
}

// The first n columns of c (m, PANEL) = factor a (m, depth) b (depth, PANEL); depth counts words, whose factor must be 1
// if they are numbers.
static void gemm_inputs(word_kind kind, real factor, int64_t m, int64_t n, int64_t depth, const real *a,
                        int64_t a_row, const real *b, real *c) {
#ifdef RT_BF16_PAIRS
    if (kind == BF16_PAIRS) {
        gemm_words(BF16_PAIRS, factor, m, n, depth, a, a_row, 1, b, PANEL, c, PANEL, false);
        return;
    }
#endif
    (void)kind, (void)factor;
    gemm(m, n, depth, a, a_row, 1, b, PANEL, c, PANEL, false);
}

#endif // RINGTILE_ATTN_GEMM_H
