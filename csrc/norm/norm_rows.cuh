// Rows and channels of a thread of the norm kernels, and sums over the threads of a CTA. Part of norm.cu.
#pragma once

#include "../common/epilogue.cuh"
#include "../conv/common.cuh"
#include "voxmma/norm.h"

namespace voxmma {
namespace {

constexpr int kThreads = 256, kFewThreads = 768, kFinishThreads = 512;
constexpr int kMomentsPerSm = 5, kSmoothPerSm = 2, kPerSm = 3;  // CTAs that an SM holds at a time
constexpr int kFinished = 4;                                    // channels of a CTA that adds the sums
constexpr int kFewBytes = 32;   // of channels side by side in a CTA that takes all rows: a sector
constexpr int64_t kFew = 1024;  // rows of which one launch is faster than three

template <class T>
struct Step {
  static constexpr int V = sizeof(T) == 8 ? 2 : 4, R = 32 / (V * sizeof(T));
  using Bits = std::conditional_t<V * R == 16, uint16_t, uint8_t>;  // bit u * V + i: row u, channel i
};

// How the threads of a launch divide (n, channels) among them. A group is R rows.
struct Grid {
  int columns, step;     // threads side by side, and groups of a CTA at a time
  int across;            // CTAs side by side
  int blocks;            // CTAs over the rows
  int64_t groups, each;  // in all, and of one of these
  int64_t ctas() const { return int64_t{blocks} * across; }
};

template <class T>
Grid grid_of(const NormArgs& args, int64_t threads, int64_t columns, int64_t across, int64_t most_blocks) {
  const int64_t groups = ceil_div(args.n, Step<T>::R), step = threads / columns;
  const int64_t blocks = std::min(ceil_div(groups, step), std::max<int64_t>(1, most_blocks));
  const int64_t each = ceil_div(ceil_div(groups, blocks), step) * step;
  return {static_cast<int>(columns),
          static_cast<int>(step),
          static_cast<int>(across),
          static_cast<int>(ceil_div(groups, each)),
          groups,
          each};
}
template <class T>
Grid grid_of(const NormArgs& args, int per_sm) {
  const int64_t vectors = ceil_div(args.channels, Step<T>::V), across = ceil_div(vectors, 64);
  return grid_of<T>(args, kThreads, ceil_div(vectors, across), across, int64_t{per_sm} * args.sm_count / across);
}
template <class T>
Grid few_grid_of(const NormArgs& args) {
  constexpr int64_t columns = kFewBytes / (Step<T>::V * sizeof(T));
  return grid_of<T>(args, kFewThreads, columns, ceil_div(args.channels, columns * Step<T>::V), 1);
}

// The place of a thread: its groups, first channel, and how many of V exist.
template <class T>
struct Place {
  int64_t begin, end;
  int vector, vectors, channel, row, valid;
  __device__ Place(const NormArgs& args, const Grid& grid) {
    constexpr int V = Step<T>::V;
    row = threadIdx.x / grid.columns;
    vector = static_cast<int>(blockIdx.x % grid.across) * grid.columns + threadIdx.x % grid.columns;
    vectors = static_cast<int>(args.channels + V - 1) / V;
    channel = vector * V;
    const int left = static_cast<int>(args.channels) - channel;
    valid = row >= grid.step || left <= 0 ? 0 : min(left, V);
    const int64_t block = blockIdx.x / grid.across;
    begin = block * grid.each;
    end = min(grid.groups, begin + grid.each);
  }
};

// f(group, its rows, whether they are known to be R) of all groups of a thread, backwards where the pass before read them
// forwards. Fast: compiled for R rows, too.
template <bool Backwards, bool Fast, class T, class F>
__device__ __forceinline__ void for_groups(const NormArgs& args, const Grid& grid, const Place<T>& at, F f) {
  constexpr int R = Step<T>::R;
  const int64_t first = at.begin + at.row;
  if (at.valid == 0 || first >= at.end) return;
  const int steps = static_cast<int>((at.end - 1 - first) / grid.step);  // but one
  for (int step = 0; step <= steps; ++step) {
    const int64_t group = first + static_cast<int64_t>(Backwards ? steps - step : step) * grid.step;
    const int64_t left = args.n - group * R;
    if (Fast && left >= R)
      f(group, R, std::bool_constant<Fast>());
    else
      f(group, static_cast<int>(left < R ? left : R), std::false_type());
  }
}

template <class T>
struct alignas(Step<T>::V * sizeof(T)) Vector {
  T e[Step<T>::V];
};

// Channels of a row. Vec: all V exist, and can be read and written at once.
template <bool Vec, class T, int V>
__device__ __forceinline__ void load_row(T (&v)[V], const T* p, int valid) {
  if constexpr (Vec) {
    const Vector<T> all = *reinterpret_cast<const Vector<T>*>(p);
#pragma unroll
    for (int i = 0; i < V; ++i) v[i] = all.e[i];
  } else {
#pragma unroll
    for (int i = 0; i < V; ++i) v[i] = i < valid ? p[i] : convert<T>(0.0f);
  }
}
template <bool Vec, class T, class A, int V>
__device__ __forceinline__ void put_row(T* p, const A (&v)[V], int valid) {
  if constexpr (Vec && sizeof(T) == 2) {
    *reinterpret_cast<uint2*>(p) = make_uint2(pack2<T>(v[0], v[1]), pack2<T>(v[2], v[3]));
  } else if constexpr (Vec) {
    Vector<T> all;
#pragma unroll
    for (int i = 0; i < V; ++i) all.e[i] = convert<T>(v[i]);
    *reinterpret_cast<Vector<T>*>(p) = all;
  } else {
#pragma unroll
    for (int i = 0; i < V; ++i) {
      if (i < valid) p[i] = convert<T>(v[i]);
    }
  }
}

// Rows of a group; those that it lacks are zeros.
template <bool Vec, bool Full, class T, int R, int V>
__device__ __forceinline__ void load_group(T (&v)[R][V], const void* rows, int64_t ld, int channel, int64_t group,
                                           int count, int valid) {
  const T* p = static_cast<const T*>(rows) + group * R * ld + channel;
#pragma unroll
  for (int u = 0; u < R; ++u) {
    if (Full || u < count) {
      load_row<Vec>(v[u], p + u * ld, valid);
    } else {
#pragma unroll
      for (int i = 0; i < V; ++i) v[u][i] = convert<T>(0.0f);
    }
  }
}

// What a thread or a CTA knows of a channel: values so far, their mean, and the sum of squared deviations from it.
template <class A>
struct Moments {
  A n, mean, squares;
  __device__ void merge(const Moments& o) {  // Chan's formula
    const A both = n + o.n;
    if (both == 0) return;
    const A apart = o.mean - mean;
    A share;
    if constexpr (std::is_same_v<A, float>)
      share = __fdividef(o.n, both);
    else
      share = o.n / both;
    mean += apart * share;
    squares += o.squares + apart * apart * n * share;
    n = both;
  }
  __device__ Moments from(int lane) const {
    return {__shfl_down_sync(~0u, n, lane), __shfl_down_sync(~0u, mean, lane), __shfl_down_sync(~0u, squares, lane)};
  }
};
template <class A>
struct Sums {  // of the gradient, and of its products with deviations from the mean
  A sum, dot;
  __device__ void merge(const Sums& o) {
    sum += o.sum;
    dot += o.dot;
  }
  __device__ Sums from(int lane) const { return {__shfl_down_sync(~0u, sum, lane), __shfl_down_sync(~0u, dot, lane)}; }
};

// What the threads of a column have, merged in a fixed order: complete in those of row 0. All threads call.
template <int Threads, class State, int V>
__device__ __forceinline__ void merge_rows(const Grid& grid, int row, State (&mine)[V]) {
  __shared__ State s_state[V][Threads];
  const bool shuffled = grid.columns < 32 && (grid.columns & (grid.columns - 1)) == 0;  // rows of a warp come first
  if (shuffled) {
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int half = 16; half >= grid.columns; half /= 2) {
#pragma unroll
      for (int i = 0; i < V; ++i) {
        const State other = mine[i].from(half);
        if (lane < half) mine[i].merge(other);
      }
    }
  }
  const int apart = shuffled ? 32 : grid.columns, count = shuffled ? Threads / 32 : grid.step;
#pragma unroll
  for (int i = 0; i < V; ++i) s_state[i][threadIdx.x] = mine[i];
  __syncthreads();
  if (row != 0) return;
#pragma unroll 1
  for (int k = 1; k < count; ++k) {
#pragma unroll
    for (int i = 0; i < V; ++i) mine[i].merge(s_state[i][threadIdx.x + k * apart]);
  }
}

// What is compiled on its own: without tests in its loops for what is most frequent. `any` has a piecewise linear
// activation or none, and may have a residual.
enum class Kind { none, relu, relu_added, any, smooth };
constexpr bool fast(Kind k, bool vec) { return vec && k != Kind::smooth; }

// The numbers of a thread's channels.
template <class A, int V>
struct Affine {
  A mean[V], factor[V], shift[V];
  __device__ Affine(const NormArgs& args, int channel, int valid) {
    const A* stats = static_cast<const A*>(args.stats) + channel;
    load_elements(mean, stats, valid, false);
    load_elements(factor, stats + 2 * args.channels, valid, false);
    load_elements(shift, stats + 3 * args.channels, valid, false);
  }
};

// Whether relu and leaky_relu pass what they are given.
template <class A>
__device__ __forceinline__ bool passes(A given) {
  return !(given <= 0);
}

}  // namespace
}  // namespace voxmma
