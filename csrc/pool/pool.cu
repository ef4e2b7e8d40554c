// Pooling over a tile plan: every output row gathers its inputs, in the order of the offsets. Nothing is scattered, so
// sums repeat bit by bit; gradients are the same kernel over the plan of the opposite direction.
#include <climits>

#include "rows.cuh"
#include "voxmma/pool.h"

namespace voxmma {
namespace {

using namespace detail;

constexpr int kThreads = 256;
constexpr int kBlocksPerSm = 4;
constexpr int kChunk = 32;  // offsets staged at a time: one bit each in a row's mask
constexpr int kMaxVolume = 1024;

// A row of a plan's table in one access.
template <class Row>
__device__ __forceinline__ Row load_row(const Row* table, int64_t i) {
  static_assert(sizeof(Row) == sizeof(int4));
  const int4 v = __ldg(reinterpret_cast<const int4*>(table) + i);
  return {v.x, v.y, v.z, v.w};
}

// What a block stages for `rows` consecutive rows of a tile and up to kChunk offsets.
struct Stage {
  int64_t* base;   // [kChunk] where the unique rows of the offset's pass begin in `uniq`
  int* out;        // [rows] the caller's row, -1 for padding of the last tile
  uint32_t* mask;  // [rows] offsets under which the row has an input
  int* input;      // [offsets][rows] that input; undefined where the mask says there is none

  __device__ Stage(unsigned char* bytes, int rows)
      : base(reinterpret_cast<int64_t*>(bytes)),
        out(reinterpret_cast<int*>(base + kChunk)),
        mask(reinterpret_cast<uint32_t*>(out + rows)),
        input(reinterpret_cast<int*>(mask + rows)) {}

  static size_t bytes(int rows, int volume) {
    const size_t offsets = volume < kChunk ? volume : kChunk;
    return kChunk * sizeof(int64_t) + rows * (sizeof(int) + sizeof(uint32_t)) + offsets * rows * sizeof(int);
  }

  // Offsets first..first + count - 1 of the call for the tile's rows row0 ... All threads of the block take part.
  __device__ __forceinline__ void fill(const PlanView& plan, bool mirror, const ScheduledTile& tile, int row0,
                                       int log_rows, int first, int count) const {
    const int t = threadIdx.x, rows = 1 << log_rows, volume = plan.kernel_volume;
    const int r = t & (rows - 1);  // rows divides the number of threads
    const uint16_t* local = plan.local + int64_t{tile.tile} * volume * kTileM + row0 + r;
    __syncthreads();  // what was staged before has been read
    if (t < rows) {
      mask[t] = 0;
      out[t] = __ldg(plan.order + int64_t{tile.tile} * kTileM + row0 + t);
    }
#pragma unroll 4
    for (int i = t; i < count << log_rows; i += kThreads) {
      const int k = first + (i >> log_rows);
      input[i] = local[(mirror ? volume - 1 - k : k) * kTileM];
    }
    for (int i = t; i < tile.passes * kPassOffsets; i += kThreads) {
      const Pass pass = load_row(plan.passes, tile.first_pass + i / kPassOffsets);
      const int k = pass.k_begin + i % kPassOffsets, at = (mirror ? volume - 1 - k : k) - first;
      if (i % kPassOffsets < pass.k_count && at >= 0 && at < count) base[at] = 4 * int64_t{pass.uniq_begin4};
    }
    __syncthreads();
    uint32_t present = 0;
#pragma unroll 4
    for (int i = t; i < count << log_rows; i += kThreads) {
      const int at = i >> log_rows, index = input[i];
      if (index < kMissing) {
        input[i] = __ldg(plan.uniq + base[at] + index);
        present |= 1u << at;
      }
    }
    if (present != 0) atomicOr(mask + r, present);
    __syncthreads();
  }
};

enum class Mode { sum, sum_divided, max, min, pick, put };

constexpr bool is_sum(Mode m) { return m == Mode::sum || m == Mode::sum_divided; }
constexpr bool is_extreme(Mode m) { return m == Mode::max || m == Mode::min; }

// A thread makes kBytes of a row of y. W: type of `winner`.
template <Mode mode, class T, class W, int kBytes>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm) pool_rows(const PoolArgs args, int log_rows) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  constexpr int n = kBytes / int(sizeof(T));
  constexpr int kFlight = mode == Mode::sum || is_extreme(mode) ? 4 : 2;  // input rows a thread has on their way
  using A = SumOf<T>;
  const PlanView& plan = args.plan;
  const int rows = 1 << log_rows, volume = plan.kernel_volume, chunks = (volume + kChunk - 1) / kChunk;
  const ScheduledTile tile = load_row(plan.schedule + plan.tiles, blockIdx.x >> (kLogTile - log_rows));  // Morton order
  const int row0 = static_cast<int>(blockIdx.x << log_rows) & (kTileM - 1);
  const Stage stage(shared_bytes, rows);
  const T* x = static_cast<const T*>(args.x);
  const int vecs = static_cast<int>(args.channels) / n;

