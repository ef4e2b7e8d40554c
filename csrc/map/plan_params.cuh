// What the host works out for the tiles of a plan. Part of plan.cu.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "plan_rows.cuh"

namespace voxmma {
namespace {

using namespace detail;

constexpr int kMaxVolume = kMaxKernel * kMaxKernel * kMaxKernel;

constexpr int kGroupBlocks = 4;

// Blocks share out the offsets of a tile where these are several groups, but not more than kGroupBlocks, and tiles are too
// few to fill the device: the rows are ordered by each of them.
bool splits(const PlanArgs& args) {
  const int volume = args.size[0] * args.size[1] * args.size[2];
  const int64_t most = int64_t{2} * args.sm_count * kTileM;
  return volume > kPassOffsets && volume <= kGroupBlocks * kPassOffsets && args.n_out > kTileM && args.n_out <= most;
}

// What the host works out for all tiles of a plan of up to kSize offsets along an axis.
template <int kSize>
struct ParamsOf {
  PlanArgs args;
  int volume;
  bool divide;             // by more than 1
  bool residue_order;      // of the rows, see residue_rows
  bool split;              // kGroupBlocks blocks, a cluster, make a tile: each the passes of one group of offsets
  bool pairs[3];           // neighbours along an axis are adjacent voxels: two of a brick at a time
  int quotient[3][kSize];  // of start + i * step by div, rounded down, and what is left
  int rest[3][kSize];
  int shift[3][kSize];                      // of the colours' lattice (see colour_of), by offset
  uint8_t sort_bit[kSize * kSize * kSize];  // bit of the rows' sort key that says whether a row has this neighbour
};

// Several plans in one launch: plan i has the blocks from end[i - 1] to end[i]. Those that split come first.
template <int kSize, int kPlans>
struct BatchOf {
  static constexpr int kMost = kPlans;
  unsigned end[kPlans];
  ParamsOf<kSize> plan[kPlans];

  // The plan that this block works on, which of its tiles, and which of the tile's blocks it is.
  __device__ __forceinline__ const ParamsOf<kSize>& of_block(int* tile, int* rank) const {
    int i = 0;
    while (blockIdx.x >= end[i]) ++i;
    const auto block = static_cast<int>(blockIdx.x - (i > 0 ? end[i - 1] : 0));
    *tile = plan[i].split ? block / kGroupBlocks : block;
    *rank = plan[i].split ? block % kGroupBlocks : 0;
    return plan[i];
  }
};
constexpr int kSmallKernel = 5;  // most offsets along an axis of plans that go together
using Batch = BatchOf<kSmallKernel, 20>;
using Single = BatchOf<kMaxKernel, 1>;
static_assert(sizeof(Batch) <= 32764 && sizeof(Single) <= 4096, "arguments of a kernel");

// Tiles that have rows.
__device__ __forceinline__ int tiles_in_use(const Rows& rows) {
  return static_cast<int>((rows.number() + kTileM - 1) / kTileM);
}

int volume_of(const PlanArgs& args) { return args.size[0] * args.size[1] * args.size[2]; }

int64_t tiles_of(const PlanArgs& args) { return (args.n_out + kTileM - 1) / kTileM; }

int gcd(int a, int b) { return b == 0 ? a : gcd(b, a % b); }

// Offsets along the axes, together, that lead from one coordinate to a whole number when divided by `div`: at most.
int64_t whole(const PlanArgs& args, const int* div) {
  int64_t count = 1;
  for (int a = 0; a < 3; ++a) {
    const int period = div[a] / gcd(div[a], std::abs(args.step[a]));
    count *= (args.size[a] + period - 1) / period;
  }
  return count;
}

template <int kSize>
ParamsOf<kSize> make_params(const PlanArgs& args, bool split) {
  ParamsOf<kSize> p;
  p.args = args;
  p.split = split;
  const int64_t residues = int64_t{args.div[0]} * args.div[1] * args.div[2];
  p.residue_order = residues > 1 && residues <= kResidues;
  p.volume = volume_of(args);
  p.divide = args.div[0] != 1 || args.div[1] != 1 || args.div[2] != 1;
  for (int a = 0; a < 3; ++a) {
    p.pairs[a] = args.step[a] == 1 && args.div[a] == 1;
    for (int i = 0; i < args.size[a]; ++i) {
      const int add = args.start[a] + i * args.step[a];
      p.quotient[a][i] = floor_div(add, args.div[a]);
      p.rest[a][i] = add - p.quotient[a][i] * args.div[a];
      p.shift[a][i] = args.div[a] == 1 ? floor_div(add, args.mul[a]) : p.quotient[a][i] + (p.rest[a][i] != 0);
    }
  }
  // The farther from the middle of the kernel, the rarer a neighbour, the more significant. Ties go by k.
  std::pair<int64_t, int> distance[kMaxVolume];
  for (int k = 0; k < p.volume; ++k) {
    const int i[3] = {k / args.size[2] / args.size[1], k / args.size[2] % args.size[1], k % args.size[2]};
    distance[k] = {0, k};
    for (int a = 0; a < 3; ++a) {
      const int64_t twice = int64_t{2 * i[a] - (args.size[a] - 1)} * args.step[a];
      distance[k].first += twice * twice;
    }
  }
  std::sort(distance, distance + p.volume);
  for (int rank = 0; rank < p.volume; ++rank) {
    p.sort_bit[distance[rank].second] = static_cast<uint8_t>(rank * 32 / std::max(p.volume, 32));
  }
  return p;
}

}  // namespace
}  // namespace voxmma
