// The ops of the `ringtile` namespace on CPU tensors: tensors in, rt_* params out, one core call.
// The only file that includes torch, and only its stable headers, so that one binary serves every torch
// from 2.11 on. Each op checks here that its pointers and sizes are safe to hand over; what a user's
// arguments must mean is checked where the user calls (ops.py). Shape letters are those of ringtile.h.
#include "ringtile.h"

#include <Python.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <optional>
#include <sstream>
#include <stdexcept>
#include <tuple>
#include <vector>

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// ---- status, threads, workspace ----------------------------------------------------------------

// Throws std::runtime_error, a RuntimeError in Python, with one sentence put together from `parts`.
template <class... Parts> void require(bool holds, const char *op, const Parts &...parts) {
    if (holds) return;
    std::ostringstream text;
    text << "ringtile." << op << ": ";
    (text << ... << parts);
    throw std::runtime_error(text.str());
}

void check(rt_status status, const char *op) { require(status == RT_OK, op, rt_status_message(status)); }

// Runs the core's workers on torch's own thread pool, so torch.set_num_threads holds.
void run_on_torch(void *, int64_t num_workers, void (*work)(void *, int64_t), void *ctx) {
    torch::stable::parallel_for(0, num_workers, 1, [&](int64_t begin, int64_t end) {
        for (int64_t worker = begin; worker < end; ++worker) work(ctx, worker);
    });
}

rt_parallel torch_threads() {
    return {run_on_torch, nullptr, static_cast<int64_t>(torch::stable::get_num_threads())};
}

// Scratch from torch's allocator, whose blocks on CPU are 64-byte aligned.
Tensor bytes(int64_t count) {
    return torch::stable::empty({count}, ScalarType::Byte, std::nullopt,
                                torch::stable::Device(torch::headeronly::DeviceType::CPU));
}

// ---- checks ------------------------------------------------------------------------------------

struct Shape {
    const Tensor &x;
    friend std::ostream &operator<<(std::ostream &text, const Shape &shape) {
        text << "(";
        for (int64_t i = 0; i < shape.x.dim(); ++i) text << (i ? ", " : "") << shape.x.size(i);
        return text << ")";
    }
};

// One named argument of one op; every check says op, argument, got and expected.
struct Arg {
    const char *op, *name;
    const Tensor &x;

    const Arg &on_cpu() const {
        require(x.is_cpu(), op, name, " must be a CPU tensor; move it with .cpu()");
        return *this;
    }
    const Arg &dtype(ScalarType expected) const {
        require(x.scalar_type() == expected, op, name, " has dtype ", x.scalar_type(), ", expected ",
                expected);
        return *this;
    }
    const Arg &dim(int64_t expected) const {
        require(x.dim() == expected, op, name, " has shape ", Shape{x}, ", expected ", expected,
                " dimensions");
        return *this;
    }
    const Arg &sizes(const std::vector<int64_t> &expected) const {
        dim(static_cast<int64_t>(expected.size()));
        for (size_t i = 0; i < expected.size(); ++i)
            require(x.size(i) == expected[i], op, name, " has shape ", Shape{x}, ", expected size ",
                    expected[i], " in dim ", i);
        return *this;
    }
    const Arg &unit_last_stride() const {
        const int64_t last = x.dim() - 1;
        require(x.size(last) <= 1 || x.stride(last) == 1, op, name, " has stride ", x.stride(last),
                " in its last dim, expected 1; call .contiguous()");
        return *this;
    }
    const Arg &contiguous() const {
        require(x.is_contiguous(), op, name, " must be contiguous");
        return *this;
    }
};

rt_dtype dtype_of(const Tensor &x, const char *op) {
    switch (x.scalar_type()) {
    case ScalarType::Double:
        return RT_F64;
    case ScalarType::Float:
        return RT_F32;
    case ScalarType::BFloat16:
        return RT_BF16;
    case ScalarType::Half:
        return RT_F16;
    default:
        break;
    }
    require(false, op, "dtype ", x.scalar_type(),
            " is not supported, expected float64, float32, bfloat16 or float16");
    return RT_F32; // not reached
}

