#include "program.h"

#include "numbers.h"

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstring>
#include <functional>
#include <iterator>
#include <map>
#include <unordered_map>

#include <utility>

namespace vxm {

Dims dense_strides(const Dims& shape) {
  Dims made(shape.size(), 1);
  for (size_t i = shape.size(); i-- > 1;) made[i - 1] = times(made[i], shape[i]);
  return made;
}

int64_t Backend::constant(const void* data, int64_t bytes, int64_t room) {
  const int64_t offset = constants_;
  constants_ = plus(constants_, aligned(plus(bytes, room)));
  if (bytes > 0) {
    const auto* const from = static_cast<const unsigned char*>(data);
    blobs_.push_back({offset, bytes, std::vector<unsigned char>(from, from + bytes)});
  }
  return offset;
}

void Backend::upload(unsigned char* weights) {
  for (const Blob& blob : blobs_) write(weights + blob.offset, blob.copy.data(), static_cast<size_t>(blob.bytes));
  blobs_.clear();
  finish(weights);
}

namespace {

constexpr int64_t kMostRows = int64_t{1} << 26;
constexpr int kCoordMin = -(1 << 17), kCoordMax = (1 << 17) - 1, kBatchMax = 1022;
constexpr int kMaxKernel = 9, kMaxStride = 4096, kMaxOffset = 1 << 20;
constexpr int64_t kForever = INT64_MAX;

// Offsets in one block of memory, of which pieces are taken and given back while it is laid out.
class Arena {
 public:
  int64_t take(int64_t bytes) {
    bytes = aligned(std::max<int64_t>(bytes, 1));
    auto best = free_.end();
    for (auto it = free_.begin(); it != free_.end(); ++it) {
      if (it->second >= bytes && (best == free_.end() || it->second < best->second)) best = it;
    }
    if (best == free_.end()) {  // at the end, over what is free there
      int64_t at = end_;
      if (!free_.empty() && std::prev(free_.end())->first + std::prev(free_.end())->second == end_) {
        at = std::prev(free_.end())->first;
        free_.erase(std::prev(free_.end()));
      }
      end_ = plus(at, bytes);
      return at;
    }
    const auto [at, size] = *best;
    free_.erase(best);
    if (size > bytes) free_.emplace(at + bytes, size - bytes);
    return at;
  }
  void give(int64_t at, int64_t bytes) {
    bytes = aligned(std::max<int64_t>(bytes, 1));
    auto next = free_.lower_bound(at);
    if (next != free_.end() && at + bytes == next->first) {
      bytes += next->second;
      next = free_.erase(next);
    }
    if (next != free_.begin() && std::prev(next)->first + std::prev(next)->second == at) {
      std::prev(next)->second += bytes;
    } else {
      free_.emplace(at, bytes);
    }
  }
  int64_t size() const { return end_; }

 private:
  std::map<int64_t, int64_t> free_;  // offset -> bytes
  int64_t end_ = 0;
};

struct Value {
  enum class Kind { array, index, map, status, none } kind = Kind::none;
  Array array;
  int owner = -1, part = 0;  // of index: set, of map: map; of status: slot
  int64_t lines = 1;         // of status
  int buffer = -1;
};

struct Buffer {
  int64_t at, bytes, last;
  bool free = false;
};

// A call of an operator: arguments by name.
class Call {
 public:
  Call(const std::string& name, const Json& step, const std::vector<const char*>& names) : name_(name) {
    const auto& given = step[1].array();
    require(given.size() <= names.size(), name, " has ", given.size(), " arguments");
    for (size_t i = 0; i < given.size(); ++i) found_.emplace(names[i], &given[i]);
    for (const auto& [key, value] : step[2].object()) {
      const auto same = [&k = key](const char* other) { return k == other; };
      require(std::any_of(names.begin(), names.end(), same), name, " has no argument '", key, "'");
      require(found_.emplace(key, &value).second, name, " has '", key, "' twice");
    }
  }
  // Null where it is not given or null.
  const Json* find(const char* name) const {
    const auto found = found_.find(name);
    return found == found_.end() || found->second->is_null() ? nullptr : found->second;
  }
  const Json& operator[](const char* name) const {
    const Json* const found = find(name);
    require(found != nullptr, name_, " has no '", name, "'");
    return *found;
  }
  bool flag(const char* name) const { return (*this)[name].boolean(); }
  const std::string& name() const { return name_; }

 private:
  std::string name_;
  std::unordered_map<std::string, const Json*> found_;
};

class Planner {
 public:
  Planner(const File& file, Backend& backend, Program& made)
      : file_(file), head_(file.head), backend_(backend), made_(made) {}

  void plan() {
    facts();
    const auto& steps = head_["steps"].array();
    uses(steps);
    most_slots_ = plus(static_cast<int64_t>(steps.size()), static_cast<int64_t>(made_.rooms.size())) + 1;
    made_.status = arena_.take(times(most_slots_, 32));
    inputs();
    for (now_ = 0; now_ < static_cast<int64_t>(steps.size()); ++now_) {
      step(steps[now_]);
      for (Buffer& buffer : buffers_) {
        if (buffer.last <= now_ && !buffer.free) {
          buffer.free = true;
          arena_.give(buffer.at, buffer.bytes);
        }
      }
    }

    results();
    made_.work_bytes = arena_.size();
  }

 private:
  const File& file_;
  const Json& head_;
  Backend& backend_;
  Program& made_;
  Arena arena_;
  std::unordered_map<int64_t, Value> values_;
  std::unordered_map<int64_t, int64_t> last_;  // step that reads a tensor last
  std::unordered_map<int64_t, Place> constants_;
  std::vector<Buffer> buffers_;
  std::vector<Set> sets_;
  std::vector<std::vector<int64_t>> set_numbers_;
  std::vector<Map> maps_;
  std::vector<std::vector<int64_t>> map_numbers_;
  std::vector<Place> counts_;  // of levels
  std::unordered_map<int64_t, Place> count_of_status_;
  std::unordered_map<int64_t, int64_t> widths_;  // columns of an input's buffer
  int64_t most_slots_ = 0;
  int64_t now_ = 0;
  const Json* out_ = nullptr;  // of the step

  // ---- what the head says of levels and maps

  static Bounds bounds_of(const Json& json) {
    Bounds made{};
    json.array(8);
    for (int i = 0; i < 8; ++i) {
      const bool batch = i % 4 == 0;
      (i < 4 ? made.low : made.high)[i % 4] =
          static_cast<int>(json[static_cast<size_t>(i)].integer(batch ? 0 : kCoordMin, batch ? kBatchMax : kCoordMax));
    }
    for (int i = 0; i < 4; ++i) require(made.low[i] <= made.high[i], "bounds are empty");
    return made;
  }

