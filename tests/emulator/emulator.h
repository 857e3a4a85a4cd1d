// Runs the CUDA kernels on the host, one thread block (CTA) after the other or several concurrently:
// cuda/device/ptx.cuh includes this where nvcc does not compile. The threads of a CTA are fibers of one host thread
// that yield only where a kernel waits; warps run in a random order, and for a while some of them only when no other
// can. Errors that a GPU would commit silently are Faults here, with the CTA and
// thread at fault:
//   global memory    an access that is misaligned, outside the lent arrays, or to what another CTA writes, unless an
//                    st_release followed that write, a wait_eq saw the release, and both reach the two threads
//   semaphores       a wait_eq that no running CTA ends
//   shared memory    an access that is misaligned, outside the CTA's bytes, to bytes never written, or in a race: two
//                    threads touch the same bytes, one of them writes, and no barrier lies between
//   cp.async         a read of the bytes before the wait and the barrier; a copy without a wait
//   warp functions   lanes that call different ones, or none
//   barriers         threads that never arrive
//   launches         more threads, shared memory or bytes of parameters than the device has
// Host arithmetic stands in for the GPU's: functions are at least as exact as the instruction, and a product of
// fragments is summed in f64 and rounded once. Timing is not modelled, nor the order of instructions within a warp.
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

// Kernels may read, and write if `writable`, the bytes [begin, begin + num_bytes). Accesses are tracked in units of
// cell_bytes.
void lend(const void *begin, int64_t num_bytes, bool writable, int cell_bytes = 2);
void take_back_all();

// RINGTILE_EMULATOR_SEED, 1 if it is not set. It decides in which order warps run.
uint32_t base_seed();

// From now on num_ctas CTAs of a launch run concurrently; the seed, with base_seed(), decides in which order they start
// and which warp of which CTA continues. Until the first call CTAs run one at a time, in grid order.
void run_concurrently(int num_ctas, uint32_t seed);

// Sets what compute_capability() returns, and with it which kernels are chosen; 80 until the first call.
void set_compute_capability(int capability);
// And num_multiprocessors(); 132 until the first call.
void set_num_multiprocessors(int number);

// Throws the first Fault. name: of the kernel, for bank conflicts.
void run(const std::function<void()> &kernel, grid_size grid, int num_threads, int shared_bytes,
         size_t params_bytes = 0, const std::string &name = "a test");

int64_t ctas_started(); // since the start

// Since the start: the wavefronts beyond the fewest possible that shared memory took to serve the kernels whose names
// begin so; a name begins with the file of the launch. ldmatrix is always counted; loads and stores while count_banks
// is on, or throughout with RINGTILE_EMULATOR_BANKS=1, which also prints the wavefronts of each kernel at the end.
int64_t bank_conflicts(const std::string &prefix);
void count_banks(bool on);

// ---- for ptx.cuh -------------------------------------------------------------------------------

enum class Access { READ, WRITE };

int compute_capability();
int num_multiprocessors();
int thread_index();
int num_threads();
int cta_index(int dim);
int num_ctas(int dim);
void syncthreads();

void check_global(Access access, const void *address, int64_t num_bytes);
int atom_add(int *counter, int x);
void wait_eq(const int *word, int value);
void st_release(int *word, int value);
void *check_shared(Access access, shared_address address, int num_bytes);  // returns the bytes' place
void *access_shared(Access access, shared_address address, int num_bytes); // the same for a load or a store
void cp_async(shared_address to, const void *from, int num_bytes);
void cp_async_commit_group();
void cp_async_wait_group(int pending);
void count_ldmatrix(const shared_address (&rows)[32]);

// Waits for the other lanes of the warp; the last to arrive calls act with every lane's `mine`.
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

// ---- the functions ptx.cuh has under nvcc ------------------------------------------------------

extern "C" void emulator_report(const char *message);

inline int compute_capability() { return emulator::compute_capability(); }
inline int num_multiprocessors() { return emulator::num_multiprocessors(); }

template <class Params>
rt_status launch(void (*kernel)(Params), grid_size grid, int num_threads, int shared_bytes, void *,
                 const Params &params, const char *file = __builtin_FILE(), int line = __builtin_LINE()) {
    if (is_empty(grid)) return RT_OK;
    if (!fits_cuda(grid)) return RT_BAD_SHAPE;
    try {
        const std::string name = std::string(strrchr(file, '/') + 1) + ":" + std::to_string(line) + ", " +
                                 std::to_string(num_threads) + " threads, " + std::to_string(shared_bytes) + " bytes";
        emulator::run([&] { kernel(params); }, grid, num_threads, shared_bytes, sizeof(Params), name);
    } catch (const emulator::Fault &fault) {
        emulator_report(fault.message.c_str());
        set_last_error(fault.message.c_str());
        return RT_CUDA;
    }
    return RT_OK;
}

inline int thread_index() { return emulator::thread_index(); }
inline int num_threads() { return emulator::num_threads(); }
inline int cta_index_x() { return emulator::cta_index(0); }
inline int cta_index_y() { return emulator::cta_index(1); }
inline int cta_index_z() { return emulator::cta_index(2); }
inline int num_ctas_x() { return emulator::num_ctas(0); }
inline int num_ctas_y() { return emulator::num_ctas(1); }

inline void syncthreads() { emulator::syncthreads(); }
inline void syncwarp() {
    emulator::meet("syncwarp", nullptr, [](emulator::Lanes &) { emulator::join_clocks_of_warp(); });
}

