// Kernel maps: tile plans, one or several at once.
#include <algorithm>
#include <tuple>

#include "../module.h"
#include "sizes.h"
#include "voxmma/room.h"

namespace voxmma {
namespace {

using PlanResult = std::tuple<std::vector<Tensor>, Tensor, int64_t>;

void copy_rule(const Ints& size, const Ints& start, const Ints& step, const Ints& mul, const Ints& div,
               PlanArgs& args) {
  copy_triple("size", size, args.size);
  copy_triple("start", start, args.start);
  copy_triple("step", step, args.step);
  copy_triple("mul", mul, args.mul);
  copy_triple("div", div, args.div);
  for (int i = 0; i < 3; ++i) {
    TORCH_CHECK(size[i] >= 1 && size[i] <= kMaxKernel && step[i] != 0 && mul[i] >= 1 && div[i] >= 1, "size ", size,
                ", step ", step, ", mul ", mul, " or div ", div, " is out of range");
  }
}

int64_t volume_of(const PlanArgs& args) { return int64_t{args.size[0]} * args.size[1] * args.size[2]; }

int64_t tiles_of(const PlanArgs& args) { return (args.n_out + kTileM - 1) / kTileM; }

// Checks the tensors that a plan is made from.
void copy_sets(const Tensor& out_coords, const Tensor& out_order, const Tensor& bricks, const Tensor& in_order,
               PlanArgs& args) {
  check_ints("out_coords", out_coords, at::kInt, 4, out_coords);
  check_ints("out_order", out_order, at::kInt, 0, out_coords);
  check_ints("bricks", bricks, at::kInt, 4, out_coords);
  check_ints("in_order", in_order, at::kInt, 0, out_coords);
  TORCH_CHECK(out_order.size(0) == out_coords.size(0) && bricks.size(0) >= kBucket,
              "out_order or bricks has the wrong length");
  args.n_out = out_coords.size(0);
  args.n_in = in_order.size(0);
  args.out_coords = data<int>(out_coords);
  args.out_order = data<int>(out_order);
  args.bricks = data<Brick>(bricks);
  args.capacity = bricks.size(0);
  args.in_order = data<int>(in_order);
}

// The tensors of a plan, in allocations that they share: but for `local`, since torch.save refuses storages of two dtypes.
struct PlanTensors {
  Tensor order, schedule, passes, frag, uniq, local;

  // Those whose sizes follow from the number of outputs, ...
  struct Tiles {
    int64_t order, schedule;
    Tiles(Parts& parts, const PlanArgs& args)
        : order(parts.add(tiles_of(args) * kTileM)), schedule(parts.add(2 * tiles_of(args) * 4)) {}
  };
  // ... and those of so many passes.
  struct Passes {
    int64_t count, passes, frag, uniq;
    Passes(Parts& parts, const PlanArgs& args, int64_t count)
        : count(count),
          passes(parts.add(count * 4)),
          frag(parts.add(count * kFrags)),
          uniq(parts.add(args.uniq4_capacity * 4)) {}
  };

  void put(const Launch& on, const Tensor& whole, const Tiles& at, PlanArgs& args) {
    const int64_t tiles = tiles_of(args);
    order = part_of(whole, at.order, {tiles * kTileM});
    schedule = part_of(whole, at.schedule, {2, tiles, 4});
    local = on.empty({tiles, volume_of(args), kTileM}, at::kShort);
    args.order = data<int>(order);
    args.schedule = data<ScheduledTile>(schedule);
    args.local = data<uint16_t>(local);
  }

  void put(const Tensor& whole, const Passes& at, PlanArgs& args) {
    passes = part_of(whole, at.passes, {at.count, 4});
    frag = part_of(whole, at.frag, {at.count, kFrags});
    uniq = part_of(whole, at.uniq, {args.uniq4_capacity * 4});
    args.passes = data<Pass>(passes);
    args.frag = data<uint32_t>(frag);
    args.uniq = data<int>(uniq);
  }

