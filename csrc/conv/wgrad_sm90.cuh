// wgrad on Hopper: dW[k] (C_in x C_out) = sum over tile rows of X[neighbour k]^T dY[row], wgmma with the reduction
// running over the rows of a tile, 32 a step. A = X^T comes gathered and transposed into registers (ldmatrix.trans,
// one address a row); B = dY lies in shared memory in tile order, the MN-major wgmma image. A step in which no row
// has a neighbour under the offset is skipped. The accumulator is fp32, always.
//
// A CTA owns a block of CK input channels x BN output channels for `slots` kernel offsets of one group, over a
// share of the schedule (a split). Its two consumer warpgroups hold J accumulators of 64 x BN each; a
// CK = 32 accumulator stacks two offsets (rows 0-31 and 32-63), a CK = 8 one, for up to 8 input channels, eight of them
// (H200, lidar_dense, 5x5x5, 6 -> 32 channels: 42 us; by CK = 32, 176 us). Partial sums go to workspace[split][K][G][Ci][Co]
// and are added by reduce_splits in a fixed order: no atomics, bitwise repeatable. The sums of a single split are dW.
//
//   row ring   unique input rows of a pass, CK channels; local indices of the CTA's offsets, fragment masks
//   dy ring    kHalfRows rows of dY, BN channels: half a tile a stage, so that the next tile's rows arrive meanwhile
// Two producer warps fill each ring, so that neither waits for the other's, and row ids are loaded a tile before their
// gather, which is the first to use them. 64 x 128 tiles, 128 channels, 507k voxels, H200: 0.59 ms, of which the products
// without copies take 0.50, the copies without products 0.42, and neither of them 0.20. So bytes from L2 are not what bounds
// it: with a cluster of two blocks of input channels, each gathering half of dY's rows for both over distributed shared
// memory, it took 0.66 ms, in stages of a quarter of a tile; without the cluster those took 0.65.
// Registers: 384 threads x 168 at launch = producers 128 x 40 + consumers 256 x 232. (Three consumer warpgroups of
// 160 registers hold no 128-register accumulator beside the rest: ptxas serialises their wgmma, message C7512.)
// CK = 8 runs two CTAs a multiprocessor: 384 x 80 = 128 x 40 + 256 x 96, and 1,024 left over.
#pragma once

#include <algorithm>
#include <limits>
#include <type_traits>

#include "nonfinite.cuh"
#include "sm90.cuh"

namespace voxmma {

namespace sm90 {

template <class T_, int BN_, int CK_>
struct WgradConfig {
  using T = T_;
  static constexpr int BN = BN_, CK = CK_;
  static constexpr int kConsumers = 2;
  static constexpr int kProducers = 1;  // warpgroups
  static constexpr int kThreads = kWarpGroup * (kConsumers + kProducers);
  static constexpr int kRowWarps = 2, kDyWarps = 2;  // the first one also fetches local indices
  static constexpr int kStack = 64 / CK;             // offsets stacked in one accumulator
  static constexpr bool kNarrow = CK == 8;           // a row is one piece, a warp's 16 rows of A are two offsets
  // Accumulators of a warpgroup: 192 registers at most; of narrow rows, as many as a pass has offsets for.
  static constexpr int J = kNarrow ? 2 : BN == 128 ? 3 : 6;
  static constexpr int kBlocks = kNarrow ? 2 : 1;  // CTAs a multiprocessor
  static constexpr int kProducerRegs = 40, kConsumerRegs = kNarrow ? 96 : 232;
  static constexpr int kSlots = kConsumers * J * kStack;  // offsets of a CTA
  static constexpr bool kLateA = BN == 128;  // H200, 507k voxels, 128 channels: 2 % faster; of 64 columns 2 % slower
  static constexpr int kHalfRows = kTileM / 2;
  static constexpr int kRowBytes = CK * 2;
  static constexpr int kRowSlots = 2, kDySlots = 2;
  static constexpr int kRowSlotBytes = (kUniqueMax + 1) * kRowBytes;
  static constexpr int kDyAtom = BN >= 64 ? 64 : 32;  // channels of one swizzled dY row
  static constexpr int kDyRowBytes = kDyAtom * 2;
  static constexpr int kDyAtomBytes = kHalfRows * kDyRowBytes;
  static constexpr int kDySlotBytes = kDyAtomBytes * (BN / kDyAtom);
  static constexpr int kLocalBytes = kSlots * kTileM * 2;

