// Forward and input gradient of up to 8 input channels of 16 bits, as first layers have them: a row is one 16-byte piece,
// and a launch of a tile of FpropSm80 runs here. One CTA computes 256 output rows x 32 channels.
//
//   for every pass of the tile:
//     gather its unique input rows [<= 512][8], the weights of its offsets [32][8] and each warp's local indices into
//     shared memory, once
//     each warp, of 32 tile rows, takes the offsets that those need, without waiting for other warps:
//       accumulators [32][32] += rows picked by the local index, times weights
//   store through plan.order, with bias and epilogue
//
// Offset by offset as in fprop_sm80.cuh, whose sums have zeros for the channels that are not there: the same bits. H200,
// lidar_dense (125,657 voxels), 5x5x5, 6 -> 32 channels: 39 us instead of 116.
#pragma once

#include "fprop_sm80_store.cuh"
#include "nonfinite.cuh"

namespace voxmma {

template <DType In_, Accum Acc_>
struct FpropNarrow {
  static constexpr DType In = In_;
  static constexpr Accum Acc = Acc_;
  using Sum = Accumulator<In, Acc>;
  static constexpr int kMinBlocks = Acc == Accum::f16_promoted ? 3 : 4;  // as many as hide each other's copies
  static constexpr int kThreads = 256, kWarps = kThreads / 32;
  static constexpr int kColumns = 32, kFragsN = kColumns / 8, kFragsM = 2;
  static constexpr int kRowBytes = 16;
  static constexpr int kOffsetBytes = kColumns * kRowBytes;     // weights of one offset
  static constexpr int kWarpLocal = kPassOffsets * 32 * 2;      // [kPassOffsets][32] uint16
  static constexpr int kLocal = (kUniqueMax + 1) * kRowBytes;   // behind the rows, of which the last is zero
  static constexpr int kWeight = kLocal + kWarps * kWarpLocal;  // [kPassOffsets][kColumns][8]
  static constexpr int kSmem = kWeight + kPassOffsets * kOffsetBytes;
  static_assert(dtype_bytes(In) == 2 && kTileM == kWarps * 32 && kUniqueMax == 2 * kThreads);
};

// image_rows: output channels of a block of the weight image.
template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kMinBlocks)
    fprop_narrow_kernel(const ConvArgs args, const int n_blocks, const int image_rows, const bool vec,
                        const Parts parts) {
  using T = type_of<C::In>;
  extern __shared__ __align__(1024) unsigned char smem[];
  const PlanView& plan = args.plan;
  const int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, threadIdx.x / 32, 0);

  const int part = static_cast<int>(blockIdx.x % parts.count());
  const unsigned item = blockIdx.x / parts.count();
  const int channel0 = static_cast<int>(item % n_blocks) * C::kColumns;  // inside the group
  const int group = static_cast<int>(item / n_blocks % args.groups);
  const ScheduledTile scheduled = load_scheduled(plan.schedule, item / n_blocks / args.groups);
  const int tile = scheduled.tile;

  const T* x = static_cast<const T*>(args.a) + group * args.a_group;
  const int row_bytes = args.c_in * static_cast<int>(sizeof(T));  // the rest is filled with zeros
  // image[g][nb][offset][image_rows][8]: this lane's output channel of the first offset
  const int image_bytes = image_rows * C::kRowBytes;
  const int image_block = group * ((args.c_out + image_rows - 1) / image_rows) + channel0 / image_rows;
  const char* image = static_cast<const char*>(args.b) +
                      static_cast<int64_t>(image_block) * plan.kernel_volume * image_bytes +
                      (channel0 % image_rows + lane) * C::kRowBytes;
  const uint16_t* local = plan.local + static_cast<int64_t>(tile) * plan.kernel_volume * kTileM + warp * 32;

  const uint32_t s_rows = smem_address(smem);
  const uint32_t s_local = s_rows + C::kLocal + warp * C::kWarpLocal;
  const uint32_t s_weight = s_rows + C::kWeight;
  if (threadIdx.x == 0) reinterpret_cast<uint4*>(smem)[kMissing] = make_uint4(0, 0, 0, 0);

  // A pass, the offset bits of its fragment lane % 16, and the numbers of two of its unique rows: loaded a pass ahead.
  const int pass_end = scheduled.first_pass + scheduled.passes;
  Pass pass;
  uint32_t frag;
  int from[2];
  const auto load_head = [&](int p) {
    pass = load_pass(plan, p);
    frag = __ldg(plan.frag + static_cast<int64_t>(p) * kFrags + lane % kFrags);
  };
  const auto load_numbers = [&] {
    const int* uniq = plan.uniq + static_cast<int64_t>(pass.uniq_begin4) * 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = threadIdx.x + i * C::kThreads;
      from[i] = row < pass.uniq_count ? __ldg(uniq + row) : -1;
    }
  };
  load_head(scheduled.first_pass);
  load_numbers();

  typename C::Sum acc[C::kFragsM][C::kFragsN];
  for (int p = scheduled.first_pass; p < pass_end; ++p) {
    const uint32_t takes = parts.offsets == 1 ? frag : frag & parts.offsets_of(part, plan.kernel_volume, pass);
    const uint32_t mask = __reduce_or_sync(~0u, takes);  // offsets that the tile needs
    const uint32_t of[C::kFragsM] = {__shfl_sync(~0u, takes, 2 * warp), __shfl_sync(~0u, takes, 2 * warp + 1)};
    uint32_t bits = of[0] | of[1];  // and the warp
    if (mask) {
      __syncthreads();  // every warp has finished with the pass before
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (from[i] >= 0)
          cp_async16(s_rows + (threadIdx.x + i * C::kThreads) * C::kRowBytes, x + from[i] * args.lda, row_bytes);
      }
#pragma unroll
      for (int j = warp; j < kPassOffsets; j += C::kWarps) {
        if (mask >> j & 1)
          cp_async16_cached(s_weight + j * C::kOffsetBytes + lane * C::kRowBytes,
                            image + static_cast<int64_t>(pass.k_begin + j) * image_bytes);
      }
#pragma unroll
      for (int j = lane / 4; j < kPassOffsets; j += 8) {
        if (bits >> j & 1)
          cp_async16(s_local + j * 64 + lane % 4 * 16,
                     local + static_cast<int64_t>(pass.k_begin + j) * kTileM + lane % 4 * 8);
      }
      cp_async_commit();
    }
    const bool more = p + 1 < pass_end;
    if (more) load_head(p + 1);
    if (mask) {
      cp_async_wait<0>();
      __syncthreads();
    }
    if (more) load_numbers();

    for (; bits; bits &= bits - 1) {
      const int j = __ffs(bits) - 1;
      const int row = reinterpret_cast<const uint16_t*>(smem + C::kLocal)[(warp * kPassOffsets + j) * 32 + lane];
      uint32_t a[4], b[4];
      ldmatrix_x4(a, s_rows + row * C::kRowBytes);  // rows 0 .. 7 and 8 .. 15 of one fragment, then of the other
      ldmatrix_x4(b, s_weight + j * C::kOffsetBytes + lane * C::kRowBytes);  // eight output channels each
#pragma unroll
      for (int i = 0; i < C::kFragsM; ++i) {
        if (!(of[i] >> j & 1)) continue;
#pragma unroll
        for (int n = 0; n < C::kFragsN; ++n) {
          acc[i][n].mma_half(a[2 * i], a[2 * i + 1], b[n]);
          if constexpr (C::Acc == Accum::f16_promoted) acc[i][n].promote();
        }
      }
    }
  }

  const uint32_t flags = load_flags(args.raw);  // arrive while rows are stored
  store_sums<C::In>(args, vec, part, tile, group, channel0, acc, [&](int i) { return (2 * warp + i) * kFragRows; });
  if (part == 0 && any_nonfinite(flags)) {
#pragma unroll 1
    for (int i = 0; i < C::kFragsM; ++i)
      add_nonfinite<C::In>(args, scheduled, (2 * warp + i) * kFragRows, group, channel0, C::kColumns);
  }
}

