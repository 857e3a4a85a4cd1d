// Bounds on a kernel's error against the f64 reference, to first order in u, the roundoff of the kernel's arithmetic.
// The checks allow twice that, for the terms in u^2 and for the reference's own rounding.
//
// A sum of n terms, in any order, is off by at most (n - 1) u times the sum of their absolute values; a multiply-add
// rounds once. exp is off by 1.1 ulp = 2.2 u, log by 2 u, tanh by 1.6 ulp = 3.2 u.
#ifndef RINGTILE_TESTS_ATTN_BOUNDS_H
#define RINGTILE_TESTS_ATTN_BOUNDS_H

#include "attn_case.h"

// Weights below exp(-87) may become 0; this bounds such a weight times anything it multiplies here.
static const double TINY = 1e-36;

// The rows of k that a query attends; returns how many.
static inline int64_t attended_keys(const attn_case *c, int64_t b, int64_t token, int64_t *rows) {
    const int64_t at = b * c->p.mask_batch_stride + token;
    int64_t num_rows = 0;
    for (const rt_run *run = c->runs; run < c->runs + c->p.num_k_runs; run++)
        for (int64_t j = 0; j < run->length; j++) {
            const int64_t position = run->global_begin + j * run->stride;
            if (position < c->begin[at] || position >= c->end[at]) continue;
            if (c->key_begin != NULL) {
                const int64_t key = b * c->p.key_mask_batch_stride + run->local_begin + j;
                const int64_t query = c->q_positions[token];
                if (query < c->key_begin[key] || query >= c->key_end[key]) continue;
            }
            rows[num_rows++] = run->local_begin + j;
        }
    return num_rows;
}

typedef struct pair_score {
    double score, error; // error: bound on the kernel's
} pair_score;

// The kernel rounds scale, scale * q, and D multiply-adds; with bf16 pairs it rounds scale, D multiply-adds, the first
// of them exact, and the sum times scale. Either way (D + 2) u sum |scale q k|. With a softcap it rounds the softcap
// and its inverse, x = score / softcap twice, tanh, and the product; |x tanh'(x)| <= |tanh x|, so that adds
// 9 u |score|.
static inline pair_score score_of(const attn_case *c, double u, int64_t b, int64_t token, int64_t head, int64_t row) {
    const rt_attn_block *p = &c->p;
    const int64_t kv_head = head / (p->num_heads / p->num_kv_heads);
    double dot = 0, magnitude = 0;
    for (int64_t d = 0; d < p->head_dim; d++) {
        const double term = p->scale * get(&c->x[Q], b, token, head, d) * get(&c->x[K], b, row, kv_head, d);
        dot += term;
        magnitude += fabs(term);
    }
    const double error =
        isfinite(magnitude) ? (double)(p->head_dim + 2) * u * magnitude : 0; // an infinite score is exact
    if (p->softcap == 0) return (pair_score){dot, error};
    const double score = p->softcap * tanh(dot / p->softcap);
    return (pair_score){score, error + 9 * u * fabs(score)};
}

// The most tiles of 128 keys that a call can have.
static inline int64_t max_tiles(const rt_attn_block *p) { return p->num_k_runs + p->num_keys / 128; }

// One query, and the rows of k that it attends.
typedef struct attended_query {
    int64_t b, token, head, num_rows;
    const int64_t *rows;
} attended_query;