  static constexpr int kDyAt = 0;
  static constexpr int kRowAt = kDyAt + kDySlots * kDySlotBytes;
  static constexpr int kLocalAt = kRowAt + kRowSlots * kRowSlotBytes;
  static constexpr int kNoLocalAt = kLocalAt + kRowSlots * kLocalBytes;  // [kTileM] kMissing
  static constexpr int kOffsetAt = kNoLocalAt + kTileM * 2;              // [kSlots] offset of a slot
  static constexpr int kFragAt = kOffsetAt + (kSlots * 4 + 15) / 16 * 16;
  static constexpr int kHeadAt = kFragAt + kRowSlots * kFrags * 4;
  static constexpr int kBarAt = kHeadAt + kRowSlots * 16;
  static constexpr int kSmemBytes = kBarAt + 2 * (kRowSlots + kDySlots) * 8 + 1024;
  static_assert(kSlots <= 32);  // a lane a slot
  static_assert(kDySlotBytes % 1024 == 0 && kLocalAt % 16 == 0 && kBarAt % 8 == 0 && kSmemBytes <= 227 * 1024);
};

// How the grid covers (offset groups x channel blocks x groups) x splits of the tiles.
struct WgradGrid {
  int offset_groups, blocks_m, blocks_n, combos, splits;
};

// The grid of a small set, whose tiles are too few to split: fewer offsets a CTA, in one wave, shortest by this estimate.
template <class C>
WgradGrid small_wgrad_grid(const ConvArgs& args, WgradGrid g) {
  constexpr double kStep = C::BN == 128 ? 140 : 110;  // ns: products of 32 rows, on both warpgroups at a time
  constexpr double kGather = (352 * C::CK + kTileM * C::BN) * 2 / 40.;  // of a tile's rows, at 40 bytes a ns
  constexpr double kSums = 2000;                                        // bytes of partial sums written and read a ns
  const double sums = double(args.plan.kernel_volume) * args.groups * args.c_in * args.c_out * 4;
  const int volume = args.plan.kernel_volume, blocks = g.blocks_m * g.blocks_n * args.groups;
  double least = std::numeric_limits<double>::infinity();
  for (int slots = std::min(C::kSlots, volume); slots >= 1; --slots) {
    const int groups = (volume + slots - 1) / slots,
              most = std::min(args.plan.tiles, args.sm_count * C::kBlocks / (groups * blocks));
    const int in_turn = (slots + C::kConsumers * C::kStack - 1) / (C::kConsumers * C::kStack);  // on a warpgroup
    const double tile = std::max(kGather, in_turn * (kTileM / 32) * kStep);
    for (int splits = 1; splits <= most; ++splits) {
      const double took = (args.plan.tiles + splits - 1) / splits * tile + (splits > 1 ? splits * sums / kSums : 0);
      if (took >= least) continue;
      least = took;
      g.offset_groups = groups;
      g.splits = splits;
    }
  }
  g.combos = g.offset_groups * blocks;
  return g;
}

template <class C>
WgradGrid wgrad_grid(const ConvArgs& args) {
  WgradGrid g{};
  g.offset_groups = (args.plan.kernel_volume + C::kSlots - 1) / C::kSlots;
  g.blocks_m = (args.c_in + C::CK - 1) / C::CK;
  g.blocks_n = (args.c_out + C::BN - 1) / C::BN;
  g.combos = g.offset_groups * g.blocks_m * g.blocks_n * args.groups;
  const int at_once = args.sm_count * C::kBlocks;
  if (args.plan.tiles * 2 <= args.sm_count && g.combos <= at_once) return small_wgrad_grid<C>(args, g);
  const int64_t per_split = int64_t(args.plan.kernel_volume) * args.groups * args.c_in * args.c_out * 4;
  const int64_t room = std::max<int64_t>(1, (int64_t(256) << 20) / std::max<int64_t>(1, per_split));
  const int most = int(std::min<int64_t>({room, std::max(1, args.plan.tiles / 2), C::kNarrow ? 128 : 256}));
  // The smallest number of splits that leaves at most a tenth of the multiprocessors idle over whole waves.
  g.splits = 1;
  double best = 0;
  for (int s = 1; s <= most; ++s) {
    const int64_t ctas = int64_t(s) * g.combos;
    const int64_t waves = (ctas + at_once - 1) / at_once;
    if (waves > 4 && best > 0) break;
    const double used = double(ctas) / double(waves * at_once);
    if (used > best + 0.02) {
      best = used;
      g.splits = s;
    }
    if (best >= 0.95) break;
  }
  return g;
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kBlocks)
    wgrad_kernel(const __grid_constant__ ConvArgs args, const __grid_constant__ WgradGrid grid) {
#if defined(VOXMMA_SM90A)
  using T = typename C::T;
  constexpr int BN = C::BN, CK = C::CK, J = C::J;
  using AtomT = typename Atom<T, float, BN, GMMA::Major::MN>::type;

  extern __shared__ char smem_raw[];
  char* smem = smem_raw + ((1024 - (cute::cast_smem_ptr_to_uint(smem_raw) & 1023)) & 1023);
  const uint32_t smem_u = cute::cast_smem_ptr_to_uint(smem);
  const uint32_t row_full = smem_u + C::kBarAt, row_empty = row_full + C::kRowSlots * 8;  // barriers, 8 bytes each
  const uint32_t dy_full = row_empty + C::kRowSlots * 8, dy_empty = dy_full + C::kDySlots * 8;

  const PlanView& plan = args.plan;
  const int volume = plan.kernel_volume;
  // combos run fastest, so that the CTAs reading the same tiles run at the same time
  const int split = blockIdx.x / grid.combos;
  int combo = blockIdx.x % grid.combos;
  const int og = combo % grid.offset_groups;
  combo /= grid.offset_groups;
  const int mb = combo % grid.blocks_m;
  combo /= grid.blocks_m;
  const int nb = combo % grid.blocks_n, g = combo / grid.blocks_n;
  // Kernels of one pass: slot i holds one offset of [i G, (i + 1) G), G = offset_groups: offset i G + og, or, where G
  // divides the kernel volume and would put whole planes of the kernel into one group, rotated by i + i / G + ... (the
  // digit sum of every offset of a group in base G is then the same). It shares out the well-filled offsets. Where tiles
  // have several passes (by the first tile of the schedule, which is a heavy one), every pass that a group's offsets are in
  // costs a gather: there they follow each other.
  const bool in_turn = volume > kPassOffsets || load_scheduled(plan.schedule, 0).passes > 1;
  const int most = (volume + grid.offset_groups - 1) / grid.offset_groups;
  auto slot_offset = [&](int slot) {
    if (in_turn) return og * most + slot;
    int shift = 0;
    if (grid.offset_groups > 1 && volume % grid.offset_groups == 0) {
      for (int q = slot; q > 0; q /= grid.offset_groups) shift += q;
    }
    return slot * grid.offset_groups + (og + shift) % grid.offset_groups;
  };
  int slots = in_turn ? min(most, volume - og * most) : most;
  if (slot_offset(slots - 1) >= volume) --slots;

  const int group_id = threadIdx.x / kWarpGroup;
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  const int lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < C::kRowSlots; ++i) {
      mbarrier_init(row_full + i * 8, C::kRowWarps * 32 + 1);
      mbarrier_init(row_empty + i * 8, C::kConsumers * 4 * kReleases);
    }
    for (int i = 0; i < C::kDySlots; ++i) {
      mbarrier_init(dy_full + i * 8, C::kDyWarps * 32);
      mbarrier_init(dy_empty + i * 8, C::kConsumers * 4 * kReleases);
    }
    cutlass::arch::fence_barrier_init();
  }
  for (int i = threadIdx.x; i < C::kRowSlots * C::kRowBytes / 4; i += C::kThreads) {  // the zero rows
    const int slot = i / (C::kRowBytes / 4), word = i % (C::kRowBytes / 4);
    sts_u32(smem_u + C::kRowAt + slot * C::kRowSlotBytes + kUniqueMax * C::kRowBytes + word * 4, 0);
  }
  if (threadIdx.x < slots) sts_u32(smem_u + C::kOffsetAt + threadIdx.x * 4, slot_offset(threadIdx.x));
  for (int i = threadIdx.x; i < kTileM / 2; i += C::kThreads) {  // indices of an offset that is not there
    sts_u32(smem_u + C::kNoLocalAt + i * 4, kMissing << 16 | kMissing);
  }
  __syncthreads();

