// The instructions that only sm_90a has, as ptx.cuh has the others: mbarriers, bulk copies of tensors (TMA), and
// products of a warp group (wgmma): 128 threads, the first of which has an index divisible by 128. All of them call
// a warp-group function together.
//
// Bulk copies and wgmma access shared memory through the async proxy. They see a thread's writes only after that
// thread's fence_proxy_async_shared() and, behind it, a barrier.
#ifndef RINGTILE_CUDA_PTX_SM90_CUH
#define RINGTILE_CUDA_PTX_SM90_CUH

#include "ptx.cuh"

// Which dimension of a factor in shared memory is contiguous: the one that is summed over, or the other (CUTLASS's
// GMMA::Major).
enum class major { K, MN };

struct alignas(8) mbarrier { // as it lies in shared memory; opaque
    uint64_t state;
};

#ifndef __CUDACC__

#include "emulator_sm90.h"

#else

#include <cuda.h>
#include <stdio.h>

// ---- tensor maps (host) ------------------------------------------------------------------------

using tensor_map = CUtensorMap; // part of a kernel's argument

// Describes a tensor (size[3], size[2], size[1], size[0]) of T, a 16-bit type or float: dimension 0 is contiguous
// and the others are stride[0 .. 2] bytes apart. Boxes have `box_rows` rows of 128 bytes. False, with the text of
// rt_cuda_last_error(), if the driver refuses.
// https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__TENSOR__MEMORY.html
template <class T>
bool make_tensor_map(tensor_map &map, const void *array, const int64_t (&size)[4], const int64_t (&stride)[3],
                     int box_rows) {
    static void *const encode = [] { // libcuda comes with the driver and is not linked
        void *function = nullptr;
        cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
#else
        cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &found);
#endif
        return function;
    }();
    if (encode == nullptr) {
        set_last_error("the driver has no cuTensorMapEncodeTiled; kernels of sm_90a need a driver for CUDA 12.0 or "
                       "later, and RINGTILE_CUDA_ISA=sm_80 keeps to those that do without");
        return false;
    }
    cuuint64_t sizes[4], strides[3];
    for (int i = 0; i < 4; i++) sizes[i] = (cuuint64_t)size[i];
    for (int i = 0; i < 3; i++) strides[i] = (cuuint64_t)stride[i];
    const cuuint32_t box[4] = {128 / sizeof(T), (cuuint32_t)box_rows, 1, 1}, steps[4] = {1, 1, 1, 1};
    const CUresult result = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(encode)(
        &map, sizeof(T) == 2 ? CU_TENSOR_MAP_DATA_TYPE_UINT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4,
        const_cast<void *>(array), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
        CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result == CUDA_SUCCESS) return true;
    char text[256];
    snprintf(text, sizeof(text),
             "cuTensorMapEncodeTiled refused with CUresult %d: sizes (%lld, %lld, %lld, %lld), strides in "
             "bytes (%lld, %lld, %lld), boxes of %d rows, first byte at %p",
             (int)result, (long long)size[3], (long long)size[2], (long long)size[1], (long long)size[0],
             (long long)stride[2], (long long)stride[1], (long long)stride[0], box_rows, array);
    set_last_error(text);
    return false;
}

// ---- named barriers ----------------------------------------------------------------------------

// syncthreads() for num_threads threads, whole warps that name the same `id` of 1 to 15.
// PTX bar.sync:
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-bar
RT_DEVICE void named_barrier_sync(int id, int num_threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}
// Counts as one of num_threads, without waiting for the others (bar.arrive, same section).
RT_DEVICE void named_barrier_arrive(int id, int num_threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}

// ---- mbarriers ---------------------------------------------------------------------------------

// A phase of an mbarrier completes when `arrivals` threads have arrived and all announced bytes are there; phases
// count from 0. An arrival releases what the thread did before; a wait acquires that, and the bytes.
// PTX mbarrier.init:
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-mbarrier-init
RT_DEVICE void mbarrier_init(shared_address mbarrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(mbarrier), "r"(arrivals) : "memory");
}
// Goes between the inits and the syncthreads() after which other threads use the mbarriers.
// PTX fence:
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-membar
RT_DEVICE void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
// PTX mbarrier.arrive:
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-mbarrier-arrive
RT_DEVICE void mbarrier_arrive(shared_address mbarrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(mbarrier) : "memory");
}
// Also announces the bytes of the copies that this thread starts next (same section).
RT_DEVICE void mbarrier_arrive_expect_tx(shared_address mbarrier, int num_bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(mbarrier), "r"(num_bytes) : "memory");
}
// Whether the phase of that parity (its number % 2) is complete; may suspend the thread for a while. The phase
// before phase 0 counts as complete.
// PTX mbarrier.try_wait:
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-mbarrier-test-wait-mbarrier-try-wait
RT_DEVICE bool mbarrier_try_wait_parity(shared_address mbarrier, int parity) {
    uint32_t complete;
    asm volatile("{\n.reg .pred complete;\nmbarrier.try_wait.parity.shared::cta.b64 complete, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, complete;\n}"
                 : "=r"(complete)
                 : "r"(mbarrier), "r"(parity)
                 : "memory");
    return complete != 0;
}

