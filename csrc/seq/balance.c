// Which rank holds which chunk of tokens, so that all ranks do the same work and few keys travel.
//
// Attention costs what the mask lets attend, so the work of a chunk of queries is a sum over the mask, and the keys
// that it needs lie between its smallest begin and its largest end. Every rank gets as many chunks as another (give or
// take one): what a layer does token by token is then even too. That is number partitioning, which has no fast exact
// solution; here is a greedy local search. It starts from the layout that moves least and trades chunks away from the
// busiest rank, each time those two whose trade evens out most for the keys that it makes travel.
//
// Shapes: S global tokens, W ranks, C chunks of tokens.
#include "../arrays.h"
#include "../ringtile.h"

#include <string.h>

#define TOLERANCE 1.03 // busiest rank over the mean at which the search ends
enum { MAX_TRADES = 400 };
enum { MAX_GIVEN = 128, MAX_TAKEN = 512 }; // chunks that a trade chooses among, spread over those that there are

typedef struct table {
    int64_t num_ranks, num_chunks, all_work;
    int64_t *work;         // (C) unmasked pairs
    int32_t *first, *last; // (C) chunk c needs the keys of chunks first[c] .. last[c] - 1
    int64_t *loads;        // (W) the work of each rank
    int32_t *users;        // (W, C) how many chunks of a rank need the keys of chunk k
    // (W, C + 1) of the chunks below k that the rank does not hold: those that one of its chunks needs, and those that
    // none does.
    int32_t *only, *unused;
    int64_t *travel; // (MAX_GIVEN, W) and (MAX_TAKEN)
    int64_t *owner;  // (C)
} table;

static rt_status check_params(const rt_balance_params *p) {
    if (p == NULL) return RT_BAD_POINTER;
    if (p->num_ranks < 1 || p->seq_len < 1 || p->seq_len > INT32_MAX || p->mask_batch < 0 || p->chunk < 1 ||
        (p->seq_len - 1) / p->chunk + 1 < p->num_ranks)
        return RT_BAD_SHAPE;
    const int64_t of_mask[] = {p->mask_batch, p->seq_len}, S = p->seq_len;
    const int64_t of_table[] = {p->num_ranks, (S - 1) / p->chunk + 2};
    if (!rt_array_fits(2, of_mask, NULL, sizeof(int64_t)) || p->mask_batch > INT64_MAX / S / S ||
        !rt_array_fits(2, of_table, NULL, MAX_GIVEN * sizeof(int64_t)))
        return RT_TOO_LARGE;
    if (p->mask_batch == 0) return RT_OK;
    if (!rt_points_to(p->begin, sizeof(int32_t)) || !rt_points_to(p->end, sizeof(int32_t))) return RT_BAD_POINTER;
    return (uintptr_t)p->num_keys % sizeof(int64_t) == 0 ? RT_OK : RT_BAD_POINTER;
}

// Returns the bytes of the table, of params that pass, and sets t to it unless it is NULL.
static int64_t lay_out(const rt_balance_params *p, table *t) {
    const int64_t W = p->num_ranks, C = (p->seq_len - 1) / p->chunk + 1;
    const int64_t sizes[] = {8 * C,     4 * C,           4 * C,           8 * W,
                             4 * W * C, 4 * W * (C + 1), 4 * W * (C + 1), 8 * (MAX_GIVEN * W + MAX_TAKEN)};
    enum { NUM_PARTS = sizeof(sizes) / sizeof(*sizes) };
    void *at[NUM_PARTS];
    const int64_t num_bytes = rt_lay_out(t == NULL ? NULL : p->workspace, NUM_PARTS, sizes, at);
    if (t != NULL) *t = (table){W, C, 0, at[0], at[1], at[2], at[3], at[4], at[5], at[6], at[7], NULL};
    return num_bytes;
}

int64_t rt_balance_workspace_bytes(const rt_balance_params *p) {
    return check_params(p) == RT_OK ? lay_out(p, NULL) : 0;
}

