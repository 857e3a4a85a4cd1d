// The arguments of the attention kernels, and the state they read and write. Shape letters are those of
// ringtile.h.
#ifndef RINGTILE_CUDA_ATTN_ARGS_CUH
#define RINGTILE_CUDA_ATTN_ARGS_CUH

#include "../device/shared.cuh"

#include "../../csrc/attn/philox.h"

#include <math.h>

constexpr double LOG2_E = 1.4426950408889634, LN_2 = 0.6931471805599453;

RT_DEVICE int least(int a, int b) { return a < b ? a : b; }
RT_DEVICE int most(int a, int b) { return a > b ? a : b; }
RT_HOST_DEVICE int num_tiles(int n, int tile) { return n / tile + (n % tile != 0); }

// Whether plain.cuh alone has a kernel for the head dims; for what is asked, in every dtype.
inline bool has_large_heads(const rt_attn_block &p) { return p.head_dim > 256 || p.v_head_dim > 256; }
inline bool is_plain_in_any_dtype(const rt_attn_block &p) { return has_large_heads(p) || p.dropout > 0; }

// ---- arguments ---------------------------------------------------------------------------------

// Runs per launch: with the params they stay below the 4096 bytes of arguments that every driver accepts.
constexpr int MAX_RUNS = 64;

// Arrays of a backward (query_walk.cuh).
struct backward_workspace {
    struct attended_keys *queries; // (rows of the mask, tiles of queries)
    struct position_range *keys;   // (tiles of keys): their positions
    struct tile_range *live;       // (tiles of keys, rows of the mask): their tiles of queries; NULL: all
    int *semaphores;               // (batch, heads, tiles of queries)
    int *next_ticket;
    int *next_part; // (tiles of keys, batch, kv heads): the part that adds next, if there are several
};

// What kernels of both passes take. A score in units of log 2 is scale_log2 * q.k, or scale_log2 * tanh(cap * q.k) with
// a softcap. Both factors are positive: if scale is not, the kernel negates or clears one side of the product
// (fix_sign).
struct attn_args {
    rt_attn_block p; // k_runs points to host memory
    rt_run runs[MAX_RUNS];
    int num_runs;
    int section = 1; // kv heads, in a forward (key_walk.cuh)
    // With p.key_begin (mask_tiles.cuh):
    struct position_range *query_tiles; // (tiles of queries)
    struct key_intervals *key_tiles;    // (rows of the key mask, tiles of keys)
    int num_key_tiles;                  // else 0
    float scale_log2, cap;
    float inverse_softcap; // 0: off
    rt_dropout_rule dropout;
    bool aligned = true; // rows of q, k, v, dout are whole chunks of 16 bytes and begin at multiples of 16 bytes
    bool in_pairs; // the same for the pass's results, rounded or not, which are read and written in pairs of numbers
};
// The argument of a kernel of one pass: a launch takes some of the runs. The block of its params is p.
struct fwd_args : attn_args {
    rt_attn_fwd_params fwd; // fresh in the first launch, with rounded_out in the last
};
struct bwd_args : attn_args {
    rt_attn_bwd_params bwd;
    int num_parts = 1; // of the query heads of a group (query_walk.cuh)
    backward_workspace workspace;
};

inline bool rows_are_aligned(const void *array, const int64_t (&stride)[3], int64_t element_bytes) {
    return (uintptr_t)array % 16 == 0 && stride[0] * element_bytes % 16 == 0 && stride[1] * element_bytes % 16 == 0 &&
           stride[2] * element_bytes % 16 == 0;
}

// Sets what args take of the block, and calls start(is_first, is_last) for every MAX_RUNS runs until one fails; if
// `always`, at least once, even without runs. args.aligned and in_pairs: of the pass's own arrays.
template <class Start> rt_status for_launches(attn_args &args, const rt_attn_block &p, bool always, Start start) {
    args.p = p;
    const double scale = p.scale == 0 ? 1 : fabs(p.scale);
    args.scale_log2 = (float)((p.softcap > 0 ? p.softcap : scale) * LOG2_E);
    args.cap = p.softcap > 0 ? (float)(scale / p.softcap) : 0;
    args.inverse_softcap = p.softcap > 0 ? (float)(1 / p.softcap) : 0;
    args.dropout = rt_dropout_rule_of(p.dropout);
    const bool in_chunks = p.head_dim % 8 == 0 && p.v_head_dim % 8 == 0;
    args.aligned &= in_chunks && rows_are_aligned(p.q, p.q_stride, 2) && rows_are_aligned(p.k, p.k_stride, 2) &&
                    rows_are_aligned(p.v, p.v_stride, 2);
    args.in_pairs &= in_chunks;
    rt_status status = RT_OK;
    for (int64_t first = 0; status == RT_OK && (first < p.num_k_runs || (first == 0 && always)); first += MAX_RUNS) {
        const int64_t rest = p.num_k_runs - first;
        args.num_runs = (int)(rest < MAX_RUNS ? rest : MAX_RUNS);
        if (rest > 0) memcpy(args.runs, p.k_runs + first, (size_t)args.num_runs * sizeof(rt_run));
        status = start(first == 0, rest <= MAX_RUNS);
    }
    return status;
}
// Calls start(args) for each launch of a pass until one fails.
template <class Start> rt_status for_runs(const rt_attn_fwd_params &p, Start start) {
    fwd_args args = {};
    args.fwd = p;
    args.in_pairs = rows_are_aligned(p.out, p.out_stride, 4) && (uintptr_t)p.rounded_out % 16 == 0;
    return for_launches(args, p.block, p.fresh || p.rounded_out != NULL, [&](bool is_first, bool is_last) {
        args.fwd.fresh = p.fresh && is_first;
        args.fwd.rounded_out = is_last ? p.rounded_out : NULL;
        return start(args);
    });
}
template <class Start> rt_status for_runs(const rt_attn_bwd_params &p, Start start) {
    bwd_args args = {};
    args.bwd = p;
    args.aligned = rows_are_aligned(p.dout, p.dout_stride, 2);
    args.in_pairs = rows_are_aligned(p.dq, p.dq_stride, 4) && rows_are_aligned(p.dk, p.dk_stride, 4) &&
                    rows_are_aligned(p.dv, p.dv_stride, 4) &&
                    ((uintptr_t)p.rounded_dk | (uintptr_t)p.rounded_dv) % 16 == 0;
    return for_launches(args, p.block, p.fresh, [&](bool, bool) { return start(args); });
}

