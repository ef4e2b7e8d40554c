// Programs on the CPU: what voxmma/ops/cpu.py and voxmma/sparse/sized.py do, as plain loops. Sums over the channels of an
// offset are added in order, where torch's own products may have another; all else rounds as there.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
#include <type_traits>

#include "backend.h"
#include "numbers.h"

namespace vxm {

namespace {

constexpr int64_t kCoordMin = -(1 << 17), kCoordMax = (1 << 17) - 1, kBatchMax = 1022;
constexpr int64_t kNone = std::numeric_limits<int64_t>::max(), kOutside = kNone - 1;

int64_t pack(int64_t batch, int64_t x, int64_t y, int64_t z) {
  const auto key = static_cast<uint64_t>(batch - 512) << 54 | static_cast<uint64_t>(x - kCoordMin) << 36 |
                   static_cast<uint64_t>(y - kCoordMin) << 18 | static_cast<uint64_t>(z - kCoordMin);
  return static_cast<int64_t>(key);
}
int64_t pack(const int* row) { return pack(row[0], row[1], row[2], row[3]); }
void unpack(int64_t key, int* row) {
  constexpr int64_t mask = (1 << 18) - 1;
  row[0] = static_cast<int>((key >> 54) + 512);
  for (int i = 0; i < 3; ++i) row[1 + i] = static_cast<int>(((key >> (36 - 18 * i)) & mask) + kCoordMin);
}

int64_t number_of(const int64_t* count, int64_t capacity) { return std::clamp<int64_t>(*count, 0, capacity); }

int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b != 0 && (a < 0) != (b < 0)); }

void tell(int64_t* status, int64_t a, int64_t b, int64_t c) {
  status[0] = a;
  status[1] = b;
  status[2] = c;
  status[3] = 0;
}

// ---- sets and maps

void run_index(const IndexCall& call, const Frame& frame) {
  const int* const coords = frame.at<int>(call.set.coords);
  int64_t* const keys = frame.at<int64_t>(call.set.index[0]);
  int64_t* const rows = frame.at<int64_t>(call.set.index[1]);
  const int64_t given = *frame.at<int64_t>(call.set.count), n = number_of(&given, call.set.capacity);
  std::vector<std::pair<int64_t, int64_t>> good;
  std::vector<int64_t> bad;
  for (int64_t row = 0; row < n; ++row) {
    bool inside = true;
    for (int i = 0; i < 4; ++i) {
      inside &= coords[4 * row + i] >= call.bounds.low[i] && coords[4 * row + i] <= call.bounds.high[i];
    }
    if (inside) {
      good.emplace_back(pack(coords + 4 * row), row);
    } else {
      bad.push_back(row);
    }
  }
  std::sort(good.begin(), good.end());
  int64_t duplicate = -1, twin = -1;
  for (size_t i = 1, first = 0; i < good.size(); ++i) {
    if (good[i].first != good[first].first) {
      first = i;
    } else if (duplicate < 0 || good[i].second < duplicate) {
      duplicate = good[i].second;
      twin = good[first].second;
    }
  }
  std::fill(keys, keys + call.set.capacity, kNone);
  std::fill(rows, rows + call.set.capacity, 0);
  for (size_t i = 0; i < good.size(); ++i) {
    keys[i] = good[i].first;
    rows[i] = good[i].second;
  }
  std::copy(bad.begin(), bad.end(), rows + good.size());
  tell(frame.at<int64_t>(call.status), given, bad.empty() ? -1 : bad[0], duplicate < 0 ? -1 : duplicate << 32 | twin);
}

