// One tiny kernel per instruction that only sm_90a has, each in the forms that the attention kernels use, and one for
// the semaphores. The same source runs on the emulator and, compiled by nvcc, on a GPU (tests/gpu): there the first
// failure names an instruction, and not "attention". Every number is a small integer, so results are exact.
#include "../../cuda/device/ptx_sm90.cuh"

#include <stdio.h>
#include <stdlib.h>

// Arrays that host and kernels share; never freed.
#ifdef __CUDACC__
static void *new_bytes(size_t count) {
    void *bytes = nullptr;
    const cudaError_t error = cudaMallocManaged(&bytes, count);
    if (error != cudaSuccess) printf("cudaMallocManaged: %s\n", cudaGetErrorString(error)), exit(1);
    return bytes;
}
static const char *error_of_launch() { // once it has ended
    const cudaError_t error = cudaDeviceSynchronize();
    return error == cudaSuccess ? "" : cudaGetErrorString(error);
}
#else
static void *new_bytes(size_t count) {
    void *const bytes = aligned_alloc(128, (count + 127) / 128 * 128);
    emulator::lend(bytes, (int64_t)count, true);
    return bytes;
}
static const char *error_of_launch() { return ""; } // launch has printed the fault
#endif
template <class T> static T *new_array(size_t count) {
    return (T *)memset(new_bytes(count * sizeof(T)), 0, count * sizeof(T));
}

// ---- the numbers ---------------------------------------------------------------------------------

constexpr int ROWS = 256, COLS = 128; // a matrix in 16 bits
RT_HOST_DEVICE int number_at(int row, int col) { return (row * 7 + col * 3 + row * col) % 11 - 5; }

static uint16_t bits_of_small(int x, bf16) {
    float wide = (float)x;
    uint32_t bits;
    memcpy(&bits, &wide, 4);
    return (uint16_t)(bits >> 16);
}
static uint16_t bits_of_small(int x, f16) { // |x| <= 5
    const uint16_t of[] = {0, 0x3c00, 0x4000, 0x4200, 0x4400, 0x4500};
    return (uint16_t)(of[abs(x)] | (x < 0 ? 0x8000 : 0));
}

template <class T> struct job {
    tensor_map numbers;
    float *out;
};

// Shared memory: two boxes of 128 rows and 64 columns, then mbarriers.
constexpr int BOX_BYTES = 128 * 128, SHARED_BYTES = 2 * BOX_BYTES + 64;
RT_DEVICE shared_address mbarrier_at(int i) { return shared_base() + (shared_address)(2 * BOX_BYTES + 8 * i); }
RT_DEVICE void init(int arrivals) {
    if (thread_index() == 0) {
        mbarrier_init(mbarrier_at(0), arrivals);
        fence_mbarrier_init();
    }
    syncthreads();
}
// 128 rows from `row` on, all columns.
template <class T> RT_DEVICE void copy_rows(const job<T> &of, int row) {
    init(1);
    if (thread_index() == 0) {
        prefetch_tensormap(of.numbers);
        mbarrier_arrive_expect_tx(mbarrier_at(0), 2 * BOX_BYTES);
        for (int panel = 0; panel < 2; panel++)
            cp_async_bulk_tensor_4d(shared_base() + (shared_address)(panel * BOX_BYTES), of.numbers, mbarrier_at(0),
                                    64 * panel, row, 0, 0);
    }
    mbarrier_wait_parity(mbarrier_at(0), 0);
}

// ---- bulk copies and additions, barriers, semaphores ---------------------------------------------

constexpr int COPIED_FROM = 200; // so that 72 rows of zeros follow
template <class T> RT_KERNEL(128) box_copy(RT_PARAMS job<T> of) {
    copy_rows(of, COPIED_FROM);
    const int row = thread_index();
    for (int col = 0; col < COLS; col++) {
        const int chunk = col % 64 / 8 ^ row % 8;
        const T x =
            ld_shared<T>(shared_base() + (shared_address)(col / 64 * BOX_BYTES + row * 128 + chunk * 16 + col % 8 * 2));
        st_global(of.out + row * COLS + col, widen(x));
    }
}