  // A pass matters to this CTA when one of its offsets lies in [k_begin, k_begin + k_count) and has neighbours.
  auto first_slot = [&](int k) {  // first slot with an offset >= k
    if (in_turn) return min(max(k - og * most, 0), slots);
    const int slot = k / grid.offset_groups;
    return slot < slots && slot_offset(slot) < k ? slot + 1 : slot;
  };
  auto slot_range = [&](const Pass& p) {
    if (p.k_begin == 0 && p.k_count == volume) return make_int2(0, slots);
    return make_int2(first_slot(p.k_begin), min(slots, first_slot(p.k_begin + p.k_count)));
  };

  if (group_id >= C::kConsumers) {  // ---- producer warpgroup ----
    cutlass::arch::warpgroup_reg_dealloc<C::kProducerRegs>();
    // Rows and dY have warps of their own, so that neither waits for the other's ring.
    PassWalk walk(plan.schedule, plan.tiles, split, grid.splits, 1);
    Pass pass = walk.done() ? Pass{} : load_pass(plan, walk.pass());
    const int producer = warp - C::kConsumers * 4;
    if (producer < C::kRowWarps) {
      RingState<C::kRowSlots> rs;
      const char* x = static_cast<const char*>(args.a) + (g * args.a_group + mb * CK) * 2;
      const int x_valid = (args.c_in - mb * CK + 7) / 8;
      RowIds<kUniqueMax, C::kRowWarps> ids;
      auto load_ids = [&] {
        ids.template load_ids<0, kUniqueMax>(plan.uniq + int64_t(pass.uniq_begin4) * 4, pass.uniq_count, producer,
                                             lane);
      };
      if (!walk.done()) load_ids();
      while (!walk.done()) {
        const int2 range = slot_range(pass);
        const int k_begin = pass.k_begin, count = pass.uniq_count;
        const int ahead = walk.peek();
        if (ahead >= 0) pass = load_pass(plan, ahead);
        if (range.x < range.y && count > 0) {
          wait_empty(row_empty + rs.index * 8, rs.phase);
          const uint32_t bar = row_full + rs.index * 8;
          if (producer == 0) {  // indices and masks; a lane a slot
            if (lane == 0) {
              sts_v4(smem_u + C::kHeadAt + rs.index * 16, make_int4(k_begin, range.x, range.y, 0));
              arrive_expect(bar, (range.y - range.x) * kTileM * 2 + kFrags * 4);
              bulk_copy(smem_u + C::kFragAt + rs.index * kFrags * 4, plan.frag + int64_t(walk.pass()) * kFrags,
                        kFrags * 4, bar);
            }
            __syncwarp();
            if (const int slot = range.x + lane; slot < range.y) {
              bulk_copy(
                  smem_u + C::kLocalAt + rs.index * C::kLocalBytes + slot * kTileM * 2,
                  plan.local + (int64_t(walk.tile()) * volume + lds_u32(smem_u + C::kOffsetAt + slot * 4)) * kTileM,
                  kTileM * 2, bar);
            }
            __syncwarp();
          }
          const uint32_t to = smem_u + C::kRowAt + rs.index * C::kRowSlotBytes, unit = uint32_t(args.lda * 2);
          if constexpr (C::kNarrow)
            ids.gather_pieces(to, x, count, producer, lane, unit);
          else
            ids.template gather<C::kRowBytes, 0, kUniqueMax, 8>(to, x, count, x_valid, producer, lane, unit);
          mbarrier_arrive_cp_async(bar);
          rs.advance();
        }
        if (ahead >= 0) load_ids();  // the next pass's, which arrive while the slot is waited for
        walk.advance();
      }
      cp_async_wait_all();
      wait_empty(row_empty + rs.index * 8, rs.phase);  // an empty-headed slot ends the consumers' loop
      if (threadIdx.x == C::kConsumers * kWarpGroup) {
        sts_v4(smem_u + C::kHeadAt + rs.index * 16, make_int4(-1, 0, 0, 0));
        mbarrier_arrive(row_full + rs.index * 8);
      }
      mbarrier_arrive(row_full + rs.index * 8);
    } else {
      RingState<C::kDySlots> ds;
      const int dy_warp = producer - C::kRowWarps;
      const char* dy = static_cast<const char*>(args.b) + (g * args.b_group + nb * BN) * 2;
      RowIds<kTileM, C::kDyWarps> ids;
      if (!walk.done()) {
        ids.template load_ids<0, kTileM>(plan.order + int64_t(walk.tile()) * kTileM, kTileM, dy_warp, lane);
      }
      while (!walk.done()) {
        const int2 range = slot_range(pass);
        const bool used = range.x < range.y && pass.uniq_count > 0;
        const int ahead = walk.peek();
        if (ahead >= 0) pass = load_pass(plan, ahead);
        const int* next = plan.order + int64_t(walk.last_pass() ? walk.next.x : walk.tile()) * kTileM;
        auto copy_half = [&](auto half) {
          if (used) {
            wait_empty(dy_empty + ds.index * 8, ds.phase);
#pragma unroll 1
            for (int a = 0; a < BN / C::kDyAtom; ++a) {
              ids.template gather<C::kDyRowBytes, half * C::kHalfRows, C::kHalfRows, 8>(
                  smem_u + C::kDyAt + ds.index * C::kDySlotBytes + a * C::kDyAtomBytes, dy + a * C::kDyRowBytes, kTileM,
                  (args.c_out - nb * BN - a * C::kDyAtom + 7) / 8, dy_warp, lane, uint32_t(args.ldb * 2));
            }
            mbarrier_arrive_cp_async(dy_full + ds.index * 8);
            ds.advance();
          }
          if (ahead >= 0) ids.template load_ids<half * C::kHalfRows, C::kHalfRows>(next, kTileM, dy_warp, lane);
        };
        copy_half(std::integral_constant<int, 0>{});
        copy_half(std::integral_constant<int, 1>{});
        walk.advance();
      }
      cp_async_wait_all();
    }
  } else {  // ---- consumer warpgroups ----
    cutlass::arch::warpgroup_reg_alloc<C::kConsumerRegs>();
    RingState<C::kRowSlots> rs;
    RingState<C::kDySlots> ds;
    const int wg_warp = warp % 4;
    // ldmatrix.trans: lanes 0-7, 8-15 give rows 0-7 of channels +0 and +8, lanes 16-23, 24-31 rows 8-15 of the same
    const int lane_row = (lane & 7) + (lane >> 4) * 8;
    // Which offset of an accumulator's stack, and which of its channels, the first and the second eight of the warp's 16
    // rows of A are.
    const auto stacked = [&](int second) { return C::kNarrow ? wg_warp * 2 + second : wg_warp * 16 / CK; };
    const auto channel = [&](int second) { return C::kNarrow ? 0 : wg_warp * 16 % CK + second * 8; };
    const int piece = channel(lane >> 3 & 1) / 8;

    Accumulator<float, BN> acc[J];  // (64, BN) each: kStack offsets x CK channels
#pragma unroll
    for (int j = 0; j < J; ++j) acc[j].clear();

    // B of a step: 16 rows (K) x BN channels (N), N-major; rows of kDyAtom channels, atoms kDyAtomBytes apart
    using SmemAtom = std::conditional_t<C::kDyAtom == 64, GMMA::Layout_MN_SW128_Atom<T>, GMMA::Layout_MN_SW64_Atom<T>>;
    auto sB = cute::make_tensor(cute::make_smem_ptr(reinterpret_cast<T*>(smem + C::kDyAt)),
                                cute::tile_to_shape(SmemAtom{}, cute::Shape<cute::Int<BN>, cute::Int<C::kHalfRows>>{},
                                                    cute::Step<cute::_2, cute::_1>{}));
    const uint64_t desc0 = GMMA::make_gmma_desc<GMMA::Major::MN>(
        cute::local_tile(sB, cute::Shape<cute::Int<BN>, cute::_16>{}, cute::make_coord(0, 0)));

    while (true) {
      wait_full(row_full + rs.index * 8, rs.phase);
      const uint4 head = lds_v4(smem_u + C::kHeadAt + rs.index * 16);  // first offset, slots [y, z)
      if (int(head.x) < 0) break;
      const uint32_t frag = lds_u32(smem_u + C::kFragAt + (rs.index * kFrags + lane % kFrags) * 4);
      const uint32_t rows = smem_u + C::kRowAt + rs.index * C::kRowSlotBytes;
      // steps_of[j]: bit 2 i: step i of the tile (rows 32 i ...) has a row with a neighbour; index_of[j]: address of the
      // local index of this lane's row of step 0
      uint32_t steps_of[J], index_of[J];
#pragma unroll
      for (int j = 0; j < J; ++j) {
        uint32_t bits = 0;
        index_of[j] = smem_u + C::kNoLocalAt + lane_row * 2;
#pragma unroll
        for (int s = 0; s < C::kStack; ++s) {
          // slots are dealt round robin, so that a short last group is shared by the warpgroups
          const int slot = (j * C::kStack + s) * C::kConsumers + group_id;
          if (slot >= int(head.y) && slot < int(head.z)) {
            bits |= 1u << (lds_u32(smem_u + C::kOffsetAt + slot * 4) - head.x);
            if (s == stacked(lane >> 3 & 1)) {
              index_of[j] = smem_u + C::kLocalAt + rs.index * C::kLocalBytes + slot * kTileM * 2 + lane_row * 2;
            }
          }
        }
        const uint32_t active = __ballot_sync(0xffffffffu, (frag & bits) != 0) & 0xffff;  // by 16 rows
        steps_of[j] = (active | active >> 1) & 0x5555;
      }
      // Where the step that comes first in accumulators j0, j0 + 1, ... of a half has its local indices; else `none`.
      auto first_step = [&](int half, int j0, uint32_t none) {
        uint32_t at = none;
#pragma unroll
        for (int j = J - 1; j >= 0; --j) {
          const uint32_t steps = steps_of[j] >> (half * 8) & 0xff;
          if (j >= j0 && steps != 0) at = index_of[j] + half * C::kHalfRows * 2 + (__ffs(steps) - 1) * 32;
        }
        return at;
      };
      auto load = [&](uint32_t (&a)[4], int idx) {
        ldmatrix_x4_trans(a, rows + idx * C::kRowBytes + swizzle(idx, piece, C::kRowBytes) * 16);
      };
      // A step is 32 rows, two products; while they run, the indices and then A of the next step arrive, or (kLateA) while
      // one runs, A of the next one does.
      const uint32_t nowhere = smem_u + C::kNoLocalAt + lane_row * 2;
      const uint32_t second = first_step(1, 0, nowhere), begin = first_step(0, 0, second);
      uint32_t a0[4], a1[4];
      load(a0, lds_u16(begin));
      int late = lds_u16(begin + 32);
      if constexpr (!C::kLateA) load(a1, late);
#pragma unroll 1
      for (int half = 0; half < 2; ++half) {
        wait_full(dy_full + ds.index * 8, ds.phase);
        cutlass::arch::fence_view_async_shared();  // dY was written by cp.async and is read through the async proxy
        const uint64_t desc = advance(desc0, ds.index * (C::kDySlotBytes >> 4));
#pragma unroll
        for (int j = 0; j < J; ++j) {
          uint32_t steps = steps_of[j] >> (half * 8) & 0xff;
          if (steps == 0) continue;
          const uint32_t index = index_of[j] + half * C::kHalfRows * 2;
          const uint32_t leave = first_step(half, j + 1, half == 0 ? second : nowhere);
          int at = __ffs(steps) - 1;  // in units of 16 rows
          while (steps != 0) {
            const uint64_t b = advance(desc, at * (16 * C::kDyRowBytes >> 4));
            steps &= steps - 1;
            at = __ffs(steps) - 1;
            const uint32_t next = steps != 0 ? index + at * 32 : leave;
            const int idx0 = lds_u16(next), idx1 = lds_u16(next + 32);
            cute::warpgroup_arrive();
            wgmma<AtomT>(acc[j], a0, b);
            cute::warpgroup_commit_batch();
            if constexpr (C::kLateA) {
              cute::warpgroup_wait<1>();  // the second product of the step before is done: a1 is free
              load(a1, late);
              late = idx1;
              cute::warpgroup_arrive();
            }
            wgmma<AtomT>(acc[j], a1, advance(b, 16 * C::kDyRowBytes >> 4));
            cute::warpgroup_commit_batch();
            cute::warpgroup_wait<1>();  // the first product is done: a0 is free
            load(a0, idx0);
            if constexpr (!C::kLateA) {
              cute::warpgroup_wait<0>();
              load(a1, idx1);
            }
          }
        }
        cute::warpgroup_wait<0>();
#pragma unroll
        for (int j = 0; j < J; ++j) acc[j].fence();
        release(dy_empty + ds.index * 8, lane);
        ds.advance();
      }
      release(row_empty + rs.index * 8, lane);
      rs.advance();
    }

    // ---- epilogue: this split's partial sums, zeros included, or dW itself ----
    const bool rounded = grid.splits == 1 && args.out_dtype != DType::f32;
    bool finite = true;
    const auto slot_of = [&](int j, int half) { return (j * C::kStack + stacked(half)) * C::kConsumers + group_id; };
    const auto channel_of = [&](int half) { return mb * CK + channel(half) + lane / 4; };
    float* partial =
        static_cast<float*>(args.workspace) + int64_t(split) * volume * args.groups * args.c_in * args.c_out;
#pragma unroll
    for (int j = 0; j < J; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int slot = slot_of(j, half), ci = channel_of(half);
        if (slot >= slots || ci >= args.c_in) continue;
        const int k = slot_offset(slot);
        const int64_t at = ((int64_t(k) * args.groups + g) * args.c_in + ci) * args.c_out + nb * BN;
        float* out = partial + at;
        const int left = args.c_out - nb * BN;
#pragma unroll
        for (int i = 0; i < BN / 8; ++i) {
          const int col = 8 * i + 2 * (lane % 4);
          const float2 v = acc[j].pair(i, half);
          finite = finite && isfinite(v.x) && isfinite(v.y);
          if (rounded) {
            T* last = static_cast<T*>(args.out) + at;
            const uint32_t both = pack2<cuda_type<T>>(v.x, v.y);
            if (args.c_out % 2 == 0 && col < left) {
              *reinterpret_cast<uint32_t*>(last + col) = both;
            } else {
              if (col < left) last[col] = reinterpret_cast<const T*>(&both)[0];
              if (col + 1 < left) last[col + 1] = reinterpret_cast<const T*>(&both)[1];
            }
          } else if (args.c_out % 2 == 0 && col < left) {
            *reinterpret_cast<float2*>(out + col) = v;
          } else {
            if (col < left) out[col] = v.x;
            if (col + 1 < left) out[col + 1] = v.y;
          }
        }
      }
    }
    if (grid.splits == 1 && __any_sync(0xffffffffu, !finite)) {  // as reduce_splits does it where there are several
      using X = cuda_type<T>;
      const auto make_again = [&](auto* out) {
#pragma unroll 1
        for (int j = 0; j < J; ++j) {
#pragma unroll 1
          for (int i = 0; i < BN / 2; ++i) {  // the values of the lane
            const int slot = slot_of(j, i / (BN / 4)), ci = channel_of(i / (BN / 4));
            if (slot >= slots) continue;
            const int64_t block = int64_t(slot_offset(slot)) * args.groups + g;
            const int co = nb * BN + i % (BN / 4) / 2 * 8 + 2 * (lane % 4) + i % 2;
            const bool inside = ci < args.c_in && co < args.c_out;
            const int64_t at = inside ? (block * args.c_in + ci) * args.c_out + co : 0;
            const float sum = inside ? convert<float>(out[at]) : 0.f;
            const bool wanted = !isfinite(sum);
            if (!__any_sync(0xffffffffu, wanted)) continue;
            const float again = sum_pairs<X>(args, at, wanted, sum);
            if (wanted) out[at] = convert<std::remove_reference_t<decltype(*out)>>(again);
          }
        }
      };
      if (args.out_dtype == DType::f32) {
        make_again(static_cast<float*>(args.out));
      } else {
        make_again(static_cast<X*>(args.out));
      }
    }
  }
