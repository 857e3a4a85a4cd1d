// Blocks of packed keys: TILE_KEYS keys of a run. For tiles the tasks of a kv head share those of the call, each packed
// by the first task that needs it. Otherwise a task packs each for itself.
#ifndef RINGTILE_ATTN_PACKED_KEYS_H
#define RINGTILE_ATTN_PACKED_KEYS_H

#include "key_ranges.h"
#include "pack.h"

#include <sched.h>
#include <stdatomic.h>

// One block. Its summed array is the one whose rows a product sums over keys: v, forward, or k, backward.
typedef struct key_block {
    real *k_words, *v_words; // (TILE_KEYS, words of D), (TILE_KEYS, words of Dv); of v backward, and forward for tiles
    real *numbers;           // (TILE_KEYS, dim padded): the summed array. For tiles only room for it
    real *columns;           // for tiles: the summed array in pairs of keys, (dim padded, TILE_KEYS / 2)
    bool finite;             // whether all numbers of the summed array are
} key_block;

static inline attn_input summed_input(const rt_attn_block *p, bool backward) {
    return backward ? input_k(p) : input_v(p);
}

// Takes a block off a workspace. A shared one leaves out what a task needs for a while.
static void take_block(const rt_attn_block *p, bool backward, bool shared, arena *from, key_block *b) {
    const word_kind kind = input_kind(p);
    const int64_t dim = summed_input(p, backward).dim, k_words = TILE_KEYS * row_words(kind, p->head_dim);
    *b = (key_block){0};
    if (!shared) b->numbers = take(from, TILE_KEYS * round_up(dim, LANES));
    b->k_words = backward && kind == REALS ? b->numbers : take(from, k_words);
    if (backward || (kind == TILE_PAIRS && !shared))
        b->v_words = take(from, TILE_KEYS * row_words(kind, p->v_head_dim));
    if (kind == TILE_PAIRS) b->columns = take(from, TILE_KEYS * row_words(kind, dim));
}

// Packs rows [first, n) of an array for tiles, counted from `row`, as (n, words), with zeros before them, and after
// them up to a multiple of TILE_DEPTH.
static void pack_tile_rows(const rt_attn_block *p, const query_tile *of, attn_input x, int64_t row, int64_t first,
                           int64_t n, real *to) {
    const int64_t words = row_words(TILE_PAIRS, x.dim);
    memset(to, 0, (size_t)(first * words) * sizeof(real));
    pack_keys(p, of, TILE_PAIRS, x, row + first, n - first, to + first * words);
    memset(to + n * words, 0, (size_t)((round_up(n, TILE_DEPTH) - n) * words) * sizeof(real));
}

// Packs keys [begin, end) of the run, but reads none before `first`, which nothing attends.
static void pack_block(const rt_attn_block *p, bool backward, const query_tile *of, const rt_run *run, int64_t begin,
                       int64_t end, int64_t first, key_block *b) {
    const int64_t row = run->local_begin + begin, n = end - begin, skipped = max64(first - begin, 0);
    const attn_input summed = summed_input(p, backward);
    const word_kind kind = input_kind(p);
    if (kind == TILE_PAIRS) {
        pack_tile_rows(p, of, input_k(p), row, skipped, n, b->k_words);
        pack_tile_rows(p, of, input_v(p), row, skipped, n, b->v_words);
        b->finite = pair_columns(backward ? b->k_words : b->v_words, n, row_words(kind, summed.dim), b->columns);
        return;
    }
    b->finite = pack_keys(p, of, REALS, summed, row, n, b->numbers);
    if (b->k_words != b->numbers) pack_keys(p, of, kind, input_k(p), row, n, b->k_words);
    if (backward) pack_keys(p, of, kind, input_v(p), row, n, b->v_words);
}

// ---- the tasks of a call -----------------------------------------------------------------------

typedef _Atomic int64_t block_state;
enum { UNPACKED, BEING_PACKED, PACKED, PACKED_NOT_FINITE };

// What the tasks of a call share, after the arrays that they share anyway.
typedef struct shared_keys {
    block_state *states;      // (batch, kv heads, blocks_per_head). NULL: every task packs for itself
    position_range *attended; // (batch): where the keys that are attended lie; no others are read
    char *blocks;
    int64_t blocks_per_head, block_bytes;
} shared_keys;

