// The online softmax of the forward kernels, between their two products, and the final merge into out and lse.
#ifndef RINGTILE_CUDA_ATTN_SOFTMAX_CUH
#define RINGTILE_CUDA_ATTN_SOFTMAX_CUH

#include "key_walk.cuh"

// The running softmax of a lane's rows, which are 8 apart: rows 2 m and 2 m + 1 are in fragment m.
template <int M> struct softmax_rows {
    float top[2 * M]; // running max of the scores, in units of log 2; -inf before the first key
    float sum[2 * M]; // of the weights in this lane's columns, relative to top
};
template <int M> RT_DEVICE void clear(softmax_rows<M> &rows) {
#pragma unroll
    for (int r = 0; r < 2 * M; r++) rows.top[r] = -INFINITY, rows.sum[r] = 0;
}

// The same by the mask's second side.
template <int M, int N, class Walk>
RT_DEVICE void mask_scores_by_keys(accumulator<M, N> &scores, const Walk &walk, typename Walk::place at) {
    const rt_attn_block &p = walk.args.p;
    const rt_run &run = walk.args.runs[at.run];
    const query_tile queries = walk.queries();
    int positions[2 * M];
#pragma unroll
    for (int r = 0; r < 2 * M; r++) {
        const int token = queries.first_token + lane_row<M>(r);
        positions[r] = token < p.num_queries ? position_of_query(p, token) : INT32_MAX;
    }
    const int first_key = at.tile * 8 * N + lane_index() % 4 * 2;
    uint32_t attended[2 * M] = {}; // a bit for each column: the loop needs few registers
    static_assert(2 * N <= 32);
#pragma unroll 4
    for (int i = 0; i < 2 * N; i++) {
        const int key = first_key + i / 2 * 8 + i % 2;
        const interval of = key < run.length ? queries_of_key(p, run.local_begin + key, queries.batch) : interval{0, 0};
#pragma unroll
        for (int r = 0; r < 2 * M; r++) attended[r] |= (uint32_t)contains(of, positions[r]) << i;
    }
#pragma unroll
    for (int r = 0; r < 2 * M; r++)
#pragma unroll
        for (int i = 0; i < 2 * N; i++)
            if ((attended[r] >> i & 1) == 0) scores[r / 2][i / 2][r % 2 * 2 + i % 2] = -INFINITY;
}
// Sets scores to -inf where a query does not attend a key.
template <int M, int N, class Walk>
RT_DEVICE void mask_scores(accumulator<M, N> &scores, const Walk &walk, typename Walk::place at) {
    const int lane = lane_index(), first_key = at.tile * 8 * N + lane % 4 * 2;
#pragma unroll
    for (int r = 0; r < 2 * M; r++) {
        const key_range keys = walk.range(at.slot, lane_row<M>(r));
#pragma unroll
        for (int i = 0; i < 2 * N; i++) {
            const int key = first_key + i / 2 * 8 + i % 2;
            if (key < keys.lo || key >= keys.hi) scores[r / 2][i / 2][r % 2 * 2 + i % 2] = -INFINITY;
        }
    }
    if (at.is_cut_by_keys()) mask_scores_by_keys(scores, walk, at);
}

// Updates the running max and sum; the caller multiplies O by `rescale`. Weights never exceed 1: larger ones, of a max
// that lags behind, would lose bits of the 16-bit product. `reference` is rows.top, or 0 where that is -inf: a row
// without a finite score gets weights of 0 from any finite reference.
template <int M, int N>
RT_DEVICE void update_max(const accumulator<M, N> &scores, float scale_log2, softmax_rows<M> &rows,
                          float (&reference)[2 * M], float (&rescale)[2 * M]) {
#pragma unroll
    for (int r = 0; r < 2 * M; r++) {
        const int m = r / 2, first = r % 2 * 2; // elements first, first + 1 of each fragment
        float top = -INFINITY;
#pragma unroll
        for (int n = 0; n < N; n++) top = fmaxf(top, fmaxf(scores[m][n][first], scores[m][n][first + 1]));
        top = fmaxf(top, shfl_xor_sync(top, 1));
        top = fmaxf(top, shfl_xor_sync(top, 2));
        top *= scale_log2;
        top = fmaxf(top, rows.top[r]);
        reference[r] = top == -INFINITY ? 0 : top;
        rescale[r] = ex2_approx_ftz(rows.top[r] - reference[r]);
        rows.top[r] = top;
        rows.sum[r] *= rescale[r];
    }
}