// voxmma/sparse/sized.py, voxels_sized.
template <class P, class T>
void run_voxels(const VoxelsCall& call, const Frame& frame) {
  using W = std::conditional_t<sizeof(T) == 2, float, double>;
  const P* const points = frame.at<P>(call.points.at);
  const T* const feats = frame.at<T>(call.feats.at);
  const int64_t* const batch = frame.at<int64_t>(call.batch);
  const int64_t n = number_of(frame.at<int64_t>(call.count), call.points.shape[0]);
  const int64_t channels = call.feats.shape[1];
  std::vector<std::pair<int64_t, int64_t>> good;
  int64_t bad = -1;
  for (int64_t row = 0; row < n; ++row) {
    double cell[4] = {batch == nullptr ? 0 : static_cast<double>(batch[row])};
    bool inside = true;
    for (int i = 0; i < 4; ++i) {
      if (i > 0) {
        cell[i] =
            std::floor((static_cast<double>(widen(points[3 * row + i - 1])) - call.origin[i - 1]) / call.edge[i - 1]);
      }
      inside = inside && cell[i] >= call.box.low[i] && cell[i] <= call.box.high[i];
    }
    if (inside) {
      good.emplace_back(pack(static_cast<int64_t>(cell[0]), static_cast<int64_t>(cell[1]),
                             static_cast<int64_t>(cell[2]), static_cast<int64_t>(cell[3])),
                        row);
    } else if (bad < 0) {
      bad = row;
    }
  }
  std::sort(good.begin(), good.end());
  int* const coords = frame.at<int>(call.coords);
  T* const out = frame.at<T>(call.out.at);
  std::fill(coords, coords + 4 * call.capacity, 0);
  std::memset(static_cast<void*>(out), 0, static_cast<size_t>(call.capacity * channels) * sizeof(T));
  int64_t total = 0, longest = 0;
  std::vector<W> sums;
  for (size_t begin = 0, end; begin < good.size(); begin = end, ++total) {
    for (end = begin; end < good.size() && good[end].first == good[begin].first;) ++end;
    const auto many = static_cast<int64_t>(end - begin);
    longest = std::max(longest, many);
    if (total >= call.capacity) continue;
    unpack(good[begin].first, coords + 4 * total);
    for (int64_t c = 0; c < channels; ++c) {
      sums.clear();
      for (size_t i = begin; i < end; ++i) sums.push_back(widen(feats[good[i].second * channels + c]));
      for (size_t left = sums.size(); left > 1; left = (left + 1) / 2) {  // (0, 1) (2, 3) (4)
        for (size_t i = 0; i < left / 2; ++i) sums[i] = sums[2 * i] + sums[2 * i + 1];
        if (left % 2 == 1) sums[left / 2] = sums[left - 1];
      }
      out[total * channels + c] = narrow<T>(call.mean ? sums[0] / static_cast<W>(many) : sums[0]);
    }
  }
  *frame.at<int64_t>(call.made) = total <= call.capacity ? total : 0;
  tell(frame.at<int64_t>(call.status), total, bad, longest);
}

void run_sites(const SitesCall& call, const Frame& frame) {
  const int* const coords = frame.at<int>(call.from.coords);
  const int64_t n = number_of(frame.at<int64_t>(call.from.count), call.from.capacity);
  const Geometry& g = call.geometry;
  std::vector<int64_t> keys;
  bool outside = false;
  for (int64_t row = 0; row < n; ++row) {
    int64_t found[3][9];
    int many[3] = {0, 0, 0};
    for (int a = 0; a < 3; ++a) {
      const int64_t at = coords[4 * row + 1 + a];
      for (int k = 0; k < g.size[a]; ++k) {
        int64_t site = at * g.stride[a] - g.padding[a] + int64_t{k} * g.dilation[a];
        if (!call.to_children) {
          const int64_t times_stride = at + g.padding[a] - int64_t{k} * g.dilation[a];
          site = floor_div(times_stride, g.stride[a]);
          if (site * g.stride[a] != times_stride) continue;
        }
        if (call.shape[a] == 0 || (site >= 0 && site < call.shape[a])) found[a][many[a]++] = site;
      }
    }
    const int64_t batch = coords[4 * row];
    const auto fits = [](int64_t v) { return v >= kCoordMin && v <= kCoordMax; };
    for (int i = 0; i < many[0]; ++i) {
      for (int j = 0; j < many[1]; ++j) {
        for (int k = 0; k < many[2]; ++k) {
          const int64_t x = found[0][i], y = found[1][j], z = found[2][k];
          if (batch < 0 || batch > kBatchMax || !fits(x) || !fits(y) || !fits(z)) {
            outside = true;
          } else {
            keys.push_back(pack(batch, x, y, z));
          }
        }
      }
    }
  }
  std::sort(keys.begin(), keys.end());
  keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
  tell(frame.at<int64_t>(call.status), static_cast<int64_t>(keys.size()), outside, 0);
  const int64_t capacity = call.to.capacity;
  if (static_cast<int64_t>(keys.size()) > capacity) keys.clear();
  int* const made = frame.at<int>(call.to.coords);
  int64_t* const ordered = frame.at<int64_t>(call.to.index[0]);
  int64_t* const rows = frame.at<int64_t>(call.to.index[1]);
  std::fill(made, made + 4 * capacity, 0);
  std::fill(ordered, ordered + capacity, kNone);
  std::fill(rows, rows + capacity, 0);
  for (size_t i = 0; i < keys.size(); ++i) {
    unpack(keys[i], made + 4 * i);
    ordered[i] = keys[i];
    rows[i] = static_cast<int64_t>(i);
  }
  *frame.at<int64_t>(call.to.count) = static_cast<int64_t>(keys.size());
}

