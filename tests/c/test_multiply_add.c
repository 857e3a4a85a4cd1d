// The multiply-add peak: the flops it reports, and its refusals. Timing it is the benchmark's job.
#include "check.h"

#include "../../csrc/bench/multiply_add.h"

int main(void) {
    check_isa_or_skip();
    rt_isa isa;
    double one = -1, flops = -1;
    CHECK_STATUS(rt_cpu_isa(&isa), RT_OK);
    CHECK_STATUS(rt_multiply_add(isa, 1, &one, no_threads()), RT_OK);
    CHECK(one >= 2 * 6 * 2 * 4); // the smallest register tile: 6 rows of 2 vectors of 4 numbers
    CHECK_STATUS(rt_multiply_add(isa, 1000, &flops, no_threads()), RT_OK);
    CHECK_CLOSE(flops, 1000 * one, 0);
    CHECK_STATUS(rt_multiply_add(isa, 1000, &flops, threads_of(3)), RT_OK);
    CHECK_CLOSE(flops, 3000 * one, 0);
    CHECK_STATUS(rt_multiply_add(isa, 0, &flops, threads_of(2)), RT_OK);
    CHECK_CLOSE(flops, 0, 0);
    CHECK_STATUS(rt_multiply_add(isa, -1, &flops, no_threads()), RT_BAD_SHAPE);
    CHECK_STATUS(rt_multiply_add(isa, INT64_MAX, &flops, no_threads()), RT_TOO_LARGE);
    CHECK_STATUS(rt_multiply_add(isa, 1, &flops, (rt_parallel){.run = run_threads, .num_workers = -3}), RT_OK);
    CHECK_CLOSE(flops, one, 0);
    CHECK_STATUS(rt_multiply_add(isa, 1, NULL, no_threads()), RT_BAD_POINTER);
    CHECK_STATUS(rt_multiply_add((rt_isa)99, 1, &flops, no_threads()), RT_BAD_ISA);
    return check_finish();
}
