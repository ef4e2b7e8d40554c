// fprop and dgrad on Hopper: wgmma with A gathered from shared memory into registers, weights by bulk copy.
//
// A persistent CTA walks its share of the items (scheduled tile, output-channel block, group). One producer warpgroup
// feeds three rings:
//   pass ring    local indices [k_count][256], fragment masks and a header          bulk copies, warp 0
//   row ring     the pass's unique input rows, one chunk of CK channels             cp.async, warps 1-3
//   weight ring  BN x CK blocks of kPair offsets and one chunk, in the wgmma image  bulk copies, warp 0
// and four consumer warpgroups of 64 tile rows each hold a 64 x BN accumulator in registers over all offsets, chunks
// and passes of the item. A stage of offsets that no row of a warpgroup uses is skipped by that warpgroup; an offset
// that no row of the tile uses is not even loaded. A reads cost nothing extra: ldmatrix takes one address a row.
//
// Where the weights of a launch fit into the weight ring, they stay there (Resident): warpgroups take their own offsets,
// without waiting for those of others.
//
// Where there are fewer items than multiprocessors, a cluster of CTAs shares an item (Parts in common.cuh). When the
// mainloops are over, every CTA adds a share of the rows over the whole cluster, in the order of the ranks (ClusterSums).
//
// Registers: 640 threads x 96 at launch = producers 128 x 32 + consumers 512 x 112.
#pragma once

#include <algorithm>
#include <type_traits>

#include "../common/cluster.cuh"
#include "fprop_sm90_config.cuh"
#include "fprop_sm90_shape.cuh"
#include "nonfinite.cuh"

namespace voxmma::sm90 {

// Adds the products of a warpgroup's rows under the offsets `todo` of a pass, whose weights lie in shared memory from that
// of its first offset (`desc`) on. While the products of two offsets are on their way, the rows of the next two are loaded.
//   local, rows  shared addresses of this lane's local index of the first offset, and of row 0
template <class C>
__device__ __forceinline__ void multiply_resident(Accumulator<typename C::Acc, C::BN>& acc, uint32_t todo,
                                                  uint32_t local, uint32_t rows, int lane_half, uint64_t desc) {
  using AtomT = typename Atom<typename C::T, typename C::Acc, C::BN, GMMA::Major::K>::type;
  constexpr int kBlockSteps = C::CK / 16, kSteps = C::kPair * kBlockSteps;
  if (todo == 0) return;
  uint32_t a[2][kSteps][4];
  int k[2][C::kPair];
  const auto load = [&](auto to) {
    constexpr int kTo = decltype(to)::value;
#pragma unroll
    for (int i = 0; i < C::kPair; ++i) {
      const int found = __ffs(todo) - 1;  // -1: none is left, zeros by the weights of any
      todo &= todo - 1;
      const int idx = found < 0 ? kMissing : lds_u16(local + found * (kTileM * 2));
      const uint32_t at = (rows + idx * C::kRowBytes) | swizzle(idx, lane_half, C::kRowBytes) * 16;
      k[kTo][i] = max(found, 0);
#pragma unroll
      for (int s = 0; s < kBlockSteps; ++s) ldmatrix_x4(a[kTo][i * kBlockSteps + s], at ^ (32 * s));
    }
  };
  const auto multiply = [&](auto from) {  // returns whether there is more; what is loaded next is behind it
    constexpr int kFrom = decltype(from)::value;
    acc.fence();
    cute::warpgroup_arrive();
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      wgmma<AtomT>(acc, a[kFrom][s],
                   advance(desc, k[kFrom][s / kBlockSteps] * (C::kBlockBytes >> 4) + 2 * (s % kBlockSteps)));
    }
    cute::warpgroup_commit_batch();
    const bool more = todo != 0;
    cute::warpgroup_wait<1>();  // the products before these have read their rows
    if (more) load(std::integral_constant<int, 1 - kFrom>());
    return more;
  };
  load(std::integral_constant<int, 0>());
  while (multiply(std::integral_constant<int, 0>()) && multiply(std::integral_constant<int, 1>())) {
  }
  cute::warpgroup_wait<0>();
  acc.fence();
}