  void facts() {
    for (const Json& level : head_["levels"].array()) {
      level.array(3);
      made_.bounds.push_back(bounds_of(level[2]));
      made_.given.push_back(level[1].integer() < 0);
    }
    counts_.resize(made_.bounds.size());

    for (const Json& pair : head_["widths"].array()) {
      pair.array(2);
      widths_[number_of(pair[0])] = pair[1].integer(1, INT32_MAX);
    }
    made_.capacities = head_["capacities"].integers(1, kMostRows);
    require(made_.capacities.size() == made_.bounds.size(), "capacities and levels are not as many");
    const size_t plans = head_["plans"].array().size();
    for (const Json& room : head_["rooms"].array(plans)) {
      made_.rooms.push_back(room.real());
      require(made_.rooms.back() > 0 && made_.rooms.back() <= 1e6, "a kernel map has room ", made_.rooms.back());
    }
    made_.limits.resize(plans);
  }

  static int64_t number_of(const Json& place) { return place.integer(0, INT32_MAX); }

  void uses(const std::vector<Json>& steps) {
    const auto visit = [&](const Json& value, int64_t at) {
      visit_refs(value, [&](int64_t number) {
        int64_t& last = last_[number];
        last = std::max(last, at);
      });
    };
    for (size_t i = 0; i < steps.size(); ++i) {
      steps[i].array(5);
      visit(steps[i][1], static_cast<int64_t>(i));
      for (const auto& [name, value] : steps[i][2].object()) visit(value, static_cast<int64_t>(i));
    }
    for (const Json& out : head_["outputs"].array()) {
      for (const auto& [kind, content] : out.object()) visit(content, kForever);
    }
  }
  template <class F>
  static void visit_refs(const Json& value, const F& f) {
    if (value.kind() == Json::Kind::array) {
      for (const Json& part : value.array()) visit_refs(part, f);
    } else if (const Json* const ref = value.word("ref")) {
      f(number_of(*ref));
    }
  }

  // ---- tensors

  int buffer(int64_t bytes, int64_t number) {
    const auto found = last_.find(number);
    buffers_.push_back({arena_.take(bytes), bytes, found == last_.end() ? now_ : found->second});
    return static_cast<int>(buffers_.size()) - 1;
  }

  void define(int64_t number, Value value) {
    require(values_.emplace(number, std::move(value)).second, "tensor ", number, " is made twice");
  }

  // A new contiguous tensor.
  Array array(int64_t number, DType dtype, Dims shape, bool forever = false) {
    Value value;
    value.kind = Value::Kind::array;
    Array& made = value.array;
    made.dtype = dtype;
    made.strides = dense_strides(shape);
    made.shape = std::move(shape);
    value.buffer = buffer(times(made.count(), bytes_of(dtype)), number);
    if (forever) buffers_[value.buffer].last = kForever;
    made.at.offset = buffers_[value.buffer].at;
    const Array copy = made;
    define(number, std::move(value));
    return copy;
  }

  // Number of output i of the step; -1: nobody has it.
  int64_t out(size_t i) const {
    const Json& number = (*out_)[i];
    return number.is_null() ? -1 : number_of(number);
  }
  void outs(size_t count) const { out_->array(count); }
  int64_t sure_out(size_t i) const {
    const int64_t number = out(i);
    require(number >= 0, "a result of the step has no number");
    return number;
  }

  // The status that is output i: of `lines` of 4 numbers.
  Place status(size_t i, int64_t lines = 1) {
    Value value;
    value.kind = Value::Kind::status;
    value.part = static_cast<int>(made_.slots);
    value.lines = lines;
    const Place place{made_.status + 32 * made_.slots};
    made_.slots += lines;
    require(made_.slots <= most_slots_, "a program has too many kernel maps");
    define(sure_out(i), std::move(value));
    return place;
  }

  const Value& value(const Json& place) const {
    const Json* const ref = place.word("ref");
    require(ref != nullptr, "an argument is no tensor of the program");
    const auto found = values_.find(number_of(*ref));
    require(found != values_.end(), "tensor ", ref->integer(), " is read before it is made");
    return found->second;
  }

  const Stored& stored(const Json& place) const {
    const Json* const number = place.word("const");
    require(number != nullptr, "an argument is no tensor of the file");
    require(static_cast<size_t>(number_of(*number)) < file_.tensors.size(), "tensor ", number->integer(),
            " is not in the file");
    return file_.tensors[number->integer()];
  }
  const Stored* stored(const Call& call, const char* name) const {
    const Json* const found = call.find(name);
    if (found == nullptr) return nullptr;
    if (found->word("ref") != nullptr) {
      fail(VXM_ERROR_UNSUPPORTED, "operator ", call.name(), " with '", name, "' that the program makes");
    }
    return &stored(*found);
  }

  Array operand(const Json& place) {
    if (place.word("const") == nullptr) {
      const Value& found = value(place);
      require(found.kind == Value::Kind::array, "an argument is a tensor of a set or map where rows are wanted");
      return found.array;
    }
    const Stored& found = stored(place);
    const auto [it, fresh] = constants_.try_emplace(place.word("const")->integer());
    if (fresh) it->second = {backend_.constant(found.data, found.bytes), true};
    return {it->second, found.dtype, found.shape, found.strides};
  }
  Array plain(const Json& place) {  // contiguous: itself or a copy
    const Array found = operand(place);
    if (found.contiguous()) return found;
    Array made = found;
    made.strides = dense_strides(found.shape);
    const int64_t bytes = times(found.count(), bytes_of(found.dtype));
    buffers_.push_back({arena_.take(bytes), bytes, now_});
    made.at = {buffers_.back().at};
    add(backend_.copy(found, made));
    return made;
  }
  Array floating(const Call& call, const char* name) {
    Array made = plain(call[name]);
    if (static_cast<int>(made.dtype) > static_cast<int>(DType::f64)) {
      fail(VXM_ERROR_UNSUPPORTED, "operator ", call.name(), " on ", name_of(made.dtype));
    }
    return made;
  }

  // (N, C) with adjacent channels.
  Array rows_of(const Call& call, const char* name) {
    const Array found = operand(call[name]);
    const bool rows = found.shape.size() == 2 && found.dtype <= DType::f64 && found.strides[0] >= found.shape[1] &&
                      (found.shape[1] <= 1 || found.strides[1] == 1);
    return rows ? found : floating(call, name);
  }

  int64_t size(const Json& json) const {
    if (const Json* const level = json.word("capacity")) {
      const auto i = static_cast<size_t>(number_of(*level));
      require(i < made_.capacities.size(), "there is no level ", i);
      return made_.capacities[i];
    }
    return json.integer();
  }
  Dims sizes(const Json& json) const {
    Dims made;
    for (const Json& part : json.array()) made.push_back(size(part));
    return made;
  }

