// The state that the parts of the emulator share: the current CTA, its threads, and which of them touched which
// byte when.
#ifndef RINGTILE_TESTS_MACHINE_H
#define RINGTILE_TESTS_MACHINE_H

#include "../../cuda/device/ptx.cuh"

#include <csetjmp>
#include <memory>
#include <ucontext.h>
#include <vector>

namespace emulator {

constexpr int MAX_THREADS = 512, MAX_WARPS = MAX_THREADS / 32;
constexpr int MAX_BARRIERS = 32, MAX_ADDERS = 8, NUM_CLOCKS = MAX_WARPS + MAX_BARRIERS + 2 * MAX_ADDERS;
constexpr int NOBODY = -1, SEVERAL = -2;
constexpr int CELL_BYTES = 2; // shared memory is tracked in units of the smallest element

// Vector clocks. A warp's clock, `now` of its lanes, advances at every barrier the warp takes part in; a thread's
// `seen` holds, for each warp, the clock before which that warp's accesses are ordered before this thread's next
// one. (syncwarp orders the warp's own lanes only.) Asynchronous agents follow the warps, as if each were a further
// warp with a single thread:
//   an mbarrier              bulk copies write in one of its phases; its clock counts complete phases
//   the reads of an adder    a bulk addition reads shared memory; the clock counts those its thread knows to have read
//   the sums of an adder     a bulk addition writes global memory; the clock counts those its thread knows to be
//                            complete, and fenced
// An adder is a thread that starts bulk additions or stores, which are alike.
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
    std::vector<Clock> proxy_fences; // times of fence_proxy_async_shared
    std::vector<AsyncCopy> copies;   // started but not waited for
    int64_t group;                   // of the next copy
};

struct Meeting { // of the lanes of a warp, or the threads of a CTA
    int num_arrived;
    int64_t number; // of complete meetings
    const char *name;
    Lanes brought;
};

struct Touch {
    int thread = NOBODY;
    Clock clock = 0;
};

struct SharedCell {
    enum { EMPTY, COPYING, WRITTEN } state = EMPTY;
    uint32_t num_proxy_fences = 0; // of the writer, before its write
    uint32_t reader_warps = 0;     // a bit for each warp that has read it since the last write
    Touch writer, adder;           // adder: the last bulk addition that reads it
};

// A thread's st_release: everything `thread` did before it, and everything it had seen of other threads.
struct Release {
    int64_t cta;
    int thread, number;
    Clock seen[NUM_CLOCKS];
};

struct Acquisition { // a complete wait_eq
    Touch when;
    Release release;
    uint32_t fenced_adders; // a bit for each adder that called fence_proxy_async_global after it
};

struct Cta {
    int64_t index; // in the grid, x fastest
    bool done;
    std::vector<std::unique_ptr<Thread>> threads;
    Meeting warp_meetings[MAX_WARPS], cta_meeting;
    std::vector<SharedCell> shared_cells;
    // The last reader of each cell whose reader_warps have the warp; SEVERAL lanes at that clock.
    std::vector<Touch> shared_readers[MAX_WARPS];
    std::vector<char> shared_bytes;
    int num_releases;
    std::vector<Acquisition> acquisitions;
    std::shared_ptr<struct CtaBulk> bulk;
    std::shared_ptr<struct CtaGroups> groups;
    std::shared_ptr<struct CtaBanks> banks;
};

extern Cta *cta;
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
// The two halves of a barrier: publish_warp adds everything the lanes of a warp have done and seen; acquire_by_warp
// makes all its lanes see `from` and advances their clock.
void publish_warp(int warp, Clock (&to)[NUM_CLOCKS]);
void acquire_by_warp(int warp, const Clock (&from)[NUM_CLOCKS]);

// Yields while *number == value; yields until *word == value.
void wait_while(const int64_t *number, int64_t value, const char *name);
void wait_for_word(const int *word, int value);

// ---- shared memory -------------------------------------------------------------------------------

void *check_shared_place(shared_address address, int num_bytes); // returns the bytes' place
[[noreturn]] void fail_to_read(const SharedCell &cell, shared_address address);
inline void check_read(const SharedCell &cell, shared_address address) {
    if (cell.state != SharedCell::WRITTEN || !is_before_now(cell.writer)) fail_to_read(cell, address);
}

// ---- emulator_global.cpp -------------------------------------------------------------------------

void begin_launch_global();
bool is_lent(const void *begin, int64_t num_bytes);
// Checks an access by the adder's bulk addition or store `number`, when the adder knows num_complete of them to be
// complete. what: "addition" or "store".
void check_added(const char *what, const void *address, int64_t num_bytes, int adder, Clock number, Clock num_complete);
// fence_proxy_async_global by the adder.
void fence_acquisitions(int adder);

// ---- emulator_banks.cpp --------------------------------------------------------------------------

extern bool counts_banks;
void begin_launch_banks(const std::string &kernel);
void begin_cta_banks();
// Notes a lane's load or store at a place of the machine code, then counts those of a warp whose lanes have met.
void note_access(Access access, shared_address address, int num_bytes, const void *place);
void count_noted(int warp);

// ---- emulator_sm90.cpp, emulator_groups.cpp ------------------------------------------------------

shared_address swizzled(shared_address address);
// Completes one of the CTA's bulk copies to shared memory that are in flight. Returns whether there was any.
bool finish_bulk_copy(uint32_t random);
// Faults unless the thread that wrote the chunk has fenced its write for the async proxy, and a barrier followed
// the fence.
void check_fence(shared_address chunk, const char *what);

// Run before the first thread of a CTA starts, when a thread ends, and when all have ended.
void begin_cta_bulk();
void begin_cta_groups();
void end_thread_bulk();
void end_thread_groups();
void end_cta_bulk();
void end_cta_groups();

} // namespace emulator

#endif // RINGTILE_TESTS_MACHINE_H
