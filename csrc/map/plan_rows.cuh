// The order of a tile's rows, and of its unique inputs in shared memory: clusters of rows with the same neighbours, colours
// against bank conflicts. Part of plan.cu.
#pragma once

#include <climits>

#include "bricks.cuh"

namespace voxmma {
namespace {

using namespace detail;

constexpr int kThreads = kTileM;  // thread t owns tile row t
constexpr int kWarps = kThreads / 32;

// Colours. ldmatrix reads 8 rows at a time, which collide in shared memory where two of their slots are the same modulo
// 8. A colour is a linear function of the coordinates modulo 8: what an offset adds to it is the same for all rows, so 8
// rows of 8 colours have neighbours of 8 colours under every offset. Rows of a tile are dealt into groups of 8 that way,
// and unique rows get slots of their colour. Accesses a read, 3x3x3: 1.92 without colours, 1.51 with them on surfaces,
// 1.46 and 1.36 on LiDAR. A tile takes the function that deals its rows best.
constexpr int kColours = 8, kColourBits = 3;
constexpr int kColourings = 8;
// Factors of x, y and z.
__host__ __device__ constexpr int colour_factor(int colouring, int axis) {
  constexpr int kFactors[kColourings] = {0531, 0312, 0421, 0153, 0311, 0251, 0214, 0142};
  return kFactors[colouring] >> (3 * axis) & 7;
}
constexpr int kDeal = 32;  // rows that are dealt among each other: a warp's
constexpr int kDealGroups = kDeal / kColours;

constexpr int kNowhere = INT_MIN / 2;  // a coordinate from which no offset leads to a voxel

__host__ __device__ __forceinline__ int floor_div(int value, int div) {
  const int quotient = value / div;
  return quotient - (value % div < 0);
}

// The part of the neighbours' coordinates that an output row fixes: biased, divided, and what is left.
struct Query {
  int batch, at[3], rest[3];

  template <bool kDivide>
  __device__ __forceinline__ static Query make(const PlanArgs& args, int row) {
    const int4 c = row >= 0 ? __ldg(reinterpret_cast<const int4*>(args.out_coords) + row) : make_int4(0, 0, 0, 0);
    const int coord[3] = {c.y, c.z, c.w};
    Query q{c.x};
#pragma unroll
    for (int a = 0; a < 3; ++a) {
      const int scaled = coord[a] * args.mul[a], quotient = kDivide ? floor_div(scaled, args.div[a]) : scaled;
      q.rest[a] = kDivide ? scaled - quotient * args.div[a] : 0;
      q.at[a] = row < 0 ? kNowhere : quotient + kCoordBias + (kDivide ? 0 : args.start[a]);
    }
    return q;
  }

