// What a pass of attention takes by a scheme: its messages and kernels, played on a model of links and kernels.
// Shapes: W ranks in groups of M, T stages. A rank of group a works in round i on the keys of group (a - i) mod (W / M).
#include "../arrays.h"
#include "../ringtile.h"

#include <math.h>
#include <string.h>

// Messages under way, until each rank waits for all of its own.
typedef struct exchange {
    double *arrive; // (W) when the last message of the rank is done
    double *busy;   // (W) what they cost its processor
} exchange;

typedef struct model {
    const rt_cost_params *p;
    rt_cost_pass pass;
    int64_t num_groups, num_rounds;
    double *clock;              // (W)
    double *sending[2];         // (W) each: when a rank's link is free, within the host and to others
    double *receiving[2];       // (W) each
    double *leaving, *entering; // (W) when a host's link to others is free, by host
    exchange queries, keys, gradients, results;
    int64_t *bytes; // (W, W)
    rt_cost_event *events;
    int64_t capacity, num_events;
    bool overflow;
} model;

enum { NUM_ARRAYS = 7 + 4 * 2 };

static bool is_rate(double rate) { return isfinite(rate) && rate > 0; }

static bool is_link(rt_link link) {
    return isfinite(link.latency_s) && link.latency_s >= 0 && is_rate(link.bytes_per_s) &&
           is_rate(link.host_bytes_per_s) && link.overlap >= 0 && link.overlap <= 1;
}

static bool is_counts(const int64_t *counts, int64_t num) {
    for (int64_t i = 0; i < num; i++)
        if (counts[i] < 0) return false;
    return true;
}

static rt_status check_cost(const rt_cost_params *p, rt_cost_pass pass) {
    if (p == NULL) return RT_BAD_POINTER;
    const int64_t W = p->num_ranks, M = p->group_size, T = p->num_stages;
    if (W < 1 || M < 1 || T < 1 || W % M != 0) return RT_BAD_SHAPE;
    if (pass != RT_COST_FORWARD && pass != RT_COST_BACKWARD) return RT_BAD_KIND;
    const int64_t square[] = {W, W}, shares[] = {T, M, 3};
    if (!rt_array_fits(2, square, NULL, sizeof(int64_t)) || !rt_array_fits(3, shares, NULL, sizeof(int64_t)))
        return RT_TOO_LARGE;
    const int64_t *const arrays[] = {p->hosts, p->tokens, p->keys, p->pairs, p->shares};
    const int64_t counts[] = {W, W, W * W, W * W, T * M * 3};
    for (int i = 0; i < 5; i++) {
        if (!rt_points_to(arrays[i], sizeof(int64_t))) return RT_BAD_POINTER;
        if (!is_counts(arrays[i], counts[i])) return RT_BAD_SHAPE;
    }
    for (int64_t r = 0; r < W; r++)
        if (p->hosts[r] >= W) return RT_BAD_RANK;
    if (p->key_bytes < 0 || p->gradient_bytes < 0 || p->query_bytes < 0 || p->result_bytes < 0)
        return RT_BAD_SHAPE;
    const bool rates = is_link(p->within) && is_link(p->between) && is_rate(p->flops_per_s) &&
                       isfinite(p->flops_per_pair) && p->flops_per_pair >= 0 && isfinite(p->call_s) &&
                       p->call_s >= 0 && isfinite(p->message_s) && p->message_s >= 0 &&
                       is_rate(p->copy_bytes_per_s);
    return rates ? RT_OK : RT_BAD_RATE;
}

typedef enum share_part { QUERY_HEADS, KV_HEADS, CALLS } share_part;

static int64_t of_share(const model *m, int64_t stage, int64_t rank, share_part part) {
    const int64_t M = m->p->group_size;
    return m->p->shares[(stage * M + rank % M) * 3 + part];
}

static void record(model *m, rt_cost_event event) {
    if (m->num_events < m->capacity) m->events[m->num_events] = event;
    m->num_events++;
}

static double latest(double a, double b) { return a > b ? a : b; }

// ---- messages -----------------------------------------------------------------------------------

static void open_exchange(const model *m, exchange *e) {
    for (int64_t r = 0; r < m->p->num_ranks; r++) {
        e->arrive[r] = m->clock[r];
        e->busy[r] = 0;
    }
}

// How many ranks' keys a rank works on in a round.
static int64_t keys_per_round(const model *m) { return m->p->at_once ? m->p->num_ranks : m->p->group_size; }

