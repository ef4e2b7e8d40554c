// How accumulators leave for global memory: what is done to sums first, and the layout of mma m16n8 and wgmma.
#pragma once

#include <cmath>

#include "types.cuh"
#include "voxmma/conv.h"

namespace voxmma {

// Can rows of `ld` elements of `bytes` bytes each, entered at multiples of `step` elements, take 16-byte accesses?
inline bool rows_aligned16(const void* base, int64_t ld, int64_t step, int bytes) {
  return reinterpret_cast<uintptr_t>(base) % 16 == 0 && ld * bytes % 16 == 0 && step * bytes % 16 == 0;
}
// The same of the results of a launch, and of the residual that is added to them.
inline bool outputs_aligned16(const ConvArgs& args, int64_t step) {
  const int bytes = dtype_bytes(args.out_dtype);
  return rows_aligned16(args.out, args.ldo, step, bytes) &&
         (args.epilogue.residual == nullptr || rows_aligned16(args.epilogue.residual, args.epilogue.ldr, step, bytes));
}

__host__ __device__ inline bool has_epilogue(const ConvArgs& args) {
  const Epilogue& e = args.epilogue;
  return e.scale != nullptr || e.residual != nullptr || e.activation != Activation::none;
}

// N elements from p, of which `valid` exist; the others become zero. vec: p is aligned to 16 bytes or N elements.
template <int N, class A, class T>
__device__ __forceinline__ void load_elements(A (&v)[N], const T* p, int valid, bool vec) {
  constexpr int kAlign = N * sizeof(T) < 16 ? N * sizeof(T) : 16;
  struct alignas(kAlign) Vector {
    T e[N];
  };
  if (vec && valid >= N) {
    const Vector all = *reinterpret_cast<const Vector*>(p);
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] = convert<A>(all.e[i]);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] = i < valid ? convert<A>(p[i]) : A(0);
  }
}

template <class T, int N, class A>
__device__ __forceinline__ void store_elements(T* p, const A (&v)[N], int valid, bool vec) {
  constexpr int kAlign = N * sizeof(T) < 16 ? N * sizeof(T) : 16;
  struct alignas(kAlign) Vector {
    T e[N];
  };
  if (vec && valid >= N) {
    Vector all;
#pragma unroll
    for (int i = 0; i < N; ++i) all.e[i] = convert<T>(v[i]);
    *reinterpret_cast<Vector*>(p) = all;
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i)
      if (i < valid) p[i] = convert<T>(v[i]);
  }
}

// As torch's functions: NaN stays NaN.
template <int N, class A>
__device__ __forceinline__ void activate(A (&v)[N], Activation function, double slope) {
  const auto each = [&](auto f) {
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] = f(v[i]);
  };
  switch (function) {
    case Activation::none: break;
    case Activation::relu: each([](A x) { return x < 0 ? A(0) : x; }); break;
    case Activation::leaky_relu: each([&](A x) { return x > 0 ? x : x * static_cast<A>(slope); }); break;
    case Activation::silu:
      each([](A x) {
        if constexpr (std::is_same_v<A, float>)
          return __fdividef(x, 1 + expf(-x));
        else
          return x / (1 + exp(-x));
      });
      break;
    case Activation::gelu: each([](A x) { return x * A(0.5) * (1 + erf(x * A(0.70710678118654752440))); }); break;
  }
}

// N neighbouring channels of one row: bias and epilogue, one rounding, store as T. `v` are sums, `channel` counts over
// all groups, `valid` channels exist, vec: outputs_aligned16.
template <class T, int N, class A>
__device__ __forceinline__ void finish_as(const ConvArgs& args, int64_t row, int64_t channel, A (&v)[N], int valid,
                                          bool vec) {
  const Epilogue& e = args.epilogue;
  if constexpr (N > 4) {  // straight code for whole pieces only: guards would hold all operands in registers at once
    if (!vec || valid < N) {
      A each[N];
#pragma unroll
      for (int i = 0; i < N; ++i) each[i] = v[i];
#pragma unroll 1
      for (int i = 0; i < min(valid, N); ++i) {
        A one[1] = {each[i]};
        finish_as<T>(args, row, channel + i, one, 1, true);
      }
      return;
    }
    valid = N, vec = true;
  }
  A of[N];
  if (e.scale != nullptr) {
    load_elements(of, static_cast<const A*>(e.scale) + channel, valid, vec);
    A add[N];
    load_elements(add, static_cast<const A*>(args.bias) + channel, valid, vec);
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] = fma(v[i], of[i], add[i]);
  } else if (args.bias != nullptr) {
    load_elements(of, static_cast<const A*>(args.bias) + channel, valid, vec);
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] += of[i];
  }
  if (e.residual != nullptr) {
    load_elements(of, static_cast<const T*>(e.residual) + row * e.ldr + channel, valid, vec);
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] += of[i];
  }
  activate(v, e.activation, e.slope);
  store_elements(static_cast<T*>(args.out) + row * args.ldo + channel, v, valid, vec);
}

