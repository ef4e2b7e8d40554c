#include "rows.h"

#include <algorithm>

#include "../../csrc/common/types.cuh"

namespace vxm {

namespace {

using voxmma::convert;
using voxmma::SumOf;

constexpr int kThreads = 256;

unsigned blocks_for(int64_t count) {
  constexpr int64_t kMost = 1 << 16;  // the others are reached by striding
  return static_cast<unsigned>(std::clamp<int64_t>((count + kThreads - 1) / kThreads, 1, kMost));
}

__device__ int64_t first_index() { return int64_t{blockIdx.x} * blockDim.x + threadIdx.x; }
__device__ int64_t grid_step() { return int64_t{gridDim.x} * blockDim.x; }

__device__ int64_t rows_there(const int64_t* count, int64_t n) { return *count < 0 ? 0 : *count < n ? *count : n; }

__global__ void store(int64_t* to, int64_t value) { *to = value; }

template <class T>
__global__ void copy_elements(Strided d, const T* from, T* to, int64_t count) {
  for (int64_t i = first_index(); i < count; i += grid_step()) {
    int64_t rest = i, a = 0, b = 0;
    for (int k = d.dims - 1; k >= 0; --k) {
      const int64_t at = rest % d.shape[k];
      rest /= d.shape[k];
      a += at * d.from[k];
      b += at * d.to[k];
    }
    to[b] = from[a];
  }
}

template <class T>
__global__ void pad(const T* from, int64_t ld, T* to, int64_t count, int64_t groups, int64_t channels, int64_t padded) {
  for (int64_t i = first_index(); i < count; i += grid_step()) {
    const int64_t group = i / padded, c = i % padded;
    to[i] = c < channels ? from[group / groups * ld + group % groups * channels + c] : T{};
  }
}

template <class T>
__global__ void keep(const T* from, T* to, int64_t n, int64_t width, const int64_t* count) {
  const int64_t used = rows_there(count, n) * width;
  for (int64_t i = first_index(); i < n * width; i += grid_step()) to[i] = i < used ? from[i] : T{};
}

template <class T>
__global__ void combine(bool product, const T* a, const T* b, T* to, int64_t count) {
  for (int64_t i = first_index(); i < count; i += grid_step()) {
    const auto x = convert<SumOf<T>>(a[i]), y = convert<SumOf<T>>(b[i]);
    to[i] = convert<T>(product ? x * y : x + y);
  }
}

template <class T>
__global__ void activate(int kind, double slope, const T* from, T* to, int64_t count) {
  using W = SumOf<T>;
  for (int64_t i = first_index(); i < count; i += grid_step()) {
    W x = convert<W>(from[i]);
    switch (kind) {
      case 0: x = x < 0 ? W{0} : x; break;
      case 1: x = x > 0 ? x : x * static_cast<W>(slope); break;
      case 2: x = x / (W{1} + exp(-x)); break;
      case 3: x = x * W(0.5) * (W{1} + erf(x * W(0.70710678118654752440))); break;
      default: x = W{1} / (W{1} + exp(-x));
    }
    to[i] = convert<T>(x);
  }
}

template <class T>
__global__ void multiply(const T* x, const T* weight, const T* bias, T* to, int64_t count, int64_t c_in,
                         int64_t c_out) {
  using W = SumOf<T>;
  for (int64_t i = first_index(); i < count; i += grid_step()) {
    const int64_t row = i / c_out, o = i % c_out;
    W sum = 0;
    for (int64_t c = 0; c < c_in; ++c) sum += convert<W>(x[row * c_in + c]) * convert<W>(weight[c * c_out + o]);
    to[i] = convert<T>(bias == nullptr ? sum : sum + convert<W>(bias[o]));
  }
}

template <class T>
__global__ void scale(const T* x, const SumOf<T>* factor, const SumOf<T>* summand, T* to, int64_t count,
                      int64_t channels) {
  for (int64_t i = first_index(); i < count; i += grid_step()) {
    to[i] = convert<T>(convert<SumOf<T>>(x[i]) * factor[i % channels] + summand[i % channels]);
  }
}

template <class T>
__global__ void not_finite(const T* x, int64_t n, int64_t channels, const int64_t* count, unsigned long long* status) {
  const int64_t used = rows_there(count, n) * channels;
  for (int64_t i = first_index(); i < used; i += grid_step()) {
    if (!isfinite(convert<SumOf<T>>(x[i]))) atomicMin(status, static_cast<unsigned long long>(i / channels));
  }
}

template <class T>
__global__ void scatter(Grid grid, const T* x, int64_t width, const int* coords, int64_t n, const int64_t* count, T* to,
                        unsigned long long* status) {
  const int64_t used = rows_there(count, n) * width;
  for (int64_t i = first_index(); i < used; i += grid_step()) {
    const int64_t row = i / width, c = i % width;
    int64_t cell = coords[4 * row];
    bool inside = cell >= 0 && cell < grid.samples;
    for (int a = 0; a < 3; ++a) {
      const int64_t at = coords[4 * row + 1 + a] - grid.origin[a];
      inside = inside && at >= 0 && at < grid.shape[a];
      cell = cell * grid.shape[a] + at;
    }
    if (inside) {
      to[cell * width + c] = x[i];
    } else if (c == 0) {
      atomicMin(status, static_cast<unsigned long long>(row));
    }
  }
}

// -1, 0, 0, 0: as an unsigned number above every row.
cudaError_t clear_status(int64_t* status, cudaStream_t stream) {
  const cudaError_t error = cudaMemsetAsync(status, 0xff, sizeof(int64_t), stream);
  return error != cudaSuccess ? error : cudaMemsetAsync(status + 1, 0, 3 * sizeof(int64_t), stream);
}

template <class F>
cudaError_t by_bytes(int bytes, const F& f) {
  switch (bytes) {
    case 1: f(uint8_t{}); break;
    case 2: f(uint16_t{}); break;
    case 4: f(uint32_t{}); break;
    case 8: f(uint64_t{}); break;
    default: f(uint4{});
  }
  return cudaGetLastError();
}

template <class F>
cudaError_t by_number(Number type, const F& f) {
  voxmma::with_dtype(type, [&](auto of) { f(typename decltype(of)::type{}); });
  return cudaGetLastError();
}

// The widest words that rows consist of; memory is aligned for them.
int word_bytes(int64_t row_bytes) {
  return row_bytes % 16 == 0 ? 16 : row_bytes % 4 == 0 ? 4 : row_bytes % 2 == 0 ? 2 : 1;
}

}  // namespace

cudaError_t store_number(int64_t* to, int64_t value, cudaStream_t stream) {
  store<<<1, 1, 0, stream>>>(to, value);
  return cudaGetLastError();
}

cudaError_t copy_strided(const Strided& dims, int element_bytes, const void* from, void* to, int64_t count,
                         cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  return by_bytes(element_bytes, [&](auto kind) {
    using T = decltype(kind);
    copy_elements<<<blocks_for(count), kThreads, 0, stream>>>(dims, static_cast<const T*>(from), static_cast<T*>(to),
                                                              count);
  });
}

cudaError_t pad_channels(const void* from, int64_t ld, void* to, int element_bytes, int64_t n, int64_t groups,
                         int64_t channels, int64_t padded, cudaStream_t stream) {
  const int64_t count = n * groups * padded;
  if (count == 0) return cudaSuccess;
  return by_bytes(element_bytes, [&](auto kind) {
    using T = decltype(kind);
    pad<<<blocks_for(count), kThreads, 0, stream>>>(static_cast<const T*>(from), ld, static_cast<T*>(to), count, groups,
                                                    channels, padded);
  });
}

cudaError_t keep_rows(const void* from, void* to, int64_t n, int64_t row_bytes, const int64_t* count,
                      cudaStream_t stream) {
  if (n * row_bytes == 0) return cudaSuccess;
  const int word = word_bytes(row_bytes);
  return by_bytes(word, [&](auto kind) {
    using T = decltype(kind);
    const int64_t width = row_bytes / word;
    keep<<<blocks_for(n * width), kThreads, 0, stream>>>(static_cast<const T*>(from), static_cast<T*>(to), n, width,
                                                         count);
  });
}

cudaError_t combine_rows(bool product, Number type, const void* a, const void* b, void* to, int64_t count,
                         cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  return by_number(type, [&](auto kind) {
    using T = decltype(kind);
    combine<<<blocks_for(count), kThreads, 0, stream>>>(product, static_cast<const T*>(a), static_cast<const T*>(b),
                                                        static_cast<T*>(to), count);
  });
}

cudaError_t activate_rows(int kind, double slope, Number type, const void* from, void* to, int64_t count,
                          cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  return by_number(type, [&](auto number) {
    using T = decltype(number);
    activate<<<blocks_for(count), kThreads, 0, stream>>>(kind, slope, static_cast<const T*>(from), static_cast<T*>(to),
                                                         count);
  });
}

cudaError_t multiply_rows(Number type, const void* x, const void* weight, const void* bias, void* to, int64_t n,
                          int64_t c_in, int64_t c_out, cudaStream_t stream) {
  if (n * c_out == 0) return cudaSuccess;
  return by_number(type, [&](auto kind) {
    using T = decltype(kind);
    multiply<<<blocks_for(n * c_out), kThreads, 0, stream>>>(static_cast<const T*>(x), static_cast<const T*>(weight),
                                                             static_cast<const T*>(bias), static_cast<T*>(to),
                                                             n * c_out, c_in, c_out);
  });
}

cudaError_t scale_rows(Number type, const void* x, const void* factor, const void* summand, void* to, int64_t count,
                       int64_t channels, cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  return by_number(type, [&](auto kind) {
    using T = decltype(kind);
    using W = SumOf<T>;
    scale<<<blocks_for(count), kThreads, 0, stream>>>(static_cast<const T*>(x), static_cast<const W*>(factor),
                                                      static_cast<const W*>(summand), static_cast<T*>(to), count,
                                                      channels);
  });
}

cudaError_t find_not_finite(Number type, const void* x, int64_t n, int64_t channels, const int64_t* count,
                            int64_t* status, cudaStream_t stream) {
  const cudaError_t error = clear_status(status, stream);
  if (error != cudaSuccess || n * channels == 0) return error;
  return by_number(type, [&](auto kind) {
    using T = decltype(kind);
    not_finite<<<blocks_for(n * channels), kThreads, 0, stream>>>(static_cast<const T*>(x), n, channels, count,
                                                                  reinterpret_cast<unsigned long long*>(status));
  });
}

cudaError_t scatter_dense(const Grid& grid, const void* x, int64_t row_bytes, const int* coords, int64_t n,
                          const int64_t* count, void* to, int64_t to_bytes, int64_t* status, cudaStream_t stream) {
  cudaError_t error = clear_status(status, stream);
  if (error == cudaSuccess && to_bytes > 0) error = cudaMemsetAsync(to, 0, static_cast<size_t>(to_bytes), stream);
  if (error != cudaSuccess || n * row_bytes == 0) return error;
  const int word = word_bytes(row_bytes);
  return by_bytes(word, [&](auto kind) {
    using T = decltype(kind);
    const int64_t width = row_bytes / word;
    scatter<<<blocks_for(n * width), kThreads, 0, stream>>>(grid, static_cast<const T*>(x), width, coords, n, count,
                                                            static_cast<T*>(to),
                                                            reinterpret_cast<unsigned long long*>(status));
  });
}

}  // namespace vxm
