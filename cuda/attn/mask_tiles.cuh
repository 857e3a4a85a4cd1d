// What the mask says of whole tiles of queries and of keys, so that tiles in which nothing is attended are skipped, and
// those in which everything is are not masked.
//
// One side of a mask has intervals of keys: query q attends the keys at positions [begin[q], end[q]). The other, which
// many masks lack, has intervals of queries: key k is attended by those at positions [key_begin[k], key_end[k]). The
// kernels search the intervals of the first side themselves, and see of the second what a kernel of its own, launched
// before them, has noted in tables: the positions of each tile of queries, and for each tile of keys the intersection
// and the hull of its intervals. Without a second side there are no tables.
#ifndef RINGTILE_CUDA_ATTN_MASK_TILES_CUH
#define RINGTILE_CUDA_ATTN_MASK_TILES_CUH

#include "../device/ptx.cuh"
#include "args.cuh"

// ---- intervals and positions -------------------------------------------------------------------

// An interval; or the intersection of several, or a hull of those that are not empty.
struct alignas(8) interval {
    int begin, end;
};
// The least and the largest position of a tile's queries or keys.
struct alignas(8) position_range {
    int first, last;
};

RT_DEVICE bool contains(interval of, int position) { return of.begin <= position && position < of.end; }
// Whether an interval of this hull may contain one of the positions; whether all of this intersection contain all.
RT_DEVICE bool may_meet(interval hull, position_range at) { return hull.begin <= at.last && hull.end > at.first; }
RT_DEVICE bool holds(interval intersection, position_range at) {
    return intersection.begin <= at.first && intersection.end > at.last;
}

// What a tile of queries attends, on the mask's first side.
struct alignas(16) attended_keys {
    interval positions; // a hull
    int first_tile;     // of keys, counting run after run
};

// The first and the last tile of queries that may attend a tile of keys on the mask's first side; last < first: none.
struct alignas(8) tile_range {
    int first, last;
};

// The hull or the intersection of the lanes' intervals.
RT_DEVICE interval hull_of_lanes(interval of) { return {reduce_min_sync(of.begin), reduce_max_sync(of.end)}; }
RT_DEVICE interval intersection_of_lanes(interval of) { return {reduce_max_sync(of.begin), reduce_min_sync(of.end)}; }

// ---- tiles of keys -----------------------------------------------------------------------------

struct alignas(16) key_tile {
    int run, first_key, kv_head, batch; // first_key counts from the begin of the run
};

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
template <int KEYS> RT_DEVICE position_range positions_of_keys(const rt_run &run, int first_key) {
    return {position_of_key(run, first_key), position_of_key(run, least(first_key + KEYS, (int)run.length) - 1)};
}

// First key of the run whose position is at least `bound`, in [0, length].
RT_DEVICE int first_key_from(const rt_run &run, int bound) {
    if (bound <= run.global_begin) return 0;
    const int distance = bound - (int)run.global_begin;
    const int key = run.stride >= distance ? 1 : (distance - 1) / (int)run.stride + 1;
    return least(key, (int)run.length);
}

// ---- the second side ---------------------------------------------------------------------------

struct alignas(16) key_intervals { // of a tile of keys
    interval intersection, hull;
};

// The sides of the masks that a kernel takes: where a test in its loop over tiles would count, there is one for each.
enum { ONE_SIDE = 1, TWO_SIDES = 2, ANY_SIDES };
template <int SIDES> RT_DEVICE bool has_two_sides(const attn_args &args) {
    return SIDES == ANY_SIDES ? args.num_key_tiles > 0 : SIDES == TWO_SIDES;
}

// Global position of a query; INT32_MAX, which is in no interval, for one that is no int32.
RT_DEVICE int position_of_query(const rt_attn_block &p, int64_t token) {
    const int64_t position = ld_global(p.q_positions + token);
    return position >= INT32_MIN && position <= INT32_MAX ? (int)position : INT32_MAX;
}
// The queries that attend a key, row `key` of k.
RT_DEVICE interval queries_of_key(const rt_attn_block &p, int64_t key, int batch) {
    const int64_t at = batch * p.key_mask_batch_stride + key;
    return {ld_global(p.key_begin + at), ld_global(p.key_end + at)};
}

