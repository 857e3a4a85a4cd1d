// The C API of ringtile's core: attention over a running softmax, recurrences and their convolution, sequence layouts, the
// ring's plan, GLU, softmax cross entropy and dropout. It works on raw pointers, shapes and strides, and has no notion of PyTorch, Python or processes.
//
// Conventions
//   Shape letters  B batch, S global tokens, N local queries, K keys of this block, H query heads,
//                  G kv heads (H is a multiple of G), D head dim, Dv value head dim, W ranks,
//                  T tokens of a tile, F MLP intermediate size, V vocabulary, R runs.
//   Strides        counted in elements; the last dim always has stride 1.
//   Errors         every function that can fail returns an rt_status, and rt_status_message() says what was expected.
//                  These functions check every precondition, once: RT_TOO_LARGE, RT_BAD_POINTER and
//                  RT_SHARED_MEMORY are possible everywhere. They trust that an array has the size that its params
//                  describe, and find arrays that share memory, except two with gaps that interleave.
//   Memory         nothing here allocates, prints, aborts, or keeps state between calls. A function that needs
//                  scratch takes a workspace; a *_bytes function returns its size.
//   Determinism    the same inputs give the same bits for any number of workers.
#ifndef RINGTILE_H
#define RINGTILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// ---- status ------------------------------------------------------------------------------------

#define RT_STATUS_LIST(X)                                                                                    \
    X(RT_OK, "ok")                                                                                           \
    X(RT_BAD_SHAPE, "a size is negative, or a size that must be at least 1 is 0")                            \
    X(RT_TOO_LARGE, "sizes, strides and workers must not describe more than 2^60 bytes, nor so many "        \
                    "pairs of a query and a key that int64 cannot count them")                               \
    X(RT_BAD_HEADS, "num_heads must be a multiple of num_kv_heads")                                          \
    X(RT_BAD_HEAD_DIM, "head_dim and v_head_dim must be in 1..512")                                          \
    X(RT_BAD_DTYPE, "dtype must be one of f64, f32, bf16, f16")                                              \
    X(RT_BAD_STRIDE, "an output must not overlap itself: it needs strides above 0 and rows that stay apart") \
    X(RT_SHARED_MEMORY, "an output must not share memory with another array of the call")                    \
    X(RT_BAD_SCALE, "scale and softcap must be finite in the arithmetic's dtype (float64 for float64 "       \
                    "inputs, else float32), and so must 1 / softcap and z_loss; softcap and z_loss must "    \
                    "not be negative, and label_smoothing must be in [0, 1]")                                \
    X(RT_BAD_MASK, "the batch stride of a mask or of seq_idx must be 0 or the number of tokens")             \
    X(RT_BAD_POINTER, "a required pointer is NULL, or not aligned to its elements")                          \
    X(RT_BAD_RUN, "a run needs length >= 1, stride >= 1, positions inside the global sequence and local "    \
                  "tokens inside the local tensor; two runs of a rank must not share a position or a token") \
    X(RT_BAD_FRESH, "with fresh dk and dv, the runs must hold every key; rounded_dk and rounded_dv need "    \
                    "them fresh, and need each other")                                                       \
    X(RT_BAD_LAYOUT, "the runs of all ranks must hold every global position exactly once")                   \
    X(RT_BAD_RANK, "a rank must be in [0, num_ranks)")                                                       \
    X(RT_BAD_PLAN, "below and attended must be as rt_plan_below and rt_plan_attended wrote them")            \
    X(RT_BAD_RATE,                                                                                           \
      "rates must be finite and above 0, latencies, seconds and flops of a pair finite and not "             \
      "negative, and overlap in [0, 1]")                                                                     \
    X(RT_BAD_DIM, "dim must name a dimension of the tensor; at most 16 dimensions")                          \
    X(RT_BAD_KIND, "GLU kind must be one of rt_glu_kind")                                                    \
    X(RT_BAD_WIDTH, "width must be in 1..8")                                                                 \
    X(RT_BAD_PROBABILITY, "a probability must be in [0, 1]")                                                 \
    X(RT_BAD_LABEL, "a label is neither ignore_index nor in [0, vocab_size)")                                \
    X(RT_CAPACITY, "the output array is too small")                                                          \
    X(RT_WORKSPACE, "the workspace is NULL, not 64-byte aligned, or smaller than its *_bytes function "      \
                    "returns")                                                                               \
    X(RT_BAD_ISA, "RINGTILE_CPU_ISA must be generic, avx2, avx512 or avx512_bf16")                           \
    X(RT_ISA_MISSING, "this CPU lacks the instruction set that RINGTILE_CPU_ISA asks for")                   \
    X(RT_BAD_CUDA_ISA, "RINGTILE_CUDA_ISA must be sm_80, or sm_90a on a GPU of compute capability 9.0")      \
    X(RT_CUDA, "the CUDA runtime refused to start a kernel")

