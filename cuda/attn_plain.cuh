// Attention in f32, exact to the rounding of f32: every product is a multiply-add, for checks and for models that are
// trained in f32. The blocking is the one of attn_fwd.cuh and attn_bwd.cuh in small: a block of threads has a tile of 16
// rows, eight lanes each, and goes over tiles of 16 columns; a lane computes two weights of its row, and every eighth
// number of its sums.
#ifndef RINGTILE_CUDA_ATTN_PLAIN_CUH
#define RINGTILE_CUDA_ATTN_PLAIN_CUH

#include "attn_query_walk.cuh"
#include "attn_tile.cuh"

constexpr int PLAIN_TILE = 16, ROW_LANES = 8, PLAIN_THREADS = PLAIN_TILE * ROW_LANES;
constexpr int MOST_OF_LANE = 256 / ROW_LANES; // numbers of a row that a lane sums

// PLAIN_TILE rows of `dim` f32 in shared memory. Rows are an odd multiple of 16 bytes apart, so that what eight lanes
// read of eight of them lies in different banks.
struct plain_tile {
    shared_address base;
    int row_floats;

    static RT_HOST_DEVICE int row_floats_of(int64_t dim) { return ((int)dim + 31) / 32 * 32 + 4; }
    static RT_HOST_DEVICE int bytes(int64_t dim) { return PLAIN_TILE * row_floats_of(dim) * 4; }
    RT_DEVICE shared_address at(int row, int col) const {
        return base + (shared_address)((row * row_floats + col) * 4);
    }
};

RT_DEVICE void load_plain(plain_tile to, const float *from, int64_t row_stride, int num_rows, int64_t dim) {
    for (int row = thread_index() / ROW_LANES, col = thread_index() % ROW_LANES; col < dim; col += ROW_LANES)
        shared_store(to.at(row, col), row < num_rows ? global_load(from + row * row_stride + col) : 0.0f);
}
RT_DEVICE void load_plain_queries(plain_tile to, const void *array, const int64_t (&stride)[3], int64_t dim,
                                  const rt_attn_params &p, int head, int token) {
    load_plain(to, (const float *)array + block_index_z() * stride[0] + token * stride[1] + head * stride[2],
               stride[1], (int)p.num_queries - token, dim);
}
RT_DEVICE void load_plain_keys(plain_tile to, const void *array, const int64_t (&stride)[3], int64_t dim,
                               const rt_run &run, int first) {
    const int64_t row = run.local_begin + first;
    load_plain(to,
               (const float *)array + block_index_z() * stride[0] + row * stride[1] +
                   block_index_y() * stride[2],
               stride[1], (int)run.length - first, dim);
}

RT_DEVICE float dot(plain_tile a, int a_row, plain_tile b, int b_row, int64_t dim) {
    float sum = 0;
    for (int d = 0; d < dim; d++)
        sum = fmaf(shared_load<float>(a.at(a_row, d)), shared_load<float>(b.at(b_row, d)), sum);
    return sum;
}

// sum[j] += weight * (numbers row_lane + 8 j of a row).
RT_DEVICE void add_plain(float (&sum)[MOST_OF_LANE], float weight, plain_tile from, int row, int64_t dim) {
    const int first = thread_index() % ROW_LANES;
#pragma unroll
    for (int j = 0; j < MOST_OF_LANE; j++) {
        const int col = first + ROW_LANES * j;
        if (col < dim) sum[j] = fmaf(weight, shared_load<float>(from.at(row, col)), sum[j]);
    }
}

// What a pair that is not attended has in place of its weight: it takes part in nothing, whatever its numbers are.
constexpr float NOT_ATTENDED = -1;

// (PLAIN_TILE, PLAIN_TILE) numbers of pairs; a row is written and read by the same eight lanes.
RT_DEVICE shared_address pair_at(shared_address base, int row, int col) {
    return base + (shared_address)((row * (PLAIN_TILE + 1) + col) * 4);
}
constexpr int PAIRS_BYTES = PLAIN_TILE * (PLAIN_TILE + 1) * 4;

RT_DEVICE float plain_score(const attn_args &args, float product) {
    const float score = (float)args.p.scale * product;
    return args.inverse_softcap > 0 ? (float)args.p.softcap * tanhf(score * args.inverse_softcap) : score;
}