ScalarType state_dtype(rt_dtype dtype) { return dtype == RT_F64 ? ScalarType::Double : ScalarType::Float; }

// A (R, 4) tensor of runs, read in place.
std::pair<const rt_run *, int64_t> runs_of(const Tensor &runs, const char *op, const char *name) {
    static_assert(sizeof(rt_run) == 4 * sizeof(int64_t), "a run is one row of the tensor");
    Arg{op, name, runs}.on_cpu().dtype(ScalarType::Long).contiguous().sizes({runs.size(0), 4});
    return {static_cast<const rt_run *>(runs.data_ptr()), runs.size(0)};
}

// A (R, 5) tensor (rank, then a run), rank after rank, split into runs and each rank's offset.
struct LayoutArg {
    std::vector<rt_run> runs;
    std::vector<int64_t> offsets; // (W + 1)

    LayoutArg(const Tensor &layout, const char *op) {
        Arg{op, "layout", layout}.on_cpu().dtype(ScalarType::Long).contiguous().sizes({layout.size(0), 5});
        const auto *row = static_cast<const int64_t *>(layout.data_ptr());
        for (int64_t i = 0; i < layout.size(0); ++i, row += 5) {
            const auto last = static_cast<int64_t>(offsets.size()) - 1;
            require(row[0] == last || row[0] == last + 1, op,
                    "layout rows must go rank after rank from 0; row ", i, " is of rank ", row[0]);
            if (row[0] == last + 1) offsets.push_back(i);
            runs.push_back({row[1], row[2], row[3], row[4]});
        }
        offsets.push_back(static_cast<int64_t>(runs.size()));
    }
    int64_t num_ranks() const { return static_cast<int64_t>(offsets.size()) - 1; }
};

// ---- attention ---------------------------------------------------------------------------------

void set_strides(int64_t (&strides)[3], const Tensor &x) {
    for (int i = 0; i < 3; ++i) strides[i] = x.stride(i);
}

// The part of the params that forward and backward share, checked.
rt_attn_params attn_params(const char *op, const Tensor &q, const Tensor &k, const Tensor &v,
                           const Tensor &begin, const Tensor &end, const Tensor &k_runs, double scale,
                           double softcap) {
    Arg{op, "q", q}.on_cpu().dim(4).unit_last_stride();
    Arg{op, "k", k}.on_cpu().dtype(q.scalar_type()).dim(4).unit_last_stride();
    const int64_t B = q.size(0), N = q.size(1), K = k.size(1), G = k.size(2);
    Arg{op, "k", k}.sizes({B, K, G, q.size(3)});
    Arg{op, "v", v}.on_cpu().dtype(q.scalar_type()).dim(4).unit_last_stride();
    Arg{op, "v", v}.sizes({B, K, G, v.size(3)});
    Arg{op, "begin", begin}.on_cpu().dtype(ScalarType::Int).dim(2);
    Arg{op, "begin", begin}.contiguous().sizes({begin.size(0) == 1 ? 1 : B, N});
    Arg{op, "end", end}.on_cpu().dtype(ScalarType::Int).contiguous().sizes({begin.size(0), N});

    rt_attn_params p = {};
    p.dtype = dtype_of(q, op);
    p.batch = B, p.num_queries = N, p.num_keys = K, p.num_heads = q.size(2), p.num_kv_heads = G;
    p.head_dim = q.size(3), p.v_head_dim = v.size(3);
    p.scale = scale, p.softcap = softcap;
    p.q = q.data_ptr(), p.k = k.data_ptr(), p.v = v.data_ptr();
    set_strides(p.q_stride, q), set_strides(p.k_stride, k), set_strides(p.v_stride, v);
    p.begin = static_cast<const int32_t *>(begin.data_ptr());
    p.end = static_cast<const int32_t *>(end.data_ptr());
    p.mask_batch_stride = begin.size(0) == 1 ? 0 : N;
    std::tie(p.k_runs, p.num_k_runs) = runs_of(k_runs, op, "k_runs");
    return p;
}

