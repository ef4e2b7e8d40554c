// Voxels at coordinates and around points, and weighted sums of their features.
#include <climits>
#include <cmath>

#include "../map/bricks.cuh"
#include "../pool/rows.cuh"
#include "positions.cuh"

namespace voxmma {
namespace {

using namespace detail;

constexpr int kThreads = 256;
constexpr int kCorners = 8;
constexpr int kFlight = 4;  // entries a lane has on their way
constexpr unsigned kWarp = 0xffffffffu;

__device__ __forceinline__ int find_row(const SetView& set, int4 c) {
  const auto capacity = static_cast<uint32_t>(set.capacity);
  const uint2 key = brick_key(c);
  uint32_t bucket = home_bucket(key, capacity);
  BucketKeys keys = BucketKeys::load(set.bricks, bucket);
  int slot;
  while ((slot = keys.find(key)) == kBucket && keys.full()) {
    bucket = next_bucket(bucket, capacity);
    keys = BucketKeys::load(set.bricks, bucket);
  }
  if (slot == kBucket) return -1;
  const uint2 found = load_brick(set.bricks, bucket, slot);
  const int cell = brick_cell(c);
  if ((found.y >> cell & 1u) == 0) return -1;
  return __ldg(set.order + int(found.x) + __popc(found.y & ((1u << cell) - 1)));
}

template <class Int>
__device__ __forceinline__ bool in_range(Int v, int low, int high) {
  return v >= Int{low} && v <= Int{high};
}

template <class Int>
__global__ void __launch_bounds__(kThreads) lookup(const SetView set, const Int* query, int64_t n, int64_t* rows) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= n) return;
  Int value[4];
  if constexpr (sizeof(Int) == 4) {
    const int4 four = __ldg(reinterpret_cast<const int4*>(query) + i);
    value[0] = four.x, value[1] = four.y, value[2] = four.z, value[3] = four.w;
  } else {
#pragma unroll
    for (int a = 0; a < 4; ++a) value[a] = __ldg(query + 4 * i + a);
  }
  bool valid = in_range(value[0], 0, kBatchMax);
#pragma unroll
  for (int a = 1; a < 4; ++a) valid = valid && in_range(value[a], -kCoordBias, kCoordBias - 1);
  rows[i] = valid ? find_row(set, make_int4(int(value[0]), int(value[1]), int(value[2]), int(value[3]))) : -1;
}

// In cells of an axis. The nearest voxel is that of the cell at stride 1, and the floor of this its cell: whole numbers
// far below 2^53 divide without reaching the next one.
template <class P, bool kTrilinear>
__device__ __forceinline__ double position_of(const LocateArgs& args, int64_t point, int axis) {
  const double shift = axis == 0 ? args.shift[0] : axis == 1 ? args.shift[1] : args.shift[2];
  const double edge = axis == 0 ? args.edge[0] : axis == 1 ? args.edge[1] : args.edge[2];
  const double stride = axis == 0 ? args.stride[0] : axis == 1 ? args.stride[1] : args.stride[2];
  const double fine = grid_position(static_cast<const P*>(args.points) + 3 * point + axis, shift, edge);
  return __ddiv_rn(kTrilinear ? fine : floor(fine), stride);
}

// The cell of a position. Far outside it is one that no set has, and safe to convert.
__device__ __forceinline__ double cell_of(double position) {
  constexpr double far = 2.0 * (kCoordBias - 1);
  return fmin(fmax(floor(position), -far), far);
}