  Place count_of(const Json& place) {
    const Array found = operand(place);
    require(found.dtype == DType::i64 && found.count() == 1, "a count is no int64 of one element");
    return found.at;
  }
  Array coords_of(const Json& place) {
    Array found = operand(place);
    require(found.dtype == DType::i32 && found.shape.size() == 2 && found.shape[1] == 4 && found.contiguous() &&
                found.shape[0] >= 1 && found.shape[0] <= kMostRows,
            "coordinates are no int32 of shape (N, 4)");
    return found;
  }

  static int64_t ref_number(const Json& place) {
    const Json* const ref = place.word("ref");
    require(ref != nullptr, "a set or map is not made of tensors of the program");
    return number_of(*ref);
  }

  // A new set whose coordinates and count are there; its other tensors are outputs `first` and the two behind it.
  Set make_set(Set set, int64_t coords, int64_t count, size_t first) {
    std::vector<int64_t> numbers{coords, count};
    for (int part = 0; part < 3; ++part) {
      const int64_t number = sure_out(first + part),
                    bytes = part == 0 ? 32 : backend_.index_bytes(part - 1, set.capacity);
      Value made;
      made.kind = Value::Kind::index;
      made.owner = static_cast<int>(sets_.size());
      made.part = part;
      made.buffer = buffer(bytes, number);
      (part == 0 ? set.inner : set.index[part - 1]).offset = buffers_[made.buffer].at;
      define(number, std::move(made));
      numbers.push_back(number);
    }
    sets_.push_back(set);
    set_numbers_.push_back(numbers);
    return set;
  }

  // The set that five arguments are, all of one.
  const Set& set_of(const Call& call, const std::string& prefix) {
    static const char* const kNames[] = {"coords", "count", "inner", "first", "second"};
    const Value& inner = value(call[(prefix + "inner").c_str()]);
    require(inner.kind == Value::Kind::index, call.name(), " has no set");
    for (int i = 0; i < 5; ++i) {
      require(ref_number(call[(prefix + kNames[i]).c_str()]) == set_numbers_[inner.owner][i], call.name(),
              " has a set of tensors of several");
    }
    return sets_[inner.owner];
  }

  Set set_at(const Json& sets, size_t i) const {
    const Value& inner = value(sets[5 * i + 2]);
    require(inner.kind == Value::Kind::index, "a kernel map has no set");
    for (size_t part = 0; part < 5; ++part) {
      require(ref_number(sets[5 * i + part]) == set_numbers_[inner.owner][part], "a set is of tensors of several");
    }
    return sets_[inner.owner];
  }

  const Map& map_of(const Call& call) {
    const auto& parts = call["map"].array(backend_.map_parts());
    const Value& first = value(parts[0]);
    require(first.kind == Value::Kind::map, call.name(), " has no kernel map");
    for (size_t i = 0; i < parts.size(); ++i) {
      require(ref_number(parts[i]) == map_numbers_[first.owner][i], call.name(), " has a map of tensors of several");
    }
    return maps_[first.owner];
  }

  static Geometry geometry_of(const Json& json, size_t at) {
    Geometry made{};
    for (size_t i = 0; i < 3; ++i) {
      made.size[i] = static_cast<int>(json[at + i].integer(1, kMaxKernel));
      made.stride[i] = static_cast<int>(json[at + 3 + i].integer(1, kMaxStride));
      made.dilation[i] = static_cast<int>(json[at + 6 + i].integer(1, kMaxOffset));
      made.padding[i] = static_cast<int>(json[at + 9 + i].integer(-kMaxOffset, kMaxOffset));
    }
    return made;
  }

  void add(Work work) {
    Step made{std::move(work), -1};
    if (made.work.scratch > 0) {
      made.scratch = arena_.take(made.work.scratch);
      scratch_.push_back({made.scratch, made.work.scratch});
    }
    made_.steps.push_back(std::move(made));
  }
  std::vector<std::pair<int64_t, int64_t>> scratch_;

  // ---- inputs, steps, results

  static vxm_dtype code(DType dtype) { return static_cast<vxm_dtype>(dtype); }

  // A buffer of an input; it may have more columns than are given.
  Array input(int64_t number, DType dtype, Dims shape) {
    const auto wide = widths_.find(number);
    if (wide != widths_.end()) {
      require(shape.size() == 2 && wide->second >= shape[1], "an input has fewer columns than are given");
      shape[1] = wide->second;
    }
    return array(number, dtype, std::move(shape), true);
  }

  void inputs() {
    std::vector<int> roots;
    for (size_t i = 0; i < head_["levels"].array().size(); ++i) {
      if (head_["levels"][i][1].integer() < 0) roots.push_back(static_cast<int>(i));
    }
    const auto& given = head_["given"].array();
    size_t at = 0;
    const auto next = [&] {
      require(at < given.size(), "the program has fewer inputs than the engine");
      return number_of(given[at++]);
    };
    for (const Json& json : head_["inputs"].array()) {
      Input made{};
      Dims shape = json["shape"].integers(0, int64_t{1} << 40);
      require(shape.size() < VXM_MAX_DIMS, "an input has ", shape.size(), " dimensions");
      const Json* const dtype = json["dtype"].word("dtype");
      require(dtype != nullptr, "an input has no dtype");
      const DType type = dtype_named(dtype->string());
      const int64_t root = json["root"].integer(-1, INT32_MAX);
      made.level = -1;
      const Json& grid = json["grid"];
      made.info.kind = root < 0 ? VXM_TENSOR : grid.is_null() ? VXM_VOXELS : VXM_POINTS;
      made.info.dtype = code(type);
      if (root >= 0) {
        require(static_cast<size_t>(root) < roots.size() && shape.size() == 1, "an input is of no level");
        made.level = roots[root];
        const int64_t rows = made_.capacities[made.level];
        const Bounds& bounds = made_.bounds[made.level];
        made.info.samples = static_cast<int32_t>(json["batch_size"].integer(0, kBatchMax + 1));
        const auto stride = json["stride"].integers(1, INT32_MAX);
        require(stride.size() == 3, "a stride has ", stride.size(), " numbers");
        for (int i = 0; i < 4; ++i) {
          made.info.low[i] = bounds.low[i];
          made.info.high[i] = bounds.high[i];
          if (i < 3) made.info.stride[i] = static_cast<int32_t>(stride[i]);
        }
        shape.insert(shape.begin(), rows);
        if (grid.is_null()) {
          made.where = input(next(), DType::i32, {rows, 4});
        } else {
          const Json* const points = grid["dtype"].word("dtype");
          require(points != nullptr, "points have no dtype");
          const DType point_type = dtype_named(points->string());
          require(point_type <= DType::f64, "points are ", name_of(point_type));
          made.info.point_dtype = code(point_type);
          made.where = input(next(), point_type, {rows, 3});
        }
        made.data = input(next(), type, shape);
        made.count = input(next(), DType::i64, {1});
        if (!grid.is_null() && made.info.samples > 1) made.batch = input(next(), DType::i64, {rows});
      } else {
        made.data = input(next(), type, shape);
      }
      made.info.dims = static_cast<int32_t>(shape.size());
      std::copy(shape.begin(), shape.end(), made.info.shape);
      made_.inputs.push_back(std::move(made));
    }
    require(at == given.size(), "the program has more inputs than the engine");
  }

