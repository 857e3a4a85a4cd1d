// Runs, layouts, rows, plans and the digest.
#include "fuzz.h"
#include "layouts.h"

// ---- runs --------------------------------------------------------------------------------------------------

static void spoil_run(uint64_t *state, rt_run *runs, int64_t num_runs) {
    if (num_runs == 0) return;
    int64_t *field = field_of_run(&runs[random_int(state, 0, num_runs - 1)], random_int(state, 0, 3));
    *field = hostile(state, *field);
}

// The runs of one rank, in 0..S-1; returns how many.
static int64_t draw_runs(uint64_t *state, int64_t seq_len, rt_run *runs, int64_t *local_len) {
    const layout l = random_layout(state, seq_len);
    const int64_t rank = random_int(state, 0, l.num_ranks - 1), first = l.run_offsets[rank];
    const int64_t num_runs = l.run_offsets[rank + 1] - first;
    memcpy(runs, l.runs + first, (size_t)num_runs * sizeof(*runs));
    *local_len = local_len_of(&l, rank);
    return num_runs;
}

// A copy that ends where its memory ends.
static void *exactly(const void *from, size_t num_bytes) {
    void *copy = must_alloc(num_bytes);
    if (num_bytes > 0) memcpy(copy, from, num_bytes);
    return copy;
}

static const rt_run run_corpus[][2] = {
    // 2^31 steps of one to find out that they never meet
    {{0, 1LL << 31, 0, 1LL << 31}, {1, 1LL << 31, 1LL << 31, 1LL << 31}},
    {{0, 3037000499, 0, 3037000499}, {1, 3037000500, 1LL << 40, 3037000000}},
    {{0, INT64_MAX, 0, 1}, {1, INT64_MAX, 1, 1}},
    {{INT64_MAX - 1, 1, 0, 1}, {INT64_MAX - 2, 1, 1, 1}},
    {{0, 1LL << 62, 0, 2}, {(1LL << 62) - 3, 3, 2, 2}},
    {{0, INT64_MAX / 2, 0, 3}, {INT64_MAX / 2, 1, 3, 1}},
    {{INT64_MAX, 1, 0, 1}, {0, 1, 1, INT64_MAX}},
};
enum { RUN_CORPUS = sizeof(run_corpus) / sizeof(run_corpus[0]) };

static void try_runs(uint64_t *state, int64_t entry) {
    rt_run runs[MAX_RUNS];
    int64_t local_len, num_runs = draw_runs(state, random_int(state, 0, 60), runs, &local_len);
    verdict expected = VALID;
    const int64_t existing = num_runs;
    bool no_runs = false;
    for (int64_t times = random_int(state, 0, 2); times > 0; times--) {
        expected = UNKNOWN;
        const int64_t kind = random_int(state, 0, 9);
        if (kind == 0) num_runs = hostile(state, num_runs);
        if (kind == 1) local_len = hostile(state, local_len);
        if (kind == 2) no_runs = true;
        if (kind > 2) spoil_run(state, runs, existing);
    }
    if (entry >= 0) {
        memcpy(runs, run_corpus[entry], sizeof(run_corpus[entry]));
        num_runs = 2, local_len = INT64_MAX, expected = UNKNOWN;
    } else if (num_runs > existing) {
        num_runs = existing;
    }
    rt_run *given = exactly(runs, num_runs > 0 ? (size_t)num_runs * sizeof(*runs) : 0);
    const rt_run *list = no_runs ? NULL : given;
    if (num_runs < 0 || local_len < 0 || (no_runs && num_runs > 0)) expected = FORBIDDEN;
    if (expected != FORBIDDEN) {
        const verdict of_runs = judge_runs(runs, num_runs, local_len, INT64_MAX, true);
        expected = of_runs == UNKNOWN ? UNKNOWN : of_runs; // exact, spoiled or not
    }
    judge("rt_runs_check", expected, rt_runs_check(list, num_runs, local_len));
    free(given);
}

// ---- layouts -----------------------------------------------------------------------------------------------

