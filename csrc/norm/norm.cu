// Batch norm in training with what follows it: sums over the rows, one pass over them forward, two backward.
//
// A CTA has kThreads threads: `columns` of them side by side, V channels each, over rows that follow each other. Sums of a
// CTA lie in the workspace, [blocks][channels], and a second launch adds them, a warp a channel, in a fixed order.
#include "../common/epilogue.cuh"
#include "../conv/common.cuh"

namespace voxmma {
namespace {

constexpr int kThreads = 256;
constexpr int kUnroll = 4;  // rows that a thread has in flight, of gradients half as many: they take three loads each

// How the threads of a launch divide (n, channels) among them.
struct Grid {
  int columns;   // threads side by side, a power of two
  int across;    // CTAs side by side
  int blocks;    // CTAs over the rows
  int64_t rows;  // of one of these
};

__host__ Grid grid_of(const NormArgs& args, int v) {
  const int64_t vectors = ceil_div(args.channels, v);
  int columns = 1;
  while (columns < vectors && columns < kThreads / 8) columns *= 2;
  const int across = static_cast<int>(ceil_div(vectors, columns));
  const int at_once = kThreads / columns * kUnroll;  // rows of a CTA in one step
  const int64_t most = ceil_div(args.n, at_once), wanted = ceil_div(int64_t{4} * args.sm_count, across);
  const int64_t rows = ceil_div(ceil_div(args.n, most < wanted ? most : wanted), at_once) * at_once;
  return {columns, across, static_cast<int>(ceil_div(args.n, rows)), rows};
}

// The place of a thread: first row, step between its rows, first channel and how many of V exist.
template <int V>
struct Place {
  int64_t begin, end;
  int step, row, channel, valid;
  __device__ Place(const NormArgs& args, const Grid& grid) {
    const int column = threadIdx.x % grid.columns;
    row = threadIdx.x / grid.columns;
    step = kThreads / grid.columns;
    channel = (static_cast<int>(blockIdx.x % grid.across) * grid.columns + column) * V;
    valid = static_cast<int>(min(static_cast<int64_t>(V), args.channels - channel));
    const int64_t block = blockIdx.x / grid.across;
    begin = block * grid.rows;
    end = min(args.n, begin + grid.rows);
  }
};

// What a thread or a warp knows of a channel: values so far, their mean, and the sum of squared deviations from it.
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

template <class T, class A, int V>
__global__ void __launch_bounds__(kThreads) moments_kernel(const NormArgs args, const Grid grid) {
  __shared__ A s_mean[V][kThreads], s_squares[V][kThreads];
  __shared__ int s_count[kThreads];
  const Place<V> at(args, grid);
  const T* x = static_cast<const T*>(args.x) + at.channel;
  A first[V] = {}, sum[V] = {}, squares[V] = {};  // of x - first: its own first row keeps a thread's numbers small
  int count = 0;
  if (at.valid > 0) {
    if (at.begin + at.row < at.end) load_elements(first, x + (at.begin + at.row) * args.ldx, at.valid, V > 1);
    for (int64_t r = at.begin + at.row; r < at.end; r += kUnroll * at.step) {
      A v[kUnroll][V];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (r + u * at.step < at.end) load_elements(v[u], x + (r + u * at.step) * args.ldx, at.valid, V > 1);
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (r + u * at.step >= at.end) continue;
        ++count;
#pragma unroll
        for (int i = 0; i < V; ++i) {
          const A d = v[u][i] - first[i];
          sum[i] += d;
          squares[i] = fma(d, d, squares[i]);
        }
      }
    }
  }
  s_count[threadIdx.x] = count;
#pragma unroll
  for (int i = 0; i < V; ++i) {
    const A shift = count > 0 ? sum[i] / count : A(0);
    s_mean[i][threadIdx.x] = first[i] + shift;
    s_squares[i][threadIdx.x] = max(squares[i] - shift * sum[i], A(0));
  }
  for (int half = at.step / 2; half > 0; half /= 2) {
    __syncthreads();
    if (at.row < half) {
      const int other = threadIdx.x + half * grid.columns, n = s_count[threadIdx.x], m = s_count[other];
#pragma unroll
      for (int i = 0; i < V; ++i) {
        Moments<A> mine = {A(n), s_mean[i][threadIdx.x], s_squares[i][threadIdx.x]};
        mine.merge({A(m), s_mean[i][other], s_squares[i][other]});
        s_mean[i][threadIdx.x] = mine.mean;
        s_squares[i][threadIdx.x] = mine.squares;
      }
      s_count[threadIdx.x] = n + m;
    }
  }
  if (at.row == 0) {
    A* out = static_cast<A*>(args.workspace) + blockIdx.x / grid.across * args.channels * 2;
    for (int i = 0; i < at.valid; ++i) {
      out[(at.channel + i) * 2] = s_mean[i][threadIdx.x];
      out[(at.channel + i) * 2 + 1] = s_squares[i][threadIdx.x];
    }
  }
}

// A warp a channel.
template <class A>
__global__ void __launch_bounds__(kThreads) finish_moments_kernel(const NormArgs args, const Grid grid) {
  const int lane = threadIdx.x % 32;
  const int64_t c = (blockIdx.x * int64_t{kThreads} + threadIdx.x) / 32;
  if (c >= args.channels) return;
  const A* partial = static_cast<const A*>(args.workspace);
  Moments<A> all = {0, 0, 0};
  for (int b = lane; b < grid.blocks; b += 32) {
    const A* from = partial + (b * args.channels + c) * 2;
    all.merge({A(min(grid.rows, args.n - b * grid.rows)), from[0], from[1]});
  }
  for (int half = 16; half > 0; half /= 2) {
    const A n = __shfl_down_sync(~0u, all.n, half), mean = __shfl_down_sync(~0u, all.mean, half);
    const A squares = __shfl_down_sync(~0u, all.squares, half);
    if (lane < half) all.merge({n, mean, squares});
  }
  if (lane != 0) return;
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
  __device__ void apply(A (&v)[V]) const {
#pragma unroll
    for (int i = 0; i < V; ++i) v[i] = fma(v[i] - mean[i], factor[i], shift[i]);
  }
};

// The rows of a thread, Unroll of them at a time: load(row, u) of all of these, then use(row, u).
template <int Unroll, int V, class Load, class Use>
__device__ __forceinline__ void for_rows(const Place<V>& at, Load load, Use use) {
  for (int64_t r = at.begin + at.row; r < at.end; r += Unroll * at.step) {
#pragma unroll
    for (int u = 0; u < Unroll; ++u) {
      if (r + u * at.step < at.end) load(r + u * at.step, u);
    }
#pragma unroll
    for (int u = 0; u < Unroll; ++u) {
      if (r + u * at.step < at.end) use(r + u * at.step, u);
    }
  }
}

template <class T, class A, int V>
__global__ void __launch_bounds__(kThreads, 2) apply_kernel(const NormArgs args, const Grid grid) {
  const Place<V> at(args, grid);
  if (at.valid <= 0) return;
  const Affine<A, V> affine(args, at.channel, at.valid);
  const T* x = static_cast<const T*>(args.x) + at.channel;
  const T* residual = static_cast<const T*>(args.residual) + at.channel;
  T* y = static_cast<T*>(args.y) + at.channel;
  T v[kUnroll][V], add[kUnroll][V];
  for_rows<kUnroll>(
      at,
      [&](int64_t row, int u) {
        load_elements(v[u], x + row * args.ldx, at.valid, V > 1);
        if (args.residual != nullptr) load_elements(add[u], residual + row * args.ldr, at.valid, V > 1);
      },
      [&](int64_t row, int u) {
        A a[V];
#pragma unroll
        for (int i = 0; i < V; ++i) a[i] = convert<A>(v[u][i]);
        affine.apply(a);
        if (args.residual != nullptr) {
#pragma unroll
          for (int i = 0; i < V; ++i) a[i] += convert<A>(add[u][i]);
        }
        activate(a, args.activation, args.slope);
        store_elements(y + row * args.channels, a, at.valid, V > 1);
      });
}

// Gradients of rows: d becomes that of what the activation was given, x its deviation from the mean.
//   kept: residual, or y of a relu with one; without either, the activation was given affine(x)
template <class T, class A, int V>
__device__ __forceinline__ void through_activation(const NormArgs& args, const Affine<A, V>& affine, A (&d)[V],
                                                   A (&x)[V], const T (&kept)[V]) {
  A given[V];
  const bool by_y = args.residual != nullptr && args.activation == Activation::relu;
#pragma unroll
  for (int i = 0; i < V; ++i) {
    x[i] -= affine.mean[i];
    given[i] = fma(x[i], affine.factor[i], affine.shift[i]);
    if (args.residual != nullptr) given[i] = by_y ? convert<A>(kept[i]) : given[i] + convert<A>(kept[i]);
  }
  activate_gradient(d, given, args.activation, args.slope);
}

template <class T, class A, int V>
__global__ void __launch_bounds__(kThreads, 2) gradient_sums_kernel(const NormArgs args, const Grid grid) {
  __shared__ A s_sum[V][kThreads], s_dot[V][kThreads];
  const Place<V> at(args, grid);
  A sum[V] = {}, dot[V] = {};
  if (at.valid > 0) {
    const Affine<A, V> affine(args, at.channel, at.valid);
    const T *x = static_cast<const T*>(args.x) + at.channel, *dy = static_cast<const T*>(args.dy) + at.channel;
    const T* kept = static_cast<const T*>(args.residual) + at.channel;
    T v[kUnroll / 2][V], g[kUnroll / 2][V], k[kUnroll / 2][V];
    for_rows<kUnroll / 2>(
        at,
        [&](int64_t row, int u) {
          load_elements(v[u], x + row * args.ldx, at.valid, V > 1);
          load_elements(g[u], dy + row * args.ldy, at.valid, V > 1);
          if (args.residual != nullptr) load_elements(k[u], kept + row * args.ldr, at.valid, V > 1);
        },
        [&](int64_t, int u) {
          A d[V], a[V];
#pragma unroll
          for (int i = 0; i < V; ++i) d[i] = convert<A>(g[u][i]), a[i] = convert<A>(v[u][i]);
          through_activation(args, affine, d, a, k[u]);
#pragma unroll
          for (int i = 0; i < V; ++i) {
            sum[i] += d[i];
            dot[i] = fma(d[i], a[i], dot[i]);
          }
        });
  }
#pragma unroll
  for (int i = 0; i < V; ++i) {
    s_sum[i][threadIdx.x] = sum[i];
    s_dot[i][threadIdx.x] = dot[i];
  }
  for (int half = at.step / 2; half > 0; half /= 2) {
    __syncthreads();
    if (at.row < half) {
      const int other = threadIdx.x + half * grid.columns;
#pragma unroll
      for (int i = 0; i < V; ++i) {
        s_sum[i][threadIdx.x] += s_sum[i][other];
        s_dot[i][threadIdx.x] += s_dot[i][other];
      }
    }
  }
  if (at.row == 0) {
    A* out = static_cast<A*>(args.workspace) + blockIdx.x / grid.across * args.channels * 2;
    for (int i = 0; i < at.valid; ++i) {
      out[(at.channel + i) * 2] = s_sum[i][threadIdx.x];
      out[(at.channel + i) * 2 + 1] = s_dot[i][threadIdx.x];
    }
  }
}

template <class A>
__global__ void __launch_bounds__(kThreads) finish_gradient_sums_kernel(const NormArgs args, const Grid grid) {
  const int lane = threadIdx.x % 32;
  const int64_t c = (blockIdx.x * int64_t{kThreads} + threadIdx.x) / 32;
  if (c >= args.channels) return;
  const A* partial = static_cast<const A*>(args.workspace);
  A sum = 0, dot = 0;
  for (int b = lane; b < grid.blocks; b += 32) {
    sum += partial[(b * args.channels + c) * 2];
    dot += partial[(b * args.channels + c) * 2 + 1];
  }
  for (int half = 16; half > 0; half /= 2) {
    sum += __shfl_down_sync(~0u, sum, half);
    dot += __shfl_down_sync(~0u, dot, half);
  }
  if (lane != 0) return;
  static_cast<A*>(args.dbias)[c] = sum;
  static_cast<A*>(args.dweight)[c] = dot * static_cast<const A*>(args.stats)[args.channels + c];
}

template <class T, class A, int V>
__global__ void __launch_bounds__(kThreads, 2) gradient_kernel(const NormArgs args, const Grid grid) {
  const Place<V> at(args, grid);
  if (at.valid <= 0) return;
  const Affine<A, V> affine(args, at.channel, at.valid);
  A sum[V], dot[V], invstd[V];  // of a row, and of a deviation
  load_elements(sum, static_cast<const A*>(args.dbias) + at.channel, at.valid, false);
  load_elements(dot, static_cast<const A*>(args.dweight) + at.channel, at.valid, false);
  load_elements(invstd, static_cast<const A*>(args.stats) + args.channels + at.channel, at.valid, false);
#pragma unroll
  for (int i = 0; i < V; ++i) sum[i] /= A(args.n), dot[i] *= invstd[i] / A(args.n);
  const T *x = static_cast<const T*>(args.x) + at.channel, *dy = static_cast<const T*>(args.dy) + at.channel;
  const T* kept = static_cast<const T*>(args.residual) + at.channel;
  T *dx = static_cast<T*>(args.dx) + at.channel, *dresidual = static_cast<T*>(args.dresidual) + at.channel;
  T v[kUnroll / 2][V], g[kUnroll / 2][V], k[kUnroll / 2][V];
  for_rows<kUnroll / 2>(
      at,
      [&](int64_t row, int u) {
        load_elements(v[u], x + row * args.ldx, at.valid, V > 1);
        load_elements(g[u], dy + row * args.ldy, at.valid, V > 1);
        if (args.residual != nullptr) load_elements(k[u], kept + row * args.ldr, at.valid, V > 1);
      },
      [&](int64_t row, int u) {
        A d[V], a[V];
#pragma unroll
        for (int i = 0; i < V; ++i) d[i] = convert<A>(g[u][i]), a[i] = convert<A>(v[u][i]);
        through_activation(args, affine, d, a, k[u]);
        if (args.dresidual != nullptr) store_elements(dresidual + row * args.channels, d, at.valid, V > 1);
#pragma unroll
        for (int i = 0; i < V; ++i) d[i] = affine.factor[i] * (d[i] - sum[i] - a[i] * dot[i]);
        store_elements(dx + row * args.channels, d, at.valid, V > 1);
      });
}

template <class A>
constexpr DType sums_of = std::is_same_v<A, double> ? DType::f64 : DType::f32;

template <class T, class A, int V>
cudaError_t run(const NormArgs& args, bool backward, cudaStream_t stream) {
  const Grid grid = grid_of(args, V);
  const int64_t blocks = int64_t{grid.blocks} * grid.across, warps = ceil_div(args.channels * 32, kThreads);
  cudaError_t status = backward ? launch_kernel(gradient_sums_kernel<T, A, V>, blocks, kThreads, 0, stream, args, grid)
                                : launch_kernel(moments_kernel<T, A, V>, blocks, kThreads, 0, stream, args, grid);
  if (status != cudaSuccess) return status;
  status = backward ? launch_kernel(finish_gradient_sums_kernel<A>, warps, kThreads, 0, stream, args, grid)
                    : launch_kernel(finish_moments_kernel<A>, warps, kThreads, 0, stream, args, grid);
  if (status != cudaSuccess) return status;
  return backward ? launch_kernel(gradient_kernel<T, A, V>, blocks, kThreads, 0, stream, args, grid)
                  : launch_kernel(apply_kernel<T, A, V>, blocks, kThreads, 0, stream, args, grid);
}

// Channels of a thread: 16 bytes of a row where all rows are aligned, else 1.
int vector_of(const NormArgs& args) {
  const int bytes = dtype_bytes(args.dtype), v = 16 / bytes;
  const auto aligned = [&](const void* p, int64_t ld) { return p == nullptr || rows_aligned16(p, ld, 0, bytes); };
  const bool all = args.channels % v == 0 && aligned(args.x, args.ldx) && aligned(args.residual, args.ldr) &&
                   aligned(args.dy, args.ldy) && aligned(args.y, args.channels) && aligned(args.dx, args.channels) &&
                   aligned(args.dresidual, args.channels);
  return all ? v : 1;
}

cudaError_t run(const NormArgs& args, bool backward, cudaStream_t stream) {
  const bool wide = vector_of(args) > 1;
  switch (args.dtype) {
    case DType::f16:
      return wide ? run<__half, float, 8>(args, backward, stream) : run<__half, float, 1>(args, backward, stream);
    case DType::bf16:
      return wide ? run<__nv_bfloat16, float, 8>(args, backward, stream)
                  : run<__nv_bfloat16, float, 1>(args, backward, stream);
    case DType::f32:
      return wide ? run<float, float, 4>(args, backward, stream) : run<float, float, 1>(args, backward, stream);
    case DType::f64:
      return wide ? run<double, double, 2>(args, backward, stream) : run<double, double, 1>(args, backward, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

size_t norm_workspace(const NormArgs& args) {
  return static_cast<size_t>(grid_of(args, vector_of(args)).blocks) * args.channels * 2 *
         (args.dtype == DType::f64 ? sizeof(double) : sizeof(float));
}

cudaError_t norm_forward(const NormArgs& args, cudaStream_t stream) { return run(args, false, stream); }
cudaError_t norm_backward(const NormArgs& args, cudaStream_t stream) { return run(args, true, stream); }

}  // namespace voxmma
