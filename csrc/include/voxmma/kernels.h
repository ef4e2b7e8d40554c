// The kernel library's whole interface. No torch header is included here or below: the library is built by
// CMakeLists.txt on its own, and csrc/binding.cpp is the one file that knows both sides.
//
// Vocabulary (README.md has the picture):
//   tile      kTileM output rows that lie next to each other on a Morton curve
//   pass      up to kPassOffsets kernel offsets of one tile whose unique input rows fit in kUniqueMax shared rows
//   fragment  kFragRows consecutive rows of a tile; a bit per offset says whether any of them has a neighbour
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace voxmma {

inline constexpr int kTileM = 256;        // output rows of a tile
inline constexpr int kFragRows = 16;      // rows of one MMA m16 fragment, the unit that is skipped
inline constexpr int kFrags = kTileM / kFragRows;
inline constexpr int kUniqueMax = 512;    // unique input rows of a pass, resident in shared memory
inline constexpr int kMissing = kUniqueMax;  // local index of "no neighbour": the shared zero row behind the unique rows
inline constexpr int kPassOffsets = 32;   // offsets of a pass: one bit each in a 32-bit fragment mask

enum class DType : int { f16 = 0, bf16 = 1, f32 = 2, f64 = 3 };
enum class Accum : int { f32 = 0, f16 = 1, f16_promoted = 2, f64 = 3 };
enum class Op : int { fprop = 0, wgrad = 1 };  // dgrad is fprop over the transposed map

// One pass of a tile. Passes of a tile are consecutive and cover offsets 0..K-1 in order, each offset once.
struct Pass {
  int k_begin;      // first offset
  int k_count;      // number of offsets, 1..kPassOffsets
  int uniq_begin4;  // first entry in `uniq`, in units of 4 entries (16-byte aligned; reaches past 2^31 entries)
  int uniq_count;   // unique input rows, 0..kUniqueMax
};

// Device pointers of a tile plan. T = tiles = ceil(n_out / kTileM), K = kernel_volume.
struct PlanView {
  const int* order;            // [T * kTileM] caller's output row of each tile row; -1 pads the last tile
  const int2* tile_pass;       // [T] {first pass, number of passes}
  const Pass* passes;          // [number of passes, in no particular order between tiles]
  const uint32_t* frag;        // [passes][kFrags] bit j: offset k_begin + j has a neighbour in that fragment
  const int* uniq;             // unique input rows of all passes
  const uint16_t* local;       // [T][K][kTileM] index into the pass's unique rows, kMissing = no neighbour
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
  int m, n, k;         // fprop: output rows x output channels x channel chunk; wgrad: C_in x C_out block x rows a step
  int stages;          // weight (fprop) or row (wgrad) stages in flight
  const char* atom;    // CuTe MMA atom, or "SIMT"
  int promote;         // channels between promotions of an fp16 accumulator or a 3xTF32 sum to fp32 registers;
                       // 0 = never, -1 = every offset
  int arch;            // 80: sm_80 and newer; 90: sm_90a only
};

// Arguments of one launch. Channels are per group; strides are in elements.
struct ConvArgs {
  PlanView plan;
  const void* a;        // x (n_in, lda) in the config's input type
  int64_t lda;          // row stride; MMA kernels need a multiple of 16 bytes and a 16-byte aligned base
  int64_t a_group;      // first channel of group g = g * a_group
  const void* b;        // fprop: packed weight image (pack_weight). wgrad: dy (n_out, ldb), aligned as `a`
  int64_t ldb, b_group; // wgrad only
  const float* bias;    // fprop: (groups * c_out) fp32 or null
  void* out;            // fprop: y (n_out, ldo). wgrad: dW (K, groups, c_in, c_out) contiguous
  int64_t ldo;          // fprop: row stride of y; group g writes channels g * c_out ...
  DType out_dtype;      // the input type or f32 (f64 for f64 input)
  int c_in, c_out, groups;
  void* workspace;      // at least workspace(args) bytes, 256-byte aligned
  int sm_count;         // multiprocessors of the device
};

struct KernelEntry {
  TileConfig config;
  size_t (*workspace)(const ConvArgs&);                  // bytes of scratch; does not touch the device
  cudaError_t (*launch)(const ConvArgs&, cudaStream_t);  // enqueues everything on the stream, never synchronises
};

// Every compiled kernel, in table order; nullptr when the name is unknown.
const std::vector<KernelEntry>& kernel_table();
const KernelEntry* find_kernel(const char* name);

// Weight image for fprop kernels with channel block n (= config.n) and channel chunk k (= config.k):
// image[g][nb][offset][chunk][n rows][k columns], K-major (row = output channel), in `input` type, zero padded,
// the 16-byte pieces of a row of R bytes xor-swizzled: R = 128: piece ^ (row & 7), R = 64: piece ^ ((row >> 1) & 3),
// R = 32: piece ^ ((row >> 2) & 1).
// This is both the wgmma canonical layout (SWIZZLE_128B / 64B / 32B) and conflict-free for ldmatrix.
struct PackArgs {
  const void* weight;   // (K, groups, rows, cols) contiguous, `weight_dtype`; fprop: rows = c_in, cols = c_out
  DType weight_dtype;   // converted to `input` with round to nearest
  DType input;
  void* image;
  int kernel_volume, groups;
  int c_in, c_out;      // of the convolution that will run (after transposition)
  bool transpose;       // weight is stored (K, groups, c_out, c_in): dgrad
  bool mirror;          // image offset k takes weight offset K-1-k: dgrad of a symmetric map
  int n, k;             // config.n, config.k
  const void* bias;     // (groups * c_out,) contiguous of `bias_dtype`, or null: no bias32 is written
  DType bias_dtype;
  float* bias32;        // what ConvArgs::bias takes
};
size_t packed_weight_bytes(const PackArgs&);
cudaError_t pack_weight(const PackArgs&, cudaStream_t);

// ---- coordinates and maps -------------------------------------------------------------------------------------
// Packed key of (batch, x, y, z): kCoordBits bits an axis, biased by kCoordBias, Morton-interleaved, batch above them.
inline constexpr int kCoordBits = 18;                       // -131072 .. 131071
inline constexpr int kCoordBias = 1 << (kCoordBits - 1);
inline constexpr int kBatchMax = 1022;                      // batch 0..1022; the all-ones key marks an empty slot

// What index_coords found out, in device memory. Rows are -1 when there is nothing to report.
struct CoordStats {
  int64_t bad_row;        // smallest row outside the packable range
  int64_t duplicate_row;  // smallest row whose coordinate stands in an earlier row too
  int64_t twin_row;       // the earliest row with that coordinate
  int min[4], max[4];     // over b, x, y, z
};

struct IndexArgs {
  const int* coords;   // (n, 4) b,x,y,z contiguous
  int64_t n;
  uint64_t* keys;      // [capacity] open-addressing hash table: packed key
  int* rows;           // [capacity] its row
  int64_t capacity;    // power of two >= 2 n, from hash_capacity(n)
  int* order;          // [n] rows in Morton order (stable)
  CoordStats* stats;
  void* workspace;
};
int64_t hash_capacity(int64_t n);
size_t index_workspace(int64_t n);
cudaError_t index_coords(const IndexArgs&, cudaStream_t);

// Builds a tile plan: the neighbour of output row i under offset k is the input row at
//   q = (out_coord * mul + add[k]), required divisible by div in every axis, q / div   (batch unchanged).
struct PlanStats {        // device memory; on overflow of a capacity the counts still say what is needed
  int64_t uniq4;          // entries of uniq used, in units of 4
  int64_t passes;         // passes used
  int64_t pairs;          // (offset, output row) pairs with a neighbour
};
struct PlanArgs {
  const int* out_coords; const int* out_order; int64_t n_out;   // Morton order of the output rows
  const uint64_t* keys; const int* rows; int64_t capacity; int64_t n_in;  // hash table of the input rows
  const int* add;       // device (K, 3)
  int mul[3], div[3];
  int kernel_volume;
  int* order; int2* tile_pass; Pass* passes; uint32_t* frag; int* uniq; uint16_t* local;  // PlanView, to be written
  int64_t pass_capacity, uniq4_capacity;
  PlanStats* stats;
};
cudaError_t build_plan(const PlanArgs&, cudaStream_t);

// Neighbour table (K, n_out) int32, -1 = none, from a plan: for inspection and tests.
cudaError_t plan_to_table(const PlanView&, int* table, cudaStream_t);

}  // namespace voxmma