  void results() {
    const auto level_of = [&](const Json& json) {
      return static_cast<int>(json.integer(-1, static_cast<int64_t>(counts_.size()) - 1));
    };
    reports();
    for (const Json& json : head_["outputs"].array()) {
      Output made{};
      if (const Json* const voxels = json.word("voxels")) {
        voxels->array(4);
        made.info.kind = VXM_VOXELS;
        made.info.level = level_of((*voxels)[0]);
        require(made.info.level >= 0, "voxels are of no level");
        made.data = operand((*voxels)[1]);
        made.coords = coords_of((*voxels)[2]);
        const auto stride = (*voxels)[3].integers(1, INT32_MAX);
        require(stride.size() == 3, "a stride has ", stride.size(), " numbers");
        for (int i = 0; i < 3; ++i) made.info.stride[i] = static_cast<int32_t>(stride[i]);
        require(made.data.shape.size() == 2 && made.coords.shape[0] == made_.capacities[made.info.level],
                "voxels and their level have different numbers of rows");
      } else if (const Json* const tensor = json.word("tensor")) {
        tensor->array(2);
        made.info.kind = VXM_TENSOR;
        made.info.level = level_of((*tensor)[0]);
        made.data = operand((*tensor)[1]);
      } else {
        continue;  // a number, or nothing
      }
      require(made.data.shape.size() <= VXM_MAX_DIMS, "a result has ", made.data.shape.size(), " dimensions");
      if (made.info.level >= 0) {
        require(!made.data.shape.empty() && made.data.shape[0] == made_.capacities[made.info.level],
                "a result and its level have different numbers of rows");
        made.rows = counts_[made.info.level];
        require(made.rows.there(), "level ", made.info.level, " is made by no step");
      }
      made.info.dtype = code(made.data.dtype);
      made.info.dims = static_cast<int32_t>(made.data.shape.size());
      std::copy(made.data.shape.begin(), made.data.shape.end(), made.info.shape);
      made_.outputs.push_back(std::move(made));
    }
  }

  void reports() {
    for (const Json& json : head_["reports"].array()) {
      json.array(4);
      const Value& found = value(json[2]);
      require(found.kind == Value::Kind::status, "a report is no status");
      const int64_t line = json[3].integer(0, found.lines - 1);
      Report made{json[0].string(), static_cast<int>(json[1].integer(-1, INT32_MAX)), found.part + line};
      const bool level = made.kind == "index" || made.kind == "sites" || made.kind == "dense" || made.kind == "voxels";
      if (level || made.kind == "map") {
        const size_t most = level ? made_.bounds.size() : made_.rooms.size();
        require(made.number >= 0 && static_cast<size_t>(made.number) < most, "a report is of nothing");
        const auto count = count_of_status_.find(found.part);
        if (count != count_of_status_.end() && made.kind != "dense") counts_[made.number] = count->second;
      } else if (made.kind != "finite" && made.kind != "points") {
        fail(VXM_ERROR_UNSUPPORTED, "a report of kind '", made.kind, "'");
      }
      made_.reports.push_back(std::move(made));
    }
  }

  // ---- operators

  void step(const Json& json) {
    using Method = void (Planner::*)(const Call&);
    struct Operator {
      std::vector<const char*> arguments;
      Method method;
    };
    static const std::unordered_map<std::string, Operator> table = {
        {"voxmma::sized_index", {{"coords", "count", "bounds"}, &Planner::index}},
        {"voxmma::sized_sites",
         {{"coords", "count", "inner", "first", "second", "bounds", "geometry", "to_children", "shape", "capacity"},
          &Planner::sites}},
        {"voxmma::sized_voxels",
         {{"points", "batch", "feats", "count", "box", "edge", "origin", "reduce", "capacity"}, &Planner::voxels}},
        {"voxmma::sized_maps", {{"sets", "inputs", "outputs", "geometries", "reverse", "rooms"}, &Planner::maps}},
        {"voxmma::sized_rows", {{"x", "count"}, &Planner::rows}},
        {"voxmma::sized_finite", {{"x", "count"}, &Planner::finite}},
        {"voxmma::sized_dense", {{"x", "coords", "count", "samples", "shape", "origin"}, &Planner::dense}},
        {"voxmma::conv_fused",
         {{"x", "weight", "bias", "map", "n_out", "symmetric", "transpose", "accumulator", "tile", "out_dtype", "scale",
           "shift", "mean", "var", "eps", "residual", "activation", "slope", "packed"},
          &Planner::conv}},
        {"voxmma::conv_fused_into",
         {{"x",     "weight", "bias", "map", "n_out", "symmetric", "transpose",  "accumulator", "tile",   "out_dtype",
           "scale", "shift",  "mean", "var", "eps",   "residual",  "activation", "slope",       "packed", "out"},
          &Planner::conv}},
        {"voxmma::pool_sum",
         {{"x", "in_count", "out_count", "map", "map_t", "kernel_volume", "n_out", "symmetric", "mirror"},
          &Planner::pool_sum}},
        {"voxmma::pool_max",
         {{"x", "map", "map_t", "kernel_volume", "n_out", "symmetric", "largest", "keep_winner"}, &Planner::pool_max}},
        {"voxmma::neighbor_counts", {{"map", "kernel_volume", "n_out"}, &Planner::counts}},
        {"aten::cat", {{"tensors", "dim"}, &Planner::cat}},
        {"aten::add.Tensor", {{"self", "other", "alpha"}, &Planner::add_rows}},
        {"aten::mul.Tensor", {{"self", "other"}, &Planner::mul_rows}},
        {"aten::relu", {{"self"}, &Planner::unary<Unary::relu>}},
        {"aten::leaky_relu", {{"self", "negative_slope"}, &Planner::unary<Unary::leaky_relu>}},
        {"aten::silu", {{"self"}, &Planner::unary<Unary::silu>}},
        {"aten::gelu", {{"self", "approximate"}, &Planner::unary<Unary::gelu>}},
        {"aten::sigmoid", {{"self"}, &Planner::unary<Unary::sigmoid>}},
        {"aten::addmm", {{"bias", "x", "weight", "beta", "alpha"}, &Planner::linear}},
        {"aten::mm", {{"x", "weight"}, &Planner::linear}},
        {"aten::native_batch_norm",
         {{"x", "weight", "bias", "mean", "var", "training", "momentum", "eps"}, &Planner::batch_norm}},
        {"aten::empty.memory_format",
         {{"size", "dtype", "layout", "device", "pin_memory", "memory_format"}, &Planner::empty}},
        {"aten::slice.Tensor", {{"self", "dim", "start", "end", "step"}, &Planner::slice}},
        {"aten::copy_", {{"self", "src", "non_blocking"}, &Planner::copy_into}},
        {"aten::clone", {{"self", "memory_format"}, &Planner::clone}},
        {"aten::view", {{"self", "size"}, &Planner::view}},
        {"aten::_unsafe_view", {{"self", "size"}, &Planner::view}},
    };
    std::string name = json[0].string();
    constexpr std::string_view kDefault = ".default";
    if (name.size() > kDefault.size() && name.compare(name.size() - kDefault.size(), name.npos, kDefault) == 0) {
      name.resize(name.size() - kDefault.size());
    }
    const auto found = table.find(name);
    if (found == table.end()) fail(VXM_ERROR_UNSUPPORTED, "operator ", name);
    out_ = &json[3];
    out_->array();
    (this->*found->second.method)(Call(name, json, found->second.arguments));
    for (const auto& [at, bytes] : scratch_) arena_.give(at, bytes);
    scratch_.clear();
  }

