// Layouts as lists of runs: the checks, and the positions that a list holds.
#include "runs.h"
#include "../arrays.h"

static rt_status check_list(const rt_run *runs, int64_t num_runs) {
    if (num_runs < 0) return rt_wrong(RT_BAD_SHAPE, "num_runs");
    return num_runs > 0 && !rt_points_to(runs, sizeof(int64_t)) ? rt_wrong(RT_BAD_POINTER, "runs") : RT_OK;
}

// Linear for lists in local order, the usual ones; quadratic otherwise.
static bool share_local_tokens(const rt_run *runs, int64_t num_runs) {
    int64_t filled_until = 0;
    for (int64_t r = 0; r < num_runs; r++) {
        const int64_t begin = runs[r].local_begin, end = begin + runs[r].length;
        for (int64_t other = 0; begin < filled_until && other < r; other++)
            if (begin < runs[other].local_begin + runs[other].length && runs[other].local_begin < end) return true;
        if (end > filled_until) filled_until = end;
    }
    return false;
}

static int64_t last_position(const rt_run *run) { return run->global_begin + (run->length - 1) * run->stride; }

// The greatest common divisor of a and b, both at least 1, and *inverse: a / gcd times it is 1 modulo b / gcd.
static int64_t euclid(int64_t a, int64_t b, int64_t *inverse) {
    int64_t x = a, y = b, of_x = 1, of_y = 0; // x = of_x * a modulo b, and y likewise
    while (y > 0) {
        const int64_t quotient = x / y, rest = x % y, of_rest = of_x - quotient * of_y;
        x = y, y = rest;
        of_x = of_y, of_y = of_rest;
    }
    const int64_t modulus = b / x;
    *inverse = of_x % modulus < 0 ? of_x % modulus + modulus : of_x % modulus;
    return x;
}

// a * b modulo m, of numbers in [0, m).
static int64_t multiply_modulo(int64_t a, int64_t b, int64_t m) {
    __extension__ typedef unsigned __int128 wide; // not ISO C, hence the keyword
    return (int64_t)((wide)a * (wide)b % (wide)m);
}

