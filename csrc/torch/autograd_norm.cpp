// Autograd of norm_act. Its gradient is an op; a gradient of the gradient is made of torch's own operations.
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <ATen/ATen.h>
#include <ATen/SavedTensorHooks.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <string>
#include <typeinfo>

#include "ops.h"

namespace voxmma {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using NormSignature = std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const OptTensor&, const OptTensor&,
                                                         const OptTensor&, const OptTensor&, const OptTensor&, double,
                                                         double, const OptTensor&, string_view, double, bool);
using NormAgainSignature = Tensor(const Tensor&, const Tensor&, const OptTensor&, string_view, double);
using NormBackwardSignature = std::tuple<Tensor, Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&,
                                                                         const OptTensor&, const OptTensor&,
                                                                         string_view, double, bool);

const auto& norm_op() {
  static const auto op = find_op<NormSignature>("voxmma::norm_act");
  return op;
}

const auto& norm_again_op() {
  static const auto op = find_op<NormAgainSignature>("voxmma::norm_act_again");
  return op;
}

const auto& norm_backward_op() {
  static const auto op = find_op<NormBackwardSignature>("voxmma::norm_act_backward");
  return op;
}

// The cells of `passed` (norm.h: a bit each, of groups of rows and vectors of channels) as (n, channels) bool.
Tensor cells_of(const Tensor& passed, const Tensor& x) {
  const int64_t bytes = x.element_size(), v = bytes == 8 ? 2 : 4, r = 32 / (v * bytes), bits = (v * r + 7) / 8 * 8;
  const int64_t groups = (x.size(0) + r - 1) / r, vectors = (x.size(1) + v - 1) / v;
  Tensor cells = passed.unsqueeze(1).bitwise_right_shift(at::arange(8, passed.options())).bitwise_and(1);
  cells = cells.view({groups, vectors, bits}).narrow(2, 0, v * r).view({groups, vectors, r, v}).transpose(1, 2);
  cells = cells.reshape({groups * r, vectors * v});
  return cells.narrow(0, 0, x.size(0)).narrow(1, 0, x.size(1)).to(at::kBool);
}

// The derivative of an activation at v, of which `cells` passed.
Tensor derivative(const Tensor& v, const Tensor& cells, const std::string& activation, double slope) {
  if (activation == "relu") return cells.to(v.scalar_type());
  if (activation == "leaky_relu") return at::where(cells, at::ones_like(v), at::full_like(v, slope));
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

}  // namespace

bool keeps_residual(const std::string& activation) { return activation != "none" && !keeps_passed(activation); }

Normed norm_forward(const NormCall& call, const Tensor& x, const OptTensor& weight, const OptTensor& bias,
                    const OptTensor& residual, bool keep) {
  auto [y, stats, passed] = norm_op().call(x, weight, bias, call.running_mean, call.running_var, call.batches,
                                           call.momentum, call.eps, residual, call.activation, call.slope, keep);
  return {y, stats, passed};
}

NormGradients norm_gradients(const NormCall& call, const Tensor& dy, const Tensor& x, const Tensor& weight,
                             const Tensor& bias, const Tensor& stats, const Tensor& residual, const Tensor& passed,
                             bool of_residual) {
  if (!at::GradMode::is_enabled()) {
    const bool differs = call.activation != "none";
    at::AutoDispatchBelowADInplaceOrView below;
    auto [dx, dweight, dbias, dresidual] = norm_backward_op().call(dy, x, stats, optional(residual), optional(passed),
                                                                   call.activation, call.slope, of_residual && differs);
    return {dx, dweight, dbias, !of_residual ? Tensor() : differs ? dresidual : dy};
  }
  const ScalarType wide = stats.scalar_type();
  const Tensor values = x.to(wide), centred = values - values.mean(0);
  const Tensor invstd = (centred.square().mean(0) + call.eps).rsqrt(), xhat = centred * invstd;
  Tensor given = weight.defined() ? xhat * weight.to(wide) : xhat;
  if (bias.defined()) given = given + bias.to(wide);
  if (residual.defined()) given = given + residual.to(wide);
  const Tensor cells = passed.defined() ? cells_of(passed, x) : given.gt(0);
  const Tensor g = dy.to(wide) * derivative(given, cells, call.activation, call.slope);
  const Tensor scaled = weight.defined() ? g * weight.to(wide) : g;
  const Tensor dx = invstd * (scaled - scaled.mean(0) - xhat * (scaled * xhat).mean(0));
  return {dx.to(x.scalar_type()), (g * xhat).sum(0), g.sum(0), of_residual ? g.to(x.scalar_type()) : Tensor()};
}

