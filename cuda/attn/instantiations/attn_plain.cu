#include "../attn.cuh"
#include "../plain.cuh"

namespace {

template <class T, int DIM> rt_status forward(const rt_attn_fwd_params &p, void *stream) {
    return for_runs(p, [&](fwd_args args) {
        const rt_status status = fill_mask_tiles<PLAIN_TILE<DIM>, PLAIN_TILE<DIM>>(args, p.block.workspace, stream);
        if (status != RT_OK) return status;
        return launch(attn_fwd_plain_kernel<T, DIM>, query_grid<PLAIN_TILE<DIM>>(args), PLAIN_THREADS<DIM>,
                      plain_bytes<plain_forward_memory<DIM>, plain_key_walk<DIM>>(p.block), stream, args);
    });
}

template <class T, int DIM> rt_status backward(const rt_attn_bwd_params &p, void *stream) {
    constexpr int TILE = PLAIN_TILE<DIM>, THREADS = PLAIN_THREADS<DIM>;
    return for_runs(p, [&](bwd_args args) {
        rt_status status = fill_workspace<TILE, 0>(args, stream);
        if (status == RT_OK)
            status = launch(attn_bwd_queries_plain_kernel<T, DIM>, query_grid<TILE>(args), THREADS,
                            plain_bytes<plain_backward_memory<DIM>, plain_key_walk<DIM>>(p.block), stream, args);
        if (status != RT_OK) return status;
        return launch(attn_bwd_keys_plain_kernel<T, DIM>,
                      {num_key_tiles<TILE>(args), args.p.num_kv_heads, args.p.batch}, THREADS,
                      plain_bytes<plain_backward_memory<DIM>, plain_query_walk<DIM>>(p.block), stream, args);
    });
}

} // namespace

// PLAIN(pass, p, stream): head dims up to 256 in f32 alone, others in every dtype but f64.
#define PLAIN(pass, p, ...)                                                                                            \
    (!has_large_heads((p).block) && (p).block.dtype == RT_F32 ? pass<float, 256>(p, __VA_ARGS__)                       \
     : (p).block.dtype == RT_F32                              ? pass<float, 512>(p, __VA_ARGS__)                       \
     : (p).block.dtype == RT_BF16                             ? pass<bf16, 512>(p, __VA_ARGS__)                        \
     : (p).block.dtype == RT_F16                              ? pass<f16, 512>(p, __VA_ARGS__)                         \
                                                              : RT_BAD_DTYPE)

rt_status attn_fwd_plain(const rt_attn_fwd_params &p, void *stream) { return PLAIN(forward, p, stream); }
rt_status attn_bwd_plain(const rt_attn_bwd_params &p, void *stream) { return PLAIN(backward, p, stream); }
