// Calls that are repeated (voxmma/dispatch/calls.py): the op with its arguments bound, and what a decision depends on.
#include <ATen/autocast_mode.h>

#include <array>
#include <memory>
#include <utility>

#include "module.h"
#include "ops.h"

namespace voxmma {
namespace {

// The op with all arguments but three, so that a call does not parse them. It goes through the dispatcher like any other,
// but for autocast: the type to compute in has been decided, so the op's own rule must not decide again.
struct PreparedConv {
  std::shared_ptr<const Plan> shared;
  int64_t n_out;
  OptDtype out_dtype;
  bool stored;  // weights are (C_out, ..., C_in), not (K, C_in, C_out)

  Tensor kernel(const Tensor& weight) const { return stored ? kernel_of(weight) : weight; }

  Tensor operator()(const Tensor& x, const Tensor& weight, const OptTensor& bias) const {
    check_unwritten(*shared);
    NoAutocast no_autocast;
    const Plan& plan = *shared;
    if (stored) return conv_of_stored(plan, n_out, out_dtype, x, weight, bias);
    return conv_op().call(x, weight, bias, plan.map, plan.map_t, n_out, plan.symmetric, plan.transpose,
                          plan.accumulator, plan.tile, plan.dgrad_tile, plan.wgrad_tile, out_dtype);
  }

  // conv_fused with the same.
  Tensor fused(const Tensor& x, const Tensor& weight, const OptTensor& bias, const OptTensor& scale,
               const OptTensor& shift, const OptTensor& mean, const OptTensor& var, double eps,
               const OptTensor& residual, const std::string& activation, double slope) const {
    check_unwritten(*shared);
    NoAutocast no_autocast;
    const Plan& plan = *shared;
    return fused_op().call(x, kernel(weight), bias, plan.map, n_out, plan.symmetric, plan.transpose, plan.accumulator,
                           plan.tile, out_dtype, scale, shift, mean, var, eps, residual, activation, slope,
                           std::nullopt);
  }

  // conv_fused_into with the same.
  void fused_into(const Tensor& x, const Tensor& weight, const OptTensor& bias, const OptTensor& scale,
                  const OptTensor& shift, const OptTensor& mean, const OptTensor& var, double eps,
                  const OptTensor& residual, const std::string& activation, double slope, Tensor& out) const {
    check_unwritten(*shared);
    NoAutocast no_autocast;
    const Plan& plan = *shared;
    fused_into_op().call(x, kernel(weight), bias, plan.map, n_out, plan.symmetric, plan.transpose, plan.accumulator,
                         plan.tile, out_dtype, scale, shift, mean, var, eps, residual, activation, slope, std::nullopt,
                         out);
  }

