// The 16-bit floating-point types: f16 is the compiler's own, bf16 is the upper half of an f32.
#ifndef RINGTILE_HALF_H
#define RINGTILE_HALF_H

#include <stdint.h>
#include <string.h>

__extension__ typedef _Float16 half; // not ISO C, hence the keyword

static inline float bf16_to_f32(uint16_t bits) {
    const uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof(value));
    return value;
}

// Rounds to nearest, ties to even; keeps a NaN's sign and makes it quiet.
static inline uint16_t f32_to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    const uint32_t rounded = bits + 0x7fff + (bits >> 16 & 1), quiet = bits | UINT32_C(1) << 22;
    return (uint16_t)((value == value ? rounded : quiet) >> 16);
}

#endif // RINGTILE_HALF_H
