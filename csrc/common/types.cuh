// Element types of kernels by DType, their conversions, and pairs of 16-bit values in a register.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "voxmma/dtypes.h"

namespace voxmma {

template <DType D>
struct TypeOf;
#define VOXMMA_TYPE(dtype, T, ...) \
  template <>                      \
  struct TypeOf<DType::dtype> {    \
    using type = T;                \
  };
VOXMMA_DTYPES(VOXMMA_TYPE)
#undef VOXMMA_TYPE
template <DType D>
using type_of = typename TypeOf<D>::type;

// f(TypeOf<D>()) for the D that is known at run time, on the host.
template <int I = 0, class F>
constexpr auto with_dtype(DType dtype, const F& f) {
  constexpr DType D = static_cast<DType>(I);
  if constexpr (I + 1 < kDTypes) {
    if (dtype != D) return with_dtype<I + 1>(dtype, f);
  }
  return f(TypeOf<D>());
}

// What sums of T are kept in.
template <class T>
using SumOf = std::conditional_t<std::is_same_v<T, double>, double, float>;

constexpr int dtype_bytes(DType dtype) {
  return with_dtype(dtype, [](auto of) { return static_cast<int>(sizeof(typename decltype(of)::type)); });
}
constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The bits of a T as an unsigned number, and how many of them are its fraction.
template <class T>
struct FloatBits;
template <>
struct FloatBits<__half> {
  using U = uint16_t;
  static constexpr int kFraction = 10;
};
template <>
struct FloatBits<__nv_bfloat16> {
  using U = uint16_t;
  static constexpr int kFraction = 7;
};
template <>
struct FloatBits<float> {
  using U = uint32_t;
  static constexpr int kFraction = 23;
};
template <>
struct FloatBits<double> {
  using U = uint64_t;
  static constexpr int kFraction = 52;
};

// One rounding, to nearest even, whatever the pair of types.
template <class To, class From>
__device__ __forceinline__ To convert(From v) {
  if constexpr (std::is_same_v<To, From>) {
    return v;
  } else if constexpr (std::is_same_v<From, __half>) {
    return convert<To>(__half2float(v));
  } else if constexpr (std::is_same_v<From, __nv_bfloat16>) {
    return convert<To>(__bfloat162float(v));
  } else if constexpr (std::is_same_v<To, __half>) {
    if constexpr (std::is_same_v<From, double>)
      return __double2half(v);
    else
      return __float2half_rn(v);
  } else if constexpr (std::is_same_v<To, __nv_bfloat16>) {
    if constexpr (std::is_same_v<From, double>)
      return __double2bfloat16(v);
    else
      return __float2bfloat16_rn(v);
  } else {
    return static_cast<To>(v);
  }
}

// One number of an array whose type is known at run time.
template <class To>
__device__ __forceinline__ To load_as(const void* values, DType dtype, int64_t i) {
  switch (dtype) {
    case DType::f16: return convert<To>(static_cast<const __half*>(values)[i]);
    case DType::bf16: return convert<To>(static_cast<const __nv_bfloat16*>(values)[i]);
    case DType::f32: return convert<To>(static_cast<const float*>(values)[i]);
    default: return convert<To>(static_cast<const double*>(values)[i]);
  }
}

template <class From>
__device__ __forceinline__ void store_as(void* values, DType dtype, int64_t i, From v) {
  switch (dtype) {
    case DType::f16: static_cast<__half*>(values)[i] = convert<__half>(v); break;
    case DType::bf16: static_cast<__nv_bfloat16*>(values)[i] = convert<__nv_bfloat16>(v); break;
    case DType::f32: static_cast<float*>(values)[i] = convert<float>(v); break;
    default: static_cast<double*>(values)[i] = convert<double>(v); break;
  }
}

// Two floats as one 32-bit register of a 16-bit type, x in the low half.
template <class T>
__device__ __forceinline__ uint32_t pack2(float x, float y) {
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 v = __floats2half2_rn(x, y);
    return reinterpret_cast<const uint32_t&>(v);
  } else {
    const __nv_bfloat162 v = __floats2bfloat162_rn(x, y);
    return reinterpret_cast<const uint32_t&>(v);
  }
}

__device__ __forceinline__ float2 unpack_half2(uint32_t v) {
  return __half22float2(reinterpret_cast<const __half2&>(v));
}
template <class T>
__device__ __forceinline__ float2 unpack2(uint32_t v) {
  if constexpr (std::is_same_v<T, __half>)
    return unpack_half2(v);
  else
    return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(v));
}

}  // namespace voxmma
