// Coordinates and maps: sets of voxels, their index, the sets that layers make of them, and tile plans between sets.
#pragma once

#include <cstddef>
#include <cstdint>

#include "voxmma/device.h"
#include "voxmma/plan.h"

namespace voxmma {

#pragma GCC visibility push(default)  // device.h

inline constexpr int kCoordBits = 18;  // -131072 .. 131071
inline constexpr int kCoordBias = 1 << (kCoordBits - 1);
inline constexpr int kBatchMax = 1022;  // batch 0 .. 1022
inline constexpr int kMaxKernel = 9;    // offsets along an axis
inline constexpr int kMaxStride = 4096;

// The 2x2x2 voxels of one batch with the same x >> 1, y >> 1, z >> 1. Voxels of a brick are neighbours in Morton order:
// the k-th set bit of `mask`, from bit 0, is the voxel of rank first + k. The rank of a voxel is its place in the order.
// A slot of the hash table. In memory, kBucket slots are a bucket: their keys, whose upper words are all ones where the
// slot is empty, then (first, mask) of each.
inline constexpr int kBucket = 4;
struct alignas(16) Brick {
  uint32_t key[2];
  int first;
  uint32_t mask;  // bit (x & 1) * 4 + (y & 1) * 2 + (z & 1)
};

// A box around coordinates (batch, x, y, z): low <= v < low + 2^bits. low is even on x, y and z, so that Morton codes
// of v - low keep bricks together. 64 bits in all are enough for every packable coordinate.
struct CoordBox {
  int low[4], bits[4];
};
int bits_of(const CoordBox& box);                     // in all
CoordBox box_around(const int* min, const int* max);  // [4] each; empty where min > max

// What survey_coords and order_coords found out, in device memory. -1 when there is nothing to report.
struct CoordStats {
  int64_t bad_row;    // smallest row outside the packable range
  int64_t duplicate;  // smallest row that repeats an earlier one << 32 | the earliest such row; of order_coords
  int64_t bricks;     // of order_coords
  int min[4], max[4];
};

// Where the number of rows is known to the device only (`count`, null elsewhere), the number on the host is a capacity:
// what is allocated and launched for. Less than 0 rows and more than the capacity count as none and as the capacity.

// What order_coords found out about a number of rows that the device knows.
struct SizedStats {
  int64_t count;              // as given
  int64_t bad_row;            // smallest row outside OrderArgs::low .. high, -1: none
  int64_t duplicate, unused;  // as in CoordStats, of rows within the bounds
};

// Order of the rows along a Morton curve, rows of one place in the caller's order.
struct OrderArgs {
  const int* coords;  // (n, 4) b,x,y,z contiguous, 16-byte aligned
  int64_t n;
  CoordBox box;       // around all rows
  CoordStats* stats;  // null: rows are known to be valid
  int* order;         // [n] row of each rank
  void* workspace;    // order_workspace(n) bytes, 256-byte aligned
  // With a `count`, `stats` is null and the box is around these bounds, against which rows are checked; bad ones come
  // last. The order is that of the box around the others, whose bounds, smallest and largest, are written to `bounds`.
  // Without `sized`, rows are known to be valid, and `bounds` are given.
  const int64_t* count;
  int low[4], high[4];
  SizedStats* sized;
  int* bounds;  // [8]
};

size_t order_workspace(int64_t n);
cudaError_t order_coords(const OrderArgs&, cudaStream_t);

// Hash table of the bricks of an ordered set. `bricks` -1: not known.
int64_t brick_capacity(int64_t n, int64_t bricks);
// Rows that are not packable are left out.
cudaError_t build_bricks(const int* coords, const int* order, int64_t n, const int64_t* count, Brick* table,
                         int64_t capacity, cudaStream_t);

// order_coords of a `sized` set and build_bricks in one, in another workspace; of a box of up to 2^32 cells without a sort.
// Of rows of one place the first has their rank then; the others come last, with bad ones, in no particular order.
size_t index_workspace(const CoordBox& box, int64_t n);
cudaError_t index_coords(const OrderArgs&, Brick* table, int64_t capacity, cudaStream_t);

// A set as two bitmaps over the cells of a box, for boxes of up to 2^27 cells: sorted rows and their index without a
// sort. The box is a cell_box(); the bitmaps and what is counted lie in a workspace of cell_workspace(box) bytes, 256-byte
// aligned. In this order: clear_cells; what sets bits (expand_cells); count_cells, where the
// host asks how many there are; index_cells.
struct CellStats {  // device memory
  int64_t count;    // cells of the set
  int64_t outside;  // not 0: a site lies outside the packable range
  int64_t bricks;
};
CoordBox cell_box(CoordBox box);             // not less than a brick
size_t cell_workspace(const CoordBox& box);  // 0: too many cells
CellStats* cell_stats(const CoordBox& box, void* workspace);
cudaError_t clear_cells(const CoordBox& box, void* workspace, cudaStream_t);
cudaError_t count_cells(const CoordBox& box, void* workspace, cudaStream_t);
// (count, 4) coordinates sorted by (batch, x, y, z), row of each rank in Morton order, and the hash table of bricks.
// `made` not null: the host does not know how many cells there are, nobody has counted them, and `count` is the room for
// them. found->count tells how many there were, *made how many are there: all, or none where there is not room for all. Where
// the device knows the `bounds`, smallest and largest coordinates, `box` is one that theirs is not larger than.
cudaError_t index_cells(const CoordBox& box, const int* bounds, void* workspace, int64_t count, int* coords, int* order,
                        Brick* table, int64_t capacity, CellStats* found, int64_t* made, cudaStream_t);

// Checks rows and marks them in a bitmap in Morton order. Where survey_holds(stats, n), all are packable and distinct,
// and index_survey makes their order and the hash table of stats.cells.bricks bricks. Else coords.bad_row is a row, or rows
// repeat, or the box around them is too large for the bitmap, and it takes order_coords to tell.
struct SurveyStats {
  CoordStats coords;  // extents and bad_row
  CellStats cells;
};
size_t survey_workspace(int64_t n);
cudaError_t survey_coords(const int* coords, int64_t n, SurveyStats* stats, void* workspace, cudaStream_t);
bool survey_holds(const SurveyStats& stats, int64_t n);
cudaError_t index_survey(const SurveyStats& stats, const int* coords, int64_t n, void* workspace, int* order,
                         Brick* table, int64_t capacity, cudaStream_t);

// Output coordinates of a layer, first step: keys of all distinct sites that the rows lead to, in no order.
//   to_children: row * stride - padding + k * dilation for every k; else the s with s * stride - padding + k * dilation =
//   row for some k
struct ExpandStats {  // device memory, zero before the first piece
  int64_t count;      // distinct keys so far
  int64_t outside;    // not 0: a site lies outside the packable range
};
struct ExpandArgs {
  const int* coords;
  int64_t n;  // (n, 4) rows of this piece
  int size[3], stride[3], dilation[3], padding[3];
  bool to_children;
  int shape[3];  // sites outside of [0, shape) are none; 0: no border
  CoordBox box;  // around all packable sites
  // Number of all rows, of which this piece's first one is row `begin`; bounds of the rows, smallest and largest, and
  // those of the sites, to be written, where the device knows them better than `box`.
  const int64_t* count;
  int64_t begin;
  const int* row_bounds;
  int* bounds;
  void* table;
  int64_t capacity;  // hash table of keys, all bytes 0xff before the first piece
  void* keys;        // room for expand_bound(args) more than stats->count, or with a `count`, for `room` in all
  int64_t room;      // where there are more keys, stats->count is some number above
  ExpandStats* stats;
};
size_t key_bytes(const CoordBox& box);         // of one key: 4 or 8
int64_t expand_bound(const ExpandArgs& args);  // most sites that the rows lead to
int64_t expand_capacity(int64_t keys);         // slots of a table for that many keys
cudaError_t expand_coords(const ExpandArgs&, cudaStream_t);
// The same into bitmaps: without table, keys and stats. Sets CellStats::outside.
cudaError_t expand_cells(const ExpandArgs&, void* workspace, cudaStream_t);
// All of it in one launch, for few candidates of a small box: coordinates sorted by (batch, x, y, z), row of each rank in
// Morton order, hash table of bricks; `found` may be page-locked memory of the host. There is room for as many as few_cells
// says: most sites that the rows lead to, 0 where they or the cells of the box, a cell_box(), are too many.
int64_t few_cells(const ExpandArgs&);
cudaError_t derive_few_cells(const ExpandArgs&, int* coords, int* order, Brick* table, int64_t capacity,
                             CellStats* found, cudaStream_t);
// Puts `count` distinct keys into an empty, larger table.
cudaError_t rehash_keys(const CoordBox& box, const void* keys, int64_t count, void* table, int64_t capacity,
                        cudaStream_t);
// Second step: (count, 4) coordinates sorted by (batch, x, y, z). Where the device alone knows how many keys there are,
// count_keys tells as index_cells does, `count` is the room for them, and keys behind them are all bytes 0xff.
cudaError_t count_keys(const ExpandStats* stats, int64_t room, CellStats* found, int64_t* made, cudaStream_t);
size_t unpack_workspace(const CoordBox& box, int64_t count);
cudaError_t unpack_keys(const CoordBox& box, const void* keys, int64_t count, const int64_t* made, int* coords,
                        void* workspace, cudaStream_t);

// Builds a tile plan: the neighbour of output row i under offset k is the input row at
//   q = out_coord * mul + start + index_of_k * step, required divisible by div in every axis, q / div (batch unchanged),
// index_of_k lexicographic, last axis fastest.
struct PlanStats {  // device memory; on overflow of a capacity the counts still say what is needed
  int64_t uniq4;    // entries of uniq used, in units of 4
  int64_t passes;   // passes used
  int64_t pairs;    // (offset, output row) pairs with a neighbour
  int64_t done;     // tiles that are done, while the plan is built; then 0
};
// With an out_count, tiles without rows and those that find no room are empty, and all of them share
// empty_passes(kernel_volume) passes without unique rows, for which `passes` and `frag` have room behind pass_capacity.
struct PlanArgs {
  const int* out_coords;
  const int* out_order;
  int64_t n_out;  // row of each rank of the outputs
  const int64_t* out_count;
  const Brick* bricks;
  int64_t capacity;
  const int* in_order;
  int64_t n_in;  // of the inputs
  int size[3], start[3], step[3], mul[3], div[3];
  // PlanView, to be written:
  int* order;
  ScheduledTile* schedule;
  Pass* passes;
  uint32_t* frag;
  int* uniq;
  uint16_t* local;
  int64_t pass_capacity, uniq4_capacity;
  bool compact;  // with an out_count: the schedule is [2][tiles that have rows], the others are on none
  PlanStats* stats;
  int sm_count;  // of the device: the windows of the schedule fit it
};
constexpr int empty_passes(int kernel_volume) { return (kernel_volume + kPassOffsets - 1) / kPassOffsets; }
// Capacities that always suffice; a plan rarely comes near them.
void plan_bounds(const PlanArgs&, int64_t* passes, int64_t* uniq4);
cudaError_t build_plan(const PlanArgs&, cudaStream_t);
// Several plans, in few launches: small ones are built side by side.
cudaError_t build_plans(const PlanArgs* args, int count, cudaStream_t);

// Neighbour table (K, n_out) int32, -1 = none, from a plan: for inspection and tests.
cudaError_t plan_to_table(const PlanView&, int* table, cudaStream_t);

#pragma GCC visibility pop

}  // namespace voxmma
