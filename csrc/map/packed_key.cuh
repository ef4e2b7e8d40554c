// Packed 64-bit coordinate keys and the open-addressing hash table that both map kernels use.
#pragma once

#include "voxmma/kernels.h"

namespace voxmma::detail {

inline constexpr uint64_t kEmptyKey = ~uint64_t{0};
inline constexpr int kBatchShift = 3 * kCoordBits;
// The n-th probe of a chain goes n * kProbeStep slots on: triangular numbers do not cluster and, times an odd number,
// visit every slot. 8 + 1 leaves the bucket of 8 that the chain starts in.
inline constexpr uint32_t kProbeStep = 9;

// 9 bits -> every third of 27 bits.
__device__ __forceinline__ uint32_t spread9(uint32_t v) {
  v = (v | (v << 16)) & 0x030000ffu;
  v = (v | (v << 8)) & 0x0300f00fu;
  v = (v | (v << 4)) & 0x030c30c3u;
  return (v | (v << 2)) & 0x09249249u;
}

// 18 bits -> every third of 54 bits. Two 32-bit halves are cheaper than 64-bit shifts.
__device__ __forceinline__ uint64_t spread18(uint32_t v) {
  return spread9(v & 0x1ffu) | (uint64_t{spread9(v >> 9)} << 27);
}

__device__ __forceinline__ bool coord_in_range(int64_t v) { return v >= -kCoordBias && v < kCoordBias; }

__device__ __forceinline__ bool packable(int4 c) {
  return c.x >= 0 && c.x <= kBatchMax && coord_in_range(c.y) && coord_in_range(c.z) && coord_in_range(c.w);
}

// c = (batch, x, y, z), packable.
__device__ __forceinline__ uint64_t pack_key(int4 c) {
  return (uint64_t(c.x) << kBatchShift) | (spread18(uint32_t(c.y + kCoordBias)) << 2) |
         (spread18(uint32_t(c.z + kCoordBias)) << 1) | spread18(uint32_t(c.w + kCoordBias));
}

// First slot of a key. The 2x2x2 voxels of a block share one bucket of 8 slots (64 bytes of keys), so that the
// neighbours of a tile are found in a few cache lines. The bucket is chosen by a full-avalanche mix of the block; its
// low three bits also permute the bucket, so that a set that uses one corner of every block still fills all slots.
__device__ __forceinline__ uint32_t home_slot(uint64_t key, uint32_t mask) {
  uint32_t h = (uint32_t(key) & ~7u) * 0x9e3779b1u;
  h ^= h >> 15;
  h = (h ^ uint32_t(key >> 32)) * 0x85ebca77u;
  h ^= h >> 15;
  return (h ^ (uint32_t(key) & 7u)) & mask;
}

}  // namespace voxmma::detail