typedef enum rt_status {
#define RT_STATUS_ENUM(name, text) name,
    RT_STATUS_LIST(RT_STATUS_ENUM)
#undef RT_STATUS_ENUM
} rt_status;

// A static, NUL-terminated sentence for a status; never NULL.
const char *rt_status_message(rt_status status);

// ---- element types, threads, instruction sets --------------------------------------------------

typedef enum rt_dtype { RT_F64, RT_F32, RT_BF16, RT_F16 } rt_dtype;

// The caller's threads. run() calls work(ctx, worker) for every worker in [0, num_workers), in any order, concurrently
// or not, and returns when all have returned. A NULL run means one worker, the calling thread.
typedef struct rt_parallel {
    void (*run)(void *pool, int64_t num_workers, void (*work)(void *ctx, int64_t worker), void *ctx);
    void *pool;
    int64_t num_workers;
} rt_parallel;

typedef enum rt_isa { RT_ISA_GENERIC, RT_ISA_AVX2, RT_ISA_AVX512, RT_ISA_AVX512_BF16 } rt_isa;

// The instruction set of every kernel: the one that RINGTILE_CPU_ISA names, else the best of this CPU. Chosen once, at
// the first call; thread-safe.
//   RT_BAD_ISA, RT_ISA_MISSING (the variable's value is wrong), RT_BAD_POINTER; *isa is not written then
rt_status rt_cpu_isa(rt_isa *isa);
const char *rt_isa_name(rt_isa isa); // "generic", "avx2", "avx512", "avx512_bf16"

// ---- sequence layouts --------------------------------------------------------------------------

// Local tokens local_begin .. local_begin + length - 1 hold the global positions
// global_begin, global_begin + stride, ...
typedef struct rt_run {
    int64_t global_begin, stride, local_begin, length;
} rt_run;

// Checks that every run is well formed, lies inside local_len local tokens, and shares no local token and no global
// position with another run.
//   RT_BAD_SHAPE, RT_BAD_POINTER, RT_BAD_RUN
rt_status rt_runs_check(const rt_run *runs, int64_t num_runs, int64_t local_len);

typedef struct rt_layout_place {
    int64_t position, run;
} rt_layout_place;

// Checks that the runs of W ranks hold each position of 0..S-1 exactly once, and fill each rank's local tokens. It takes
// time for the runs and for pairs of runs that interleave, or for the positions of those where they are fewer.
//   runs (R), rank after rank;  run_offsets (W + 1): rank r owns runs [run_offsets[r], run_offsets[r + 1])
//   places (R) scratch
//   RT_BAD_SHAPE, RT_BAD_POINTER, RT_BAD_RUN, RT_BAD_LAYOUT
rt_status rt_layout_check(const rt_run *runs, const int64_t *run_offsets, int64_t num_ranks, int64_t seq_len,
                          rt_layout_place *places);

// positions (local_len): the global position of each local token. RT_BAD_RUN also if a local token is in no run or in
// two.
rt_status rt_runs_positions(const rt_run *runs, int64_t num_runs, int64_t *positions, int64_t local_len);

