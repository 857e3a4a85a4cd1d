// The attention kernels against the f64 reference, and the reference against the derivative of its own forward, for any
// shape, memory layout, mask, runs and dtype.
#include "attn_check.h"

// ---- the reference -----------------------------------------------------------------------------------------

static void test_reference_of_two_keys_is_the_formula(void) {
    // Scores 0 and log 3: weights 1/4 and 3/4, lse = log 4. Then a third key of score log 4 takes half of all.
    double q = 2, k[3] = {0, log(3) / 2, log(4) / 2}, v[3] = {8, 4, 1}, out = 0, lse = -INFINITY;
    const int32_t begin = 0, end = 2, all = 3;
    const rt_run runs[] = {{0, 1, 0, 2}, {2, 1, 2, 1}};
    rt_attn_block b = {.dtype = RT_F64, .num_keys = 3, .num_k_runs = 2, .scale = 1, .q = &q, .k = k, .v = v};
    b.batch = b.num_queries = b.num_heads = b.num_kv_heads = b.head_dim = b.v_head_dim = 1;
    for (int i = 0; i < 3; i++) b.k_stride[i] = b.v_stride[i] = i == 0 ? 3 : 1;
    b.begin = &begin, b.end = &end, b.k_runs = runs;
    CHECK_STATUS(rt_attn_fwd_reference(&(rt_attn_fwd_params){.block = b, .out = &out, .lse = &lse}), RT_OK);
    CHECK_CLOSE(out, 5, 1e-15);
    CHECK_CLOSE(lse, log(4), 1e-15);
    b.k_runs = runs + 1, b.num_k_runs = 1, b.end = &all;
    CHECK_STATUS(rt_attn_fwd_reference(&(rt_attn_fwd_params){.block = b, .out = &out, .lse = &lse}), RT_OK);
    CHECK_CLOSE(out, 3, 1e-15);
    CHECK_CLOSE(lse, log(8), 1e-15);
    double capped_out = 0, capped_lse = -INFINITY; // tanh(log(3) / 2) = 1/2: a score of 1
    b.k_runs = runs, b.end = &end, b.scale = 0.5, b.softcap = 2, k[1] = log(3);
    CHECK_STATUS(rt_attn_fwd_reference(&(rt_attn_fwd_params){b, false, &capped_out, &capped_lse, {0}, NULL}), RT_OK);
    CHECK_CLOSE(capped_lse, log(1 + exp(1)), 1e-15);
    CHECK_CLOSE(capped_out, (8 + 4 * exp(1)) / (1 + exp(1)), 2e-15);
}

// L = sum of dout * out + sum of dlse * lse, as a function of the inputs.
static double loss_of(const attn_case *c, const tensor *dlse) {
    double loss = 0;
    FOR_EACH_ELEMENT(&c->x[OUT], b, token, head, d) set((tensor *)&c->x[OUT], b, token, head, d, 0);
    FOR_EACH_ELEMENT(&c->x[LSE], b, token, head, d) set((tensor *)&c->x[LSE], b, token, head, d, -INFINITY);
    CHECK_STATUS(run_reference(FORWARD, c), RT_OK);
    FOR_EACH_ELEMENT(&c->x[OUT], b, token, head, d)
    loss += get(&c->x[DOUT], b, token, head, d) * get(&c->x[OUT], b, token, head, d);
    FOR_EACH_ELEMENT(dlse, b, token, head, d) {
        const double lse = get(&c->x[LSE], b, token, head, d);
        if (lse > -INFINITY) loss += get(dlse, b, token, head, d) * lse;
    }
    return loss;
}

