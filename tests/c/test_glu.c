// GLU forward and backward against the formulas in long double, for every kind, dtype, tail and special value.
#include "check.h"

enum { NUM_KINDS = 4 };

typedef struct activation {
    long double value, slope;
    long double slope_terms;  // sum of the absolute values of slope's terms
    long double exponent, dz; // z of the inner exp(-z) and its derivative; 0 and 1 if there is no exp
} activation;

// act and act' in textbook form; erfc and the sigmoid of -z keep the tails exact.
static activation oracle_activation(rt_glu_kind kind, long double x) {
    const long double pi = 3.14159265358979323846264338327950288L;
    if (kind == RT_GLU_RELU) {
        const long double slope = !(x <= 0);
        return (activation){x < 0 ? 0 : x, slope, slope, 0, 1};
    }
    if (kind == RT_GLU_GELU) {
        const long double cdf = erfcl(-x / sqrtl(2)) / 2, pdf = expl(-x * x / 2) / sqrtl(2 * pi);
        return (activation){x * cdf, cdf + x * pdf, cdf + fabsl(x) * pdf, x * x / 2, 1};
    }
    long double z = x, dz = 1;
    if (kind == RT_GLU_GELU_TANH) {
        // (1 + tanh(y)) / 2 is sigmoid(2 y).
        const long double c = 2 * sqrtl(2 / pi);
        z = c * (x + 0.044715L * x * x * x);
        dz = c * (1 + 3 * 0.044715L * x * x);
    }
    const long double sigmoid = 1 / (1 + expl(-z)), other = 1 / (1 + expl(z));
    const long double rest = x * sigmoid * other * dz;
    return (activation){x * sigmoid, sigmoid + rest, sigmoid + fabsl(rest), fabsl(z), dz};
}

static void test_oracle_slope_is_the_slope_of_the_oracle(void) {
    uint64_t state = 1;
    for (int i = 0; i < 400; i++) {
        const rt_glu_kind kind = (rt_glu_kind)(i % NUM_KINDS);
        const long double x = 6 * random_unit(&state), h = 1e-6L;
        const long double slope =
            (oracle_activation(kind, x + h).value - oracle_activation(kind, x - h).value) / (2 * h);
        CHECK_CLOSE((double)oracle_activation(kind, x).slope, (double)slope, 1e-11); // h^2 / 6 * max |act'''|
    }
}

// Rows lie `stride` apart; nothing may write to the padding between them.
typedef struct matrix {
    rt_dtype dtype;
    int64_t num_rows, num_cols, stride;
    void *data;
} matrix;

static const double PADDING = 77;

static matrix new_matrix(rt_dtype dtype, int64_t num_rows, int64_t num_cols, int64_t stride) {
    const int64_t num_elements = num_rows > 0 ? (num_rows - 1) * stride + num_cols : 0;
    matrix m = {dtype, num_rows, num_cols, stride, must_alloc((size_t)num_elements * dtype_bytes(dtype))};
    for (int64_t i = 0; i < num_elements; i++) store_element(dtype, m.data, i, PADDING);
    return m;
}

static double get(const matrix *m, int64_t row, int64_t col) {
    return load_element(m->dtype, m->data, row * m->stride + col);
}

static void set(matrix *m, int64_t row, int64_t col, double value) {
    store_element(m->dtype, m->data, row * m->stride + col, value);
}

static matrix copy_matrix(const matrix *m) {
    matrix copy = new_matrix(m->dtype, m->num_rows, m->num_cols, m->stride);
    for (int64_t row = 0; row < m->num_rows; row++)
        for (int64_t col = 0; col < m->num_cols; col++) set(&copy, row, col, get(m, row, col));
    return copy;
}

static bool padding_is_intact(const matrix *m) {
    for (int64_t row = 0; row + 1 < m->num_rows; row++)
        for (int64_t col = m->num_cols; col < m->stride; col++)
            if (get(m, row, col) != PADDING) return false;
    return true;
}

