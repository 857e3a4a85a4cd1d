// Attention of all local queries over one block of keys, forward and backward, by a running softmax.
#ifndef RINGTILE_API_ATTN_H
#define RINGTILE_API_ATTN_H

#include "sequence.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { RT_MAX_HEAD_DIM = 512 };

// One block of keys against all local queries: what forward and backward read of it.
typedef struct rt_attn_block {
    rt_dtype dtype; // of q, k, v, dout. State and gradients are f32, or f64 if dtype is RT_F64.
    bool lse_f64;   // lse is f64 even if the state is f32, so that it is not rounded between the calls of a ring
    int64_t batch, num_queries, num_keys, num_heads, num_kv_heads, head_dim, v_head_dim;
    double scale;   // scores are scale * q.k
    double softcap; // 0: off; else scores become softcap * tanh(scale * q.k / softcap)

    const void *q;                                 // (B, N, H, D)
    const void *k;                                 // (B, K, G, D)
    const void *v;                                 // (B, K, G, Dv)
    int64_t q_stride[3], k_stride[3], v_stride[3]; // batch, token, head

    const int32_t *begin, *end;         // (B or 1, N): query attends global positions [begin, end)
    int64_t mask_batch_stride;          // N, or 0 if one row serves every batch
    const int32_t *key_begin, *key_end; // (B or 1, K): queries at [key_begin, key_end) attend the key; or both NULL
    int64_t key_mask_batch_stride;      // K, or 0; not read without them
    // (R) global positions of the keys. Keys in no run are not attended; two at one position are, each by itself.
    const rt_run *k_runs;
    int64_t num_k_runs;

    // Dropout of weights, a function of their places in the global batch in whatever order and process: word key % 4 of
    // Philox4x32-10 with the key (seed, step) and the counter (key / 4, query, row + 2^20 head, stream) keeps a weight
    // if it is below (1 - dropout) 2^32. Places are those in the sequence, and beyond 32 bits count modulo 2^32. With
    // P the weights of all keys and Z = 0 or 1 / (1 - dropout) per weight, out = (P Z) v; lse is that of all keys.
    double dropout; // probability of a 0, rounded to a multiple of 2^-32; 0: off, nothing below is read
    uint32_t seed, step, stream;
    const int64_t *dropout_rows; // (B): the row of each batch

    const int64_t *q_positions; // (N): the global position of each query. Read with dropout or key_begin only

    void *workspace; // of the pass; 64-byte aligned
    int64_t workspace_bytes;
} rt_attn_block;

typedef struct rt_attn_fwd_params {
    rt_attn_block block;
    bool fresh; // out and lse are uninitialized: overwritten, never read; 0 and -inf for queries that attend no key
    void *out;  // (B, N, H, Dv) state dtype, read and written: softmax-weighted mean of the values seen so far
    void *lse;  // (B, H, N) contiguous, likewise: log-sum-exp of the scores seen so far, -inf before the first block
    int64_t out_stride[3];
    // Contiguous, or NULL. In the call that finishes out, what it would hold is written here, rounded to dtype, and it
    // is left with any numbers; a fresh forward that rounds takes no out (NULL).
    void *rounded_out; // (B, N, H, Dv) dtype
} rt_attn_fwd_params;

typedef struct rt_attn_bwd_params {
    rt_attn_block block;
    // dk and dv (not dq) are uninitialized, as in a forward: 0 for keys that no query attends. The runs must hold every
    // key.
    bool fresh;
    const void *lse;   // (B, H, N) contiguous: of all keys
    const void *dout;  // (B, N, H, Dv) dtype
    const void *delta; // (B, H, N) contiguous, state dtype: sum over Dv of dout * out, minus dlse
    void *dq;          // (B, N, H, D)  state dtype, added to
    void *dk;          // (B, K, G, D)  state dtype, added to (fresh: written)
    void *dv;          // (B, K, G, Dv) state dtype, added to (fresh: written)
    int64_t dout_stride[3], dq_stride[3], dk_stride[3], dv_stride[3];
    void *rounded_dk; // (B, K, G, D)  dtype, as in a forward; both or none, with fresh
    void *rounded_dv; // (B, K, G, Dv) dtype
} rt_attn_bwd_params;

