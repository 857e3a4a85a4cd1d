// What the two halves of the emulator share: the block at hand, its threads, and who touched its shared memory, when.
#ifndef RINGTILE_TESTS_MACHINE_H
#define RINGTILE_TESTS_MACHINE_H

#include "../../cuda/device.cuh"

#include <csetjmp>
#include <memory>
#include <ucontext.h>
#include <vector>

namespace emulator {

constexpr int MAX_THREADS = 512, MAX_WARPS = MAX_THREADS / 32;
constexpr int MAX_BARRIERS = 32, NUM_CLOCKS = MAX_WARPS + MAX_BARRIERS;
constexpr int NOBODY = -1, SEVERAL = -2;
constexpr int CELL_BYTES = 2; // shared memory is watched in units of the smallest element

// Time as vector clocks. A warp's clock moves on at every barrier it takes part in; a thread's `seen` holds, for every
// warp, up to where its accesses lie before what this thread does now. (A barrier of a warp orders its own lanes only.)
// Behind the warps come barriers in shared memory: their clocks are the phases that are over, and what bulk copies write is
// written by `thread` MAX_THREADS + 32 b, in a phase of barrier b.
using Clock = uint32_t;

struct AsyncCopy {
    shared_address to;
    const void *from;
    int num_bytes;
    int64_t group;
};

struct Thread {
    int index;
    ucontext_t start;
    jmp_buf at;
    std::unique_ptr<char[]> stack;
    bool done;
    const int64_t *waits_for; // blocked while *waits_for == waits_value
    int64_t waits_value;
    const char *waits_in;
    const int *word; // blocked while *word != word_value
    int word_value;
    Clock seen[NUM_CLOCKS];
    std::vector<AsyncCopy> copies; // started, not waited for
    int64_t group;                 // of the next copy
};

struct Meeting { // of the lanes of a warp, or the threads of a block
    int num_arrived;
    int64_t number; // meetings that are over
    const char *name;
    Lanes brought;
};

struct Touch {
    int thread = NOBODY;
    Clock clock = 0;
};

struct SharedCell {
    enum { EMPTY, COPYING, WRITTEN } state = EMPTY;
    Touch writer, readers[MAX_WARPS]; // the last reader of each warp, SEVERAL of its lanes at that clock
};

// A thread's store_release: all that `thread` of the block did before it, and all that it had seen of the others.
struct Release {
    int64_t block;
    int thread, number;
    Clock seen[NUM_CLOCKS];
};

struct Acquisition { // a wait_until that is over
    Touch when;
    Release release;
};

struct Block {
    int64_t index; // x fastest
    bool done;
    std::vector<std::unique_ptr<Thread>> threads;
    Meeting warp_meetings[MAX_WARPS], block_meeting;
    std::vector<SharedCell> shared_cells;
    std::vector<char> shared_bytes;
    int num_releases, releasing_thread;
    std::vector<Acquisition> acquisitions;
    std::shared_ptr<struct BlockSm90> sm90;
};

extern Block *block;
extern Thread *current;

[[noreturn]] void fail(const std::string &what); // a Fault of the current thread
int warp_of(int thread);
bool is_before_now(const Touch &touch);
bool is_lent(const void *begin, int64_t num_bytes);
void wait_while(const int64_t *number, int64_t value,
                const char *name); // gives way to others while *number == value

// emulator_sm90.cpp: before the first thread of a block starts, when one ends, when all have.
void begin_block_sm90();
void end_thread_sm90();
void end_block_sm90();

} // namespace emulator

#endif // RINGTILE_TESTS_MACHINE_H
