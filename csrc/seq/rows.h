// The preconditions of the copies of rows, for every device.
#ifndef RINGTILE_SEQ_ROWS_H
#define RINGTILE_SEQ_ROWS_H

#include "../arrays.h"
#include "../ringtile.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum rt_rows_pass { RT_ROWS_PACK, RT_ROWS_UNPACK, RT_ROWS_ADD } rt_rows_pass;

// *num_bytes: of the local tensors; 0 when there is nothing to copy, and of no use with an error.
//   dtype   of RT_ROWS_ADD
rt_status rt_rows_check(const rt_rows_params *p, rt_rows_pass pass, rt_dtype dtype, int64_t *num_bytes);

#ifdef __cplusplus
}
#endif
#endif // RINGTILE_SEQ_ROWS_H
