// The walk of a tile of keys over the tiles of queries that attend it, the counterpart of key_walk for the passes
// that sum dk and dv; and the semaphores that order the additions of thread blocks to dq, dk and dv.
#ifndef RINGTILE_CUDA_ATTN_QUERY_WALK_CUH
#define RINGTILE_CUDA_ATTN_QUERY_WALK_CUH

#include "key_walk.cuh"

// ---- parts of a group of query heads -----------------------------------------------------------

// Tiles of keys of all kv heads and batches.
template <int KEYS> RT_HOST_DEVICE int64_t num_key_units(const attn_args &args) {
    return num_key_tiles<KEYS>(args) * args.p.num_kv_heads * args.p.batch;
}

// With few kv heads and a short block of keys there would be fewer thread blocks than multiprocessors. Then the query
// heads of a group are divided among several thread blocks, until there are almost two for each place on a
// multiprocessor: under a causal mask, those with short walks fill what long ones leave.
template <int KEYS> void divide_heads(bwd_args &args, int most_on_multiprocessor) {
    const int64_t group = args.p.num_heads / args.p.num_kv_heads, units = num_key_units<KEYS>(args);
    if (units == 0) return;
    const int64_t places = most_on_multiprocessor * num_multiprocessors(), wanted = 2 * places - places / 8;
    const int64_t parts = (wanted + units - 1) / units, heads = parts < group ? (group + parts - 1) / parts : 1;
    args.num_parts = (int)((group + heads - 1) / heads);
}

// ---- the workspace and the semaphores ----------------------------------------------------------

// Each tile of keys adds to the dq of the tiles of queries that attend it. So that every sum has one order, those
// additions go by ascending tile of keys, counting run after run. The semaphore of a tile of queries (of one head and
// batch) holds the tile of keys that added last, -1 at first. A thread block waits until that is the last tile before
// its own that those queries attend (wait_eq), adds, and stores its own (st_release).
//
// No deadlock: a thread block takes its tile of keys by ticket as it starts, in ascending order, so it waits only
// for thread blocks that have started, and the lowest ticket among the running ones waits for none. This holds
// however few thread blocks run at a time. All go from the last queries to the first: under a causal mask, thread
// blocks that start together, longest first, follow each other at the distance of one addition; under a window each
// finds its semaphore free.
//
// The parts of a group add to dk and dv of their tile of keys in the same way, by ascending part, each once at its end.
RT_HOST_DEVICE int64_t num_mask_rows(const rt_attn_block &p) { return p.mask_batch_stride > 0 ? p.batch : 1; }

// Arrays in the workspace, one behind the other.
struct array_taker {
    uintptr_t at;
    template <class X> X *take(int64_t count) {
        const uintptr_t begin = (at + 15) / 16 * 16;
        at = begin + (uintptr_t)count * sizeof(X);
        return (X *)begin;
    }
};
// Places the arrays; returns where they end.
inline uintptr_t place_workspace(backward_workspace &at, const rt_attn_block &p, uintptr_t begin,
                                 int64_t num_query_tiles, int64_t num_key_tiles) {
    array_taker from = {begin};
    at.queries = from.take<attended_keys>(num_mask_rows(p) * num_query_tiles);
    at.keys = from.take<position_range>(num_key_tiles);
    at.live = from.take<tile_range>(num_key_tiles * num_mask_rows(p));
    at.semaphores = from.take<int>(p.batch * p.num_heads * num_query_tiles);
    at.next_ticket = from.take<int>(1);
    at.next_part = from.take<int>(num_key_tiles * p.num_kv_heads * p.batch);
    return (uintptr_t)from.take<char>(0);
}
// Enough for tiles of 16 queries and of 64 keys or more, and for those of plain.cuh; and the tables of mask_tiles.cuh.
inline int64_t backward_workspace_bytes(const rt_attn_block &p) {
    if (p.num_queries == 0) return 0;
    backward_workspace unused;
    const int num_query_tiles = num_tiles((int)p.num_queries, is_plain_in_any_dtype(p) ? 8 : 16);
    return (int64_t)place_workspace(unused, p, 0, num_query_tiles, num_key_tiles(p.k_runs, p.num_k_runs, 64)) +
           mask_tiles_bytes(p);
}

