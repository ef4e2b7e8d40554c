// SIMT kernels in fp64: the reference path, and what gradcheck needs.
#include "simt.cuh"

namespace voxmma {

const std::vector<KernelEntry>& simt_f64_entries() {
  static const std::vector<KernelEntry> entries = {
      simt_fprop_entry<DType::f64>("simt_f64"),
      simt_wgrad_entry<DType::f64>("simt_f64_wgrad"),
  };
  return entries;
}

}  // namespace voxmma
