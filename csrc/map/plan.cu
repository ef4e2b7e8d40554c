// Tile plans: one block builds the plan of one tile of kTileM consecutive rows of the Morton order.
#include <algorithm>
#include <climits>
#include <cstddef>
#include <cstdlib>
#include <utility>
#include <vector>

#include "bricks.cuh"
#include "plan_rows.cuh"

namespace voxmma {
namespace {

using namespace detail;

constexpr int kBlocksPerSm = 5;
constexpr int kProbes = 3;        // independent hash probes in flight per thread
constexpr int kRoundOffsets = 4;  // offsets searched at a time where the shared set may fill up
constexpr int kSetSlots = 2048;   // shared set of input ranks
constexpr int kSetShift = 32 - 11;
constexpr int kSetLimit = kUniqueMax + kRoundOffsets * kTileM;  // ranks in the set beyond which it refuses new ones
constexpr int kNoTag = INT_MAX;
constexpr int kMaxVolume = kMaxKernel * kMaxKernel * kMaxKernel;

// The first two offsets of a pass bring at most 2 * kTileM <= kUniqueMax rows: all but the last pass hold two or more.
constexpr int kMaxPassesOfGroup = kPassOffsets / 2;

// A thread looks at the limit before it inserts: kTileM ranks may come on top of it.
static_assert(kSetSlots == 1 << (32 - kSetShift) && kSetSlots > kSetLimit + kTileM, "set too small");
static_assert(2 * kTileM <= kUniqueMax && kFragRows == 16, "pass and fragment bookkeeping rely on these");
static_assert(kPassOffsets * kWarps == kThreads, "one thread per (offset of a pass, warp)");

// What the host works out for all tiles of a plan of up to kSize offsets along an axis.
template <int kSize>
struct ParamsOf {
  PlanArgs args;
  int volume;
  bool divide;             // by more than 1
  bool pair_z;             // neighbours along z are adjacent voxels: two of a brick at a time
  int quotient[3][kSize];  // of start + i * step by div, rounded down, and what is left
  int rest[3][kSize];
  int shift[3][kSize];                      // of the colours' lattice (see colour_of), by offset
  uint8_t sort_bit[kSize * kSize * kSize];  // bit of the rows' sort key that says whether a row has this neighbour
};
using Params = ParamsOf<kMaxKernel>;

// Several plans in one launch: plan i has the blocks from end[i - 1] to end[i].
constexpr int kBatchKernel = 5;  // most offsets along an axis
struct Batch {
  static constexpr int kMost = 7;  // 4 KiB of arguments
  unsigned end[kMost];
  ParamsOf<kBatchKernel> plan[kMost];
};
static_assert(sizeof(Batch) <= 4096);

// Dynamic shared memory of a block for kernel volume K.
struct Shared {
  int* set_rank;       // [kSetSlots] input rank or -1
  uint32_t* first;     // [kPassOffsets][kWarps] lanes that meet a row first; this and the next two also order the rows
  int* until;          // [kPassOffsets][kWarps] rows met first up to and with this offset and warp
  int* unique;         // [kUniqueMax] ranks
  int* tag;            // [kSetSlots + 1] (offset, tile row) of its first appearance, then its place in `unique`
  ulonglong2* before;  // [kPassOffsets][kWarps] rows of each colour met first before this offset and warp, 16 bits each
  uint32_t* lanes;     // [kWarps][kColours] lanes whose rows have the colour
  uint8_t* colour;     // [kTileM] of the tile's rows
  uint8_t* added;      // [kPassOffsets] what the offset adds to it
  uint8_t* sort_bit;   // [K]
  uint16_t* neighbour;  // [min(K, kPassOffsets)][kTileM] slot in the set, kSetSlots = none
  Pass* passes;         // [max_passes] staged until their number is known
  uint32_t* frag;       // [max_passes][kFrags]
  size_t bytes;

  __host__ __device__ static int max_passes(int volume) {
    return (volume + kPassOffsets - 1) / kPassOffsets * kMaxPassesOfGroup;
  }

