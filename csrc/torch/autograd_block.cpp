// Convolution, batch norm in training, sum and activation as one node: nothing runs between them, either way, but launches.
#include <torch/csrc/autograd/custom_function.h>

#include <ATen/ATen.h>

#include <memory>
#include <typeinfo>
#include <utility>

#include "ops.h"

namespace voxmma {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// What a node keeps beside tensors, in one piece.
struct Block : torch::CustomClassHolder {
  std::shared_ptr<const Plan> plan;
  int64_t n_out;
  OptDtype out_dtype;
  ConvTypes types;
  NormCall norm;
  bool of_residual;
  Seen input;
  RecipePtr of_input, of_result;  // how they are made again: null, or the node keeps the input itself
  Block(std::shared_ptr<const Plan> p, int64_t n, OptDtype dtype, ConvTypes t, NormCall call, bool residual, Seen x)
      : plan(std::move(p)),
        n_out(n),
        out_dtype(dtype),
        types(std::move(t)),
        norm(std::move(call)),
        of_residual(residual),
        input(std::move(x)) {}
};

Tensor convolve(const Plan& plan, int64_t n_out, OptDtype out_dtype, const Tensor& x, const Tensor& weight,
                const OptTensor& bias) {
  return conv_op().call(x, weight, bias, plan.map, plan.map_t, n_out, plan.symmetric, plan.transpose, plan.accumulator,
                        plan.tile, plan.dgrad_tile, plan.wgrad_tile, out_dtype);
}

class BlockFunction : public torch::autograd::Function<BlockFunction> {
 public:
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight, const OptTensor& bias,
                        const OptTensor& norm_weight, const OptTensor& norm_bias, const OptTensor& residual,
                        const std::shared_ptr<const Plan>& plan, int64_t n_out, OptDtype out_dtype,
                        const NormCall& norm, bool stored) {
    at::AutoDispatchBelowADInplaceOrView below;
    const Tensor h = convolve(*plan, n_out, out_dtype, x, stored ? kernel_of(weight) : weight, bias);
    const Normed made = norm_forward(norm, h, norm_weight, norm_bias, residual, /*keep=*/true);
    ctx->set_materialize_grads(false);
    const bool kept = residual.has_value() && keeps_residual(norm.activation);
    Kept input = kept_of(x);
    ctx->save_for_backward({input.rows, weight, bias.value_or(Tensor()), norm_weight.value_or(Tensor()),
                            norm_bias.value_or(Tensor()), h, made.stats, kept ? *residual : Tensor(),
                            made.passed.numel() != 0 ? made.passed : Tensor(), input.stats, input.residual});
    NormCall call{std::nullopt, std::nullopt, std::nullopt, norm.momentum, norm.eps, norm.activation, norm.slope};
    auto block = c10::make_intrusive<Block>(plan, n_out, out_dtype, ConvTypes(x, weight, stored), std::move(call),
                                            residual.has_value() && residual->requires_grad(), Seen(x));
    block->of_input = std::move(input.recipe);
    if (!residual.has_value() || kept || keeps(x, *residual)) {
      block->of_result = c10::make_intrusive<Recipe>(h, made, norm, residual);
    }
    ctx->saved_data["block"] = c10::IValue::make_capsule(std::move(block));
    return made.y;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    variable_list out(11);
    if (!grads[0].defined()) return out;
    NoAutocast no_autocast;
    const auto block = of(*ctx);
    check_unwritten(*block->plan);
    const variable_list saved = ctx->get_saved_variables();
    const Tensor &weight = saved[1], &bias = saved[2], &norm_weight = saved[3], &norm_bias = saved[4];
    const Kept input{block->of_input, saved[0], saved[9], saved[10]};
    Tensor h = saved[5], x;
    if (at::GradMode::is_enabled()) {  // a gradient of this one goes through the convolution, too
      x = input_of(input);
      h = convolve(*block->plan, block->n_out, block->out_dtype, x,
                   block->types.stored.empty() ? weight : kernel_of(weight),
                   bias.defined() ? OptTensor(bias) : std::nullopt);
    }
    const NormGradients of = norm_gradients(block->norm, as_type(grads[0], h.scalar_type()), h, norm_weight, norm_bias,
                                            saved[6], saved[7], saved[8], block->of_residual);
    const Tensor dy = as_type(of.x, block->types.x_dtype);
    if (ctx->needs_input_grad(1)) {  // first: what x is made again in is free for x's gradient
      if (!x.defined()) x = input_of(input);
      out[1] = conv_gradient_of_weight(*block->plan, block->types, dy, x);
      x = Tensor();
    }
    if (ctx->needs_input_grad(0)) out[0] = conv_gradient_of_x(*block->plan, block->types, dy, weight);
    if (bias.defined() && bias.requires_grad()) out[2] = conv_gradient_of_bias(of.x, bias.scalar_type());
    if (norm_weight.defined()) out[3] = as_type(of.weight, norm_weight.scalar_type());
    if (norm_bias.defined()) out[4] = as_type(of.bias, norm_bias.scalar_type());
    out[5] = of.residual;
    return out;
  }

  static c10::intrusive_ptr<Block> of(const AutogradContext& ctx) {
    return c10::static_intrusive_pointer_cast<Block>(ctx.saved_data.at("block").toCapsule());
  }

  // Null: the node is another.
  static c10::intrusive_ptr<Block> of(const torch::autograd::Node& node) {
    using Made = torch::autograd::CppNode<BlockFunction>;
    return typeid(node) == typeid(Made) ? of(static_cast<const Made&>(node).ctx_) : nullptr;
  }

 private:
  // Whether the block that made x keeps its own input, and that is t: the block before in a residual one.
  static bool keeps(const Tensor& x, const Tensor& t) {
    if (!x.grad_fn()) return false;
    const auto before = of(*x.grad_fn());
    return before && !before->of_input && before->input.is(t);
  }
};

}  // namespace

RecipePtr recipe_of_block(const torch::autograd::Node& node) {
  const auto block = BlockFunction::of(node);
  return block ? block->of_result : RecipePtr();
}

Tensor conv_norm_act(const std::shared_ptr<const Plan>& plan, int64_t n_out, OptDtype out_dtype, const NormCall& norm,
                     const Tensor& x, const Tensor& weight, bool stored, const OptTensor& bias,
                     const OptTensor& norm_weight, const OptTensor& norm_bias, const OptTensor& residual) {
  const Tensor none;
  const auto of = [&](const OptTensor& t) { return t.has_value() ? &*t : &none; };
  if (transformed() || !needs_node({&x, &weight, of(bias), of(norm_weight), of(norm_bias), of(residual)})) {
    const Tensor h = convolve(*plan, n_out, out_dtype, x, stored ? kernel_of(weight) : weight, bias);
    return norm_forward(norm, h, norm_weight, norm_bias, residual, /*keep=*/false).y;
  }
  const Tensor y =
      BlockFunction::apply(x, weight, bias, norm_weight, norm_bias, residual, plan, n_out, out_dtype, norm, stored);
  for (const OptTensor* written : {&norm.running_mean, &norm.running_var, &norm.batches}) {
    if (written->has_value()) (*written)->unsafeGetTensorImpl()->bump_version();
  }
  return y;
}

}  // namespace voxmma
