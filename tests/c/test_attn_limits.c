// Attention at its limits: infinities and NaN, any number of workers, the workspace, refusals.
#include "attn_check.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

// ---- numbers that are not finite ---------------------------------------------------------------------------

static void test_infinities_and_nans_stay_where_the_reference_puts_them(void) {
    const double poisons[] = {NAN, INFINITY, -INFINITY};
    uint64_t state = 8;
    for (int round = 0; round < 48; round++) {
        attn_shape shape = random_shape(&state);
        shape.one_run = round % 3 == 0;
        if (round % 8 == 1) shape.group = 9, shape.num_queries = 30; // query tiles of 8 heads, then of 1
        attn_case c = new_case(&state, shape, (mask_kind)(round % NUM_MASKS), 1);
        c.p.softcap = round % 5 == 0 ? 4 : 0;
        if (round / 4 % 2 == 1) draw_key_mask(&state, &c, shape.seq_len);
        if (round % 3 == 1) draw_dropout(&state, &c);
        tensor *x = &c.x[Q + round % 4]; // q, k, v or dout
        for (int i = 0; i < 3 && x->size[1] > 0; i++)
            set(x, random_int(&state, 0, x->size[0] - 1), random_int(&state, 0, x->size[1] - 1),
                random_int(&state, 0, x->size[2] - 1), random_int(&state, 0, x->size[3] - 1),
                poisons[random_int(&state, 0, 2)]);
        check_case(&c, &state, 1 + round % 2, no_threads());
        free_case(&c);
    }
}

// Keys and queries without a partner may hold anything; no result shows it.
static void test_unattended_values_leave_no_trace(void) {
    uint64_t state = 9;
    for (int round = 0; round < 8; round++) {
        const rt_dtype dtype = all_dtypes[round % NUM_DTYPES];
        attn_case c = new_case(&state, (attn_shape){dtype, 1, 20, 40, 2, 1, 9, 9, true}, MASK_FULL, 1);
        // Keys 10..29 are attended; the first five queries attend none.
        for (int64_t token = 0; token < 20; token++) {
            c.begin[token] = 10;
            c.end[token] = token < 5 ? 10 : 11 + (int32_t)token;
        }
        for (int64_t d = 0; d < 9; d++) {
            for (int64_t head = 0; head < 2; head++)
                for (int64_t token = 0; token < 5; token++) {
                    set(&c.x[Q], 0, token, head, d, NAN);
                    set(&c.x[DOUT], 0, token, head, d, INFINITY);
                }
            for (int64_t key = 0; key < 40; key++)
                if (key < 10 || key >= 30) set(&c.x[K], 0, key, 0, d, INFINITY), set(&c.x[V], 0, key, 0, d, NAN);
        }
        check_case(&c, &state, 1, no_threads());
        for (int i = OUT; i <= DV; i++)
            if (i != LSE && i != DELTA)
                FOR_EACH_ELEMENT(&c.x[i], b, token, head, d) CHECK(isfinite(get(&c.x[i], b, token, head, d)));
        free_case(&c);
    }
}

// Tiles of keys whose intervals meet no query are skipped, not masked: the sanitizer sees a read of them.
static void test_tiles_that_no_query_meets_stay_unread(void) {
#ifdef __SANITIZE_ADDRESS__
    uint64_t state = 25;
    for (int i = 0; i < NUM_DTYPES; i++) {
        attn_case c = new_case(&state, (attn_shape){all_dtypes[i], 1, 40, 512, 2, 1, 16, 16, true}, MASK_FULL, 1);
        draw_key_mask(&state, &c, 512);
        c.p.key_mask_batch_stride = 0;
        for (int64_t token = 0; token < 40; token++) c.q_positions[token] = 600 + token;
        for (int64_t key = 0; key < 512;
             key++) { // those of two tiles end with the first query, or begin after the last
            c.key_begin[key] = key < 256 ? 0 : 640, c.key_end[key] = key < 256 ? 600 : 700;
            if (key < 128 || key >= 384) c.key_begin[key] = 601, c.key_end[key] = 630;
        }
        const size_t row_bytes = 16 * dtype_bytes(c.p.dtype);
        for (int pass = FORWARD; pass <= BACKWARD; pass++) {
            for (int64_t key = 128; key < 384; key++)
                for (int x = K; x <= V; x++)
                    __asan_poison_memory_region(
                        (char *)c.x[x].data + (size_t)row_of(&c.x[x], 0, key, 0) * dtype_bytes(c.p.dtype), row_bytes);
            run_in_calls((enum pass)pass, &c, 1, threads_of(2));
            for (int x = K; x <= V; x++)
                __asan_unpoison_memory_region(c.x[x].data, (size_t)c.x[x].num_elements * dtype_bytes(c.p.dtype));
        }
        free_case(&c);
    }
#endif
}

