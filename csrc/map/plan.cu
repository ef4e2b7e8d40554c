// Tile plans: one block builds the plan of one tile of kTileM consecutive rows of the Morton order.
#include <climits>

#include "packed_key.cuh"

namespace voxmma {
namespace {

using namespace detail;

constexpr int kThreads = kTileM;  // thread t owns tile row t
constexpr int kWarps = kThreads / 32;
constexpr int kBlocksPerSm = 5;
constexpr int kProbes = 4;        // independent hash probes in flight per thread
constexpr int kSetSlots = 2048;   // shared set of input rows
constexpr int kSetShift = 32 - 11;
constexpr int kSetLimit = kUniqueMax + kProbes * kTileM;  // rows in the set beyond which it refuses new ones
constexpr int kNoTag = INT_MAX;
constexpr int kMaxVolume = 1024;
constexpr int kMaxScale = 4096;   // largest mul and div
// The first two offsets of a pass bring at most 2 * kTileM <= kUniqueMax rows: all but the last pass hold two or more.
constexpr int kMaxPassesOfGroup = kPassOffsets / 2;

constexpr uint64_t kAxisZ = 0x0009249249249249ull | uint64_t{1} << 51;  // bits of z in a key; y and x are next to them
constexpr uint64_t kAxisY = kAxisZ << 1, kAxisX = kAxisZ << 2;
constexpr uint64_t kGapsOfZ = ~kAxisZ & ((uint64_t{1} << (kBatchShift - 3)) - 1);  // below its last bit
constexpr uint32_t kEmptyHigh = ~0u;  // upper word of an empty slot, and of no key: see kBatchMax
constexpr uint64_t kBatchBits = ~uint64_t{0} << kBatchShift;

static_assert(kCoordBits == 18 && (kAxisX | kAxisY | kAxisZ) == (uint64_t{1} << kBatchShift) - 1, "axis masks");
// A thread looks at the limit before it inserts: kTileM rows may come on top of it.
static_assert(kSetSlots == 1 << (32 - kSetShift) && kSetSlots > kSetLimit + kTileM, "set too small");
static_assert(2 * kTileM <= kUniqueMax && kFragRows == 16, "pass and fragment bookkeeping rely on these");
static_assert(kPassOffsets * kWarps == kThreads, "one thread per (offset of a pass, warp)");

// A kernel offset, ready to be added to a key: add = quotient * div + rest, 0 <= rest < div.
struct alignas(16) Offset {
  uint64_t x, y, z;      // the quotients, spread to the bits of their axis
  uint16_t rest[3];
  uint16_t sort_bit;     // bit of the rows' sort key that says whether a row has this neighbour
};

// Dynamic shared memory of a block for kernel volume K.
struct Shared {
  int* set_row;          // [kSetSlots] input row or -1
  uint32_t* first;       // [kPassOffsets][kWarps] lanes that meet a row first; this and the next two also order the rows
  int* until;            // [kPassOffsets][kWarps] rows met first up to and with this offset and warp
  int* unique;           // [kUniqueMax]
  int* tag;              // [kSetSlots + 1] (offset, tile row) of its first appearance, then its place in `unique`
  Offset* offsets;       // [K]
  uint16_t* neighbour;   // [min(K, kPassOffsets)][kTileM] slot in the set, kSetSlots = none; first used to rank offsets
  Pass* passes;          // [max_passes] staged until their number is known
  uint32_t* frag;        // [max_passes][kFrags]
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
    set_row = reinterpret_cast<int*>(take(kSetSlots, sizeof(int)));
    first = reinterpret_cast<uint32_t*>(take(kThreads, sizeof(uint32_t)));
    until = reinterpret_cast<int*>(take(kThreads, sizeof(int)));
    unique = reinterpret_cast<int*>(take(kUniqueMax, sizeof(int)));
    tag = reinterpret_cast<int*>(take(kSetSlots + 1, sizeof(int)));
    offsets = reinterpret_cast<Offset*>(take(volume, sizeof(Offset)));
    neighbour =
        reinterpret_cast<uint16_t*>(take((volume < kPassOffsets ? volume : kPassOffsets) * kTileM, sizeof(uint16_t)));
    passes = reinterpret_cast<Pass*>(take(max_passes(volume), sizeof(Pass)));
    frag = reinterpret_cast<uint32_t*>(take(max_passes(volume) * kFrags, sizeof(uint32_t)));
    bytes = at;
  }
};

// The part of the neighbours' keys that an output row fixes. Its coordinates stay spread to the bits of their axis with
// ones in between, so that one addition of a spread offset carries from bit to bit of the axis. z has the batch too,
// and zeros between, where its last carry ends.
struct Query {
  uint64_t x, y, z;
  int rest[3];     // coord * mul modulo div
  bool inside;     // no offset leads out of the packable range

