// Attention in f32, exact to the rounding of f32: every product is a multiply-add, for checks, for models trained in
// f32, for head dims above 256 in any dtype and for dropout, which no other kernel has. The structure is that of
// fwd.cuh and bwd.cuh in small: a thread block has a tile of 16 rows (8 above a head dim of 256), eight lanes per row,
// and visits tiles of as many columns; a lane computes two weights of its row (one), and every eighth number of its
// sums.
#ifndef RINGTILE_CUDA_ATTN_PLAIN_CUH
#define RINGTILE_CUDA_ATTN_PLAIN_CUH

#include "../device/elements.cuh"
#include "query_walk.cuh"

constexpr int ROW_LANES = 8;
// By the largest head dim, DIM: rows of a tile, threads, numbers of a row that a lane sums.
template <int DIM> constexpr int PLAIN_TILE = DIM <= 256 ? 16 : 8;
template <int DIM> constexpr int PLAIN_THREADS = PLAIN_TILE<DIM> * ROW_LANES;
template <int DIM> constexpr int LANE_SUMS = DIM / ROW_LANES;

// ---- shared memory -----------------------------------------------------------------------------

// ROWS rows of `dim` f32. Rows are an odd multiple of 16 bytes apart, so that eight lanes that read eight of
// them access different banks.
template <int ROWS> struct plain_tile {
    shared_address base;
    int row_floats;

    RT_HOST_DEVICE plain_tile(shared_address base, int64_t dim)
        : base(base), row_floats(((int)dim + 31) / 32 * 32 + 4) {}
    RT_HOST_DEVICE shared_address at(int row, int col) const {
        return base + (shared_address)((row * row_floats + col) * 4);
    }
    RT_HOST_DEVICE shared_address end() const { return at(ROWS, 0); }
};

// (ROWS, ROWS) numbers of pairs of rows and columns. The same eight lanes write and read a row.
template <int ROWS> struct plain_pairs {
    shared_address base;

    RT_HOST_DEVICE shared_address at(int row, int col) const {
        return base + (shared_address)((row * (ROWS + 1) + col) * 4);
    }
    RT_HOST_DEVICE shared_address end() const { return at(ROWS - 1, ROWS + 1); }
};

template <int DIM> using plain_key_walk = key_walk<PLAIN_TILE<DIM>, PLAIN_TILE<DIM>>;
template <int DIM> using plain_query_walk = query_walk<PLAIN_TILE<DIM>, PLAIN_TILE<DIM>>;

// Layouts of shared memory, which depend on the head dims; the storage of the walk comes last. The host asks a
// layout at base 0 for the bytes of a launch.
template <int DIM> struct plain_forward_memory {
    plain_tile<PLAIN_TILE<DIM>> q, k, v;
    plain_pairs<PLAIN_TILE<DIM>> weights;

    RT_HOST_DEVICE plain_forward_memory(shared_address base, const rt_attn_block &p)
        : q(base, p.head_dim), k(q.end(), p.head_dim), v(k.end(), p.v_head_dim), weights{v.end()} {}
    RT_HOST_DEVICE shared_address walk() const { return weights.end(); }
};
template <int DIM> struct plain_backward_memory {
    plain_tile<PLAIN_TILE<DIM>> q, k, v, dout;
    plain_pairs<PLAIN_TILE<DIM>> weights, dscores;

    RT_HOST_DEVICE plain_backward_memory(shared_address base, const rt_attn_block &p)
        : q(base, p.head_dim), k(q.end(), p.head_dim), v(k.end(), p.v_head_dim), dout(v.end(), p.v_head_dim),
          weights{dout.end()}, dscores{weights.end()} {}
    RT_HOST_DEVICE shared_address walk() const { return dscores.end(); }
};
template <int DIM>
constexpr size_t MOST_PLAIN_BYTES =
    4 * PLAIN_TILE<DIM> * (DIM + 4) * 4 + 2 * PLAIN_TILE<DIM> * (PLAIN_TILE<DIM> + 1) * 4 +
    sizeof(typename plain_key_walk<DIM>::storage);
