// Attention over chosen keys (learned sparse attention): each query attends the keys that its own row of indices names.
#ifndef RINGTILE_API_INDEXED_ATTN_H
#define RINGTILE_API_INDEXED_ATTN_H

#include "base.h"

#ifdef __cplusplus
extern "C" {
#endif

// Arrays without strides are contiguous. I indices of a query; any number of queries may name a key. Fastest where the
// keys of a head lie together (B, G, K, D).
typedef struct rt_indexed_attn_params {
    rt_dtype dtype; // of q, k, v, out, dout and dq. Arithmetic, dk and dv are f32, or f64 if dtype is RT_F64.
    int64_t batch, num_queries, num_keys, num_heads, num_kv_heads, head_dim, v_head_dim, num_indices;
    double scale; // scores are scale * q.k

    const int32_t *indices; // (B, N, I) rows of k. One outside of [0, K) is no key; one that comes twice is two keys
    const void *q;          // (B, N, H, D)
    const void *k;          // (B, K, G, D)
    const void *v;          // (B, K, G, Dv)
    int64_t k_stride[3], v_stride[3]; // batch, key, head

    // Forward: written; 0 and -inf for queries without a key. Backward: read.
    void *out;   // (B, N, H, Dv)
    double *lse; // (B, H, N): log-sum-exp of the scores

    // Backward only.
    const void *dout;   // (B, N, H, Dv)
    const double *dlse; // (B, H, N)
    void *dq;           // (B, N, H, D)  written
    void *dk;           // (B, G, K, D)  f32 or f64, written: 0 for a key that no query names
    void *dv;           // (B, G, K, Dv) f32 or f64, written

    void *workspace; // 64-byte aligned
    int64_t workspace_bytes;
} rt_indexed_attn_params;

// Bytes of workspace for p with num_workers workers; 0 if the sizes of p are malformed or too large.
int64_t rt_indexed_attn_workspace_bytes(const rt_indexed_attn_params *p, int64_t num_workers);

// Each query by itself: out = softmax(scale q K^T) V over its keys.
//   RT_BAD_DTYPE, RT_BAD_SHAPE, RT_BAD_HEADS, RT_BAD_HEAD_DIM, RT_BAD_SCALE, RT_WORKSPACE
rt_status rt_indexed_attn_fwd(const rt_indexed_attn_params *p, rt_parallel parallel);
// With P = exp(scores - lse): dV += P^T dO, dS = P * (dO V^T - delta), dQ = scale dS K, dK += scale dS^T Q, where delta
// is the sum over Dv of dout * out, minus dlse. One task for each batch and kv head, which adds in the order of
// queries.
rt_status rt_indexed_attn_bwd(const rt_indexed_attn_params *p, rt_parallel parallel);

#ifdef __cplusplus
}
#endif

#endif // RINGTILE_API_INDEXED_ATTN_H
