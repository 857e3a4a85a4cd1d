// The merge of a block that another kernel has computed. A thread block has 32 queries of one head, 8 threads each,
// which load 16 bytes of part at a time if alignment allows. In 16 bits a number costs 10 bytes, 6 where it is fresh:
// memory-bound. No shared memory.
#include "../../csrc/attn/attn.h"
#include "../device/elements.cuh"
#include "../ringtile_cuda.h"

#include "../../csrc/attn/merge_lse.h"

namespace {

constexpr int THREADS = 256, ROW_LANES = 8, ROWS = THREADS / ROW_LANES;

// On a grid of tiles of queries of all heads: all heads have the first queries, then all the next.
template <class T, int count> RT_KERNEL(THREADS) attn_merge(RT_PARAMS rt_attn_merge_params p) {
    using R = real<T>;
    using pack = pack_of<T, count>;
    using wide_pack = pack_of<R, count>;
    const int64_t N = p.num_queries, M = p.part_queries, H = p.num_heads, head = cta_index_x() % (int)H;
    const int64_t i = cta_index_x() / (int)H * (int64_t)ROWS + thread_index() / ROW_LANES;
    const int lane = thread_index() % ROW_LANES;
    int64_t row = -1;
    if (i < p.part_batch * M) row = p.rows != nullptr ? ld_global(p.rows + i) : p.first_row + i / M * N + i % M;
    const bool is_row = row >= 0 && row < p.batch * N;
    rt_merged merged = {};
    double *const lse = p.lse + (row / N * H + head) * N + row % N;
    if (is_row) {
        const R part_lse = ld_global((const R *)p.part_lse + (i / M * H + head) * M + i % M);
        merged = rt_merge_lse(p.fresh ? (double)-INFINITY : ld_global(lse), part_lse);
    }
    syncwarp(); // all lanes of a row have read lse
    if (!is_row) return;
    if (lane == 0) st_global(lse, merged.lse);
    const R share = (R)merged.share;
    const int64_t at = (row * H + head) * p.v_head_dim;
    const T *const part =
        (const T *)p.part + i / M * p.part_stride[0] + i % M * p.part_stride[1] + head * p.part_stride[2];
    for (int col = lane * count; col < p.v_head_dim; col += ROW_LANES * count) {
        pack x = ld_global((const pack *)(part + col));
        wide_pack y = {};
        if (!p.fresh) y = ld_global((const wide_pack *)((const R *)p.out + at + col));
        for (int j = 0; j < count; j++) { // from the nearer
            const R from = widen(x.element[j]), way = from - y.element[j];
            y.element[j] = share < R(0.5) ? way * share + y.element[j] : way * (share - 1) + from;
            x.element[j] = rounded<T>(y.element[j]);
        }
        if (p.rounded != nullptr)
            st_global((pack *)((T *)p.rounded + at + col), x);
        else
            st_global((wide_pack *)((R *)p.out + at + col), y);
    }
}

} // namespace

rt_status rt_cuda_attn_merge(const rt_attn_merge_params *p, void *stream) {
    const rt_status status = rt_attn_check_merge(p);
    if (status != RT_OK || p->part_batch == 0 || p->part_queries == 0) return status;
    return for_dtype(p->dtype, [&](auto element) {
        using T = decltype(element);
        const int64_t steps = p->v_head_dim | p->part_stride[0] | p->part_stride[1] | p->part_stride[2];
        const bool packed = steps % PACK<T> == 0 && is_aligned(p->part, 16) && is_aligned(p->rounded, 16) &&
                            is_aligned(p->out, sizeof(real<T>) * PACK<T>);
        const auto kernel = packed ? attn_merge<T, PACK<T>> : attn_merge<T, 1>;
        const int64_t tiles = (p->part_batch * p->part_queries + ROWS - 1) / ROWS;
        return launch(kernel, {tiles * p->num_heads}, THREADS, 0, stream, *p);
    });
}
