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

// The device of an op: that of its first tensor, made the current device for as long as this object lives.
struct Place {
    const Device device;

#ifdef RINGTILE_CUDA
    const torch::stable::accelerator::DeviceGuard guard;

    Place(const char *op, const Tensor &x) : device(checked(op, x)), guard(device.index()) {}

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
    static int64_t attn_fwd_bytes(const rt_attn_params *p) { return rt_cuda_attn_fwd_workspace_bytes(p); }
    static int64_t attn_bwd_bytes(const rt_attn_params *p) { return rt_cuda_attn_bwd_workspace_bytes(p); }
#else
    Place(const char *op, const Tensor &x) : device(Arg{op, "the first tensor", x}.x.device()) {}

    rt_parallel queue() const { return torch_threads(); }
    int64_t attn_fwd_bytes(const rt_attn_params *p) const {
        return rt_attn_fwd_workspace_bytes(p, queue().num_workers);
    }
    int64_t attn_bwd_bytes(const rt_attn_params *p) const {
        return rt_attn_bwd_workspace_bytes(p, queue().num_workers);
    }
#endif

    // Scratch from torch's allocator, which aligns to 64 bytes.
    Tensor bytes(int64_t count) const { return torch::stable::empty({count}, ScalarType::Byte, std::nullopt, device); }
};

// ---- attention ---------------------------------------------------------------------------------

void set_strides(int64_t (&strides)[3], const Tensor &x) {
    for (int i = 0; i < 3; ++i) strides[i] = x.stride(i);
}

uint32_t word_of(const char *op, const char *name, int64_t value) {
    require(value >= 0 && value <= UINT32_MAX, op, name, " is ", value, ", expected 0 .. 2^32 - 1");
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
    const Tensor &q, &k, &v, &begin, &end, &k_runs;
    double scale, softcap;
    bool fresh;
    DropoutArgs dropout;
    KeyMaskArgs keys;
};

// An int64 (count) tensor that is needed because of something else.
const int64_t *numbers(const char *op, const char *name, const char *because, const Place &place,
                       const std::optional<Tensor> &numbers, int64_t count) {
    require(numbers.has_value(), op, because, " and ", name, " is None, expected a tensor");
    Arg{op, name, *numbers}.on(place.device).dtype(ScalarType::Long).contiguous().sizes({count});
    return Arg{op, name, *numbers}.data<const int64_t>();
}

void set_dropout(rt_attn_params &p, const char *op, const Place &place, const DropoutArgs &in) {
    p.dropout = in.probability;
    p.seed = word_of(op, "seed", in.seed), p.step = word_of(op, "step", in.step);
    p.stream = word_of(op, "stream", in.stream);
    if (p.dropout == 0) return;
    p.dropout_rows = numbers(op, "rows", "dropout is above 0", place, in.rows, p.batch);
    p.q_positions = numbers(op, "positions", "dropout is above 0", place, in.positions, p.num_queries);
}

void set_key_mask(rt_attn_params &p, const char *op, const Place &place, const KeyMaskArgs &in) {
    require(in.begin.has_value() == in.end.has_value(), op, "only one of key_begin and key_end is given");
    if (!in.begin.has_value()) return;
    Arg{op, "key_begin", *in.begin}.on(place.device).dtype(ScalarType::Int).dim(2);
    const int64_t mask_rows = in.begin->size(0);
    Arg{op, "key_begin", *in.begin}.contiguous().sizes({mask_rows == 1 ? 1 : p.batch, p.num_keys});
    Arg{op, "key_end", *in.end}.on(place.device).dtype(ScalarType::Int).contiguous().sizes({mask_rows, p.num_keys});
    p.key_begin = Arg{op, "key_begin", *in.begin}.data<const int32_t>();
    p.key_end = Arg{op, "key_end", *in.end}.data<const int32_t>();
    p.key_mask_batch_stride = mask_rows == 1 ? 0 : p.num_keys;
    p.q_positions = numbers(op, "positions", "there is a key_begin", place, in.positions, p.num_queries);
}

