// The walk of a tile of queries over the tiles of keys that it attends.
#ifndef RINGTILE_CUDA_ATTN_KEY_WALK_CUH
#define RINGTILE_CUDA_ATTN_KEY_WALK_CUH

#include "gemm.cuh"
#include "mask_tiles.cuh"

// ---- tiles -------------------------------------------------------------------------------------

// The tile of queries of a thread block, in a grid of (tiles of queries of the heads of a section, sections, batch).
// Thread blocks start in the order of the first of these. The last tiles come first because causal work grows along
// the sequence, so that short ones fill what long ones leave; a section has as many kv heads as the L2 cache can hold
// the keys and values of. Recomputing this is cheaper than keeping it in registers.
struct query_tile {
    int batch, head, first_token;
};
// The kv head of a thread block: neighbors have different ones.
RT_DEVICE int kv_head_of_cta(const attn_args &args) {
    return cta_index_y() * args.section + (num_ctas_x() - 1 - cta_index_x()) % args.section;
}
template <int ROWS> RT_DEVICE query_tile query_tile_of_cta(const attn_args &args) {
    const int group = (int)args.p.num_heads / (int)args.p.num_kv_heads;
    const int index = (num_ctas_x() - 1 - cta_index_x()) / args.section;
    return {cta_index_z(), kv_head_of_cta(args) * group + index % group, index / group * ROWS};
}
template <int ROWS> grid_size query_grid(const attn_args &args) {
    const rt_attn_block &p = args.p;
    return {num_tiles((int)p.num_queries, ROWS) * (p.num_heads / p.num_kv_heads) * args.section,
            p.num_kv_heads / args.section, p.batch};
}
// The kv heads of a section: all, or the largest part into which they can be divided equally.
inline int kv_heads_of_section(const rt_attn_block &p) {
    constexpr int64_t MOST_BYTES = 24 << 20; // of 40 MB on sm_80, 50 on sm_90
    const int64_t bytes = p.num_keys * (p.head_dim + p.v_head_dim) * 2;
    int section = (int)p.num_kv_heads;
    while (section > 1 && (p.num_kv_heads % section != 0 || section * bytes > MOST_BYTES)) section--;
    return section;
}

// Starts to load the rows of the thread block's queries, of q or dout.
template <int THREADS, int ROWS, int COLS, class T>
RT_DEVICE void load_queries(tile<ROWS, COLS> to, token_rows<const T> rows, const attn_args &args) {
    const query_tile at = query_tile_of_cta<ROWS>(args);
    load_tile<T, THREADS>(to, rows.at(at.batch, at.first_token, at.head), rows.stride[1],
                          (int)args.p.num_queries - at.first_token, (int)rows.dim, args.aligned);
}

// Starts to load the rows of a tile of keys, of k or v.
template <int THREADS, int ROWS, int COLS, class T>
RT_DEVICE void load_keys(tile<ROWS, COLS> to, token_rows<const T> rows, const attn_args &args, key_tile at) {
    const rt_run &run = args.runs[at.run];
    load_tile<T, THREADS>(to, rows.at(at.batch, run.local_begin + at.first_key, at.kv_head), rows.stride[1],
                          (int)run.length - at.first_key, (int)rows.dim, args.aligned);
}

// Writes out, rounded or not, and lse of a tile whose queries attend no key.
template <class T, int ROWS> RT_DEVICE void finish_without_keys(const fwd_args &args) {
    const rt_attn_block &p = args.p;
    const rt_attn_fwd_params &to = args.fwd;
    const query_tile at = query_tile_of_cta<ROWS>(args);
    const int num_rows = least(ROWS, (int)p.num_queries - at.first_token), dim = (int)p.v_head_dim;
    float *const out = out_of(to).at(at.batch, at.first_token, at.head);
    const auto number = [&](int row, int col) { return to.fresh ? 0 : ld_global(out + row * to.out_stride[1] + col); };
    if (to.rounded_out != nullptr)
        fill_rows(rounded_out_at<T>(to, at.batch, at.first_token, at.head), p.num_heads * dim, num_rows, dim, number);
    else if (to.fresh)
        fill_rows(out, to.out_stride[1], num_rows, dim, number);
    if (!to.fresh) return;
    const int64_t lse_row = (at.batch * p.num_heads + at.head) * p.num_queries + at.first_token;
    for (int row = thread_index(); row < num_rows; row += num_threads()) store_lse(to, lse_row + row, -INFINITY);
}

// ---- the walk ----------------------------------------------------------------------------------

// The keys [lo, hi) of a run that a query attends, counted from the begin of the run; lo = hi = 0 if there are none.
struct key_range {
    int lo, hi;
};

