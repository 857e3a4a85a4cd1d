// Which queries a tile of keys is attended by: the counterpart of key_walk for the pass that sums dk and dv.
#ifndef RINGTILE_CUDA_ATTN_QUERY_WALK_CUH
#define RINGTILE_CUDA_ATTN_QUERY_WALK_CUH

#include "attn_tile.cuh"

// The positions that some query of a tile attends lie in [begin, end).
struct tile_bounds {
    int begin, end;
};

// A grid of (tiles of TILE queries, rows of the mask); bounds (rows, tiles) are the workspace.
template <int TILE> RT_KERNEL(32) attn_tile_bounds_kernel(RT_PARAMS attn_args args) {
    const rt_attn_params &p = args.p;
    tile_bounds bounds = {INT32_MAX, INT32_MIN};
    for (int i = lane_index(); i < TILE; i += 32) {
        const int64_t token = (int64_t)block_index() * TILE + i, at = block_index_y() * p.num_queries + token;
        if (token >= p.num_queries) continue;
        const int begin = global_load(p.begin + at), end = global_load(p.end + at);
        if (begin < end) bounds = {least(bounds.begin, begin), most(bounds.end, end)};
    }
    bounds = {min_of_lanes(bounds.begin), max_of_lanes(bounds.end)};
    if (lane_index() == 0)
        global_store((tile_bounds *)p.workspace + (int64_t)block_index_y() * num_blocks() + block_index(),
                     bounds);
}

template <int TILE> rt_status find_tile_bounds(const attn_args &args, void *stream) {
    const int64_t mask_rows = args.p.mask_batch_stride > 0 ? args.p.batch : 1;
    return launch(attn_tile_bounds_kernel<TILE>, {num_tiles((int)args.p.num_queries, TILE), mask_rows}, 32, 0,
                  stream, args);
}

// A grid of (tiles of ROWS keys, run after run; kv heads; batch).
template <int ROWS> grid_size key_grid(const attn_args &args) {
    int64_t tiles = 0;
    for (int run = 0; run < args.num_runs; run++) tiles += num_tiles((int)args.runs[run].length, ROWS);
    return {tiles, args.p.num_kv_heads, args.p.batch};
}

// Goes, for the tile of ROWS keys that the block has, over the tiles of TILE queries of every head of the group whose
// bounds meet the keys' positions.
template <int ROWS, int TILE> struct query_walk {
    struct place {
        int head, tile; // of the group, of queries
    };

    const attn_args &args;
    int run, first_key; // of the block's tile
    int num_query_tiles;

    RT_DEVICE explicit query_walk(const attn_args &args) : args(args), run(0) {
        int index = block_index();
        for (; index >= num_tiles((int)args.runs[run].length, ROWS); run++)
            index -= num_tiles((int)args.runs[run].length, ROWS);
        first_key = index * ROWS;
        num_query_tiles = num_tiles((int)args.p.num_queries, TILE);
    }

    // Global position of a key of the tile. Behind the run, and above what an interval can say, it is INT32_MAX, which
    // nobody attends.
    RT_DEVICE int position_of(int row) const {
        const rt_run &keys = args.runs[run];
        const int64_t key = first_key + row;
        if (key >= keys.length) return INT32_MAX;
        const int64_t position = keys.global_begin + key * keys.stride;
        return position < INT32_MAX ? (int)position : INT32_MAX;
    }

    RT_DEVICE int group() const { return (int)args.p.num_heads / (int)args.p.num_kv_heads; }
    RT_DEVICE int head_of(place at) const { return block_index_y() * group() + at.head; }
    RT_DEVICE bool ended(place at) const { return at.head >= group(); }
    RT_DEVICE place first() const {
        const int tile = next_tile(0);
        return tile < INT32_MAX ? place{0, tile} : place{group(), 0};
    }
    RT_DEVICE place after(place at) const {
        const int tile = next_tile(at.tile + 1);
        if (tile < INT32_MAX) return {at.head, tile};
        return at.head + 1 < group() ? place{at.head + 1, next_tile(0)} : place{group(), 0};
    }

  private:
    // The first tile from `from` on; INT32_MAX if there is none.
    RT_DEVICE int next_tile(int from) const {
        const int64_t mask_row = args.p.mask_batch_stride > 0 ? block_index_z() : 0;
        const tile_bounds *const bounds = (const tile_bounds *)args.p.workspace + mask_row * num_query_tiles;
        const int last_row = least(ROWS, (int)args.runs[run].length - first_key) - 1;
        const int first = position_of(0), last = position_of(last_row);
        for (; from < num_query_tiles; from += 32) {
            int next = INT32_MAX;
            const int tile = from + lane_index();
            if (tile < num_query_tiles) {
                const tile_bounds of = global_load(bounds + tile);
                if (of.begin <= last && of.end > first) next = tile;
            }
            next = min_of_lanes(next);
            if (next < INT32_MAX) return next;
        }
        return INT32_MAX;
    }
};

#endif // RINGTILE_CUDA_ATTN_QUERY_WALK_CUH
