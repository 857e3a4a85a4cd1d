// Assertions for the tests of the emulator itself.
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

static bool contains_any(const std::string &text, const std::string &alternatives) {
    const size_t end = alternatives.find('|');
    if (text.find(alternatives.substr(0, end)) != std::string::npos) return true;
    return end != std::string::npos && contains_any(text, alternatives.substr(end + 1));
}

// Runs the kernel and expects a fault whose message contains `expected`, or one of its alternatives where the order of
// warps decides: "one|other". None if that is empty.
template <class Kernel>
static void expect(const char *what, const std::string &expected, Kernel kernel, int num_threads = 64,
                   grid_size num_ctas = 1, int shared_bytes = 1024) {
    std::string got;
    try {
        emulator::run(kernel, num_ctas, num_threads, shared_bytes);
    } catch (const emulator::Fault &fault) {
        got = fault.message;
    }
    const bool ok = expected.empty() ? got.empty() : contains_any(got, expected);
    check(ok, what, "got \"" + got + "\", expected \"" + expected + "\"");
}

// Prints the totals and returns the exit status.
static int finish() {
    printf("%d passed, %d failed\n", num_passed, num_failed);
    return num_failed > 0;
}

#endif // RINGTILE_TESTS_EXPECT_H
