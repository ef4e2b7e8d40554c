// The one file that knows both torch and the kernel library: dispatcher ops with autograd and autocast, their CUDA
// implementation, and the pybind functions of voxmma._C. CPU implementations and fakes are in python/voxmma/ops.
//
// No ATen/cuda header is included (they ask for cuBLAS and cuSPARSE headers): the current stream comes through c10's
// virtual device guard, so the same file compiles against CUDA and CPU-only builds of torch. Without VOXMMA_WITH_CUDA
// schemas, autograd and autocast remain, and a CUDA tensor is answered with what is missing.
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "voxmma/arch.h"

#ifdef VOXMMA_WITH_CUDA
#include <mutex>

#include "voxmma/kernels.h"
#include "voxmma/probe.h"
#endif

namespace voxmma {

// Written by setup.py into build_info.cpp, so that a changed kernel does not recompile this file.
extern const char* const kBuildId;       // hash of the sources under csrc
extern const char* const kCudaArchs;     // "8.0 9.0a": setup.py's parse_archs; empty without CUDA
extern const char* const kCudaVersion;   // of the nvcc that built the kernels; empty without CUDA
extern const char* const kTorchVersion;  // torch.__version__ of the headers

namespace {

using at::ScalarType;
using at::Tensor;
using at::TensorList;
using OptTensor = std::optional<Tensor>;
using OptDtype = std::optional<ScalarType>;
using std::string_view;

// ---- argument checks, shared by the CUDA implementation and (through check_conv / check_wgrad) the CPU one --------

const char* dtype_name(ScalarType t) {
  switch (t) {
    case at::kHalf: return "float16";
    case at::kBFloat16: return "bfloat16";
    case at::kFloat: return "float32";
    case at::kDouble: return "float64";
    default: return c10::toString(t);
  }
}

bool is_supported(ScalarType t) { return t == at::kHalf || t == at::kBFloat16 || t == at::kFloat || t == at::kDouble; }

void check_tensor(const char* name, const Tensor& t, int64_t dim, const Tensor& x) {
  TORCH_CHECK(t.dim() == dim, name, " must have ", dim, " dimensions, got shape ", t.sizes());
  TORCH_CHECK(is_supported(t.scalar_type()), name, " has dtype ", dtype_name(t.scalar_type()),
              "; float16, bfloat16, float32 and float64 are supported");
  TORCH_CHECK(t.device() == x.device(), name, " is on ", t.device(), " but x is on ", x.device());
}

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

constexpr size_t kPlanTensors = 7, kPairTensors = 4;

// A kernel map as tensors (README, "Kernel maps"): on CUDA [order, schedule, passes, frag, uniq, local, size], elsewhere
// [in_rows, out_rows, kptr, size], size being an empty tensor of shape (0, n_in, n_out). Contents are the map builder's
// business; checked here is what can be without a copy. `n_in`: rows that the map is read for, -1: none are.
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

// Changes whenever torch writes into one of the tensors.
int64_t version_of(TensorList tensors) {
  int64_t sum = 0;
  for (const Tensor& t : tensors) sum += t.is_inference() ? 0 : static_cast<int64_t>(t._version());
  return sum;
}

struct Shape {
  int64_t volume, groups, c_in, c_out;  // channels per group, of the convolution that runs (after transposition)
  ScalarType out;
};

Shape check_conv(const Tensor& x, const Tensor& weight, const OptTensor& bias, TensorList map, int64_t n_out,
                 bool transpose, string_view accumulator, OptDtype out_dtype) {
  check_tensor("x", x, 2, x);
  check_tensor("weight", weight, weight.dim() == 4 ? 4 : 3, x);
  check_accumulator(accumulator, x.scalar_type());
  Shape s{weight.size(0), weight.dim() == 4 ? weight.size(1) : 1, weight.size(-2), weight.size(-1),
          check_out_dtype(out_dtype, x.scalar_type())};
  if (transpose) std::swap(s.c_in, s.c_out);
  TORCH_CHECK(weight.numel() > 0, "weight is empty: shape ", weight.sizes());
  TORCH_CHECK(x.size(1) == s.groups * s.c_in, "x has ", x.size(1), " channels, but ", transpose ? "transposed " : "",
              "weight of shape ", weight.sizes(), " takes ", s.groups * s.c_in);
  if (bias.has_value()) {
    check_tensor("bias", *bias, 1, x);
    TORCH_CHECK(bias->size(0) == s.groups * s.c_out, "bias has ", bias->size(0), " entries for ", s.groups * s.c_out,
                " output channels");
  }
  TORCH_CHECK(n_out >= 0, "n_out is negative: ", n_out);
  check_map("map", map, x, s.volume, x.size(0), n_out);
  return s;
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

// The type of the offsets that pool_max keeps, kernel_volume standing for "none": winner_bytes() of kernels.h.
ScalarType winner_dtype(int64_t kernel_volume) { return kernel_volume < 256 ? at::kByte : at::kShort; }

// A pooling op from the rows of x to n_out rows over `map`; `name` is what the caller calls it. `winner` has
// `winner_rows` rows; what an op does not have is nullopt.
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

// ---- the ops, called through the dispatcher -----------------------------------------------------------------------

using ConvSignature = Tensor(const Tensor&, const Tensor&, const OptTensor&, TensorList, TensorList, c10::SymInt, bool,
                             bool, string_view, string_view, string_view, string_view, OptDtype);
using WgradSignature = Tensor(const Tensor&, const Tensor&, TensorList, TensorList, int64_t, int64_t, bool, string_view,
                              string_view, string_view, OptDtype);

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

const auto& pool_sum_op() {
  static const auto op = find_op<PoolSumSignature>("voxmma::pool_sum");
  return op;
}

const auto& pool_max_op() {
  static const auto op = find_op<PoolMaxSignature>("voxmma::pool_max");
  return op;
}

const auto& pool_pick_op() {
  static const auto op = find_op<PoolPickSignature>("voxmma::pool_pick");
  return op;
}

const auto& pool_put_op() {
  static const auto op = find_op<PoolPutSignature>("voxmma::pool_put");
  return op;
}

const auto& conv_op() {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("voxmma::conv", "").typed<ConvSignature>();
  return op;
}

const auto& wgrad_op() {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("voxmma::conv_wgrad", "").typed<WgradSignature>();
  return op;
}

// ---- autograd: both ops differentiate into each other, to any order -----------------------------------------------

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// What both ops keep for backward besides x, weight and dy.
struct Plan {
  std::vector<Tensor> map, map_t;  // of the call's own direction, and the opposite (empty: symmetric, or not given)
  bool symmetric, transpose;
  std::string accumulator, tile, dgrad_tile, wgrad_tile;

  void save(AutogradContext* ctx) const {
    auto& data = ctx->saved_data;
    data.reserve(16);  // what the ops add included
    data["map"] = map;
    data["map_t"] = map_t;
    data["symmetric"] = symmetric;
    data["transpose"] = transpose;
    data["accumulator"] = accumulator;
    data["tile"] = tile;
    data["dgrad_tile"] = dgrad_tile;
    data["wgrad_tile"] = wgrad_tile;
  }
  static Plan load(AutogradContext* ctx) {
    auto& data = ctx->saved_data;
    return {data["map"].toTensorVector(),     data["map_t"].toTensorVector(),    data["symmetric"].toBool(),
            data["transpose"].toBool(),       data["accumulator"].toStringRef(), data["tile"].toStringRef(),
            data["dgrad_tile"].toStringRef(), data["wgrad_tile"].toStringRef()};
  }

  // The map whose input rows are this call's output rows, for the gradient `what`.
  const std::vector<Tensor>& opposite(const char* what) const {
    if (symmetric) return map;
    TORCH_CHECK(!map_t.empty(), "map_t is empty, but the gradient of ", what,
                " needs the map of the opposite direction (KernelMap.transposed().tensors)");
    return map_t;
  }
  const std::vector<Tensor>& forward_of_opposite() const { return symmetric ? map_t : map; }
};

// Autocast is off in backward: gradients are computed in the type the forward ran in.
struct NoAutocast {
  c10::impl::ExcludeDispatchKeyGuard guard{c10::autocast_dispatch_keyset};
};

class ConvFunction : public torch::autograd::Function<ConvFunction> {
 public:
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight, const OptTensor& bias,
                        const Plan& plan, const c10::SymInt& n_out, OptDtype out_dtype) {
    plan.save(ctx);
    ctx->set_materialize_grads(false);
    ctx->saved_data["n_in"] = x.sym_size(0);
    ctx->saved_data["x_dtype"] = x.scalar_type();
    ctx->saved_data["weight_dtype"] = weight.scalar_type();
    ctx->saved_data["groups"] = weight.dim() == 4 ? weight.size(1) : int64_t{1};
    ctx->saved_data["volume"] = weight.size(0);
    ctx->saved_data["grouped"] = weight.dim() == 4;
    if (bias.has_value()) ctx->saved_data["bias_dtype"] = bias->scalar_type();
    // x serves the weight's gradient and the weight x's: neither is kept alive for nothing.
    ctx->save_for_backward({weight.requires_grad() ? x : Tensor(), x.requires_grad() ? weight : Tensor()});
    at::AutoDispatchBelowADInplaceOrView below;
    return conv_op().call(x, weight, bias, plan.map, plan.map_t, n_out, plan.symmetric, plan.transpose,
                          plan.accumulator, plan.tile, plan.dgrad_tile, plan.wgrad_tile, out_dtype);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    variable_list out(6);
    if (!grads[0].defined()) return out;
    NoAutocast no_autocast;
    const Plan plan = Plan::load(ctx);
    auto& data = ctx->saved_data;
    const variable_list saved = ctx->get_saved_variables();
    const Tensor &x = saved[0], &weight = saved[1];
    const Tensor dy = grads[0].to(data["x_dtype"].toScalarType());
    if (ctx->needs_input_grad(0)) {
      out[0] = conv_op().call(dy, weight, std::nullopt, plan.opposite("x"), plan.forward_of_opposite(),
                              data["n_in"].toSymInt(), plan.symmetric, !plan.transpose, plan.accumulator,
                              plan.dgrad_tile, plan.tile, plan.wgrad_tile, std::nullopt);
    }
    if (ctx->needs_input_grad(1)) {
      // The kernel writes x's dtype or (not for float64) float32; another weight dtype is one cast more.
      const ScalarType dtype = data["weight_dtype"].toScalarType();
      OptDtype written;
      if (dtype != dy.scalar_type() && dy.scalar_type() != at::kDouble) written = at::kFloat;
      const int64_t volume = data["volume"].toInt(), groups = data["groups"].toInt();
      Tensor dw = plan.transpose
                      ? wgrad_op().call(dy, x, plan.opposite("weight"), plan.forward_of_opposite(), volume, groups,
                                        plan.symmetric, plan.accumulator, plan.wgrad_tile, plan.dgrad_tile, written)
                      : wgrad_op().call(x, dy, plan.map, plan.map_t, volume, groups, plan.symmetric, plan.accumulator,
                                        plan.wgrad_tile, plan.dgrad_tile, written);
      if (groups == 1 && data["grouped"].toBool()) dw = dw.unsqueeze(1);
      out[1] = dw.to(dtype);
    }
    const auto bias = data.find("bias_dtype");
    if (bias != data.end() && ctx->needs_input_grad(2)) {
      const ScalarType sum = grads[0].scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
      out[2] = grads[0].sum(0, /*keepdim=*/false, sum).to(bias->second.toScalarType());
    }
    return out;
  }
};

class WgradFunction : public torch::autograd::Function<WgradFunction> {
 public:
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& dy, const Plan& plan, int64_t volume,
                        int64_t groups, OptDtype out_dtype) {
    plan.save(ctx);
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
    const Plan plan = Plan::load(ctx);
    auto& data = ctx->saved_data;
    const variable_list saved = ctx->get_saved_variables();
    const Tensor &x = saved[0], &dy = saved[1];
    if (ctx->needs_input_grad(0)) {
      out[0] = conv_op().call(dy, grads[0], std::nullopt, plan.opposite("x"), plan.forward_of_opposite(),
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

// Whether a call needs a node in the graph. Forward-mode tangents do: the node says that there is no rule for them.
bool needs_node(std::initializer_list<const Tensor*> inputs) {
  const bool grad_mode = at::GradMode::is_enabled();
  for (const Tensor* t : inputs) {
    if (t->defined() && ((grad_mode && t->requires_grad()) || t->_fw_grad(0).defined())) return true;
  }
  return false;
}

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
  const Plan plan{map.vec(),
                  map_t.vec(),
                  symmetric,
                  transpose,
                  std::string(accumulator),
                  std::string(tile),
                  std::string(dgrad_tile),
                  std::string(wgrad_tile)};
  return ConvFunction::apply(x, weight, bias, plan, n_out, out_dtype);
}

Tensor wgrad_autograd(const Tensor& x, const Tensor& dy, TensorList map, TensorList map_t, int64_t kernel_volume,
                      int64_t groups, bool symmetric, string_view accumulator, string_view tile, string_view dgrad_tile,
                      OptDtype out_dtype) {
  const Plan plan{map.vec(),
                  map_t.vec(),
                  symmetric,
                  /*transpose=*/false,
                  std::string(accumulator),
                  std::string(dgrad_tile),
                  std::string(dgrad_tile),
                  std::string(tile)};
  return WgradFunction::apply(x, dy, plan, kernel_volume, groups, out_dtype);
}

// ---- autograd of pooling: the gradient of a sum is a sum over the opposite direction, that of max is put, whose own
// gradient is pick, whose own is put -----------------------------------------------------------------------------

// What a pooling op runs over; both directions, `map` being the one from the inputs to the outputs.
struct Windows {
  std::vector<Tensor> map, map_t;  // map_t is empty where symmetric, or not given
  int64_t volume;
  bool symmetric;

  void save(AutogradContext* ctx) const {
    auto& data = ctx->saved_data;
    data["map"] = map;
    data["map_t"] = map_t;
    data["volume"] = volume;
    data["symmetric"] = symmetric;
  }
  static Windows load(AutogradContext* ctx) {
    auto& data = ctx->saved_data;
    return {data["map"].toTensorVector(), data["map_t"].toTensorVector(), data["volume"].toInt(),
            data["symmetric"].toBool()};
  }
};

// The map from the outputs to the inputs; where it is the one there is, its offsets are mirrored.
TensorList opposite_map(TensorList map, TensorList map_t, bool symmetric, const char* what) {
  if (symmetric) return map;
  TORCH_CHECK(!map_t.empty(), "map_t is empty, but ", what,
              " needs the map of the opposite direction (KernelMap.transposed().tensors)");
  return map_t;
}

class PoolSumFunction : public torch::autograd::Function<PoolSumFunction> {
 public:
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const OptTensor& in_count, const OptTensor& out_count,
                        const Windows& over, const c10::SymInt& n_out, bool mirror) {
    over.save(ctx);
    ctx->set_materialize_grads(false);
    ctx->saved_data["in_count"] = in_count;
    ctx->saved_data["out_count"] = out_count;
    ctx->saved_data["mirror"] = mirror;
    ctx->saved_data["n_in"] = x.sym_size(0);
    at::AutoDispatchBelowADInplaceOrView below;
    return pool_sum_op().call(x, in_count, out_count, over.map, over.map_t, over.volume, n_out, over.symmetric, mirror);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    variable_list out(6);
    if (!grads[0].defined() || !ctx->needs_input_grad(0)) return out;
    const Windows over = Windows::load(ctx);
    auto& data = ctx->saved_data;
    out[0] = pool_sum_op().call(grads[0], data["out_count"].toOptional<Tensor>(), data["in_count"].toOptional<Tensor>(),
                                opposite_map(over.map, over.map_t, over.symmetric, "the gradient of x"),
                                over.symmetric ? over.map_t : over.map, over.volume, data["n_in"].toSymInt(),
                                over.symmetric, over.symmetric && !data["mirror"].toBool());
    return out;
  }
};

class PoolMaxFunction : public torch::autograd::Function<PoolMaxFunction> {
 public:
  static variable_list forward(AutogradContext* ctx, const Tensor& x, const Windows& over, const c10::SymInt& n_out,
                               bool largest, bool keep_winner) {
    over.save(ctx);
    ctx->set_materialize_grads(false);
    ctx->saved_data["n_in"] = x.sym_size(0);
    ctx->saved_data["kept"] = keep_winner;
    at::AutoDispatchBelowADInplaceOrView below;
    auto [y, winner] =
        pool_max_op().call(x, over.map, over.map_t, over.volume, n_out, over.symmetric, largest, keep_winner);
    ctx->mark_non_differentiable({winner});
    ctx->save_for_backward({winner});
    return {y, winner};
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    variable_list out(5);
    if (!grads[0].defined() || !ctx->needs_input_grad(0)) return out;
    auto& data = ctx->saved_data;
    TORCH_CHECK(data["kept"].toBool(), "the gradient of x needs what pool_max found: keep_winner=True");
    const Windows over = Windows::load(ctx);
    out[0] = pool_put_op().call(grads[0], ctx->get_saved_variables()[0], over.map, over.map_t, over.volume,
                                data["n_in"].toSymInt(), over.symmetric);
    return out;
  }
};

class PoolPickFunction : public torch::autograd::Function<PoolPickFunction> {
 public:
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& winner, const Windows& over) {
    over.save(ctx);
    ctx->set_materialize_grads(false);
    ctx->saved_data["n_in"] = x.sym_size(0);
    ctx->save_for_backward({winner});
    at::AutoDispatchBelowADInplaceOrView below;
    return pool_pick_op().call(x, winner, over.map, over.map_t, over.volume, over.symmetric);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    variable_list out(3);
    if (!grads[0].defined() || !ctx->needs_input_grad(0)) return out;
    const Windows over = Windows::load(ctx);
    out[0] = pool_put_op().call(grads[0], ctx->get_saved_variables()[0], over.map, over.map_t, over.volume,
                                ctx->saved_data["n_in"].toSymInt(), over.symmetric);
    return out;
  }
};

class PoolPutFunction : public torch::autograd::Function<PoolPutFunction> {
 public:
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& winner, const Windows& over,
                        const c10::SymInt& n_out) {
    over.save(ctx);
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({winner});
    at::AutoDispatchBelowADInplaceOrView below;
    return pool_put_op().call(x, winner, over.map, over.map_t, over.volume, n_out, over.symmetric);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    variable_list out(4);
    if (!grads[0].defined() || !ctx->needs_input_grad(0)) return out;
    const Windows over = Windows::load(ctx);
    out[0] =
        pool_pick_op().call(grads[0], ctx->get_saved_variables()[0], over.map, over.map_t, over.volume, over.symmetric);
    return out;
  }
};

Tensor pool_sum_autograd(const Tensor& x, const OptTensor& in_count, const OptTensor& out_count, TensorList map,
                         TensorList map_t, int64_t kernel_volume, c10::SymInt n_out, bool symmetric, bool mirror) {
  if (!needs_node({&x})) {
    at::AutoDispatchBelowADInplaceOrView below;
    return pool_sum_op().call(x, in_count, out_count, map, map_t, kernel_volume, std::move(n_out), symmetric, mirror);
  }
  return PoolSumFunction::apply(x, in_count, out_count, Windows{map.vec(), map_t.vec(), kernel_volume, symmetric},
                                n_out, mirror);
}

std::tuple<Tensor, Tensor> pool_max_autograd(const Tensor& x, TensorList map, TensorList map_t, int64_t kernel_volume,
                                             c10::SymInt n_out, bool symmetric, bool largest, bool keep_winner) {
  if (!needs_node({&x})) {
    at::AutoDispatchBelowADInplaceOrView below;
    return pool_max_op().call(x, map, map_t, kernel_volume, std::move(n_out), symmetric, largest, keep_winner);
  }
  const variable_list both =
      PoolMaxFunction::apply(x, Windows{map.vec(), map_t.vec(), kernel_volume, symmetric}, n_out, largest, keep_winner);
  return {both[0], both[1]};
}

Tensor pool_pick_autograd(const Tensor& x, const Tensor& winner, TensorList map, TensorList map_t,
                          int64_t kernel_volume, bool symmetric) {
  if (!needs_node({&x})) {
    at::AutoDispatchBelowADInplaceOrView below;
    return pool_pick_op().call(x, winner, map, map_t, kernel_volume, symmetric);
  }
  return PoolPickFunction::apply(x, winner, Windows{map.vec(), map_t.vec(), kernel_volume, symmetric});
}

Tensor pool_put_autograd(const Tensor& x, const Tensor& winner, TensorList map, TensorList map_t, int64_t kernel_volume,
                         c10::SymInt n_out, bool symmetric) {
  if (!needs_node({&x})) {
    at::AutoDispatchBelowADInplaceOrView below;
    return pool_put_op().call(x, winner, map, map_t, kernel_volume, std::move(n_out), symmetric);
  }
  return PoolPutFunction::apply(x, winner, Windows{map.vec(), map_t.vec(), kernel_volume, symmetric}, n_out);
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

// ---- calls that are repeated (voxmma/dispatch/calls.py) -----------------------------------------------------------

// The op with all arguments but three, so that a call does not parse them. It goes through the dispatcher like any other,
// but for autocast: the type to compute in has been decided, so the op's own rule must not decide again.
struct PreparedConv {
  Plan plan;
  int64_t n_out;
  OptDtype out_dtype;
  int64_t version;  // of the map

  Tensor operator()(const Tensor& x, const Tensor& weight, const OptTensor& bias) const {
    TORCH_CHECK(version_of(plan.map) == version,
                "the tensors of a kernel map were written to, but every layer on these ",
                "coordinates reads them: KernelMap.free() it, and write into a copy (.clone())");
    NoAutocast no_autocast;
    return conv_op().call(x, weight, bias, plan.map, plan.map_t, n_out, plan.symmetric, plan.transpose,
                          plan.accumulator, plan.tile, plan.dgrad_tile, plan.wgrad_tile, out_dtype);
  }
};

// What a decision depends on beside the caller's arguments: types and shapes of the operands (not the number of rows),
// autocast and inference mode, as bytes that are equal where all of it is. None where it is not to be told: operands on
// several devices or of impossible rank, sizes that are symbols.
std::optional<py::bytes> operand_facts(const Tensor& x, const Tensor& weight, const OptTensor& bias) {
  const at::Device device = x.device();
  std::array<int64_t, 14> facts{};
  size_t count = 0;
  const auto add = [&](const Tensor& t, int64_t first, int64_t most) {
    if (t.device() != device || t.dim() > most || t.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) return false;
    facts[count++] = static_cast<int64_t>(t.scalar_type());
    facts[count++] = t.dim();
    for (int64_t d = first; d < t.dim(); ++d) facts[count++] = t.size(d);
    return true;
  };
  if (!add(x, 1, 2) || !add(weight, 0, 4) || (bias.has_value() && !add(*bias, 0, 1))) return std::nullopt;
  const bool autocast = at::autocast::is_autocast_enabled(device.type());
  facts[count++] = autocast ? static_cast<int64_t>(at::autocast::get_autocast_dtype(device.type())) : -1;
  facts[count++] = c10::InferenceMode::is_enabled();
  return py::bytes(reinterpret_cast<const char*>(facts.data()), count * sizeof(int64_t));
}

// ---- CUDA ---------------------------------------------------------------------------------------------------------

using Ints = std::vector<int64_t>;
using IndexResult = std::tuple<Tensor, Tensor, Ints>;
using DeriveResult = std::tuple<Tensor, Tensor, Tensor, int64_t, bool>;
using PlanResult = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int64_t>;
using GroupResult = std::tuple<Tensor, Tensor, Tensor, Tensor, Ints>;
using LocateResult = std::tuple<Tensor, Tensor, bool>;

#ifdef VOXMMA_WITH_CUDA

constexpr bool kHasCuda = true;

void check_cuda(cudaError_t error, const char* what, at::Device device) {
  TORCH_CHECK(error == cudaSuccess, "voxmma: ", what, " failed on ", device, ": ", cudaGetErrorString(error));
}

struct DeviceInfo {
  int major = 0, minor = 0, sm_count = 0;
  int shared_memory = 0;  // bytes that a block may ask for
  bool sm90 = false;      // this build has kernels of TileConfig::arch 90, and they run on it
};

// Asked once a device; an error where this build has no code for it.
DeviceInfo device_info(at::Device device) {
  static std::mutex mutex;
  static std::vector<DeviceInfo> known;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto index = static_cast<size_t>(device.index());
  if (known.size() <= index) known.resize(index + 1);
  DeviceInfo& info = known[index];
  if (info.sm_count != 0) return info;
  const auto get = [&](cudaDeviceAttr attribute) {
    int value = 0;
    check_cuda(cudaDeviceGetAttribute(&value, attribute, device.index()), "cudaDeviceGetAttribute", device);
    return value;
  };
  const std::pair capability{get(cudaDevAttrComputeCapabilityMajor), get(cudaDevAttrComputeCapabilityMinor)};
  const DeviceInfo found{capability.first, capability.second, get(cudaDevAttrMultiProcessorCount),
                         get(cudaDevAttrMaxSharedMemoryPerBlockOptin),
                         build_runs_on(kCudaArchs, 90, capability.first, capability.second)};
  TORCH_CHECK(build_runs_on(kCudaArchs, 80, found.major, found.minor), "voxmma's kernels were built for ", kCudaArchs,
              ", but ", device, " is of compute capability ", found.major, ".", found.minor,
              ": rebuild with TORCH_CUDA_ARCH_LIST=", found.major, ".", found.minor, found.major == 9 ? "a" : "",
              found.major < 8 ? " (8.0 is the oldest that is supported)" : "");
  info = found;
  return info;
}

// The cudaStream_t behind torch's current stream. torch before 2.10 says it to Python only.
template <class Guard>
auto native_handle(const Guard& guard, const c10::Stream& stream, int)
    -> decltype(guard.getStreamNativeHandle(stream)) {
  return guard.getStreamNativeHandle(stream);
}
template <class Guard>
void* native_handle(const Guard&, const c10::Stream& stream, long) {
  const py::gil_scoped_acquire gil;
  const auto raw = py::module_::import("torch._C").attr("_cuda_getCurrentRawStream");
  return reinterpret_cast<void*>(raw(static_cast<int>(stream.device_index())).cast<uintptr_t>());
}

// Device, current stream and device properties of one call. The kernel library has a CUDA runtime of its own (static),
// so its idea of the current device is set beside torch's; both stand for the same driver context.
struct Launch {
  at::Device device;
  c10::DeviceGuard guard;
  DeviceInfo info;
  cudaStream_t stream;

  explicit Launch(at::Device on) : device(on), guard(on), info(device_info(on)) {
    int current = -1;  // asking is cheaper than setting
    check_cuda(cudaGetDevice(&current), "cudaGetDevice", device);
    if (current != device.index()) check_cuda(cudaSetDevice(device.index()), "cudaSetDevice", device);
    const c10::impl::VirtualGuardImpl impl(at::kCUDA);
    stream = static_cast<cudaStream_t>(native_handle(impl, impl.getStream(device), 0));
  }

  // The one way in which the host waits for the device; torch.cuda.set_sync_debug_mode sees it.
  void wait() const {
    const c10::impl::VirtualGuardImpl impl(at::kCUDA);
    impl.synchronizeStream(impl.getStream(device));
  }

  Tensor empty(at::IntArrayRef sizes, ScalarType dtype) const {
    return at::empty(sizes, at::TensorOptions().dtype(dtype).device(device));
  }
  Tensor scratch(size_t bytes) const { return empty({static_cast<int64_t>(bytes)}, at::kByte); }
};

template <class T>
T* data(const Tensor& t) {
  return static_cast<T*>(t.data_ptr());
}

DType to_dtype(ScalarType t) {
  switch (t) {
    case at::kHalf: return DType::f16;
    case at::kBFloat16: return DType::bf16;
    case at::kFloat: return DType::f32;
    default: return DType::f64;  // is_supported() has been checked
  }
}

constexpr const char* kDtypeNames[] = {"fp16", "bf16", "fp32", "fp64"};
constexpr const char* kAccumNames[] = {"fp32", "fp16", "fp16_promoted", "fp64"};
constexpr const char* kOpNames[] = {"fprop", "wgrad"};

const char* name(DType t) { return kDtypeNames[static_cast<int>(t)]; }
const char* name(Accum t) { return kAccumNames[static_cast<int>(t)]; }
const char* name(Op t) { return kOpNames[static_cast<int>(t)]; }

const KernelEntry& find_tile(string_view tile, Op op, DType input, string_view accum, const DeviceInfo& device) {
  static const auto by_name = [] {
    std::unordered_map<string_view, const KernelEntry*> map;
    for (const KernelEntry& entry : kernel_table()) map.emplace(entry.config.name, &entry);
    return map;
  }();
  const auto found = by_name.find(tile);
  TORCH_CHECK(found != by_name.end(), "tile='", tile,
              "' is not among the compiled kernels (voxmma.tiles() lists them)");
  const TileConfig& c = found->second->config;
  TORCH_CHECK(c.op == op && c.input == input && name(c.accum) == accum, "tile='", tile, "' is ", name(c.op), " for ",
              name(c.input), " inputs with ", name(c.accum), " accumulator, but ", name(op), " for ", name(input),
              " inputs with ", accum, " accumulator was asked for");
  TORCH_CHECK(c.arch != 90 || device.sm90, "tile='", tile, "' needs code for 9.0a and compute capability 9.0; the ",
              "device has ", device.major, ".", device.minor, ", and this voxmma was built for ", kCudaArchs);
  TORCH_CHECK(c.shared_memory <= device.shared_memory, "tile='", tile, "' needs ", c.shared_memory,
              " bytes of shared memory a block, the device allows ", device.shared_memory);
  return *found->second;
}

PlanView plan_view(TensorList map, int64_t kernel_volume, int64_t n_out, int64_t n_in) {
  constexpr int64_t limit = int64_t{1} << 31;
  TORCH_CHECK(n_out < limit - kTileM && n_in < limit, "at most 2^31 rows: got n_out=", n_out, ", n_in=", n_in);
  PlanView plan{};
  plan.order = data<int>(map[0]);
  plan.schedule = data<ScheduledTile>(map[1]);
  plan.passes = data<Pass>(map[2]);
  plan.frag = data<uint32_t>(map[3]);
  plan.uniq = data<int>(map[4]);
  plan.local = data<uint16_t>(map[5]);
  plan.tiles = static_cast<int>(map[1].size(1));
  plan.kernel_volume = static_cast<int>(kernel_volume);
  plan.n_out = n_out;
  plan.n_in = n_in;
  return plan;
}

// Kernels count the weights of one offset in 32 bits.
void check_products(const Shape& s) {
  TORCH_CHECK(s.groups * s.c_in * s.c_out <= std::numeric_limits<int>::max(), "an offset has ", s.groups, " x ", s.c_in,
              " x ", s.c_out, " weights; at most 2^31 - 1 are supported on CUDA");
}

// Feature rows as a kernel takes them: channels adjacent, for MMA kernels every group's row aligned to 16 bytes, and for
// wgmma kernels all of them within kWgmmaSpan. Rows that are not so are copied once, padded with zeros (a zero weight does
// not silence a stray NaN).
struct Rows {
  Tensor owner;
  int64_t stride, group;  // elements from row to row, from group to group

  Rows(const char* name, const Tensor& t, int64_t groups, const TileConfig& config) : owner(t), stride(t.stride(0)) {
    const int64_t channels = t.size(1) / groups;
    const string_view atom = config.atom;
    const int64_t align = atom == "SIMT" ? 1 : 16 / t.element_size();
    const auto in_reach = [&] {
      return atom.substr(0, 4) != "SM90" || in_wgmma_span(t.size(0), stride * t.element_size());
    };
    const auto address = reinterpret_cast<uintptr_t>(t.data_ptr());
    group = (channels + align - 1) / align * align;
    const bool as_is = t.stride(1) == 1 && stride >= t.size(1) && group == channels && stride % align == 0 &&
                       address % (align * t.element_size()) == 0 && in_reach();
    if (!as_is) {
      stride = groups * group;
      TORCH_CHECK(in_reach(), name, " has ", t.size(0), " rows of ", stride * t.element_size(), " bytes: tile ",
                  config.name, " reaches ", kWgmmaSpan,
                  " bytes; an sm80 tile reaches all of it, or split the rows over calls");
      owner = at::constant_pad_nd(t.reshape({t.size(0), groups, channels}), {0, group - channels}).contiguous();
    }
  }
};

// Launches after the workspace has been added; wgrad's accumulator is fp32 (fp64 for fp64) whatever the caller's flag.
void launch(const KernelEntry& entry, ConvArgs& args, const Launch& on) {
  args.sm_count = on.info.sm_count;  // the number of splits, and so the workspace, depends on it
  Tensor workspace;
  if (const size_t bytes = entry.workspace(args); bytes != 0) {
    workspace = on.scratch(bytes);
    args.workspace = workspace.data_ptr();
  }
  const cudaError_t error = entry.launch(args, on.stream);
  TORCH_CHECK(error == cudaSuccess, "voxmma: tile ", entry.config.name, " failed on ", on.device, ": ",
              cudaGetErrorString(error), " (", args.plan.n_out, " rows, ", args.groups, " x ", args.c_in, " -> ",
              args.groups, " x ", args.c_out, " channels, ", args.plan.kernel_volume, " offsets)");
}

Tensor conv_cuda(const Tensor& x, const Tensor& weight, const OptTensor& bias, TensorList map, TensorList /*map_t*/,
                 int64_t n_out, bool symmetric, bool transpose, string_view accumulator, string_view tile,
                 string_view /*dgrad_tile*/, string_view /*wgrad_tile*/, OptDtype out_dtype) {
  const Shape s = check_conv(x, weight, bias, map, n_out, transpose, accumulator, out_dtype);
  check_products(s);
  const Launch on(x.device());
  const KernelEntry& entry = find_tile(tile, Op::fprop, to_dtype(x.scalar_type()), accumulator, on.info);
  const bool fp64 = x.scalar_type() == at::kDouble;

  const Tensor y = on.empty({n_out, s.groups * s.c_out}, s.out);
  if (n_out == 0 || x.size(0) == 0) {
    y.zero_();
    if (bias.has_value()) y.add_(*bias);
    return y;
  }

  const Tensor dense = weight.contiguous();
  PackArgs pack{};
  pack.weight = dense.data_ptr();
  pack.weight_dtype = to_dtype(dense.scalar_type());
  pack.input = entry.config.input;
  pack.kernel_volume = static_cast<int>(s.volume);
  pack.groups = static_cast<int>(s.groups);
  pack.c_in = static_cast<int>(s.c_in);
  pack.c_out = static_cast<int>(s.c_out);
  pack.transpose = transpose;
  pack.mirror = transpose && symmetric;
  pack.n = entry.config.n;
  pack.k = entry.config.k;
  // One buffer: the weight image, its flags, and the bias as the fp32 numbers the epilogue adds.
  const size_t image_bytes = (packed_weight_bytes(pack) + 15) / 16 * 16;
  const int flag_bytes = pack_flag_bytes(pack);
  const bool fused_bias = bias.has_value() && !fp64;
  const Tensor dense_bias = fused_bias ? bias->contiguous() : Tensor();
  const Tensor image = on.scratch(image_bytes + flag_bytes + (fused_bias ? s.groups * s.c_out * sizeof(float) : 0));
  pack.image = image.data_ptr();
  pack.flags = data<uint8_t>(image) + image_bytes;
  if (fused_bias) {
    pack.bias = dense_bias.data_ptr();
    pack.bias_dtype = to_dtype(dense_bias.scalar_type());
    pack.bias32 = reinterpret_cast<float*>(pack.flags + flag_bytes);
  }
  check_cuda(pack_weight(pack, on.stream), "pack_weight", on.device);

  const Rows rows("x", x, s.groups, entry.config);
  ConvArgs args{};
  args.plan = plan_view(map, s.volume, n_out, x.size(0));
  args.a = rows.owner.data_ptr();
  args.lda = rows.stride;
  args.a_group = rows.group;
  args.b = image.data_ptr();
  args.raw = {pack.weight, pack.weight_dtype, pack.transpose, pack.mirror, pack.flags, flag_bytes};
  args.bias = pack.bias32;
  args.out = y.data_ptr();
  args.ldo = y.size(1);
  args.out_dtype = to_dtype(s.out);
  args.c_in = pack.c_in;
  args.c_out = pack.c_out;
  args.groups = pack.groups;
  launch(entry, args, on);
  if (bias.has_value() && fp64) y.add_(*bias);  // the fused bias is fp32
  return y;
}

Tensor wgrad_cuda(const Tensor& x, const Tensor& dy, TensorList map, TensorList /*map_t*/, int64_t kernel_volume,
                  int64_t groups, bool /*symmetric*/, string_view accumulator, string_view tile,
                  string_view /*dgrad_tile*/, OptDtype out_dtype) {
  const Shape s = check_wgrad(x, dy, map, kernel_volume, groups, accumulator, out_dtype);
  check_products(s);
  const Launch on(x.device());
  const char* accum = x.scalar_type() == at::kDouble ? "fp64" : "fp32";  // never less, whatever `accumulator` says
  const KernelEntry& entry = find_tile(tile, Op::wgrad, to_dtype(x.scalar_type()), accum, on.info);
  TORCH_INTERNAL_ASSERT(entry.config.accum == Accum::f32 || entry.config.accum == Accum::f64);

  const Tensor dw = on.empty({kernel_volume, groups, s.c_in, s.c_out}, s.out);
  if (x.size(0) == 0 || dy.size(0) == 0) {
    dw.zero_();
  } else {
    const Rows a("x", x, groups, entry.config), b("dy", dy, groups, entry.config);
    ConvArgs args{};
    args.plan = plan_view(map, kernel_volume, dy.size(0), x.size(0));
    args.a = a.owner.data_ptr();
    args.lda = a.stride;
    args.a_group = a.group;
    args.b = b.owner.data_ptr();
    args.ldb = b.stride;
    args.b_group = b.group;
    args.out = dw.data_ptr();
    args.out_dtype = to_dtype(s.out);
    args.c_in = static_cast<int>(s.c_in);
    args.c_out = static_cast<int>(s.c_out);
    args.groups = static_cast<int>(groups);
    launch(entry, args, on);
  }
  return groups == 1 ? dw.squeeze(1) : dw;
}

// Waits on the host for an event of torch.cuda.Event that is no part of a graph, also while this thread captures one.
void wait_for_event(int64_t handle) {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  const auto swap = [&mode] { return cudaThreadExchangeStreamCaptureMode(&mode); };
  TORCH_CHECK(swap() == cudaSuccess, "cudaThreadExchangeStreamCaptureMode failed");
  const cudaError_t error = cudaEventSynchronize(reinterpret_cast<cudaEvent_t>(handle));
  TORCH_CHECK(swap() == cudaSuccess && error == cudaSuccess,
              "waiting for a CUDA event failed: ", cudaGetErrorString(error));
}

void check_ints(const char* name, const Tensor& t, ScalarType dtype, int64_t columns, const Tensor& like) {
  const bool shape = columns > 0 ? t.dim() == 2 && t.size(1) == columns : t.dim() == 1;
  TORCH_CHECK(t.is_cuda() && t.device() == like.device() && t.scalar_type() == dtype && t.is_contiguous() && shape,
              name, " must be contiguous ", c10::toString(dtype), " of shape (N",
              columns > 0 ? ", " + std::to_string(columns) : "", ") on ",
              like.is_cuda() ? like.device().str() : "a CUDA device", ", got ", c10::toString(t.scalar_type()),
              " of shape ", t.sizes(), " on ", t.device());
}

// What a kernel found out, on the host. Waits.
template <class T>
T read_back(const Launch& on, const T* device) {
  static std::mutex mutex;
  static auto* const unused = new std::vector<Tensor>;  // page-locked; outlives the CUDA context, so never destroyed
  Tensor host;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    if (!unused->empty()) {
      host = std::move(unused->back());
      unused->pop_back();
    }
  }
  if (!host.defined()) host = at::empty({sizeof(T)}, at::TensorOptions().dtype(at::kByte).pinned_memory(true));
  check_cuda(cudaMemcpyAsync(host.data_ptr(), device, sizeof(T), cudaMemcpyDeviceToHost, on.stream), "cudaMemcpyAsync",
             on.device);
  on.wait();
  T value;
  std::memcpy(&value, host.data_ptr(), sizeof(value));
  const std::lock_guard<std::mutex> lock(mutex);
  unused->push_back(std::move(host));
  return value;
}

// One allocation for several tensors: offsets of its parts in units of 4 bytes, each part 256-byte aligned.
struct Parts {
  int64_t total = 0;
  int64_t add(int64_t count) {
    const int64_t at = total;
    total += (count + 63) / 64 * 64;
    return at;
  }
};

// A contiguous tensor in the memory of `whole`, an int32 tensor, from element `begin` of it on.
Tensor part_of(const Tensor& whole, int64_t begin, at::IntArrayRef sizes, ScalarType dtype = at::kInt) {
  const auto type = c10::scalarTypeToTypeMeta(dtype);
  auto impl = c10::make_intrusive<c10::TensorImpl>(c10::Storage(whole.storage()), whole.key_set(), type);
  impl->set_storage_offset(begin * static_cast<int64_t>(sizeof(int)) / static_cast<int64_t>(type.itemsize()));
  impl->set_sizes_contiguous(sizes);
  return Tensor(std::move(impl));
}

template <class T>
Tensor empty_struct(const Launch& on) {
  static_assert(sizeof(T) % sizeof(int64_t) == 0);
  return on.empty({sizeof(T) / sizeof(int64_t)}, at::kLong);
}

// Coordinates and maps are normal tensors without a graph, whoever asks for them: under inference_mode, too, since a
// later training pass saves them for its backward.
struct NormalTensors {
  c10::InferenceMode inference{false};
  at::NoGradGuard no_grad;
};

void copy_triple(const char* name, const Ints& from, int* to) {
  TORCH_CHECK(from.size() == 3, name, " must hold 3 integers, got ", from.size());
  for (int i = 0; i < 3; ++i) to[i] = static_cast<int>(from[i]);
}

// Box around coordinates between bounds = smallest (batch, x, y, z), then largest.
CoordBox box_within(const Ints& bounds) {
  TORCH_CHECK(bounds.size() == 8, "bounds must hold 8 integers, got ", bounds.size());
  int ends[8];
  for (int i = 0; i < 8; ++i) {
    const bool batch = i % 4 == 0;
    TORCH_CHECK(bounds[i] >= (batch ? 0 : -kCoordBias) && bounds[i] <= (batch ? kBatchMax : kCoordBias - 1), "bounds[",
                i, "] is ", bounds[i], ", outside the packable range");
    ends[i] = static_cast<int>(bounds[i]);
  }
  return box_around(ends, ends + 4);
}

Tensor brick_table(const Launch& on, const Tensor& coords, const Tensor& order, int64_t known) {
  const int64_t n = coords.size(0), capacity = brick_capacity(n, known);
  const Tensor table = on.empty({capacity, sizeof(Brick) / sizeof(int)}, at::kInt);
  check_cuda(build_bricks(data<int>(coords), data<int>(order), n, data<Brick>(table), capacity, on.stream),
             "build_bricks", on.device);
  return table;
}

Tensor morton_order(const Launch& on, const Tensor& coords, const CoordBox& box, const Tensor& stats) {
  const int64_t n = coords.size(0);
  const Tensor order = on.empty({n}, at::kInt), scratch = on.scratch(order_workspace(n));
  OrderArgs args{};
  args.coords = data<int>(coords);
  args.n = n;
  args.box = box;
  args.stats = stats.defined() ? data<CoordStats>(stats) : nullptr;
  args.order = data<int>(order);
  args.workspace = scratch.data_ptr();
  check_cuda(order_coords(args, on.stream), "order_coords", on.device);
  return order;
}

// Without bounds the rows are checked, which reads back once (twice where survey_coords cannot tell): bad row,
// duplicate, its twin, smallest and largest coordinates. With bounds they are known to be valid.
IndexResult index_coords_cuda(const Tensor& coords, const Ints& bounds) {
  check_ints("coords", coords, at::kInt, 4, coords);
  const NormalTensors normal;
  const Launch on(coords.device());
  if (!bounds.empty()) {
    const CoordBox box = box_within(bounds);
    const Tensor order = morton_order(on, coords, box, {});
    return {order, brick_table(on, coords, order, -1), {}};
  }
  const int64_t n = coords.size(0);
  const Tensor stats = empty_struct<SurveyStats>(on), scratch = on.scratch(survey_workspace(n));
  check_cuda(survey_coords(data<int>(coords), n, data<SurveyStats>(stats), scratch.data_ptr(), on.stream),
             "survey_coords", on.device);
  const auto survey = read_back(on, data<SurveyStats>(stats));
  CoordStats found = survey.coords;
  Tensor order, table;
  if (survey_holds(survey, n)) {
    const int64_t capacity = brick_capacity(n, survey.cells.bricks);
    Parts parts;
    const int64_t order_at = parts.add(n), table_at = parts.add(4 * capacity);
    const Tensor index = on.empty({parts.total}, at::kInt);
    order = part_of(index, order_at, {n});
    table = part_of(index, table_at, {capacity, 4});
    check_cuda(index_survey(survey, data<int>(coords), n, scratch.data_ptr(), data<int>(order), data<Brick>(table),
                            capacity, on.stream),
               "index_survey", on.device);
  } else if (found.bad_row < 0) {
    const Tensor again = empty_struct<CoordStats>(on);
    order = morton_order(on, coords, box_around(found.min, found.max), again);
    found = read_back(on, data<CoordStats>(again));
    if (found.duplicate == -1) table = brick_table(on, coords, order, found.bricks);
  }
  if (!table.defined()) order = table = on.empty({0, 4}, at::kInt);  // there is an error to report
  const bool twins = found.duplicate != -1;
  Ints list{found.bad_row, twins ? found.duplicate >> 32 : -1, twins ? found.duplicate & 0xffffffff : -1};
  list.insert(list.end(), found.min, found.min + 4);
  list.insert(list.end(), found.max, found.max + 4);
  return {order, table, list};
}

// Output coordinates of a layer (voxmma/sparse/derive.py) and their index: coordinates sorted by (batch, x, y, z),
// order, bricks, how many there are, and whether one lies outside the packable range. In the last case, and above
// `limit`, there is nothing but the count. Works on `piece` candidates at a time; reads back once, or once a piece
// where the bounds hold too many cells for a bitmap.
DeriveResult derive_coords_cuda(const Tensor& coords, const Ints& size, const Ints& stride, const Ints& dilation,
                                const Ints& padding, bool to_children, const Ints& bounds, int64_t piece,
                                int64_t limit) {
  check_ints("coords", coords, at::kInt, 4, coords);
  const NormalTensors normal;
  const Launch on(coords.device());
  ExpandArgs args{};
  copy_triple("size", size, args.size);
  copy_triple("stride", stride, args.stride);
  copy_triple("dilation", dilation, args.dilation);
  copy_triple("padding", padding, args.padding);
  args.to_children = to_children;
  args.box = box_within(bounds);
  const int64_t n = coords.size(0);
  args.n = 1;
  const int64_t rows = std::max<int64_t>(1, piece / expand_bound(args));

  const CoordBox cells_box = cell_box(args.box);
  if (const auto bytes = cell_workspace(cells_box); n > 0 && bytes > 0) {
    args.box = cells_box;
    const Tensor scratch = on.scratch(bytes);
    void* const cells = scratch.data_ptr();
    check_cuda(clear_cells(args.box, cells, on.stream), "clear_cells", on.device);
    for (int64_t begin = 0; begin < n; begin += rows) {
      args.coords = data<int>(coords) + 4 * begin;
      args.n = std::min(rows, n - begin);
      check_cuda(expand_cells(args, cells, on.stream), "expand_cells", on.device);
    }
    check_cuda(count_cells(args.box, cells, on.stream), "count_cells", on.device);
    const CellStats found = read_back(on, cell_stats(args.box, cells));
    if (found.outside != 0 || found.count > limit) {
      const Tensor nothing = on.empty({0, 4}, at::kInt);
      return {nothing, nothing, nothing, found.count, found.outside != 0};
    }
    const int64_t capacity = brick_capacity(found.count, found.bricks);
    Parts parts;
    const int64_t order_at = parts.add(found.count), table_at = parts.add(4 * capacity);
    const Tensor made = on.empty({found.count, 4}, at::kInt), index = on.empty({parts.total}, at::kInt);
    const Tensor order = part_of(index, order_at, {found.count}), table = part_of(index, table_at, {capacity, 4});
    check_cuda(index_cells(args.box, cells, found.count, data<int>(made), data<int>(order), data<Brick>(table),
                           capacity, on.stream),
               "index_cells", on.device);
    return {made, order, table, found.count, false};
  }

  const auto width = static_cast<int64_t>(key_bytes(args.box));
  double cells = 1;  // of the bounds: no more sites than that
  for (int a = 0; a < 4; ++a) cells *= static_cast<double>(bounds[4 + a] - bounds[a] + 1);

  const Tensor stats = empty_struct<ExpandStats>(on);
  args.stats = data<ExpandStats>(stats);
  check_cuda(cudaMemsetAsync(args.stats, 0, sizeof(ExpandStats), on.stream), "cudaMemsetAsync", on.device);
  ExpandStats found{};
  Tensor keys = on.scratch(0), table;
  for (int64_t begin = 0; begin < n && found.outside == 0 && found.count <= limit; begin += rows) {
    args.coords = data<int>(coords) + 4 * begin;
    args.n = std::min(rows, n - begin);
    int64_t room = found.count + expand_bound(args);
    if (cells < static_cast<double>(room)) room = static_cast<int64_t>(cells);
    const Tensor old = keys;
    keys = on.scratch(room * width);
    if (found.count > 0) keys.narrow(0, 0, found.count * width).copy_(old.narrow(0, 0, found.count * width));
    args.keys = keys.data_ptr();
    if (args.capacity < expand_capacity(room)) {
      args.capacity = expand_capacity(room);
      table = on.scratch(args.capacity * width);
      args.table = table.data_ptr();
      check_cuda(cudaMemsetAsync(args.table, 0xff, args.capacity * width, on.stream), "cudaMemsetAsync", on.device);
      check_cuda(rehash_keys(args.box, args.keys, found.count, args.table, args.capacity, on.stream), "rehash_keys",
                 on.device);
    }
    check_cuda(expand_coords(args, on.stream), "expand_coords", on.device);
    found = read_back(on, args.stats);
  }
  if (found.outside != 0 || found.count > limit) {
    const Tensor nothing = on.empty({0, 4}, at::kInt);
    return {nothing, nothing, nothing, found.count, found.outside != 0};
  }
  const Tensor made = on.empty({found.count, 4}, at::kInt),
               scratch = on.scratch(unpack_workspace(args.box, found.count));
  check_cuda(unpack_keys(args.box, keys.data_ptr(), found.count, data<int>(made), scratch.data_ptr(), on.stream),
             "unpack_keys", on.device);
  const Tensor order = morton_order(on, made, args.box, {});
  return {made, order, brick_table(on, made, order, -1), found.count, false};
}

// Rows and pairs of a plan are counted on the device. Where bounds are known that take no more room than the usual guess,
// the count is not read back: `stats` is left on the device, the last result is -1, and passes, frag and uniq end in
// unused room. Else it is, and they are cut to what is used. A strided layer has waited for its coordinates already: its
// bounds may take kStridedRoom times the guess (3x3x3 at stride 2: up to 3.5 times, 37 bytes a row of the larger side).
PlanResult build_plan_cuda(const Tensor& out_coords, const Tensor& out_order, const Tensor& bricks,
                           const Tensor& in_order, const Ints& size, const Ints& start, const Ints& step,
                           const Ints& mul, const Ints& div) {
  check_ints("out_coords", out_coords, at::kInt, 4, out_coords);
  check_ints("out_order", out_order, at::kInt, 0, out_coords);
  check_ints("bricks", bricks, at::kInt, 4, out_coords);
  check_ints("in_order", in_order, at::kInt, 0, out_coords);
  TORCH_CHECK(out_order.size(0) == out_coords.size(0) && bricks.size(0) > 0,
              "out_order or bricks has the wrong length");
  PlanArgs args{};
  copy_triple("size", size, args.size);
  copy_triple("start", start, args.start);
  copy_triple("step", step, args.step);
  copy_triple("mul", mul, args.mul);
  copy_triple("div", div, args.div);
  for (int i = 0; i < 3; ++i) {
    TORCH_CHECK(size[i] >= 1 && size[i] <= kMaxKernel && step[i] != 0 && mul[i] >= 1 && div[i] >= 1, "size ", size,
                ", step ", step, ", mul ", mul, " or div ", div, " is out of range");
  }
  const NormalTensors normal;
  const Launch on(out_coords.device());
  const int64_t volume = size[0] * size[1] * size[2];
  args.n_out = out_coords.size(0);
  args.n_in = in_order.size(0);
  const int64_t tiles = (args.n_out + kTileM - 1) / kTileM;
  Parts fixed;
  const int64_t order_at = fixed.add(tiles * kTileM), schedule_at = fixed.add(2 * tiles * 4);
  const Tensor tile_parts = on.empty({fixed.total}, at::kInt), order = part_of(tile_parts, order_at, {tiles * kTileM});
  const Tensor schedule = part_of(tile_parts, schedule_at, {2, tiles, 4});
  const Tensor local = on.empty({tiles, volume, kTileM}, at::kShort);
  args.out_coords = data<int>(out_coords);
  args.out_order = data<int>(out_order);
  args.bricks = data<Brick>(bricks);
  args.capacity = bricks.size(0);
  args.in_order = data<int>(in_order);
  args.order = data<int>(order);
  args.schedule = data<ScheduledTile>(schedule);
  args.local = data<uint16_t>(local);
  args.sm_count = on.info.sm_count;

  // Surfaces list 1.6 unique rows for each row of the larger side in one pass per kPassOffsets offsets, full grids 2.4.
  const int64_t groups = (volume + kPassOffsets - 1) / kPassOffsets;
  const int64_t rows = groups * std::max(args.n_in, args.n_out) * 5 / 2;
  args.uniq4_capacity = rows / 4 + 1;
  args.pass_capacity = tiles * groups + tiles / 4 + rows / kUniqueMax;
  constexpr int64_t kPassBytes = sizeof(Pass) + kFrags * sizeof(uint32_t);
  const auto bytes = [](int64_t passes, int64_t uniq4) {
    return passes * kPassBytes + uniq4 * 4 * int64_t{sizeof(int)};
  };
  int64_t most_passes, most_uniq4;
  plan_bounds(args, &most_passes, &most_uniq4);
  constexpr int64_t kStridedRoom = 4;
  const auto is_one = [](const Ints& steps) { return steps[0] == 1 && steps[1] == 1 && steps[2] == 1; };
  const int64_t room = is_one(mul) && is_one(div) ? 1 : kStridedRoom;
  const bool certain = bytes(most_passes, most_uniq4) <= room * bytes(args.pass_capacity, args.uniq4_capacity);
  if (certain) {
    args.pass_capacity = most_passes;
    args.uniq4_capacity = most_uniq4;
  }
  constexpr int64_t kStats = sizeof(PlanStats) / sizeof(int64_t);
  Tensor passes, frag, uniq, stats;
  const auto build = [&] {
    Parts sized;
    const int64_t stats_at = sized.add(2 * kStats), passes_at = sized.add(args.pass_capacity * 4);
    const int64_t frag_at = sized.add(args.pass_capacity * kFrags), uniq_at = sized.add(args.uniq4_capacity * 4);
    const Tensor pass_parts = on.empty({sized.total}, at::kInt);
    stats = part_of(pass_parts, stats_at, {kStats}, at::kLong);
    passes = part_of(pass_parts, passes_at, {args.pass_capacity, 4});
    frag = part_of(pass_parts, frag_at, {args.pass_capacity, kFrags});
    uniq = part_of(pass_parts, uniq_at, {args.uniq4_capacity * 4});
    args.stats = data<PlanStats>(stats);
    args.passes = data<Pass>(passes);
    args.frag = data<uint32_t>(frag);
    args.uniq = data<int>(uniq);
    check_cuda(build_plan(args, on.stream), "build_plan", on.device);
  };
  build();
  if (certain) return {order, schedule, passes, frag, uniq, local, stats, -1};
  const PlanStats found = read_back(on, args.stats);
  if (found.passes > args.pass_capacity || found.uniq4 > args.uniq4_capacity) {
    args.pass_capacity = found.passes;
    args.uniq4_capacity = found.uniq4;
    build();
  }
  const int64_t unused = bytes(args.pass_capacity - found.passes, args.uniq4_capacity - found.uniq4);
  const auto held = static_cast<int64_t>(local.nbytes()) + bytes(args.pass_capacity, args.uniq4_capacity);
  const bool copy = unused > held / 8;
  const auto cut = [copy](const Tensor& t, int64_t used) {
    if (copy) return t.narrow(0, 0, used).clone();
    auto sizes = t.sizes().vec();
    sizes[0] = used;
    return part_of(t, t.storage_offset(), sizes);
  };
  return {order, schedule,   cut(passes, found.passes), cut(frag, found.passes), cut(uniq, found.uniq4 * 4), local,
          stats, found.pairs};
}

Tensor plan_to_table_cuda(const std::vector<Tensor>& plan, int64_t n_out) {
  TORCH_CHECK(plan.size() == kPlanTensors && plan[5].is_cuda() && plan[5].dim() == 3, "plan must be a CUDA map of ",
              kPlanTensors, " tensors");
  const int64_t volume = plan[5].size(1);
  check_map("plan", plan, plan[5], volume, -1, n_out);
  const Launch on(plan[5].device());
  const Tensor table = on.empty({volume, n_out}, at::kInt);
  if (n_out > 0) {
    check_cuda(plan_to_table(plan_view(plan, volume, n_out, 0), data<int>(table), on.stream), "plan_to_table",
               on.device);
  }
  return table;
}

Tensor neighbor_counts_cuda(TensorList map, int64_t kernel_volume, int64_t n_out) {
  TORCH_CHECK(map.size() == kPlanTensors && map[0].is_cuda(), "map must be a CUDA map of ", kPlanTensors, " tensors");
  check_map("map", map, map[0], kernel_volume, -1, n_out);
  const Launch on(map[0].device());
  const Tensor counts = on.empty({n_out}, at::kInt);
  check_cuda(neighbor_counts(plan_view(map, kernel_volume, n_out, 0), data<int>(counts), on.stream), "neighbor_counts",
             on.device);
  return counts;
}

// Rows whose channels are adjacent, as they are or copied.
Tensor dense_rows(const Tensor& x) { return x.stride(1) == 1 || x.size(1) <= 1 ? x : x.contiguous(); }

// Runs a pooling kernel whose operands have been checked. `winner`: undefined where the op has none.
Tensor launch_pool(PoolOp op, const Tensor& x, const OptTensor& in_count, const OptTensor& out_count,
                   const Tensor& winner, TensorList map, int64_t kernel_volume, int64_t n_out, bool mirror,
                   const Launch& on) {
  const Tensor rows = dense_rows(x), y = on.empty({n_out, x.size(1)}, x.scalar_type());
  PoolArgs args{};
  args.plan = plan_view(map, kernel_volume, n_out, x.size(0));
  args.op = op;
  args.dtype = to_dtype(x.scalar_type());
  args.mirror = mirror;
  args.x = rows.data_ptr();
  args.ldx = rows.stride(0);
  args.y = y.data_ptr();
  args.channels = x.size(1);
  args.sm_count = on.info.sm_count;
  if (in_count.has_value()) args.in_count = data<int>(*in_count);
  if (out_count.has_value()) args.out_count = data<int>(*out_count);
  if (winner.defined()) args.winner = winner.data_ptr();
  check_cuda(pool(args, on.stream), "pool", on.device);
  return y;
}

Tensor pool_sum_cuda(const Tensor& x, const OptTensor& in_count, const OptTensor& out_count, TensorList map,
                     TensorList /*map_t*/, int64_t kernel_volume, int64_t n_out, bool /*symmetric*/, bool mirror) {
  check_pool(x, in_count, out_count, std::nullopt, 0, "map", map, kernel_volume, n_out);
  return launch_pool(PoolOp::sum, x, in_count, out_count, Tensor(), map, kernel_volume, n_out, mirror,
                     Launch(x.device()));
}

std::tuple<Tensor, Tensor> pool_max_cuda(const Tensor& x, TensorList map, TensorList /*map_t*/, int64_t kernel_volume,
                                         int64_t n_out, bool /*symmetric*/, bool largest, bool keep_winner) {
  check_pool(x, std::nullopt, std::nullopt, std::nullopt, 0, "map", map, kernel_volume, n_out);
  const Launch on(x.device());
  const Tensor winner = on.empty({keep_winner ? n_out : 0, x.size(1)}, winner_dtype(kernel_volume));
  const Tensor y = launch_pool(largest ? PoolOp::max : PoolOp::min, x, std::nullopt, std::nullopt,
                               keep_winner ? winner : Tensor(), map, kernel_volume, n_out, false, on);
  return {y, winner};
}

Tensor pool_pick_cuda(const Tensor& x, const Tensor& winner, TensorList map, TensorList /*map_t*/,
                      int64_t kernel_volume, bool /*symmetric*/) {
  const int64_t n_out = winner.dim() > 0 ? winner.size(0) : 0;
  check_pool(x, std::nullopt, std::nullopt, winner, n_out, "map", map, kernel_volume, n_out);
  return launch_pool(PoolOp::pick, x, std::nullopt, std::nullopt, winner, map, kernel_volume, n_out, false,
                     Launch(x.device()));
}

Tensor pool_put_cuda(const Tensor& x, const Tensor& winner, TensorList map, TensorList map_t, int64_t kernel_volume,
                     int64_t n_out, bool symmetric) {
  const TensorList back = opposite_map(map, map_t, symmetric, "pool_put");
  check_pool(x, std::nullopt, std::nullopt, winner, x.dim() > 0 ? x.size(0) : 0, symmetric ? "map" : "map_t", back,
             kernel_volume, n_out);
  return launch_pool(PoolOp::put, x, std::nullopt, std::nullopt, winner, back, kernel_volume, n_out, symmetric,
                     Launch(x.device()));
}

Tensor launch_segments(const Tensor& x, const OptTensor& candidates, const Tensor& rows, const Tensor& starts,
                       bool argmax) {
  check_segments(x, candidates, rows, starts);
  const Launch on(x.device());
  const Tensor from = dense_rows(x);
  const ScalarType wide = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const Tensor out = on.empty({starts.size(0), x.size(1)}, argmax ? at::kLong : wide);
  SegmentArgs args{};
  args.x = from.data_ptr();
  args.ldx = from.stride(0);
  args.dtype = to_dtype(x.scalar_type());
  args.channels = x.size(1);
  args.rows = data<int64_t>(rows);
  args.n_rows = rows.size(0);
  args.starts = data<int64_t>(starts);
  args.blocks = starts.size(0);
  if (candidates.has_value()) args.candidates = data<int64_t>(*candidates);
  args.out = out.data_ptr();
  check_cuda(argmax ? segment_argmax(args, on.stream) : segment_sum(args, on.stream),
             argmax ? "segment_argmax" : "segment_sum", on.device);
  return out;
}

Tensor segment_sum_cuda(const Tensor& x, const Tensor& rows, const Tensor& starts) {
  return launch_segments(x, std::nullopt, rows, starts, false);
}

Tensor segment_argmax_cuda(const Tensor& x, const OptTensor& candidates, const Tensor& rows, const Tensor& starts) {
  return launch_segments(x, candidates, rows, starts, true);
}

Tensor cells_of_points_cuda(const Tensor& points, const OptTensor& batch, const std::vector<double>& origin,
                            const std::vector<double>& edge) {
  TORCH_CHECK(points.is_cuda() && points.dim() == 2 && points.size(1) == 3 && is_supported(points.scalar_type()),
              "points must be (N, 3) float16, bfloat16, float32 or float64 on a CUDA device, got ",
              dtype_name(points.scalar_type()), " of shape ", points.sizes(), " on ", points.device());
  TORCH_CHECK(origin.size() == 3 && edge.size() == 3, "origin and edge must hold 3 numbers each");
  if (batch.has_value()) check_ints("batch", *batch, at::kLong, 0, points);
  TORCH_CHECK(!batch.has_value() || batch->size(0) == points.size(0), "batch must hold a number per point");
  const NormalTensors normal;
  const Launch on(points.device());
  const Tensor from = points.contiguous(), cells = on.empty({points.size(0), 4}, at::kInt);
  PointArgs args{};
  args.points = from.data_ptr();
  args.dtype = to_dtype(points.scalar_type());
  args.batch = batch.has_value() ? data<int64_t>(*batch) : nullptr;
  args.n = points.size(0);
  std::copy_n(origin.data(), 3, args.origin);
  std::copy_n(edge.data(), 3, args.edge);
  args.cells = data<int>(cells);
  check_cuda(cells_of_points(args, on.stream), "cells_of_points", on.device);
  return cells;
}

// Runs of equal rows: coordinates, order, starts, the run of each row, and [bad row, length of the longest run, smallest
// 4, largest 4]. Reads back twice; where there is a bad row once, and the tensors are empty.
GroupResult group_cells_cuda(const Tensor& cells) {
  check_ints("cells", cells, at::kInt, 4, cells);
  const int64_t n = cells.size(0);
  TORCH_CHECK(n <= std::numeric_limits<int>::max() && reinterpret_cast<uintptr_t>(cells.data_ptr()) % 16 == 0,
              "cells must hold less than 2^31 rows and start at a multiple of 16 bytes");
  const NormalTensors normal;
  const Launch on(cells.device());
  CoordStats found{};
  found.bad_row = -1;
  if (n > 0) {
    const Tensor stats = empty_struct<CoordStats>(on);
    check_cuda(measure_cells(data<int>(cells), n, data<CoordStats>(stats), on.stream), "measure_cells", on.device);
    found = read_back(on, data<CoordStats>(stats));
  }
  Ints facts{found.bad_row, 0};
  facts.insert(facts.end(), found.min, found.min + 4);
  facts.insert(facts.end(), found.max, found.max + 4);
  if (n == 0 || found.bad_row >= 0) {
    return {on.empty({0, 4}, at::kInt), on.empty({0}, at::kInt), at::zeros({1}, cells.options()),
            on.empty({0}, at::kLong), facts};
  }
  GroupArgs args{};
  args.cells = data<int>(cells);
  args.n = n;
  args.box = box_around(found.min, found.max);
  const Tensor order = on.empty({n}, at::kInt), run_of = on.empty({n}, at::kLong), room = on.empty({n + 1}, at::kInt);
  const Tensor stats = empty_struct<RunStats>(on), scratch = on.scratch(group_workspace(args.box, n));
  args.order = data<int>(order);
  args.start = data<int>(room);
  args.run_of = data<int64_t>(run_of);
  args.stats = data<RunStats>(stats);
  args.workspace = scratch.data_ptr();
  check_cuda(group_cells(args, on.stream), "group_cells", on.device);
  const auto runs = read_back(on, data<RunStats>(stats));
  facts[1] = runs.longest;
  const Tensor coords = on.empty({runs.count, 4}, at::kInt), start = on.empty({runs.count + 1}, at::kInt);
  check_cuda(take_runs(args, runs.count, data<int>(coords), data<int>(start), on.stream), "take_runs", on.device);
  return {coords, order, start, run_of, facts};
}

Tensor merge_runs_cuda(const Tensor& x, const Tensor& order, const Tensor& start, int64_t longest, bool mean,
                       bool wide) {
  check_tensor("x", x, 2, x);
  check_ints("order", order, at::kInt, 0, x);
  check_ints("start", start, at::kInt, 0, x);
  TORCH_CHECK(x.is_cuda() && order.size(0) == x.size(0) && start.size(0) > 0, "order must hold a number per row of x");
  TORCH_CHECK(longest <= kMaxMergedRows, "runs of up to ", kMaxMergedRows, " rows can be merged, got ", longest);
  const Launch on(x.device());
  const Tensor from = dense_rows(x);
  const ScalarType sums = x.element_size() == 2 ? at::kFloat : at::kDouble;
  const Tensor out = on.empty({start.size(0) - 1, x.size(1)}, wide ? sums : x.scalar_type());
  MergeArgs args{};
  args.x = from.data_ptr();
  args.ldx = from.stride(0);
  args.dtype = to_dtype(x.scalar_type());
  args.channels = x.size(1);
  args.order = data<int>(order);
  args.start = data<int>(start);
  args.count = start.size(0) - 1;
  args.longest = longest;
  args.mean = mean;
  args.wide = wide;
  args.out = out.data_ptr();
  check_cuda(merge_runs(args, on.stream), "merge_runs", on.device);
  return out;
}

// ---- points: see kernels.h and voxmma/sparse/sampling.py

SetView set_view(const Tensor& order, const Tensor& bricks, const Tensor& like) {
  check_ints("order", order, at::kInt, 0, like);
  check_ints("bricks", bricks, at::kInt, 4, like);
  TORCH_CHECK(bricks.size(0) > 0, "bricks is empty");
  return {data<int>(order), data<Brick>(bricks), bricks.size(0)};
}

// Contiguous at a multiple of 16 bytes.
Tensor aligned(const Tensor& t) {
  const Tensor dense = t.contiguous();
  return reinterpret_cast<uintptr_t>(dense.data_ptr()) % 16 == 0 ? dense : dense.clone();
}

Tensor lookup_rows_cuda(const Tensor& query, const Tensor& order, const Tensor& bricks) {
  const bool is_int64 = query.scalar_type() == at::kLong;
  const Tensor dense = aligned(query);
  check_ints("query", dense, is_int64 ? at::kLong : at::kInt, 4, query);
  const Launch on(query.device());
  const SetView set = set_view(order, bricks, query);
  const Tensor rows = on.empty({query.size(0)}, at::kLong);
  check_cuda(lookup_rows(set, dense.data_ptr(), is_int64, query.size(0), data<int64_t>(rows), on.stream), "lookup_rows",
             on.device);
  return rows;
}

// Rows (N, corners) int32, weights, and whether all points are finite and of a sample that is there. Reads back once.
LocateResult locate_points_cuda(const Tensor& points, const OptTensor& batch, int64_t batch_size,
                                const std::array<double, 3>& shift, const std::array<double, 3>& edge,
                                const std::array<double, 3>& stride, bool trilinear, const Tensor& order,
                                const Tensor& bricks, bool wide) {
  check_tensor("points", points, 2, points);
  TORCH_CHECK(points.size(1) == 3, "points must be (N, 3), got shape ", points.sizes());
  const int64_t n = points.size(0), corners = trilinear ? 8 : 1;
  LocateArgs args{};
  args.set = set_view(order, bricks, points);
  const NormalTensors normal;
  const Launch on(points.device());
  const Tensor dense = points.contiguous(), none = on.empty({1}, at::kLong);
  args.points = dense.data_ptr();
  args.dtype = to_dtype(points.scalar_type());
  args.n = n;
  Tensor samples;
  if (batch.has_value()) {
    args.batch_is_int64 = batch->scalar_type() == at::kLong;
    samples = batch->contiguous();
    check_ints("batch", samples, args.batch_is_int64 ? at::kLong : at::kInt, 0, points);
    TORCH_CHECK(samples.size(0) == n, "batch has ", samples.size(0), " rows, points has ", n);
    args.batch = samples.data_ptr();
  }
  args.batch_size = batch_size;
  std::copy(shift.begin(), shift.end(), args.shift);
  std::copy(edge.begin(), edge.end(), args.edge);
  std::copy(stride.begin(), stride.end(), args.stride);
  args.trilinear = trilinear;
  const Tensor rows = on.empty({n, corners}, at::kInt);
  const Tensor weights = on.empty({n, corners}, wide ? at::kDouble : at::kFloat);
  args.rows = data<int>(rows);
  args.weights = weights.data_ptr();
  args.weight_dtype = wide ? DType::f64 : DType::f32;
  args.invalid = data<int64_t>(none);
  if (n == 0) return {rows, weights, true};
  check_cuda(cudaMemsetAsync(args.invalid, 0, sizeof(int64_t), on.stream), "cudaMemsetAsync", on.device);
  check_cuda(locate_points(args, on.stream), "locate_points", on.device);
  return {rows, weights, read_back(on, args.invalid) == 0};
}

void check_weights(const Tensor& x, const Tensor& weights, int64_t rows) {
  const ScalarType wide = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  TORCH_CHECK(weights.device() == x.device() && weights.scalar_type() == wide && weights.is_contiguous() &&
                  weights.dim() == 2 && weights.size(0) == rows && (weights.size(1) == 1 || weights.size(1) == 8),
              "weights must be contiguous ", dtype_name(wide), " of shape (", rows, ", 1 or 8) on ", x.device(),
              ", got ", c10::toString(weights.scalar_type()), " of shape ", weights.sizes(), " on ", weights.device());
}

Tensor gather_weighted_cuda(const Tensor& x, const Tensor& rows, const Tensor& weights) {
  check_tensor("x", x, 2, x);
  check_ints("rows", rows, at::kInt, weights.size(-1), x);
  check_weights(x, weights, rows.size(0));
  const Launch on(x.device());
  const Tensor from = dense_rows(x), y = on.empty({rows.size(0), x.size(1)}, x.scalar_type());
  GatherArgs args{};
  args.x = from.data_ptr();
  args.ldx = from.stride(0);
  args.dtype = to_dtype(x.scalar_type());
  args.channels = x.size(1);
  args.n = rows.size(0);
  args.corners = static_cast<int>(weights.size(1));
  args.rows = data<int>(rows);
  args.weights = weights.data_ptr();
  args.y = y.data_ptr();
  check_cuda(gather_weighted(args, on.stream), "gather_weighted", on.device);
  return y;
}

// `entries` of weights.flatten(), sorted by the row of dx they add to, and where those of each row begin.
Tensor scatter_weighted_cuda(const Tensor& dy, const Tensor& entries, const Tensor& starts, const Tensor& weights) {
  check_tensor("dy", dy, 2, dy);
  check_ints("entries", entries, at::kLong, 0, dy);
  check_ints("starts", starts, at::kLong, 0, dy);
  check_weights(dy, weights, dy.size(0));
  TORCH_CHECK(starts.size(0) > 0 && entries.size(0) == weights.numel(), "starts has ", starts.size(0),
              " entries, entries has ", entries.size(0), ", weights has ", weights.numel());
  const Launch on(dy.device());
  const int64_t n_out = starts.size(0) - 1;
  // How rows lie must not change the order of additions.
  const Tensor from = aligned(dy), dx = on.empty({n_out, dy.size(1)}, dy.scalar_type());
  const int64_t channels = dy.size(1);
  ScatterArgs args{};
  args.dy = from.data_ptr();
  args.ldy = channels;
  args.dtype = to_dtype(dy.scalar_type());
  args.channels = channels;
  args.n_out = n_out;
  args.corners = static_cast<int>(weights.size(1));
  args.entries = data<int64_t>(entries);
  args.starts = data<int64_t>(starts);
  args.weights = weights.data_ptr();
  args.dx = dx.data_ptr();
  check_cuda(scatter_weighted(args, on.stream), "scatter_weighted", on.device);
  return dx;
}

Tensor mma_probe_cuda(int64_t kind, const Tensor& a, const Tensor& b, const Tensor& c) {
  TORCH_CHECK(kind >= 0 && kind < kMmaKinds, "kind must be 0..", kMmaKinds - 1, ", got ", kind);
  constexpr ScalarType kInputs[] = {at::kHalf, at::kHalf, at::kBFloat16, at::kFloat};  // by kind & 3
  const ScalarType input = kInputs[kind & 3], accumulator = (kind & 3) == 1 ? at::kHalf : at::kFloat;
  const int64_t tiles = a.size(0), depth = input == at::kFloat ? 8 : 16;
  const auto check = [&](const char* name, const Tensor& t, ScalarType dtype, int64_t rows, int64_t columns) {
    TORCH_CHECK(t.is_cuda() && t.device() == a.device() && t.scalar_type() == dtype && t.is_contiguous() &&
                    t.sizes() == at::IntArrayRef({tiles, rows, columns}),
                name, " must be contiguous ", dtype_name(dtype), " (", tiles, ", ", rows, ", ", columns,
                ") on a CUDA device, got ", dtype_name(t.scalar_type()), " ", t.sizes(), " on ", t.device());
  };
  check("a", a, input, 16, depth);
  check("b", b, input, 8, depth);
  check("c", c, accumulator, 16, 8);
  const Launch on(a.device());
  const Tensor d = at::empty_like(c);
  check_cuda(
      mma_probe(static_cast<int>(kind), a.data_ptr(), b.data_ptr(), c.data_ptr(), d.data_ptr(), tiles, on.stream),
      "mma_probe", on.device);
  return d;
}

double mma_rate_cuda(int64_t kind) {
  const Launch on(c10::impl::VirtualGuardImpl(at::kCUDA).getDevice());
  double tflops = 0;
  check_cuda(mma_rate(static_cast<int>(kind), &tflops, on.stream), "mma_rate", on.device);
  return tflops;
}

int64_t shared_memory(int64_t device) {
  int bytes = 0;
  check_cuda(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, static_cast<int>(device)),
             "cudaDeviceGetAttribute", at::Device(at::kCUDA, static_cast<at::DeviceIndex>(device)));
  return bytes;
}

