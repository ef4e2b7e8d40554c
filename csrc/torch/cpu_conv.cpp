// Sums of a convolution on the CPU (voxmma/ops/cpu.py): products of gathered rows, in blocks that stay in the cache.
#include <ATen/Dispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm_cpu_dispatch.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cstring>

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

}  // namespace

void bind_cpu_conv(py::module_& m) {
  m.def("conv_sums", torch::wrap_pybind_function_no_gil(conv_sums), py::arg("x"), py::arg("weight"), py::arg("in_rows"),
        py::arg("out_rows"), py::arg("kptr"), py::arg("n_out"), py::arg("mirror"));
}

}  // namespace voxmma
