// Copies of several rows by one launch.
#pragma once

#include <cstdint>

#include "voxmma/device.h"

namespace voxmma {

#pragma GCC visibility push(default)

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

cudaError_t event_done(cudaEvent_t, bool* done);

#pragma GCC visibility pop

}  // namespace voxmma
