// Tile plans: one block builds the plan of one tile of kTileM consecutive rows of the Morton order.
#include <climits>

#include "packed_key.cuh"

namespace voxmma {
namespace {

using namespace detail;

constexpr int kThreads = kTileM;  // thread t owns tile row t
constexpr int kWarps = kThreads / 32;
constexpr int kProbes = 4;        // independent hash probes in flight per thread
constexpr int kSetSlots = 2048;   // shared set of unique rows; holds at most kUniqueMax + kTileM = 768
constexpr int kSetShift = 32 - 11;
constexpr int kMaxVolume = 1024;
constexpr int kMaxScale = 4096;   // largest mul and div
// The first two offsets of a pass bring at most 2 * kTileM <= kUniqueMax rows: all but the last pass hold two or more.
constexpr int kMaxPassesOfGroup = kPassOffsets / 2;

static_assert(kSetSlots == 1 << (32 - kSetShift) && kSetSlots >= 2 * (kUniqueMax + kTileM), "set too small");
static_assert(2 * kTileM <= kUniqueMax && kFragRows == 16, "pass and fragment bookkeeping rely on these");

// Dynamic shared memory of a block for kernel volume K.
struct Shared {
  int4* offsets;    // [K] add.xyz, and the bit of the sort key that the offset sets
  int* neighbour;   // [min(K, kPassOffsets)][kTileM] input row or -1; first used for the distances of the offsets
  int* set_row;     // [kSetSlots] input row or -1; first used to sort the rows
  uint16_t* set_index;  // [kSetSlots] its place in `unique`
  int* unique;      // [kUniqueMax]
  Pass* passes;     // [max_passes] staged until their number is known
  uint32_t* frag;   // [max_passes][kFrags]
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
    offsets = reinterpret_cast<int4*>(take(volume, sizeof(int4)));
    neighbour = reinterpret_cast<int*>(take((volume < kPassOffsets ? volume : kPassOffsets) * kTileM, sizeof(int)));
    set_row = reinterpret_cast<int*>(take(kSetSlots, sizeof(int)));
    set_index = reinterpret_cast<uint16_t*>(take(kSetSlots, sizeof(uint16_t)));
    unique = reinterpret_cast<int*>(take(kUniqueMax, sizeof(int)));
    passes = reinterpret_cast<Pass*>(take(max_passes(volume), sizeof(Pass)));
    frag = reinterpret_cast<uint32_t*>(take(max_passes(volume) * kFrags, sizeof(uint32_t)));
    bytes = at;
  }
};

// One axis of a query coordinate, kept while consecutive offsets agree on it (they are usually lexicographic).
struct Axis {
  int add;
  bool ok;
  uint64_t bits;

