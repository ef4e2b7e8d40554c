// fp32 forward and input gradient on tensor cores, mma.sync.
//   3xtf32  operands split into two tf32 pieces, three products, sums of 8 products added in fp32, to nearest: the error
//           is that of SIMT fp32 or less, except near the end of the exponent range. An operand loses up to 2^-136
//           (tf32 numbers are multiples of that), so subnormal operands leave errors of up to 2^-136 * sum|w|; results
//           are non-finite where an operand is, or rounds to inf in tf32 (beyond 2^128 (1 - 2^-12)).
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
  };
  return entries;
}

}  // namespace voxmma