  __host__ __device__ Shared(unsigned char* base, int volume) {
    size_t at = 0;
    auto take = [&](size_t count, size_t size) {
      unsigned char* part = base + at;
      at += (count * size + 15) / 16 * 16;
      return part;
    };
    set_rank = reinterpret_cast<int*>(take(kSetSlots, sizeof(int)));
    first = reinterpret_cast<uint32_t*>(take(kThreads, sizeof(uint32_t)));
    until = reinterpret_cast<int*>(take(kThreads, sizeof(int)));
    unique = reinterpret_cast<int*>(take(kUniqueMax, sizeof(int)));
    tag = reinterpret_cast<int*>(take(kSetSlots + 1, sizeof(int)));
    before = reinterpret_cast<ulonglong2*>(take(kThreads, sizeof(ulonglong2)));
    lanes = reinterpret_cast<uint32_t*>(take(kWarps * kColours, sizeof(uint32_t)));
    colour = take(kTileM, sizeof(uint8_t));
    added = take(kPassOffsets, sizeof(uint8_t));
    sort_bit = take(volume, sizeof(uint8_t));
    neighbour =
        reinterpret_cast<uint16_t*>(take((volume < kPassOffsets ? volume : kPassOffsets) * kTileM, sizeof(uint16_t)));
    passes = reinterpret_cast<Pass*>(take(max_passes(volume), sizeof(Pass)));
    frag = reinterpret_cast<uint32_t*>(take(max_passes(volume) * kFrags, sizeof(uint32_t)));
    bytes = at;
  }
};

// Calls emit(k, input rank) for every neighbour under the offsets k_begin..k_end-1, in no particular order. Whole warps
// call it together. Where lanes part, a __syncwarp brings them together again: without them the lanes went on alone
// from the first hash chain to the end, 5 of 32 at a time.
template <bool kDivide, class P, class Emit>
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

__device__ __forceinline__ int64_t bump(int64_t* counter, int64_t amount) {
  return static_cast<int64_t>(
      atomicAdd(reinterpret_cast<unsigned long long*>(counter), static_cast<unsigned long long>(amount)));
}

// Tiles that have rows.
__device__ __forceinline__ int tiles_in_use(const Rows& rows) {
  return static_cast<int>((rows.number() + kTileM - 1) / kTileM);
}

// Place of a tile in the Morton order of the schedule, which follows the balanced one.
__device__ __forceinline__ ScheduledTile& in_order(const PlanArgs& args, int tile) {
  const int tiles = tiles_in_use({args.n_out, args.compact ? args.out_count : nullptr});
  return args.schedule[tiles + tile];
}

// Makes a tile one without rows or neighbours, with the passes that all such tiles share. By the whole block.
__device__ __forceinline__ void empty_tile(const PlanArgs& args, int tile, int volume) {
  const int t = threadIdx.x;
  args.order[int64_t{tile} * kTileM + t] = -1;
  auto* local = reinterpret_cast<int4*>(args.local + int64_t{tile} * volume * kTileM);
  constexpr int kNone2 = kMissing << 16 | kMissing;
  for (int i = t; i < volume * kTileM / 8; i += kThreads) local[i] = make_int4(kNone2, kNone2, kNone2, kNone2);
  if (t == 0) in_order(args, tile) = ScheduledTile{tile, static_cast<int>(args.pass_capacity), empty_passes(volume), 0};
}

// Writes the passes of empty tiles. By the whole block.
__device__ __forceinline__ void share_passes(const PlanArgs& args, int volume) {
  const int passes = empty_passes(volume);
  for (int i = threadIdx.x; i < passes; i += kThreads) {
    const int begin = i * kPassOffsets;
    args.passes[args.pass_capacity + i] = Pass{begin, min(kPassOffsets, volume - begin), 0, 0};
  }
  for (int i = threadIdx.x; i < passes * kFrags; i += kThreads) args.frag[args.pass_capacity * kFrags + i] = 0;
}

// Static shared memory of a block.
struct BlockShared {
  int warp_total[kWarps];
  ulonglong2 warp_colours[kWarps];
  int64_t uniq_begin4, first_pass;
  int rows;  // of the tile, without padding
  int fill;  // ranks in the shared set
  int undealt_rows[kColourings];
  int pairs, cost;
};

// A block's work on the plan of one tile: its steps in the order in which plan_tiles takes them, each by all threads.
template <bool kDivide, class P>
struct Tile {
  const P& p;
  const Shared& s;
  BlockShared& b;
  int tile, volume, t = threadIdx.x, lane = t % 32, warp = t / 32;
  int row;            // the caller's output row, of tile row t
  int source;         // column of `neighbour` that belongs to tile row t
  int colouring = 0;  // that of the tile
  int passes = 0;     // so far
  int pairs = 0;      // of tile row t

