// The emulator's own tests: each mistake it is there for is made once and caught, and fragments lie as the PTX manual
// says they do.
#include "../../csrc/half.h"
#include "../../cuda/device.cuh"
#include "expect.h"

#include <vector>

static shared_address slot(int i) { return shared_base() + 4 * (shared_address)i; }

static void test_shared_memory() {
    const auto write_mine = [] { shared_store(slot(thread_index()), thread_index()); };
    const auto read_neighbour = [](int distance) {
        return shared_load<int>(slot((thread_index() + distance) % num_threads()));
    };
    expect("a barrier between write and read", "", [&] {
        write_mine();
        block_barrier();
        if (read_neighbour(33) != (thread_index() + 33) % 64) throw emulator::Fault{"wrong value"};
    });
    expect("no barrier between write and read", "race: reads what thread", [&] {
        write_mine();
        if (thread_index() > 32) read_neighbour(-1 + num_threads());
    });
    expect("no barrier between read and the next write", "race: writes over what", [&] {
        write_mine();
        block_barrier();
        read_neighbour(1);
        write_mine();
    });
    expect("two threads write", "race: writes over what thread 0 wrote", [] { shared_store(slot(0), 1); });
    expect("a warp's barrier orders its lanes", "", [&] {
        write_mine();
        warp_barrier();
        shared_load<int>(slot(thread_index() ^ 1));
    });
    expect("a warp's barrier orders no other warp", "race: reads what", [&] {
        write_mine();
        warp_barrier();
        if (thread_index() >= 32) shared_load<int>(slot(thread_index() - 32));
    });
    expect("a shuffle is no barrier", "race: reads what", [&] {
        write_mine();
        shuffle(1, 0);
        shared_load<int>(slot(thread_index() ^ 1));
    });
    expect("one lane's later read does not hide the others'", "race: writes over what", [&] {
        if (thread_index() == 0) shared_store(slot(0), 1);
        block_barrier();
        if (thread_index() >= 32) shared_load<int>(slot(0)); // the last warp at a barrier goes on first
        if (thread_index() == 0) shared_store(slot(0), 2);
    });
    expect("outside the block's bytes", "outside the block's 1024 bytes",
           [] { shared_store(slot(200 + thread_index()), 0); });
    expect("misaligned", "misaligned access of 4 bytes", [] { shared_load<int>(shared_base() + 2); });
    expect("never written", "nobody wrote", [] { shared_load<int>(slot(thread_index())); });
    expect("16-bit neighbours are no race", "",
           [] { shared_store(shared_base() + 2 * (shared_address)thread_index(), bf16{1}); });
}

static void test_global_memory() {
    std::vector<float> numbers(64);
    float *const x = numbers.data();
    emulator::lend(x, 64 * sizeof(float), true);
    expect("inside", "", [=] { global_store(x + thread_index(), global_load(x + thread_index()) + 1); });
    expect("behind the end", "outside every array", [=] { global_load(x + 1 + thread_index()); });
    expect("misaligned", "misaligned access to global",
           [=] { global_load(reinterpret_cast<const float *>(reinterpret_cast<const char *>(x) + 2)); });
    expect("two threads write", "race in global memory", [=] { global_store(x, 1.0f); });
    expect(
        "two blocks write", "race in global memory: touches what block 0",
        [=] { global_store(x + thread_index(), 1.0f); }, 64, 2);
    expect(
        "a block writes what another read", "writes what another block read",
        [=] {
            if (block_index() == 0) global_load(x + thread_index());
            if (block_index() == 1) global_store(x + thread_index(), 1.0f);
        },
        64, 2);
    emulator::take_back_all();
    emulator::lend(x, 64 * sizeof(float), false);
    expect("writes what is for reading", "lent for reading", [=] { global_store(x, 1.0f); });
    emulator::take_back_all();
}

