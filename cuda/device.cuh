// Everything a kernel asks of the machine: each PTX instruction behind one named function, in two versions. Under nvcc it
// is the instruction; under a host compiler it is what tests/emulator says the instruction does, with checks. Kernels
// include only this and keep to it: no threadIdx, no __shared__, no pointer to shared memory.
//
// Shared memory is one dynamic array per block, addressed in bytes from shared_base(). Blocks have one dimension and
// whole warps. Warp functions are called by all 32 lanes together.
#ifndef RINGTILE_CUDA_DEVICE_CUH
#define RINGTILE_CUDA_DEVICE_CUH

#include "../csrc/ringtile.h"

#include <stdint.h>
#include <string.h>

// The 16-bit floating-point types as they lie in memory.
struct bf16 {
    uint16_t bits;
};
struct f16 {
    uint16_t bits;
};

using shared_address = uint32_t; // bytes, in the block's shared memory

struct alignas(16) chunk { // what one thread copies at a time
    uint32_t word[4];
};

// Blocks to start; a number alone is that of x.
struct grid_size {
    int64_t x, y, z;
    grid_size(int64_t x, int64_t y = 1, int64_t z = 1) : x(x), y(y), z(z) {}
};

#ifndef __CUDACC__

#include "emulator.h"

#else

#define RT_DEVICE __device__ __forceinline__
#define RT_HOST_DEVICE __host__ __device__ inline
// Threads of a block at most, and blocks on a multiprocessor at least, which together bound the registers.
#define RT_KERNEL(...) __global__ void __launch_bounds__(__VA_ARGS__)
#define RT_PARAMS const __grid_constant__ // a kernel's one argument, kept in constant memory

#include <cuda_runtime.h>

// ---- host side ---------------------------------------------------------------------------------

// Of the current device, 10 major + minor: 90 is sm_90. 0: the CUDA runtime refused.
inline int compute_capability() {
    int device, major, minor;
    const bool known =
        cudaGetDevice(&device) == cudaSuccess &&
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
        cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess;
    return known ? 10 * major + minor : 0;
}

// Starts blocks of num_threads threads on a stream (a cudaStream_t) of the current device; nothing waits.
//   RT_BAD_SHAPE   more blocks than x < 2^31, y and z < 2^16
//   RT_CUDA        the CUDA runtime refused; its last error is cleared
template <class Params>
rt_status launch(void (*kernel)(Params), grid_size grid, int num_threads, int shared_bytes, void *stream,
                 const Params &params) {
    if (grid.x == 0 || grid.y == 0 || grid.z == 0) return RT_OK;
    if (grid.x > INT32_MAX || grid.y > UINT16_MAX || grid.z > UINT16_MAX) return RT_BAD_SHAPE;
    if (shared_bytes > 48 * 1024)
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    kernel<<<dim3((unsigned)grid.x, (unsigned)grid.y, (unsigned)grid.z), (unsigned)num_threads,
             (size_t)shared_bytes, static_cast<cudaStream_t>(stream)>>>(params);
    return cudaGetLastError() == cudaSuccess ? RT_OK : RT_CUDA;
}

// ---- who am I ----------------------------------------------------------------------------------

// Volatile: what follows from an index is computed again where it is used, not kept in registers all through a kernel.
RT_DEVICE int thread_index() {
    int x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    __builtin_assume(x >= 0);
    return x;
}
RT_DEVICE int block_index() {
    int x;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(x));
    __builtin_assume(x >= 0);
    return x;
}
RT_DEVICE int block_index_y() {
    int y;
    asm volatile("mov.u32 %0, %%ctaid.y;" : "=r"(y));
    __builtin_assume(y >= 0);
    return y;
}
RT_DEVICE int block_index_z() {
    int z;
    asm volatile("mov.u32 %0, %%ctaid.z;" : "=r"(z));
    __builtin_assume(z >= 0);
    return z;
}
RT_DEVICE int num_threads() { return (int)blockDim.x; }
RT_DEVICE int num_blocks() { return (int)gridDim.x; } // along x

// ---- waiting and talking -----------------------------------------------------------------------

RT_DEVICE void block_barrier() { __syncthreads(); } // orders shared memory between all threads of the block
RT_DEVICE void warp_barrier() { __syncwarp(); }     // ... between the lanes of the warp

// The value of lane (lane ^ mask), of lane `from`.
RT_DEVICE float shuffle_xor(float x, int mask) { return __shfl_xor_sync(0xffffffff, x, mask); }
RT_DEVICE double shuffle_xor(double x, int mask) { return __shfl_xor_sync(0xffffffff, x, mask); }
RT_DEVICE int shuffle_xor(int x, int mask) { return __shfl_xor_sync(0xffffffff, x, mask); }
RT_DEVICE float shuffle(float x, int from) { return __shfl_sync(0xffffffff, x, from); }
RT_DEVICE int shuffle(int x, int from) { return __shfl_sync(0xffffffff, x, from); }
RT_DEVICE bool any_lane(bool condition) { return __any_sync(0xffffffff, condition); }
RT_DEVICE bool all_lanes(bool condition) { return __all_sync(0xffffffff, condition); }
RT_DEVICE int min_of_lanes(int x) { return __reduce_min_sync(0xffffffff, x); }
RT_DEVICE int max_of_lanes(int x) { return __reduce_max_sync(0xffffffff, x); }

