// Voxels of points, and of coordinates that repeat: cells, runs of equal cells, and the sums over a run's rows.
#include <cub/device/device_radix_sort.cuh>
#include <cub/device/device_scan.cuh>

#include <algorithm>
#include <climits>

#include "../map/bricks.cuh"
#include "../map/cells.cuh"
#include "../map/grid.cuh"
#include "../pool/rows.cuh"
#include "positions.cuh"

namespace voxmma {
namespace {

using namespace detail;

constexpr int kMergeThreads = 128;

// ---- cells --------------------------------------------------------------------------------------------------------

template <class T>
__device__ __forceinline__ int cell_of(const T* point, int axis, const PointArgs& args) {
  const double cell = floor(grid_position(point + axis, args.origin[axis], args.edge[axis]));
  return cell >= -kCoordBias && cell < kCoordBias ? static_cast<int>(cell) : INT_MIN;  // nan, too
}

template <class T>
__global__ void __launch_bounds__(kThreads) write_cells(const PointArgs args) {
  const int64_t step = int64_t(gridDim.x) * kThreads;
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < args.n; i += step) {
    const T* point = static_cast<const T*>(args.points) + 3 * i;
    const int64_t batch = args.batch != nullptr ? args.batch[i] : 0;
    reinterpret_cast<int4*>(args.cells)[i] =
        make_int4(batch >= 0 && batch <= kBatchMax ? static_cast<int>(batch) : -1, cell_of(point, 0, args),
                  cell_of(point, 1, args), cell_of(point, 2, args));
  }
}

// ---- runs ---------------------------------------------------------------------------------------------------------

// Keys whose order is that of (batch, x, y, z).
template <class Key>
__global__ void __launch_bounds__(kThreads)
    pack_cells(const int4* cells, int64_t n, const CoordBox box, Key* keys, int* rows) {
  const int64_t step = int64_t(gridDim.x) * kThreads;
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < n; i += step) {
    const int4 c = cells[i];
    Key key = uint32_t(c.x) - uint32_t(box.low[0]);
    key = key << box.bits[1] | (uint32_t(c.y) - uint32_t(box.low[1]));
    key = key << box.bits[2] | (uint32_t(c.z) - uint32_t(box.low[2]));
    key = key << box.bits[3] | (uint32_t(c.w) - uint32_t(box.low[3]));
    keys[i] = key;
    rows[i] = static_cast<int>(i);
  }
}

template <class Key>
__global__ void __launch_bounds__(kThreads) mark_runs(const Key* sorted, int64_t n, int* fresh) {
  const int64_t step = int64_t(gridDim.x) * kThreads;
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < n; i += step) {
    fresh[i] = i == 0 || sorted[i] != sorted[i - 1];
  }
}

// `runs`: how many have begun up to and with each rank.
__global__ void __launch_bounds__(kThreads) place_runs(const int* runs, const GroupArgs args) {
  const int64_t step = int64_t(gridDim.x) * kThreads;
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < args.n; i += step) {
    const int run = runs[i] - 1;
    args.run_of[args.order[i]] = run;
    if (i == 0 || runs[i - 1] != runs[i]) args.start[run] = static_cast<int>(i);
    if (i == args.n - 1) {
      args.start[run + 1] = static_cast<int>(args.n);
      args.stats->count = run + 1;
    }
  }
}

__global__ void __launch_bounds__(kThreads) find_longest(const GroupArgs args) {
  const int64_t count = args.stats->count, step = int64_t(gridDim.x) * kThreads;
  int longest = 0;
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < count; i += step) {
    longest = max(longest, args.start[i + 1] - args.start[i]);
  }
  __shared__ int warp_longest[kThreads / 32];
  longest = __reduce_max_sync(0xffffffffu, longest);
  if (threadIdx.x % 32 == 0) warp_longest[threadIdx.x / 32] = longest;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < kThreads / 32; ++w) longest = max(longest, warp_longest[w]);
    if (longest > 0) {
      atomicMax(reinterpret_cast<unsigned long long*>(&args.stats->longest), static_cast<unsigned long long>(longest));
    }
  }
}

__global__ void __launch_bounds__(kThreads) copy_runs(const GroupArgs args, int64_t count, int4* coords, int* start) {
  const int64_t step = int64_t(gridDim.x) * kThreads;
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i <= count; i += step) {
    const int first = args.start[i];
    start[i] = first;
    if (i < count) coords[i] = reinterpret_cast<const int4*>(args.cells)[args.order[first]];
  }
}

// Scratch memory behind `workspace`, in this order, each part aligned.
template <class Key>
struct Grouping {
  Key *key_in, *key_out;
  int *row_in, *fresh, *runs;
  void* cub;
  size_t sort_bytes = 0, scan_bytes = 0, total_bytes = 0;

