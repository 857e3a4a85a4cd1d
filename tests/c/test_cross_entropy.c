// Softmax cross entropy and its gradient against the formulas in long double.
#include "check.h"

enum { IGNORE = -100 };

typedef struct options {
    double label_smoothing, softcap, z_loss;
} options;

// T rows of V logits, `stride` apart; nothing may write to the padding between rows.
typedef struct problem {
    rt_dtype dtype;
    int64_t num_tokens, vocab_size, stride;
    void *logits;
    int64_t *labels;
} problem;

static const double PADDING = 77;

static size_t logits_bytes(const problem *t) {
    const int64_t num_elements = t->num_tokens > 0 ? (t->num_tokens - 1) * t->stride + t->vocab_size : 0;
    return (size_t)num_elements * dtype_bytes(t->dtype);
}

static problem random_problem(rt_dtype dtype, int64_t num_tokens, int64_t vocab_size, double scale, uint64_t *state) {
    problem t = {dtype, num_tokens, vocab_size, vocab_size + random_int(state, 0, 3), NULL, NULL};
    t.logits = must_alloc(logits_bytes(&t));
    t.labels = must_alloc((size_t)num_tokens * sizeof(*t.labels));
    for (int64_t row = 0; row < num_tokens; row++) {
        t.labels[row] = random_int(state, 0, vocab_size - 1);
        for (int64_t col = 0; col < (row + 1 < num_tokens ? t.stride : vocab_size); col++)
            store_element(dtype, t.logits, row * t.stride + col,
                          col < vocab_size ? scale * random_unit(state) : PADDING);
    }
    return t;
}

static void free_problem(problem *t) {
    free(t->logits);
    free(t->labels);
}

static rt_cross_entropy_params params_of(const problem *t, options o, bool want_grad) {
    return (rt_cross_entropy_params){.dtype = t->dtype,
                                     .num_tokens = t->num_tokens,
                                     .vocab_size = t->vocab_size,
                                     .logits_stride = t->stride,
                                     .ignore_index = IGNORE,
                                     .label_smoothing = o.label_smoothing,
                                     .softcap = o.softcap,
                                     .z_loss = o.z_loss,
                                     .want_grad = want_grad};
}

static long double capped(long double x, double softcap) { return softcap > 0 ? softcap * tanhl(x / softcap) : x; }

// One row: the loss and lse, and a check of each gradient. u is the roundoff of the arithmetic, E the relative error
// of the sum of exponentials and of p:
//   sum         a chunk adds at most 128 numbers in a lane, then the lanes: 134 u; each chunk rescales the f64
//               sum: 4 roundings of f64 a chunk of 512
//   exp         2 ulp = 4 u, in p and in the sum; scale and product 3 u
//   argument    tanh, quotient and product of a softcap are off by 8 u |x'|; p also by the rounding of x' - max
static void check_row(const problem *before, const problem *after, options o, int64_t row, double got_loss,
                      double got_lse) {
    const rt_dtype math = before->dtype == RT_F64 ? RT_F64 : RT_F32;
    const int64_t V = before->vocab_size, label = before->labels[row];
    long double max = -INFINITY, sum = 0, total = 0, size = 0;
    for (int64_t col = 0; col < V; col++) {
        const long double x =
            capped(load_element(before->dtype, before->logits, row * before->stride + col), o.softcap);
        if (x > max) max = x;
        if (isfinite(x) && fabsl(x) > size) size = fabsl(x);
        total += x;
    }
    for (int64_t col = 0; col < V; col++) {
        const long double x =
            capped(load_element(before->dtype, before->logits, row * before->stride + col), o.softcap);
        sum += expl(x - max);
    }
    // With nothing but -inf, max and lse are -inf, and a probability is 0 / 0.
    const long double lse = max == -INFINITY ? max : max + logl(sum), smoothing = o.label_smoothing, z = o.z_loss;
    const long double label_logit =
        capped(load_element(before->dtype, before->logits, row * before->stride + label), o.softcap);
    long double loss = (1 - smoothing) * (logl(sum) + (max - label_logit)) + z * lse * lse;
    if (smoothing > 0) loss += smoothing * (logl(sum) + (max - total / V));

    const double u = unit_roundoff(math), chunks = (double)V / 512 + 1;
    const double error = 145 * u + 4 * chunks * 0x1p-53 + (o.softcap > 0 ? 8 * u * (double)size : 0);
    CHECK_CLOSE(got_lse, (double)lse, error + 2 * u * (double)size);
    CHECK_CLOSE(got_loss, (double)loss,
                (2 + 2 * (double)(z * fabsl(lse))) * error + 4 * u * fabs((double)loss) +
                    o.label_smoothing * 134 * u * (double)size);

    for (int64_t col = 0; after != NULL && col < V; col++) {
        const long double x = load_element(before->dtype, before->logits, row * before->stride + col);
        const long double distance = capped(x, o.softcap) - max, p = expl(distance) / sum;
        const long double t = o.softcap > 0 ? tanhl(x / o.softcap) : 0;
        const long double slope = p * (1 + 2 * z * lse) - (1 - smoothing) * (col == label) - smoothing / V;
        const double want = (double)(slope * (1 - t * t));
        const double p_term = (double)(p * (1 + 2 * z * fabsl(lse))),
                     other_terms = (double)((col == label) + smoothing / V);
        // expl(-inf) is 0 exactly, and so is ours.
        const double p_error = p_term > 0 ? (error + u * (double)fabsl(distance)) * p_term : 0;
        const double bound = unit_roundoff(before->dtype) * fabs(want) + smallest(before->dtype) + p_error +
                             8 * u * (p_term + other_terms) + (math == RT_F64 ? 0x1p-1022 : 0x1p-126);
        CHECK_CLOSE(load_element(after->dtype, after->logits, row * after->stride + col), want, bound);
    }
}

