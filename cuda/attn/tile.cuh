// Tiles of 16-bit numbers in shared memory: their layout, and how all threads of a thread block fill them.
#ifndef RINGTILE_CUDA_ATTN_TILE_CUH
#define RINGTILE_CUDA_ATTN_TILE_CUH

#include "args.cuh"

// ROWS x COLS numbers, in chunks of 16 bytes. ldmatrix reads the same chunk of eight consecutive rows at once,
// which must lie in different banks; so row r keeps its chunk c where an unswizzled row would keep chunk c ^
// swizzle(r). Rows of a multiple of 128 bytes all begin in the same bank and need 8 different places. Rows of an
// odd multiple of 64 bytes begin in two banks alternately and need 4 different places for every other row.
template <int ROWS, int COLS> struct tile {
    static constexpr int ROW_BYTES = COLS * 2, ROW_CHUNKS = COLS / 8;
    static_assert(ROW_BYTES % 64 == 0);
    using storage = chunk[ROWS][ROW_CHUNKS];
    shared_address base;

    static constexpr int SWIZZLE = ROW_BYTES % 128 == 0 ? 7 : 3; // the bits of a chunk's index that change
    static RT_DEVICE int swizzle(int row) { return ROW_BYTES % 128 == 0 ? row & 7 : row >> 1 & 3; }
    RT_DEVICE shared_address chunk_at(int row, int chunk) const {
        return base + (shared_address)(row * ROW_BYTES + (chunk ^ swizzle(row)) * 16);
    }

    // The addresses a lane uses throughout the tile: at(r, c) is chunk_at(row + r, chunk + c), for r a multiple of
    // 8, chunk < 8, and no bit set in both chunk and c. With r and c known at compile time the swizzle is an
    // exclusive or with few different constants.
    struct lane_chunks {
        shared_address row_at, chunk_bytes;
        RT_DEVICE shared_address at(int r, int c) const {
            return row_at + (shared_address)(r * ROW_BYTES + (c & ~SWIZZLE) * 16) +
                   (chunk_bytes ^ (shared_address)((c & SWIZZLE) * 16));
        }
    };
    RT_DEVICE lane_chunks chunks_from(int row, int chunk) const {
        return {base + (shared_address)(row * ROW_BYTES), (shared_address)((chunk ^ swizzle(row)) * 16)};
    }
};

// 8 numbers at any address; zeros after the first `count`.
template <class T> RT_DEVICE chunk gather_chunk(const T *from, int count) {
    chunk c = {};
#pragma unroll
    for (int i = 0; i < 8; i++)
        if (i < count) c.word[i / 2] |= (uint32_t)ld_global(from + i).bits << (i % 2 * 16);
    return c;
}

// The chunks of a tile that a thread copies: adjacent lanes have adjacent chunks, and the addresses of a lane's
// chunks differ by constants.
template <int THREADS, int ROWS, int COLS> struct thread_chunks {
    static constexpr int LANES = tile<ROWS, COLS>::SWIZZLE + 1; // with adjacent chunks
    static constexpr int ROW_STEP = THREADS / LANES;
    static_assert(ROWS % ROW_STEP == 0 && ROW_STEP % 8 == 0);
    // The thread's first chunk; the others lie multiples of ROW_STEP below it and multiples of LANES to its right.
    static RT_DEVICE int row() { return thread_index() / LANES; }
    static RT_DEVICE int chunk() { return thread_index() % LANES; }
};

// Starts to load num_rows rows of `dim` numbers, row_stride apart, and zeros the rest of the tile. All threads of
// the thread block take part; the caller commits.
template <class T, int THREADS, int ROWS, int COLS>
RT_DEVICE void load_tile(tile<ROWS, COLS> to, const T *from, int64_t row_stride, int num_rows, int dim, bool aligned) {
    using own = thread_chunks<THREADS, ROWS, COLS>;
    const int row = own::row(), chunk = own::chunk();
    const auto chunks = to.chunks_from(row, chunk);
    const T *const begin = from + row * row_stride + chunk * 8;
    if (aligned) {
#pragma unroll
        for (int r = 0; r < ROWS; r += own::ROW_STEP)
#pragma unroll
            for (int c = 0; c < to.ROW_CHUNKS; c += own::LANES)
                cp_async(chunks.at(r, c), begin + r * row_stride + c * 8,
                         row + r < num_rows && (chunk + c) * 8 < dim ? 16 : 0);
    } else {
#pragma unroll 1
        for (int r = 0; r < ROWS; r += own::ROW_STEP)
#pragma unroll 1
            for (int c = 0; c < to.ROW_CHUNKS; c += own::LANES)
                st_shared(chunks.at(r, c),
                          gather_chunk(begin + r * row_stride + c * 8, row + r < num_rows ? dim - (chunk + c) * 8 : 0));
    }
}

// Negates a tile if scale is negative, zeros it if scale is 0. Each thread changes the chunks that it loaded.
template <int THREADS, int ROWS, int COLS> RT_DEVICE void fix_sign(tile<ROWS, COLS> x, double scale) {
    using own = thread_chunks<THREADS, ROWS, COLS>;
    if (scale > 0) return;
    cp_async_wait_group<0>();
    const auto chunks = x.chunks_from(own::row(), own::chunk());
#pragma unroll 1
    for (int r = 0; r < ROWS; r += own::ROW_STEP)
#pragma unroll 1
        for (int c = 0; c < x.ROW_CHUNKS; c += own::LANES) {
            chunk values = ld_shared<chunk>(chunks.at(r, c));
            for (uint32_t &word : values.word) word = scale < 0 ? word ^ 0x80008000u : 0;
            st_shared(chunks.at(r, c), values);
        }
}

#endif // RINGTILE_CUDA_ATTN_TILE_CUH
