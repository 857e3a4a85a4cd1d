// Attention forward for bf16 and f16 on sm_90a (the warp specialization and the overlap of FlashAttention-3,
// arXiv:2407.08608): the same merge of all keys into out and lse as attn_fwd.cuh, by a block of three warp groups.
//
//   producer    copies Q once, and K and V of one live tile after the other into a ring of stages
//   consumers   two groups, 64 queries each: S in registers, softmax, P as left factor from registers
//
//   consumer, per tile j:   start S_j = Q K_j^T;  start O += P V_{j-1};  softmax of S_j while the latter runs;  rescale O, P
//   by turns:               the one group starts its products when the other has started those before (ping-pong)
//
// A stage has two barriers for each of K and V: `full` when the bytes are there, `empty` when all consumer warps have read
// them. The producer's group gives back registers that the consumers take: 24 and 240 of each thread.
//
// What bounds it: 2 ROWS KEYS 2 D multiply-adds a tile in tensor cores, ROWS KEYS exponentials beside them. At D = 128 a
// lane holds 64 numbers of O, 64 of S and 32 words of P.
#ifndef RINGTILE_CUDA_ATTN_FWD_SM90_CUH
#define RINGTILE_CUDA_ATTN_FWD_SM90_CUH

#include "attn.cuh"
#include "attn_sm90.cuh"
#include "attn_softmax.cuh"

struct attn_sm90_args {
    attn_args attn;
    tensor_map q, k[MAX_RUNS_SM90], v[MAX_RUNS_SM90];
};
static_assert(sizeof(attn_sm90_args) <= 4096); // what every driver takes

template <int D> struct forward_sm90_shape {
    static constexpr int CONSUMERS = 8, THREADS = 32 * CONSUMERS + 128; // warps that consume; threads
    static constexpr int ROWS = 16 * CONSUMERS, KEYS = 128, STAGES = D == 64 ? 4 : 2;
    using walk = key_walk<ROWS, KEYS>;

    // Shared memory: Q, K and V of every stage, ranges, barriers. Rows lie in panels of 64 columns.
    static constexpr int Q_BYTES = ROWS * D * 2, KEY_BYTES = KEYS * D * 2, PANEL_BYTES = KEYS * 128;
    static constexpr int K_AT = Q_BYTES, V_AT = K_AT + STAGES * KEY_BYTES,
                         RANGES_AT = V_AT + STAGES * KEY_BYTES, BARRIERS_AT = RANGES_AT + walk::BYTES,
                         BYTES = BARRIERS_AT + 8 * (1 + 4 * STAGES);
    static_assert(ROWS == KEYS); // one size of boxes
    static_assert(BYTES <= 227 * 1024);
};

// A place in the ring, and the parity of its phases.
template <int STAGES> struct ring_place {
    int stage = 0, parity = 0;
    RT_DEVICE void step() {
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        parity ^= stage == 0;
    }
};

template <int D> struct forward_ring {
    using shape = forward_sm90_shape<D>;
    shared_address base;
    enum purpose { K_FULL, V_FULL, K_EMPTY, V_EMPTY };

    RT_DEVICE shared_address q() const { return base; }
    RT_DEVICE shared_address k(int stage) const {
        return base + (shared_address)(shape::K_AT + stage * shape::KEY_BYTES);
    }
    RT_DEVICE shared_address v(int stage) const {
        return base + (shared_address)(shape::V_AT + stage * shape::KEY_BYTES);
    }
    RT_DEVICE shared_address q_full() const { return base + shape::BARRIERS_AT; }
    RT_DEVICE shared_address barrier(purpose purpose, int stage) const {
        return base + (shared_address)(shape::BARRIERS_AT + 8 * (1 + purpose * shape::STAGES + stage));
    }

    RT_DEVICE void init_barriers() const {
        barrier_init(q_full(), 1);
        for (int stage = 0; stage < shape::STAGES; stage++) {
            barrier_init(barrier(K_FULL, stage), 1);
            barrier_init(barrier(V_FULL, stage), 1);
            barrier_init(barrier(K_EMPTY, stage), shape::CONSUMERS);
            barrier_init(barrier(V_EMPTY, stage), shape::CONSUMERS);
        }
        barrier_init_fence();
    }
};

