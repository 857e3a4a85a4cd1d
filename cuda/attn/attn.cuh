// The launchers that dispatch.cu chooses from. instantiations/ compiles them, one file for each pass and pair of
// head dims.
#ifndef RINGTILE_CUDA_ATTN_CUH
#define RINGTILE_CUDA_ATTN_CUH

#include "../device/ptx.cuh"

template <class T, int D, int DV> rt_status attn_fwd(const rt_attn_fwd_params &p, void *stream);
template <class T, int D, int DV> rt_status attn_fwd_sm90(const rt_attn_fwd_params &p, void *stream);
template <class T, int D, int DV> rt_status attn_bwd(const rt_attn_bwd_params &p, void *stream);
template <class T, int D> rt_status attn_bwd_sm90(const rt_attn_bwd_params &p, void *stream); // D = DV

rt_status attn_fwd_plain(const rt_attn_fwd_params &p, void *stream); // f32, and head dims above 256
rt_status attn_bwd_plain(const rt_attn_bwd_params &p, void *stream);

#endif // RINGTILE_CUDA_ATTN_CUH
