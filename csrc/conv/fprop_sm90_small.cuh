// fprop and dgrad of the smallest sets on Hopper: as the cluster of fprop_kernel<C, true, true>, but weights are read as the
// caller has them, without a launch that packs them, which takes longer than such a set.
//
// A producer warpgroup copies weights and the rows behind the first chunk, whose rows the consumers gather themselves. A
// weight that is not finite makes sums NaN that do not meet it. So where a sum of a part is not finite, the CTAs of its
// cluster go over the item once more, with what pack_weight would have put in the place of such weights.
#pragma once

#include "fprop_sm90_finish.cuh"
#include "nonfinite.cuh"

namespace voxmma::sm90 {

// The caller's weights as B. Output channels next to each other are its MN-major image, whose columns they are, in atoms
// of kAtom; input channels next to each other the K-major one that pack_weight makes, too.
template <class C, GMMA::Major Major>
struct SmallB {
  using T = typename C::T;
  static constexpr bool kMN = Major == GMMA::Major::MN;
  static constexpr int kRows = kMN ? C::CK : C::BN, kPieces = (kMN ? C::BN : C::CK) / 8;
  static constexpr int kAtom = kMN ? (C::BN % 64 == 0 ? 64 : 32) : C::CK;  // columns
  static constexpr int kAtomRow = kAtom * 2, kAtomBytes = kRows * kAtomRow;
  static constexpr int kStep = kMN ? 16 * kAtomRow : 32;  // bytes from one k16 step to the next
  using Swizzled =
      std::conditional_t<kMN,
                         std::conditional_t<kAtom == 64, GMMA::Layout_MN_SW128_Atom<T>, GMMA::Layout_MN_SW64_Atom<T>>,
                         std::conditional_t<kAtom == 64, GMMA::Layout_K_SW128_Atom<T>, GMMA::Layout_K_SW64_Atom<T>>>;

  __device__ static uint64_t descriptor(char* block) {
    auto sB = cute::make_tensor(
        cute::make_smem_ptr(reinterpret_cast<T*>(block)),
        cute::tile_to_shape(Swizzled{}, cute::Shape<cute::Int<C::BN>, cute::Int<C::CK>>{},
                            std::conditional_t<kMN, cute::Step<cute::_2, cute::_1>, cute::Step<cute::_1, cute::_2>>{}));
    return GMMA::make_gmma_desc<Major>(
        cute::local_tile(sB, cute::Shape<cute::Int<C::BN>, cute::_16>{}, cute::make_coord(0, 0)));
  }

  // A block's pieces that lane `lane` of warp `warp`, of kWarps, has: f(row, where it lies in shared memory).
  static constexpr int kWarps = kWarpGroup / 32;
  static constexpr int kAtOnce = 32 / kPieces, kRowStep = kWarps * kAtOnce;  // rows
  template <class F>
  __device__ static void each_piece(uint32_t block, int warp, int lane, F f) {
    const int piece = lane % kPieces, row0 = warp * kAtOnce + lane / kPieces;
    const uint32_t to = block + piece / (kAtom / 8) * kAtomBytes;
    if (lane >= kAtOnce * kPieces) return;
#pragma unroll
    for (int i = 0; i < (kRows + kRowStep - 1) / kRowStep; ++i) {
      const int row = row0 + i * kRowStep;
      if (kRows % kRowStep != 0 && row >= kRows) break;
      f(row, to + row * kAtomRow + swizzle(row, piece % (kAtom / 8), kAtomRow) * 16);
    }
  }

  // The block of offset k, channels ci0 ... to co0 .... Behind the last channels there are zeros.
  __device__ static void copy(const ConvArgs& args, uint32_t block, int k, int g, int ci0, int co0, int warp,
                              int lane) {
    const int piece = lane % kPieces;
    const Weights& of = args.raw.of;
    const int64_t ld = kMN ? of.in : of.out;
    const int rows = kMN ? args.c_in - ci0 : args.c_out - co0;
    const bool there = piece * 8 < (kMN ? args.c_out - co0 : args.c_in - ci0);
    const T* src = static_cast<const T*>(of.data) + weight_at(of, k, g, ci0, co0) +
                   (warp * kAtOnce + lane / kPieces) * ld + piece * 8;
    each_piece(block, warp, lane, [&](int row, uint32_t to) {
      cp_async16(to, src, there && row < rows ? 16 : 0);
      src += kRowStep * ld;
    });
  }

