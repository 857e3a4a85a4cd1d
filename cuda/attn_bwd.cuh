// Attention backward for bf16 and f16 (FlashAttention-2, arXiv:2307.08691), in two passes of one kernel, so that every
// gradient has one writer: the sums have one order, and no atomics.
//
// With S = scale q k^T (then the softcap), P = exp(S - lse) and out = P v:
//   dv += P^T dout,   dP = dout v^T,   dS = P (dP - delta) (1 - (S / softcap)^2),   dq += scale dS k,   dk += scale dS^T q.
//
//   pass    rows (X1, X2)   columns (Y1, Y2)   products of a tile
//   query   q, dout         k, v               S = X1 Y1^T, dP = X2 Y2^T, dq += dS Y1
//   key     k, v            q, dout            the same, transposed; dk += dS Y1, dv += P Y2
//
// A block of threads has a tile of rows and goes over tiles of columns, two of which are in shared memory: the next one
// arrives while this one is worked on. A warp owns 16 rows, so that P and dS go from sums to left factors in registers.
//
// What bounds it: seven products where a kernel that adds to dq from all blocks has five; each product's right factor is
// loaded from shared memory by each of the four warps, which takes 9/8 of the time of its multiply-adds.
#ifndef RINGTILE_CUDA_ATTN_BWD_CUH
#define RINGTILE_CUDA_ATTN_BWD_CUH

#include "attn.cuh"
#include "attn_query_walk.cuh"
#include "attn_tile.cuh"

// D, DV: head dims, rounded up to what is compiled. Shared memory is at most 99 KB, what a block of sm_86 and sm_89 may have.
template <int D, int DV> struct backward_shape {
    static constexpr int WARPS = 4, THREADS = 32 * WARPS, ROWS = 16 * WARPS;
    static constexpr int COLS = D <= 128 ? 64 : D <= 192 ? 32 : 16;
    static constexpr int X2_AT = tile<ROWS, D>::BYTES, Y_AT = X2_AT + tile<ROWS, DV>::BYTES;
    static constexpr int Y2_AT = tile<COLS, D>::BYTES, STAGE_BYTES = Y2_AT + tile<COLS, DV>::BYTES;
    static constexpr int STATE_AT = Y_AT + 2 * STAGE_BYTES;
};

// lse in units of log 2, and delta, of one query.
struct query_sums {
    float lse, delta;
};

RT_DEVICE query_sums load_query_sums(const rt_attn_params &p, int batch, int head, int token) {
    if (token >= p.num_queries) return {0, 0};
    const int64_t at = (batch * p.num_heads + head) * p.num_queries + token;
    return {(float)(load_lse(p, at) * LOG2_E), global_load((const float *)p.delta + at)};
}

// row[col] += factor * sum, for row r (0 or 1) of a lane.
template <int COLS>
RT_DEVICE void add_row(float *row, int64_t dim, float factor, const sums<1, COLS / 8> &sum, int r) {
    const int first = lane_index() % 4 * 2;
#pragma unroll
    for (int i = 0; i < COLS / 4; i++) {
        const int col = first + i / 2 * 8 + i % 2;
        if (col < dim)
            global_store(row + col, global_load(row + col) + factor * sum[0][i / 2][r * 2 + i % 2]);
    }
}

// ---- rows are queries, columns are keys --------------------------------------------------------

