// What the parts of the emulator share: the block at hand, its threads, and who touched its shared memory, when.
#ifndef RINGTILE_TESTS_MACHINE_H
#define RINGTILE_TESTS_MACHINE_H

#include "../../cuda/device.cuh"

#include <csetjmp>
#include <memory>
#include <ucontext.h>
#include <vector>

namespace emulator {

constexpr int MAX_THREADS = 512, MAX_WARPS = MAX_THREADS / 32;
constexpr int MAX_BARRIERS = 32, MAX_ADDERS = 2, NUM_CLOCKS = MAX_WARPS + MAX_BARRIERS + 2 * MAX_ADDERS;
constexpr int NOBODY = -1, SEVERAL = -2;
constexpr int CELL_BYTES = 2; // shared memory is watched in units of the smallest element

// Time as vector clocks. A warp's clock, `now` of its lanes, moves on at every barrier it takes part in; a thread's `seen`
// holds, for every warp, up to where its accesses lie before what this thread does now. (A barrier of a warp orders its own
// lanes only.) Behind the warps come those who access memory on their own, as if they were further warps of one `thread`:
//   a barrier in shared memory   bulk copies write in a phase of it; its clock is the phases that are over
//   reads of an adder            an add_box reads shared memory; the add_boxes that its thread knows to have read
//   sums of an adder             an add_box adds to global memory; those that its thread knows to be over, behind a fence
using Clock = uint32_t;

constexpr int thread_of_clock(int clock) { return 32 * clock; }
constexpr int clock_of_barrier(int barrier) { return MAX_WARPS + barrier; }
constexpr int clock_of_reads(int adder) { return MAX_WARPS + MAX_BARRIERS + 2 * adder; }
constexpr int clock_of_sums(int adder) { return clock_of_reads(adder) + 1; }

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
    Clock now, seen[NUM_CLOCKS];
    std::vector<Clock> write_fences; // when they were made
    std::vector<AsyncCopy> copies;   // started, not waited for
    int64_t group;                   // of the next copy
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
    uint32_t num_write_fences = 0; // of the writer, before
    Touch writer, adder;           // the last add_box that reads it
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
    uint32_t fenced_adders; // a bit for each that made an add_box_fence after it
};

struct Block {
    int64_t index; // x fastest
    bool done;
    std::vector<std::unique_ptr<Thread>> threads;
    Meeting warp_meetings[MAX_WARPS], block_meeting;
    std::vector<SharedCell> shared_cells;
    std::vector<Touch>
        shared_readers[MAX_WARPS]; // of each cell the last one of a warp, SEVERAL lanes at that clock
    std::vector<char> shared_bytes;
    int num_releases, releasing_thread;
    std::vector<Acquisition> acquisitions;
    std::shared_ptr<struct BlockBulk> bulk;
    std::shared_ptr<struct BlockGroups> groups;
};

extern Block *block;
extern Thread *current;

[[noreturn]] void fail(const std::string &what); // a Fault of the current thread
std::string thread_name(int thread);

// ---- clocks --------------------------------------------------------------------------------------

inline int warp_of(int thread) { return thread / 32; }
inline Touch touch_now() { return {current->index, current->now}; }
inline bool is_before_now(const Touch &touch) {
    return touch.thread == NOBODY || touch.thread == current->index ||
           current->seen[warp_of(touch.thread)] > touch.clock;
}
inline void join(Clock (&to)[NUM_CLOCKS], const Clock (&from)[NUM_CLOCKS]) {
    for (int i = 0; i < NUM_CLOCKS; i++) to[i] = std::max(to[i], from[i]);
}
// At a barrier: adds what the lanes of a warp have done and seen so far; they have all seen that, and do new things.
void publish_warp(int warp, Clock (&to)[NUM_CLOCKS]);
void acquire_by_warp(int warp, const Clock (&from)[NUM_CLOCKS]);

// Gives way to others while *number == value; until *word == value.
void wait_while(const int64_t *number, int64_t value, const char *name);
void wait_for_word(const int *word, int value);

// ---- shared memory -------------------------------------------------------------------------------

void *check_shared_place(shared_address address, int num_bytes); // where the bytes are
void check_read(const SharedCell &cell, shared_address address);

// ---- emulator_global.cpp -------------------------------------------------------------------------

void begin_launch_global();
bool is_lent(const void *begin, int64_t num_bytes);
// By an add_box, the number-th of its adder, who knows num_over of them to be over. An add_box_fence of the adder.
void check_added(const void *address, int64_t num_bytes, int adder, Clock number, Clock num_over);
void fence_acquisitions(int adder);

// ---- emulator_sm90.cpp, emulator_groups.cpp ------------------------------------------------------

shared_address swizzled(shared_address address);
// Bulk copies and products see what a thread wrote if it made a fence, and a barrier lies between the fence and now.
void check_fence(shared_address chunk, const char *what);

// Before the first thread of a block starts, when one ends, when all have.
void begin_block_bulk();
void begin_block_groups();
void end_thread_bulk();
void end_thread_groups();
void end_block_bulk();
void end_block_groups();

} // namespace emulator

#endif // RINGTILE_TESTS_MACHINE_H
