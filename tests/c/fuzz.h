// What the fuzz programs share. Each draws problems that are valid, breaks some of their fields, and judges every call:
// a problem that the rules of ringtile.h forbid must be refused, a valid one must give the same result wherever its
// arrays lie, and the sanitizers see to the rest. `fuzz_x [TRIALS [SEED]]`; a trial is known by its seed and number
// alone.
#ifndef RINGTILE_TESTS_FUZZ_H
#define RINGTILE_TESTS_FUZZ_H

#include "check.h"

#include <sanitizer/common_interface_defs.h>

__extension__ typedef __int128 wide; // the judge's arithmetic cannot overflow

// ---- trials ------------------------------------------------------------------------------------------------

// What became of the calls; skipped: arrays neither small enough to make nor too large to exist.
static int64_t num_right, num_refused, num_skipped;
static int64_t trial_seed, trial_number; // < 0: of the corpus

static inline void print_trial(void) {
    printf("seed %" PRId64 ", trial %" PRId64 "\n", trial_seed, trial_number);
    fflush(stdout);
}

static inline void wrong(const char *function, const char *what) {
    num_failed++;
    printf("%s: %s: ", function, what);
    print_trial();
}

typedef enum verdict { VALID, FORBIDDEN, UNKNOWN, IMPOSSIBLE } verdict; // IMPOSSIBLE: cannot be called here

static inline verdict worse(verdict a, verdict b) {
    return a == FORBIDDEN || b == FORBIDDEN ? FORBIDDEN : a > b ? a : b;
}

// Counts a call. Returns whether its results are to be compared.
static inline bool judge(const char *function, verdict expected, rt_status status) {
    num_right += status == RT_OK;
    num_refused += status != RT_OK;
    if (expected == FORBIDDEN && status == RT_OK) wrong(function, "was not refused");
    if (expected == VALID && status != RT_OK) wrong(function, rt_status_message(status));
    return status == RT_OK && expected != FORBIDDEN;
}

// ---- numbers -----------------------------------------------------------------------------------------------

// Near the good number, near 0, of any size, near a power of two, or where sums and products of two wrap.
static inline int64_t hostile(uint64_t *state, int64_t good) {
    static const int64_t wrapping[] = {INT64_MIN,     INT64_MIN + 1, INT64_MIN / 2, INT64_MAX,
                                       INT64_MAX / 2, INT64_MAX / 3, 3037000499,    3037000500};
    const int64_t sign = random_int(state, 0, 3) ? 1 : -1;
    switch (random_int(state, 0, 5)) {
    case 0:
        return good == INT64_MAX ? good : good + 1;
    case 1:
        return good == INT64_MIN ? good : good - 1;
    case 2:
        return random_int(state, -2, 9);
    case 3:
        return (int64_t)(random_bits(state) >> random_int(state, 0, 63)) * sign;
    case 4:
        return (((int64_t)1 << random_int(state, 0, 62)) + random_int(state, -1, 1)) * sign;
    default:
        return wrapping[random_int(state, 0, 7)];
    }
}

// The scales and probabilities of valid problems are far from these.
static inline double hostile_real(uint64_t *state) {
    static const double values[] = {NAN, INFINITY, -INFINITY, -1, 0, 1, 2, 1e-320, 1e39, -1e39, 1e308, -0.0};
    return values[random_int(state, 0, 11)];
}

// Finite in the arithmetic of the kernels.
static inline bool is_real(rt_dtype dtype, double x) { return dtype == RT_F64 ? isfinite(x) : isfinite((float)x); }

static inline bool is_softcap(rt_dtype dtype, double x) {
    return x == 0 || (x > 0 && is_real(dtype, x) && is_real(dtype, 1 / x));
}

// ---- arrays ------------------------------------------------------------------------------------------------

enum { MAX_BLOCK_BYTES = 1 << 16 };

// An array of a problem. make_block allocates exactly its elements, wherever its strides put them.
typedef struct block {
    int64_t element_bytes, ndim, sizes[16], strides[16];
    bool is_output, is_null, is_skewed; // is_skewed: one byte off its alignment
    char *memory, *data;                // data: element 0
    size_t num_bytes;
} block;

static inline bool is_empty(const block *x) {
    for (int64_t d = 0; d < x->ndim; d++)
        if (x->sizes[d] <= 0) return true;
    return false;
}

