// The attention kernels, compiled once per instruction set for its math type (vec.h).
#include "backward.h"
#include "delta.h"
#include "forward.h"
#include "merge.h"

static int64_t attn_num_tasks(const rt_attn_params *p) { return grid_of(p).num_tasks; }
