// The CUDA attention forward on the emulator, against the f64 reference.
#include "attn_emulated.h"

// In one call or several, merged into a random state or an empty one.
static void test_random_problems_agree_with_the_reference(void) {
    uint64_t state = 1;
    for (int round = 0; round < NUM_ROUNDS; round++) {
        if (!is_in_this_run(&everything, round)) continue;
        attn_case c = draw_case(&state, &everything, round);
        if (round % 3 == 1 && !c.p.fresh) {
            fill_random(&c.x[OUT], &state, 1);
            fill_random(&c.x[LSE], &state, 4);
        }
        check_forward(&c, &state, 1 + round % 3);
        free_case(&c);
    }
}

int main(void) {
    check_that_heads_in_sections_agree();
    test_random_problems_agree_with_the_reference();
    check_fresh_outputs_of_nothing(FORWARD);
    check_rounded_results(FORWARD);
    check_that_unattended_tiles_stay_unread(FORWARD, RT_BF16);
    check_that_unattended_tiles_stay_unread(FORWARD, RT_F32);
    check_that_the_largest_weight_is_exact(RT_BF16);
    check_that_the_largest_weight_is_exact(RT_F16);
    CHECK_INT(emulator_bank_conflicts(), 0);
    return check_finish();
}
