// Range and extents of rows. Shared by the kernels that index a set.
#pragma once

#include <algorithm>
#include <climits>

#include "bricks.cuh"
#include "grid.cuh"

namespace voxmma {
namespace {

using namespace detail;

__device__ __forceinline__ void init_bounds(int* bounds) {
  for (int a = 0; a < 4; ++a) {
    bounds[a] = INT_MAX;
    bounds[4 + a] = INT_MIN;
  }
}

// -1 is also the largest unsigned number.
__device__ __forceinline__ void report_smallest(int64_t* row, int64_t candidate) {
  atomicMin(reinterpret_cast<unsigned long long*>(row), static_cast<unsigned long long>(candidate));
}

// Where valid rows lie.
struct Range {
  int low[4] = {0, -kCoordBias, -kCoordBias, -kCoordBias};
  int high[4] = {kBatchMax, kCoordBias - 1, kCoordBias - 1, kCoordBias - 1};

  Range() = default;
  explicit Range(const OrderArgs& args) {
    if (args.sized == nullptr) return;
    std::copy(args.low, args.low + 4, low);
    std::copy(args.high, args.high + 4, high);
  }
  __device__ __forceinline__ bool has(int4 c) const {
    return c.x >= low[0] && c.x <= high[0] && c.y >= low[1] && c.y <= high[1] && c.z >= low[2] && c.z <= high[2] &&
           c.w >= low[3] && c.w <= high[3];
  }
};

// What measure_block hands to threads 0..3: smallest and largest of an axis, and the smallest row outside the range or
// INT_MAX.
struct Extents {
  int low, high, bad;
};

// Of the rows of a block of a grid-stride loop. By the whole block.
__device__ __forceinline__ Extents measure_block(const int4* coords, const Rows& rows, const Range& range) {
  __shared__ int warp_low[kThreads / 32][4], warp_high[kThreads / 32][4];
  __shared__ int first_bad;
  int low[4] = {INT_MAX, INT_MAX, INT_MAX, INT_MAX};
  int high[4] = {INT_MIN, INT_MIN, INT_MIN, INT_MIN};
  int bad = INT_MAX;
  if (threadIdx.x == 0) first_bad = INT_MAX;
  __syncthreads();
  const int64_t step = int64_t(gridDim.x) * kThreads, n = rows.number();
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < n; i += step) {
    const int4 c = coords[i];
    if (!range.has(c)) {
      bad = min(bad, static_cast<int>(i));
      continue;
    }
    const int v[4] = {c.x, c.y, c.z, c.w};
#pragma unroll
    for (int a = 0; a < 4; ++a) {
      low[a] = min(low[a], v[a]);
      high[a] = max(high[a], v[a]);
    }
  }
  if (bad != INT_MAX) atomicMin(&first_bad, bad);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int a = 0; a < 4; ++a) {
    const int lo = __reduce_min_sync(0xffffffffu, low[a]);
    const int hi = __reduce_max_sync(0xffffffffu, high[a]);
    if (lane == 0) {
      warp_low[warp][a] = lo;
      warp_high[warp][a] = hi;
    }
  }
  __syncthreads();
  Extents made{INT_MAX, INT_MIN, first_bad};
  if (threadIdx.x < 4) {
    for (int w = 0; w < kThreads / 32; ++w) {
      made.low = min(made.low, warp_low[w][threadIdx.x]);
      made.high = max(made.high, warp_high[w][threadIdx.x]);
    }
  }
  return made;
}

}  // namespace
}  // namespace voxmma