  cudaError_t lay_out(void* base, int64_t n) {
    cudaError_t error = cub::DeviceRadixSort::SortPairs(nullptr, sort_bytes, static_cast<const Key*>(nullptr),
                                                        static_cast<Key*>(nullptr), static_cast<const int*>(nullptr),
                                                        static_cast<int*>(nullptr), static_cast<int>(n), 0,
                                                        8 * int(sizeof(Key)), cudaStream_t{});
    if (error == cudaSuccess) {
      error = cub::DeviceScan::InclusiveSum(nullptr, scan_bytes, static_cast<const int*>(nullptr),
                                            static_cast<int*>(nullptr), static_cast<int>(n), cudaStream_t{});
    }
    Carver carve(base);
    key_in = carve.take<Key>(n);
    key_out = carve.take<Key>(n);
    row_in = carve.take<int>(n);
    fresh = carve.take<int>(n);
    runs = carve.take<int>(n);
    cub = carve.take<unsigned char>(static_cast<int64_t>(std::max(sort_bytes, scan_bytes)));
    total_bytes = carve.bytes;
    return error;
  }
};

template <class Key>
cudaError_t group_with(const GroupArgs& args, cudaStream_t stream) {
  const int blocks = blocks_for(args.n), n = static_cast<int>(args.n);
  Grouping<Key> g;
  cudaError_t error = g.lay_out(args.workspace, args.n);
  if (error != cudaSuccess) return error;
  pack_cells<Key>
      <<<blocks, kThreads, 0, stream>>>(reinterpret_cast<const int4*>(args.cells), n, args.box, g.key_in, g.row_in);
  if ((error = cudaGetLastError()) != cudaSuccess) return error;
  error = cub::DeviceRadixSort::SortPairs(g.cub, g.sort_bytes, static_cast<const Key*>(g.key_in), g.key_out,
                                          static_cast<const int*>(g.row_in), args.order, n, 0,
                                          std::max(bits_of(args.box), 1), stream);
  if (error != cudaSuccess) return error;
  mark_runs<Key><<<blocks, kThreads, 0, stream>>>(g.key_out, n, g.fresh);
  if ((error = cudaGetLastError()) != cudaSuccess) return error;
  error = cub::DeviceScan::InclusiveSum(g.cub, g.scan_bytes, static_cast<const int*>(g.fresh), g.runs, n, stream);
  if (error != cudaSuccess) return error;
  place_runs<<<blocks, kThreads, 0, stream>>>(g.runs, args);
  if ((error = cudaGetLastError()) != cudaSuccess) return error;
  find_longest<<<blocks, kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

bool is_narrow(const CoordBox& box) { return bits_of(box) <= 32; }

// ---- sums ---------------------------------------------------------------------------------------------------------

template <class T>
using Sum = std::conditional_t<sizeof(T) == 2, float, double>;

// Adds rows as a balanced tree: part[l] is the sum of 2^l rows, there where bit l of the number of rows is set.
template <class A, int n, int kLevels>
struct Tree {
  A part[kLevels][n];
  int count = 0;

  __device__ __forceinline__ void push(A (&value)[n]) {
    bool carried = true;
#pragma unroll
    for (int l = 0; l < kLevels; ++l) {
      const bool taken = count >> l & 1;
#pragma unroll
      for (int i = 0; i < n; ++i) {
        if (carried && taken) value[i] = part[l][i] + value[i];
        if (carried && !taken) part[l][i] = value[i];
      }
      carried = carried && taken;
    }
    ++count;
  }

  // The youngest part is the smallest; the older of two stands on the left.
  __device__ __forceinline__ void finish(A (&sum)[n]) const {
    bool any = false;
#pragma unroll
    for (int l = 0; l < kLevels; ++l) {
      if (!(count >> l & 1)) continue;
#pragma unroll
      for (int i = 0; i < n; ++i) sum[i] = any ? part[l][i] + sum[i] : part[l][i];
      any = true;
    }
  }
};

template <class T, int kBytes, int kLevels>
__global__ void __launch_bounds__(kMergeThreads) merge_rows(const MergeArgs args) {
  constexpr int n = kBytes / int(sizeof(T)), kFlight = 4;  // rows on their way
  using A = Sum<T>;
  const int64_t vecs = args.channels / n, index = int64_t{blockIdx.x} * kMergeThreads + threadIdx.x;
  if (index >= args.count * vecs) return;
  const int64_t run = index / vecs, column = (index - run * vecs) * n;
  const int begin = __ldg(args.start + run), end = __ldg(args.start + run + 1);
  const T* x = static_cast<const T*>(args.x) + column;
  Tree<A, n, kLevels> tree;
  for (int j = begin; j < end; j += kFlight) {
    Piece<T, n> value[kFlight];
    int row[kFlight];
#pragma unroll
    for (int u = 0; u < kFlight; ++u) {
      if (j + u < end) row[u] = __ldg(args.order + j + u);
    }
#pragma unroll
    for (int u = 0; u < kFlight; ++u) {
      if (j + u < end) value[u].load(x + row[u] * args.ldx);
    }
#pragma unroll
    for (int u = 0; u < kFlight; ++u) {
      if (j + u >= end) continue;
      A term[n];
#pragma unroll
      for (int i = 0; i < n; ++i) term[i] = value[u][i];
      tree.push(term);
    }
  }
  A sum[n] = {};
  tree.finish(sum);
  if (args.mean) {
#pragma unroll
    for (int i = 0; i < n; ++i) sum[i] = sum[i] / static_cast<A>(end - begin);
  }
  const int64_t at = run * args.channels + column;
  if (args.wide) {
#pragma unroll
    for (int i = 0; i < n; ++i) static_cast<A*>(args.out)[at + i] = sum[i];
  } else {
    Piece<T, n> made;
    made.set(sum);
    made.store(static_cast<T*>(args.out) + at);
  }
}

template <class T>
cudaError_t merge_typed(const MergeArgs& args, cudaStream_t stream) {
  constexpr int one = sizeof(T);
  const bool vector =
      args.channels * int64_t{one} % 16 == 0 && is_aligned(args.x, args.ldx * int64_t{one}) && is_aligned(args.out, 16);
  const int64_t vecs = vector ? args.channels * int64_t{one} / 16 : args.channels;
  const int64_t grid = (args.count * vecs + kMergeThreads - 1) / kMergeThreads;
  if (grid > INT_MAX) return cudaErrorInvalidValue;
  static_assert(kMaxMergedRows < 1 << 13, "levels of the tree");
  const auto kernel = args.longest < 1 << 3   ? (vector ? merge_rows<T, 16, 3> : merge_rows<T, one, 3>)
                      : args.longest < 1 << 6 ? (vector ? merge_rows<T, 16, 6> : merge_rows<T, one, 6>)
                                              : (vector ? merge_rows<T, 16, 13> : merge_rows<T, one, 13>);
  kernel<<<static_cast<unsigned>(grid), kMergeThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace

cudaError_t cells_of_points(const PointArgs& args, cudaStream_t stream) {
  if (args.n < 0 || args.n > INT_MAX) return cudaErrorInvalidValue;
  if (args.n == 0) return cudaSuccess;
  const auto kernel = with_dtype(args.dtype, [](auto of) { return &write_cells<typename decltype(of)::type>; });
  kernel<<<blocks_for(args.n), kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

cudaError_t measure_cells(const int* cells, int64_t n, CoordStats* stats, cudaStream_t stream) {
  return measure_coords(cells, n, stats, nullptr, stream);
}

size_t group_workspace(const CoordBox& box, int64_t n) {
  Grouping<uint32_t> narrow;
  Grouping<uint64_t> wide;
  if (is_narrow(box)) {
    narrow.lay_out(nullptr, n);
    return narrow.total_bytes;
  }
  wide.lay_out(nullptr, n);
  return wide.total_bytes;
}

cudaError_t group_cells(const GroupArgs& args, cudaStream_t stream) {
  if (args.n < 0 || args.n > INT_MAX) return cudaErrorInvalidValue;
  const cudaError_t error = set_bytes(args.stats, 0, sizeof(RunStats), stream);
  if (error != cudaSuccess || args.n == 0) return error;
  return is_narrow(args.box) ? group_with<uint32_t>(args, stream) : group_with<uint64_t>(args, stream);
}

cudaError_t take_runs(const GroupArgs& args, int64_t count, int* coords, int* start, cudaStream_t stream) {
  copy_runs<<<blocks_for(count + 1), kThreads, 0, stream>>>(args, count, reinterpret_cast<int4*>(coords), start);
  return cudaGetLastError();
}

cudaError_t merge_runs(const MergeArgs& args, cudaStream_t stream) {
  if (args.channels < 0 || args.ldx < 0 || args.count < 0 || args.longest > kMaxMergedRows) {
    return cudaErrorInvalidValue;
  }
  if (args.count == 0 || args.channels == 0) return cudaSuccess;
  return with_dtype(args.dtype, [&](auto of) { return merge_typed<typename decltype(of)::type>(args, stream); });
}

}  // namespace voxmma
