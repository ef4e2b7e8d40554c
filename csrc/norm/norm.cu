// Batch norm in training with what follows it: sums over the rows, one pass over them forward; the same backward.
//
// Threads of a CTA stand side by side in columns, V channels each, and take R neighbouring rows in one step: 32 bytes of
// every tensor, which with per_sm CTAs is enough in flight. Sums of a CTA lie in the
// workspace, [blocks][channels], and a second launch adds them in a fixed order. The last pass walks rows backwards: what
// the first one read last is still in L2. Few rows are one launch, whose CTAs have kFewColumns of columns and all rows.
#include "../common/epilogue.cuh"
#include "../conv/common.cuh"

namespace voxmma {
namespace {

constexpr int kThreads = 256, kFewThreads = 768, kFinishThreads = 512;
constexpr int per_sm(bool smooth) { return smooth ? 2 : 3; }  // CTAs that an SM holds at a time
constexpr int kFinished = 4;                                  // channels of a CTA that adds the sums
constexpr int kFewBytes = 32;  // of channels side by side in a CTA that takes all rows: a sector
constexpr int64_t kFewForward = 6144, kFewBackward = 3072;  // rows of which one launch is faster than three

template <class T>
struct Step {
  static constexpr int V = sizeof(T) == 8 ? 2 : 4, R = 32 / (V * sizeof(T));
  using Sum = std::conditional_t<sizeof(T) == 8, double, float>;
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
Grid grid_of(const NormArgs& args, int threads, int most_columns, int64_t most_ctas) {
  const int64_t vectors = ceil_div(args.channels, Step<T>::V), groups = ceil_div(args.n, Step<T>::R);
  const int64_t across = ceil_div(vectors, most_columns), columns = ceil_div(vectors, across), step = threads / columns;
  const int64_t blocks = std::min(ceil_div(groups, step), std::max<int64_t>(1, most_ctas / across));
  const int64_t each = ceil_div(ceil_div(groups, blocks), step) * step;
  return {static_cast<int>(columns),
          static_cast<int>(step),
          static_cast<int>(across),
          static_cast<int>(ceil_div(groups, each)),
          groups,
          each};
}
template <class T>
Grid grid_of(const NormArgs& args, bool smooth) {
  return grid_of<T>(args, kThreads, 64, int64_t{per_sm(smooth)} * args.sm_count);
}
template <class T>
Grid few_grid_of(const NormArgs& args) {
  return grid_of<T>(args, kFewThreads, kFewBytes / (Step<T>::V * static_cast<int>(sizeof(T))), 1);
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

// f(groups, rows of each) of all groups of a thread, K at a time, backwards where the pass before read them forwards.
template <int K, bool Backwards, class T, class F>
__device__ __forceinline__ void for_groups(const NormArgs& args, const Grid& grid, const Place<T>& at, F f) {
  constexpr int R = Step<T>::R;
  const int64_t first = at.begin + at.row;
  if (at.valid == 0 || first >= at.end) return;
  const int64_t steps = (at.end - 1 - first) / grid.step / K;  // but one
  for (int64_t step = 0; step <= steps; ++step) {
    int64_t group[K];
    int rows[K];
#pragma unroll
    for (int k = 0; k < K; ++k) {
      group[k] = first + ((Backwards ? steps - step : step) * K + k) * grid.step;
      const int64_t left = group[k] < at.end ? args.n - group[k] * R : 0;
      rows[k] = static_cast<int>(left < R ? left : R);
    }
    f(group, rows);
  }
}

// Rows of a group; those that it lacks are zeros.
template <bool Vec, class T, int R, int V>
__device__ __forceinline__ void load_group(T (&v)[R][V], const void* rows, int64_t ld, int channel, int64_t group,
                                           int count, int valid) {
  const T* p = static_cast<const T*>(rows) + group * R * ld + channel;
#pragma unroll
  for (int u = 0; u < R; ++u) load_elements(v[u], p + u * ld, u < count ? valid : 0, Vec);
}
template <bool Vec, class T, class A, int V>
__device__ __forceinline__ void store_row_of(void* rows, int64_t channels, int channel, int64_t row, const A (&v)[V],
                                             int valid) {
  store_elements(static_cast<T*>(rows) + row * channels + channel, v, valid, Vec);
}

// What a thread or a CTA knows of a channel: values so far, their mean, and the sum of squared deviations from it.
template <class A>
struct Moments {
  A n, mean, squares;
  __device__ void merge(const Moments& o) {  // Chan's formula
    const A both = n + o.n;
    if (both == 0) return;
    const A apart = o.mean - mean, share = o.n / both;
    mean += apart * share;
    squares += o.squares + apart * apart * n * share;
    n = both;
  }
};
template <class A>
struct Sums {  // of the gradient, and of its products with deviations from the mean
  A sum, dot;
  __device__ void merge(const Sums& o) {
    sum += o.sum;
    dot += o.dot;
  }
};

// What the threads of a column have, merged in a fixed order: complete in those of row 0. All threads call.
template <int Threads, class State, int V>
__device__ __forceinline__ void merge_rows(const Grid& grid, int row, State (&mine)[V]) {
  __shared__ State s_state[V][Threads];
  for (int count = grid.step; count > 1;) {
    const int half = (count + 1) / 2;
    __syncthreads();
    if (row >= half && row < count) {
#pragma unroll
      for (int i = 0; i < V; ++i) s_state[i][threadIdx.x] = mine[i];
    }
    __syncthreads();
    if (row < count - half) {
#pragma unroll
      for (int i = 0; i < V; ++i) mine[i].merge(s_state[i][threadIdx.x + half * grid.columns]);
    }
    count = half;
  }
}

// ---- forward ---------------------------------------------------------------------------------------------------

template <bool Vec, class T, class A, int V>
__device__ __forceinline__ void moments_of(const NormArgs& args, const Grid& grid, const Place<T>& at,
                                           Moments<A> (&found)[V]) {
  constexpr int R = Step<T>::R;
  T first[1][V];
  A sum[V] = {}, squares[V] = {};  // of x - first: its own first row keeps a thread's numbers small
  int count = 0;
  const bool any = at.valid > 0 && at.begin + at.row < at.end;
  load_group<Vec>(first, args.x, args.ldx * R, at.channel, any ? at.begin + at.row : 0, 1, any ? at.valid : 0);
  for_groups<2, false>(args, grid, at, [&](const int64_t (&group)[2], const int (&rows)[2]) {
    T v[2][R][V];
#pragma unroll
    for (int k = 0; k < 2; ++k) load_group<Vec>(v[k], args.x, args.ldx, at.channel, group[k], rows[k], at.valid);
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      count += rows[k];
#pragma unroll
      for (int u = 0; u < R; ++u) {
#pragma unroll
        for (int i = 0; i < V; ++i) {
          const A d = u < rows[k] ? convert<A>(v[k][u][i]) - convert<A>(first[0][i]) : A(0);
          sum[i] += d;
          squares[i] = fma(d, d, squares[i]);
        }
      }
    }
  });
#pragma unroll
  for (int i = 0; i < V; ++i) {
    const A shift = count > 0 ? sum[i] / A(count) : A(0);
    found[i] = {A(count), convert<A>(first[0][i]) + shift, max(squares[i] - shift * sum[i], A(0))};
  }
}

template <class A>
__device__ void finish_moments(const NormArgs& args, int64_t c, const Moments<A>& all) {
  A* stats = static_cast<A*>(args.stats);
  const A invstd = 1 / sqrt(all.squares / A(args.n) + A(args.eps));
  const A weight = args.weight.values ? load_as<A>(args.weight.values, args.weight.dtype, c) : A(1);
  stats[c] = all.mean;
  stats[args.channels + c] = invstd;
  stats[2 * args.channels + c] = invstd * weight;
  stats[3 * args.channels + c] = args.bias.values ? load_as<A>(args.bias.values, args.bias.dtype, c) : A(0);
  const auto track = [&](void* running, A now) {
    if (running == nullptr) return;
    const A was = load_as<A>(running, args.running_dtype, c), rate = A(args.momentum);
    store_as(running, args.running_dtype, c, (1 - rate) * was + rate * now);
  };
  track(args.running_mean, all.mean);
  track(args.running_var, all.squares / A(args.n - 1));
  if (c == 0 && args.batches != nullptr) ++*args.batches;
}

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

// An activation of few instructions, or one of an exponential function: kernels of the former need few registers.
template <bool Smooth, class F>
__device__ __forceinline__ void with_activation(Activation activation, F f) {
  if constexpr (Smooth) {
    if (activation == Activation::silu) f(std::integral_constant<Activation, Activation::silu>());
    if (activation == Activation::gelu) f(std::integral_constant<Activation, Activation::gelu>());
  } else {
    if (activation == Activation::relu) f(std::integral_constant<Activation, Activation::relu>());
    if (activation == Activation::leaky_relu) f(std::integral_constant<Activation, Activation::leaky_relu>());
  }
}

// Whether relu and leaky_relu pass what they are given.
template <class A>
__device__ __forceinline__ bool passes(A given) {
  return !(given <= 0);
}

template <bool Smooth, bool Vec, class T>
__device__ __forceinline__ void apply(const NormArgs& args, const Grid& grid, const Place<T>& at) {
  using A = typename Step<T>::Sum;
  using Bits = typename Step<T>::Bits;
  constexpr int V = Step<T>::V, R = Step<T>::R;
  const Affine<A, V> affine(args, at.channel, at.valid);
  for_groups<1, true>(args, grid, at, [&](const int64_t (&groups)[1], const int (&counts)[1]) {
    const int64_t group = groups[0];
    const int rows = counts[0];
    T v[R][V], add[R][V];
    load_group<Vec>(v, args.x, args.ldx, at.channel, group, rows, at.valid);
    if (args.residual != nullptr) load_group<Vec>(add, args.residual, args.ldr, at.channel, group, rows, at.valid);
    uint32_t passed = 0;
#pragma unroll
    for (int u = 0; u < R; ++u) {
      A a[V];
#pragma unroll
      for (int i = 0; i < V; ++i) a[i] = fma(convert<A>(v[u][i]) - affine.mean[i], affine.factor[i], affine.shift[i]);
      if (args.residual != nullptr) {
#pragma unroll
        for (int i = 0; i < V; ++i) a[i] += convert<A>(add[u][i]);
      }
      if (!Smooth && args.passed != nullptr) {
#pragma unroll
        for (int i = 0; i < V; ++i) passed |= passes(a[i]) ? 1u << (u * V + i) : 0u;
      }
      with_activation<Smooth>(args.activation, [&](auto function) { activate(a, function(), args.slope); });
      if (u < rows) store_row_of<Vec, T>(args.y, args.channels, at.channel, group * R + u, a, at.valid);
    }
    if (!Smooth && args.passed != nullptr) {
      static_cast<Bits*>(args.passed)[group * at.vectors + at.vector] = static_cast<Bits>(passed);
    }
  });
}

template <bool Vec, class T>
__global__ void __launch_bounds__(kThreads, per_sm(false)) moments_kernel(const NormArgs args, const Grid grid) {
  using A = typename Step<T>::Sum;
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

template <bool Smooth, bool Vec, class T>
__global__ void __launch_bounds__(kThreads, per_sm(false)) apply_kernel(const NormArgs args, const Grid grid) {
  apply<Smooth, Vec>(args, grid, Place<T>(args, grid));
}

template <bool Smooth, bool Vec, class T>
__global__ void __launch_bounds__(kFewThreads) few_forward_kernel(const NormArgs args, const Grid grid) {
  using A = typename Step<T>::Sum;
  constexpr int V = Step<T>::V;
  const Place<T> at(args, grid);
  Moments<A> found[V];
  moments_of<Vec>(args, grid, at, found);
  merge_rows<kFewThreads>(grid, at.row, found);
  if (at.row == 0) {
#pragma unroll
    for (int i = 0; i < V; ++i) {
      if (i < at.valid) finish_moments(args, at.channel + i, found[i]);
    }
  }
  __syncthreads();
  apply<Smooth, Vec>(args, grid, at);
}

// ---- backward --------------------------------------------------------------------------------------------------

// d[i] *= the derivative of silu or gelu at v[i].
template <int N, class A>
__device__ __forceinline__ void activate_gradient(A (&d)[N], const A (&v)[N], Activation function) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const A x = v[i];
    if (function == Activation::silu) {
      A s;
      if constexpr (std::is_same_v<A, float>)
        s = __fdividef(1.0f, 1 + expf(-x));
      else
        s = 1 / (1 + exp(-x));
      d[i] *= s * (1 + x * (1 - s));
    } else {
      const A cdf = A(0.5) * (1 + erf(x * A(0.70710678118654752440)));
      d[i] *= cdf + x * A(0.39894228040143267794) * exp(A(-0.5) * x * x);
    }
  }
}

// The gradient behind the activation, of rows whose gradient is dy.
template <bool Smooth, class T>
struct Through {
  using A = typename Step<T>::Sum;
  static constexpr int V = Step<T>::V, R = Step<T>::R;
  T added[R][V];   // residual, of smooth functions
  uint32_t known;  // bits of forward
  bool again;      // not known: whether the activation passes is computed again

