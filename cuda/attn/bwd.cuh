// Attention backward for bf16 and f16 (FlashAttention-2, arXiv:2307.08691) in one pass: a thread block has a tile
// of keys and visits the tiles of queries, of all heads of the group, that attend it. It sums dk and dv in
// registers and adds to dq in global memory, ordered among thread blocks by semaphores (query_walk.cuh): every sum
// has one order, without atomics.
//
// With S = scale q k^T (then the softcap), P = exp(S - lse) and out = P v:
//   dv += P^T dout,   dP = dout v^T,   dS = P (dP - delta) (1 - (S / softcap)^2),
//   dq += scale dS k,   dk += scale dS^T q.
//
// Rows are keys, 16 per warp: a warp computes its rows of S^T = k q^T and dP^T = v dout^T, and they become left
// factors of dv and dk in registers. dq sums over all keys: dS^T goes through shared memory, and each warp computes
// a part of dq.
//
// Bound by shared memory and by the traffic of dq. Each of the four warps loads a right factor from shared memory,
// which takes 9/8 of the time of its five products. Each tile of 64 keys reads and writes all of dq that attends
// it: 8 bytes of L2 traffic for 320 multiply-adds.
#ifndef RINGTILE_CUDA_ATTN_BWD_CUH
#define RINGTILE_CUDA_ATTN_BWD_CUH

#include "attn.cuh"
#include "bwd_parts.cuh"

// D, DV: head dims, rounded up to compiled ones. Registers bound the number of queries: a lane holds (D + DV) / 2
// numbers of dk and dv, and QUERIES of S and dP or, after them, QUERIES D / 128 of dq.
template <int D, int DV> struct backward_shape {
    static constexpr int WARPS = 4, THREADS = 32 * WARPS, KEYS = 16 * WARPS;
    static constexpr int MOST_CTAS = D <= 64 ? 3 : 2; // on a multiprocessor
    static constexpr int QUERIES = D <= 128 ? 64 : D <= 192 ? 32 : 16, TILE = QUERIES;
    using walk = query_walk<KEYS, TILE>;

    // dq: a warp has 16 queries and, of every COLUMN_PARTS groups of 16 columns, one.
    static constexpr int QUERY_PARTS = QUERIES / 16, COLUMN_PARTS = WARPS / QUERY_PARTS;
    static RT_DEVICE int query_part() { return warp_index() % QUERY_PARTS; }
    static RT_DEVICE int column_part() { return COLUMN_PARTS == 1 ? 0 : warp_index() / QUERY_PARTS; }

    static constexpr int DSCORE_COLS = QUERIES < 32 ? 32 : QUERIES; // rows of a tile have at least 64 bytes
    using dscore_tile = tile<KEYS, DSCORE_COLS>;                    // dS^T

    struct shared_memory {
        typename tile<KEYS, D>::storage k;
        typename tile<KEYS, DV>::storage v;
        typename tile<QUERIES, D>::storage q;
        typename tile<QUERIES, DV>::storage dout;
        typename dscore_tile::storage dscores;
        query_storage<TILE> numbers;
        typename walk::storage keys;
    };
    static_assert(sizeof(shared_memory) <= MAX_SHARED_BYTES);
};

// P and dS of queries 16 k .. 16 k + 15. Where P is 0, so is dS, whatever dP is.
template <class Numbers, int N>
RT_DEVICE void weigh(const Numbers &numbers, float scale_log2, const accumulator<1, N> &scores,
                     const accumulator<1, N> &dweights, int k, accumulator<1, 2> &weights, accumulator<1, 2> &dscores) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int n = i / 4, j = i % 4;
        const float weight =
            ex2_approx_ftz(fmaf(scores[0][2 * k + n][j], scale_log2, -numbers.lse_of_lane(2 * k + n).of[j % 2]));
        weights[0][n][j] = weight;
        dscores[0][n][j] = weight == 0 ? 0 : weight * dweights[0][2 * k + n][j];
    }
}

