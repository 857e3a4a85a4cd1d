// The emulator's barriers of sm_90a, bulk copies and additions.
#include "../../cuda/device_sm90.cuh"
#include "machine.h"

#include <map>

namespace emulator {
namespace {

struct Barrier {
    int index;
    Touch init;
    bool fenced;
    int arrivals, arrivals_missing;
    int64_t bytes_missing;
    int64_t phase; // the one that is not over
    Clock arrived[NUM_CLOCKS] = {},
          over[NUM_CLOCKS] = {}; // what those have seen who arrived in it; in those before it
};

struct Part { // a barrier of some warps
    int num_threads = 0, num_arrived = 0;
    int64_t number = 0; // phases that are over
    uint32_t came = 0;  // a bit for each warp
    std::vector<int> waiting;
    Clock arrived[NUM_CLOCKS] = {};
};

struct Adder { // a thread that adds boxes; how many of them are started, committed, over
    int thread;
    Clock num_started = 0, num_committed = 0, num_over = 0;
};

} // namespace

struct BlockBulk {
    std::map<shared_address, Barrier> barriers;
    Part parts[16];
    std::vector<Adder> adders;
};

namespace {

// ---- barriers ------------------------------------------------------------------------------------

Barrier &barrier_at(shared_address address) {
    const auto found = block->bulk->barriers.find(address);
    if (found == block->bulk->barriers.end()) fail("no barrier at shared byte " + std::to_string(address));
    Barrier &barrier = found->second;
    if (!barrier.fenced || !is_before_now(barrier.init)) fail("uses a barrier before its init is visible");
    return barrier;
}

void end_phase_if_complete(Barrier &barrier) {
    if (barrier.arrivals_missing > 0 || barrier.bytes_missing > 0) return;
    barrier.phase++;
    join(barrier.over, barrier.arrived);
    barrier.over[clock_of_barrier(barrier.index)] = (Clock)barrier.phase;
    barrier.arrivals_missing = barrier.arrivals;
}

} // namespace

void barrier_init(shared_address at, int arrivals) {
    check_shared(Access::WRITE, at, 8);
    auto &barriers = block->bulk->barriers;
    if ((int)barriers.size() == MAX_BARRIERS) fail("too many barriers for the emulator");
    Barrier barrier = {.index = (int)barriers.size(),
                       .init = touch_now(),
                       .fenced = false,
                       .arrivals = arrivals,
                       .arrivals_missing = arrivals,
                       .bytes_missing = 0,
                       .phase = 0};
    if (!barriers.emplace(at, barrier).second) fail("a barrier's second init");
}

void barrier_init_fence() {
    for (auto &[at, barrier] : block->bulk->barriers)
        if (barrier.init.thread == current->index) barrier.fenced = true;
}

void barrier_arrive(shared_address at, int num_bytes) {
    Barrier &barrier = barrier_at(at);
    join(barrier.arrived, current->seen);
    barrier.bytes_missing += num_bytes;
    barrier.arrivals_missing--;
    end_phase_if_complete(barrier);
}

void barrier_wait(shared_address at, int parity) {
    const Barrier &barrier = barrier_at(at);
    while (barrier.phase % 2 == parity) wait_while(&barrier.phase, barrier.phase, "barrier_wait");
    join(current->seen, barrier.over);
}

// ---- barriers of a part of a block ---------------------------------------------------------------

void part_barrier(int id, int num_threads, bool waits) {
    struct Arrival {
        int id, num_threads;
        bool waits;
        int64_t number;
    } mine = {id, num_threads, waits, 0};
    if (id < 1 || id > 15) fail("a part_barrier of id " + std::to_string(id));
    if (num_threads < 32 || num_threads % 32 != 0 || num_threads > emulator::num_threads())
        fail("a part_barrier of " + std::to_string(num_threads) + " threads");
    const char *const name = waits ? "part_barrier" : "part_barrier_arrive";
    meet(name, &mine, [](Lanes &lanes) {
        const Arrival &all = *static_cast<const Arrival *>(lanes[0]);
        Part &part = block->bulk->parts[all.id];
        for (void *lane : lanes) {
            Arrival &own = *static_cast<Arrival *>(lane);
            if (own.id != all.id || own.num_threads != all.num_threads)
                fail("lanes of a warp at different part_barriers");
            own.number = part.number;
        }
        const int warp = warp_of(current->index);
        if (part.num_arrived > 0 && part.num_threads != all.num_threads)
            fail("a part_barrier of " + std::to_string(all.num_threads) + " threads, of " +
                 std::to_string(part.num_threads) + " for others");
        if (part.came >> warp & 1) fail("a warp comes twice to one part_barrier");
        part.num_threads = all.num_threads;
        part.came |= 1u << warp;
        if (all.waits) part.waiting.push_back(warp);
        publish_warp(warp, part.arrived);
        for (int i = warp * 32; i < warp * 32 + 32; i++) block->threads[(size_t)i]->now++;
        if ((part.num_arrived += 32) < part.num_threads) return;
        for (const int at_barrier : part.waiting) acquire_by_warp(at_barrier, part.arrived);
        const int64_t over = part.number;
        part = {};
        part.number = over + 1;
    });
    const Part &part = block->bulk->parts[id];
    while (waits && part.number == mine.number) wait_while(&part.number, mine.number, name);
}

// ---- bulk copies ---------------------------------------------------------------------------------

shared_address swizzled(shared_address address) { return address ^ (address >> 7 & 7) << 4; }

void check_fence(shared_address chunk, const char *what) {
    for (shared_address i = chunk; i < chunk + 16; i += CELL_BYTES) {
        const SharedCell &cell = block->shared_cells[i / CELL_BYTES];
        const int writer = cell.writer.thread;
        if (writer == NOBODY || writer >= MAX_THREADS) continue;
        const auto &fences = block->threads[(size_t)writer]->write_fences;
        if (fences.size() <= cell.num_write_fences || !is_before_now({writer, fences[cell.num_write_fences]}))
            fail(std::string(what) +
                 " what a thread wrote, without a fence and a barrier between the two, at shared byte " +
                 std::to_string(i));
    }
}

namespace {

// visit(chunk in shared memory, where it lies in the tensor, how many of its 16 bytes are inside)
template <class Visit>
void for_chunks_of_box(shared_address box, const tensor_map &map, const int64_t (&at)[4], Visit visit) {
    if (box % 1024 != 0) fail("a box at shared byte " + std::to_string(box) + ", no multiple of 1024");
    for (int i = 0; i < map.box_rows * 128; i += 16) {
        const int64_t row = at[1] + i / 128, col = at[0] + i % 128 / map.element_bytes;
        const bool inside = row >= 0 && row < map.size[1] && at[2] >= 0 && at[2] < map.size[2] &&
                            at[3] >= 0 && at[3] < map.size[3] && col >= 0;
        const int64_t num_bytes =
            inside ? std::clamp<int64_t>((map.size[0] - col) * map.element_bytes, 0, 16) : 0;
        const int64_t offset =
            row * map.stride[0] + at[2] * map.stride[1] + at[3] * map.stride[2] + col * map.element_bytes;
        visit(swizzled(box + (shared_address)i), map.array + (num_bytes ? offset : 0), num_bytes);
    }
}

} // namespace

void shared_write_fence() { current->write_fences.push_back(current->now); }

// The bytes are there at once, but nobody may look at them before the end of the barrier's phase.
void copy_box(shared_address to, const tensor_map &map, shared_address at, const int64_t (&from)[4]) {
    Barrier &barrier = barrier_at(at);
    const int num_bytes = map.box_rows * 128;
    if (barrier.bytes_missing < num_bytes) fail("a bulk copy of bytes that were not announced");
    const Touch writer = {thread_of_clock(clock_of_barrier(barrier.index)), (Clock)barrier.phase};
    for_chunks_of_box(to, map, from, [&](shared_address chunk, const char *source, int64_t count) {
        char *const bytes = static_cast<char *>(check_shared_place(chunk, 16));
        check_fence(chunk, "a bulk copy over");
        check_shared(Access::WRITE, chunk, 16);
        for (shared_address i = chunk; i < chunk + 16; i += CELL_BYTES)
            block->shared_cells[i / CELL_BYTES].writer = writer;
        memset(bytes, 0, 16);
        if (count == 0) return;
        if (!is_lent(source, count)) fail("a bulk copy from outside every array that was lent");
        memcpy(bytes, source, (size_t)count);
    });
    barrier.bytes_missing -= num_bytes;
    end_phase_if_complete(barrier);
}

// ---- bulk additions ------------------------------------------------------------------------------

namespace {

int adder_of_thread() {
    auto &adders = block->bulk->adders;
    for (size_t i = 0; i < adders.size(); i++)
        if (adders[i].thread == current->index) return (int)i;
    if ((int)adders.size() == MAX_ADDERS) fail("too many threads that add boxes for the emulator");
    adders.push_back({.thread = current->index});
    return (int)adders.size() - 1;
}

} // namespace

// The sums are there at once; who reads them, or writes what was added, too early is found by clocks.
void add_box(const tensor_map &map, shared_address from, const int64_t (&to)[4]) {
    if (map.element_bytes != sizeof(float)) fail("an add_box to a tensor that is not of float");
    const int adder = adder_of_thread();
    Adder &mine = block->bulk->adders[(size_t)adder];
    const Touch reader = {thread_of_clock(clock_of_reads(adder)), mine.num_started};
    for_chunks_of_box(from, map, to, [&](shared_address chunk, const char *sums, int64_t num_bytes) {
        const char *const bytes = static_cast<const char *>(check_shared_place(chunk, 16));
        for (shared_address i = chunk; i < chunk + 16; i += CELL_BYTES) {
            SharedCell &cell = block->shared_cells[i / CELL_BYTES];
            check_read(cell, i);
            if (cell.adder.thread != reader.thread && !is_before_now(cell.adder))
                fail("two threads add the same bytes, which the emulator does not follow");
            cell.adder = reader;
        }
        check_fence(chunk, "an add_box of");
        if (num_bytes > 0) check_added(sums, num_bytes, adder, mine.num_started, mine.num_over);
        for (int64_t i = 0; i < num_bytes; i += sizeof(float)) {
            float sum, added;
            memcpy(&sum, sums + i, sizeof(sum));
            memcpy(&added, bytes + i, sizeof(added));
            sum += added;
            memcpy(const_cast<char *>(sums) + i, &sum, sizeof(sum));
        }
    });
    mine.num_started++;
}

void add_box_commit() {
    Adder &mine = block->bulk->adders[(size_t)adder_of_thread()];
    mine.num_committed = mine.num_started;
}

void add_box_wait(bool only_read) {
    const int adder = adder_of_thread();
    Adder &mine = block->bulk->adders[(size_t)adder];
    current->seen[clock_of_reads(adder)] = mine.num_committed;
    if (!only_read) mine.num_over = mine.num_committed;
}

void add_box_fence() {
    const int adder = adder_of_thread();
    current->seen[clock_of_sums(adder)] = block->bulk->adders[(size_t)adder].num_over;
    fence_acquisitions(adder);
}

// ---- a block's life ------------------------------------------------------------------------------

void begin_block_bulk() { block->bulk = std::make_shared<BlockBulk>(); }

void end_thread_bulk() {
    for (const Adder &adder : block->bulk->adders)
        if (adder.thread == current->index && adder.num_over < adder.num_started)
            fail("ends with an add_box that it did not wait for");
}

void end_block_bulk() {
    for (const auto &[at, barrier] : block->bulk->barriers)
        if (barrier.bytes_missing > 0) fail("ends with a barrier that waits for bytes");
    for (const Part &part : block->bulk->parts)
        if (part.num_arrived > 0) fail("ends with a part_barrier that waits for threads");
}

} // namespace emulator
