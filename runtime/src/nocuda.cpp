// Where the library is built without CUDA kernels.
#include "backend.h"

namespace vxm {

std::unique_ptr<Backend> cuda_backend(const vxm_options&, const Json&) {
  fail(VXM_ERROR_DEVICE, "the engine is for a GPU, and this library was built without CUDA");
}

}  // namespace vxm
