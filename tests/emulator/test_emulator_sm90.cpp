// Tests of the emulator's mbarriers, named barriers, bulk copies and additions: it catches each mistake.
#include "../../cuda/device/ptx_sm90.cuh"
#include "machine.h"
#include "numbers_sm90.h"

static void test_bulk_copies() {
    expect_group("a wait; swizzled, zeros behind the end", "", [] {
        init_barriers();
        copy_rows(200);
        mbarrier_wait_parity(barrier(0), 0);
        for (int col = 0; col < COLS; col++) {
            const int row = thread_index(), want = row < ROWS - 200 ? number_at(200 + row, col) : 0;
            if (widen(read_at(row, col)) != (float)want) throw emulator::Fault{"wrong value"};
        }
    });
    expect_group("no wait", "race: reads what a bulk copy for mbarrier 0 wrote", [] {
        init_barriers();
        copy_rows(0);
        syncthreads();
        read_at(5, 5);
    });
    expect_group("waits for another phase", "waits forever in mbarrier_try_wait_parity", [] {
        init_barriers();
        copy_rows(0);
        mbarrier_wait_parity(barrier(0), 1); // the one before
        mbarrier_wait_parity(barrier(1), 0);
    });
    expect_group("over bytes that other threads may still read", "race: writes over what", [] {
        init_barriers();
        copy_rows(0);
        mbarrier_wait_parity(barrier(0), 0);
        if (thread_index() > 0) read_at(5, 5);
        if (thread_index() == 127) mbarrier_arrive(barrier(1)); // for its own warp at most
        if (thread_index() == 0) mbarrier_wait_parity(barrier(1), 0);
        copy_rows(0, 2);
    });
    expect_group("over bytes whose readers have arrived", "", [] {
        init_barriers(128);
        if (thread_index() < 127) mbarrier_arrive(barrier(0));
        if (thread_index() == 127) { // thread 127 copies, not thread 0
            mbarrier_arrive_expect_tx(barrier(0), BOX_BYTES);
            cp_async_bulk_tensor_4d(shared_base(), map, barrier(0), 0, 0, 0, 0);
        }
        mbarrier_wait_parity(barrier(0), 0);
        read_at(5, 5);
        syncwarp();
        mbarrier_arrive(barrier(1));
        if (thread_index() < 127) mbarrier_arrive(barrier(2));
        if (thread_index() == 127) {
            mbarrier_wait_parity(barrier(1), 0);
            mbarrier_arrive_expect_tx(barrier(2), BOX_BYTES);
            cp_async_bulk_tensor_4d(shared_base(), map, barrier(2), 0, 0, 0, 0);
            mbarrier_wait_parity(barrier(2), 0);
        }
    });
    expect_group("never waited for", "ends with a bulk copy that no thread has waited for", [] {
        init_barriers();
        copy_rows(0);
    });
    expect_group("over a thread's write", "over what a thread wrote, without fence_proxy_async_shared", [] {
        init_barriers();
        if (thread_index() == 0) st_shared(shared_base(), 1);
        copy_rows(0);
    });
    expect_group("not announced", "a bulk copy of unannounced bytes", [] {
        init_barriers();
        if (thread_index() == 0) cp_async_bulk_tensor_4d(shared_base(), map, barrier(0), 0, 0, 0, 0);
    });
    expect_group("announced, not copied", "ends with an mbarrier that waits for bytes", [] {
        init_barriers();
        if (thread_index() == 0) mbarrier_arrive_expect_tx(barrier(0), 16);
    });
    expect_group("an init that is not visible", "before its init is visible", [] {
        if (thread_index() == 0) mbarrier_init(barrier(0), 1);
        syncthreads(); // no fence
        copy_rows(0);
    });
    emulator::take_back_all();
    expect_group("from outside", "bulk copy from outside", [] {
        init_barriers();
        copy_rows(0);
    });
    lend_numbers();
}

