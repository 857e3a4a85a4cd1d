#include "../bwd_sm90.cuh"

template rt_status attn_bwd_sm90<bf16, 64>(const rt_attn_bwd_params &, void *);
template rt_status attn_bwd_sm90<f16, 64>(const rt_attn_bwd_params &, void *);