  __device__ __forceinline__ void set(int coord, int mul, int new_add, int div) {
    add = new_add;
    const int64_t q = int64_t(coord) * mul + new_add;
    ok = uint64_t(q + int64_t{kCoordBias} * div) < uint64_t(div) << kCoordBits;
    int narrow = static_cast<int>(q);  // exact where it matters: |q| < 2^30 when ok
    if (div != 1 && ok) {
      ok = narrow % div == 0;
      narrow /= div;
    }
    bits = spread18(uint32_t(narrow) + kCoordBias);
  }
};

// Calls emit(k, input row or -1) for the offsets k_begin..k_end-1 of the output row at `c`.
template <class Emit>
__device__ __forceinline__ void for_neighbours(const PlanArgs& args, const int4* offsets, int k_begin, int k_end,
                                               int4 c, bool present, const Emit& emit) {
  const uint32_t mask = static_cast<uint32_t>(args.capacity - 1);
  const uint64_t batch = uint64_t(uint32_t(c.x)) << kBatchShift;
  Axis x, y, z;
  const int4 first = offsets[k_begin];
  x.set(c.y, args.mul[0], first.x, args.div[0]);
  y.set(c.z, args.mul[1], first.y, args.div[1]);
  z.set(c.w, args.mul[2], first.z, args.div[2]);
  for (int k0 = k_begin; k0 < k_end; k0 += kProbes) {
    uint64_t key[kProbes], found[kProbes];
    uint32_t slot[kProbes];
    int row[kProbes];
#pragma unroll
    for (int u = 0; u < kProbes; ++u) {
      key[u] = found[u] = kEmptyKey;
      slot[u] = 0;
      if (k0 + u < k_end) {  // all branches but the last are uniform in the block
        const int4 o = offsets[k0 + u];
        if (o.x != x.add) x.set(c.y, args.mul[0], o.x, args.div[0]);
        if (o.y != y.add) y.set(c.z, args.mul[1], o.y, args.div[1]);
        if (o.z != z.add) z.set(c.w, args.mul[2], o.z, args.div[2]);
        if (present && x.ok && y.ok && z.ok) {
          key[u] = batch | (x.bits << 2) | (y.bits << 1) | z.bits;
          slot[u] = home_slot(key[u], mask);
          found[u] = __ldg(args.keys + slot[u]);
        }
      }
    }
#pragma unroll
    for (int u = 0; u < kProbes; ++u) {
      while (found[u] != key[u] && found[u] != kEmptyKey) {
        slot[u] = (slot[u] + kProbeStep) & mask;
        found[u] = __ldg(args.keys + slot[u]);
      }
    }
#pragma unroll
    for (int u = 0; u < kProbes; ++u) row[u] = found[u] == kEmptyKey ? -1 : __ldg(args.rows + slot[u]);
#pragma unroll
    for (int u = 0; u < kProbes; ++u) {
      if (k0 + u < k_end) emit(k0 + u, row[u]);
    }
  }
}

// Loads the offsets and gives each its sort bit: the farther from the centroid, the rarer, the more significant.
__device__ __forceinline__ void rank_offsets(const PlanArgs& args, const Shared& s) {
  const int volume = args.kernel_volume, t = threadIdx.x;
  double* distance = reinterpret_cast<double*>(s.neighbour);  // volume * 8 <= min(volume, 32) * 1024 bytes
  for (int k = t; k < volume; k += kThreads) {
    s.offsets[k] = make_int4(args.add[3 * k], args.add[3 * k + 1], args.add[3 * k + 2], 0);
  }
  __syncthreads();
  if (t < volume) {
    double sx = 0, sy = 0, sz = 0;
    for (int j = 0; j < volume; ++j) {
      const int4 o = s.offsets[j];
      sx += o.x;
      sy += o.y;
      sz += o.z;
    }
    for (int k = t; k < volume; k += kThreads) {
      const int4 o = s.offsets[k];
      const double dx = double(volume) * o.x - sx, dy = double(volume) * o.y - sy, dz = double(volume) * o.z - sz;
      distance[k] = dx * dx + dy * dy + dz * dz;
    }
  }
  __syncthreads();
  const int fold = volume > 32 ? volume : 32;
  for (int k = t; k < volume; k += kThreads) {
    const double mine = distance[k];
    int rank = 0;
    for (int j = 0; j < volume; ++j) rank += distance[j] < mine || (distance[j] == mine && j < k);
    s.offsets[k].w = rank * 32 / fold;
  }
  __syncthreads();
}

// Ascending bitonic sort of one distinct key per thread. `buffer` holds kTileM keys.
__device__ __forceinline__ uint64_t block_sort(uint64_t key, uint64_t* buffer) {
  const unsigned t = threadIdx.x;
#pragma unroll
  for (unsigned size = 2; size <= unsigned(kTileM); size *= 2) {
#pragma unroll
    for (unsigned stride = size / 2; stride > 0; stride /= 2) {
      uint64_t other;
      if (stride >= 32) {
        buffer[t] = key;
        __syncthreads();
        other = buffer[t ^ stride];
        __syncthreads();
      } else {
        other = __shfl_xor_sync(0xffffffffu, key, stride);
      }
      const bool keep_smaller = ((t & size) == 0) == ((t & stride) == 0);
      key = (key < other) == keep_smaller ? key : other;
    }
  }
  return key;
}

// Finds `row` in the shared set or puts it in. Returns its slot; `fresh` tells that this thread put it in.
__device__ __forceinline__ int set_insert(int* set_row, int row, bool& fresh) {
  int slot = static_cast<int>((uint32_t(row) * 2654435769u) >> kSetShift);
  for (;; slot = (slot + 1) & (kSetSlots - 1)) {
    int seen = *static_cast<volatile int*>(set_row + slot);
    if (seen == -1) {
      seen = atomicCAS(set_row + slot, -1, row);
      if (seen == -1) {
        fresh = true;
        return slot;
      }
    }
    if (seen == row) return slot;
  }
}

__device__ __forceinline__ int64_t bump(int64_t* counter, int64_t amount) {
  return static_cast<int64_t>(
      atomicAdd(reinterpret_cast<unsigned long long*>(counter), static_cast<unsigned long long>(amount)));
}

__global__ void __launch_bounds__(kThreads, 4) plan_tiles(const PlanArgs args) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  __shared__ int fresh_count[2][kWarps];  // by parity of the offset: one barrier an offset is enough
  __shared__ int64_t uniq_begin4, first_pass;
  __shared__ int tile_pairs;

  const int volume = args.kernel_volume;
  const Shared s(shared_bytes, volume);
  const int t = threadIdx.x, lane = t % 32, warp = t / 32;
  const int64_t tile = blockIdx.x, tile_row = tile * kTileM;
  const bool one_sweep = volume <= kPassOffsets;
  const auto* out_coords = reinterpret_cast<const int4*>(args.out_coords);

  if (t == 0) tile_pairs = 0;
  rank_offsets(args, s);

