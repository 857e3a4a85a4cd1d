// Every instruction a kernel uses, behind a function that carries the name PTX, CUDA or CUTLASS gives it. Under
// nvcc the function is the instruction; under a host compiler it is the model in tests/emulator, which also checks
// how it is used. Kernels use nothing else of the machine: no threadIdx, no __shared__, no pointer to shared
// memory.
//
// A kernel has one dynamic array of shared memory, addressed in bytes from shared_base(). Thread blocks (CTAs, as
// PTX calls them) are one-dimensional and consist of whole warps. All 32 lanes of a warp call a warp-level function
// together.
//
// "PTX" below is the section of the PTX ISA manual, https://docs.nvidia.com/cuda/parallel-thread-execution/.
#ifndef RINGTILE_CUDA_PTX_CUH
#define RINGTILE_CUDA_PTX_CUH

#include "../../csrc/arrays.h"
#include "../../csrc/ringtile.h"

#include <stdint.h>
#include <string.h>

// 16-bit floating-point numbers as they lie in memory.
struct bf16 {
    uint16_t bits;
};
struct f16 {
    uint16_t bits;
};

using shared_address = uint32_t; // in bytes

struct alignas(16) chunk { // the unit of a copy
    uint32_t word[4];
};

// Thread blocks to launch; a single number is x.
struct grid_size {
    int64_t x, y, z;
    grid_size(int64_t x, int64_t y = 1, int64_t z = 1) : x(x), y(y), z(z) {}
};

inline bool is_empty(grid_size grid) { return grid.x == 0 || grid.y == 0 || grid.z == 0; }
inline bool fits_cuda(grid_size grid) { return grid.x <= INT32_MAX && grid.y <= UINT16_MAX && grid.z <= UINT16_MAX; }

constexpr size_t MAX_PARAMS_BYTES = 4096; // of a kernel: every driver accepts them

// Sets the text of rt_cuda_last_error(); whoever then returns RT_CUDA has called it.
void set_last_error(const char *text);

#ifndef __CUDACC__

#include "emulator.h"

#else

#define RT_DEVICE __device__ __forceinline__
#define RT_HOST_DEVICE __host__ __device__ inline
// (most threads of a thread block, fewest thread blocks on a multiprocessor): the two bound the registers.
#define RT_KERNEL(...) __global__ void __launch_bounds__(__VA_ARGS__)
#define RT_PARAMS const __grid_constant__ // a kernel's one argument, which stays in constant memory

#include <cuda_runtime.h>

// ---- host --------------------------------------------------------------------------------------

// Of the current device, as 10 major + minor: 90 is sm_90. 0 if the CUDA runtime refuses.
inline int compute_capability() {
    int device, major, minor;
    const bool known = cudaGetDevice(&device) == cudaSuccess &&
                       cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
                       cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess;
    return known ? 10 * major + minor : 0;
}

// Of the current device; 1 if the CUDA runtime refuses.
inline int num_multiprocessors() {
    int device, number;
    const bool known = cudaGetDevice(&device) == cudaSuccess &&
                       cudaDeviceGetAttribute(&number, cudaDevAttrMultiProcessorCount, device) == cudaSuccess;
    return known ? number : 1;
}

// A kernel that did not start: the launch, and the line of the source that made it.
struct failed_launch {
    int error; // a cudaError_t
    const void *kernel;
    const char *file;
    int line;
    grid_size grid;
    int num_threads, shared_bytes;
};
// Sets the text of rt_cuda_last_error(), and clears the CUDA runtime's last error. Returns RT_CUDA.
rt_status launch_failed(const failed_launch &failed);

