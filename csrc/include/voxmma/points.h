// Points: their cells, sums and means of these, lookup, and interpolation between voxels.
#pragma once

#include <cstddef>
#include <cstdint>

#include "voxmma/device.h"
#include "voxmma/dtypes.h"
#include "voxmma/map.h"

namespace voxmma {

#pragma GCC visibility push(default)  // device.h

// Cells (n, 4) of points: sample, floor((point - origin) / edge), in fp64. What is not finite, lies outside the packable
// range or belongs to a sample outside 0 .. kBatchMax becomes a row that is not packable.
struct PointArgs {
  const void* points;  // (n, 3) contiguous
  DType dtype;
  const int64_t* batch;  // [n], null: sample 0
  int64_t n;
  double origin[3], edge[3];
  int* cells;
};
cudaError_t cells_of_points(const PointArgs&, cudaStream_t);

// Extents and smallest bad row of (n, 4) cells; the other numbers of `stats` mean nothing.
cudaError_t measure_cells(const int* cells, int64_t n, CoordStats* stats, cudaStream_t);

// Groups equal rows: run r is rows order[start[r]] .. order[start[r + 1] - 1], in the caller's order; runs are sorted by
// (batch, x, y, z).
struct RunStats {  // device memory
  int64_t count, longest;
};
struct GroupArgs {
  const int* cells;  // (n, 4) packable, 16-byte aligned
  int64_t n;
  CoordBox box;     // around all rows
  int* order;       // [n]
  int* start;       // [n + 1], count + 1 of them are written
  int64_t* run_of;  // [n] run of each row
  RunStats* stats;
  void* workspace;  // group_workspace(box, n) bytes, 256-byte aligned
};
size_t group_workspace(const CoordBox& box, int64_t n);
cudaError_t group_cells(const GroupArgs&, cudaStream_t);
// (count, 4) cells of the runs, and a copy of the count + 1 starts.
cudaError_t take_runs(const GroupArgs&, int64_t count, int* coords, int* start, cudaStream_t);

// Sums of the rows of each run as a balanced tree: neighbours (0,1) (2,3) (4) are added round by round, in fp32 for half
// types and in fp64 for the others.
inline constexpr int kMaxMergedRows = 8191;  // of a run
struct MergeArgs {
  const void* x;  // (n, channels), `ldx` elements from row to row
  int64_t ldx;
  DType dtype;
  int64_t channels;
  const int *order, *start;
  int64_t count, longest;  // longest run; at most kMaxMergedRows
  bool mean;               // divide by the number of rows
  bool wide;               // `out` has the type of the sums instead of that of x
  void* out;               // (count, channels) contiguous
};
cudaError_t merge_runs(const MergeArgs&, cudaStream_t);

// A coordinate set of at least one row: row of each rank in Morton order and the hash table of bricks.
struct SetView {
  const int* order;
  const Brick* bricks;
  int64_t capacity;
};

// Row of each of the n coordinates (batch, x, y, z), -1 where the set has none.
cudaError_t lookup_rows(const SetView&, const void* query, bool is_int64, int64_t n, int64_t* rows, cudaStream_t);

// Voxels around points (voxmma/sparse/sampling.py, devoxelise): the one whose cell holds the point, or the eight whose
// centres surround it and their weights, corner (x, y, z) at 4x + 2y + z.
struct LocateArgs {
  SetView set;
  const void* points;  // (n, 3) contiguous
  DType dtype;
  int64_t n;
  const void* batch;  // [n] sample of each point, or null: 0
  bool batch_is_int64;
  int64_t batch_size;
  double shift[3], edge[3];  // position of cell (0, 0, 0) and lengths of a cell at stride 1
  double stride[3];          // tensor stride of the set
  bool trilinear;
  int* rows;      // (n, corners); -1: absent, or without weight
  void* weights;  // (n, corners) fp32 or fp64, 0 where rows is -1
  DType weight_dtype;
  int64_t* invalid;  // not 0: a point is not finite, or a sample not in 0 .. batch_size - 1
};
cudaError_t locate_points(const LocateArgs&, cudaStream_t);

// y[i] = sum over the corners of weights[i, corner] * x[rows[i, corner]], serially, products and sums rounded on their
// own: in fp64 for fp64, else in fp32 and rounded once.
struct GatherArgs {
  const void* x;  // (any, channels), `ldx` elements from row to row
  int64_t ldx;
  DType dtype;
  int64_t channels, n;
  int corners;          // 1 or 8
  const int* rows;      // (n, corners), -1 = none
  const void* weights;  // (n, corners) fp64 for fp64, else fp32
  void* y;              // (n, channels) contiguous
};
cudaError_t gather_weighted(const GatherArgs&, cudaStream_t);

// The transpose: dx[j] = sum over the entries e of j of weights[e] * dy[e / corners]. The entries of j are
// entries[starts[j]] .. entries[starts[j + 1] - 1]; the order of the additions depends on their number and the channels.
struct ScatterArgs {
  const void* dy;  // (n, channels), `ldy` elements from row to row; how they are aligned changes the order, too
  int64_t ldy;
  DType dtype;
  int64_t channels, n_out;
  int corners;
  const int64_t* entries;
  const int64_t* starts;  // [n_out + 1]
  const void* weights;
  void* dx;  // (n_out, channels) contiguous
};
cudaError_t scatter_weighted(const ScatterArgs&, cudaStream_t);

#pragma GCC visibility pop

}  // namespace voxmma
