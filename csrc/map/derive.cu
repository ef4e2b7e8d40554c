// Output coordinates of strided, transposed and generative layers: distinct sites by a bitmap (cells.cu), or by a
// hash table where their box is too large for one.
#include <cub/device/device_radix_sort.cuh>

#include <algorithm>
#include <climits>

#include "bricks.cuh"
#include "cells.cuh"
#include "grid.cuh"

namespace voxmma {
namespace {

using namespace detail;

// Keys hold v - low of batch, x, y, z in box.bits bits each, so that their order is that of the coordinates. All ones
// is no key: 32-bit keys have at most 31 bits, and batch - low ends at 1022.
constexpr int kNarrowBits = 31;

// A divisor that is mostly a power of two, at least 1.
struct Divisor {
  int value, shift;  // -1: none

  Divisor() = default;
  __host__ Divisor(int value_) : value(value_), shift((value & (value - 1)) == 0 ? __builtin_ctz(value) : -1) {}
  __device__ __forceinline__ int floor(int v) const {
    if (shift >= 0) return v >> shift;
    const int quotient = v / value;
    return quotient - (v - quotient * value < 0);
  }
  __device__ __forceinline__ int rest(int v) const { return v - floor(v) * value; }
};

// What the kernels need to know about one axis.
struct Axis {
  int size, dilation, padding;
  Divisor stride;
  int slots;       // most sites that a coordinate leads to
  Divisor period;  // to windows: kernel positions from one site to the next
  Divisor shared;  // gcd of stride and dilation
  int inverse;     // of dilation / shared, modulo period
  int end;         // sites lie in [0, end); 0: anywhere
};

struct Rule {
  Axis axis[3];
  Divisor slots, slots_yz, slots_z;  // candidates of a row, and those of a site along x, and along x and y
  bool to_children;
  CoordBox box;
};

int gcd(int a, int b) { return b == 0 ? a : gcd(b, a % b); }

Rule make_rule(const ExpandArgs& args) {
  Rule rule{};
  rule.to_children = args.to_children;
  rule.box = args.box;
  for (int a = 0; a < 3; ++a) {
    Axis& axis = rule.axis[a];
    axis.size = args.size[a];
    axis.stride = args.stride[a];
    axis.dilation = args.dilation[a];
    axis.padding = args.padding[a];
    axis.end = args.shape[a];
    const int shared = gcd(args.stride[a], args.dilation[a]), period = args.stride[a] / shared;
    axis.shared = shared;
    axis.period = period;
    axis.slots = args.to_children ? axis.size : (axis.size + period - 1) / period;
    const int64_t step = axis.dilation / shared % period;
    axis.inverse = 0;
    while (period > 1 && step * axis.inverse % period != 1) ++axis.inverse;
  }
  rule.slots_z = rule.axis[2].slots;
  rule.slots_yz = rule.axis[1].slots * rule.axis[2].slots;
  rule.slots = rule.axis[0].slots * rule.slots_yz.value;
  return rule;
}

__device__ __forceinline__ bool on_grid(const Axis& axis, int v) {
  return axis.end == 0 || static_cast<uint32_t>(v) < static_cast<uint32_t>(axis.end);
}

// The j-th site that coordinate v leads to along an axis; false when there is none.
__device__ __forceinline__ bool site(const Axis& axis, bool to_children, int v, int j, int& out) {
  if (to_children) {
    out = v * axis.stride.value - axis.padding + j * axis.dilation;
    return on_grid(axis, out);
  }
  // (v + padding - k * dilation) / stride must be whole. With g = gcd(stride, dilation) there is such a k only if g
  // divides q = v + padding; then it is of one residue modulo stride / g.
  const int q = v + axis.padding, shared = axis.shared.floor(q);
  const int k = axis.period.rest(axis.period.rest(shared) * axis.inverse) + j * axis.period.value;  // of up to 2^24
  out = k < axis.size ? axis.stride.floor(q - k * axis.dilation) : 0;
  return k < axis.size && shared * axis.shared.value == q && on_grid(axis, out);
}

template <class Key>
constexpr Key kEmpty = static_cast<Key>(~Key{0});

template <class Key>
__device__ __forceinline__ uint32_t home(Key key, uint32_t capacity) {
  return home_slot(make_uint2(uint32_t(key), uint32_t(uint64_t(key) >> 32)), capacity);
}

__device__ __forceinline__ uint32_t swap_if(uint32_t* slot, uint32_t key) { return atomicCAS(slot, ~0u, key); }
__device__ __forceinline__ uint64_t swap_if(uint64_t* slot, uint64_t key) {
  return atomicCAS(reinterpret_cast<unsigned long long*>(slot), ~0ull, static_cast<unsigned long long>(key));
}

// True when the key was not there. In a table that may be too small, `full` is set where the search has gone on for
// longer than it does in one that is not.
template <class Key>
__device__ __forceinline__ bool insert(Key* table, uint32_t capacity, Key key, bool* full = nullptr) {
  constexpr int kMostProbes = 4096;
  uint32_t slot = home(key, capacity);
  Key seen;
  for (int probes = 0; (seen = swap_if(table + slot, key)) != key; ++probes) {
    if (seen == kEmpty<Key>) return true;
    slot = next_slot(slot, capacity);
    if (full != nullptr && probes == kMostProbes) {
      *full = true;
      break;
    }
  }
  return false;
}

// Candidate i of the rows: (row, site of it). False when there is none.
__device__ __forceinline__ bool candidate(const int4* coords, const Rule& rule, uint32_t i, int4& out) {
  const int row = rule.slots.floor(static_cast<int>(i)), rest = static_cast<int>(i) - row * rule.slots.value;
  const int x = rule.slots_yz.floor(rest), yz = rest - x * rule.slots_yz.value, y = rule.slots_z.floor(yz);
  const int4 c = coords[row];
  out.x = c.x;
  bool exists = site(rule.axis[0], rule.to_children, c.y, x, out.y);
  exists = site(rule.axis[1], rule.to_children, c.z, y, out.z) && exists;
  return site(rule.axis[2], rule.to_children, c.w, yz - y * rule.slots_z.value, out.w) && exists;
}

__host__ __device__ __forceinline__ int64_t candidates_of(const Rule& rule) {  // of a row
  return rule.slots.value;
}

// Bounds [8] of the packable sites that rows within bounds lead to, none where there are no rows: reach() of
// voxmma/sparse/derive.py. By threads 0..3 of a block, an axis each.
__device__ __forceinline__ void reach(const int* from, const Rule& rule, int* to) {
  const int t = threadIdx.x;
  const bool none = from[0] > from[4];
  if (t == 0) {
    to[0] = from[0];
    to[4] = from[4];
  }
  if (t < 1 || t > 3) return;
  const Axis& axis = rule.axis[t - 1];
  const int first = none ? 0 : from[t], last = none ? 0 : from[4 + t], span = (axis.size - 1) * axis.dilation;
  int low, high;  // all of less than 2^30
  if (rule.to_children) {
    low = first * axis.stride.value - axis.padding;
    high = last * axis.stride.value - axis.padding + span;
  } else {
    low = -axis.stride.floor(span - axis.padding - first);
    high = axis.stride.floor(last + axis.padding);
  }
  const int begin = axis.end == 0 ? -kCoordBias : 0, end = axis.end == 0 ? kCoordBias - 1 : axis.end - 1;
  low = min(max(low, begin), end);
  high = max(min(high, end), low);
  to[t] = none ? INT_MAX : low;
  to[4 + t] = none ? INT_MIN : high;
}

// Key of a site; false for one that is not packable, or where that is asked, not in the box. What eager layers know of
// the box may be wrong for samples: coordinates that a tree_map has moved.
template <class Key>
__device__ __forceinline__ bool site_key(const CoordBox& box, int4 c, bool in_box, Key& key) {
  const int v[4] = {c.x, c.y, c.z, c.w};
  bool inside = coord_in_range(c.y) && coord_in_range(c.z) && coord_in_range(c.w);
  key = 0;
#pragma unroll
  for (int a = 0; a < 4; ++a) {
    const uint32_t distance = uint32_t(v[a]) - uint32_t(box.low[a]);
    inside = inside && (!in_box || distance >> box.bits[a] == 0);
    key = key << box.bits[a] | Key(distance);
  }
  return inside;
}

// One candidate a thread and round; new keys are counted and written block by block. Where there may not be room for
// all, no more than `room` are written, and soon none are looked for.
template <class Key>
__global__ void __launch_bounds__(kThreads)
    expand(const int4* coords, const Rows rows, const __grid_constant__ Rule rule, const int* row_bounds, int* bounds,
           Key* table, uint32_t capacity, Key* keys, int64_t room, ExpandStats* stats) {
  __shared__ int warp_new[kThreads / 32];
  __shared__ int64_t first;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const bool sized = rows.count != nullptr;
  const int64_t candidates = rows.number() * candidates_of(rule);
  if (row_bounds != nullptr && blockIdx.x == 0) reach(row_bounds, rule, bounds);
  bool outside = false;
  for (int64_t begin = int64_t(blockIdx.x) * kThreads; begin < candidates; begin += int64_t(gridDim.x) * kThreads) {
    const uint32_t i = static_cast<uint32_t>(begin) + threadIdx.x;
    bool fresh = false;
    Key key = 0;
    bool full = sized && *static_cast<volatile int64_t*>(&stats->count) > room;
    if (i < candidates && !full) {
      int4 c;
      const bool exists = candidate(coords, rule, i, c), inside = site_key(rule.box, c, sized, key);
      outside = outside || (exists && !inside);
      if (exists && inside) fresh = insert(table, capacity, key, sized ? &full : nullptr);
    }
    const uint32_t ballot = __ballot_sync(0xffffffffu, fresh);
    if (lane == 0) warp_new[warp] = __popc(ballot);
    __syncthreads();
    int before = 0, total = 0;
#pragma unroll
    for (int w = 0; w < kThreads / 32; ++w) {
      before += w < warp ? warp_new[w] : 0;
      total += warp_new[w];
    }
    if (threadIdx.x == 0) {
      first = static_cast<int64_t>(
          atomicAdd(reinterpret_cast<unsigned long long*>(&stats->count), static_cast<unsigned long long>(total)));
    }
    __syncthreads();
    const int64_t at = first + before + __popc(ballot & ((1u << lane) - 1));
    if (fresh && at < room) keys[at] = key;
    if (full)
      atomicMax(reinterpret_cast<unsigned long long*>(&stats->count), static_cast<unsigned long long>(room) + 1);
  }
  if (outside) stats->outside = 1;
}

// How many sites there are: as many as were found, or none where there was not room for all.
__global__ void tell_found(const ExpandStats* stats, int64_t room, CellStats* found, int64_t* made) {
  *found = {stats->count, stats->outside, 0};
  *made = stats->count <= room ? stats->count : 0;
}

// Sets the bits of candidates, one a thread and round. True where a site of this thread's is not in the box, which keeps a
// wrong bound from writing elsewhere.
__device__ __forceinline__ bool mark(const int4* coords, int64_t candidates, const Rule& rule, const CoordBox& box,
                                     uint32_t* rows, uint32_t* bricks) {
  bool outside = false;
  const int64_t step = int64_t(gridDim.x) * kThreads;
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < candidates; i += step) {
    int4 c;
    if (!candidate(coords, rule, static_cast<uint32_t>(i), c)) continue;
    uint32_t key;
    const bool inside = site_key(box, c, true, key);
    outside = outside || !inside;
    if (!inside) continue;
    uint32_t* word = rows + key / 32;
    const uint32_t bit = 1u << (key % 32);
    if ((*static_cast<volatile uint32_t*>(word) & bit) != 0 || (atomicOr(word, bit) & bit) != 0) continue;
    const auto code = morton<uint32_t>(box, c);
    atomicOr(bricks + code / 32, 1u << (code % 32));
  }
  return outside;
}

// The rows lie in the bounds that the box is around; what is not in it is called outside.
__global__ void __launch_bounds__(kThreads)
    mark_candidates(const int4* coords, const Rows rows, const __grid_constant__ Rule rule, const int* row_bounds,
                    int* bounds, const Cells cells) {
  CoordBox box = rule.box;
  const int64_t candidates = rows.number() * candidates_of(rule);
  if (row_bounds != nullptr) {
    __shared__ int to[8];
    reach(row_bounds, rule, to);
    __syncthreads();
    box = whole_bricks(make_box(to, to + 4));
    if (blockIdx.x == 0 && threadIdx.x < 8) bounds[threadIdx.x] = to[threadIdx.x];
    if (total_bits(box) > total_bits(rule.box)) {
      cells.stats->outside = 1;
      return;
    }
  }
  if (mark(coords, candidates, rule, box, cells.rows, cells.bricks)) cells.stats->outside = 1;
}

constexpr int kFewCandidates = 16 * kThreads;

// Bitmaps, rows and index of a small set, by one block that keeps the bitmaps to itself.
__global__ void __launch_bounds__(kThreads)
    derive_few(const int4* coords, int candidates, const __grid_constant__ Rule rule, int4* made, int* order,
               Brick* table, uint32_t capacity, CellStats* found) {
  __shared__ uint4 row_words[kThreads], brick_words[kThreads];
  __shared__ int4 row_ranks[kThreads], brick_ranks[kThreads];
  __shared__ uint16_t cell_of[kFewCandidates];  // each row's
  auto *const rows = reinterpret_cast<uint32_t*>(row_words), *const bricks = reinterpret_cast<uint32_t*>(brick_words);
  const int t = threadIdx.x, cells = 1 << total_bits(rule.box);
  row_words[t] = brick_words[t] = make_uint4(0, 0, 0, 0);
  empty_table(reinterpret_cast<uint4*>(table), capacity);
  __syncthreads();
  const bool outside = __syncthreads_or(mark(coords, candidates, rule, rule.box, rows, bricks));
  brick_ranks[t] = ranks_of(scan_words(bricks, 0), 0);
  __syncthreads();
  const Scan scan = scan_words(rows, 0);
  row_ranks[t] = ranks_of(scan, 0);
  if (t == 0) *found = {scan.all, outside, 0};
  __syncthreads();
  for (int cell = t; cell < cells; cell += kThreads) {
    const uint32_t word = rows[cell / 32], bit = 1u << (cell % 32);
    const int before = reinterpret_cast<const int*>(row_ranks)[cell / 32] + __popc(word & (bit - 1));
    if ((word & bit) != 0) cell_of[before] = static_cast<uint16_t>(cell);
  }
  __syncthreads();
  for (int i = t; i < scan.all; i += kThreads) {
    const int4 c = made[i] = cell_at(rule.box, cell_of[i]);
    const auto code = morton<uint32_t>(rule.box, c);
    const int before = reinterpret_cast<const int*>(brick_ranks)[code / 32];
    index_row(code, bricks[code / 32], before, i, c, order, table, capacity);
  }
}

template <class Key>
__global__ void __launch_bounds__(kThreads) rehash(const Key* keys, int64_t count, Key* table, uint32_t capacity) {
  const int64_t step = int64_t(gridDim.x) * kThreads;
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < count; i += step) insert(table, capacity, keys[i]);
}

