// Sequences sharded over ranks: runs and layouts, the copies of rows between tensors and messages, the plan (what one
// rank does in each round) and the digest that ranks compare.
#ifndef RINGTILE_API_SEQUENCE_H
#define RINGTILE_API_SEQUENCE_H

#include "base.h"

#ifdef __cplusplus
extern "C" {
#endif

// Local tokens local_begin .. local_begin + length - 1 hold the global positions
// global_begin, global_begin + stride, ...
typedef struct rt_run {
    int64_t global_begin, stride, local_begin, length;
} rt_run;

// Checks that every run is well formed, lies inside local_len local tokens, and shares no local token with another run.
// Positions that runs share are for rt_layout_check to find, once: to look for them takes time for each pair of runs
// that interleave.
//   RT_BAD_SHAPE, RT_BAD_POINTER, RT_BAD_RUN
rt_status rt_runs_check(const rt_run *runs, int64_t num_runs, int64_t local_len);

typedef struct rt_layout_place {
    int64_t position, run;
} rt_layout_place;

// Checks that the runs of W ranks hold each position of 0..S-1 exactly once, and fill each rank's local tokens. It
// takes time for the runs and for pairs of runs that interleave, or for the positions of those where they are fewer.
//   runs (R), rank after rank;  run_offsets (W + 1): rank r owns runs [run_offsets[r], run_offsets[r + 1])
//   places (R) scratch
//   RT_BAD_SHAPE, RT_BAD_POINTER, RT_BAD_RUN, RT_BAD_LAYOUT
rt_status rt_layout_check(const rt_run *runs, const int64_t *run_offsets, int64_t num_ranks, int64_t seq_len,
                          rt_layout_place *places);

// positions (local_len): the global position of each local token. RT_BAD_RUN also if a local token is in no run or in
// two.
rt_status rt_runs_positions(const rt_run *runs, int64_t num_runs, int64_t *positions, int64_t local_len);

// ---- rows: packed, unpacked and added ----------------------------------------------------------

// A tensor, and some of its rows in another one: a rank's tokens, or a part of a message. They differ only in the size
// of `dim`.
typedef struct rt_rows_tensor {
    int64_t ndim, dim;             // ndim in 1..16, dim in [0, ndim)
    int64_t element_bytes;         // any size >= 1
    const int64_t *sizes;          // (ndim) of local
    int64_t global_len;            // size of global in `dim`
    const int64_t *global_strides; // (ndim) elements
    const int64_t *local_strides;  // (ndim) elements
    void *global, *local;          // one of them is only read
} rt_rows_tensor;

enum { RT_MAX_ROWS_TENSORS = 32 };

typedef struct rt_rows_params {
    int64_t num_tensors; // at most RT_MAX_ROWS_TENSORS
    const rt_rows_tensor *tensors;
    int64_t num_runs;
    const rt_run *runs; // the same of each tensor
} rt_rows_params;

// Of each tensor and for every run: local[..., local_begin + j, ...] = global[..., global_begin + j * stride, ...];
// local tokens in no run keep their value.
//   RT_BAD_SHAPE, RT_BAD_POINTER, RT_BAD_DIM, RT_BAD_RUN, RT_BAD_STRIDE, RT_SHARED_MEMORY
rt_status rt_rows_pack(const rt_rows_params *p, rt_parallel parallel);
// The inverse: global[..., global_begin + j * stride, ...] = local[..., local_begin + j, ...]; positions in no run keep
// their value.
rt_status rt_rows_unpack(const rt_rows_params *p, rt_parallel parallel);
// The same, but adds to global.
//   RT_BAD_DTYPE   dtype, that of all tensors, is neither f32 nor f64
rt_status rt_rows_add(const rt_rows_params *p, rt_dtype dtype, rt_parallel parallel);

// ---- plan: what one rank does in each round -----------------------------------------------------

// The query at global position i of row b attends the keys at global positions [begin[b, i], end[b, i]); with two
// sides, those of them at j for which i is in [key_begin[b, j], key_end[b, j]). Bounds outside 0..S are clamped.
typedef struct rt_plan_params {
    int64_t num_ranks, seq_len, mask_batch;
    const rt_run *runs;                 // (R) rank after rank
    const int64_t *run_offsets;         // (W + 1)
    const int32_t *begin, *end;         // (mask_batch, S) contiguous
    const int32_t *key_begin, *key_end; // (mask_batch, S) contiguous; both NULL: one side
    void *workspace;                    // 64-byte aligned
    int64_t workspace_bytes;
} rt_plan_params;

// Bytes of workspace for p; 0 if it is malformed or too large.
int64_t rt_plan_workspace_bytes(const rt_plan_params *p);

typedef struct rt_round {
    int64_t num_keys;            // of the block
    int64_t num_pairs;           // unmasked (query, key) pairs, summed over the mask's rows
    int64_t first_run, num_runs; // positions of the keys; local_begin = row of the block
    int64_t in_place;            // 1: the block is the local k itself, and nothing travels
} rt_round;

// Keys of one rank that another one works on in a round.
typedef struct rt_transfer {
    int64_t rank; // the other one
    int64_t num_keys;
    int64_t first_run, num_runs; // global_begin = row of the block, or of the owner's k; local_begin = of the message
    int64_t is_head;             // 1: each row of the one is that of the other
} rt_transfer;

typedef struct rt_rank_plan {
    rt_round *rounds;      // (W), or (1) at once
    rt_transfer *incoming; // (W) of round i: the i-th, or all at once
    rt_transfer *outgoing; // (W)
    rt_run *runs;          // (capacity), may be NULL if that is 0
    int64_t capacity;
    int64_t num_runs; // written: the count; with RT_CAPACITY, how many are enough
} rt_rank_plan;

// What `rank` does in each round. Round i: it works on the keys of rank (rank - i) mod W; at once, on those of all
// ranks in one round. Only keys that a query attends travel. Runs are the fewest possible, in the local order of the
// owner; those of a block at once are in the order of their positions. A round in place has transfers of no key.
//   RT_BAD_SHAPE, RT_TOO_LARGE, RT_BAD_POINTER, RT_BAD_RUN, RT_BAD_LAYOUT (as rt_layout_check), RT_BAD_RANK,
//   RT_WORKSPACE, RT_CAPACITY (what the transfers and runs hold is not defined then)
// O(S + R W), and times log S with two sides. The workspace grows with the tokens of one rank, with two sides with S.
rt_status rt_plan_rank(const rt_plan_params *p, int64_t rank, bool at_once, rt_rank_plan *plan);

// keys, pairs (W, W), [query rank][key rank]: the keys of a rank that another attends, and the unmasked pairs, summed
// over the mask's rows. O(S + R W), with two sides O(W S log S).
rt_status rt_plan_counts(const rt_plan_params *p, int64_t *keys, int64_t *pairs);

// ---- a layout for a mask -------------------------------------------------------------------------

typedef struct rt_balance_params {
    int64_t num_ranks, seq_len, mask_batch; // S >= 1
    int64_t chunk;                          // tokens of each of the C chunks, of which the last may be shorter; C >= W
    const int32_t *begin, *end;             // (mask_batch, S) contiguous: as in rt_plan_params
    const int64_t *num_keys;                // (mask_batch, S): of each query, with two sides; NULL: end - begin
    void *workspace;                        // 64-byte aligned
    int64_t workspace_bytes;
} rt_balance_params;

// Bytes of workspace for p; 0 if it is malformed or too large.
int64_t rt_balance_workspace_bytes(const rt_balance_params *p);

// owner (C): the rank of each chunk, of which ranks get as many, give or take one. The work of the busiest rank ends
// within 3 % of the mean where chunks of that size allow it; of three layouts that do so (contiguous, zigzag, and one
// made for the mask) that is taken whose slowest rank computes, or receives keys, for the shortest time.
// loads (W): the unmasked pairs of each rank
//   RT_BAD_SHAPE, RT_TOO_LARGE, RT_BAD_POINTER, RT_WORKSPACE
// O(S + C log C log W); 40 bytes of workspace for a chunk.
rt_status rt_balance(const rt_balance_params *p, int64_t *owner, int64_t *loads);

// ---- the mask of a block as a few shapes ---------------------------------------------------------

// Query q_begin + t, t = 0 .. M - 1, attends rows k_begin .. k_end - 1 of the keys, but not the first t of them if it
// drops, and not the last M - 1 - t of them if it gains. drops, gains: 0 or 1
typedef struct rt_piece {
    int64_t q_begin, q_end, k_begin, k_end, drops, gains;
} rt_piece;

typedef struct rt_pieces_params {
    int64_t mask_batch, num_queries, num_keys; // B, N, K: rows of the block
    const int32_t *begin, *end;                // (B, N) of the queries
    const int32_t *key_begin, *key_end;        // (B, K) of the rows of the block; both NULL: one side
    const int64_t *positions;                  // (N) of the queries, with two sides
    const rt_run *k_runs;                      // (R) in the order of the rows
    int64_t num_k_runs;
    int64_t max_stretches; // of keys with equal bounds, in each row of the mask
    int32_t *bounds;       // (N, 2) scratch
} rt_pieces_params;

// The pieces of each row of a mask, which together hold each (query, key) that it lets attend once.
//   pieces (capacity), row after row;  counts (B)
//   RT_BAD_SHAPE, RT_TOO_LARGE, RT_BAD_POINTER, RT_BAD_RUN, RT_BAD_POSITIONS (the rows are not in the order of their
//   positions), RT_CAPACITY (more pieces, or more stretches)
// O(N log R) for each row, and with two sides O(N) for each stretch.
rt_status rt_pieces(const rt_pieces_params *p, rt_piece *pieces, int64_t capacity, int64_t *counts);

// ---- masks with two sides ----------------------------------------------------------------------

// Two sets of positions; each position has an interval of the other set's positions. x meets y if y lies in the
// interval of x and x in that of y: a query and a key, in either role.
typedef struct rt_meetings_params {
    int64_t seq_len, num_x, num_y;
    const int32_t *x, *y;           // (num_x), (num_y) rising; NULL: all of 0..S-1
    const int32_t *x_begin, *x_end; // (S) by position
    const int32_t *y_begin, *y_end; // (S)
    int64_t last;                   // of what each x meets, only the last so many; 0: all
} rt_meetings_params;

// Elements of scratch for so many positions; 0 if they are negative or too many.
int64_t rt_meetings_scratch_len(int64_t num_x, int64_t num_y);

// counts (num_x): how many y each x meets, at most `last`. first, after (num_x), both or none NULL: the smallest
// position that it meets, and the largest plus 1; 0 and 0 where it meets none.
//   scratch (rt_meetings_scratch_len)
//   RT_BAD_SHAPE (also last < 0), RT_BAD_POINTER, RT_BAD_POSITIONS (positions that do not rise, or are outside 0..S-1)
// O((num_x + num_y) log S).
rt_status rt_meetings(const rt_meetings_params *p, int64_t *counts, int32_t *first, int32_t *after, int32_t *scratch);

// 64-bit digest of a byte array, chained through seed; not cryptographic. Ranks compare digests of their masks and
// layouts before they exchange keys.
//   RT_BAD_SHAPE, RT_BAD_POINTER
rt_status rt_digest(const void *bytes, int64_t num_bytes, uint64_t seed, uint64_t *digest);

#ifdef __cplusplus
}
#endif

#endif // RINGTILE_API_SEQUENCE_H