// The neighbour table (K, n_out) int32, -1 = none.
void run_map(const MapCall& call, const Frame& frame) {
  const int64_t n_in = number_of(frame.at<int64_t>(call.in.count), call.in.capacity);
  const int64_t n_out = number_of(frame.at<int64_t>(call.out.count), call.out.capacity);
  const int* const coords = frame.at<int>(call.out.coords);
  const int64_t* const keys = frame.at<int64_t>(call.in.index[0]);
  const int64_t* const rows = frame.at<int64_t>(call.in.index[1]);
  int* const table = frame.at<int>(call.map.parts[0]);
  const Geometry& g = call.geometry;
  const int volume = call.map.volume;
  std::fill(table, table + volume * call.map.n_out, -1);
  int64_t pairs = 0;
  for (int64_t row = 0; row < n_out; ++row) {
    const int* const at = coords + 4 * row;
    if (at[0] < 0 || at[0] > kBatchMax) continue;
    int64_t wanted[3][9];
    bool there[3][9];
    for (int a = 0; a < 3; ++a) {
      const int64_t mul = call.reverse ? 1 : g.stride[a], div = call.reverse ? g.stride[a] : 1;
      for (int k = 0; k < g.size[a]; ++k) {
        const int64_t offset = int64_t{k} * g.dilation[a] - g.padding[a];
        const int64_t q = at[1 + a] * mul + (call.reverse ? -offset : offset);
        wanted[a][k] = floor_div(q, div);
        there[a][k] = q % div == 0 && q >= kCoordMin * div && q <= kCoordMax * div;
      }
    }
    int offset = 0;
    for (int i = 0; i < g.size[0]; ++i) {
      for (int j = 0; j < g.size[1]; ++j) {
        for (int k = 0; k < g.size[2]; ++k, ++offset) {
          if (!there[0][i] || !there[1][j] || !there[2][k]) continue;
          const int64_t key = pack(at[0], wanted[0][i], wanted[1][j], wanted[2][k]);
          const int64_t* const found = std::lower_bound(keys, keys + n_in, key);
          if (found == keys + n_in || *found != key) continue;
          table[offset * call.map.n_out + row] = static_cast<int>(rows[found - keys]);
          ++pairs;
        }
      }
    }
  }
  tell(frame.at<int64_t>(call.status), 0, 0, pairs);
}

// ---- convolution

// What becomes of a sum: voxmma/ops/cpu.py, fold.
template <class W>
struct Channels {
  std::vector<W> factor, summand;

  explicit Channels(const ConvCall& call) {
    const int64_t n = call.groups * call.c_out;
    const auto read = [](const Stored& t, int64_t i) {
      double made = 0;
      by_type(t.dtype, [&](auto kind) {
        decltype(kind) value;
        std::memcpy(&value, t.data + i * sizeof(value), sizeof(value));
        made = static_cast<double>(widen(value));
      });
      return made;
    };
    for (int64_t c = 0; c < n; ++c) {
      double factor_c = call.scale != nullptr ? read(*call.scale, c) : 1;
      const bool scaled = call.scale != nullptr || call.var != nullptr;
      if (call.var != nullptr) {
        const double root = std::sqrt(read(*call.var, c) + call.eps);
        factor_c = call.scale != nullptr ? factor_c / root : 1 / root;
      }
      double summand_c = call.bias != nullptr ? read(*call.bias, c) : 0;
      if (call.mean != nullptr)
        summand_c = call.bias != nullptr ? summand_c - read(*call.mean, c) : -read(*call.mean, c);
      const bool moved = call.bias != nullptr || call.mean != nullptr;
      if (moved && scaled) summand_c *= factor_c;
      if (call.shift != nullptr) summand_c = moved ? summand_c + read(*call.shift, c) : read(*call.shift, c);
      if (scaled) factor.push_back(static_cast<W>(factor_c));
      if (moved || call.shift != nullptr) summand.push_back(static_cast<W>(summand_c));
    }
  }
};

