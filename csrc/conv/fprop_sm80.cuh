// Forward and input gradient with mma.sync (sm_80 and newer). One CTA computes one tile: 256 output rows x BN channels.
//
//   for every pass of the tile, for every chunk of CK channels:
//     gather the pass's unique input rows [<= 512][CK] into shared memory, once
//     for every kernel offset that any row of the tile needs:
//       its weights [BN][CK] arrive through a ring of cp.async stages, fetched kStages - 1 offsets ahead
//       accumulators [256][BN] += rows picked by the local index, times weights; inactive 16-row fragments are skipped
//   store through plan.order, with bias and epilogue
//
// Small sets: several CTAs share a tile (Parts in common.cuh), store fp32 sums, and reduce_parts adds them.
//
// A fragment of 16 output rows is read by ldmatrix with one address per row, so the second gather costs nothing.
#pragma once

#include "common.cuh"
#include "fprop_sm80_narrow.cuh"
#include "fprop_sm80_store.cuh"
#include "mma_sm80.cuh"
#include "nonfinite.cuh"

namespace voxmma {

template <DType In_, Accum Acc_, int BN_, int CK_, int Promote_ = 0, int Stages_ = 0>
struct FpropSm80 {
  static constexpr DType In = In_;
  static constexpr Accum Acc = Acc_;
  static constexpr int BN = BN_, CK = CK_;
  // Channels summed by the tensor core before the sum is added to the fp32 accumulator. 0 = never.
  // fp16_promoted: 32, 64, 128, or -1: one promotion an offset if c_in <= CK, else (tighter) one a chunk of CK channels
  //   of an offset; 128 counts a chunk as CK channels, even one that c_in does not fill.
  // fp32: 8, which means 3xTF32 (mma_sm80.cuh). Without promotion operands are rounded to tf32 and multiplied once.
  static constexpr int kPromoteConfig = Promote_;
  static constexpr int Promote = Promote_ < 0 ? CK : Promote_;
  static constexpr bool kSplit = In == DType::f32 && Promote > 0;
  using Sum = Accumulator<In, Acc, kSplit>;
  static constexpr int kThreads = 256;
  static constexpr int kWarpsN = BN >= 64 ? 2 : 1;  // warps side by side over the channels
  static constexpr int kWarpsM = 8 / kWarpsN;
  static constexpr int kFragsM =
      kFrags / kWarpsM;  // m16 fragments of a warp: wm, wm + kWarpsM, ... (balances skipping)
  static constexpr uint32_t kWarpFrags = kWarpsM == 4 ? 0x1111 : 0x0101;
  static constexpr int kFragsN = BN / kWarpsN / 8;      // n8 fragments of a warp, contiguous
  static constexpr int kStepK = 32 / dtype_bytes(In);   // channels of an MMA step: 32 bytes of a row
  static constexpr int kPieceK = 16 / dtype_bytes(In);  // channels of a 16-byte piece
  static constexpr int kSteps = CK / kStepK;            // MMA steps of a chunk
  static constexpr int kRowBytes = CK * dtype_bytes(In);
  static constexpr int kWeightBytes = BN * kRowBytes;  // one stage: [BN][CK]
  static constexpr int kStages = Stages_ > 0 ? Stages_ : kWeightBytes >= 64 * 128 ? 3 : 4;
  static constexpr int kInput = kStages * kWeightBytes;                 // [kUniqueMax + 1][CK], last row zero
  static constexpr int kLocal = kInput + (kUniqueMax + 1) * kRowBytes;  // [kPassOffsets][kTileM] uint16
  static constexpr int kSmem = kLocal + kPassOffsets * kTileM * 2;
  // Two CTAs a multiprocessor hide each other's gathers where accumulators and fragments fit in 128 registers.
  static constexpr int kMinBlocks = BN <= 32 || (BN == 64 && Promote == 0) ? 2 : 1;
  static_assert(kRowBytes == 64 || kRowBytes == 128, "rows of 64 or 128 bytes");
  static_assert(In == DType::f32 ? Promote == 0 || Promote == kStepK : (Acc == Accum::f16_promoted) == (Promote > 0),
                "Promote goes with f16_promoted and with 3xTF32");
  static_assert(Promote <= CK ? Promote % kStepK == 0 : Promote % CK == 0, "whole MMA steps between promotions");
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kMinBlocks)
    fprop_sm80_kernel(const ConvArgs args, const int n_blocks, const int chunks, const bool vec, const Parts parts) {
  using T = type_of<C::In>;
  extern __shared__ __align__(1024) unsigned char smem[];
  const PlanView& plan = args.plan;
  const int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  const int wm = warp % C::kWarpsM, wn = warp / C::kWarpsM;

  // Channel blocks of a tile run next to each other and share its rows in L2.
  const int part = static_cast<int>(blockIdx.x % parts.count());
  const unsigned item = blockIdx.x / parts.count();
  const int nb = static_cast<int>(item % n_blocks);
  const int group = static_cast<int>(item / n_blocks % args.groups);
  const ScheduledTile scheduled = load_scheduled(plan.schedule, item / n_blocks / args.groups);
  const int tile = scheduled.tile;
  const int chunk_begin = parts.chunk(part, chunks), chunk_end = parts.chunk_end(part, chunks);

  const T* x = static_cast<const T*>(args.a) + group * args.a_group;  // (n_in, lda), this group's first channel
  const char* image = static_cast<const char*>(args.b) +              // [K][chunks][BN][CK], swizzled
                      (static_cast<int64_t>(group) * n_blocks + nb) * plan.kernel_volume * chunks * C::kWeightBytes;
  const uint16_t* local = plan.local + static_cast<int64_t>(tile) * plan.kernel_volume * kTileM;  // [K][kTileM]
  const int pass_end = scheduled.first_pass + scheduled.passes;

  const uint32_t s_weight = smem_address(smem);
  const uint32_t s_input = s_weight + C::kInput;
  const uint32_t s_local = s_weight + C::kLocal;

  // Lane l holds the offset bits of fragment l % 16; all lanes together, the offsets that the tile needs at all.
  const auto load_frag = [&](int pass) {
    const uint32_t frag = __ldg(plan.frag + static_cast<int64_t>(pass) * kFrags + lane % kFrags);
    return parts.offsets == 1 ? frag : frag & parts.offsets_of(part, plan.kernel_volume, load_pass(plan, pass));
  };
  const auto pass_mask = [&](int pass) { return __reduce_or_sync(~0u, load_frag(pass)); };

  // The stream of weight blocks, in the order in which the loop below consumes them: passes, chunks, active offsets.
  struct {
    int pass, chunk, k_begin;
    uint32_t mask, bits;
  } ahead;
  const auto ahead_open = [&](int pass) {
    ahead.mask = 0;
    for (; pass < pass_end && !(ahead.mask = pass_mask(pass)); ++pass) {
    }
    ahead.pass = pass;
    ahead.chunk = chunk_begin;
    ahead.bits = ahead.mask;
    ahead.k_begin = ahead.mask ? load_pass(plan, pass).k_begin : 0;
  };
  const auto fetch_weights = [&](int stage) {  // always commits a group, empty behind the end of the stream
    if (ahead.bits) {
      const int offset = ahead.k_begin + __ffs(ahead.bits) - 1;
      const char* src = image + (static_cast<int64_t>(offset) * chunks + ahead.chunk) * C::kWeightBytes;
      const uint32_t dst = s_weight + stage * C::kWeightBytes;
#pragma unroll
      for (int i = 0; i < C::kWeightBytes; i += C::kThreads * 16) {
        const int at = i + threadIdx.x * 16;
        if (C::kWeightBytes % (C::kThreads * 16) == 0 || at < C::kWeightBytes) cp_async16(dst + at, src + at);
      }
      ahead.bits &= ahead.bits - 1;
      if (!ahead.bits) {
        if (++ahead.chunk < chunk_end)
          ahead.bits = ahead.mask;
        else
          ahead_open(ahead.pass + 1);
      }
    }
    cp_async_commit();
  };

  // Gathers CK channels of the pass's unique rows. A thread keeps its 16-byte piece of a row and walks down the rows;
  // its row stride is a multiple of 8, so the swizzled position stays the same.
  const auto gather = [&](const Pass& pass, int chunk, int steps) {
    constexpr int kPieces = C::kRowBytes / 16, kStride = C::kThreads / kPieces, kBatch = C::kMinBlocks == 1 ? 8 : 4;
    const int piece = threadIdx.x % kPieces, row0 = threadIdx.x / kPieces;
    if (piece >= 2 * steps) return;
    const int channel = chunk * C::CK + piece * C::kPieceK;
    const int bytes = max(0, min(16, (args.c_in - channel) * static_cast<int>(sizeof(T))));  // behind c_in: zero fill
    const T* src = bytes > 0 ? x + channel : x;
    const uint32_t dst = s_input + row0 * C::kRowBytes + swizzle(row0, piece, C::kRowBytes) * 16;
    const int* uniq = plan.uniq + static_cast<int64_t>(pass.uniq_begin4) * 4;  // [uniq_count]
    for (int row = row0; row < pass.uniq_count; row += kBatch * kStride) {
      int from[kBatch];
#pragma unroll
      for (int u = 0; u < kBatch; ++u)
        from[u] = row + u * kStride < pass.uniq_count ? __ldg(uniq + row + u * kStride) : -1;
#pragma unroll
      for (int u = 0; u < kBatch; ++u) {
        if (from[u] >= 0) cp_async16(dst + (row - row0 + u * kStride) * C::kRowBytes, src + from[u] * args.lda, bytes);
      }
    }
  };
  const auto copy_local = [&](const Pass& pass) {
    const char* src = reinterpret_cast<const char*>(local + static_cast<int64_t>(pass.k_begin) * kTileM);
    for (int at = threadIdx.x * 16; at < pass.k_count * kTileM * 2; at += C::kThreads * 16)
      cp_async16(s_local + at, src + at);
  };

  if (threadIdx.x < C::kRowBytes / 16)  // the zero row; published by the first __syncthreads
    reinterpret_cast<uint4*>(smem + C::kInput + kMissing * C::kRowBytes)[threadIdx.x] = make_uint4(0, 0, 0, 0);

  typename C::Sum acc[C::kFragsM][C::kFragsN];
  int since = 0;  // offsets since the last promotion (Promote > CK)
  int stage = 0;  // ring position of the next block to consume

  ahead_open(scheduled.first_pass);
#pragma unroll
  for (int s = 0; s < C::kStages - 1; ++s) fetch_weights(s);

  for (int p = scheduled.first_pass; p < pass_end; ++p) {
    const uint32_t frag = load_frag(p);
    const uint32_t mask = __reduce_or_sync(~0u, frag);
    if (!mask) continue;
    for (int chunk = chunk_begin; chunk < chunk_end; ++chunk) {
      const int left = args.c_in - chunk * C::CK;
      const int steps = min(C::kSteps, (left + C::kStepK - 1) / C::kStepK);  // MMA steps with channels in them
      __syncthreads();  // every warp has finished with the rows (and indices) that are overwritten now
      const Pass pass = load_pass(plan, p);
      if (chunk == chunk_begin) copy_local(pass);
      gather(pass, chunk, steps);
      cp_async_commit();
      bool arrived = false;  // are this chunk's rows known to be there?

      for (uint32_t bits = mask; bits; bits &= bits - 1) {
        // Wait for this offset's weights, which are kStages - 1 groups old; for a chunk's first offset, even if it is
        // the only one, wait for everything, its rows and indices included.
        if (arrived)
          cp_async_wait<C::kStages - 2>();
        else
          cp_async_wait<0>();
        arrived = true;
        __syncthreads();  // all threads' copies are visible, and the stage consumed before this one is free
        fetch_weights(stage == 0 ? C::kStages - 1 : stage - 1);

        const int j = __ffs(bits) - 1;
        const uint32_t taking_part =
            __ballot_sync(~0u, (frag >> j) & 1) >> wm;  // bit i * kWarpsM: fragment i of the warp
        const auto active = [&](int i) { return ((taking_part >> (i * C::kWarpsM)) & 1) != 0; };
        if (taking_part & C::kWarpFrags) {
          // ldmatrix row addresses of step 0. Step s is 32 bytes on before swizzling: address ^ (s * 32).
          uint32_t a_row[C::kFragsM];  // A: lane gives row lane % 16, piece lane / 16
#pragma unroll
          for (int i = 0; i < C::kFragsM; ++i) {
            const int frag_row = (wm + i * C::kWarpsM) * kFragRows + lane % 16;
            const int row = reinterpret_cast<const uint16_t*>(smem + C::kLocal)[j * kTileM + frag_row];
            a_row[i] = s_input + row * C::kRowBytes + swizzle(row, lane / 16, C::kRowBytes) * 16;
          }
          // B: lane gives output channel 8 (lane / 16) + lane % 8, piece lane / 8 % 2
          const int b_channel = wn * C::kFragsN * 8 + lane / 16 * 8 + lane % 8;
          const uint32_t b_row = s_weight + stage * C::kWeightBytes + b_channel * C::kRowBytes +
                                 swizzle(b_channel, lane / 8 % 2, C::kRowBytes) * 16;

          // Operands of the next step are loaded while this one computes: B into a second buffer, A in place, fragment
          // by fragment, as soon as its MMAs are issued.
          // A 16-byte piece holds 8 channels of 16 bits or 4 of 32 bits; spread over a quad's registers, both are the
          // fragment that the MMA wants.
          uint32_t a[C::kFragsM][4];         // [m16][piece 0: rows 0-7, rows 8-15, piece 1: rows 0-7, rows 8-15]
          uint32_t b[2][C::kFragsN / 2][4];  // [buffer][pair of n8][first n8: piece 0, piece 1, second n8: the same]
          const auto load_b = [&](int step) {
#pragma unroll
            for (int n = 0; n < C::kFragsN / 2; ++n)
              ldmatrix_x4(b[step & 1][n], (b_row ^ (step * 32)) + n * 16 * C::kRowBytes);
          };
          load_b(0);
#pragma unroll
          for (int i = 0; i < C::kFragsM; ++i)
            if (active(i)) ldmatrix_x4(a[i], a_row[i]);
#pragma unroll
          for (int step = 0; step < C::kSteps; ++step) {
            if (step < steps) {
              const bool more = step + 1 < C::kSteps && step + 1 < steps;
              if (more) load_b(step + 1);
              Operand<C::In, C::kSplit> b_now[C::kFragsN / 2], a_now;
#pragma unroll
              for (int n = 0; n < C::kFragsN / 2; ++n) b_now[n].set(b[step & 1][n]);
#pragma unroll
              for (int i = 0; i < C::kFragsM; ++i) {
                if (active(i)) {
                  a_now.set(a[i]);
                  multiply(acc[i], a_now, b_now);
                  if (more) ldmatrix_x4(a[i], a_row[i] ^ ((step + 1) * 32));
                  if constexpr (C::Acc == Accum::f16_promoted && C::Promote <= C::CK) {
                    if ((step + 1) % (C::Promote / C::kStepK) == 0 || step + 1 == steps) {
#pragma unroll
                      for (int n = 0; n < C::kFragsN; ++n) acc[i][n].promote();
                    }
                  }
                }
              }
            }
          }
        }
        if constexpr (C::Promote > C::CK) {
          if (++since == C::Promote / C::CK) {
            since = 0;
#pragma unroll
            for (int i = 0; i < C::kFragsM; ++i)
#pragma unroll
              for (int n = 0; n < C::kFragsN; ++n) acc[i][n].promote();
          }
        }
        stage = stage + 1 == C::kStages ? 0 : stage + 1;
      }
    }
  }
  cp_async_wait<0>();
  const uint32_t flags = load_flags(args.raw);  // arrive while rows are stored

  const int channel0 = nb * C::BN + wn * C::kFragsN * 8;  // first channel of the warp, inside the group
  store_sums<C::In>(args, vec, part, tile, group, channel0, acc,
                    [&](int i) { return (wm + i * C::kWarpsM) * kFragRows; });
  if (part == 0 && any_nonfinite(flags)) {
#pragma unroll 1
    for (int i = 0; i < C::kFragsM; ++i)
      add_nonfinite<C::In, C::kSplit>(args, scheduled, (wm + i * C::kWarpsM) * kFragRows, group, channel0,
                                      C::kFragsN * 8);
  }
}

// Input channels of a group up to which launches of C are those of FpropNarrow; 0: none is.
template <class C>
inline constexpr int kNarrow = dtype_bytes(C::In) == 2 && C::Promote <= C::CK ? 8 : 0;

template <class C>
Parts fprop_sm80_parts(const ConvArgs& args) {
  if constexpr (kNarrow<C> != 0) {
    if (args.c_in <= kNarrow<C>) return fprop_narrow_parts<FpropNarrow<C::In, C::Acc>>(args);
  }
  return share_items(args, ceil_div(args.c_out, C::BN) * args.groups * args.plan.tiles,
                     static_cast<int>(ceil_div(args.c_in, C::CK)), C::kMinBlocks, 4, args.plan.kernel_volume);
}

template <class C>
cudaError_t launch_fprop_sm80(const ConvArgs& given, cudaStream_t stream) {
  if constexpr (kNarrow<C> != 0) {
    if (given.c_in <= kNarrow<C>) return launch_fprop_narrow<FpropNarrow<C::In, C::Acc>>(given, C::BN, stream);
  }
  const Parts parts = fprop_sm80_parts<C>(given);
  const ConvArgs args = parts_args(given, parts, DType::f32);
  const int n_blocks = static_cast<int>(ceil_div(args.c_out, C::BN));
  const int chunks = static_cast<int>(ceil_div(args.c_in, C::CK));
  const bool vec = outputs_aligned16(args, args.c_out);
  const int64_t blocks = static_cast<int64_t>(args.plan.tiles) * args.groups * n_blocks * parts.count();
  const cudaError_t status =
      launch_kernel(fprop_sm80_kernel<C>, blocks, C::kThreads, C::kSmem, stream, args, n_blocks, chunks, vec, parts);
  return status != cudaSuccess ? status : reduce_parts(given, parts, DType::f32, stream);
}

template <class C>
KernelEntry fprop_sm80_entry(const char* name) {
  return {{name, Op::fprop, C::In, C::Acc, kTileM, C::BN, C::CK, C::kStages, C::Sum::kAtom, C::kPromoteConfig, 80,
           C::kSmem},
          [](const ConvArgs& args) { return parts_workspace(args, fprop_sm80_parts<C>(args), 4); },
          launch_fprop_sm80<C>,
          [](const ConvArgs& args) { return fprop_sm80_parts<C>(args).count(); },
          nullptr,
          kNarrow<C>};
}

}  // namespace voxmma
