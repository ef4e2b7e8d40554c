// CuTe's m16n8k16 atoms with the accumulator registers of one m16n8 block: fp32, fp16, or fp16 promoted to fp32.
#pragma once

#include <cute/arch/mma_sm80.hpp>

#include "common.cuh"

namespace voxmma {

template <DType In> struct MmaF32;
template <> struct MmaF32<DType::f16> {
  using Atom = cute::SM80_16x8x16_F32F16F16F32_TN;
  static constexpr const char* kName = "SM80_16x8x16_F32F16F16F32_TN";
};
template <> struct MmaF32<DType::bf16> {
  using Atom = cute::SM80_16x8x16_F32BF16BF16F32_TN;
  static constexpr const char* kName = "SM80_16x8x16_F32BF16BF16F32_TN";
};
using MmaF16 = cute::SM80_16x8x16_F16F16F16F16_TN;

template <DType In, Accum Acc> struct Accumulator;

// fp32 registers: [0], [1] are row lane / 4, columns 2 (lane & 3) + {0, 1}; [2], [3] the same of row lane / 4 + 8.
template <DType In> struct Accumulator<In, Accum::f32> {
  static constexpr const char* kAtom = MmaF32<In>::kName;
  float v[4] = {0, 0, 0, 0};
  __device__ __forceinline__ void mma(const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    MmaF32<In>::Atom::fma(v[0], v[1], v[2], v[3], a[0], a[1], a[2], a[3], b0, b1, v[0], v[1], v[2], v[3]);
  }
  __device__ __forceinline__ void promote() {}
  __device__ __forceinline__ float2 row(int half) const { return make_float2(v[2 * half], v[2 * half + 1]); }
};

// fp16 registers all the way: what the "fp16 accumulator" contract promises.
template <> struct Accumulator<DType::f16, Accum::f16> {
  static constexpr const char* kAtom = "SM80_16x8x16_F16F16F16F16_TN";
  uint32_t v[2] = {0, 0};
  __device__ __forceinline__ void mma(const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    MmaF16::fma(v[0], v[1], a[0], a[1], a[2], a[3], b0, b1, v[0], v[1]);
  }
  __device__ __forceinline__ void promote() {}
  __device__ __forceinline__ float2 row(int half) const { return unpack_half2(v[half]); }
};

// fp16 registers, added into fp32 ones by promote().
template <> struct Accumulator<DType::f16, Accum::f16_promoted> {
  static constexpr const char* kAtom = "SM80_16x8x16_F16F16F16F16_TN";
  uint32_t part[2] = {0, 0};
  float v[4] = {0, 0, 0, 0};
  __device__ __forceinline__ void mma(const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    MmaF16::fma(part[0], part[1], a[0], a[1], a[2], a[3], b0, b1, part[0], part[1]);
  }
  __device__ __forceinline__ void promote() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 p = unpack_half2(part[half]);
      v[2 * half] += p.x;
      v[2 * half + 1] += p.y;
      part[half] = 0;
    }
  }
  __device__ __forceinline__ float2 row(int half) const { return make_float2(v[2 * half], v[2 * half + 1]); }
};

}  // namespace voxmma