  __device__ __forceinline__ static bool in_range(int64_t scaled, int64_t div) {
    return uint64_t(scaled + kCoordBias * div) < uint64_t(div) << kCoordBits;
  }

  __device__ __forceinline__ static uint64_t spread(int quotient) {
    return spread18(uint32_t(quotient + kCoordBias) & ((1u << kCoordBits) - 1));
  }

  template <bool kDivide>
  __device__ __forceinline__ static Query make(const PlanArgs& args, int row, const int* low, const int* high) {
    const int4 c = coords_of(args, row);
    const int coord[3] = {c.y, c.z, c.w};
    int quotient[3];
    Query q;
    q.inside = row >= 0;
#pragma unroll
    for (int a = 0; a < 3; ++a) {
      const int scaled = coord[a] * args.mul[a], div = kDivide ? args.div[a] : 1;
      q.inside = q.inside && in_range(int64_t{scaled} + low[a], div) && in_range(int64_t{scaled} + high[a], div);
      quotient[a] = floor_div(scaled, div);
      q.rest[a] = scaled - quotient[a] * div;
    }
    q.x = (spread(quotient[0]) << 2) | ~kAxisX;
    q.y = (spread(quotient[1]) << 1) | ~kAxisY;
    q.z = spread(quotient[2]) | kGapsOfZ | uint64_t(c.x) << kBatchShift;
    return q;
  }

  __device__ __forceinline__ static int floor_div(int value, int div) {
    const int quotient = value / div;
    return quotient - (value % div < 0);
  }

  __device__ __forceinline__ static int4 coords_of(const PlanArgs& args, int row) {
    return row >= 0 ? __ldg(reinterpret_cast<const int4*>(args.out_coords) + row) : make_int4(0, 0, 0, 0);
  }

  // Whether offset k leads to a packable coordinate: for the rows at the edge of the range and for padding.
  __device__ __forceinline__ static bool reaches(const PlanArgs& args, int row, int k) {
    const int4 c = coords_of(args, row);
    return row >= 0 && in_range(int64_t{c.y} * args.mul[0] + __ldg(args.add + 3 * k), args.div[0]) &&
           in_range(int64_t{c.z} * args.mul[1] + __ldg(args.add + 3 * k + 1), args.div[1]) &&
           in_range(int64_t{c.w} * args.mul[2] + __ldg(args.add + 3 * k + 2), args.div[2]);
  }

