// What the attention kernels of sm_90a share: their tensor maps, and tiles that bulk copies bring.
#ifndef RINGTILE_CUDA_ATTN_SM90_CUH
#define RINGTILE_CUDA_ATTN_SM90_CUH

#include "attn_tile.cuh"
#include "device_sm90.cuh"

// Every run has tensor maps of its own, whose end is that of the run: what is behind it is zeros. More runs take more launches.
constexpr int MAX_RUNS_SM90 = 4;

// num_rows rows of every head and batch, from `first` on.
template <class T>
bool map_rows(tensor_map &map, const void *array, const int64_t (&stride)[3], int64_t batch, int64_t first,
              int64_t num_rows, int64_t num_heads, int64_t dim, int box_rows) {
    const int64_t size[4] = {dim, num_rows, num_heads, batch};
    const int64_t bytes[3] = {(int64_t)sizeof(T) * stride[1], (int64_t)sizeof(T) * stride[2],
                              (int64_t)sizeof(T) * stride[0]};
    return make_tensor_map<T>(map, (const char *)array + first * bytes[0], size, bytes, box_rows);
}

// k or v, run by run.
template <class T>
bool map_keys(tensor_map (&maps)[MAX_RUNS_SM90], const attn_args &args, const void *array,
              const int64_t (&stride)[3], int64_t dim, int box_rows) {
    bool mapped = true;
    for (int i = 0; i < args.num_runs && mapped; i++)
        mapped = map_rows<T>(maps[i], array, stride, args.p.batch, args.runs[i].local_begin,
                             args.runs[i].length, args.p.num_kv_heads, dim, box_rows);
    return mapped;
}

// Starts the copy of a tile, whose bytes are announced: ROWS rows of D columns, in panels of 64 columns, from `row` of a head
// on. One thread calls it.
template <int ROWS, int D>
RT_DEVICE void copy_tile(shared_address to, shared_address full, const tensor_map &map, int row, int head,
                         int batch) {
    for (int panel = 0; panel < D / 64; panel++)
        copy_box(to + (shared_address)(panel * ROWS * 128), map, full, 64 * panel, row, head, batch);
}

// The calling warp has done its part for a barrier.
RT_DEVICE void arrive_as_warp(shared_address barrier) {
    warp_barrier();
    if (lane_index() == 0) barrier_arrive(barrier);
}

// The products become those of -Q where scale is negative, and 0 where it is 0.
template <int M, int N> RT_DEVICE void fix_sign(sums<M, N> &scores, double scale) {
#pragma unroll
    for (int i = 0; i < M * N * 4; i++) {
        float &score = scores[i / (N * 4)][i / 4 % N][i % 4];
        score = scale < 0 ? -score : 0;
    }
}

#endif // RINGTILE_CUDA_ATTN_SM90_CUH
