// fp32 weight gradient with mma.sync (sm_80 and newer): dW[k] = sum over pairs (i, j) of offset k of x[i]^T dy[j], in fp32.
//
// A CTA owns up to 8 offsets, one CO-channel block of dy and one CI-channel block of x, and walks over a range of tiles.
//   4 producer warps feed two rings: the unique rows of passes of x with their local indices, up to kStages passes that
//   share kXRows rows, and kYSlots parts of a tile's rows of dy
//   8 consumer warps, one offset each: list the pairs of (tile, offset) without gaps, then multiply 8 pairs at a time;
//     both operands come from the resident rows, by 16-byte loads. Warps left over help with the offset next to the
//     kernel's centre, which has the most pairs.
// Partial sums of the ranges are added up in a fixed order by reduce_splits.
#pragma once

#include "common.cuh"
#include "mma_sm80.cuh"

namespace voxmma {

// XRows, YParts, YSlots: rows of the ring of x, parts of a tile that dy comes in, and of these in flight. By default whole
// tiles, Stages of both.
template <int CI_, int Stages_, int Arch_, int CO_, int Promote_ = 0, int XRows_ = Stages_ * kUniqueMax,
          int YParts_ = 1, int YSlots_ = Stages_>
struct WgradSm80 {
  static constexpr DType In = DType::f32;
  static constexpr int CI = CI_, CO = CO_;  // channels of x (MMA rows) and of dy (MMA columns)
  static constexpr int Promote = Promote_;  // 8 = 3xTF32, 0 = operands rounded to tf32 (fprop_sm80.cuh)
  static constexpr bool kSplit = Promote > 0;
  using Sum = Accumulator<In, Accum::f32, kSplit>;
  static constexpr int kStages = Stages_;
  static constexpr int kArch = Arch_;   // 90: needs more shared memory and registers than an A100 gives
  static constexpr int kWarps = 8;      // consumers
  static constexpr int kProducers = 4;  // half of them copy x, half dy
  static constexpr int kThreads = (kWarps + kProducers) * 32;
  static constexpr int kFragsM = CI / 16, kFragsN = CO / 8;
  static constexpr int kStepK = 32 / dtype_bytes(In);  // pairs of an MMA step
  static constexpr int kRowX = CI * dtype_bytes(In), kRowY = CO * dtype_bytes(In);
  static constexpr int kXRows = XRows_, kYParts = YParts_, kYSlots = YSlots_, kYRows = kTileM / kYParts;
  static constexpr int kY = 0;  // [kYSlots][kYRows + 1][CO], the last row zero
  static constexpr int kYBytes = (kYRows + 1) * kRowY;
  static constexpr int kX = kY + kYSlots * kYBytes;        // [kXRows + 1][CI], the last row zero
  static constexpr int kRows = kX + (kXRows + 1) * kRowX;  // of all of these
  static constexpr int kLocal = (kRows + 15) / 16 * 16;    // [kStages][kWarps][kTileM] uint16
  static constexpr int kInfo =
      kLocal + kStages * kWarps * kTileM * 2;  // [kStages] int4 {1 or 0 = end, k_begin, k_count, row}
  static constexpr int kListLength = kYRows + kStepK;
  static constexpr int kList = kInfo + kStages * 16;               // [kWarps][kListLength] uint32: x row | dy row << 16
  static constexpr int kIndex = kList + kWarps * kListLength * 4;  // [kUniqueMax] x rows, [kYRows] dy rows of a step
  static constexpr int kBars = kIndex + (kUniqueMax + kYRows) * 4;  // mbarriers, full and empty ones of both rings
  static constexpr int kSmem = kBars + 2 * (kStages + kYSlots) * 8;
  static constexpr int kSwizzleRows = 8;  // after so many rows swizzles repeat
  static_assert(kXRows >= kUniqueMax && kXRows % kSwizzleRows == 0 && kYBytes % 128 == 0, "a pass fits, swizzles stay");
  static_assert(kXRows >= kStages * kUniqueMax || kStages == 2, "a pass looks at the one before it");
  static_assert(CI % 32 == 0 && CO % 32 == 0 && kRowX <= 256 && kRowY <= 256, "rows that swizzle() knows, whole loads");
  static_assert(Promote == 0 || Promote == kStepK, "3xTF32");
  static_assert((kWarps - 1) * CI * CO * 4 <= kRows, "helpers hand their sums over through the rings");
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
inline constexpr bool kSm90a = true;
#define VOXMMA_SETMAXNREG(direction, registers) \
  asm volatile("setmaxnreg." direction ".sync.aligned.u32 %0;\n" ::"n"(registers))
#else
inline constexpr bool kSm90a = false;
#define VOXMMA_SETMAXNREG(direction, registers)
#endif

template <class C>
__device__ __forceinline__ void wgrad_sm80(const ConvArgs& args, const int offset_blocks, const int ci_blocks,
                                           const int co_blocks, const int splits) {
  using T = type_of<C::In>;
  extern __shared__ __align__(1024) unsigned char smem[];
  const PlanView& plan = args.plan;
  const int volume = plan.kernel_volume;
  const int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  const uint32_t base = smem_address(smem);
  const auto x_full = [&](int stage) { return base + C::kBars + stage * 8; };
  const auto x_empty = [&](int stage) { return base + C::kBars + (C::kStages + stage) * 8; };
  const auto y_full = [&](int slot) { return base + C::kBars + (2 * C::kStages + slot) * 8; };
  const auto y_empty = [&](int slot) { return base + C::kBars + (2 * C::kStages + C::kYSlots + slot) * 8; };

  const WgradBlock own(blockIdx.x, offset_blocks, co_blocks, ci_blocks, args.groups);
  const int co0 = own.co * C::CO, ci0 = own.ci * C::CI, group = own.group, split = own.split;
  const int o0 = static_cast<int>(static_cast<int64_t>(volume) * own.offset / offset_blocks);  // offsets [o0, o1)
  const int o1 = static_cast<int>(static_cast<int64_t>(volume) * (own.offset + 1) / offset_blocks);

  constexpr int kEach = C::kProducers / 2;  // warps that share the rows of x, and of dy
  if (threadIdx.x == 0) {
    for (int i = 0; i < C::kStages; ++i) {
      mbarrier_init(x_full(i), kEach * 32 + 1);  // every producer lane's copies, and the pass's description
      mbarrier_init(x_empty(i), C::kWarps * kReleases);
    }
    for (int i = 0; i < C::kYSlots; ++i) {
      mbarrier_init(y_full(i), kEach * 32);
      mbarrier_init(y_empty(i), C::kWarps * kReleases);
    }
  }
  if (threadIdx.x < C::kRowX / 16)  // zero rows
    reinterpret_cast<uint4*>(smem + C::kX + C::kXRows * C::kRowX)[threadIdx.x] = make_uint4(0, 0, 0, 0);
  for (int i = 0; i < C::kYSlots; ++i) {
    if (threadIdx.x < C::kRowY / 16)
      reinterpret_cast<uint4*>(smem + C::kY + i * C::kYBytes + C::kYRows * C::kRowY)[threadIdx.x] =
          make_uint4(0, 0, 0, 0);
  }
  __syncthreads();

  if (warp >= C::kWarps) {
    // ---- producers -----------------------------------------------------------------------------------------------
    if constexpr (C::kArch == 90) VOXMMA_SETMAXNREG("dec", 56);
    const bool is_x = warp < C::kWarps + kEach;
    const int sub = (warp - C::kWarps) % kEach;              // which part of the rows
    int* index = reinterpret_cast<int*>(smem + C::kIndex) +  // numbers of the warp's rows in this step
                 (is_x ? sub * (kUniqueMax / kEach) : kUniqueMax + sub * (C::kYRows / kEach));
    int stage = 0, parity = 0;  // of the warp's ring
    int row0 = 0, before = 0;   // where the pass begins in the ring of x, and rows of the pass before it
    // Fetches the numbers of rows [begin, end) ahead of the wait for room.
    const auto fetch = [&](const int* numbers, int begin, int end) {
      __syncwarp();  // the previous step's numbers have been read
#pragma unroll 4
      for (int i = lane; i < end - begin; i += 32) index[i] = __ldg(numbers + begin + i);
      __syncwarp();
    };
    // Copies those rows (-1: zeros): 16-byte piece lane % P of row lane / P, and so on. place(row): its row in `dst`.
    const auto copy_rows = [&](auto row_bytes, uint32_t dst, const T* src, int64_t ld, int channel0, int channels,
                               int begin, int end, auto place) {
      constexpr int kRow = decltype(row_bytes)::value, kPieces = kRow / 16, kStride = 32 / kPieces;
      const int piece = lane % kPieces, channel = channel0 + piece * (16 / static_cast<int>(sizeof(T)));
      const int bytes = max(0, min(16, (channels - channel) * static_cast<int>(sizeof(T))));
      const T* from = bytes > 0 ? src + channel : src;
#pragma unroll 4
      for (int row = begin + lane / kPieces; row < end; row += kStride) {
        const int at = index[row - begin], to = place(row);
        cp_async16(dst + to * kRow + swizzle(to, piece, kRow) * 16, from + (at < 0 ? 0 : at) * ld, at < 0 ? 0 : bytes);
      }
    };
    const auto produce_x = [&](int tile, const Pass& pass) {
      const int rows = pass.uniq_count, whole = (rows + C::kSwizzleRows - 1) / C::kSwizzleRows * C::kSwizzleRows;
      const int begin = rows * sub / kEach, end = rows * (sub + 1) / kEach;
      fetch(plan.uniq + static_cast<int64_t>(pass.uniq_begin4) * 4, begin, end);
      mbarrier_wait(x_empty(stage), parity ^ 1);
      if (C::kXRows < C::kStages * kUniqueMax && before + whole > C::kXRows)  // the pass before is in the way
        mbarrier_wait(x_empty(stage == 0 ? C::kStages - 1 : stage - 1), stage == 0 ? parity ^ 1 : parity);
      copy_rows(std::integral_constant<int, C::kRowX>(), base + C::kX,
                static_cast<const T*>(args.a) + group * args.a_group, args.lda, ci0, args.c_in, begin, end,
                [&](int row) { return row0 + row < C::kXRows ? row0 + row : row0 + row - C::kXRows; });
      if (sub == 0) {
        for (int k = max(o0, pass.k_begin); k < min(o1, pass.k_begin + pass.k_count); ++k) {
          const uint16_t* src = plan.local + (static_cast<int64_t>(tile) * volume + k) * kTileM;
          cp_async16(base + C::kLocal + (stage * C::kWarps + k - o0) * kTileM * 2 + lane * 16, src + lane * 8);
        }
        if (lane == 0) {
          *reinterpret_cast<int4*>(smem + C::kInfo + stage * 16) = make_int4(1, pass.k_begin, pass.k_count, row0);
          mbarrier_arrive(x_full(stage));
        }
      }
      mbarrier_arrive_cp_async(x_full(stage));
      row0 += whole;
      if (row0 >= C::kXRows) row0 -= C::kXRows;
      before = whole;
      if (++stage == C::kStages) stage = 0, parity ^= 1;
    };
    const auto produce_y = [&](int tile) {
#pragma unroll 1
      for (int part = 0; part < C::kYParts; ++part) {
        const int begin = C::kYRows * sub / kEach, end = C::kYRows * (sub + 1) / kEach;
        fetch(plan.order + static_cast<int64_t>(tile) * kTileM + part * C::kYRows, begin, end);
        mbarrier_wait(y_empty(stage), parity ^ 1);
        copy_rows(std::integral_constant<int, C::kRowY>(), base + C::kY + stage * C::kYBytes,
                  static_cast<const T*>(args.b) + group * args.b_group, args.ldb, co0, args.c_out, begin, end,
                  [](int row) { return row; });
        mbarrier_arrive_cp_async(y_full(stage));
        if (++stage == C::kYSlots) stage = 0, parity ^= 1;
      }
    };

    for (uint32_t round = 0, position; (position = dealt(round, split, splits)) < static_cast<uint32_t>(plan.tiles);
         ++round) {
      const ScheduledTile scheduled = load_scheduled(plan.schedule, position);
      const int tile = scheduled.tile;
      for (int first = 0; first < scheduled.passes; first += 32) {  // 32 passes at a time, one a lane
        Pass mine = {0, 0, 0, 0};
        if (first + lane < scheduled.passes) mine = load_pass(plan, scheduled.first_pass + first + lane);
        uint32_t hits =
            __ballot_sync(~0u, mine.k_begin < o1 && mine.k_begin + mine.k_count > o0 && mine.uniq_count > 0);
        for (; hits; hits &= hits - 1) {
          const int from = __ffs(hits) - 1;
          const Pass pass = {__shfl_sync(~0u, mine.k_begin, from), __shfl_sync(~0u, mine.k_count, from),
                             __shfl_sync(~0u, mine.uniq_begin4, from), __shfl_sync(~0u, mine.uniq_count, from)};
          if (is_x)
            produce_x(tile, pass);
          else
            produce_y(tile);
        }
      }
    }
    if (is_x) {  // the end
      mbarrier_wait(x_empty(stage), parity ^ 1);
      if (sub == 0 && lane == 0) {
        *reinterpret_cast<int4*>(smem + C::kInfo + stage * 16) = make_int4(0, 0, 0, 0);
        mbarrier_arrive(x_full(stage));
      }
      mbarrier_arrive_cp_async(x_full(stage));
    }
    return;
  }

  // ---- consumers ---------------------------------------------------------------------------------------------------
  if constexpr (C::kArch == 90) VOXMMA_SETMAXNREG("inc", 224);
  const int count = o1 - o0, spare = C::kWarps - count;
  const int helped = max(o0, min(volume / 2, o1 - 1));  // the offset that the spare warps share
  const int part = warp < count ? 0 : warp - count + 1;
  const int k = part == 0 ? o0 + warp : helped;
  const int parts = k == helped ? 1 + spare : 1;  // this warp takes steps part, part + parts, ...
  uint32_t* list = reinterpret_cast<uint32_t*>(smem + C::kList) + warp * C::kListLength;

  // Operands are read in 16-byte pieces: lane l reads piece `mine` (then 8 pieces on, if the row has them) of the
  // pairs l % 4 and l % 4 + 4; on four rows that follow each other this is free of bank conflicts. So the four channels
  // of that piece are MMA rows l / 4 and l / 4 + 8 of fragments 0 and 1, and MMA column l / 4 of fragments 0 to 3.
  const auto piece_of = [](int index) { return index / 2 + index % 2 * 4; };
  const int mine = piece_of(lane / 4);

  typename C::Sum acc[C::kFragsM][C::kFragsN];  // [CI / 16][CO / 8] of m16n8: x channels by dy channels
  int stage = 0, parity = 0, slot = 0, slot_parity = 0, y_part = 0;
  while (true) {
    if (y_part == 0) mbarrier_wait(x_full(stage), parity);
    const int4 info = *reinterpret_cast<const int4*>(smem + C::kInfo + stage * 16);
    if (info.x == 0) break;
    mbarrier_wait(y_full(slot), slot_parity);
    if (k >= info.y && k < info.y + info.z) {
      // The pairs of this tile and offset, without gaps, filled up with zero rows to whole steps.
      const uint16_t* local = reinterpret_cast<const uint16_t*>(smem + C::kLocal) +
                              (stage * C::kWarps + k - o0) * kTileM + y_part * C::kYRows;
      int pairs = 0;
#pragma unroll
      for (int row = lane; row < C::kYRows; row += 32) {
        const int from = local[row];
        const uint32_t has = __ballot_sync(~0u, from != kMissing);
        const int x_row = info.w + from < C::kXRows ? info.w + from : info.w + from - C::kXRows;
        if (from != kMissing) list[pairs + __popc(has & ((1u << lane) - 1))] = x_row | row << 16;
        pairs += __popc(has);
      }
      if (lane < C::kStepK) list[pairs + lane] = C::kXRows | C::kYRows << 16;
      __syncwarp();
      const int steps = (pairs + C::kStepK - 1) / C::kStepK;

      // A lane reads pieces of pairs lane % 4 and lane % 4 + 4, for A and for B.
      uint32_t a[C::kFragsM][4], b[2][C::kFragsN / 2][4];
      uint32_t entry[2] = {0, 0};                     // list entries of the step after the one being loaded
      uint32_t row_x[2] = {0, 0}, row_y[2] = {0, 0};  // its places in shared memory
      const auto read_list = [&](int step) {
        const int at = min(step * C::kStepK, C::kYRows);  // behind the end: read, never used
        entry[0] = list[at + lane % 4];
        entry[1] = list[at + lane % 4 + 4];
      };
      const auto locate = [&] {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int x = static_cast<int>(entry[h] & 0xffff), y = static_cast<int>(entry[h] >> 16);
          row_x[h] = C::kX + x * C::kRowX + swizzle(x, mine, C::kRowX) * 16;
          row_y[h] = C::kY + slot * C::kYBytes + y * C::kRowY + swizzle(y, mine, C::kRowY) * 16;
        }
      };
      const auto piece = [&](uint32_t at) { return *reinterpret_cast<const uint4*>(smem + at); };
      // Loads fragment m of A: two at a time, when the second one's turn has come.
      const auto load_x = [&](int m) {
        if (m % 2 == 1) {
          const uint4 p = piece(row_x[0] + m / 2 * 128), q = piece(row_x[1] + m / 2 * 128);
          a[m - 1][0] = p.x, a[m - 1][1] = p.y, a[m - 1][2] = q.x, a[m - 1][3] = q.y;
          a[m][0] = p.z, a[m][1] = p.w, a[m][2] = q.z, a[m][3] = q.w;
        }
      };
      const auto load_y = [&](auto buffer) {
#pragma unroll
        for (int n = 0; n < C::kFragsN / 2; n += 2) {
          const uint4 p = piece(row_y[0] + n / 2 * 128), q = piece(row_y[1] + n / 2 * 128);
          uint32_t (&first)[4] = b[buffer][n], (&second)[4] = b[buffer][n + 1];
          first[0] = p.x, first[1] = q.x, first[2] = p.y, first[3] = q.y;
          second[0] = p.z, second[1] = q.z, second[2] = p.w, second[3] = q.w;
        }
      };
      int at_step = part;
      // Multiplies step `at_step` and loads the one after it meanwhile; returns false behind the last one.
      const auto multiply_step = [&](auto buffer) {
        const bool more = at_step + parts < steps;
        if (more) {
          locate();
          read_list(at_step + 2 * parts);
          load_y(std::integral_constant<int, 1 - buffer>());
        }
        Operand<C::In, C::kSplit> b_now[C::kFragsN / 2], a_now;
#pragma unroll
        for (int n = 0; n < C::kFragsN / 2; ++n) b_now[n].set(b[buffer][n]);
#pragma unroll
        for (int m = 0; m < C::kFragsM; ++m) {
          a_now.set(a[m]);
          multiply(acc[m], a_now, b_now);
          if (more) load_x(m);
        }
        at_step += parts;
        return more;
      };
      if (at_step < steps) {
        read_list(at_step);
        locate();
        read_list(at_step + parts);
        load_y(std::integral_constant<int, 0>());
#pragma unroll
        for (int m = 0; m < C::kFragsM; ++m) load_x(m);
        while (multiply_step(std::integral_constant<int, 0>()) && multiply_step(std::integral_constant<int, 1>())) {
        }
      }
    }
    __syncwarp();  // every lane has read its operands (and its list): the rows may be overwritten
    const bool last = ++y_part == C::kYParts;
    if (kReleases == 32 || lane == 0) {
      mbarrier_arrive(y_empty(slot));
      if (last) mbarrier_arrive(x_empty(stage));
    }
    if (++slot == C::kYSlots) slot = 0, slot_parity ^= 1;
    if (!last) continue;
    y_part = 0;
    if (++stage == C::kStages) stage = 0, parity ^= 1;
  }