static void test_reference_backward_is_the_derivative_of_its_forward(void) {
    uint64_t state = 1;
    for (int round = 0; round < 18; round++) {
        const attn_shape shape = {RT_F64,
                                  1,
                                  random_int(&state, 1, 4),
                                  random_int(&state, 1, 8),
                                  random_int(&state, 1, 2),
                                  random_int(&state, 1, 2),
                                  random_int(&state, 1, 3),
                                  random_int(&state, 1, 3),
                                  false};
        attn_case c = new_case(&state, shape, (mask_kind)(round % NUM_MASKS), 1);
        c.p.softcap = round % 2 ? 0.8 : 0;
        if (round % 4 == 1) draw_key_mask(&state, &c, shape.seq_len);
        if (round % 3 == 2) draw_dropout(&state, &c), c.p.dropout = 0.5; // not 1, which leaves nothing to compare
        tensor dlse = copy_as(&c.x[LSE], RT_F64, &state);
        fill_random(&dlse, &state, 1);
        loss_of(&c, &dlse);
        FOR_EACH_ELEMENT(&dlse, b, token, head, unit) {
            double delta = -get(&dlse, b, token, head, unit);
            for (int64_t d = 0; d < shape.v_head_dim; d++)
                delta += get(&c.x[DOUT], b, token, head, d) * get(&c.x[OUT], b, token, head, d);
            set(&c.x[DELTA], b, token, head, unit, delta);
        }
        for (int i = DQ; i <= DV; i++) fill(&c.x[i], 0);
        CHECK_STATUS(run_reference(BACKWARD, &c), RT_OK);
        for (int i = 0; i < 3; i++) {
            tensor *x = &c.x[Q + i];
            FOR_EACH_ELEMENT(x, b, token, head, d) {
                const double kept = get(x, b, token, head, d), h = 1e-5;
                set(x, b, token, head, d, kept + h);
                const double above = loss_of(&c, &dlse);
                set(x, b, token, head, d, kept - h);
                const double below = loss_of(&c, &dlse);
                set(x, b, token, head, d, kept);
                // h^2 / 6 times a third derivative of about 10, and 2^-53 times a loss of about 10 over h.
                CHECK_CLOSE(get(&c.x[DQ + i], b, token, head, d), (above - below) / (2 * h), 1e-9);
            }
        }
        free(dlse.data);
        free_case(&c);
    }
}

// ---- the kernels -------------------------------------------------------------------------------------------

// Any mask over any runs, in one call or several, into a state that may hold earlier blocks.
static void test_random_problems_agree_with_the_reference(void) {
    uint64_t state = 2;
    for (int round = 0; round < (is_model() ? 45 : 90); round++) {
        const double magnitudes[] = {0.1, 1, 4};
        attn_case c = new_case(&state, random_shape(&state), (mask_kind)(round % NUM_MASKS), magnitudes[round % 3]);
        if (round % 4 == 1) c.p.softcap = 1 + 20 * fabs(random_unit(&state));
        if (round % 5 == 1) c.p.scale = 2 * random_unit(&state);
        if (round % 2 == 1) draw_dropout(&state, &c);
        if (round % 3 == 1) {
            fill_random(&c.x[OUT], &state, 1);
            fill_random(&c.x[LSE], &state, 4);
        }
        check_case(&c, &state, 1 + round % 3, threads_of(1 + round % 4));
        free_case(&c);
    }
}

// The same with intervals of keys, in tiles of any size: few keys, and so many that whole tiles are skipped.
static void test_two_sides_agree_with_the_reference(void) {
    uint64_t state = 24;
    for (int round = 0; round < (is_model() ? 60 : 120); round++) {
        attn_shape shape = random_shape(&state);
        if (round % 6 == 0) shape.num_queries = 150, shape.seq_len = 700, shape.one_run = true, shape.head_dim = 3;
        attn_case c = new_case(&state, shape, (mask_kind)(round % NUM_MASKS), 1);
        const bool fresh = round % 5 == 2;
        if (fresh) make_fresh(&c, shape.seq_len);
        draw_key_mask(&state, &c, shape.seq_len);
        if (round % 4 == 1) c.p.softcap = 1 + 20 * fabs(random_unit(&state));
        if (round % 3 == 1) draw_dropout(&state, &c);
        if (round % 7 == 1 && !fresh) {
            fill_random(&c.x[OUT], &state, 1);
            fill_random(&c.x[LSE], &state, 4);
        }
        check_case(&c, &state, 1 + round % 3, threads_of(1 + round % 4));
        free_case(&c);
    }
}

// In one call or several: fresh outputs are never read, and are written even for queries and keys without a partner.
static void test_fresh_outputs_are_written(void) {
    uint64_t state = 21;
    for (int round = 0; round < 4 * NUM_MASKS; round++) {
        const attn_shape shape = random_shape(&state);
        attn_case c = new_case(&state, shape, (mask_kind)(round % NUM_MASKS), 1);
        make_fresh(&c, shape.seq_len);
        check_case(&c, &state, 1 + round % 3, threads_of(1 + round % 4));
        free_case(&c);
    }
}

static void run_in_two_threads(pass pass, const attn_case *c, int64_t num_calls) {
    run_in_calls(pass, c, num_calls, threads_of(2));
}

static void test_rounded_results_are_rounded_once(void) {
    uint64_t state = 23;
    for (int round = 0; round < 4 * NUM_MASKS; round++) {
        const attn_shape shape = random_shape(&state);
        attn_case c = new_case(&state, shape, (mask_kind)(round % NUM_MASKS), 1);
        fill_random(&c.x[OUT], &state, 1);
        fill_random(&c.x[LSE], &state, 4);
        fill_random(&c.x[DELTA], &state, 1);
        check_rounding(FORWARD, &c, 1 + round % 3, run_in_two_threads);
        make_fresh(&c, shape.seq_len);
        check_rounding(FORWARD, &c, 1 + round % 3, run_in_two_threads);
        check_rounding(BACKWARD, &c, 1, run_in_two_threads);
        free_case(&c);
    }
}

