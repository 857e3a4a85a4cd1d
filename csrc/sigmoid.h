// The sigmoid's product and its slope, of the math type (vec.h).
#ifndef RINGTILE_SIGMOID_H
#define RINGTILE_SIGMOID_H

#include "vec.h"

typedef struct activation {
    vec value, slope;
} activation;

// act = x sigmoid(z), act' = sigmoid(z) + x sigmoid(z) sigmoid(-z) dz.
static inline activation sigmoid_gate(vec x, vec z, vec dz) {
    const vec e = vec_exp(-vec_abs(z)), large = 1 / (1 + e), small = e * large; // sigmoid(|z|), sigmoid(-|z|)
    const vec sigmoid = vec_select(z < 0, small, large), other = vec_select(z < 0, large, small);
    const vec value = x * sigmoid;
    return (activation){value, sigmoid + value * other * dz};
}

#endif // RINGTILE_SIGMOID_H
