// CuTe's m16n8 atoms (k16 and, for rows of 8 channels, k8 for 16-bit inputs, k8 for tf32): operands, and the accumulator
// registers of one m16n8 block.
#pragma once

#include <cute/arch/mma_sm80.hpp>

#include "common.cuh"

namespace voxmma {

template <DType In>
struct MmaF32;
template <>
struct MmaF32<DType::f16> {
  using Atom = cute::SM80_16x8x16_F32F16F16F32_TN;
  using HalfAtom = cute::SM80_16x8x8_F32F16F16F32_TN;
  static constexpr const char* kName = "SM80_16x8x16_F32F16F16F32_TN";
};
template <>
struct MmaF32<DType::bf16> {
  using Atom = cute::SM80_16x8x16_F32BF16BF16F32_TN;
  using HalfAtom = cute::SM80_16x8x8_F32BF16BF16F32_TN;
  static constexpr const char* kName = "SM80_16x8x16_F32BF16BF16F32_TN";
};
template <>
struct MmaF32<DType::f32> {
  using Atom = cute::SM80_16x8x8_F32TF32TF32F32_TN;
  static constexpr const char* kName = "SM80_16x8x8_F32TF32TF32F32_TN";
};
using MmaF16 = cute::SM80_16x8x16_F16F16F16F16_TN;
using HalfMmaF16 = cute::SM80_16x8x8_F16F16F16F16_TN;

// fp32 bits rounded to tf32 (8 exponent and 10 fraction bits), to nearest, ties away from zero; NaN and inf stay.
__device__ __forceinline__ uint32_t round_tf32(uint32_t bits) {
  uint32_t rounded;
  asm("cvt.rna.tf32.f32 %0, %1;\n" : "=r"(rounded) : "f"(__uint_as_float(bits)));
  return rounded;
}

// Four operand registers as the tensor core takes them: an A fragment, or the B fragments of two neighbouring n8 blocks.
// 16-bit inputs go in as they are, fp32 rounded to tf32, or as two tf32 pieces (Split).
template <DType In, bool Split>
struct Operand {
  uint32_t v[4];
  __device__ __forceinline__ void set(const uint32_t (&raw)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = In == DType::f32 ? round_tf32(raw[i]) : raw[i];
  }
};

// x = v + rest. v is x rounded to nearest, so that rest (exact) has at most 12 significant bits; the tensor core reads
// the first 11 of them. Cutting off the one bit left over is as far from rest as rounding it: it is always a tie.
// A NaN of all ones leaves v as zero, but rest as NaN; for inf, rest is NaN.
template <>
struct Operand<DType::f32, true> {
  uint32_t v[4], rest[4];
  __device__ __forceinline__ void set(const uint32_t (&raw)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      v[i] = (raw[i] + 0x1000u) & 0xffffe000u;
      rest[i] = __float_as_uint(__uint_as_float(raw[i]) - __uint_as_float(v[i]));
    }
  }
};

template <DType In, Accum Acc, bool Split = false>
struct Accumulator;

// fp32 registers: [0], [1] are row lane / 4, columns 2 (lane & 3) + {0, 1}; [2], [3] the same of row lane / 4 + 8.
template <DType In>
struct Accumulator<In, Accum::f32, false> {
  static constexpr const char* kAtom = MmaF32<In>::kName;
  float v[4] = {0, 0, 0, 0};
  __device__ __forceinline__ void mma(const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    MmaF32<In>::Atom::fma(v[0], v[1], v[2], v[3], a[0], a[1], a[2], a[3], b0, b1, v[0], v[1], v[2], v[3]);
  }
  // Half as many products: what mma() gives where those of a[2], a[3] and b1 are zeros.
  __device__ __forceinline__ void mma_half(uint32_t a0, uint32_t a1, uint32_t b0) {
    MmaF32<In>::HalfAtom::fma(v[0], v[1], v[2], v[3], a0, a1, b0, v[0], v[1], v[2], v[3]);
  }
  __device__ __forceinline__ void promote() {}
  __device__ __forceinline__ float2 row(int half) const { return make_float2(v[2 * half], v[2 * half + 1]); }
};

