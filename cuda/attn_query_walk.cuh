// Which queries a tile of keys is attended by: the counterpart of key_walk for the passes that sum dk and dv. And the turns
// in which tiles of keys add to dq.
#ifndef RINGTILE_CUDA_ATTN_QUERY_WALK_CUH
#define RINGTILE_CUDA_ATTN_QUERY_WALK_CUH

#include "attn_tile.cuh"

// The positions that some query of a tile attends lie in [begin, end).
struct tile_bounds {
    int begin, end;
};

// ---- tiles of keys -----------------------------------------------------------------------------

struct alignas(16) key_tile {
    int run, first_key, kv_head, batch;
};

template <int KEYS> int64_t num_key_tiles(const attn_args &args) {
    int64_t tiles = 0;
    for (int run = 0; run < args.num_runs; run++) tiles += num_tiles((int)args.runs[run].length, KEYS);
    return tiles;
}
// Tiles are counted run after run.
template <int KEYS> RT_DEVICE key_tile key_tile_at(const attn_args &args, int index, int kv_head, int batch) {
    int run = 0;
    for (; index >= num_tiles((int)args.runs[run].length, KEYS); run++)
        index -= num_tiles((int)args.runs[run].length, KEYS);
    return {run, index * KEYS, kv_head, batch};
}

// Global position of a key. Behind the run, and above what an interval can say, it is INT32_MAX, which nobody attends.
RT_DEVICE int position_of_key(const rt_run &run, int64_t key) {
    if (key >= run.length) return INT32_MAX;
    const int64_t position = run.global_begin + key * run.stride;
    return position < INT32_MAX ? (int)position : INT32_MAX;
}

// Positions of the first and the last key of a tile.
struct alignas(8) key_positions {
    int first, last;
};
template <int KEYS> RT_DEVICE key_positions positions_of_keys(const rt_run &run, int first_key) {
    return {position_of_key(run, first_key),
            position_of_key(run, least(first_key + KEYS, (int)run.length) - 1)};
}

// Whether a tile of queries attends a tile of keys: otherwise the pair is dead.
RT_DEVICE bool attends(tile_bounds queries, key_positions keys) {
    return queries.begin <= keys.last && queries.end > keys.first;
}

// The first tile of keys that a tile of queries attends, from key `first` of a run on: its first row in k, by which tiles are
// told apart; INT32_MAX if there is none. (It ends behind queries.begin, so that only its begin is to be compared.)
template <int KEYS>
RT_DEVICE int next_key_tile(const attn_args &args, tile_bounds queries, int run, int first) {
#pragma unroll 1
    for (; run < args.num_runs; run++, first = 0) {
        const rt_run &keys = args.runs[run];
        const int lo = first_key_from(keys, queries.begin), key = most(lo / KEYS * KEYS, first);
        if (lo < keys.length && queries.end > position_of_key(keys, key)) return (int)keys.local_begin + key;
    }
    return INT32_MAX;
}

// ---- the workspace -----------------------------------------------------------------------------

// What is asked more than once: the bounds of each tile of queries, and, where blocks take turns to add to dq: the tile of
// keys whose turn it is, by its first row in k, and the next ticket.
struct backward_workspace {
    tile_bounds *bounds; // (rows of the mask, tiles of queries)
    int *turns;          // (batch, heads, tiles of queries)
    int *ticket;
};
RT_HOST_DEVICE int64_t num_mask_rows(const rt_attn_params &p) {
    return p.mask_batch_stride > 0 ? p.batch : 1;
}
RT_HOST_DEVICE backward_workspace workspace_of(const rt_attn_params &p, int num_query_tiles) {
    tile_bounds *const bounds = (tile_bounds *)p.workspace;
    int *const turns = (int *)(bounds + num_mask_rows(p) * num_query_tiles);
    return {bounds, turns, turns + p.batch * p.num_heads * num_query_tiles};
}
// Where a tile has 16 queries or more.
inline int64_t backward_workspace_bytes(const rt_attn_params &p) {
    const int64_t tiles = num_tiles((int)p.num_queries, 16);
    if (tiles == 0) return 0;
    return tiles * (num_mask_rows(p) * (int64_t)sizeof(tile_bounds) +
                    p.batch * p.num_heads * (int64_t)sizeof(int)) +
           (int64_t)sizeof(int);
}