// One strided copy between a global and a local tensor that differ only in the size of `dim`.
//   sizes (ndim): of the local tensor, whose size in `dim` is the number of local tokens
typedef struct rt_shard_params {
    int64_t ndim, dim;             // ndim in 1..16, dim in [0, ndim)
    int64_t element_bytes;         // any size >= 1
    const int64_t *sizes;          // (ndim) local sizes
    int64_t global_len;            // size of the global tensor in `dim`
    const int64_t *global_strides; // (ndim) elements
    const int64_t *local_strides;  // (ndim) elements
    const rt_run *runs;
    int64_t num_runs;
} rt_shard_params;

// local[..., local_begin + j, ...] = global[..., global_begin + j * stride, ...] for every run; local tokens in no run
// keep their value.
//   RT_BAD_SHAPE, RT_BAD_POINTER, RT_BAD_DIM, RT_BAD_RUN, RT_BAD_STRIDE
rt_status rt_shard(const rt_shard_params *p, const void *global, void *local, rt_parallel parallel);
// The inverse: global[..., global_begin + j * stride, ...] = local[..., local_begin + j, ...]; positions in no run keep
// their value.
rt_status rt_unshard(const rt_shard_params *p, const void *local, void *global, rt_parallel parallel);

// ---- plan: which keys one rank needs from another ----------------------------------------------

// With an interval mask: the query at global position i of row b attends the keys at global positions
// [begin[b, i], end[b, i]); end <= begin means no key.
typedef struct rt_plan_params {
    int64_t num_ranks, seq_len, mask_batch;
    const rt_run *runs;         // (R) rank after rank
    const int64_t *run_offsets; // (W + 1)
    const int32_t *begin, *end; // (mask_batch, S) contiguous
} rt_plan_params;

// below (S + 1): the number of key_rank's keys below global position g, for g = 0..S.
rt_status rt_plan_below(const rt_plan_params *p, int64_t key_rank, int32_t *below);

// attended[j]: the number of query_rank's queries, over all rows, that attend key j. Bounds outside 0..S are clamped.
//   below: NULL, and key j is global position j = 0..S-1; or as rt_plan_below wrote it, and key j is the j-th key of
//   that rank in sequence order
//   attended (keys + 1), the last one scratch
// O(S) without below, else O(queries + keys).
rt_status rt_plan_attended(const rt_plan_params *p, int64_t query_rank, const int32_t *below,
                           int64_t *attended);

// The keys of key_rank that at least one query attends, as the fewest possible runs in local order, and the number of
// unmasked (query, key) pairs, summed over the mask's rows.
//   below, attended: the arguments of rt_plan_attended;  needed (capacity), may be NULL if capacity is 0
//   *num_needed is the full count, even with RT_CAPACITY
rt_status rt_plan_needed(const rt_plan_params *p, int64_t key_rank, const int32_t *below,
                         const int64_t *attended, rt_run *needed, int64_t capacity, int64_t *num_needed,
                         int64_t *num_pairs);

// 64-bit digest of a byte array, chained through seed; not cryptographic. Ranks compare digests of their masks and
// layouts before they exchange keys.
//   RT_BAD_SHAPE, RT_BAD_POINTER
rt_status rt_digest(const void *bytes, int64_t num_bytes, uint64_t seed, uint64_t *digest);

// ---- cost: what attention takes by a scheme, by a model of links and kernels -------------------

// Between ranks that both send and receive.
typedef struct rt_link {
    double latency_s;        // of a message
    double bytes_per_s;      // each way, of a rank
    double host_bytes_per_s; // each way, of all ranks of a host together; within a host it does not count
    double
        overlap; // the share of a message's time in which kernels run: 0 if processors copy it, else up to 1
} rt_link;

