// A set of coordinates as bitmaps, a bit a cell of a box: sorted rows, Morton order and brick table without a sort. One
// bitmap is in the order of (batch, x, y, z), one in Morton order, where a byte is a brick.
#include <climits>

#include "bricks.cuh"
#include "cells.cuh"
#include "grid.cuh"
#include "scan.cuh"

namespace voxmma {
namespace {

using namespace detail;

// Words of a bitmap up to the last cell of these bounds.
__device__ __forceinline__ int64_t words_within(const int* bounds) {
  return int64_t{1} << max(total_bits(box_of(bounds, {})) - 5, 0);
}

// Bits of every kWordsPerBlock words of both bitmaps, and their numbers of cells and of bricks.
__global__ void __launch_bounds__(kThreads) count_bits(const Cells cells) {
  __shared__ int warp_bits[kThreads / 32], warp_bytes[kThreads / 32];
  const int t = threadIdx.x, warp = t / 32, lane = t % 32;
  const uint4 words =
      reinterpret_cast<const uint4*>(cells.rows)[int64_t{blockIdx.x} * kThreads + t];  // bricks are behind
  const bool bricks = blockIdx.x >= cells.row_blocks;
  const int bits =
      __reduce_add_sync(0xffffffffu, __popc(words.x) + __popc(words.y) + __popc(words.z) + __popc(words.w));
  const int bytes =
      __reduce_add_sync(0xffffffffu, bricks_of(words.x) + bricks_of(words.y) + bricks_of(words.z) + bricks_of(words.w));
  if (lane == 0) {
    warp_bits[warp] = bits;
    warp_bytes[warp] = bytes;
  }
  __syncthreads();
  if (t != 0) return;
  int total_bits = 0, total_bytes = 0;
  for (int w = 0; w < kThreads / 32; ++w) {
    total_bits += warp_bits[w];
    total_bytes += warp_bytes[w];
  }
  cells.block_bits[blockIdx.x] = total_bits;
  if (total_bits == 0) return;
  const auto add = [](int64_t* counter, int amount) {
    atomicAdd(reinterpret_cast<unsigned long long*>(counter), static_cast<unsigned long long>(amount));
  };
  if (bricks) add(&cells.stats->bricks, total_bytes);
  if (!bricks) add(&cells.stats->count, total_bits);
}

// Writes the coordinates of a thread's four words of the first bitmap, from row `at` on; those from `room` on are dropped.
__device__ __forceinline__ void write_rows(const Scan& scan, const CoordBox& box, uint32_t first_word, int at,
                                           int64_t room, int4* coords) {
  const uint32_t words[4] = {scan.words.x, scan.words.y, scan.words.z, scan.words.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    for (uint32_t rest = words[i]; rest != 0; rest &= rest - 1, ++at) {
      const uint32_t key = (first_word + i) * 32 + __popc((rest & (0u - rest)) - 1);
      if (at < room) coords[at] = cell_at(box, key);
    }
  }
}

// Writes the ranks of a thread's four words and its neighbour's, if they have bits; `before` are those of blocks before.
__device__ __forceinline__ void write_ranks(const Scan& scan, int before, int64_t block, int* ranks) {
  static_assert(kRankWords == 2 * 4, "two threads share a rank");
  const int t = threadIdx.x, both = scan.mine | __shfl_xor_sync(0xffffffffu, scan.mine, 1);
  if (t % 2 == 0 && both != 0) ranks[(block * kThreads + t) / 2] = before + scan.before;
}

// Writes the rows of the first bitmap and the ranks of the second one, and empties the brick table.
__global__ void __launch_bounds__(kThreads)
    place(const Cells cells, const CoordBox box, int4* coords, uint4* table, int64_t capacity, int64_t room) {
  __shared__ int warp_before[kThreads / 32];
  empty_table(table, capacity);
  if (cells.block_bits[blockIdx.x] == 0) return;
  const int t = threadIdx.x;
  const bool ranks = blockIdx.x >= cells.row_blocks;
  const int begin = ranks ? static_cast<int>(cells.row_blocks) : 0, block = static_cast<int>(blockIdx.x) - begin;
  int before = 0;  // this block
  for (int i = t; i < block; i += kThreads) before += cells.block_bits[begin + i];
  before = __reduce_add_sync(0xffffffffu, before);
  if (t % 32 == 0) warp_before[t / 32] = before;
  const Scan scan = scan_words(ranks ? cells.bricks : cells.rows, block);
  before = 0;
#pragma unroll
  for (int w = 0; w < kThreads / 32; ++w) before += warp_before[w];
  if (ranks) {
    write_ranks(scan, before, block, cells.ranks);
  } else {
    write_rows(scan, box, uint32_t(block) * kWordsPerBlock + 4 * t, before + scan.before, room, coords);
  }
}

// What index_cells tells and asks where the host does not know how many cells there are.
struct Sized {
  int64_t room;
  const int* bounds = nullptr;
  CellStats* found = nullptr;
  int64_t* made = nullptr;
};

// The same in one sweep, where nobody has counted: what does not fit is dropped, and `made` says that nothing is there.
__global__ void __launch_bounds__(kThreads) place_sized(const Cells cells, const CoordBox most, int4* coords,
                                                        uint4* table, int64_t capacity, const Sized sized) {
  empty_table(table, capacity);
  const int t = threadIdx.x, turn = take_turn(cells.begun);
  const bool ranks = turn >= static_cast<int>(cells.row_blocks);
  const int begin = ranks ? static_cast<int>(cells.row_blocks) : 0, block = turn - begin;
  int64_t words = int64_t{cells.row_blocks} * kWordsPerBlock;
  if (sized.bounds != nullptr) words = min(words, words_within(sized.bounds));
  if (int64_t{block} * kWordsPerBlock >= words) return;
  const Scan scan = scan_words(ranks ? cells.bricks : cells.rows, block);
  const int before = sum_before(cells.sums + begin, block, scan.all);
  if (ranks) {
    write_ranks(scan, before, block, cells.ranks);
    return;
  }
  const CoordBox box = box_of(sized.bounds, most);
  write_rows(scan, box, uint32_t(block) * kWordsPerBlock + 4 * t, before + scan.before, sized.room, coords);
  if (t == 0 && int64_t{block + 1} * kWordsPerBlock >= words) {
    const int64_t count = before + scan.all;
    *sized.found = {count, cells.stats->outside, 0};
    *sized.made = count <= sized.room ? count : 0;
  }
}

// Order and bricks of rows whose ranks are known.
__global__ void __launch_bounds__(kThreads)
    index_rows(const Cells cells, const CoordBox most, const int* bounds, const int4* coords, const Rows rows,
               int* order, Brick* table, uint32_t capacity) {
  const CoordBox box = box_of(bounds, most);
  const int64_t step = int64_t(gridDim.x) * kThreads, n = rows.number();
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < n; i += step) {
    const int4 c = coords[i];
    const auto cell = morton<uint32_t>(box, c);
    const uint32_t at = cell / 32 % kRankWords;
    const auto* group = reinterpret_cast<const uint4*>(cells.bricks) + cell / 32 / kRankWords * (kRankWords / 4);
    int before = cells.ranks[cell / 32 / kRankWords];
    uint32_t word = 0;
#pragma unroll
    for (int j = 0; j < kRankWords / 4; ++j) {
      const uint4 four = group[j];
      const uint32_t words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (uint32_t k = 0; k < 4; ++k) {
        before += 4 * j + k < at ? __popc(words[k]) : 0;
        word = 4 * j + k == at ? words[k] : word;
      }
    }
    index_row(cell, word, before, i, c, order, table, capacity);
  }
}

cudaError_t index_with(const Cells& cells, const CoordBox& box, int64_t count, int* coords, int* order, Brick* table,
                       int64_t capacity, const Sized& sized, cudaStream_t stream) {
  auto* rows = reinterpret_cast<int4*>(coords);
  auto* const slots_out = reinterpret_cast<uint4*>(table);
  if (sized.made != nullptr) {
    place_sized<<<cells.blocks, kThreads, 0, stream>>>(cells, box, rows, slots_out, capacity, sized);
  } else {
    place<<<cells.blocks, kThreads, 0, stream>>>(cells, box, rows, slots_out, capacity, sized.room);
  }
  cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess || count == 0) return error;
  const int blocks = blocks_for(count);
  const auto slots = static_cast<uint32_t>(capacity);
  const Rows number{count, sized.made};
  index_rows<<<blocks, kThreads, 0, stream>>>(cells, box, sized.bounds, rows, number, order, table, slots);
  return cudaGetLastError();
}

}  // namespace

