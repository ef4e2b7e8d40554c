// The weight image of the fprop kernels, and the fixed-order sums of partial results.
#include "common.cuh"

namespace voxmma {
namespace {

constexpr int kThreads = 256;

__device__ float load_float(const void* values, DType dtype, int64_t i) {
  switch (dtype) {
    case DType::f16: return convert<float>(static_cast<const __half*>(values)[i]);
    case DType::bf16: return convert<float>(static_cast<const __nv_bfloat16*>(values)[i]);
    case DType::f32: return static_cast<const float*>(values)[i];
    default: return convert<float>(static_cast<const double*>(values)[i]);
  }
}

// One thread per `PE` neighbouring channels (a 16-byte piece, or a single channel) of one image row.
template <class T, class W, int PE>
__global__ void pack_kernel(PackArgs args, int n_blocks, int chunks, int64_t total) {
  const auto* weight = static_cast<const W*>(args.weight);  // (K, G, c_in, c_out), or (K, G, c_out, c_in) if transposed
  auto* image = static_cast<T*>(args.image);                // [G][n_blocks][K][chunks][n][k]
  const int pieces = args.k / PE;
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < total; i += int64_t{gridDim.x} * kThreads) {
    int64_t rest = i;
    const int row = static_cast<int>(rest % args.n);
    rest /= args.n;  // fastest: coalesced reads of plain weights
    const int piece = static_cast<int>(rest % pieces);
    rest /= pieces;
    const int64_t block = rest;  // linear over [G][n_blocks][K][chunks]
    const int chunk = static_cast<int>(rest % chunks);
    rest /= chunks;
    const int offset = static_cast<int>(rest % args.kernel_volume);
    rest /= args.kernel_volume;
    const int nb = static_cast<int>(rest % n_blocks);
    const int group = static_cast<int>(rest / n_blocks);
    const int co = nb * args.n + row;
    const int ci0 = chunk * args.k + piece * PE;
    const int from = args.mirror ? args.kernel_volume - 1 - offset : offset;
    const W* w = weight + (static_cast<int64_t>(from) * args.groups + group) * args.c_in * args.c_out;

    alignas(16) T v[PE];
#pragma unroll
    for (int e = 0; e < PE; ++e) {
      const int ci = ci0 + e;
      const bool inside = co < args.c_out && ci < args.c_in;
      const int64_t at =
          args.transpose ? static_cast<int64_t>(co) * args.c_in + ci : static_cast<int64_t>(ci) * args.c_out + co;
      v[e] = inside ? convert<T>(w[at]) : convert<T>(0.0f);
    }
    const int row_bytes = args.k * static_cast<int>(sizeof(T));
    T* dst = image + (block * args.n + row) * args.k + swizzle(row, piece, row_bytes) * PE;
    if constexpr (PE * sizeof(T) == 16)
      *reinterpret_cast<uint4*>(dst) = *reinterpret_cast<const uint4*>(v);
    else
      dst[0] = v[0];
  }
  if (args.bias != nullptr) {
    const int64_t channels = int64_t{args.groups} * args.c_out;
    for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < channels; i += int64_t{gridDim.x} * kThreads) {
      args.bias32[i] = load_float(args.bias, args.bias_dtype, i);
    }
  }
}

template <class T, class W>
cudaError_t pack_typed(const PackArgs& args, cudaStream_t stream) {
  constexpr int kPiece = 16 / sizeof(T);
  if (args.n < 1 || args.k < 1 || (args.k != 1 && args.k % kPiece != 0)) return cudaErrorInvalidValue;
  const int n_blocks = static_cast<int>(ceil_div(args.c_out, args.n));
  const int chunks = static_cast<int>(ceil_div(args.c_in, args.k));
  const int64_t elements = static_cast<int64_t>(packed_weight_bytes(args) / sizeof(T));
  const int64_t total = args.k == 1 ? elements : elements / kPiece;
  const int64_t wanted = ceil_div(total, kThreads);
  const int64_t blocks = wanted < 65536 ? wanted : 65536;
  if (args.k == 1)
    return launch_kernel(pack_kernel<T, W, 1>, blocks, kThreads, 0, stream, args, n_blocks, chunks, total);
  return launch_kernel(pack_kernel<T, W, kPiece>, blocks, kThreads, 0, stream, args, n_blocks, chunks, total);
}

