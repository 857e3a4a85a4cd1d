// Shared by the sm_90a attention kernels: tensor maps, and tiles loaded by bulk copies (TMA).
#ifndef RINGTILE_CUDA_ATTN_TMA_TILE_CUH
#define RINGTILE_CUDA_ATTN_TMA_TILE_CUH

#include "../device/ptx_sm90.cuh"
#include "gemm.cuh"

#include <type_traits>

// A tile of ROWS rows of COLS numbers, in panels of 64 columns: a row of a panel has 128 bytes.
template <int ROWS, int COLS> using panels = chunk[COLS / 64][ROWS][8];

// Maps num_tokens tokens of every head and batch.
template <class T>
bool map_rows(tensor_map &map, token_rows<T> rows, int64_t batch, int64_t num_tokens, int64_t num_heads, int box_rows) {
    using element = std::remove_const_t<T>;
    const int64_t size[4] = {rows.dim, num_tokens, num_heads, batch};
    const int64_t bytes[3] = {(int64_t)sizeof(element) * rows.stride[1], (int64_t)sizeof(element) * rows.stride[2],
                              (int64_t)sizeof(element) * rows.stride[0]};
    return make_tensor_map<element>(map, rows.data, size, bytes, box_rows);
}

// Maps q, dout, dq or rounded out; k or v.
template <class T> bool map_queries(tensor_map &map, const rt_attn_block &p, token_rows<T> rows, int box_rows) {
    return map_rows(map, rows, p.batch, p.num_queries, p.num_heads, box_rows);
}
template <class T> bool map_keys(tensor_map &map, const rt_attn_block &p, token_rows<T> rows, int box_rows) {
    return map_rows(map, rows, p.batch, p.num_keys, p.num_kv_heads, box_rows);
}

// Starts to copy a tile, from `row` of a head on; the caller has announced its bytes. One thread calls it.
template <int ROWS, int COLS>
RT_DEVICE void copy_tile(shared_address to, shared_address full, const tensor_map &map, int row, int head, int batch) {
    for (int panel = 0; panel < COLS / 64; panel++)
        cp_async_bulk_tensor_4d(to + (shared_address)(panel * ROWS * 128), map, full, 64 * panel, row, head, batch);
}

// Starts to copy a tile of keys, of k or v. Rows behind its run are those of the keys that follow in memory, or zeros
// behind the last: no query attends them.
template <int ROWS, int COLS>
RT_DEVICE void copy_keys(shared_address to, shared_address full, const tensor_map &map, const attn_args &args,
                         key_tile at) {
    const int row = (int)args.runs[at.run].local_begin + at.first_key;
    copy_tile<ROWS, COLS>(to, full, map, row, at.kv_head, at.batch);
}

// Arrives once for the calling warp.
RT_DEVICE void arrive_as_warp(shared_address mbarrier) {
    syncwarp();
    if (lane_index() == 0) mbarrier_arrive(mbarrier);
}

// Turns products with Q into products with -Q if scale is negative, and into 0 if scale is 0.
template <int M, int N> RT_DEVICE void fix_sign(accumulator<M, N> &scores, double scale) {
#pragma unroll
    for (int i = 0; i < M * N * 4; i++) {
        float &score = scores[i / (N * 4)][i / 4 % N][i % 4];
        score = scale < 0 ? -score : 0;
    }
}

#endif // RINGTILE_CUDA_ATTN_TMA_TILE_CUH
