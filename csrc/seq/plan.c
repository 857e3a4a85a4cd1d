// The keys that one rank needs from another, and the digest by which ranks notice that they disagree.
// Shapes: S global tokens, W ranks, R runs of all ranks; mask rows are (mask_batch, S).
#include "../arrays.h"
#include "runs.h"

#include <string.h>

typedef struct rank_runs {
    const rt_run *runs;
    int64_t num_runs;
} rank_runs;

static rt_status check_plan(const rt_plan_params *p) {
    if (p == NULL) return RT_BAD_POINTER;
    if (p->num_ranks < 1 || p->seq_len < 0 || p->seq_len > INT32_MAX || p->mask_batch < 0) return RT_BAD_SHAPE;
    if (!rt_points_to(p->run_offsets, sizeof(int64_t))) return RT_BAD_POINTER;
    const int64_t sizes[] = {p->mask_batch, p->seq_len};
    if (!rt_array_fits(2, sizes, NULL, sizeof(*p->begin))) return RT_TOO_LARGE;
    const int64_t num_intervals = p->mask_batch * p->seq_len;
    if (num_intervals == 0) return RT_OK;
    if (num_intervals > INT64_MAX / p->seq_len) return RT_TOO_LARGE; // pairs, if every query attends every key
    const bool mask = rt_points_to(p->begin, sizeof(*p->begin)) && rt_points_to(p->end, sizeof(*p->end));
    return mask ? RT_OK : RT_BAD_POINTER;
}

static rt_status runs_of_rank(const rt_plan_params *p, int64_t rank, rank_runs *of_rank) {
    if (rank < 0 || rank >= p->num_ranks) return RT_BAD_RANK;
    const int64_t first = p->run_offsets[rank];
    if (first < 0 || p->run_offsets[rank + 1] < first) return RT_BAD_LAYOUT;
    of_rank->num_runs = p->run_offsets[rank + 1] - first;
    of_rank->runs = of_rank->num_runs > 0 && p->runs != NULL ? p->runs + first : NULL;

    int64_t local_len;
    const rt_status status = rt_runs_local_len(of_rank->runs, of_rank->num_runs, p->seq_len, &local_len);
    if (status != RT_OK) return status;
    return rt_runs_check_inside(of_rank->runs, of_rank->num_runs, local_len, p->seq_len);
}

rt_status rt_plan_below(const rt_plan_params *p, int64_t key_rank, int32_t *below) {
    rank_runs keys;
    rt_status status = check_plan(p);
    if (status == RT_OK) status = runs_of_rank(p, key_rank, &keys);
    if (status != RT_OK) return status;
    if (!rt_points_to(below, sizeof(*below))) return RT_BAD_POINTER;

    // Pass 1: below[g + 1] = 1 where g is a key. Pass 2: running sums.
    memset(below, 0, (size_t)(p->seq_len + 1) * sizeof(*below));
    for (int64_t r = 0; r < keys.num_runs; r++) {
        const rt_run run = keys.runs[r];
        for (int64_t j = 0; j < run.length; j++) below[run.global_begin + j * run.stride + 1] = 1;
    }
    for (int64_t g = 0; g < p->seq_len; g++) below[g + 1] += below[g];
    return RT_OK;
}

static int64_t clamp(int64_t position, int64_t seq_len) {
    return position < 0 ? 0 : position < seq_len ? position : seq_len;
}

// The keys that `attended` counts; -1 if below does not begin with 0 or ends outside 0..S.
static int64_t num_counted(const rt_plan_params *p, const int32_t *below) {
    if (below == NULL) return p->seq_len;
    const int64_t num_keys = below[p->seq_len];
    return below[0] != 0 || num_keys < 0 || num_keys > p->seq_len ? -1 : num_keys;
}

// The place in `attended` of global position g; -1 if below lies.
static int64_t place_of(const int32_t *below, int64_t g, int64_t num_keys) {
    if (below == NULL) return g;
    return below[g] < 0 || below[g] > num_keys ? -1 : below[g];
}

rt_status rt_plan_attended(const rt_plan_params *p, int64_t query_rank, const int32_t *below, int64_t *attended) {
    rank_runs queries;
    rt_status status = check_plan(p);
    if (status == RT_OK) status = runs_of_rank(p, query_rank, &queries);
    if (status != RT_OK) return status;
    if (!rt_points_to(attended, sizeof(*attended)) || (uintptr_t)below % sizeof(*below) != 0) return RT_BAD_POINTER;
    const int64_t seq_len = p->seq_len, num_keys = num_counted(p, below);
    if (num_keys < 0) return RT_BAD_PLAN;

    // Pass 1: attended[j] = how many more queries attend key j than key j - 1. Pass 2: running sums.
    memset(attended, 0, (size_t)(num_keys + 1) * sizeof(*attended));
    const int32_t *begin = p->begin, *end = p->end;
    for (int64_t b = 0; b < p->mask_batch; b++) {
        for (int64_t r = 0; r < queries.num_runs; r++) {
            const rt_run run = queries.runs[r];
            for (int64_t j = 0; j < run.length; j++) {
                const int64_t i = b * seq_len + run.global_begin + j * run.stride;
                if (begin[i] >= end[i]) continue;
                const int64_t first = place_of(below, clamp(begin[i], seq_len), num_keys),
                              last = place_of(below, clamp(end[i], seq_len), num_keys);
                if (first < 0 || last < 0) return RT_BAD_PLAN;
                attended[first]++;
                attended[last]--;
            }
        }
    }
    for (int64_t j = 0; j < num_keys; j++) attended[j + 1] += attended[j];
    return RT_OK;
}