static_assert(MOST_PLAIN_BYTES<256> <= MAX_SHARED_BYTES && MOST_PLAIN_BYTES<512> <= MAX_SHARED_BYTES);
template <class Memory, class Walk> int plain_bytes(const rt_attn_block &p) {
    return (int)Memory(0, p).walk() + (int)sizeof(typename Walk::storage);
}

// ---- loads, products and scores ----------------------------------------------------------------

template <int ROWS, class T>
RT_DEVICE void load_plain(plain_tile<ROWS> to, const T *from, int64_t row_stride, int num_rows, int64_t dim) {
    for (int row = thread_index() / ROW_LANES, col = thread_index() % ROW_LANES; col < dim; col += ROW_LANES)
        st_shared(to.at(row, col), row < num_rows ? widen(ld_global(from + row * row_stride + col)) : 0.0f);
}
template <int ROWS, class T>
RT_DEVICE void load_plain_queries(plain_tile<ROWS> to, token_rows<const T> rows, const rt_attn_block &p, int head,
                                  int token) {
    load_plain(to, rows.at(cta_index_z(), token, head), rows.stride[1], (int)p.num_queries - token, rows.dim);
}
template <int ROWS, class T>
RT_DEVICE void load_plain_keys(plain_tile<ROWS> to, token_rows<const T> rows, const rt_run &run, int first) {
    load_plain(to, rows.at(cta_index_z(), run.local_begin + first, cta_index_y()), rows.stride[1],
               (int)run.length - first, rows.dim);
}

template <int ROWS> RT_DEVICE float dot(plain_tile<ROWS> a, int a_row, plain_tile<ROWS> b, int b_row, int64_t dim) {
    float sum = 0;
    for (int d = 0; d < dim; d++) sum = fmaf(ld_shared<float>(a.at(a_row, d)), ld_shared<float>(b.at(b_row, d)), sum);
    return sum;
}

// sum[j] += weight * (number row_lane + 8 j of a row).
template <int SUMS, int ROWS>
RT_DEVICE void add_plain(float (&sum)[SUMS], float weight, plain_tile<ROWS> from, int row, int64_t dim) {
    const int first = thread_index() % ROW_LANES;
#pragma unroll
    for (int j = 0; j < SUMS; j++) {
        const int col = first + ROW_LANES * j;
        if (col < dim) sum[j] = fmaf(weight, ld_shared<float>(from.at(row, col)), sum[j]);
    }
}

// Stands in for the weight of a pair that is not attended: it is skipped, whatever its numbers are.
constexpr float NOT_ATTENDED = -1;

RT_DEVICE float plain_score(const attn_args &args, float product) {
    const float score = (float)args.p.scale * product;
    return args.inverse_softcap > 0 ? (float)args.p.softcap * tanhf(score * args.inverse_softcap) : score;
}

// Whether the mask's interval of a key, row `key` of k, holds a query.
RT_DEVICE bool key_meets(const rt_attn_block &p, int64_t key, int token) {
    return p.key_begin == NULL || contains(queries_of_key(p, key, cta_index_z()), position_of_query(p, token));
}

// What dropout multiplies a weight by.
RT_DEVICE float dropout_factor(const attn_args &args, int head, int token, int64_t position) {
    const rt_attn_block &p = args.p;
    if (!(p.dropout > 0)) return 1;
    const uint32_t row = rt_dropout_row(ld_global(p.dropout_rows + cta_index_z()), head);
    const rt_philox counter = {{(uint32_t)(position / 4), (uint32_t)ld_global(p.q_positions + token), row, p.stream}};
    const rt_philox random = rt_philox4x32(counter, p.seed, p.step);
    const int which = (int)(position % 4); // chosen without an index, for which the words would have to be in memory
    const uint32_t low = which % 2 == 0 ? random.word[0] : random.word[1];
    const uint32_t high = which % 2 == 0 ? random.word[2] : random.word[3];
    return (which < 2 ? low : high) <= args.dropout.last_kept ? (float)args.dropout.scale : 0;
}

// ---- forward -----------------------------------------------------------------------------------

