// Attention forward for bf16 and f16 (FlashAttention-2, arXiv:2307.08691): a thread block merges all keys into out
// and lse of one tile of queries of one head.
//
//   per tile of keys:   S = Q K^T;  update the running max and sum (online softmax);  O = O * rescale + P V
//   at the end:         out -= sigmoid(lse_block - lse) * (out - O / sum),  lse = log(exp(lse) + exp(lse_block))
//
// A warp owns 16 M rows of S, so the softmax involves only the four lanes that share a row, and P goes from
// accumulator to left factor without leaving its registers. Shared memory holds one tile each of K and V: V arrives
// while S is computed, the next K during softmax and P V.
//
// Bound by the tensor cores, 2 ROWS KEYS (D + DV) flops a tile, or by loads from shared memory: a right fragment
// that a warp loads serves its 16 M rows. At M = 2 the loads take 3/4 of the time of the products, at M = 1 they
// take 5/4. M = 2 costs 4 (DV + KEYS) / 4 * 2 registers of accumulators, too many of the 255 at DV = 256.
#ifndef RINGTILE_CUDA_ATTN_FWD_CUH
#define RINGTILE_CUDA_ATTN_FWD_CUH

#include "attn.cuh"
#include "softmax.cuh"

// D, DV: head dims, rounded up to compiled ones; the dims in between are zeros.
template <int D, int DV> struct forward_shape {
    static constexpr int WARPS = 4, THREADS = 32 * WARPS;
    static constexpr int M = DV <= 128 ? 2 : 1; // fragments of rows per warp
    static constexpr int ROWS = 16 * M * WARPS, KEYS = 64;
    using walk = key_walk<ROWS, KEYS>;

    struct shared_memory {
        typename tile<ROWS, D>::storage q;
        typename tile<KEYS, D>::storage k;
        typename tile<KEYS, DV>::storage v;
        typename walk::storage ranges;
    };
    static_assert(sizeof(shared_memory) <= MAX_SHARED_BYTES);
};

// O += P V, 16 keys at a time, so that exponentials of the next keys can overlap with products of these.
template <class T, int M, int KEYS, int DV>
RT_DEVICE void add_values(accumulator<M, KEYS / 8> &scores, float scale_log2, const float (&reference)[2 * M],
                          tile<KEYS, DV> v, softmax_rows<M> &rows, accumulator<M, DV / 8> &o) {
#pragma unroll
    for (int k = 0; k < KEYS / 16; k++) {
        exponentiate<M, KEYS / 8>(scores, k, scale_log2, reference, rows);
        uint32_t weights[M][4];
        round_to_factor<T, M>(weights, scores, k);
        gemm_rs<T, M>(o, weights, v, k);
    }
}

template <class T, int D, int DV> RT_KERNEL((forward_shape<D, DV>::THREADS)) attn_fwd_kernel(RT_PARAMS fwd_args args) {
    using shape = forward_shape<D, DV>;
    constexpr int M = shape::M, N = shape::KEYS / 8, THREADS = shape::THREADS;
    const rt_attn_block &p = args.p;
    const rt_attn_fwd_params &to = args.fwd;

    const shared_ref<typename shape::shared_memory> smem{shared_base()};
    const tile<shape::ROWS, D> q{RT_SHARED(smem, q)};
    const tile<shape::KEYS, D> k{RT_SHARED(smem, k)};
    const tile<shape::KEYS, DV> v{RT_SHARED(smem, v)};
    const typename shape::walk walk{args, RT_SHARED(smem, ranges)};

    auto at = walk.first();
    if (walk.ended(at)) return finish_without_keys<T, shape::ROWS>(args);
    load_queries<THREADS>(q, q_of<T>(p), args);
    load_keys<THREADS>(k, k_of<T>(p), args, walk.keys(at));
    cp_async_commit_group();
    fix_sign<THREADS>(q, p.scale);

    softmax_rows<M> rows;
    clear<M>(rows);
    accumulator<M, DV / 8> o;
    clear<M, DV / 8>(o);

    while (!walk.ended(at)) {
        cp_async_wait_group<0>();
        syncthreads(); // K has arrived, and all warps are done with the previous V
        load_keys<THREADS>(v, v_of<T>(p), args, walk.keys(at));
        cp_async_commit_group();

        const bool any = walk.template any_of_warp<M>(at), all = walk.template all_of_warp<M>(at);
        accumulator<M, N> scores;
        if (any) {
            clear<M, N>(scores);
            gemm_ss<T, M, N>(scores, q, 16 * M * warp_index(), k);
            if (args.inverse_softcap > 0) cap_scores<M, N>(scores, args.cap);
            if (!all) mask_scores<M, N>(scores, walk, at);
        }
        at = walk.after(at);
        cp_async_wait_group<0>();
        syncthreads(); // V has arrived, and all warps are done with K
        if (!walk.ended(at)) {
            load_keys<THREADS>(k, k_of<T>(p), args, walk.keys(at));
            cp_async_commit_group();
        }

        if (any) {
            float reference[2 * M], rescale[2 * M];
            update_max<M, N>(scores, args.scale_log2, rows, reference, rescale);
            rescale_rows<M, DV / 8>(o, rescale);
            add_values<T, M>(scores, args.scale_log2, reference, v, rows, o);
        }
    }
    const query_tile tile = query_tile_of_cta<shape::ROWS>(args);
    merge_rows(args, tile, rows, [&](int r, int token, bool read, auto combine) {
        if (to.rounded_out == nullptr) return update_out(args, tile, o, r, token, read, combine);
        update_row(out_of(to).at(tile.batch, token, tile.head), rounded_out_at<T>(to, tile.batch, token, tile.head),
                   (int)p.v_head_dim, args.in_pairs, read, o, r, combine);
    });
}

template <class T, int D, int DV> rt_status attn_fwd(const rt_attn_fwd_params &p, void *stream) {
    using shape = forward_shape<D, DV>;
    return for_runs(p, [&](fwd_args args) {
        args.section = kv_heads_of_section(p.block);
        const rt_status status = fill_mask_tiles<shape::ROWS, shape::KEYS>(args, p.block.workspace, stream);
        if (status != RT_OK) return status;
        return launch(attn_fwd_kernel<T, D, DV>, query_grid<shape::ROWS>(args), shape::THREADS,
                      sizeof(typename shape::shared_memory), stream, args);
    });
}

#endif // RINGTILE_CUDA_ATTN_FWD_CUH
