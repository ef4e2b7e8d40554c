// Where points lie on the grid: one expression for what makes voxels and for what reads them.
#pragma once

#include "../pool/rows.cuh"
#include "voxmma/points.h"

namespace voxmma::detail {

// Of one axis, in cells of tensor stride 1, whose floor is the cell.
template <class P>
__device__ __forceinline__ double grid_position(const P* at, double origin, double edge) {
  Piece<P, 1> value;
  value.load(at);
  return __ddiv_rn(__dsub_rn(static_cast<double>(value[0]), origin), edge);
}

}  // namespace voxmma::detail
