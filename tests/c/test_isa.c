// The choice of the instruction set, by whichever thread asks first. A process makes it once, so every case runs in a
// child process.
#define _POSIX_C_SOURCE 200809L // setenv, fork
#include "check.h"

#include <sys/wait.h>
#include <unistd.h>

static void ask_isa(void *ctx, int64_t worker) {
    (void)ctx, (void)worker;
    rt_isa isa;
    rt_cpu_isa(&isa);
}

// The status of rt_cpu_isa, and of a kernel, which must agree, with RINGTILE_CPU_ISA = `asked`; NULL: unset.
static rt_status status_when_asked(const char *asked) {
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        if (asked == NULL)
            unsetenv("RINGTILE_CPU_ISA");
        else
            setenv("RINGTILE_CPU_ISA", asked, 1);
        run_threads(NULL, 4, ask_isa, NULL);
        rt_isa isa = (rt_isa)-1;
        const rt_status status = rt_cpu_isa(&isa);
        const bool named = status == RT_OK && (asked == NULL || *asked == 0 || strcmp(rt_isa_name(isa), asked) == 0);
        const bool untouched = status != RT_OK && isa == (rt_isa)-1;
        float gate = 1, up = 2, prod = 0;
        const rt_glu_params p = {RT_F32, RT_GLU_RELU, 1, 1, 1, 1, 1};
        const bool kernel_agrees = rt_glu_fwd(&p, &gate, &up, &prod, no_threads()) == status;
        const bool again = rt_cpu_isa(&isa) == status;
        const bool right = (named || untouched) && kernel_agrees && again && prod == (status == RT_OK ? 2 : 0);
        _exit(right ? (int)status : 255);
    }
    int exit_code = 0;
    waitpid(child, &exit_code, 0);
    return WIFEXITED(exit_code) ? (rt_status)WEXITSTATUS(exit_code) : (rt_status)255;
}

int main(void) {
    CHECK_STATUS(status_when_asked(NULL), RT_OK);
    CHECK_STATUS(status_when_asked(""), RT_OK);
    CHECK_STATUS(status_when_asked("generic"), RT_OK);
    CHECK_STATUS(status_when_asked("sse9"), RT_BAD_ISA);
    CHECK_STATUS(status_when_asked("AVX2"), RT_BAD_ISA);
    // Each instruction set contains the one before it, so once one is missing the rest are.
    const char *const names[] = {"avx2", "avx512", "avx512_bf16"};
    rt_status before = RT_OK;
    for (int i = 0; i < 3; i++) {
        const rt_status status = status_when_asked(names[i]);
        CHECK(status == RT_ISA_MISSING || (status == RT_OK && before == RT_OK));
        before = status;
    }
    CHECK_STATUS(status_when_asked("amx_bf16"), RT_OK); // by the model, which runs on any CPU
    CHECK(rt_last_isa() == RT_ISA_AMX_BF16);
    CHECK(strcmp(rt_isa_name((rt_isa)99), "unknown") == 0);
    return check_finish();
}