  __device__ __forceinline__ Tile(const P& p_, const Shared& s_, BlockShared& b_, int tile_)
      : p(p_), s(s_), b(b_), tile(tile_), volume(p_.volume) {}

  __device__ __forceinline__ bool one_sweep() const { return volume <= kPassOffsets; }

  __device__ __forceinline__ void clear_set() {
    for (int i = t; i < kSetSlots; i += kThreads) s.set_rank[i] = -1;
  }

  // Neighbours of the rows as they come, and from them the sort keys. Where the plan has one group of offsets, the
  // neighbours are kept as slots of the shared set. The rows' colours go to `tag`.
  __device__ __forceinline__ uint32_t find_neighbours() {
    const PlanArgs& args = p.args;
    row = t < b.rows ? args.out_order[tile * kTileM + t] : -1;
    clear_set();
    for (int i = t; i < volume; i += kThreads) s.sort_bit[i] = p.sort_bit[i];
    constexpr int kNone2 = kSetSlots << 16 | kSetSlots;
    for (int i = t; i < min(volume, kPassOffsets) * kTileM / 8; i += kThreads) {
      reinterpret_cast<int4*>(s.neighbour)[i] = make_int4(kNone2, kNone2, kNone2, kNone2);
    }
    if (t == 0) b.pairs = b.cost = b.fill = 0;
    if (t < kColourings) b.undealt_rows[t] = 0;
    const Query query = Query::make<kDivide>(args, row);
    s.tag[t] = static_cast<int>(colours_of<kDivide>(args, query));
    __syncthreads();
    uint32_t sort_bits = 0;
    const bool keep = one_sweep();
    for_neighbours<kDivide>(p, 0, volume, query, [&](int k, int input) {
      sort_bits |= 1u << s.sort_bit[k];
      if (keep) s.neighbour[k * kTileM + t] = static_cast<uint16_t>(set_insert(s.set_rank, &b.fill, input));
    });
    return sort_bits;
  }

  // Clusters the rows by their neighbours, takes the colouring that deals them best, and deals them.
  __device__ __forceinline__ void order_rows(uint32_t sort_bits) {
    source = cluster_rows(sort_bits, reinterpret_cast<uint64_t*>(s.first), *reinterpret_cast<ClusterShared*>(s.first));
    const auto colours = static_cast<uint32_t>(s.tag[source]);
    const bool whole = 32 * (warp + 1) <= b.rows;  // others are not dealt: padding stays behind the rows
    if (whole) {
#pragma unroll
      for (int i = 0; i < kColourings; ++i) {
        const int rows = undealt(colours >> (kColourBits * i) & (kColours - 1));
        if (lane == i && rows != 0) atomicAdd(&b.undealt_rows[i], rows);
      }
    }
    __syncthreads();
#pragma unroll
    for (int i = 1; i < kColourings; ++i) colouring = b.undealt_rows[i] < b.undealt_rows[colouring] ? i : colouring;
    const int colour = colours >> (kColourBits * colouring) & (kColours - 1);
    const int to = 32 * warp + (whole ? deal(colour) : lane);
    s.until[to] = source;
    s.colour[to] = static_cast<uint8_t>(colour);
    __syncwarp();
    source = s.until[t];
    const int my_colour = s.colour[t];
#pragma unroll
    for (int c = 0; c < kColours; ++c) {
      const uint32_t lanes = __ballot_sync(0xffffffffu, my_colour == c);
      if (lane == c) s.lanes[warp * kColours + c] = lanes;
    }
    row = source < b.rows ? p.args.out_order[tile * kTileM + source] : -1;
    p.args.order[tile * kTileM + t] = row;
  }

  // Offsets 0 .. that - 1 are in the set. It refused a rank only if it was full, and is so still.
  __device__ __forceinline__ int known_at_first() const { return one_sweep() && b.fill < kSetLimit ? volume : 0; }

