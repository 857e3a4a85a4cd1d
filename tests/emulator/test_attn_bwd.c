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
    CHECK_STATUS(call_cuda(BACKWARD, &c), RT_WORKSPACE);
    free_case(&c);
}

// Words that a backward of 4 heads reads of its workspace, over documents of a tile of queries and of keys.
static int64_t words_read(int32_t num_documents) {
    enum { DOCUMENT = 64, HEADS = 4, DIM = 16 };
    const int32_t n = num_documents * DOCUMENT;
    uint64_t state = 7;
    attn_case c = new_case(&state, (attn_shape){RT_BF16, 1, n, n, HEADS, HEADS, DIM, DIM, false}, MASK_EMPTY, 1);
    for (int32_t i = 0; i < n; i++) c.begin[i] = i / DOCUMENT * DOCUMENT, c.end[i] = c.begin[i] + DOCUMENT;
    fill(&c.x[LSE], 5);
    fill(&c.x[DELTA], 0);
    void *const workspace = run_in_workspace(BACKWARD, c);
    const int64_t words = emulator_reads(workspace);
    free(workspace);
    free_case(&c);
    return words;
}

// A walk stays in its document: only once for a tile of keys, not by each head and warp, are all tiles of queries
// looked at, four words each. The rest grows with the number of documents.
static void test_walks_stay_in_their_documents(void) {
    CHECK(words_read(64) - 2 * words_read(32) <= 4 * (64 * 64 - 2 * 32 * 32));
}

int main(void) {
    test_walks_stay_in_their_documents();
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
