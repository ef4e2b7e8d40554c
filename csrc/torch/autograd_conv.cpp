// Autograd and autocast of conv and conv_wgrad, which differentiate into each other, to any order.
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <ATen/autocast_mode.h>

#include <utility>

#include "ops.h"

namespace voxmma {

bool needs_node(std::initializer_list<const Tensor*> inputs) {
  const bool grad_mode = at::GradMode::is_enabled();
  for (const Tensor* t : inputs) {
    if (t->defined() && ((grad_mode && t->requires_grad()) || t->_fw_grad(0).defined())) return true;
  }
  return false;
}

bool transformed() { return c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode); }

int64_t volume_of_stored(const Tensor& stored) {
  TORCH_CHECK(stored.dim() > 1 && stored.numel() > 0, "weight must be (C_out, ..., C_in) and not empty, got shape ",
              stored.sizes());
  return stored.numel() / (stored.size(0) * stored.size(-1));
}

Tensor kernel_of(const Tensor& stored) {
  const int64_t volume = volume_of_stored(stored), c_out = stored.size(0), c_in = stored.size(-1);
  if (stored.is_contiguous() && !transformed() && !(at::GradMode::is_enabled() && stored.requires_grad())) {
    at::AutoDispatchBelowADInplaceOrView below;
    return stored.as_strided({volume, c_in, c_out}, {c_in, 1, volume * c_in});
  }
  return stored.reshape({c_out, volume, c_in}).permute({1, 2, 0});
}

Maps maps_of(std::vector<Tensor> map, std::vector<Tensor> map_t) {
  const int64_t version = version_of(map) + version_of(map_t);
  return {std::move(map), std::move(map_t), version};
}

void check_unwritten(const Maps& maps) {
  TORCH_CHECK(version_of(maps.map) + version_of(maps.map_t) == maps.version,
              "the tensors of a kernel map were written to, but every layer on these coordinates, and its gradient, ",
              "reads them: KernelMap.free() it, and write into a copy (.clone())");
}

void save_maps(const Maps& maps, torch::autograd::AutogradContext* ctx) {
  auto& data = ctx->saved_data;
  data.reserve(16);  // what the functions add included
  data["map"] = maps.map;
  data["map_t"] = maps.map_t;
  data["version"] = maps.version;
}

Maps load_maps(torch::autograd::AutogradContext* ctx) {
  auto& data = ctx->saved_data;
  Maps maps{data["map"].toTensorVector(), data["map_t"].toTensorVector(), data["version"].toInt()};
  check_unwritten(maps);
  return maps;
}

namespace {

// The map whose input rows are this call's output rows, for the gradient `what`.
const std::vector<Tensor>& opposite(const Plan& plan, const char* what) {
  if (plan.symmetric) return plan.map;
  TORCH_CHECK(!plan.map_t.empty(), "map_t is empty, but the gradient of ", what,
              " needs the map of the opposite direction (KernelMap.transposed().tensors)");
  return plan.map_t;
}

const std::vector<Tensor>& forward_of_opposite(const Plan& plan) { return plan.symmetric ? plan.map_t : plan.map; }

}  // namespace

Tensor conv_gradient_of_x(const Plan& plan, const ConvTypes& types, const Tensor& dy, const Tensor& weight) {
  const Tensor kernel = types.stored.empty() ? weight : kernel_of(weight);
  return conv_op().call(dy, kernel, std::nullopt, opposite(plan, "x"), forward_of_opposite(plan), types.n_in,
                        plan.symmetric, !plan.transpose, plan.accumulator, plan.dgrad_tile, plan.tile, plan.wgrad_tile,
                        std::nullopt);
}

Tensor conv_gradient_of_weight(const Plan& plan, const ConvTypes& types, const Tensor& dy, const Tensor& x) {
  // The kernel writes x's dtype or (not for float64) float32; another weight dtype is one cast more.
  OptDtype written;
  if (types.weight_dtype != dy.scalar_type() && dy.scalar_type() != at::kDouble) written = at::kFloat;
  Tensor dw = plan.transpose ? wgrad_op().call(dy, x, opposite(plan, "weight"), forward_of_opposite(plan), types.volume,
                                               types.groups, plan.symmetric, plan.accumulator, plan.wgrad_tile,
                                               plan.dgrad_tile, written)
                             : wgrad_op().call(x, dy, plan.map, plan.map_t, types.volume, types.groups, plan.symmetric,
                                               plan.accumulator, plan.wgrad_tile, plan.dgrad_tile, written);
  if (types.groups == 1 && types.grouped) dw = dw.unsqueeze(1);
  if (!types.stored.empty()) dw = dw.permute({2, 0, 1}).reshape(types.stored);
  return as_type(dw, types.weight_dtype);
}

