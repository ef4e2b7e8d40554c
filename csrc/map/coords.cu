// Indexing of a coordinate set: range check, hash table, duplicates, extents and Morton order, without a host sync.
#include <cub/device/device_radix_sort.cuh>

#include <algorithm>
#include <climits>

#include "packed_key.cuh"

namespace voxmma {
namespace {

using namespace detail;

constexpr int kThreads = 256;
constexpr int kMaxBlocks = 2048;  // grid-stride loops beyond
constexpr int64_t kMinCapacity = 64;
constexpr int64_t kSlotsPerRow = 3;  // at least. A warp waits for the longest of its chains: short ones pay
constexpr int kSortBits = 32;
constexpr size_t kAlign = 256;

// Scratch memory behind `workspace`, in this order, each part aligned.
struct Workspace {
  int* has_duplicates;
  uint32_t *key_in, *key_out;
  int* row_in;
  void* cub;
  size_t cub_bytes, total_bytes;
};

size_t aligned(size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

cudaError_t make_workspace(void* base, int64_t n, Workspace* w) {
  w->cub_bytes = 0;
  const cudaError_t error = cub::DeviceRadixSort::SortPairs(
      nullptr, w->cub_bytes, static_cast<const uint32_t*>(nullptr), static_cast<uint32_t*>(nullptr),
      static_cast<const int*>(nullptr), static_cast<int*>(nullptr), static_cast<int>(n), 0, kSortBits, cudaStream_t{});
  auto* p = static_cast<unsigned char*>(base);
  size_t offset = 0;
  auto take = [&](size_t bytes) {
    void* part = base ? p + offset : nullptr;
    offset += aligned(bytes);
    return part;
  };
  w->has_duplicates = static_cast<int*>(take(sizeof(int)));
  w->key_in = static_cast<uint32_t*>(take(size_t(n) * sizeof(uint32_t)));
  w->key_out = static_cast<uint32_t*>(take(size_t(n) * sizeof(uint32_t)));
  w->row_in = static_cast<int*>(take(size_t(n) * sizeof(int)));
  w->cub = take(w->cub_bytes);
  w->total_bytes = offset;
  return error;
}

int blocks_for(int64_t n) {
  return static_cast<int>(std::clamp<int64_t>((n + kThreads - 1) / kThreads, 1, kMaxBlocks));
}

__global__ void __launch_bounds__(kThreads)
init_index(uint64_t* keys, int* rows, int64_t capacity, CoordStats* stats, int* has_duplicates) {
  const int64_t step = int64_t(gridDim.x) * kThreads;
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < capacity / 4; i += step) {  // 4 slots a store
    reinterpret_cast<ulonglong2*>(keys)[2 * i] = make_ulonglong2(kEmptyKey, kEmptyKey);
    reinterpret_cast<ulonglong2*>(keys)[2 * i + 1] = make_ulonglong2(kEmptyKey, kEmptyKey);
    reinterpret_cast<int4*>(rows)[i] = make_int4(INT_MAX, INT_MAX, INT_MAX, INT_MAX);
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    // -1 is also the largest unsigned number, so an unsigned atomicMin finds the smallest row or leaves -1.
    stats->bad_row = stats->duplicate_row = stats->twin_row = -1;
    for (int a = 0; a < 4; ++a) {
      stats->min[a] = INT_MAX;
      stats->max[a] = INT_MIN;
    }
    *has_duplicates = 0;
  }
}

__device__ __forceinline__ void report_smallest(int64_t* row, int64_t candidate) {
  atomicMin(reinterpret_cast<unsigned long long*>(row), static_cast<unsigned long long>(candidate));
}

// Inserts every packable row; the smallest row of equal coordinates stays in `rows`.
__global__ void __launch_bounds__(kThreads)
insert_rows(const int4* coords, int64_t n, uint64_t* keys, int* rows, uint32_t mask, CoordStats* stats,
            int* has_duplicates) {
  int low[4] = {INT_MAX, INT_MAX, INT_MAX, INT_MAX};
  int high[4] = {INT_MIN, INT_MIN, INT_MIN, INT_MIN};
  const int64_t step = int64_t(gridDim.x) * kThreads;
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < n; i += step) {
    const int4 c = coords[i];
    if (!packable(c)) {
      report_smallest(&stats->bad_row, i);
      continue;
    }
    const int v[4] = {c.x, c.y, c.z, c.w};
#pragma unroll
    for (int a = 0; a < 4; ++a) {
      low[a] = min(low[a], v[a]);
      high[a] = max(high[a], v[a]);
    }
    const uint64_t key = pack_key(c);
    uint32_t slot = home_slot(key, mask);
    for (uint32_t step = kProbeStep;; slot = (slot + step) & mask, step += kProbeStep) {
      const uint64_t found = atomicCAS(reinterpret_cast<unsigned long long*>(keys + slot),
                                       static_cast<unsigned long long>(kEmptyKey),
                                       static_cast<unsigned long long>(key));
      if (found == key) *has_duplicates = 1;
      if (found == key || found == kEmptyKey) break;
    }
    atomicMin(rows + slot, static_cast<int>(i));
  }

  __shared__ int warp_low[kThreads / 32][4], warp_high[kThreads / 32][4];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int a = 0; a < 4; ++a) {
    const int lo = __reduce_min_sync(0xffffffffu, low[a]);
    const int hi = __reduce_max_sync(0xffffffffu, high[a]);
    if (lane == 0) {
      warp_low[warp][a] = lo;
      warp_high[warp][a] = hi;
    }
  }
  __syncthreads();
  if (threadIdx.x < 4) {
    const int a = threadIdx.x;
    int lo = INT_MAX, hi = INT_MIN;
    for (int w = 0; w < kThreads / 32; ++w) {
      lo = min(lo, warp_low[w][a]);
      hi = max(hi, warp_high[w][a]);
    }
    if (lo <= hi) {
      atomicMin(&stats->min[a], lo);
      atomicMax(&stats->max[a], hi);
    }
  }
}