namespace {

class NormFunction : public torch::autograd::Function<NormFunction> {
 public:
  static variable_list forward(AutogradContext* ctx, const Tensor& x, const OptTensor& weight, const OptTensor& bias,
                               const OptTensor& residual, const NormCall& call) {
    at::AutoDispatchBelowADInplaceOrView below;
    const Normed made = norm_forward(call, x, weight, bias, residual, /*keep=*/true);
    ctx->set_materialize_grads(false);
    ctx->mark_non_differentiable({made.stats, made.passed});
    const bool kept = residual.has_value() && keeps_residual(call.activation);
    ctx->save_for_backward({x, weight.value_or(Tensor()), bias.value_or(Tensor()), made.stats,
                            kept ? *residual : Tensor(), made.passed.numel() != 0 ? made.passed : Tensor()});
    auto& data = ctx->saved_data;
    data["activation"] = call.activation;
    data["slope"] = call.slope;
    data["eps"] = call.eps;
    data["residual_gradient"] = residual.has_value() && residual->requires_grad();
    if (!residual.has_value()) {
      data["recipe"] = c10::IValue::make_capsule(c10::make_intrusive<Recipe>(x, made, call, std::nullopt));
    }
    return {made.y, made.stats, made.passed};
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    variable_list out(5);
    if (!grads[0].defined()) return out;
    const variable_list saved = ctx->get_saved_variables();
    const Tensor &x = saved[0], &weight = saved[1], &bias = saved[2];
    auto& data = ctx->saved_data;
    NormCall call{};
    call.activation = data["activation"].toStringRef();
    call.slope = data["slope"].toDouble();
    call.eps = data["eps"].toDouble();
    const NormGradients made = norm_gradients(call, as_type(grads[0], x.scalar_type()), x, weight, bias, saved[3],
                                              saved[4], saved[5], data["residual_gradient"].toBool());
    out[0] = made.x;
    if (weight.defined()) out[1] = as_type(made.weight, weight.scalar_type());
    if (bias.defined()) out[2] = as_type(made.bias, bias.scalar_type());
    out[3] = made.residual;
    return out;
  }
};

RecipePtr recipe_of(const torch::autograd::Node& node) {
  using Made = torch::autograd::CppNode<NormFunction>;
  if (typeid(node) != typeid(Made)) return recipe_of_block(node);
  const auto& data = static_cast<const Made&>(node).ctx_.saved_data;
  const auto found = data.find("recipe");
  return found == data.end() ? RecipePtr() : recipe_in(found->second);
}

std::optional<c10::Stream> stream_of(const Tensor& t) {
  if (!t.is_cuda()) return std::nullopt;
  return c10::impl::VirtualGuardImpl(at::kCUDA).getStream(t.device());
}

std::tuple<Tensor, Tensor, Tensor> norm_autograd(c10::DispatchKeySet keys, const Tensor& x, const OptTensor& weight,
                                                 const OptTensor& bias, const OptTensor& running_mean,
                                                 const OptTensor& running_var, const OptTensor& batches,
                                                 double momentum, double eps, const OptTensor& residual,
                                                 string_view activation, double slope, bool keep) {
  const Tensor none;
  const auto of = [&](const OptTensor& t) { return t.has_value() ? &*t : &none; };
  std::tuple<Tensor, Tensor, Tensor> result;
  if (needs_node({&x, of(weight), of(bias), of(residual)})) {
    const NormCall call = {running_mean, running_var, batches, momentum, eps, std::string(activation), slope};
    const variable_list made = NormFunction::apply(x, weight, bias, residual, call);
    result = {made[0], made[1], made[2]};
  } else {
    at::AutoDispatchBelowADInplaceOrView below;
    result = norm_op().redispatch(keys & c10::after_autograd_keyset, x, weight, bias, running_mean, running_var,
                                  batches, momentum, eps, residual, activation, slope, keep);
  }
  for (const OptTensor* written : {&running_mean, &running_var, &batches}) {
    if (written->has_value()) (*written)->unsafeGetTensorImpl()->bump_version();
  }
  return result;
}

TORCH_LIBRARY_IMPL(voxmma, Autograd, m) { m.impl("norm_act", TORCH_FN(norm_autograd)); }

}  // namespace

Seen::Seen(const Tensor& t) : impl(t.getIntrusivePtr()), version(version_of(t)) {}

Tensor Seen::get() const {
  auto held = impl.lock();
  if (!held) return {};
  const Tensor t(std::move(held));
  return version_of(t) == version ? t : Tensor();
}

Recipe::Recipe(const Tensor& x, const Normed& made, const NormCall& call, const OptTensor& added)
    : rows(x),
      stats(made.stats),
      activation(call.activation),
      slope(call.slope),
      result(made.y.storage().getWeakStorageImpl()),
      stream(stream_of(x)) {
  if (added.has_value()) residual.emplace(*added);
}

Kept kept_of(const Tensor& x) {
  Kept whole{nullptr, x, {}, {}};
  // Who packs what nodes keep is shown the input itself.
  if (!at::SavedTensorDefaultHooks::get_tls_state().stack.empty()) return whole;
  if (x.key_set().has(c10::DispatchKey::Python) || x.is_view() || !x.grad_fn()) return whole;
  RecipePtr recipe = recipe_of(*x.grad_fn());
  if (!recipe || recipe->stream != stream_of(x)) return whole;
  Kept kept{nullptr, recipe->rows.get(), recipe->stats.get(), {}};
  if (recipe->residual.has_value()) kept.residual = recipe->residual->get();
  if (!kept.rows.defined() || !kept.stats.defined() || kept.residual.defined() != recipe->residual.has_value()) {
    return whole;
  }
  // The very result, in the memory it was written to, once.
  if (x._version() != 0 || x.storage().unsafeGetStorageImpl() != recipe->result._unsafe_get_target() ||
      x.storage_offset() != 0 || !x.is_contiguous() || x.sizes() != kept.rows.sizes() ||
      x.scalar_type() != kept.rows.scalar_type()) {
    return whole;
  }
  kept.recipe = std::move(recipe);
  return kept;
}

Tensor input_of(const Kept& kept) {
  if (!kept.recipe) return kept.rows;
  Tensor x;
  {
    at::AutoDispatchBelowADInplaceOrView below;
    x = norm_again_op().call(kept.rows, kept.stats, optional(kept.residual), kept.recipe->activation,
                             kept.recipe->slope);
  }
  if (at::GradMode::is_enabled()) {
    torch::autograd::impl::set_gradient_edge(x, torch::autograd::get_current_node()->next_edge(0));
  }
  return x;
}

}  // namespace voxmma