#endif
}

inline int64_t wgrad_count(const ConvArgs& args) {
  return int64_t(args.plan.kernel_volume) * args.groups * args.c_in * args.c_out;
}

template <class C>
cudaError_t wgrad_launch(ConvArgs args, cudaStream_t stream) {
  const int64_t count = wgrad_count(args);
  if (count == 0) return cudaSuccess;
  const WgradGrid grid = wgrad_grid<C>(args);
  const int64_t ctas = int64_t(grid.combos) * grid.splits;
  if (ctas > INT32_MAX) return cudaErrorInvalidValue;
  if (grid.splits == 1) args.workspace = args.out;
  auto kernel = wgrad_kernel<C>;
  cudaError_t err = allow_shared(reinterpret_cast<const void*>(kernel), C::kSmemBytes);
  if (err != cudaSuccess) return err;
  kernel<<<int(ctas), C::kThreads, C::kSmemBytes, stream>>>(args, grid);
  err = cudaGetLastError();
  if (err != cudaSuccess || grid.splits == 1) return err;
  // A row of dY that is not finite turns the zero rows of its step into NaN: such sums are made again.
  return reduce_splits(args.workspace, DType::f32, grid.splits, count, args.out, args.out_dtype, stream, &args,
                       dtype_of<typename C::T>);
}

