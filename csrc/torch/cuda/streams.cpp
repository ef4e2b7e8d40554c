// Waiting for what another stream does (voxmma/_cached.py).
#include <memory>

#include "../module.h"
#include "launch.h"

namespace voxmma {
namespace {

bool is_capturing(const Launch& on) {
  cudaStreamCaptureStatus status{};
  check_cuda(cudaStreamIsCapturing(on.stream, &status), "cudaStreamIsCapturing", on.device);
  return status != cudaStreamCaptureStatusNone;
}

at::Device cuda_device(int64_t index) { return at::Device(at::kCUDA, static_cast<at::DeviceIndex>(index)); }

// An event behind what a device's current stream had to do when this was made.
class StreamEvent {
 public:
  // None where a CUDA graph is captured on that stream: the event would be part of the graph.
  static std::unique_ptr<StreamEvent> record(int64_t device_index) {
    const Launch on(cuda_device(device_index));
    if (is_capturing(on)) return nullptr;
    cudaEvent_t event{};
    check_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags", on.device);
    std::unique_ptr<StreamEvent> made(new StreamEvent(on.device, event, on.stream));
    check_cuda(cudaEventRecord(event, on.stream), "cudaEventRecord", on.device);
    return made;
  }

  StreamEvent(const StreamEvent&) = delete;
  StreamEvent& operator=(const StreamEvent&) = delete;

  ~StreamEvent() {  // without the device's context, or after the driver's end, there is nothing to give back
    try {
      const Launch on(device_);
      cudaEventDestroy(event_);
    } catch (...) {
    }
  }

  // Makes the device's current stream wait. False where a CUDA graph is captured on it: a graph cannot wait for what it
  // did not capture, so the host has waited instead.
  bool wait() const {
    const Launch on(device_);
    if (!is_capturing(on)) {
      check_cuda(cudaStreamWaitEvent(on.stream, event_, 0), "cudaStreamWaitEvent", device_);
      return true;
    }
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    const auto swap = [&] {
      check_cuda(cudaThreadExchangeStreamCaptureMode(&mode), "cudaThreadExchangeStreamCaptureMode", device_);
    };
    swap();
    const cudaError_t error = cudaEventSynchronize(event_);
    swap();
    check_cuda(error, "cudaEventSynchronize", device_);
    return false;
  }

  uintptr_t stream() const { return reinterpret_cast<uintptr_t>(stream_); }

 private:
  StreamEvent(at::Device device, cudaEvent_t event, cudaStream_t stream)
      : device_(device), event_(event), stream_(stream) {}

  at::Device device_;
  cudaEvent_t event_;
  cudaStream_t stream_;  // that of record()
};

}  // namespace

void bind_streams(py::module_& m) {
  py::class_<StreamEvent>(m, "StreamEvent")
      .def_static("record", torch::wrap_pybind_function(StreamEvent::record), py::arg("device"))
      .def("wait", torch::wrap_pybind_function_no_gil([](const StreamEvent& self) { return self.wait(); }))
      .def_property_readonly("stream", &StreamEvent::stream);
}

}  // namespace voxmma
