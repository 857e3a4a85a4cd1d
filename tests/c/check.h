// Shared by all C tests: checks that print file, line and values; element types, random numbers, threads. A test is a
// program whose main() runs its cases and returns check_finish().
#ifndef RINGTILE_TESTS_CHECK_H
#define RINGTILE_TESTS_CHECK_H

#include "../../csrc/ringtile.h"

#include <inttypes.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// ---- checks ------------------------------------------------------------------------------------------------

static int64_t num_passed, num_failed;

// Counts one check; true if it failed, so that the caller prints the values.
static inline bool check_failed(bool ok) {
    num_passed += ok;
    num_failed += !ok;
    return !ok;
}

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (check_failed(condition)) printf("%s:%d: %s\n", __FILE__, __LINE__, #condition);                            \
    } while (0)

#define CHECK_INT(got, want)                                                                                           \
    do {                                                                                                               \
        const int64_t got_ = (got), want_ = (want);                                                                    \
        if (check_failed(got_ == want_))                                                                               \
            printf("%s:%d: %s: got %" PRId64 ", expected %s = %" PRId64 "\n", __FILE__, __LINE__, #got, got_, #want,   \
                   want_);                                                                                             \
    } while (0)

#define CHECK_STATUS(got, want)                                                                                        \
    do {                                                                                                               \
        const rt_status got_ = (got), want_ = (want);                                                                  \
        if (check_failed(got_ == want_))                                                                               \
            printf("%s:%d: %s: got \"%s\", expected \"%s\"\n", __FILE__, __LINE__, #got, rt_status_message(got_),      \
                   rt_status_message(want_));                                                                          \
    } while (0)

// |got - want| <= bound; equal infinities pass, and NaN passes only against NaN.
static inline bool is_close(double got, double want, double bound) {
    if (isnan(want)) return isnan(got);
    return got == want || fabs(got - want) <= bound;
}