template <class Key>
__global__ void __launch_bounds__(kThreads) unpack(const Key* keys, const Rows rows, CoordBox box, int4* coords) {
  const int64_t step = int64_t(gridDim.x) * kThreads, count = rows.number();
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < count; i += step) {
    uint64_t key = keys[i];
    int v[4];
#pragma unroll
    for (int a = 3; a >= 0; --a) {
      v[a] = static_cast<int>(key & ((uint64_t{1} << box.bits[a]) - 1)) + box.low[a];
      key >>= box.bits[a];
    }
    coords[i] = make_int4(v[0], v[1], v[2], v[3]);
  }
}

template <class Key>
cudaError_t expand_with(const ExpandArgs& args, cudaStream_t stream) {
  const Rows rows{args.n, args.count, args.begin};
  expand<Key><<<blocks_for(expand_bound(args)), kThreads, 0, stream>>>(
      reinterpret_cast<const int4*>(args.coords), rows, make_rule(args), args.row_bounds, args.bounds,
      static_cast<Key*>(args.table), static_cast<uint32_t>(args.capacity), static_cast<Key*>(args.keys),
      args.count == nullptr ? INT64_MAX : args.room, args.stats);
  return cudaGetLastError();
}

template <class Key>
struct Unpacking {
  Key* sorted = nullptr;
  void* cub = nullptr;
  size_t cub_bytes = 0, total_bytes;
  cudaError_t error;

