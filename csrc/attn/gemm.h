// The one matrix product of attention and of weight gradients, made of register tiles of GEMM_ROWS rows by PANEL_VECS
// vectors. Every operand is packed, so neither the caller's dtypes nor its strides appear here.
#ifndef RINGTILE_ATTN_GEMM_H
#define RINGTILE_ATTN_GEMM_H

#include "register_tile.h"
#include "tile.h"

#if defined(RT_BF16_PAIRS) && !defined(RT_ISA_MODEL)
#include <immintrin.h>

// sum + both products of the pairs of each word: the high halves' first, each by a fused multiply-add. Subnormal
// numbers count as 0 and become 0, in any floating-point mode.
#define pair_dot(sum, a, b) ((vec)_mm512_dpbf16_ps((__m512)(sum), (__m512bh)(a), (__m512bh)(b)))
#endif

// Terms that one running sum takes before it is added to the result: at depth 512 the rounding error is a quarter of
// one long sum's, for 2 % of the time.
enum { SUM_LEN = 32 };

#define ALWAYS_INLINE static inline __attribute__((always_inline))

// The contents of a word of a and b, which is as large as a real: one number, or two bf16, neighbours along the depth,
// multiplied in vectors or in tiles.
typedef enum word_kind { REALS, BF16_PAIRS, TILE_PAIRS } word_kind;

// c (m, n) = a (m, depth) b (depth, n), added to c if `add`. a is read at a[i * a_row + k * a_col]; rows of b and c are
// `row` apart. n is a multiple of LANES, depth counts words.
typedef struct product {
    word_kind kind;
    int64_t m, n, depth;
    const real *a;
    int64_t a_row, a_col;
    const real *b;
    real *c;
    int64_t row;
    bool add;
} product;

// Element (i, j) is at[i * row + j * col].
typedef struct matrix {
    const real *at;
    int64_t row, col;
} matrix;

static inline matrix rows_of(const real *at, int64_t row) { return (matrix){at, row, 1}; }
static inline matrix transposed(const real *at, int64_t row) { return (matrix){at, 1, row}; }

// The word in every lane. Integer arithmetic, because a pair read as a number may be subnormal or NaN.
ALWAYS_INLINE vec broadcast(word_kind kind, const real *word) {
    if (kind == REALS) return vec_set(*word);
    real_bits bits;
    memcpy(&bits, word, sizeof(bits));
    return (vec)(bits - (vec_bits){0});
}

// sum + a b. For pairs, adds both products, with one rounding each.
ALWAYS_INLINE vec add_product(word_kind kind, vec sum, vec a, vec b) {
#ifdef RT_BF16_PAIRS
    if (kind == BF16_PAIRS) return pair_dot(sum, a, b);
#else
    (void)kind;
#endif
    return sum + a * b;
}

// One register tile of p: the first `rows` rows and `vecs` vectors of c.
ALWAYS_INLINE void gemm_tile(product p, int rows, int vecs) {
    vec sum[GEMM_ROWS][PANEL_VECS];
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < vecs; j++) sum[i][j] = vec_set(0);
    for (int64_t k = 0; k < p.depth; k++) {
        vec b_vec[PANEL_VECS];
#pragma GCC unroll 4
        for (int j = 0; j < vecs; j++) b_vec[j] = vec_load(p.b + k * p.row + j * LANES);
#pragma GCC unroll 6
        for (int i = 0; i < rows; i++) {
            const vec a_vec = broadcast(p.kind, &p.a[i * p.a_row + k * p.a_col]);
#pragma GCC unroll 4
            for (int j = 0; j < vecs; j++) sum[i][j] = add_product(p.kind, sum[i][j], a_vec, b_vec[j]);
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < vecs; j++) {
            real *to = p.c + i * p.row + j * LANES;
            vec_store(to, p.add ? vec_load(to) + sum[i][j] : sum[i][j]);
        }
}

// Turns the number of rows into a constant, so that the loops of the tile unroll.
ALWAYS_INLINE void gemm_rows(product p, int rows, int vecs) {
    if (rows == 1) gemm_tile(p, 1, vecs);
    if (rows == 2) gemm_tile(p, 2, vecs);
    if (rows == 3) gemm_tile(p, 3, vecs);
    if (rows == 4) gemm_tile(p, 4, vecs);
    if (rows == 5) gemm_tile(p, 5, vecs);
    if (rows == 6) gemm_tile(p, 6, vecs);
}

// The product, each element in one running sum.
ALWAYS_INLINE void gemm_sums(product p) {
    for (int64_t j = 0; j < p.n; j += PANEL) {
        const int vecs = p.n - j < PANEL ? (int)(p.n - j) / LANES : PANEL_VECS;
        for (int64_t i = 0; i < p.m; i += GEMM_ROWS) {
            const int rows = p.m - i < GEMM_ROWS ? (int)(p.m - i) : GEMM_ROWS;
            product tile = p;
            tile.a = p.a + i * p.a_row;
            tile.b = p.b + j;
            tile.c = p.c + i * p.row + j;
            if (vecs == 1) gemm_rows(tile, rows, 1);
#if RT_PANEL_VECS > 2
            if (vecs == 2) gemm_rows(tile, rows, 2);
            if (vecs == 3) gemm_rows(tile, rows, 3);
#endif
            if (vecs == PANEL_VECS) gemm_rows(tile, rows, PANEL_VECS);
        }
    }
}

