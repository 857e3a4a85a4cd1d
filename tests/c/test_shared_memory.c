// Messages through shared memory, between ranks that are threads: the segments lie in this process's own memory, so
// that the sanitizers see both sides. `test_shared_memory [ROUNDS [SEED]]`
#define _GNU_SOURCE
#include "check.h"

#include "../../csrc/transport/shared_memory.h"

#include <sched.h>
#include <stdatomic.h>
#include <sys/socket.h>
#include <unistd.h>

enum { MAX_RANKS = 3, CAPACITY = RT_SHM_CHUNK_BYTES * RT_SHM_NUM_CHUNKS, SECOND = 1000, LONG = 20 * SECOND };

typedef struct world {
    int64_t num_ranks;
    void *segments[MAX_RANKS];
    int sockets[MAX_RANKS][MAX_RANKS]; // [rank][peer]
    rt_shm *ends[MAX_RANKS];
} world;

static world new_world(int64_t num_ranks) {
    world w = {.num_ranks = num_ranks};
    const size_t num_bytes = (size_t)rt_shm_segment_bytes(num_ranks);
    for (int64_t r = 0; r < num_ranks; r++) {
        w.segments[r] = aligned_alloc(4096, num_bytes);
        if (w.segments[r] == NULL) exit(1);
        memset(w.segments[r], 0, num_bytes);
        w.sockets[r][r] = -1;
        for (int64_t peer = 0; peer < r; peer++) {
            int pair[2];
            if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair) != 0) exit(1);
            w.sockets[r][peer] = pair[0], w.sockets[peer][r] = pair[1];
        }
    }
    for (int64_t r = 0; r < num_ranks; r++) {
        w.ends[r] = must_alloc((size_t)rt_shm_bytes(num_ranks));
        CHECK_STATUS(rt_shm_open(w.ends[r], r, num_ranks, w.segments, w.sockets[r]), RT_OK);
    }
    return w;
}

static void hang_up(world *w, int64_t rank) {
    rt_shm_close(w->ends[rank]);
    for (int64_t peer = 0; peer < w->num_ranks; peer++)
        if (peer != rank && w->sockets[rank][peer] >= 0) close(w->sockets[rank][peer]);
    memset(w->sockets[rank], 0xff, sizeof(w->sockets[rank]));
}

static void free_world(world *w) {
    for (int64_t r = 0; r < w->num_ranks; r++) {
        hang_up(w, r);
        free(w->ends[r]), free(w->segments[r]);
    }
}

// ---- messages ----------------------------------------------------------------------------------------------

// Byte i of the message that `seed` stands for.
static uint8_t byte_of(uint64_t seed, int64_t i) {
    return (uint8_t)(seed * 31 + (uint64_t)i * 7 + (uint64_t)(i >> 13));
}

static rt_shm_message message(bool outgoing, int64_t peer, uint64_t tag, int64_t num_bytes, uint64_t seed) {
    uint8_t *data = must_alloc((size_t)num_bytes);
    for (int64_t i = 0; i < num_bytes; i++) data[i] = outgoing ? byte_of(seed, i) : 0;
    return (rt_shm_message){.data = data, .num_bytes = num_bytes, .tag = tag, .peer = peer, .outgoing = outgoing};
}

static bool holds(const rt_shm_message *m, uint64_t seed) {
    const uint8_t *data = m->data;
    for (int64_t i = 0; i < m->num_bytes; i++)
        if (data[i] != byte_of(seed, i)) return false;
    return true;
}

static rt_shm_state post_and_wait(rt_shm *end, rt_shm_message *m, int64_t milliseconds) {
    rt_shm_post(end, m);
    return rt_shm_wait(end, m, milliseconds);
}

// ---- traffic of all ranks at once --------------------------------------------------------------------------

typedef struct traffic {
    world *w;
    uint64_t seed;
    int64_t rounds;
    int64_t num_wrong[MAX_RANKS];
} traffic;

static int64_t size_of(uint64_t seed) {
    uint64_t state = seed;
    const int64_t chunks = random_int(&state, 0, 7);
    return chunks == 7 ? CAPACITY + random_int(&state, 1, 2 * CAPACITY)
                       : random_int(&state, 1, 1 + chunks * RT_SHM_CHUNK_BYTES / 2);
}

