// fp16 weight gradient, mma.sync, fp32 accumulators. Shared memory: 212 KB, 148 KB, and 96 KB for small cards.
#include "wgrad_sm80.cuh"

namespace voxmma {

const std::vector<KernelEntry>& wgrad_f16_entries() {
  constexpr DType kIn = DType::f16;
  static const std::vector<KernelEntry> entries = {
      wgrad_sm80_entry<WgradSm80<kIn, 64, 2, 90>>("sm80_f16_wgrad_64x64"),
      wgrad_sm80_entry<WgradSm80<kIn, 32, 2, 80>>("sm80_f16_wgrad_32x64"),
      wgrad_sm80_entry<WgradSm80<kIn, 32, 2, 80, 64, 0, 768, 2, 2>>("sm80_f16_wgrad_32x64_small"),
  };
  return entries;
}

}  // namespace voxmma
