// Where the code of a build runs, and with which driver. The binding asks this for its own build, and Python asks the binding.
#pragma once

#include <string>
#include <string_view>

namespace voxmma {

// Whether code built for `arch` ("8.0", "9.0a", "12.0f", "8.6+PTX": setup.py's parse_archs) runs on a device of compute
// capability major.minor. CUDA's rules: machine code runs on its major version from its minor version on, and not between
// desktop and Tegra (8.7 and 10.1); that of "a" on its own capability only; PTX on every later one, too.
constexpr bool code_runs_on(std::string_view arch, int major, int minor) {
  int of_major = 0, of_minor = 0;
  size_t at = 0;
  for (; at < arch.size() && arch[at] != '.'; ++at) of_major = of_major * 10 + (arch[at] - '0');
  for (++at; at < arch.size() && arch[at] >= '0' && arch[at] <= '9'; ++at) of_minor = of_minor * 10 + (arch[at] - '0');
  const std::string_view suffix = at < arch.size() ? arch.substr(at) : std::string_view();
  const int of = of_major * 10 + of_minor, device = major * 10 + minor;
  if (of == device) return true;
  if (suffix == "a") return false;
  if (suffix == "+PTX" && of < device) return true;
  const auto tegra = [](int capability) { return capability == 87 || capability == 101; };
  return of_major == major && of < device && !tegra(of) && !tegra(device);
}

// Whether a build for `archs`, separated by spaces, has code of a tile for the device. tile_arch: TileConfig::arch.
constexpr bool build_runs_on(std::string_view archs, int tile_arch, int major, int minor) {
  while (!archs.empty()) {
    const std::string_view arch = archs.substr(0, archs.find(' '));
    archs.remove_prefix(arch.size() < archs.size() ? arch.size() + 1 : arch.size());
    if ((tile_arch != 90 || arch == "9.0a") && code_runs_on(arch, major, minor)) return true;
  }
  return false;
}

// What is wrong with a driver for a runtime, both as CUDA counts versions (device.h): "" where nothing is.
inline std::string driver_problem(int driver, int runtime) {
  const int major = runtime / 1000;
  if (driver / 1000 >= major) return "";
  const auto version = [](int v) { return std::to_string(v / 1000) + "." + std::to_string(v % 1000 / 10); };
  const std::string oldest = major == 12 ? " (525 or newer)" : major == 13 ? " (580 or newer)" : "";
  return "voxmma's kernels were built with CUDA " + version(runtime) + " and need an NVIDIA driver for CUDA " +
         std::to_string(major) + oldest + "; " +
         (driver == 0 ? "there is none here" : "the one here is for CUDA " + version(driver)) +
         ": update the driver, or install a voxmma that was built with an older CUDA";
}

}  // namespace voxmma
