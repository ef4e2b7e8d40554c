// Waiting for what another stream does (voxmma/sparse/cached.py).
#pragma once

#include <memory>

#include "launch.h"

namespace voxmma {

// An event behind what a device's current stream had to do when this was made.
class StreamEvent {
 public:
  // None where a CUDA graph is captured on that stream: the event would be part of the graph.
  static std::unique_ptr<StreamEvent> record(int64_t device_index);
  static std::unique_ptr<StreamEvent> behind(const Launch& on);  // whose stream is not captured

  StreamEvent(const StreamEvent&) = delete;
  StreamEvent& operator=(const StreamEvent&) = delete;
  ~StreamEvent();

  // Makes the device's current stream wait. False where a CUDA graph is captured on it: a graph cannot wait for what it
  // did not capture, so the host has waited instead.
  bool wait() const;
  bool done() const;
  void finish() const;  // the host waits

  uintptr_t stream() const { return reinterpret_cast<uintptr_t>(stream_); }

 private:
  StreamEvent(at::Device device, cudaEvent_t event, cudaStream_t stream)
      : device_(device), event_(event), stream_(stream) {}

  at::Device device_;
  cudaEvent_t event_;
  cudaStream_t stream_;  // that of record()
};

}  // namespace voxmma
