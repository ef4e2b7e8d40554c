// Weight gradient of 16-bit inputs with mma.sync (sm_80 and newer): dW[k] = sum over pairs (i, j) of offset k of
// x[i]^T dy[j], in fp32.
//
// A CTA owns one offset, a block of CI channels of x, one of CO channels of dy, and a range of tiles.
//   kProducers warps take its tiles in turn. Each lists the pairs of a tile without gaps and copies the rows of kPairs
//     pairs at a time into slots of a ring of its own; what is left waits for the warp's next tile.
//   The consumer warps, 2 x WarpsN over the block, take a slot of every ring in turn.
// So the order of the sum is fixed. Partial sums of the ranges are added up in a fixed order by reduce_splits.
#pragma once

#include "common.cuh"
#include "mma_sm80.cuh"

namespace voxmma {

template <DType In_, int CI_, int CO_, int WarpsN_ = 2>
struct WgradPairs {
  static constexpr DType In = In_;
  static constexpr int CI = CI_, CO = CO_;  // channels of x (MMA rows) and of dy (MMA columns)
  using Sum = Accumulator<In, Accum::f32>;
  static constexpr int kWarpsM = 2, kWarpsN = WarpsN_, kConsumers = kWarpsM * kWarpsN;
  static constexpr int kProducers = 4;
  static constexpr int kThreads = (kConsumers + kProducers) * 32;
  static constexpr int kFragsM = CI / kWarpsM / 16, kFragsN = CO / kWarpsN / 8;
  static constexpr int kStepK = 16;  // pairs of an MMA step
  static constexpr int kRowX = CI > 64 ? 256 : CI * 2, kRowY = CO > 64 ? 256 : CO * 2;
  static constexpr int kSteps = kRowX + kRowY > 256 ? 1 : 2;  // MMA steps of a slot
  static constexpr int kPairs = kSteps * kStepK;
  static constexpr int kSlotY = kPairs * kRowX, kSlotBytes = kSlotY + kPairs * kRowY;  // [kPairs][CI], [kPairs][CO]
  static constexpr int kSlots = 64 * 1024 / kSlotBytes;  // slot s belongs to ring s % kProducers
  static constexpr int kList = kSlots * kSlotBytes;      // [kProducers][kTileM + kPairs] {row of x, row of dy}
  static constexpr int kMore = kList + kProducers * (kTileM + kPairs) * 8;  // [kSlots] 0 = the ring's end
  static constexpr int kBars = (kMore + kSlots * 4 + 7) / 8 * 8;            // mbarriers, full and empty ones
  static constexpr int kSmem = kBars + 2 * kSlots * 8;
  static constexpr int kMinBlocks = kConsumers + kProducers <= 8 && kFragsM * kFragsN <= 18 ? 2 : 1;
  static_assert(kSlots % kProducers == 0 && kSlots < 32, "rings of the same size, a bit a slot");
  static_assert(CI % (kWarpsM * 16) == 0 && CO % (kWarpsN * 16) == 0, "whole fragments");
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kMinBlocks)
    wgrad_pairs_kernel(const ConvArgs args, const int ci_blocks, const int co_blocks, const int splits) {
  using T = type_of<C::In>;
  extern __shared__ __align__(1024) unsigned char smem[];
  const PlanView& plan = args.plan;
  const int volume = plan.kernel_volume;
  const int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  const uint32_t base = smem_address(smem);
  const auto full = [&](int slot) { return base + C::kBars + slot * 8; };
  const auto empty = [&](int slot) { return base + C::kBars + (C::kSlots + slot) * 8; };
  int* more = reinterpret_cast<int*>(smem + C::kMore);

  const WgradBlock own(blockIdx.x, volume, co_blocks, ci_blocks, args.groups);
  const int k = static_cast<int>((own.offset + volume / 2) % volume);  // the centre's first, which has the most pairs
  const int co0 = own.co * C::CO, ci0 = own.ci * C::CI, group = own.group, split = own.split;

  for (int i = threadIdx.x; i < C::kSlots; i += C::kThreads) {
    mbarrier_init(full(i), 32);
    mbarrier_init(empty(i), C::kConsumers * kReleases);
    more[i] = 1;
  }
  __syncthreads();

  if (warp >= C::kConsumers) {
    // ---- producers -----------------------------------------------------------------------------------------------
    const int ring = warp - C::kConsumers;
    int2* list = reinterpret_cast<int2*>(smem + C::kList) + ring * (kTileM + C::kPairs);
    int slot = ring, parity = 0;
    // Copies rows of CH channels, the pairs' x or y (-1: zeros): 16-byte piece lane % P of row lane / P, and so on.
    const auto copy_rows = [&](auto ch, const int* pairs, uint32_t dst, const void* from, int64_t ld, int64_t channel0,
                               int channels) {
      constexpr int kRow = ch > 64 ? 256 : ch * 2, kPieces = kRow / 16;
      const int piece = lane % kPieces;
      const int bytes = max(0, min(16, (channels - piece * 8) * 2));  // behind the last channel: zero fill
      const T* src = static_cast<const T*>(from) + (bytes > 0 ? channel0 + piece * 8 : 0);
      if (kPieces * 8 > ch && piece * 8 >= ch) return;
#pragma unroll 4
      for (int row = lane / kPieces; row < C::kPairs; row += 32 / kPieces) {
        const int at = pairs[row * 2];
        cp_async16(dst + row * kRow + swizzle(row, piece, kRow) * 16, src + (at < 0 ? 0 : at) * ld, at < 0 ? 0 : bytes);
      }
    };
    const auto send = [&](const int2* pairs) {
      const uint32_t dst = base + slot * C::kSlotBytes;
      mbarrier_wait(empty(slot), parity ^ 1);
      copy_rows(std::integral_constant<int, C::CI>(), &pairs->x, dst, args.a, args.lda, group * args.a_group + ci0,
                args.c_in - ci0);
      copy_rows(std::integral_constant<int, C::CO>(), &pairs->y, dst + C::kSlotY, args.b, args.ldb,
                group * args.b_group + co0, args.c_out - co0);
      mbarrier_arrive_cp_async(full(slot));
      if ((slot += C::kProducers) >= C::kSlots) slot = ring, parity ^= 1;
    };

    // Loads run ahead of their use: while a tile's pairs are sent, the rows of x of the next one, the indices of the one
    // after it, and the schedule of the third. Lane l has rows 8 l .. 8 l + 7.
    const ScheduledTile* schedule = plan.schedule + plan.tiles;  // in Morton order
    const int begin = static_cast<int>(static_cast<int64_t>(plan.tiles) * split / splits) + ring;
    const int end = static_cast<int>(static_cast<int64_t>(plan.tiles) * (split + 1) / splits);
    ScheduledTile scheduled = {0, 0, 0, 0};
    Pass pass = {0, 0, 0, 0};  // one of the tile's, a lane
    int first_pass = 0, passes = 0;
    uint4 local;
    int4 order[2];
    int x_rows[8], dy_rows[8];  // -1: no pair
    const auto load_schedule = [&](int position) {
      if (position < end) scheduled = load_scheduled(schedule, position);
    };
    const auto load_indices = [&](int position) {
      if (position >= end) return;
      first_pass = scheduled.first_pass, passes = scheduled.passes;
      pass = load_pass(plan, first_pass + min(lane, passes - 1));
      const int64_t tile = scheduled.tile;
      local = __ldg(reinterpret_cast<const uint4*>(plan.local + (tile * volume + k) * kTileM) + lane);
#pragma unroll
      for (int i = 0; i < 2; ++i)
        order[i] = __ldg(reinterpret_cast<const int4*>(plan.order + tile * kTileM) + lane * 2 + i);
    };
    const auto load_rows = [&](int position) {
      if (position >= end) return;
      int uniq_begin4 = 0;
      for (int first = 0;;) {  // 32 passes at a time; one of them has the offset
        const uint32_t has = __ballot_sync(~0u, k >= pass.k_begin && k < pass.k_begin + pass.k_count);
        uniq_begin4 = __shfl_sync(~0u, pass.uniq_begin4, has ? __ffs(has) - 1 : 0);
        if (has || (first += 32) >= passes) break;
        pass = load_pass(plan, first_pass + min(first + lane, passes - 1));
      }
      const int* uniq = plan.uniq + static_cast<int64_t>(uniq_begin4) * 4;
      const uint32_t words[4] = {local.x, local.y, local.z, local.w};
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int from = static_cast<int>(words[i / 2] >> (i % 2 * 16) & 0xffff);
        x_rows[i] = from == kMissing ? -1 : __ldg(uniq + from);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        dy_rows[4 * i] = order[i].x, dy_rows[4 * i + 1] = order[i].y;
        dy_rows[4 * i + 2] = order[i].z, dy_rows[4 * i + 3] = order[i].w;
      }
    };
    load_schedule(begin);
    load_indices(begin);
    load_schedule(begin + C::kProducers);
    load_rows(begin);
    load_indices(begin + C::kProducers);
    load_schedule(begin + 2 * C::kProducers);
    int held = 0;  // pairs in the list
    for (int position = begin; position < end; position += C::kProducers) {
      int count = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) count += x_rows[i] >= 0;
      int to = held + count;  // behind the pairs of this lane and those before it
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const int other = __shfl_up_sync(~0u, count, distance);
        if (lane >= distance) count += other, to += other;
      }
      held += __shfl_sync(~0u, count, 31);
#pragma unroll
      for (int i = 7; i >= 0; --i)
        if (x_rows[i] >= 0) list[--to] = make_int2(x_rows[i], dy_rows[i]);
      __syncwarp();
      load_rows(position + C::kProducers);
      load_indices(position + 2 * C::kProducers);
      load_schedule(position + 3 * C::kProducers);

