// Points into voxels and back: cells, runs of equal cells, rows around points, weighted sums.
#include <algorithm>
#include <array>
#include <limits>
#include <tuple>

#include "../module.h"
#include "launch.h"

namespace voxmma {
namespace {

using GroupResult = std::tuple<Tensor, Tensor, Tensor, Tensor, Ints>;
using LocateResult = std::tuple<Tensor, Tensor, bool>;

Tensor cells_of_points_cuda(const Tensor& points, const OptTensor& batch, const std::vector<double>& origin,
                            const std::vector<double>& edge) {
  TORCH_CHECK(points.is_cuda() && points.dim() == 2 && points.size(1) == 3 && is_supported(points.scalar_type()),
              "points must be (N, 3) floating-point numbers on a CUDA device, got ", dtype_name(points.scalar_type()),
              " of shape ", points.sizes(), " on ", points.device());
  TORCH_CHECK(origin.size() == 3 && edge.size() == 3, "origin and edge must hold 3 numbers each");
  if (batch.has_value()) check_ints("batch", *batch, at::kLong, 0, points);
  TORCH_CHECK(!batch.has_value() || batch->size(0) == points.size(0), "batch must hold a number per point");
  const NormalTensors normal;
  const Launch on(points.device());
  const Tensor from = points.contiguous(), cells = on.empty({points.size(0), 4}, at::kInt);
  PointArgs args{};
  args.points = from.data_ptr();
  args.dtype = to_dtype(points.scalar_type());
  args.batch = batch.has_value() ? data<int64_t>(*batch) : nullptr;
  args.n = points.size(0);
  std::copy_n(origin.data(), 3, args.origin);
  std::copy_n(edge.data(), 3, args.edge);
  args.cells = data<int>(cells);
  check_cuda(cells_of_points(args, on.stream), "cells_of_points", on.device);
  return cells;
}

// Runs of equal rows: coordinates, order, starts, the run of each row, and [bad row, length of the longest run, smallest
// 4, largest 4]. Reads back twice; where there is a bad row once, and the tensors are empty.
GroupResult group_cells_cuda(const Tensor& cells) {
  check_ints("cells", cells, at::kInt, 4, cells);
  const int64_t n = cells.size(0);
  TORCH_CHECK(n <= std::numeric_limits<int>::max(), "cells must hold less than 2^31 rows");
  const NormalTensors normal;
  const Launch on(cells.device());
  CoordStats found{};
  found.bad_row = -1;
  if (n > 0) {
    const Tensor stats = empty_struct<CoordStats>(on);
    check_cuda(measure_cells(data<int>(cells), n, data<CoordStats>(stats), on.stream), "measure_cells", on.device);
    found = read_back(on, data<CoordStats>(stats));
  }
  Ints facts{found.bad_row, 0};
  facts.insert(facts.end(), found.min, found.min + 4);
  facts.insert(facts.end(), found.max, found.max + 4);
  if (n == 0 || found.bad_row >= 0) {
    return {on.empty({0, 4}, at::kInt), on.empty({0}, at::kInt), at::zeros({1}, cells.options()),
            on.empty({0}, at::kLong), facts};
  }
  GroupArgs args{};
  args.cells = data<int>(cells);
  args.n = n;
  args.box = box_around(found.min, found.max);
  const Tensor order = on.empty({n}, at::kInt), run_of = on.empty({n}, at::kLong), room = on.empty({n + 1}, at::kInt);
  const Tensor stats = empty_struct<RunStats>(on), scratch = on.scratch(group_workspace(args.box, n));
  args.order = data<int>(order);
  args.start = data<int>(room);
  args.run_of = data<int64_t>(run_of);
  args.stats = data<RunStats>(stats);
  args.workspace = scratch.data_ptr();
  check_cuda(group_cells(args, on.stream), "group_cells", on.device);
  const auto runs = read_back(on, data<RunStats>(stats));
  facts[1] = runs.longest;
  const Tensor coords = on.empty({runs.count, 4}, at::kInt), start = on.empty({runs.count + 1}, at::kInt);
  check_cuda(take_runs(args, runs.count, data<int>(coords), data<int>(start), on.stream), "take_runs", on.device);
  return {coords, order, start, run_of, facts};
}

Tensor merge_runs_cuda(const Tensor& x, const Tensor& order, const Tensor& start, int64_t longest, bool mean,
                       bool wide) {
  check_tensor("x", x, 2, x);
  check_ints("order", order, at::kInt, 0, x);
  check_ints("start", start, at::kInt, 0, x);
  TORCH_CHECK(x.is_cuda() && order.size(0) == x.size(0) && start.size(0) > 0, "order must hold a number per row of x");
  TORCH_CHECK(longest <= kMaxMergedRows, "runs of up to ", kMaxMergedRows, " rows can be merged, got ", longest);
  const Launch on(x.device());
  const Tensor from = dense_rows(x);
  const ScalarType sums = x.element_size() == 2 ? at::kFloat : at::kDouble;
  const Tensor out = on.empty({start.size(0) - 1, x.size(1)}, wide ? sums : x.scalar_type());
  MergeArgs args{};
  args.x = from.data_ptr();
  args.ldx = from.stride(0);
  args.dtype = to_dtype(x.scalar_type());
  args.channels = x.size(1);
  args.order = data<int>(order);
  args.start = data<int>(start);
  args.count = start.size(0) - 1;
  args.longest = longest;
  args.mean = mean;
  args.wide = wide;
  args.out = out.data_ptr();
  check_cuda(merge_runs(args, on.stream), "merge_runs", on.device);
  return out;
}

// ---- points: see points.h and voxmma/sparse/sampling.py

SetView set_view(const Tensor& order, const Tensor& bricks, const Tensor& like) {
  check_ints("order", order, at::kInt, 0, like);
  check_ints("bricks", bricks, at::kInt, 4, like);
  TORCH_CHECK(bricks.size(0) >= kBucket, "bricks is empty");
  return {data<int>(order), data<Brick>(bricks), bricks.size(0)};
}

Tensor lookup_rows_cuda(const Tensor& query, const Tensor& order, const Tensor& bricks) {
  const bool is_int64 = query.scalar_type() == at::kLong;
  const Tensor dense = aligned(query);
  check_ints("query", dense, is_int64 ? at::kLong : at::kInt, 4, query);
  const Launch on(query.device());
  const SetView set = set_view(order, bricks, query);
  const Tensor rows = on.empty({query.size(0)}, at::kLong);
  check_cuda(lookup_rows(set, dense.data_ptr(), is_int64, query.size(0), data<int64_t>(rows), on.stream), "lookup_rows",
             on.device);
  return rows;
}

// Rows (N, corners) int32, weights, and whether all points are finite and of a sample that is there. Reads back once.
LocateResult locate_points_cuda(const Tensor& points, const OptTensor& batch, int64_t batch_size,
                                const std::array<double, 3>& shift, const std::array<double, 3>& edge,
                                const std::array<double, 3>& stride, bool trilinear, const Tensor& order,
                                const Tensor& bricks, bool wide) {
  check_tensor("points", points, 2, points);
  TORCH_CHECK(points.size(1) == 3, "points must be (N, 3), got shape ", points.sizes());
  const int64_t n = points.size(0), corners = trilinear ? 8 : 1;
  LocateArgs args{};
  args.set = set_view(order, bricks, points);
  const NormalTensors normal;
  const Launch on(points.device());
  const Tensor dense = points.contiguous(), none = on.empty({1}, at::kLong);
  args.points = dense.data_ptr();
  args.dtype = to_dtype(points.scalar_type());
  args.n = n;
  Tensor samples;
  if (batch.has_value()) {
    args.batch_is_int64 = batch->scalar_type() == at::kLong;
    samples = batch->contiguous();
    check_ints("batch", samples, args.batch_is_int64 ? at::kLong : at::kInt, 0, points);
    TORCH_CHECK(samples.size(0) == n, "batch has ", samples.size(0), " rows, points has ", n);
    args.batch = samples.data_ptr();
  }
  args.batch_size = batch_size;
  std::copy(shift.begin(), shift.end(), args.shift);
  std::copy(edge.begin(), edge.end(), args.edge);
  std::copy(stride.begin(), stride.end(), args.stride);
  args.trilinear = trilinear;
  const Tensor rows = on.empty({n, corners}, at::kInt);
  const Tensor weights = on.empty({n, corners}, wide ? at::kDouble : at::kFloat);
  args.rows = data<int>(rows);
  args.weights = weights.data_ptr();
  args.weight_dtype = wide ? DType::f64 : DType::f32;
  args.invalid = data<int64_t>(none);
  if (n == 0) return {rows, weights, true};
  check_cuda(set_bytes(args.invalid, 0, sizeof(int64_t), on.stream), "cudaMemsetAsync", on.device);
  check_cuda(locate_points(args, on.stream), "locate_points", on.device);
  return {rows, weights, read_back(on, args.invalid) == 0};
}

void check_weights(const Tensor& x, const Tensor& weights, int64_t rows) {
  const ScalarType wide = sum_type(x.scalar_type());
  TORCH_CHECK(weights.device() == x.device() && weights.scalar_type() == wide && weights.is_contiguous() &&
                  weights.dim() == 2 && weights.size(0) == rows && (weights.size(1) == 1 || weights.size(1) == 8),
              "weights must be contiguous ", dtype_name(wide), " of shape (", rows, ", 1 or 8) on ", x.device(),
              ", got ", c10::toString(weights.scalar_type()), " of shape ", weights.sizes(), " on ", weights.device());
}

Tensor gather_weighted_cuda(const Tensor& x, const Tensor& rows, const Tensor& weights) {
  check_tensor("x", x, 2, x);
  check_ints("rows", rows, at::kInt, weights.size(-1), x);
  check_weights(x, weights, rows.size(0));
  const Launch on(x.device());
  const Tensor from = dense_rows(x), y = on.empty({rows.size(0), x.size(1)}, x.scalar_type());
  GatherArgs args{};
  args.x = from.data_ptr();
  args.ldx = from.stride(0);
  args.dtype = to_dtype(x.scalar_type());
  args.channels = x.size(1);
  args.n = rows.size(0);
  args.corners = static_cast<int>(weights.size(1));
  args.rows = data<int>(rows);
  args.weights = weights.data_ptr();
  args.y = y.data_ptr();
  check_cuda(gather_weighted(args, on.stream), "gather_weighted", on.device);
  return y;
}

// `entries` of weights.flatten(), sorted by the row of dx they add to, and where those of each row begin.
Tensor scatter_weighted_cuda(const Tensor& dy, const Tensor& entries, const Tensor& starts, const Tensor& weights) {
  check_tensor("dy", dy, 2, dy);
  check_ints("entries", entries, at::kLong, 0, dy);
  check_ints("starts", starts, at::kLong, 0, dy);
  check_weights(dy, weights, dy.size(0));
  TORCH_CHECK(starts.size(0) > 0 && entries.size(0) == weights.numel(), "starts has ", starts.size(0),
              " entries, entries has ", entries.size(0), ", weights has ", weights.numel());
  const Launch on(dy.device());
  const int64_t n_out = starts.size(0) - 1;
  // How rows lie must not change the order of additions.
  const Tensor from = aligned(dy), dx = on.empty({n_out, dy.size(1)}, dy.scalar_type());
  const int64_t channels = dy.size(1);
  ScatterArgs args{};
  args.dy = from.data_ptr();
  args.ldy = channels;
  args.dtype = to_dtype(dy.scalar_type());
  args.channels = channels;
  args.n_out = n_out;
  args.corners = static_cast<int>(weights.size(1));
  args.entries = data<int64_t>(entries);
  args.starts = data<int64_t>(starts);
  args.weights = weights.data_ptr();
  args.dx = dx.data_ptr();
  check_cuda(scatter_weighted(args, on.stream), "scatter_weighted", on.device);
  return dx;
}

}  // namespace

void bind_points(py::module_& m) {
  m.def("cells_of_points", torch::wrap_pybind_function_no_gil(cells_of_points_cuda), py::arg("points"),
        py::arg("batch"), py::arg("origin"), py::arg("edge"));
  m.def("group_cells", torch::wrap_pybind_function_no_gil(group_cells_cuda), py::arg("cells"));
  m.def("merge_runs", torch::wrap_pybind_function_no_gil(merge_runs_cuda), py::arg("x"), py::arg("order"),
        py::arg("start"), py::arg("longest"), py::arg("mean"), py::arg("wide"));
  m.def("lookup_rows", torch::wrap_pybind_function_no_gil(lookup_rows_cuda), py::arg("query"), py::arg("order"),
        py::arg("bricks"));
  m.def("locate_points", torch::wrap_pybind_function_no_gil(locate_points_cuda), py::arg("points"), py::arg("batch"),
        py::arg("batch_size"), py::arg("shift"), py::arg("edge"), py::arg("stride"), py::arg("trilinear"),
        py::arg("order"), py::arg("bricks"), py::arg("wide"));
  m.def("gather_weighted", torch::wrap_pybind_function_no_gil(gather_weighted_cuda), py::arg("x"), py::arg("rows"),
        py::arg("weights"));
  m.def("scatter_weighted", torch::wrap_pybind_function_no_gil(scatter_weighted_cuda), py::arg("dy"),
        py::arg("entries"), py::arg("starts"), py::arg("weights"));
}

}  // namespace voxmma
