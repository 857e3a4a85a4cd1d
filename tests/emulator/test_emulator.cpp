// Tests of the emulator itself: it catches each mistake that it checks for, and its fragments are laid out as in
// the PTX manual.
#include "../../csrc/half.h"
#include "../../cuda/device/elements.cuh"
#include "../../cuda/ringtile_cuda.h"
#include "expect.h"

#include <thread>
#include <vector>

static shared_address slot(int i) { return shared_base() + 4 * (shared_address)i; }

static void test_shared_memory() {
    const auto write_own = [] { st_shared(slot(thread_index()), thread_index()); };
    const auto read_at_distance = [](int distance) {
        return ld_shared<int>(slot((thread_index() + distance) % num_threads()));
    };
    expect("a barrier between write and read", "", [&] {
        write_own();
        syncthreads();
        if (read_at_distance(33) != (thread_index() + 33) % 64) throw emulator::Fault{"wrong value"};
    });
    expect("no barrier between write and read", "race: reads what thread", [&] {
        write_own();
        if (thread_index() > 32) read_at_distance(-1 + num_threads());
    });
    expect("no barrier between read and the next write", "race: writes over what", [&] {
        write_own();
        syncthreads();
        read_at_distance(1);
        write_own();
    });
    expect("two threads write", "race: writes over what thread", [] { st_shared(slot(0), 1); });
    expect("syncwarp orders the lanes of a warp", "", [&] {
        write_own();
        syncwarp();
        ld_shared<int>(slot(thread_index() ^ 1));
    });
    expect("syncwarp orders no other warp", "race: reads what|reads bytes never written", [&] {
        write_own();
        syncwarp();
        if (thread_index() >= 32) ld_shared<int>(slot(thread_index() - 32));
    });
    expect("a shuffle is no barrier", "race: reads what", [&] {
        write_own();
        shfl_sync(1, 0);
        ld_shared<int>(slot(thread_index() ^ 1));
    });
    expect("one lane's later read does not hide the other lanes' reads", "race: writes over what|race: reads what",
           [&] {
               if (thread_index() == 0) st_shared(slot(0), 1);
               syncthreads();
               if (thread_index() >= 32) ld_shared<int>(slot(0));
               if (thread_index() == 0) st_shared(slot(0), 2);
           });
    expect("outside the CTA's bytes", "outside the CTA's 1024 bytes", [] { st_shared(slot(200 + thread_index()), 0); });
    expect("misaligned", "misaligned access of 4 bytes", [] { ld_shared<int>(shared_base() + 2); });
    expect("never written", "reads bytes never written", [] { ld_shared<int>(slot(thread_index())); });
    expect("writes to adjacent 16-bit numbers do not race", "",
           [] { st_shared(shared_base() + 2 * (shared_address)thread_index(), bf16{1}); });
}

static void test_global_memory() {
    std::vector<float> numbers(64);
    float *const x = numbers.data();
    emulator::lend(x, 64 * sizeof(float), true);
    expect("inside", "", [=] { st_global(x + thread_index(), ld_global(x + thread_index()) + 1); });
    expect("behind the end", "outside the lent arrays", [=] { ld_global(x + 1 + thread_index()); });
    expect("misaligned", "misaligned access to global",
           [=] { ld_global(reinterpret_cast<const float *>(reinterpret_cast<const char *>(x) + 2)); });
    expect("two threads write", "race in global memory", [=] { st_global(x, 1.0f); });
    expect(
        "two CTAs write", "race in global memory: touches what CTA 0", [=] { st_global(x + thread_index(), 1.0f); }, 64,
        2);
    expect(
        "a CTA writes what another read", "writes what another CTA read",
        [=] {
            if (cta_index_x() == 0) ld_global(x + thread_index());
            if (cta_index_x() == 1) st_global(x + thread_index(), 1.0f);
        },
        64, 2);
    emulator::take_back_all();
    emulator::lend(x, 64 * sizeof(float), false);
    expect("writes an array lent for reading", "lent for reading", [=] { st_global(x, 1.0f); });
    emulator::take_back_all();
}