// Launches a kernel on a stream (a cudaStream_t) of the current device, without waiting for it. An error that is
// pending in the CUDA runtime from an earlier call is not taken for this launch's.
//   RT_BAD_SHAPE   the grid exceeds x < 2^31, y and z < 2^16
//   RT_CUDA        the CUDA runtime refused
template <class Params>
rt_status launch(void (*kernel)(Params), grid_size grid, int num_threads, int shared_bytes, void *stream,
                 const Params &params, const char *file = __builtin_FILE(), int line = __builtin_LINE()) {
    static_assert(sizeof(Params) <= MAX_PARAMS_BYTES);
    if (is_empty(grid)) return RT_OK;
    if (!fits_cuda(grid)) return rt_wrong(RT_BAD_SHAPE, "the grid");
    const void *const function = reinterpret_cast<const void *>(kernel);
    void *arguments[] = {const_cast<Params *>(&params)};
    cudaError_t error = cudaSuccess;
    if (shared_bytes > 48 * 1024)
        error = cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    if (error == cudaSuccess)
        error = cudaLaunchKernel(function, dim3((unsigned)grid.x, (unsigned)grid.y, (unsigned)grid.z),
                                 dim3((unsigned)num_threads), arguments, (size_t)shared_bytes,
                                 static_cast<cudaStream_t>(stream));
    if (error == cudaSuccess) return RT_OK;
    return launch_failed({error, function, file, line, grid, num_threads, shared_bytes});
}

// ---- special registers -------------------------------------------------------------------------

// Volatile, so that what derives from an index is recomputed where it is used and does not occupy registers throughout.
// PTX %tid: https://docs.nvidia.com/cuda/parallel-thread-execution/#special-registers-tid
RT_DEVICE int thread_index() {
    int x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    __builtin_assume(x >= 0);
    return x;
}
// PTX %ctaid: https://docs.nvidia.com/cuda/parallel-thread-execution/#special-registers-ctaid
RT_DEVICE int cta_index_x() {
    int x;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(x));
    __builtin_assume(x >= 0);
    return x;
}
RT_DEVICE int cta_index_y() {
    int y;
    asm volatile("mov.u32 %0, %%ctaid.y;" : "=r"(y));
    __builtin_assume(y >= 0);
    return y;
}
RT_DEVICE int cta_index_z() {
    int z;
    asm volatile("mov.u32 %0, %%ctaid.z;" : "=r"(z));
    __builtin_assume(z >= 0);
    return z;
}
// PTX %ntid: https://docs.nvidia.com/cuda/parallel-thread-execution/#special-registers-ntid
RT_DEVICE int num_threads() { return (int)blockDim.x; }
// PTX %nctaid: https://docs.nvidia.com/cuda/parallel-thread-execution/#special-registers-nctaid
RT_DEVICE int num_ctas_x() { return (int)gridDim.x; }
RT_DEVICE int num_ctas_y() { return (int)gridDim.y; }

// ---- barriers, shuffles and votes --------------------------------------------------------------

// Orders shared memory between all threads of the thread block.
// PTX bar:
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-bar
RT_DEVICE void syncthreads() { __syncthreads(); }
// Orders shared memory between the lanes of the warp.
// PTX bar.warp.sync:
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-bar-warp-sync
RT_DEVICE void syncwarp() { __syncwarp(); }

// The value of lane (lane ^ mask); the value of lane `from`.
// PTX shfl.sync:
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-shfl-sync
RT_DEVICE float shfl_xor_sync(float x, int mask) { return __shfl_xor_sync(0xffffffff, x, mask); }
RT_DEVICE double shfl_xor_sync(double x, int mask) { return __shfl_xor_sync(0xffffffff, x, mask); }
RT_DEVICE int shfl_xor_sync(int x, int mask) { return __shfl_xor_sync(0xffffffff, x, mask); }
RT_DEVICE float shfl_sync(float x, int from) { return __shfl_sync(0xffffffff, x, from); }
RT_DEVICE int shfl_sync(int x, int from) { return __shfl_sync(0xffffffff, x, from); }