// Threads that look at the bytes without a check, as if clocks were wrong.
static void test_bulk_copies_land_late() {
    const auto is_there = [] { // number_at(5, 6) is -4
        bf16 x;
        memcpy(&x, emulator::check_shared_place(place_of(5, 6), 2), 2);
        return widen(x) == (float)number_at(5, 6);
    };
    int num_there = 0;
    for (int i = 0; i < 100; i++)
        expect_group("a look before and after the wait", "", [&] {
            init_barriers();
            copy_rows(0);
            if (thread_index() == 0 && is_there()) throw emulator::Fault{"the bytes are there at once"};
            syncthreads();
            if (thread_index() == 0) num_there += is_there();
            mbarrier_wait_parity(barrier(0), 0);
            if (!is_there()) throw emulator::Fault{"the bytes are not there after the wait"};
        });
    check(num_there > 0 && num_there < 100, "bulk copies", "always land before, or always after, the next barrier");
}

static void test_tensor_maps_that_a_driver_refuses() {
    alignas(16) static bf16 x[64];
    const auto refused = [](const char *what, int64_t row_bytes, int box_rows, int offset = 0, int64_t rows = ROWS) {
        tensor_map map;
        check(!make_tensor_map<bf16>(map, x + offset, {COLS, rows, 1, 1}, {row_bytes, 16, 16}, box_rows), what,
              "accepted");
    };
    refused("rows that are not 16 bytes apart", COLS * 2 + 2, 128);
    refused("rows that are 2^40 bytes apart", (int64_t)1 << 40, 128);
    refused("rows that are all the same", 0, 128);
    refused("a box of 257 rows", COLS * 2, 257);
    refused("a box without rows", COLS * 2, 0);
    refused("a first byte off by 2", COLS * 2, 128, 1);
    refused("no rows", COLS * 2, 128, 0, 0);
    refused("2^32 + 1 rows", COLS * 2, 128, 0, ((int64_t)1 << 32) + 1);
}

static void test_mbarriers() {
    expect_group("an arrival too many", "one arrival too many", [] {
        init_barriers();
        if (thread_index() == 0) mbarrier_arrive_expect_tx(barrier(0), 16);
        if (thread_index() == 0) mbarrier_arrive(barrier(0)); // the phase still lacks its bytes
    });
    expect_group("a wait that two phases overtake", "that a later one has overtaken", [] {
        init_barriers();
        if (thread_index() == 0) mbarrier_wait_parity(barrier(0), 0);
        for (int i = 0; i < 2 && thread_index() == 1; i++) mbarrier_arrive(barrier(0));
    });
    expect_group("a wait that holds the next phase back", "", [] {
        init_barriers();
        if (thread_index() == 1) mbarrier_arrive(barrier(0));
        if (thread_index() % 32 == 0) mbarrier_wait_parity(barrier(0), 0);
        syncthreads();
        if (thread_index() == 1) mbarrier_arrive(barrier(0));
    });
}

