// The pieces of a mask against the mask itself, pair by pair.
#include "check.h"

enum { MAX_QUERIES = 20, MAX_KEYS = 40, MAX_ROWS = 2, ROOM = 400 };

typedef struct problem {
    rt_pieces_params p;
    rt_run runs[MAX_KEYS];
    int32_t bounds[2][MAX_ROWS * MAX_QUERIES], key_bounds[2][MAX_ROWS * MAX_KEYS], scratch[2 * MAX_QUERIES];
    int64_t positions[MAX_QUERIES], position_of_row[MAX_KEYS], first_row;
} problem;

// Causal, windows, or noise; keys in runs of any stride, in the order of their positions.
static void draw(uint64_t *state, problem *x) {
    *x = (problem){.first_row = random_int(state, 0, 3)};
    x->p.mask_batch = random_int(state, 1, MAX_ROWS), x->p.num_queries = random_int(state, 0, MAX_QUERIES);
    int64_t row = x->first_row, position = random_int(state, 0, 3), num_runs = random_int(state, 0, 6);
    for (int64_t r = 0; r < num_runs && row < MAX_KEYS - 8; r++) {
        const rt_run run = {position, random_int(state, 0, 2) ? 1 : 3, row, random_int(state, 1, 8)};
        for (int64_t j = 0; j < run.length; j++) x->position_of_row[row++] = run.global_begin + j * run.stride;
        position = x->position_of_row[row - 1] + random_int(state, 1, 4);
        x->runs[x->p.num_k_runs++] = run;
    }
    x->p.num_keys = row;
    const int64_t kind = random_int(state, 0, 2), window = random_int(state, 1, 9);
    for (int64_t i = 0; i < x->p.mask_batch * x->p.num_queries; i++) {
        const int64_t at = i % x->p.num_queries;
        x->bounds[0][i] = (int32_t)(kind == 0 ? 0 : kind == 1 ? at - window : random_int(state, -2, position + 2));
        x->bounds[1][i] = (int32_t)(kind == 2 ? random_int(state, -2, position + 2) : at + 1);
        x->positions[at] = 2 * at;
    }
    if (random_int(state, 0, 9) == 0) x->bounds[0][0] = INT32_MIN, x->bounds[1][0] = INT32_MAX;
    if (random_int(state, 0, 1)) return;
    for (int64_t i = 0; i < x->p.mask_batch * x->p.num_keys; i++) {
        const bool as_before = i > 0 && random_int(state, 0, 3) > 0;
        x->key_bounds[0][i] = as_before ? x->key_bounds[0][i - 1] : (int32_t)random_int(state, -1, 20);
        x->key_bounds[1][i] = as_before ? x->key_bounds[1][i - 1] : (int32_t)random_int(state, -1, 45);
    }
    x->p.key_begin = x->key_bounds[0], x->p.key_end = x->key_bounds[1];
}

static void set_pointers(problem *x) {
    x->p.begin = x->bounds[0], x->p.end = x->bounds[1], x->p.bounds = x->scratch;
    x->p.k_runs = x->runs, x->p.positions = x->positions, x->p.max_stretches = MAX_KEYS;
}

static bool attends(const problem *x, int64_t b, int64_t q, int64_t row) {
    const int64_t at = b * x->p.num_queries + q, key = b * x->p.num_keys + row;
    const int64_t position = x->position_of_row[row];
    if (row < x->first_row || position < x->bounds[0][at] || position >= x->bounds[1][at]) return false;
    return x->p.key_begin == NULL ||
           (x->key_bounds[0][key] <= x->positions[q] && x->positions[q] < x->key_bounds[1][key]);
}

static bool holds(const rt_piece *piece, int64_t q, int64_t row) {
    const int64_t t = q - piece->q_begin, last = piece->q_end - 1 - q;
    return t >= 0 && last >= 0 && row >= piece->k_begin + (piece->drops ? t : 0) &&
           row < piece->k_end - (piece->gains ? last : 0);
}

static void test_pieces_hold_each_pair_once(void) {
    uint64_t state = 17;
    for (int round = 0; round < 2000; round++) {
        problem x;
        draw(&state, &x);
        set_pointers(&x);
        rt_piece pieces[ROOM];
        int64_t counts[MAX_ROWS], first = 0, total = 0;
        CHECK_STATUS(rt_pieces(&x.p, pieces, ROOM, counts), RT_OK);
        for (int64_t b = 0; b < x.p.mask_batch; first += counts[b++]) {
            bool exact = true;
            for (int64_t q = 0; q < x.p.num_queries; q++)
                for (int64_t row = 0; row < x.p.num_keys; row++) {
                    int64_t times = 0;
                    for (int64_t i = first; i < first + counts[b]; i++) times += holds(&pieces[i], q, row);
                    exact &= times == attends(&x, b, q, row);
                }
            CHECK(exact);
            total += counts[b];
        }
        if (total > 0) CHECK_STATUS(rt_pieces(&x.p, pieces, total - 1, counts), RT_CAPACITY);
    }
}

