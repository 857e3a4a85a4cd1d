// The merge of a block into the running out, row by row, in the order in which rows usually lie in memory.
#ifndef RINGTILE_ATTN_MERGE_H
#define RINGTILE_ATTN_MERGE_H

#include "../chunk.h"
#include "merge_lse.h"

// Rows [first, last) of part, counted over all its batches.
static void attn_merge(const rt_attn_merge_params *p, int64_t first, int64_t last) {
    const int64_t N = p->num_queries, M = p->part_queries, H = p->num_heads, D = p->v_head_dim;
    const rt_dtype state = p->dtype == RT_F64 ? RT_F64 : RT_F32;
    real part[CHUNK], out[CHUNK] = {0}; // out stays 0 where it is fresh
    for (int64_t i = first; i < last; i++) {
        const int64_t batch = i / M, token = i % M,
                      row = p->rows != NULL ? p->rows[i] : p->first_row + batch * N + token;
        for (int64_t head = 0; head < H; head++) {
            const int64_t at = (row * H + head) * D;
            double *const lse = p->lse + (row / N * H + head) * N + row % N;
            const double part_lse = ((const real *)p->part_lse)[(batch * H + head) * M + token];
            const rt_merged merged = rt_merge_lse(p->fresh ? (double)-INFINITY : *lse, part_lse);
            const real share = (real)merged.share;
            const int64_t from = batch * p->part_stride[0] + token * p->part_stride[1] + head * p->part_stride[2];
            load_chunk(p->dtype, p->part, from, D, part);
            if (!p->fresh) load_chunk(state, p->out, at, D, out);
            for (int64_t d = 0; d < D; d += LANES) {
                const vec x = vec_load(part + d), y = vec_load(out + d), way = x - y;
                vec_store(part + d, share < (real)0.5 ? way * share + y : way * (share - 1) + x); // from the nearer
            }
            *lse = merged.lse;
            if (p->rounded != NULL)
                store_chunk(p->dtype, p->rounded, at, D, part);
            else
                store_chunk(state, p->out, at, D, part);
        }
    }
}

#endif // RINGTILE_ATTN_MERGE_H
