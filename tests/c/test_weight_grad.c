// The gradient of a linear layer's weight against sums in long double.
#include "check.h"

// Rows of all matrices lie apart; nothing may write between them.
typedef struct problem {
    rt_weight_grad_params p;
    void *dout, *x, *sum; // as first made
    double *want, *terms; // (F, E): the result, and the sum of the absolute values of its terms
} problem;

enum { GAP = 3 };
static const double PADDING = 77;

static rt_dtype sum_dtype(rt_dtype dtype) { return dtype == RT_F64 ? RT_F64 : RT_F32; }

static void *new_matrix(rt_dtype dtype, int64_t num_rows, int64_t num_cols, uint64_t *state) {
    const int64_t stride = num_cols + GAP;
    void *x = must_alloc((size_t)(num_rows * stride) * dtype_bytes(dtype));
    for (int64_t i = 0; i < num_rows * stride; i++)
        store_element(dtype, x, i, i % stride < num_cols ? random_unit(state) : PADDING);
    return x;
}

static problem new_problem(rt_dtype dtype, int64_t T, int64_t F, int64_t E, uint64_t *state) {
    problem t = {.p = {.dtype = dtype, .num_tokens = T, .num_outputs = F, .num_inputs = E}};
    t.p.dout = t.dout = new_matrix(dtype, T, F, state), t.p.dout_stride = F + GAP;
    t.p.x = t.x = new_matrix(dtype, T, E, state), t.p.x_stride = E + GAP;
    t.p.sum = t.sum = new_matrix(sum_dtype(dtype), F, E, state), t.p.sum_stride = E + GAP;
    t.want = must_alloc((size_t)(F * E) * sizeof(double)), t.terms = must_alloc((size_t)(F * E) * sizeof(double));
    return t;
}

static void find_want(problem *t) {
    const rt_weight_grad_params *p = &t->p;
    const int64_t F = p->num_outputs, E = p->num_inputs;
    for (int64_t f = 0; f < F; f++)
        for (int64_t e = 0; e < E; e++) {
            long double want = load_element(sum_dtype(p->dtype), t->sum, f * p->sum_stride + e), terms = fabsl(want);
            for (int64_t i = 0; i < p->num_tokens; i++) {
                const long double term = (long double)load_element(p->dtype, t->dout, i * p->dout_stride + f) *
                                         load_element(p->dtype, t->x, i * p->x_stride + e);
                want += term, terms += fabsl(term);
            }
            t->want[f * E + e] = (double)want, t->terms[f * E + e] = (double)terms;
        }
}

static void free_problem(problem *t) { free(t->dout), free(t->x), free(t->sum), free(t->want), free(t->terms); }

// Calls with a workspace of exactly its size.
static rt_status add(const rt_weight_grad_params *given, rt_parallel parallel) {
    rt_weight_grad_params p = *given;
    p.workspace_bytes = rt_weight_grad_workspace_bytes(&p, parallel.num_workers);
    p.workspace = aligned_alloc(64, (size_t)p.workspace_bytes + 64); // of 0 bytes it would be NULL
    memset(p.workspace, 0xff, (size_t)p.workspace_bytes);            // NaN: what is not written must not be read
    const rt_status status = rt_weight_grad_add(&p, parallel);
    free(p.workspace);
    return status;
}

