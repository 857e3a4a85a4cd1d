// The CUDA attention backward on the emulator, against the f64 reference.
#include "attn_emulated.h"

static void test_random_problems_agree_with_the_reference(void) {
    uint64_t state = 2;
    for (int round = 0; round < NUM_ROUNDS; round++) {
        if (!is_in_this_run(&everything, round)) continue;
        attn_case c = draw_case(&state, &everything, round);
        check_backward(&c, &state, 1 + round % 3);
        free_case(&c);
    }
}

static void test_missing_workspace_is_refused(void) {
    uint64_t state = 3;
    attn_case c = new_case(&state, (attn_shape){RT_BF16, 1, 5, 9, 1, 1, 8, 8, false}, MASK_FULL, 1);
    CHECK_STATUS(rt_cuda_attn_bwd(&c.p, NULL), RT_WORKSPACE);
    free_case(&c);
}

int main(void) {
    test_random_problems_agree_with_the_reference();
    test_missing_workspace_is_refused();
    check_fresh_outputs_of_nothing(BACKWARD);
    check_rounded_results(BACKWARD);
    check_that_unattended_tiles_stay_unread(BACKWARD, RT_BF16);
    check_trees(BACKWARD, 5, false);
    check_that_full_tiles_are_not_compared(BACKWARD, RT_BF16);
    check_that_unattended_tiles_stay_unread(BACKWARD, RT_F32);
    check_that_a_weight_of_0_silences(RT_BF16);
    CHECK_INT(emulator_bank_conflicts("bwd.cuh"), 0);
    return check_finish();
}
