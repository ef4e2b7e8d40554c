// Sums and largest rows of short blocks of rows: one level of the tree over the samples.
#include <climits>

#include "rows.cuh"
#include "voxmma/pool.h"

namespace voxmma {
namespace {

using namespace detail;

constexpr int kThreads = 128;
constexpr int kFlight = 16;  // rows a thread has on their way, and as many numbers of the rows after them

struct Item {
  int64_t block, begin, end;
  int64_t column;

  __device__ Item(const SegmentArgs& args, int64_t item, int64_t vecs, int n)
      : block(item / vecs), column((item - block * vecs) * n) {
    begin = __ldg(args.starts + block);
    end = block + 1 < args.blocks ? __ldg(args.starts + block + 1) : args.n_rows;
  }
};

template <class T, int kBytes>
__global__ void __launch_bounds__(kThreads) sum_blocks(const SegmentArgs args) {
  constexpr int n = kBytes / int(sizeof(T));
  using A = SumOf<T>;
  const int64_t vecs = args.channels / n, index = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (index >= args.blocks * vecs) return;
  const Item item(args, index, vecs, n);
  const T* x = static_cast<const T*>(args.x) + item.column;
  int64_t row[kFlight];
#pragma unroll
  for (int u = 0; u < kFlight; ++u) {
    if (item.begin + u < item.end) row[u] = __ldg(args.rows + item.begin + u);
  }
  A sum[n] = {};
  for (int64_t j = item.begin; j < item.end; j += kFlight) {
    Piece<T, n> value[kFlight];
#pragma unroll
    for (int u = 0; u < kFlight; ++u) {
      if (j + u < item.end) value[u].load(x + row[u] * args.ldx);
    }
#pragma unroll
    for (int u = 0; u < kFlight; ++u) {
      if (j + kFlight + u < item.end) row[u] = __ldg(args.rows + j + kFlight + u);
    }
#pragma unroll
    for (int u = 0; u < kFlight; ++u) {
      if (j + u >= item.end) continue;
#pragma unroll
      for (int i = 0; i < n; ++i) sum[i] += value[u][i];
    }
  }
  A* out = static_cast<A*>(args.out) + item.block * args.channels + item.column;
#pragma unroll
  for (int i = 0; i < n; ++i) out[i] = sum[i];
}

// kCandidates: rows stand for other rows, a different one for each channel.
template <class T, int kBytes, bool kCandidates>
__global__ void __launch_bounds__(kThreads) argmax_blocks(const SegmentArgs args) {
  constexpr int n = kBytes / int(sizeof(T));
  static_assert(n == 1 || !kCandidates, "candidates differ from channel to channel");
  const int64_t vecs = args.channels / n, index = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (index >= args.blocks * vecs) return;
  const Item item(args, index, vecs, n);
  const T* x = static_cast<const T*>(args.x) + item.column;
  const auto row_of = [&](int64_t j) -> int64_t {
    if (j >= item.end) return -1;
    const int64_t row = __ldg(args.rows + j);
    return kCandidates ? __ldg(args.candidates + row * args.channels + item.column) : row;
  };
  int64_t row[kFlight];
#pragma unroll
  for (int u = 0; u < kFlight; ++u) row[u] = row_of(item.begin + u);
  Extreme<true, T, n> largest(0);
  bool any = false;
  for (int64_t j = item.begin; j < item.end; j += kFlight) {
    Piece<T, n> value[kFlight];
    bool there[kFlight];
#pragma unroll
    for (int u = 0; u < kFlight; ++u) {
      there[u] = row[u] >= 0;
      if (there[u]) value[u].load(x + row[u] * args.ldx);
    }
#pragma unroll
    for (int u = 0; u < kFlight; ++u) row[u] = row_of(j + kFlight + u);
#pragma unroll
    for (int u = 0; u < kFlight; ++u) {
      if (!there[u]) continue;
      largest.offer(value[u], static_cast<int>(j - item.begin) + u, !any);
      any = true;
    }
  }
  int64_t* out = static_cast<int64_t*>(args.out) + item.block * args.channels + item.column;
#pragma unroll
  for (int i = 0; i < n; ++i) out[i] = any ? row_of(item.begin + largest.number(i)) : -1;
}

template <class T>
cudaError_t launch(const SegmentArgs& args, bool argmax, cudaStream_t stream) {
  const bool vector = args.candidates == nullptr && args.channels * int64_t{sizeof(T)} % 16 == 0 &&
                      is_aligned(args.x, args.ldx * int64_t{sizeof(T)});
  const int64_t vecs = vector ? args.channels * int64_t{sizeof(T)} / 16 : args.channels;
  const int64_t grid = (args.blocks * vecs + kThreads - 1) / kThreads;
  if (grid > INT_MAX) return cudaErrorInvalidValue;
  constexpr int one = sizeof(T);
  const auto kernel = !argmax           ? (vector ? sum_blocks<T, 16> : sum_blocks<T, one>)
                      : args.candidates ? argmax_blocks<T, one, true>
                      : vector          ? argmax_blocks<T, 16, false>
                                        : argmax_blocks<T, one, false>;
  kernel<<<static_cast<unsigned>(grid), kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

cudaError_t launch_typed(const SegmentArgs& args, bool argmax, cudaStream_t stream) {
  if (args.channels < 0 || args.ldx < 0 || args.blocks < 0) return cudaErrorInvalidValue;
  if (args.blocks == 0 || args.channels == 0) return cudaSuccess;
  return with_dtype(args.dtype, [&](auto of) { return launch<typename decltype(of)::type>(args, argmax, stream); });
}

}  // namespace

cudaError_t segment_sum(const SegmentArgs& args, cudaStream_t stream) { return launch_typed(args, false, stream); }

cudaError_t segment_argmax(const SegmentArgs& args, cudaStream_t stream) { return launch_typed(args, true, stream); }

}  // namespace voxmma
