// Half-precision numbers on the host, as hardware rounds them: to nearest, ties to even.
#pragma once

#include <cstdint>
#include <cstring>

#include "error.h"
#include "file.h"

namespace vxm {

inline uint32_t bits_of(float x) {
  uint32_t made;
  std::memcpy(&made, &x, 4);
  return made;
}
inline float float_of(uint32_t bits) {
  float made;
  std::memcpy(&made, &bits, 4);
  return made;
}

struct Half {
  uint16_t bits;
};
struct Bfloat {
  uint16_t bits;
};

inline float widen(Half x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000) << 16, rest = x.bits & 0x7fff;
  if (rest >= 0x7c00) return float_of(sign | 0x7f800000 | rest << 13);
  if (rest >= 0x0400) return float_of(sign | ((rest << 13) + 0x38000000));
  const float small = static_cast<float>(rest) * 0x1p-24f;  // subnormal: exact
  return float_of(sign | bits_of(small));
}
inline float widen(Bfloat x) { return float_of(static_cast<uint32_t>(x.bits) << 16); }
inline float widen(float x) { return x; }
inline double widen(double x) { return x; }

template <class T, class From>
T narrow(From x) {
  return static_cast<T>(x);
}
template <>
inline Half narrow<Half, float>(float x) {
  const uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000;
  uint32_t rest = bits & 0x7fffffff;
  if (rest > 0x7f800000) return {static_cast<uint16_t>(sign | 0x7e00)};
  if (rest >= 0x47800000) return {static_cast<uint16_t>(sign | 0x7c00)};  // 65536 and more
  if (rest < 0x38800000) {                                                // below 2^-14: a multiple of 2^-24
    const float shifted = float_of(rest) + 0.5f;                          // 2^-24 is the last bit of 0.5f
    return {static_cast<uint16_t>(sign | (bits_of(shifted) - bits_of(0.5f)))};
  }
  rest += 0xfff + (rest >> 13 & 1);
  return {static_cast<uint16_t>(sign | (rest - 0x38000000) >> 13)};
}
template <>
inline Bfloat narrow<Bfloat, float>(float x) {
  const uint32_t bits = bits_of(x);
  if ((bits & 0x7fffffff) > 0x7f800000) return {0x7fc0};
  return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

// fp32 rounded to 10 fraction bits, ties away from zero (voxmma/ops/formats.py, round_tf32).
inline float tf32(float x) {
  const uint32_t bits = bits_of(x);
  return (bits & 0x7f800000) == 0x7f800000 ? x : float_of((bits + 0x1000) & ~uint32_t{0x1fff});
}

// f(T{}) for the numbers of a dtype.
template <class F>
auto by_type(DType dtype, const F& f) {
  switch (dtype) {
    case DType::f16: return f(Half{});
    case DType::bf16: return f(Bfloat{});
    case DType::f32: return f(float{});
    case DType::f64: return f(double{});
    default: fail(VXM_ERROR_INTERNAL, "arithmetic on ", name_of(dtype));
  }
}

template <class T>
struct WideOf {
  using type = float;
};
template <>
struct WideOf<double> {
  using type = double;
};

}  // namespace vxm
