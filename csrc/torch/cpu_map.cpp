// Pairs of a kernel map on the CPU (voxmma/sparse/build.py).
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>
#include <tuple>
#include <vector>

#include "checks.h"
#include "module.h"

namespace voxmma {
namespace {

// (in_rows, out_rows) of the rows that have a neighbour, `found` of them.
std::tuple<Tensor, Tensor> pairs_of(const std::vector<int64_t>& neighbour, int64_t found,
                                    const at::TensorOptions& options) {
  Tensor ins = at::empty({found}, options), outs = at::empty({found}, options);
  auto *to_in = ins.mutable_data_ptr<int64_t>(), *to_out = outs.mutable_data_ptr<int64_t>();
  int64_t i = 0;
  for (size_t row = 0; row < neighbour.size(); ++row) {
    if (neighbour[row] < 0) continue;
    to_in[i] = neighbour[row];
    to_out[i++] = static_cast<int64_t>(row);
  }
  return {ins, outs};
}

// The pairs of one offset, outputs ascending. ordered (N,), ascending keys of the inputs, in_row (N,) the row of each;
// out_row (M,) a row of the outputs, whose key is the sum of batch and axes, all (M,); where a mask, (M,), is false it has
// no input. All int64, masks bool. Each search goes on from where the one before ended.
std::tuple<Tensor, Tensor> match_rows(const Tensor& ordered, const Tensor& in_row, const Tensor& out_row,
                                      const Tensor& batch, const std::array<Tensor, 3>& axes,
                                      const std::vector<Tensor>& masks, int64_t n_out) {
  const int64_t number = out_row.numel();
  const auto check = [](const Tensor& t, at::ScalarType dtype, int64_t size) {
    TORCH_CHECK(t.device().is_cpu() && t.scalar_type() == dtype && t.is_contiguous() && t.numel() == size,
                "match_rows takes contiguous tensors on the CPU that fit together");
  };
  check(ordered, at::kLong, ordered.numel());
  check(in_row, at::kLong, ordered.numel());
  for (const Tensor& t : {out_row, batch, axes[0], axes[1], axes[2]}) check(t, at::kLong, number);
  for (const Tensor& t : masks) check(t, at::kBool, number);
  const int64_t *const begin = ordered.const_data_ptr<int64_t>(), *const end = begin + ordered.numel();
  const int64_t *const source = in_row.const_data_ptr<int64_t>(), *const target = out_row.const_data_ptr<int64_t>();
  const int64_t* const part[] = {batch.const_data_ptr<int64_t>(), axes[0].const_data_ptr<int64_t>(),
                                 axes[1].const_data_ptr<int64_t>(), axes[2].const_data_ptr<int64_t>()};
  std::vector<int64_t> neighbour(n_out, -1);
  const int64_t* place = begin;
  int64_t found = 0;
  for (int64_t i = 0; i < number; ++i) {
    const auto has = [i](const Tensor& mask) { return mask.const_data_ptr<bool>()[i]; };
    if (!std::all_of(masks.begin(), masks.end(), has)) continue;
    const int64_t key = part[0][i] + part[1][i] + part[2][i] + part[3][i];
    if (place != begin && place[-1] >= key) {
      place = std::lower_bound(begin, place, key);
    } else {
      int64_t step = 1;  // everything before `place` is smaller
      while (step < end - place && place[step - 1] < key) place += step, step *= 2;
      place = std::lower_bound(place, step < end - place ? place + step : end, key);
    }
    if (place == end || *place != key) continue;
    TORCH_CHECK_INDEX(target[i] >= 0 && target[i] < n_out, "out_row[", i, "] is ", target[i], " of ", n_out);
    found += neighbour[target[i]] < 0;
    neighbour[target[i]] = source[place - begin];
  }
  return pairs_of(neighbour, found, in_row.options());
}

// The pairs of the opposite offset of a symmetric map, outputs ascending: of in_rows and out_rows (P,) each in the other's
// place, all rows of `number` voxels.
std::tuple<Tensor, Tensor> mirror_pairs(const Tensor& in_rows, const Tensor& out_rows, int64_t number) {
  const Tensor ins = in_rows.contiguous(), outs = out_rows.contiguous();
  TORCH_CHECK(ins.numel() == outs.numel(), "in_rows and out_rows do not fit together");
  std::vector<int64_t> neighbour(number, -1);
  const int64_t *const from = outs.const_data_ptr<int64_t>(), *const to = ins.const_data_ptr<int64_t>();
  int64_t found = 0;
  for (int64_t i = 0; i < ins.numel(); ++i) {
    TORCH_CHECK_INDEX(to[i] >= 0 && to[i] < number, "in_rows[", i, "] is ", to[i], " of ", number);
    found += neighbour[to[i]] < 0;
    neighbour[to[i]] = from[i];
  }
  return pairs_of(neighbour, found, ins.options());
}

}  // namespace

void bind_cpu_map(py::module_& m) {
  m.def("match_rows", torch::wrap_pybind_function_no_gil(match_rows), py::arg("ordered"), py::arg("in_row"),
        py::arg("out_row"), py::arg("batch"), py::arg("axes"), py::arg("masks"), py::arg("n_out"));
  m.def("mirror_pairs", torch::wrap_pybind_function_no_gil(mirror_pairs), py::arg("in_rows"), py::arg("out_rows"),
        py::arg("number"));
}

}  // namespace voxmma