static void try_layout(uint64_t *state) {
    layout l = random_layout(state, random_int(state, 0, 60));
    const int64_t num_runs = l.run_offsets[l.num_ranks];
    int64_t num_ranks = l.num_ranks, seq_len = l.seq_len;
    bool no_runs = false, no_offsets = false, no_places = false, valid = true;
    for (int64_t times = random_int(state, 0, 2); times > 0; times--) {
        valid = false;
        const int64_t kind = random_int(state, 0, 9), rank = random_int(state, 0, l.num_ranks);
        if (kind == 0) num_ranks = random_int(state, -2, l.num_ranks);
        if (kind == 1) seq_len = hostile(state, seq_len);
        if (kind == 2) no_runs = true;
        if (kind == 3) no_offsets = true;
        if (kind == 4) no_places = true;
        if (kind == 5) l.run_offsets[rank] = hostile(state, l.run_offsets[rank]);
        if (kind > 5) spoil_run(state, l.runs, num_runs);
    }
    // The offsets may not lead beyond the runs that exist, in so far as they are in order.
    for (int64_t r = 0; r < num_ranks && l.run_offsets[r] <= l.run_offsets[r + 1]; r++)
        if (l.run_offsets[0] == 0 && l.run_offsets[r + 1] > num_runs) l.run_offsets[r + 1] = num_runs;
    bool forbidden = num_ranks < 1 || seq_len < 0 || no_offsets || (no_runs && num_runs > 0 && seq_len > 0) ||
                     (no_places && seq_len > 0);
    uint8_t found[64] = {0};
    int64_t total = 0;
    if (!forbidden && l.run_offsets[0] != 0) forbidden = true;
    for (int64_t rank = 0; !forbidden && rank < num_ranks; rank++) {
        const int64_t first = l.run_offsets[rank], last = l.run_offsets[rank + 1],
                      count = last < first ? 0 : last - first;
        int64_t local_len = 0;
        if (last < first) forbidden = true;
        for (int64_t r = first; !forbidden && r < first + count; r++) {
            if (l.runs[r].length < 1 || l.runs[r].length > seq_len - total - local_len) forbidden = true;
            if (!forbidden) local_len += l.runs[r].length;
        }
        total += local_len;
        if (!forbidden && judge_runs(l.runs + first, count, local_len, seq_len, false) == FORBIDDEN) forbidden = true;
        for (int64_t r = first; !forbidden && r < first + count; r++)
            for (int64_t j = 0; !forbidden && j < l.runs[r].length; j++) {
                const int64_t g = l.runs[r].global_begin + j * l.runs[r].stride;
                if (g >= 64 || found[g]++ > 0) forbidden = true; // no layout here has so many positions
            }
    }
    if (total != seq_len) forbidden = true;
    const verdict expected = forbidden ? FORBIDDEN : VALID; // the judgement is complete
    if (valid && forbidden) wrong("rt_layout_check", "the judge is wrong");
    rt_run *runs = exactly(l.runs, (size_t)num_runs * sizeof(*runs));
    int64_t *offsets = exactly(l.run_offsets, (size_t)(l.num_ranks + 1) * sizeof(*offsets));
    rt_layout_place *places = must_alloc((size_t)num_runs * sizeof(*places));
    judge("rt_layout_check", expected,
          rt_layout_check(no_runs ? NULL : runs, no_offsets ? NULL : offsets, num_ranks, seq_len,
                          no_places ? NULL : places));
    free(runs), free(offsets), free(places);
}

// ---- rows --------------------------------------------------------------------------------------------------

// What a call of a valid problem changes: {field, value} pairs of its params.
enum {
    NDIM,
    DIM,
    ELEMENT_BYTES,
    GLOBAL_LEN,
    NUM_RUNS,
    SIZES,
    GLOBAL_STRIDES = SIZES + 4,
    LOCAL_STRIDES = GLOBAL_STRIDES + 4
};
static const int64_t rows_corpus[][4] = {
    {ELEMENT_BYTES, INT64_MAX, SIZES, 2},         {SIZES, 1LL << 32, SIZES + 1, 1LL << 32},
    {LOCAL_STRIDES, 1LL << 62, SIZES, 5},         {GLOBAL_STRIDES, INT64_MIN, SIZES, 3},
    {SIZES, INT64_MAX, LOCAL_STRIDES, INT64_MAX}, {GLOBAL_LEN, INT64_MAX, GLOBAL_STRIDES, INT64_MAX},
};
enum { ROWS_CORPUS = sizeof(rows_corpus) / sizeof(rows_corpus[0]) };

