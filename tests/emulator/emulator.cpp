// The emulator's core: fibers, clocks, and a shadow of shared memory that records which thread touched each cell when.
#include "machine.h"

#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>

namespace emulator {

Cta *cta;
Thread *current;

uint32_t base_seed() {
    const char *const seed = getenv("RINGTILE_EMULATOR_SEED");
    return seed == nullptr || *seed == 0 ? 1 : (uint32_t)strtoul(seed, nullptr, 10);
}

namespace {

constexpr int STACK_BYTES = 256 * 1024;
jmp_buf scheduler;
ucontext_t boot;
std::vector<std::unique_ptr<Cta>> ctas; // running concurrently
int most_ctas = 1, threads_in_cta;
std::minstd_rand draw(base_seed()); // decides everything that a GPU leaves open
uint32_t slow, steps_until_others_are_slow;
grid_size grid{1};
const std::function<void()> *kernel_body;
std::vector<std::unique_ptr<Fault>> faults; // of this launch
int64_t num_ctas_started;
int capability = 80, multiprocessors = 132;

// ---- fibers --------------------------------------------------------------------------------------

// The first switch into a fiber takes ucontext; setjmp makes the later ones cheap because it leaves the signal mask
// alone.
void yield() {
    if (_setjmp(current->at) == 0) _longjmp(scheduler, 1);
}

void fiber_main() {
    Thread *const self = current;
    if (_setjmp(self->at) == 0) setcontext(&boot);
    for (;;) {
        try {
            (*kernel_body)();
            if (!self->copies.empty()) fail("ends with a cp_async that it did not wait for");
            end_thread_bulk();
            end_thread_groups();
        } catch (const Fault &fault) {
            faults.push_back(std::make_unique<Fault>(fault));
        }
        self->done = true;
        yield();
    }
}

void add_thread() {
    auto thread = std::make_unique<Thread>();
    thread->index = (int)cta->threads.size();
    thread->stack = std::make_unique_for_overwrite<char[]>(STACK_BYTES);
    getcontext(&thread->start);
    thread->start.uc_stack.ss_sp = thread->stack.get();
    thread->start.uc_stack.ss_size = STACK_BYTES;
    thread->start.uc_link = nullptr;
    makecontext(&thread->start, fiber_main, 0);
    current = thread.get();
    swapcontext(&boot, &thread->start);
    cta->threads.push_back(std::move(thread));
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

// Runs a warp for as long as one of its lanes is ready. Returns whether any was.
bool run_warp(int warp) {
    bool any = false;
    for (bool progress = true; progress; any |= progress) {
        progress = false;
        for (int i = warp * 32; i < warp * 32 + 32; i++)
            if (is_ready(*cta->threads[(size_t)i])) {
                resume(*cta->threads[(size_t)i]);
                progress = true;
            }
    }
    return any;
}

// Starts a CTA of the grid in a slot whose previous CTA is done.
void start_cta(Cta &in, int64_t index, int num_shared_bytes) {
    cta = &in;
    num_ctas_started++;
    cta->index = index;
    cta->done = false;
    cta->shared_bytes.assign((size_t)num_shared_bytes, (char)0xff);
    cta->shared_cells.assign((size_t)(num_shared_bytes + CELL_BYTES - 1) / CELL_BYTES, {});
    for (int warp = 0; warp < threads_in_cta / 32; warp++) cta->shared_readers[warp].resize(cta->shared_cells.size());
    for (Meeting &meeting : cta->warp_meetings) meeting = {};
    cta->cta_meeting = {};
    cta->num_releases = 0;
    cta->acquisitions.clear();
    begin_cta_bulk();
    begin_cta_groups();
    begin_cta_banks();
    while ((int)cta->threads.size() < threads_in_cta) add_thread();
    for (int i = 0; i < threads_in_cta; i++) {
        Thread &thread = *cta->threads[(size_t)i];
        thread.done = false;
        thread.waits_for = nullptr;
        thread.word = nullptr;
        thread.now = 0;
        memset(thread.seen, 0, sizeof(thread.seen));
        thread.proxy_fences.clear();
        thread.copies.clear();
        thread.group = 0;
    }
}

constexpr uint32_t COPIES = 1u << MAX_WARPS;

// A random set of warps, which run only when no other can: none, some, a warp group, one warp, half of them. COPIES in
// the set delays bulk copies alike.
void draw_slow() {
    if (steps_until_others_are_slow-- > 0) return;
    steps_until_others_are_slow = draw() % 200;
    const uint32_t warps = (uint32_t)draw(), group = 4 * (warps % (uint32_t)(MAX_WARPS / 4));
    const uint32_t sets[] = {0, warps & (uint32_t)draw(), 0xfu << group, 1u << warps % MAX_WARPS, warps};
    slow = sets[draw() % std::size(sets)];
}

// Runs one random warp that is ready as far as it can go: usually up to a barrier. Returns whether any was.
bool advance(Cta &running) {
    cta = &running;
    draw_slow();
    if (!(slow & COPIES) && draw() % 2) finish_bulk_copy((uint32_t)draw());
    int order[MAX_WARPS];
    int *const end = order + threads_in_cta / 32;
    std::iota(order, end, 0);
    std::shuffle(order, end, draw);
    std::stable_partition(order, end, [](int warp) { return (slow >> warp & 1) == 0; });
    const bool progress = std::any_of(order, end, run_warp) || finish_bulk_copy((uint32_t)draw());
    cta->done = true;
    for (int i = 0; i < threads_in_cta; i++) cta->done &= cta->threads[(size_t)i]->done;
    if (cta->done) {
        end_cta_bulk();
        end_cta_groups();
        for (int warp = 0; warp < threads_in_cta / 32; warp++) count_noted(warp);
    }
    return progress;
}

// No running CTA can continue. CTAs that have not started do not count: the GPU decides how many run at a time. A
// CTA that waits for its own threads is reported before one that waits for another CTA.
[[noreturn]] void fail_as_all_wait() {
    current = nullptr;
    for (const auto &stuck : ctas) {
        if (stuck->done) continue;
        const auto begin = stuck->threads.begin(), end = begin + threads_in_cta;
        const auto at_word = std::find_if(begin, end, [](const auto &thread) { return thread->word != nullptr; });
        if (at_word != end && current != nullptr) continue;
        cta = stuck.get();
        current = at_word != end ? at_word->get()
                                 : std::find_if(begin, end, [](const auto &thread) { return !thread->done; })->get();
        if (at_word == end)
            fail(std::string("waits forever in ") + current->waits_in + ", which other threads never reach");
    }
    fail("waits forever for " + std::to_string(current->word_value) + " in a word that stays " +
         std::to_string(*current->word));
}

// Runs the CTAs of the grid, most_ctas at a time, in a random order if that is more than one; so is the choice of which
// continues after a barrier.
void run_ctas(int num_shared_bytes) {
    std::vector<int64_t> order((size_t)(grid.x * grid.y * grid.z));
    std::iota(order.begin(), order.end(), 0);
    if (most_ctas > 1) std::shuffle(order.begin(), order.end(), draw);
    while ((int)ctas.size() < most_ctas) ctas.push_back(std::make_unique<Cta>());
    size_t started = 0;
    for (const auto &place : ctas)
        if (!(place->done = started == order.size())) start_cta(*place, order[started++], num_shared_bytes);
    for (;;) {
        bool progress = false, all_done = true;
        const size_t first = most_ctas > 1 ? draw() % ctas.size() : 0;
        for (size_t i = 0; i < ctas.size() && !progress; i++) {
            Cta &next = *ctas[(first + i) % ctas.size()];
            if (next.done) continue;
            all_done = false;
            progress = advance(next);
            if (next.done && started < order.size()) start_cta(next, order[started++], num_shared_bytes);
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

// SEVERAL lanes count as one thread to other warps, and as a different thread to each lane of their own.
bool read_is_before_now(const Touch &reader, int warp) {
    return reader.thread == current->index || current->seen[warp] > reader.clock;
}

// ---- shared memory -------------------------------------------------------------------------------

std::string at_shared(shared_address address) { return " shared byte " + std::to_string(address); }

void read_shared_cells(size_t first, size_t end, shared_address address) {
    const Touch now = touch_now();
    const int warp = warp_of(now.thread);
    const uint32_t mine = 1u << warp;
    SharedCell *const cells = cta->shared_cells.data();
    Touch *const readers = cta->shared_readers[warp].data();
    for (size_t i = first; i < end; i++) {
        check_read(cells[i], address);
        const bool shared =
            (cells[i].reader_warps & mine) && readers[i].thread != now.thread && readers[i].clock == now.clock;
        readers[i] = {shared ? SEVERAL : now.thread, now.clock};
        cells[i].reader_warps |= mine;
    }
}

void write_shared_cell(size_t i, shared_address address) {
    SharedCell &cell = cta->shared_cells[i];
    if (cell.state == SharedCell::COPYING)
        fail("writes where a cp_async by " + thread_name(cell.writer.thread) + " is in flight, at" +
             at_shared(address));
    if (!is_before_now(cell.writer))
        fail("race: writes over what " + thread_name(cell.writer.thread) + " wrote, no barrier between, at" +
             at_shared(address));
    for (uint32_t warps = cell.reader_warps; warps != 0; warps &= warps - 1) {
        const int warp = __builtin_ctz(warps);
        const Touch &reader = cta->shared_readers[warp][i];
        if (!read_is_before_now(reader, warp))
            fail("race: writes over what " + thread_name(reader.thread) + " of warp " + std::to_string(warp) +
                 " read, no barrier between, at" + at_shared(address));
    }
    if (!is_before_now(cell.adder))
        fail("race: writes over what a bulk addition reads, without a wait for it, at" + at_shared(address));
    cell = {SharedCell::WRITTEN, (uint32_t)current->proxy_fences.size(), 0, touch_now(), {}};
}

void finish_copy(const AsyncCopy &copy) {
    memset(&cta->shared_bytes[copy.to], 0, 16);
    if (copy.num_bytes > 0) memcpy(&cta->shared_bytes[copy.to], copy.from, (size_t)copy.num_bytes);
    for (size_t i = 0; i < 16 / CELL_BYTES; i++) {
        SharedCell &cell = cta->shared_cells[copy.to / CELL_BYTES + i];
        cell.state = SharedCell::WRITTEN;
        cell.writer = touch_now();
        cell.num_proxy_fences = (uint32_t)current->proxy_fences.size();
    }
}

} // namespace

// ---- for the other parts -------------------------------------------------------------------------

void fail(const std::string &what) {
    throw Fault{"CTA " + std::to_string(cta->index) + ", thread " + std::to_string(current->index) + ": " + what};
}

std::string thread_name(int thread) {
    const int clock = warp_of(thread);
    if (clock >= clock_of_reads(0)) return "a bulk addition";
    if (clock >= MAX_WARPS) return "a bulk copy for mbarrier " + std::to_string(clock - MAX_WARPS);
    return thread == SEVERAL ? std::string("several threads") : "thread " + std::to_string(thread);
}

void *check_shared_place(shared_address address, int num_bytes) {
    if (address % (shared_address)num_bytes != 0)
        fail("misaligned access of " + std::to_string(num_bytes) + " bytes at" + at_shared(address));
    if ((int64_t)address + num_bytes > (int64_t)cta->shared_bytes.size())
        fail("access outside the CTA's " + std::to_string(cta->shared_bytes.size()) + " bytes, at" +
             at_shared(address));
    return &cta->shared_bytes[address];
}

void fail_to_read(const SharedCell &cell, shared_address address) {
    if (cell.state == SharedCell::EMPTY) fail("reads bytes never written, at" + at_shared(address));
    if (cell.state == SharedCell::COPYING)
        fail("reads before the wait of the cp_async by " + thread_name(cell.writer.thread) + ", at" +
             at_shared(address));
    fail("race: reads what " + thread_name(cell.writer.thread) + " wrote, no barrier between, at" + at_shared(address));
}

void publish_warp(int warp, Clock (&to)[NUM_CLOCKS]) {
    for (int i = warp * 32; i < warp * 32 + 32; i++) join(to, cta->threads[(size_t)i]->seen);
    to[warp] = cta->threads[(size_t)warp * 32]->now + 1;
}

void acquire_by_warp(int warp, const Clock (&from)[NUM_CLOCKS]) {
    for (int i = warp * 32; i < warp * 32 + 32; i++) {
        Thread &thread = *cta->threads[(size_t)i];
        memcpy(thread.seen, from, sizeof(from));
        thread.now = from[warp];
    }
}

void wait_while(const int64_t *number, int64_t value, const char *name) {
    current->waits_for = number;
    current->waits_value = value;
    current->waits_in = name;
    yield();
}

void wait_for_word(const int *word, int value) {
    if (*word == value) return;
    current->word = word;
    current->word_value = value;
    yield();
}

// ---- for tests -----------------------------------------------------------------------------------

int64_t ctas_started() { return num_ctas_started; }

void set_compute_capability(int value) { capability = value; }
void set_num_multiprocessors(int number) { multiprocessors = number; }

void run_concurrently(int num_ctas, uint32_t seed) {
    most_ctas = num_ctas;
    ctas.clear();
    draw.seed(seed + 1000003 * base_seed());
    steps_until_others_are_slow = 0;
}

void run(const std::function<void()> &kernel, grid_size num_ctas, int num_threads, int num_shared_bytes,
         size_t params_bytes, const std::string &name) {
    if (num_threads < 32 || num_threads % 32 != 0 || num_threads > MAX_THREADS)
        throw Fault{"a CTA of " + std::to_string(num_threads) + " threads"};
    // sm_80 has more, but its kernels also run on sm_86, sm_89 and sm_120.
    const int most_shared_bytes = (capability == 90 ? 227 : 99) * 1024;
    if (num_shared_bytes > most_shared_bytes)
        throw Fault{"a CTA of " + std::to_string(num_shared_bytes) + " bytes of shared memory, expected at most " +
                    std::to_string(most_shared_bytes)};
    if (params_bytes > MAX_PARAMS_BYTES)
        throw Fault{"parameters of " + std::to_string(params_bytes) + " bytes, expected at most " +
                    std::to_string(MAX_PARAMS_BYTES)};
    kernel_body = &kernel;
    threads_in_cta = num_threads;
    grid = num_ctas;
    begin_launch_global();
    begin_launch_banks(name);
    try {
        run_ctas(num_shared_bytes);
    } catch (const Fault &) {
        faults.clear();
        ctas.clear(); // fibers stopped in mid-kernel cannot be reused
        throw;
    }
}

// ---- for ptx.cuh ---------------------------------------------------------------------------------

int compute_capability() { return capability; }
int num_multiprocessors() { return multiprocessors; }
int thread_index() { return current->index; }
int num_threads() { return threads_in_cta; }
int cta_index(int dim) {
    const int64_t index = cta->index;
    return (int)(dim == 0 ? index % grid.x : dim == 1 ? index / grid.x % grid.y : index / grid.x / grid.y);
}
int num_ctas(int dim) { return (int)(dim == 0 ? grid.x : dim == 1 ? grid.y : grid.z); }

void syncthreads() {
    cta->cta_meeting.name = "syncthreads";
    if (++cta->cta_meeting.num_arrived < threads_in_cta) {
        wait_for(cta->cta_meeting);
        return;
    }
    join_clocks_of_warps(0, threads_in_cta / 32);
    for (int warp = 0; warp < threads_in_cta / 32; warp++) count_noted(warp);
    cta->cta_meeting.num_arrived = 0;
    cta->cta_meeting.number++;
}

void meet(const char *name, void *mine, void (*act)(Lanes &lanes)) {
    Meeting &meeting = cta->warp_meetings[warp_of(current->index)];
    if (meeting.num_arrived == 0) meeting.name = name;
    if (meeting.name != name && strcmp(meeting.name, name) != 0)
        fail(std::string("calls ") + name + " while lanes of its warp are in " + meeting.name);
    meeting.brought[current->index % 32] = mine;
    if (++meeting.num_arrived < 32) {
        wait_for(meeting);
        return;
    }
    act(meeting.brought);
    count_noted(warp_of(current->index));
    meeting.num_arrived = 0;
    meeting.number++;
}

void join_clocks_of_warp() { join_clocks_of_warps(warp_of(current->index), warp_of(current->index) + 1); }

void *check_shared(Access access, shared_address address, int num_bytes) {
    check_shared_place(address, num_bytes);
    const size_t first = address / CELL_BYTES, end = (address + (shared_address)num_bytes) / CELL_BYTES;
    if (access == Access::READ)
        read_shared_cells(first, end, address);
    else
        for (size_t i = first; i < end; i++) write_shared_cell(i, address);
    return &cta->shared_bytes[address];
}

void *access_shared(Access access, shared_address address, int num_bytes) {
    if (counts_banks) note_access(access, address, num_bytes, __builtin_return_address(0));
    return check_shared(access, address, num_bytes);
}

// The bytes may arrive at any time from now on: to other threads the copy is a write now, and again at the end of
// the wait.
void cp_async(shared_address to, const void *from, int num_bytes) {
    if (num_bytes < 0 || num_bytes > 16) fail("a cp_async of " + std::to_string(num_bytes) + " bytes");
    if ((uintptr_t)from % 16 != 0) fail("misaligned cp_async from global memory");
    if (num_bytes > 0 && !is_lent(from, num_bytes)) fail("a cp_async from outside the lent arrays");
    check_shared(Access::WRITE, to, 16);
    for (size_t i = 0; i < 16 / CELL_BYTES; i++) cta->shared_cells[to / CELL_BYTES + i].state = SharedCell::COPYING;
    current->copies.push_back({to, from, num_bytes, current->group});
}

void cp_async_commit_group() { current->group++; }

void cp_async_wait_group(int pending) {
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

} // namespace emulator

extern "C" {
void emulator_report(const char *message) {
    printf("emulator: %s (RINGTILE_EMULATOR_SEED=%u)\n", message, emulator::base_seed());
}
void emulator_set_compute_capability(int capability) { emulator::set_compute_capability(capability); }
void emulator_set_num_multiprocessors(int number) { emulator::set_num_multiprocessors(number); }
void emulator_run_concurrently(int num_ctas, uint32_t seed) { emulator::run_concurrently(num_ctas, seed); }
int64_t emulator_ctas(void) { return emulator::ctas_started(); }
int64_t emulator_bank_conflicts(const char *prefix) { return emulator::bank_conflicts(prefix); }
void emulator_count_banks(bool on) { emulator::count_banks(on); }
}
