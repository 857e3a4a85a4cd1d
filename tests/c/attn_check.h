// Runs the kernels in workspaces of the exact size, and checks them against the f64 reference.
#ifndef RINGTILE_TESTS_ATTN_CHECK_H
#define RINGTILE_TESTS_ATTN_CHECK_H

#include "attn_bounds.h"
#include "attn_reference.h"

// Whether kernels run over the model of AMX, in which an instruction is a loop: they get fewer of the problems that the
// CPU's own instruction sets get.
static inline bool is_model(void) {
    rt_isa isa;
    return rt_cpu_isa(&isa) == RT_OK && isa == RT_ISA_AMX_BF16;
}

typedef enum pass { FORWARD, BACKWARD } pass;

static inline int64_t workspace_bytes(pass pass, const rt_attn_block *p, int64_t num_workers) {
    return pass == FORWARD ? rt_attn_fwd_workspace_bytes(p, num_workers) : rt_attn_bwd_workspace_bytes(p, num_workers);
}

static inline rt_status run(pass pass, const attn_case *c, rt_parallel parallel) {
    const rt_attn_fwd_params forward = forward_of(c);
    const rt_attn_bwd_params backward = backward_of(c);
    return pass == FORWARD ? rt_attn_fwd(&forward, parallel) : rt_attn_bwd(&backward, parallel);
}

static inline rt_status run_reference(pass pass, const attn_case *c) {
    const rt_attn_fwd_params forward = forward_of(c);
    const rt_attn_bwd_params backward = backward_of(c);
    return pass == FORWARD ? rt_attn_fwd_reference(&forward) : rt_attn_bwd_reference(&backward);
}

// The workspace has exactly the size asked for, so that the address sanitizer sees the first byte beyond it.
static inline void run_in_exact_workspace(pass pass, attn_case c, rt_parallel parallel, int byte) {
    c.p.workspace_bytes = workspace_bytes(pass, &c.p, parallel.num_workers);
    CHECK(c.p.workspace_bytes > 0 && c.p.workspace_bytes % 64 == 0);
    c.p.workspace = aligned_alloc(64, (size_t)c.p.workspace_bytes);
    if (c.p.workspace == NULL) exit(1);
    memset(c.p.workspace, byte, (size_t)c.p.workspace_bytes);
    CHECK_STATUS(run(pass, &c, parallel), RT_OK);
    free(c.p.workspace);
}

// What call `call` of num_calls does of the case: its share of the runs.
static inline attn_case part_of(const attn_case *c, int64_t call, int64_t num_calls) {
    const int64_t first = c->p.num_k_runs * call / num_calls, last = c->p.num_k_runs * (call + 1) / num_calls;
    attn_case part = *c;
    part.p.k_runs = c->runs + first, part.p.num_k_runs = last - first;
    part.fresh = c->fresh && call == 0;
    if (call + 1 < num_calls) part.rounded[OUT] = NULL;
    return part;
}

static inline void run_in_calls(pass pass, const attn_case *c, int64_t num_calls, rt_parallel parallel) {
    for (int64_t call = 0; call < num_calls; call++)
        run_in_exact_workspace(pass, part_of(c, call, num_calls), parallel, 0xff); // NaN, wherever it is read unwritten
}

// Numbers must be non-finite exactly where the reference's are; lse is -inf where a query attends no key.
static inline bool agrees(array_name name, double got, double want, double allowed) {
    if (isfinite(want)) return fabs(got - want) <= allowed;
    return !isfinite(got) && (name != LSE || (got == -INFINITY) == (want == -INFINITY));
}

static inline void check_array(array_name name, const attn_case *got, const attn_case *want, const attn_case *bounds) {
    static const char *const names[NUM_ARRAYS] = {[OUT] = "out", [LSE] = "lse", [DQ] = "dq", [DK] = "dk", [DV] = "dv"};
    FOR_EACH_ELEMENT(&want->x[name], b, token, head, d) {
        const double x = get(&got->x[name], b, token, head, d), y = get(&want->x[name], b, token, head, d);
        const double allowed = 2 * get(&bounds->x[name], b, token, head, d);
        if (check_failed(agrees(name, x, y, allowed)))
            printf("%s[%" PRId64 ", %" PRId64 ", %" PRId64 ", %" PRId64 "]: got %.17g, expected %.17g +- %.3g\n",
                   names[name], b, token, head, d, x, y, allowed);
    }
    CHECK(gaps_are_intact(&got->x[name]));
}

// Fills fresh outputs with NaN. The reference keeps their old values, and is told that they are not fresh.
static inline void poison_fresh(attn_case *c, attn_case *want, array_name first, array_name last) {
    for (int i = (int)first; i <= (int)last && c->fresh; i++) fill(&c->x[i], NAN);
    want->fresh = false;
}

