// The instructions of AMX that the model has run, in all threads.
#ifndef RINGTILE_TESTS_TILE_COUNTS_H
#define RINGTILE_TESTS_TILE_COUNTS_H

#include <stdatomic.h>
#include <stdint.h>

typedef struct tile_counts {
    _Atomic int64_t loads, stores, products;
} tile_counts;

__attribute__((weak)) tile_counts counted_tiles; // one, whichever files include this

#endif // RINGTILE_TESTS_TILE_COUNTS_H
