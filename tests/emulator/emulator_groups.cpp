// The emulator's warp groups: setmaxnreg and wgmma.
#include "../../cuda/device/ptx_sm90.cuh"
#include "machine.h"

namespace emulator {
namespace {

constexpr int GROUP = 128, MAX_GROUPS = MAX_THREADS / GROUP;

struct Sums { // an accumulator in flight
    float *visible;
    std::vector<float> value;
    int64_t group;
};
struct Left {
    const uint32_t *visible;
    uint32_t value[4];
    int64_t group;
};
struct Read { // 16 bytes of shared memory
    shared_address from;
    int64_t group;
};
struct Products { // in flight, of a thread
    bool fenced = false;
    int64_t group = 0;
    std::vector<Sums> sums;
    std::vector<Left> lefts;
    std::vector<Read> reads; // the warp's, kept by its first lane
};

using Threads = void *[GROUP];
struct GroupMeeting {
    int num_arrived;
    int64_t number;
    const char *name;
    Threads brought;
};

int64_t num_products; // since the program started

} // namespace

struct CtaGroups {
    Products products[MAX_THREADS];
    GroupMeeting meetings[MAX_GROUPS] = {};
    int registers[MAX_GROUPS] = {}; // per thread; 0: as launched
};

namespace {

Products &products_of(int thread) { return cta->groups->products[thread]; }

// Waits for the other threads of the group; the last to arrive calls act.
void meet_group(const char *name, void *mine, void (*act)(Threads &threads)) {
    const int group = current->index / GROUP;
    if (num_threads() < (group + 1) * GROUP) fail(std::string(name) + " in an incomplete warp group");
    GroupMeeting &meeting = cta->groups->meetings[group];
    if (meeting.num_arrived == 0) meeting.name = name;
    if (meeting.name != name && strcmp(meeting.name, name) != 0)
        fail(std::string("calls ") + name + " while threads of its group are in " + meeting.name);
    meeting.brought[current->index % GROUP] = mine;
    if (++meeting.num_arrived < GROUP) {
        wait_while(&meeting.number, meeting.number, name);
        return;
    }
    act(meeting.brought);
    meeting.num_arrived = 0;
    meeting.number++;
}

} // namespace

// ---- registers -----------------------------------------------------------------------------------

void setmaxnreg(int count, bool more) {
    const bool is_more = count > 65536 / num_threads() / 8 * 8;
    if (more != is_more) fail("setmaxnreg_inc to fewer registers, or setmaxnreg_dec to more");
    meet_group(more ? "setmaxnreg_inc" : "setmaxnreg_dec", nullptr, [](Threads &) {});
    cta->groups->registers[current->index / GROUP] = count;
}

// ---- products ------------------------------------------------------------------------------------

namespace {

struct Factor {
    shared_address first, panel_bytes, atom_bytes;
    explicit Factor(uint64_t word)
        : first((shared_address)(word & 0x3fff) << 4), panel_bytes((shared_address)(word >> 16 & 0x3fff) << 4),
          atom_bytes((shared_address)(word >> 32 & 0x3fff) << 4) {
        if (word >> 49 != (uint64_t)1 << 13)
            fail("a descriptor without the swizzle of 128 bytes, or with a base offset");
    }
    // 16 numbers of each row, contiguous along K.
    shared_address chunk_k_major(int row, int chunk) const {
        if (first % 1024 % 32 != 0 || first % 1024 >= 128) fail("a factor that begins inside a swizzle atom");
        return swizzled(first + (shared_address)(row / 8) * atom_bytes + (shared_address)(row % 8 * 128 + chunk * 16));
    }
    // 16 rows along K, in panels of 64 numbers.
    shared_address chunk_mn_major(int row, int chunk) const {
        if (first % 1024 != 0) fail("a factor that begins inside a swizzle atom");
        return swizzled(first + (shared_address)(chunk / 8) * panel_bytes + (shared_address)(row / 8) * atom_bytes +
                        (shared_address)(row % 8 * 128 + chunk % 8 * 16));
    }
};

// The first lane of a warp reads 16 bytes now; the hardware may read them at any time until the wait.
void read_factor(int warp, shared_address from) {
    Thread *const before = current;
    current = cta->threads[(size_t)warp * 32].get();
    check_shared(Access::READ, from, 16);
    check_fence(from, "a product reads");
    products_of(warp * 32).reads.push_back({from, products_of(warp * 32).group});
    current = before;
}

void load_chunk(shared_address from, float (*widen)(uint16_t), float (&to)[8]) {
    for (int i = 0; i < 8; i++) {
        uint16_t bits;
        memcpy(&bits, &cta->shared_bytes[from + (shared_address)(2 * i)], 2);
        to[i] = widen(bits);
    }
}

const uint32_t IN_FLIGHT = 0x7fc0dead; // a NaN, which accumulators hold until the wait

// Where a thread's accumulator is kept while it is in flight.
Sums &sums_of(Products &mine, const GroupProduct &product) {
    const size_t count = (size_t)product.num_cols / 2;
    for (Sums &sums : mine.sums)
        if (sums.visible == product.sum) return sums;
    mine.sums.push_back({product.sum, {product.sum, product.sum + count}, 0});
    for (size_t i = 0; i < count; i++) memcpy(product.sum + i, &IN_FLIGHT, 4);
    return mine.sums.back();
}

void multiply_group(Threads &brought) {
    const auto of_thread = [&](int i) -> const GroupProduct & {
        return *static_cast<const GroupProduct *>(brought[i]);
    };
    const GroupProduct &all = of_thread(0);
    num_products++;
    const int first_thread = current->index / GROUP * GROUP, first_warp = first_thread / 32;
    for (int i = 0; i < GROUP; i++) {
        const GroupProduct &own = of_thread(i);
        if (own.a != all.a || own.b != all.b || own.add != all.add || own.num_cols != all.num_cols ||
            own.left_major != all.left_major || own.right_major != all.right_major || own.widen != all.widen)
            fail("threads of a warp group start different products");
        if (!products_of(first_thread + i).fenced) fail("a product without wgmma_fence before it");
    }
    const bool left_mn = all.left_major == major::MN, right_mn = all.right_major == major::MN;
    double left[64][16], right[16][256];
    if (all.left == nullptr) {
        const Factor a(all.a);
        for (int i = 0; i < 64 * 2; i++) {
            float number[8];
            const int row = left_mn ? i / 8 : i / 2, chunk = left_mn ? i % 8 : i % 2;
            const shared_address from = left_mn ? a.chunk_mn_major(row, chunk) : a.chunk_k_major(row, chunk);
            read_factor(first_warp + (left_mn ? chunk / 2 : row / 16), from);
            load_chunk(from, all.widen, number);
            for (int j = 0; j < 8; j++) (left_mn ? left[chunk * 8 + j][row] : left[row][chunk * 8 + j]) = number[j];
        }
    } else {
        for (int i = 0; i < GROUP * 8; i++) { // as in mma_m16n8k16
            const int thread = i / 8, word = i / 2 % 4, lane = thread % 32;
            const uint32_t pair = of_thread(thread).left[word];
            left[thread / 32 * 16 + lane / 4 + word % 2 * 8][lane % 4 * 2 + word / 2 * 8 + i % 2] =
                all.widen((uint16_t)(i % 2 ? pair >> 16 : pair));
        }
        for (int i = 0; i < GROUP; i++) {
            Left kept = {of_thread(i).left, {}, products_of(first_thread + i).group};
            memcpy(kept.value, kept.visible, 16);
            products_of(first_thread + i).lefts.push_back(kept);
        }
    }
    const Factor b(all.b);
    for (int i = 0; i < all.num_cols * 2; i++) {
        float number[8];
        const int row = right_mn ? i / (all.num_cols / 8) : i / 2;
        const int chunk = right_mn ? i % (all.num_cols / 8) : i % 2;
        const shared_address from = right_mn ? b.chunk_mn_major(row, chunk) : b.chunk_k_major(row, chunk);
        for (int warp = 0; warp < 4; warp++) read_factor(first_warp + warp, from);
        load_chunk(from, all.widen, number);
        for (int j = 0; j < 8; j++) (right_mn ? right[row][chunk * 8 + j] : right[chunk * 8 + j][row]) = number[j];
    }
    Sums *sums[GROUP];
    for (int i = 0; i < GROUP; i++) {
        Products &mine = products_of(first_thread + i);
        sums[i] = &sums_of(mine, of_thread(i));
        sums[i]->group = mine.group;
    }
    for (int row = 0; row < 64; row++)
        for (int begin = 0; begin < all.num_cols; begin += 64) {
            double total[64] = {};
            for (int k = 0; k < 16; k++) {
                const double x = left[row][k], *const terms = right[k] + begin;
                double *const to = total; // pointers, so that the sanitizer checks no bounds in the inner loop
                for (int col = 0; col < 64; col++) to[col] += x * terms[col];
            }
            for (int col = 0; col < 64; col++) { // as in mma_m16n8k16
                const int thread = row / 16 * 32 + row % 8 * 4 + col % 8 / 2;
                float &sum = sums[thread]->value[(size_t)((begin + col) / 8 * 4 + row % 16 / 8 * 2 + col % 2)];
                sum = (float)(total[col] + (all.add ? (double)sum : 0));
            }
        }
}

} // namespace

void wgmma_mma_async(const GroupProduct &product) {
    GroupProduct mine = product;
    meet_group("wgmma_mma_async", &mine, multiply_group);
}

void wgmma_fence() { products_of(current->index).fenced = true; }

void wgmma_commit_group() {
    products_of(current->index).fenced = false;
    products_of(current->index).group++;
}

void wgmma_wait_group(int pending) {
    Products &mine = products_of(current->index);
    const int64_t end = mine.group - pending; // groups before it are complete
    for (const Sums &sums : mine.sums) {
        if (sums.group >= end) continue;
        for (size_t i = 0; i < sums.value.size(); i++) {
            if (memcmp(sums.visible + i, &IN_FLIGHT, 4) != 0) fail("an accumulator was written before the wait");
            sums.visible[i] = sums.value[i];
        }
    }
    for (const Left &left : mine.lefts)
        if (left.group < end && memcmp(left.visible, left.value, 16) != 0)
            fail("a left factor was changed before the wait");
    for (const Read &read : mine.reads)
        if (read.group < end) check_shared(Access::READ, read.from, 16);
    const auto is_complete = [&](const auto &x) { return x.group < end; };
    std::erase_if(mine.sums, is_complete);
    std::erase_if(mine.lefts, is_complete);
    std::erase_if(mine.reads, is_complete);
}

// ---- begin and end of a CTA ----------------------------------------------------------------------

void begin_cta_groups() { cta->groups = std::make_shared<CtaGroups>(); }

void end_thread_groups() {
    const Products &mine = products_of(current->index);
    if (!mine.sums.empty() || !mine.reads.empty()) fail("ends with products that it did not wait for");
}

void end_cta_groups() {
    int total = 0;
    for (int group = 0; group < num_threads() / GROUP; group++)
        total +=
            GROUP * (cta->groups->registers[group] ? cta->groups->registers[group] : 65536 / num_threads() / 8 * 8);
    if (total > 65536) fail("warp groups request " + std::to_string(total) + " registers");
}

} // namespace emulator

extern "C" int64_t emulator_group_products(void) { return emulator::num_products; }
