// Recurrences on real threads, where heads that share q and k take turns: for the thread sanitizer, which reports any
// memory that two of them touch without order. `race_scan [ROUNDS [SEED]]`
#include "scan_case.h"
#include "selective_case.h"

int main(int argc, char **argv) {
    check_isa_or_skip();
    const int64_t rounds = argc > 1 ? strtoll(argv[1], NULL, 10) : 2;
    uint64_t state = argc > 2 ? strtoull(argv[2], NULL, 10) : 0;
    for (int64_t round = 0; round < rounds; round++)
        for (int i = 0; i < NUM_DTYPES; i++) {
            for (int which = 0; which < NUM_KINDS; which++) check_threads(&state, all_dtypes[i], (kind)which);
            check_selective_threads(&state, all_dtypes[i]);
        }
    return check_finish();
}