  // Searches again from offset k_begin on, until a pass's worth of rows and not more than a round's on top are in the
  // set. Returns the first offset that is not.
  __device__ __forceinline__ int search(int k_begin) {
    if (passes == 0) {
      __syncthreads();  // everybody has read `fill`
      source = t;
    }
    clear_set();
    if (t == 0) b.fill = 0;
    const int group_end = min(volume, k_begin - k_begin % kPassOffsets + kPassOffsets);
    const Query query = Query::make<kDivide>(p.args, row);
    int known = k_begin;
    do {
      __syncthreads();
      const int from = known;
      known = min(known + kRoundOffsets, group_end);
      for (int k = from; k < known; ++k) s.neighbour[k % kPassOffsets * kTileM + t] = kSetSlots;
      for_neighbours<kDivide>(p, from, known, query, [&](int k, int input) {
        s.neighbour[k % kPassOffsets * kTileM + t] = static_cast<uint16_t>(set_insert(s.set_rank, &b.fill, input));
      });
      __syncthreads();
    } while (known < group_end && b.fill <= kUniqueMax);
    return known;
  }

  // What the offsets k_begin .. k_begin + span - 1 add to a row's colour.
  __device__ __forceinline__ void colour_offsets(int k_begin, int span) {
    if (t >= span) return;
    const int k = k_begin + t, size_y = p.args.size[1], size_z = p.args.size[2];
    const int i[3] = {k / size_z / size_y, k / size_z % size_y, k % size_z};
    int sum = 0;
    for (int a = 0; a < 3; ++a) sum += colour_factor(colouring, a) * p.shift[a][i[a]];
    s.added[t] = static_cast<uint8_t>(sum & (kColours - 1));
  }

  // Marks in `first` where each input row appears first, by offset, then by tile row, and writes that to its `tag`.
  // Returns the offsets, from bit 0, under which tile row t has a neighbour.
  __device__ __forceinline__ uint32_t mark_first(const uint16_t* neighbour, int span) {
    for (int i = t; i < kSetSlots; i += kThreads) s.tag[i] = kNoTag;
    s.first[t] = 0;
    __syncthreads();
    uint32_t have = 0;
#pragma unroll 4
    for (int j = 0; j < span; ++j) {
      const int slot = neighbour[j * kTileM];
      if (slot != kSetSlots) {
        atomicMin(s.tag + slot, j * kTileM + t);
        have |= 1u << j;
      }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kSetSlots; i += kThreads) {
      const int tag = s.tag[i + t];
      if (tag != kNoTag) atomicOr(s.first + tag / 32, 1u << (tag % 32));
    }
    __syncthreads();
    return have;
  }

  // How many of the offsets have at most kUniqueMax unique rows together: the pass's. Counts those in `until`.
  __device__ __forceinline__ int cut_pass(int span) {
    int until = __popc(s.first[t]);  // inclusive scan over (offset, warp)
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int before = __shfl_up_sync(0xffffffffu, until, step);
      if (lane >= step) until += before;
    }
    if (lane == 31) b.warp_total[warp] = until;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < kWarps - 1; ++w) until += w < warp ? b.warp_total[w] : 0;
    s.until[t] = until;
    return __syncthreads_count(t % kWarps == kWarps - 1 && t / kWarps < span && until <= kUniqueMax);
  }