  for (int first_item = 0; first_item < rows * vecs; first_item += kThreads) {
    const int item = first_item + threadIdx.x, r = item / vecs, column = (item - r * vecs) * n;
    int out = -1;  // also beyond the block's rows
    A sum[n] = {};
    Extreme<mode == Mode::max, T, n> extreme(volume);
    Piece<W, n> chosen;
    bool any = false;
    for (int chunk = 0; chunk < chunks; ++chunk) {
      const int first = chunk * kChunk;
      if (chunks > 1 || first_item == 0) {
        stage.fill(plan, args.mirror, tile, row0, log_rows, first, min(volume - first, kChunk));
      }
      out = item < rows * vecs ? stage.out[r] : -1;
      if (out < 0) continue;
      if constexpr (mode == Mode::pick) {
        if (chunk == 0) chosen.load(static_cast<const W*>(args.winner) + out * args.channels + column);
      }
      for (uint32_t rest = stage.mask[r]; rest != 0;) {
        Piece<T, n> value[kFlight];
        Piece<W, n> winner[kFlight];
        int offset[kFlight], count[kFlight];
#pragma unroll
        for (int u = 0; u < kFlight; ++u) {
          offset[u] = -1;
          if (rest == 0) continue;
          const int bit = __ffs(rest) - 1;
          rest &= rest - 1;
          offset[u] = first + bit;
          const int64_t in = stage.input[(bit << log_rows) + r];
          value[u].load(x + in * args.ldx + column);
          if constexpr (mode == Mode::put) {
            winner[u].load(static_cast<const W*>(args.winner) + in * args.channels + column);
          }
          if constexpr (mode == Mode::sum_divided) count[u] = __ldg(args.in_count + in);
        }
#pragma unroll
        for (int u = 0; u < kFlight; ++u) {
          if (offset[u] < 0) continue;
          if constexpr (is_extreme(mode)) {
            extreme.offer(value[u], offset[u], !any);
          } else {
            const A divisor = mode == Mode::sum_divided ? A(max(count[u], 1)) : A(1);
#pragma unroll
            for (int i = 0; i < n; ++i) {
              const A v = value[u][i];
              if constexpr (mode == Mode::sum) sum[i] += v;
              if constexpr (mode == Mode::sum_divided) sum[i] += v / divisor;
              if constexpr (mode == Mode::put) sum[i] += winner[u][i] == offset[u] ? v : A(0);
              if constexpr (mode == Mode::pick) sum[i] = chosen[i] == offset[u] ? v : sum[i];
            }
          }
          any = true;
        }
      }
    }
    if (out < 0) continue;
    const int64_t at = out * args.channels + column;
    T* y = static_cast<T*>(args.y) + at;
    if constexpr (is_extreme(mode)) {
      extreme.store(y);
      if (args.winner != nullptr) extreme.store_numbers(static_cast<W*>(args.winner) + at);
    } else {
      if (is_sum(mode) && args.out_count != nullptr) {
        const A count = A(max(__ldg(args.out_count + out), 1));
#pragma unroll
        for (int i = 0; i < n; ++i) sum[i] /= count;
      }
      Piece<T, n> made;
      made.set(sum);
      made.store(y);
    }
  }
}

