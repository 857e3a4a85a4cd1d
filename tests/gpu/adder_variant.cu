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
    rt_attn_params p = {};
    p.dtype = RT_BF16;
    p.batch = 1;
    p.num_queries = p.num_keys = c->seq_len;
    p.num_heads = c->num_heads;
    p.num_kv_heads = c->num_kv_heads;
    p.head_dim = p.v_head_dim = c->head_dim;
    p.scale = c->scale;
    p.q = c->q, p.k = c->k, p.v = c->v, p.dout = c->dout;
    p.lse = (void *)c->lse, p.lse_f64 = true, p.delta = c->delta;
    p.begin = c->begin, p.end = c->end;
    p.k_runs = &run, p.num_k_runs = 1;
    p.fresh = true;
    p.dq = c->dq, p.dk = c->dk, p.dv = c->dv;
    const int64_t of_queries[3] = {c->seq_len * c->num_heads * c->head_dim, c->num_heads * c->head_dim, c->head_dim};
    const int64_t of_keys[3] = {c->seq_len * c->num_kv_heads * c->head_dim, c->num_kv_heads * c->head_dim, c->head_dim};
    for (int i = 0; i < 3; i++) {
        p.q_stride[i] = p.dout_stride[i] = p.dq_stride[i] = of_queries[i];
        p.k_stride[i] = p.v_stride[i] = p.dk_stride[i] = p.dv_stride[i] = of_keys[i];
    }
    p.workspace = c->workspace, p.workspace_bytes = c->workspace_bytes;
    if (backward_workspace_bytes(p) > p.workspace_bytes) return RT_WORKSPACE;
    return c->head_dim == 128 ? attn_bwd_sm90<bf16, 128>(p, stream) : attn_bwd_sm90<bf16, 64>(p, stream);
}