      int sent = 0;
      for (; held - sent >= C::kPairs; sent += C::kPairs) send(list + sent);
      held -= sent;
      const int2 kept = lane < held ? list[sent + lane] : make_int2(-1, -1);  // what is left, to the front
      __syncwarp();
      if (lane < C::kPairs) list[lane] = kept;
      __syncwarp();
    }
    if (held > 0) send(list);
    // The end.
    mbarrier_wait(empty(slot), parity ^ 1);
    if (lane == 0) more[slot] = 0;
    __syncwarp();
    mbarrier_arrive(full(slot));
    return;
  }

  // ---- consumers ---------------------------------------------------------------------------------------------------
  const int wm = warp % C::kWarpsM, wn = warp / C::kWarpsM;
  // A = x^T [CI][16 pairs]: lane gives pair 8 (lane / 16) + lane % 8, channels 8 (lane / 8 % 2) ...
  // B = dy [16 pairs][CO]:  lane gives pair lane % 16, channels 8 (lane / 16) ...
  uint32_t at_x[C::kFragsM], at_y[C::kFragsN / 2];  // of the first step, in a slot
#pragma unroll
  for (int m = 0; m < C::kFragsM; ++m) {
    const int pair = lane / 16 * 8 + lane % 8;
    at_x[m] = base + pair * C::kRowX + swizzle(pair, (wm * C::kFragsM + m) * 2 + lane / 8 % 2, C::kRowX) * 16;
  }