// As forward_lay_out; 0 where nothing is shared: keys meet one query tile, or their runs would leave most blocks nearly
// empty, or the workspace would be large.
static int64_t shared_lay_out(const rt_attn_block *p, bool backward, char *workspace, shared_keys *s) {
    enum { MAX_BYTES = 1 << 28 };
    *s = (shared_keys){0};
    const attn_grid g = grid_of(p);
    if (input_kind(p) != TILE_PAIRS || g.head_tiles * g.token_tiles < 2 || p->num_k_runs > p->num_keys / TILE_KEYS)
        return 0;
    arena block = {0}, space = {workspace, 0}, *const at = &space;
    key_block b;
    take_block(p, backward, true, &block, &b);
    const int64_t pairs = p->batch * p->num_kv_heads, word = sizeof(real);
    s->block_bytes = block.num_bytes;
    s->blocks_per_head = p->num_keys / TILE_KEYS + p->num_k_runs;
    if (s->blocks_per_head > MAX_BYTES / s->block_bytes / pairs) return 0;
    const int64_t num_blocks = pairs * s->blocks_per_head;
    s->states = (block_state *)(void *)take(at, num_blocks * (int64_t)sizeof(*s->states) / word);
    s->attended = (position_range *)(void *)take(at, p->batch * (int64_t)sizeof(*s->attended) / word);
    s->blocks = (char *)take(at, num_blocks * s->block_bytes / word);
    return space.num_bytes;
}

static int64_t attn_shared_bytes(const rt_attn_block *p, bool backward) {
    shared_keys s;
    return shared_lay_out(p, backward, NULL, &s);
}

static void attn_open_shared(const rt_attn_block *p, bool backward, char *workspace) {
    shared_keys s;
    shared_lay_out(p, backward, workspace, &s);
    for (int64_t i = 0; i < p->batch * p->num_kv_heads * s.blocks_per_head; i++) atomic_init(&s.states[i], UNPACKED);
    for (int64_t batch = 0; batch < p->batch; batch++) {
        const query_tile all = {.batch = batch, .num_tokens = p->num_queries};
        const bool known = batch > 0 && p->mask_batch_stride == 0;
        s.attended[batch] = known ? s.attended[0] : find_position_range(p, &all);
    }
}

// ---- the blocks of a task ----------------------------------------------------------------------

// The blocks of a run that a query tile meets. Keys [first, last) of the run may be read.
typedef struct run_blocks {
    const rt_run *run;
    int64_t index; // of the run's first block among those of a kv head
    int64_t first, last;
} run_blocks;

static run_blocks find_blocks(const shared_keys *shared, const query_tile *queries, const rt_run *run, int64_t index,
                              const key_ranges *ranges) {
    if (shared->states == NULL) return (run_blocks){run, index, ranges->first, ranges->last};
    const position_range attended = shared->attended[queries->batch];
    return (run_blocks){run, index, first_key_from(run, attended.begin), first_key_from(run, attended.end)};
}

static inline int64_t num_run_blocks(const rt_run *run) { return (run->length + TILE_KEYS - 1) / TILE_KEYS; }

// Where the first block begins. For tiles it does not depend on the query tile, so that blocks can be shared.
static inline int64_t first_block_key(const rt_attn_block *p, const key_ranges *ranges) {
    return input_kind(p) == TILE_PAIRS ? ranges->first / TILE_KEYS * TILE_KEYS : ranges->first;
}

// The block of keys [begin, end): packs it into `own`; or, where tasks share blocks, packs it for all unless another
// task has, or waits for the one that does.
static key_block find_block(const rt_attn_block *p, bool backward, const query_tile *queries, const shared_keys *shared,
                            const run_blocks *blocks, int64_t begin, int64_t end, const key_block *own) {
    key_block b = *own;
    if (shared->states == NULL) {
        pack_block(p, backward, queries, blocks->run, begin, end, blocks->first, &b);
        return b;
    }
    const int64_t index = (queries->batch * p->num_kv_heads + queries->kv_head) * shared->blocks_per_head +
                          blocks->index + begin / TILE_KEYS;
    block_state *const state = &shared->states[index];
    arena block = {shared->blocks + index * shared->block_bytes, 0};
    take_block(p, backward, true, &block, &b);
    b.numbers = own->numbers;
    if (!backward) b.v_words = own->v_words;
    int64_t found = UNPACKED;
    if (atomic_compare_exchange_strong_explicit(state, &found, BEING_PACKED, memory_order_acquire,
                                                memory_order_acquire)) {
        pack_block(p, backward, queries, blocks->run, begin, end, blocks->first, &b);
        atomic_store_explicit(state, b.finite ? PACKED : PACKED_NOT_FINITE, memory_order_release);
        return b;
    }
    for (; found == BEING_PACKED; found = atomic_load_explicit(state, memory_order_acquire)) sched_yield();
    b.finite = found == PACKED;
    return b;
}

// For tiles, which read pairs: the summed array's numbers at keys [begin, end) of the run.
static void unpack_numbers(const rt_attn_block *p, bool backward, const query_tile *queries, const run_blocks *blocks,
                           int64_t begin, int64_t end, real *numbers) {
    const attn_input x = summed_input(p, backward);
    const int64_t from = max64(begin, blocks->first);
    pack_keys(p, queries, REALS, x, blocks->run->local_begin + from, end - from,
              numbers + (from - begin) * round_up(x.dim, LANES));
}

#endif // RINGTILE_ATTN_PACKED_KEYS_H