// Their params, from checked tensors.
rt_attn_params attn_params(const char *op, const Place &place, const BlockArgs &in) {
    const Tensor &q = in.q, &k = in.k, &v = in.v;
    Arg{op, "q", q}.dim(4).unit_last_stride();
    Arg{op, "k", k}.on(place.device).dtype(Arg{op, "q", q}.scalar_type()).dim(4).unit_last_stride();
    const int64_t B = q.size(0), N = q.size(1), K = k.size(1), G = k.size(2);
    Arg{op, "k", k}.sizes({B, K, G, q.size(3)});
    Arg{op, "v", v}.on(place.device).dtype(Arg{op, "q", q}.scalar_type()).dim(4).unit_last_stride();
    Arg{op, "v", v}.sizes({B, K, G, v.size(3)});
    Arg{op, "begin", in.begin}.on(place.device).dtype(ScalarType::Int).dim(2);
    const int64_t mask_rows = in.begin.size(0);
    Arg{op, "begin", in.begin}.contiguous().sizes({mask_rows == 1 ? 1 : B, N});
    Arg{op, "end", in.end}.on(place.device).dtype(ScalarType::Int).contiguous().sizes({mask_rows, N});

    rt_attn_params p = {};
    p.dtype = dtype_of(q, op);
    p.batch = B, p.num_queries = N, p.num_keys = K, p.num_heads = q.size(2), p.num_kv_heads = G;
    p.head_dim = q.size(3), p.v_head_dim = v.size(3);
    p.scale = in.scale, p.softcap = in.softcap, p.fresh = in.fresh;
    p.q = Arg{op, "q", q}.data(), p.k = Arg{op, "k", k}.data(), p.v = Arg{op, "v", v}.data();
    set_strides(p.q_stride, q), set_strides(p.k_stride, k), set_strides(p.v_stride, v);
    p.begin = Arg{op, "begin", in.begin}.data<const int32_t>();
    p.end = Arg{op, "end", in.end}.data<const int32_t>();
    p.mask_batch_stride = mask_rows == 1 ? 0 : N;
    std::tie(p.k_runs, p.num_k_runs) = runs_of(in.k_runs, op, "k_runs");
    set_dropout(p, op, place, in.dropout);
    set_key_mask(p, op, place, in.keys);
    return p;
}

// lse (B, H, N) has the state dtype or, so that it is not rounded between calls, float64.
void set_lse(rt_attn_params &p, const char *op, const Place &place, const Tensor &lse) {
    p.lse_f64 = Arg{op, "lse", lse}.scalar_type() == ScalarType::Double;
    Arg{op, "lse", lse}.on(place.device).dtype(p.lse_f64 ? ScalarType::Double : state_dtype(p.dtype)).contiguous();
    Arg{op, "lse", lse}.sizes({p.batch, p.num_heads, p.num_queries});
    p.lse = Arg{op, "lse", lse}.data();
}

// A result that the call finishes, contiguous and of q's dtype; NULL if there is none.
void *rounded_result(const char *op, const char *name, const Place &place, const std::optional<Tensor> &rounded,
                     const Tensor &q, const std::vector<int64_t> &sizes) {
    if (!rounded.has_value()) return nullptr;
    Arg{op, name, *rounded}.on(place.device).dtype(Arg{op, "q", q}.scalar_type()).contiguous().sizes(sizes);
    return Arg{op, name, *rounded}.data();
}

void attn_fwd_(const Tensor &q, const Tensor &k, const Tensor &v, const Tensor &begin, const Tensor &end,
               const Tensor &k_runs, Tensor out, Tensor lse, double scale, double softcap, bool fresh, double dropout,
               int64_t seed, int64_t step, int64_t stream, std::optional<Tensor> rows, std::optional<Tensor> positions,
               std::optional<Tensor> rounded_out, std::optional<Tensor> key_begin, std::optional<Tensor> key_end) {
    const char *op = "attn_fwd_";
    const Place place(op, q);
    rt_attn_params p = attn_params(op, place,
                                   {q,
                                    k,
                                    v,
                                    begin,
                                    end,
                                    k_runs,
                                    scale,
                                    softcap,
                                    fresh,
                                    {dropout, seed, step, stream, rows, positions},
                                    {key_begin, key_end, positions}});
    const ScalarType state = state_dtype(p.dtype);
    Arg{op, "out", out}.on(place.device).dtype(state).sizes({p.batch, p.num_queries, p.num_heads, p.v_head_dim});
    Arg{op, "out", out}.unit_last_stride();
    set_lse(p, op, place, lse);
    p.out = Arg{op, "out", out}.data();
    set_strides(p.out_stride, out);
    p.rounded_out =
        rounded_result(op, "rounded_out", place, rounded_out, q, {p.batch, p.num_queries, p.num_heads, p.v_head_dim});

    p.workspace_bytes = place.attn_fwd_bytes(&p);
    const Tensor workspace = place.bytes(p.workspace_bytes);
    p.workspace = workspace.data_ptr();
    check(RT_CORE(attn_fwd)(&p, place.queue()), op);
}

