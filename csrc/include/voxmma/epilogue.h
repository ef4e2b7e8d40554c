// What follows a sum of a convolution or a norm: activations, and numbers of every channel.
#pragma once

#include <cstdint>

#include "voxmma/dtypes.h"

namespace voxmma {

#pragma GCC visibility push(default)  // device.h

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

#pragma GCC visibility pop

}  // namespace voxmma
