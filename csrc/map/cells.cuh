// The bitmaps of cells.cu, how their workspace is laid out, and what becomes of their bits.
#pragma once

#include <cstddef>

#include "bricks.cuh"
#include "grid.cuh"
#include "scan.cuh"

namespace voxmma::detail {

inline constexpr int kMaxCellBits = 27;  // 16 MiB a bitmap
inline constexpr int kWordsPerBlock = 4 * kThreads;
inline constexpr int kRankWords = 8;  // of a rank: what the memory hands out at a time

inline int64_t words_of(int box_bits) { return box_bits > 15 ? int64_t{1} << (box_bits - 5) : kWordsPerBlock; }

struct Cells {
  uint32_t* rows;    // [words] bit of cell (v - low of batch, x, y, z in box.bits bits each)
  uint32_t* bricks;  // [words] bit of its Morton code; right behind `rows`
  CellStats* stats;
  unsigned* begun;              // blocks of index_cells that have begun to scan, and what they counted: scan.cuh
  unsigned long long* sums;     // [blocks]
  int* block_bits;              // set bits of kWordsPerBlock words of `rows`, then of `bricks`
  int* ranks;                   // [words / kRankWords] bits before so many words of `bricks` that are not all zero
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
    ranks = carve.take<int>(words / kRankWords);
    total_bytes = carve.bytes;
  }
};

static_assert(kWordsPerBlock * 32 == 1 << 15, "the fewest words are one block's");

}  // namespace voxmma::detail

namespace voxmma {
namespace {

using namespace detail;

__device__ __forceinline__ void empty_table(uint4* table, int64_t capacity) {
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < capacity; i += int64_t{gridDim.x} * kThreads) {
    table[i] = make_uint4(~0u, kNoBrick, ~0u, ~0u);
  }
}

__device__ __forceinline__ int4 cell_at(const CoordBox& box, uint32_t key) {
  int v[4];
#pragma unroll
  for (int a = 3; a >= 0; --a) {
    v[a] = static_cast<int>(key & ((1u << box.bits[a]) - 1)) + box.low[a];
    key >>= box.bits[a];
  }
  return make_int4(v[0], v[1], v[2], v[3]);
}

// Order and brick of row i at c, whose Morton code is `cell`: its word of the second bitmap, and the bits before that.
__device__ __forceinline__ void index_row(uint32_t cell, uint32_t word, int before, int64_t i, int4 c, int* order,
                                          Brick* table, uint32_t capacity) {
  const int rank = before + __popc(word & ((1u << cell % 32) - 1));
  order[rank] = static_cast<int>(i);
  const uint32_t mask = word >> (cell & 24) & 0xff;
  if ((mask & ((1u << (cell & 7)) - 1)) == 0) insert_brick(table, capacity, brick_key(c), rank, mask);
}

}  // namespace

// Writes extents and bad_row of `stats`, and zeros `cells` (or null).
cudaError_t measure_coords(const int* coords, int64_t n, CoordStats* stats, CellStats* cells, cudaStream_t);

static_assert(offsetof(CoordStats, max) == offsetof(CoordStats, min) + 4 * sizeof(int), "bounds are read as 8 numbers");

}  // namespace voxmma
