// The functions on rows of a matrix: the gated MLP, cross entropy and the weight gradient.
#include "fuzz.h"

// ---- gated MLP ---------------------------------------------------------------------------------------------

typedef struct glu_call {
    rt_glu_params p;
    void *gate, *up, *prod;
    bool backward;
} glu_call;

static rt_status call_glu(void *call, const arrays *all, rt_parallel parallel) {
    const glu_call *c = call;
    const rt_glu_params *p = all->no_params ? NULL : &c->p;
    return (c->backward ? rt_glu_bwd(p, c->gate, c->up, c->prod, parallel)
                        : rt_glu_fwd(p, c->gate, c->up, c->prod, parallel));
}

// Rows, columns, strides. Their product wrapped, or the reach of a stride did.
static const int64_t glu_corpus[][3] = {
    {INT64_MAX, INT64_MAX, INT64_MAX},
    {1LL << 32, 1LL << 32, 1LL << 32},
    {3, 5, 1LL << 62},
    {3, 5, INT64_MIN},
    {INT64_MAX, 1, 1},
    {1, INT64_MAX, INT64_MAX},
    {0, INT64_MAX, INT64_MAX},
    {1LL << 62, 0, 0},
};
enum { GLU_CORPUS = sizeof(glu_corpus) / sizeof(glu_corpus[0]) };

static void try_glu(uint64_t *state, int64_t entry) {
    glu_call c = {.p = {.dtype = all_dtypes[random_int(state, 0, 3)],
                        .kind = (rt_glu_kind)random_int(state, 0, 3),
                        .num_rows = random_int(state, 0, 9),
                        .num_cols = random_int(state, 0, 40)},
                  .backward = random_int(state, 0, 1)};
    rt_glu_params *p = &c.p;
    if (random_int(state, 0, 9) == 0) p->num_cols = random_int(state, 500, 1100);
    int64_t *const fields[] = {&p->num_rows, &p->num_cols, &p->gate_stride, &p->up_stride, &p->prod_stride};
    for (int i = 2; i < 5; i++) *fields[i] = p->num_cols + random_int(state, 0, 1) * random_int(state, 0, 4);
    rt_parallel parallel = {.run = run_in_turn, .num_workers = random_int(state, 1, 3)};
    arrays all = no_arrays();
    verdict expected = UNKNOWN;
    if (entry >= 0)
        for (int i = 0; i < 5; i++) *fields[i] = glu_corpus[entry][i < 2 ? i : 2];
    else
        expected = spoil(state, &all, &p->dtype, fields, 5, NULL, 0, &parallel);
    if (random_int(state, 0, 9) == 0) p->kind = (rt_glu_kind)random_int(state, -1, 5);
    const int64_t sizes[] = {p->num_rows, p->num_cols};
    add(&all, c.backward, p->dtype, &c.gate, 2, sizes, &p->gate_stride);
    add(&all, c.backward, p->dtype, &c.up, 2, sizes, &p->up_stride);
    add(&all, true, p->dtype, &c.prod, 2, sizes, &p->prod_stride);
    if (make(&all, state, (int)p->kind < 0 || p->kind > RT_GLU_RELU, &expected))
        try_call(state, c.backward ? "rt_glu_bwd" : "rt_glu_fwd", &all, &c, call_glu, expected, parallel);
}

// ---- cross entropy -----------------------------------------------------------------------------------------

typedef struct loss_call {
    rt_cross_entropy_params p;
    void *logits, *loss, *lse;
    const int64_t *labels;
} loss_call;

static rt_status call_loss(void *call, const arrays *all, rt_parallel parallel) {
    const loss_call *c = call;
    return rt_cross_entropy_fwd_bwd(all->no_params ? NULL : &c->p, c->logits, c->labels, c->loss, c->lse, parallel);
}

static const int64_t loss_corpus[][3] = {
    // tokens, vocabulary, stride
    {INT64_MAX, INT64_MAX, INT64_MAX},
    {1LL << 32, 1LL << 32, 1LL << 32},
    {3, 7, 1LL << 62},
    {3, 7, INT64_MIN},
    {INT64_MAX, 1, 0},
    {1, INT64_MAX, 0},
    {0, INT64_MAX, INT64_MAX},
};
enum { LOSS_CORPUS = sizeof(loss_corpus) / sizeof(loss_corpus[0]) };

