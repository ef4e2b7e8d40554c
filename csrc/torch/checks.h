// Argument checks of every op: one text on CUDA and, through voxmma._C.check_*, on the CPU.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>

namespace voxmma {

using at::ScalarType;
using at::Tensor;
using at::TensorList;
using OptTensor = std::optional<Tensor>;
using OptDtype = std::optional<ScalarType>;
using std::string_view;

constexpr size_t kPlanTensors = 7, kPairTensors = 4;

const char* dtype_name(ScalarType t);
bool is_supported(ScalarType t);
ScalarType sum_type(ScalarType t);  // what sums of t are kept in: float64 of float64, else float32
void check_tensor(const char* name, const Tensor& t, int64_t dim, const Tensor& x);

// A kernel map as tensors (README, "Kernel maps"): on CUDA [order, schedule, passes, frag, uniq, local, size], elsewhere
// [in_rows, out_rows, kptr, size], size being an empty tensor of shape (0, n_in, n_out). Contents are the map builder's
// business; checked here is what can be without a copy. `n_in`: rows that the map is read for, -1: none are.
void check_map(const char* name, TensorList map, const Tensor& x, int64_t kernel_volume, int64_t n_in, int64_t n_out);

// A contiguous tensor in the memory of `whole`, from the `begin`th int32 of its storage on. No dispatch, and no view: writes
// are counted by themselves.
Tensor part_of(const Tensor& whole, int64_t begin, at::IntArrayRef sizes, ScalarType dtype = at::kInt);

// Changes whenever torch writes into one of the tensors.
int64_t version_of(TensorList tensors);

struct Shape {
  int64_t volume, groups, c_in, c_out;  // channels per group, of the convolution that runs (after transposition)
  ScalarType out;
};

// The weight and bias of a convolution, checked as far as they go.
Shape check_weight(const Tensor& weight, const OptTensor& bias, bool transpose);
Shape check_conv(const Tensor& x, const Tensor& weight, const OptTensor& bias, TensorList map, int64_t n_out,
                 bool transpose, string_view accumulator, OptDtype out_dtype);
// What conv_fused takes beside: numbers of every channel, and what is added to and done with rows.
void check_channels(const Shape& s, const OptTensor& scale, const OptTensor& shift, const OptTensor& mean,
                    const OptTensor& var, const Tensor& x);
void check_fused(const Shape& s, int64_t n_out, const OptTensor& residual, string_view activation, const OptTensor& out,
                 const Tensor& x);
// Place of an activation among kActivations, which are those of epilogue.h; throws where it is unknown.
inline constexpr const char* kActivations[] = {"none", "relu", "leaky_relu", "silu", "gelu"};
int activation_index(string_view activation);

Shape check_wgrad(const Tensor& x, const Tensor& dy, TensorList map, int64_t kernel_volume, int64_t groups,
                  string_view accumulator, OptDtype out_dtype);

// norm_act: (n, C) rows, (C,) numbers; residual or gradient of the rows' shape and dtype.
void check_norm(const Tensor& x, const OptTensor& weight, const OptTensor& bias, const OptTensor& running_mean,
                const OptTensor& running_var, const OptTensor& residual);
// Whether norm_act keeps what this activation passed, where there is a residual.
bool keeps_passed(string_view activation);

// The type of the offsets that pool_max keeps, kernel_volume standing for "none": winner_bytes() of pool.h.
ScalarType winner_dtype(int64_t kernel_volume);

// A pooling op from the rows of x to n_out rows over `map`; `name` is what the caller calls it. `winner` has
// `winner_rows` rows; what an op does not have is nullopt.
void check_pool(const Tensor& x, const OptTensor& in_count, const OptTensor& out_count, const OptTensor& winner,
                int64_t winner_rows, const char* name, TensorList map, int64_t kernel_volume, int64_t n_out);
void check_segments(const Tensor& x, const OptTensor& candidates, const Tensor& rows, const Tensor& starts);

}  // namespace voxmma
