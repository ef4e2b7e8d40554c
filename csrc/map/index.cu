// Order and index of rows without a sort: a bitmap in Morton order of which only words in
// use have memory. An upper bitmap has a bit for each of its words.
#include <algorithm>
#include <climits>
#include <cstddef>

#include "bricks.cuh"
#include "cells.cuh"
#include "grid.cuh"
#include "measure.cuh"
#include "scan.cuh"

namespace voxmma {
namespace {

using namespace detail;

constexpr int kMaxIndexBits = 32;                // an upper bitmap of 16 MiB
constexpr int64_t kMaxIndexRows = INT_MAX / 32;  // a place is a number
constexpr int kMeasureBlocks = 256;              // every block of mark_upper reads what they found

// What is told of the rows, in device memory.
struct Told {
  int* bounds;  // [8] smallest and largest coordinates
  SizedStats* sized;
  SurveyStats* survey;  // one of the two
};

struct Counters {
  unsigned upper_blocks, lower_blocks;  // that have begun to scan
  int words, cells;                     // in use
  int spare;                            // rows that are bad or repeat others, as far as they have a rank
};

struct Found {  // by a block of survey
  int low[4], high[4];
  int bad;  // smallest bad row, INT_MAX: none
};

struct Index {
  uint32_t *upper, *lower;                    // bits; a lower word for each set bit of `upper`, at most as many as rows
  int *upper_rank, *lower_rank;               // set bits before a word that is not zero
  unsigned long long *upper_sum, *lower_sum;  // of the blocks that scan; see sum_before
  int* place;                                 // [n] of every row: lower word * 32 + bit; -1 for bad rows
  Found* found;
  Counters* counters;
  int64_t upper_words, lower_words;
  int box_bits;  // most that a box may have
  size_t total_bytes;