static void try_loss(uint64_t *state, int64_t entry) {
    loss_call c = {.p = {.dtype = all_dtypes[random_int(state, 0, 3)],
                         .num_tokens = random_int(state, 0, 6),
                         .vocab_size = random_int(state, 1, random_int(state, 0, 9) ? 40 : 1100),
                         .ignore_index = random_int(state, 0, 1) ? -100 : 0,
                         .label_smoothing = random_int(state, 0, 1) ? 0 : 0.25,
                         .softcap = random_int(state, 0, 1) ? 0 : 3,
                         .z_loss = random_int(state, 0, 1) ? 0 : 0.125,
                         .want_grad = random_int(state, 0, 1)}};
    rt_cross_entropy_params *p = &c.p;
    p->logits_stride = p->vocab_size + random_int(state, 0, 1) * random_int(state, 0, 4);
    int64_t *const fields[] = {&p->num_tokens, &p->vocab_size, &p->logits_stride, &p->ignore_index};
    double *const reals[] = {&p->label_smoothing, &p->softcap, &p->z_loss};
    rt_parallel parallel = {.run = run_in_turn, .num_workers = random_int(state, 1, 3)};
    arrays all = no_arrays();
    verdict expected = UNKNOWN;
    if (entry >= 0)
        for (int i = 0; i < 3; i++) *fields[i] = loss_corpus[entry][i];
    else
        expected = spoil(state, &all, &p->dtype, fields, 4, reals, 3, &parallel);
    const int64_t sizes[] = {p->num_tokens, p->vocab_size};
    const rt_dtype sums = p->dtype == RT_F64 ? RT_F64 : RT_F32;
    add(&all, p->want_grad, p->dtype, &c.logits, 2, sizes, &p->logits_stride);
    const block *labels = add(&all, false, RT_F64, &c.labels, 1, sizes, NULL); // of 8 bytes, too
    add(&all, true, sums, &c.loss, 1, sizes, NULL), add(&all, true, sums, &c.lse, 1, sizes, NULL);
    const bool numbers = p->label_smoothing >= 0 && p->label_smoothing <= 1 && is_softcap(p->dtype, p->softcap) &&
                         p->z_loss >= 0 && is_real(p->dtype, p->z_loss);
    if (!make(&all, state, p->vocab_size < 1 || !numbers, &expected)) return;
    const bool spoil_label = random_int(state, 0, 9) == 0;
    for (int64_t t = 0; t < (int64_t)labels->num_bytes / 8; t++) {
        int64_t *label = (int64_t *)(void *)labels->memory + t;
        *label =
            p->vocab_size > 0 && random_int(state, 0, 3) ? random_int(state, 0, p->vocab_size - 1) : p->ignore_index;
        if (spoil_label && random_int(state, 0, 1)) *label = hostile(state, *label);
        if ((*label < 0 || *label >= p->vocab_size) && *label != p->ignore_index) expected = FORBIDDEN;
    }
    try_call(state, "rt_cross_entropy_fwd_bwd", &all, &c, call_loss, expected, parallel);
}

// ---- weight gradient ---------------------------------------------------------------------------------------

static rt_status call_weight_grad(void *call, const arrays *all, rt_parallel parallel) {
    rt_weight_grad_params p = *(const rt_weight_grad_params *)call;
    p.workspace_bytes = rt_weight_grad_workspace_bytes(&p, workers_of(parallel));
    void *const workspace = p.workspace = give_workspace(&p.workspace_bytes, all);
    const rt_status status = rt_weight_grad_add(all->no_params ? NULL : &p, parallel);
    free(workspace);
    return status;
}

static void try_weight_grad(uint64_t *state) {
    rt_weight_grad_params p = {.dtype = all_dtypes[random_int(state, 0, 3)],
                               .num_tokens = random_int(state, 0, 40),
                               .num_outputs = random_int(state, 0, 20),
                               .num_inputs = random_int(state, 0, random_int(state, 0, 9) ? 40 : 400)};
    p.dout_stride = p.num_outputs + random_int(state, 0, 3), p.x_stride = p.num_inputs + random_int(state, 0, 3);
    p.sum_stride = p.num_inputs + random_int(state, 0, 3);
    int64_t *const fields[] = {&p.num_tokens,  &p.num_outputs, &p.num_inputs,
                               &p.dout_stride, &p.x_stride,    &p.sum_stride};
    rt_parallel parallel = {.run = run_in_turn, .num_workers = random_int(state, 1, 3)};
    arrays all = no_arrays();
    verdict expected = spoil(state, &all, &p.dtype, fields, 6, NULL, 0, &parallel);
    const int64_t of_dout[] = {p.num_tokens, p.num_outputs}, of_x[] = {p.num_tokens, p.num_inputs},
                  of_sum[] = {p.num_outputs, p.num_inputs};
    add(&all, false, p.dtype, &p.dout, 2, of_dout, &p.dout_stride);
    add(&all, false, p.dtype, &p.x, 2, of_x, &p.x_stride);
    add(&all, true, p.dtype == RT_F64 ? RT_F64 : RT_F32, &p.sum, 2, of_sum, &p.sum_stride);
    const bool adds = p.num_tokens > 0 && p.num_outputs > 0 && p.num_inputs > 0;
    if (make(&all, state, all.small_workspace && adds, &expected))
        try_call(state, "rt_weight_grad_add", &all, &p, call_weight_grad, expected, parallel);
}

static void trial(uint64_t *state, int64_t entry) {
    if (entry >= GLU_CORPUS)
        try_loss(state, entry - GLU_CORPUS);
    else if (entry >= 0)
        try_glu(state, entry);
    else if (trial_number % 3 == 0)
        try_weight_grad(state);
    else if (trial_number % 3 == 1)
        try_glu(state, -1);
    else
        try_loss(state, -1);
}

int main(int argc, char **argv) { return fuzz_main(argc, argv, 9000, GLU_CORPUS + LOSS_CORPUS, trial); }