// One warp of the group copies, by one thread; the walk is that of all warps.
template <int D>
RT_DEVICE void produce(const attn_sm90_args &args, const forward_ring<D> &ring,
                       const typename forward_sm90_shape<D>::walk &walk,
                       typename forward_sm90_shape<D>::walk::place at) {
    using shape = forward_sm90_shape<D>;
    using ring_of = forward_ring<D>;
    const bool copies = thread_index() == 32 * shape::CONSUMERS;
    if (copies) {
        const query_tile queries = query_tile_of_block<shape::ROWS>(args.attn.p);
        barrier_arrive_expecting(ring.q_full(), shape::Q_BYTES);
        copy_tile<shape::ROWS, D>(ring.q(), ring.q_full(), args.q, queries.first_token, queries.head,
                                  queries.batch);
    }
    for (ring_place<shape::STAGES> next; !walk.ended(at); at = walk.after(at), next.step()) {
        if (copies) {
            const int row = at.tile * shape::KEYS, head = block_index_y(), batch = block_index_z();
            const shared_address k_full = ring.barrier(ring_of::K_FULL, next.stage),
                                 v_full = ring.barrier(ring_of::V_FULL, next.stage);
            barrier_wait(ring.barrier(ring_of::K_EMPTY, next.stage), next.parity ^ 1);
            barrier_arrive_expecting(k_full, shape::KEY_BYTES);
            copy_tile<shape::KEYS, D>(ring.k(next.stage), k_full, args.k[at.run], row, head, batch);
            barrier_wait(ring.barrier(ring_of::V_EMPTY, next.stage), next.parity ^ 1);
            barrier_arrive_expecting(v_full, shape::KEY_BYTES);
            copy_tile<shape::KEYS, D>(ring.v(next.stage), v_full, args.v[at.run], row, head, batch);
        }
        warp_barrier();
    }
}

