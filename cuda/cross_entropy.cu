// Softmax cross entropy: a block takes one token at a time, its threads share the vocabulary, 16 bytes at a time where
// rows allow it. Pass 1 keeps in every thread a running maximum of x' and the sum of exp(x' - max), then the block makes
// them one, in a fixed order; pass 2 replaces x by the gradient. Logits are read twice and written once: memory bounds
// it. Sums over the vocabulary are f64 between packs. 2 KiB of shared memory.
#include "../csrc/loss/cross_entropy.h"
#include "elements.cuh"
#include "ringtile_cuda.h"

#include <math.h>

namespace {

constexpr int THREADS = 256;

struct loss_params {
    rt_cross_entropy_params p;
    void *logits;
    const int64_t *labels;
    void *loss, *lse; // (T)
};

// One number of every thread made one, the same in all of them; combine is commutative. Always in the same order.
template <class Combine> RT_DEVICE double reduce_block(double x, Combine combine) {
    const shared_address base = shared_base();
    block_barrier(); // an earlier result has been read
    shared_store(base + 8 * thread_index(), x);
    for (int half = THREADS / 2; half > 0; half /= 2) {
        block_barrier();
        if (thread_index() < half) {
            x = combine(x, shared_load<double>(base + 8 * (thread_index() + half)));
            shared_store(base + 8 * thread_index(), x);
        }
    }
    block_barrier();
    return shared_load<double>(base);
}

RT_DEVICE double sum_block(double x) {
    return reduce_block(x, [](double a, double b) { return a + b; });
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

// Calls function(first column, pack of elements) for this thread's share of a row of V elements; what does not fill a
// pack comes as packs of one.
template <class T, int count, class Function> RT_DEVICE void for_packs(T *row, int64_t V, Function function) {
    const int64_t in_packs = V / count * count;
    for (int64_t col = (int64_t)thread_index() * count; col < in_packs; col += THREADS * count)
        function((pack_of<T, count> *)(row + col), col);
    if constexpr (count > 1)
        for (int64_t col = in_packs + thread_index(); col < V; col += THREADS)
            function((pack_of<T, 1> *)(row + col), col);
}

template <class T> RT_DEVICE void fill_row(T *row, int64_t V, real<T> value) {
    for (int64_t col = thread_index(); col < V; col += THREADS) global_store(row + col, rounded<T>(value));
}

template <class T, int count> RT_DEVICE void one_token(const loss_params &job, int64_t token) {
    using R = real<T>;
    const rt_cross_entropy_params &p = job.p;
    const int64_t V = p.vocab_size, label = global_load(job.labels + token);
    T *row = (T *)job.logits + token * p.logits_stride;
    R *loss = (R *)job.loss + token, *lse = (R *)job.lse + token;
    if (label == p.ignore_index || label < 0 || label >= V) {
        // No label, no loss; and what is no label must not pass for a number.
        const R value = label == p.ignore_index ? R(0) : R(NAN);
        if (p.want_grad) fill_row(row, V, value);
        if (thread_index() == 0) global_store(loss, value), global_store(lse, value);
        return;
    }
    const double label_logit = capped<R>(p, widen(global_load(row + label))).x;

    // Pass 1.
    R max = -INFINITY;
    double sum = 0, total = 0;
    for_packs<T, count>(row, V, [&](auto *at, int64_t) {
        const auto pack = global_load(at);
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
        // What exponents are taken relative to. As long as every logit is -inf that is 0: -inf - -inf would be NaN.
        const R shift = max == -INFINITY ? R(0) : max;
        R pack_sum = 0, pack_total = 0;
        for (int i = 0; i < size; i++) {
            pack_sum += exp(x[i] - shift);
            pack_total += x[i];
        }
        sum += pack_sum;
        total += pack_total;
    });
    const double top = reduce_block((double)max, [](double a, double b) { return a > b ? a : b; });
    const double shift = top == -INFINITY ? 0 : top;
    sum = sum_block(sum == 0 ? 0 : sum * exp((double)max - shift));
    total = p.label_smoothing > 0 ? sum_block(total) : 0;
    // Differences from the maximum are taken first, so that logits far from 0 lose nothing.
    const double log_sum = log(sum), z = shift + log_sum, smoothing = p.label_smoothing;
    if (thread_index() == 0) {
        global_store(loss, (R)((1 - smoothing) * (log_sum + (shift - label_logit)) +
                               smoothing * (log_sum + (shift - total / (double)V)) + p.z_loss * z * z));
        global_store(lse, (R)z);
    }
    if (!p.want_grad) return;

    // Pass 2: d loss / d x' = p (1 + 2 z_loss lse) - (1 - smoothing) [label] - smoothing / V, p = exp(x' - lse).
    const R scale = (R)((1 + 2 * p.z_loss * z) / sum), uniform = (R)(smoothing / (double)V);
    for_packs<T, count>(row, V, [&](auto *at, int64_t col) {
        auto pack = global_load(at);
        constexpr int size = sizeof(pack) / sizeof(T);
        for (int i = 0; i < size; i++) {
            const logit<R> x = capped<R>(p, widen(pack.element[i]));
            R slope = exp(x.x - (R)shift) * scale - uniform;
            if (col + i == label) slope -= (R)(1 - smoothing);
            pack.element[i] = rounded<T>(slope * x.slope);
        }
        global_store(at, pack);
    });
}

template <class T, int count> RT_KERNEL(THREADS) cross_entropy(RT_PARAMS loss_params job) {
    for (int64_t token = block_index(); token < job.p.num_tokens; token += num_blocks())
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
        return launch(kernel, blocks_for(p->num_tokens, 1), THREADS, THREADS * 8, stream, job);
    });
}