static const wide MOST_BYTES = (wide)1 << 60;

// The bytes from element 0 to the first and beyond the last.
static inline void extent(const block *x, wide *low, wide *high) {
    *low = 0, *high = x->element_bytes;
    for (int64_t d = 0; d < x->ndim; d++) {
        const wide way = (wide)(x->sizes[d] - 1) * x->strides[d] * x->element_bytes;
        if (x->sizes[d] > 1) *(way < 0 ? low : high) += way;
    }
}

// Whether two elements of a small array share a byte.
static inline bool overlaps_itself(const block *x) {
    wide low, high;
    extent(x, &low, &high);
    uint8_t *used = calloc((size_t)(high - low), 1);
    int64_t index[16] = {0}, d = 0;
    bool twice = false;
    while (!twice && d >= 0) {
        wide at = -low;
        for (d = 0; d < x->ndim; d++) at += (wide)index[d] * x->strides[d] * x->element_bytes;
        twice = used[at]++ > 0;
        for (d = x->ndim - 1; d >= 0 && ++index[d] == x->sizes[d]; d--) index[d] = 0;
    }
    free(used);
    return twice;
}

static inline verdict judge_block(const block *x) {
    if (x->element_bytes < 1 || x->element_bytes > MOST_BYTES) return FORBIDDEN;
    wide count = x->element_bytes, reach = x->element_bytes, low, high;
    for (int64_t d = 0; d < x->ndim; d++) {
        if (x->sizes[d] < 0) return FORBIDDEN;
        if (x->sizes[d] < 2) continue;
        const wide way = (wide)(x->sizes[d] - 1) * x->strides[d];
        count *= x->sizes[d];
        if (count > MOST_BYTES || way > MOST_BYTES || -way > MOST_BYTES) return FORBIDDEN;
        reach += (way < 0 ? -way : way) * x->element_bytes;
    }
    if (reach > MOST_BYTES) return FORBIDDEN;
    if (is_empty(x)) return VALID;
    if (x->is_null || (x->is_skewed && x->element_bytes > 1)) return FORBIDDEN;
    extent(x, &low, &high);
    if (high - low > MAX_BLOCK_BYTES || count > MAX_BLOCK_BYTES) return IMPOSSIBLE;
    // Some interleaved outputs are refused although no two of their elements meet.
    return !x->is_output ? VALID : overlaps_itself(x) ? FORBIDDEN : UNKNOWN;
}

// A random array of VALID problems: its dims in any order, with gaps.
static inline void random_strides(uint64_t *state, int64_t ndim, const int64_t *sizes, int64_t *strides) {
    bool done[16] = {false};
    int64_t step = 1 + random_int(state, 0, 1) * random_int(state, 0, 3);
    for (int64_t left = ndim; left > 0; left--) {
        int64_t d = ndim - 1;
        for (int64_t skip = random_int(state, 0, 3) ? 0 : random_int(state, 0, left - 1); done[d] || skip-- > 0;) d--;
        done[d] = true;
        strides[d] = step;
        step = step * (sizes[d] > 0 ? sizes[d] : 1) + random_int(state, 0, 3) / 3;
    }
}

// The same, but rows of the last dim are contiguous: strides of the others.
static inline void random_row_strides(uint64_t *state, int64_t ndim, const int64_t *sizes, int64_t *strides) {
    random_strides(state, ndim - 1, sizes, strides);
    for (int64_t d = 0; d < ndim - 1; d++) strides[d] *= sizes[ndim - 1];
}

static inline void make_block(block *x, uint64_t *state) {
    wide low = 0, high = 0;
    if (judge_block(x) < FORBIDDEN || judge_block(x) == UNKNOWN)
        if (!is_empty(x)) extent(x, &low, &high);
    x->num_bytes = (size_t)(high - low);
    x->memory = must_alloc(x->num_bytes + 8 * (size_t)x->is_skewed);
    for (size_t i = 0; i + 8 <= x->num_bytes; i += 8) {
        const uint64_t bits = random_bits(state);
        memcpy(x->memory + i, &bits, 8);
    }
    memset(x->memory + x->num_bytes / 8 * 8, 0x5a, x->num_bytes % 8);
    x->data = x->is_null ? NULL : x->memory + (int64_t)-low + x->is_skewed;
}

