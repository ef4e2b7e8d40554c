// fp16 weight gradient, mma.sync, fp32 accumulators.
#include "wgrad_pairs.cuh"

namespace voxmma {

const std::vector<KernelEntry>& wgrad_f16_entries() {
  constexpr DType kIn = DType::f16;
  static const std::vector<KernelEntry> entries = {
      wgrad_pairs_entry<WgradPairs<kIn, 32, 32>>("sm80_f16_wgrad_32x32"),
      wgrad_pairs_entry<WgradPairs<kIn, 64, 64>>("sm80_f16_wgrad_64x64"),
      wgrad_pairs_entry<WgradPairs<kIn, 96, 96>>("sm80_f16_wgrad_96x96"),
      wgrad_pairs_entry<WgradPairs<kIn, 128, 128, 4>>("sm80_f16_wgrad_128x128"),
  };
  return entries;
}

}  // namespace voxmma
