// Masks with two sides: which pairs of positions lie in each other's intervals, counted without looking at each pair.
// Shapes: S global tokens, X positions on one side, Y on the other.
#include "../arrays.h"
#include "../ringtile.h"

// Positions of a side in rising order, all of 0..S-1 if NULL, and their intervals, by position.
typedef struct side {
    const int32_t *positions, *begin, *end;
    int64_t num;
} side;

static int64_t position_of(const side *s, int64_t i) { return s->positions == NULL ? i : s->positions[i]; }

// How many positions of the side are below `bound`.
static int64_t num_below(const side *s, int64_t bound) {
    if (s->positions == NULL) return bound < 0 ? 0 : bound < s->num ? bound : s->num;
    int64_t low = 0, high = s->num;
    while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        if (s->positions[middle] < bound)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static rt_status check_side(const side *s, int64_t seq_len) {
    if (s->num < 0 || s->num > seq_len) return rt_wrong(RT_BAD_SHAPE, "num_x or num_y");
    if (s->positions == NULL && s->num != seq_len) return rt_wrong(RT_BAD_SHAPE, "num_x or num_y");
    if ((uintptr_t)s->positions % sizeof(*s->positions) != 0) return rt_wrong(RT_BAD_POINTER, "x or y");
    if (s->num > 0 && (!rt_points_to(s->begin, sizeof(*s->begin)) || !rt_points_to(s->end, sizeof(*s->end))))
        return rt_wrong(RT_BAD_POINTER, "x_begin, x_end, y_begin or y_end");
    for (int64_t i = 0, least = 0; s->positions != NULL && i < s->num; i++) {
        if (s->positions[i] < least || s->positions[i] >= seq_len) return rt_wrong(RT_BAD_POSITIONS, "x or y");
        least = s->positions[i] + (int64_t)1;
    }
    return RT_OK;
}

// A binary indexed tree (Fenwick, 1994) over n places: sums of prefixes, and the place where one is exceeded.
static void tree_add(int32_t *tree, int64_t n, int64_t place, int32_t x) {
    for (int64_t i = place + 1; i <= n; i += i & -i) tree[i] += x;
}

static int64_t tree_sum(const int32_t *tree, int64_t num_places) {
    int64_t sum = 0;
    for (int64_t i = num_places; i > 0; i -= i & -i) sum += tree[i];
    return sum;
}

// The first place such that the sum up to it, itself included, is above `sum`; there is one.
static int64_t tree_find(const int32_t *tree, int64_t n, int64_t sum) {
    int64_t at = 0, step = 1;
    while (step <= n / 2) step *= 2;
    for (; step > 0; step /= 2) {
        if (at + step > n || tree[at + step] > sum) continue;
        at += step;
        sum -= tree[at];
    }
    return at;
}

int64_t rt_meetings_scratch_len(int64_t num_x, int64_t num_y) {
    if (num_x < 0 || num_y < 0 || num_x > INT32_MAX || num_y > INT32_MAX) return 0;
    return 2 * (num_x + 1) + 3 * num_y + 1;
}

rt_status rt_meetings(const rt_meetings_params *p, int64_t *counts, int32_t *first, int32_t *after, int32_t *scratch) {
    if (p == NULL) return rt_wrong(RT_BAD_POINTER, "p");
    if (p->seq_len < 0 || p->seq_len > INT32_MAX || p->last < 0) return rt_wrong(RT_BAD_SHAPE, "seq_len or last");
    const side x = {p->x, p->x_begin, p->x_end, p->num_x}, y = {p->y, p->y_begin, p->y_end, p->num_y};
    rt_status status = check_side(&x, p->seq_len);
    if (status == RT_OK) status = check_side(&y, p->seq_len);
    if (status != RT_OK) return status;
    const bool hulls = first != NULL;
    if (!rt_points_to(scratch, sizeof(*scratch)) || hulls != (after != NULL) ||
        (x.num > 0 && !rt_points_to(counts, sizeof(*counts))) ||
        (hulls && (!rt_points_to(first, sizeof(*first)) || !rt_points_to(after, sizeof(*after)))))
        return rt_wrong(RT_BAD_POINTER, "counts, first, after or scratch");

    // Along x, y i is there from place coming[...] on, up to place leaving[...]: lists by place, linked by next.
    int32_t *coming = scratch, *leaving = coming + x.num + 1, *next_coming = leaving + x.num + 1,
            *next_leaving = next_coming + y.num, *tree = next_leaving + y.num;
    for (int64_t i = 0; i <= x.num; i++) coming[i] = leaving[i] = -1;
    for (int64_t i = 0; i <= y.num; i++) tree[i] = 0;
    for (int64_t i = 0; i < y.num; i++) {
        const int64_t at = position_of(&y, i), from = num_below(&x, y.begin[at]), to = num_below(&x, y.end[at]);
        if (from >= to) continue;
        next_coming[i] = coming[from], coming[from] = (int32_t)i;
        next_leaving[i] = leaving[to], leaving[to] = (int32_t)i;
    }
    for (int64_t j = 0; j < x.num; j++) {
        for (int64_t i = coming[j]; i >= 0; i = next_coming[i]) tree_add(tree, y.num, i, 1);
        for (int64_t i = leaving[j]; i >= 0; i = next_leaving[i]) tree_add(tree, y.num, i, -1);
        const int64_t at = position_of(&x, j), from = num_below(&y, x.begin[at]), to = num_below(&y, x.end[at]);
        int64_t before = from < to ? tree_sum(tree, from) : 0; // of those that x does not meet, or not at last
        counts[j] = from < to ? tree_sum(tree, to) - before : 0;
        if (p->last > 0 && counts[j] > p->last) before += counts[j] - p->last, counts[j] = p->last;
        if (!hulls) continue;
        const bool meets = counts[j] > 0;
        first[j] = meets ? (int32_t)position_of(&y, tree_find(tree, y.num, before)) : 0;
        after[j] = meets ? (int32_t)position_of(&y, tree_find(tree, y.num, before + counts[j] - 1)) + 1 : 0;
    }
    return RT_OK;
}