template <class C>
Parts fprop_narrow_parts(const ConvArgs& args) {
  if (args.plan.kernel_volume <= kPassOffsets) return {};  // takes less than the launch that adds
  // In steps of share_items: four offsets, none of which waits for another, in half a microsecond.
  return share_items(args, ceil_div(args.c_out, C::kColumns) * args.groups * args.plan.tiles, 1, C::kMinBlocks, 4,
                     static_cast<int>(ceil_div(args.plan.kernel_volume, 4)));
}

template <class C>
cudaError_t launch_fprop_narrow(const ConvArgs& given, int image_rows, cudaStream_t stream) {
  const Parts parts = fprop_narrow_parts<C>(given);
  const ConvArgs args = parts_args(given, parts, DType::f32);
  const int n_blocks = static_cast<int>(ceil_div(args.c_out, C::kColumns));
  const int64_t blocks = static_cast<int64_t>(args.plan.tiles) * args.groups * n_blocks * parts.count();
  const cudaError_t status = launch_kernel(fprop_narrow_kernel<C>, blocks, C::kThreads, C::kSmem, stream, args,
                                           n_blocks, image_rows, outputs_aligned16(args, args.c_out), parts);
  return status != cudaSuccess ? status : reduce_parts(given, parts, DType::f32, stream);
}

}  // namespace voxmma