template <class W>
W activated(W y, int activation, W slope) {
  switch (activation) {
    case 1: return y < 0 ? W{0} : y;
    case 2: return y > 0 ? y : y * slope;
    case 3: return y / (W{1} + std::exp(-y));
    case 4: return y * W{0.5} * (W{1} + std::erf(y * static_cast<W>(0.70710678118654752440)));
    case 5: return W{1} / (W{1} + std::exp(-y));  // none of a convolution's
    default: return y;
  }
}

enum class Sums { wide, f16, promoted };

// part (c_out) = x (c_in) times w (c_in, c_out), in the order of the channels; with fused multiply-adds where the machine
// has them, as torch's products.
template <class W>
void plain_product(const W* x, const W* w, W* part, int64_t c_in, int64_t c_out) {
  std::fill(part, part + c_out, W{0});
  for (int64_t c = 0; c < c_in; ++c, w += c_out) {
    const W factor = x[c];
#ifdef __FMA__
    for (int64_t o = 0; o < c_out; ++o) part[o] = std::fma(factor, w[o], part[o]);
#elif defined(__aarch64__)
    for (int64_t o = 0; o < c_out; ++o) part[o] = std::fma(factor, w[o], part[o]);
#else
    for (int64_t o = 0; o < c_out; ++o) part[o] += factor * w[o];
#endif
  }
}
#if defined(__x86_64__) && !defined(__FMA__) && defined(__GNUC__)
#define VXM_DISPATCH 1
template <class W>
__attribute__((target("avx2,fma"))) void fused_product(const W* x, const W* w, W* part, int64_t c_in, int64_t c_out) {
  for (int64_t o = 0; o < c_out; ++o) part[o] = W{0};
  for (int64_t c = 0; c < c_in; ++c, w += c_out) {
    const W factor = x[c];
    for (int64_t o = 0; o < c_out; ++o) part[o] = std::fma(factor, w[o], part[o]);
  }
}
#endif
template <class W>
void product(const W* x, const W* w, W* part, int64_t c_in, int64_t c_out) {
#ifdef VXM_DISPATCH
  static const bool fused = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (fused) return fused_product(x, w, part, c_in, c_out);
#endif
  plain_product(x, w, part, c_in, c_out);
}

template <class T, class W>
void run_conv(const ConvCall& call, const Channels<W>& channels, Sums sums, int64_t chunk, bool single_tf32,
              const Place& image, const Frame& frame) {
  const T* const x = frame.at<T>(call.x.at);
  const W* const weights = frame.at<W>(image);
  const int* const table = frame.at<int>(call.map.parts[0]);
  const int64_t n_out = call.map.n_out, groups = call.groups, c_in = call.c_in, c_out = call.c_out;
  const int volume = call.map.volume;
  const bool mirror = call.transpose && call.symmetric;
  std::vector<W> y(groups * c_out), part(c_out), row(groups * c_in);
  for (int64_t r = 0; r < n_out; ++r) {
    std::fill(y.begin(), y.end(), W{0});
    for (int k = 0; k < volume; ++k) {
      const int source = table[(mirror ? volume - 1 - k : k) * n_out + r];
      if (source < 0) continue;
      for (int64_t c = 0; c < groups * c_in; ++c) row[c] = widen(x[source * call.x.strides[0] + c]);
      if constexpr (std::is_same_v<T, float>) {
        if (single_tf32) std::transform(row.begin(), row.end(), row.begin(), tf32);
      }
      for (int64_t g = 0; g < groups; ++g) {
        W* const to = y.data() + g * c_out;
        for (int64_t first = 0; first < c_in; first += chunk) {
          product(row.data() + g * c_in + first, weights + ((k * groups + g) * c_in + first) * c_out, part.data(),
                  std::min(chunk, c_in - first), c_out);
          if constexpr (std::is_same_v<W, float>) {
            if (sums == Sums::f16) {
              for (int64_t o = 0; o < c_out; ++o) to[o] = widen(narrow<Half>(part[o] + to[o]));
              continue;
            }
            if (sums == Sums::promoted) {
              for (int64_t o = 0; o < c_out; ++o) to[o] += widen(narrow<Half>(part[o]));
              continue;
            }
          }
          for (int64_t o = 0; o < c_out; ++o) to[o] += part[o];
        }
      }
    }
    const int64_t n = groups * c_out;
    if (!channels.factor.empty()) {
      for (int64_t o = 0; o < n; ++o) y[o] *= channels.factor[o];
    }
    if (!channels.summand.empty()) {
      for (int64_t o = 0; o < n; ++o) y[o] += channels.summand[o];
    }
    const auto store = [&](auto kind) {
      using Out = decltype(kind);
      if (call.residual.at.there()) {
        const Out* const residual = frame.at<Out>(call.residual.at) + r * call.residual.strides[0];
        for (int64_t o = 0; o < n; ++o) y[o] += static_cast<W>(widen(residual[o]));
      }
      Out* const out = frame.at<Out>(call.out.at) + r * call.out.strides[0];
      for (int64_t o = 0; o < n; ++o)
        out[o] = narrow<Out>(activated(y[o], call.activation, static_cast<W>(call.slope)));
    };
    if (call.out.dtype == call.x.dtype) {
      store(T{});
    } else if constexpr (!std::is_same_v<W, double>) {
      store(float{});
    }
  }
}