  void index(const Call& call) {
    outs(4);
    IndexCall made{};
    const Array coords = coords_of(call["coords"]);
    made.set.coords = coords.at;
    made.set.count = count_of(call["count"]);
    made.set.capacity = coords.shape[0];
    made.bounds = bounds_of(call["bounds"]);
    made.set = make_set(made.set, ref_number(call["coords"]), ref_number(call["count"]), 0);
    made.status = status(3);
    count_of_status_[made_.slots - 1] = made.set.count;
    add(backend_.index(made));
  }

  void sites(const Call& call) {
    outs(6);
    SitesCall made{};
    made.from = set_of(call, "");
    made.bounds = bounds_of(call["bounds"]);
    call["geometry"].array(12);
    made.geometry = geometry_of(call["geometry"], 0);
    made.to_children = call.flag("to_children");
    const auto shape = call["shape"].integers(1, kCoordMax + 1);
    require(shape.empty() || shape.size() == 3, "a grid has ", shape.size(), " sides");
    std::copy(shape.begin(), shape.end(), made.shape);
    made.to.capacity = size(call["capacity"]);
    require(made.to.capacity >= 1 && made.to.capacity <= kMostRows, "a set has room for ", made.to.capacity, " rows");
    const int64_t coords = sure_out(0), count = sure_out(1);
    made.to.coords = array(coords, DType::i32, {made.to.capacity, 4}).at;
    made.to.count = array(count, DType::i64, {1}).at;
    made.to = make_set(made.to, coords, count, 2);
    made.status = status(5);
    count_of_status_[made_.slots - 1] = made.to.count;
    add(backend_.sites(made));
  }

  void maps(const Call& call) {
    const Json& sets = call["sets"];
    require(sets.array().size() % 5 == 0, "kernel maps have sets of another number of tensors");
    const auto known = static_cast<int64_t>(sets.array().size() / 5);
    const auto inputs = call["inputs"].integers(0, known - 1), outputs = call["outputs"].integers(0, known - 1);
    const auto reverse = call["reverse"].integers(0, 1);
    const size_t count = inputs.size(), parts = backend_.map_parts();
    const auto& rooms = call["rooms"].array(count);
    require(outputs.size() == count && reverse.size() == count, "kernel maps are of several numbers");
    call["geometries"].array(12 * count);
    outs(count * parts + 1);
    std::vector<MapCall> made(count);
    for (size_t i = 0; i < count; ++i) {
      MapCall& one = made[i];
      one.in = set_at(sets, inputs[i]);
      one.out = set_at(sets, outputs[i]);
      one.geometry = geometry_of(call["geometries"], 12 * i);
      one.reverse = reverse[i] != 0;
      const Json* const room = rooms[i].word("room");
      require(room != nullptr && static_cast<size_t>(number_of(*room)) < made_.rooms.size(), "a map has no room");
      const size_t plan = room->integer();
      one.room = made_.rooms[plan];
      one.map.n_in = one.in.capacity;
      one.map.n_out = one.out.capacity;
      one.map.volume = one.geometry.volume();
      const std::vector<int64_t> bytes = backend_.map_bytes(one);
      std::vector<int64_t> numbers;
      for (size_t part = 0; part < parts; ++part) {
        Value value;
        value.kind = Value::Kind::map;
        value.owner = static_cast<int>(maps_.size());
        const int64_t number = sure_out(parts * i + part);
        if (part < bytes.size()) {
          value.buffer = buffer(bytes[part], number);
          one.map.parts[part].offset = buffers_[value.buffer].at;
        }
        define(number, std::move(value));
        numbers.push_back(number);
      }
      maps_.push_back(one.map);
      map_numbers_.push_back(numbers);
      Limits& limits = made_.limits[plan];
      limits.there = backend_.limits(one, &limits.passes, &limits.units);
    }
    const Place first = status(count * parts, static_cast<int64_t>(count));
    for (size_t i = 0; i < count; ++i) made[i].status.offset = first.offset + 32 * static_cast<int64_t>(i);
    add(backend_.maps(made));
  }

