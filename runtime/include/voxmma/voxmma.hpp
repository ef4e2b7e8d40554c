// C++ on top of voxmma.h: an engine that frees itself, and exceptions for codes.
#ifndef VOXMMA_VOXMMA_HPP
#define VOXMMA_VOXMMA_HPP

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "voxmma/voxmma.h"

namespace voxmma {

class Error : public std::runtime_error {
 public:
  Error(vxm_code code, const std::string& text)
      : std::runtime_error(std::string(vxm_code_name(code)) + ": " + text), code_(code) {}
  vxm_code code() const noexcept { return code_; }

 private:
  vxm_code code_;
};

inline void check(vxm_code code) {
  if (code != VXM_OK) throw Error(code, vxm_last_error());
}

inline vxm_options default_options() {
  vxm_options options;
  vxm_options_init(&options);
  return options;
}

// vxm_engine. Its functions throw Error.
class Engine {
 public:
  explicit Engine(const std::string& path, const vxm_options& options = default_options()) {
    check(vxm_engine_load(path.c_str(), &options, &engine_));
  }
  Engine(Engine&& other) noexcept : engine_(std::exchange(other.engine_, nullptr)) {}
  Engine& operator=(Engine&& other) noexcept {
    std::swap(engine_, other.engine_);
    return *this;
  }
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;
  ~Engine() { vxm_engine_free(engine_); }

  vxm_engine* get() const noexcept { return engine_; }

  vxm_engine_info info() const { return filled<vxm_engine_info>(vxm_engine_get_info); }
  vxm_input_info input(int i) const { return filled<vxm_input_info>(vxm_engine_input, i); }
  vxm_output_info output_info(int i) const { return filled<vxm_output_info>(vxm_engine_output_info, i); }
  vxm_output output(int i) const { return filled<vxm_output>(vxm_engine_output, i); }

  void run(const std::vector<vxm_input>& inputs, void* stream = nullptr) {
    check(vxm_engine_run(engine_, inputs.data(), static_cast<int32_t>(inputs.size()), stream));
  }
  // Waits; throws what was wrong with the frame.
  void status() { check(vxm_engine_status(engine_, nullptr)); }
  int64_t rows(int level) const {
    int64_t made = 0;
    check(vxm_engine_rows(engine_, level, &made));
    return made;
  }
  // After status(): rows of a result on the host.
  template <class T>
  std::vector<T> read(int i) {
    const vxm_output_info of = output_info(i);
    if (sizeof(T) != vxm_dtype_size(of.dtype)) throw Error(VXM_ERROR_ARGUMENT, "a result of another dtype");
    int64_t count = of.level >= 0 ? rows(of.level) : 1;
    for (int32_t d = of.level >= 0 ? 1 : 0; d < of.dims; ++d) count *= of.shape[d];
    std::vector<T> made(static_cast<size_t>(count));
    check(vxm_engine_read(engine_, i, nullptr, made.data()));
    return made;
  }
  // (rows, 4) coordinates of a result that is voxels.
  std::vector<int32_t> read_coords(int i) {
    std::vector<int32_t> made(static_cast<size_t>(4 * rows(output_info(i).level)));
    check(vxm_engine_read(engine_, i, made.data(), nullptr));
    return made;
  }

 private:
  vxm_engine* engine_ = nullptr;

  template <class Info, class Function, class... Numbers>
  Info filled(const Function& function, Numbers... numbers) const {
    Info made;
    check(function(engine_, numbers..., &made));
    return made;
  }
};

}  // namespace voxmma
#endif
