// Philox4x32-10, the random numbers that are a function of a counter (Salmon et al., Parallel random numbers: as easy
// as 1, 2, 3, SC11). CUDA kernels include it after device/ptx.cuh, which defines RT_HOST_DEVICE.
#ifndef RINGTILE_ATTN_PHILOX_H
#define RINGTILE_ATTN_PHILOX_H

#include <math.h>
#include <stdint.h>

#ifndef RT_HOST_DEVICE
#define RT_HOST_DEVICE static inline
#endif

enum { RT_PHILOX_ROUNDS = 10 };

typedef struct rt_philox {
    uint32_t word[4]; // the counter before the first round, the random numbers after the last
} rt_philox;

// One round; the key is rt_philox_key(key, round).
RT_HOST_DEVICE rt_philox rt_philox_round(rt_philox x, uint32_t key_0, uint32_t key_1) {
    const uint64_t a = (uint64_t)0xD2511F53u * x.word[0], b = (uint64_t)0xCD9E8D57u * x.word[2];
    rt_philox y;
    y.word[0] = (uint32_t)(b >> 32) ^ x.word[1] ^ key_0;
    y.word[1] = (uint32_t)b;
    y.word[2] = (uint32_t)(a >> 32) ^ x.word[3] ^ key_1;
    y.word[3] = (uint32_t)a;
    return y;
}

// Half `half` of the key of a round: a Weyl sequence.
RT_HOST_DEVICE uint32_t rt_philox_key(uint32_t key, int half, int round) {
    return key + (uint32_t)round * (half == 0 ? 0x9E3779B9u : 0xBB67AE85u);
}

RT_HOST_DEVICE rt_philox rt_philox4x32(rt_philox x, uint32_t key_0, uint32_t key_1) {
    for (int round = 0; round < RT_PHILOX_ROUNDS; round++)
        x = rt_philox_round(x, rt_philox_key(key_0, 0, round), rt_philox_key(key_1, 1, round));
    return x;
}

// The row in a counter: every head of a row draws for itself.
RT_HOST_DEVICE uint32_t rt_dropout_row(int64_t row, int64_t head) { return (uint32_t)row + ((uint32_t)head << 20); }

// A weight is kept if its random number is at most last_kept, and then multiplied by scale; scale is 0 if none is kept.
typedef struct rt_dropout_rule {
    uint32_t last_kept;
    double scale;
} rt_dropout_rule;

static inline rt_dropout_rule rt_dropout_rule_of(double probability) {
    const double num_kept = nearbyint((1 - probability) * 0x1p32); // of the 2^32 random numbers
    rt_dropout_rule rule = {0, 0};
    if (num_kept >= 1) rule.last_kept = (uint32_t)(num_kept - 1), rule.scale = 1 / (1 - probability);
    return rule;
}

#endif // RINGTILE_ATTN_PHILOX_H