// CTAs add to the same numbers in the order of their tickets: a semaphore holds the ticket of the CTA that adds next.
static void test_semaphores() {
    struct {
        int next_ticket, semaphore;
        float numbers[64];
    } x = {};
    emulator::lend(&x, sizeof(x), true, 4);
    const auto take_ticket = [&] {
        if (thread_index() == 0) st_shared(slot(0), atom_add(&x.next_ticket, 1));
        syncthreads();
        return ld_shared<int>(slot(0));
    };
    const auto add = [&] {
        float *const number = x.numbers + 63 - thread_index();
        st_global(number, ld_global(number) * 2 + (float)cta_index_x());
    };
    const auto wait = [&](int ticket) {
        if (thread_index() == 0) wait_eq(&x.semaphore, ticket);
    };
    const auto release = [&](int ticket) {
        if (thread_index() == 0) st_release(&x.semaphore, ticket + 1);
    };
    const auto expect_of_ctas = [&](const char *what, const std::string &expected, auto kernel) {
        x = {};
        expect(what, expected, kernel, 64, 5);
    };
    for (const int concurrent : {1, 2, 5}) {
        emulator::run_concurrently(concurrent, 7);
        std::vector<int> order;
        expect_of_ctas("semaphore", "", [&] {
            const int ticket = take_ticket();
            wait(ticket);
            syncthreads();
            add();
            if (thread_index() == 0) order.push_back(cta_index_x());
            syncthreads();
            release(ticket);
        });
        float want = 0;
        for (const int of : order) want = want * 2 + (float)of;
        check(order.size() == 5 && x.numbers[0] == want && x.numbers[63] == want, "semaphore", "a wrong sum");
        expect_of_ctas("a semaphore without a wait", "race in global memory: touches what CTA", [&] {
            const int ticket = take_ticket();
            add();
            syncthreads();
            release(ticket);
        });
        expect_of_ctas("no barrier between wait and work", "race in global memory: touches what CTA", [&] {
            const int ticket = take_ticket();
            wait(ticket);
            add();
            syncthreads();
            release(ticket);
        });
        expect_of_ctas("no barrier between work and release", "race in global memory: touches what CTA", [&] {
            const int ticket = take_ticket();
            wait(ticket);
            syncthreads();
            add();
            release(ticket);
        });
        expect_of_ctas("work after the release", "race in global memory: ", [&] {
            const int ticket = take_ticket();
            wait(ticket);
            syncthreads();
            add();
            syncthreads();
            release(ticket);
            if (ticket < 4) add();
        });
        expect_of_ctas("a semaphore without a release", "in a word that stays 0", [&] {
            const int ticket = take_ticket();
            wait(ticket);
            syncthreads();
            add();
        });
    }
    emulator::run_concurrently(1, 0);
    expect_of_ctas("a wait for a CTA that starts later", "CTA 0, thread 0: waits forever for 4", [&] {
        const int ticket = 4 - take_ticket();
        wait(ticket);
        syncthreads();
        release(ticket);
    });
    expect_of_ctas("a plain read of a semaphore", "plain access to a word", [&] {
        take_ticket();
        ld_global(&x.next_ticket);
    });
    expect_of_ctas("a plain write to a semaphore", "also has plain accesses", [&] {
        if (thread_index() == 0) st_global(&x.semaphore, cta_index_x());
        if (thread_index() == 0) wait_eq(&x.semaphore, 0);
    });
    emulator::take_back_all();
}

static void test_async_copies() {
    alignas(16) static chunk from[64];
    emulator::lend(from, sizeof(from), false);
    const auto start = [] {
        cp_async(shared_base() + 16 * (shared_address)thread_index(), from + thread_index(), 16);
        cp_async_commit_group();
    };
    const auto look_at = [](int i) { return ld_shared<int>(shared_base() + 16 * (shared_address)i); };
    expect("a wait", "", [&] {
        start();
        cp_async_wait_group<0>();
        syncthreads();
        look_at(63 - thread_index());
    });
    expect("no wait", "reads before the wait", [&] {
        start();
        syncthreads();
        look_at(63 - thread_index());
    });
    expect("waits for the group before", "reads before the wait", [&] {
        start();
        cp_async_wait_group<1>();
        syncthreads();
        look_at(63 - thread_index());
    });
    expect("no barrier after the wait", "race: reads what thread|reads bytes never written", [&] {
        start();
        cp_async_wait_group<0>();
        if (thread_index() > 0) look_at(thread_index() - 1);
    });
    expect("over bytes that other threads still read", "race: ", [&] {
        for (int i = 0; i < 2; i++) {
            start();
            cp_async_wait_group<0>();
            syncthreads();
            look_at(63 - thread_index());
        }
    });
    expect("never waited for", "did not wait for", [&] { start(); });
    expect("from outside", "a cp_async from outside", [] {
        cp_async(shared_base() + 16 * (shared_address)thread_index(), from + 1 + thread_index(), 16);
        cp_async_commit_group();
        cp_async_wait_group<0>();
    });
    expect("zeros behind num_bytes; nothing is read when that is 0", "", [] {
        const shared_address mine = shared_base() + 16 * (shared_address)thread_index();
        cp_async(mine, nullptr, 0);
        cp_async_commit_group();
        cp_async_wait_group<0>();
        if (ld_shared<uint32_t>(mine + 12) != 0) throw emulator::Fault{"not zero"};
    });
    emulator::take_back_all();
}