  Unpacking(void* base, const CoordBox& box, int64_t count) {
    error = sort(nullptr, box, count, cudaStream_t{});
    Carver carve(base);
    sorted = carve.take<Key>(count);
    cub = carve.take<unsigned char>(cub_bytes);
    total_bytes = carve.bytes;
  }
  cudaError_t sort(const Key* keys, const CoordBox& box, int64_t count, cudaStream_t stream) {
    return cub::DeviceRadixSort::SortKeys(keys == nullptr ? nullptr : cub, cub_bytes, keys, sorted,
                                          static_cast<int>(count), 0, std::max(bits_of(box), 1), stream);
  }
};

template <class Key>
cudaError_t unpack_with(const CoordBox& box, const void* keys, int64_t count, const int64_t* made, int* coords,
                        void* workspace, cudaStream_t stream) {
  Unpacking<Key> u(workspace, box, count);
  if (u.error == cudaSuccess) u.error = u.sort(static_cast<const Key*>(keys), box, count, stream);
  if (u.error != cudaSuccess) return u.error;
  const Rows rows{count, made};
  unpack<Key><<<blocks_for(count), kThreads, 0, stream>>>(u.sorted, rows, box, reinterpret_cast<int4*>(coords));
  return cudaGetLastError();
}

bool valid(const ExpandArgs& args) {
  if (args.n < 0) return false;
  for (int a = 0; a < 3; ++a) {
    if (args.size[a] < 1 || args.size[a] > kMaxKernel || args.stride[a] < 1 || args.stride[a] > kMaxStride ||
        args.dilation[a] < 1 || args.shape[a] < 0) {
      return false;
    }
  }
  return expand_bound(args) <= INT_MAX;
}

