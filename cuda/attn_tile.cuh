// What the attention kernels share: tiles in shared memory, products of tiles, and the walk along the keys that a tile of
// queries attends. Shape letters are those of ringtile.h.
#ifndef RINGTILE_CUDA_ATTN_TILE_CUH
#define RINGTILE_CUDA_ATTN_TILE_CUH

#include "device.cuh"

#include <math.h>

constexpr double LOG2_E = 1.4426950408889634, LN_2 = 0.6931471805599453;

// ---- arguments ---------------------------------------------------------------------------------

// More runs take more launches. With the params this stays below the 4096 bytes that every driver takes.
constexpr int MAX_RUNS = 64;

// As a kernel gets them. A score in units of log 2 is scale_log2 * q.k, or with a softcap scale_log2 * tanh(cap * q.k).
// Both factors are positive: where scale is not, the kernel changes the sign of one side, or makes it 0 (fix_sign).
struct attn_args {
    rt_attn_params p; // k_runs belongs to the host
    rt_run runs[MAX_RUNS];
    int num_runs;
    float scale_log2, cap;
    float inverse_softcap; // 0: off
    bool aligned;          // rows of q, k, v, dout are whole chunks of 16 bytes, at multiples of 16 bytes
    bool in_pairs;         // so are those of out, dq, dk, dv
    bool out_is_fresh;     // p.fresh, in the first launch of a forward
};

inline bool rows_are_aligned(const void *array, const int64_t (&stride)[3], int64_t element_bytes) {
    return (uintptr_t)array % 16 == 0 && stride[0] * element_bytes % 16 == 0 &&
           stride[1] * element_bytes % 16 == 0 && stride[2] * element_bytes % 16 == 0;
}

// Calls start(args) for every max_runs runs of p, until one fails; fresh, also where there are no runs.
template <class Start> rt_status for_runs(const rt_attn_params &p, Start start, int max_runs = MAX_RUNS) {
    attn_args args;
    args.p = p;
    const double scale = p.scale == 0 ? 1 : fabs(p.scale);
    args.scale_log2 = (float)((p.softcap > 0 ? p.softcap : scale) * LOG2_E);
    args.cap = p.softcap > 0 ? (float)(scale / p.softcap) : 0;
    args.inverse_softcap = p.softcap > 0 ? (float)(1 / p.softcap) : 0;
    const bool in_chunks = p.head_dim % 8 == 0 && p.v_head_dim % 8 == 0;
    args.aligned = in_chunks && rows_are_aligned(p.q, p.q_stride, 2) &&
                   rows_are_aligned(p.k, p.k_stride, 2) && rows_are_aligned(p.v, p.v_stride, 2) &&
                   rows_are_aligned(p.dout, p.dout_stride, 2);
    args.in_pairs = in_chunks && rows_are_aligned(p.out, p.out_stride, 4) &&
                    rows_are_aligned(p.dq, p.dq_stride, 4) && rows_are_aligned(p.dk, p.dk_stride, 4) &&
                    rows_are_aligned(p.dv, p.dv_stride, 4);
    rt_status status = RT_OK;
    for (int64_t first = 0; status == RT_OK && (first < p.num_k_runs || (first == 0 && p.fresh));
         first += max_runs) {
        const int64_t rest = p.num_k_runs - first;
        args.num_runs = (int)(rest < max_runs ? rest : max_runs);
        args.out_is_fresh = p.fresh && first == 0;
        if (rest > 0) memcpy(args.runs, p.k_runs + first, (size_t)args.num_runs * sizeof(rt_run));
        status = start(args);
    }
    return status;
}

// ---- small things ------------------------------------------------------------------------------

RT_DEVICE int least(int a, int b) { return a < b ? a : b; }
RT_DEVICE int most(int a, int b) { return a > b ? a : b; }
RT_HOST_DEVICE int num_tiles(int n, int tile) { return n / tile + (n % tile != 0); }