// The first tile of keys that may hold one at these positions, counting run after run; INT32_MAX if there is none.
template <int KEYS> RT_DEVICE int first_key_tile(const attn_args &args, interval positions) {
    int before = 0; // tiles of earlier runs
#pragma unroll 1
    for (int i = 0; i < args.num_runs; i++) {
        const rt_run &run = args.runs[i];
        const int key = first_key_from(run, positions.begin), tile = key / KEYS;
        if (key < run.length && positions.end > position_of_key(run, tile * KEYS)) return before + tile;
        before += num_tiles((int)run.length, KEYS);
    }
    return INT32_MAX;
}

// Fills the workspace, on a grid of (tiles of TILE queries, rows of the mask). Tiles of keys have KEYS keys; with
// KEYS 0 nothing is ordered.
template <int TILE, int KEYS> RT_KERNEL(32) attn_workspace_kernel(RT_PARAMS bwd_args args) {
    const rt_attn_block &p = args.p;
    const backward_workspace &workspace = args.workspace;
    const int tile = cta_index_x(), mask_row = cta_index_y();
    interval hull = {INT32_MAX, INT32_MIN};
    for (int i = lane_index(); i < TILE; i += 32) {
        const int64_t token = (int64_t)tile * TILE + i, at = mask_row * p.num_queries + token;
        if (token >= p.num_queries) continue;
        const int begin = ld_global(p.begin + at), end = ld_global(p.end + at);
        if (begin < end) hull = {least(hull.begin, begin), most(hull.end, end)};
    }
    hull = hull_of_lanes(hull);
    attended_keys keys = {hull, 0};
    if constexpr (KEYS > 0) {
        keys.first_tile = first_key_tile<KEYS>(args, hull);
        const int64_t num_rows = p.batch * p.num_heads / num_mask_rows(p); // of semaphores, per row of the mask
        for (int64_t i = lane_index(); i < num_rows; i += 32)
            st_global(workspace.semaphores + (mask_row * num_rows + i) * num_ctas_x() + tile, -1);
        if (mask_row == 0) {
            const int64_t lane = (int64_t)tile * 32 + lane_index(), num_lanes = 32 * num_ctas_x();
            if (lane == 0) st_global(workspace.next_ticket, 0);
            const int64_t num_units = args.num_parts > 1 ? num_key_units<KEYS>(args) : 0;
            for (int64_t i = lane; i < num_units; i += num_lanes) st_global(workspace.next_part + i, 0);
            const int64_t num_keys = num_key_tiles<KEYS>(args);
            for (int64_t i = lane; i < num_keys; i += num_lanes) {
                const key_tile of = key_tile_at<KEYS>(args, (int)i, 0, 0);
                st_global(workspace.keys + i, positions_of_keys<KEYS>(args.runs[of.run], of.first_key));
            }
        }
    }
    if (lane_index() == 0) st_global(workspace.queries + (int64_t)mask_row * num_ctas_x() + tile, keys);
}

// Finds, once for all heads, between which tiles of queries the walks of a tile of keys go: with short documents on a
// long shard, each would look at all others too. On a grid of (tiles of keys, rows of the mask).
template <int TILE> RT_KERNEL(32) attn_live_tiles_kernel(RT_PARAMS bwd_args args) {
    const backward_workspace &workspace = args.workspace;
    const int index = cta_index_x(), mask_row = cta_index_y(), count = num_tiles((int)args.p.num_queries, TILE);
    const attended_keys *queries = workspace.queries + (int64_t)mask_row * count;
    const position_range keys = ld_global(workspace.keys + index);
    tile_range live = {INT32_MAX, -1};
    for (int tile = lane_index(); tile < count; tile += 32)
        if (may_meet(ld_global(queries + tile).positions, keys)) live = {least(live.first, tile), tile};
    live = {reduce_min_sync(live.first), reduce_max_sync(live.last)};
    if (lane_index() == 0) st_global(workspace.live + (int64_t)index * num_ctas_y() + mask_row, live);
}

template <int TILE, int KEYS> rt_status fill_workspace(bwd_args &args, void *stream) {
    const rt_attn_block &p = args.p;
    const int num_query_tiles = num_tiles((int)p.num_queries, TILE);
    const int64_t key_tiles = KEYS > 0 ? num_key_tiles<KEYS == 0 ? 1 : KEYS>(args) : 0;
    const uintptr_t end = place_workspace(args.workspace, p, (uintptr_t)p.workspace, num_query_tiles, key_tiles);
    const rt_status status = fill_mask_tiles<TILE, KEYS == 0 ? TILE : KEYS>(args, (void *)end, stream);
    if (status != RT_OK) return status;
    if (KEYS == 0 || num_query_tiles == 0) args.workspace.live = nullptr;
    const int64_t rows = num_mask_rows(p);
    const rt_status filled = launch(attn_workspace_kernel<TILE, KEYS>, {num_query_tiles, rows}, 32, 0, stream, args);
    if (filled != RT_OK || args.workspace.live == nullptr) return filled;
    return launch(attn_live_tiles_kernel<TILE>, {key_tiles, rows}, 32, 0, stream, args);
}

