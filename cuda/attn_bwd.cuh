// Attention backward for bf16 and f16 (FlashAttention-2, arXiv:2307.08691), in one pass: a block of threads has a tile of
// keys and goes over the tiles of queries, of all heads of the group, that attend it. Its sums dk and dv stay in registers;
// what it adds to dq lies in global memory, where other blocks add too, one after the other in a fixed order: every sum
// has one order, and nothing is added by atomics.
//
// With S = scale q k^T (then the softcap), P = exp(S - lse) and out = P v:
//   dv += P^T dout,   dP = dout v^T,   dS = P (dP - delta) (1 - (S / softcap)^2),   dq += scale dS k,   dk += scale dS^T q.
//
// Rows are keys, of which a warp owns 16: S^T = k q^T and dP^T = v dout^T are sums of its own, and go to left factors of
// dv and dk in registers. dq sums over all keys: dS^T goes through shared memory, and each warp has a part of dq.
//
// Turns. The tiles of keys that attend one tile of queries add to its dq in ascending order (query_walk). A block waits
// for blocks with lower tickets alone: those have started, so they go on, and the lowest of them that has not ended
// waits for nobody. That holds however few blocks run at a time. All go from the last queries to the first: where many
// start together, as under a causal mask, they follow each other at the distance of one addition, and the longest starts
// first; under a window each finds its turn free.
//
// What bounds it: five products. A right factor is loaded from shared memory by each of the four warps, which takes 9/8 of
// the time of its multiply-adds. Each tile of 64 keys reads and writes all of dq that attends it: 8 bytes of traffic to
// the L2 cache for 320 multiply-adds.
#ifndef RINGTILE_CUDA_ATTN_BWD_CUH
#define RINGTILE_CUDA_ATTN_BWD_CUH

#include "attn.cuh"
#include "attn_query_walk.cuh"
#include "attn_tile.cuh"

// What of lse and delta a query needs: lse is in units of log 2, and inf, which gives weights of 0, where it attends nothing.
struct query_sums {
    float lse, delta;
};

// D, DV: head dims, rounded up to what is compiled. Shared memory is at most 99 KB, what a block of sm_86 and sm_89 may have.
// The registers bound the number of queries: a lane's sums are (D + DV) / 2 of dk and dv, and QUERIES of S and dP or, after
// them, QUERIES D / 128 of dq.
template <int D, int DV> struct backward_shape {
    static constexpr int WARPS = 4, THREADS = 32 * WARPS, KEYS = 16 * WARPS;
    static constexpr int QUERIES = D <= 128 ? 64 : D <= 192 ? 32 : 16, TILE = QUERIES;
    using walk = query_walk<KEYS, TILE>;

    // dq: a warp has 16 queries and, of every COLUMN_PARTS groups of 16 columns, one.
    static constexpr int QUERY_PARTS = QUERIES / 16, COLUMN_PARTS = WARPS / QUERY_PARTS;
    static RT_DEVICE int query_part() { return warp_index() % QUERY_PARTS; }
    static RT_DEVICE int column_part() { return COLUMN_PARTS == 1 ? 0 : warp_index() / QUERY_PARTS; }

    static constexpr int DSCORE_COLS = QUERIES < 32 ? 32 : QUERIES; // tiles have rows of 64 bytes or more
    using dscore_tile = tile<KEYS, DSCORE_COLS>;                    // dS^T
    static constexpr int V_AT = tile<KEYS, D>::BYTES, Q_AT = V_AT + tile<KEYS, DV>::BYTES,
                         DOUT_AT = Q_AT + tile<QUERIES, D>::BYTES, DS_AT = DOUT_AT + tile<QUERIES, DV>::BYTES,
                         INTERVALS_AT = DS_AT + dscore_tile::BYTES,
                         SUMS_AT = INTERVALS_AT + QUERIES * (int)sizeof(tile_bounds),
                         KEYS_AT = SUMS_AT + QUERIES * (int)sizeof(query_sums), BYTES = KEYS_AT + walk::BYTES;
    static_assert(BYTES <= 99 * 1024);
};

// ---- numbers of the queries --------------------------------------------------------------------

