// Weights that are not finite. A row without a neighbour reads a row of zeros, and zero times infinity is NaN: so the
// weight image holds a small number in their place, and kernels add what they give to rows that meet them afterwards.
#pragma once

#include "common.cuh"

namespace voxmma {

// Infinite or NaN; fp32 also what rounds to infinity in tf32.
template <class T>
__device__ __forceinline__ bool is_nonfinite(T v) {
  using F = FloatBits<T>;
  using U = typename F::U;
  constexpr U kMagnitude = static_cast<U>(~U{0}) >> 1, kExponent = kMagnitude >> F::kFraction << F::kFraction;
  constexpr U kTf32Tie = std::is_same_v<T, float> ? 0x1000 : 0;
  return static_cast<U>((reinterpret_cast<const U&>(v) & kMagnitude) + kTf32Tie) >= kExponent;
}

// What the image holds instead: the smallest normal number, with the weight's sign. It leaves an infinite input
// infinite, of the sign that it has times the weight.
template <class T>
__device__ __forceinline__ T stand_in(T v) {
  using F = FloatBits<T>;
  using U = typename F::U;
  constexpr U kSign = static_cast<U>(U{1} << (8 * sizeof(U) - 1)), kSmallest = static_cast<U>(U{1} << F::kFraction);
  const U bits = static_cast<U>((reinterpret_cast<const U&>(v) & kSign) | kSmallest);
  return reinterpret_cast<const T&>(bits);
}

// Which element of the caller's tensor a weight is.
__device__ __forceinline__ int64_t weight_at(const Weights& of, int k, int g, int ci, int co) {
  return of.first + k * of.offset + g * of.group + ci * of.in + co * of.out;
}

// This lane's share of the flags: loaded ahead, to be voted on later.
__device__ __forceinline__ uint32_t load_flags(const RawWeights& raw) {
  uint32_t any = 0;
  for (int i = threadIdx.x % 32; i < raw.flag_bytes / 16; i += 32) {
    const uint4 v = __ldg(reinterpret_cast<const uint4*>(raw.flags) + i);
    any |= v.x | v.y | v.z | v.w;
  }
  return any;
}

// Whether any weight is not finite, by the flags of all 32 lanes.
__device__ __forceinline__ bool any_nonfinite(uint32_t flags) { return __any_sync(~0u, flags != 0); }

// Rows row0 ... of a fragment, lane l that of row l % 16: f(offset, its input row or -1, rows that have one as bits) for
// every offset under which one has. All 32 lanes call.
template <class F>
__device__ __forceinline__ void for_neighbours(const PlanView& plan, const ScheduledTile& at, int row0, int out_row,
                                               F f) {
  const int lane = threadIdx.x % 32;
  for (int p = at.first_pass; p < at.first_pass + at.passes; ++p) {
    const Pass pass = load_pass(plan, p);
    for (int k = pass.k_begin; k < pass.k_begin + pass.k_count; ++k) {
      const int index = __ldg(plan.local + (static_cast<int64_t>(at.tile) * plan.kernel_volume + k) * kTileM + row0 +
                              lane % kFragRows);
      const bool has = index != kMissing && out_row >= 0;
      const int in_row = has ? __ldg(plan.uniq + static_cast<int64_t>(pass.uniq_begin4) * 4 + index) : -1;
      const uint32_t rows = __ballot_sync(~0u, has) & 0xffff;
      if (rows != 0) f(k, in_row, rows);
    }
  }
}

// The factor that a weight of type T is, and whether it is missing in the image.
template <DType In, bool Split>
struct RawWeight {
  float factor = 0;
  bool bad = false;
  __device__ __forceinline__ RawWeight(const ConvArgs& args, int k, int group, int ci, int co) {
    if (co >= args.c_out) return;
    const Weights& of = args.raw.of;
    const auto w = load_as<type_of<In>>(of.data, of.dtype, weight_at(of, k, group, ci, co));
    bad = is_nonfinite(w);
    factor = convert<float>(w);
    if (In == DType::f32 && !Split && bad && factor == factor) factor = copysignf(INFINITY, factor);  // as tf32
  }
};

template <DType In, bool Split, class Out>
__device__ __forceinline__ void add_nonfinite_to(Out* out, const ConvArgs& args, const ScheduledTile& at, int row0,
                                                 int group, int col0, int cols) {
  const int lane = threadIdx.x % 32, end = min(args.c_out, col0 + cols);
  const auto* x = static_cast<const type_of<In>*>(args.a) + group * args.a_group;
  out += static_cast<int64_t>(group) * args.c_out;
  const int out_row = __ldg(args.plan.order + static_cast<int64_t>(at.tile) * kTileM + row0 + lane % kFragRows);
  for_neighbours(args.plan, at, row0, out_row, [&](int k, int in_row, uint32_t rows) {
    for (int co = col0 + lane; co - lane < end; co += 32) {
      for (int ci = 0; ci < args.c_in; ++ci) {
        const RawWeight<In, Split> w(args, k, group, ci, co);
        if (!__any_sync(~0u, w.bad)) continue;
        for (uint32_t rest = rows; rest != 0; rest &= rest - 1) {
          const int from = __ffs(rest) - 1;
          const int64_t i = __shfl_sync(~0u, in_row, from), o = __shfl_sync(~0u, out_row, from);
          if (!w.bad) continue;
          Out* y = out + o * args.ldo + co;
          *y = convert<Out>(convert<float>(*y) + convert<float>(x[i * args.lda + ci]) * w.factor);
        }
      }
    }
  });
}

// Behind an epilogue nothing can be added to a sum: outputs that such a weight reaches are made again, summed in fp32.
// store(row, channel over all groups, sum): finishes one.
template <DType In, bool Split, class Store>
__device__ __forceinline__ void redo_nonfinite(const ConvArgs& args, const ScheduledTile& at, int row0, int group,
                                               int col0, int cols, Store store) {
  const int lane = threadIdx.x % 32, end = min(args.c_out, col0 + cols);
  const auto* x = static_cast<const type_of<In>*>(args.a) + group * args.a_group;
  const int out_row = __ldg(args.plan.order + static_cast<int64_t>(at.tile) * kTileM + row0 + lane % kFragRows);
  for (int co = col0 + lane; co - lane < end; co += 32) {
    uint32_t reached = 0;  // rows of the lane's column
    for_neighbours(args.plan, at, row0, out_row, [&](int k, int, uint32_t rows) {
      for (int ci = 0; ci < args.c_in; ++ci) {
        if (RawWeight<In, Split>(args, k, group, ci, co).bad) reached |= rows;
      }
    });
    for (uint32_t rest = __reduce_or_sync(~0u, reached); rest != 0; rest &= rest - 1) {
      const int from = __ffs(rest) - 1;
      float sum[1] = {0};
      for_neighbours(args.plan, at, row0, out_row, [&](int k, int in_row, uint32_t rows) {
        const int64_t i = __shfl_sync(~0u, in_row, from);
        if (i < 0) return;
        for (int ci = 0; ci < args.c_in; ++ci)
          sum[0] =
              fmaf(convert<float>(x[i * args.lda + ci]), RawWeight<In, Split>(args, k, group, ci, co).factor, sum[0]);
      });
      const int o = __shfl_sync(~0u, out_row, from);
      if (reached >> from & 1) store(o, static_cast<int64_t>(group) * args.c_out + co, sum);
    }
  }
}

// Adds x * w of every weight w that is not finite to the fragment of tile rows row0 ..., columns col0 ... (`cols` of
// them) of a group. By the warp that stored them, all 32 lanes. Slow, and never needed by healthy networks.
// Split: 3xTF32, where finite weights beyond tf32 keep their values. Fused: whether the kernel has epilogues.
template <DType In, bool Split = false, bool Fused = true>
__device__ __forceinline__ void add_nonfinite(const ConvArgs& args, const ScheduledTile& at, int row0, int group,
                                              int col0, int cols) {
  __syncwarp();  // what is added to was stored by other lanes
  if (Fused && has_epilogue(args))
    redo_nonfinite<In, Split>(args, at, row0, group, col0, cols, [&](int64_t row, int64_t channel, float (&sum)[1]) {
      finish<type_of<In>>(args, row, channel, sum, 1, true);
    });
  else if (args.out_dtype == DType::f32)
    add_nonfinite_to<In, Split>(static_cast<float*>(args.out), args, at, row0, group, col0, cols);
  else
    add_nonfinite_to<In, Split>(static_cast<type_of<In>*>(args.out), args, at, row0, group, col0, cols);
}

// Sums of pairs for those elements i of dW that lanes of a warp want, each in the order of the schedule and of the rows.
template <class X>
__device__ float sum_pairs(const ConvArgs& args, int64_t i, bool wanted, float sum) {
  const PlanView& plan = args.plan;
  const int lane = threadIdx.x % 32;
  const int co = static_cast<int>(i % args.c_out), ci = static_cast<int>(i / args.c_out % args.c_in);
  const int group = static_cast<int>(i / args.c_out / args.c_in % args.groups);
  const int offset = static_cast<int>(i / args.c_out / args.c_in / args.groups);
  const X* x = static_cast<const X*>(args.a) + group * args.a_group + ci;
  const X* dy = static_cast<const X*>(args.b) + group * args.b_group + co;
  for (uint32_t todo = __ballot_sync(~0u, wanted); todo != 0;) {  // one offset at a time
    const int k = __shfl_sync(~0u, offset, __ffs(todo) - 1);
    const bool mine = wanted && offset == k;
    todo &= ~__ballot_sync(~0u, mine);
    if (mine) sum = 0;
    for (int t = 0; t < plan.tiles; ++t) {
      const ScheduledTile at = load_scheduled(plan.schedule, t);
      Pass pass = load_pass(plan, at.first_pass);
      for (int p = at.first_pass + 1; k >= pass.k_begin + pass.k_count; ++p) pass = load_pass(plan, p);
      if (pass.uniq_count == 0) continue;
      for (int first = 0; first < kTileM; first += 32) {
        const int index =
            __ldg(plan.local + (static_cast<int64_t>(at.tile) * plan.kernel_volume + k) * kTileM + first + lane);
        const bool has = index != kMissing;
        const int in_row = has ? __ldg(plan.uniq + static_cast<int64_t>(pass.uniq_begin4) * 4 + index) : 0;
        const int out_row = has ? __ldg(plan.order + static_cast<int64_t>(at.tile) * kTileM + first + lane) : 0;
        for (uint32_t rest = __ballot_sync(~0u, has); rest != 0;) {
          constexpr int kFlight = 8;  // pairs on their way; behind the last one zeros
          float a[kFlight], b[kFlight];
#pragma unroll
          for (int u = 0; u < kFlight; ++u, rest &= rest - 1) {
            const int from = max(__ffs(rest) - 1, 0);
            const int64_t in = __shfl_sync(~0u, in_row, from), o = __shfl_sync(~0u, out_row, from);
            const bool load = mine && rest != 0;
            a[u] = load ? convert<float>(x[in * args.lda]) : 0.0f;
            b[u] = load ? convert<float>(dy[o * args.ldb]) : 0.0f;
          }
#pragma unroll
          for (int u = 0; u < kFlight; ++u) sum = mine ? fmaf(a[u], b[u], sum) : sum;
        }
      }
    }
  }
  return sum;
}

}  // namespace voxmma
