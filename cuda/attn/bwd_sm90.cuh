// Attention backward for bf16 and f16 on sm_90a: the same pass, sums and semaphores as bwd.cuh, by a thread block
// of three warp groups (the warp specialization of FlashAttention-3, arXiv:2407.08608).
//
//   copier      one warp: K and V once, then Q and dout of each attended tile of queries, into a ring of stages
//   numbers     two warps: intervals, lse and delta of the tile, and which tile of keys adds to its dq before, into the
//               same stage
//   consumers   two groups of 64 keys each:   S^T = K Q^T,   dP^T = V dout^T,   dv += P^T dout,   dk += dS^T Q
//               with P and dS from registers. They write dS^T to shared memory, compute 64 x 64 numbers of dq = dS K
//               each, and write those to shared memory too
//   adder       one warp: waits for the semaphore, and has bulk copies add dq to global memory
//
//   consumer, a tile:   start S^T;  start dP^T;  P from S^T;  start dv;  dS from dP^T;  store dS;  barrier;
//                       start dq;  start dk;  store dq while dk runs
//
// A stage is full when bytes and numbers are there, and empty when the consumers and the adder have read them. dS^T
// alternates between two places, so one barrier of the consumers per tile is enough. So does dq at D = 128; at D = 64
// it has one place, for lack of memory. The adder empties a place while the consumers work on the tiles that follow, so
// they do not wait for a semaphore that comes within two tiles, or one.
//
// At D = 128 a lane of a consumer holds 64 numbers each of dk and dv, 32 of S and dP, and later 32 of dq. At D = 64
// a tile of 64 queries would leave it only 32 of dq: there a tile has 128 queries, processed in two parts, and each
// group computes the dq of one part.
#ifndef RINGTILE_CUDA_ATTN_BWD_SM90_CUH
#define RINGTILE_CUDA_ATTN_BWD_SM90_CUH

#include "attn.cuh"
#include "bwd_parts.cuh"
#include "tma_tile.cuh"

struct attn_bwd_sm90_args {
    bwd_args attn;
    tensor_map q, dout, dq, k, v;
};

template <int D, int SIDES> struct backward_sm90_shape {
    static constexpr int CONSUMERS = 8, THREADS = 32 * CONSUMERS + 128; // consumer warps; threads
    static constexpr int COPIER = CONSUMERS, ADDER = CONSUMERS + 1,
                         NUMBERS = CONSUMERS + 2; // warps, NUMBERS 2
    static constexpr int KEYS = 16 * CONSUMERS, QUERIES = 64, PARTS = 128 / D, TILE = QUERIES * PARTS;
    static constexpr int KEY_PANEL = KEYS * 128, QUERY_PANEL = TILE * 128; // bytes
    static constexpr int BOXES = 4, BOX_ROWS = 64, BOX_COLS = 32;          // of dq, 128 bytes a row
    static constexpr int DQ_PLACES = D == 128 ? 2 : 1;
    using walk = query_walk<KEYS, TILE, SIDES>;
    using dscore_tile = tile<KEYS, QUERIES>; // dS^T of a part

    struct stage {
        query_storage<TILE> numbers;
        alignas(16) typename walk::place at;
        int previous; // the tile of keys that adds to the dq of these queries before
    };
    struct stage_mbarriers {
        mbarrier full, empty;
    };
    struct shared_memory {
        panels<KEYS, D> k, v;
        panels<TILE, D> q[2], dout[2];
        typename dscore_tile::storage dscores[2][PARTS];
        chunk dq[DQ_PLACES][BOXES][BOX_ROWS][8];
        stage stages[2];
        typename walk::storage keys;
        mbarrier keys_full;
        stage_mbarriers dq_ring[DQ_PLACES], ring[2];
    };
    static_assert(sizeof(shared_memory) <= MAX_SHARED_BYTES_SM90);
    using shared = shared_ref<shared_memory>;
};

// The n-th tile of queries is in stage n % 2, its dq in place n % DQ_PLACES; the phases of the mbarriers have this
// parity.
template <int PLACES = 2> RT_DEVICE int parity_of(int n) { return n / PLACES % 2; }

