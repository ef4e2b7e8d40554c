#include "json.h"

#include <cmath>
#include <limits>

namespace vxm {

namespace {
constexpr int kDepth = 64;
const char* name_of(Json::Kind kind) {
  constexpr const char* names[] = {"null", "a truth value", "an integer", "a string", "a list", "an object"};
  return names[static_cast<int>(kind)];
}
}  // namespace

class Parser {
 public:
  explicit Parser(std::string_view text) : text_(text) {}

  Json all() {
    Json made = value(0);
    space();
    require(at_ == text_.size(), "there is more behind the head, at byte ", at_);
    return made;
  }

 private:
  std::string_view text_;
  size_t at_ = 0;

  [[noreturn]] void bad() const { fail(VXM_ERROR_FORMAT, "the head is no JSON at byte ", at_); }
  char peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }
  void space() {
    while (at_ < text_.size() && (peek() == ' ' || peek() == '\n' || peek() == '\r' || peek() == '\t')) ++at_;
  }
  bool take(char c) {
    space();
    if (at_ >= text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }
  void want(char c) {
    if (!take(c)) bad();
  }
  bool word(std::string_view w) {
    if (text_.substr(at_, w.size()) != w) return false;
    at_ += w.size();
    return true;
  }

  Json value(int depth) {
    if (depth > kDepth) bad();
    space();
    Json made;
    if (take('{')) {
      made.kind_ = Json::Kind::object;
      if (take('}')) return made;
      do {
        space();
        std::string name = string();
        if (made.find(name) != nullptr) bad();
        want(':');
        made.object_.emplace_back(std::move(name), value(depth + 1));
      } while (take(','));
      want('}');
    } else if (take('[')) {
      made.kind_ = Json::Kind::array;
      if (take(']')) return made;
      do {
        made.array_.push_back(value(depth + 1));
      } while (take(','));
      want(']');
    } else if (peek() == '"') {
      made.kind_ = Json::Kind::string;
      made.string_ = string();
    } else if (word("true")) {
      made.kind_ = Json::Kind::boolean;
      made.integer_ = 1;
    } else if (word("false")) {
      made.kind_ = Json::Kind::boolean;
    } else if (!word("null")) {
      made.kind_ = Json::Kind::integer;
      made.integer_ = integer();
    }
    return made;
  }

  int64_t integer() {
    const bool negative = peek() == '-';
    at_ += negative;
    if (peek() < '0' || peek() > '9') bad();
    int64_t made = 0;
    for (; peek() >= '0' && peek() <= '9'; ++at_) {
      const int digit = peek() - '0';
      if (__builtin_mul_overflow(made, int64_t{10}, &made) ||
          __builtin_add_overflow(made, int64_t{negative ? -digit : digit}, &made))
        bad();
    }
    if (peek() == '.' || peek() == 'e' || peek() == 'E') bad();
    return made;
  }

  unsigned hex4() {
    unsigned made = 0;
    for (int i = 0; i < 4; ++i, ++at_) {
      const char c = peek();
      if (c >= '0' && c <= '9')
        made = made * 16 + (c - '0');
      else if (c >= 'a' && c <= 'f')
        made = made * 16 + (c - 'a' + 10);
      else if (c >= 'A' && c <= 'F')
        made = made * 16 + (c - 'A' + 10);
      else
        bad();
    }
    return made;
  }

  std::string string() {
    if (peek() != '"') bad();
    ++at_;
    std::string made;
    while (true) {
      if (at_ >= text_.size() || static_cast<unsigned char>(text_[at_]) < 0x20) bad();
      char c = text_[at_++];
      if (c == '"') return made;
      if (c != '\\') {
        made += c;
        continue;
      }
      if (at_ >= text_.size()) bad();
      c = text_[at_++];
      switch (c) {
        case '"':
        case '\\':
        case '/': made += c; break;
        case 'b': made += '\b'; break;
        case 'f': made += '\f'; break;
        case 'n': made += '\n'; break;
        case 'r': made += '\r'; break;
        case 't': made += '\t'; break;
        case 'u': {  // names of operators are ASCII; what is not is only told in messages
          const unsigned code = hex4();
          made += code < 0x80 ? static_cast<char>(code) : '?';
          break;
        }
        default: bad();
      }
    }
  }
};

Json Json::parse(std::string_view text) { return Parser(text).all(); }

#define VXM_WANT(wanted) require(kind_ == (wanted), "the head has ", name_of(kind_), " for ", name_of(wanted))

bool Json::boolean() const {
  VXM_WANT(Kind::boolean);
  return integer_ != 0;
}
int64_t Json::integer() const {
  VXM_WANT(Kind::integer);
  return integer_;
}
int64_t Json::integer(int64_t least, int64_t most) const {
  const int64_t made = integer();
  require(made >= least && made <= most, "the head has ", made, " for a number from ", least, " to ", most);
  return made;
}
const std::string& Json::string() const {
  VXM_WANT(Kind::string);
  return string_;
}
const std::vector<Json>& Json::array() const {
  VXM_WANT(Kind::array);
  return array_;
}
const std::vector<Json>& Json::array(size_t size) const {
  require(array().size() == size, "the head has a list of ", array_.size(), " for one of ", size);
  return array_;
}
const std::vector<std::pair<std::string, Json>>& Json::object() const {
  VXM_WANT(Kind::object);
  return object_;
}
#undef VXM_WANT

const Json* Json::find(std::string_view name) const {
  for (const auto& [key, value] : object_) {
    if (key == name) return &value;
  }
  return nullptr;
}
const Json& Json::operator[](const char* name) const {
  object();
  const Json* found = find(name);
  require(found != nullptr, "the head has no '", name, "'");
  return *found;
}
const Json& Json::operator[](size_t i) const {
  require(i < array().size(), "the head has a list of ", array_.size(), " where there is an entry ", i);
  return array_[i];
}
const Json* Json::word(const char* name) const {
  if (kind_ != Kind::object || object_.size() != 1 || object_[0].first != name) return nullptr;
  return &object_[0].second;
}

// float.hex() of Python: [-]0x1.<hex digits>p<sign><digits>, inf, nan.
double Json::real() const {
  if (kind_ == Kind::integer) return static_cast<double>(integer_);
  const Json* const inner = word("float");
  require(inner != nullptr, "the head has ", name_of(kind_), " for a number");
  std::string_view text = inner->string();
  const auto bad = [&] { fail(VXM_ERROR_FORMAT, "'", inner->string(), "' is no number"); };
  const bool negative = !text.empty() && text[0] == '-';
  text.remove_prefix(negative);
  const double sign = negative ? -1 : 1;
  if (text == "inf") return sign * std::numeric_limits<double>::infinity();
  if (text == "nan") return std::numeric_limits<double>::quiet_NaN();
  if (text.substr(0, 2) != "0x" || text.size() > 40) bad();
  text.remove_prefix(2);
  double made = 0;
  int exponent = 0, digits = 0;
  bool behind = false;
  size_t i = 0;
  for (; i < text.size() && text[i] != 'p'; ++i) {
    const char c = text[i];
    if (c == '.' && !behind) {
      behind = true;
      continue;
    }
    if (!((c >= '0' && c <= '9') || (c >= 'a' && c <= 'f')) || ++digits > 14) bad();
    made = made * 16 + (c <= '9' ? c - '0' : c - 'a' + 10);
    exponent -= behind ? 4 : 0;
  }
  if (digits == 0 || i + 2 >= text.size() || (text[i + 1] != '+' && text[i + 1] != '-') || text.size() - i > 6) bad();
  int power = 0;
  for (size_t j = i + 2; j < text.size(); ++j) {
    if (text[j] < '0' || text[j] > '9') bad();
    power = power * 10 + (text[j] - '0');
  }
  return sign * std::ldexp(made, exponent + (text[i + 1] == '-' ? -power : power));
}

std::vector<int64_t> Json::integers(int64_t least, int64_t most) const {
  std::vector<int64_t> made;
  for (const Json& part : array()) made.push_back(part.integer(least, most));
  return made;
}

}  // namespace vxm
