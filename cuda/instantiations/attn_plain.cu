#include "../attn.cuh"
#include "../attn_plain.cuh"

constexpr int RANGES_BYTES = key_walk<PLAIN_TILE, PLAIN_TILE>::BYTES;

rt_status attn_fwd_plain(const rt_attn_params &p, void *stream) {
    const int bytes =
        2 * plain_tile::bytes(p.head_dim) + plain_tile::bytes(p.v_head_dim) + PAIRS_BYTES + RANGES_BYTES;
    return for_runs(p, [&](const attn_args &args) {
        return launch(attn_fwd_plain_kernel, query_grid<PLAIN_TILE>(p), PLAIN_THREADS, bytes, stream, args);
    });
}

rt_status attn_bwd_plain(const rt_attn_params &p, void *stream) {
    const int bytes =
        2 * plain_tile::bytes(p.head_dim) + 2 * plain_tile::bytes(p.v_head_dim) + 2 * PAIRS_BYTES;
    return for_runs(p, [&](const attn_args &args) {
        rt_status status = launch(attn_bwd_queries_plain_kernel, query_grid<PLAIN_TILE>(p), PLAIN_THREADS,
                                  bytes + RANGES_BYTES, stream, args);
        if (status == RT_OK) status = fill_workspace<PLAIN_TILE, 0>(args, stream);
        if (status != RT_OK) return status;
        return launch(attn_bwd_keys_plain_kernel,
                      {num_key_tiles<PLAIN_TILE>(args), args.p.num_kv_heads, args.p.batch}, PLAIN_THREADS,
                      bytes + query_walk<PLAIN_TILE, PLAIN_TILE>::BYTES, stream, args);
    });
}
