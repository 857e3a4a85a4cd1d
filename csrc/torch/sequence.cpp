// The schemas of all ops, the ops that only the CPU has (layouts, plans, weight gradients and the instruction set), and
// the numbers of the C core that Python asks for.
#include <Python.h> // first, as its documentation asks

#include "../../cuda/ringtile_cuda.h"
#include "binding.h"

#include <algorithm>
#include <numeric>

namespace {

using namespace ringtile;

// ---- layouts and plans -------------------------------------------------------------------------

Tensor on_host(const std::vector<int64_t> &sizes, ScalarType dtype) {
    return torch::stable::empty(sizes, dtype, std::nullopt, Device(torch::headeronly::DeviceType::CPU));
}

// A (R, 5) tensor whose rows are (rank, run), rank after rank, as runs and the offset of each rank's first.
struct LayoutArg {
    std::vector<rt_run> runs;
    std::vector<int64_t> offsets; // (W + 1)

    LayoutArg(const Tensor &layout, const char *op) {
        const Arg arg = {op, "layout", layout};
        arg.on_cpu().dtype(ScalarType::Long).dim(2).contiguous().sizes({layout.size(0), 5});
        const auto *row = arg.data<const int64_t>();
        for (int64_t i = 0; i < layout.size(0); ++i, row += 5) {
            const auto last = static_cast<int64_t>(offsets.size()) - 1;
            require(row[0] == last || row[0] == last + 1, op, "layout rows must go rank after rank from 0, but row ", i,
                    " is of rank ", row[0]);
            if (row[0] == last + 1) offsets.push_back(i);
            runs.push_back({row[1], row[2], row[3], row[4]});
        }
        offsets.push_back(static_cast<int64_t>(runs.size()));
    }
    int64_t num_ranks() const { return static_cast<int64_t>(offsets.size()) - 1; }
};

void layout_check(const Tensor &layout, int64_t seq_len, int64_t world_size) {
    const char *op = "layout_check";
    const LayoutArg arg(layout, op);
    require(arg.num_ranks() == world_size, op, "layout has runs for ", arg.num_ranks(), " ranks, expected world_size ",
            world_size);
    require(seq_len >= 0, op, "seq_len is ", seq_len, ", expected at least 0");
    std::vector<rt_layout_place> places(arg.runs.size());
    check(rt_layout_check(arg.runs.data(), arg.offsets.data(), world_size, seq_len, places.data()), op);
}

// A mask and a layout. begin, end: (rows, S), or (2, rows, S), of the queries, then of the keys.
struct PlanArg {
    const LayoutArg layout;
    Tensor workspace;
    rt_plan_params p;