  // Biased coordinate of the i-th offset of an axis; negative where the division leaves a remainder.
  template <bool kDivide, class P>
  __device__ __forceinline__ int operator()(const P& p, int axis, int i) const {
    if constexpr (!kDivide) return at[axis] + i * p.args.step[axis];
    const int left = rest[axis] + p.rest[axis][i];
    const int quotient = at[axis] + p.quotient[axis][i] + (left == 0 ? 0 : 1);
    return left == 0 || left == p.args.div[axis] ? quotient : -1;
  }
};

// Residue order. Under a division an output row has only neighbours whose offset fits its coordinate modulo the divisor: one
// of eight for 2x2x2 at stride 2. So the rows of a window of tiles are put in order of that residue, Morton order within,
// before tiles are cut: a tile then uses few offsets, with most of its rows. Windows are small enough that the tiles of one
// share their inputs in L2.
constexpr int kResidueTiles = 4;  // of a window
constexpr int kResidues = 27;     // at most; a divisor with more leaves the order as it is
struct ResidueShared {
  // By residue (the last one: no row) and 32 rows of the window: rows; then rows before them.
  int count[(kResidues + 1) * kResidueTiles * kWarps];
};

// The caller's output row that comes to tile row t = threadIdx.x of `tile`, -1: none. `rows`: of the plan. By the whole block.
__device__ __forceinline__ void residue_rows(const PlanArgs& args, int64_t rows, int tile, ResidueShared& s,
                                             int* chosen /* [kTileM] */) {
  constexpr int tiles = kResidueTiles, chunks = tiles * kWarps;
  const int t = threadIdx.x, lane = t % 32;
  const int residues = args.div[0] * args.div[1] * args.div[2];
  const int64_t begin = int64_t{tile / tiles} * tiles * kTileM;
  const int count = static_cast<int>(min(rows - begin, int64_t{tiles} * kTileM)), first = tile % tiles * kTileM;
  const int entries = (residues + 1) * chunks;
  const auto residue_of = [&](int row) {
    if (row < 0) return residues;
    const Query q = Query::make<true>(args, row);
    return (q.rest[0] * args.div[1] + q.rest[1]) * args.div[2] + q.rest[2];
  };
  const auto row_at = [&](int position) { return position < count ? args.out_order[begin + position] : -1; };
  for (int i = t; i < entries; i += kThreads) s.count[i] = 0;
  __syncthreads();
  for (int i = 0; i < tiles; ++i) {
    const int position = i * kTileM + t, residue = residue_of(row_at(position));
    const uint32_t same = __match_any_sync(0xffffffffu, residue);
    if ((same & ((1u << lane) - 1)) == 0) s.count[residue * chunks + position / 32] = __popc(same);
  }
  __syncthreads();
  if (t < 32) {  // a lane a run of entries
    const int run = (entries + 31) / 32, from = min(lane * run, entries), to = min(from + run, entries);
    int sum = 0;
    for (int i = from; i < to; ++i) sum += s.count[i];
    int before = sum;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const int other = __shfl_up_sync(0xffffffffu, before, d);
      if (lane >= d) before += other;
    }
    before -= sum;
    for (int i = from; i < to; ++i) {
      const int own = s.count[i];
      s.count[i] = before;
      before += own;
    }
  }
  __syncthreads();
  for (int i = 0; i < tiles; ++i) {
    const int position = i * kTileM + t, row = row_at(position), residue = residue_of(row);
    const uint32_t same = __match_any_sync(0xffffffffu, residue);
    const int to = s.count[residue * chunks + position / 32] + __popc(same & ((1u << lane) - 1)) - first;
    if (to >= 0 && to < kTileM) chosen[to] = row;
  }
  __syncthreads();
}

// Ascending bitonic sort of one distinct key per thread, where those from `count` on are sorted and behind the others.
// `buffer` holds 2 * kTileM keys; its first half may be used again right after, its second half after a barrier.
__device__ __forceinline__ uint64_t block_sort(uint64_t key, int count, uint64_t* buffer) {
  const unsigned t = threadIdx.x;
  const uint64_t own = key;
  unsigned sorted = 32;  // keys, a power of two
  while (sorted < unsigned(count)) sorted *= 2;
  unsigned half = 0;  // of the buffer, in turn: one barrier an exchange, of which there are 6, 3, 1 or none
#pragma unroll 1      // a block runs through its code once: what is unrolled waits for instructions
  for (unsigned size = 2; size <= sorted; size *= 2) {
#pragma unroll 1
    for (unsigned stride = size / 2; stride > 0; stride /= 2) {
      uint64_t other;
      if (stride >= 32) {
        buffer[half + t] = key;
        __syncthreads();
        other = buffer[half + (t ^ stride)];
        half ^= unsigned(kTileM);
      } else {
        other = __shfl_xor_sync(0xffffffffu, key, stride);
      }
      const bool keep_smaller = ((t & size) == 0) == ((t & stride) == 0);
      key = (key < other) == keep_smaller ? key : other;
    }
  }
  if (half != 0) __syncthreads();  // the last exchange was in the first half
  return t < sorted ? key : own;
}

// Bit i of lane j becomes bit j of lane i.
__device__ __forceinline__ uint32_t transpose(uint32_t v) {
  const unsigned lane = threadIdx.x % 32;
  uint32_t low = 0x0000ffffu;
#pragma unroll
  for (unsigned j = 16; j > 0; j /= 2, low ^= low << j) {
    const uint32_t other = __shfl_xor_sync(0xffffffffu, v, j);
    v = (lane & j) == 0 ? (v & low) | (other & low) << j : (v & ~low) | (other & ~low) >> j;
  }
  return v;
}

// The lowest `count` set bits of v, 0 < count <= popc(v).
__device__ __forceinline__ uint32_t lowest_bits(uint32_t v, int count) {
  uint32_t rest = v;
  int last = 0;
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    const int below = __popc(rest & ((1u << step) - 1));
    if (count > below) {
      count -= below;
      rest >>= step;
      last += step;
    }
  }
  return v & ((2u << last) - 1);
}

// Shared memory of cluster_rows, for one block of kTileM threads. Bit b of a row is bit b of its mask.
struct ClusterShared {
  uint32_t column[32][kWarps];  // of every bit, the positions that have it
  int cost[kWarps][32];         // by bit: what the warp counted of the halves' unions
  uint32_t mask[kTileM];        // of every position
  uint8_t row[kTileM];          // thread whose row stands at the position
  int count[32];                // rows with each bit
  int bit_at[32];               // bit of the neighbour mask that a bit of the sort key stands for
};
static_assert(offsetof(ClusterShared, mask) == kTileM * sizeof(uint64_t), "block_sort uses what is before");

