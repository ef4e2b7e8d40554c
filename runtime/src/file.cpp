#include "file.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string_view>

namespace vxm {

namespace {

constexpr int64_t kBytes[] = {2, 2, 4, 8, 4, 8, 1};
constexpr const char* kNames[] = {"float16", "bfloat16", "float32", "float64", "int32", "int64", "uint8"};
constexpr int64_t kMostFile = int64_t{1} << 40;

template <class T>
T number_at(const unsigned char* data) {  // little endian
  T made = 0;
  for (size_t i = 0; i < sizeof(T); ++i) made |= static_cast<T>(data[i]) << (8 * i);
  return made;
}

struct Close {
  void operator()(std::FILE* file) const { std::fclose(file); }
};

}  // namespace

int64_t bytes_of(DType dtype) { return kBytes[static_cast<int>(dtype)]; }
const char* name_of(DType dtype) { return kNames[static_cast<int>(dtype)]; }

DType dtype_named(const std::string& name) {
  for (int i = 0; i < 7; ++i) {
    if (name == kNames[i]) return static_cast<DType>(i);
  }
  fail(VXM_ERROR_UNSUPPORTED, "tensors of dtype '", name, "'");
}

// The CRC of zip and zlib, eight bytes a step.
uint32_t crc32(const unsigned char* data, size_t size, uint32_t crc) {
  static const auto tables = [] {
    std::array<std::array<uint32_t, 256>, 8> made{};
    for (uint32_t i = 0; i < 256; ++i) {
      uint32_t value = i;
      for (int bit = 0; bit < 8; ++bit) value = value >> 1 ^ ((value & 1) != 0 ? 0xEDB88320u : 0);
      made[0][i] = value;
    }
    for (uint32_t i = 0; i < 256; ++i) {
      for (int t = 1; t < 8; ++t) made[t][i] = made[t - 1][i] >> 8 ^ made[0][made[t - 1][i] & 0xff];
    }
    return made;
  }();
  crc = ~crc;
  for (; size >= 8; size -= 8, data += 8) {
    const uint32_t low = number_at<uint32_t>(data) ^ crc, high = number_at<uint32_t>(data + 4);
    crc = tables[7][low & 0xff] ^ tables[6][low >> 8 & 0xff] ^ tables[5][low >> 16 & 0xff] ^ tables[4][low >> 24] ^
          tables[3][high & 0xff] ^ tables[2][high >> 8 & 0xff] ^ tables[1][high >> 16 & 0xff] ^ tables[0][high >> 24];
  }
  for (; size > 0; --size, ++data) crc = crc >> 8 ^ tables[0][(crc ^ *data) & 0xff];
  return ~crc;
}

File::File(const std::string& path) {
  errno = 0;
  const std::unique_ptr<std::FILE, Close> file(std::fopen(path.c_str(), "rb"));
  if (file == nullptr) fail(VXM_ERROR_IO, path, ": ", std::strerror(errno));
  unsigned char prefix[kPrefix];
  const size_t got = std::fread(prefix, 1, kPrefix, file.get());
  if (std::ferror(file.get()) != 0) fail(VXM_ERROR_IO, path, ": ", std::strerror(errno));
  require(got >= sizeof(kMagic) && std::memcmp(prefix, kMagic, sizeof(kMagic)) == 0, path, " is no engine");
  require(got == kPrefix, path, " is cut: it has ", got, " bytes");
  const auto format = number_at<uint32_t>(prefix + 8), sum = number_at<uint32_t>(prefix + 12);
  const auto size = number_at<uint64_t>(prefix + 16), head_size = number_at<uint64_t>(prefix + 24);
  if (format != kFormat) fail(VXM_ERROR_VERSION, path, " has format ", format, ", this version reads ", kFormat);
  require(size >= kPrefix && size <= static_cast<uint64_t>(kMostFile) && head_size <= size - kPrefix, path,
          " is damaged: it says that it has ", size, " bytes, ", head_size, " of them head");
  // Read piece by piece: what the file claims is not believed before it is there.
  content.assign(prefix, prefix + kPrefix);
  constexpr size_t kPiece = size_t{1} << 24;
  while (content.size() < size) {
    const size_t begin = content.size(), piece = std::min<uint64_t>(kPiece, size - begin);
    content.resize(begin + piece);
    const size_t read = std::fread(content.data() + begin, 1, piece, file.get());
    if (std::ferror(file.get()) != 0) fail(VXM_ERROR_IO, path, ": ", std::strerror(errno));
    require(read == piece, path, " is cut: it has ", begin + read, " bytes of ", size);
  }
  require(std::fgetc(file.get()) == EOF, path, " is damaged: it has more than the ", size, " bytes that it says");
  require(crc32(content.data() + 16, content.size() - 16) == sum, path, " is damaged: its checksum is another");

  head = Json::parse(std::string_view(reinterpret_cast<const char*>(content.data()) + kPrefix, head_size));
  const uint64_t data = (kPrefix + head_size + 63) / 64 * 64;
  for (const Json& entry : head["tensors"].array()) {
    entry.array(5);
    Stored made{dtype_named(entry[0].string()), entry[1].integers(0, int64_t{1} << 40), {}, nullptr, 0};
    const auto axes = entry[2].integers(0, VXM_MAX_DIMS);
    const size_t dims = made.shape.size();
    require(dims <= VXM_MAX_DIMS && axes.size() == dims, "a tensor has ", dims, " dimensions");
    made.strides.assign(dims, -1);
    made.bytes = bytes_of(made.dtype);
    int64_t elements = 1;
    for (size_t i = dims; i-- > 0;) {
      const auto axis = static_cast<size_t>(axes[i]);
      require(axis < dims && made.strides[axis] == -1, "a tensor's axes are no permutation");
      made.strides[axis] = elements;
      elements = times(elements, made.shape[axis]);
    }
    made.bytes = times(made.bytes, elements);
    const int64_t begin = plus(entry[4].integer(0, kMostFile), static_cast<int64_t>(data));
    require(begin % 64 == 0 && made.bytes <= static_cast<int64_t>(size) - begin, "a tensor of ", made.bytes,
            " bytes at byte ", begin, " is not in the file");
    made.data = content.data() + begin;
    tensors.push_back(std::move(made));
  }
}

}  // namespace vxm