// PTX vote.sync:
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-vote-sync
RT_DEVICE bool any_sync(bool condition) { return __any_sync(0xffffffff, condition); }
RT_DEVICE bool all_sync(bool condition) { return __all_sync(0xffffffff, condition); }
// PTX redux.sync:
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-redux-sync
RT_DEVICE int reduce_min_sync(int x) { return __reduce_min_sync(0xffffffff, x); }
RT_DEVICE int reduce_max_sync(int x) { return __reduce_max_sync(0xffffffff, x); }

// ---- loads and stores --------------------------------------------------------------------------

RT_DEVICE shared_address shared_base() {
    extern __shared__ __align__(1024) unsigned char dynamic_shared[];
    return (shared_address)__cvta_generic_to_shared(dynamic_shared);
}

// T has 2, 4, 8 or 16 bytes and is aligned to its size.
// PTX ld: https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-ld
template <class T> RT_DEVICE T ld_shared(shared_address from) {
    static_assert(sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16);
    T value;
    if constexpr (sizeof(T) == 2) {
        uint16_t x;
        asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x) : "r"(from));
        memcpy(&value, &x, 2);
    } else if constexpr (sizeof(T) == 4) {
        uint32_t x;
        asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(from));
        memcpy(&value, &x, 4);
    } else if constexpr (sizeof(T) == 8) {
        uint2 x;
        asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(from));
        memcpy(&value, &x, 8);
    } else {
        uint4 x;
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                     : "r"(from));
        memcpy(&value, &x, 16);
    }
    return value;
}

// PTX st: https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-st
template <class T> RT_DEVICE void st_shared(shared_address to, const T &value) {
    static_assert(sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16);
    if constexpr (sizeof(T) == 2) {
        uint16_t x;
        memcpy(&x, &value, 2);
        asm volatile("st.shared.u16 [%0], %1;" ::"r"(to), "h"(x) : "memory");
    } else if constexpr (sizeof(T) == 4) {
        uint32_t x;
        memcpy(&x, &value, 4);
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(x) : "memory");
    } else if constexpr (sizeof(T) == 8) {
        uint2 x;
        memcpy(&x, &value, 8);
        asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(to), "r"(x.x), "r"(x.y) : "memory");
    } else {
        uint4 x;
        memcpy(&x, &value, 16);
        asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
                     : "memory");
    }
}

// T has 1 to 16 bytes and is aligned to its size.
template <class T> RT_DEVICE T ld_global(const T *from) { return *from; }
template <class T> RT_DEVICE void st_global(T *to, const T &value) { *to = value; }

// ---- synchronization between thread blocks -----------------------------------------------------

// A thread block may wait only for thread blocks that have started: those make progress whatever the others do (the
// independent thread scheduling of sm_70 and later), but they may start at any time and in any order. So each takes
// a number from a counter as it starts, and waits only for lower numbers. Within a launch nothing else touches these
// words.