CoordBox cell_box(CoordBox box) { return whole_bricks(box); }

size_t cell_workspace(const CoordBox& box) { return bits_of(box) > kMaxCellBits ? 0 : Cells(nullptr, box).total_bytes; }

CellStats* cell_stats(const CoordBox& box, void* workspace) { return Cells(workspace, box).stats; }

cudaError_t clear_cells(const CoordBox& box, void* workspace, cudaStream_t stream) {
  return set_bytes(workspace, 0, Cells(workspace, box).clear_bytes, stream);
}

cudaError_t count_cells(const CoordBox& box, void* workspace, cudaStream_t stream) {
  const Cells cells(workspace, box);
  count_bits<<<cells.blocks, kThreads, 0, stream>>>(cells);
  return cudaGetLastError();
}

cudaError_t index_cells(const CoordBox& box, const int* bounds, void* workspace, int64_t count, int* coords, int* order,
                        Brick* table, int64_t capacity, CellStats* found, int64_t* made, cudaStream_t stream) {
  if (count < 0 || count > INT_MAX || capacity < kBucket || capacity > UINT_MAX) return cudaErrorInvalidValue;
  const Sized sized{count, bounds, found, made};
  return index_with(Cells(workspace, box), box, count, coords, order, table, capacity, sized, stream);
}

}  // namespace voxmma