// What QUERIES queries have besides q and dout, in shared memory: which positions each attends, and its sums. They are
// fetched from global memory, and stored once nobody reads the ones before.
template <class Shape> struct query_numbers {
    struct numbers {
        tile_bounds interval;
        query_sums sums;
    };
    const typename Shape::walk &walk;
    shared_address base;

    // Those of a query of the tile; zeros behind the last one, and behind the end of the walk.
    RT_DEVICE numbers fetch(typename Shape::walk::place at, int query) const {
        const rt_attn_params &p = walk.args.p;
        const int token = at.tile * Shape::TILE + query, batch = walk.keys().batch;
        if (walk.ended(at) || query >= Shape::TILE || token >= p.num_queries) return {{0, 0}, {0, 0}};
        const int64_t mask_at = batch * p.mask_batch_stride + token;
        const int64_t row = (batch * p.num_heads + walk.head_of(at)) * p.num_queries + token;
        const float lse = (float)(load_lse(p, row) * LOG2_E);
        return {{global_load(p.begin + mask_at), global_load(p.end + mask_at)},
                {lse == -INFINITY ? INFINITY : lse, global_load((const float *)p.delta + row)}};
    }
    RT_DEVICE void store(int query, const numbers &of) const {
        if (query >= Shape::TILE) return;
        shared_store(base + (shared_address)(Shape::INTERVALS_AT + query * 8), of.interval);
        shared_store(base + (shared_address)(Shape::SUMS_AT + query * 8), of.sums);
    }
    RT_DEVICE tile_bounds interval(int query) const {
        return shared_load<tile_bounds>(base + (shared_address)(Shape::INTERVALS_AT + query * 8));
    }

    // Whether some query attends some key of the warp; whether all attend all.
    struct attendance {
        bool any, all;
    };
    RT_DEVICE attendance attended() const {
        const key_positions keys = walk.warp_positions();
        attendance lane = {false, true};
        for (int query = lane_index(); query < Shape::QUERIES; query += 32) {
            const tile_bounds of = interval(query);
            lane.any |= of.begin <= keys.last && of.end > keys.first;
            lane.all &= of.begin <= keys.first && of.end > keys.last;
        }
        return {any_lane(lane.any), all_lanes(lane.all)};
    }

    // Of the two queries that a lane has in the columns 8 n ...
    struct alignas(16) pair_of_sums {
        query_sums of[2];
    };
    RT_DEVICE pair_of_sums sums_of_lane(int n) const {
        return shared_load<pair_of_sums>(
            base + (shared_address)(Shape::SUMS_AT + (8 * n + lane_index() % 4 * 2) * 8));
    }
    template <int N> RT_DEVICE void subtract_delta(sums<1, N> &dweights) const {
#pragma unroll
        for (int i = 0; i < 4 * N; i++) dweights[0][i / 4][i % 4] -= sums_of_lane(i / 4).of[i % 2].delta;
    }
    // -inf where a query does not attend a key.
    template <int N> RT_DEVICE void mask_scores(sums<1, N> &scores) const {
        const int positions[2] = {walk.position_of(lane_row<1>(0)), walk.position_of(lane_row<1>(1))};
#pragma unroll
        for (int i = 0; i < 4 * N; i++) {
            const tile_bounds of = interval(i / 4 * 8 + lane_index() % 4 * 2 + i % 2);
            const int position = positions[i / 2 % 2];
            if (position < of.begin || position >= of.end) scores[0][i / 4][i % 4] = -INFINITY;
        }
    }
};

// dk or dv of the block's keys.
template <class Walk, int N>
RT_DEVICE void add_key_rows(const Walk &walk, void *array, const int64_t (&stride)[3], int64_t dim,
                            float factor, const sums<1, N> &sum) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int64_t key = walk.keys().first_key + lane_row<1>(r), token = walk.run().local_begin + key;
        if (key < walk.run().length)
            update_row((float *)array + walk.keys().batch * stride[0] + token * stride[1] +
                           walk.keys().kv_head * stride[2],
                       (int)dim, walk.args.in_pairs, !walk.args.p.fresh, sum, r,
                       [&](float before, float x) { return before + factor * x; });
    }
}
// Nobody attends them.
template <int KEYS, class Walk>
RT_DEVICE void clear_key_rows(const Walk &walk, void *array, const int64_t (&stride)[3], int64_t dim) {
    const key_tile keys = walk.keys();
    clear_rows((float *)array + keys.batch * stride[0] +
                   (walk.run().local_begin + keys.first_key) * stride[1] + keys.kv_head * stride[2],
               stride[1], least(KEYS, (int)walk.run().length - keys.first_key), (int)dim);
}

// ---- the pass ----------------------------------------------------------------------------------

// dP becomes its part of dS: the slope of tanh.
template <int M, int N> RT_DEVICE void multiply_slopes(sums<M, N> &dweights, const sums<M, N> &scores) {
#pragma unroll
    for (int i = 0; i < M * N * 4; i++) {
        const float tanh_x = scores[i / (N * 4)][i / 4 % N][i % 4];
        dweights[i / (N * 4)][i / 4 % N][i % 4] *= 1 - tanh_x * tanh_x;
    }
}