void attn_bwd_(const Tensor &q, const Tensor &k, const Tensor &v, const Tensor &begin, const Tensor &end,
               const Tensor &k_runs, const Tensor &dout, const Tensor &lse, const Tensor &delta, Tensor dq, Tensor dk,
               Tensor dv, double scale, double softcap, bool fresh, double dropout, int64_t seed, int64_t step,
               int64_t stream, std::optional<Tensor> rows, std::optional<Tensor> positions,
               std::optional<Tensor> rounded_dk, std::optional<Tensor> rounded_dv, std::optional<Tensor> key_begin,
               std::optional<Tensor> key_end) {
    const char *op = "attn_bwd_";
    const Place place(op, q);
    rt_attn_params p = attn_params(op, place,
                                   {q,
                                    k,
                                    v,
                                    begin,
                                    end,
                                    k_runs,
                                    scale,
                                    softcap,
                                    fresh,
                                    {dropout, seed, step, stream, rows, positions},
                                    {key_begin, key_end, positions}});
    const ScalarType state = state_dtype(p.dtype);
    const int64_t B = p.batch, N = p.num_queries, K = p.num_keys, H = p.num_heads, G = p.num_kv_heads;
    Arg{op, "dout", dout}
        .on(place.device)
        .dtype(Arg{op, "q", q}.scalar_type())
        .sizes({B, N, H, p.v_head_dim})
        .unit_last_stride();
    set_lse(p, op, place, lse);
    Arg{op, "delta", delta}.on(place.device).dtype(state).contiguous().sizes({B, H, N});
    Arg{op, "dq", dq}.on(place.device).dtype(state).sizes({B, N, H, p.head_dim}).unit_last_stride();
    Arg{op, "dk", dk}.on(place.device).dtype(state).sizes({B, K, G, p.head_dim}).unit_last_stride();
    Arg{op, "dv", dv}.on(place.device).dtype(state).sizes({B, K, G, p.v_head_dim}).unit_last_stride();
    p.dout = Arg{op, "dout", dout}.data(), p.delta = Arg{op, "delta", delta}.data();
    p.dq = Arg{op, "dq", dq}.data(), p.dk = Arg{op, "dk", dk}.data(), p.dv = Arg{op, "dv", dv}.data();
    set_strides(p.dout_stride, dout), set_strides(p.dq_stride, dq);
    set_strides(p.dk_stride, dk), set_strides(p.dv_stride, dv);
    p.rounded_dk = rounded_result(op, "rounded_dk", place, rounded_dk, q, {B, K, G, p.head_dim});
    p.rounded_dv = rounded_result(op, "rounded_dv", place, rounded_dv, q, {B, K, G, p.v_head_dim});

    p.workspace_bytes = place.attn_bwd_bytes(&p);
    const Tensor workspace = place.bytes(p.workspace_bytes);
    p.workspace = workspace.data_ptr();
    check(RT_CORE(attn_bwd)(&p, place.queue()), op);
}

Tensor attn_delta(const Tensor &dout, const Tensor &out, const Tensor &dlse) {
    const char *op = "attn_delta";
    const Place place(op, dout);
    Arg{op, "dout", dout}.dim(4).unit_last_stride();
    const int64_t B = dout.size(0), N = dout.size(1), H = dout.size(2);
    Arg{op, "out", out}.on(place.device).dtype(Arg{op, "dout", dout}.scalar_type()).sizes({B, N, H, dout.size(3)});
    Arg{op, "out", out}.unit_last_stride();
    Arg{op, "dlse", dlse}.on(place.device).dtype(ScalarType::Double).contiguous().sizes({B, H, N});

    rt_attn_delta_params p = {dtype_of(dout, op), B, N, H, dout.size(3), {}, {}};
    set_strides(p.dout_stride, dout), set_strides(p.out_stride, out);
    const Tensor delta = torch::stable::new_empty(dlse, {B, H, N}, state_dtype(p.dtype));
    if (delta.numel() == 0) return delta; // the core takes no stride of 0, as an empty tensor may have
    check(RT_CORE(attn_delta)(&p, Arg{op, "dout", dout}.data(), Arg{op, "out", out}.data(),
                              Arg{op, "dlse", dlse}.data<const double>(), delta.data_ptr(), place.queue()),
          op);
    return delta;
}

