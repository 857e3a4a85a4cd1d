// Checks of the emulator's own tests.
#ifndef RINGTILE_TESTS_EXPECT_H
#define RINGTILE_TESTS_EXPECT_H

#include <cstdio>
#include <string>

static int num_passed, num_failed;

static void check(bool ok, const char *what, const std::string &detail) {
    num_passed += ok;
    num_failed += !ok;
    if (!ok) printf("%s: %s\n", what, detail.c_str());
}

// Runs the kernel and wants a fault that says `expected`, or none where that is empty.
template <class Kernel>
static void expect(const char *what, const std::string &expected, Kernel kernel, int num_threads = 64,
                   grid_size num_blocks = 1, int shared_bytes = 1024) {
    std::string got;
    try {
        emulator::run(kernel, num_blocks, num_threads, shared_bytes);
    } catch (const emulator::Fault &fault) {
        got = fault.message;
    }
    const bool ok = expected.empty() ? got.empty() : got.find(expected) != std::string::npos;
    check(ok, what, "got \"" + got + "\", expected \"" + expected + "\"");
}

// The exit status.
static int finish() {
    printf("%d passed, %d failed\n", num_passed, num_failed);
    return num_failed > 0;
}

#endif // RINGTILE_TESTS_EXPECT_H
