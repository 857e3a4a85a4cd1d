// Which keys of a run each row of a query tile attends, and which part of a tile of scores can be skipped.
#ifndef RINGTILE_ATTN_KEY_RANGES_H
#define RINGTILE_ATTN_KEY_RANGES_H

#include "query_tile.h"

enum {
    SPAN_KEYS = 8, // spans of numbers and pairs begin and end at multiples of it; none is too thin for a matrix product
    MAX_SPANS = 2 * PANEL_VECS + 1,
};

// Row r attends the keys [lo[r], hi[r]) of the current run, counted from its start; lo = hi = 0 if it attends none, and
// in the unused lanes of the last panel.
typedef struct key_ranges {
    real_bits lo[TILE_ROWS], hi[TILE_ROWS];
    int64_t begin[TILE_PANELS], end[TILE_PANELS];           // per panel: every attended key lies in here
    int64_t full_begin[TILE_PANELS], full_end[TILE_PANELS]; // per panel: the keys that all rows attend
    int64_t vec_begin[TILE_PANELS][PANEL_VECS], vec_end[TILE_PANELS][PANEL_VECS]; // begin, end of each vector
    int64_t first, last;                                                          // of the tile
    // With intervals of keys, those of the run's keys, and the position of each row, 0 in unused lanes; else NULL.
    const int32_t *key_begin, *key_end;
    real_bits position[TILE_ROWS];
    int64_t first_position[TILE_PANELS], last_position[TILE_PANELS];
} key_ranges;

// First key of the run whose position is at least `bound`, in [0, length].
static inline int64_t first_key_from(const rt_run *run, int64_t bound) {
    if (bound <= run->global_begin) return 0;
    const int64_t distance = bound - run->global_begin;
    return min64(run->stride == 1 ? distance : (distance - 1) / run->stride + 1, run->length);
}

// Every key that a query of the tile attends has a position in [begin, end).
typedef struct position_range {
    int64_t begin, end;
} position_range;

static position_range find_position_range(const rt_attn_block *p, const query_tile *queries) {
    position_range range = {INT64_MAX, INT64_MIN};
    const int64_t mask_row = queries->batch * p->mask_batch_stride + queries->first_token;
    for (int64_t token = mask_row; token < mask_row + queries->num_tokens; token++) {
        if (p->begin[token] >= p->end[token]) continue;
        range.begin = min64(range.begin, p->begin[token]), range.end = max64(range.end, p->end[token]);
    }
    return range;
}

// Whether the run may have keys that a query of the tile attends. find_ranges looks at each row, for each of the runs,
// of which striped shards of packed documents have thousands.
static inline bool run_meets(const rt_run *run, position_range range) {
    return run->global_begin < range.end && run->global_begin + (run->length - 1) * run->stride >= range.begin;
}

// The other side of the mask. A position that is no int32 is in no interval.
static void find_positions(const rt_attn_block *p, const query_tile *queries, const rt_run *run, key_ranges *ranges) {
    const int64_t key = queries->batch * p->key_mask_batch_stride + run->local_begin;
    ranges->key_begin = p->key_begin + key, ranges->key_end = p->key_end + key;
    for (int64_t panel = 0; panel < queries->num_panels; panel++) {
        int64_t first = INT64_MAX, last = INT64_MIN;
        for (int64_t row = panel * PANEL; row < (panel + 1) * PANEL; row++) {
            ranges->position[row] = 0;
            if (row >= queries->num_rows) continue;
            const int64_t position = p->q_positions[row_token(queries, row)];
            if (position < INT32_MIN || position > INT32_MAX) {
                ranges->lo[row] = ranges->hi[row] = 0;
                continue;
            }
            ranges->position[row] = (real_bits)position;
            first = min64(first, position), last = max64(last, position);
        }
        ranges->first_position[panel] = first, ranges->last_position[panel] = last;
    }
}

