// Packing: rows of q, k, v and dout, of any dtype and stride, become contiguous rows of words for gemm.
#ifndef RINGTILE_ATTN_PACK_H
#define RINGTILE_ATTN_PACK_H

#include "../chunk.h"
#include "gemm.h"
#include "query_tile.h"

// An input tensor (B, tokens, heads, dim).
typedef struct attn_input {
    const void *array;
    const int64_t *stride; // batch, token, head
    int64_t dim;
} attn_input;

static inline attn_input input_q(const rt_attn_block *p) { return (attn_input){p->q, p->q_stride, p->head_dim}; }
static inline attn_input input_k(const rt_attn_block *p) { return (attn_input){p->k, p->k_stride, p->head_dim}; }
static inline attn_input input_v(const rt_attn_block *p) { return (attn_input){p->v, p->v_stride, p->v_head_dim}; }
static inline attn_input input_dout(const rt_attn_bwd_params *p) {
    return (attn_input){p->dout, p->dout_stride, p->block.v_head_dim};
}

// The words in which k q^T and v dout^T, the products of two inputs, read them: pairs of bf16 as they are where the CPU
// multiplies such pairs, else numbers widened to the math type. Such products take subnormal inputs as 0 and flush
// subnormal sums to 0, in any floating-point mode: an input x below 2^-126 times y is an error of |x y| in the sum.
static inline word_kind kind_of(rt_dtype dtype) {
#if defined(RT_TILES)
    if (dtype == RT_BF16) return TILE_PAIRS;
#elif defined(RT_BF16_PAIRS)
    if (dtype == RT_BF16) return BF16_PAIRS;
#else
    (void)dtype;
#endif
    return REALS;
}

static inline word_kind input_kind(const rt_attn_block *p) { return kind_of(p->dtype); }

// Numbers of scratch that tiles alone take.
static inline int64_t for_tiles(const rt_attn_block *p, int64_t n) { return input_kind(p) == TILE_PAIRS ? n : 0; }

// Words that `dim` numbers take.
static inline int64_t num_words(word_kind kind, int64_t dim) { return kind == REALS ? dim : (dim + 1) / 2; }

// Words of a packed row, which is padded to whole vectors.
static inline int64_t row_words(word_kind kind, int64_t dim) { return round_up(num_words(kind, dim), LANES); }

// to (padded) = elements [offset, offset + n) of array, widened, then zeros. *check becomes NaN if any is not finite.
// Pairs are copied unseen: they leave *check alone.
ALWAYS_INLINE void pack_row(word_kind kind, rt_dtype dtype, const void *array, int64_t offset, int64_t n,
                            int64_t padded, real *to, vec *check) {
    if (kind != REALS) {
        const uint16_t *from = (const uint16_t *)array + offset;
        const int64_t whole = n / (2 * LANES) * LANES; // words that fill vectors: copied without a call
        for (int64_t i = 0; i < whole; i += LANES) memcpy(to + i, from + 2 * i, sizeof(vec));
        if (whole == padded) return;
        // The zeros also cover the half word that an odd n leaves.
        memset(to + n / 2, 0, (size_t)(padded - n / 2) * sizeof(real));
        memcpy(to + whole, from + 2 * whole, (size_t)(n - 2 * whole) * sizeof(uint16_t));
        return;
    }
    int64_t direct = 0; // elements of the math type that fill whole vectors: loaded without a conversion
    if (dtype == RT_F32 || dtype == RT_F64) {
        direct = n / LANES * LANES;
        for (int64_t i = 0; i < direct; i += LANES) {
            const vec x = vec_load((const real *)array + offset + i);
            vec_store(to + i, x);
            *check += x * 0;
        }
    }
    if (direct == padded) return;
    load_chunk(dtype, array, offset + direct, n - direct, to + direct); // writes the zeros as well
    for (int64_t i = direct; i < padded; i += LANES) *check += vec_load(to + i) * 0;
}

// Pairs of q, whose scale is applied to scores but for its sign: negates them if it is below 0.
static void sign_pairs(double scale, int64_t num_words, real *words) {
    for (int64_t i = 0; i < num_words && scale < 0; i += LANES)
        vec_store(words + i, (vec)((vec_bits)vec_load(words + i) ^ (real_bits)0x80008000));
}

static inline bool is_zero(vec check) { return vec_reduce_sum(check) == 0; }

// Packs rows first_row .. first_row + n - 1 of the tile's kv head of k or v as (n, padded). Returns whether all numbers
// are finite. Rows often begin a new page, which the hardware does not prefetch across.
static bool pack_keys(const rt_attn_block *p, const query_tile *queries, word_kind kind, attn_input x,
                      int64_t first_row, int64_t n, real *to) {
    enum { ROWS_AHEAD = 6 };
    const int64_t element_bytes = p->dtype == RT_F64 ? 8 : p->dtype == RT_F32 ? 4 : 2;
    const int64_t padded = row_words(kind, x.dim);
    const int64_t base = queries->batch * x.stride[0] + queries->kv_head * x.stride[2] + first_row * x.stride[1];
    vec check = vec_set(0);
    for (int64_t i = 0; i < n; i++) {
        const char *ahead = (const char *)x.array + (base + min64(i + ROWS_AHEAD, n - 1) * x.stride[1]) * element_bytes;
        for (int64_t byte = 0; byte < x.dim * element_bytes; byte += 64) __builtin_prefetch(ahead + byte);
        pack_row(kind, p->dtype, x.array, base + i * x.stride[1], x.dim, padded, to + i * padded, &check);
    }
    return is_zero(check);
}

