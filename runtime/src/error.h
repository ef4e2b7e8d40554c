// What fails inside of the library: thrown here, a code and a sentence outside.
#pragma once

#include <cstdint>
#include <sstream>
#include <string>
#include <utility>

#include "voxmma/voxmma.h"

namespace vxm {

struct Error {
  vxm_code code;
  std::string text;
};

template <class... Parts>
std::string text_of(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

template <class... Parts>
[[noreturn]] void fail(vxm_code code, const Parts&... parts) {
  throw Error{code, text_of(parts...)};
}

// The file says something that cannot be.
template <class... Parts>
void require(bool holds, const Parts&... parts) {
  if (!holds) fail(VXM_ERROR_FORMAT, parts...);
}

// Sizes out of a file: no product or sum of them wraps.
inline int64_t times(int64_t a, int64_t b) {
  int64_t made;
  require(a >= 0 && b >= 0 && !__builtin_mul_overflow(a, b, &made) && made <= (int64_t{1} << 48),
          "a size is too large: ", a, " x ", b);
  return made;
}
inline int64_t plus(int64_t a, int64_t b) {
  int64_t made;
  require(a >= 0 && b >= 0 && !__builtin_add_overflow(a, b, &made) && made <= (int64_t{1} << 48),
          "a size is too large: ", a, " + ", b);
  return made;
}
inline int64_t aligned(int64_t bytes) { return plus(bytes, 255) / 256 * 256; }

}  // namespace vxm
