// Tile plans: one block builds the plan of one tile of kTileM consecutive rows of the Morton order.
#include <algorithm>
#include <climits>
#include <vector>

#include "../common/cluster.cuh"
#include "../conv/common.cuh"
#include "plan_tile.cuh"

namespace voxmma {
namespace {

using namespace detail;

// Blocks of an SM, and hash probes in flight per thread: of maps with enough tiles to fill the device, of several maps
// together, and of small ones, which wait for memory.
constexpr int kManyBlocks = 5, kTogetherBlocks = 4, kManyProbes = 2;
constexpr int kFewBlocks = 2, kFewProbes = 4;

template <int kBlocks, int kProbes, class B>
__global__ void __launch_bounds__(kThreads, kBlocks) make_tiles(const __grid_constant__ B batch) {
  __shared__ BlockShared block;
  int tile, rank;
  const auto& plan = batch.of_block(&tile, &rank);
  if (plan.divide) {
    plan_tile<true, kProbes>(plan, block, tile, rank);
  } else {
    plan_tile<false, kProbes>(plan, block, tile, rank);
  }
}

struct RankBatch {
  unsigned end[Batch::kMost];
  Ranking plan[Batch::kMost];
};

__global__ void __launch_bounds__(kThreads) rank_tiles(const __grid_constant__ RankBatch batch) {
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
  if (args.n_out < 0 || args.n_out > INT_MAX - kTileM || args.capacity < kBucket || args.capacity > UINT_MAX ||
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

// Clears the statistics that nobody else does.
cudaError_t clear(const PlanArgs* const* args, int count, cudaStream_t stream) {
  StatsBatch stats{};
  int plans = 0;
  for (int i = 0; i < count; ++i) {
    if (args[i]->n_out == 0 || !only_tile(*args[i])) stats.stats[plans++] = args[i]->stats;
  }
  if (plans == 0) return cudaSuccess;
  clear_stats<<<1, 32, 0, stream>>>(stats, plans);
  return cudaGetLastError();
}

// Launches the ranking of plans that are not ranked in place.
cudaError_t rank(const PlanArgs* const* args, int count, cudaStream_t stream) {
  RankBatch ranks{};
  unsigned blocks = 0;
  int plans = 0;
  for (int i = 0; i < count; ++i) {
    const PlanArgs& plan = *args[i];
    if (ranked_in_place(plan)) continue;
    const auto blocks_of = [&](int64_t used) {
      const int window = window_of(static_cast<int>(used), plan.sm_count);
      return static_cast<unsigned>((used + window - 1) / window * ((window + 31) / 32));
    };
    const int64_t tiles = tiles_of(plan);
    unsigned most = blocks_of(tiles);
    if (plan.out_count != nullptr) most = std::max(most, blocks_of(std::min<int64_t>(tiles, 4 * plan.sm_count)));
    ranks.plan[plans] = {plan.schedule, plan.compact ? 0 : static_cast<int>(tiles), plan.sm_count,
                         Rows{plan.n_out, plan.out_count}};
    ranks.end[plans++] = blocks += most;
  }
  if (plans == 0) return cudaSuccess;
  rank_tiles<<<blocks, kThreads, 0, stream>>>(ranks);
  return cudaGetLastError();
}

// Up to Batch::kMost plans that have tiles.
template <int kSize, int kPlans>
cudaError_t make(const PlanArgs* const* args, int count, cudaStream_t stream) {
  using B = BatchOf<kSize, kPlans>;
  constexpr int kBlocks = kPlans > 1 ? kTogetherBlocks : kManyBlocks;
  B batch{};
  size_t bytes = 0;
  unsigned blocks = 0;
  bool clusters = false;
  cudaError_t error = cudaSuccess;
  if (splits(*args[0])) error = has_clusters(make_tiles<kBlocks, kManyProbes, B>, &clusters);
  if (error != cudaSuccess) return error;
  for (int i = 0; i < count; ++i) {
    const bool split = clusters && splits(*args[i]);
    batch.plan[i] = make_params<kSize>(*args[i], split);
    batch.end[i] = blocks += static_cast<unsigned>(tiles_of(*args[i])) * (split ? kGroupBlocks : 1);
    bytes = std::max(bytes, Shared(nullptr, batch.plan[i].volume).bytes);
  }
  const bool few = blocks <= static_cast<unsigned>(kFewBlocks * args[0]->sm_count);
  const auto kernel = few ? make_tiles<kFewBlocks, kFewProbes, B> : make_tiles<kBlocks, kManyProbes, B>;
  // As much as any plan of the kernel takes, so that threads that make different ones do not lower it for each other.
  error = allow_shared(reinterpret_cast<const void*>(kernel), Shared(nullptr, kSize * kSize * kSize).bytes);
  if (error == cudaSuccess) error = clear(args, count, stream);
  if (error != cudaSuccess) return error;
  const unsigned together = clusters ? kGroupBlocks : 1, grid = (blocks + together - 1) / together * together;
  batch.end[count - 1] = grid;  // blocks too many find no tile
  error = launch_clusters(kernel, together, grid, kThreads, bytes, stream, batch);
  return error == cudaSuccess ? rank(args, count, stream) : error;
}

}  // namespace

cudaError_t build_plan(const PlanArgs& args, cudaStream_t stream) { return build_plans(&args, 1, stream); }

cudaError_t build_plans(const PlanArgs* args, int count, cudaStream_t stream) {
  std::vector<const PlanArgs*> together;
  for (int i = 0; i < count; ++i) {
    if (!valid(args[i])) return cudaErrorInvalidValue;
    const PlanArgs* plan = args + i;
    cudaError_t error = cudaSuccess;
    if (plan->n_out == 0) {
      error = clear(&plan, 1, stream);
    } else if (*std::max_element(plan->size, plan->size + 3) <= kSmallKernel) {
      together.push_back(plan);
    } else {
      error = make<kMaxKernel, 1>(&plan, 1, stream);
    }
    if (error != cudaSuccess) return error;
  }
  // Tiles of many offsets take the longest, so they start first; before them those of several blocks, which are clusters.
  std::stable_sort(together.begin(), together.end(), [](const PlanArgs* a, const PlanArgs* b) {
    return std::make_pair(splits(*a), volume_of(*a)) > std::make_pair(splits(*b), volume_of(*b));
  });
  // Each launch takes the arguments of all plans that it has room for along.
  if (together.size() == 1) return make<kMaxKernel, 1>(together.data(), 1, stream);
  for (size_t begin = 0; begin < together.size(); begin += Batch::kMost) {
    const int some = static_cast<int>(std::min<size_t>(Batch::kMost, together.size() - begin));
    const cudaError_t error = make<kSmallKernel, Batch::kMost>(together.data() + begin, some, stream);
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