static void try_rows(uint64_t *state, int64_t entry) {
    rt_run runs[MAX_RUNS];
    int64_t local_len, seq_len = random_int(state, 0, 40);
    const int64_t existing = draw_runs(state, seq_len, runs, &local_len);
    block x[2] = {{0}, {0}}, copies[2]; // global, local
    rt_rows_tensor p = {
        .ndim = random_int(state, 1, 4), .element_bytes = random_int(state, 1, 17), .global_len = seq_len};
    rt_rows_params all = {.num_tensors = 1, .tensors = &p, .num_runs = existing};
    int64_t sizes[16] = {0}, strides[2][16] = {{0}};
    p.dim = random_int(state, 0, p.ndim - 1);
    for (int64_t d = 0; d < p.ndim; d++)
        sizes[d] = d == p.dim ? seq_len : random_int(state, random_int(state, 0, 9) > 0, 4);
    random_strides(state, p.ndim, sizes, strides[0]);
    sizes[p.dim] = local_len;
    random_strides(state, p.ndim, sizes, strides[1]);

    const bool to_global = random_int(state, 0, 1);
    rt_parallel parallel = {.run = run_in_turn, .num_workers = random_int(state, 0, 3)};
    bool no_params = false, missing[3] = {false};
    verdict expected = VALID;
    for (int64_t times = random_int(state, 0, 2); times > 0 || entry >= 0; times--) {
        expected = UNKNOWN;
        const int64_t kind = random_int(state, 0, 15), any = random_int(state, 0, 3);
        int64_t *const fields[] = {&p.ndim, &p.dim, &p.element_bytes, &p.global_len, &all.num_runs};
        if (entry >= 0) {
            for (int i = 0; i < 4; i += 2) {
                const int64_t field = rows_corpus[entry][i], value = rows_corpus[entry][i + 1];
                *(field < SIZES            ? fields[field]
                  : field < GLOBAL_STRIDES ? &sizes[field - SIZES]
                  : field < LOCAL_STRIDES  ? &strides[0][field - GLOBAL_STRIDES]
                                           : &strides[1][field - LOCAL_STRIDES]) = value;
            }
            break;
        }
        if (kind < 5) *fields[kind] = hostile(state, *fields[kind]);
        if (kind == 5) x[random_int(state, 0, 1)].is_null = true;
        if (kind == 6) parallel = random_workers(state);
        if (kind == 7) no_params = random_int(state, 0, 3) == 0;
        if (kind == 8) missing[random_int(state, 0, 2)] = true;
        if (kind == 9 || kind == 10) sizes[any] = hostile(state, sizes[any]);
        if (kind == 11 || kind == 12) strides[0][any] = hostile(state, strides[0][any]);
        if (kind == 13) strides[1][any] = hostile(state, strides[1][any]);
        if (kind > 13) spoil_run(state, runs, existing);
    }
    if (all.num_runs > existing) all.num_runs = existing;
    const bool dims = p.ndim >= 1 && p.ndim <= 16 && p.dim >= 0 && p.dim < p.ndim;
    bool forbidden =
        no_params || !dims || missing[0] || missing[1] || missing[2] || all.num_runs < 0 || p.global_len < 0;
    for (int i = 0; i < 2 && dims; i++) {
        x[i].ndim = p.ndim, x[i].element_bytes = p.element_bytes;
        memcpy(x[i].sizes, sizes, sizeof(sizes));
        memcpy(x[i].strides, strides[i], sizeof(sizes));
        if (i == 0) x[i].sizes[p.dim] = p.global_len;
        x[i].is_output = (i == 0) == to_global;
        block as_bytes = x[i]; // of any alignment; a NULL array is fine if nothing is copied
        as_bytes.is_null = false;
        const verdict of_block = judge_block(&as_bytes);
        expected = worse(expected, of_block == UNKNOWN ? expected : of_block);
    }
    if (dims && all.num_runs >= 0)
        expected = worse(expected, judge_runs(runs, all.num_runs, sizes[p.dim], p.global_len, false));
    if (forbidden) expected = FORBIDDEN;
    if (expected == IMPOSSIBLE) {
        num_skipped++;
        return;
    }
    if ((x[0].is_null || x[1].is_null) && expected != FORBIDDEN)
        expected = !is_empty(&x[1]) && all.num_runs > 0 ? FORBIDDEN : UNKNOWN;
    for (int i = 0; i < 2; i++) {
        if (!dims || expected == FORBIDDEN) x[i].is_null = x[i].is_null || expected == FORBIDDEN;
        const bool null = x[i].is_null;
        x[i].ndim = dims ? x[i].ndim : 0, x[i].element_bytes = dims ? x[i].element_bytes : 1;
        make_block(&x[i], state);
        copies[i] = copy_of(&x[i]);
        if (expected == FORBIDDEN && !null) x[i].data = x[i].memory;
    }
    if (random_int(state, 0, 19) == 0 && expected != FORBIDDEN && all.num_runs > 0 && !is_empty(&x[1]) &&
        alias(x, to_global ? 0 : 1, to_global ? 1 : 0))
        expected = FORBIDDEN;
    rt_run *list = exactly(runs, (size_t)(existing > 0 ? existing : 0) * sizeof(*list));
    p.sizes = missing[0] ? NULL : sizes, p.global_strides = missing[1] ? NULL : strides[0];
    p.local_strides = missing[2] ? NULL : strides[1], all.runs = list;
    p.global = x[0].data, p.local = x[1].data;
    const rt_status status =
        to_global ? rt_rows_unpack(no_params ? NULL : &all, parallel) : rt_rows_pack(no_params ? NULL : &all, parallel);
    if (judge(to_global ? "rt_rows_unpack" : "rt_rows_pack", expected, status) && !is_empty(&x[1]) &&
        all.num_runs > 0) {
        for (int64_t r = 0; r < all.num_runs; r++) { // each element of local, run by run
            int64_t index[16] = {0}, d = 0;
            while (d >= 0) {
                int64_t at[2] = {0, 0};
                for (d = 0; d < p.ndim; d++) {
                    const bool sharded = d == p.dim;
                    at[0] += (sharded ? runs[r].global_begin + index[d] * runs[r].stride : index[d]) * strides[0][d];
                    at[1] += (sharded ? runs[r].local_begin + index[d] : index[d]) * strides[1][d];
                }
                char *global = copies[0].data + at[0] * p.element_bytes,
                     *local = copies[1].data + at[1] * p.element_bytes;
                memmove(to_global ? global : local, to_global ? local : global, (size_t)p.element_bytes);
                for (d = p.ndim - 1; d >= 0 && ++index[d] == (d == p.dim ? runs[r].length : sizes[d]); d--)
                    index[d] = 0;
            }
        }
        for (int i = 0; i < 2; i++)
            if (memcmp(copies[i].memory, x[i].memory, x[i].num_bytes) != 0)
                wrong("rt_rows_pack or rt_rows_unpack", "gave a wrong result");
    }
    for (int i = 0; i < 2; i++) free(x[i].memory), free(copies[i].memory);
    free(list);
}