// Returns the old value.
// PTX atom:
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-atom
RT_DEVICE int atom_add(int *counter, int x) { return atomicAdd(counter, x); }
// Spins until *word == value (CUTLASS's GenericBarrier::wait_eq). The calling thread then sees whatever the releasing
// thread had done or seen; the rest of its thread block does after a barrier. Polls with ld.relaxed, because each
// ld.acquire empties the L1 cache; the word keeps the value until this thread block releases it, so that one acquire
// reads it again.
// PTX ld.acquire: https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-ld
RT_DEVICE void wait_eq(const int *word, int value) {
    int now;
    do {
        asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(word) : "memory");
    } while (now != value);
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(word) : "memory");
}
// PTX st.release: https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-st
RT_DEVICE void st_release(int *word, int value) {
    asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

// ---- asynchronous copies from global to shared memory ------------------------------------------

// Starts a copy of 16 bytes: the first num_bytes from global memory, the rest zeros. Both addresses are multiples
// of 16; with num_bytes 0, `from` is not read.
// PTX cp.async:
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async
RT_DEVICE void cp_async(shared_address to, const void *from, int num_bytes) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(num_bytes)
                 : "memory");
}
// Closes the group of copies that this thread has started since its last commit.
// PTX cp.async.commit_group:
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async-commit-group
RT_DEVICE void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits for all of this thread's groups but the last `pending`. Other threads' bytes also take a barrier.
// PTX cp.async.wait_group:
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async-wait-group
template <int pending> RT_DEVICE void cp_async_wait_group() {
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// ---- matrix fragments of a warp ----------------------------------------------------------------

// Loads four 8 x 8 matrices of 16-bit numbers. Lane 8 i + r passes the address of row r of matrix i; word i of lane
// l receives elements (l / 4, 2 (l % 4)) and its right neighbour or, transposed, (2 (l % 4), l / 4) and the one
// below.
// PTX ldmatrix: https://docs.nvidia.com/cuda/parallel-thread-execution/#warp-level-matrix-instructions-ldmatrix
RT_DEVICE void ldmatrix_x4(uint32_t (&word)[4], shared_address row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                 : "r"(row)
                 : "memory");
}
RT_DEVICE void ldmatrix_x4_trans(uint32_t (&word)[4], shared_address row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                 : "r"(row)
                 : "memory");
}

// d (16 x 8, f32) += a (16 x 16) b (16 x 8). Lane l, with g = l / 4 and t = 2 (l % 4), holds
//   a[0]: (g, t), (g, t + 1)   a[1]: (g + 8, t ..)   a[2]: (g, t + 8 ..)   a[3]: (g + 8, t + 8 ..)
//   b0: (t, g), (t + 1, g)     b1: (t + 8, g), (t + 9, g)
//   d[0], d[1]: (g, t), (g, t + 1)                   d[2], d[3]: (g + 8, t), (g + 8, t + 1)
// PTX mma: https://docs.nvidia.com/cuda/parallel-thread-execution/#warp-level-matrix-fragment-mma-16816-float
template <class T> RT_DEVICE void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <> RT_DEVICE void mma_m16n8k16<bf16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
                 "{%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <> RT_DEVICE void mma_m16n8k16<f16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
                 "{%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---- arithmetic --------------------------------------------------------------------------------

// 2^x to 2 ulp; results below the smallest normal number are 0.
// PTX ex2: https://docs.nvidia.com/cuda/parallel-thread-execution/#floating-point-instructions-ex2
RT_DEVICE float ex2_approx_ftz(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// 1 / x to 1 ulp.
// PTX rcp: https://docs.nvidia.com/cuda/parallel-thread-execution/#floating-point-instructions-rcp
RT_DEVICE float rcp_approx_ftz(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Rounds two numbers to nearest, ties to even: `low` goes to the lower half of the word.
// PTX cvt: https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cvt
template <class T> RT_DEVICE uint32_t cvt_rn_x2(float low, float high);
template <> RT_DEVICE uint32_t cvt_rn_x2<bf16>(float low, float high) {
    uint32_t word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}
template <> RT_DEVICE uint32_t cvt_rn_x2<f16>(float low, float high) {
    uint32_t word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}
RT_DEVICE float widen(f16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}
RT_DEVICE float uint_as_float(uint32_t bits) { return __uint_as_float(bits); }

#endif // __CUDACC__

// ---- built on the above ------------------------------------------------------------------------

RT_DEVICE int lane_index() { return thread_index() % 32; }
RT_DEVICE int warp_index() { return thread_index() / 32; }

RT_DEVICE float widen(bf16 x) { return uint_as_float((uint32_t)x.bits << 16); }
RT_DEVICE float widen(float x) { return x; }
RT_DEVICE double widen(double x) { return x; }

template <class T> RT_DEVICE T narrow(float x) {
    if constexpr (sizeof(T) == 2)
        return T{(uint16_t)cvt_rn_x2<T>(x, 0)};
    else
        return T(x);
}

#endif // RINGTILE_CUDA_PTX_CUH