// ---- memory ------------------------------------------------------------------------------------

RT_DEVICE shared_address shared_base() {
    extern __shared__ __align__(1024) unsigned char dynamic_shared[];
    return (shared_address)__cvta_generic_to_shared(dynamic_shared);
}

// T of 2, 4, 8 or 16 bytes, aligned to its size.
template <class T> RT_DEVICE T shared_load(shared_address from) {
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

template <class T> RT_DEVICE void shared_store(shared_address to, const T &value) {
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
        asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z),
                     "r"(x.w)
                     : "memory");
    }
}

// T of 1 to 16 bytes, aligned to its size.
template <class T> RT_DEVICE T global_load(const T *from) { return *from; }
template <class T> RT_DEVICE void global_store(T *to, const T &value) { *to = value; }

// ---- blocks that wait for each other -------------------------------------------------------------

// Words that blocks meet at are touched by nothing else in a launch. Only a block that is running may be waited for: threads
// that have started go on whatever the others do (the parallel forward progress of sm_70 and later), but nothing says
// when, or in which order, blocks start. Tickets do.

// Adds 1 and returns what was there before: a block with a higher number finds those with lower ones running.
RT_DEVICE int take_ticket(int *counter) { return atomicAdd(counter, 1); }
// Waits until *word is `value`. What the thread that stored it had done or seen before, this thread then sees; the others
// of its block after a barrier.
RT_DEVICE void wait_until(const int *word, int value) {
    int now;
    do {
        asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(word) : "memory");
    } while (now != value);
}
RT_DEVICE void store_release(int *word, int value) {
    asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

// ---- copies from global to shared memory ---------------------------------------------------------

// Starts to copy 16 bytes to shared memory: the first num_bytes from global memory, then zeros. Both sides are aligned to
// 16; where num_bytes is 0, `from` is not read. A group is what a thread has started since its last commit.
RT_DEVICE void async_copy(shared_address to, const void *from, int num_bytes) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(num_bytes)
                 : "memory");
}
RT_DEVICE void async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits for this thread's groups but the last `pending`. The other threads' bytes need a barrier after it.
template <int pending> RT_DEVICE void async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// ---- matrix fragments --------------------------------------------------------------------------

// Four 8 x 8 matrices of 16-bit numbers: lane 8 i + r gives the address of row r of matrix i. Lane l gets in word i the
// elements (l / 4, 2 (l % 4)) and the one right of it; transposed: (2 (l % 4), l / 4) and the one below it.
RT_DEVICE void load_matrices(uint32_t (&word)[4], shared_address row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                 : "r"(row)
                 : "memory");
}
RT_DEVICE void load_matrices_transposed(uint32_t (&word)[4], shared_address row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                 : "r"(row)
                 : "memory");
}

// sum (16 x 8, f32) += a (16 x 16) b (16 x 8). Of lane l, with g = l / 4 and t = 2 (l % 4):
//   a[0]: (g, t), (g, t + 1)   a[1]: (g + 8, t ..)   a[2]: (g, t + 8 ..)   a[3]: (g + 8, t + 8 ..)
//   b0: (t, g), (t + 1, g)     b1: (t + 8, g), (t + 9, g)
//   sum[0], sum[1]: (g, t), (g, t + 1)               sum[2], sum[3]: (g + 8, t), (g + 8, t + 1)
template <class T>
RT_DEVICE void multiply_add(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <>
RT_DEVICE void multiply_add<bf16>(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
                 "{%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
RT_DEVICE void multiply_add<f16>(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
                 "{%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---- numbers -----------------------------------------------------------------------------------

// 2^x: 2 ulp, results below the smallest normal number are 0.   1 / x: 1 ulp.
RT_DEVICE float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
RT_DEVICE float reciprocal_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Rounds to nearest, ties to even. pack(): low in the lower half of the word.
template <class T> RT_DEVICE uint32_t pack(float low, float high);
template <> RT_DEVICE uint32_t pack<bf16>(float low, float high) {
    uint32_t word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}
template <> RT_DEVICE uint32_t pack<f16>(float low, float high) {
    uint32_t word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}
RT_DEVICE float widen(f16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}
RT_DEVICE float bits_to_float(uint32_t bits) { return __uint_as_float(bits); }

#endif // __CUDACC__

// ---- on top of those ---------------------------------------------------------------------------

RT_DEVICE int lane_index() { return thread_index() % 32; }
RT_DEVICE int warp_index() { return thread_index() / 32; }

RT_DEVICE float widen(bf16 x) { return bits_to_float((uint32_t)x.bits << 16); }
RT_DEVICE float widen(float x) { return x; }
RT_DEVICE double widen(double x) { return x; }

template <class T> RT_DEVICE T narrow(float x) {
    if constexpr (sizeof(T) == 2)
        return T{(uint16_t)pack<T>(x, 0)};
    else
        return T(x);
}

#endif // RINGTILE_CUDA_DEVICE_CUH
