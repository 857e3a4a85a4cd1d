// Shared by the backward kernels of sm_80 and sm_90a. Rows are keys and columns are queries: S^T, dP^T and dS^T.
#ifndef RINGTILE_CUDA_ATTN_BWD_PARTS_CUH
#define RINGTILE_CUDA_ATTN_BWD_PARTS_CUH

#include "query_walk.cuh"

// ---- intervals and sums of the queries ---------------------------------------------------------

// lse is in units of log 2, and inf for a query that attends no key, which gives weights of 0. Both are read at
// different times, hence two arrays.
template <int TILE> struct query_storage {
    interval keys[TILE];
    alignas(16) float lse[TILE], delta[TILE];
    int tile, is_held; // the tile of queries; whether the mask's second side leaves every pair
};

// The intervals and sums of a tile of queries in shared memory, of which a warp reads Shape::QUERIES from `first`
// on. fetch and store are separate so that the loads are in flight while other warps still read the previous tile.
template <class Shape> struct query_numbers {
    struct numbers {
        interval keys;
        float lse, delta;
    };
    const typename Shape::walk &walk;
    shared_ref<query_storage<Shape::TILE>> at;
    int first = 0;

    // Zeros behind the last query and behind the end of the walk.
    RT_DEVICE numbers fetch(typename Shape::walk::place at, int query) const {
        const rt_attn_block &p = walk.args.p;
        const int token = at.tile * Shape::TILE + query, batch = walk.keys().batch;
        if (walk.ended(at) || query >= Shape::TILE || token >= p.num_queries) return {{0, 0}, 0, 0};
        const int64_t mask_at = batch * p.mask_batch_stride + token;
        const int64_t row = (batch * p.num_heads + walk.head_of(at)) * p.num_queries + token;
        const float lse = (float)(load_lse(p, walk.args.bwd.lse, row) * LOG2_E);
        return {{ld_global(p.begin + mask_at), ld_global(p.end + mask_at)},
                lse == -INFINITY ? INFINITY : lse,
                ld_global((const float *)walk.args.bwd.delta + row)};
    }
    RT_DEVICE void store(typename Shape::walk::place place, int query, const numbers &of) const {
        if (query >= Shape::TILE) return;
        st_shared(RT_SHARED(at, keys)[query], of.keys);
        st_shared(RT_SHARED(at, lse)[query], of.lse);
        st_shared(RT_SHARED(at, delta)[query], of.delta);
        if (Shape::walk::SIDES == ONE_SIDE || query > 0) return;
        st_shared(RT_SHARED(at, tile), place.tile);
        st_shared(RT_SHARED(at, is_held), walk.ended(place) || walk.is_held_by_keys(place.tile) ? 1 : 0);
    }
    RT_DEVICE interval keys(int query) const { return ld_shared(RT_SHARED(at, keys)[first + query]); }

    // Whether any query attends any key of the warp; whether all attend all.
    struct attendance {
        bool any, all;
    };
    RT_DEVICE attendance attended() const {
        const position_range keys_at = walk.warp_positions();
        attendance lane = {false, is_held()};
        for (int query = lane_index(); query < Shape::QUERIES; query += 32) {
            const interval of = keys(query);
            lane.any |= may_meet(of, keys_at);
            lane.all &= holds(of, keys_at);
        }
        return {any_sync(lane.any), all_sync(lane.all)};
    }

    // lse and delta of a lane's two columns in fragment n.
    struct alignas(8) pair {
        float of[2];
    };
    RT_DEVICE pair lse_of_lane(int n) const { return ld_shared<pair>(RT_SHARED(at, lse)[column(n)]); }
    RT_DEVICE pair delta_of_lane(int n) const { return ld_shared<pair>(RT_SHARED(at, delta)[column(n)]); }
    template <int N> RT_DEVICE void subtract_delta(accumulator<1, N> &dweights) const {
#pragma unroll
        for (int i = 0; i < 4 * N; i++) dweights[0][i / 4][i % 4] -= delta_of_lane(i / 4).of[i % 2];
    }
    // Sets scores to -inf where a query does not attend a key.
    template <int N> RT_DEVICE void mask_scores(accumulator<1, N> &scores) const {
        const int positions[2] = {walk.position_of(lane_row<1>(0)), walk.position_of(lane_row<1>(1))};
#pragma unroll
        for (int i = 0; i < 4 * N; i++) {
            const interval of = keys(i / 4 * 8 + lane_index() % 4 * 2 + i % 2);
            if (!contains(of, positions[i / 2 % 2])) scores[0][i / 4][i % 4] = -INFINITY;
        }
        if (!is_held()) mask_scores_by_keys(scores);
    }
    // The same by the mask's second side.
    template <int N> RT_DEVICE void mask_scores_by_keys(accumulator<1, N> &scores) const {
        const rt_attn_block &p = walk.args.p;
        const interval queries[2] = {walk.queries_of_row(lane_row<1>(0)), walk.queries_of_row(lane_row<1>(1))};
        const int tile = ld_shared(RT_SHARED(at, tile)),
                  first_token = tile * Shape::TILE + first + lane_index() % 4 * 2;
        uint32_t attended[2] = {0, 0}; // a bit for each column: the loop needs few registers
        // A kernel for both masks has no register to spare.
        [[maybe_unused]] constexpr int UNROLLED = Shape::walk::SIDES == TWO_SIDES ? 4 : 1;
#pragma unroll UNROLLED
        for (int i = 0; i < 2 * N; i++) {
            const int token = first_token + i / 2 * 8 + i % 2;
            const int position = token < p.num_queries ? position_of_query(p, token) : INT32_MAX;
            for (int r = 0; r < 2; r++) attended[r] |= (uint32_t)contains(queries[r], position) << i;
        }
#pragma unroll
        for (int i = 0; i < 4 * N; i++)
            if ((attended[i / 2 % 2] >> (i / 4 * 2 + i % 2) & 1) == 0) scores[0][i / 4][i % 4] = -INFINITY;
    }

  private:
    RT_DEVICE bool is_held() const { return Shape::walk::SIDES == ONE_SIDE || ld_shared(RT_SHARED(at, is_held)) != 0; }
    RT_DEVICE int column(int n) const { return first + 8 * n + lane_index() % 4 * 2; }
};