  // Helpers hand their sums over, register by register; the owner adds them in order.
  constexpr int kRegs = C::kFragsM * C::kFragsN * 4;
  float* sums = reinterpret_cast<float*>(smem);  // [helper][kRegs][32]
  const auto consumers_sync = [] { asm volatile("bar.sync 1, %0;\n" ::"n"(C::kWarps * 32) : "memory"); };
  consumers_sync();  // nobody reads a stage any more, and no copy is in flight
  if (part > 0) {
#pragma unroll
    for (int r = 0; r < kRegs; ++r)
      sums[((part - 1) * kRegs + r) * 32 + lane] = acc[r / 4 / C::kFragsN][r / 4 % C::kFragsN].v[r % 4];
  }
  consumers_sync();
  if (part > 0) return;
  for (int helper = 0; helper < parts - 1; ++helper) {
#pragma unroll
    for (int r = 0; r < kRegs; ++r)
      acc[r / 4 / C::kFragsN][r / 4 % C::kFragsN].v[r % 4] += sums[(helper * kRegs + r) * 32 + lane];
  }

  // partial[split][K][G][c_in][c_out]
  const int64_t block = (static_cast<int64_t>(split) * volume + k) * args.groups + group;
  const int64_t at = block * args.c_in * args.c_out + co0;
  float* out = static_cast<float*>(args.workspace) + at;
#pragma unroll
  for (int m = 0; m < C::kFragsM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int ci = ci0 + m / 2 * 32 + mine * 4 + m % 2 * 2 + half;
      if (ci >= args.c_in) continue;
      float* row = out + static_cast<int64_t>(ci) * args.c_out;
      const int cols = args.c_out - co0;
#pragma unroll
      for (int n = 0; n < C::kFragsN; n += 4) {  // MMA columns 2 (lane & 3) + j of four fragments: one piece
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int col = n * 8 + piece_of(2 * (lane & 3) + j) * 4, r = 2 * half + j;
          const float4 v = {acc[m][n].v[r], acc[m][n + 1].v[r], acc[m][n + 2].v[r], acc[m][n + 3].v[r]};
          if (args.c_out % 4 == 0 && col + 4 <= cols) {
            *reinterpret_cast<float4*>(row + col) = v;
          } else {
            if (col < cols) row[col] = v.x;
            if (col + 1 < cols) row[col + 1] = v.y;
            if (col + 2 < cols) row[col + 2] = v.z;
            if (col + 3 < cols) row[col + 3] = v.w;
          }
        }
      }
    }
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    wgrad_sm80_kernel(const ConvArgs args, const int offset_blocks, const int ci_blocks, const int co_blocks,
                      const int splits) {
  if constexpr (C::kArch == 80 || kSm90a) wgrad_sm80<C>(args, offset_blocks, ci_blocks, co_blocks, splits);
}

template <class C>
struct WgradSm80Launch {
  static int64_t channel_blocks(const ConvArgs& args) {
    return ceil_div(args.c_in, C::CI) * ceil_div(args.c_out, C::CO) * args.groups;
  }
  // Blocks of nearly equal size, at most 8 offsets each; fewer for a small set, as long as that is one wave.
  static int offset_blocks(const ConvArgs& args) {
    const int volume = args.plan.kernel_volume;
    const auto room = static_cast<int>(args.sm_count / (channel_blocks(args) * args.plan.tiles));
    return std::max((volume + 7) / 8, std::min(volume, room));
  }
  static int64_t blocks(const ConvArgs& args) { return offset_blocks(args) * channel_blocks(args); }  // CTAs of a split
  static int64_t count(const ConvArgs& args) {
    return static_cast<int64_t>(args.plan.kernel_volume) * args.groups * args.c_in * args.c_out;
  }
  static int splits(const ConvArgs& args) { return wgrad_splits(args, blocks(args), count(args), 4); }
  static size_t workspace(const ConvArgs& args) { return wgrad_workspace(splits(args), count(args), 4); }
  static cudaError_t launch(const ConvArgs& given, cudaStream_t stream) {
    const int parts = splits(given);
    ConvArgs args = given;
    if (parts == 1) args.workspace = args.out;
    const cudaError_t status = launch_kernel(wgrad_sm80_kernel<C>, blocks(args) * parts, C::kThreads, C::kSmem, stream,
                                             args, offset_blocks(args), static_cast<int>(ceil_div(args.c_in, C::CI)),
                                             static_cast<int>(ceil_div(args.c_out, C::CO)), parts);
    if (status != cudaSuccess || parts == 1) return status;
    return reduce_splits(args.workspace, DType::f32, parts, count(args), args.out, args.out_dtype, stream);
  }
};

template <class C>
KernelEntry wgrad_sm80_entry(const char* name) {
  using Launch = WgradSm80Launch<C>;
  return {{name, Op::wgrad, C::In, Accum::f32, C::CI, C::CO, C::kStepK, C::kStages, C::Sum::kAtom, C::Promote, C::kArch,
           C::kSmem},
          Launch::workspace,
          Launch::launch};
}

}  // namespace voxmma
