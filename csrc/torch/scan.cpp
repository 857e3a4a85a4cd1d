// The ops of recurrences and their convolution, on CPU tensors.
#include "binding.h"

namespace {

using namespace ringtile;
using MaybeTensor = std::optional<Tensor>;

Tensor empty_like(const Tensor &x, const std::vector<int64_t> &sizes, ScalarType dtype) {
    return torch::stable::empty(sizes, dtype, std::nullopt, x.device());
}

// A tensor of this dtype and these sizes, contiguous; its first element, NULL if there is none.
void *optional_data(const char *op, const char *name, const MaybeTensor &x, ScalarType dtype,
                    const std::vector<int64_t> &sizes) {
    if (!x.has_value()) return nullptr;
    return Arg{op, name, *x}.on_cpu().dtype(dtype).contiguous().sizes(sizes).data();
}

// seq_idx: int32 (B or 1, N). Returns the batch stride.
int64_t set_seq_idx(const char *op, const Tensor &seq_idx, int64_t B, int64_t N, const int32_t *&data) {
    const Arg arg = {op, "seq_idx", seq_idx};
    arg.on_cpu().dtype(ScalarType::Int).dim(2).contiguous();
    const bool shared = seq_idx.size(0) == 1;
    arg.sizes({shared ? 1 : B, N});
    data = arg.data<const int32_t>();
    return shared ? 0 : N;
}

// ---- recurrences -------------------------------------------------------------------------------

struct ScanArgs {
    const Tensor &q, &k, &v, &g;
    const MaybeTensor &beta, &dt, &D;
    const Tensor &seq_idx;
    const MaybeTensor &initial_state;
    double scale;
};

void set_strides(int64_t (&strides)[3], const Tensor &x) {
    for (int i = 0; i < 3; ++i) strides[i] = x.stride(i);
}

// The params that forward and backward share, from checked tensors.
rt_scan_params scan_params(const char *op, const ScanArgs &in) {
    Arg{op, "q", in.q}.on_cpu().dim(4).unit_last_stride();
    const ScalarType dtype = Arg{op, "q", in.q}.scalar_type();
    const int64_t B = in.q.size(0), N = in.q.size(1), G = in.q.size(2), K = in.q.size(3);
    Arg{op, "k", in.k}.on_cpu().dtype(dtype).sizes({B, N, G, K}).unit_last_stride();
    Arg{op, "v", in.v}.on_cpu().dtype(dtype).dim(4).unit_last_stride();
    const int64_t H = in.v.size(2), V = in.v.size(3);
    Arg{op, "v", in.v}.sizes({B, N, H, V});

    rt_scan_params p = {};
    p.dtype = dtype_of(in.q, op);
    const ScalarType state = state_dtype(p.dtype);
    p.batch = B, p.num_tokens = N, p.num_heads = H, p.num_k_heads = G, p.head_dim = K, p.v_head_dim = V;
    p.scale = in.scale;
    const Arg g = {op, "g", in.g};
    p.channel_decay = in.g.dim() == 4;
    g.on_cpu().dtype(state).contiguous();
    g.sizes(p.channel_decay ? std::vector<int64_t>{B, N, H, K} : std::vector<int64_t>{B, N, H});
    p.g = g.data();
    p.q = Arg{op, "q", in.q}.data(), p.k = Arg{op, "k", in.k}.data(), p.v = Arg{op, "v", in.v}.data();
    set_strides(p.q_stride, in.q), set_strides(p.k_stride, in.k), set_strides(p.v_stride, in.v);
    p.beta = optional_data(op, "beta", in.beta, state, {B, N, H});
    p.dt = optional_data(op, "dt", in.dt, state, {B, N, H});
    p.D = optional_data(op, "D", in.D, state, {H});
    p.seq_idx_batch_stride = set_seq_idx(op, in.seq_idx, B, N, p.seq_idx);
    p.initial_state = optional_data(op, "initial_state", in.initial_state, state, {B, H, K, V});
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
    const char *op = "scan";
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
    check(rt_scan_fwd(&p, parallel), op);
    return {out, final_state, states};
}

// dq, dk, dv, dg, dbeta or ddt, dD of each token, dinitial_state; the two in between may be empty.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>
scan_backward(const Tensor &dout, MaybeTensor dfinal_state, const Tensor &q, const Tensor &k, const Tensor &v,
              const Tensor &g, MaybeTensor beta, MaybeTensor dt, MaybeTensor D, const Tensor &seq_idx,
              MaybeTensor initial_state, const Tensor &states, double scale) {
    const char *op = "scan_backward";
    rt_scan_params p = scan_params(op, {q, k, v, g, beta, dt, D, seq_idx, initial_state, scale});
    const ScalarType state = state_dtype(p.dtype);
    const int64_t B = p.batch, N = p.num_tokens, H = p.num_heads, G = p.num_k_heads, K = p.head_dim, V = p.v_head_dim;
    const Arg arg = {op, "dout", dout};
    p.dout = arg.on_cpu().dtype(v.scalar_type()).sizes({B, N, H, V}).unit_last_stride().data();
    set_strides(p.dout_stride, dout);
    p.dfinal_state = optional_data(op, "dfinal_state", dfinal_state, state, {B, H, K, V});
    const Arg kept = {op, "states", states};
    p.states = kept.on_cpu().dtype(state).contiguous().sizes({B, H, rt_scan_num_states(N), K, V}).data();
    Tensor dq = empty_like(q, {B, N, G, K}, state), dk = empty_like(q, {B, N, G, K}, state),
           dv = empty_like(q, {B, N, H, V}, state), dinitial = empty_like(q, {B, H, K, V}, state);
    Tensor dg =
        empty_like(q, p.channel_decay ? std::vector<int64_t>{B, N, H, K} : std::vector<int64_t>{B, N, H}, state);
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
    check(rt_scan_bwd(&p, parallel), op);
    return {dq, dk, dv, dg, dfactor, dD, dinitial};
}

// ---- selective scan ----------------------------------------------------------------------------

struct SelectiveArgs {
    const Tensor &x, &dt, &A, &B, &C;
    const MaybeTensor &D;
    const Tensor &seq_idx;
    const MaybeTensor &initial_state;
};

// Element 0 of a tensor of rows (B, N, any), and its strides.
const void *set_rows(const char *op, const char *name, const Tensor &x, ScalarType dtype,
                     const std::vector<int64_t> &sizes, int64_t (&strides)[2]) {
    const Arg arg = {op, name, x};
    arg.on_cpu().dtype(dtype).sizes(sizes).unit_last_stride();
    strides[0] = x.stride(0), strides[1] = x.stride(1);
    return arg.data();
}

rt_selective_params selective_params(const char *op, const SelectiveArgs &in) {
    Arg{op, "x", in.x}.on_cpu().dim(3);
    Arg{op, "B", in.B}.on_cpu().dim(3);
    rt_selective_params p = {};
    p.dtype = dtype_of(in.x, op);
    const ScalarType dtype = in.x.scalar_type(), state = state_dtype(p.dtype);
    const int64_t batch = in.x.size(0), N = in.x.size(1), dim = in.x.size(2), K = in.B.size(2);
    p.batch = batch, p.num_tokens = N, p.num_channels = dim, p.state_dim = K;
    p.x = set_rows(op, "x", in.x, dtype, {batch, N, dim}, p.x_stride);
    p.B = set_rows(op, "B", in.B, dtype, {batch, N, K}, p.B_stride);
    p.C = set_rows(op, "C", in.C, dtype, {batch, N, K}, p.C_stride);
    p.dt = optional_data(op, "dt", in.dt, state, {batch, N, dim});
    p.A = optional_data(op, "A", in.A, state, {K, dim});
    p.D = optional_data(op, "D", in.D, state, {dim});
    p.seq_idx_batch_stride = set_seq_idx(op, in.seq_idx, batch, N, p.seq_idx);
    p.initial_state = optional_data(op, "initial_state", in.initial_state, state, {batch, K, dim});
    return p;
}

// keep: for a backward. Returns out, the final state, and the states that the backward needs.
std::tuple<Tensor, Tensor, Tensor> selective_scan(const Tensor &x, const Tensor &dt, const Tensor &A, const Tensor &B,
                                                  const Tensor &C, MaybeTensor D, const Tensor &seq_idx,
                                                  MaybeTensor initial_state, bool keep) {
    const char *op = "selective_scan";
    rt_selective_params p = selective_params(op, {x, dt, A, B, C, D, seq_idx, initial_state});
    const ScalarType state = state_dtype(p.dtype);
    const int64_t batch = p.batch, N = p.num_tokens, dim = p.num_channels, K = p.state_dim;
    Tensor out = empty_like(x, {batch, N, dim}, x.scalar_type()), final_state = empty_like(x, {batch, K, dim}, state),
           states = empty_like(x, {batch, keep ? rt_scan_num_states(N) : 0, K, dim}, state);
    p.out = out.data_ptr(), p.final_state = final_state.data_ptr();
    p.states = keep ? states.data_ptr() : nullptr;
    const rt_parallel parallel = torch_threads();
    const Tensor workspace = workspace_of(p, x, rt_selective_fwd_workspace_bytes(&p, parallel.num_workers));
    check(rt_selective_fwd(&p, parallel), op);
    return {out, final_state, states};
}

// dx, ddt, dA, dB, dC, dD (empty without D), dinitial_state.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>
selective_scan_backward(const Tensor &dout, MaybeTensor dfinal_state, const Tensor &x, const Tensor &dt,
                        const Tensor &A, const Tensor &B, const Tensor &C, MaybeTensor D, const Tensor &seq_idx,
                        MaybeTensor initial_state, const Tensor &states) {
    const char *op = "selective_scan_backward";
    rt_selective_params p = selective_params(op, {x, dt, A, B, C, D, seq_idx, initial_state});
    const ScalarType state = state_dtype(p.dtype);
    const int64_t batch = p.batch, N = p.num_tokens, dim = p.num_channels, K = p.state_dim;
    p.dout = set_rows(op, "dout", dout, x.scalar_type(), {batch, N, dim}, p.dout_stride);
    p.dfinal_state = optional_data(op, "dfinal_state", dfinal_state, state, {batch, K, dim});
    p.states = optional_data(op, "states", states, state, {batch, rt_scan_num_states(N), K, dim});
    Tensor dx = empty_like(x, {batch, N, dim}, state), ddt = empty_like(x, {batch, N, dim}, state),
           dA = empty_like(x, {K, dim}, state), dB = empty_like(x, {batch, N, K}, state),
           dC = empty_like(x, {batch, N, K}, state), dD = empty_like(x, {D.has_value() ? dim : 0}, state),
           dinitial = empty_like(x, {batch, K, dim}, state);
    p.dx = dx.data_ptr(), p.ddt = ddt.data_ptr(), p.dA = dA.data_ptr(), p.dB = dB.data_ptr();
    p.dC = dC.data_ptr(), p.dinitial_state = dinitial.data_ptr();
    if (p.D != nullptr) p.dD = dD.data_ptr();
    const rt_parallel parallel = torch_threads();
    const Tensor workspace = workspace_of(p, x, rt_selective_bwd_workspace_bytes(&p, parallel.num_workers));
    check(rt_selective_bwd(&p, parallel), op);
    return {dx, ddt, dA, dB, dC, dD, dinitial};
}

// ---- convolution -------------------------------------------------------------------------------

rt_conv_params conv_params(const char *op, const Tensor &x, const Tensor &weight, const MaybeTensor &bias,
                           const Tensor &seq_idx, const MaybeTensor &initial_state, bool silu) {
    Arg{op, "x", x}.on_cpu().dim(3).unit_last_stride();
    rt_conv_params p = {};
    p.dtype = dtype_of(x, op);
    const ScalarType state = state_dtype(p.dtype);
    p.batch = x.size(0), p.num_tokens = x.size(1), p.num_channels = x.size(2), p.silu = silu;
    const Arg weights = {op, "weight", weight};
    weights.on_cpu().dtype(state).dim(2).contiguous().sizes({p.num_channels, weight.size(1)});
    p.width = weight.size(1), p.weight = weights.data();
    check(p.width < 1 || p.width > RT_MAX_CONV_WIDTH ? RT_BAD_WIDTH : RT_OK, op);
    p.bias = optional_data(op, "bias", bias, state, {p.num_channels});
    p.x = Arg{op, "x", x}.data(), p.x_stride[0] = x.stride(0), p.x_stride[1] = x.stride(1);
    p.seq_idx_batch_stride = set_seq_idx(op, seq_idx, p.batch, p.num_tokens, p.seq_idx);
    p.initial_state = optional_data(op, "initial_state", initial_state, state, {p.batch, p.width - 1, p.num_channels});
    return p;
}

std::tuple<Tensor, Tensor> causal_conv1d(const Tensor &x, const Tensor &weight, MaybeTensor bias, const Tensor &seq_idx,
                                         MaybeTensor initial_state, bool silu) {
    const char *op = "causal_conv1d";
    rt_conv_params p = conv_params(op, x, weight, bias, seq_idx, initial_state, silu);
    Tensor y = empty_like(x, {p.batch, p.num_tokens, p.num_channels}, x.scalar_type());
    Tensor final_state = empty_like(x, {p.batch, p.width - 1, p.num_channels}, state_dtype(p.dtype));
    p.y = y.data_ptr(), p.final_state = final_state.data_ptr();
    check(rt_conv_fwd(&p, torch_threads()), op);
    return {y, final_state};
}

// dx, dweight, dbias (empty without a bias), dinitial_state.
std::tuple<Tensor, Tensor, Tensor, Tensor> causal_conv1d_backward(const Tensor &dy, MaybeTensor dfinal_state,
                                                                  const Tensor &x, const Tensor &weight,
                                                                  MaybeTensor bias, const Tensor &seq_idx,
                                                                  MaybeTensor initial_state, bool silu) {
    const char *op = "causal_conv1d_backward";
    rt_conv_params p = conv_params(op, x, weight, bias, seq_idx, initial_state, silu);
    const ScalarType state = state_dtype(p.dtype);
    const std::vector<int64_t> state_sizes = {p.batch, p.width - 1, p.num_channels};
    const Arg arg = {op, "dy", dy};
    arg.on_cpu().dtype(x.scalar_type()).sizes({p.batch, p.num_tokens, p.num_channels}).unit_last_stride();
    p.dy = arg.data(), p.dy_stride[0] = dy.stride(0), p.dy_stride[1] = dy.stride(1);
    p.dfinal_state = optional_data(op, "dfinal_state", dfinal_state, state, state_sizes);
    Tensor dx = empty_like(x, {p.batch, p.num_tokens, p.num_channels}, x.scalar_type());
    Tensor dweight = empty_like(x, {p.num_channels, p.width}, state),
           dbias = empty_like(x, {bias.has_value() ? p.num_channels : 0}, state),
           dinitial = empty_like(x, state_sizes, state);
    p.dx = dx.data_ptr(), p.dweight = dweight.data_ptr(), p.dinitial_state = dinitial.data_ptr();
    if (p.bias != nullptr) p.dbias = dbias.data_ptr();
    check(rt_conv_bwd(&p, torch_threads()), op);
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
