#include "../fwd.cuh"

template rt_status attn_fwd<bf16, 128, 128>(const rt_attn_fwd_params &, void *);
template rt_status attn_fwd<f16, 128, 128>(const rt_attn_fwd_params &, void *);