#define CHECK_CLOSE(got, want, bound)                                                                                  \
    do {                                                                                                               \
        const double got_ = (got), want_ = (want), bound_ = (bound);                                                   \
        if (check_failed(is_close(got_, want_, bound_)))                                                               \
            printf("%s:%d: %s: got %.17g, expected %.17g +- %.3g\n", __FILE__, __LINE__, #got, got_, want_, bound_);   \
    } while (0)

// Whether rt_wrong_argument names a field of params, "q_stride[0]" by "q", if the message of the status names none. A
// size that makes an array too large, or a position wrong, need not be at fault.
static inline bool is_named(rt_status status, const char *field) {
    const char *const name = rt_wrong_argument(status, 0), *const other = rt_wrong_argument(status, 1);
    if (status == RT_TOO_LARGE || status == RT_BAD_POSITIONS) return *name;
    if (status != RT_BAD_SHAPE && status != RT_BAD_POINTER && status != RT_BAD_STRIDE && status != RT_BAD_SCALE)
        if (status != RT_SHARED_MEMORY) return true;
    return *name && (strstr(field, name) || strstr(name, field) || (*other && strstr(field, other)));
}

// The last call gave a status, which must name the field.
#define CHECK_NAMED(status, field)                                                                                     \
    do {                                                                                                               \
        if (check_failed(is_named(status, #field)))                                                                    \
            printf("%s:%d: %s names \"%s\", expected %s\n", __FILE__, __LINE__, #status, rt_wrong_argument(status, 0), \
                   #field);                                                                                            \
    } while (0)

// call, of params `bad` that are the good ones but for a field, must give a status.
#define CHECK_REFUSED(type, good, field, value, call, status)                                                          \
    do {                                                                                                               \
        type bad = good;                                                                                               \
        bad.field = value;                                                                                             \
        CHECK_STATUS(call, status);                                                                                    \
        CHECK_NAMED(status, field);                                                                                    \
    } while (0)

static inline int check_finish(void) {
    printf("%" PRId64 " passed, %" PRId64 " failed\n", num_passed, num_failed);
    return num_failed > 0;
}

// Ends the program with success if this CPU lacks the instruction set that RINGTILE_CPU_ISA names.
static inline void check_isa_or_skip(void) {
    rt_isa isa;
    if (rt_cpu_isa(&isa) == RT_ISA_MISSING) {
        printf("skipped: this CPU lacks %s\n", getenv("RINGTILE_CPU_ISA"));
        exit(0);
    }
}

// Memory of exactly num_bytes, so that the address sanitizer sees the first byte beyond it.
static inline void *must_alloc(size_t num_bytes) {
    void *memory = malloc(num_bytes > 0 ? num_bytes : 1);
    if (memory == NULL) {
        printf("out of memory: %zu bytes\n", num_bytes);
        exit(1);
    }
    return memory;
}

// ---- random numbers (splitmix64) ---------------------------------------------------------------------------

static inline uint64_t random_bits(uint64_t *state) {
    uint64_t z = *state += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

// An integer in [low, high].
static inline int64_t random_int(uint64_t *state, int64_t low, int64_t high) {
    return low + (int64_t)(random_bits(state) % (uint64_t)(high - low + 1));
}

// Uniform in [-1, 1).
static inline double random_unit(uint64_t *state) { return (double)(int64_t)random_bits(state) * 0x1p-63; }

// ---- element types -----------------------------------------------------------------------------------------

__extension__ typedef _Float16 half; // not ISO C, hence the keyword

static const rt_dtype all_dtypes[] = {RT_F64, RT_F32, RT_BF16, RT_F16};
enum { NUM_DTYPES = 4 };

static inline size_t dtype_bytes(rt_dtype dtype) { return dtype == RT_F64 ? 8 : dtype == RT_F32 ? 4 : 2; }

static inline double load_element(rt_dtype dtype, const void *array, int64_t i) {
    if (dtype == RT_F64) return ((const double *)array)[i];
    if (dtype == RT_F32) return ((const float *)array)[i];
    if (dtype == RT_F16) return (double)((const half *)array)[i];
    const uint32_t bits = (uint32_t)((const uint16_t *)array)[i] << 16;
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

// Rounds to nearest, ties to even.
static inline void store_element(rt_dtype dtype, void *array, int64_t i, double value) {
    if (dtype == RT_F64) {
        ((double *)array)[i] = value;
    } else if (dtype == RT_F32) {
        ((float *)array)[i] = (float)value;
    } else if (dtype == RT_F16) {
        ((half *)array)[i] = (half)value;
    } else {
        const float single = (float)value;
        uint32_t bits;
        memcpy(&bits, &single, sizeof(bits));
        if (isnan(single))
            bits |= UINT32_C(1) << 22;
        else
            bits += UINT32_C(0x7fff) + (bits >> 16 & 1);
        ((uint16_t *)array)[i] = (uint16_t)(bits >> 16);
    }
}

// Half the distance between 1 and the next number.
static inline double unit_roundoff(rt_dtype dtype) {
    return dtype == RT_F64 ? 0x1p-53 : dtype == RT_F32 ? 0x1p-24 : dtype == RT_BF16 ? 0x1p-8 : 0x1p-11;
}

// The smallest positive number of the type: results below it may round to 0.
static inline double smallest(rt_dtype dtype) {
    return dtype == RT_F64 ? 0x1p-1074 : dtype == RT_F32 ? 0x1p-149 : dtype == RT_BF16 ? 0x1p-133 : 0x1p-24;
}

// ---- workers -----------------------------------------------------------------------------------------------

typedef struct thread_job {
    void (*work)(void *ctx, int64_t worker);
    void *ctx;
    int64_t worker;
} thread_job;

static inline void *thread_main(void *arg) {
    const thread_job *job = arg;
    job->work(job->ctx, job->worker);
    return NULL;
}

static inline void run_threads(void *pool, int64_t num_workers, void (*work)(void *, int64_t), void *ctx) {
    (void)pool;
    pthread_t threads[16];
    thread_job jobs[16];
    for (int64_t w = 0; w < num_workers; w++) {
        jobs[w] = (thread_job){work, ctx, w};
        if (pthread_create(&threads[w], NULL, thread_main, &jobs[w]) != 0) exit(1);
    }
    for (int64_t w = 0; w < num_workers; w++) pthread_join(threads[w], NULL);
}

// One thread per worker, all at once; at most 16.
static inline rt_parallel threads_of(int64_t num_workers) {
    return (rt_parallel){.run = run_threads, .num_workers = num_workers};
}

static inline rt_parallel no_threads(void) { return (rt_parallel){.num_workers = 1}; }

#endif // RINGTILE_TESTS_CHECK_H