bool narrow(const CoordBox& box) { return bits_of(box) <= kNarrowBits; }

}  // namespace

size_t key_bytes(const CoordBox& box) { return narrow(box) ? sizeof(uint32_t) : sizeof(uint64_t); }

int64_t expand_bound(const ExpandArgs& args) { return args.n * candidates_of(make_rule(args)); }

int64_t expand_capacity(int64_t keys) { return std::max<int64_t>(keys + keys / 2, 64); }

cudaError_t expand_cells(const ExpandArgs& args, void* workspace, cudaStream_t stream) {
  if (!valid(args) || bits_of(args.box) > kMaxCellBits) return cudaErrorInvalidValue;
  if (args.n == 0 && args.count == nullptr) return cudaSuccess;
  const auto* coords = reinterpret_cast<const int4*>(args.coords);
  const Cells cells(workspace, args.box);
  const Rows rows{args.n, args.count, args.begin};
  mark_candidates<<<blocks_for(expand_bound(args)), kThreads, 0, stream>>>(coords, rows, make_rule(args),
                                                                           args.row_bounds, args.bounds, cells);
  return cudaGetLastError();
}

int64_t few_cells(const ExpandArgs& args) {
  const int64_t candidates = expand_bound(args), cells = int64_t{1} << std::min(bits_of(args.box), 16);
  return candidates <= kFewCandidates && cells <= int64_t{kWordsPerBlock} * 32 ? std::min(candidates, cells) : 0;
}

