// Layouts as lists of runs: the checks, and the positions that a list holds.
#include "runs.h"

#include <string.h>

static rt_status check_list(const rt_run *runs, int64_t num_runs) {
    if (num_runs < 0) return RT_BAD_SHAPE;
    if (num_runs > 0 && runs == NULL) return RT_BAD_POINTER;
    return RT_OK;
}

// Linear for lists in local order, the usual ones; quadratic otherwise.
static bool share_local_tokens(const rt_run *runs, int64_t num_runs) {
    int64_t filled_until = 0;
    for (int64_t r = 0; r < num_runs; r++) {
        const int64_t begin = runs[r].local_begin, end = begin + runs[r].length;
        for (int64_t other = 0; begin < filled_until && other < r; other++)
            if (begin < runs[other].local_begin + runs[other].length && runs[other].local_begin < end)
                return true;
        if (end > filled_until) filled_until = end;
    }
    return false;
}

static int64_t last_position(const rt_run *run) {
    return run->global_begin + (run->length - 1) * run->stride;
}

// Whether two runs share a global position. It is enough to try a->stride positions of b: modulo a->stride, b's
// positions repeat after that.
static bool share_a_position(const rt_run *a, const rt_run *b) {
    if (a->stride > b->stride) return share_a_position(b, a);
    const int64_t distance = a->global_begin - b->global_begin, last = last_position(a);
    const int64_t first = distance > 0 ? (distance - 1) / b->stride + 1 : 0; // of b, inside the range of a
    for (int64_t j = first; j < b->length && j - first < a->stride; j++) {
        const int64_t position = b->global_begin + j * b->stride;
        if (position > last) return false;
        if ((position - a->global_begin) % a->stride == 0) return true;
    }
    return false;
}

// Linear for lists in global order whose runs do not interleave; quadratic otherwise.
static bool share_positions(const rt_run *runs, int64_t num_runs) {
    int64_t reached = -1;
    for (int64_t r = 0; r < num_runs; r++) {
        for (int64_t other = 0; runs[r].global_begin <= reached && other < r; other++)
            if (share_a_position(&runs[r], &runs[other])) return true;
        if (last_position(&runs[r]) > reached) reached = last_position(&runs[r]);
    }
    return false;
}

rt_status rt_runs_check_inside(const rt_run *runs, int64_t num_runs, int64_t local_len, int64_t global_len) {
    const rt_status status = check_list(runs, num_runs);
    if (status != RT_OK) return status;
    if (local_len < 0 || global_len < 0) return RT_BAD_SHAPE;
    for (int64_t r = 0; r < num_runs; r++) {
        const rt_run run = runs[r];
        if (run.length < 1 || run.stride < 1) return RT_BAD_RUN;
        if (run.global_begin < 0 || run.global_begin >= global_len) return RT_BAD_RUN;
        // global_begin + (length - 1) * stride < global_len, and likewise for the local end, arranged so that
        // no step can overflow.
        if (run.length - 1 > (global_len - 1 - run.global_begin) / run.stride) return RT_BAD_RUN;
        if (run.local_begin < 0 || run.length > local_len || run.local_begin > local_len - run.length)
            return RT_BAD_RUN;
    }
    return share_local_tokens(runs, num_runs) || share_positions(runs, num_runs) ? RT_BAD_RUN : RT_OK;
}

rt_status rt_runs_local_len(const rt_run *runs, int64_t num_runs, int64_t global_len, int64_t *local_len) {
    const rt_status status = check_list(runs, num_runs);
    if (status != RT_OK) return status;
    *local_len = 0;
    for (int64_t r = 0; r < num_runs; r++) {
        if (runs[r].length < 1) return RT_BAD_RUN;
        if (runs[r].length > global_len - *local_len) return RT_BAD_LAYOUT;
        *local_len += runs[r].length;
    }
    return RT_OK;
}

rt_status rt_runs_check(const rt_run *runs, int64_t num_runs, int64_t local_len) {
    return rt_runs_check_inside(runs, num_runs, local_len, INT64_MAX);
}

rt_status rt_layout_check(const rt_run *runs, const int64_t *run_offsets, int64_t num_ranks, int64_t seq_len,
                          uint8_t *seen) {
    if (num_ranks < 1 || seq_len < 0) return RT_BAD_SHAPE;
    if (run_offsets == NULL || (seq_len > 0 && seen == NULL)) return RT_BAD_POINTER;
    if (run_offsets[0] != 0) return RT_BAD_LAYOUT;

    // Pass 1, rank by rank: every run lies inside the sequence, and the runs fill the rank's local tokens.
    int64_t total = 0;
    for (int64_t rank = 0; rank < num_ranks; rank++) {
        const int64_t num_runs = run_offsets[rank + 1] - run_offsets[rank];
        if (num_runs < 0) return RT_BAD_LAYOUT;
        const rt_run *rank_runs = num_runs > 0 && runs != NULL ? runs + run_offsets[rank] : NULL;
        int64_t local_len;
        rt_status status = rt_runs_local_len(rank_runs, num_runs, seq_len - total, &local_len);
        if (status == RT_OK) status = rt_runs_check_inside(rank_runs, num_runs, local_len, seq_len);
        if (status != RT_OK) return status;
        total += local_len;
    }
    if (total != seq_len) return RT_BAD_LAYOUT;

    // Pass 2, over all ranks: S positions, none of them twice, must be all of 0..S-1.
    if (seq_len > 0) memset(seen, 0, (size_t)seq_len);
    for (int64_t r = 0; r < run_offsets[num_ranks]; r++) {
        for (int64_t j = 0; j < runs[r].length; j++) {
            uint8_t *at = &seen[runs[r].global_begin + j * runs[r].stride];
            if (*at) return RT_BAD_LAYOUT;
            *at = 1;
        }
    }
    return RT_OK;
}

rt_status rt_runs_positions(const rt_run *runs, int64_t num_runs, int64_t *positions, int64_t local_len) {
    const rt_status status = rt_runs_check(runs, num_runs, local_len);
    if (status != RT_OK) return status;
    int64_t filled = 0;
    for (int64_t r = 0; r < num_runs; r++) filled += runs[r].length;
    if (filled != local_len) return RT_BAD_RUN;
    if (local_len > 0 && positions == NULL) return RT_BAD_POINTER;

    for (int64_t r = 0; r < num_runs; r++)
        for (int64_t j = 0; j < runs[r].length; j++)
            positions[runs[r].local_begin + j] = runs[r].global_begin + j * runs[r].stride;
    return RT_OK;
}
