// What device.cuh is for all architectures, for the instructions that only sm_90a has: bulk copies of boxes of a tensor
// (TMA), the barriers in shared memory that count their bytes, and products of a warp group (wgmma), 128 threads whose first
// one's index is a multiple of 128. Group functions are called by all of them together.
//
// Bulk copies and products see shared memory by a way of their own: what threads wrote there, shared_write_fence() and then
// a barrier make visible to them.
#ifndef RINGTILE_CUDA_DEVICE_SM90_CUH
#define RINGTILE_CUDA_DEVICE_SM90_CUH

#include "device.cuh"

#ifndef __CUDACC__

#include "emulator_sm90.h"

#else

#include <cuda.h>

// ---- host side: tensor maps --------------------------------------------------------------------

using tensor_map = CUtensorMap; // lies in a kernel's argument

// A tensor of T, 16-bit numbers or float, of (size[3], size[2], size[1], size[0]), of which size[0] are contiguous and the
// others stride[0 .. 2] bytes apart, to be copied in boxes of 128 bytes of `box_rows` rows. False: the driver refused.
template <class T>
bool make_tensor_map(tensor_map &map, const void *array, const int64_t (&size)[4], const int64_t (&stride)[3],
                     int box_rows) {
    static void *const encode = [] { // libcuda is there where a GPU is, and is not linked
        void *function = nullptr;
        cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault,
                                         &found);
#else
        cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &found);
#endif
        return function;
    }();
    if (encode == nullptr) return false;
    cuuint64_t sizes[4], strides[3];
    for (int i = 0; i < 4; i++) sizes[i] = (cuuint64_t)size[i];
    for (int i = 0; i < 3; i++) strides[i] = (cuuint64_t)stride[i];
    const cuuint32_t box[4] = {128 / sizeof(T), (cuuint32_t)box_rows, 1, 1}, steps[4] = {1, 1, 1, 1};
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(encode)(
               &map, sizeof(T) == 2 ? CU_TENSOR_MAP_DATA_TYPE_UINT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4,
               const_cast<void *>(array), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
               CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
               CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// ---- barriers ----------------------------------------------------------------------------------

// A barrier of num_threads threads, whole warps that all name the same `id` of 1 to 15: block_barrier() of a part of the block.
RT_DEVICE void part_barrier(int id, int num_threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}
// Arrives at it, and does not wait.
RT_DEVICE void part_barrier_arrive(int id, int num_threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}

// ---- barriers in shared memory -----------------------------------------------------------------

// 8 bytes. A phase is over when `arrivals` threads have arrived and the bytes that were announced are there; phases are
// numbered from 0. Arriving publishes what the thread did before; waiting makes that, and the bytes, visible.
RT_DEVICE void barrier_init(shared_address barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Between the inits and the block barrier after which others use them.
RT_DEVICE void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
RT_DEVICE void barrier_arrive(shared_address barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// ... and announces bytes of copies that this thread starts next.
RT_DEVICE void barrier_arrive_expecting(shared_address barrier, int num_bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(num_bytes)
                 : "memory");
}
// Until a phase of that parity (its number % 2) is over; the one before phase 0 is.
RT_DEVICE void barrier_wait(shared_address barrier, int parity) {
    uint32_t over;
    do {
        asm volatile("{\n.reg .pred over;\nmbarrier.try_wait.parity.shared::cta.b64 over, [%1], %2;\n"
                     "selp.u32 %0, 1, 0, over;\n}"
                     : "=r"(over)
                     : "r"(barrier), "r"(parity)
                     : "memory");
    } while (!over);
}

// Starts to copy a box from (col, row) of the matrix (i, j) of a tensor; zeros outside it. Row r of the box lies at
// `to` + 128 r, its chunks of 16 bytes in places c ^ (r % 8); `to` is a multiple of 1024. One thread calls it.
RT_DEVICE void copy_box(shared_address to, const tensor_map &map, shared_address barrier, int col, int row,
                        int i, int j) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, "
        "%5, %6}], [%2];" ::"r"(to),
        "l"(&map), "r"(barrier), "r"(col), "r"(row), "r"(i), "r"(j)
        : "memory");
}