  // Key of the neighbour under an offset that reaches one; false when the division leaves a remainder.
  template <bool kDivide>
  __device__ __forceinline__ bool key(const PlanArgs& args, const Offset& o, uint64_t& out) const {
    uint64_t qx = x + o.x, qy = y + o.y, qz = z + o.z;
    bool divisible = true;
    if constexpr (kDivide) {
      const int rx = rest[0] + o.rest[0], ry = rest[1] + o.rest[1], rz = rest[2] + o.rest[2];
      divisible = (rx == 0 || rx == args.div[0]) && (ry == 0 || ry == args.div[1]) && (rz == 0 || rz == args.div[2]);
      qx += rx == 0 ? 0 : 4;  // carry of the remainders
      qy += ry == 0 ? 0 : 2;
      qz += rz == 0 ? 0 : 1;
    }
    out = (qx & kAxisX) | (qy & kAxisY) | (qz & (kAxisZ | kBatchBits));
    return divisible;
  }
};

// Calls emit(k, input row or -1) for the offsets k_begin..k_end-1 of output row `row`, -1 = padding.
template <bool kDivide, class Emit>
__device__ __forceinline__ void for_neighbours(const PlanArgs& args, const Offset* offsets, int k_begin, int k_end,
                                               int row, const Query& query, const Emit& emit) {
  const auto* keys = reinterpret_cast<const uint2*>(args.keys);  // low and high word
  const uint32_t mask = static_cast<uint32_t>(args.capacity - 1);
  for (int k0 = k_begin; k0 < k_end; k0 += kProbes) {
    uint32_t ask = (1u << kProbes) - 1;
    if (!query.inside) {
#pragma unroll 1
      for (int u = 0; u < kProbes; ++u) {
        if (k0 + u >= k_end || !Query::reaches(args, row, k0 + u)) ask ^= 1u << u;
      }
    }
    uint2 key[kProbes], found[kProbes];
    uint32_t slot[kProbes];
    bool walk[kProbes], any = false;
    int input[kProbes];
#pragma unroll
    for (int u = 0; u < kProbes; ++u) {
      uint64_t packed;
      // The last offset fills up the last round.
      const bool divisible = query.key<kDivide>(args, offsets[min(k0 + u, k_end - 1)], packed);
      key[u] = make_uint2(uint32_t(packed), uint32_t(packed >> 32));
      slot[u] = home_slot(packed, mask);
      found[u] = make_uint2(~0u, ~0u);
      if (divisible && (ask >> u & 1)) found[u] = __ldg(keys + slot[u]);
    }
    const auto look = [&] {
      any = false;
#pragma unroll
      for (int u = 0; u < kProbes; ++u) {
        walk[u] = (found[u].x != key[u].x || found[u].y != key[u].y) && found[u].y != kEmptyHigh;
        any = any || walk[u];
      }
    };
    look();
    for (uint32_t step = kProbeStep; any; step += kProbeStep, look()) {  // together: the chains' latencies overlap
#pragma unroll
      for (int u = 0; u < kProbes; ++u) {
        if (walk[u]) {
          slot[u] = (slot[u] + step) & mask;
          found[u] = __ldg(keys + slot[u]);
        }
      }
    }
#pragma unroll
    for (int u = 0; u < kProbes; ++u) input[u] = found[u].y == kEmptyHigh ? -1 : __ldg(args.rows + slot[u]);
#pragma unroll
    for (int u = 0; u < kProbes; ++u) {
      if (k0 + u < k_end) emit(k0 + u, input[u]);
    }
  }
}

// Loads the offsets and gives each its sort bit: the farther from the middle of their box, the rarer a neighbour, the
// more significant. low and high (shared, [3]) receive the box.
template <bool kDivide>
__device__ __forceinline__ void load_offsets(const PlanArgs& args, const Shared& s, int* low, int* high) {
  const int volume = args.kernel_volume, t = threadIdx.x, lane = t % 32;
  if (t < 32 * 3) {  // a warp an axis
    const int axis = t / 32;
    int lo = INT_MAX, hi = INT_MIN;
    for (int k = lane; k < volume; k += 32) {
      const int add = __ldg(args.add + 3 * k + axis);
      lo = min(lo, add);
      hi = max(hi, add);
    }
    lo = __reduce_min_sync(0xffffffffu, lo);
    hi = __reduce_max_sync(0xffffffffu, hi);
    if (lane == 0) {
      low[axis] = lo;
      high[axis] = hi;
    }
  }
  __syncthreads();
  uint64_t* distance = reinterpret_cast<uint64_t*>(s.neighbour);  // volume * 8 <= min(volume, 32) * 512 bytes
  for (int k = t; k < volume; k += kThreads) {
    uint64_t sum = 0, spread[3];
#pragma unroll
    for (int a = 0; a < 3; ++a) {
      const int add = __ldg(args.add + 3 * k + a), div = kDivide ? args.div[a] : 1;
      const int quotient = Query::floor_div(add, div);
      const int64_t twice = 2 * int64_t{add} - low[a] - high[a];
      sum += uint64_t(twice * twice);
      spread[a] = spread18(uint32_t(quotient) & ((1u << kCoordBits) - 1));
      s.offsets[k].rest[a] = static_cast<uint16_t>(add - quotient * div);
    }
    s.offsets[k].x = spread[0] << 2;
    s.offsets[k].y = spread[1] << 1;
    s.offsets[k].z = spread[2];
    distance[k] = sum * kMaxVolume + unsigned(k);  // ties go by k
  }
  __syncthreads();
  const int fold = volume > 32 ? volume : 32;
  for (int k = t; k < volume; k += kThreads) {
    const uint64_t mine = distance[k];
    int rank = 0;
#pragma unroll 4
    for (int j = 0; j < volume; ++j) rank += distance[j] < mine;
    s.offsets[k].sort_bit = static_cast<uint16_t>(rank * 32 / fold);
  }
  __syncthreads();
}

// Ascending bitonic sort of one distinct key per thread. `buffer` holds 2 * kTileM keys; its first half may be used
// again right after, its second half after a barrier.
__device__ __forceinline__ uint64_t block_sort(uint64_t key, uint64_t* buffer) {
  const unsigned t = threadIdx.x;
  unsigned half = 0;  // of the buffer, in turn: one barrier an exchange. There are 6 exchanges.
#pragma unroll
  for (unsigned size = 2; size <= unsigned(kTileM); size *= 2) {
#pragma unroll
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
  return key;
}

// Shared memory of cluster_rows, for one block of kTileM threads.
struct ClusterShared {
  uint32_t mask[2][kTileM];  // mask of every position, double buffered
  uint8_t row[2][kTileM];    // thread whose row stands at the position
  int count[32];             // rows with each bit
  int place[32];             // bit of the sort key that a bit of the mask becomes
  int warp_ones[kTileM / 32];
  uint32_t best[kTileM / 32];  // per node: cost << 8 | bit
};

// Splits nodes of n positions in halves, for one level: every node is stably partitioned by the bit that leaves its
// halves the smallest unions. Stages masks and rows from buffer `from` to the other one.
template <int n>
__device__ __forceinline__ void split_level(ClusterShared& s, int from) {
  constexpr int kNodes = kTileM / n, kChunks = n / 32, kWarps = kTileM / 32;
  const int t = threadIdx.x, lane = t % 32, warp = t / 32;
  if (t < kNodes) s.best[t] = 0xffffffffu;
  __syncthreads();
  for (int task = warp; task < kNodes * 32; task += kWarps) {  // (node, bit), a warp each
    const int node = task / 32, bit = task % 32;
    uint32_t m[kChunks], ones[kChunks];
    int total = 0;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      m[c] = s.mask[from][node * n + c * 32 + lane];
      ones[c] = __ballot_sync(0xffffffffu, m[c] >> bit & 1);
      total += __popc(ones[c]);
    }
    if (bit != 0 && (total == 0 || total == n)) continue;  // leaves the order as it is: bit 0 stands for that, too
    uint32_t first = 0, second = 0;
    int ones_before = 0, zeros_before = total;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const uint32_t below = (1u << lane) - 1;
      const bool one = ones[c] >> lane & 1;
      const int position = one ? ones_before + __popc(ones[c] & below) : zeros_before + __popc(~ones[c] & below);
      if (position < n / 2) first |= m[c];
      else second |= m[c];
      ones_before += __popc(ones[c]);
      zeros_before += 32 - __popc(ones[c]);
    }
    first = __reduce_or_sync(0xffffffffu, first);
    second = __reduce_or_sync(0xffffffffu, second);
    if (lane == 0) atomicMin(&s.best[node], uint32_t(__popc(first) + __popc(second)) << 8 | uint32_t(bit));
  }
  __syncthreads();
  const int node = t / n, bit = s.best[node] & 0xff;
  const uint32_t mask = s.mask[from][t];
  const bool one = mask >> bit & 1;
  const uint32_t ones = __ballot_sync(0xffffffffu, one);
  if (lane == 0) s.warp_ones[warp] = __popc(ones);
  __syncthreads();
  int total = 0, before = 0;  // ones of the node, and of its warps before this one
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    const int w = node * kChunks + c;
    total += s.warp_ones[w];
    before += w < warp ? s.warp_ones[w] : 0;
  }
  const uint32_t below = (1u << lane) - 1;
  const int position = one ? before + __popc(ones & below)
                           : total + (warp - node * kChunks) * 32 - before + __popc(~ones & below);
  s.mask[from ^ 1][node * n + position] = mask;
  s.row[from ^ 1][node * n + position] = s.row[from][t];
  __syncthreads();
}

