// The weight image of the fprop kernels and the numbers of their epilogue, and the fixed-order sums of partial results.
#include "common.cuh"
#include "nonfinite.cuh"

namespace voxmma {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxPackBlocks = 1024;  // fills any device, and leaves a kernel at most 1024 flags to read

__device__ __forceinline__ void store_channel(const Channels& to, int64_t i) {
  const Folded v = fold_channel(to, i);
  const auto store = [&](auto* typed, double number) {
    if (typed != nullptr) typed[i] = static_cast<std::remove_pointer_t<decltype(typed)>>(number);
  };
  if (to.sums == DType::f64) {
    store(static_cast<double*>(to.summand), v.summand);
    store(static_cast<double*>(to.factor), v.factor);
  } else {
    store(static_cast<float*>(to.summand), v.summand);
    store(static_cast<float*>(to.factor), v.factor);
  }
}

// One thread per `PE` neighbouring channels (a 16-byte piece, or a single channel) of one image row.
template <class T, class W, int PE>
__global__ void pack_kernel(PackArgs args, int n_blocks, int chunks, int64_t total) {
  const auto* weight = static_cast<const W*>(args.weights.data);
  auto* image = static_cast<T*>(args.image);  // [G][n_blocks][K][chunks][n][k]
  const int pieces = args.k / PE;
  const bool by_row = args.weights.in != 1;  // what neighbouring threads go along: coalesced reads
  bool nonfinite = false;
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < total; i += int64_t{gridDim.x} * kThreads) {
    int row, piece, chunk, offset, nb, group;
    int64_t block;  // linear over [G][n_blocks][K][chunks]
    const auto locate = [&](auto rest) {
      using Index = decltype(rest);
      const auto take = [&](int of) {  // what `rest` counts fastest
        const auto whole = rest / static_cast<Index>(of);
        const int found = static_cast<int>(rest - whole * static_cast<Index>(of));
        rest = whole;
        return found;
      };
      if (by_row)
        row = take(args.n), piece = take(pieces);
      else
        piece = take(pieces), row = take(args.n);
      block = static_cast<int64_t>(rest);
      chunk = take(chunks);
      offset = take(args.kernel_volume);
      nb = take(n_blocks);
      group = static_cast<int>(rest);
    };
    if (total <= UINT32_MAX)  // a 64-bit division is a loop of instructions
      locate(static_cast<uint32_t>(i));
    else
      locate(i);
    const int co = nb * args.n + row;
    const int ci0 = chunk * args.k + piece * PE;

    const W* from = weight + weight_at(args.weights, offset, group, ci0, co);
    alignas(16) T v[PE];
#pragma unroll
    for (int e = 0; e < PE; ++e) {
      const bool inside = co < args.c_out && ci0 + e < args.c_in;
      v[e] = inside ? convert<T>(from[e * args.weights.in]) : convert<T>(0.0f);
      if (is_nonfinite(v[e])) {
        nonfinite = true;
        if (PE > 1) v[e] = stand_in(v[e]);
      }
    }
    const int row_bytes = args.k * static_cast<int>(sizeof(T));
    T* dst = image + (block * args.n + row) * args.k + swizzle(row, piece, row_bytes) * PE;
    if constexpr (PE * sizeof(T) == 16)
      *reinterpret_cast<uint4*>(dst) = *reinterpret_cast<const uint4*>(v);
    else
      dst[0] = v[0];
  }
  nonfinite = __syncthreads_or(nonfinite);
  if (threadIdx.x == 0) args.flags[blockIdx.x] = nonfinite;
  if (blockIdx.x == 0 && threadIdx.x < 16 && gridDim.x + threadIdx.x < ceil_div(gridDim.x, 16) * 16)
    args.flags[gridDim.x + threadIdx.x] = 0;  // up to 16 bytes
  const int64_t channels = args.channels.summand != nullptr ? int64_t{args.groups} * args.c_out : 0;
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < channels; i += int64_t{gridDim.x} * kThreads)
    store_channel(args.channels, i);
}

// A thread's pieces in all: 16 bytes, or a channel where k = 1.
int64_t pack_items(const PackArgs& args) {
  return static_cast<int64_t>(packed_weight_bytes(args)) / (args.k == 1 ? dtype_bytes(args.input) : 16);
}
int64_t pack_blocks(const PackArgs& args) {
  const int64_t wanted = ceil_div(pack_items(args), kThreads);
  return wanted < kMaxPackBlocks ? wanted : kMaxPackBlocks;
}

template <class T, class W>
cudaError_t pack_typed(const PackArgs& args, cudaStream_t stream) {
  constexpr int kPiece = 16 / sizeof(T);
  if (args.n < 1 || args.k < 1 || (args.k != 1 && args.k % kPiece != 0)) return cudaErrorInvalidValue;
  const int n_blocks = static_cast<int>(ceil_div(args.c_out, args.n));
  const int chunks = static_cast<int>(ceil_div(args.c_in, args.k));
  const int64_t total = pack_items(args), blocks = pack_blocks(args);
  if (args.k == 1)
    return launch_kernel(pack_kernel<T, W, 1>, blocks, kThreads, 0, stream, args, n_blocks, chunks, total);
  return launch_kernel(pack_kernel<T, W, kPiece>, blocks, kThreads, 0, stream, args, n_blocks, chunks, total);
}