// A lane for every corner: those of a point are neighbours, and the first three divide for all.
template <class P, class A, bool kTrilinear>
__global__ void __launch_bounds__(kThreads) locate(const LocateArgs args) {
  constexpr int kLanes = kTrilinear ? kCorners : 1;
  const int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int corner = kTrilinear ? static_cast<int>(threadIdx.x % kLanes) : 0;
  const bool inside = index < args.n * kLanes;
  const int64_t point = inside ? index / kLanes : 0;  // lanes behind the last one take part in the exchanges

  double position[3];
  if constexpr (kTrilinear) {
    const double mine = position_of<P, true>(args, point, corner < 3 ? corner : 0);
#pragma unroll
    for (int a = 0; a < 3; ++a) position[a] = __shfl_sync(kWarp, mine, a, kLanes);
  } else {
#pragma unroll
    for (int a = 0; a < 3; ++a) position[a] = position_of<P, false>(args, point, a);
  }
  int64_t sample = 0;
  if (args.batch != nullptr) {
    sample = args.batch_is_int64 ? __ldg(static_cast<const long long*>(args.batch) + point)
                                 : __ldg(static_cast<const int*>(args.batch) + point);
  }
  // False for NaN and infinities.
  const bool finite = fabs(position[0]) < INFINITY && fabs(position[1]) < INFINITY && fabs(position[2]) < INFINITY;
  const bool valid = finite && sample >= 0 && sample < args.batch_size && sample <= kBatchMax;
  if (inside && !valid) *args.invalid = 1;

  int row = -1;
  double share = 1;
  if (valid) {
    int coord[3];
    bool packable = true;
#pragma unroll
    for (int a = 0; a < 3; ++a) {
      const double at = kTrilinear ? __dsub_rn(position[a], 0.5) : position[a];
      const double base = cell_of(at);
      const int step = corner >> (2 - a) & 1;
      coord[a] = static_cast<int>(base) + step;
      packable = packable && coord_in_range(coord[a]);
      if constexpr (kTrilinear) {
        const double fraction = __dsub_rn(at, base);
        share = __dmul_rn(share, step != 0 ? fraction : __dsub_rn(1.0, fraction));
      }
    }
    if (packable) row = find_row(args.set, make_int4(static_cast<int>(sample), coord[0], coord[1], coord[2]));
  }
  if (row < 0) share = 0;
  double weight = share;
  if constexpr (kTrilinear) {
    __syncwarp();
    double total = __shfl_sync(kWarp, share, 0, kLanes);
#pragma unroll
    for (int k = 1; k < kLanes; ++k) total = __dadd_rn(total, __shfl_sync(kWarp, share, k, kLanes));
    weight = __ddiv_rn(share, total > 0 ? total : 1.0);
  }
  if (!inside) return;
  const A stored = static_cast<A>(weight);  // zero times an infinite feature is NaN: no row where it rounds to zero
  args.rows[index] = stored > 0 ? row : -1;
  static_cast<A*>(args.weights)[index] = stored > 0 ? stored : A{0};
}

__device__ __forceinline__ float plus_product(float sum, float weight, float value) {
  return __fadd_rn(sum, __fmul_rn(value, weight));
}
__device__ __forceinline__ double plus_product(double sum, double weight, double value) {
  return __dadd_rn(sum, __dmul_rn(value, weight));
}

// kRows numbers that lie next to each other, 16 bytes at a time where there are as many.
template <int kRows, class V>
__device__ __forceinline__ void load_all(const V* from, V (&to)[kRows]) {
  constexpr int n = kRows * sizeof(V) % 16 == 0 ? 16 / int(sizeof(V)) : 1;
#pragma unroll
  for (int k = 0; k < kRows; k += n) {
    Piece<V, n> piece;
    piece.load(from + k);
#pragma unroll
    for (int i = 0; i < n; ++i) to[k + i] = piece[i];
  }
}

// A thread for every piece of a row of y.
template <class T, int kBytes, int kRows>
__global__ void __launch_bounds__(kThreads) gather(const GatherArgs args) {
  constexpr int n = kBytes / int(sizeof(T));
  using A = SumOf<T>;
  const int64_t vecs = args.channels / n, items = args.n * vecs;
  const int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (index >= items) return;
  const int64_t point = items <= INT_MAX ? int64_t{uint32_t(index) / uint32_t(vecs)} : index / vecs;
  const int64_t column = (index - point * vecs) * n;
  const T* x = static_cast<const T*>(args.x) + column;
  int row[kRows];
  A weight[kRows];
  load_all<kRows>(args.rows + point * kRows, row);
  load_all<kRows>(static_cast<const A*>(args.weights) + point * kRows, weight);
  Piece<T, n> value[kRows];
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    if (row[k] >= 0) value[k].load(x + row[k] * args.ldx);
  }
  A sum[n] = {};
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    if (row[k] < 0) continue;
#pragma unroll
    for (int i = 0; i < n; ++i) sum[i] = plus_product(sum[i], weight[k], value[k][i]);
  }
  Piece<T, n> made;
  made.set(sum);
  made.store(static_cast<T*>(args.y) + point * args.channels + column);
}