  // Puts stand_in in the place of what is not finite among the pieces that this thread copied, and says whether there was
  // any.
  __device__ static bool patch(uint32_t block, int warp, int lane) {
    bool any = false;
    each_piece(block, warp, lane, [&](int, uint32_t at) {
      alignas(16) cuda_type<T> e[8];
      *reinterpret_cast<uint4*>(e) = lds_v4(at);
      bool bad = false;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (!is_nonfinite(e[i])) continue;
        e[i] = stand_in(e[i]);
        bad = true;
      }
      if (bad) sts_v4(at, *reinterpret_cast<const int4*>(e));
      any = any || bad;
    });
    return any;
  }
};

// Which image of B the caller's weights are.
inline GMMA::Major major_of(const Weights& of) { return of.out == 1 ? GMMA::Major::MN : GMMA::Major::K; }

// Whether a launch can read the caller's weights: 16 bytes of each row, wherever one begins.
// Wider tiles than kCopiesWeights ones have no registers left for it.
template <class C>
inline constexpr bool kCopiesWeights = C::BN <= 64;
template <class C>
bool copies_weights(const ConvArgs& args) {
  if (!kCopiesWeights<C>) return false;
  const Weights& of = args.raw.of;
  const bool mn = major_of(of) == GMMA::Major::MN;
  return of.dtype == dtype_of<typename C::T> && (mn || of.in == 1) && (mn ? args.c_out : args.c_in) % 8 == 0 &&
         ((mn ? of.in : of.out) | of.first | of.offset | of.group) % 8 == 0 &&
         reinterpret_cast<uintptr_t>(of.data) % 16 == 0;
}

// Stores 1 at `addr` of the shared memory of all `parts` CTAs of the cluster.
__device__ __forceinline__ void tell_cluster(uint32_t addr, int parts) {
  for (int rank = 0; rank < parts; ++rank) {
    asm volatile(
        "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\nst.shared::cluster.u32 [there], 1;\n}\n" ::"r"(
            addr),
        "r"(rank)
        : "memory");
  }
}