// dq += dS k, for this warp's queries and columns.
template <class T, class Shape, int N, int KEYS, int D>
RT_DEVICE void multiply_dscores(accumulator<1, N> &dq, typename Shape::dscore_tile dscores, tile<KEYS, D> k_tile) {
    const int lane = lane_index();
    const auto chunks = dscores.chunks_from(lane / 16 * 8 + lane % 8, 2 * Shape::query_part() + lane / 8 % 2);
#pragma unroll
    for (int k = 0; k < KEYS / 16; k++) {
        uint32_t left[1][4];
        ldmatrix_x4_trans(left[0], chunks.at(16 * k, 0));
        gemm_rs<T, 1, Shape::COLUMN_PARTS>(dq, left, k_tile, k, Shape::column_part());
    }
}

// Adds this warp's part of dq to global memory; k had the sign of scale.
template <class Shape, int N>
RT_DEVICE void add_query_rows(const typename Shape::walk &walk, typename Shape::walk::place at,
                              const accumulator<1, N> &dq) {
    const rt_attn_block &p = walk.args.p;
    const float factor = (float)fabs(p.scale);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int token = at.tile * Shape::QUERIES + Shape::query_part() * 16 + 8 * r + lane_index() / 4;
        if (token >= p.num_queries) continue;
        float *const row = dq_of(walk.args.bwd).at(walk.keys().batch, token, walk.head_of(at));
        update_row<Shape::COLUMN_PARTS>(
            row, row, (int)p.head_dim, walk.args.in_pairs, true, dq, r,
            [&](float before, float x) { return before + factor * x; }, Shape::column_part());
    }
}

