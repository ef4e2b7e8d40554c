// Pooling over a tile plan, and reductions over samples.
#pragma once

#include <cstddef>
#include <cstdint>

#include "voxmma/device.h"
#include "voxmma/dtypes.h"
#include "voxmma/plan.h"

namespace voxmma {

#pragma GCC visibility push(default)  // device.h

// Over the inputs x[j] that the plan gives output row i under offsets 0..K-1, in this order, channel by channel:
//   sum   y[i] = sum of x[j] / in_count[j], divided by out_count[i]; counts below 1 are 1
//   max   the largest, the first of equals; a NaN beats every number, the first NaN stays; 0 where there is none
//   min   the smallest, likewise
//   pick  x[j] under offset winner[i], 0 where that has no input
//   put   sum of those x[j] whose winner[j] is the offset they come under: the transpose of pick and gradient of max
// Half types are added and divided in fp32 and rounded once.
enum class PoolOp : int { sum = 0, max = 1, min = 2, pick = 3, put = 4 };
struct PoolArgs {
  PlanView plan;
  PoolOp op;
  DType dtype;    // of x and y
  bool mirror;    // offset k is the plan's K-1-k: the opposite direction of a symmetric map
  const void* x;  // (n_in, channels), `ldx` elements from row to row
  int64_t ldx;
  void* y;  // (n_out, channels) contiguous
  int64_t channels;
  int sm_count;          // multiprocessors of the device
  const int* in_count;   // sum: [n_in] or null
  const int* out_count;  // sum: [n_out] or null
  void* winner;          // contiguous, in winner_bytes(K): an offset, K = none. max, min: (n_out, channels), written
                         // unless null; pick: (n_out, channels), put: (n_in, channels), read
};
constexpr int winner_bytes(int kernel_volume) { return kernel_volume < 256 ? 1 : 2; }
cudaError_t pool(const PoolArgs&, cudaStream_t);

// How many inputs every output row has: [n_out].
cudaError_t neighbor_counts(const PlanView&, int* counts, cudaStream_t);

// One level of a reduction over samples (voxmma/sparse/segments.py): block b is entries starts[b] .. starts[b + 1] - 1
// of `rows`, the last one to the end. Rows are added, or compared, in this order.
struct SegmentArgs {
  const void* x;  // (n, channels), `ldx` elements from row to row
  int64_t ldx;
  DType dtype;
  int64_t channels;
  const int64_t* rows;
  int64_t n_rows;
  const int64_t* starts;
  int64_t blocks;
  const int64_t* candidates;  // argmax: (n, channels) rows of x that entries of `rows` stand for, -1 = none; or null
  void* out;                  // sum: (blocks, channels) in fp32, of fp64 in fp64
                              // argmax: int64 (blocks, channels), the first row of x with the largest value, -1 = none
};
cudaError_t segment_sum(const SegmentArgs&, cudaStream_t);
cudaError_t segment_argmax(const SegmentArgs&, cudaStream_t);  // NaN as in PoolOp::max

#pragma GCC visibility pop

}  // namespace voxmma