void attn_merge_(const Tensor &part, const Tensor &part_lse, Tensor out, Tensor lse, bool fresh, int64_t first_row,
                 std::optional<Tensor> rows, std::optional<Tensor> rounded) {
    const char *op = "attn_merge_";
    const Place place(op, part);
    rt_attn_merge_params p = {};
    p.dtype = dtype_of(part, op);
    const ScalarType state = state_dtype(p.dtype);
    Arg{op, "part", part}.dim(4).unit_last_stride();
    const int64_t P = part.size(0), M = part.size(1), H = part.size(2), Dv = part.size(3);
    Arg{op, "part_lse", part_lse}.on(place.device).dtype(state).contiguous().sizes({P, H, M});
    const int64_t B = Arg{op, "out", out}.on(place.device).dtype(state).dim(4).contiguous().x.size(0), N = out.size(1);
    Arg{op, "out", out}.sizes({B, N, H, Dv});
    Arg{op, "lse", lse}.on(place.device).dtype(ScalarType::Double).contiguous().sizes({B, H, N});
    p.rounded = rounded_result(op, "rounded", place, rounded, part, {B, N, H, Dv});
    if (rows.has_value()) p.rows = numbers(op, "rows", "rows are given", place, rows, P * M);
    if (part.numel() == 0) return; // the core takes no stride of 0, as an empty tensor may have
    p.batch = B, p.num_queries = N, p.num_heads = H, p.v_head_dim = Dv, p.part_batch = P, p.part_queries = M;
    set_strides(p.part_stride, part);
    p.first_row = first_row, p.fresh = fresh;
    p.part = Arg{op, "part", part}.data(), p.part_lse = Arg{op, "part_lse", part_lse}.data();
    p.out = Arg{op, "out", out}.data(), p.lse = Arg{op, "lse", lse}.data<double>();
    check(RT_CORE(attn_merge)(&p, place.queue()), op);
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

    RowsArgs(const char *op, const Place &place, const std::vector<Tensor> &xs, const Tensor &runs, int64_t dim,
             const std::vector<Tensor> &ys)
        : numbers(xs.size()) {
        require(xs.size() == ys.size(), op, xs.size(), " tensors and ", ys.size(), " of their rows, expected as many");
        require(xs.size() <= RT_MAX_ROWS_TENSORS, op, xs.size(), " tensors, expected at most ", RT_MAX_ROWS_TENSORS);
        for (size_t i = 0; i < xs.size(); ++i) {
            const Arg global = {op, "global tensor", xs[i]}, local = {op, "local tensor", ys[i]};
            const int64_t ndim = xs[i].dim();
            local.on(place.device).dtype(global.on(place.device).scalar_type()).dim(ndim);
            require(dim >= 0 && dim < ndim, op, "dim ", dim, " is not a dimension of shape ", Shape{xs[i]});
            require(ndim <= RT_MAX_DIMS, op, ndim, " dimensions, expected at most ", RT_MAX_DIMS);
            auto &[sizes, global_strides, local_strides] = numbers[i];
            for (int64_t d = 0; d < ndim; ++d) {
                require(d == dim || xs[i].size(d) == ys[i].size(d), op, "global shape ", Shape{xs[i]},
                        " and local shape ", Shape{ys[i]}, " may differ in dim ", dim, " only");
                sizes[d] = ys[i].size(d), global_strides[d] = xs[i].stride(d), local_strides[d] = ys[i].stride(d);
            }
            tensors.push_back({ndim, dim, static_cast<int64_t>(xs[i].element_size()), sizes, xs[i].size(dim),
                               global_strides, local_strides, global.data(), local.data()});
        }
        p.num_tensors = static_cast<int64_t>(tensors.size()), p.tensors = tensors.data();
        std::tie(p.runs, p.num_runs) = runs_of(runs, op, "runs");
    }
};