template <class T> T shfl_sync(T x, int from) {
    return emulator::exchange("shfl_sync", x, from, [](const emulator::Exchange<T> &to, const emulator::Lanes &lanes) {
        return emulator::of_lane<T>(lanes, to.other & 31);
    });
}
template <class T> T shfl_xor_sync(T x, int mask) { return shfl_sync(x, (emulator::thread_index() % 32) ^ mask); }
inline int reduce_min_sync(int x) {
    return emulator::exchange("reduce_min_sync", x, 0,
                              [](const emulator::Exchange<int> &to, const emulator::Lanes &lanes) {
                                  int least = to.mine;
                                  for (int i = 0; i < 32; i++)
                                      least = std::min(least, emulator::of_lane<int>(lanes, i));
                                  return least;
                              });
}
inline int reduce_max_sync(int x) { return ~reduce_min_sync(~x); }
inline bool any_sync(bool condition) { return reduce_max_sync(condition) == 1; }
inline bool all_sync(bool condition) { return reduce_min_sync(condition) == 1; }

inline shared_address shared_base() { return 0; }

template <class T> T ld_shared(shared_address from) {
    T value;
    memcpy(&value, emulator::access_shared(emulator::Access::READ, from, sizeof(T)), sizeof(T));
    return value;
}
template <class T> void st_shared(shared_address to, const T &value) {
    memcpy(emulator::access_shared(emulator::Access::WRITE, to, sizeof(T)), &value, sizeof(T));
}
template <class T> T ld_global(const T *from) {
    emulator::check_global(emulator::Access::READ, from, sizeof(T));
    return *from;
}
template <class T> void st_global(T *to, const T &value) {
    emulator::check_global(emulator::Access::WRITE, to, sizeof(T));
    *to = value;
}

inline int atom_add(int *counter, int x) { return emulator::atom_add(counter, x); }
inline void wait_eq(const int *word, int value) { emulator::wait_eq(word, value); }
inline void st_release(int *word, int value) { emulator::st_release(word, value); }

inline void cp_async(shared_address to, const void *from, int num_bytes) { emulator::cp_async(to, from, num_bytes); }
inline void cp_async_commit_group() { emulator::cp_async_commit_group(); }
template <int pending> void cp_async_wait_group() { emulator::cp_async_wait_group(pending); }

namespace emulator {

struct MatrixLoad {
    shared_address address;
    uint16_t row[8]; // at the address
    uint16_t element[4][2];
};

template <bool transposed> void ldmatrix(uint32_t (&word)[4], shared_address row) {
    MatrixLoad mine = {.address = row, .row = {}, .element = {}};
    memcpy(mine.row, check_shared(Access::READ, row, 16), 16);
    meet(transposed ? "ldmatrix_x4_trans" : "ldmatrix_x4", &mine, [](Lanes &lanes) {
        const auto lane_at = [&](int i) -> MatrixLoad & { return *static_cast<MatrixLoad *>(lanes[i]); };
        shared_address rows[32];
        for (int i = 0; i < 32; i++) rows[i] = lane_at(i).address;
        count_ldmatrix(rows);
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

inline void ldmatrix_x4(uint32_t (&word)[4], shared_address row) { emulator::ldmatrix<false>(word, row); }
inline void ldmatrix_x4_trans(uint32_t (&word)[4], shared_address row) { emulator::ldmatrix<true>(word, row); }

inline float ex2_approx_ftz(float x) {
    const float y = std::exp2(x);
    return y < std::numeric_limits<float>::min() ? 0 : y;
}
inline float rcp_approx_ftz(float x) { return 1 / x; }

inline float uint_as_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
inline float widen(f16 x) { // by hand: a call of the compiler's own for each number takes a tenth of the time
    const uint32_t shifted = (uint32_t)(x.bits & 0x7fff) << 13; // exponents differ by 127 - 15
    const bool is_finite = shifted < 0x7c00u << 13;
    const float size = is_finite ? uint_as_float(shifted) * 0x1p112f : uint_as_float(shifted | 0x7f800000);
    return x.bits & 0x8000 ? -size : size;
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
template <class T> uint32_t cvt_rn_x2(float low, float high) {
    return bits_of(low, T{}) | (uint32_t)bits_of(high, T{}) << 16;
}

template <class T> void mma_m16n8k16(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    emulator::Product mine = {sum, {a[0], a[1], a[2], a[3]}, {b0, b1}};
    emulator::meet("mma_m16n8k16", &mine, [](emulator::Lanes &lanes) {
        const auto lane_at = [&](int i) -> emulator::Product & { return *static_cast<emulator::Product *>(lanes[i]); };
        const auto half_of = [](uint32_t word, int i) {
            const uint32_t bits = i == 0 ? word & 0xffff : word >> 16;
            if constexpr (std::is_same_v<T, bf16>) return uint_as_float(bits << 16);
            return widen(f16{(uint16_t)bits});
        };
        float left[16][16], right[16][8];
        for (int lane = 0; lane < 32; lane++)
            for (int i = 0; i < 2; i++) {
                const int g = lane / 4, t = 2 * (lane % 4) + i;
                for (int word = 0; word < 4; word++)
                    left[g + word % 2 * 8][t + word / 2 * 8] = half_of(lane_at(lane).a[word], i);
                for (int word = 0; word < 2; word++) right[t + word * 8][g] = half_of(lane_at(lane).b[word], i);
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
