// An engine's file: docs/runtime.md has the layout, python/voxmma/engine/file.py writes it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "json.h"

namespace vxm {

inline constexpr char kMagic[8] = {'V', 'X', 'E', 'N', 'G', 'I', 'N', 'E'};
inline constexpr uint32_t kFormat = 3;
inline constexpr size_t kPrefix = 32;  // bytes before the head

enum class DType { f16, bf16, f32, f64, i32, i64, u8 };  // as vxm_dtype
int64_t bytes_of(DType dtype);
const char* name_of(DType dtype);
DType dtype_named(const std::string& name);  // "float16"; FORMAT for what an engine's tensors are not

// A tensor of the file, contiguous in the order of its own dimensions.
struct Stored {
  DType dtype;
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;  // in elements
  const unsigned char* data;     // within File::content
  int64_t bytes;
};

struct File {
  std::vector<unsigned char> content;
  Json head;
  std::vector<Stored> tensors;

  // Reads and checks all but what the program means.
  explicit File(const std::string& path);
};

uint32_t crc32(const unsigned char* data, size_t size, uint32_t crc = 0);

}  // namespace vxm