// The 16 keys of a warp and queries 16 k .. of dS^T, which multiply_dscores reads.
template <class Tile> RT_DEVICE void store_dscores(Tile to, const uint32_t (&left)[4], int k) {
    const int lane = lane_index();
    const auto chunks = to.chunks_from(16 * warp_index() + lane / 4, 0);
#pragma unroll
    for (int i = 0; i < 4; i++)
        shared_store(chunks.at(i % 2 * 8, 2 * k + i / 2) + (shared_address)(lane % 4 * 4), left[i]);
}

// sum += dS k, of this warp's queries and columns.
template <class T, class Shape, int N, int KEYS, int D>
RT_DEVICE void multiply_dscores(sums<1, N> &sum, typename Shape::dscore_tile dscores, tile<KEYS, D> k_tile) {
    const int lane = lane_index();
    const auto chunks = dscores.chunks_from(lane / 16 * 8 + lane % 8, 2 * Shape::query_part() + lane / 8 % 2);
#pragma unroll
    for (int k = 0; k < KEYS / 16; k++) {
        uint32_t left[1][4];
        load_matrices_transposed(left[0], chunks.at(16 * k, 0));
        multiply_weights<T, 1, Shape::COLUMN_PARTS>(sum, left, k_tile, k, Shape::column_part());
    }
}

