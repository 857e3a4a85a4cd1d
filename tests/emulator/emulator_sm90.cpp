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

void join(Clock (&to)[NUM_CLOCKS], const Clock (&from)[NUM_CLOCKS]) {
    for (int i = 0; i < NUM_CLOCKS; i++) to[i] = std::max(to[i], from[i]);
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
    barrier.over[MAX_WARPS + barrier.index] = (Clock)barrier.phase;
    barrier.arrivals_missing = barrier.arrivals;
}

} // namespace

void barrier_init(shared_address at, int arrivals) {
    check_shared(Access::WRITE, at, 8);
    auto &barriers = block->sm90->barriers;
    if ((int)barriers.size() == MAX_BARRIERS) fail("too many barriers for the emulator");
    Barrier barrier = {.index = (int)barriers.size(),
                       .init = {current->index, current->seen[warp_of(current->index)]},
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

// ---- bulk copies ---------------------------------------------------------------------------------

static shared_address swizzled(shared_address address) { return address ^ (address >> 7 & 7) << 4; }

// The bytes are there at once, but nobody may look at them before the end of the barrier's phase.
void copy_box(shared_address to, const tensor_map &map, shared_address at, const int64_t (&from)[4]) {
    Barrier &barrier = barrier_at(at);
    if (to % 1024 != 0) fail("a bulk copy to shared byte " + std::to_string(to) + ", no multiple of 1024");
    const int num_bytes = map.box_rows * 128;
    if (barrier.bytes_missing < num_bytes) fail("a bulk copy of bytes that were not announced");
    for (int i = 0; i < num_bytes; i += 16) {
        const shared_address chunk_at = swizzled(to + (shared_address)i);
        if (block->shared_cells[chunk_at / CELL_BYTES].state != SharedCell::EMPTY &&
            block->shared_cells[chunk_at / CELL_BYTES].writer.thread < MAX_THREADS)
            fail("a bulk copy over what a thread wrote, without a fence between the two");
        char *const chunk = static_cast<char *>(check_shared(Access::WRITE, chunk_at, 16));
        for (int j = 0; j < 16; j += CELL_BYTES)
            block->shared_cells[(chunk_at + (shared_address)j) / CELL_BYTES].writer = {
                MAX_THREADS + 32 * barrier.index, (Clock)barrier.phase};
        memset(chunk, 0, 16);
        const int64_t row = from[1] + i / 128, col = from[0] + i % 128 / 2;
        const bool inside = row >= 0 && row < map.size[1] && from[2] >= 0 && from[2] < map.size[2] &&
                            from[3] >= 0 && from[3] < map.size[3] && col >= 0;
        const int64_t count = inside ? std::clamp<int64_t>(map.size[0] - col, 0, 8) : 0;
        if (count == 0) continue;
        const char *const source =
            map.array + row * map.stride[0] + from[2] * map.stride[1] + from[3] * map.stride[2] + 2 * col;
        if (!is_lent(source, 2 * count)) fail("a bulk copy from outside every array that was lent");
        memcpy(chunk, source, (size_t)(2 * count));
    }
    barrier.bytes_missing -= num_bytes;
    end_phase_if_complete(barrier);
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
    // Rows of at least 16 numbers, along the sum.
    shared_address chunk_of_row(int row, int chunk) const {
        if (first % 1024 % 32 != 0 || first % 1024 >= 128)
            fail("a factor that begins inside a swizzled block");
        return swizzled(first + (shared_address)(row / 8) * block_bytes +
                        (shared_address)(row % 8 * 128 + chunk * 16));
    }
    // 16 rows across the sum, each in panels of 64 numbers.
    shared_address chunk_across(int row, int chunk) const {
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
    if (block->shared_cells[from / CELL_BYTES].writer.thread < MAX_THREADS)
        fail("a product reads what a thread wrote, without a fence between the two");
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
            own.widen != all.widen)
            fail("threads of a group start different products");
        if (!products_of(first_thread + i).fenced) fail("a product without a fence before it");
    }
    float left[64][16], right[16][128];
    if (all.left == nullptr) {
        const Factor a(all.a);
        for (int i = 0; i < 64 * 2; i++) {
            float number[8];
            const shared_address from = a.chunk_of_row(i / 2, i % 2);
            read_factor(first_warp + i / 32, from);
            load_chunk(from, all.widen, number);
            for (int j = 0; j < 8; j++) left[i / 2][i % 2 * 8 + j] = number[j];
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
        const int row = all.rows_along_sum ? i / (all.num_cols / 8) : i / 2;
        const int chunk = all.rows_along_sum ? i % (all.num_cols / 8) : i % 2;
        const shared_address from =
            all.rows_along_sum ? b.chunk_across(row, chunk) : b.chunk_of_row(row, chunk);
        for (int warp = 0; warp < 4; warp++) read_factor(first_warp + warp, from);
        load_chunk(from, all.widen, number);
        for (int j = 0; j < 8; j++)
            (all.rows_along_sum ? right[row][chunk * 8 + j] : right[chunk * 8 + j][row]) = number[j];
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
}

void end_block_sm90() {
    int total = 0;
    for (int group = 0; group < num_threads() / GROUP; group++)
        total += GROUP * (block->sm90->registers[group] ? block->sm90->registers[group]
                                                        : 65536 / num_threads() / 8 * 8);
    if (total > 65536) fail("groups take " + std::to_string(total) + " registers");
    for (const auto &[at, barrier] : block->sm90->barriers)
        if (barrier.bytes_missing > 0) fail("ends with a barrier that waits for bytes");
}

} // namespace emulator

extern "C" int64_t emulator_group_products(void) { return emulator::num_products; }