Tensor conv_gradient_of_bias(const Tensor& dy, ScalarType dtype) {
  return as_type(dy.sum(0, /*keepdim=*/false, sum_type(dy.scalar_type())), dtype);
}

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

void save(const Plan& plan, AutogradContext* ctx) {
  save_maps(plan, ctx);
  auto& data = ctx->saved_data;
  data["symmetric"] = plan.symmetric;
  data["transpose"] = plan.transpose;
  data["accumulator"] = plan.accumulator;
  data["tile"] = plan.tile;
  data["dgrad_tile"] = plan.dgrad_tile;
  data["wgrad_tile"] = plan.wgrad_tile;
}

Plan load(AutogradContext* ctx) {
  auto& data = ctx->saved_data;
  return {load_maps(ctx),
          data["symmetric"].toBool(),
          data["transpose"].toBool(),
          data["accumulator"].toStringRef(),
          data["tile"].toStringRef(),
          data["dgrad_tile"].toStringRef(),
          data["wgrad_tile"].toStringRef()};
}

class ConvFunction : public torch::autograd::Function<ConvFunction> {
 public:
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight, const OptTensor& bias,
                        const Plan& plan, const c10::SymInt& n_out, OptDtype out_dtype, bool stored) {
    save(plan, ctx);
    ctx->set_materialize_grads(false);
    const ConvTypes types(x, weight, stored);
    ctx->saved_data["n_in"] = types.n_in;
    ctx->saved_data["x_dtype"] = types.x_dtype;
    ctx->saved_data["weight_dtype"] = types.weight_dtype;
    ctx->saved_data["groups"] = types.groups;
    ctx->saved_data["volume"] = types.volume;
    ctx->saved_data["grouped"] = types.grouped;
    ctx->saved_data["stored"] = types.stored;
    if (bias.has_value()) ctx->saved_data["bias_dtype"] = bias->scalar_type();
    // x serves the weight's gradient and the weight x's: neither is kept alive for nothing.
    Kept input = weight.requires_grad() ? kept_of(x) : Kept();
    ctx->save_for_backward({input.rows, x.requires_grad() ? weight : Tensor(), input.stats, input.residual});
    if (input.recipe) ctx->saved_data["recipe"] = c10::IValue::make_capsule(std::move(input.recipe));
    at::AutoDispatchBelowADInplaceOrView below;
    return conv_op().call(x, stored ? kernel_of(weight) : weight, bias, plan.map, plan.map_t, n_out, plan.symmetric,
                          plan.transpose, plan.accumulator, plan.tile, plan.dgrad_tile, plan.wgrad_tile, out_dtype);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    variable_list out(7);
    if (!grads[0].defined()) return out;
    NoAutocast no_autocast;
    const Plan plan = load(ctx);
    auto& data = ctx->saved_data;
    const variable_list saved = ctx->get_saved_variables();
    const ConvTypes types = {
        data["n_in"].toSymInt(),     data["x_dtype"].toScalarType(), data["weight_dtype"].toScalarType(),
        data["volume"].toInt(),      data["groups"].toInt(),         data["grouped"].toBool(),
        data["stored"].toIntVector()};
    const Tensor dy = as_type(grads[0], types.x_dtype);
    if (ctx->needs_input_grad(0)) out[0] = conv_gradient_of_x(plan, types, dy, saved[1]);
    if (ctx->needs_input_grad(1)) {
      const auto found = data.find("recipe");
      const Kept input{found == data.end() ? RecipePtr() : recipe_in(found->second), saved[0], saved[2], saved[3]};
      out[1] = conv_gradient_of_weight(plan, types, dy, input_of(input));
    }
    const auto bias = data.find("bias_dtype");
    if (bias != data.end() && ctx->needs_input_grad(2)) {
      out[2] = conv_gradient_of_bias(grads[0], bias->second.toScalarType());
    }
    return out;
  }
};

