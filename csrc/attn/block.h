// What forward and backward share: how the queries are cut into blocks, which keys a block attends, and packing.
//
// A block is a few panels of query rows that see the same keys: consecutive tokens of up to BLOCK_HEADS query heads of
// one kv head, so that packed keys serve them all. Row r of a block is token r / num_heads, head r % num_heads, so a
// panel spans few tokens, which attend nearly the same keys. A panel holds PANEL rows, one per vector lane: scores lie
// as (key, row), so that the softmax over keys never crosses lanes.
// The cut depends on the shapes only, never on the number of workers.
#ifndef RINGTILE_ATTN_BLOCK_H
#define RINGTILE_ATTN_BLOCK_H

#include "../chunk.h"
#include "gemm.h"

enum {
    BLOCK_ROWS = 384,
    BLOCK_PANELS = BLOCK_ROWS / PANEL,
    TILE_KEYS = 128,
    ENOUGH_TASKS = 16, // where blocks of BLOCK_ROWS would be fewer, they are smaller, to fill the cores
    BLOCK_HEADS = 8,   // of a group, at least, before its tokens fill the block
    SPAN_KEYS = 8, // a panel's spans begin and end at multiples of it, so that none is too thin for a product
    MAX_SPANS = 2 * PANEL_VECS + 1,
};

static inline int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t round_up(int64_t n, int64_t multiple) {
    return (n + multiple - 1) / multiple * multiple;
}

// How the queries of one call are cut. Tasks go from the last tokens to the first, because causal work grows.
typedef struct grid {
    int64_t heads_per_block, tokens_per_block; // heads * tokens <= BLOCK_ROWS
    int64_t head_blocks, token_blocks;         // per kv head
    int64_t num_tasks;                         // batch * num_kv_heads * head_blocks * token_blocks
} grid;

static grid grid_of(const rt_attn_params *p) {
    grid g = {0};
    if (p->batch == 0 || p->num_queries == 0) return g;
    const int64_t group = p->num_heads / p->num_kv_heads, all_rows = p->batch * p->num_heads * p->num_queries;
    const int64_t most_rows = min64(BLOCK_ROWS, round_up(all_rows / ENOUGH_TASKS + 1, PANEL));
    g.heads_per_block = min64(min64(group, most_rows), max64(BLOCK_HEADS, most_rows / p->num_queries));
    // Blocks of equal size, in whole panels: no worker waits for one that got a longer last block.
    const int64_t most_tokens = most_rows / g.heads_per_block;
    const int64_t fewest_blocks = (p->num_queries + most_tokens - 1) / most_tokens;
    const int64_t panel_tokens = max64(1, PANEL / g.heads_per_block);
    g.tokens_per_block =
        min64(round_up((p->num_queries + fewest_blocks - 1) / fewest_blocks, panel_tokens), most_tokens);
    g.head_blocks = (group + g.heads_per_block - 1) / g.heads_per_block;
    g.token_blocks = (p->num_queries + g.tokens_per_block - 1) / g.tokens_per_block;
    g.num_tasks = p->batch * p->num_kv_heads * g.head_blocks * g.token_blocks;
    return g;
}

// One task: its place in the tensors.
typedef struct block {
    int64_t batch, kv_head, first_head, num_heads, first_token, num_tokens;
    int64_t num_rows, num_panels;
    int64_t chain;    // index of its (batch, kv head)
    int64_t position; // among the blocks of its chain, in the order of the tasks
} block;

