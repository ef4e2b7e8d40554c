// Coordinate sets: index, output coordinates.
#include <algorithm>
#include <climits>
#include <tuple>

#include "../module.h"
#include "sizes.h"

namespace voxmma {
namespace {

using IndexResult = std::tuple<Tensor, Tensor, Ints>;
using DeriveResult = std::tuple<Tensor, Tensor, Tensor, int64_t, bool>;

// Box around coordinates between bounds = smallest (batch, x, y, z), then largest.
CoordBox box_within(const Ints& bounds) {
  TORCH_CHECK(bounds.size() == 8, "bounds must hold 8 integers, got ", bounds.size());
  int ends[8];
  for (int i = 0; i < 8; ++i) {
    const bool batch = i % 4 == 0;
    TORCH_CHECK(bounds[i] >= (batch ? 0 : -kCoordBias) && bounds[i] <= (batch ? kBatchMax : kCoordBias - 1), "bounds[",
                i, "] is ", bounds[i], ", outside the packable range");
    ends[i] = static_cast<int>(bounds[i]);
  }
  return box_around(ends, ends + 4);
}

Tensor brick_table(const Launch& on, const Tensor& coords, const Tensor& order, int64_t known,
                   const int64_t* count = nullptr) {
  const int64_t n = coords.size(0), capacity = brick_capacity(n, known);
  const Tensor table = on.empty({capacity, sizeof(Brick) / sizeof(int)}, at::kInt);
  check_cuda(build_bricks(data<int>(coords), data<int>(order), n, count, data<Brick>(table), capacity, on.stream),
             "build_bricks", on.device);
  return table;
}

// `args` says how the rows are checked.
Tensor morton_order(const Launch& on, const Tensor& coords, const CoordBox& box, OrderArgs args = {}) {
  const int64_t n = coords.size(0);
  const Tensor order = on.empty({n}, at::kInt), scratch = on.scratch(order_workspace(n));
  args.coords = data<int>(coords);
  args.n = n;
  args.box = box;
  args.order = data<int>(order);
  args.workspace = scratch.data_ptr();
  check_cuda(order_coords(args, on.stream), "order_coords", on.device);
  return order;
}

// Without bounds the rows are checked, which reads back once (twice where survey_coords cannot tell): bad row,
// duplicate, its twin, smallest and largest coordinates. With bounds they are known to be valid.
IndexResult index_coords_cuda(const Tensor& coords, const Ints& bounds) {
  check_ints("coords", coords, at::kInt, 4, coords);
  const NormalTensors normal;
  const Launch on(coords.device());
  if (!bounds.empty()) {
    const CoordBox box = box_within(bounds);
    const Tensor order = morton_order(on, coords, box);
    return {order, brick_table(on, coords, order, -1), {}};
  }
  const int64_t n = coords.size(0);
  constexpr size_t kStatsBytes = (sizeof(SurveyStats) + 255) / 256 * 256;
  const Tensor scratch = on.scratch(kStatsBytes + survey_workspace(n));
  auto* const stats = static_cast<SurveyStats*>(scratch.data_ptr());
  void* const workspace = data<char>(scratch) + kStatsBytes;
  check_cuda(survey_coords(data<int>(coords), n, stats, workspace, on.stream), "survey_coords", on.device);
  const auto survey = read_back(on, stats);
  CoordStats found = survey.coords;
  Tensor order, table;
  if (survey_holds(survey, n)) {
    const int64_t capacity = brick_capacity(n, survey.cells.bricks);
    Parts parts;
    const int64_t order_at = parts.add(n), table_at = parts.add(4 * capacity);
    const Tensor index = on.empty({parts.total}, at::kInt);
    order = part_of(index, order_at, {n});
    table = part_of(index, table_at, {capacity, 4});
    check_cuda(index_survey(survey, data<int>(coords), n, workspace, data<int>(order), data<Brick>(table), capacity,
                            on.stream),
               "index_survey", on.device);
  } else if (found.bad_row < 0) {
    const Tensor again = empty_struct<CoordStats>(on);
    OrderArgs args{};
    args.stats = data<CoordStats>(again);
    order = morton_order(on, coords, box_around(found.min, found.max), args);
    found = read_back(on, data<CoordStats>(again));
    if (found.duplicate == -1) table = brick_table(on, coords, order, found.bricks);
  }
  if (!table.defined()) order = table = on.empty({0, 4}, at::kInt);  // there is an error to report
  const bool twins = found.duplicate != -1;
  Ints list{found.bad_row, twins ? found.duplicate >> 32 : -1, twins ? found.duplicate & 0xffffffff : -1};
  list.insert(list.end(), found.min, found.min + 4);
  list.insert(list.end(), found.max, found.max + 4);
  return {order, table, list};
}

// The bounds of a set that the device knows, smallest and largest.
const int* inner_bounds(const Tensor& inner, const Tensor& like) {
  check_ints("inner", inner, at::kInt, 0, like);
  TORCH_CHECK_VALUE(inner.size(0) == 8, "inner must hold 8 integers, got ", inner.size(0));
  return data<int>(inner);
}

std::tuple<Tensor, Tensor, Tensor> index_sized_cuda(const Tensor& coords, const Tensor& count, const Ints& bounds,
                                                    const Tensor& status) {
  check_ints("coords", coords, at::kInt, 4, coords);
  OrderArgs args{};
  args.count = sized_count("count", count, coords);
  static_assert(sizeof(SizedStats) == 4 * sizeof(int64_t) && sizeof(CellStats) <= sizeof(SizedStats) &&
                sizeof(PlanStats) <= sizeof(SizedStats));
  args.sized = reinterpret_cast<SizedStats*>(sized_status(status, coords));
  const CoordBox box = cell_box(box_within(bounds));
  for (int a = 0; a < 4; ++a) {
    args.low[a] = static_cast<int>(bounds[a]);
    args.high[a] = static_cast<int>(bounds[4 + a]);
  }
  const NormalTensors normal;
  const Launch on(coords.device());
  const Tensor inner = on.empty({8}, at::kInt);
  args.bounds = data<int>(inner);
  const int64_t n = coords.size(0);
  const int64_t capacity = brick_capacity(n, -1);
  Parts parts;
  const int64_t order_at = parts.add(n), table_at = parts.add(4 * capacity);
  const Tensor index = on.empty({parts.total}, at::kInt), scratch = on.scratch(index_workspace(box, n));
  const Tensor order = part_of(index, order_at, {n}), table = part_of(index, table_at, {capacity, 4});
  args.coords = data<int>(coords);
  args.n = n;
  args.box = box;
  args.order = data<int>(order);
  args.workspace = scratch.data_ptr();
  check_cuda(index_coords(args, data<Brick>(table), capacity, on.stream), "index_coords", on.device);
  return {order, table, inner};
}

ExpandArgs expand_args(const Ints& size, const Ints& stride, const Ints& dilation, const Ints& padding,
                       bool to_children, const Ints& shape, const Ints& bounds) {
  ExpandArgs args{};
  copy_triple("size", size, args.size);
  copy_triple("stride", stride, args.stride);
  copy_triple("dilation", dilation, args.dilation);
  copy_triple("padding", padding, args.padding);
  args.to_children = to_children;
  if (shape.size() > 0) {
    copy_triple("shape", shape, args.shape);
    TORCH_CHECK(shape[0] > 0 && shape[1] > 0 && shape[2] > 0, "shape must be positive, got ", shape);
  }
  args.box = box_within(bounds);
  return args;
}

// Calls launch(args) for `rows` rows at a time; once where there are none.
template <class Launcher>
void for_pieces(ExpandArgs args, const Tensor& coords, int64_t rows, const Launcher& launch) {
  const int64_t n = coords.size(0);
  do {
    args.coords = data<int>(coords) + 4 * args.begin;
    args.n = std::min(rows, n - args.begin);
    launch(args);
    args.begin += rows;
  } while (args.begin < n);
}

// Marks the sites that the rows lead to in cleared bitmaps, `rows` rows at a time.
void mark_cells(const Launch& on, const ExpandArgs& args, const Tensor& coords, int64_t rows, void* cells) {
  check_cuda(clear_cells(args.box, cells, on.stream), "clear_cells", on.device);
  for_pieces(args, coords, rows, [&](const ExpandArgs& piece) {
    check_cuda(expand_cells(piece, cells, on.stream), "expand_cells", on.device);
  });
}

int64_t rows_at_a_time(ExpandArgs args, int64_t candidates) {
  args.n = 1;
  return std::max<int64_t>(1, candidates / expand_bound(args));
}

// Output coordinates of a layer (voxmma/sparse/derive.py) and their index: coordinates sorted by (batch, x, y, z), order, bricks,
// how many there are, and whether one lies outside the packable range. In the last case, and above `limit`, there is
// nothing but the count. `shape`: only sites in [0, shape); empty: no border. Works on `piece` candidates at a time;
// reads back once, or once a piece where the bounds hold too many cells for a bitmap.
DeriveResult derive_coords_cuda(const Tensor& coords, const Ints& size, const Ints& stride, const Ints& dilation,
                                const Ints& padding, bool to_children, const Ints& shape, const Ints& bounds,
                                int64_t piece, int64_t limit) {
  check_ints("coords", coords, at::kInt, 4, coords);
  const NormalTensors normal;
  const Launch on(coords.device());
  ExpandArgs args = expand_args(size, stride, dilation, padding, to_children, shape, bounds);
  const int64_t n = coords.size(0), rows = rows_at_a_time(args, piece);

  const auto refused = [&](const auto& found) { return found.outside != 0 || found.count > limit; };
  const auto nothing = [&](const auto& found) -> DeriveResult {
    const Tensor none = on.empty({0, 4}, at::kInt);
    return {none, none, none, found.count, found.outside != 0};
  };

  ExpandArgs in_cells = args;
  in_cells.box = cell_box(args.box);
  in_cells.coords = data<int>(coords);
  in_cells.n = n;
  if (const int64_t most = few_cells(in_cells); most > 0 && rows >= n) {
    const int64_t capacity = brick_capacity(most, -1);
    Parts parts;
    const int64_t order_at = parts.add(most), table_at = parts.add(4 * capacity);
    const Tensor made = on.empty({most, 4}, at::kInt), index = on.empty({parts.total}, at::kInt);
    const Tensor table = part_of(index, table_at, {capacity, 4});
    const auto found = told<CellStats>(on, [&](CellStats* host) {
      check_cuda(derive_few_cells(in_cells, data<int>(made), data<int>(index) + order_at, data<Brick>(table), capacity,
                                  host, on.stream),
                 "derive_few_cells", on.device);
    });
    if (refused(found)) return nothing(found);
    return {part_of(made, 0, {found.count, 4}), part_of(index, order_at, {found.count}), table, found.count, false};
  }
  if (const auto bytes = cell_workspace(in_cells.box); n > 0 && bytes > 0) {
    args.box = in_cells.box;
    const Tensor scratch = on.scratch(bytes);
    void* const cells = scratch.data_ptr();
    mark_cells(on, args, coords, rows, cells);
    check_cuda(count_cells(args.box, cells, on.stream), "count_cells", on.device);
    const CellStats found = read_back(on, cell_stats(args.box, cells));
    if (refused(found)) return nothing(found);
    const int64_t capacity = brick_capacity(found.count, found.bricks);
    Parts parts;
    const int64_t order_at = parts.add(found.count), table_at = parts.add(4 * capacity);
    const Tensor made = on.empty({found.count, 4}, at::kInt), index = on.empty({parts.total}, at::kInt);
    const Tensor order = part_of(index, order_at, {found.count}), table = part_of(index, table_at, {capacity, 4});
    check_cuda(index_cells(args.box, nullptr, cells, found.count, data<int>(made), data<int>(order), data<Brick>(table),
                           capacity, nullptr, nullptr, on.stream),
               "index_cells", on.device);
    return {made, order, table, found.count, false};
  }

  const auto width = static_cast<int64_t>(key_bytes(args.box));
  double cells = 1;  // of the bounds: no more sites than that
  for (int a = 0; a < 4; ++a) cells *= static_cast<double>(bounds[4 + a] - bounds[a] + 1);

  const Tensor stats = empty_struct<ExpandStats>(on);
  args.stats = data<ExpandStats>(stats);
  check_cuda(set_bytes(args.stats, 0, sizeof(ExpandStats), on.stream), "cudaMemsetAsync", on.device);
  ExpandStats found{};
  Tensor keys = on.scratch(0), table;
  for (int64_t begin = 0; begin < n && !refused(found); begin += rows) {
    args.coords = data<int>(coords) + 4 * begin;
    args.n = std::min(rows, n - begin);
    int64_t room = found.count + expand_bound(args);
    if (cells < static_cast<double>(room)) room = static_cast<int64_t>(cells);
    const Tensor old = keys;
    keys = on.scratch(room * width);
    if (found.count > 0) keys.narrow(0, 0, found.count * width).copy_(old.narrow(0, 0, found.count * width));
    args.keys = keys.data_ptr();
    if (args.capacity < expand_capacity(room)) {
      args.capacity = expand_capacity(room);
      table = on.scratch(args.capacity * width);
      args.table = table.data_ptr();
      check_cuda(set_bytes(args.table, 0xff, args.capacity * width, on.stream), "cudaMemsetAsync", on.device);
      check_cuda(rehash_keys(args.box, args.keys, found.count, args.table, args.capacity, on.stream), "rehash_keys",
                 on.device);
    }
    check_cuda(expand_coords(args, on.stream), "expand_coords", on.device);
    found = read_back(on, args.stats);
  }
  if (refused(found)) return nothing(found);
  const Tensor made = on.empty({found.count, 4}, at::kInt),
               scratch = on.scratch(unpack_workspace(args.box, found.count));
  check_cuda(
      unpack_keys(args.box, keys.data_ptr(), found.count, nullptr, data<int>(made), scratch.data_ptr(), on.stream),
      "unpack_keys", on.device);
  const Tensor order = morton_order(on, made, args.box);
  return {made, order, brick_table(on, made, order, -1), found.count, false};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> derive_sized_cuda(const Tensor& coords, const Tensor& count,
                                                                     const OptTensor& inner, const Ints& size,
                                                                     const Ints& stride, const Ints& dilation,
                                                                     const Ints& padding, bool to_children,
                                                                     const Ints& shape, const Ints& bounds,
                                                                     int64_t capacity, const Tensor& status) {
  check_ints("coords", coords, at::kInt, 4, coords);
  ExpandArgs args = expand_args(size, stride, dilation, padding, to_children, shape, bounds);
  args.count = sized_count("count", count, coords);
  if (inner.has_value()) args.row_bounds = inner_bounds(*inner, coords);
  args.box = cell_box(args.box);
  auto* const found = reinterpret_cast<CellStats*>(sized_status(status, coords));
  TORCH_CHECK_VALUE(capacity >= 0 && capacity <= INT_MAX, "capacity must be in 0..", INT_MAX, ", got ", capacity);
  const NormalTensors normal;
  const Launch on(coords.device());
  const Tensor made = on.empty({1}, at::kLong), outer = inner.has_value() ? on.empty({8}, at::kInt) : Tensor();
  if (inner.has_value()) args.bounds = data<int>(outer);
  constexpr int64_t kPiece = 1 << 30;  // candidates of a launch
  const int64_t rows = rows_at_a_time(args, kPiece);
  const size_t bytes = cell_workspace(args.box);
  if (bytes == 0) {  // too many cells for a bitmap
    const auto width = static_cast<int64_t>(key_bytes(args.box));
    args.room = capacity;
    args.capacity = expand_capacity(capacity);
    const Tensor stats = empty_struct<ExpandStats>(on), table = on.scratch(args.capacity * width);
    const Tensor keys = on.scratch(capacity * width), derived = on.empty({capacity, 4}, at::kInt);
    args.stats = data<ExpandStats>(stats);
    args.table = table.data_ptr();
    args.keys = keys.data_ptr();
    check_cuda(set_bytes(args.stats, 0, sizeof(ExpandStats), on.stream), "cudaMemsetAsync", on.device);
    check_cuda(set_bytes(args.table, 0xff, args.capacity * width, on.stream), "cudaMemsetAsync", on.device);
    if (capacity > 0) {
      check_cuda(set_bytes(args.keys, 0xff, capacity * width, on.stream), "cudaMemsetAsync", on.device);
    }
    for_pieces(args, coords, rows, [&](const ExpandArgs& piece) {
      check_cuda(expand_coords(piece, on.stream), "expand_coords", on.device);
    });
    check_cuda(count_keys(args.stats, capacity, found, data<int64_t>(made), on.stream), "count_keys", on.device);
    const Tensor scratch = on.scratch(unpack_workspace(args.box, capacity));
    check_cuda(unpack_keys(args.box, args.keys, capacity, data<int64_t>(made), data<int>(derived), scratch.data_ptr(),
                           on.stream),
               "unpack_keys", on.device);
    OrderArgs known{};
    known.count = data<int64_t>(made);
    known.bounds = args.bounds;
    const Tensor order = morton_order(on, derived, args.box, known);
    return {derived, made, outer, order, brick_table(on, derived, order, -1, known.count)};
  }
  const Tensor scratch = on.scratch(bytes);
  mark_cells(on, args, coords, rows, scratch.data_ptr());
  const int64_t slots = brick_capacity(capacity, -1);
  Parts parts;
  const int64_t order_at = parts.add(capacity), table_at = parts.add(4 * slots);
  const Tensor derived = on.empty({capacity, 4}, at::kInt), index = on.empty({parts.total}, at::kInt);
  const Tensor order = part_of(index, order_at, {capacity}), table = part_of(index, table_at, {slots, 4});
  check_cuda(index_cells(args.box, args.bounds, scratch.data_ptr(), capacity, data<int>(derived), data<int>(order),
                         data<Brick>(table), slots, found, data<int64_t>(made), on.stream),
             "index_cells", on.device);
  return {derived, made, outer, order, table};
}

}  // namespace

void bind_coords(py::module_& m) {
  m.def("index_coords", torch::wrap_pybind_function_no_gil(index_coords_cuda), py::arg("coords"),
        py::arg("bounds") = Ints{});
  m.def("derive_coords", torch::wrap_pybind_function_no_gil(derive_coords_cuda), py::arg("coords"), py::arg("size"),
        py::arg("stride"), py::arg("dilation"), py::arg("padding"), py::arg("to_children"), py::arg("shape"),
        py::arg("bounds"), py::arg("piece"), py::arg("limit"));
  m.def("index_sized", torch::wrap_pybind_function_no_gil(index_sized_cuda), py::arg("coords"), py::arg("count"),
        py::arg("bounds"), py::arg("status"));
  m.def("derive_sized", torch::wrap_pybind_function_no_gil(derive_sized_cuda), py::arg("coords"), py::arg("count"),
        py::arg("inner"), py::arg("size"), py::arg("stride"), py::arg("dilation"), py::arg("padding"),
        py::arg("to_children"), py::arg("shape"), py::arg("bounds"), py::arg("capacity"), py::arg("status"));
}

}  // namespace voxmma
