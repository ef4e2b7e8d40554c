// wgmma wgrad, fp16 inputs, fp32 accumulators.
#include "wgrad_sm90.cuh"

namespace voxmma {

const std::vector<KernelEntry>& wgrad_sm90_f16_entries() {
  using namespace sm90;
  using T = cutlass::half_t;
  static const std::vector<KernelEntry> entries = {
      wgrad_entry<WgradConfig<T, 32, 32>>("sm90_f16_wgrad_32x32", DType::f16),
      wgrad_entry<WgradConfig<T, 64, 32>>("sm90_f16_wgrad_32x64", DType::f16),
      wgrad_entry<WgradConfig<T, 128, 32>>("sm90_f16_wgrad_32x128", DType::f16),
      wgrad_entry<WgradConfig<T, 32, 64>>("sm90_f16_wgrad_64x32", DType::f16),
      wgrad_entry<WgradConfig<T, 64, 64>>("sm90_f16_wgrad_64x64", DType::f16),
      wgrad_entry<WgradConfig<T, 128, 64>>("sm90_f16_wgrad_64x128", DType::f16),
  };
  return entries;
}

}  // namespace voxmma