// W ranks, of which each M neighbours share the heads of all their queries, in T stages; M divides W.
typedef struct rt_cost_params {
    int64_t num_ranks, group_size, num_stages;
    bool at_once; // the keys of all ranks in one round; else group a works in round i on those of group a - i
    const int64_t *hosts;  // (W) in [0, W)
    const int64_t *tokens; // (W)
    const int64_t *keys;  // (W, W) [query rank][key rank]: the keys of key rank that query rank's group needs
    const int64_t *pairs; // (W, W) the same: unmasked (query, key) pairs of a head, over the batch
    const int64_t
        *shares; // (T, M, 3) query heads, kv heads and kernel calls of a stage and a place in a group
    int64_t key_bytes, gradient_bytes;  // of a key and a kv head, over the batch; and of their gradients
    int64_t query_bytes, result_bytes;  // of a query and a head, in this pass
    double flops_per_pair, flops_per_s; // of this pass
    double call_s;                      // of a kernel call, besides its flops
    double message_s;                   // of a processor that posts a message and waits for it, at either end
    double copy_bytes_per_s;            // of what goes into messages and comes out of them
    rt_link within, between;            // of a host; host_bytes_per_s of the first is not used
} rt_cost_params;

typedef enum rt_cost_pass { RT_COST_FORWARD, RT_COST_BACKWARD } rt_cost_pass;
typedef enum rt_cost_kind {
    RT_COST_KERNEL,
    RT_COST_QUERIES,
    RT_COST_KEYS,
    RT_COST_GRADIENTS,
    RT_COST_RESULTS
} rt_cost_kind;

typedef struct rt_cost_event {
    int64_t kind, from, to, num_bytes; // of a kernel: both its rank, and 0 bytes
    double begin, end;                 // seconds
} rt_cost_event;

// Plays one pass: each rank's seconds, the bytes between each two ranks, and all messages and kernels in the order in
// which they were posted. The same binary gives the same bits for the same params.
//   seconds (W)    bytes (W, W) [from][to]    events (capacity), NULL if capacity is 0: then none is wanted
//   *num_events is the full count, even with RT_CAPACITY; workspace: rt_cost_workspace_bytes(W), 8-byte aligned
//   RT_BAD_POINTER, RT_BAD_SHAPE, RT_BAD_RANK (of a host), RT_BAD_KIND (of a pass), RT_BAD_RATE, RT_TOO_LARGE,
//   RT_CAPACITY, RT_WORKSPACE
int64_t rt_cost_workspace_bytes(int64_t num_ranks);
rt_status rt_cost(const rt_cost_params *p, rt_cost_pass pass, double *seconds, int64_t *bytes,
                  rt_cost_event *events, int64_t capacity, int64_t *num_events, void *workspace);

// ---- attention ---------------------------------------------------------------------------------

enum { RT_MAX_HEAD_DIM = 512 };

// One block of keys against all local queries. Forward and backward share the struct.
typedef struct rt_attn_params {
    rt_dtype dtype; // of q, k, v, dout. State and gradients are f32, or f64 if dtype is RT_F64.
    int64_t batch, num_queries, num_keys, num_heads, num_kv_heads, head_dim, v_head_dim;
    double scale;   // scores are scale * q.k
    double softcap; // 0: off; else scores become softcap * tanh(scale * q.k / softcap)

    const void *q;                                 // (B, N, H, D)
    const void *k;                                 // (B, K, G, D)
    const void *v;                                 // (B, K, G, Dv)
    int64_t q_stride[3], k_stride[3], v_stride[3]; // batch, token, head

    const int32_t *begin, *end; // (B or 1, N): query attends global positions [begin, end)
    int64_t mask_batch_stride;  // N, or 0 if one row serves every batch
    const rt_run *k_runs;       // (R) global positions of the keys; keys in no run are not attended
    int64_t num_k_runs;

    // Dropout of weights: a feature is a key, by its position, and a token is a query head (rt_dropout_params): word
    // key % 4 of the counter (key / 4, query, row + 2^20 head, stream) decides. With P the weights of all keys and
    // Z = 0 or 1 / (1 - dropout) per weight, out = (P Z) v; lse is that of all keys.
    double dropout; // probability of a 0, rounded to a multiple of 2^-32; 0: off, nothing below is read
    uint32_t seed, step, stream;
    const int64_t *dropout_rows; // (B): the row of each batch
    const int64_t *q_positions;  // (N): the global position of each query

    // Outputs are uninitialized: overwritten, never read. Forward: out and lse, 0 and -inf for queries that attend no
    // key. Backward: dk and dv (not dq), 0 for keys that no query attends; the runs must hold every key.
    bool fresh;

    // Forward: read and written (fresh: only written). Backward: lse is read.
    void *out; // (B, N, H, Dv) state dtype: softmax-weighted mean of the values seen so far
    void *lse; // (B, H, N) contiguous: log-sum-exp of the scores seen so far, -inf before the first block
    bool
        lse_f64; // lse is f64 even if the state is f32, so that it is not rounded between the calls of a ring
    int64_t out_stride[3];

    // Contiguous, or NULL. In the call that finishes a result, what out, or dk and dv, would hold is written here,
    // rounded to dtype, and they are left with any numbers.
    void *rounded_out; // (B, N, H, Dv) dtype. Forward
    void *rounded_dk;  // (B, K, G, D)  dtype. Backward, both or none, with fresh
    void *rounded_dv;  // (B, K, G, Dv) dtype

    // Backward only.
    const void *dout;  // (B, N, H, Dv) dtype
    const void *delta; // (B, H, N) contiguous, state dtype: sum over Dv of dout * out, minus dlse
    void *dq;          // (B, N, H, D)  state dtype, added to
    void *dk;          // (B, K, G, D)  state dtype, added to (fresh: written)
    void *dv;          // (B, K, G, Dv) state dtype, added to (fresh: written)
    int64_t dout_stride[3], dq_stride[3], dk_stride[3], dv_stride[3];

    void *workspace; // 64-byte aligned
    int64_t workspace_bytes;
} rt_attn_params;

