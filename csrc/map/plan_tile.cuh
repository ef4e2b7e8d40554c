// The plan of one tile, by one block. Part of plan.cu.
#pragma once

#include <cooperative_groups.h>

#include <climits>
#include <cstddef>

#include "plan_rank.cuh"
#include "plan_search.cuh"

namespace voxmma {
namespace {

using namespace detail;

constexpr int kNoTag = INT_MAX;

// The first two offsets of a pass bring at most 2 * kTileM <= kUniqueMax rows: all but the last pass hold two or more.
constexpr int kMaxPassesOfGroup = kPassOffsets / 2;

static_assert(2 * kTileM <= kUniqueMax && kFragRows == 16, "pass and fragment bookkeeping rely on these");
static_assert(kPassOffsets * kWarps == kThreads, "one thread per (offset of a pass, warp)");

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

__device__ __forceinline__ int64_t bump(int64_t* counter, int64_t amount) {
  return static_cast<int64_t>(
      atomicAdd(reinterpret_cast<unsigned long long*>(counter), static_cast<unsigned long long>(amount)));
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
#pragma unroll 1
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

static_assert(sizeof(ResidueShared) <= kSetSlots * sizeof(int), "residue_rows uses the set before it is cleared");

// Static shared memory of a block.
struct BlockShared {
  int warp_total[kWarps];
  ulonglong2 warp_colours[kWarps];
  int64_t uniq_begin4, first_pass;
  int rows;  // of the tile, without padding
  int fill;  // ranks in the shared set
  int undealt_rows[kColourings];
  int pairs, cost;
  ColourRoom room;
  bool last;  // of the plan's blocks
  // What the blocks of a tile that is split tell each other.
  uint32_t sort_bits[kTileM];
  int passes;
  bool has_room;
};

// Of the blocks that make a tile: all wait for all, and what one of them has where another has `shared`.
__device__ __forceinline__ void cluster_sync() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  cooperative_groups::this_cluster().sync();
#endif
}
template <class T>
__device__ __forceinline__ T* of_rank(T* shared, int rank) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  return cooperative_groups::this_cluster().map_shared_rank(shared, rank);
#else
  return shared;
#endif
}

// A block's work on the plan of one tile: its steps in the order in which plan_tiles takes them, each by all threads.
template <bool kDivide, int kProbes, class P>
struct Tile {
  const P& p;
  const Shared& s;
  BlockShared& b;
  int tile, rank, volume, t = threadIdx.x, lane = t % 32, warp = t / 32;
  int k_first, k_last;                // the block's offsets, without the last
  int row;                            // the caller's output row, of tile row t
  int source;                         // column of `neighbour` that belongs to tile row t
  int colouring = 0;                  // that of the tile
  int passes = 0;                     // so far
  int pairs = 0;                      // of tile row t
  int64_t uniq4 = 0, first_pass = 0;  // of thread 0: of a plan's only tile, and of any

  __device__ __forceinline__ Tile(const P& p_, const Shared& s_, BlockShared& b_, int tile_, int rank_)
      : p(p_), s(s_), b(b_), tile(tile_), rank(rank_), volume(p_.volume) {
    k_first = min(rank * kPassOffsets, volume);
    k_last = p.split ? min(k_first + kPassOffsets, volume) : volume;
  }

  __device__ __forceinline__ bool one_sweep() const { return k_last - k_first <= kPassOffsets; }

  __device__ __forceinline__ void clear_set() {
#pragma unroll 1
    for (int i = t; i < kSetSlots / 4; i += kThreads) {
      reinterpret_cast<int4*>(s.set_rank)[i] = make_int4(-1, -1, -1, -1);
    }
  }

  // Neighbours of the rows as they come, and from them the sort keys. Where the block has one group of offsets, the
  // neighbours are kept as slots of the shared set. The rows' colours go to `tag`, the rows to `before`.
  __device__ __forceinline__ uint32_t find_neighbours() {
    const PlanArgs& args = p.args;
    if (kDivide && p.residue_order) {
      residue_rows(args, Rows{args.n_out, args.out_count}.number(), tile, *reinterpret_cast<ResidueShared*>(s.set_rank),
                   reinterpret_cast<int*>(s.before));
      row = reinterpret_cast<const int*>(s.before)[t];
    } else {
      row = t < b.rows ? args.out_order[tile * kTileM + t] : -1;
      reinterpret_cast<int*>(s.before)[t] = row;
    }
    clear_set();
#pragma unroll 1
    for (int i = t; i < volume; i += kThreads) s.sort_bit[i] = p.sort_bit[i];
    constexpr int kNone2 = kSetSlots << 16 | kSetSlots;
#pragma unroll 1
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
    for_neighbours<kDivide, kProbes>(p, k_first, k_last, query, [&](int k, int input) {
      sort_bits |= 1u << s.sort_bit[k];
      if (keep) s.neighbour[(k - k_first) * kTileM + t] = static_cast<uint16_t>(set_insert(s.set_rank, &b.fill, input));
    });
    if (p.split) {
      b.sort_bits[t] = sort_bits;
      cluster_sync();
#pragma unroll
      for (int i = 1; i < kGroupBlocks; ++i) sort_bits |= of_rank(b.sort_bits, rank ^ i)[t];
    }
    return sort_bits;
  }