  Index() = default;
  __host__ Index(void* base, int box_bits_, int64_t n) : box_bits(box_bits_) {
    const auto whole = [](int64_t words) { return (words + kScanWords - 1) / kScanWords * kScanWords; };
    upper_words = whole(box_bits > 10 ? int64_t{1} << (box_bits - 10) : 1);
    lower_words = whole(std::max<int64_t>(n, 1));
    Carver carve(base);
    upper = carve.take<uint32_t>(upper_words);
    lower = carve.take<uint32_t>(lower_words);
    upper_sum = carve.take<unsigned long long>(upper_words / kScanWords);
    lower_sum = carve.take<unsigned long long>(lower_words / kScanWords);
    upper_rank = carve.take<int>(upper_words);
    lower_rank = carve.take<int>(lower_words);
    place = carve.take<int>(n);
    found = carve.take<Found>(kMeasureBlocks);
    counters = carve.take<Counters>(1);
    total_bytes = carve.bytes;
  }
};

template <class T>
__device__ __forceinline__ void fill(T* to, int64_t count, const T& value) {
  const int64_t step = int64_t(gridDim.x) * kThreads;
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < count; i += step) to[i] = value;
}

// Clears everything, and measures the rows block by block.
__global__ void __launch_bounds__(kThreads)
    survey(const Index index, const __grid_constant__ OrderArgs args, const __grid_constant__ Range range, uint4* table,
           int64_t capacity) {
  fill(reinterpret_cast<uint4*>(index.upper), index.upper_words / 4, make_uint4(0, 0, 0, 0));
  fill(reinterpret_cast<uint4*>(index.lower), index.lower_words / 4, make_uint4(0, 0, 0, 0));
  fill(index.upper_sum, index.upper_words / kScanWords, 0ull);
  fill(index.lower_sum, index.lower_words / kScanWords, 0ull);
  if (table != nullptr) {
    fill(args.order, args.n, -1);
    fill(table, capacity, make_uint4(~0u, kNoBrick, ~0u, ~0u));
  }
  const Extents mine = measure_block(reinterpret_cast<const int4*>(args.coords), Rows{args.n, args.count}, range);
  Found& found = index.found[blockIdx.x];
  if (threadIdx.x < 4) {
    found.low[threadIdx.x] = mine.low;
    found.high[threadIdx.x] = mine.high;
  }
  if (threadIdx.x == 0) found.bad = mine.bad;
  if (threadIdx.x == 0 && blockIdx.x == 0) *index.counters = Counters{};
}

// What all blocks of survey found. By the whole block.
__device__ __forceinline__ void join_found(const Index& index, int blocks, Found* all) {
  const int t = threadIdx.x;
  if (t == 0) {
    init_bounds(all->low);
    all->bad = INT_MAX;
  }
  __syncthreads();
  static_assert(kMeasureBlocks == kThreads && offsetof(Found, high) == 4 * sizeof(int), "a thread a block");
  const bool any = t < blocks;
#pragma unroll
  for (int a = 0; a < 4; ++a) {
    const int low = __reduce_min_sync(0xffffffffu, any ? index.found[t].low[a] : INT_MAX);
    const int high = __reduce_max_sync(0xffffffffu, any ? index.found[t].high[a] : INT_MIN);
    if (t % 32 == 0) {
      atomicMin(all->low + a, low);
      atomicMax(all->high + a, high);
    }
  }
  const int bad = __reduce_min_sync(0xffffffffu, any ? index.found[t].bad : INT_MAX);
  if (t % 32 == 0) atomicMin(&all->bad, bad);
  __syncthreads();
}

// Sets the upper bits, if there is one for each word, and tells what survey found.
__global__ void __launch_bounds__(kThreads)
    mark_upper(const Index index, const __grid_constant__ OrderArgs args, const __grid_constant__ Range range,
               int blocks, const Told told) {
  __shared__ Found all;
  join_found(index, blocks, &all);
  if (blockIdx.x == 0 && threadIdx.x < 4) {
    told.bounds[threadIdx.x] = all.low[threadIdx.x];
    told.bounds[4 + threadIdx.x] = all.high[threadIdx.x];
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    const int64_t bad = all.bad == INT_MAX ? -1 : all.bad;
    if (told.sized != nullptr) {
      *told.sized = {*args.count, bad, -1, 0};
    } else {
      told.survey->coords.bad_row = bad;
      told.survey->coords.duplicate = -1;
      told.survey->coords.bricks = 0;
      told.survey->cells = CellStats{};
    }
  }
  const CoordBox box = whole_bricks(make_box(all.low, all.high));
  if (total_bits(box) > index.box_bits) return;
  const int64_t step = int64_t(gridDim.x) * kThreads, n = Rows{args.n, args.count}.number();
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < n; i += step) {
    const int4 c = reinterpret_cast<const int4*>(args.coords)[i];
    if (!range.has(c)) {
      index.place[i] = -1;
      continue;
    }
    const auto code = morton<uint32_t>(box, c);
    index.place[i] = static_cast<int>(code);
    uint32_t* word = index.upper + (code >> 10);
    const uint32_t bit = 1u << (code >> 5 & 31);
    if ((*static_cast<volatile uint32_t*>(word) & bit) == 0) atomicOr(word, bit);
  }
}

// Ranks of `words` words, in blocks that take their turn by `begun`, and their set bits in `total`. Returns the turn.
__device__ __forceinline__ int rank_words(const uint32_t* bits, int* ranks, unsigned long long* sums, unsigned* begun,
                                          int64_t words, int* total) {
  const int turn = take_turn(begun), t = threadIdx.x;
  if (int64_t{turn} * kScanWords >= words) return turn;
  const Scan scan = scan_words(bits, turn);
  const int before = sum_before(sums, turn, scan.all);
  if (scan.mine != 0) reinterpret_cast<int4*>(ranks)[int64_t{turn} * kThreads + t] = ranks_of(scan, before);
  if (t == 0 && int64_t{turn + 1} * kScanWords >= words) *total = before + scan.all;
  return turn;
}

__global__ void __launch_bounds__(kThreads) rank_upper(const Index index, const Told told) {
  const int bits = total_bits(whole_bricks(make_box(told.bounds, told.bounds + 4)));
  if (bits > index.box_bits) return;
  rank_words(index.upper, index.upper_rank, index.upper_sum, &index.counters->upper_blocks,
             bits > 10 ? int64_t{1} << (bits - 10) : 1, &index.counters->words);
}