// Packs a panel of q or dout as (PANEL, padded), with zeros after the last row. Returns whether all numbers are finite.
static bool pack_queries(const rt_attn_block *p, const query_tile *queries, word_kind kind, attn_input x, int64_t panel,
                         real *to) {
    const int64_t padded = row_words(kind, x.dim), num_rows = panel_rows(queries, panel);
    vec check = vec_set(0);
    for (int64_t i = 0; i < num_rows; i++) {
        const int64_t row = panel * PANEL + i;
        const int64_t offset =
            queries->batch * x.stride[0] + row_token(queries, row) * x.stride[1] + row_head(queries, row) * x.stride[2];
        pack_row(kind, p->dtype, x.array, offset, x.dim, padded, to + i * padded, &check);
    }
    memset(to + num_rows * padded, 0, (size_t)((PANEL - num_rows) * padded) * sizeof(real));
    return is_zero(check);
}

// A square of LANES rows becomes its transpose: swaps the off-diagonal squares of half its size, then of a quarter, and
// so on.
ALWAYS_INLINE void transpose_rows(vec rows[LANES]) {
#pragma GCC unroll 4
    for (int half = LANES / 2; half > 0; half /= 2)
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) {
            if (i & half) continue;
            const vec upper = rows[i], lower = rows[i + half];
            rows[i] = vec_weave(upper, lower, half, 0);
            rows[i + half] = vec_weave(upper, lower, half, half);
        }
}

// to (LANES, LANES) = from (LANES, LANES) transposed.
static void transpose_square(const real *from, int64_t from_row, real *to, int64_t to_row) {
    vec rows[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) rows[i] = vec_load(from + i * from_row);
    transpose_rows(rows);
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) vec_store(to + i * to_row, rows[i]);
}

// to (width, to_row) = rows (num_rows, width) transposed; both numbers are multiples of LANES.
static void transpose(const real *rows, int64_t num_rows, int64_t width, real *to, int64_t to_row) {
    for (int64_t d = 0; d < width; d += LANES)
        for (int64_t i = 0; i < num_rows; i += LANES)
            transpose_square(rows + i * width + d, width, to + d * to_row + i, to_row);
}

// Tiles sum into panels of columns (width, PANEL). These become rows (PANEL, width), by way of a buffer as large.
static void turn_panel(int64_t width, real *columns, real *buffer) {
    transpose(columns, width, PANEL, buffer, width);
    memcpy(columns, buffer, (size_t)(PANEL * width) * sizeof(real));
}

// to (num_rows / 2, width), words: column j of rows 2 i and 2 i + 1 of rows of bf16, packed as (num_rows, row_words).
// Returns whether all numbers are finite.
static bool pair_rows(const real *rows, int64_t num_rows, int64_t width, int64_t row_words, real *restrict to) {
    vec check = vec_set(0);
    for (int64_t i = 0; i < num_rows; i += 2, to += width) {
        const char *even = (const char *)(rows + i * row_words), *odd = even + row_words * (int64_t)sizeof(real);
        for (int64_t j = 0; j < width; j++) {
            uint16_t low, high;
            memcpy(&low, even + 2 * j, sizeof(low));
            memcpy(&high, odd + 2 * j, sizeof(high));
            const real_bits word = (real_bits)(low | (uint32_t)high << 16);
            memcpy(to + j, &word, sizeof(word));
        }
        for (int64_t j = 0; j < width; j += LANES) {
            const vec_bits words = (vec_bits)vec_load(to + j);
            check += (vec)(words << 16) * 0;
            check += (vec)(words >> 16 << 16) * 0;
        }
    }
    return is_zero(check);
}

// to (2 row_words, TILE_KEYS / 2), words: column j of keys 2 i and 2 i + 1 of n keys, packed as (n, row_words), for
// products that sum over keys; beyond n, a whole block. Returns whether all numbers are finite.
static bool pair_columns(const real *rows, int64_t n, int64_t row_words, real *to) {
    vec check = vec_set(0);
    for (int64_t key = 0; key < n; key += 2 * LANES)
        for (int64_t word = 0; word < row_words; word += LANES) {
            vec low[LANES], high[LANES]; // of both keys of a pair: their low halves, even columns; and high, odd ones
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) {
                const real *pair = rows + (key + 2 * i) * row_words + word;
                const vec_bits even = (vec_bits)vec_load(pair), odd = (vec_bits)vec_load(pair + row_words);
                const vec_bits upper = ~(vec_bits){0} << 16;
                low[i] = (vec)((even & ~upper) | odd << 16);
                high[i] = (vec)((even >> 16 & ~upper) | (odd & upper));
                check += (vec)(even << 16) * 0 + (vec)(even & upper) * 0;
                check += (vec)(odd << 16) * 0 + (vec)(odd & upper) * 0;
            }
            transpose_rows(low);
            transpose_rows(high);
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) {
                real *column = to + 2 * (word + i) * (TILE_KEYS / 2) + key / 2;
                vec_store(column, low[i]);
                vec_store(column + TILE_KEYS / 2, high[i]);
            }
        }
    return is_zero(check);
}

// A worker's workspace, of which num_bytes are taken; if its memory is NULL, they are only counted.
typedef struct arena {
    char *memory;
    int64_t num_bytes;
} arena;

// Takes n numbers off a workspace; they begin on a cache line.
static inline real *take(arena *from, int64_t n) {
    char *const array = from->memory == NULL ? NULL : from->memory + from->num_bytes;
    from->num_bytes += round_up(n * (int64_t)sizeof(real), 64);
    return (real *)(void *)array;
}

#endif // RINGTILE_ATTN_PACK_H