// Bytes of workspace with num_workers workers, by the block's dtype and sizes; 0 if they are malformed or too large.
int64_t rt_attn_fwd_workspace_bytes(const rt_attn_block *block, int64_t num_workers);
int64_t rt_attn_bwd_workspace_bytes(const rt_attn_block *block, int64_t num_workers);

// Merges the block into out and lse (online softmax; FlashAttention, arXiv:2205.14135, alg. 1, and the ring merge of
// arXiv:2310.01889): out -= sigmoid(lse_block - lse) * (out - out_block).
// What is not finite spreads along attended pairs only: a value to its element of out, even with a weight of 0; a score
// of NaN or inf to all of out and lse. The same elements are not finite however the keys are cut into blocks.
rt_status rt_attn_fwd(const rt_attn_fwd_params *p, rt_parallel parallel);
// Adds the block's gradients, given the final lse and delta (arXiv:2205.14135, alg. 4):
//   P = exp(scores - lse), dV += P^T dO, dS = P * (dO V^T - delta), dQ += scale dS K, dK += scale dS^T Q;
// with dropout, dV += (P Z)^T dO and dS = P * (Z * dO V^T - delta).
rt_status rt_attn_bwd(const rt_attn_bwd_params *p, rt_parallel parallel);

// The delta of rt_attn_bwd: sum over Dv of dout * out, minus dlse (D in arXiv:2205.14135, alg. 4).
typedef struct rt_attn_delta_params {
    rt_dtype dtype; // of dout and out
    int64_t batch, num_queries, num_heads, v_head_dim;
    int64_t dout_stride[3], out_stride[3]; // batch, token, head
} rt_attn_delta_params;

//   dout, out (B, N, H, Dv)   out: the final output, rounded to dtype
//   dlse (B, H, N) contiguous f64: gradient of lse, or NULL: 0
//   delta (B, H, N) contiguous, f32, or f64 if dtype is RT_F64
//   RT_BAD_DTYPE, RT_BAD_SHAPE, RT_BAD_HEAD_DIM (v_head_dim)
rt_status rt_attn_delta(const rt_attn_delta_params *p, const void *dout, const void *out, const double *dlse,
                        void *delta, rt_parallel parallel);

// A block that another kernel has computed: its normalized output and log-sum-exps, for a part of the queries.
typedef struct rt_attn_merge_params {
    rt_dtype dtype;                                    // of part
    int64_t batch, num_queries, num_heads, v_head_dim; // B, N, H, Dv of out
    int64_t part_batch, part_queries;                  // P, M
    int64_t part_stride[3];                            // batch, token, head
    int64_t first_row;    // without rows: token m of batch b of part is row first_row + b N + m of out's B N
    const int64_t *rows;  // (P M) contiguous: row by row instead, rising; or NULL
    bool fresh;           // out and lse hold nothing yet in these rows
    const void *part;     // (P, M, H, Dv) dtype
    const void *part_lse; // (P, H, M) contiguous, state dtype; inf and -inf are those of rows without a weight
    void *out;            // (B, N, H, Dv) contiguous, state dtype: read and written
    double *lse;          // (B, H, N) contiguous: read and written
    void *rounded;        // like out, of dtype: written in the place of out; or NULL
} rt_attn_merge_params;

// Merges it into out and lse: out += share * (part - out), share = exp(part_lse - lse) of the merged lse.
//   RT_BAD_DTYPE, RT_BAD_SHAPE, RT_BAD_HEAD_DIM (v_head_dim), RT_BAD_POSITIONS (rows that do not rise, or are not of
//   out), RT_SHARED_MEMORY
rt_status rt_attn_merge(const rt_attn_merge_params *p, rt_parallel parallel);

#ifdef __cplusplus
}
#endif

#endif // RINGTILE_API_ATTN_H