// lse (B, H, N) is of the state dtype or, to lose nothing between calls, float64.
void set_lse(rt_attn_params &p, const char *op, const Tensor &lse) {
    p.lse_f64 = lse.scalar_type() == ScalarType::Double;
    Arg{op, "lse", lse}.on_cpu().dtype(p.lse_f64 ? ScalarType::Double : state_dtype(p.dtype)).contiguous();
    Arg{op, "lse", lse}.sizes({p.batch, p.num_heads, p.num_queries});
    p.lse = lse.data_ptr();
}

void attn_fwd_(const Tensor &q, const Tensor &k, const Tensor &v, const Tensor &begin, const Tensor &end,
               const Tensor &k_runs, Tensor out, Tensor lse, double scale, double softcap) {
    const char *op = "attn_fwd_";
    rt_attn_params p = attn_params(op, q, k, v, begin, end, k_runs, scale, softcap);
    const ScalarType state = state_dtype(p.dtype);
    Arg{op, "out", out}.on_cpu().dtype(state).sizes({p.batch, p.num_queries, p.num_heads, p.v_head_dim});
    Arg{op, "out", out}.unit_last_stride();
    set_lse(p, op, lse);
    p.out = out.data_ptr();
    set_strides(p.out_stride, out);

    const rt_parallel parallel = torch_threads();
    p.workspace_bytes = rt_attn_fwd_workspace_bytes(&p, parallel.num_workers);
    const Tensor workspace = bytes(p.workspace_bytes);
    p.workspace = workspace.data_ptr();
    check(rt_attn_fwd(&p, parallel), op);
}

void attn_bwd_(const Tensor &q, const Tensor &k, const Tensor &v, const Tensor &begin, const Tensor &end,
               const Tensor &k_runs, const Tensor &dout, const Tensor &lse, const Tensor &delta, Tensor dq,
               Tensor dk, Tensor dv, double scale, double softcap) {
    const char *op = "attn_bwd_";
    rt_attn_params p = attn_params(op, q, k, v, begin, end, k_runs, scale, softcap);
    const ScalarType state = state_dtype(p.dtype);
    const int64_t B = p.batch, N = p.num_queries, K = p.num_keys, H = p.num_heads, G = p.num_kv_heads;
    Arg{op, "dout", dout}.on_cpu().dtype(q.scalar_type()).sizes({B, N, H, p.v_head_dim}).unit_last_stride();
    set_lse(p, op, lse);
    Arg{op, "delta", delta}.on_cpu().dtype(state).contiguous().sizes({B, H, N});
    Arg{op, "dq", dq}.on_cpu().dtype(state).sizes({B, N, H, p.head_dim}).unit_last_stride();
    Arg{op, "dk", dk}.on_cpu().dtype(state).sizes({B, K, G, p.head_dim}).unit_last_stride();
    Arg{op, "dv", dv}.on_cpu().dtype(state).sizes({B, K, G, p.v_head_dim}).unit_last_stride();
    p.dout = dout.data_ptr(), p.delta = delta.data_ptr();
    p.dq = dq.data_ptr(), p.dk = dk.data_ptr(), p.dv = dv.data_ptr();
    set_strides(p.dout_stride, dout), set_strides(p.dq_stride, dq);
    set_strides(p.dk_stride, dk), set_strides(p.dv_stride, dv);

    const rt_parallel parallel = torch_threads();
    p.workspace_bytes = rt_attn_bwd_workspace_bytes(&p, parallel.num_workers);
    const Tensor workspace = bytes(p.workspace_bytes);
    p.workspace = workspace.data_ptr();
    check(rt_attn_bwd(&p, parallel), op);
}

// ---- sequence ----------------------------------------------------------------------------------

// x and y differ only in the size of dim; which of them is local is the op's business.
struct ShardArgs {
    std::vector<int64_t> sizes, global_strides, local_strides;
    rt_shard_params p = {};

