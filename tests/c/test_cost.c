// The model of a scheme's cost against times worked out by hand, and what it refuses.
#include "check.h"

// Two ranks, each with 8 tokens and 1 head: 10 bytes a key, 4 keys needed of the other; 30 pairs at home, 20 abroad.
// 10 flops a second and 1 flop a pair; 10 bytes a second and 1 s a message.
static const int64_t one_host[] = {0, 0}, two_hosts[] = {0, 1}, tokens[] = {8, 8}, keys[] = {8, 4, 4, 8},
                     pairs[] = {30, 20, 20, 30}, whole[] = {1, 1, 1};
static const rt_cost_params ring = {
    .num_ranks = 2,
    .group_size = 1,
    .num_stages = 1,
    .hosts = one_host,
    .tokens = tokens,
    .keys = keys,
    .pairs = pairs,
    .shares = whole,
    .key_bytes = 10,
    .gradient_bytes = 5,
    .query_bytes = 10,
    .result_bytes = 20,
    .flops_per_pair = 1,
    .flops_per_s = 10,
    .copy_bytes_per_s = 1e300,
    .within = {1, 10, 10, 1},
    .between = {1, 5, 5, 1},
};

typedef struct played {
    double seconds[2];
    int64_t bytes[4], num_events;
    rt_cost_event events[64];
} played;

static played play(rt_cost_params p, rt_cost_pass pass) {
    played result;
    double *workspace = must_alloc((size_t)rt_cost_workspace_bytes(p.num_ranks));
    CHECK_STATUS(
        rt_cost(&p, pass, result.seconds, result.bytes, result.events, 64, &result.num_events, workspace),
        RT_OK);
    free(workspace);
    return result;
}

static void test_a_ring_hides_messages_behind_kernels(void) {
    played got = play(ring, RT_COST_FORWARD);
    // 40 bytes take 4 s and arrive after 5 s; kernels of round 0 take 3 s, of round 1 2 s.
    for (int rank = 0; rank < 2; rank++) CHECK_CLOSE(got.seconds[rank], 5 + 2, 1e-12);
    CHECK_INT(got.bytes[1], 40);
    CHECK_INT(got.bytes[2], 40);
    CHECK_INT(got.bytes[0] + got.bytes[3], 0);
    CHECK_INT(got.num_events, 2 + 4);
    rt_cost_params p = ring;
    p.hosts = two_hosts; // half as fast
    CHECK_CLOSE(play(p, RT_COST_FORWARD).seconds[0], 9 + 2, 1e-12);
    p.between.host_bytes_per_s = 4;
    CHECK_CLOSE(play(p, RT_COST_FORWARD).seconds[0], 11 + 2, 1e-12);
    p = ring;
    p.flops_per_s = 1; // kernels hide it all
    CHECK_CLOSE(play(p, RT_COST_FORWARD).seconds[0], 50, 1e-12);
    p.within.overlap = 0; // processors copy: sent and received, half of 5 s each
    CHECK_CLOSE(play(p, RT_COST_FORWARD).seconds[0], 50 + 5, 1e-12);
    p.call_s = 7;
    CHECK_CLOSE(play(p, RT_COST_FORWARD).seconds[0], 50 + 5 + 2 * 7, 1e-12);
    p.message_s = 3;         // one sent, one received
    p.copy_bytes_per_s = 40; // the sender packs keys, the receiver reads them where they are
    CHECK_CLOSE(play(p, RT_COST_FORWARD).seconds[0], 50 + 5 + 2 * 7 + 2 * 3 + 1, 1e-12);
}

static void test_a_round_without_pairs_calls_nothing(void) {
    static const int64_t own_keys[] = {8, 0, 0, 8}, own_pairs[] = {30, 0, 0, 30};
    rt_cost_params p = ring;
    p.keys = own_keys, p.pairs = own_pairs, p.call_s = 7;
    CHECK_CLOSE(play(p, RT_COST_FORWARD).seconds[0], 3 + 7, 1e-12);
}

static void test_gradients_travel_home(void) {
    // Round 0: keys until 5, kernels until 3, no gradients; round 1: kernels until 7; 20 bytes take 2 s and 1 s more.
    const played got = play(ring, RT_COST_BACKWARD);
    CHECK_CLOSE(got.seconds[0], 7 + 3, 1e-12);
    CHECK_INT(got.bytes[1], 40 + 20);
}

static void test_all_keys_at_once_are_waited_for(void) {
    rt_cost_params p = ring;
    p.at_once = true;
    const played got = play(p, RT_COST_FORWARD);
    CHECK_CLOSE(got.seconds[0], 5 + 5, 1e-12);
    CHECK_INT(got.num_events, 2 + 2);
}

