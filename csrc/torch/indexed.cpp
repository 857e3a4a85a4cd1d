// The ops of attention over chosen keys, on CPU tensors; elsewhere torch operations compute them (attn/indexed.py).
#include "binding.h"

namespace {

using namespace ringtile;

rt_indexed_attn_params params_of(const char *op, const Tensor &q, const Tensor &k, const Tensor &v,
                                 const Tensor &indices, double scale) {
    Arg{op, "q", q}.on_cpu().dim(4).contiguous();
    const ScalarType dtype = Arg{op, "q", q}.scalar_type();
    const int64_t B = q.size(0), N = q.size(1);
    Arg{op, "k", k}.on_cpu().dtype(dtype).dim(4).unit_last_stride().sizes({B, k.size(1), k.size(2), q.size(3)});
    Arg{op, "v", v}.on_cpu().dtype(dtype).dim(4).unit_last_stride().sizes({B, k.size(1), k.size(2), v.size(3)});
    Arg{op, "indices", indices}.on_cpu().dtype(ScalarType::Int).dim(3).contiguous().sizes({B, N, indices.size(2)});

    rt_indexed_attn_params p = {};
    p.dtype = dtype_of(q, op);
    p.batch = B, p.num_queries = N, p.num_keys = k.size(1), p.num_heads = q.size(2), p.num_kv_heads = k.size(2);
    p.head_dim = q.size(3), p.v_head_dim = v.size(3), p.num_indices = indices.size(2), p.scale = scale;
    p.q = Arg{op, "q", q}.data(), p.k = Arg{op, "k", k}.data(), p.v = Arg{op, "v", v}.data();
    for (int i = 0; i < 3; ++i) p.k_stride[i] = k.stride(i), p.v_stride[i] = v.stride(i);
    p.indices = Arg{op, "indices", indices}.data<const int32_t>();
    return p;
}

Tensor workspace_of(rt_indexed_attn_params &p, const Tensor &q) {
    p.workspace_bytes = rt_indexed_attn_workspace_bytes(&p, torch_threads().num_workers);
    const Tensor workspace = torch::stable::new_empty(q, {p.workspace_bytes}, ScalarType::Byte);
    p.workspace = workspace.data_ptr();
    return workspace;
}

std::tuple<Tensor, Tensor> indexed_attn(const Tensor &q, const Tensor &k, const Tensor &v, const Tensor &indices,
                                        double scale) {
    const char *op = "indexed_attn";
    rt_indexed_attn_params p = params_of(op, q, k, v, indices, scale);
    const Tensor out = torch::stable::new_empty(q, {p.batch, p.num_queries, p.num_heads, p.v_head_dim});
    const Tensor lse = torch::stable::new_empty(q, {p.batch, p.num_heads, p.num_queries}, ScalarType::Double);
    p.out = out.data_ptr(), p.lse = static_cast<double *>(lse.data_ptr());
    const Tensor workspace = workspace_of(p, q);
    check(rt_indexed_attn_fwd(&p, torch_threads()), op);
    return {out, lse};
}

std::tuple<Tensor, Tensor, Tensor> indexed_attn_backward(const Tensor &dout, const Tensor &dlse, const Tensor &out,
                                                         const Tensor &lse, const Tensor &q, const Tensor &k,
                                                         const Tensor &v, const Tensor &indices, double scale) {
    const char *op = "indexed_attn_backward";
    rt_indexed_attn_params p = params_of(op, q, k, v, indices, scale);
    const ScalarType dtype = Arg{op, "q", q}.scalar_type(), state = state_dtype(p.dtype);
    const std::vector<int64_t> outs = {p.batch, p.num_queries, p.num_heads, p.v_head_dim};
    const std::vector<int64_t> rows = {p.batch, p.num_heads, p.num_queries};
    Arg{op, "dout", dout}.on_cpu().dtype(dtype).contiguous().sizes(outs);
    Arg{op, "out", out}.on_cpu().dtype(dtype).contiguous().sizes(outs);
    Arg{op, "dlse", dlse}.on_cpu().dtype(ScalarType::Double).contiguous().sizes(rows);
    Arg{op, "lse", lse}.on_cpu().dtype(ScalarType::Double).contiguous().sizes(rows);
    const Tensor dq = torch::stable::new_empty(q, {p.batch, p.num_queries, p.num_heads, p.head_dim});
    const Tensor dk = torch::stable::new_empty(q, {p.batch, p.num_kv_heads, p.num_keys, p.head_dim}, state);
    const Tensor dv = torch::stable::new_empty(q, {p.batch, p.num_kv_heads, p.num_keys, p.v_head_dim}, state);
    p.dout = Arg{op, "dout", dout}.data(), p.dlse = Arg{op, "dlse", dlse}.data<const double>();
    p.out = Arg{op, "out", out}.data(), p.lse = Arg{op, "lse", lse}.data<double>();
    p.dq = dq.data_ptr(), p.dk = dk.data_ptr(), p.dv = dv.data_ptr();
    const Tensor workspace = workspace_of(p, q);
    check(rt_indexed_attn_bwd(&p, torch_threads()), op);
    return {dq, torch::stable::transpose(dk, 1, 2), torch::stable::transpose(dv, 1, 2)};
}

} // namespace

STABLE_TORCH_LIBRARY_IMPL(ringtile, CPU, m) {
    m.impl("indexed_attn", TORCH_BOX(&indexed_attn));
    m.impl("indexed_attn_backward", TORCH_BOX(&indexed_attn_backward));
}
