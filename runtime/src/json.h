// JSON as engine files have it: integers of 64 bits, no other numbers (these are hexadecimal strings).
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "error.h"

namespace vxm {

class Json {
 public:
  enum class Kind { null, boolean, integer, string, array, object };

  static Json parse(std::string_view text);

  Kind kind() const { return kind_; }
  bool is_null() const { return kind_ == Kind::null; }

  // Each is a FORMAT error where the value is something else.
  bool boolean() const;
  int64_t integer() const;
  int64_t integer(int64_t least, int64_t most) const;
  const std::string& string() const;
  const std::vector<Json>& array() const;
  const std::vector<Json>& array(size_t size) const;
  const std::vector<std::pair<std::string, Json>>& object() const;
  const Json& operator[](const char* name) const;  // of an object that has it
  const Json& operator[](size_t i) const;          // of an array that has it
  const Json& operator[](int i) const { return (*this)[static_cast<size_t>(i)]; }
  const Json* find(std::string_view name) const;  // null where there is none

  // The content of {name: content}, the only member; null for anything else.
  const Json* word(const char* name) const;
  double real() const;  // {"float": "0x1.8p+0"}, or an integer
  std::vector<int64_t> integers(int64_t least, int64_t most) const;

 private:
  friend class Parser;
  Kind kind_ = Kind::null;
  int64_t integer_ = 0;
  std::string string_;
  std::vector<Json> array_;
  std::vector<std::pair<std::string, Json>> object_;
};

}  // namespace vxm