// WITH_K: sums dk, and adds to dq.   WITH_V: sums dv.
template <class T, int D, int DV, bool WITH_K, bool WITH_V>
RT_KERNEL((backward_shape<D, DV>::THREADS), (D <= 64 ? 3 : 2))
attn_bwd_kernel(RT_PARAMS attn_args args) {
    using shape = backward_shape<D, DV>;
    constexpr int THREADS = shape::THREADS, N = shape::QUERIES / 8;
    const rt_attn_params &p = args.p;
    const shared_address base = shared_base();
    const tile<shape::KEYS, D> k_tile{base};
    const tile<shape::KEYS, DV> v_tile{base + (shared_address)shape::V_AT};
    const tile<shape::QUERIES, D> q_tile{base + (shared_address)shape::Q_AT};
    const tile<shape::QUERIES, DV> dout_tile{base + (shared_address)shape::DOUT_AT};
    const typename shape::dscore_tile dscore_tile{base + (shared_address)shape::DS_AT};

    const typename shape::walk walk{args, base + (shared_address)shape::KEYS_AT};
    if (thread_index() == 0)
        walk.choose_keys(
            walk.keys_of_number(WITH_K && p.num_queries > 0 ? walk.take_number() : block_index()));
    block_barrier();
    const query_numbers<shape> numbers{walk, base};
    const auto start_queries = [&](auto to, const void *array, const int64_t (&stride)[3], int64_t dim,
                                   auto at) {
        const int token = at.tile * shape::QUERIES;
        load_tile<T, THREADS>(to,
                              (const T *)array + walk.keys().batch * stride[0] + token * stride[1] +
                                  walk.head_of(at) * stride[2],
                              stride[1], (int)p.num_queries - token, (int)dim, args.aligned);
    };
    const auto start_keys = [&](auto to, const void *array, const int64_t (&stride)[3], int64_t dim) {
        load_keys<T, THREADS>(to, array, stride, dim, args, walk.keys().run, walk.keys().first_key,
                              walk.keys().kv_head, walk.keys().batch);
    };

    auto at = walk.first();
    if (walk.ended(at)) {
        if (WITH_K && p.fresh) clear_key_rows<shape::KEYS>(walk, p.dk, p.dk_stride, p.head_dim);
        if (WITH_V && p.fresh) clear_key_rows<shape::KEYS>(walk, p.dv, p.dv_stride, p.v_head_dim);
        return;
    }
    start_keys(k_tile, p.k, p.k_stride, p.head_dim);
    if constexpr (WITH_K) start_keys(v_tile, p.v, p.v_stride, p.v_head_dim);
    start_queries(q_tile, p.q, p.q_stride, p.head_dim, at);
    start_queries(dout_tile, p.dout, p.dout_stride, p.v_head_dim, at);
    async_commit();
    numbers.store(thread_index(), numbers.fetch(at, thread_index()));
    walk.store_warp_positions();
    fix_sign<THREADS>(k_tile, p.scale);

    sums<1, D / 8> dk;
    sums<1, DV / 8> dv;
    clear<1, D / 8>(dk);
    clear<1, DV / 8>(dv);
    async_wait<0>();
    block_barrier();
    while (!walk.ended(at)) {
        const auto attended = numbers.attended();
        if (attended.any) {
            sums<1, N> scores, dweights;
            clear<1, N>(scores);
            clear<1, N>(dweights);
            multiply_rows<T, 1, N>(scores, k_tile, 16 * warp_index(), q_tile);
            if constexpr (WITH_K) multiply_rows<T, 1, N>(dweights, v_tile, 16 * warp_index(), dout_tile);
            if constexpr (WITH_K) numbers.subtract_delta(dweights);
            if (args.inverse_softcap > 0) {
                cap_scores<1, N>(scores, args.cap);
                if constexpr (WITH_K) multiply_slopes<1, N>(dweights, scores);
            }
            if (!attended.all) numbers.mask_scores(scores);
#pragma unroll
            for (int k = 0; k < N / 2; k++) {
                sums<1, 2> weights, dscores;
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    const int n = i / 4, j = i % 4;
                    const auto both = numbers.sums_of_lane(2 * k + n);
                    const float weight =
                        exp2_approx(fmaf(scores[0][2 * k + n][j], args.scale_log2, -both.of[j % 2].lse));
                    weights[0][n][j] = weight;
                    dscores[0][n][j] =
                        weight == 0 ? 0 : weight * dweights[0][2 * k + n][j]; // whatever dP holds
                }
                uint32_t left[1][4];
                if constexpr (WITH_V) {
                    pack_weights<T, 1>(left, weights);
                    multiply_weights<T, 1>(dv, left, dout_tile, k);
                }
                if constexpr (WITH_K) {
                    pack_weights<T, 1>(left, dscores);
                    store_dscores(dscore_tile, left[0], k);
                    multiply_weights<T, 1>(dk, left, q_tile, k);
                }
            }
        } else if constexpr (WITH_K) {
#pragma unroll
            for (int k = 0; k < N / 2; k++) store_dscores(dscore_tile, {0, 0, 0, 0}, k);
        }
        const auto next = walk.after(at);
        block_barrier(); // dS is there, and nobody reads q, dout and their numbers any more
        if (!walk.ended(next)) {
            start_queries(q_tile, p.q, p.q_stride, p.head_dim, next);
            start_queries(dout_tile, p.dout, p.dout_stride, p.v_head_dim, next);
        }
        async_commit();
        const auto next_numbers = numbers.fetch(next, thread_index());

        int turn_after = 0; // found before the turn comes: others wait while it lasts
        if constexpr (WITH_K) {
            sums<1, D / 8 / shape::COLUMN_PARTS> dq;
            clear<1, D / 8 / shape::COLUMN_PARTS>(dq);
            multiply_dscores<T, shape>(dq, dscore_tile, k_tile);
            if (thread_index() == 0) {
                turn_after = walk.next_in_turn(at);
                walk.wait_for(walk.turn_of(at));
            }
            block_barrier();
            const float factor = (float)fabs(p.scale); // k_tile has the sign of scale
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const int token =
                    at.tile * shape::QUERIES + shape::query_part() * 16 + 8 * r + lane_index() / 4;
                if (token < p.num_queries)
                    update_row<shape::COLUMN_PARTS>(
                        (float *)p.dq + walk.keys().batch * p.dq_stride[0] + token * p.dq_stride[1] +
                            walk.head_of(at) * p.dq_stride[2],
                        (int)p.head_dim, args.in_pairs, true, dq, r,
                        [&](float before, float x) { return before + factor * x; }, shape::column_part());
            }
        }
        numbers.store(thread_index(), next_numbers);
        async_wait<0>();
        block_barrier(); // what is next has arrived, and dq is added
        if constexpr (WITH_K)
            if (thread_index() == 0) store_release(walk.turn_of(at), turn_after);
        at = next;
    }
    if constexpr (WITH_K) add_key_rows(walk, p.dk, p.dk_stride, p.head_dim, (float)p.scale, dk);
    if constexpr (WITH_V) add_key_rows(walk, p.dv, p.dv_stride, p.v_head_dim, 1, dv);
}

// Where the sums of dk and dv together would not fit the registers, a launch for each.
template <class T, int D, int DV> rt_status attn_bwd(const rt_attn_params &p, void *stream) {
    using shape = backward_shape<D, DV>;
    if (p.num_queries == 0 && !p.fresh) return RT_OK;
    return for_runs(p, [&](const attn_args &args) {
        const auto start = [&](auto kernel) {
            return launch(kernel, num_key_tiles<shape::KEYS>(args) * p.num_kv_heads * p.batch, shape::THREADS,
                          shape::BYTES, stream, args);
        };
        rt_status status = fill_workspace<shape::QUERIES, shape::KEYS>(args, stream);
        if (status != RT_OK) return status;
        if constexpr (D + DV <= 320) {
            return start(attn_bwd_kernel<T, D, DV, true, true>);
        } else {
            status = start(attn_bwd_kernel<T, D, DV, true, false>);
            return status == RT_OK ? start(attn_bwd_kernel<T, D, DV, false, true>) : status;
        }
    });
}

#endif // RINGTILE_CUDA_ATTN_BWD_CUH
