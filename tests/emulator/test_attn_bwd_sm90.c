// The CUDA attention backward for sm_90a on the emulator, against the f64 reference.
#include "attn_emulated.h"

static const case_range mapped = {sm90_dims, all_cuda_dtypes, NUM_BWD_SM90_DIMS, 2, 200, 400, true};

// In one call or several, with CTAs one at a time and concurrent.
static void test_random_problems_agree_with_the_reference(void) {
    uint64_t state = 1;
    for (int round = 0; round < NUM_BWD_SM90_DIMS * NUM_MASKS; round++) {
        if (!is_in_this_run(&mapped, round)) continue;
        attn_case c = draw_case(&state, &mapped, round);
        const int64_t before = emulator_group_products();
        check_backward(&c, &state, 1 + round % 3);
        CHECK_INT(emulator_group_products() > before, any_pair(&c));
        free_case(&c);
    }
}

// Rows of dq that a tensor map cannot describe, and other head dims, go to the sm_80 kernel.
static void test_rows_that_cannot_be_mapped_agree_too(void) {
    uint64_t state = 6;
    const int64_t before = emulator_group_products();
    for (int i = 0; i < 2; i++) {
        const attn_shape shape = {RT_BF16, 2, 70, 140, 2, 1, i == 1 ? 136 : 64, 64, false};
        attn_case c = new_case(&state, shape, MASK_CAUSAL, 1);
        while (!rows_are_aligned(&c) || is_aligned(&c.x[DQ]) != (i == 1)) {
            free_case(&c);
            c = new_case(&state, shape, MASK_CAUSAL, 1);
        }
        check_backward(&c, &state, 1);
        free_case(&c);
    }
    CHECK_INT(emulator_group_products(), before);
}

// Two tiles of keys of one kv head, whose query heads are divided until there are two thread blocks a multiprocessor. A
// thread block more fills the workspace, and one for each tile of keys finds its queries.
static void test_query_heads_are_divided_where_tiles_of_keys_are_few(void) {
    const int multiprocessors[] = {1, 2, 3, 132}, expected[] = {2, 2 * 2, 2 * 3, 2 * 7};
    uint64_t state = 8;
    attn_case c = new_case(&state, (attn_shape){RT_BF16, 1, 64, 256, 7, 1, 64, 64, false}, MASK_FULL, 1);
    while (c.p.num_k_runs != 1 || c.runs[0].length != 256 || !rows_are_aligned(&c) || !is_aligned(&c.x[DQ])) {
        free_case(&c);
        c = new_case(&state, (attn_shape){RT_BF16, 1, 64, 256, 7, 1, 64, 64, false}, MASK_FULL, 1);
    }
    for (int i = 0; i < 4; i++) {
        const int64_t before = emulator_ctas();
        emulator_set_num_multiprocessors(multiprocessors[i]);
        run_on_emulator(BACKWARD, &c, 1);
        CHECK_INT(emulator_ctas() - before, 1 + 2 + expected[i]);
    }
    free_case(&c);
}

static void test_empty_problems_are_accepted(void) {
    uint64_t state = 7;
    attn_case c = new_case(&state, (attn_shape){RT_BF16, 2, 70, 140, 2, 1, 64, 64, false}, MASK_CAUSAL, 1);
    c.p.num_queries = 0;
    CHECK_STATUS(call_cuda(BACKWARD, &c), RT_OK);
    free_case(&c);
}

int main(void) {
    emulator_set_compute_capability(90);
    keys_in_no_run = 60000;
    test_query_heads_are_divided_where_tiles_of_keys_are_few();
    test_random_problems_agree_with_the_reference();
    test_rows_that_cannot_be_mapped_agree_too();
    test_empty_problems_are_accepted();
    check_rounded_results(BACKWARD);
    check_that_unattended_tiles_stay_unread(BACKWARD, RT_BF16);
    check_trees(BACKWARD, 3, true);
    check_that_full_tiles_are_not_compared(BACKWARD, RT_BF16);
    check_that_a_weight_of_0_silences(RT_BF16);
    check_that_a_weight_of_0_silences(RT_F16);
    CHECK_INT(emulator_bank_conflicts("bwd"), 0); // of this kernel and the one for sm_80
    return check_finish();
}
