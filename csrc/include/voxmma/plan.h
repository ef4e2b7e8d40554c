// Tile plans, which kernels of convolutions and pooling walk: a kernel map, cut up.
//
// Vocabulary (README.md has the picture):
//   tile      kTileM output rows that lie next to each other on a Morton curve
//   pass      up to kPassOffsets kernel offsets of one tile whose unique input rows fit in kUniqueMax shared rows
//   fragment  kFragRows consecutive rows of a tile; a bit per offset says whether any of them has a neighbour
#pragma once

#include <cstdint>

namespace voxmma {

#pragma GCC visibility push(default)  // device.h

inline constexpr int kTileM = 256;    // output rows of a tile
inline constexpr int kFragRows = 16;  // rows of one MMA m16 fragment, the unit that is skipped
inline constexpr int kFrags = kTileM / kFragRows;
inline constexpr int kUniqueMax = 512;  // unique input rows of a pass, resident in shared memory
inline constexpr int kMissing =
    kUniqueMax;                          // local index of "no neighbour": the shared zero row behind the unique rows
inline constexpr int kPassOffsets = 32;  // offsets of a pass: one bit each in a 32-bit fragment mask

// One pass of a tile. Passes of a tile are consecutive and cover offsets 0..K-1 in order, each offset once.
struct Pass {
  int k_begin;      // first offset
  int k_count;      // number of offsets, 1..kPassOffsets
  int uniq_begin4;  // first entry in `uniq`, in units of 4 entries (16-byte aligned; reaches past 2^31 entries)
  int uniq_count;   // unique input rows, 0..kUniqueMax
};

// A row of a schedule, the order in which kernels take the tiles. There are two: the balanced one has the tiles of a
// window heaviest first, so that workers who are dealt tiles in turn get nearly the same sum; a window is small enough
// that the tiles worked on at a time stay neighbours and share input rows in L2. The other is the Morton order.
struct ScheduledTile {
  int tile;                // 0..T-1: rows tile * kTileM ... of `order`
  int first_pass, passes;  // its passes
  int cost;                // offsets used by each 64-row block, summed
};

// Device pointers of a tile plan. T = tiles = ceil(n_out / kTileM), K = kernel_volume.
struct PlanView {
  const int* order;               // [T * kTileM] caller's output row of each tile row; -1 pads the last tile
  const ScheduledTile* schedule;  // [2][T] balanced, then in Morton order
  const Pass* passes;             // [number of passes, in no particular order between tiles]
  const uint32_t* frag;           // [passes][kFrags] bit j: offset k_begin + j has a neighbour in that fragment
  const int* uniq;                // unique input rows of all passes
  const uint16_t* local;          // [T][K][kTileM] index into the pass's unique rows, kMissing = no neighbour
  int tiles;
  int kernel_volume;
  int64_t n_out, n_in;
};

#pragma GCC visibility pop

}  // namespace voxmma
