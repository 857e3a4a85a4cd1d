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

// Whether a tile of queries attends a tile of keys: otherwise the pair is dead.
template <int KEYS> RT_DEVICE bool attends(tile_bounds queries, const rt_run &run, int first_key) {
    const int last_key = least(first_key + KEYS, (int)run.length) - 1;
    return queries.begin <= position_of_key(run, last_key) && queries.end > position_of_key(run, first_key);
}

// The first tile of keys that a tile of queries attends, from key `first` of a run on: its first row in k, by which tiles are
// told apart; INT32_MAX if there is none.
template <int KEYS>
RT_DEVICE int next_key_tile(const attn_args &args, tile_bounds queries, int run, int first) {
    for (; run < args.num_runs; run++, first = 0) {
        const rt_run &keys = args.runs[run];
        const int key = most(first_key_from(keys, queries.begin) / KEYS * KEYS, first);
        if (key < keys.length && attends<KEYS>(queries, keys, key)) return (int)(keys.local_begin + key);
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
    struct place {
        int tile, head; // of queries, -1 at the end; of the group
    };

    const attn_args &args;
    shared_address at_keys; // a key_tile

    RT_DEVICE key_tile keys() const { return shared_load<key_tile>(at_keys); }
    RT_DEVICE const rt_run &run() const { return args.runs[keys().run]; }
    RT_DEVICE int position_of(int row) const { return position_of_key(run(), keys().first_key + row); }
    RT_DEVICE int num_query_tiles() const { return num_tiles((int)args.p.num_queries, TILE); }
    RT_DEVICE int group() const { return (int)args.p.num_heads / (int)args.p.num_kv_heads; }
    RT_DEVICE int head_of(place at) const { return keys().kv_head * group() + at.head; }

    RT_DEVICE bool ended(place at) const { return at.tile == -1; }
    RT_DEVICE place first() const { return {last_tile(num_query_tiles() - 1), 0}; }
    RT_DEVICE place after(place at) const {
        return at.head + 1 < group() ? place{at.tile, at.head + 1} : place{last_tile(at.tile - 1), 0};
    }

    // The tiles of keys that a tile of queries attends add to its dq one after the other, in ascending order. Every thread
    // calls wait_for_turn before it adds, and finish_turn after a barrier behind that.
    RT_DEVICE void wait_for_turn(place at) const {
        if (thread_index() == 0) wait_until(turn_of(at), (int)run().local_begin + keys().first_key);
        block_barrier();
    }
    RT_DEVICE void finish_turn(place at) const {
        if (thread_index() != 0) return;
        const tile_bounds queries = global_load(bounds() + at.tile);
        store_release(turn_of(at), next_key_tile<KEYS>(args, queries, keys().run, keys().first_key + KEYS));
    }

  private:
    RT_DEVICE const tile_bounds *bounds() const {
        const int64_t mask_row = args.p.mask_batch_stride > 0 ? keys().batch : 0;
        return workspace_of(args.p, num_query_tiles()).bounds + mask_row * num_query_tiles();
    }
    RT_DEVICE int *turn_of(place at) const {
        const int64_t row = keys().batch * args.p.num_heads + head_of(at);
        return workspace_of(args.p, num_query_tiles()).turns + row * num_query_tiles() + at.tile;
    }

    // The last tile up to `from`; -1 if there is none.
    RT_DEVICE int last_tile(int from) const {
        for (; from >= 0; from -= 32) {
            const int tile = from - lane_index();
            const bool live =
                tile >= 0 && attends<KEYS>(global_load(bounds() + tile), run(), keys().first_key);
            const int last = max_of_lanes(live ? tile : -1);
            if (last >= 0) return last;
        }
        return -1;
    }
};

#endif // RINGTILE_CUDA_ATTN_QUERY_WALK_CUH