static void find_ranges(const rt_attn_block *p, const query_tile *queries, const rt_run *run, key_ranges *ranges) {
    const int64_t num_heads = queries->num_heads;
    const int64_t mask_row = queries->batch * p->mask_batch_stride + queries->first_token;
    for (int64_t token = 0; token < queries->num_tokens; token++) {
        int64_t lo = first_key_from(run, p->begin[mask_row + token]);
        int64_t hi = first_key_from(run, p->end[mask_row + token]);
        if (hi <= lo) lo = hi = 0;
        for (int64_t row = token * num_heads; row < (token + 1) * num_heads; row++) {
            ranges->lo[row] = (real_bits)lo;
            ranges->hi[row] = (real_bits)hi;
        }
    }
    for (int64_t row = queries->num_rows; row < queries->num_panels * PANEL; row++)
        ranges->lo[row] = ranges->hi[row] = 0;
    ranges->key_begin = ranges->key_end = NULL;
    if (p->key_begin != NULL) find_positions(p, queries, run, ranges);

    ranges->first = INT64_MAX;
    ranges->last = 0;
    for (int64_t panel = 0; panel < queries->num_panels; panel++) {
        int64_t begin = INT64_MAX, end = 0, full_begin = 0, full_end = INT64_MAX;
        for (int64_t j = 0; j < PANEL_VECS; j++) {
            int64_t vec_begin = INT64_MAX, vec_end = 0;
            for (int64_t row = panel * PANEL + j * LANES; row < panel * PANEL + (j + 1) * LANES; row++) {
                const int64_t lo = ranges->lo[row], hi = ranges->hi[row];
                if (lo < hi) vec_begin = min64(vec_begin, lo);
                vec_end = max64(vec_end, hi);
                full_begin = max64(full_begin, lo);
                full_end = min64(full_end, hi);
            }
            ranges->vec_begin[panel][j] = vec_begin;
            ranges->vec_end[panel][j] = vec_end;
            begin = min64(begin, vec_begin);
            end = max64(end, vec_end);
        }
        ranges->begin[panel] = begin;
        ranges->end[panel] = end;
        ranges->full_begin[panel] = full_begin;
        ranges->full_end[panel] = full_end;
        ranges->first = min64(ranges->first, begin);
        ranges->last = max64(ranges->last, end);
    }
}

// Whether some row of the panel may be in the interval of a key.
static inline bool key_meets_panel(const key_ranges *ranges, int64_t panel, int64_t key) {
    return ranges->key_begin[key] <= ranges->last_position[panel] &&
           ranges->key_end[key] > ranges->first_position[panel];
}

// Whether a row is in the interval of a key.
static inline bool key_meets_row(const key_ranges *ranges, int64_t row, int64_t key) {
    return ranges->key_begin == NULL ||
           (ranges->key_begin[key] <= ranges->position[row] && ranges->position[row] < ranges->key_end[key]);
}

// Narrows the tile's keys to the part [*begin, *end) that the rows of a panel attend; false if there is none.
static bool attended_keys(const key_ranges *ranges, int64_t panel, int64_t tile_begin, int64_t tile_end, int64_t *begin,
                          int64_t *end) {
    *begin = max64(tile_begin, ranges->begin[panel]);
    *end = min64(tile_end, ranges->end[panel]);
    if (*begin >= *end) return false;
    const real_bits *lo = ranges->lo + panel * PANEL, *hi = ranges->hi + panel * PANEL;
    real_bits live = 0;
    for (int64_t row = 0; row < PANEL; row++) live |= (lo[row] < *end) & (hi[row] > *begin);
    if (!live || ranges->key_begin == NULL) return live;
    while (*begin < *end && !key_meets_panel(ranges, panel, *begin)) ++*begin;
    while (*begin < *end && !key_meets_panel(ranges, panel, *end - 1)) --*end;
    return *begin < *end;
}

// The part [*begin, *end) of the tile's keys that a panel has to look at, which begins and ends at a multiple of
// `block` from the tile's first key, or at its end; false if there is none.
static bool panel_keys(const key_ranges *ranges, int64_t panel, int64_t tile_begin, int64_t tile_end, int64_t block,
                       int64_t *begin, int64_t *end) {
    if (!attended_keys(ranges, panel, tile_begin, tile_end, begin, end)) return false;
    *begin = tile_begin + (*begin - tile_begin) / block * block;
    *end = min64(tile_begin + round_up(*end - tile_begin, block), tile_end);
    return true;
}

