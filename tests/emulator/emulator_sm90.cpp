// The emulator's barriers in shared memory, bulk copies and products of a warp group.
#include "../../cuda/device_sm90.cuh"
#include "machine.h"

#include <map>

namespace emulator {
namespace {

constexpr int GROUP = 128, MAX_GROUPS = MAX_THREADS / GROUP;

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

struct Sums { // under way
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
struct Products { // of a thread
    bool fenced = false;
    int64_t group = 0;
    std::vector<Sums> sums;
    std::vector<Left> lefts;
    std::vector<Read> reads; // of the warp, kept by its first lane
};

struct Part { // a barrier of some warps
    int num_threads = 0, num_arrived = 0;
    int64_t number = 0; // phases that are over
    uint32_t came = 0;  // a bit for each warp
    std::vector<int> waiting;
    Clock arrived[NUM_CLOCKS] = {};
};

struct Adder { // a thread that adds boxes; how many of them are started, committed, read, over
    int thread;
    Clock num_started = 0, num_committed = 0, num_read = 0, num_over = 0;
};

using Threads = void *[GROUP];
struct GroupMeeting {
    int num_arrived;
    int64_t number;
    const char *name;
    Threads brought;
};

int64_t num_products; // since the start

} // namespace

struct BlockSm90 {
    std::map<shared_address, Barrier> barriers;
    Part parts[16];
    std::vector<Adder> adders;
    Products products[MAX_THREADS];
    GroupMeeting meetings[MAX_GROUPS] = {};
    int registers[MAX_GROUPS] = {}; // of a thread; 0: as at the start
};

namespace {

Products &products_of(int thread) { return block->sm90->products[thread]; }

// The last thread of a group to come calls act.
void meet_group(const char *name, void *mine, void (*act)(Threads &threads)) {
    const int group = current->index / GROUP;
    if (num_threads() < (group + 1) * GROUP) fail(std::string(name) + " in a group that is not whole");
    GroupMeeting &meeting = block->sm90->meetings[group];
    if (meeting.num_arrived == 0) meeting.name = name;
    if (strcmp(meeting.name, name) != 0)
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

// ---- barriers ------------------------------------------------------------------------------------

Barrier &barrier_at(shared_address address) {
    const auto found = block->sm90->barriers.find(address);
    if (found == block->sm90->barriers.end()) fail("no barrier at shared byte " + std::to_string(address));
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
    auto &barriers = block->sm90->barriers;
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
    for (auto &[at, barrier] : block->sm90->barriers)
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
        Part &part = block->sm90->parts[all.id];
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
    const Part &part = block->sm90->parts[id];
    while (waits && part.number == mine.number) wait_while(&part.number, mine.number, name);
}

// ---- bulk copies ---------------------------------------------------------------------------------

namespace {

shared_address swizzled(shared_address address) { return address ^ (address >> 7 & 7) << 4; }

// Bulk copies and products see what a thread wrote if it made a fence, and a barrier lies between the fence and now.
void check_fence(shared_address chunk, const std::string &what) {
    for (shared_address i = chunk; i < chunk + 16; i += CELL_BYTES) {
        const SharedCell &cell = block->shared_cells[i / CELL_BYTES];
        const int writer = cell.writer.thread;
        if (writer == NOBODY || writer >= MAX_THREADS) continue;
        const auto &fences = block->threads[(size_t)writer]->write_fences;
        if (fences.size() <= cell.num_write_fences || !is_before_now({writer, fences[cell.num_write_fences]}))
            fail(what +
                 " what a thread wrote, without a fence and a barrier between the two, at shared byte " +
                 std::to_string(i));
    }
}

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
    auto &adders = block->sm90->adders;
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
    Adder &mine = block->sm90->adders[(size_t)adder];
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
    Adder &mine = block->sm90->adders[(size_t)adder_of_thread()];
    mine.num_committed = mine.num_started;
}

void add_box_wait(bool only_read) {
    const int adder = adder_of_thread();
    Adder &mine = block->sm90->adders[(size_t)adder];
    current->seen[clock_of_reads(adder)] = mine.num_read = mine.num_committed;
    if (!only_read) mine.num_over = mine.num_committed;
}

void add_box_fence() {
    const int adder = adder_of_thread();
    current->seen[clock_of_sums(adder)] = block->sm90->adders[(size_t)adder].num_over;
    fence_acquisitions(adder);
}

// ---- registers -----------------------------------------------------------------------------------

void change_registers(int count, bool more) {
    const bool is_more = count > 65536 / num_threads() / 8 * 8;
    if (more != is_more) fail("gives registers that it takes, or takes what it gives");
    meet_group(more ? "take_registers" : "give_registers", nullptr, [](Threads &) {});
    block->sm90->registers[current->index / GROUP] = count;
}

// ---- products ------------------------------------------------------------------------------------

namespace {

struct Factor {
    shared_address first, panel_bytes, block_bytes;
    explicit Factor(uint64_t word)
        : first((shared_address)(word & 0x3fff) << 4),
          panel_bytes((shared_address)(word >> 16 & 0x3fff) << 4),
          block_bytes((shared_address)(word >> 32 & 0x3fff) << 4) {
        if (word >> 49 != (uint64_t)1 << 13)
            fail("a factor without the swizzle of 128 bytes, or with an offset");
    }
    // Rows across the sum, 16 numbers of each.
    shared_address chunk_of_row(int row, int chunk) const {
        if (first % 1024 % 32 != 0 || first % 1024 >= 128)
            fail("a factor that begins inside a swizzled block");
        return swizzled(first + (shared_address)(row / 8) * block_bytes +
                        (shared_address)(row % 8 * 128 + chunk * 16));
    }
    // 16 rows along the sum, in panels of 64 numbers.
    shared_address chunk_along_sum(int row, int chunk) const {
        if (first % 1024 != 0) fail("a factor that begins inside a swizzled block");
        return swizzled(first + (shared_address)(chunk / 8) * panel_bytes +
                        (shared_address)(row / 8) * block_bytes +
                        (shared_address)(row % 8 * 128 + chunk % 8 * 16));
    }
};

// The first lane of a warp looks at 16 bytes, as it may until the wait.
void read_factor(int warp, shared_address from) {
    Thread *const before = current;
    current = block->threads[(size_t)warp * 32].get();
    check_shared(Access::READ, from, 16);
    check_fence(from, "a product reads");
    products_of(warp * 32).reads.push_back({from, products_of(warp * 32).group});
    current = before;
}

void load_chunk(shared_address from, float (*widen)(uint16_t), float (&to)[8]) {
    for (int i = 0; i < 8; i++) {
        uint16_t bits;
        memcpy(&bits, &block->shared_bytes[from + (shared_address)(2 * i)], 2);
        to[i] = widen(bits);
    }
}

const uint32_t UNDER_WAY = 0x7fc0dead; // what sums hold until the wait: a NaN

// A thread's sums: where they are while products of them are under way.
Sums &sums_of(Products &mine, const GroupProduct &product) {
    const size_t count = (size_t)product.num_cols / 2;
    for (Sums &sums : mine.sums)
        if (sums.visible == product.sum) return sums;
    mine.sums.push_back({product.sum, {product.sum, product.sum + count}, 0});
    for (size_t i = 0; i < count; i++) memcpy(product.sum + i, &UNDER_WAY, 4);
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
            own.left_along_sum != all.left_along_sum || own.right_along_sum != all.right_along_sum ||
            own.widen != all.widen)
            fail("threads of a group start different products");
        if (!products_of(first_thread + i).fenced) fail("a product without a fence before it");
    }
    float left[64][16], right[16][128];
    if (all.left == nullptr) {
        const Factor a(all.a);
        for (int i = 0; i < 64 * 2; i++) {
            float number[8];
            const int row = all.left_along_sum ? i / 8 : i / 2, chunk = all.left_along_sum ? i % 8 : i % 2;
            const shared_address from =
                all.left_along_sum ? a.chunk_along_sum(row, chunk) : a.chunk_of_row(row, chunk);
            read_factor(first_warp + (all.left_along_sum ? chunk / 2 : row / 16), from);
            load_chunk(from, all.widen, number);
            for (int j = 0; j < 8; j++)
                (all.left_along_sum ? left[chunk * 8 + j][row] : left[row][chunk * 8 + j]) = number[j];
        }
    } else {
        for (int i = 0; i < GROUP * 8; i++) { // as in multiply_add
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
        const int row = all.right_along_sum ? i / (all.num_cols / 8) : i / 2;
        const int chunk = all.right_along_sum ? i % (all.num_cols / 8) : i % 2;
        const shared_address from =
            all.right_along_sum ? b.chunk_along_sum(row, chunk) : b.chunk_of_row(row, chunk);
        for (int warp = 0; warp < 4; warp++) read_factor(first_warp + warp, from);
        load_chunk(from, all.widen, number);
        for (int j = 0; j < 8; j++)
            (all.right_along_sum ? right[row][chunk * 8 + j] : right[chunk * 8 + j][row]) = number[j];
    }
    for (int row = 0; row < 64; row++) {
        double total[128] = {};
        for (int k = 0; k < 16; k++)
            for (int col = 0; col < all.num_cols; col++) total[col] += (double)left[row][k] * right[k][col];
        for (int col = 0; col < all.num_cols; col++) { // as in multiply_add
            const int thread = row / 16 * 32 + row % 8 * 4 + col % 8 / 2;
            const size_t i = (size_t)(col / 8 * 4 + row % 16 / 8 * 2 + col % 2);
            Products &mine = products_of(first_thread + thread);
            Sums &sums = sums_of(mine, of_thread(thread));
            sums.value[i] = (float)(total[col] + (all.add ? (double)sums.value[i] : 0));
            sums.group = mine.group;
        }
    }
}

} // namespace

void multiply_async(const GroupProduct &product) {
    GroupProduct mine = product;
    meet_group("multiply_async", &mine, multiply_group);
}

void products_fence() { products_of(current->index).fenced = true; }

void products_commit() {
    products_of(current->index).fenced = false;
    products_of(current->index).group++;
}

void products_wait(int pending) {
    Products &mine = products_of(current->index);
    const int64_t end = mine.group - pending; // groups before it are over
    for (const Sums &sums : mine.sums) {
        if (sums.group >= end) continue;
        for (size_t i = 0; i < sums.value.size(); i++) {
            if (memcmp(sums.visible + i, &UNDER_WAY, 4) != 0) fail("sums were written before the wait");
            sums.visible[i] = sums.value[i];
        }
    }
    for (const Left &left : mine.lefts)
        if (left.group < end && memcmp(left.visible, left.value, 16) != 0)
            fail("a left factor was changed before the wait");
    for (const Read &read : mine.reads)
        if (read.group < end) check_shared(Access::READ, read.from, 16);
    const auto is_over = [&](const auto &x) { return x.group < end; };
    std::erase_if(mine.sums, is_over);
    std::erase_if(mine.lefts, is_over);
    std::erase_if(mine.reads, is_over);
}

// ---- a block's life ------------------------------------------------------------------------------

void begin_block_sm90() { block->sm90 = std::make_shared<BlockSm90>(); }

void end_thread_sm90() {
    const Products &mine = products_of(current->index);
    if (!mine.sums.empty() || !mine.reads.empty()) fail("ends with products that it did not wait for");
    for (const Adder &adder : block->sm90->adders)
        if (adder.thread == current->index && adder.num_over < adder.num_started)
            fail("ends with an add_box that it did not wait for");
}

void end_block_sm90() {
    int total = 0;
    for (int group = 0; group < num_threads() / GROUP; group++)
        total += GROUP * (block->sm90->registers[group] ? block->sm90->registers[group]
                                                        : 65536 / num_threads() / 8 * 8);
    if (total > 65536) fail("groups take " + std::to_string(total) + " registers");
    for (const auto &[at, barrier] : block->sm90->barriers)
        if (barrier.bytes_missing > 0) fail("ends with a barrier that waits for bytes");
    for (const Part &part : block->sm90->parts)
        if (part.num_arrived > 0) fail("ends with a part_barrier that waits for threads");
}

} // namespace emulator

extern "C" int64_t emulator_group_products(void) { return emulator::num_products; }
