// Chooses the instruction set, once. Nothing else in csrc/ reads the environment.
#define _DEFAULT_SOURCE // syscall
#include "../arrays.h"
#include "../dtype.h"
#include "kernels.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#if defined(RT_HAS_AMX) && !defined(RT_TILE_MODEL)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

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
    case RT_ISA_AMX_BF16:
        return "amx_bf16";
    }
    return "unknown";
}

rt_isa rt_last_isa(void) {
#ifdef RT_HAS_AMX
    return RT_ISA_AMX_BF16;
#else
    return RT_ISA_AVX512_BF16;
#endif
}

// Whether the CPU has tiles of bf16, and Linux (5.16 on) lets this process use them, for which it has to be asked.
static bool may_use_amx(void) {
#if defined(RT_TILE_MODEL)
    return true;
#elif defined(RT_HAS_AMX)
    enum { AMX_BF16 = 1 << 22, AMX_TILE = 1 << 24, REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18 };
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & AMX_BF16) && (d & AMX_TILE) &&
           syscall(SYS_arch_prctl, REQ_XCOMP_PERM, XTILEDATA) == 0;
#else
    return false;
#endif
}

bool rt_cpu_has(rt_isa isa) {
    if (isa == RT_ISA_AMX_BF16 && !may_use_amx()) return false;
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#if defined(RT_ISA_MODEL)
    return isa == RT_ISA_GENERIC || avx2;
#elif defined(RT_TILE_MODEL)
    if (isa == RT_ISA_AMX_BF16) return avx2;
#endif
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
    case RT_ISA_AMX_BF16:
        return avx512 && __builtin_cpu_supports("avx512bf16");
    }
#endif
    return isa == RT_ISA_GENERIC || isa == RT_ISA_AMX_BF16; // whose tiles are a model's
}

static rt_status choose(rt_isa *isa) {
    const char *asked = getenv("RINGTILE_CPU_ISA");
    for (int candidate = RT_ISA_AMX_BF16; candidate >= RT_ISA_GENERIC; candidate--) {
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
    if (!rt_points_to(isa, sizeof(*isa))) return rt_wrong(RT_BAD_POINTER, "isa");
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
#ifdef RT_HAS_AMX
    if (isa == RT_ISA_AMX_BF16) *kernels = &rt_kernels_amx_bf16;
#endif
    if (dtype == RT_F64) *kernels = &rt_kernels_f64;
    return RT_OK;
}
