// The one matrix product of the attention kernels, as a register tile of 6 rows by PANEL_VECS vectors. Every operand
// lies in a packed panel, so there is neither a dtype nor a stride of the caller here. Included after vec.h.
#ifndef RINGTILE_ATTN_GEMM_H
#define RINGTILE_ATTN_GEMM_H

#include "../vec.h"

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

// One register tile: c (rows, vecs) = or += a (rows, depth) b (depth, vecs).
ALWAYS_INLINE void gemm_tile(int rows, int vecs, int64_t depth, const real *a, int64_t a_row, int64_t a_col,
                             const real *b, int64_t b_row, real *c, int64_t c_row, bool add) {
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
            const vec a_vec = vec_set(a[i * a_row + k * a_col]);
#pragma GCC unroll 4
            for (int j = 0; j < vecs; j++) sum[i][j] += a_vec * b_vec[j];
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < vecs; j++) {
            real *to = c + i * c_row + j * LANES;
            vec_store(to, add ? vec_load(to) + sum[i][j] : sum[i][j]);
        }
}

// The same for a number of rows that is only known now, so that the tile's loops unroll.
ALWAYS_INLINE void gemm_rows(int rows, int vecs, int64_t depth, const real *a, int64_t a_row, int64_t a_col,
                             const real *b, int64_t b_row, real *c, int64_t c_row, bool add) {
    switch (rows) {
    case 1:
        gemm_tile(1, vecs, depth, a, a_row, a_col, b, b_row, c, c_row, add);
        break;
    case 2:
        gemm_tile(2, vecs, depth, a, a_row, a_col, b, b_row, c, c_row, add);
        break;
    case 3:
        gemm_tile(3, vecs, depth, a, a_row, a_col, b, b_row, c, c_row, add);
        break;
    case 4:
        gemm_tile(4, vecs, depth, a, a_row, a_col, b, b_row, c, c_row, add);
        break;
    case 5:
        gemm_tile(5, vecs, depth, a, a_row, a_col, b, b_row, c, c_row, add);
        break;
    default:
        gemm_tile(6, vecs, depth, a, a_row, a_col, b, b_row, c, c_row, add);
        break;
    }
}

// c (m, n) = or += a (m, depth) b (depth, n), depth at most SUM_LEN.
static void gemm_sums(int64_t m, int64_t n, int64_t depth, const real *a, int64_t a_row, int64_t a_col,
                      const real *b, int64_t b_row, real *c, int64_t c_row, bool add) {
    for (int64_t j = 0; j < n; j += PANEL) {
        const int vecs = n - j < PANEL ? (int)(n - j) / LANES : PANEL_VECS;
        for (int64_t i = 0; i < m; i += GEMM_ROWS) {
            const int rows = m - i < GEMM_ROWS ? (int)(m - i) : GEMM_ROWS;
            const real *a_tile = a + i * a_row, *b_tile = b + j;
            real *c_tile = c + i * c_row + j;
            switch (vecs) {
            case 1:
                gemm_rows(rows, 1, depth, a_tile, a_row, a_col, b_tile, b_row, c_tile, c_row, add);
                break;
#if RT_PANEL_VECS > 2
            case 2:
                gemm_rows(rows, 2, depth, a_tile, a_row, a_col, b_tile, b_row, c_tile, c_row, add);
                break;
            case 3:
                gemm_rows(rows, 3, depth, a_tile, a_row, a_col, b_tile, b_row, c_tile, c_row, add);
                break;
#endif
            default:
                gemm_rows(rows, PANEL_VECS, depth, a_tile, a_row, a_col, b_tile, b_row, c_tile, c_row, add);
                break;
            }
        }
    }
}

// c (m, n) = or += a (m, depth) b (depth, n). a is read at a[i * a_row + k * a_col]; rows of b and c have unit stride,
// and n is a multiple of LANES. Every sum has the same order, whatever the tile it falls in.
static void gemm(int64_t m, int64_t n, int64_t depth, const real *a, int64_t a_row, int64_t a_col,
                 const real *b, int64_t b_row, real *c, int64_t c_row, bool add) {
    const int64_t sum_len = depth < 2 * SUM_LEN ? SUM_LEN / 2 : SUM_LEN;
    for (int64_t k = 0; k < depth; k += sum_len) {
        const int64_t len = depth - k < sum_len ? depth - k : sum_len;
        gemm_sums(m, n, len, a + k * a_col, a_row, a_col, b + k * b_row, b_row, c, c_row, add || k > 0);
    }
}

#endif // RINGTILE_ATTN_GEMM_H
