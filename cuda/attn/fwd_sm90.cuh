// Attention forward for bf16 and f16 on sm_90a (the warp specialization and overlap of FlashAttention-3,
// arXiv:2407.08608): the same merge of all keys into out and lse as fwd.cuh, by a thread block of three warp
// groups.
//
//   producer    copies Q once, then K and V of each attended tile into a ring of stages
//   consumers   two groups of 64 queries each: S in registers, softmax, P as left factor from registers
//
//   consumer, tile j:   start S_j = Q K_j^T;  start O += P V_{j-1};  softmax of S_j while the latter runs;
//                       rescale O;  P
//   ping-pong:          a group starts its products when the other has started its own, so that one multiplies
//                       while the other exponentiates
//
// Each stage has two mbarriers for K and two for V: `full` completes when the bytes have arrived, `empty` when all
// consumer warps have read them. The producer group releases registers for the consumers: 24 and 240 per thread.
//
// Bound by the tensor cores, 2 ROWS KEYS (D + DV) flops a tile, with ROWS KEYS exponentials beside them. At DV = 128 a
// lane holds 64 numbers of O, 64 of S, and 32 words of P; at DV = 256, with tiles of 64 keys, 128, 32 and 16.
#ifndef RINGTILE_CUDA_ATTN_FWD_SM90_CUH
#define RINGTILE_CUDA_ATTN_FWD_SM90_CUH

#include "attn.cuh"
#include "softmax.cuh"
#include "tma_tile.cuh"

struct attn_sm90_args {
    fwd_args attn;
    tensor_map q, k, v, out; // out: of rounded_out, if there is one
};

template <int D, int DV, int SIDES> struct forward_sm90_shape {
    static constexpr int CONSUMERS = 8, THREADS = 32 * CONSUMERS + 128; // consumer warps; threads
    static constexpr int ROWS = 16 * CONSUMERS, KEYS = DV <= 128 ? 128 : 64, STAGES = D == 64 ? 4 : 2;
    static constexpr int QUERY_PANEL = ROWS * 128, KEY_PANEL = KEYS * 128; // bytes
    static constexpr int OUT_ROWS = 16;                                    // of a warp
    static_assert(D >= DV);                                                // rounded out takes the place of q
    using walk = key_walk<ROWS, KEYS, SIDES>;

    struct shared_memory {
        panels<ROWS, D> q;
        panels<KEYS, D> k[STAGES];
        panels<KEYS, DV> v[STAGES];
        typename walk::storage ranges;
        mbarrier q_full;
        mbarrier k_full[STAGES], v_full[STAGES], k_empty[STAGES], v_empty[STAGES];
    };
    static_assert(sizeof(shared_memory) <= MAX_SHARED_BYTES_SM90);
    using shared = shared_ref<shared_memory>;
};

// A stage of the ring, and the parity of its current phases.
template <int STAGES> struct ring_place {
    int stage = 0, parity = 0;
    RT_DEVICE void step() {
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        parity ^= stage == 0;
    }
};

template <int D, int DV, int SIDES>
RT_DEVICE void init_mbarriers(typename forward_sm90_shape<D, DV, SIDES>::shared smem) {
    using shape = forward_sm90_shape<D, DV, SIDES>;
    mbarrier_init(RT_SHARED(smem, q_full), 1);
    for (int stage = 0; stage < shape::STAGES; stage++) {
        mbarrier_init(RT_SHARED(smem, k_full)[stage], 1);
        mbarrier_init(RT_SHARED(smem, v_full)[stage], 1);
        mbarrier_init(RT_SHARED(smem, k_empty)[stage], shape::CONSUMERS);
        mbarrier_init(RT_SHARED(smem, v_empty)[stage], shape::CONSUMERS);
    }
    fence_mbarrier_init();
}