// A sum of T products and of what was there, in any order: T + 1 roundings of at most the sum of all terms, and one for
// each product that is not exact. Pairs of bf16 flush each partial sum below 2^-126 to 0, and each input, times at most
// 1; the double that is expected is rounded too.
static void check_sum(problem *t, rt_parallel parallel) {
    const rt_weight_grad_params *p = &t->p;
    const rt_dtype sums = sum_dtype(p->dtype);
    const int64_t T = p->num_tokens, F = p->num_outputs, E = p->num_inputs;
    find_want(t);
    CHECK_STATUS(add(p, parallel), RT_OK);
    for (int64_t f = 0; f < F; f++) {
        for (int64_t e = 0; e < E; e++) {
            const double u = unit_roundoff(sums), terms = t->terms[f * E + e];
            const double bound = (double)(2 * T + 2) * (u * terms + (p->dtype == RT_BF16 ? 3 * 0x1p-126 : 0)) / (1 - u);
            CHECK_CLOSE(load_element(sums, t->sum, f * p->sum_stride + e), t->want[f * E + e],
                        (isfinite(bound) ? bound : 0) + 0x1p-53 * fabs(t->want[f * E + e]));
        }
        for (int64_t e = E; e < E + GAP; e++)
            CHECK(load_element(sums, t->sum, f * p->sum_stride + e) == (sums == RT_F64 ? PADDING : (float)PADDING));
    }
}

static void test_every_tail_of_every_dtype(void) {
    // Tokens, outputs, inputs: around pairs, vectors, register tiles and matrix tiles, panels and blocks.
    static const int64_t sizes[][3] = {{1, 1, 1},    {2, 5, 3},    {3, 16, 17},  {31, 17, 16},
                                       {32, 33, 64}, {33, 95, 65}, {64, 96, 15}, {65, 97, 31},
                                       {67, 47, 79}, {70, 193, 9}, {9, 3, 1030}, {150, 20, 1}};
    uint64_t state = 1;
    for (int i = 0; i < NUM_DTYPES; i++)
        for (size_t s = 0; s < sizeof(sizes) / sizeof(sizes[0]); s++) {
            problem t = new_problem(all_dtypes[i], sizes[s][0], sizes[s][1], sizes[s][2], &state);
            check_sum(&t, no_threads());
            free_problem(&t);
        }
}

// Small numbers, some of which are subnormal, and numbers that are not finite, in odd places.
static void test_special_numbers(void) {
    static const double specials[] = {0x1p-130, -0x1p-133, 0x1p-126, 0x1p-70, -0.0, INFINITY, -INFINITY, NAN};
    uint64_t state = 2;
    for (int i = 0; i < NUM_DTYPES; i++)
        for (int s = 0; s < 8; s++) {
            const rt_dtype dtype = all_dtypes[i];
            problem t = new_problem(dtype, 35, 20, 70, &state);
            store_element(dtype, t.dout, 34 * t.p.dout_stride + 17, specials[s]);
            store_element(dtype, t.x, 6 * t.p.x_stride + 66, specials[s]);
            store_element(dtype, t.x, 7 * t.p.x_stride + 3, specials[(s + 1) % 8]);
            store_element(dtype, t.dout, 7 * t.p.dout_stride + 2, 0);
            check_sum(&t, no_threads());
            free_problem(&t);
        }
}

// dout of one row for all tokens, and tokens from the last to the first.
static void test_any_strides_of_inputs(void) {
    uint64_t state = 3;
    problem t = new_problem(RT_BF16, 37, 21, 18, &state);
    t.p.dout_stride = 0;
    t.p.x = (uint16_t *)t.x + 36 * t.p.x_stride, t.p.x_stride = -t.p.x_stride;
    void *const forward = t.x;
    t.x = (uint16_t *)(uintptr_t)t.p.x;
    check_sum(&t, no_threads());
    t.x = forward;
    free_problem(&t);
}

static void test_any_number_of_workers_gives_the_same_bits(void) {
    enum { T = 41, F = 200, E = 1100 };
    for (int i = 0; i < NUM_DTYPES; i++) {
        void *sums[3];
        for (int workers = 1; workers <= 3; workers++) {
            uint64_t state = 4;
            problem t = new_problem(all_dtypes[i], T, F, E, &state);
            CHECK_STATUS(add(&t.p, threads_of(workers)), RT_OK);
            sums[workers - 1] = t.sum, t.sum = NULL;
            free_problem(&t);
        }
        for (int other = 1; other < 3; other++)
            CHECK(memcmp(sums[0], sums[other], F * (E + GAP) * dtype_bytes(sum_dtype(all_dtypes[i]))) == 0);
        for (int each = 0; each < 3; each++) free(sums[each]);
    }
}

