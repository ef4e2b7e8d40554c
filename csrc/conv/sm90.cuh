// Hopper building blocks shared by fprop_sm90.cuh and wgrad_sm90.cuh: mbarrier rings, bulk copies, wgmma with A from
// registers, the walk over the passes of a range of tiles. Everything here is compiled for sm_90a only.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>
#include <cutlass/bfloat16.h>
#include <cutlass/half.h>
#include <cute/arch/mma_sm90_gmma.hpp>
#include <cute/atom/mma_traits_sm90_gmma.hpp>
#include <cute/tensor.hpp>

#include "common.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define VOXMMA_SM90A 1
#endif

namespace voxmma::sm90 {

using cute::GmmaDescriptor;
namespace GMMA = cute::SM90::GMMA;

inline constexpr int kWarpGroup = 128;  // threads

template <class T>
inline constexpr DType dtype_of = std::is_same_v<T, cutlass::half_t> ? DType::f16 : DType::bf16;
template <class T>
using cuda_type = type_of<dtype_of<T>>;  // of a CUTLASS type

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

// mbarriers, bulk copies and loads by 32-bit shared address: a generic pointer costs its conversion at every use.
inline constexpr uint32_t kSuspend = 10'000'000;  // ns a waiting warp may sleep: without it the wait is a spin
__device__ inline void wait_full(uint32_t bar, uint32_t phase) {
  uint32_t done;
  do {
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2, %3;\nselp.u32 %0, 1, 0, p;\n}\n"
        : "=r"(done)
        : "r"(bar), "r"(phase), "r"(kSuspend)
        : "memory");
  } while (done == 0);
}
// A producer waits for the phase before the one it will fill: the first round falls through.
__device__ inline void wait_empty(uint32_t bar, uint32_t phase) { wait_full(bar, phase ^ 1); }
__device__ inline void arrive_expect(uint32_t bar, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(bar), "r"(bytes) : "memory");
}
// A warp gives a buffer back: one arrival for its 32 lanes (kReleases of common/memory.cuh).
__device__ inline void release(uint32_t bar, int lane) {
  __syncwarp();
  if (kReleases == 32 || lane == 0) mbarrier_arrive(bar);
}
__device__ inline void bulk_copy(uint32_t smem, const void* gmem, uint32_t bytes, uint32_t bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::"r"(smem),
               "l"(gmem), "r"(bytes), "r"(bar)
               : "memory");
}
__device__ inline int lds_u16(uint32_t addr) {
  uint16_t v;
  asm volatile("ld.shared.u16 %0, [%1];\n" : "=h"(v) : "r"(addr) : "memory");
  return v;
}
__device__ inline uint32_t lds_u32(uint32_t addr) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];\n" : "=r"(v) : "r"(addr) : "memory");
  return v;
}
__device__ inline uint4 lds_v4(uint32_t addr) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(addr)
               : "memory");
  return v;
}
__device__ inline void sts_v4(uint32_t addr, int4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};\n" ::"r"(addr), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}
__device__ inline void sts_u32(uint32_t addr, uint32_t v) {
  asm volatile("st.shared.u32 [%0], %1;\n" ::"r"(addr), "r"(v) : "memory");
}

// Rank of this CTA in its cluster, and the two halves of a barrier of all threads of the cluster. cluster_arrive alone
// orders nothing that was stored before; behind the second one, what a thread stored before cluster_publish can be read.
__device__ inline int cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;\n" : "=r"(rank));
  return int(rank);
}
__device__ inline void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed;\n" ::: "memory"); }
__device__ inline void cluster_publish() { asm volatile("barrier.cluster.arrive.release;\n" ::: "memory"); }
__device__ inline void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;\n" ::: "memory"); }

// The wgmma atom m64 x N x k16, A (K-major) from registers, B from shared memory in `MajorB`.
template <class T, class Acc, int N, GMMA::Major MajorB>
struct Atom;
#define VOXMMA_ATOM(T, ACC, N, NAME)                          \
  template <GMMA::Major MajorB>                               \
  struct Atom<T, ACC, N, MajorB> {                            \
    using type = GMMA::NAME<GMMA::Major::K, MajorB>;          \
    static constexpr const char* name = "SM90::GMMA::" #NAME; \
  };
