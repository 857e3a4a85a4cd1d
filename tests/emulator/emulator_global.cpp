// The emulator's global memory: what is lent, a shadow of it, and the words that blocks meet at.
#include "machine.h"

#include <map>

namespace emulator {
namespace {

constexpr int64_t NOT_PLAIN = -3; // a block

struct GlobalCell {
    int64_t write_block = -1,
            read_block = -1; // NOT_PLAIN: part of a word of wait_until, store_release, take_ticket
    Touch writer;
    int num_releases = 0; // of the writer's block, at that time
};

struct Region {
    const char *begin, *end;
    bool writable;
    int cell_bytes;
    std::vector<GlobalCell> cells;
};

std::vector<Region> regions;
std::map<const int *, Release> words; // what was last released to whom waits for a word

Region *region_of(const char *begin, const char *end) {
    for (Region &region : regions)
        if (begin >= region.begin && end <= region.end) return &region;
    return nullptr;
}

// Whether what another block wrote was released by it, and acquired by this one: for all adders of that mask, behind a fence.
bool is_acquired(const GlobalCell &cell, uint32_t adders = 0) {
    return std::any_of(block->acquisitions.rbegin(), block->acquisitions.rend(), [&](const Acquisition &of) {
        const Release &release = of.release;
        return release.block == cell.write_block && (of.fenced_adders & adders) == adders &&
               is_before_now(of.when) &&
               (cell.writer.thread == release.thread
                    ? cell.num_releases < release.number
                    : cell.writer.clock < release.seen[warp_of(cell.writer.thread)]);
    });
}

void check_not_read(const GlobalCell &cell) {
    if (cell.read_block != -1 && cell.read_block != block->index)
        fail("race in global memory: writes what another block read");
}

void touch_global_cell(Access access, GlobalCell &cell) {
    if (cell.write_block == NOT_PLAIN)
        fail("race in global memory: touches a word that blocks wait for or count with");
    if (cell.write_block >= 0 &&
        !(cell.write_block == block->index ? is_before_now(cell.writer) : is_acquired(cell)))
        fail("race in global memory: touches what block " + std::to_string(cell.write_block) + ", " +
             thread_name(cell.writer.thread) + " wrote");
    if (access == Access::READ) {
        cell.read_block = cell.read_block < 0 || cell.read_block == block->index ? block->index : SEVERAL;
        return;
    }
    check_not_read(cell);
    cell = {block->index, -1, touch_now(), block->num_releases};
}

Region &region_at(const void *address, int64_t num_bytes) {
    const char *const begin = static_cast<const char *>(address);
    if ((uintptr_t)begin % (uintptr_t)num_bytes != 0) fail("misaligned access to global memory");
    Region *const region = region_of(begin, begin + num_bytes);
    if (region == nullptr) fail("access to global memory outside every array that was lent");
    return *region;
}

template <class Touch> void for_cells(Region &region, const void *address, int64_t num_bytes, Touch touch) {
    const int64_t begin = static_cast<const char *>(address) - region.begin;
    for (int64_t i = begin / region.cell_bytes; i <= (begin + num_bytes - 1) / region.cell_bytes; i++)
        touch(region.cells[(size_t)i]);
}

// Blocks meet at these words: in this launch nobody touches them otherwise.
void check_word(const int *word) {
    Region &region = region_at(word, sizeof(*word));
    if (!region.writable) fail("writes an array that was lent for reading");
    for_cells(region, word, sizeof(*word), [](GlobalCell &cell) {
        if (cell.write_block >= 0 || cell.read_block != -1)
            fail("race in global memory: waits for or counts with a word that is also touched otherwise");
        cell.write_block = NOT_PLAIN;
    });
}

} // namespace

void lend(const void *begin, int64_t num_bytes, bool writable, int cell_bytes) {
    const char *const first = static_cast<const char *>(begin);
    regions.push_back({first, first + num_bytes, writable, cell_bytes, {}});
}

void take_back_all() { regions.clear(); }

void begin_launch_global() {
    words.clear();
    for (Region &region : regions)
        if (region.writable)
            region.cells.assign(
                (size_t)((region.end - region.begin + region.cell_bytes - 1) / region.cell_bytes), {});
}

bool is_lent(const void *begin, int64_t num_bytes) {
    const char *const first = static_cast<const char *>(begin);
    return region_of(first, first + num_bytes) != nullptr;
}

void check_global(Access access, const void *address, int64_t num_bytes) {
    Region &region = region_at(address, num_bytes);
    if (region.writable)
        for_cells(region, address, num_bytes, [=](GlobalCell &cell) { touch_global_cell(access, cell); });
    else if (access == Access::WRITE)
        fail("writes an array that was lent for reading");
}

void check_added(const void *address, int64_t num_bytes, int adder, Clock number, Clock num_over) {
    const char *const begin = static_cast<const char *>(address);
    Region *const region = region_of(begin, begin + num_bytes);
    if (region == nullptr) fail("an add_box to outside every array that was lent");
    if (!region->writable) fail("writes an array that was lent for reading");
    const Touch sum = {thread_of_clock(clock_of_sums(adder)), number};
    for_cells(*region, address, num_bytes, [&](GlobalCell &cell) {
        if (cell.write_block == NOT_PLAIN)
            fail("race in global memory: touches a word that blocks wait for or count with");
        if (cell.write_block == block->index) {
            if (cell.writer.thread < MAX_THREADS)
                fail("an add_box to what a thread of the block wrote, which the emulator does not follow");
            if (cell.writer.thread != sum.thread
                    ? !is_before_now(cell.writer)
                    : cell.writer.clock != number && cell.writer.clock >= num_over)
                fail("an add_box to what an earlier one adds to, without a wait between the two");
        } else if (cell.write_block >= 0 && !is_acquired(cell, 1u << adder))
            fail("race in global memory: adds to what block " + std::to_string(cell.write_block) + ", " +
                 thread_name(cell.writer.thread) + " wrote");
        check_not_read(cell);
        cell = {block->index, -1, sum, block->num_releases};
    });
}

void fence_acquisitions(int adder) {
    for (Acquisition &of : block->acquisitions)
        if (is_before_now(of.when)) of.fenced_adders |= 1u << adder;
}

int take_ticket(int *counter) {
    check_word(counter);
    return (*counter)++;
}

void wait_until(const int *word, int value) {
    check_word(word);
    wait_for_word(word, value);
    const auto found = words.find(word);
    if (found != words.end()) block->acquisitions.push_back({touch_now(), found->second, 0});
}

void store_release(int *word, int value) {
    check_word(word);
    if (block->num_releases++ > 0 && block->releasing_thread != current->index)
        fail("store_release by a second thread of the block, which the emulator does not follow");
    block->releasing_thread = current->index;
    Release &release = words[word] = {block->index, current->index, block->num_releases, {}};
    memcpy(release.seen, current->seen, sizeof(release.seen));
    *word = value;
}

} // namespace emulator

extern "C" {
void emulator_lend(const void *begin, int64_t num_bytes, bool writable) {
    emulator::lend(begin, num_bytes, writable);
}
void emulator_take_back_all(void) { emulator::take_back_all(); }
}
