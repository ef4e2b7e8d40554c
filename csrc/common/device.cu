// The CUDA runtime behind voxmma/device.h.
#include "voxmma/device.h"

namespace voxmma {

const char* error_text(cudaError_t error) { return cudaGetErrorString(error); }

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
  return cudaMemsetAsync(data, value, bytes, stream);
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