static bool padding_is_intact(const problem *t) {
    for (int64_t row = 0; row + 1 < t->num_tokens; row++)
        for (int64_t col = t->vocab_size; col < t->stride; col++)
            if (load_element(t->dtype, t->logits, row * t->stride + col) != PADDING) return false;
    return true;
}

// Runs with and without gradient, and compares every row that is not ignored with the oracle.
static void check_problem(problem *t, options o, rt_parallel parallel) {
    const problem before = {t->dtype, t->num_tokens, t->vocab_size, t->stride, must_alloc(logits_bytes(t)), t->labels};
    memcpy(before.logits, t->logits, logits_bytes(t));
    const size_t state_bytes = (size_t)t->num_tokens * (t->dtype == RT_F64 ? 8 : 4);
    const rt_dtype state = t->dtype == RT_F64 ? RT_F64 : RT_F32;
    void *loss = must_alloc(state_bytes), *lse = must_alloc(state_bytes);
    void *loss_only = must_alloc(state_bytes), *lse_only = must_alloc(state_bytes);

    rt_cross_entropy_params p = params_of(t, o, false);
    CHECK_STATUS(rt_cross_entropy_fwd_bwd(&p, t->logits, t->labels, loss_only, lse_only, parallel), RT_OK);
    CHECK(memcmp(before.logits, t->logits, logits_bytes(t)) == 0);
    p.want_grad = true;
    CHECK_STATUS(rt_cross_entropy_fwd_bwd(&p, t->logits, t->labels, loss, lse, parallel), RT_OK);
    CHECK(memcmp(loss, loss_only, state_bytes) == 0 && memcmp(lse, lse_only, state_bytes) == 0);
    CHECK(padding_is_intact(t));

    for (int64_t row = 0; row < t->num_tokens; row++) {
        const double got_loss = load_element(state, loss, row), got_lse = load_element(state, lse, row);
        if (t->labels[row] != IGNORE) {
            check_row(&before, t, o, row, got_loss, got_lse);
            continue;
        }
        CHECK(got_loss == 0 && got_lse == 0);
        for (int64_t col = 0; col < t->vocab_size; col++)
            CHECK(load_element(t->dtype, t->logits, row * t->stride + col) == 0);
    }
    free(before.logits);
    free(loss);
    free(lse);
    free(loss_only);
    free(lse_only);
}

static const options all_options[] = {{0, 0, 0}, {0.1, 0, 0}, {0, 30, 0}, {0, 0, 1e-2}, {0.3, 5, 1e-3}, {1, 0, 0}};
enum { NUM_OPTIONS = sizeof(all_options) / sizeof(all_options[0]) };

