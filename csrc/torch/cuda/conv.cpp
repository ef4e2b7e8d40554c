// Launches of conv and conv_wgrad.
#include <torch/library.h>

#include <limits>
#include <optional>
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
              error_text(error), " (", args.plan.n_out, " rows, ", args.groups, " x ", args.c_in, " -> ", args.groups,
              " x ", args.c_out, " channels, ", args.plan.kernel_volume, " offsets)");
}

// Numbers of every output channel of one call, and what they make (conv.h, Channels).
struct PerChannels {
  const OptTensor &bias, &scale, &shift, &mean, &var;
  double eps;
};

// The weight image, its flags and the numbers of every channel, in one buffer.
struct Packed {
  PackArgs pack{};
  Tensor bias, scale, shift, mean, var, buffer;
  size_t image, flags, numbers;  // bytes of each; `numbers` of one of the two arrays
  bool summand, factor;          // which there are

  Packed(const Shape& s, const Tensor& weight, const PerChannels& c, const KernelEntry& entry, bool transpose,
         bool mirror) {
    const TileConfig& config = entry.config;
    const int64_t strides[4] = {weight.stride(0), weight.dim() == 4 ? weight.stride(1) : 0, weight.stride(-2),
                                weight.stride(-1)};
    pack.weights = weights_of(weight.data_ptr(), to_dtype(weight.scalar_type()), s.volume, strides, transpose, mirror);
    pack.input = config.input;
    pack.kernel_volume = static_cast<int>(s.volume);
    pack.groups = static_cast<int>(s.groups);
    pack.c_in = static_cast<int>(s.c_in);
    pack.c_out = static_cast<int>(s.c_out);
    pack.n = config.n;
    pack.k = entry.image_channels(pack.c_in);
    const auto number = [](const OptTensor& t, Tensor& owner) -> PerChannel {
      if (!t.has_value()) return {};
      owner = t->contiguous();
      return {owner.data_ptr(), to_dtype(owner.scalar_type())};
    };
    pack.channels.bias = number(c.bias, bias);
    pack.channels.scale = number(c.scale, scale);
    pack.channels.shift = number(c.shift, shift);
    pack.channels.mean = number(c.mean, mean);
    pack.channels.var = number(c.var, var);
    pack.channels.eps = c.eps;
    pack.channels.sums = config.accum == Accum::f64 ? DType::f64 : DType::f32;
    factor = pack.channels.has_factor();
    summand = pack.channels.has_summand();
    image = (packed_weight_bytes(pack) + 15) / 16 * 16;
    flags = pack_flag_bytes(pack);
    const size_t wide = pack.channels.sums == DType::f64 ? sizeof(double) : sizeof(float);
    numbers = (s.groups * s.c_out * wide + 15) / 16 * 16;
  }
  size_t bytes() const { return image + flags + (summand + factor) * numbers; }
  // The buffer that is packed into, or has been.
  void place(const Tensor& t) {
    buffer = t;
    auto* at = data<uint8_t>(t);
    pack.image = at;
    pack.flags = at + image;
    pack.channels.summand = summand ? at + image + flags : nullptr;
    pack.channels.factor = factor ? at + image + flags + numbers : nullptr;
  }
  void run(const Launch& on) { check_cuda(pack_weight(pack, on.stream), "pack_weight", on.device); }
};

// What follows the sums in the same launch.
struct Following {
  const OptTensor& residual;
  string_view activation;
  double slope;
  const OptTensor& packed;
};

// y, or `out` written. Everything has been checked but the weight's size and the tile.
Tensor run_conv(const Shape& s, const Tensor& x, const Tensor& weight, const PerChannels& channels, TensorList map,
                int64_t n_out, bool symmetric, bool transpose, string_view accumulator, string_view tile,
                const Following& then, const Tensor& out) {
  check_products(s);
  const Launch on(x.device());
  const KernelEntry& entry = find_tile(tile, Op::fprop, to_dtype(x.scalar_type()), accumulator, on.info);
  const Tensor y = out.defined() ? out : on.empty({n_out, s.groups * s.c_out}, s.out);
  Packed packed(s, weight, channels, entry, transpose, transpose && symmetric);
  if (then.packed.has_value()) {
    const Tensor& t = *then.packed;
    TORCH_CHECK(t.device() == x.device() && t.scalar_type() == at::kByte && t.is_contiguous() &&
                    t.numel() == static_cast<int64_t>(packed.bytes()) &&
                    reinterpret_cast<uintptr_t>(t.data_ptr()) % 16 == 0,
                "packed must be what pack_weight makes of the same arguments, ", packed.bytes(), " bytes on ",
                x.device(), ", got ", t.numel(), " of ", c10::toString(t.scalar_type()), " on ", t.device());
  }
  if (n_out == 0) return y;
  ConvArgs args{};
  args.sm_count = on.info.sm_count;
  args.raw = {packed.pack.weights, nullptr, 0};
  const Tensor residual = then.residual.has_value() ? dense_rows(*then.residual) : Tensor();
  if (residual.defined()) {
    args.epilogue.residual = residual.data_ptr();
    args.epilogue.ldr = residual.stride(0);
  }
  args.epilogue.activation = static_cast<Activation>(activation_index(then.activation));
  args.epilogue.slope = then.slope;
  args.out = y.data_ptr();
  args.ldo = y.stride(0);
  args.out_dtype = to_dtype(s.out);
  args.c_in = packed.pack.c_in;
  args.c_out = packed.pack.c_out;
  args.groups = packed.pack.groups;
  const bool any = x.size(0) != 0;
  std::optional<Rows> rows;
  if (any) {
    rows.emplace("x", x, s.groups, entry.config);
    args.plan = plan_view(map, s.volume, n_out, x.size(0));
    args.a = rows->owner.data_ptr();
    args.lda = rows->stride;
    args.a_group = rows->group;
  }
  if (any && !then.packed.has_value() && entry.reads_weights != nullptr && entry.reads_weights(args)) {
    args.channels = packed.pack.channels;
  } else {
    packed.place(then.packed.has_value() ? *then.packed : on.scratch(packed.bytes()));
    if (!then.packed.has_value()) packed.run(on);
    args.b = packed.pack.image;
    args.raw.flags = packed.pack.flags;
    args.raw.flag_bytes = static_cast<int>(packed.flags);
    args.bias = packed.pack.channels.summand;
    args.epilogue.scale = packed.pack.channels.factor;
  }
  if (any) {
    launch(entry, args, on);
  } else {
    args.plan.n_out = n_out;
    check_cuda(store_zero_sums(args, packed.pack.channels.sums, on.stream), "store_zero_sums", on.device);
  }
  return y;
}