// One query and three keys; the scores are q times the keys.
static void check_scores(double q, const double keys[3], double want_out, double want_lse) {
    uint64_t state = 10;
    for (int i = 0; i < NUM_DTYPES; i++) {
        attn_case c = new_case(&state, (attn_shape){all_dtypes[i], 1, 1, 3, 1, 1, 1, 1, true}, MASK_FULL, 1);
        set(&c.x[Q], 0, 0, 0, 0, q);
        for (int64_t key = 0; key < 3; key++) {
            set(&c.x[K], 0, key, 0, 0, keys[key]);
            set(&c.x[V], 0, key, 0, 0, (double)key);
        }
        run_in_calls(FORWARD, &c, 1, no_threads());
        CHECK_CLOSE(get(&c.x[OUT], 0, 0, 0, 0), want_out, 4 * unit_roundoff(RT_F32));
        CHECK_CLOSE(get(&c.x[LSE], 0, 0, 0, 0), want_lse, 4 * unit_roundoff(RT_F32) * (1 + fabs(want_lse)));
        free_case(&c);
    }
}

// The first query's scores are all -inf, and one of the values that it attends is infinite: so is no number of out that
// it weighs, in one call or in several, whichever comes first; its lse is that of no weight.
static void test_an_infinite_value_of_no_weight(void) {
    uint64_t state = 12;
    for (int i = 0; i < NUM_DTYPES; i++)
        for (int64_t infinite = 0; infinite < 3; infinite++)
            for (int num_weights = 0; num_weights < 2; num_weights++) {
                attn_case c = new_case(&state, (attn_shape){all_dtypes[i], 1, 1, 3, 1, 1, 1, 1, true}, MASK_FULL, 1);
                for (int64_t key = 0; key < 3; key++) c.runs[key] = (rt_run){key, 1, key, 1};
                c.p.num_k_runs = 3;
                set(&c.x[Q], 0, 0, 0, 0, 1);
                for (int64_t key = 0; key < 3; key++) {
                    const bool weighs = num_weights > 0 && key == (infinite + 1) % 3;
                    set(&c.x[K], 0, key, 0, 0, weighs ? 0 : -INFINITY);
                    set(&c.x[V], 0, key, 0, 0, key == infinite ? INFINITY : 1);
                }
                for (int num_calls = 1; num_calls <= 3; num_calls += 2) {
                    fill(&c.x[OUT], 0), fill(&c.x[LSE], -INFINITY);
                    run_in_calls(FORWARD, &c, num_calls, no_threads());
                    CHECK(isnan(get(&c.x[OUT], 0, 0, 0, 0)));
                    CHECK(get(&c.x[LSE], 0, 0, 0, 0) == (num_weights > 0 ? 0 : -INFINITY));
                }
                fill(&c.x[OUT], 0), fill(&c.x[LSE], -INFINITY);
                CHECK_STATUS(run_reference(FORWARD, &c), RT_OK);
                CHECK(isnan(get(&c.x[OUT], 0, 0, 0, 0)));
                free_case(&c);
            }
}

static void test_infinite_scores(void) {
    check_scores(1, (const double[]){-INFINITY, -INFINITY, -INFINITY}, 0, -INFINITY);
    check_scores(1, (const double[]){-INFINITY, 0, -INFINITY}, 1, 0);
    check_scores(1, (const double[]){0, INFINITY, 0}, NAN, NAN);
    check_scores(INFINITY, (const double[]){1, 1, 1}, NAN, NAN);
    check_scores(0, (const double[]){1, INFINITY, 1}, NAN, NAN);
    check_scores(-1, (const double[]){32768, -32768, 32768}, 1, 32768); // exp would overflow, or be 0 for all
    check_scores(1, (const double[]){-32768, -32768, -32768}, 1, -32768 + log(3));
}

// ---- workers -----------------------------------------------------------------------------------------------

// A caller without threads: runs the workers one by one, the last one first.
static void run_backwards(void *pool, int64_t num_workers, void (*work)(void *, int64_t), void *ctx) {
    (void)pool;
    for (int64_t worker = num_workers - 1; worker >= 0; worker--) work(ctx, worker);
}