cudaError_t derive_few_cells(const ExpandArgs& args, int* coords, int* order, Brick* table, int64_t capacity,
                             CellStats* found, cudaStream_t stream) {
  if (!valid(args) || few_cells(args) == 0 || capacity < kBucket || capacity > UINT_MAX) return cudaErrorInvalidValue;
  const Rule rule = make_rule(args);
  derive_few<<<1, kThreads, 0, stream>>>(
      reinterpret_cast<const int4*>(args.coords), static_cast<int>(args.n) * rule.slots.value, rule,
      reinterpret_cast<int4*>(coords), order, table, static_cast<uint32_t>(capacity), found);
  return cudaGetLastError();
}

cudaError_t expand_coords(const ExpandArgs& args, cudaStream_t stream) {
  if (!valid(args) || args.capacity < 1 || args.capacity > UINT_MAX) return cudaErrorInvalidValue;
  if (args.n == 0 && args.count == nullptr) return cudaSuccess;
  return narrow(args.box) ? expand_with<uint32_t>(args, stream) : expand_with<uint64_t>(args, stream);
}

cudaError_t rehash_keys(const CoordBox& box, const void* keys, int64_t count, void* table, int64_t capacity,
                        cudaStream_t stream) {
  if (count < 0 || capacity <= count || capacity > UINT_MAX) return cudaErrorInvalidValue;
  if (count == 0) return cudaSuccess;
  const auto slots = static_cast<uint32_t>(capacity);
  if (narrow(box)) {
    rehash<<<blocks_for(count), kThreads, 0, stream>>>(static_cast<const uint32_t*>(keys), count,
                                                       static_cast<uint32_t*>(table), slots);
  } else {
    rehash<<<blocks_for(count), kThreads, 0, stream>>>(static_cast<const uint64_t*>(keys), count,
                                                       static_cast<uint64_t*>(table), slots);
  }
  return cudaGetLastError();
}

size_t unpack_workspace(const CoordBox& box, int64_t count) {
  return narrow(box) ? Unpacking<uint32_t>(nullptr, box, count).total_bytes
                     : Unpacking<uint64_t>(nullptr, box, count).total_bytes;
}

cudaError_t count_keys(const ExpandStats* stats, int64_t room, CellStats* found, int64_t* made, cudaStream_t stream) {
  tell_found<<<1, 1, 0, stream>>>(stats, room, found, made);
  return cudaGetLastError();
}

cudaError_t unpack_keys(const CoordBox& box, const void* keys, int64_t count, const int64_t* made, int* coords,
                        void* workspace, cudaStream_t stream) {
  if (count < 0 || count > INT_MAX) return cudaErrorInvalidValue;
  if (count == 0) return cudaSuccess;
  return narrow(box) ? unpack_with<uint32_t>(box, keys, count, made, coords, workspace, stream)
                     : unpack_with<uint64_t>(box, keys, count, made, coords, workspace, stream);
}

}  // namespace voxmma
