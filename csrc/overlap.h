// Whether a strided array overlaps itself: harmless in an input, an error in an output.
#ifndef RINGTILE_OVERLAP_H
#define RINGTILE_OVERLAP_H

#include <stdbool.h>
#include <stdint.h>

enum { RT_MAX_DIMS = 16 };

// False if every stride, from the smallest to the largest, steps over all elements that the smaller ones reach, as in
// any permuted, sliced or padded array. A dim of size 1 takes no step; ndim <= RT_MAX_DIMS.
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

#endif // RINGTILE_OVERLAP_H