// Several tasks add to the same keys, through tiles that do not line up. In the first case the last tokens, whose task
// runs first, attend all keys, the first tokens only the last run, and the tokens between none: a task that failed to
// wait for all earlier ones would add too early.
static void test_any_workers_give_the_same_bits_every_time(void) {
    uint64_t state = 11;
    const rt_parallel lent[] = {threads_of(2),
                                threads_of(4),
                                threads_of(7),
                                {.run = run_backwards, .num_workers = 3},
                                {.run = run_backwards, .num_workers = 0}};
    static const rt_dtype dtypes[] = {RT_F32, RT_F64, RT_F32, RT_BF16};
    for (int i = 0; i < 4; i += is_model() ? 3 : 1) {
        const attn_shape shape = {dtypes[i], 1, 100, 300, 24, 1, 6, 5, i < 2};
        attn_case c = new_case(&state, shape, i == 0 ? MASK_FULL : MASK_CAUSAL, 1);
        if (i == 0) {
            c.runs[0].length = 256;
            c.runs[1] = (rt_run){256, 1, 256, 44};
            c.p.num_k_runs = 2;
        }
        for (int token = 0; i == 0 && token < 67; token++) {
            c.begin[token] = 256;
            c.end[token] = token < 34 ? 300 : 0;
        }
        if (i == 2) draw_dropout(&state, &c);
        fill_random(&c.x[LSE], &state, 1);
        attn_case one = widen(&c, &state); // one worker's results replace its arrays
        for (int repeat = 0; repeat <= 5; repeat++) {
            attn_case again = c;
            for (int j = OUT; j <= DV; j++) {
                const size_t num_bytes = (size_t)c.x[j].num_elements * dtype_bytes(c.x[j].dtype);
                again.x[j].data = must_alloc(num_bytes);
                memcpy(again.x[j].data, c.x[j].data, num_bytes);
            }
            const rt_parallel parallel = repeat == 0 ? no_threads() : lent[repeat % 5];
            for (int pass = FORWARD; pass <= BACKWARD; pass++) {
                rt_attn_block *p = &again.p;
                p->workspace_bytes = workspace_bytes((enum pass)pass, p, 7);
                p->workspace = aligned_alloc(64, (size_t)p->workspace_bytes);
                memset(p->workspace, 0x7f, (size_t)p->workspace_bytes); // leftovers of other calls
                CHECK_STATUS(run((enum pass)pass, &again, parallel), RT_OK);
                free(p->workspace);
            }
            for (int j = OUT; j <= DV; j++) {
                if (repeat == 0) {
                    free(one.x[j].data);
                    one.x[j] = again.x[j];
                    continue;
                }
                CHECK(memcmp(one.x[j].data, again.x[j].data, (size_t)c.x[j].num_elements * dtype_bytes(c.x[j].dtype)) ==
                      0);
                free(again.x[j].data);
            }
        }
        free_arrays(&one);
        free_case(&c);
    }
}

// ---- refusals ----------------------------------------------------------------------------------------------

static void check_workspace(pass pass, attn_case c, rt_parallel parallel, int64_t num_workers) {
    rt_attn_block *p = &c.p;
    const int64_t num_bytes = workspace_bytes(pass, p, num_workers);
    char *workspace = aligned_alloc(64, (size_t)num_bytes + 64);
    p->workspace = workspace, p->workspace_bytes = num_bytes;
    CHECK_STATUS(run(pass, &c, parallel), RT_OK);
    p->workspace_bytes = num_bytes - 1;
    CHECK_STATUS(run(pass, &c, parallel), RT_WORKSPACE);
    p->workspace_bytes = -1;
    CHECK_STATUS(run(pass, &c, parallel), RT_WORKSPACE);
    p->workspace = workspace + 32, p->workspace_bytes = num_bytes;
    CHECK_STATUS(run(pass, &c, parallel), RT_WORKSPACE);
    p->workspace = NULL;
    CHECK_STATUS(run(pass, &c, parallel), RT_WORKSPACE);
    free(workspace);
}

