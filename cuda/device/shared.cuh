// Typed addresses into shared memory. A kernel declares what it keeps there as one struct; shared_ref and RT_SHARED
// stand in for the reference and the member access that the language has for ordinary memory.
#ifndef RINGTILE_CUDA_SHARED_CUH
#define RINGTILE_CUDA_SHARED_CUH

#include "ptx.cuh"

#include <stddef.h>

// Most bytes of shared memory a thread block may have: on sm_86 and sm_89, which run the sm_80 kernels, and on sm_90.
constexpr size_t MAX_SHARED_BYTES = 99 * 1024, MAX_SHARED_BYTES_SM90 = 227 * 1024;

// The address of a T in shared memory. An array is indexed like one.
template <class T> struct shared_ref {
    using type = T;
    shared_address address;

    RT_DEVICE operator shared_address() const { return address; }
};
template <class T, int N> struct shared_ref<T[N]> {
    using type = T[N];
    shared_address address;

    RT_DEVICE operator shared_address() const { return address; }
    RT_DEVICE shared_ref<T> operator[](int i) const { return {address + (shared_address)(i * (int)sizeof(T))}; }
};

// The member of the struct that a shared_ref addresses.
#define RT_SHARED(ref, member)                                                                                         \
    shared_ref<decltype(decltype(ref)::type::member)> {                                                                \
        (ref).address + (shared_address)offsetof(typename decltype(ref)::type, member)                                 \
    }

template <class T> RT_DEVICE T ld_shared(shared_ref<T> from) { return ld_shared<T>(from.address); }
template <class T> RT_DEVICE void st_shared(shared_ref<T> to, const typename shared_ref<T>::type &value) {
    st_shared<T>(to.address, value);
}

#endif // RINGTILE_CUDA_SHARED_CUH
