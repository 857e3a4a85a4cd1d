// Softmax cross entropy. A thread block processes one token at a time; its threads divide the vocabulary, 16 bytes
// at a time if alignment allows. Pass 1: each thread keeps a running max of x' and the sum of exp(x' - max), which
// the thread block then reduces in a fixed order. Pass 2 replaces x by the gradient. Logits are read twice and
// written once: memory-bound. Sums over the vocabulary are f64 between packs. 2 KiB of shared memory.
#include "../csrc/loss/cross_entropy.h"
#include "device/elements.cuh"
#include "device/shared.cuh"
#include "ringtile_cuda.h"

#include <math.h>

namespace {

constexpr int THREADS = 256;

struct shared_memory {
    double partial[THREADS];
};
static_assert(sizeof(shared_memory) <= 48 * 1024); // more has to be requested

struct loss_params {
    rt_cross_entropy_params p;
    void *logits;
    const int64_t *labels;
    void *loss, *lse; // (T)
};

// Reduces one number per thread, in a fixed order, and returns the result to all threads.
template <class Combine> RT_DEVICE double reduce(double x, Combine combine) {
    const auto partial = RT_SHARED(shared_ref<shared_memory>{shared_base()}, partial);
    syncthreads(); // all threads have read the previous result
    st_shared(partial[thread_index()], x);
    for (int half = THREADS / 2; half > 0; half /= 2) {
        syncthreads();
        if (thread_index() < half) {
            x = combine(x, ld_shared(partial[thread_index() + half]));
            st_shared(partial[thread_index()], x);
        }
    }
    syncthreads();
    return ld_shared(partial[0]);
}

RT_DEVICE double reduce_sum(double x) {
    return reduce(x, [](double a, double b) { return a + b; });
}

// x', and dx'/dx = 1 - tanh^2.
template <class R> struct logit {
    R x, slope;
};
template <class R> RT_DEVICE logit<R> capped(const rt_cross_entropy_params &p, R x) {
    if (p.softcap == 0) return {x, 1};
    const R t = tanh(x * (R)(1 / p.softcap));
    return {t * (R)p.softcap, 1 - t * t};
}

// Calls function(pack of elements, its place, first column) for this thread's share of a row of V elements, in order.
// Several packs are loaded before the first is processed, so that few tokens, each with one thread block, keep the
// memory busy too. The tail that does not fill a pack comes in packs of one.
template <class T, int count, class Function> RT_DEVICE void for_packs(T *row, int64_t V, Function function) {
    constexpr int IN_FLIGHT = sizeof(T) == 8 ? 1 : 4, STEP = THREADS * count;
    using pack = pack_of<T, count>;
    const int64_t in_packs = V / count * count;
    for (int64_t first = (int64_t)thread_index() * count; first < in_packs; first += IN_FLIGHT * STEP) {
        pack packs[IN_FLIGHT];
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; i++)
            if (first + i * STEP < in_packs) packs[i] = ld_global((const pack *)(row + first + i * STEP));
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; i++) {
            const int64_t col = first + i * STEP;
            if (col < in_packs) function(packs[i], (pack *)(row + col), col);
        }
    }
    if constexpr (count > 1)
        for (int64_t col = in_packs + thread_index(); col < V; col += THREADS) {
            const auto at = (pack_of<T, 1> *)(row + col);
            function(ld_global(at), at, col);
        }
}

template <class T> RT_DEVICE void fill_row(T *row, int64_t V, real<T> value) {
    for (int64_t col = thread_index(); col < V; col += THREADS) st_global(row + col, rounded<T>(value));
}