// ---- forward -----------------------------------------------------------------------------------

RT_KERNEL(PLAIN_THREADS, 4) attn_fwd_plain_kernel(RT_PARAMS attn_args args) {
    const rt_attn_params &p = args.p;
    const int row = thread_index() / ROW_LANES, row_lane = thread_index() % ROW_LANES;
    const query_tile queries = query_tile_of_block<PLAIN_TILE>(p);
    const int d_floats = plain_tile::row_floats_of(p.head_dim),
              dv_floats = plain_tile::row_floats_of(p.v_head_dim);
    const plain_tile q{shared_base(), d_floats}, k{q.at(PLAIN_TILE, 0), d_floats},
        v{k.at(PLAIN_TILE, 0), dv_floats};
    const shared_address weights = v.at(PLAIN_TILE, 0);
    const key_walk<PLAIN_TILE, PLAIN_TILE> walk{args, weights + PAIRS_BYTES};

    float top = -INFINITY, sum = 0, out[MOST_OF_LANE] = {}; // sum: of this lane's columns
    load_plain_queries(q, p.q, p.q_stride, p.head_dim, p, queries.head, queries.first_token);
    for (auto at = walk.first(); !walk.ended(at); at = walk.after(at)) {
        const int first_key = at.tile * PLAIN_TILE;
        block_barrier(); // nobody reads the tile before any more
        load_plain_keys(k, p.k, p.k_stride, p.head_dim, args.runs[at.run], first_key);
        load_plain_keys(v, p.v, p.v_stride, p.v_head_dim, args.runs[at.run], first_key);
        block_barrier();

        const key_range keys = walk.range(at.slot, row);
        float scores[2], new_top = top;
        bool attended[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int col = row_lane + ROW_LANES * i;
            attended[i] = keys.lo <= first_key + col && first_key + col < keys.hi;
            scores[i] = attended[i] ? plain_score(args, dot(q, row, k, col, p.head_dim)) : -INFINITY;
            new_top = fmaxf(new_top, scores[i]);
        }
        for (int mask = 1; mask < ROW_LANES; mask *= 2) new_top = fmaxf(new_top, shuffle_xor(new_top, mask));
        const float reference = new_top == -INFINITY ? 0 : new_top, rescale = expf(top - reference);
        top = new_top;
        sum *= rescale;
        for (float &x : out) x *= rescale;
        for (int i = 0; i < 2; i++) {
            float weight = NOT_ATTENDED;
            if (attended[i]) sum += weight = expf(scores[i] - reference);
            shared_store(pair_at(weights, row, row_lane + ROW_LANES * i), weight);
        }
        warp_barrier();
#pragma unroll 1
        for (int col = 0; col < PLAIN_TILE; col++) {
            const float weight = shared_load<float>(pair_at(weights, row, col));
            if (weight != NOT_ATTENDED) add_plain(out, weight, v, col, p.v_head_dim);
        }
    }

    for (int mask = 1; mask < ROW_LANES; mask *= 2) sum += shuffle_xor(sum, mask);
    const int token = queries.first_token + row;
    const int64_t lse_at = (queries.batch * p.num_heads + queries.head) * p.num_queries + token;
    const bool fresh = args.out_is_fresh;
    const double before = !fresh && token < p.num_queries ? load_lse(p, lse_at) : -INFINITY;
    warp_barrier(); // all lanes of the row have read its lse
    if (token >= p.num_queries || (sum == 0 && !fresh)) return;
    const merged_lse merged = merge_lse(before, (double)top + (double)logf(sum));
    if (row_lane == 0) store_lse(p, lse_at, sum == 0 ? -INFINITY : merged.lse);
    const float inverse = 1 / sum;
    float *const to = (float *)p.out + queries.batch * p.out_stride[0] + token * p.out_stride[1] +
                      queries.head * p.out_stride[2];
#pragma unroll
    for (int j = 0; j < MOST_OF_LANE; j++) {
        const int col = row_lane + ROW_LANES * j;
        if (col >= p.v_head_dim) continue;
        const float value = sum == 0 ? 0 : out[j] * inverse,
                    kept = before == -INFINITY ? 0 : global_load(to + col);
        global_store(to + col, before == -INFINITY ? value : kept - merged.share * (kept - value));
    }
}

