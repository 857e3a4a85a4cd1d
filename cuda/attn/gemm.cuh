// Products of tiles, and the accumulators that hold them.
#ifndef RINGTILE_CUDA_ATTN_GEMM_CUH
#define RINGTILE_CUDA_ATTN_GEMM_CUH

#include "tile.cuh"

// A warp's M x N fragments of 16 x 8. In each, lane l holds the columns 2 (l % 4) and the next, in rows l / 4
// (elements 0, 1) and l / 4 + 8 (elements 2, 3).
template <int M, int N> using accumulator = float[M][N][4];

// Maps a lane's row r = 0 .. 2 M - 1 to a row of the thread block's tile. Rows 2 m and 2 m + 1 are in fragment m.
template <int M> RT_DEVICE int lane_row(int r) { return 16 * M * warp_index() + 8 * r + lane_index() / 4; }

template <int M, int N> RT_DEVICE void clear(accumulator<M, N> &d) {
#pragma unroll
    for (int i = 0; i < M * N * 4; i++) d[i / (N * 4)][i / 4 % N][i % 4] = 0;
}

// d (16 M, 8 N) += a b^T: rows a_row .. a_row + 16 M - 1 of a times the first 8 N rows of b, both in shared memory.
template <class T, int M, int N, int A_ROWS, int B_ROWS, int COLS>
RT_DEVICE void gemm_ss(accumulator<M, N> &d, tile<A_ROWS, COLS> a, int a_row, tile<B_ROWS, COLS> b) {
    const int lane = lane_index();
    const auto a_chunks = a.chunks_from(a_row + lane % 16, lane / 16);
    const auto b_chunks = b.chunks_from(lane / 16 * 8 + lane % 8, lane / 8 % 2);
#pragma unroll
    for (int k = 0; k < COLS / 16; k++) {
        uint32_t left[M][4];
#pragma unroll
        for (int m = 0; m < M; m++) ldmatrix_x4(left[m], a_chunks.at(16 * m, 2 * k));
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            uint32_t right[4]; // two fragments
            ldmatrix_x4(right, b_chunks.at(8 * n, 2 * k));
#pragma unroll
            for (int m = 0; m < M; m++) {
                mma_m16n8k16<T>(d[m][n], left[m], right[0], right[1]);
                mma_m16n8k16<T>(d[m][n + 1], left[m], right[2], right[3]);
            }
        }
    }
}

// d (16 M, COLS) += left (16 M, 16), in registers, times rows 16 k .. 16 k + 15 of b, in shared memory. With PARTS
// (1, 2 or 4) the columns of b are dealt out in groups of 16, and d holds every PARTS-th group from `part` on.
template <class T, int M, int PARTS = 1, int ROWS, int COLS>
RT_DEVICE void gemm_rs(accumulator<M, COLS / 8 / PARTS> &d, const uint32_t (&left)[M][4], tile<ROWS, COLS> b, int k,
                       int part = 0) {
    const int lane = lane_index();
    const auto b_chunks = b.chunks_from(lane % 16, 2 * part + lane / 16);
#pragma unroll
    for (int n = 0; n < COLS / 8 / PARTS; n += 2) {
        uint32_t right[4];
        ldmatrix_x4_trans(right, b_chunks.at(16 * k, n * PARTS));
#pragma unroll
        for (int m = 0; m < M; m++) {
            mma_m16n8k16<T>(d[m][n], left[m], right[0], right[1]);
            mma_m16n8k16<T>(d[m][n + 1], left[m], right[2], right[3]);
        }
    }
}

// Rounds fragments 2 k and 2 k + 1 of an accumulator to a left factor. No number moves between lanes.
template <class T, int M, int N>
RT_DEVICE void round_to_factor(uint32_t (&left)[M][4], const float (&x)[M][N][4], int k = 0) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            left[m][i] = cvt_rn_x2<T>(x[m][2 * k + i / 2][i % 2 * 2], x[m][2 * k + i / 2][i % 2 * 2 + 1]);
}

// Absolute error about 2^-23, no more than a score of that size has anyway.
RT_DEVICE float tanh_approx(float x) { return 1 - 2 * rcp_approx_ftz(1 + ex2_approx_ftz((float)(2 * LOG2_E) * x)); }

// Products q.k become tanh(cap * q.k).
template <int M, int N> RT_DEVICE void cap_scores(accumulator<M, N> &scores, float cap) {
#pragma unroll
    for (int i = 0; i < M * N * 4; i++) {
        float &score = scores[i / (N * 4)][i / 4 % N][i % 4];
        score = tanh_approx(score * cap);
    }
}

struct alignas(8) float_pair {
    float x[2];
};
// Two adjacent numbers, rounded to T.
template <class T> RT_DEVICE void st_global_pair(T *to, float x, float y) {
    if constexpr (sizeof(T) == sizeof(float))
        st_global((float_pair *)to, {x, y});
    else
        st_global((uint32_t *)to, cvt_rn_x2<T>(x, y));
}

// result = combine(row, d), rounded to T, for rows in global memory, which may be the same, and row r of a lane's
// accumulator, whose columns are those of `part` (gemm_rs). in_pairs: two columns are an aligned pair, and a fragment's
// columns are all inside `dim` or all outside. If `read` is false, combine gets 0 for row. Loads precede stores so that
// their latencies overlap.
template <int PARTS = 1, class T, int M, int N, class Combine>
RT_DEVICE void update_row(const float *row, T *result, int dim, bool in_pairs, bool read, const float (&d)[M][N][4],
                          int r, Combine combine, int part = 0) {
    constexpr int BATCH = N % 8 == 0 ? 8 : 4;
    const int lane_col = lane_index() % 4 * 2, first_col = 16 * part + lane_col; // columns count from there
    const float *const from = row + first_col;
    T *const to = result + first_col;
    dim -= 16 * part;
    const auto col = [](int n) { return n / 2 * 16 * PARTS + n % 2 * 8; };
    const auto combined = [&](float x, int n, int i) { return combine(x, d[r / 2][n][r % 2 * 2 + i]); };
    if (in_pairs) {
#pragma unroll
        for (int first = 0; first < N; first += BATCH) {
            float_pair x[BATCH];
#pragma unroll
            for (int i = 0; i < BATCH; i++) {
                x[i] = {0, 0};
                if (read && col(first + i) < dim) x[i] = ld_global((const float_pair *)(from + col(first + i)));
            }
#pragma unroll
            for (int i = 0; i < BATCH; i++) {
                const int n = first + i;
                if (col(n) < dim) st_global_pair(to + col(n), combined(x[i].x[0], n, 0), combined(x[i].x[1], n, 1));
            }
        }
    } else {
#pragma unroll
        for (int i = 0; i < 2 * N; i++) {
            const int at = col(i / 2) + i % 2;
            if (lane_col + at < dim)
                st_global(to + at, narrow<T>(combined(read ? ld_global(from + at) : 0, i / 2, i % 2)));
        }
    }
}

#endif // RINGTILE_CUDA_ATTN_GEMM_CUH
