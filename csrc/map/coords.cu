// Order and index of a coordinate set: range check, duplicates, extents, Morton order and brick table, without a host
// sync.
#include <cub/device/device_radix_sort.cuh>

#include <algorithm>
#include <climits>

#include "bricks.cuh"
#include "cells.cuh"
#include "grid.cuh"
#include "measure.cuh"

namespace voxmma {
namespace {

using namespace detail;

constexpr int64_t kMinCapacity = 64;
constexpr int kSortBits = 32;  // at a time

// Scratch memory behind `workspace`, in this order, each part aligned.
struct Workspace {
  uint32_t *key_in, *key_out;
  int *row_in, *row_low;
  void* cub;
  size_t cub_bytes, total_bytes;
};

cudaError_t make_workspace(void* base, int64_t n, Workspace* w) {
  w->cub_bytes = 0;
  const cudaError_t error = cub::DeviceRadixSort::SortPairs(
      nullptr, w->cub_bytes, static_cast<const uint32_t*>(nullptr), static_cast<uint32_t*>(nullptr),
      static_cast<const int*>(nullptr), static_cast<int*>(nullptr), static_cast<int>(n), 0, kSortBits, cudaStream_t{});
  Carver carve(base);
  w->key_in = carve.take<uint32_t>(n);
  w->key_out = carve.take<uint32_t>(n);
  w->row_in = carve.take<int>(n);
  w->row_low = carve.take<int>(n);
  w->cub = carve.take<unsigned char>(w->cub_bytes);
  w->total_bytes = carve.bytes;
  return error;
}

// -1 is also the largest unsigned number, so an unsigned atomicMin finds the smallest row or leaves -1.
__global__ void init_stats(CoordStats* stats, CellStats* cells) {
  if (cells != nullptr) *cells = CellStats{};
  stats->bad_row = stats->duplicate = -1;
  stats->bricks = 0;
  init_bounds(stats->min);
}

__global__ void init_sized(SizedStats* stats, int* bounds, const int64_t* count) {
  *stats = {*count, -1, -1, 0};
  init_bounds(bounds);
}

// Extents [8] of the valid rows, and the first row that is none.
__global__ void __launch_bounds__(kThreads)
    measure(const int4* coords, const Rows rows, const __grid_constant__ Range range, int* bounds, int64_t* bad_row) {
  const Extents mine = measure_block(coords, rows, range);
  if (threadIdx.x == 0 && mine.bad != INT_MAX) report_smallest(bad_row, mine.bad);
  if (threadIdx.x < 4 && mine.low <= mine.high) {
    atomicMin(bounds + threadIdx.x, mine.low);
    atomicMax(bounds + 4 + threadIdx.x, mine.high);
  }
}

// Word `word` of the Morton codes, of the rows as they come or as `rows` names them. All ones for rows that are bad or
// beyond the number that there are: the sort is stable, so these come behind all others.
__global__ void __launch_bounds__(kThreads)
    sort_keys(const __grid_constant__ OrderArgs args, const __grid_constant__ Range range, int word, const int* rows,
              uint32_t* key_out, int* row_out) {
  const auto* coords = reinterpret_cast<const int4*>(args.coords);
  const CoordBox box = box_of(args.bounds, args.box);
  const int64_t step = int64_t(gridDim.x) * kThreads, number = Rows{args.n, args.count}.number();
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < args.n; i += step) {
    const int row = rows != nullptr ? rows[i] : static_cast<int>(i);
    uint32_t key = ~0u;
    if (row < number) {
      const int4 c = coords[row];
      if (args.sized == nullptr || range.has(c)) key = static_cast<uint32_t>(morton<uint64_t>(box, c) >> (32 * word));
    }
    key_out[i] = key;
    if (rows == nullptr) row_out[i] = row;
  }
}

__device__ __forceinline__ bool same(uint2 a, uint2 b) { return a.x == b.x && a.y == b.y; }

// Bricks and duplicates of an ordered set: both are runs.
__global__ void __launch_bounds__(kThreads)
    check_order(const __grid_constant__ OrderArgs args, const __grid_constant__ Range range) {
  const auto* coords = reinterpret_cast<const int4*>(args.coords);
  const int* order = args.order;
  int bricks = 0;
  const int64_t step = int64_t(gridDim.x) * kThreads, n = Rows{args.n, args.count}.number();
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < n; i += step) {
    const int row = order[i];
    const int4 c = coords[row];
    bool new_brick = true;
    if (i > 0) {
      const int twin = order[i - 1];
      const int4 before = coords[twin];
      new_brick = !same(brick_key(c), brick_key(before));
      // The second row of a run repeats the first, the earliest of its place; later ones are larger rows.
      if (!new_brick && brick_cell(c) == brick_cell(before) && range.has(c)) {
        report_smallest(args.sized != nullptr ? &args.sized->duplicate : &args.stats->duplicate,
                        int64_t{row} << 32 | int64_t{twin});
      }
    }
    bricks += new_brick;
  }
  if (args.stats == nullptr) return;
  __shared__ int warp_bricks[kThreads / 32];
  bricks = __reduce_add_sync(0xffffffffu, bricks);
  if (threadIdx.x % 32 == 0) warp_bricks[threadIdx.x / 32] = bricks;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < kThreads / 32; ++w) bricks += warp_bricks[w];
    atomicAdd(reinterpret_cast<unsigned long long*>(&args.stats->bricks), static_cast<unsigned long long>(bricks));
  }
}

