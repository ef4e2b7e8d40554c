// fp16 forward and input gradient, mma.sync: fp16 sums of a chunk of channels, promoted to fp32 (FpropSm80::Promote).
// p32 / p64 / p128: every so many channels. poff: once an offset if c_in <= 64, else once every 64 channels of an offset.
// Wider outputs run in blocks of 64 channels: fp16 and fp32 registers of 128 channels do not fit.
#include "fprop_sm80.cuh"

namespace voxmma {

const std::vector<KernelEntry>& fprop_f16_promoted_entries() {
  constexpr DType kIn = DType::f16;
  constexpr Accum kAcc = Accum::f16_promoted;
  static const std::vector<KernelEntry> entries = {
      fprop_sm80_entry<FpropSm80<kIn, kAcc, 32, 32, 32>>("sm80_f16_256x32x32_acc16p32"),
      fprop_sm80_entry<FpropSm80<kIn, kAcc, 64, 32, 32>>("sm80_f16_256x64x32_acc16p32"),
      fprop_sm80_entry<FpropSm80<kIn, kAcc, 32, 64, 64>>("sm80_f16_256x32x64_acc16p64"),
      fprop_sm80_entry<FpropSm80<kIn, kAcc, 64, 64, 64>>("sm80_f16_256x64x64_acc16p64"),
      fprop_sm80_entry<FpropSm80<kIn, kAcc, 32, 64, 128>>("sm80_f16_256x32x64_acc16p128"),
      fprop_sm80_entry<FpropSm80<kIn, kAcc, 64, 64, 128>>("sm80_f16_256x64x64_acc16p128"),
      fprop_sm80_entry<FpropSm80<kIn, kAcc, 32, 64, -1>>("sm80_f16_256x32x64_acc16poff"),
      fprop_sm80_entry<FpropSm80<kIn, kAcc, 64, 64, -1>>("sm80_f16_256x64x64_acc16poff"),
  };
  return entries;
}

}  // namespace voxmma
