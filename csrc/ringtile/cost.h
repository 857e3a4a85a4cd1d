// The cost of attention by a scheme, by a model of links and kernels.
#ifndef RINGTILE_API_COST_H
#define RINGTILE_API_COST_H

#include "base.h"

#ifdef __cplusplus
extern "C" {
#endif

// Between ranks that both send and receive.
typedef struct rt_link {
    double latency_s;        // of a message
    double bytes_per_s;      // each way, of a rank
    double host_bytes_per_s; // each way, of all ranks of a host together; within a host it does not count
    double overlap; // the share of a message's time in which kernels run: 0 if processors copy it, else up to 1
} rt_link;

// W ranks, of which each M neighbours share the heads of all their queries, in T stages; M divides W.
typedef struct rt_cost_params {
    int64_t num_ranks, group_size, num_stages;
    bool at_once;          // the keys of all ranks in one round; else group a works in round i on those of group a - i
    const int64_t *hosts;  // (W) in [0, W)
    const int64_t *tokens; // (W)
    const int64_t *keys;   // (W, W) [query rank][key rank]: the keys of key rank that query rank's group needs
    const int64_t *pairs;  // (W, W) the same: unmasked (query, key) pairs of a head, over the batch
    const int64_t *shares; // (T, M, 3) query heads, kv heads and kernel calls of a stage and a place in a group
    int64_t key_bytes, gradient_bytes;  // of a key and a kv head, over the batch; and of their gradients
    int64_t query_bytes, result_bytes;  // of a query and a head, in this pass
    double flops_per_pair, flops_per_s; // of this pass
    double call_s;                      // of a kernel call, besides its flops
    double message_s;                   // of a processor that posts a message and waits for it, at either end
    double copy_bytes_per_s;            // of what goes into messages and comes out of them
    rt_link within, between;            // of a host; host_bytes_per_s of the first is not used
} rt_cost_params;

typedef enum rt_cost_pass { RT_COST_FORWARD, RT_COST_BACKWARD } rt_cost_pass;
typedef enum rt_cost_kind {
    RT_COST_KERNEL,
    RT_COST_QUERIES,
    RT_COST_KEYS,
    RT_COST_GRADIENTS,
    RT_COST_RESULTS
} rt_cost_kind;

typedef struct rt_cost_event {
    int64_t kind, from, to, num_bytes; // of a kernel: both its rank, and 0 bytes
    double begin, end;                 // seconds
} rt_cost_event;

// Plays one pass: each rank's seconds, the bytes between each two ranks, and all messages and kernels in the order in
// which they were posted. The same binary gives the same bits for the same params.
//   seconds (W)    bytes (W, W) [from][to]    events (capacity), NULL if capacity is 0: then none is wanted
//   *num_events is the full count, even with RT_CAPACITY; workspace: rt_cost_workspace_bytes(W), 8-byte aligned
//   RT_BAD_POINTER, RT_BAD_SHAPE, RT_BAD_RANK (of a host), RT_BAD_KIND (of a pass), RT_BAD_RATE, RT_TOO_LARGE,
//   RT_CAPACITY, RT_WORKSPACE
int64_t rt_cost_workspace_bytes(int64_t num_ranks);
rt_status rt_cost(const rt_cost_params *p, rt_cost_pass pass, double *seconds, int64_t *bytes, rt_cost_event *events,
                  int64_t capacity, int64_t *num_events, void *workspace);

#ifdef __cplusplus
}
#endif

#endif // RINGTILE_API_COST_H