static block block_of(const rt_attn_params *p, const grid *g, int64_t task) {
    const int64_t group = p->num_heads / p->num_kv_heads, num_chains = p->batch * p->num_kv_heads;
    block b = {.chain = task % num_chains, .position = task / num_chains};
    const int64_t head_block = b.position % g->head_blocks;
    const int64_t token_block = g->token_blocks - 1 - b.position / g->head_blocks;
    b.batch = b.chain / p->num_kv_heads;
    b.kv_head = b.chain % p->num_kv_heads;
    b.first_head = b.kv_head * group + head_block * g->heads_per_block;
    b.num_heads = min64(g->heads_per_block, group - head_block * g->heads_per_block);
    b.first_token = token_block * g->tokens_per_block;
    b.num_tokens = min64(g->tokens_per_block, p->num_queries - b.first_token);
    b.num_rows = b.num_heads * b.num_tokens;
    b.num_panels = (b.num_rows + PANEL - 1) / PANEL;
    return b;
}

static inline int64_t row_head(const block *b, int64_t row) { return b->first_head + row % b->num_heads; }
static inline int64_t row_token(const block *b, int64_t row) { return b->first_token + row / b->num_heads; }

// Rows of a panel; the last of a block may have fewer than PANEL. What lies in the other lanes is masked.
static inline int64_t panel_rows(const block *b, int64_t panel) {
    return min64(PANEL, b->num_rows - panel * PANEL);
}

// ---- which keys of a run a block attends -------------------------------------------------------

// Row r attends the keys [lo[r], hi[r]) of the current run, counted from its start; lo = hi = 0 if none, and for the
// rows that only fill the last panel.
typedef struct key_ranges {
    real_bits lo[BLOCK_ROWS], hi[BLOCK_ROWS];
    int64_t begin[BLOCK_PANELS], end[BLOCK_PANELS]; // per panel: keys that some row attends lie in here
    int64_t full_begin[BLOCK_PANELS], full_end[BLOCK_PANELS]; // per panel: keys that every row attends
    int64_t vec_begin[BLOCK_PANELS][PANEL_VECS],
        vec_end[BLOCK_PANELS][PANEL_VECS]; // as begin, end, of each vector
    int64_t first, last;                   // of the block
} key_ranges;

// First key of the run whose position is at least `bound`, in [0, length].
static inline int64_t first_key_from(const rt_run *run, int64_t bound) {
    if (bound <= run->global_begin) return 0;
    const int64_t distance = bound - run->global_begin;
    return min64(run->stride == 1 ? distance : (distance - 1) / run->stride + 1, run->length);
}

static void find_ranges(const rt_attn_params *p, const block *b, const rt_run *run, key_ranges *ranges) {
    const int64_t mask_row = b->batch * p->mask_batch_stride + b->first_token;
    for (int64_t token = 0; token < b->num_tokens; token++) {
        int64_t lo = first_key_from(run, p->begin[mask_row + token]);
        int64_t hi = first_key_from(run, p->end[mask_row + token]);
        if (hi <= lo) lo = hi = 0;
        for (int64_t row = token * b->num_heads; row < (token + 1) * b->num_heads; row++) {
            ranges->lo[row] = (real_bits)lo;
            ranges->hi[row] = (real_bits)hi;
        }
    }
    for (int64_t row = b->num_rows; row < b->num_panels * PANEL; row++) ranges->lo[row] = ranges->hi[row] = 0;

    ranges->first = INT64_MAX;
    ranges->last = 0;
    for (int64_t panel = 0; panel < b->num_panels; panel++) {
        int64_t begin = INT64_MAX, end = 0, full_begin = 0, full_end = INT64_MAX;
        for (int64_t j = 0; j < PANEL_VECS; j++) {
            int64_t vec_begin = INT64_MAX, vec_end = 0;
            for (int64_t row = panel * PANEL + j * LANES; row < panel * PANEL + (j + 1) * LANES; row++) {
                const int64_t lo = ranges->lo[row], hi = ranges->hi[row];
                if (lo < hi) vec_begin = min64(vec_begin, lo);
                vec_end = max64(vec_end, hi);
                full_begin = max64(full_begin, lo);
                full_end = min64(full_end, hi);
            }
            ranges->vec_begin[panel][j] = vec_begin;
            ranges->vec_end[panel][j] = vec_end;
            begin = min64(begin, vec_begin);
            end = max64(end, vec_end);
        }
        ranges->begin[panel] = begin;
        ranges->end[panel] = end;
        ranges->full_begin[panel] = full_begin;
        ranges->full_end[panel] = full_end;
        ranges->first = min64(ranges->first, begin);
        ranges->last = max64(ranges->last, end);
    }
}

