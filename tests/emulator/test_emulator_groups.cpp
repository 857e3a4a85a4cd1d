// The emulator's own tests of warp groups: mistakes are made once and caught, and products are those of the PTX manual's
// layouts.
#include "../../cuda/device_sm90.cuh"
#include "numbers_sm90.h"

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

static int product_of_rows(int row, int col, int cols = COLS) { // (64, 128) of rows 0 .. 63 and 0 .. 127
    int total = 0;
    for (int k = 0; k < cols; k++) total += number_at(row, k) * number_at(col, k);
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
    compare(scores, [](int row, int col) { return product_of_rows(row, col); });
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

// What threads wrote, then multiplied or copied over.
enum class fencing { RIGHT, NONE, BEFORE_WRITE, OF_ANOTHER, BEHIND_BARRIER, NO_BARRIER };

static void meet_at(int kind) {
    if (kind == 0) block_barrier();
    if (kind == 1) part_barrier(1, 128);
    if (kind != 2) return;
    warp_barrier();
    barrier_arrive(barrier(0));
    barrier_wait(barrier(0), 0);
}

static void multiply_written() {
    float sum[8][4];
    products_fence();
    for (int i = 0; i < 4; i++)
        multiply_rows_async<bf16>(sum, factor_at(in_panel(i), 0), factor_at(in_panel(i), 0), i > 0);
    products_commit();
    products_wait<0>(sum);
    compare(sum, [](int row, int col) { return product_of_rows(row, col, 64); });
}

static void copy_over_written() {
    if (thread_index() == 0) {
        barrier_arrive_expecting(barrier(1), BOX_BYTES);
        copy_box(shared_base(), map, barrier(1), 0, 128, 0, 0);
    } else
        barrier_arrive(barrier(1));
    barrier_wait(barrier(1), 0);
    for (int i = 0; i < 64; i++)
        if (widen(look_at(i, 63 - i)) != (float)number_at(128 + i, 63 - i))
            throw emulator::Fault{"wrong value"};
}

template <class Use> static void expect_fences(const char *name, const std::string &no_barrier, Use use) {
    const std::string no_fence = name + std::string(" what a thread wrote, without a fence and a barrier");
    const std::pair<fencing, std::string> expected[] = {
        {fencing::RIGHT, ""},
        {fencing::NONE, no_fence},
        {fencing::BEFORE_WRITE, no_fence},
        {fencing::OF_ANOTHER, no_fence},
        {fencing::BEHIND_BARRIER, no_fence},
        {fencing::NO_BARRIER, no_barrier},
    };
    for (int kind = 0; kind < 3; kind++)
        for (const auto &[how, fault] : expected) {
            const auto kernel = [=, how = how] {
                init_barriers(128);
                if (how == fencing::BEFORE_WRITE) shared_write_fence();
                for (int i = thread_index(); i < 64 * 64; i += 128)
                    shared_store(place_of(i / 64, i % 64), narrow<bf16>((float)number_at(i / 64, i % 64)));
                if (how == fencing::RIGHT || how == fencing::NO_BARRIER ||
                    (how == fencing::OF_ANOTHER && thread_index() == 0))
                    shared_write_fence();
                if (how != fencing::NO_BARRIER) meet_at(kind);
                if (how == fencing::BEHIND_BARRIER) shared_write_fence();
                use();
            };
            const std::string what = name + std::string(" what threads wrote, barrier ") +
                                     std::to_string(kind) + ", fence " + std::to_string((int)how);
            expect_group(what.c_str(), fault, kernel);
        }
}

static void test_write_fences() {
    expect_fences("a product reads", "race: reads what thread", multiply_written);
    expect_fences("a bulk copy over", "a bulk copy over what a thread wrote, without", copy_over_written);
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
    test_products();
    test_small_products();
    test_write_fences();
    test_registers();
    return finish();
}