// Both ranks work on all queries, each on one of two heads; pairs and keys are those of both ranks together.
static void test_shares_of_heads_wait_for_queries_and_results(void) {
    const int64_t all_keys[] = {8, 8, 8, 8}, all_pairs[] = {50, 50, 50, 50}, shares[] = {1, 1, 1, 1, 1, 1};
    rt_cost_params p = ring;
    p.group_size = 2, p.keys = all_keys, p.pairs = all_pairs, p.shares = shares;
    const played got = play(p, RT_COST_FORWARD);
    // Queries 80 bytes, then keys 80 bytes on the same link: 8 + 8 + 1. Kernels 10. Results 160 bytes: 16 + 1.
    CHECK_CLOSE(got.seconds[0], 17 + 10 + 17, 1e-12);
    CHECK_INT(got.bytes[1], 80 + 80 + 160);
}

static void test_malformed_params_are_refused(void) {
    played got;
    double workspace[64];
    const double nan_ = NAN;
    const int64_t negative[] = {-1, 0, 0, 0}, far[] = {0, 2}, huge[] = {0, INT64_MAX, 0, 0};
    CHECK(rt_cost_workspace_bytes(2) <= (int64_t)sizeof(workspace));
    CHECK_INT(rt_cost_workspace_bytes(0), 0);
    CHECK_INT(rt_cost_workspace_bytes(INT64_MAX), 0);
#define REFUSED(field, value, status)                                                                        \
    do {                                                                                                     \
        rt_cost_params bad = ring;                                                                           \
        bad.field = value;                                                                                   \
        CHECK_STATUS(                                                                                        \
            rt_cost(&bad, RT_COST_BACKWARD, got.seconds, got.bytes, NULL, 0, &got.num_events, workspace),    \
            status);                                                                                         \
    } while (0)
    REFUSED(num_ranks, 0, RT_BAD_SHAPE);
    REFUSED(num_ranks, INT64_MAX, RT_TOO_LARGE);
    REFUSED(group_size, 0, RT_BAD_SHAPE);
    REFUSED(group_size, 3, RT_BAD_SHAPE);
    REFUSED(num_stages, 0, RT_BAD_SHAPE);
    REFUSED(num_stages, INT64_MAX, RT_TOO_LARGE);
    REFUSED(hosts, NULL, RT_BAD_POINTER);
    REFUSED(hosts, far, RT_BAD_RANK);
    REFUSED(hosts, negative, RT_BAD_SHAPE);
    REFUSED(keys, negative, RT_BAD_SHAPE);
    REFUSED(keys, huge, RT_TOO_LARGE);
    REFUSED(pairs, NULL, RT_BAD_POINTER);
    REFUSED(key_bytes, -1, RT_BAD_SHAPE);
    REFUSED(within.bytes_per_s, 0, RT_BAD_RATE);
    REFUSED(within.overlap, nan_, RT_BAD_RATE);
    REFUSED(between.latency_s, -1, RT_BAD_RATE);
    REFUSED(between.host_bytes_per_s, INFINITY, RT_BAD_RATE);
    REFUSED(flops_per_s, nan_, RT_BAD_RATE);
    REFUSED(flops_per_pair, -1, RT_BAD_RATE);
    REFUSED(call_s, INFINITY, RT_BAD_RATE);
    REFUSED(message_s, -1, RT_BAD_RATE);
    REFUSED(copy_bytes_per_s, 0, RT_BAD_RATE);
#undef REFUSED
    const rt_cost_pass none = (rt_cost_pass)2;
    CHECK_STATUS(rt_cost(NULL, RT_COST_FORWARD, got.seconds, got.bytes, NULL, 0, &got.num_events, workspace),
                 RT_BAD_POINTER);
    CHECK_STATUS(rt_cost(&ring, none, got.seconds, got.bytes, NULL, 0, &got.num_events, workspace),
                 RT_BAD_KIND);
    CHECK_STATUS(rt_cost(&ring, RT_COST_FORWARD, NULL, got.bytes, NULL, 0, &got.num_events, workspace),
                 RT_BAD_POINTER);
    CHECK_STATUS(rt_cost(&ring, RT_COST_FORWARD, got.seconds, got.bytes, NULL, 1, &got.num_events, workspace),
                 RT_BAD_POINTER);
    CHECK_STATUS(
        rt_cost(&ring, RT_COST_FORWARD, got.seconds, got.bytes, got.events, 5, &got.num_events, workspace),
        RT_CAPACITY);
    CHECK_INT(got.num_events, 6);
    CHECK_STATUS(rt_cost(&ring, RT_COST_FORWARD, got.seconds, got.bytes, NULL, 0, &got.num_events, NULL),
                 RT_WORKSPACE);
}

int main(void) {
    test_a_ring_hides_messages_behind_kernels();
    test_a_round_without_pairs_calls_nothing();
    test_gradients_travel_home();
    test_all_keys_at_once_are_waited_for();
    test_shares_of_heads_wait_for_queries_and_results();
    test_malformed_params_are_refused();
    return check_finish();
}