// Fills it, on a grid of (tiles of TILE queries, rows of the mask). KEYS: of a tile of keys, 0 where nobody takes turns.
template <int TILE, int KEYS> RT_KERNEL(32) attn_workspace_kernel(RT_PARAMS attn_args args) {
    const rt_attn_params &p = args.p;
    const backward_workspace workspace = workspace_of(p, num_blocks());
    const int tile = block_index(), mask_row = block_index_y();
    tile_bounds bounds = {INT32_MAX, INT32_MIN};
    for (int i = lane_index(); i < TILE; i += 32) {
        const int64_t token = (int64_t)tile * TILE + i, at = mask_row * p.num_queries + token;
        if (token >= p.num_queries) continue;
        const int begin = global_load(p.begin + at), end = global_load(p.end + at);
        if (begin < end) bounds = {least(bounds.begin, begin), most(bounds.end, end)};
    }
    bounds = {min_of_lanes(bounds.begin), max_of_lanes(bounds.end)};
    if (lane_index() == 0) global_store(workspace.bounds + (int64_t)mask_row * num_blocks() + tile, bounds);
    if constexpr (KEYS > 0) {
        const int64_t num_rows =
            p.batch * p.num_heads / num_mask_rows(p); // of turns, for this row of the mask
        const int first = next_key_tile<KEYS>(args, bounds, 0, 0);
        for (int64_t i = lane_index(); i < num_rows; i += 32)
            global_store(workspace.turns + (mask_row * num_rows + i) * num_blocks() + tile, first);
        if (tile == 0 && mask_row == 0 && lane_index() == 0) global_store(workspace.ticket, 0);
    }
}

template <int TILE, int KEYS> rt_status fill_workspace(const attn_args &args, void *stream) {
    return launch(attn_workspace_kernel<TILE, KEYS>,
                  {num_tiles((int)args.p.num_queries, TILE), num_mask_rows(args.p)}, 32, 0, stream, args);
}

// ---- the walk ----------------------------------------------------------------------------------