// Calls the core; more: what an addition takes besides.
template <class Core, class... More>
void move_rows(const char *op, Core core, const std::vector<Tensor> &xs, const Tensor &runs, int64_t dim,
               const std::vector<Tensor> &ys, const std::optional<Tensor> &table, More... more) {
    require(!xs.empty(), op, "no tensors");
    const Place place(op, xs[0]);
    const RowsArgs args(op, place, xs, runs, dim, ys);
#ifdef RINGTILE_CUDA
    const rt_run *on_device = nullptr;
    if (table.has_value()) {
        const Arg arg = {op, "table", *table};
        arg.on(place.device).dtype(ScalarType::Long).contiguous().sizes({args.p.num_runs, 4});
        on_device = arg.data<const rt_run>();
    }
    check(core(&args.p, more..., on_device, place.queue()), op);
#else
    check(core(&args.p, more..., place.queue()), op);
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

rt_glu_params glu_params(const char *op, const Place &place, const Tensor &gate, const Tensor &up, const Tensor &prod,
                         int64_t kind) {
    Arg{op, "gate", gate}.dim(2).unit_last_stride();
    const std::vector<int64_t> expected = {gate.size(0), gate.size(1)};
    Arg{op, "up", up}.on(place.device).dtype(Arg{op, "gate", gate}.scalar_type()).sizes(expected).unit_last_stride();
    Arg{op, "dprod", prod}
        .on(place.device)
        .dtype(Arg{op, "gate", gate}.scalar_type())
        .sizes(expected)
        .unit_last_stride();
    return {
        dtype_of(gate, op), static_cast<rt_glu_kind>(kind), gate.size(0), gate.size(1), gate.stride(0), up.stride(0),
        prod.stride(0)};
}

Tensor glu_fwd(const Tensor &gate, const Tensor &up, int64_t kind) {
    const Place place("glu_fwd", gate);
    Arg{"glu_fwd", "gate", gate}.dim(2).scalar_type(); // new_empty knows no complex numbers
    Tensor prod = torch::stable::new_empty(gate, {gate.size(0), gate.size(1)});
    const rt_glu_params p = glu_params("glu_fwd", place, gate, up, prod, kind);
    const void *gate_data = Arg{"glu_fwd", "gate", gate}.data(), *up_data = Arg{"glu_fwd", "up", up}.data();
    check(RT_CORE(glu_fwd)(&p, gate_data, up_data, prod.data_ptr(), place.queue()), "glu_fwd");
    return prod;
}

void glu_bwd_(Tensor gate, Tensor up, Tensor dprod, int64_t kind) {
    const Place place("glu_bwd_", gate);
    const char *op = "glu_bwd_";
    const rt_glu_params p = glu_params(op, place, gate, up, dprod, kind);
    check(RT_CORE(glu_bwd)(&p, Arg{op, "gate", gate}.data(), Arg{op, "up", up}.data(), Arg{op, "dprod", dprod}.data(),
                           place.queue()),
          op);
}

void cross_entropy_fwd_bwd_(Tensor logits, const Tensor &labels, Tensor loss, Tensor lse, int64_t ignore_index,
                            double label_smoothing, double softcap, double z_loss, bool want_grad) {
    const char *op = "cross_entropy_fwd_bwd_";
    const Place place(op, logits);
    Arg{op, "logits", logits}.dim(2).unit_last_stride();
    const int64_t T = logits.size(0);
    const rt_dtype dtype = dtype_of(logits, op);
    Arg{op, "labels", labels}.on(place.device).dtype(ScalarType::Long).contiguous().sizes({T});
    Arg{op, "loss", loss}.on(place.device).dtype(state_dtype(dtype)).contiguous().sizes({T});
    Arg{op, "lse", lse}.on(place.device).dtype(state_dtype(dtype)).contiguous().sizes({T});
    const rt_cross_entropy_params p = {dtype,           T,       logits.size(1), logits.stride(0), ignore_index,
                                       label_smoothing, softcap, z_loss,         want_grad};
    check(RT_CORE(cross_entropy_fwd_bwd)(&p, Arg{op, "logits", logits}.data(),
                                         Arg{op, "labels", labels}.data<const int64_t>(), Arg{op, "loss", loss}.data(),
                                         Arg{op, "lse", lse}.data(), place.queue()),
          op);
}

// ---- dropout -----------------------------------------------------------------------------------

Tensor dropout(const Tensor &x, const Tensor &places, double p, int64_t seed, int64_t step, int64_t stream) {
    const char *op = "dropout";
    const Place place(op, x);
    const rt_dtype dtype = dtype_of(x, op); // new_empty knows no complex numbers
    Arg{op, "x", x}.dim(2).unit_last_stride();
    Arg{op, "places", places}.on(place.device).dtype(ScalarType::Long).contiguous().sizes({x.size(0), 2});
    Tensor y = torch::stable::new_empty(x, {x.size(0), x.size(1)});
    const rt_dropout_params params = {dtype,
                                      x.size(0),
                                      x.size(1),
                                      x.stride(0),
                                      p,
                                      word_of(op, "seed", seed),
                                      word_of(op, "step", step),
                                      word_of(op, "stream", stream)};
    check(RT_CORE(dropout)(&params, Arg{op, "x", x}.data(), Arg{op, "places", places}.data<const int64_t>(),
                           y.data_ptr(), place.queue()),
          op);
    return y;
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
    m.impl("dropout", TORCH_BOX(&dropout));
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
