// Attention backward for bf16 and f16 on sm_90a: the same pass, sums and turns as attn_bwd.cuh, by a block of three warp
// groups (the warp specialization of FlashAttention-3, arXiv:2407.08608).
//
//   feeder      one warp: K and V once, then Q, dout and the numbers of one live tile of queries after the other, into a ring
//   consumers   two groups, 64 keys each:   S^T = K Q^T,   dP^T = V dout^T,   dv += P^T dout,   dk += dS^T Q   with P and dS
//               from registers; dS^T goes to shared memory, for 64 x 64 numbers of dq = dS K of each group, and those back
//   adder       one warp: waits for the block's turn, and has bulk copies add dq to global memory
//
// A stage is full when the bytes and numbers are there, and empty when consumers and adder have read them. dS^T has two
// places by turns, so that one barrier of the consumers a tile is enough. dq has one: the adder empties it while the next
// tile is worked on, so nobody waits for a turn that comes within that time.
//
// At D = 128 a lane of a consumer holds 64 numbers each of dk and dv, 32 of S and dP, and later 32 of dq. At D = 64 it would
// have 32 of dq only: so a tile has 128 queries there, worked on in two halves, and each group has one half of dq.
#ifndef RINGTILE_CUDA_ATTN_BWD_SM90_CUH
#define RINGTILE_CUDA_ATTN_BWD_SM90_CUH

#include "attn_bwd.cuh"
#include "attn_sm90.cuh"

struct attn_bwd_sm90_args {
    attn_args attn;
    tensor_map q, dout, dq, k[MAX_RUNS_SM90], v[MAX_RUNS_SM90];
};
static_assert(sizeof(attn_bwd_sm90_args) <= 4096); // what every driver takes

template <int D> struct backward_sm90_shape {
    static constexpr int CONSUMERS = 8, THREADS = 32 * CONSUMERS + 128; // warps that consume; threads
    static constexpr int FEEDER = CONSUMERS, ADDER = CONSUMERS + 1;     // warps
    static constexpr int KEYS = 16 * CONSUMERS, QUERIES = 64, PARTS = 128 / D, TILE = QUERIES * PARTS;
    using walk = query_walk<KEYS, TILE>;

    // Tiles that bulk copies bring or take, in panels of 128 bytes a row: K, V, Q, dout, and the boxes of dq.
    static constexpr int KEY_BYTES = KEYS * D * 2, KEY_PANEL = KEYS * 128;
    static constexpr int QUERY_BYTES = TILE * D * 2, QUERY_PANEL = TILE * 128;
    static constexpr int BOXES = 4, BOX_ROWS = 64, BOX_COLS = 32, BOX_BYTES = BOX_ROWS * BOX_COLS * 4;
    using dscore_tile = tile<KEYS, QUERIES>; // dS^T of a part
    static constexpr int DSCORE_BYTES = PARTS * dscore_tile::BYTES;

    static constexpr int V_AT = KEY_BYTES, Q_AT = V_AT + KEY_BYTES, DOUT_AT = Q_AT + 2 * QUERY_BYTES,
                         DS_AT = DOUT_AT + 2 * QUERY_BYTES, DQ_AT = DS_AT + 2 * DSCORE_BYTES,
                         STAGE_AT = DQ_AT + BOXES * BOX_BYTES;
    // Of a stage, from its begin on.
    static constexpr int INTERVALS_AT = 0, SUMS_AT = INTERVALS_AT + TILE * (int)sizeof(tile_bounds),
                         PLACE_AT = SUMS_AT + TILE * (int)sizeof(query_sums), STAGE_BYTES = PLACE_AT + 16;
    static constexpr int KEYS_AT = STAGE_AT + 2 * STAGE_BYTES, BARRIERS_AT = KEYS_AT + walk::BYTES,
                         BYTES = BARRIERS_AT + 8 * (3 + 2 * 2);
    static_assert(BYTES <= 227 * 1024);
};

// The n-th tile of queries is in stage n % 2, whose barriers' phases are of this parity.
RT_DEVICE int parity_of(int n) { return n / 2 % 2; }

