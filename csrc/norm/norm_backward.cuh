// Sums of the norm's gradient, and the pass that makes it. Part of norm.cu.
#pragma once

#include "norm_rows.cuh"

namespace voxmma {
namespace {

// d[i] *= the derivative of silu or gelu at v[i].
template <int N, class A>
__device__ __forceinline__ void activate_gradient(A (&d)[N], const A (&v)[N], bool silu) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const A x = v[i];
    if (silu) {
      A s;
      if constexpr (std::is_same_v<A, float>)
        s = __fdividef(1.0f, 1 + __expf(-x));
      else
        s = 1 / (1 + exp(-x));
      d[i] *= s * (1 + x * (1 - s));
    } else {
      const A cdf = A(0.5) * (1 + erf(x * A(0.70710678118654752440)));
      d[i] *= cdf + x * A(0.39894228040143267794) * exp(A(-0.5) * x * x);
    }
  }
}

// The gradient behind a piecewise linear activation: in d, of what it was given, which `bits` (a bit a channel) know, or
// an affine function of x, which are deviations from the mean.
template <Kind K, class A, int V>
__device__ __forceinline__ void through(const NormArgs& args, const Affine<A, V>& affine, bool known, uint32_t bits,
                                        A (&d)[V], const A (&x)[V]) {
  if constexpr (K == Kind::none) return;
  if (K == Kind::any && args.activation == Activation::none) return;
#pragma unroll
  for (int i = 0; i < V; ++i) {
    const bool pass = known ? bits >> i & 1 : passes(fma(x[i], affine.factor[i], affine.shift[i]));
    A low = 0;
    if (K == Kind::any && args.activation == Activation::leaky_relu) low = d[i] * static_cast<A>(args.slope);
    d[i] = pass ? d[i] : low;
  }
}

template <Kind K, bool Vec, class T, class A, int V>
__device__ __forceinline__ void gradient_sums_of(const NormArgs& args, const Grid& grid, const Place<T>& at,
                                                 Sums<A> (&found)[V]) {
  constexpr int R = Step<T>::R;
#pragma unroll
  for (int i = 0; i < V; ++i) found[i] = {0, 0};
  if (at.valid == 0) return;
  const Affine<A, V> affine(args, at.channel, at.valid);
  const bool known = K == Kind::relu_added || (K == Kind::any && args.passed != nullptr);
  for_groups<false, fast(K, Vec)>(args, grid, at, [&](int64_t group, int rows, auto full) {
    T v[R][V], g[R][V], added[R][V];
    load_group<Vec, full()>(v, args.x, args.ldx, at.channel, group, rows, at.valid);
    load_group<Vec, full()>(g, args.dy, args.ldy, at.channel, group, rows, at.valid);
    if (K == Kind::smooth && args.residual != nullptr) {
      load_group<Vec, full()>(added, args.residual, args.ldr, at.channel, group, rows, at.valid);
    }
    uint32_t bits = 0;
    if (known) bits = static_cast<const typename Step<T>::Bits*>(args.passed)[group * at.vectors + at.vector];
#pragma unroll
    for (int u = 0; u < R; ++u) {
      if (!full() && u >= rows) continue;
      A d[V], x[V];
#pragma unroll
      for (int i = 0; i < V; ++i) d[i] = convert<A>(g[u][i]), x[i] = convert<A>(v[u][i]) - affine.mean[i];
      if constexpr (K == Kind::smooth) {
        A given[V];
#pragma unroll
        for (int i = 0; i < V; ++i) {
          given[i] = fma(x[i], affine.factor[i], affine.shift[i]);
          if (args.residual != nullptr) given[i] += convert<A>(added[u][i]);
        }
        activate_gradient(d, given, args.activation == Activation::silu);
        T* kept = static_cast<T*>(args.dresidual != nullptr ? args.dresidual : args.dx);
        put_row<Vec>(kept + (group * R + u) * args.channels + at.channel, d, at.valid);
      } else {
        through<K>(args, affine, known, bits >> (u * V), d, x);
      }
#pragma unroll
      for (int i = 0; i < V; ++i) {
        found[i].sum += d[i];
        found[i].dot = fma(d[i], x[i], found[i].dot);
      }
    }
  });
}

template <class A>
struct OfSums {  // as OfMoments
  A invstd = 0;
  __device__ OfSums(const NormArgs& args, int64_t c, bool exists) {
    if (exists) invstd = static_cast<const A*>(args.stats)[args.channels + c];
  }
};

template <class A>
__device__ void finish_sums(const NormArgs& args, int64_t c, const OfSums<A>& of, const Sums<A>& all) {
  static_cast<A*>(args.dbias)[c] = all.sum;
  static_cast<A*>(args.dweight)[c] = all.dot * of.invstd;
}

