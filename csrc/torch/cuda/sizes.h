// What coordinate sets and plans share: parts of an allocation, triples, sizes that stay on the device.
#pragma once

#include "launch.h"

namespace voxmma {

// One allocation for several tensors: offsets of its parts in units of 4 bytes, each part 256-byte aligned.
struct Parts {
  int64_t total = 0;
  int64_t add(int64_t count) {
    const int64_t at = total;
    total += (count + 63) / 64 * 64;
    return at;
  }
};

inline void copy_triple(const char* name, const Ints& from, int* to) {
  TORCH_CHECK(from.size() == 3, name, " must hold 3 integers, got ", from.size());
  for (int i = 0; i < 3; ++i) to[i] = static_cast<int>(from[i]);
}

// The (4,) numbers of `status` and the number of rows of a function whose sizes stay on the device.
inline int64_t* sized_status(const Tensor& status, const Tensor& like) {
  check_ints("status", status, at::kLong, 0, like);
  TORCH_CHECK_VALUE(status.size(0) == 4, "status must hold 4 integers, got ", status.size(0));
  return data<int64_t>(status);
}

inline const int64_t* sized_count(const char* name, const Tensor& count, const Tensor& like) {
  check_ints(name, count, at::kLong, 0, like);
  TORCH_CHECK_VALUE(count.size(0) == 1, name, " must hold 1 integer, got ", count.size(0));
  return data<int64_t>(count);
}

}  // namespace voxmma