// Forward of one query. weight = exp(score - top) / sum, and top only shifts both, so
//   relative = d score + u |score - top| (the differences telescope over the tiles) + 4 u (an exp and its product) for
//              each tile with a higher maximum, and for the weight itself
//   d out    = sum of weight relative (|v| + |out|) + 2 (terms of a sum) u sum of weight |v|
// With dropout, v is the value times its factor, which costs two more roundings; weights may be rounded as well.
//   d lse    = sum of weight relative + (terms of a sum) u + 2 u (|top| + |lse|)
// A merge with the earlier state is a convex combination: it keeps the errors of both and adds those of its share,
// (d lse + 20 u) max |v|, and those of the larger lse.
static inline void query_bounds(const attn_case *c, double u, int64_t num_calls, attended_query at, attn_case *bounds) {
    const int64_t b = at.b, token = at.token, head = at.head, n = at.num_rows, *rows = at.rows;
    const int64_t kv_head = head / (c->p.num_heads / c->p.num_kv_heads), steps = max_tiles(&c->p);
    pair_score *scores = must_alloc((size_t)n * sizeof(*scores));
    double top = -INFINITY, sum = 0, dlse = 0;
    double *weights = must_alloc((size_t)n * sizeof(*weights)), *factors = must_alloc((size_t)n * sizeof(*factors));
    const double roundings = (c->p.dropout > 0 ? 2 * u : 0) + c->weight_roundoff;
    for (int64_t j = 0; j < n; j++) {
        scores[j] = score_of(c, u, b, token, head, rows[j]);
        top = fmax(top, scores[j].score);
        factors[j] = dropout_factor(c, b, token, head, rows[j]);
    }
    if (top == -INFINITY) { // like a query that attends no key
        free(factors);
        free(weights);
        free(scores);
        return;
    }
    for (int64_t j = 0; j < n; j++) weights[j] = exp(scores[j].score - top), sum += weights[j];
    for (int64_t j = 0; j < n; j++) {
        weights[j] /= sum;
        if (weights[j] > 0)
            dlse += weights[j] * (scores[j].error + u * (fabs(scores[j].score - top) + 4 * (double)(steps + 1)));
    }
    const double lse = top + log(sum), before = get(&c->x[LSE], b, token, head, 0), num_terms = (double)(n + steps + 4);
    const double largest = fmax(fabs(lse), isfinite(before) ? fabs(before) : 0), calls = (double)num_calls;
    dlse += u * (num_terms + 2 * (fabs(top) + fabs(lse)));
    set(&bounds->x[LSE], b, token, head, 0, dlse + calls * 4 * u * (1 + largest));
    for (int64_t d = 0; d < c->p.v_head_dim; d++) {
        double out = 0, error = 0, absolute = 0, max_value = fabs(get(&c->x[OUT], b, token, head, d));
        for (int64_t j = 0; j < n; j++) out += weights[j] * factors[j] * get(&c->x[V], b, rows[j], kv_head, d);
        for (int64_t j = 0; j < n; j++) {
            const double weight = weights[j];
            const double v = factors[j] * fabs(get(&c->x[V], b, rows[j], kv_head, d));
            if (weight == 0) continue;
            error += weight * (scores[j].error + u * (fabs(scores[j].score - top) + 4 * (double)(steps + 1))) *
                     (v + fabs(out));
            error += weight * v * roundings;
            absolute += weight * v;
            max_value = fmax(max_value, v);
        }
        error += 2 * num_terms * u * absolute + calls * (dlse + 20 * u) * max_value + (double)n * TINY * max_value;
        set(&bounds->x[OUT], b, token, head, d, error);
    }
    free(factors);
    free(weights);
    free(scores);
}

// Bounds of out and lse: 0 for queries that attend no key, whose out and lse must not change.
static inline void forward_bounds(const attn_case *before, double u, int64_t num_calls, attn_case *bounds) {
    const rt_attn_block *p = &before->p;
    int64_t *rows = must_alloc((size_t)p->num_keys * sizeof(*rows));
    fill(&bounds->x[OUT], 0);
    fill(&bounds->x[LSE], 0);
    for (int64_t b = 0; b < p->batch; b++)
        for (int64_t token = 0; token < p->num_queries; token++) {
            const int64_t n = attended_keys(before, b, token, rows);
            for (int64_t head = 0; n > 0 && head < p->num_heads; head++)
                query_bounds(before, u, num_calls, (attended_query){b, token, head, n, rows}, bounds);
        }
    free(rows);
}