    ShardArgs(const char *op, const Tensor &global, const Tensor &local, const Tensor &runs, int64_t dim) {
        Arg{op, "global tensor", global}.on_cpu();
        Arg{op, "local tensor", local}.on_cpu().dtype(global.scalar_type()).dim(global.dim());
        require(dim >= 0 && dim < global.dim(), op, "dim ", dim, " is not a dimension of shape ",
                Shape{global});
        for (int64_t i = 0; i < global.dim(); ++i) {
            require(i == dim || global.size(i) == local.size(i), op, "global shape ", Shape{global},
                    " and local shape ", Shape{local}, " may differ in dim ", dim, " only");
            sizes.push_back(local.size(i));
            global_strides.push_back(global.stride(i));
            local_strides.push_back(local.stride(i));
        }
        p.ndim = global.dim(), p.dim = dim, p.element_bytes = static_cast<int64_t>(global.element_size());
        p.sizes = sizes.data(), p.global_len = global.size(dim);
        p.global_strides = global_strides.data(), p.local_strides = local_strides.data();
        std::tie(p.runs, p.num_runs) = runs_of(runs, op, "runs");
    }
};

void shard_seq_(const Tensor &x, const Tensor &runs, int64_t dim, Tensor y) {
    const ShardArgs args("shard_seq_", x, y, runs, dim);
    check(rt_shard(&args.p, x.data_ptr(), y.data_ptr(), torch_threads()), "shard_seq_");
}

void unshard_seq_(const Tensor &x, const Tensor &runs, int64_t dim, Tensor y) {
    const ShardArgs args("unshard_seq_", y, x, runs, dim);
    check(rt_unshard(&args.p, x.data_ptr(), y.data_ptr(), torch_threads()), "unshard_seq_");
}

void layout_check(const Tensor &layout, int64_t seq_len, int64_t world_size) {
    const char *op = "layout_check";
    const LayoutArg arg(layout, op);
    require(arg.num_ranks() == world_size, op, "runs for ", arg.num_ranks(), " ranks, expected world_size ",
            world_size);
    require(seq_len >= 0, op, "seq_len is ", seq_len, ", expected at least 0");
    std::vector<uint8_t> seen(static_cast<size_t>(seq_len));
    check(rt_layout_check(arg.runs.data(), arg.offsets.data(), world_size, seq_len, seen.data()), op);
}

// needed (M, 6): query rank, key rank, then a run; pairs (W, W): [query rank][key rank].
std::tuple<Tensor, Tensor> plan(const Tensor &begin, const Tensor &end, const Tensor &layout) {
    const char *op = "plan";
    Arg{op, "begin", begin}.on_cpu().dtype(ScalarType::Int).dim(2).contiguous();
    Arg{op, "end", end}.on_cpu().dtype(ScalarType::Int).contiguous().sizes({begin.size(0), begin.size(1)});
    const LayoutArg arg(layout, op);
    const int64_t S = begin.size(1), W = arg.num_ranks();
    layout_check(layout, S, W);
    const rt_plan_params p = {W,
                              S,
                              begin.size(0),
                              arg.runs.data(),
                              arg.offsets.data(),
                              static_cast<const int32_t *>(begin.data_ptr()),
                              static_cast<const int32_t *>(end.data_ptr())};
    const torch::stable::Device cpu(torch::headeronly::DeviceType::CPU);
    Tensor pairs = torch::stable::empty({W, W}, ScalarType::Long, std::nullopt, cpu);
    auto *pair = static_cast<int64_t *>(pairs.data_ptr());

    std::vector<uint8_t> covered(static_cast<size_t>(S));
    std::vector<int32_t> scratch(static_cast<size_t>(S) + 1);
    std::vector<rt_run> runs(arg.runs.size());
    std::vector<int64_t> rows; // (M, 6) flat
    for (int64_t query_rank = 0; query_rank < W; ++query_rank) {
        check(rt_plan_cover(&p, query_rank, covered.data(), scratch.data()), op);
        for (int64_t key_rank = 0; key_rank < W; ++key_rank, ++pair) {
            const auto fill = [&](int64_t *count) {
                return rt_plan_pair(&p, query_rank, key_rank, covered.data(), runs.data(),
                                    static_cast<int64_t>(runs.size()), count, pair);
            };
            int64_t count = 0;
            rt_status status = fill(&count);
            if (status == RT_CAPACITY) {
                runs.resize(static_cast<size_t>(count));
                status = fill(&count);
            }
            check(status, op);
            for (int64_t i = 0; i < count; ++i)
                rows.insert(rows.end(), {query_rank, key_rank, runs[i].global_begin, runs[i].stride,
                                         runs[i].local_begin, runs[i].length});
        }
    }
    Tensor needed =
        torch::stable::empty({static_cast<int64_t>(rows.size()) / 6, 6}, ScalarType::Long, std::nullopt, cpu);
    std::copy(rows.begin(), rows.end(), static_cast<int64_t *>(needed.data_ptr()));
    return {needed, pairs};
}