// ---- bulk copies of tensors --------------------------------------------------------------------

// Loads a tensor map into the cache of the copy engine, so that the first copy does not wait for it.
// PTX prefetch.tensormap:
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-prefetch-prefetchu
RT_DEVICE void prefetch_tensormap(const tensor_map &map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Starts to copy the box at (col, row) of the matrix (i, j) of a tensor to shared memory; what lies outside the
// tensor is zeros. Row r of the box lands at `to` + 128 r with its chunk c of 16 bytes in place c ^ (r % 8); `to`
// is a multiple of 1024. One thread calls it.
// PTX cp.async.bulk.tensor:
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async-bulk-tensor
RT_DEVICE void cp_async_bulk_tensor_4d(shared_address to, const tensor_map &map, shared_address mbarrier, int col,
                                       int row, int i, int j) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, "
                 "%5, %6}], [%2];" ::"r"(to),
                 "l"(&map), "r"(mbarrier), "r"(col), "r"(row), "r"(i), "r"(j)
                 : "memory");
}

// The other way: starts to store a box, laid out in the same way, to (col, row) of the matrix (i, j); what lies outside
// the tensor is left out. One thread calls it, and waits for it; shared memory must stay until it has been read.
// PTX cp.async.bulk.tensor:
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async-bulk-tensor
RT_DEVICE void cp_async_bulk_tensor_4d(const tensor_map &map, shared_address from, int col, int row, int i, int j) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
                 "r"(from), "r"(col), "r"(row), "r"(i), "r"(j)
                 : "memory");
}

// Starts to add a box of floats, laid out as cp_async_bulk_tensor_4d lays it out, to the box at (col, row) of the
// matrix (i, j); what lies outside the tensor is left out. Concurrent additions to a number happen in any order, so
// a sum with one order takes a wait after each. One thread calls it, and waits for it.
// PTX cp.reduce.async.bulk.tensor:
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-reduce-async-bulk-tensor
RT_DEVICE void cp_reduce_async_bulk_tensor_4d(const tensor_map &map, shared_address from, int col, int row, int i,
                                              int j) {
    asm volatile("cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4, %5}], "
                 "[%1];" ::"l"(&map),
                 "r"(from), "r"(col), "r"(row), "r"(i), "r"(j)
                 : "memory");
}
// PTX cp.async.bulk.commit_group:
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async-bulk-commit-group
RT_DEVICE void cp_async_bulk_commit_group() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until all but the last `pending` groups that this thread committed are complete; _read: until they have
// read shared memory.
// PTX cp.async.bulk.wait_group:
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async-bulk-wait-group
template <int pending> RT_DEVICE void cp_async_bulk_wait_group() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(pending) : "memory");
}
template <int pending> RT_DEVICE void cp_async_bulk_wait_group_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory");
}

// Orders this thread's writes to shared memory before accesses of the async proxy.
// PTX fence.proxy.async:
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-membar
RT_DEVICE void fence_proxy_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Orders global memory between the generic and the async proxy: after wait_eq, before adding to what others added;
// and after the wait for an addition, before its st_release.
RT_DEVICE void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// ---- registers of a warp group -----------------------------------------------------------------

// Releases or requests registers: each thread of the group then has `count`, a multiple of 8.
// PTX setmaxnreg: https://docs.nvidia.com/cuda/parallel-thread-execution/#miscellaneous-instructions-setmaxnreg
template <int count> RT_DEVICE void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}
template <int count> RT_DEVICE void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
}

// ---- products of a warp group ------------------------------------------------------------------

// wgmma runs asynchronously from its start to the wait for its group. Until then no thread writes the shared memory
// it reads, and its own thread touches neither the accumulator nor the factor in registers.