static void test_named_barriers() {
    const auto write = [] { st_shared(shared_base() + 4 * (shared_address)thread_index(), thread_index()); };
    const auto read = [](int of) {
        if (ld_shared<int>(shared_base() + 4 * (shared_address)of) != of) throw emulator::Fault{"wrong value"};
    };
    const auto expect_of_warps = [](const char *what, const std::string &expected, auto kernel) {
        expect(what, expected, [=] { kernel(warp_index()); }, 96);
    };
    expect_of_warps("two warps of three", "", [=](int warp) {
        for (int i = 0; i < 3 && warp < 2; i++) {
            write();
            named_barrier_sync(1, 64);
            read(63 - thread_index());
            named_barrier_sync(2, 64);
        }
    });
    expect_of_warps("orders no third warp", "race: reads what thread|reads bytes never written", [=](int warp) {
        write();
        if (warp < 2) named_barrier_sync(1, 64);
        if (warp == 2) read(0);
    });
    expect_of_warps("an arrival releases to those who wait", "", [=](int warp) {
        if (warp == 2) write();
        if (warp == 2) named_barrier_arrive(3, 96);
        if (warp == 2) return;
        named_barrier_sync(3, 96);
        read(64 + lane_index());
    });
    expect_of_warps("an arrival acquires nothing", "race: reads what thread|reads bytes never written", [=](int warp) {
        write();
        if (warp == 0) named_barrier_sync(1, 64);
        if (warp == 1) named_barrier_arrive(1, 64);
        if (warp == 1) read(0);
    });
    expect_of_warps("an arrival acquires nothing from its own warp", "race: reads what thread", [=](int) {
        write();
        named_barrier_arrive(1, 96);
        read(thread_index() ^ 1);
    });
    expect_of_warps("a write after the arrival", "race: reads what thread", [=](int warp) {
        if (warp == 0) named_barrier_arrive(1, 64);
        if (warp == 0) write();
        if (warp == 1) named_barrier_sync(1, 64);
        if (warp == 1) read(0);
    });
    expect_of_warps("too few warps wait", "waits forever in named_barrier_sync",
                    [=](int) { named_barrier_sync(1, 64); });
    expect_of_warps("too few warps arrive", "ends with a named barrier that waits", [=](int warp) {
        if (warp < 2) named_barrier_arrive(1, 96);
    });
    expect_of_warps("two sizes",
                    "a named barrier of 96 threads, of 64 for others|a named barrier of 64 threads, of 96 for others",
                    [=](int warp) { named_barrier_sync(1, warp == 0 ? 64 : 96); });
    expect_of_warps("half of a warp", "waits forever in named_barrier_sync", [=](int) {
        if (lane_index() < 16) named_barrier_sync(1, 96);
    });
    expect_of_warps("lanes at two barriers", "lanes of a warp at different named barriers",
                    [=](int) { named_barrier_sync(1 + lane_index() % 2, 96); });
    expect_of_warps("a size of one and a half warps", "a named barrier of 48 threads",
                    [=](int) { named_barrier_sync(1, 48); });
    expect_of_warps("the id of syncthreads", "a named barrier of id 0", [=](int) { named_barrier_sync(0, 96); });
    expect_of_warps("twice", "arrives twice in one phase", [=](int) {
        named_barrier_arrive(1, 96);
        named_barrier_arrive(1, 96);
    });
}

// CTAs add to the same floats, ordered by a semaphore: two boxes of 64 rows, from row 8 of 40, at columns 0 and 32
// of 42. With no mistake or with one.
enum class adding {
    NO_MISTAKE,
    NO_WRITE_FENCE,
    FENCE_BEFORE_WRITE,
    FENCE_AFTER_BARRIER,
    FENCE_OF_ANOTHER,
    NO_FENCE_AFTER_ACQUIRE,
    WRITE_BEFORE_READ,
    TWICE,
    NO_COMMIT,
    NO_WAIT,
    WAITS_FOR_READ,
    NO_FENCE_BEFORE_RELEASE,
    FENCE_BEFORE_WAIT,
    NO_SEMAPHORE
};

