// The kernel library's whole interface. No torch header is included here or below: the library is built by
// CMakeLists.txt on its own, and csrc/torch knows both sides.
//
// Vocabulary (README.md has the picture):
//   tile      kTileM output rows that lie next to each other on a Morton curve
//   pass      up to kPassOffsets kernel offsets of one tile whose unique input rows fit in kUniqueMax shared rows
//   fragment  kFragRows consecutive rows of a tile; a bit per offset says whether any of them has a neighbour
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "voxmma/device.h"
#include "voxmma/dtypes.h"

namespace voxmma {

#pragma GCC visibility push(default)  // device.h

inline constexpr int kTileM = 256;    // output rows of a tile
inline constexpr int kFragRows = 16;  // rows of one MMA m16 fragment, the unit that is skipped
inline constexpr int kFrags = kTileM / kFragRows;
inline constexpr int kUniqueMax = 512;  // unique input rows of a pass, resident in shared memory
inline constexpr int kMissing =
    kUniqueMax;                          // local index of "no neighbour": the shared zero row behind the unique rows
inline constexpr int kPassOffsets = 32;  // offsets of a pass: one bit each in a 32-bit fragment mask

enum class Accum : int { f32 = 0, f16 = 1, f16_promoted = 2, f64 = 3 };
enum class Op : int { fprop = 0, wgrad = 1 };  // dgrad is fprop over the transposed map

// One pass of a tile. Passes of a tile are consecutive and cover offsets 0..K-1 in order, each offset once.
struct Pass {
  int k_begin;      // first offset
  int k_count;      // number of offsets, 1..kPassOffsets
  int uniq_begin4;  // first entry in `uniq`, in units of 4 entries (16-byte aligned; reaches past 2^31 entries)
  int uniq_count;   // unique input rows, 0..kUniqueMax
};

// A row of a schedule, the order in which kernels take the tiles. There are two: the balanced one has the tiles of a
// window heaviest first, so that workers who are dealt tiles in turn get nearly the same sum; a window is small enough
// that the tiles worked on at a time stay neighbours and share input rows in L2. The other is the Morton order.
struct ScheduledTile {
  int tile;                // 0..T-1: rows tile * kTileM ... of `order`
  int first_pass, passes;  // its passes
  int cost;                // offsets used by each 64-row block, summed
};

// Device pointers of a tile plan. T = tiles = ceil(n_out / kTileM), K = kernel_volume.
struct PlanView {
  const int* order;               // [T * kTileM] caller's output row of each tile row; -1 pads the last tile
  const ScheduledTile* schedule;  // [2][T] balanced, then in Morton order
  const Pass* passes;             // [number of passes, in no particular order between tiles]
  const uint32_t* frag;           // [passes][kFrags] bit j: offset k_begin + j has a neighbour in that fragment
  const int* uniq;                // unique input rows of all passes
  const uint16_t* local;          // [T][K][kTileM] index into the pass's unique rows, kMissing = no neighbour
  int tiles;
  int kernel_volume;
  int64_t n_out, n_in;
};

// Printable description of one compiled kernel: a row of the tile table.
struct TileConfig {
  const char* name;
  Op op;
  DType input;
  Accum accum;
  int m, n, k;        // fprop: output rows x output channels x channel chunk; wgrad: C_in x C_out block x rows a step
  int stages;         // weight (fprop) or row (wgrad) stages in flight
  const char* atom;   // CuTe MMA atom, or "SIMT"
  int promote;        // channels between promotions of an fp16 accumulator or a 3xTF32 sum to fp32 registers;
                      // 0 = never, -1 = every offset
  int arch;           // 80: sm_80 and newer; 90: sm_90a only
  int shared_memory;  // dynamic shared memory of a block, bytes; the device must allow it
};

// A tensor of weights as it lies: the one of offset k, group g, input channel i and output channel o of the convolution
// that runs is element first + k * offset + g * group + i * in + o * out.
struct Weights {
  const void* data;
  DType dtype;
  int64_t first, offset, group, in, out;
};
// Of (K, groups, rows, columns), elements `strides` apart. Rows are the input channels, of dgrad (`transpose`) the output
// channels; over a symmetric map dgrad takes the offsets from the last one on (`mirror`).
inline Weights weights_of(const void* data, DType dtype, int64_t kernel_volume, const int64_t (&strides)[4],
                          bool transpose, bool mirror) {
  return {data,
          dtype,
          mirror ? (kernel_volume - 1) * strides[0] : 0,
          mirror ? -strides[0] : strides[0],
          strides[1],
          strides[transpose ? 3 : 2],
          strides[transpose ? 2 : 3]};
}

// The weights as the caller gave them, for those that the image does not hold (PackArgs).
struct RawWeights {
  Weights of;
  const uint8_t* flags;  // [flag_bytes], 16-byte aligned: all zero where every weight is finite
  int flag_bytes;
};

// Row r of an operand of the wgmma kernels begins less than this many bytes behind row 0: they count 16-byte pieces in 32
// bits, all ones standing for no row. Other kernels reach any row.
inline constexpr int64_t kWgmmaSpan = int64_t{0xffffffff} * 16;
constexpr bool in_wgmma_span(int64_t rows, int64_t row_bytes) {
  return rows <= 1 || row_bytes <= (kWgmmaSpan - 1) / (rows - 1);
}
static_assert(in_wgmma_span(8388608, 8192) && !in_wgmma_span(8388609, 8192) && in_wgmma_span(8388609, 8176));
static_assert(in_wgmma_span(1, INT64_MAX) && in_wgmma_span(INT32_MAX, 32) && !in_wgmma_span(INT32_MAX, 48));

enum class Activation : int { none = 0, relu = 1, leaky_relu = 2, silu = 3, gelu = 4 };  // gelu: with erf

// What an fprop kernel does to a sum besides adding the bias, in the type of its sums (fp32, of fp64 kernels fp64) and
// before the one rounding: y = activation(scale * sum + bias + residual).
struct Epilogue {
  const void* scale;     // (groups * c_out) in the type of the sums, 16-byte aligned, with a bias; null: 1
  const void* residual;  // (n_out, ldr) of out_dtype, must not overlap `out`; null: none
  int64_t ldr;
  Activation activation;
  double slope;  // of leaky_relu
};

// Numbers of every output channel, (groups * c_out,) contiguous of `dtype`.
struct PerChannel {
  const void* values;  // null: the default
  DType dtype;
};
// What becomes ConvArgs::bias and Epilogue::scale: sum -> (sum + bias - mean) / sqrt(var + eps) * scale + shift, which is
// a batch norm behind a convolution with bias, as one factor and one summand, made in fp64 and rounded once.
struct Channels {
  PerChannel bias, mean, shift;  // default 0
  PerChannel scale;              // default 1
  PerChannel var;                // default: nothing is divided by
  double eps;
  DType sums;              // f32, of fp64 kernels f64
  void *summand, *factor;  // (groups * c_out) of `sums`; null: not written