// Backward of one pair; kernel and reference get the same lse and delta. With P = exp(score - lse), g = dP - delta and
// slope c = 1 - (score / softcap)^2:
//   d P / P = d score + u |score - lse| + 4 u       d g = (Dv + 2) u (sum |dout v| + |delta|)
// With dropout, dP and dv are multiplied by a factor, which costs two more roundings.
//   d c     = 2 |score| d score / softcap^2 + 3 u   dS = P g c, and each of dv, dq, dk is one sum of pairs
static inline void pair_bounds(const attn_case *c, double u, int64_t b, int64_t token, int64_t head, int64_t row,
                               int64_t num_keys, attn_case *bounds) {
    const rt_attn_block *p = &c->p;
    const int64_t group = p->num_heads / p->num_kv_heads, kv_head = head / group;
    const double key_terms = (double)(num_keys + max_tiles(p) + 6);
    const double query_terms = (double)(2 * p->num_queries * group + 6);
    const pair_score s = score_of(c, u, b, token, head, row);
    const double lse = get(&c->x[LSE], b, token, head, 0), delta = get(&c->x[DELTA], b, token, head, 0);
    const double weight = exp(s.score - lse), relative = s.error + u * (fabs(s.score - lse) + 4);
    if (weight == 0) return;
    const double factor = dropout_factor(c, b, token, head, row), roundings = p->dropout > 0 ? 2 * u : 0;
    const double rounded = c->weight_roundoff; // P in dv, dS in dq and dk
    double dweight = 0, magnitude = fabs(delta);
    for (int64_t d = 0; d < p->v_head_dim; d++) {
        const double dout = get(&c->x[DOUT], b, token, head, d),
                     term = factor * dout * get(&c->x[V], b, row, kv_head, d);
        dweight += term;
        magnitude += fabs(term);
        add(&bounds->x[DV], b, row, kv_head, d,
            factor * weight * fabs(dout) * (relative + roundings + rounded + query_terms * u));
    }
    const double tanh_x = p->softcap > 0 ? s.score / p->softcap : 0, slope = 1 - tanh_x * tanh_x;
    const double dslope = p->softcap > 0 ? 2 * fabs(tanh_x) * s.error / p->softcap + 3 * u : 0;
    const double g = fabs(dweight - delta), dg = ((double)(p->v_head_dim + 2) * u + roundings) * magnitude;
    const double dscore = weight * g * slope;
    const double error = dscore * (relative + rounded + 3 * u) + weight * slope * dg + weight * g * dslope;
    for (int64_t d = 0; d < p->head_dim; d++) {
        const double q = fabs(p->scale * get(&c->x[Q], b, token, head, d));
        const double k = fabs(p->scale * get(&c->x[K], b, row, kv_head, d));
        add(&bounds->x[DQ], b, token, head, d, (error + key_terms * u * dscore) * k);
        add(&bounds->x[DK], b, row, kv_head, d, (error + query_terms * u * dscore) * q);
    }
}

// Bounds of dq, dk and dv. Their earlier values take part in a rounding per tile or task.
static inline void backward_bounds(const attn_case *before, double u, int64_t num_calls, attn_case *bounds) {
    const rt_attn_block *p = &before->p;
    const double num_terms = (double)(num_calls * (max_tiles(p) + p->num_heads / p->num_kv_heads * p->num_queries));
    for (int i = DQ; i <= DV; i++) FOR_EACH_ELEMENT(&bounds->x[i], b, token, head, d)
    set(&bounds->x[i], b, token, head, d, num_terms * (u * fabs(get(&before->x[i], b, token, head, d)) + TINY));
    int64_t *rows = must_alloc((size_t)p->num_keys * sizeof(*rows));
    for (int64_t b = 0; b < p->batch; b++)
        for (int64_t token = 0; token < p->num_queries; token++) {
            const int64_t n = attended_keys(before, b, token, rows);
            for (int64_t head = 0; head < p->num_heads; head++)
                for (int64_t j = 0; j < n; j++) pair_bounds(before, u, b, token, head, rows[j], n, bounds);
        }
    free(rows);
}

#endif // RINGTILE_TESTS_ATTN_BOUNDS_H