class WgradFunction : public torch::autograd::Function<WgradFunction> {
 public:
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& dy, const Plan& plan, int64_t volume,
                        int64_t groups, OptDtype out_dtype) {
    save(plan, ctx);
    ctx->set_materialize_grads(false);
    ctx->saved_data["n_in"] = x.sym_size(0);
    ctx->saved_data["n_out"] = dy.sym_size(0);
    ctx->save_for_backward({dy.requires_grad() ? x : Tensor(), x.requires_grad() ? dy : Tensor()});
    at::AutoDispatchBelowADInplaceOrView below;
    return wgrad_op().call(x, dy, plan.map, plan.map_t, volume, groups, plan.symmetric, plan.accumulator,
                           plan.wgrad_tile, plan.dgrad_tile, out_dtype);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    variable_list out(6);
    if (!grads[0].defined()) return out;
    NoAutocast no_autocast;
    const Plan plan = load(ctx);
    auto& data = ctx->saved_data;
    const variable_list saved = ctx->get_saved_variables();
    const Tensor &x = saved[0], &dy = saved[1];
    if (ctx->needs_input_grad(0)) {
      out[0] = conv_op().call(dy, grads[0], std::nullopt, opposite(plan, "x"), forward_of_opposite(plan),
                              data["n_in"].toSymInt(), plan.symmetric, /*transpose=*/true, plan.accumulator,
                              plan.dgrad_tile, plan.dgrad_tile, plan.wgrad_tile, std::nullopt);
    }
    if (ctx->needs_input_grad(1)) {
      out[1] = conv_op().call(x, grads[0], std::nullopt, plan.map, plan.map_t, data["n_out"].toSymInt(), plan.symmetric,
                              /*transpose=*/false, plan.accumulator, plan.dgrad_tile, plan.dgrad_tile, plan.wgrad_tile,
                              std::nullopt);
    }
    return out;
  }
};

Tensor conv_autograd(c10::DispatchKeySet keys, const Tensor& x, const Tensor& weight, const OptTensor& bias,
                     TensorList map, TensorList map_t, c10::SymInt n_out, bool symmetric, bool transpose,
                     string_view accumulator, string_view tile, string_view dgrad_tile, string_view wgrad_tile,
                     OptDtype out_dtype) {
  const Tensor none;
  if (!needs_node({&x, &weight, bias.has_value() ? &*bias : &none})) {
    at::AutoDispatchBelowADInplaceOrView below;
    return conv_op().redispatch(keys & c10::after_autograd_keyset, x, weight, bias, map, map_t, std::move(n_out),
                                symmetric, transpose, accumulator, tile, dgrad_tile, wgrad_tile, out_dtype);
  }
  const Plan plan{maps_of(map.vec(), map_t.vec()), symmetric,         transpose,
                  std::string(accumulator),        std::string(tile), std::string(dgrad_tile),
                  std::string(wgrad_tile)};
  return ConvFunction::apply(x, weight, bias, plan, n_out, out_dtype, /*stored=*/false);
}

Tensor wgrad_autograd(const Tensor& x, const Tensor& dy, TensorList map, TensorList map_t, int64_t kernel_volume,
                      int64_t groups, bool symmetric, string_view accumulator, string_view tile, string_view dgrad_tile,
                      OptDtype out_dtype) {
  const Plan plan{maps_of(map.vec(), map_t.vec()),
                  symmetric,
                  /*transpose=*/false,
                  std::string(accumulator),
                  std::string(dgrad_tile),
                  std::string(dgrad_tile),
                  std::string(tile)};
  return WgradFunction::apply(x, dy, plan, kernel_volume, groups, out_dtype);
}

// ---- autocast: features take the active type; weight and bias stay, the op converts them itself -------------------

template <c10::DeviceType device>
Tensor conv_autocast(const Tensor& x, const Tensor& weight, const OptTensor& bias, TensorList map, TensorList map_t,
                     c10::SymInt n_out, bool symmetric, bool transpose, string_view accumulator, string_view tile,
                     string_view dgrad_tile, string_view wgrad_tile, OptDtype out_dtype) {
  NoAutocast no_autocast;
  return conv_op().call(at::autocast::cached_cast(at::autocast::get_autocast_dtype(device), x, device), weight, bias,
                        map, map_t, std::move(n_out), symmetric, transpose, accumulator, tile, dgrad_tile, wgrad_tile,
                        out_dtype);
}

template <c10::DeviceType device>
Tensor wgrad_autocast(const Tensor& x, const Tensor& dy, TensorList map, TensorList map_t, int64_t kernel_volume,
                      int64_t groups, bool symmetric, string_view accumulator, string_view tile, string_view dgrad_tile,
                      OptDtype out_dtype) {
  NoAutocast no_autocast;
  const ScalarType dtype = at::autocast::get_autocast_dtype(device);
  return wgrad_op().call(at::autocast::cached_cast(dtype, x, device), at::autocast::cached_cast(dtype, dy, device), map,
                         map_t, kernel_volume, groups, symmetric, accumulator, tile, dgrad_tile, out_dtype);
}

// ---- without gradients ---------------------------------------------------------------------------------------------

void check_no_gradient(const char* op, std::initializer_list<const OptTensor*> inputs) {
  for (const OptTensor* t : inputs) {
    TORCH_CHECK(!t->has_value() || !needs_node({&**t}), "voxmma::", op,
                " has no gradient, but one is asked for: call it under torch.no_grad(), or use voxmma::conv and what "
                "follows it on its own");
  }
}

