// Rows of features in pieces of up to 16 bytes, and the arithmetic that pooling does on them.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "../common/types.cuh"
#include "voxmma/plan.h"

namespace voxmma::detail {

constexpr int kLogTile = 8;
static_assert(kTileM == 1 << kLogTile, "kLogTile");

// Whether v takes the place of `best`: strictly larger (smaller), or the first NaN.
template <bool largest, class A>
__device__ __forceinline__ bool better(A v, A best) {
  return !(largest ? v <= best : v >= best) && best == best;
}

template <int bytes>
struct Word;
template <>
struct Word<1> {
  using type = uint8_t;
};
template <>
struct Word<2> {
  using type = uint16_t;
};
template <>
struct Word<4> {
  using type = uint32_t;
};
template <>
struct Word<8> {
  using type = uint2;
};
template <>
struct Word<16> {
  using type = uint4;
};

// n neighbouring elements of a row, at an address that is a multiple of their size. They stay the words they are loaded
// as until one is asked for: arrays of 16-bit types end up in local memory.
template <class T, int n>
struct Piece {
  using W = typename Word<int(n * sizeof(T))>::type;
  using W1 = typename Word<int(sizeof(T))>::type;
  static constexpr int kWords = int(sizeof(W) + 3) / 4;
  uint32_t word[kWords];

  __device__ __forceinline__ void load(const T* at) {
    const W loaded = __ldg(reinterpret_cast<const W*>(at));
    if constexpr (sizeof(W) < 4)
      word[0] = loaded;
    else
      memcpy(word, &loaded, sizeof(W));
  }

  __device__ __forceinline__ void store(T* at) const {
    W stored;
    if constexpr (sizeof(W) < 4)
      stored = static_cast<W>(word[0]);
    else
      memcpy(&stored, word, sizeof(W));
    *reinterpret_cast<W*>(at) = stored;
  }

  __device__ __forceinline__ uint32_t bits(int i) const {  // of an element of at most 4 bytes
    constexpr int size = 8 * int(sizeof(T));
    return size == 32 ? word[i] : word[i * size / 32] >> (i * size % 32) & ((1u << (size % 32)) - 1);
  }

  // Element i: half types as float, offsets as int.
  __device__ __forceinline__ auto operator[](int i) const {
    if constexpr (std::is_same_v<T, double>)
      return __hiloint2double(int(word[2 * i + 1]), int(word[2 * i]));
    else if constexpr (std::is_same_v<T, float>)
      return __uint_as_float(word[i]);
    else if constexpr (std::is_same_v<T, __nv_bfloat16>)
      return __uint_as_float(bits(i) << 16);
    else if constexpr (std::is_integral_v<T>)
      return static_cast<int>(bits(i));
    else {
      const auto raw = static_cast<W1>(bits(i));
      return convert<float>(reinterpret_cast<const T&>(raw));
    }
  }

  // What `value` rounds to.
  template <class A>
  __device__ __forceinline__ void set(const A (&value)[n]) {
    if constexpr (std::is_same_v<T, double>) {
#pragma unroll
      for (int i = 0; i < n; ++i) {
        word[2 * i] = uint32_t(__double2loint(value[i]));
        word[2 * i + 1] = uint32_t(__double2hiint(value[i]));
      }
    } else {
#pragma unroll
      for (int w = 0; w < kWords; ++w) word[w] = 0;
#pragma unroll
      for (int i = 0; i < n; ++i) {
        uint32_t b;
        if constexpr (std::is_integral_v<T>) {
          b = uint32_t(value[i]);
        } else {
          const T element = convert<T>(value[i]);
          b = reinterpret_cast<const W1&>(element);
        }
        word[i * int(sizeof(T)) / 4] |= b << (i * int(sizeof(T)) % 4 * 8);
      }
    }
  }
};

// Per channel the largest (smallest) of the rows offered so far, and the number that came with it: the first of equals,
// the first NaN above all. `first`: nothing was offered before.
template <bool largest, class T, int n, class = void>
struct Extreme {
  SumOf<T> best[n] = {};
  int chosen[n];

  __device__ __forceinline__ explicit Extreme(int none) {
#pragma unroll
    for (int i = 0; i < n; ++i) chosen[i] = none;
  }

  __device__ __forceinline__ void offer(const Piece<T, n>& value, int number, bool first) {
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const bool take = first || better<largest>(value[i], best[i]);
      best[i] = take ? value[i] : best[i];
      chosen[i] = take ? number : chosen[i];
    }
  }

  __device__ __forceinline__ int number(int i) const { return chosen[i]; }

  __device__ __forceinline__ void store(T* y) const {
    Piece<T, n> made;
    made.set(best);
    made.store(y);
  }

  template <class W>
  __device__ __forceinline__ void store_numbers(W* at) const {
    Piece<W, n> made;
    made.set(chosen);
    made.store(at);
  }
};

// Half types two at a time, in half the registers; numbers of 16 bits.
template <bool largest, class T, int n>
struct Extreme<largest, T, n, std::enable_if_t<sizeof(T) == 2 && n % 4 == 0>> {
  using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
  uint32_t best[n / 2] = {}, chosen[n / 2];

  __device__ __forceinline__ explicit Extreme(int none) {
#pragma unroll
    for (int i = 0; i < n / 2; ++i) chosen[i] = uint32_t(none) * 0x10001u;
  }

  __device__ __forceinline__ static Pair pair(uint32_t word) {
    Pair p;
    memcpy(&p, &word, sizeof(p));
    return p;
  }

  __device__ __forceinline__ void offer(const Piece<T, n>& value, int number, bool first) {
#pragma unroll
    for (int i = 0; i < n / 2; ++i) {
      const Pair v = pair(value.word[i]), b = pair(best[i]);
      const uint32_t beats = (largest ? __hgtu2_mask(v, b) : __hltu2_mask(v, b)) & __heq2_mask(b, b);  // as better()
      const uint32_t take = first ? ~0u : beats;
      best[i] = (value.word[i] & take) | (best[i] & ~take);
      chosen[i] = (uint32_t(number) * 0x10001u & take) | (chosen[i] & ~take);
    }
  }

  __device__ __forceinline__ int number(int i) const {
    return static_cast<int>(chosen[i / 2] >> (i % 2 * 16) & 0xffff);
  }

  __device__ __forceinline__ void store(T* y) const {
    Piece<T, n> made;
#pragma unroll
    for (int i = 0; i < n / 2; ++i) made.word[i] = best[i];
    made.store(y);
  }

  template <class W>
  __device__ __forceinline__ void store_numbers(W* at) const {
    Piece<W, n> made;
#pragma unroll
    for (int i = 0; i < made.kWords; ++i) {
      if constexpr (sizeof(W) == 2)
        made.word[i] = chosen[i];
      else
        made.word[i] = __byte_perm(chosen[2 * i], chosen[2 * i + 1], 0x6420);
    }
    made.store(at);
  }
};

// Whether rows of this many bytes from one to the next can be taken 16 bytes at a time.
inline bool is_aligned(const void* base, int64_t row_bytes) {
  return reinterpret_cast<uintptr_t>(base) % 16 == 0 && row_bytes % 16 == 0;
}

}  // namespace voxmma::detail