template <class T, int DIM> RT_KERNEL(PLAIN_THREADS<DIM>, 4) attn_fwd_plain_kernel(RT_PARAMS fwd_args args) {
    constexpr int TILE = PLAIN_TILE<DIM>;
    const rt_attn_block &p = args.p;
    const int row = thread_index() / ROW_LANES, row_lane = thread_index() % ROW_LANES;
    const query_tile queries = query_tile_of_cta<TILE>(args);
    const plain_forward_memory<DIM> smem(shared_base(), p);
    const plain_key_walk<DIM> walk{args, {smem.walk()}};

    float top = -INFINITY, sum = 0, out[LANE_SUMS<DIM>] = {}; // sum: of this lane's columns
    load_plain_queries(smem.q, q_of<T>(p), p, queries.head, queries.first_token);
    for (auto at = walk.first(); !walk.ended(at); at = walk.after(at)) {
        const int first_key = at.tile * TILE;
        syncthreads(); // all warps are done with the previous tile
        load_plain_keys(smem.k, k_of<T>(p), args.runs[at.run], first_key);
        load_plain_keys(smem.v, v_of<T>(p), args.runs[at.run], first_key);
        syncthreads();

        const key_range keys = walk.range(at.slot, row);
        constexpr int WEIGHTS = TILE / ROW_LANES; // of this lane
        float scores[WEIGHTS], new_top = top;
        bool attended[WEIGHTS];
#pragma unroll
        for (int i = 0; i < WEIGHTS; i++) {
            const int col = row_lane + ROW_LANES * i;
            attended[i] = keys.lo <= first_key + col && first_key + col < keys.hi &&
                          key_meets(p, args.runs[at.run].local_begin + first_key + col, queries.first_token + row);
            scores[i] = attended[i] ? plain_score(args, dot(smem.q, row, smem.k, col, p.head_dim)) : -INFINITY;
            new_top = fmaxf(new_top, scores[i]);
        }
        for (int mask = 1; mask < ROW_LANES; mask *= 2) new_top = fmaxf(new_top, shfl_xor_sync(new_top, mask));
        const float reference = new_top == -INFINITY ? 0 : new_top, rescale = expf(top - reference);
        top = new_top;
        sum *= rescale;
        for (float &x : out) x *= rescale;
        for (int i = 0; i < WEIGHTS; i++) {
            float weight = NOT_ATTENDED;
            if (attended[i]) {
                sum += weight = expf(scores[i] - reference); // of all keys
                const rt_run &run = args.runs[at.run];
                const int64_t key = first_key + row_lane + ROW_LANES * i;
                weight *=
                    dropout_factor(args, queries.head, queries.first_token + row, run.global_begin + key * run.stride);
            }
            st_shared(smem.weights.at(row, row_lane + ROW_LANES * i), weight);
        }
        syncwarp();
#pragma unroll 1
        for (int col = 0; col < TILE; col++) {
            const float weight = ld_shared<float>(smem.weights.at(row, col));
            if (weight != NOT_ATTENDED) add_plain(out, weight, smem.v, col, p.v_head_dim);
        }
    }

    for (int mask = 1; mask < ROW_LANES; mask *= 2) sum += shfl_xor_sync(sum, mask);
    const int token = queries.first_token + row;
    const int64_t lse_at = (queries.batch * p.num_heads + queries.head) * p.num_queries + token;
    const bool fresh = args.fwd.fresh;
    const double before = !fresh && token < p.num_queries ? load_lse(p, args.fwd.lse, lse_at) : -INFINITY;
    syncwarp(); // all lanes of the row have read its lse
    const bool unchanged = sum == 0 && !fresh;
    if (token >= p.num_queries || (unchanged && args.fwd.rounded_out == nullptr)) return;
    const merged_lse merged = merge_lse(before, (double)top + (double)logf(sum));
    if (row_lane == 0 && !unchanged) store_lse(args.fwd, lse_at, sum == 0 ? -INFINITY : merged.lse);
    const float inverse = 1 / sum;
    float *const to = out_of(args.fwd).at(queries.batch, token, queries.head);
#pragma unroll
    for (int j = 0; j < LANE_SUMS<DIM>; j++) {
        const int col = row_lane + ROW_LANES * j;
        if (col >= p.v_head_dim) continue;
        const float kept = unchanged || before != -INFINITY ? ld_global(to + col) : 0;
        const float value = out[j] * inverse;
        const float result = sum == 0 ? kept : before == -INFINITY ? value : kept - merged.share * (kept - value);
        if (args.fwd.rounded_out != nullptr)
            st_global(rounded_out_at<T>(args.fwd, queries.batch, token, queries.head) + col, narrow<T>(result));
        else
            st_global(to + col, result);
    }
}