// The part [*begin, *end) of the tile's keys that a panel has to look at; false if no row attends any of them.
static bool panel_keys(const key_ranges *ranges, int64_t panel, int64_t tile_begin, int64_t tile_end,
                       int64_t *begin, int64_t *end) {
    *begin = max64(tile_begin, ranges->begin[panel]);
    *end = min64(tile_end, ranges->end[panel]);
    if (*begin >= *end) return false;
    const real_bits *lo = ranges->lo + panel * PANEL, *hi = ranges->hi + panel * PANEL;
    real_bits live = 0;
    for (int64_t row = 0; row < PANEL; row++) live |= (lo[row] < *end) & (hi[row] > *begin);
    return live;
}

static inline bool panel_is_full(const key_ranges *ranges, int64_t panel, int64_t begin, int64_t end) {
    return begin >= ranges->full_begin[panel] && end <= ranges->full_end[panel];
}

// Keys of a panel that only some of its vectors of rows attend, so that the products leave out most masked pairs.
typedef struct span {
    int64_t key, num_keys; // from the first key that the panel looks at
    int64_t row, num_rows; // of the panel; whole vectors, but for the block's last rows
} span;

// Cuts the panel's keys [begin, end) into spans, in order; pairs outside all of them are masked. Returns how many.
static int64_t find_spans(const key_ranges *ranges, const block *b, int64_t panel, int64_t begin, int64_t end,
                          span spans[MAX_SPANS]) {
    int64_t count = 0;
    for (int64_t key = begin, next = end; key < end; key = next, next = end) {
        int64_t first = PANEL_VECS, last = -1;
        for (int64_t j = 0; j < PANEL_VECS; j++) {
            const int64_t vec_begin = max64(ranges->vec_begin[panel][j], begin);
            const int64_t vec_end = min64(ranges->vec_end[panel][j], end);
            if (vec_begin >= vec_end) continue;
            const int64_t from = begin + (vec_begin - begin) / SPAN_KEYS * SPAN_KEYS;
            const int64_t to = min64(begin + round_up(vec_end - begin, SPAN_KEYS), end);
            if (key < from) next = min64(next, from);
            if (key < from || key >= to) continue;
            next = min64(next, to);
            first = min64(first, j);
            last = j;
        }
        if (last < 0) continue;
        const int64_t row = first * LANES;
        spans[count++] =
            (span){key - begin, next - key, row, min64((last + 1) * LANES, panel_rows(b, panel)) - row};
    }
    return count;
}

// x (key, row) keeps its value where the row attends the key and becomes `masked` elsewhere; keys [begin, end).
static void mask_panel(const key_ranges *ranges, int64_t panel, int64_t begin, int64_t end, real masked,
                       real *x) {
    for (int64_t j = 0; j < PANEL; j += LANES) {
        vec_bits lo, hi;
        memcpy(&lo, ranges->lo + panel * PANEL + j, sizeof(lo));
        memcpy(&hi, ranges->hi + panel * PANEL + j, sizeof(hi));
        for (int64_t key = begin; key < end; key++) {
            const vec_bits index = (real_bits)key - (vec_bits){0};
            real *at = x + (key - begin) * PANEL + j;
            vec_store(at, vec_select((lo <= index) & (index < hi), vec_load(at), vec_set(masked)));
        }
    }
}

// ---- packing -----------------------------------------------------------------------------------

