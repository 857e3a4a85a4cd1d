// The emulator's own tests of what only sm_90a has: mistakes are made once and caught, and products of a warp group are
// those of the PTX manual's layouts.
#include "../../cuda/device_sm90.cuh"
#include "expect.h"

#include <vector>

// A matrix of (256, 128) numbers in bf16, lent. Small integers: products are exact.
constexpr int ROWS = 256, COLS = 128;
static std::vector<bf16> numbers;
static tensor_map map;

static int number_at(int row, int col) { return (row * 7 + col * 3 + row * col) % 11 - 5; }

static void lend_numbers() {
    numbers.resize(ROWS * COLS);
    for (int i = 0; i < ROWS * COLS; i++)
        numbers[(size_t)i] = narrow<bf16>((float)number_at(i / COLS, i % COLS));
    emulator::take_back_all();
    emulator::lend(numbers.data(), ROWS * COLS * 2, false);
    const bool ok =
        make_tensor_map<bf16>(map, numbers.data(), {COLS, ROWS, 1, 1}, {COLS * 2, COLS * 2, COLS * 2}, 128);
    check(ok, "a tensor map", "refused");
}

// Shared memory: two boxes of 128 rows of 64 columns, then barriers.
constexpr int BOX_BYTES = 128 * 128, BARRIERS_AT = 2 * BOX_BYTES, SHARED_BYTES = BARRIERS_AT + 64;
static shared_address barrier(int i) { return shared_base() + (shared_address)(BARRIERS_AT + 8 * i); }

static void init_barriers(int arrivals = 1) {
    if (thread_index() == 0) {
        for (int i = 0; i < 4; i++) barrier_init(barrier(i), arrivals);
        barrier_init_fence();
    }
    block_barrier();
}
// Columns 0 .. 127 of 128 rows, in two boxes.
static void copy_rows(int row, int which = 0) {
    if (thread_index() != 0) return;
    barrier_arrive_expecting(barrier(which), 2 * BOX_BYTES);
    for (int panel = 0; panel < 2; panel++)
        copy_box(shared_base() + (shared_address)(panel * BOX_BYTES), map, barrier(which), 64 * panel, row, 0,
                 0);
}
static bf16 look_at(int row, int col) {
    const int chunk = col % 64 / 8 ^ row % 8;
    return shared_load<bf16>(shared_base() +
                             (shared_address)(col / 64 * BOX_BYTES + row * 128 + chunk * 16 + col % 8 * 2));
}

template <class Kernel>
static void expect_group(const char *what, const std::string &expected, Kernel kernel) {
    expect(what, expected, kernel, 128, 1, SHARED_BYTES);
}

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

// Rows 0 .. 63 of the matrix as left factor.
static void load_left(uint32_t (&left)[8][4]) {
    const int warp = warp_index(), lane = lane_index();
    for (int i = 0; i < 8 * 4; i++) {
        const int row = 16 * warp + lane / 4 + i % 2 * 8, col = i / 4 * 16 + lane % 4 * 2 + i / 2 % 2 * 8;
        left[i / 4][i % 4] = pack<bf16>((float)number_at(row, col), (float)number_at(row, col + 1));
    }
}

static void wait_for_rows() {
    init_barriers();
    copy_rows(0);
    barrier_wait(barrier(0), 0);
}
static shared_address in_panel(int i) {
    return shared_base() + (shared_address)(i / 4 * BOX_BYTES + i % 4 * 32);
}

// Of a lane's sums, those of (row, col) for the value of want(row, col).
template <int N, class Want> static void compare(const float (&sum)[N][4], Want want) {
    for (int i = 0; i < 4 * N; i++) {
        const int row = 16 * warp_index() + lane_index() / 4 + i % 4 / 2 * 8,
                  col = i / 4 * 8 + lane_index() % 4 * 2 + i % 2;
        if (sum[i / 4][i % 4] != (float)want(row, col)) throw emulator::Fault{"wrong product"};
    }
}

static int product_of_rows(int row, int col) { // (64, 128) of rows 0 .. 63 and 0 .. 127
    int total = 0;
    for (int k = 0; k < COLS; k++) total += number_at(row, k) * number_at(col, k);
    return total;
}
static int product(int row, int col) { // of rows 0 .. 63 with the rows 0 .. 127 as (128, 128)
    int total = 0;
    for (int k = 0; k < COLS; k++) total += number_at(row, k) * number_at(k, col);
    return total;
}

// What a kernel may do with its products, all of them or with one mistake.
enum mistake { NONE, NO_FENCE, NO_WAIT, EARLY_LOOK, EARLY_WRITE, EARLY_CHANGE, EARLY_COPY, ALONE, OWN_BYTES };

static void multiply(mistake mistake) {
    wait_for_rows();
    if (mistake == OWN_BYTES && thread_index() == 0) shared_store(shared_base(), 1);
    block_barrier();
    float scores[16][4], sums[16][4] = {};
    uint32_t left[8][4];
    load_left(left);
    if (mistake != NO_FENCE) products_fence();
    for (int i = 0; i < 8; i++)
        if (mistake != ALONE || thread_index() != 9)
            multiply_rows_async<bf16>(scores, factor_at(in_panel(i), 0), factor_at(in_panel(i), 0), i > 0);
    products_commit();
    products_fence();
    for (int i = 0; i < 8; i++)
        multiply_async<bf16>(sums, left[i], factor_at(shared_base() + (shared_address)(i * 2048), BOX_BYTES));
    products_commit();
    products_wait<1>(scores);
    compare(scores, product_of_rows);
    if (mistake == EARLY_LOOK) compare(sums, product);
    if (mistake == EARLY_WRITE) sums[3][1] = 2;
    if (mistake == EARLY_CHANGE) left[2][3]++;
    if (mistake == EARLY_COPY) {
        block_barrier();
        copy_rows(0, 1);
    }
    if (mistake == NO_WAIT) return;
    products_wait<0>(sums);
    compare(sums, product);
}