// 3xTF32: multiply() below adds the tensor core's sum of 8 products to these registers on the FP32 units.
template <>
struct Accumulator<DType::f32, Accum::f32, true> {
  static constexpr const char* kAtom = MmaF32<DType::f32>::kName;
  float v[4] = {0, 0, 0, 0};
  __device__ __forceinline__ void promote() {}
  __device__ __forceinline__ float2 row(int half) const { return make_float2(v[2 * half], v[2 * half + 1]); }
};

// fp16 registers all the way: what the "fp16 accumulator" contract promises.
template <>
struct Accumulator<DType::f16, Accum::f16, false> {
  static constexpr const char* kAtom = "SM80_16x8x16_F16F16F16F16_TN";
  uint32_t v[2] = {0, 0};
  __device__ __forceinline__ void mma(const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    MmaF16::fma(v[0], v[1], a[0], a[1], a[2], a[3], b0, b1, v[0], v[1]);
  }
  __device__ __forceinline__ void mma_half(uint32_t a0, uint32_t a1, uint32_t b0) {
    HalfMmaF16::fma(v[0], v[1], a0, a1, b0, v[0], v[1]);
  }
  __device__ __forceinline__ void promote() {}
  __device__ __forceinline__ float2 row(int half) const { return unpack_half2(v[half]); }
};

// fp16 registers, added into fp32 ones by promote().
template <>
struct Accumulator<DType::f16, Accum::f16_promoted, false> {
  static constexpr const char* kAtom = "SM80_16x8x16_F16F16F16F16_TN";
  uint32_t part[2] = {0, 0};
  float v[4] = {0, 0, 0, 0};
  __device__ __forceinline__ void mma(const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    MmaF16::fma(part[0], part[1], a[0], a[1], a[2], a[3], b0, b1, part[0], part[1]);
  }
  __device__ __forceinline__ void mma_half(uint32_t a0, uint32_t a1, uint32_t b0) {
    HalfMmaF16::fma(part[0], part[1], a0, a1, b0, part[0], part[1]);
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

// One MMA step of a row of N m16n8 blocks: acc[n] += a b[n].
template <DType In, Accum Acc, bool Split, int N>
__device__ __forceinline__ void multiply(Accumulator<In, Acc, Split> (&acc)[N], const Operand<In, Split>& a,
                                         const Operand<In, Split> (&b)[N / 2]) {
  if constexpr (Split) {
    // The tensor core truncates when it adds, so its sums start from zero every 8 products, small products first, and
    // the long sum is made of additions that round to nearest. Four blocks at a time hide the MMA latency.
    using Atom = typename MmaF32<In>::Atom;
    constexpr int kBatch = N < 4 ? N : 4;
    static_assert(N % kBatch == 0, "whole batches");
#pragma unroll
    for (int n0 = 0; n0 < N; n0 += kBatch) {
      float d[kBatch][4];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const uint32_t* w = b[(n0 + i) / 2].v + i % 2 * 2;
        Atom::fma(d[i][0], d[i][1], d[i][2], d[i][3], a.rest[0], a.rest[1], a.rest[2], a.rest[3], w[0], w[1], 0.0f,
                  0.0f, 0.0f, 0.0f);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const uint32_t* w = b[(n0 + i) / 2].rest + i % 2 * 2;
        Atom::fma(d[i][0], d[i][1], d[i][2], d[i][3], a.v[0], a.v[1], a.v[2], a.v[3], w[0], w[1], d[i][0], d[i][1],
                  d[i][2], d[i][3]);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const uint32_t* w = b[(n0 + i) / 2].v + i % 2 * 2;
        Atom::fma(d[i][0], d[i][1], d[i][2], d[i][3], a.v[0], a.v[1], a.v[2], a.v[3], w[0], w[1], d[i][0], d[i][1],
                  d[i][2], d[i][3]);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i)
#pragma unroll
        for (int r = 0; r < 4; ++r) acc[n0 + i].v[r] += d[i][r];
    }
  } else {
#pragma unroll
    for (int n = 0; n < N; ++n) acc[n].mma(a.v, b[n / 2].v[n % 2 * 2], b[n / 2].v[n % 2 * 2 + 1]);
  }
}

}  // namespace voxmma