// The product in running sums of SUM_LEN terms. The order of a sum does not depend on its tile.
ALWAYS_INLINE void gemm_words(product p) {
    const int64_t terms = p.kind == REALS ? 1 : 2; // per word
    const int64_t sum_len = (p.depth * terms < 2 * SUM_LEN ? SUM_LEN / 2 : SUM_LEN) / terms;
    for (int64_t k = 0; k < p.depth; k += sum_len) {
        product part = p;
        part.depth = p.depth - k < sum_len ? p.depth - k : sum_len;
        part.a = p.a + k * p.a_col;
        part.b = p.b + k * p.row;
        part.add = p.add || k > 0;
        gemm_sums(part);
    }
}

// c (m, n) = a (m, depth) b (depth, n) of numbers, added to c if `add`; rows of b and c are `row` apart.
static void gemm(int64_t m, int64_t n, int64_t depth, matrix a, const real *b, real *c, int64_t row, bool add) {
    gemm_words((product){REALS, m, n, depth, a.at, a.row, a.col, b, c, row, add});
}

// Work in vectors, which a thread does while its tiles multiply: does items [first, last) of it.
typedef void (*vector_work)(void *ctx, int64_t first, int64_t last);

// What is left of it, and the steps of tiles over which it is spread.
typedef struct work_left {
    int64_t first, last, num_steps;
} work_left;

#ifdef RT_TILES

// Up to two by two tiles of c, which four tiles of a and b serve at each step. After each, items of work.
ALWAYS_INLINE void gemm_square(const product *p, const real *a, const real *b, real *c, bool two_rows, bool two_cols,
                               vector_work work, void *ctx, work_left *left) {
    const int64_t a_bytes = p->a_row * (int64_t)sizeof(real), bytes = p->row * (int64_t)sizeof(real);
    const real *lower_a = a + TILE_SIDE * p->a_row;
    real *lower_c = c + TILE_SIDE * p->row;
    if (p->add) {
        tile_load(0, c, bytes);
        if (two_cols) tile_load(1, c + TILE_SIDE, bytes);
        if (two_rows) tile_load(2, lower_c, bytes);
        if (two_rows && two_cols) tile_load(3, lower_c + TILE_SIDE, bytes);
    } else {
        tile_zero(0);
        tile_zero(1);
        tile_zero(2);
        tile_zero(3);
    }
    for (int64_t k = 0; k < p->depth; k += TILE_SIDE, b += TILE_SIDE * p->row) {
        tile_load(4, a + k, a_bytes);
        tile_load(6, b, bytes);
        tile_dot_bf16(0, 4, 6);
        if (two_cols) {
            tile_load(7, b + TILE_SIDE, bytes);
            tile_dot_bf16(1, 4, 7);
        }
        if (two_rows) {
            tile_load(5, lower_a + k, a_bytes);
            tile_dot_bf16(2, 5, 6);
            if (two_cols) tile_dot_bf16(3, 5, 7);
        }
        if (work == NULL) continue;
        const int64_t first = left->first;
        left->first += (left->last - first) / left->num_steps--;
        work(ctx, first, left->first);
    }
    tile_store(0, c, bytes);
    if (two_cols) tile_store(1, c + TILE_SIDE, bytes);
    if (two_rows) tile_store(2, lower_c, bytes);
    if (two_rows && two_cols) tile_store(3, lower_c + TILE_SIDE, bytes);
}

#endif

static inline int64_t squares_of(int64_t n) { return (n + 2 * TILE_SIDE - 1) / (2 * TILE_SIDE); }

// Products of pairs in tiles, each element in one running sum, and between their steps num_items of work: the processor
// does both at once. A product computes whole tiles: rows of c up to a multiple of TILE_SIDE are written, and a or b is
// zero in the words up to one along the depth, where the other is finite.
ALWAYS_INLINE void gemm_tiles_while(const product *products, int64_t num_products, vector_work work, void *ctx,
                                    int64_t num_items) {
    work_left left = {0, num_items, 0};
#ifdef RT_TILES
    for (const product *p = products; p < products + num_products; p++)
        left.num_steps += squares_of(p->m) * squares_of(p->n) * ((p->depth + TILE_SIDE - 1) / TILE_SIDE);
    tile_fence();
    for (const product *p = products; p < products + num_products; p++)
        for (int64_t i = 0; i < p->m; i += 2 * TILE_SIDE)
            for (int64_t j = 0; j < p->n; j += 2 * TILE_SIDE)
                gemm_square(p, p->a + i * p->a_row, p->b + j, p->c + i * p->row + j, p->m - i > TILE_SIDE,
                            p->n - j > TILE_SIDE, work, ctx, &left);
#else
    (void)products, (void)num_products;
#endif
    if (work != NULL) work(ctx, left.first, num_items);
}

static void gemm_tiles(const product *products, int64_t num_products) {
    gemm_tiles_while(products, num_products, NULL, NULL, 0);
}

// c += a b of pairs in tiles.
static void gemm_add_tiles(int64_t m, int64_t n, int64_t depth, matrix a, const real *b, real *c, int64_t row) {
    gemm_tiles(&(product){TILE_PAIRS, m, n, depth, a.at, a.row, a.col, b, c, row, true}, 1);
}

// A product of packed inputs into panels: b and c are (rows, PANEL).
static void gemm_inputs(product p) {
    if (p.kind == TILE_PAIRS) gemm_tiles(&p, 1);
#ifdef RT_BF16_PAIRS
    else if (p.kind == BF16_PAIRS)
        gemm_words(p);
#endif
    else
        gemm(p.m, p.n, p.depth, (matrix){p.a, p.a_row, p.a_col}, p.b, p.c, p.row, p.add);
}

#endif // RINGTILE_ATTN_GEMM_H