// ---- pooling

template <class T>
void run_pool(const PoolCall& call, const Frame& frame) {
  using W = typename WideOf<T>::type;
  const T* const x = frame.at<T>(call.x.at);
  T* const out = frame.at<T>(call.out.at);
  const int* const table = frame.at<int>(call.map.parts[0]);
  const int* const in_count = frame.at<int>(call.in_count);
  const int* const out_count = frame.at<int>(call.out_count);
  const int64_t n_out = call.map.n_out, channels = call.x.shape[1];
  const int volume = call.map.volume;
  std::vector<W> y(channels);
  for (int64_t r = 0; r < n_out; ++r) {
    std::fill(y.begin(), y.end(), W{0});
    bool any = false;
    for (int k = 0; k < volume; ++k) {
      const int source = table[(call.mirror ? volume - 1 - k : k) * n_out + r];
      if (source < 0) continue;
      const W count = in_count != nullptr ? static_cast<W>(std::max(in_count[source], 1)) : W{1};
      for (int64_t c = 0; c < channels; ++c) {
        const W value = widen(x[source * channels + c]);
        if (call.kind == Pool::sum) {
          y[c] += in_count != nullptr ? value / count : value;
        } else if (!any || (!std::isnan(y[c]) &&
                            (std::isnan(value) || (call.kind == Pool::max ? value > y[c] : value < y[c])))) {
          y[c] = value;
        }
      }
      any = true;
    }
    const W count = out_count != nullptr ? static_cast<W>(std::max(out_count[r], 1)) : W{1};
    for (int64_t c = 0; c < channels; ++c)
      out[r * channels + c] = narrow<T>(out_count != nullptr ? y[c] / count : y[c]);
  }
}

// ---- rows

// Calls f(element of from, element of to) for all, last dimension fastest.
template <class F>
void for_elements(const Array& from, const Array& to, const F& f) {
  const size_t dims = from.shape.size();
  if (from.count() == 0) return;
  Dims at(dims, 0);
  int64_t a = 0, b = 0;
  while (true) {
    f(a, b);
    size_t i = dims;
    for (; i-- > 0;) {
      a += from.strides[i];
      b += to.strides[i];
      if (++at[i] < from.shape[i]) break;
      a -= from.strides[i] * from.shape[i];
      b -= to.strides[i] * from.shape[i];
      at[i] = 0;
    }
    if (i == static_cast<size_t>(-1)) return;
  }
}

void copy_array(const Array& from, const Array& to, const Frame& frame) {
  const auto* const source = frame.at<unsigned char>(from.at);
  auto* const target = frame.at<unsigned char>(to.at);
  const int64_t size = bytes_of(from.dtype), dims = static_cast<int64_t>(from.shape.size());
  if (dims > 0 && from.strides[dims - 1] == 1 && to.strides[dims - 1] == 1) {  // runs of the last dimension
    Array rows = from, ends = to;
    const int64_t run = rows.shape.back() * size;
    for (Array* const part : {&rows, &ends}) {
      part->shape.pop_back();
      part->strides.pop_back();
    }
    if (run > 0)
      for_elements(rows, ends, [&](int64_t a, int64_t b) { std::memcpy(target + b * size, source + a * size, run); });
    return;
  }
  for_elements(from, to, [&](int64_t a, int64_t b) { std::memcpy(target + b * size, source + a * size, size); });
}