// One thread of the producer group copies; its other warps take part in the walk.
template <int D, int DV, int SIDES>
RT_DEVICE void produce(const attn_sm90_args &args, typename forward_sm90_shape<D, DV, SIDES>::shared smem,
                       const typename forward_sm90_shape<D, DV, SIDES>::walk &walk,
                       typename forward_sm90_shape<D, DV, SIDES>::walk::place at) {
    using shape = forward_sm90_shape<D, DV, SIDES>;
    constexpr int ROWS = shape::ROWS, KEYS = shape::KEYS;
    const bool copies = thread_index() == 32 * shape::CONSUMERS;
    if (copies) {
        const query_tile queries = query_tile_of_cta<ROWS>(args.attn);
        const auto full = RT_SHARED(smem, q_full);
        mbarrier_arrive_expect_tx(full, sizeof(panels<ROWS, D>));
        copy_tile<ROWS, D>(RT_SHARED(smem, q), full, args.q, queries.first_token, queries.head, queries.batch);
    }
    for (ring_place<shape::STAGES> next; !walk.ended(at); at = walk.after(at), next.step()) {
        if (copies) {
            const key_tile keys = walk.keys(at);
            const auto k_full = RT_SHARED(smem, k_full)[next.stage], v_full = RT_SHARED(smem, v_full)[next.stage];
            mbarrier_wait_parity(RT_SHARED(smem, k_empty)[next.stage], next.parity ^ 1);
            mbarrier_arrive_expect_tx(k_full, sizeof(panels<KEYS, D>));
            copy_keys<KEYS, D>(RT_SHARED(smem, k)[next.stage], k_full, args.k, args.attn, keys);
            mbarrier_wait_parity(RT_SHARED(smem, v_empty)[next.stage], next.parity ^ 1);
            mbarrier_arrive_expect_tx(v_full, sizeof(panels<KEYS, DV>));
            copy_keys<KEYS, DV>(RT_SHARED(smem, v)[next.stage], v_full, args.v, args.attn, keys);
        }
        syncwarp();
    }
}

// Merges a warp's rows and rounds them into its rows of q, which nothing reads any more; bulk copies store them.
template <class T, int D, int DV, int SIDES>
RT_DEVICE void store_rounded(const attn_sm90_args &args, typename forward_sm90_shape<D, DV, SIDES>::shared smem,
                             const softmax_rows<1> &rows, const accumulator<1, DV / 8> &o) {
    using shape = forward_sm90_shape<D, DV, SIDES>;
    const rt_attn_fwd_params &p = args.attn.fwd;
    const query_tile at = query_tile_of_cta<shape::ROWS>(args.attn);
    const int lane_col = lane_index() % 4 * 2;
    merge_rows(args.attn, at, rows, [&](int r, int token, bool read, auto combine) {
        const float *const out = out_of(p).at(at.batch, token, at.head) + lane_col;
#pragma unroll
        for (int panel = 0; panel < DV / 64; panel++) {
            const tile<shape::ROWS, 64> to{RT_SHARED(smem, q) +
                                           (shared_address)(panel * shape::QUERY_PANEL)}; // swizzled alike
            const auto chunks = to.chunks_from(lane_row<1>(r), 0);
            float_pair kept[8];
#pragma unroll
            for (int n = 0; n < 8; n++) {
                const int col = 64 * panel + 8 * n;
                kept[n] = {0, 0};
                if (read && col < p.block.v_head_dim) kept[n] = ld_global((const float_pair *)(out + col));
            }
#pragma unroll
            for (int n = 0; n < 8; n++) {
                const float (&x)[4] = o[0][8 * panel + n];
                st_shared(chunks.at(0, n) + (shared_address)(2 * lane_col),
                          cvt_rn_x2<T>(combine(kept[n].x[0], x[2 * r]), combine(kept[n].x[1], x[2 * r + 1])));
            }
        }
    });
    fence_proxy_async_shared();
    syncwarp();
    if (lane_index() != 0) return;
    const int row = shape::OUT_ROWS * warp_index();
    for (int panel = 0; panel < DV / 64; panel++)
        cp_async_bulk_tensor_4d(args.out, RT_SHARED(smem, q) + (shared_address)(panel * shape::QUERY_PANEL + row * 128),
                                64 * panel, at.first_token + row, at.head, at.batch);
    cp_async_bulk_commit_group();
    cp_async_bulk_wait_group_read<0>(); // the thread block's shared memory ends with it
}