static void test_additions() {
    constexpr int ROWS = 40, COLS = 42, PITCH = 44, FIRST = 8, BOX = 64 * 128, CTAS = 3;
    static struct {
        alignas(16) float sums[ROWS][PITCH];
        int semaphore;
    } x;
    static tensor_map sums;
    emulator::take_back_all();
    emulator::lend(&x, sizeof(x), true, 4);
    const int64_t bytes = ROWS * PITCH * 4;
    check(make_tensor_map<float>(sums, x.sums, {COLS, ROWS, 1, 1}, {PITCH * 4, bytes, bytes}, 64),
          "a tensor map of float", "refused");
    const auto number = [](int row, int col, int cta) { return (float)(row + 100 * col + 10000 * cta); };
    const auto kernel = [=](adding how) {
        const auto is = [=](adding mistake) { return how == mistake; };
        if (is(adding::FENCE_BEFORE_WRITE)) fence_proxy_async_shared();
        for (int i = thread_index(); i < 64 * 64; i += num_threads()) {
            const int row = i / 64, col = i % 64, chunk = col % 32 / 4 ^ row % 8;
            st_shared(shared_base() + (shared_address)(col / 32 * BOX + row * 128 + chunk * 16 + col % 4 * 4),
                      number(row, col, cta_index_x()));
        }
        const bool fences = !is(adding::NO_WRITE_FENCE) && !is(adding::FENCE_BEFORE_WRITE) &&
                            !is(adding::FENCE_AFTER_BARRIER) && (!is(adding::FENCE_OF_ANOTHER) || thread_index() == 0);
        if (fences) fence_proxy_async_shared();
        syncthreads();
        if (is(adding::FENCE_AFTER_BARRIER)) fence_proxy_async_shared();
        if (thread_index() == 64) {
            if (!is(adding::NO_SEMAPHORE)) wait_eq(&x.semaphore, cta_index_x());
            if (!is(adding::NO_FENCE_AFTER_ACQUIRE)) fence_proxy_async_global();
            cp_reduce_async_bulk_tensor_4d(sums, shared_base(), 0, FIRST, 0, 0);
            cp_reduce_async_bulk_tensor_4d(sums, shared_base() + BOX, is(adding::TWICE) ? 0 : 32, FIRST, 0, 0);
            if (!is(adding::NO_COMMIT)) cp_async_bulk_commit_group();
            if (!is(adding::WRITE_BEFORE_READ)) cp_async_bulk_wait_group_read<0>();
            st_shared(shared_base(), 0);
            if (is(adding::FENCE_BEFORE_WAIT)) fence_proxy_async_global();
            if (!is(adding::NO_WAIT) && !is(adding::WAITS_FOR_READ)) cp_async_bulk_wait_group<0>();
            if (!is(adding::NO_FENCE_BEFORE_RELEASE) && !is(adding::FENCE_BEFORE_WAIT)) fence_proxy_async_global();
            if (!is(adding::NO_SEMAPHORE)) st_release(&x.semaphore, cta_index_x() + 1);
            if (is(adding::NO_WAIT)) cp_async_bulk_wait_group<0>();
        }
    };
    const char *const write_fence =
                          "a bulk addition of what a thread wrote, without fence_proxy_async_shared and a barrier",
                      *const of_another = "race in global memory: a bulk addition to what CTA";
    const std::pair<adding, const char *> expected[] = {
        {adding::NO_MISTAKE, ""},
        {adding::NO_WRITE_FENCE, write_fence},
        {adding::FENCE_BEFORE_WRITE, write_fence},
        {adding::FENCE_AFTER_BARRIER, write_fence},
        {adding::FENCE_OF_ANOTHER, write_fence},
        {adding::NO_FENCE_AFTER_ACQUIRE, of_another},
        {adding::WRITE_BEFORE_READ, "writes over what a bulk addition reads"},
        {adding::TWICE, "a bulk addition to what an earlier one writes"},
        {adding::NO_COMMIT, "writes over what a bulk addition reads"},
        {adding::NO_WAIT, of_another},
        {adding::WAITS_FOR_READ, "ends with a bulk addition that it did not wait for"},
        {adding::NO_FENCE_BEFORE_RELEASE, of_another},
        {adding::FENCE_BEFORE_WAIT, of_another},
        {adding::NO_SEMAPHORE, of_another},
    };
    for (const int concurrent : {1, 3})
        for (const auto &[how, fault] : expected) {
            emulator::run_concurrently(concurrent, 5);
            x = {};
            const std::string what = "additions, mistake " + std::to_string((int)how);
            expect(what.c_str(), fault, [&, how = how] { kernel(how); }, 96, CTAS, 2 * BOX);
            if (how != adding::NO_MISTAKE) continue;
            bool ok = true;
            for (int row = 0; row < ROWS; row++)
                for (int col = 0; col < PITCH; col++) {
                    float want = 0;
                    for (int i = 0; i < CTAS && row >= FIRST && col < COLS; i++) want += number(row - FIRST, col, i);
                    ok &= x.sums[row][col] == want;
                }
            check(ok, "additions", "a wrong sum");
        }
    emulator::run_concurrently(1, 0);
    const auto expect_of_one = [&](const char *what, const std::string &expected, auto wait) {
        x = {};
        expect(
            what, expected,
            [=] {
                for (int i = lane_index(); i < BOX / 4; i += 32) st_shared(shared_base() + 4 * (shared_address)i, 1.0f);
                fence_proxy_async_shared();
                syncwarp();
                if (lane_index() != 0) return;
                cp_reduce_async_bulk_tensor_4d(sums, shared_base(), 0, 0, 0, 0);
                cp_async_bulk_commit_group();
                wait();
                if (ld_global(x.sums[3] + 5) != 1) throw emulator::Fault{"wrong value"};
                cp_reduce_async_bulk_tensor_4d(sums, shared_base(), 0, 0, 0, 0);
                cp_async_bulk_commit_group();
                cp_async_bulk_wait_group<0>();
                fence_proxy_async_global();
                if (ld_global(x.sums[3] + 5) != 2) throw emulator::Fault{"wrong value"};
            },
            32, 1, BOX);
    };
    const char *const early = "race in global memory: touches what CTA 0, a bulk addition wrote";
    expect_of_one("a read of complete sums", "", [] { cp_async_bulk_wait_group<0>(), fence_proxy_async_global(); });
    expect_of_one("a read without a fence", early, [] { cp_async_bulk_wait_group<0>(); });
    expect_of_one("a read without a wait", early,
                  [] { cp_async_bulk_wait_group_read<0>(), fence_proxy_async_global(); });
    lend_numbers();
}

