// Bricks: the hash table that finds voxels. Shared by the map kernels.
#pragma once

#include "voxmma/map.h"

namespace voxmma::detail {

inline constexpr uint32_t kNoBrick = ~0u;  // upper key word of an empty slot: keys have 61 bits
inline constexpr int kBrickBits = kCoordBits - 1;

__device__ __forceinline__ bool coord_in_range(int v) { return v >= -kCoordBias && v < kCoordBias; }

__device__ __forceinline__ bool packable(int4 c) {
  return c.x >= 0 && c.x <= kBatchMax && coord_in_range(c.y) && coord_in_range(c.z) && coord_in_range(c.w);
}

// Lower and upper word of the key of brick (x, y, z), each in 0 .. 2^kBrickBits - 1.
__device__ __forceinline__ uint2 brick_key(uint32_t batch, uint32_t x, uint32_t y, uint32_t z) {
  return make_uint2(z | y << kBrickBits, y >> (32 - kBrickBits) | x << 2 | batch << (2 + kBrickBits));
}

// Of the packable coordinate c = (batch, x, y, z).
__device__ __forceinline__ uint2 brick_key(int4 c) {
  return brick_key(uint32_t(c.x), uint32_t(c.y + kCoordBias) >> 1, uint32_t(c.z + kCoordBias) >> 1,
                   uint32_t(c.w + kCoordBias) >> 1);
}

// Bit of a voxel in its brick's mask; z varies fastest, as in Morton order.
__device__ __forceinline__ int brick_cell(int4 c) { return (c.y & 1) << 2 | (c.z & 1) << 1 | (c.w & 1); }

__device__ __forceinline__ uint32_t hash_of(uint2 key) {
  uint32_t h = key.x * 0x9e3779b1u;
  h ^= h >> 15;
  h = (h ^ key.y) * 0x85ebca77u;
  h ^= h >> 13;
  return h * 0xc2b2ae3du;
}

// First slot of a chain, which goes on slot by slot. A multiplication spreads the hash over any capacity.
__device__ __forceinline__ uint32_t home_slot(uint2 key, uint32_t capacity) { return __umulhi(hash_of(key), capacity); }

__device__ __forceinline__ uint32_t next_slot(uint32_t slot, uint32_t capacity) {
  return slot + 1 == capacity ? 0 : slot + 1;
}

// Bricks that a word of a bitmap in Morton order has cells of.
__device__ __forceinline__ int bricks_of(uint32_t word) {
  return __popc(((word & 0x7f7f7f7fu) + 0x7f7f7f7fu | word) & 0x80808080u);
}

// Rows to work on: `n`, or as many as the device says (map.h), from row `begin` of all on.
struct Rows {
  int64_t n;
  const int64_t* count = nullptr;
  int64_t begin = 0;

  __device__ __forceinline__ int64_t number() const {
    return count == nullptr ? n : max(int64_t{0}, min(*count - begin, n));
  }
};

// Chains of bricks go on bucket by bucket; slots of a bucket are taken in order. The first slot of a chain's first bucket,
// and of the bucket behind another.
__device__ __forceinline__ uint32_t home_bucket(uint2 key, uint32_t capacity) {
  return kBucket * __umulhi(hash_of(key), capacity / kBucket);
}

__device__ __forceinline__ uint32_t next_bucket(uint32_t bucket, uint32_t capacity) {
  return bucket + 2 * kBucket > capacity ? 0 : bucket + kBucket;
}

// Keys of a bucket.
struct BucketKeys {
  uint4 low, high;  // of slots 0 and 1, 2 and 3