// Blocks add to the same numbers, in the order of their tickets.
static void test_turns() {
    struct {
        int ticket, turn;
        float numbers[64];
    } x = {};
    emulator::lend(&x, sizeof(x), true, 4);
    const auto mine = [&] {
        if (thread_index() == 0) shared_store(slot(0), take_ticket(&x.ticket));
        block_barrier();
        return shared_load<int>(slot(0));
    };
    const auto add = [&] {
        float *const number = x.numbers + 63 - thread_index();
        global_store(number, global_load(number) * 2 + (float)block_index());
    };
    const auto wait = [&](int turn) {
        if (thread_index() == 0) wait_until(&x.turn, turn);
    };
    const auto release = [&](int turn) {
        if (thread_index() == 0) store_release(&x.turn, turn + 1);
    };
    const auto expect_of_blocks = [&](const char *what, const std::string &expected, auto kernel) {
        x = {};
        expect(what, expected, kernel, 64, 5);
    };
    for (const int side_by_side : {1, 2, 5}) {
        emulator::run_side_by_side(side_by_side, 7);
        std::vector<int> order;
        expect_of_blocks("turns", "", [&] {
            const int turn = mine();
            wait(turn);
            block_barrier();
            add();
            if (thread_index() == 0) order.push_back(block_index());
            block_barrier();
            release(turn);
        });
        float want = 0;
        for (const int of : order) want = want * 2 + (float)of;
        check(order.size() == 5 && x.numbers[0] == want && x.numbers[63] == want, "turns", "a wrong sum");
        expect_of_blocks("turns without a wait", "race in global memory: touches what block", [&] {
            const int turn = mine();
            add();
            block_barrier();
            release(turn);
        });
        expect_of_blocks("no barrier between wait and work", "race in global memory: touches what block",
                         [&] {
                             const int turn = mine();
                             wait(turn);
                             add();
                             block_barrier();
                             release(turn);
                         });
        expect_of_blocks("no barrier between work and release", "race in global memory: touches what block",
                         [&] {
                             const int turn = mine();
                             wait(turn);
                             block_barrier();
                             add();
                             release(turn);
                         });
        expect_of_blocks("work after the release", "race in global memory: ", [&] {
            const int turn = mine();
            wait(turn);
            block_barrier();
            add();
            block_barrier();
            release(turn);
            if (turn < 4) add();
        });
        expect_of_blocks("turns without a release", "in a word that stays 0", [&] {
            const int turn = mine();
            wait(turn);
            block_barrier();
            add();
        });
    }
    emulator::run_side_by_side(1, 0);
    expect_of_blocks("a wait for a block that starts later", "block 0, thread 0: waits forever for 4", [&] {
        const int turn = 4 - mine();
        wait(turn);
        block_barrier();
        release(turn);
    });
    expect_of_blocks("a plain look at a word of turns", "touches a word that blocks", [&] {
        mine();
        global_load(&x.ticket);
    });
    expect_of_blocks("a plain store to a word of turns", "also touched otherwise", [&] {
        if (thread_index() == 0) global_store(&x.turn, block_index());
        if (thread_index() == 0) wait_until(&x.turn, 0);
    });
    emulator::take_back_all();
}

static void test_async_copies() {
    alignas(16) static chunk from[64];
    emulator::lend(from, sizeof(from), false);
    const auto start = [] {
        async_copy(shared_base() + 16 * (shared_address)thread_index(), from + thread_index(), 16);
        async_commit();
    };
    const auto look_at = [](int i) { return shared_load<int>(shared_base() + 16 * (shared_address)i); };
    expect("waited for", "", [&] {
        start();
        async_wait<0>();
        block_barrier();
        look_at(63 - thread_index());
    });
    expect("no wait", "reads before the wait", [&] {
        start();
        block_barrier();
        look_at(63 - thread_index());
    });
    expect("waits for the group before", "reads before the wait", [&] {
        start();
        async_wait<1>();
        block_barrier();
        look_at(63 - thread_index());
    });
    expect("no barrier after the wait", "race: reads what thread", [&] {
        start();
        async_wait<0>();
        if (thread_index() > 0) look_at(thread_index() - 1);
    });
    expect("into what others still read", "race: ", [&] {
        for (int i = 0; i < 2; i++) {
            start();
            async_wait<0>();
            block_barrier();
            look_at(63 - thread_index());
        }
    });
    expect("never waited for", "did not wait for", [&] { start(); });
    expect("from outside", "async copy from outside", [] {
        async_copy(shared_base() + 16 * (shared_address)thread_index(), from + 1 + thread_index(), 16);
        async_commit();
        async_wait<0>();
    });
    expect("the rest is zeros, and nothing is read for no bytes", "", [] {
        const shared_address mine = shared_base() + 16 * (shared_address)thread_index();
        async_copy(mine, nullptr, 0);
        async_commit();
        async_wait<0>();
        if (shared_load<uint32_t>(mine + 12) != 0) throw emulator::Fault{"not zero"};
    });
    emulator::take_back_all();
}

