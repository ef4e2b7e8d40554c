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

struct Copies {
  RowCopy of[kMostCopies];
  int unit[kMostCopies];  // bytes that a thread copies at a time
};

template <class T>
__device__ T* row_at(T* base, int64_t row, int64_t stride) {
  return reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(base) + row * stride);
}

// Reads of several units are under way together.
template <class Unit>
__device__ void copy_units(const RowCopy& c, int64_t first, int64_t step) {
  constexpr int kTogether = 4;
  const int64_t width = c.bytes / int64_t{sizeof(Unit)}, total = c.rows * width;
  const auto place = [&](auto* base, int64_t i, int64_t stride) {
    return c.rows == 1 ? base + i : row_at(base, i / width, stride) + i % width;
  };
  for (int64_t at = first; at < total; at += kTogether * step) {
    Unit held[kTogether];
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      const int64_t i = at + k * step;
      if (i < total) held[k] = *place(static_cast<const Unit*>(c.from), i, c.from_stride);
    }
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      const int64_t i = at + k * step;
      if (i < total) *place(static_cast<Unit*>(c.to), i, c.to_stride) = held[k];
    }
  }
}

__device__ void narrow_rows(const RowCopy& c, int64_t first, int64_t step) {
  const int64_t width = c.bytes / 8, most = 1 << 30;
  for (int64_t i = first; i < c.rows * width; i += step) {
    const int64_t value = row_at(static_cast<const int64_t*>(c.from), i / width, c.from_stride)[i % width];
    row_at(static_cast<int*>(c.to), i / width, c.to_stride)[i % width] = static_cast<int>(value < -most  ? -most
                                                                                          : value > most ? most
                                                                                                         : value);
  }
}

__global__ void __launch_bounds__(kThreads) copy_all(const __grid_constant__ Copies copies) {
  const RowCopy& c = copies.of[blockIdx.y];
  const int64_t first = int64_t{blockIdx.x} * kThreads + threadIdx.x, step = int64_t{gridDim.x} * kThreads;
  if (c.from == nullptr) {
    for (int64_t i = first; i < c.rows; i += step) static_cast<int64_t*>(c.to)[i] = c.value;
  } else if (c.narrow) {
    narrow_rows(c, first, step);
  } else {
    switch (copies.unit[blockIdx.y]) {
      case 16: return copy_units<uint4>(c, first, step);
      case 8: return copy_units<uint2>(c, first, step);
      case 4: return copy_units<uint32_t>(c, first, step);
      case 2: return copy_units<uint16_t>(c, first, step);
      default: return copy_units<uint8_t>(c, first, step);
    }
  }
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

cudaError_t copy_rows(const RowCopy* given, int count, cudaStream_t stream) {
  if (count < 0 || count > kMostCopies) return cudaErrorInvalidValue;
  Copies copies;
  int64_t most = 0;
  for (int n = 0; n < count; ++n) {
    RowCopy& c = copies.of[n] = given[n];
    if (c.from != nullptr && !c.narrow && c.to_stride == c.bytes && c.from_stride == c.bytes) {
      c.bytes *= c.rows;
      c.rows = 1;
    }
    auto bits = reinterpret_cast<uintptr_t>(c.to) | reinterpret_cast<uintptr_t>(c.from) | uintptr_t(c.bytes);
    if (c.rows > 1) bits |= uintptr_t(c.to_stride | c.from_stride);
    int& unit = copies.unit[n] = c.from == nullptr || c.narrow ? 8 : 16;
    while (bits % unit != 0) unit /= 2;
    most = std::max(most, c.rows * (c.bytes / unit));
  }
  if (most == 0) return cudaSuccess;
  constexpr int64_t kMaxBlocks = 1024, kShare = 2 * kThreads;  // units of a block, as long as there are few blocks
  const dim3 blocks(static_cast<unsigned>(std::min((most + kShare - 1) / kShare, kMaxBlocks)), count);
  copy_all<<<blocks, kThreads, 0, stream>>>(copies);
  return cudaGetLastError();
}

cudaError_t make_event(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, cudaEventDisableTiming); }
cudaError_t record_event(cudaEvent_t event, cudaStream_t stream) { return cudaEventRecord(event, stream); }
cudaError_t wait_for_event(cudaStream_t stream, cudaEvent_t event) { return cudaStreamWaitEvent(stream, event, 0); }

cudaError_t event_done(cudaEvent_t event, bool* done) {
  const cudaError_t status = cudaEventQuery(event);
  *done = status == cudaSuccess;
  if (status != cudaErrorNotReady) return status;
  cudaGetLastError();  // which the next launch, asking how it went, would be told
  return cudaSuccess;
}

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