// Keeps the compiler from moving reads and writes of these registers across this place (CUTLASS's
// warpgroup_fence_operand).
template <int N> RT_DEVICE void warpgroup_fence_operand(float (&x)[N][4]) {
#pragma unroll
    for (int i = 0; i < 4 * N; i++) asm volatile("" : "+f"(x[i / 4][i % 4])::"memory");
}
template <int N> RT_DEVICE void warpgroup_fence_operand(uint32_t (&x)[N][4]) {
#pragma unroll
    for (int i = 0; i < 4 * N; i++) asm volatile("" : "+r"(x[i / 4][i % 4])::"memory");
}

// Orders this thread's register accesses before the products that follow.
// PTX wgmma.fence:
// https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-warpgroup-level-matrix-instructions-wgmma-fence
RT_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// PTX wgmma.commit_group:
// https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-warpgroup-level-matrix-instructions-wgmma-commit-group
RT_DEVICE void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits for all groups but the last `pending`. `d` is an accumulator of the groups waited for.
// PTX wgmma.wait_group:
// https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-warpgroup-level-matrix-instructions-wgmma-wait-group
template <int pending, int N> RT_DEVICE void wgmma_wait_group(float (&d)[N][4]) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
    warpgroup_fence_operand(d);
}

// d (64 x 8 N) = a (64 x 16) b (16 x 8 N) + (scale_d ? d : 0). Both factors lie in shared memory (ss), or a in
// registers (rs). Each warp of the group holds 16 rows of d, and of a in registers, as in mma_m16n8k16.
//   ss, major::K    rows of a and columns of b are contiguous: a product of rows with rows
//   ss, major::MN   columns of a and rows of b are contiguous, 64 of each
//   rs              rows of b are contiguous; always adds to d
// PTX wgmma.mma_async:
// https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-warpgroup-level-matrix-instructions-wgmma-mma-async
template <class T, major> RT_DEVICE void wgmma_mma_async_ss(float (&d)[8][4], uint64_t a, uint64_t b, bool scale_d);
template <class T, major> RT_DEVICE void wgmma_mma_async_ss(float (&d)[16][4], uint64_t a, uint64_t b, bool scale_d);
template <class T> RT_DEVICE void wgmma_mma_async_rs(float (&d)[8][4], const uint32_t (&a)[4], uint64_t b);
template <class T> RT_DEVICE void wgmma_mma_async_rs(float (&d)[16][4], const uint32_t (&a)[4], uint64_t b);
template <class T> RT_DEVICE void wgmma_mma_async_rs(float (&d)[32][4], const uint32_t (&a)[4], uint64_t b);

#define RT_D(n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
#define RT_D_8(n) RT_D(n), RT_D(n + 1), RT_D(n + 2), RT_D(n + 3), RT_D(n + 4), RT_D(n + 5), RT_D(n + 6), RT_D(n + 7)
#define RT_REGISTERS_32                                                                                                \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "             \
    "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define RT_REGISTERS_64                                                                                                \
    RT_REGISTERS_32                                                                                                    \
    ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, "           \
    "%52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define RT_REGISTERS_128                                                                                               \
    RT_REGISTERS_64                                                                                                    \
    ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, "           \
    "%84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, "               \
    "%103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, "                 \
    "%119, %120, %121, %122, %123, %124, %125, %126, %127"