// A message of count * heads * unit bytes. It starts when both ranks have posted it and the links between them are free.
static void send(model *m, exchange *e, rt_cost_kind kind, int64_t from, int64_t to, int64_t count,
                 int64_t heads, int64_t unit) {
    int64_t num_bytes, *sum = &m->bytes[from * m->p->num_ranks + to];
    m->overflow |= __builtin_mul_overflow(count, heads, &num_bytes) ||
                   __builtin_mul_overflow(num_bytes, unit, &num_bytes) ||
                   __builtin_add_overflow(*sum, num_bytes, sum);
    if (m->overflow || num_bytes == 0) return;
    const int64_t host = m->p->hosts[from], other = m->p->hosts[to];
    const bool far = host != other;
    const rt_link *link = far ? &m->p->between : &m->p->within;
    double *out = &m->sending[far][from], *in = &m->receiving[far][to];
    double begin = latest(latest(m->clock[from], m->clock[to]), latest(*out, *in));
    double seconds = (double)num_bytes / link->bytes_per_s;
    if (far) {
        begin = latest(begin, latest(m->leaving[host], m->entering[other]));
        const double of_host = (double)num_bytes / link->host_bytes_per_s;
        m->leaving[host] = m->entering[other] = begin + of_host;
        seconds = latest(seconds, of_host);
    }
    *out = *in = begin + seconds;
    const double end = begin + seconds + link->latency_s;
    // What a rank sends and receives meanwhile was measured together: each is half of it.
    const double busy = (1 - link->overlap) * (link->latency_s + seconds) / 2;
    const double copied = (double)num_bytes / m->p->copy_bytes_per_s;
    const bool packed = kind != RT_COST_GRADIENTS || keys_per_round(m) > 1; // else kernels write the message
    const bool joined = kind != RT_COST_KEYS || keys_per_round(m) > 1;      // else kernels read it
    for (int i = 0; i < 2; i++) {
        const int64_t rank = i == 0 ? from : to;
        e->arrive[rank] = latest(e->arrive[rank], end);
        e->busy[rank] += m->p->message_s + busy + ((i == 0 ? packed : joined) ? copied : 0);
    }
    record(m, (rt_cost_event){kind, from, to, num_bytes, begin, end});
}

static void wait_for(model *m, const exchange *e) {
    for (int64_t r = 0; r < m->p->num_ranks; r++)
        m->clock[r] = latest(m->clock[r] + e->busy[r], e->arrive[r]);
}

// The d-th rank whose keys `rank` works on in a round; ranks begin with different ones.
static int64_t key_rank_of(const model *m, int64_t rank, int64_t round, int64_t d) {
    const int64_t W = m->p->num_ranks, M = m->p->group_size;
    if (m->p->at_once) return (rank + d) % W;
    const int64_t group = (rank / M - round + m->num_groups) % m->num_groups;
    return group * M + (rank + d) % M;
}

// The keys of a round to those who work on them, or their gradients back.
static void send_keys(model *m, int64_t stage, int64_t round, bool back) {
    const rt_cost_params *p = m->p;
    exchange *e = back ? &m->gradients : &m->keys;
    open_exchange(m, e);
    for (int64_t d = 0; d < keys_per_round(m); d++)
        for (int64_t rank = 0; rank < p->num_ranks; rank++) {
            const int64_t owner = key_rank_of(m, rank, round, d);
            if (owner == rank) continue;
            const int64_t count = p->keys[rank * p->num_ranks + owner],
                          heads = of_share(m, stage, rank, KV_HEADS);
            if (back)
                send(m, e, RT_COST_GRADIENTS, rank, owner, count, heads, p->gradient_bytes);
            else
                send(m, e, RT_COST_KEYS, owner, rank, count, heads, p->key_bytes);
        }
}

// The queries of a stage to those who work on them, or their results back.
static void send_queries(model *m, int64_t stage, bool back) {
    const rt_cost_params *p = m->p;
    const int64_t M = p->group_size;
    exchange *e = back ? &m->results : &m->queries;
    open_exchange(m, e);
    for (int64_t d = 1; d < M; d++)
        for (int64_t owner = 0; owner < p->num_ranks; owner++) {
            const int64_t rank = owner / M * M + (owner + d) % M,
                          heads = of_share(m, stage, rank, QUERY_HEADS);
            if (back)
                send(m, e, RT_COST_RESULTS, rank, owner, p->tokens[owner], heads, p->result_bytes);
            else
                send(m, e, RT_COST_QUERIES, owner, rank, p->tokens[owner], heads, p->query_bytes);
        }
}