RT_DEVICE double load_lse(const rt_attn_params &p, int64_t i) {
    return p.lse_f64 ? global_load((const double *)p.lse + i) : (double)global_load((const float *)p.lse + i);
}
RT_DEVICE void store_lse(const rt_attn_params &p, int64_t i, double lse) {
    if (p.lse_f64)
        global_store((double *)p.lse + i, lse);
    else
        global_store((float *)p.lse + i, (float)lse);
}

// Zeros in num_rows rows of `dim` f32, row_stride apart; every thread of the block takes part.
RT_DEVICE void clear_rows(float *row, int64_t row_stride, int num_rows, int dim) {
    for (int i = thread_index(); i < num_rows * dim; i += num_threads())
        global_store(row + i / dim * row_stride + i % dim, 0.0f);
}

// What merging a block's log-sum-exp into the one before gives: the new one, and the block's share of the output. Both
// logarithms are f32; what they are added to is f64, so that an lse in f64 keeps an absolute error of 2^-23 however
// large it is.
struct merged_lse {
    double lse;
    float share; // sigmoid(block - before)
};
RT_DEVICE merged_lse merge_lse(double before, double block) {
    const float distance = (float)(before - block);
    return {(before > block ? before : block) + (double)log1pf(expf(-fabsf(distance))),
            1 / (1 + expf(distance))};
}

// Absolute error about 2^-23, which is what a score of that size has anyway.
RT_DEVICE float tanh_approx(float x) {
    return 1 - 2 * reciprocal_approx(1 + exp2_approx((float)(2 * LOG2_E) * x));
}

// ---- tiles in shared memory --------------------------------------------------------------------

// ROWS rows of COLS 16-bit numbers, in chunks of 16 bytes. Eight rows below each other, the same chunk of each, are what
// load_matrices reads at once; so that they lie in different banks, row r keeps its chunk c in place of its chunk
// c ^ swizzle(r). Rows of a multiple of 128 bytes all begin in the same bank: 8 different places. Those of an odd
// multiple of 64 bytes begin in two by turns: 4 different places for every second row.
template <int ROWS, int COLS> struct tile {
    static constexpr int BYTES = ROWS * COLS * 2, ROW_BYTES = COLS * 2, ROW_CHUNKS = COLS / 8;
    static_assert(ROW_BYTES % 64 == 0);
    shared_address base;

    static constexpr int SWIZZLE = ROW_BYTES % 128 == 0 ? 7 : 3; // the bits of a chunk's index that take part
    static RT_DEVICE int swizzle(int row) { return ROW_BYTES % 128 == 0 ? row & 7 : row >> 1 & 3; }
    RT_DEVICE shared_address chunk_at(int row, int chunk) const {
        return base + (shared_address)(row * ROW_BYTES + (chunk ^ swizzle(row)) * 16);
    }

    // What a lane of load_matrices needs all over the tile: at(r, c) is chunk_at(row + r, chunk + c), for r a multiple of
    // 8, chunk < 8, and no bit that is in both chunk and c. With r and c known to the compiler that is an exclusive or, and
    // few different ones.
    struct lane_chunks {
        shared_address row_at, chunk_bytes;
        RT_DEVICE shared_address at(int r, int c) const {
            return row_at + (shared_address)(r * ROW_BYTES + (c & ~SWIZZLE) * 16) +
                   (chunk_bytes ^ (shared_address)((c & SWIZZLE) * 16));
        }
    };
    RT_DEVICE lane_chunks chunks_from(int row, int chunk) const {
        return {base + (shared_address)(row * ROW_BYTES), (shared_address)((chunk ^ swizzle(row)) * 16)};
    }
};

// 8 numbers that may lie anywhere; zeros after the first `count`.
template <class T> RT_DEVICE chunk gather_chunk(const T *from, int count) {
    chunk c = {};
#pragma unroll
    for (int i = 0; i < 8; i++)
        if (i < count) c.word[i / 2] |= (uint32_t)global_load(from + i).bits << (i % 2 * 16);
    return c;
}