// Bound on the error of a result factor * act(x) or factor * act'(x) whose terms have absolute values that add up to
// `magnitude`; u is the roundoff of the arithmetic.
//   rounding to dtype   u(dtype) |want|
//   arithmetic          at most 10 roundings, an exp of 2 ulp and the erfcx polynomial (5 u), and a slope meets
//                       them twice: 25 u magnitude
//   argument of exp     z is rounded 4 times, so exp(-z) is off by 4 u z exp(-z), times at most
//                       (1 + |x|) (1 + dz) factor
//   underflow           exp may flush subnormal results to 0
static double tolerance(rt_dtype dtype, activation act, double x, double factor, double want, double magnitude) {
    const double u = unit_roundoff(dtype == RT_F64 ? RT_F64 : RT_F32);
    const double least_exp = dtype == RT_F64 ? 0x1p-1022 : 0x1p-126;
    const double z = (double)act.exponent, amplified = (1 + fabs(x)) * (1 + (double)act.dz) * fabs(factor);
    return unit_roundoff(dtype) * fabs(want) + smallest(dtype) + 25 * u * magnitude +
           amplified * (4 * u * z * exp(-z) + least_exp);
}

// An infinity if the value overflows the dtype, else the value itself.
static double in_range_of(rt_dtype dtype, double value) {
    uint8_t cell[8];
    store_element(dtype, cell, 0, value);
    const double stored = load_element(dtype, cell, 0);
    return isinf(stored) ? stored : value;
}

static void check_close(const matrix *m, int64_t row, int64_t col, activation act, double x, double factor,
                        long double want, long double magnitude) {
    CHECK_CLOSE(get(m, row, col), in_range_of(m->dtype, (double)want),
                tolerance(m->dtype, act, x, factor, (double)want, (double)magnitude));
}

static void check_results(rt_glu_kind kind, const matrix *gate, const matrix *up, const matrix *dprod,
                          rt_parallel parallel) {
    const rt_dtype dtype = gate->dtype;
    matrix prod = new_matrix(dtype, gate->num_rows, gate->num_cols, dprod->stride);
    matrix dgate = copy_matrix(gate), dup = copy_matrix(up), again = copy_matrix(dprod);
    const rt_glu_params p = {dtype, kind, gate->num_rows, gate->num_cols, gate->stride, up->stride, dprod->stride};
    CHECK_STATUS(rt_glu_fwd(&p, gate->data, up->data, prod.data, parallel), RT_OK);
    CHECK_STATUS(rt_glu_bwd(&p, dgate.data, dup.data, again.data, parallel), RT_OK);

    for (int64_t row = 0; row < gate->num_rows; row++) {
        for (int64_t col = 0; col < gate->num_cols; col++) {
            const double x = get(gate, row, col), y = get(up, row, col), dy = get(dprod, row, col);
            const activation act = oracle_activation(kind, x);
            const long double prod_want = act.value * y, dup_want = act.value * dy, both = (long double)dy * y;
            check_close(&prod, row, col, act, x, y, prod_want, fabsl(prod_want));
            check_close(&dup, row, col, act, x, dy, dup_want, fabsl(dup_want));
            check_close(&dgate, row, col, act, x, dy * y, both * act.slope, act.slope_terms * fabsl(both));
            const double got = get(&again, row, col), forward = get(&prod, row, col);
            CHECK(memcmp(&got, &forward, sizeof(got)) == 0 || (isnan(got) && isnan(forward)));
        }
    }
    CHECK(padding_is_intact(&prod) && padding_is_intact(&dgate));
    CHECK(padding_is_intact(&dup) && padding_is_intact(&again));
    free(prod.data);
    free(dgate.data);
    free(dup.data);
    free(again.data);
}