// ---- the walk ----------------------------------------------------------------------------------

// Visits, for the thread block's tile of KEYS keys, the tiles of TILE queries that attend it, last to first, and
// for each all heads of its part of the group. The tile of keys, and what derives from it through divisions or
// products, is kept in shared memory: reading it again is cheaper than keeping it in registers.
template <int KEYS, int TILE, int SIDES_OF_MASK = ANY_SIDES> struct query_walk {
    static constexpr int SIDES = SIDES_OF_MASK;
    struct alignas(8) place {
        int tile, head; // tile of queries, -1 at the end; head of the part
    };

    struct alignas(16) workspace_rows { // those of the tile's mask row and heads
        const attended_keys *queries;   // (tiles)
        int *semaphores;                // (heads of the part, tiles)
    };
    struct alignas(16) tile_facts {
        position_range positions;
        int index, first_head; // of the tile, counting run after run; of the part
    };
    struct alignas(16) part_facts {
        int *next_part; // of the tile
        int part, num_heads;
    };
    struct storage {
        key_tile keys;
        tile_facts facts;
        tile_range live; // all tiles, where nobody looked for them
        part_facts part;
        workspace_rows rows;
        position_range warp_positions[KEYS / 16];
    };

    const bwd_args &args;
    shared_ref<storage> at_keys;

    RT_DEVICE int take_ticket() const { return atom_add(args.workspace.next_ticket, 1); }
    // The tile of a ticket: all kv heads of all batches have the first tile of keys, each part after part, then all the
    // next.
    RT_DEVICE void choose_keys_of_ticket(int ticket) const {
        const int kv_heads = (int)args.p.num_kv_heads, heads = kv_heads * (int)args.p.batch;
        const int unit = ticket / args.num_parts;
        choose_keys(unit / heads, unit % kv_heads, unit % heads / kv_heads, unit, ticket % args.num_parts);
    }
    // One thread stores the thread block's tile; the others read it after a barrier.
    RT_DEVICE void choose_keys(int index, int kv_head, int batch, int unit = 0, int part = 0) const {
        const rt_attn_block &p = args.p;
        const key_tile keys = key_tile_at<KEYS>(args, index, kv_head, batch);
        const rt_run &run = args.runs[keys.run];
        const int64_t mask_row = p.mask_batch_stride > 0 ? batch : 0;
        const int group = (int)p.num_heads / (int)p.num_kv_heads, most_heads = num_tiles(group, args.num_parts);
        const int first_head = kv_head * group + part * most_heads;
        const int64_t row = batch * p.num_heads + first_head;
        st_shared(RT_SHARED(at_keys, keys), keys);
        st_shared(RT_SHARED(at_keys, facts),
                  tile_facts{positions_of_keys<KEYS>(run, keys.first_key), index, first_head});
        const tile_range *live = args.workspace.live + index * num_mask_rows(p) + mask_row;
        st_shared(RT_SHARED(at_keys, live),
                  args.workspace.live == nullptr ? tile_range{0, num_query_tiles() - 1} : ld_global(live));
        st_shared(RT_SHARED(at_keys, part),
                  part_facts{args.workspace.next_part + unit, part, least(most_heads, group - part * most_heads)});
        st_shared(RT_SHARED(at_keys, rows), workspace_rows{args.workspace.queries + mask_row * num_query_tiles(),
                                                           args.workspace.semaphores + row * num_query_tiles()});
    }
    RT_DEVICE key_tile keys() const { return ld_shared(RT_SHARED(at_keys, keys)); }
    RT_DEVICE const rt_run &run() const { return args.runs[keys().run]; }
    // Positions of a warp's 16 keys, once it has stored them.
    RT_DEVICE void store_warp_positions() const {
        const int row = 16 * warp_index();
        if (lane_index() == 0)
            st_shared(RT_SHARED(at_keys, warp_positions)[warp_index()],
                      position_range{position_of(row), position_of(row + 15)});
    }
    RT_DEVICE position_range warp_positions() const {
        return ld_shared(RT_SHARED(at_keys, warp_positions)[warp_index()]);
    }
    RT_DEVICE int position_of(int row) const { return position_of_key(run(), keys().first_key + row); }
    RT_DEVICE int num_query_tiles() const { return num_tiles((int)args.p.num_queries, TILE); }
    RT_DEVICE part_facts part() const { return ld_shared(RT_SHARED(at_keys, part)); }
    RT_DEVICE int head_of(place at) const { return ld_shared(RT_SHARED(facts(), first_head)) + at.head; }

    RT_DEVICE bool ended(place at) const { return at.tile == -1; }
    RT_DEVICE place first() const { return {last_tile(ld_shared(RT_SHARED(at_keys, live)).last), 0}; }
    RT_DEVICE place after(place at) const {
        return at.head + 1 < part().num_heads ? place{at.tile, at.head + 1} : place{last_tile(at.tile - 1), 0};
    }

    // The semaphore of the queries' dq. One thread waits before the thread block adds, and releases after it.
    RT_DEVICE int *dq_semaphore(place at) const {
        return ld_shared(RT_SHARED(at_keys, rows)).semaphores + (int64_t)at.head * num_query_tiles() + at.tile;
    }
    RT_DEVICE void wait_for_dq(place at, int previous) const { wait_eq(dq_semaphore(at), previous); }
    RT_DEVICE void release_dq(place at) const { st_release(dq_semaphore(at), index()); }
    // The tile of keys that adds to it before this one, or -1. All lanes of a warp call it.
    RT_DEVICE int previous_to_add(place at) const {
        const attended_keys keys = keys_of_queries(at.tile);
#pragma unroll 1
        for (int from = index() - 1; from >= keys.first_tile; from -= 32) {
            const int tile = from - lane_index();
            const bool live = tile >= keys.first_tile &&
                              may_meet(keys.positions, ld_global(args.workspace.keys + tile)) &&
                              is_met_by_keys(tile, at.tile);
            const int last = reduce_max_sync(live ? tile : -1);
            if (last >= 0) return last;
        }
        return -1;
    }

    // Whether the mask's second side leaves every pair of the tile with these queries.
    RT_DEVICE bool is_held_by_keys(int query_tile) const {
        return !has_two_sides<SIDES>(args) ||
               holds(ld_global(&intervals(index())->intersection), positions_of_query_tile(args, query_tile));
    }
    // The queries that attend the key of a row; no interval has any behind the run.
    RT_DEVICE interval queries_of_row(int row) const {
        const key_tile own = keys();
        const int64_t key = own.first_key + row;
        return key < run().length ? queries_of_key(args.p, run().local_begin + key, own.batch) : interval{0, 0};
    }

    // dk and dv of the tile: the first part replaces or adds to what is there, the others add. One thread waits before
    // the thread block adds, and releases after it.
    RT_DEVICE bool adds_to_keys() const { return !args.bwd.fresh || part().part > 0; }
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
    RT_DEVICE int index() const { return ld_shared(RT_SHARED(facts(), index)); }
    RT_DEVICE attended_keys keys_of_queries(int tile) const {
        return ld_global(ld_shared(RT_SHARED(at_keys, rows)).queries + tile);
    }
    RT_DEVICE const key_intervals *intervals(int key_tile) const {
        return intervals_of_key_tile(args, key_tile, keys().batch);
    }
    // Whether the mask's second side may leave a pair of two tiles.
    RT_DEVICE bool is_met_by_keys(int key_tile, int query_tile) const {
        return !has_two_sides<SIDES>(args) ||
               may_meet(ld_global(&intervals(key_tile)->hull), positions_of_query_tile(args, query_tile));
    }
    // The last attended tile up to `from`; -1 if there is none. previous_to_add of other thread blocks agrees.
    RT_DEVICE int last_tile(int from) const {
        const int first = ld_shared(RT_SHARED(at_keys, live)).first;
        for (; from >= first; from -= 32) {
            const int tile = from - lane_index();
            const bool live = tile >= first &&
                              may_meet(keys_of_queries(tile).positions, ld_shared(RT_SHARED(facts(), positions))) &&
                              is_met_by_keys(index(), tile);
            const int last = reduce_max_sync(live ? tile : -1);
            if (last >= 0) return last;
        }
        return -1;
    }
};

#endif // RINGTILE_CUDA_ATTN_QUERY_WALK_CUH