// Which chunks of a tile a thread copies: lanes side by side have chunks side by side, and of all the places that a lane has,
// one address differs from the next by a constant.
template <int THREADS, int ROWS, int COLS> struct thread_chunks {
    static constexpr int LANES = tile<ROWS, COLS>::SWIZZLE + 1; // chunks side by side
    static constexpr int ROW_STEP = THREADS / LANES;
    static_assert(ROWS % ROW_STEP == 0 && ROW_STEP % 8 == 0);
    // The first one; the others are multiples of ROW_STEP below it and of LANES right of it.
    static RT_DEVICE int row() { return thread_index() / LANES; }
    static RT_DEVICE int chunk() { return thread_index() % LANES; }
};

// Starts to fill a tile with num_rows rows of `dim` numbers, row_stride apart; zeros elsewhere. Every thread of the block
// takes part; the caller commits.
template <class T, int THREADS, int ROWS, int COLS>
RT_DEVICE void load_tile(tile<ROWS, COLS> to, const T *from, int64_t row_stride, int num_rows, int dim,
                         bool aligned) {
    using mine = thread_chunks<THREADS, ROWS, COLS>;
    const int row = mine::row(), chunk = mine::chunk();
    const auto chunks = to.chunks_from(row, chunk);
    const T *const begin = from + row * row_stride + chunk * 8;
    if (aligned) {
#pragma unroll
        for (int r = 0; r < ROWS; r += mine::ROW_STEP)
#pragma unroll
            for (int c = 0; c < to.ROW_CHUNKS; c += mine::LANES)
                async_copy(chunks.at(r, c), begin + r * row_stride + c * 8,
                           row + r < num_rows && (chunk + c) * 8 < dim ? 16 : 0);
    } else {
#pragma unroll 1
        for (int r = 0; r < ROWS; r += mine::ROW_STEP)
#pragma unroll 1
            for (int c = 0; c < to.ROW_CHUNKS; c += mine::LANES)
                shared_store(chunks.at(r, c), gather_chunk(begin + r * row_stride + c * 8,
                                                           row + r < num_rows ? dim - (chunk + c) * 8 : 0));
    }
}

// Where scale is not positive, makes a tile its negative, or zeros. Each thread does the chunks that it loaded itself.
template <int THREADS, int ROWS, int COLS> RT_DEVICE void fix_sign(tile<ROWS, COLS> x, double scale) {
    using mine = thread_chunks<THREADS, ROWS, COLS>;
    if (scale > 0) return;
    async_wait<0>();
    const auto chunks = x.chunks_from(mine::row(), mine::chunk());
#pragma unroll 1
    for (int r = 0; r < ROWS; r += mine::ROW_STEP)
#pragma unroll 1
        for (int c = 0; c < x.ROW_CHUNKS; c += mine::LANES) {
            chunk values = shared_load<chunk>(chunks.at(r, c));
            for (uint32_t &word : values.word) word = scale < 0 ? word ^ 0x80008000u : 0;
            shared_store(chunks.at(r, c), values);
        }
}

// ---- products of tiles -------------------------------------------------------------------------

// A warp's sums: M x N fragments of 16 x 8. Lane l holds of each the columns 2 (l % 4) and the next, in the rows l / 4
// (elements 0, 1) and l / 4 + 8 (elements 2, 3).
template <int M, int N> using sums = float[M][N][4];

// The row of the block's tile that row r = 0 .. 2 M - 1 of a lane is; rows 2 m and 2 m + 1 are in fragment m.
template <int M> RT_DEVICE int lane_row(int r) { return 16 * M * warp_index() + 8 * r + lane_index() / 4; }

// sum (16 M, 8 N) += a b^T, over the rows of a from a_row on and the first 8 N rows of b.
template <class T, int M, int N, int A_ROWS, int B_ROWS, int COLS>
RT_DEVICE void multiply_rows(sums<M, N> &sum, tile<A_ROWS, COLS> a, int a_row, tile<B_ROWS, COLS> b) {
    const int lane = lane_index();
    const auto a_chunks = a.chunks_from(a_row + lane % 16, lane / 16);
    const auto b_chunks = b.chunks_from(lane / 16 * 8 + lane % 8, lane / 8 % 2);
#pragma unroll
    for (int k = 0; k < COLS / 16; k++) {
        uint32_t left[M][4];
#pragma unroll
        for (int m = 0; m < M; m++) load_matrices(left[m], a_chunks.at(16 * m, 2 * k));
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            uint32_t right[4]; // two fragments
            load_matrices(right, b_chunks.at(8 * n, 2 * k));
#pragma unroll
            for (int m = 0; m < M; m++) {
                multiply_add<T>(sum[m][n], left[m], right[0], right[1]);
                multiply_add<T>(sum[m][n + 1], left[m], right[2], right[3]);
            }
        }
    }
}