py::list kernel_configs() {
  py::list list;
  for (const KernelEntry& entry : kernel_table()) {
    const TileConfig& c = entry.config;
    py::dict row;
    row["name"] = c.name;
    row["op"] = name(c.op);
    row["dtype"] = name(c.input);
    row["accum"] = name(c.accum);
    row["m"] = c.m;
    row["n"] = c.n;
    row["k"] = c.k;
    row["stages"] = c.stages;
    row["atom"] = c.atom;
    row["promote"] = c.promote;
    row["arch"] = c.arch;
    row["shared_memory"] = c.shared_memory;
    list.append(row);
  }
  return list;
}

// CTAs that share an output of an fprop tile, or partial sums of dW of a wgrad tile. Channels are per group.
int tile_parts(const std::string& tile, int64_t n_out, int64_t kernel_volume, int64_t c_in, int64_t c_out,
               int64_t groups, int64_t sm_count) {
  const KernelEntry* entry = find_kernel(tile.c_str());
  TORCH_CHECK_VALUE(entry != nullptr, "tile='", tile, "' is not among the compiled kernels");
  ConvArgs args{};
  int* const sizes[] = {&args.plan.kernel_volume, &args.c_in,      &args.c_out, &args.groups,
                        &args.sm_count,           &args.plan.tiles};
  const int64_t values[] = {kernel_volume, c_in, c_out, groups, sm_count, (n_out + kTileM - 1) / kTileM};
  for (int i = 0; i < 6; ++i) {
    TORCH_CHECK_VALUE(values[i] > 0 && values[i] < int64_t{1} << 31, "sizes must be positive and less than 2^31, got ",
                      values[i]);
    *sizes[i] = static_cast<int>(values[i]);
  }
  args.plan.n_out = n_out;
  args.out_dtype = entry->config.input;
  return entry->parts == nullptr ? 1 : entry->parts(args);
}