// Splits nodes of n positions in halves, for one level: every node is stably partitioned by the bit that leaves its
// halves the smallest unions. mask and row are those of position t, before and after.
template <int n>
__device__ __forceinline__ void split_level(ClusterShared& s, uint32_t& mask, int& row) {
  constexpr int kWords = n / 32;  // of a node's columns, and warps of a node
  const int t = threadIdx.x, lane = t % 32, warp = t / 32;
  const int node = t / n, word = warp % kWords;
  s.column[lane][warp] = transpose(mask);
  __syncthreads();

  // The first half under a split by bit `lane`: rows that have it come first.
  uint32_t first[kWords];
  int ones = 0;
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    first[w] = s.column[lane][node * kWords + w];
    ones += __popc(first[w]);
  }
  const bool cut_ones = ones >= n / 2;  // the half ends among the rows that have the bit
  int wanted = cut_ones ? n / 2 : n / 2 - ones, cut_word = -1, cut_count = 0;
  uint32_t cut = 0;
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    const uint32_t from = cut_ones ? first[w] : ~first[w];
    const int count = __popc(from);
    if (wanted > 0 && wanted < count) {
      cut_word = w;
      cut_count = wanted;
      cut = from;
    }
    const uint32_t taken = wanted >= count ? from : 0;
    first[w] = cut_ones ? taken : first[w] | taken;
    wanted = max(wanted - count, 0);
  }
  if (cut_word >= 0) {
    cut = lowest_bits(cut, cut_count);
#pragma unroll
    for (int w = 0; w < kWords; ++w) first[w] |= w == cut_word ? cut : 0;
  }
  int cost = 0;
#pragma unroll(8 / kWords)
  for (int i = 0; i < 32 / kWords; ++i) {  // bits, shared out among the node's warps
    uint32_t in_first = 0, in_second = 0;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const uint32_t column = s.column[word * (32 / kWords) + i][node * kWords + w];
      in_first |= column & first[w];
      in_second |= column & ~first[w];
    }
    cost += (in_first != 0) + (in_second != 0);
  }
  s.cost[warp][lane] = cost;
  __syncthreads();

  cost = 0;
#pragma unroll
  for (int w = 0; w < kWords; ++w) cost += s.cost[node * kWords + w][lane];
  // A bit that all rows have or none leaves the order as it is: bit 0 stands for that, too.
  const bool splits = lane == 0 || (ones > 0 && ones < n);
  const int bit = __reduce_min_sync(0xffffffffu, splits ? cost << 8 | lane : INT_MAX) & 0xff;
  const bool one = mask >> bit & 1;
  int total = 0, before = 0;  // rows that have it: of the node, and of its warps before this one
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    const int count = __popc(s.column[bit][node * kWords + w]);
    total += count;
    before += w < word ? count : 0;
  }
  const uint32_t below = s.column[bit][warp] & ((1u << lane) - 1);
  before += __popc(below);
  const int position = node * n + (one ? before : total + word * 32 + lane - before);
  s.mask[position] = mask;
  s.row[position] = static_cast<uint8_t>(row);
  __syncthreads();
  mask = s.mask[t];
  row = s.row[t];
}

// Orders the rows of a tile, thread t's row having the neighbour mask `mask`. An MMA fragment runs for every offset that
// any of its rows uses, so what counts is the union of the masks of 16, 32 and 64 consecutive rows. First a sort with
// the tile's rarest offsets as the most significant bits, then three levels of halving (256, 128, 64 rows), each by the
// offset that leaves the two halves the smallest unions. Useful / issued MMA at 64 rows: 0.66 on surfaces and 0.34 on
// LiDAR, against 0.60 and 0.31 for the sort alone. Rows without neighbours, padding behind them, stay last.
// Returns the thread whose row comes to position t. Rows from `rows` on are padding. `buffer` and `s` are the same memory.
__device__ __forceinline__ int cluster_rows(uint32_t mask, int rows, uint64_t* buffer, ClusterShared& s) {
  const int t = threadIdx.x, lane = t % 32;
  if (t < 32) s.count[t] = 0;
  __syncthreads();
  const uint32_t column = transpose(mask);
  if (column != 0) atomicAdd(&s.count[lane], __popc(column));
  __syncthreads();
  if (t < 32) {
    int place = 0;
#pragma unroll 4
    for (int b = 0; b < 32; ++b) place += s.count[b] > s.count[t] || (s.count[b] == s.count[t] && b < t);
    s.bit_at[place] = t;
  }
  __syncthreads();
  const uint32_t key = transpose(__shfl_sync(0xffffffffu, column, s.bit_at[lane]));
  // Where the first half has all rows, all bits are as good, and the lowest one splits: so does the sort, with that on top.
  const bool whole = rows <= kTileM / 2;
  const uint64_t sorted = block_sort(uint64_t{~(whole ? key >> 1 | key << 31 : key)} << 8 | uint32_t(t), rows, buffer);
  mask = ~static_cast<uint32_t>(sorted >> 8);
  int row = static_cast<int>(sorted & 0xff);
  if (whole) mask = mask << 1 | mask >> 31;
  if (!whole) split_level<256>(s, mask, row);
  if (rows > 64) split_level<128>(s, mask, row);
  if (rows > 32) split_level<64>(s, mask, row);
  return row;
}

