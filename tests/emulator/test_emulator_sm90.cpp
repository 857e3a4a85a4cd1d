// The emulator's own tests of the barriers, bulk copies and additions that only sm_90a has: mistakes are made once and caught.
#include "../../cuda/device_sm90.cuh"
#include "numbers_sm90.h"

static void test_bulk_copies() {
    expect_group("waited for, swizzled, zeros behind the end", "", [] {
        init_barriers();
        copy_rows(200);
        barrier_wait(barrier(0), 0);
        for (int col = 0; col < COLS; col++) {
            const int row = thread_index(), want = row < ROWS - 200 ? number_at(200 + row, col) : 0;
            if (widen(look_at(row, col)) != (float)want) throw emulator::Fault{"wrong value"};
        }
    });
    expect_group("no wait", "race: reads what a bulk copy for barrier 0 wrote", [] {
        init_barriers();
        copy_rows(0);
        block_barrier();
        look_at(5, 5);
    });
    expect_group("waits for another phase", "waits forever in barrier_wait", [] {
        init_barriers();
        copy_rows(0);
        barrier_wait(barrier(0), 1); // the one before
        barrier_wait(barrier(1), 0);
    });
    expect_group("into what others may still read", "race: writes over what", [] {
        init_barriers();
        copy_rows(0);
        barrier_wait(barrier(0), 0);
        if (thread_index() > 0) look_at(5, 5);
        if (thread_index() == 127) barrier_arrive(barrier(1)); // speaks for its own warp at most
        if (thread_index() == 0) barrier_wait(barrier(1), 0);
        copy_rows(0, 2);
    });
    expect_group("into what others have read, and said so", "", [] {
        init_barriers(128);
        if (thread_index() < 127) barrier_arrive(barrier(0));
        if (thread_index() == 127) { // the copies of thread 0, from here
            barrier_arrive_expecting(barrier(0), BOX_BYTES);
            copy_box(shared_base(), map, barrier(0), 0, 0, 0, 0);
        }
        barrier_wait(barrier(0), 0);
        look_at(5, 5);
        warp_barrier();
        barrier_arrive(barrier(1));
        if (thread_index() == 127) {
            barrier_wait(barrier(1), 0);
            barrier_arrive_expecting(barrier(2), BOX_BYTES);
            copy_box(shared_base(), map, barrier(2), 0, 0, 0, 0);
        }
    });
    expect_group("over what a thread wrote", "over what a thread wrote, without a fence", [] {
        init_barriers();
        if (thread_index() == 0) shared_store(shared_base(), 1);
        copy_rows(0);
    });
    expect_group("not announced", "bytes that were not announced", [] {
        init_barriers();
        if (thread_index() == 0) copy_box(shared_base(), map, barrier(0), 0, 0, 0, 0);
    });
    expect_group("announced, not copied", "ends with a barrier that waits for bytes", [] {
        init_barriers();
        if (thread_index() == 0) barrier_arrive_expecting(barrier(0), 16);
    });
    expect_group("an init that is not visible", "before its init is visible", [] {
        if (thread_index() == 0) barrier_init(barrier(0), 1);
        block_barrier(); // no fence
        copy_rows(0);
    });
    check(!make_tensor_map<bf16>(map, numbers.data(), {COLS, ROWS, 1, 1}, {COLS * 2 + 2, 16, 16}, 128),
          "a tensor map", "takes rows that begin anywhere");
    lend_numbers();
    emulator::take_back_all();
    expect_group("from outside", "bulk copy from outside", [] {
        init_barriers();
        copy_rows(0);
    });
    lend_numbers();
}

