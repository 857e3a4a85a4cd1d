// The CUDA attention forward on the emulator, against the f64 reference.
#include "attn_emulated.h"

// In one call or several, merged into a random state or an empty one.
static void test_random_problems_agree_with_the_reference(void) {
    uint64_t state = 1;
    for (int round = 0; round < NUM_ROUNDS; round++) {
        if (!is_in_this_run(&everything, round)) continue;
        attn_case c = draw_case(&state, &everything, round);
        if (round % 3 == 1 && !c.fresh) {
            fill_random(&c.x[OUT], &state, 1);
            fill_random(&c.x[LSE], &state, 4);
        }
        check_forward(&c, &state, 1 + round % 3);
        free_case(&c);
    }
}

// A warp stores 8 numbers to each of 4 rows. In a tile they begin 4 banks apart (32 numbers, and 4 between rows), in
// the weights 17: either way two words lie in some banks, and none has three. So each store takes one wavefront more:
// those of q, k, v (16, 32) and of the weights (16, 16).
static void test_stores_for_f32_conflict_once(void) {
    uint64_t state = 9;
    const attn_shape shape = {RT_F32, 1, 16, 16, 1, 1, 32, 32, false};
    attn_case c = new_case(&state, shape, MASK_FULL, 1);
    while (c.p.num_k_runs != 1 || c.runs[0].length != 16) {
        free_case(&c);
        c = new_case(&state, shape, MASK_FULL, 1);
    }
    const int64_t before = emulator_bank_conflicts("attn_plain.cu");
    emulator_count_banks(true);
    lend_case(&c, 0, 16);
    CHECK_STATUS(call_cuda(FORWARD, &c), RT_OK);
    CHECK_INT(emulator_bank_conflicts("attn_plain.cu") - before, (3 * 16 * 32 + 16 * 16) / 32);
    free_case(&c);
}

int main(void) {
    check_that_heads_in_sections_agree();
    test_random_problems_agree_with_the_reference();
    check_fresh_outputs_of_nothing(FORWARD);
    check_rounded_results(FORWARD);
    check_that_unattended_tiles_stay_unread(FORWARD, RT_BF16);
    check_trees(FORWARD, 5, false);
    check_that_full_tiles_are_not_compared(FORWARD, RT_BF16);
    check_that_unattended_tiles_stay_unread(FORWARD, RT_F32);
    check_that_the_largest_weight_is_exact(RT_BF16);
    check_that_the_largest_weight_is_exact(RT_F16);
    CHECK_INT(emulator_bank_conflicts("fwd.cuh"), 0);
    test_stores_for_f32_conflict_once();
    return check_finish();
}