  void voxels(const Call& call) {
    outs(4);
    VoxelsCall made{};
    made.points = floating(call, "points");
    made.feats = floating(call, "feats");
    const int64_t n = made.points.shape.empty() ? 0 : made.points.shape[0];
    require(made.points.shape == Dims({n, 3}) && made.feats.shape.size() == 2 && made.feats.shape[0] == n && n >= 1 &&
                n <= kMostRows && made.feats.shape[1] >= 1,
            "points and features do not fit");
    if (call.find("batch") != nullptr) {
      const Array batch = plain(call["batch"]);
      require(batch.dtype == DType::i64 && batch.shape == Dims{n}, "samples of points are no int64 of shape (N,)");
      made.batch = batch.at;
    }
    made.count = count_of(call["count"]);
    const Stored& box = stored(call["box"]);
    require(box.dtype == DType::i32 && box.shape == Dims({2, 4}) && box.strides == dense_strides(box.shape),
            "the box of points is no int32 of shape (2, 4)");
    int ends[8];
    std::memcpy(ends, box.data, sizeof(ends));
    for (int i = 0; i < 8; ++i) {
      const bool batch = i % 4 == 0;
      require(ends[i] >= (batch ? 0 : kCoordMin) && ends[i] <= (batch ? kBatchMax : kCoordMax), "a box is too large");
      (i < 4 ? made.box.low : made.box.high)[i % 4] = ends[i];
    }
    for (int i = 0; i < 3; ++i) {
      call["edge"].array(3);
      call["origin"].array(3);
      made.edge[i] = call["edge"][i].real();
      made.origin[i] = call["origin"][i].real();
      require(made.edge[i] > 0 && std::isfinite(made.edge[i]) && std::isfinite(made.origin[i]), "cells have no size");
    }
    const std::string& reduce = call["reduce"].string();
    if (reduce != "mean" && reduce != "sum") fail(VXM_ERROR_UNSUPPORTED, "voxels by '", reduce, "'");
    made.mean = reduce == "mean";
    made.capacity = size(call["capacity"]);
    require(made.capacity >= 1 && made.capacity <= kMostRows, "a set has room for ", made.capacity, " rows");
    made.coords = array(sure_out(0), DType::i32, {made.capacity, 4}).at;
    made.out = array(sure_out(1), made.feats.dtype, {made.capacity, made.feats.shape[1]});
    made.made = array(sure_out(2), DType::i64, {1}).at;
    made.status = status(3);
    add(backend_.voxels(made));
  }

  static double number_at(const Stored& t, int64_t i) {
    return by_type(t.dtype, [&](auto value) {
      std::memcpy(&value, t.data + i * t.strides[0] * static_cast<int64_t>(sizeof(value)), sizeof(value));
      return static_cast<double>(widen(value));
    });
  }

  static int activation_of(const Json* json) {
    static const char* const kNames[] = {"none", "relu", "leaky_relu", "silu", "gelu"};
    if (json == nullptr) return 0;
    for (int i = 0; i < 5; ++i) {
      if (json->string() == kNames[i]) return i;
    }
    fail(VXM_ERROR_UNSUPPORTED, "activation '", json->string(), "'");
  }

  void conv(const Call& call) {
    outs(1);
    ConvCall made{};
    made.x = rows_of(call, "x");
    made.map = map_of(call);
    const Stored* const weight = stored(call, "weight");
    require(weight != nullptr, call.name(), " has no weight");
    made.weight = weight;
    const size_t dims = weight->shape.size();
    require((dims == 3 || dims == 4) && weight->dtype <= DType::f64, "a weight has ", dims, " dimensions");
    made.symmetric = call.flag("symmetric");
    made.transpose = call.flag("transpose");
    made.groups = dims == 4 ? weight->shape[1] : 1;
    made.c_in = weight->shape[dims - 2];
    made.c_out = weight->shape[dims - 1];
    if (made.transpose) std::swap(made.c_in, made.c_out);
    require(made.groups >= 1 && made.c_in >= 1 && made.c_out >= 1 && weight->shape[0] == made.map.volume &&
                weight->strides == dense_strides(weight->shape),
            "a weight does not fit its kernel map");
    require(times(times(made.groups, made.c_in), made.c_out) <= INT32_MAX, "an offset has too many weights");
    require(made.x.shape.size() == 2 && made.x.shape[1] == made.groups * made.c_in &&
                made.x.shape[0] == made.map.n_in && size(call["n_out"]) == made.map.n_out,
            "rows, weight and kernel map of a convolution do not fit");
    const int64_t channels = made.groups * made.c_out;
    const auto numbers = [&](const char* name) {
      const Stored* const found = stored(call, name);
      require(found == nullptr || (found->dtype <= DType::f64 && found->shape == Dims{channels}), "'", name,
              "' of a convolution has no number for each channel");
      return found;
    };
    made.bias = numbers("bias");
    made.scale = numbers("scale");
    made.shift = numbers("shift");
    made.mean = numbers("mean");
    made.var = numbers("var");
    made.eps = call.find("eps") == nullptr ? 0 : call["eps"].real();
    made.slope = call.find("slope") == nullptr ? 0 : call["slope"].real();
    made.activation = activation_of(call.find("activation"));
    made.accumulator = call["accumulator"].string();
    made.tile = call["tile"].string();
    const DType x = made.x.dtype;
    const std::string& sums = made.accumulator;
    require(x == DType::f64 ? sums == "fp64"
                            : sums == "fp32" || ((sums == "fp16" || sums == "fp16_promoted") && x == DType::f16),
            "sums of ", sums, " of ", name_of(x));
    DType out_type = x;
    if (const Json* const given = call.find("out_dtype")) {
      require(given->word("dtype") != nullptr, "out_dtype is no dtype");
      out_type = dtype_named(given->word("dtype")->string());
      require(out_type == x || (out_type == DType::f32 && x != DType::f64), "out_dtype ", name_of(out_type));
    }
    if (call.find("residual") != nullptr) {
      made.residual = rows_of(call, "residual");
      require(made.residual.dtype == out_type && made.residual.shape == Dims({made.map.n_out, channels}),
              "the residual of a convolution has another shape");
    }
    if (call.find("out") != nullptr) {
      made.out = operand(call["out"]);
      require(!made.out.at.constant && made.out.dtype == out_type &&
                  made.out.shape == Dims({made.map.n_out, channels}) && (channels == 1 || made.out.strides[1] == 1) &&
                  made.out.strides[0] >= channels,
              "a convolution writes into something of another shape");
      require(out(0) < 0, call.name(), " has a result");
    } else {
      made.out = array(sure_out(0), out_type, {made.map.n_out, channels});
    }
    add(backend_.conv(made));
  }

