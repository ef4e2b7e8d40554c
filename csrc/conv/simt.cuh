// Convolution without tensor cores over the same tile plan: fp32 ('ieee' accuracy) and fp64 inputs, and any input type
// whose groups are too narrow for an MMA (depthwise). Any channel count and alignment; sums in a fixed order.
//
//   fprop  wide groups: a CTA computes kRows tile rows x 64 output channels, 16 channels of one offset a step
//          narrow groups: a thread computes 4 rows x 4 output channels of whatever groups they belong to
//   wgrad  a CTA owns one offset and one block of dW over a range of tiles, and lists each tile's pairs first
// The weight image has n = k = 1, that is [groups][c_out][K][c_in] without padding.
#pragma once

#include "common.cuh"
#include "nonfinite.cuh"

namespace voxmma {

template <DType In_>
struct Simt {
  static constexpr DType In = In_;
  static constexpr DType Acc = In == DType::f64 ? DType::f64 : DType::f32;
  using T = type_of<In>;
  using A = type_of<Acc>;
  static constexpr int kThreads = 256;
  static constexpr int kRows = In == DType::f64 ? 64 : 128;  // fprop, wide: tile rows of a CTA
  static constexpr int kCols = 64;                           // channels of a CTA
  static constexpr int kDepth = 16;                          // channels (fprop) or pairs (wgrad) a step
  static constexpr int kNarrowRows = 64;                     // fprop, narrow: tile rows of a CTA
  // Narrow groups: products per row and group too few to fill a block of 64 channels.
  static bool narrow(const ConvArgs& args) { return args.groups > 1 && args.c_in * args.c_out <= 64; }
};

// Four channels of one output row: epilogue, one rounding, store. `channel` counts over all groups. first_row: of `out`.
template <DType In, class A>
__device__ __forceinline__ void store_outputs(const ConvArgs& args, int64_t first_row, int tile_row, int64_t channel,
                                              A (&v)[4], int valid, bool vec) {
  const int row = __ldg(args.plan.order + tile_row);
  if (row < 0 || valid <= 0) return;
  finish<type_of<In>>(args, first_row + row, channel, v, valid, vec);
}

// Resolves the local indices of a pass for Rows tile rows: s_row[j][r] = row of x under offset k_begin + j, or -1.
template <int Rows>
__device__ __forceinline__ void resolve_rows(const PlanView& plan, int tile, const Pass& pass, int first,
                                             int (*s_row)[Rows]) {
  const uint16_t* local = plan.local + (static_cast<int64_t>(tile) * plan.kernel_volume + pass.k_begin) * kTileM +
                          first;  // [k_count][kTileM]
  const int* uniq = plan.uniq + static_cast<int64_t>(pass.uniq_begin4) * 4;
  for (int i = threadIdx.x; i < pass.k_count * Rows; i += blockDim.x) {
    const int index = __ldg(local + i / Rows * kTileM + i % Rows);
    s_row[i / Rows][i % Rows] = index == kMissing ? -1 : __ldg(uniq + index);
  }
}

// ---- fprop, wide groups ----------------------------------------------------------------------------------------------
template <class C>
__global__ void __launch_bounds__(C::kThreads, 2)
    simt_fprop_kernel(const ConvArgs args, const int n_blocks, const bool vec_in, const bool vec_out,
                      const Parts parts) {
  using T = typename C::T;
  using A = typename C::A;
  constexpr int kRows = C::kRows, kCols = C::kCols, kDepth = C::kDepth;
  constexpr int TM = kRows / 16;                       // thread: TM rows x 4 channels
  constexpr int kEach = kRows * kDepth / C::kThreads;  // channels of one row that a thread loads
  constexpr int kParts = kDepth / kEach, kSub = kTileM / kRows, kSubFrags = kFrags / kSub;
  __shared__ int s_row[kPassOffsets][kRows];
  __shared__ __align__(16) A s_x[2][kDepth][kRows];  // [buffer][channel][row]
  __shared__ __align__(16) A s_w[2][kDepth][kCols];  // [buffer][channel][output channel]

  const PlanView& plan = args.plan;
  const int tid = threadIdx.x, lane = tid % 32;
  const int part = static_cast<int>(blockIdx.x % parts.count());
  const unsigned item = blockIdx.x / parts.count();
  const int nb = static_cast<int>(item % n_blocks);
  const int group = static_cast<int>(item / n_blocks % args.groups);
  const ScheduledTile scheduled = load_scheduled(plan.schedule, item / n_blocks / args.groups / kSub);
  const int tile = scheduled.tile;
  const int sub = static_cast<int>(item / n_blocks / args.groups % kSub);
  const int ty = tid / 16, tx = tid % 16;  // rows ty * TM ..., channels tx * 4 ...
  const T* x = static_cast<const T*>(args.a) + group * args.a_group;
  const int co_load = nb * kCols + tid / 4;  // the output channel whose weights this thread loads
  const T* w =
      static_cast<const T*>(args.b) +  // [K][c_in] of that channel
      (static_cast<int64_t>(group) * args.c_out + min(co_load, args.c_out - 1)) * plan.kernel_volume * args.c_in;
  const int chunks = (args.c_in + kDepth - 1) / kDepth;
  const int chunk_begin = parts.chunk(part, chunks), chunk_end = parts.chunk_end(part, chunks);
  const uint32_t flags = load_flags(args.raw);

  A acc[TM][4] = {};
  for (int p = scheduled.first_pass; p < scheduled.first_pass + scheduled.passes; ++p) {
    const uint32_t* frag = plan.frag + static_cast<int64_t>(p) * kFrags + sub * kSubFrags;
    const Pass pass = load_pass(plan, p);
    const uint32_t mask =
        __reduce_or_sync(~0u, __ldg(frag + lane % kSubFrags)) & parts.offsets_of(part, plan.kernel_volume, pass);
    if (!mask) continue;
    const uint32_t mine = __ldg(frag + ty * TM / kFragRows);  // the fragment this warp's rows lie in
    __syncthreads();                                          // the previous pass has read s_row and its last buffers
    resolve_rows<kRows>(plan, tile, pass, sub * kRows, s_row);
    __syncthreads();
    const bool nonfinite = any_nonfinite(flags);  // then zeros in place of a neighbour would make NaN

    A next_x[kEach], next_w[4];
    const auto fetch = [&](int j, int chunk) {
      const int row = s_row[j][tid / kParts], ci = chunk * kDepth + tid % kParts * kEach;
      load_elements(next_x, x + (row < 0 ? 0 : row) * args.lda + ci, row < 0 ? 0 : args.c_in - ci, vec_in);
      const int cw = chunk * kDepth + tid % 4 * 4;
      load_elements(next_w, w + static_cast<int64_t>(pass.k_begin + j) * args.c_in + cw,
                    co_load < args.c_out ? args.c_in - cw : 0, args.c_in % 4 == 0);
    };
    int buffer = 0, chunk = chunk_begin;
    fetch(__ffs(mask) - 1, chunk);
    for (uint32_t bits = mask; bits;) {
      const int j = __ffs(bits) - 1;
      const bool active = mine >> j & 1;
#pragma unroll
      for (int e = 0; e < kEach; ++e) s_x[buffer][tid % kParts * kEach + e][tid / kParts] = next_x[e];
#pragma unroll
      for (int e = 0; e < 4; ++e) s_w[buffer][tid % 4 * 4 + e][tid / 4] = next_w[e];
      __syncthreads();  // one barrier a step: the other buffer was read before everybody's last one
      if (++chunk == chunk_end) {
        chunk = chunk_begin;
        bits &= bits - 1;
      }
      if (bits) fetch(__ffs(bits) - 1, chunk);
      const auto multiply = [&](auto skip) {  // skip: rows without a neighbour, not only warps without one
        constexpr int kUnroll = skip ? 1 : kDepth;
#pragma unroll kUnroll
        for (int d = 0; d < kDepth; ++d) {
          A a[TM], b[4];
          load_elements(a, &s_x[buffer][d][ty * TM], TM, true);
          load_elements(b, &s_w[buffer][d][tx * 4], 4, true);
#pragma unroll
          for (int i = 0; i < TM; ++i) {
            if (skip && s_row[j][ty * TM + i] < 0) continue;
#pragma unroll
            for (int n = 0; n < 4; ++n) acc[i][n] = fma(a[i], b[n], acc[i][n]);
          }
        }
      };
      if (active && nonfinite)
        multiply(std::true_type());
      else if (active)
        multiply(std::false_type());
      buffer ^= 1;
    }
  }

  const int co = nb * kCols + tx * 4;
#pragma unroll
  for (int i = 0; i < TM; ++i)
    store_outputs<C::In>(args, part * plan.n_out, tile * kTileM + sub * kRows + ty * TM + i,
                         static_cast<int64_t>(group) * args.c_out + co, acc[i], args.c_out - co, vec_out);
}

// ---- fprop, narrow groups --------------------------------------------------------------------------------------------
template <class C>
__global__ void __launch_bounds__(C::kThreads)
    simt_narrow_fprop_kernel(const ConvArgs args, const int n_blocks, const bool vec_in, const bool vec_out) {
  using T = typename C::T;
  using A = typename C::A;
  constexpr int kRows = C::kNarrowRows, kCols = C::kCols, kSub = kTileM / kRows, kSubFrags = kFrags / kSub;
  __shared__ int s_row[kPassOffsets][kRows];
  __shared__ __align__(16) A s_w[kPassOffsets][kCols];  // weights of one input channel of each group

  const PlanView& plan = args.plan;
  const int tid = threadIdx.x, lane = tid % 32;
  const int nb = static_cast<int>(blockIdx.x % n_blocks);
  const ScheduledTile scheduled = load_scheduled(plan.schedule, blockIdx.x / n_blocks / kSub);
  const int tile = scheduled.tile, sub = static_cast<int>(blockIdx.x / n_blocks % kSub);
  const int channels = args.groups * args.c_out;            // output channels of all groups
  const int c0 = nb * kCols + tid % 16 * 4, r0 = tid / 16;  // thread: channels c0 .. c0 + 3, rows r0 + 16 i
  const T* x = static_cast<const T*>(args.a);
  const T* w = static_cast<const T*>(args.b);                                                   // [channels][K][c_in]
  const bool depthwise = vec_in && args.c_out == 1 && args.a_group == 1 && c0 + 4 <= channels;  // 4 channels, one load

  A acc[4][4] = {};  // [row][channel]
  for (int p = scheduled.first_pass; p < scheduled.first_pass + scheduled.passes; ++p) {
    const uint32_t mask =
        __reduce_or_sync(~0u, __ldg(plan.frag + static_cast<int64_t>(p) * kFrags + sub * kSubFrags + lane % kSubFrags));
    if (!mask) continue;
    const Pass pass = load_pass(plan, p);
    for (int ci = 0; ci < args.c_in; ++ci) {
      __syncthreads();  // s_row and s_w have been read
      if (ci == 0) resolve_rows<kRows>(plan, tile, pass, sub * kRows, s_row);
      for (int i = tid; i < pass.k_count * kCols; i += C::kThreads) {
        const int co = nb * kCols + i / pass.k_count, j = i % pass.k_count;
        s_w[j][i / pass.k_count] =
            co < channels
                ? convert<A>(w[(static_cast<int64_t>(co) * plan.kernel_volume + pass.k_begin + j) * args.c_in + ci])
                : A(0);
      }
      __syncthreads();
      for (uint32_t bits = mask; bits; bits &= bits - 1) {
        const int j = __ffs(bits) - 1;
        A b[4];
        load_elements(b, &s_w[j][tid % 16 * 4], 4, true);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int row = s_row[j][r0 + 16 * i];
          if (row < 0) continue;
          A a[4];
          if (depthwise) {
            load_elements(a, x + row * args.lda + c0, 4, true);
          } else {
#pragma unroll
            for (int n = 0; n < 4; ++n)
              a[n] =
                  c0 + n < channels ? convert<A>(x[row * args.lda + (c0 + n) / args.c_out * args.a_group + ci]) : A(0);
          }
#pragma unroll
          for (int n = 0; n < 4; ++n) acc[i][n] = fma(a[n], b[n], acc[i][n]);
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i)
    store_outputs<C::In>(args, 0, tile * kTileM + sub * kRows + r0 + 16 * i, c0, acc[i], channels - c0, vec_out);
}

template <class C>
Parts simt_fprop_parts(const ConvArgs& args) {
  if (C::narrow(args)) return {};
  const int64_t items = args.plan.tiles * (kTileM / C::kRows) * args.groups * ceil_div(args.c_out, C::kCols);
  return share_items(args, items, static_cast<int>(ceil_div(args.c_in, C::kDepth)), 2, dtype_bytes(C::Acc),
                     args.plan.kernel_volume);
}

template <class C>
cudaError_t launch_simt_fprop(const ConvArgs& given, cudaStream_t stream) {
  // Vector accesses take at most 16 bytes; rows and groups must start at multiples of 16 bytes.
  const Parts parts = simt_fprop_parts<C>(given);
  const ConvArgs args = parts_args(given, parts, C::Acc);
  const int in_bytes = dtype_bytes(C::In);
  const int64_t tiles = args.plan.tiles;
  if (C::narrow(args)) {
    const int n_blocks = static_cast<int>(ceil_div(static_cast<int64_t>(args.groups) * args.c_out, C::kCols));
    return launch_kernel(simt_narrow_fprop_kernel<C>, tiles * (kTileM / C::kNarrowRows) * n_blocks, C::kThreads, 0,
                         stream, args, n_blocks, rows_aligned16(args.a, args.lda, 0, in_bytes),
                         outputs_aligned16(args, 0));
  }
  const int n_blocks = static_cast<int>(ceil_div(args.c_out, C::kCols));
  const cudaError_t status =
      launch_kernel(simt_fprop_kernel<C>, tiles * (kTileM / C::kRows) * args.groups * n_blocks * parts.count(),
                    C::kThreads, 0, stream, args, n_blocks, rows_aligned16(args.a, args.lda, args.a_group, in_bytes),
                    outputs_aligned16(args, args.c_out), parts);
  return status != cudaSuccess ? status : reduce_parts(given, parts, C::Acc, stream);
}

// ---- wgrad -------------------------------------------------------------------------------------------------------------
// A block of dW[k][group]: 64 x 64 of (c_in, c_out), 4 x 4 a thread. Narrow: 64 of the (groups * c_in * c_out) sums of
// offset k, one a thread, each quarter of the threads adding every fourth pair.
template <class C, bool Narrow>
__global__ void __launch_bounds__(C::kThreads, 2)
    simt_wgrad_kernel(const ConvArgs args, const int ci_blocks, const int co_blocks, const int splits) {
  using T = typename C::T;
  using A = typename C::A;
  constexpr int kCols = C::kCols, kDepth = C::kDepth, kWarps = C::kThreads / 32;
  static_assert(C::kThreads == kTileM, "a thread lists one tile row");
  __shared__ int s_pair_x[kTileM], s_pair_y[kTileM], s_count[kWarps];
  __shared__ __align__(16) A s_x[kDepth][kCols], s_y[kDepth][kCols];  // [pair][channel]; narrow: s_x[0..3] hold sums

  const PlanView& plan = args.plan;
  const int volume = plan.kernel_volume, tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
  const int groups = Narrow ? 1 : args.groups;  // narrow: ci_blocks counts blocks over all groups, co_blocks = 1
  unsigned rest = blockIdx.x;                   // blocks that read the same tiles run next to each other
  const int cb = static_cast<int>(rest % co_blocks) * kCols;
  rest /= co_blocks;
  const int rb = static_cast<int>(rest % ci_blocks) * kCols;
  rest /= ci_blocks;
  const int group = static_cast<int>(rest % groups);
  rest /= groups;
  const int k = static_cast<int>(rest % volume);
  const int split = static_cast<int>(rest / volume);

  const T* x = static_cast<const T*>(args.a) + group * args.a_group;
  const T* dy = static_cast<const T*>(args.b) + group * args.b_group;
  const int sum = rb + tid % kCols, products = args.c_in * args.c_out;  // narrow: the sum of this thread
  if constexpr (Narrow) {
    x += sum / products * args.a_group + sum % products / args.c_out;
    dy += sum / products * args.b_group + sum % args.c_out;
  }
  const bool has_sum = sum < args.groups * products;

  A acc[4][4] = {};  // narrow: acc[0][0]
  for (uint32_t round = 0, position; (position = dealt(round, split, splits)) < static_cast<uint32_t>(plan.tiles);
       ++round) {
    const ScheduledTile scheduled = load_scheduled(plan.schedule, position);
    const int tile = scheduled.tile;
    // The pass that owns offset k; every warp looks for it.
    Pass pass = {0, 0, 0, 0};
    int j = -1;
    for (int first = 0; first < scheduled.passes && j < 0; first += 32) {
      Pass mine = {0, 0, 0, 0};
      if (first + lane < scheduled.passes) mine = load_pass(plan, scheduled.first_pass + first + lane);
      const uint32_t hit = __ballot_sync(~0u, mine.k_begin <= k && k < mine.k_begin + mine.k_count);
      if (!hit) continue;
      const int from = __ffs(hit) - 1;
      pass = load_pass(plan, scheduled.first_pass + first + from);
      j = k - pass.k_begin;
    }
    if (j < 0 || pass.uniq_count == 0) continue;  // the same decision in every thread

    // List the pairs in row order.
    const int index = __ldg(plan.local + (static_cast<int64_t>(tile) * volume + k) * kTileM + tid);
    const bool has = index != kMissing;
    const uint32_t votes = __ballot_sync(~0u, has);
    __syncthreads();  // the previous tile's list has been read
    if (lane == 0) s_count[warp] = __popc(votes);
    __syncthreads();
    int at = __popc(votes & ((1u << lane) - 1)), pairs = 0;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) {
      if (i < warp) at += s_count[i];
      pairs += s_count[i];
    }
    if (has) {
      s_pair_x[at] = __ldg(plan.uniq + static_cast<int64_t>(pass.uniq_begin4) * 4 + index);
      s_pair_y[at] = __ldg(plan.order + static_cast<int64_t>(tile) * kTileM + tid);
    }
    __syncthreads();

    if constexpr (Narrow) {
      if (has_sum) {
#pragma unroll 4
        for (int i = tid / kCols; i < pairs; i += C::kThreads / kCols)
          acc[0][0] = fma(convert<A>(x[s_pair_x[i] * args.lda]), convert<A>(dy[s_pair_y[i] * args.ldb]), acc[0][0]);
      }
    } else {
      A next_x[4], next_y[4];
      const int c = tid % 16 * 4;  // thread: pair tid / 16 of the step, channels c .. c + 3
      const auto fetch = [&](int first) {
        const int i = first + tid / 16;
        const bool inside = i < pairs;
        load_elements(next_x, x + (inside ? s_pair_x[i] : 0) * args.lda + rb + c, inside ? args.c_in - rb - c : 0,
                      false);
        load_elements(next_y, dy + (inside ? s_pair_y[i] : 0) * args.ldb + cb + c, inside ? args.c_out - cb - c : 0,
                      false);
      };
      if (pairs > 0) fetch(0);
      for (int first = 0; first < pairs; first += kDepth) {
        __syncthreads();  // the previous step has been multiplied
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          s_x[tid / 16][c + e] = next_x[e];
          s_y[tid / 16][c + e] = next_y[e];
        }
        __syncthreads();
        if (first + kDepth < pairs) fetch(first + kDepth);
#pragma unroll
        for (int d = 0; d < kDepth; ++d) {
          A a[4], b[4];
          load_elements(a, &s_x[d][tid / 16 * 4], 4, true);
          load_elements(b, &s_y[d][tid % 16 * 4], 4, true);
#pragma unroll
          for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int n = 0; n < 4; ++n) acc[i][n] = fma(a[i], b[n], acc[i][n]);
        }
      }
    }
  }