void run_dense(const DenseCall& call, const Frame& frame) {
  const int* const coords = frame.at<int>(call.coords);
  const auto* const x = frame.at<unsigned char>(call.x.at);
  auto* const grid = frame.at<unsigned char>(call.grid.at);
  const int64_t bytes = call.x.shape[1] * bytes_of(call.x.dtype);
  std::memset(grid, 0, call.grid.count() * bytes_of(call.grid.dtype));
  const int64_t n = number_of(frame.at<int64_t>(call.count), call.x.shape[0]);
  int64_t outside = -1;
  for (int64_t row = 0; row < n; ++row) {
    int64_t cell = coords[4 * row];
    bool inside = cell >= 0 && cell < call.samples;
    for (int a = 0; a < 3 && inside; ++a) {
      const int64_t at = coords[4 * row + 1 + a] - call.origin[a];
      inside = at >= 0 && at < call.shape[a];
      cell = cell * call.shape[a] + at;
    }
    if (inside) {
      std::memcpy(grid + cell * bytes, x + row * bytes, bytes);
    } else if (outside < 0) {
      outside = row;
    }
  }
  tell(frame.at<int64_t>(call.status), outside, 0, 0);
}

// ---- the backend

class Cpu : public Backend {
 public:
  explicit Cpu(const vxm_allocator& allocator) : allocator_(allocator) {}

  void* allocate(size_t bytes) override {
    void* const made = allocator_.allocate != nullptr ? allocator_.allocate(allocator_.context, bytes)
                                                      : std::aligned_alloc(256, (bytes + 255) / 256 * 256);
    if (made == nullptr) fail(VXM_ERROR_MEMORY, "there are no ", bytes, " bytes of memory");
    std::memset(made, 0, bytes);
    return made;
  }
  void release(void* memory) override {
    if (allocator_.allocate != nullptr) {
      allocator_.release(allocator_.context, memory);
    } else {
      std::free(memory);
    }
  }
  void finish(unsigned char*) override {}

  int64_t index_bytes(int, int64_t capacity) const override { return times(8, capacity); }
  std::vector<int64_t> map_bytes(const MapCall& call) override {
    return {times(4, times(call.map.volume, call.map.n_out))};
  }
  int map_parts() const override { return 4; }

  Work index(const IndexCall& call) override {
    return {0, [call](const Frame& frame, unsigned char*) { run_index(call, frame); }};
  }
  Work sites(const SitesCall& call) override {
    return {0, [call](const Frame& frame, unsigned char*) { run_sites(call, frame); }};
  }
  Work maps(const std::vector<MapCall>& calls) override {
    return {0, [calls](const Frame& frame, unsigned char*) {
              for (const MapCall& call : calls) run_map(call, frame);
            }};
  }
  Work voxels(const VoxelsCall& call) override {
    Work made;
    by_type(call.points.dtype, [&](auto point) {
      by_type(call.feats.dtype, [&](auto feat) {
        made.run = [call](const Frame& frame, unsigned char*) {
          run_voxels<decltype(point), decltype(feat)>(call, frame);
        };
      });
    });
    return made;
  }

  Work conv(const ConvCall& call) override {
    Work made;
    Sums sums = call.accumulator == "fp16" ? Sums::f16 : Sums::wide;
    int64_t chunk = call.c_in;
    const bool single_tf32 = call.tile == "cpu_tf32" && call.x.dtype == DType::f32;
    if (call.accumulator == "fp16_promoted") {
      sums = Sums::promoted;
      constexpr std::pair<const char*, int64_t> kChunks[] = {
          {"cpu_p32", 32}, {"cpu_p64", 64}, {"cpu_p128", 128}, {"cpu_poff", INT64_MAX}};
      const auto found = std::find_if(std::begin(kChunks), std::end(kChunks),
                                      [&](const auto& entry) { return call.tile == entry.first; });
      if (found == std::end(kChunks)) fail(VXM_ERROR_UNSUPPORTED, "tile '", call.tile, "'");
      chunk = std::min(found->second, call.c_in);
    } else if (call.tile != "cpu" && !single_tf32) {
      fail(VXM_ERROR_UNSUPPORTED, "tile '", call.tile, "'");
    }
    by_type(call.x.dtype, [&](auto kind) {
      using T = decltype(kind);
      using W = typename WideOf<T>::type;
      const Place image{weights<T, W>(call, single_tf32), true};
      const Channels<W> channels(call);
      made.run = [call, channels, sums, chunk, single_tf32, image](const Frame& frame, unsigned char*) {
        run_conv<T, W>(call, channels, sums, chunk, single_tf32, image, frame);
      };
    });
    return made;
  }

