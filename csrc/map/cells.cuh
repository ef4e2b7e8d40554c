// The bitmaps of cells.cu, and how their workspace is laid out.
#pragma once

#include <cstddef>

#include "bricks.cuh"
#include "grid.cuh"

namespace voxmma::detail {

inline constexpr int kMaxCellBits = 27;  // 16 MiB a bitmap
inline constexpr int kWordsPerBlock = 4 * kThreads;

inline int64_t words_of(int box_bits) { return box_bits > 15 ? int64_t{1} << (box_bits - 5) : kWordsPerBlock; }

struct Cells {
  uint32_t* rows;    // [words] bit of cell (v - low of batch, x, y, z in box.bits bits each); survey_coords has none
  uint32_t* bricks;  // [words] bit of its Morton code; right behind `rows`
  CellStats* stats;
  unsigned* begun;              // blocks of index_cells that have begun to scan, and what they counted: scan.cuh
  unsigned long long* sums;     // [blocks]
  int* block_bits;              // set bits of kWordsPerBlock words of `rows`, then of `bricks`
  int* ranks;                   // [words] bits before a word of `bricks` that is not zero
  unsigned row_blocks, blocks;  // of the first bitmap, and of both
  size_t clear_bytes, total_bytes;

  Cells() = default;
  __host__ Cells(void* base, const CoordBox& box) {
    const int64_t words = words_of(bits_of(box));
    row_blocks = static_cast<unsigned>(words / kWordsPerBlock);
    blocks = 2 * row_blocks;
    Carver carve(base);
    rows = carve.take<uint32_t>(words);
    bricks = carve.take<uint32_t>(words);
    stats = carve.take<CellStats>(1);
    begun = carve.take<unsigned>(1);
    sums = carve.take<unsigned long long>(blocks);
    clear_bytes = carve.bytes;
    block_bits = carve.take<int>(blocks);
    ranks = carve.take<int>(words);
    total_bytes = carve.bytes;
  }

  __device__ __forceinline__ uint4 four_words() const {  // of this thread
    const auto* fours = reinterpret_cast<const uint4*>(row_blocks == 0 ? bricks : rows);
    return fours[int64_t{blockIdx.x} * kThreads + threadIdx.x];
  }
};

static_assert(kWordsPerBlock * 32 == 1 << 15, "the fewest words are one block's");

}  // namespace voxmma::detail

namespace voxmma {

// Writes extents and bad_row of `stats`, zeros `cells` (or null) and `words` words of `bits`.
cudaError_t measure_coords(const int* coords, int64_t n, CoordStats* stats, CellStats* cells, uint32_t* bits,
                           int64_t words, cudaStream_t);

static_assert(offsetof(CoordStats, max) == offsetof(CoordStats, min) + 4 * sizeof(int), "bounds are read as 8 numbers");

}  // namespace voxmma
