// Attention forward for bf16 and f16 (FlashAttention-2, arXiv:2307.08691): a block of threads merges all keys into out and
// lse of one tile of queries of one head.
//
//   per tile of keys:   S = Q K^T;  the maximum and the sum of each row go on (online softmax);  O = O * rescale + P V
//   at the end:         out -= sigmoid(lse_block - lse) * (out - O / sum),  lse = log(exp(lse) + exp(lse_block))
//
// A warp owns 16 M rows of S, so softmax needs only the four lanes that share a row, and P goes from sums to left factor
// without leaving its registers. Of K and V one tile each is in shared memory: V arrives while S is computed, the next K
// during softmax and P V.
//
// What bounds it: 2 ROWS KEYS (D + DV) multiply-adds a tile in tensor cores. A right fragment that a warp loads from
// shared memory serves its 16 M rows: at M = 2 the loads take 3/4 of the time of the products, at M = 1 5/4 of it. M = 2
// costs 4 (DV + KEYS) / 4 * 2 registers of sums, which 255 do not hold at DV = 256.
#ifndef RINGTILE_CUDA_ATTN_FWD_CUH
#define RINGTILE_CUDA_ATTN_FWD_CUH

#include "attn.cuh"
#include "attn_softmax.cuh"

// D, DV: head dims, rounded up to what is compiled; dims in between are filled with zeros.
template <int D, int DV> struct forward_shape {
    static constexpr int WARPS = 4, THREADS = 32 * WARPS;
    static constexpr int M = DV <= 128 ? 2 : 1; // fragments of rows per warp
    static constexpr int ROWS = 16 * M * WARPS, KEYS = 64;
    using walk = key_walk<ROWS, KEYS>;

    // Shared memory: Q, K, V, ranges. At most 99 KB, what a block of sm_86 and sm_89 may have.
    static constexpr int K_AT = tile<ROWS, D>::BYTES, V_AT = K_AT + tile<KEYS, D>::BYTES,
                         RANGES_AT = V_AT + tile<KEYS, DV>::BYTES, BYTES = RANGES_AT + walk::BYTES;
    static_assert(BYTES <= 99 * 1024);
};

// O += P V, 16 keys at a time: exponentials of the next keys can overlap with products of these.
template <class T, int M, int KEYS, int DV>
RT_DEVICE void add_values(sums<M, KEYS / 8> &scores, float scale_log2, const float (&reference)[2 * M],
                          tile<KEYS, DV> v, softmax_rows<M> &rows, sums<M, DV / 8> &o) {
#pragma unroll
    for (int k = 0; k < KEYS / 16; k++) {
        weigh<M, KEYS / 8>(scores, k, scale_log2, reference, rows);
        uint32_t left[M][4];
        pack_weights<T, M>(left, scores, k);
        multiply_weights<T, M>(o, left, v, k);
    }
}

template <class T, int D, int DV>
RT_KERNEL((forward_shape<D, DV>::THREADS))
attn_fwd_kernel(RT_PARAMS attn_args args) {
    using shape = forward_shape<D, DV>;
    constexpr int M = shape::M, N = shape::KEYS / 8;
    const rt_attn_params &p = args.p;

    const shared_address base = shared_base();
    const tile<shape::ROWS, D> q_tile{base};
    const tile<shape::KEYS, D> k_tile{base + shape::K_AT};
    const tile<shape::KEYS, DV> v_tile{base + shape::V_AT};
    const typename shape::walk walk{args, base + shape::RANGES_AT};

    const auto start_keys = [&](auto to, const void *array, const int64_t (&stride)[3], int64_t dim,
                                auto at) {
        load_keys<T, shape::THREADS>(to, array, stride, dim, args, at.run, at.tile * shape::KEYS);
        async_commit();
    };

    auto at = walk.first();
    if (walk.ended(at)) return finish_without_keys<shape::ROWS>(args);
    load_queries<T, shape::THREADS>(q_tile, p.q, p.q_stride, p.head_dim, args);
    start_keys(k_tile, p.k, p.k_stride, p.head_dim, at);
    fix_sign<shape::THREADS>(q_tile, p.scale);

    softmax_rows<M> rows;
    clear<M>(rows);
    sums<M, DV / 8> o;
    clear<M, DV / 8>(o);

    while (!walk.ended(at)) {
        async_wait<0>();
        block_barrier(); // K is there, and nobody reads the old V any more
        start_keys(v_tile, p.v, p.v_stride, p.v_head_dim, at);

        const bool live = walk.template any_of_warp<M>(at), full = walk.template all_of_warp<M>(at);
        sums<M, N> scores;
        if (live) {
            clear<M, N>(scores);
            multiply_rows<T, M, N>(scores, q_tile, 16 * M * warp_index(), k_tile);
            if (args.inverse_softcap > 0) cap_scores<M, N>(scores, args.cap);
            if (!full) mask_scores<M, N>(scores, walk, at);
        }
        at = walk.after(at);
        async_wait<0>();
        block_barrier(); // V is there, and nobody reads K any more
        if (!walk.ended(at)) start_keys(k_tile, p.k, p.k_stride, p.head_dim, at);

        if (live) {
            float reference[2 * M], rescale[2 * M];
            raise_top<M, N>(scores, args.scale_log2, rows, reference, rescale);
            rescale_rows<M, DV / 8>(o, rescale);
            add_values<T, M>(scores, args.scale_log2, reference, v_tile, rows, o);
        }
    }
    merge_rows(args, query_tile_of_block<shape::ROWS>(p), rows, o);
}

template <class T, int D, int DV> rt_status attn_fwd(const rt_attn_params &p, void *stream) {
    using shape = forward_shape<D, DV>;
    return for_runs(p, [&](const attn_args &args) {
        return launch(attn_fwd_kernel<T, D, DV>, query_grid<shape::ROWS>(p), shape::THREADS, shape::BYTES,
                      stream, args);
    });
}

#endif // RINGTILE_CUDA_ATTN_FWD_CUH