  Work pool(const PoolCall& call) override {
    Work made;
    by_type(call.x.dtype, [&](auto kind) {
      made.run = [call](const Frame& frame, unsigned char*) { run_pool<decltype(kind)>(call, frame); };
    });
    return made;
  }
  Work counts(const Map& map, const Place& out) override {
    return {0, [map, out](const Frame& frame, unsigned char*) {
              const int* const table = frame.at<int>(map.parts[0]);
              int* const counts = frame.at<int>(out);
              for (int64_t r = 0; r < map.n_out; ++r) {
                counts[r] = 0;
                for (int k = 0; k < map.volume; ++k) counts[r] += table[k * map.n_out + r] >= 0;
              }
            }};
  }
  Work dense(const DenseCall& call) override {
    return {0, [call](const Frame& frame, unsigned char*) { run_dense(call, frame); }};
  }
  Work finite(const Array& x, const Place& count, const Place& status) override {
    Work made;
    by_type(x.dtype, [&](auto kind) {
      made.run = [x, count, status](const Frame& frame, unsigned char*) {
        using T = decltype(kind);
        const T* const values = frame.at<T>(x.at);
        const int64_t n = number_of(frame.at<int64_t>(count), x.shape[0]);
        int64_t bad = -1;
        for (int64_t i = 0; i < n * x.shape[1] && bad < 0; ++i) {
          if (!std::isfinite(widen(values[i]))) bad = i / x.shape[1];
        }
        tell(frame.at<int64_t>(status), bad, 0, 0);
      };
    });
    return made;
  }
  Work rows(const Array& x, const Place& count, const Array& out) override {
    return {0, [x, count, out](const Frame& frame, unsigned char*) {
              const int64_t bytes = x.count() * bytes_of(x.dtype), row = x.shape[0] > 0 ? bytes / x.shape[0] : 0;
              const int64_t used = row * number_of(frame.at<int64_t>(count), x.shape[0]);
              auto* const to = frame.at<unsigned char>(out.at);
              std::memcpy(to, frame.at<unsigned char>(x.at), used);
              std::memset(to + used, 0, bytes - used);
            }};
  }
  Work copy(const Array& from, const Array& to) override {
    return {0, [from, to](const Frame& frame, unsigned char*) { copy_array(from, to, frame); }};
  }
  Work binary(Binary op, const Array& a, const Array& b, const Array& out) override {
    Work made;
    by_type(a.dtype, [&](auto kind) {
      made.run = [op, a, b, out](const Frame& frame, unsigned char*) {
        using T = decltype(kind);
        const T *const x = frame.at<T>(a.at), *const y = frame.at<T>(b.at);
        T* const to = frame.at<T>(out.at);
        for (int64_t i = 0, n = a.count(); i < n; ++i) {
          to[i] = narrow<T>(op == Binary::add ? widen(x[i]) + widen(y[i]) : widen(x[i]) * widen(y[i]));
        }
      };
    });
    return made;
  }
  Work linear(const LinearCall& call) override {
    Work made;
    by_type(call.x.dtype, [&](auto kind) {
      made.run = [call](const Frame& frame, unsigned char*) {
        using T = decltype(kind);
        using W = typename WideOf<T>::type;
        const int64_t n = call.x.shape[0], c_in = call.x.shape[1], c_out = call.out.shape[1];
        const T *const x = frame.at<T>(call.x.at), *const bias = frame.at<T>(call.bias);
        const T* const given = frame.at<T>(call.weight);
        T* const to = frame.at<T>(call.out.at);
        std::vector<W> weight(c_in * c_out), row(c_in), y(c_out);
        for (int64_t i = 0; i < c_in * c_out; ++i) weight[i] = widen(given[i]);
        for (int64_t r = 0; r < n; ++r) {
          for (int64_t c = 0; c < c_in; ++c) row[c] = widen(x[r * c_in + c]);
          product(row.data(), weight.data(), y.data(), c_in, c_out);
          for (int64_t o = 0; o < c_out; ++o) {
            to[r * c_out + o] = narrow<T>(bias == nullptr ? y[o] : y[o] + static_cast<W>(widen(bias[o])));
          }
        }
      };
    });
    return made;
  }
  Work affine(const Array& x, const Place& factor, const Place& summand, const Array& out) override {
    Work made;
    by_type(x.dtype, [&](auto kind) {
      made.run = [=](const Frame& frame, unsigned char*) {
        using T = decltype(kind);
        using W = typename WideOf<T>::type;
        const int64_t channels = x.shape[1];
        const T* const from = frame.at<T>(x.at);
        const W *const a = frame.at<W>(factor), *const b = frame.at<W>(summand);
        T* const to = frame.at<T>(out.at);
        for (int64_t i = 0, n = x.count(); i < n; ++i) {
          to[i] = narrow<T>(static_cast<W>(widen(from[i])) * a[i % channels] + b[i % channels]);
        }
      };
    });
    return made;
  }
  Work unary(Unary op, double slope, const Array& x, const Array& out) override {
    Work made;
    by_type(x.dtype, [&](auto kind) {
      made.run = [op, slope, x, out](const Frame& frame, unsigned char*) {
        using T = decltype(kind);
        const T* const from = frame.at<T>(x.at);
        T* const to = frame.at<T>(out.at);
        using W = typename WideOf<T>::type;
        for (int64_t i = 0, n = x.count(); i < n; ++i) {
          to[i] = narrow<T>(activated(static_cast<W>(widen(from[i])), 1 + static_cast<int>(op), static_cast<W>(slope)));
        }
      };
    });
    return made;
  }