static void test_products() {
    const std::pair<mistake, const char *> expected[] = {
        {NONE, ""},
        {NO_FENCE, "a product without a fence"},
        {NO_WAIT, "products that it did not wait for"},
        {EARLY_LOOK, "wrong product"},
        {EARLY_WRITE, "sums were written before the wait"},
        {EARLY_CHANGE, "a left factor was changed before the wait"},
        {EARLY_COPY, "race: "},
        {ALONE, "threads of a group start different products"},
        {OWN_BYTES, "reads what a thread wrote, without a fence"},
    };
    for (const auto &[mistake, fault] : expected) {
        const auto kernel = [mistake = mistake] { multiply(mistake); };
        expect_group(("products, mistake " + std::to_string(mistake)).c_str(), fault, kernel);
    }
    expect_group("64 columns", "", [] {
        wait_for_rows();
        float sum[8][4] = {};
        uint32_t left[8][4];
        load_left(left);
        products_fence();
        for (int i = 0; i < 8; i++)
            multiply_async<bf16>(sum, left[i], factor_at(shared_base() + (shared_address)(i * 2048), 0));
        products_commit();
        products_wait<0>(sum);
        compare(sum, product);
    });
    expect_group("a factor inside a block", "begins inside a swizzled block", [] {
        wait_for_rows();
        float sum[16][4];
        const uint64_t a = factor_at(shared_base() + 128, 0);
        products_fence();
        multiply_rows_async<bf16>(sum, a, a, false);
    });
}

// (64, 64): sum over 128 rows of their columns 0 .. 63 and 64 .. 127.
static int product_of_columns(int row, int col) {
    int total = 0;
    for (int k = 0; k < 128; k++) total += number_at(k, row) * number_at(k, col + 64);
    return total;
}

static void test_small_products() {
    expect_group("64 columns, rows", "", [] {
        wait_for_rows();
        float sum[8][4];
        products_fence();
        for (int i = 0; i < 8; i++)
            multiply_rows_async<bf16>(sum, factor_at(in_panel(i), 0), factor_at(in_panel(i) + 64 * 128, 0),
                                      i > 0);
        products_commit();
        products_wait<0>(sum);
        compare(sum, [](int row, int col) { return product_of_rows(row, col + 64); });
    });
    expect_group("64 columns of both", "", [] {
        wait_for_rows();
        float sum[8][4];
        products_fence();
        for (int i = 0; i < 8; i++) {
            const shared_address a = shared_base() + (shared_address)(i * 2048);
            multiply_columns_async<bf16>(sum, factor_at(a, 0), factor_at(a + BOX_BYTES, 0), i > 0);
        }
        products_commit();
        products_wait<0>(sum);
        compare(sum, product_of_columns);
    });
}

// Blocks add to the same floats by turns, boxes of 64 rows from row 8 of 40 on, columns 0 .. 31 and 32 .. 63. What they may
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
    constexpr int ROWS = 40, COLS = 64, FIRST = 8, BOX = 64 * 128, BLOCKS = 3;
    static struct {
        alignas(16) float sums[ROWS][COLS];
        int turn;
    } x;
    static tensor_map sums;
    emulator::take_back_all();
    emulator::lend(&x, sizeof(x), true, 4);
    check(make_tensor_map<float>(sums, x.sums, {COLS, ROWS, 1, 1},
                                 {COLS * 4, ROWS * COLS * 4, ROWS * COLS * 4}, 64),
          "a tensor map of float", "refused");
    const auto number = [](int row, int col, int block) { return (float)(row + 100 * col + 10000 * block); };
    const auto kernel = [=](adding how) {
        const auto is = [=](adding mistake) { return how == mistake; };
        if (is(adding::FENCE_BEFORE_WRITE)) shared_write_fence();
        for (int i = thread_index(); i < 64 * COLS; i += num_threads()) {
            const int row = i / COLS, col = i % COLS, chunk = col % 32 / 4 ^ row % 8;
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
                for (int col = 0; col < COLS; col++) {
                    float want = 0;
                    for (int i = 0; i < BLOCKS && row >= FIRST; i++) want += number(row - FIRST, col, i);
                    ok &= x.sums[row][col] == want;
                }
            check(ok, "additions", "a wrong sum");
        }
    emulator::run_side_by_side(1, 0);
    lend_numbers();
}

static void test_registers() {
    const auto change = [](auto give, auto take) {
        return [=] {
            if (thread_index() < 128)
                give();
            else
                take();
        };
    };
    expect("three groups share", "", change([] { give_registers<24>(); }, [] { take_registers<240>(); }),
           384);
    expect("they take too many", "groups take",
           change([] { give_registers<40>(); }, [] { take_registers<240>(); }), 384);
    expect("it gives what it takes", "takes what it gives",
           change([] { take_registers<24>(); }, [] { take_registers<240>(); }), 384);
}

int main() {
    lend_numbers();
    test_bulk_copies();
    test_products();
    test_small_products();
    test_additions();
    test_registers();
    return finish();
}
