// The kernel library's whole interface. No torch header is included here or below: the library is built by
// CMakeLists.txt on its own, and csrc/torch knows both sides.
#pragma once

#include "voxmma/conv.h"
#include "voxmma/map.h"
#include "voxmma/norm.h"
#include "voxmma/points.h"
#include "voxmma/pool.h"
