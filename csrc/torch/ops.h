// The ops as C++ calls them, through the dispatcher, and what their autograd rules share.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/custom_class.h>

#include <initializer_list>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "checks.h"

namespace torch::autograd {
struct AutogradContext;
struct Node;
}  // namespace torch::autograd

namespace voxmma {

using ConvSignature = Tensor(const Tensor&, const Tensor&, const OptTensor&, TensorList, TensorList, c10::SymInt, bool,
                             bool, string_view, string_view, string_view, string_view, OptDtype);
using WgradSignature = Tensor(const Tensor&, const Tensor&, TensorList, TensorList, int64_t, int64_t, bool, string_view,
                              string_view, string_view, OptDtype);

using FusedSignature = Tensor(const Tensor&, const Tensor&, const OptTensor&, TensorList, c10::SymInt, bool, bool,
                              string_view, string_view, OptDtype, const OptTensor&, const OptTensor&, const OptTensor&,
                              const OptTensor&, double, const OptTensor&, string_view, double, const OptTensor&);
using FusedIntoSignature = void(const Tensor&, const Tensor&, const OptTensor&, TensorList, c10::SymInt, bool, bool,
                                string_view, string_view, OptDtype, const OptTensor&, const OptTensor&,
                                const OptTensor&, const OptTensor&, double, const OptTensor&, string_view, double,
                                const OptTensor&, at::Tensor&);

using PoolSumSignature = Tensor(const Tensor&, const OptTensor&, const OptTensor&, TensorList, TensorList, int64_t,
                                c10::SymInt, bool, bool);
using PoolMaxSignature = std::tuple<Tensor, Tensor>(const Tensor&, TensorList, TensorList, int64_t, c10::SymInt, bool,
                                                    bool, bool);
using PoolPickSignature = Tensor(const Tensor&, const Tensor&, TensorList, TensorList, int64_t, bool);
using PoolPutSignature = Tensor(const Tensor&, const Tensor&, TensorList, TensorList, int64_t, c10::SymInt, bool);

template <class Signature>
auto find_op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

inline const auto& pool_sum_op() {
  static const auto op = find_op<PoolSumSignature>("voxmma::pool_sum");
  return op;
}

inline const auto& pool_max_op() {
  static const auto op = find_op<PoolMaxSignature>("voxmma::pool_max");
  return op;
}

inline const auto& pool_pick_op() {
  static const auto op = find_op<PoolPickSignature>("voxmma::pool_pick");
  return op;
}

inline const auto& pool_put_op() {
  static const auto op = find_op<PoolPutSignature>("voxmma::pool_put");
  return op;
}

inline const auto& conv_op() {
  static const auto op = find_op<ConvSignature>("voxmma::conv");
  return op;
}

inline const auto& fused_op() {
  static const auto op = find_op<FusedSignature>("voxmma::conv_fused");
  return op;
}

inline const auto& fused_into_op() {
  static const auto op = find_op<FusedIntoSignature>("voxmma::conv_fused_into");
  return op;
}

inline const auto& wgrad_op() {
  static const auto op = find_op<WgradSignature>("voxmma::conv_wgrad");
  return op;
}

// The maps that a call and its gradients run over.
struct Maps {
  std::vector<Tensor> map, map_t;  // of the call's own direction, and the opposite (empty: symmetric, or not given)
  int64_t version;                 // of all their tensors
};
Maps maps_of(std::vector<Tensor> map, std::vector<Tensor> map_t);
// RuntimeError where torch has written into one of them since.
void check_unwritten(const Maps& maps);
void save_maps(const Maps& maps, torch::autograd::AutogradContext* ctx);
Maps load_maps(torch::autograd::AutogradContext* ctx);  // and checks them

// What both ops keep for backward besides x, weight and dy.
struct Plan : Maps {
  bool symmetric, transpose;
  std::string accumulator, tile, dgrad_tile, wgrad_tile;
};

// Of a weight stored as (C_out, ..., C_in): K, and the weight as the ops take it, (K, C_in, C_out), a view, differentiable
// where gradients are recorded.
int64_t volume_of_stored(const Tensor& stored);
Tensor kernel_of(const Tensor& stored);

// What the gradients of conv take from its operands.
struct ConvTypes {
  c10::SymInt n_in;
  ScalarType x_dtype, weight_dtype;
  int64_t volume, groups;
  bool grouped;
  std::vector<int64_t> stored;  // sizes of a weight that is (C_out, ..., C_in); empty: it is as the ops take it
  ConvTypes(c10::SymInt n, ScalarType x, ScalarType weight, int64_t k, int64_t g, bool four, std::vector<int64_t> sizes)
      : n_in(std::move(n)),
        x_dtype(x),
        weight_dtype(weight),
        volume(k),
        groups(g),
        grouped(four),
        stored(std::move(sizes)) {}
  ConvTypes(const Tensor& x, const Tensor& weight, bool is_stored)
      : ConvTypes(x.sym_size(0), x.scalar_type(), weight.scalar_type(), weight.size(0),
                  !is_stored && weight.dim() == 4 ? weight.size(1) : 1, !is_stored && weight.dim() == 4,
                  is_stored ? weight.sizes().vec() : std::vector<int64_t>()) {
    if (is_stored) volume = volume_of_stored(weight);
  }
};
// `t` in a type; where it has it, without a call of an op.
inline Tensor as_type(const Tensor& t, ScalarType type) { return t.scalar_type() == type ? t : t.to(type); }

// dy in x's type, but for the bias's. Differentiable again.
Tensor conv_gradient_of_x(const Plan& plan, const ConvTypes& types, const Tensor& dy, const Tensor& weight);
Tensor conv_gradient_of_weight(const Plan& plan, const ConvTypes& types, const Tensor& dy, const Tensor& x);
Tensor conv_gradient_of_bias(const Tensor& dy, ScalarType dtype);
// The op, of a weight that is stored as (C_out, ..., C_in): its gradient is made so, without nodes for views.
Tensor conv_of_stored(const Plan& plan, int64_t n_out, OptDtype out_dtype, const Tensor& x, const Tensor& stored,
                      const OptTensor& bias);

// A batch norm in training and what follows it: arguments of norm_act besides its rows.
struct NormCall {
  OptTensor running_mean, running_var, batches;
  double momentum, eps;
  std::string activation;
  double slope;
};
// Its y, and what its gradient takes: statistics, and cells that were passed (undefined: not kept).
struct Normed {
  Tensor y, stats, passed;
};
Normed norm_forward(const NormCall& call, const Tensor& x, const OptTensor& weight, const OptTensor& bias,
                    const OptTensor& residual, bool keep);
// Whether the gradient takes the residual itself.
bool keeps_residual(const std::string& activation);
// of: y, weight, bias, residual (undefined unless asked for), the numbers in the type of stats. Differentiable again
// where gradients are recorded, made of torch's own operations.
struct NormGradients {
  Tensor x, weight, bias, residual;
};
NormGradients norm_gradients(const NormCall& call, const Tensor& dy, const Tensor& x, const Tensor& weight,
                             const Tensor& bias, const Tensor& stats, const Tensor& residual, const Tensor& passed,
                             bool of_residual);

// A tensor that somebody else keeps, as it is now.
class Seen {
 public:
  explicit Seen(const Tensor& t);
  Tensor get() const;  // undefined where it is gone, or was written to
  bool is(const Tensor& t) const { return impl._unsafe_get_target() == t.unsafeGetTensorImpl(); }

