// What every launch starts from: device, stream, tensors as the kernel library takes them, results on the host.
//
// No ATen/cuda header is included (they ask for cuBLAS and cuSPARSE headers): the current stream comes through c10's
// virtual device guard, so the same files compile against CUDA and CPU-only builds of torch.
#pragma once

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/InferenceMode.h>

#include <cstring>
#include <functional>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "../checks.h"
#include "voxmma/kernels.h"

namespace voxmma {

using Ints = std::vector<int64_t>;

void check_cuda(cudaError_t error, const char* what, at::Device device);

struct DeviceInfo : DeviceFacts {
  bool sm80, sm90;  // this build has kernels of TileConfig::arch 80 and 90, and they run on it
};

// Asked once a device; an error where the driver is too old.
DeviceInfo device_info(at::Device device);

// Device, current stream and device properties of one call. The kernel library has a CUDA runtime of its own (static),
// so its idea of the current device is set beside torch's; both stand for the same driver context.
struct Launch {
  at::Device device;
  c10::DeviceGuard guard;
  DeviceInfo info;
  cudaStream_t stream;

  explicit Launch(at::Device on);

  // The one way in which the host waits for the device; torch.cuda.set_sync_debug_mode sees it.
  void wait() const;

  // The first asks torch's dispatcher, the others the allocator that its memory came from, which is torch's of the moment.
  Tensor empty(at::IntArrayRef sizes, ScalarType dtype) const {
    if (allocator == nullptr) {
      Tensor made = at::empty(sizes, at::TensorOptions().dtype(dtype).device(device));
      allocator = made.storage().allocator();
      return made;
    }
    return at::detail::empty_generic(sizes, allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA), dtype,
                                     std::nullopt);
  }
  Tensor scratch(size_t bytes) const { return empty({static_cast<int64_t>(bytes)}, at::kByte); }

 private:
  mutable c10::Allocator* allocator = nullptr;
};

template <class T>
T* data(const Tensor& t) {
  return static_cast<T*>(t.data_ptr());
}

DType to_dtype(ScalarType t);
const KernelEntry& find_tile(string_view tile, Op op, DType input, string_view accum, const DeviceInfo& device);
PlanView plan_view(TensorList map, int64_t kernel_volume, int64_t n_out, int64_t n_in);
void check_ints(const char* name, const Tensor& t, ScalarType dtype, int64_t columns, const Tensor& like);

// Rows whose channels are adjacent, as they are or copied.
Tensor dense_rows(const Tensor& x);

// What `tell` has the device write into page-locked memory. Waits.
template <class T>
T told(const Launch& on, const std::function<void(T*)>& tell) {
  static std::mutex mutex;
  static auto* const unused = new std::vector<Tensor>;  // page-locked; outlives the CUDA context, so never destroyed
  Tensor host;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    if (!unused->empty()) {
      host = std::move(unused->back());
      unused->pop_back();
    }
  }
  if (!host.defined()) host = at::empty({sizeof(T)}, at::TensorOptions().dtype(at::kByte).pinned_memory(true));
  tell(data<T>(host));
  on.wait();
  T value;
  std::memcpy(&value, host.data_ptr(), sizeof(value));
  const std::lock_guard<std::mutex> lock(mutex);
  unused->push_back(std::move(host));
  return value;
}

// What a kernel found out, on the host. Waits.
template <class T>
T read_back(const Launch& on, const T* device) {
  return told<T>(
      on, [&](T* host) { check_cuda(copy_to_host(host, device, sizeof(T), on.stream), "cudaMemcpyAsync", on.device); });
}

template <class T>
Tensor empty_struct(const Launch& on) {
  static_assert(sizeof(T) % sizeof(int64_t) == 0);
  return on.empty({sizeof(T) / sizeof(int64_t)}, at::kLong);
}

// Coordinates and maps are normal tensors without a graph, whoever asks for them: under inference_mode, too, since a
// later training pass saves them for its backward.
struct NormalTensors {
  c10::InferenceMode inference{false};
  at::NoGradGuard no_grad;
};

}  // namespace voxmma
