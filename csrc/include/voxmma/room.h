// How much room a plan whose size the device alone will know is given.
#pragma once

#include <algorithm>

#include "voxmma/map.h"

namespace voxmma {

// Room for passes and uniq as a rule. Surfaces list 1.6 unique rows for each row of the larger side in one pass per
// kPassOffsets offsets, full grids 2.4.
inline void usual_room(PlanArgs& args) {
  const int64_t groups = empty_passes(args.size[0] * args.size[1] * args.size[2]);
  const int64_t tiles = (args.n_out + kTileM - 1) / kTileM;
  const int64_t rows = groups * std::max(args.n_in, args.n_out) * 5 / 2;
  args.uniq4_capacity = rows / 4 + 1;
  args.pass_capacity = tiles * groups + tiles / 4 + rows / kUniqueMax;
}

// The same, but never more than always suffices; that is `most_passes` and `most_uniq4`.
inline void plan_room(PlanArgs& args, int64_t* most_passes, int64_t* most_uniq4) {
  usual_room(args);
  plan_bounds(args, most_passes, most_uniq4);
  args.pass_capacity = std::min(args.pass_capacity, *most_passes);
  args.uniq4_capacity = std::min(args.uniq4_capacity, *most_uniq4);
}

}  // namespace voxmma
