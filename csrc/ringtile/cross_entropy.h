// Softmax cross entropy and its gradient.
#ifndef RINGTILE_API_CROSS_ENTROPY_H
#define RINGTILE_API_CROSS_ENTROPY_H

#include "base.h"

#ifdef __cplusplus
extern "C" {
#endif

// With x' = softcap * tanh(x / softcap) (x' = x if softcap is 0) and lse = log sum exp x':
//   loss = (1 - label_smoothing) * (lse - x'[label]) + label_smoothing * (lse - mean x') + z_loss * lse^2
// Smoothing follows torch.nn.functional.cross_entropy. A token whose label is ignore_index has loss 0, lse 0 and
// gradient 0, even if its logits are not finite. A logit of -inf has probability 0.
typedef struct rt_cross_entropy_params {
    rt_dtype dtype; // of logits; loss and lse are f32, or f64 if dtype is RT_F64
    int64_t num_tokens, vocab_size, logits_stride;
    int64_t ignore_index;
    double label_smoothing, softcap, z_loss;
    bool want_grad; // false: logits keep their value
} rt_cross_entropy_params;

//   logits (T, V)  replaced by d loss[t] / d logits[t, :] (unit weight per token) if want_grad
//   labels (T)     loss, lse (T)
//   RT_BAD_DTYPE, RT_BAD_SHAPE, RT_BAD_STRIDE, RT_BAD_SCALE, RT_BAD_LABEL; nothing is written then
rt_status rt_cross_entropy_fwd_bwd(const rt_cross_entropy_params *p, void *logits, const int64_t *labels, void *loss,
                                   void *lse, rt_parallel parallel);

#ifdef __cplusplus
}
#endif

#endif // RINGTILE_API_CROSS_ENTROPY_H
