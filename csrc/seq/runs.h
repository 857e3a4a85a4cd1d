// Checks on a list of runs, shared by layouts, shards and plans.
#ifndef RINGTILE_SEQ_RUNS_H
#define RINGTILE_SEQ_RUNS_H

#include "../ringtile.h"

// Checks that every run is well formed, lies inside local_len local tokens and inside positions [0, global_len), and
// shares no token with another run. Linear for runs in local order.
//   RT_BAD_SHAPE, RT_BAD_POINTER, RT_BAD_RUN
rt_status rt_runs_check_tokens(const rt_run *runs, int64_t num_runs, int64_t local_len, int64_t global_len);

// The same, and that no run shares a position with another, so that unshard inverts shard. Linear for runs in local and
// global order that do not interleave, as a rank's are; quadratic otherwise.
rt_status rt_runs_check_inside(const rt_run *runs, int64_t num_runs, int64_t local_len, int64_t global_len);

// *local_len: the sum of the lengths. Runs that pass rt_runs_check_inside with it fill the local tokens exactly. One
// rank holds no position twice, so a sum above global_len is refused before it can overflow.
//   RT_BAD_SHAPE, RT_BAD_POINTER, RT_BAD_RUN, RT_BAD_LAYOUT
rt_status rt_runs_local_len(const rt_run *runs, int64_t num_runs, int64_t global_len, int64_t *local_len);

#endif // RINGTILE_SEQ_RUNS_H