// With two sides a chunk may need fewer keys: the pairs are exact, what travels is an estimate.
static void find_needs(const rt_balance_params *p, table *t) {
    const int64_t S = p->seq_len;
    for (int64_t c = 0; c < t->num_chunks; c++) {
        const int64_t from = c * p->chunk, to = from + p->chunk < S ? from + p->chunk : S;
        int64_t smallest = S, largest = 0, pairs = 0;
        for (int64_t row = 0; row < p->mask_batch; row++)
            for (int64_t i = row * S + from; i < row * S + to; i++) {
                const int64_t begin = rt_clamp(p->begin[i], S), end = rt_clamp(p->end[i], S);
                if (end <= begin) continue;
                smallest = begin < smallest ? begin : smallest, largest = end > largest ? end : largest;
                pairs += p->num_keys == NULL ? end - begin : rt_clamp(p->num_keys[i], S);
            }
        t->work[c] = pairs, t->all_work += pairs;
        t->last[c] = (int32_t)((largest + p->chunk - 1) / p->chunk);
        t->first[c] = (int32_t)(smallest < largest ? smallest / p->chunk : t->last[c]);
    }
}

static bool holds(const table *t, int64_t rank, int64_t chunk) { return t->owner[chunk] == rank; }

static void count_unheld(table *t, int64_t rank) {
    const int64_t C = t->num_chunks;
    const int32_t *users = t->users + rank * C;
    int32_t *only = t->only + rank * (C + 1), *unused = t->unused + rank * (C + 1);
    only[0] = unused[0] = 0;
    for (int64_t k = 0; k < C; k++) {
        const bool held = holds(t, rank, k);
        only[k + 1] = only[k] + (!held && users[k] == 1), unused[k + 1] = unused[k] + (!held && users[k] == 0);
    }
}

static void add(table *t, int64_t chunk, int64_t rank, int sign) {
    t->loads[rank] += sign * t->work[chunk];
    int32_t *users = t->users + rank * t->num_chunks;
    for (int64_t k = t->first[chunk]; k < t->last[chunk]; k++) users[k] += sign;
}

// Gives each chunk its owner; returns the work of the busiest rank.
static int64_t start(table *t) {
    memset(t->loads, 0, (size_t)t->num_ranks * sizeof(*t->loads));
    memset(t->users, 0, (size_t)(t->num_ranks * t->num_chunks) * sizeof(*t->users));
    for (int64_t c = 0; c < t->num_chunks; c++) add(t, c, t->owner[c], 1);
    int64_t most = 0;
    for (int64_t rank = 0; rank < t->num_ranks; rank++) {
        count_unheld(t, rank);
        most = t->loads[rank] > most ? t->loads[rank] : most;
    }
    return most;
}

static bool is_even(const table *t, int64_t load) {
    return (double)load <= TOLERANCE * (double)t->all_work / (double)t->num_ranks;
}

// How many chunks of keys ranks need of other ranks.
static int64_t num_travelling(const table *t) {
    int64_t num = 0;
    for (int64_t rank = 0; rank < t->num_ranks; rank++)
        for (int64_t k = 0; k < t->num_chunks; k++) num += t->users[rank * t->num_chunks + k] > 0 && !holds(t, rank, k);
    return num;
}

// By how many chunks travel grows when a chunk moves to another rank. Of a trade it is an estimate.
static int64_t travel_of_moving(const table *t, int64_t chunk, int64_t rank) {
    const int64_t C = t->num_chunks, owner = t->owner[chunk], first = t->first[chunk], last = t->last[chunk];
    const bool needs_itself = first <= chunk && chunk < last;
    // The old rank no longer receives what only this chunk needed, but may now have to receive the chunk.
    const int32_t *only = t->only + owner * (C + 1), *unused = t->unused + rank * (C + 1);
    const int64_t spared = only[last] - only[first];
    const bool still_needed = t->users[owner * C + chunk] > needs_itself;
    // The new rank receives what none of its chunks needed, but not the chunk.
    const bool used = t->users[rank * C + chunk] > 0;
    return unused[last] - unused[first] - (used || needs_itself) - spared + still_needed;
}

// Lists chunks that the rank holds, or does not, evenly spread; returns how many.
static int64_t list_some(const table *t, int64_t rank, bool held, int64_t most, int64_t *chunks) {
    int64_t num = 0, found = 0, seen = 0;
    for (int64_t c = 0; c < t->num_chunks; c++) num += holds(t, rank, c) == held;
    const int64_t step = num > most ? (num + most - 1) / most : 1;
    for (int64_t c = 0; c < t->num_chunks; c++)
        if (holds(t, rank, c) == held && seen++ % step == 0) chunks[found++] = c;
    return found;
}