// Orders the rows of a tile, thread t's row having the neighbour mask `mask`. An MMA fragment runs for every offset that
// any of its rows uses, so what counts is the union of the masks of 16, 32 and 64 consecutive rows. First a sort with
// the tile's rarest offsets as the most significant bits, then three levels of halving (256, 128, 64 rows), each by the
// offset that leaves the two halves the smallest unions. Useful / issued MMA at 64 rows: 0.66 on surfaces and 0.34 on
// LiDAR, against 0.60 and 0.31 for the sort alone. Rows without neighbours, padding behind them, stay last.
// Returns the thread whose row comes to position t.
__device__ __forceinline__ int cluster_rows(uint32_t mask, uint64_t* buffer, ClusterShared& s) {
  const int t = threadIdx.x, lane = t % 32;
  if (t < 32) s.count[t] = 0;
  __syncthreads();
  int mine = 0;  // of bit `lane`, in this warp
#pragma unroll
  for (int b = 0; b < 32; ++b) {
    const int ones = __popc(__ballot_sync(0xffffffffu, mask >> b & 1));
    mine = lane == b ? ones : mine;
  }
  if (mine != 0) atomicAdd(&s.count[lane], mine);
  __syncthreads();
  if (t < 32) {
    int place = 0;
    for (int b = 0; b < 32; ++b) place += s.count[b] > s.count[t] || (s.count[b] == s.count[t] && b < t);
    s.place[t] = place;
  }
  __syncthreads();
  uint32_t key = 0;
  for (uint32_t rest = mask; rest != 0; rest &= rest - 1) key |= 1u << s.place[__ffs(rest) - 1];
  const uint64_t sorted = block_sort((uint64_t{~key} << 8) | uint32_t(t), buffer);
  __syncthreads();  // `buffer` may lie over `s`
  s.mask[0][t] = ~static_cast<uint32_t>(sorted >> 8);
  s.row[0][t] = static_cast<uint8_t>(sorted);
  split_level<256>(s, 0);
  split_level<128>(s, 1);
  split_level<64>(s, 0);
  return s.row[1][t];
}