// What the last pass is given where the sums have made the gradient behind a smooth activation, that of the residual:
// twice the function would take longer than writing and reading it.
__host__ __device__ inline NormArgs behind_activation(NormArgs args) {
  args.dy = args.dresidual != nullptr ? args.dresidual : args.dx;
  args.ldy = args.channels;
  args.activation = Activation::none;
  args.dresidual = nullptr;
  return args;
}

// `dy` may be dx.
template <Kind K, bool Vec, class T>
__device__ __forceinline__ void gradient(const NormArgs& args, const Grid& grid, const Place<T>& at) {
  using A = SumOf<T>;
  constexpr int V = Step<T>::V, R = Step<T>::R;
  if (at.valid == 0) return;
  const Affine<A, V> affine(args, at.channel, at.valid);
  A of_row[V], of_deviation[V];  // dx = factor * d - of_row - of_deviation * (x - mean)
  {
    A sum[V], dot[V], invstd[V];
    load_elements(sum, static_cast<const A*>(args.dbias) + at.channel, at.valid, false);
    load_elements(dot, static_cast<const A*>(args.dweight) + at.channel, at.valid, false);
    load_elements(invstd, static_cast<const A*>(args.stats) + args.channels + at.channel, at.valid, false);
#pragma unroll
    for (int i = 0; i < V; ++i) {
      of_row[i] = affine.factor[i] * (sum[i] / A(args.n));
      of_deviation[i] = affine.factor[i] * (dot[i] * invstd[i] / A(args.n));
    }
  }
  const bool known = K == Kind::relu_added || (K == Kind::any && args.passed != nullptr);
  const bool shared = (K == Kind::relu_added || K == Kind::any) && args.dresidual != nullptr;
  for_groups<true, fast(K, Vec)>(args, grid, at, [&](int64_t group, int rows, auto full) {
    T v[R][V], g[R][V];
    load_group<Vec, full()>(v, args.x, args.ldx, at.channel, group, rows, at.valid);
    load_group<Vec, full()>(g, args.dy, args.ldy, at.channel, group, rows, at.valid);
    uint32_t bits = 0;
    if (known) bits = static_cast<const typename Step<T>::Bits*>(args.passed)[group * at.vectors + at.vector];
    const int64_t begin = group * R * args.channels + at.channel;
#pragma unroll
    for (int u = 0; u < R; ++u) {
      if (!full() && u >= rows) continue;
      A d[V], x[V];
#pragma unroll
      for (int i = 0; i < V; ++i) d[i] = convert<A>(g[u][i]), x[i] = convert<A>(v[u][i]) - affine.mean[i];
      through<K>(args, affine, known, bits >> (u * V), d, x);
      if (shared) put_row<Vec>(static_cast<T*>(args.dresidual) + begin + u * args.channels, d, at.valid);
#pragma unroll
      for (int i = 0; i < V; ++i) d[i] = fma(affine.factor[i], d[i], -fma(of_deviation[i], x[i], of_row[i]));
      put_row<Vec>(static_cast<T*>(args.dx) + begin + u * args.channels, d, at.valid);
    }
  });
}

template <Kind K, bool Vec, class T>
__global__ void __launch_bounds__(kThreads, K == Kind::smooth ? kSmoothPerSm : kPerSm)
    gradient_sums_kernel(const NormArgs args, const Grid grid) {
  using A = SumOf<T>;
  constexpr int V = Step<T>::V;
  const Place<T> at(args, grid);
  Sums<A> found[V];
  gradient_sums_of<K, Vec>(args, grid, at, found);
  merge_rows<kThreads>(grid, at.row, found);
  if (at.row != 0) return;
  A* out = static_cast<A*>(args.workspace) + (blockIdx.x / grid.across * args.channels + at.channel) * 2;
#pragma unroll
  for (int i = 0; i < V; ++i) {
    if (i >= at.valid) continue;
    out[2 * i] = found[i].sum;
    out[2 * i + 1] = found[i].dot;
  }
}

template <Kind K, bool Vec, class T>
__global__ void __launch_bounds__(kThreads, kPerSm) gradient_kernel(const NormArgs args, const Grid grid) {
  gradient<K, Vec>(args, grid, Place<T>(args, grid));
}

template <Kind K, bool Vec, class T>
__global__ void __launch_bounds__(kFewThreads) few_backward_kernel(const NormArgs args, const Grid grid) {
  using A = SumOf<T>;
  constexpr int V = Step<T>::V;
  const Place<T> at(args, grid);
  Sums<A> found[V];
  gradient_sums_of<K, Vec>(args, grid, at, found);
  merge_rows<kFewThreads>(grid, at.row, found);
  if (at.row == 0) {
#pragma unroll
    for (int i = 0; i < V; ++i) {
      const int64_t c = at.channel + i;
      if (i < at.valid) finish_sums(args, c, OfSums<A>(args, c, true), found[i]);
    }
  }
  __syncthreads();
  if constexpr (K == Kind::smooth)
    gradient<Kind::none, Vec>(behind_activation(args), grid, at);
  else
    gradient<K, Vec>(args, grid, at);
}

}  // namespace
}  // namespace voxmma
