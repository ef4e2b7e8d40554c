// Voxels of points whose number the device alone knows (voxmma/sparse/sized.py, voxels_sized).
#include <algorithm>
#include <climits>
#include <cub/device/device_radix_sort.cuh>
#include <cub/device/device_scan.cuh>

#include "rows.h"

namespace vxm {

namespace {

constexpr int kThreads = 256;
constexpr int64_t kNone = INT64_MAX;

unsigned blocks_for(int64_t count) {
  return static_cast<unsigned>(std::max<int64_t>((count + kThreads - 1) / kThreads, 1));
}
__device__ int64_t index() { return int64_t{blockIdx.x} * blockDim.x + threadIdx.x; }

struct Work {
  int64_t *keys, *sorted;
  int *rows, *order, *fresh, *run, *start, *last;
  void* temporary;
  size_t temporary_bytes, bytes;

  Work(void* memory, int64_t n, int64_t capacity) {
    size_t at = 0;
    const auto take = [&](size_t size) {
      char* const made = static_cast<char*>(memory) + at;
      at += (size + 255) / 256 * 256;
      return static_cast<void*>(made);
    };
    keys = static_cast<int64_t*>(take(8 * n));
    sorted = static_cast<int64_t*>(take(8 * n));
    rows = static_cast<int*>(take(4 * n));
    order = static_cast<int*>(take(4 * n));
    fresh = static_cast<int*>(take(4 * n));
    run = static_cast<int*>(take(4 * n));
    start = static_cast<int*>(take(4 * (capacity + 1)));
    last = static_cast<int*>(take(4));
    size_t sort = 0, scan = 0;
    cub::DeviceRadixSort::SortPairs(nullptr, sort, keys, sorted, rows, order, static_cast<int>(n));
    cub::DeviceScan::InclusiveSum(nullptr, scan, fresh, run, static_cast<int>(n));
    temporary_bytes = std::max(sort, scan);
    temporary = take(temporary_bytes);
    bytes = at;
  }
};

__global__ void make_keys(Runs runs, int64_t* keys, int* rows) {
  const int64_t row = index();
  if (row >= runs.n) return;
  const int4 cell = reinterpret_cast<const int4*>(runs.cells)[row];
  const bool there = row < *runs.count;
  const bool inside = cell.x >= runs.low[0] && cell.x <= runs.high[0] && cell.y >= runs.low[1] &&
                      cell.y <= runs.high[1] && cell.z >= runs.low[2] && cell.z <= runs.high[2] &&
                      cell.w >= runs.low[3] && cell.w <= runs.high[3];
  constexpr int64_t kBias = 1 << 17;
  keys[row] = there && inside ? static_cast<int64_t>(static_cast<uint64_t>(int64_t{cell.x} - 512) << 54 |
                                                     static_cast<uint64_t>(cell.y + kBias) << 36 |
                                                     static_cast<uint64_t>(cell.z + kBias) << 18 |
                                                     static_cast<uint64_t>(cell.w + kBias))
                              : kNone;
  rows[row] = static_cast<int>(row);
  if (there && !inside)
    atomicMin(reinterpret_cast<unsigned long long*>(runs.status + 1), static_cast<unsigned long long>(row));
}

__global__ void mark_fresh(const int64_t* sorted, int64_t n, int* fresh, int* last) {
  const int64_t i = index();
  if (i >= n) return;
  const int64_t key = sorted[i];
  fresh[i] = key != kNone && (i == 0 || sorted[i - 1] != key);
  if (key != kNone && (i + 1 == n || sorted[i + 1] == kNone)) *last = static_cast<int>(i + 1);
}

__global__ void fill_start(int* start, int64_t count, const int* last) {
  const int64_t i = index();
  if (i < count) start[i] = *last;
}

__global__ void place_start(const int* fresh, const int* run, int64_t n, int64_t capacity, int* start) {
  const int64_t i = index();
  if (i < n && fresh[i] != 0 && run[i] <= capacity + 1) start[run[i] - 1] = static_cast<int>(i);
}

__global__ void tell(Runs runs, const int* order, const int* run, const int* start) {
  const int64_t i = index();
  if (i == 0) {
    const int64_t total = run[runs.n - 1];
    runs.status[0] = total;
    *runs.made = total <= runs.capacity ? total : 0;
  }
  if (i >= runs.capacity) return;
  const int64_t at = start[i] < runs.n ? start[i] : runs.n - 1;
  reinterpret_cast<int4*>(runs.coords)[i] = reinterpret_cast<const int4*>(runs.cells)[order[at]];
  const long long size = start[i + 1] - start[i];
  if (size > 0) atomicMax(reinterpret_cast<long long*>(runs.status + 2), size);
}

}  // namespace

size_t runs_workspace(int64_t n, int64_t capacity) { return Work(nullptr, n, capacity).bytes; }

cudaError_t find_runs(Runs* runs, cudaStream_t stream) {
  const int64_t n = runs->n, capacity = runs->capacity;
  Work work(runs->workspace, n, capacity);
  runs->order = work.order;
  runs->start = work.start;
  // [0, -1, 0, 0], and no last row
  cudaError_t error = cudaMemsetAsync(runs->status, 0, 4 * sizeof(int64_t), stream);
  if (error == cudaSuccess) error = cudaMemsetAsync(runs->status + 1, 0xff, sizeof(int64_t), stream);
  if (error == cudaSuccess) error = cudaMemsetAsync(work.last, 0, sizeof(int), stream);
  if (error != cudaSuccess) return error;
  make_keys<<<blocks_for(n), kThreads, 0, stream>>>(*runs, work.keys, work.rows);
  size_t bytes = work.temporary_bytes;
  error = cub::DeviceRadixSort::SortPairs(work.temporary, bytes, work.keys, work.sorted, work.rows, work.order,
                                          static_cast<int>(n), 0, 64, stream);
  if (error != cudaSuccess) return error;
  mark_fresh<<<blocks_for(n), kThreads, 0, stream>>>(work.sorted, n, work.fresh, work.last);
  bytes = work.temporary_bytes;
  error = cub::DeviceScan::InclusiveSum(work.temporary, bytes, work.fresh, work.run, static_cast<int>(n), stream);
  if (error != cudaSuccess) return error;
  fill_start<<<blocks_for(capacity + 1), kThreads, 0, stream>>>(work.start, capacity + 1, work.last);
  place_start<<<blocks_for(n), kThreads, 0, stream>>>(work.fresh, work.run, n, capacity, work.start);
  tell<<<blocks_for(capacity), kThreads, 0, stream>>>(*runs, work.order, work.run, work.start);
  return cudaGetLastError();
}

}  // namespace vxm
