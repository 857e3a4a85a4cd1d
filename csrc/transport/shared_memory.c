#define _GNU_SOURCE // MADV_DONTFORK
#include "shared_memory.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { CHUNK = RT_SHM_CHUNK_BYTES, NUM_CHUNKS = RT_SHM_NUM_CHUNKS, NUM_SPINS = 50 };

// ---- shared between processes ------------------------------------------------------------------------------

// Whatever a peer writes may change at any time: each value is read once, checked, and used as it was read.
typedef struct chunk_header {
    _Atomic uint64_t tag;
    _Atomic int64_t num_bytes;
} chunk_header;

// One writer and one reader. Chunk i lies in place i mod NUM_CHUNKS, from when it is filled until it is emptied.
typedef struct ring {
    _Alignas(64) _Atomic uint64_t num_filled;  // by the sender
    _Alignas(64) _Atomic uint64_t num_emptied; // by the receiver
    _Alignas(64) chunk_header headers[NUM_CHUNKS];
    _Alignas(4096) char chunks[NUM_CHUNKS][CHUNK];
} ring;

typedef struct segment {
    _Alignas(64) _Atomic uint32_t is_asleep; // the owner wants a byte when something changes
    _Alignas(4096) ring rings[];             // by sender
} segment;

int64_t rt_shm_segment_bytes(int64_t num_ranks) {
    return (int64_t)(sizeof(segment) + (size_t)num_ranks * sizeof(ring));
}

