// The ops of the `ringtile` namespace that run on every device. Each turns its tensors into params and calls the core
// once. cuda/torch/kernels.cpp compiles this file again for CUDA tensors. Only csrc/torch and cuda/torch include torch,
// and only its stable headers, so that one binary serves every torch from 2.11 on. An op checks here that its pointers
// and sizes are safe to pass on; ops.py checks the arguments' meaning, where the user calls. Shape letters as in
// ringtile.h.
#include <Python.h> // first, as its documentation asks

#include "../arrays.h"
#include "binding.h"

#ifdef RINGTILE_CUDA
#define RT_CORE(name) rt_cuda_##name
#define RT_DISPATCH_KEY CUDA
#define RT_MODULE "_cuda"
#define RT_MODULE_INIT PyInit__cuda
#define RT_METHODS nullptr
#define RT_ADD_CONSTANTS(module)                                                                                       \
    (PyModule_AddIntConstant(module, "CUDART_VERSION", rt_cuda_runtime_version()) == 0                                 \
         ? PyModule_AddIntConstant(module, "DRIVER_VERSION", rt_cuda_driver_version())                                 \
         : -1)
// Weak: a torch without CUDA lacks it, and the object, which binds all its symbols at once, must load there for the
// tests.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void **stream);
#else
#define RT_CORE(name) rt_##name
#define RT_DISPATCH_KEY CPU
#define RT_MODULE "_C"
#define RT_MODULE_INIT PyInit__C
extern PyMethodDef shared_memory_methods[];   // csrc/torch/shared_memory.cpp
int ringtile_add_constants(PyObject *module); // csrc/torch/sequence.cpp
#define RT_METHODS shared_memory_methods
#define RT_ADD_CONSTANTS(module) ringtile_add_constants(module)
#endif

namespace {

using namespace ringtile;

// An op on the device of its first tensor, which is the current device for as long as this object lives.
struct Place : Op {
#ifdef RINGTILE_CUDA
    const torch::stable::accelerator::DeviceGuard guard;

    Place(const char *op, const Tensor &x) : Op(op, checked(op, x)), guard(device.index()) {}

    static Device checked(const char *op, const Tensor &x) {
        require(Arg{op, "the first tensor", x}.x.is_cuda(), op,
                "the first tensor is on the CPU and another one on a GPU; move all tensors to one device");
        return x.device();
    }
    // torch's current stream.
    void *queue() const {
        void *stream = nullptr;
        TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device.index(), &stream));
        return stream;
    }
    static int64_t workspace_bytes(const rt_attn_fwd_params &p) { return rt_cuda_attn_fwd_workspace_bytes(&p); }
    static int64_t workspace_bytes(const rt_attn_bwd_params &p) { return rt_cuda_attn_bwd_workspace_bytes(&p); }
#else
    Place(const char *op, const Tensor &x) : Op(op, Arg{op, "the first tensor", x}.x.device()) {}

    rt_parallel queue() const { return torch_threads(); }
    int64_t workspace_bytes(const rt_attn_fwd_params &p) const {
        return rt_attn_fwd_workspace_bytes(&p.block, queue().num_workers);
    }
    int64_t workspace_bytes(const rt_attn_bwd_params &p) const {
        return rt_attn_bwd_workspace_bytes(&p.block, queue().num_workers);
    }
#endif

    // Scratch of attention from torch's allocator, which aligns to 64 bytes; to be kept until the call returns.
    template <class Params> Tensor workspace_of(Params &p) const {
        p.block.workspace_bytes = workspace_bytes(p);
        const Tensor workspace =
            torch::stable::empty({p.block.workspace_bytes}, ScalarType::Byte, std::nullopt, device);
        p.block.workspace = workspace.data_ptr();
        return workspace;
    }
};

// ---- attention ---------------------------------------------------------------------------------

