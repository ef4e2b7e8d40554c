#include "streams.h"

#include <mutex>
#include <vector>

#include "../module.h"

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

}  // namespace

std::unique_ptr<StreamEvent> StreamEvent::behind(const Launch& on) {
  std::unique_ptr<StreamEvent> made(new StreamEvent(on.device, spare_events().take(on.device), on.stream));
  check_cuda(record_event(made->event_, on.stream), "cudaEventRecord", on.device);
  return made;
}

std::unique_ptr<StreamEvent> StreamEvent::record(int64_t device_index) {
  const Launch on(cuda_device(device_index));
  return captured(on) ? nullptr : behind(on);
}

StreamEvent::~StreamEvent() { spare_events().give(device_, event_); }

bool StreamEvent::wait() const {
  const Launch on(device_);
  if (!captured(on)) {
    check_cuda(wait_for_event(on.stream, event_), "cudaStreamWaitEvent", device_);
    return true;
  }
  finish();
  return false;
}

bool StreamEvent::done() const {
  bool is_done = false;
  check_cuda(event_done(event_, &is_done), "cudaEventQuery", device_);
  return is_done;
}

void StreamEvent::finish() const { check_cuda(finish_event(event_), "cudaEventSynchronize", device_); }

void bind_streams(py::module_& m) {
  py::class_<StreamEvent>(m, "StreamEvent")
      .def_static("record", torch::wrap_pybind_function(StreamEvent::record), py::arg("device"))
      .def("wait", torch::wrap_pybind_function_no_gil([](const StreamEvent& self) { return self.wait(); }))
      .def("done", torch::wrap_pybind_function([](const StreamEvent& self) { return self.done(); }))
      .def_property_readonly("stream", &StreamEvent::stream);
}

}  // namespace voxmma
