// bf16 forward and input gradient, mma.sync: fp32 accumulators only (no other instruction exists).
#include "fprop_sm80.cuh"

namespace voxmma {

const std::vector<KernelEntry>& fprop_bf16_entries() {
  constexpr DType kIn = DType::bf16;
  static const std::vector<KernelEntry> entries = {
      fprop_sm80_entry<FpropSm80<kIn, Accum::f32, 32, 32>>("sm80_bf16_256x32x32_acc32"),
      fprop_sm80_entry<FpropSm80<kIn, Accum::f32, 64, 32>>("sm80_bf16_256x64x32_acc32"),
      fprop_sm80_entry<FpropSm80<kIn, Accum::f32, 128, 32>>("sm80_bf16_256x128x32_acc32"),
      fprop_sm80_entry<FpropSm80<kIn, Accum::f32, 32, 64>>("sm80_bf16_256x32x64_acc32"),
      fprop_sm80_entry<FpropSm80<kIn, Accum::f32, 64, 64>>("sm80_bf16_256x64x64_acc32"),
      fprop_sm80_entry<FpropSm80<kIn, Accum::f32, 128, 64>>("sm80_bf16_256x128x64_acc32"),
      fprop_sm80_entry<FpropSm80<kIn, Accum::f32, 64, 64, 0, 2>>("sm80_bf16_256x64x64_small_acc32"),
  };
  return entries;
}

}  // namespace voxmma
