// How a recurrence walks the tokens of a row: in chunks of up to RT_CHUNK_TOKENS tokens of one document, without
// padding. Documents never share a chunk, so nothing of one can reach another, and no arithmetic has to mask it.
#ifndef RINGTILE_SCAN_CHUNKS_H
#define RINGTILE_SCAN_CHUNKS_H

#include "../ringtile.h"

#include <stdatomic.h>

// The state before a chunk: 0, the row's initial state, or (>= 0) one that the forward keeps.
enum { RT_STATE_ZERO = -2, RT_STATE_INITIAL = -1 };

typedef struct rt_chunk {
    int64_t first; // its first token, as an index into tokens; the next chunk's first is its end
    int64_t state;
} rt_chunk;

typedef struct rt_chunks {
    int64_t num_chunks;
    int64_t *tokens;  // (N) those that are not padding
    rt_chunk *chunks; // (N + 1) the last one is the end
} rt_chunks;

// The chunks of every row of a batch; one row if they share their seq_idx.
typedef struct rt_chunk_rows {
    int64_t count, row_bytes, num_bytes; // num_bytes: of all
    char *memory;
} rt_chunk_rows;

static inline const rt_chunks *rt_chunks_of(const rt_chunk_rows *rows, int64_t batch) {
    return (const rt_chunks *)(void *)(rows->memory + (rows->count > 1 ? batch : 0) * rows->row_bytes);
}

// The workspace of a scan: the chunks of each row, the turns of those that add to the same gradients, the scratch of
// each worker.
typedef struct rt_scan_space {
    rt_chunk_rows rows;
    int64_t num_turns, scratch_bytes, num_bytes; // scratch_bytes: of a worker; num_bytes: of all
    _Atomic int64_t *turns;
    char *scratch;
} rt_scan_space;

// Counts the bytes, of params that pass.    RT_TOO_LARGE
rt_status rt_scan_space_of(int64_t batch, int64_t num_tokens, int64_t seq_idx_batch_stride, int64_t num_turns,
                           int64_t scratch_bytes, int64_t num_workers, rt_scan_space *space);
// Finds the chunks, and sets all turns to 0. RT_WORKSPACE: the workspace is none, too small, or not 64-byte aligned.
rt_status rt_scan_space_open(rt_scan_space *space, void *workspace, int64_t workspace_bytes, const int32_t *seq_idx,
                             int64_t num_tokens);

// The heads that share q and k add to dq and dk in their order: each waits until the one before has passed a chunk.
typedef struct rt_scan_turn {
    _Atomic int64_t *before; // how many chunks the head before has passed; NULL for the first, which writes
    _Atomic int64_t *own;
} rt_scan_turn;

#endif // RINGTILE_SCAN_CHUNKS_H