template <int D> struct backward_ring {
    using shape = backward_sm90_shape<D>;
    shared_address base;

    RT_DEVICE shared_address k() const { return base; }
    RT_DEVICE shared_address v() const { return base + shape::V_AT; }
    RT_DEVICE shared_address q(int stage) const {
        return base + (shared_address)(shape::Q_AT + stage * shape::QUERY_BYTES);
    }
    RT_DEVICE shared_address dout(int stage) const {
        return base + (shared_address)(shape::DOUT_AT + stage * shape::QUERY_BYTES);
    }
    RT_DEVICE shared_address dscores(int place) const {
        return base + (shared_address)(shape::DS_AT + place * shape::DSCORE_BYTES);
    }
    RT_DEVICE shared_address box(int box) const {
        return base + (shared_address)(shape::DQ_AT + box * shape::BOX_BYTES);
    }
    RT_DEVICE shared_address numbers(int stage) const {
        return base + (shared_address)(shape::STAGE_AT + stage * shape::STAGE_BYTES);
    }
    RT_DEVICE shared_address place(int stage) const { return numbers(stage) + shape::PLACE_AT; }

    RT_DEVICE shared_address keys_full() const { return base + shape::BARRIERS_AT; }
    RT_DEVICE shared_address dq_full() const { return keys_full() + 8; }
    RT_DEVICE shared_address dq_empty() const { return keys_full() + 16; }
    RT_DEVICE shared_address full(int stage) const { return keys_full() + (shared_address)(24 + 16 * stage); }
    RT_DEVICE shared_address empty(int stage) const { return full(stage) + 8; }

    RT_DEVICE void init_barriers() const {
        barrier_init(keys_full(), 1);
        barrier_init(dq_full(), shape::CONSUMERS);
        barrier_init(dq_empty(), 1);
        for (int stage = 0; stage < 2; stage++) {
            barrier_init(full(stage), 2);
            barrier_init(empty(stage), shape::CONSUMERS + 1);
        }
        barrier_init_fence();
    }
};

// ---- the feeder ----------------------------------------------------------------------------------

template <int D>
RT_DEVICE void feed(const attn_bwd_sm90_args &args, const backward_ring<D> &ring,
                    const typename backward_sm90_shape<D>::walk &walk) {
    using shape = backward_sm90_shape<D>;
    const bool copies = lane_index() == 0;
    if (copies) {
        const key_tile keys = walk.keys();
        const shared_address full = ring.keys_full();
        barrier_arrive_expecting(full, 2 * shape::KEY_BYTES);
        copy_tile<shape::KEYS, D>(ring.k(), full, args.k[keys.run], keys.first_key, keys.kv_head, keys.batch);
        copy_tile<shape::KEYS, D>(ring.v(), full, args.v[keys.run], keys.first_key, keys.kv_head, keys.batch);
    }
    auto at = walk.first();
    for (int n = 0;; n++) {
        const int stage = n % 2;
        const shared_address full = ring.full(stage);
        barrier_wait(ring.empty(stage), parity_of(n) ^ 1);
        if (copies && !walk.ended(at)) {
            const int token = at.tile * shape::TILE, head = walk.head_of(at), batch = walk.keys().batch;
            barrier_arrive_expecting(full, 2 * shape::QUERY_BYTES);
            copy_tile<shape::TILE, D>(ring.q(stage), full, args.q, token, head, batch);
            copy_tile<shape::TILE, D>(ring.dout(stage), full, args.dout, token, head, batch);
        } else if (copies) {
            barrier_arrive(full);
        }
        const query_numbers<shape> numbers{walk, ring.numbers(stage)};
#pragma unroll 1
        for (int query = lane_index(); query < shape::TILE; query += 32)
            numbers.store(query, numbers.fetch(at, query));
        if (copies) shared_store(ring.place(stage), at);
        arrive_as_warp(full);
        if (walk.ended(at)) break;
        at = walk.after(at);
    }
}

// ---- the adder -----------------------------------------------------------------------------------

template <int D>
RT_DEVICE void add_queries(const attn_bwd_sm90_args &args, const backward_ring<D> &ring,
                           const typename backward_sm90_shape<D>::walk &walk) {
    using shape = backward_sm90_shape<D>;
    for (int n = 0;; n++) {
        barrier_wait(ring.full(n % 2), parity_of(n));
        const auto at = shared_load<typename shape::walk::place>(ring.place(n % 2));
        arrive_as_warp(ring.empty(n % 2));
        if (walk.ended(at)) break;
        if (lane_index() > 0) continue;
        const int next = walk.next_in_turn(at);
        barrier_wait(ring.dq_full(), n % 2);
        int *const turn = walk.turn_of(at);
        walk.wait_for(turn);
        add_box_fence();
#pragma unroll 1
        for (int i = 0; i < shape::BOXES; i++) // two of each group
            add_box(args.dq, ring.box(i), shape::BOX_COLS * (i % (D / shape::BOX_COLS)),
                    at.tile * shape::TILE + i / (D / shape::BOX_COLS) * shape::BOX_ROWS, walk.head_of(at),
                    walk.keys().batch);
        add_box_commit();
        add_box_wait_read();
        barrier_arrive(ring.dq_empty());
        add_box_wait();
        add_box_fence();
        store_release(turn, next);
    }
}