template <class T, int D, int DV> struct query_side {
    using shape = backward_shape<D, DV>;
    using walk = key_walk<shape::ROWS, shape::COLS>;
    using place = typename walk::place;
    static constexpr int STATE_BYTES = walk::BYTES;

    const attn_args &args;
    walk keys;
    query_sums mine[2]; // of this lane's rows

    RT_DEVICE query_side(const attn_args &args, shared_address state) : args(args), keys{args, state} {
        const query_tile at = query_tile_of_block<shape::ROWS>(args.p);
#pragma unroll
        for (int r = 0; r < 2; r++)
            mine[r] = load_query_sums(args.p, at.batch, at.head, at.first_token + lane_row<1>(r));
    }

    RT_DEVICE place first() const { return keys.first(); }
    RT_DEVICE place after(place at) const { return keys.after(at); }
    RT_DEVICE bool ended(place at) const { return keys.ended(at); }

    RT_DEVICE void load_rows(tile<shape::ROWS, D> x1, tile<shape::ROWS, DV> x2) const {
        load_queries<T, shape::THREADS>(x1, args.p.q, args.p.q_stride, args.p.head_dim, args);
        load_queries<T, shape::THREADS>(x2, args.p.dout, args.p.dout_stride, args.p.v_head_dim, args);
    }
    RT_DEVICE void load_columns(tile<shape::COLS, D> y1, tile<shape::COLS, DV> y2, place at) const {
        const int first = at.tile * shape::COLS;
        load_keys<T, shape::THREADS>(y1, args.p.k, args.p.k_stride, args.p.head_dim, args, at.run, first);
        load_keys<T, shape::THREADS>(y2, args.p.v, args.p.v_stride, args.p.v_head_dim, args, at.run, first);
    }

    // What columns need besides y1 and y2: nothing.
    struct state {};
    RT_DEVICE state fetch_state(place) const { return {}; }
    RT_DEVICE void store_state(int, state) const {}

    RT_DEVICE bool any_of_warp(place at, int) const { return keys.template any_of_warp<1>(at); }
    RT_DEVICE bool all_of_warp(place at, int) const { return keys.template all_of_warp<1>(at); }

    // Of a fragment's element i, in columns 8 n ..
    RT_DEVICE void load_sums(query_sums (&of)[4], int, int) const {
#pragma unroll
        for (int i = 0; i < 4; i++) of[i] = mine[i / 2];
    }
    // Bit i: whether the pair of element i is attended.
    RT_DEVICE unsigned attended(place at, int, int n) const {
        unsigned bits = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const key_range range = keys.range(at.slot, lane_row<1>(i / 2));
            const int key = at.tile * shape::COLS + 8 * n + lane_index() % 4 * 2 + i % 2;
            bits |= (unsigned)(range.lo <= key && key < range.hi) << i;
        }
        return bits;
    }

    template <bool, bool> RT_DEVICE void finish(const sums<1, D / 8> &dq, const sums<1, DV / 8> &) const {
        const rt_attn_params &p = args.p;
        const query_tile at = query_tile_of_block<shape::ROWS>(p);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int token = at.first_token + lane_row<1>(r);
            if (token < p.num_queries)
                add_row<D>((float *)p.dq + at.batch * p.dq_stride[0] + token * p.dq_stride[1] +
                               at.head * p.dq_stride[2],
                           p.head_dim, (float)p.scale, dq, r);
        }
    }
};

// ---- rows are keys, columns are queries --------------------------------------------------------

