// Frames of an engine (voxmma/engine/compiled.py): what is copied, several tensors in a launch, and what the host is told.
#include <algorithm>
#include <memory>
#include <mutex>
#include <utility>
#include <variant>
#include <vector>

#include "../module.h"
#include "streams.h"

namespace voxmma {
namespace {

using Source = std::variant<Tensor, int64_t>;

class Copies {
 public:
  // A tensor into the first rows and columns of a buffer of its device, or a number into all of it.
  void put(const Tensor& buffer, const Source& source) {
    TORCH_CHECK_VALUE(buffer.is_contiguous(), "a buffer must be contiguous, got strides ", buffer.strides());
    if (const auto* number = std::get_if<int64_t>(&source)) {
      TORCH_CHECK_TYPE(buffer.scalar_type() == at::kLong, "numbers are put into int64, not ", buffer.scalar_type());
      copies_.push_back({buffer.data_ptr(), nullptr, buffer.numel(), 8, 8, 0, *number, false});
      return;
    }
    Tensor from = std::get<Tensor>(source);
    if (from.is_conj() || from.is_neg()) from = from.resolve_conj().resolve_neg();
    const bool narrow = from.scalar_type() == at::kLong && buffer.scalar_type() == at::kInt, rows = buffer.dim() == 2;
    TORCH_CHECK_TYPE(narrow || from.scalar_type() == buffer.scalar_type(), "a buffer of ", buffer.scalar_type(),
                     " got ", from.scalar_type());
    bool fits = from.device() == buffer.device() && from.dim() == buffer.dim();
    for (int64_t i = 0; fits && i < buffer.dim(); ++i) {
      fits = buffer.dim() <= 2 ? from.size(i) <= buffer.size(i) : from.size(i) == buffer.size(i);
    }
    TORCH_CHECK_VALUE(fits, "a buffer of ", buffer.sizes(), " on ", buffer.device(), " has no room for ", from.sizes(),
                      " on ", from.device());
    if (from.numel() == 0) return;
    from = rows ? dense_rows(from) : from.contiguous();
    const int64_t item = from.element_size(), bytes = (rows ? from.size(1) : from.numel()) * item;
    copies_.push_back({buffer.data_ptr(), from.const_data_ptr(), rows ? from.size(0) : 1, bytes,
                       rows ? buffer.size(1) * buffer.element_size() : bytes, rows ? from.stride(0) * item : bytes, 0,
                       narrow});
    held_.push_back(std::move(from));
  }

  // All of a tensor into memory that is laid out like it.
  void add(void* to, const Tensor& from) {
    const auto bytes = static_cast<int64_t>(from.nbytes());
    if (bytes > 0) copies_.push_back({to, from.const_data_ptr(), 1, bytes, bytes, bytes, 0, false});
  }

  void launch(const Launch& on) const {
    for (size_t at = 0; at < copies_.size(); at += kMostCopies) {
      const int count = static_cast<int>(std::min<size_t>(copies_.size() - at, kMostCopies));
      check_cuda(copy_rows(&copies_[at], count, on.stream), "copy_rows", on.device);
    }
  }

 private:
  std::vector<RowCopy> copies_;
  std::vector<Tensor> held_;
};

void put(Copies& copies, const std::vector<Tensor>& buffers, const std::vector<Source>& sources) {
  TORCH_CHECK_VALUE(buffers.size() == sources.size(), sources.size(), " sources for ", buffers.size(), " buffers");
  for (size_t i = 0; i < buffers.size(); ++i) copies.put(buffers[i], sources[i]);
}

void put_all(const std::vector<Tensor>& buffers, const std::vector<Source>& sources) {
  if (buffers.empty()) return;
  const NormalTensors normal;
  const Launch on(buffers[0].device());
  Copies copies;
  put(copies, buffers, sources);
  copies.launch(on);
}

std::vector<Tensor> copies_of(const std::vector<Tensor>& tensors) {
  const NormalTensors normal;
  std::vector<Tensor> made;
  made.reserve(tensors.size());
  Copies copies;
  std::unique_ptr<Launch> on;
  for (const Tensor& t : tensors) {
    const bool dense = t.is_cuda() && t.is_non_overlapping_and_dense();
    if (!dense) {
      made.push_back(t.clone());
      continue;
    }
    if (on == nullptr) on = std::make_unique<Launch>(t.device());
    made.push_back(t.is_contiguous() ? on->empty(t.sizes(), t.scalar_type()) : at::empty_like(t));
    copies.add(made.back().data_ptr(), t);
  }
  if (on != nullptr) copies.launch(*on);
  return made;
}

// Page-locked memory, and an event behind the last launch that writes to it (none: there is no such launch).
struct Slot {
  Tensor host;
  std::unique_ptr<StreamEvent> written;
};

class Slots {
 public:
  Slot take(int64_t numbers) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      for (auto slot = spare_.begin(); slot != spare_.end(); ++slot) {
        if (slot->host.numel() < numbers || (slot->written != nullptr && !slot->written->done())) continue;
        Slot found = std::move(*slot);
        spare_.erase(slot);
        return found;
      }
    }
    return {at::empty({numbers}, at::TensorOptions().dtype(at::kLong).pinned_memory(true)), nullptr};
  }

  void give(Slot slot) {
    const std::lock_guard<std::mutex> lock(mutex_);
    spare_.push_back(std::move(slot));
  }

 private:
  std::mutex mutex_;
  std::vector<Slot> spare_;
};

Slots& slots() {
  static auto* const made = new Slots;  // outlives the CUDA context, so never destroyed
  return *made;
}

// Numbers that the device tells the host.
class Told {
 public:
  // Copies int64 numbers to the host, and in the same launch `sources` into buffers.
  static std::unique_ptr<Told> of(const Tensor& numbers, const std::vector<Tensor>& buffers,
                                  const std::vector<Source>& sources) {
    check_ints("numbers", numbers.view(-1), at::kLong, 0, numbers);
    const NormalTensors normal;
    const Launch on(numbers.device());
    std::unique_ptr<Told> made(new Told(numbers.numel()));
    Copies copies;
    copies.add(made->slot_.host.data_ptr(), numbers);
    put(copies, buffers, sources);
    copies.launch(on);
    made->slot_.written = StreamEvent::behind(on);
    return made;
  }

  Told(const Told&) = delete;
  Told& operator=(const Told&) = delete;
  ~Told() { slots().give(std::move(slot_)); }

  Ints numbers() const {  // waits
    slot_.written->finish();
    const auto* begin = data<int64_t>(slot_.host);
    return {begin, begin + count_};
  }

 private:
  explicit Told(int64_t count) : slot_(slots().take(count)), count_(count) {}

  Slot slot_;
  int64_t count_;
};

}  // namespace

void bind_frames(py::module_& m) {
  m.def("put", torch::wrap_pybind_function_no_gil(put_all), py::arg("buffers"), py::arg("sources"));
  m.def("copies", torch::wrap_pybind_function_no_gil(copies_of), py::arg("tensors"));
  py::class_<Told>(m, "Told")
      .def_static("of", torch::wrap_pybind_function_no_gil(Told::of), py::arg("numbers"), py::arg("buffers"),
                  py::arg("sources"))
      .def("numbers", torch::wrap_pybind_function_no_gil([](const Told& self) { return self.numbers(); }));
}

}  // namespace voxmma
