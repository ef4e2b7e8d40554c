// Launches of clusters of CTAs (sm_90 and newer).
#pragma once

#include <cuda_runtime.h>

namespace voxmma {

// Whether the code of a kernel that runs on this device is for an architecture of clusters.
template <class Kernel>
cudaError_t has_clusters(Kernel kernel, bool* has) {
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
  *has = error == cudaSuccess && attributes.ptxVersion >= 90;
  return error;
}

// Launches a kernel in clusters of `cluster` CTAs, of which `grid` is a multiple; {1, 1, 1}: without clusters, on any device.
template <class... Params, class... Args>
cudaError_t launch_clusters(void (*kernel)(Params...), dim3 cluster, dim3 grid, unsigned threads, size_t smem,
                            cudaStream_t stream, const Args&... args) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {cluster.x, cluster.y, cluster.z};
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = threads;
  config.dynamicSmemBytes = smem;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = cluster.x * cluster.y * cluster.z > 1 ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

}  // namespace voxmma
