// The multiply-add peak: the flops that it says it did, and what it refuses. How long they take is for the benchmark.
#include "check.h"

int main(void) {
    check_isa_or_skip();
    double one = -1, flops = -1;
    CHECK_STATUS(rt_multiply_add(1, &one, no_threads()), RT_OK);
    CHECK(one >= 2 * 6 * 2 * 4); // 6 rows of 2 vectors of 4 numbers is the smallest register tile
    CHECK_STATUS(rt_multiply_add(1000, &flops, no_threads()), RT_OK);
    CHECK_CLOSE(flops, 1000 * one, 0);
    CHECK_STATUS(rt_multiply_add(1000, &flops, threads_of(3)), RT_OK);
    CHECK_CLOSE(flops, 3000 * one, 0);
    CHECK_STATUS(rt_multiply_add(0, &flops, threads_of(2)), RT_OK);
    CHECK_CLOSE(flops, 0, 0);
    CHECK_STATUS(rt_multiply_add(-1, &flops, no_threads()), RT_BAD_SHAPE);
    CHECK_STATUS(rt_multiply_add(1, NULL, no_threads()), RT_BAD_POINTER);
    return check_finish();
}