  bool limits(const MapCall&, int64_t*, int64_t*) const override { return false; }

  void copy_in(void* to, size_t pitch, const void* from, size_t width, size_t rows, void*) override {
    if (width == 0) return;
    for (size_t r = 0; r < rows; ++r) {
      std::memcpy(static_cast<char*>(to) + r * pitch, static_cast<const char*>(from) + r * width, width);
    }
  }
  void clear(void* to, size_t bytes, void*) override { std::memset(to, 0, bytes); }

  void set_count(int64_t* to, int64_t value, void*) override { *to = value; }
  void copy_out(void* to, const void* from, size_t pitch, size_t width, size_t rows) override {
    if (width == 0) return;
    for (size_t r = 0; r < rows; ++r) {
      std::memcpy(static_cast<char*>(to) + r * width, static_cast<const char*>(from) + r * pitch, width);
    }
  }
  void begin(void*) override {}
  void replay(const std::function<void(void*)>& work, void* stream) override { work(stream); }
  void end(const void* status, size_t, void*) override { status_ = static_cast<const int64_t*>(status); }
  const int64_t* status() override { return status_; }
  void wait() override {}
  std::unique_ptr<Active> activate() override { return std::make_unique<Active>(); }

 private:
  vxm_allocator allocator_;
  const int64_t* status_ = nullptr;

  void write(void* to, const void* from, size_t bytes) override { std::memcpy(to, from, bytes); }

  // Weights (K, groups, c_in, c_out) in the type of the sums, rounded to that of the rows first.
  template <class T, class W>
  int64_t weights(const ConvCall& call, bool single_tf32) {
    const Stored& given = *call.weight;
    const int64_t pairs = call.map.volume * call.groups, c_in = call.c_in, c_out = call.c_out;
    std::vector<W> made(times(times(pairs, c_in), c_out));
    by_type(given.dtype, [&](auto kind) {
      using G = decltype(kind);
      const G* const from = reinterpret_cast<const G*>(given.data);
      for (int64_t p = 0; p < pairs; ++p) {
        for (int64_t i = 0; i < c_in; ++i) {
          for (int64_t o = 0; o < c_out; ++o) {
            const auto value = widen(from[call.transpose ? (p * c_out + o) * c_in + i : (p * c_in + i) * c_out + o]);
            W rounded;
            if constexpr (std::is_same_v<W, double>) {
              rounded = static_cast<double>(value);
            } else {
              rounded = widen(narrow<T>(static_cast<float>(value)));
            }
            if constexpr (std::is_same_v<T, float>) {
              if (single_tf32) rounded = tf32(rounded);
            }
            made[(p * c_in + i) * c_out + o] = rounded;
          }
        }
      }
    });
    return constant(made.data(), static_cast<int64_t>(made.size() * sizeof(W)));
  }
};

}  // namespace

std::unique_ptr<Backend> cpu_backend(const vxm_options& options) { return std::make_unique<Cpu>(options.allocator); }

}  // namespace vxm
