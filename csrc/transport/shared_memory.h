// Messages between ranks of one host, through shared memory.
//
// Every rank owns a segment, which its peers map too. It holds a ring of chunks per sender: the sender copies a message
// in, chunk by chunk, while the receiver copies it out, so a segment is no larger for larger messages. A rank that
// finds nothing to copy sleeps until a byte arrives on one of its sockets, which are connected to the same peers. A
// socket shows at once that the peer has died, and nothing of a segment outlives the processes that map it.
//
//     sender   post: copies what fits     wait, or the progress thread: copies the rest as chunks become free
//     receiver post                       wait, or the progress thread: copies out
//
// A message that finds room in the ring is copied by the two callers alone. For others a progress thread, started by
// the first of them, copies while the caller computes; it stands back while the caller waits.
#ifndef RINGTILE_TRANSPORT_SHARED_MEMORY_H
#define RINGTILE_TRANSPORT_SHARED_MEMORY_H

#include "../ringtile.h"

#ifdef __cplusplus
extern "C" {
#endif

// A chunk should stay in the caches of both cores from copy to copy.
enum { RT_SHM_CHUNK_BYTES = 256 << 10, RT_SHM_NUM_CHUNKS = 8 };

// The size of a rank's segment, all zero at first.
int64_t rt_shm_segment_bytes(int64_t num_ranks);

// Maps a file of rt_shm_segment_bytes bytes; NULL if the system refuses. Forked processes do not inherit the mapping.
void *rt_shm_map(int file, int64_t num_ranks);
void rt_shm_unmap(void *segment, int64_t num_ranks);

typedef enum rt_shm_state {
    RT_SHM_PENDING,
    RT_SHM_DONE, // received; or sent: the caller may overwrite the data, which the peer may not have received yet
    RT_SHM_LOST, // the peer has closed its socket or broken its ring, or this rank has closed or dropped the message
} rt_shm_state;

// One message, to or from a peer. The caller keeps it and its data until it is not pending.
typedef struct rt_shm_message {
    void *data;
    int64_t num_bytes; // at least 1
    uint64_t tag;      // a receive skips messages with a smaller tag, and leaves those with a larger one
    int64_t peer;
    bool outgoing;
    rt_shm_state state; // written by the functions here
    struct {
        int64_t moved; // bytes
        bool in_background;
        struct rt_shm_message *next;
    } internal; // neither read nor written by the caller
} rt_shm_message;

typedef struct rt_shm rt_shm; // one rank's end

int64_t rt_shm_bytes(int64_t num_ranks);

// Makes the end of a rank in rt_shm_bytes bytes of the caller, aligned as malloc does.
//   segments (num_ranks) mapped; sockets (num_ranks) stream sockets, not blocking. NULL and -1 for ranks that share no
//   memory with this one; of the rank itself, the segment alone.
//   RT_BAD_POINTER, RT_BAD_SHAPE; RT_CAPACITY: no file descriptors are left
rt_status rt_shm_open(rt_shm *shm, int64_t rank, int64_t num_ranks, void *const *segments, const int *sockets);

// Queues a message and returns at once. Messages between two ranks arrive in the order in which they were posted.
void rt_shm_post(rt_shm *shm, rt_shm_message *message);

// Moves messages until this one is not pending, at most so long, and returns its state. Returns early, with
// RT_SHM_PENDING, where a signal has arrived.
rt_shm_state rt_shm_wait(rt_shm *shm, rt_shm_message *message, int64_t milliseconds);

// Drops all messages that are pending, or one. Whatever has been sent of it, its receiver skips.
void rt_shm_drop(rt_shm *shm, rt_shm_message *message_or_null);

// Ends the progress thread and drops all messages. Neither segments nor sockets are touched any more, and all later
// messages are lost. Does nothing in a forked process.
void rt_shm_close(rt_shm *shm);

#ifdef __cplusplus
}
#endif

#endif // RINGTILE_TRANSPORT_SHARED_MEMORY_H