template <class T>
cudaError_t pack_input(const PackArgs& args, cudaStream_t stream) {
  return with_dtype(args.weights.dtype,
                    [&](auto of) { return pack_typed<T, typename decltype(of)::type>(args, stream); });
}

// X: type of the operands that sums which are not finite are made again from; void: they stay.
template <class A, class T, class X>
__global__ void reduce_kernel(const A* partial /* [splits][count] */, int splits, int64_t count, T* out /* [count] */,
                              const ConvArgs pairs) {
  const int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  const bool inside = i < count;
  A sum = 0;
  if (inside) {
#pragma unroll 8
    for (int s = 0; s < splits; ++s) sum += partial[s * count + i];
  }
  if constexpr (!std::is_void_v<X>) {
    const bool wanted = !isfinite(sum);
    if (__any_sync(~0u, wanted)) sum = sum_pairs<X>(pairs, inside ? i : 0, wanted, sum);
  }
  if (inside) out[i] = convert<T>(sum);
}

struct NoPairs {
  using type = void;
};

template <class A, class X>
cudaError_t reduce_typed(const A* partial, int splits, int64_t count, void* out, DType out_dtype, cudaStream_t stream,
                         const ConvArgs& pairs) {
  const int64_t blocks = ceil_div(count, kThreads);
  return with_dtype(out_dtype, [&](auto of) {
    using T = typename decltype(of)::type;
    return launch_kernel(reduce_kernel<A, T, X>, blocks, kThreads, 0, stream, partial, splits, count,
                         static_cast<T*>(out), pairs);
  });
}

// out[row][column] = sum of partial[0][row][column], partial[1][row][column], ... in this order, then bias and epilogue.
template <class A, class T>
__global__ void reduce_rows_kernel(const A* partial /* [parts][count] */, int parts, int64_t count, int64_t columns,
                                   const ConvArgs args) {
  const int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (i >= count) return;
  A sum[1] = {0};
#pragma unroll 8
  for (int p = 0; p < parts; ++p) sum[0] += partial[p * count + i];
  const int64_t row = i / columns;
  finish_as<T>(args, row, i - row * columns, sum, 1, true);
}

template <class A>
cudaError_t reduce_rows(const ConvArgs& args, int parts, cudaStream_t stream) {
  const int64_t columns = int64_t{args.groups} * args.c_out, count = args.plan.n_out * columns;
  return with_dtype(args.out_dtype, [&](auto of) {
    using T = typename decltype(of)::type;
    return launch_kernel(reduce_rows_kernel<A, T>, ceil_div(count, kThreads), kThreads, 0, stream,
                         static_cast<const A*>(args.workspace), parts, count, columns, args);
  });
}

cudaError_t reduce_rows(const ConvArgs& args, int parts, DType acc, cudaStream_t stream) {
  if (acc == DType::f32) return reduce_rows<float>(args, parts, stream);
  if (acc == DType::f64) return reduce_rows<double>(args, parts, stream);
  return cudaErrorInvalidValue;
}

}  // namespace

size_t packed_weight_bytes(const PackArgs& args) {
  return static_cast<size_t>(args.groups) * ceil_div(args.c_out, args.n) * args.n * args.kernel_volume *
         ceil_div(args.c_in, args.k) * args.k * dtype_bytes(args.input);
}

int pack_flag_bytes(const PackArgs& args) { return static_cast<int>(ceil_div(pack_blocks(args), 16) * 16); }

cudaError_t pack_weight(const PackArgs& args, cudaStream_t stream) {
  return with_dtype(args.input, [&](auto of) { return pack_input<typename decltype(of)::type>(args, stream); });
}

cudaError_t reduce_splits(const void* partial, DType acc, int splits, int64_t count, void* out, DType out_dtype,
                          cudaStream_t stream, const ConvArgs* pairs, DType in) {
  const auto reduce = [&](auto* typed, auto operand) {
    using A = std::remove_const_t<std::remove_pointer_t<decltype(typed)>>;
    using X = typename decltype(operand)::type;
    return reduce_typed<A, X>(typed, splits, count, out, out_dtype, stream, pairs ? *pairs : ConvArgs{});
  };
  if (acc == DType::f64 && !pairs) return reduce(static_cast<const double*>(partial), NoPairs());
  if (acc != DType::f32) return cudaErrorInvalidValue;
  const auto* sums = static_cast<const float*>(partial);
  if (!pairs) return reduce(sums, NoPairs());
  if (in == DType::f16) return reduce(sums, TypeOf<DType::f16>());
  if (in == DType::bf16) return reduce(sums, TypeOf<DType::bf16>());
  return cudaErrorInvalidValue;
}

cudaError_t reduce_parts(const ConvArgs& args, const Parts& parts, DType acc, cudaStream_t stream) {
  return parts.count() == 1 ? cudaSuccess : reduce_rows(args, parts.count(), acc, stream);
}

cudaError_t store_zero_sums(const ConvArgs& args, DType sums, cudaStream_t stream) {
  return reduce_rows(args, 0, sums, stream);
}

}  // namespace voxmma
