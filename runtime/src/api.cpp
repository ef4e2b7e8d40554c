// The C functions: arguments checked, exceptions made codes.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>

#include "backend.h"
#include "error.h"
#include "file.h"
#include "program.h"
#include "voxmma/voxmma.h"

using vxm::fail;
using vxm::text_of;

namespace {

thread_local std::string last_error;

template <class F>
vxm_code guarded(const F& f) noexcept {
  vxm_code code = VXM_ERROR_INTERNAL;
  try {
    try {
      f();
      return VXM_OK;
    } catch (const vxm::Error& error) {
      code = error.code;
      last_error = error.text;
    } catch (const std::bad_alloc&) {
      code = VXM_ERROR_MEMORY;
      last_error = "the host is out of memory";
    } catch (const std::length_error&) {
      code = VXM_ERROR_MEMORY;
      last_error = "the host is out of memory";
    } catch (const std::exception& error) {
      last_error = error.what();
    }
  } catch (...) {  // no memory for the message
    last_error.clear();
  }
  return code;
}

void want(const void* pointer, const char* name) {
  if (pointer == nullptr) fail(VXM_ERROR_ARGUMENT, name, " is null");
}

// Memory of a backend that is released in any case.
class Memory {
 public:
  Memory(vxm::Backend& backend, int64_t bytes) : backend_(backend), bytes_(bytes) {
    data_ = static_cast<unsigned char*>(backend.allocate(static_cast<size_t>(std::max<int64_t>(bytes, 256))));
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() { backend_.release(data_); }
  unsigned char* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  vxm::Backend& backend_;
  int64_t bytes_;
  unsigned char* data_;
};

std::unique_ptr<vxm::Backend> backend_for(const vxm::Json& machine, const vxm_options& options) {
  const std::string& version = machine["voxmma"].string();
  if (version != VOXMMA_VERSION) {
    fail(VXM_ERROR_VERSION, "the engine is of voxmma ", version, ", this library is of ", VOXMMA_VERSION);
  }
  const std::string& device = machine["device"].string();
  if (device == "cpu") {
    if (options.device != 0) fail(VXM_ERROR_ARGUMENT, "device is ", options.device, ", the engine runs on the CPU");
    return vxm::cpu_backend(options);
  }
  if (device == "cuda") return vxm::cuda_backend(options, machine);
  fail(VXM_ERROR_UNSUPPORTED, "engines for device '", device, "'");
}

}  // namespace

struct vxm_engine {
  std::unique_ptr<vxm::Backend> backend;
  std::unique_ptr<vxm::Program> program;
  std::unique_ptr<Memory> weights, work;
  mutable std::mutex mutex;
  bool ran = false, read = false;
  std::vector<int64_t> rows;  // of the levels, once the status is read

  vxm_engine(const std::string& path, const vxm_options& options) {
    auto file = std::make_unique<vxm::File>(path);
    backend = backend_for(file->head["machine"], options);
    const auto active = backend->activate();
    program = std::make_unique<vxm::Program>(*file, *backend);
    weights = std::make_unique<Memory>(*backend, backend->constant_bytes());
    file.reset();
    backend->upload(weights->data());
    work = std::make_unique<Memory>(*backend, program->work_bytes);
    rows.assign(program->bounds.size(), 0);
    frame(
        [&](vxm::Frame& empty) {  // loads what is loaded once, and records
          for (const vxm::Input& input : program->inputs) {
            if (input.level >= 0) backend->set_count(empty.at<int64_t>(input.count.at), 0, nullptr);
          }
        },
        nullptr);
    backend->wait();
  }

  ~vxm_engine() {
    if (backend == nullptr) return;
    try {
      const auto active = backend->activate();
      backend->wait();
      work.reset();
      weights.reset();
      backend.reset();
    } catch (...) {  // the device is lost: nothing can be given back to it
    }
  }

  template <class Load>
  void frame(const Load& load, void* stream) {
    vxm::Frame made{work->data(), weights->data(), stream};
    backend->begin(stream);
    load(made);
    backend->replay(
        [&](void* on) {
          vxm::Frame there = made;
          there.stream = on;
          program->run(there);
        },
        stream);
    backend->end(work->data() + program->status, static_cast<size_t>(32 * program->slots), stream);
  }

  const vxm::Output& output(int32_t i) const {
    if (i < 0 || static_cast<size_t>(i) >= program->outputs.size())
      fail(VXM_ERROR_ARGUMENT, "result ", i, ": the engine has ", program->outputs.size());
    return program->outputs[i];
  }