Tensor fused_autograd(c10::DispatchKeySet keys, const Tensor& x, const Tensor& weight, const OptTensor& bias,
                      TensorList map, c10::SymInt n_out, bool symmetric, bool transpose, string_view accumulator,
                      string_view tile, OptDtype out_dtype, const OptTensor& scale, const OptTensor& shift,
                      const OptTensor& mean, const OptTensor& var, double eps, const OptTensor& residual,
                      string_view activation, double slope, const OptTensor& packed) {
  const OptTensor features = x, kernel = weight;
  check_no_gradient("conv_fused", {&features, &kernel, &bias, &scale, &shift, &mean, &var, &residual});
  at::AutoDispatchBelowADInplaceOrView below;
  return fused_op().redispatch(keys & c10::after_autograd_keyset, x, weight, bias, map, std::move(n_out), symmetric,
                               transpose, accumulator, tile, out_dtype, scale, shift, mean, var, eps, residual,
                               activation, slope, packed);
}

void fused_into_autograd(c10::DispatchKeySet keys, const Tensor& x, const Tensor& weight, const OptTensor& bias,
                         TensorList map, c10::SymInt n_out, bool symmetric, bool transpose, string_view accumulator,
                         string_view tile, OptDtype out_dtype, const OptTensor& scale, const OptTensor& shift,
                         const OptTensor& mean, const OptTensor& var, double eps, const OptTensor& residual,
                         string_view activation, double slope, const OptTensor& packed, Tensor& out) {
  const OptTensor features = x, kernel = weight, written = out;
  check_no_gradient("conv_fused_into", {&features, &kernel, &bias, &scale, &shift, &mean, &var, &residual, &written});
  {
    at::AutoDispatchBelowADInplaceOrView below;
    fused_into_op().redispatch(keys & c10::after_autograd_keyset, x, weight, bias, map, std::move(n_out), symmetric,
                               transpose, accumulator, tile, out_dtype, scale, shift, mean, var, eps, residual,
                               activation, slope, packed, out);
  }
  out.unsafeGetTensorImpl()->bump_version();
}

Tensor pack_autograd(c10::DispatchKeySet keys, const Tensor& weight, const OptTensor& bias, bool symmetric,
                     bool transpose, string_view accumulator, string_view tile, ScalarType dtype,
                     const OptTensor& scale, const OptTensor& shift, const OptTensor& mean, const OptTensor& var,
                     double eps) {
  static const auto op =
      find_op<Tensor(const Tensor&, const OptTensor&, bool, bool, string_view, string_view, ScalarType,
                     const OptTensor&, const OptTensor&, const OptTensor&, const OptTensor&, double)>(
          "voxmma::pack_weight");
  at::AutoDispatchBelowADInplaceOrView below;  // bytes: a constant of any graph
  return op.redispatch(keys & c10::after_autograd_keyset, weight, bias, symmetric, transpose, accumulator, tile, dtype,
                       scale, shift, mean, var, eps);
}

}  // namespace

Tensor conv_of_stored(const Plan& plan, int64_t n_out, OptDtype out_dtype, const Tensor& x, const Tensor& stored,
                      const OptTensor& bias) {
  const Tensor none;
  if (!transformed() && needs_node({&x, &stored, bias.has_value() ? &*bias : &none})) {
    return ConvFunction::apply(x, stored, bias, plan, n_out, out_dtype, /*stored=*/true);
  }
  return conv_op().call(x, kernel_of(stored), bias, plan.map, plan.map_t, n_out, plan.symmetric, plan.transpose,
                        plan.accumulator, plan.tile, plan.dgrad_tile, plan.wgrad_tile, out_dtype);
}

namespace {

TORCH_LIBRARY_IMPL(voxmma, Autograd, m) {
  m.impl("conv", TORCH_FN(conv_autograd));
  m.impl("conv_fused", TORCH_FN(fused_autograd));
  m.impl("conv_fused_into", TORCH_FN(fused_into_autograd));
  m.impl("pack_weight", TORCH_FN(pack_autograd));
  m.impl("conv_wgrad", TORCH_FN(wgrad_autograd));
}

TORCH_LIBRARY_IMPL(voxmma, AutocastCUDA, m) {
  m.impl("conv", TORCH_FN(conv_autocast<at::kCUDA>));
  m.impl("conv_wgrad", TORCH_FN(wgrad_autocast<at::kCUDA>));
}

TORCH_LIBRARY_IMPL(voxmma, AutocastCPU, m) {
  m.impl("conv", TORCH_FN(conv_autocast<at::kCPU>));
  m.impl("conv_wgrad", TORCH_FN(wgrad_autocast<at::kCPU>));
}

}  // namespace
}  // namespace voxmma