// The run that begins at a local token; it exists, because the runs fill the local tokens. The search starts at
// `guess`, which is already right when the runs are listed in local order.
static const rt_run *run_at(const rank_runs *keys, int64_t local_begin, int64_t guess) {
    while (keys->runs[guess].local_begin != local_begin) guess = (guess + 1) % keys->num_runs;
    return &keys->runs[guess];
}

rt_status rt_plan_needed(const rt_plan_params *p, int64_t key_rank, const int32_t *below, const int64_t *attended,
                         rt_run *needed, int64_t capacity, int64_t *num_needed, int64_t *num_pairs) {
    rank_runs keys;
    rt_status status = check_plan(p);
    if (status == RT_OK) status = runs_of_rank(p, key_rank, &keys);
    if (status != RT_OK) return status;
    if (capacity < 0) return RT_BAD_SHAPE;
    if (!rt_array_fits(1, &capacity, NULL, sizeof(*needed))) return RT_TOO_LARGE;
    if (!rt_points_to(num_needed, sizeof(*num_needed)) || !rt_points_to(num_pairs, sizeof(*num_pairs)) ||
        !rt_points_to(attended, sizeof(*attended)) || (uintptr_t)below % sizeof(*below) != 0 ||
        (capacity > 0 && !rt_points_to(needed, sizeof(int64_t))))
        return RT_BAD_POINTER;
    const int64_t num_counts = num_counted(p, below), most_queries = p->mask_batch * p->seq_len;
    if (num_counts < 0) return RT_BAD_PLAN;

    // Visits the keys in local order. `piece` is the run being grown. A key that does not continue it, because a key in
    // between is not needed or a run of the layout ended, starts a new one.
    rt_run piece = {0, 1, 0, 0};
    int64_t count = 0, pairs = 0, local = 0;
    for (int64_t r = 0; r < keys.num_runs; r++) {
        const rt_run *run = run_at(&keys, local, r);
        for (int64_t j = 0; j < run->length; j++, local++) {
            const int64_t g = run->global_begin + j * run->stride;
            const int64_t place = place_of(below, g, num_counts);
            const int64_t num_queries = place < 0 ? -1 : attended[place];
            if (num_queries < 0 || num_queries > most_queries) return RT_BAD_PLAN;
            if (num_queries == 0) continue;
            pairs += num_queries;
            const bool continues = piece.length > 0 && piece.stride == run->stride &&
                                   piece.local_begin + piece.length == local &&
                                   g - piece.global_begin == piece.length * piece.stride; // cannot overflow
            if (!continues) {
                piece = (rt_run){.global_begin = g, .stride = run->stride, .local_begin = local};
                count++;
            }
            piece.length++;
            if (count <= capacity) needed[count - 1] = piece;
        }
    }
    *num_needed = count;
    *num_pairs = pairs;
    return count <= capacity ? RT_OK : RT_CAPACITY;
}

// Multiplication by an odd number and h ^ (h >> n) are both bijections of 64 bits, so arrays that differ in one word
// never collide. A word's place counts, because every later word multiplies it again.
static uint64_t mix(uint64_t hash, uint64_t word) {
    hash = (hash ^ word) * UINT64_C(0x9e3779b97f4a7c15);
    return hash ^ (hash >> 32);
}

rt_status rt_digest(const void *bytes, int64_t num_bytes, uint64_t seed, uint64_t *digest) {
    if (num_bytes < 0) return RT_BAD_SHAPE;
    if ((num_bytes > 0 && bytes == NULL) || !rt_points_to(digest, sizeof(*digest))) return RT_BAD_POINTER;
    enum { LANES = 4, STEP_BYTES = LANES * (int)sizeof(uint64_t) };
    // Independent lanes, because a single chain of multiplications would be bound by its latency.
    uint64_t lane[LANES], word[LANES];
    for (int i = 0; i < LANES; i++) lane[i] = mix(seed, (uint64_t)i + 1);

    const char *at = bytes;
    int64_t left = num_bytes;
    for (; left >= STEP_BYTES; left -= STEP_BYTES, at += STEP_BYTES) {
        memcpy(word, at, STEP_BYTES);
        for (int i = 0; i < LANES; i++) lane[i] = mix(lane[i], word[i]);
    }
    if (left > 0) {
        memset(word, 0, STEP_BYTES);
        memcpy(word, at, (size_t)left);
        for (int i = 0; i < LANES; i++) lane[i] = mix(lane[i], word[i]);
    }
    uint64_t hash = mix(seed, (uint64_t)num_bytes); // distinguishes a tail of zeros from no tail
    for (int i = 0; i < LANES; i++) hash = mix(hash, lane[i]);
    *digest = mix(hash, hash >> 32);
    return RT_OK;
}