// Whether two runs share a global position, for strides and lengths of any size in the same time. Position j of a is
// in b's progression if a->stride * j = distance modulo b->stride: for every `period`-th j, if any.
static bool share_a_position(const rt_run *a, const rt_run *b) {
    int64_t inverse;
    const int64_t distance = b->global_begin - a->global_begin;
    const int64_t gcd = euclid(a->stride, b->stride, &inverse), period = b->stride / gcd;
    if (distance % gcd != 0) return false;
    const int64_t steps = distance / gcd % period;
    const int64_t solution = multiply_modulo(steps < 0 ? steps + period : steps, inverse, period);
    const int64_t first = distance > 0 ? (distance - 1) / a->stride + 1 : 0; // of a, inside the range of b
    if (first >= a->length) return false;
    int64_t wait = solution - first % period; // until the next solution
    if (wait < 0) wait += period;
    return wait < a->length - first && a->global_begin + (first + wait) * a->stride <= last_position(b);
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

rt_status rt_runs_check_tokens(const rt_run *runs, int64_t num_runs, int64_t local_len, int64_t global_len) {
    const rt_status status = check_list(runs, num_runs);
    if (status != RT_OK) return status;
    if (local_len < 0 || global_len < 0) return rt_wrong(RT_BAD_SHAPE, "local_len or global_len");
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
    return share_local_tokens(runs, num_runs) ? RT_BAD_RUN : RT_OK;
}

rt_status rt_runs_check_inside(const rt_run *runs, int64_t num_runs, int64_t local_len, int64_t global_len) {
    const rt_status status = rt_runs_check_tokens(runs, num_runs, local_len, global_len);
    return status == RT_OK && share_positions(runs, num_runs) ? RT_BAD_RUN : status;
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
    return rt_runs_check_tokens(runs, num_runs, local_len, INT64_MAX);
}

// ---- layouts -----------------------------------------------------------------------------------

// The place with the least position comes first, and that of i before those of 2 i + 1 and 2 i + 2: all hold but `at`.
static void sift_down(rt_layout_place *heap, int64_t count, int64_t at) {
    for (int64_t next = 2 * at + 1; next < count; at = next, next = 2 * at + 1) {
        if (next + 1 < count && heap[next + 1].position < heap[next].position) next++;
        if (heap[at].position <= heap[next].position) return;
        const rt_layout_place lower = heap[next];
        heap[next] = heap[at], heap[at] = lower;
    }
}

static void make_heap(rt_layout_place *places, int64_t count) {
    for (int64_t at = count / 2 - 1; at >= 0; at--) sift_down(places, count, at);
}

static void sort_descending(rt_layout_place *places, int64_t count) {
    make_heap(places, count);
    for (int64_t end = count - 1; end > 0; end--) {
        const rt_layout_place least = places[0];
        places[0] = places[end], places[end] = least;
        sift_down(places, end, 0);
    }
}

// Whether runs that hold `length` positions from `begin` on, with repetitions, hold each of so many: by pairs of runs,
// or position by position where those are fewer.
static bool fill(const rt_run *runs, rt_layout_place *places, int64_t count, int64_t begin, int64_t length) {
    if ((count - 1) / 2 <= length / count) {
        for (int64_t i = 1; i < count; i++)
            for (int64_t other = 0; other < i; other++)
                if (share_a_position(&runs[places[i].run], &runs[places[other].run])) return false;
        return true;
    }
    make_heap(places, count);
    for (int64_t position = begin; count > 0; position++) {
        const rt_run *run = &runs[places->run];
        if (places->position != position) return false;
        if (position == last_position(run))
            *places = places[--count];
        else
            places->position += run->stride;
        sift_down(places, count, 0);
    }
    return true;
}

rt_status rt_layout_check(const rt_run *runs, const int64_t *run_offsets, int64_t num_ranks, int64_t seq_len,
                          rt_layout_place *places) {
    if (num_ranks < 1 || seq_len < 0) return rt_wrong(RT_BAD_SHAPE, "num_ranks or seq_len");
    if (!rt_points_to(run_offsets, sizeof(int64_t))) return rt_wrong(RT_BAD_POINTER, "run_offsets");
    if (seq_len > 0 && !rt_points_to(places, sizeof(int64_t))) return rt_wrong(RT_BAD_POINTER, "places");
    if (run_offsets[0] != 0) return RT_BAD_LAYOUT;

    // Pass 1, rank by rank: every run lies inside the sequence, and the runs fill the rank's local tokens.
    int64_t total = 0;
    for (int64_t rank = 0; rank < num_ranks; rank++) {
        if (run_offsets[rank + 1] < run_offsets[rank]) return RT_BAD_LAYOUT;
        const int64_t num_runs = run_offsets[rank + 1] - run_offsets[rank];
        const rt_run *rank_runs = num_runs > 0 && runs != NULL ? runs + run_offsets[rank] : NULL;
        int64_t local_len;
        rt_status status = rt_runs_local_len(rank_runs, num_runs, seq_len - total, &local_len);
        if (status == RT_OK) status = rt_runs_check_tokens(rank_runs, num_runs, local_len, seq_len);
        if (status != RT_OK) return status;
        total += local_len;
    }
    if (total != seq_len) return RT_BAD_LAYOUT;

    // Pass 2, over all ranks: S positions are all of 0..S-1 if each group of runs that interleave fills its range.
    const int64_t num_runs = run_offsets[num_ranks];
    for (int64_t r = 0; r < num_runs; r++) places[r] = (rt_layout_place){runs[r].global_begin, r};
    sort_descending(places, num_runs);
    for (int64_t first, after = num_runs; after > 0; after = first) {
        const int64_t begin = places[after - 1].position;
        int64_t last = begin, held = 0;
        for (first = after; first > 0 && places[first - 1].position <= last; first--) {
            const rt_run *run = &runs[places[first - 1].run];
            if (last_position(run) > last) last = last_position(run);
            held += run->length;
        }
        if (held != last - begin + 1 || !fill(runs, places + first, after - first, begin, held)) return RT_BAD_LAYOUT;
    }
    return RT_OK;
}

rt_status rt_runs_positions(const rt_run *runs, int64_t num_runs, int64_t *positions, int64_t local_len) {
    const rt_status status = rt_runs_check(runs, num_runs, local_len);
    if (status != RT_OK) return status;
    int64_t filled = 0;
    for (int64_t r = 0; r < num_runs; r++) filled += runs[r].length;
    if (filled != local_len) return RT_BAD_RUN;
    if (local_len > 0 && !rt_points_to(positions, sizeof(*positions))) return rt_wrong(RT_BAD_POINTER, "positions");
    if (!rt_array_fits(1, &local_len, NULL, sizeof(*positions))) return rt_wrong(RT_TOO_LARGE, "local_len");

    for (int64_t r = 0; r < num_runs; r++)
        for (int64_t j = 0; j < runs[r].length; j++)
            positions[runs[r].local_begin + j] = runs[r].global_begin + j * runs[r].stride;
    return RT_OK;
}
