// The walk of a tile of keys over the tiles of queries that attend it, the counterpart of key_walk for the passes
// that sum dk and dv; and the semaphores that order the additions of thread blocks to dq, dk and dv.
#ifndef RINGTILE_CUDA_ATTN_QUERY_WALK_CUH
#define RINGTILE_CUDA_ATTN_QUERY_WALK_CUH

#include "key_walk.cuh"

// The union of a tile's intervals lies in [begin, end).
struct tile_bounds {
    int begin, end;
};

// ---- tiles of keys -----------------------------------------------------------------------------

RT_HOST_DEVICE int64_t num_key_tiles(const rt_run *runs, int64_t num_runs, int keys) {
    int64_t tiles = 0;
    for (int64_t run = 0; run < num_runs; run++) tiles += num_tiles((int)runs[run].length, keys);
    return tiles;
}
template <int KEYS> RT_HOST_DEVICE int64_t num_key_tiles(const attn_args &args) {
    return num_key_tiles(args.runs, args.num_runs, KEYS);
}
// Tile `index`, counting run after run.
template <int KEYS> RT_DEVICE key_tile key_tile_at(const attn_args &args, int index, int kv_head, int batch) {
    int run = 0;
    for (; index >= num_tiles((int)args.runs[run].length, KEYS); run++)
        index -= num_tiles((int)args.runs[run].length, KEYS);
    return {run, index * KEYS, kv_head, batch};
}

// Global position of a key; INT32_MAX, which no query attends, behind the run and beyond what an interval can express.
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
    return {position_of_key(run, first_key), position_of_key(run, least(first_key + KEYS, (int)run.length) - 1)};
}

// Whether a tile of queries may attend a tile of keys.
RT_DEVICE bool attends(tile_bounds queries, key_positions keys) {
    return queries.begin <= keys.last && queries.end > keys.first;
}

// The first tile of keys that a tile of queries attends, from key `first` of a run on, named by its first row in k;
// INT32_MAX if there is none. (The tile ends behind queries.begin, so only its begin is compared.)
template <int KEYS> RT_DEVICE int next_key_tile(const attn_args &args, tile_bounds queries, int run, int first) {
#pragma unroll 1
    for (; run < args.num_runs; run++, first = 0) {
        const rt_run &keys = args.runs[run];
        const int lo = first_key_from(keys, queries.begin), key = most(lo / KEYS * KEYS, first);
        if (lo < keys.length && queries.end > position_of_key(keys, key)) return (int)keys.local_begin + key;
    }
    return INT32_MAX;
}

// ---- parts of a group of query heads -----------------------------------------------------------

// Tiles of keys of all kv heads and batches.
template <int KEYS> RT_HOST_DEVICE int64_t num_key_units(const attn_args &args) {
    return num_key_tiles<KEYS>(args) * args.p.num_kv_heads * args.p.batch;
}

// With few kv heads and a short block of keys there would be fewer thread blocks than multiprocessors. Then the query
// heads of a group are divided among several thread blocks, until there are almost two for each place on a
// multiprocessor: under a causal mask, those with short walks fill what long ones leave.
template <int KEYS> attn_args divide_heads(const attn_args &of, int most_on_multiprocessor) {
    attn_args args = of;
    const int64_t group = args.p.num_heads / args.p.num_kv_heads, units = num_key_units<KEYS>(args);
    if (units == 0) return args;
    const int64_t places = most_on_multiprocessor * num_multiprocessors(), wanted = 2 * places - places / 8;
    const int64_t parts = (wanted + units - 1) / units, heads = parts < group ? (group + parts - 1) / parts : 1;
    args.num_parts = (int)((group + heads - 1) / heads);
    return args;
}

// ---- the workspace and the semaphores ----------------------------------------------------------

// Each tile of keys adds to the dq of the tiles of queries that attend it. So that every sum has one order, those
// additions go by ascending tile of keys. The semaphore of a tile of queries (of one head and batch) holds the tile
// of keys that adds next, named by its first row in k. A thread block waits until the semaphore names its own tile
// (wait_eq), adds, and stores the next tile that those queries attend (st_release).
//
// No deadlock: a thread block takes its tile of keys by ticket as it starts, in ascending order, so it waits only
// for thread blocks that have started, and the lowest ticket among the running ones waits for none. This holds
// however few thread blocks run at a time. All go from the last queries to the first: under a causal mask, thread
// blocks that start together, longest first, follow each other at the distance of one addition; under a window each
// finds its semaphore free.
//
// The parts of a group add to dk and dv of their tile of keys in the same way, by ascending part, each once at its end.
struct backward_workspace {
    tile_bounds *bounds; // (rows of the mask, tiles of queries)
    int *semaphores;     // (batch, heads, tiles of queries)
    int *next_ticket;
    int *next_part; // (tiles of keys, batch, kv heads): the part that adds next, if there are several
};
RT_HOST_DEVICE int64_t num_mask_rows(const rt_attn_params &p) { return p.mask_batch_stride > 0 ? p.batch : 1; }
RT_HOST_DEVICE backward_workspace workspace_of(const rt_attn_params &p, int num_query_tiles) {
    tile_bounds *const bounds = (tile_bounds *)p.workspace;
    int *const semaphores = (int *)(bounds + num_mask_rows(p) * num_query_tiles);
    int *const next_ticket = semaphores + p.batch * p.num_heads * num_query_tiles;
    return {bounds, semaphores, next_ticket, next_ticket + 1};
}
// Enough for tiles of 16 queries and of 64 keys or more, and for those of plain.cuh.
inline int64_t backward_workspace_bytes(const rt_attn_params &p) {
    const int64_t tiles = num_tiles((int)p.num_queries, has_large_heads(p) || is_plain_in_any_dtype(p) ? 8 : 16);
    if (tiles == 0) return 0;
    return tiles * (num_mask_rows(p) * (int64_t)sizeof(tile_bounds) + p.batch * p.num_heads * (int64_t)sizeof(int)) +
           (1 + num_key_tiles(p.k_runs, p.num_k_runs, 64) * p.num_kv_heads * p.batch) * (int64_t)sizeof(int);
}

