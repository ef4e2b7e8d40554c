// Autograd of norm_act. Its gradient is an op; a gradient of the gradient is made of torch's own operations.
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <ATen/ATen.h>

#include <string>
#include <utility>

#include "ops.h"

namespace voxmma {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using NormSignature = std::tuple<Tensor, Tensor>(const Tensor&, const OptTensor&, const OptTensor&, const OptTensor&,
                                                 const OptTensor&, double, double, const OptTensor&, string_view,
                                                 double);
using NormBackwardSignature = std::tuple<Tensor, Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&,
                                                                         const OptTensor&, string_view, double, bool);

const auto& norm_op() {
  static const auto op = find_op<NormSignature>("voxmma::norm_act");
  return op;
}

const auto& norm_backward_op() {
  static const auto op = find_op<NormBackwardSignature>("voxmma::norm_act_backward");
  return op;
}

// The derivative of an activation at v.
Tensor derivative(const Tensor& v, const std::string& activation, double slope) {
  if (activation == "relu") return v.gt(0).to(v.scalar_type());
  if (activation == "leaky_relu") return at::where(v.gt(0), at::ones_like(v), at::full_like(v, slope));
  if (activation == "silu") {
    const Tensor s = v.sigmoid();
    return s * (1 + v * (1 - s));
  }
  if (activation == "gelu") {
    constexpr double kRoot = 0.70710678118654752440, kDensity = 0.39894228040143267794;
    return 0.5 * (1 + (v * kRoot).erf()) + v * kDensity * (-0.5 * v * v).exp();
  }
  return at::ones_like(v);
}

OptTensor optional(const Tensor& t) { return t.defined() ? OptTensor(t) : std::nullopt; }

class NormFunction : public torch::autograd::Function<NormFunction> {
 public:
  static variable_list forward(AutogradContext* ctx, const Tensor& x, const OptTensor& weight, const OptTensor& bias,
                               const OptTensor& running_mean, const OptTensor& running_var, double momentum, double eps,
                               const OptTensor& residual, const std::string& activation, double slope) {
    at::AutoDispatchBelowADInplaceOrView below;
    auto [y, stats] =
        norm_op().call(x, weight, bias, running_mean, running_var, momentum, eps, residual, activation, slope);
    ctx->set_materialize_grads(false);
    ctx->mark_non_differentiable({stats});
    // Where there is a residual, what a relu was given is seen by its result, which the next layer keeps anyway.
    const bool by_y = residual.has_value() && activation == "relu";
    ctx->save_for_backward(
        {x, weight.value_or(Tensor()), bias.value_or(Tensor()), stats, by_y ? y : residual.value_or(Tensor())});
    auto& data = ctx->saved_data;
    data["activation"] = activation;
    data["slope"] = slope;
    data["eps"] = eps;
    data["residual_gradient"] = residual.has_value() && residual->requires_grad();
    return {y, stats};
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    variable_list out(10);
    if (!grads[0].defined()) return out;
    const variable_list saved = ctx->get_saved_variables();
    const Tensor &x = saved[0], &weight = saved[1], &bias = saved[2], &stats = saved[3], &kept = saved[4];
    auto& data = ctx->saved_data;
    const std::string activation = data["activation"].toStringRef();
    const double slope = data["slope"].toDouble();
    const bool residual = data["residual_gradient"].toBool();
    const Tensor dy = grads[0].to(x.scalar_type());
    Tensor dx, dweight, dbias, dresidual;
    if (at::GradMode::is_enabled()) {
      const ScalarType wide = stats.scalar_type();
      const Tensor values = x.to(wide), centred = values - values.mean(0);
      const Tensor invstd = (centred.square().mean(0) + data["eps"].toDouble()).rsqrt(), xhat = centred * invstd;
      Tensor given = weight.defined() ? xhat * weight.to(wide) : xhat;
      if (bias.defined()) given = given + bias.to(wide);
      if (kept.defined()) given = activation == "relu" ? kept.to(wide) : given + kept.to(wide);
      const Tensor g = dy.to(wide) * derivative(given, activation, slope);
      const Tensor scaled = weight.defined() ? g * weight.to(wide) : g;
      dx = (invstd * (scaled - scaled.mean(0) - xhat * (scaled * xhat).mean(0))).to(x.scalar_type());
      dweight = (g * xhat).sum(0);
      dbias = g.sum(0);
      dresidual = g.to(x.scalar_type());
    } else {
      std::tie(dx, dweight, dbias, dresidual) =
          norm_backward_op().call(dy, x, stats, optional(kept), activation, slope, residual);
    }
    out[0] = dx;
    if (weight.defined()) out[1] = dweight.to(weight.scalar_type());
    if (bias.defined()) out[2] = dbias.to(bias.scalar_type());
    if (residual) out[7] = dresidual;
    return out;
  }
};

std::tuple<Tensor, Tensor> norm_autograd(c10::DispatchKeySet keys, const Tensor& x, const OptTensor& weight,
                                         const OptTensor& bias, const OptTensor& running_mean,
                                         const OptTensor& running_var, double momentum, double eps,
                                         const OptTensor& residual, string_view activation, double slope) {
  const Tensor none;
  const auto of = [&](const OptTensor& t) { return t.has_value() ? &*t : &none; };
  const auto written = [](const OptTensor& t) {
    if (t.has_value()) t->unsafeGetTensorImpl()->bump_version();
  };
  if (!needs_node({&x, of(weight), of(bias), of(residual)})) {
    at::AutoDispatchBelowADInplaceOrView below;
    auto result = norm_op().redispatch(keys & c10::after_autograd_keyset, x, weight, bias, running_mean, running_var,
                                       momentum, eps, residual, activation, slope);
    written(running_mean);
    written(running_var);
    return result;
  }
  const variable_list made = NormFunction::apply(x, weight, bias, running_mean, running_var, momentum, eps, residual,
                                                 std::string(activation), slope);
  written(running_mean);
  written(running_var);
  return {made[0], made[1]};
}

TORCH_LIBRARY_IMPL(voxmma, Autograd, m) { m.impl("norm_act", TORCH_FN(norm_autograd)); }

}  // namespace
}  // namespace voxmma