// Makes an output begin with another array's first element, if neither is empty; the call must be refused then.
static inline bool alias(block *x, int64_t output, int64_t other) {
    if (output == other || x[output].num_bytes == 0 || x[other].num_bytes == 0) return false;
    x[output].data = x[other].data;
    return true;
}

// Numbers in [-1, 1) for the kernels whose result is compared.
static inline void fill_units(block *x, rt_dtype dtype, uint64_t *state) {
    for (int64_t i = 0; i < (int64_t)(x->num_bytes / dtype_bytes(dtype)); i++)
        store_element(dtype, x->memory, i, random_unit(state));
}

// A copy with memory of its own.
static inline block copy_of(const block *x) {
    block copy = *x;
    copy.memory = must_alloc(x->num_bytes);
    memcpy(copy.memory, x->memory, x->num_bytes);
    copy.data = x->data == NULL ? NULL : copy.memory + (x->data - x->memory);
    return copy;
}

// Compares all elements, and with them the gaps, which both sides left alone.
static inline void compare(const char *function, rt_dtype dtype, const block *got, const block *want,
                           double tolerance) {
    for (int64_t i = 0; i < (int64_t)(got->num_bytes / dtype_bytes(dtype)); i++) {
        const double x = load_element(dtype, got->memory, i), y = load_element(dtype, want->memory, i);
        if (!is_close(x, y, tolerance * (1 + fabs(y)))) {
            printf("element %" PRId64 ": got %.9g, expected %.9g\n", i, x, y);
            wrong(function, "gave a wrong result");
            return;
        }
    }
}

// ---- threads -----------------------------------------------------------------------------------------------

// One worker after the other, the last one first: threads cost more than these problems.
static inline void run_in_turn(void *pool, int64_t num_workers, void (*work)(void *, int64_t), void *ctx) {
    (void)pool;
    for (int64_t worker = num_workers - 1; worker >= 0; worker--) work(ctx, worker);
}

static inline rt_parallel random_workers(uint64_t *state) {
    const int64_t some = random_int(state, 1, 3);
    const int64_t num_workers = random_int(state, 0, 3) ? some : hostile(state, some);
    return (rt_parallel){.run = random_int(state, 0, 1) ? run_in_turn : NULL, .num_workers = num_workers};
}

static inline int64_t workers_of(rt_parallel parallel) {
    return parallel.run == NULL || parallel.num_workers < 1 ? 1 : parallel.num_workers;
}

// ---- calls -------------------------------------------------------------------------------------------------

enum { MOST_ARRAYS = 20 };

// The arrays of a call, and what else of it is broken. add() knows where the params hold their pointers and strides.
typedef struct arrays {
    int64_t count;
    block x[MOST_ARRAYS];
    rt_dtype dtype[MOST_ARRAYS];
    const void **pointer[MOST_ARRAYS];
    int64_t *strides[MOST_ARRAYS]; // of all dims but the last, which is contiguous; NULL: so are all
    bool optional[MOST_ARRAYS];    // NULL means another valid call
    int64_t null_at, skewed_at;    // of a broken call; beyond count: none
    int64_t scratch_at;            // an output that is written in part
    bool no_params, small_workspace;
} arrays;

static inline arrays no_arrays(void) {
    return (arrays){.null_at = MOST_ARRAYS, .skewed_at = MOST_ARRAYS, .scratch_at = MOST_ARRAYS};
}

// Products of hostile sizes may wrap; judge_block refuses those by their sizes.
static inline block *add(arrays *all, bool is_output, rt_dtype dtype, const void *field, int64_t ndim,
                         const int64_t *sizes, int64_t *strides) {
    const int64_t i = all->count++;
    block *x = &all->x[i];
    *x = (block){.element_bytes = (int64_t)dtype_bytes(dtype), .ndim = ndim, .is_output = is_output};
    all->dtype[i] = dtype, all->pointer[i] = (const void **)(uintptr_t)field, all->strides[i] = strides;
    uint64_t step = 1;
    for (int64_t d = ndim - 1; d >= 0; d--) {
        x->sizes[d] = sizes[d];
        x->strides[d] = strides != NULL && d < ndim - 1 ? strides[d] : (int64_t)step;
        step *= sizes[d] > 0 ? (uint64_t)sizes[d] : 1;
    }
    return x;
}

