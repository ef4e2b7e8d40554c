// Running sums of set bits over a bitmap, in one sweep: a block waits for what the blocks before it have counted.
#pragma once

#include <cstdint>

#include "grid.cuh"

namespace voxmma {
namespace {

using namespace detail;

constexpr int kScanWords = 4 * kThreads;  // of a block

// How many blocks came before this one: those run or have run, so that this one may wait for them. By the whole block.
__device__ __forceinline__ int take_turn(unsigned* begun) {
  __shared__ int turn;
  if (threadIdx.x == 0) turn = static_cast<int>(atomicAdd(begun, 1u));
  __syncthreads();
  return turn;
}

// The sum of `mine` over the blocks before this one, the `turn`-th to ask. `sums` is zero
// before the first. By the whole block.
__device__ __forceinline__ int sum_before(unsigned long long* sums, int turn, int mine) {
  constexpr unsigned long long kOwn = 1ull << 32, kWhole = 2ull << 32;  // what a sum is of: the block, or all up to it
  __shared__ int sum;
  if (threadIdx.x < 32) {
    const int lane = threadIdx.x;
    if (lane == 0) atomicExch(sums + turn, kOwn | uint32_t(mine));
    int before = 0;
    bool done = false;
    for (int last = turn - 1; !done; last -= 32) {
      unsigned long long one = kWhole;
      if (last - lane >= 0) {
        while ((one = *static_cast<volatile unsigned long long*>(sums + last - lane)) == 0) {
        }
      }
      const uint32_t whole = __ballot_sync(0xffffffffu, one >= kWhole);
      const int until = whole != 0 ? __ffs(static_cast<int>(whole)) - 1 : 31;
      before += __reduce_add_sync(0xffffffffu, lane <= until ? static_cast<int>(one & 0xffffffffu) : 0);
      done = whole != 0;
    }
    if (lane == 0) {
      atomicExch(sums + turn, kWhole | uint32_t(before + mine));
      sum = before;
    }
  }
  __syncthreads();
  return sum;
}

// Words of a bitmap, four a thread.
struct Scan {
  uint4 words;
  int mine, before, all;  // set bits of the thread's words, of the threads before it, and of the block
};

// Of the `block`-th kScanWords words. By the whole block.
__device__ __forceinline__ Scan scan_words(const uint32_t* bits, int64_t block) {
  __shared__ int warp_total[kThreads / 32];
  const int t = threadIdx.x, warp = t / 32, lane = t % 32;
  Scan scan{reinterpret_cast<const uint4*>(bits)[block * kThreads + t], 0, 0, 0};
  scan.mine = __popc(scan.words.x) + __popc(scan.words.y) + __popc(scan.words.z) + __popc(scan.words.w);
  int until = scan.mine;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, until, step);
    if (lane >= step) until += other;
  }
  if (lane == 31) warp_total[warp] = until;
  __syncthreads();
  scan.before = until - scan.mine;
#pragma unroll
  for (int w = 0; w < kThreads / 32; ++w) {
    scan.before += w < warp ? warp_total[w] : 0;
    scan.all += warp_total[w];
  }
  return scan;
}

// Bits before each of the four words, `before` of them in the blocks before.
__device__ __forceinline__ int4 ranks_of(const Scan& scan, int before) {
  const int x = before + scan.before, y = x + __popc(scan.words.x);
  return make_int4(x, y, y + __popc(scan.words.y), x + scan.mine - __popc(scan.words.w));
}

}  // namespace
}  // namespace voxmma