// Finds `row` in the shared set, or puts it in and counts it in `fill`. Returns its slot; kSetSlots when it is full.
__device__ __forceinline__ int set_insert(int* set_row, int* fill, int row) {
  int slot = static_cast<int>((uint32_t(row) * 2654435769u) >> kSetShift);
  int seen;
  while ((seen = *static_cast<volatile int*>(set_row + slot)) != row) {
    if (seen == -1) {
      if (*static_cast<volatile int*>(fill) >= kSetLimit) return kSetSlots;
      seen = atomicCAS(set_row + slot, -1, row);
      if (seen == -1) atomicAdd(fill, 1);
      if (seen == -1 || seen == row) break;
    }
    slot = (slot + 1) & (kSetSlots - 1);
  }
  return slot;
}

__device__ __forceinline__ int64_t bump(int64_t* counter, int64_t amount) {
  return static_cast<int64_t>(
      atomicAdd(reinterpret_cast<unsigned long long*>(counter), static_cast<unsigned long long>(amount)));
}

template <bool kDivide>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm) plan_tiles(const PlanArgs args) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  __shared__ int low[3], high[3], warp_total[kWarps];
  __shared__ int64_t uniq_begin4, first_pass;
  __shared__ int tile_pairs, fill;

  const int volume = args.kernel_volume;
  const Shared s(shared_bytes, volume);
  const int t = threadIdx.x, lane = t % 32, warp = t / 32;
  const int tile = static_cast<int>(blockIdx.x), tile_row = tile * kTileM;
  const bool one_sweep = volume <= kPassOffsets;

  // 1. Neighbours of the rows as they come, and from them the sort key. Where the plan has one group of offsets, the
  // neighbours are kept as slots of the shared set.
  int row = tile_row + t < args.n_out ? args.out_order[tile_row + t] : -1;
  for (int i = t; i < kSetSlots; i += kThreads) s.set_row[i] = -1;
  if (t == 0) tile_pairs = fill = 0;
  load_offsets<kDivide>(args, s, low, high);
  uint32_t sort_bits = 0;
  const Query first_query = Query::make<kDivide>(args, row, low, high);
  for_neighbours<kDivide>(args, s.offsets, 0, volume, row, first_query, [&](int k, int input) {
    int slot = kSetSlots;
    if (input >= 0) {
      sort_bits |= 1u << s.offsets[k].sort_bit;
      if (one_sweep) slot = set_insert(s.set_row, &fill, input);
    }
    if (one_sweep) s.neighbour[k * kTileM + t] = static_cast<uint16_t>(slot);
  });

  // 2. Order. `source` is the column of `neighbour` that belongs to this thread from here on.
  int source = cluster_rows(sort_bits, reinterpret_cast<uint64_t*>(s.first), *reinterpret_cast<ClusterShared*>(s.first));
  row = tile_row + source < args.n_out ? args.out_order[tile_row + source] : -1;
  args.order[tile_row + t] = row;
  // Offsets from the pass's first to this one are in the set. It refused a row only if it was full, and is so still.
  int known = one_sweep && fill < kSetLimit ? volume : 0;

  // 3. Passes. Their unique rows are listed by first appearance: by offset, then by tile row.
  uint16_t* local = args.local + int64_t{tile} * volume * kTileM + t;
  int passes = 0, pairs = 0;
  for (int k_begin = 0, k_count = 0; k_begin < volume; k_begin += k_count) {
    const int column = k_begin % kPassOffsets;
    if (passes > 0) __syncthreads();  // the previous pass is done with the set
    if (known <= k_begin) {
      // Search again, until a pass's worth of rows and not more than a round's on top are in the set.
      if (passes == 0) {
        __syncthreads();  // everybody has read `fill`
        source = t;
      }
      for (int i = t; i < kSetSlots; i += kThreads) s.set_row[i] = -1;
      if (t == 0) fill = 0;
      const int group_end = min(volume, k_begin - column + kPassOffsets);
      const Query query = Query::make<kDivide>(args, row, low, high);
      known = k_begin;
      do {
        __syncthreads();
        const int from = known;
        known = min(known + kProbes, group_end);
        for_neighbours<kDivide>(args, s.offsets, from, known, row, query, [&](int k, int input) {
          const int slot = input >= 0 ? set_insert(s.set_row, &fill, input) : kSetSlots;
          s.neighbour[k % kPassOffsets * kTileM + t] = static_cast<uint16_t>(slot);
        });
        __syncthreads();
      } while (known < group_end && fill <= kUniqueMax);
    }
    const int span = known - k_begin;
    const uint16_t* neighbour = s.neighbour + column * kTileM + source;
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
    int until = __popc(s.first[t]);  // inclusive scan over (offset, warp)
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int before = __shfl_up_sync(0xffffffffu, until, step);
      if (lane >= step) until += before;
    }
    if (lane == 31) warp_total[warp] = until;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < kWarps - 1; ++w) until += w < warp ? warp_total[w] : 0;
    s.until[t] = until;
    k_count = __syncthreads_count(t % kWarps == kWarps - 1 && t / kWarps < span && until <= kUniqueMax);
    const int count = s.until[k_count * kWarps - 1], count4 = (count + 3) / 4;
    if (t == 0) {
      uniq_begin4 = bump(&args.stats->uniq4, count4);
      s.tag[kSetSlots] = kMissing;
    }
