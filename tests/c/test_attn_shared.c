// Attention in tiles, whose tasks share packed keys: the same bits on any number of threads and whatever the padding,
// keys that nothing attends stay unread, and numbers that are not finite go where they belong.
#include "attn_check.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

// Query i is at position i.
static attn_case new_ordered_case(uint64_t *state, attn_shape shape, mask_kind mask) {
    attn_case c = new_case(state, shape, mask, 1);
    const int64_t rows = c.p.mask_batch_stride > 0 ? shape.batch : 1;
    for (int64_t i = 0; i < rows * shape.num_queries; i++)
        draw_interval(state, mask, shape.seq_len, i % shape.num_queries, &c.begin[i], &c.end[i]);
    return c;
}

static void split_into_runs(attn_case *c, int64_t num_runs) {
    const int64_t length = c->p.num_keys / num_runs;
    for (int64_t i = 0; i < num_runs; i++) // the last positions come first in memory
        c->runs[i] = (rt_run){(num_runs - 1 - i) * length, 1, i * length, length};
    c->p.num_k_runs = num_runs;
}

static void forward_and_backward(attn_case *c, rt_parallel parallel) {
    fill(&c->x[OUT], 0), fill(&c->x[LSE], -INFINITY);
    for (int i = DQ; i <= DV; i++) fill(&c->x[i], 0);
    run_in_calls(FORWARD, c, 1, parallel);
    run_in_calls(BACKWARD, c, 1, parallel);
}

// FNV-1a of all results.
static uint64_t digest(const attn_case *c) {
    uint64_t hash = UINT64_C(0xcbf29ce484222325);
    for (int i = OUT; i <= DV; i++) {
        const tensor *x = &c->x[i];
        for (size_t byte = 0; byte < (size_t)x->num_elements * dtype_bytes(x->dtype); byte++)
            hash = (hash ^ ((const uint8_t *)x->data)[byte]) * UINT64_C(0x100000001b3);
    }
    return hash;
}

static bool shares(const attn_case *c) { // more workspace than one query tile of the same heads takes
    rt_attn_block one = c->p;
    one.num_queries = 1;
    return rt_attn_fwd_workspace_bytes(&c->p, 1) > rt_attn_fwd_workspace_bytes(&one, 1);
}

static void test_any_threads_give_the_same_bits(void) {
    static const struct {
        attn_shape shape;
        mask_kind mask;
        int64_t num_runs;
    } cases[] = {
        {{RT_BF16, 1, 500, 500, 1, 2, 16, 16, true}, MASK_FULL, 1},
        {{RT_BF16, 1, 500, 500, 1, 2, 18, 7, true}, MASK_CAUSAL, 1},
        {{RT_BF16, 2, 250, 250, 4, 1, 16, 40, true}, MASK_WINDOW, 1},
        {{RT_BF16, 1, 220, 450, 8, 1, 33, 16, true}, MASK_CAUSAL_DOCUMENTS, 3},
        {{RT_BF16, 2, 130, 390, 3, 2, 8, 8, true}, MASK_RANDOM, 3},
    };
    uint64_t state = 31;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        attn_case c = new_ordered_case(&state, cases[i].shape, cases[i].mask);
        split_into_runs(&c, cases[i].num_runs);
        fill_random(&c.x[DELTA], &state, 1);
        CHECK(shares(&c));
        forward_and_backward(&c, no_threads());
        const uint64_t want = digest(&c);
        for (int64_t num_workers = 2; num_workers <= 5; num_workers += num_workers == 2 ? 1 : 2) {
            forward_and_backward(&c, threads_of(num_workers));
            CHECK(digest(&c) == want);
        }
        free_case(&c);
    }
}

static void copy_rows(const tensor *from, tensor *to) {
    FOR_EACH_ELEMENT(to, b, token, head, d) set(to, b, token, head, d, get(from, b, token, head, d));
}

// A call whose first tokens are those of a shorter one: what follows them, which no query of theirs attends, leaves
// their bits alone, whether the short call has several query tiles, one, which shares nothing, or ends within a block.
static void test_padding_leaves_the_bits_alone(void) {
    static const int64_t lengths[] = {90, 250, 256, 301};
    static const mask_kind masks[] = {MASK_CAUSAL, MASK_WINDOW, MASK_CAUSAL_DOCUMENTS};
    uint64_t state = 32;
    for (int i = 0; i < 12; i++) {
        const int64_t length = lengths[i % 4], padded = 420;
        const attn_shape shape = {RT_BF16, 1, padded, padded, 4, 1, 16, 24, true};
        attn_case all = new_ordered_case(&state, shape, masks[i % 3]);
        attn_shape shorter = shape;
        shorter.num_queries = shorter.seq_len = length;
        attn_case few = new_case(&state, shorter, MASK_FULL, 1);
        const bool attends = i % 2 == 0; // the padding itself; else its keys are not even numbers
        for (int64_t token = length; token < padded && !attends; token++) all.end[token] = all.begin[token];
        for (int64_t token = length; token < padded && !attends; token++)
            for (int64_t d = 0; d < 16; d++) set(&all.x[K], 0, token, 0, d, NAN), set(&all.x[V], 0, token, 0, d, NAN);
        fill_random(&all.x[DELTA], &state, 1);
        for (int64_t j = 0; j < length; j++) few.begin[j] = all.begin[j], few.end[j] = all.end[j];
        for (int x = Q; x < NUM_ARRAYS; x++) copy_rows(&all.x[x], &few.x[x]);
        CHECK(shares(&all) && shares(&few) == (length > 96));
        forward_and_backward(&few, no_threads());
        forward_and_backward(&all, threads_of(3));
        for (int x = OUT; x <= (attends ? DQ : DV); x++) // the padding's own queries add to dk and dv
            FOR_EACH_ELEMENT(&few.x[x], b, token, head, d)
        CHECK(get(&few.x[x], b, token, head, d) == get(&all.x[x], b, token, head, d));
        free_case(&few);
        free_case(&all);
    }
}

