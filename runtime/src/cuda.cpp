// Programs on a GPU: launches of the kernel library with places out of the layout in place of torch's tensors
// (csrc/torch/cuda has the same launches for Python).
#include <cuda_runtime_api.h>

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstring>
#include <iterator>
#include <utility>

#include "backend.h"
#include "rows.h"
#include "voxmma/arch.h"
#include "voxmma/device.h"
#include "voxmma/kernels.h"
#include "voxmma/room.h"

namespace vxm {

namespace {

namespace k = ::voxmma;

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // told here
  fail(error == cudaErrorMemoryAllocation ? VXM_ERROR_MEMORY : VXM_ERROR_CUDA, what, ": ", cudaGetErrorString(error));
}

k::DType kernel_type(DType dtype) { return static_cast<k::DType>(dtype); }  // the first four
static_assert(static_cast<int>(DType::f16) == static_cast<int>(k::DType::f16) &&
              static_cast<int>(DType::f64) == static_cast<int>(k::DType::f64));

k::Accum accum_named(const std::string& name) {
  constexpr const char* kNames[] = {"fp32", "fp16", "fp16_promoted", "fp64"};
  for (int i = 0; i < 4; ++i) {
    if (name == kNames[i]) return static_cast<k::Accum>(i);
  }
  fail(VXM_ERROR_UNSUPPORTED, "sums of '", name, "'");
}

k::CoordBox box_of(const Bounds& bounds) { return k::cell_box(k::box_around(bounds.low, bounds.high)); }

// Parts of a piece of scratch memory: sizes first, then pointers.
class Parts {
 public:
  int64_t add(int64_t bytes) {
    const int64_t at = total_;
    total_ = plus(total_, aligned(bytes));
    return at;
  }
  int64_t total() const { return total_; }

 private:
  int64_t total_ = 0;
};

int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b != 0 && (a < 0) != (b < 0)); }

// Bounds of the packable sites that rows within `from` lead to (voxmma/sparse/derive.py, reach).
Bounds reach(const Bounds& from, const SitesCall& call) {
  constexpr int64_t kMin = -k::kCoordBias, kMax = k::kCoordBias - 1;
  Bounds made = from;
  const Geometry& g = call.geometry;
  for (int a = 0; a < 3; ++a) {
    int64_t first = from.low[1 + a], last = from.high[1 + a];
    const int64_t span = int64_t{g.size[a] - 1} * g.dilation[a];
    if (call.to_children) {
      first = first * g.stride[a] - g.padding[a];
      last = last * g.stride[a] - g.padding[a] + span;
    } else {
      first = -floor_div(span - g.padding[a] - first, g.stride[a]);
      last = floor_div(last + g.padding[a], g.stride[a]);
    }
    const int64_t start = call.shape[a] == 0 ? kMin : 0, end = call.shape[a] == 0 ? kMax : call.shape[a] - 1;
    made.low[1 + a] = static_cast<int>(std::min(std::max(first, start), end));
    made.high[1 + a] = static_cast<int>(std::max<int64_t>(std::min(last, end), made.low[1 + a]));
  }
  return made;
}

cudaStream_t stream_of(const Frame& frame) { return static_cast<cudaStream_t>(frame.stream); }