  Place counts_of(const Call& call, const char* name, int64_t rows) {
    if (call.find(name) == nullptr) return {};
    const Array found = plain(call[name]);
    require(found.dtype == DType::i32 && found.shape == Dims{rows}, "'", name, "' of pooling has another shape");
    return found.at;
  }
  void pool(const Call& call, PoolCall made) {
    made.x = floating(call, "x");
    made.map = map_of(call);
    require(made.x.shape.size() == 2 && made.x.shape[1] >= 1 && made.x.shape[0] == made.map.n_in &&
                size(call["n_out"]) == made.map.n_out && call["kernel_volume"].integer() == made.map.volume,
            "rows and kernel map of pooling do not fit");
    if (made.kind == Pool::sum) {
      made.in_count = counts_of(call, "in_count", made.map.n_in);
      made.out_count = counts_of(call, "out_count", made.map.n_out);
    }
    made.out = array(sure_out(0), made.x.dtype, {made.map.n_out, made.x.shape[1]});
    add(backend_.pool(made));
  }
  void pool_sum(const Call& call) {
    outs(1);
    PoolCall made{};
    made.kind = Pool::sum;
    made.mirror = call.flag("mirror");
    pool(call, std::move(made));
  }
  void pool_max(const Call& call) {
    outs(2);
    if (call.flag("keep_winner")) fail(VXM_ERROR_UNSUPPORTED, "operator ", call.name(), " that keeps winners");
    PoolCall made{};
    made.kind = call.flag("largest") ? Pool::max : Pool::min;
    pool(call, std::move(made));
  }
  void counts(const Call& call) {
    outs(1);
    const Map& map = map_of(call);
    require(size(call["n_out"]) == map.n_out && call["kernel_volume"].integer() == map.volume,
            "a kernel map does not fit");
    const Map copy = map;
    add(backend_.counts(copy, array(sure_out(0), DType::i32, {copy.n_out}).at));
  }

  void rows(const Call& call) {
    outs(1);
    const Array x = plain(call["x"]);
    require(!x.shape.empty(), "rows of a number");
    const Place count = count_of(call["count"]);
    add(backend_.rows(x, count, array(sure_out(0), x.dtype, x.shape)));
  }
  void finite(const Call& call) {
    outs(1);
    const Array x = floating(call, "x");
    require(x.shape.size() == 2, "rows have ", x.shape.size(), " dimensions");
    const Place count = count_of(call["count"]);
    add(backend_.finite(x, count, status(0)));
  }
  void dense(const Call& call) {
    outs(2);
    DenseCall made{};
    made.x = floating(call, "x");
    const Array coords = coords_of(call["coords"]);
    made.coords = coords.at;
    made.count = count_of(call["count"]);
    made.samples = call["samples"].integer(0, kBatchMax + 1);
    const auto shape = call["shape"].integers(1, INT32_MAX), origin = call["origin"].integers(INT32_MIN, INT32_MAX);
    require(shape.size() == 3 && origin.size() == 3 && made.x.shape.size() == 2 && made.x.shape[0] == coords.shape[0],
            "a dense grid does not fit");
    std::copy(shape.begin(), shape.end(), made.shape);
    std::copy(origin.begin(), origin.end(), made.origin);
    made.grid = array(sure_out(0), made.x.dtype, {made.samples, shape[0], shape[1], shape[2], made.x.shape[1]});
    made.status = status(1);
    Array& seen = values_.at(sure_out(0)).array;  // (samples, channels, x, y, z)
    for (Dims* const dims : {&seen.shape, &seen.strides}) std::rotate(dims->begin() + 1, dims->end() - 1, dims->end());
    add(backend_.dense(made));
  }

  void cat(const Call& call) {
    outs(1);
    std::vector<Array> parts;
    for (const Json& part : call["tensors"].array()) parts.push_back(operand(part));
    require(!parts.empty() && !parts[0].shape.empty(), "a concatenation of nothing");
    const auto dims = static_cast<int64_t>(parts[0].shape.size());
    int64_t dim = call.find("dim") == nullptr ? 0 : call["dim"].integer(-dims, dims - 1);
    if (dim < 0) dim += dims;
    Dims shape = parts[0].shape;
    shape[dim] = 0;
    for (const Array& part : parts) {
      if (part.dtype != parts[0].dtype) fail(VXM_ERROR_UNSUPPORTED, "operator ", call.name(), " of several dtypes");
      Dims other = part.shape;
      require(static_cast<int64_t>(other.size()) == dims, "a concatenation of different shapes");
      shape[dim] = plus(shape[dim], other[dim]);
      other[dim] = shape[dim];
      require(other == shape, "a concatenation of different shapes");
    }
    const Array out = array(sure_out(0), parts[0].dtype, shape);
    int64_t begin = 0;
    for (const Array& part : parts) {
      Array to = out;
      to.shape = part.shape;
      to.at.offset += begin * out.strides[dim] * bytes_of(out.dtype);
      begin += part.shape[dim];
      add(backend_.copy(part, to));
    }
  }

  void add_rows(const Call& call) {
    if (call.find("alpha") != nullptr && call["alpha"].real() != 1)
      fail(VXM_ERROR_UNSUPPORTED, "operator ", call.name(), " with a factor");
    binary(call, Binary::add);
  }
  void mul_rows(const Call& call) { binary(call, Binary::mul); }
  void binary(const Call& call, Binary kind) {
    outs(1);
    const Array a = floating(call, "self");
    const Json& other = call["other"];
    if (other.word("ref") == nullptr && other.word("const") == nullptr)
      fail(VXM_ERROR_UNSUPPORTED, "operator ", call.name(), " of a number");
    const Array b = floating(call, "other");
    if (a.dtype != b.dtype || a.shape != b.shape)
      fail(VXM_ERROR_UNSUPPORTED, "operator ", call.name(), " of different shapes or dtypes");
    add(backend_.binary(kind, a, b, array(sure_out(0), a.dtype, a.shape)));
  }
  template <Unary kind>
  void unary(const Call& call) {
    outs(1);
    const Array x = floating(call, "self");
    double slope = 0;
    if (kind == Unary::leaky_relu)
      slope = call.find("negative_slope") == nullptr ? 0.01 : call["negative_slope"].real();
    if (kind == Unary::gelu && call.find("approximate") != nullptr && call["approximate"].string() != "none")
      fail(VXM_ERROR_UNSUPPORTED, "operator ", call.name(), " by ", call["approximate"].string());
    add(backend_.unary(kind, slope, x, array(sure_out(0), x.dtype, x.shape)));
  }

  void linear(const Call& call) {
    outs(1);
    for (const char* const factor : {"beta", "alpha"}) {
      if (call.find(factor) != nullptr && call[factor].real() != 1)
        fail(VXM_ERROR_UNSUPPORTED, "operator ", call.name(), " with a factor");
    }
    LinearCall made{};
    made.x = floating(call, "x");
    if (call["weight"].word("ref") != nullptr)
      fail(VXM_ERROR_UNSUPPORTED, "operator ", call.name(), " with a weight that the program makes");
    const Stored& weight = stored(call["weight"]);
    require(made.x.shape.size() == 2 && weight.shape.size() == 2 && weight.shape[0] == made.x.shape[1] &&
                weight.dtype == made.x.dtype,
            "rows and weight of a product do not fit");
    const int64_t c_in = weight.shape[0], c_out = weight.shape[1], size = bytes_of(weight.dtype);
    std::vector<unsigned char> laid(static_cast<size_t>(weight.bytes));
    for (int64_t i = 0; i < c_in; ++i) {
      for (int64_t o = 0; o < c_out; ++o) {
        std::memcpy(laid.data() + (i * c_out + o) * size,
                    weight.data + (i * weight.strides[0] + o * weight.strides[1]) * size, static_cast<size_t>(size));
      }
    }
    made.weight = {backend_.constant(laid.data(), weight.bytes), true};
    if (const Stored* const bias = stored(call, "bias")) {
      require(bias->dtype == weight.dtype && bias->shape == Dims{c_out}, "the bias of a product does not fit");
      made.bias = {backend_.constant(bias->data, bias->bytes), true};
    }
    made.out = array(sure_out(0), made.x.dtype, {made.x.shape[0], c_out});
    add(backend_.linear(made));
  }