// sum (16 M, COLS) += left (16 M, 16) times the rows 16 k .. 16 k + 15 of b. With PARTS (1, 2 or 4) sum has, of every PARTS
// groups of 16 columns, the one of `part`.
template <class T, int M, int PARTS = 1, int ROWS, int COLS>
RT_DEVICE void multiply_weights(sums<M, COLS / 8 / PARTS> &sum, const uint32_t (&left)[M][4],
                                tile<ROWS, COLS> b, int k, int part = 0) {
    const int lane = lane_index();
    const auto b_chunks = b.chunks_from(lane % 16, 2 * part + lane / 16);
#pragma unroll
    for (int n = 0; n < COLS / 8 / PARTS; n += 2) {
        uint32_t right[4];
        load_matrices_transposed(right, b_chunks.at(16 * k, n * PARTS));
#pragma unroll
        for (int m = 0; m < M; m++) {
            multiply_add<T>(sum[m][n], left[m], right[0], right[1]);
            multiply_add<T>(sum[m][n + 1], left[m], right[2], right[3]);
        }
    }
}

// The fragments 2 k and 2 k + 1 of sums are, rounded, one left factor: nothing moves between lanes.
template <class T, int M, int N>
RT_DEVICE void pack_weights(uint32_t (&left)[M][4], const float (&sum)[M][N][4], int k = 0) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            left[m][i] = pack<T>(sum[m][2 * k + i / 2][i % 2 * 2], sum[m][2 * k + i / 2][i % 2 * 2 + 1]);
}

template <int M, int N> RT_DEVICE void clear(sums<M, N> &sum) {
#pragma unroll
    for (int i = 0; i < M * N * 4; i++) sum[i / (N * 4)][i / 4 % N][i % 4] = 0;
}

// Products q.k become tanh(cap * q.k).
template <int M, int N> RT_DEVICE void cap_scores(sums<M, N> &scores, float cap) {
#pragma unroll
    for (int i = 0; i < M * N * 4; i++) {
        float &score = scores[i / (N * 4)][i / 4 % N][i % 4];
        score = tanh_approx(score * cap);
    }
}

// x = combine(x, sum) for the numbers x of a row in global memory and row r of a lane's sums; of every PARTS groups of 16
// columns the sums are those of `part`. in_pairs: two columns lie in aligned 8 bytes, and fragments have all their columns
// or none. `read` false: combine gets 0 for x. Loads come before stores, so that they wait together.
template <int PARTS = 1, int M, int N, class Combine>
RT_DEVICE void update_row(float *row, int dim, bool in_pairs, bool read, const float (&sum)[M][N][4], int r,
                          Combine combine, int part = 0) {
    struct alignas(8) pair {
        float x[2];
    };
    constexpr int BATCH = N % 8 == 0 ? 8 : 4;
    const int lane_col = lane_index() % 4 * 2;
    float *const to = row + 16 * part + lane_col; // columns are counted from here
    dim -= 16 * part;
    const auto col = [](int n) { return n / 2 * 16 * PARTS + n % 2 * 8; };
    const auto combined = [&](float x, int n, int i) { return combine(x, sum[r / 2][n][r % 2 * 2 + i]); };
    if (in_pairs) {
#pragma unroll
        for (int first = 0; first < N; first += BATCH) {
            pair x[BATCH];
#pragma unroll
            for (int i = 0; i < BATCH; i++) {
                x[i] = {0, 0};
                if (read && col(first + i) < dim) x[i] = global_load((const pair *)(to + col(first + i)));
            }
#pragma unroll
            for (int i = 0; i < BATCH; i++) {
                const int n = first + i;
                if (col(n) < dim)
                    global_store((pair *)(to + col(n)),
                                 {combined(x[i].x[0], n, 0), combined(x[i].x[1], n, 1)});
            }
        }
    } else {
#pragma unroll
        for (int i = 0; i < 2 * N; i++) {
            float *const x = to + col(i / 2) + i % 2;
            if (lane_col + col(i / 2) + i % 2 < dim)
                global_store(x, combined(read ? global_load(x) : 0, i / 2, i % 2));
        }
    }
}