  // partial[split][K][G][c_in][c_out]
  A* out = static_cast<A*>(args.workspace) + (static_cast<int64_t>(split) * volume + k) * args.groups * products;
  if constexpr (Narrow) {
    s_x[tid / kCols][tid % kCols] = acc[0][0];
    __syncthreads();
    if (tid < kCols && has_sum) {
      A total = s_x[0][tid];
      for (int i = 1; i < C::kThreads / kCols; ++i) total += s_x[i][tid];
      out[sum] = total;
    }
  } else {
    const int co = cb + tid % 16 * 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int ci = rb + tid / 16 * 4 + i;
      if (ci < args.c_in)
        store_elements(out + (static_cast<int64_t>(group) * args.c_in + ci) * args.c_out + co, acc[i], args.c_out - co,
                       false);
    }
  }
}

template <class C>
struct SimtWgrad {
  static int ci_blocks(const ConvArgs& args) {
    const int64_t sums = C::narrow(args) ? static_cast<int64_t>(args.groups) * args.c_in * args.c_out : args.c_in;
    return static_cast<int>(ceil_div(sums, C::kCols));
  }
  static int co_blocks(const ConvArgs& args) {
    return C::narrow(args) ? 1 : static_cast<int>(ceil_div(args.c_out, C::kCols));
  }
  static int64_t blocks(const ConvArgs& args) {  // CTAs of one split
    return static_cast<int64_t>(args.plan.kernel_volume) * (C::narrow(args) ? 1 : args.groups) * ci_blocks(args) *
           co_blocks(args);
  }
  static int64_t count(const ConvArgs& args) {
    return static_cast<int64_t>(args.plan.kernel_volume) * args.groups * args.c_in * args.c_out;
  }
  static int splits(const ConvArgs& args) {  // four of these CTAs fit on a multiprocessor
    return wgrad_splits(args, ceil_div(blocks(args), 4), count(args), sizeof(typename C::A));
  }
  // 16-bit results are rounded by reduce_splits.
  static bool direct(const ConvArgs& args) { return splits(args) == 1 && args.out_dtype == C::Acc; }
  static size_t workspace(const ConvArgs& args) {
    return direct(args) ? 0 : static_cast<size_t>(splits(args)) * count(args) * sizeof(typename C::A);
  }
  static cudaError_t launch(const ConvArgs& given, cudaStream_t stream) {
    ConvArgs args = given;
    if (direct(args)) args.workspace = args.out;
    const auto kernel = C::narrow(args) ? simt_wgrad_kernel<C, true> : simt_wgrad_kernel<C, false>;
    const cudaError_t status = launch_kernel(kernel, blocks(args) * splits(args), C::kThreads, 0, stream, args,
                                             ci_blocks(args), co_blocks(args), splits(args));
    if (status != cudaSuccess || direct(args)) return status;
    return reduce_splits(args.workspace, C::Acc, splits(args), count(args), args.out, args.out_dtype, stream);
  }
};

template <DType In>
KernelEntry simt_fprop_entry(const char* name) {
  using C = Simt<In>;
  return {{name, Op::fprop, In, C::Acc == DType::f64 ? Accum::f64 : Accum::f32, C::kRows, 1, 1, 2, "SIMT", 0, 80, 0},
          [](const ConvArgs& args) { return parts_workspace(args, simt_fprop_parts<C>(args), dtype_bytes(C::Acc)); },
          launch_simt_fprop<C>,
          [](const ConvArgs& args) { return simt_fprop_parts<C>(args).count(); }};
}

template <DType In>
KernelEntry simt_wgrad_entry(const char* name) {
  using C = Simt<In>;
  return {{name, Op::wgrad, In, C::Acc == DType::f64 ? Accum::f64 : Accum::f32, C::kCols, C::kCols, C::kDepth, 1,
           "SIMT", 0, 80, 0},
          SimtWgrad<C>::workspace,
          SimtWgrad<C>::launch,
          SimtWgrad<C>::splits};
}

}  // namespace voxmma
