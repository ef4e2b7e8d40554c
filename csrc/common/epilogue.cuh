// How accumulators leave for global memory: the same of mma m16n8 and wgmma.
#pragma once

#include "types.cuh"

namespace voxmma {

// Can rows of `ld` elements of `bytes` bytes each, entered at multiples of `step` elements, take 16-byte accesses?
inline bool rows_aligned16(const void* base, int64_t ld, int64_t step, int bytes) {
  return reinterpret_cast<uintptr_t>(base) % 16 == 0 && ld * bytes % 16 == 0 && step * bytes % 16 == 0;
}

// Stores 8 NB columns of one output row from an accumulator laid out as mma m16n8 and wgmma leave it: of the eight
// columns of block j, lane q = lane & 3 of a quad holds 2 q and 2 q + 1, returned by get(j) as a float2.
// All 32 lanes call; the four lanes of a quad pass the same row (null: nothing is stored). `cols` columns exist;
// `vec`: the row is 16-byte aligned. 16-bit rows leave in 16-byte pieces, after a 4x4 transposition inside the quad.
template <class T, int NB, class Get>
__device__ __forceinline__ void store_row(T* row, int cols, bool vec, Get get) {
  const int q = threadIdx.x & 3;
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int j = 0; j < NB; ++j) {
      const float2 v = get(j);
      const int col = 8 * j + 2 * q;
      if (row == nullptr) continue;
      if (vec && col + 2 <= cols) {
        *reinterpret_cast<float2*>(row + col) = v;
      } else {
        if (col < cols) row[col] = v.x;
        if (col + 1 < cols) row[col + 1] = v.y;
      }
    }
  } else {
    static_assert(NB % 4 == 0, "16-bit rows are stored in groups of four 8-column blocks");
#pragma unroll
    for (int j = 0; j < NB; j += 4) {
      uint32_t p[4];  // p[i]: block j + i, columns 2 q and 2 q + 1
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 v = get(j + i);
        p[i] = pack2<T>(v.x, v.y);
      }
#pragma unroll
      for (int i = 0; i < 4; i += 2) {  // swap bit 0 of (lane, register)
        const uint32_t got = __shfl_xor_sync(~0u, q & 1 ? p[i] : p[i + 1], 1);
        if (q & 1)
          p[i] = got;
        else
          p[i + 1] = got;
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {  // swap bit 1
        const uint32_t got = __shfl_xor_sync(~0u, q & 2 ? p[i] : p[i + 2], 2);
        if (q & 2)
          p[i] = got;
        else
          p[i + 2] = got;
      }
      const int col = 8 * (j + q);  // p now holds all eight columns of block j + q
      if (row == nullptr || col >= cols) continue;
      if (vec && col + 8 <= cols) {
        *reinterpret_cast<uint4*>(row + col) = make_uint4(p[0], p[1], p[2], p[3]);
      } else {
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          const uint16_t bits = static_cast<uint16_t>(e & 1 ? p[e / 2] >> 16 : p[e / 2] & 0xffff);
          if (col + e < cols) reinterpret_cast<uint16_t*>(row)[col + e] = bits;
        }
      }
    }
  }
}

}  // namespace voxmma
