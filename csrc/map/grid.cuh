// Launch shapes and scratch memory of the map kernels.
#pragma once

#include <cstddef>
#include <cstdint>

namespace voxmma::detail {

inline constexpr int kThreads = 256;
inline constexpr int kMaxBlocks = 2048;  // grid-stride loops beyond

inline int blocks_for(int64_t n) {
  const int64_t blocks = (n + kThreads - 1) / kThreads;
  return static_cast<int>(blocks < 1 ? 1 : blocks > kMaxBlocks ? kMaxBlocks : blocks);
}

// Cuts aligned parts off a workspace; with a null base it only counts.
struct Carver {
  unsigned char* base;
  size_t bytes = 0;

  explicit Carver(void* base) : base(static_cast<unsigned char*>(base)) {}

  template <class T>
  T* take(int64_t count) {
    constexpr size_t kAlign = 256;
    T* part = base == nullptr ? nullptr : reinterpret_cast<T*>(base + bytes);
    bytes += (size_t(count) * sizeof(T) + kAlign - 1) / kAlign * kAlign;
    return part;
  }
};

}  // namespace voxmma::detail