  void batch_norm(const Call& call) {
    outs(3);
    if (call.flag("training")) fail(VXM_ERROR_UNSUPPORTED, "operator ", call.name(), " in training");
    const Array x = floating(call, "x");
    require(x.shape.size() == 2, "rows have ", x.shape.size(), " dimensions");
    const int64_t channels = x.shape[1];
    const auto numbers = [&](const char* name, double otherwise) {
      const Stored* const found = stored(call, name);
      require(found == nullptr || (found->dtype <= DType::f64 && found->shape == Dims{channels}), "'", name,
              "' of a norm has no number for each channel");
      std::vector<double> made(static_cast<size_t>(channels), otherwise);
      if (found != nullptr) {
        for (int64_t c = 0; c < channels; ++c) made[c] = number_at(*found, c);
      }
      return made;
    };
    const auto weight = numbers("weight", 1), bias = numbers("bias", 0), mean = numbers("mean", 0),
               var = numbers("var", 1);
    const double eps = call["eps"].real();
    std::vector<double> factor, summand;
    for (int64_t c = 0; c < channels; ++c) {
      factor.push_back(weight[c] / std::sqrt(var[c] + eps));
      summand.push_back(bias[c] - mean[c] * factor[c]);
    }
    const auto upload = [&](const std::vector<double>& values) {
      if (x.dtype == DType::f64) return Place{backend_.constant(values.data(), 8 * channels), true};
      const std::vector<float> narrow(values.begin(), values.end());
      return Place{backend_.constant(narrow.data(), 4 * channels), true};
    };
    const Place a = upload(factor), b = upload(summand);
    add(backend_.affine(x, a, b, array(sure_out(0), x.dtype, x.shape)));
  }

  void empty(const Call& call) {
    outs(1);
    const Json* const dtype = call["dtype"].word("dtype");
    require(dtype != nullptr, "an empty tensor has no dtype");
    Dims shape = sizes(call["size"]);
    for (const int64_t side : shape) require(side >= 0, "a tensor has ", side, " rows");
    array(sure_out(0), dtype_named(dtype->string()), std::move(shape));
  }

  // Output 0 as `seen`, which lies in the memory of `self`.
  void alias(const Json& self, Array seen) {
    Value made;
    made.kind = Value::Kind::array;
    made.array = std::move(seen);
    if (self.word("ref") != nullptr) {
      made.buffer = value(self).buffer;
      Buffer& buffer = buffers_[made.buffer];
      const auto last = last_.find(sure_out(0));
      if (last != last_.end()) buffer.last = std::max(buffer.last, last->second);
    }
    define(sure_out(0), std::move(made));
  }

  void slice(const Call& call) {
    outs(1);
    Array x = operand(call["self"]);
    const auto dims = static_cast<int64_t>(x.shape.size());
    require(dims > 0, "a slice of a number");
    int64_t dim = call.find("dim") == nullptr ? 0 : call["dim"].integer(-dims, dims - 1);
    if (dim < 0) dim += dims;
    const int64_t side = x.shape[dim];
    const auto end_of = [&](const char* name, int64_t otherwise) {
      if (call.find(name) == nullptr) return otherwise;
      const int64_t at = size(call[name]);
      return std::clamp<int64_t>(at < 0 ? at + side : at, 0, side);
    };
    const int64_t start = end_of("start", 0), end = std::max(start, end_of("end", side));
    if (call.find("step") != nullptr && call["step"].integer() != 1)
      fail(VXM_ERROR_UNSUPPORTED, "operator ", call.name(), " with a step");
    if (dim == 0) fail(VXM_ERROR_UNSUPPORTED, "operator ", call.name(), " of rows");
    x.shape[dim] = end - start;
    if (x.count() > 0) x.at.offset += start * x.strides[dim] * bytes_of(x.dtype);
    alias(call["self"], std::move(x));
  }

  void copy_into(const Call& call) {
    outs(1);
    const Array to = operand(call["self"]), from = operand(call["src"]);
    if (to.dtype != from.dtype || to.shape != from.shape)
      fail(VXM_ERROR_UNSUPPORTED, "operator ", call.name(), " of different shapes or dtypes");
    require(!to.at.constant, "a step writes into a tensor of the file");
    require(sure_out(0) == ref_number(call["self"]), call.name(), " makes a tensor");  // itself
    add(backend_.copy(from, to));
  }

  void clone(const Call& call) {
    outs(1);
    const Array x = operand(call["self"]);
    const Json* const format = call.find("memory_format");
    const std::string name = format == nullptr || format->word("memory_format") == nullptr
                                 ? "preserve_format"
                                 : format->word("memory_format")->string();
    if (name != "contiguous_format" && !(name == "preserve_format" && x.contiguous()))
      fail(VXM_ERROR_UNSUPPORTED, "operator ", call.name(), " with memory format ", name);
    add(backend_.copy(x, array(sure_out(0), x.dtype, x.shape)));
  }

  void view(const Call& call) {
    outs(1);
    const Array x = operand(call["self"]);
    if (!x.contiguous()) fail(VXM_ERROR_UNSUPPORTED, "operator ", call.name(), " of a tensor that is not contiguous");
    Dims shape = sizes(call["size"]);
    int64_t known = 1;
    int open = -1;
    for (size_t i = 0; i < shape.size(); ++i) {
      if (shape[i] == -1 && open < 0) {
        open = static_cast<int>(i);
      } else {
        known = times(known, shape[i]);
      }
    }
    if (open >= 0) {
      require(known > 0 && x.count() % known == 0, "a view has another size");
      shape[open] = x.count() / known;
      known = x.count();
    }
    require(known == x.count(), "a view has another size");
    Array made = x;
    made.strides = dense_strides(shape);
    made.shape = std::move(shape);
    alias(call["self"], std::move(made));
  }
};

}  // namespace

Program::Program(const File& file, Backend& backend) { Planner(file, backend, *this).plan(); }

}  // namespace vxm
