// The table of compiled kernels, what a device allows them, and the MMA probe.
#include <c10/core/impl/VirtualGuardImpl.h>

#include <string>
#include <unordered_map>

#include "../module.h"
#include "launch.h"
#include "voxmma/dtypes.h"
#include "voxmma/probe.h"

namespace voxmma {
namespace {

#define VOXMMA_NAME(dtype, T, name, ...) name,
constexpr const char* kDtypeNames[] = {VOXMMA_DTYPES(VOXMMA_NAME)};
#undef VOXMMA_NAME
constexpr const char* kAccumNames[] = {"fp32", "fp16", "fp16_promoted", "fp64"};
constexpr const char* kOpNames[] = {"fprop", "wgrad"};

const char* name(DType t) { return kDtypeNames[static_cast<int>(t)]; }
const char* name(Accum t) { return kAccumNames[static_cast<int>(t)]; }
const char* name(Op t) { return kOpNames[static_cast<int>(t)]; }

}  // namespace

const KernelEntry& find_tile(string_view tile, Op op, DType input, string_view accum, const DeviceInfo& device) {
  static const auto by_name = [] {
    std::unordered_map<string_view, const KernelEntry*> map;
    for (const KernelEntry& entry : kernel_table()) map.emplace(entry.config.name, &entry);
    return map;
  }();
  const auto found = by_name.find(tile);
  TORCH_CHECK(found != by_name.end(), "tile='", tile,
              "' is not among the compiled kernels (voxmma.tiles() lists them)");
  const TileConfig& c = found->second->config;
  TORCH_CHECK(c.op == op && c.input == input && name(c.accum) == accum, "tile='", tile, "' is ", name(c.op), " for ",
              name(c.input), " inputs with ", name(c.accum), " accumulator, but ", name(op), " for ", name(input),
              " inputs with ", accum, " accumulator was asked for");
  TORCH_CHECK(c.arch != 90 || device.sm90, "tile='", tile, "' needs code for 9.0a and compute capability 9.0; the ",
              "device has ", device.major, ".", device.minor, ", and this voxmma was built for ", kCudaArchs);
  TORCH_CHECK(c.shared_memory <= device.shared_memory, "tile='", tile, "' needs ", c.shared_memory,
              " bytes of shared memory a block, the device allows ", device.shared_memory);
  return *found->second;
}

namespace {

Tensor mma_probe_cuda(int64_t kind, const Tensor& a, const Tensor& b, const Tensor& c) {
  TORCH_CHECK(kind >= 0 && kind < kMmaKinds, "kind must be 0..", kMmaKinds - 1, ", got ", kind);
  constexpr ScalarType kInputs[] = {at::kHalf, at::kHalf, at::kBFloat16, at::kFloat};  // by kind & 3
  const ScalarType input = kInputs[kind & 3], accumulator = (kind & 3) == 1 ? at::kHalf : at::kFloat;
  const int64_t tiles = a.size(0), depth = input == at::kFloat ? 8 : 16;
  const auto check = [&](const char* name, const Tensor& t, ScalarType dtype, int64_t rows, int64_t columns) {
    TORCH_CHECK(t.is_cuda() && t.device() == a.device() && t.scalar_type() == dtype && t.is_contiguous() &&
                    t.sizes() == at::IntArrayRef({tiles, rows, columns}),
                name, " must be contiguous ", dtype_name(dtype), " (", tiles, ", ", rows, ", ", columns,
                ") on a CUDA device, got ", dtype_name(t.scalar_type()), " ", t.sizes(), " on ", t.device());
  };
  check("a", a, input, 16, depth);
  check("b", b, input, 8, depth);
  check("c", c, accumulator, 16, 8);
  const Launch on(a.device());
  const Tensor d = at::empty_like(c);
  check_cuda(
      mma_probe(static_cast<int>(kind), a.data_ptr(), b.data_ptr(), c.data_ptr(), d.data_ptr(), tiles, on.stream),
      "mma_probe", on.device);
  return d;
}

double mma_rate_cuda(int64_t kind) {
  const Launch on(c10::impl::VirtualGuardImpl(at::kCUDA).getDevice());
  double tflops = 0;
  check_cuda(mma_rate(static_cast<int>(kind), &tflops, on.stream), "mma_rate", on.device);
  return tflops;
}

int64_t shared_memory(int64_t device) {
  return device_info(at::Device(at::kCUDA, static_cast<at::DeviceIndex>(device))).shared_memory;
}

py::list kernel_configs() {
  py::list list;
  for (const KernelEntry& entry : kernel_table()) {
    const TileConfig& c = entry.config;
    py::dict row;
    row["name"] = c.name;
    row["op"] = name(c.op);
    row["dtype"] = name(c.input);
    row["accum"] = name(c.accum);
    row["m"] = c.m;
    row["n"] = c.n;
    row["k"] = c.k;
    row["stages"] = c.stages;
    row["atom"] = c.atom;
    row["promote"] = c.promote;
    row["arch"] = c.arch;
    row["shared_memory"] = c.shared_memory;
    list.append(row);
  }
  return list;
}

// CTAs that share an output of an fprop tile, or partial sums of dW of a wgrad tile. Channels are per group.
int tile_parts(const std::string& tile, int64_t n_out, int64_t kernel_volume, int64_t c_in, int64_t c_out,
               int64_t groups, int64_t sm_count) {
  const KernelEntry* entry = find_kernel(tile.c_str());
  TORCH_CHECK_VALUE(entry != nullptr, "tile='", tile, "' is not among the compiled kernels");
  ConvArgs args{};
  int* const sizes[] = {&args.plan.kernel_volume, &args.c_in,      &args.c_out, &args.groups,
                        &args.sm_count,           &args.plan.tiles};
  const int64_t values[] = {kernel_volume, c_in, c_out, groups, sm_count, (n_out + kTileM - 1) / kTileM};
  for (int i = 0; i < 6; ++i) {
    TORCH_CHECK_VALUE(values[i] > 0 && values[i] < int64_t{1} << 31, "sizes must be positive and less than 2^31, got ",
                      values[i]);
    *sizes[i] = static_cast<int>(values[i]);
  }
  args.plan.n_out = n_out;
  args.out_dtype = entry->config.input;
  return entry->parts == nullptr ? 1 : entry->parts(args);
}

}  // namespace

void bind_tiles(py::module_& m) {
  m.def("kernel_configs", &kernel_configs);
  m.def("tile_parts", &tile_parts, py::arg("tile"), py::arg("n_out"), py::arg("kernel_volume"), py::arg("c_in"),
        py::arg("c_out"), py::arg("groups"), py::arg("sm_count"));
  m.def("driver_version", &driver_version);
  m.def("runtime_version", &runtime_version);
  m.def("shared_memory", torch::wrap_pybind_function(shared_memory), py::arg("device"));
  m.def("mma_probe", torch::wrap_pybind_function_no_gil(mma_probe_cuda), py::arg("kind"), py::arg("a"), py::arg("b"),
        py::arg("c"));
  m.def("mma_rate", torch::wrap_pybind_function_no_gil(mma_rate_cuda), py::arg("kind"));
}

}  // namespace voxmma