__global__ void __launch_bounds__(kTileM) count_inputs(const PlanView plan, int* counts) {
  const int64_t tile = blockIdx.x;
  const int row = plan.order[tile * kTileM + threadIdx.x];
  const uint16_t* local = plan.local + tile * plan.kernel_volume * kTileM + threadIdx.x;
  int count = 0;
#pragma unroll 8
  for (int k = 0; k < plan.kernel_volume; ++k) count += local[k * kTileM] < kMissing;
  if (row >= 0) counts[row] = count;
}

template <Mode mode, class T, class W>
cudaError_t launch(const PoolArgs& args, cudaStream_t stream) {
  const bool vector = is_aligned(args.x, args.ldx * sizeof(T)) && is_aligned(args.y, args.channels * sizeof(T)) &&
                      is_aligned(args.winner, 0);
  const int64_t vecs = vector ? args.channels * int64_t{sizeof(T)} / 16 : args.channels;
  // Rows of a block: two rounds of its threads, or up to eight where that leaves three waves of blocks. Staging waits
  // for memory three times over, and where rows have one input each (507k rows of 64 channels) that is half of it.
  const int64_t enough = 3 * int64_t{kBlocksPerSm} * args.sm_count;
  int log_rows = 5;
  while (log_rows < kLogTile &&
         (vecs << log_rows < 2 * kThreads ||
          (vecs << log_rows < 8 * kThreads && int64_t{args.plan.tiles} << (kLogTile - log_rows - 1) >= enough))) {
    ++log_rows;
  }
  const int64_t blocks = int64_t{args.plan.tiles} << (kLogTile - log_rows);
  if (blocks > INT_MAX || vecs << log_rows > INT_MAX / 2) return cudaErrorInvalidValue;
  const size_t bytes = Stage::bytes(1 << log_rows, args.plan.kernel_volume);
  const auto kernel = vector ? pool_rows<mode, T, W, 16> : pool_rows<mode, T, W, int(sizeof(T))>;
  kernel<<<static_cast<unsigned>(blocks), kThreads, bytes, stream>>>(args, log_rows);
  return cudaGetLastError();
}

template <class T, class W>
cudaError_t launch_winner(const PoolArgs& args, cudaStream_t stream) {
  switch (args.op) {
    case PoolOp::max: return launch<Mode::max, T, W>(args, stream);
    case PoolOp::min: return launch<Mode::min, T, W>(args, stream);
    case PoolOp::pick: return launch<Mode::pick, T, W>(args, stream);
    default: return launch<Mode::put, T, W>(args, stream);
  }
}

template <class T>
cudaError_t launch_typed(const PoolArgs& args, cudaStream_t stream) {
  if (args.op == PoolOp::sum) {
    return args.in_count != nullptr ? launch<Mode::sum_divided, T, uint8_t>(args, stream)
                                    : launch<Mode::sum, T, uint8_t>(args, stream);
  }
  return winner_bytes(args.plan.kernel_volume) == 1 ? launch_winner<T, uint8_t>(args, stream)
                                                    : launch_winner<T, uint16_t>(args, stream);
}

}  // namespace

cudaError_t pool(const PoolArgs& args, cudaStream_t stream) {
  const int volume = args.plan.kernel_volume;
  if (volume < 1 || volume > kMaxVolume || args.channels < 0 || args.ldx < 0) return cudaErrorInvalidValue;
  if (args.plan.tiles == 0 || args.channels == 0) return cudaSuccess;
  return with_dtype(args.dtype, [&](auto of) { return launch_typed<typename decltype(of)::type>(args, stream); });
}

cudaError_t neighbor_counts(const PlanView& plan, int* counts, cudaStream_t stream) {
  if (plan.tiles == 0) return cudaSuccess;
  count_inputs<<<static_cast<unsigned>(plan.tiles), kTileM, 0, stream>>>(plan, counts);
  return cudaGetLastError();
}

}  // namespace voxmma