// A warp for every row of dx: `columns` lanes take neighbouring pieces of a row, the others other entries of it, and the
// lanes of a piece are added up as a tree.
template <class T, int kBytes, int kRows>
__global__ void __launch_bounds__(kThreads) scatter(const ScatterArgs args, int columns) {
  constexpr int n = kBytes / int(sizeof(T));
  using A = SumOf<T>;
  const int64_t row = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / 32;
  if (row >= args.n_out) return;
  const int lane = static_cast<int>(threadIdx.x % 32), slots = 32 / columns;
  const int slot = lane / columns, vecs = static_cast<int>(args.channels / n);
  const int64_t begin = __ldg(reinterpret_cast<const long long*>(args.starts) + row);
  const int64_t end = __ldg(reinterpret_cast<const long long*>(args.starts) + row + 1);
  for (int first = 0; first < vecs; first += columns) {
    const int piece = first + lane % columns;
    const bool mine = piece < vecs;
    const T* dy = static_cast<const T*>(args.dy) + int64_t{piece} * n;
    A sum[n] = {};
    for (int64_t j = begin + slot; mine && j < end; j += kFlight * slots) {
      int64_t entry[kFlight];
#pragma unroll
      for (int u = 0; u < kFlight; ++u) {
        if (j + u * slots < end) entry[u] = __ldg(reinterpret_cast<const long long*>(args.entries) + j + u * slots);
      }
      A weight[kFlight];
      Piece<T, n> value[kFlight];
#pragma unroll
      for (int u = 0; u < kFlight; ++u) {
        if (j + u * slots >= end) continue;
        weight[u] = __ldg(static_cast<const A*>(args.weights) + entry[u]);
        value[u].load(dy + entry[u] / kRows * args.ldy);
      }
#pragma unroll
      for (int u = 0; u < kFlight; ++u) {
        if (j + u * slots >= end) continue;
#pragma unroll
        for (int i = 0; i < n; ++i) sum[i] = plus_product(sum[i], weight[u], value[u][i]);
      }
    }
    __syncwarp();
    for (int d = columns; d < 32; d *= 2) {
#pragma unroll
      for (int i = 0; i < n; ++i) sum[i] += __shfl_xor_sync(kWarp, sum[i], d);
    }
    if (mine && slot == 0) {
      Piece<T, n> made;
      made.set(sum);
      made.store(static_cast<T*>(args.dx) + row * args.channels + int64_t{piece} * n);
    }
  }
}

// Blocks for that many threads; 0: too many.
unsigned blocks_for(int64_t threads) {
  const int64_t blocks = (threads + kThreads - 1) / kThreads;
  return blocks > INT_MAX ? 0u : static_cast<unsigned>(blocks);
}

bool is_valid(const SetView& set) { return set.capacity >= 1 && set.capacity <= UINT_MAX; }

// Bytes of the pieces that rows are taken in: 16, 8 or an element.
int piece_bytes(const void* base, int64_t ld, int64_t channels, int element) {
  for (int bytes = 16; bytes > element; bytes /= 2) {
    if (bytes >= 8 && channels * element % bytes == 0 && ld * element % bytes == 0 &&
        reinterpret_cast<uintptr_t>(base) % bytes == 0) {
      return bytes;
    }
  }
  return element;
}

