// The mask of a block of keys as few rectangles with slanted sides.
// Shapes: N queries of a rank, K rows of the block, R runs.
#include "../arrays.h"
#include "../ringtile.h"

// The keys of a block, in the order of rows and positions, and the run in which bounds from .. to - 1 are found: the
// last one that begins at or below them, or the first of all.
typedef struct keys {
    const rt_run *runs;
    int64_t num_runs, first_row, from, to;
    rt_run run;
} keys;

static rt_status check(const rt_pieces_params *p, int64_t capacity) {
    if (p->mask_batch < 0 || p->num_queries < 0 || p->num_keys < 0 || p->num_keys > INT32_MAX || p->num_k_runs < 0 ||
        p->max_stretches < 0 || capacity < 0)
        return rt_wrong(RT_BAD_SHAPE, "mask_batch, num_queries, num_keys, num_k_runs, max_stretches or capacity");
    const int64_t queries[] = {p->mask_batch, p->num_queries}, of_keys[] = {p->mask_batch, p->num_keys};
    if (!rt_array_fits(2, queries, NULL, sizeof(int64_t)) || !rt_array_fits(2, of_keys, NULL, sizeof(int32_t)) ||
        !rt_array_fits(1, &capacity, NULL, sizeof(rt_piece)))
        return rt_wrong(RT_TOO_LARGE, "mask_batch, num_queries, num_keys or capacity");
    if (p->num_k_runs > 0 && !rt_points_to(p->k_runs, sizeof(int64_t))) return rt_wrong(RT_BAD_POINTER, "k_runs");
    const bool two_sides = p->key_begin != NULL || p->key_end != NULL;
    const int32_t *const bounds[] = {p->begin, p->end, p->bounds, p->key_begin, p->key_end};
    for (int i = 0; p->mask_batch * p->num_queries > 0 && i < (two_sides ? 5 : 3); i++)
        if (!rt_points_to(bounds[i], sizeof(int32_t)))
            return rt_wrong(RT_BAD_POINTER, "begin, end, bounds, key_begin or key_end");
    if (two_sides && p->num_queries > 0 && !rt_points_to(p->positions, sizeof(int64_t)))
        return rt_wrong(RT_BAD_POINTER, "positions");
    return RT_OK;
}

// Of runs in the order of rows; *num_keys: of all.
static rt_status check_runs(const rt_pieces_params *p, int64_t *num_keys) {
    *num_keys = 0;
    int64_t row = p->num_k_runs > 0 ? p->k_runs->local_begin : 0, last = -1;
    for (int64_t r = 0; r < p->num_k_runs; r++) {
        const rt_run run = p->k_runs[r];
        if (run.length < 1 || run.stride < 1 || run.global_begin < 0 || run.global_begin > INT32_MAX ||
            run.local_begin < 0 || run.local_begin > p->num_keys || run.length > p->num_keys - run.local_begin ||
            run.length - 1 > (INT32_MAX - run.global_begin) / run.stride)
            return RT_BAD_RUN;
        if (run.local_begin != row || run.global_begin <= last) return rt_wrong(RT_BAD_POSITIONS, "k_runs");
        row += run.length, *num_keys += run.length;
        last = run.global_begin + (run.length - 1) * run.stride;
    }
    return RT_OK;
}

static void find_run(keys *k, int64_t bound) {
    int64_t low = 0, high = k->num_runs;
    while (high - low > 1) {
        const int64_t middle = low + (high - low) / 2;
        if (k->runs[middle].global_begin <= bound)
            low = middle;
        else
            high = middle;
    }
    k->run = k->runs[low];
    k->from = low == 0 ? INT64_MIN : k->run.global_begin;
    k->to = high == k->num_runs ? INT64_MAX : k->runs[high].global_begin;
}

// How many keys are at positions below `bound`, where there are keys. Neighbouring queries ask for neighbouring bounds.
static int32_t num_below(keys *k, int64_t bound) {
    if (bound < k->from || bound >= k->to) find_run(k, bound);
    const int64_t distance = bound - k->run.global_begin, before = k->run.local_begin - k->first_row;
    if (distance <= 0) return (int32_t)before;
    const int64_t inside = k->run.stride == 1 ? distance : (distance - 1) / k->run.stride + 1;
    return (int32_t)(before + (inside < k->run.length ? inside : k->run.length));
}

