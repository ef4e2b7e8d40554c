// fp32 forward and input gradient on tensor cores, mma.sync.
//   3xtf32  operands split into two tf32 pieces, three products, sums of 8 products added in fp32, to nearest. One product
//           is off by up to 2^-21 of itself; from about 16 products a cell on, errors are those of SIMT fp32 or less.
//           Not so near the ends of the exponent range: an operand loses up to 2^-136 (tf32 numbers are multiples of
//           that), so subnormal activations leave errors of up to 2^-136 * sum|w|; and a result is NaN where an input
//           is infinite, and non-finite where one rounds to inf in tf32 (beyond 2^128 (1 - 2^-12)).
//   tf32    operands rounded to tf32 (unit 2^-11), one product, fp32 sums truncated by the tensor core
#include "fprop_sm80.cuh"

namespace voxmma {

const std::vector<KernelEntry>& fprop_f32_entries() {
  constexpr DType kIn = DType::f32;
  static const std::vector<KernelEntry> entries = {
      fprop_sm80_entry<FpropSm80<kIn, Accum::f32, 32, 32, 8>>("sm80_f32_256x32x32_3xtf32"),
      fprop_sm80_entry<FpropSm80<kIn, Accum::f32, 64, 32, 8>>("sm80_f32_256x64x32_3xtf32"),
      fprop_sm80_entry<FpropSm80<kIn, Accum::f32, 32, 32>>("sm80_f32_256x32x32_tf32"),
      fprop_sm80_entry<FpropSm80<kIn, Accum::f32, 64, 32>>("sm80_f32_256x64x32_tf32"),
      fprop_sm80_entry<FpropSm80<kIn, Accum::f32, 64, 32, 0, 2>>("sm80_f32_256x64x32_small_tf32"),
  };
  return entries;
}

}  // namespace voxmma
