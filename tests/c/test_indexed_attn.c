// Attention over chosen keys against its definition in float64, on any number of threads; and what it refuses.
#include "check.h"

typedef struct indexed_case {
    rt_indexed_attn_params p;
    int64_t outs, lses, qs, ks, vs; // elements of out, lse, q, k and v
} indexed_case;

static void *random_array(rt_dtype dtype, int64_t count, uint64_t *state) {
    void *array = must_alloc((size_t)count * dtype_bytes(dtype));
    for (int64_t i = 0; i < count; i++) store_element(dtype, array, i, 2 * random_unit(state));
    return array;
}

static rt_dtype state_of(rt_dtype dtype) { return dtype == RT_F64 ? RT_F64 : RT_F32; }

// Keys of a head lie together, or those of a token. Indices: some are no key, some come twice.
static indexed_case new_case(rt_dtype dtype, int64_t B, int64_t N, int64_t K, int64_t H, int64_t G, int64_t D,
                             int64_t Dv, int64_t I, bool heads_first, uint64_t *state) {
    indexed_case c = {
        .outs = B * N * H * Dv, .lses = B * H * N, .qs = B * N * H * D, .ks = B * K * G * D, .vs = B * K * G * Dv};
    int32_t *indices = must_alloc((size_t)(B * N * I) * sizeof(*indices));
    for (int64_t i = 0; i < B * N * I; i++) indices[i] = (int32_t)random_int(state, -2, K + 1);
    if (B > 0 && N > 1)
        for (int64_t i = 0; i < I; i++) indices[i] = i % 2 ? -1 : INT32_MAX; // a query without a key
    c.p = (rt_indexed_attn_params){.dtype = dtype,
                                   .batch = B,
                                   .num_queries = N,
                                   .num_keys = K,
                                   .num_heads = H,
                                   .num_kv_heads = G,
                                   .head_dim = D,
                                   .v_head_dim = Dv,
                                   .num_indices = I,
                                   .scale = 0.7,
                                   .indices = indices,
                                   .q = random_array(dtype, c.qs, state),
                                   .k = random_array(dtype, c.ks, state),
                                   .v = random_array(dtype, c.vs, state),
                                   .k_stride = {K * G * D, heads_first ? D : G * D, heads_first ? K * D : D},
                                   .v_stride = {K * G * Dv, heads_first ? Dv : G * Dv, heads_first ? K * Dv : Dv},
                                   .out = random_array(dtype, c.outs, state),
                                   .lse = random_array(RT_F64, c.lses, state),
                                   .dout = random_array(dtype, c.outs, state),
                                   .dlse = random_array(RT_F64, c.lses, state),
                                   .dq = random_array(dtype, c.qs, state),
                                   .dk = random_array(state_of(dtype), c.ks, state),
                                   .dv = random_array(state_of(dtype), c.vs, state)};
    c.p.workspace_bytes = rt_indexed_attn_workspace_bytes(&c.p, 16);
    c.p.workspace = aligned_alloc(64, (size_t)c.p.workspace_bytes);
    return c;
}

static void free_case(indexed_case *c) {
    const void *arrays[] = {c->p.indices, c->p.q,    c->p.k,  c->p.v,  c->p.out, c->p.lse,
                            c->p.dout,    c->p.dlse, c->p.dq, c->p.dk, c->p.dv,  c->p.workspace};
    for (size_t i = 0; i < sizeof(arrays) / sizeof(arrays[0]); i++) free((void *)(uintptr_t)arrays[i]);
}

// The number of one key, or of one query row, of an array of the case.
static double key_of(const indexed_case *c, const void *array, const int64_t stride[3], int64_t b, int64_t key,
                     int64_t g, int64_t d) {
    return load_element(c->p.dtype, array, b * stride[0] + key * stride[1] + g * stride[2] + d);
}

// Sums of a result and of the absolute values of its terms, and the error that the terms bring.
typedef struct sums {
    double value, size, error;
} sums;

static void add(sums *to, double term, double error) { to->value += term, to->size += fabs(term), to->error += error; }

// u: rounding of the result; e: of the arithmetic, in which a sum of n terms takes n roundings of their size.
static void check_sum(rt_dtype stored, const void *array, int64_t at, sums want, double n, double e) {
    const double bound = want.error + e * (n + 4) * want.size + unit_roundoff(stored) * fabs(want.value);
    CHECK_CLOSE(load_element(stored, array, at), want.value, bound + smallest(stored));
}