// Fills the workspace, on a grid of (tiles of TILE queries, rows of the mask). Tiles of keys have KEYS keys; with
// KEYS 0 there are no semaphores.
template <int TILE, int KEYS> RT_KERNEL(32) attn_workspace_kernel(RT_PARAMS attn_args args) {
    const rt_attn_params &p = args.p;
    const backward_workspace workspace = workspace_of(p, num_ctas_x());
    const int tile = cta_index_x(), mask_row = cta_index_y();
    tile_bounds bounds = {INT32_MAX, INT32_MIN};
    for (int i = lane_index(); i < TILE; i += 32) {
        const int64_t token = (int64_t)tile * TILE + i, at = mask_row * p.num_queries + token;
        if (token >= p.num_queries) continue;
        const int begin = ld_global(p.begin + at), end = ld_global(p.end + at);
        if (begin < end) bounds = {least(bounds.begin, begin), most(bounds.end, end)};
    }
    bounds = {reduce_min_sync(bounds.begin), reduce_max_sync(bounds.end)};
    if (lane_index() == 0) st_global(workspace.bounds + (int64_t)mask_row * num_ctas_x() + tile, bounds);
    if constexpr (KEYS > 0) {
        const int64_t num_rows = p.batch * p.num_heads / num_mask_rows(p); // of semaphores, per row of the mask
        const int first = next_key_tile<KEYS>(args, bounds, 0, 0);
        for (int64_t i = lane_index(); i < num_rows; i += 32)
            st_global(workspace.semaphores + (mask_row * num_rows + i) * num_ctas_x() + tile, first);
        if (tile == 0 && mask_row == 0 && lane_index() == 0) st_global(workspace.next_ticket, 0);
        const int64_t num_units = args.num_parts > 1 ? num_key_units<KEYS>(args) : 0;
        for (int64_t i = (int64_t)tile * 32 + lane_index(); i < num_units && mask_row == 0; i += 32 * num_ctas_x())
            st_global(workspace.next_part + i, 0);
    }
}

template <int TILE, int KEYS> rt_status fill_workspace(const attn_args &args, void *stream) {
    return launch(attn_workspace_kernel<TILE, KEYS>, {num_tiles((int)args.p.num_queries, TILE), num_mask_rows(args.p)},
                  32, 0, stream, args);
}

// ---- the walk ----------------------------------------------------------------------------------