// ---- backward ----------------------------------------------------------------------------------

// lse as a sum of two f32, and delta, of one query.
struct plain_sums {
    float lse, lse_rest, delta;
};
RT_DEVICE plain_sums load_plain_sums(const rt_attn_bwd_params &p, int head, int token) {
    const int64_t at = (cta_index_z() * p.block.num_heads + head) * p.block.num_queries + token;
    const double lse = load_lse(p.block, p.lse, at);
    return {(float)lse, isfinite(lse) ? (float)(lse - (double)(float)lse) : 0, ld_global((const float *)p.delta + at)};
}

// P (without what is dropped) and dS of an attended pair.
struct plain_gradients {
    float weight, dscore;
};
RT_DEVICE plain_gradients differentiate(const attn_args &args, float product, float dweight, plain_sums of,
                                        float factor) {
    const float score = plain_score(args, product), tanh_x = score * args.inverse_softcap;
    const float weight = expf((score - of.lse) - of.lse_rest);
    return {weight * factor,
            weight * (factor * dweight - of.delta) * (args.inverse_softcap > 0 ? 1 - tanh_x * tanh_x : 1)};
}

// result = row + factor * sum, rounded to R; the two may be the same.
template <class R, int SUMS>
RT_DEVICE void add_plain_row(const float *row, R *result, int64_t dim, bool fresh, float factor,
                             const float (&sum)[SUMS]) {
#pragma unroll
    for (int j = 0; j < SUMS; j++) {
        const int col = thread_index() % ROW_LANES + ROW_LANES * j;
        if (col < dim) st_global(result + col, narrow<R>((fresh ? 0 : ld_global(row + col)) + factor * sum[j]));
    }
}

// dq: rows are queries.
template <class T, int DIM> RT_KERNEL(PLAIN_THREADS<DIM>, 4) attn_bwd_queries_plain_kernel(RT_PARAMS bwd_args args) {
    constexpr int TILE = PLAIN_TILE<DIM>;
    const rt_attn_block &p = args.p;
    const int row = thread_index() / ROW_LANES, row_lane = thread_index() % ROW_LANES;
    const query_tile queries = query_tile_of_cta<TILE>(args);
    const plain_backward_memory<DIM> smem(shared_base(), p);
    const plain_key_walk<DIM> walk{args, {smem.walk()}};

    const int token = queries.first_token + row;
    const plain_sums own = token < p.num_queries ? load_plain_sums(args.bwd, queries.head, token) : plain_sums{0, 0, 0};
    float dq[LANE_SUMS<DIM>] = {};
    load_plain_queries(smem.q, q_of<T>(p), p, queries.head, queries.first_token);
    load_plain_queries(smem.dout, dout_of<T>(args.bwd), p, queries.head, queries.first_token);
    for (auto at = walk.first(); !walk.ended(at); at = walk.after(at)) {
        const int first_key = at.tile * TILE;
        syncthreads();
        load_plain_keys(smem.k, k_of<T>(p), args.runs[at.run], first_key);
        load_plain_keys(smem.v, v_of<T>(p), args.runs[at.run], first_key);
        syncthreads();
        const key_range keys = walk.range(at.slot, row);
#pragma unroll 1
        for (int col = row_lane; col < TILE; col += ROW_LANES) {
            plain_gradients pair = {NOT_ATTENDED, 0};
            const rt_run &run = args.runs[at.run];
            if (keys.lo <= first_key + col && first_key + col < keys.hi &&
                key_meets(p, run.local_begin + first_key + col, token))
                pair = differentiate(
                    args, dot(smem.q, row, smem.k, col, p.head_dim), dot(smem.dout, row, smem.v, col, p.v_head_dim),
                    own, dropout_factor(args, queries.head, token, run.global_begin + (first_key + col) * run.stride));
            st_shared(smem.weights.at(row, col), pair.weight);
            st_shared(smem.dscores.at(row, col), pair.dscore);
        }
        syncwarp();
#pragma unroll 1
        for (int col = 0; col < TILE; col++)
            if (ld_shared<float>(smem.weights.at(row, col)) != NOT_ATTENDED)
                add_plain(dq, ld_shared<float>(smem.dscores.at(row, col)), smem.k, col, p.head_dim);
    }
    if (token >= p.num_queries) return;
    float *const row_of_dq = dq_of(args.bwd).at(queries.batch, token, queries.head);
    add_plain_row(row_of_dq, row_of_dq, p.head_dim, false, (float)p.scale, dq);
}

