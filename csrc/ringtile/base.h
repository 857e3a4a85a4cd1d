// What every function of the core needs: status, element types, threads, instruction sets.
#ifndef RINGTILE_API_BASE_H
#define RINGTILE_API_BASE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define RT_STATUS_LIST(X)                                                                                              \
    X(RT_OK, "ok")                                                                                                     \
    X(RT_BAD_SHAPE, "a size is negative, or a size that must be at least 1 is 0")                                      \
    X(RT_TOO_LARGE, "sizes, strides and workers must not describe more than 2^60 bytes, nor so many "                  \
                    "pairs of a query and a key that int64 cannot count them")                                         \
    X(RT_BAD_HEADS, "num_heads must be a multiple of num_kv_heads")                                                    \
    X(RT_BAD_HEAD_DIM, "head_dim and v_head_dim must be in 1..512")                                                    \
    X(RT_BAD_DTYPE, "dtype must be one of f64, f32, bf16, f16")                                                        \
    X(RT_BAD_STRIDE, "an output must not overlap itself: it needs strides above 0 and rows that stay apart")           \
    X(RT_SHARED_MEMORY, "an output must not share memory with another array of the call")                              \
    X(RT_BAD_SCALE, "scale and softcap must be finite in the arithmetic's dtype (float64 for float64 "                 \
                    "inputs, else float32), and so must 1 / softcap and z_loss; softcap and z_loss must "              \
                    "not be negative, and label_smoothing must be in [0, 1]")                                          \
    X(RT_BAD_MASK, "the batch stride of a mask or of seq_idx must be 0 or the number of tokens; key_begin and "        \
                   "key_end need each other")                                                                          \
    X(RT_BAD_POINTER, "a required pointer is NULL, or not aligned to its elements")                                    \
    X(RT_BAD_RUN, "a run needs length >= 1, stride >= 1, positions inside the global sequence and local "              \
                  "tokens inside the local tensor; two runs of a rank must not share a position or a token")           \
    X(RT_BAD_FRESH, "with fresh dk and dv, the runs must hold every key; rounded_dk and rounded_dv need "              \
                    "them fresh, and need each other")                                                                 \
    X(RT_BAD_LAYOUT, "the runs of all ranks must hold every global position exactly once")                             \
    X(RT_BAD_RANK, "a rank must be in [0, num_ranks)")                                                                 \
    X(RT_BAD_POSITIONS, "positions of one side must rise, and lie in the sequence")                                    \
    X(RT_BAD_DIM, "dim must name a dimension of the tensor; at most 16 dimensions")                                    \
    X(RT_BAD_KIND, "GLU kind must be one of rt_glu_kind")                                                              \
    X(RT_BAD_WIDTH, "width must be in 1..8")                                                                           \
    X(RT_BAD_PROBABILITY, "a probability must be in [0, 1]")                                                           \
    X(RT_BAD_LABEL, "a label is neither ignore_index nor in [0, vocab_size)")                                          \
    X(RT_CAPACITY, "the output array is too small")                                                                    \
    X(RT_WORKSPACE, "the workspace is NULL, not 64-byte aligned, or smaller than its *_bytes function "                \
                    "returns")                                                                                         \
    X(RT_BAD_ISA, "RINGTILE_CPU_ISA must be generic, avx2, avx512, avx512_bf16 or amx_bf16")                           \
    X(RT_ISA_MISSING, "this CPU, its system or this build lacks what RINGTILE_CPU_ISA asks for")                       \
    X(RT_BAD_CUDA_ISA, "RINGTILE_CUDA_ISA must be sm_80, or sm_90a on a GPU of compute capability 9.0")                \
    X(RT_CUDA, "the CUDA runtime refused to start a kernel")

typedef enum rt_status {
#define RT_STATUS_ENUM(name, text) name,
    RT_STATUS_LIST(RT_STATUS_ENUM)
#undef RT_STATUS_ENUM
} rt_status;

// A static, NUL-terminated sentence for a status; never NULL.
const char *rt_status_message(rt_status status);

// The argument, or field of params, that is wrong where the last call of this thread returned the status: "dk", or one
// of "begin or end"; number 1: the array that it shares memory with. "" if there is none, or the message names it.
const char *rt_wrong_argument(rt_status status, int number);

typedef enum rt_dtype { RT_F64, RT_F32, RT_BF16, RT_F16 } rt_dtype;

// The caller's threads. run() calls work(ctx, worker) for every worker in [0, num_workers), in any order, concurrently
// or not, and returns when all have returned. A NULL run means one worker, the calling thread.
typedef struct rt_parallel {
    void (*run)(void *pool, int64_t num_workers, void (*work)(void *ctx, int64_t worker), void *ctx);
    void *pool;
    int64_t num_workers;
} rt_parallel;

typedef enum rt_isa { RT_ISA_GENERIC, RT_ISA_AVX2, RT_ISA_AVX512, RT_ISA_AVX512_BF16, RT_ISA_AMX_BF16 } rt_isa;

// The instruction set of every kernel: the one that RINGTILE_CPU_ISA names, else the best of this CPU. Chosen once, at
// the first call; thread-safe.
//   RT_BAD_ISA, RT_ISA_MISSING (the variable's value is wrong), RT_BAD_POINTER; *isa is not written then
rt_status rt_cpu_isa(rt_isa *isa);
const char *rt_isa_name(rt_isa isa); // "generic", "avx2", "avx512", "avx512_bf16", "amx_bf16"
rt_isa rt_last_isa(void);            // of this build: a compiler without AMX leaves amx_bf16 out

#ifdef __cplusplus
}
#endif

#endif // RINGTILE_API_BASE_H