VOXMMA_ATOM(cutlass::half_t, float, 32, MMA_64x32x16_F32F16F16_RS)
VOXMMA_ATOM(cutlass::half_t, float, 64, MMA_64x64x16_F32F16F16_RS)
VOXMMA_ATOM(cutlass::half_t, float, 96, MMA_64x96x16_F32F16F16_RS)
VOXMMA_ATOM(cutlass::half_t, float, 128, MMA_64x128x16_F32F16F16_RS)
VOXMMA_ATOM(cutlass::half_t, cutlass::half_t, 32, MMA_64x32x16_F16F16F16_RS)
VOXMMA_ATOM(cutlass::half_t, cutlass::half_t, 64, MMA_64x64x16_F16F16F16_RS)
VOXMMA_ATOM(cutlass::half_t, cutlass::half_t, 128, MMA_64x128x16_F16F16F16_RS)
VOXMMA_ATOM(cutlass::bfloat16_t, float, 32, MMA_64x32x16_F32BF16BF16_RS)
VOXMMA_ATOM(cutlass::bfloat16_t, float, 64, MMA_64x64x16_F32BF16BF16_RS)
VOXMMA_ATOM(cutlass::bfloat16_t, float, 96, MMA_64x96x16_F32BF16BF16_RS)
VOXMMA_ATOM(cutlass::bfloat16_t, float, 128, MMA_64x128x16_F32BF16BF16_RS)
#undef VOXMMA_ATOM

// Descriptor of a block `bytes16` 16-byte units behind `d`: addresses stay below 2^18, so the low word never carries.
__device__ inline uint64_t advance(uint64_t d, uint32_t bytes16) {
  return (d & 0xffffffff00000000ull) | (uint32_t(d) + bytes16);
}

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
      return unpack_half2(r[2 * j + half]);
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

// Walks the passes of the items dealt to worker `index` of `count` (`per_tile` items of a scheduled tile follow each
// other), with the next item's row of the schedule already on its way. All roles of a CTA walk the same sequence.
struct PassWalk {
  const int4* schedule;
  uint32_t round = 0, index, count, end, per_tile;
  uint32_t item, next_item;
  int4 now, next;  // ScheduledTile of the two
  int i = 0;

  __device__ PassWalk(const ScheduledTile* schedule_, int tiles, int index_, int count_, int per_tile_)
      : schedule(reinterpret_cast<const int4*>(schedule_)),
        index(index_),
        count(count_),
        end(uint32_t(tiles) * per_tile_),
        per_tile(per_tile_) {
    item = dealt(0, index, count);
    now = load(item);
    next = load(next_item = dealt(1, index, count));
  }
  __device__ int4 load(uint32_t it) const { return it < end ? __ldg(schedule + it / per_tile) : make_int4(0, 0, 0, 0); }
  __device__ bool done() const { return item >= end; }
  __device__ int tile() const { return now.x; }
  __device__ int within() const { return int(item % per_tile); }  // 0 .. per_tile - 1
  __device__ int pass() const { return now.y + i; }
  __device__ bool last_pass() const { return i + 1 == now.z; }
  // The pass after this one, or -1: worth prefetching.
  __device__ int peek() const { return !last_pass() ? now.y + i + 1 : next_item < end ? next.y : -1; }
  __device__ void advance() {
    if (!last_pass()) {
      ++i;
      return;
    }
    i = 0;
    ++round;
    item = next_item;
    now = next;
    next = load(next_item = dealt(round + 1, index, count));
  }
};

// Row positions of one gather, spread over the lanes of `Warps` gather warps: lane l of warp w holds those of rows
// 32 (Warps i + w) + l in at[i]. All ids are loaded at once, so that a gather waits for memory once and not once a row.
template <int MaxRows, int Warps>
struct RowIds {
  static constexpr int kRegs = (MaxRows + 32 * Warps - 1) / (32 * Warps);
  static constexpr uint32_t kNone = 0xffffffffu;
  uint32_t at[kRegs];  // row id * row_pieces, within kWgmmaSpan, or, by load_ids, row id; kNone: a row of zeros

