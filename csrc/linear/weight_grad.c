// The entry point of the weight gradient: it checks, has x packed, then hands blocks of the sum to the workers.
#include "../arrays.h"
#include "../dtype.h"
#include "../isa/kernels.h"
#include "../parallel.h"

enum {
    BLOCK_COLUMNS = 1024, // of the sum: so many that to pack dout again for each block of its rows is a small part
    PACK_COLUMNS = 64,    // of x, that a task packs
};

typedef struct grad_job {
    const rt_weight_grad_params *p;
    const rt_kernels *kernels;
    int64_t column_blocks;
    char *shared, *scratch; // scratch: of worker 0; the other workers' follows
    int64_t shared_bytes, scratch_bytes;
} grad_job;

static rt_status check(const rt_weight_grad_params *p) {
    if (p == NULL) return rt_wrong(RT_BAD_POINTER, "p");
    if (!rt_is_dtype(p->dtype)) return RT_BAD_DTYPE;
    const int64_t T = p->num_tokens, F = p->num_outputs, E = p->num_inputs, input = rt_element_bytes(p->dtype);
    if (T < 0 || F < 0 || E < 0) return rt_wrong(RT_BAD_SHAPE, "num_tokens, num_outputs or num_inputs");
    rt_arrays all = {0};
    rt_add_array(&all, true, RT_ARRAY(p, sum, rt_state_bytes(p->dtype), 2, {F, E}, &p->sum_stride, false));
    rt_add_array(&all, false, RT_ARRAY(p, dout, input, 2, {T, F}, &p->dout_stride, false));
    rt_add_array(&all, false, RT_ARRAY(p, x, input, 2, {T, E}, &p->x_stride, false));
    return rt_check_arrays(&all);
}

static bool adds_nothing(const rt_weight_grad_params *p) {
    return p->num_tokens == 0 || p->num_outputs == 0 || p->num_inputs == 0;
}

// Of sizes above 0. num_bytes: of the workspace.    RT_TOO_LARGE: more than any array may have
static rt_status lay_out(const rt_weight_grad_params *p, int64_t num_workers, grad_job *j, int64_t *num_bytes) {
    *j = (grad_job){.p = p, .column_blocks = rt_num_tasks(p->num_inputs, BLOCK_COLUMNS)};
    int64_t most = sizeof(double); // more than x packed, and than a worker's scratch
    if (p->num_tokens > RT_MAX_BYTES || p->num_inputs > RT_MAX_BYTES || !rt_multiply_fits(&most, p->num_tokens + 64) ||
        !rt_multiply_fits(&most, p->num_inputs + 256))
        return rt_wrong(RT_TOO_LARGE, "num_tokens or num_inputs");
    const rt_status status = rt_kernels_for(p->dtype, &j->kernels);
    if (status != RT_OK) return status;
    j->shared_bytes = rt_round_up_64(j->kernels->weight_grad_shared_bytes(p));
    j->scratch_bytes = rt_round_up_64(j->kernels->weight_grad_scratch_bytes(p));
    return rt_workspace_fits(j->shared_bytes, j->scratch_bytes, num_workers, num_bytes);
}

int64_t rt_weight_grad_workspace_bytes(const rt_weight_grad_params *p, int64_t num_workers) {
    grad_job j;
    int64_t num_bytes;
    if (p == NULL || !rt_is_dtype(p->dtype) || num_workers < 1) return 0;
    if (p->num_tokens < 1 || p->num_outputs < 1 || p->num_inputs < 1) return 0;
    return lay_out(p, num_workers, &j, &num_bytes) == RT_OK ? num_bytes : 0;
}

static void pack_columns(const void *ctx, int64_t first, int64_t last) {
    const grad_job *j = ctx;
    j->kernels->weight_grad_pack(j->p, first, last, j->shared);
}

static void add_block(void *ctx, int64_t task, int64_t worker) {
    const grad_job *j = ctx;
    const int64_t first = task % j->column_blocks * BLOCK_COLUMNS, rest = j->p->num_inputs - first;
    j->kernels->weight_grad_add(j->p, task / j->column_blocks * RT_GRAD_ROWS, first,
                                first + (rest < BLOCK_COLUMNS ? rest : BLOCK_COLUMNS), j->shared,
                                j->scratch + worker * j->scratch_bytes);
}

rt_status rt_weight_grad_add(const rt_weight_grad_params *p, rt_parallel parallel) {
    grad_job j;
    int64_t num_bytes;
    rt_status status = check(p);
    if (status != RT_OK || adds_nothing(p)) return status;
    status = lay_out(p, rt_num_workers(parallel), &j, &num_bytes);
    if (status != RT_OK) return status;
    if (!rt_points_to(p->workspace, 64) || p->workspace_bytes < num_bytes) return RT_WORKSPACE;
    j.shared = p->workspace, j.scratch = j.shared + j.shared_bytes;
    rt_for_rows(parallel, p->num_inputs, PACK_COLUMNS, pack_columns, &j);
    rt_for_each(parallel, rt_num_tasks(p->num_outputs, RT_GRAD_ROWS) * j.column_blocks, add_block, &j);
    return RT_OK;
}
