// What a program consists of once it is laid out: calls with places for their tensors, which a device makes work of.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "file.h"

namespace vxm {

using Dims = std::vector<int64_t>;

// Where a tensor lies: in the memory that frames work in, or among the weights.
struct Place {
  int64_t offset = -1;
  bool constant = false;
  bool there() const { return offset >= 0; }
};

// A tensor of any strides.
struct Array {
  Place at;
  DType dtype = DType::f32;
  Dims shape, strides;  // in elements

  int64_t count() const {
    int64_t made = 1;
    for (const int64_t side : shape) made = times(made, side);
    return made;
  }
  bool contiguous() const {
    int64_t step = 1;
    for (size_t i = shape.size(); i-- > 0; step = times(step, shape[i])) {
      if (shape[i] > 1 && strides[i] != step) return false;
    }
    return true;
  }
};
Dims dense_strides(const Dims& shape);

// Out * stride - padding + k * dilation meets In (voxmma/sparse/maps.py).
struct Geometry {
  int size[3], stride[3], dilation[3], padding[3];
  int volume() const { return size[0] * size[1] * size[2]; }
};

struct Bounds {
  int low[4], high[4];  // batch, x, y, z
};

// A coordinate set: rows behind the count mean nothing. index: of the device's own making.
struct Set {
  Place coords, count, inner, index[2];
  int64_t capacity = 0;
};

// A kernel map, of the device's own making.
struct Map {
  static constexpr int kParts = 6;
  Place parts[kParts];
  int64_t n_in = 0, n_out = 0;
  int volume = 0;
};

struct IndexCall {
  Set set;
  Bounds bounds;
  Place status;
};
struct SitesCall {
  Set from, to;
  Geometry geometry;
  bool to_children;
  int shape[3];   // 0: no borders
  Bounds bounds;  // of the source
  Place status;
};
// Voxels of points: those of points.capacity rows that there are, in order.
struct VoxelsCall {
  Array points, feats, out;  // out: (capacity, channels)
  Place batch, count;        // batch: none: sample 0
  Bounds box;
  double edge[3], origin[3];
  bool mean;
  Place coords, made, status;
  int64_t capacity;
};
struct MapCall {
  Set in, out;
  Geometry geometry;
  bool reverse;
  double room;
  Map map;
  Place status;
};
struct ConvCall {
  Array x, residual, out;
  Map map;
  const Stored *weight, *bias, *scale, *shift, *mean, *var;  // null: none
  double eps, slope;
  int64_t groups, c_in, c_out;
  bool symmetric, transpose;
  std::string accumulator, tile;
  int activation;  // as kernels.h has them
};
enum class Pool { sum, max, min };
struct PoolCall {
  Pool kind;
  Array x, out;
  Map map;
  Place in_count, out_count;
  bool mirror;
};
struct DenseCall {
  Array x, grid;  // the grid contiguous as (samples, x, y, z, channels)
  Place coords, count, status;
  int64_t samples, shape[3], origin[3];
};

// y = x * weight + bias, the sum over c_in in fp32 (fp64 for fp64).
struct LinearCall {
  Array x, out;
  Place weight, bias;  // (c_in, c_out) contiguous and (c_out), of x's dtype; bias: maybe none
};
enum class Unary { relu, leaky_relu, silu, gelu, sigmoid };
enum class Binary { add, mul };

// Reads as many bytes as it wants of frames and weights.
struct Frame {
  unsigned char *work, *weights;
  void* stream;
  template <class T>
  T* at(const Place& place) const {
    return place.there() ? reinterpret_cast<T*>((place.constant ? weights : work) + place.offset) : nullptr;
  }
};

// Work of a frame, and how much memory it wants for itself meanwhile.
struct Work {
  int64_t scratch = 0;
  std::function<void(const Frame&, unsigned char* scratch)> run;
};

class Backend {
 public:
  virtual ~Backend() = default;

  // Memory of the device, 256-byte aligned.
  virtual void* allocate(size_t bytes) = 0;
  virtual void release(void* memory) = 0;

  // Weights, put together before any memory is taken: bytes to upload, and room to make things in.
  int64_t constant(const void* data, int64_t bytes, int64_t room = 0);
  int64_t constant_bytes() const { return constants_; }
  void upload(unsigned char* weights);
  virtual void finish(unsigned char* weights) = 0;  // what is made of weights once; waits

  // Bytes of the parts of a set and of a map.
  virtual int64_t index_bytes(int part, int64_t capacity) const = 0;
  virtual std::vector<int64_t> map_bytes(const MapCall& call) = 0;
  // Which parts the file has: the others are inner.
  virtual int map_parts() const = 0;

  virtual Work index(const IndexCall&) = 0;
  virtual Work sites(const SitesCall&) = 0;
  virtual Work maps(const std::vector<MapCall>&) = 0;
  virtual Work voxels(const VoxelsCall&) = 0;
  virtual Work conv(const ConvCall&) = 0;
  virtual Work pool(const PoolCall&) = 0;
  virtual Work counts(const Map&, const Place& out) = 0;
  virtual Work dense(const DenseCall&) = 0;
  virtual Work finite(const Array& x, const Place& count, const Place& status) = 0;
  virtual Work rows(const Array& x, const Place& count, const Array& out) = 0;  // zeros behind the count
  virtual Work copy(const Array& from, const Array& to) = 0;                    // shapes are equal
  // Floating point, contiguous.
  virtual Work binary(Binary kind, const Array& a, const Array& b, const Array& out) = 0;
  virtual Work unary(Unary kind, double slope, const Array& x, const Array& out) = 0;
  virtual Work linear(const LinearCall&) = 0;
  // x * factor + summand, channel by channel; both in the type of sums.
  virtual Work affine(const Array& x, const Place& factor, const Place& summand, const Array& out) = 0;

  // A kernel map's limits, passes and units, where a plan has any: what the status is compared with.
  virtual bool limits(const MapCall&, int64_t* passes, int64_t* units) const = 0;

  // Rows of `width` bytes, `pitch` bytes apart where they go.
  virtual void copy_in(void* to, size_t pitch, const void* from, size_t width, size_t rows, void* stream) = 0;
  virtual void set_count(int64_t* to, int64_t value, void* stream) = 0;
  virtual void clear(void* to, size_t bytes, void* stream) = 0;
  // Rows of `width` bytes, `pitch` bytes apart where they come from. Waits; after the last frame.
  virtual void copy_out(void* to, const void* from, size_t pitch, size_t width, size_t rows) = 0;

  // Runs `work` on the stream; the first time is told, so that it may be recorded.
  virtual void begin(void* stream) = 0;  // behind the frame before
  virtual void replay(const std::function<void(void* stream)>& work, void* stream) = 0;
  virtual void end(const void* status, size_t bytes, void* stream) = 0;  // status is on its way to the host
  virtual const int64_t* status() = 0;                                   // waits
  virtual void wait() = 0;

  // Current on the calling thread while it lives.
  struct Active {
    virtual ~Active() = default;
  };
  virtual std::unique_ptr<Active> activate() = 0;
  virtual int device() const { return 0; }
  virtual bool cuda() const { return false; }

 private:
  struct Blob {
    int64_t offset, bytes;
    std::vector<unsigned char> copy;
  };
  std::vector<Blob> blobs_;
  int64_t constants_ = 0;
  virtual void write(void* to, const void* from, size_t bytes) = 0;
};

std::unique_ptr<Backend> cpu_backend(const vxm_options& options);
std::unique_ptr<Backend> cuda_backend(const vxm_options& options, const Json& machine);  // DEVICE where it cannot be

}  // namespace vxm
