#include "../fwd_sm90.cuh"

template rt_status attn_fwd_sm90<bf16, 256, 256>(const rt_attn_fwd_params &, void *);
template rt_status attn_fwd_sm90<f16, 256, 256>(const rt_attn_fwd_params &, void *);
