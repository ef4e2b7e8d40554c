// Launches of pooling over windows and over segments.
#include <torch/library.h>

#include <tuple>

#include "../ops.h"
#include "launch.h"

namespace voxmma {
namespace {

Tensor neighbor_counts_cuda(TensorList map, int64_t kernel_volume, int64_t n_out) {
  TORCH_CHECK(map.size() == kPlanTensors && map[0].is_cuda(), "map must be a CUDA map of ", kPlanTensors, " tensors");
  check_map("map", map, map[0], kernel_volume, -1, n_out);
  const Launch on(map[0].device());
  const Tensor counts = on.empty({n_out}, at::kInt);
  check_cuda(neighbor_counts(plan_view(map, kernel_volume, n_out, 0), data<int>(counts), on.stream), "neighbor_counts",
             on.device);
  return counts;
}

// Runs a pooling kernel whose operands have been checked. `winner`: undefined where the op has none.
Tensor launch_pool(PoolOp op, const Tensor& x, const OptTensor& in_count, const OptTensor& out_count,
                   const Tensor& winner, TensorList map, int64_t kernel_volume, int64_t n_out, bool mirror,
                   const Launch& on) {
  const Tensor rows = dense_rows(x), y = on.empty({n_out, x.size(1)}, x.scalar_type());
  PoolArgs args{};
  args.plan = plan_view(map, kernel_volume, n_out, x.size(0));
  args.op = op;
  args.dtype = to_dtype(x.scalar_type());
  args.mirror = mirror;
  args.x = rows.data_ptr();
  args.ldx = rows.stride(0);
  args.y = y.data_ptr();
  args.channels = x.size(1);
  args.sm_count = on.info.sm_count;
  if (in_count.has_value()) args.in_count = data<int>(*in_count);
  if (out_count.has_value()) args.out_count = data<int>(*out_count);
  if (winner.defined()) args.winner = winner.data_ptr();
  check_cuda(pool(args, on.stream), "pool", on.device);
  return y;
}

Tensor pool_sum_cuda(const Tensor& x, const OptTensor& in_count, const OptTensor& out_count, TensorList map,
                     TensorList /*map_t*/, int64_t kernel_volume, int64_t n_out, bool /*symmetric*/, bool mirror) {
  check_pool(x, in_count, out_count, std::nullopt, 0, "map", map, kernel_volume, n_out);
  return launch_pool(PoolOp::sum, x, in_count, out_count, Tensor(), map, kernel_volume, n_out, mirror,
                     Launch(x.device()));
}

std::tuple<Tensor, Tensor> pool_max_cuda(const Tensor& x, TensorList map, TensorList /*map_t*/, int64_t kernel_volume,
                                         int64_t n_out, bool /*symmetric*/, bool largest, bool keep_winner) {
  check_pool(x, std::nullopt, std::nullopt, std::nullopt, 0, "map", map, kernel_volume, n_out);
  const Launch on(x.device());
  const Tensor winner = on.empty({keep_winner ? n_out : 0, x.size(1)}, winner_dtype(kernel_volume));
  const Tensor y = launch_pool(largest ? PoolOp::max : PoolOp::min, x, std::nullopt, std::nullopt,
                               keep_winner ? winner : Tensor(), map, kernel_volume, n_out, false, on);
  return {y, winner};
}

Tensor pool_pick_cuda(const Tensor& x, const Tensor& winner, TensorList map, TensorList /*map_t*/,
                      int64_t kernel_volume, bool /*symmetric*/) {
  const int64_t n_out = winner.dim() > 0 ? winner.size(0) : 0;
  check_pool(x, std::nullopt, std::nullopt, winner, n_out, "map", map, kernel_volume, n_out);
  return launch_pool(PoolOp::pick, x, std::nullopt, std::nullopt, winner, map, kernel_volume, n_out, false,
                     Launch(x.device()));
}

Tensor pool_put_cuda(const Tensor& x, const Tensor& winner, TensorList map, TensorList map_t, int64_t kernel_volume,
                     int64_t n_out, bool symmetric) {
  const TensorList back = opposite_map(map, map_t, symmetric, "pool_put");
  check_pool(x, std::nullopt, std::nullopt, winner, x.dim() > 0 ? x.size(0) : 0, symmetric ? "map" : "map_t", back,
             kernel_volume, n_out);
  return launch_pool(PoolOp::put, x, std::nullopt, std::nullopt, winner, back, kernel_volume, n_out, symmetric,
                     Launch(x.device()));
}

Tensor launch_segments(const Tensor& x, const OptTensor& candidates, const Tensor& rows, const Tensor& starts,
                       bool argmax) {
  check_segments(x, candidates, rows, starts);
  const Launch on(x.device());
  const Tensor from = dense_rows(x);
  const ScalarType wide = sum_type(x.scalar_type());
  const Tensor out = on.empty({starts.size(0), x.size(1)}, argmax ? at::kLong : wide);
  SegmentArgs args{};
  args.x = from.data_ptr();
  args.ldx = from.stride(0);
  args.dtype = to_dtype(x.scalar_type());
  args.channels = x.size(1);
  args.rows = data<int64_t>(rows);
  args.n_rows = rows.size(0);
  args.starts = data<int64_t>(starts);
  args.blocks = starts.size(0);
  if (candidates.has_value()) args.candidates = data<int64_t>(*candidates);
  args.out = out.data_ptr();
  check_cuda(argmax ? segment_argmax(args, on.stream) : segment_sum(args, on.stream),
             argmax ? "segment_argmax" : "segment_sum", on.device);
  return out;
}

Tensor segment_sum_cuda(const Tensor& x, const Tensor& rows, const Tensor& starts) {
  return launch_segments(x, std::nullopt, rows, starts, false);
}

Tensor segment_argmax_cuda(const Tensor& x, const OptTensor& candidates, const Tensor& rows, const Tensor& starts) {
  return launch_segments(x, candidates, rows, starts, true);
}

TORCH_LIBRARY_IMPL(voxmma, CUDA, m) {
  m.impl("neighbor_counts", TORCH_FN(neighbor_counts_cuda));
  m.impl("pool_sum", TORCH_FN(pool_sum_cuda));
  m.impl("pool_max", TORCH_FN(pool_max_cuda));
  m.impl("pool_pick", TORCH_FN(pool_pick_cuda));
  m.impl("pool_put", TORCH_FN(pool_put_cuda));
  m.impl("segment_sum", TORCH_FN(segment_sum_cuda));
  m.impl("segment_argmax", TORCH_FN(segment_argmax_cuda));
}

}  // namespace
}  // namespace voxmma