static void test_part_barriers() {
    const auto write = [] {
        shared_store(shared_base() + 4 * (shared_address)thread_index(), thread_index());
    };
    const auto read = [](int of) {
        if (shared_load<int>(shared_base() + 4 * (shared_address)of) != of)
            throw emulator::Fault{"wrong value"};
    };
    const auto expect_of_warps = [](const char *what, const std::string &expected, auto kernel) {
        expect(what, expected, [=] { kernel(warp_index()); }, 96);
    };
    expect_of_warps("two warps of three", "", [=](int warp) {
        for (int i = 0; i < 3 && warp < 2; i++) {
            write();
            part_barrier(1, 64);
            read(63 - thread_index());
            part_barrier(2, 64);
        }
    });
    expect_of_warps("orders no third one", "race: reads what thread", [=](int warp) {
        write();
        if (warp < 2) part_barrier(1, 64);
        if (warp == 2) read(0);
    });
    expect_of_warps("one arrives for others", "", [=](int warp) {
        if (warp == 2) write();
        if (warp == 2) part_barrier_arrive(3, 96);
        if (warp == 2) return;
        part_barrier(3, 96);
        read(64 + lane_index());
    });
    expect_of_warps("who arrives sees nothing", "race: reads what thread", [=](int warp) {
        write();
        if (warp == 0) part_barrier(1, 64);
        if (warp == 1) part_barrier_arrive(1, 64);
        if (warp == 1) read(0);
    });
    expect_of_warps("who arrives does not even see its warp", "race: reads what thread", [=](int) {
        write();
        part_barrier_arrive(1, 96);
        read(thread_index() ^ 1);
    });
    expect_of_warps("a write behind the arrival", "race: reads what thread", [=](int warp) {
        if (warp == 0) part_barrier_arrive(1, 64);
        if (warp == 0) write();
        if (warp == 1) part_barrier(1, 64);
        if (warp == 1) read(0);
    });
    expect_of_warps("others do not come", "waits forever in part_barrier", [=](int) { part_barrier(1, 64); });
    expect_of_warps("others do not come to whom arrives", "ends with a part_barrier that waits",
                    [=](int warp) {
                        if (warp < 2) part_barrier_arrive(1, 96);
                    });
    expect_of_warps("two sizes", "a part_barrier of 96 threads, of 64 for others",
                    [=](int warp) { part_barrier(1, warp == 0 ? 64 : 96); });
    expect_of_warps("half of a warp", "waits forever in part_barrier", [=](int) {
        if (lane_index() < 16) part_barrier(1, 96);
    });
    expect_of_warps("lanes at two barriers", "lanes of a warp at different part_barriers",
                    [=](int) { part_barrier(1 + lane_index() % 2, 96); });
    expect_of_warps("half of a warp counts", "a part_barrier of 48 threads",
                    [=](int) { part_barrier(1, 48); });
    expect_of_warps("the block's own", "a part_barrier of id 0", [=](int) { part_barrier(0, 96); });
    expect_of_warps("twice", "comes twice to one part_barrier", [=](int) {
        part_barrier_arrive(1, 96);
        part_barrier_arrive(1, 96);
    });
}

// Blocks add to the same floats by turns, boxes of 64 rows from row 8 of 40 on, columns 0 .. 31 and 32 .. 63 of 42. What they may
// do, or with one mistake.
enum class adding {
    NO_MISTAKE,
    NO_WRITE_FENCE,
    FENCE_BEFORE_WRITE,
    FENCE_BEHIND_BARRIER,
    FENCE_OF_ANOTHER,
    NO_FENCE_BEHIND_TURN,
    WRITE_BEFORE_READ,
    TWICE,
    NO_COMMIT,
    NO_WAIT,
    WAITS_FOR_READ,
    NO_FENCE_BEFORE_TURN,
    FENCE_BEFORE_WAIT,
    NO_TURN
};

