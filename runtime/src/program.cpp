#include "program.h"

#include <algorithm>
#include <climits>
#include <cmath>
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
    made_.status = arena_.take(times(static_cast<int64_t>(steps.size()) + 1, 32));
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
    const std::function<void(const Json&, int64_t)> visit = [&](const Json& value, int64_t at) {
      if (value.kind() == Json::Kind::array) {
        for (const Json& part : value.array()) visit(part, at);
      } else if (const Json* const ref = value.word("ref")) {
        int64_t& last = last_[number_of(*ref)];
        last = std::max(last, at);
      }
    };
    for (size_t i = 0; i < steps.size(); ++i) {
      steps[i].array(5);
      visit(steps[i][1], static_cast<int64_t>(i));
      for (const auto& [name, value] : steps[i][2].object()) visit(value, static_cast<int64_t>(i));
    }
    for (const Json& out : head_["outputs"].array()) {
      for (const auto& [kind, content] : out.object()) visit(content, kForever);
    }
    visit(head_["counts"], kForever);
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

  Place status(size_t i) {
    Value value;
    value.kind = Value::Kind::status;
    value.part = static_cast<int>(made_.slots++);
    const Place place{made_.status + 32 * value.part};
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
  Array plain(const Call& call, const Json& place) {  // contiguous
    Array made = operand(place);
    if (!made.contiguous())
      fail(VXM_ERROR_UNSUPPORTED, "operator ", call.name(), " on a tensor that is not contiguous");
    return made;
  }
  Array floating(const Call& call, const char* name) {
    Array made = plain(call, call[name]);
    if (static_cast<int>(made.dtype) > static_cast<int>(DType::f64)) {
      fail(VXM_ERROR_UNSUPPORTED, "operator ", call.name(), " on ", name_of(made.dtype));
    }
    return made;
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

  const Map& map_of(const Call& call) {
    const auto& parts = call["map"].array(backend_.map_parts());
    const Value& first = value(parts[0]);
    require(first.kind == Value::Kind::map, call.name(), " has no kernel map");
    for (size_t i = 0; i < parts.size(); ++i) {
      require(ref_number(parts[i]) == map_numbers_[first.owner][i], call.name(), " has a map of tensors of several");
    }
    return maps_[first.owner];
  }

  static Geometry geometry_of(const Json& json) {
    json.array(12);
    Geometry made{};
    for (size_t i = 0; i < 3; ++i) {
      made.size[i] = static_cast<int>(json[i].integer(1, kMaxKernel));
      made.stride[i] = static_cast<int>(json[3 + i].integer(1, kMaxStride));
      made.dilation[i] = static_cast<int>(json[6 + i].integer(1, kMaxOffset));
      made.padding[i] = static_cast<int>(json[9 + i].integer(-kMaxOffset, kMaxOffset));
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
      made.info.kind = root < 0 ? VXM_TENSOR : VXM_VOXELS;
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
        made.coords = array(next(), DType::i32, {rows, 4}, true);
        made.data = array(next(), type, shape, true);
        made.count = array(next(), DType::i64, {1}, true);
      } else {
        made.data = array(next(), type, shape, true);
      }
      made.info.dims = static_cast<int32_t>(shape.size());
      std::copy(shape.begin(), shape.end(), made.info.shape);
      made_.inputs.push_back(std::move(made));
    }
    require(at == given.size(), "the program has more inputs than the engine");
  }

  void results() {
    std::vector<Place> counts;
    for (const Json& count : head_["counts"].array(made_.bounds.size())) counts.push_back(count_of(count));
    const auto level_of = [&](const Json& json) {
      return static_cast<int>(json.integer(-1, static_cast<int64_t>(counts.size()) - 1));
    };
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
        made.rows = counts[made.info.level];
      }
      made.info.dtype = code(made.data.dtype);
      made.info.dims = static_cast<int32_t>(made.data.shape.size());
      std::copy(made.data.shape.begin(), made.data.shape.end(), made.info.shape);
      made_.outputs.push_back(std::move(made));
    }
    for (const Json& json : head_["reports"].array()) {
      json.array(3);
      const Value& found = value(json[2]);
      require(found.kind == Value::Kind::status, "a report is no status");
      Report made{json[0].string(), static_cast<int>(json[1].integer(-1, INT32_MAX)), found.part};
      const bool level = made.kind == "index" || made.kind == "sites" || made.kind == "dense";
      if (level || made.kind == "map") {
        const size_t most = level ? made_.bounds.size() : made_.rooms.size();
        require(made.number >= 0 && static_cast<size_t>(made.number) < most, "a report is of nothing");
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
        {"voxmma::sized_map",
         {{"in_coords", "in_count", "in_inner", "in_first", "in_second", "out_coords", "out_count", "out_inner",
           "out_first", "out_second", "geometry", "reverse", "room"},
          &Planner::map}},
        {"voxmma::sized_rows", {{"x", "count"}, &Planner::rows}},
        {"voxmma::sized_finite", {{"x", "count"}, &Planner::finite}},
        {"voxmma::sized_dense", {{"x", "coords", "count", "samples", "shape", "origin"}, &Planner::dense}},
        {"voxmma::conv_fused",
         {{"x", "weight", "bias", "map", "n_out", "symmetric", "transpose", "accumulator", "tile", "out_dtype", "scale",
           "shift", "mean", "var", "eps", "residual", "activation", "slope", "packed"},
          &Planner::conv}},
        {"voxmma::pool_sum",
         {{"x", "in_count", "out_count", "map", "map_t", "kernel_volume", "n_out", "symmetric", "mirror"},
          &Planner::pool_sum}},
        {"voxmma::pool_max",
         {{"x", "map", "map_t", "kernel_volume", "n_out", "symmetric", "largest", "keep_winner"}, &Planner::pool_max}},
        {"voxmma::neighbor_counts", {{"map", "kernel_volume", "n_out"}, &Planner::counts}},
        {"aten::cat", {{"tensors", "dim"}, &Planner::cat}},
        {"aten::add.Tensor", {{"self", "other", "alpha"}, &Planner::add_rows}},
        {"aten::relu", {{"self"}, &Planner::relu}},
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
    add(backend_.index(made));
  }

  void sites(const Call& call) {
    outs(6);
    SitesCall made{};
    made.from = set_of(call, "");
    made.bounds = bounds_of(call["bounds"]);
    made.geometry = geometry_of(call["geometry"]);
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
    add(backend_.sites(made));
  }

  void map(const Call& call) {
    MapCall made{};
    made.in = set_of(call, "in_");
    made.out = set_of(call, "out_");
    made.geometry = geometry_of(call["geometry"]);
    made.reverse = call.flag("reverse");
    const Json* const room = call["room"].word("room");
    require(room != nullptr && static_cast<size_t>(number_of(*room)) < made_.rooms.size(), "a map has no room");
    const size_t plan = room->integer();
    made.room = made_.rooms[plan];
    made.map.n_in = made.in.capacity;
    made.map.n_out = made.out.capacity;
    made.map.volume = made.geometry.volume();
    const size_t parts = backend_.map_parts();
    outs(parts + 1);
    const std::vector<int64_t> bytes = backend_.map_bytes(made);
    std::vector<int64_t> numbers;
    for (size_t i = 0; i < parts; ++i) {
      Value value;
      value.kind = Value::Kind::map;
      value.owner = static_cast<int>(maps_.size());
      const int64_t number = sure_out(i);
      if (i < bytes.size()) {
        value.buffer = buffer(bytes[i], number);
        made.map.parts[i].offset = buffers_[value.buffer].at;
      }
      define(number, std::move(value));
      numbers.push_back(number);
    }
    maps_.push_back(made.map);
    map_numbers_.push_back(numbers);
    made.status = status(parts);
    Limits& limits = made_.limits[plan];
    limits.there = backend_.limits(made, &limits.passes, &limits.units);
    add(backend_.map(made));
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
    made.x = floating(call, "x");
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
      made.residual = floating(call, "residual");
      require(made.residual.dtype == out_type && made.residual.shape == Dims({made.map.n_out, channels}),
              "the residual of a convolution has another shape");
    }
    made.out = array(sure_out(0), out_type, {made.map.n_out, channels});
    add(backend_.conv(made));
  }

  Place counts_of(const Call& call, const char* name, int64_t rows) {
    if (call.find(name) == nullptr) return {};
    const Array found = plain(call, call[name]);
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
    const Array x = plain(call, call["x"]);
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
    outs(1);
    const Array a = floating(call, "self");
    const Json& other = call["other"];
    if (other.word("ref") == nullptr && other.word("const") == nullptr)
      fail(VXM_ERROR_UNSUPPORTED, "operator ", call.name(), " of a number");
    const Array b = floating(call, "other");
    if (a.dtype != b.dtype || a.shape != b.shape)
      fail(VXM_ERROR_UNSUPPORTED, "operator ", call.name(), " of different shapes or dtypes");
    if (call.find("alpha") != nullptr && call["alpha"].real() != 1)
      fail(VXM_ERROR_UNSUPPORTED, "operator ", call.name(), " with a factor");
    add(backend_.add(a, b, array(sure_out(0), a.dtype, a.shape)));
  }
  void relu(const Call& call) {
    outs(1);
    const Array x = floating(call, "self");
    add(backend_.relu(x, array(sure_out(0), x.dtype, x.shape)));
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
    const Array x = plain(call, call["self"]);
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
    Value made;
    made.kind = Value::Kind::array;
    made.array = x;
    made.array.strides = dense_strides(shape);
    made.array.shape = std::move(shape);
    if (call["self"].word("ref") != nullptr) {
      made.buffer = value(call["self"]).buffer;
      Buffer& buffer = buffers_[made.buffer];
      const auto last = last_.find(sure_out(0));
      if (last != last_.end()) buffer.last = std::max(buffer.last, last->second);
    }
    define(sure_out(0), std::move(made));
  }
};

}  // namespace

Program::Program(const File& file, Backend& backend) { Planner(file, backend, *this).plan(); }

}  // namespace vxm