// ---- arrays ------------------------------------------------------------------------------------

// An array (batch, tokens, heads, dim) of the params, with unit stride in dim.
template <class T> struct token_rows {
    using element = T;
    T *data;
    const int64_t (&stride)[3]; // elements between batches, tokens, heads
    int64_t dim;

    RT_HOST_DEVICE T *at(int64_t batch, int64_t token, int64_t head) const {
        return data + batch * stride[0] + token * stride[1] + head * stride[2];
    }
};

template <class T> RT_HOST_DEVICE token_rows<const T> q_of(const rt_attn_block &p) {
    return {(const T *)p.q, p.q_stride, p.head_dim};
}
template <class T> RT_HOST_DEVICE token_rows<const T> k_of(const rt_attn_block &p) {
    return {(const T *)p.k, p.k_stride, p.head_dim};
}
template <class T> RT_HOST_DEVICE token_rows<const T> v_of(const rt_attn_block &p) {
    return {(const T *)p.v, p.v_stride, p.v_head_dim};
}
template <class T> RT_HOST_DEVICE token_rows<const T> dout_of(const rt_attn_bwd_params &p) {
    return {(const T *)p.dout, p.dout_stride, p.block.v_head_dim};
}
RT_HOST_DEVICE token_rows<float> out_of(const rt_attn_fwd_params &p) {
    return {(float *)p.out, p.out_stride, p.block.v_head_dim};
}
RT_HOST_DEVICE token_rows<float> dq_of(const rt_attn_bwd_params &p) {
    return {(float *)p.dq, p.dq_stride, p.block.head_dim};
}
RT_HOST_DEVICE token_rows<float> dk_of(const rt_attn_bwd_params &p) {
    return {(float *)p.dk, p.dk_stride, p.block.head_dim};
}
RT_HOST_DEVICE token_rows<float> dv_of(const rt_attn_bwd_params &p) {
    return {(float *)p.dv, p.dv_stride, p.block.v_head_dim};
}

// Rows of a rounded result, which is contiguous: (batch, tokens, heads, dim).
template <class T>
RT_HOST_DEVICE T *rounded_out_at(const rt_attn_fwd_params &p, int64_t batch, int64_t token, int64_t head) {
    const rt_attn_block &b = p.block;
    return (T *)p.rounded_out + ((batch * b.num_queries + token) * b.num_heads + head) * b.v_head_dim;
}
template <class T>
RT_HOST_DEVICE T *rounded_key_at(const rt_attn_block &p, void *array, int64_t dim, int64_t batch, int64_t token,
                                 int64_t head) {
    return (T *)array + ((batch * p.num_keys + token) * p.num_kv_heads + head) * dim;
}

// The strides of rounded_out.
RT_HOST_DEVICE void rounded_out_strides(const rt_attn_block &p, int64_t (&stride)[3]) {
    stride[2] = p.v_head_dim, stride[1] = p.num_heads * stride[2], stride[0] = p.num_queries * stride[1];
}

// Writes number(row, col) to num_rows rows of `dim` numbers, row_stride apart; all threads of the thread block take
// part.
template <class T, class Number>
RT_DEVICE void fill_rows(T *row, int64_t row_stride, int num_rows, int dim, Number number) {
    for (int i = thread_index(); i < num_rows * dim; i += num_threads())
        st_global(row + i / dim * row_stride + i % dim, narrow<T>(number(i / dim, i % dim)));
}

// ---- log-sum-exp -------------------------------------------------------------------------------

RT_DEVICE double load_lse(const rt_attn_block &p, const void *lse, int64_t i) {
    return p.lse_f64 ? ld_global((const double *)lse + i) : (double)ld_global((const float *)lse + i);
}
RT_DEVICE void store_lse(const rt_attn_fwd_params &p, int64_t i, double lse) {
    if (p.block.lse_f64)
        st_global((double *)p.lse + i, lse);
    else
        st_global((float *)p.lse + i, (float)lse);
}

// The log-sum-exp of a row after a block of keys is merged into it, and the block's share of the output. The
// logarithms are f32 and are added to f64, so that an f64 lse keeps an absolute error of 2^-23 however large it is.
struct merged_lse {
    double lse;
    float share; // sigmoid(block - before)
};
RT_DEVICE merged_lse merge_lse(double before, double block) {
    const float distance = (float)(before - block);
    return {(before > block ? before : block) + (double)log1pf(expf(-fabsf(distance))), 1 / (1 + expf(distance))};
}

#endif // RINGTILE_CUDA_ATTN_ARGS_CUH
