// What csrc/torch needs of CUDA. The kernel library holds a runtime of its own (static) and exports this instead of it: the
// binding is compiled without a toolkit and serves every torch of a version, whatever CUDA that has.
#pragma once

#if __has_include(<cuda_runtime_api.h>)
#include <cuda_runtime_api.h>
#else  // its names that stand in this library's interface
struct CUstream_st;
struct CUevent_st;
using cudaStream_t = CUstream_st*;
using cudaEvent_t = CUevent_st*;
enum cudaError { cudaSuccess = 0, cudaErrorUnknown = 999 };
using cudaError_t = cudaError;
#endif

#include <cstddef>
#include <cstdint>

namespace voxmma {

#pragma GCC visibility push(default)  // the kernel library's interface: seen from outside where it is a shared object

// For whoever reports it: forgets the thread's last error, which the next launch, asking how it went, would be told instead.
const char* error_text(cudaError_t error);

// As CUDA counts versions, 13000: of the runtime in this library, and the newest that the installed driver is for; 0: there is
// no driver. A runtime runs with drivers of its major version and newer ones.
int runtime_version();
int driver_version();

struct DeviceFacts {
  int major, minor, sm_count;
  int shared_memory;  // bytes that a block may ask for
};
cudaError_t device_facts(int device, DeviceFacts* facts);
cudaError_t current_device(int* device);
cudaError_t set_device(int device);

// By a kernel, where it can be: CUDA launches a graph that is a line of kernels in a tenth of the time that it takes for
// one with memset nodes.
cudaError_t set_bytes(void* data, int value, size_t bytes, cudaStream_t);
cudaError_t copy_to_host(void* to, const void* from, size_t bytes, cudaStream_t);

// Rows that are copied from memory of the device to memory of the device, or page-locked memory of the host. Strides are bytes
// between rows.
struct RowCopy {
  void* to;
  const void* from;                             // null: `rows` int64 at `to` become `value`
  int64_t rows, bytes, to_stride, from_stride;  // bytes of a row that is read
  int64_t value;
  bool narrow;  // int64 to int32, what lies beyond 2^30 or -2^30 to these
};
constexpr int kMostCopies = 32;
cudaError_t copy_rows(const RowCopy* copies, int count, cudaStream_t);  // by one launch

cudaError_t make_event(cudaEvent_t* event);  // without a time
cudaError_t record_event(cudaEvent_t, cudaStream_t);
cudaError_t wait_for_event(cudaStream_t, cudaEvent_t);  // the stream waits
cudaError_t event_done(cudaEvent_t, bool* done);
cudaError_t finish_event(cudaEvent_t);  // the host waits, also while this thread captures a CUDA graph
cudaError_t is_capturing(cudaStream_t, bool* capturing);

#pragma GCC visibility pop

}  // namespace voxmma