// Major: of B. wide: outputs_aligned16.
template <class C, GMMA::Major Major>
__global__ void __launch_bounds__(C::kThreads, 1)
    fprop_small_kernel(const __grid_constant__ ConvArgs args, const __grid_constant__ Parts shared_by, const bool wide,
                       int /*image_blocks*/) {
#if defined(VOXMMA_SM90A)
  using T = typename C::T;
  using Acc = typename C::Acc;
  using B = SmallB<C, Major>;
  constexpr int BN = C::BN, CK = C::CK;
  constexpr int kConsumerThreads = C::kConsumers * kWarpGroup;
  using AtomT = typename Atom<T, Acc, BN, Major>::type;

  extern __shared__ char smem_raw[];
  char* smem = smem_raw + ((1024 - (cute::cast_smem_ptr_to_uint(smem_raw) & 1023)) & 1023);
  const uint32_t smem_u = cute::cast_smem_ptr_to_uint(smem);
  const uint32_t weight_full = smem_u + C::kBarAt, weight_empty = weight_full + C::kStages * 8;
  const uint32_t row_full = weight_empty + C::kStages * 8, row_empty = row_full + C::kRowSlots * 8;
  const uint32_t pass_full = row_empty + C::kRowSlots * 8, pass_empty = pass_full + C::kPassSlots * 8;

  const PlanView& plan = args.plan;
  const int group_id = threadIdx.x / kWarpGroup;
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  const int lane = threadIdx.x % 32;
  const int parts = shared_by.count(), rank = cluster_rank();
  const int blocks_n = (args.c_out + BN - 1) / BN, per_tile = blocks_n * args.groups;
  const uint32_t item = blockIdx.x / parts;
  const ScheduledTile at = load_scheduled(plan.schedule, item / per_tile);
  const int within = int(item % per_tile), g = within / blocks_n, col0 = within % blocks_n * BN;

  if (threadIdx.x == 0) {
    constexpr int kConsumerWarps = C::kConsumers * 4 * kReleases;
    for (int i = 0; i < C::kStages; ++i) {
      mbarrier_init(weight_full + i * 8, kWarpGroup);
      mbarrier_init(weight_empty + i * 8, kConsumerWarps);
    }
    for (int i = 0; i < C::kRowSlots; ++i) {
      mbarrier_init(row_full + i * 8, kWarpGroup);
      mbarrier_init(row_empty + i * 8, kConsumerWarps);
    }
    for (int i = 0; i < C::kPassSlots; ++i) {
      mbarrier_init(pass_full + i * 8, 1);
      mbarrier_init(pass_empty + i * 8, kConsumerWarps);
    }
    cutlass::arch::fence_barrier_init();
  }
  const auto clear_zero_rows = [&](int threads) {
    for (int i = threadIdx.x % threads; i < C::kRowSlots * C::kRowBytes / 4; i += threads) {
      const int slot = i / (C::kRowBytes / 4), word = i % (C::kRowBytes / 4);
      sts_u32(smem_u + C::kRowAt + slot * C::kRowSlotBytes + kUniqueMax * C::kRowBytes + word * 4, 0);
    }
  };
  clear_zero_rows(C::kThreads);
  // What any CTA of the cluster tells all: a sum is not finite, and a weight is not.
  const uint32_t sum_told = smem_u + C::kToldAt, weight_told = sum_told + 4;
  if (threadIdx.x < 2) sts_u32(sum_told + threadIdx.x * 4, 0);
  const int chunks = (args.c_in + CK - 1) / CK;
  const int chunk_begin = shared_by.chunk(rank, chunks), chunk_end = shared_by.chunk_end(rank, chunks);
  const char* src = static_cast<const char*>(args.a) + g * args.a_group * 2;
  const uint32_t row_pieces = uint32_t(args.lda / 8);
  uint32_t first_frag = 0;  // of the producer's lanes, on its way with the pass
  if (group_id == C::kConsumers && lane < kFrags) {
    asm volatile("ld.global.nc.u32 %0, [%1];\n"
                 : "=r"(first_frag)
                 : "l"(plan.frag + int64_t(at.first_pass) * kFrags + lane));
  }
  const Pass first = load_pass(plan, at.first_pass);
  // Whether the first pass has rows for this CTA: then the consumers gather them for its first chunk.
  const bool first_rows = first.uniq_count > 0 && shared_by.offsets_of(rank, plan.kernel_volume, first) != 0;
  __syncthreads();

  if (group_id == C::kConsumers) {  // ---- producer warpgroup ----
    const int producer = warp - C::kConsumers * 4;
    RingState<C::kStages> ws;
    RingState<C::kRowSlots> rs;
    RingState<C::kPassSlots> ps;

    // The rows that come next, chunk by chunk; the consumers gather the first ones themselves.
    struct {
      int pass = 0, chunk, count = 0;
      RowIds<kUniqueMax, B::kWarps> ids;
    } next;
    next.chunk = chunk_end;
    const auto open_pass = [&](int p) {  // the first one from p on that has rows
      for (; p < at.passes; ++p) {
        const Pass pass = p == 0 ? first : load_pass(plan, at.first_pass + p);
        if (pass.uniq_count == 0 || shared_by.offsets_of(rank, plan.kernel_volume, pass) == 0) continue;
        next.ids.load(plan.uniq + int64_t(pass.uniq_begin4) * 4, pass.uniq_count, row_pieces, producer, lane);
        next.count = pass.uniq_count;
        next.chunk = chunk_begin;
        break;
      }
      next.pass = p;
    };
    const auto gather_next = [&] {
      if (next.chunk == chunk_end) open_pass(next.pass + 1);
      if (next.pass >= at.passes) return;
      wait_empty(row_empty + rs.index * 8, rs.phase);
      next.ids.template gather<C::kRowBytes, 0, kUniqueMax, 4>(smem_u + C::kRowAt + rs.index * C::kRowSlotBytes,
                                                               src + next.chunk * C::kRowBytes, next.count,
                                                               (args.c_in - next.chunk * CK + 7) / 8, producer, lane);
      mbarrier_arrive_cp_async(row_full + rs.index * 8);
      rs.advance();
      ++next.chunk;
    };
    for (bool second = false;; second = true) {
      bool bad = false;  // a weight that this thread copied
      next.chunk = chunk_end;
      if (first_rows && !second) {
        mbarrier_arrive(row_full);
        rs.advance();
        next.pass = 0;
        if (chunk_begin + 1 < chunk_end) {
          open_pass(0);
          ++next.chunk;
        }
      } else {
        next.pass = -1;
        gather_next();
      }

      for (int p = 0; p < at.passes; ++p) {
        const int id = at.first_pass + p;
        const Pass pass = p == 0 ? first : load_pass(plan, id);
        const uint32_t frag = p == 0 ? first_frag : lane < kFrags ? __ldg(plan.frag + int64_t(id) * kFrags + lane) : 0;
        const uint32_t share = shared_by.offsets_of(rank, plan.kernel_volume, pass);
        const uint32_t used = __reduce_or_sync(0xffffffffu, frag) & share;
        const bool rows = pass.uniq_count > 0 && share != 0;
        if (producer == 0) {
          if (lane == 0) {
            wait_empty(pass_empty + ps.index * 8, ps.phase);
            const uint32_t bar = pass_full + ps.index * 8;
            sts_v4(smem_u + C::kHeadAt + ps.index * 16, make_int4(used, p + 1 == at.passes, 0, rows));
            const int begin = max(__ffs(share) - 1, 0), count = __popc(share);  // the share has no gaps
            arrive_expect(bar, count * kTileM * 2 + kFrags * 4);
            if (count > 0) {
              bulk_copy(smem_u + C::kLocalAt + ps.index * C::kLocalBytes + begin * kTileM * 2,
                        plan.local + (int64_t(at.tile) * plan.kernel_volume + pass.k_begin + begin) * kTileM,
                        count * kTileM * 2, bar);
            }
            bulk_copy(smem_u + C::kFragAt + ps.index * kFrags * 4, plan.frag + int64_t(id) * kFrags, kFrags * 4, bar);
          }
          __syncwarp();
          ps.advance();
        }
        if (!rows) continue;
        for (int chunk = chunk_begin; chunk < chunk_end; ++chunk) {
          int ahead = C::kStages;  // blocks before the next rows
          for (uint32_t rest = used; rest != 0; --ahead) {
            if (ahead == 0) gather_next();
            const uint32_t to = smem_u + C::kWeightAt + ws.index * C::kWeightBytes, full = weight_full + ws.index * 8;
            int k = 0;
            wait_empty(weight_empty + ws.index * 8, ws.phase);
#pragma unroll 1
            for (int i = 0; i < C::kPair; ++i) {
              if (rest != 0) k = __ffs(rest) - 1;  // an odd one out is there twice, to be multiplied by zeros
              rest &= rest - 1;
              B::copy(args, to + i * C::kBlockBytes, pass.k_begin + k, g, chunk * CK, col0, producer, lane);
            }
            if (second) {
              cp_async_wait_all();
#pragma unroll 1
              for (int i = 0; i < C::kPair; ++i) bad |= B::patch(to + i * C::kBlockBytes, producer, lane);
              mbarrier_arrive(full);
            } else {
              mbarrier_arrive_cp_async(full);
            }
            ws.advance();
          }
          if (ahead >= 0) gather_next();
        }
      }
      cp_async_wait_all();
      cluster_publish();  // other CTAs store where rows and weights were
      cluster_wait();
      if (bad) tell_cluster(weight_told, parts);
      cluster_publish();
      cluster_wait();
      if (second || lds_u32(sum_told) == 0) return;
      __syncthreads();              // the consumers have added their sums,
      clear_zero_rows(kWarpGroup);  // which lay over the rings
      cutlass::arch::fence_view_async_shared();
      __syncthreads();
    }
  } else {  // ---- consumer warpgroups ----
    if (first_rows) {
      RowIds<kUniqueMax, C::kConsumers * 4> ids;
      ids.load(plan.uniq + int64_t(first.uniq_begin4) * 4, first.uniq_count, row_pieces, warp, lane);
      ids.template gather<C::kRowBytes, 0, kUniqueMax, 4>(smem_u + C::kRowAt, src + chunk_begin * C::kRowBytes,
                                                          first.uniq_count, (args.c_in - chunk_begin * CK + 7) / 8,
                                                          warp, lane);
    }
    RingState<C::kRowSlots> rs;
    RingState<C::kPassSlots> ps;
    const int lane_row = lane & 15, lane_half = lane >> 4;
    const uint64_t desc0 = B::descriptor(smem + C::kWeightAt);

    // As in fprop_kernel: every warp waits for and releases every block, used or not.
    uint32_t streamed = 0, seen = 0;
    auto skip_to = [&](uint32_t block) {
#pragma unroll 1
      for (; seen < block; ++seen) {
        wait_full(weight_full + seen % C::kStages * 8, seen / C::kStages & 1);
        release(weight_empty + seen % C::kStages * 8, lane);
      }
    };
    const int row16 = group_id * 64 + (warp % 4) * 16;  // first tile row of this warp
    Accumulator<Acc, BN> acc;
    for (bool second = false;; second = true) {
      acc.clear();
      bool gathered = first_rows && !second;  // is the next chunk's gather the consumers' own?
      for (bool last = false; !last;) {
        wait_full(pass_full + ps.index * 8, ps.phase);
        const uint4 head = lds_v4(smem_u + C::kHeadAt + ps.index * 16);
        last = head.y != 0;
        const uint32_t used = head.x;
        const uint4 f = lds_v4(smem_u + C::kFragAt + ps.index * kFrags * 4 + group_id * 16);
        const uint32_t mine = (f.x | f.y | f.z | f.w) & used;
        const uint32_t local = smem_u + C::kLocalAt + ps.index * C::kLocalBytes + (row16 + lane_row) * 2;
        if (head.w != 0) {
          for (int chunk = chunk_begin; chunk < chunk_end; ++chunk) {
            uint32_t rows = smem_u + C::kRowAt + rs.index * C::kRowSlotBytes;
            asm volatile("" : "+r"(rows));
            if (gathered) {
              gathered = false;
              cp_async_wait_all();
              asm volatile("bar.sync 1, %0;\n" ::"n"(kConsumerThreads) : "memory");
            } else {
              wait_full(row_full + rs.index * 8, rs.phase);
            }
            constexpr int kBlockSteps = CK / 16, kSteps = C::kPair * kBlockSteps, kHalf = kSteps / 2;
            uint32_t a[kSteps][4];
            uint32_t todo = mine;
            uint32_t at_row[C::kPair];
            auto next_stage = [&]() {
              int k[C::kPair];
              k[0] = __ffs(todo != 0 ? todo : used) - 1;  // behind the last one any whose indices are there
              uint32_t before = __popc(used & ((1u << k[0]) - 1));
              if constexpr (C::kPair == 2) {
                if (before % 2 != 0) k[0] = 31 - __clz(used & ((1u << k[0]) - 1));
                const uint32_t above = used & ~((2u << k[0]) - 1);
                k[1] = __ffs(above) - 1;
                todo &= k[1] < 0 ? 0 : ~((2u << k[1]) - 1);
                before /= 2;
              } else {
                todo &= todo - 1;
              }
#pragma unroll
              for (int i = 0; i < C::kPair; ++i) {
                const int idx = k[i] < 0 ? kMissing : lds_u16(local + k[i] * (kTileM * 2));
                at_row[i] = (rows + idx * C::kRowBytes) | swizzle(idx, lane_half, C::kRowBytes) * 16;
              }
              return before;
            };
            auto load = [&](int s) { ldmatrix_x4(a[s], at_row[s / kBlockSteps] ^ (32 * (s % kBlockSteps))); };
            bool more = todo != 0;
            uint32_t block = 0;
            if (more) {
              block = streamed + next_stage();
#pragma unroll
              for (int s = 0; s < kSteps; ++s) load(s);
            }
            while (more) {
              const uint32_t now = block;
              const int stage = now % C::kStages;
              const uint64_t desc = advance(desc0, stage * (C::kWeightBytes >> 4));
              auto step = [&](int s) {
                wgmma<AtomT>(
                    acc, a[s],
                    advance(desc, s / kBlockSteps * (C::kBlockBytes >> 4) + s % kBlockSteps * (B::kStep >> 4)));
              };
              skip_to(now);
              wait_full(weight_full + stage * 8, now / C::kStages & 1);
              cutlass::arch::fence_view_async_shared();  // written by cp.async, read through the async proxy
              acc.fence();
              cute::warpgroup_arrive();
#pragma unroll
              for (int s = 0; s < kHalf; ++s) step(s);
              cute::warpgroup_commit_batch();
#pragma unroll
              for (int s = kHalf; s < kSteps; ++s) step(s);
              cute::warpgroup_commit_batch();
              more = todo != 0;
              block = streamed + next_stage();
              cute::warpgroup_wait<1>();
#pragma unroll
              for (int s = 0; s < kHalf; ++s) load(s);
              cute::warpgroup_wait<0>();
              acc.fence();
              release(weight_empty + stage * 8, lane);
              ++seen;
#pragma unroll
              for (int s = kHalf; s < kSteps; ++s) load(s);
            }
            streamed += (__popc(used) + C::kPair - 1) / C::kPair;
            skip_to(streamed);
            release(row_empty + rs.index * 8, lane);
            rs.advance();
          }
        }
        release(pass_empty + ps.index * 8, lane);
        ps.advance();
      }

      // ---- sums over the cluster, epilogue, one rounding, rows scattered to the caller's order ----
      ClusterSums<C> sums(smem_u, warp, lane, rank, parts, plan.order + int64_t(at.tile) * kTileM);
      cluster_arrive();  // every ring has run dry
      float zero = 0;    // or NaN
#pragma unroll
      for (int j = 0; j < BN / 8; ++j) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float2 v = acc.pair(j, half);
          zero = fmaf(v.x, 0.f, fmaf(v.y, 0.f, zero));
        }
      }
      const bool finite = __all_sync(~0u, zero == 0);
      cluster_wait();
      sums.store(acc);
      if (!finite && lane == 0) tell_cluster(sum_told, parts);
      sums.publish();
      const int col = sums.column(), left = args.c_out - col0;
      const int64_t channel = int64_t(g) * args.c_out + col0 + col;
      float factor[4] = {1, 1, 1, 1}, summand[4] = {0, 0, 0, 0};
      const bool scales = args.channels.scale.values != nullptr || args.channels.var.values != nullptr;
      const bool adds = scales || args.channels.bias.values != nullptr || args.channels.mean.values != nullptr ||
                        args.channels.shift.values != nullptr;
      if (adds) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (col + e >= left) break;
          const Folded v = fold_channel(args.channels, channel + e);
          factor[e] = static_cast<float>(v.factor);
          summand[e] = static_cast<float>(v.summand);
        }
      }
      cluster_wait();
      sums.each_row([&](int row, float (&v)[4]) {
        if (col >= left) return;
#pragma unroll
        for (int e = 0; e < 4; ++e) v[e] = scales ? fmaf(v[e], factor[e], summand[e]) : adds ? v[e] + summand[e] : v[e];
        finish<cuda_type<T>>(args, row, channel, v, left - col, wide);
      });
      if (second && lds_u32(weight_told) != 0) {
        asm volatile("bar.sync 1, %0;\n" ::"n"(kConsumerThreads) : "memory");  // other threads stored the rows
        for (int frag = kFrags * rank / parts + warp; frag < kFrags * (rank + 1) / parts; frag += C::kConsumers * 4) {
          if (!scales && !has_epilogue(args)) {
            add_nonfinite<dtype_of<T>, false, false>(args, at, frag * kFragRows, g, col0, BN);
            continue;
          }
          redo_nonfinite<dtype_of<T>, false>(args, at, frag * kFragRows, g, col0, BN,
                                             [&](int64_t row, int64_t of, float (&sum)[1]) {
                                               const Folded v = fold_channel(args.channels, of);
                                               const auto add = static_cast<float>(v.summand);
                                               if (scales)
                                                 sum[0] = fmaf(sum[0], static_cast<float>(v.factor), add);
                                               else if (adds)
                                                 sum[0] += add;
                                               finish<cuda_type<T>>(args, row, of, sum, 1, true);
                                             });
        }
      }
      if (second || lds_u32(sum_told) == 0) return;
      __syncthreads();
      __syncthreads();  // the rings are clear
    }
  }
#endif
}

}  // namespace voxmma::sm90
