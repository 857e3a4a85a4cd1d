// The kernels that exist once per instruction set, and the table of one compiled set.
#ifndef RINGTILE_ISA_KERNELS_H
#define RINGTILE_ISA_KERNELS_H

#include "../ringtile.h"
#include "../scan/chunks.h"
#include "target.h"

// Forward: dprod, dgate and dup are NULL. Backward, in place: dgate, dup and prod are the arrays gate, up and dprod.
typedef struct rt_glu_arrays {
    const void *gate, *up, *dprod;
    void *dgate, *dup, *prod;
} rt_glu_arrays;

// Of a block of rt_weight_grad_add's sum: whole register tiles, and whole squares of matrix tiles.
enum { RT_GRAD_ROWS = 96 };

typedef struct rt_kernels {
    // Rows [first, last) of rt_glu_fwd or rt_glu_bwd.
    void (*glu)(const rt_glu_params *p, const rt_glu_arrays *arrays, int64_t first, int64_t last);
    // Tokens [first, last) of rt_cross_entropy_fwd_bwd; the caller has checked every label.
    void (*cross_entropy)(const rt_cross_entropy_params *p, void *logits, const int64_t *labels, void *loss, void *lse,
                          int64_t first, int64_t last);
    // One of attn_num_tasks(p) tasks of rt_attn_fwd or rt_attn_bwd. workspace: this worker's scratch, of
    // attn_scratch_bytes. progress (attn_num_tasks): zeros before the first task; orders the tasks
    // (attn/backward.inc). shared: what the tasks share, of attn_shared_bytes(p, backward), which attn_open_shared has
    // opened for the call; NULL if that is 0 (attn/packed_keys.h).
    int64_t (*attn_num_tasks)(const rt_attn_block *p);
    int64_t (*attn_scratch_bytes)(const rt_attn_block *p, bool backward);
    int64_t (*attn_shared_bytes)(const rt_attn_block *p, bool backward);
    void (*attn_open_shared)(const rt_attn_block *p, bool backward, char *shared);
    void (*attn_forward)(const rt_attn_fwd_params *p, int64_t task, char *shared, char *workspace);
    void (*attn_backward)(const rt_attn_bwd_params *p, int64_t task, _Atomic int64_t *progress, char *shared,
                          char *workspace);
    // Keys [first, last) of rounded_dk and rounded_dv from dk and dv, counted over all batches.
    void (*attn_round_keys)(const rt_attn_bwd_params *p, int64_t first, int64_t last);
    // Tokens [first, last) of rt_attn_delta, counted over all batches.
    void (*attn_delta)(const rt_attn_delta_params *p, const void *dout, const void *out, const double *dlse,
                       void *delta, int64_t first, int64_t last);
    // Rows [first, last) of rt_attn_merge's part, counted over all its batches.
    void (*attn_merge)(const rt_attn_merge_params *p, int64_t first, int64_t last);
    // rt_weight_grad_add: packs columns [first, last) of x into what the tasks share, of weight_grad_shared_bytes; then
    // adds to columns [first_col, last_col) of RT_GRAD_ROWS rows of the sum. workspace: this worker's scratch.
    int64_t (*weight_grad_shared_bytes)(const rt_weight_grad_params *p);
    int64_t (*weight_grad_scratch_bytes)(const rt_weight_grad_params *p);
    void (*weight_grad_pack)(const rt_weight_grad_params *p, int64_t first, int64_t last, char *shared);
    void (*weight_grad_add)(const rt_weight_grad_params *p, int64_t first_row, int64_t first_col, int64_t last_col,
                            const char *shared, char *workspace);
    // Of head head, batch batch of rt_scan_fwd or rt_scan_bwd. workspace: this worker's scratch, of scan_scratch_bytes.
    int64_t (*scan_scratch_bytes)(const rt_scan_params *p, bool backward);
    void (*scan_forward)(const rt_scan_params *p, const rt_chunks *chunks, int64_t batch, int64_t head,
                         char *workspace);
    // turn: of the heads that share q and k; turn->before is NULL for the first.
    void (*scan_backward)(const rt_scan_params *p, const rt_chunks *chunks, int64_t batch, int64_t head,
                          const rt_scan_turn *turn, char *workspace);
    // Channels [first, last), at most RT_SELECTIVE_CHANNELS, of rt_selective_fwd or rt_selective_bwd. turn: of the
    // channels before.
    int64_t (*selective_scratch_bytes)(const rt_selective_params *p, bool backward);
    void (*selective_forward)(const rt_selective_params *p, const rt_chunk_rows *rows, int64_t first, int64_t last,
                              char *workspace);
    void (*selective_backward)(const rt_selective_params *p, const rt_chunk_rows *rows, int64_t first, int64_t last,
                               const rt_scan_turn *turn, char *workspace);
    // Channels [first, last) of rt_conv_fwd or rt_conv_bwd.
    void (*conv_forward)(const rt_conv_params *p, int64_t first, int64_t last);
    void (*conv_backward)(const rt_conv_params *p, int64_t first, int64_t last);
} rt_kernels;

// Whether this CPU has an instruction set.
bool rt_cpu_has(rt_isa isa);

// The kernels for a dtype on this CPU.    RT_BAD_DTYPE, RT_BAD_ISA, RT_ISA_MISSING
rt_status rt_kernels_for(rt_dtype dtype, const rt_kernels **kernels);

extern const rt_kernels rt_kernels_f64, rt_kernels_generic;
#if defined(__x86_64__)
extern const rt_kernels rt_kernels_avx2, rt_kernels_avx512, rt_kernels_avx512_bf16;
#endif
#ifdef RT_HAS_AMX
extern const rt_kernels rt_kernels_amx_bf16;
#endif

#endif // RINGTILE_ISA_KERNELS_H