class Cuda : public Backend {
 public:
  Cuda(const vxm_options& options, const Json& machine) : allocator_(options.allocator), device_(options.device) {
    graph_ = options.graph != 0;
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
      cudaGetLastError();
      const std::string problem = k::driver_problem(k::driver_version(), k::runtime_version());
      fail(VXM_ERROR_DEVICE, "the engine is for a GPU, and there is none that CUDA can use",
           problem.empty() ? "" : ": ", problem);
    }
    if (device_ < 0 || device_ >= count) fail(VXM_ERROR_ARGUMENT, "device ", device_, ": there are ", count);
    cudaDeviceProp properties;
    check(cudaGetDeviceProperties(&properties, device_), "cudaGetDeviceProperties");
    const auto& capability = machine["capability"].array(2);
    const std::string& card = machine["card"].string();
    if (card != properties.name || capability[0].integer() != properties.major ||
        capability[1].integer() != properties.minor) {
      fail(VXM_ERROR_DEVICE, "the engine is for ", card, " (", capability[0].integer(), ".", capability[1].integer(),
           "), device ", device_, " is ", properties.name, " (", properties.major, ".", properties.minor, ")");
    }
    if (!k::build_runs_on(VOXMMA_ARCHS, 80, properties.major, properties.minor)) {
      fail(VXM_ERROR_DEVICE, "the library was built for ", VOXMMA_ARCHS, ", device ", device_,
           " is of compute capability ", properties.major, ".", properties.minor);
    }
    sm90_ = k::build_runs_on(VOXMMA_ARCHS, 90, properties.major, properties.minor);
    sm_count_ = properties.multiProcessorCount;
    shared_memory_ = static_cast<int>(properties.sharedMemPerBlockOptin);
  }

  ~Cuda() override {
    const Current current(device_);
    if (exec_ != nullptr) cudaGraphExecDestroy(exec_);
    if (done_ != nullptr) cudaEventDestroy(done_);
    if (host_ != nullptr) cudaFreeHost(host_);
  }

  void* allocate(size_t bytes) override {
    void* made = nullptr;
    if (allocator_.allocate != nullptr) {
      made = allocator_.allocate(allocator_.context, bytes);
      if (made == nullptr) fail(VXM_ERROR_MEMORY, "the allocator has no ", bytes, " bytes of device memory");
      if (reinterpret_cast<uintptr_t>(made) % 256 != 0) {
        allocator_.release(allocator_.context, made);
        fail(VXM_ERROR_ARGUMENT, "the allocator's memory is not aligned to 256 bytes");
      }
    } else if (const cudaError_t error = cudaMalloc(&made, bytes); error != cudaSuccess) {
      cudaGetLastError();
      if (error != cudaErrorMemoryAllocation) check(error, "cudaMalloc");
      fail(VXM_ERROR_MEMORY, "there are no ", bytes, " bytes of device memory");
    }
    if (const cudaError_t error = cudaMemset(made, 0, bytes); error != cudaSuccess) {
      release(made);
      check(error, "cudaMemset");
    }
    return made;
  }
  void release(void* memory) override {
    if (allocator_.allocate != nullptr) {
      allocator_.release(allocator_.context, memory);
    } else {
      cudaFree(memory);
    }
  }

  void finish(unsigned char* weights) override {
    for (Pack& entry : packs_) {
      k::PackArgs& pack = entry.args;
      const auto at = [&](int64_t offset) { return offset < 0 ? nullptr : weights + offset; };
      pack.weights.data = at(entry.weight);
      k::PerChannel* const numbers[] = {&pack.channels.bias, &pack.channels.scale, &pack.channels.shift,
                                        &pack.channels.mean, &pack.channels.var};
      for (int i = 0; i < 5; ++i) numbers[i]->values = at(entry.numbers[i]);
      pack.image = at(entry.image);
      pack.flags = static_cast<uint8_t*>(at(entry.flags));
      pack.channels.summand = at(entry.summand);
      pack.channels.factor = at(entry.factor);
      check(k::pack_weight(pack, nullptr), "pack_weight");
    }
    check(cudaStreamSynchronize(nullptr), "pack_weight");
    packs_.clear();
  }

  int64_t index_bytes(int part, int64_t capacity) const override {
    if (part == 0) return times(4, capacity);
    return times(k::brick_capacity(capacity, -1), sizeof(k::Brick));
  }

  std::vector<int64_t> map_bytes(const MapCall& call) override {
    const k::PlanArgs args = plan_args(call);
    const int64_t tiles = tiles_of(call.map.n_out), most = args.pass_capacity + k::empty_passes(call.map.volume);
    return {times(tiles, k::kTileM * 4),    times(tiles, 2 * sizeof(k::ScheduledTile)),
            times(most, sizeof(k::Pass)),   times(most, k::kFrags * 4),
            times(args.uniq4_capacity, 16), times(times(tiles, call.map.volume), k::kTileM * 2)};
  }
  int map_parts() const override { return 7; }

  bool limits(const MapCall& call, int64_t* passes, int64_t* units) const override {
    const k::PlanArgs args = plan_args(call);
    *passes = args.pass_capacity;
    *units = args.uniq4_capacity;
    return true;
  }

  Work index(const IndexCall& call) override {
    k::OrderArgs args{};
    args.n = call.set.capacity;
    args.box = box_of(call.bounds);
    std::copy(call.bounds.low, call.bounds.low + 4, args.low);
    std::copy(call.bounds.high, call.bounds.high + 4, args.high);
    return {static_cast<int64_t>(k::index_workspace(args.box, args.n)),
            [call, args](const Frame& frame, unsigned char* scratch) {
              k::OrderArgs order = args;
              order.count = frame.at<int64_t>(call.set.count);
              order.sized = frame.at<k::SizedStats>(call.status);
              order.bounds = frame.at<int>(call.set.inner);
              order.coords = frame.at<int>(call.set.coords);
              order.order = frame.at<int>(call.set.index[0]);
              order.workspace = scratch;
              check(k::index_coords(order, frame.at<k::Brick>(call.set.index[1]), k::brick_capacity(order.n, -1),
                                    stream_of(frame)),
                    "index_coords");
            }};
  }

  Work sites(const SitesCall& call) override {
    k::ExpandArgs args{};
    const Geometry& g = call.geometry;
    std::copy(g.size, g.size + 3, args.size);
    std::copy(g.stride, g.stride + 3, args.stride);
    std::copy(g.dilation, g.dilation + 3, args.dilation);
    std::copy(g.padding, g.padding + 3, args.padding);
    std::copy(call.shape, call.shape + 3, args.shape);
    args.to_children = call.to_children;
    args.box = box_of(reach(call.bounds, call));
    args.n = 1;
    constexpr int64_t kPiece = 1 << 30;  // candidates of a launch
    const int64_t piece = std::max<int64_t>(1, kPiece / k::expand_bound(args));
    const auto bytes = static_cast<int64_t>(k::cell_workspace(args.box));
    return bytes > 0 ? sites_by_cells(call, args, piece, bytes) : sites_by_keys(call, args, piece);
  }

  Work maps(const std::vector<MapCall>& calls) override {
    std::vector<k::PlanArgs> rules;
    for (const MapCall& call : calls) rules.push_back(plan_args(call));
    return {0, [calls, rules](const Frame& frame, unsigned char*) {
              std::vector<k::PlanArgs> plans = rules;
              for (size_t i = 0; i < calls.size(); ++i) {
                const MapCall& call = calls[i];
                k::PlanArgs& plan = plans[i];
                plan.out_coords = frame.at<int>(call.out.coords);
                plan.out_order = frame.at<int>(call.out.index[0]);
                plan.out_count = frame.at<int64_t>(call.out.count);
                plan.bricks = frame.at<k::Brick>(call.in.index[1]);
                plan.in_order = frame.at<int>(call.in.index[0]);
                plan.order = frame.at<int>(call.map.parts[0]);
                plan.schedule = frame.at<k::ScheduledTile>(call.map.parts[1]);
                plan.passes = frame.at<k::Pass>(call.map.parts[2]);
                plan.frag = frame.at<uint32_t>(call.map.parts[3]);
                plan.uniq = frame.at<int>(call.map.parts[4]);
                plan.local = frame.at<uint16_t>(call.map.parts[5]);
                plan.stats = frame.at<k::PlanStats>(call.status);
              }
              if (plans.empty()) return;
              check(k::build_plans(plans.data(), static_cast<int>(plans.size()), stream_of(frame)), "build_plans");
            }};
  }

  Work voxels(const VoxelsCall& call) override {
    const int64_t n = call.points.shape[0];
    k::PointArgs cells{};
    cells.dtype = kernel_type(call.points.dtype);
    cells.n = n;
    std::copy(call.origin, call.origin + 3, cells.origin);
    std::copy(call.edge, call.edge + 3, cells.edge);
    k::MergeArgs merge{};
    merge.ldx = merge.channels = call.feats.shape[1];
    merge.dtype = kernel_type(call.feats.dtype);
    merge.count = call.capacity;
    merge.longest = k::kMaxMergedRows;
    merge.mean = call.mean;
    Parts parts;
    const int64_t cells_at = parts.add(times(16, n));
    const int64_t work_at = parts.add(static_cast<int64_t>(runs_workspace(n, call.capacity)));
    return {parts.total(), [=](const Frame& frame, unsigned char* scratch) {
              const cudaStream_t stream = stream_of(frame);
              k::PointArgs made = cells;
              made.points = frame.at<unsigned char>(call.points.at);
              made.batch = frame.at<int64_t>(call.batch);
              made.cells = reinterpret_cast<int*>(scratch + cells_at);
              check(k::cells_of_points(made, stream), "cells_of_points");
              Runs runs{};
              runs.cells = made.cells;
              runs.n = n;
              runs.count = frame.at<int64_t>(call.count);
              std::copy(call.box.low, call.box.low + 4, runs.low);
              std::copy(call.box.high, call.box.high + 4, runs.high);
              runs.capacity = call.capacity;
              runs.coords = frame.at<int>(call.coords);
              runs.made = frame.at<int64_t>(call.made);
              runs.status = frame.at<int64_t>(call.status);
              runs.workspace = scratch + work_at;
              check(find_runs(&runs, stream), "find_runs");
              k::MergeArgs rows = merge;
              rows.x = frame.at<unsigned char>(call.feats.at);
              rows.order = runs.order;
              rows.start = runs.start;
              rows.out = frame.at<unsigned char>(call.out.at);
              check(k::merge_runs(rows, stream), "merge_runs");
            }};
  }

  Work conv(const ConvCall& call) override {
    const k::KernelEntry& entry = tile_of(call);
    const k::TileConfig& config = entry.config;
    const std::string atom = config.atom;
    const bool double_sums = config.accum == k::Accum::f64;

    Pack pack{};
    k::PackArgs& p = pack.args;
    const int64_t columns = call.transpose ? call.c_in : call.c_out, block = call.c_in * call.c_out;
    p.weights =
        k::weights_of(nullptr, kernel_type(call.weight->dtype), call.map.volume,
                      {call.groups * block, block, columns, 1}, call.transpose, call.transpose && call.symmetric);
    p.input = config.input;
    p.kernel_volume = call.map.volume;
    p.groups = static_cast<int>(call.groups);
    p.c_in = static_cast<int>(call.c_in);
    p.c_out = static_cast<int>(call.c_out);
    p.n = config.n;
    p.k = entry.image_channels(p.c_in);
    p.channels.eps = call.eps;
    p.channels.sums = double_sums ? k::DType::f64 : k::DType::f32;
    pack.weight = constant(call.weight->data, call.weight->bytes);
    const Stored* const numbers[] = {call.bias, call.scale, call.shift, call.mean, call.var};
    k::PerChannel* const given[] = {&p.channels.bias, &p.channels.scale, &p.channels.shift, &p.channels.mean,
                                    &p.channels.var};
    for (int i = 0; i < 5; ++i) {
      pack.numbers[i] = numbers[i] == nullptr ? -1 : constant(numbers[i]->data, numbers[i]->bytes);
      if (numbers[i] != nullptr) given[i]->dtype = kernel_type(numbers[i]->dtype);
    }
    const int64_t channels = call.groups * call.c_out, wide = channels * (double_sums ? 8 : 4);
    const bool scaled = call.scale != nullptr || call.var != nullptr;
    const bool moved = scaled || call.bias != nullptr || call.shift != nullptr || call.mean != nullptr;
    pack.image = constant(nullptr, 0, static_cast<int64_t>(k::packed_weight_bytes(p)));
    const int flag_bytes = k::pack_flag_bytes(p);
    pack.flags = constant(nullptr, 0, flag_bytes);
    pack.summand = moved ? constant(nullptr, 0, wide) : -1;
    pack.factor = scaled ? constant(nullptr, 0, wide) : -1;
    packs_.push_back(pack);

    // Rows as the kernel takes them: every group's begins at a multiple of 16 bytes.
    const int64_t element = bytes_of(call.x.dtype), align = atom == "SIMT" ? 1 : 16 / element;
    const int64_t group = (call.c_in + align - 1) / align * align;
    const int64_t given_stride = call.x.strides[0];
    const bool padded = group != call.c_in || given_stride % align != 0 || call.x.at.offset % (align * element) != 0;
    const int64_t stride = padded ? call.groups * group : given_stride;
    if (atom.substr(0, 4) == "SM90" && !k::in_wgmma_span(call.map.n_in, stride * element)) {
      fail(VXM_ERROR_UNSUPPORTED, "tile '", call.tile, "' on ", call.map.n_in, " rows of ", stride * element, " bytes");
    }

    k::ConvArgs args{};
    args.plan = view(call.map);
    args.lda = stride;
    args.a_group = group;
    args.raw = {p.weights, nullptr, flag_bytes};
    args.epilogue.ldr = call.residual.at.there() ? call.residual.strides[0] : channels;
    args.epilogue.activation = static_cast<k::Activation>(call.activation);
    args.epilogue.slope = call.slope;
    args.ldo = call.out.strides[0];
    args.out_dtype = kernel_type(call.out.dtype);
    args.c_in = p.c_in;
    args.c_out = p.c_out;
    args.groups = p.groups;
    args.sm_count = sm_count_;
    Parts parts;
    const int64_t work_at = parts.add(static_cast<int64_t>(entry.workspace(args)));
    const int64_t rows_at = parts.add(padded ? times(call.map.n_in, stride * element) : 0);
    return {parts.total(), [=, &entry](const Frame& frame, unsigned char* scratch) {
              const auto weights = [&](int64_t offset) { return offset < 0 ? nullptr : frame.weights + offset; };
              k::ConvArgs now = args;
              fill(now.plan, call.map, frame);
              const void* const x = frame.at<unsigned char>(call.x.at);
              now.a = x;
              if (padded) {
                now.a = scratch + rows_at;
                check(pad_channels(x, given_stride, scratch + rows_at, static_cast<int>(element), call.map.n_in,
                                   call.groups, call.c_in, group, stream_of(frame)),
                      "pad_channels");
              }
              now.b = weights(pack.image);
              now.raw.of.data = weights(pack.weight);
              now.raw.flags = static_cast<const uint8_t*>(weights(pack.flags));
              now.bias = weights(pack.summand);
              now.epilogue.scale = weights(pack.factor);
              now.epilogue.residual = frame.at<unsigned char>(call.residual.at);
              now.out = frame.at<unsigned char>(call.out.at);
              now.workspace = scratch == nullptr ? nullptr : scratch + work_at;
              check(entry.launch(now, stream_of(frame)), entry.config.name);
            }};
  }

  Work pool(const PoolCall& call) override {
    return {0, [call, sms = sm_count_](const Frame& frame, unsigned char*) {
              constexpr k::PoolOp kOps[] = {k::PoolOp::sum, k::PoolOp::max, k::PoolOp::min};
              k::PoolArgs args{};
              args.plan = view(call.map);
              fill(args.plan, call.map, frame);
              args.op = kOps[static_cast<int>(call.kind)];
              args.dtype = kernel_type(call.x.dtype);
              args.mirror = call.mirror;
              args.x = frame.at<unsigned char>(call.x.at);
              args.ldx = args.channels = call.x.shape[1];
              args.y = frame.at<unsigned char>(call.out.at);
              args.sm_count = sms;
              args.in_count = frame.at<int>(call.in_count);
              args.out_count = frame.at<int>(call.out_count);
              check(k::pool(args, stream_of(frame)), "pool");
            }};
  }
  Work counts(const Map& map, const Place& out) override {
    return {0, [map, out](const Frame& frame, unsigned char*) {
              k::PlanView plan = view(map);
              fill(plan, map, frame);
              check(k::neighbor_counts(plan, frame.at<int>(out), stream_of(frame)), "neighbor_counts");
            }};
  }
  Work dense(const DenseCall& call) override {
    return {0, [call](const Frame& frame, unsigned char*) {
              Grid grid{};
              grid.samples = call.samples;
              std::copy(call.shape, call.shape + 3, grid.shape);
              std::copy(call.origin, call.origin + 3, grid.origin);
              const int64_t bytes = bytes_of(call.x.dtype);
              check(scatter_dense(grid, frame.at<unsigned char>(call.x.at), call.x.shape[1] * bytes,
                                  frame.at<int>(call.coords), call.x.shape[0], frame.at<int64_t>(call.count),
                                  frame.at<unsigned char>(call.grid.at), call.grid.count() * bytes,
                                  frame.at<int64_t>(call.status), stream_of(frame)),
                    "dense");
            }};
  }
  Work finite(const Array& x, const Place& count, const Place& status) override {
    return {0, [=](const Frame& frame, unsigned char*) {
              check(find_not_finite(kernel_type(x.dtype), frame.at<unsigned char>(x.at), x.shape[0], x.shape[1],
                                    frame.at<int64_t>(count), frame.at<int64_t>(status), stream_of(frame)),
                    "finite");
            }};
  }
  Work rows(const Array& x, const Place& count, const Array& out) override {
    return {0, [=](const Frame& frame, unsigned char*) {
              const int64_t n = x.shape[0];
              check(
                  keep_rows(frame.at<unsigned char>(x.at), frame.at<unsigned char>(out.at), n,
                            n == 0 ? 0 : x.count() * bytes_of(x.dtype) / n, frame.at<int64_t>(count), stream_of(frame)),
                  "rows");
            }};
  }
  Work copy(const Array& from, const Array& to) override {
    return {0, [=](const Frame& frame, unsigned char*) {
              const int64_t bytes = bytes_of(from.dtype), count = from.count();
              const void* const source = frame.at<unsigned char>(from.at);
              void* const target = frame.at<unsigned char>(to.at);
              if (count == 0) return;
              if (from.shape.size() == 2 && from.strides[1] == 1 && to.strides[1] == 1) {
                check(
                    cudaMemcpy2DAsync(target, to.strides[0] * bytes, source, from.strides[0] * bytes,
                                      from.shape[1] * bytes, from.shape[0], cudaMemcpyDeviceToDevice, stream_of(frame)),
                    "copy");
                return;
              }
              Strided dims{};
              dims.dims = static_cast<int>(from.shape.size());
              for (int i = 0; i < dims.dims; ++i) {
                dims.shape[i] = from.shape[i];
                dims.from[i] = from.strides[i];
                dims.to[i] = to.strides[i];
              }
              check(copy_strided(dims, static_cast<int>(bytes), source, target, count, stream_of(frame)), "copy");
            }};
  }
  Work linear(const LinearCall& call) override {
    return {0, [call](const Frame& frame, unsigned char*) {
              check(multiply_rows(kernel_type(call.x.dtype), frame.at<unsigned char>(call.x.at),
                                  frame.at<unsigned char>(call.weight), frame.at<unsigned char>(call.bias),
                                  frame.at<unsigned char>(call.out.at), call.x.shape[0], call.x.shape[1],
                                  call.out.shape[1], stream_of(frame)),
                    "linear");
            }};
  }
  Work affine(const Array& x, const Place& factor, const Place& summand, const Array& out) override {
    return {0, [=](const Frame& frame, unsigned char*) {
              check(scale_rows(kernel_type(x.dtype), frame.at<unsigned char>(x.at), frame.at<unsigned char>(factor),
                               frame.at<unsigned char>(summand), frame.at<unsigned char>(out.at), x.count(), x.shape[1],
                               stream_of(frame)),
                    "norm");
            }};
  }
  Work binary(Binary kind, const Array& a, const Array& b, const Array& out) override {
    return {0, [=](const Frame& frame, unsigned char*) {
              check(combine_rows(kind == Binary::mul, kernel_type(a.dtype), frame.at<unsigned char>(a.at),
                                 frame.at<unsigned char>(b.at), frame.at<unsigned char>(out.at), a.count(),
                                 stream_of(frame)),
                    "sum or product");
            }};
  }
  Work unary(Unary kind, double slope, const Array& x, const Array& out) override {
    return {0, [=](const Frame& frame, unsigned char*) {
              check(activate_rows(static_cast<int>(kind), slope, kernel_type(x.dtype), frame.at<unsigned char>(x.at),
                                  frame.at<unsigned char>(out.at), x.count(), stream_of(frame)),
                    "activation");
            }};
  }

  void copy_in(void* to, size_t pitch, const void* from, size_t width, size_t rows, void* stream) override {
    if (width == 0 || rows == 0) return;
    const auto on = static_cast<cudaStream_t>(stream);
    check(pitch == width ? cudaMemcpyAsync(to, from, width * rows, cudaMemcpyDefault, on)
                         : cudaMemcpy2DAsync(to, pitch, from, width, width, rows, cudaMemcpyDefault, on),
          "copying an input");
  }
  void clear(void* to, size_t bytes, void* stream) override {
    if (bytes > 0) check(cudaMemsetAsync(to, 0, bytes, static_cast<cudaStream_t>(stream)), "cudaMemsetAsync");
  }

  void set_count(int64_t* to, int64_t value, void* stream) override {
    check(store_number(to, value, static_cast<cudaStream_t>(stream)), "storing a count");
  }
  void copy_out(void* to, const void* from, size_t pitch, size_t width, size_t rows) override {
    if (width == 0 || rows == 0) return;
    check(pitch == width ? cudaMemcpy(to, from, width * rows, cudaMemcpyDefault)
                         : cudaMemcpy2D(to, width, from, pitch, width, rows, cudaMemcpyDefault),
          "copying a result");
  }

  void begin(void* stream) override {
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    if (stream != nullptr && cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &capture) == cudaSuccess &&
        capture != cudaStreamCaptureStatusNone) {
      fail(VXM_ERROR_ARGUMENT, "the stream is being captured: an engine's frame is a graph already");
    }
    if (done_ == nullptr) {
      check(cudaEventCreateWithFlags(&done_, cudaEventDisableTiming), "cudaEventCreate");
      return;
    }
    check(cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), done_, 0), "cudaStreamWaitEvent");
  }
  void replay(const std::function<void(void*)>& work, void* stream) override {
    if (!graph_) {
      work(stream);
      return;
    }
    if (exec_ == nullptr) record(work);
    check(cudaGraphLaunch(exec_, static_cast<cudaStream_t>(stream)), "cudaGraphLaunch");
  }
  void end(const void* status, size_t bytes, void* stream) override {
    if (host_ == nullptr)
      check(cudaHostAlloc(&host_, std::max<size_t>(bytes, 32), cudaHostAllocDefault), "cudaHostAlloc");
    const auto on = static_cast<cudaStream_t>(stream);
    if (bytes > 0) check(cudaMemcpyAsync(host_, status, bytes, cudaMemcpyDeviceToHost, on), "copying the status");
    check(cudaEventRecord(done_, on), "cudaEventRecord");
  }
  const int64_t* status() override {
    wait();
    return static_cast<const int64_t*>(host_);
  }
  void wait() override {
    if (done_ != nullptr) check(cudaEventSynchronize(done_), "the frame");
  }

  std::unique_ptr<Active> activate() override { return std::make_unique<Current>(device_); }
  int device() const override { return device_; }
  bool cuda() const override { return true; }

 private:
  // The device of the calling thread, and what it was before.
  struct Current : Active {
    int before = -1, now;
    explicit Current(int device) : now(device) {
      if (cudaGetDevice(&before) != cudaSuccess || before != now) cudaSetDevice(now);
    }
    ~Current() override {
      if (before >= 0 && before != now) cudaSetDevice(before);
    }
  };

  // A weight to pack once memory is there. Offsets; -1: none.
  struct Pack {
    k::PackArgs args;
    int64_t weight, numbers[5];  // bias, scale, shift, mean, var
    int64_t image, flags, summand, factor;
  };

  vxm_allocator allocator_;
  int device_, sm_count_ = 0, shared_memory_ = 0;
  bool graph_ = true, sm90_ = false;
  std::vector<Pack> packs_;
  cudaGraphExec_t exec_ = nullptr;

  cudaEvent_t done_ = nullptr;  // of the last frame
  void* host_ = nullptr;        // its status

  void write(void* to, const void* from, size_t bytes) override {
    check(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice), "uploading weights");
  }

  static int64_t tiles_of(int64_t rows) { return (rows + k::kTileM - 1) / k::kTileM; }

  static k::PlanView view(const Map& map) {
    k::PlanView made{};
    made.tiles = static_cast<int>(tiles_of(map.n_out));
    made.kernel_volume = map.volume;
    made.n_out = map.n_out;
    made.n_in = map.n_in;
    return made;
  }
  static void fill(k::PlanView& plan, const Map& map, const Frame& frame) {
    plan.order = frame.at<int>(map.parts[0]);
    plan.schedule = frame.at<k::ScheduledTile>(map.parts[1]);
    plan.passes = frame.at<k::Pass>(map.parts[2]);
    plan.frag = frame.at<uint32_t>(map.parts[3]);
    plan.uniq = frame.at<int>(map.parts[4]);
    plan.local = frame.at<uint16_t>(map.parts[5]);
  }

  // The rule of a map (voxmma/sparse/maps.py, plan_rule) and its room (voxmma/engine/ops.py, plan_capacity).
  k::PlanArgs plan_args(const MapCall& call) const {
    k::PlanArgs args{};
    const Geometry& g = call.geometry;
    const int sign = call.reverse ? 1 : -1;
    for (int a = 0; a < 3; ++a) {
      args.size[a] = g.size[a];
      args.start[a] = sign * g.padding[a];
      args.step[a] = -sign * g.dilation[a];
      args.mul[a] = call.reverse ? 1 : g.stride[a];
      args.div[a] = call.reverse ? g.stride[a] : 1;
    }
    args.n_in = call.in.capacity;
    args.n_out = call.out.capacity;
    args.capacity = k::brick_capacity(call.in.capacity, -1);
    args.sm_count = sm_count_;
    int64_t most_passes, most_uniq4;
    k::plan_room(args, &most_passes, &most_uniq4);
    const auto wanted = [&](int64_t usual, int64_t most, int64_t spare) {
      return std::min(most, static_cast<int64_t>(static_cast<double>(usual) * call.room) + spare);
    };
    args.pass_capacity = wanted(args.pass_capacity, most_passes, 16);
    args.uniq4_capacity = wanted(args.uniq4_capacity, most_uniq4, 1024);
    return args;
  }

  const k::KernelEntry& tile_of(const ConvCall& call) const {
    const k::KernelEntry* const found = k::find_kernel(call.tile.c_str());
    if (found == nullptr) fail(VXM_ERROR_UNSUPPORTED, "tile '", call.tile, "'");
    const k::TileConfig& c = found->config;
    require(c.op == k::Op::fprop && c.input == kernel_type(call.x.dtype) && c.accum == accum_named(call.accumulator),
            "tile '", call.tile, "' is for other numbers");
    if ((c.arch == 90 && !sm90_) || c.shared_memory > shared_memory_) {
      fail(VXM_ERROR_DEVICE, "tile '", call.tile, "' does not run on device ", device_, " with code for ",
           VOXMMA_ARCHS);
    }
    return *found;
  }

  static void make_order(const Set& set, k::OrderArgs args, const Frame& frame, void* workspace) {
    args.coords = frame.at<int>(set.coords);
    args.n = set.capacity;
    args.order = frame.at<int>(set.index[0]);
    args.workspace = workspace;
    check(k::order_coords(args, stream_of(frame)), "order_coords");
    check(k::build_bricks(args.coords, args.order, args.n, args.count, frame.at<k::Brick>(set.index[1]),
                          k::brick_capacity(args.n, -1), stream_of(frame)),
          "build_bricks");
  }

  static k::ExpandArgs expand_args(const SitesCall& call, k::ExpandArgs args, const Frame& frame) {
    args.count = frame.at<int64_t>(call.from.count);
    args.row_bounds = frame.at<int>(call.from.inner);
    args.bounds = frame.at<int>(call.to.inner);
    return args;
  }
  // Calls launch(args) for `piece` rows at a time.
  template <class Launcher>
  static void for_pieces(const SitesCall& call, k::ExpandArgs args, int64_t piece, const Frame& frame,
                         const Launcher& launch) {
    const int64_t n = call.from.capacity;
    for (args.begin = 0; args.begin < n; args.begin += piece) {
      args.coords = frame.at<int>(call.from.coords) + 4 * args.begin;
      args.n = std::min(piece, n - args.begin);
      launch(args);
    }
  }

  static Work sites_by_cells(const SitesCall& call, const k::ExpandArgs& args, int64_t piece, int64_t bytes) {
    return {bytes, [=](const Frame& frame, unsigned char* cells) {
              const k::ExpandArgs now = expand_args(call, args, frame);
              const cudaStream_t stream = stream_of(frame);
              check(k::clear_cells(now.box, cells, stream), "clear_cells");
              for_pieces(call, now, piece, frame, [&](const k::ExpandArgs& part) {
                check(k::expand_cells(part, cells, stream), "expand_cells");
              });
              check(k::index_cells(now.box, now.bounds, cells, call.to.capacity, frame.at<int>(call.to.coords),
                                   frame.at<int>(call.to.index[0]), frame.at<k::Brick>(call.to.index[1]),
                                   k::brick_capacity(call.to.capacity, -1), frame.at<k::CellStats>(call.status),
                                   frame.at<int64_t>(call.to.count), stream),
                    "index_cells");
            }};
  }

  // Where a bitmap would have too many cells.
  static Work sites_by_keys(const SitesCall& call, k::ExpandArgs args, int64_t piece) {
    const auto width = static_cast<int64_t>(k::key_bytes(args.box));
    const int64_t capacity = call.to.capacity;
    args.room = capacity;
    args.capacity = k::expand_capacity(capacity);
    Parts parts;
    const int64_t stats_at = parts.add(sizeof(k::ExpandStats)), table_at = parts.add(times(args.capacity, width));
    const int64_t keys_at = parts.add(times(capacity, width));
    const int64_t unpack_at = parts.add(static_cast<int64_t>(k::unpack_workspace(args.box, capacity)));
    const int64_t order_at = parts.add(static_cast<int64_t>(k::order_workspace(capacity)));
    return {parts.total(), [=](const Frame& frame, unsigned char* scratch) {
              k::ExpandArgs now = expand_args(call, args, frame);
              const cudaStream_t stream = stream_of(frame);
              now.stats = reinterpret_cast<k::ExpandStats*>(scratch + stats_at);
              now.table = scratch + table_at;
              now.keys = scratch + keys_at;
              check(cudaMemsetAsync(now.stats, 0, sizeof(k::ExpandStats), stream), "cudaMemsetAsync");
              check(cudaMemsetAsync(now.table, 0xff, now.capacity * width, stream), "cudaMemsetAsync");
              check(cudaMemsetAsync(now.keys, 0xff, capacity * width, stream), "cudaMemsetAsync");
              for_pieces(call, now, piece, frame,
                         [&](const k::ExpandArgs& part) { check(k::expand_coords(part, stream), "expand_coords"); });
              int64_t* const count = frame.at<int64_t>(call.to.count);
              check(k::count_keys(now.stats, capacity, frame.at<k::CellStats>(call.status), count, stream),
                    "count_keys");
              check(k::unpack_keys(now.box, now.keys, capacity, count, frame.at<int>(call.to.coords),
                                   scratch + unpack_at, stream),
                    "unpack_keys");
              k::OrderArgs known{};
              known.box = now.box;
              known.count = count;
              known.bounds = now.bounds;
              make_order(call.to, known, frame, scratch + order_at);
            }};
  }

  // The work as a CUDA graph, after one run that loads what is loaded once.
  void record(const std::function<void(void*)>& work) {
    struct Stream {
      cudaStream_t made = nullptr;
      bool capturing = false;
      ~Stream() {
        cudaGraph_t graph = nullptr;
        if (capturing && cudaStreamEndCapture(made, &graph) == cudaSuccess && graph != nullptr) cudaGraphDestroy(graph);
        cudaGetLastError();
        if (made != nullptr) cudaStreamDestroy(made);
      }
    } own;
    check(cudaStreamCreateWithFlags(&own.made, cudaStreamNonBlocking), "cudaStreamCreate");
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    work(own.made);
    check(cudaStreamSynchronize(own.made), "the first run");
    check(cudaStreamBeginCapture(own.made, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    own.capturing = true;
    work(own.made);
    cudaGraph_t graph = nullptr;
    own.capturing = false;
    check(cudaStreamEndCapture(own.made, &graph), "cudaStreamEndCapture");
    const cudaError_t error = cudaGraphInstantiate(&exec_, graph, 0);
    cudaGraphDestroy(graph);
    check(error, "cudaGraphInstantiate");
  }
};

}  // namespace

std::unique_ptr<Backend> cuda_backend(const vxm_options& options, const Json& machine) {
  return std::make_unique<Cuda>(options, machine);
}

}  // namespace vxm