// The operands behind the predicate: scale of a and of b (1), and where they lie in shared memory, their major (0
// K, 1 MN).
#define RT_WGMMA(T, NAME)                                                                                              \
    template <>                                                                                                        \
    RT_DEVICE void wgmma_mma_async_ss<T, major::K>(float (&d)[8][4], uint64_t a, uint64_t b, bool scale_d) {           \
        asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %34, 0;\n"                                                  \
                     "wgmma.mma_async.sync.aligned.m64n64k16.f32." NAME "." NAME " {" RT_REGISTERS_32                  \
                     "}, %32, %33, add, 1, 1, 0, 0;\n}"                                                                \
                     : RT_D_8(0)                                                                                       \
                     : "l"(a), "l"(b), "r"((int)scale_d));                                                             \
    }                                                                                                                  \
    template <>                                                                                                        \
    RT_DEVICE void wgmma_mma_async_ss<T, major::MN>(float (&d)[8][4], uint64_t a, uint64_t b, bool scale_d) {          \
        asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %34, 0;\n"                                                  \
                     "wgmma.mma_async.sync.aligned.m64n64k16.f32." NAME "." NAME " {" RT_REGISTERS_32                  \
                     "}, %32, %33, add, 1, 1, 1, 1;\n}"                                                                \
                     : RT_D_8(0)                                                                                       \
                     : "l"(a), "l"(b), "r"((int)scale_d));                                                             \
    }                                                                                                                  \
    template <>                                                                                                        \
    RT_DEVICE void wgmma_mma_async_ss<T, major::K>(float (&d)[16][4], uint64_t a, uint64_t b, bool scale_d) {          \
        asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %66, 0;\n"                                                  \
                     "wgmma.mma_async.sync.aligned.m64n128k16.f32." NAME "." NAME " {" RT_REGISTERS_64                 \
                     "}, %64, %65, add, 1, 1, 0, 0;\n}"                                                                \
                     : RT_D_8(0), RT_D_8(8)                                                                            \
                     : "l"(a), "l"(b), "r"((int)scale_d));                                                             \
    }                                                                                                                  \
    template <> RT_DEVICE void wgmma_mma_async_rs<T>(float (&d)[8][4], const uint32_t (&a)[4], uint64_t b) {           \
        asm volatile("{\n.reg .pred add;\nsetp.eq.b32 add, 0, 0;\n"                                                    \
                     "wgmma.mma_async.sync.aligned.m64n64k16.f32." NAME "." NAME " {" RT_REGISTERS_32                  \
                     "}, {%32, %33, %34, %35}, %36, add, 1, 1, 1;\n}"                                                  \
                     : RT_D_8(0)                                                                                       \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                            \
    }                                                                                                                  \
    template <> RT_DEVICE void wgmma_mma_async_rs<T>(float (&d)[16][4], const uint32_t (&a)[4], uint64_t b) {          \
        asm volatile("{\n.reg .pred add;\nsetp.eq.b32 add, 0, 0;\n"                                                    \
                     "wgmma.mma_async.sync.aligned.m64n128k16.f32." NAME "." NAME " {" RT_REGISTERS_64                 \
                     "}, {%64, %65, %66, %67}, %68, add, 1, 1, 1;\n}"                                                  \
                     : RT_D_8(0), RT_D_8(8)                                                                            \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                            \
    }                                                                                                                  \
    template <> RT_DEVICE void wgmma_mma_async_rs<T>(float (&d)[32][4], const uint32_t (&a)[4], uint64_t b) {          \
        asm volatile("{\n.reg .pred add;\nsetp.eq.b32 add, 0, 0;\n"                                                    \
                     "wgmma.mma_async.sync.aligned.m64n256k16.f32." NAME "." NAME " {" RT_REGISTERS_128                \
                     "}, {%128, %129, %130, %131}, %132, add, 1, 1, 1;\n}"                                             \
                     : RT_D_8(0), RT_D_8(8), RT_D_8(16), RT_D_8(24)                                                    \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                            \
    }
RT_WGMMA(bf16, "bf16")
RT_WGMMA(f16, "f16")
#undef RT_WGMMA
#undef RT_REGISTERS_128
#undef RT_REGISTERS_64
#undef RT_REGISTERS_32
#undef RT_D_8
#undef RT_D

#endif // __CUDACC__

// ---- built on the above ------------------------------------------------------------------------

// Waits until the phase of that parity is complete.
RT_DEVICE void mbarrier_wait_parity(shared_address mbarrier, int parity) {
    while (!mbarrier_try_wait_parity(mbarrier, parity)) {
    }
}

// The descriptor of a factor that cp_async_bulk_tensor_4d has laid out: rows of 128 bytes, eight of which are a
// swizzle atom of 1024. With major::K the factor may begin 32 k bytes into a row, at column 16 k. With major::MN
// columns from 64 on lie panel_bytes further; major::K does not use panel_bytes.
//   bits 0-13 address, 16-29 panel_bytes, 32-45 bytes between swizzle atoms, all / 16;  62-63 swizzle: 1 is 128 bytes
// PTX:
// https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-warpgroup-level-matrix-shared-memory-layout-matrix-descriptor
RT_DEVICE uint64_t make_smem_desc(shared_address first, int panel_bytes) {
    return (uint64_t)(first >> 4 & 0x3fff) | (uint64_t)(panel_bytes / 16) << 16 | (uint64_t)(1024 / 16) << 32 |
           (uint64_t)1 << 62;
}

// The descriptor of the factor num_bytes further.
RT_DEVICE uint64_t advance_smem_desc(uint64_t desc, int num_bytes) { return desc + (uint64_t)(num_bytes / 16); }

#endif // RINGTILE_CUDA_PTX_SM90_CUH
