// Kernels on rows that torch has for Python: the kernel library has those of convolutions, pooling, sets and maps.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "voxmma/dtypes.h"

namespace vxm {

struct Strided {
  int dims;
  int64_t shape[8], from[8], to[8];  // strides in elements
};
using Number = voxmma::DType;

cudaError_t store_number(int64_t* to, int64_t value, cudaStream_t stream);
cudaError_t copy_strided(const Strided& dims, int element_bytes, const void* from, void* to, int64_t count,
                         cudaStream_t stream);
// (n, groups * channels), `ld` elements from row to row, with zeros behind the channels: (n, groups, padded).
cudaError_t pad_channels(const void* from, int64_t ld, void* to, int element_bytes, int64_t n, int64_t groups,
                         int64_t channels, int64_t padded, cudaStream_t stream);
// Rows of 4-byte words (or bytes), zeros from *count on.
cudaError_t keep_rows(const void* from, void* to, int64_t n, int64_t row_bytes, const int64_t* count,
                      cudaStream_t stream);
// Sums, or products.
cudaError_t combine_rows(bool product, Number type, const void* a, const void* b, void* to, int64_t count,
                         cudaStream_t stream);
// kind: relu, leaky_relu, silu, gelu (with erf), sigmoid
cudaError_t activate_rows(int kind, double slope, Number type, const void* from, void* to, int64_t count,
                          cudaStream_t stream);
// to (n, c_out) = x (n, c_in) * weight (c_in, c_out) + bias (c_out) or null: added up in order in fp32 (fp64 for fp64)
cudaError_t multiply_rows(Number type, const void* x, const void* weight, const void* bias, void* to, int64_t n,
                          int64_t c_in, int64_t c_out, cudaStream_t stream);
// x * factor + summand, numbers of each channel in fp32 (fp64 for fp64)
cudaError_t scale_rows(Number type, const void* x, const void* factor, const void* summand, void* to, int64_t count,
                       int64_t channels, cudaStream_t stream);
// status: [smallest row that is not finite or -1, 0, 0, 0]
cudaError_t find_not_finite(Number type, const void* x, int64_t n, int64_t channels, const int64_t* count,
                            int64_t* status, cudaStream_t stream);
struct Grid {
  int64_t samples, shape[3], origin[3];
};
// Rows into a grid (samples, x, y, z, row) of zeros; status: [smallest row outside of it or -1, 0, 0, 0].
cudaError_t scatter_dense(const Grid& grid, const void* x, int64_t row_bytes, const int* coords, int64_t n,
                          const int64_t* count, void* to, int64_t to_bytes, int64_t* status, cudaStream_t stream);

// Runs of the first *count of n cells that lie in the same place, those outside of a box left out: sorted by (batch, x, y, z).
// Run r is rows order[start[r]] .. order[start[r + 1] - 1], in the caller's order; where there are more than `capacity`, the
// others are not told. status: [runs, smallest row outside of the box or -1, longest run, 0].
struct Runs {
  const int* cells;  // (n, 4)
  int64_t n;
  const int64_t* count;
  int low[4], high[4];
  int64_t capacity;
  int* coords;    // (capacity, 4)
  int64_t* made;  // runs, 0 where there are more than `capacity`
  int64_t* status;
  void* workspace;           // runs_workspace bytes, 256-byte aligned
  const int *order, *start;  // made, in the workspace
};
size_t runs_workspace(int64_t n, int64_t capacity);
cudaError_t find_runs(Runs* runs, cudaStream_t stream);

}  // namespace vxm