  // What was wrong with the frame, most basic first; throws it.
  void judge(vxm_frame& found) {
    const int64_t* const all = backend->status();
    const auto& p = *program;
    const auto refuse = [&](vxm_code code, const auto&... parts) {
      found.code = code;
      fail(code, parts...);
    };
    for (const vxm::Report& report : p.reports) {
      const int64_t* const values = all + 4 * report.slot;
      const int n = report.number;
      if (report.kind == "index") {
        rows[n] = std::clamp<int64_t>(values[0], 0, p.capacities[n]);
        if (!p.given[n]) continue;  // voxels of points are as they should be
        found.level = n;
        if (values[1] >= 0) {
          found.row = values[1];
          const vxm::Bounds& b = p.bounds[n];
          refuse(VXM_FRAME_BOUNDS, "coords row ", values[1], " is outside of the engine's bounds: batch ", b.low[0],
                 "..", b.high[0], ", x ", b.low[1], "..", b.high[1], ", y ", b.low[2], "..", b.high[2], ", z ",
                 b.low[3], "..", b.high[3]);
        }
        if (values[2] >= 0) {
          found.row = values[2] >> 32;
          found.twin = values[2] & 0xffffffff;
          refuse(VXM_FRAME_DUPLICATE, "coords rows ", found.twin, " and ", found.row, " are the same voxel");
        }
        found.level = -1;
      } else if (report.kind == "finite" && values[0] >= 0) {
        found.row = values[0];
        refuse(VXM_FRAME_FINITE, "feats row ", values[0], " of input ", n, " is not finite");
      } else if (report.kind == "points" && values[0] >= 0) {
        found.row = values[0];
        refuse(VXM_FRAME_FINITE, "points row ", values[0], " is not finite, or of a sample that is not there");
      } else if (report.kind == "voxels") {
        constexpr int64_t kMostPoints = 8191;  // that are added up on a GPU
        found.level = n;
        if (values[1] >= 0) {
          found.row = values[1];
          refuse(VXM_FRAME_POINTS, "points row ", values[1],
                 " is not finite, of no sample, or lies in a cell outside of the engine's bounds");
        }
        if (backend->cuda() && values[2] > kMostPoints) {
          refuse(VXM_FRAME_POINTS, "a voxel has ", values[2], " points, an engine adds up to ", kMostPoints);
        }
        if (values[0] > p.capacities[n]) {
          found.needed = values[0];
          found.capacity = p.capacities[n];
          refuse(VXM_FRAME_CAPACITY, "the frame does not fit: level ", n, " needs ", values[0],
                 " rows, its capacity is ", p.capacities[n]);
        }
        found.level = -1;
      } else if (report.kind == "sites") {
        found.level = n;
        if (values[1] != 0) refuse(VXM_FRAME_BOUNDS, "level ", n, " has voxels outside of its bounds");
        if (values[0] > p.capacities[n]) {
          found.needed = values[0];
          found.capacity = p.capacities[n];
          refuse(VXM_FRAME_CAPACITY, "the frame does not fit: level ", n, " needs ", values[0],
                 " rows, its capacity is ", p.capacities[n]);
        }
        rows[n] = values[0];
        found.level = -1;
      } else if (report.kind == "dense" && values[0] >= 0) {
        found.level = n;
        found.row = values[0];
        refuse(VXM_FRAME_DENSE, "a voxel of level ", n, " (row ", values[0], ") lies outside of the dense grid");
      } else if (report.kind == "map" && p.limits[n].there) {
        const vxm::Limits& limits = p.limits[n];
        const bool units = values[0] > limits.units;
        if (!units && values[1] <= limits.passes) continue;
        found.map = n;
        found.needed = values[units ? 0 : 1];
        found.capacity = units ? limits.units : limits.passes;
        refuse(VXM_FRAME_CAPACITY, "the frame does not fit: kernel map ", n, " needs ", found.needed,
               units ? " units of unique rows" : " passes", ", it has room for ", found.capacity);
      }
    }
  }
};

extern "C" {

int vxm_version(void) { return VXM_VERSION_MAJOR * 1000 + VXM_VERSION_MINOR; }
const char* vxm_voxmma_version(void) { return VOXMMA_VERSION; }
int vxm_has_cuda(void) {
#ifdef VOXMMA_RUNTIME_CUDA
  return 1;
#else
  return 0;
#endif
}
const char* vxm_last_error(void) { return last_error.c_str(); }

const char* vxm_code_name(vxm_code code) {
  switch (code) {
#define VXM_CASE(name) \
  case name: return #name
    VXM_CASE(VXM_OK);
    VXM_CASE(VXM_ERROR_ARGUMENT);
    VXM_CASE(VXM_ERROR_IO);
    VXM_CASE(VXM_ERROR_FORMAT);
    VXM_CASE(VXM_ERROR_VERSION);
    VXM_CASE(VXM_ERROR_DEVICE);
    VXM_CASE(VXM_ERROR_UNSUPPORTED);
    VXM_CASE(VXM_ERROR_MEMORY);
    VXM_CASE(VXM_ERROR_CUDA);
    VXM_CASE(VXM_ERROR_INTERNAL);
    VXM_CASE(VXM_FRAME_BOUNDS);
    VXM_CASE(VXM_FRAME_DUPLICATE);
    VXM_CASE(VXM_FRAME_CAPACITY);
    VXM_CASE(VXM_FRAME_DENSE);
    VXM_CASE(VXM_FRAME_FINITE);
    VXM_CASE(VXM_FRAME_POINTS);
#undef VXM_CASE
  }
  return "unknown";
}

size_t vxm_dtype_size(vxm_dtype dtype) {
  return dtype >= VXM_FLOAT16 && dtype <= VXM_UINT8 ? static_cast<size_t>(vxm::bytes_of(static_cast<vxm::DType>(dtype)))
                                                    : 0;
}

void vxm_options_init(vxm_options* options) {
  if (options == nullptr) return;
  *options = vxm_options{};
  options->size = sizeof(vxm_options);
  options->graph = 1;
}

vxm_code vxm_engine_load(const char* path, const vxm_options* options, vxm_engine** engine) {
  if (engine != nullptr) *engine = nullptr;
  return guarded([&] {
    want(path, "path");
    want(engine, "engine");
    vxm_options used;
    vxm_options_init(&used);
    if (options != nullptr) {
      if (options->size != sizeof(vxm_options)) fail(VXM_ERROR_ARGUMENT, "options were not set by vxm_options_init");
      used = *options;
    }
    if ((used.allocator.allocate == nullptr) != (used.allocator.release == nullptr))
      fail(VXM_ERROR_ARGUMENT, "an allocator has allocate and release, or none of them");
    *engine = new vxm_engine(path, used);
  });
}

void vxm_engine_free(vxm_engine* engine) { delete engine; }

vxm_code vxm_engine_get_info(const vxm_engine* engine, vxm_engine_info* info) {
  return guarded([&] {
    want(engine, "engine");
    want(info, "info");
    *info = {};
    info->inputs = static_cast<int32_t>(engine->program->inputs.size());
    info->outputs = static_cast<int32_t>(engine->program->outputs.size());
    info->levels = static_cast<int32_t>(engine->program->bounds.size());
    info->cuda = engine->backend->cuda();
    info->device = engine->backend->device();
    info->memory = static_cast<size_t>(engine->weights->bytes() + engine->work->bytes());
  });
}

vxm_code vxm_engine_input(const vxm_engine* engine, int32_t i, vxm_input_info* info) {
  return guarded([&] {
    want(engine, "engine");
    want(info, "info");
    if (i < 0 || static_cast<size_t>(i) >= engine->program->inputs.size())
      fail(VXM_ERROR_ARGUMENT, "input ", i, ": the engine has ", engine->program->inputs.size());
    *info = engine->program->inputs[i].info;
  });
}

vxm_code vxm_engine_output_info(const vxm_engine* engine, int32_t i, vxm_output_info* info) {
  return guarded([&] {
    want(engine, "engine");
    want(info, "info");
    *info = engine->output(i).info;
  });
}

vxm_code vxm_engine_run(vxm_engine* engine, const vxm_input* inputs, int32_t count, void* stream) {
  return guarded([&] {
    want(engine, "engine");
    want(inputs, "inputs");
    const auto& wanted = engine->program->inputs;
    if (count < 0 || static_cast<size_t>(count) != wanted.size())
      fail(VXM_ERROR_ARGUMENT, count, " inputs, the engine takes ", wanted.size());
    if (stream != nullptr && !engine->backend->cuda()) fail(VXM_ERROR_ARGUMENT, "a CPU engine has no stream");
    for (int32_t i = 0; i < count; ++i) {
      const int64_t rows = inputs[i].rows, capacity = wanted[i].info.shape[0];
      if (wanted[i].level < 0) {
        want(wanted[i].data.count() > 0 ? inputs[i].data : "", "data of an input");
        continue;
      }
      if (rows < 0) fail(VXM_ERROR_ARGUMENT, "input ", i, " has ", rows, " rows");
      if (rows > capacity) {
        fail(VXM_ERROR_ARGUMENT, "input ", i, ": the frame has ", rows, " rows, the engine's capacity is ", capacity);
      }
      if (rows > 0) want(inputs[i].where, "coordinates or points of an input");
      if (rows > 0 && wanted[i].info.shape[1] > 0) want(inputs[i].data, "data of an input");
    }
    const std::lock_guard<std::mutex> lock(engine->mutex);
    const auto active = engine->backend->activate();
    engine->ran = engine->read = false;
    engine->frame(
        [&](vxm::Frame& frame) {
          for (int32_t i = 0; i < count; ++i) {
            const vxm::Input& to = wanted[i];
            const auto copy = [&](const vxm::Array& array, const void* from, int64_t columns, int64_t rows) {
              const int64_t size = vxm::bytes_of(array.dtype);
              engine->backend->copy_in(frame.at<unsigned char>(array.at), array.strides[0] * size, from, columns * size,
                                       rows, stream);
            };
            if (to.level < 0) {
              const auto bytes = static_cast<size_t>(to.data.count() * vxm::bytes_of(to.data.dtype));
              engine->backend->copy_in(frame.at<unsigned char>(to.data.at), bytes, inputs[i].data, bytes, 1, stream);
              continue;
            }
            const int64_t rows = inputs[i].rows;
            copy(to.where, inputs[i].where, to.where.shape[1], rows);
            copy(to.data, inputs[i].data, to.info.shape[1], rows);
            if (inputs[i].count == nullptr) {
              engine->backend->set_count(frame.at<int64_t>(to.count.at), rows, stream);
            } else {
              copy(to.count, inputs[i].count, 1, 1);
            }
            if (!to.batch.at.there()) continue;
            if (inputs[i].samples == nullptr) {
              engine->backend->clear(frame.at<int64_t>(to.batch.at), static_cast<size_t>(8 * rows), stream);
            } else {
              copy(to.batch, inputs[i].samples, 1, rows);
            }
          }
        },
        stream);
    engine->ran = true;
  });
}

vxm_code vxm_engine_output(const vxm_engine* engine, int32_t i, vxm_output* output) {
  return guarded([&] {
    want(engine, "engine");
    want(output, "output");
    const vxm::Output& found = engine->output(i);
    const vxm::Frame frame{engine->work->data(), engine->weights->data(), nullptr};
    *output = {};
    output->data = frame.at<unsigned char>(found.data.at);
    output->coords = found.info.kind == VXM_VOXELS ? frame.at<int32_t>(found.coords.at) : nullptr;
    std::copy(found.data.strides.begin(), found.data.strides.end(), output->strides);
    output->rows = found.info.level >= 0 ? frame.at<int64_t>(found.rows) : nullptr;
  });
}

vxm_code vxm_engine_status(vxm_engine* engine, vxm_frame* frame) {
  vxm_frame found{VXM_OK, -1, -1, -1, -1, -1, -1};
  const vxm_code code = guarded([&] {
    want(engine, "engine");
    const std::lock_guard<std::mutex> lock(engine->mutex);
    if (!engine->ran) fail(VXM_ERROR_ARGUMENT, "the engine has run no frame");
    const auto active = engine->backend->activate();
    engine->read = false;
    engine->judge(found);
    engine->read = true;
  });
  found.code = code;
  if (frame != nullptr) *frame = found;
  return code;
}

vxm_code vxm_engine_rows(const vxm_engine* engine, int32_t level, int64_t* rows) {
  return guarded([&] {
    want(engine, "engine");
    want(rows, "rows");
    const std::lock_guard<std::mutex> lock(engine->mutex);
    if (!engine->read) fail(VXM_ERROR_ARGUMENT, "the status of the last frame has not been read, or is no VXM_OK");
    if (level < 0 || static_cast<size_t>(level) >= engine->rows.size())
      fail(VXM_ERROR_ARGUMENT, "level ", level, ": the engine has ", engine->rows.size());
    *rows = engine->rows[level];
  });
}

vxm_code vxm_engine_read(vxm_engine* engine, int32_t i, int32_t* coords, void* data) {
  return guarded([&] {
    want(engine, "engine");
    const std::lock_guard<std::mutex> lock(engine->mutex);
    const vxm::Output& found = engine->output(i);
    if (!engine->read) fail(VXM_ERROR_ARGUMENT, "the status of the last frame has not been read, or is no VXM_OK");
    const vxm::Array& array = found.data;
    const bool strided = array.shape.size() == 2 && array.strides[1] == 1;
    if (!strided && !array.contiguous()) {
      fail(VXM_ERROR_UNSUPPORTED, "result ", i, " is not contiguous: read it by its strides");
    }
    const auto active = engine->backend->activate();
    const vxm::Frame frame{engine->work->data(), engine->weights->data(), nullptr};
    const int64_t level = found.info.level, size = vxm::bytes_of(array.dtype);
    const int64_t first = array.shape.empty() ? 1 : array.shape[0], rows = level >= 0 ? engine->rows[level] : first;
    if (coords != nullptr) {
      if (found.info.kind != VXM_VOXELS) fail(VXM_ERROR_ARGUMENT, "result ", i, " has no coordinates");
      engine->backend->copy_out(coords, frame.at<int>(found.coords.at), 16, 16, rows);
    }
    if (data == nullptr || first == 0) return;
    const int64_t width = array.count() / first * size, pitch = strided ? array.strides[0] * size : width;
    engine->backend->copy_out(data, frame.at<unsigned char>(array.at), pitch, width, rows);
  });
}

}  // extern "C"