// (1,) int64: the same on two ranks exactly when mask and layout are, up to a 64-bit collision.
Tensor digest(const Tensor &begin, const Tensor &end, const Tensor &layout) {
    uint64_t value = 0;
    const Tensor *parts[] = {&begin, &end, &layout};
    for (const Tensor *part : parts) {
        Arg{"digest", "begin, end and layout", *part}.on_cpu().contiguous();
        value =
            rt_digest(part->data_ptr(), part->numel() * static_cast<int64_t>(part->element_size()), value);
    }
    Tensor result = torch::stable::empty({1}, ScalarType::Long, std::nullopt,
                                         torch::stable::Device(torch::headeronly::DeviceType::CPU));
    *static_cast<int64_t *>(result.data_ptr()) = static_cast<int64_t>(value);
    return result;
}

// ---- MLP and loss ------------------------------------------------------------------------------

rt_glu_params glu_params(const char *op, const Tensor &gate, const Tensor &up, const Tensor &prod,
                         int64_t kind) {
    Arg{op, "gate", gate}.on_cpu().dim(2).unit_last_stride();
    const std::vector<int64_t> expected = {gate.size(0), gate.size(1)};
    Arg{op, "up", up}.on_cpu().dtype(gate.scalar_type()).sizes(expected).unit_last_stride();
    Arg{op, "dprod", prod}.on_cpu().dtype(gate.scalar_type()).sizes(expected).unit_last_stride();
    return {dtype_of(gate, op), static_cast<rt_glu_kind>(kind),
            gate.size(0),       gate.size(1),
            gate.stride(0),     up.stride(0),
            prod.stride(0)};
}

Tensor glu_fwd(const Tensor &gate, const Tensor &up, int64_t kind) {
    Arg{"glu_fwd", "gate", gate}.on_cpu().dim(2);
    Tensor prod = torch::stable::new_empty(gate, {gate.size(0), gate.size(1)});
    const rt_glu_params p = glu_params("glu_fwd", gate, up, prod, kind);
    check(rt_glu_fwd(&p, gate.data_ptr(), up.data_ptr(), prod.data_ptr(), torch_threads()), "glu_fwd");
    return prod;
}

void glu_bwd_(Tensor gate, Tensor up, Tensor dprod, int64_t kind) {
    const rt_glu_params p = glu_params("glu_bwd_", gate, up, dprod, kind);
    check(rt_glu_bwd(&p, gate.data_ptr(), up.data_ptr(), dprod.data_ptr(), torch_threads()), "glu_bwd_");
}

void cross_entropy_fwd_bwd_(Tensor logits, const Tensor &labels, Tensor loss, Tensor lse,
                            int64_t ignore_index, double label_smoothing, double softcap, double z_loss,
                            bool want_grad) {
    const char *op = "cross_entropy_fwd_bwd_";
    Arg{op, "logits", logits}.on_cpu().dim(2).unit_last_stride();
    const int64_t T = logits.size(0);
    const rt_dtype dtype = dtype_of(logits, op);
    Arg{op, "labels", labels}.on_cpu().dtype(ScalarType::Long).contiguous().sizes({T});
    Arg{op, "loss", loss}.on_cpu().dtype(state_dtype(dtype)).contiguous().sizes({T});
    Arg{op, "lse", lse}.on_cpu().dtype(state_dtype(dtype)).contiguous().sizes({T});
    const rt_cross_entropy_params p = {
        dtype,           T,       logits.size(1), logits.stride(0), ignore_index,
        label_smoothing, softcap, z_loss,         want_grad};
    check(rt_cross_entropy_fwd_bwd(&p, logits.data_ptr(), static_cast<const int64_t *>(labels.data_ptr()),
                                   loss.data_ptr(), lse.data_ptr(), torch_threads()),
          op);
}