static void test_meetings() {
    expect("a barrier that one thread never reaches", "waits forever in syncthreads", [] {
        if (thread_index() != 5) syncthreads();
    });
    expect("lanes in different functions", "while lanes of its warp are in", [] {
        if (thread_index() % 2)
            shfl_sync(1, 0);
        else
            syncwarp();
    });
    expect("shuffles and votes", "", [] {
        const int lane = lane_index();
        bool ok = shfl_xor_sync(lane, 5) == (lane ^ 5) && shfl_sync(2.5f * (float)lane, 3) == 7.5f;
        ok &= reduce_min_sync(lane + 4) == 4 && reduce_max_sync(-lane) == 0;
        ok &= any_sync(lane == 7) && !any_sync(lane > 31) && all_sync(lane < 32) && !all_sync(lane < 31);
        if (!ok) throw emulator::Fault{"wrong value"};
    });
    expect("a CTA of half a warp", "a CTA of 16 threads", [] {}, 16);
}

// (16, 8) = a (16, 16) b (16, 8), with the rows of a contiguous in shared memory, and the columns or the rows of b.
template <class T> static void test_product(const char *what) {
    float a[16][16], b[16][8], product[16][8];
    uint32_t seed = 1;
    const auto next = [&] { return (float)((seed = seed * 1664525u + 1013904223u) >> 24) - 100; }; // exact in T
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
                    st_shared(a_at + 2 * (shared_address)i, narrow<T>(a[i / 16][i % 16]));
                for (int i = lane; i < 128; i += 32) // b (16, 8), or its transpose (8, 16)
                    st_shared(b_at + 2 * (shared_address)i,
                              narrow<T>(transposed ? b[i / 8][i % 8] : b[i % 16][i / 16]));
                syncwarp();
                uint32_t a_word[4], b_word[4];
                ldmatrix_x4(a_word, a_at + (shared_address)(lane % 16 * 32 + lane / 16 * 16));
                if (transposed)
                    ldmatrix_x4_trans(b_word, b_at + (shared_address)(lane % 16 * 16));
                else
                    ldmatrix_x4(b_word, b_at + (shared_address)(lane % 8 * 32 + lane / 8 % 2 * 16));
                float sum[4] = {1, 2, 3, 4};
                mma_m16n8k16<T>(sum, a_word, b_word[0], b_word[1]);
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

// Wavefronts beyond the fewest possible that a warp takes to run `access`, over 4 KiB that have been written.
template <class Kernel> static int64_t conflicts(Kernel access) {
    const int64_t before = emulator::bank_conflicts("a test");
    expect(
        "accesses of a warp", "",
        [=] {
            for (int i = lane_index(); i < 1024; i += 32) st_shared(slot(i), 0);
            syncwarp();
            access(lane_index());
        },
        32, 1, 4096);
    return emulator::bank_conflicts("a test") - before;
}

template <class T> static int64_t conflicts_of_lanes_apart(int num_bytes) {
    const auto at = [=](int lane) { return shared_base() + (shared_address)(lane * num_bytes); };
    const int64_t loads = conflicts([=](int lane) { ld_shared<T>(at(lane)); });
    if (num_bytes >= (int)sizeof(T)) {
        const int64_t stores = conflicts([=](int lane) { st_shared(at(lane), T{}); });
        check(loads == stores, "a store", "conflicts unlike a load");
    }
    return loads;
}

static void test_bank_conflicts_are_counted() {
    const auto expect_conflicts = [](const char *what, int64_t got, int64_t expected) {
        check(got == expected, what, std::to_string(got) + " conflicts, expected " + std::to_string(expected));
    };
    const auto load_matrix_with_rows_apart = [](int num_bytes) {
        return conflicts([=](int lane) {
            uint32_t word[4];
            ldmatrix_x4(word, shared_base() + (shared_address)(lane % 8 * num_bytes));
        });
    };
    struct alignas(8) two_words {
        uint32_t word[2];
    };
    expect_conflicts("ldmatrix, rows 128 bytes apart", load_matrix_with_rows_apart(128), 4 * 7);
    expect_conflicts("ldmatrix, rows 144 bytes apart", load_matrix_with_rows_apart(144), 0);
    expect_conflicts("not counted", conflicts_of_lanes_apart<int>(128), 0);
    emulator::count_banks(true);
    expect_conflicts("a word in each bank", conflicts_of_lanes_apart<int>(4), 0);
    expect_conflicts("two words in a bank", conflicts_of_lanes_apart<int>(8), 1);
    expect_conflicts("32 words in a bank", conflicts_of_lanes_apart<int>(128), 31);
    expect_conflicts("one word for all", conflicts_of_lanes_apart<int>(0), 0);
    expect_conflicts("two lanes in a word", conflicts_of_lanes_apart<uint16_t>(2), 0);
    expect_conflicts("8 bytes", conflicts_of_lanes_apart<two_words>(8), 0);
    expect_conflicts("8 bytes, 16 apart: two words in a bank, in each half", conflicts_of_lanes_apart<two_words>(16),
                     2);
    expect_conflicts("16 bytes", conflicts_of_lanes_apart<chunk>(16), 0);
    expect_conflicts("16 bytes, 32 apart: two in each quarter", conflicts_of_lanes_apart<chunk>(32), 4);
    expect_conflicts("16 bytes, 128 apart: eight in each quarter", conflicts_of_lanes_apart<chunk>(128), 4 * 7);
    expect_conflicts("lanes 16 to 31 do not take part", conflicts([](int lane) {
                         if (lane < 16) ld_shared<int>(slot(32 * lane));
                     }),
                     15);
    expect_conflicts("lane 0 loads alone, then all do", conflicts([](int lane) {
                         if (lane == 0) ld_shared<int>(slot(33));
                         ld_shared<int>(slot(lane));
                     }),
                     0);
    expect_conflicts("even lanes load, then odd ones at the same place of the code", conflicts([](int lane) {
                         for (int round = 0; round < num_threads() / 16; round++) {
                             if (lane % 2 == round) ld_shared<int>(slot(lane - round + 32 * round));
                             syncwarp();
                         }
                     }),
                     0);
    emulator::count_banks(false);
}

static void test_numbers() {
    uint32_t seed = 1;
    bool ok = true;
    for (int i = 0; i < 100000; i++) {
        const float x = uint_as_float(seed = seed * 1664525u + 1013904223u);
        ok &= narrow<bf16>(x).bits == f32_to_bf16(x);
        const uint16_t bits = (uint16_t)(seed >> 16);
        ok &= std::isnan(widen(f16{bits})) || narrow<f16>(widen(f16{bits})).bits == bits;
    }
    check(ok, "conversions", "differ from csrc/half.h, or do not round-trip");
    check(ex2_approx_ftz(-127.0f) == 0 && ex2_approx_ftz(3) == 8, "ex2_approx_ftz",
          "2^3, and 0 below the normal numbers");
}

// 2^31 items need 2^23 blocks of 256 threads, far fewer than a grid may have.
static void test_grids_of_more_items_than_an_int_counts() {
    const int last = INT32_MAX - 1; // block of the largest grid
    bool ok = item_index(1 << 23, 256, 5) == ((int64_t)1 << 31) + 5;
    ok &= item_index(last, 256, 255) == (int64_t)INT32_MAX * 256 - 1;
    check(ok && grid_for((int64_t)1 << 40, 256) == INT32_MAX, "item_index", "wraps at 2^31");
}

// GLU's rows go along y, of which a grid has at most 65,535: the last rows come second.
static void test_glu_of_more_rows_than_a_grid_has() {
    constexpr int64_t ROWS = UINT16_MAX + 3;
    std::vector<float> gate(ROWS), up(ROWS, 2), prod(ROWS, -1);
    for (int64_t i = 0; i < ROWS; i++) gate[(size_t)i] = (float)i;
    emulator::lend(gate.data(), ROWS * 4, false);
    emulator::lend(up.data(), ROWS * 4, false);
    emulator::lend(prod.data(), ROWS * 4, true);
    const rt_glu_params p = {RT_F32, RT_GLU_RELU, ROWS, 1, 1, 1, 1};
    bool ok = rt_cuda_glu_fwd(&p, gate.data(), up.data(), prod.data(), nullptr) == RT_OK;
    for (int64_t i = 0; i < ROWS; i++) ok &= prod[(size_t)i] == 2 * (float)i;
    check(ok, "GLU", "a wrong row");
    emulator::take_back_all();
}

// Threads are 8 bytes apart at every step of the reduction.
static void test_cross_entropy_has_no_bank_conflicts() {
    constexpr int64_t VOCAB = 3000, label = 7;
    std::vector<float> logits(VOCAB, 1);
    float loss, lse;
    rt_cross_entropy_params p = {};
    p.dtype = RT_F32, p.num_tokens = 1, p.vocab_size = p.logits_stride = VOCAB;
    emulator::lend(logits.data(), VOCAB * 4, true);
    emulator::lend(&label, 8, false);
    emulator::lend(&loss, 4, true);
    emulator::lend(&lse, 4, true);
    emulator::count_banks(true);
    check(rt_cuda_cross_entropy_fwd_bwd(&p, logits.data(), &label, &loss, &lse, nullptr) == RT_OK, "cross entropy", "");
    emulator::count_banks(false);
    check(emulator::bank_conflicts("cross_entropy.cu") == 0, "cross entropy", "bank conflicts");
    emulator::take_back_all();
}

struct address_params {
    shared_address address;
};
RT_KERNEL(32) write_at(RT_PARAMS address_params p) { st_shared(p.address, 1); }

struct large_params {
    char bytes[MAX_PARAMS_BYTES + 4];
};
RT_KERNEL(32) nothing(RT_PARAMS large_params) {}

static void test_launches_that_cuda_refuses() {
    const auto nobody = [] {};
    expect("a CTA of 33 warps", "a CTA of 1056 threads", nobody, 1056);
    expect("as much shared memory as sm_86 has", "", nobody, 32, 1, 99 * 1024);
    expect("more", "101392 bytes of shared memory, expected at most 101376", nobody, 32, 1, 99 * 1024 + 16);
    emulator::set_compute_capability(90);
    expect("as much as sm_90 has", "", nobody, 32, 1, 227 * 1024);
    expect("more", "232464 bytes of shared memory, expected at most 232448", nobody, 32, 1, 227 * 1024 + 16);
    emulator::set_compute_capability(80);
    check(launch(nothing, 1, 32, 0, nullptr, large_params{}) == RT_CUDA &&
              strstr(rt_cuda_last_error(), "parameters of 4100 bytes") != nullptr,
          "parameters", "more than 4096 bytes are accepted");
    const auto status = [](grid_size grid) { return launch(write_at, grid, 32, 64, nullptr, address_params{0}); };
    const grid_size large[] = {(int64_t)1 << 31, {1, 1 << 16}, {1, 1, 1 << 16}};
    for (const grid_size &grid : large) check(status(grid) == RT_BAD_SHAPE, "a grid", "is too large and accepted");
    check(status({1, 0}) == RT_OK, "an empty grid", "is refused");
}

static void test_last_error() {
    const auto status = [](shared_address address) {
        return launch(write_at, 1, 32, 64, nullptr, address_params{address});
    };
    const auto text_is = [](const char *expected) {
        const std::string got = rt_cuda_last_error();
        check(got.find(expected) != std::string::npos && got.empty() == (*expected == 0), "the text of the last error",
              got);
    };
    text_is("");
    check(status(2) == RT_CUDA, "a kernel with a fault", "");
    text_is("misaligned access of 4 bytes");
    check(status(128) == RT_CUDA, "a kernel with another fault", "");
    text_is("outside the CTA's 64 bytes");
    std::thread([&] { text_is(""); }).join(); // one text per thread
}

int main() {
    test_grids_of_more_items_than_an_int_counts();
    test_shared_memory();
    test_global_memory();
    test_semaphores();
    test_async_copies();
    test_meetings();
    test_product<bf16>("a product of bf16 fragments");
    test_product<f16>("a product of f16 fragments");
    test_bank_conflicts_are_counted();
    test_numbers();
    test_last_error();
    test_launches_that_cuda_refuses();
    test_glu_of_more_rows_than_a_grid_has();
    test_cross_entropy_has_no_bank_conflicts();
    return finish();
}
