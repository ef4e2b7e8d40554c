// Runs an engine, such as that of SECOND's backbone, on the voxels of a scan and writes what it gives:
//   run_engine ENGINE VOXELS RESULT [frames]
//
// VOXELS: int64 rows, int64 channels, then coordinates (rows, 4) int32 and features (rows, channels) in the engine's dtype.
// RESULT: for every result that is voxels int64 rows, int64 channels, coordinates and features, likewise.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include "voxmma/voxmma.hpp"

namespace {

struct Voxels {
  std::vector<int32_t> coords;
  std::vector<char> feats;
  int64_t rows = 0;
};

Voxels read_voxels(const std::string& path, const vxm_input_info& wanted) {
  std::ifstream file(path, std::ios::binary);
  Voxels made;
  int64_t channels = 0;
  file.read(reinterpret_cast<char*>(&made.rows), sizeof(made.rows));
  file.read(reinterpret_cast<char*>(&channels), sizeof(channels));
  if (!file || made.rows < 0 || made.rows > wanted.shape[0] || channels != wanted.shape[1]) {
    throw std::runtime_error(path + " holds no voxels that the engine takes: at most " +
                             std::to_string(wanted.shape[0]) + " of " + std::to_string(wanted.shape[1]) + " channels");
  }
  made.coords.resize(static_cast<size_t>(4 * made.rows));
  made.feats.resize(static_cast<size_t>(made.rows * channels) * vxm_dtype_size(wanted.dtype));
  file.read(reinterpret_cast<char*>(made.coords.data()), static_cast<std::streamsize>(made.coords.size() * 4));
  file.read(made.feats.data(), static_cast<std::streamsize>(made.feats.size()));
  if (!file) throw std::runtime_error(path + " is cut");
  return made;
}

void write(std::ofstream& file, const void* data, size_t bytes) {
  file.write(static_cast<const char*>(data), static_cast<std::streamsize>(bytes));
}

void run(const std::string& path, const std::string& voxels, const std::string& result, int frames) {
  voxmma::Engine engine(path);
  const vxm_engine_info info = engine.info();
  std::printf("%s: %d results, %.1f MB on %s\n", path.c_str(), info.outputs, static_cast<double>(info.memory) / 1e6,
              info.cuda ? "the GPU" : "the CPU");
  const Voxels scan = read_voxels(voxels, engine.input(0));
  for (int i = 0; i < frames; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    engine.run({{scan.coords.data(), scan.feats.data(), scan.rows, nullptr, nullptr}});
    engine.status();
    const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - begin;
    std::printf("frame of %lld voxels: %.3f ms\n", static_cast<long long>(scan.rows), took.count());
  }
  std::ofstream file(result, std::ios::binary);
  for (int i = 0; i < info.outputs; ++i) {
    const vxm_output_info of = engine.output_info(i);
    if (of.kind != VXM_VOXELS) continue;
    const int64_t shape[2] = {engine.rows(of.level), of.shape[1]};
    std::vector<int32_t> coords = engine.read_coords(i);
    std::vector<char> feats(static_cast<size_t>(shape[0] * shape[1]) * vxm_dtype_size(of.dtype));
    voxmma::check(vxm_engine_read(engine.get(), i, nullptr, feats.data()));
    write(file, shape, sizeof(shape));
    write(file, coords.data(), coords.size() * sizeof(int32_t));
    write(file, feats.data(), feats.size());
    std::printf("result %d: %lld voxels of %lld channels at stride %d, %d, %d\n", i, static_cast<long long>(shape[0]),
                static_cast<long long>(shape[1]), of.stride[0], of.stride[1], of.stride[2]);
  }
  if (!file.flush()) throw std::runtime_error(result + " cannot be written");
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4 || argc > 5) {
    std::fprintf(stderr, "usage: %s ENGINE VOXELS RESULT [frames]\n", argv[0]);
    return 2;
  }
  try {
    run(argv[1], argv[2], argv[3], argc > 4 ? std::atoi(argv[4]) : 1);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
