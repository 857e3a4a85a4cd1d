#include "core_on_emulator.h"
#include "../../csrc/attn/attn.h"
#include "../../csrc/glu/glu.h"
#include "../../csrc/loss/cross_entropy.h"
#include "../../csrc/seq/rows.h"
#include "../../cuda/device/ptx.cuh"
#include "../../cuda/ringtile_cuda.h"

namespace {

int64_t bytes_of(rt_dtype dtype) { return dtype == RT_F64 ? 8 : dtype == RT_F32 ? 4 : 2; }

void lend_rows(const void *begin, rt_dtype dtype, int64_t num_rows, int64_t num_cols, int64_t stride, bool writable) {
    if (num_rows > 0 && num_cols > 0)
        emulator::lend(begin, ((num_rows - 1) * stride + num_cols) * bytes_of(dtype), writable);
}

// Lends an array whose size along x.dim is len. An element may be a single byte, so cells are single bytes.
void lend_strided(const rt_rows_tensor &x, const void *begin, int64_t len, const int64_t *strides, bool writable) {
    int64_t last = 0;
    for (int64_t d = 0; d < x.ndim; d++) {
        const int64_t size = d == x.dim ? len : x.sizes[d];
        if (size == 0) return;
        last += (size - 1) * strides[d];
    }
    emulator::lend(begin, (last + 1) * x.element_bytes, writable, 1);
}

template <class Call> rt_status lent(Call call) {
    const rt_status status = call();
    emulator::take_back_all();
    return status;
}

// Returns a table of the runs for some of the calls, whatever their number.
const rt_run *lend_rows_of(const rt_rows_params *p, rt_rows_pass pass, rt_dtype dtype) {
    int64_t num_bytes;
    if (rt_rows_check(p, pass, dtype, &num_bytes) != RT_OK || num_bytes == 0) return nullptr;
    for (int64_t i = 0; i < p->num_tensors; i++) {
        const rt_rows_tensor &x = p->tensors[i];
        lend_strided(x, x.global, x.global_len, x.global_strides, pass != RT_ROWS_PACK);
        lend_strided(x, x.local, x.sizes[x.dim], x.local_strides, pass == RT_ROWS_PACK);
    }
    if (p->num_runs % 4 < 2) return nullptr;
    emulator::lend(p->runs, p->num_runs * (int64_t)sizeof(rt_run), false, 8);
    return p->runs;
}

void lend_glu(const rt_glu_params *p, const void *gate, const void *up, const void *prod, bool backward) {
    if (rt_glu_check(p, gate, up, prod, backward) != RT_OK) return;
    lend_rows(gate, p->dtype, p->num_rows, p->num_cols, p->gate_stride, backward);
    lend_rows(up, p->dtype, p->num_rows, p->num_cols, p->up_stride, backward);
    lend_rows(prod, p->dtype, p->num_rows, p->num_cols, p->prod_stride, true);
}

} // namespace

rt_status emulated_rows_pack(const rt_rows_params *p, rt_parallel) {
    const rt_run *const table = lend_rows_of(p, RT_ROWS_PACK, RT_F32);
    return lent([&] { return rt_cuda_rows_pack(p, table, nullptr); });
}

rt_status emulated_rows_unpack(const rt_rows_params *p, rt_parallel) {
    const rt_run *const table = lend_rows_of(p, RT_ROWS_UNPACK, RT_F32);
    return lent([&] { return rt_cuda_rows_unpack(p, table, nullptr); });
}

rt_status emulated_rows_add(const rt_rows_params *p, rt_dtype dtype, rt_parallel) {
    const rt_run *const table = lend_rows_of(p, RT_ROWS_ADD, dtype);
    return lent([&] { return rt_cuda_rows_add(p, dtype, table, nullptr); });
}

rt_status emulated_glu_fwd(const rt_glu_params *p, const void *gate, const void *up, void *prod, rt_parallel) {
    lend_glu(p, gate, up, prod, false);
    return lent([&] { return rt_cuda_glu_fwd(p, gate, up, prod, nullptr); });
}

rt_status emulated_glu_bwd(const rt_glu_params *p, void *gate, void *up, void *dprod, rt_parallel) {
    lend_glu(p, gate, up, dprod, true);
    return lent([&] { return rt_cuda_glu_bwd(p, gate, up, dprod, nullptr); });
}

rt_status emulated_cross_entropy_fwd_bwd(const rt_cross_entropy_params *p, void *logits, const int64_t *labels,
                                         void *loss, void *lse, rt_parallel) {
    if (rt_cross_entropy_check(p, logits, labels, loss, lse) == RT_OK && p->num_tokens > 0) {
        const int64_t T = p->num_tokens, state_bytes = p->dtype == RT_F64 ? 8 : 4;
        lend_rows(logits, p->dtype, T, p->vocab_size, p->logits_stride, p->want_grad);
        emulator::lend(labels, T * 8, false);
        emulator::lend(loss, T * state_bytes, true);
        emulator::lend(lse, T * state_bytes, true);
    }
    return lent([&] { return rt_cuda_cross_entropy_fwd_bwd(p, logits, labels, loss, lse, nullptr); });
}

rt_status emulated_attn_delta(const rt_attn_delta_params *p, const void *dout, const void *out, const double *dlse,
                              void *delta, rt_parallel) {
    if (rt_attn_check_delta(p, dout, out, dlse, delta) == RT_OK && p->batch > 0 && p->num_queries > 0) {
        const int64_t num_rows = p->batch * p->num_queries * p->num_heads;
        const auto extent = [&](const int64_t (&stride)[3]) {
            return (p->batch - 1) * stride[0] + (p->num_queries - 1) * stride[1] + (p->num_heads - 1) * stride[2] +
                   p->v_head_dim;
        };
        emulator::lend(dout, extent(p->dout_stride) * bytes_of(p->dtype), false);
        emulator::lend(out, extent(p->out_stride) * bytes_of(p->dtype), false);
        if (dlse != nullptr) emulator::lend(dlse, num_rows * 8, false);
        emulator::lend(delta, num_rows * (p->dtype == RT_F64 ? 8 : 4), true);
    }
    return lent([&] { return rt_cuda_attn_delta(p, dout, out, dlse, delta, nullptr); });
}

rt_status emulated_attn_merge(const rt_attn_merge_params *p, rt_parallel) {
    if (rt_attn_check_merge(p) == RT_OK && p->part_batch > 0 && p->part_queries > 0) {
        const int64_t num_parts = p->part_batch * p->part_queries, state = p->dtype == RT_F64 ? 8 : 4;
        const int64_t num_rows = p->batch * p->num_queries * p->num_heads;
        const int64_t last = (p->part_batch - 1) * p->part_stride[0] + (p->part_queries - 1) * p->part_stride[1] +
                             (p->num_heads - 1) * p->part_stride[2];
        emulator::lend(p->part, (last + p->v_head_dim) * bytes_of(p->dtype), false);
        emulator::lend(p->part_lse, num_parts * p->num_heads * state, false);
        emulator::lend(p->out, num_rows * p->v_head_dim * state, p->rounded == nullptr);
        emulator::lend(p->lse, num_rows * 8, true);
        if (p->rounded != nullptr) emulator::lend(p->rounded, num_rows * p->v_head_dim * bytes_of(p->dtype), true);
        if (p->rows != nullptr) emulator::lend(p->rows, num_parts * 8, false);
    }
    return lent([&] { return rt_cuda_attn_merge(p, nullptr); });
}
