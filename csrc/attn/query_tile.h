// How the query rows of a call are split into tiles, one per task.
//
// The rows of a query tile are consecutive tokens of up to TILE_HEADS query heads of one kv head, so that one packed
// tile of keys serves them all. Row r is token r / num_heads and head r % num_heads. The tile is processed in panels of
// PANEL rows, one row per vector lane: scores are laid out (key, row), so the softmax over keys never crosses lanes. A
// panel spans few tokens, which attend nearly the same keys.
//
// The split depends on the number of heads of a group, and never on workers, batch, or number of groups. dk and dv are
// sums over tiles, in their order: so a share of the groups has the bits that all have, also with padding at the end.
#ifndef RINGTILE_ATTN_QUERY_TILE_H
#define RINGTILE_ATTN_QUERY_TILE_H

#include "register_tile.h"

enum {
    TILE_ROWS = 384,
    TILE_PANELS = TILE_ROWS / PANEL,
    TILE_KEYS = 128, // scores are computed in tiles of TILE_ROWS x TILE_KEYS
    TILE_HEADS = 8,  // heads of a group that a tile takes before more tokens; more if the tokens run out
};

static inline int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// All query tiles of a call. Tasks go from the last tokens to the first, because causal work grows with the position
// and the longest tasks should start first.
typedef struct attn_grid {
    int64_t heads_per_tile, tokens_per_tile; // heads * tokens <= TILE_ROWS
    int64_t head_tiles, token_tiles;         // per kv head
    int64_t num_tasks;                       // batch * num_kv_heads * head_tiles * token_tiles
} attn_grid;

static attn_grid grid_of(const rt_attn_block *p) {
    attn_grid g = {0};
    if (p->batch == 0 || p->num_queries == 0) return g;
    const int64_t group = p->num_heads / p->num_kv_heads;
    g.heads_per_tile = min64(group, max64(TILE_HEADS, TILE_ROWS / p->num_queries));
    g.tokens_per_tile = TILE_ROWS / g.heads_per_tile;
    g.head_tiles = (group + g.heads_per_tile - 1) / g.heads_per_tile;
    g.token_tiles = (p->num_queries + g.tokens_per_tile - 1) / g.tokens_per_tile;
    g.num_tasks = p->batch * p->num_kv_heads * g.head_tiles * g.token_tiles;
    return g;
}

static inline int64_t attn_num_tasks(const rt_attn_block *p) { return grid_of(p).num_tasks; }

// The rows of one task, and their place in the tensors.
typedef struct query_tile {
    int64_t batch, kv_head, first_head, num_heads, first_token, num_tokens;
    int64_t num_rows, num_panels;
} query_tile;

static query_tile query_tile_of(const rt_attn_block *p, const attn_grid *g, int64_t task) {
    const int64_t group = p->num_heads / p->num_kv_heads, num_pairs = p->batch * p->num_kv_heads;
    const int64_t pair = task % num_pairs, tile = task / num_pairs; // (batch, kv head), tile within it
    const int64_t head_tile = tile % g->head_tiles;
    const int64_t token_tile = g->token_tiles - 1 - tile / g->head_tiles;
    query_tile queries = {.batch = pair / p->num_kv_heads, .kv_head = pair % p->num_kv_heads};
    queries.first_head = queries.kv_head * group + head_tile * g->heads_per_tile;
    queries.num_heads = min64(g->heads_per_tile, group - head_tile * g->heads_per_tile);
    queries.first_token = token_tile * g->tokens_per_tile;
    queries.num_tokens = min64(g->tokens_per_tile, p->num_queries - queries.first_token);
    queries.num_rows = queries.num_heads * queries.num_tokens;
    queries.num_panels = (queries.num_rows + PANEL - 1) / PANEL;
    return queries;
}

static inline int64_t row_head(const query_tile *queries, int64_t row) {
    return queries->first_head + row % queries->num_heads;
}

static inline int64_t row_token(const query_tile *queries, int64_t row) {
    return queries->first_token + row / queries->num_heads;
}

// Rows of a panel: PANEL, or fewer in the last one, whose remaining lanes are masked.
static inline int64_t panel_rows(const query_tile *queries, int64_t panel) {
    return min64(PANEL, queries->num_rows - panel * PANEL);
}

#endif // RINGTILE_ATTN_QUERY_TILE_H
