// Every threaded kernel, forward and backward, on real threads: for the thread sanitizer, which reports any memory that
// two of them touch without order. The bits must be those of one worker. `race_threads [ROUNDS [SEED]]`
#include "attn_check.h"

#include "../../csrc/bench/multiply_add.h"

enum { WORKERS = 4 };

static void fill_numbers(void *array, rt_dtype dtype, int64_t count, uint64_t *state) {
    for (int64_t i = 0; i < count; i++) store_element(dtype, array, i, random_unit(state));
}

// ---- attention ---------------------------------------------------------------------------------------------

static attn_case copy_case(const attn_case *c) {
    attn_case copy = *c;
    for (int i = 0; i < NUM_ARRAYS; i++) {
        const size_t num_bytes = (size_t)c->x[i].num_elements * dtype_bytes(c->x[i].dtype);
        copy.x[i].data = must_alloc(num_bytes);
        memcpy(copy.x[i].data, c->x[i].data, num_bytes);
    }
    bind(&copy);
    return copy;
}

// Tasks of one kv head add to the same keys, so they take turns; heads and batches do not.
static void race_attention(uint64_t *state, rt_dtype dtype, mask_kind mask, bool fresh) {
    const attn_shape shape = {dtype,
                              random_int(state, 1, 2),
                              random_int(state, 60, 120),
                              random_int(state, 100, 300),
                              random_int(state, 1, 9),
                              random_int(state, 1, 2),
                              8,
                              8,
                              fresh};
    attn_case c = new_case(state, shape, mask, 1);
    if (fresh) c.p.fresh = true;
    fill_random(&c.x[LSE], state, 1);
    fill_random(&c.x[DELTA], state, 1);
    attn_case one = copy_case(&c);
    for (int i = FORWARD; i <= BACKWARD; i++) {
        run_in_exact_workspace((pass)i, c.p, threads_of(WORKERS));
        run_in_exact_workspace((pass)i, one.p, no_threads());
    }
    for (int i = OUT; i <= DV; i++)
        CHECK(memcmp(c.x[i].data, one.x[i].data, (size_t)c.x[i].num_elements * dtype_bytes(c.x[i].dtype)) == 0);
    free_arrays(&one);
    free_case(&c);
}

static void race_delta(uint64_t *state, rt_dtype dtype) {
    enum { B = 2, N = 200, H = 8, DIM = 64, ROWS = B * N * H };
    const size_t num_bytes = ROWS * DIM * dtype_bytes(dtype);
    void *dout = must_alloc(num_bytes), *out = must_alloc(num_bytes);
    double *dlse = must_alloc(ROWS * sizeof(*dlse)), *delta = must_alloc(ROWS * sizeof(*delta)),
           *one = must_alloc(ROWS * sizeof(*one));
    fill_numbers(dout, dtype, ROWS * DIM, state), fill_numbers(out, dtype, ROWS * DIM, state);
    fill_numbers(dlse, RT_F64, ROWS, state);
    const rt_attn_delta_params p = {dtype, B, N, H, DIM, {N * H * DIM, H * DIM, DIM}, {N * H * DIM, H * DIM, DIM}};
    CHECK_STATUS(rt_attn_delta(&p, dout, out, dlse, delta, threads_of(WORKERS)), RT_OK);
    CHECK_STATUS(rt_attn_delta(&p, dout, out, dlse, one, no_threads()), RT_OK);
    CHECK(memcmp(delta, one, ROWS * (dtype == RT_F64 ? 8 : 4)) == 0);
    free(dout), free(out), free(dlse), free(delta), free(one);
}

// ---- sequence ----------------------------------------------------------------------------------------------

// Several runs, and rows that tasks split between them.
static void race_shard(uint64_t *state) {
    enum { S = 4096, ROW = 33, BYTES = 2 };
    char *global = must_alloc(S * ROW * BYTES), *local = must_alloc(S * ROW * BYTES),
         *back = must_alloc(S * ROW * BYTES);
    for (int64_t i = 0; i < S * ROW * BYTES; i++) global[i] = (char)random_bits(state);
    const rt_run runs[] = {{1, 2, 0, S / 2}, {0, 2, S / 2, S / 2}};
    const int64_t sizes[] = {S, ROW}, strides[] = {ROW, 1};
    const rt_shard_params p = {2, 0, BYTES, sizes, S, strides, strides, runs, 2};
    CHECK_STATUS(rt_shard(&p, global, local, threads_of(WORKERS)), RT_OK);
    CHECK_STATUS(rt_unshard(&p, local, back, threads_of(WORKERS)), RT_OK);
    CHECK(memcmp(global, back, S * ROW * BYTES) == 0);
    free(global), free(local), free(back);
}

// ---- rows --------------------------------------------------------------------------------------------------

