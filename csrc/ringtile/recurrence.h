// Recurrences over the tokens of documents (gated delta rule, KDA, SSD, selective scan), and their convolution.
#ifndef RINGTILE_API_RECURRENCE_H
#define RINGTILE_API_RECURRENCE_H

#include "base.h"

#ifdef __cplusplus
extern "C" {
#endif

// Tokens of a chunk: a forward keeps the states between chunks for its backward. Channels that a task of the selective
// scan takes at once.
enum { RT_CHUNK_TOKENS = 64, RT_SELECTIVE_CHANNELS = 64 };

// Tokens t of one document act on a state S (K, V) of each head, in order:
//   S = diag(exp g_t) S,    u_t = beta_t (v_t - S^T k_t)   or, without beta, u_t = dt_t v_t,
//   S = S + k_t u_t^T,      out_t = scale S^T q_t + D v_t.
// With beta: the gated delta rule (arXiv:2412.06464), and with a decay of each channel KDA (arXiv:2510.26692). Without:
// SSD (Mamba-2, arXiv:2405.21060), with q, k, v, g for its C, B, x, dt A.
//
// seq_idx: a token's document. Neighbouring tokens with the same number are of one document, which starts with S = 0;
// but document 0, if it is the first of its row, starts with the initial state. A token with a negative number is
// padding, and skipped: nothing of it is read, and its outputs and gradients are 0. The final state is that after the
// last token.

// Forward and backward share the struct. Shape letters: B batch, N tokens, H heads, G heads of q and k, K and V the
// head dims of k and v. Arrays without a stride are contiguous; those of the state dtype are f32, or f64 if dtype is
// RT_F64.
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
    void *states; // (B, H, rt_scan_num_states(N), K, V) state dtype. Forward: written, NULL if no backward will follow

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

#ifdef __cplusplus
}
#endif

#endif // RINGTILE_API_RECURRENCE_H