#pragma unroll
    for (int i = 0; i < kSetSlots; i += kThreads) {
      const int tag = s.tag[i + t];
      if (tag < k_count * kTileM) {
        const int index = s.until[tag / 32] - __popc(s.first[tag / 32] >> (tag % 32));
        s.unique[index] = s.set_row[i + t];
        s.tag[i + t] = index;
      }
    }
    __syncthreads();
#pragma unroll 4
    for (int j = 0; j < k_count; ++j) {
      local[int64_t(k_begin + j) * kTileM] = static_cast<uint16_t>(s.tag[neighbour[j * kTileM]]);
    }
    const int64_t begin4 = uniq_begin4;
    if (begin4 + count4 <= args.uniq4_capacity) {
      for (int i = t; i < 4 * count4; i += kThreads) args.uniq[4 * begin4 + i] = s.unique[min(i, count - 1)];
    }
    have &= ~0u >> (kPassOffsets - k_count);
    pairs += __popc(have);
#pragma unroll
    for (int step = 1; step < kFragRows; step *= 2) have |= __shfl_xor_sync(0xffffffffu, have, step);
    if (lane % kFragRows == 0) s.frag[passes * kFrags + t / kFragRows] = have;
    if (t == 0) s.passes[passes] = Pass{k_begin, k_count, static_cast<int>(begin4), count};
    ++passes;
    if (known != volume && known % kPassOffsets != 0) known = 0;  // the set lacks what comes next
  }
  pairs = __reduce_add_sync(0xffffffffu, pairs);
  if (lane == 0) atomicAdd(&tile_pairs, pairs);
  __syncthreads();

  // 4. Hand the staged passes over, next to each other.
  if (t == 0) {
    first_pass = bump(&args.stats->passes, passes);
    bump(&args.stats->pairs, tile_pairs);
    args.tile_pass[tile] = make_int2(static_cast<int>(first_pass), passes);
  }
  __syncthreads();
  const int64_t first = first_pass;
  if (first + passes <= args.pass_capacity) {
    for (int i = t; i < passes; i += kThreads) args.passes[first + i] = s.passes[i];
    for (int i = t; i < passes * kFrags; i += kThreads) args.frag[first * kFrags + i] = s.frag[i];
  }
}