// The first rank of each brick enters it.
__global__ void __launch_bounds__(kThreads)
    insert_bricks(const int4* coords, const int* order, const Rows rows, Brick* table, uint32_t capacity) {
  const int64_t step = int64_t(gridDim.x) * kThreads, n = rows.number();
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < n; i += step) {
    const int4 c = coords[order[i]];
    if (!packable(c)) continue;
    const uint2 key = brick_key(c);
    if (i > 0 && same(key, brick_key(coords[order[i - 1]]))) continue;
    uint32_t mask = 1u << brick_cell(c);
    for (int64_t j = i + 1; j < min(i + 8, n); ++j) {
      const int4 next = coords[order[j]];
      if (!same(key, brick_key(next))) break;
      mask |= 1u << brick_cell(next);
    }
    insert_brick(table, capacity, key, static_cast<int>(i), mask);
  }
}

}  // namespace

int bits_of(const CoordBox& box) { return total_bits(box); }

CoordBox box_around(const int* min, const int* max) { return make_box(min, max); }

cudaError_t measure_coords(const int* coords, int64_t n, CoordStats* stats, CellStats* cells, cudaStream_t stream) {
  init_stats<<<1, 1, 0, stream>>>(stats, cells);
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess || n == 0) return error;
  measure<<<blocks_for(n), kThreads, 0, stream>>>(reinterpret_cast<const int4*>(coords), Rows{n}, Range{}, stats->min,
                                                  &stats->bad_row);
  return cudaGetLastError();
}

size_t order_workspace(int64_t n) {
  Workspace w;
  make_workspace(nullptr, n, &w);
  return w.total_bytes;
}

cudaError_t order_coords(const OrderArgs& args, cudaStream_t stream) {
  if (args.n < 0 || args.n > INT_MAX || (args.sized != nullptr && args.stats != nullptr)) return cudaErrorInvalidValue;
  const int blocks = blocks_for(args.n), n = static_cast<int>(args.n);
  const Range range(args);
  Workspace w;
  cudaError_t error = make_workspace(args.workspace, args.n, &w);
  if (error != cudaSuccess) return error;
  if (args.stats != nullptr) {
    error = measure_coords(args.coords, args.n, args.stats, nullptr, stream);
    if (error != cudaSuccess) return error;
  }
  if (args.sized != nullptr) {
    init_sized<<<1, 1, 0, stream>>>(args.sized, args.bounds, args.count);
    if ((error = cudaGetLastError()) != cudaSuccess || n == 0) return error;
    measure<<<blocks, kThreads, 0, stream>>>(reinterpret_cast<const int4*>(args.coords), Rows{n, args.count}, range,
                                             args.bounds, &args.sized->bad_row);
    if ((error = cudaGetLastError()) != cudaSuccess) return error;
  }
  if (n == 0) return cudaSuccess;

  const int bits = bits_of(args.box);
  const int words = bits > kSortBits ? 2 : 1;
  for (int word = 0; word < words; ++word) {  // least significant first: the sort is stable
    const int* rows = word == 0 ? nullptr : w.row_low;
    sort_keys<<<blocks, kThreads, 0, stream>>>(args, range, word, rows, w.key_in, w.row_in);
    if ((error = cudaGetLastError()) != cudaSuccess) return error;
    error = cub::DeviceRadixSort::SortPairs(w.cub, w.cub_bytes, static_cast<const uint32_t*>(w.key_in), w.key_out,
                                            static_cast<const int*>(word == 0 ? w.row_in : w.row_low),
                                            word == words - 1 ? args.order : w.row_low, n, 0,
                                            std::clamp(bits - word * kSortBits, 1, kSortBits), stream);
    if (error != cudaSuccess) return error;
  }
  if (args.stats != nullptr || args.sized != nullptr) check_order<<<blocks, kThreads, 0, stream>>>(args, range);
  return cudaGetLastError();
}

int64_t brick_capacity(int64_t n, int64_t bricks) {
  const int64_t slots = std::clamp<int64_t>(bricks >= 0 ? 5 * bricks / 2 : n + n / 2, kMinCapacity, UINT_MAX - kBucket);
  return (slots + kBucket - 1) / kBucket * kBucket;
}

cudaError_t build_bricks(const int* coords, const int* order, int64_t n, const int64_t* count, Brick* table,
                         int64_t capacity, cudaStream_t stream) {
  if (n < 0 || n > INT_MAX || capacity < kBucket || capacity > UINT_MAX) return cudaErrorInvalidValue;
  const cudaError_t error = set_bytes(table, 0xff, size_t(capacity) * sizeof(Brick), stream);
  if (error != cudaSuccess || n == 0) return error;
  insert_bricks<<<blocks_for(n), kThreads, 0, stream>>>(reinterpret_cast<const int4*>(coords), order, Rows{n, count},
                                                        table, static_cast<uint32_t>(capacity));
  return cudaGetLastError();
}

}  // namespace voxmma