// ---- which keys a tile of queries attends -----------------------------------------------------------

// What a block works on, from its index: a grid of (tiles of queries of a group's heads, kv heads, batch). Last tiles
// first, because causal work grows along the sequence. Asking again is cheaper than keeping the answer in registers.
struct query_tile {
    int batch, head, first_token;
};
template <int ROWS> RT_DEVICE query_tile query_tile_of_block(const rt_attn_params &p) {
    const int group = (int)p.num_heads / (int)p.num_kv_heads, index = num_blocks() - 1 - block_index();
    return {block_index_z(), block_index_y() * group + index % group, index / group * ROWS};
}
template <int ROWS> grid_size query_grid(const rt_attn_params &p) {
    return {num_tiles((int)p.num_queries, ROWS) * (p.num_heads / p.num_kv_heads), p.num_kv_heads, p.batch};
}

// The block's queries attend nothing.
template <int ROWS> RT_DEVICE void finish_without_keys(const attn_args &args) {
    if (!args.out_is_fresh) return;
    const rt_attn_params &p = args.p;
    const query_tile at = query_tile_of_block<ROWS>(p);
    const int num_rows = least(ROWS, (int)p.num_queries - at.first_token);
    clear_rows((float *)p.out + at.batch * p.out_stride[0] + at.first_token * p.out_stride[1] +
                   at.head * p.out_stride[2],
               p.out_stride[1], num_rows, (int)p.v_head_dim);
    const int64_t lse_row = (at.batch * p.num_heads + at.head) * p.num_queries + at.first_token;
    for (int row = thread_index(); row < num_rows; row += num_threads())
        store_lse(p, lse_row + row, -INFINITY);
}

// Starts to load the rows of q or dout of the block's queries.
template <class T, int THREADS, int ROWS, int COLS>
RT_DEVICE void load_queries(tile<ROWS, COLS> to, const void *array, const int64_t (&stride)[3], int64_t dim,
                            const attn_args &args) {
    const query_tile at = query_tile_of_block<ROWS>(args.p);
    const T *const from =
        (const T *)array + at.batch * stride[0] + at.first_token * stride[1] + at.head * stride[2];
    load_tile<T, THREADS>(to, from, stride[1], (int)args.p.num_queries - at.first_token, (int)dim,
                          args.aligned);
}

// ... and rows of k or v from key `first` of a run on.
template <class T, int THREADS, int ROWS, int COLS>
RT_DEVICE void load_keys(tile<ROWS, COLS> to, const void *array, const int64_t (&stride)[3], int64_t dim,
                         const attn_args &args, int run, int first, int kv_head = block_index_y(),
                         int batch = block_index_z()) {
    const int64_t row = args.runs[run].local_begin + first;
    const T *const from = (const T *)array + batch * stride[0] + row * stride[1] + kv_head * stride[2];
    load_tile<T, THREADS>(to, from, stride[1], (int)args.runs[run].length - first, (int)dim, args.aligned);
}

// A query attends the keys [lo, hi) of a run, counted from its start; lo = hi = 0 if none.
struct key_range {
    int lo, hi;
};

// First key of the run whose position is at least `bound`, in [0, length].
RT_DEVICE int first_key_from(const rt_run &run, int bound) {
    if (bound <= run.global_begin) return 0;
    const int distance = bound - (int)run.global_begin;
    const int key = run.stride >= distance ? 1 : (distance - 1) / (int)run.stride + 1;
    return least(key, (int)run.length);
}