// ---- kernels, and the order of all --------------------------------------------------------------

static void compute(model *m, int64_t stage, int64_t round) {
    const rt_cost_params *p = m->p;
    for (int64_t rank = 0; rank < p->num_ranks; rank++) {
        double pairs = 0;
        for (int64_t d = 0; d < keys_per_round(m); d++)
            pairs += (double)p->pairs[rank * p->num_ranks + key_rank_of(m, rank, round, d)];
        const double flops = pairs * (double)of_share(m, stage, rank, QUERY_HEADS) * p->flops_per_pair;
        const double begin = m->clock[rank];
        if (pairs > 0) // else nothing is called
            m->clock[rank] += flops / p->flops_per_s + p->call_s * (double)of_share(m, stage, rank, CALLS);
        record(m, (rt_cost_event){RT_COST_KERNEL, rank, rank, 0, begin, m->clock[rank]});
    }
}

// As ring/ring.py: the messages of the next step start before the kernels of this one, and partial gradients and results
// are waited for one step later.
static void play(model *m) {
    const int64_t rounds = m->num_rounds, num_steps = m->p->num_stages * rounds;
    bool gradients_travel = false, results_travel = false;
    send_queries(m, 0, false);
    send_keys(m, 0, 0, false);
    for (int64_t step = 0; step < num_steps; step++) {
        const int64_t stage = step / rounds, round = step % rounds, next = step + 1;
        wait_for(m, &m->keys);
        if (round == 0) wait_for(m, &m->queries);
        if (next < num_steps) {
            send_keys(m, next / rounds, next % rounds, false);
            if (next % rounds == 0) send_queries(m, next / rounds, false);
        }
        compute(m, stage, round);
        if (m->pass == RT_COST_BACKWARD) {
            if (gradients_travel) wait_for(m, &m->gradients);
            send_keys(m, stage, round, true);
            gradients_travel = true;
        }
        if (round + 1 == rounds) {
            if (results_travel) wait_for(m, &m->results);
            send_queries(m, stage, true);
            results_travel = true;
        }
    }
    if (gradients_travel) wait_for(m, &m->gradients);
    wait_for(m, &m->results);
}

int64_t rt_cost_workspace_bytes(int64_t num_ranks) {
    const int64_t sizes[] = {NUM_ARRAYS, num_ranks};
    if (num_ranks < 1 || !rt_array_fits(2, sizes, NULL, sizeof(double))) return 0;
    return NUM_ARRAYS * num_ranks * (int64_t)sizeof(double);
}

rt_status rt_cost(const rt_cost_params *p, rt_cost_pass pass, double *seconds, int64_t *bytes,
                  rt_cost_event *events, int64_t capacity, int64_t *num_events, void *workspace) {
    const rt_status status = check_cost(p, pass);
    if (status != RT_OK) return status;
    if (capacity < 0) return RT_BAD_SHAPE;
    const int64_t W = p->num_ranks;
    if (!rt_points_to(seconds, sizeof(*seconds)) || !rt_points_to(bytes, sizeof(*bytes)) ||
        !rt_points_to(num_events, sizeof(*num_events)) ||
        (capacity > 0 && !rt_points_to(events, sizeof(double))))
        return RT_BAD_POINTER;
    if (!rt_points_to(workspace, sizeof(double))) return RT_WORKSPACE;

    memset(workspace, 0, (size_t)rt_cost_workspace_bytes(W));
    memset(bytes, 0, (size_t)(W * W) * sizeof(*bytes));
    double *at[NUM_ARRAYS];
    for (int i = 0; i < NUM_ARRAYS; i++) at[i] = (double *)workspace + i * W;
    const int64_t num_groups = W / p->group_size;
    model m = {
        .p = p,
        .pass = pass,
        .num_groups = num_groups,
        .num_rounds = p->at_once ? 1 : num_groups,
        .clock = at[0],
        .sending = {at[1], at[2]},
        .receiving = {at[3], at[4]},
        .leaving = at[5],
        .entering = at[6],
        .queries = {at[7], at[8]},
        .keys = {at[9], at[10]},
        .gradients = {at[11], at[12]},
        .results = {at[13], at[14]},
        .bytes = bytes,
        .events = events,
        .capacity = capacity,
    };
    play(&m);
    memcpy(seconds, m.clock, (size_t)W * sizeof(*seconds));
    *num_events = m.num_events;
    if (m.overflow) return RT_TOO_LARGE;
    return m.num_events <= capacity || capacity == 0 ? RT_OK : RT_CAPACITY;
}
