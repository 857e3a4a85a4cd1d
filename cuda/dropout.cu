// Dropout from counters. A thread computes the four features that share a counter: it reads and writes 4 numbers and
// multiplies 20 pairs of 32-bit integers. Memory-bound in f32, close to it in 16 bits. No shared memory.
#include "device/elements.cuh"

#include "../csrc/dropout/dropout.h"
#include "../csrc/dropout/philox.h"
#include "ringtile_cuda.h"

namespace {

constexpr int THREADS = 256;

struct dropout_params {
    int64_t num_items, items_per_token; // counters
    int64_t num_features, x_stride;
    const void *x;
    const int64_t *places;
    void *y;
    uint32_t seed, step, stream, last_kept;
    double scale;
};

template <class T> RT_KERNEL(THREADS) dropout(RT_PARAMS dropout_params p) {
    using element = pack_of<T, 1>;
    using R = real<T>;
    const R scale = (R)p.scale;
    for (int64_t i = first_item(THREADS); i < p.num_items; i += items_per_grid(THREADS)) {
        const int64_t token = i / p.items_per_token, counter = i - token * p.items_per_token;
        const int64_t row = ld_global(p.places + 2 * token), position = ld_global(p.places + 2 * token + 1);
        const rt_philox at = {{(uint32_t)counter, (uint32_t)position, (uint32_t)row, p.stream}};
        const rt_philox random = rt_philox4x32(at, p.seed, p.step);
        for (int j = 0; j < 4 && 4 * counter + j < p.num_features; j++) {
            const int64_t feature = 4 * counter + j;
            element x = ld_global((const element *)((const T *)p.x + token * p.x_stride + feature));
            x.element[0] = rounded<T>(widen(x.element[0]) * (random.word[j] <= p.last_kept ? scale : R(0)));
            st_global((element *)((T *)p.y + token * p.num_features + feature), x);
        }
    }
}

} // namespace

rt_status rt_cuda_dropout(const rt_dropout_params *p, const void *x, const int64_t *places, void *y, void *stream) {
    const rt_status status = rt_dropout_check(p, x, places, y);
    if (status != RT_OK || p->num_tokens == 0 || p->num_features == 0) return status;
    const rt_dropout_rule rule = rt_dropout_rule_of(p->probability);
    const int64_t per_token = (p->num_features + 3) / 4;
    const dropout_params params = {p->num_tokens * per_token,
                                   per_token,
                                   p->num_features,
                                   p->x_stride,
                                   x,
                                   places,
                                   y,
                                   p->seed,
                                   p->step,
                                   p->stream,
                                   rule.last_kept,
                                   rule.scale};
    return for_dtype(p->dtype, [&](auto element) {
        return launch(dropout<decltype(element)>, grid_for(params.num_items, THREADS), THREADS, 0, stream, params);
    });
}
