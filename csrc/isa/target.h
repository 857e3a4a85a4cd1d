// RT_TARGET(instructions) ... RT_TARGET_END: what lies between is compiled for a CPU that has these instructions too.
//
// RT_ISA_MODEL, of tests alone: a header that says AVX512-BF16 and AMX in C. AVX-512 and what contains it are compiled
// for AVX2, to run on any CPU.
#ifndef RINGTILE_ISA_TARGET_H
#define RINGTILE_ISA_TARGET_H

#define RT_PRAGMA(text) _Pragma(#text)
#if defined(RT_ISA_MODEL) && !defined(__x86_64__)
#define RT_TARGET(instructions)
#define RT_TARGET_END
#elif defined(__clang__)
#define RT_TARGET(instructions)                                                                                        \
    RT_PRAGMA(clang attribute push(__attribute__((target(instructions))), apply_to = function))
#define RT_TARGET_END RT_PRAGMA(clang attribute pop)
#else // to the end of the file
#define RT_TARGET(instructions) RT_PRAGMA(GCC target(instructions))
#define RT_TARGET_END
#endif

#if defined(RT_ISA_MODEL)
#define RT_TILE_MODEL
#endif

// Whether the kernels of AMX are compiled: this compiler knows the instructions, or tests model them (RT_TILE_MODEL).
#if defined(RT_TILE_MODEL)
#define RT_HAS_AMX 1
#elif defined(__x86_64__) && defined(__linux__) && defined(__has_include)
#if __has_include(<amxbf16intrin.h>)
#define RT_HAS_AMX 1
#endif
#endif

#endif // RINGTILE_ISA_TARGET_H