  // conv and norm_act as one node. None where norm_act would not take what conv makes, or torch's batch norm not these numbers.
  OptTensor trained(const Tensor& x, const Tensor& weight, const OptTensor& bias, const NormCall& norm,
                    const OptTensor& norm_weight, const OptTensor& norm_bias, const OptTensor& residual) const {
    const ScalarType type = out_dtype.value_or(x.scalar_type()), wide = sum_type(type);
    if (n_out < 2 || norm.running_mean.has_value() != norm.running_var.has_value()) return std::nullopt;
    for (const OptTensor* number : {&norm.running_mean, &norm.running_var, &norm_weight, &norm_bias}) {
      if (!number->has_value()) continue;
      const ScalarType given = (*number)->scalar_type();
      if ((given != type && given != wide) || !(*number)->is_contiguous()) return std::nullopt;
    }
    if (norm.running_mean.has_value() && norm.running_mean->scalar_type() != norm.running_var->scalar_type()) {
      return std::nullopt;
    }
    if (residual.has_value()) {
      const int64_t channels = stored ? weight.size(0) : weight.size(-1) * (weight.dim() == 4 ? weight.size(1) : 1);
      if (residual->scalar_type() != type || residual->size(1) != channels) return std::nullopt;
    }
    check_unwritten(*shared);
    NoAutocast no_autocast;
    return conv_norm_act(shared, n_out, out_dtype, norm, x, weight, stored, bias, norm_weight, norm_bias, residual);
  }
};

// What a decision depends on beside the caller's arguments: types and shapes of the operands (not the number of rows),
// autocast and inference mode, as bytes that are equal where all of it is. None where it is not to be told: operands on
// several devices or of impossible rank, sizes that are symbols.
std::optional<py::bytes> operand_facts(const Tensor& x, const Tensor& weight, const OptTensor& bias) {
  const at::Device device = x.device();
  std::array<int64_t, 15> facts{};
  size_t count = 0;
  const auto add = [&](const Tensor& t, int64_t first, int64_t most) {
    if (t.device() != device || t.dim() > most || t.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) return false;
    facts[count++] = static_cast<int64_t>(t.scalar_type());
    facts[count++] = t.dim();
    for (int64_t d = first; d < t.dim(); ++d) facts[count++] = t.size(d);
    return true;
  };
  if (!add(x, 1, 2) || !add(weight, 0, 5) || (bias.has_value() && !add(*bias, 0, 1))) return std::nullopt;
  const bool autocast = at::autocast::is_autocast_enabled(device.type());
  facts[count++] = autocast ? static_cast<int64_t>(at::autocast::get_autocast_dtype(device.type())) : -1;
  facts[count++] = c10::InferenceMode::is_enabled();
  return py::bytes(reinterpret_cast<const char*>(facts.data()), count * sizeof(int64_t));
}

}  // namespace

void bind_prepared_conv(py::module_& m) {
  py::class_<PreparedConv>(m, "PreparedConv")
      .def(py::init([](std::vector<Tensor> map, std::vector<Tensor> map_t, int64_t n_out, bool symmetric,
                       bool transpose, std::string accumulator, std::string tile, std::string dgrad_tile,
                       std::string wgrad_tile, OptDtype out_dtype, bool stored) {
             return PreparedConv{std::make_shared<const Plan>(Plan{maps_of(std::move(map), std::move(map_t)), symmetric,
                                                                   transpose, std::move(accumulator), std::move(tile),
                                                                   std::move(dgrad_tile), std::move(wgrad_tile)}),
                                 n_out, out_dtype, stored};
           }),
           py::arg("map"), py::arg("map_t"), py::arg("n_out"), py::arg("symmetric"), py::arg("transpose"),
           py::arg("accumulator"), py::arg("tile"), py::arg("dgrad_tile"), py::arg("wgrad_tile"), py::arg("out_dtype"),
           py::arg("stored") = false)
      .def("__call__",
           torch::wrap_pybind_function_no_gil([](const PreparedConv& self, const Tensor& x, const Tensor& weight,
                                                 const OptTensor& bias) { return self(x, weight, bias); }))
      .def("fused", torch::wrap_pybind_function_no_gil(
                        [](const PreparedConv& self, const Tensor& x, const Tensor& weight, const OptTensor& bias,
                           const OptTensor& scale, const OptTensor& shift, const OptTensor& mean, const OptTensor& var,
                           double eps, const OptTensor& residual, const std::string& activation, double slope) {
                          return self.fused(x, weight, bias, scale, shift, mean, var, eps, residual, activation, slope);
                        }))
      .def("fused_into",
           torch::wrap_pybind_function_no_gil(
               [](const PreparedConv& self, const Tensor& x, const Tensor& weight, const OptTensor& bias,
                  const OptTensor& scale, const OptTensor& shift, const OptTensor& mean, const OptTensor& var,
                  double eps, const OptTensor& residual, const std::string& activation, double slope, Tensor out) {
                 self.fused_into(x, weight, bias, scale, shift, mean, var, eps, residual, activation, slope, out);
               }))
      .def("trained", torch::wrap_pybind_function_no_gil(
                          [](const PreparedConv& self, const Tensor& x, const Tensor& weight, const OptTensor& bias,
                             const OptTensor& norm_weight, const OptTensor& norm_bias, const OptTensor& running_mean,
                             const OptTensor& running_var, const OptTensor& batches, double momentum, double eps,
                             const OptTensor& residual, std::string activation, double slope) {
                            const NormCall norm = {running_mean, running_var,           batches, momentum,
                                                   eps,          std::move(activation), slope};
                            return self.trained(x, weight, bias, norm, norm_weight, norm_bias, residual);
                          }));
  m.def("operand_facts", torch::wrap_pybind_function(operand_facts), py::arg("x"), py::arg("weight"), py::arg("bias"));
}

}  // namespace voxmma