// Each head of each query by the definition; adds what it gives to the gradients of the keys, (B, G, K, .).
static void check_query(const indexed_case *c, int64_t b, int64_t n, int64_t h, sums *dk, sums *dv) {
    const rt_indexed_attn_params *p = &c->p;
    const int64_t H = p->num_heads, G = p->num_kv_heads, g = h / (H / G), I = p->num_indices, K = p->num_keys;
    const int64_t D = p->head_dim, Dv = p->v_head_dim, row = (b * p->num_queries + n) * H + h;
    const int64_t lse_at = (b * H + h) * p->num_queries + n;
    const int32_t *indices = p->indices + (b * p->num_queries + n) * I;
    const double e = unit_roundoff(state_of(p->dtype)), lse = p->lse[lse_at];
    double scores[64], largest = -INFINITY, off[64], most_off = 0, total = 0, delta = -p->dlse[lse_at], delta_size = 0;
    for (int64_t i = 0; i < I; i++) {
        sums score = {0};
        if (indices[i] < 0 || indices[i] >= K) continue;
        for (int64_t d = 0; d < D; d++)
            add(&score,
                p->scale * load_element(p->dtype, p->q, row * D + d) *
                    key_of(c, p->k, p->k_stride, b, indices[i], g, d),
                0);
        scores[i] = score.value, off[i] = e * (double)(D + 3) * score.size;
        largest = fmax(largest, score.value), most_off = fmax(most_off, off[i]);
    }
    const double shift = largest == -INFINITY ? 0 : largest;
    for (int64_t i = 0; i < I; i++)
        if (indices[i] >= 0 && indices[i] < K) total += exp(scores[i] - shift);
    // An exp of 2 ulp of a rounded difference, a sum of I terms, and a division.
    const double relative = 2 * most_off + e * (double)(I + 8) + 2 * e * fabs(log(fmax(total, 1)));
    CHECK_CLOSE(lse, log(total) + shift, relative);
    for (int64_t d = 0; d < Dv; d++) {
        const double dout = load_element(p->dtype, p->dout, row * Dv + d);
        const double term = dout * load_element(p->dtype, p->out, row * Dv + d);
        delta += term, delta_size += fabs(term);
        sums out = {0};
        for (int64_t i = 0; i < I; i++) {
            if (indices[i] < 0 || indices[i] >= K) continue;
            const double value = exp(scores[i] - shift) / total * key_of(c, p->v, p->v_stride, b, indices[i], g, d);
            add(&out, value, relative * fabs(value));
        }
        check_sum(p->dtype, p->out, row * Dv + d, out, (double)I, e);
    }
    sums dq[64] = {0};
    for (int64_t i = 0; i < I; i++) {
        if (indices[i] < 0 || indices[i] >= K) continue;
        // With the lse that the backward gets; its difference from a score has |score| + |lse| roundings.
        const double weight = exp(scores[i] - lse), of_weight = off[i] + e * (8 + fabs(scores[i]) + fabs(lse));
        sums dweight = {0};
        for (int64_t d = 0; d < Dv; d++)
            add(&dweight,
                load_element(p->dtype, p->dout, row * Dv + d) * key_of(c, p->v, p->v_stride, b, indices[i], g, d), 0);
        const double dscore = p->scale * weight * (dweight.value - delta);
        const double roundings = (double)(Dv + 4) * (dweight.size + delta_size + fabs(delta));
        const double dscore_off = fabs(p->scale) * weight * e * roundings + fabs(dscore) * (of_weight + 4 * e);
        const int64_t key_row = (b * G + g) * K + indices[i];
        for (int64_t d = 0; d < D; d++) {
            const double k = key_of(c, p->k, p->k_stride, b, indices[i], g, d);
            const double q = load_element(p->dtype, p->q, row * D + d);
            add(&dq[d], dscore * k, dscore_off * fabs(k));
            add(&dk[key_row * D + d], dscore * q, dscore_off * fabs(q));
        }
        for (int64_t d = 0; d < Dv; d++) {
            const double dout = load_element(p->dtype, p->dout, row * Dv + d);
            add(&dv[key_row * Dv + d], weight * dout, weight * of_weight * fabs(dout));
        }
    }
    for (int64_t d = 0; d < D; d++) check_sum(p->dtype, p->dq, row * D + d, dq[d], (double)I, e);
}

static void check_case(indexed_case *c, int64_t num_threads) {
    rt_indexed_attn_params *p = &c->p;
    CHECK_STATUS(rt_indexed_attn_fwd(p, threads_of(num_threads)), RT_OK);
    CHECK_STATUS(rt_indexed_attn_bwd(p, threads_of(num_threads)), RT_OK);
    sums *dk = calloc((size_t)c->ks + 1, sizeof(sums)), *dv = calloc((size_t)c->vs + 1, sizeof(sums));
    for (int64_t b = 0; b < p->batch; b++)
        for (int64_t n = 0; n < p->num_queries; n++)
            for (int64_t h = 0; h < p->num_heads; h++) check_query(c, b, n, h, dk, dv);
    const double e = unit_roundoff(state_of(p->dtype)),
                 terms = (double)(p->num_queries * p->num_heads * p->num_indices);
    for (int64_t i = 0; i < c->ks; i++) check_sum(state_of(p->dtype), p->dk, i, dk[i], terms, e);
    for (int64_t i = 0; i < c->vs; i++) check_sum(state_of(p->dtype), p->dv, i, dv[i], terms, e);
    free(dk);
    free(dv);
}