// ---- plans -------------------------------------------------------------------------------------------------

static void try_plan(uint64_t *state) {
    layout l = random_layout(state, random_int(state, 0, 40));
    const int64_t S = l.seq_len, num_runs = l.run_offsets[l.num_ranks], rows = random_int(state, 1, 2);
    int32_t *begin = must_alloc((size_t)(rows * S) * 4), *end = must_alloc((size_t)(rows * S) * 4);
    for (int64_t i = 0; i < rows * S; i++) {
        begin[i] = (int32_t)(random_int(state, 0, 9) ? random_int(state, -2, S + 2) : hostile(state, 0));
        end[i] = (int32_t)(random_int(state, 0, 9) ? random_int(state, -2, S + 2) : hostile(state, 0));
    }
    const bool two_sides = random_int(state, 0, 1);
    rt_plan_params p = {.num_ranks = l.num_ranks, .seq_len = S, .mask_batch = rows, .begin = begin, .end = end};
    if (two_sides) p.key_begin = end, p.key_end = begin; // any numbers do
    int64_t rank = random_int(state, 0, l.num_ranks - 1), capacity = random_int(state, 0, 3 * S);
    bool valid = true, no_params = false, small_workspace = false;
    rt_run *runs = exactly(l.runs, (size_t)num_runs * sizeof(*runs));
    int64_t *offsets = exactly(l.run_offsets, (size_t)(l.num_ranks + 1) * sizeof(*offsets));
    p.runs = runs, p.run_offsets = offsets;
    for (int64_t times = random_int(state, 0, 2); times > 0; times--) {
        valid = false;
        const int64_t kind = random_int(state, 0, 14), of = random_int(state, 0, l.num_ranks);
        if (kind == 0) p.num_ranks = random_int(state, -2, l.num_ranks);
        if (kind == 1) p.seq_len = random_int(state, 0, 1) ? random_int(state, -2, S) : hostile(state, S);
        if (kind == 2) p.mask_batch = random_int(state, 0, 1) ? random_int(state, -2, rows) : hostile(state, rows);
        if (kind == 3) rank = hostile(state, rank);
        if (kind == 4) small_workspace = true;
        if (kind == 5) capacity = random_int(state, -2, S);
        if (kind == 6) p.runs = NULL;
        if (kind == 7) p.run_offsets = NULL;
        if (kind == 8) p.begin = NULL;
        if (kind == 9) p.end = NULL;
        if (kind == 10) p.key_begin = two_sides ? NULL : begin;
        if (kind == 11) no_params = random_int(state, 0, 3) == 0;
        if (kind == 12) offsets[of] = hostile(state, offsets[of]);
        if (kind > 12) spoil_run(state, runs, num_runs);
    }
    for (int64_t r = 0; r <= l.num_ranks; r++)
        if (offsets[r] > num_runs && (r == 0 || offsets[r - 1] >= 0)) offsets[r] = num_runs;
    bool forbidden = no_params || p.num_ranks < 1 || p.seq_len < 0 || p.seq_len > INT32_MAX || p.mask_batch < 0 ||
                     p.run_offsets == NULL;
    const wide intervals = forbidden ? 0 : (wide)p.mask_batch * p.seq_len;
    const bool more = p.seq_len > S || p.mask_batch > rows;
    if (intervals * 4 > MOST_BYTES || intervals * p.seq_len > INT64_MAX) forbidden = true;
    if (intervals > 0 && (p.begin == NULL || p.end == NULL || (p.key_begin == NULL) != (p.key_end == NULL)))
        forbidden = true;
    if (!forbidden && more) { // the mask has no such rows
        num_skipped++;
    } else {
        const rt_plan_params *given = no_params ? NULL : &p;
        const int64_t num_bytes = rt_plan_workspace_bytes(given);
        if (num_bytes > 0) p.workspace = aligned_alloc(64, (size_t)num_bytes);
        p.workspace_bytes = num_bytes - 64 * small_workspace;
        if (small_workspace) forbidden = true;
        const size_t W = (size_t)(l.num_ranks > p.num_ranks ? l.num_ranks : p.num_ranks);
        rt_rank_plan plan = {.capacity = capacity};
        plan.rounds = must_alloc(W * sizeof(rt_round)),
        plan.runs = must_alloc((size_t)(capacity > 0 ? capacity : 0) * 32);
        plan.incoming = must_alloc(W * sizeof(rt_transfer)), plan.outgoing = must_alloc(W * sizeof(rt_transfer));
        int64_t *keys = must_alloc(W * W * sizeof(*keys)), *pairs = must_alloc(W * W * sizeof(*pairs));
        const verdict expected = forbidden ? FORBIDDEN : valid ? VALID : UNKNOWN;
        judge("rt_plan_counts", expected, rt_plan_counts(given, keys, pairs));
        const rt_status status = rt_plan_rank(given, rank, random_int(state, 0, 1), &plan);
        judge("rt_plan_rank", status == RT_CAPACITY ? UNKNOWN : expected, status);
        free(p.workspace), free(plan.rounds), free(plan.runs), free(plan.incoming), free(plan.outgoing);
        free(keys), free(pairs);
    }
    free(begin), free(end), free(runs), free(offsets);
}