// ---- backward ----------------------------------------------------------------------------------

// lse as a sum of two f32, and delta, of one query.
struct plain_sums {
    float lse, lse_rest, delta;
};
RT_DEVICE plain_sums load_plain_sums(const rt_attn_params &p, int head, int token) {
    const int64_t at = (block_index_z() * p.num_heads + head) * p.num_queries + token;
    const double lse = load_lse(p, at);
    return {(float)lse, isfinite(lse) ? (float)(lse - (double)(float)lse) : 0,
            global_load((const float *)p.delta + at)};
}

// One attended pair: its weight P and its dS.
struct plain_pair {
    float weight, dscore;
};
RT_DEVICE plain_pair plain_gradient(const attn_args &args, float product, float dweight, plain_sums of) {
    const float score = plain_score(args, product), tanh_x = score * args.inverse_softcap;
    const float weight = expf((score - of.lse) - of.lse_rest);
    return {weight, weight * (dweight - of.delta) * (args.inverse_softcap > 0 ? 1 - tanh_x * tanh_x : 1)};
}

RT_DEVICE void add_plain_row(float *row, int64_t dim, bool fresh, float factor,
                             const float (&sum)[MOST_OF_LANE]) {
#pragma unroll
    for (int j = 0; j < MOST_OF_LANE; j++) {
        const int col = thread_index() % ROW_LANES + ROW_LANES * j;
        if (col < dim) global_store(row + col, (fresh ? 0 : global_load(row + col)) + factor * sum[j]);
    }
}

// Rows are queries: dq.
RT_KERNEL(PLAIN_THREADS, 4) attn_bwd_queries_plain_kernel(RT_PARAMS attn_args args) {
    const rt_attn_params &p = args.p;
    const int row = thread_index() / ROW_LANES, row_lane = thread_index() % ROW_LANES;
    const query_tile queries = query_tile_of_block<PLAIN_TILE>(p);
    const int d_floats = plain_tile::row_floats_of(p.head_dim),
              dv_floats = plain_tile::row_floats_of(p.v_head_dim);
    const plain_tile q{shared_base(), d_floats}, k{q.at(PLAIN_TILE, 0), d_floats},
        dout{k.at(PLAIN_TILE, 0), dv_floats}, v{dout.at(PLAIN_TILE, 0), dv_floats};
    const shared_address weights = v.at(PLAIN_TILE, 0), dscores = weights + PAIRS_BYTES;
    const key_walk<PLAIN_TILE, PLAIN_TILE> walk{args, dscores + PAIRS_BYTES};

    const int token = queries.first_token + row;
    const plain_sums mine =
        token < p.num_queries ? load_plain_sums(p, queries.head, token) : plain_sums{0, 0, 0};
    float dq[MOST_OF_LANE] = {};
    load_plain_queries(q, p.q, p.q_stride, p.head_dim, p, queries.head, queries.first_token);
    load_plain_queries(dout, p.dout, p.dout_stride, p.v_head_dim, p, queries.head, queries.first_token);
    for (auto at = walk.first(); !walk.ended(at); at = walk.after(at)) {
        const int first_key = at.tile * PLAIN_TILE;
        block_barrier();
        load_plain_keys(k, p.k, p.k_stride, p.head_dim, args.runs[at.run], first_key);
        load_plain_keys(v, p.v, p.v_stride, p.v_head_dim, args.runs[at.run], first_key);
        block_barrier();
        const key_range keys = walk.range(at.slot, row);
#pragma unroll 1
        for (int col = row_lane; col < PLAIN_TILE; col += ROW_LANES) {
            plain_pair pair = {NOT_ATTENDED, 0};
            if (keys.lo <= first_key + col && first_key + col < keys.hi)
                pair = plain_gradient(args, dot(q, row, k, col, p.head_dim),
                                      dot(dout, row, v, col, p.v_head_dim), mine);
            shared_store(pair_at(weights, row, col), pair.weight);
            shared_store(pair_at(dscores, row, col), pair.dscore);
        }
        warp_barrier();
#pragma unroll 1
        for (int col = 0; col < PLAIN_TILE; col++)
            if (shared_load<float>(pair_at(weights, row, col)) != NOT_ATTENDED)
                add_plain(dq, shared_load<float>(pair_at(dscores, row, col)), k, col, p.head_dim);
    }
    if (token < p.num_queries)
        add_plain_row((float *)p.dq + queries.batch * p.dq_stride[0] + token * p.dq_stride[1] +
                          queries.head * p.dq_stride[2],
                      p.head_dim, false, (float)p.scale, dq);
}

