// Runs the CUDA kernels on the host, one block after the other, or some side by side: cuda/device.cuh includes this where
// nvcc does not compile. The threads of a block are fibers of one host thread that give way only where a kernel waits. What
// a GPU would do silently is a Fault here, with the block and thread at fault:
//   global memory    an access outside the arrays that were lent, misaligned, or to what another block writes, unless it
//                    was written before a store_release that a wait_until has seen, and both reach these threads
//   turns            a wait_until that no running block ends
//   shared memory    an access outside the block's bytes, misaligned, to what nobody wrote, or in a race: two threads at
//                    the same bytes, one of them writing, and no barrier between them
//   async copies     a look at the bytes before the wait and the barrier; a copy that nobody waits for
//   warp functions   lanes that call different ones, or none;  barriers: threads that do not come
// The host's arithmetic stands for the GPU's: functions are at least as exact as the instruction, and a product of
// fragments is summed in f64 and rounded once. Timing and the order of instructions are not modelled.
#ifndef RINGTILE_TESTS_EMULATOR_H
#define RINGTILE_TESTS_EMULATOR_H

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <string>

#define RT_DEVICE inline
#define RT_HOST_DEVICE inline
#define RT_KERNEL(...) void
#define RT_PARAMS const

using std::isfinite;
using std::isinf;
using std::isnan;

namespace emulator {

// ---- for tests ---------------------------------------------------------------------------------

struct Fault {
    std::string message;
};

// Kernels may read, and write if `writable`, the bytes [begin, begin + num_bytes), which are watched in units of cell_bytes.
void lend(const void *begin, int64_t num_bytes, bool writable, int cell_bytes = 2);
void take_back_all();

// From now on so many blocks of a launch run side by side. In which order they start, and which goes on after a barrier, is
// drawn from the seed. At first it is one, in the order of the grid.
void run_side_by_side(int num_blocks, uint32_t seed);

// What compute_capability() says, 80 at first: the architectures differ in which kernels are chosen.
void set_compute_capability(int capability);

// Throws the first Fault.
void run(const std::function<void()> &kernel, grid_size grid, int num_threads, int shared_bytes);

// Calls of load_matrices since the start, and 16-byte rows in them that had to wait for another one's memory banks.
struct Statistics {
    int64_t matrix_loads, bank_conflicts;
};
Statistics statistics();

// ---- for device.cuh ----------------------------------------------------------------------------

enum class Access { READ, WRITE };

int compute_capability();
int thread_index();
int num_threads();
int block_index(int dim);
int num_blocks(int dim);
void block_barrier();

void check_global(Access access, const void *address, int64_t num_bytes);
int take_ticket(int *counter);
void wait_until(const int *word, int value);
void store_release(int *word, int value);
void *check_shared(Access access, shared_address address, int num_bytes); // where the bytes are
void async_copy(shared_address to, const void *from, int num_bytes);
void async_commit();
void async_wait(int pending);
void count_matrix_load(const shared_address (&rows)[32]);

// Meets the other lanes of the warp; the last one to come calls act with what every lane brought.
using Lanes = void *[32];
void meet(const char *name, void *mine, void (*act)(Lanes &lanes));
void join_clocks_of_warp();

template <class T> struct Exchange {
    T mine, result;
    int other;
};

template <class T, class Combine> T exchange(const char *name, T x, int other, Combine) {
    Exchange<T> e{x, x, other};
    meet(name, &e, [](Lanes &lanes) {
        for (auto lane : lanes) {
            auto &to = *static_cast<Exchange<T> *>(lane);
            to.result = Combine()(to, lanes);
        }
    });
    return e.result;
}

template <class T> const T &of_lane(const Lanes &lanes, int lane) {
    return static_cast<const Exchange<T> *>(lanes[lane])->mine;
}

} // namespace emulator

// ---- what device.cuh has under nvcc ------------------------------------------------------------

extern "C" void emulator_report(const char *message);

inline int compute_capability() { return emulator::compute_capability(); }

template <class Params>
rt_status launch(void (*kernel)(Params), grid_size grid, int num_threads, int shared_bytes, void *,
                 const Params &params) {
    try {
        emulator::run([&] { kernel(params); }, grid, num_threads, shared_bytes);
    } catch (const emulator::Fault &fault) {
        emulator_report(fault.message.c_str());
        return RT_CUDA;
    }
    return RT_OK;
}

inline int thread_index() { return emulator::thread_index(); }
inline int num_threads() { return emulator::num_threads(); }
inline int block_index() { return emulator::block_index(0); }
inline int block_index_y() { return emulator::block_index(1); }
inline int block_index_z() { return emulator::block_index(2); }
inline int num_blocks() { return emulator::num_blocks(0); }

inline void block_barrier() { emulator::block_barrier(); }
inline void warp_barrier() {
    emulator::meet("warp_barrier", nullptr, [](emulator::Lanes &) { emulator::join_clocks_of_warp(); });
}

template <class T> T shuffle(T x, int from) {
    return emulator::exchange("shuffle", x, from,
                              [](const emulator::Exchange<T> &to, const emulator::Lanes &lanes) {
                                  return emulator::of_lane<T>(lanes, to.other & 31);
                              });
}
template <class T> T shuffle_xor(T x, int mask) { return shuffle(x, (emulator::thread_index() % 32) ^ mask); }
inline int min_of_lanes(int x) {
    return emulator::exchange("min_of_lanes", x, 0,
                              [](const emulator::Exchange<int> &to, const emulator::Lanes &lanes) {
                                  int least = to.mine;
                                  for (int i = 0; i < 32; i++)
                                      least = std::min(least, emulator::of_lane<int>(lanes, i));
                                  return least;
                              });
}
inline int max_of_lanes(int x) { return ~min_of_lanes(~x); }
inline bool any_lane(bool condition) { return max_of_lanes(condition) == 1; }
inline bool all_lanes(bool condition) { return min_of_lanes(condition) == 1; }