// ---- dS ----------------------------------------------------------------------------------------

// With a softcap, multiplies dP - delta by the slope of tanh. `scores` are tanh(..).
template <int M, int N> RT_DEVICE void multiply_slopes(accumulator<M, N> &dweights, const accumulator<M, N> &scores) {
#pragma unroll
    for (int i = 0; i < M * N * 4; i++) {
        const float tanh_x = scores[i / (N * 4)][i / 4 % N][i % 4];
        dweights[i / (N * 4)][i / 4 % N][i % 4] *= 1 - tanh_x * tanh_x;
    }
}

// Stores the warp's 16 keys and queries 16 k .. 16 k + 15 of dS^T.
template <class Tile> RT_DEVICE void store_dscores(Tile to, const uint32_t (&dscores)[4], int k) {
    const int lane = lane_index();
    const auto chunks = to.chunks_from(16 * warp_index() + lane / 4, 0);
#pragma unroll
    for (int i = 0; i < 4; i++)
        st_shared(chunks.at(i % 2 * 8, 2 * k + i / 2) + (shared_address)(lane % 4 * 4), dscores[i]);
}

// ---- dk and dv ---------------------------------------------------------------------------------

// Calls add() when it is the part's turn. All threads that add call it, thread 0 among them; `barrier` is theirs.
template <class Walk, class Barrier, class Add> RT_DEVICE void add_in_turn(const Walk &walk, Barrier barrier, Add add) {
    const bool divided = walk.args.num_parts > 1;
    if (divided) {
        if (thread_index() == 0) walk.wait_for_keys();
        barrier();
    }
    add();
    if (divided) {
        barrier();
        if (thread_index() == 0) walk.release_keys();
    }
}
// rows += factor * sum, for the thread block's tile of keys. The last part writes them to `rounded`, unless it is null.
template <class T, class Walk, int N>
RT_DEVICE void add_key_rows(const Walk &walk, token_rows<float> rows, void *rounded, float factor,
                            const accumulator<1, N> &sum) {
    const auto add = [&](float before, float x) { return before + factor * x; };
    const bool in_pairs = walk.args.in_pairs, read = walk.adds_to_keys();
    const int dim = (int)rows.dim;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const key_tile keys = walk.keys();
        const int64_t key = keys.first_key + lane_row<1>(r), token = walk.run().local_begin + key;
        if (key >= walk.run().length) continue;
        float *const row = rows.at(keys.batch, token, keys.kv_head);
        if (rounded != nullptr && walk.is_last_part())
            update_row(row, rounded_key_at<T>(walk.args.p, rounded, dim, keys.batch, token, keys.kv_head), dim,
                       in_pairs, read, sum, r, add);
        else
            update_row(row, row, dim, in_pairs, read, sum, r, add);
    }
}
// The same for a tile of KEYS keys that no query attends, without turns: one part writes zeros, if there are to be any.
template <class T, int KEYS, class Walk>
RT_DEVICE void clear_key_rows(const Walk &walk, token_rows<float> rows, void *rounded) {
    const key_tile keys = walk.keys();
    const int64_t token = walk.run().local_begin + keys.first_key;
    const int num_rows = least(KEYS, (int)walk.run().length - keys.first_key), dim = (int)rows.dim;
    const auto zero = [](int, int) { return 0.0f; };
    if (rounded != nullptr && walk.is_last_part())
        fill_rows(rounded_key_at<T>(walk.args.p, rounded, dim, keys.batch, token, keys.kv_head),
                  walk.args.p.num_kv_heads * dim, num_rows, dim, zero);
    else if (rounded == nullptr && !walk.adds_to_keys())
        fill_rows(rows.at(keys.batch, token, keys.kv_head), rows.stride[1], num_rows, dim, zero);
}

#endif // RINGTILE_CUDA_ATTN_BWD_PARTS_CUH
