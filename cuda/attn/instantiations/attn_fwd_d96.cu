#include "../fwd.cuh"

template rt_status attn_fwd<bf16, 96, 96>(const rt_attn_fwd_params &, void *);
template rt_status attn_fwd<f16, 96, 96>(const rt_attn_fwd_params &, void *);
