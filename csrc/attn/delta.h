// The delta of the backward, row by row, in the order in which rows usually lie in memory.
#ifndef RINGTILE_ATTN_DELTA_H
#define RINGTILE_ATTN_DELTA_H

#include "../chunk.h"

// Tokens [first, last), counted over all batches.
static void attn_delta(const rt_attn_delta_params *p, const void *dout, const void *out, const double *dlse,
                       void *delta, int64_t first, int64_t last) {
    _Static_assert((int)RT_MAX_HEAD_DIM <= (int)CHUNK, "a row is one chunk");
    real dout_row[CHUNK], out_row[CHUNK];
    for (int64_t i = first; i < last; i++) {
        const int64_t batch = i / p->num_queries, token = i % p->num_queries;
        const int64_t dout_at = batch * p->dout_stride[0] + token * p->dout_stride[1],
                      out_at = batch * p->out_stride[0] + token * p->out_stride[1];
        for (int64_t head = 0; head < p->num_heads; head++) {
            load_chunk(p->dtype, dout, dout_at + head * p->dout_stride[2], p->v_head_dim, dout_row);
            load_chunk(p->dtype, out, out_at + head * p->out_stride[2], p->v_head_dim, out_row);
            vec sum = vec_set(0);
            for (int64_t d = 0; d < p->v_head_dim; d += LANES) sum += vec_load(dout_row + d) * vec_load(out_row + d);
            const int64_t at = (batch * p->num_heads + head) * p->num_queries + token;
            ((real *)delta)[at] = (real)((double)vec_reduce_sum(sum) - (dlse == NULL ? 0 : dlse[at]));
        }
    }
}

#endif // RINGTILE_ATTN_DELTA_H