// How k q^T and v dout^T, the products of two inputs, read them: where the CPU multiplies pairs of bf16, as they are;
// else widened to the math type. vdpbf16ps takes subnormal inputs as 0 and makes subnormal sums 0, whatever the caller's
// floating-point mode: an input x below 2^-126 that meets y is an error of |x y| in the sum.
static inline word_kind input_kind(const rt_attn_params *p) {
#ifdef RT_BF16_PAIRS
    if (p->dtype == RT_BF16) return BF16_PAIRS;
#else
    (void)p;
#endif
    return REALS;
}

// Words of a row of `dim` numbers.
static inline int64_t num_words(word_kind kind, int64_t dim) { return kind == REALS ? dim : (dim + 1) / 2; }

// ... and of a packed one.
static inline int64_t row_words(word_kind kind, int64_t dim) { return round_up(num_words(kind, dim), LANES); }

// to (padded) = elements [offset, offset + n) of array, widened; then zeros. *check becomes NaN once one is not finite.
// Pairs are copied and not looked at.
ALWAYS_INLINE void pack_row(word_kind kind, rt_dtype dtype, const void *array, int64_t offset, int64_t n,
                            int64_t padded, real *to, vec *check) {
    if (kind == BF16_PAIRS) {
        // zeros, with the half word that an odd n leaves
        memset(to + n / 2, 0, (size_t)(padded - n / 2) * sizeof(real));
        memcpy(to, (const uint16_t *)array + offset, (size_t)n * sizeof(uint16_t));
        return;
    }
    int64_t whole = 0; // elements that need no conversion and fill vectors
    if (dtype == RT_F32 || dtype == RT_F64) {
        whole = n / LANES * LANES;
        for (int64_t i = 0; i < whole; i += LANES) {
            const vec x = vec_load((const real *)array + offset + i);
            vec_store(to + i, x);
            *check += x * 0;
        }
    }
    if (whole == padded) return;
    load_chunk(dtype, array, offset + whole, n - whole, to + whole); // and the zeros
    for (int64_t i = whole; i < padded; i += LANES) *check += vec_load(to + i) * 0;
}

static inline bool is_zero(vec check) { return vec_reduce_sum(check) == 0; }

// Rows row0 .. row0 + n - 1 of one kv head of k or v, (n, padded) in `to`. Returns whether all numbers are finite.
// A row often begins a new page, which the hardware does not prefetch across.
static bool pack_keys(const rt_attn_params *p, const block *b, word_kind kind, const void *array,
                      const int64_t stride[3], int64_t dim, int64_t row0, int64_t n, real *to) {
    enum { ROWS_AHEAD = 6 };
    const int64_t padded = row_words(kind, dim), element_bytes = p->dtype == RT_F64   ? 8
                                                                 : p->dtype == RT_F32 ? 4
                                                                                      : 2;
    const int64_t base = b->batch * stride[0] + b->kv_head * stride[2] + row0 * stride[1];
    vec check = vec_set(0);
    for (int64_t i = 0; i < n; i++) {
        const char *ahead =
            (const char *)array + (base + min64(i + ROWS_AHEAD, n - 1) * stride[1]) * element_bytes;
        for (int64_t byte = 0; byte < dim * element_bytes; byte += 64) __builtin_prefetch(ahead + byte);
        pack_row(kind, p->dtype, array, base + i * stride[1], dim, padded, to + i * padded, &check);
    }
    return is_zero(check);
}

// The rows of a panel of q or dout: (PANEL, padded) in `rows`, zeros after the last row. Returns whether all numbers
// are finite.
static bool pack_queries(const rt_attn_params *p, const block *b, word_kind kind, const void *array,
                         const int64_t stride[3], int64_t dim, int64_t panel, real *rows) {
    const int64_t padded = row_words(kind, dim), num_rows = panel_rows(b, panel);
    vec check = vec_set(0);
    for (int64_t i = 0; i < num_rows; i++) {
        const int64_t row = panel * PANEL + i;
        const int64_t offset =
            b->batch * stride[0] + row_token(b, row) * stride[1] + row_head(b, row) * stride[2];
        pack_row(kind, p->dtype, array, offset, dim, padded, rows + i * padded, &check);
    }
    memset(rows + num_rows * padded, 0, (size_t)((PANEL - num_rows) * padded) * sizeof(real));
    return is_zero(check);
}