  // 1. Neighbours of the rows as they come, and from them the sort key.
  int row = tile_row + t < args.n_out ? args.out_order[tile_row + t] : -1;
  int4 c = row >= 0 ? out_coords[row] : make_int4(0, 0, 0, 0);
  uint32_t sort_bits = 0;
  int pairs = 0;
  for_neighbours(args, s.offsets, 0, volume, c, row >= 0, [&](int k, int input) {
    if (one_sweep) s.neighbour[k * kTileM + t] = input;
    if (input >= 0) {
      sort_bits |= 1u << s.offsets[k].w;
      ++pairs;
    }
  });
  pairs = __reduce_add_sync(0xffffffffu, pairs);
  if (lane == 0) atomicAdd(&tile_pairs, pairs);

  // 2. Sort: rows with many rare offsets first, rows without a neighbour behind them, padding last; then by position.
  const uint64_t sorted = block_sort((uint64_t{row < 0} << 40) | (uint64_t{~sort_bits} << 8) | uint32_t(t),
                                     reinterpret_cast<uint64_t*>(s.set_row));
  int source = static_cast<int>(sorted & 0xff);
  row = tile_row + source < args.n_out ? args.out_order[tile_row + source] : -1;
  args.order[tile_row + t] = row;
  if (!one_sweep) c = row >= 0 ? out_coords[row] : make_int4(0, 0, 0, 0);

  // 3. Passes, group by group.
  uint16_t* local = args.local + tile * volume * kTileM + t;
  int passes = 0;
  for (int group = 0; group < volume; group += kPassOffsets) {
    const int group_end = min(volume, group + kPassOffsets);
    if (!one_sweep) {  // each thread reads back its own column only: no barrier needed
      source = t;
      for_neighbours(args, s.offsets, group, group_end, c, row >= 0,
                     [&](int k, int input) { s.neighbour[(k - group) * kTileM + t] = input; });
    }
    int k = group;
    while (k < group_end) {
      // Every thread is past the barrier after its last use of the set (block_sort's or the end of the last pass).
      for (int i = t; i < kSetSlots; i += kThreads) {
        s.set_row[i] = -1;
        s.set_index[i] = kMissing;
      }
      __syncthreads();
      const int k_begin = k;
      int count = 0;
      uint32_t low_frag = 0, high_frag = 0;
      for (; k < group_end; ++k) {
        const int input = s.neighbour[(k - group) * kTileM + source];
        bool fresh = false;
        int slot = 0;
        if (input >= 0) slot = set_insert(s.set_row, input, fresh);
        const uint32_t fresh_lanes = __ballot_sync(0xffffffffu, fresh);
        const uint32_t lanes = __ballot_sync(0xffffffffu, input >= 0);
        if (lane == 0) fresh_count[k & 1][warp] = __popc(fresh_lanes);
        __syncthreads();
        int before = 0, added = 0;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
          const int n = fresh_count[k & 1][w];
          before += w < warp ? n : 0;
          added += n;
        }
        if (count + added > kUniqueMax) break;  // uniform: offset k opens the next pass
        // Under one offset no two output rows meet the same input row, so a row that is not fresh came with an
        // earlier offset, and a barrier lies between the write of its index and this read.
        int index = kMissing;
        if (fresh) {
          index = count + before + __popc(fresh_lanes & ((1u << lane) - 1u));
          s.set_index[slot] = static_cast<uint16_t>(index);
          s.unique[index] = input;
        } else if (input >= 0) {
          index = s.set_index[slot];
        }
        local[int64_t(k) * kTileM] = static_cast<uint16_t>(index);
        count += added;
        low_frag |= uint32_t((lanes & 0xffffu) != 0) << (k - k_begin);
        high_frag |= uint32_t((lanes >> 16) != 0) << (k - k_begin);
      }
      const int count4 = (count + 3) / 4;
      if (t == 0) uniq_begin4 = bump(&args.stats->uniq4, count4);
      __syncthreads();  // uniq_begin4 and `unique` are complete; nobody uses the set any more
      const int64_t begin4 = uniq_begin4;
      if (begin4 + count4 <= args.uniq4_capacity) {
        for (int i = t; i < 4 * count4; i += kThreads) args.uniq[4 * begin4 + i] = s.unique[min(i, count - 1)];
      }
      if (lane == 0) {
        s.frag[passes * kFrags + 2 * warp] = low_frag;
        s.frag[passes * kFrags + 2 * warp + 1] = high_frag;
      }
      if (t == 0) s.passes[passes] = Pass{k_begin, k - k_begin, static_cast<int>(begin4), count};
      ++passes;
    }
  }

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
  error = cudaFuncSetAttribute(plan_tiles, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  if (error != cudaSuccess) return error;
  plan_tiles<<<static_cast<unsigned>(tiles), kThreads, bytes, stream>>>(args);
  return cudaGetLastError();
}

cudaError_t plan_to_table(const PlanView& plan, int* table, cudaStream_t stream) {
  if (plan.tiles == 0) return cudaSuccess;
  write_table<<<static_cast<unsigned>(plan.tiles), kThreads, 0, stream>>>(plan, table);
  return cudaGetLastError();
}

}  // namespace voxmma
