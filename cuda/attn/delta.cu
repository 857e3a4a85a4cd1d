// The delta of the attention backward. A thread block has 32 queries of one head, 8 threads each, which load 16
// bytes at a time if alignment allows. Reads dout and out once: memory-bound. No shared memory.
#include "../../csrc/attn/attn.h"
#include "../device/elements.cuh"
#include "../ringtile_cuda.h"

namespace {

constexpr int THREADS = 256, ROW_LANES = 8, ROWS = THREADS / ROW_LANES;

struct delta_params {
    rt_attn_delta_params p;
    const void *dout, *out;
    const double *dlse;
    void *delta;
};

// On a grid of (tiles of queries of all heads, batch): all heads have the first queries, then all the next.
template <class T, int count> RT_KERNEL(THREADS) attn_delta(RT_PARAMS delta_params job) {
    using pack = pack_of<T, count>;
    const rt_attn_delta_params &p = job.p;
    const int64_t batch = cta_index_y(), head = cta_index_x() % (int)p.num_heads;
    const int64_t token = cta_index_x() / (int)p.num_heads * (int64_t)ROWS + thread_index() / ROW_LANES;
    const int lane = thread_index() % ROW_LANES;
    real<T> sum = 0;
    if (token < p.num_queries) {
        const T *const dout =
            (const T *)job.dout + batch * p.dout_stride[0] + token * p.dout_stride[1] + head * p.dout_stride[2];
        const T *const out =
            (const T *)job.out + batch * p.out_stride[0] + token * p.out_stride[1] + head * p.out_stride[2];
#pragma unroll 1 // keeps to 32 registers, at which a multiprocessor holds its full number of threads
        for (int col = lane * count; col < p.v_head_dim; col += ROW_LANES * count) {
            const pack a = ld_global((const pack *)(dout + col)), b = ld_global((const pack *)(out + col));
            for (int j = 0; j < count; j++) sum += widen(a.element[j]) * widen(b.element[j]);
        }
    }
    for (int mask = 1; mask < ROW_LANES; mask *= 2) sum += shfl_xor_sync(sum, mask);
    if (lane != 0 || token >= p.num_queries) return;
    const int64_t at = (batch * p.num_heads + head) * p.num_queries + token;
    const double minus = job.dlse == nullptr ? 0 : ld_global(job.dlse + at);
    st_global((real<T> *)job.delta + at, (real<T>)((double)sum - minus));
}

} // namespace

rt_status rt_cuda_attn_delta(const rt_attn_delta_params *p, const void *dout, const void *out, const double *dlse,
                             void *delta, void *stream) {
    const rt_status status = rt_attn_check_delta(p, dout, out, dlse, delta);
    if (status != RT_OK) return status;
    const delta_params job = {*p, dout, out, dlse, delta};
    return for_dtype(p->dtype, [&](auto element) {
        using T = decltype(element);
        int64_t steps = p->v_head_dim;
        for (int i = 0; i < 3; i++) steps |= p->dout_stride[i] | p->out_stride[i];
        const bool packed = steps % PACK<T> == 0 && is_aligned(dout, 16) && is_aligned(out, 16);
        const auto kernel = packed ? attn_delta<T, PACK<T>> : attn_delta<T, 1>;
        const int64_t tiles = (p->num_queries + ROWS - 1) / ROWS;
        return launch(kernel, {tiles * p->num_heads, p->batch}, THREADS, 0, stream, job);
    });
}
