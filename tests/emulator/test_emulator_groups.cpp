// Tests of the emulator's warp groups: it catches each mistake, and products follow the layouts of the PTX manual.
#include "../../cuda/device/ptx_sm90.cuh"
#include "numbers_sm90.h"

// Rows 0 .. 63 of the matrix as the left factor, in registers.
static void load_left(uint32_t (&left)[8][4]) {
    const int warp = warp_index(), lane = lane_index();
    for (int i = 0; i < 8 * 4; i++) {
        const int row = 16 * warp + lane / 4 + i % 2 * 8, col = i / 4 * 16 + lane % 4 * 2 + i / 2 % 2 * 8;
        left[i / 4][i % 4] = cvt_rn_x2<bf16>((float)number_at(row, col), (float)number_at(row, col + 1));
    }
}

static void wait_for_rows() {
    init_barriers();
    copy_rows(0);
    mbarrier_wait_parity(barrier(0), 0);
}
static shared_address in_panel(int i) { return shared_base() + (shared_address)(i / 4 * BOX_BYTES + i % 4 * 32); }

// Compares a lane's sums with want(row, col).
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
static int product(int row, int col) { // (64, 128), rows 0 .. 63 times the (128, 128) matrix of rows 0 .. 127
    int total = 0;
    for (int k = 0; k < COLS; k++) total += number_at(row, k) * number_at(k, col);
    return total;
}

// A kernel with two groups of products, right or with one mistake.
enum mistake { NONE, NO_FENCE, NO_WAIT, EARLY_READ, EARLY_WRITE, EARLY_CHANGE, EARLY_COPY, ALONE, OWN_BYTES };

static void multiply(mistake mistake) {
    wait_for_rows();
    if (mistake == OWN_BYTES && thread_index() == 0) st_shared(shared_base(), 1);
    syncthreads();
    float scores[16][4], sums[16][4] = {};
    uint32_t left[8][4];
    load_left(left);
    if (mistake != NO_FENCE) wgmma_fence();
    for (int i = 0; i < 8; i++)
        if (mistake != ALONE || thread_index() != 9)
            wgmma_mma_async_ss<bf16, major::K>(scores, make_smem_desc(in_panel(i), 0), make_smem_desc(in_panel(i), 0),
                                               i > 0);
    wgmma_commit_group();
    wgmma_fence();
    for (int i = 0; i < 8; i++)
        wgmma_mma_async_rs<bf16>(sums, left[i], make_smem_desc(shared_base() + (shared_address)(i * 2048), BOX_BYTES));
    wgmma_commit_group();
    wgmma_wait_group<1>(scores);
    compare(scores, [](int row, int col) { return product_of_rows(row, col); });
    if (mistake == EARLY_READ) compare(sums, product);
    if (mistake == EARLY_WRITE) sums[3][1] = 2;
    if (mistake == EARLY_CHANGE) left[2][3]++;
    if (mistake == EARLY_COPY) {
        syncthreads();
        copy_rows(0, 1);
    }
    if (mistake == NO_WAIT) return;
    wgmma_wait_group<0>(sums);
    compare(sums, product);
}

static void test_products() {
    const std::pair<mistake, const char *> expected[] = {
        {NONE, ""},
        {NO_FENCE, "a product without wgmma_fence"},
        {NO_WAIT, "products that it did not wait for"},
        {EARLY_READ, "wrong product"},
        {EARLY_WRITE, "an accumulator was written before the wait"},
        {EARLY_CHANGE, "a left factor was changed before the wait"},
        {EARLY_COPY, "race: "},
        {ALONE, "threads of a warp group start different products"},
        {OWN_BYTES, "reads what a thread wrote, without fence_proxy_async_shared"},
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
        wgmma_fence();
        for (int i = 0; i < 8; i++)
            wgmma_mma_async_rs<bf16>(sum, left[i], make_smem_desc(shared_base() + (shared_address)(i * 2048), 0));
        wgmma_commit_group();
        wgmma_wait_group<0>(sum);
        compare(sum, product);
    });
    expect_group("a factor inside an atom", "begins inside a swizzle atom", [] {
        wait_for_rows();
        float sum[16][4];
        const uint64_t a = make_smem_desc(shared_base() + 128, 0);
        wgmma_fence();
        wgmma_mma_async_ss<bf16, major::K>(sum, a, a, false);
    });
}

// (64, 64): the columns 0 .. 63 times the columns 64 .. 127, summed over 128 rows.
static int product_of_columns(int row, int col) {
    int total = 0;
    for (int k = 0; k < 128; k++) total += number_at(k, row) * number_at(k, col + 64);
    return total;
}