// dk and dv: rows are keys.
template <class T, int DIM> RT_KERNEL(PLAIN_THREADS<DIM>, 4) attn_bwd_keys_plain_kernel(RT_PARAMS bwd_args args) {
    constexpr int TILE = PLAIN_TILE<DIM>;
    const rt_attn_block &p = args.p;
    const int row = thread_index() / ROW_LANES, row_lane = thread_index() % ROW_LANES;
    const plain_backward_memory<DIM> smem(shared_base(), p);
    const plain_query_walk<DIM> walk{args, {smem.walk()}};
    if (thread_index() == 0) walk.choose_keys(cta_index_x(), cta_index_y(), cta_index_z());
    syncthreads();

    const rt_run &run = walk.run();
    const int position = walk.position_of(row);
    auto at = walk.first();
    if (walk.ended(at) && !args.bwd.fresh) return; // no query attends these keys
    float dk[LANE_SUMS<DIM>] = {}, dv[LANE_SUMS<DIM>] = {};
    load_plain_keys(smem.k, k_of<T>(p), run, walk.keys().first_key);
    load_plain_keys(smem.v, v_of<T>(p), run, walk.keys().first_key);
    for (; !walk.ended(at); at = walk.after(at)) {
        const int first_token = at.tile * TILE, head = walk.head_of(at);
        syncthreads();
        load_plain_queries(smem.q, q_of<T>(p), p, head, first_token);
        load_plain_queries(smem.dout, dout_of<T>(args.bwd), p, head, first_token);
        syncthreads();
#pragma unroll 1
        for (int col = row_lane; col < TILE; col += ROW_LANES) {
            plain_gradients pair = {NOT_ATTENDED, 0};
            const int token = first_token + col;
            const int64_t mask_at = cta_index_z() * p.mask_batch_stride + token;
            if (token < p.num_queries && ld_global(p.begin + mask_at) <= position &&
                position < ld_global(p.end + mask_at) &&
                key_meets(p, run.local_begin + walk.keys().first_key + row, token))
                pair = differentiate(
                    args, dot(smem.k, row, smem.q, col, p.head_dim), dot(smem.v, row, smem.dout, col, p.v_head_dim),
                    load_plain_sums(args.bwd, head, token), dropout_factor(args, head, token, position));
            st_shared(smem.weights.at(row, col), pair.weight);
            st_shared(smem.dscores.at(row, col), pair.dscore);
        }
        syncwarp();
#pragma unroll 1
        for (int col = 0; col < TILE; col++) {
            const float weight = ld_shared<float>(smem.weights.at(row, col));
            if (weight == NOT_ATTENDED) continue;
            add_plain(dv, weight, smem.dout, col, p.v_head_dim);
            add_plain(dk, ld_shared<float>(smem.dscores.at(row, col)), smem.q, col, p.head_dim);
        }
    }
    const int64_t key = walk.keys().first_key + row, token = run.local_begin + key;
    if (key >= run.length) return;
    const auto add = [&](token_rows<float> rows, void *rounded, float factor, const auto &sum) {
        float *const to = rows.at(cta_index_z(), token, cta_index_y());
        if (rounded != nullptr)
            add_plain_row(to, rounded_key_at<T>(p, rounded, rows.dim, cta_index_z(), token, cta_index_y()), rows.dim,
                          args.bwd.fresh, factor, sum);
        else
            add_plain_row(to, to, rows.dim, args.bwd.fresh, factor, sum);
    };
    add(dk_of(args.bwd), args.bwd.rounded_dk, (float)p.scale, dk);
    add(dv_of(args.bwd), args.bwd.rounded_dv, 1, dv);
}

#endif // RINGTILE_CUDA_ATTN_PLAIN_CUH
