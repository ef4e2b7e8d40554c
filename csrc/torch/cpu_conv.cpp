// What a CPU does in loops of its own: a convolution's sums (voxmma/ops/cpu.py), a map's pairs (voxmma/sparse/build.py).
#include <ATen/Dispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm_cpu_dispatch.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <tuple>
#include <vector>

#include "checks.h"
#include "module.h"

namespace voxmma {
namespace {

constexpr int64_t kBlockBytes = 256 << 10;  // of gathered rows and their products: half of a core's cache, and less
constexpr int64_t kMinRows = 64;

// sum[c] += from[c]: its loop is unrolled and vectorised, which -O2 does not do.
template <class T>
__attribute__((optimize("O3"))) void add_row(T* __restrict sum, const T* __restrict from, int64_t columns) {
  for (int64_t c = 0; c < columns; ++c) sum[c] += from[c];
}

// Whether the rows are neighbours in memory: those of the centre of a submanifold map.
bool consecutive(const int64_t* rows, int64_t number) {
  for (int64_t i = 1; i < number; ++i)
    if (rows[i] != rows[0] + i) return false;
  return true;
}

template <class T>
void add_offset(const Tensor& x, const Tensor& weight, const int64_t* ins, const int64_t* outs, int64_t pairs, T* y,
                int64_t n_out) {
  const int64_t n_in = x.size(0), c_in = weight.size(0), c_out = weight.size(1);
  const int64_t wide = std::max<int64_t>(c_in + c_out, 1) * static_cast<int64_t>(sizeof(T));
  const int64_t most = std::min(pairs, std::max(kMinRows, kBlockBytes / wide));
  const c10::InferenceMode no_history(true);
  Tensor gathered = at::empty({most, c_in}, x.options()), products = at::empty({most, c_out}, x.options());
  for (int64_t begin = 0; begin < pairs; begin += most) {
    const int64_t number = std::min(most, pairs - begin);
    if (number < most) products = products.narrow(0, 0, number);
    const int64_t* const from = ins + begin;
    for (int64_t i = 0; i < number; ++i)
      TORCH_CHECK_INDEX(from[i] >= 0 && from[i] < n_in, "a kernel map refers to input row ", from[i], " of ", n_in);
    if (consecutive(from, number)) {
      at::cpu::mm_out(products, x.narrow(0, from[0], number), weight);
    } else {
      const T* const rows = x.const_data_ptr<T>();
      T* const to = gathered.mutable_data_ptr<T>();
      for (int64_t i = 0; i < number; ++i) std::memcpy(to + i * c_in, rows + from[i] * c_in, c_in * sizeof(T));
      at::cpu::mm_out(products, gathered.narrow(0, 0, number), weight);
    }
    const T* const product = products.const_data_ptr<T>();
    for (int64_t i = 0; i < number; ++i) {
      const int64_t row = outs[begin + i];
      TORCH_CHECK_INDEX(row >= 0 && row < n_out, "a kernel map refers to output row ", row, " of ", n_out);
      add_row(y + row * c_out, product + i * c_out, c_out);
    }
  }
}

// x (N, C_in), weight (K, C_in, C_out), both fp32 or fp64; in_rows, out_rows (P,), kptr (K + 1,) int64: the pairs of offset k
// are those from kptr[k] to kptr[k + 1]. Returns y (n_out, C_out): products added offset by offset; with `mirror`, offset k
// goes over the pairs of offset K - 1 - k.
Tensor conv_sums(const Tensor& x, const Tensor& weight, const Tensor& in_rows, const Tensor& out_rows,
                 const Tensor& kptr, int64_t n_out, bool mirror) {
  const Tensor from = x.contiguous(), ins = in_rows.contiguous(), outs = out_rows.contiguous(), at = kptr.contiguous();
  const int64_t volume = weight.size(0), pairs = ins.numel();
  TORCH_CHECK(at.numel() == volume + 1 && outs.numel() == pairs, "kptr, in_rows and out_rows do not fit together");
  Tensor y = at::zeros({n_out, weight.size(2)}, x.options());
  const auto* start = at.const_data_ptr<int64_t>();
  AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "conv_sums", [&] {
    for (int64_t k = 0; k < volume; ++k) {
      const int64_t own = mirror ? volume - 1 - k : k, begin = start[own], end = start[own + 1];
      TORCH_CHECK(begin >= 0 && begin <= end && end <= pairs, "kptr[", own, "] is out of order");
      if (begin == end) continue;
      add_offset(from, weight.select(0, k), ins.const_data_ptr<int64_t>() + begin,
                 outs.const_data_ptr<int64_t>() + begin, end - begin, y.mutable_data_ptr<scalar_t>(), n_out);
    }
  });
  return y;
}

// (in_rows, out_rows) of the `found` rows that have a neighbour.
std::tuple<Tensor, Tensor> pairs_of(const std::vector<int64_t>& neighbour, int64_t found,
                                    const at::TensorOptions& options) {
  Tensor ins = at::empty({found}, options), outs = at::empty({found}, options);
  auto *to_in = ins.mutable_data_ptr<int64_t>(), *to_out = outs.mutable_data_ptr<int64_t>();
  int64_t i = 0;
  for (size_t row = 0; row < neighbour.size() && i < found; ++row) {
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
    neighbour[target[i]] = source[place - begin];
    ++found;
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
  for (int64_t i = 0; i < ins.numel(); ++i) {
    TORCH_CHECK_INDEX(to[i] >= 0 && to[i] < number, "in_rows[", i, "] is ", to[i], " of ", number);
    neighbour[to[i]] = from[i];
  }
  return pairs_of(neighbour, ins.numel(), ins.options());
}

}  // namespace

void bind_cpu_conv(py::module_& m) {
  m.def("conv_sums", torch::wrap_pybind_function_no_gil(conv_sums), py::arg("x"), py::arg("weight"), py::arg("in_rows"),
        py::arg("out_rows"), py::arg("kptr"), py::arg("n_out"), py::arg("mirror"));
  m.def("match_rows", torch::wrap_pybind_function_no_gil(match_rows), py::arg("ordered"), py::arg("in_row"),
        py::arg("out_row"), py::arg("batch"), py::arg("axes"), py::arg("masks"), py::arg("n_out"));
  m.def("mirror_pairs", torch::wrap_pybind_function_no_gil(mirror_pairs), py::arg("in_rows"), py::arg("out_rows"),
        py::arg("number"));
}

}  // namespace voxmma