static void test_workspace_has_exactly_the_size_asked_for(void) {
    uint64_t state = 12;
    attn_case c = new_case(&state, (attn_shape){RT_F32, 1, 70, 90, 2, 1, 8, 8, false}, MASK_FULL, 1);
    for (int pass = FORWARD; pass <= BACKWARD; pass++) {
        check_workspace((enum pass)pass, c, threads_of(3), 3);
        check_workspace((enum pass)pass, c, (rt_parallel){.num_workers = 3}, 1); // no run() to start them
        check_workspace((enum pass)pass, c, (rt_parallel){.run = run_backwards}, 1);
        CHECK(workspace_bytes((enum pass)pass, &c.p, 3) > workspace_bytes((enum pass)pass, &c.p, 1));
        CHECK_INT(workspace_bytes((enum pass)pass, &c.p, 0), 0);
        rt_attn_block bad = c.p;
        bad.head_dim = 0;
        CHECK_INT(workspace_bytes((enum pass)pass, &bad, 1), 0);
        bad = c.p, bad.batch = INT64_MAX;
        CHECK_INT(workspace_bytes((enum pass)pass, &bad, 1), 0);
        CHECK_INT(workspace_bytes((enum pass)pass, &c.p, INT64_MAX), 0);
        CHECK_STATUS(run((enum pass)pass, &c, (rt_parallel){.run = run_backwards, .num_workers = INT64_MAX}),
                     RT_TOO_LARGE);
        CHECK_INT(workspace_bytes((enum pass)pass, NULL, 1), 0);
    }
    CHECK_STATUS(rt_attn_fwd(NULL, no_threads()), RT_BAD_POINTER);
    CHECK_STATUS(rt_attn_bwd(NULL, no_threads()), RT_BAD_POINTER);
    free_case(&c);
}

static rt_status over_block(pass pass, attn_case c, const rt_attn_block *block) {
    c.p = *block;
    return run(pass, &c, no_threads());
}

