// Convolution: fprop, dgrad and wgrad over a tile plan, packed weights, and the table of compiled kernels.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "voxmma/device.h"
#include "voxmma/dtypes.h"
#include "voxmma/epilogue.h"
#include "voxmma/plan.h"

namespace voxmma {

#pragma GCC visibility push(default)  // device.h

enum class Accum : int { f32 = 0, f16 = 1, f16_promoted = 2, f64 = 3 };
enum class Op : int { fprop = 0, wgrad = 1 };  // dgrad is fprop over the transposed map

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

#pragma GCC visibility pop

}  // namespace voxmma
