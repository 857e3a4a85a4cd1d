// The pointwise part of the gated MLP. A thread processes 16 bytes of a row if alignment allows, else one element; a
// grid of (parts of a row, rows) takes no division. The forward reads 2 numbers and writes 1, the backward reads 3 and
// writes 3, with some 30 flops each: memory-bound. No shared memory. Small sigmoids and normal tails are computed from
// exp and erfc directly, never as 1 minus a number near 1.
#include "../csrc/glu/glu.h"
#include "device/elements.cuh"
#include "ringtile_cuda.h"

#include <math.h>

namespace {

constexpr int THREADS = 256;

struct glu_params {
    rt_glu_kind kind;
    int64_t num_rows, num_cols;
    int64_t gate_stride, up_stride, prod_stride; // elements between rows
    const void *gate, *up, *dprod;
    void *dgate, *dup, *prod; // in the backward the same arrays as gate, up and dprod
};

template <class R> struct activation {
    R value, slope;
};

// act = x sigmoid(z), act' = sigmoid(z) + x sigmoid(z) sigmoid(-z) dz.
template <class R> RT_DEVICE activation<R> sigmoid_gate(R x, R z, R dz) {
    const R e = exp(-fabs(z)), large = 1 / (1 + e), small = e * large; // sigmoid(|z|), sigmoid(-|z|)
    const R sigmoid = z < 0 ? small : large, other = z < 0 ? large : small;
    const R value = x * sigmoid;
    return {value, sigmoid + value * other * dz};
}

// act = x Phi(x), act' = Phi(x) + x phi(x), with the normal density phi = exp(-x^2 / 2) / sqrt(2 pi).
template <class R> RT_DEVICE activation<R> gelu(R x) {
    const R cdf = R(0.5) * erfc(x * R(-0.70710678118654752440));
    return {x * cdf, cdf + x * exp(x * x * R(-0.5)) * R(0.39894228040143267794)};
}

// x (1 + tanh(y)) / 2 = x sigmoid(2 y), and 2 y = z = c (x + 0.044715 x^3) with c = 2 sqrt(2 / pi). x is clamped at
// |x| = 22, beyond which the sigmoid is 0 or 1 to the last bit, so that x^3 cannot overflow.
template <class R> RT_DEVICE activation<R> gelu_tanh(R x) {
    const R c = R(1.5957691216057307117), cubic = R(0.044715 * 1.5957691216057307117);
    const R near = x > 22 ? R(22) : x < -22 ? R(-22) : x, square = near * near;
    return sigmoid_gate(x, near * (c + cubic * square), c + 3 * cubic * square);
}

template <class R> RT_DEVICE activation<R> activate(rt_glu_kind kind, R x) {
    switch (kind) {
    case RT_GLU_SILU:
        return sigmoid_gate(x, x, R(1));
    case RT_GLU_GELU:
        return gelu(x);
    case RT_GLU_GELU_TANH:
        return gelu_tanh(x);
    default:
        return {x < 0 ? R(0) : x, x <= 0 ? R(0) : R(1)};
    }
}

// prod = act(gate) * up; the backward also computes dgate = dprod * up * act'(gate), dup = dprod * act(gate).
template <class T, int count, bool backward> RT_KERNEL(THREADS) glu(RT_PARAMS glu_params p) {
    using pack = pack_of<T, count>;
    using R = real<T>;
    const int64_t col = first_item(num_threads()) * count;
    if (col >= p.num_cols) return;
    for (int64_t row = cta_index_y(); row < p.num_rows; row += num_ctas_y()) {
        const int64_t gate_at = row * p.gate_stride + col, up_at = row * p.up_stride + col;
        const int64_t prod_at = row * p.prod_stride + col;
        pack gate = ld_global((const pack *)((const T *)p.gate + gate_at));
        pack up = ld_global((const pack *)((const T *)p.up + up_at));
        pack prod = {};
        if constexpr (backward) prod = ld_global((const pack *)((const T *)p.dprod + prod_at));
        for (int j = 0; j < count; j++) {
            const activation<R> act = activate<R>(p.kind, widen(gate.element[j]));
            const R u = widen(up.element[j]);
            if constexpr (backward) {
                const R dy = widen(prod.element[j]);
                gate.element[j] = rounded<T>(dy * u * act.slope);
                up.element[j] = rounded<T>(dy * act.value);
            }
            prod.element[j] = rounded<T>(act.value * u);
        }
        if constexpr (backward) {
            st_global((pack *)((T *)p.dgate + gate_at), gate);
            st_global((pack *)((T *)p.dup + up_at), up);
        }
        st_global((pack *)((T *)p.prod + prod_at), prod);
    }
}

template <bool backward>
rt_status run_glu(const rt_glu_params *p, const void *gate, const void *up, glu_params arrays, void *stream) {
    const rt_status status = rt_glu_check(p, gate, up, arrays.prod, backward);
    if (status != RT_OK || p->num_rows == 0 || p->num_cols == 0) return status;
    arrays.kind = p->kind;
    arrays.num_rows = p->num_rows, arrays.num_cols = p->num_cols;
    arrays.gate = gate, arrays.up = up;
    arrays.gate_stride = p->gate_stride, arrays.up_stride = p->up_stride, arrays.prod_stride = p->prod_stride;
    return for_dtype(p->dtype, [&](auto element) {
        using T = decltype(element);
        const int64_t steps = p->num_cols | p->gate_stride | p->up_stride | p->prod_stride;
        const bool packed =
            steps % PACK<T> == 0 && is_aligned(gate, 16) && is_aligned(up, 16) && is_aligned(arrays.prod, 16);
        const int64_t packs = packed ? p->num_cols / PACK<T> : p->num_cols; // of a row
        const int threads = packs < THREADS ? ((int)packs + 31) / 32 * 32 : THREADS;
        const grid_size grid = {(packs + threads - 1) / threads, p->num_rows < UINT16_MAX ? p->num_rows : UINT16_MAX};
        const auto kernel = packed ? glu<T, PACK<T>, backward> : glu<T, 1, backward>;
        return launch(kernel, grid, threads, 0, stream, arrays);
    });
}

} // namespace

rt_status rt_cuda_glu_fwd(const rt_glu_params *p, const void *gate, const void *up, void *prod, void *stream) {
    glu_params arrays = {};
    arrays.prod = prod;
    return run_glu<false>(p, gate, up, arrays, stream);
}

rt_status rt_cuda_glu_bwd(const rt_glu_params *p, void *gate, void *up, void *dprod, void *stream) {
    glu_params arrays = {};
    arrays.dgate = gate, arrays.dup = up, arrays.dprod = arrays.prod = dprod;
    return run_glu<true>(p, gate, up, arrays, stream);
}
