// What every kept tensor is asked (voxmma/sparse/cached.py), in one call an object.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/python_variable.h>

#include <tuple>
#include <utility>
#include <vector>

#include "checks.h"
#include "module.h"

namespace voxmma {

Tensor part_of(const Tensor& whole, int64_t begin, at::IntArrayRef sizes, ScalarType dtype) {
  const auto type = c10::scalarTypeToTypeMeta(dtype);
  auto impl = c10::make_intrusive<c10::TensorImpl>(c10::Storage(whole.storage()), whole.key_set(), type);
  impl->set_storage_offset(begin * static_cast<int64_t>(sizeof(int)) / static_cast<int64_t>(type.itemsize()));
  impl->set_sizes_contiguous(sizes);
  return Tensor(std::move(impl));
}

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

// The tensors of a map on a GPU out of those of a sized plan, compact, that found room: `units` of 4 unique rows, `passes`.
std::vector<Tensor> cut_plan(const std::vector<Tensor>& plan, int64_t n_in, int64_t n_out, int64_t passes,
                             int64_t units) {
  TORCH_CHECK_VALUE(plan.size() == 6 && plan[3].dim() == 2 && plan[5].dim() == 3, "plan must be of plans_sized");
  const auto first = [](const Tensor& t, at::IntArrayRef sizes) {
    TORCH_CHECK_VALUE(c10::multiply_integers(sizes) <= t.numel(), "no ", sizes, " in ", t.sizes());
    return part_of(t, t.storage_offset() * t.element_size() / static_cast<int64_t>(sizeof(int)), sizes,
                   t.scalar_type());
  };
  const auto& [order, schedule, pass_list, frag, uniq, local] =
      std::tie(plan[0], plan[1], plan[2], plan[3], plan[4], plan[5]);
  const int64_t rows = local.size(2), tiles = (n_out + rows - 1) / rows;
  return {first(order, {tiles * rows}),  first(schedule, {2, tiles, 4}),
          first(pass_list, {passes, 4}), first(frag, {passes, frag.size(1)}),
          first(uniq, {4 * units}),      first(local, {tiles, local.size(1), rows}),
          first(order, {0, n_in, n_out})};
}

// The first rows of tensors, -1: all. Without dispatch: writes are counted with those of the tensor, there is no graph.
std::vector<Tensor> first_rows(const std::vector<Tensor>& tensors, const std::vector<int64_t>& rows) {
  TORCH_CHECK_VALUE(tensors.size() == rows.size(), rows.size(), " numbers of rows for ", tensors.size(), " tensors");
  std::vector<Tensor> made(tensors);
  for (size_t i = 0; i < made.size(); ++i) {
    if (rows[i] < 0) continue;
    const Tensor& t = tensors[i];
    TORCH_CHECK_VALUE(t.dim() > 0 && rows[i] <= t.size(0), "no ", rows[i], " rows in ", t.sizes());
    auto impl = t.unsafeGetTensorImpl()->shallow_copy_and_detach(t.unsafeGetTensorImpl()->version_counter(), true);
    std::vector<int64_t> sizes = t.sizes().vec();
    sizes[0] = rows[i];
    impl->set_sizes_and_strides(sizes, t.strides());
    made[i] = Tensor(std::move(impl));
  }
  return made;
}

}  // namespace

void bind_cached(py::module_& m) {
  m.def("write_count", torch::wrap_pybind_function(write_count), py::arg("tensors"));
  m.def("map_size", torch::wrap_pybind_function(map_size), py::arg("like"), py::arg("n_in"), py::arg("n_out"));
  m.def("cut_plan", torch::wrap_pybind_function(cut_plan), py::arg("plan"), py::arg("n_in"), py::arg("n_out"),
        py::arg("passes"), py::arg("units"));
  m.def("first_rows", torch::wrap_pybind_function(first_rows), py::arg("tensors"), py::arg("rows"));
}

}  // namespace voxmma
