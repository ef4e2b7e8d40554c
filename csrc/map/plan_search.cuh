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
// independent hash probes in flight per thread. Along an axis of adjacent voxels a brick serves two offsets. Whole warps
// call it together. Where lanes part, a __syncwarp brings them together again: without them the lanes went on alone
// from the first hash chain to the end, 5 of 32 at a time.
template <bool kDivide, int kProbes, class P, class Emit>
__device__ __forceinline__ void for_neighbours(const P& p, int k_begin, int k_end, const Query& query,
                                               const Emit& emit) {
  static_assert(kProbes <= 4, "8 cells each in a word");
  constexpr uint32_t kBricks = 1u << kBrickBits;                                 // along an axis
  constexpr uint32_t kCells[3][2] = {{0x0f, 0xf0}, {0x33, 0xcc}, {0x55, 0xaa}};  // of a brick, by coordinate
  const Brick* table = p.args.bricks;
  const auto capacity = static_cast<uint32_t>(p.args.capacity);
  const int size_y = p.args.size[1], size_z = p.args.size[2], area = size_y * size_z;
  // Offsets lo .. hi along each axis, and the bricks, counted from that of the first offset, in which they lie.
  const int x0 = k_begin / area, x1 = (k_end - 1) / area;
  const int lo[3] = {x0, x0 == x1 ? k_begin / size_z - x0 * size_y : 0, 0};
  const int hi[3] = {x1, x0 == x1 ? (k_end - 1) / size_z - x0 * size_y : size_y - 1, size_z - 1};
  int begin[3], last[3], at[3], from[3];  // from: coordinate of the first offset
#pragma unroll
  for (int a = 0; a < 3; ++a) {
    at[a] = begin[a] = p.pairs[a] ? lo[a] / 2 : lo[a];
    last[a] = p.pairs[a] ? (hi[a] + 1) / 2 : hi[a];
    from[a] = query.template operator()<kDivide>(p, a, 0);
  }
  while (at[0] <= last[0]) {  // the same number of times on all lanes
    __syncwarp();
    uint2 key[kProbes];
    BucketKeys keys[kProbes];
    uint32_t bucket[kProbes], wanted[kProbes];  // cells that are offsets
    int first_k[kProbes];                       // of cell 0, which need not be an offset
    bool any = false;
#pragma unroll
    for (int u = 0; u < kProbes; ++u) {
      uint32_t brick[3];
      int offset[3];  // of the brick's lower cells
      wanted[u] = at[0] <= last[0] ? 0xff : 0;
#pragma unroll
      for (int a = 0; a < 3; ++a) {
        bool lower, upper;
        if (p.pairs[a]) {
          brick[a] = uint32_t((from[a] >> 1) + at[a]);
          offset[a] = 2 * at[a] - (from[a] & 1);
          lower = offset[a] >= lo[a] && offset[a] <= hi[a];
          upper = offset[a] + 1 >= lo[a] && offset[a] + 1 <= hi[a];
        } else {
          const int cell = query.template operator()<kDivide>(p, a, at[a]);
          brick[a] = uint32_t(cell >> 1);
          offset[a] = at[a] - (cell & 1);
          lower = !(cell & 1), upper = cell & 1;
        }
        wanted[u] &= brick[a] < kBricks ? (lower ? kCells[a][0] : 0) | (upper ? kCells[a][1] : 0) : 0;
      }
      first_k[u] = offset[0] * area + offset[1] * size_z + offset[2];
      key[u] = brick_key(uint32_t(query.batch), brick[0], brick[1], brick[2]);
      bucket[u] = home_bucket(key[u], capacity);
      keys[u] = BucketKeys::empty();
      if (wanted[u] != 0) keys[u] = BucketKeys::load(table, bucket[u]);
      any = any || (keys[u].full() && keys[u].find(key[u]) == kBucket);
      if (++at[2] > last[2]) {
        at[2] = begin[2];
        if (++at[1] > last[1]) {
          at[1] = begin[1];
          ++at[0];
        }
      }
    }
    while (any) {  // together: the chains' latencies overlap
      any = false;
#pragma unroll
      for (int u = 0; u < kProbes; ++u) {
        if (keys[u].full() && keys[u].find(key[u]) == kBucket) {
          bucket[u] = next_bucket(bucket[u], capacity);
          keys[u] = BucketKeys::load(table, bucket[u]);
          any = true;
        }
      }
    }
    int first[kProbes];            // rank of the brick's first voxel
    uint32_t masks = 0, rest = 0;  // cells that are voxels, and those to emit, 8 bits a brick
#pragma unroll
    for (int u = 0; u < kProbes; ++u) {
      const int slot = keys[u].find(key[u]);
      const uint2 found = slot == kBucket ? make_uint2(0, 0) : load_brick(table, bucket[u], slot);
      first[u] = static_cast<int>(found.x);
      masks |= found.y << (8 * u);
      rest |= (found.y & wanted[u]) << (8 * u);
    }
    __syncwarp();
    // The bricks' cells in one loop, which takes as long as the lane that has the most of them.
    while (__any_sync(0xffffffffu, rest != 0)) {
      if (rest != 0) {
        const int bit = __ffs(static_cast<int>(rest)) - 1, cell = bit & 7;
        int rank = first[0], k = first_k[0];
#pragma unroll
        for (int u = 1; u < kProbes; ++u) {
          rank = bit >= 8 * u ? first[u] : rank;
          k = bit >= 8 * u ? first_k[u] : k;
        }
        k += (cell >> 2) * area + (cell >> 1 & 1) * size_z + (cell & 1);
        rank += __popc(masks & ((1u << bit) - (1u << (bit - cell))));
        if (k >= k_begin && k < k_end) emit(k, rank);
        rest &= rest - 1;
      }
      __syncwarp();
    }
  }
}

// Finds `rank` in the shared set, or puts it in and counts it in `fill`. Returns its slot; kSetSlots when it is full.
__device__ __forceinline__ int set_insert(int* set_rank, int* fill, int rank) {
  int slot = static_cast<int>((uint32_t(rank) * 2654435769u) >> kSetShift);
  const bool full = *static_cast<volatile int*>(fill) >= kSetLimit;  // on its way with the first slot
  int seen;
  while ((seen = *static_cast<volatile int*>(set_rank + slot)) != rank) {
    if (seen == -1) {
      if (full) return kSetSlots;
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