// In each round every rank sends two messages to every other, and waits for all in an order of its own.
static void talk(void *arg, int64_t rank) {
    traffic *t = arg;
    uint64_t order = t->seed + (uint64_t)rank;
    for (int64_t round = 0; round < t->rounds; round++) {
        rt_shm_message messages[4 * MAX_RANKS];
        uint64_t seeds[4 * MAX_RANKS];
        int count = 0;
        for (int64_t peer = 0; peer < t->w->num_ranks; peer++) {
            for (int i = 0; peer != rank && i < 4; i++) {
                const bool outgoing = i % 2 == 1;
                const int64_t from = outgoing ? rank : peer, to = outgoing ? peer : rank;
                const uint64_t seed = t->seed + (uint64_t)(((round * 3 + from) * 3 + to) * 2 + i / 2);
                seeds[count] = seed;
                messages[count] = message(outgoing, peer, (uint64_t)round, size_of(seed), seed);
                rt_shm_post(t->w->ends[rank], &messages[count++]);
            }
        }
        const int first = (int)random_int(&order, 0, count - 1);
        for (int i = 0; i < count; i++) {
            const int which = (first + i) % count;
            rt_shm_message *m = &messages[which];
            if (rt_shm_wait(t->w->ends[rank], m, LONG) != RT_SHM_DONE || (!m->outgoing && !holds(m, seeds[which])))
                t->num_wrong[rank]++;
            free(m->data);
        }
    }
}

static void test_traffic(uint64_t seed, int64_t num_ranks, int64_t rounds) {
    world w = new_world(num_ranks);
    traffic t = {&w, seed, rounds, {0}};
    run_threads(NULL, num_ranks, talk, &t);
    for (int64_t r = 0; r < num_ranks; r++) CHECK_INT(t.num_wrong[r], 0);
    free_world(&w);
}

// ---- one case at a time ------------------------------------------------------------------------------------

// The other side never waits: its progress thread copies.
static void test_long_messages_move_while_one_side_computes(void) {
    for (int waits = 0; waits < 2; waits++) {
        world w = new_world(2);
        rt_shm_message sent = message(true, 1, 5, 3 * CAPACITY + 1, 9), got = message(false, 0, 5, 3 * CAPACITY + 1, 0);
        rt_shm_post(w.ends[0], &sent);
        rt_shm_post(w.ends[1], &got);
        CHECK_INT(rt_shm_wait(w.ends[waits], waits == 0 ? &sent : &got, LONG), RT_SHM_DONE);
        CHECK_INT(rt_shm_wait(w.ends[1 - waits], waits == 0 ? &got : &sent, LONG), RT_SHM_DONE);
        CHECK(holds(&got, 9));
        free(sent.data), free(got.data);
        free_world(&w);
    }
}

// The caller of rank 0 waits in vain, and its progress thread stands back; then rank 1 needs the progress thread.
static void test_a_caller_that_leaves_wakes_the_progress_thread(void) {
    world w = new_world(2);
    rt_shm_message never = message(false, 1, 5, 8, 0);
    for (int i = 0; i < 5; i++) {
        rt_shm_message sent = message(true, 1, 5, 2 * CAPACITY, 9), got = message(false, 0, 5, 2 * CAPACITY, 0);
        rt_shm_post(w.ends[0], &sent);
        CHECK_INT(post_and_wait(w.ends[0], &never, 20), RT_SHM_PENDING);
        rt_shm_drop(w.ends[0], &never);
        CHECK_INT(post_and_wait(w.ends[1], &got, LONG), RT_SHM_DONE);
        CHECK(holds(&got, 9));
        CHECK_INT(rt_shm_wait(w.ends[0], &sent, LONG),
                  RT_SHM_DONE); // a message is the progress thread's until it is waited for
        free(sent.data), free(got.data);
    }
    free(never.data);
    free_world(&w);
}

enum { NUM_ANSWERS = 100 };