#else  // a CPU-only build

constexpr bool kHasCuda = false;

[[noreturn]] void no_cuda() {
  C10_THROW_ERROR(
      Error,
      "voxmma was built without its CUDA kernels, because no nvcc was found at build time: install the CUDA "
      "toolkit of torch.version.cuda's major version and reinstall voxmma with VOXMMA_CUDA=1 (or move the "
      "tensors to the CPU)");
}

Tensor conv_cuda(const Tensor&, const Tensor&, const OptTensor&, TensorList, TensorList, int64_t, bool, bool,
                 string_view, string_view, string_view, string_view, OptDtype) {
  no_cuda();
}
Tensor wgrad_cuda(const Tensor&, const Tensor&, TensorList, TensorList, int64_t, int64_t, bool, string_view,
                  string_view, string_view, OptDtype) {
  no_cuda();
}
IndexResult index_coords_cuda(const Tensor&, const Ints&) { no_cuda(); }
DeriveResult derive_coords_cuda(const Tensor&, const Ints&, const Ints&, const Ints&, const Ints&, bool, const Ints&,
                                int64_t, int64_t) {
  no_cuda();
}
PlanResult build_plan_cuda(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Ints&, const Ints&,
                           const Ints&, const Ints&, const Ints&) {
  no_cuda();
}
Tensor plan_to_table_cuda(const std::vector<Tensor>&, int64_t) { no_cuda(); }
void wait_for_event(int64_t) { no_cuda(); }
Tensor neighbor_counts_cuda(TensorList, int64_t, int64_t) { no_cuda(); }
Tensor pool_sum_cuda(const Tensor&, const OptTensor&, const OptTensor&, TensorList, TensorList, int64_t, int64_t, bool,
                     bool) {
  no_cuda();
}
std::tuple<Tensor, Tensor> pool_max_cuda(const Tensor&, TensorList, TensorList, int64_t, int64_t, bool, bool, bool) {
  no_cuda();
}
Tensor pool_pick_cuda(const Tensor&, const Tensor&, TensorList, TensorList, int64_t, bool) { no_cuda(); }
Tensor pool_put_cuda(const Tensor&, const Tensor&, TensorList, TensorList, int64_t, int64_t, bool) { no_cuda(); }
Tensor segment_sum_cuda(const Tensor&, const Tensor&, const Tensor&) { no_cuda(); }
Tensor segment_argmax_cuda(const Tensor&, const OptTensor&, const Tensor&, const Tensor&) { no_cuda(); }
Tensor cells_of_points_cuda(const Tensor&, const OptTensor&, const std::vector<double>&, const std::vector<double>&) {
  no_cuda();
}
GroupResult group_cells_cuda(const Tensor&) { no_cuda(); }
Tensor merge_runs_cuda(const Tensor&, const Tensor&, const Tensor&, int64_t, bool, bool) { no_cuda(); }
Tensor lookup_rows_cuda(const Tensor&, const Tensor&, const Tensor&) { no_cuda(); }
LocateResult locate_points_cuda(const Tensor&, const OptTensor&, int64_t, const std::array<double, 3>&,
                                const std::array<double, 3>&, const std::array<double, 3>&, bool, const Tensor&,
                                const Tensor&, bool) {
  no_cuda();
}
Tensor gather_weighted_cuda(const Tensor&, const Tensor&, const Tensor&) { no_cuda(); }
Tensor scatter_weighted_cuda(const Tensor&, const Tensor&, const Tensor&, const Tensor&) { no_cuda(); }
Tensor mma_probe_cuda(int64_t, const Tensor&, const Tensor&, const Tensor&) { no_cuda(); }
double mma_rate_cuda(int64_t) { no_cuda(); }
py::list kernel_configs() { return py::list(); }
int tile_parts(const std::string&, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t) { no_cuda(); }
int64_t shared_memory(int64_t) { no_cuda(); }