static void test_every_tail_dtype_and_option(void) {
    uint64_t state = 1;
    for (int i = 0; i < NUM_DTYPES; i++) {
        for (int o = 0; o < NUM_OPTIONS; o++) {
            for (int64_t vocab_size = 1; vocab_size <= 70; vocab_size++) {
                problem t = random_problem(all_dtypes[i], vocab_size % 3 + 1, vocab_size, 8, &state);
                check_problem(&t, all_options[o], no_threads());
                free_problem(&t);
            }
        }
    }
}

static void test_small_large_and_shifted_logits(void) {
    const double scales[] = {1e-6, 1, 100, 3e4};
    uint64_t state = 2;
    for (int i = 0; i < NUM_DTYPES; i++) {
        for (int s = 0; s < 4; s++) {
            for (int o = 0; o < NUM_OPTIONS; o++) {
                problem t = random_problem(all_dtypes[i], 2, 200, scales[s], &state);
                for (int64_t col = 0; col < 200; col++) // one row far from 0
                    store_element(t.dtype, t.logits, col, 1000 + load_element(t.dtype, t.logits, col) / scales[s]);
                check_problem(&t, all_options[o], no_threads());
                free_problem(&t);
            }
        }
    }
}

// The vocabulary of a real model: the sum over V stays accurate over many chunks.
static void test_a_large_vocabulary_is_summed_accurately(void) {
    uint64_t state = 3;
    for (int i = 0; i < NUM_DTYPES; i++) {
        problem t = random_problem(all_dtypes[i], 2, 128256, 3, &state);
        check_problem(&t, (options){0.1, 0, 1e-4}, threads_of(2));
        free_problem(&t);
    }
}

// With increasing logits the running max changes in every chunk; with decreasing ones never.
static void test_the_running_maximum_moves(void) {
    enum { VOCAB = 9000 };
    uint64_t state = 4;
    for (int sign = -1; sign <= 1; sign += 2) {
        problem t = random_problem(RT_F32, 1, VOCAB, 1, &state);
        for (int64_t col = 0; col < VOCAB; col++) store_element(RT_F32, t.logits, col, sign * 0.05 * (double)col);
        check_problem(&t, (options){0, 0, 0}, no_threads());
        free_problem(&t);
    }
}

// Logits of -inf have probability 0, at any place; with every logit -inf the formula gives NaN.
static void test_masked_vocabulary(void) {
    enum { VOCAB = 5000 };
    uint64_t state = 5;
    for (int i = 0; i < NUM_DTYPES; i++) {
        for (int row_kind = 0; row_kind < 4; row_kind++) {
            problem t = random_problem(all_dtypes[i], 1, VOCAB, 4, &state);
            t.labels[0] = VOCAB / 2;
            for (int64_t col = 0; col < VOCAB; col++) {
                const bool masked = row_kind == 0   ? col < VOCAB / 2
                                    : row_kind == 1 ? col > VOCAB / 2
                                    : row_kind == 2 ? col % 2 == 1
                                                    : true;
                if (masked) store_element(t.dtype, t.logits, col, -INFINITY);
            }
            check_problem(&t, (options){0, 0, 0}, no_threads());
            free_problem(&t);
        }
    }
}

// The loss depends on differences of logits only: it stays accurate far from 0, and the max must start low enough.
static void test_logits_far_from_zero(void) {
    const double offsets[] = {1e4, -1e4, 1e35, -1e35};
    uint64_t state = 9;
    for (int dtype = RT_F64; dtype <= RT_F32; dtype++) {
        for (int i = 0; i < 4; i++) {
            problem t = random_problem((rt_dtype)dtype, 1, 600, 4, &state);
            for (int64_t col = 0; col < 600; col++)
                store_element(t.dtype, t.logits, col, offsets[i] + load_element(t.dtype, t.logits, col));
            check_problem(&t, (options){0, 0, 0}, no_threads());
            free_problem(&t);
        }
    }
}