double multiply_add(int64_t iterations) {
    double flops = 0;
    check(rt_multiply_add(iterations, &flops, torch_threads()), "multiply_add");
    return flops;
}

int64_t cpu_isa() {
    rt_isa isa = RT_ISA_GENERIC;
    check(rt_cpu_isa(&isa), "cpu_isa");
    return static_cast<int64_t>(isa);
}

} // namespace

// ---- registration ------------------------------------------------------------------------------

STABLE_TORCH_LIBRARY(ringtile, m) {
    m.def("attn_fwd_(Tensor q, Tensor k, Tensor v, Tensor begin, Tensor end, Tensor k_runs, "
          "Tensor(a!) out, Tensor(b!) lse, float scale, float softcap) -> ()");
    m.def("attn_bwd_(Tensor q, Tensor k, Tensor v, Tensor begin, Tensor end, Tensor k_runs, "
          "Tensor dout, Tensor lse, Tensor delta, Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv, "
          "float scale, float softcap) -> ()");
    m.def("shard_seq_(Tensor x, Tensor runs, int dim, Tensor(a!) y) -> ()");
    m.def("unshard_seq_(Tensor x, Tensor runs, int dim, Tensor(a!) y) -> ()");
    m.def("layout_check(Tensor layout, int seq_len, int world_size) -> ()");
    m.def("plan(Tensor begin, Tensor end, Tensor layout) -> (Tensor, Tensor)");
    m.def("digest(Tensor begin, Tensor end, Tensor layout) -> Tensor");
    m.def("glu_fwd(Tensor gate, Tensor up, int kind) -> Tensor");
    m.def("glu_bwd_(Tensor(a!) gate, Tensor(b!) up, Tensor(c!) dprod, int kind) -> ()");
    m.def("cross_entropy_fwd_bwd_(Tensor(a!) logits, Tensor labels, Tensor(b!) loss, Tensor(c!) lse, "
          "int ignore_index, float label_smoothing, float softcap, float z_loss, bool want_grad) -> ()");
    m.def("cpu_isa() -> int");
    m.def("multiply_add(int iterations) -> float");
}

STABLE_TORCH_LIBRARY_IMPL(ringtile, CPU, m) {
    m.impl("attn_fwd_", TORCH_BOX(&attn_fwd_));
    m.impl("attn_bwd_", TORCH_BOX(&attn_bwd_));
    m.impl("shard_seq_", TORCH_BOX(&shard_seq_));
    m.impl("unshard_seq_", TORCH_BOX(&unshard_seq_));
    m.impl("layout_check", TORCH_BOX(&layout_check));
    m.impl("plan", TORCH_BOX(&plan));
    m.impl("digest", TORCH_BOX(&digest));
    m.impl("glu_fwd", TORCH_BOX(&glu_fwd));
    m.impl("glu_bwd_", TORCH_BOX(&glu_bwd_));
    m.impl("cross_entropy_fwd_bwd_", TORCH_BOX(&cross_entropy_fwd_bwd_));
}

// No tensor argument to dispatch on.
STABLE_TORCH_LIBRARY_IMPL(ringtile, CompositeExplicitAutograd, m) {
    m.impl("cpu_isa", TORCH_BOX(&cpu_isa));
    m.impl("multiply_add", TORCH_BOX(&multiply_add));
}

// `import ringtile._C` loads the shared object, whose static initialisers register the ops above.
static struct PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
PyMODINIT_FUNC PyInit__C(void) { return PyModule_Create(&module_def); }
