// How a launch of an fprop tile of Hopper is cut: columns of an item, and the parts of its sum. Host code.
#pragma once

#include "fprop_sm90_small.cuh"

namespace voxmma::sm90 {

template <class C>
int64_t fprop_items(const ConvArgs& args) {
  return args.plan.tiles * ceil_div(args.c_out, C::BN) * args.groups;
}

// f(a configuration of `columns` columns, which is C or a narrower one that divides it)
template <class C, class F>
auto with_columns(int columns, F f) {
  using T = typename C::T;
  using Acc = typename C::Acc;
  if constexpr (C::BN > 32) {
    if (columns == 32) return f(FpropConfig<T, Acc, 32, C::CK>());
  }
  if constexpr (C::BN == 128) {
    if (columns == 64) return f(FpropConfig<T, Acc, 64, C::CK>());
  }
  return f(C());
}

// How a launch of tile C runs: where items are shared, they may have fewer columns, so that there are more of them. That
// changes no sum; parts do, so that these do not depend on who packs the weights.
struct FpropShape {
  int columns;
  Parts parts;
};

// Times in ns, after clocks read inside kernels of an H200: until a CTA multiplies, of a step, of changing to another chunk,
// whose rows are gathered then, and from the last step until its rows are stored, alone and over a cluster.
template <class C>
struct FpropTimes {
  static constexpr int64_t kStart = 2900, kStep = C::BN > 96 ? 740 : C::BN > 64 ? 600 : C::BN > 32 ? 470 : 430;
  static constexpr int64_t kChunk = 2000, kStore = 500,
                           kSum = C::BN > 96   ? 4800
                                  : C::BN > 64 ? 3800
                                  : C::BN > 32 ? 2800
                                               : 2100;
};

// Clusters of up to eight CTAs can be launched on every Hopper whose parts were not switched off. A CTA fills a
// multiprocessor and a cluster stays within 16 of them.
template <class C>
FpropShape fprop_shape(const ConvArgs& args) {
  constexpr int kTogether = 16;
  const int chunks = (args.c_in + C::CK - 1) / C::CK, volume = args.plan.kernel_volume;
  FpropShape best{C::BN, {}};
  if (args.sm_count < kTogether || fprop_items<C>(args) >= args.sm_count) return best;
  // Steps of a part: of_chunks[c] * of_offsets[o] where c parts share the chunks, and o the offsets.
  int64_t of_chunks[kMaxParts + 1], of_offsets[kMaxParts + 1];
  for (int n = 1; n <= kMaxParts; ++n) {
    of_chunks[n] = (chunks + n - 1) / n;
    of_offsets[n] = ((volume + n - 1) / n + C::kPair - 1) / C::kPair;
  }
  const auto steps = [&](auto times, int c, int o) {
    using Times = decltype(times);
    return of_chunks[c] * of_offsets[o] * Times::kStep + (of_chunks[c] - 1) * Times::kChunk;
  };
  int64_t least = FpropTimes<C>::kStart + steps(FpropTimes<C>(), 1, 1) + FpropTimes<C>::kStore;
  const auto try_columns = [&](auto config) {
    using Of = decltype(config);
    using Times = FpropTimes<Of>;
    const int items = int(fprop_items<Of>(args));
    for (int parts = 2; parts <= kMaxParts; ++parts) {
      if (!ClusterSums<Of>::fit(parts)) continue;
      const int at_once = args.sm_count / kTogether * (kTogether / parts), waves = (items + at_once - 1) / at_once;
      const int most = (kFrags + parts - 1) / parts;  // fragments that a CTA adds
      const int64_t fixed = Times::kStart + Times::kSum * parts * most / kFrags;
      for (int c = parts; c >= 1; --c) {  // a chunk's rows are gathered by all its parts, so rather more parts of those
        if (parts % c != 0 || c > chunks || parts / c > volume) continue;
        const int64_t took = waves * (fixed + steps(Times(), c, parts / c));
        if (took >= least) continue;
        least = took;
        best.columns = Of::BN;
        best.parts.chunks = c;
        best.parts.offsets = parts / c;
      }
    }
  };
  for (int columns : {32, 64}) {
    if (C::BN % columns == 0 && columns < C::BN) with_columns<C>(columns, try_columns);
  }
  try_columns(C());
  return best;
}

// Whether a launch's weights fit into the weight ring: one chunk and one block of columns.
template <class C>
bool keeps_weights(const ConvArgs& args) {
  return args.groups == 1 && args.c_in <= C::CK && args.c_out <= C::BN &&
         args.plan.kernel_volume <= C::kStages * C::kWeightBytes / C::kBlockBytes;
}

// Whether the kernel of a launch reads the caller's weights itself: where a part's steps, which take longer so, cost less
// than packing does (ns, measured on an H200).
template <class C>
bool fprop_reads_weights(const ConvArgs& args) {
  constexpr int64_t kPack = 2000;
  const FpropShape shape = fprop_shape<C>(args);
  if (shape.parts.count() == 1) return false;
  return with_columns<C>(shape.columns, [&](auto config) {
    using Of = decltype(config);
    if (!copies_weights<Of>(args)) return false;
    constexpr int64_t kStep = Of::BN > 32 ? 100 : 70;
    const int64_t volume = args.plan.kernel_volume, weights = volume * args.groups * args.c_in * args.c_out;
    const int64_t steps = ceil_div(ceil_div(args.c_in, C::CK), shape.parts.chunks) *
                          ceil_div(ceil_div(volume, shape.parts.offsets), C::kPair);
    return steps * kStep < kPack + weights * 28 / 10000;
  });
}

}  // namespace voxmma::sm90