void *rt_shm_map(int file, int64_t num_ranks) {
    const size_t num_bytes = (size_t)rt_shm_segment_bytes(num_ranks);
    void *memory = mmap(NULL, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (memory == MAP_FAILED) return NULL;
#ifdef MADV_DONTFORK
    madvise(memory, num_bytes, MADV_DONTFORK);
#endif
    return memory;
}

void rt_shm_unmap(void *memory, int64_t num_ranks) { munmap(memory, (size_t)rt_shm_segment_bytes(num_ranks)); }

// ---- one rank's end ----------------------------------------------------------------------------------------

typedef struct queue {
    rt_shm_message *first, *last;
} queue;

typedef struct peer {
    segment *segment; // NULL: shares no memory with this rank
    ring *out, *in;
    // Own counts are kept here and never read back, so a peer cannot change them.
    uint64_t num_filled, num_emptied;
    int socket; // -1: closed
    queue sends, receives;
} peer;

struct rt_shm {
    int64_t rank, num_ranks;
    segment *own;
    pid_t process;
    bool is_closed;
    pthread_mutex_t lock;      // of all that is not shared; held while copying, not while sleeping
    _Atomic int num_waiting;   // callers in rt_shm_wait
    int64_t num_in_background; // pending messages that the progress thread moves
    pthread_t progress_thread;
    bool has_progress_thread;
    int wake_event; // an eventfd of the progress thread
    // By rank; after them, num_ranks + 1 struct pollfd for the caller, and as many for the progress thread.
    peer peers[];
};

int64_t rt_shm_bytes(int64_t num_ranks) {
    return (int64_t)(sizeof(rt_shm) + (size_t)num_ranks * sizeof(peer) +
                     2 * (size_t)(num_ranks + 1) * sizeof(struct pollfd));
}

static struct pollfd *poll_set(rt_shm *shm, bool of_progress_thread) {
    struct pollfd *sets = (struct pollfd *)&shm->peers[shm->num_ranks];
    return of_progress_thread ? sets + shm->num_ranks + 1 : sets;
}

rt_status rt_shm_open(rt_shm *shm, int64_t rank, int64_t num_ranks, void *const *segments, const int *sockets) {
    if (shm == NULL || segments == NULL || sockets == NULL) return RT_BAD_POINTER;
    if (rank < 0 || rank >= num_ranks) return RT_BAD_SHAPE;
    if (segments[rank] == NULL) return RT_BAD_POINTER;
    memset(shm, 0, (size_t)rt_shm_bytes(num_ranks));
    shm->rank = rank, shm->num_ranks = num_ranks, shm->own = segments[rank], shm->process = getpid();
    for (int64_t r = 0; r < num_ranks; r++) {
        peer *p = &shm->peers[r];
        p->socket = r == rank || segments[r] == NULL ? -1 : sockets[r];
        if (p->socket < 0) continue;
        p->segment = segments[r];
        p->out = &p->segment->rings[rank], p->in = &shm->own->rings[r];
    }
    shm->wake_event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (shm->wake_event < 0) return RT_CAPACITY;
    pthread_mutex_init(&shm->lock, NULL);
    return RT_OK;
}

// ---- queues (all below: the lock is held) ------------------------------------------------------------------

static queue *queue_of(rt_shm *shm, const rt_shm_message *m) {
    peer *p = &shm->peers[m->peer];
    return m->outgoing ? &p->sends : &p->receives;
}

static void finish(rt_shm *shm, rt_shm_message *m, rt_shm_state state) {
    queue *q = queue_of(shm, m);
    rt_shm_message *previous = NULL, *each = q->first;
    while (each != m) previous = each, each = each->internal.next;
    if (previous == NULL)
        q->first = m->internal.next;
    else
        previous->internal.next = m->internal.next;
    if (q->last == m) q->last = previous;
    shm->num_in_background -= m->internal.in_background;
    m->state = state;
}

static void drop_all(rt_shm *shm, peer *p) {
    while (p->sends.first != NULL) finish(shm, p->sends.first, RT_SHM_LOST);
    while (p->receives.first != NULL) finish(shm, p->receives.first, RT_SHM_LOST);
}

// Drops the messages of closed peers, whose rings are empty; true: there were some.
static bool fail_closed_peers(rt_shm *shm) {
    bool lost = false;
    for (peer *p = shm->peers; p < shm->peers + shm->num_ranks; p++) {
        if (p->segment == NULL || p->socket >= 0) continue;
        lost |= p->sends.first != NULL || p->receives.first != NULL;
        drop_all(shm, p);
    }
    return lost;
}

// ---- copying -----------------------------------------------------------------------------------------------

// After a change of a ring. The change and the flag are sequentially consistent, as are the flag and the look at the
// rings of a rank that falls asleep: one of the two sees the other.
static void wake(peer *p) {
    if (atomic_load(&p->segment->is_asleep) == 0 || atomic_exchange(&p->segment->is_asleep, 0) == 0) return;
    if (p->socket >= 0) (void)send(p->socket, "", 1, MSG_DONTWAIT | MSG_NOSIGNAL);
}

// A ring whose counts or sizes cannot be right is no ring of ours: its peer counts as lost.
static bool is_broken(peer *p, bool broken) {
    if (broken) p->socket = -1;
    return broken;
}

// Copies the next chunk to a peer; false: there is none, or no place for it.
static bool push(rt_shm *shm, peer *p) {
    rt_shm_message *m = p->sends.first;
    if (m == NULL) return false;
    const uint64_t num_used = p->num_filled - atomic_load_explicit(&p->out->num_emptied, memory_order_acquire);
    if (is_broken(p, num_used > NUM_CHUNKS) || num_used == NUM_CHUNKS) return false;
    const uint64_t place = p->num_filled % NUM_CHUNKS;
    const int64_t left = m->num_bytes - m->internal.moved, num_bytes = left < CHUNK ? left : CHUNK;
    atomic_store_explicit(&p->out->headers[place].tag, m->tag, memory_order_relaxed);
    atomic_store_explicit(&p->out->headers[place].num_bytes, num_bytes, memory_order_relaxed);
    memcpy(p->out->chunks[place], (const char *)m->data + m->internal.moved, (size_t)num_bytes);
    atomic_store(&p->out->num_filled, ++p->num_filled);
    wake(p);
    m->internal.moved += num_bytes;
    if (m->internal.moved == m->num_bytes) finish(shm, m, RT_SHM_DONE);
    return true;
}

// Copies the next chunk from a peer; false: none has come, or nobody expects one.
static bool pull(rt_shm *shm, peer *p) {
    rt_shm_message *m = p->receives.first;
    if (m == NULL) return false;
    const uint64_t num_ready = atomic_load(&p->in->num_filled) - p->num_emptied;
    if (is_broken(p, num_ready > NUM_CHUNKS) || num_ready == 0) return false;
    const uint64_t place = p->num_emptied % NUM_CHUNKS;
    const uint64_t tag = atomic_load_explicit(&p->in->headers[place].tag, memory_order_relaxed);
    const int64_t num_bytes = atomic_load_explicit(&p->in->headers[place].num_bytes, memory_order_relaxed);
    if (tag > m->tag) return false; // of a later call: ours is one on which the ranks disagreed, and will be dropped
    if (tag == m->tag) {            // else: of an earlier call, on which they disagreed
        const bool fits = num_bytes > 0 && num_bytes <= CHUNK && num_bytes <= m->num_bytes - m->internal.moved;
        if (is_broken(p, !fits)) return false;
        memcpy((char *)m->data + m->internal.moved, p->in->chunks[place], (size_t)num_bytes);
        m->internal.moved += num_bytes;
        if (m->internal.moved == m->num_bytes) finish(shm, m, RT_SHM_DONE);
    }
    atomic_store(&p->in->num_emptied, ++p->num_emptied);
    wake(p);
    return true;
}

static bool make_progress(rt_shm *shm) {
    bool moved = false;
    for (peer *p = shm->peers; p < shm->peers + shm->num_ranks; p++) {
        if (p->segment == NULL) continue;
        moved |= push(shm, p);
        moved |= pull(shm, p);
    }
    return moved;
}

// ---- sleeping ----------------------------------------------------------------------------------------------

// Reads what peers wrote to wake this rank. One that has closed is lost once its ring is empty.
static void drain_wakeups(rt_shm *shm, const struct pollfd *set) {
    char bytes[256];
    for (int64_t r = 0; r < shm->num_ranks; r++) {
        peer *p = &shm->peers[r];
        if (set[r].revents == 0 || p->socket < 0) continue;
        const ssize_t heard = recv(p->socket, bytes, sizeof(bytes), MSG_DONTWAIT);
        if (heard == 0 || (heard < 0 && errno != EAGAIN && errno != EINTR)) p->socket = -1;
    }
}

// Returns when something may have changed or the time is over; false: when a signal has arrived. The progress thread
// also returns when it is woken. Releases the lock meanwhile.
static bool wait_for_event(rt_shm *shm, bool is_progress_thread, bool watch_peers, int milliseconds) {
    struct pollfd *set = poll_set(shm, is_progress_thread);
    for (int64_t r = 0; r < shm->num_ranks; r++)
        set[r] = (struct pollfd){watch_peers ? shm->peers[r].socket : -1, POLLIN, 0};
    set[shm->num_ranks] = (struct pollfd){is_progress_thread ? shm->wake_event : -1, POLLIN, 0};
    if (watch_peers) {
        atomic_store(&shm->own->is_asleep, 1);
        if (make_progress(shm) || fail_closed_peers(shm)) return true;
    }
    pthread_mutex_unlock(&shm->lock);
    const int num_ready = poll(set, (nfds_t)shm->num_ranks + 1, milliseconds);
    const bool interrupted = num_ready < 0 && errno == EINTR;
    pthread_mutex_lock(&shm->lock);
    // While both threads sleep, a byte wakes both, and it is the caller's: if the progress thread read it, the
    // caller would sleep on. A caller that leaves wakes the progress thread.
    if (watch_peers && (!is_progress_thread || atomic_load(&shm->num_waiting) == 0)) {
        atomic_store(&shm->own->is_asleep, 0);
        if (num_ready > 0) drain_wakeups(shm, set);
    }
    eventfd_t count;
    if (is_progress_thread && num_ready > 0 && set[shm->num_ranks].revents != 0)
        (void)eventfd_read(shm->wake_event, &count);
    return !interrupted;
}

// ---- the progress thread -------------------------------------------------------------------------------------

static void wake_progress_thread(rt_shm *shm) {
    if (shm->has_progress_thread) (void)eventfd_write(shm->wake_event, 1);
}

static void *run_progress_thread(void *arg) {
    rt_shm *shm = arg;
    pthread_mutex_lock(&shm->lock);
    while (!shm->is_closed) {
        const bool works = shm->num_in_background > 0 && atomic_load(&shm->num_waiting) == 0;
        if (!works || !make_progress(shm)) {
            wait_for_event(shm, true, works, -1);
        } else { // a caller may want the lock between two chunks
            pthread_mutex_unlock(&shm->lock);
            pthread_mutex_lock(&shm->lock);
        }
    }
    pthread_mutex_unlock(&shm->lock);
    return NULL;
}

// Without it, all messages move only while the caller waits.
static void start_progress_thread(rt_shm *shm) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); // signals are for the caller's threads
    shm->has_progress_thread = pthread_create(&shm->progress_thread, NULL, run_progress_thread, shm) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

