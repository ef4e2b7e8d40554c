// How sums leave an fprop kernel of Hopper: those of a cluster, and bias and epilogue of a warpgroup's block.
#pragma once

#include "fprop_sm90_config.cuh"

namespace voxmma::sm90 {

// The fp32 sums of an item lie in the shared memory of the cluster's CTAs. Adds those of this CTA's fragments of rows in
// the order of the ranks, then bias and epilogue, rounds once and scatters the rows to the caller's order. Consumer
// threads only.
//   g, col0  group and first column of the item inside it
template <class C>
__device__ void store_shared_item(const ConvArgs& args, bool wide, uint32_t sums, int tile, int g, int col0, int rank,
                                  int parts) {
  constexpr int kQuads = C::BN / 4;  // columns four at a time
  const int left = args.c_out - col0;
  const int first = kFrags * rank / parts * kFragRows, end = kFrags * (rank + 1) / parts * kFragRows;
  for (int i = threadIdx.x; i < (end - first) * kQuads; i += C::kConsumers * kWarpGroup) {
    const int row = first + i / kQuads, col = i % kQuads * 4;
    const int out_row = __ldg(args.plan.order + int64_t(tile) * kTileM + row);
    if (out_row < 0 || col >= left) continue;
    float4 part[kMaxParts];
#pragma unroll
    for (int p = 0; p < kMaxParts; ++p) {
      if (p < parts) part[p] = lds_cluster(sums + (row * C::kSumPitch + col) * 4, p);
    }
    float v[4] = {part[0].x, part[0].y, part[0].z, part[0].w};
#pragma unroll
    for (int p = 1; p < kMaxParts; ++p) {
      if (p < parts) v[0] += part[p].x, v[1] += part[p].y, v[2] += part[p].z, v[3] += part[p].w;
    }
    finish<cuda_type<typename C::T>>(args, out_row, int64_t(g) * args.c_out + col0 + col, v, left - col, wide);
  }
}

// Two columns of a row that has `left` of them, zeros behind it.
template <class T>
__device__ __forceinline__ float2 load_pair(const T* row, int col, int left) {
  return make_float2(col < left ? convert<float>(row[col]) : 0.f, col + 1 < left ? convert<float>(row[col + 1]) : 0.f);
}
// The same where pairs are aligned and whole, some pair behind the row: no branch, so that many loads are on their way.
__device__ __forceinline__ float2 load_whole_pair(const float* row, int col, int left) {
  return __ldg(reinterpret_cast<const float2*>(row + min(col, left - 2)));
}

// Bias and epilogue of the block of a warpgroup, in its registers: they leave no room for the other way, finish_as.
//   channel, left  first one over all groups, and how many exist from there
template <class C>
__device__ __forceinline__ void finish_block(const ConvArgs& args, Accumulator<float, C::BN>& acc,
                                             const int (&out_row)[2], int64_t channel, int left, bool wide, int quad) {
  using T = cuda_type<typename C::T>;
  constexpr int kBlocks = C::BN / 8;
  const Epilogue& e = args.epilogue;
  const float* scale = static_cast<const float*>(e.scale) + channel;
  const float* bias = static_cast<const float*>(args.bias) + channel;
  const auto each_block = [&](auto f) {
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) f(j, 8 * j + 2 * quad);
  };
  const auto add = [&](int j, int half, float2 v) {
    acc.r[4 * j + 2 * half] += v.x;
    acc.r[4 * j + 2 * half + 1] += v.y;
  };
  const auto scale_and_add = [&](auto load) {
    if (e.scale != nullptr) {  // then there is a bias, too
      each_block([&](int j, int col) {
        const float2 by = load(scale, col, left), plus = load(bias, col, left);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          acc.r[4 * j + 2 * half] = fmaf(acc.r[4 * j + 2 * half], by.x, plus.x);
          acc.r[4 * j + 2 * half + 1] = fmaf(acc.r[4 * j + 2 * half + 1], by.y, plus.y);
        }
      });
    } else if (args.bias != nullptr) {
      each_block([&](int j, int col) {
        const float2 plus = load(bias, col, left);
        add(j, 0, plus);
        add(j, 1, plus);
      });
    }
  };
  if (wide)
    scale_and_add([](const float* row, int col, int n) { return load_whole_pair(row, col, n); });
  else
    scale_and_add([](const float* row, int col, int n) { return load_pair(row, col, n); });
  if (e.residual != nullptr) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t at = max(out_row[half], 0) * e.ldr + channel;  // a row that is not stored may be any
      const T* row = static_cast<const T*>(e.residual) + at;
      const float* row32 = static_cast<const float*>(e.residual) + at;
      if (args.out_dtype == DType::f32 && wide) {
        each_block([&](int j, int col) { add(j, half, load_whole_pair(row32, col, left)); });
      } else if (args.out_dtype == DType::f32) {
        each_block([&](int j, int col) { add(j, half, load_pair(row32, col, left)); });
      } else if (wide) {
#pragma unroll
        for (int q = 0; q < kBlocks / 4; ++q) {
          const uint4 v = __ldg(reinterpret_cast<const uint4*>(row + min((4 * q + quad) * 8, left - 8)));
          uint32_t p[4] = {v.x, v.y, v.z, v.w};
          quad_transpose(p, quad);  // now columns 2 quad and the next one of blocks 4 q ...
#pragma unroll
          for (int i = 0; i < 4; ++i) add(4 * q + i, half, unpack2<T>(p[i]));
        }
      } else {
        each_block([&](int j, int col) { add(j, half, load_pair(row, col, left)); });
      }
    }
  }
  activate(acc.r, e.activation, e.slope);
}

}  // namespace voxmma::sm90
