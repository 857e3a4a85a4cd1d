// The size of the register tile that every matrix product is made of: GEMM_ROWS rows by PANEL_VECS vectors. The
// instruction set picks RT_PANEL_VECS so that the tile's sums, one row of B and one number of A fill its registers.
#ifndef RINGTILE_ATTN_REGISTER_TILE_H
#define RINGTILE_ATTN_REGISTER_TILE_H

#include "../vec.h"

enum {
    GEMM_ROWS = 6,
    PANEL_VECS = RT_PANEL_VECS,
    PANEL = PANEL_VECS * LANES,
};

#endif // RINGTILE_ATTN_REGISTER_TILE_H
