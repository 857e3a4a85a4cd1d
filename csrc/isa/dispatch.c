// Chooses the instruction set, once. Nothing else in csrc/ reads the environment.
#include "../arrays.h"
#include "../dtype.h"
#include "kernels.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

const char *rt_isa_name(rt_isa isa) {
    switch (isa) {
    case RT_ISA_GENERIC:
        return "generic";
    case RT_ISA_AVX2:
        return "avx2";
    case RT_ISA_AVX512:
        return "avx512";
    case RT_ISA_AVX512_BF16:
        return "avx512_bf16";
    }
    return "unknown";
}

bool rt_cpu_has(rt_isa isa) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    switch (isa) {
    case RT_ISA_GENERIC:
        return true;
    case RT_ISA_AVX2:
        return avx2;
    case RT_ISA_AVX512:
        return avx512;
    case RT_ISA_AVX512_BF16:
        return avx512 && __builtin_cpu_supports("avx512bf16");
    }
#endif
    return isa == RT_ISA_GENERIC;
}

static rt_status choose(rt_isa *isa) {
    const char *asked = getenv("RINGTILE_CPU_ISA");
    for (int candidate = RT_ISA_AVX512_BF16; candidate >= RT_ISA_GENERIC; candidate--) {
        *isa = (rt_isa)candidate;
        if (asked == NULL || *asked == 0) {
            if (rt_cpu_has(*isa)) return RT_OK;
        } else if (strcmp(asked, rt_isa_name(*isa)) == 0) {
            return rt_cpu_has(*isa) ? RT_OK : RT_ISA_MISSING;
        }
    }
    return RT_BAD_ISA;
}

rt_status rt_cpu_isa(rt_isa *isa) {
    if (!rt_points_to(isa, sizeof(*isa))) return RT_BAD_POINTER;
    // 0 until chosen, then 1 + 16 * status + isa. Threads that race all store the same value.
    static _Atomic int memo;
    int known = atomic_load_explicit(&memo, memory_order_relaxed);
    if (known == 0) {
        rt_isa chosen;
        const rt_status status = choose(&chosen);
        known = 1 + 16 * (int)status + (int)chosen;
        atomic_store_explicit(&memo, known, memory_order_relaxed);
    }
    const rt_status status = (rt_status)((known - 1) / 16);
    if (status == RT_OK) *isa = (rt_isa)((known - 1) % 16);
    return status;
}

rt_status rt_kernels_for(rt_dtype dtype, const rt_kernels **kernels) {
    if (!rt_is_dtype(dtype)) return RT_BAD_DTYPE;
    rt_isa isa;
    const rt_status status = rt_cpu_isa(&isa);
    if (status != RT_OK) return status;
    *kernels = &rt_kernels_generic;
#if defined(__x86_64__)
    if (isa == RT_ISA_AVX2) *kernels = &rt_kernels_avx2;
    if (isa == RT_ISA_AVX512) *kernels = &rt_kernels_avx512;
    if (isa == RT_ISA_AVX512_BF16) *kernels = &rt_kernels_avx512_bf16;
#endif
    if (dtype == RT_F64) *kernels = &rt_kernels_f64;
    return RT_OK;
}
