// The entry points of attention on CUDA: they check the params and choose the instantiation.
#include "../ringtile_cuda.h"
#include "attn.cuh"
#include "query_walk.cuh"

#include "../../csrc/arrays.h"
#include "../../csrc/attn/attn.h"

#include <stdlib.h>

// Calls pass<T, D, DV>() with the smallest compiled head dims that hold the problem's.
#define CHOOSE_DIMS(pass, T, p, ...)                                                                                   \
    ((p).block.head_dim <= 64 && (p).block.v_head_dim <= 64     ? pass<T, 64, 64>(p, __VA_ARGS__)                      \
     : (p).block.head_dim <= 96 && (p).block.v_head_dim <= 96   ? pass<T, 96, 96>(p, __VA_ARGS__)                      \
     : (p).block.head_dim <= 128 && (p).block.v_head_dim <= 128 ? pass<T, 128, 128>(p, __VA_ARGS__)                    \
     : (p).block.head_dim <= 192 && (p).block.v_head_dim <= 128 ? pass<T, 192, 128>(p, __VA_ARGS__)                    \
                                                                : pass<T, 256, 256>(p, __VA_ARGS__))

// Kernels count tokens in int, up to a tile beyond the last.
static bool fits_int(const rt_attn_block &p) {
    constexpr int64_t MOST = INT32_MAX - 1024;
    return p.num_queries <= MOST && p.num_keys <= MOST && p.batch * p.num_heads <= MOST;
}

// Whether only the plain kernels compute it: f32, large heads, dropout.
static bool runs_plain(const rt_attn_block &p) { return p.dtype == RT_F32 || is_plain_in_any_dtype(p); }

// Whether the call has the workspace that it needs.
static bool has_workspace(const rt_attn_block &p, int64_t needed) {
    return needed == 0 || (p.workspace != NULL && (uintptr_t)p.workspace % 64 == 0 && p.workspace_bytes >= needed);
}

// Whether a tensor map can describe the rows: they begin at multiples of 16 bytes, and no stride is 0 or huge.
static bool rows_can_be_mapped(const void *array, const int64_t (&stride)[3], int64_t element_bytes = 2) {
    bool ok = rows_are_aligned(array, stride, element_bytes);
    for (const int64_t s : stride) ok &= s > 0 && s < (int64_t)1 << 38;
    return ok;
}
// A tensor map cannot be empty either.
static bool can_be_mapped(const rt_attn_block &p) {
    return p.num_queries > 0 && p.num_keys > 0 && p.batch > 0 && rows_can_be_mapped(p.q, p.q_stride) &&
           rows_can_be_mapped(p.k, p.k_stride) && rows_can_be_mapped(p.v, p.v_stride);
}
// Rounded out is mapped too, and merged in pairs of numbers.
static bool rounded_out_can_be_mapped(const rt_attn_fwd_params &p) {
    int64_t stride[3];
    rounded_out_strides(p.block, stride);
    return p.rounded_out == NULL ||
           (rows_can_be_mapped(p.rounded_out, stride) && rows_are_aligned(p.out, p.out_stride, 4));
}

// Of an out that a forward was not given, and needs since it takes more than one launch.
static int64_t bytes_between_launches(const rt_attn_fwd_params &p) {
    const rt_attn_block &b = p.block;
    if (p.out != NULL || b.num_k_runs <= MAX_RUNS) return 0;
    return rt_round_up_64(b.batch * b.num_queries * b.num_heads * b.v_head_dim * (int64_t)sizeof(float));
}
static int64_t forward_workspace_bytes(const rt_attn_fwd_params &p) {
    return bytes_between_launches(p) + mask_tiles_bytes(p.block);
}

// Chooses the kernels of sm_80 (80) or sm_90a (90): the best for the current device, or those that
// RINGTILE_CUDA_ISA names; 0: it names others. Nothing else reads the environment.
static int choose_isa() {
    const char *asked = getenv("RINGTILE_CUDA_ISA");
    const int best = compute_capability() == 90 ? 90 : 80;
    if (asked == NULL || *asked == 0 || (strcmp(asked, "sm_90a") == 0 && best == 90)) return best;
    return strcmp(asked, "sm_80") == 0 ? 80 : 0;
}

