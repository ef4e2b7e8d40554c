// The balanced order of a plan's tiles. Part of plan.cu.
#pragma once

#include "plan_params.cuh"

namespace voxmma {
namespace {

using namespace detail;

// Tiles of a window of the balanced schedule: two rounds of a persistent kernel. A map of up to four is one window.
__host__ __device__ __forceinline__ int window_of(int tiles, int sm_count) {
  return tiles <= 4 * sm_count ? tiles : 2 * sm_count;
}

// Plans of up to so many tiles, if they are one window, are ranked by the last of the blocks that make them.
constexpr int kRankedInPlace = 2 * kThreads;

// A tile that no other is counted or ranked with: its block writes the statistics, which need not be zero before.
__host__ __device__ __forceinline__ bool only_tile(const PlanArgs& args) { return args.n_out <= kTileM; }

__host__ __device__ __forceinline__ bool ranked_in_place(const PlanArgs& args) {
  return args.n_out <= kRankedInPlace * kTileM && args.n_out <= int64_t{4} * args.sm_count * kTileM;
}

__device__ __forceinline__ ScheduledTile load_tile(const ScheduledTile* from) {
  const int4 tile = __ldcg(reinterpret_cast<const int4*>(from));
  return {tile.x, tile.y, tile.z, tile.w};
}

// Puts all tiles in use behind those that cost more, and those before them that cost as much. By the whole block; `costs`
// has room for kRankedInPlace.
__device__ __forceinline__ void rank_in_place(const PlanArgs& args, int used, int* costs) {
  const int t = threadIdx.x;
  const ScheduledTile* ordered = args.schedule + (args.compact ? int64_t{used} : (args.n_out + kTileM - 1) / kTileM);
  const int padded = (used + 3) / 4 * 4;
#pragma unroll 1
  for (int i = t; i < padded; i += kThreads) costs[i] = i < used ? __ldcg(&ordered[i].cost) : -1;
  __syncthreads();
#pragma unroll 1
  for (int i = t; i < used; i += kThreads) {
    const int mine = costs[i];
    int rank = 0;
#pragma unroll 2
    for (int j = 0; j < padded; j += 4) {
      const int4 other = *reinterpret_cast<const int4*>(costs + j);
      rank += (other.x + (j < i) > mine) + (other.y + (j + 1 < i) > mine) + (other.z + (j + 2 < i) > mine) +
              (other.w + (j + 3 < i) > mine);
    }
    args.schedule[rank] = load_tile(ordered + i);
  }
}

// One plan's part of ranking by a launch of its own.
struct Ranking {
  ScheduledTile* schedule;
  int tiles;  // 0: those in use
  int sm_count;
  Rows rows;
};

// Puts each tile where it belongs in its window, as rank_in_place does. A block places 32 tiles of a window, its warps
// share out the tiles to compare with.
__device__ __forceinline__ void rank_block(const Ranking& r, int block) {
  __shared__ int rank[32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int used = tiles_in_use(r.rows), window = window_of(used, r.sm_count);
  ScheduledTile* schedule = r.schedule;
  const ScheduledTile* ordered = schedule + (r.tiles == 0 ? used : r.tiles);
  const int blocks = max((window + 31) / 32, 1), begin = block / blocks * window;
  const int end = min(begin + window, used), tile = begin + block % blocks * 32 + lane;
  if (begin >= end) return;
  if (warp == 0) rank[lane] = begin;
  __syncthreads();
  const ScheduledTile mine = tile < end ? ordered[tile] : ScheduledTile{};
  int ahead = 0;
#pragma unroll 8
  for (int i = begin + warp; i < end; i += kWarps) ahead += __ldg(&ordered[i].cost) + (i < tile) > mine.cost;
  atomicAdd(&rank[lane], ahead);
  __syncthreads();
  if (warp == 0 && tile < end) schedule[rank[lane]] = mine;
}

}  // namespace
}  // namespace voxmma