static void test_reference_writes_fresh_outputs(void) {
    uint64_t state = 22;
    attn_case fresh = new_case(&state, (attn_shape){RT_F64, 2, 7, 30, 2, 2, 5, 3, false}, MASK_SOME_EMPTY, 1);
    make_fresh(&fresh, 30);
    fill(&fresh.x[DELTA], 0);
    for (int i = DK; i <= DV; i++) fill(&fresh.x[i], 0);
    attn_case filled = widen(&fresh, &state);
    for (int pass = FORWARD; pass <= BACKWARD; pass++) {
        if (pass == FORWARD) poison_fresh(&fresh, &filled, OUT, LSE);
        if (pass == BACKWARD) poison_fresh(&fresh, &filled, DK, DV);
        CHECK_STATUS(run_reference((enum pass)pass, &fresh), RT_OK);
        CHECK_STATUS(run_reference((enum pass)pass, &filled), RT_OK);
    }
    for (int i = OUT; i <= DV; i++)
        if (i != DELTA) FOR_EACH_ELEMENT(&fresh.x[i], b, token, head, d)
    CHECK(get(&fresh.x[i], b, token, head, d) == get(&filled.x[i], b, token, head, d));
    free_arrays(&filled);
    free_case(&fresh);
}

static void test_every_head_dim_has_its_tail(void) {
    uint64_t state = 3;
    const int64_t dims[] = {1,  2,  3,   7,   15,  16,  17,  31,  33,  63,  64,  65,
                            80, 96, 127, 128, 129, 191, 192, 255, 256, 257, 384, 512};
    enum { NUM_DIMS = sizeof(dims) / sizeof(dims[0]) };
    for (int i = 0; i < NUM_DIMS; i++) {
        const attn_shape shape = {all_dtypes[i % NUM_DTYPES],   1,    9, 21, 2, 1, dims[i],
                                  dims[(i * 8 + 5) % NUM_DIMS], false};
        attn_case c = new_case(&state, shape, MASK_CAUSAL, 1);
        check_case(&c, &state, 1, no_threads());
        free_case(&c);
    }
}

// A query tile holds up to 384 rows of 8 or more heads, a tile of keys 128: one less, as many, and one more of each.
static void test_many_heads_queries_and_keys_cross_every_edge(void) {
    uint64_t state = 4;
    const attn_shape shapes[] = {
        {RT_F32, 1, 1, 30, 400, 1, 4, 5, false},   {RT_BF16, 1, 2, 30, 200, 1, 4, 5, false},
        {RT_F32, 1, 50, 130, 9, 1, 8, 8, false},   {RT_F16, 1, 50, 130, 17, 1, 3, 9, false},
        {RT_F64, 1, 49, 129, 8, 1, 8, 8, false},   {RT_F32, 1, 383, 40, 1, 1, 8, 8, false},
        {RT_F32, 1, 384, 127, 1, 1, 8, 8, false},  {RT_F32, 1, 385, 128, 1, 1, 8, 8, false},
        {RT_BF16, 3, 65, 257, 1, 3, 16, 8, false}, {RT_F32, 1, 1, 400, 1, 2, 8, 8, false},
        {RT_F32, 1, 96, 300, 4, 1, 8, 8, false},   {RT_F32, 1, 130, 200, 3, 1, 8, 8, false},
    };
    const mask_kind masks[] = {MASK_FULL, MASK_CAUSAL, MASK_WINDOW};
    for (int i = 0; i < (int)(sizeof(shapes) / sizeof(shapes[0])); i++) {
        attn_case c = new_case(&state, shapes[i], masks[i % 3], 1);
        check_case(&c, &state, 1, threads_of(3));
        free_case(&c);
    }
}

// No tail of rows or keys, no mask: the paths where a long sequence spends its time.
static void test_full_tiles_agree_with_the_reference(void) {
    uint64_t state = 5;
    for (int i = 0; i < NUM_DTYPES; i++) {
        attn_case c = new_case(&state, (attn_shape){all_dtypes[i], 1, 64, 256, 1, 1, 32, 32, true}, MASK_FULL, 1);
        c.p.softcap = i % 2 ? 5 : 0;
        check_case(&c, &state, 1, no_threads());
        draw_dropout(&state, &c);
        check_case(&c, &state, 1, no_threads());
        free_case(&c);
    }
}