__global__ void __launch_bounds__(kThreads) rank_lower(const Index index, const Told told) {
  __shared__ int bricks;
  const int words = index.counters->words;
  const int turn = rank_words(index.lower, index.lower_rank, index.lower_sum, &index.counters->lower_blocks, words,
                              &index.counters->cells);
  if (told.survey == nullptr || int64_t{turn} * kScanWords >= words) return;
  if (threadIdx.x == 0) bricks = 0;
  __syncthreads();
  const uint4 four = reinterpret_cast<const uint4*>(index.lower)[int64_t{turn} * kThreads + threadIdx.x];
  const int mine = bricks_of(four.x) + bricks_of(four.y) + bricks_of(four.z) + bricks_of(four.w);
  const int warp_bricks = __reduce_add_sync(0xffffffffu, mine);
  if (threadIdx.x % 32 == 0 && warp_bricks != 0) atomicAdd(&bricks, warp_bricks);
  __syncthreads();
  if (threadIdx.x != 0) return;
  atomicAdd(reinterpret_cast<unsigned long long*>(&told.survey->cells.bricks), static_cast<unsigned long long>(bricks));
  if (int64_t{turn + 1} * kScanWords >= words) told.survey->cells.count = index.counters->cells;
}

__device__ __forceinline__ uint32_t below(uint32_t word, int bit) { return word & ((1u << bit) - 1); }

// Sets the lower bits.
__global__ void __launch_bounds__(kThreads)
    mark_lower(const Index index, const __grid_constant__ OrderArgs args, const __grid_constant__ Range range) {
  if (index.counters->words == 0) return;
  const int64_t step = int64_t(gridDim.x) * kThreads, n = Rows{args.n, args.count}.number();
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < n; i += step) {
    const auto code = static_cast<uint32_t>(index.place[i]);
    if (!range.has(reinterpret_cast<const int4*>(args.coords)[i])) continue;
    const int word = index.upper_rank[code >> 10] + __popc(below(index.upper[code >> 10], code >> 5 & 31));
    atomicOr(index.lower + word, 1u << (code & 31));
    index.place[i] = word * 32 + static_cast<int>(code & 31);
  }
}

__device__ __forceinline__ int rank_of(const Index& index, int place) {
  return index.lower_rank[place / 32] + __popc(below(index.lower[place / 32], place % 32));
}

// Order and bricks. Of rows of one place the first has the rank; where there are none, the order need not be empty before.
template <bool kDistinct>
__global__ void __launch_bounds__(kThreads)
    place_rows(const Index index, const __grid_constant__ OrderArgs args, Brick* table, uint32_t capacity) {
  const int64_t step = int64_t(gridDim.x) * kThreads, n = Rows{args.n, args.count}.number();
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < n; i += step) {
    const int place = index.place[i];
    if (place == -1) continue;
    const uint32_t word = index.lower[place / 32], mask = word >> (place & 24) & 0xff;
    const int rank = index.lower_rank[place / 32] + __popc(below(word, place % 32));
    bool first = true;
    if (kDistinct) {
      args.order[rank] = static_cast<int>(i);
    } else {
      first = atomicMin(reinterpret_cast<unsigned*>(args.order) + rank, static_cast<unsigned>(i)) == ~0u;
    }
    if (first && below(mask, place & 7) == 0) {
      insert_brick(table, capacity, brick_key(reinterpret_cast<const int4*>(args.coords)[i]), rank, mask);
    }
  }
}

// Reports rows that repeat others, and puts these and bad ones behind all others.
__global__ void __launch_bounds__(kThreads) find_repeats(const Index index, const __grid_constant__ OrderArgs args) {
  const int64_t step = int64_t(gridDim.x) * kThreads, n = Rows{args.n, args.count}.number();
  if (index.counters->cells == n) return;
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < n; i += step) {
    const int place = index.place[i];
    if (place != -1) {
      const int first = args.order[rank_of(index, place)];
      if (first == i) continue;
      report_smallest(&args.sized->duplicate, i << 32 | first);
    }
    args.order[index.counters->cells + atomicAdd(&index.counters->spare, 1)] = static_cast<int>(i);
  }
}

bool has_bitmaps(const CoordBox& box, int64_t n) { return total_bits(box) <= kMaxIndexBits && n <= kMaxIndexRows; }

