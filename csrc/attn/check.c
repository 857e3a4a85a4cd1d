// Every precondition of attention; the entry points check them once.
#include "attn.h"

#include "../overlap.h"
#include "../seq/runs.h"

#include <math.h>

static bool is_dtype(rt_dtype dtype) {
    return dtype == RT_F64 || dtype == RT_F32 || dtype == RT_BF16 || dtype == RT_F16;
}

static rt_status check(const rt_attn_params *p) {
    if (!is_dtype(p->dtype)) return RT_BAD_DTYPE;
    if (p->batch < 0 || p->num_queries < 0 || p->num_keys < 0 || p->num_k_runs < 0) return RT_BAD_SHAPE;
    if (p->num_kv_heads < 1 || p->num_heads < 1 || p->num_heads % p->num_kv_heads != 0) return RT_BAD_HEADS;
    if (p->head_dim < 1 || p->head_dim > 256 || p->v_head_dim < 1 || p->v_head_dim > 256)
        return RT_BAD_HEAD_DIM;
    if (!isfinite(p->scale) || !isfinite(p->softcap) || p->softcap < 0) return RT_BAD_SCALE;
    const bool queries = p->batch > 0 && p->num_queries > 0, keys = p->batch > 0 && p->num_keys > 0;
    if (queries && (p->q == NULL || p->begin == NULL || p->end == NULL || p->lse == NULL))
        return RT_BAD_POINTER;
    if (keys && (p->k == NULL || p->v == NULL)) return RT_BAD_POINTER;
    if (p->num_k_runs > 0 && p->k_runs == NULL) return RT_BAD_POINTER;
    return rt_runs_check(p->k_runs, p->num_k_runs, p->num_keys);
}

// Whether an output (B, tokens, heads, dim) overlaps itself.
static bool overlaps(const rt_attn_params *p, int64_t num_tokens, int64_t num_heads, int64_t dim,
                     const int64_t stride[3]) {
    return rt_overlaps(4, (const int64_t[]){p->batch, num_tokens, num_heads, dim},
                       (const int64_t[]){stride[0], stride[1], stride[2], 1});
}

rt_status rt_attn_check_fwd(const rt_attn_params *p) {
    const rt_status status = check(p);
    if (status != RT_OK) return status;
    if (p->batch > 0 && p->num_queries > 0 && p->out == NULL) return RT_BAD_POINTER;
    return overlaps(p, p->num_queries, p->num_heads, p->v_head_dim, p->out_stride) ? RT_BAD_STRIDE : RT_OK;
}

// Exact, because no key is in two runs.
static int64_t keys_in_runs(const rt_attn_params *p) {
    int64_t num_keys = 0;
    for (int64_t i = 0; i < p->num_k_runs; i++) num_keys += p->k_runs[i].length;
    return num_keys;
}

rt_status rt_attn_check_bwd(const rt_attn_params *p) {
    const rt_status status = check(p);
    if (status != RT_OK) return status;
    const bool queries = p->batch > 0 && p->num_queries > 0, keys = p->batch > 0 && p->num_keys > 0;
    if (queries && (p->dout == NULL || p->delta == NULL || p->dq == NULL)) return RT_BAD_POINTER;
    if (keys && (p->dk == NULL || p->dv == NULL)) return RT_BAD_POINTER;
    if (p->fresh && keys_in_runs(p) != p->num_keys) return RT_BAD_FRESH;
    return overlaps(p, p->num_queries, p->num_heads, p->head_dim, p->dq_stride) ||
                   overlaps(p, p->num_keys, p->num_kv_heads, p->head_dim, p->dk_stride) ||
                   overlaps(p, p->num_keys, p->num_kv_heads, p->v_head_dim, p->dv_stride)
               ? RT_BAD_STRIDE
               : RT_OK;
}

rt_status rt_attn_check_delta(const rt_attn_delta_params *p, const void *dout, const void *out,
                              const double *dlse, const void *delta) {
    if (!is_dtype(p->dtype)) return RT_BAD_DTYPE;
    if (p->batch < 0 || p->num_queries < 0 || p->num_heads < 1) return RT_BAD_SHAPE;
    if (p->v_head_dim < 1 || p->v_head_dim > 256) return RT_BAD_HEAD_DIM;
    const bool queries = p->batch > 0 && p->num_queries > 0;
    return queries && (dout == NULL || out == NULL || dlse == NULL || delta == NULL) ? RT_BAD_POINTER : RT_OK;
}