static void test_small_products() {
    expect_group("64 columns, K-major", "", [] {
        wait_for_rows();
        float sum[8][4];
        wgmma_fence();
        for (int i = 0; i < 8; i++)
            wgmma_mma_async_ss<bf16, major::K>(sum, make_smem_desc(in_panel(i), 0),
                                               make_smem_desc(in_panel(i) + 64 * 128, 0), i > 0);
        wgmma_commit_group();
        wgmma_wait_group<0>(sum);
        compare(sum, [](int row, int col) { return product_of_rows(row, col + 64); });
    });
    expect_group("64 columns, MN-major", "", [] {
        wait_for_rows();
        float sum[8][4];
        wgmma_fence();
        for (int i = 0; i < 8; i++) {
            const shared_address a = shared_base() + (shared_address)(i * 2048);
            wgmma_mma_async_ss<bf16, major::MN>(sum, make_smem_desc(a, 0), make_smem_desc(a + BOX_BYTES, 0), i > 0);
        }
        wgmma_commit_group();
        wgmma_wait_group<0>(sum);
        compare(sum, product_of_columns);
    });
}

// Threads write shared memory, then multiply it or copy over it. Where, if at all, the fence stands.
enum class fencing { RIGHT, NONE, BEFORE_WRITE, OF_ANOTHER, AFTER_BARRIER, NO_BARRIER };

static void synchronize(int kind) {
    if (kind == 0) syncthreads();
    if (kind == 1) named_barrier_sync(1, 128);
    if (kind != 2) return;
    syncwarp();
    mbarrier_arrive(barrier(0));
    mbarrier_wait_parity(barrier(0), 0);
}

static void multiply_written() {
    float sum[8][4];
    wgmma_fence();
    for (int i = 0; i < 4; i++)
        wgmma_mma_async_ss<bf16, major::K>(sum, make_smem_desc(in_panel(i), 0), make_smem_desc(in_panel(i), 0), i > 0);
    wgmma_commit_group();
    wgmma_wait_group<0>(sum);
    compare(sum, [](int row, int col) { return product_of_rows(row, col, 64); });
}

static void copy_over_written() {
    if (thread_index() == 0) {
        mbarrier_arrive_expect_tx(barrier(1), BOX_BYTES);
        cp_async_bulk_tensor_4d(shared_base(), map, barrier(1), 0, 128, 0, 0);
    } else
        mbarrier_arrive(barrier(1));
    mbarrier_wait_parity(barrier(1), 0);
    for (int i = 0; i < 64; i++)
        if (widen(read_at(i, 63 - i)) != (float)number_at(128 + i, 63 - i)) throw emulator::Fault{"wrong value"};
}

template <class Use> static void expect_fences(const char *name, const std::string &no_barrier, Use use) {
    const std::string no_fence =
        name + std::string(" what a thread wrote, without fence_proxy_async_shared and a barrier");
    const std::pair<fencing, std::string> expected[] = {
        {fencing::RIGHT, ""},
        {fencing::NONE, no_fence},
        {fencing::BEFORE_WRITE, no_fence},
        {fencing::OF_ANOTHER, no_fence},
        {fencing::AFTER_BARRIER, no_fence},
        {fencing::NO_BARRIER, no_barrier},
    };
    for (int kind = 0; kind < 3; kind++)
        for (const auto &[how, fault] : expected) {
            const auto kernel = [=, how = how] {
                init_barriers(128);
                if (how == fencing::BEFORE_WRITE) fence_proxy_async_shared();
                for (int i = thread_index(); i < 64 * 64; i += 128)
                    st_shared(place_of(i / 64, i % 64), narrow<bf16>((float)number_at(i / 64, i % 64)));
                if (how == fencing::RIGHT || how == fencing::NO_BARRIER ||
                    (how == fencing::OF_ANOTHER && thread_index() == 0))
                    fence_proxy_async_shared();
                if (how != fencing::NO_BARRIER) synchronize(kind);
                if (how == fencing::AFTER_BARRIER) fence_proxy_async_shared();
                use();
            };
            const std::string what = name + std::string(" bytes that threads wrote, barrier ") + std::to_string(kind) +
                                     ", fence " + std::to_string((int)how);
            expect_group(what.c_str(), fault, kernel);
        }
}

static void test_write_fences() {
    expect_fences("a product reads", "race: reads what thread", multiply_written);
    expect_fences("a bulk copy over", "a bulk copy over what a thread wrote, without", copy_over_written);
}

static void test_registers() {
    const auto change = [](auto first_group, auto others) {
        return [=] {
            if (thread_index() < 128)
                first_group();
            else
                others();
        };
    };
    expect("three groups share", "", change([] { setmaxnreg_dec<24>(); }, [] { setmaxnreg_inc<240>(); }), 384);
    expect("together too many", "warp groups request",
           change([] { setmaxnreg_dec<40>(); }, [] { setmaxnreg_inc<240>(); }), 384);
    expect("inc to fewer", "setmaxnreg_inc to fewer registers",
           change([] { setmaxnreg_inc<24>(); }, [] { setmaxnreg_inc<240>(); }), 384);
}

int main() {
    lend_numbers();
    test_products();
    test_small_products();
    test_write_fences();
    test_registers();
    return finish();
}