static void test_every_dtype_head_count_and_tail(void) {
    static const int64_t dims[][2] = {{1, 1}, {3, 7}, {16, 16}, {33, 20}, {64, 5}},
                         heads[][2] = {{1, 1}, {4, 2}, {3, 3}};
    uint64_t state = 1;
    for (int type = 0; type < NUM_DTYPES; type++)
        for (int i = 0; i < 5; i++)
            for (int j = 0; j < 3; j++) {
                const int64_t count = random_int(&state, 0, 40), B = random_int(&state, 1, 2);
                const int64_t N = random_int(&state, 1, 9), K = random_int(&state, 1, 30);
                indexed_case c = new_case(all_dtypes[type], B, N, K, heads[j][0], heads[j][1], dims[i][0], dims[i][1],
                                          count, i % 2 == 0, &state);
                check_case(&c, random_int(&state, 1, 3));
                free_case(&c);
            }
}

static void test_empty_sizes(void) {
    uint64_t state = 2;
    static const int64_t sizes[][4] = {{0, 3, 3, 2}, {1, 0, 3, 2}, {1, 3, 0, 2}, {1, 3, 3, 0}}; // B, N, K, I
    for (int i = 0; i < 4; i++) {
        indexed_case c = new_case(RT_F32, sizes[i][0], sizes[i][1], sizes[i][2], 2, 1, 8, 4, sizes[i][3], true, &state);
        check_case(&c, 2);
        free_case(&c);
    }
}

static void test_same_bits_on_any_number_of_threads(void) {
    uint64_t state = 3;
    indexed_case c = new_case(RT_BF16, 2, 37, 20, 4, 2, 24, 16, 11, true, &state);
    void *before[5], *const arrays[] = {c.p.out, c.p.lse, c.p.dq, c.p.dk, c.p.dv};
    const size_t bytes[] = {(size_t)c.outs * 2, (size_t)c.lses * 8, (size_t)c.qs * 2, (size_t)c.ks * 4,
                            (size_t)c.vs * 4};
    for (int64_t threads = 1; threads <= 5; threads += 2) {
        CHECK_STATUS(rt_indexed_attn_fwd(&c.p, threads_of(threads)), RT_OK);
        CHECK_STATUS(rt_indexed_attn_bwd(&c.p, threads_of(threads)), RT_OK);
        for (int i = 0; i < 5; i++) {
            if (threads == 1) before[i] = memcpy(must_alloc(bytes[i]), arrays[i], bytes[i]);
            CHECK(memcmp(before[i], arrays[i], bytes[i]) == 0);
        }
    }
    for (int i = 0; i < 5; i++) free(before[i]);
    free_case(&c);
}

#define REFUSED(status, change)                                                                                        \
    do {                                                                                                               \
        rt_indexed_attn_params p = c.p;                                                                                \
        change;                                                                                                        \
        CHECK_STATUS(rt_indexed_attn_fwd(&p, no_threads()), status);                                                   \
        CHECK_STATUS(rt_indexed_attn_bwd(&p, no_threads()), status);                                                   \
    } while (0)

static void test_what_it_refuses(void) {
    uint64_t state = 4;
    indexed_case c = new_case(RT_F32, 1, 3, 5, 4, 2, 8, 8, 4, false, &state);
    CHECK_STATUS(rt_indexed_attn_fwd(NULL, no_threads()), RT_BAD_POINTER);
    REFUSED(RT_BAD_DTYPE, p.dtype = (rt_dtype)9);
    REFUSED(RT_BAD_SHAPE, p.num_queries = -1);
    REFUSED(RT_BAD_SHAPE, p.num_indices = -1);
    REFUSED(RT_BAD_HEADS, p.num_kv_heads = 3);
    REFUSED(RT_BAD_HEAD_DIM, p.v_head_dim = RT_MAX_HEAD_DIM + 1);
    REFUSED(RT_BAD_SCALE, p.scale = 1e300);
    REFUSED(RT_TOO_LARGE, p.num_keys = INT64_MAX / 8);
    REFUSED(RT_TOO_LARGE, p.num_indices = INT64_MAX / 8);
    REFUSED(RT_TOO_LARGE, p.k_stride[1] = INT64_MAX / 8);
    REFUSED(RT_BAD_POINTER, p.indices = NULL);
    REFUSED(RT_BAD_POINTER, p.k = (const char *)p.k + 1);
    REFUSED(RT_SHARED_MEMORY, (p.lse = (double *)(uintptr_t)p.q, p.dlse = p.lse, p.dq = (void *)(uintptr_t)p.q));
    REFUSED(RT_WORKSPACE, p.workspace_bytes = rt_indexed_attn_workspace_bytes(&p, 1) - 1);
    REFUSED(RT_WORKSPACE, p.workspace = NULL);
    CHECK_INT(rt_indexed_attn_workspace_bytes(NULL, 1), 0);
    CHECK_INT(rt_indexed_attn_workspace_bytes(&c.p, 0), 0);
    free_case(&c);
}

int main(void) {
    check_isa_or_skip();
    test_every_dtype_head_count_and_tail();
    test_empty_sizes();
    test_same_bits_on_any_number_of_threads();
    test_what_it_refuses();
    return check_finish();
}