template <int D, int SIDES> RT_DEVICE void init_mbarriers(typename backward_sm90_shape<D, SIDES>::shared smem) {
    using shape = backward_sm90_shape<D, SIDES>;
    mbarrier_init(RT_SHARED(smem, keys_full), 1);
    for (int place = 0; place < shape::DQ_PLACES; place++) {
        mbarrier_init(RT_SHARED(RT_SHARED(smem, dq_ring)[place], full), shape::CONSUMERS);
        mbarrier_init(RT_SHARED(RT_SHARED(smem, dq_ring)[place], empty), 1);
    }
    for (int stage = 0; stage < 2; stage++) {
        mbarrier_init(RT_SHARED(RT_SHARED(smem, ring)[stage], full), 3);
        mbarrier_init(RT_SHARED(RT_SHARED(smem, ring)[stage], empty), shape::CONSUMERS + 1);
    }
    fence_mbarrier_init();
}

// ---- the producers -------------------------------------------------------------------------------

template <int D, int SIDES>
RT_DEVICE void copy_queries(const attn_bwd_sm90_args &args, typename backward_sm90_shape<D, SIDES>::shared smem,
                            const typename backward_sm90_shape<D, SIDES>::walk &walk) {
    using shape = backward_sm90_shape<D, SIDES>;
    constexpr int KEYS = shape::KEYS, TILE = shape::TILE;
    const bool copies = lane_index() == 0;
    if (copies) {
        const key_tile keys = walk.keys();
        const auto full = RT_SHARED(smem, keys_full);
        mbarrier_arrive_expect_tx(full, 2 * sizeof(panels<KEYS, D>));
        copy_keys<KEYS, D>(RT_SHARED(smem, k), full, args.k, args.attn, keys);
        copy_keys<KEYS, D>(RT_SHARED(smem, v), full, args.v, args.attn, keys);
    }
    auto at = walk.first();
    for (int n = 0;; n++) {
        if (copies) {
            const auto full = RT_SHARED(RT_SHARED(smem, ring)[n % 2], full);
            mbarrier_wait_parity(RT_SHARED(RT_SHARED(smem, ring)[n % 2], empty), parity_of(n) ^ 1);
            if (walk.ended(at)) {
                mbarrier_arrive(full);
            } else {
                const int token = at.tile * TILE, head = walk.head_of(at), batch = walk.keys().batch;
                mbarrier_arrive_expect_tx(full, 2 * sizeof(panels<TILE, D>));
                copy_tile<TILE, D>(RT_SHARED(smem, q)[n % 2], full, args.q, token, head, batch);
                copy_tile<TILE, D>(RT_SHARED(smem, dout)[n % 2], full, args.dout, token, head, batch);
            }
        }
        syncwarp(); // the other lanes wait here, not tiles ahead
        if (walk.ended(at)) break;
        at = walk.after(at);
    }
}

// Two warps fetch the numbers of a tile, half each: the first of each lane while the stage is still in use. The second
// also finds the tile that adds before, which takes two loads from L2 one after the other, and which the adder has no
// time for. The place behind the last tile tells the others to end.
template <int D, int SIDES>
RT_DEVICE void store_numbers(typename backward_sm90_shape<D, SIDES>::shared smem,
                             const typename backward_sm90_shape<D, SIDES>::walk &walk) {
    using shape = backward_sm90_shape<D, SIDES>;
    constexpr int HALF = shape::TILE / 2;
    const int first = (warp_index() - shape::NUMBERS) * HALF + lane_index();
    auto at = walk.first();
    for (int n = 0;; n++) {
        const auto stage = RT_SHARED(smem, stages)[n % 2];
        const query_numbers<shape> numbers{walk, RT_SHARED(stage, numbers)};
        const auto ahead = numbers.fetch(at, first);
        mbarrier_wait_parity(RT_SHARED(RT_SHARED(smem, ring)[n % 2], empty), parity_of(n) ^ 1);
        numbers.store(at, first, ahead);
#pragma unroll
        for (int i = 32; i < HALF; i += 32) numbers.store(at, first + i, numbers.fetch(at, first + i));
        if (first == 0) st_shared(RT_SHARED(stage, at), at);
        if (warp_index() > shape::NUMBERS) {
            const int previous = walk.ended(at) ? -1 : walk.previous_to_add(at);
            if (lane_index() == 0) st_shared(RT_SHARED(stage, previous), previous);
        }
        arrive_as_warp(RT_SHARED(RT_SHARED(smem, ring)[n % 2], full));
        if (walk.ended(at)) break;
        at = walk.after(at);
    }
}

// ---- the adder -----------------------------------------------------------------------------------