template <class T, int count> RT_DEVICE void one_token(const loss_params &job, int64_t token) {
    using R = real<T>;
    const rt_cross_entropy_params &p = job.p;
    const int64_t V = p.vocab_size, label = ld_global(job.labels + token);
    T *row = (T *)job.logits + token * p.logits_stride;
    R *loss = (R *)job.loss + token, *lse = (R *)job.lse + token;
    if (label == p.ignore_index || label < 0 || label >= V) {
        // An ignored token has loss 0; a bad label must not yield a plausible number.
        const R value = label == p.ignore_index ? R(0) : R(NAN);
        if (p.want_grad) fill_row(row, V, value);
        if (thread_index() == 0) st_global(loss, value), st_global(lse, value);
        return;
    }
    const double label_logit = capped<R>(p, widen(ld_global(row + label))).x;

    // Pass 1.
    R max = -INFINITY;
    double sum = 0, total = 0;
    for_packs<T, count>(row, V, [&](auto pack, auto *, int64_t) {
        constexpr int size = sizeof(pack) / sizeof(T);
        R x[size], top = max;
        for (int i = 0; i < size; i++) {
            x[i] = capped<R>(p, widen(pack.element[i])).x;
            top = x[i] > top ? x[i] : top;
        }
        if (top > max) {
            sum *= exp((double)max - (double)top);
            max = top;
        }
        // 0 as long as every logit is -inf: -inf - -inf would be NaN.
        const R shift = max == -INFINITY ? R(0) : max;
        R pack_sum = 0, pack_total = 0;
        for (int i = 0; i < size; i++) {
            pack_sum += exp(x[i] - shift);
            pack_total += x[i];
        }
        sum += pack_sum;
        total += pack_total;
    });
    const double top = reduce((double)max, [](double a, double b) { return a > b ? a : b; });
    const double shift = top == -INFINITY ? 0 : top;
    sum = reduce_sum(sum == 0 ? 0 : sum * exp((double)max - shift));
    total = p.label_smoothing > 0 ? reduce_sum(total) : 0;
    // Differences from the max come first, so that logits far from 0 lose no precision.
    const double log_sum = log(sum), z = shift + log_sum, smoothing = p.label_smoothing;
    if (thread_index() == 0) {
        st_global(loss, (R)((1 - smoothing) * (log_sum + (shift - label_logit)) +
                            smoothing * (log_sum + (shift - total / (double)V)) + p.z_loss * z * z));
        st_global(lse, (R)z);
    }
    if (!p.want_grad) return;

    // Pass 2: d loss / d x' = p (1 + 2 z_loss lse) - (1 - smoothing) [label] - smoothing / V, p = exp(x' - lse).
    const R scale = (R)((1 + 2 * p.z_loss * z) / sum), uniform = (R)(smoothing / (double)V);
    for_packs<T, count>(row, V, [&](auto pack, auto *at, int64_t col) {
        constexpr int size = sizeof(pack) / sizeof(T);
        for (int i = 0; i < size; i++) {
            const logit<R> x = capped<R>(p, widen(pack.element[i]));
            R slope = exp(x.x - (R)shift) * scale - uniform;
            if (col + i == label) slope -= (R)(1 - smoothing);
            pack.element[i] = rounded<T>(slope * x.slope);
        }
        st_global(at, pack);
    });
}

template <class T, int count> RT_KERNEL(THREADS) cross_entropy(RT_PARAMS loss_params job) {
    for (int64_t token = cta_index_x(); token < job.p.num_tokens; token += num_ctas_x())
        one_token<T, count>(job, token);
}

} // namespace

rt_status rt_cuda_cross_entropy_fwd_bwd(const rt_cross_entropy_params *p, void *logits, const int64_t *labels,
                                        void *loss, void *lse, void *stream) {
    const rt_status status = rt_cross_entropy_check(p, logits, labels, loss, lse);
    if (status != RT_OK || p->num_tokens == 0) return status;
    const loss_params job = {*p, logits, labels, loss, lse};
    return for_dtype(p->dtype, [&](auto element) {
        using T = decltype(element);
        const bool packed = p->logits_stride % PACK<T> == 0 && is_aligned(logits, 16);
        const auto kernel = packed ? cross_entropy<T, PACK<T>> : cross_entropy<T, 1>;
        return launch(kernel, grid_for(p->num_tokens, 1), THREADS, sizeof(shared_memory), stream, job);
    });
}