// Keys before the first and after the last that a query of the batch attends, within blocks and whole ones: the
// sanitizer sees a read of them.
static void test_keys_that_nothing_attends_stay_unread(void) {
#ifdef __SANITIZE_ADDRESS__
    uint64_t state = 33;
    for (int round = 0; round < 4; round++) {
        attn_case c = new_case(&state, (attn_shape){RT_BF16, 1, 200, 800, 4, 1, 16, 16, true}, MASK_FULL, 1);
        split_into_runs(&c, round % 2 == 0 ? 1 : 2);
        const int64_t run_begin = round % 2 == 0 ? 0 : 400; // in memory, of the run whose keys are attended
        const int64_t begin = 10 + 150 * (round / 2), end = 333 + round;
        for (int64_t token = 0; token < 200; token++) {
            c.begin[token] = (int32_t)(begin + token % 7);
            c.end[token] = (int32_t)(token % 7 == 0 ? end : begin + token % 7);
        }
        const int64_t row_bytes = 16 * (int64_t)dtype_bytes(RT_BF16);
        for (int64_t key = 0; key < 800; key++)
            for (int x = K; x <= V; x++)
                if (key < run_begin + begin || key >= run_begin + end)
                    __asan_poison_memory_region((char *)c.x[x].data + row_of(&c.x[x], 0, key, 0) * 2,
                                                (size_t)row_bytes);
        CHECK(shares(&c));
        run_in_calls(FORWARD, &c, 1, threads_of(2));
        fill(&c.x[LSE], 1), fill(&c.x[DELTA], 1);
        run_in_calls(BACKWARD, &c, 1, threads_of(2));
        for (int x = K; x <= V; x++) __asan_unpoison_memory_region(c.x[x].data, (size_t)c.x[x].num_elements * 2);
        free_case(&c);
    }
#endif
}

// Nor do they, or what a workspace held, change a bit; and their gradients stay as they are, here -0.
static void test_keys_that_nothing_attends_leave_no_trace(void) {
    uint64_t state = 35, want = 0;
    attn_case c = new_case(&state, (attn_shape){RT_BF16, 1, 200, 500, 4, 1, 16, 16, true}, MASK_FULL, 1);
    for (int64_t token = 0; token < 200; token++) c.begin[token] = 170, c.end[token] = (int32_t)(171 + token % 150);
    fill_random(&c.x[DELTA], &state, 1);
    for (int round = 0; round < 3; round++) {
        for (int64_t key = 0; key < 500; key++)
            for (int64_t d = 0; d < 16 && (key < 170 || key >= 320); d++)
                for (int x = K; x <= V; x++) set(&c.x[x], 0, key, 0, d, round == 2 ? NAN : 1);
        fill(&c.x[OUT], 0), fill(&c.x[LSE], -INFINITY);
        fill(&c.x[DQ], 0), fill(&c.x[DK], -0.0), fill(&c.x[DV], -0.0);
        for (int pass = FORWARD; pass <= BACKWARD; pass++)
            if (round == 0)
                run_in_exact_workspace((enum pass)pass, c, no_threads(), 0);
            else
                run_in_calls((enum pass)pass, &c, 1, no_threads());
        if (round == 0) want = digest(&c);
        CHECK(digest(&c) == want);
        for (int64_t key = 0; key < 500; key++)
            if (key < 170 || key >= 320)
                CHECK(signbit(get(&c.x[DK], 0, key, 0, 0)) && signbit(get(&c.x[DV], 0, key, 0, 0)));
    }
    free_case(&c);
}

static void test_shared_keys_that_are_not_finite(void) {
    const double poisons[] = {NAN, INFINITY, -INFINITY};
    uint64_t state = 34;
    for (int round = 0; round < 12; round++) {
        const attn_shape shape = {RT_BF16, 1, 110, 300, 4, 1, 8, 8, true};
        attn_case c = new_ordered_case(&state, shape, (mask_kind)(round % NUM_MASKS));
        if (round % 3 == 2) split_into_runs(&c, 2);
        CHECK(shares(&c));
        tensor *x = &c.x[round % 2 == 0 ? K : V];
        for (int i = 0; i < 2; i++)
            set(x, 0, random_int(&state, 0, 299), 0, random_int(&state, 0, 7), poisons[random_int(&state, 0, 2)]);
        check_case(&c, &state, 1, threads_of(3));
        free_case(&c);
    }
}

int main(void) {
    check_isa_or_skip();
    test_any_threads_give_the_same_bits();
    test_padding_leaves_the_bits_alone();
    test_keys_that_nothing_attends_stay_unread();
    test_keys_that_nothing_attends_leave_no_trace();
    test_shared_keys_that_are_not_finite();
    return check_finish();
}