// Visits, for the thread block's tile of KEYS keys, the tiles of TILE queries that attend it, last to first, and
// for each all heads of its part of the group. The tile of keys, and what derives from it through divisions or
// products, is kept in shared memory: reading it again is cheaper than keeping it in registers.
template <int KEYS, int TILE> struct query_walk {
    struct alignas(8) place {
        int tile, head; // tile of queries, -1 at the end; head of the part
    };

    struct alignas(16) workspace_rows { // those of the tile's mask row and heads
        const tile_bounds *bounds;      // (tiles)
        int *semaphores;                // (heads of the part, tiles)
    };
    struct alignas(16) tile_facts {
        key_positions positions;
        int first_row, first_head; // of the tile in k and v; of the part
    };
    struct alignas(16) part_facts {
        int *next_part; // of the tile
        int part, num_heads;
    };
    struct storage {
        key_tile keys;
        tile_facts facts;
        part_facts part;
        workspace_rows rows;
        key_positions warp_positions[KEYS / 16];
    };

    const attn_args &args;
    shared_ref<storage> at_keys;

    RT_DEVICE int take_ticket() const { return atom_add(workspace_of(args.p, num_query_tiles()).next_ticket, 1); }
    // The tile of a ticket: all kv heads of all batches have the first tile of keys, each part after part, then all the
    // next.
    RT_DEVICE void choose_keys_of_ticket(int ticket) const {
        const int kv_heads = (int)args.p.num_kv_heads, heads = kv_heads * (int)args.p.batch;
        const int unit = ticket / args.num_parts;
        choose_keys(key_tile_at<KEYS>(args, unit / heads, unit % kv_heads, unit % heads / kv_heads), unit,
                    ticket % args.num_parts);
    }
    // One thread stores the thread block's tile; the others read it after a barrier.
    RT_DEVICE void choose_keys(key_tile keys, int unit = 0, int part = 0) const {
        const rt_attn_params &p = args.p;
        const rt_run &run = args.runs[keys.run];
        const backward_workspace workspace = workspace_of(p, num_query_tiles());
        const int64_t mask_row = p.mask_batch_stride > 0 ? keys.batch : 0;
        const int group = (int)p.num_heads / (int)p.num_kv_heads, most_heads = num_tiles(group, args.num_parts);
        const int first_head = keys.kv_head * group + part * most_heads;
        const int64_t row = keys.batch * p.num_heads + first_head;
        st_shared(RT_SHARED(at_keys, keys), keys);
        st_shared(RT_SHARED(at_keys, facts), tile_facts{positions_of_keys<KEYS>(run, keys.first_key),
                                                        (int)run.local_begin + keys.first_key, first_head});
        st_shared(RT_SHARED(at_keys, part),
                  part_facts{workspace.next_part + unit, part, least(most_heads, group - part * most_heads)});
        st_shared(RT_SHARED(at_keys, rows), workspace_rows{workspace.bounds + mask_row * num_query_tiles(),
                                                           workspace.semaphores + row * num_query_tiles()});
    }
    RT_DEVICE key_tile keys() const { return ld_shared(RT_SHARED(at_keys, keys)); }
    RT_DEVICE const rt_run &run() const { return args.runs[keys().run]; }
    // Positions of a warp's 16 keys, once it has stored them.
    RT_DEVICE void store_warp_positions() const {
        const int row = 16 * warp_index();
        if (lane_index() == 0)
            st_shared(RT_SHARED(at_keys, warp_positions)[warp_index()],
                      key_positions{position_of(row), position_of(row + 15)});
    }
    RT_DEVICE key_positions warp_positions() const {
        return ld_shared(RT_SHARED(at_keys, warp_positions)[warp_index()]);
    }
    RT_DEVICE int position_of(int row) const { return position_of_key(run(), keys().first_key + row); }
    RT_DEVICE int num_query_tiles() const { return num_tiles((int)args.p.num_queries, TILE); }
    RT_DEVICE part_facts part() const { return ld_shared(RT_SHARED(at_keys, part)); }
    RT_DEVICE int head_of(place at) const { return ld_shared(RT_SHARED(facts(), first_head)) + at.head; }

    RT_DEVICE bool ended(place at) const { return at.tile == -1; }
    RT_DEVICE place first() const { return {last_tile(num_query_tiles() - 1), 0}; }
    RT_DEVICE place after(place at) const {
        return at.head + 1 < part().num_heads ? place{at.tile, at.head + 1} : place{last_tile(at.tile - 1), 0};
    }

    // The semaphore of the queries' dq. One thread waits before the thread block adds, and releases after it.
    RT_DEVICE int *dq_semaphore(place at) const {
        return ld_shared(RT_SHARED(at_keys, rows)).semaphores + (int64_t)at.head * num_query_tiles() + at.tile;
    }
    RT_DEVICE void wait_for_dq(const int *semaphore) const {
        wait_eq(semaphore, ld_shared(RT_SHARED(facts(), first_row)));
    }
    // The tile of keys that adds to it after this one.
    RT_DEVICE int next_to_add(place at) const {
        return next_key_tile<KEYS>(args, bounds(at.tile), keys().run, keys().first_key + KEYS);
    }

    // dk and dv of the tile: the first part replaces or adds to what is there, the others add. One thread waits before
    // the thread block adds, and releases after it.
    RT_DEVICE bool adds_to_keys() const { return !args.p.fresh || part().part > 0; }
    RT_DEVICE bool is_last_part() const { return part().part + 1 == args.num_parts; }
    RT_DEVICE void wait_for_keys() const {
        const part_facts of = part();
        if (of.part > 0) wait_eq(of.next_part, of.part);
    }
    RT_DEVICE void release_keys() const {
        const part_facts of = part();
        if (!is_last_part()) st_release(of.next_part, of.part + 1);
    }

  private:
    RT_DEVICE shared_ref<tile_facts> facts() const { return RT_SHARED(at_keys, facts); }
    RT_DEVICE tile_bounds bounds(int tile) const {
        return ld_global(ld_shared(RT_SHARED(at_keys, rows)).bounds + tile);
    }
    // The last attended tile up to `from`; -1 if there is none.
    RT_DEVICE int last_tile(int from) const {
        for (; from >= 0; from -= 32) {
            const int tile = from - lane_index();
            const bool live = tile >= 0 && attends(bounds(tile), ld_shared(RT_SHARED(facts(), positions)));
            const int last = reduce_max_sync(live ? tile : -1);
            if (last >= 0) return last;
        }
        return -1;
    }
};

#endif // RINGTILE_CUDA_ATTN_QUERY_WALK_CUH
