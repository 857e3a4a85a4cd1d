// The preconditions of shard and unshard, and the loops that copy one run, for every device.
#ifndef RINGTILE_SEQ_SHARD_H
#define RINGTILE_SEQ_SHARD_H

#include "../arrays.h"
#include "../ringtile.h"

#ifdef __cplusplus
extern "C" {
#endif

// *num_bytes: of the local tensor; 0 when there is nothing to copy.
//   RT_BAD_SHAPE, RT_BAD_POINTER, RT_BAD_DIM, RT_BAD_RUN, RT_BAD_STRIDE
rt_status rt_shard_check(const rt_shard_params *p, const void *from, const void *to, bool to_global,
                         int64_t *num_bytes);

// A copy of num_elements elements, as nested loops; dim 0 is the outermost. Steps are in bytes.
typedef struct rt_strided_copy {
    int64_t ndim, element_bytes, num_elements;
    int64_t size[RT_MAX_DIMS], from_step[RT_MAX_DIMS], to_step[RT_MAX_DIMS];
    const char *from;
    char *to;
} rt_strided_copy;

// The copy of one run, with as few loops as possible: dims of size 1 are dropped, and neighbouring dims that are
// contiguous in both tensors are merged. At least one loop remains.
rt_strided_copy rt_copy_of_run(const rt_shard_params *p, const rt_run *run, const void *from, void *to, bool to_global);

#ifdef __cplusplus
}
#endif
#endif // RINGTILE_SEQ_SHARD_H
