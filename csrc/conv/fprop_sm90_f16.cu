// wgmma fprop/dgrad, fp16 inputs: fp32 and fp16 accumulators.
#include "fprop_sm90.cuh"

namespace voxmma {

const std::vector<KernelEntry>& fprop_sm90_f16_entries() {
  using namespace sm90;
  using T = cutlass::half_t;
  static const std::vector<KernelEntry> entries = {
      fprop_entry<FpropConfig<T, float, 32, 32>>("sm90_f16_256x32x32_acc32", DType::f16),
      fprop_entry<FpropConfig<T, float, 64, 32>>("sm90_f16_256x64x32_acc32", DType::f16),
      fprop_entry<FpropConfig<T, float, 96, 32>>("sm90_f16_256x96x32_acc32", DType::f16),
      fprop_entry<FpropConfig<T, float, 128, 32>>("sm90_f16_256x128x32_acc32", DType::f16),
      fprop_entry<FpropConfig<T, float, 32, 64>>("sm90_f16_256x32x64_acc32", DType::f16),
      fprop_entry<FpropConfig<T, float, 64, 64>>("sm90_f16_256x64x64_acc32", DType::f16),
      fprop_entry<FpropConfig<T, float, 96, 64>>("sm90_f16_256x96x64_acc32", DType::f16),
      fprop_entry<FpropConfig<T, float, 128, 64>>("sm90_f16_256x128x64_acc32", DType::f16),
      fprop_entry<FpropConfig<T, T, 32, 32>>("sm90_f16_256x32x32_acc16", DType::f16),
      fprop_entry<FpropConfig<T, T, 64, 32>>("sm90_f16_256x64x32_acc16", DType::f16),
      fprop_entry<FpropConfig<T, T, 128, 32>>("sm90_f16_256x128x32_acc16", DType::f16),
      fprop_entry<FpropConfig<T, T, 32, 64>>("sm90_f16_256x32x64_acc16", DType::f16),
      fprop_entry<FpropConfig<T, T, 64, 64>>("sm90_f16_256x64x64_acc16", DType::f16),
      fprop_entry<FpropConfig<T, T, 128, 64>>("sm90_f16_256x128x64_acc16", DType::f16),
  };
  return entries;
}

}  // namespace voxmma