// to (LANES, LANES) = from (LANES, LANES) transposed: blocks of half its size trade places, then of a quarter, ...
static void transpose_square(const real *from, int64_t from_row, real *to, int64_t to_row) {
    vec rows[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) rows[i] = vec_load(from + i * from_row);
#pragma GCC unroll 4
    for (int half = LANES / 2; half > 0; half /= 2)
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) {
            if (i & half) continue;
            const vec upper = rows[i], lower = rows[i + half];
            rows[i] = vec_weave(upper, lower, half, 0);
            rows[i + half] = vec_weave(upper, lower, half, half);
        }
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) vec_store(to + i * to_row, rows[i]);
}

// to (padded, PANEL) = rows (PANEL, padded) transposed.
static void transpose_panel(const real *rows, int64_t padded, real *to) {
    for (int64_t d = 0; d < padded; d += LANES)
        for (int64_t i = 0; i < PANEL; i += LANES)
            transpose_square(rows + i * padded + d, padded, to + d * PANEL + i, PANEL);
}

// ---- weights ------------------------------------------------------------------------------------

// scores (keys, PANEL) = scale k q^T, within a span of a packed panel: the scale is in q's numbers already, but not in
// its pairs.
static void score_span(const rt_attn_params *p, const span *at, const real *k, const real *q, real *scores) {
    const word_kind kind = input_kind(p);
    const int64_t k_row = row_words(kind, p->head_dim);
    gemm_inputs(kind, kind == REALS ? 1 : (real)p->scale, at->num_keys, round_up(at->num_rows, LANES),
                num_words(kind, p->head_dim), k + at->key * k_row, k_row, q + at->row,
                scores + at->key * PANEL + at->row);
}

// scores = softcap * tanh(scores / softcap), over n keys of a panel.
static void softcap_panel(real softcap, int64_t n, real *scores) {
    const vec inverse = vec_set(1 / softcap);
    for (int64_t i = 0; i < n * PANEL; i += LANES)
        vec_store(scores + i, softcap * vec_tanh(vec_load(scores + i) * inverse));
}

// exp of a score minus the largest (or the log-sum-exp): of a number that is at most a rounding error above 0. Results
// below the smallest normal number are 0. NaN gives NaN.
static inline vec weight_exp(vec x) {
#if RT_REAL_BITS == 64
    return vec_exp(x);
#else
    vec_bits power;
    const vec fraction = vec_exp_split(x, 127, &power); // the low bits of power are those of n + 127
    return vec_select(x < -87, vec_set(0), fraction * (vec)(power << 23));
#endif
}

// Cuts n numbers off a worker's workspace; n is a multiple of BLOCK_ROWS or TILE_KEYS, so they are whole cache lines.
static inline real *take(char **workspace, int64_t n) {
    _Static_assert(BLOCK_ROWS * sizeof(real) % 64 == 0 && TILE_KEYS * sizeof(real) % 64 == 0, "cache lines");
    real *array = (real *)(void *)*workspace;
    *workspace += n * (int64_t)sizeof(real);
    return array;
}

// ---- log-sum-exp --------------------------------------------------------------------------------

static inline bool lse_is_f64(const rt_attn_params *p) { return p->lse_f64 || p->dtype == RT_F64; }

static inline double load_lse(const rt_attn_params *p, int64_t i) {
    return lse_is_f64(p) ? ((const double *)p->lse)[i] : (double)((const float *)p->lse)[i];
}

static inline void store_lse(const rt_attn_params *p, int64_t i, double lse) {
    if (lse_is_f64(p))
        ((double *)p->lse)[i] = lse;
    else
        ((float *)p->lse)[i] = (float)lse;
}

#endif // RINGTILE_ATTN_BLOCK_H