    PlanArg(const Tensor &begin, const Tensor &end, const Tensor &layout_rows, const Op &op)
        : layout(layout_rows, op.name) {
        const bool two_sides = op.arg("begin", begin).x.dim() == 3;
        if (!two_sides) op.arg("begin", begin).dim(2);
        const int64_t rows = begin.size(begin.dim() - 2), S = begin.size(begin.dim() - 1);
        std::vector<int64_t> sizes = {rows, S};
        if (two_sides) sizes.insert(sizes.begin(), 2);
        p = {};
        p.num_ranks = layout.num_ranks(), p.seq_len = S, p.mask_batch = rows;
        p.runs = layout.runs.data(), p.run_offsets = layout.offsets.data();
        p.begin = op.dense<const int32_t>("begin", begin, ScalarType::Int, sizes);
        p.end = op.dense<const int32_t>("end", end, ScalarType::Int, sizes);
        if (two_sides) p.key_begin = p.begin + rows * S, p.key_end = p.end + rows * S;
        p.workspace_bytes = rt_plan_workspace_bytes(&p);
        workspace = on_host({p.workspace_bytes}, ScalarType::Byte); // torch aligns to 64 bytes
        p.workspace = workspace.data_ptr();
    }
};

// (N) of runs (R, 4) that fill the rows: the position in each.
Tensor run_positions(const Tensor &runs) {
    const char *op = "run_positions";
    const auto [list, num_runs] = runs_of(runs, op, "runs");
    int64_t num_rows = 0;
    for (int64_t r = 0; r < num_runs; ++r) {
        require(list[r].length >= 1 && list[r].length <= INT32_MAX - num_rows, op, "runs are of no or too many rows");
        num_rows += list[r].length;
    }
    Tensor positions = on_host({num_rows}, ScalarType::Long);
    check(rt_runs_positions(list, num_runs, static_cast<int64_t *>(positions.data_ptr()), num_rows), op);
    return positions;
}

// rounds (1 or W, 5), transfers (2, W, 5): incoming and outgoing, runs (M, 4),
// as the fields of rt_round, rt_transfer and rt_run.
std::tuple<Tensor, Tensor, Tensor> plan_rank(const Tensor &begin, const Tensor &end, const Tensor &layout, int64_t rank,
                                             bool at_once) {
    const char *op = "plan_rank";
    const PlanArg arg(begin, end, layout, Op(op));
    const int64_t W = arg.p.num_ranks;
    require(rank >= 0 && rank < W, op, "rank is ", rank, ", expected one of ", W, " ranks");
    static_assert(sizeof(rt_round) == 5 * sizeof(int64_t) && sizeof(rt_transfer) == 5 * sizeof(int64_t));
    const Tensor rounds = on_host({at_once ? 1 : W, 5}, ScalarType::Long);
    const Tensor transfers = on_host({2, W, 5}, ScalarType::Long);
    auto *incoming = static_cast<rt_transfer *>(transfers.data_ptr());
    std::vector<rt_run> found(4 * arg.layout.runs.size()); // as many as there often are
    rt_rank_plan plan = {static_cast<rt_round *>(rounds.data_ptr()), incoming, incoming + W, nullptr, 0, 0};
    rt_status status = RT_CAPACITY;
    for (int i = 0; i < 2 && status == RT_CAPACITY; ++i) {
        found.resize(std::max(found.size(), static_cast<size_t>(plan.num_runs)));
        plan.runs = found.data(), plan.capacity = static_cast<int64_t>(found.size());
        status = rt_plan_rank(&arg.p, rank, at_once, &plan);
    }
    check(status, op);
    const Tensor runs = on_host({plan.num_runs, 4}, ScalarType::Long);
    std::copy(plan.runs, plan.runs + plan.num_runs, static_cast<rt_run *>(runs.data_ptr()));
    return {rounds, transfers, runs};
}

// keys, pairs (W, W): [query rank][key rank].
std::tuple<Tensor, Tensor> plan_counts(const Tensor &begin, const Tensor &end, const Tensor &layout) {
    const PlanArg arg(begin, end, layout, Op("plan_counts"));
    const Tensor keys = on_host({arg.p.num_ranks, arg.p.num_ranks}, ScalarType::Long);
    const Tensor pairs = on_host({arg.p.num_ranks, arg.p.num_ranks}, ScalarType::Long);
    check(rt_plan_counts(&arg.p, static_cast<int64_t *>(keys.data_ptr()), static_cast<int64_t *>(pairs.data_ptr())),
          "plan_counts");
    return {keys, pairs};
}

// owner (C): the rank of each chunk of tokens; loads (W). begin, end (rows, S) of the queries; num_keys (rows, S) with
// two sides.
std::tuple<Tensor, Tensor> balance(const Tensor &begin, const Tensor &end, const std::optional<Tensor> &num_keys,
                                   int64_t world_size, int64_t chunk) {
    const Op op("balance");
    op.arg("begin", begin).dim(2);
    rt_balance_params p = {};
    p.num_ranks = world_size, p.mask_batch = begin.size(0), p.seq_len = begin.size(1), p.chunk = chunk;
    const std::vector<int64_t> sizes = {p.mask_batch, p.seq_len};
    p.begin = op.dense<const int32_t>("begin", begin, ScalarType::Int, sizes);
    p.end = op.dense<const int32_t>("end", end, ScalarType::Int, sizes);
    p.num_keys = op.dense<const int64_t>("num_keys", num_keys, ScalarType::Long, sizes);
    p.workspace_bytes = rt_balance_workspace_bytes(&p);
    const Tensor workspace = on_host({p.workspace_bytes}, ScalarType::Byte); // torch aligns to 64 bytes
    p.workspace = workspace.data_ptr();
    const bool is_valid = p.workspace_bytes > 0;
    const Tensor owner = on_host({is_valid ? (p.seq_len - 1) / chunk + 1 : 1}, ScalarType::Long);
    const Tensor loads = on_host({is_valid ? world_size : 1}, ScalarType::Long);
    check(rt_balance(&p, static_cast<int64_t *>(owner.data_ptr()), static_cast<int64_t *>(loads.data_ptr())), op.name);
    return {owner, loads};
}

// pieces (P, 6), as the fields of rt_piece, and the number of each row of the mask; none of these if there are too
// many, or the keys are in no order.
std::tuple<Tensor, Tensor> pieces(const Tensor &begin, const Tensor &end, const Tensor &k_runs,
                                  const std::optional<Tensor> &key_begin, const std::optional<Tensor> &key_end,
                                  const std::optional<Tensor> &positions, int64_t max_pieces, int64_t max_stretches) {
    const Op op("pieces");
    op.arg("begin", begin).dim(2);
    rt_pieces_params p = {};
    p.mask_batch = begin.size(0), p.num_queries = begin.size(1), p.max_stretches = max_stretches;
    const std::vector<int64_t> of_queries = {p.mask_batch, p.num_queries};
    p.begin = op.dense<const int32_t>("begin", begin, ScalarType::Int, of_queries);
    p.end = op.dense<const int32_t>("end", end, ScalarType::Int, of_queries);
    std::tie(p.k_runs, p.num_k_runs) = runs_of(k_runs, op.name, "k_runs");
    require(key_begin.has_value() == key_end.has_value() && key_begin.has_value() == positions.has_value(), op.name,
            "key_begin, key_end and positions need each other");
    p.num_keys = key_begin.has_value() ? op.arg("key_begin", *key_begin).dim(2).x.size(1) : INT32_MAX;
    p.key_begin = op.dense<const int32_t>("key_begin", key_begin, ScalarType::Int, {p.mask_batch, p.num_keys});
    p.key_end = op.dense<const int32_t>("key_end", key_end, ScalarType::Int, {p.mask_batch, p.num_keys});
    p.positions = op.dense<const int64_t>("positions", positions, ScalarType::Long, {p.num_queries});
    require(max_pieces >= 0 && max_pieces <= INT32_MAX, op.name, "max_pieces is ", max_pieces,
            ", expected 0..2^31 - 1");
    const Tensor bounds = on_host({p.num_queries, 2}, ScalarType::Int);
    const Tensor room = on_host({max_pieces, 6}, ScalarType::Long);
    static_assert(sizeof(rt_piece) == 6 * sizeof(int64_t), "a piece is one row of the tensor");
    auto *found = static_cast<rt_piece *>(room.data_ptr());
    p.bounds = static_cast<int32_t *>(bounds.data_ptr());
    Tensor counts = on_host({p.mask_batch}, ScalarType::Long);
    auto *count = static_cast<int64_t *>(counts.data_ptr());
    const rt_status status = rt_pieces(&p, found, max_pieces, count);
    if (status == RT_CAPACITY || status == RT_BAD_POSITIONS)
        return {on_host({0, 6}, ScalarType::Long), on_host({0}, ScalarType::Long)};
    check(status, op.name);
    const int64_t total = std::accumulate(count, count + p.mask_batch, int64_t{0});
    Tensor result = on_host({total, 6}, ScalarType::Long);
    std::copy(found, found + total, static_cast<rt_piece *>(result.data_ptr()));
    return {result, counts};
}

// begin, end, key_begin, key_end (rows, S): of a query, and of a key. counts int64 (rows, S): the keys of each query;
// first, after int32: the smallest of them, and the largest plus 1.
std::tuple<Tensor, Tensor, Tensor> mask_hulls(const Tensor &begin, const Tensor &end, const Tensor &key_begin,
                                              const Tensor &key_end, int64_t last) {
    const Op op("mask_hulls");
    op.arg("begin", begin).dim(2);
    const int64_t rows = begin.size(0), S = begin.size(1);
    const auto data_of = [&](const char *name, const Tensor &x) {
        return op.dense<const int32_t>(name, x, ScalarType::Int, {rows, S});
    };
    rt_meetings_params p = {S, S, S, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, last};
    p.x_begin = data_of("begin", begin), p.x_end = data_of("end", end);
    p.y_begin = data_of("key_begin", key_begin), p.y_end = data_of("key_end", key_end);
    const Tensor counts = on_host({rows, S}, ScalarType::Long);
    const Tensor first = on_host({rows, S}, ScalarType::Int), after = on_host({rows, S}, ScalarType::Int);
    std::vector<int32_t> scratch(static_cast<size_t>(rt_meetings_scratch_len(S, S)) + 1);
    for (int64_t at = 0; at < rows * S; at += S, p.x_begin += S, p.x_end += S, p.y_begin += S, p.y_end += S)
        check(rt_meetings(&p, static_cast<int64_t *>(counts.data_ptr()) + at,
                          static_cast<int32_t *>(first.data_ptr()) + at, static_cast<int32_t *>(after.data_ptr()) + at,
                          scratch.data()),
              op.name);
    return {counts, first, after};
}

// (1,) int64: equal on two ranks exactly if their masks and layouts are, up to a 64-bit collision.
Tensor digest(const Tensor &begin, const Tensor &end, const Tensor &layout) {
    uint64_t value = 0;
    const Tensor *parts[] = {&begin, &end, &layout};
    for (const Tensor *part : parts) {
        const Arg arg = {"digest", "begin, end or layout", *part};
        const int64_t num_bytes = part->numel() * static_cast<int64_t>(part->element_size());
        check(rt_digest(arg.on_cpu().contiguous().data(), num_bytes, value, &value), "digest");
    }
    Tensor result = on_host({1}, ScalarType::Long);
    *static_cast<int64_t *>(result.data_ptr()) = static_cast<int64_t>(value);
    return result;
}

// ---- weight gradients --------------------------------------------------------------------------

void weight_grad_add_(const Tensor &dout, const Tensor &x, Tensor sum) {
    const Op op("weight_grad_add_");
    rt_weight_grad_params p = {};
    const ScalarType dtype = op.arg("dout", dout).dim(2).scalar_type();
    p.dtype = dtype_of(dout, op.name);
    p.num_tokens = dout.size(0), p.num_outputs = dout.size(1), p.num_inputs = op.arg("x", x).dim(2).x.size(1);
    int64_t stride[3][1];
    p.dout = op.rows("dout", dout, dtype, {p.num_tokens, p.num_outputs}, stride[0]), p.dout_stride = stride[0][0];
    p.x = op.rows("x", x, dtype, {p.num_tokens, p.num_inputs}, stride[1]), p.x_stride = stride[1][0];
    p.sum = op.rows("sum", sum, state_dtype(p.dtype), {p.num_outputs, p.num_inputs}, stride[2]);
    p.sum_stride = stride[2][0];
    p.workspace_bytes = rt_weight_grad_workspace_bytes(&p, torch_threads().num_workers);
    const Tensor workspace = on_host({p.workspace_bytes}, ScalarType::Byte);
    p.workspace = workspace.data_ptr();
    check(rt_weight_grad_add(&p, torch_threads()), op.name);
}

// ---- instruction set ---------------------------------------------------------------------------

int64_t cpu_isa() {
    rt_isa isa = RT_ISA_GENERIC;
    check(rt_cpu_isa(&isa), "cpu_isa");
    return static_cast<int64_t>(isa);
}

} // namespace

