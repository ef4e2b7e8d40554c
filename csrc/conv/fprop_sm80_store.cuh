// How sums leave an fprop kernel of mma.sync.
#pragma once

#include "common.cuh"
#include "mma_sm80.cuh"

namespace voxmma {

// Epilogue, one rounding, rows to their places in the caller's order: acc[i][n] is the m16n8 block of tile rows
// tile_row(i) ... and channels channel0 + 8 n ... of a group. All 32 lanes call.
template <DType In, class Sum, int M, int N, class TileRow>
__device__ __forceinline__ void store_sums(const ConvArgs& args, bool vec, int part, int tile, int group, int channel0,
                                           Sum (&acc)[M][N], TileRow tile_row) {
  using T = type_of<In>;
  const PlanView& plan = args.plan;
  const int lane = threadIdx.x % 32;
  const int cols = args.c_out - channel0;  // channels that exist from there, may be <= 0
#pragma unroll
  for (int i = 0; i < M; ++i) {
#pragma unroll
    for (int n = 0; n < N; ++n) acc[i][n].promote();  // what is left of an fp16 chunk
  }
  const auto out_row = [&](int i, int half) {
    return __ldg(plan.order + static_cast<int64_t>(tile) * kTileM + tile_row(i) + half * 8 + lane / 4);
  };
  const int64_t first = static_cast<int64_t>(group) * args.c_out + channel0;  // the same over all groups
  if (has_epilogue(args)) {
    constexpr int kPer = N / 4;  // groups of four n8 fragments; group of a warp: ((i * 2) + half) * kPer + n / 4
    finish_rows<T, M * 2 * kPer>(
        args, vec, [&](int g, int j) { return acc[g / kPer / 2][g % kPer * 4 + j].row(g / kPer % 2); },
        [&](int g) {
          return RowPart{out_row(g / kPer / 2, g / kPer % 2), first + g % kPer * 32, cols - g % kPer * 32};
        });
    return;
  }
  float2 bias[N];
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const int col = 8 * n + 2 * (lane & 3);
    const float* from = static_cast<const float*>(args.bias) + first + col;
    bias[n].x = args.bias && col < cols ? __ldg(from) : 0.0f;
    bias[n].y = args.bias && col + 1 < cols ? __ldg(from + 1) : 0.0f;
  }
#pragma unroll
  for (int i = 0; i < M; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = out_row(i, half);
      const int64_t at = (part * plan.n_out + row) * args.ldo + first;
      const auto get = [&](int n) {
        const float2 v = acc[i][n].row(half);
        return make_float2(v.x + bias[n].x, v.y + bias[n].y);
      };
      if (args.out_dtype == DType::f32)
        store_row<float, N>(row < 0 ? nullptr : static_cast<float*>(args.out) + at, cols, vec, get);
      else
        store_row<T, N>(row < 0 ? nullptr : static_cast<T*>(args.out) + at, cols, vec, get);
    }
  }
}

}  // namespace voxmma