uint32_t word_of(const Op &op, const char *name, int64_t value) {
    require(value >= 0 && value <= UINT32_MAX, op.name, name, " is ", value, ", expected 0 .. 2^32 - 1");
    return static_cast<uint32_t>(value);
}

// Dropout arguments; rows, and positions of the queries, are required iff probability > 0.
struct DropoutArgs {
    double probability;
    int64_t seed, step, stream;
    const std::optional<Tensor> &rows, &positions;
};

// The mask's intervals of keys, which are at the positions of the queries.
struct KeyMaskArgs {
    const std::optional<Tensor> &begin, &end, &positions;
};

// The arguments that forward and backward share.
struct BlockArgs {
    const Tensor &q, &k, &v, &begin, &end, &k_runs, &lse;
    double scale, softcap;
};

// An int64 (count) tensor that is needed because of something else.
const int64_t *numbers(const Op &op, const char *name, const char *because, const std::optional<Tensor> &numbers,
                       int64_t count) {
    require(numbers.has_value(), op.name, because, " and ", name, " is None, expected a tensor");
    return op.dense<const int64_t>(name, *numbers, ScalarType::Long, {count});
}

void set_dropout(rt_attn_block &p, const Op &op, const DropoutArgs &in) {
    p.dropout = in.probability;
    p.seed = word_of(op, "seed", in.seed), p.step = word_of(op, "step", in.step);
    p.stream = word_of(op, "stream", in.stream);
    if (p.dropout == 0) return;
    p.dropout_rows = numbers(op, "rows", "dropout is above 0", in.rows, p.batch);
    p.q_positions = numbers(op, "positions", "dropout is above 0", in.positions, p.num_queries);
}

void set_key_mask(rt_attn_block &p, const Op &op, const KeyMaskArgs &in) {
    require(in.begin.has_value() == in.end.has_value(), op.name, "only one of key_begin and key_end is given");
    if (!in.begin.has_value()) return;
    p.key_begin = op.mask("key_begin", *in.begin, p.batch, p.num_keys, p.key_mask_batch_stride);
    p.key_end = op.dense<const int32_t>("key_end", *in.end, ScalarType::Int, {in.begin->size(0), p.num_keys});
    p.q_positions = numbers(op, "positions", "there is a key_begin", in.positions, p.num_queries);
}

// Their part of the params, from checked tensors, and lse (B, H, N): of the state dtype or, so that it is not rounded
// between calls, float64.
std::pair<rt_attn_block, void *> attn_block(const Op &op, const BlockArgs &in, const DropoutArgs &dropout,
                                            const KeyMaskArgs &keys) {
    const Tensor &q = in.q, &k = in.k, &v = in.v;
    op.arg("q", q).dim(4), op.arg("k", k).dim(4), op.arg("v", v).dim(4);
    const int64_t B = q.size(0), N = q.size(1), H = q.size(2), K = k.size(1), G = k.size(2);
    const ScalarType dtype = op.arg("q", q).scalar_type();
    rt_attn_block p = {};
    p.batch = B, p.num_queries = N, p.num_keys = K, p.num_heads = H, p.num_kv_heads = G;
    p.head_dim = q.size(3), p.v_head_dim = v.size(3);
    p.scale = in.scale, p.softcap = in.softcap;
    p.q = op.rows("q", q, dtype, {B, N, H, p.head_dim}, p.q_stride);
    p.k = op.rows("k", k, dtype, {B, K, G, p.head_dim}, p.k_stride);
    p.v = op.rows("v", v, dtype, {B, K, G, p.v_head_dim}, p.v_stride);
    p.dtype = dtype_of(q, op.name);
    p.begin = op.mask("begin", in.begin, B, N, p.mask_batch_stride);
    p.end = op.dense<const int32_t>("end", in.end, ScalarType::Int, {in.begin.size(0), N});
    std::tie(p.k_runs, p.num_k_runs) = runs_of(in.k_runs, op.name, "k_runs");
    set_dropout(p, op, dropout);
    set_key_mask(p, op, keys);
    p.lse_f64 = op.arg("lse", in.lse).scalar_type() == ScalarType::Double;
    return {p, op.dense("lse", in.lse, p.lse_f64 ? ScalarType::Double : state_dtype(p.dtype), {B, H, N})};
}

