// The emulator's global memory: the lent arrays, a shadow of them, and the words through which CTAs synchronize.
#include "machine.h"

#include <map>

namespace emulator {
namespace {

constexpr int64_t NOT_PLAIN = -3; // in place of a CTA

struct GlobalCell {
    int64_t write_cta = -1,
            read_cta = -1; // NOT_PLAIN: part of a word of wait_eq, st_release, atom_add
    Touch writer;
    int num_releases = 0; // of the writer's CTA, at that time
};

struct Region {
    const char *begin, *end;
    bool writable;
    int cell_bytes;
    std::vector<GlobalCell> cells;
    int64_t num_reads = 0;
};

std::vector<Region> regions;
std::map<const int *, Release> words; // the last release through each word

Region *region_of(const char *begin, const char *end) {
    for (Region &region : regions)
        if (begin >= region.begin && end <= region.end) return &region;
    return nullptr;
}

// Whether the writing CTA released its write and this one acquired it; for every adder in the mask, with a fence
// behind.
bool is_acquired(const GlobalCell &cell, uint32_t adders = 0) {
    return std::any_of(cta->acquisitions.rbegin(), cta->acquisitions.rend(), [&](const Acquisition &of) {
        const Release &release = of.release;
        return release.cta == cell.write_cta && (of.fenced_adders & adders) == adders && is_before_now(of.when) &&
               (cell.writer.thread == release.thread ? cell.num_releases < release.number
                                                     : cell.writer.clock < release.seen[warp_of(cell.writer.thread)]);
    });
}

void check_not_read(const GlobalCell &cell) {
    if (cell.read_cta != -1 && cell.read_cta != cta->index) fail("race in global memory: writes what another CTA read");
}

void touch_global_cell(Access access, GlobalCell &cell) {
    if (cell.write_cta == NOT_PLAIN)
        fail("race in global memory: plain access to a word through which CTAs synchronize");
    if (cell.write_cta >= 0 && !(cell.write_cta == cta->index ? is_before_now(cell.writer) : is_acquired(cell)))
        fail("race in global memory: touches what CTA " + std::to_string(cell.write_cta) + ", " +
             thread_name(cell.writer.thread) + " wrote");
    if (access == Access::READ) {
        cell.read_cta = cell.read_cta < 0 || cell.read_cta == cta->index ? cta->index : SEVERAL;
        return;
    }
    check_not_read(cell);
    cell = {cta->index, -1, touch_now(), cta->num_releases};
}

Region &region_at(const void *address, int64_t num_bytes) {
    const char *const begin = static_cast<const char *>(address);
    if ((uintptr_t)begin % (uintptr_t)num_bytes != 0) fail("misaligned access to global memory");
    Region *const region = region_of(begin, begin + num_bytes);
    if (region == nullptr) fail("access to global memory outside the lent arrays");
    return *region;
}

template <class Touch> void for_cells(Region &region, const void *address, int64_t num_bytes, Touch touch) {
    const int64_t begin = static_cast<const char *>(address) - region.begin;
    for (int64_t i = begin / region.cell_bytes; i <= (begin + num_bytes - 1) / region.cell_bytes; i++)
        touch(region.cells[(size_t)i]);
}

// Within a launch, a word through which CTAs synchronize is accessed in no other way.
void check_word(const int *word) {
    Region &region = region_at(word, sizeof(*word));
    if (!region.writable) fail("writes an array lent for reading");
    for_cells(region, word, sizeof(*word), [](GlobalCell &cell) {
        if (cell.write_cta >= 0 || cell.read_cta != -1)
            fail("race in global memory: synchronizes through a word that also has plain accesses");
        cell.write_cta = NOT_PLAIN;
    });
}

} // namespace

void lend(const void *begin, int64_t num_bytes, bool writable, int cell_bytes) {
    const char *const first = static_cast<const char *>(begin);
    regions.push_back({first, first + num_bytes, writable, cell_bytes, {}, 0});
}

void take_back_all() { regions.clear(); }

int64_t num_reads(const void *begin) {
    const Region *const region = region_of(static_cast<const char *>(begin), static_cast<const char *>(begin));
    return region == nullptr ? 0 : region->num_reads;
}

void begin_launch_global() {
    words.clear();
    for (Region &region : regions)
        if (region.writable)
            region.cells.assign((size_t)((region.end - region.begin + region.cell_bytes - 1) / region.cell_bytes), {});
}

bool is_lent(const void *begin, int64_t num_bytes) {
    const char *const first = static_cast<const char *>(begin);
    return region_of(first, first + num_bytes) != nullptr;
}

void check_global(Access access, const void *address, int64_t num_bytes) {
    Region &region = region_at(address, num_bytes);
    region.num_reads += access == Access::READ;
    if (region.writable)
        for_cells(region, address, num_bytes, [=](GlobalCell &cell) { touch_global_cell(access, cell); });
    else if (access == Access::WRITE)
        fail("writes an array lent for reading");
}

void check_added(const char *what, const void *address, int64_t num_bytes, int adder, Clock number,
                 Clock num_complete) {
    const std::string name = std::string("a bulk ") + what;
    const char *const begin = static_cast<const char *>(address);
    Region *const region = region_of(begin, begin + num_bytes);
    if (region == nullptr) fail(name + " outside the lent arrays");
    if (!region->writable) fail("writes an array lent for reading");
    const Touch sum = {thread_of_clock(clock_of_sums(adder)), number};
    for_cells(*region, address, num_bytes, [&](GlobalCell &cell) {
        if (cell.write_cta == NOT_PLAIN)
            fail("race in global memory: plain access to a word through which CTAs synchronize");
        if (cell.write_cta == cta->index) {
            if (cell.writer.thread < MAX_THREADS)
                fail(name + " to what a thread of the CTA wrote, which the emulator cannot track");
            if (cell.writer.thread != sum.thread ? !is_before_now(cell.writer)
                                                 : cell.writer.clock != number && cell.writer.clock >= num_complete)
                fail(name + " to what an earlier one writes, without a wait between");
        } else if (cell.write_cta >= 0 && !is_acquired(cell, 1u << adder))
            fail("race in global memory: " + name + " to what CTA " + std::to_string(cell.write_cta) + ", " +
                 thread_name(cell.writer.thread) + " wrote");
        check_not_read(cell);
        cell = {cta->index, -1, sum, cta->num_releases};
    });
}

void fence_acquisitions(int adder) {
    for (Acquisition &of : cta->acquisitions)
        if (is_before_now(of.when)) of.fenced_adders |= 1u << adder;
}

int atom_add(int *counter, int x) {
    check_word(counter);
    const int before = *counter;
    *counter += x;
    return before;
}

void wait_eq(const int *word, int value) {
    check_word(word);
    wait_for_word(word, value);
    const auto found = words.find(word);
    if (found != words.end()) cta->acquisitions.push_back({touch_now(), found->second, 0});
}

void st_release(int *word, int value) {
    check_word(word);
    cta->num_releases++;
    Release &release = words[word] = {cta->index, current->index, cta->num_releases, {}};
    memcpy(release.seen, current->seen, sizeof(release.seen));
    *word = value;
}

} // namespace emulator

extern "C" {
void emulator_lend(const void *begin, int64_t num_bytes, bool writable) { emulator::lend(begin, num_bytes, writable); }
void emulator_take_back_all(void) { emulator::take_back_all(); }
int64_t emulator_reads(const void *begin) { return emulator::num_reads(begin); }
}