// Bytes of workspace for p with num_workers workers; 0 if p is malformed or asks for too much.
int64_t rt_attn_fwd_workspace_bytes(const rt_attn_params *p, int64_t num_workers);
int64_t rt_attn_bwd_workspace_bytes(const rt_attn_params *p, int64_t num_workers);

// Merges the block into out and lse (online softmax; FlashAttention, arXiv:2205.14135, alg. 1, and the ring merge of
// arXiv:2310.01889): out -= sigmoid(lse_block - lse) * (out - out_block).
rt_status rt_attn_fwd(const rt_attn_params *p, rt_parallel parallel);
// Adds the block's gradients, given the final lse and delta (arXiv:2205.14135, alg. 4):
//   P = exp(scores - lse), dV += P^T dO, dS = P * (dO V^T - delta), dQ += scale dS K, dK += scale dS^T Q;
// with dropout, dV += (P Z)^T dO and dS = P * (Z * dO V^T - delta).
rt_status rt_attn_bwd(const rt_attn_params *p, rt_parallel parallel);

// The delta of rt_attn_bwd: sum over Dv of dout * out, minus dlse (D in arXiv:2205.14135, alg. 4).
typedef struct rt_attn_delta_params {
    rt_dtype dtype; // of dout and out
    int64_t batch, num_queries, num_heads, v_head_dim;
    int64_t dout_stride[3], out_stride[3]; // batch, token, head
} rt_attn_delta_params;

//   dout, out (B, N, H, Dv)   out: the final output, rounded to dtype
//   dlse (B, H, N) contiguous f64: gradient of lse    delta (B, H, N) contiguous, f32, or f64 if dtype is RT_F64
//   RT_BAD_DTYPE, RT_BAD_SHAPE, RT_BAD_HEAD_DIM (v_head_dim)
rt_status rt_attn_delta(const rt_attn_delta_params *p, const void *dout, const void *out, const double *dlse,
                        void *delta, rt_parallel parallel);

// Forward and backward straight from the formula, in f64, one query and one key at a time: the oracle of the C tests.
// They need no workspace and run on the calling thread.
rt_status rt_attn_fwd_reference(const rt_attn_params *p);
rt_status rt_attn_bwd_reference(const rt_attn_params *p);

// ---- recurrences -------------------------------------------------------------------------------