// ---- the consumers -------------------------------------------------------------------------------

// The queries of a group's 64 x 64 numbers of dq, to its two boxes.
template <int D>
RT_DEVICE void store_queries(const backward_ring<D> &ring, float factor, const sums<1, 8> &dq) {
    struct alignas(8) pair {
        float x, y;
    };
    const int lane = lane_index(), warp = warp_index();
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int row = 16 * (warp % 4) + 8 * r + lane / 4;
#pragma unroll
        for (int n = 0; n < 8; n++) {
            const tile<64, 64> box{ring.box(warp / 4 * 2 + n / 4)}; // rows of 128 bytes
            shared_store(box.chunk_at(row, n % 4 * 2 + lane % 4 / 2) + (shared_address)(lane % 2 * 8),
                         pair{factor * dq[0][n][2 * r], factor * dq[0][n][2 * r + 1]});
        }
    }
}

template <class T, int D>
RT_DEVICE void sum_keys(const attn_args &args, const backward_ring<D> &ring,
                        const typename backward_sm90_shape<D>::walk &walk) {
    using shape = backward_sm90_shape<D>;
    const rt_attn_params &p = args.p;
    const int group =
        shuffle(warp_index() / 4, 0); // one number for the whole warp, and the compiler sees that
    sums<1, D / 8> dk, dv;
    clear<1, D / 8>(dk);
    clear<1, D / 8>(dv);
    sums<1, 8> scores, dweights, dq;
    uint32_t weights[4][1][4], dscores[4][1][4];

    // sum (64 keys x 64 queries) = rows of the group's keys times rows of a part's queries.
    const auto start_rows = [&](sums<1, 8> &sum, shared_address keys, shared_address queries) {
        const uint64_t a = factor_at(keys + (shared_address)(group * 64 * 128), 0), b = factor_at(queries, 0);
        pin(sum[0]);
        products_fence();
#pragma unroll
        for (int i = 0; i < D / 16; i++)
            multiply_rows_async<T>(sum[0], factor_after(a, i / 4 * shape::KEY_PANEL + i % 4 * 32),
                                   factor_after(b, i / 4 * shape::QUERY_PANEL + i % 4 * 32), i > 0);
        products_commit();
    };
    // sum (64 keys x D) += left (64 keys x 64 queries) times rows of a part's queries.
    const auto start_columns = [&](sums<1, D / 8> &sum, uint32_t (&left)[4][1][4], shared_address queries) {
        const uint64_t b = factor_at(queries, shape::QUERY_PANEL);
        pin(sum[0]);
#pragma unroll
        for (int i = 0; i < 4; i++) pin(left[i]);
        products_fence();
#pragma unroll
        for (int i = 0; i < 4; i++) multiply_async<T>(sum[0], left[i][0], factor_after(b, i * 16 * 128));
        products_commit();
    };
    // dq of the group's queries and columns = dS times rows of keys.
    const auto start_queries = [&](shared_address dscores_at) {
        const uint64_t a = factor_at(
                           dscores_at + (shared_address)(D == 64 ? group * shape::dscore_tile::BYTES : 0), 0),
                       b = factor_at(ring.k() + (shared_address)(D == 64 ? 0 : group * shape::KEY_PANEL), 0);
        pin(dq[0]);
        products_fence();
#pragma unroll
        for (int i = 0; i < shape::KEYS / 16; i++)
            multiply_columns_async<T>(dq[0], factor_after(a, i * 16 * 128), factor_after(b, i * 16 * 128),
                                      i > 0);
        products_commit();
    };

    walk.store_warp_positions();
    warp_barrier();
    barrier_wait(ring.keys_full(), 0);
    int n = 0;
    for (;; n++) {
        const int stage = n % 2;
        barrier_wait(ring.full(stage), parity_of(n));
        if (walk.ended(shared_load<typename shape::walk::place>(ring.place(stage)))) break;
#pragma unroll
        for (int part = 0; part < shape::PARTS; part++) {
            const query_numbers<shape> numbers{walk, ring.numbers(stage) +
                                                         (shared_address)(part * shape::QUERIES * 8)};
            const shared_address q = ring.q(stage) + (shared_address)(part * shape::QUERIES * 128),
                                 dout = ring.dout(stage) + (shared_address)(part * shape::QUERIES * 128);
            start_rows(scores, ring.k(), q);
            start_rows(dweights, ring.v(), dout);
            products_wait<1>(scores[0]);
            if (p.scale <= 0) fix_sign<1, 8>(scores, p.scale);
            const bool capped = args.inverse_softcap > 0;
            if (capped) {
                cap_scores<1, 8>(scores, args.cap);
                products_wait<0>(dweights[0]);
                numbers.subtract_delta(dweights);
                multiply_slopes<1, 8>(dweights, scores);
            }
            if (!numbers.attended().all) numbers.mask_scores(scores);
#pragma unroll
            for (int i = 0; i < 32; i++) {
                float &x = scores[0][i / 4][i % 4]; // becomes a weight
                x = exp2_approx(fmaf(x, args.scale_log2, -numbers.sums_of_lane(i / 4).of[i % 2].lse));
            }
#pragma unroll
            for (int k = 0; k < 4; k++) pack_weights<T, 1>(weights[k], scores, k);
            start_columns(dv, weights, dout);
            products_wait<1>(dweights[0]);
            if (!capped) numbers.subtract_delta(dweights);
#pragma unroll
            for (int i = 0; i < 32; i++) {
                const float weight = scores[0][i / 4][i % 4];
                float &x = dweights[0][i / 4][i % 4];
                x = weight == 0 ? 0 : weight * x; // whatever dP holds
            }
            const typename shape::dscore_tile to{ring.dscores(stage) +
                                                 (shared_address)(part * shape::dscore_tile::BYTES)};
#pragma unroll
            for (int k = 0; k < 4; k++) {
                pack_weights<T, 1>(dscores[k], dweights, k);
                store_dscores(to, dscores[k][0], k);
            }
            start_columns(dk, dscores, q);
        }
        shared_write_fence();
        part_barrier(1, 32 * shape::CONSUMERS); // dS of both groups is there, and nobody reads the one before
        start_queries(ring.dscores(stage));
        products_wait<0>(dq[0]);
        pin(dk[0]);
        pin(dv[0]);
        arrive_as_warp(ring.empty(stage));
        barrier_wait(ring.dq_empty(), n % 2 ^ 1);
        store_queries<D>(ring, (float)p.scale, dq);
        shared_write_fence();
        arrive_as_warp(ring.dq_full());
    }
    if (n == 0 && !p.fresh) return;
    add_key_rows(walk, p.dk, p.dk_stride, p.head_dim, (float)p.scale, dk);
    add_key_rows(walk, p.dv, p.dv_stride, p.v_head_dim, 1, dv);
}