template <class P>
cudaError_t launch_locate(const LocateArgs& args, cudaStream_t stream) {
  const unsigned blocks = blocks_for(args.trilinear ? args.n * kCorners : args.n);
  if (blocks == 0) return cudaErrorInvalidValue;
  const bool wide = args.weight_dtype == DType::f64;
  const auto kernel = args.trilinear ? (wide ? locate<P, double, true> : locate<P, float, true>)
                                     : (wide ? locate<P, double, false> : locate<P, float, false>);
  kernel<<<blocks, kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

template <class T>
cudaError_t launch_gather(const GatherArgs& args, cudaStream_t stream) {
  constexpr int one = sizeof(T);
  const int bytes = piece_bytes(args.x, args.ldx, args.channels, one);
  const unsigned blocks = blocks_for(args.n * (args.channels * one / bytes));
  if (blocks == 0) return cudaErrorInvalidValue;
  const bool single = args.corners == 1;
  const auto kernel = bytes == 16  ? (single ? gather<T, 16, 1> : gather<T, 16, kCorners>)
                      : bytes == 8 ? (single ? gather<T, 8, 1> : gather<T, 8, kCorners>)
                                   : (single ? gather<T, one, 1> : gather<T, one, kCorners>);
  kernel<<<blocks, kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

template <class T>
cudaError_t launch_scatter(const ScatterArgs& args, cudaStream_t stream) {
  constexpr int one = sizeof(T);
  const int bytes = piece_bytes(args.dy, args.ldy, args.channels, one);
  const int64_t vecs = args.channels * one / bytes;
  const unsigned blocks = blocks_for(args.n_out * 32);
  if (blocks == 0 || vecs > INT_MAX / 2) return cudaErrorInvalidValue;
  int columns = 1;
  while (columns < 32 && columns < vecs) columns *= 2;
  const bool single = args.corners == 1;
  const auto kernel = bytes == 16  ? (single ? scatter<T, 16, 1> : scatter<T, 16, kCorners>)
                      : bytes == 8 ? (single ? scatter<T, 8, 1> : scatter<T, 8, kCorners>)
                                   : (single ? scatter<T, one, 1> : scatter<T, one, kCorners>);
  kernel<<<blocks, kThreads, 0, stream>>>(args, columns);
  return cudaGetLastError();
}

}  // namespace

cudaError_t lookup_rows(const SetView& set, const void* query, bool is_int64, int64_t n, int64_t* rows,
                        cudaStream_t stream) {
  if (n == 0) return cudaSuccess;
  const unsigned blocks = blocks_for(n);
  if (n < 0 || blocks == 0 || !is_valid(set)) return cudaErrorInvalidValue;
  if (is_int64) {
    lookup<<<blocks, kThreads, 0, stream>>>(set, static_cast<const long long*>(query), n, rows);
  } else {
    lookup<<<blocks, kThreads, 0, stream>>>(set, static_cast<const int*>(query), n, rows);
  }
  return cudaGetLastError();
}

cudaError_t locate_points(const LocateArgs& args, cudaStream_t stream) {
  if (args.n < 0 || !is_valid(args.set)) return cudaErrorInvalidValue;
  if (args.n == 0) return cudaSuccess;
  return with_dtype(args.dtype, [&](auto of) { return launch_locate<typename decltype(of)::type>(args, stream); });
}

cudaError_t gather_weighted(const GatherArgs& args, cudaStream_t stream) {
  if (args.n < 0 || args.channels < 0 || (args.corners != 1 && args.corners != kCorners) || !is_aligned(args.rows, 0) ||
      !is_aligned(args.weights, 0)) {
    return cudaErrorInvalidValue;
  }
  if (args.n == 0 || args.channels == 0) return cudaSuccess;
  return with_dtype(args.dtype, [&](auto of) { return launch_gather<typename decltype(of)::type>(args, stream); });
}

cudaError_t scatter_weighted(const ScatterArgs& args, cudaStream_t stream) {
  if (args.n_out < 0 || args.channels < 0 || (args.corners != 1 && args.corners != kCorners)) {
    return cudaErrorInvalidValue;
  }
  if (args.n_out == 0 || args.channels == 0) return cudaSuccess;
  return with_dtype(args.dtype, [&](auto of) { return launch_scatter<typename decltype(of)::type>(args, stream); });
}

}  // namespace voxmma