typedef struct span {
    int64_t low, high; // of keys, in the order of rows; 0 and 0: none
} span;

// What a query attends of the keys [begin, end), whose queries are at positions [from, to).
typedef struct stretch {
    int64_t begin, end, from, to;
} stretch;

static span span_of(const rt_pieces_params *p, const stretch *s, int64_t q) {
    span found = {p->bounds[2 * q], p->bounds[2 * q + 1]};
    if (s->from > INT64_MIN) { // else all keys are one stretch
        if (p->positions[q] < s->from || p->positions[q] >= s->to) return (span){0, 0};
        if (found.low < s->begin) found.low = s->begin;
        if (found.high > s->end) found.high = s->end;
    }
    return found.low < found.high ? found : (span){0, 0};
}

// From one query to the next: 1 if it drops a key, 2 if it gains one, 3 if both, 0 if neither, -1 for all else.
static int step(span from, span to) {
    const int64_t drops = to.low - from.low, gains = to.high - from.high;
    return drops < 0 || drops > 1 || gains < 0 || gains > 1 ? -1 : (int)(drops + 2 * gains);
}

// Appends the pieces of a stretch of keys; false where there is no room.
static bool append_pieces(const rt_pieces_params *p, const stretch *s, int64_t first_row, rt_piece *pieces,
                          int64_t capacity, int64_t *count) {
    const int64_t N = p->num_queries;
    span next = N > 0 ? span_of(p, s, 0) : (span){0, 0};
    for (int64_t q = 0, after; q < N; q = after) {
        const span first = next;
        span last = first;
        int kind = -1;
        after = q + 1;
        if (after < N) next = span_of(p, s, after), kind = step(first, next);
        if (kind < 0 || (kind > 0 && first.low == first.high)) {
            kind = 0;
        } else { // the steps from q on are of one kind up to the next change
            int of_step = kind;
            while (of_step == kind) {
                last = next;
                if (++after == N) break;
                next = span_of(p, s, after), of_step = step(last, next);
            }
        }
        if (first.low == first.high) continue;
        if (*count == capacity) return false;
        pieces[(*count)++] = (rt_piece){q, after, first_row + first.low, first_row + last.high, kind & 1, kind >> 1};
    }
    return true;
}

rt_status rt_pieces(const rt_pieces_params *p, rt_piece *pieces, int64_t capacity, int64_t *counts) {
    if (p == NULL) return rt_wrong(RT_BAD_POINTER, "p");
    int64_t num_keys, count = 0;
    rt_status status = check(p, capacity);
    if (status == RT_OK && ((capacity > 0 && !rt_points_to(pieces, sizeof(int64_t))) ||
                            (p->mask_batch > 0 && !rt_points_to(counts, sizeof(*counts)))))
        return rt_wrong(RT_BAD_POINTER, "pieces or counts");
    if (status == RT_OK) status = check_runs(p, &num_keys);
    if (status != RT_OK) return status;
    const int64_t N = p->num_queries, first_row = num_keys > 0 ? p->k_runs->local_begin : 0;
    keys k = {p->k_runs, p->num_k_runs, first_row, 0, 0, {0, 1, 0, 0}}, of_end = k;
    for (int64_t b = 0; b < p->mask_batch; b++) {
        const int64_t before = count;
        for (int64_t q = 0; num_keys > 0 && q < N; q++) {
            p->bounds[2 * q] = num_below(&k, p->begin[b * N + q]);
            p->bounds[2 * q + 1] = num_below(&of_end, p->end[b * N + q]);
        }
        stretch s = {0, num_keys, INT64_MIN, 0};
        for (int64_t num_stretches = 1; s.begin < num_keys; s.begin = s.end, num_stretches++) {
            if (p->key_begin != NULL && N > 0) {
                const int32_t *from = p->key_begin + b * p->num_keys + first_row,
                              *to = p->key_end + b * p->num_keys + first_row;
                s.end = s.begin + 1, s.from = from[s.begin], s.to = to[s.begin];
                while (s.end < num_keys && from[s.end] == s.from && to[s.end] == s.to) s.end++;
                if (num_stretches > p->max_stretches) return RT_CAPACITY;
            }
            if (!append_pieces(p, &s, first_row, pieces, capacity, &count)) return RT_CAPACITY;
        }
        counts[b] = count - before;
    }
    return RT_OK;
}
