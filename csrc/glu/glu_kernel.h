// The gated MLP, compiled once per instruction set for its math type (vec.h).
//
// Every sigmoid and every tail of the normal distribution comes from exp of a number <= 0, never from 1 minus a number
// near 1: nothing overflows, and small results keep their relative accuracy.

#include "../chunk.h"
#include "../isa/kernels.h"
#include "../sigmoid.h"

// Phi(-t) of the normal distribution for t >= 0, given bell = exp(-t^2 / 2).
static inline vec normal_tail(vec t, vec bell) {
#if RT_REAL_BITS == 64
    (void)bell;
    for (int i = 0; i < LANES; i++) t[i] = 0.5 * erfc(t[i] * 0.70710678118654752440);
    return t;
#else
    // Phi(-t) / bell is approximated by a polynomial in w = 1 / (1 + t / 4) without constant term, interpolated at the
    // Chebyshev nodes of 0 <= t <= 15; beyond, bell is 0. Relative error 1.4e-8.
    const vec w = 1 / (1 + t * 0.25f);
    vec p = vec_set(1.60714734e-2f);
    p = p * w - 6.02258529e-2f;
    p = p * w + 4.61199372e-2f;
    p = p * w + 3.50751543e-2f;
    p = p * w + 7.86620334e-3f;
    p = p * w + 8.88593596e-2f;
    p = p * w + 7.13885712e-2f;
    p = p * w + 9.56115754e-2f;
    p = p * w + 9.94855684e-2f;
    p = p * w + 9.97480127e-2f;
    return bell * (p * w);
#endif
}

// act = x Phi(x), act' = Phi(x) + x phi(x), with the normal density phi = exp(-x^2 / 2) / sqrt(2 pi).
static inline activation gelu(vec x) {
    const vec bell = vec_exp(x * x * (real)-0.5), tail = normal_tail(vec_abs(x), bell);
    const vec cdf = vec_select(x < 0, tail, 1 - tail);
    return (activation){x * cdf, cdf + x * bell * (real)0.39894228040143267794};
}

// x (1 + tanh(y)) / 2 = x sigmoid(2 y), and 2 y = z = c (x + 0.044715 x^3) with c = 2 sqrt(2 / pi). Beyond |x| = 22 the
// sigmoid is 0 or 1 to the last bit, so z is clamped there and x^3 cannot overflow.
static inline activation gelu_tanh(vec x) {
    const real c = (real)1.5957691216057307117, cubic = (real)(0.044715 * 1.5957691216057307117);
    const vec near = vec_select(x > 22, vec_set(22), vec_select(x < -22, vec_set(-22), x)), square = near * near;
    return sigmoid_gate(x, near * (c + cubic * square), c + 3 * cubic * square);
}

static inline activation relu(vec x) {
    return (activation){vec_select(x < 0, vec_set(0), x), vec_select(x <= 0, vec_set(0), vec_set(1))};
}

static inline __attribute__((always_inline)) activation activate(rt_glu_kind kind, vec x) {
    switch (kind) {
    case RT_GLU_SILU:
        return sigmoid_gate(x, x, vec_set(1));
    case RT_GLU_GELU:
        return gelu(x);
    case RT_GLU_GELU_TANH:
        return gelu_tanh(x);
    default:
        return relu(x);
    }
}

// prod = act(gate) * up, and with dprod also
// dgate = dprod * up * act'(gate), dup = dprod * act(gate), written over gate and up.
static inline __attribute__((always_inline)) void glu_loop(rt_glu_kind kind, int64_t num_elements, real *gate, real *up,
                                                           const real *dprod, real *prod) {
    for (int64_t i = 0; i < num_elements; i += LANES) {
        const activation act = activate(kind, vec_load(gate + i));
        const vec u = vec_load(up + i);
        if (dprod != NULL) {
            const vec dy = vec_load(dprod + i);
            vec_store(gate + i, dy * u * act.slope);
            vec_store(up + i, dy * act.value);
        }
        vec_store(prod + i, act.value * u);
    }
}

// A loop of its own for each kind and direction, so that no loop branches inside.
static void glu_chunk(rt_glu_kind kind, int64_t num_elements, real *gate, real *up, const real *dprod, real *prod) {
#define RT_GLU_CASE(name)                                                                                              \
    case name:                                                                                                         \
        if (dprod == NULL)                                                                                             \
            glu_loop(name, num_elements, gate, up, NULL, prod);                                                        \
        else                                                                                                           \
            glu_loop(name, num_elements, gate, up, dprod, prod);                                                       \
        break;
    switch (kind) {
        RT_GLU_CASE(RT_GLU_SILU)
        RT_GLU_CASE(RT_GLU_GELU)
        RT_GLU_CASE(RT_GLU_GELU_TANH)
        RT_GLU_CASE(RT_GLU_RELU)
    }
#undef RT_GLU_CASE
}

static void glu(const rt_glu_params *p, const rt_glu_arrays *arrays, int64_t first_row, int64_t last_row) {
    real gate[CHUNK], up[CHUNK], dprod[CHUNK], prod[CHUNK];
    const bool backward = arrays->dprod != NULL;
    for (int64_t row = first_row; row < last_row; row++) {
        for (int64_t col = 0; col < p->num_cols; col += CHUNK) {
            const int64_t count = p->num_cols - col < CHUNK ? p->num_cols - col : CHUNK;
            const int64_t gate_at = row * p->gate_stride + col, up_at = row * p->up_stride + col;
            const int64_t prod_at = row * p->prod_stride + col;
            load_chunk(p->dtype, arrays->gate, gate_at, count, gate);
            load_chunk(p->dtype, arrays->up, up_at, count, up);
            if (backward) load_chunk(p->dtype, arrays->dprod, prod_at, count, dprod);
            glu_chunk(p->kind, count, gate, up, backward ? dprod : NULL, prod);
            if (backward) store_chunk(p->dtype, arrays->dgate, gate_at, count, gate);
            if (backward) store_chunk(p->dtype, arrays->dup, up_at, count, up);
            store_chunk(p->dtype, arrays->prod, prod_at, count, prod);
        }
    }
}