  // Clusters the rows by their neighbours, takes the colouring that deals them best, and deals them.
  __device__ __forceinline__ void order_rows(uint32_t sort_bits) {
    source = cluster_rows(sort_bits, b.rows, reinterpret_cast<uint64_t*>(s.first),
                          *reinterpret_cast<ClusterShared*>(s.first));
    const auto colours = static_cast<uint32_t>(s.tag[source]);
    const bool whole = 32 * (warp + 1) <= b.rows;  // others are not dealt: padding stays behind the rows
    if (whole) {
#pragma unroll 1
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
    row = reinterpret_cast<const int*>(s.before)[source];
    if (rank == 0) p.args.order[tile * kTileM + t] = row;
  }

  // The block's offsets before that are in the set. It refused a rank only if it was full, and is so still.
  __device__ __forceinline__ int known_at_first() const { return one_sweep() && b.fill < kSetLimit ? k_last : 0; }

  // Searches again from offset k_begin on: all of the group at once, or if that fills the set, until a pass's worth of rows
  // and not more than a round's on top are in it. Returns the first offset that is not.
  __device__ __forceinline__ int search(int k_begin) {
    if (passes == 0) {
      __syncthreads();  // everybody has read `fill`
      source = t;
    }
    clear_set();
    if (t == 0) b.fill = 0;
    const int group_end = min(volume, k_begin - k_begin % kPassOffsets + kPassOffsets);
    const Query query = Query::make<kDivide>(p.args, row);
    int known = k_begin, step = one_sweep() ? kRoundOffsets : group_end - k_begin;
    while (true) {
      __syncthreads();
      const int from = known;
      known = min(known + step, group_end);
#pragma unroll 1
      for (int k = from; k < known; ++k) s.neighbour[k % kPassOffsets * kTileM + t] = kSetSlots;
      for_neighbours<kDivide, kProbes>(p, from, known, query, [&](int k, int input) {
        s.neighbour[k % kPassOffsets * kTileM + t] = static_cast<uint16_t>(set_insert(s.set_rank, &b.fill, input));
      });
      __syncthreads();
      const int fill = b.fill;
      if (step > kRoundOffsets && fill >= kSetLimit) {  // it may have refused ranks
        __syncthreads();
        clear_set();
        if (t == 0) b.fill = 0;
        known = k_begin;
        step = kRoundOffsets;
      } else if (known == group_end || fill > kUniqueMax) {
        return known;
      }
    }
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
#pragma unroll 1
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
#pragma unroll 2
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
  __device__ __forceinline__ void place_unique(int k_begin, int k_count, int count) {
    int64_t begin4 = 0;
    if (t == 0) {  // in flight while the slots are found
      const int count4 = (count + 3) / 4;
      if (only_tile(p.args)) {
        begin4 = uniq4;
        uniq4 += count4;
      } else {
        begin4 = bump(&p.args.stats->uniq4, count4);
        if (k_begin + k_count == volume && !p.split) first_pass = bump(&p.args.stats->passes, passes + 1);
      }
    }
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
    if (t <= kColours) b.room.fill(all, count, t);
    __syncthreads();
#pragma unroll 1
    for (int i = 0; i < kSetSlots; i += kThreads) {
      const int tag = s.tag[i + t];
      if (tag < k_count * kTileM) {
        const int word = tag / 32, added = s.added[tag / kTileM];
        const int colour = (s.colour[tag % kTileM] + added) & (kColours - 1);
        const uint32_t same = s.lanes[word % kWarps * kColours + s.colour[tag % kTileM]];
        const int place = of_colour(s.before[word], colour) + __popc(s.first[word] & same & ((1u << (tag % 32)) - 1));
        const int index = b.room.slot(colour, place);
        s.unique[index] = s.set_rank[i + t];
        s.tag[i + t] = index;
      }
    }
    if (t == 0) {
      b.uniq_begin4 = begin4;
      b.first_pass = first_pass;
      s.tag[kSetSlots] = kMissing;
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
#pragma unroll 1
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
    place_unique(k_begin, k_count, count);
    write_pass(neighbour, k_begin, k_count, count, have);
    return k_count;
  }

  // Hands the staged passes over, next to each other, and puts the tile on the schedule.
  __device__ __forceinline__ void hand_over() {
    const PlanArgs& args = p.args;
    pairs = __reduce_add_sync(0xffffffffu, pairs);
    if (lane == 0) atomicAdd(&b.pairs, pairs);
    __syncthreads();  // passes and fragments are staged
    int cost = 0;
#pragma unroll 1
    for (int i = t; i < passes * (kFrags / 4); i += kThreads) {
      const uint32_t* frag = s.frag + i * 4;
      cost += __popc(frag[0] | frag[1] | frag[2] | frag[3]);
    }
    cost = __reduce_add_sync(0xffffffffu, cost);
    if (lane == 0 && cost != 0) atomicAdd(&b.cost, cost);
    bool room = true;
#pragma unroll 1
    for (int i = t; i < passes; i += kThreads) {
      const Pass pass = s.passes[i];
      room =
          room && int64_t{static_cast<uint32_t>(pass.uniq_begin4)} + (pass.uniq_count + 3) / 4 <= args.uniq4_capacity;
    }
    room = __syncthreads_and(room);
    int before = 0, total = passes;  // passes of the tile: of the blocks before this one, and all
    if (p.split) {
      if (t == 0) {
        b.passes = passes;
        b.has_room = room;
      }
      cluster_sync();
      total = 0;
#pragma unroll 1
      for (int i = 0; i < kGroupBlocks; ++i) {
        const BlockShared& other = *of_rank(&b, i);
        before += i < rank ? other.passes : 0;
        total += other.passes;
        room = room && other.has_room;
      }
      if (rank == 0 && t == 0) {
        const int64_t begin = bump(&args.stats->passes, total);
#pragma unroll 1
        for (int i = 0; i < kGroupBlocks; ++i) {
          BlockShared& other = *of_rank(&b, i);
          other.first_pass = begin;
          if (i > 0) b.pairs += other.pairs, b.cost += other.cost;
        }
      }
      cluster_sync();  // the last time that blocks look at each other
    }
    const int64_t first = b.first_pass;
    if (rank == 0 && t == 0) {
      if (only_tile(args)) {
        *args.stats = PlanStats{uniq4, passes, b.pairs, 0};
      } else {
        bump(&args.stats->pairs, b.pairs);
      }
      in_order(args, tile) = ScheduledTile{tile, static_cast<int>(first), total, b.cost};
    }
    if (room && first + total <= args.pass_capacity) {
#pragma unroll 1
      for (int i = t; i < passes; i += kThreads) args.passes[first + before + i] = s.passes[i];
#pragma unroll 1
      for (int i = t; i < passes * kFrags; i += kThreads) args.frag[(first + before) * kFrags + i] = s.frag[i];
    } else if (args.out_count != nullptr && rank == 0) {
      empty_tile(args, tile, volume);
    }
  }
};

template <bool kDivide, int kProbes, class P>
__device__ __forceinline__ void plan_tile(const P& p, BlockShared& block, int tile, int rank) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  const PlanArgs& args = p.args;
  const int volume = p.volume;
  if (int64_t{tile} * kTileM >= args.n_out) return;  // a block that completes a cluster
  if (args.out_count != nullptr && tile == 0 && rank == 0) share_passes(args, volume);
  const Rows all{args.n_out, args.out_count};
  const int64_t rows = all.number() - int64_t{tile} * kTileM;
  if (rows <= 0) {
    if (only_tile(args) && threadIdx.x == 0) *args.stats = PlanStats{};
    if (args.compact || rank != 0) return;
    empty_tile(args, tile, volume);
    if (threadIdx.x == 0) args.schedule[tile] = in_order(args, tile);  // behind those that are ranked
    return;
  }
  if (threadIdx.x == 0) block.rows = static_cast<int>(min(rows, int64_t{kTileM}));
  __syncthreads();

  const Shared s(shared_bytes, volume);
  Tile<kDivide, kProbes, P> work(p, s, block, tile, rank);
  work.order_rows(work.find_neighbours());
  int known = work.known_at_first();
  for (int k_begin = work.k_first; k_begin < work.k_last;) {
    if (work.passes > 0) __syncthreads();  // the previous pass is done with the set
    if (known <= k_begin) known = work.search(k_begin);
    k_begin += work.make_pass(k_begin, known);
    if (known != work.k_last && known % kPassOffsets != 0) known = 0;  // the set lacks what comes next
  }
  work.hand_over();

  if (only_tile(args)) {
    if (threadIdx.x == 0) args.schedule[0] = in_order(args, 0);
    return;
  }
  if (!ranked_in_place(args) || rank != 0) return;
  const int used = tiles_in_use(all);
  if (threadIdx.x == 0) {
    __threadfence();
    block.last = bump(&args.stats->done, 1) == used - 1;
  }
  __syncthreads();
  if (!block.last) return;
  __threadfence();
  rank_in_place(args, used, s.set_rank);
  if (threadIdx.x == 0) args.stats->done = 0;
}

}  // namespace
}  // namespace voxmma