static inline void add_optional(arrays *all, bool is_output, rt_dtype dtype, const void *field, int64_t ndim,
                                const int64_t *sizes) {
    all->optional[all->count] = true;
    add(all, is_output, dtype, field, ndim, sizes, NULL);
}

// A call of hostile sizes may ask for more than there is; it gets less, and must refuse.
static inline void *give_workspace(int64_t *num_bytes, const arrays *all) {
    if (*num_bytes > (int64_t)1 << 30) *num_bytes = 0;
    void *const workspace = aligned_alloc(64, (size_t)*num_bytes + 64);
    if (all->small_workspace) *num_bytes -= 64;
    return workspace;
}

// Breaks up to two things of a valid call, before its arrays are added. Returns whether it is still valid.
static inline verdict spoil(uint64_t *state, arrays *all, rt_dtype *dtype, int64_t *const *fields, int64_t num_fields,
                            double *const *reals, int64_t num_reals, rt_parallel *parallel) {
    verdict expected = VALID;
    for (int64_t times = random_int(state, 0, 2); times > 0; times--) {
        expected = UNKNOWN;
        const int64_t kind = random_int(state, 0, 10);
        if (kind == 0) *dtype = (rt_dtype)random_int(state, -1, 5);
        if (kind == 1) all->null_at = random_int(state, 0, MOST_ARRAYS - 4);
        if (kind == 2) all->skewed_at = random_int(state, 0, MOST_ARRAYS - 4);
        if (kind == 3) *parallel = random_workers(state);
        if (kind == 4) all->no_params = random_int(state, 0, 3) == 0;
        if (kind == 5) all->small_workspace = true;
        if (kind == 6 && num_reals > 0) *reals[random_int(state, 0, num_reals - 1)] = hostile_real(state);
        if (kind > 6) {
            int64_t *const field = fields[random_int(state, 0, num_fields - 1)];
            *field = hostile(state, *field);
        }
    }
    return expected;
}

// Makes the arrays, unless the call is impossible; forbidden: by rules that are not about arrays.
static inline bool make(arrays *all, uint64_t *state, bool forbidden, verdict *expected) {
    if (forbidden || all->no_params || (int)all->dtype[0] < 0 || all->dtype[0] > RT_F16) *expected = FORBIDDEN;
    for (int64_t i = 0; i < all->count; i++) {
        all->x[i].is_null = i == all->null_at && !all->optional[i];
        all->x[i].is_skewed = i == all->skewed_at;
        const verdict of_block = judge_block(&all->x[i]);
        *expected = worse(*expected, of_block == UNKNOWN ? *expected : of_block);
    }
    if (*expected == IMPOSSIBLE) {
        num_skipped++;
        return false;
    }
    const bool units = random_int(state, 0, 9) > 0; // else any bits
    for (int64_t i = 0; i < all->count; i++) {
        make_block(&all->x[i], state);
        if (units) fill_units(&all->x[i], all->dtype[i], state);
    }
    return true;
}

// Copies all elements of an array to another one of the same sizes.
static inline void copy_elements(const block *from, const block *to) {
    int64_t index[16] = {0}, d = is_empty(from) ? -1 : 0;
    while (d >= 0) {
        int64_t at[2] = {0, 0};
        for (d = 0; d < from->ndim; d++) at[0] += index[d] * from->strides[d], at[1] += index[d] * to->strides[d];
        memcpy(to->data + at[1] * to->element_bytes, from->data + at[0] * from->element_bytes,
               (size_t)from->element_bytes);
        for (d = from->ndim - 1; d >= 0 && ++index[d] == from->sizes[d]; d--) index[d] = 0;
    }
}

