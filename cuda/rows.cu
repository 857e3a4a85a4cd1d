// Rows of tensors packed, unpacked and added: one launch for all runs of up to four tensors, in which each thread moves
// a word of up to 16 bytes at a time. Reads and writes every byte once (an addition reads its sums too): memory-bound.
// No shared memory.
#include "../csrc/seq/rows.h"
#include "device/elements.cuh"
#include "ringtile_cuda.h"

namespace {

constexpr int THREADS = 256;
constexpr int MAX_LOOPS = RT_MAX_DIMS + 1; // the last is over the words of an element, or of contiguous elements
constexpr int MAX_TENSORS = 4;             // of a launch

// A tensor and its rows, as nested loops over words. Steps are in bytes.
struct tensor_loops {
    char *global, *local;
    int num_loops, row_loop; // whose size is the length of a run
    int64_t words_per_row;
    int64_t size[MAX_LOOPS], global_step[MAX_LOOPS], local_step[MAX_LOOPS];
};

struct rows_params {
    tensor_loops tensor[MAX_TENSORS];
    int64_t num_runs;
    const rt_run *table; // NULL: run holds them
    rt_run run[RT_CUDA_MAX_RUNS];
};

template <class Element, int count>
RT_DEVICE pack_of<Element, count> sum(pack_of<Element, count> x, const pack_of<Element, count> &y) {
    for (int i = 0; i < count; i++) x.element[i] += y.element[i];
    return x;
}

RT_DEVICE rt_run load(const rt_run *run) {
    return {ld_global(&run->global_begin), ld_global(&run->stride), ld_global(&run->local_begin),
            ld_global(&run->length)};
}

template <rt_rows_pass pass, class Word> RT_KERNEL(THREADS) move_rows(RT_PARAMS rows_params p) {
    const tensor_loops &x = p.tensor[cta_index_z()];
    for (int64_t r = cta_index_y(); r < p.num_runs; r += num_ctas_y()) {
        const rt_run run = p.table == nullptr ? p.run[r] : load(p.table + r);
        for (int64_t word = first_item(THREADS); word < x.words_per_row * run.length; word += items_per_grid(THREADS)) {
            char *global = x.global, *local = x.local;
            int64_t index = word;
            for (int d = x.num_loops - 1; d >= 0; d--) {
                const bool of_rows = d == x.row_loop;
                const int64_t size = of_rows ? run.length : x.size[d], outer = d > 0 ? index / size : 0;
                const int64_t at = index - outer * size;
                global += (of_rows ? run.global_begin + at * run.stride : at) * x.global_step[d];
                local += (of_rows ? run.local_begin + at : at) * x.local_step[d];
                index = outer;
            }
            if constexpr (pass == RT_ROWS_PACK)
                st_global((Word *)local, ld_global((const Word *)global));
            else if constexpr (pass == RT_ROWS_UNPACK)
                st_global((Word *)global, ld_global((const Word *)local));
            else
                st_global((Word *)global, sum(ld_global((const Word *)global), ld_global((const Word *)local)));
        }
    }
}

// Loops over bytes: dims of size 1 are dropped, but for the rows, and neighbours that are contiguous in both tensors
// are merged, as are the bytes of an element with the last loop.
tensor_loops in_bytes(const rt_rows_tensor &x) {
    tensor_loops loops = {};
    loops.global = (char *)x.global, loops.local = (char *)x.local, loops.words_per_row = x.element_bytes;
    const auto add = [&](int64_t size, int64_t global_step, int64_t local_step, bool of_rows) {
        const int last = loops.num_loops - 1;
        const bool merged = last >= 0 && !of_rows && last != loops.row_loop &&
                            loops.global_step[last] == size * global_step &&
                            loops.local_step[last] == size * local_step;
        const int at = merged ? last : loops.num_loops++;
        if (of_rows) loops.row_loop = at;
        loops.size[at] = merged ? loops.size[at] * size : size;
        loops.global_step[at] = global_step, loops.local_step[at] = local_step;
    };
    loops.row_loop = -1;
    for (int64_t d = 0; d < x.ndim; d++) {
        if (d != x.dim) loops.words_per_row *= x.sizes[d];
        if (d == x.dim || x.sizes[d] > 1)
            add(x.sizes[d], x.global_strides[d] * x.element_bytes, x.local_strides[d] * x.element_bytes, d == x.dim);
    }
    add(x.element_bytes, 1, 1, false);
    return loops;
}

// The largest size, up to 16, of words of which all tensors consist, at addresses that it divides.
int64_t word_bytes_of(const rows_params &p, int num_tensors) {
    int64_t odd = 16;
    for (int i = 0; i < num_tensors; i++) {
        const tensor_loops &x = p.tensor[i];
        odd |= x.size[x.num_loops - 1] | (int64_t)(uintptr_t)x.global | (int64_t)(uintptr_t)x.local;
        for (int d = 0; d < x.num_loops - 1; d++) odd |= x.global_step[d] | x.local_step[d];
    }
    return odd & -odd; // its lowest bit
}

using kernel_of_rows = void (*)(rows_params);

template <rt_rows_pass pass> kernel_of_rows kernel_of(int64_t word_bytes) {
    return word_bytes == 16  ? move_rows<pass, chunk>
           : word_bytes == 8 ? move_rows<pass, uint64_t>
           : word_bytes == 4 ? move_rows<pass, uint32_t>
           : word_bytes == 2 ? move_rows<pass, uint16_t>
                             : move_rows<pass, uint8_t>;
}

template <class Element> kernel_of_rows kernel_of_sums(int64_t word_bytes) {
    return word_bytes == 16 ? move_rows<RT_ROWS_ADD, pack_of<Element, 16 / sizeof(Element)>>
                            : move_rows<RT_ROWS_ADD, pack_of<Element, 1>>;
}

rt_status launch_rows(rows_params &p, int num_tensors, int64_t num_rows, rt_rows_pass pass, rt_dtype dtype,
                      void *stream) {
    int64_t word_bytes = word_bytes_of(p, num_tensors), num_words = 0;
    if (pass == RT_ROWS_ADD && word_bytes < 16) word_bytes = dtype == RT_F64 ? 8 : 4;
    for (int i = 0; i < num_tensors; i++) {
        tensor_loops &x = p.tensor[i];
        const int last = x.num_loops - 1;
        x.size[last] /= word_bytes, x.words_per_row /= word_bytes;
        x.global_step[last] = x.local_step[last] = word_bytes;
        if (x.words_per_row * num_rows > num_words) num_words = x.words_per_row * num_rows;
    }
    const auto kernel = pass == RT_ROWS_PACK     ? kernel_of<RT_ROWS_PACK>(word_bytes)
                        : pass == RT_ROWS_UNPACK ? kernel_of<RT_ROWS_UNPACK>(word_bytes)
                        : dtype == RT_F64        ? kernel_of_sums<double>(word_bytes)
                                                 : kernel_of_sums<float>(word_bytes);
    // Thread blocks for runs of the mean length; those of longer runs take more turns.
    const int64_t words_per_run = (num_words + p.num_runs - 1) / p.num_runs;
    const int64_t num_runs = p.num_runs < UINT16_MAX ? p.num_runs : UINT16_MAX;
    return launch(kernel, {grid_for(words_per_run, THREADS), num_runs, num_tensors}, THREADS, 0, stream, p);
}

rt_status move(const rt_rows_params *p, rt_rows_pass pass, rt_dtype dtype, const rt_run *table, void *stream) {
    int64_t num_bytes;
    rt_status status = rt_rows_check(p, pass, dtype, &num_bytes);
    if (status != RT_OK || num_bytes == 0) return status;
    if (table != nullptr && !rt_points_to(table, sizeof(int64_t))) return rt_wrong(RT_BAD_POINTER, "table");
    const int64_t most_runs = table == nullptr ? int64_t(RT_CUDA_MAX_RUNS) : p->num_runs;
    for (int64_t first = 0; first < p->num_tensors; first += MAX_TENSORS) {
        for (int64_t run = 0; status == RT_OK && run < p->num_runs; run += most_runs) {
            rows_params params = {};
            int num_tensors = 0;
            int64_t num_rows = 0;
            for (int64_t i = first; i < p->num_tensors && i < first + MAX_TENSORS; i++) {
                const tensor_loops loops = in_bytes(p->tensors[i]);
                if (loops.words_per_row > 0) params.tensor[num_tensors++] = loops;
            }
            params.table = table;
            params.num_runs = p->num_runs - run < most_runs ? p->num_runs - run : most_runs;
            for (int64_t r = 0; r < params.num_runs; r++) {
                if (table == nullptr) params.run[r] = p->runs[run + r];
                num_rows += p->runs[run + r].length;
            }
            if (num_tensors > 0) status = launch_rows(params, num_tensors, num_rows, pass, dtype, stream);
        }
    }
    return status;
}

} // namespace

rt_status rt_cuda_rows_pack(const rt_rows_params *p, const rt_run *table, void *stream) {
    return move(p, RT_ROWS_PACK, RT_F32, table, stream);
}

rt_status rt_cuda_rows_unpack(const rt_rows_params *p, const rt_run *table, void *stream) {
    return move(p, RT_ROWS_UNPACK, RT_F32, table, stream);
}

rt_status rt_cuda_rows_add(const rt_rows_params *p, rt_dtype dtype, const rt_run *table, void *stream) {
    return move(p, RT_ROWS_ADD, dtype, table, stream);
}