static void test_nothing_to_add(void) {
    float sum[6] = {1, 2, 3, 4, 5, 6};
    const uint16_t some[6] = {0};
    const rt_weight_grad_params none = {
        .dtype = RT_BF16, .num_outputs = 2, .num_inputs = 3, .sum = sum, .sum_stride = 3};
    CHECK_INT(rt_weight_grad_workspace_bytes(&none, 1), 0);
    CHECK_STATUS(rt_weight_grad_add(&none, no_threads()), RT_OK);
    rt_weight_grad_params no_outputs = none;
    no_outputs.num_outputs = 0, no_outputs.num_tokens = 2, no_outputs.x = some, no_outputs.x_stride = 3;
    CHECK_STATUS(rt_weight_grad_add(&no_outputs, no_threads()), RT_OK);
    for (int i = 0; i < 6; i++) CHECK(sum[i] == (float)(i + 1));
}

static void test_malformed_params_are_refused(void) {
    float sum[8];
    uint16_t dout[4] = {0}, x[8] = {0};
    const rt_weight_grad_params good = {.dtype = RT_BF16,
                                        .num_tokens = 2,
                                        .num_outputs = 2,
                                        .num_inputs = 4,
                                        .dout = dout,
                                        .x = x,
                                        .sum = sum,
                                        .dout_stride = 2,
                                        .x_stride = 4,
                                        .sum_stride = 4};
    memset(sum, 0, sizeof(sum));
    CHECK_STATUS(add(&good, no_threads()), RT_OK);
#define REFUSED(field, value, status)                                                                                  \
    CHECK_REFUSED(rt_weight_grad_params, good, field, value, add(&bad, no_threads()), status)
    REFUSED(dtype, (rt_dtype)4, RT_BAD_DTYPE);
    REFUSED(num_tokens, -1, RT_BAD_SHAPE);
    REFUSED(num_outputs, -1, RT_BAD_SHAPE);
    REFUSED(num_inputs, -1, RT_BAD_SHAPE);
    REFUSED(num_tokens, INT64_C(1) << 60, RT_TOO_LARGE);
    REFUSED(sum_stride, 3, RT_BAD_STRIDE);
    REFUSED(dout, NULL, RT_BAD_POINTER);
    REFUSED(x, NULL, RT_BAD_POINTER);
    REFUSED(sum, NULL, RT_BAD_POINTER);
    REFUSED(x, (char *)x + 1, RT_BAD_POINTER);
    REFUSED(x, (uint16_t *)(void *)sum, RT_SHARED_MEMORY);
#undef REFUSED
    CHECK_STATUS(rt_weight_grad_add(NULL, no_threads()), RT_BAD_POINTER);
    CHECK_INT(rt_weight_grad_workspace_bytes(NULL, 1), 0);
    CHECK_INT(rt_weight_grad_workspace_bytes(&good, 0), 0);
    CHECK_INT(rt_weight_grad_workspace_bytes(&good, INT64_MAX), 0);
    rt_weight_grad_params no_room = good;
    CHECK_STATUS(rt_weight_grad_add(&no_room, no_threads()), RT_WORKSPACE);
    char room[64 * 1024] __attribute__((aligned(64)));
    no_room.workspace = room, no_room.workspace_bytes = rt_weight_grad_workspace_bytes(&good, 1) - 1;
    CHECK_STATUS(rt_weight_grad_add(&no_room, no_threads()), RT_WORKSPACE);
}

int main(void) {
    check_isa_or_skip();
    test_every_tail_of_every_dtype();
    test_special_numbers();
    test_any_strides_of_inputs();
    test_any_number_of_workers_gives_the_same_bits();
    test_nothing_to_add();
    test_malformed_params_are_refused();
    return check_finish();
}
