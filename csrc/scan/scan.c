// The recurrences' entry points: they check, find the chunks of every row, and hand heads to the workers.
#include "scan.h"

#include "../arrays.h"
#include "../dtype.h"
#include "../isa/kernels.h"
#include "../parallel.h"
#include "chunks.h"

int64_t rt_scan_num_states(int64_t num_tokens) {
    return num_tokens > 0 ? (num_tokens - 1) / RT_CHUNK_TOKENS : 0;
}

static int64_t round_up_64(int64_t bytes) { return (bytes + 63) / 64 * 64; }

static void find_chunks(const uint8_t *resets, int64_t num_tokens, rt_chunks *c) {
    int64_t count = 0, in_chunk = 0, num_full = 0, before = RT_STATE_INITIAL;
    c->num_chunks = 0, c->ends_empty = false;
    for (int64_t t = 0; t < num_tokens; t++) {
        if (resets[t] & RT_DOCUMENT_BEGIN) before = RT_STATE_ZERO, in_chunk = 0, c->ends_empty = true;
        if (resets[t] & RT_PADDING) continue;
        c->ends_empty = false;
        if (in_chunk == 0) c->chunks[c->num_chunks++] = (rt_chunk){count, before};
        c->tokens[count++] = t;
        // Full chunks that end a document take a number too: there are never more than rt_scan_num_states before a token.
        if (++in_chunk == RT_CHUNK_TOKENS) in_chunk = 0, before = num_full++;
    }
    c->chunks[c->num_chunks] = (rt_chunk){count, RT_STATE_ZERO};
}

// ---- workspace: the chunks of each row, the turns of each head, the scratch of each worker -------------------------

typedef struct layout {
    int64_t num_rows, row_bytes, turn_bytes, scratch_bytes, total;
} layout;

static rt_status lay_out(const rt_scan_params *p, const rt_kernels *kernels, bool backward,
                         int64_t num_workers, layout *at) {
    at->num_rows = p->resets_batch_stride == 0 ? p->batch > 0 : p->batch;
    const int64_t of_tokens[] = {at->num_rows, p->num_tokens, 32}, of_heads[] = {p->batch, p->num_heads, 8};
    if (!rt_array_fits(3, of_tokens, NULL, 1) || !rt_array_fits(3, of_heads, NULL, 1)) return RT_TOO_LARGE;
    at->row_bytes = round_up_64(p->num_tokens * (int64_t)sizeof(int64_t)) +
                    round_up_64((p->num_tokens + 1) * (int64_t)sizeof(rt_chunk)) +
                    round_up_64(sizeof(rt_chunks));
    at->turn_bytes = round_up_64(p->batch * p->num_heads * (int64_t)sizeof(_Atomic int64_t));
    at->scratch_bytes = round_up_64(kernels->scan_scratch_bytes(p, backward));
    int64_t rows = at->row_bytes, scratch = at->scratch_bytes;
    if (!rt_multiply_fits(&rows, at->num_rows) || !rt_multiply_fits(&scratch, num_workers))
        return RT_TOO_LARGE;
    if (scratch > RT_MAX_BYTES - rows - at->turn_bytes) return RT_TOO_LARGE;
    at->total = rows + at->turn_bytes + scratch;
    return RT_OK;
}

static int64_t workspace_bytes(const rt_scan_params *p, bool backward, int64_t num_workers) {
    const rt_kernels *kernels;
    layout at;
    if (num_workers < 1 || rt_scan_check(p, backward) != RT_OK || rt_kernels_for(p->dtype, &kernels) != RT_OK)
        return 0;
    return lay_out(p, kernels, backward, num_workers, &at) == RT_OK ? at.total : 0;
}

int64_t rt_scan_fwd_workspace_bytes(const rt_scan_params *p, int64_t num_workers) {
    return workspace_bytes(p, false, num_workers);
}

int64_t rt_scan_bwd_workspace_bytes(const rt_scan_params *p, int64_t num_workers) {
    return workspace_bytes(p, true, num_workers);
}

// The chunks of a row; memory: its part of the workspace.
static rt_chunks *chunks_at(int64_t num_tokens, char *memory) {
    rt_chunks *c = (rt_chunks *)(void *)memory;
    memory += round_up_64(sizeof(*c));
    c->tokens = (int64_t *)(void *)memory;
    c->chunks = (rt_chunk *)(void *)(memory + round_up_64(num_tokens * (int64_t)sizeof(int64_t)));
    return c;
}

// ---- tasks -----------------------------------------------------------------------------------------------------------

typedef struct job {
    const rt_scan_params *p;
    const rt_kernels *kernels;
    layout at;
    char *rows, *scratch;
    _Atomic int64_t *turns; // (B, H)
} job;

// Tasks of the heads that share q and k are as far apart as can be, so that they seldom wait for each other.
static void run_task(const job *j, bool backward, int64_t task, int64_t worker) {
    const rt_scan_params *p = j->p;
    const int64_t pairs = p->batch * p->num_kv_heads, group = p->num_heads / p->num_kv_heads;
    const int64_t pair = task % pairs, batch = pair / p->num_kv_heads,
                  head = pair % p->num_kv_heads * group + task / pairs;
    const rt_chunks *chunks =
        (const rt_chunks *)(void *)(j->rows + (j->at.num_rows > 1 ? batch : 0) * j->at.row_bytes);
    char *scratch = j->scratch + worker * j->at.scratch_bytes;
    if (!backward) {
        j->kernels->scan_forward(p, chunks, batch, head, scratch);
        return;
    }
    _Atomic int64_t *own = j->turns + batch * p->num_heads + head;
    const rt_scan_turn turn = {head % group == 0 ? NULL : own - 1, own};
    j->kernels->scan_backward(p, chunks, batch, head, &turn, scratch);
}

static void forward_task(void *ctx, int64_t task, int64_t worker) { run_task(ctx, false, task, worker); }
static void backward_task(void *ctx, int64_t task, int64_t worker) { run_task(ctx, true, task, worker); }

static rt_status run_scan(const rt_scan_params *p, bool backward, rt_parallel parallel) {
    job j = {.p = p};
    rt_status status = rt_scan_check(p, backward);
    if (status == RT_OK) status = rt_kernels_for(p->dtype, &j.kernels);
    if (status == RT_OK) status = lay_out(p, j.kernels, backward, rt_num_workers(parallel), &j.at);
    if (status != RT_OK) return status;
    if (p->workspace == NULL || (uintptr_t)p->workspace % 64 != 0 || p->workspace_bytes < j.at.total)
        return RT_WORKSPACE;
    j.rows = p->workspace;
    j.turns = (_Atomic int64_t *)(void *)(j.rows + j.at.num_rows * j.at.row_bytes);
    j.scratch = (char *)j.turns + j.at.turn_bytes;
    for (int64_t row = 0; row < j.at.num_rows; row++)
        find_chunks(p->resets + row * p->resets_batch_stride, p->num_tokens,
                    chunks_at(p->num_tokens, j.rows + row * j.at.row_bytes));
    for (int64_t i = 0; i < p->batch * p->num_heads; i++) atomic_init(&j.turns[i], 0);
    rt_for_each(parallel, p->batch * p->num_heads, backward ? backward_task : forward_task, &j);
    return RT_OK;
}

rt_status rt_scan_fwd(const rt_scan_params *p, rt_parallel parallel) { return run_scan(p, false, parallel); }
rt_status rt_scan_bwd(const rt_scan_params *p, rt_parallel parallel) { return run_scan(p, true, parallel); }
