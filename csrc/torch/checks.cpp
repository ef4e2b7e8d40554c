#include "checks.h"

#include <ATen/MemoryOverlap.h>

#include <string>
#include <utility>

#include "voxmma/dtypes.h"
#ifdef VOXMMA_WITH_CUDA
#include "voxmma/kernels.h"
#endif

namespace voxmma {

const char* dtype_name(ScalarType t) {
  switch (t) {
#define VOXMMA_CASE(dtype, T, name, torch, torch_name) \
  case ScalarType::torch: return torch_name;
    VOXMMA_DTYPES(VOXMMA_CASE)
#undef VOXMMA_CASE
    default: return c10::toString(t);
  }
}

bool is_supported(ScalarType t) {
#define VOXMMA_IS(dtype, T, name, torch, ...) || t == ScalarType::torch
  return false VOXMMA_DTYPES(VOXMMA_IS);
#undef VOXMMA_IS
}

ScalarType sum_type(ScalarType t) { return t == at::kDouble ? at::kDouble : at::kFloat; }

void check_tensor(const char* name, const Tensor& t, int64_t dim, const Tensor& x) {
  TORCH_CHECK(t.dim() == dim, name, " must have ", dim, " dimensions, got shape ", t.sizes());
#define VOXMMA_LISTED(dtype, T, short_name, torch, torch_name) " " torch_name
  TORCH_CHECK(is_supported(t.scalar_type()), name, " has dtype ", dtype_name(t.scalar_type()),
              "; supported:" VOXMMA_DTYPES(VOXMMA_LISTED));
#undef VOXMMA_LISTED
  TORCH_CHECK(t.device() == x.device(), name, " is on ", t.device(), " but x is on ", x.device());
}

namespace {

void check_accumulator(string_view accumulator, ScalarType t) {
  if (t == at::kDouble) {
    TORCH_CHECK(accumulator == "fp64", "accumulator='", accumulator, "' with float64 x: only 'fp64' exists");
  } else if (accumulator == "fp16" || accumulator == "fp16_promoted") {
    TORCH_CHECK(t == at::kHalf, "accumulator='", accumulator, "' needs float16 x, got ", dtype_name(t));
  } else {
    TORCH_CHECK(accumulator == "fp32", "accumulator='", accumulator, "' is unknown for ", dtype_name(t),
                " x: expected 'fp32', 'fp16' or 'fp16_promoted'");
  }
}

ScalarType check_out_dtype(OptDtype out_dtype, ScalarType x) {
  const ScalarType out = out_dtype.value_or(x);
  TORCH_CHECK(out == x || (out == at::kFloat && x != at::kDouble), "out_dtype=", dtype_name(out), " with ",
              dtype_name(x), " x: expected x's dtype", x == at::kDouble ? "" : " or float32");
  return out;
}

}  // namespace

void check_map(const char* name, TensorList map, const Tensor& x, int64_t kernel_volume, int64_t n_in, int64_t n_out) {
  const bool cuda = x.is_cuda();
  const size_t count = cuda ? kPlanTensors : kPairTensors;
  TORCH_CHECK(map.size() == count, name, " must hold ", count, " tensors on ", x.device(), ", got ", map.size());
  const auto check = [&](size_t i, const char* part, ScalarType t, at::IntArrayRef sizes) {  // -1: any size
    bool same = map[i].dim() == static_cast<int64_t>(sizes.size());
    for (size_t d = 0; same && d < sizes.size(); ++d) same = sizes[d] < 0 || map[i].size(d) == sizes[d];
    TORCH_CHECK(same && map[i].scalar_type() == t && map[i].is_contiguous(), name, "[", i, "] (", part,
                ") must be contiguous ", c10::toString(t), " of shape ", sizes, ", got ",
                c10::toString(map[i].scalar_type()), " of shape ", map[i].sizes(), " (", kernel_volume, " offsets, ",
                n_out, " output rows; -1: any size)");
    TORCH_CHECK(map[i].device() == x.device(), name, "[", i, "] (", part, ") is on ", map[i].device(), " but x is on ",
                x.device());
  };
  const Tensor& size = map[count - 1];
  TORCH_CHECK(size.dim() != 3 || ((n_in < 0 || size.size(1) == n_in) && size.size(2) == n_out), name, " leads from ",
              size.size(1), " to ", size.size(2), " rows, but the call has ",
              n_in < 0 ? "" : std::to_string(n_in) + " input rows and ", n_out, " output rows");
  if (cuda) {
#ifdef VOXMMA_WITH_CUDA
    const int64_t tiles = (n_out + kTileM - 1) / kTileM;
    check(0, "order", at::kInt, {tiles * kTileM});
    check(1, "schedule", at::kInt, {2, tiles, 4});
    check(2, "passes", at::kInt, {-1, 4});
    check(3, "frag", at::kInt, {map[2].size(0), kFrags});
    check(4, "uniq", at::kInt, {-1});
    check(5, "local", at::kShort, {tiles, kernel_volume, kTileM});
#endif
  } else {
    check(0, "in_rows", at::kLong, {-1});
    check(1, "out_rows", at::kLong, {map[0].size(0)});
    check(2, "kptr", at::kLong, {kernel_volume + 1});
  }
  check(count - 1, "size", at::kInt, {0, -1, -1});
}

int64_t version_of(TensorList tensors) {
  int64_t sum = 0;
  for (const Tensor& t : tensors) sum += t.is_inference() ? 0 : static_cast<int64_t>(t._version());
  return sum;
}

Shape check_weight(const Tensor& weight, const OptTensor& bias, bool transpose) {
  check_tensor("weight", weight, weight.dim() == 4 ? 4 : 3, weight);
  Shape s{weight.size(0), weight.dim() == 4 ? weight.size(1) : 1, weight.size(-2), weight.size(-1),
          weight.scalar_type()};
  if (transpose) std::swap(s.c_in, s.c_out);
  TORCH_CHECK(weight.numel() > 0, "weight is empty: shape ", weight.sizes());
  if (bias.has_value()) {
    check_tensor("bias", *bias, 1, weight);
    TORCH_CHECK(bias->size(0) == s.groups * s.c_out, "bias has ", bias->size(0), " entries for ", s.groups * s.c_out,
                " output channels");
  }
  return s;
}

Shape check_conv(const Tensor& x, const Tensor& weight, const OptTensor& bias, TensorList map, int64_t n_out,
                 bool transpose, string_view accumulator, OptDtype out_dtype) {
  check_tensor("x", x, 2, x);
  check_tensor("weight", weight, weight.dim() == 4 ? 4 : 3, x);
  check_accumulator(accumulator, x.scalar_type());
  const ScalarType out = check_out_dtype(out_dtype, x.scalar_type());
  Shape s = check_weight(weight, bias, transpose);
  s.out = out;
  TORCH_CHECK(x.size(1) == s.groups * s.c_in, "x has ", x.size(1), " channels, but ", transpose ? "transposed " : "",
              "weight of shape ", weight.sizes(), " takes ", s.groups * s.c_in);
  TORCH_CHECK(n_out >= 0, "n_out is negative: ", n_out);
  check_map("map", map, x, s.volume, x.size(0), n_out);
  return s;
}

int activation_index(string_view activation) {
  int i = 0;
  for (const char* name : kActivations) {
    if (activation == name) return i;
    ++i;
  }
  TORCH_CHECK(false, "activation='", activation,
              "' is unknown: expected 'none', 'relu', 'leaky_relu', 'silu' or 'gelu'");
}

void check_channels(const Shape& s, const OptTensor& scale, const OptTensor& shift, const OptTensor& mean,
                    const OptTensor& var, const Tensor& x) {
  const auto check = [&](const char* name, const OptTensor& t) {
    if (!t.has_value()) return;
    check_tensor(name, *t, 1, x);
    TORCH_CHECK(t->size(0) == s.groups * s.c_out, name, " has ", t->size(0), " entries for ", s.groups * s.c_out,
                " output channels");
  };
  check("scale", scale);
  check("shift", shift);
  check("mean", mean);
  check("var", var);
}

namespace {

// Whether two (n, channels) tensors of rows with adjacent channels have an element in common, where their rows are as far
// apart in one memory: torch asks that of dense tensors only.
bool rows_overlap(const Tensor& a, const Tensor& b) {
  if (a.numel() == 0 || b.numel() == 0 || !a.is_alias_of(b) || a.scalar_type() != b.scalar_type()) return false;
  const int64_t row = a.stride(0), apart = b.storage_offset() - a.storage_offset();
  if (row < 1 || row != b.stride(0) || a.stride(1) != 1 || b.stride(1) != 1) return false;
  // Row i of b begins `column` behind, or row - column before, the begin of some row of a.
  const int64_t lines = apart < 0 ? -((-apart + row - 1) / row) : apart / row, column = apart - lines * row;
  const auto among = [&](int64_t line) { return line < a.size(0) && line + b.size(0) > 0; };
  return (among(lines) && column < a.size(1)) || (among(lines + 1) && row - column < b.size(1));
}

}  // namespace

void check_fused(const Shape& s, int64_t n_out, const OptTensor& residual, string_view activation, const OptTensor& out,
                 const Tensor& x) {
  activation_index(activation);
  const auto check = [&](const char* name, const OptTensor& t) {
    if (!t.has_value()) return;
    check_tensor(name, *t, 2, x);
    TORCH_CHECK(t->size(0) == n_out && t->size(1) == s.groups * s.c_out && t->scalar_type() == s.out, name, " must be ",
                dtype_name(s.out), " of shape [", n_out, ", ", s.groups * s.c_out, "], got ",
                dtype_name(t->scalar_type()), " of shape ", t->sizes());
  };
  check("residual", residual);
  check("out", out);
  if (!out.has_value()) return;
  TORCH_CHECK((out->size(1) <= 1 || out->stride(1) == 1) && (out->size(0) <= 1 || out->stride(0) >= out->size(1)),
              "out must have adjacent channels and rows that do not overlap, got strides ", out->strides());
  at::assert_no_internal_overlap(*out);
  const auto apart = [&](const char* name, const Tensor& t) {
    at::assert_no_overlap(*out, t);
    TORCH_CHECK(!rows_overlap(*out, t), "out and ", name, " have memory in common");
  };
  apart("x", x);
  if (residual.has_value()) apart("residual", *residual);
}

Shape check_wgrad(const Tensor& x, const Tensor& dy, TensorList map, int64_t kernel_volume, int64_t groups,
                  string_view accumulator, OptDtype out_dtype) {
  check_tensor("x", x, 2, x);
  check_tensor("dy", dy, 2, x);
  TORCH_CHECK(dy.scalar_type() == x.scalar_type(), "dy has dtype ", dtype_name(dy.scalar_type()), " but x has ",
              dtype_name(x.scalar_type()));
  check_accumulator(accumulator, x.scalar_type());
  TORCH_CHECK(kernel_volume > 0, "kernel_volume must be positive, got ", kernel_volume);
  TORCH_CHECK(groups > 0 && x.size(1) > 0 && x.size(1) % groups == 0 && dy.size(1) > 0 && dy.size(1) % groups == 0,
              "groups=", groups, " must divide the channels of x (", x.size(1), ") and of dy (", dy.size(1), ")");
  check_map("map", map, x, kernel_volume, x.size(0), dy.size(0));
  return {kernel_volume, groups, x.size(1) / groups, dy.size(1) / groups, check_out_dtype(out_dtype, x.scalar_type())};
}

void check_norm(const Tensor& x, const OptTensor& weight, const OptTensor& bias, const OptTensor& running_mean,
                const OptTensor& running_var, const OptTensor& residual) {
  check_tensor("x", x, 2, x);
  TORCH_CHECK(x.size(0) >= 2, "x has ", x.size(0), " row(s), of which there are no statistics");
  const auto check = [&](const char* name, const OptTensor& t) {
    if (!t.has_value()) return;
    check_tensor(name, *t, 1, x);
    TORCH_CHECK(t->size(0) == x.size(1), name, " has ", t->size(0), " entries for ", x.size(1), " channels");
  };
  check("weight", weight);
  check("bias", bias);
  check("running_mean", running_mean);
  check("running_var", running_var);
  TORCH_CHECK(running_mean.has_value() == running_var.has_value(), "running_mean and running_var go together");
  if (running_mean.has_value()) {
    TORCH_CHECK(running_mean->is_contiguous() && running_var->is_contiguous() &&
                    running_mean->scalar_type() == running_var->scalar_type(),
                "running_mean and running_var must be contiguous and of one dtype");
  }
  if (!residual.has_value()) return;
  check_tensor("residual or gradient", *residual, 2, x);
  TORCH_CHECK(residual->sizes() == x.sizes() && residual->scalar_type() == x.scalar_type(),
              "residual or gradient must be ", dtype_name(x.scalar_type()), " of shape ", x.sizes(), ", got ",
              dtype_name(residual->scalar_type()), " of shape ", residual->sizes());
}

bool keeps_passed(string_view activation) { return activation == "relu" || activation == "leaky_relu"; }

ScalarType winner_dtype(int64_t kernel_volume) { return kernel_volume < 256 ? at::kByte : at::kShort; }

void check_pool(const Tensor& x, const OptTensor& in_count, const OptTensor& out_count, const OptTensor& winner,
                int64_t winner_rows, const char* name, TensorList map, int64_t kernel_volume, int64_t n_out) {
  check_tensor("x", x, 2, x);
  TORCH_CHECK(kernel_volume > 0, "kernel_volume must be positive, got ", kernel_volume);
  TORCH_CHECK(n_out >= 0, "the number of output rows is negative: ", n_out);
  const auto check = [&](const char* part, const Tensor& t, ScalarType dtype, at::IntArrayRef sizes) {
    TORCH_CHECK(t.device() == x.device(), part, " is on ", t.device(), " but x is on ", x.device());
    TORCH_CHECK(t.scalar_type() == dtype && t.sizes() == sizes && t.is_contiguous(), part, " must be contiguous ",
                c10::toString(dtype), " of shape ", sizes, ", got ", c10::toString(t.scalar_type()), " of shape ",
                t.sizes());
  };
  if (in_count.has_value()) check("in_count", *in_count, at::kInt, {x.size(0)});
  if (out_count.has_value()) check("out_count", *out_count, at::kInt, {n_out});
  if (winner.has_value()) check("winner", *winner, winner_dtype(kernel_volume), {winner_rows, x.size(1)});
  TORCH_CHECK(!map.empty(), name, " is empty");
  check_map(name, map, x, kernel_volume, x.size(0), n_out);
}

void check_segments(const Tensor& x, const OptTensor& candidates, const Tensor& rows, const Tensor& starts) {
  check_tensor("x", x, 2, x);
  const auto check = [&](const char* part, const Tensor& t, int64_t dim) {
    TORCH_CHECK(t.device() == x.device() && t.scalar_type() == at::kLong && t.dim() == dim && t.is_contiguous(), part,
                " must be contiguous Long with ", dim, " dimension(s) on ", x.device(), ", got ",
                c10::toString(t.scalar_type()), " of shape ", t.sizes(), " on ", t.device());
  };
  check("rows", rows, 1);
  check("starts", starts, 1);
  const int64_t listed = candidates.has_value() ? candidates->size(0) : x.size(0);
  TORCH_CHECK(rows.size(0) == listed, "rows has ", rows.size(0), " entries for ", listed, " rows of ",
              candidates.has_value() ? "candidates" : "x", ": each is named once");
  if (!candidates.has_value()) return;
  check("candidates", *candidates, 2);
  TORCH_CHECK(candidates->size(1) == x.size(1), "candidates has ", candidates->size(1), " channels but x has ",
              x.size(1));
}

}  // namespace voxmma