#pragma unroll
  for (int n = 0; n < C::kFragsN / 2; ++n) {
    const int pair = lane % 16;
    at_y[n] =
        base + C::kSlotY + pair * C::kRowY + swizzle(pair, (wn * C::kFragsN / 2 + n) * 2 + lane / 16, C::kRowY) * 16;
  }
  // Made once, and not again for every step.
#pragma unroll
  for (int m = 0; m < C::kFragsM; ++m) asm volatile("" : "+r"(at_x[m]));
#pragma unroll
  for (int n = 0; n < C::kFragsN / 2; ++n) asm volatile("" : "+r"(at_y[n]));
  constexpr uint32_t kAll = (1u << C::kSlots) - 1, kRing = kAll / ((1u << C::kProducers) - 1);
  int slot = -1, parity = 0;
  uint32_t live = kAll;         // slots of rings that have not ended
  const auto next_slot = [&] {  // waits for it; false: there is none
    while (live) {
      if (++slot == C::kSlots) slot = 0, parity ^= 1;
      if (!((live >> slot) & 1)) continue;
      mbarrier_wait(full(slot), parity);
      if (more[slot] != 0) return true;
      live &= ~(kRing << slot % C::kProducers);
    }
    return false;
  };
  typename C::Sum acc[C::kFragsM][C::kFragsN];  // of m16n8: x channels by dy channels
  Operand<C::In, false> a[2][C::kFragsM], b[2][C::kFragsN / 2];
  const auto load = [&](auto buffer, int step) {
    const uint32_t at = slot * C::kSlotBytes;
#pragma unroll
    for (int n = 0; n < C::kFragsN / 2; ++n)
      ldmatrix_x4_trans(b[buffer][n].v, at + at_y[n] + step * C::kStepK * C::kRowY);
#pragma unroll
    for (int m = 0; m < C::kFragsM; ++m) ldmatrix_x4_trans(a[buffer][m].v, at + at_x[m] + step * C::kStepK * C::kRowX);
  };
  bool go_on = next_slot();
  if (go_on) load(std::integral_constant<int, 0>(), 0);
  // Multiplies what is in `buffer` and loads the step after it meanwhile; returns false behind the last one.
  const auto multiply_step = [&](auto buffer, int step) {
    constexpr std::integral_constant<int, 1 - buffer> other{};
    if (step + 1 < C::kSteps) {
      load(other, step + 1);
    } else {
      __syncwarp();  // every lane has its operands: the rows may be overwritten
      if (kReleases == 32 || lane == 0) mbarrier_arrive(empty(slot));
      go_on = next_slot();
      if (go_on) load(other, 0);
    }
#pragma unroll
    for (int m = 0; m < C::kFragsM; ++m) multiply(acc[m], a[buffer][m], b[buffer]);
    return go_on;
  };
  while (go_on && multiply_step(std::integral_constant<int, 0>(), 0) &&
         multiply_step(std::integral_constant<int, 1>(), C::kSteps - 1)) {
  }

  // partial[split][K][G][c_in][c_out]
  const int64_t block = (static_cast<int64_t>(split) * volume + k) * args.groups + group;
  const int col0 = co0 + wn * C::kFragsN * 8;
  float* out = static_cast<float*>(args.workspace) + block * args.c_in * args.c_out + col0;
