// SIMT kernels with fp32 sums: fp32 inputs, and fp16 / bf16 inputs whose groups are too narrow for tensor cores.
#include "simt.cuh"

namespace voxmma {

const std::vector<KernelEntry>& simt_f32_entries() {
  static const std::vector<KernelEntry> entries = {
      simt_fprop_entry<DType::f32>("simt_f32"),       simt_fprop_entry<DType::f16>("simt_f16"),
      simt_fprop_entry<DType::bf16>("simt_bf16"),     simt_wgrad_entry<DType::f32>("simt_f32_wgrad"),
      simt_wgrad_entry<DType::f16>("simt_f16_wgrad"), simt_wgrad_entry<DType::bf16>("simt_bf16_wgrad"),
  };
  return entries;
}

}  // namespace voxmma
