// The CUDA attention forward for sm_90a on the emulator, against the f64 reference.
#define _POSIX_C_SOURCE 200809L // setenv
#include "attn_emulated.h"

static const case_range mapped = {sm90_dims, all_cuda_dtypes, NUM_FWD_SM90_DIMS, 2, 200, 900, true};

// In one call or several, merged into a random state or an empty one.
static void test_random_problems_agree_with_the_reference(void) {
    uint64_t state = 1;
    for (int round = 0; round < NUM_FWD_SM90_DIMS * NUM_MASKS; round++) {
        if (!is_in_this_run(&mapped, round)) continue;
        attn_case c = draw_case(&state, &mapped, round);
        if (round % 3 == 1 && !c.fresh) {
            fill_random(&c.x[OUT], &state, 1);
            fill_random(&c.x[LSE], &state, 4);
        }
        const int64_t before = emulator_group_products();
        check_forward(&c, &state, 1 + round % 3);
        CHECK_INT(emulator_group_products() > before, any_pair(&c));
        free_case(&c);
    }
}

// Five tiles of one run in a ring of two stages: only barriers of the stages hold the copies back. Between runs the
// whole thread block meets.
static void test_one_long_run_agrees_too(void) {
    uint64_t state = 5;
    const attn_shape shape = {RT_BF16, 1, 128, 520, 1, 1, 128, 128, false};
    attn_case c = new_case(&state, shape, MASK_FULL, 1);
    while (c.p.num_k_runs != 1 || c.runs[0].length <= 512 || !rows_are_aligned(&c)) {
        free_case(&c);
        c = new_case(&state, shape, MASK_FULL, 1);
    }
    check_forward(&c, &state, 1);
    free_case(&c);
}

// Of a packed batch: 70 runs of 8 keys, the last key first.
static void test_64_runs_are_one_launch(void) {
    uint64_t state = 9;
    attn_case c = new_aligned_case(&state, (attn_shape){RT_BF16, 1, 128, 560, 1, 1, 64, 64, true}, MASK_CAUSAL);
    c.p.num_k_runs = 70;
    for (int64_t i = 0; i < 70; i++) c.runs[i] = (rt_run){8 * (69 - i), 1, 8 * i, 8};
    c.fresh = true; // for the first launch alone
    const int64_t before = emulator_ctas();
    check_forward(&c, &state, 1);
    CHECK_INT(emulator_ctas() - before, 2);
    check_rounding(FORWARD, &c, 1, run_on_emulator); // without an out, what the first launch leaves is in the workspace
    free_case(&c);
}

// Rows that a tensor map cannot describe, and larger head dims, go to other kernels.
static void test_rows_that_cannot_be_mapped_agree_too(void) {
    uint64_t state = 6;
    const int64_t before = emulator_group_products();
    for (int i = 0; i < 3; i++) {
        const attn_shape shape = {RT_BF16, 2, 70, 140, 2, 1, i == 2 ? 264 : 64, 64, false};
        attn_case c = new_case(&state, shape, MASK_CAUSAL, 1);
        while (rows_are_aligned(&c) != (i == 2)) {
            free_case(&c);
            c = new_case(&state, shape, MASK_CAUSAL, 1);
        }
        check_forward(&c, &state, 1);
        free_case(&c);
    }
    CHECK_INT(emulator_group_products(), before);
}

static void test_empty_problems_are_accepted(void) {
    uint64_t state = 7;
    attn_case c = new_case(&state, (attn_shape){RT_BF16, 2, 70, 140, 2, 1, 64, 64, false}, MASK_CAUSAL, 1);
    attn_case no_queries = c, no_batch = c;
    no_queries.p.num_queries = no_batch.p.batch = 0;
    CHECK_STATUS(call_cuda(FORWARD, &no_queries), RT_OK);
    CHECK_STATUS(call_cuda(FORWARD, &no_batch), RT_OK);
    free_case(&c);
}

static rt_status forward_with_isa(const attn_case *c, const char *isa) {
    setenv("RINGTILE_CUDA_ISA", isa, 1);
    return call_cuda(FORWARD, c);
}

static void test_environment_chooses_the_kernels(void) {
    uint64_t state = 8;
    attn_case c = new_aligned_case(&state, (attn_shape){RT_BF16, 2, 70, 140, 2, 1, 64, 64, false}, MASK_CAUSAL);
    CHECK_STATUS(forward_with_isa(&c, "sm_70"), RT_BAD_CUDA_ISA);
    CHECK_STATUS(forward_with_isa(&c, "SM_80"), RT_BAD_CUDA_ISA);
    for (int isa = 0; isa < 3; isa++) {
        const int64_t before = emulator_group_products();
        setenv("RINGTILE_CUDA_ISA", isa == 0 ? "sm_80" : isa == 1 ? "sm_90a" : "", 1);
        check_forward(&c, &state, 1);
        CHECK_INT(emulator_group_products() > before, isa > 0);
    }
    const int others[] = {80, 86, 89, 100, 103, 120}; // no other GPU has what sm_90a's kernels use
    for (int i = 0; i < 6; i++) {
        const int64_t before = emulator_group_products();
        emulator_set_compute_capability(others[i]);
        CHECK_STATUS(forward_with_isa(&c, "sm_90a"), RT_BAD_CUDA_ISA);
        unsetenv("RINGTILE_CUDA_ISA");
        check_forward(&c, &state, 1);
        CHECK_INT(emulator_group_products(), before);
    }
    emulator_set_compute_capability(90);
    unsetenv("RINGTILE_CUDA_ISA");
    free_case(&c);
}

int main(void) {
    unsetenv("RINGTILE_CUDA_ISA");
    emulator_set_compute_capability(90);
    keys_in_no_run = 60000;
    check_that_heads_in_sections_agree();
    test_one_long_run_agrees_too();
    test_64_runs_are_one_launch();
    test_random_problems_agree_with_the_reference();
    test_rows_that_cannot_be_mapped_agree_too();
    test_empty_problems_are_accepted();
    test_environment_chooses_the_kernels();
    check_fresh_outputs_of_nothing(FORWARD);
    check_rounded_results(FORWARD);
    check_that_unattended_tiles_stay_unread(FORWARD, RT_BF16);
    check_trees(FORWARD, 5, true);
    check_that_full_tiles_are_not_compared(FORWARD, RT_BF16);
    check_that_the_largest_weight_is_exact(RT_BF16);
    check_that_the_largest_weight_is_exact(RT_F16);
    CHECK_INT(emulator_bank_conflicts("fwd"), 0); // of this kernel and the one for sm_80
    return check_finish();
}