// WITH_K: sums dk and adds to dq.   WITH_V: sums dv.
template <class T, int D, int DV, bool WITH_K, bool WITH_V>
RT_KERNEL((backward_shape<D, DV>::THREADS), (backward_shape<D, DV>::MOST_CTAS))
attn_bwd_kernel(RT_PARAMS bwd_args args) {
    using shape = backward_shape<D, DV>;
    constexpr int THREADS = shape::THREADS, QUERIES = shape::QUERIES, N = QUERIES / 8;
    const rt_attn_block &p = args.p;
    const shared_ref<typename shape::shared_memory> smem{shared_base()};
    const tile<shape::KEYS, D> k_tile{RT_SHARED(smem, k)};
    const tile<shape::KEYS, DV> v_tile{RT_SHARED(smem, v)};
    const tile<QUERIES, D> q_tile{RT_SHARED(smem, q)};
    const tile<QUERIES, DV> dout_tile{RT_SHARED(smem, dout)};
    const typename shape::dscore_tile dscore_tile{RT_SHARED(smem, dscores)};

    const typename shape::walk walk{args, RT_SHARED(smem, keys)};
    if (thread_index() == 0) walk.choose_keys_of_ticket(p.num_queries > 0 ? walk.take_ticket() : cta_index_x());
    syncthreads();
    const query_numbers<shape> numbers{walk, RT_SHARED(smem, numbers)};
    const auto load_rows = [&](auto to, auto rows, auto at) {
        const int token = at.tile * QUERIES;
        load_tile<T, THREADS>(to, rows.at(walk.keys().batch, token, walk.head_of(at)), rows.stride[1],
                              (int)p.num_queries - token, (int)rows.dim, args.aligned);
    };

    auto at = walk.first();
    if (walk.ended(at)) {
        if constexpr (WITH_K) clear_key_rows<T, shape::KEYS>(walk, dk_of(args.bwd), args.bwd.rounded_dk);
        if constexpr (WITH_V) clear_key_rows<T, shape::KEYS>(walk, dv_of(args.bwd), args.bwd.rounded_dv);
        return;
    }
    load_keys<THREADS>(k_tile, k_of<T>(p), args, walk.keys());
    if constexpr (WITH_K) load_keys<THREADS>(v_tile, v_of<T>(p), args, walk.keys());
    load_rows(q_tile, q_of<T>(p), at);
    load_rows(dout_tile, dout_of<T>(args.bwd), at);
    cp_async_commit_group();
    numbers.store(at, thread_index(), numbers.fetch(at, thread_index()));
    walk.store_warp_positions();
    fix_sign<THREADS>(k_tile, p.scale);

    accumulator<1, D / 8> dk;
    accumulator<1, DV / 8> dv;
    clear<1, D / 8>(dk);
    clear<1, DV / 8>(dv);
    cp_async_wait_group<0>();
    syncthreads();
    while (!walk.ended(at)) {
        const auto attended = numbers.attended();
        if (attended.any) {
            // S^T = k q^T, dP^T = v dout^T
            accumulator<1, N> scores, dweights;
            clear<1, N>(scores);
            clear<1, N>(dweights);
            gemm_ss<T, 1, N>(scores, k_tile, 16 * warp_index(), q_tile);
            if constexpr (WITH_K) gemm_ss<T, 1, N>(dweights, v_tile, 16 * warp_index(), dout_tile);
            if constexpr (WITH_K) numbers.subtract_delta(dweights);
            if (args.inverse_softcap > 0) {
                cap_scores<1, N>(scores, args.cap);
                if constexpr (WITH_K) multiply_slopes<1, N>(dweights, scores);
            }
            if (!attended.all) numbers.mask_scores(scores);
            // dv += P^T dout, dk += dS^T q
#pragma unroll
            for (int k = 0; k < N / 2; k++) {
                accumulator<1, 2> weights, dscores;
                weigh(numbers, args.scale_log2, scores, dweights, k, weights, dscores);
                uint32_t left[1][4];
                if constexpr (WITH_V) {
                    round_to_factor<T, 1>(left, weights);
                    gemm_rs<T, 1>(dv, left, dout_tile, k);
                }
                if constexpr (WITH_K) {
                    round_to_factor<T, 1>(left, dscores);
                    store_dscores(dscore_tile, left[0], k);
                    gemm_rs<T, 1>(dk, left, q_tile, k);
                }
            }
        } else if constexpr (WITH_K) {
#pragma unroll
            for (int k = 0; k < N / 2; k++) store_dscores(dscore_tile, {0, 0, 0, 0}, k);
        }
        const auto next = walk.after(at);
        syncthreads(); // dS is stored, and all warps are done with q, dout and their numbers
        if (!walk.ended(next)) {
            load_rows(q_tile, q_of<T>(p), next);
            load_rows(dout_tile, dout_of<T>(args.bwd), next);
        }
        cp_async_commit_group();
        const auto next_numbers = numbers.fetch(next, thread_index());

        if constexpr (WITH_K) { // dq += dS k
            accumulator<1, D / 8 / shape::COLUMN_PARTS> dq;
            clear<1, D / 8 / shape::COLUMN_PARTS>(dq);
            multiply_dscores<T, shape>(dq, dscore_tile, k_tile);
            if (warp_index() == 0) {
                const int previous = walk.previous_to_add(at);
                if (lane_index() == 0) walk.wait_for_dq(at, previous);
            }
            syncthreads();
            add_query_rows<shape>(walk, at, dq);
        }
        numbers.store(next, thread_index(), next_numbers);
        cp_async_wait_group<0>();
        syncthreads(); // the next tile has arrived, and dq is added
        if constexpr (WITH_K)
            if (thread_index() == 0) walk.release_dq(at);
        at = next;
    }
    add_in_turn(
        walk, [] { syncthreads(); },
        [&] {
            if constexpr (WITH_K) add_key_rows<T>(walk, dk_of(args.bwd), args.bwd.rounded_dk, (float)p.scale, dk);
            if constexpr (WITH_V) add_key_rows<T>(walk, dv_of(args.bwd), args.bwd.rounded_dv, 1, dv);
        });
}

// One launch, or one each for dk and dv if registers cannot hold both.
template <class T, int D, int DV> rt_status attn_bwd(const rt_attn_bwd_params &p, void *stream) {
    using shape = backward_shape<D, DV>;
    if (p.block.num_queries == 0 && !p.fresh) return RT_OK;
    return for_runs(p, [&](bwd_args args) {
        divide_heads<shape::KEYS>(args, shape::MOST_CTAS);
        const auto start = [&](auto kernel) {
            const rt_status status = fill_workspace<shape::QUERIES, shape::KEYS>(args, stream);
            if (status != RT_OK) return status;
            return launch(kernel, num_key_units<shape::KEYS>(args) * args.num_parts, shape::THREADS,
                          sizeof(typename shape::shared_memory), stream, args);
        };
        if constexpr (D + DV <= 320) {
            return start(attn_bwd_kernel<T, D, DV, true, true>);
        } else {
            const rt_status status = start(attn_bwd_kernel<T, D, DV, true, false>);
            return status == RT_OK ? start(attn_bwd_kernel<T, D, DV, false, true>) : status;
        }
    });
}

#endif // RINGTILE_CUDA_ATTN_BWD_CUH
