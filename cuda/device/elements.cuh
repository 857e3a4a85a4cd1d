// Shared by the pointwise kernels: packs of elements as wide as one load, and the arithmetic type of each element type.
#ifndef RINGTILE_CUDA_ELEMENTS_CUH
#define RINGTILE_CUDA_ELEMENTS_CUH

#include "ptx.cuh"

// Arithmetic is in f32, for f64 in f64.
template <class T> struct real_of {
    using type = float;
};
template <> struct real_of<double> {
    using type = double;
};
template <class T> using real = typename real_of<T>::type;

// Rounds to nearest, ties to even.
template <class T> RT_DEVICE T rounded(real<T> x) {
    if constexpr (sizeof(T) == 8)
        return x;
    else
        return narrow<T>(x);
}

template <class T, int count> struct alignas(sizeof(T) * count) pack_of {
    T element[count];
};

// Elements in a pack of 16 bytes. f64 has packs of one: its functions use all registers.
template <class T> constexpr int PACK = sizeof(T) == 8 ? 1 : 16 / sizeof(T);

// Calls function, a generic lambda, with a value of the element type. RT_BAD_DTYPE if there is no such type.
template <class Function> rt_status for_dtype(rt_dtype dtype, Function function) {
    switch (dtype) {
    case RT_F64:
        return function(double());
    case RT_F32:
        return function(float());
    case RT_BF16:
        return function(bf16());
    case RT_F16:
        return function(f16());
    }
    return RT_BAD_DTYPE;
}

// Thread blocks for num_items items, one per thread; the kernel loops over what exceeds the largest grid.
inline int64_t grid_for(int64_t num_items, int threads) {
    const int64_t ctas = (num_items + threads - 1) / threads;
    return ctas < INT32_MAX ? ctas : INT32_MAX;
}

// Item `thread` of thread block `cta`. In int64: 2^31 blocks of any size have more items than an int counts.
RT_HOST_DEVICE int64_t item_index(int cta, int threads, int thread) { return (int64_t)cta * threads + thread; }
// The first item of the calling thread, and the distance to its next one.
RT_DEVICE int64_t first_item(int threads) { return item_index(cta_index_x(), threads, thread_index()); }
RT_DEVICE int64_t items_per_grid(int threads) { return item_index(num_ctas_x(), threads, 0); }

inline bool is_aligned(const void *pointer, int64_t num_bytes) {
    return (uintptr_t)pointer % (uintptr_t)num_bytes == 0;
}

#endif // RINGTILE_CUDA_ELEMENTS_CUH
