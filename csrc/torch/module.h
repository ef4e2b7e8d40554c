// What each file adds to voxmma._C.
#pragma once

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

namespace voxmma {

// Written by setup.py into build_info.cpp, so that a changed kernel does not recompile the binding.
extern const char* const kBuildId;      // hash of the sources under csrc
extern const char* const kCudaArchs;    // "8.0 9.0a": setup.py's parse_archs; empty without CUDA
extern const char* const kCudaVersion;  // of the nvcc that built the kernels; empty without CUDA

void bind_cached(py::module_& m);
void bind_cpu_conv(py::module_& m);
void bind_cpu_map(py::module_& m);
void bind_prepared_conv(py::module_& m);
#ifdef VOXMMA_WITH_CUDA  // csrc/torch/cuda
void bind_tiles(py::module_& m);
void bind_coords(py::module_& m);
void bind_plans(py::module_& m);
void bind_points(py::module_& m);
void bind_streams(py::module_& m);
void bind_frames(py::module_& m);
#endif

}  // namespace voxmma