template <int D, int SIDES>
RT_DEVICE void add_dq(const attn_bwd_sm90_args &args, typename backward_sm90_shape<D, SIDES>::shared smem,
                      const typename backward_sm90_shape<D, SIDES>::walk &walk) {
    using shape = backward_sm90_shape<D, SIDES>;
    for (int n = 0;; n++) {
        mbarrier_wait_parity(RT_SHARED(RT_SHARED(smem, ring)[n % 2], full), parity_of(n));
        const auto at = ld_shared(RT_SHARED(RT_SHARED(smem, stages)[n % 2], at));
        const int previous = ld_shared(RT_SHARED(RT_SHARED(smem, stages)[n % 2], previous));
        arrive_as_warp(RT_SHARED(RT_SHARED(smem, ring)[n % 2], empty));
        if (walk.ended(at)) break;
        if (lane_index() == 0) {
            walk.wait_for_dq(at, previous); // mostly over before dq is there
            fence_proxy_async_global();
            const auto ring = RT_SHARED(smem, dq_ring)[n % shape::DQ_PLACES];
            mbarrier_wait_parity(RT_SHARED(ring, full), parity_of<shape::DQ_PLACES>(n));
            const auto dq = RT_SHARED(smem, dq)[n % shape::DQ_PLACES];
#pragma unroll 1
            for (int i = 0; i < shape::BOXES; i++) // two from each group
                cp_reduce_async_bulk_tensor_4d(args.dq, dq[i], shape::BOX_COLS * (i % (D / shape::BOX_COLS)),
                                               at.tile * shape::TILE + i / (D / shape::BOX_COLS) * shape::BOX_ROWS,
                                               walk.head_of(at), walk.keys().batch);
            cp_async_bulk_commit_group();
            cp_async_bulk_wait_group_read<0>();
            mbarrier_arrive(RT_SHARED(ring, empty));
            cp_async_bulk_wait_group<0>();
            fence_proxy_async_global();
            walk.release_dq(at);
        }
        syncwarp(); // the other lanes wait here, not a tile ahead
    }
}

// ---- the consumers -------------------------------------------------------------------------------

// Stores a group's 64 x 64 numbers of dq in its two boxes. Odd rows store fragment n ^ 2 when even ones store n: half a
// warp stores at once, to four rows of 128 bytes, and two of them would be in the same banks.
template <int D, int SIDES>
RT_DEVICE void store_dq(shared_ref<chunk[backward_sm90_shape<D, SIDES>::BOXES][64][8]> boxes, float factor,
                        const accumulator<1, 8> &dq) {
    struct alignas(8) pair {
        float x, y;
    };
    const int lane = lane_index(), warp = warp_index();
    const bool odd = lane / 4 % 2 != 0;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int row = 16 * (warp % 4) + 8 * r + lane / 4;
#pragma unroll
        for (int n = 0; n < 8; n++) {
            const tile<64, 64> box{boxes[warp / 4 * 2 + n / 4]}; // swizzled alike: 128 bytes a row
            const float x = odd ? dq[0][n ^ 2][2 * r] : dq[0][n][2 * r];
            const float y = odd ? dq[0][n ^ 2][2 * r + 1] : dq[0][n][2 * r + 1];
            st_shared(box.chunk_at(row, (n % 4 * 2 ^ (odd ? 4 : 0)) + lane % 4 / 2) + (shared_address)(lane % 2 * 8),
                      pair{factor * x, factor * y});
        }
    }
}

