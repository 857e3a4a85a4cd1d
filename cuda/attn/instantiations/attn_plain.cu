#include "../attn.cuh"
#include "../plain.cuh"

rt_status attn_fwd_plain(const rt_attn_params &p, void *stream) {
    return for_runs(p, [&](const attn_args &args) {
        return launch(attn_fwd_plain_kernel, query_grid<PLAIN_TILE>(p), PLAIN_THREADS,
                      plain_bytes<plain_forward_memory, plain_key_walk>(p), stream, args);
    });
}

rt_status attn_bwd_plain(const rt_attn_params &p, void *stream) {
    return for_runs(p, [&](const attn_args &args) {
        rt_status status = launch(attn_bwd_queries_plain_kernel, query_grid<PLAIN_TILE>(p), PLAIN_THREADS,
                                  plain_bytes<plain_backward_memory, plain_key_walk>(p), stream, args);
        if (status == RT_OK) status = fill_workspace<PLAIN_TILE, 0>(args, stream);
        if (status != RT_OK) return status;
        return launch(attn_bwd_keys_plain_kernel,
                      {num_key_tiles<PLAIN_TILE>(args), args.p.num_kv_heads, args.p.batch}, PLAIN_THREADS,
                      plain_bytes<plain_backward_memory, plain_query_walk>(p), stream, args);
    });
}