// Rows are keys: dk, dv.
RT_KERNEL(PLAIN_THREADS, 4) attn_bwd_keys_plain_kernel(RT_PARAMS attn_args args) {
    const rt_attn_params &p = args.p;
    const int row = thread_index() / ROW_LANES, row_lane = thread_index() % ROW_LANES;
    const int d_floats = plain_tile::row_floats_of(p.head_dim),
              dv_floats = plain_tile::row_floats_of(p.v_head_dim);
    const plain_tile k{shared_base(), d_floats}, q{k.at(PLAIN_TILE, 0), d_floats},
        v{q.at(PLAIN_TILE, 0), dv_floats}, dout{v.at(PLAIN_TILE, 0), dv_floats};
    const shared_address weights = dout.at(PLAIN_TILE, 0), dscores = weights + PAIRS_BYTES;

    const query_walk<PLAIN_TILE, PLAIN_TILE> walk{args, dscores + PAIRS_BYTES};
    if (thread_index() == 0)
        walk.choose_keys(key_tile_at<PLAIN_TILE>(args, block_index(), block_index_y(), block_index_z()));
    block_barrier();

    const rt_run &run = walk.run();
    const int position = walk.position_of(row);
    auto at = walk.first();
    if (walk.ended(at) && !p.fresh) return; // nobody attends these keys
    float dk[MOST_OF_LANE] = {}, dv[MOST_OF_LANE] = {};
    load_plain_keys(k, p.k, p.k_stride, p.head_dim, run, walk.keys().first_key);
    load_plain_keys(v, p.v, p.v_stride, p.v_head_dim, run, walk.keys().first_key);
    for (; !walk.ended(at); at = walk.after(at)) {
        const int first_token = at.tile * PLAIN_TILE, head = walk.head_of(at);
        block_barrier();
        load_plain_queries(q, p.q, p.q_stride, p.head_dim, p, head, first_token);
        load_plain_queries(dout, p.dout, p.dout_stride, p.v_head_dim, p, head, first_token);
        block_barrier();
#pragma unroll 1
        for (int col = row_lane; col < PLAIN_TILE; col += ROW_LANES) {
            plain_pair pair = {NOT_ATTENDED, 0};
            const int token = first_token + col;
            const int64_t mask_at = block_index_z() * p.mask_batch_stride + token;
            if (token < p.num_queries && global_load(p.begin + mask_at) <= position &&
                position < global_load(p.end + mask_at))
                pair = plain_gradient(args, dot(k, row, q, col, p.head_dim),
                                      dot(v, row, dout, col, p.v_head_dim), load_plain_sums(p, head, token));
            shared_store(pair_at(weights, row, col), pair.weight);
            shared_store(pair_at(dscores, row, col), pair.dscore);
        }
        warp_barrier();
#pragma unroll 1
        for (int col = 0; col < PLAIN_TILE; col++) {
            const float weight = shared_load<float>(pair_at(weights, row, col));
            if (weight == NOT_ATTENDED) continue;
            add_plain(dv, weight, dout, col, p.v_head_dim);
            add_plain(dk, shared_load<float>(pair_at(dscores, row, col)), q, col, p.head_dim);
        }
    }
    const int64_t key = walk.keys().first_key + row, token = run.local_begin + key;
    if (key >= run.length) return;
    add_plain_row((float *)p.dk + block_index_z() * p.dk_stride[0] + token * p.dk_stride[1] +
                      block_index_y() * p.dk_stride[2],
                  p.head_dim, p.fresh, (float)p.scale, dk);
    add_plain_row((float *)p.dv + block_index_z() * p.dv_stride[0] + token * p.dv_stride[1] +
                      block_index_y() * p.dv_stride[2],
                  p.v_head_dim, p.fresh, 1, dv);
}

#endif // RINGTILE_CUDA_ATTN_PLAIN_CUH