  bool has_factor() const { return scale.values != nullptr || var.values != nullptr; }
  bool has_summand() const {
    return has_factor() || bias.values != nullptr || mean.values != nullptr || shift.values != nullptr;
  }
};

// Arguments of one launch. Channels are per group; strides are in elements.
struct ConvArgs {
  PlanView plan;
  const void* a;         // x (n_in, lda) in the config's input type
  int64_t lda;           // row stride; MMA kernels need a multiple of 16 bytes and a 16-byte aligned base
  int64_t a_group;       // first channel of group g = g * a_group
  const void* b;         // fprop: packed weight image (pack_weight). wgrad: dy (n_out, ldb), aligned as `a`
  int64_t ldb, b_group;  // wgrad only
  RawWeights raw;        // fprop
  Channels channels;     // fprop: where the kernel reads `raw.of` itself, the numbers that it makes of them
  const void* bias;      // fprop: (groups * c_out) in the type of the sums, 16-byte aligned, or null
  Epilogue epilogue;     // fprop
  void* out;             // fprop: y (n_out, ldo), columns of a wider tensor too. wgrad: dW (K, groups, c_in, c_out)
                         // contiguous
  int64_t ldo;           // fprop: row stride of y; group g writes channels g * c_out ...
  DType out_dtype;       // the input type or f32 (f64 for f64 input)
  int c_in, c_out, groups;
  void* workspace;  // at least workspace(args) bytes, 256-byte aligned
  int sm_count;     // multiprocessors of the device
};

struct KernelEntry {
  TileConfig config;
  size_t (*workspace)(const ConvArgs&);                  // bytes of scratch; does not touch the device
  cudaError_t (*launch)(const ConvArgs&, cudaStream_t);  // enqueues everything on the stream, never synchronises
  int (*parts)(const ConvArgs&) = nullptr;  // fprop: CTAs that share an item. wgrad: partial sums of dW. Null: always 1
  // fprop: whether the launch can read `raw.of` itself and take `channels`: then `b`, `bias`, `epilogue.scale` may be
  // null. Null: never
  bool (*reads_weights)(const ConvArgs&) = nullptr;
  int narrow = 0;  // fprop: if c_in is no more, a row of the weight image has so many channels, and not config.k

  int image_channels(int c_in) const { return c_in <= narrow ? narrow : config.k; }
};

// Every compiled kernel, in table order; nullptr when the name is unknown.
const std::vector<KernelEntry>& kernel_table();
const KernelEntry* find_kernel(const char* name);

// Rows of a launch without inputs: y of ConvArgs where every sum is 0. `sums` as in Channels.
cudaError_t store_zero_sums(const ConvArgs&, DType sums, cudaStream_t);

// Weight image for fprop kernels with channel block n (= config.n) and channel chunk k (= KernelEntry::image_channels):
// image[g][nb][offset][chunk][n rows][k columns], K-major (row = output channel), in `input` type, zero padded,
// the 16-byte pieces of a row of R bytes xor-swizzled: R = 128: piece ^ (row & 7), R = 64: piece ^ ((row >> 1) & 3),
// R = 32: piece ^ ((row >> 2) & 1).
// This is both the wgmma canonical layout (SWIZZLE_128B / 64B / 32B) and conflict-free for ldmatrix.
// A weight that is not finite in `input` type is not in the image of an MMA kernel but left to conv/nonfinite.cuh: the
// rows of zeros that stand for missing neighbours would turn it into NaN. SIMT kernels' images (k = 1) hold all.
struct PackArgs {
  Weights weights;  // converted to `input` with round to nearest
  DType input;
  void* image;
  uint8_t* flags;  // [pack_flag_bytes], what RawWeights::flags takes
  int kernel_volume, groups;
  int c_in, c_out;  // of the convolution that will run (after transposition)
  int n, k;         // config.n, KernelEntry::image_channels
  Channels channels;
};
size_t packed_weight_bytes(const PackArgs&);
int pack_flag_bytes(const PackArgs&);
cudaError_t pack_weight(const PackArgs&, cudaStream_t);

// ---- batch norm in training -------------------------------------------------------------------------------------
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

// ---- coordinates and maps -------------------------------------------------------------------------------------
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

// ---- pooling ----------------------------------------------------------------------------------------------------
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

// ---- points -----------------------------------------------------------------------------------------------------
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

// ---- points -------------------------------------------------------------------------------------------------------
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