static void test_malformed_params_are_refused(void) {
    uint64_t state = 13;
    attn_case c = new_case(&state, (attn_shape){RT_F32, 2, 5, 9, 2, 2, 4, 3, true}, MASK_FULL, 1);
    const attn_case kept = widen(&c, &state);
#define REFUSED_FORWARD(field, value, status)                                                                          \
    CHECK_REFUSED(rt_attn_fwd_params, forward_of(&c), field, value, rt_attn_fwd(&bad, no_threads()), status)
#define REFUSED_BACKWARD(field, value, status)                                                                         \
    CHECK_REFUSED(rt_attn_bwd_params, backward_of(&c), field, value, rt_attn_bwd(&bad, no_threads()), status)
#define REFUSED_BY(pass, field, value, status)                                                                         \
    CHECK_REFUSED(rt_attn_block, c.p, field, value, over_block(pass, c, &bad), status)
#define REFUSED(field, value, status)                                                                                  \
    do {                                                                                                               \
        REFUSED_BY(FORWARD, field, value, status);                                                                     \
        REFUSED_BY(BACKWARD, field, value, status);                                                                    \
    } while (0)
    REFUSED(dtype, (rt_dtype)4, RT_BAD_DTYPE);
    REFUSED(batch, -1, RT_BAD_SHAPE);
    REFUSED(num_queries, -1, RT_BAD_SHAPE);
    REFUSED(num_keys, -1, RT_BAD_SHAPE);
    REFUSED(num_k_runs, -1, RT_BAD_SHAPE);
    REFUSED(num_heads, 0, RT_BAD_HEADS);
    REFUSED(num_heads, 3, RT_BAD_HEADS);
    REFUSED(num_kv_heads, 0, RT_BAD_HEADS);
    REFUSED(head_dim, 0, RT_BAD_HEAD_DIM);
    REFUSED(head_dim, RT_MAX_HEAD_DIM + 1, RT_BAD_HEAD_DIM);
    REFUSED(v_head_dim, 0, RT_BAD_HEAD_DIM);
    REFUSED(v_head_dim, RT_MAX_HEAD_DIM + 1, RT_BAD_HEAD_DIM);
    REFUSED(scale, NAN, RT_BAD_SCALE);
    REFUSED(scale, INFINITY, RT_BAD_SCALE);
    REFUSED(softcap, -1, RT_BAD_SCALE);
    REFUSED(softcap, INFINITY, RT_BAD_SCALE);
    REFUSED(dropout, NAN, RT_BAD_PROBABILITY);
    REFUSED(dropout, -0.1, RT_BAD_PROBABILITY);
    REFUSED(dropout, 1.1, RT_BAD_PROBABILITY);
    c.p.dropout = 0, c.p.key_begin = c.p.key_end = c.begin;
    REFUSED(q_positions, NULL, RT_BAD_POINTER);
    c.p.key_begin = c.p.key_end = NULL;
    draw_dropout(&state, &c);
    REFUSED(dropout_rows, NULL, RT_BAD_POINTER);
    REFUSED(q_positions, (const int64_t *)((uintptr_t)c.q_positions + 4), RT_BAD_POINTER);
    REFUSED_BY(FORWARD, q_positions, c.x[OUT].data, RT_SHARED_MEMORY);
    c.p.dropout = 0; // and what else there is for it is not read
    REFUSED(q, NULL, RT_BAD_POINTER);
    REFUSED(k, NULL, RT_BAD_POINTER);
    REFUSED(v, NULL, RT_BAD_POINTER);
    REFUSED(begin, NULL, RT_BAD_POINTER);
    REFUSED(end, NULL, RT_BAD_POINTER);
    REFUSED_FORWARD(lse, NULL, RT_BAD_POINTER);
    REFUSED_BACKWARD(lse, NULL, RT_BAD_POINTER);
    REFUSED(k_runs, NULL, RT_BAD_POINTER);
    REFUSED(num_keys, 8, RT_BAD_RUN);
    REFUSED(batch, INT64_MAX, RT_TOO_LARGE);
    REFUSED(num_keys, INT64_C(1) << 60, RT_TOO_LARGE);
    REFUSED(q_stride[0], INT64_MIN, RT_TOO_LARGE);
    REFUSED(mask_batch_stride, 3, RT_BAD_MASK);
    REFUSED(key_begin, c.p.begin, RT_BAD_MASK);
    REFUSED(key_end, c.p.end, RT_BAD_MASK);
    REFUSED(q, (const char *)c.x[Q].data + 1, RT_BAD_POINTER);
    REFUSED_FORWARD(out, c.x[LSE].data, RT_SHARED_MEMORY);
    REFUSED_FORWARD(out, c.x[Q].data, RT_SHARED_MEMORY);
    REFUSED_BACKWARD(dk, c.x[DV].data, RT_SHARED_MEMORY);
    REFUSED_BACKWARD(dq, c.x[K].data, RT_SHARED_MEMORY);
    REFUSED_BACKWARD(dv_stride[0], INT64_MAX, RT_TOO_LARGE);
    REFUSED_FORWARD(out, NULL, RT_BAD_POINTER);
    c.runs[0].length--;
    REFUSED_BACKWARD(fresh, true, RT_BAD_FRESH);
    c.runs[0].length++;
    REFUSED_BACKWARD(rounded_dk, c.x[DOUT].data, RT_BAD_FRESH);
    REFUSED_FORWARD(rounded_out, (char *)c.x[OUT].data + 1, RT_BAD_POINTER);
    REFUSED_FORWARD(rounded_out, c.x[OUT].data, RT_SHARED_MEMORY);
    REFUSED_FORWARD(rounded_out, c.x[V].data, RT_SHARED_MEMORY);
    c.fresh = true;
    REFUSED_BACKWARD(rounded_dv, c.x[DK].data, RT_BAD_FRESH);
    c.rounded[DK] = c.x[DV].data;
    REFUSED_BACKWARD(rounded_dv, c.x[DK].data, RT_SHARED_MEMORY);
    c.fresh = false, c.rounded[DK] = NULL;
    REFUSED_FORWARD(out_stride[1], 0, RT_BAD_STRIDE);
    REFUSED_BACKWARD(dout, NULL, RT_BAD_POINTER);
    REFUSED_BACKWARD(delta, NULL, RT_BAD_POINTER);
    REFUSED_BACKWARD(dq, NULL, RT_BAD_POINTER);
    REFUSED_BACKWARD(dk, NULL, RT_BAD_POINTER);
    REFUSED_BACKWARD(dv, NULL, RT_BAD_POINTER);
    REFUSED_BACKWARD(dq_stride[2], 0, RT_BAD_STRIDE);
    REFUSED_BACKWARD(dk_stride[1], 3, RT_BAD_STRIDE);
    REFUSED_BACKWARD(dv_stride[0], 1, RT_BAD_STRIDE);
#undef REFUSED
#undef REFUSED_BY
#undef REFUSED_BACKWARD
#undef REFUSED_FORWARD
    for (int i = 0; i < NUM_ARRAYS; i++)
        if (i != DELTA) FOR_EACH_ELEMENT(&kept.x[i], b, token, head, d)
    CHECK(get(&c.x[i], b, token, head, d) == get(&kept.x[i], b, token, head, d));
    free_arrays((attn_case *)&kept);
    free_case(&c);
}

int main(void) {
    check_isa_or_skip();
    test_infinities_and_nans_stay_where_the_reference_puts_them();
    test_unattended_values_leave_no_trace();
    test_tiles_that_no_query_meets_stay_unread();
    test_infinite_scores();
    test_an_infinite_value_of_no_weight();
    test_any_workers_give_the_same_bits_every_time();
    test_workspace_has_exactly_the_size_asked_for();
    test_malformed_params_are_refused();
    return check_finish();
}