Tensor conv_cuda(const Tensor& x, const Tensor& weight, const OptTensor& bias, TensorList map, TensorList /*map_t*/,
                 int64_t n_out, bool symmetric, bool transpose, string_view accumulator, string_view tile,
                 string_view /*dgrad_tile*/, string_view /*wgrad_tile*/, OptDtype out_dtype) {
  const OptTensor none;
  const Shape s = check_conv(x, weight, bias, map, n_out, transpose, accumulator, out_dtype);
  return run_conv(s, x, weight, {bias, none, none, none, none, 0}, map, n_out, symmetric, transpose, accumulator, tile,
                  {none, "none", 0, none}, Tensor());
}

Tensor fused_cuda(const Tensor& x, const Tensor& weight, const OptTensor& bias, TensorList map, int64_t n_out,
                  bool symmetric, bool transpose, string_view accumulator, string_view tile, OptDtype out_dtype,
                  const OptTensor& scale, const OptTensor& shift, const OptTensor& mean, const OptTensor& var,
                  double eps, const OptTensor& residual, string_view activation, double slope,
                  const OptTensor& packed) {
  const Shape s = check_conv(x, weight, bias, map, n_out, transpose, accumulator, out_dtype);
  check_channels(s, scale, shift, mean, var, x);
  check_fused(s, n_out, residual, activation, std::nullopt, x);
  return run_conv(s, x, weight, {bias, scale, shift, mean, var, eps}, map, n_out, symmetric, transpose, accumulator,
                  tile, {residual, activation, slope, packed}, Tensor());
}

void fused_into_cuda(const Tensor& x, const Tensor& weight, const OptTensor& bias, TensorList map, int64_t n_out,
                     bool symmetric, bool transpose, string_view accumulator, string_view tile, OptDtype out_dtype,
                     const OptTensor& scale, const OptTensor& shift, const OptTensor& mean, const OptTensor& var,
                     double eps, const OptTensor& residual, string_view activation, double slope,
                     const OptTensor& packed, Tensor& out) {
  const Shape s = check_conv(x, weight, bias, map, n_out, transpose, accumulator, out_dtype);
  check_channels(s, scale, shift, mean, var, x);
  check_fused(s, n_out, residual, activation, out, x);
  run_conv(s, x, weight, {bias, scale, shift, mean, var, eps}, map, n_out, symmetric, transpose, accumulator, tile,
           {residual, activation, slope, packed}, out);
}

Tensor pack_cuda(const Tensor& weight, const OptTensor& bias, bool symmetric, bool transpose, string_view accumulator,
                 string_view tile, ScalarType dtype, const OptTensor& scale, const OptTensor& shift,
                 const OptTensor& mean, const OptTensor& var, double eps) {
  const Shape s = check_weight(weight, bias, transpose);
  check_channels(s, scale, shift, mean, var, weight);
  check_products(s);
  const Launch on(weight.device());
  const KernelEntry& entry = find_tile(tile, Op::fprop, to_dtype(dtype), accumulator, on.info);
  Packed packed(s, weight, {bias, scale, shift, mean, var, eps}, entry, transpose, transpose && symmetric);
  packed.place(on.scratch(packed.bytes()));
  packed.run(on);
  return packed.buffer;
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

  const Tensor dw = groups == 1 ? on.empty({kernel_volume, s.c_in, s.c_out}, s.out)
                                : on.empty({kernel_volume, groups, s.c_in, s.c_out}, s.out);
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
  return dw;
}

TORCH_LIBRARY_IMPL(voxmma, CUDA, m) {
  m.impl("conv", TORCH_FN(conv_cuda));
  m.impl("conv_fused", TORCH_FN(fused_cuda));
  m.impl("conv_fused_into", TORCH_FN(fused_into_cuda));
  m.impl("pack_weight", TORCH_FN(pack_cuda));
  m.impl("conv_wgrad", TORCH_FN(wgrad_cuda));
}

}  // namespace
}  // namespace voxmma