// Meetings: positions and their numbers are spoiled, and judged. test_plan.c counts the pairs of both.
static void try_meetings(uint64_t *state) {
    const int64_t S = random_int(state, 0, 40);
    int32_t *bounds[4], *at[2] = {NULL, NULL};
    rt_meetings_params p = {.seq_len = S, .num_x = S, .num_y = S, .last = random_int(state, 0, 50)};
    for (int i = 0; i < 4; i++) {
        bounds[i] = must_alloc((size_t)S * 4);
        for (int64_t j = 0; j < S; j++)
            bounds[i][j] = (int32_t)(random_int(state, 0, 9) ? random_int(state, -2, S + 2) : hostile(state, 0));
    }
    int64_t *const num[] = {&p.num_x, &p.num_y};
    bool forbidden = false;
    for (int i = 0; i < 2; i++) {
        if (random_int(state, 0, 2) == 0) continue;
        *num[i] = random_int(state, 0, S);
        at[i] = must_alloc((size_t)*num[i] * 4);
        for (int64_t j = 0; j < *num[i]; j++) at[i][j] = (int32_t)(S - *num[i] + j);
        if (*num[i] > 0 && random_int(state, 0, 3) == 0) {
            const int64_t where = random_int(state, 0, *num[i] - 1);
            const int32_t value = (int32_t)hostile(state, at[i][where]);
            const bool rises = where == 0 && value >= 0 && value < at[i][where]; // they are neighbours, up to S - 1
            forbidden |= value != at[i][where] && !rises;
            at[i][where] = value;
        }
    }
    p.x = at[0], p.y = at[1];
    p.x_begin = bounds[0], p.x_end = bounds[1], p.y_begin = bounds[2], p.y_end = bounds[3];
    int32_t *scratch = must_alloc((size_t)rt_meetings_scratch_len(p.num_x, p.num_y) * 4);
    int64_t *counts = must_alloc((size_t)p.num_x * 8);
    int32_t *first = must_alloc((size_t)p.num_x * 4 + 4), *after = must_alloc((size_t)p.num_x * 4 + 4);
    verdict expected = forbidden ? FORBIDDEN : VALID;
    if (random_int(state, 0, 9) == 0) {
        int64_t *const fields[] = {&p.seq_len, &p.num_x, &p.num_y};
        int64_t *const field = fields[random_int(state, 0, 2)];
        const int64_t value = hostile(state, *field), most = field == &p.seq_len ? -1 : S;
        // More than there is memory for must not be asked for unless it must be refused.
        if (value < 0 || value > INT32_MAX || (most >= 0 && value > S)) *field = value, expected = FORBIDDEN;
    }
    judge("rt_meetings", expected, rt_meetings(&p, counts, first, after, scratch));
    for (int i = 0; i < 4; i++) free(bounds[i]);
    free(at[0]), free(at[1]), free(scratch), free(counts), free(first), free(after);
}

