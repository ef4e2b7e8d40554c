// The table of every compiled kernel: one list per translation unit, in the order of the printed tile table.
#include <cstring>
#include <mutex>
#include <set>
#include <utility>

#include "voxmma/conv.h"

namespace voxmma {

#ifdef VOXMMA_SM90  // set by CMakeLists.txt where sm_90a is among the architectures
const std::vector<KernelEntry>& fprop_sm90_f16_entries();
const std::vector<KernelEntry>& fprop_sm90_bf16_entries();
const std::vector<KernelEntry>& wgrad_sm90_f16_entries();
const std::vector<KernelEntry>& wgrad_sm90_bf16_entries();
#endif
const std::vector<KernelEntry>& fprop_f16_entries();
const std::vector<KernelEntry>& fprop_f16_promoted_entries();
const std::vector<KernelEntry>& fprop_bf16_entries();
const std::vector<KernelEntry>& wgrad_f16_entries();
const std::vector<KernelEntry>& wgrad_bf16_entries();
const std::vector<KernelEntry>& fprop_f32_entries();
const std::vector<KernelEntry>& wgrad_f32_entries();
const std::vector<KernelEntry>& simt_f32_entries();
const std::vector<KernelEntry>& simt_f64_entries();

const std::vector<KernelEntry>& kernel_table() {
  static const std::vector<KernelEntry> table = [] {
    std::vector<KernelEntry> all;
    for (const auto* entries : {
#ifdef VOXMMA_SM90
             &fprop_sm90_f16_entries(), &fprop_sm90_bf16_entries(), &wgrad_sm90_f16_entries(),
             &wgrad_sm90_bf16_entries(),
#endif
             &fprop_f16_entries(), &fprop_f16_promoted_entries(), &fprop_bf16_entries(), &wgrad_f16_entries(),
             &wgrad_bf16_entries(), &fprop_f32_entries(), &wgrad_f32_entries(), &simt_f32_entries(),
             &simt_f64_entries()}) {
      all.insert(all.end(), entries->begin(), entries->end());
    }
    return all;
  }();
  return table;
}

cudaError_t allow_shared(const void* kernel, size_t smem) {  // common.cuh
  // Of 48 KiB, in which static shared memory counts.
  constexpr size_t kWithoutAsking = 32 * 1024;
  if (smem <= kWithoutAsking) return cudaSuccess;
  static std::mutex mutex;
  static std::set<std::pair<const void*, int>> allowed;  // a kernel always asks for the same size
  int device = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status != cudaSuccess) return status;
  const std::lock_guard<std::mutex> lock(mutex);
  if (allowed.count({kernel, device}) != 0) return cudaSuccess;
  status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(smem));
  if (status == cudaSuccess)
    allowed.emplace(kernel, device);
  else
    cudaGetLastError();  // reported by value: leave no sticky error behind
  return status;
}

const KernelEntry* find_kernel(const char* name) {
  for (const KernelEntry& entry : kernel_table()) {
    if (std::strcmp(entry.config.name, name) == 0) return &entry;
  }
  return nullptr;
}

}  // namespace voxmma
