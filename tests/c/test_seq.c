// Status messages, runs, layouts, and rows packed, unpacked and added. The oracle of the copies is one loop over every
// element.
#include "../../csrc/seq/runs.h"
#include "layouts.h"

static void test_status_messages_are_distinct(void) {
    static const rt_status all[] = {
#define ENTRY(name, text) name,
        RT_STATUS_LIST(ENTRY)
#undef ENTRY
    };
    const int num_statuses = (int)(sizeof(all) / sizeof(all[0]));
    for (int i = 0; i < num_statuses; i++) {
        CHECK(strlen(rt_status_message(all[i])) > 0);
        for (int j = 0; j < i; j++) CHECK(strcmp(rt_status_message(all[i]), rt_status_message(all[j])) != 0);
    }
    CHECK(strcmp(rt_status_message((rt_status)num_statuses), "unknown status") == 0);
}

static void test_runs_check_refuses_each_malformed_run(void) {
    const struct {
        rt_run run;
        rt_status want;
    } cases[] = {
        {{0, 1, 0, 8}, RT_OK},
        {{5, 3, 2, 6}, RT_OK},
        {{0, 1, 0, 0}, RT_BAD_RUN},
        {{0, 1, 0, -1}, RT_BAD_RUN},
        {{0, 0, 0, 1}, RT_BAD_RUN},
        {{0, -1, 0, 4}, RT_BAD_RUN},
        {{-1, 1, 0, 4}, RT_BAD_RUN},
        {{0, 1, -1, 4}, RT_BAD_RUN},
        {{0, 1, 0, 9}, RT_BAD_RUN},
        {{0, 1, 8, 1}, RT_BAD_RUN},
        {{0, 1, 1, 8}, RT_BAD_RUN},
        {{0, 1, INT64_MAX, 4}, RT_BAD_RUN},
        {{INT64_MAX - 2, 1, 0, 4}, RT_BAD_RUN},
        {{0, INT64_MAX / 2, 0, 4}, RT_BAD_RUN},
        {{INT64_MIN, INT64_MIN, INT64_MIN, INT64_MIN}, RT_BAD_RUN},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
        CHECK_STATUS(rt_runs_check(&cases[i].run, 1, 8), cases[i].want);
    // Runs may be listed in any order, but may not share a local token.
    CHECK_STATUS(rt_runs_check((const rt_run[]){{0, 1, 4, 4}, {8, 1, 0, 2}, {16, 1, 2, 2}}, 3, 8), RT_OK);
    CHECK_STATUS(rt_runs_check((const rt_run[]){{0, 1, 4, 4}, {8, 1, 0, 2}, {16, 1, 1, 2}}, 3, 8), RT_BAD_RUN);
    CHECK_STATUS(rt_runs_check((const rt_run[]){{0, 1, 0, 8}, {8, 1, 2, 1}}, 2, 8), RT_BAD_RUN);
    // Nor, where a rank holds them, a global position, whatever the strides.
    CHECK_STATUS(rt_runs_check((const rt_run[]){{6, 1, 0, 2}, {3, 1, 2, 4}}, 2, 8), RT_OK);
    CHECK_STATUS(rt_runs_check_inside((const rt_run[]){{0, 2, 0, 4}, {1, 2, 4, 4}}, 2, 8, INT64_MAX), RT_OK);
    CHECK_STATUS(rt_runs_check_inside((const rt_run[]){{6, 1, 0, 2}, {3, 1, 2, 4}}, 2, 8, INT64_MAX), RT_BAD_RUN);
    CHECK_STATUS(rt_runs_check_inside((const rt_run[]){{0, 4, 0, 4}, {3, 3, 4, 4}}, 2, 8, INT64_MAX), RT_BAD_RUN); // 12
    CHECK_STATUS(rt_runs_check_inside((const rt_run[]){{0, 4, 0, 3}, {3, 3, 4, 4}}, 2, 8, INT64_MAX), RT_OK);
    CHECK_STATUS(rt_runs_check_inside((const rt_run[]){{0, INT64_MAX, 0, 2}, {0, 1, 4, 1}}, 2, 8, INT64_MAX),
                 RT_BAD_RUN);
    // In no time, though 2^31 steps of one end before they meet a position of the other.
    const rt_run apart[] = {{0, 1LL << 31, 0, 1LL << 31}, {1, 1LL << 31, 1LL << 31, 1LL << 31}};
    CHECK_STATUS(rt_runs_check_inside(apart, 2, INT64_MAX, INT64_MAX), RT_OK);
    CHECK_STATUS(rt_runs_check(NULL, 0, 0), RT_OK);
    CHECK_STATUS(rt_runs_check(NULL, 1, 8), RT_BAD_POINTER);
    CHECK_STATUS(rt_runs_check(NULL, -1, 8), RT_BAD_SHAPE);
    CHECK_STATUS(rt_runs_check(NULL, 0, -1), RT_BAD_SHAPE);
}

static void test_layout_check_accepts_the_named_layouts(void) {
    rt_layout_place places[16];
    const rt_run contiguous[] = {{0, 1, 0, 8}, {8, 1, 0, 8}};
    const rt_run zigzag[] = {{0, 1, 0, 4}, {12, 1, 4, 4}, {4, 1, 0, 4}, {8, 1, 4, 4}};
    const rt_run striped[] = {{0, 2, 0, 8}, {1, 2, 0, 8}};
    const rt_run listed_backwards[] = {{12, 1, 4, 4}, {0, 1, 0, 4}, {4, 1, 0, 8}};
    CHECK_STATUS(rt_layout_check(contiguous, (int64_t[]){0, 1, 2}, 2, 16, places), RT_OK);
    CHECK_STATUS(rt_layout_check(zigzag, (int64_t[]){0, 2, 4}, 2, 16, places), RT_OK);
    CHECK_STATUS(rt_layout_check(striped, (int64_t[]){0, 1, 2}, 2, 16, places), RT_OK);
    CHECK_STATUS(rt_layout_check(listed_backwards, (int64_t[]){0, 2, 3}, 2, 16, places), RT_OK);
    CHECK_STATUS(rt_layout_check(contiguous, (int64_t[]){0, 0, 2}, 2, 16, places), RT_BAD_RUN); // local twice
    CHECK_STATUS(rt_layout_check(NULL, (int64_t[]){0, 0, 0}, 2, 0, NULL), RT_OK);
}

static void test_layout_check_refuses_runs_that_do_not_partition(void) {
    rt_layout_place places[16];
    const rt_run missing[] = {{0, 1, 0, 8}, {8, 1, 0, 7}};
    const rt_run twice[] = {{0, 1, 0, 8}, {7, 1, 0, 8}};
    const rt_run too_many[] = {{0, 1, 0, 16}, {8, 1, 0, 8}};
    const rt_run huge[] = {{0, 1, 0, INT64_MAX}, {8, 1, 0, INT64_MAX}};
    const rt_run local_gap[] = {{0, 1, 1, 8}, {8, 1, 0, 8}};
    const rt_run outside[] = {{0, 1, 0, 8}, {9, 1, 0, 8}};
    const rt_run empty[] = {{0, 1, 0, 8}, {8, 1, 0, 0}};
    const int64_t offsets[] = {0, 1, 2};
    CHECK_STATUS(rt_layout_check(missing, offsets, 2, 16, places), RT_BAD_LAYOUT);
    CHECK_STATUS(rt_layout_check(twice, offsets, 2, 16, places), RT_BAD_LAYOUT);
    CHECK_STATUS(rt_layout_check(too_many, offsets, 2, 16, places), RT_BAD_LAYOUT);
    CHECK_STATUS(rt_layout_check(huge, offsets, 2, 16, places), RT_BAD_LAYOUT);
    CHECK_STATUS(rt_layout_check(local_gap, offsets, 2, 16, places), RT_BAD_RUN);
    CHECK_STATUS(rt_layout_check(outside, offsets, 2, 16, places), RT_BAD_RUN);
    CHECK_STATUS(rt_layout_check(empty, offsets, 2, 16, places), RT_BAD_RUN);
    CHECK_STATUS(rt_layout_check(twice, (int64_t[]){0, 1, 0}, 2, 16, places), RT_BAD_LAYOUT);
    CHECK_STATUS(rt_layout_check(twice, (int64_t[]){1, 1, 2}, 2, 16, places), RT_BAD_LAYOUT);
    CHECK_STATUS(rt_layout_check(NULL, offsets, 2, 16, places), RT_BAD_POINTER);
    CHECK_STATUS(rt_layout_check(twice, NULL, 2, 16, places), RT_BAD_POINTER);
    CHECK_STATUS(rt_layout_check(twice, offsets, 2, 16, NULL), RT_BAD_POINTER);
    CHECK_STATUS(rt_layout_check(twice, offsets, 0, 16, places), RT_BAD_SHAPE);
    CHECK_STATUS(rt_layout_check(twice, offsets, 2, -1, places), RT_BAD_SHAPE);
}

// Positions that no memory could list take as long as the few runs that hold them.
static void test_layout_check_takes_time_for_runs(void) {
    rt_layout_place places[3];
    const int64_t half = 1LL << 60, offsets[] = {0, 1, 2}, of_three[] = {0, 2, 3};
    const rt_run contiguous[] = {{0, 1, 0, half}, {half, 1, 0, half}};
    const rt_run striped[] = {{0, 2, 0, half}, {1, 2, 0, half}};
    const rt_run nested[] = {{0, 2 * half - 1, 0, 2}, {1, 2, 2, half - 1}, {2, 2, 0, half - 1}};
    const rt_run twice[] = {{0, 2, 0, half}, {0, 2, 0, half}};
    const rt_run crossing[] = {{0, half + 1, 0, 2}, {1, 2, 2, half - 1}, {2, 2, 0, half - 1}};
    CHECK_STATUS(rt_layout_check(contiguous, offsets, 2, 2 * half, places), RT_OK);
    CHECK_STATUS(rt_layout_check(striped, offsets, 2, 2 * half, places), RT_OK);
    CHECK_STATUS(rt_layout_check(nested, of_three, 2, 2 * half, places), RT_OK);
    CHECK_STATUS(rt_layout_check(striped, offsets, 2, 2 * half - 1, places), RT_BAD_LAYOUT);
    CHECK_STATUS(rt_layout_check(twice, offsets, 2, 2 * half, places), RT_BAD_LAYOUT);
    CHECK_STATUS(rt_layout_check(crossing, of_three, 2, 2 * half, places), RT_BAD_LAYOUT);
}

// Pairs around a middle: far more pairs of runs that interleave than positions.
static void test_layout_check_walks_dense_runs(void) {
    enum { NUM_RUNS = 40000 };
    rt_run *runs = must_alloc(NUM_RUNS * sizeof(*runs));
    rt_layout_place *places = must_alloc(NUM_RUNS * sizeof(*places));
    for (int64_t i = 0; i < NUM_RUNS; i++) runs[i] = (rt_run){i, 2 * (NUM_RUNS - i) - 1, 2 * i, 2};
    CHECK_STATUS(rt_layout_check(runs, (int64_t[]){0, NUM_RUNS}, 1, 2 * NUM_RUNS, places), RT_OK);
    runs[7].stride++;
    CHECK_STATUS(rt_layout_check(runs, (int64_t[]){0, NUM_RUNS}, 1, 2 * NUM_RUNS, places), RT_BAD_LAYOUT);
    free(runs), free(places);
}

static void test_positions_fill_every_local_token(void) {
    int64_t positions[5];
    const rt_run runs[] = {{10, 3, 2, 3}, {4, 1, 0, 2}};
    const int64_t want[] = {4, 5, 10, 13, 16};
    CHECK_STATUS(rt_runs_positions(runs, 2, positions, 5), RT_OK);
    for (int i = 0; i < 5; i++) CHECK_INT(positions[i], want[i]);
    CHECK_STATUS(rt_runs_positions(runs, 1, positions, 5), RT_BAD_RUN);
    const rt_run twice[] = {{0, 1, 0, 3}, {8, 1, 2, 2}};
    CHECK_STATUS(rt_runs_positions(twice, 2, positions, 5), RT_BAD_RUN);
    CHECK_STATUS(rt_runs_positions(runs, 2, NULL, 5), RT_BAD_POINTER);
    CHECK_STATUS(rt_runs_positions(NULL, 0, NULL, 0), RT_OK);
}

// ---- rows --------------------------------------------------------------------------------------------------

enum { MAX_NDIM = 5 };

// A tensor with its dims in a random order in memory.
typedef struct tensor {
    int64_t sizes[MAX_NDIM], strides[MAX_NDIM], num_elements;
    uint8_t *bytes;
} tensor;

static tensor random_tensor(uint64_t *state, const int64_t *sizes, int64_t ndim, int64_t element_bytes) {
    tensor t = {.num_elements = 1};
    int64_t order[MAX_NDIM];
    for (int64_t d = 0; d < ndim; d++) order[d] = d;
    for (int64_t d = ndim - 1; random_int(state, 0, 1) && d > 0; d--) {
        const int64_t other = random_int(state, 0, d), kept = order[d];
        order[d] = order[other];
        order[other] = kept;
    }
    for (int64_t i = ndim - 1; i >= 0; i--) {
        const int64_t d = order[i];
        t.sizes[d] = sizes[d];
        t.strides[d] = t.num_elements;
        t.num_elements *= sizes[d];
    }
    t.bytes = must_alloc((size_t)(t.num_elements * element_bytes));
    for (int64_t i = 0; i < t.num_elements * element_bytes; i++) t.bytes[i] = (uint8_t)random_bits(state);
    return t;
}

// Whether every element of local equals its element of global.
static bool local_equals_global(const rt_rows_tensor *x, const int64_t *positions) {
    int64_t num_elements = 1;
    for (int64_t d = 0; d < x->ndim; d++) num_elements *= x->sizes[d];
    for (int64_t i = 0; i < num_elements; i++) {
        int64_t index = i, global_at = 0, local_at = 0;
        for (int64_t d = x->ndim - 1; d >= 0; d--) {
            const int64_t at = index % x->sizes[d];
            global_at += (d == x->dim ? positions[at] : at) * x->global_strides[d];
            local_at += at * x->local_strides[d];
            index /= x->sizes[d];
        }
        const size_t bytes = (size_t)x->element_bytes;
        const char *global = x->global, *local = x->local;
        if (memcmp(global + (size_t)global_at * bytes, local + (size_t)local_at * bytes, bytes) != 0) return false;
    }
    return true;
}

enum { MAX_TENSORS = 6 };

// Packs the rows of random tensors for every rank, and unpacks them into others, which must equal the first.
static void check_rows(uint64_t *state, int64_t seq_len, int64_t max_size, rt_parallel parallel) {
    const layout l = random_layout(state, seq_len);
    const int64_t num_tensors = random_int(state, 1, MAX_TENSORS);
    tensor global[MAX_TENSORS], unpacked[MAX_TENSORS], local[MAX_TENSORS];
    rt_rows_tensor x[MAX_TENSORS];
    for (int64_t i = 0; i < num_tensors; i++) {
        const int64_t ndim = random_int(state, 1, MAX_NDIM), dim = random_int(state, 0, ndim - 1);
        int64_t sizes[MAX_NDIM];
        for (int64_t d = 0; d < ndim; d++) sizes[d] = d == dim ? seq_len : random_int(state, 1, max_size);
        x[i] = (rt_rows_tensor){
            .ndim = ndim, .dim = dim, .element_bytes = random_int(state, 1, 17), .global_len = seq_len};
        global[i] = random_tensor(state, sizes, ndim, x[i].element_bytes);
        unpacked[i] = random_tensor(state, sizes, ndim, x[i].element_bytes);
        if (dim > 0 && random_int(state, 0, 2) == 0) global[i].strides[0] = 0; // an expanded source
    }
    for (int64_t rank = 0; rank < l.num_ranks; rank++) {
        const int64_t local_len = local_len_of(&l, rank);
        const rt_rows_params p = {.num_tensors = num_tensors,
                                  .tensors = x,
                                  .num_runs = l.run_offsets[rank + 1] - l.run_offsets[rank],
                                  .runs = l.runs + l.run_offsets[rank]};
        int64_t *positions = positions_of(&l, rank);
        for (int64_t i = 0; i < num_tensors; i++) {
            int64_t sizes[MAX_NDIM];
            memcpy(sizes, unpacked[i].sizes, sizeof(sizes));
            sizes[x[i].dim] = local_len;
            local[i] = random_tensor(state, sizes, x[i].ndim, x[i].element_bytes);
            x[i].sizes = local[i].sizes, x[i].local_strides = local[i].strides, x[i].local = local[i].bytes;
            x[i].global_strides = global[i].strides, x[i].global = global[i].bytes;
        }
        CHECK_STATUS(rt_rows_pack(&p, parallel), RT_OK);
        for (int64_t i = 0; i < num_tensors; i++) {
            CHECK(local_equals_global(&x[i], positions));
            x[i].global_strides = unpacked[i].strides, x[i].global = unpacked[i].bytes;
        }
        CHECK_STATUS(rt_rows_unpack(&p, parallel), RT_OK);
        for (int64_t i = 0; i < num_tensors; i++) {
            CHECK(local_equals_global(&x[i], positions));
            free(local[i].bytes);
        }
        free(positions);
    }
    // All ranks have written: as the local tensor of the identity layout, unpacked equals global.
    int64_t *identity = must_alloc((size_t)seq_len * sizeof(*identity));
    for (int64_t i = 0; i < seq_len; i++) identity[i] = i;
    for (int64_t i = 0; i < num_tensors; i++) {
        x[i].sizes = unpacked[i].sizes, x[i].local_strides = unpacked[i].strides, x[i].local = unpacked[i].bytes;
        x[i].global_strides = global[i].strides, x[i].global = global[i].bytes;
        CHECK(seq_len == 0 || local_equals_global(&x[i], identity));
        free(global[i].bytes), free(unpacked[i].bytes);
    }
    free(identity);
}

static void test_rows_of_any_tensors(void) {
    uint64_t state = 2;
    for (int round = 0; round < 60; round++) check_rows(&state, random_int(&state, 0, 40), 4, no_threads());
    for (int round = 0; round < 4; round++) check_rows(&state, random_int(&state, 900, 1100), 8, threads_of(4));
}

// The rows of k and v, (B, n, G, D) and (B, n, G, Dv), of which only some go on in a message: each sum is that of one
// addition, and other rows stay.
static void check_sums(uint64_t *state, rt_dtype dtype, const rt_run *runs, int64_t num_runs, int64_t num_rows,
                       int64_t local_len, int64_t padding, rt_parallel parallel) {
    enum { B = 2, G = 3 };
    const int64_t bytes = dtype == RT_F64 ? 8 : 4, dims[] = {8, 5};
    tensor global[2], local[2];
    char *before[2];
    rt_rows_tensor x[2];
    for (int i = 0; i < 2; i++) {
        const int64_t rows[] = {B, num_rows, G, dims[i] + padding}, packed[] = {B, local_len, G, dims[i]};
        global[i] = random_tensor(state, rows, 4, bytes), local[i] = random_tensor(state, packed, 4, bytes);
        for (int64_t j = 0; j < global[i].num_elements; j++)
            store_element(dtype, global[i].bytes, j, random_unit(state));
        for (int64_t j = 0; j < local[i].num_elements; j++) store_element(dtype, local[i].bytes, j, random_unit(state));
        before[i] = must_alloc((size_t)(global[i].num_elements * bytes));
        memcpy(before[i], global[i].bytes, (size_t)(global[i].num_elements * bytes));
        x[i] = (rt_rows_tensor){4,
                                1,
                                bytes,
                                local[i].sizes,
                                num_rows,
                                global[i].strides,
                                local[i].strides,
                                global[i].bytes,
                                local[i].bytes};
    }
    CHECK_STATUS(rt_rows_add(&(rt_rows_params){2, x, num_runs, runs}, dtype, parallel), RT_OK);
    for (int i = 0; i < 2; i++) {
        const int64_t *const step = global[i].strides, *const packed_step = local[i].strides;
        for (int64_t b = 0; b < B; b++)
            for (int64_t g = 0; g < G; g++)
                for (int64_t d = 0; d < dims[i]; d++)
                    for (int64_t r = 0; r < num_runs; r++)
                        for (int64_t j = 0; j < runs[r].length; j++) {
                            const int64_t row = runs[r].global_begin + j * runs[r].stride;
                            const int64_t at = b * step[0] + row * step[1] + g * step[2] + d * step[3];
                            const int64_t from = b * packed_step[0] + (runs[r].local_begin + j) * packed_step[1] +
                                                 g * packed_step[2] + d * packed_step[3];
                            if (dtype == RT_F64)
                                ((double *)before[i])[at] += ((double *)local[i].bytes)[from];
                            else
                                ((float *)before[i])[at] += ((float *)local[i].bytes)[from];
                        }
        CHECK(memcmp(before[i], global[i].bytes, (size_t)(global[i].num_elements * bytes)) == 0);
        free(global[i].bytes), free(local[i].bytes), free(before[i]);
    }
}

static void test_rows_are_added_once(void) {
    uint64_t state = 5;
    enum { MANY = 150 }; // more than one launch takes without a table
    rt_run many[MANY];
    for (int64_t r = 0; r < MANY; r++) many[r] = (rt_run){3 * r, 2, 2 * r, 2};
    const rt_run one[] = {{0, 1, 0, 7}}, some[] = {{5, 1, 1, 3}, {10, 3, 4, 2}, {0, 1, 6, 1}};
    for (int round = 0; round < 8; round++) {
        const rt_dtype dtype = round % 2 ? RT_F64 : RT_F32;
        const int64_t padding = round / 2 % 2;
        check_sums(&state, dtype, one, 1, 7, 7, padding, no_threads());
        check_sums(&state, dtype, some, 3, 16, 8, padding, no_threads());
        check_sums(&state, dtype, NULL, 0, 4, 0, padding, no_threads());
    }
    check_sums(&state, RT_F32, many, MANY, 3 * MANY, 2 * MANY, 0, threads_of(3));
}

static rt_status pack(const rt_rows_params *p, const rt_rows_tensor *x) {
    rt_rows_params of_x = *p;
    of_x.tensors = x;
    return rt_rows_pack(&of_x, no_threads());
}

static void test_rows_refuse_malformed_params(void) {
    const int64_t sizes[] = {2, 4}, global_strides[] = {8, 1}, local_strides[] = {4, 1};
    const rt_run run = {0, 2, 0, 4};
    char global[17] = "abcdefghijklmnop", local[9] = "";
    const rt_rows_tensor good = {.ndim = 2,
                                 .dim = 1,
                                 .element_bytes = 1,
                                 .sizes = sizes,
                                 .global_len = 8,
                                 .global_strides = global_strides,
                                 .local_strides = local_strides,
                                 .global = global,
                                 .local = local};
    const rt_rows_params p = {.num_tensors = 1, .tensors = &good, .num_runs = 1, .runs = &run};
    CHECK_STATUS(rt_rows_pack(&p, no_threads()), RT_OK);
    CHECK(strcmp(local, "acegikmo") == 0);

#define REFUSED(field, value, status) CHECK_REFUSED(rt_rows_tensor, good, field, value, pack(&p, &bad), status)
    REFUSED(ndim, 0, RT_BAD_DIM);
    REFUSED(ndim, 17, RT_BAD_DIM);
    REFUSED(dim, 2, RT_BAD_DIM);
    REFUSED(dim, -1, RT_BAD_DIM);
    REFUSED(element_bytes, 0, RT_BAD_SHAPE);
    REFUSED(global_len, -1, RT_BAD_SHAPE);
    REFUSED(global_len, 6, RT_BAD_RUN);
    REFUSED(sizes, ((const int64_t[]){2, 3}), RT_BAD_RUN);
    REFUSED(sizes, ((const int64_t[]){-2, 4}), RT_BAD_SHAPE);
    REFUSED(sizes, NULL, RT_BAD_POINTER);
    REFUSED(global_strides, NULL, RT_BAD_POINTER);
    REFUSED(local_strides, NULL, RT_BAD_POINTER);
    REFUSED(element_bytes, INT64_MAX, RT_TOO_LARGE);
    REFUSED(global_len, INT64_MAX, RT_TOO_LARGE);
    REFUSED(global_strides, ((const int64_t[]){INT64_MIN, 1}), RT_TOO_LARGE);
    REFUSED(sizes, ((const int64_t[]){INT64_C(1) << 62, 4}), RT_TOO_LARGE);
    REFUSED(local_strides, ((const int64_t[]){0, 1}), RT_BAD_STRIDE);
    REFUSED(local_strides, ((const int64_t[]){3, 1}), RT_BAD_STRIDE);
    REFUSED(local_strides, ((const int64_t[]){4, -1}), RT_BAD_STRIDE);
    REFUSED(global, NULL, RT_BAD_POINTER);
    REFUSED(local, global + 2, RT_SHARED_MEMORY);
#undef REFUSED
#define REFUSED(field, value, status)                                                                                  \
    CHECK_REFUSED(rt_rows_params, p, field, value, rt_rows_pack(&bad, no_threads()), status)
    REFUSED(runs, NULL, RT_BAD_POINTER);
    REFUSED(runs, ((const rt_run[]){{0, 2, 1, 4}}), RT_BAD_RUN);
    REFUSED(num_runs, -1, RT_BAD_SHAPE);
    REFUSED(tensors, NULL, RT_BAD_POINTER);
    REFUSED(num_tensors, -1, RT_BAD_SHAPE);
    REFUSED(num_tensors, RT_MAX_ROWS_TENSORS + 1, RT_BAD_SHAPE);
    CHECK_STATUS(rt_rows_pack(NULL, no_threads()), RT_BAD_POINTER);
#undef REFUSED
    const rt_rows_tensor both[] = {good, good}; // write to local
    CHECK_STATUS(rt_rows_pack(&(rt_rows_params){2, both, 1, &run}, no_threads()), RT_SHARED_MEMORY);
    rt_rows_tensor expanded = good; // a legal source, not a legal destination
    expanded.global_strides = (const int64_t[]){0, 1};
    CHECK_STATUS(pack(&p, &expanded), RT_OK);
    const rt_rows_params of_expanded = {1, &expanded, 1, &run};
    CHECK_STATUS(rt_rows_unpack(&of_expanded, no_threads()), RT_BAD_STRIDE);

    float sums[8] = {0}, terms[4] = {1, 2, 3, 4};
    rt_rows_tensor numbers = {1, 0, 4, &(int64_t){4}, 8, &(int64_t){1}, &(int64_t){1}, sums, terms};
    const rt_rows_params addition = {1, &numbers, 1, &run};
    CHECK_STATUS(rt_rows_add(&addition, RT_F32, no_threads()), RT_OK);
    CHECK(sums[6] == 4 && sums[7] == 0);
    CHECK_STATUS(rt_rows_add(&addition, RT_F64, no_threads()), RT_BAD_DTYPE); // of another size
    CHECK_STATUS(rt_rows_add(&addition, RT_BF16, no_threads()), RT_BAD_DTYPE);
    CHECK_STATUS(rt_rows_add(&addition, (rt_dtype)9, no_threads()), RT_BAD_DTYPE);
    numbers.local = (char *)terms + 1;
    CHECK_STATUS(rt_rows_add(&addition, RT_F32, no_threads()), RT_BAD_POINTER);
}

int main(void) {
    test_status_messages_are_distinct();
    test_runs_check_refuses_each_malformed_run();
    test_positions_fill_every_local_token();
    test_layout_check_accepts_the_named_layouts();
    test_layout_check_refuses_runs_that_do_not_partition();
    test_layout_check_takes_time_for_runs();
    test_layout_check_walks_dense_runs();
    test_rows_of_any_tensors();
    test_rows_are_added_once();
    test_rows_refuse_malformed_params();
    return check_finish();
}
