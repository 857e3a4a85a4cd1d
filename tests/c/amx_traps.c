// The instructions of AMX on a CPU without them: each is an invalid opcode, and the handler of its signal does what the
// model does. So the compiled kernels of AMX run as they are: their operands, strides, configuration and order. A CPU
// with AMX runs them by itself.
#define _GNU_SOURCE // REG_RIP, syscall
#include "check.h"

#include <float.h>

#include "isa_model.h"

#include <signal.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

enum { NONE = 0, X66 = 1, XF3 = 2, XF2 = 3 }; // the prefixes that VEX knows

static int num_dots;

static void fail(const char *what, const uint8_t *at) {
    fprintf(stderr, "%s:", what);
    for (int i = 0; i < 12; i++) fprintf(stderr, " %02x", at[i]);
    fputc('\n', stderr);
    _Exit(1);
}

// The tiles that the kernels ask for: eight of 16 rows by 64 bytes; every other byte is 0.
static void check_configuration(const uint8_t *given) {
    uint8_t want[64] = {1};
    for (int t = 0; t < 8; t++) want[16 + 2 * t] = 64, want[48 + t] = 16;
    if (memcmp(given, want, sizeof(want)) != 0) fail("another configuration", given);
}

// The sum of base, index and displacement of an instruction with a memory operand; *index: the index alone, times its
// scale. Sets *next to the instruction's end.
static uint64_t address_of(const greg_t *registers, const uint8_t *at, const uint8_t **next, int64_t *index) {
    static const int order[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
    const int no_x = at[1] >> 6 & 1, no_b = at[1] >> 5 & 1, mod = at[4] >> 6, rm = at[4] & 7;
    const bool relative = mod == 0 && rm == 5;
    const uint8_t *from = at + 5;
    uint64_t address = 0;
    *index = 0;
    if (rm == 4) {
        const int sib = *from++, of_index = (sib >> 3 & 7) | !no_x << 3;
        if (mod == 0 && (sib & 7) == 5) fail("an address without a base", at);
        address = (uint64_t)registers[order[(sib & 7) | !no_b << 3]];
        if (of_index != 4) *index = registers[order[of_index]] * (1 << (sib >> 6));
    } else if (!relative) {
        address = (uint64_t)registers[order[rm | !no_b << 3]];
    }
    int32_t displacement = 0;
    if (mod == 1) displacement = (int8_t)*from++;
    if (mod == 2 || relative) memcpy(&displacement, from, 4), from += 4;
    *next = from;
    return address + (uint64_t)*index + (uint64_t)displacement + (relative ? (uint64_t)(uintptr_t)from : 0);
}

static void run_instruction(int number, siginfo_t *info, void *context) {
    (void)number, (void)info;
    greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    const uint8_t *at = (const uint8_t *)(uintptr_t)registers[REG_RIP], *next = at + 5;
    // VEX in three bytes: map 0F38, W and L 0, at most eight tiles.
    if (at[0] != 0xc4 || (at[1] & 0x9f) != 0x82 || (at[2] & 0x84) != 0) fail("not an instruction of AMX", at);
    const int prefix = at[2] & 3, vvvv = ~(at[2] >> 3) & 15, reg = at[4] >> 3 & 7, rm = at[4] & 7;
    const int code = at[3] << 4 | prefix;
    int64_t stride = 0;
    if (at[4] >> 6 != 3) {
        const uint64_t address = address_of(registers, at, &next, &stride);
        char *memory = (char *)(uintptr_t)address;
        if (code == (0x49 << 4 | NONE) && reg == 0) {
            check_configuration((const uint8_t *)memory);
            tile_configure();
        } else if (code == (0x4b << 4 | XF2)) {
            tile_load(reg, memory - stride, stride);
        } else if (code == (0x4b << 4 | XF3)) {
            tile_store(reg, memory - stride, stride);
        } else {
            fail("not an instruction of AMX", at);
        }
    } else if (code == (0x49 << 4 | NONE) && at[4] == 0xc0) {
        tile_release();
    } else if (code == (0x49 << 4 | XF2) && rm == 0) {
        tile_zero(reg);
    } else if (code == (0x5c << 4 | XF3)) {
        tile_dot_bf16(reg, rm, vvvv);
        num_dots++;
    } else {
        fail("not an instruction of AMX", at);
    }
    registers[REG_RIP] = (greg_t)(uintptr_t)next;
}

__attribute__((constructor)) static void trap(void) {
    enum { REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18 };
    if (syscall(SYS_arch_prctl, REQ_XCOMP_PERM, XTILEDATA) == 0) return;
    const struct sigaction action = {.sa_sigaction = run_instruction, .sa_flags = SA_SIGINFO};
    if (!__builtin_cpu_supports("avx512bf16")) {
        printf("skipped: this CPU lacks avx512_bf16, in which the kernels of AMX compute the rest\n");
        exit(0);
    }
    if (sigaction(SIGILL, &action, NULL) != 0) exit(1);
}

__attribute__((destructor)) static void report(void) { printf("%d products of tiles were trapped\n", num_dots); }