// What this thread wrote to shared memory comes before the bulk copies and products that are started behind a barrier.
RT_DEVICE void shared_write_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Starts to add a box of floats, which lies at `from` as copy_box would have laid it, to a tensor of float, from (col, row) of
// the matrix (i, j) on; nothing outside it. One thread calls it, and waits for it: numbers are added in no order unless one
// is waited for before the next one starts.
RT_DEVICE void add_box(const tensor_map &map, shared_address from, int col, int row, int i, int j) {
    asm volatile(
        "cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4, %5}], "
        "[%1];" ::"l"(&map),
        "r"(from), "r"(col), "r"(row), "r"(i), "r"(j)
        : "memory");
}
RT_DEVICE void add_box_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until what this thread committed is read from shared memory; is added, so that its store_release publishes it.
RT_DEVICE void add_box_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
RT_DEVICE void add_box_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
// Between a wait_until and add_box to numbers that others added before their store_release, and between add_box_wait and
// store_release.
RT_DEVICE void add_box_fence() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// ---- registers ---------------------------------------------------------------------------------

// A group gives registers back, or takes more: `count` for each of its threads, a multiple of 8.
template <int count> RT_DEVICE void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}
template <int count> RT_DEVICE void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
}

// ---- products of a warp group ------------------------------------------------------------------

// Products run on their own from their start to the wait: until then nobody writes what they read in shared memory, and
// their thread touches neither the sums nor the left factors in its registers.

// Pins registers to this place in the program, which the compiler must not move reads and writes of them across.
template <int N> RT_DEVICE void pin(float (&x)[N][4]) {
#pragma unroll
    for (int i = 0; i < 4 * N; i++) asm volatile("" : "+f"(x[i / 4][i % 4])::"memory");
}
template <int N> RT_DEVICE void pin(uint32_t (&x)[N][4]) {
#pragma unroll
    for (int i = 0; i < 4 * N; i++) asm volatile("" : "+r"(x[i / 4][i % 4])::"memory");
}

// Before the products of a group: what the thread did to its registers comes before them.
RT_DEVICE void products_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Ends a group of products.
RT_DEVICE void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits for all groups but the last `pending`; `sum` is among the sums of those.
template <int pending, int N> RT_DEVICE void products_wait(float (&sum)[N][4]) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
    pin(sum);
}

// Which row and column of a lane's sums are where: as in multiply_add, with 16 rows for each warp of the group.
#define RT_SUM(n) "+f"(sum[n][0]), "+f"(sum[n][1]), "+f"(sum[n][2]), "+f"(sum[n][3])
#define RT_SUM_8(n)                                                                                          \
    RT_SUM(n), RT_SUM(n + 1), RT_SUM(n + 2), RT_SUM(n + 3), RT_SUM(n + 4), RT_SUM(n + 5), RT_SUM(n + 6),     \
        RT_SUM(n + 7)
#define RT_REGISTERS_32                                                                                      \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "   \
    "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define RT_REGISTERS_64                                                                                      \
    RT_REGISTERS_32                                                                                          \
    ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, " \
    "%52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// sum (64 x 8 N) = a (64 x 16) b^T (8 N x 16) + (add ? sum : 0), both factors rows in shared memory.
template <class T> RT_DEVICE void multiply_rows_async(float (&sum)[8][4], uint64_t a, uint64_t b, bool add);
template <class T> RT_DEVICE void multiply_rows_async(float (&sum)[16][4], uint64_t a, uint64_t b, bool add);

// sum (64 x 64) = a^T (16 x 64) b (16 x 64) + (add ? sum : 0), both factors rows in shared memory, along the sum.
template <class T>
RT_DEVICE void multiply_columns_async(float (&sum)[8][4], uint64_t a, uint64_t b, bool add);

// sum (64 x 8 N) += a (64 x 16) b (16 x 8 N): a in registers, a lane's as in multiply_add; b rows in shared memory.
template <class T> RT_DEVICE void multiply_async(float (&sum)[8][4], const uint32_t (&a)[4], uint64_t b);
template <class T> RT_DEVICE void multiply_async(float (&sum)[16][4], const uint32_t (&a)[4], uint64_t b);

