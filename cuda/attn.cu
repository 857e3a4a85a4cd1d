// Attention's entry points on CUDA: what is checked, and which instantiation runs.
#include "attn.cuh"
#include "ringtile_cuda.h"

#include "../csrc/attn/attn.h"

// Calls pass<T, D, DV>(): the smallest compiled dims that hold the problem's.
#define CHOOSE_DIMS(pass, T, p, ...)                                                                         \
    ((p).head_dim <= 64 && (p).v_head_dim <= 64     ? pass<T, 64, 64>(p, __VA_ARGS__)                        \
     : (p).head_dim <= 96 && (p).v_head_dim <= 96   ? pass<T, 96, 96>(p, __VA_ARGS__)                        \
     : (p).head_dim <= 128 && (p).v_head_dim <= 128 ? pass<T, 128, 128>(p, __VA_ARGS__)                      \
     : (p).head_dim <= 192 && (p).v_head_dim <= 128 ? pass<T, 192, 128>(p, __VA_ARGS__)                      \
                                                    : pass<T, 256, 256>(p, __VA_ARGS__))

// Tokens are counted in int; a tile more must not overflow it.
static bool fits_int(const rt_attn_params &p) {
    constexpr int64_t MOST = INT32_MAX - 1024;
    return p.num_queries <= MOST && p.num_keys <= MOST && p.batch * p.num_heads <= MOST;
}

extern "C" rt_status rt_cuda_attn_fwd(const rt_attn_params *p, void *stream) {
    const rt_status status = rt_attn_check_fwd(p);
    if (status != RT_OK) return status;
    if (!fits_int(*p)) return RT_BAD_SHAPE;
    if (p->dtype == RT_BF16) return CHOOSE_DIMS(attn_fwd, bf16, *p, stream);
    if (p->dtype == RT_F16) return CHOOSE_DIMS(attn_fwd, f16, *p, stream);
    return RT_BAD_DTYPE;
}
