#include "../bwd.cuh"

template rt_status attn_bwd<bf16, 96, 96>(const rt_attn_bwd_params &, void *);
template rt_status attn_bwd<f16, 96, 96>(const rt_attn_bwd_params &, void *);
