// Helpers shared by every convolution kernel: the walk over a plan, work shared by several CTAs, launch.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "../common/epilogue.cuh"
#include "../common/memory.cuh"
#include "../common/types.cuh"
#include "voxmma/conv.h"

namespace voxmma {

__device__ __forceinline__ Pass load_pass(const PlanView& plan, int pass) {
  const int4 v = __ldg(reinterpret_cast<const int4*>(plan.passes) + pass);
  return {v.x, v.y, v.z, v.w};
}

__device__ __forceinline__ ScheduledTile load_scheduled(const ScheduledTile* schedule, int64_t position) {
  const int4 v = __ldg(reinterpret_cast<const int4*>(schedule) + position);
  return {v.x, v.y, v.z, v.w};
}

// The two numbers that Channels make of channel i, not yet rounded.
struct Folded {
  double factor, summand;
};
__device__ __forceinline__ Folded fold_channel(const Channels& from, int64_t i) {
  const auto number = [&](const PerChannel& of, double without) {
    return of.values != nullptr ? load_as<double>(of.values, of.dtype, i) : without;
  };
  Folded v{number(from.scale, 1), number(from.bias, 0)};
  if (from.var.values != nullptr) v.factor /= sqrt(number(from.var, 1) + from.eps);
  if (from.mean.values != nullptr) v.summand -= number(from.mean, 0);
  if (from.scale.values != nullptr || from.var.values != nullptr) v.summand *= v.factor;
  if (from.shift.values != nullptr) v.summand += number(from.shift, 0);
  return v;
}

// Position in the schedule of the tile that worker `index` of `count` takes in a round. They are dealt out in turn and,
// in the next round, in the opposite order: of a list sorted by cost everybody gets nearly the same sum.
__device__ __forceinline__ uint32_t dealt(uint32_t round, uint32_t index, uint32_t count) {
  return round * count + (round & 1 ? count - 1 - index : index);
}

// A launch with fewer items (tile, block of output channels, group) than multiprocessors has each of them shared by
// several CTAs: a part takes the products of some chunks of input channels under some offsets, and the fp32 sums of the
// parts are added in their order. The parts of an item follow each other, chunks fastest.
inline constexpr int kMaxParts = 8;
struct Parts {
  int chunks = 1, offsets = 1;  // kMaxParts at most together, and no more than there are of each
  __host__ __device__ int count() const { return chunks * offsets; }
  // Chunks of part `rank` are chunk(rank, n) .. chunk_end(rank, n) - 1, of n.
  __device__ int chunk(int rank, int n) const { return n * (rank % chunks) / chunks; }
  __device__ int chunk_end(int rank, int n) const { return n * (rank % chunks + 1) / chunks; }
  // Offsets of part `rank`, as bits of a pass: bit j is offset k_begin + j. At least one of every part, over all passes.
  __device__ uint32_t offsets_of(int rank, int volume, const Pass& pass) const {
    const auto below = [&](int k) {  // bits of the pass's offsets that are less than k
      const int bits = min(max(k - pass.k_begin, 0), pass.k_count);
      return bits == 32 ? ~0u : (1u << bits) - 1;
    };
    return below(volume * (rank / chunks + 1) / offsets) & ~below(volume * (rank / chunks) / offsets);
  }
};

// The parts that make a launch of `items` shortest, 1 where the multiprocessors have enough to do. In units of one step
// (an offset and a chunk): a CTA starts in kStart of them, extra(parts) is what adding the sums takes, and
// at_once(parts) items run at a time.
template <class AtOnce, class Extra>
inline Parts share_items(int64_t items, int chunks, int volume, int sm_count, AtOnce at_once, Extra extra) {
  constexpr int64_t kStart = 8;
  Parts best;
  if (items >= sm_count) return best;
  int64_t least = (kStart + int64_t{chunks} * volume) * 15 / 16;
  for (int parts = 2; parts <= kMaxParts; ++parts) {
    for (int c = parts; c >= 1; --c) {  // a chunk's rows are gathered by all its parts, so rather more parts of those
      if (parts % c != 0 || c > chunks || parts / c > volume) continue;
      const int64_t steps = ceil_div(chunks, c) * ceil_div(volume, parts / c);
      const int64_t took = ceil_div(items, at_once(parts)) * (kStart + steps + extra(parts));
      if (took >= least) continue;
      least = took;
      best.chunks = c;
      best.offsets = parts / c;
    }
  }
  return best;
}

// What a CTA of a mma.sync wgrad kernel makes: an offset, or a block of them, of `offsets`; blocks of channels of dy and of x;
// a group; a range of the tiles. Those that read the same tiles run next to each other.
struct WgradBlock {
  unsigned offset;
  int co, ci, group, split;
  __device__ __forceinline__ WgradBlock(unsigned rest, int offsets, int co_blocks, int ci_blocks, int groups) {
    const auto take = [&](int of) {
      const unsigned found = rest % of;
      rest /= of;
      return found;
    };
    offset = take(offsets);
    co = static_cast<int>(take(co_blocks));
    ci = static_cast<int>(take(ci_blocks));
    group = static_cast<int>(take(groups));
    split = static_cast<int>(rest);
  }
};

// ---- host --------------------------------------------------------------------------------------------------------
// Lets `kernel` have `smem` bytes of dynamic shared memory; asks the driver once a kernel and device.
cudaError_t allow_shared(const void* kernel, size_t smem);

// Launches `kernel` over blocks (folded into grid.x), asking for `smem` bytes of dynamic shared memory.
template <class... Params, class... Args>
cudaError_t launch_kernel(void (*kernel)(Params...), int64_t blocks, int threads, size_t smem, cudaStream_t stream,
                          Args... args) {
  if (blocks == 0) return cudaSuccess;
  if (blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
  const cudaError_t status = allow_shared(reinterpret_cast<const void*>(kernel), smem);
  if (status != cudaSuccess) return status;
  kernel<<<dim3(static_cast<unsigned>(blocks)), threads, smem, stream>>>(args...);
  return cudaGetLastError();
}

inline size_t no_workspace(const ConvArgs&) { return 0; }

// Parts of a kernel whose CTAs leave their sums in memory, [parts][n_out][groups * c_out], for reduce_parts. A step takes
// about half a microsecond; adding up a launch and the time of its bytes.
inline Parts share_items(const ConvArgs& args, int64_t items, int chunks, int ctas_an_sm, int dtype_bytes, int volume) {
  constexpr int64_t kLaunch = 4, kBytes = 1'000'000;  // steps, and bytes written and read in one
  const int64_t bytes = args.plan.n_out * args.groups * args.c_out * dtype_bytes;
  return share_items(
      items, chunks, volume, args.sm_count,
      [&](int parts) { return std::max<int64_t>(1, int64_t{ctas_an_sm} * args.sm_count / parts); },
      [&](int parts) { return kLaunch + parts * bytes / kBytes; });
}
inline size_t parts_workspace(const ConvArgs& args, const Parts& parts, int dtype_bytes) {
  if (parts.count() == 1) return 0;
  return static_cast<size_t>(parts.count()) * args.plan.n_out * args.groups * args.c_out * dtype_bytes;
}
// The launch that leaves the parts' sums, of type `acc`, in the workspace; `args` as they are where nothing is shared.
inline ConvArgs parts_args(ConvArgs args, const Parts& parts, DType acc) {
  if (parts.count() == 1) return args;
  args.out = args.workspace;
  args.ldo = static_cast<int64_t>(args.groups) * args.c_out;
  args.out_dtype = acc;
  args.bias = nullptr;
  args.epilogue = {};
  return args;
}
// Adds them in order, then bias and epilogue, and rounds once. Does nothing where nothing is shared. Defined in pack.cu.
cudaError_t reduce_parts(const ConvArgs& args, const Parts& parts, DType acc, cudaStream_t stream);

// Number of parts the tiles are split into by a wgrad kernel that starts `blocks` CTAs a part and leaves `count` partial
// sums of `bytes` bytes: two waves of CTAs, at most 256 MB, never more than there are tiles, at least 1.
inline int wgrad_splits(const ConvArgs& args, int64_t blocks, int64_t count, int bytes) {
  int64_t splits = 2 * static_cast<int64_t>(args.sm_count) / (blocks > 0 ? blocks : 1);
  const int64_t most = (int64_t{256} << 20) / (count * bytes > 0 ? count * bytes : 1);
  if (splits > most) splits = most;
  if (splits > args.plan.tiles) splits = args.plan.tiles;
  return static_cast<int>(splits < 1 ? 1 : splits);
}

// Bytes of a wgrad kernel's partial sums. A single split writes dW itself.
inline size_t wgrad_workspace(int splits, int64_t count, int bytes) {
  return splits == 1 ? 0 : static_cast<size_t>(splits) * count * bytes;
}

// out[i] = sum over s, in order, of partial[s][i]; partial is fp32 or fp64 (`acc`). Defined in pack.cu.
// `pairs`, of a wgrad with fp16 or bf16 operands (`in`) whose kernel multiplies rows without a neighbour by zeros: a sum
// that is not finite is made again, from pairs alone.
cudaError_t reduce_splits(const void* partial, DType acc, int splits, int64_t count, void* out, DType out_dtype,
                          cudaStream_t stream, const ConvArgs* pairs = nullptr, DType in = DType::f32);

}  // namespace voxmma