// A NaN or an infinity affects its own row only; an ignored row is 0 whatever its logits hold.
static void test_special_values_stay_in_their_row(void) {
    const double specials[] = {NAN, INFINITY, -INFINITY};
    uint64_t state = 6;
    for (int i = 0; i < NUM_DTYPES; i++) {
        for (int s = 0; s < 3; s++) {
            problem t = random_problem(all_dtypes[i], 5, 70, 4, &state);
            store_element(t.dtype, t.logits, 1 * t.stride + 69, specials[s]);
            t.labels[1] = 3;
            for (int64_t col = 0; col < 70; col++) store_element(t.dtype, t.logits, 3 * t.stride + col, specials[s]);
            t.labels[3] = IGNORE;
            check_problem(&t, (options){0, 0, 0}, no_threads());
            free_problem(&t);
        }
        problem t = random_problem(all_dtypes[i], 3, 70, 4, &state); // ignored tokens only
        for (int row = 0; row < 3; row++) t.labels[row] = IGNORE;
        check_problem(&t, (options){0.1, 30, 1e-3}, no_threads());
        free_problem(&t);
    }
}

static void test_any_number_of_workers_gives_the_same_bits(void) {
    enum { TOKENS = 50, VOCAB = 1500 };
    static float one[TOKENS * VOCAB], four[TOKENS * VOCAB];
    float loss[2][TOKENS], lse[2][TOKENS];
    int64_t labels[TOKENS];
    uint64_t state = 8;
    for (int i = 0; i < TOKENS * VOCAB; i++) one[i] = four[i] = (float)(5 * random_unit(&state));
    for (int i = 0; i < TOKENS; i++) labels[i] = i % 7 == 0 ? IGNORE : random_int(&state, 0, VOCAB - 1);
    const problem t = {RT_F32, TOKENS, VOCAB, VOCAB, one, labels};
    const rt_cross_entropy_params p = params_of(&t, (options){0.1, 30, 1e-4}, true);
    CHECK_STATUS(rt_cross_entropy_fwd_bwd(&p, one, labels, loss[0], lse[0], no_threads()), RT_OK);
    CHECK_STATUS(rt_cross_entropy_fwd_bwd(&p, four, labels, loss[1], lse[1], threads_of(4)), RT_OK);
    CHECK(memcmp(one, four, sizeof(one)) == 0);
    CHECK(memcmp(loss[0], loss[1], sizeof(loss[0])) == 0 && memcmp(lse[0], lse[1], sizeof(lse[0])) == 0);
}

static void test_malformed_params_are_refused_before_anything_is_written(void) {
    float logits[8] = {1, 2, 3, 4, 5, 6, 7, 8}, loss[2] = {9, 9}, lse[2] = {9, 9};
    const float untouched[8] = {1, 2, 3, 4, 5, 6, 7, 8};
    const int64_t labels[2] = {3, IGNORE};
    const problem t = {RT_F32, 2, 4, 4, logits, NULL};
    const rt_cross_entropy_params good = params_of(&t, (options){0, 0, 0}, true);
#define REFUSED(field, value, status)                                                                                  \
    CHECK_REFUSED(rt_cross_entropy_params, good, field, value,                                                         \
                  rt_cross_entropy_fwd_bwd(&bad, logits, labels, loss, lse, no_threads()), status)
    REFUSED(dtype, (rt_dtype)4, RT_BAD_DTYPE);
    REFUSED(num_tokens, -1, RT_BAD_SHAPE);
    REFUSED(vocab_size, 0, RT_BAD_SHAPE);
    REFUSED(logits_stride, 3, RT_BAD_STRIDE);
    REFUSED(logits_stride, INT64_MAX, RT_TOO_LARGE);
    REFUSED(num_tokens, INT64_MAX, RT_TOO_LARGE);
    REFUSED(vocab_size, INT64_MAX, RT_TOO_LARGE);
    REFUSED(softcap, 1e39, RT_BAD_SCALE);  // infinite in f32
    REFUSED(softcap, 1e-44, RT_BAD_SCALE); // its inverse is
    REFUSED(label_smoothing, -0.1, RT_BAD_SCALE);
    REFUSED(label_smoothing, 1.1, RT_BAD_SCALE);
    REFUSED(label_smoothing, NAN, RT_BAD_SCALE);
    REFUSED(softcap, -1, RT_BAD_SCALE);
    REFUSED(softcap, INFINITY, RT_BAD_SCALE);
    REFUSED(z_loss, -1, RT_BAD_SCALE);
    REFUSED(z_loss, NAN, RT_BAD_SCALE);
#undef REFUSED
    CHECK_STATUS(rt_cross_entropy_fwd_bwd(&good, NULL, labels, loss, lse, no_threads()), RT_BAD_POINTER);
    CHECK_STATUS(rt_cross_entropy_fwd_bwd(&good, logits, NULL, loss, lse, no_threads()), RT_BAD_POINTER);
    CHECK_STATUS(rt_cross_entropy_fwd_bwd(&good, logits, labels, NULL, lse, no_threads()), RT_BAD_POINTER);
    CHECK_STATUS(rt_cross_entropy_fwd_bwd(&good, logits, labels, loss, NULL, no_threads()), RT_BAD_POINTER);
    CHECK_STATUS(rt_cross_entropy_fwd_bwd(&good, logits, labels, loss, loss, no_threads()), RT_SHARED_MEMORY);
    CHECK_STATUS(rt_cross_entropy_fwd_bwd(&good, logits, labels, loss, logits + 6, no_threads()), RT_SHARED_MEMORY);
    CHECK(memcmp(logits, untouched, sizeof(logits)) == 0 && loss[0] == 9 && loss[1] == 9 && lse[0] == 9 && lse[1] == 9);
    rt_cross_entropy_params empty = good;
    empty.num_tokens = 0;
    CHECK_STATUS(rt_cross_entropy_fwd_bwd(&empty, NULL, NULL, NULL, NULL, no_threads()), RT_OK);
    CHECK_STATUS(rt_cross_entropy_fwd_bwd(&good, logits, labels, loss, lse, no_threads()), RT_OK);
}

