// Launches of norm_act and its gradient.
#include <torch/library.h>

#include "launch.h"

namespace voxmma {
namespace {

struct Owners {  // what args point to
  Tensor x, dy, residual, weight, bias;
};

// What forward and backward have in common. Everything has been checked.
NormArgs norm_args(const Launch& on, const Tensor& x, const OptTensor& residual, string_view activation, double slope,
                   const Tensor& stats, Owners& own) {
  NormArgs args{};
  own.x = dense_rows(x);
  args.x = own.x.data_ptr();
  args.ldx = own.x.stride(0);
  args.dtype = to_dtype(x.scalar_type());
  args.n = x.size(0);
  args.channels = x.size(1);
  if (residual.has_value()) {
    own.residual = dense_rows(*residual);
    args.residual = own.residual.data_ptr();
    args.ldr = own.residual.stride(0);
  }
  args.activation = static_cast<Activation>(activation_index(activation));
  args.slope = slope;
  args.stats = stats.data_ptr();
  args.sm_count = on.info.sm_count;
  return args;
}

std::tuple<Tensor, Tensor, Tensor> norm_act_cuda(const Tensor& x, const OptTensor& weight, const OptTensor& bias,
                                                 const OptTensor& running_mean, const OptTensor& running_var,
                                                 const OptTensor& batches, double momentum, double eps,
                                                 const OptTensor& residual, string_view activation, double slope,
                                                 bool keep) {
  check_norm(x, weight, bias, running_mean, running_var, residual);
  if (batches.has_value()) {
    TORCH_CHECK(batches->device() == x.device() && batches->scalar_type() == at::kLong && batches->numel() == 1,
                "batches must be one int64 on ", x.device(), ", got ", c10::toString(batches->scalar_type()),
                " of shape ", batches->sizes(), " on ", batches->device());
  }
  const Launch on(x.device());
  const ScalarType wide = sum_type(x.scalar_type());
  const Tensor y = on.empty(x.sizes(), x.scalar_type()), stats = on.empty({4, x.size(1)}, wide);
  Owners own;
  NormArgs args = norm_args(on, x, residual, activation, slope, stats, own);
  const auto numbers = [](const OptTensor& t, Tensor& owner) -> PerChannel {
    if (!t.has_value()) return {};
    owner = t->contiguous();
    return {owner.data_ptr(), to_dtype(owner.scalar_type())};
  };
  args.weight = numbers(weight, own.weight);
  args.bias = numbers(bias, own.bias);
  args.eps = eps;
  if (running_mean.has_value()) {
    args.running_mean = running_mean->data_ptr();
    args.running_var = running_var->data_ptr();
    args.running_dtype = to_dtype(running_mean->scalar_type());
  }
  args.momentum = momentum;
  if (batches.has_value()) args.batches = data<int64_t>(*batches);
  args.y = y.data_ptr();
  const bool passes = keep && residual.has_value() && keeps_passed(activation);
  const Tensor passed = on.scratch(passes ? norm_passed_bytes(args.dtype, args.n, args.channels) : 0);
  if (passes) args.passed = passed.data_ptr();
  const Tensor workspace = on.scratch(norm_workspace(args));
  args.workspace = workspace.data_ptr();
  if (x.size(1) != 0) check_cuda(norm_forward(args, on.stream), "norm_forward", on.device);
  return {y, stats, passed};
}

void check_stats(const Tensor& stats, const Tensor& x) {
  TORCH_CHECK(stats.is_contiguous() && stats.dim() == 2 && stats.size(0) == 4 && stats.size(1) == x.size(1) &&
                  stats.device() == x.device() && stats.scalar_type() == sum_type(x.scalar_type()),
              "stats must be those of norm_act of x");
}

Tensor norm_act_again_cuda(const Tensor& x, const Tensor& stats, const OptTensor& residual, string_view activation,
                           double slope) {
  check_norm(x, std::nullopt, std::nullopt, std::nullopt, std::nullopt, residual);
  check_stats(stats, x);
  const Launch on(x.device());
  const Tensor y = on.empty(x.sizes(), x.scalar_type());
  Owners own;
  NormArgs args = norm_args(on, x, residual, activation, slope, stats, own);
  args.y = y.data_ptr();
  args.given = true;
  if (x.size(1) != 0) check_cuda(norm_forward(args, on.stream), "norm_forward", on.device);
  return y;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> norm_act_backward_cuda(const Tensor& dy, const Tensor& x,
                                                                  const Tensor& stats, const OptTensor& residual,
                                                                  const OptTensor& passed, string_view activation,
                                                                  double slope, bool residual_gradient) {
  check_norm(x, std::nullopt, std::nullopt, std::nullopt, std::nullopt, residual);
  check_norm(x, std::nullopt, std::nullopt, std::nullopt, std::nullopt, dy);
  check_stats(stats, x);
  const Launch on(x.device());
  const Tensor dx = on.empty(x.sizes(), x.scalar_type());
  const Tensor dresidual = on.empty(residual_gradient ? x.sizes() : at::IntArrayRef({0}), x.scalar_type());
  const ScalarType wide = stats.scalar_type();
  const Tensor dweight = on.empty({x.size(1)}, wide), dbias = on.empty({x.size(1)}, wide);
  Owners own;
  NormArgs args = norm_args(on, x, residual, activation, slope, stats, own);
  if (passed.has_value()) {
    TORCH_CHECK(keeps_passed(activation) && passed->device() == x.device() && passed->scalar_type() == at::kByte &&
                    passed->is_contiguous() &&
                    passed->numel() == static_cast<int64_t>(norm_passed_bytes(args.dtype, args.n, args.channels)),
                "passed must be that of norm_act of x");
    args.passed = passed->data_ptr();
  }
  own.dy = dense_rows(dy);
  args.dy = own.dy.data_ptr();
  args.ldy = own.dy.stride(0);
  args.dx = dx.data_ptr();
  args.dresidual = residual_gradient ? dresidual.data_ptr() : nullptr;
  args.dweight = dweight.data_ptr();
  args.dbias = dbias.data_ptr();
  const Tensor workspace = on.scratch(norm_workspace(args));
  args.workspace = workspace.data_ptr();
  if (x.size(1) != 0) check_cuda(norm_backward(args, on.stream), "norm_backward", on.device);
  return {dx, dweight, dbias, dresidual};
}

TORCH_LIBRARY_IMPL(voxmma, CUDA, m) {
  m.impl("norm_act", TORCH_FN(norm_act_cuda));
  m.impl("norm_act_again", TORCH_FN(norm_act_again_cuda));
  m.impl("norm_act_backward", TORCH_FN(norm_act_backward_cuda));
}

}  // namespace
}  // namespace voxmma
