// Dropout against Philox as its paper writes it, for every dtype, tail and probability; the generator against the
// vectors that its authors publish with Random123.
#include "check.h"

#include "../../csrc/dropout/philox.h"

static void test_philox_gives_the_published_numbers(void) {
    static const uint32_t vectors[][10] = {
        // counter, key, result
        {0, 0, 0, 0, 0, 0, 0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8},
        {0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0x408f276d, 0x41c83b0e, 0xa20bc7c6,
         0x6d5451fd},
        {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344, 0xa4093822, 0x299f31d0, 0xd16cfe09, 0x94fdcceb, 0x5001e420,
         0x24126ea1},
    };
    for (int i = 0; i < 3; i++) {
        const uint32_t *v = vectors[i];
        const rt_philox got = rt_philox4x32((rt_philox){{v[0], v[1], v[2], v[3]}}, v[4], v[5]);
        for (int j = 0; j < 4; j++) CHECK_INT(got.word[j], v[6 + j]);
    }
}

// Whether dropout keeps a feature, from the words of ringtile.h.
static bool is_kept(const rt_dropout_params *p, const int64_t *place, int64_t feature) {
    const rt_philox counter = {{(uint32_t)(feature / 4), (uint32_t)place[1], (uint32_t)place[0], p->stream}};
    return rt_philox4x32(counter, p->seed, p->step).word[feature % 4] < nearbyint((1 - p->probability) * 0x1p32);
}

static void check_case(rt_dropout_params p, uint64_t *state, rt_parallel parallel) {
    p.x_stride = p.num_features + random_int(state, 0, 3);
    p.seed = (uint32_t)random_bits(state), p.step = (uint32_t)random_bits(state);
    p.stream = (uint32_t)random_bits(state);
    const int64_t num_x = p.num_tokens > 0 ? (p.num_tokens - 1) * p.x_stride + p.num_features : 0;
    const size_t bytes = dtype_bytes(p.dtype);
    void *x = must_alloc((size_t)num_x * bytes);
    void *y = must_alloc((size_t)(p.num_tokens * p.num_features) * bytes);
    int64_t *places = must_alloc((size_t)p.num_tokens * 16);
    for (int64_t i = 0; i < num_x; i++) store_element(p.dtype, x, i, random_unit(state));
    for (int64_t i = 0; i < 2 * p.num_tokens; i++)
        places[i] = random_int(state, 0, 1) ? random_int(state, 0, 9) : (int64_t)(uint32_t)random_bits(state);
    CHECK_STATUS(rt_dropout(&p, x, places, y, parallel), RT_OK);
    // scale, the product and the result are rounded once each.
    const double scale = 1 / (1 - p.probability), u = unit_roundoff(p.dtype == RT_F64 ? RT_F64 : RT_F32);
    for (int64_t t = 0; t < p.num_tokens; t++)
        for (int64_t f = 0; f < p.num_features; f++) {
            const double from = load_element(p.dtype, x, t * p.x_stride + f);
            const double want = is_kept(&p, places + 2 * t, f) ? from * scale : 0;
            CHECK_CLOSE(load_element(p.dtype, y, t * p.num_features + f), want,
                        fabs(want) * (3 * u + unit_roundoff(p.dtype)) + smallest(p.dtype));
        }
    free(x), free(y), free(places);
}

static void test_every_tail_of_every_dtype(void) {
    uint64_t state = 1;
    for (int i = 0; i < NUM_DTYPES; i++)
        for (int64_t num_features = 0; num_features <= 70; num_features++)
            check_case((rt_dropout_params){.dtype = all_dtypes[i],
                                           .num_tokens = num_features % 4,
                                           .num_features = num_features,
                                           .probability = 0.3},
                       &state, no_threads());
}

static void test_long_rows_and_every_probability(void) {
    static const double probabilities[] = {0, 0x1p-33, 0x1p-32, 0.05, 0.5, 0.9, 1 - 0x1p-32};
    uint64_t state = 2;
    for (int i = 0; i < 7; i++)
        check_case((rt_dropout_params){.dtype = all_dtypes[i % NUM_DTYPES],
                                       .num_tokens = 3,
                                       .num_features = 1100,
                                       .probability = probabilities[i]},
                   &state, threads_of(3));
}

// A random number w is read off its two neighbouring thresholds: it is dropped at a threshold of w, kept at w + 1.
static void test_the_threshold_is_exact(void) {
    const rt_philox random = rt_philox4x32((rt_philox){{0, 5, 7, 11}}, 13, 17);
    const int64_t place[] = {7, 5};
    const double x[4] = {1, 1, 1, 1};
    for (int f = 0; f < 4; f++)
        for (int more = 0; more < 2; more++) {
            double y[4];
            const rt_dropout_params p = {RT_F64, 1, 4, 4, 1 - ((double)random.word[f] + more) * 0x1p-32, 13, 17, 11};
            CHECK_STATUS(rt_dropout(&p, x, place, y, no_threads()), RT_OK);
            CHECK_INT(y[f] != 0, more);
        }
}