static void test_few_pieces_say_a_mask_that_is_regular(void) {
    problem x = {.runs = {{0, 1, 0, 8}}};
    for (int32_t q = 0; q < 8; q++) x.bounds[0][q] = q < 3 ? 0 : q - 2, x.bounds[1][q] = q + 1;
    set_pointers(&x);
    x.p.mask_batch = 1, x.p.num_queries = x.p.num_keys = 8, x.p.num_k_runs = 1;
    rt_piece pieces[ROOM];
    int64_t count;
    CHECK_STATUS(rt_pieces(&x.p, pieces, ROOM, &count), RT_OK);
    CHECK_INT(count, 2); // a triangle, then a window that slides
    CHECK(memcmp(&pieces[0], &(rt_piece){0, 3, 0, 3, 0, 1}, sizeof(rt_piece)) == 0);
    CHECK(memcmp(&pieces[1], &(rt_piece){3, 8, 1, 8, 1, 1}, sizeof(rt_piece)) == 0);
}

static void test_malformed_params_are_refused(void) {
    problem x = {.runs = {{0, 1, 0, 4}, {4, 1, 4, 4}}};
    set_pointers(&x);
    x.p.mask_batch = 1, x.p.num_queries = x.p.num_keys = 8, x.p.num_k_runs = 2;
    rt_piece pieces[ROOM];
    int64_t count;
    const rt_pieces_params good = x.p;
    CHECK_STATUS(rt_pieces(&good, pieces, ROOM, &count), RT_OK);
    CHECK_STATUS(rt_pieces(NULL, pieces, ROOM, &count), RT_BAD_POINTER);
    CHECK_STATUS(rt_pieces(&good, NULL, ROOM, &count), RT_BAD_POINTER);
    CHECK_STATUS(rt_pieces(&good, pieces, ROOM, NULL), RT_BAD_POINTER);
    CHECK_STATUS(rt_pieces(&good, pieces, -1, &count), RT_BAD_SHAPE);
    CHECK_STATUS(rt_pieces(&good, pieces, INT64_MAX, &count), RT_TOO_LARGE);
#define REFUSED(field, value, status)                                                                                  \
    CHECK_REFUSED(rt_pieces_params, good, field, value, rt_pieces(&bad, pieces, ROOM, &count), status)
    REFUSED(mask_batch, -1, RT_BAD_SHAPE);
    REFUSED(num_queries, -1, RT_BAD_SHAPE);
    REFUSED(num_queries, INT64_MAX / 4, RT_TOO_LARGE);
    REFUSED(num_keys, -1, RT_BAD_SHAPE);
    REFUSED(num_keys, (int64_t)INT32_MAX + 1, RT_BAD_SHAPE);
    REFUSED(num_keys, 7, RT_BAD_RUN);
    REFUSED(num_k_runs, -1, RT_BAD_SHAPE);
    REFUSED(max_stretches, -1, RT_BAD_SHAPE);
    REFUSED(begin, NULL, RT_BAD_POINTER);
    REFUSED(end, NULL, RT_BAD_POINTER);
    REFUSED(bounds, NULL, RT_BAD_POINTER);
    REFUSED(k_runs, NULL, RT_BAD_POINTER);
    REFUSED(key_begin, x.key_bounds[0], RT_BAD_POINTER); // without key_end
    REFUSED(key_end, x.key_bounds[0], RT_BAD_POINTER);
    REFUSED(k_runs, ((const rt_run[]){{0, 1, 0, 4}, {4, 0, 4, 4}}), RT_BAD_RUN);
    REFUSED(k_runs, ((const rt_run[]){{0, 1, 0, 4}, {4, 1, 4, 0}}), RT_BAD_RUN);
    REFUSED(k_runs, ((const rt_run[]){{0, 1, 0, 4}, {4, 1, 4, INT64_MAX}}), RT_BAD_RUN);
    REFUSED(k_runs, ((const rt_run[]){{0, INT64_MAX, 0, 4}, {4, 1, 4, 4}}), RT_BAD_RUN);
    REFUSED(k_runs, ((const rt_run[]){{-1, 1, 0, 4}, {4, 1, 4, 4}}), RT_BAD_RUN);
    REFUSED(k_runs, ((const rt_run[]){{0, 1, -1, 4}, {4, 1, 3, 4}}), RT_BAD_RUN);
    REFUSED(k_runs, ((const rt_run[]){{4, 1, 0, 4}, {0, 1, 4, 4}}), RT_BAD_POSITIONS);
    REFUSED(k_runs, ((const rt_run[]){{0, 1, 0, 4}, {4, 1, 3, 4}}), RT_BAD_POSITIONS); // a row twice
#undef REFUSED
    rt_pieces_params two_sides = good;
    two_sides.key_begin = x.key_bounds[0], two_sides.key_end = x.key_bounds[1];
    CHECK_STATUS(rt_pieces(&two_sides, pieces, ROOM, &count), RT_OK);
    two_sides.max_stretches = 0;
    CHECK_STATUS(rt_pieces(&two_sides, pieces, ROOM, &count), RT_CAPACITY);
    two_sides.positions = NULL;
    CHECK_STATUS(rt_pieces(&two_sides, pieces, ROOM, &count), RT_BAD_POINTER);
}

int main(void) {
    test_pieces_hold_each_pair_once();
    test_few_pieces_say_a_mask_that_is_regular();
    test_malformed_params_are_refused();
    return check_finish();
}