// The same to the launch's out_dtype, which is In or float.
template <class In, int N, class A>
__device__ __forceinline__ void finish(const ConvArgs& args, int64_t row, int64_t channel, A (&v)[N], int valid,
                                       bool vec) {
  if (std::is_same_v<In, A> || args.out_dtype != DType::f32)
    finish_as<In>(args, row, channel, v, valid, vec);
  else
    finish_as<float>(args, row, channel, v, valid, vec);
}

// 4 x 4 transpose inside a quad of lanes: lane t gets word t of lanes 0..3.
__device__ __forceinline__ void quad_transpose(uint32_t (&p)[4], int t) {
  const bool odd = t & 1, high = t & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t give = odd ? p[i] : p[i + 1];
    const uint32_t got = __shfl_xor_sync(0xffffffffu, give, 1);
    (odd ? p[i] : p[i + 1]) = got;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t give = high ? p[i] : p[i + 2];
    const uint32_t got = __shfl_xor_sync(0xffffffffu, give, 2);
    (high ? p[i] : p[i + 2]) = got;
  }
}

// Rows of an accumulator laid out as mma m16n8 and wgmma leave it, with an epilogue, 32 columns of a row at a time.
// Which of them is found out by a branch, so that the epilogue is there once and takes few registers; the plain one is
// store_row. All 32 lanes call.
//   get(group, j)   of a group of four 8-column blocks, known when compiled, the pair of block j that this lane holds
//   where(group)    its row (below 0: nothing is stored), first channel, and how many channels exist from there
struct RowPart {
  int64_t row, channel;
  int valid;
};
template <class In, int Groups, class Get, class Where>
__device__ __forceinline__ void finish_rows(const ConvArgs& args, bool vec, Get get, Where where) {
#pragma unroll 1
  for (int group = 0; group < Groups; ++group) {
    uint32_t x[4], y[4];
#pragma unroll
    for (int g = 0; g < Groups; ++g) {
      if (g == group) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float2 pair = get(g, j);
          x[j] = __float_as_uint(pair.x);
          y[j] = __float_as_uint(pair.y);
        }
      }
    }
    const int q = threadIdx.x & 3;
    quad_transpose(x, q);
    quad_transpose(y, q);
    const RowPart at = where(group);
    float v[8];  // columns of block q
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      v[2 * j] = __uint_as_float(x[j]);
      v[2 * j + 1] = __uint_as_float(y[j]);
    }
    if (at.row >= 0 && 8 * q < at.valid) finish<In>(args, at.row, at.channel + 8 * q, v, at.valid - 8 * q, vec);
  }
}

// Stores 8 NB columns of one output row from an accumulator laid out as mma m16n8 and wgmma leave it: of the eight
// columns of block j, lane q = lane & 3 of a quad holds 2 q and 2 q + 1, returned by get(j) as a float2.
// All 32 lanes call; the four lanes of a quad pass the same row (null: nothing is stored). `cols` columns exist;
// `vec`: the row is 16-byte aligned. 16-bit rows leave in 16-byte pieces, after a 4x4 transposition inside the quad.
template <class T, int NB, class Get>
__device__ __forceinline__ void store_row(T* row, int cols, bool vec, Get get) {
  const int q = threadIdx.x & 3;
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int j = 0; j < NB; ++j) {
      const float2 v = get(j);
      const int col = 8 * j + 2 * q;
      if (row == nullptr) continue;
      if (vec && col + 2 <= cols) {
        *reinterpret_cast<float2*>(row + col) = v;
      } else {
        if (col < cols) row[col] = v.x;
        if (col + 1 < cols) row[col + 1] = v.y;
      }
    }
  } else {
    static_assert(NB % 4 == 0, "16-bit rows are stored in groups of four 8-column blocks");
#pragma unroll
    for (int j = 0; j < NB; j += 4) {
      uint32_t p[4];  // p[i]: block j + i, columns 2 q and 2 q + 1
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 v = get(j + i);
        p[i] = pack2<T>(v.x, v.y);
      }
      quad_transpose(p, q);
      const int col = 8 * (j + q);  // p now holds all eight columns of block j + q
      if (row == nullptr || col >= cols) continue;
      if (vec && col + 8 <= cols) {
        *reinterpret_cast<uint4*>(row + col) = make_uint4(p[0], p[1], p[2], p[3]);
      } else {
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          const uint16_t bits = static_cast<uint16_t>(e & 1 ? p[e / 2] >> 16 : p[e / 2] & 0xffff);
          if (col + e < cols) reinterpret_cast<uint16_t*>(row)[col + e] = bits;
        }
      }
    }
  }
}

}  // namespace voxmma