static void ask_and_answer(void *arg, int64_t rank) {
    traffic *t = arg;
    for (int i = 0; i < NUM_ANSWERS; i++) {
        for (int step = 0; step < 2; step++) {
            rt_shm_message m = message(step == rank, 1 - rank, 7, 8, 1);
            for (int late = 0; rank == 1 && step == 1 && late < 200; late++) sched_yield(); // rank 0 sleeps by then
            t->num_wrong[rank] += post_and_wait(t->w->ends[rank], &m, LONG) != RT_SHM_DONE;
            free(m.data);
        }
    }
}

// The progress thread of rank 0 sleeps, since a long message to rank 2 finds no room. The byte that wakes it is the
// caller's.
static void test_the_progress_thread_leaves_the_caller_its_byte(void) {
    world w = new_world(3);
    rt_shm_message sent = message(true, 2, 5, 3 * CAPACITY, 9);
    rt_shm_post(w.ends[0], &sent);
    traffic t = {&w, 0, 0, {0}};
    run_threads(NULL, 2, ask_and_answer, &t);
    CHECK_INT(t.num_wrong[0] + t.num_wrong[1], 0);
    rt_shm_drop(w.ends[0], NULL);
    free(sent.data);
    free_world(&w);
}

static void test_a_short_message_needs_no_receiver(void) {
    world w = new_world(2);
    rt_shm_message sent = message(true, 1, 5, CAPACITY, 9), got = message(false, 0, 5, CAPACITY, 0);
    CHECK_INT(post_and_wait(w.ends[0], &sent, 0), RT_SHM_DONE);
    CHECK_INT(post_and_wait(w.ends[1], &got, LONG), RT_SHM_DONE);
    CHECK(holds(&got, 9));
    free(sent.data), free(got.data);
    free_world(&w);
}

// The ranks disagreed on a call: what was sent of its messages fills the ring, and is skipped.
static void test_messages_of_another_tag_are_skipped(void) {
    world w = new_world(2);
    rt_shm_message stale = message(true, 1, 1, 2 * CAPACITY, 3), never = message(false, 0, 4, 8, 0);
    rt_shm_message sent = message(true, 1, 2, 1000, 9), got = message(false, 0, 2, 1000, 0);
    rt_shm_post(w.ends[0], &stale);
    rt_shm_post(w.ends[1], &never);
    rt_shm_drop(w.ends[0], NULL);
    rt_shm_drop(w.ends[1], &never);
    CHECK(stale.state == RT_SHM_LOST && never.state == RT_SHM_LOST);
    free(stale.data);
    rt_shm_post(w.ends[0], &sent);
    CHECK_INT(post_and_wait(w.ends[1], &got, LONG), RT_SHM_DONE);
    CHECK_INT(rt_shm_wait(w.ends[0], &sent, LONG), RT_SHM_DONE);
    CHECK(holds(&got, 9));
    free(never.data), free(sent.data), free(got.data);
    free_world(&w);
}

// Rank 1 still waits in a call on which the ranks disagreed, while rank 0 is in the next one.
static void test_messages_of_a_later_call_are_left(void) {
    world w = new_world(2);
    rt_shm_message sent = message(true, 1, 2, 1000, 9), got = message(false, 0, 2, 1000, 0);
    rt_shm_message stale = message(false, 0, 1, 8, 0);
    rt_shm_post(w.ends[0], &sent);
    CHECK_INT(post_and_wait(w.ends[1], &stale, 5), RT_SHM_PENDING);
    rt_shm_drop(w.ends[1], &stale);
    CHECK_INT(post_and_wait(w.ends[1], &got, 1000), RT_SHM_DONE);
    CHECK_INT(rt_shm_wait(w.ends[0], &sent, LONG), RT_SHM_DONE);
    CHECK(holds(&got, 9));
    free(stale.data), free(sent.data), free(got.data);
    free_world(&w);
}

typedef struct closing {
    world *w;
    rt_shm_state state;
    int64_t moved;
} closing;

static void wait_for_the_dead(void *arg, int64_t worker) {
    closing *c = arg;
    rt_shm_message got = message(false, 0, 2, 3 * CAPACITY, 0);
    if (worker == 1)
        c->state = post_and_wait(c->w->ends[1], &got, LONG);
    else
        hang_up(c->w, 0);
    free(got.data);
}

