// The multiply-add peak of this CPU: the ceiling `ringtile bench` holds the kernels against. Linked into
// ringtile/_bench.abi3.so only; the C API and the ops know nothing of it.
#ifndef RINGTILE_BENCH_MULTIPLY_ADD_H
#define RINGTILE_BENCH_MULTIPLY_ADD_H

#include "../ringtile.h"

#ifdef __cplusplus
extern "C" {
#endif

// Keeps the f32 multiply-add units of every worker's core busy for `iterations` rounds, from registers alone. *flops is
// the work of all workers together; the caller times the call.
//   iterations: at most 2^32, some twenty seconds;  isa: as rt_cpu_isa chose it
//   RT_BAD_SHAPE, RT_TOO_LARGE (iterations), RT_BAD_POINTER, RT_BAD_ISA (not an rt_isa), RT_ISA_MISSING
rt_status rt_multiply_add(rt_isa isa, int64_t iterations, double *flops, rt_parallel parallel);

#ifdef __cplusplus
}
#endif

typedef struct rt_multiply_add_kernel {
    double (*run)(int64_t iterations); // the result only keeps the compiler from dropping the work
    int64_t flops;                     // of one iteration
} rt_multiply_add_kernel;

extern const rt_multiply_add_kernel rt_multiply_add_generic;
#if defined(__x86_64__)
extern const rt_multiply_add_kernel rt_multiply_add_avx2, rt_multiply_add_avx512;
#endif

#endif // RINGTILE_BENCH_MULTIPLY_ADD_H
