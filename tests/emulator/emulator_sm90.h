// The emulator's half of cuda/device/ptx_sm90.cuh. In addition to the checks of emulator.h these are Faults:
//   mbarriers          use before the init is visible; bytes that arrive unannounced, or never; an arrival too many; a
//                      wait that two phases overtook
//   named barriers     half a warp; warps that name different sizes; one that stays incomplete
//   bulk copies        a read of the bytes by a thread that has neither waited for their phase nor synchronized with
//                      one that has; a copy over bytes that may still be read; a copy from outside the lent arrays; one
//                      that no thread waits for. The bytes land at a random later time; until then they are NaNs
//   bulk additions     a write to the source while it is added; an addition to what an earlier one adds to without a
//                      wait between, or to what another CTA adds to without a semaphore; a missing wait, or a missing
//                      fence beside the semaphore
//   bulk stores        the same; they may end with the kernel, but not before they have read their source
//   wgmma              threads of a group that start different products, or none; a missing fence or wait; a write to
//                      the accumulator, the left factor or shared memory before the wait (the accumulator reads as NaN)
//   the async proxy    a thread's write that any of these meets without that thread's fence_proxy_async_shared and a
//                      barrier behind it
//   setmaxnreg         groups that take more registers than there are
#ifndef RINGTILE_TESTS_EMULATOR_SM90_H
#define RINGTILE_TESTS_EMULATOR_SM90_H

struct alignas(128) tensor_map { // as large as CUDA's, which counts among a kernel's parameters
    const char *array;
    int64_t size[4], stride[3]; // stride in bytes
    int box_rows, element_bytes;
};

namespace emulator {

void mbarrier_init(shared_address mbarrier, int arrivals);
void fence_mbarrier_init();
void mbarrier_arrive(shared_address mbarrier, int num_bytes);
void mbarrier_wait_parity(shared_address mbarrier, int parity);
void named_barrier(int id, int num_threads, bool waits);
void cp_async_bulk_tensor(shared_address to, const tensor_map &map, shared_address mbarrier, const int64_t (&at)[4]);
void fence_proxy_async_shared();
void cp_async_bulk_tensor(const tensor_map &map, shared_address from, const int64_t (&at)[4]);
void cp_reduce_async_bulk_tensor(const tensor_map &map, shared_address from, const int64_t (&at)[4]);
void cp_async_bulk_commit_group();
void cp_async_bulk_wait_group(bool only_read);
void fence_proxy_async_global();

void setmaxnreg(int count, bool more);

struct GroupProduct {
    float *sum;
    int num_cols;
    major left_major, right_major;
    uint64_t a, b;
    const uint32_t *left; // replaces a
    bool add;
    float (*widen)(uint16_t bits);
};
void wgmma_mma_async(const GroupProduct &product);
void wgmma_fence();
void wgmma_commit_group();
void wgmma_wait_group(int pending);

template <class T> float widen_bits(uint16_t bits) {
    if constexpr (std::is_same_v<T, bf16>) return uint_as_float((uint32_t)bits << 16);
    return widen(f16{bits});
}

} // namespace emulator

// Refuses what the driver refuses. A row of a box has 128 bytes, as many as the swizzle spans.
template <class T>
bool make_tensor_map(tensor_map &map, const void *array, const int64_t (&size)[4], const int64_t (&stride)[3],
                     int box_rows) {
    map = {static_cast<const char *>(array), {}, {}, box_rows, sizeof(T)};
    bool ok = (uintptr_t)array % 16 == 0 && box_rows >= 1 && box_rows <= 256;
    for (int i = 0; i < 4; i++) ok &= (map.size[i] = size[i]) >= 1 && size[i] <= (int64_t)1 << 32;
    for (int i = 0; i < 3; i++)
        ok &= (map.stride[i] = stride[i]) > 0 && stride[i] % 16 == 0 && stride[i] < (int64_t)1 << 40;
    return ok;
}

inline void mbarrier_init(shared_address mbarrier, int arrivals) { emulator::mbarrier_init(mbarrier, arrivals); }
inline void fence_mbarrier_init() { emulator::fence_mbarrier_init(); }
inline void mbarrier_arrive(shared_address mbarrier) { emulator::mbarrier_arrive(mbarrier, 0); }
inline void mbarrier_arrive_expect_tx(shared_address mbarrier, int num_bytes) {
    emulator::mbarrier_arrive(mbarrier, num_bytes);
}
// try_wait may suspend the thread for as long as it likes: here until the phase is complete.
inline bool mbarrier_try_wait_parity(shared_address mbarrier, int parity) {
    emulator::mbarrier_wait_parity(mbarrier, parity);
    return true;
}
inline void prefetch_tensormap(const tensor_map &) {}
inline void cp_async_bulk_tensor_4d(shared_address to, const tensor_map &map, shared_address mbarrier, int col, int row,
                                    int i, int j) {
    emulator::cp_async_bulk_tensor(to, map, mbarrier, {col, row, i, j});
}
inline void named_barrier_sync(int id, int num_threads) { emulator::named_barrier(id, num_threads, true); }
inline void named_barrier_arrive(int id, int num_threads) { emulator::named_barrier(id, num_threads, false); }
inline void fence_proxy_async_shared() { emulator::fence_proxy_async_shared(); }
inline void cp_async_bulk_tensor_4d(const tensor_map &map, shared_address from, int col, int row, int i, int j) {
    emulator::cp_async_bulk_tensor(map, from, {col, row, i, j});
}
inline void cp_reduce_async_bulk_tensor_4d(const tensor_map &map, shared_address from, int col, int row, int i, int j) {
    emulator::cp_reduce_async_bulk_tensor(map, from, {col, row, i, j});
}
inline void cp_async_bulk_commit_group() { emulator::cp_async_bulk_commit_group(); }
template <int pending> void cp_async_bulk_wait_group_read() {
    static_assert(pending == 0);
    emulator::cp_async_bulk_wait_group(true);
}
template <int pending> void cp_async_bulk_wait_group() {
    static_assert(pending == 0);
    emulator::cp_async_bulk_wait_group(false);
}
inline void fence_proxy_async_global() { emulator::fence_proxy_async_global(); }

template <int count> void setmaxnreg_dec() {
    static_assert(count % 8 == 0 && count >= 24 && count <= 256);
    emulator::setmaxnreg(count, false);
}
template <int count> void setmaxnreg_inc() {
    static_assert(count % 8 == 0 && count >= 24 && count <= 256);
    emulator::setmaxnreg(count, true);
}

template <class Register, int N> void warpgroup_fence_operand(Register (&)[N][4]) {}
inline void wgmma_fence() { emulator::wgmma_fence(); }
inline void wgmma_commit_group() { emulator::wgmma_commit_group(); }
template <int pending, int N> void wgmma_wait_group(float (&)[N][4]) { emulator::wgmma_wait_group(pending); }

template <class T, major M, int N> void wgmma_mma_async_ss(float (&d)[N][4], uint64_t a, uint64_t b, bool add) {
    static_assert(M == major::K || N == 8);
    emulator::wgmma_mma_async({d[0], 8 * N, M, M, a, b, nullptr, add, emulator::widen_bits<T>});
}
template <class T, int N> void wgmma_mma_async_rs(float (&d)[N][4], const uint32_t (&a)[4], uint64_t b) {
    emulator::wgmma_mma_async({d[0], 8 * N, major::K, major::MN, 0, b, a, true, emulator::widen_bits<T>});
}

#endif // RINGTILE_TESTS_EMULATOR_SM90_H