template <class T>
cudaError_t pack_input(const PackArgs& args, cudaStream_t stream) {
  switch (args.weight_dtype) {
    case DType::f16: return pack_typed<T, __half>(args, stream);
    case DType::bf16: return pack_typed<T, __nv_bfloat16>(args, stream);
    case DType::f32: return pack_typed<T, float>(args, stream);
    case DType::f64: return pack_typed<T, double>(args, stream);
  }
  return cudaErrorInvalidValue;
}

// out[i] = sum of partial[0][i], partial[1][i], ... in this order, [splits][count]. Rows: i is a row and a column of
// `columns`; a row of `out` has ldo elements, and the column's bias is added last.
template <class A, class T, bool Rows>
__global__ void reduce_kernel(const A* partial, int splits, int64_t count, T* out, int64_t columns, int64_t ldo,
                              const float* bias) {
  const int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (i >= count) return;
  A sum = 0;
#pragma unroll 8
  for (int s = 0; s < splits; ++s) sum += partial[s * count + i];
  if constexpr (Rows) {
    const int64_t row = i / columns, column = i - row * columns;
    if (bias != nullptr) sum += static_cast<A>(bias[column]);
    out[row * ldo + column] = convert<T>(sum);
  } else {
    out[i] = convert<T>(sum);
  }
}

template <bool Rows, class A>
cudaError_t reduce_typed(const A* partial, int splits, int64_t count, void* out, DType out_dtype, cudaStream_t stream,
                         int64_t columns = 0, int64_t ldo = 0, const float* bias = nullptr) {
  const auto run = [&](auto* typed) {
    using T = std::remove_pointer_t<decltype(typed)>;
    return launch_kernel(reduce_kernel<A, T, Rows>, ceil_div(count, kThreads), kThreads, 0, stream, partial, splits,
                         count, typed, columns, ldo, bias);
  };
  switch (out_dtype) {
    case DType::f16: return run(static_cast<__half*>(out));
    case DType::bf16: return run(static_cast<__nv_bfloat16*>(out));
    case DType::f32: return run(static_cast<float*>(out));
    case DType::f64: return run(static_cast<double*>(out));
  }
  return cudaErrorInvalidValue;
}

}  // namespace

size_t packed_weight_bytes(const PackArgs& args) {
  return static_cast<size_t>(args.groups) * ceil_div(args.c_out, args.n) * args.n * args.kernel_volume *
         ceil_div(args.c_in, args.k) * args.k * dtype_bytes(args.input);
}

cudaError_t pack_weight(const PackArgs& args, cudaStream_t stream) {
  switch (args.input) {
    case DType::f16: return pack_input<__half>(args, stream);
    case DType::bf16: return pack_input<__nv_bfloat16>(args, stream);
    case DType::f32: return pack_input<float>(args, stream);
    case DType::f64: return pack_input<double>(args, stream);
  }
  return cudaErrorInvalidValue;
}

cudaError_t reduce_splits(const void* partial, DType acc, int splits, int64_t count, void* out, DType out_dtype,
                          cudaStream_t stream) {
  if (acc == DType::f32)
    return reduce_typed<false>(static_cast<const float*>(partial), splits, count, out, out_dtype, stream);
  if (acc == DType::f64)
    return reduce_typed<false>(static_cast<const double*>(partial), splits, count, out, out_dtype, stream);
  return cudaErrorInvalidValue;
}

cudaError_t reduce_parts(const ConvArgs& args, const Parts& parts, DType acc, cudaStream_t stream) {
  if (parts.count() == 1) return cudaSuccess;
  const int64_t columns = int64_t{args.groups} * args.c_out, count = args.plan.n_out * columns;
  const auto run = [&](const auto* partial) {
    return reduce_typed<true>(partial, parts.count(), count, args.out, args.out_dtype, stream, columns, args.ldo,
                              args.bias);
  };
  if (acc == DType::f32) return run(static_cast<const float*>(args.workspace));
  if (acc == DType::f64) return run(static_cast<const double*>(args.workspace));
  return cudaErrorInvalidValue;
}

}  // namespace voxmma
