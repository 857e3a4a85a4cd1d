#include "chunks.h"

#include "../arrays.h"

int64_t rt_scan_num_states(int64_t num_tokens) { return num_tokens > 0 ? (num_tokens - 1) / RT_CHUNK_TOKENS : 0; }

static bool rows_fit(int64_t batch, int64_t num_tokens, int64_t seq_idx_batch_stride, rt_chunk_rows *rows) {
    *rows = (rt_chunk_rows){.count = seq_idx_batch_stride == 0 ? batch > 0 : batch};
    const int64_t sizes[] = {rows->count, num_tokens, 32};
    if (!rt_array_fits(3, sizes, NULL, 1)) return false;
    rows->row_bytes = rt_round_up_64(sizeof(rt_chunks)) + rt_round_up_64(num_tokens * (int64_t)sizeof(int64_t)) +
                      rt_round_up_64((num_tokens + 1) * (int64_t)sizeof(rt_chunk));
    rows->num_bytes = rows->row_bytes;
    return rt_multiply_fits(&rows->num_bytes, rows->count);
}

rt_status rt_scan_space_of(int64_t batch, int64_t num_tokens, int64_t seq_idx_batch_stride, int64_t num_turns,
                           int64_t scratch_bytes, int64_t num_workers, rt_scan_space *space) {
    if (!rows_fit(batch, num_tokens, seq_idx_batch_stride, &space->rows) ||
        !rt_array_fits(1, &num_turns, NULL, sizeof(_Atomic int64_t)))
        return rt_wrong(RT_TOO_LARGE, "batch, num_heads, num_tokens, head_dim and v_head_dim");
    const int64_t before = space->rows.num_bytes + rt_round_up_64(num_turns * (int64_t)sizeof(_Atomic int64_t));
    space->num_turns = num_turns, space->scratch_bytes = rt_round_up_64(scratch_bytes);
    return rt_workspace_fits(before, space->scratch_bytes, num_workers, &space->num_bytes);
}

static void find_chunks(const int32_t *seq_idx, int64_t num_tokens, rt_chunks *c) {
    int64_t count = 0, in_chunk = 0, num_full = 0, before = RT_STATE_INITIAL;
    int32_t document = 0; // of the initial state
    c->num_chunks = 0;
    for (int64_t t = 0; t < num_tokens; t++) {
        if (seq_idx[t] < 0) continue;
        if (seq_idx[t] != document) before = RT_STATE_ZERO, in_chunk = 0, document = seq_idx[t];
        if (in_chunk == 0) c->chunks[c->num_chunks++] = (rt_chunk){count, before};
        c->tokens[count++] = t;
        // Full chunks that end a document take a number too: there are never more than rt_scan_num_states before a
        // token.
        if (++in_chunk == RT_CHUNK_TOKENS) in_chunk = 0, before = num_full++;
    }
    c->chunks[c->num_chunks] = (rt_chunk){count, RT_STATE_ZERO};
}

static void find_rows(rt_chunk_rows *rows, char *memory, const int32_t *seq_idx, int64_t num_tokens) {
    rows->memory = memory;
    for (int64_t row = 0; row < rows->count; row++, memory += rows->row_bytes) {
        rt_chunks *c = (rt_chunks *)(void *)memory;
        char *const tokens = memory + rt_round_up_64(sizeof(*c));
        c->tokens = (int64_t *)(void *)tokens;
        c->chunks = (rt_chunk *)(void *)(tokens + rt_round_up_64(num_tokens * (int64_t)sizeof(int64_t)));
        find_chunks(num_tokens > 0 ? seq_idx + row * num_tokens : NULL, num_tokens, c);
    }
}

rt_status rt_scan_space_open(rt_scan_space *space, void *workspace, int64_t workspace_bytes, const int32_t *seq_idx,
                             int64_t num_tokens) {
    if (!rt_points_to(workspace, 64) || workspace_bytes < space->num_bytes) return RT_WORKSPACE;
    find_rows(&space->rows, workspace, seq_idx, num_tokens);
    char *const turns = (char *)workspace + space->rows.num_bytes;
    space->turns = (_Atomic int64_t *)(void *)turns;
    space->scratch = turns + rt_round_up_64(space->num_turns * (int64_t)sizeof(_Atomic int64_t));
    for (int64_t i = 0; i < space->num_turns; i++) atomic_init(&space->turns[i], 0);
    return RT_OK;
}