void attn_fwd_(const Tensor &q, const Tensor &k, const Tensor &v, const Tensor &begin, const Tensor &end,
               const Tensor &k_runs, Tensor out, Tensor lse, double scale, double softcap, bool fresh, double dropout,
               int64_t seed, int64_t step, int64_t stream, std::optional<Tensor> rows, std::optional<Tensor> positions,
               std::optional<Tensor> rounded_out, std::optional<Tensor> key_begin, std::optional<Tensor> key_end) {
    const Place op("attn_fwd_", q);
    rt_attn_fwd_params p = {};
    std::tie(p.block, p.lse) =
        attn_block(op, {q, k, v, begin, end, k_runs, lse, scale, softcap},
                   {dropout, seed, step, stream, rows, positions}, {key_begin, key_end, positions});
    const rt_attn_block &b = p.block;
    p.fresh = fresh;
    const std::vector<int64_t> sizes = {b.batch, b.num_queries, b.num_heads, b.v_head_dim};
    p.rounded_out = op.dense("rounded_out", rounded_out, q.scalar_type(), sizes);
    const bool has_out = !fresh || !rounded_out.has_value() || op.arg("out", out).dtype(state_dtype(b.dtype)).x.numel();
    if (has_out) p.out = op.rows("out", out, state_dtype(b.dtype), sizes, p.out_stride);
    const Tensor workspace = op.workspace_of(p);
    check(RT_CORE(attn_fwd)(&p, op.queue()), op.name);
}

void attn_bwd_(const Tensor &q, const Tensor &k, const Tensor &v, const Tensor &begin, const Tensor &end,
               const Tensor &k_runs, const Tensor &dout, const Tensor &lse, const Tensor &delta, Tensor dq, Tensor dk,
               Tensor dv, double scale, double softcap, bool fresh, double dropout, int64_t seed, int64_t step,
               int64_t stream, std::optional<Tensor> rows, std::optional<Tensor> positions,
               std::optional<Tensor> rounded_dk, std::optional<Tensor> rounded_dv, std::optional<Tensor> key_begin,
               std::optional<Tensor> key_end) {
    const Place op("attn_bwd_", q);
    rt_attn_bwd_params p = {};
    std::tie(p.block, p.lse) =
        attn_block(op, {q, k, v, begin, end, k_runs, lse, scale, softcap},
                   {dropout, seed, step, stream, rows, positions}, {key_begin, key_end, positions});
    p.fresh = fresh;
    const ScalarType dtype = q.scalar_type(), state = state_dtype(p.block.dtype);
    const int64_t B = q.size(0), N = q.size(1), K = k.size(1), H = q.size(2), G = k.size(2);
    const int64_t D = q.size(3), Dv = v.size(3);
    p.dout = op.rows("dout", dout, dtype, {B, N, H, Dv}, p.dout_stride);
    p.delta = op.dense("delta", delta, state, {B, H, N});
    p.dq = op.rows("dq", dq, state, {B, N, H, D}, p.dq_stride);
    p.dk = op.rows("dk", dk, state, {B, K, G, D}, p.dk_stride);
    p.dv = op.rows("dv", dv, state, {B, K, G, Dv}, p.dv_stride);
    p.rounded_dk = op.dense("rounded_dk", rounded_dk, dtype, {B, K, G, D});
    p.rounded_dv = op.dense("rounded_dv", rounded_dv, dtype, {B, K, G, Dv});
    const Tensor workspace = op.workspace_of(p);
    check(RT_CORE(attn_bwd)(&p, op.queue()), op.name);
}

