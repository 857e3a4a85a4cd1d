// The text behind RT_CUDA, one per thread.
#include "../ringtile_cuda.h"
#include "ptx.cuh"

#include <stdio.h>
#include <string.h>

static thread_local char last_error[1024];

const char *rt_cuda_last_error(void) { return last_error; }

void set_last_error(const char *text) { snprintf(last_error, sizeof(last_error), "%s", text); }

#ifdef __CUDACC__

rt_status launch_failed(const failed_launch &failed) {
    const cudaError_t error = static_cast<cudaError_t>(failed.error);
    const char *slash = strrchr(failed.file, '/'), *file = slash ? slash + 1 : failed.file;
    const char *kernel = nullptr;
    if (cudaFuncGetName(&kernel, failed.kernel) != cudaSuccess || kernel == nullptr)
        kernel = ""; // the runtime could not start; its place in the source has to do
    char where[64] = "no device";
    int device, driver = 0, runtime = 0; // versions are 1000 major + 10 minor
    if (cudaGetDevice(&device) == cudaSuccess)
        snprintf(where, sizeof(where), "device %d of compute capability %d.%d", device, compute_capability() / 10,
                 compute_capability() % 10);
    cudaDriverGetVersion(&driver);
    cudaRuntimeGetVersion(&runtime);
    cudaGetLastError(); // clears it
    char text[sizeof(last_error)];
    snprintf(text, sizeof(text),
             "%s (%s); kernel %s%sat %s:%d, grid (%lld, %lld, %lld), %d threads, %d bytes of shared memory, %s, "
             "driver for CUDA %d.%d, runtime %d.%d",
             cudaGetErrorString(error), cudaGetErrorName(error), kernel, *kernel ? " " : "", file, failed.line,
             (long long)failed.grid.x, (long long)failed.grid.y, (long long)failed.grid.z, failed.num_threads,
             failed.shared_bytes, where, driver / 1000, driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
    set_last_error(text);
    return RT_CUDA;
}

int rt_cuda_runtime_version(void) { return CUDART_VERSION; }

int rt_cuda_driver_version(void) {
    int version = 0;
    cudaDriverGetVersion(&version);
    return version;
}

#endif