// Goes, for the block's tile of KEYS keys, over the tiles of TILE queries that attend it, the last ones first, and in each over
// the heads of the group. Which tile that is lies in shared memory, where the block puts it: asking again is cheaper
// than keeping the answer in registers.
template <int KEYS, int TILE> struct query_walk {
    struct alignas(8) place {
        int tile, head; // of queries, -1 at the end; of the group
    };

    // What is asked for again and again, and takes divisions or products to find.
    struct alignas(16) facts {
        key_positions positions;
        int first_row, first_head; // of the tile, in k and v; of the group
    };
    struct alignas(16) workspace_rows {
        const tile_bounds *bounds; // (tiles)
        int *turns;                // (heads of the group, tiles)
    };
    static constexpr int FACTS_AT = sizeof(key_tile), ROWS_AT = FACTS_AT + sizeof(facts),
                         WARPS_AT = ROWS_AT + sizeof(workspace_rows),
                         BYTES = WARPS_AT + KEYS / 16 * sizeof(key_positions);

    const attn_args &args;
    shared_address at_keys; // a key_tile, facts, workspace_rows, and positions for every warp

    // A number's tile: all kv heads of all batches come with the first tile of keys, then with the next one.
    RT_DEVICE key_tile keys_of_number(int number) const {
        const int kv_heads = (int)args.p.num_kv_heads, heads = kv_heads * (int)args.p.batch;
        return key_tile_at<KEYS>(args, number / heads, number % kv_heads, number % heads / kv_heads);
    }
    RT_DEVICE int take_number() const { return take_ticket(workspace_of(args.p, num_query_tiles()).ticket); }
    // One thread puts the block's tile where the others find it after a barrier.
    RT_DEVICE void choose_keys(key_tile keys) const {
        const rt_attn_params &p = args.p;
        const rt_run &run = args.runs[keys.run];
        const backward_workspace workspace = workspace_of(p, num_query_tiles());
        const int64_t mask_row = p.mask_batch_stride > 0 ? keys.batch : 0;
        const int first_head = keys.kv_head * group();
        const int64_t row = keys.batch * p.num_heads + first_head;
        shared_store(at_keys, keys);
        shared_store(at_keys + FACTS_AT, facts{positions_of_keys<KEYS>(run, keys.first_key),
                                               (int)run.local_begin + keys.first_key, first_head});
        shared_store(at_keys + ROWS_AT, workspace_rows{workspace.bounds + mask_row * num_query_tiles(),
                                                       workspace.turns + row * num_query_tiles()});
    }
    RT_DEVICE key_tile keys() const { return shared_load<key_tile>(at_keys); }
    RT_DEVICE const rt_run &run() const { return args.runs[keys().run]; }
    // Of the 16 keys of a warp that has stored them.
    RT_DEVICE void store_warp_positions() const {
        const int row = 16 * warp_index();
        if (lane_index() == 0)
            shared_store(at_keys + (shared_address)(WARPS_AT + warp_index() * (int)sizeof(key_positions)),
                         key_positions{position_of(row), position_of(row + 15)});
    }
    RT_DEVICE key_positions warp_positions() const {
        return shared_load<key_positions>(
            at_keys + (shared_address)(WARPS_AT + warp_index() * (int)sizeof(key_positions)));
    }
    RT_DEVICE int position_of(int row) const { return position_of_key(run(), keys().first_key + row); }
    RT_DEVICE int num_query_tiles() const { return num_tiles((int)args.p.num_queries, TILE); }
    RT_DEVICE int group() const { return (int)args.p.num_heads / (int)args.p.num_kv_heads; }
    RT_DEVICE int head_of(place at) const { return first_head() + at.head; }

    RT_DEVICE bool ended(place at) const { return at.tile == -1; }
    RT_DEVICE place first() const { return {last_tile(num_query_tiles() - 1), 0}; }
    RT_DEVICE place after(place at) const {
        return at.head + 1 < group() ? place{at.tile, at.head + 1} : place{last_tile(at.tile - 1), 0};
    }

    // The tiles of keys that a tile of queries attends add to its dq one after the other, in ascending order. One thread
    // waits for the block's turn before it adds, and gives it to the next one after that.
    RT_DEVICE int *turn_of(place at) const {
        return shared_load<workspace_rows>(at_keys + ROWS_AT).turns + (int64_t)at.head * num_query_tiles() +
               at.tile;
    }
    RT_DEVICE void wait_for(const int *turn) const { wait_until(turn, first_row()); }
    RT_DEVICE int next_in_turn(place at) const {
        return next_key_tile<KEYS>(args, bounds(at.tile), keys().run, keys().first_key + KEYS);
    }

  private:
    RT_DEVICE key_positions positions() const { return shared_load<key_positions>(at_keys + FACTS_AT); }
    RT_DEVICE int first_row() const { return shared_load<int>(at_keys + FACTS_AT + 8); }
    RT_DEVICE int first_head() const { return shared_load<int>(at_keys + FACTS_AT + 12); }
    RT_DEVICE tile_bounds bounds(int tile) const {
        return global_load(shared_load<workspace_rows>(at_keys + ROWS_AT).bounds + tile);
    }
    // The last tile up to `from`; -1 if there is none.
    RT_DEVICE int last_tile(int from) const {
        for (; from >= 0; from -= 32) {
            const int tile = from - lane_index();
            const bool live = tile >= 0 && attends(bounds(tile), positions());
            const int last = max_of_lanes(live ? tile : -1);
            if (last >= 0) return last;
        }
        return -1;
    }
};

#endif // RINGTILE_CUDA_ATTN_QUERY_WALK_CUH