static void test_meetings() {
    expect("a barrier that a thread does not reach", "waits forever in block_barrier", [] {
        if (thread_index() != 5) block_barrier();
    });
    expect("lanes in different functions", "while lanes of its warp are in", [] {
        if (thread_index() % 2)
            shuffle(1, 0);
        else
            warp_barrier();
    });
    expect("shuffles and votes", "", [] {
        const int lane = lane_index();
        bool ok = shuffle_xor(lane, 5) == (lane ^ 5) && shuffle(2.5f * (float)lane, 3) == 7.5f;
        ok &= min_of_lanes(lane + 4) == 4 && max_of_lanes(-lane) == 0;
        ok &= any_lane(lane == 7) && !any_lane(lane > 31) && all_lanes(lane < 32) && !all_lanes(lane < 31);
        if (!ok) throw emulator::Fault{"wrong value"};
    });
    expect("a block of half a warp", "a block of 16 threads", [] {}, 16);
}

// (16, 8) = a (16, 16) b (16, 8), a and b in shared memory as rows; b also as columns.
template <class T> static void test_product(const char *what) {
    float a[16][16], b[16][8], product[16][8];
    uint32_t seed = 1;
    const auto next = [&] {
        return (float)((seed = seed * 1664525u + 1013904223u) >> 24) - 100;
    }; // exact in T
    for (auto &row : a)
        for (float &x : row) x = next();
    for (auto &row : b)
        for (float &x : row) x = next();
    for (const bool transposed : {false, true}) {
        expect(
            what, "",
            [&] {
                const shared_address a_at = shared_base(), b_at = a_at + 16 * 32;
                const int lane = lane_index();
                for (int i = lane; i < 256; i += 32)
                    shared_store(a_at + 2 * (shared_address)i, narrow<T>(a[i / 16][i % 16]));
                for (int i = lane; i < 128; i += 32) // b as it is: (16, 8); or b^T: (8, 16)
                    shared_store(b_at + 2 * (shared_address)i,
                                 narrow<T>(transposed ? b[i / 8][i % 8] : b[i % 16][i / 16]));
                warp_barrier();
                uint32_t a_word[4], b_word[4];
                load_matrices(a_word, a_at + (shared_address)(lane % 16 * 32 + lane / 16 * 16));
                if (transposed)
                    load_matrices_transposed(b_word, b_at + (shared_address)(lane % 16 * 16));
                else
                    load_matrices(b_word, b_at + (shared_address)(lane % 8 * 32 + lane / 8 % 2 * 16));
                float sum[4] = {1, 2, 3, 4};
                multiply_add<T>(sum, a_word, b_word[0], b_word[1]);
                for (int i = 0; i < 4; i++)
                    product[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2] = sum[i] - (float)(i + 1);
            },
            32);
        bool ok = true;
        for (int i = 0; i < 16; i++)
            for (int j = 0; j < 8; j++) {
                float want = 0;
                for (int k = 0; k < 16; k++) want += a[i][k] * b[k][j];
                ok &= product[i][j] == want;
            }
        check(ok, what, transposed ? "wrong product, b as rows" : "wrong product, b as columns");
    }
}

static void test_bank_conflicts_are_counted() {
    const auto load_with_rows_apart = [](int row_bytes) {
        const int64_t before = emulator::statistics().bank_conflicts;
        expect(
            "a matrix load", "",
            [=] {
                for (int i = 0; i < 4 * 32 * 40; i += 4 * 32)
                    shared_store(shared_base() + (shared_address)(i + 4 * lane_index()), 0);
                warp_barrier();
                uint32_t word[4];
                load_matrices(word, shared_base() + (shared_address)(lane_index() % 8 * row_bytes));
            },
            32, 1, 8 * 1024);
        return emulator::statistics().bank_conflicts - before;
    };
    check(load_with_rows_apart(128) == 4 * 7, "rows 128 bytes apart", "all in one group of banks");
    check(load_with_rows_apart(144) == 0, "rows 144 bytes apart", "in eight groups");
}

static void test_numbers() {
    uint32_t seed = 1;
    bool ok = true;
    for (int i = 0; i < 100000; i++) {
        const float x = bits_to_float(seed = seed * 1664525u + 1013904223u);
        ok &= narrow<bf16>(x).bits == f32_to_bf16(x);
        const uint16_t bits = (uint16_t)(seed >> 16);
        ok &= std::isnan(widen(f16{bits})) || narrow<f16>(widen(f16{bits})).bits == bits;
    }
    check(ok, "conversions", "differ from csrc/half.h, or do not come back");
    check(exp2_approx(-127.0f) == 0 && exp2_approx(3) == 8, "exp2_approx",
          "2^3, and 0 below the normal numbers");
}

int main() {
    test_shared_memory();
    test_global_memory();
    test_turns();
    test_async_copies();
    test_meetings();
    test_product<bf16>("a product of bf16 fragments");
    test_product<f16>("a product of f16 fragments");
    test_bank_conflicts_are_counted();
    test_numbers();
    return finish();
}
