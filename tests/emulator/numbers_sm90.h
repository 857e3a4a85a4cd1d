// The matrix that the emulator's tests of sm_90a copy and multiply, and its boxes in shared memory.
#ifndef RINGTILE_TESTS_NUMBERS_SM90_H
#define RINGTILE_TESTS_NUMBERS_SM90_H

#include "expect.h"

#include <vector>

// (256, 128) numbers in bf16, lent. They are small integers, so products are exact.
constexpr int ROWS = 256, COLS = 128;
static std::vector<bf16> numbers;
static tensor_map map;

static int number_at(int row, int col) { return (row * 7 + col * 3 + row * col) % 11 - 5; }

static void lend_numbers() {
    numbers.resize(ROWS * COLS);
    for (int i = 0; i < ROWS * COLS; i++) numbers[(size_t)i] = narrow<bf16>((float)number_at(i / COLS, i % COLS));
    emulator::take_back_all();
    emulator::lend(numbers.data(), ROWS * COLS * 2, false);
    const bool ok = make_tensor_map<bf16>(map, numbers.data(), {COLS, ROWS, 1, 1}, {COLS * 2, COLS * 2, COLS * 2}, 128);
    check(ok, "a tensor map", "refused");
}

// Shared memory holds two boxes of 128 rows of 64 columns, then mbarriers.
constexpr int BOX_BYTES = 128 * 128, BARRIERS_AT = 2 * BOX_BYTES, SHARED_BYTES = BARRIERS_AT + 64;
static shared_address barrier(int i) { return shared_base() + (shared_address)(BARRIERS_AT + 8 * i); }

static void init_barriers(int arrivals = 1) {
    if (thread_index() == 0) {
        for (int i = 0; i < 4; i++) mbarrier_init(barrier(i), arrivals);
        fence_mbarrier_init();
    }
    syncthreads();
}
// Thread 0 copies columns 0 .. 127 of 128 rows, as two boxes.
static void copy_rows(int row, int which = 0) {
    if (thread_index() != 0) return;
    mbarrier_arrive_expect_tx(barrier(which), 2 * BOX_BYTES);
    for (int panel = 0; panel < 2; panel++)
        cp_async_bulk_tensor_4d(shared_base() + (shared_address)(panel * BOX_BYTES), map, barrier(which), 64 * panel,
                                row, 0, 0);
}
static shared_address place_of(int row, int col) {
    const int chunk = col % 64 / 8 ^ row % 8;
    return shared_base() + (shared_address)(col / 64 * BOX_BYTES + row * 128 + chunk * 16 + col % 8 * 2);
}
static bf16 read_at(int row, int col) { return ld_shared<bf16>(place_of(row, col)); }

template <class Kernel> static void expect_group(const char *what, const std::string &expected, Kernel kernel) {
    expect(what, expected, kernel, 128, 1, SHARED_BYTES);
}

#endif // RINGTILE_TESTS_NUMBERS_SM90_H
