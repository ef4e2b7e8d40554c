// wgmma fprop/dgrad, bf16 inputs, fp32 accumulators.
#include "fprop_sm90.cuh"

namespace voxmma {

const std::vector<KernelEntry>& fprop_sm90_bf16_entries() {
  using namespace sm90;
  using T = cutlass::bfloat16_t;
  static const std::vector<KernelEntry> entries = {
      fprop_entry<FpropConfig<T, float, 32, 32>>("sm90_bf16_256x32x32_acc32", DType::bf16),
      fprop_entry<FpropConfig<T, float, 64, 32>>("sm90_bf16_256x64x32_acc32", DType::bf16),
      fprop_entry<FpropConfig<T, float, 96, 32>>("sm90_bf16_256x96x32_acc32", DType::bf16),
      fprop_entry<FpropConfig<T, float, 128, 32>>("sm90_bf16_256x128x32_acc32", DType::bf16),
      fprop_entry<FpropConfig<T, float, 32, 64>>("sm90_bf16_256x32x64_acc32", DType::bf16),
      fprop_entry<FpropConfig<T, float, 64, 64>>("sm90_bf16_256x64x64_acc32", DType::bf16),
      fprop_entry<FpropConfig<T, float, 96, 64>>("sm90_bf16_256x96x64_acc32", DType::bf16),
      fprop_entry<FpropConfig<T, float, 128, 64>>("sm90_bf16_256x128x64_acc32", DType::bf16),
  };
  return entries;
}

}  // namespace voxmma
