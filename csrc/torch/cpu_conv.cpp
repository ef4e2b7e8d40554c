// Sums of a convolution on the CPU (voxmma/ops/cpu.py): products of gathered rows, in blocks that stay in the cache.
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
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

template <class T>
void add_offset(const T* x, int64_t n_in, const Tensor& weight, const int64_t* ins, const int64_t* outs, int64_t pairs,
                T* y, int64_t n_out, const at::TensorOptions& options) {
  const int64_t c_in = weight.size(0), c_out = weight.size(1);
  const int64_t wide = std::max<int64_t>(c_in + c_out, 1) * static_cast<int64_t>(sizeof(T));
  const int64_t most = std::min(pairs, std::max(kMinRows, kBlockBytes / wide));
  // The same blocks however many threads there are, so that results are the same, too. Outputs of an offset are distinct.
  at::parallel_for(0, (pairs + most - 1) / most, 1, [&](int64_t first, int64_t last) {
    const c10::InferenceMode no_history(true);
    Tensor rows = at::empty({most, c_in}, options), products = at::empty({most, c_out}, options);
    for (int64_t block = first; block < last; ++block) {
      const int64_t begin = block * most, number = std::min(most, pairs - begin);
      if (number < most && block > 0) {
        rows = rows.narrow(0, 0, number);
        products = products.narrow(0, 0, number);
      }
      T* to = rows.mutable_data_ptr<T>();
      for (int64_t i = 0; i < number; ++i) {
        const int64_t row = ins[begin + i];
        TORCH_CHECK_INDEX(row >= 0 && row < n_in, "a kernel map refers to input row ", row, " of ", n_in);
        std::memcpy(to + i * c_in, x + row * c_in, c_in * sizeof(T));
      }
      at::cpu::mm_out(products, rows, weight);
      const T* from = products.const_data_ptr<T>();
      for (int64_t i = 0; i < number; ++i) {
        const int64_t row = outs[begin + i];
        TORCH_CHECK_INDEX(row >= 0 && row < n_out, "a kernel map refers to output row ", row, " of ", n_out);
        T* const sum = y + row * c_out;
        for (int64_t c = 0; c < c_out; ++c) sum[c] += from[i * c_out + c];
      }
    }
  });
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
      add_offset<scalar_t>(from.const_data_ptr<scalar_t>(), from.size(0), weight.select(0, k),
                           ins.const_data_ptr<int64_t>() + begin, outs.const_data_ptr<int64_t>() + begin, end - begin,
                           y.mutable_data_ptr<scalar_t>(), n_out, x.options());
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
