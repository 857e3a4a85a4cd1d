// Shared by the sm_90a attention kernels: tensor maps, and tiles loaded by bulk copies (TMA).
#ifndef RINGTILE_CUDA_ATTN_TMA_TILE_CUH
#define RINGTILE_CUDA_ATTN_TMA_TILE_CUH

#include "../device/ptx_sm90.cuh"
#include "gemm.cuh"

#include <type_traits>

// Each run has its own tensor maps, which end where the run ends so that rows behind it are zeros. More runs take more
// launches.
constexpr int MAX_RUNS_SM90 = 4;

// A tile of ROWS rows of COLS numbers, in panels of 64 columns: a row of a panel has 128 bytes.
template <int ROWS, int COLS> using panels = chunk[COLS / 64][ROWS][8];

// Tokens first .. first + num_tokens - 1 of every head and batch.
struct map_extent {
    int64_t batch, first, num_tokens, num_heads;
};
template <class T> bool map_rows(tensor_map &map, token_rows<T> rows, const map_extent &extent, int box_rows) {
    using element = std::remove_const_t<T>;
    const int64_t size[4] = {rows.dim, extent.num_tokens, extent.num_heads, extent.batch};
    const int64_t bytes[3] = {(int64_t)sizeof(element) * rows.stride[1], (int64_t)sizeof(element) * rows.stride[2],
                              (int64_t)sizeof(element) * rows.stride[0]};
    return make_tensor_map<element>(map, (const char *)rows.data + extent.first * bytes[0], size, bytes, box_rows);
}

// Maps q, dout or dq.
template <class T> bool map_queries(tensor_map &map, const rt_attn_params &p, token_rows<T> rows, int box_rows) {
    return map_rows(map, rows, {p.batch, 0, p.num_queries, p.num_heads}, box_rows);
}
// Maps k or v, run by run.
template <class T>
bool map_keys(tensor_map (&maps)[MAX_RUNS_SM90], const attn_args &args, token_rows<T> rows, int box_rows) {
    bool mapped = true;
    for (int i = 0; i < args.num_runs && mapped; i++) {
        const rt_run &run = args.runs[i];
        mapped = map_rows(maps[i], rows, {args.p.batch, run.local_begin, run.length, args.p.num_kv_heads}, box_rows);
    }
    return mapped;
}

// Prefetches the maps of k and v, run by run.
RT_DEVICE void prefetch_key_maps(const tensor_map (&k)[MAX_RUNS_SM90], const tensor_map (&v)[MAX_RUNS_SM90],
                                 int num_runs) {
#pragma unroll 1
    for (int run = 0; run < num_runs; run++) {
        prefetch_tensormap(k[run]);
        prefetch_tensormap(v[run]);
    }
}

// Starts to copy a tile, from `row` of a head on; the caller has announced its bytes. One thread calls it.
template <int ROWS, int COLS>
RT_DEVICE void copy_tile(shared_address to, shared_address full, const tensor_map &map, int row, int head, int batch) {
    for (int panel = 0; panel < COLS / 64; panel++)
        cp_async_bulk_tensor_4d(to + (shared_address)(panel * ROWS * 128), map, full, 64 * panel, row, head, batch);
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