static void test_a_closed_peer_is_lost(void) {
    world w = new_world(2);
    rt_shm_message sent = message(true, 1, 2, 1000, 9), got = message(false, 0, 2, 1000, 0);
    CHECK_INT(post_and_wait(w.ends[0], &sent, 0), RT_SHM_DONE);
    closing c = {&w, RT_SHM_PENDING, 0};
    rt_shm_message first = got;
    CHECK_INT(post_and_wait(w.ends[1], &first, LONG), RT_SHM_DONE);
    CHECK_INT(post_and_wait(w.ends[0], &sent, 0), RT_SHM_DONE); // what was sent before the end still arrives
    run_threads(NULL, 2, wait_for_the_dead, &c);
    CHECK_INT(c.state, RT_SHM_LOST);
    CHECK_INT(post_and_wait(w.ends[0], &sent, LONG), RT_SHM_LOST); // after its own end
    free(sent.data), free(got.data);
    free_world(&w);

    w = new_world(2);
    sent = message(true, 1, 2, 1000, 9), got = message(false, 0, 2, 1000, 0);
    CHECK_INT(post_and_wait(w.ends[0], &sent, 0), RT_SHM_DONE);
    hang_up(&w, 0);
    rt_shm_message missing = message(false, 0, 2, 1, 0);
    CHECK_INT(post_and_wait(w.ends[1], &missing, 0), RT_SHM_LOST); // 1000 bytes, not 1: no message of ours
    free(sent.data), free(got.data), free(missing.data);
    free_world(&w);
}

static void test_a_message_sent_before_the_end_arrives(void) {
    world w = new_world(2);
    rt_shm_message sent = message(true, 1, 2, 1000, 9), got = message(false, 0, 2, 1000, 0), more = got;
    CHECK_INT(post_and_wait(w.ends[0], &sent, 0), RT_SHM_DONE);
    hang_up(&w, 0);
    CHECK_INT(rt_shm_wait(w.ends[1], &(rt_shm_message){.state = RT_SHM_LOST}, 0), RT_SHM_LOST);
    CHECK_INT(post_and_wait(w.ends[1], &got, LONG), RT_SHM_DONE);
    CHECK(holds(&got, 9));
    CHECK_INT(post_and_wait(w.ends[1], &more, LONG), RT_SHM_LOST);
    free(sent.data), free(got.data);
    free_world(&w);
}

static void test_a_silent_peer_times_out(void) {
    world w = new_world(2);
    rt_shm_message got = message(false, 0, 2, 3 * CAPACITY, 0), sent = message(true, 0, 2, 3 * CAPACITY, 0);
    CHECK_INT(post_and_wait(w.ends[1], &got, 20), RT_SHM_PENDING);
    CHECK_INT(post_and_wait(w.ends[1], &sent, 20), RT_SHM_PENDING);
    rt_shm_close(w.ends[1]);
    CHECK(got.state == RT_SHM_LOST && sent.state == RT_SHM_LOST);
    free(got.data), free(sent.data);
    free_world(&w);
}

// A peer writes nonsense into the ring from rank 0 to rank 1: its counts, or the header of its first chunk.
static void test_a_broken_ring_is_lost(void) {
    const int64_t begin = rt_shm_segment_bytes(0), header = begin + 128, sizes[] = {begin, header + 8, header + 8};
    const int64_t nonsense[] = {-1, -5, RT_SHM_CHUNK_BYTES + 1};
    for (int i = 0; i < 3; i++) {
        world w = new_world(2);
        rt_shm_message sent = message(true, 1, 2, 1000, 9), got = message(false, 0, 2, 3 * CAPACITY, 0);
        CHECK_INT(post_and_wait(w.ends[0], &sent, 0), RT_SHM_DONE);
        memcpy((char *)w.segments[1] + sizes[i], &nonsense[i], sizeof(nonsense[i]));
        CHECK_INT(post_and_wait(w.ends[1], &got, LONG), RT_SHM_LOST);
        CHECK_INT(got.internal.moved, 0);
        free(sent.data), free(got.data);
        free_world(&w);
    }
}