  // As the ops take them: the last, which is empty, tells by its shape alone between how many rows the map leads.
  std::vector<Tensor> as_map(int64_t n_in, int64_t n_out) const {
    return {order, schedule, passes, frag, uniq, local, part_of(order, 0, {0, n_in, n_out})};
  }
};

std::tuple<int64_t, int64_t, int64_t, int64_t> plan_room_cuda(int64_t n_out, int64_t n_in, const Ints& size,
                                                              const Ints& start, const Ints& step, const Ints& mul,
                                                              const Ints& div) {
  TORCH_CHECK_VALUE(n_out >= 0 && n_in >= 0, "n_out and n_in must not be negative, got ", n_out, " and ", n_in);
  PlanArgs args{};
  copy_rule(size, start, step, mul, div, args);
  args.n_out = n_out;
  args.n_in = n_in;
  int64_t most_passes, most_uniq4;
  plan_room(args, &most_passes, &most_uniq4);
  return {args.pass_capacity, args.uniq4_capacity, most_passes, most_uniq4};
}

// Rows and pairs of a plan are counted on the device. Where bounds are known that take no more room than kLittleRoom or the
// usual guess, the count is not read back: `stats` is left on the device, the last result is -1, and passes, frag and uniq
// end in unused room. Else it is, and they are cut to what is used. A strided layer has waited for its coordinates already:
// its bounds may take kStridedRoom times the guess (3x3x3 at stride 2: up to 3.5 times, 37 bytes a row of the larger side).
PlanResult build_plan_cuda(const Tensor& out_coords, const Tensor& out_order, const Tensor& bricks,
                           const Tensor& in_order, const Ints& size, const Ints& start, const Ints& step,
                           const Ints& mul, const Ints& div) {
  PlanArgs args{};
  copy_sets(out_coords, out_order, bricks, in_order, args);
  copy_rule(size, start, step, mul, div, args);
  const NormalTensors normal;
  const Launch on(out_coords.device());
  args.sm_count = on.info.sm_count;
  usual_room(args);
  constexpr int64_t kPassBytes = sizeof(Pass) + kFrags * sizeof(uint32_t);
  const auto bytes = [](int64_t passes, int64_t uniq4) {
    return passes * kPassBytes + uniq4 * 4 * int64_t{sizeof(int)};
  };
  int64_t most_passes, most_uniq4;
  plan_bounds(args, &most_passes, &most_uniq4);
  constexpr int64_t kLittleRoom = 1 << 20, kStridedRoom = 4;
  const auto is_one = [](const Ints& steps) { return steps[0] == 1 && steps[1] == 1 && steps[2] == 1; };
  const int64_t room = (is_one(mul) && is_one(div) ? 1 : kStridedRoom) * bytes(args.pass_capacity, args.uniq4_capacity);
  const bool certain = bytes(most_passes, most_uniq4) <= std::max(room, kLittleRoom);
  if (certain) {
    args.pass_capacity = most_passes;
    args.uniq4_capacity = most_uniq4;
  }
  constexpr int64_t kStats = sizeof(PlanStats) / sizeof(int64_t), kTold = 3;  // the last is the kernels' own
  PlanTensors plan;
  Tensor stats;
  Parts parts;
  const PlanTensors::Tiles tiles(parts, args);
  if (!certain) {  // what is cut shares no allocation with what is not
    plan.put(on, on.empty({parts.total}, at::kInt), tiles, args);
    parts = {};
  }
  const auto build = [&] {
    const int64_t stats_at = parts.add(2 * kStats);
    const PlanTensors::Passes passes(parts, args, args.pass_capacity);
    const Tensor whole = on.empty({parts.total}, at::kInt);
    if (certain) plan.put(on, whole, tiles, args);
    plan.put(whole, passes, args);
    stats = part_of(whole, stats_at, {kTold}, at::kLong);
    args.stats = data<PlanStats>(stats);
    check_cuda(build_plan(args, on.stream), "build_plan", on.device);
  };
  build();
  if (certain) return {plan.as_map(args.n_in, args.n_out), stats, -1};
  const PlanStats found = read_back(on, args.stats);
  if (found.passes > args.pass_capacity || found.uniq4 > args.uniq4_capacity) {
    args.pass_capacity = found.passes;
    args.uniq4_capacity = found.uniq4;
    parts = {};
    build();
  }
  const int64_t unused = bytes(args.pass_capacity - found.passes, args.uniq4_capacity - found.uniq4);
  const auto held = static_cast<int64_t>(plan.local.nbytes()) + bytes(args.pass_capacity, args.uniq4_capacity);
  const bool copy = unused > held / 8;
  const auto cut = [copy](Tensor& t, int64_t used) {
    auto sizes = t.sizes().vec();
    sizes[0] = used;
    t = copy ? t.narrow(0, 0, used).clone() : part_of(t, t.storage_offset(), sizes);
  };
  cut(plan.passes, found.passes);
  cut(plan.frag, found.passes);
  cut(plan.uniq, found.uniq4 * 4);
  return {plan.as_map(args.n_in, args.n_out), stats, found.pairs};
}

using SizedPlan = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// Several plans at once. `rules`: size, start, step, mul, div, pass_capacity and uniq4_capacity of each, 17 integers.
std::vector<SizedPlan> plans_sized_cuda(const std::vector<Tensor>& out_coords, const std::vector<Tensor>& out_count,
                                        const std::vector<Tensor>& out_order, const std::vector<Tensor>& bricks,
                                        const std::vector<Tensor>& in_order, const std::vector<Ints>& rules,
                                        const Tensor& status, bool compact) {
  const size_t count = out_coords.size();
  TORCH_CHECK_VALUE(out_count.size() == count && out_order.size() == count && bricks.size() == count &&
                        in_order.size() == count && rules.size() == count,
                    "the lists must be equally long");
  if (count == 0) return {};
  check_ints("status", status, at::kLong, 4, out_coords[0]);
  TORCH_CHECK_VALUE(status.size(0) == static_cast<int64_t>(count), "status must be (", count, ", 4), got ",
                    status.sizes());
  const NormalTensors normal;
  const Launch on(out_coords[0].device());
  std::vector<PlanArgs> plans(count);
  std::vector<SizedPlan> made;
  for (size_t i = 0; i < count; ++i) {
    PlanArgs& args = plans[i];
    TORCH_CHECK_VALUE(out_coords[i].device() == on.device, "out_coords are on several devices");
    copy_sets(out_coords[i], out_order[i], bricks[i], in_order[i], args);
    TORCH_CHECK_VALUE(rules[i].size() == 17, "a rule must hold 17 integers, got ", rules[i].size());
    const auto triple = [&](int at) { return Ints(rules[i].begin() + 3 * at, rules[i].begin() + 3 * at + 3); };
    copy_rule(triple(0), triple(1), triple(2), triple(3), triple(4), args);
    args.pass_capacity = rules[i][15];
    args.uniq4_capacity = rules[i][16];
    TORCH_CHECK_VALUE(args.pass_capacity >= 0 && args.uniq4_capacity >= 0,
                      "pass_capacity and uniq4_capacity must not be negative, got ", args.pass_capacity, " and ",
                      args.uniq4_capacity);
    args.out_count = sized_count("out_count", out_count[i], out_coords[i]);
    args.stats = reinterpret_cast<PlanStats*>(data<int64_t>(status) + 4 * i);
    args.compact = compact;
    args.sm_count = on.info.sm_count;
    Parts parts;
    const PlanTensors::Tiles tiles(parts, args);
    const PlanTensors::Passes passes(parts, args, args.pass_capacity + empty_passes(static_cast<int>(volume_of(args))));
    const Tensor whole = on.empty({parts.total}, at::kInt);
    PlanTensors plan;
    plan.put(on, whole, tiles, args);
    plan.put(whole, passes, args);
    made.emplace_back(plan.order, plan.schedule, plan.passes, plan.frag, plan.uniq, plan.local);
  }
  check_cuda(build_plans(plans.data(), static_cast<int>(count), on.stream), "build_plans", on.device);
  return made;
}

Tensor plan_to_table_cuda(const std::vector<Tensor>& plan, int64_t n_out) {
  TORCH_CHECK(plan.size() == kPlanTensors && plan[5].is_cuda() && plan[5].dim() == 3, "plan must be a CUDA map of ",
              kPlanTensors, " tensors");
  const int64_t volume = plan[5].size(1);
  check_map("plan", plan, plan[5], volume, -1, n_out);
  const Launch on(plan[5].device());
  const Tensor table = on.empty({volume, n_out}, at::kInt);
  if (n_out > 0) {
    check_cuda(plan_to_table(plan_view(plan, volume, n_out, 0), data<int>(table), on.stream), "plan_to_table",
               on.device);
  }
  return table;
}

}  // namespace

void bind_plans(py::module_& m) {
  m.def("build_plan", torch::wrap_pybind_function_no_gil(build_plan_cuda), py::arg("out_coords"), py::arg("out_order"),
        py::arg("bricks"), py::arg("in_order"), py::arg("size"), py::arg("start"), py::arg("step"), py::arg("mul"),
        py::arg("div"));
  m.def("plan_room", torch::wrap_pybind_function_no_gil(plan_room_cuda), py::arg("n_out"), py::arg("n_in"),
        py::arg("size"), py::arg("start"), py::arg("step"), py::arg("mul"), py::arg("div"));
  m.def("plans_sized", torch::wrap_pybind_function_no_gil(plans_sized_cuda), py::arg("out_coords"),
        py::arg("out_count"), py::arg("out_order"), py::arg("bricks"), py::arg("in_order"), py::arg("rules"),
        py::arg("status"), py::arg("compact") = false);
  m.def("plan_to_table", torch::wrap_pybind_function_no_gil(plan_to_table_cuda), py::arg("plan"), py::arg("n_out"));
}

}  // namespace voxmma
