// The emulator's half of cuda/device_sm90.cuh. On top of what emulator.h checks, these are Faults:
//   barriers in shared memory   one used before its init is visible; bytes that come unannounced, or not at all
//   barriers of a part          half a warp; those who come naming different sizes; one that stays incomplete
//   bulk copies                 a look at the bytes by somebody who has not waited for their phase, nor met one who has;
//                               one into what somebody may still read; one of bytes outside the arrays that were lent
//   bulk additions              bytes changed while they are added; to numbers of an earlier one without a wait between, or
//                               of another block out of turn; no wait, or none of the fences at a turn
//   products of a group         threads that call different ones, or none; no fence, no wait; sums written, a left factor or
//                               shared memory changed before the wait (sums read before it are NaN)
//   what a thread wrote         met by any of these three without its shared_write_fence, and a barrier behind that
//   registers                   groups that take more than there are
#ifndef RINGTILE_TESTS_EMULATOR_SM90_H
#define RINGTILE_TESTS_EMULATOR_SM90_H

struct tensor_map {
    const char *array;
    int64_t size[4], stride[3]; // bytes
    int box_rows, element_bytes;
};

namespace emulator {

void barrier_init(shared_address barrier, int arrivals);
void barrier_init_fence();
void barrier_arrive(shared_address barrier, int num_bytes);
void barrier_wait(shared_address barrier, int parity);
void part_barrier(int id, int num_threads, bool waits);
void copy_box(shared_address to, const tensor_map &map, shared_address barrier, const int64_t (&at)[4]);
void shared_write_fence();
void add_box(const tensor_map &map, shared_address from, const int64_t (&at)[4]);
void add_box_commit();
void add_box_wait(bool only_read);
void add_box_fence();

void change_registers(int count, bool more);

struct GroupProduct {
    float *sum;
    int num_cols;
    bool left_along_sum, right_along_sum; // how rows of a and b run
    uint64_t a, b;
    const uint32_t *left; // in place of a
    bool add;
    float (*widen)(uint16_t bits);
};
void multiply_async(const GroupProduct &product);
void products_fence();
void products_commit();
void products_wait(int pending);

template <class T> float widen_bits(uint16_t bits) {
    if constexpr (std::is_same_v<T, bf16>) return bits_to_float((uint32_t)bits << 16);
    return widen(f16{bits});
}

} // namespace emulator

// What the driver refuses is refused here.
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

inline void barrier_init(shared_address barrier, int arrivals) { emulator::barrier_init(barrier, arrivals); }
inline void barrier_init_fence() { emulator::barrier_init_fence(); }
inline void barrier_arrive(shared_address barrier) { emulator::barrier_arrive(barrier, 0); }
inline void barrier_arrive_expecting(shared_address barrier, int num_bytes) {
    emulator::barrier_arrive(barrier, num_bytes);
}
inline void barrier_wait(shared_address barrier, int parity) { emulator::barrier_wait(barrier, parity); }
inline void copy_box(shared_address to, const tensor_map &map, shared_address barrier, int col, int row,
                     int i, int j) {
    emulator::copy_box(to, map, barrier, {col, row, i, j});
}
inline void part_barrier(int id, int num_threads) { emulator::part_barrier(id, num_threads, true); }
inline void part_barrier_arrive(int id, int num_threads) { emulator::part_barrier(id, num_threads, false); }
inline void shared_write_fence() { emulator::shared_write_fence(); }
inline void add_box(const tensor_map &map, shared_address from, int col, int row, int i, int j) {
    emulator::add_box(map, from, {col, row, i, j});
}
inline void add_box_commit() { emulator::add_box_commit(); }
inline void add_box_wait_read() { emulator::add_box_wait(true); }
inline void add_box_wait() { emulator::add_box_wait(false); }
inline void add_box_fence() { emulator::add_box_fence(); }

template <int count> void give_registers() {
    static_assert(count % 8 == 0 && count >= 24 && count <= 256);
    emulator::change_registers(count, false);
}
template <int count> void take_registers() {
    static_assert(count % 8 == 0 && count >= 24 && count <= 256);
    emulator::change_registers(count, true);
}

template <class Register, int N> void pin(Register (&)[N][4]) {}
inline void products_fence() { emulator::products_fence(); }
inline void products_commit() { emulator::products_commit(); }
template <int pending, int N> void products_wait(float (&)[N][4]) { emulator::products_wait(pending); }

template <class T, int N> void multiply_rows_async(float (&sum)[N][4], uint64_t a, uint64_t b, bool add) {
    emulator::multiply_async({sum[0], 8 * N, false, false, a, b, nullptr, add, emulator::widen_bits<T>});
}
template <class T> void multiply_columns_async(float (&sum)[8][4], uint64_t a, uint64_t b, bool add) {
    emulator::multiply_async({sum[0], 64, true, true, a, b, nullptr, add, emulator::widen_bits<T>});
}
template <class T, int N> void multiply_async(float (&sum)[N][4], const uint32_t (&a)[4], uint64_t b) {
    emulator::multiply_async({sum[0], 8 * N, false, true, 0, b, a, true, emulator::widen_bits<T>});
}

#endif // RINGTILE_TESTS_EMULATOR_SM90_H
