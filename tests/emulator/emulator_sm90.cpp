// The emulator's mbarriers, named barriers, and bulk copies and additions.
#include "../../cuda/device/ptx_sm90.cuh"
#include "machine.h"

#include <map>

namespace emulator {
namespace {

struct Mbarrier {
    int index;
    Touch init;
    bool fenced;
    int arrivals, arrivals_missing;
    int64_t bytes_missing, bytes_in_flight; // announced and not there; of these, being copied
    int64_t phase;                          // the current one
    int64_t last_copy;                      // phase of the last copy that started, -1 before
    Clock arrived[NUM_CLOCKS] = {},
          complete[NUM_CLOCKS] = {}; // released by the arrivals of the current phase; of the complete ones
};

struct NamedBarrier {
    int num_threads = 0, num_arrived = 0;
    int64_t number = 0; // of complete phases
    uint32_t came = 0;  // a bit for each warp
    std::vector<int> waiting;
    Clock arrived[NUM_CLOCKS] = {};
};

struct BulkCopy { // to shared memory, in flight
    shared_address to, barrier;
    tensor_map map;
    int64_t from[4];
};

struct Adder { // a thread that starts bulk additions or stores
    int thread;
    Clock num_started = 0, num_committed = 0, num_read = 0, num_complete = 0;
    Clock last_addition = 0; // 1 + its number
};

} // namespace

struct CtaBulk {
    std::map<shared_address, Mbarrier> barriers;
    NamedBarrier named[16];
    std::vector<BulkCopy> copies;
    std::vector<Adder> adders;
};

namespace {

// ---- mbarriers -----------------------------------------------------------------------------------

Mbarrier &barrier_at(shared_address address) {
    const auto found = cta->bulk->barriers.find(address);
    if (found == cta->bulk->barriers.end()) fail("no mbarrier at shared byte " + std::to_string(address));
    Mbarrier &barrier = found->second;
    if (!barrier.fenced || !is_before_now(barrier.init)) fail("uses an mbarrier before its init is visible");
    return barrier;
}

void end_phase_if_complete(Mbarrier &barrier) {
    if (barrier.arrivals_missing > 0 || barrier.bytes_missing > 0) return;
    barrier.phase++;
    join(barrier.complete, barrier.arrived);
    barrier.complete[clock_of_barrier(barrier.index)] = (Clock)barrier.phase;
    barrier.arrivals_missing = barrier.arrivals;
}

} // namespace

void mbarrier_init(shared_address at, int arrivals) {
    check_shared(Access::WRITE, at, 8);
    auto &barriers = cta->bulk->barriers;
    if ((int)barriers.size() == MAX_BARRIERS) fail("more mbarriers than the emulator has room for");
    Mbarrier barrier = {.index = (int)barriers.size(),
                        .init = touch_now(),
                        .fenced = false,
                        .arrivals = arrivals,
                        .arrivals_missing = arrivals,
                        .bytes_missing = 0,
                        .bytes_in_flight = 0,
                        .phase = 0,
                        .last_copy = -1};
    if (!barriers.emplace(at, barrier).second) fail("initializes an mbarrier twice");
}

void fence_mbarrier_init() {
    for (auto &[at, barrier] : cta->bulk->barriers)
        if (barrier.init.thread == current->index) barrier.fenced = true;
}

void mbarrier_arrive(shared_address at, int num_bytes) {
    Mbarrier &barrier = barrier_at(at);
    join(barrier.arrived, current->seen);
    barrier.bytes_missing += num_bytes;
    if (--barrier.arrivals_missing < 0) fail("one arrival too many in a phase of an mbarrier");
    end_phase_if_complete(barrier);
}

void mbarrier_wait_parity(shared_address at, int parity) {
    const Mbarrier &barrier = barrier_at(at);
    if (const int64_t awaited = barrier.phase; awaited % 2 == parity) {
        wait_while(&barrier.phase, awaited, "mbarrier_try_wait_parity");
        if (barrier.phase != awaited + 1) fail("waits for a phase of an mbarrier that a later one has overtaken");
    }
    join(current->seen, barrier.complete);
}

// ---- named barriers ------------------------------------------------------------------------------

void named_barrier(int id, int num_threads, bool waits) {
    struct Arrival {
        int id, num_threads;
        bool waits;
        int64_t number;
    } mine = {id, num_threads, waits, 0};
    if (id < 1 || id > 15) fail("a named barrier of id " + std::to_string(id));
    if (num_threads < 32 || num_threads % 32 != 0 || num_threads > emulator::num_threads())
        fail("a named barrier of " + std::to_string(num_threads) + " threads");
    const char *const name = waits ? "named_barrier_sync" : "named_barrier_arrive";
    meet(name, &mine, [](Lanes &lanes) {
        const Arrival &all = *static_cast<const Arrival *>(lanes[0]);
        NamedBarrier &named = cta->bulk->named[all.id];
        for (void *lane : lanes) {
            Arrival &own = *static_cast<Arrival *>(lane);
            if (own.id != all.id || own.num_threads != all.num_threads)
                fail("lanes of a warp at different named barriers");
            own.number = named.number;
        }
        const int warp = warp_of(current->index);
        if (named.num_arrived > 0 && named.num_threads != all.num_threads)
            fail("a named barrier of " + std::to_string(all.num_threads) + " threads, of " +
                 std::to_string(named.num_threads) + " for others");
        if (named.came >> warp & 1) fail("a warp arrives twice in one phase of a named barrier");
        named.num_threads = all.num_threads;
        named.came |= 1u << warp;
        if (all.waits) named.waiting.push_back(warp);
        publish_warp(warp, named.arrived);
        for (int i = warp * 32; i < warp * 32 + 32; i++) cta->threads[(size_t)i]->now++;
        if ((named.num_arrived += 32) < named.num_threads) return;
        for (const int at_barrier : named.waiting) acquire_by_warp(at_barrier, named.arrived);
        const int64_t complete = named.number;
        named = {};
        named.number = complete + 1;
    });
    const NamedBarrier &named = cta->bulk->named[id];
    while (waits && named.number == mine.number) wait_while(&named.number, mine.number, name);
}

// ---- bulk copies ---------------------------------------------------------------------------------

shared_address swizzled(shared_address address) { return address ^ (address >> 7 & 7) << 4; }

void check_fence(shared_address chunk, const char *what) {
    for (shared_address i = chunk; i < chunk + 16; i += CELL_BYTES) {
        const SharedCell &cell = cta->shared_cells[i / CELL_BYTES];
        const int writer = cell.writer.thread;
        if (writer == NOBODY || writer >= MAX_THREADS) continue;
        const auto &fences = cta->threads[(size_t)writer]->proxy_fences;
        if (fences.size() <= cell.num_proxy_fences || !is_before_now({writer, fences[cell.num_proxy_fences]}))
            fail(std::string(what) +
                 " what a thread wrote, without fence_proxy_async_shared and a barrier between, at shared "
                 "byte " +
                 std::to_string(i));
    }
}

namespace {

// Calls visit(chunk in shared memory, its place in the tensor, how many of its 16 bytes lie inside the tensor).
template <class Visit>
void for_chunks_of_box(shared_address box, const tensor_map &map, const int64_t (&at)[4], Visit visit) {
    if (box % 1024 != 0) fail("a box at shared byte " + std::to_string(box) + ", not a multiple of 1024");
    for (int i = 0; i < map.box_rows * 128; i += 16) {
        const int64_t row = at[1] + i / 128, col = at[0] + i % 128 / map.element_bytes;
        const bool inside = row >= 0 && row < map.size[1] && at[2] >= 0 && at[2] < map.size[2] && at[3] >= 0 &&
                            at[3] < map.size[3] && col >= 0;
        const int64_t num_bytes = inside ? std::clamp<int64_t>((map.size[0] - col) * map.element_bytes, 0, 16) : 0;
        const int64_t offset =
            row * map.stride[0] + at[2] * map.stride[1] + at[3] * map.stride[2] + col * map.element_bytes;
        visit(swizzled(box + (shared_address)i), map.array + (num_bytes ? offset : 0), num_bytes);
    }
}

} // namespace

void fence_proxy_async_shared() { current->proxy_fences.push_back(current->now); }

// No thread may read the bytes before the phase of the mbarrier completes; until they land, they are NaNs.
void cp_async_bulk_tensor(shared_address to, const tensor_map &map, shared_address at, const int64_t (&from)[4]) {
    Mbarrier &barrier = barrier_at(at);
    const int num_bytes = map.box_rows * 128;
    if (barrier.bytes_missing - barrier.bytes_in_flight < num_bytes) fail("a bulk copy of unannounced bytes");
    const Touch writer = {thread_of_clock(clock_of_barrier(barrier.index)), (Clock)barrier.phase};
    for_chunks_of_box(to, map, from, [&](shared_address chunk, const char *source, int64_t count) {
        char *const bytes = static_cast<char *>(check_shared_place(chunk, 16));
        check_fence(chunk, "a bulk copy over");
        check_shared(Access::WRITE, chunk, 16);
        for (shared_address i = chunk; i < chunk + 16; i += CELL_BYTES)
            cta->shared_cells[i / CELL_BYTES].writer = writer;
        memset(bytes, 0xff, 16);
        if (count > 0 && !is_lent(source, count)) fail("a bulk copy from outside the lent arrays");
    });
    barrier.bytes_in_flight += num_bytes;
    barrier.last_copy = barrier.phase;
    cta->bulk->copies.push_back({to, at, map, {from[0], from[1], from[2], from[3]}});
}

bool finish_bulk_copy(uint32_t random) {
    auto &copies = cta->bulk->copies;
    if (copies.empty()) return false;
    std::swap(copies[random % copies.size()], copies.back());
    const BulkCopy copy = copies.back();
    copies.pop_back();
    for_chunks_of_box(copy.to, copy.map, copy.from, [&](shared_address chunk, const char *source, int64_t count) {
        char *const bytes = &cta->shared_bytes[chunk];
        memset(bytes, 0, 16);
        if (count > 0) memcpy(bytes, source, (size_t)count);
    });
    Mbarrier &barrier = cta->bulk->barriers.at(copy.barrier);
    barrier.bytes_missing -= copy.map.box_rows * 128;
    barrier.bytes_in_flight -= copy.map.box_rows * 128;
    end_phase_if_complete(barrier);
    return true;
}

// ---- bulk additions and stores -------------------------------------------------------------------

namespace {

int adder_of_thread() {
    auto &adders = cta->bulk->adders;
    for (size_t i = 0; i < adders.size(); i++)
        if (adders[i].thread == current->index) return (int)i;
    if ((int)adders.size() == MAX_ADDERS) fail("more adding threads than the emulator has room for");
    adders.push_back({.thread = current->index});
    return (int)adders.size() - 1;
}

// The sums are there at once; clocks find a thread that reads them, or overwrites the source, too early.
// write(to, from, num_bytes) adds or stores some bytes of a chunk.
template <class Write>
void write_box(const char *what, const tensor_map &map, shared_address from, const int64_t (&to)[4], Write write) {
    const int adder = adder_of_thread();
    Adder &mine = cta->bulk->adders[(size_t)adder];
    const Touch reader = {thread_of_clock(clock_of_reads(adder)), mine.num_started};
    for_chunks_of_box(from, map, to, [&](shared_address chunk, const char *sums, int64_t num_bytes) {
        const char *const bytes = static_cast<const char *>(check_shared_place(chunk, 16));
        for (shared_address i = chunk; i < chunk + 16; i += CELL_BYTES) {
            SharedCell &cell = cta->shared_cells[i / CELL_BYTES];
            check_read(cell, i);
            if (cell.adder.thread != reader.thread && !is_before_now(cell.adder))
                fail("two threads add the same bytes, which the emulator cannot track");
            cell.adder = reader;
        }
        check_fence(chunk, ("a bulk " + std::string(what) + " of").c_str());
        if (num_bytes == 0) return;
        check_added(what, sums, num_bytes, adder, mine.num_started, mine.num_complete);
        write(const_cast<char *>(sums), bytes, num_bytes);
    });
    mine.num_started++;
}

} // namespace

void cp_reduce_async_bulk_tensor(const tensor_map &map, shared_address from, const int64_t (&to)[4]) {
    if (map.element_bytes != sizeof(float)) fail("a bulk addition to a tensor that is not of float");
    write_box("addition", map, from, to, [](char *sums, const char *bytes, int64_t num_bytes) {
        for (int64_t i = 0; i < num_bytes; i += sizeof(float)) {
            float sum, added;
            memcpy(&sum, sums + i, sizeof(sum));
            memcpy(&added, bytes + i, sizeof(added));
            sum += added;
            memcpy(sums + i, &sum, sizeof(sum));
        }
    });
    Adder &mine = cta->bulk->adders[(size_t)adder_of_thread()];
    mine.last_addition = mine.num_started;
}

void cp_async_bulk_tensor(const tensor_map &map, shared_address from, const int64_t (&to)[4]) {
    write_box("store", map, from, to,
              [](char *there, const char *bytes, int64_t num_bytes) { memcpy(there, bytes, (size_t)num_bytes); });
}

void cp_async_bulk_commit_group() {
    Adder &mine = cta->bulk->adders[(size_t)adder_of_thread()];
    mine.num_committed = mine.num_started;
}

void cp_async_bulk_wait_group(bool only_read) {
    const int adder = adder_of_thread();
    Adder &mine = cta->bulk->adders[(size_t)adder];
    current->seen[clock_of_reads(adder)] = mine.num_read = mine.num_committed;
    if (!only_read) mine.num_complete = mine.num_committed;
}

void fence_proxy_async_global() {
    const int adder = adder_of_thread();
    current->seen[clock_of_sums(adder)] = cta->bulk->adders[(size_t)adder].num_complete;
    fence_acquisitions(adder);
}

// ---- begin and end of a CTA ----------------------------------------------------------------------

void begin_cta_bulk() { cta->bulk = std::make_shared<CtaBulk>(); }

void end_thread_bulk() {
    for (const Adder &adder : cta->bulk->adders) {
        if (adder.thread != current->index) continue;
        if (adder.num_complete < adder.last_addition) fail("ends with a bulk addition that it did not wait for");
        // The end of a kernel completes its stores, but shared memory ends with the CTA.
        if (adder.num_read < adder.num_started) fail("ends with a bulk store that has not read its source");
    }
}

void end_cta_bulk() {
    for (const auto &[at, barrier] : cta->bulk->barriers) {
        if (barrier.bytes_missing > barrier.bytes_in_flight) fail("ends with an mbarrier that waits for bytes");
        const int clock = clock_of_barrier(barrier.index);
        const bool waited = std::any_of(cta->threads.begin(), cta->threads.end(), [&](const auto &thread) {
            return (int64_t)thread->seen[clock] > barrier.last_copy;
        });
        if (!waited) fail("ends with a bulk copy that no thread has waited for");
    }
    for (const NamedBarrier &named : cta->bulk->named)
        if (named.num_arrived > 0) fail("ends with a named barrier that waits for threads");
}

} // namespace emulator
