// Random layouts: 0..S-1 split into arithmetic progressions, each given to one of W ranks.
#ifndef RINGTILE_TESTS_LAYOUTS_H
#define RINGTILE_TESTS_LAYOUTS_H

#include "check.h"

enum { MAX_RANKS = 5, MAX_RUNS = 256 };

typedef struct layout {
    int64_t seq_len, num_ranks;
    rt_run runs[MAX_RUNS];
    int64_t run_offsets[MAX_RANKS + 1];
} layout;

static inline void swap_runs(rt_run *a, rt_run *b) {
    const rt_run kept = *a;
    *a = *b;
    *b = kept;
}

static inline void shuffle_runs(uint64_t *state, rt_run *runs, int64_t num_runs) {
    for (int64_t i = num_runs - 1; i > 0; i--) swap_runs(&runs[i], &runs[random_int(state, 0, i)]);
}

// Splits 0..S-1 at random, in two parts or into every second position, into at most MAX_RUNS progressions.
static inline int64_t random_pieces(uint64_t *state, int64_t seq_len, rt_run *pieces) {
    int64_t num_pieces = seq_len > 0;
    pieces[0] = (rt_run){.stride = 1, .length = seq_len};
    for (int64_t splits = seq_len > 0 ? random_int(state, 0, 24) : 0; splits > 0; splits--) {
        rt_run *piece = &pieces[random_int(state, 0, num_pieces - 1)];
        if (piece->length < 2) continue;
        rt_run *rest = &pieces[num_pieces++];
        *rest = *piece;
        if (random_int(state, 0, 1)) {
            piece->length = random_int(state, 1, piece->length - 1);
            rest->global_begin += piece->length * piece->stride;
            rest->length -= piece->length;
        } else {
            rest->global_begin += piece->stride;
            rest->length = piece->length / 2;
            piece->length -= rest->length;
            piece->stride *= 2;
            rest->stride *= 2;
        }
    }
    return num_pieces;
}

// Ranks may be empty; half of the layouts list their runs out of local order.
static inline layout random_layout(uint64_t *state, int64_t seq_len) {
    layout l = {.seq_len = seq_len, .num_ranks = random_int(state, 1, MAX_RANKS)};
    rt_run pieces[MAX_RUNS];
    const int64_t num_pieces = random_pieces(state, seq_len, pieces);
    int64_t owner[MAX_RUNS];
    for (int64_t i = 0; i < num_pieces; i++) owner[i] = random_int(state, 0, l.num_ranks - 1);
    if (random_int(state, 0, 1)) shuffle_runs(state, pieces, num_pieces);

    int64_t num_runs = 0;
    for (int64_t rank = 0; rank < l.num_ranks; rank++) {
        int64_t local = 0;
        for (int64_t i = 0; i < num_pieces; i++) {
            if (owner[i] != rank) continue;
            l.runs[num_runs] = pieces[i];
            l.runs[num_runs++].local_begin = local;
            local += pieces[i].length;
        }
        l.run_offsets[rank + 1] = num_runs;
    }
    if (random_int(state, 0, 1))
        for (int64_t rank = 0; rank < l.num_ranks; rank++)
            shuffle_runs(state, l.runs + l.run_offsets[rank], l.run_offsets[rank + 1] - l.run_offsets[rank]);
    return l;
}

static inline int64_t local_len_of(const layout *l, int64_t rank) {
    int64_t local_len = 0;
    for (int64_t r = l->run_offsets[rank]; r < l->run_offsets[rank + 1]; r++) local_len += l->runs[r].length;
    return local_len;
}

// The global position of each local token.
static inline int64_t *positions_of(const layout *l, int64_t rank) {
    int64_t *positions = must_alloc((size_t)local_len_of(l, rank) * sizeof(*positions));
    for (int64_t r = l->run_offsets[rank]; r < l->run_offsets[rank + 1]; r++)
        for (int64_t j = 0; j < l->runs[r].length; j++)
            positions[l->runs[r].local_begin + j] = l->runs[r].global_begin + j * l->runs[r].stride;
    return positions;
}

#endif // RINGTILE_TESTS_LAYOUTS_H