static void race_glu(uint64_t *state, rt_dtype dtype, rt_glu_kind kind) {
    enum { ROWS = 100, COLS = 701, ALL = ROWS * COLS };
    const size_t num_bytes = ALL * dtype_bytes(dtype);
    void *x[2][3]; // gate, up, prod: on threads, and on one
    const rt_glu_params p = {dtype, kind, ROWS, COLS, COLS, COLS, COLS};
    for (int i = 0; i < 3; i++) {
        x[0][i] = must_alloc(num_bytes), x[1][i] = must_alloc(num_bytes);
        fill_numbers(x[0][i], dtype, ALL, state);
        memcpy(x[1][i], x[0][i], num_bytes);
    }
    for (int i = 0; i < 2; i++) {
        const rt_parallel parallel = i == 0 ? threads_of(WORKERS) : no_threads();
        CHECK_STATUS(rt_glu_fwd(&p, x[i][0], x[i][1], x[i][2], parallel), RT_OK);
        CHECK_STATUS(rt_glu_bwd(&p, x[i][0], x[i][1], x[i][2], parallel), RT_OK);
    }
    for (int i = 0; i < 3; i++) {
        CHECK(memcmp(x[0][i], x[1][i], num_bytes) == 0);
        free(x[0][i]), free(x[1][i]);
    }
}

static void race_loss(uint64_t *state, rt_dtype dtype) {
    enum { T = 70, V = 1201 };
    const size_t num_bytes = T * V * dtype_bytes(dtype);
    void *logits[2];
    double loss[2][T] = {{0}}, lse[2][T] = {{0}};
    int64_t labels[T];
    for (int64_t t = 0; t < T; t++) labels[t] = t % 7 ? random_int(state, 0, V - 1) : -100;
    for (int i = 0; i < 2; i++) logits[i] = must_alloc(num_bytes);
    fill_numbers(logits[0], dtype, T * V, state);
    memcpy(logits[1], logits[0], num_bytes);
    const rt_cross_entropy_params p = {dtype, T, V, V, -100, 0.1, 30, 1e-4, true};
    for (int i = 0; i < 2; i++)
        CHECK_STATUS(rt_cross_entropy_fwd_bwd(&p, logits[i], labels, loss[i], lse[i],
                                              i == 0 ? threads_of(WORKERS) : no_threads()),
                     RT_OK);
    CHECK(memcmp(logits[0], logits[1], num_bytes) == 0);
    CHECK(memcmp(loss[0], loss[1], sizeof(loss[0])) == 0 && memcmp(lse[0], lse[1], sizeof(lse[0])) == 0);
    for (int i = 0; i < 2; i++) free(logits[i]);
}

static void race_dropout(uint64_t *state, rt_dtype dtype) {
    enum { T = 100, F = 701 };
    const size_t num_bytes = T * F * dtype_bytes(dtype);
    void *x = must_alloc(num_bytes), *y[2];
    int64_t places[2 * T];
    for (int64_t i = 0; i < 2 * T; i++) places[i] = random_int(state, 0, 999);
    fill_numbers(x, dtype, T * F, state);
    const rt_dropout_params p = {dtype, T, F, F, 0.25, 1, 2, 3};
    for (int i = 0; i < 2; i++) {
        y[i] = must_alloc(num_bytes);
        CHECK_STATUS(rt_dropout(&p, x, places, y[i], i == 0 ? threads_of(WORKERS) : no_threads()), RT_OK);
    }
    CHECK(memcmp(y[0], y[1], num_bytes) == 0);
    free(x), free(y[0]), free(y[1]);
}

// The instruction set is chosen by whichever thread asks first.
static void ask_isa(void *ctx, int64_t worker) {
    (void)ctx, (void)worker;
    rt_isa isa;
    rt_cpu_isa(&isa);
}

int main(int argc, char **argv) {
    run_threads(NULL, WORKERS, ask_isa, NULL);
    check_isa_or_skip();
    const int64_t rounds = argc > 1 ? strtoll(argv[1], NULL, 10) : 2;
    uint64_t state = argc > 2 ? strtoull(argv[2], NULL, 10) : 0;
    rt_isa isa;
    double flops;
    CHECK_STATUS(rt_cpu_isa(&isa), RT_OK);
    CHECK_STATUS(rt_multiply_add(isa, 1000, &flops, threads_of(WORKERS)), RT_OK);
    for (int64_t round = 0; round < rounds; round++)
        for (int i = 0; i < NUM_DTYPES; i++) {
            race_attention(&state, all_dtypes[i], MASK_CAUSAL, round % 2);
            race_attention(&state, all_dtypes[i], MASK_DOCUMENTS, round % 2 == 0);
            race_attention(&state, all_dtypes[i], (mask_kind)random_int(&state, 0, NUM_MASKS - 1), true);
            race_delta(&state, all_dtypes[i]);
            race_glu(&state, all_dtypes[i], (rt_glu_kind)i);
            race_loss(&state, all_dtypes[i]);
            race_dropout(&state, all_dtypes[i]);
            race_shard(&state);
        }
    return check_finish();
}