template <class T, int D>
RT_DEVICE void consume(const attn_args &args, const forward_ring<D> &ring,
                       const typename forward_sm90_shape<D>::walk &walk,
                       typename forward_sm90_shape<D>::walk::place at) {
    using shape = forward_sm90_shape<D>;
    using ring_of = forward_ring<D>;
    constexpr int KEYS = shape::KEYS, N = KEYS / 8, O_COLS = D / 8;
    ring_place<shape::STAGES> k_at, v_at;
    softmax_rows<1> rows;
    clear<1>(rows);
    sums<1, O_COLS> o;
    clear<1, O_COLS>(o);
    sums<1, N> scores;
    uint32_t weights[KEYS / 16][1][4];
    float rescale[2];
    const int group =
        shuffle(warp_index() / 4, 0); // one number for the whole warp, and the compiler sees that
    const uint64_t q = factor_at(ring.q() + (shared_address)(group * 64 * 128), 0);

    // S = Q K^T.
    const auto start_scores = [&] {
        const uint64_t k = factor_at(ring.k(k_at.stage), 0);
        barrier_wait(ring.barrier(ring_of::K_FULL, k_at.stage), k_at.parity);
        pin(scores[0]);
        products_fence();
#pragma unroll
        for (int i = 0; i < D / 16; i++) {
            const int from = i / 4 * shape::PANEL_BYTES + i % 4 * 32;
            multiply_rows_async<T>(scores[0], factor_after(q, from), factor_after(k, from), i > 0);
        }
        products_commit();
    };
    // O += P V.
    const auto start_values = [&] {
        const uint64_t v = factor_at(ring.v(v_at.stage), shape::PANEL_BYTES);
        barrier_wait(ring.barrier(ring_of::V_FULL, v_at.stage), v_at.parity);
        pin(o[0]);
#pragma unroll
        for (int i = 0; i < KEYS / 16; i++) pin(weights[i]);
        products_fence();
#pragma unroll
        for (int i = 0; i < KEYS / 16; i++)
            multiply_async<T>(o[0], weights[i][0], factor_after(v, i * 16 * 128));
        products_commit();
    };
    // Scores become weights, in f32.
    const auto soften = [&] {
        if (args.p.scale <= 0) fix_sign<1, N>(scores, args.p.scale);
        if (args.inverse_softcap > 0) cap_scores<1, N>(scores, args.cap);
        if (!walk.template all_of_warp<1>(at)) mask_scores<1, N>(scores, walk, at);
        float reference[2];
        raise_top<1, N>(scores, args.scale_log2, rows, reference, rescale);
#pragma unroll
        for (int i = 0; i < KEYS / 16; i++) weigh<1, N>(scores, i, args.scale_log2, reference, rows);
        pin(scores[0]); // not after the wait for the values
    };
    // The groups start their products by turns, so that one has products running while the other takes exponentials. A
    // group's barrier is passed when the other one has given it the turn; group 0 begins.
    const auto wait_for_turn = [&] { part_barrier(1 + group, 32 * shape::CONSUMERS); };
    const auto give_turn = [&] { part_barrier_arrive(2 - group, 32 * shape::CONSUMERS); };
    const auto round_weights = [&] {
#pragma unroll
        for (int i = 0; i < KEYS / 16; i++) pack_weights<T, 1>(weights[i], scores, i);
    };

    barrier_wait(ring.q_full(), 0);
    start_scores();
    products_wait<0>(scores[0]);
    if (group == 1) give_turn();
    arrive_as_warp(ring.barrier(ring_of::K_EMPTY, k_at.stage));
    soften();
    round_weights();
    for (auto next = walk.after(at); !walk.ended(next);) {
        at = next;
        k_at.step();
        wait_for_turn();
        start_scores();
        start_values();
        give_turn();
        products_wait<1>(scores[0]);
        arrive_as_warp(ring.barrier(ring_of::K_EMPTY, k_at.stage));
        soften();
        next = walk.after(at); // its branches keep the exponentials of soften() before the wait
        products_wait<0>(o[0]);
        arrive_as_warp(ring.barrier(ring_of::V_EMPTY, v_at.stage));
        v_at.step();
        rescale_rows<1, O_COLS>(o, rescale);
        round_weights();
    }
    wait_for_turn();
    start_values();
    if (group == 0) give_turn();
    products_wait<0>(o[0]);
    merge_rows(args, query_tile_of_block<shape::ROWS>(args.p), rows, o);
}

template <class T, int D>
RT_KERNEL((forward_sm90_shape<D>::THREADS), 1)
attn_fwd_sm90_kernel(RT_PARAMS attn_sm90_args args) {
    using shape = forward_sm90_shape<D>;
    const shared_address base = shared_base();
    const forward_ring<D> ring{base};
    const typename shape::walk walk{args.attn, base + shape::RANGES_AT};
    if (thread_index() == 0) ring.init_barriers();
    block_barrier();
    const auto first = walk.first();
    if (walk.ended(first)) return finish_without_keys<shape::ROWS>(args.attn);
    if (warp_index() >= shape::CONSUMERS) {
        give_registers<24>();
        produce<D>(args, ring, walk, first);
    } else {
        take_registers<240>();
        consume<T, D>(args.attn, ring, walk, first);
    }
}

template <class T, int D> rt_status attn_fwd_sm90(const rt_attn_params &p, void *stream) {
    using shape = forward_sm90_shape<D>;
    return for_runs(
        p,
        [&](const attn_args &attn) {
            attn_sm90_args args;
            args.attn = attn;
            const bool mapped = map_rows<T>(args.q, p.q, p.q_stride, p.batch, 0, p.num_queries, p.num_heads,
                                            p.head_dim, shape::ROWS) &&
                                map_keys<T>(args.k, attn, p.k, p.k_stride, p.head_dim, shape::KEYS) &&
                                map_keys<T>(args.v, attn, p.v, p.v_stride, p.v_head_dim, shape::KEYS);
            if (!mapped) return RT_CUDA;
            return launch(attn_fwd_sm90_kernel<T, D>, query_grid<shape::ROWS>(p), shape::THREADS,
                          shape::BYTES, stream, args);
        },
        MAX_RUNS_SM90);
}

#endif // RINGTILE_CUDA_ATTN_FWD_SM90_CUH