RT_DEVICE position_range positions_of_query_tile(const attn_args &args, int tile) {
    return ld_global(args.query_tiles + tile);
}
// Of tile `index` of the keys, counting run after run. (Tables of 2^31 entries would not fit any memory.)
RT_DEVICE key_intervals *intervals_of_key_tile(const attn_args &args, int index, int batch) {
    return args.key_tiles + (args.p.key_mask_batch_stride > 0 ? batch * args.num_key_tiles + index : index);
}

// Fills the tables, on a grid of (tiles of queries, then of keys; rows of the key mask).
template <int ROWS, int KEYS> RT_KERNEL(32) attn_mask_tiles_kernel(RT_PARAMS attn_args args) {
    const rt_attn_block &p = args.p;
    const int num_query_tiles = num_tiles((int)p.num_queries, ROWS), batch = cta_index_y(), lane = lane_index();
    if (cta_index_x() < num_query_tiles) {
        const int64_t first = (int64_t)cta_index_x() * ROWS;
        position_range at = {INT32_MAX, INT32_MIN};
        for (int64_t token = first + lane; token < first + ROWS && token < p.num_queries; token += 32) {
            const int position = position_of_query(p, token);
            at = {least(at.first, position), most(at.last, position)};
        }
        at = {reduce_min_sync(at.first), reduce_max_sync(at.last)};
        if (lane == 0 && batch == 0) st_global(args.query_tiles + cta_index_x(), at);
    } else {
        const int index = cta_index_x() - num_query_tiles;
        const key_tile tile = key_tile_at<KEYS>(args, index, 0, batch);
        const rt_run &run = args.runs[tile.run];
        interval hull = {INT32_MAX, INT32_MIN}, intersection = {INT32_MIN, INT32_MAX};
        for (int i = lane; i < KEYS && tile.first_key + i < run.length; i += 32) {
            const interval of = queries_of_key(p, run.local_begin + tile.first_key + i, batch);
            intersection = {most(intersection.begin, of.begin), least(intersection.end, of.end)};
            if (of.begin < of.end) hull = {least(hull.begin, of.begin), most(hull.end, of.end)};
        }
        hull = hull_of_lanes(hull), intersection = intersection_of_lanes(intersection);
        if (lane > 0) return;
        st_global(intervals_of_key_tile(args, index, batch), key_intervals{intersection, hull});
    }
}

RT_HOST_DEVICE int64_t num_key_mask_rows(const rt_attn_block &p) { return p.key_mask_batch_stride > 0 ? p.batch : 1; }
// Enough for tiles of 8 queries or keys, or more.
inline int64_t mask_tiles_bytes(const rt_attn_block &p) {
    if (p.key_begin == NULL || p.num_queries == 0) return 0;
    return num_tiles((int)p.num_queries, 8) * (int64_t)sizeof(position_range) +
           num_key_mask_rows(p) * num_key_tiles(p.k_runs, p.num_k_runs, 8) * (int64_t)sizeof(key_intervals);
}
// Places the tables in the workspace and fills them, if the mask has two sides.
template <int ROWS, int KEYS> rt_status fill_mask_tiles(attn_args &args, void *workspace, void *stream) {
    const rt_attn_block &p = args.p;
    if (p.key_begin == NULL || p.num_queries == 0) return RT_OK;
    const int num_query_tiles = num_tiles((int)p.num_queries, ROWS);
    args.num_key_tiles = (int)num_key_tiles<KEYS>(args);
    args.key_tiles = (key_intervals *)workspace;
    args.query_tiles = (position_range *)(args.key_tiles + num_key_mask_rows(p) * args.num_key_tiles);
    return launch(attn_mask_tiles_kernel<ROWS, KEYS>, {num_query_tiles + args.num_key_tiles, num_key_mask_rows(p)}, 32,
                  0, stream, args);
}

#endif // RINGTILE_CUDA_ATTN_MASK_TILES_CUH
