// What every kept tensor is asked (voxmma/sparse/cached.py), in one call an object.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/python_variable.h>

#include "checks.h"
#include "module.h"

namespace voxmma {
namespace {

// Changes whenever torch writes into one of the tensors. What is none, or is an inference tensor, counts as 0.
int64_t write_count(const py::tuple& tensors) {
  int64_t sum = 0;
  for (const py::handle item : tensors) {
    if (!THPVariable_Check(item.ptr())) continue;
    const Tensor& t = THPVariable_Unpack(item.ptr());
    if (!t.is_inference()) sum += static_cast<int64_t>(t._version());
  }
  return sum;
}

// The last tensor of a map: an empty one that tells the ops, by its shape alone, between how many rows the map leads.
Tensor map_size(const Tensor& like, int64_t n_in, int64_t n_out) {
  const c10::InferenceMode normal(false);
  return at::empty({0, n_in, n_out}, like.options().dtype(at::kInt));
}

}  // namespace

void bind_cached(py::module_& m) {
  m.def("write_count", torch::wrap_pybind_function(write_count), py::arg("tensors"));
  m.def("map_size", torch::wrap_pybind_function(map_size), py::arg("like"), py::arg("n_in"), py::arg("n_out"));
}

}  // namespace voxmma