// Tokens t of one document act on a state S (K, V) of each head, in order:
//   S = diag(exp g_t) S,    u_t = beta_t (v_t - S^T k_t)   or, without beta, u_t = dt_t v_t,
//   S = S + k_t u_t^T,      out_t = scale S^T q_t + D v_t.
// With beta: the gated delta rule (arXiv:2412.06464), and with a decay of each channel KDA (arXiv:2510.26692). Without:
// SSD (Mamba-2, arXiv:2405.21060), with q, k, v, g for its C, B, x, dt A.
//
// seq_idx: a token's document. Neighbouring tokens with the same number are of one document, which starts with S = 0; but
// document 0, if it is the first of its row, starts with the initial state. A token with a negative number is padding, and
// skipped: nothing of it is read, and its outputs and gradients are 0. The final state is that after the last token.

// Forward and backward share the struct. Shape letters: B batch, N tokens, H heads, G heads of q and k, K and V the head
// dims of k and v. Arrays without a stride are contiguous; those of the state dtype are f32, or f64 if dtype is RT_F64.
typedef struct rt_scan_params {
    rt_dtype dtype; // of q, k, v, out, dout
    int64_t batch, num_tokens, num_heads, num_k_heads, head_dim, v_head_dim;
    bool channel_decay; // g and dg are (B, N, H, K); else (B, N, H)
    double scale;

    const void *q, *k;                             // (B, N, G, K); head h reads head h / (H / G)
    const void *v;                                 // (B, N, H, V)
    int64_t q_stride[3], k_stride[3], v_stride[3]; // batch, token, head
    const void *g;                                 // state dtype; the log of the decay, <= 0
    const void *beta;                              // (B, N, H) state dtype; NULL: no delta term
    const void *dt;                                // (B, N, H) state dtype; NULL: 1. Not with beta
    const void *D;                                 // (H) state dtype; NULL: 0. Not with beta
    const int32_t *seq_idx;                        // (B or 1, N)
    int64_t seq_idx_batch_stride;                  // N, or 0 if one row serves every batch
    const void *initial_state;                     // (B, H, K, V) state dtype; NULL: 0
    void *
        states; // (B, H, rt_scan_num_states(N), K, V) state dtype. Forward: written, NULL if no backward will follow

    // Forward only: written.
    void *out;         // (B, N, H, V) dtype
    void *final_state; // (B, H, K, V) state dtype

    // Backward only. Gradients are of the state dtype, and written; each of an input that is NULL is NULL.
    const void *dout; // (B, N, H, V) dtype
    int64_t dout_stride[3];
    const void *dfinal_state; // (B, H, K, V) state dtype; NULL: 0
    void *dq, *dk;            // (B, N, G, K)
    void *dv;                 // (B, N, H, V)
    void *dg, *dbeta, *ddt;
    void *dD;             // (B, N, H): each token's part of it
    void *dinitial_state; // (B, H, K, V); not NULL

    void *workspace; // 64-byte aligned
    int64_t workspace_bytes;
} rt_scan_params;

// How many states between the chunks of a row a forward keeps for the backward.
int64_t rt_scan_num_states(int64_t num_tokens);
// Bytes of workspace for p with num_workers workers; 0 if its sizes are malformed or too large.
int64_t rt_scan_fwd_workspace_bytes(const rt_scan_params *p, int64_t num_workers);
int64_t rt_scan_bwd_workspace_bytes(const rt_scan_params *p, int64_t num_workers);
//   RT_BAD_DTYPE, RT_BAD_SHAPE, RT_BAD_HEADS, RT_BAD_HEAD_DIM, RT_BAD_SCALE, RT_BAD_MASK (seq_idx_batch_stride),
//   RT_WORKSPACE
rt_status rt_scan_fwd(const rt_scan_params *p, rt_parallel parallel);
rt_status rt_scan_bwd(const rt_scan_params *p, rt_parallel parallel);

