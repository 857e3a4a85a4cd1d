// The work of attention in tiles, counted by the model of AMX: no result shows a product that is done twice, or sums
// that are loaded and stored more often than they need be, which takes as long as two products.
//     RINGTILE_CPU_ISA=amx_bf16 build/ctest/tests/c/test_attn_work 2048 128    (prints the counts of any S and D)
#include "attn_check.h"
#include "tile_counts.h"

typedef struct work {
    int64_t loads, stores, products;
} work;

// Of one call, of one head with a full mask.
static work work_of(pass pass, int64_t num_tokens, int64_t dim) {
    uint64_t state = 30;
    attn_case c =
        new_case(&state, (attn_shape){RT_BF16, 1, num_tokens, num_tokens, 1, 1, dim, dim, true}, MASK_FULL, 1);
    fill(&c.x[LSE], pass == FORWARD ? -INFINITY : 8);
    fill(&c.x[DELTA], 0);
    counted_tiles.loads = counted_tiles.stores = counted_tiles.products = 0;
    run_in_calls(pass, &c, 1, no_threads());
    free_case(&c);
    return (work){counted_tiles.loads, counted_tiles.stores, counted_tiles.products};
}

static void print_work(const char *pass, work w) {
    printf("%s: %" PRId64 " loads, %" PRId64 " stores, %" PRId64 " products\n", pass, w.loads, w.stores, w.products);
}

static void test_full_tiles_do_no_more_than_they_need(void) {
    const int64_t S = 512, D = 128;
    const int64_t products = S * S * D / (16 * 16 * 32); // of one matrix product of the whole call
    const work forward = work_of(FORWARD, S, D), backward = work_of(BACKWARD, S, D);
    CHECK_INT(forward.products, 2 * products);
    CHECK_INT(backward.products, 5 * products);
    // Two by two sums share the loads of their operands. Scores are stored once, by key and query, and sums of out and
    // dq loaded and stored once for each 128 keys, those of dk and dv once for each query tile.
    const int64_t scores = S / 16 * (S / 16), sums = S / 16 * (D / 16), query_tiles = 2;
    CHECK_INT(forward.stores, scores + sums * (S / 128));
    CHECK_INT(forward.loads, forward.products + sums * (S / 128));
    CHECK_INT(backward.stores, 2 * scores + sums * (S / 128) + 2 * sums * query_tiles);
    CHECK_INT(backward.loads, backward.products + sums * (S / 128) + 2 * sums * query_tiles);
}

int main(int argc, char **argv) {
    check_isa_or_skip();
    if (argc == 3) {
        print_work("forward", work_of(FORWARD, atoll(argv[1]), atoll(argv[2])));
        print_work("backward", work_of(BACKWARD, atoll(argv[1]), atoll(argv[2])));
        return 0;
    }
    test_full_tiles_do_no_more_than_they_need();
    return check_finish();
}