// Whether every row of the panel attends all of [begin, end), so that nothing needs masking.
static inline bool panel_is_full(const key_ranges *ranges, int64_t panel, int64_t begin, int64_t end) {
    bool full = begin >= ranges->full_begin[panel] && end <= ranges->full_end[panel];
    if (ranges->key_begin == NULL) return full;
    for (int64_t key = begin; full && key < end; key++)
        full = ranges->key_begin[key] <= ranges->first_position[panel] &&
               ranges->key_end[key] > ranges->last_position[panel];
    return full;
}

// Keys that only some row vectors of a panel attend. The matrix products run per span, and so skip most masked pairs.
typedef struct attn_span {
    int64_t key, num_keys; // counted from the panel's first key
    int64_t row, num_rows; // of the panel; whole vectors, except at the tile's last rows
} attn_span;

// Splits the panel's keys [begin, end) into spans, in order, and returns how many; pairs outside all spans are masked.
// A span begins at a multiple of `block` keys, and ends at one or at the end.
static int64_t find_spans(const key_ranges *ranges, const query_tile *queries, int64_t panel, int64_t begin,
                          int64_t end, int64_t block, attn_span spans[MAX_SPANS]) {
    int64_t count = 0;
    for (int64_t key = begin, next; key < end; key = next) {
        int64_t first = PANEL_VECS, last = -1;
        next = end;
        for (int64_t j = 0; j < PANEL_VECS; j++) {
            const int64_t vec_begin = max64(ranges->vec_begin[panel][j], begin);
            const int64_t vec_end = min64(ranges->vec_end[panel][j], end);
            if (vec_begin >= vec_end) continue;
            const int64_t from = begin + (vec_begin - begin) / block * block;
            const int64_t to = min64(begin + round_up(vec_end - begin, block), end);
            if (key < from) next = min64(next, from);
            if (key < from || key >= to) continue;
            next = min64(next, to);
            first = min64(first, j);
            last = j;
        }
        if (last < 0) continue;
        const int64_t row = first * LANES;
        const int64_t num_rows = min64((last + 1) * LANES, panel_rows(queries, panel)) - row;
        spans[count++] = (attn_span){key - begin, next - key, row, num_rows};
    }
    return count;
}

// The part of mask_panel that follows from the intervals of the keys.
static void mask_panel_by_key(const key_ranges *ranges, int64_t panel, int64_t begin, int64_t end, real masked,
                              real *x) {
    for (int64_t j = 0; j < PANEL; j += LANES) {
        vec_bits position;
        memcpy(&position, ranges->position + panel * PANEL + j, sizeof(position));
        for (int64_t key = begin; key < end; key++) {
            const vec_bits first = (real_bits)ranges->key_begin[key] - (vec_bits){0},
                           after = (real_bits)ranges->key_end[key] - (vec_bits){0};
            real *at = x + (key - begin) * PANEL + j;
            vec_store(at, vec_select((first <= position) & (position < after), vec_load(at), vec_set(masked)));
        }
    }
}

// Overwrites x (key, row) with `masked` where the row does not attend the key; keys [begin, end).
static void mask_panel(const key_ranges *ranges, int64_t panel, int64_t begin, int64_t end, real masked, real *x) {
    for (int64_t j = 0; j < PANEL; j += LANES) {
        vec_bits lo, hi;
        memcpy(&lo, ranges->lo + panel * PANEL + j, sizeof(lo));
        memcpy(&hi, ranges->hi + panel * PANEL + j, sizeof(hi));
        for (int64_t key = begin; key < end; key++) {
            const vec_bits index = (real_bits)key - (vec_bits){0};
            real *at = x + (key - begin) * PANEL + j;
            vec_store(at, vec_select((lo <= index) & (index < hi), vec_load(at), vec_set(masked)));
        }
    }
    if (ranges->key_begin != NULL) mask_panel_by_key(ranges, panel, begin, end, masked, x);
}

#endif // RINGTILE_ATTN_KEY_RANGES_H