// Goes from tile to tile of KEYS keys, over all runs, stopping at those that one of ROWS queries attends. Every warp finds
// the next tile for itself, so nobody waits. The ranges of the run at hand and those of the next one lie in shared memory
// side by side: the walk may be a tile ahead of the work.
template <int ROWS, int KEYS> struct key_walk {
    static constexpr int BYTES = 2 * ROWS * (int)sizeof(key_range);
    const attn_args &args;
    shared_address ranges; // (2, ROWS)

    struct place {
        int run, tile, slot; // slot: which half of ranges is the run's
        int full_end;        // all queries attend all keys of the tiles [tile, full_end), if there are any
    };

    RT_DEVICE bool ended(place at) const { return at.run >= args.num_runs; }
    RT_DEVICE key_range range(int slot, int row) const {
        return shared_load<key_range>(ranges +
                                      (shared_address)((slot * ROWS + row) * (int)sizeof(key_range)));
    }

    RT_DEVICE place first() const { return seek({-1, 0, 1, 0}); }
    RT_DEVICE place after(place at) const {
        if (at.full_end > at.tile + 1) return {at.run, at.tile + 1, at.slot, at.full_end};
        const place next = find(at.run, at.slot, at.tile + 1);
        return next.tile != INT32_MAX ? next : seek(at);
    }

    // Whether some query of a warp with M fragments of rows attends some key of the tile; whether all attend all.
    template <int M> RT_DEVICE bool any_of_warp(place at) const {
        if (at.full_end > at.tile) return true;
        bool any = false;
#pragma unroll
        for (int r = 0; r < 2 * M; r++) {
            const key_range keys = range(at.slot, lane_row<M>(r));
            any |= keys.lo < (at.tile + 1) * KEYS && keys.hi > at.tile * KEYS;
        }
        return any_lane(any);
    }
    template <int M> RT_DEVICE bool all_of_warp(place at) const {
        if (at.full_end > at.tile) return true;
        bool all = true;
#pragma unroll
        for (int r = 0; r < 2 * M; r++) {
            const key_range keys = range(at.slot, lane_row<M>(r));
            all &= keys.lo <= at.tile * KEYS && keys.hi >= (at.tile + 1) * KEYS;
        }
        return all_lanes(all);
    }

  private:
    // The first tile behind the run of `at`, whose ranges are still in use.
    RT_DEVICE place seek(place at) const {
        const int slot = 1 - at.slot;
        for (int run = at.run + 1; run < args.num_runs; run++) {
            block_barrier();
            for (int row = thread_index(); row < ROWS; row += num_threads())
                store_range(slot, row, args.runs[run]);
            block_barrier();
            const place next = find(run, slot, 0);
            if (next.tile != INT32_MAX) return next;
        }
        return {args.num_runs, 0, slot, 0};
    }

    RT_DEVICE void store_range(int slot, int row, const rt_run &run) const {
        key_range keys = {0, 0};
        const query_tile queries = query_tile_of_block<ROWS>(args.p);
        const int token = queries.first_token + row;
        if (token < args.p.num_queries) {
            const int64_t at = queries.batch * args.p.mask_batch_stride + token;
            keys = {first_key_from(run, global_load(args.p.begin + at)),
                    first_key_from(run, global_load(args.p.end + at))};
            if (keys.hi <= keys.lo) keys = {0, 0};
        }
        shared_store(ranges + (shared_address)((slot * ROWS + row) * (int)sizeof(key_range)), keys);
    }

    // The first tile from `from` on that some query attends; INT32_MAX if there is none.
    RT_DEVICE place find(int run, int slot, int from) const {
        int tile = INT32_MAX;
        key_range all = {0, INT32_MAX}; // the keys that every query attends
        for (int row = lane_index(); row < ROWS; row += 32) {
            const key_range keys = range(slot, row);
            if (keys.hi > (int64_t)from * KEYS) tile = least(tile, most(from, keys.lo / KEYS));
            all = {most(all.lo, keys.lo), least(all.hi, keys.hi)};
        }
        tile = min_of_lanes(tile);
        const int full_begin = num_tiles(max_of_lanes(all.lo), KEYS), full_end = min_of_lanes(all.hi) / KEYS;
        return {run, tile, slot, full_begin <= tile ? full_end : 0};
    }
};

#endif // RINGTILE_CUDA_ATTN_TILE_CUH