template <class T, int D, int SIDES>
RT_DEVICE void consume_queries(const bwd_args &args, typename backward_sm90_shape<D, SIDES>::shared smem,
                               const typename backward_sm90_shape<D, SIDES>::walk &walk) {
    using shape = backward_sm90_shape<D, SIDES>;
    const rt_attn_block &p = args.p;
    const int group = shfl_sync(warp_index() / 4, 0); // shows the compiler that it is uniform in the warp
    accumulator<1, D / 8> dk, dv;
    clear<1, D / 8>(dk);
    clear<1, D / 8>(dv);
    accumulator<1, 8> scores, dweights, dq;
    uint32_t weights[4][1][4], dscores[4][1][4];

    // d (64 keys x 64 queries) = the group's rows of keys times a part's rows of queries
    const auto start_rows = [&](accumulator<1, 8> &d, shared_address keys, shared_address queries) {
        const uint64_t a = make_smem_desc(keys + (shared_address)(group * 64 * 128), 0), b = make_smem_desc(queries, 0);
        warpgroup_fence_operand(d[0]);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < D / 16; i++)
            wgmma_mma_async_ss<T, major::K>(d[0], advance_smem_desc(a, i / 4 * shape::KEY_PANEL + i % 4 * 32),
                                            advance_smem_desc(b, i / 4 * shape::QUERY_PANEL + i % 4 * 32), i > 0);
        wgmma_commit_group();
    };
    // d (64 keys x D) += left (64 keys x 64 queries) times a part's rows of queries
    const auto start_columns = [&](accumulator<1, D / 8> &d, uint32_t (&left)[4][1][4], shared_address queries) {
        const uint64_t b = make_smem_desc(queries, shape::QUERY_PANEL);
        warpgroup_fence_operand(d[0]);
#pragma unroll
        for (int i = 0; i < 4; i++) warpgroup_fence_operand(left[i]);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; i++) wgmma_mma_async_rs<T>(d[0], left[i][0], advance_smem_desc(b, i * 16 * 128));
        wgmma_commit_group();
    };
    // dq of the group's queries and columns = dS times rows of keys
    const auto start_dq = [&](shared_address dscores_at) {
        const uint64_t a = make_smem_desc(
                           dscores_at + (shared_address)(D == 64
                                                             ? group * (int)sizeof(typename shape::dscore_tile::storage)
                                                             : 0),
                           0),
                       b = make_smem_desc(RT_SHARED(smem, k) + (shared_address)(D == 64 ? 0 : group * shape::KEY_PANEL),
                                          0);
        warpgroup_fence_operand(dq[0]);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < shape::KEYS / 16; i++)
            wgmma_mma_async_ss<T, major::MN>(dq[0], advance_smem_desc(a, i * 16 * 128),
                                             advance_smem_desc(b, i * 16 * 128), i > 0);
        wgmma_commit_group();
    };

    walk.store_warp_positions();
    syncwarp();
    mbarrier_wait_parity(RT_SHARED(smem, keys_full), 0);
    int n = 0;
    for (;; n++) {
        const auto stage = RT_SHARED(smem, stages)[n % 2];
        mbarrier_wait_parity(RT_SHARED(RT_SHARED(smem, ring)[n % 2], full), parity_of(n));
        if (walk.ended(ld_shared(RT_SHARED(stage, at)))) break;
#pragma unroll
        for (int part = 0; part < shape::PARTS; part++) {
            const query_numbers<shape> numbers{walk, RT_SHARED(stage, numbers), part * shape::QUERIES};
            const shared_address q = RT_SHARED(smem, q)[n % 2] + (shared_address)(part * shape::QUERIES * 128),
                                 dout = RT_SHARED(smem, dout)[n % 2] + (shared_address)(part * shape::QUERIES * 128);
            start_rows(scores, RT_SHARED(smem, k), q);      // S^T
            start_rows(dweights, RT_SHARED(smem, v), dout); // dP^T
            const bool attends_all = numbers.attended().all;
            wgmma_wait_group<1>(scores[0]);
            if (p.scale <= 0) fix_sign<1, 8>(scores, p.scale);
            const bool capped = args.inverse_softcap > 0;
            if (capped) {
                cap_scores<1, 8>(scores, args.cap);
                wgmma_wait_group<0>(dweights[0]);
                numbers.subtract_delta(dweights);
                multiply_slopes<1, 8>(dweights, scores);
            }
            if (!attends_all) numbers.mask_scores(scores);
#pragma unroll
            for (int i = 0; i < 32; i++) { // S becomes P
                float &x = scores[0][i / 4][i % 4];
                x = ex2_approx_ftz(fmaf(x, args.scale_log2, -numbers.lse_of_lane(i / 4).of[i % 2]));
            }
#pragma unroll
            for (int k = 0; k < 4; k++) round_to_factor<T, 1>(weights[k], scores, k);
            start_columns(dv, weights, dout);
            wgmma_wait_group<1>(dweights[0]);
            if (!capped) numbers.subtract_delta(dweights);
#pragma unroll
            for (int i = 0; i < 32; i++) { // P becomes dS: 0 stays 0, whatever dP is
                float &x = scores[0][i / 4][i % 4];
                if (x != 0) x *= dweights[0][i / 4][i % 4];
            }
            const typename shape::dscore_tile to{RT_SHARED(smem, dscores)[n % 2][part]};
#pragma unroll
            for (int k = 0; k < 4; k++) {
                round_to_factor<T, 1>(dscores[k], scores, k);
                store_dscores(to, dscores[k][0], k);
            }
            if (part + 1 < shape::PARTS) start_columns(dk, dscores, q);
        }
        fence_proxy_async_shared();
        named_barrier_sync(
            1, 32 * shape::CONSUMERS); // dS of both groups is stored, and both are done with the previous one
        start_dq(RT_SHARED(smem, dscores)[n % 2]);
        start_columns(dk, dscores,
                      RT_SHARED(smem, q)[n % 2] + (shared_address)((shape::PARTS - 1) * shape::QUERIES * 128));
        wgmma_wait_group<1>(dq[0]);
        const auto dq_ring = RT_SHARED(smem, dq_ring)[n % shape::DQ_PLACES];
        mbarrier_wait_parity(RT_SHARED(dq_ring, empty), parity_of<shape::DQ_PLACES>(n) ^ 1);
        store_dq<D, SIDES>(RT_SHARED(smem, dq)[n % shape::DQ_PLACES], (float)p.scale, dq);
        fence_proxy_async_shared();
        arrive_as_warp(RT_SHARED(dq_ring, full));
        wgmma_wait_group<0>(dk[0]);
        warpgroup_fence_operand(dv[0]);
        arrive_as_warp(RT_SHARED(RT_SHARED(smem, ring)[n % 2], empty));
    }
    if (n == 0 && walk.adds_to_keys() && args.bwd.rounded_dk == nullptr)
        return; // and so do the tile's other parts, but for a first one's zeros
    add_in_turn(
        walk, [] { named_barrier_sync(1, 32 * shape::CONSUMERS); },
        [&] {
            add_key_rows<T>(walk, dk_of(args.bwd), args.bwd.rounded_dk, (float)p.scale, dk);
            add_key_rows<T>(walk, dv_of(args.bwd), args.bwd.rounded_dv, 1, dv);
        });
}