#define RT_PRODUCTS(T, NAME)                                                                                 \
    template <>                                                                                              \
    RT_DEVICE void multiply_rows_async<T>(float (&sum)[8][4], uint64_t a, uint64_t b, bool add) {            \
        asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %34, 0;\n"                                        \
                     "wgmma.mma_async.sync.aligned.m64n64k16.f32." NAME "." NAME " {" RT_REGISTERS_32        \
                     "}, %32, %33, add, 1, 1, 0, 0;\n}"                                                      \
                     : RT_SUM_8(0)                                                                           \
                     : "l"(a), "l"(b), "r"((int)add));                                                       \
    }                                                                                                        \
    template <>                                                                                              \
    RT_DEVICE void multiply_columns_async<T>(float (&sum)[8][4], uint64_t a, uint64_t b, bool add) {         \
        asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %34, 0;\n"                                        \
                     "wgmma.mma_async.sync.aligned.m64n64k16.f32." NAME "." NAME " {" RT_REGISTERS_32        \
                     "}, %32, %33, add, 1, 1, 1, 1;\n}"                                                      \
                     : RT_SUM_8(0)                                                                           \
                     : "l"(a), "l"(b), "r"((int)add));                                                       \
    }                                                                                                        \
    template <>                                                                                              \
    RT_DEVICE void multiply_rows_async<T>(float (&sum)[16][4], uint64_t a, uint64_t b, bool add) {           \
        asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %66, 0;\n"                                        \
                     "wgmma.mma_async.sync.aligned.m64n128k16.f32." NAME "." NAME " {" RT_REGISTERS_64       \
                     "}, %64, %65, add, 1, 1, 0, 0;\n}"                                                      \
                     : RT_SUM_8(0), RT_SUM_8(8)                                                              \
                     : "l"(a), "l"(b), "r"((int)add));                                                       \
    }                                                                                                        \
    template <> RT_DEVICE void multiply_async<T>(float (&sum)[8][4], const uint32_t (&a)[4], uint64_t b) {   \
        asm volatile("{\n.reg .pred add;\nsetp.eq.b32 add, 0, 0;\n"                                          \
                     "wgmma.mma_async.sync.aligned.m64n64k16.f32." NAME "." NAME " {" RT_REGISTERS_32        \
                     "}, {%32, %33, %34, %35}, %36, add, 1, 1, 1;\n}"                                        \
                     : RT_SUM_8(0)                                                                           \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                  \
    }                                                                                                        \
    template <> RT_DEVICE void multiply_async<T>(float (&sum)[16][4], const uint32_t (&a)[4], uint64_t b) {  \
        asm volatile("{\n.reg .pred add;\nsetp.eq.b32 add, 0, 0;\n"                                          \
                     "wgmma.mma_async.sync.aligned.m64n128k16.f32." NAME "." NAME " {" RT_REGISTERS_64       \
                     "}, {%64, %65, %66, %67}, %68, add, 1, 1, 1;\n}"                                        \
                     : RT_SUM_8(0), RT_SUM_8(8)                                                              \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                  \
    }
RT_PRODUCTS(bf16, "bf16")
RT_PRODUCTS(f16, "f16")
#undef RT_PRODUCTS
#undef RT_REGISTERS_64
#undef RT_REGISTERS_32
#undef RT_SUM_8
#undef RT_SUM

#endif // __CUDACC__

// ---- on top of those ---------------------------------------------------------------------------

// The descriptor of a factor that copy_box has laid out: rows of 128 bytes, eight of them a swizzled block of 1024. The
// address of a product's first number may lie 32 k bytes into a row, for the columns from 16 k on. Where rows run along the
// sum over k (b of multiply_async, both of multiply_columns_async), columns from 64 on lie panel_bytes further; otherwise
// that is not used.
//   bits 0-13 address, 16-29 panel_bytes, 32-45 from block to block, all / 16;  62-63 the swizzle: 1 is 128 bytes
RT_DEVICE uint64_t factor_at(shared_address first, int panel_bytes) {
    return (uint64_t)(first >> 4 & 0x3fff) | (uint64_t)(panel_bytes / 16) << 16 |
           (uint64_t)(1024 / 16) << 32 | (uint64_t)1 << 62;
}

// The factor num_bytes behind it.
RT_DEVICE uint64_t factor_after(uint64_t factor, int num_bytes) {
    return factor + (uint64_t)(num_bytes / 16);
}

#endif // RINGTILE_CUDA_DEVICE_SM90_CUH
