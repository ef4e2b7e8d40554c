// Hopper building blocks shared by fprop_sm90.cuh and wgrad_sm90.cuh: mbarrier rings, bulk copies, wgmma with A from
// registers, the walk over the passes of a range of tiles. Everything here is compiled for sm_90a only.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cute/tensor.hpp>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/arch/mma_sm90_gmma.hpp>
#include <cute/atom/mma_traits_sm90_gmma.hpp>
#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>
#include <cutlass/bfloat16.h>
#include <cutlass/half.h>

#include "voxmma/kernels.h"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define VOXMMA_SM90A 1
#endif

namespace voxmma::sm90 {

using cute::GmmaDescriptor;
using Barrier = cutlass::arch::ClusterTransactionBarrier;
namespace GMMA = cute::SM90::GMMA;

inline constexpr int kWarpGroup = 128;  // threads
inline constexpr int kGatherThreads = 96;  // three of the producer warpgroup's four warps copy rows

// Position in a ring of `Stages` shared-memory buffers; `phase` is the parity the barrier of `index` will complete.
template <int Stages>
struct RingState {
  int index = 0;
  uint32_t phase = 0;
  __device__ void advance() {
    if (++index == Stages) {
      index = 0;
      phase ^= 1;
    }
  }
};

__device__ inline void wait_full(uint64_t* bar, uint32_t phase) { Barrier::wait(bar, phase); }
// A producer waits for the phase before the one it will fill: the first round falls through.
__device__ inline void wait_empty(uint64_t* bar, uint32_t phase) { Barrier::wait(bar, phase ^ 1); }
__device__ inline void arrive(uint64_t* bar) { cutlass::arch::ClusterBarrier::arrive(bar); }

// 16-byte piece of row `row` where column piece `piece` of a row of RowBytes lives (kernels.h).
template <int RowBytes>
__device__ constexpr int swizzle(int piece, int row) {
  static_assert(RowBytes == 128 || RowBytes == 64);
  return RowBytes == 128 ? piece ^ (row & 7) : piece ^ ((row >> 1) & 3);
}

__device__ inline void cp_async_16(uint32_t smem, const void* gmem, bool valid) {
  const int bytes = valid ? 16 : 0;  // 0: the 16 bytes are written as zeros
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(smem), "l"(gmem), "r"(bytes) : "memory");
}

__device__ inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t addr) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(addr) : "memory");
}
__device__ inline void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t addr) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(addr) : "memory");
}

// The wgmma atom m64 x N x k16, A (K-major) from registers, B from shared memory in `MajorB`.
template <class T, class Acc, int N, GMMA::Major MajorB>
struct Atom;
#define VOXMMA_ATOM(T, ACC, N, NAME)                                                           \
  template <GMMA::Major MajorB>                                                                \
  struct Atom<T, ACC, N, MajorB> {                                                             \
    using type = GMMA::NAME<GMMA::Major::K, MajorB>;                                           \
    static constexpr const char* name = "SM90::GMMA::" #NAME;                                  \
  };
VOXMMA_ATOM(cutlass::half_t, float, 32, MMA_64x32x16_F32F16F16_RS)
VOXMMA_ATOM(cutlass::half_t, float, 64, MMA_64x64x16_F32F16F16_RS)
VOXMMA_ATOM(cutlass::half_t, float, 96, MMA_64x96x16_F32F16F16_RS)
VOXMMA_ATOM(cutlass::half_t, float, 128, MMA_64x128x16_F32F16F16_RS)
VOXMMA_ATOM(cutlass::half_t, cutlass::half_t, 32, MMA_64x32x16_F16F16F16_RS)
VOXMMA_ATOM(cutlass::half_t, cutlass::half_t, 64, MMA_64x64x16_F16F16F16_RS)
VOXMMA_ATOM(cutlass::half_t, cutlass::half_t, 96, MMA_64x96x16_F16F16F16_RS)
VOXMMA_ATOM(cutlass::half_t, cutlass::half_t, 128, MMA_64x128x16_F16F16F16_RS)
VOXMMA_ATOM(cutlass::bfloat16_t, float, 32, MMA_64x32x16_F32BF16BF16_RS)
VOXMMA_ATOM(cutlass::bfloat16_t, float, 64, MMA_64x64x16_F32BF16BF16_RS)
VOXMMA_ATOM(cutlass::bfloat16_t, float, 96, MMA_64x96x16_F32BF16BF16_RS)
VOXMMA_ATOM(cutlass::bfloat16_t, float, 128, MMA_64x128x16_F32BF16BF16_RS)
#undef VOXMMA_ATOM

// Accumulator registers of a 64 x N block, 4 N / 8 values a thread: value 4 j + i of thread t of warp w is row
// 16 w + t % 32 / 4 + 8 (i / 2), column 8 j + 2 (t % 4) + i % 2. fp16 accumulators hold two values a register.
template <class Acc, int N>
struct Accumulator {
  static constexpr bool kHalf = sizeof(Acc) == 2;
  static constexpr int kRegs = kHalf ? N / 4 : N / 2;
  using Reg = std::conditional_t<kHalf, uint32_t, float>;
  Reg r[kRegs];

  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < kRegs; ++i) r[i] = Reg(0);
  }
  __device__ void fence() {
#pragma unroll
    for (int i = 0; i < kRegs; ++i) cute::warpgroup_fence_operand(r[i]);
  }
  // Columns 8 j + 2 (t % 4) and the next one, of row g (half = 0) or g + 8 (half = 1).
  __device__ float2 pair(int j, int half) const {
    if constexpr (kHalf) {
      return __half22float2(*reinterpret_cast<const __half2*>(&r[2 * j + half]));
    } else {
      return make_float2(r[4 * j + 2 * half], r[4 * j + 2 * half + 1]);
    }
  }
};

