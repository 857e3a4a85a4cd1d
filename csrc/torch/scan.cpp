// The ops of recurrences and their convolution, on CPU tensors.
#include "binding.h"

namespace {

using namespace ringtile;
using MaybeTensor = std::optional<Tensor>;

Tensor empty_like(const Tensor &x, const std::vector<int64_t> &sizes, ScalarType dtype) {
    return torch::stable::empty(sizes, dtype, std::nullopt, x.device());
}

// ---- recurrences -------------------------------------------------------------------------------

struct ScanArgs {
    const Tensor &q, &k, &v, &g;
    const MaybeTensor &beta, &dt, &D;
    const Tensor &seq_idx;
    const MaybeTensor &initial_state;
    double scale;
};

std::vector<int64_t> sizes_of_g(const rt_scan_params &p) {
    std::vector<int64_t> sizes = {p.batch, p.num_tokens, p.num_heads};
    if (p.channel_decay) sizes.push_back(p.head_dim);
    return sizes;
}

// The params that forward and backward share, from checked tensors.
rt_scan_params scan_params(const Op &op, const ScanArgs &in) {
    op.arg("q", in.q).dim(4), op.arg("v", in.v).dim(4);
    const ScalarType dtype = op.arg("q", in.q).scalar_type();
    const int64_t B = in.q.size(0), N = in.q.size(1), G = in.q.size(2), K = in.q.size(3);
    const int64_t H = in.v.size(2), V = in.v.size(3);
    rt_scan_params p = {};
    p.batch = B, p.num_tokens = N, p.num_heads = H, p.num_k_heads = G, p.head_dim = K, p.v_head_dim = V;
    p.scale = in.scale, p.channel_decay = op.arg("g", in.g).x.dim() == 4;
    p.q = op.rows("q", in.q, dtype, {B, N, G, K}, p.q_stride);
    p.k = op.rows("k", in.k, dtype, {B, N, G, K}, p.k_stride);
    p.v = op.rows("v", in.v, dtype, {B, N, H, V}, p.v_stride);
    p.dtype = dtype_of(in.q, op.name);
    const ScalarType state = state_dtype(p.dtype);
    p.g = op.dense("g", in.g, state, sizes_of_g(p));
    p.beta = op.dense("beta", in.beta, state, {B, N, H});
    p.dt = op.dense("dt", in.dt, state, {B, N, H});
    p.D = op.dense("D", in.D, state, {H});
    p.seq_idx = op.mask("seq_idx", in.seq_idx, B, N, p.seq_idx_batch_stride);
    p.initial_state = op.dense("initial_state", in.initial_state, state, {B, H, K, V});
    return p;
}

template <class Params> Tensor workspace_of(Params &p, const Tensor &x, int64_t num_bytes) {
    Tensor workspace = empty_like(x, {num_bytes}, ScalarType::Byte);
    p.workspace = workspace.data_ptr(), p.workspace_bytes = num_bytes;
    return workspace;
}

// keep: for a backward. Returns out, the final state, and the states that the backward needs.
std::tuple<Tensor, Tensor, Tensor> scan(const Tensor &q, const Tensor &k, const Tensor &v, const Tensor &g,
                                        MaybeTensor beta, MaybeTensor dt, MaybeTensor D, const Tensor &seq_idx,
                                        MaybeTensor initial_state, double scale, bool keep) {
    const Op op("scan");
    rt_scan_params p = scan_params(op, {q, k, v, g, beta, dt, D, seq_idx, initial_state, scale});
    const ScalarType state = state_dtype(p.dtype);
    Tensor out = empty_like(q, {p.batch, p.num_tokens, p.num_heads, p.v_head_dim}, v.scalar_type());
    Tensor final_state = empty_like(q, {p.batch, p.num_heads, p.head_dim, p.v_head_dim}, state);
    const int64_t num_states = keep ? rt_scan_num_states(p.num_tokens) : 0;
    Tensor states = empty_like(q, {p.batch, p.num_heads, num_states, p.head_dim, p.v_head_dim}, state);
    p.out = out.data_ptr(), p.final_state = final_state.data_ptr();
    p.states = keep ? states.data_ptr() : nullptr;
    const rt_parallel parallel = torch_threads();
    const Tensor workspace = workspace_of(p, q, rt_scan_fwd_workspace_bytes(&p, parallel.num_workers));
    check(rt_scan_fwd(&p, parallel), op.name);
    return {out, final_state, states};
}

// dq, dk, dv, dg, dbeta or ddt, dD of each token, dinitial_state; the two in between may be empty.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>
scan_backward(const Tensor &dout, MaybeTensor dfinal_state, const Tensor &q, const Tensor &k, const Tensor &v,
              const Tensor &g, MaybeTensor beta, MaybeTensor dt, MaybeTensor D, const Tensor &seq_idx,
              MaybeTensor initial_state, const Tensor &states, double scale) {
    const Op op("scan_backward");
    rt_scan_params p = scan_params(op, {q, k, v, g, beta, dt, D, seq_idx, initial_state, scale});
    const ScalarType state = state_dtype(p.dtype);
    const int64_t B = p.batch, N = p.num_tokens, H = p.num_heads, G = p.num_k_heads, K = p.head_dim, V = p.v_head_dim;
    p.dout = op.rows("dout", dout, v.scalar_type(), {B, N, H, V}, p.dout_stride);
    p.dfinal_state = op.dense("dfinal_state", dfinal_state, state, {B, H, K, V});
    p.states = op.dense("states", states, state, {B, H, rt_scan_num_states(N), K, V});
    Tensor dq = empty_like(q, {B, N, G, K}, state), dk = empty_like(q, {B, N, G, K}, state),
           dv = empty_like(q, {B, N, H, V}, state), dinitial = empty_like(q, {B, H, K, V}, state),
           dg = empty_like(q, sizes_of_g(p), state);
    // Not by their pointers, which are NULL without tokens.
    const bool has_factor = beta.has_value() || dt.has_value();
    Tensor dfactor = empty_like(q, {B, N, has_factor ? H : 0}, state),
           dD = empty_like(q, {B, N, D.has_value() ? H : 0}, state);
    p.dq = dq.data_ptr(), p.dk = dk.data_ptr(), p.dv = dv.data_ptr(), p.dg = dg.data_ptr();
    if (p.beta != nullptr) p.dbeta = dfactor.data_ptr();
    if (p.dt != nullptr) p.ddt = dfactor.data_ptr();
    if (p.D != nullptr) p.dD = dD.data_ptr();
    p.dinitial_state = dinitial.data_ptr();
    const rt_parallel parallel = torch_threads();
    const Tensor workspace = workspace_of(p, q, rt_scan_bwd_workspace_bytes(&p, parallel.num_workers));
    check(rt_scan_bwd(&p, parallel), op.name);
    return {dq, dk, dv, dg, dfactor, dD, dinitial};
}

// ---- selective scan ----------------------------------------------------------------------------

struct SelectiveArgs {
    const Tensor &x, &dt, &A, &B, &C;
    const MaybeTensor &D;
    const Tensor &seq_idx;
    const MaybeTensor &initial_state;
};

rt_selective_params selective_params(const Op &op, const SelectiveArgs &in) {
    op.arg("x", in.x).dim(3), op.arg("B", in.B).dim(3);
    rt_selective_params p = {};
    p.dtype = dtype_of(in.x, op.name);
    const ScalarType dtype = in.x.scalar_type(), state = state_dtype(p.dtype);
    const int64_t batch = in.x.size(0), N = in.x.size(1), dim = in.x.size(2), K = in.B.size(2);
    p.batch = batch, p.num_tokens = N, p.num_channels = dim, p.state_dim = K;
    p.x = op.rows("x", in.x, dtype, {batch, N, dim}, p.x_stride);
    p.B = op.rows("B", in.B, dtype, {batch, N, K}, p.B_stride);
    p.C = op.rows("C", in.C, dtype, {batch, N, K}, p.C_stride);
    p.dt = op.dense("dt", in.dt, state, {batch, N, dim});
    p.A = op.dense("A", in.A, state, {K, dim});
    p.D = op.dense("D", in.D, state, {dim});
    p.seq_idx = op.mask("seq_idx", in.seq_idx, batch, N, p.seq_idx_batch_stride);
    p.initial_state = op.dense("initial_state", in.initial_state, state, {batch, K, dim});
    return p;
}

// keep: for a backward. Returns out, the final state, and the states that the backward needs.
std::tuple<Tensor, Tensor, Tensor> selective_scan(const Tensor &x, const Tensor &dt, const Tensor &A, const Tensor &B,
                                                  const Tensor &C, MaybeTensor D, const Tensor &seq_idx,
                                                  MaybeTensor initial_state, bool keep) {
    const Op op("selective_scan");
    rt_selective_params p = selective_params(op, {x, dt, A, B, C, D, seq_idx, initial_state});
    const ScalarType state = state_dtype(p.dtype);
    const int64_t batch = p.batch, N = p.num_tokens, dim = p.num_channels, K = p.state_dim;
    Tensor out = empty_like(x, {batch, N, dim}, x.scalar_type()), final_state = empty_like(x, {batch, K, dim}, state),
           states = empty_like(x, {batch, keep ? rt_scan_num_states(N) : 0, K, dim}, state);
    p.out = out.data_ptr(), p.final_state = final_state.data_ptr();
    p.states = keep ? states.data_ptr() : nullptr;
    const rt_parallel parallel = torch_threads();
    const Tensor workspace = workspace_of(p, x, rt_selective_fwd_workspace_bytes(&p, parallel.num_workers));
    check(rt_selective_fwd(&p, parallel), op.name);
    return {out, final_state, states};
}

// dx, ddt, dA, dB, dC, dD (empty without D), dinitial_state.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>
selective_scan_backward(const Tensor &dout, MaybeTensor dfinal_state, const Tensor &x, const Tensor &dt,
                        const Tensor &A, const Tensor &B, const Tensor &C, MaybeTensor D, const Tensor &seq_idx,
                        MaybeTensor initial_state, const Tensor &states) {
    const Op op("selective_scan_backward");
    rt_selective_params p = selective_params(op, {x, dt, A, B, C, D, seq_idx, initial_state});
    const ScalarType state = state_dtype(p.dtype);
    const int64_t batch = p.batch, N = p.num_tokens, dim = p.num_channels, K = p.state_dim;
    p.dout = op.rows("dout", dout, x.scalar_type(), {batch, N, dim}, p.dout_stride);
    p.dfinal_state = op.dense("dfinal_state", dfinal_state, state, {batch, K, dim});
    p.states = op.dense("states", states, state, {batch, rt_scan_num_states(N), K, dim});
    Tensor dx = empty_like(x, {batch, N, dim}, state), ddt = empty_like(x, {batch, N, dim}, state),
           dA = empty_like(x, {K, dim}, state), dB = empty_like(x, {batch, N, K}, state),
           dC = empty_like(x, {batch, N, K}, state), dD = empty_like(x, {D.has_value() ? dim : 0}, state),
           dinitial = empty_like(x, {batch, K, dim}, state);
    p.dx = dx.data_ptr(), p.ddt = ddt.data_ptr(), p.dA = dA.data_ptr(), p.dB = dB.data_ptr();
    p.dC = dC.data_ptr(), p.dinitial_state = dinitial.data_ptr();
    if (p.D != nullptr) p.dD = dD.data_ptr();
    const rt_parallel parallel = torch_threads();
    const Tensor workspace = workspace_of(p, x, rt_selective_bwd_workspace_bytes(&p, parallel.num_workers));
    check(rt_selective_bwd(&p, parallel), op.name);
    return {dx, ddt, dA, dB, dC, dD, dinitial};
}

// ---- convolution -------------------------------------------------------------------------------

rt_conv_params conv_params(const Op &op, const Tensor &x, const Tensor &weight, const MaybeTensor &bias,
                           const Tensor &seq_idx, const MaybeTensor &initial_state, bool silu) {
    op.arg("x", x).dim(3), op.arg("weight", weight).dim(2);
    rt_conv_params p = {};
    p.dtype = dtype_of(x, op.name);
    const ScalarType state = state_dtype(p.dtype);
    p.batch = x.size(0), p.num_tokens = x.size(1), p.num_channels = x.size(2), p.silu = silu;
    p.width = weight.size(1), p.weight = op.dense("weight", weight, state, {p.num_channels, p.width});
    check(p.width < 1 || p.width > RT_MAX_CONV_WIDTH ? RT_BAD_WIDTH : RT_OK, op.name);
    p.bias = op.dense("bias", bias, state, {p.num_channels});
    p.x = op.rows("x", x, x.scalar_type(), {p.batch, p.num_tokens, p.num_channels}, p.x_stride);
    p.seq_idx = op.mask("seq_idx", seq_idx, p.batch, p.num_tokens, p.seq_idx_batch_stride);
    p.initial_state = op.dense("initial_state", initial_state, state, {p.batch, p.width - 1, p.num_channels});
    return p;
}

std::tuple<Tensor, Tensor> causal_conv1d(const Tensor &x, const Tensor &weight, MaybeTensor bias, const Tensor &seq_idx,
                                         MaybeTensor initial_state, bool silu) {
    const Op op("causal_conv1d");
    rt_conv_params p = conv_params(op, x, weight, bias, seq_idx, initial_state, silu);
    Tensor y = empty_like(x, {p.batch, p.num_tokens, p.num_channels}, x.scalar_type());
    Tensor final_state = empty_like(x, {p.batch, p.width - 1, p.num_channels}, state_dtype(p.dtype));
    p.y = y.data_ptr(), p.final_state = final_state.data_ptr();
    check(rt_conv_fwd(&p, torch_threads()), op.name);
    return {y, final_state};
}

// dx, dweight, dbias (empty without a bias), dinitial_state.
std::tuple<Tensor, Tensor, Tensor, Tensor> causal_conv1d_backward(const Tensor &dy, MaybeTensor dfinal_state,
                                                                  const Tensor &x, const Tensor &weight,
                                                                  MaybeTensor bias, const Tensor &seq_idx,
                                                                  MaybeTensor initial_state, bool silu) {
    const Op op("causal_conv1d_backward");
    rt_conv_params p = conv_params(op, x, weight, bias, seq_idx, initial_state, silu);
    const ScalarType state = state_dtype(p.dtype);
    const std::vector<int64_t> state_sizes = {p.batch, p.width - 1, p.num_channels};
    const std::vector<int64_t> sizes = {p.batch, p.num_tokens, p.num_channels};
    p.dy = op.rows("dy", dy, x.scalar_type(), sizes, p.dy_stride);
    p.dfinal_state = op.dense("dfinal_state", dfinal_state, state, state_sizes);
    Tensor dx = empty_like(x, sizes, x.scalar_type());
    Tensor dweight = empty_like(x, {p.num_channels, p.width}, state),
           dbias = empty_like(x, {bias.has_value() ? p.num_channels : 0}, state),
           dinitial = empty_like(x, state_sizes, state);
    p.dx = dx.data_ptr(), p.dweight = dweight.data_ptr(), p.dinitial_state = dinitial.data_ptr();
    if (p.bias != nullptr) p.dbias = dbias.data_ptr();
    check(rt_conv_bwd(&p, torch_threads()), op.name);
    return {dx, dweight, dbias, dinitial};
}

} // namespace

STABLE_TORCH_LIBRARY_IMPL(ringtile, CPU, m) {
    m.impl("scan", TORCH_BOX(&scan));
    m.impl("scan_backward", TORCH_BOX(&scan_backward));
    m.impl("selective_scan", TORCH_BOX(&selective_scan));
    m.impl("selective_scan_backward", TORCH_BOX(&selective_scan_backward));
    m.impl("causal_conv1d", TORCH_BOX(&causal_conv1d));
    m.impl("causal_conv1d_backward", TORCH_BOX(&causal_conv1d_backward));
}
