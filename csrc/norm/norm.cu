// Batch norm in training with what follows it: sums over the rows, one pass over them forward; the same backward.
//
// Threads of a CTA stand side by side in columns, V channels each, and take R neighbouring rows in a step: 32 bytes of every
// tensor, in so few registers that enough threads wait for memory at a time. Kernels of half types are bound by the
// instructions they issue, hence Kind. Sums of a CTA lie in the workspace, [blocks][channels], and a second launch adds them
// in a fixed order. The last pass walks rows backwards: what the first one read last is still in L2. Few rows are one
// launch, whose CTAs have kFewBytes of channels and all rows.
#include "../common/epilogue.cuh"
#include "../conv/common.cuh"

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

// ---- forward ---------------------------------------------------------------------------------------------------

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

// Whether relu and leaky_relu pass what they are given.
template <class A>
__device__ __forceinline__ bool passes(A given) {
  return !(given <= 0);
}

template <Kind K, bool Vec, class T>
__device__ __forceinline__ void apply(const NormArgs& args, const Grid& grid, const Place<T>& at) {
  using A = typename Step<T>::Sum;
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

template <Kind K, bool Vec, class T>
__global__ void __launch_bounds__(kThreads, kPerSm) apply_kernel(const NormArgs args, const Grid grid) {
  apply<K, Vec>(args, grid, Place<T>(args, grid));
}

template <Kind K, bool Vec, class T>
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
  apply<K, Vec>(args, grid, at);
}

// ---- backward --------------------------------------------------------------------------------------------------

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
__device__ void finish_sums(const NormArgs& args, int64_t c, const Sums<A>& all) {
  static_cast<A*>(args.dbias)[c] = all.sum;
  static_cast<A*>(args.dweight)[c] = all.dot * static_cast<const A*>(args.stats)[args.channels + c];
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
  using A = typename Step<T>::Sum;
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
  using A = typename Step<T>::Sum;
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
  using A = typename Step<T>::Sum;
  constexpr int V = Step<T>::V;
  const Place<T> at(args, grid);
  Sums<A> found[V];
  gradient_sums_of<K, Vec>(args, grid, at, found);
  merge_rows<kFewThreads>(grid, at.row, found);
  if (at.row == 0) {
#pragma unroll
    for (int i = 0; i < V; ++i) {
      if (i < at.valid) finish_sums(args, at.channel + i, found[i]);
    }
  }
  __syncthreads();
  if constexpr (K == Kind::smooth)
    gradient<Kind::none, Vec>(behind_activation(args), grid, at);
  else
    gradient<K, Vec>(args, grid, at);
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

template <bool Backward, Kind K, bool Vec, class T>
cudaError_t run(const NormArgs& args, cudaStream_t stream) {
  using A = typename Step<T>::Sum;
  if (args.n <= kFew) {
    const Grid grid = few_grid_of<T>(args);
    if constexpr (Backward)
      return launch_kernel(few_backward_kernel<K, Vec, T>, grid.ctas(), kFewThreads, 0, stream, args, grid);
    else
      return launch_kernel(few_forward_kernel<K, Vec, T>, grid.ctas(), kFewThreads, 0, stream, args, grid);
  }
  constexpr bool kSmooth = K == Kind::smooth;
  const Grid grid = grid_of<T>(args, !Backward ? kMomentsPerSm : kSmooth ? kSmoothPerSm : kPerSm);
  cudaError_t status;
  if constexpr (Backward)
    status = launch_kernel(gradient_sums_kernel<K, Vec, T>, grid.ctas(), kThreads, 0, stream, args, grid);
  else
    status = launch_kernel(moments_kernel<Vec, T>, grid.ctas(), kThreads, 0, stream, args, grid);
  if (status != cudaSuccess) return status;
  status = launch_kernel(finish_kernel<Backward, A>, ceil_div(args.channels, kFinished), kFinishThreads, 0, stream,
                         args, grid, grid.each * Step<T>::R);
  if (status != cudaSuccess) return status;
  const Grid last = grid_of<T>(args, kPerSm);
  if constexpr (!Backward)
    return launch_kernel(apply_kernel<K, Vec, T>, last.ctas(), kThreads, 0, stream, args, last);
  else
    return launch_kernel(gradient_kernel < kSmooth ? Kind::none : K, Vec, T >, last.ctas(), kThreads, 0, stream,
                         kSmooth ? behind_activation(args) : args, last);
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
  const bool vec = aligned<T>(args);
  if (args.activation == Activation::silu || args.activation == Activation::gelu) {
    return vec ? run<Backward, Kind::smooth, true, T>(args, stream)
               : run<Backward, Kind::smooth, false, T>(args, stream);
  }
  if (!vec) return run<Backward, Kind::any, false, T>(args, stream);
  if constexpr (sizeof(T) < 8) {
    if (args.activation == Activation::none) return run<Backward, Kind::none, true, T>(args, stream);
    if (args.activation == Activation::relu) {
      const bool added = Backward ? args.passed != nullptr : args.residual != nullptr;
      return added ? run<Backward, Kind::relu_added, true, T>(args, stream)
                   : run<Backward, Kind::relu, true, T>(args, stream);
    }
  }
  return run<Backward, Kind::any, true, T>(args, stream);
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
  if (args.n <= kFew) return 0;
  const int64_t sums = args.channels * 2;
  switch (args.dtype) {
    case DType::f64: return grid_of<double>(args, kMomentsPerSm).blocks * sums * sizeof(double);
    case DType::f32: return grid_of<float>(args, kMomentsPerSm).blocks * sums * sizeof(float);
    default: return grid_of<__half>(args, kMomentsPerSm).blocks * sums * sizeof(float);
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
