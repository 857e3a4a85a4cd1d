// One variant of the sm_90a backward by itself, for tests/gpu/adder.py: contiguous bf16, batch 1, one run of all keys.
#include "attn/bwd_sm90.cuh"

struct call {
    int64_t seq_len, num_heads, num_kv_heads, head_dim;
    double scale;
    const void *q, *k, *v, *dout, *lse, *delta;
    const int32_t *begin, *end;
    void *dq, *dk, *dv, *workspace;
    int64_t workspace_bytes;
};

extern "C" int backward(const call *c, void *stream) {
    const rt_run run = {0, 1, 0, c->seq_len};
    rt_attn_bwd_params p = {};
    rt_attn_block &b = p.block;
    b.dtype = RT_BF16, b.lse_f64 = true;
    b.batch = 1;
    b.num_queries = b.num_keys = c->seq_len;
    b.num_heads = c->num_heads, b.num_kv_heads = c->num_kv_heads;
    b.head_dim = b.v_head_dim = c->head_dim;
    b.scale = c->scale;
    b.q = c->q, b.k = c->k, b.v = c->v;
    b.begin = c->begin, b.end = c->end;
    b.k_runs = &run, b.num_k_runs = 1;
    b.workspace = c->workspace, b.workspace_bytes = c->workspace_bytes;
    p.fresh = true;
    p.lse = c->lse, p.dout = c->dout, p.delta = c->delta;
    p.dq = c->dq, p.dk = c->dk, p.dv = c->dv;
    const int64_t of_queries[3] = {c->seq_len * c->num_heads * c->head_dim, c->num_heads * c->head_dim, c->head_dim};
    const int64_t of_keys[3] = {c->seq_len * c->num_kv_heads * c->head_dim, c->num_kv_heads * c->head_dim, c->head_dim};
    for (int i = 0; i < 3; i++) {
        b.q_stride[i] = p.dout_stride[i] = p.dq_stride[i] = of_queries[i];
        b.k_stride[i] = b.v_stride[i] = p.dk_stride[i] = p.dv_stride[i] = of_keys[i];
    }
    if (backward_workspace_bytes(b) > b.workspace_bytes) return RT_WORKSPACE;
    return c->head_dim == 128 ? attn_bwd_sm90<bf16, 128>(p, stream) : attn_bwd_sm90<bf16, 64>(p, stream);
}