template <class AtomT, class Acc, int N, int... I>
__device__ inline void wgmma(Accumulator<Acc, N>& c, const uint32_t (&a)[4], uint64_t desc,
                             std::integer_sequence<int, I...>) {
  AtomT::fma(a[0], a[1], a[2], a[3], desc, c.r[I]..., GMMA::ScaleOut::One);
}
template <class AtomT, class Acc, int N>
__device__ inline void wgmma(Accumulator<Acc, N>& c, const uint32_t (&a)[4], uint64_t desc) {
  wgmma<AtomT>(c, a, desc, std::make_integer_sequence<int, Accumulator<Acc, N>::kRegs>{});
}

template <class T>
__device__ inline uint32_t pack2(float2 v) {
  if constexpr (std::is_same_v<T, cutlass::half_t>) {
    const __half2 h = __float22half2_rn(v);
    return *reinterpret_cast<const uint32_t*>(&h);
  } else {
    const __nv_bfloat162 h = __float22bfloat162_rn(v);
    return *reinterpret_cast<const uint32_t*>(&h);
  }
}

// 4 x 4 transpose inside a quad of lanes: lane t gets word t of lanes 0..3.
__device__ inline void quad_transpose(uint32_t (&p)[4], int t) {
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

// Walks the passes of tiles `tile(item)` for items first, first + step, ... < end, with the next tile's pass range
// already on its way. All roles of a CTA walk the same sequence.
struct PassWalk {
  const int2* tile_pass;
  int item, step, end, per_tile;
  int2 range, next_range;  // {first pass, passes} of this item's and the next item's tile
  int i = 0;

  __device__ PassWalk(const PlanView& plan, int first, int step_, int end_, int per_tile_)
      : tile_pass(plan.tile_pass), item(first), step(step_), end(end_), per_tile(per_tile_) {
    range = load(item);
    next_range = load(item + step);
  }
  __device__ int2 load(int it) const { return it < end ? __ldg(tile_pass + it / per_tile) : make_int2(0, 0); }
  __device__ bool done() const { return item >= end; }
  __device__ int tile() const { return item / per_tile; }
  __device__ int pass() const { return range.x + i; }
  __device__ bool last_pass() const { return i + 1 == range.y; }
  // The pass after this one, or -1: worth prefetching.
  __device__ int peek() const { return !last_pass() ? range.x + i + 1 : item + step < end ? next_range.x : -1; }
  __device__ void advance() {
    if (!last_pass()) {
      ++i;
      return;
    }
    i = 0;
    item += step;
    range = next_range;
    next_range = load(item + step);
  }
};

__device__ inline Pass load_pass(const Pass* p) {
  const int4 v = __ldg(reinterpret_cast<const int4*>(p));
  return Pass{v.x, v.y, v.z, v.w};
}

// Row ids of one gather, spread over the lanes of the three gather warps: lane l of warp w holds the ids of rows
// 32 (3 i + w) + l in id[i]. All loads are issued at once, so that a gather waits for memory once and not once a row.
template <int MaxRows>
struct RowIds {
  static constexpr int kRegs = (MaxRows + kGatherThreads - 1) / kGatherThreads;
  int id[kRegs];

  __device__ void load(const int* ids, int count, int warp, int lane) {
#pragma unroll
    for (int i = 0; i < kRegs; ++i) {
      const int r = 32 * (3 * i + warp) + lane;
      id[i] = r < count ? __ldg(ids + r) : -1;
    }
  }

  // Copies RowBytes of rows First .. First + Rows - 1 into a swizzled shared buffer, 16 bytes a lane. Rows with id -1
  // (and the rows that fill up the last 32 of `count`) and pieces from `valid` on are written as zeros.
  //   src  first byte of the first piece of row 0        row_bytes  distance of rows in bytes
  template <int RowBytes, int First, int Rows>
  __device__ void gather(uint32_t smem, const char* src, uint32_t row_bytes, int count, int valid, int warp,
                         int lane) const {
    constexpr int kPieces = RowBytes / 16, kRowsAtOnce = 32 / kPieces;
    static_assert(kPieces % 2 == 0 && 2 * kRowsAtOnce % 8 == 0);  // the swizzle repeats after two steps
    static_assert(First % 32 == 0 && Rows % 32 == 0);
    const int piece = lane % kPieces, sub = lane / kPieces;
    const bool piece_valid = piece < valid;
    src += piece_valid ? piece * 16 : 0;
    const uint32_t even = smem + sub * RowBytes + swizzle<RowBytes>(piece, sub) * 16;
    const uint32_t odd = smem + (sub + kRowsAtOnce) * RowBytes + swizzle<RowBytes>(piece, sub + kRowsAtOnce) * 16;
#pragma unroll
    for (int i = First / 96; i < kRegs; ++i) {
      const int base = 32 * (3 * i + warp);
      if (base < First) continue;
      if (base >= min(count, First + Rows)) break;
#pragma unroll 1
      for (int j = 0; j < kPieces; j += 4) {
#pragma unroll
        for (int h = 0; h < 4; ++h) {
          const int row = __shfl_sync(0xffffffffu, id[i], (j + h) * kRowsAtOnce + sub);
          const bool ok = piece_valid && row >= 0;
          cp_async_16((h % 2 ? odd : even) + (base - First + (j + h - h % 2) * kRowsAtOnce) * RowBytes,
                      src + uint64_t(ok ? uint32_t(row) : 0u) * row_bytes, ok);
        }
      }
    }
  }
};

}  // namespace voxmma::sm90
