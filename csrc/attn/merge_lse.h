// The merge of two log-sum-exps. CUDA kernels include it after device/ptx.cuh, which defines RT_HOST_DEVICE.
#ifndef RINGTILE_ATTN_MERGE_LSE_H
#define RINGTILE_ATTN_MERGE_LSE_H

#include <math.h>

#ifndef RT_HOST_DEVICE
#define RT_HOST_DEVICE static inline
#endif

typedef struct rt_merged {
    double share, lse; // exp(part - lse) of the merged lse = log(exp before + exp part)
} rt_merged;

// -inf is the log-sum-exp of no key, and inf of keys without a weight: flash attention on CUDA gives that where all
// scores are -inf. NaN stays.
RT_HOST_DEVICE rt_merged rt_merge_lse(double before, double part) {
    rt_merged merged = {0, before};
    if (part == (double)INFINITY || part == (double)-INFINITY) return merged;
    const double difference = part - before, e = exp(-fabs(difference));
    merged.share = (difference < 0 ? e : 1) / (1 + e); // the sigmoid of difference
    merged.lse = (difference < 0 ? before : part) + log1p(e);
    return merged;
}

#endif // RINGTILE_ATTN_MERGE_LSE_H
