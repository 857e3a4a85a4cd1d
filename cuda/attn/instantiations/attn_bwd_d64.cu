#include "../bwd.cuh"

template rt_status attn_bwd<bf16, 64, 64>(const rt_attn_bwd_params &, void *);
template rt_status attn_bwd<f16, 64, 64>(const rt_attn_bwd_params &, void *);