// Adds a box of 64 rows and 32 columns twice, from row 8 and column 32 of a tensor on that ends inside it.
constexpr int SUM_ROWS = 40, SUM_COLS = 44, ADDED_ROW = 8, ADDED_COL = 32;
struct addition {
    tensor_map sums;
};
RT_KERNEL(64) box_addition(RT_PARAMS addition of) {
    const int row = thread_index();
    for (int col = 0; col < 32; col++) {
        const int chunk = col / 4 ^ row % 8;
        st_shared(shared_base() + (shared_address)(row * 128 + chunk * 16 + col % 4 * 4), (float)number_at(row, col));
    }
    fence_proxy_async_shared();
    syncthreads();
    if (thread_index() != 0) return;
    for (int i = 0; i < 2; i++) {
        fence_proxy_async_global();
        cp_reduce_async_bulk_tensor_4d(of.sums, shared_base(), ADDED_COL, ADDED_ROW, 0, 0);
        cp_async_bulk_commit_group();
        cp_async_bulk_wait_group_read<0>();
        cp_async_bulk_wait_group<0>();
    }
}

// Stores a box of 16 rows and 64 columns, to row 24 and column 64 of a tensor on that ends inside it. The end of the
// kernel completes the store.
constexpr int STORED_ROWS = 32, STORED_COLS = 88, STORED_ROW = 24, STORED_COL = 64;
struct storing {
    tensor_map to;
};
template <class T> RT_KERNEL(32) box_store(RT_PARAMS storing of) {
    const int row = lane_index() / 2;
    for (int col = lane_index() % 2; col < 64; col += 2) {
        const int chunk = col / 8 ^ row % 8;
        st_shared(shared_base() + (shared_address)(row * 128 + chunk * 16 + col % 8 * 2),
                  narrow<T>((float)number_at(row, col)));
    }
    fence_proxy_async_shared();
    syncwarp();
    if (lane_index() != 0) return;
    cp_async_bulk_tensor_4d(of.to, shared_base(), STORED_COL, STORED_ROW, 0, 0);
    cp_async_bulk_commit_group();
    cp_async_bulk_wait_group_read<0>();
}

struct words {
    int *out, *turn, *ticket;
};
constexpr int EXCHANGES = 4;
// Two groups alternate: each adds 1 to what the other has.
RT_KERNEL(256) named_barriers(RT_PARAMS words of) {
    const int group = thread_index() / 128, own = thread_index(), other = (own + 128) % 256;
    const auto slot = [](int i) { return shared_base() + 4 * (shared_address)i; };
    for (int i = 0; i < EXCHANGES; i++) {
        int x = 0;
        if (i > 0 || group == 1) {
            named_barrier_sync(1 + group, 256);
            x = ld_shared<int>(slot(other));
        }
        st_shared(slot(own), x + 1);
        if (i + 1 < EXCHANGES || group == 0) named_barrier_arrive(2 - group, 256);
    }
    st_global(of.out + own, ld_shared<int>(slot(own)));
}

RT_KERNEL(64) mbarrier_arrivals(RT_PARAMS words of) {
    init(2);
    for (int phase = 0; phase < 3; phase++) {
        st_shared(shared_base() + 4 * (shared_address)thread_index(), 64 * phase + thread_index());
        syncwarp();
        if (lane_index() == 0) mbarrier_arrive(mbarrier_at(0));
        mbarrier_wait_parity(mbarrier_at(0), phase % 2);
        const int x = ld_shared<int>(shared_base() + 4 * (shared_address)(63 - thread_index()));
        st_global(of.out + 64 * phase + thread_index(), x);
        syncthreads();
    }
}

RT_KERNEL(384, 1) registers_of_groups(RT_PARAMS words of) {
    if (warp_index() >= 8)
        setmaxnreg_dec<24>();
    else
        setmaxnreg_inc<240>();
    st_global(of.out + thread_index(), thread_index());
}

// Thread blocks take turns by ticket; the result tells their order.
constexpr int TURNS = 50;
RT_KERNEL(32) semaphore(RT_PARAMS words of) {
    if (thread_index() != 0) return;
    const int ticket = atom_add(of.ticket, 1);
    wait_eq(of.turn, ticket);
    st_global(of.out, ld_global(of.out) % 1000 * 3 + ticket);
    st_release(of.turn, ticket + 1);
}

// ---- products ------------------------------------------------------------------------------------

RT_DEVICE shared_address in_row(int i) { // the factor of columns 16 i .. 16 i + 15
    return shared_base() + (shared_address)(i / 4 * BOX_BYTES + i % 4 * 32);
}
RT_DEVICE shared_address from_row(int i) { // rows 16 i .. 16 i + 15
    return shared_base() + (shared_address)(i * 16 * 128);
}
template <int N> RT_DEVICE void store_sums(float *out, const float (&sum)[N][4]) {
    for (int n = 0; n < N; n++)
        for (int i = 0; i < 4; i++) {
            const int row = 16 * warp_index() + lane_index() / 4 + i / 2 * 8,
                      col = 8 * n + lane_index() % 4 * 2 + i % 2;
            st_global(out + row * 8 * N + col, sum[n][i]);
        }
}