// The selective scan of Mamba (arXiv:2312.00752). Tokens t of one document act on a state S (K, dim), in order:
//   S_kc = exp(dt_tc A_kc) S_kc + B_tk dt_tc x_tc,    out_tc = sum over k of C_tk S_kc + D_c x_tc.
// dt: after its softplus. seq_idx, states and dtypes: as in rt_scan_params. Shapes: `dim` channels, K state dim.
typedef struct rt_selective_params {
    rt_dtype dtype; // of x, B, C, out, dout
    int64_t batch, num_tokens, num_channels, state_dim;

    const void *x;                                 // (batch, N, dim)
    const void *B, *C;                             // (batch, N, K)
    int64_t x_stride[2], B_stride[2], C_stride[2]; // batch, token
    const void *dt;                                // (batch, N, dim) state dtype
    const void *A;                                 // (K, dim) state dtype
    const void *D;                                 // (dim) state dtype; NULL: 0
    const int32_t *seq_idx;                        // (batch or 1, N)
    int64_t seq_idx_batch_stride;                  // N, or 0 if one row serves every batch
    const void *initial_state;                     // (batch, K, dim) state dtype; NULL: 0
    void *
        states; // (batch, rt_scan_num_states(N), K, dim) state dtype. Forward: written, NULL if no backward will follow

    // Forward only: written.
    void *out;         // (batch, N, dim) dtype
    void *final_state; // (batch, K, dim) state dtype

    // Backward only. Gradients are of the state dtype, and written.
    const void *dout; // (batch, N, dim) dtype
    int64_t dout_stride[2];
    const void *dfinal_state; // (batch, K, dim) state dtype; NULL: 0
    void *dx, *ddt;           // (batch, N, dim)
    void *dB, *dC;            // (batch, N, K)
    void *dA;                 // (K, dim)
    void *dD;                 // (dim); NULL if D is
    void *dinitial_state;     // (batch, K, dim); not NULL

    void *workspace; // 64-byte aligned
    int64_t workspace_bytes;
} rt_selective_params;

// Bytes of workspace for p with num_workers workers; 0 if its sizes are malformed or too large.
int64_t rt_selective_fwd_workspace_bytes(const rt_selective_params *p, int64_t num_workers);
int64_t rt_selective_bwd_workspace_bytes(const rt_selective_params *p, int64_t num_workers);
//   RT_BAD_DTYPE, RT_BAD_SHAPE, RT_BAD_HEAD_DIM (state_dim), RT_BAD_MASK (seq_idx_batch_stride), RT_WORKSPACE
rt_status rt_selective_fwd(const rt_selective_params *p, rt_parallel parallel);
rt_status rt_selective_bwd(const rt_selective_params *p, rt_parallel parallel);

enum { RT_MAX_CONV_WIDTH = 8 };

// Causal depthwise convolution over the tokens of one document, in order:
//   y_t = act(bias + sum over i < width of weight[i] x_(t - width + 1 + i)),    act(z) = z or z sigmoid(z).
// seq_idx: as in rt_scan_params; x before a document is 0, but before document 0 it is initial_state.
typedef struct rt_conv_params {
    rt_dtype dtype; // of x, y, dy, dx
    int64_t batch, num_tokens, num_channels, width;
    bool silu;
    const void *x;                     // (B, N, C)
    const void *weight;                // (C, width) state dtype
    const void *bias;                  // (C) state dtype, or NULL
    int64_t x_stride[2], dy_stride[2]; // batch, token
    const int32_t *seq_idx;            // (B or 1, N)
    int64_t seq_idx_batch_stride;      // N, or 0
    const void *initial_state;         // (B, width - 1, C) state dtype; NULL: 0
    void *y;                           // (B, N, C)
    void *final_state;                 // (B, width - 1, C) state dtype: the last document's last tokens
    const void *dy;                    // (B, N, C)
    const void *dfinal_state;          // (B, width - 1, C) state dtype; NULL: 0
    void *dx;                          // (B, N, C)
    void *dweight, *dbias,
        *dinitial_state; // (C, width), (C), (B, width - 1, C) state dtype; dbias NULL if bias is
} rt_conv_params;

//   RT_BAD_DTYPE, RT_BAD_SHAPE, RT_BAD_WIDTH, RT_BAD_MASK (seq_idx_batch_stride)
rt_status rt_conv_fwd(const rt_conv_params *p, rt_parallel parallel);
rt_status rt_conv_bwd(const rt_conv_params *p, rt_parallel parallel);