  // row_pieces: 16-byte pieces from one row to the next.
  __device__ void load(const int* ids, int count, uint32_t row_pieces, int warp, int lane) {
#pragma unroll
    for (int i = 0; i < kRegs; ++i) {
      const int r = 32 * (Warps * i + warp) + lane;
      const int id = r < count ? __ldg(ids + r) : -1;
      at[i] = id >= 0 ? uint32_t(id) * row_pieces : kNone;
    }
  }
  // Of rows First .. First + Rows - 1, for a gather with the bytes of a row as its unit. Nothing is computed with the ids
  // before that, so they stay on their way until then: a warp that waits here has nothing else in flight.
  template <int First, int Rows>
  __device__ void load_ids(const int* ids, int count, int warp, int lane) {
    static_assert(First % (32 * Warps) == 0 && Rows % (32 * Warps) == 0);
#pragma unroll
    for (int i = First / (32 * Warps); i < (First + Rows) / (32 * Warps); ++i) {
      const int r = 32 * (Warps * i + warp) + lane;
      at[i] = kNone;
      if (r < count) at[i] = uint32_t(__ldg(ids + r));
    }
  }

  // gather() of rows of one piece: a lane copies its own.
  template <class Unit>
  __device__ void gather_pieces(uint32_t smem, const char* src, int count, int warp, int lane, Unit unit) const {
#pragma unroll
    for (int i = 0; i < kRegs; ++i) {
      const int base = 32 * (Warps * i + warp);
      if (base >= count) break;
      const bool ok = at[i] != kNone;
      cp_async16(smem + (base + lane) * 16, src + uint64_t(ok ? at[i] : 0) * uint32_t(unit), ok ? 16 : 0);
    }
  }

  // Copies RowBytes of rows First .. First + Rows - 1 into a swizzled shared buffer, 16 bytes a lane. Rows without id
  // (and those that fill up the last 32 of `count`) and pieces from `valid` on are written as zeros. 32 rows without
  // such take the short way: its instructions, not the memory, are what a gather waits for.
  //   src    first byte of the first piece of row 0
  //   Batch  copies whose addresses a lane holds at once
  //   unit   bytes that `at` counts
  template <int RowBytes, int First, int Rows, int Batch, class Unit = std::integral_constant<uint32_t, 16>>
  __device__ void gather(uint32_t smem, const char* src, int count, int valid, int warp, int lane,
                         Unit unit = {}) const {
    constexpr int kPieces = RowBytes / 16, kRowsAtOnce = 32 / kPieces, kBatch = Batch < kPieces ? Batch : kPieces;
    static_assert(kPieces % 4 == 0 && 2 * kRowsAtOnce % 8 == 0);  // the swizzle repeats after two steps
    static_assert(First % 32 == 0 && Rows % 32 == 0 && kBatch % 2 == 0 && kPieces % kBatch == 0);
    const int piece = lane % kPieces, sub = lane / kPieces;
    const bool piece_valid = piece < valid;
    src += piece * 16;
    asm volatile("" : "+l"(src));  // one 64-bit register pair, to which a row adds with one multiply-add
    const uint32_t even = smem + sub * RowBytes + swizzle(sub, piece, RowBytes) * 16;
    const uint32_t odd = smem + (sub + kRowsAtOnce) * RowBytes + swizzle(sub + kRowsAtOnce, piece, RowBytes) * 16;
#pragma unroll
    for (int i = First / (32 * Warps); i < kRegs; ++i) {
      const int base = 32 * (Warps * i + warp);
      if (base < First) continue;
      if (base >= min(count, First + Rows)) break;
      const bool plain = valid >= kPieces && __all_sync(0xffffffffu, at[i] != kNone);
#pragma unroll 1
      for (int j = 0; j < kPieces; j += kBatch) {
        uint32_t row[kBatch];
#pragma unroll
        for (int h = 0; h < kBatch; ++h) row[h] = __shfl_sync(0xffffffffu, at[i], (j + h) * kRowsAtOnce + sub);
        const uint32_t to = (base - First + j * kRowsAtOnce) * RowBytes;
        if (plain) {
#pragma unroll
          for (int h = 0; h < kBatch; ++h) {
            cp_async16((h % 2 ? odd : even) + to + (h - h % 2) * kRowsAtOnce * RowBytes,
                       src + uint64_t(row[h]) * uint32_t(unit));
          }
        } else {
#pragma unroll
          for (int h = 0; h < kBatch; ++h) {
            const bool ok = piece_valid && row[h] != kNone;  // an address that is not ok is not read
            cp_async16((h % 2 ? odd : even) + to + (h - h % 2) * kRowsAtOnce * RowBytes,
                       src + uint64_t(row[h]) * uint32_t(unit), ok ? 16 : 0);
          }
        }
      }
    }
  }
};

}  // namespace voxmma::sm90
