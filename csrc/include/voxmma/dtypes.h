// The element types, in one table that everything else about them is made from: X(DType, type in CUDA, name, and what torch calls
// it in C++ and in Python).
#pragma once

#define VOXMMA_DTYPES(X)                               \
  X(f16, __half, "fp16", Half, "float16")              \
  X(bf16, __nv_bfloat16, "bf16", BFloat16, "bfloat16") \
  X(f32, float, "fp32", Float, "float32")              \
  X(f64, double, "fp64", Double, "float64")

namespace voxmma {

#define VOXMMA_DTYPE(dtype, ...) dtype,
enum class DType : int { VOXMMA_DTYPES(VOXMMA_DTYPE) };
#undef VOXMMA_DTYPE
#define VOXMMA_ONE(...) +1
inline constexpr int kDTypes = 0 VOXMMA_DTYPES(VOXMMA_ONE);
#undef VOXMMA_ONE

}  // namespace voxmma