// Shared: a cluster of shared_by.count() CTAs to an item, and no CTA takes a second one; the columns of a block of the
// weight image may be those of image_blocks items. Resident: keeps_weights.
// Fused: with an epilogue, for which a launch that is not shared has a kernel of its own: in one kernel they cost the plain
// mainloop registers. wide: outputs_aligned16.
template <class C, bool Shared, bool Fused, bool Resident = false>
__global__ void __launch_bounds__(C::kThreads, 1)
    fprop_kernel(const __grid_constant__ ConvArgs args, const __grid_constant__ Parts shared_by, const bool wide,
                 const int image_blocks) {
#if defined(VOXMMA_SM90A)
  using T = typename C::T;
  using Acc = typename C::Acc;
  constexpr int BN = C::BN, CK = C::CK;
  using AtomT = typename Atom<T, Acc, BN, GMMA::Major::K>::type;

  extern __shared__ char smem_raw[];
  char* smem = smem_raw + ((1024 - (cute::cast_smem_ptr_to_uint(smem_raw) & 1023)) & 1023);
  const uint32_t smem_u = cute::cast_smem_ptr_to_uint(smem);
  // Barriers, 8 bytes each: full and empty ones of every ring.
  const uint32_t weight_full = smem_u + C::kBarAt, weight_empty = weight_full + C::kStages * 8;
  const uint32_t row_full = weight_empty + C::kStages * 8, row_empty = row_full + C::kRowSlots * 8;
  const uint32_t pass_full = row_empty + C::kRowSlots * 8, pass_empty = pass_full + C::kPassSlots * 8;

  const PlanView& plan = args.plan;
  const int blocks_n = (args.c_out + BN - 1) / BN;
  const int chunks = (args.c_in + CK - 1) / CK;
  const int per_tile = blocks_n * args.groups;
  const uint32_t items = uint32_t(plan.tiles) * per_tile;
  const int group_id = threadIdx.x / kWarpGroup;
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  const int lane = threadIdx.x % 32;
  // Items are dealt to CTAs, or to clusters, whose CTAs take chunks [chunk_begin, chunk_end) and some offsets of them.
  const int parts = Shared ? shared_by.count() : 1, rank = Shared ? cluster_rank() : 0;
  const auto worker = [&] { return blockIdx.x / parts; };
  const auto workers = [&] { return gridDim.x / parts; };
  const int chunk_begin = Shared ? shared_by.chunk(rank, chunks) : 0;
  const int chunk_end = Shared ? shared_by.chunk_end(rank, chunks) : chunks;

  if (threadIdx.x == 0) {
    constexpr int kConsumerWarps = C::kConsumers * 4 * kReleases;
    for (int i = 0; i < C::kStages; ++i) {
      mbarrier_init(weight_full + i * 8, 1);
      mbarrier_init(weight_empty + i * 8, kConsumerWarps);
    }
    for (int i = 0; i < C::kRowSlots; ++i) {
      mbarrier_init(row_full + i * 8, C::kGatherWarps * 32);
      mbarrier_init(row_empty + i * 8, kConsumerWarps);
    }
    for (int i = 0; i < C::kPassSlots; ++i) {
      mbarrier_init(pass_full + i * 8, 1);
      mbarrier_init(pass_empty + i * 8, kConsumerWarps);
    }
    cutlass::arch::fence_barrier_init();
  }
  for (int i = threadIdx.x; i < C::kRowSlots * C::kRowBytes / 4; i += C::kThreads) {  // the zero rows
    const int slot = i / (C::kRowBytes / 4), word = i % (C::kRowBytes / 4);
    sts_u32(smem_u + C::kRowAt + slot * C::kRowSlotBytes + kUniqueMax * C::kRowBytes + word * 4, 0);
  }
  __syncthreads();

  if (group_id == C::kConsumers) {  // ---- producer warpgroup ----
    cutlass::arch::warpgroup_reg_dealloc<32>();
    PassWalk walk(plan.schedule, plan.tiles, worker(), workers(), per_tile);
    if (warp == C::kConsumers * 4) {  // weights and pass data
      const uint32_t flags = load_flags(args.raw);
      if (Resident && lane == 0) {
        const int bytes = plan.kernel_volume * C::kBlockBytes;
        arrive_expect(weight_full, bytes);
        bulk_copy(smem_u + C::kWeightAt, args.b, bytes, weight_full);
      }
      RingState<C::kStages> ws;
      RingState<C::kPassSlots> ps;
      Pass next = walk.done() ? Pass{} : load_pass(plan, walk.pass());
      uint32_t next_frag = walk.done() || lane >= kFrags ? 0 : __ldg(plan.frag + int64_t(walk.pass()) * kFrags + lane);
      while (!walk.done()) {
        const Pass pass = next;
        uint32_t used = __reduce_or_sync(0xffffffffu, next_frag);  // offsets any row of the tile uses
        bool rows = used != 0;                                     // are they copied?
        if constexpr (Shared) {
          const uint32_t share = shared_by.offsets_of(rank, plan.kernel_volume, pass);
          used &= share;
          rows = rows && share != 0;
        }
        const bool nonfinite = any_nonfinite(flags);
        const int id = walk.pass(), tile = walk.tile(), within = walk.within();
        const bool last = walk.last_pass();
        const int ahead = walk.peek();
        if (ahead >= 0) {
          next = load_pass(plan, ahead);
          next_frag = lane < kFrags ? __ldg(plan.frag + int64_t(ahead) * kFrags + lane) : 0;
        }
        if (lane == 0) {
          wait_empty(pass_empty + ps.index * 8, ps.phase);
          const uint32_t bar = pass_full + ps.index * 8;
          sts_v4(smem_u + C::kHeadAt + ps.index * 16, make_int4(used, last, nonfinite, Resident ? pass.k_begin : rows));
          const int local_bytes = pass.k_count * kTileM * 2;
          arrive_expect(bar, local_bytes + kFrags * 4);
          bulk_copy(smem_u + C::kLocalAt + ps.index * C::kLocalBytes,
                    plan.local + (int64_t(tile) * plan.kernel_volume + pass.k_begin) * kTileM, local_bytes, bar);
          bulk_copy(smem_u + C::kFragAt + ps.index * kFrags * 4, plan.frag + int64_t(id) * kFrags, kFrags * 4, bar);
          // image[g][nb][offset][chunk]: `within` counts blocks of n fastest, then groups
          const int nb = within % blocks_n, g = within / blocks_n, per = Shared ? image_blocks : 1;
          const int image_bytes = per * C::kBlockBytes;
          const char* image =
              static_cast<const char*>(args.b) + nb % per * C::kBlockBytes +
              (int64_t(g * ((blocks_n + per - 1) / per) + nb / per) * plan.kernel_volume + pass.k_begin) * chunks *
                  image_bytes;
          for (int chunk = chunk_begin; !Resident && chunk < chunk_end; ++chunk) {
            for (uint32_t rest = used; rest != 0;) {
              wait_empty(weight_empty + ws.index * 8, ws.phase);
              arrive_expect(weight_full + ws.index * 8, C::kWeightBytes);
              int k = 0;
#pragma unroll
              for (int i = 0; i < C::kPair; ++i) {
                if (rest != 0) k = __ffs(rest) - 1;  // an odd one out is there twice, to be multiplied by zeros
                rest &= rest - 1;
                bulk_copy(smem_u + C::kWeightAt + ws.index * C::kWeightBytes + i * C::kBlockBytes,
                          image + int64_t(k * chunks + chunk) * image_bytes, C::kBlockBytes,
                          weight_full + ws.index * 8);
              }
              ws.advance();
            }
          }
        }
        __syncwarp();
        ps.advance();
        walk.advance();
      }
    } else {  // rows
      const int gather_warp = warp - (C::kConsumers * 4 + 1);
      RingState<C::kRowSlots> rs;
      const uint32_t row_pieces = uint32_t(args.lda / 8);  // 16-byte pieces a row
      while (!walk.done()) {
        const Pass pass = load_pass(plan, walk.pass());
        const int g = walk.within() / blocks_n;
        if (pass.uniq_count > 0 && (!Shared || shared_by.offsets_of(rank, plan.kernel_volume, pass) != 0)) {
          RowIds<kUniqueMax, C::kGatherWarps> ids;
          ids.load(plan.uniq + int64_t(pass.uniq_begin4) * 4, pass.uniq_count, row_pieces, gather_warp, lane);
          const char* src = static_cast<const char*>(args.a) + g * args.a_group * 2;
#pragma unroll 1
          for (int chunk = chunk_begin; chunk < chunk_end; ++chunk) {
            wait_empty(row_empty + rs.index * 8, rs.phase);
            ids.gather<C::kRowBytes, 0, kUniqueMax, 4>(smem_u + C::kRowAt + rs.index * C::kRowSlotBytes,
                                                       src + chunk * C::kRowBytes, pass.uniq_count,
                                                       (args.c_in - chunk * CK + 7) / 8, gather_warp, lane);
            mbarrier_arrive_cp_async(row_full + rs.index * 8);
            rs.advance();
          }
        }
        walk.advance();
      }
      cp_async_wait_all();
    }
    if constexpr (Shared) {  // as often as the consumers
      cluster_publish();     // other CTAs store where rows and weights were
      cluster_wait();
      cluster_arrive();
      cluster_wait();
    }
  } else {  // ---- consumer warpgroups ----
    cutlass::arch::warpgroup_reg_alloc<112>();
    RingState<C::kRowSlots> rs;
    RingState<C::kPassSlots> ps;
    const int lane_row = lane & 15, lane_half = lane >> 4;

    // B of one stage: (BN, CK) K-major with the row's swizzle; k16 step s starts 32 bytes further.
    using SmemAtom = std::conditional_t<C::kRowBytes == 128, GMMA::Layout_K_SW128_Atom<T>, GMMA::Layout_K_SW64_Atom<T>>;
    auto sB = cute::make_tensor(cute::make_smem_ptr(reinterpret_cast<T*>(smem + C::kWeightAt)),
                                cute::tile_to_shape(SmemAtom{}, cute::Shape<cute::Int<BN>, cute::Int<CK>>{}));
    const uint64_t desc0 = GMMA::make_gmma_desc<GMMA::Major::K>(
        cute::local_tile(sB, cute::Shape<cute::Int<BN>, cute::_16>{}, cute::make_coord(0, 0)));

    // Weight blocks are counted through the whole kernel. Every warp waits for and releases every block, used or not:
    // a barrier tells its last phase only by parity, so nobody may run ahead or fall behind by a whole ring.
    if (Resident) wait_full(weight_full, 0);
    uint32_t streamed = 0;  // blocks before the current chunk
    uint32_t seen = 0;      // blocks released by this warp
    auto skip_to = [&](uint32_t block) {
#pragma unroll 1
      for (; seen < block; ++seen) {
        wait_full(weight_full + seen % C::kStages * 8, seen / C::kStages & 1);
        release(weight_empty + seen % C::kStages * 8, lane);
      }
    };

    for (uint32_t round = 0, item; (item = dealt(round, worker(), workers())) < items; ++round) {
      const int tile = __ldg(&plan.schedule[item / per_tile].tile), within = int(item % per_tile);
      // The first rows of a tile have the most neighbours, the last ones the fewest: the warpgroups swap places.
      const int block = C::kSwap && round % 2 != 0 ? C::kConsumers - 1 - group_id : group_id;
      const int row16 = block * 64 + (warp % 4) * 16;  // first tile row of this warp
      Accumulator<Acc, BN> acc;                        // (64, BN) of this warpgroup
      acc.clear();
      int out_row[2];  // rows g and g + 8 of the warp's 16, loaded long before they are needed
      out_row[0] = __ldg(plan.order + int64_t(tile) * kTileM + row16 + lane / 4);
      out_row[1] = __ldg(plan.order + int64_t(tile) * kTileM + row16 + lane / 4 + 8);
      bool last = false;
      while (!last) {
        wait_full(pass_full + ps.index * 8, ps.phase);
        const uint4 head = lds_v4(smem_u + C::kHeadAt + ps.index * 16);
        last = head.y != 0;
        const uint32_t used = head.x;
        const uint4 f = lds_v4(smem_u + C::kFragAt + ps.index * kFrags * 4 + block * 16);
        const uint32_t mine = (f.x | f.y | f.z | f.w) & used;  // offsets this warpgroup's 64 rows use
        const uint32_t local =
            smem_u + C::kLocalAt + ps.index * C::kLocalBytes + (row16 + lane_row) * 2;  // [k_count][256]
        if (Shared ? head.w != 0 : used != 0) {
          for (int chunk = chunk_begin; chunk < chunk_end; ++chunk) {
            uint32_t rows = smem_u + C::kRowAt + rs.index * C::kRowSlotBytes;
            asm volatile("" : "+r"(rows));  // computed here, not again for every offset
            wait_full(row_full + rs.index * 8, rs.phase);
            if constexpr (Resident) {
              multiply_resident<C>(acc, mine, local, rows, lane_half, advance(desc0, head.w * (C::kBlockBytes >> 4)));
              release(row_empty + rs.index * 8, lane);
              rs.advance();
              continue;
            }
            constexpr int kBlockSteps = CK / 16, kSteps = C::kPair * kBlockSteps, kHalf = kSteps / 2;
            uint32_t a[kSteps][4];  // A of a stage: 16 rows a warp x CK of kPair offsets
            uint32_t todo = mine;
            uint32_t at[C::kPair];  // shared address of this lane's row of A, of the stage's offsets
            // The next stage with an offset that the warpgroup uses: its number in the chunk.
            auto next_stage = [&]() {
              int k[C::kPair];
              k[0] = max(__ffs(todo) - 1, 0);
              uint32_t before = __popc(used & ((1u << k[0]) - 1));
              if constexpr (C::kPair == 2) {
                if (before % 2 != 0) k[0] = 31 - __clz(used & ((1u << k[0]) - 1));
                const uint32_t above = used & ~((2u << k[0]) - 1);
                k[1] = __ffs(above) - 1;  // -1: the odd one out
                todo &= k[1] < 0 ? 0 : ~((2u << k[1]) - 1);
                before /= 2;
              } else {
                todo &= todo - 1;
              }
#pragma unroll
              for (int i = 0; i < C::kPair; ++i) {
                const int idx = k[i] < 0 ? kMissing : lds_u16(local + k[i] * (kTileM * 2));  // kMissing: the zero row
                at[i] = (rows + idx * C::kRowBytes) | swizzle(idx, lane_half, C::kRowBytes) * 16;
              }
              return before;
            };
            auto load = [&](int s) {
              ldmatrix_x4(a[s], at[s / kBlockSteps] ^ (32 * (s % kBlockSteps)));
            };  // piece 2 s + lane_half
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
                wgmma<AtomT>(acc, a[s], advance(desc, s / kBlockSteps * (C::kBlockBytes >> 4) + 2 * (s % kBlockSteps)));
              };
              skip_to(now);  // other warpgroups' offsets
              wait_full(weight_full + stage * 8, now / C::kStages & 1);
              acc.fence();
              cute::warpgroup_arrive();
#pragma unroll
              for (int s = 0; s < kHalf; ++s) step(s);
              cute::warpgroup_commit_batch();
#pragma unroll
              for (int s = kHalf; s < kSteps; ++s) step(s);
              cute::warpgroup_commit_batch();
              // The halves of A are refilled with the next offset's rows as their products finish.
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

      // ---- epilogue in fp32, one rounding, rows scattered to the caller's order ----
      const int g = within / blocks_n, col0 = within % blocks_n * BN;
      if constexpr (Shared) {
        // Behind the first barrier every ring of the cluster has run dry, behind the second one all sums are there.
        ClusterSums<C> sums(smem_u, warp, lane, rank, parts, plan.order + int64_t(tile) * kTileM);
        cluster_arrive();
        cluster_wait();
        sums.store(acc);
        sums.publish();
        cluster_wait();
        const int col = sums.column(), left = args.c_out - col0;
        sums.each_row([&](int row, float (&v)[4]) {
          if (col >= left) return;
          finish<cuda_type<T>>(args, row, int64_t(g) * args.c_out + col0 + col, v, left - col, wide);
        });
        if (lds_u32(smem_u + C::kHeadAt + 8) != 0) {  // as below; the first header is still there
          asm volatile("bar.sync 1, %0;\n" ::"n"(C::kConsumers * kWarpGroup) : "memory");
          for (int frag = kFrags * rank / parts + warp; frag < kFrags * (rank + 1) / parts; frag += C::kConsumers * 4) {
            add_nonfinite<dtype_of<T>>(args, load_scheduled(plan.schedule, item / per_tile), frag * kFragRows, g, col0,
                                       BN);
          }
        }
        return;
      }
      int quad = lane % 4;
      asm volatile(
          ""
          : "+r"(quad));  // keeps ptxas from computing the addresses ahead of the mainloop, in registers it needs
      const int left = args.c_out - col0;  // columns of this block that exist
      const float* bias = args.bias ? static_cast<const float*>(args.bias) + g * args.c_out + col0 : nullptr;
      const auto store = [&](const auto& acc) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const bool row_ok = out_row[half] >= 0;
          const int64_t base = int64_t(row_ok ? out_row[half] : 0) * args.ldo + g * args.c_out + col0;
          auto value = [&](int j) {
            float2 v = acc.pair(j, half);
            const int col = 8 * j + 2 * quad;
            if (bias != nullptr) {
              v.x += col < left ? __ldg(bias + col) : 0.f;
              v.y += col + 1 < left ? __ldg(bias + col + 1) : 0.f;
            }
            return v;
          };
          if (args.out_dtype == DType::f32) {
            float* out = static_cast<float*>(args.out) + base;
#pragma unroll
            for (int j = 0; j < BN / 8; ++j) {
              const float2 v = value(j);
              const int col = 8 * j + 2 * quad;
              if (row_ok && wide && col < left) {
                *reinterpret_cast<float2*>(out + col) = v;
              } else if (row_ok) {
                if (col < left) out[col] = v.x;
                if (col + 1 < left) out[col + 1] = v.y;
              }
            }
          } else {
            T* out = static_cast<T*>(args.out) + base;
#pragma unroll
            for (int q = 0; q < BN / 32; ++q) {
              uint32_t p[4];
#pragma unroll
              for (int i = 0; i < 4; ++i) {
                const float2 v = value(4 * q + i);
                p[i] = pack2<cuda_type<T>>(v.x, v.y);
              }
              quad_transpose(p, quad);  // now 8 columns of one row: block 4 q + quad
              const int col = (4 * q + quad) * 8;
              if (row_ok && wide && col < left) {
                *reinterpret_cast<uint4*>(out + col) = make_uint4(p[0], p[1], p[2], p[3]);
              } else if (row_ok) {
                const T* v = reinterpret_cast<const T*>(p);
#pragma unroll
                for (int e = 0; e < 8; ++e) {
                  if (col + e < left) out[col + e] = v[e];
                }
              }
            }
          }
        }
      };
      if constexpr (Fused) {
        Accumulator<float, BN> sums;
#pragma unroll
        for (int i = 0; i < BN / 2; ++i) {
          const float2 v = acc.pair(i / 4, i / 2 % 2);
          sums.r[i] = i % 2 ? v.y : v.x;
        }
        finish_block<C>(args, sums, out_row, int64_t(g) * args.c_out + col0, left, wide, quad);
        bias = nullptr;
        store(sums);
      } else {
        store(acc);
      }
    }

    if (lds_u32(smem_u + C::kHeadAt + 8) != 0) {  // as every header says: some weights are not in the image
#pragma unroll 1
      for (uint32_t round = 0, item; (item = dealt(round, worker(), workers())) < items; ++round) {
        const int within = int(item % per_tile);
        const int block = C::kSwap && round % 2 != 0 ? C::kConsumers - 1 - group_id : group_id;
        add_nonfinite<dtype_of<T>, false, Fused>(args, load_scheduled(plan.schedule, item / per_tile),
                                                 block * 64 + (warp % 4) * 16, within / blocks_n,
                                                 within % blocks_n * BN, BN);
      }
    }
  }
#endif
}