Tensor attn_delta(const Tensor &dout, const Tensor &out, std::optional<Tensor> dlse) {
    const Place op("attn_delta", dout);
    op.arg("dout", dout).dim(4);
    const ScalarType dtype = op.arg("dout", dout).scalar_type();
    const int64_t B = dout.size(0), N = dout.size(1), H = dout.size(2);
    const std::vector<int64_t> sizes = {B, N, H, dout.size(3)};
    rt_attn_delta_params p = {RT_F32, B, N, H, dout.size(3), {}, {}};
    const void *const dout_data = op.rows("dout", dout, dtype, sizes, p.dout_stride);
    const void *const out_data = op.rows("out", out, dtype, sizes, p.out_stride);
    p.dtype = dtype_of(dout, op.name);
    const auto *const dlse_data = op.dense<const double>("dlse", dlse, ScalarType::Double, {B, H, N});
    const Tensor delta = torch::stable::new_empty(dout, {B, H, N}, state_dtype(p.dtype));
    if (delta.numel() == 0) return delta; // the core takes no stride of 0, as an empty tensor may have
    check(RT_CORE(attn_delta)(&p, dout_data, out_data, dlse_data, delta.data_ptr(), op.queue()), op.name);
    return delta;
}

void attn_merge_(const Tensor &part, const Tensor &part_lse, Tensor out, Tensor lse, bool fresh, int64_t first_row,
                 std::optional<Tensor> rows, std::optional<Tensor> rounded) {
    const Place op("attn_merge_", part);
    rt_attn_merge_params p = {};
    p.dtype = dtype_of(part, op.name);
    const ScalarType state = state_dtype(p.dtype);
    op.arg("part", part).dim(4), op.arg("out", out).dim(4);
    const int64_t P = part.size(0), M = part.size(1), H = part.size(2), Dv = part.size(3);
    const int64_t B = out.size(0), N = out.size(1);
    p.part = op.rows("part", part, part.scalar_type(), {P, M, H, Dv}, p.part_stride);
    p.part_lse = op.dense("part_lse", part_lse, state, {P, H, M});
    p.out = op.dense("out", out, state, {B, N, H, Dv});
    p.lse = op.dense<double>("lse", lse, ScalarType::Double, {B, H, N});
    p.rounded = op.dense("rounded", rounded, part.scalar_type(), {B, N, H, Dv});
    p.rows = op.dense<const int64_t>("rows", rows, ScalarType::Long, {P * M});
    if (part.numel() == 0) return; // the core takes no stride of 0, as an empty tensor may have
    p.batch = B, p.num_queries = N, p.num_heads = H, p.v_head_dim = Dv, p.part_batch = P, p.part_queries = M;
    p.first_row = first_row, p.fresh = fresh;
    check(RT_CORE(attn_merge)(&p, op.queue()), op.name);
}

// ---- sequence ----------------------------------------------------------------------------------

// The params of rows. Two tensors of a pair may differ only in the size of dim.
struct RowsArgs {
    struct Numbers {
        int64_t sizes[RT_MAX_DIMS], global_strides[RT_MAX_DIMS], local_strides[RT_MAX_DIMS];
    };
    std::vector<Numbers> numbers;
    std::vector<rt_rows_tensor> tensors;
    rt_rows_params p = {};

