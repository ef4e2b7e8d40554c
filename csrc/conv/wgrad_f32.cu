// fp32 weight gradient on tensor cores, mma.sync; 3xtf32 and tf32 as in fprop_f32.cu. Shared memory: 212 KB, 144 KB, and
// 94 KB for small cards.
#include "wgrad_sm80.cuh"

namespace voxmma {

const std::vector<KernelEntry>& wgrad_f32_entries() {
  static const std::vector<KernelEntry> entries = {
      wgrad_sm80_entry<WgradSm80<32, 2, 90, 32, 8>>("sm80_f32_wgrad_32x32_3xtf32"),
      wgrad_sm80_entry<WgradSm80<32, 2, 80, 32, 8, 512, 4, 2>>("sm80_f32_wgrad_32x32_small_3xtf32"),
      wgrad_sm80_entry<WgradSm80<32, 2, 90, 32>>("sm80_f32_wgrad_32x32_tf32"),
      wgrad_sm80_entry<WgradSm80<32, 1, 80, 64>>("sm80_f32_wgrad_32x64_tf32"),
      wgrad_sm80_entry<WgradSm80<32, 2, 80, 32, 0, 512, 4, 2>>("sm80_f32_wgrad_32x32_small_tf32"),
  };
  return entries;
}

}  // namespace voxmma