// Rows 0 .. 63 times rows FROM .. FROM + 8 N - 1: K-major.
template <class T, int N, int FROM> RT_KERNEL(128) product_of_rows(RT_PARAMS job<T> of) {
    copy_rows(of, 0);
    float sum[N][4];
    wgmma_fence();
    for (int i = 0; i < COLS / 16; i++)
        wgmma_mma_async_ss<T, major::K>(sum, make_smem_desc(in_row(i), 0), make_smem_desc(in_row(i) + FROM * 128, 0),
                                        i > 0);
    wgmma_commit_group();
    wgmma_wait_group<0>(sum);
    store_sums(of.out, sum);
}
// Columns 0 .. 63 times columns 64 .. 127: MN-major.
template <class T> RT_KERNEL(128) product_of_columns(RT_PARAMS job<T> of) {
    copy_rows(of, 0);
    float sum[8][4];
    wgmma_fence();
    for (int i = 0; i < 128 / 16; i++)
        wgmma_mma_async_ss<T, major::MN>(sum, make_smem_desc(from_row(i), 0),
                                         make_smem_desc(from_row(i) + BOX_BYTES, 0), i > 0);
    wgmma_commit_group();
    wgmma_wait_group<0>(sum);
    store_sums(of.out, sum);
}
// Rows 0 .. 63, in registers, times 8 N columns of rows 0 .. 127, added to 1. At N = 32, columns 0 .. 63 of those rows
// times 256 columns of rows 0 .. 63: 64 .. 127 and 192 .. 255 of them are rows 64 .. 127 of the same numbers.
template <class T, int N> RT_KERNEL(128) product_with_registers(RT_PARAMS job<T> of) {
    copy_rows(of, 0);
    float sum[N][4];
    for (int n = 0; n < N; n++)
        for (int i = 0; i < 4; i++) sum[n][i] = 1;
    uint32_t left[8][4];
    for (int i = 0; i < 32; i++) {
        const int row = 16 * warp_index() + lane_index() / 4 + i % 2 * 8,
                  col = i / 4 * 16 + lane_index() % 4 * 2 + i / 2 % 2 * 8;
        left[i / 4][i % 4] = cvt_rn_x2<T>((float)number_at(row, col), (float)number_at(row, col + 1));
    }
    warpgroup_fence_operand(sum);
    warpgroup_fence_operand(left);
    wgmma_fence();
    for (int i = 0; i < (N == 32 ? 4 : 8); i++)
        wgmma_mma_async_rs<T>(sum, left[i], make_smem_desc(from_row(i), N == 32 ? BOX_BYTES / 2 : BOX_BYTES));
    wgmma_commit_group();
    wgmma_wait_group<0>(sum);
    store_sums(of.out, sum);
}

// ---- host ----------------------------------------------------------------------------------------

static int num_failed;

// Launches, and compares out with expected(i). The name comes first, so that a kernel that hangs is named too.
template <class Params, class Number, class Expected>
static void check(const char *name, void (*kernel)(Params), int num_ctas, int num_threads, const Params &params,
                  const Number *out, int count, Expected expected) {
    printf("%s: ", name);
    fflush(stdout);
    const rt_status status = launch(kernel, num_ctas, num_threads, SHARED_BYTES, nullptr, params);
    const char *const error = error_of_launch();
    const bool ran = status == RT_OK && *error == 0;
    int i = 0;
    while (ran && i < count && out[i] == (Number)expected(i)) i++;
    if (!ran)
        printf("failed: %s\n", *error ? error : "the launch was refused");
    else if (i < count)
        printf("wrong at %d: got %g, expected %g\n", i, (double)out[i], (double)expected(i));
    else
        printf("ok\n");
    num_failed += !ran || i < count;
}