static void test_probability_one_drops_all_and_zero_none(void) {
    const int64_t places[] = {0, 0, 0, 1};
    const float x[10] = {1, -2, 3, INFINITY, 5, 6, -7, 8, 9, NAN};
    float y[10];
    rt_dropout_params p = {RT_F32, 2, 5, 5, 1, 1, 2, 3};
    CHECK_STATUS(rt_dropout(&p, x, places, y, no_threads()), RT_OK);
    for (int i = 0; i < 10; i++) CHECK_CLOSE(y[i], isfinite(x[i]) ? 0 : NAN, 0); // 0 x, as torch's
    p.probability = 0;
    CHECK_STATUS(rt_dropout(&p, x, places, y, no_threads()), RT_OK);
    CHECK(memcmp(x, y, sizeof(x)) == 0);
}

static void test_any_number_of_workers_gives_the_same_bits(void) {
    enum { ROWS = 37, COLS = 1501 };
    static float x[ROWS * COLS], one[ROWS * COLS], four[ROWS * COLS];
    int64_t places[2 * ROWS];
    uint64_t state = 4;
    for (int i = 0; i < ROWS * COLS; i++) x[i] = (float)random_unit(&state);
    for (int i = 0; i < 2 * ROWS; i++) places[i] = i;
    const rt_dropout_params p = {RT_F32, ROWS, COLS, COLS, 0.4, 1, 2, 3};
    CHECK_STATUS(rt_dropout(&p, x, places, one, no_threads()), RT_OK);
    CHECK_STATUS(rt_dropout(&p, x, places, four, threads_of(4)), RT_OK);
    CHECK(memcmp(one, four, sizeof(one)) == 0);
}

static void test_malformed_params_are_refused(void) {
    float x[8] = {0}, y[8];
    const int64_t places[] = {0, 0, 0, 1};
    const rt_dropout_params good = {RT_F32, 2, 4, 4, 0.5, 1, 2, 3};
    CHECK_STATUS(rt_dropout(&good, x, places, y, no_threads()), RT_OK);
#define REFUSED(field, value, status)                                                                                  \
    CHECK_REFUSED(rt_dropout_params, good, field, value, rt_dropout(&bad, x, places, y, no_threads()), status)
    REFUSED(dtype, (rt_dtype)4, RT_BAD_DTYPE);
    REFUSED(num_tokens, -1, RT_BAD_SHAPE);
    REFUSED(num_features, -1, RT_BAD_SHAPE);
    REFUSED(probability, -0.01, RT_BAD_PROBABILITY);
    REFUSED(probability, 1.01, RT_BAD_PROBABILITY);
    REFUSED(probability, NAN, RT_BAD_PROBABILITY);
    REFUSED(num_features, (INT64_C(4) << 32) + 1, RT_TOO_LARGE);
    REFUSED(num_tokens, INT64_MAX, RT_TOO_LARGE);
    REFUSED(x_stride, INT64_MIN, RT_TOO_LARGE);
#undef REFUSED
    CHECK_STATUS(rt_dropout(&good, NULL, places, y, no_threads()), RT_BAD_POINTER);
    CHECK_STATUS(rt_dropout(&good, x, NULL, y, no_threads()), RT_BAD_POINTER);
    CHECK_STATUS(rt_dropout(&good, x, places, NULL, no_threads()), RT_BAD_POINTER);
    CHECK_STATUS(rt_dropout(NULL, x, places, y, no_threads()), RT_BAD_POINTER);
    CHECK_STATUS(rt_dropout(&good, x, places, x, no_threads()), RT_SHARED_MEMORY);
    CHECK_STATUS(rt_dropout(&good, (const char *)x + 1, places, y, no_threads()), RT_BAD_POINTER);
    const rt_dropout_params empty = {RT_F32, 0, 4, 4, 0.5, 1, 2, 3};
    CHECK_STATUS(rt_dropout(&empty, NULL, NULL, NULL, no_threads()), RT_OK);
}

int main(void) {
    check_isa_or_skip();
    test_philox_gives_the_published_numbers();
    test_every_tail_of_every_dtype();
    test_long_rows_and_every_probability();
    test_the_threshold_is_exact();
    test_probability_one_drops_all_and_zero_none();
    test_any_number_of_workers_gives_the_same_bits();
    test_malformed_params_are_refused();
    return check_finish();
}