#pragma unroll
  for (int m = 0; m < C::kFragsM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int ci = ci0 + (wm * C::kFragsM + m) * 16 + half * 8 + lane / 4;
      float* row = ci < args.c_in ? out + static_cast<int64_t>(ci) * args.c_out : nullptr;
      store_row<float, C::kFragsN>(row, args.c_out - col0, args.c_out % 2 == 0,
                                   [&](int n) { return acc[m][n].row(half); });
    }
  }
}

template <class C>
struct WgradPairsLaunch {
  static int64_t blocks(const ConvArgs& args) {  // CTAs of a split
    return ceil_div(args.c_in, C::CI) * ceil_div(args.c_out, C::CO) * args.groups * args.plan.kernel_volume;
  }
  static int64_t count(const ConvArgs& args) {
    return static_cast<int64_t>(args.plan.kernel_volume) * args.groups * args.c_in * args.c_out;
  }
  static int splits(const ConvArgs& args) {
    // Eight waves of CTAs, so that those with more pairs than others even out, but 16 tiles a CTA, which pay for its
    // start; small sets fill one wave. At most 256 MB of sums.
    const int64_t wave = int64_t{C::kMinBlocks} * args.sm_count, each = blocks(args);
    const int64_t splits = std::min({8 * wave / each, std::max<int64_t>(args.plan.tiles / 16, wave / each),
                                     int64_t{args.plan.tiles}, (int64_t{256} << 20) / (count(args) * 4)});
    return static_cast<int>(std::max<int64_t>(1, splits));
  }
  static bool direct(const ConvArgs& args) { return splits(args) == 1 && args.out_dtype == DType::f32; }
  static size_t workspace(const ConvArgs& args) { return direct(args) ? 0 : splits(args) * count(args) * 4; }
  static cudaError_t launch(const ConvArgs& given, cudaStream_t stream) {
    const int parts = splits(given);
    ConvArgs args = given;
    if (direct(given)) args.workspace = args.out;
    const cudaError_t status = launch_kernel(wgrad_pairs_kernel<C>, blocks(args) * parts, C::kThreads, C::kSmem, stream,
                                             args, static_cast<int>(ceil_div(args.c_in, C::CI)),
                                             static_cast<int>(ceil_div(args.c_out, C::CO)), parts);
    if (status != cudaSuccess || direct(given)) return status;
    return reduce_splits(args.workspace, DType::f32, parts, count(args), args.out, args.out_dtype, stream);
  }
};

template <class C>
KernelEntry wgrad_pairs_entry(const char* name) {
  using Launch = WgradPairsLaunch<C>;
  return {{name, Op::wgrad, C::In, Accum::f32, C::CI, C::CO, C::kStepK, C::kSlots, C::Sum::kAtom, 0, 80, C::kSmem},
          Launch::workspace,
          Launch::launch};
}

}  // namespace voxmma
