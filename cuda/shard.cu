// Shard and unshard: one launch per run, in which each thread copies a word of up to 16 bytes at a time. Reads and
// writes every byte once: memory-bound. No shared memory.
#include "../csrc/seq/shard.h"
#include "device/elements.cuh"
#include "ringtile_cuda.h"

namespace {

constexpr int THREADS = 256;
constexpr int MAX_LOOPS = RT_MAX_DIMS + 1; // the last is over the words of an element, or of contiguous elements

struct copy_params {
    int num_loops;
    int64_t num_words;
    int64_t size[MAX_LOOPS], from_step[MAX_LOOPS], to_step[MAX_LOOPS]; // steps in bytes
    const char *from;
    char *to;
};

template <class Word> RT_KERNEL(THREADS) copy_words(RT_PARAMS copy_params p) {
    for (int64_t word = first_item(THREADS); word < p.num_words; word += items_per_grid(THREADS)) {
        const char *from = p.from;
        char *to = p.to;
        int64_t index = word;
        for (int d = p.num_loops - 1; d > 0; d--) {
            const int64_t outer = index / p.size[d], at = index - outer * p.size[d];
            from += at * p.from_step[d];
            to += at * p.to_step[d];
            index = outer;
        }
        from += index * p.from_step[0];
        to += index * p.to_step[0];
        st_global((Word *)to, ld_global((const Word *)from));
    }
}

// Turns loops over elements into loops over words of word_bytes, the largest size that divides every address.
copy_params in_words(const rt_strided_copy &copy, int64_t *word_bytes) {
    copy_params p = {};
    p.from = copy.from, p.to = copy.to;
    for (int64_t d = 0; d < copy.ndim; d++) {
        p.size[d] = copy.size[d];
        p.from_step[d] = copy.from_step[d], p.to_step[d] = copy.to_step[d];
    }
    // The bytes of an element are one more loop, fused with the last one if elements are contiguous.
    int last = (int)copy.ndim - 1;
    if (p.from_step[last] == copy.element_bytes && p.to_step[last] == copy.element_bytes)
        p.size[last] *= copy.element_bytes;
    else
        p.size[++last] = copy.element_bytes;
    p.num_loops = last + 1;

    int64_t odd = p.size[last] | (int64_t)(uintptr_t)p.from | (int64_t)(uintptr_t)p.to | 16;
    for (int d = 0; d < last; d++) odd |= p.from_step[d] | p.to_step[d];
    *word_bytes = odd & -odd; // its lowest bit
    p.size[last] /= *word_bytes;
    p.from_step[last] = p.to_step[last] = *word_bytes;
    p.num_words = copy.num_elements * copy.element_bytes / *word_bytes;
    return p;
}

rt_status copy_runs(const rt_shard_params *p, const void *from, void *to, bool to_global, void *stream) {
    int64_t num_bytes;
    rt_status status = rt_shard_check(p, from, to, to_global, &num_bytes);
    if (num_bytes == 0) return status;
    for (int64_t r = 0; status == RT_OK && r < p->num_runs; r++) {
        int64_t word_bytes;
        const copy_params copy = in_words(rt_copy_of_run(p, &p->runs[r], from, to, to_global), &word_bytes);
        const auto kernel = word_bytes == 16  ? copy_words<chunk>
                            : word_bytes == 8 ? copy_words<uint64_t>
                            : word_bytes == 4 ? copy_words<uint32_t>
                            : word_bytes == 2 ? copy_words<uint16_t>
                                              : copy_words<uint8_t>;
        status = launch(kernel, grid_for(copy.num_words, THREADS), THREADS, 0, stream, copy);
    }
    return status;
}

} // namespace

rt_status rt_cuda_shard(const rt_shard_params *p, const void *global, void *local, void *stream) {
    return copy_runs(p, global, local, false, stream);
}

rt_status rt_cuda_unshard(const rt_shard_params *p, const void *local, void *global, void *stream) {
    return copy_runs(p, local, global, true, stream);
}
