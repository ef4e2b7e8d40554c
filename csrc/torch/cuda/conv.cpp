// Launches of conv and conv_wgrad.
#include <torch/library.h>

#include <limits>
#include <string_view>

#include "launch.h"

namespace voxmma {
namespace {

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

TORCH_LIBRARY_IMPL(voxmma, CUDA, m) {
  m.impl("conv", TORCH_FN(conv_cuda));
  m.impl("conv_wgrad", TORCH_FN(wgrad_cuda));
}

}  // namespace
}  // namespace voxmma