template <class T, int D, int DV, int SIDES>
RT_DEVICE void consume(const attn_sm90_args &all, typename forward_sm90_shape<D, DV, SIDES>::shared smem,
                       const typename forward_sm90_shape<D, DV, SIDES>::walk &walk,
                       typename forward_sm90_shape<D, DV, SIDES>::walk::place at) {
    using shape = forward_sm90_shape<D, DV, SIDES>;
    const fwd_args &args = all.attn;
    constexpr int KEYS = shape::KEYS, N = KEYS / 8, O_COLS = DV / 8;
    ring_place<shape::STAGES> k_at, v_at;
    softmax_rows<1> rows;
    clear<1>(rows);
    accumulator<1, O_COLS> o;
    clear<1, O_COLS>(o);
    accumulator<1, N> scores;
    uint32_t weights[KEYS / 16][1][4];
    float rescale[2];
    const int group = shfl_sync(warp_index() / 4, 0); // shows the compiler that it is uniform in the warp
    const uint64_t q = make_smem_desc(RT_SHARED(smem, q) + (shared_address)(group * 64 * 128), 0);

    const auto start_scores = [&] { // S = Q K^T
        const uint64_t k = make_smem_desc(RT_SHARED(smem, k)[k_at.stage], 0);
        mbarrier_wait_parity(RT_SHARED(smem, k_full)[k_at.stage], k_at.parity);
        warpgroup_fence_operand(scores[0]);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < D / 16; i++) {
            wgmma_mma_async_ss<T, major::K>(scores[0], advance_smem_desc(q, i / 4 * shape::QUERY_PANEL + i % 4 * 32),
                                            advance_smem_desc(k, i / 4 * shape::KEY_PANEL + i % 4 * 32), i > 0);
        }
        wgmma_commit_group();
    };
    const auto start_values = [&] { // O += P V
        const uint64_t v = make_smem_desc(RT_SHARED(smem, v)[v_at.stage], shape::KEY_PANEL);
        mbarrier_wait_parity(RT_SHARED(smem, v_full)[v_at.stage], v_at.parity);
        warpgroup_fence_operand(o[0]);
#pragma unroll
        for (int i = 0; i < KEYS / 16; i++) warpgroup_fence_operand(weights[i]);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < KEYS / 16; i++)
            wgmma_mma_async_rs<T>(o[0], weights[i][0], advance_smem_desc(v, i * 16 * 128));
        wgmma_commit_group();
    };
    const auto softmax = [&] { // S becomes P, in f32
        if (args.p.scale <= 0) fix_sign<1, N>(scores, args.p.scale);
        if (args.inverse_softcap > 0) cap_scores<1, N>(scores, args.cap);
        if (!walk.template all_of_warp<1>(at)) mask_scores<1, N>(scores, walk, at);
        float reference[2];
        update_max<1, N>(scores, args.scale_log2, rows, reference, rescale);
#pragma unroll
        for (int i = 0; i < KEYS / 16; i++) exponentiate<1, N>(scores, i, args.scale_log2, reference, rows);
        warpgroup_fence_operand(scores[0]); // keeps the exponentials before the wait for O
    };
    const auto round_weights = [&] {
#pragma unroll
        for (int i = 0; i < KEYS / 16; i++) round_to_factor<T, 1>(weights[i], scores, i);
    };
    // Ping-pong: group g waits at named barrier 1 + g until the other group arrives there. Group 0 goes first.
    const auto wait_for_other_group = [&] { named_barrier_sync(1 + group, 32 * shape::CONSUMERS); };
    const auto release_other_group = [&] { named_barrier_arrive(2 - group, 32 * shape::CONSUMERS); };

    mbarrier_wait_parity(RT_SHARED(smem, q_full), 0);
    start_scores();
    wgmma_wait_group<0>(scores[0]);
    if (group == 1) release_other_group();
    arrive_as_warp(RT_SHARED(smem, k_empty)[k_at.stage]);
    softmax();
    round_weights();
    for (auto next = walk.after(at); !walk.ended(next);) {
        at = next;
        k_at.step();
        wait_for_other_group();
        start_scores();
        start_values();
        release_other_group();
        wgmma_wait_group<1>(scores[0]);
        arrive_as_warp(RT_SHARED(smem, k_empty)[k_at.stage]);
        softmax();
        next = walk.after(at); // its branches keep the exponentials of softmax() before the wait
        wgmma_wait_group<0>(o[0]);
        arrive_as_warp(RT_SHARED(smem, v_empty)[v_at.stage]);
        v_at.step();
        rescale_rows<1, O_COLS>(o, rescale);
        round_weights();
    }
    wait_for_other_group(); // and for the group's own warps, which are done with their last product with q
    start_values();
    if (group == 0) release_other_group();
    wgmma_wait_group<0>(o[0]);
    if (args.fwd.rounded_out != nullptr) return store_rounded<T, D, DV, SIDES>(all, smem, rows, o);
    const query_tile tile = query_tile_of_cta<shape::ROWS>(args);
    merge_rows(args, tile, rows,
               [&](int r, int token, bool read, auto combine) { update_out(args, tile, o, r, token, read, combine); });
}

