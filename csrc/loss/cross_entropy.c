// The entry point of softmax cross entropy: it checks, then hands tokens to the workers.
#include "cross_entropy.h"
#include "../arrays.h"
#include "../dtype.h"
#include "../isa/kernels.h"
#include "../parallel.h"

typedef struct loss_job {
    const rt_cross_entropy_params *p;
    const rt_kernels *kernels;
    void *logits, *loss, *lse;
    const int64_t *labels;
} loss_job;

static void run_tokens(const void *ctx, int64_t first, int64_t last) {
    const loss_job *job = ctx;
    job->kernels->cross_entropy(job->p, job->logits, job->labels, job->loss, job->lse, first, last);
}

rt_status rt_cross_entropy_check(const rt_cross_entropy_params *p, const void *logits, const void *labels,
                                 const void *loss, const void *lse) {
    if (p == NULL) return rt_wrong(RT_BAD_POINTER, "p");
    if (!rt_is_dtype(p->dtype)) return RT_BAD_DTYPE;
    if (p->num_tokens < 0 || p->vocab_size < 1) return rt_wrong(RT_BAD_SHAPE, "num_tokens or vocab_size");
    // Written so that NaN fails.
    if (!(p->label_smoothing >= 0 && p->label_smoothing <= 1)) return rt_wrong(RT_BAD_SCALE, "label_smoothing");
    if (!rt_is_softcap(p->dtype, p->softcap)) return rt_wrong(RT_BAD_SCALE, "softcap");
    if (!(p->z_loss >= 0 && rt_is_finite(p->dtype, p->z_loss))) return rt_wrong(RT_BAD_SCALE, "z_loss");
    const int64_t T = p->num_tokens, state_bytes = rt_state_bytes(p->dtype);
    rt_arrays all = {0};
    rt_add_array(&all, true, (rt_array){"loss", loss, state_bytes, 1, {T}, NULL, false});
    rt_add_array(&all, true, (rt_array){"lse", lse, state_bytes, 1, {T}, NULL, false});
    rt_add_array(
        &all, p->want_grad,
        (rt_array){"logits", logits, rt_element_bytes(p->dtype), 2, {T, p->vocab_size}, &p->logits_stride, false});
    rt_add_array(&all, false, (rt_array){"labels", labels, sizeof(int64_t), 1, {T}, NULL, false});
    return rt_check_arrays(&all);
}

rt_status rt_cross_entropy_fwd_bwd(const rt_cross_entropy_params *p, void *logits, const int64_t *labels, void *loss,
                                   void *lse, rt_parallel parallel) {
    const rt_kernels *kernels;
    rt_status status = rt_cross_entropy_check(p, logits, labels, loss, lse);
    if (status == RT_OK) status = rt_kernels_for(p->dtype, &kernels);
    if (status != RT_OK || p->num_tokens == 0) return status;
    for (int64_t t = 0; t < p->num_tokens; t++)
        if (labels[t] != p->ignore_index && (labels[t] < 0 || labels[t] >= p->vocab_size)) return RT_BAD_LABEL;

    const loss_job job = {p, kernels, logits, loss, lse, labels};
    rt_for_rows(parallel, p->num_tokens, rt_rows_per_task(p->vocab_size), run_tokens, &job);
    return RT_OK;
}