// Visits the tiles of KEYS keys, over all runs, that any of ROWS queries attends. Each warp finds its next tile by
// itself, so no warp waits for another. Shared memory holds two sets of ranges, of the current run and of the next,
// because the walk may be a tile ahead of the work.
template <int ROWS, int KEYS, int SIDES = ANY_SIDES> struct key_walk {
    using storage = key_range[2 * ROWS];
    const attn_args &args;
    shared_ref<storage> ranges;

    struct place {
        int run, tile, slot; // slot: which set of ranges is the run's
        int full_end;        // all queries attend all keys of the tiles [tile, full_end), which may be empty

        // Whether the mask's second side leaves out a pair of the tile, or may.
        RT_DEVICE bool is_cut_by_keys() const { return SIDES != ONE_SIDE && full_end < 0; }
    };

    RT_DEVICE bool ended(place at) const { return at.run >= args.num_runs; }
    RT_DEVICE key_range range(int slot, int row) const { return ld_shared(ranges[slot * ROWS + row]); }
    RT_DEVICE query_tile queries() const { return query_tile_of_cta<ROWS>(args); }
    RT_DEVICE key_tile keys(place at) const { return {at.run, at.tile * KEYS, kv_head_of_cta(args), cta_index_z()}; }

    RT_DEVICE place first() const { return seek({-1, 0, 1, 0}); }
    RT_DEVICE place after(place at) const {
        if (at.full_end > at.tile + 1) return {at.run, at.tile + 1, at.slot, at.full_end};
        const place next = find(at.run, at.slot, at.tile + 1);
        return next.tile != INT32_MAX ? next : seek(at);
    }

    // Whether any query of the warp, which has M fragments of rows, attends any key of the tile; whether all attend
    // all.
    template <int M> RT_DEVICE bool any_of_warp(place at) const {
        if (at.full_end > at.tile) return true;
        bool any = false;
#pragma unroll
        for (int r = 0; r < 2 * M; r++) {
            const key_range keys = range(at.slot, lane_row<M>(r));
            any |= keys.lo < (at.tile + 1) * KEYS && keys.hi > at.tile * KEYS;
        }
        return any_sync(any);
    }
    template <int M> RT_DEVICE bool all_of_warp(place at) const {
        if (at.full_end > at.tile) return true;
        bool all = !at.is_cut_by_keys();
#pragma unroll
        for (int r = 0; r < 2 * M; r++) {
            const key_range keys = range(at.slot, lane_row<M>(r));
            all &= keys.lo <= at.tile * KEYS && keys.hi >= (at.tile + 1) * KEYS;
        }
        return all_sync(all);
    }

  private:
    // The first tile after the run of `at`, whose ranges are still in use.
    RT_DEVICE place seek(place at) const {
        const int slot = 1 - at.slot;
        for (int run = at.run + 1; run < args.num_runs; run++) {
            syncthreads();
            for (int row = thread_index(); row < ROWS; row += num_threads()) store_range(slot, row, args.runs[run]);
            syncthreads();
            const place next = find(run, slot, 0);
            if (next.tile != INT32_MAX) return next;
        }
        return {args.num_runs, 0, slot, 0};
    }

    RT_DEVICE void store_range(int slot, int row, const rt_run &run) const {
        key_range keys = {0, 0};
        const query_tile queries = query_tile_of_cta<ROWS>(args);
        const int token = queries.first_token + row;
        if (token < args.p.num_queries) {
            const int64_t at = queries.batch * args.p.mask_batch_stride + token;
            keys = {first_key_from(run, ld_global(args.p.begin + at)), first_key_from(run, ld_global(args.p.end + at))};
            if (keys.hi <= keys.lo) keys = {0, 0};
        }
        st_shared(ranges[slot * ROWS + row], keys);
    }

    // The first tile from `from` on that any query attends; INT32_MAX if there is none.
    RT_DEVICE place find(int run, int slot, int from) const {
        for (;;) {
            const place at = find_on_first_side(run, slot, from);
            if (!has_two_sides<SIDES>(args) || at.tile == INT32_MAX) return at;
            const seen_tiles of = look_at_keys(run, at.tile);
            if (of.met > at.tile)
                from = of.met;
            else
                return {run, at.tile, slot, of.held_end == at.tile ? -1 : least(at.full_end, of.held_end)};
        }
    }

    // Of the tiles from one on, as far as a warp sees at once: the first that the mask's second side may leave a pair
    // of, and the end of those that it leaves every pair of.
    struct seen_tiles {
        int met, held_end;
    };
    RT_DEVICE seen_tiles look_at_keys(int run, int first) const {
        int before = 0; // tiles of earlier runs
#pragma unroll 1
        for (int i = 0; i < run; i++) before += num_tiles((int)args.runs[i].length, KEYS);
        const query_tile queries = this->queries();
        const position_range positions = positions_of_query_tile(args, queries.first_token / ROWS);
        const int tile = first + lane_index();
        bool met = false, held = false;
        if (tile < num_tiles((int)args.runs[run].length, KEYS)) {
            const key_intervals of = ld_global(intervals_of_key_tile(args, before + tile, queries.batch));
            met = may_meet(of.hull, positions);
            held = holds(of.intersection, positions);
        }
        return {reduce_min_sync(met ? tile : first + 32), reduce_min_sync(held ? first + 32 : tile)};
    }

    RT_DEVICE place find_on_first_side(int run, int slot, int from) const {
        int tile = INT32_MAX;
        key_range all = {0, INT32_MAX}; // the keys that every query attends
        for (int row = lane_index(); row < ROWS; row += 32) {
            const key_range keys = range(slot, row);
            if (keys.hi > (int64_t)from * KEYS) tile = least(tile, most(from, keys.lo / KEYS));
            all = {most(all.lo, keys.lo), least(all.hi, keys.hi)};
        }
        tile = reduce_min_sync(tile);
        const int full_begin = num_tiles(reduce_max_sync(all.lo), KEYS), full_end = reduce_min_sync(all.hi) / KEYS;
        return {run, tile, slot, full_begin <= tile ? full_end : 0};
    }
};

#endif // RINGTILE_CUDA_ATTN_KEY_WALK_CUH
