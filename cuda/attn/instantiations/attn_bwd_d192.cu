#include "../bwd.cuh"

template rt_status attn_bwd<bf16, 192, 128>(const rt_attn_bwd_params &, void *);
template rt_status attn_bwd<f16, 192, 128>(const rt_attn_bwd_params &, void *);
