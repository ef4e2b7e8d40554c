// voxmma._C and the schemas of torch.ops.voxmma. CUDA implementations are in csrc/torch/cuda; CPU implementations and
// fakes in Python. Without VOXMMA_WITH_CUDA schemas, autograd and autocast remain, and a CUDA tensor is answered with
// what is missing.
#include "module.h"

#include <torch/library.h>
#include <torch/version.h>

#include <sstream>
#include <string>
#include <tuple>
#include <vector>

#include "checks.h"
#include "voxmma/arch.h"

namespace voxmma {
namespace {

void bind_checks(py::module_& m) {
  // The CPU implementations' way to the same checks as on CUDA.
  m.def("check_pool",
        torch::wrap_pybind_function([](const Tensor& x, const OptTensor& in_count, const OptTensor& out_count,
                                       const OptTensor& winner, int64_t winner_rows, const std::string& name,
                                       const std::vector<Tensor>& map, int64_t kernel_volume, int64_t n_out) {
          check_pool(x, in_count, out_count, winner, winner_rows, name.c_str(), map, kernel_volume, n_out);
        }));
  m.def("check_map",
        torch::wrap_pybind_function([](const std::vector<Tensor>& map, int64_t kernel_volume, int64_t n_out) {
          TORCH_CHECK(!map.empty(), "map is empty");
          check_map("map", map, map[0], kernel_volume, -1, n_out);
        }));
  m.def("check_segments",
        torch::wrap_pybind_function([](const Tensor& x, const OptTensor& candidates, const Tensor& rows,
                                       const Tensor& starts) { check_segments(x, candidates, rows, starts); }));
  m.def("check_conv", torch::wrap_pybind_function([](const Tensor& x, const Tensor& weight, const OptTensor& bias,
                                                     const std::vector<Tensor>& map, int64_t n_out, bool transpose,
                                                     const std::string& accumulator, OptDtype out_dtype) {
          const auto s = check_conv(x, weight, bias, map, n_out, transpose, accumulator, out_dtype);
          return std::make_tuple(s.volume, s.groups, s.c_in, s.c_out);
        }));
  m.def("check_fused",
        torch::wrap_pybind_function([](const Tensor& x, const Tensor& weight, const OptTensor& bias,
                                       const std::vector<Tensor>& map, int64_t n_out, bool transpose,
                                       const std::string& accumulator, OptDtype out_dtype, const OptTensor& scale,
                                       const OptTensor& shift, const OptTensor& mean, const OptTensor& var,
                                       const OptTensor& residual, const std::string& activation, const OptTensor& out) {
          const auto s = check_conv(x, weight, bias, map, n_out, transpose, accumulator, out_dtype);
          check_channels(s, scale, shift, mean, var, x);
          check_fused(s, n_out, residual, activation, out, x);
        }));
  m.def("check_wgrad", torch::wrap_pybind_function([](const Tensor& x, const Tensor& dy, const std::vector<Tensor>& map,
                                                      int64_t kernel_volume, int64_t groups,
                                                      const std::string& accumulator, OptDtype out_dtype) {
          const auto s = check_wgrad(x, dy, map, kernel_volume, groups, accumulator, out_dtype);
          return std::make_tuple(s.c_in, s.c_out);
        }));
}

#ifdef VOXMMA_WITH_CUDA

constexpr bool kHasCuda = true;

void bind_cuda(py::module_& m) {
  bind_tiles(m);
  bind_coords(m);
  bind_plans(m);
  bind_points(m);
  bind_streams(m);
  bind_frames(m);
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

void op_without_cuda(const c10::OperatorHandle&, c10::Stack*) { no_cuda(); }

struct StreamEvent {};
struct Told {};

void bind_cuda(py::module_& m) {
  const auto missing = torch::wrap_pybind_function([](const py::args&, const py::kwargs&) { no_cuda(); });
  for (const char* name :
       {"driver_version", "runtime_version", "tile_parts",       "shared_memory", "mma_probe",    "mma_rate",
        "index_coords",   "derive_coords",   "build_plan",       "index_sized",   "derive_sized", "plan_room",
        "plans_sized",    "plan_to_table",   "cells_of_points",  "group_cells",   "merge_runs",   "lookup_rows",
        "locate_points",  "gather_weighted", "scatter_weighted", "put",           "copies"}) {
    m.def(name, missing);
  }
  py::class_<StreamEvent>(m, "StreamEvent").def_static("record", missing);
  py::class_<Told>(m, "Told").def_static("of", missing);
  m.def("kernel_configs", [] { return py::list(); });
}

TORCH_LIBRARY_IMPL(voxmma, CUDA, m) {
  for (const char* name : {"conv", "conv_fused", "conv_fused_into", "pack_weight", "conv_wgrad", "norm_act",
                           "norm_act_again", "norm_act_backward", "neighbor_counts", "pool_sum", "pool_max",
                           "pool_pick", "pool_put", "segment_sum", "segment_argmax"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&op_without_cuda>());
  }
}

#endif

}  // namespace
}  // namespace voxmma

TORCH_LIBRARY(voxmma, m) {
  m.def(
      "conv(Tensor x, Tensor weight, Tensor? bias, Tensor[] map, Tensor[] map_t, SymInt n_out, bool symmetric, "
      "bool transpose, str accumulator, str tile, str dgrad_tile, str wgrad_tile, ScalarType? out_dtype=None) -> "
      "Tensor",
      {at::Tag::pt2_compliant_tag});
  // conv and what follows it in one launch, without gradients: y = activation((conv(x) - mean) / sqrt(var + eps) * scale +
  // shift + residual), rounded once. mean, var, scale, shift: (C_out,) of any float dtype, residual: (n_out, C_out) of y's
  // dtype, activation: "none", "relu", "leaky_relu" with its slope, "silu" or "gelu" (erf). packed: from pack_weight with
  // the same arguments, None: the weight is packed in the call. conv_fused_into writes into `out`, columns of a wider
  // tensor too, which overlaps neither x nor residual.
#define VOXMMA_FUSED                                                                                        \
  "Tensor x, Tensor weight, Tensor? bias, Tensor[] map, SymInt n_out, bool symmetric, bool transpose, str " \
  "accumulator, "                                                                                           \
  "str tile, ScalarType? out_dtype=None, *, Tensor? scale=None, Tensor? shift=None, Tensor? mean=None, "    \
  "Tensor? var=None, float eps=0.0, Tensor? residual=None, str activation=\"none\", float slope=0.0, "      \
  "Tensor? packed=None"
  m.def("conv_fused(" VOXMMA_FUSED ") -> Tensor", {at::Tag::pt2_compliant_tag});
  m.def("conv_fused_into(" VOXMMA_FUSED ", Tensor(a!) out) -> ()", {at::Tag::pt2_compliant_tag});
#undef VOXMMA_FUSED
  // The weight as a tile's kernel reads it, with the numbers of every channel, for conv_fused of x of `dtype`; packed once
  // where weights are frozen. Empty on the CPU. Writing to what it was made of does not change it.
  m.def(
      "pack_weight(Tensor weight, Tensor? bias, bool symmetric, bool transpose, str accumulator, str tile, "
      "ScalarType dtype, *, Tensor? scale=None, Tensor? shift=None, Tensor? mean=None, Tensor? var=None, "
      "float eps=0.0) -> Tensor",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "conv_wgrad(Tensor x, Tensor dy, Tensor[] map, Tensor[] map_t, int kernel_volume, int groups, bool symmetric, "
      "str accumulator, str tile, str dgrad_tile, ScalarType? out_dtype=None) -> Tensor",
      {at::Tag::pt2_compliant_tag});
  // Batch norm in training and what follows it, on CUDA: y = activation(norm(x) + residual), rounded once, and what its
  // gradient takes: statistics, with `keep` and a residual the cells that relu or leaky_relu passed (instead of the
  // residual). Running statistics are updated, batches is incremented.
  m.def(
      "norm_act(Tensor x, Tensor? weight, Tensor? bias, Tensor(a!)? running_mean, Tensor(b!)? running_var, "
      "Tensor(c!)? batches, float momentum, float eps, Tensor? residual, str activation, float slope, bool keep=False) "
      "-> (Tensor, Tensor, Tensor)");
  // y once more, of x and statistics that norm_act made of it.
  m.def("norm_act_again(Tensor x, Tensor stats, Tensor? residual, str activation, float slope) -> Tensor");
  m.def(
      "norm_act_backward(Tensor dy, Tensor x, Tensor stats, Tensor? residual, Tensor? passed, str activation, "
      "float slope, bool residual_gradient) -> (Tensor, Tensor, Tensor, Tensor)");
  // Pooling; PoolOp in pool.h says what they compute. mirror: the offsets of a symmetric map run backwards.
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

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.doc() = "voxmma's compiled part: see csrc/torch, and _C.pyi for the signatures";
  std::istringstream archs(voxmma::kCudaArchs);
  py::list arch_list;
  for (std::string arch; archs >> arch;) arch_list.append(arch);
  m.attr("HAS_CUDA") = voxmma::kHasCuda;
  m.attr("CUDA_ARCHS") = arch_list;
  m.attr("CUDA_VERSION") = voxmma::kCudaVersion;
  m.attr("BUILD_ID") = voxmma::kBuildId;
  m.attr("TORCH_VERSION") = TORCH_VERSION;
  m.def("build_runs_on", &voxmma::build_runs_on, py::arg("archs"), py::arg("tile_arch"), py::arg("major"),
        py::arg("minor"));
  m.def("driver_problem", &voxmma::driver_problem, py::arg("driver"), py::arg("runtime"));
  voxmma::bind_checks(m);
  voxmma::bind_cached(m);
  voxmma::bind_cpu_conv(m);
  voxmma::bind_cpu_map(m);
  voxmma::bind_prepared_conv(m);
  voxmma::bind_cuda(m);
}