template <class T, int D, int DV> struct key_side {
    using shape = backward_shape<D, DV>;
    static constexpr int STATE_BYTES = 2 * shape::COLS * 2 * (int)sizeof(query_sums);

    using walk = query_walk<shape::ROWS, shape::COLS>;
    using place = typename walk::place;
    struct state { // of one query
        tile_bounds interval;
        query_sums sums;
    };

    const attn_args &args;
    walk queries;
    shared_address at_state; // (2 stages): intervals (COLS), sums (COLS)
    int position[2];         // of this lane's keys

    RT_DEVICE key_side(const attn_args &args, shared_address at_state)
        : args(args), queries(args), at_state(at_state) {
        for (int r = 0; r < 2; r++) position[r] = queries.position_of(lane_row<1>(r));
    }

    RT_DEVICE place first() const { return queries.first(); }
    RT_DEVICE place after(place at) const { return queries.after(at); }
    RT_DEVICE bool ended(place at) const { return queries.ended(at); }

    RT_DEVICE void load_rows(tile<shape::ROWS, D> x1, tile<shape::ROWS, DV> x2) const {
        load_keys<T, shape::THREADS>(x1, args.p.k, args.p.k_stride, args.p.head_dim, args, queries.run,
                                     queries.first_key);
        load_keys<T, shape::THREADS>(x2, args.p.v, args.p.v_stride, args.p.v_head_dim, args, queries.run,
                                     queries.first_key);
    }
    template <int COLS>
    RT_DEVICE void load_queries_at(tile<shape::COLS, COLS> to, const void *array, const int64_t (&stride)[3],
                                   int64_t dim, place at) const {
        const int token = at.tile * shape::COLS, head = queries.head_of(at);
        load_tile<T, shape::THREADS>(
            to, (const T *)array + block_index_z() * stride[0] + token * stride[1] + head * stride[2],
            stride[1], (int)args.p.num_queries - token, (int)dim, args.aligned);
    }
    RT_DEVICE void load_columns(tile<shape::COLS, D> y1, tile<shape::COLS, DV> y2, place at) const {
        load_queries_at(y1, args.p.q, args.p.q_stride, args.p.head_dim, at);
        load_queries_at(y2, args.p.dout, args.p.dout_stride, args.p.v_head_dim, at);
    }

    // Thread i < COLS has the numbers of query i in registers while the stage they belong to is still in use.
    RT_DEVICE state fetch_state(place at) const {
        state of = {{0, 0}, {0, 0}};
        const int token = at.tile * shape::COLS + thread_index();
        if (ended(at) || thread_index() >= shape::COLS || token >= args.p.num_queries) return of;
        const int64_t mask_at = block_index_z() * args.p.mask_batch_stride + token;
        of.interval = {global_load(args.p.begin + mask_at), global_load(args.p.end + mask_at)};
        of.sums = load_query_sums(args.p, block_index_z(), queries.head_of(at), token);
        return of;
    }
    RT_DEVICE void store_state(int stage, const state &of) const {
        if (thread_index() >= shape::COLS) return;
        shared_store(interval_at(stage, thread_index()), of.interval);
        shared_store(sums_at(stage, thread_index()), of.sums);
    }
    RT_DEVICE shared_address interval_at(int stage, int col) const {
        return at_state + (shared_address)((stage * 2 * shape::COLS + col) * 8);
    }
    RT_DEVICE shared_address sums_at(int stage, int col) const {
        return interval_at(stage, shape::COLS + col);
    }

    RT_DEVICE bool any_of_warp(place, int stage) const {
        const int first = queries.position_of(16 * warp_index());
        const int last = queries.position_of(16 * warp_index() + 15);
        bool any = false;
        for (int col = lane_index(); col < shape::COLS; col += 32) {
            const tile_bounds of = shared_load<tile_bounds>(interval_at(stage, col));
            any |= of.begin <= last && of.end > first;
        }
        return any_lane(any);
    }
    RT_DEVICE bool all_of_warp(place, int stage) const {
        const int first = queries.position_of(16 * warp_index());
        const int last = queries.position_of(16 * warp_index() + 15);
        bool all = true;
        for (int col = lane_index(); col < shape::COLS; col += 32) {
            const tile_bounds of = shared_load<tile_bounds>(interval_at(stage, col));
            all &= of.begin <= first && of.end > last;
        }
        return all_lanes(all);
    }

    RT_DEVICE void load_sums(query_sums (&of)[4], int stage, int n) const {
        struct alignas(16) pair {
            query_sums col[2];
        };
        const pair both = shared_load<pair>(sums_at(stage, 8 * n + lane_index() % 4 * 2));
#pragma unroll
        for (int i = 0; i < 4; i++) of[i] = both.col[i % 2];
    }
    RT_DEVICE unsigned attended(place, int stage, int n) const {
        unsigned bits = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const tile_bounds of =
                shared_load<tile_bounds>(interval_at(stage, 8 * n + lane_index() % 4 * 2 + i % 2));
            bits |= (unsigned)(of.begin <= position[i / 2] && position[i / 2] < of.end) << i;
        }
        return bits;
    }

    template <bool FIRST, bool SECOND>
    RT_DEVICE void finish(const sums<1, D / 8> &dk, const sums<1, DV / 8> &dv) const {
        const rt_attn_params &p = args.p;
        const int batch = block_index_z(), head = block_index_y();
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const rt_run &run = args.runs[queries.run];
            const int64_t key = queries.first_key + lane_row<1>(r), token = run.local_begin + key;
            if (key >= run.length) continue;
            if constexpr (FIRST)
                add_row<D>((float *)p.dk + batch * p.dk_stride[0] + token * p.dk_stride[1] +
                               head * p.dk_stride[2],
                           p.head_dim, (float)p.scale, dk, r);
            if constexpr (SECOND)
                add_row<DV>((float *)p.dv + batch * p.dv_stride[0] + token * p.dv_stride[1] +
                                head * p.dv_stride[2],
                            p.v_head_dim, 1, dv, r);
        }
    }
};

// ---- the pass ----------------------------------------------------------------------------------

