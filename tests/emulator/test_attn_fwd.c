// The CUDA attention forward on the emulator, against the f64 reference.
#include "attn_emulated.h"

static const struct {
    int64_t head_dim, v_head_dim;
} all_dims[] = {{64, 64},  {96, 96},   {128, 128}, {192, 128}, {256, 256}, // the compiled ones
                {1, 3},    {40, 64},   {72, 96},   {80, 80},   {100, 17},
                {128, 64}, {136, 128}, {192, 192}, {64, 128},  {250, 129}};
enum { NUM_DIMS = sizeof(all_dims) / sizeof(all_dims[0]) };

// Every head dim with every mask, in any memory layout, over any runs, in one call or several, into a state that may hold
// earlier blocks.
static void test_random_problems_agree_with_the_reference(void) {
    uint64_t state = 1;
    for (int round = 0; round < NUM_DIMS * NUM_MASKS; round++) {
        const bool large = round % 5 == 0;
        const attn_shape shape = {.dtype = round % 2 ? RT_BF16 : RT_F16,
                                  .batch = random_int(&state, 1, 2),
                                  .num_queries = random_int(&state, 1, large ? 140 : 70),
                                  .seq_len = random_int(&state, 1, large ? 300 : 150),
                                  .group = random_int(&state, 1, 3),
                                  .num_kv_heads = random_int(&state, 1, 2),
                                  .head_dim = all_dims[round % NUM_DIMS].head_dim,
                                  .v_head_dim = all_dims[round % NUM_DIMS].v_head_dim};
        attn_case c = new_case(&state, shape, (mask_kind)(round / NUM_DIMS), round % 3 ? 1 : 3);
        if (round % 4 == 1) c.p.softcap = 1 + 20 * fabs(random_unit(&state));
        if (round % 7 == 3) c.p.scale *= random_int(&state, -1, 0);
        if (round % 3 == 1) {
            fill_random(&c.x[OUT], &state, 1);
            fill_random(&c.x[LSE], &state, 4);
        }
        check_forward(&c, &state, 1 + round % 3);
        free_case(&c);
    }
}

int main(void) {
    test_random_problems_agree_with_the_reference();
    CHECK_INT(emulator_bank_conflicts(), 0);
    return check_finish();
}