// ---- gated MLP ---------------------------------------------------------------------------------

typedef enum rt_glu_kind { RT_GLU_SILU, RT_GLU_GELU, RT_GLU_GELU_TANH, RT_GLU_RELU } rt_glu_kind;

// Row-strided matrices of T rows and F columns.
typedef struct rt_glu_params {
    rt_dtype dtype;
    rt_glu_kind kind;
    int64_t num_rows, num_cols;
    int64_t gate_stride, up_stride, prod_stride; // elements between rows
} rt_glu_params;

// Both functions compute in f32 (f64 if dtype is RT_F64) and round to dtype once.
//   RT_BAD_DTYPE, RT_BAD_KIND, RT_BAD_SHAPE, RT_BAD_STRIDE

// prod = act(gate) * up                                (SwiGLU, GeGLU: arXiv:2002.05202)
rt_status rt_glu_fwd(const rt_glu_params *p, const void *gate, const void *up, void *prod,
                     rt_parallel parallel);
// In place, one pass: gate <- dprod * up * act'(gate), up <- dprod * act(gate), dprod <- act(gate) * up. The weight
// gradient of the down projection needs that product next.
rt_status rt_glu_bwd(const rt_glu_params *p, void *gate, void *up, void *dprod, rt_parallel parallel);

// ---- softmax cross entropy ---------------------------------------------------------------------

// With x' = softcap * tanh(x / softcap) (x' = x if softcap is 0) and lse = log sum exp x':
//   loss = (1 - label_smoothing) * (lse - x'[label]) + label_smoothing * (lse - mean x') + z_loss * lse^2
// Smoothing follows torch.nn.functional.cross_entropy. A token whose label is ignore_index has loss 0, lse 0 and
// gradient 0, even if its logits are not finite. A logit of -inf has probability 0.
typedef struct rt_cross_entropy_params {
    rt_dtype dtype; // of logits; loss and lse are f32, or f64 if dtype is RT_F64
    int64_t num_tokens, vocab_size, logits_stride;
    int64_t ignore_index;
    double label_smoothing, softcap, z_loss;
    bool want_grad; // false: logits keep their value
} rt_cross_entropy_params;

//   logits (T, V)  replaced by d loss[t] / d logits[t, :] (unit weight per token) if want_grad
//   labels (T)     loss, lse (T)
//   RT_BAD_DTYPE, RT_BAD_SHAPE, RT_BAD_STRIDE, RT_BAD_SCALE, RT_BAD_LABEL; nothing is written then
rt_status rt_cross_entropy_fwd_bwd(const rt_cross_entropy_params *p, void *logits, const int64_t *labels,
                                   void *loss, void *lse, rt_parallel parallel);

// ---- dropout -----------------------------------------------------------------------------------

// Dropout whose random numbers are a function of what is dropped, in whatever order, array and process it is computed.
// Word feature % 4 of Philox4x32-10 with the key (seed, step) and the counter (feature / 4, position, row, stream) decides
// about a feature of a token; places beyond 32 bits count modulo 2^32.
typedef struct rt_dropout_params {
    rt_dtype dtype;
    int64_t num_tokens, num_features, x_stride; // elements between tokens
    double probability;                         // of a 0; rounded to a multiple of 2^-32
    uint32_t seed, step, stream;
} rt_dropout_params;

// y = x / (1 - probability) where the word is below (1 - probability) 2^32, else y = 0 x. The backward is the same
// function of dy. Computes in f32 (f64 if dtype is RT_F64) and rounds to dtype once.
//   x (T, F)    places (T, 2): the row and the position of each token    y (T, F), contiguous
//   RT_BAD_DTYPE, RT_BAD_SHAPE, RT_BAD_PROBABILITY
rt_status rt_dropout(const rt_dropout_params *p, const void *x, const int64_t *places, void *y,
                     rt_parallel parallel);

#ifdef __cplusplus
}
#endif
#endif // RINGTILE_H
