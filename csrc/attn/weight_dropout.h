// Dropout of a panel of weights: which stay is a function of their places in the global batch (philox.h).
#ifndef RINGTILE_ATTN_WEIGHT_DROPOUT_H
#define RINGTILE_ATTN_WEIGHT_DROPOUT_H

#include "philox.h"
#include "query_tile.h"

// word (4, n): n counters become their random numbers. They are the inner loop, so that a vector holds the same word of
// several.
static inline __attribute__((always_inline)) void philox_words(int n, uint32_t *word, uint32_t seed, uint32_t step) {
    for (int round = 0; round < RT_PHILOX_ROUNDS; round++) {
        const uint32_t key_0 = rt_philox_key(seed, 0, round), key_1 = rt_philox_key(step, 1, round);
        for (int i = 0; i < n; i++) {
            const rt_philox x = {{word[i], word[n + i], word[2 * n + i], word[3 * n + i]}};
            const rt_philox y = rt_philox_round(x, key_0, key_1);
            word[i] = y.word[0], word[n + i] = y.word[1], word[2 * n + i] = y.word[2], word[3 * n + i] = y.word[3];
        }
    }
}

// Of the counter of each row of a tile, what does not depend on the key; 0 in unused lanes.
typedef struct dropout_rows {
    uint32_t query[TILE_ROWS], row[TILE_ROWS];
} dropout_rows;

static inline bool drops(const rt_attn_block *p) { return p->dropout > 0; }

// Numbers of scratch that a tile of factors takes.
static inline int64_t num_factors(const rt_attn_block *p) { return drops(p) ? TILE_KEYS * PANEL : 0; }

static void find_dropout_rows(const rt_attn_block *p, const query_tile *queries, dropout_rows *rows) {
    for (int64_t row = 0; row < queries->num_panels * PANEL; row++) {
        const bool used = row < queries->num_rows;
        rows->query[row] = used ? (uint32_t)p->q_positions[row_token(queries, row)] : 0;
        rows->row[row] = used ? rt_dropout_row(p->dropout_rows[queries->batch], row_head(queries, row)) : 0;
    }
}

// factors (keys, PANEL): 0, or 1 / (1 - dropout) where a weight stays; for keys [begin, end) of the run.
static void dropout_panel(const rt_attn_block *p, const dropout_rows *rows, const rt_run *run, int64_t panel,
                          int64_t begin, int64_t end, real *factors) {
    const rt_dropout_rule rule = rt_dropout_rule_of(p->dropout);
    const real scale = (real)rule.scale;
    uint32_t word[4][PANEL];
    int64_t counter = -1; // of the words: four neighbouring positions share one
    for (int64_t key = begin; key < end; key++) {
        const int64_t position = run->global_begin + key * run->stride;
        if (position / 4 != counter) {
            counter = position / 4;
            for (int i = 0; i < PANEL; i++) {
                word[0][i] = (uint32_t)counter, word[1][i] = rows->query[panel * PANEL + i];
                word[2][i] = rows->row[panel * PANEL + i], word[3][i] = p->stream;
            }
            philox_words(PANEL, word[0], p->seed, p->step);
        }
        const uint32_t *own = word[position % 4];
        real *to = factors + (key - begin) * PANEL;
        for (int i = 0; i < PANEL; i++) to[i] = own[i] <= rule.last_kept ? scale : 0;
    }
}

// x *= factors, over n keys of a panel.
static void multiply_panel(int64_t n, const real *factors, real *x) {
    for (int64_t i = 0; i < n * PANEL; i += LANES) vec_store(x + i, vec_load(x + i) * vec_load(factors + i));
}

#endif // RINGTILE_ATTN_WEIGHT_DROPOUT_H