// The kernels of sm_90a have head dims of 64 and 128, and the forward 256, and 192 with values of 128. Those in between
// run padded there: bulk copies bring zeros behind a row's end, and what they add is left out.
template <int D, int DV> constexpr bool has_bwd_sm90 = D == DV && D <= 128;
template <int D, int DV> constexpr bool has_fwd_sm90 = has_bwd_sm90<D, DV> || D > 128;
constexpr int padded_sm90(int dim) { return dim == 96 ? 128 : dim; }

template <class T, int D, int DV> static rt_status forward(const rt_attn_fwd_params &p, void *stream) {
    const int isa = choose_isa();
    if (isa == 0) return RT_BAD_CUDA_ISA;
    if constexpr (has_fwd_sm90<D, DV>)
        if (isa == 90 && can_be_mapped(p.block) && rounded_out_can_be_mapped(p))
            return attn_fwd_sm90<T, padded_sm90(D), padded_sm90(DV)>(p, stream);
    return attn_fwd<T, D, DV>(p, stream);
}

template <class T, int D, int DV> static rt_status backward(const rt_attn_bwd_params &p, void *stream) {
    const int isa = choose_isa();
    if (isa == 0) return RT_BAD_CUDA_ISA;
    if constexpr (has_bwd_sm90<D, DV>)
        if (isa == 90 && can_be_mapped(p.block) && rows_can_be_mapped(p.dout, p.dout_stride) &&
            rows_can_be_mapped(p.dq, p.dq_stride, sizeof(float)))
            return attn_bwd_sm90<T, padded_sm90(D)>(p, stream);
    return attn_bwd<T, D, DV>(p, stream);
}

extern "C" {

int64_t rt_cuda_attn_fwd_workspace_bytes(const rt_attn_fwd_params *p) {
    return rt_attn_check_fwd(p) == RT_OK && fits_int(p->block) ? forward_workspace_bytes(*p) : 0;
}

rt_status rt_cuda_attn_fwd(const rt_attn_fwd_params *given, void *stream) {
    const rt_status status = rt_attn_check_fwd(given);
    if (status != RT_OK) return status;
    rt_attn_fwd_params p = *given;
    rt_attn_block &b = p.block;
    if (!fits_int(b)) return rt_wrong(RT_BAD_SHAPE, "batch, num_queries, num_keys or num_kv_heads");
    if (!has_workspace(b, forward_workspace_bytes(p))) return RT_WORKSPACE;
    if (const int64_t bytes = bytes_between_launches(p)) {
        rounded_out_strides(b, p.out_stride);
        p.out = b.workspace, b.workspace = (char *)b.workspace + bytes;
    }
    if (runs_plain(b)) return attn_fwd_plain(p, stream);
    if (b.dtype == RT_BF16) return CHOOSE_DIMS(forward, bf16, p, stream);
    if (b.dtype == RT_F16) return CHOOSE_DIMS(forward, f16, p, stream);
    return RT_BAD_DTYPE;
}

int64_t rt_cuda_attn_bwd_workspace_bytes(const rt_attn_bwd_params *p) {
    return rt_attn_check_bwd(p) == RT_OK && fits_int(p->block) ? backward_workspace_bytes(p->block) : 0;
}

rt_status rt_cuda_attn_bwd(const rt_attn_bwd_params *p, void *stream) {
    const rt_status status = rt_attn_check_bwd(p);
    if (status != RT_OK) return status;
    const rt_attn_block &b = p->block;
    if (!fits_int(b)) return rt_wrong(RT_BAD_SHAPE, "batch, num_queries, num_keys or num_kv_heads");
    if (!has_workspace(b, backward_workspace_bytes(b))) return RT_WORKSPACE;
    if (runs_plain(b)) return attn_bwd_plain(*p, stream);
    if (b.dtype == RT_BF16) return CHOOSE_DIMS(backward, bf16, *p, stream);
    if (b.dtype == RT_F16) return CHOOSE_DIMS(backward, f16, *p, stream);
    return RT_BAD_DTYPE;
}

} // extern "C"