    RowsArgs(const Op &op, const std::vector<Tensor> &xs, const Tensor &runs, int64_t dim,
             const std::vector<Tensor> &ys)
        : numbers(xs.size()) {
        require(xs.size() == ys.size(), op.name, xs.size(), " tensors and ", ys.size(),
                " of their rows, expected as many");
        require(xs.size() <= RT_MAX_ROWS_TENSORS, op.name, xs.size(), " tensors, expected at most ",
                RT_MAX_ROWS_TENSORS);
        for (size_t i = 0; i < xs.size(); ++i) {
            const Arg global = op.arg("global tensor", xs[i]), local = op.arg("local tensor", ys[i]);
            const int64_t ndim = xs[i].dim();
            local.dtype(global.scalar_type()).dim(ndim);
            require(dim >= 0 && dim < ndim, op.name, "dim ", dim, " is not a dimension of shape ", Shape{xs[i]});
            require(ndim <= RT_MAX_DIMS, op.name, ndim, " dimensions, expected at most ", RT_MAX_DIMS);
            auto &[sizes, global_strides, local_strides] = numbers[i];
            for (int64_t d = 0; d < ndim; ++d) {
                require(d == dim || xs[i].size(d) == ys[i].size(d), op.name, "global shape ", Shape{xs[i]},
                        " and local shape ", Shape{ys[i]}, " may differ in dim ", dim, " only");
                sizes[d] = ys[i].size(d), global_strides[d] = xs[i].stride(d), local_strides[d] = ys[i].stride(d);
            }
            tensors.push_back({ndim, dim, static_cast<int64_t>(xs[i].element_size()), sizes, xs[i].size(dim),
                               global_strides, local_strides, global.data(), local.data()});
        }
        p.num_tensors = static_cast<int64_t>(tensors.size()), p.tensors = tensors.data();
        std::tie(p.runs, p.num_runs) = runs_of(runs, op.name, "runs");
    }
};

// Calls the core; more: what an addition takes besides.
template <class Core, class... More>
void move_rows(const char *name, Core core, const std::vector<Tensor> &xs, const Tensor &runs, int64_t dim,
               const std::vector<Tensor> &ys, const std::optional<Tensor> &table, More... more) {
    require(!xs.empty(), name, "no tensors");
    const Place op(name, xs[0]);
    const RowsArgs args(op, xs, runs, dim, ys);
#ifdef RINGTILE_CUDA
    const auto *on_device = op.dense<const rt_run>("table", table, ScalarType::Long, {args.p.num_runs, 4});
    check(core(&args.p, more..., on_device, op.queue()), op.name);
#else
    check(core(&args.p, more..., op.queue()), op.name);
#endif
}

void rows_pack_(const std::vector<Tensor> &xs, const Tensor &runs, int64_t dim, const std::vector<Tensor> &ys,
                const std::optional<Tensor> &table) {
    move_rows("rows_pack_", RT_CORE(rows_pack), xs, runs, dim, ys, table);
}

void rows_unpack_(const std::vector<Tensor> &xs, const Tensor &runs, int64_t dim, const std::vector<Tensor> &ys,
                  const std::optional<Tensor> &table) {
    move_rows("rows_unpack_", RT_CORE(rows_unpack), xs, runs, dim, ys, table);
}

void rows_add_(const std::vector<Tensor> &xs, const Tensor &runs, int64_t dim, const std::vector<Tensor> &ys,
               const std::optional<Tensor> &table) {
    const char *op = "rows_add_";
    const rt_dtype dtype = xs.empty() ? RT_F32 : dtype_of(xs[0], op);
    for (const Tensor &x : xs) Arg{op, "each tensor", x}.dtype(Arg{op, "the first tensor", xs[0]}.scalar_type());
    require(dtype == RT_F32 || dtype == RT_F64, op, "sums are in float32 or float64, got the dtype of 16 bits");
    move_rows(op, RT_CORE(rows_add), xs, runs, dim, ys, table, dtype);
}

// ---- MLP and loss ------------------------------------------------------------------------------

// The params of gate, up and prod (T, F), whose data they set.
struct GluArgs {
    rt_glu_params p = {};
    void *gate, *up, *prod;

    GluArgs(const Op &op, const Tensor &gate_x, const Tensor &up_x, const Tensor &prod_x, int64_t kind) {
        const ScalarType dtype = op.arg("gate", gate_x).dim(2).scalar_type();
        const std::vector<int64_t> sizes = {gate_x.size(0), gate_x.size(1)};
        int64_t stride[3][1];
        p.kind = static_cast<rt_glu_kind>(kind), p.num_rows = sizes[0], p.num_cols = sizes[1];
        gate = op.rows("gate", gate_x, dtype, sizes, stride[0]), p.gate_stride = stride[0][0];
        up = op.rows("up", up_x, dtype, sizes, stride[1]), p.up_stride = stride[1][0];
        prod = op.rows("dprod", prod_x, dtype, sizes, stride[2]), p.prod_stride = stride[2][0];
        p.dtype = dtype_of(gate_x, op.name);
    }
};