// ---- registration ------------------------------------------------------------------------------

STABLE_TORCH_LIBRARY(ringtile, m) {
    m.def("attn_fwd_(Tensor q, Tensor k, Tensor v, Tensor begin, Tensor end, Tensor k_runs, "
          "Tensor(a!) out, Tensor(b!) lse, float scale, float softcap, bool fresh=False, float dropout=0.0, "
          "int seed=0, int step=0, int stream=0, Tensor? rows=None, Tensor? positions=None, "
          "Tensor(c!)? rounded_out=None, Tensor? key_begin=None, Tensor? key_end=None) -> ()");
    m.def("attn_bwd_(Tensor q, Tensor k, Tensor v, Tensor begin, Tensor end, Tensor k_runs, "
          "Tensor dout, Tensor lse, Tensor delta, Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv, "
          "float scale, float softcap, bool fresh=False, float dropout=0.0, int seed=0, int step=0, "
          "int stream=0, Tensor? rows=None, Tensor? positions=None, Tensor(d!)? rounded_dk=None, "
          "Tensor(e!)? rounded_dv=None, Tensor? key_begin=None, Tensor? key_end=None) -> ()");
    m.def("attn_delta(Tensor dout, Tensor out, Tensor? dlse=None) -> Tensor");
    m.def("attn_merge_(Tensor part, Tensor part_lse, Tensor(a!) out, Tensor(b!) lse, bool fresh, int first_row=0, "
          "Tensor? rows=None, Tensor(c!)? rounded=None) -> ()");
    m.def("rows_pack_(Tensor[] xs, Tensor runs, int dim, Tensor(a!)[] ys, Tensor? table=None) -> ()");
    m.def("rows_unpack_(Tensor(a!)[] xs, Tensor runs, int dim, Tensor[] ys, Tensor? table=None) -> ()");
    m.def("rows_add_(Tensor(a!)[] xs, Tensor runs, int dim, Tensor[] ys, Tensor? table=None) -> ()");
    m.def("layout_check(Tensor layout, int seq_len, int world_size) -> ()");
    m.def("plan_rank(Tensor begin, Tensor end, Tensor layout, int rank, bool at_once) -> (Tensor, Tensor, Tensor)");
    m.def("plan_counts(Tensor begin, Tensor end, Tensor layout) -> (Tensor, Tensor)");
    m.def("run_positions(Tensor runs) -> Tensor");
    m.def("balance(Tensor begin, Tensor end, Tensor? num_keys, int world_size, int chunk) -> (Tensor, Tensor)");
    m.def("pieces(Tensor begin, Tensor end, Tensor k_runs, Tensor? key_begin, Tensor? key_end, Tensor? positions, "
          "int max_pieces, int max_stretches) -> (Tensor, Tensor)");
    m.def("mask_hulls(Tensor begin, Tensor end, Tensor key_begin, Tensor key_end, int last=0) -> (Tensor, Tensor, "
          "Tensor)");
    m.def("digest(Tensor begin, Tensor end, Tensor layout) -> Tensor");
    m.def("glu_fwd(Tensor gate, Tensor up, int kind) -> Tensor");
    m.def("glu_bwd_(Tensor(a!) gate, Tensor(b!) up, Tensor(c!) dprod, int kind) -> ()");
    m.def("cross_entropy_fwd_bwd_(Tensor(a!) logits, Tensor labels, Tensor(b!) loss, Tensor(c!) lse, "
          "int ignore_index, float label_smoothing, float softcap, float z_loss, bool want_grad) -> ()");
    m.def("weight_grad_add_(Tensor dout, Tensor x, Tensor(a!) sum) -> ()");
    m.def("scan(Tensor q, Tensor k, Tensor v, Tensor g, Tensor? beta, Tensor? dt, Tensor? D, "
          "Tensor seq_idx, Tensor? initial_state, float scale, bool keep) -> (Tensor, Tensor, Tensor)");
    m.def("scan_backward(Tensor dout, Tensor? dfinal_state, Tensor q, Tensor k, Tensor v, Tensor g, "
          "Tensor? beta, Tensor? dt, Tensor? D, Tensor seq_idx, Tensor? initial_state, Tensor states, "
          "float scale) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
    m.def("selective_scan(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor seq_idx, "
          "Tensor? initial_state, bool keep) -> (Tensor, Tensor, Tensor)");
    m.def("selective_scan_backward(Tensor dout, Tensor? dfinal_state, Tensor x, Tensor dt, Tensor A, "
          "Tensor B, Tensor C, Tensor? D, Tensor seq_idx, Tensor? initial_state, Tensor states) -> "
          "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
    m.def("causal_conv1d(Tensor x, Tensor weight, Tensor? bias, Tensor seq_idx, Tensor? initial_state, "
          "bool silu) -> (Tensor, Tensor)");
    m.def("causal_conv1d_backward(Tensor dy, Tensor? dfinal_state, Tensor x, Tensor weight, Tensor? bias, "
          "Tensor seq_idx, Tensor? initial_state, bool silu) -> (Tensor, Tensor, Tensor, Tensor)");
    m.def("cpu_isa() -> int");
}

STABLE_TORCH_LIBRARY_IMPL(ringtile, CPU, m) {
    m.impl("layout_check", TORCH_BOX(&layout_check));
    m.impl("plan_rank", TORCH_BOX(&plan_rank));
    m.impl("plan_counts", TORCH_BOX(&plan_counts));
    m.impl("run_positions", TORCH_BOX(&run_positions));
    m.impl("balance", TORCH_BOX(&balance));
    m.impl("pieces", TORCH_BOX(&pieces));
    m.impl("mask_hulls", TORCH_BOX(&mask_hulls));
    m.impl("digest", TORCH_BOX(&digest));
    m.impl("weight_grad_add_", TORCH_BOX(&weight_grad_add_));
}

// It has no tensor argument to dispatch on.
STABLE_TORCH_LIBRARY_IMPL(ringtile, CompositeExplicitAutograd, m) { m.impl("cpu_isa", TORCH_BOX(&cpu_isa)); }

// ---- constants ---------------------------------------------------------------------------------

int ringtile_add_constants(PyObject *module) {
    const std::pair<const char *, long> numbers[] = {{"MAX_HEAD_DIM", RT_MAX_HEAD_DIM},
                                                     {"MAX_CONV_WIDTH", RT_MAX_CONV_WIDTH},
                                                     {"CHUNK_TOKENS", RT_CHUNK_TOKENS},
                                                     {"SELECTIVE_CHANNELS", RT_SELECTIVE_CHANNELS},
                                                     {"MAX_RUNS_WITHOUT_TABLE", RT_CUDA_MAX_RUNS}};
    for (const auto &[name, number] : numbers)
        if (PyModule_AddIntConstant(module, name, number) != 0) return -1;
    PyObject *isas = Py_BuildValue(rt_last_isa() == RT_ISA_AMX_BF16 ? "(sssss)" : "(ssss)", rt_isa_name(RT_ISA_GENERIC),
                                   rt_isa_name(RT_ISA_AVX2), rt_isa_name(RT_ISA_AVX512),
                                   rt_isa_name(RT_ISA_AVX512_BF16), rt_isa_name(RT_ISA_AMX_BF16));
    PyObject *kinds = Py_BuildValue("{s:i,s:i,s:i,s:i}", "silu", RT_GLU_SILU, "gelu", RT_GLU_GELU, "gelu_tanh",
                                    RT_GLU_GELU_TANH, "relu", RT_GLU_RELU);
    const bool added = isas != nullptr && kinds != nullptr && PyModule_AddObjectRef(module, "ISA_NAMES", isas) == 0 &&
                       PyModule_AddObjectRef(module, "GLU_KINDS", kinds) == 0;
    Py_XDECREF(isas), Py_XDECREF(kinds);
    return added ? 0 : -1;
}
