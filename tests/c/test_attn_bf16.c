// Attention in bf16, which some CPUs multiply in pairs: half pairs, scales and subnormal numbers.
#include "attn_check.h"

// An odd D or Dv leaves half a pair; beyond it in memory lies a gap filled with 77, or the end of the array.
static void test_every_head_dim_has_its_pairs(void) {
    uint64_t state = 14;
    const int64_t dims[] = {1,  2,  3,  4,  5,  6,   7,   8,   9,   15,  16,  17,  31, 32,
                            33, 34, 63, 64, 65, 127, 128, 129, 191, 255, 256, 511, 512};
    enum { NUM_DIMS = sizeof(dims) / sizeof(dims[0]) };
    for (int i = 0; i < NUM_DIMS; i++) {
        const attn_shape shape = {RT_BF16, 1, 9, 21, 2, 1, dims[i], dims[(i * 7 + 3) % NUM_DIMS], i % 2};
        attn_case c = new_case(&state, shape, (mask_kind)(i % NUM_MASKS), 1);
        c.p.softcap = i % 3 == 0 ? 3 : 0;
        if (i % 4 == 1) c.p.scale = -c.p.scale;
        if (i % 8 == 6) c.p.scale = 0;
        check_case(&c, &state, 1, no_threads());
        free_case(&c);
    }
}

// Blocks of keys that several panels of queries attend, so that with tiles vectors work on one panel while tiles
// multiply for its neighbours: 200 rows are four panels, and 190 keys a whole block and a part of one.
static void test_panels_take_turns(void) {
    uint64_t state = 17;
    for (int round = 0; round < 6; round++) {
        const attn_shape shape = {RT_BF16, 1, 100, 190, 2, 1, 24, 40, round % 2};
        attn_case c = new_case(&state, shape, round < 3 ? MASK_FULL : (mask_kind)(round % NUM_MASKS), 1);
        c.p.softcap = round == 1 ? 3 : 0;
        check_case(&c, &state, 1, no_threads());
        free_case(&c);
    }
}

// Whether or not a kernel flushes a subnormal number, its part of a sum of normal numbers is below 2^-126.
static void test_subnormals_among_normal_numbers(void) {
    uint64_t state = 15;
    for (int round = 0; round < 8; round++) {
        const attn_shape shape = {RT_BF16, 1, 12, 30, 2, 1, 5, 4 + round % 2, true};
        attn_case c = new_case(&state, shape, (mask_kind)(round % NUM_MASKS), 1);
        tensor *x = &c.x[Q + round % 4];
        FOR_EACH_ELEMENT(x, b, token, head, d)
        if (random_int(&state, 0, 1)) set(x, b, token, head, d, 0x1p-127 * random_unit(&state));
        check_case(&c, &state, 1, no_threads());
        free_case(&c);
    }
}

// A subnormal times a huge number counts. Pairs take it as 0, numbers do not, which also shows that pairs are in use.
static void test_a_subnormal_is_zero_in_a_pair(void) {
    uint64_t state = 16;
    rt_isa isa;
    CHECK_STATUS(rt_cpu_isa(&isa), RT_OK);
    attn_case c = new_case(&state, (attn_shape){RT_BF16, 1, 1, 2, 1, 1, 1, 1, true}, MASK_FULL, 1);
    set(&c.x[Q], 0, 0, 0, 0, 0x1p-130);
    for (int64_t key = 0; key < 2; key++) {
        set(&c.x[K], 0, key, 0, 0, key == 0 ? 0x1p127 : 0);
        set(&c.x[V], 0, key, 0, 0, (double)key);
    }
    run_in_calls(FORWARD, &c, 1, no_threads());
    const double score = isa >= RT_ISA_AVX512_BF16 ? 0 : 0.125;
    CHECK_CLOSE(get(&c.x[OUT], 0, 0, 0, 0), 1 / (1 + exp(score)), 4 * unit_roundoff(RT_F32));
    CHECK_CLOSE(get(&c.x[LSE], 0, 0, 0, 0), log(1 + exp(score)), 4 * unit_roundoff(RT_F32));
    free_case(&c);
}

int main(void) {
    check_isa_or_skip();
    test_every_head_dim_has_its_pairs();
    test_panels_take_turns();
    test_subnormals_among_normal_numbers();
    test_a_subnormal_is_zero_in_a_pair();
    return check_finish();
}
