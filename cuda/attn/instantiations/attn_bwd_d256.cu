#include "../bwd.cuh"

template rt_status attn_bwd<bf16, 256, 256>(const rt_attn_bwd_params &, void *);
template rt_status attn_bwd<f16, 256, 256>(const rt_attn_bwd_params &, void *);