static void test_philox_gives_the_published_numbers(void) { // of Random123, by the generator's authors
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

// A probability with the threshold w + 1 keeps the random numbers up to w; what is below 2^-33 drops none, and 1 all.
static void test_the_threshold_of_dropout_is_exact(void) {
    const double words[] = {0, 1, 0x1p31 - 1, 0x1p32 - 2, 0x1p32 - 1};
    for (int i = 0; i < 5; i++) {
        const rt_dropout_rule rule = rt_dropout_rule_of(1 - (words[i] + 1) * 0x1p-32);
        CHECK_INT(rule.last_kept, (int64_t)words[i]);
        CHECK_CLOSE(rule.scale, 0x1p32 / (words[i] + 1), 1e-15 * rule.scale);
    }
    CHECK_INT(rt_dropout_rule_of(0x1p-34).last_kept, UINT32_MAX);
    CHECK_CLOSE(rt_dropout_rule_of(1).scale, 0, 0);
}

// Equal weights, and one key at a time that has a value.
static void test_the_reference_drops_by_the_words_of_the_counter(void) {
    uint64_t state = 23;
    attn_case c = new_case(&state, (attn_shape){RT_F64, 2, 3, 9, 2, 1, 4, 1, true}, MASK_FULL, 1);
    draw_dropout(&state, &c);
    c.p.dropout = 0.25;
    fill(&c.x[Q], 0);
    fill(&c.x[V], 0);
    for (int64_t key = 0; key < 9; key++) { // every weight is 1/9
        for (int64_t b = 0; b < 2; b++) set(&c.x[V], b, key, 0, 0, 1), set(&c.x[V], b, key > 0 ? key - 1 : 8, 0, 0, 0);
        fill(&c.x[OUT], 0);
        fill(&c.x[LSE], -INFINITY);
        CHECK_STATUS(run_reference(FORWARD, &c), RT_OK);
        FOR_EACH_ELEMENT(&c.x[OUT], b, token, head, d) {
            CHECK_CLOSE(get(&c.x[OUT], b, token, head, d), dropout_factor(&c, b, token, head, key) / 9, 1e-15);
            CHECK_CLOSE(get(&c.x[LSE], b, token, head, d), log(9), 1e-15);
        }
    }
    free_case(&c);
}

static void test_no_batch_no_query_no_key_and_no_run(void) {
    uint64_t state = 6;
    const attn_shape shapes[] = {{RT_F32, 0, 5, 9, 1, 1, 4, 4, false},
                                 {RT_F32, 1, 0, 9, 1, 1, 4, 4, false},
                                 {RT_F32, 2, 5, 0, 2, 1, 4, 4, false}};
    for (int i = 0; i < 6; i++) {
        attn_case c = new_case(&state, shapes[i % 3], MASK_FULL, 1);
        if (i >= 3) make_fresh(&c, 9);
        check_case(&c, &state, 1, threads_of(2));
        free_case(&c);
    }
    attn_case c = new_case(&state, (attn_shape){RT_F32, 1, 5, 9, 1, 1, 4, 4, false}, MASK_FULL, 1);
    c.p.num_k_runs = 0;
    check_case(&c, &state, 1, no_threads());
    free_case(&c);
}

// A run may have a stride that would overflow if it were ever taken.
static void test_huge_strides_and_positions(void) {
    uint64_t state = 7;
    attn_case c = new_case(&state, (attn_shape){RT_F32, 1, 3, 4, 1, 1, 4, 4, true}, MASK_FULL, 1);
    c.runs[0] = (rt_run){0, INT64_MAX, 1, 1};
    c.runs[1] = (rt_run){INT64_MAX - 8, 4, 2, 2};
    c.p.num_k_runs = 2;
    check_case(&c, &state, 1, no_threads());
    free_case(&c);
}

int main(void) {
    check_isa_or_skip();
    test_reference_of_two_keys_is_the_formula();
    test_reference_backward_is_the_derivative_of_its_forward();
    test_reference_writes_fresh_outputs();
    test_philox_gives_the_published_numbers();
    test_the_threshold_of_dropout_is_exact();
    test_the_reference_drops_by_the_words_of_the_counter();
    test_random_problems_agree_with_the_reference();
    test_two_sides_agree_with_the_reference();
    test_fresh_outputs_are_written();
    test_rounded_results_are_rounded_once();
    test_every_head_dim_has_its_tail();
    test_many_heads_queries_and_keys_cross_every_edge();
    test_full_tiles_agree_with_the_reference();
    test_no_batch_no_query_no_key_and_no_run();
    test_huge_strides_and_positions();
    return check_finish();
}