  // Gives each of the pass's `count` unique rows the slot that its colour and its place among the first appearances say:
  // `unique` lists their ranks, `tag` has the slot of what is in the set.
  __device__ __forceinline__ void place_unique(int k_count, int count) {
    // Thread t counts the rows of each colour that its offset and warp meet first, then those before it.
    ulonglong2 counts{};
    if (t / kWarps < k_count) {
      const uint32_t bits = s.first[t], added = s.added[t / kWarps];
#pragma unroll
      for (int c = 0; c < kColours; ++c) {
        const uint32_t lanes = s.lanes[t % kWarps * kColours + ((c - added) & (kColours - 1))];
        (c < 4 ? counts.x : counts.y) |= static_cast<unsigned long long>(__popc(bits & lanes)) << (16 * (c & 3));
      }
    }
    const ulonglong2 own = counts;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const unsigned long long x = __shfl_up_sync(0xffffffffu, counts.x, step);
      const unsigned long long y = __shfl_up_sync(0xffffffffu, counts.y, step);
      if (lane >= step) {
        counts.x += x;
        counts.y += y;
      }
    }
    if (lane == 31) b.warp_colours[warp] = counts;
    __syncthreads();
    ulonglong2 all{};
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const ulonglong2 part = b.warp_colours[w];
      if (w < warp) {
        counts.x += part.x;
        counts.y += part.y;
      }
      all.x += part.x;
      all.y += part.y;
    }
    s.before[t] = make_ulonglong2(counts.x - own.x, counts.y - own.y);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kSetSlots; i += kThreads) {
      const int tag = s.tag[i + t];
      if (tag < k_count * kTileM) {
        const int word = tag / 32, added = s.added[tag / kTileM];
        const int colour = (s.colour[tag % kTileM] + added) & (kColours - 1);
        const uint32_t same = s.lanes[word % kWarps * kColours + s.colour[tag % kTileM]];
        const int place = of_colour(s.before[word], colour) + __popc(s.first[word] & same & ((1u << (tag % 32)) - 1));
        const int index = slot_of(all, count, colour, place);
        s.unique[index] = s.set_rank[i + t];
        s.tag[i + t] = index;
      }
    }
    __syncthreads();
  }

  // Writes local indices and unique rows, and stages pass and fragment masks.
  __device__ __forceinline__ void write_pass(const uint16_t* neighbour, int k_begin, int k_count, int count,
                                             uint32_t have) {
    const PlanArgs& args = p.args;
    uint16_t* local = args.local + (int64_t{tile} * volume + k_begin) * kTileM + t;
#pragma unroll 4
    for (int j = 0; j < k_count; ++j) {
      local[int64_t{j} * kTileM] = static_cast<uint16_t>(s.tag[neighbour[j * kTileM]]);
    }
    const int64_t begin4 = b.uniq_begin4;
    const int count4 = (count + 3) / 4;
    if (begin4 + count4 <= args.uniq4_capacity) {
      for (int i = t; i < 4 * count4; i += kThreads) {
        args.uniq[4 * begin4 + i] = __ldg(args.in_order + s.unique[min(i, count - 1)]);
      }
    }
    have &= ~0u >> (kPassOffsets - k_count);
    pairs += __popc(have);
#pragma unroll
    for (int step = 1; step < kFragRows; step *= 2) have |= __shfl_xor_sync(0xffffffffu, have, step);
    if (lane % kFragRows == 0) s.frag[passes * kFrags + t / kFragRows] = have;
    if (t == 0) s.passes[passes] = Pass{k_begin, k_count, static_cast<int>(begin4), count};
    ++passes;
  }

  // Makes a pass of the offsets from k_begin on, of which those before `known` are in the set. Returns their number.
  __device__ __forceinline__ int make_pass(int k_begin, int known) {
    const int span = known - k_begin;
    const uint16_t* neighbour = s.neighbour + k_begin % kPassOffsets * kTileM + source;
    colour_offsets(k_begin, span);
    const uint32_t have = mark_first(neighbour, span);
    const int k_count = cut_pass(span), count = s.until[k_count * kWarps - 1];
    if (t == 0) {
      b.uniq_begin4 = bump(&p.args.stats->uniq4, (count + 3) / 4);
      s.tag[kSetSlots] = kMissing;
    }
    place_unique(k_count, count);
    write_pass(neighbour, k_begin, k_count, count, have);
    return k_count;
  }

  // Hands the staged passes over, next to each other, and puts the tile on the schedule.
  __device__ __forceinline__ void hand_over() {
    const PlanArgs& args = p.args;
    pairs = __reduce_add_sync(0xffffffffu, pairs);
    if (lane == 0) atomicAdd(&b.pairs, pairs);
    __syncthreads();
    int cost = 0;
    for (int i = t; i < passes * (kFrags / 4); i += kThreads) {
      const uint32_t* frag = s.frag + i * 4;
      cost += __popc(frag[0] | frag[1] | frag[2] | frag[3]);
    }
    cost = __reduce_add_sync(0xffffffffu, cost);
    if (lane == 0 && cost != 0) atomicAdd(&b.cost, cost);
    __syncthreads();
    if (t == 0) {
      b.first_pass = bump(&args.stats->passes, passes);
      bump(&args.stats->pairs, b.pairs);
      in_order(args, tile) = ScheduledTile{tile, static_cast<int>(b.first_pass), passes, b.cost};
    }
    bool room = true;
    for (int i = t; i < passes; i += kThreads) {
      const Pass pass = s.passes[i];
      room =
          room && int64_t{static_cast<uint32_t>(pass.uniq_begin4)} + (pass.uniq_count + 3) / 4 <= args.uniq4_capacity;
    }
    room = __syncthreads_and(room);
    const int64_t first = b.first_pass;
    if (room && first + passes <= args.pass_capacity) {
      for (int i = t; i < passes; i += kThreads) args.passes[first + i] = s.passes[i];
      for (int i = t; i < passes * kFrags; i += kThreads) args.frag[first * kFrags + i] = s.frag[i];
    } else if (args.out_count != nullptr) {
      empty_tile(args, tile, volume);
    }
  }
};

