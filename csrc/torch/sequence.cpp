// The schemas of all ops, the ops that only the CPU has (layouts, plans and the instruction set), and the numbers of
// the C core that Python asks for.
#include <Python.h> // first, as its documentation asks

#include "binding.h"

namespace {

using namespace ringtile;

// ---- layouts and plans -------------------------------------------------------------------------

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

// What rt_plan_attended counts, of a mask with two sides: begin and end of p are followed by those of the keys.
struct TwoSides {
    const rt_plan_params &p;
    std::vector<std::vector<int32_t>> positions; // of each rank, rising

    TwoSides(const rt_plan_params &p, bool two_sides) : p(p), positions(two_sides ? p.num_ranks : 0) {
        if (!two_sides) return;
        std::vector<int32_t> rank_of(static_cast<size_t>(p.seq_len));
        for (int64_t rank = 0; rank < p.num_ranks; ++rank)
            for (int64_t r = p.run_offsets[rank]; r < p.run_offsets[rank + 1]; ++r)
                for (int64_t j = 0; j < p.runs[r].length; ++j)
                    rank_of[p.runs[r].global_begin + j * p.runs[r].stride] = static_cast<int32_t>(rank);
        for (int64_t position = 0; position < p.seq_len; ++position)
            positions[rank_of[position]].push_back(static_cast<int32_t>(position));
    }
    // key_rank -1: the keys of all ranks.
    void attended(int64_t query_rank, int64_t key_rank, std::vector<int64_t> &attended) const {
        const std::vector<int32_t> &queries = positions[query_rank];
        const int64_t num_queries = static_cast<int64_t>(queries.size());
        const int64_t num_keys = key_rank < 0 ? p.seq_len : static_cast<int64_t>(positions[key_rank].size());
        std::vector<int32_t> scratch(static_cast<size_t>(rt_meetings_scratch_len(num_keys, num_queries)));
        std::vector<int64_t> of_row(static_cast<size_t>(num_keys) + 1);
        std::fill(attended.begin(), attended.end(), 0);
        for (int64_t row = 0; row < p.mask_batch; ++row) {
            const int64_t of_queries = row * p.seq_len, of_keys = (p.mask_batch + row) * p.seq_len;
            const rt_meetings_params meetings = {
                p.seq_len,          num_keys,
                num_queries,        key_rank < 0 ? nullptr : positions[key_rank].data(),
                queries.data(),     p.begin + of_keys,
                p.end + of_keys,    p.begin + of_queries,
                p.end + of_queries, 0};
            check(rt_meetings(&meetings, of_row.data(), nullptr, nullptr, scratch.data()), "plan");
            for (int64_t key = 0; key < num_keys; ++key) attended[key] += of_row[key];
        }
    }
};

// needed (M, 6): query rank, key rank, run; pairs (W, W): [query rank][key rank]. rank -1: for all pairs of ranks;
// otherwise for those that include the rank, and the rest of pairs is 0.
// begin, end (rows, S), or (2, rows, S): of the queries, then of the keys.
std::tuple<Tensor, Tensor> plan(const Tensor &begin, const Tensor &end, const Tensor &layout, int64_t rank) {
    const char *op = "plan";
    Arg{op, "begin", begin}.on_cpu().dtype(ScalarType::Int).contiguous();
    const bool two_sides = begin.dim() == 3;
    if (two_sides)
        Arg{op, "begin", begin}.sizes({2, begin.size(1), begin.size(2)});
    else
        Arg{op, "begin", begin}.dim(2);
    const int64_t rows_of_mask = begin.size(begin.dim() - 2), S = begin.size(begin.dim() - 1);
    Arg{op, "end", end}.on_cpu().dtype(ScalarType::Int).contiguous();
    Arg{op, "end", end}.sizes(two_sides ? std::vector<int64_t>{2, rows_of_mask, S}
                                        : std::vector<int64_t>{rows_of_mask, S});
    const LayoutArg arg(layout, op);
    const int64_t W = arg.num_ranks();
    layout_check(layout, S, W);
    require(rank >= -1 && rank < W, op, "rank is ", rank, ", expected one of ", W, " ranks, or -1 for all");
    const rt_plan_params p = {W,
                              S,
                              rows_of_mask,
                              arg.runs.data(),
                              arg.offsets.data(),
                              Arg{op, "begin", begin}.data<const int32_t>(),
                              Arg{op, "end", end}.data<const int32_t>()};
    const torch::stable::Device cpu(torch::headeronly::DeviceType::CPU);
    Tensor pairs = torch::stable::empty({W, W}, ScalarType::Long, std::nullopt, cpu);
    auto *pair = static_cast<int64_t *>(pairs.data_ptr());
    std::fill(pair, pair + W * W, 0);

    std::vector<int64_t> attended(static_cast<size_t>(S) + 1);
    std::vector<rt_run> runs(arg.runs.size());
    std::vector<int64_t> rows; // (M, 6) flat
    const auto add = [&](int64_t query_rank, int64_t key_rank, const int32_t *below) {
        const auto fill = [&](int64_t *count) {
            return rt_plan_needed(&p, key_rank, below, attended.data(), runs.data(), static_cast<int64_t>(runs.size()),
                                  count, &pair[query_rank * W + key_rank]);
        };
        int64_t count = 0;
        rt_status status = fill(&count);
        if (status == RT_CAPACITY) {
            runs.resize(static_cast<size_t>(count));
            status = fill(&count);
        }
        check(status, op);
        for (int64_t i = 0; i < count; ++i)
            rows.insert(rows.end(), {query_rank, key_rank, runs[i].global_begin, runs[i].stride, runs[i].local_begin,
                                     runs[i].length});
    };
    // Against the queries of another rank, counts only the rank's own keys: all S positions for each of W ranks would
    // take O(W S).
    std::vector<int32_t> below(rank < 0 ? 0 : static_cast<size_t>(S) + 1);
    if (rank >= 0) check(rt_plan_below(&p, rank, below.data()), op);
    const TwoSides both(p, two_sides);
    for (int64_t query_rank = 0; query_rank < W; ++query_rank) {
        const bool all_keys = rank < 0 || query_rank == rank;
        if (two_sides)
            both.attended(query_rank, all_keys ? -1 : rank, attended);
        else
            check(rt_plan_attended(&p, query_rank, all_keys ? nullptr : below.data(), attended.data()), op);
        for (int64_t key_rank = 0; key_rank < W; ++key_rank)
            if (all_keys || key_rank == rank) add(query_rank, key_rank, all_keys ? nullptr : below.data());
    }
    Tensor needed =
        torch::stable::empty({static_cast<int64_t>(rows.size()) / 6, 6}, ScalarType::Long, std::nullopt, cpu);
    std::copy(rows.begin(), rows.end(), static_cast<int64_t *>(needed.data_ptr()));
    return {needed, pairs};
}

// begin, end, key_begin, key_end (rows, S): of a query, and of a key. counts int64 (rows, S): the keys of each query;
// first, after int32: the smallest of them, and the largest plus 1.
std::tuple<Tensor, Tensor, Tensor> mask_hulls(const Tensor &begin, const Tensor &end, const Tensor &key_begin,
                                              const Tensor &key_end, int64_t last) {
    const char *op = "mask_hulls";
    Arg{op, "begin", begin}.on_cpu().dtype(ScalarType::Int).dim(2).contiguous();
    const int64_t rows = begin.size(0), S = begin.size(1);
    const std::pair<const char *, const Tensor *> others[] = {
        {"end", &end}, {"key_begin", &key_begin}, {"key_end", &key_end}};
    for (const auto &[name, x] : others)
        Arg{op, name, *x}.on_cpu().dtype(ScalarType::Int).contiguous().sizes({rows, S});
    const torch::stable::Device cpu(torch::headeronly::DeviceType::CPU);
    Tensor counts = torch::stable::empty({rows, S}, ScalarType::Long, std::nullopt, cpu);
    Tensor first = torch::stable::empty({rows, S}, ScalarType::Int, std::nullopt, cpu);
    Tensor after = torch::stable::empty({rows, S}, ScalarType::Int, std::nullopt, cpu);
    std::vector<int32_t> scratch(static_cast<size_t>(rt_meetings_scratch_len(S, S)) + 1);
    const auto row_of = [&](const char *name, const Tensor &x, int64_t row) {
        return Arg{op, name, x}.data<const int32_t>() + row * S;
    };
    for (int64_t row = 0; row < rows; ++row) {
        rt_meetings_params p = {S, S, S, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, last};
        p.x_begin = row_of("begin", begin, row), p.x_end = row_of("end", end, row);
        p.y_begin = row_of("key_begin", key_begin, row), p.y_end = row_of("key_end", key_end, row);
        check(rt_meetings(&p, static_cast<int64_t *>(counts.data_ptr()) + row * S,
                          static_cast<int32_t *>(first.data_ptr()) + row * S,
                          static_cast<int32_t *>(after.data_ptr()) + row * S, scratch.data()),
              op);
    }
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
    Tensor result = torch::stable::empty({1}, ScalarType::Long, std::nullopt,
                                         torch::stable::Device(torch::headeronly::DeviceType::CPU));
    *static_cast<int64_t *>(result.data_ptr()) = static_cast<int64_t>(value);
    return result;
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
    m.def("attn_delta(Tensor dout, Tensor out, Tensor dlse) -> Tensor");
    m.def("shard_seq_(Tensor x, Tensor runs, int dim, Tensor(a!) y) -> ()");
    m.def("unshard_seq_(Tensor x, Tensor runs, int dim, Tensor(a!) y) -> ()");
    m.def("layout_check(Tensor layout, int seq_len, int world_size) -> ()");
    m.def("plan(Tensor begin, Tensor end, Tensor layout, int rank) -> (Tensor, Tensor)");
    m.def("mask_hulls(Tensor begin, Tensor end, Tensor key_begin, Tensor key_end, int last=0) -> (Tensor, Tensor, "
          "Tensor)");
    m.def("digest(Tensor begin, Tensor end, Tensor layout) -> Tensor");
    m.def("glu_fwd(Tensor gate, Tensor up, int kind) -> Tensor");
    m.def("glu_bwd_(Tensor(a!) gate, Tensor(b!) up, Tensor(c!) dprod, int kind) -> ()");
    m.def("cross_entropy_fwd_bwd_(Tensor(a!) logits, Tensor labels, Tensor(b!) loss, Tensor(c!) lse, "
          "int ignore_index, float label_smoothing, float softcap, float z_loss, bool want_grad) -> ()");
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
    m.def("dropout(Tensor x, Tensor places, float p, int seed, int step, int stream) -> Tensor");
    m.def("cpu_isa() -> int");
}

STABLE_TORCH_LIBRARY_IMPL(ringtile, CPU, m) {
    m.impl("layout_check", TORCH_BOX(&layout_check));
    m.impl("plan", TORCH_BOX(&plan));
    m.impl("mask_hulls", TORCH_BOX(&mask_hulls));
    m.impl("digest", TORCH_BOX(&digest));
}

// It has no tensor argument to dispatch on.
STABLE_TORCH_LIBRARY_IMPL(ringtile, CompositeExplicitAutograd, m) { m.impl("cpu_isa", TORCH_BOX(&cpu_isa)); }

// ---- constants ---------------------------------------------------------------------------------

int ringtile_add_constants(PyObject *module) {
    const std::pair<const char *, long> numbers[] = {{"MAX_HEAD_DIM", RT_MAX_HEAD_DIM},
                                                     {"MAX_CONV_WIDTH", RT_MAX_CONV_WIDTH},
                                                     {"CHUNK_TOKENS", RT_CHUNK_TOKENS},
                                                     {"SELECTIVE_CHANNELS", RT_SELECTIVE_CHANNELS}};
    for (const auto &[name, number] : numbers)
        if (PyModule_AddIntConstant(module, name, number) != 0) return -1;
    PyObject *isas = Py_BuildValue("(ssss)", rt_isa_name(RT_ISA_GENERIC), rt_isa_name(RT_ISA_AVX2),
                                   rt_isa_name(RT_ISA_AVX512), rt_isa_name(RT_ISA_AVX512_BF16));
    PyObject *kinds = Py_BuildValue("{s:i,s:i,s:i,s:i}", "silu", RT_GLU_SILU, "gelu", RT_GLU_GELU, "gelu_tanh",
                                    RT_GLU_GELU_TANH, "relu", RT_GLU_RELU);
    const bool added = isas != nullptr && kinds != nullptr && PyModule_AddObjectRef(module, "ISA_NAMES", isas) == 0 &&
                       PyModule_AddObjectRef(module, "GLU_KINDS", kinds) == 0;
    Py_XDECREF(isas), Py_XDECREF(kinds);
    return added ? 0 : -1;
}