// Most tiles of a long row leave its max as it is: the warp's vote skips them.
template <int M, int O_COLS> RT_DEVICE void rescale_rows(accumulator<M, O_COLS> &o, const float (&rescale)[2 * M]) {
    bool changes = false;
#pragma unroll
    for (int r = 0; r < 2 * M; r++) changes |= rescale[r] != 1;
    if (!any_sync(changes)) return;
#pragma unroll
    for (int i = 0; i < M * O_COLS * 4; i++) {
        const int m = i / (O_COLS * 4), j = i % 4;
        o[m][i / 4 % O_COLS][j] *= rescale[2 * m + j / 2];
    }
}

// Turns the scores of keys 16 k .. 16 k + 15 into weights and adds them to the running sum.
template <int M, int N>
RT_DEVICE void exponentiate(accumulator<M, N> &scores, int k, float scale_log2, const float (&reference)[2 * M],
                            softmax_rows<M> &rows) {
#pragma unroll
    for (int i = 0; i < M * 8; i++) {
        const int m = i / 8, j = i % 4, r = 2 * m + j / 2;
        float &x = scores[m][2 * k + i / 4 % 2][j];
        x = ex2_approx_ftz(fmaf(x, scale_log2, -reference[r]));
        rows.sum[r] += x;
    }
}

// Merges a lane's part of the rows into out and lse: write(r, token, read, combine) is to make out, or where that is
// rounded rounded_out, of row r combine(out, o), with 0 for out where `read` is false. Rows that attended no key keep
// their state or, if fresh, get 0 and -inf.
template <int M, class Write>
RT_DEVICE void merge_rows(const fwd_args &args, query_tile at, const softmax_rows<M> &rows, Write write) {
    const rt_attn_block &p = args.p;
    const bool fresh = args.fwd.fresh;
    const int lane = lane_index();
    const int64_t lse_row = (at.batch * p.num_heads + at.head) * p.num_queries;
    double before[2 * M];
#pragma unroll
    for (int r = 0; r < 2 * M; r++) {
        const int token = at.first_token + lane_row<M>(r);
        before[r] = !fresh && token < p.num_queries ? load_lse(p, args.fwd.lse, lse_row + token) : -INFINITY;
    }
    syncwarp(); // the four lanes of a row have read its lse before one of them writes it
#pragma unroll
    for (int r = 0; r < 2 * M; r++) {
        float sum = rows.sum[r] + shfl_xor_sync(rows.sum[r], 1);
        sum += shfl_xor_sync(sum, 2);
        const int token = at.first_token + lane_row<M>(r);
        const bool unchanged = sum == 0 && !fresh;
        if (token >= p.num_queries || (unchanged && args.fwd.rounded_out == nullptr)) continue;
        const merged_lse merged = merge_lse(before[r], rows.top[r] * LN_2 + (double)logf(sum));
        if (lane % 4 == 0 && !unchanged) store_lse(args.fwd, lse_row + token, sum == 0 ? -INFINITY : merged.lse);

        const float inverse = 1 / sum;
        // Where lse is -inf before, out is uninitialized, and the share is 1.
        write(r, token, unchanged || before[r] != -INFINITY,
              [&](float kept, float x) { return sum == 0 ? kept : kept - merged.share * (kept - x * inverse); });
    }
}
// What `write` is to do where out is not rounded.
template <int M, int O_COLS, class Combine>
RT_DEVICE void update_out(const fwd_args &args, query_tile at, const accumulator<M, O_COLS> &o, int r, int token,
                          bool read, Combine combine) {
    float *const out = out_of(args.fwd).at(at.batch, token, at.head);
    update_row(out, out, (int)args.p.v_head_dim, args.in_pairs, read, o, r, combine);
}

#endif // RINGTILE_CUDA_ATTN_SOFTMAX_CUH
