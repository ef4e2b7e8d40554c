// Waiting for what another stream does (voxmma/sparse/cached.py).
#include <memory>
#include <mutex>
#include <vector>

#include "../module.h"
#include "launch.h"

namespace voxmma {
namespace {

bool captured(const Launch& on) {
  bool capturing = false;
  check_cuda(is_capturing(on.stream, &capturing), "cudaStreamIsCapturing", on.device);
  return capturing;
}

at::Device cuda_device(int64_t index) { return at::Device(at::kCUDA, static_cast<at::DeviceIndex>(index)); }

// Events that are nobody's any more, to be recorded anew: a wait stands for what its event was recorded behind when it was
// asked for. To make and destroy one costs more than to record it.
class SpareEvents {
 public:
  cudaEvent_t take(at::Device device) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      auto& spare = of(device);
      if (!spare.empty()) {
        const cudaEvent_t event = spare.back();
        spare.pop_back();
        return event;
      }
    }
    cudaEvent_t event{};
    check_cuda(make_event(&event), "cudaEventCreateWithFlags", device);
    return event;
  }

  void give(at::Device device, cudaEvent_t event) {
    const std::lock_guard<std::mutex> lock(mutex_);
    of(device).push_back(event);
  }

 private:
  std::vector<cudaEvent_t>& of(at::Device device) {
    const auto index = static_cast<size_t>(device.index());
    if (spare_.size() <= index) spare_.resize(index + 1);
    return spare_[index];
  }

  std::mutex mutex_;
  std::vector<std::vector<cudaEvent_t>> spare_;  // by device
};

SpareEvents& spare_events() {
  static auto* const made = new SpareEvents;  // outlives the CUDA context, so never destroyed
  return *made;
}

// An event behind what a device's current stream had to do when this was made.
class StreamEvent {
 public:
  // None where a CUDA graph is captured on that stream: the event would be part of the graph.
  static std::unique_ptr<StreamEvent> record(int64_t device_index) {
    const Launch on(cuda_device(device_index));
    if (captured(on)) return nullptr;
    std::unique_ptr<StreamEvent> made(new StreamEvent(on.device, spare_events().take(on.device), on.stream));
    check_cuda(record_event(made->event_, on.stream), "cudaEventRecord", on.device);
    return made;
  }

  StreamEvent(const StreamEvent&) = delete;
  StreamEvent& operator=(const StreamEvent&) = delete;

  ~StreamEvent() { spare_events().give(device_, event_); }

  // Makes the device's current stream wait. False where a CUDA graph is captured on it: a graph cannot wait for what it
  // did not capture, so the host has waited instead.
  bool wait() const {
    const Launch on(device_);
    if (!captured(on)) {
      check_cuda(wait_for_event(on.stream, event_), "cudaStreamWaitEvent", device_);
      return true;
    }
    check_cuda(finish_event(event_), "cudaEventSynchronize", device_);
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