Tensor glu_fwd(const Tensor &gate, const Tensor &up, int64_t kind) {
    const Place op("glu_fwd", gate);
    op.arg("gate", gate).dim(2).scalar_type(); // new_empty knows no complex numbers
    Tensor prod = torch::stable::new_empty(gate, {gate.size(0), gate.size(1)});
    const GluArgs args(op, gate, up, prod, kind);
    check(RT_CORE(glu_fwd)(&args.p, args.gate, args.up, args.prod, op.queue()), op.name);
    return prod;
}

void glu_bwd_(Tensor gate, Tensor up, Tensor dprod, int64_t kind) {
    const Place op("glu_bwd_", gate);
    const GluArgs args(op, gate, up, dprod, kind);
    check(RT_CORE(glu_bwd)(&args.p, args.gate, args.up, args.prod, op.queue()), op.name);
}

void cross_entropy_fwd_bwd_(Tensor logits, const Tensor &labels, Tensor loss, Tensor lse, int64_t ignore_index,
                            double label_smoothing, double softcap, double z_loss, bool want_grad) {
    const Place op("cross_entropy_fwd_bwd_", logits);
    op.arg("logits", logits).dim(2).unit_last_stride();
    const int64_t T = logits.size(0);
    const rt_dtype dtype = dtype_of(logits, op.name);
    const auto *labels_data = op.dense<const int64_t>("labels", labels, ScalarType::Long, {T});
    void *loss_data = op.dense("loss", loss, state_dtype(dtype), {T});
    void *lse_data = op.dense("lse", lse, state_dtype(dtype), {T});
    const rt_cross_entropy_params p = {dtype,           T,       logits.size(1), logits.stride(0), ignore_index,
                                       label_smoothing, softcap, z_loss,         want_grad};
    void *logits_data = op.arg("logits", logits).data();
    check(RT_CORE(cross_entropy_fwd_bwd)(&p, logits_data, labels_data, loss_data, lse_data, op.queue()), op.name);
}

} // namespace

// ---- registration ------------------------------------------------------------------------------

STABLE_TORCH_LIBRARY_IMPL(ringtile, RT_DISPATCH_KEY, m) {
    m.impl("attn_fwd_", TORCH_BOX(&attn_fwd_));
    m.impl("attn_bwd_", TORCH_BOX(&attn_bwd_));
    m.impl("attn_delta", TORCH_BOX(&attn_delta));
    m.impl("attn_merge_", TORCH_BOX(&attn_merge_));
    m.impl("rows_pack_", TORCH_BOX(&rows_pack_));
    m.impl("rows_unpack_", TORCH_BOX(&rows_unpack_));
    m.impl("rows_add_", TORCH_BOX(&rows_add_));
    m.impl("glu_fwd", TORCH_BOX(&glu_fwd));
    m.impl("glu_bwd_", TORCH_BOX(&glu_bwd_));
    m.impl("cross_entropy_fwd_bwd_", TORCH_BOX(&cross_entropy_fwd_bwd_));
}

// Importing the module loads the shared object, whose static initializers register the ops above.
static struct PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT, RT_MODULE, nullptr, -1, RT_METHODS, nullptr, nullptr, nullptr, nullptr};
PyMODINIT_FUNC RT_MODULE_INIT(void) {
    PyObject *module = PyModule_Create(&module_def);
    if (module == nullptr || RT_ADD_CONSTANTS(module) == 0) return module;
    Py_DECREF(module);
    return nullptr;
}