// Forward, then backward from the forward's lse, its delta, and a gradient of lse.
static inline void check_case(attn_case *c, uint64_t *state, int64_t num_calls, rt_parallel parallel) {
    const double u = unit_roundoff(state_dtype(c->p.dtype));
    attn_case want = widen(c, state), bounds = widen(c, state);
    forward_bounds(&want, u, num_calls, &bounds);
    poison_fresh(c, &want, OUT, LSE);
    run_in_calls(FORWARD, c, num_calls, parallel);
    CHECK_STATUS(run_reference(FORWARD, &want), RT_OK);
    check_array(OUT, c, &want, &bounds);
    check_array(LSE, c, &want, &bounds);

    FOR_EACH_ELEMENT(&c->x[LSE], b, token, head, unit) {
        double delta = random_unit(state);
        for (int64_t d = 0; d < c->p.v_head_dim; d++)
            delta += get(&want.x[DOUT], b, token, head, d) * get(&want.x[OUT], b, token, head, d);
        set(&c->x[DELTA], b, token, head, unit, delta);
    }
    free_arrays(&want);
    if (c->fresh) num_calls = 1; // the runs of one call must hold every key
    for (int i = DK; i <= DV && c->fresh; i++) fill(&c->x[i], 0);
    want = widen(c, state);
    backward_bounds(&want, u, num_calls, &bounds);
    poison_fresh(c, &want, DK, DV);
    run_in_calls(BACKWARD, c, num_calls, parallel);
    CHECK_STATUS(run_reference(BACKWARD, &want), RT_OK);
    for (int i = DQ; i <= DV; i++) check_array((array_name)i, c, &want, &bounds);
    free_arrays(&want);
    free_arrays(&bounds);
}

// ---- rounded results ---------------------------------------------------------------------------------------

static inline size_t bytes_of(const tensor *x) { return (size_t)x->num_elements * dtype_bytes(x->dtype); }
static inline void *copy_bytes(const tensor *x) { return memcpy(must_alloc(bytes_of(x)), x->data, bytes_of(x)); }

static inline int64_t num_numbers(const tensor *x) { return x->size[0] * x->size[1] * x->size[2] * x->size[3]; }

// What a call rounds is what it leaves unrounded without, rounded once; all else has the same bits. run: the case in
// num_calls calls.
static inline void check_rounding(pass pass, attn_case *c, int64_t num_calls,
                                  void (*run)(enum pass pass, const attn_case *c, int64_t num_calls)) {
    const int first = pass == FORWARD ? OUT : DQ, last = pass == FORWARD ? LSE : DV;
    void *before[NUM_ARRAYS], *want[NUM_ARRAYS], **const rounded = c->rounded;
    for (int i = first; i <= last; i++) before[i] = copy_bytes(&c->x[i]);
    run(pass, c, num_calls);
    for (int i = first; i <= last; i++) {
        want[i] = c->x[i].data;
        c->x[i].data = before[i];
        if (i == LSE || i == DQ) continue;
        const size_t num_bytes = (size_t)num_numbers(&c->x[i]) * dtype_bytes(c->p.dtype);
        rounded[i] = memset(must_alloc(num_bytes), 0xff, num_bytes);
    }
    run(pass, c, num_calls);
    for (int i = first; i <= last; i++) {
        const tensor *const x = &c->x[i];
        if (rounded[i] == NULL) {
            CHECK(memcmp(x->data, want[i], bytes_of(x)) == 0);
        } else {
            int64_t at = 0;
            FOR_EACH_ELEMENT(x, b, token, head, d) {
                double once;
                store_element(c->p.dtype, &once, 0, load_element(x->dtype, want[i], row_of(x, b, token, head) + d));
                const double expected = load_element(c->p.dtype, &once, 0),
                             got = load_element(c->p.dtype, rounded[i], at++);
                if (check_failed(got == expected || (isnan(got) && isnan(expected))))
                    printf("rounded[%" PRId64 ", %" PRId64 ", %" PRId64 ", %" PRId64 "]: got %.17g, expected %.17g\n",
                           b, token, head, d, got, expected);
            }
        }
    }
    if (pass == FORWARD && c->fresh && num_calls == 1) { // the same bits without out
        const size_t num_bytes = (size_t)num_numbers(&c->x[OUT]) * dtype_bytes(c->p.dtype);
        attn_case without = *c;
        without.x[OUT].data = NULL, without.rounded[OUT] = memset(must_alloc(num_bytes), 0xff, num_bytes);
        run(pass, &without, 1);
        CHECK(memcmp(without.rounded[OUT], rounded[OUT], num_bytes) == 0);
        CHECK(memcmp(c->x[LSE].data, want[LSE], bytes_of(&c->x[LSE])) == 0);
        free(without.rounded[OUT]);
    }
    for (int i = first; i <= last; i++) free(want[i]), free(rounded[i]), rounded[i] = NULL;
}

#endif // RINGTILE_TESTS_ATTN_CHECK_H