// ---- digest, instruction set -------------------------------------------------------------------------------

static void try_digest(uint64_t *state) {
    const int64_t size = random_int(state, 0, 200);
    int64_t num_bytes = size;
    const bool spoiled = random_int(state, 0, 1), no_bytes = spoiled && random_int(state, 0, 1);
    if (spoiled && !no_bytes) num_bytes = -(random_bits(state) >> random_int(state, 1, 63));
    char *bytes = must_alloc((size_t)size);
    memset(bytes, (int)size, (size_t)size);
    uint64_t digest = 0, again = 1;
    const verdict expected = num_bytes < 0 || (no_bytes && num_bytes > 0) ? FORBIDDEN : VALID;
    const bool ok = judge("rt_digest", expected, rt_digest(no_bytes ? NULL : bytes, num_bytes, 7, &digest));
    if (ok && (rt_digest(bytes, num_bytes, 7, &again) != RT_OK || digest != again)) wrong("rt_digest", "changed");
    judge("rt_digest", FORBIDDEN, rt_digest(bytes, size, 7, NULL));
    judge("rt_cpu_isa", FORBIDDEN, rt_cpu_isa(NULL));
    free(bytes);
}

static void trial(uint64_t *state, int64_t entry) {
    if (entry >= RUN_CORPUS)
        try_rows(state, entry - RUN_CORPUS);
    else if (entry >= 0)
        try_runs(state, entry);
    else if (trial_number % 16 == 0)
        try_digest(state);
    else if (trial_number % 4 == 1)
        try_runs(state, -1);
    else if (trial_number % 4 == 2)
        try_layout(state);
    else if (trial_number % 4 == 3)
        try_plan(state), try_meetings(state);
    else
        try_rows(state, -1);
}

int main(int argc, char **argv) { return fuzz_main(argc, argv, 12000, RUN_CORPUS + ROWS_CORPUS, trial); }
