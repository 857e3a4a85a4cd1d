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
    int64_t tokens_per_task;
} loss_job;

static void run_task(void *ctx, int64_t task, int64_t worker) {
    (void)worker;
    const loss_job *job = ctx;
    const int64_t first = task * job->tokens_per_task, last = first + job->tokens_per_task;
    job->kernels->cross_entropy(job->p, job->logits, job->labels, job->loss, job->lse, first,
                                last < job->p->num_tokens ? last : job->p->num_tokens);
}

rt_status rt_cross_entropy_check(const rt_cross_entropy_params *p, const void *logits, const void *labels,
                                 const void *loss, const void *lse) {
    if (p == NULL) return RT_BAD_POINTER;
    if (!rt_is_dtype(p->dtype)) return RT_BAD_DTYPE;
    if (p->num_tokens < 0 || p->vocab_size < 1) return RT_BAD_SHAPE;
    const int64_t sizes[] = {p->num_tokens, p->vocab_size}, strides[] = {p->logits_stride, 1};
    const int64_t element_bytes = rt_element_bytes(p->dtype), state_bytes = rt_state_bytes(p->dtype);
    if (!rt_array_fits(2, sizes, strides, element_bytes) || !rt_array_fits(1, sizes, NULL, sizeof(int64_t)))
        return RT_TOO_LARGE;
    if (p->want_grad && rt_overlaps(2, sizes, strides)) return RT_BAD_STRIDE;
    // Written so that NaN fails.
    const bool smoothing_ok = p->label_smoothing >= 0 && p->label_smoothing <= 1;
    const bool softcap_ok = rt_is_softcap(p->dtype, p->softcap),
               z_loss_ok = p->z_loss >= 0 && rt_is_finite(p->dtype, p->z_loss);
    if (!smoothing_ok || !softcap_ok || !z_loss_ok) return RT_BAD_SCALE;
    const bool all_there = rt_points_to(logits, element_bytes) && rt_points_to(labels, sizeof(int64_t)) &&
                           rt_points_to(loss, state_bytes) && rt_points_to(lse, state_bytes);
    if (p->num_tokens > 0 && !all_there) return RT_BAD_POINTER;
    const rt_bytes bytes[] = {
        rt_bytes_of(loss, 1, sizes, NULL, state_bytes), rt_bytes_of(lse, 1, sizes, NULL, state_bytes),
        rt_bytes_of(logits, 2, sizes, strides, element_bytes), rt_bytes_of(labels, 1, sizes, NULL, sizeof(int64_t))};
    return rt_outputs_share_memory(bytes, p->want_grad ? 3 : 2, 4) ? RT_SHARED_MEMORY : RT_OK;
}

rt_status rt_cross_entropy_fwd_bwd(const rt_cross_entropy_params *p, void *logits, const int64_t *labels, void *loss,
                                   void *lse, rt_parallel parallel) {
    const rt_kernels *kernels;
    rt_status status = rt_cross_entropy_check(p, logits, labels, loss, lse);
    if (status == RT_OK) status = rt_kernels_for(p->dtype, &kernels);
    if (status != RT_OK || p->num_tokens == 0) return status;
    for (int64_t t = 0; t < p->num_tokens; t++)
        if (labels[t] != p->ignore_index && (labels[t] < 0 || labels[t] >= p->vocab_size)) return RT_BAD_LABEL;

    loss_job job = {p, kernels, logits, loss, lse, labels, rt_rows_per_task(p->vocab_size)};
    rt_for_each(parallel, rt_num_tasks(p->num_tokens, job.tokens_per_task), run_task, &job);
    return RT_OK;
}