#endif

}  // namespace
}  // namespace voxmma

TORCH_LIBRARY(voxmma, m) {
  m.def(
      "conv(Tensor x, Tensor weight, Tensor? bias, Tensor[] map, Tensor[] map_t, SymInt n_out, bool symmetric, "
      "bool transpose, str accumulator, str tile, str dgrad_tile, str wgrad_tile, ScalarType? out_dtype=None) -> "
      "Tensor",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "conv_wgrad(Tensor x, Tensor dy, Tensor[] map, Tensor[] map_t, int kernel_volume, int groups, bool symmetric, "
      "str accumulator, str tile, str dgrad_tile, ScalarType? out_dtype=None) -> Tensor",
      {at::Tag::pt2_compliant_tag});
  // Pooling; PoolOp in kernels.h says what they compute. mirror: the offsets of a symmetric map run backwards.
  m.def(
      "pool_sum(Tensor x, Tensor? in_count, Tensor? out_count, Tensor[] map, Tensor[] map_t, int kernel_volume, "
      "SymInt n_out, bool symmetric, bool mirror) -> Tensor",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "pool_max(Tensor x, Tensor[] map, Tensor[] map_t, int kernel_volume, SymInt n_out, bool symmetric, bool largest, "
      "bool keep_winner) -> (Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
  // From the inputs of pool_max to its outputs, and back from n_out inputs: `map` is that of pool_max in both.
  m.def("pool_pick(Tensor x, Tensor winner, Tensor[] map, Tensor[] map_t, int kernel_volume, bool symmetric) -> Tensor",
        {at::Tag::pt2_compliant_tag});
  m.def(
      "pool_put(Tensor x, Tensor winner, Tensor[] map, Tensor[] map_t, int kernel_volume, SymInt n_out, "
      "bool symmetric) -> Tensor",
      {at::Tag::pt2_compliant_tag});
  // How many inputs each of n_out output rows has.
  m.def("neighbor_counts(Tensor[] map, int kernel_volume, SymInt n_out) -> Tensor", {at::Tag::pt2_compliant_tag});
  // One level of the tree in voxmma/sparse/segments.py, which differentiates it.
  m.def("segment_sum(Tensor x, Tensor rows, Tensor starts) -> Tensor", {at::Tag::pt2_compliant_tag});
  m.def("segment_argmax(Tensor x, Tensor? candidates, Tensor rows, Tensor starts) -> Tensor",
        {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(voxmma, CUDA, m) {
  m.impl("conv", TORCH_FN(voxmma::conv_cuda));
  m.impl("conv_wgrad", TORCH_FN(voxmma::wgrad_cuda));
  m.impl("neighbor_counts", TORCH_FN(voxmma::neighbor_counts_cuda));
  m.impl("pool_sum", TORCH_FN(voxmma::pool_sum_cuda));
  m.impl("pool_max", TORCH_FN(voxmma::pool_max_cuda));
  m.impl("pool_pick", TORCH_FN(voxmma::pool_pick_cuda));
  m.impl("pool_put", TORCH_FN(voxmma::pool_put_cuda));
  m.impl("segment_sum", TORCH_FN(voxmma::segment_sum_cuda));
  m.impl("segment_argmax", TORCH_FN(voxmma::segment_argmax_cuda));
}

TORCH_LIBRARY_IMPL(voxmma, Autograd, m) {
  m.impl("conv", TORCH_FN(voxmma::conv_autograd));
  m.impl("conv_wgrad", TORCH_FN(voxmma::wgrad_autograd));
  m.impl("pool_sum", TORCH_FN(voxmma::pool_sum_autograd));
  m.impl("pool_max", TORCH_FN(voxmma::pool_max_autograd));
  m.impl("pool_pick", TORCH_FN(voxmma::pool_pick_autograd));
  m.impl("pool_put", TORCH_FN(voxmma::pool_put_autograd));
}

TORCH_LIBRARY_IMPL(voxmma, AutocastCUDA, m) {
  m.impl("conv", TORCH_FN(voxmma::conv_autocast<at::kCUDA>));
  m.impl("conv_wgrad", TORCH_FN(voxmma::wgrad_autocast<at::kCUDA>));
}

TORCH_LIBRARY_IMPL(voxmma, AutocastCPU, m) {
  m.impl("conv", TORCH_FN(voxmma::conv_autocast<at::kCPU>));
  m.impl("conv_wgrad", TORCH_FN(voxmma::wgrad_autocast<at::kCPU>));
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.doc() = "voxmma's compiled part: see csrc/binding.cpp, and _C.pyi for the signatures";
  std::istringstream archs(voxmma::kCudaArchs);
  py::list arch_list;
  for (std::string arch; archs >> arch;) arch_list.append(arch);
  m.attr("HAS_CUDA") = voxmma::kHasCuda;
  m.attr("CUDA_ARCHS") = arch_list;
  m.attr("CUDA_VERSION") = voxmma::kCudaVersion;
  m.attr("BUILD_ID") = voxmma::kBuildId;
  m.attr("TORCH_VERSION") = voxmma::kTorchVersion;
  m.def("kernel_configs", &voxmma::kernel_configs);
  m.def("tile_parts", &voxmma::tile_parts, py::arg("tile"), py::arg("n_out"), py::arg("kernel_volume"), py::arg("c_in"),
        py::arg("c_out"), py::arg("groups"), py::arg("sm_count"));
  m.def("build_runs_on", &voxmma::build_runs_on, py::arg("archs"), py::arg("tile_arch"), py::arg("major"),
        py::arg("minor"));
  m.def("shared_memory", torch::wrap_pybind_function(voxmma::shared_memory), py::arg("device"));
  m.def("index_coords", torch::wrap_pybind_function_no_gil(voxmma::index_coords_cuda), py::arg("coords"),
        py::arg("bounds") = voxmma::Ints{});
  m.def("derive_coords", torch::wrap_pybind_function_no_gil(voxmma::derive_coords_cuda), py::arg("coords"),
        py::arg("size"), py::arg("stride"), py::arg("dilation"), py::arg("padding"), py::arg("to_children"),
        py::arg("bounds"), py::arg("piece"), py::arg("limit"));
  m.def("build_plan", torch::wrap_pybind_function_no_gil(voxmma::build_plan_cuda), py::arg("out_coords"),
        py::arg("out_order"), py::arg("bricks"), py::arg("in_order"), py::arg("size"), py::arg("start"),
        py::arg("step"), py::arg("mul"), py::arg("div"));
  m.def("wait_for_event", torch::wrap_pybind_function_no_gil(voxmma::wait_for_event), py::arg("handle"));
  m.def("plan_to_table", torch::wrap_pybind_function_no_gil(voxmma::plan_to_table_cuda), py::arg("plan"),
        py::arg("n_out"));
  m.def("cells_of_points", torch::wrap_pybind_function_no_gil(voxmma::cells_of_points_cuda), py::arg("points"),
        py::arg("batch"), py::arg("origin"), py::arg("edge"));
  m.def("group_cells", torch::wrap_pybind_function_no_gil(voxmma::group_cells_cuda), py::arg("cells"));
  m.def("merge_runs", torch::wrap_pybind_function_no_gil(voxmma::merge_runs_cuda), py::arg("x"), py::arg("order"),
        py::arg("start"), py::arg("longest"), py::arg("mean"), py::arg("wide"));
  m.def("lookup_rows", torch::wrap_pybind_function_no_gil(voxmma::lookup_rows_cuda), py::arg("query"), py::arg("order"),
        py::arg("bricks"));
  m.def("locate_points", torch::wrap_pybind_function_no_gil(voxmma::locate_points_cuda), py::arg("points"),
        py::arg("batch"), py::arg("batch_size"), py::arg("shift"), py::arg("edge"), py::arg("stride"),
        py::arg("trilinear"), py::arg("order"), py::arg("bricks"), py::arg("wide"));
  m.def("gather_weighted", torch::wrap_pybind_function_no_gil(voxmma::gather_weighted_cuda), py::arg("x"),
        py::arg("rows"), py::arg("weights"));
  m.def("scatter_weighted", torch::wrap_pybind_function_no_gil(voxmma::scatter_weighted_cuda), py::arg("dy"),
        py::arg("entries"), py::arg("starts"), py::arg("weights"));
  m.def("mma_probe", torch::wrap_pybind_function_no_gil(voxmma::mma_probe_cuda), py::arg("kind"), py::arg("a"),
        py::arg("b"), py::arg("c"));
  m.def("mma_rate", torch::wrap_pybind_function_no_gil(voxmma::mma_rate_cuda), py::arg("kind"));
  py::class_<voxmma::PreparedConv>(m, "PreparedConv")
      .def(py::init([](std::vector<at::Tensor> map, std::vector<at::Tensor> map_t, int64_t n_out, bool symmetric,
                       bool transpose, std::string accumulator, std::string tile, std::string dgrad_tile,
                       std::string wgrad_tile, std::optional<at::ScalarType> out_dtype) {
        const int64_t version = voxmma::version_of(map);
        return voxmma::PreparedConv{{std::move(map), std::move(map_t), symmetric, transpose, std::move(accumulator),
                                     std::move(tile), std::move(dgrad_tile), std::move(wgrad_tile)},
                                    n_out,
                                    out_dtype,
                                    version};
      }))
      .def("__call__", torch::wrap_pybind_function_no_gil(
                           [](const voxmma::PreparedConv& self, const at::Tensor& x, const at::Tensor& weight,
                              const std::optional<at::Tensor>& bias) { return self(x, weight, bias); }));
  m.def("operand_facts", torch::wrap_pybind_function(voxmma::operand_facts), py::arg("x"), py::arg("weight"),
        py::arg("bias"));
  // The CPU implementations' way to the same checks as on CUDA.
  m.def("check_pool",
        torch::wrap_pybind_function(
            [](const at::Tensor& x, const std::optional<at::Tensor>& in_count,
               const std::optional<at::Tensor>& out_count, const std::optional<at::Tensor>& winner, int64_t winner_rows,
               const std::string& name, const std::vector<at::Tensor>& map, int64_t kernel_volume, int64_t n_out) {
              voxmma::check_pool(x, in_count, out_count, winner, winner_rows, name.c_str(), map, kernel_volume, n_out);
            }));
  m.def("check_map",
        torch::wrap_pybind_function([](const std::vector<at::Tensor>& map, int64_t kernel_volume, int64_t n_out) {
          TORCH_CHECK(!map.empty(), "map is empty");
          voxmma::check_map("map", map, map[0], kernel_volume, -1, n_out);
        }));
  m.def("check_segments",
        torch::wrap_pybind_function(
            [](const at::Tensor& x, const std::optional<at::Tensor>& candidates, const at::Tensor& rows,
               const at::Tensor& starts) { voxmma::check_segments(x, candidates, rows, starts); }));
  m.def("check_conv", torch::wrap_pybind_function(
                          [](const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                             const std::vector<at::Tensor>& map, int64_t n_out, bool transpose,
                             const std::string& accumulator, std::optional<at::ScalarType> out_dtype) {
                            const auto s =
                                voxmma::check_conv(x, weight, bias, map, n_out, transpose, accumulator, out_dtype);
                            return std::make_tuple(s.volume, s.groups, s.c_in, s.c_out);
                          }));
  m.def("check_wgrad",
        torch::wrap_pybind_function([](const at::Tensor& x, const at::Tensor& dy, const std::vector<at::Tensor>& map,
                                       int64_t kernel_volume, int64_t groups, const std::string& accumulator,
                                       std::optional<at::ScalarType> out_dtype) {
          const auto s = voxmma::check_wgrad(x, dy, map, kernel_volume, groups, accumulator, out_dtype);
          return std::make_tuple(s.c_in, s.c_out);
        }));
}