// ---- the pass ------------------------------------------------------------------------------------

template <class T, int D>
RT_KERNEL((backward_sm90_shape<D>::THREADS), 1)
attn_bwd_sm90_kernel(RT_PARAMS attn_bwd_sm90_args args) {
    using shape = backward_sm90_shape<D>;
    const shared_address base = shared_base();
    const backward_ring<D> ring{base};
    const typename shape::walk walk{args.attn, base + shape::KEYS_AT};
    if (thread_index() == 0) {
        ring.init_barriers();
        walk.choose_keys(walk.keys_of_number(walk.take_number()));
    }
    block_barrier();
    if (warp_index() >= shape::CONSUMERS) {
        give_registers<24>();
        if (warp_index() == shape::FEEDER) feed<D>(args, ring, walk);
        if (warp_index() == shape::ADDER) add_queries<D>(args, ring, walk);
    } else {
        take_registers<240>();
        sum_keys<T, D>(args.attn, ring, walk);
    }
}

template <class T, int D> rt_status attn_bwd_sm90(const rt_attn_params &p, void *stream) {
    using shape = backward_sm90_shape<D>;
    return for_runs(
        p,
        [&](const attn_args &attn) {
            attn_bwd_sm90_args args;
            args.attn = attn;
            const bool mapped = map_rows<T>(args.q, p.q, p.q_stride, p.batch, 0, p.num_queries, p.num_heads,
                                            p.head_dim, shape::TILE) &&
                                map_rows<T>(args.dout, p.dout, p.dout_stride, p.batch, 0, p.num_queries,
                                            p.num_heads, p.v_head_dim, shape::TILE) &&
                                map_rows<float>(args.dq, p.dq, p.dq_stride, p.batch, 0, p.num_queries,
                                                p.num_heads, p.head_dim, shape::BOX_ROWS) &&
                                map_keys<T>(args.k, attn, p.k, p.k_stride, p.head_dim, shape::KEYS) &&
                                map_keys<T>(args.v, attn, p.v, p.v_stride, p.v_head_dim, shape::KEYS);
            if (!mapped) return RT_CUDA;
            const rt_status status = fill_workspace<shape::TILE, shape::KEYS>(attn, stream);
            return status != RT_OK ? status
                                   : launch(attn_bwd_sm90_kernel<T, D>,
                                            num_key_tiles<shape::KEYS>(attn) * p.num_kv_heads * p.batch,
                                            shape::THREADS, shape::BYTES, stream, args);
        },
        MAX_RUNS_SM90);
}

#endif // RINGTILE_CUDA_ATTN_BWD_SM90_CUH
