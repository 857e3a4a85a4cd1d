// Random numbers of many counters at once, for the kernels that each instruction set compiles.
#ifndef RINGTILE_DROPOUT_PHILOX_WORDS_H
#define RINGTILE_DROPOUT_PHILOX_WORDS_H

#include "philox.h"

// word (4, n): n counters become their random numbers. They are the inner loop, so that a vector holds the same word of
// several.
static inline __attribute__((always_inline)) void philox_words(int n, uint32_t *word, uint32_t seed, uint32_t step) {
    for (int round = 0; round < RT_PHILOX_ROUNDS; round++) {
        const uint32_t key_0 = rt_philox_key(seed, 0, round), key_1 = rt_philox_key(step, 1, round);
        for (int i = 0; i < n; i++) {
            const rt_philox x = {{word[i], word[n + i], word[2 * n + i], word[3 * n + i]}};
            const rt_philox y = rt_philox_round(x, key_0, key_1);
            word[i] = y.word[0], word[n + i] = y.word[1], word[2 * n + i] = y.word[2], word[3 * n + i] = y.word[3];
        }
    }
}

#endif // RINGTILE_DROPOUT_PHILOX_WORDS_H