template <bool kDivide, class P>
__device__ __forceinline__ void plan_tile(const P& p, int tile) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  __shared__ BlockShared block;
  const int volume = p.volume;
  if (p.args.out_count != nullptr && tile == 0) share_passes(p.args, volume);
  const int64_t rows = Rows{p.args.n_out, p.args.out_count}.number() - int64_t{tile} * kTileM;
  if (rows <= 0) {
    if (!p.args.compact) empty_tile(p.args, tile, volume);
    return;
  }
  if (threadIdx.x == 0) block.rows = static_cast<int>(min(rows, int64_t{kTileM}));
  __syncthreads();

  const Shared s(shared_bytes, volume);
  Tile<kDivide, P> work(p, s, block, tile);
  work.order_rows(work.find_neighbours());
  int known = work.known_at_first();
  for (int k_begin = 0; k_begin < volume;) {
    if (work.passes > 0) __syncthreads();  // the previous pass is done with the set
    if (known <= k_begin) known = work.search(k_begin);
    k_begin += work.make_pass(k_begin, known);
    if (known != volume && known % kPassOffsets != 0) known = 0;  // the set lacks what comes next
  }
  work.hand_over();
}

template <bool kDivide>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm) plan_tiles(const __grid_constant__ Params p) {
  plan_tile<kDivide>(p, static_cast<int>(blockIdx.x));
}

__global__ void __launch_bounds__(kThreads, kBlocksPerSm) plan_batch(const __grid_constant__ Batch batch) {
  int i = 0;
  while (blockIdx.x >= batch.end[i]) ++i;
  const int tile = static_cast<int>(blockIdx.x - (i > 0 ? batch.end[i - 1] : 0));
  if (batch.plan[i].divide) {
    plan_tile<true>(batch.plan[i], tile);
  } else {
    plan_tile<false>(batch.plan[i], tile);
  }
}

// Tiles of a window of the balanced schedule: two rounds of a persistent kernel. A map of up to four is one window.
__host__ __device__ __forceinline__ int window_of(int tiles, int sm_count) {
  return tiles <= 4 * sm_count ? tiles : 2 * sm_count;
}

// One plan's part of ranking.
struct Ranking {
  ScheduledTile* schedule;
  int tiles;  // 0: those in use
  int blocks, sm_count;
  Rows rows;
};