// Colours of an output row under every colouring, kColourBits each. The lattice is that of the inputs, divided by `mul`:
// there an offset's neighbours are a translation away.
template <bool kDivide>
__device__ __forceinline__ uint32_t colours_of(const PlanArgs& args, const Query& query) {
  int place[3];
#pragma unroll
  for (int a = 0; a < 3; ++a) {
    // Undoes what Query adds; without a division its scale, too.
    place[a] = kDivide ? query.at[a] - kCoordBias : (query.at[a] - kCoordBias - args.start[a]) / args.mul[a];
  }
  uint32_t colours = 0;
#pragma unroll
  for (int i = 0; i < kColourings; ++i) {
    int sum = 0;
#pragma unroll
    for (int a = 0; a < 3; ++a) sum += colour_factor(i, a) * place[a];
    colours |= uint32_t(sum & (kColours - 1)) << (kColourBits * i);
  }
  return colours;
}

// Lanes whose rows have this lane's colour, by three votes.
__device__ __forceinline__ uint32_t of_my_colour(int colour) {
  uint32_t lanes = 0xffffffffu;
#pragma unroll
  for (int bit = 0; bit < kColourBits; ++bit) {
    const uint32_t set = __ballot_sync(0xffffffffu, colour >> bit & 1);
    lanes &= colour >> bit & 1 ? set : ~set;
  }
  return lanes;
}

// Deals a warp's rows into groups of kColours lanes, as far as possible one of each colour: the lane a row moves to.
__device__ __forceinline__ int deal(int colour) {
  const uint32_t below = (1u << (threadIdx.x % 32)) - 1;
  const int rank = __popc(of_my_colour(colour) & below);  // among the rows of its colour
  int extra = __popc(__ballot_sync(0xffffffffu, rank >= kDealGroups) & below), to = 0;
#pragma unroll
  for (int j = 0; j < kDealGroups; ++j) {
    const uint32_t group = __ballot_sync(0xffffffffu, rank == j);
    const int taken = __popc(group), room = kColours - taken;
    if (rank == j) to = kColours * j + __popc(group & below);
    if (rank >= kDealGroups && extra >= 0 && extra < room) to = kColours * j + taken + extra;
    extra -= room;
  }
  return to;
}

// Rows of a warp that deal() could not give a group of their own.
__device__ __forceinline__ int undealt(int colour) {
  const uint32_t below = (1u << (threadIdx.x % 32)) - 1;
  const int rank = __popc(of_my_colour(colour) & below);
  return __popc(__ballot_sync(0xffffffffu, rank >= kDealGroups));
}

__device__ __forceinline__ int of_colour(const ulonglong2& counts, int colour) {
  return static_cast<int>((colour < 4 ? counts.x : counts.y) >> (16 * (colour & 3)) & 0xffff);
}

// Where the unique rows of a pass go: those of a colour to the slots equal to it modulo 8, in turn; those that find none
// left to the slots that no row of their own colour takes, both by colour.
struct ColourRoom {
  int own[kColours];       // slots of the colour
  int rest[kColours + 1];  // rows without a slot of their own colour, of the colours before
  int free[kColours + 1];  // slots that no row of their own colour takes, likewise
  int used[kColours];      // rows of the colour

  // By threads 0 .. kColours of a block. `counts`: rows of each colour, 16 bits each, `total` in all.
  __device__ __forceinline__ void fill(const ulonglong2& counts, int total, int t) {
    int before_rest = 0, before_free = 0;
#pragma unroll 1
    for (int c = 0; c < t; ++c) {
      const int room = (total - c + kColours - 1) / kColours, over = of_colour(counts, c) - room;
      before_rest += max(over, 0);
      before_free += max(-over, 0);
    }
    rest[t] = before_rest;
    free[t] = before_free;
    if (t == kColours) return;
    own[t] = (total - t + kColours - 1) / kColours;
    used[t] = of_colour(counts, t);
  }

  // Slot of the `place`-th row of a colour.
  __device__ __forceinline__ int slot(int colour, int place) const {
    if (place < own[colour]) return kColours * place + colour;
    const int i = place - own[colour] + rest[colour];  // of all that have none of their own
    int c = 0;
#pragma unroll 1
    while (i >= free[c + 1]) ++c;
    return kColours * (used[c] + i - free[c]) + c;
  }
};

}  // namespace
}  // namespace voxmma
