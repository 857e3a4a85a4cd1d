// Dropout, compiled once per instruction set for its math type (vec.h).

#include "../chunk.h"
#include "../isa/kernels.h"
#include "dropout.h"
#include "philox_words.h"

enum { COUNTERS = CHUNK / 4 }; // four features share a counter

// The factors of features 4 first_counter .. 4 first_counter + CHUNK - 1 of a token: 0 or rule.scale.
static void dropout_factors(const rt_dropout_params *p, rt_dropout_rule rule, const int64_t *place,
                            uint32_t first_counter, real *factor) {
    uint32_t word[4][COUNTERS];
    for (int i = 0; i < COUNTERS; i++) {
        word[0][i] = first_counter + (uint32_t)i, word[1][i] = (uint32_t)place[1];
        word[2][i] = (uint32_t)place[0], word[3][i] = p->stream;
    }
    philox_words(COUNTERS, word[0], p->seed, p->step);
    const real scale = (real)rule.scale;
    for (int i = 0; i < COUNTERS; i++)
        for (int j = 0; j < 4; j++) factor[4 * i + j] = word[j][i] <= rule.last_kept ? scale : 0;
}

static void dropout(const rt_dropout_params *p, const void *x, const int64_t *places, void *y, int64_t first,
                    int64_t last) {
    const rt_dropout_rule rule = rt_dropout_rule_of(p->probability);
    real value[CHUNK], factor[CHUNK];
    for (int64_t token = first; token < last; token++) {
        for (int64_t feature = 0; feature < p->num_features; feature += CHUNK) {
            const int64_t count = p->num_features - feature < CHUNK ? p->num_features - feature : CHUNK;
            dropout_factors(p, rule, places + 2 * token, (uint32_t)(feature / 4), factor);
            load_chunk(p->dtype, x, token * p->x_stride + feature, count, value);
            for (int64_t i = 0; i < count; i++) value[i] *= factor[i];
            store_chunk(p->dtype, y, token * p->num_features + feature, count, value);
        }
    }
}
