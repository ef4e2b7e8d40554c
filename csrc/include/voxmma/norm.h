// Batch norm in training, with sum and activation behind it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "voxmma/device.h"
#include "voxmma/epilogue.h"

namespace voxmma {

#pragma GCC visibility push(default)  // device.h

// y = activation((x - mean) * invstd * weight + bias + residual): mean and biased variance of a channel over the rows, sums
// in a fixed order, in fp32 (fp64 for fp64), one rounding. Two rows or more.
struct NormArgs {
  const void* x;  // (n, channels), `ldx` elements from row to row
  int64_t ldx;
  DType dtype;  // of x, residual, y and their gradients
  int64_t n, channels;
  PerChannel weight, bias;  // default 1, 0
  double eps;
  const void* residual;  // (n, channels), `ldr` elements from row to row; or null
  int64_t ldr;
  Activation activation;
  double slope;
  void* stats;      // [4][channels] fp32 (fp64): mean, invstd, invstd * weight, bias. Written forward, read backward
  void* passed;     // norm_passed_bytes bytes, of relu and leaky_relu: what these passed, a bit a cell; or null.
                    // Written forward, read backward
  void* workspace;  // norm_workspace bytes
  int sm_count;
  // forward
  void* y;                           // (n, channels) contiguous
  void *running_mean, *running_var;  // (channels) of running_dtype, updated, var with the unbiased variance; or null
  DType running_dtype;
  double momentum;
  int64_t* batches;  // incremented; or null
  bool given;        // stats are there, and y alone is written: the same bits again
  // backward; x, stats, activation as they were. relu, leaky_relu with a residual: `passed`, and no residual
  const void* dy;  // (n, channels), `ldy` elements from row to row
  int64_t ldy;
  void *dx, *dresidual;   // (n, channels) contiguous; dresidual may be null
  void *dweight, *dbias;  // (channels) of the type of stats
};
size_t norm_workspace(const NormArgs&);
size_t norm_passed_bytes(DType dtype, int64_t n, int64_t channels);
cudaError_t norm_forward(const NormArgs&, cudaStream_t);
cudaError_t norm_backward(const NormArgs&, cudaStream_t);

#pragma GCC visibility pop

}  // namespace voxmma