 private:
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> impl;
  int64_t version;
};

// What the result of a norm and activation is made of. The norm's node keeps that for itself, so nodes that need the
// result for their gradients keep it, too, instead of the result, and make it again with the same bits.
struct Recipe : torch::CustomClassHolder {
  Seen rows, stats;
  std::optional<Seen> residual;
  std::string activation;
  double slope;
  c10::weak_intrusive_ptr<c10::StorageImpl> result;  // where the result lies
  std::optional<c10::Stream> stream;                 // on which it was made
  Recipe(const Tensor& x, const Normed& made, const NormCall& call, const OptTensor& added);
};
using RecipePtr = c10::intrusive_ptr<Recipe>;
inline RecipePtr recipe_in(const c10::IValue& kept) {
  return c10::static_intrusive_pointer_cast<Recipe>(kept.toCapsule());
}
RecipePtr recipe_of_block(const torch::autograd::Node& node);  // null: it is no block, or has none

// What a node keeps of its first input for its gradient, beside others: with a recipe not the input itself.
struct Kept {
  RecipePtr recipe;
  Tensor rows, stats, residual;  // without: the input, and nothing
};
Kept kept_of(const Tensor& x);
// The input, in the backward of the node: differentiable again where gradients are recorded.
Tensor input_of(const Kept& kept);

// Convolution, norm and activation as one node of the graph (autograd_block.cpp). stored: the weight is (C_out, ..., C_in).
Tensor conv_norm_act(const std::shared_ptr<const Plan>& plan, int64_t n_out, OptDtype out_dtype, const NormCall& norm,
                     const Tensor& x, const Tensor& weight, bool stored, const OptTensor& bias,
                     const OptTensor& norm_weight, const OptTensor& norm_bias, const OptTensor& residual);

// Autocast is off in backward: gradients are computed in the type the forward ran in.
struct NoAutocast {
  c10::impl::ExcludeDispatchKeyGuard guard{c10::autocast_dispatch_keyset};
};

// Whether a transform of torch.func is at work, which nodes that are applied directly do not see.
bool transformed();

// Whether a call needs a node in the graph. Forward-mode tangents do: the node says that there is no rule for them.
bool needs_node(std::initializer_list<const Tensor*> inputs);

// The map from the outputs to the inputs; where it is the one there is, its offsets are mirrored.
TensorList opposite_map(TensorList map, TensorList map_t, bool symmetric, const char* what);

}  // namespace voxmma