template <class T> static void check_products(const char *dtype) {
    T *const numbers = new_array<T>(ROWS * COLS);
    for (int i = 0; i < ROWS * COLS; i++) numbers[i].bits = bits_of_small(number_at(i / COLS, i % COLS), T{});
    job<T> of = {{}, new_array<float>(128 * COLS)};
    if (!make_tensor_map<T>(of.numbers, numbers, {COLS, ROWS, 1, 1}, {COLS * 2, COLS * 2, COLS * 2}, 128)) {
        printf("cuTensorMapEncodeTiled: refused\n");
        num_failed++;
        return;
    }
    char name[100];
    const auto named = [&](const char *instruction) {
        snprintf(name, sizeof(name), "%s, %s", instruction, dtype);
        return name;
    };
    const auto sum = [](int count, auto term) {
        int total = 0;
        for (int k = 0; k < count; k++) total += term(k);
        return total;
    };
    check(named("cp.async.bulk.tensor"), box_copy<T>, 1, 128, of, of.out, 128 * COLS, [](int i) {
        const int row = COPIED_FROM + i / COLS;
        return row < ROWS ? number_at(row, i % COLS) : 0;
    });
    storing store;
    uint16_t *const stored = new_array<uint16_t>(STORED_ROWS * STORED_COLS);
    const int64_t bytes = STORED_ROWS * STORED_COLS * 2;
    if (!make_tensor_map<T>(store.to, stored, {STORED_COLS, STORED_ROWS, 1, 1}, {STORED_COLS * 2, bytes, bytes}, 16)) {
        printf("cuTensorMapEncodeTiled of a store: refused\n");
        num_failed++;
        return;
    }
    check(named("cp.async.bulk.tensor, a store"), box_store<T>, 1, 32, store, stored, STORED_ROWS * STORED_COLS,
          [](int i) {
              const int row = i / STORED_COLS - STORED_ROW, col = i % STORED_COLS - STORED_COL;
              return row < 0 || col < 0 ? 0 : (int)bits_of_small(number_at(row, col), T{});
          });
    check(named("wgmma m64n64k16, K-major"), product_of_rows<T, 8, 64>, 1, 128, of, of.out, 64 * 64,
          [=](int i) { return sum(COLS, [=](int k) { return number_at(i / 64, k) * number_at(64 + i % 64, k); }); });
    check(named("wgmma m64n128k16, K-major"), product_of_rows<T, 16, 0>, 1, 128, of, of.out, 64 * 128,
          [=](int i) { return sum(COLS, [=](int k) { return number_at(i / 128, k) * number_at(i % 128, k); }); });
    check(named("wgmma m64n64k16, MN-major"), product_of_columns<T>, 1, 128, of, of.out, 64 * 64,
          [=](int i) { return sum(128, [=](int k) { return number_at(k, i / 64) * number_at(k, 64 + i % 64); }); });
    check(named("wgmma m64n64k16, registers"), product_with_registers<T, 8>, 1, 128, of, of.out, 64 * 64,
          [=](int i) { return 1 + sum(COLS, [=](int k) { return number_at(i / 64, k) * number_at(k, i % 64); }); });
    check(named("wgmma m64n128k16, registers"), product_with_registers<T, 16>, 1, 128, of, of.out, 64 * 128,
          [=](int i) { return 1 + sum(COLS, [=](int k) { return number_at(i / 128, k) * number_at(k, i % 128); }); });
    check(named("wgmma m64n256k16, registers"), product_with_registers<T, 32>, 1, 128, of, of.out, 64 * 256,
          [=](int i) {
              const int col = i % 256, below = col / 64 % 2 * 64, at = col / 128 * 64 + col % 64;
              return 1 + sum(64, [=](int k) { return number_at(i / 256, k) * number_at(below + k, at); });
          });
}

int main() {
    words of = {new_array<int>(384), new_array<int>(1), new_array<int>(1)};
    int turns = 0;
    for (int i = 0; i < TURNS; i++) turns = turns % 1000 * 3 + i;
    check("ld.acquire, st.release, atom", semaphore, TURNS, 32, of, of.out, 1, [=](int) { return turns; });
    check("bar.sync, bar.arrive", named_barriers, 1, 256, of, of.out, 256,
          [](int i) { return 2 * EXCHANGES - (i < 128); });
    check("mbarrier.arrive, mbarrier.try_wait", mbarrier_arrivals, 1, 64, of, of.out, 3 * 64,
          [](int i) { return i / 64 * 64 + 63 - i % 64; });
    check("setmaxnreg", registers_of_groups, 1, 384, of, of.out, 384, [](int i) { return i; });

    addition added;
    float *const sums = new_array<float>(SUM_ROWS * SUM_COLS);
    const int64_t bytes = SUM_ROWS * SUM_COLS * sizeof(float);
    if (!make_tensor_map<float>(added.sums, sums, {SUM_COLS, SUM_ROWS, 1, 1}, {SUM_COLS * sizeof(float), bytes, bytes},
                                64))
        return 1;
    check("cp.reduce.async.bulk.tensor", box_addition, 1, 64, added, sums, SUM_ROWS * SUM_COLS, [](int i) {
        const int row = i / SUM_COLS - ADDED_ROW, col = i % SUM_COLS - ADDED_COL;
        return row < 0 || col < 0 ? 0 : 2 * number_at(row, col);
    });
    check_products<bf16>("bf16");
    check_products<f16>("f16");
    printf("%d failed\n", num_failed);
    return num_failed > 0;
}