// Rank 1 receives while a peer keeps changing the header of the chunk: it checks the very number that it copies by.
static void receive_or_change(void *arg, int64_t worker) {
    closing *c = arg;
    _Atomic int64_t *num_bytes = (void *)((char *)c->w->segments[1] + rt_shm_segment_bytes(0) + 128 + 8);
    rt_shm_message got = message(false, 0, 2, 3 * CAPACITY, 0);
    if (worker == 1) {
        c->state = post_and_wait(c->w->ends[1], &got, 20);
        rt_shm_drop(c->w->ends[1], &got);
        c->moved = got.internal.moved;
    } else {
        for (int i = 0; i < 2000; i++) atomic_store(num_bytes, i % 2 ? 1000 : INT64_MAX);
    }
    free(got.data);
}

static void test_a_header_that_changes_is_read_once(void) {
    world w = new_world(2);
    closing c = {&w, RT_SHM_DONE, 0};
    rt_shm_message sent = message(true, 1, 2, 1000, 9);
    CHECK_INT(post_and_wait(w.ends[0], &sent, 0), RT_SHM_DONE);
    run_threads(NULL, 2, receive_or_change, &c);
    CHECK(c.state == RT_SHM_LOST || c.state == RT_SHM_PENDING);
    CHECK(c.moved == 0 || c.moved == 1000);
    free(sent.data);
    free_world(&w);
}

static void test_ranks_that_share_nothing(void) {
    world w = new_world(3);
    void *segments[] = {w.segments[0], NULL, w.segments[2]};
    rt_shm *end = must_alloc((size_t)rt_shm_bytes(3));
    CHECK_STATUS(rt_shm_open(end, 0, 3, segments, w.sockets[0]), RT_OK);
    rt_shm_message m = message(true, 1, 0, 8, 0);
    CHECK_INT(post_and_wait(end, &m, LONG), RT_SHM_LOST);
    rt_shm_close(end);
    CHECK_STATUS(rt_shm_open(end, 1, 3, segments, w.sockets[1]), RT_BAD_POINTER);
    CHECK_STATUS(rt_shm_open(end, 3, 3, segments, w.sockets[0]), RT_BAD_SHAPE);
    CHECK_STATUS(rt_shm_open(NULL, 0, 3, segments, w.sockets[0]), RT_BAD_POINTER);
    free(end), free(m.data);
    free_world(&w);
}

static void test_a_file_is_mapped(void) {
    FILE *file = tmpfile();
    if (file == NULL || ftruncate(fileno(file), rt_shm_segment_bytes(2)) != 0) exit(1);
    char *once = rt_shm_map(fileno(file), 2), *twice = rt_shm_map(fileno(file), 2);
    once[rt_shm_segment_bytes(2) - 1] = 7;
    CHECK_INT(twice[rt_shm_segment_bytes(2) - 1], 7);
    rt_shm_unmap(once, 2), rt_shm_unmap(twice, 2);
    fclose(file);
    CHECK(rt_shm_map(-1, 2) == NULL);
}

int main(int argc, char **argv) {
    const int64_t rounds = argc > 1 ? atoll(argv[1]) : 8;
    const uint64_t seed = argc > 2 ? (uint64_t)atoll(argv[2]) : 1;
    test_traffic(seed, 2, rounds);
    test_traffic(seed + 100, 3, rounds);
    test_long_messages_move_while_one_side_computes();
    test_a_caller_that_leaves_wakes_the_progress_thread();
    test_the_progress_thread_leaves_the_caller_its_byte();
    test_a_short_message_needs_no_receiver();
    test_messages_of_another_tag_are_skipped();
    test_messages_of_a_later_call_are_left();
    test_a_closed_peer_is_lost();
    test_a_message_sent_before_the_end_arrives();
    test_a_silent_peer_times_out();
    test_a_broken_ring_is_lost();
    test_a_header_that_changes_is_read_once();
    test_ranks_that_share_nothing();
    test_a_file_is_mapped();
    return check_finish();
}