// Trades a chunk of the busiest rank for one of another; returns whether any trade helps.
static bool trade(table *t, int64_t busiest) {
    int64_t mine[MAX_GIVEN], others[MAX_TAKEN], given = -1, taken = -1;
    int64_t *const to_others = t->travel, *const to_busiest = t->travel + MAX_GIVEN * t->num_ranks;
    const int64_t num_mine = list_some(t, busiest, true, MAX_GIVEN, mine);
    const int64_t num_others = list_some(t, busiest, false, MAX_TAKEN, others);
    for (int64_t i = 0; i < num_mine; i++)
        for (int64_t rank = 0; rank < t->num_ranks; rank++)
            to_others[i * t->num_ranks + rank] = rank == busiest ? 0 : travel_of_moving(t, mine[i], rank);
    for (int64_t j = 0; j < num_others; j++) to_busiest[j] = travel_of_moving(t, others[j], busiest);
    double best = 0;
    for (int64_t i = 0; i < num_mine; i++)
        for (int64_t j = 0; j < num_others; j++) {
            // Giving g units of work away when the receiver has r less: the sum of squares falls by 2 g (r - g).
            const int64_t rank = t->owner[others[j]], work = t->work[mine[i]] - t->work[others[j]];
            const double gain = (double)work * (double)(t->loads[busiest] - t->loads[rank] - work);
            if (gain <= best) continue; // nor better when divided
            const int64_t travel = to_others[i * t->num_ranks + rank] + to_busiest[j];
            const double worth = gain / (double)((travel > 0 ? travel : 0) + 1);
            if (worth > best) best = worth, given = mine[i], taken = others[j];
        }
    if (given < 0) return false;
    const int64_t other = t->owner[taken];
    add(t, given, busiest, -1), add(t, given, other, 1);
    add(t, taken, other, -1), add(t, taken, busiest, 1);
    t->owner[given] = other, t->owner[taken] = busiest;
    count_unheld(t, busiest), count_unheld(t, other);
    return true;
}

static int64_t busiest_of(const table *t) {
    int64_t busiest = 0;
    for (int64_t rank = 1; rank < t->num_ranks; rank++)
        if (t->loads[rank] > t->loads[busiest]) busiest = rank;
    return busiest;
}

static void deal_contiguous(table *t) {
    for (int64_t c = 0; c < t->num_chunks; c++) t->owner[c] = c * t->num_ranks / t->num_chunks;
}

// Returns whether ranks get as many chunks, give or take one.
static bool deal_zigzag(table *t) {
    const int64_t W = t->num_ranks, C = t->num_chunks;
    int64_t *const counts = t->loads, fewest = C / W;
    memset(counts, 0, (size_t)W * sizeof(*counts));
    for (int64_t c = 0; c < C; c++) {
        const int64_t half = c * 2 * W / C;
        t->owner[c] = half < W ? half : 2 * W - 1 - half;
        counts[t->owner[c]]++;
    }
    bool is_even = true;
    for (int64_t rank = 0; rank < W; rank++) is_even &= counts[rank] == fewest || counts[rank] == fewest + (C % W > 0);
    return is_even;
}

rt_status rt_balance(const rt_balance_params *p, int64_t *owner) {
    const rt_status status = check_params(p);
    if (status != RT_OK) return status;
    if (!rt_points_to(owner, sizeof(*owner))) return RT_BAD_POINTER;
    if (!rt_points_to(p->workspace, 64) || p->workspace_bytes < lay_out(p, NULL)) return RT_WORKSPACE;
    table t;
    lay_out(p, &t);
    t.owner = owner;
    find_needs(p, &t);
    // Trades spoil the neighbourhood that makes a layout cheap, so a named layout that is even as it is comes first.
    int64_t of_zigzag = INT64_MAX, of_contiguous = INT64_MAX;
    if (deal_zigzag(&t) && is_even(&t, start(&t))) of_zigzag = num_travelling(&t);
    deal_contiguous(&t);
    if (is_even(&t, start(&t))) of_contiguous = num_travelling(&t);
    if (of_zigzag < of_contiguous)
        deal_zigzag(&t);
    else
        for (int i = 0; of_contiguous == INT64_MAX && i < MAX_TRADES; i++) {
            const int64_t busiest = busiest_of(&t);
            if (is_even(&t, t.loads[busiest]) || !trade(&t, busiest)) break;
        }
    return RT_OK;
}