// Puts each tile where it belongs in its window: behind those that cost more, and those before it that cost as much. A
// block places 32 tiles of a window, its warps share out the tiles to compare with.
__device__ __forceinline__ void rank_block(const Ranking& r, int block) {
  __shared__ int rank[32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int used = tiles_in_use(r.rows), count = r.tiles == 0 ? used : r.tiles, window = window_of(used, r.sm_count);
  ScheduledTile* schedule = r.schedule;
  const ScheduledTile* ordered = schedule + count;
  // Empty tiles stay where they are.
  for (int i = used + block * kThreads + threadIdx.x; i < count; i += r.blocks * kThreads) schedule[i] = ordered[i];
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

__global__ void __launch_bounds__(kThreads) rank_tiles(const __grid_constant__ Ranking ranking) {
  rank_block(ranking, static_cast<int>(blockIdx.x));
}

struct RankBatch {
  unsigned end[Batch::kMost];
  Ranking plan[Batch::kMost];
};

__global__ void __launch_bounds__(kThreads) rank_batch(const __grid_constant__ RankBatch batch) {
  int i = 0;
  while (blockIdx.x >= batch.end[i]) ++i;
  rank_block(batch.plan[i], static_cast<int>(blockIdx.x - (i > 0 ? batch.end[i - 1] : 0)));
}

struct StatsBatch {
  PlanStats* stats[Batch::kMost];
};

__global__ void clear_stats(const StatsBatch batch, int count) {
  if (threadIdx.x < count) *batch.stats[threadIdx.x] = PlanStats{};
}

__global__ void __launch_bounds__(kThreads) write_table(const PlanView plan, int* table) {
  const ScheduledTile scheduled = plan.schedule[blockIdx.x];
  const int64_t tile = scheduled.tile;
  const int t = threadIdx.x;
  const int row = plan.order[tile * kTileM + t];
  if (row < 0) return;
  for (int p = 0; p < scheduled.passes; ++p) {
    const Pass pass = plan.passes[scheduled.first_pass + p];
    const int* uniq = plan.uniq + 4 * int64_t(pass.uniq_begin4);
    for (int k = pass.k_begin; k < pass.k_begin + pass.k_count; ++k) {
      const int index = plan.local[(tile * plan.kernel_volume + k) * kTileM + t];
      table[k * plan.n_out + row] = index < pass.uniq_count ? uniq[index] : -1;
    }
  }
}

}  // namespace

namespace {

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

int volume_of(const PlanArgs& args) { return args.size[0] * args.size[1] * args.size[2]; }

template <int kSize>
ParamsOf<kSize> make_params(const PlanArgs& args) {
  ParamsOf<kSize> p;
  p.args = args;
  p.volume = volume_of(args);
  p.divide = args.div[0] != 1 || args.div[1] != 1 || args.div[2] != 1;
  p.pair_z = args.step[2] == 1 && args.div[2] == 1;
  for (int a = 0; a < 3; ++a) {
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

void plan_bounds(const PlanArgs& args, int64_t* passes, int64_t* uniq4) {
  const int64_t tiles = (args.n_out + kTileM - 1) / kTileM, inputs = whole(args, args.div);
  int64_t per_tile = 0;
  for (int volume = volume_of(args); volume > 0; volume -= kPassOffsets) {
    const int64_t offsets = std::min(volume, kPassOffsets);
    per_tile += std::min(inputs, offsets) * kTileM <= kUniqueMax ? 1 : (offsets + 1) / 2;
  }
  const int64_t pairs = std::min(args.n_out * inputs, args.n_in * whole(args, args.mul));
  *passes = tiles * per_tile;
  *uniq4 = std::min(*passes * (kUniqueMax / 4), (pairs + 3 * *passes) / 4);
}

namespace {

bool valid(const PlanArgs& args) {
  if (args.n_out < 0 || args.n_out > INT_MAX - kTileM || args.capacity < 1 || args.capacity > UINT_MAX ||
      args.pass_capacity > INT_MAX - kMaxVolume || args.uniq4_capacity > INT_MAX || args.sm_count < 1) {
    return false;
  }
  for (int a = 0; a < 3; ++a) {
    if (args.size[a] < 1 || args.size[a] > kMaxKernel || args.step[a] == 0 || args.mul[a] < 1 ||
        args.mul[a] > kMaxStride || args.div[a] < 1 || args.div[a] > kMaxStride) {
      return false;
    }
  }
  return true;
}

int64_t tiles_of(const PlanArgs& args) { return (args.n_out + kTileM - 1) / kTileM; }

template <class Kernel>
cudaError_t allow_bytes(Kernel kernel, size_t bytes) {
  constexpr size_t kWithoutAsking = 47 * 1024;  // of 48 KiB, which static shared memory counts in
  if (bytes <= kWithoutAsking) return cudaSuccess;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
}

Ranking ranking_of(const PlanArgs& args) {
  const auto blocks_of = [&](int64_t used) {
    const int window = window_of(static_cast<int>(used), args.sm_count);
    return static_cast<int>((used + window - 1) / window * ((window + 31) / 32));
  };
  const int64_t tiles = tiles_of(args);
  int blocks = blocks_of(tiles);
  if (args.out_count != nullptr) blocks = std::max(blocks, blocks_of(std::min<int64_t>(tiles, 4 * args.sm_count)));
  return {args.schedule, args.compact ? 0 : static_cast<int>(tiles), blocks, args.sm_count,
          Rows{args.n_out, args.out_count}};
}

// Up to Batch::kMost plans that have tiles.
cudaError_t build_batch(const PlanArgs* const* args, int count, cudaStream_t stream) {
  Batch batch{};
  RankBatch ranks{};
  size_t bytes = 0;
  unsigned blocks = 0, rank_blocks = 0;
  for (int i = 0; i < count; ++i) {
    batch.plan[i] = make_params<kBatchKernel>(*args[i]);
    batch.end[i] = blocks += static_cast<unsigned>(tiles_of(*args[i]));
    ranks.plan[i] = ranking_of(*args[i]);
    ranks.end[i] = rank_blocks += ranks.plan[i].blocks;
    bytes = std::max(bytes, Shared(nullptr, batch.plan[i].volume).bytes);
  }
  cudaError_t error = allow_bytes(plan_batch, bytes);
  if (error != cudaSuccess) return error;
  plan_batch<<<blocks, kThreads, bytes, stream>>>(batch);
  if ((error = cudaGetLastError()) != cudaSuccess) return error;
  rank_batch<<<rank_blocks, kThreads, 0, stream>>>(ranks);
  return cudaGetLastError();
}

}  // namespace

cudaError_t build_plan(const PlanArgs& args, cudaStream_t stream) {
  if (!valid(args)) return cudaErrorInvalidValue;
  cudaError_t error = cudaMemsetAsync(args.stats, 0, sizeof(PlanStats), stream);
  const int64_t tiles = tiles_of(args);
  if (error != cudaSuccess || tiles == 0) return error;
  const Params params = make_params<kMaxKernel>(args);
  const size_t bytes = Shared(nullptr, params.volume).bytes;
  const auto kernel = params.divide ? plan_tiles<true> : plan_tiles<false>;
  if ((error = allow_bytes(kernel, bytes)) != cudaSuccess) return error;
  kernel<<<static_cast<unsigned>(tiles), kThreads, bytes, stream>>>(params);
  if ((error = cudaGetLastError()) != cudaSuccess) return error;
  const Ranking ranking = ranking_of(args);
  rank_tiles<<<static_cast<unsigned>(ranking.blocks), kThreads, 0, stream>>>(ranking);
  return cudaGetLastError();
}

cudaError_t build_plans(const PlanArgs* args, int count, cudaStream_t stream) {
  std::vector<const PlanArgs*> together;
  for (int i = 0; i < count; ++i) {
    if (!valid(args[i])) return cudaErrorInvalidValue;
    const bool small = *std::max_element(args[i].size, args[i].size + 3) <= kBatchKernel;
    if (small && args[i].n_out > 0) {
      together.push_back(args + i);
    } else if (const cudaError_t error = build_plan(args[i], stream); error != cudaSuccess) {
      return error;
    }
  }
  // Tiles of many offsets take the longest, so they start first.
  std::stable_sort(together.begin(), together.end(),
                   [](const PlanArgs* a, const PlanArgs* b) { return volume_of(*a) > volume_of(*b); });
  for (size_t begin = 0; begin < together.size(); begin += Batch::kMost) {
    const int some = static_cast<int>(std::min<size_t>(Batch::kMost, together.size() - begin));
    StatsBatch stats{};
    for (int i = 0; i < some; ++i) stats.stats[i] = together[begin + i]->stats;
    clear_stats<<<1, 32, 0, stream>>>(stats, some);
    cudaError_t error = cudaGetLastError();
    if (error == cudaSuccess) error = build_batch(together.data() + begin, some, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t plan_to_table(const PlanView& plan, int* table, cudaStream_t stream) {
  if (plan.tiles == 0) return cudaSuccess;
  write_table<<<static_cast<unsigned>(plan.tiles), kThreads, 0, stream>>>(plan, table);
  return cudaGetLastError();
}

}  // namespace voxmma
