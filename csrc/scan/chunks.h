// How a recurrence walks the tokens of a row: in chunks of up to RT_CHUNK_TOKENS tokens of one document, without padding.
// Documents never share a chunk, so nothing of one can reach another, and no arithmetic has to mask it.
#ifndef RINGTILE_SCAN_CHUNKS_H
#define RINGTILE_SCAN_CHUNKS_H

#include "../ringtile.h"

#include <stdatomic.h>

enum { RT_CHUNK_TOKENS = 64 };

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
    bool ends_empty;  // a document begins after the last token: the final state is 0
} rt_chunks;

// The heads that share q and k add to dq and dk in their order: each waits until the one before has passed a chunk.
typedef struct rt_scan_turn {
    _Atomic int64_t *before; // how many chunks the head before has passed; NULL for the first, which writes
    _Atomic int64_t *own;
} rt_scan_turn;

#endif // RINGTILE_SCAN_CHUNKS_H
