#include "launch.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/utils/pybind.h>

#include <string>

#include "../module.h"
#include "voxmma/arch.h"
#include "voxmma/dtypes.h"

namespace voxmma {

void check_cuda(cudaError_t error, const char* what, at::Device device) {
  TORCH_CHECK(error == cudaSuccess, "voxmma: ", what, " failed on ", device, ": ", error_text(error));
}

DeviceInfo device_info(at::Device device) {
  TORCH_CHECK(device.index() >= 0, device, " has no index");
  static std::mutex mutex;
  static std::vector<DeviceInfo> known;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto index = static_cast<size_t>(device.index());
  if (known.size() <= index) known.resize(index + 1);
  DeviceInfo& info = known[index];
  if (info.sm_count != 0) return info;
  const std::string problem = driver_problem(driver_version(), runtime_version());
  TORCH_CHECK(problem.empty(), problem);
  DeviceInfo found{};
  check_cuda(device_facts(device.index(), &found), "cudaDeviceGetAttribute", device);
  found.sm80 = build_runs_on(kCudaArchs, 80, found.major, found.minor);
  found.sm90 = build_runs_on(kCudaArchs, 90, found.major, found.minor);
  info = found;
  return info;
}

namespace {

// The cudaStream_t behind torch's current stream. torch before 2.10 says it to Python only.
template <class Guard>
auto native_handle(const Guard& guard, const c10::Stream& stream, int)
    -> decltype(guard.getStreamNativeHandle(stream)) {
  return guard.getStreamNativeHandle(stream);
}
template <class Guard>
void* native_handle(const Guard&, const c10::Stream& stream, long) {
  const py::gil_scoped_acquire gil;
  const auto raw = py::module_::import("torch._C").attr("_cuda_getCurrentRawStream");
  return reinterpret_cast<void*>(raw(static_cast<int>(stream.device_index())).cast<uintptr_t>());
}

}  // namespace

Launch::Launch(at::Device on) : device(on), guard(on), info(device_info(on)) {
  TORCH_CHECK(info.sm80, "voxmma's kernels were built for ", kCudaArchs, ", but ", device, " is of compute capability ",
              info.major, ".", info.minor, ": rebuild with TORCH_CUDA_ARCH_LIST=", info.major, ".", info.minor,
              info.major == 9 ? "a" : "", info.major < 8 ? " (8.0 is the oldest that is supported)" : "");
  int current = -1;  // asking is cheaper than setting
  check_cuda(current_device(&current), "cudaGetDevice", device);
  if (current != device.index()) check_cuda(set_device(device.index()), "cudaSetDevice", device);
  const c10::impl::VirtualGuardImpl impl(at::kCUDA);
  stream = static_cast<cudaStream_t>(native_handle(impl, impl.getStream(device), 0));
}

void Launch::wait() const {
  const c10::impl::VirtualGuardImpl impl(at::kCUDA);
  impl.synchronizeStream(impl.getStream(device));
}

DType to_dtype(ScalarType t) {
  switch (t) {
#define VOXMMA_CASE(dtype, T, name, torch, ...) \
  case ScalarType::torch: return DType::dtype;
    VOXMMA_DTYPES(VOXMMA_CASE)
#undef VOXMMA_CASE
    default: TORCH_INTERNAL_ASSERT(false, "is_supported() has not been asked");
  }
}

PlanView plan_view(TensorList map, int64_t kernel_volume, int64_t n_out, int64_t n_in) {
  constexpr int64_t limit = int64_t{1} << 31;
  TORCH_CHECK(n_out < limit - kTileM && n_in < limit, "at most 2^31 rows: got n_out=", n_out, ", n_in=", n_in);
  PlanView plan{};
  plan.order = data<int>(map[0]);
  plan.schedule = data<ScheduledTile>(map[1]);
  plan.passes = data<Pass>(map[2]);
  plan.frag = data<uint32_t>(map[3]);
  plan.uniq = data<int>(map[4]);
  plan.local = data<uint16_t>(map[5]);
  plan.tiles = static_cast<int>(map[1].size(1));
  plan.kernel_volume = static_cast<int>(kernel_volume);
  plan.n_out = n_out;
  plan.n_in = n_in;
  return plan;
}

void check_ints(const char* name, const Tensor& t, ScalarType dtype, int64_t columns, const Tensor& like) {
  const bool shape = columns > 0 ? t.dim() == 2 && t.size(1) == columns : t.dim() == 1;
  const bool whole = columns == 4 && dtype == at::kInt;  // rows that are read at once
  const bool fits =
      t.is_cuda() && t.device() == like.device() && t.scalar_type() == dtype && t.is_contiguous() && shape;
  TORCH_CHECK(fits && (!whole || reinterpret_cast<uintptr_t>(t.data_ptr()) % 16 == 0), name, " must be contiguous ",
              c10::toString(dtype), whole ? ", at a multiple of 16 bytes," : "", " of shape (N",
              columns > 0 ? ", " + std::to_string(columns) : "", ") on ",
              like.is_cuda() ? like.device().str() : "a CUDA device", ", got ", c10::toString(t.scalar_type()),
              " of shape ", t.sizes(), " on ", t.device());
}

Tensor dense_rows(const Tensor& x) { return x.stride(1) == 1 || x.size(1) <= 1 ? x : x.contiguous(); }

Tensor aligned(const Tensor& t) {
  const Tensor dense = t.contiguous();
  return reinterpret_cast<uintptr_t>(dense.data_ptr()) % 16 == 0 ? dense : dense.clone();
}

}  // namespace voxmma
