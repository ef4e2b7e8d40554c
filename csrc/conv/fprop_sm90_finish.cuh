// How sums leave an fprop kernel of Hopper: those of a cluster, and bias and epilogue of a warpgroup's block.
#pragma once

#include "fprop_sm90_config.cuh"

namespace voxmma::sm90 {

// The sums of an item over a cluster. When the mainloops are over, every CTA stores its own where they are added: rank
// r gets those of fragments kFrags r / parts ..., into shared memory in which nobody reads operands any more, as they
// lie in registers: [rank that they are of][fragment][BN / 8][lane] float4. Nothing is read from another CTA.
template <class C>
struct ClusterSums {
  static constexpr int kBlocks = C::BN / 8, kUnit = 32 * 16;  // bytes of a fragment's eight columns
  static constexpr int kStep = C::kConsumers * 4 / kBlocks;   // fragments that are added at once
  static_assert(kStep > 0);
  // Whether there is room for the sums of so many parts, of which one adds up to ceil(kFrags / parts) fragments.
  static constexpr bool fit(int parts) {
    return parts * ((kFrags + parts - 1) / parts) * kBlocks * kUnit <= C::kFragAt;
  }

  uint32_t smem;  // address in every CTA
  int warp, lane, rank, parts;
  const int* order;          // rows of this CTA's fragments in the caller's order, below 0: none
  int count, frag, row_now;  // fragments of this CTA, this warp's first one, and this lane's row there

  // order_: rows of the tile
  __device__ ClusterSums(uint32_t smem_, int warp_, int lane_, int rank_, int parts_, const int* order_)
      : smem(smem_), warp(warp_), lane(lane_), rank(rank_), parts(parts_), order(order_ + first(rank_) * kFragRows) {
    asm volatile("" : "+r"(lane), "+r"(warp));  // addresses are computed from here on, not ahead of the mainloop
    count = first(rank + 1) - first(rank);
    frag = warp < kStep * kBlocks ? warp / kBlocks : count;
    row_now = row_of(frag);
  }
  __device__ int row_of(int of) const {  // of two rows of a lane, that which it adds
    return of < count ? __ldg(order + of * kFragRows + lane / 4 + lane % 2 * 8) : -1;
  }
  __device__ int first(int of) const { return kFrags * of / parts; }
  // First of the four columns of a block that this thread adds.
  __device__ int column() const { return warp % kBlocks * 8 + lane % 4 / 2 * 4; }

  // Consumers, when the whole cluster is behind its mainloops.
  __device__ void store(const Accumulator<typename C::Acc, C::BN>& acc) const {
    const int owner = ((warp + 1) * parts - 1) / kFrags, from = first(owner);
    const uint32_t at = smem + (rank * (first(owner + 1) - from) + warp - from) * (kBlocks * kUnit) + lane * 16;
    uint32_t there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;\n" : "=r"(there) : "r"(at), "r"(owner));
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
      const float2 a = acc.pair(j, 0), b = acc.pair(j, 1);
      asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};\n" ::"r"(there + j * kUnit), "f"(a.x), "f"(a.y),
                   "f"(b.x), "f"(b.y)
                   : "memory");
    }
  }
  // They can be read behind the cluster_wait that follows.
  __device__ void publish() const {
    asm volatile("bar.sync 1, %0;\n" ::"n"(C::kConsumers * kWarpGroup) : "memory");
    if (threadIdx.x == 0) asm volatile("fence.acq_rel.cluster;\n" ::: "memory");
    cluster_arrive();
  }

  // Adds them in the order of the ranks, when all are there: f(row, sums of four columns).
  template <class F>
  __device__ void each_row(F f) {
    const bool odd = lane & 1;  // two lanes have columns 2 q, 2 q + 1 of two rows, and swap
#pragma unroll 1
    for (; frag < count; frag += kStep) {
      const int row = row_now;
      row_now = row_of(frag + kStep);
      uint32_t at = smem + (frag * kBlocks + warp % kBlocks) * kUnit + lane * 16;
      const uint4 of0 = lds_v4(at);
      float sum[4] = {__uint_as_float(of0.x), __uint_as_float(of0.y), __uint_as_float(of0.z), __uint_as_float(of0.w)};
#pragma unroll 1
      for (int p = 1; p < parts; ++p) {
        const uint4 v = lds_v4(at += count * kBlocks * kUnit);
        sum[0] += __uint_as_float(v.x), sum[1] += __uint_as_float(v.y);
        sum[2] += __uint_as_float(v.z), sum[3] += __uint_as_float(v.w);
      }
      const float x = __shfl_xor_sync(~0u, odd ? sum[0] : sum[2], 1);
      const float y = __shfl_xor_sync(~0u, odd ? sum[1] : sum[3], 1);
      float v[4] = {odd ? x : sum[0], odd ? y : sum[1], odd ? sum[2] : x, odd ? sum[3] : y};
      if (row >= 0) f(row, v);
    }
  }
};

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
