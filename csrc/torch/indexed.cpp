// The ops of attention over chosen keys, on CPU tensors; elsewhere torch operations compute them (attn/indexed.py).
#include "binding.h"

namespace {

using namespace ringtile;

rt_indexed_attn_params params_of(const Op &op, const Tensor &q, const Tensor &k, const Tensor &v, const Tensor &indices,
                                 double scale) {
    op.arg("q", q).dim(4), op.arg("k", k).dim(4), op.arg("v", v).dim(4), op.arg("indices", indices).dim(3);
    const ScalarType dtype = op.arg("q", q).scalar_type();
    const int64_t B = q.size(0), N = q.size(1), H = q.size(2), D = q.size(3), K = k.size(1), G = k.size(2);
    rt_indexed_attn_params p = {};
    p.batch = B, p.num_queries = N, p.num_keys = K, p.num_heads = H, p.num_kv_heads = G;
    p.head_dim = D, p.v_head_dim = v.size(3), p.num_indices = indices.size(2), p.scale = scale;
    p.q = op.dense("q", q, dtype, {B, N, H, D});
    p.k = op.rows("k", k, dtype, {B, K, G, D}, p.k_stride);
    p.v = op.rows("v", v, dtype, {B, K, G, p.v_head_dim}, p.v_stride);
    p.indices = op.dense<const int32_t>("indices", indices, ScalarType::Int, {B, N, p.num_indices});
    p.dtype = dtype_of(q, op.name);
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
    const Op op("indexed_attn");
    rt_indexed_attn_params p = params_of(op, q, k, v, indices, scale);
    const Tensor out = torch::stable::new_empty(q, {p.batch, p.num_queries, p.num_heads, p.v_head_dim});
    const Tensor lse = torch::stable::new_empty(q, {p.batch, p.num_heads, p.num_queries}, ScalarType::Double);
    p.out = out.data_ptr(), p.lse = static_cast<double *>(lse.data_ptr());
    const Tensor workspace = workspace_of(p, q);
    check(rt_indexed_attn_fwd(&p, torch_threads()), op.name);
    return {out, lse};
}

std::tuple<Tensor, Tensor, Tensor> indexed_attn_backward(const Tensor &dout, const Tensor &dlse, const Tensor &out,
                                                         const Tensor &lse, const Tensor &q, const Tensor &k,
                                                         const Tensor &v, const Tensor &indices, double scale) {
    const Op op("indexed_attn_backward");
    rt_indexed_attn_params p = params_of(op, q, k, v, indices, scale);
    const ScalarType dtype = q.scalar_type(), state = state_dtype(p.dtype);
    const std::vector<int64_t> outs = {p.batch, p.num_queries, p.num_heads, p.v_head_dim};
    const std::vector<int64_t> rows = {p.batch, p.num_heads, p.num_queries};
    p.dout = op.dense("dout", dout, dtype, outs), p.out = op.dense("out", out, dtype, outs);
    p.dlse = op.dense<const double>("dlse", dlse, ScalarType::Double, rows);
    p.lse = op.dense<double>("lse", lse, ScalarType::Double, rows);
    const Tensor dq = torch::stable::new_empty(q, {p.batch, p.num_queries, p.num_heads, p.head_dim});
    const Tensor dk = torch::stable::new_empty(q, {p.batch, p.num_kv_heads, p.num_keys, p.head_dim}, state);
    const Tensor dv = torch::stable::new_empty(q, {p.batch, p.num_kv_heads, p.num_keys, p.v_head_dim}, state);
    p.dq = dq.data_ptr(), p.dk = dk.data_ptr(), p.dv = dv.data_ptr();
    const Tensor workspace = workspace_of(p, q);
    check(rt_indexed_attn_bwd(&p, torch_threads()), op.name);
    return {dq, torch::stable::transpose(dk, 1, 2), torch::stable::transpose(dv, 1, 2)};
}

} // namespace

STABLE_TORCH_LIBRARY_IMPL(ringtile, CPU, m) {
    m.impl("indexed_attn", TORCH_BOX(&indexed_attn));
    m.impl("indexed_attn_backward", TORCH_BOX(&indexed_attn_backward));
}