template <class T, int D, int DV, int SIDES>
RT_KERNEL((forward_sm90_shape<D, DV, SIDES>::THREADS), 1)
attn_fwd_sm90_kernel(RT_PARAMS attn_sm90_args args) {
    using shape = forward_sm90_shape<D, DV, SIDES>;
    const typename shape::shared smem{shared_base()};
    const typename shape::walk walk{args.attn, RT_SHARED(smem, ranges)};
    if (thread_index() == 0) init_mbarriers<D, DV, SIDES>(smem);
    if (thread_index() == 32 * shape::CONSUMERS) {
        prefetch_tensormap(args.q);
        prefetch_tensormap(args.k);
        prefetch_tensormap(args.v);
        if (args.attn.fwd.rounded_out != nullptr) prefetch_tensormap(args.out);
    }
    syncthreads();
    const auto first = walk.first();
    if (walk.ended(first)) return finish_without_keys<T, shape::ROWS>(args.attn);
    if (warp_index() >= shape::CONSUMERS) {
        setmaxnreg_dec<24>();
        produce<D, DV, SIDES>(args, smem, walk, first);
    } else {
        setmaxnreg_inc<240>();
        consume<T, D, DV, SIDES>(args, smem, walk, first);
    }
}

template <class T, int D, int DV> rt_status attn_fwd_sm90(const rt_attn_fwd_params &p, void *stream) {
    const rt_attn_block &b = p.block;
    using shape = forward_sm90_shape<D, DV, ONE_SIDE>;
    const auto kernel =
        b.key_begin == NULL ? attn_fwd_sm90_kernel<T, D, DV, ONE_SIDE> : attn_fwd_sm90_kernel<T, D, DV, TWO_SIDES>;
    return for_runs(p, [&](const fwd_args &attn) {
        attn_sm90_args args;
        args.attn = attn;
        args.attn.section = kv_heads_of_section(b);
        int64_t stride[3];
        rounded_out_strides(b, stride);
        const token_rows<T> out = {(T *)p.rounded_out, stride, b.v_head_dim};
        const bool mapped = map_queries(args.q, b, q_of<T>(b), shape::ROWS) &&
                            map_keys(args.k, b, k_of<T>(b), shape::KEYS) &&
                            map_keys(args.v, b, v_of<T>(b), shape::KEYS) &&
                            (attn.fwd.rounded_out == nullptr || map_queries(args.out, b, out, shape::OUT_ROWS));
        if (!mapped) return RT_CUDA;
        const rt_status status = fill_mask_tiles<shape::ROWS, shape::KEYS>(args.attn, b.workspace, stream);
        if (status != RT_OK) return status;
        return launch(kernel, query_grid<shape::ROWS>(args.attn), shape::THREADS, sizeof(typename shape::shared_memory),
                      stream, args);
    });
}

#endif // RINGTILE_CUDA_ATTN_FWD_SM90_CUH