// Row that the table holds for a coordinate that was inserted.
__device__ __forceinline__ int winner_row(int4 c, const uint64_t* keys, const int* rows, uint32_t mask) {
  const uint64_t key = pack_key(c);
  uint32_t slot = home_slot(key, mask);
  for (uint32_t step = kProbeStep; keys[slot] != key; step += kProbeStep) slot = (slot + step) & mask;
  return rows[slot];
}

__device__ __forceinline__ int bit_width(uint32_t v) { return 32 - __clz(int(v)); }

// 32-bit Morton sort key over the bits that the extents need, batch above. Where 32 bits are too few the lowest Morton
// levels are dropped: Morton order of coarser cells, and the stable sort keeps the caller's order inside a cell.
__global__ void __launch_bounds__(kThreads)
sort_keys(const int4* coords, int64_t n, const uint64_t* keys, const int* rows, uint32_t mask, CoordStats* stats,
          const int* has_duplicates, uint32_t* key_out, int* row_out) {
  int low[4], bits[4];
#pragma unroll
  for (int a = 0; a < 4; ++a) {
    low[a] = stats->min[a];
    const int high = stats->max[a];
    bits[a] = high > low[a] ? bit_width(uint32_t(high) - uint32_t(low[a])) : 0;  // 0 too when no row is packable
  }
  const int levels = max(bits[1], max(bits[2], bits[3]));
  int dropped = 0;
  while (bits[0] + max(bits[1] - dropped, 0) + max(bits[2] - dropped, 0) + max(bits[3] - dropped, 0) > kSortBits) {
    ++dropped;
  }
  const bool look_for_duplicates = *has_duplicates != 0;
  const int64_t step = int64_t(gridDim.x) * kThreads;
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < n; i += step) {
    const int4 c = coords[i];
    const uint32_t x = uint32_t(c.y) - uint32_t(low[1]);
    const uint32_t y = uint32_t(c.z) - uint32_t(low[2]);
    const uint32_t z = uint32_t(c.w) - uint32_t(low[3]);
    uint32_t key = bits[0] ? uint32_t(c.x) - uint32_t(low[0]) : 0;
    for (int level = levels - 1; level >= dropped; --level) {
      if (level < bits[1]) key = (key << 1) | ((x >> level) & 1u);
      if (level < bits[2]) key = (key << 1) | ((y >> level) & 1u);
      if (level < bits[3]) key = (key << 1) | ((z >> level) & 1u);
    }
    key_out[i] = key;
    row_out[i] = static_cast<int>(i);
    if (look_for_duplicates && packable(c) && winner_row(c, keys, rows, mask) != i) {
      report_smallest(&stats->duplicate_row, i);
    }
  }
}

__global__ void find_twin(const int4* coords, const uint64_t* keys, const int* rows, uint32_t mask,
                          CoordStats* stats) {
  if (stats->duplicate_row >= 0) stats->twin_row = winner_row(coords[stats->duplicate_row], keys, rows, mask);
}

}  // namespace

int64_t hash_capacity(int64_t n) {
  int64_t capacity = kMinCapacity;
  while (capacity < kSlotsPerRow * n) capacity *= 2;
  return capacity;
}

size_t index_workspace(int64_t n) {
  Workspace w;
  make_workspace(nullptr, n, &w);
  return w.total_bytes;
}

cudaError_t index_coords(const IndexArgs& args, cudaStream_t stream) {
  const bool power_of_two = args.capacity >= kMinCapacity && (args.capacity & (args.capacity - 1)) == 0;
  if (args.n < 0 || args.n > INT_MAX || !power_of_two || args.capacity < 2 * args.n ||
      args.capacity > int64_t{1} << 32) {
    return cudaErrorInvalidValue;
  }
  const uint32_t mask = static_cast<uint32_t>(args.capacity - 1);
  const auto* coords = reinterpret_cast<const int4*>(args.coords);
  Workspace w;
  cudaError_t error = make_workspace(args.workspace, args.n, &w);
  if (error != cudaSuccess) return error;

  init_index<<<blocks_for(args.capacity / 4), kThreads, 0, stream>>>(args.keys, args.rows, args.capacity, args.stats,
                                                                 w.has_duplicates);
  if ((error = cudaGetLastError()) != cudaSuccess || args.n == 0) return error;
  insert_rows<<<blocks_for(args.n), kThreads, 0, stream>>>(coords, args.n, args.keys, args.rows, mask, args.stats,
                                                           w.has_duplicates);
  if ((error = cudaGetLastError()) != cudaSuccess) return error;
  sort_keys<<<blocks_for(args.n), kThreads, 0, stream>>>(coords, args.n, args.keys, args.rows, mask, args.stats,
                                                         w.has_duplicates, w.key_in, w.row_in);
  if ((error = cudaGetLastError()) != cudaSuccess) return error;
  error = cub::DeviceRadixSort::SortPairs(w.cub, w.cub_bytes, static_cast<const uint32_t*>(w.key_in), w.key_out,
                                          static_cast<const int*>(w.row_in), args.order, static_cast<int>(args.n), 0,
                                          kSortBits, stream);
  if (error != cudaSuccess) return error;
  find_twin<<<1, 1, 0, stream>>>(coords, args.keys, args.rows, mask, args.stats);
  return cudaGetLastError();
}

}  // namespace voxmma