static void check_random(rt_glu_kind kind, rt_dtype dtype, int64_t num_rows, int64_t num_cols, double scale,
                         uint64_t *state, rt_parallel parallel) {
    matrix m[3];
    for (int i = 0; i < 3; i++) {
        m[i] = new_matrix(dtype, num_rows, num_cols, num_cols + random_int(state, 0, 3));
        for (int64_t row = 0; row < num_rows; row++)
            for (int64_t col = 0; col < num_cols; col++)
                set(&m[i], row, col, random_unit(state) * (i == 0 ? scale : 2));
    }
    check_results(kind, &m[0], &m[1], &m[2], parallel);
    for (int i = 0; i < 3; i++) free(m[i].data);
}

static void test_every_tail_of_every_dtype_and_kind(void) {
    uint64_t state = 2;
    for (int kind = 0; kind < NUM_KINDS; kind++)
        for (int i = 0; i < NUM_DTYPES; i++)
            for (int64_t num_cols = 0; num_cols <= 70; num_cols++)
                check_random((rt_glu_kind)kind, all_dtypes[i], num_cols % 3 + 1, num_cols, 4, &state, no_threads());
}

static void test_small_and_large_gates(void) {
    const double scales[] = {1e-30, 1e-3, 1, 20, 200, 1e4, 1e30};
    uint64_t state = 3;
    for (int kind = 0; kind < NUM_KINDS; kind++)
        for (int i = 0; i < NUM_DTYPES; i++)
            for (int s = 0; s < 7; s++)
                check_random((rt_glu_kind)kind, all_dtypes[i], 2, 150, scales[s], &state, no_threads());
}

static void test_special_gates_give_what_the_formula_gives(void) {
    const double gates[] = {0.0,  -0.0, INFINITY, -INFINITY, NAN,  88,    -88,   104,
                            -104, 710,  -710,     746,       -746, 65504, -65504};
    enum { NUM_GATES = sizeof(gates) / sizeof(gates[0]) };
    for (int kind = 0; kind < NUM_KINDS; kind++) {
        for (int i = 0; i < NUM_DTYPES; i++) {
            matrix m[3];
            for (int j = 0; j < 3; j++) m[j] = new_matrix(all_dtypes[i], 1, NUM_GATES, NUM_GATES);
            for (int64_t col = 0; col < NUM_GATES; col++) {
                set(&m[0], 0, col, gates[col]);
                set(&m[1], 0, col, 1.5);
                set(&m[2], 0, col, -0.75);
            }
            check_results((rt_glu_kind)kind, &m[0], &m[1], &m[2], no_threads());
            for (int j = 0; j < 3; j++) free(m[j].data);
        }
    }
}

// relu(gate) * up of two bf16 or f16 numbers is exact in f32; the one rounding to dtype must be to nearest even.
static void test_results_are_rounded_to_nearest_even(void) {
    enum { COLS = 5000 };
    uint64_t state = 5;
    for (int dtype = RT_BF16; dtype <= RT_F16; dtype++) {
        uint16_t gate[COLS], up[COLS], got[COLS], want[COLS];
        for (int i = 0; i < COLS; i++) {
            store_element((rt_dtype)dtype, gate, i, 1 + fabs(random_unit(&state)));
            store_element((rt_dtype)dtype, up, i, random_unit(&state));
            store_element((rt_dtype)dtype, want, i,
                          load_element((rt_dtype)dtype, gate, i) * load_element((rt_dtype)dtype, up, i));
        }
        const rt_glu_params p = {(rt_dtype)dtype, RT_GLU_RELU, 1, COLS, COLS, COLS, COLS};
        CHECK_STATUS(rt_glu_fwd(&p, gate, up, got, no_threads()), RT_OK);
        for (int i = 0; i < COLS; i++) CHECK_INT(got[i], want[i]);
    }
}