// One warp stores a box of 16 rows, from row 8 and column 64 of a tensor on that ends inside it.
static void test_stores() {
    constexpr int ROWS = 20, COLS = 72, ROW = 8, COL = 64, BOX = 16 * 128;
    static uint16_t stored[ROWS][COLS];
    static tensor_map map;
    emulator::take_back_all();
    emulator::lend(stored, sizeof(stored), true, 2);
    check(make_tensor_map<f16>(map, stored, {COLS, ROWS, 1, 1}, {COLS * 2, sizeof(stored), sizeof(stored)}, 16),
          "a tensor map of a store", "refused");
    enum mistake { NONE, NO_FENCE, NO_WAIT, WRITE_BEFORE_READ, TWICE, TWO_CTAS };
    const std::pair<mistake, const char *> expected[] = {
        {NONE, ""},
        {NO_FENCE, "a bulk store of what a thread wrote, without fence_proxy_async_shared and a barrier"},
        {NO_WAIT, "ends with a bulk store that has not read its source"},
        {WRITE_BEFORE_READ, "writes over what a bulk addition reads"},
        {TWICE, "a bulk store to what an earlier one writes"},
        {TWO_CTAS, "race in global memory: a bulk store to what CTA"},
    };
    for (const auto &[how, fault] : expected) {
        memset(stored, 0, sizeof(stored));
        const auto kernel = [how = how] {
            for (int i = lane_index(); i < 16 * 64; i += 32) {
                const int row = i / 64, col = i % 64;
                st_shared(shared_base() + (shared_address)(row * 128 + (col / 8 ^ row % 8) * 16 + col % 8 * 2),
                          f16{(uint16_t)(1 + i)});
            }
            if (how != NO_FENCE) fence_proxy_async_shared();
            syncwarp();
            if (lane_index() != 0) return;
            for (int i = 0; i < (how == TWICE ? 2 : 1); i++)
                cp_async_bulk_tensor_4d(map, shared_base(), COL, ROW, 0, 0);
            cp_async_bulk_commit_group();
            if (how == WRITE_BEFORE_READ) st_shared(shared_base(), 0);
            if (how != NO_WAIT) cp_async_bulk_wait_group_read<0>();
        };
        const std::string what = "stores, mistake " + std::to_string((int)how);
        expect(what.c_str(), fault, kernel, 32, how == TWO_CTAS ? 2 : 1, BOX);
        bool ok = true;
        for (int row = 0; row < ROWS && how == NONE; row++)
            for (int col = 0; col < COLS; col++)
                ok &= stored[row][col] == (row < ROW || col < COL ? 0 : 1 + (row - ROW) * 64 + col - COL);
        check(ok, what.c_str(), "wrong numbers");
    }
    lend_numbers();
}

int main() {
    lend_numbers();
    test_bulk_copies();
    test_bulk_copies_land_late();
    test_tensor_maps_that_a_driver_refuses();
    test_mbarriers();
    test_named_barriers();
    test_additions();
    test_stores();
    return finish();
}