static void test_additions() {
    constexpr int ROWS = 40, COLS = 42, PITCH = 44, FIRST = 8, BOX = 64 * 128, BLOCKS = 3;
    static struct {
        alignas(16) float sums[ROWS][PITCH];
        int turn;
    } x;
    static tensor_map sums;
    emulator::take_back_all();
    emulator::lend(&x, sizeof(x), true, 4);
    const int64_t bytes = ROWS * PITCH * 4;
    check(make_tensor_map<float>(sums, x.sums, {COLS, ROWS, 1, 1}, {PITCH * 4, bytes, bytes}, 64),
          "a tensor map of float", "refused");
    const auto number = [](int row, int col, int block) { return (float)(row + 100 * col + 10000 * block); };
    const auto kernel = [=](adding how) {
        const auto is = [=](adding mistake) { return how == mistake; };
        if (is(adding::FENCE_BEFORE_WRITE)) shared_write_fence();
        for (int i = thread_index(); i < 64 * 64; i += num_threads()) {
            const int row = i / 64, col = i % 64, chunk = col % 32 / 4 ^ row % 8;
            shared_store(shared_base() +
                             (shared_address)(col / 32 * BOX + row * 128 + chunk * 16 + col % 4 * 4),
                         number(row, col, block_index()));
        }
        const bool fences = !is(adding::NO_WRITE_FENCE) && !is(adding::FENCE_BEFORE_WRITE) &&
                            !is(adding::FENCE_BEHIND_BARRIER) &&
                            (!is(adding::FENCE_OF_ANOTHER) || thread_index() == 0);
        if (fences) shared_write_fence();
        block_barrier();
        if (is(adding::FENCE_BEHIND_BARRIER)) shared_write_fence();
        if (thread_index() == 64) {
            if (!is(adding::NO_TURN)) wait_until(&x.turn, block_index());
            if (!is(adding::NO_FENCE_BEHIND_TURN)) add_box_fence();
            add_box(sums, shared_base(), 0, FIRST, 0, 0);
            add_box(sums, shared_base() + BOX, is(adding::TWICE) ? 0 : 32, FIRST, 0, 0);
            if (!is(adding::NO_COMMIT)) add_box_commit();
            if (!is(adding::WRITE_BEFORE_READ)) add_box_wait_read();
            shared_store(shared_base(), 0);
            if (is(adding::FENCE_BEFORE_WAIT)) add_box_fence();
            if (!is(adding::NO_WAIT) && !is(adding::WAITS_FOR_READ)) add_box_wait();
            if (!is(adding::NO_FENCE_BEFORE_TURN) && !is(adding::FENCE_BEFORE_WAIT)) add_box_fence();
            if (!is(adding::NO_TURN)) store_release(&x.turn, block_index() + 1);
            if (is(adding::NO_WAIT)) add_box_wait();
        }
    };
    const char *const write_fence = "an add_box of what a thread wrote, without a fence and a barrier",
                      *const of_another = "race in global memory: adds to what block";
    const std::pair<adding, const char *> expected[] = {
        {adding::NO_MISTAKE, ""},
        {adding::NO_WRITE_FENCE, write_fence},
        {adding::FENCE_BEFORE_WRITE, write_fence},
        {adding::FENCE_BEHIND_BARRIER, write_fence},
        {adding::FENCE_OF_ANOTHER, write_fence},
        {adding::NO_FENCE_BEHIND_TURN, of_another},
        {adding::WRITE_BEFORE_READ, "writes over what an add_box reads"},
        {adding::TWICE, "an add_box to what an earlier one adds to"},
        {adding::NO_COMMIT, "writes over what an add_box reads"},
        {adding::NO_WAIT, of_another},
        {adding::WAITS_FOR_READ, "ends with an add_box that it did not wait for"},
        {adding::NO_FENCE_BEFORE_TURN, of_another},
        {adding::FENCE_BEFORE_WAIT, of_another},
        {adding::NO_TURN, of_another},
    };
    for (const int side_by_side : {1, 3})
        for (const auto &[how, fault] : expected) {
            emulator::run_side_by_side(side_by_side, 5);
            x = {};
            const std::string what = "additions, mistake " + std::to_string((int)how);
            expect(what.c_str(), fault, [&, how = how] { kernel(how); }, 96, BLOCKS, 2 * BOX);
            if (how != adding::NO_MISTAKE) continue;
            bool ok = true;
            for (int row = 0; row < ROWS; row++)
                for (int col = 0; col < PITCH; col++) {
                    float want = 0;
                    for (int i = 0; i < BLOCKS && row >= FIRST && col < COLS; i++)
                        want += number(row - FIRST, col, i);
                    ok &= x.sums[row][col] == want;
                }
            check(ok, "additions", "a wrong sum");
        }
    emulator::run_side_by_side(1, 0);
    const auto expect_of_one = [&](const char *what, const std::string &expected, auto wait) {
        x = {};
        expect(
            what, expected,
            [=] {
                for (int i = lane_index(); i < BOX / 4; i += 32)
                    shared_store(shared_base() + 4 * (shared_address)i, 1.0f);
                shared_write_fence();
                warp_barrier();
                if (lane_index() != 0) return;
                add_box(sums, shared_base(), 0, 0, 0, 0);
                add_box_commit();
                wait();
                if (global_load(x.sums[3] + 5) != 1) throw emulator::Fault{"wrong value"};
                add_box(sums, shared_base(), 0, 0, 0, 0);
                add_box_commit();
                add_box_wait();
                add_box_fence();
                if (global_load(x.sums[3] + 5) != 2) throw emulator::Fault{"wrong value"};
            },
            32, 1, BOX);
    };
    const char *const early = "race in global memory: touches what block 0, an add_box wrote";
    expect_of_one("a look at sums that are over", "", [] { add_box_wait(), add_box_fence(); });
    expect_of_one("a look without a fence", early, [] { add_box_wait(); });
    expect_of_one("a look without a wait", early, [] { add_box_wait_read(), add_box_fence(); });
    lend_numbers();
}

int main() {
    lend_numbers();
    test_bulk_copies();
    test_part_barriers();
    test_additions();
    return finish();
}