// ---- the kernel ----------------------------------------------------------------------------------

template <class T, int D, int SIDES>
RT_KERNEL((backward_sm90_shape<D, SIDES>::THREADS), 1)
attn_bwd_sm90_kernel(RT_PARAMS attn_bwd_sm90_args args) {
    using shape = backward_sm90_shape<D, SIDES>;
    const typename shape::shared smem{shared_base()};
    const typename shape::walk walk{args.attn, RT_SHARED(smem, keys)};
    if (thread_index() == 0) {
        init_mbarriers<D, SIDES>(smem);
        walk.choose_keys_of_ticket(walk.take_ticket());
    }
    if (thread_index() == 32 * shape::COPIER) {
        prefetch_tensormap(args.q);
        prefetch_tensormap(args.dout);
        prefetch_tensormap(args.k);
        prefetch_tensormap(args.v);
    }
    if (thread_index() == 32 * shape::ADDER) prefetch_tensormap(args.dq);
    syncthreads();
    if (warp_index() >= shape::CONSUMERS) {
        setmaxnreg_dec<24>();
        if (warp_index() == shape::COPIER) copy_queries<D, SIDES>(args, smem, walk);
        if (warp_index() == shape::ADDER) add_dq<D, SIDES>(args, smem, walk);
        if (warp_index() >= shape::NUMBERS) store_numbers<D, SIDES>(smem, walk);
    } else {
        setmaxnreg_inc<240>();
        consume_queries<T, D, SIDES>(args.attn, smem, walk);
    }
}

template <class T, int D> rt_status attn_bwd_sm90(const rt_attn_bwd_params &p, void *stream) {
    const rt_attn_block &b = p.block;
    using shape = backward_sm90_shape<D, ONE_SIDE>;
    const auto kernel =
        b.key_begin == NULL ? attn_bwd_sm90_kernel<T, D, ONE_SIDE> : attn_bwd_sm90_kernel<T, D, TWO_SIDES>;
    return for_runs(p, [&](const bwd_args &attn) {
        attn_bwd_sm90_args args = {attn, {}, {}, {}, {}, {}};
        divide_heads<shape::KEYS>(args.attn, 1);
        const bool mapped =
            map_queries(args.q, b, q_of<T>(b), shape::TILE) && map_queries(args.dout, b, dout_of<T>(p), shape::TILE) &&
            map_queries(args.dq, b, dq_of(p), shape::BOX_ROWS) && map_keys(args.k, b, k_of<T>(b), shape::KEYS) &&
            map_keys(args.v, b, v_of<T>(b), shape::KEYS);
        if (!mapped) return RT_CUDA;
        const rt_status status = fill_workspace<shape::TILE, shape::KEYS>(args.attn, stream);
        return status != RT_OK ? status
                               : launch(kernel, num_key_units<shape::KEYS>(attn) * args.attn.num_parts, shape::THREADS,
                                        sizeof(typename shape::shared_memory), stream, args);
    });
}

#endif // RINGTILE_CUDA_ATTN_BWD_SM90_CUH