// FIRST: sums dS Y1, which is dq or dk.   SECOND: sums P Y2, which is dv.
template <class T, int D, int DV, class Side, bool FIRST, bool SECOND>
RT_KERNEL((backward_shape<D, DV>::THREADS))
attn_bwd_kernel(RT_PARAMS attn_args args) {
    using shape = backward_shape<D, DV>;
    constexpr int N = shape::COLS / 8;
    const shared_address base = shared_base();
    const tile<shape::ROWS, D> x1{base};
    const tile<shape::ROWS, DV> x2{base + shape::X2_AT};
    const auto y1_of = [=](int stage) {
        return tile<shape::COLS, D>{base + (shared_address)(shape::Y_AT + stage * shape::STAGE_BYTES)};
    };
    const auto y2_of = [=](int stage) {
        return tile<shape::COLS, DV>{y1_of(stage).base + (shared_address)shape::Y2_AT};
    };
    const Side side(args, base + (shared_address)shape::STATE_AT);

    auto at = side.first();
    if (side.ended(at)) return;
    side.load_rows(x1, x2);
    side.load_columns(y1_of(0), y2_of(0), at);
    async_commit();
    side.store_state(0, side.fetch_state(at));
    fix_sign<shape::THREADS>(x1, args.p.scale);

    sums<1, D / 8> first_sum;
    sums<1, DV / 8> second_sum;
    clear<1, D / 8>(first_sum);
    clear<1, DV / 8>(second_sum);

    for (int stage = 0; !side.ended(at); stage ^= 1) {
        const auto next = side.after(at);
        if (!side.ended(next)) side.load_columns(y1_of(stage ^ 1), y2_of(stage ^ 1), next);
        async_commit();
        const auto next_state = side.fetch_state(next);
        async_wait<1>();
        block_barrier(); // this stage has arrived

        if (side.any_of_warp(at, stage)) {
            const auto y1 = y1_of(stage);
            const auto y2 = y2_of(stage);
            const bool capped = args.p.softcap > 0, full = side.all_of_warp(at, stage);
            sums<1, N> scores, dweights;
            clear<1, N>(scores);
            clear<1, N>(dweights);
            multiply_rows<T, 1, N>(scores, x1, 16 * warp_index(), y1);
            if constexpr (FIRST) multiply_rows<T, 1, N>(dweights, x2, 16 * warp_index(), y2);
            if (capped) cap_scores<1, N>(scores, args.cap);
#pragma unroll
            for (int k = 0; k < N / 2; k++) {
                sums<1, 2> weights, dscores;
#pragma unroll
                for (int n = 0; n < 2; n++) {
                    query_sums of[4];
                    side.load_sums(of, stage, 2 * k + n);
                    const unsigned attended = full ? 0xf : side.attended(at, stage, 2 * k + n);
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const float score = scores[0][2 * k + n][i], slope = capped ? 1 - score * score : 1;
                        float weight = exp2_approx(fmaf(score, args.scale_log2, -of[i].lse));
                        if ((attended >> i & 1) == 0) weight = 0;
                        weights[0][n][i] = weight;
                        // A weight of 0 has no gradient, whatever dP holds.
                        dscores[0][n][i] =
                            weight == 0 ? 0 : weight * slope * (dweights[0][2 * k + n][i] - of[i].delta);
                    }
                }
                uint32_t left[1][4];
                if constexpr (SECOND) {
                    pack_weights<T, 1>(left, weights);
                    multiply_weights<T, 1>(second_sum, left, y2, k);
                }
                if constexpr (FIRST) {
                    pack_weights<T, 1>(left, dscores);
                    multiply_weights<T, 1>(first_sum, left, y1, k);
                }
            }
        }
        side.store_state(stage ^ 1, next_state);
        block_barrier(); // nobody reads this stage any more
        at = next;
    }
    side.template finish<FIRST, SECOND>(first_sum, second_sum);
}

template <int D, int DV>
constexpr int query_pass_bytes = backward_shape<D, DV>::STATE_AT + query_side<bf16, D, DV>::STATE_BYTES;
template <int D, int DV>
constexpr int key_pass_bytes = backward_shape<D, DV>::STATE_AT + key_side<bf16, D, DV>::STATE_BYTES;

template <class T, int D, int DV> rt_status attn_bwd_queries(const rt_attn_params &p, void *stream) {
    using shape = backward_shape<D, DV>;
    constexpr int BYTES = query_pass_bytes<D, DV>;
    static_assert(BYTES <= 99 * 1024);
    return for_runs(p, [&](const attn_args &args) {
        return launch(attn_bwd_kernel<T, D, DV, query_side<T, D, DV>, true, false>,
                      query_grid<shape::ROWS>(p), shape::THREADS, BYTES, stream, args);
    });
}

// Where the sums of dk and dv together would not fit the registers, a launch for each.
template <class T, int D, int DV> rt_status attn_bwd_keys(const rt_attn_params &p, void *stream) {
    using shape = backward_shape<D, DV>;
    using side = key_side<T, D, DV>;
    constexpr int BYTES = key_pass_bytes<D, DV>;
    static_assert(BYTES <= 99 * 1024);
    return for_runs(p, [&](const attn_args &args) {
        const grid_size grid = key_grid<shape::ROWS>(args);
        rt_status status = find_tile_bounds<shape::COLS>(args, stream);
        if (status != RT_OK) return status;
        if constexpr (D + DV <= 320) {
            return launch(attn_bwd_kernel<T, D, DV, side, true, true>, grid, shape::THREADS, BYTES, stream,
                          args);
        } else {
            status = launch(attn_bwd_kernel<T, D, DV, side, true, false>, grid, shape::THREADS, BYTES, stream,
                            args);
            if (status != RT_OK) return status;
            return launch(attn_bwd_kernel<T, D, DV, side, false, true>, grid, shape::THREADS, BYTES, stream,
                          args);
        }
    });
}

#endif // RINGTILE_CUDA_ATTN_BWD_CUH
