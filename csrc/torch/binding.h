// Helpers of the bindings: checks of tensors whose errors name the op, the argument, got and expected.
#ifndef RINGTILE_BINDING_H
#define RINGTILE_BINDING_H

#include "../ringtile.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <optional>
#include <sstream>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

namespace ringtile {

using torch::headeronly::ScalarType;
using torch::stable::Device;
using torch::stable::Tensor;

// ---- status ------------------------------------------------------------------------------------

// Throws std::runtime_error, a RuntimeError in Python, with the sentence that `parts` form.
template <class... Parts> void require(bool holds, const char *op, const Parts &...parts) {
    if (holds) return;
    std::ostringstream text;
    text << "ringtile." << op << ": ";
    (text << ... << parts);
    throw std::runtime_error(text.str());
}

inline void check(rt_status status, const char *op) {
    if (status == RT_OK) return;
#ifdef RINGTILE_CUDA
    require(status != RT_CUDA, op, rt_status_message(status), ": ", rt_cuda_last_error());
#endif
    const char *const name = rt_wrong_argument(status, 0), *const other = rt_wrong_argument(status, 1);
    require(false, op, name, *other ? " and " : "", other, *name ? ": " : "", rt_status_message(status));
}

// ---- threads -----------------------------------------------------------------------------------

// Runs the core's workers on torch's own thread pool, so that torch.set_num_threads applies.
inline void run_on_torch(void *, int64_t num_workers, void (*work)(void *, int64_t), void *ctx) {
    torch::stable::parallel_for(0, num_workers, 1, [&](int64_t begin, int64_t end) {
        for (int64_t worker = begin; worker < end; ++worker) work(ctx, worker);
    });
}

inline rt_parallel torch_threads() {
    return {run_on_torch, nullptr, static_cast<int64_t>(torch::stable::get_num_threads())};
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

// A named argument of an op.
struct Arg {
    const char *op, *name;
    const Tensor &x;

    // Python's None arrives as an undefined tensor, which has no dtype and no shape to ask for.
    Arg(const char *op, const char *name, const Tensor &x) : op(op), name(name), x(x) {
        require(x.defined(), op, name, " is None, expected a tensor");
    }
    const Arg &on_cpu() const {
        require(x.is_cpu(), op, name, " must be a CPU tensor; move it with .cpu()");
        return *this;
    }
    const Arg &on(const Device &device) const {
        require(device.is_cpu() ? x.is_cpu() : x.device() == device, op, name,
                " is not on the device of the op's first tensor; move all tensors to one device");
        return *this;
    }
    const Arg &dtype(ScalarType expected) const {
        const ScalarType found = scalar_type();
        require(found == expected, op, name, " has dtype ", found, ", expected ", expected);
        return *this;
    }
    ScalarType scalar_type() const {
        try {
            return x.scalar_type();
        } catch (const std::exception &) { // the stable interface knows no complex numbers
            require(false, op, name, " has a dtype that no op takes");
        }
        return ScalarType::Float; // not reached
    }
    const Arg &dim(int64_t expected) const {
        require(x.dim() == expected, op, name, " has shape ", Shape{x}, ", expected ", expected, " dimensions");
        return *this;
    }
    const Arg &sizes(const std::vector<int64_t> &expected) const {
        dim(static_cast<int64_t>(expected.size()));
        for (size_t i = 0; i < expected.size(); ++i)
            require(x.size(i) == expected[i], op, name, " has shape ", Shape{x}, ", expected size ", expected[i],
                    " in dim ", i);
        return *this;
    }
    const Arg &unit_last_stride() const {
        const int64_t last = x.dim() - 1;
        require(x.size(last) <= 1 || x.stride(last) == 1 || x.numel() == 0, op, name, " has stride ", x.stride(last),
                " in its last dim, expected 1; call .contiguous()");
        return *this;
    }
    const Arg &contiguous() const {
        require(x.is_contiguous(), op, name, " must be contiguous; call .contiguous()");
        return *this;
    }
    // The first element. A storage can be smaller than the shape says: FSDP frees storages and keeps the tensors.
    template <class T = void> T *data() const {
        int64_t last = x.storage_offset(), stored_bytes = 0;
        for (int64_t i = 0; i < x.dim(); ++i) last += (x.size(i) - 1) * x.stride(i);
        TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(x.get(), &stored_bytes));
        const int64_t needed_bytes = (last + 1) * static_cast<int64_t>(x.element_size());
        require(x.numel() == 0 || needed_bytes <= stored_bytes, op, name, " needs ", needed_bytes,
                " bytes but its storage has ", stored_bytes, ": it was freed or resized");
        return static_cast<T *>(x.data_ptr());
    }
};

inline rt_dtype dtype_of(const Tensor &x, const char *op) {
    switch (Arg{op, "the first tensor", x}.scalar_type()) {
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
    require(false, op, "dtype ", x.scalar_type(), " is not supported, expected float64, float32, bfloat16 or float16");
    return RT_F32; // not reached
}

inline ScalarType state_dtype(rt_dtype dtype) { return dtype == RT_F64 ? ScalarType::Double : ScalarType::Float; }

// An op, and the device of its tensors.
struct Op {
    const char *const name;
    const Device device;

    explicit Op(const char *name, Device device = Device(torch::headeronly::DeviceType::CPU))
        : name(name), device(device) {}

    Arg arg(const char *argument, const Tensor &x) const { return Arg{name, argument, x}.on(device); }

    // The first element of a contiguous tensor; NULL if there is none.
    template <class T = void>
    T *dense(const char *argument, const Tensor &x, ScalarType dtype, const std::vector<int64_t> &sizes) const {
        return arg(argument, x).dtype(dtype).contiguous().sizes(sizes).template data<T>();
    }
    template <class T = void>
    T *dense(const char *argument, const std::optional<Tensor> &x, ScalarType dtype,
             const std::vector<int64_t> &sizes) const {
        return x.has_value() ? dense<T>(argument, *x, dtype, sizes) : nullptr;
    }
    // The first element of a tensor whose last dim has stride 1, and the strides of its other dims.
    template <int n>
    void *rows(const char *argument, const Tensor &x, ScalarType dtype, const std::vector<int64_t> &sizes,
               int64_t (&strides)[n]) const {
        const Arg rows = arg(argument, x).dtype(dtype).sizes(sizes).unit_last_stride();
        for (int i = 0; i < n; ++i) strides[i] = x.stride(i);
        return rows.data();
    }
    // The first element of int32 (B or 1, N), and the batch stride.
    const int32_t *mask(const char *argument, const Tensor &x, int64_t B, int64_t N, int64_t &batch_stride) const {
        const bool shared = arg(argument, x).dim(2).x.size(0) == 1;
        batch_stride = shared ? 0 : N;
        return dense<const int32_t>(argument, x, ScalarType::Int, {shared ? 1 : B, N});
    }
};

// A (R, 4) tensor of runs, read in place.
inline std::pair<const rt_run *, int64_t> runs_of(const Tensor &runs, const char *op, const char *name) {
    static_assert(sizeof(rt_run) == 4 * sizeof(int64_t), "a run is one row of the tensor");
    const Arg arg = {op, name, runs};
    arg.on_cpu().dtype(ScalarType::Long).dim(2).contiguous().sizes({runs.size(0), 4});
    return {arg.data<const rt_run>(), runs.size(0)};
}

} // namespace ringtile

#endif // RINGTILE_BINDING_H