// The CPU checks all labels first; a GPU, which the call does not wait for, makes the token of a bad label NaN.
static void test_a_bad_label_is_refused_or_nan(void) {
    for (int i = 0; i < NUM_DTYPES; i++) {
        const int64_t bad_labels[] = {-1, 4, INT64_MIN, INT64_MAX};
        for (int b = 0; b < 4; b++) {
            uint64_t state = 10;
            problem t = random_problem(all_dtypes[i], 2, 4, 1, &state);
            t.stride = 4;
            t.labels[0] = bad_labels[b];
            double loss[2] = {9, 9}, lse[2] = {9, 9}; // room for both state dtypes
            const rt_cross_entropy_params p = params_of(&t, (options){0, 0, 0}, true);
            const double before = load_element(t.dtype, t.logits, 7);
#ifdef RINGTILE_TESTS_CORE_ON_EMULATOR_H
            const rt_dtype state_dtype = t.dtype == RT_F64 ? RT_F64 : RT_F32;
            CHECK_STATUS(rt_cross_entropy_fwd_bwd(&p, t.logits, t.labels, loss, lse, no_threads()), RT_OK);
            CHECK(isnan(load_element(state_dtype, loss, 0)) && isnan(load_element(state_dtype, lse, 0)));
            for (int col = 0; col < 4; col++) CHECK(isnan(load_element(t.dtype, t.logits, col)));
            CHECK(isfinite(load_element(state_dtype, loss, 1)) && load_element(t.dtype, t.logits, 7) != before);
#else
            CHECK_STATUS(rt_cross_entropy_fwd_bwd(&p, t.logits, t.labels, loss, lse, no_threads()), RT_BAD_LABEL);
            CHECK(loss[0] == 9 && loss[1] == 9 && lse[0] == 9 && lse[1] == 9);
            CHECK(load_element(t.dtype, t.logits, 7) == before);
#endif
            free_problem(&t);
        }
    }
}

int main(void) {
    check_isa_or_skip();
    test_every_tail_dtype_and_option();
    test_small_large_and_shifted_logits();
    test_a_large_vocabulary_is_summed_accurately();
    test_the_running_maximum_moves();
    test_masked_vocabulary();
    test_logits_far_from_zero();
    test_special_values_stay_in_their_row();
    test_any_number_of_workers_gives_the_same_bits();
    test_malformed_params_are_refused_before_anything_is_written();
    test_a_bad_label_is_refused_or_nan();
    return check_finish();
}