  __device__ __forceinline__ static BucketKeys empty() {
    return {make_uint4(0, kNoBrick, 0, kNoBrick), make_uint4(0, kNoBrick, 0, kNoBrick)};
  }
  __device__ __forceinline__ static BucketKeys load(const Brick* table, uint32_t bucket) {
    static_assert(kBucket == 4, "two loads");
    const auto* keys = reinterpret_cast<const uint4*>(table + bucket);
    return {__ldg(keys), __ldg(keys + 1)};
  }
  __device__ __forceinline__ bool full() const { return high.w != kNoBrick; }
  // Slot of the key in the bucket, kBucket: none.
  __device__ __forceinline__ int find(uint2 key) const {
    int slot = kBucket;
    if (high.z == key.x && high.w == key.y) slot = 3;
    if (high.x == key.x && high.y == key.y) slot = 2;
    if (low.z == key.x && low.w == key.y) slot = 1;
    if (low.x == key.x && low.y == key.y) slot = 0;
    return slot;
  }
};

// (first, mask) of a slot of a bucket.
__device__ __forceinline__ uint2 load_brick(const Brick* table, uint32_t bucket, int slot) {
  return __ldg(reinterpret_cast<const uint2*>(table + bucket + kBucket / 2) + slot);
}

// Enters a brick that is not in the table, whose empty slots are all ones.
__device__ __forceinline__ void insert_brick(Brick* table, uint32_t capacity, uint2 key, int first, uint32_t mask) {
  constexpr unsigned long long kEmpty = ~0ull;
  const auto value = static_cast<unsigned long long>(key.y) << 32 | key.x;
  for (uint32_t bucket = home_bucket(key, capacity);; bucket = next_bucket(bucket, capacity)) {
    auto* keys = reinterpret_cast<unsigned long long*>(table + bucket);
#pragma unroll 1
    for (int slot = 0; slot < kBucket; ++slot) {
      if (atomicCAS(keys + slot, kEmpty, value) != kEmpty) continue;
      reinterpret_cast<uint2*>(table + bucket + kBucket / 2)[slot] = make_uint2(static_cast<uint32_t>(first), mask);
      return;
    }
  }
}

__host__ __device__ __forceinline__ CoordBox make_box(const int* min, const int* max) {
  CoordBox box;
  for (int a = 0; a < 4; ++a) {
    box.low[a] = min[a] > max[a] ? 0 : a > 0 ? min[a] & ~1 : min[a];
    const uint32_t extent = min[a] > max[a] ? 0 : uint32_t(max[a]) - uint32_t(box.low[a]);
#ifdef __CUDA_ARCH__
    box.bits[a] = 32 - __clz(extent);  // 32 does not come from packable rows
#else
    box.bits[a] = 0;
    while (extent >> box.bits[a] != 0) ++box.bits[a];
#endif
  }
  return box;
}

__host__ __device__ __forceinline__ int total_bits(const CoordBox& box) {
  return box.bits[0] + box.bits[1] + box.bits[2] + box.bits[3];
}

// Not less than a brick.
__host__ __device__ __forceinline__ CoordBox whole_bricks(CoordBox box) {
  for (int a = 1; a < 4; ++a) box.bits[a] = box.bits[a] > 1 ? box.bits[a] : 1;
  return box;
}

// The box of whole bricks around the bounds, smallest and largest, that the device knows, or where it does not, `box`.
__device__ __forceinline__ CoordBox box_of(const int* bounds, const CoordBox& box) {
  return bounds == nullptr ? box : whole_bricks(make_box(bounds, bounds + 4));
}

// Morton code of a row inside the box, batch above.
template <class Key>
__device__ __forceinline__ Key morton(const CoordBox& box, int4 c) {
  const uint32_t x = uint32_t(c.y) - uint32_t(box.low[1]);
  const uint32_t y = uint32_t(c.z) - uint32_t(box.low[2]);
  const uint32_t z = uint32_t(c.w) - uint32_t(box.low[3]);
  Key key = uint32_t(c.x) - uint32_t(box.low[0]);
  for (int level = max(box.bits[1], max(box.bits[2], box.bits[3])) - 1; level >= 0; --level) {
    if (level < box.bits[1]) key = (key << 1) | ((x >> level) & 1u);
    if (level < box.bits[2]) key = (key << 1) | ((y >> level) & 1u);
    if (level < box.bits[3]) key = (key << 1) | ((z >> level) & 1u);
  }
  return key;
}

}  // namespace voxmma::detail
