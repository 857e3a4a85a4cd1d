// The emulator: fibers, clocks, and a shadow of shared memory that knows who touched what, when.
#include "machine.h"

#include <cstdio>
#include <numeric>
#include <random>

namespace emulator {

Block *block;
Thread *current;

namespace {

constexpr int STACK_BYTES = 256 * 1024;
jmp_buf scheduler;
ucontext_t boot;
std::vector<std::unique_ptr<Block>> blocks; // those that run side by side
int most_blocks = 1, threads_in_block;
std::minstd_rand draw;
grid_size grid{1};
const std::function<void()> *kernel_body;
std::vector<std::unique_ptr<Fault>> faults; // of this launch
Statistics counted;
int capability = 80;

// ---- fibers --------------------------------------------------------------------------------------

// The first switch into a fiber needs ucontext; setjmp makes the others cheap, as it leaves the signal mask alone.
void give_way() {
    if (_setjmp(current->at) == 0) _longjmp(scheduler, 1);
}

void fiber_main() {
    Thread *const self = current;
    if (_setjmp(self->at) == 0) setcontext(&boot);
    for (;;) {
        try {
            (*kernel_body)();
            if (!self->copies.empty()) fail("ends with an async copy that it did not wait for");
            end_thread_bulk();
            end_thread_groups();
        } catch (const Fault &fault) {
            faults.push_back(std::make_unique<Fault>(fault));
        }
        self->done = true;
        give_way();
    }
}

void add_thread() {
    auto thread = std::make_unique<Thread>();
    thread->index = (int)block->threads.size();
    thread->stack = std::make_unique_for_overwrite<char[]>(STACK_BYTES);
    getcontext(&thread->start);
    thread->start.uc_stack.ss_sp = thread->stack.get();
    thread->start.uc_stack.ss_size = STACK_BYTES;
    thread->start.uc_link = nullptr;
    makecontext(&thread->start, fiber_main, 0);
    current = thread.get();
    swapcontext(&boot, &thread->start);
    block->threads.push_back(std::move(thread));
}

bool is_ready(const Thread &thread) {
    return !thread.done && (thread.waits_for == nullptr || *thread.waits_for != thread.waits_value) &&
           (thread.word == nullptr || *thread.word == thread.word_value);
}

void resume(Thread &thread) {
    current = &thread;
    thread.waits_for = nullptr;
    thread.word = nullptr;
    if (_setjmp(scheduler) == 0) _longjmp(thread.at, 1);
    if (!faults.empty()) throw *faults.front();
}

// Whether one of the lanes could go on. A warp does so for as long as one can.
bool run_warp(int warp) {
    bool any = false;
    for (bool progress = true; progress; any |= progress) {
        progress = false;
        for (int i = warp * 32; i < warp * 32 + 32; i++)
            if (is_ready(*block->threads[(size_t)i])) {
                resume(*block->threads[(size_t)i]);
                progress = true;
            }
    }
    return any;
}

// The next block of the grid, in a place where none runs any more.
void start_block(Block &in, int64_t index, int num_shared_bytes) {
    block = &in;
    block->index = index;
    block->done = false;
    block->shared_bytes.assign((size_t)num_shared_bytes, (char)0xff);
    block->shared_cells.assign((size_t)(num_shared_bytes + CELL_BYTES - 1) / CELL_BYTES, {});
    for (int warp = 0; warp < threads_in_block / 32; warp++)
        block->shared_readers[warp].assign(block->shared_cells.size(), {});
    for (Meeting &meeting : block->warp_meetings) meeting = {};
    block->block_meeting = {};
    block->num_releases = 0;
    block->releasing_thread = NOBODY;
    block->acquisitions.clear();
    begin_block_bulk();
    begin_block_groups();
    while ((int)block->threads.size() < threads_in_block) add_thread();
    for (int i = 0; i < threads_in_block; i++) {
        Thread &thread = *block->threads[(size_t)i];
        thread.done = false;
        thread.waits_for = nullptr;
        thread.word = nullptr;
        thread.now = 0;
        memset(thread.seen, 0, sizeof(thread.seen));
        thread.write_fences.clear();
        thread.copies.clear();
        thread.group = 0;
    }
}

// Every warp once, as far as it can go: up to a barrier, mostly. Whether one of them could go on.
bool advance(Block &running) {
    block = &running;
    bool progress = false;
    for (int warp = 0; warp < threads_in_block / 32; warp++) progress |= run_warp(warp);
    block->done = true;
    for (int i = 0; i < threads_in_block; i++) block->done &= block->threads[(size_t)i]->done;
    if (block->done) {
        end_block_bulk();
        end_block_groups();
    }
    return progress;
}

// No block can go on. Those that have not started would not help: how many run at a time is the GPU's choice. A block
// that waits for itself is at fault before one that waits for others.
[[noreturn]] void fail_as_all_wait() {
    current = nullptr;
    for (const auto &stuck : blocks) {
        if (stuck->done) continue;
        const auto begin = stuck->threads.begin(), end = begin + threads_in_block;
        const auto at_word =
            std::find_if(begin, end, [](const auto &thread) { return thread->word != nullptr; });
        if (at_word != end && current != nullptr) continue;
        block = stuck.get();
        current = at_word != end
                      ? at_word->get()
                      : std::find_if(begin, end, [](const auto &thread) { return !thread->done; })->get();
        if (at_word == end)
            fail(std::string("waits forever in ") + current->waits_in + ", where other threads do not come");
    }
    fail("waits forever for " + std::to_string(current->word_value) + " in a word that stays " +
         std::to_string(*current->word));
}

// The blocks of the grid, most_blocks at a time; in which order, and which goes on after a barrier, is drawn.
void run_blocks(int num_shared_bytes) {
    std::vector<int64_t> order((size_t)(grid.x * grid.y * grid.z));
    std::iota(order.begin(), order.end(), 0);
    if (most_blocks > 1) std::shuffle(order.begin(), order.end(), draw);
    while ((int)blocks.size() < most_blocks) blocks.push_back(std::make_unique<Block>());
    size_t started = 0;
    for (const auto &place : blocks)
        if (!(place->done = started == order.size())) start_block(*place, order[started++], num_shared_bytes);
    for (;;) {
        bool progress = false, all_done = true;
        const size_t first = most_blocks > 1 ? draw() % blocks.size() : 0;
        for (size_t i = 0; i < blocks.size() && !progress; i++) {
            Block &next = *blocks[(first + i) % blocks.size()];
            if (next.done) continue;
            all_done = false;
            progress = advance(next);
            if (next.done && started < order.size()) start_block(next, order[started++], num_shared_bytes);
        }
        if (all_done) return;
        if (!progress) fail_as_all_wait();
    }
}

void wait_for(const Meeting &meeting) { wait_while(&meeting.number, meeting.number, meeting.name); }

void join_clocks_of_warps(int first, int end) {
    Clock seen[NUM_CLOCKS] = {};
    for (int warp = first; warp < end; warp++) publish_warp(warp, seen);
    for (int warp = first; warp < end; warp++) acquire_by_warp(warp, seen);
}

// Several lanes of a warp count as one of another warp, and as somebody else for each of their own.
bool read_is_before_now(const Touch &reader, int warp) {
    return reader.thread == NOBODY || reader.thread == current->index || current->seen[warp] > reader.clock;
}

// ---- shared memory -------------------------------------------------------------------------------

std::string at_shared(shared_address address) { return " shared byte " + std::to_string(address); }

void read_shared_cell(size_t i, shared_address address) {
    check_read(block->shared_cells[i], address);
    const Touch now = touch_now();
    Touch &reader = block->shared_readers[warp_of(now.thread)][i];
    const bool shared = reader.thread != NOBODY && reader.thread != now.thread && reader.clock == now.clock;
    reader = {shared ? SEVERAL : now.thread, now.clock};
}

void write_shared_cell(size_t i, shared_address address) {
    SharedCell &cell = block->shared_cells[i];
    if (cell.state == SharedCell::COPYING)
        fail("writes where an async copy by " + thread_name(cell.writer.thread) + " is under way, at" +
             at_shared(address));
    if (!is_before_now(cell.writer))
        fail("race: writes over what " + thread_name(cell.writer.thread) + " wrote, no barrier between, at" +
             at_shared(address));
    for (int warp = 0; warp < threads_in_block / 32; warp++) {
        Touch &reader = block->shared_readers[warp][i];
        if (!read_is_before_now(reader, warp))
            fail("race: writes over what " + thread_name(reader.thread) + " of warp " + std::to_string(warp) +
                 " read, no barrier between, at" + at_shared(address));
        reader = {};
    }
    if (!is_before_now(cell.adder))
        fail("race: writes over what an add_box reads, and nobody has waited for it, at" +
             at_shared(address));
    cell = {SharedCell::WRITTEN, (uint32_t)current->write_fences.size(), touch_now(), {}};
}

void finish_copy(const AsyncCopy &copy) {
    memset(&block->shared_bytes[copy.to], 0, 16);
    if (copy.num_bytes > 0) memcpy(&block->shared_bytes[copy.to], copy.from, (size_t)copy.num_bytes);
    for (size_t i = 0; i < 16 / CELL_BYTES; i++) {
        SharedCell &cell = block->shared_cells[copy.to / CELL_BYTES + i];
        cell.state = SharedCell::WRITTEN;
        cell.writer = touch_now();
        cell.num_write_fences = (uint32_t)current->write_fences.size();
    }
}

} // namespace

// ---- for the other parts -------------------------------------------------------------------------

void fail(const std::string &what) {
    throw Fault{"block " + std::to_string(block->index) + ", thread " + std::to_string(current->index) +
                ": " + what};
}

std::string thread_name(int thread) {
    const int clock = warp_of(thread);
    if (clock >= clock_of_reads(0)) return "an add_box";
    if (clock >= MAX_WARPS) return "a bulk copy for barrier " + std::to_string(clock - MAX_WARPS);
    return thread == SEVERAL ? std::string("several threads") : "thread " + std::to_string(thread);
}

void *check_shared_place(shared_address address, int num_bytes) {
    if (address % (shared_address)num_bytes != 0)
        fail("misaligned access of " + std::to_string(num_bytes) + " bytes at" + at_shared(address));
    if ((int64_t)address + num_bytes > (int64_t)block->shared_bytes.size())
        fail("access outside the block's " + std::to_string(block->shared_bytes.size()) + " bytes, at" +
             at_shared(address));
    return &block->shared_bytes[address];
}

void check_read(const SharedCell &cell, shared_address address) {
    if (cell.state == SharedCell::EMPTY) fail("reads what nobody wrote, at" + at_shared(address));
    if (cell.state == SharedCell::COPYING)
        fail("reads before the wait of the async copy by " + thread_name(cell.writer.thread) + ", at" +
             at_shared(address));
    if (!is_before_now(cell.writer))
        fail("race: reads what " + thread_name(cell.writer.thread) + " wrote, no barrier between, at" +
             at_shared(address));
}

void publish_warp(int warp, Clock (&to)[NUM_CLOCKS]) {
    for (int i = warp * 32; i < warp * 32 + 32; i++) join(to, block->threads[(size_t)i]->seen);
    to[warp] = block->threads[(size_t)warp * 32]->now + 1;
}

void acquire_by_warp(int warp, const Clock (&from)[NUM_CLOCKS]) {
    for (int i = warp * 32; i < warp * 32 + 32; i++) {
        Thread &thread = *block->threads[(size_t)i];
        memcpy(thread.seen, from, sizeof(from));
        thread.now = from[warp];
    }
}

void wait_while(const int64_t *number, int64_t value, const char *name) {
    current->waits_for = number;
    current->waits_value = value;
    current->waits_in = name;
    give_way();
}

void wait_for_word(const int *word, int value) {
    if (*word == value) return;
    current->word = word;
    current->word_value = value;
    give_way();
}

// ---- for tests -----------------------------------------------------------------------------------

Statistics statistics() { return counted; }

void set_compute_capability(int value) { capability = value; }

void run_side_by_side(int num_blocks, uint32_t seed) {
    most_blocks = num_blocks;
    blocks.clear();
    draw.seed(seed);
}

void run(const std::function<void()> &kernel, grid_size num_blocks, int num_threads, int num_shared_bytes) {
    if (num_threads < 32 || num_threads % 32 != 0 || num_threads > MAX_THREADS)
        throw Fault{"a block of " + std::to_string(num_threads) + " threads"};
    kernel_body = &kernel;
    threads_in_block = num_threads;
    grid = num_blocks;
    begin_launch_global();
    try {
        run_blocks(num_shared_bytes);
    } catch (const Fault &) {
        faults.clear();
        blocks.clear(); // threads that are in the middle of the kernel cannot be used again
        throw;
    }
}

// ---- for device.cuh ------------------------------------------------------------------------------

int compute_capability() { return capability; }
int thread_index() { return current->index; }
int num_threads() { return threads_in_block; }
int block_index(int dim) {
    const int64_t index = block->index;
    return (int)(dim == 0 ? index % grid.x : dim == 1 ? index / grid.x % grid.y : index / grid.x / grid.y);
}
int num_blocks(int dim) { return (int)(dim == 0 ? grid.x : dim == 1 ? grid.y : grid.z); }

void block_barrier() {
    block->block_meeting.name = "block_barrier";
    if (++block->block_meeting.num_arrived < threads_in_block) {
        wait_for(block->block_meeting);
        return;
    }
    join_clocks_of_warps(0, threads_in_block / 32);
    block->block_meeting.num_arrived = 0;
    block->block_meeting.number++;
}

void meet(const char *name, void *mine, void (*act)(Lanes &lanes)) {
    Meeting &meeting = block->warp_meetings[warp_of(current->index)];
    if (meeting.num_arrived == 0) meeting.name = name;
    if (strcmp(meeting.name, name) != 0)
        fail(std::string("calls ") + name + " while lanes of its warp are in " + meeting.name);
    meeting.brought[current->index % 32] = mine;
    if (++meeting.num_arrived < 32) {
        wait_for(meeting);
        return;
    }
    act(meeting.brought);
    meeting.num_arrived = 0;
    meeting.number++;
}

void join_clocks_of_warp() { join_clocks_of_warps(warp_of(current->index), warp_of(current->index) + 1); }

void *check_shared(Access access, shared_address address, int num_bytes) {
    check_shared_place(address, num_bytes);
    for (size_t i = address / CELL_BYTES; i < (address + (shared_address)num_bytes) / CELL_BYTES; i++)
        if (access == Access::READ)
            read_shared_cell(i, address);
        else
            write_shared_cell(i, address);
    return &block->shared_bytes[address];
}

// The bytes may arrive at any time from now on: to others it is a write now, and once more at the end of the wait.
void async_copy(shared_address to, const void *from, int num_bytes) {
    if (num_bytes < 0 || num_bytes > 16) fail("an async copy of " + std::to_string(num_bytes) + " bytes");
    if ((uintptr_t)from % 16 != 0) fail("misaligned async copy from global memory");
    if (num_bytes > 0 && !is_lent(from, num_bytes)) fail("async copy from outside every array that was lent");
    check_shared(Access::WRITE, to, 16);
    for (size_t i = 0; i < 16 / CELL_BYTES; i++)
        block->shared_cells[to / CELL_BYTES + i].state = SharedCell::COPYING;
    current->copies.push_back({to, from, num_bytes, current->group});
}

void async_commit() { current->group++; }

void async_wait(int pending) {
    auto &copies = current->copies;
    size_t kept = 0;
    for (const AsyncCopy &copy : copies) {
        if (copy.group < current->group - pending)
            finish_copy(copy);
        else
            copies[kept++] = copy;
    }
    copies.resize(kept);
}

void count_matrix_load(const shared_address (&rows)[32]) {
    counted.matrix_loads++;
    for (int matrix = 0; matrix < 4;
         matrix++) // a pass of 8 rows, which should lie in 8 different groups of 4 banks
        for (int i = 0; i < 8; i++)
            for (int j = 0; j < i; j++) {
                const shared_address a = rows[matrix * 8 + i], b = rows[matrix * 8 + j];
                if (a != b && a / 16 % 8 == b / 16 % 8) {
                    counted.bank_conflicts++;
                    break;
                }
            }
}

} // namespace emulator

extern "C" {
void emulator_report(const char *message) { printf("emulator: %s\n", message); }
void emulator_set_compute_capability(int capability) { emulator::set_compute_capability(capability); }
void emulator_run_side_by_side(int num_blocks, uint32_t seed) {
    emulator::run_side_by_side(num_blocks, seed);
}
int64_t emulator_bank_conflicts(void) { return emulator::statistics().bank_conflicts; }
}