// A launch of the kernels of C, over a weight image whose blocks are those of image_blocks ones of C.
template <class C>
cudaError_t fprop_launch_as(const ConvArgs& args, const Parts& parts, int image_blocks, cudaStream_t stream) {
  const int64_t items = fprop_items<C>(args);
  if (items == 0) return cudaSuccess;
  if (items > INT32_MAX) return cudaErrorInvalidValue;
  auto kernel = has_epilogue(args) ? fprop_kernel<C, false, true> : fprop_kernel<C, false, false>;
  if constexpr (C::BN <= 64) {  // wider ones hold the weights of few offsets
    if (keeps_weights<C>(args))
      kernel = has_epilogue(args) ? fprop_kernel<C, false, true, true> : fprop_kernel<C, false, false, true>;
  }
  if (parts.count() > 1) {
    kernel = fprop_kernel<C, true, true>;
    if constexpr (kCopiesWeights<C>) {
      if (args.b == nullptr) {
        kernel = major_of(args.raw.of) == GMMA::Major::MN ? fprop_small_kernel<C, GMMA::Major::MN>
                                                          : fprop_small_kernel<C, GMMA::Major::K>;
      }
    }
  }
  cudaError_t err = allow_shared(reinterpret_cast<const void*>(kernel), C::kSmemBytes);
  if (err != cudaSuccess) return err;
  const unsigned together = unsigned(parts.count());
  const unsigned grid = unsigned(together == 1 ? std::min<int64_t>(items, args.sm_count) : items * together);
  return launch_clusters(kernel, together, grid, C::kThreads, C::kSmemBytes, stream, args, parts,
                         outputs_aligned16(args, args.c_out), image_blocks);
}

template <class C>
cudaError_t fprop_launch(const ConvArgs& args, cudaStream_t stream) {
  const FpropShape shape = fprop_shape<C>(args);
  return with_columns<C>(shape.columns, [&](auto config) {
    using Of = decltype(config);
    return fprop_launch_as<Of>(args, shape.parts, C::BN / Of::BN, stream);
  });
}

template <class C>
KernelEntry fprop_entry(const char* name, DType input) {
  constexpr Accum accum = sizeof(typename C::Acc) == 2 ? Accum::f16 : Accum::f32;
  return {{name, Op::fprop, input, accum, kTileM, C::BN, C::CK, C::kStages,
           Atom<typename C::T, typename C::Acc, C::BN, GMMA::Major::K>::name, 0, 90, C::kSmemBytes},
          no_workspace,
          fprop_launch<C>,
          [](const ConvArgs& args) { return fprop_shape<C>(args).parts.count(); },
          fprop_reads_weights<C>};
}

}  // namespace voxmma::sm90
