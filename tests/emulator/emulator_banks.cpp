// The emulator's bank conflicts. Shared memory has 32 banks of 4 bytes; a wavefront reads or writes one word of each.
#include "machine.h"

#include <cstdio>
#include <cstdlib>
#include <map>
#include <string_view>
#include <unordered_map>

namespace emulator {

bool counts_banks;

namespace {

struct WarpAccess {
    uint32_t lanes = 0; // a bit for each that takes part
    shared_address address[32];
};

// A place in the machine code that loads or stores. A lane's n-th access there since its warp last met belongs to the
// same instruction as the n-th of the other lanes.
struct Site {
    const char *instruction;
    int num_bytes;
    std::vector<WarpAccess> accesses;
    size_t next[32];
};

struct Wavefronts {
    int64_t taken = 0, ideal = 0;
};
using KernelCounts = std::map<std::pair<std::string_view, int>, Wavefronts>; // by instruction and bytes of a lane
std::map<std::string, KernelCounts> kernels;
KernelCounts *kernel_counts; // of this launch

void print_counts() {
    for (const auto &[kernel, counts] : kernels)
        for (const auto &[key, of] : counts)
            printf("%s: %s of %d bytes: %lld wavefronts / %lld ideal = %.3f\n", kernel.c_str(), key.first.data(),
                   key.second, (long long)of.taken, (long long)of.ideal, (double)of.taken / (double)of.ideal);
}

// A word that several lanes access counts once: it is broadcast, or written by one of them. As many lanes as 32 words
// serve go together: 32, 16 with 8 bytes each, 8 with 16; none of these parts can take less than one wavefront.
void count(const char *instruction, int num_bytes, const WarpAccess &access) {
    Wavefronts of;
    const int words = std::max(num_bytes / 4, 1), part = 32 / words;
    for (int first = 0; first < 32; first += part) {
        shared_address word[32], *end = word;
        for (int lane = first; lane < first + part; lane++)
            for (int i = 0; i < words && (access.lanes >> lane & 1); i++)
                *end++ = access.address[lane] / 4 + (shared_address)i;
        std::sort(word, end);
        end = std::unique(word, end);
        int in_bank[32] = {};
        for (const shared_address *at = word; at < end; at++) in_bank[*at % 32]++;
        of.taken += *std::max_element(in_bank, in_bank + 32);
        of.ideal += end > word;
    }
    Wavefronts &all = (*kernel_counts)[{instruction, num_bytes}];
    all.taken += of.taken;
    all.ideal += of.ideal;
}

} // namespace

struct CtaBanks {
    std::unordered_map<const void *, Site> sites[MAX_WARPS];
};

void count_banks(bool on) { counts_banks = on; }

int64_t bank_conflicts(const std::string &prefix) {
    int64_t sum = 0;
    for (const auto &[kernel, counts] : kernels)
        if (kernel.starts_with(prefix))
            for (const auto &[key, of] : counts) sum += of.taken - of.ideal;
    return sum;
}

void begin_launch_banks(const std::string &kernel) {
    static const bool prints = [] {
        const char *const set = getenv("RINGTILE_EMULATOR_BANKS");
        const bool on = set != nullptr && strcmp(set, "1") == 0;
        if (on) atexit(print_counts);
        return on;
    }();
    counts_banks |= prints;
    kernel_counts = &kernels[kernel];
}

void begin_cta_banks() { cta->banks = std::make_shared<CtaBanks>(); }

void note_access(Access access, shared_address address, int num_bytes, const void *place) {
    const char *const instruction = access == Access::READ ? "ld.shared" : "st.shared";
    Site &site =
        cta->banks->sites[warp_of(current->index)]
            .try_emplace(place, Site{.instruction = instruction, .num_bytes = num_bytes, .accesses = {}, .next = {}})
            .first->second;
    const int lane = current->index % 32;
    const size_t n = site.next[lane]++;
    if (n == site.accesses.size()) site.accesses.emplace_back();
    site.accesses[n].lanes |= 1u << lane;
    site.accesses[n].address[lane] = address;
}

void count_noted(int warp) {
    if (!counts_banks) return;
    auto &sites = cta->banks->sites[warp];
    for (const auto &[place, site] : sites)
        for (const WarpAccess &access : site.accesses) count(site.instruction, site.num_bytes, access);
    sites.clear();
}

void count_ldmatrix(const shared_address (&rows)[32]) {
    WarpAccess access = {.lanes = ~0u, .address = {}};
    std::copy(rows, rows + 32, access.address);
    count("ldmatrix", 16, access);
}

} // namespace emulator
