// Batch norm in training with what follows it: sums over the rows, one pass over them forward; the same backward.
//
// Threads of a CTA stand side by side in columns, V channels each, and take R neighbouring rows in a step: 32 bytes of every
// tensor, in so few registers that enough threads wait for memory at a time. Kernels of half types are bound by the
// instructions they issue, hence Kind. Sums of a CTA lie in the workspace, [blocks][channels], and a second launch adds them
// in a fixed order. The last pass walks rows backwards: what the first one read last is still in L2. Few rows are one
// launch, whose CTAs have kFewBytes of channels and all rows; clusters of CTAs that share 1,500 to 16,000 rows take twice
// the time of three launches (H200).
#include "norm_backward.cuh"
#include "norm_forward.cuh"

namespace voxmma {
namespace {

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
  const bool first = lane == 0 && c < args.channels;  // that will have the sums of all
  const std::conditional_t<Backward, OfSums<A>, OfMoments<A>> of(args, c, first);
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
  if (!first) return;
  if constexpr (Backward)
    finish_sums(args, c, of, all[0]);
  else
    finish_moments(args, c, of, all[0]);
}

template <bool Backward, Kind K, bool Vec, class T>
cudaError_t run(const NormArgs& args, cudaStream_t stream) {
  using A = SumOf<T>;
  const Grid last = grid_of<T>(args, kPerSm);
  if constexpr (!Backward) {
    if (args.given) return launch_kernel(apply_kernel<K, Vec, T>, last.ctas(), kThreads, 0, stream, args, last);
  }
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
  return with_dtype(args.dtype, [&](auto of) { return run<Backward, typename decltype(of)::type>(args, stream); });
}

}  // namespace

size_t norm_workspace(const NormArgs& args) {
  if (args.n <= kFew) return 0;
  const int64_t sums = args.channels * 2;
  return with_dtype(args.dtype, [&](auto of) {
    using T = typename decltype(of)::type;
    return static_cast<size_t>(grid_of<T>(args, kMomentsPerSm).blocks * sums) * sizeof(SumOf<T>);
  });
}

size_t norm_passed_bytes(DType dtype, int64_t n, int64_t channels) {
  return with_dtype(dtype, [&](auto of) {
    using S = Step<typename decltype(of)::type>;
    return static_cast<size_t>(ceil_div(n, S::R) * ceil_div(channels, S::V)) * sizeof(typename S::Bits);
  });
}

cudaError_t norm_forward(const NormArgs& args, cudaStream_t stream) { return run<false>(args, stream); }
cudaError_t norm_backward(const NormArgs& args, cudaStream_t stream) { return run<true>(args, stream); }

}  // namespace voxmma