// ---- callers -----------------------------------------------------------------------------------------------

void rt_shm_post(rt_shm *shm, rt_shm_message *m) {
    m->internal.next = NULL, m->internal.moved = 0, m->internal.in_background = false, m->state = RT_SHM_LOST;
    if (getpid() != shm->process) return;
    pthread_mutex_lock(&shm->lock);
    peer *p = &shm->peers[m->peer];
    if (!shm->is_closed && p->segment != NULL && m->num_bytes > 0) {
        m->state = RT_SHM_PENDING;
        queue *q = queue_of(shm, m);
        if (q->first == NULL)
            q->first = m;
        else
            q->last->internal.next = m;
        q->last = m;
        if (m->outgoing)
            while (push(shm, p)) continue;
        m->internal.in_background =
            m->state == RT_SHM_PENDING && (m->outgoing || m->num_bytes > (int64_t)NUM_CHUNKS * CHUNK);
        if (m->internal.in_background) {
            shm->num_in_background++;
            if (!shm->has_progress_thread) start_progress_thread(shm);
            wake_progress_thread(shm);
        }
    }
    pthread_mutex_unlock(&shm->lock);
}

static int64_t now_in_milliseconds(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000 + time.tv_nsec / 1000000;
}

rt_shm_state rt_shm_wait(rt_shm *shm, rt_shm_message *m, int64_t milliseconds) {
    if (getpid() != shm->process) return RT_SHM_LOST;
    const int64_t end = now_in_milliseconds() + milliseconds;
    atomic_fetch_add(&shm->num_waiting, 1);
    pthread_mutex_lock(&shm->lock);
    for (int num_idle = 0; m->state == RT_SHM_PENDING;) {
        if (make_progress(shm) || fail_closed_peers(shm)) {
            num_idle = 0;
        } else if (num_idle < NUM_SPINS) { // a peer that is about to answer does so before this thread could wake up
            num_idle++;
            sched_yield();
        } else {
            const int64_t left = end - now_in_milliseconds();
            if (left <= 0 || !wait_for_event(shm, false, true, left < 1 << 30 ? (int)left : 1 << 30)) break;
        }
    }
    atomic_fetch_sub(&shm->num_waiting, 1);
    if (shm->num_in_background > 0) wake_progress_thread(shm);
    const rt_shm_state state = m->state;
    pthread_mutex_unlock(&shm->lock);
    return state;
}

void rt_shm_drop(rt_shm *shm, rt_shm_message *m) {
    if (getpid() != shm->process) return;
    pthread_mutex_lock(&shm->lock);
    if (m != NULL && m->state == RT_SHM_PENDING) finish(shm, m, RT_SHM_LOST);
    for (int64_t r = 0; m == NULL && r < shm->num_ranks; r++) drop_all(shm, &shm->peers[r]);
    pthread_mutex_unlock(&shm->lock);
}

void rt_shm_close(rt_shm *shm) {
    if (getpid() != shm->process) return;
    pthread_mutex_lock(&shm->lock);
    const bool was_closed = shm->is_closed;
    shm->is_closed = true;
    for (int64_t r = 0; r < shm->num_ranks; r++) drop_all(shm, &shm->peers[r]);
    wake_progress_thread(shm);
    pthread_mutex_unlock(&shm->lock);
    if (was_closed) return;
    if (shm->has_progress_thread) pthread_join(shm->progress_thread, NULL); // no later message starts one
    close(shm->wake_event);
}