// The input is large enough for several tasks; one worker and four must give the same bits.
static void test_any_number_of_workers_gives_the_same_bits(void) {
    enum { ROWS = 37, COLS = 1500 };
    uint64_t state = 4;
    for (int kind = 0; kind < NUM_KINDS; kind++) {
        float one[3][ROWS * COLS], four[3][ROWS * COLS];
        for (int j = 0; j < 3; j++)
            for (int i = 0; i < ROWS * COLS; i++) one[j][i] = (float)(4 * random_unit(&state));
        memcpy(four, one, sizeof(one));
        const rt_glu_params p = {RT_F32, (rt_glu_kind)kind, ROWS, COLS, COLS, COLS, COLS};
        CHECK_STATUS(rt_glu_bwd(&p, one[0], one[1], one[2], no_threads()), RT_OK);
        CHECK_STATUS(rt_glu_bwd(&p, four[0], four[1], four[2], threads_of(4)), RT_OK);
        CHECK(memcmp(one, four, sizeof(one)) == 0);
    }
    check_random(RT_GLU_SILU, RT_BF16, 37, 1000, 4, &state, threads_of(4));
}

static void test_malformed_params_are_refused(void) {
    float gate[8] = {0}, up[8] = {0}, prod[8] = {0};
    const rt_glu_params good = {RT_F32, RT_GLU_SILU, 2, 4, 4, 4, 4};
    CHECK_STATUS(rt_glu_fwd(&good, gate, up, prod, no_threads()), RT_OK);
#define REFUSED(field, value, status)                                                                                  \
    do {                                                                                                               \
        rt_glu_params bad = good;                                                                                      \
        bad.field = value;                                                                                             \
        CHECK_STATUS(rt_glu_fwd(&bad, gate, up, prod, no_threads()), status);                                          \
        CHECK_STATUS(rt_glu_bwd(&bad, gate, up, prod, no_threads()), status);                                          \
        CHECK_NAMED(status, field);                                                                                    \
    } while (0)
    REFUSED(dtype, (rt_dtype)4, RT_BAD_DTYPE);
    REFUSED(kind, (rt_glu_kind)4, RT_BAD_KIND);
    REFUSED(num_rows, -1, RT_BAD_SHAPE);
    REFUSED(num_cols, -1, RT_BAD_SHAPE);
    REFUSED(prod_stride, 3, RT_BAD_STRIDE);
    REFUSED(prod_stride, INT64_MAX, RT_TOO_LARGE);
    REFUSED(gate_stride, INT64_MIN, RT_TOO_LARGE);
    REFUSED(num_rows, INT64_MAX, RT_TOO_LARGE);
#undef REFUSED
    rt_glu_params shared = good; // one row for all: a legal input, not a legal output
    shared.gate_stride = 0;
    CHECK_STATUS(rt_glu_fwd(&shared, gate, up, prod, no_threads()), RT_OK);
    CHECK_STATUS(rt_glu_bwd(&shared, gate, up, prod, no_threads()), RT_BAD_STRIDE);
    CHECK_STATUS(rt_glu_fwd(&good, NULL, up, prod, no_threads()), RT_BAD_POINTER);
    CHECK_STATUS(rt_glu_fwd(&good, gate, NULL, prod, no_threads()), RT_BAD_POINTER);
    CHECK_STATUS(rt_glu_bwd(&good, gate, up, NULL, no_threads()), RT_BAD_POINTER);
    CHECK_STATUS(rt_glu_bwd(&good, gate, up, gate, no_threads()), RT_SHARED_MEMORY);
    CHECK_STATUS(rt_glu_fwd(&good, gate, up, up + 1, no_threads()), RT_SHARED_MEMORY);
    CHECK_STATUS(rt_glu_fwd(&good, (const char *)gate + 1, up, prod, no_threads()), RT_BAD_POINTER);
    const rt_glu_params empty = {RT_F32, RT_GLU_SILU, 0, 4, 4, 4, 4};
    CHECK_STATUS(rt_glu_fwd(&empty, NULL, NULL, NULL, no_threads()), RT_OK);
}

int main(void) {
    check_isa_or_skip();
    test_oracle_slope_is_the_slope_of_the_oracle();
    test_every_tail_of_every_dtype_and_kind();
    test_small_and_large_gates();
    test_special_gates_give_what_the_formula_gives();
    test_results_are_rounded_to_nearest_even();
    test_any_number_of_workers_gives_the_same_bits();
    test_malformed_params_are_refused();
    return check_finish();
}