// Makes the call. One that is accepted must give what it gives on contiguous arrays, by one worker, bit for bit;
// whether those are the right numbers is what test_*.c show.
static inline void try_call(uint64_t *state, const char *name, arrays *all, void *params,
                            rt_status (*call)(void *params, const arrays *all, rt_parallel parallel), verdict expected,
                            rt_parallel parallel) {
    block copies[MOST_ARRAYS];
    for (int64_t i = 0; i < all->count; i++) copies[i] = copy_of(&all->x[i]);
    if (random_int(state, 0, 19) == 0 && expected != FORBIDDEN) {
        int64_t output = random_int(state, 0, all->count - 1);
        while (!all->x[output].is_output) output = (output + 1) % all->count;
        if (alias(all->x, output, random_int(state, 0, all->count - 1))) expected = FORBIDDEN;
    }
    for (int64_t i = 0; i < all->count; i++) *all->pointer[i] = all->x[i].data;
    if (judge(name, expected, call(params, all, parallel))) {
        block packed[MOST_ARRAYS];
        for (int64_t i = 0; i < all->count; i++) {
            arrays one = no_arrays();
            packed[i] = *add(&one, false, all->dtype[i], NULL, copies[i].ndim, copies[i].sizes, NULL);
            make_block(&packed[i], state);
            copy_elements(&copies[i], &packed[i]);
            *all->pointer[i] = packed[i].data;
            int64_t step = 1;
            for (int64_t d = packed[i].ndim - 1; d > 0 && all->strides[i] != NULL; d--)
                all->strides[i][d - 1] = step *= packed[i].sizes[d];
        }
        if (call(params, all, no_threads()) != RT_OK) wrong(name, "was refused on contiguous arrays");
        for (int64_t i = 0; i < all->count; i++) {
            if (all->x[i].is_output && i != all->scratch_at) {
                copy_elements(&packed[i], &copies[i]);
                compare(name, all->dtype[i], &all->x[i], &copies[i], 0);
            }
            free(packed[i].memory);
        }
    }
    for (int64_t i = 0; i < all->count; i++) free(all->x[i].memory), free(copies[i].memory);
}

// ---- runs --------------------------------------------------------------------------------------------------

// Whether the runs are well formed, in 0..global_len-1 and in 0..local_len-1, and disjoint; UNKNOWN if that is too much
// to list.
static inline verdict judge_runs(const rt_run *runs, int64_t num_runs, int64_t local_len, int64_t global_len,
                                 bool may_share_positions) {
    int64_t total = 0;
    for (int64_t r = 0; r < num_runs; r++) {
        const rt_run run = runs[r];
        if (run.length < 1 || run.stride < 1 || run.global_begin < 0 || run.local_begin < 0) return FORBIDDEN;
        if ((wide)run.global_begin + (wide)(run.length - 1) * run.stride >= global_len) return FORBIDDEN;
        if ((wide)run.local_begin + run.length > local_len) return FORBIDDEN;
        total = run.length > 1000 || total > 1000 ? 1001 : total + run.length;
    }
    if (total > 1000) return UNKNOWN;
    for (int64_t r = 0; r < num_runs; r++)
        for (int64_t s = 0; s < r; s++)
            for (int64_t i = 0; i < runs[r].length; i++)
                for (int64_t j = 0; j < runs[s].length; j++)
                    if (runs[r].local_begin + i == runs[s].local_begin + j ||
                        (!may_share_positions &&
                         runs[r].global_begin + i * runs[r].stride == runs[s].global_begin + j * runs[s].stride))
                        return FORBIDDEN;
    return VALID;
}

static inline int64_t *field_of_run(rt_run *run, int64_t i) {
    int64_t *const fields[] = {&run->global_begin, &run->stride, &run->local_begin, &run->length};
    return fields[i];
}

// ---- the program -------------------------------------------------------------------------------------------

// trial(state, corpus): entry `corpus` of the program's table of found cases, or a random problem if it is -1.
static inline int fuzz_main(int argc, char **argv, int64_t default_trials, int64_t corpus_size,
                            void (*trial)(uint64_t *state, int64_t corpus)) {
    check_isa_or_skip();
    const int64_t trials = argc > 1 ? strtoll(argv[1], NULL, 10) : default_trials;
    trial_seed = argc > 2 ? strtoll(argv[2], NULL, 10) : 0;
    __sanitizer_set_death_callback(print_trial);
    for (trial_number = -corpus_size; trial_number < trials && num_failed < 20; trial_number++) {
        uint64_t state = (uint64_t)trial_seed * UINT64_C(0x9e3779b97f4a7c15) + (uint64_t)trial_number;
        state = random_bits(&state);
        trial(&state, trial_number < 0 ? -trial_number - 1 : -1);
    }
    printf("%" PRId64 " right, %" PRId64 " refused, %" PRId64 " wrong, %" PRId64 " skipped\n", num_right, num_refused,
           num_failed, num_skipped);
    return num_failed > 0;
}

#endif // RINGTILE_TESTS_FUZZ_H