  template <bool Vec>
  __device__ __forceinline__ void load(const NormArgs& args, const Place<T>& at, int64_t group, int rows) {
    if constexpr (Smooth) {
      if (args.residual != nullptr) load_group<Vec>(added, args.residual, args.ldr, at.channel, group, rows, at.valid);
    } else {
      known = ~0u;
      again = args.activation != Activation::none && args.passed == nullptr;
      if (args.passed != nullptr) {
        known = static_cast<const typename Step<T>::Bits*>(args.passed)[group * at.vectors + at.vector];
      }
    }
  }
  // d: dy of row u of the group, in; x: its deviations from the mean
  __device__ __forceinline__ void operator()(const NormArgs& args, const Affine<A, V>& affine, int u, A (&d)[V],
                                             const A (&x)[V]) const {
    if constexpr (Smooth) {
      A given[V];
#pragma unroll
      for (int i = 0; i < V; ++i) {
        given[i] = fma(x[i], affine.factor[i], affine.shift[i]);
        if (args.residual != nullptr) given[i] += convert<A>(added[u][i]);
      }
      with_activation<true>(args.activation, [&](auto function) { activate_gradient(d, given, function()); });
    } else {
      uint32_t bits = known >> (u * V);
      if (again) {
        bits = 0;
#pragma unroll
        for (int i = 0; i < V; ++i) bits |= passes(fma(x[i], affine.factor[i], affine.shift[i])) ? 1u << i : 0u;
      }
      const bool relu = args.activation == Activation::relu;
#pragma unroll
      for (int i = 0; i < V; ++i) {
        const A low = relu ? A(0) : d[i] * static_cast<A>(args.slope);
        d[i] = bits >> i & 1 ? d[i] : low;
      }
    }
  }
};

// Where smooth functions follow a residual, the gradient behind them is that of the residual: made once, by the sums.
template <bool Smooth>
__device__ __forceinline__ bool kept_by_sums(const NormArgs& args) {
  return Smooth && args.dresidual != nullptr;
}

template <bool Smooth, bool Vec, class T, class A, int V>
__device__ __forceinline__ void gradient_sums_of(const NormArgs& args, const Grid& grid, const Place<T>& at,
                                                 Sums<A> (&found)[V]) {
  constexpr int R = Step<T>::R;
#pragma unroll
  for (int i = 0; i < V; ++i) found[i] = {0, 0};
  const Affine<A, V> affine(args, at.channel, at.valid);
  for_groups<1, false>(args, grid, at, [&](const int64_t (&groups)[1], const int (&counts)[1]) {
    const int64_t group = groups[0];
    const int rows = counts[0];
    T v[R][V], g[R][V];
    Through<Smooth, T> through;
    load_group<Vec>(v, args.x, args.ldx, at.channel, group, rows, at.valid);
    load_group<Vec>(g, args.dy, args.ldy, at.channel, group, rows, at.valid);
    through.template load<Vec>(args, at, group, rows);
#pragma unroll
    for (int u = 0; u < R; ++u) {
      A d[V], x[V];
#pragma unroll
      for (int i = 0; i < V; ++i) d[i] = convert<A>(g[u][i]), x[i] = convert<A>(v[u][i]) - affine.mean[i];
      through(args, affine, u, d, x);
      if (u >= rows) continue;
      if (kept_by_sums<Smooth>(args)) {
        store_row_of<Vec, T>(args.dresidual, args.channels, at.channel, group * R + u, d, at.valid);
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
__device__ void finish_sums(const NormArgs& args, int64_t c, const Sums<A>& all) {
  static_cast<A*>(args.dbias)[c] = all.sum;
  static_cast<A*>(args.dweight)[c] = all.dot * static_cast<const A*>(args.stats)[args.channels + c];
}

template <bool Smooth, bool Vec, class T>
__device__ __forceinline__ void gradient(const NormArgs& args, const Grid& grid, const Place<T>& at) {
  using A = typename Step<T>::Sum;
  constexpr int V = Step<T>::V, R = Step<T>::R;
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
  for_groups<1, true>(args, grid, at, [&](const int64_t (&groups)[1], const int (&counts)[1]) {
    const int64_t group = groups[0];
    const int rows = counts[0];
    T v[R][V], g[R][V];
    Through<Smooth, T> through;
    load_group<Vec>(v, args.x, args.ldx, at.channel, group, rows, at.valid);
    load_group<Vec>(g, args.dy, args.ldy, at.channel, group, rows, at.valid);
    through.template load<Vec>(args, at, group, rows);
#pragma unroll
    for (int u = 0; u < R; ++u) {
      A d[V], x[V];
#pragma unroll
      for (int i = 0; i < V; ++i) d[i] = convert<A>(g[u][i]), x[i] = convert<A>(v[u][i]) - affine.mean[i];
      through(args, affine, u, d, x);
      if (u >= rows) continue;
      if (args.dresidual != nullptr) {
        store_row_of<Vec, T>(args.dresidual, args.channels, at.channel, group * R + u, d, at.valid);
      }
#pragma unroll
      for (int i = 0; i < V; ++i) d[i] = fma(affine.factor[i], d[i], -fma(of_deviation[i], x[i], of_row[i]));
      store_row_of<Vec, T>(args.dx, args.channels, at.channel, group * R + u, d, at.valid);
    }
  });
}

// What the last pass is given where the sums have made the gradient behind the activation.
__host__ __device__ inline NormArgs behind_activation(NormArgs args) {
  args.dy = args.dresidual;
  args.ldy = args.channels;
  args.activation = Activation::none;
  args.residual = nullptr;
  args.dresidual = nullptr;
  return args;
}

template <bool Smooth, bool Vec, class T>
__global__ void __launch_bounds__(kThreads, per_sm(Smooth)) gradient_sums_kernel(const NormArgs args, const Grid grid) {
  using A = typename Step<T>::Sum;
  constexpr int V = Step<T>::V;
  const Place<T> at(args, grid);
  Sums<A> found[V];
  gradient_sums_of<Smooth, Vec>(args, grid, at, found);
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

template <bool Smooth, bool Vec, class T>
__global__ void __launch_bounds__(kThreads, per_sm(Smooth)) gradient_kernel(const NormArgs args, const Grid grid) {
  gradient<Smooth, Vec>(args, grid, Place<T>(args, grid));
}

template <bool Smooth, bool Vec, class T>
__global__ void __launch_bounds__(kFewThreads) few_backward_kernel(const NormArgs args, const Grid grid) {
  using A = typename Step<T>::Sum;
  constexpr int V = Step<T>::V;
  const Place<T> at(args, grid);
  Sums<A> found[V];
  gradient_sums_of<Smooth, Vec>(args, grid, at, found);
  merge_rows<kFewThreads>(grid, at.row, found);
  if (at.row == 0) {
#pragma unroll
    for (int i = 0; i < V; ++i) {
      if (i < at.valid) finish_sums(args, at.channel + i, found[i]);
    }
  }
  __syncthreads();
  if (kept_by_sums<Smooth>(args))
    gradient<false, Vec>(behind_activation(args), grid, at);
  else
    gradient<Smooth, Vec>(args, grid, at);
}

// ---- the sums of all CTAs --------------------------------------------------------------------------------------

// kFinished channels a CTA.
template <bool Backward, class A>
__global__ void __launch_bounds__(kFinishThreads) finish_kernel(const NormArgs args, const Grid grid, int64_t rows) {
  using State = std::conditional_t<Backward, Sums<A>, Moments<A>>;
  Grid lanes{};
  lanes.columns = kFinished;
  lanes.step = kFinishThreads / kFinished;
  const int lane = threadIdx.x / kFinished;
  const int64_t c = static_cast<int64_t>(blockIdx.x) * kFinished + threadIdx.x % kFinished;
  State all[1] = {};
  if (c < args.channels) {
    const A* partial = static_cast<const A*>(args.workspace) + c * 2;
#pragma unroll 4
    for (int b = lane; b < grid.blocks; b += lanes.step) {
      const A first = partial[b * args.channels * 2], second = partial[b * args.channels * 2 + 1];
      if constexpr (Backward)
        all[0].merge({first, second});
      else
        all[0].merge({A(min(rows, args.n - b * rows)), first, second});
    }
  }
  merge_rows<kFinishThreads>(lanes, lane, all);
  if (lane != 0 || c >= args.channels) return;
  if constexpr (Backward)
    finish_sums(args, c, all[0]);
  else
    finish_moments(args, c, all[0]);
}

template <bool Backward, bool Smooth, bool Vec, class T>
cudaError_t run(const NormArgs& args, cudaStream_t stream) {
  using A = typename Step<T>::Sum;
  if (args.n <= (Backward ? kFewBackward : kFewForward)) {
    const Grid grid = few_grid_of<T>(args);
    if constexpr (Backward)
      return launch_kernel(few_backward_kernel<Smooth, Vec, T>, grid.ctas(), kFewThreads, 0, stream, args, grid);
    else
      return launch_kernel(few_forward_kernel<Smooth, Vec, T>, grid.ctas(), kFewThreads, 0, stream, args, grid);
  }
  const Grid grid = grid_of<T>(args, Smooth && Backward);
  cudaError_t status;
  if constexpr (Backward)
    status = launch_kernel(gradient_sums_kernel<Smooth, Vec, T>, grid.ctas(), kThreads, 0, stream, args, grid);
  else
    status = launch_kernel(moments_kernel<Vec, T>, grid.ctas(), kThreads, 0, stream, args, grid);
  if (status != cudaSuccess) return status;
  status = launch_kernel(finish_kernel<Backward, A>, ceil_div(args.channels, kFinished), kFinishThreads, 0, stream,
                         args, grid, grid.each * Step<T>::R);
  if (status != cudaSuccess) return status;
  const bool made = Backward && Smooth && args.dresidual != nullptr;
  const Grid last = grid_of<T>(args, Smooth && !made);
  if constexpr (!Backward)
    return launch_kernel(apply_kernel<Smooth, Vec, T>, last.ctas(), kThreads, 0, stream, args, last);
  else if (made)
    return launch_kernel(gradient_kernel<false, Vec, T>, last.ctas(), kThreads, 0, stream, behind_activation(args),
                         last);
  else
    return launch_kernel(gradient_kernel<Smooth, Vec, T>, last.ctas(), kThreads, 0, stream, args, last);
}

// Whether V channels of every row can be read and written at once.
template <class T>
bool aligned(const NormArgs& args) {
  constexpr int64_t bytes = Step<T>::V * sizeof(T);
  const auto rows = [&](const void* p, int64_t ld) {
    return p == nullptr || (reinterpret_cast<uintptr_t>(p) % bytes == 0 && ld % Step<T>::V == 0);
  };
  return rows(args.x, args.ldx) && rows(args.residual, args.ldr) && rows(args.dy, args.ldy) &&
         rows(args.y, args.channels) && rows(args.dx, args.channels) && rows(args.dresidual, args.channels);
}

template <bool Backward, class T>
cudaError_t run(const NormArgs& args, cudaStream_t stream) {
  const bool smooth = args.activation == Activation::silu || args.activation == Activation::gelu;
  if (aligned<T>(args))
    return smooth ? run<Backward, true, true, T>(args, stream) : run<Backward, false, true, T>(args, stream);
  return smooth ? run<Backward, true, false, T>(args, stream) : run<Backward, false, false, T>(args, stream);
}

template <bool Backward>
cudaError_t run(const NormArgs& args, cudaStream_t stream) {
  switch (args.dtype) {
    case DType::f16: return run<Backward, __half>(args, stream);
    case DType::bf16: return run<Backward, __nv_bfloat16>(args, stream);
    case DType::f32: return run<Backward, float>(args, stream);
    case DType::f64: return run<Backward, double>(args, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

size_t norm_workspace(const NormArgs& args) {
  if (args.n <= std::min(kFewForward, kFewBackward)) return 0;
  const int64_t sums = args.channels * 2;
  switch (args.dtype) {
    case DType::f64: return grid_of<double>(args, false).blocks * sums * sizeof(double);
    case DType::f32: return grid_of<float>(args, false).blocks * sums * sizeof(float);
    default: return grid_of<__half>(args, false).blocks * sums * sizeof(float);
  }
}

size_t norm_passed_bytes(DType dtype, int64_t n, int64_t channels) {
  const auto of = [&](auto one) {
    using S = Step<decltype(one)>;
    return static_cast<size_t>(ceil_div(n, S::R) * ceil_div(channels, S::V)) * sizeof(typename S::Bits);
  };
  return dtype == DType::f64 ? of(double()) : dtype == DType::f32 ? of(float()) : of(__half());
}

cudaError_t norm_forward(const NormArgs& args, cudaStream_t stream) { return run<false>(args, stream); }
cudaError_t norm_backward(const NormArgs& args, cudaStream_t stream) { return run<true>(args, stream); }

}  // namespace voxmma
