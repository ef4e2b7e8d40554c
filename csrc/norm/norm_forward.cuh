// The norm's moments, and the pass that applies them. Part of norm.cu.
#pragma once

#include "norm_rows.cuh"

namespace voxmma {
namespace {

template <bool Vec, class T, class A, int V>
__device__ __forceinline__ void moments_of(const NormArgs& args, const Grid& grid, const Place<T>& at,
                                           Moments<A> (&found)[V]) {
  constexpr int R = Step<T>::R;
  T first[1][V];
  A sum[V] = {}, squares[V] = {};  // of x - first: its own first row keeps a thread's numbers small
  int count = 0;
  const bool any = at.valid > 0 && at.begin + at.row < at.end;
  load_group<Vec, false>(first, args.x, args.ldx * R, at.channel, at.begin + at.row, any, at.valid);
  A origin[V];
#pragma unroll
  for (int i = 0; i < V; ++i) origin[i] = convert<A>(first[0][i]);
  for_groups<false, Vec>(args, grid, at, [&](int64_t group, int rows, auto full) {
    T v[R][V];
    load_group<Vec, full()>(v, args.x, args.ldx, at.channel, group, rows, at.valid);
    count += rows;
#pragma unroll
    for (int u = 0; u < R; ++u) {
      if (!full() && u >= rows) continue;
#pragma unroll
      for (int i = 0; i < V; ++i) {
        const A d = convert<A>(v[u][i]) - origin[i];
        sum[i] += d;
        squares[i] = fma(d, d, squares[i]);
      }
    }
  });
#pragma unroll
  for (int i = 0; i < V; ++i) {
    const A shift = count > 0 ? sum[i] / A(count) : A(0);
    found[i] = {A(count), origin[i] + shift, max(squares[i] - shift * sum[i], A(0))};
  }
}

// What a channel's statistics are made of beside its moments. Read before these are known: one wait for memory, not five.
template <class A>
struct OfMoments {
  A weight = 1, bias = 0, running_mean = 0, running_var = 0;
  int64_t batches = 0;
  __device__ OfMoments(const NormArgs& args, int64_t c, bool exists) {
    if (!exists) return;
    if (args.weight.values) weight = load_as<A>(args.weight.values, args.weight.dtype, c);
    if (args.bias.values) bias = load_as<A>(args.bias.values, args.bias.dtype, c);
    if (args.running_mean) running_mean = load_as<A>(args.running_mean, args.running_dtype, c);
    if (args.running_var) running_var = load_as<A>(args.running_var, args.running_dtype, c);
    if (c == 0 && args.batches) batches = *args.batches;
  }
};

template <class A>
__device__ void finish_moments(const NormArgs& args, int64_t c, const OfMoments<A>& of, const Moments<A>& all) {
  A* stats = static_cast<A*>(args.stats);
  const A invstd = 1 / sqrt(all.squares / A(args.n) + A(args.eps));
  stats[c] = all.mean;
  stats[args.channels + c] = invstd;
  stats[2 * args.channels + c] = invstd * of.weight;
  stats[3 * args.channels + c] = of.bias;
  const auto track = [&](void* running, A was, A now) {
    if (running == nullptr) return;
    const A rate = A(args.momentum);
    store_as(running, args.running_dtype, c, (1 - rate) * was + rate * now);
  };
  track(args.running_mean, of.running_mean, all.mean);
  track(args.running_var, of.running_var, all.squares / A(args.n - 1));
  if (c == 0 && args.batches != nullptr) *args.batches = of.batches + 1;
}

template <Kind K, bool Vec, class T>
__device__ __forceinline__ void apply(const NormArgs& args, const Grid& grid, const Place<T>& at) {
  using A = SumOf<T>;
  using Bits = typename Step<T>::Bits;
  constexpr int V = Step<T>::V, R = Step<T>::R;
  if (at.valid == 0) return;
  const Affine<A, V> affine(args, at.channel, at.valid);
  const bool added = K == Kind::relu_added || (K != Kind::relu && args.residual != nullptr);
  const bool keep = (K == Kind::relu_added || K == Kind::any) && args.passed != nullptr;
  for_groups<true, fast(K, Vec)>(args, grid, at, [&](int64_t group, int rows, auto full) {
    T v[R][V], add[R][V];
    load_group<Vec, full()>(v, args.x, args.ldx, at.channel, group, rows, at.valid);
    if (added) load_group<Vec, full()>(add, args.residual, args.ldr, at.channel, group, rows, at.valid);
    T* y = static_cast<T*>(args.y) + group * R * args.channels + at.channel;
    uint32_t passed = 0;
#pragma unroll
    for (int u = 0; u < R; ++u) {
      A a[V];
#pragma unroll
      for (int i = 0; i < V; ++i) {
        a[i] = fma(convert<A>(v[u][i]) - affine.mean[i], affine.factor[i], affine.shift[i]);
        if (added) a[i] += convert<A>(add[u][i]);
      }
      if (keep) {
#pragma unroll
        for (int i = 0; i < V; ++i) passed |= passes(a[i]) ? 1u << (u * V + i) : 0u;
      }
      if constexpr (K == Kind::relu || K == Kind::relu_added)
        activate(a, Activation::relu, 0);
      else if constexpr (K == Kind::smooth)
        activate(a, args.activation == Activation::silu ? Activation::silu : Activation::gelu, 0);
      else if (K == Kind::any && args.activation == Activation::relu)
        activate(a, Activation::relu, 0);
      else if (K == Kind::any && args.activation == Activation::leaky_relu)
        activate(a, Activation::leaky_relu, args.slope);
      if (full() || u < rows) put_row<Vec>(y + u * args.channels, a, at.valid);
    }
    if (keep) static_cast<Bits*>(args.passed)[group * at.vectors + at.vector] = static_cast<Bits>(passed);
  });
}

template <bool Vec, class T>
__global__ void __launch_bounds__(kThreads, kMomentsPerSm) moments_kernel(const NormArgs args, const Grid grid) {
  using A = SumOf<T>;
  constexpr int V = Step<T>::V;
  const Place<T> at(args, grid);
  Moments<A> found[V];
  moments_of<Vec>(args, grid, at, found);
  merge_rows<kThreads>(grid, at.row, found);
  if (at.row != 0) return;
  A* out = static_cast<A*>(args.workspace) + (blockIdx.x / grid.across * args.channels + at.channel) * 2;
#pragma unroll
  for (int i = 0; i < V; ++i) {
    if (i >= at.valid) continue;
    out[2 * i] = found[i].mean;
    out[2 * i + 1] = found[i].squares;
  }
}

template <Kind K, bool Vec, class T>
__global__ void __launch_bounds__(kThreads, kPerSm) apply_kernel(const NormArgs args, const Grid grid) {
  apply<K, Vec>(args, grid, Place<T>(args, grid));
}

template <Kind K, bool Vec, class T>
__global__ void __launch_bounds__(kFewThreads) few_forward_kernel(const NormArgs args, const Grid grid) {
  using A = SumOf<T>;
  constexpr int V = Step<T>::V;
  const Place<T> at(args, grid);
  Moments<A> found[V];
  moments_of<Vec>(args, grid, at, found);
  const bool first = at.row == 0;
  const auto of = [&](int i) { return OfMoments<A>(args, at.channel + i, first && i < at.valid); };
  const OfMoments<A> of_channel[4] = {of(0), of(1), of(2), of(3)};  // V are used
  merge_rows<kFewThreads>(grid, at.row, found);
#pragma unroll
  for (int i = 0; i < V; ++i) {
    if (first && i < at.valid) finish_moments(args, at.channel + i, of_channel[i], found[i]);
  }
  __syncthreads();
  apply<K, Vec>(args, grid, at);
}

}  // namespace
}  // namespace voxmma