// f(the configuration of a launch of C)
template <class C, class F>
auto with_wgrad_config(const ConvArgs& args, F f) {
  using Narrow = WgradConfig<typename C::T, C::BN, 8>;
  if constexpr (C::BN == 32 && C::CK == 32) {
    if (args.c_in <= Narrow::CK) return f(Narrow());
  }
  return f(C());
}

template <class C>
KernelEntry wgrad_entry(const char* name, DType input) {
  return {{name, Op::wgrad, input, Accum::f32, C::CK, C::BN, 32, C::kDySlots,
           Atom<typename C::T, float, C::BN, GMMA::Major::MN>::name, 0, 90, C::kSmemBytes},
          [](const ConvArgs& args) {
            return with_wgrad_config<C>(args, [&](auto config) {
              return wgrad_workspace(wgrad_grid<decltype(config)>(args).splits, wgrad_count(args), 4);
            });
          },
          [](const ConvArgs& args, cudaStream_t stream) {
            return with_wgrad_config<C>(args,
                                        [&](auto config) { return wgrad_launch<decltype(config)>(args, stream); });
          },
          [](const ConvArgs& args) {
            return with_wgrad_config<C>(args, [&](auto config) { return wgrad_grid<decltype(config)>(args).splits; });
          }};
}

}  // namespace sm90
}  // namespace voxmma
