// What the entry points check of the caller's arrays, so that the code behind them computes offsets without a thought:
// that an array fits, that an output overlaps neither itself nor another array, and that a pointer can point to its
// elements.
#ifndef RINGTILE_ARRAYS_H
#define RINGTILE_ARRAYS_H

#include "ringtile/base.h"

#ifdef __cplusplus
extern "C" {
#endif

// Returns the status, and remembers what rt_wrong_argument says of it. Names are string literals.
rt_status rt_wrong(rt_status status, const char *argument);
rt_status rt_wrong_pair(const char *output, const char *other); // RT_SHARED_MEMORY

#ifdef __cplusplus
}
#endif

enum { RT_MAX_DIMS = 16 };

// More than any machine addresses, and so little that the sum of a few such sizes still fits int64_t.
#define RT_MAX_BYTES (INT64_C(1) << 60)

// Multiplies *product, in [0, RT_MAX_BYTES], by a factor >= 0; false if the result is above RT_MAX_BYTES.
static inline bool rt_multiply_fits(int64_t *product, int64_t factor) {
    if (factor > 0 && *product > RT_MAX_BYTES / factor) return false;
    *product *= factor;
    return true;
}

// Parts of a workspace begin at multiples of 64 bytes.
static inline int64_t rt_round_up_64(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// Lays parts of a workspace one after another; returns the bytes of all.
//   sizes (num) bytes;  parts (num), where each begins, written unless workspace is NULL
static inline int64_t rt_lay_out(void *workspace, int num, const int64_t *sizes, void **parts) {
    int64_t num_bytes = 0;
    for (int i = 0; i < num; i++) {
        if (workspace != NULL) parts[i] = (char *)workspace + num_bytes;
        num_bytes += rt_round_up_64(sizes[i]);
    }
    return num_bytes;
}

// *num_bytes = what all workers share + num_workers scratches.    RT_TOO_LARGE: more than any array may have
static inline rt_status rt_workspace_fits(int64_t shared, int64_t scratch, int64_t num_workers, int64_t *num_bytes) {
    if (!rt_multiply_fits(&scratch, num_workers) || scratch > RT_MAX_BYTES - shared)
        return rt_wrong(RT_TOO_LARGE, "num_workers");
    *num_bytes = shared + scratch;
    return RT_OK;
}

// The number in [0, most] next to x.
static inline int64_t rt_clamp(int64_t x, int64_t most) { return x < 0 ? 0 : x > most ? most : x; }

// Whether the elements of an array take at most RT_MAX_BYTES, and so does the way from one element to any other, by
// any sum of steps. A size of 0 counts as 1, so that products of some sizes of an empty array fit as well.
//   sizes (ndim) >= 0;  strides (ndim) elements, of any sign, or NULL if the array is contiguous
static inline bool rt_array_fits(int64_t ndim, const int64_t *sizes, const int64_t *strides, int64_t element_bytes) {
    if (element_bytes > RT_MAX_BYTES) return false;
    int64_t num_bytes = element_bytes, reach = element_bytes;
    for (int64_t d = 0; d < ndim; d++) {
        if (sizes[d] < 2) continue; // takes no step
        if (!rt_multiply_fits(&num_bytes, sizes[d])) return false;
        if (strides == NULL) continue;
        if (strides[d] < -RT_MAX_BYTES || strides[d] > RT_MAX_BYTES) return false;
        int64_t way = strides[d] < 0 ? -strides[d] : strides[d];
        if (!rt_multiply_fits(&way, sizes[d] - 1) || !rt_multiply_fits(&way, element_bytes)) return false;
        reach += way;
        if (reach > RT_MAX_BYTES) return false;
    }
    return true;
}

// False if every stride, from the smallest to the largest, steps over all elements that the smaller ones reach, as in
// any permuted, sliced or padded array. A dim of size 1 takes no step; ndim <= RT_MAX_DIMS, and the array fits.
static inline bool rt_overlaps(int64_t ndim, const int64_t *sizes, const int64_t *strides) {
    for (int64_t d = 0; d < ndim; d++)
        if (sizes[d] == 0) return false;
    bool done[RT_MAX_DIMS] = {false};
    int64_t reach = 0; // offset of the last element over the dims done so far
    for (int64_t i = 0; i < ndim; i++) {
        int64_t next = -1;
        for (int64_t d = 0; d < ndim; d++)
            if (!done[d] && (next < 0 || strides[d] < strides[next])) next = d;
        done[next] = true;
        if (sizes[next] == 1) continue;
        if (strides[next] <= reach) return true;
        reach += (sizes[next] - 1) * strides[next];
    }
    return false;
}

// The bytes of an array: [begin, end) is empty if the array is.
typedef struct rt_bytes {
    const char *name;
    uintptr_t first, begin, end; // first: of element 0
    bool is_dense;               // the elements fill [begin, end)
} rt_bytes;

// Of an array that fits; strides as in rt_array_fits.
static inline rt_bytes rt_bytes_of(const char *name, const void *array, int64_t ndim, const int64_t *sizes,
                                   const int64_t *strides, int64_t element_bytes) {
    int64_t num_bytes = element_bytes, before = 0, beyond = element_bytes;
    for (int64_t d = 0; d < ndim; d++) {
        const int64_t way = strides == NULL || sizes[d] < 2 ? 0 : (sizes[d] - 1) * strides[d] * element_bytes;
        num_bytes *= sizes[d];
        before += way < 0 ? -way : 0;
        beyond += way > 0 ? way : 0;
    }
    if (strides == NULL) beyond = num_bytes;
    const uintptr_t first = (uintptr_t)array;
    rt_bytes bytes = {name, first, first - (uintptr_t)before, first + (uintptr_t)beyond, num_bytes == before + beyond};
    if (num_bytes == 0) bytes.end = bytes.begin;
    return bytes;
}

// Whether two arrays certainly share a byte. Two arrays with gaps, such as dk and dv in the rows of one buffer, may
// interleave: of those, only arrays that begin with the same element are caught.
static inline bool rt_share_memory(rt_bytes a, rt_bytes b) {
    if (a.begin >= b.end || b.begin >= a.end) return false;
    if (a.first == b.first || (a.is_dense && b.is_dense)) return true;
    return (a.is_dense && b.first >= a.begin && b.first < a.end) ||
           (b.is_dense && a.first >= b.begin && a.first < b.end);
}

// RT_SHARED_MEMORY if one of the first num_outputs arrays shares memory with any other.
static inline rt_status rt_outputs_share_memory(const rt_bytes *arrays, int64_t num_outputs, int64_t num_arrays) {
    for (int64_t i = 0; i < num_outputs; i++)
        for (int64_t j = i + 1; j < num_arrays; j++)
            if (rt_share_memory(arrays[i], arrays[j])) return rt_wrong_pair(arrays[i].name, arrays[j].name);
    return RT_OK;
}

// Whether a pointer can point to elements of this size: it is not NULL, and is aligned to them.
static inline bool rt_points_to(const void *array, int64_t element_bytes) {
    return array != NULL && (uintptr_t)array % (uintptr_t)element_bytes == 0;
}

// ---- the arrays of a call ----------------------------------------------------------------------

// Contiguous if stride is NULL, else `stride` counts the steps of all dims but the last, whose elements are neighbours.
typedef struct rt_array {
    const char *name;
    const void *data;
    int64_t element_bytes, ndim, sizes[5];
    const int64_t *stride;
    bool is_optional; // there is none if data is NULL
} rt_array;

// That of a field of params.
#define RT_ARRAY(p, field, ...) ((rt_array){#field, (p)->field, __VA_ARGS__})

enum { RT_MAX_ARRAYS = 24 };

typedef struct rt_arrays {
    int64_t num_outputs, count;
    rt_array list[RT_MAX_ARRAYS];
} rt_arrays;

// Outputs come first.
static inline void rt_add_array(rt_arrays *all, bool is_output, rt_array x) {
    all->list[all->count++] = x;
    if (is_output) all->num_outputs = all->count;
}

// RT_TOO_LARGE, RT_BAD_POINTER, RT_BAD_STRIDE, RT_SHARED_MEMORY
static inline rt_status rt_check_arrays(const rt_arrays *all) {
    rt_bytes bytes[RT_MAX_ARRAYS] = {{NULL, 0, 0, 0, false}};
    for (int64_t i = 0; i < all->count; i++) {
        const rt_array *x = &all->list[i];
        if (x->is_optional && x->data == NULL) continue;
        int64_t steps[5] = {0};
        for (int64_t d = 0; x->stride != NULL && d < x->ndim; d++) steps[d] = d == x->ndim - 1 ? 1 : x->stride[d];
        const int64_t *strides = x->stride == NULL ? NULL : steps;
        if (!rt_array_fits(x->ndim, x->sizes, strides, x->element_bytes)) return rt_wrong(RT_TOO_LARGE, x->name);
        bool empty = false;
        for (int64_t d = 0; d < x->ndim; d++) empty = empty || x->sizes[d] == 0;
        if (!empty && !rt_points_to(x->data, x->element_bytes)) return rt_wrong(RT_BAD_POINTER, x->name);
        if (i < all->num_outputs && strides != NULL && rt_overlaps(x->ndim, x->sizes, strides))
            return rt_wrong(RT_BAD_STRIDE, x->name);
        bytes[i] = rt_bytes_of(x->name, x->data, x->ndim, x->sizes, strides, x->element_bytes);
        if (empty) bytes[i].end = bytes[i].begin;
    }
    return rt_outputs_share_memory(bytes, all->num_outputs, all->count);
}

#endif // RINGTILE_ARRAYS_H
