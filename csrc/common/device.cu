// The CUDA runtime behind voxmma/device.h.
#include "voxmma/device.h"

#include <algorithm>
#include <cstdint>

namespace voxmma {
namespace {

constexpr int kThreads = 256;

// Bytes at a 16-byte boundary, a multiple of 4 of them.
__global__ void __launch_bounds__(kThreads) fill_words(uint32_t* data, uint32_t value, size_t words) {
  const size_t first = size_t{blockIdx.x} * kThreads + threadIdx.x, step = size_t{gridDim.x} * kThreads;
  const uint4 four = make_uint4(value, value, value, value);
  for (size_t i = first; i < words / 4; i += step) reinterpret_cast<uint4*>(data)[i] = four;
  if (first < words % 4) data[words / 4 * 4 + first] = value;
}

}  // namespace

const char* error_text(cudaError_t error) {
  cudaGetLastError();
  return cudaGetErrorString(error);
}

int runtime_version() { return CUDART_VERSION; }

int driver_version() {
  int version = 0;
  return cudaDriverGetVersion(&version) == cudaSuccess ? version : 0;
}

cudaError_t device_facts(int device, DeviceFacts* facts) {
  cudaError_t status = cudaDeviceGetAttribute(&facts->major, cudaDevAttrComputeCapabilityMajor, device);
  if (status == cudaSuccess) status = cudaDeviceGetAttribute(&facts->minor, cudaDevAttrComputeCapabilityMinor, device);
  if (status == cudaSuccess) status = cudaDeviceGetAttribute(&facts->sm_count, cudaDevAttrMultiProcessorCount, device);
  if (status == cudaSuccess)
    status = cudaDeviceGetAttribute(&facts->shared_memory, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  return status;
}

cudaError_t current_device(int* device) { return cudaGetDevice(device); }
cudaError_t set_device(int device) { return cudaSetDevice(device); }

cudaError_t set_bytes(void* data, int value, size_t bytes, cudaStream_t stream) {
  if (bytes == 0) return cudaSuccess;
  if (bytes % 4 != 0 || reinterpret_cast<uintptr_t>(data) % 16 != 0) return cudaMemsetAsync(data, value, bytes, stream);
  constexpr size_t kMaxBlocks = 2048;
  const size_t words = bytes / 4, blocks = std::min((words / 4 + kThreads - 1) / kThreads, kMaxBlocks);
  fill_words<<<static_cast<unsigned>(std::max<size_t>(blocks, 1)), kThreads, 0, stream>>>(
      static_cast<uint32_t*>(data), (value & 0xffu) * 0x01010101u, words);
  return cudaGetLastError();
}

cudaError_t copy_to_host(void* to, const void* from, size_t bytes, cudaStream_t stream) {
  return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream);
}

cudaError_t make_event(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, cudaEventDisableTiming); }
cudaError_t record_event(cudaEvent_t event, cudaStream_t stream) { return cudaEventRecord(event, stream); }
cudaError_t wait_for_event(cudaStream_t stream, cudaEvent_t event) { return cudaStreamWaitEvent(stream, event, 0); }

cudaError_t finish_event(cudaEvent_t event) {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  cudaError_t status = cudaThreadExchangeStreamCaptureMode(&mode);
  if (status != cudaSuccess) return status;
  const cudaError_t waited = cudaEventSynchronize(event);
  status = cudaThreadExchangeStreamCaptureMode(&mode);
  return waited != cudaSuccess ? waited : status;
}

cudaError_t is_capturing(cudaStream_t stream, bool* capturing) {
  cudaStreamCaptureStatus status{};
  const cudaError_t error = cudaStreamIsCapturing(stream, &status);
  *capturing = status != cudaStreamCaptureStatusNone;
  return error;
}

}  // namespace voxmma
