// What layouts, shards and plans share: checks on a list of runs.
#ifndef RINGTILE_SEQ_RUNS_H
#define RINGTILE_SEQ_RUNS_H

#include "../ringtile.h"

// Every run is well formed, lies inside local_len local tokens, names positions inside [0, global_len), and shares none
// of either with another run: what is copied along the runs can be copied back.
//   RT_BAD_SHAPE, RT_BAD_POINTER, RT_BAD_RUN
rt_status rt_runs_check_inside(const rt_run *runs, int64_t num_runs, int64_t local_len, int64_t global_len);

// *local_len: the sum of the lengths; runs that pass rt_runs_check_inside with it fill it exactly. The runs of one rank can hold no position twice, so a sum above
// global_len is refused before it can overflow.
//   RT_BAD_SHAPE, RT_BAD_POINTER, RT_BAD_RUN, RT_BAD_LAYOUT
rt_status rt_runs_local_len(const rt_run *runs, int64_t num_runs, int64_t global_len, int64_t *local_len);

#endif // RINGTILE_SEQ_RUNS_H
