#include "../attn_bwd.cuh"

template rt_status attn_bwd_queries<bf16, 256, 256>(const rt_attn_params &, void *);
template rt_status attn_bwd_queries<f16, 256, 256>(const rt_attn_params &, void *);
