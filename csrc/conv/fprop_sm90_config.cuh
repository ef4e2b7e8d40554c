// What the fprop kernels of Hopper are made of: block sizes, rings, and where these lie in shared memory.
#pragma once

#include "sm90.cuh"

namespace voxmma::sm90 {

template <class T_, class Acc_, int BN_, int CK_>
struct FpropConfig {
  using T = T_;
  using Acc = Acc_;
  static constexpr int BN = BN_, CK = CK_;
  static constexpr int kConsumers = 4;  // warpgroups, 64 rows each
  static constexpr int kThreads = kWarpGroup * (kConsumers + 1);
  static constexpr int kGatherWarps = 3;
  static constexpr int kRowBytes = CK * 2;
  static constexpr bool kSwap = BN >= 64;  // H100, 507k voxels: 3 % faster, 32 channels 8 % slower
  static constexpr int kRowSlots = 2;
  static constexpr int kPassSlots = 2;
  static constexpr int kRowSlotBytes = (kUniqueMax + 1) * kRowBytes;  // + the zero row
  static constexpr int kPair = CK == 32 ? 2 : 1;   // offsets of a stage; 32 channels of one are over too soon
  static constexpr int kBlockBytes = BN * CK * 2;  // weights of one offset
  static constexpr int kWeightBytes = kPair * kBlockBytes;
  // A power of two; of 64 columns and 32 channels the weights of 3x3x3 fit (Resident).
  static constexpr int kStages = kWeightBytes >= 12288 ? 4 : kWeightBytes <= 4096 || CK == 32 ? 16 : 8;
  static constexpr int kLocalBytes = kPassOffsets * kTileM * 2;

  // Shared memory, in bytes from a 1024-byte aligned base.
  static constexpr int kWeightAt = 0;
  static constexpr int kRowAt = kWeightAt + kStages * kWeightBytes;
  static constexpr int kLocalAt = kRowAt + kRowSlots * kRowSlotBytes;
  static constexpr int kFragAt = kLocalAt + kPassSlots * kLocalBytes;  // [slots][kFrags] u32
  static constexpr int kHeadAt = kFragAt + kPassSlots * kFrags * 4;    // [slots] int4
  static constexpr int kToldAt = kHeadAt + kPassSlots * 16;            // 2 u32 of fprop_small_kernel
  static constexpr int kBarAt = kToldAt + 16;
  static constexpr int kBars = 2 * (kStages + kRowSlots + kPassSlots);
  static constexpr int kSmemBytes = kBarAt + kBars * 8 + 1024;  // + alignment of the base
  static_assert(kWeightAt % 1024 == 0 && kWeightBytes % 1024 == 0 && kLocalAt % 16 == 0 && kBarAt % 8 == 0);
  static_assert(kSmemBytes <= 227 * 1024);
};

}  // namespace voxmma::sm90
