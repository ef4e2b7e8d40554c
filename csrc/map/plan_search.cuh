// The neighbours of output rows, and the set of those of a tile. Part of plan.cu.
#pragma once

#include "bricks.cuh"
#include "plan_params.cuh"

namespace voxmma {
namespace {

using namespace detail;

constexpr int kRoundOffsets = 4;  // offsets searched at a time where the shared set may fill up
constexpr int kSetSlots = 2048;   // shared set of input ranks
constexpr int kSetShift = 32 - 11;
constexpr int kSetLimit = kUniqueMax + kRoundOffsets * kTileM;  // ranks in the set beyond which it refuses new ones

// A thread looks at the limit before it inserts: kTileM ranks may come on top of it.
static_assert(kSetSlots == 1 << (32 - kSetShift) && kSetSlots > kSetLimit + kTileM, "set too small");

// Calls emit(k, input rank) for every neighbour under the offsets k_begin..k_end-1, in no particular order, with kProbes
// independent hash probes in flight per thread. Whole warps
// call it together. Where lanes part, a __syncwarp brings them together again: without them the lanes went on alone
// from the first hash chain to the end, 5 of 32 at a time.
template <bool kDivide, int kProbes, class P, class Emit>
__device__ __forceinline__ void for_neighbours(const P& p, int k_begin, int k_end, const Query& query,
                                               const Emit& emit) {
  constexpr uint32_t kBricks = 1u << kBrickBits;  // along an axis
  const auto* table = reinterpret_cast<const uint4*>(p.args.bricks);
  const auto capacity = static_cast<uint32_t>(p.args.capacity);
  const int size_y = p.args.size[1], size_z = p.args.size[2];
  const int groups = p.pair_z ? size_z / 2 + 1 : size_z;  // bricks along z
  const int xy_end = (k_end - 1) / size_z + 1;
  int xy = k_begin / size_z, ix = xy / size_y, iy = xy % size_y, group = 0;
  while (xy < xy_end) {  // the same number of times on all lanes
    __syncwarp();
    uint2 key[kProbes];
    uint4 found[kProbes];
    uint32_t slot[kProbes];
    int first_k[kProbes];  // of cell 0 of the two along z
    int cells[kProbes];    // (first cell, which of the two)
    bool any = false;
#pragma unroll
    for (int u = 0; u < kProbes; ++u) {
      const int x = query.template operator()<kDivide>(p, 0, ix), y = query.template operator()<kDivide>(p, 1, iy);
      int z, cell, wanted;  // brick along z; offset along z of its cell 0; cells that are offsets
      if (p.pair_z) {
        const int odd = query.at[2] & 1;
        z = (query.at[2] >> 1) + group;
        cell = 2 * group - odd;
        wanted = (cell < 0 ? 2 : 3) & (cell + 1 < size_z ? 3 : cell < size_z ? 1 : 0);
      } else {
        const int at = query.template operator()<kDivide>(p, 2, group);
        z = at >> 1;
        cell = group - (at & 1);
        wanted = 1 << (at & 1);
      }
      const bool inside = uint32_t(x) < 2 * kBricks && uint32_t(y) < 2 * kBricks && uint32_t(z) < kBricks;
      if (!inside || xy >= xy_end) wanted = 0;
      first_k[u] = xy * size_z + cell;
      cells[u] = ((x & 1) * 4 + (y & 1) * 2) | wanted << 4;
      key[u] = brick_key(uint32_t(query.batch), uint32_t(x) >> 1, uint32_t(y) >> 1, uint32_t(z));
      slot[u] = home_slot(key[u], capacity);
      found[u] = make_uint4(0, kNoBrick, 0, 0);
      if (wanted != 0) found[u] = __ldg(table + slot[u]);
      any = any || ((found[u].x != key[u].x || found[u].y != key[u].y) && found[u].y != kNoBrick);
      if (++group == groups) {
        group = 0;
        ++xy;
        if (++iy == size_y) {
          iy = 0;
          ++ix;
        }
      }
    }
    while (any) {  // together: the chains' latencies overlap
      any = false;
#pragma unroll
      for (int u = 0; u < kProbes; ++u) {
        if ((found[u].x != key[u].x || found[u].y != key[u].y) && found[u].y != kNoBrick) {
          slot[u] = next_slot(slot[u], capacity);
          found[u] = __ldg(table + slot[u]);
          any = true;
        }
      }
    }
    __syncwarp();
#pragma unroll
    for (int u = 0; u < kProbes; ++u) {
      const int cell = cells[u] & 15;
      const uint32_t mask = found[u].y == kNoBrick ? 0 : found[u].w, present = mask >> cell & (cells[u] >> 4);
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int k = first_k[u] + c;
        if ((present >> c & 1) && k >= k_begin && k < k_end) {
          emit(k, static_cast<int>(found[u].z) + __popc(mask & ((1u << (cell + c)) - 1)));
        }
        __syncwarp();
      }
    }
  }
}

// Finds `rank` in the shared set, or puts it in and counts it in `fill`. Returns its slot; kSetSlots when it is full.
__device__ __forceinline__ int set_insert(int* set_rank, int* fill, int rank) {
  int slot = static_cast<int>((uint32_t(rank) * 2654435769u) >> kSetShift);
  int seen;
  while ((seen = *static_cast<volatile int*>(set_rank + slot)) != rank) {
    if (seen == -1) {
      if (*static_cast<volatile int*>(fill) >= kSetLimit) return kSetSlots;
      seen = atomicCAS(set_rank + slot, -1, rank);
      if (seen == -1) atomicAdd(fill, 1);
      if (seen == -1 || seen == rank) break;
    }
    slot = (slot + 1) & (kSetSlots - 1);
  }
  return slot;
}

}  // namespace
}  // namespace voxmma