// Rows to bitmaps, and ranks of their words.
cudaError_t make_bitmaps(const Index& index, const OrderArgs& args, const Told& told, Brick* table, int64_t capacity,
                         cudaStream_t stream) {
  const Range range(args);
  const int blocks = blocks_for(args.n);
  const int measured = std::min(blocks_for(std::max(args.n, index.upper_words / 4)), kMeasureBlocks);
  const auto scan_blocks = [](int64_t words) { return static_cast<unsigned>(words / kScanWords); };
  auto* const slots = reinterpret_cast<uint4*>(table);
  survey<<<measured, kThreads, 0, stream>>>(index, args, range, slots, capacity);
  cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  mark_upper<<<blocks, kThreads, 0, stream>>>(index, args, range, measured, told);
  if ((error = cudaGetLastError()) != cudaSuccess) return error;
  rank_upper<<<scan_blocks(index.upper_words), kThreads, 0, stream>>>(index, told);
  if ((error = cudaGetLastError()) != cudaSuccess) return error;
  mark_lower<<<blocks, kThreads, 0, stream>>>(index, args, range);
  if ((error = cudaGetLastError()) != cudaSuccess) return error;
  rank_lower<<<scan_blocks(index.lower_words), kThreads, 0, stream>>>(index, told);
  return cudaGetLastError();
}

// Of rows that the host knows the number of, and nothing else: few do not clear 16 MiB.
Index survey_index(void* workspace, int64_t n) { return {workspace, n >= 1 << 16 ? kMaxIndexBits : 30, n}; }

OrderArgs survey_args(const int* coords, int64_t n) {
  OrderArgs args{};
  args.coords = coords;
  args.n = n;
  return args;
}

}  // namespace

size_t index_workspace(const CoordBox& box, int64_t n) {
  return has_bitmaps(box, n) ? Index(nullptr, total_bits(box), n).total_bytes : order_workspace(n);
}

cudaError_t index_coords(const OrderArgs& args, Brick* table, int64_t capacity, cudaStream_t stream) {
  if (args.sized == nullptr || args.n < 0 || capacity < kBucket || capacity > UINT_MAX) return cudaErrorInvalidValue;
  if (!has_bitmaps(args.box, args.n)) {
    const cudaError_t error = order_coords(args, stream);
    return error != cudaSuccess ? error
                                : build_bricks(args.coords, args.order, args.n, args.count, table, capacity, stream);
  }
  const Index index(args.workspace, total_bits(args.box), args.n);
  cudaError_t error = make_bitmaps(index, args, {args.bounds, args.sized, nullptr}, table, capacity, stream);
  if (error != cudaSuccess) return error;
  const int blocks = blocks_for(args.n);
  place_rows<false><<<blocks, kThreads, 0, stream>>>(index, args, table, static_cast<uint32_t>(capacity));
  if ((error = cudaGetLastError()) != cudaSuccess) return error;
  find_repeats<<<blocks, kThreads, 0, stream>>>(index, args);
  return cudaGetLastError();
}

size_t survey_workspace(int64_t n) { return survey_index(nullptr, std::min(n, kMaxIndexRows)).total_bytes; }

cudaError_t survey_coords(const int* coords, int64_t n, SurveyStats* stats, void* workspace, cudaStream_t stream) {
  if (n < 0 || n > INT_MAX) return cudaErrorInvalidValue;
  const Told told{stats->coords.min, nullptr, stats};
  OrderArgs args = survey_args(coords, n);
  if (n > kMaxIndexRows) return measure_coords(coords, n, &stats->coords, &stats->cells, stream);
  return make_bitmaps(survey_index(workspace, n), args, told, nullptr, 0, stream);
}

bool survey_holds(const SurveyStats& stats, int64_t n) {
  const CoordBox box = cell_box(box_around(stats.coords.min, stats.coords.max));
  return stats.coords.bad_row == -1 && n <= kMaxIndexRows && bits_of(box) <= survey_index(nullptr, n).box_bits &&
         stats.cells.count == n;
}

cudaError_t index_survey(const SurveyStats& stats, const int* coords, int64_t n, void* workspace, int* order,
                         Brick* table, int64_t capacity, cudaStream_t stream) {
  if (!survey_holds(stats, n) || capacity < kBucket || capacity > UINT_MAX) return cudaErrorInvalidValue;
  const cudaError_t error = set_bytes(table, 0xff, size_t(capacity) * sizeof(Brick), stream);
  if (error != cudaSuccess || n == 0) return error;
  OrderArgs args = survey_args(coords, n);
  args.order = order;
  const auto slots = static_cast<uint32_t>(capacity);
  place_rows<true><<<blocks_for(n), kThreads, 0, stream>>>(survey_index(workspace, n), args, table, slots);
  return cudaGetLastError();
}

}  // namespace voxmma