inline shared_address shared_base() { return 0; }

template <class T> T shared_load(shared_address from) {
    T value;
    memcpy(&value, emulator::check_shared(emulator::Access::READ, from, sizeof(T)), sizeof(T));
    return value;
}
template <class T> void shared_store(shared_address to, const T &value) {
    memcpy(emulator::check_shared(emulator::Access::WRITE, to, sizeof(T)), &value, sizeof(T));
}
template <class T> T global_load(const T *from) {
    emulator::check_global(emulator::Access::READ, from, sizeof(T));
    return *from;
}
template <class T> void global_store(T *to, const T &value) {
    emulator::check_global(emulator::Access::WRITE, to, sizeof(T));
    *to = value;
}

inline int take_ticket(int *counter) { return emulator::take_ticket(counter); }
inline void wait_until(const int *word, int value) { emulator::wait_until(word, value); }
inline void store_release(int *word, int value) { emulator::store_release(word, value); }

inline void async_copy(shared_address to, const void *from, int num_bytes) {
    emulator::async_copy(to, from, num_bytes);
}
inline void async_commit() { emulator::async_commit(); }
template <int pending> void async_wait() { emulator::async_wait(pending); }

namespace emulator {

struct MatrixLoad {
    shared_address address;
    uint16_t row[8]; // at the address
    uint16_t element[4][2];
};

template <bool transposed> void load_matrices(uint32_t (&word)[4], shared_address row) {
    MatrixLoad mine = {.address = row, .row = {}, .element = {}};
    memcpy(mine.row, check_shared(Access::READ, row, 16), 16);
    meet(transposed ? "load_matrices_transposed" : "load_matrices", &mine, [](Lanes &lanes) {
        const auto lane_at = [&](int i) -> MatrixLoad & { return *static_cast<MatrixLoad *>(lanes[i]); };
        shared_address rows[32];
        for (int i = 0; i < 32; i++) rows[i] = lane_at(i).address;
        count_matrix_load(rows);
        for (int lane = 0; lane < 32; lane++)
            for (int matrix = 0; matrix < 4; matrix++)
                for (int i = 0; i < 2; i++) {
                    const int row = transposed ? 2 * (lane % 4) + i : lane / 4;
                    const int col = transposed ? lane / 4 : 2 * (lane % 4) + i;
                    lane_at(lane).element[matrix][i] = lane_at(8 * matrix + row).row[col];
                }
    });
    memcpy(word, mine.element, 16);
}

struct Product {
    float *sum;
    uint32_t a[4], b[2];
};

} // namespace emulator

inline void load_matrices(uint32_t (&word)[4], shared_address row) {
    emulator::load_matrices<false>(word, row);
}
inline void load_matrices_transposed(uint32_t (&word)[4], shared_address row) {
    emulator::load_matrices<true>(word, row);
}

inline float exp2_approx(float x) {
    const float y = std::exp2(x);
    return y < std::numeric_limits<float>::min() ? 0 : y;
}
inline float reciprocal_approx(float x) { return 1 / x; }

inline float bits_to_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
inline float widen(f16 x) {
    _Float16 half;
    memcpy(&half, &x.bits, 2);
    return (float)half;
}
inline uint16_t bits_of(float x, bf16) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return (uint16_t)((std::isnan(x) ? bits | 1u << 22 : bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline uint16_t bits_of(float x, f16) {
    const _Float16 half = (_Float16)x;
    uint16_t bits;
    memcpy(&bits, &half, 2);
    return bits;
}
template <class T> uint32_t pack(float low, float high) {
    return bits_of(low, T{}) | (uint32_t)bits_of(high, T{}) << 16;
}

template <class T> void multiply_add(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    emulator::Product mine = {sum, {a[0], a[1], a[2], a[3]}, {b0, b1}};
    emulator::meet("multiply_add", &mine, [](emulator::Lanes &lanes) {
        const auto lane_at = [&](int i) -> emulator::Product & {
            return *static_cast<emulator::Product *>(lanes[i]);
        };
        const auto half_of = [](uint32_t word, int i) {
            const uint32_t bits = i == 0 ? word & 0xffff : word >> 16;
            if constexpr (std::is_same_v<T, bf16>) return bits_to_float(bits << 16);
            return widen(f16{(uint16_t)bits});
        };
        float left[16][16], right[16][8];
        for (int lane = 0; lane < 32; lane++)
            for (int i = 0; i < 2; i++) {
                const int g = lane / 4, t = 2 * (lane % 4) + i;
                for (int word = 0; word < 4; word++)
                    left[g + word % 2 * 8][t + word / 2 * 8] = half_of(lane_at(lane).a[word], i);
                for (int word = 0; word < 2; word++)
                    right[t + word * 8][g] = half_of(lane_at(lane).b[word], i);
            }
        for (int lane = 0; lane < 32; lane++)
            for (int i = 0; i < 4; i++) {
                const int row = lane / 4 + i / 2 * 8, col = 2 * (lane % 4) + i % 2;
                double total = lane_at(lane).sum[i];
                for (int k = 0; k < 16; k++) total += (double)left[row][k] * right[k][col];
                lane_at(lane).sum[i] = (float)total;
            }
    });
}

#endif // RINGTILE_TESTS_EMULATOR_H