__global__ void __launch_bounds__(kThreads) write_table(const PlanView plan, int* table) {
  const int64_t tile = blockIdx.x;
  const int t = threadIdx.x;
  const int row = plan.order[tile * kTileM + t];
  const int2 span = plan.tile_pass[tile];
  if (row < 0) return;
  for (int p = 0; p < span.y; ++p) {
    const Pass pass = plan.passes[span.x + p];
    const int* uniq = plan.uniq + 4 * int64_t(pass.uniq_begin4);
    for (int k = pass.k_begin; k < pass.k_begin + pass.k_count; ++k) {
      const int index = plan.local[(tile * plan.kernel_volume + k) * kTileM + t];
      table[k * plan.n_out + row] = index < pass.uniq_count ? uniq[index] : -1;
    }
  }
}

}  // namespace

cudaError_t build_plan(const PlanArgs& args, cudaStream_t stream) {
  const bool power_of_two = args.capacity > 0 && (args.capacity & (args.capacity - 1)) == 0;
  if (args.kernel_volume < 1 || args.kernel_volume > kMaxVolume || args.n_out < 0 || args.n_out > INT_MAX ||
      !power_of_two || args.capacity > int64_t{1} << 32 || args.pass_capacity > INT_MAX ||
      args.uniq4_capacity > INT_MAX) {
    return cudaErrorInvalidValue;
  }
  for (int a = 0; a < 3; ++a) {
    if (args.mul[a] < 1 || args.mul[a] > kMaxScale || args.div[a] < 1 || args.div[a] > kMaxScale) {
      return cudaErrorInvalidValue;
    }
  }
  cudaError_t error = cudaMemsetAsync(args.stats, 0, sizeof(PlanStats), stream);
  const int64_t tiles = (args.n_out + kTileM - 1) / kTileM;
  if (error != cudaSuccess || tiles == 0) return error;
  const size_t bytes = Shared(nullptr, args.kernel_volume).bytes;
  const bool divide = args.div[0] != 1 || args.div[1] != 1 || args.div[2] != 1;
  const auto kernel = divide ? plan_tiles<true> : plan_tiles<false>;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  if (error != cudaSuccess) return error;
  kernel<<<static_cast<unsigned>(tiles), kThreads, bytes, stream>>>(args);
  return cudaGetLastError();
}

cudaError_t plan_to_table(const PlanView& plan, int* table, cudaStream_t stream) {
  if (plan.tiles == 0) return cudaSuccess;
  write_table<<<static_cast<unsigned>(plan.tiles), kThreads, 0, stream>>>(plan, table);
  return cudaGetLastError();
}

}  // namespace voxmma
