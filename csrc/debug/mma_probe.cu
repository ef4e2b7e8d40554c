// mma_probe and mma_rate: see voxmma/probe.h. Plain PTX, so that nothing stands between the question and the hardware.
#include "voxmma/probe.h"

#include <algorithm>
#include <limits>

namespace voxmma {
namespace {

constexpr int kWarp = 32;

__host__ __device__ constexpr bool is_wgmma(MmaKind kind) { return int(kind) >= 4; }
__host__ __device__ constexpr MmaKind plain(MmaKind kind) { return MmaKind(int(kind) & 3); }
__host__ __device__ constexpr bool half_accum(MmaKind kind) { return plain(kind) == MmaKind::f16_f16; }
__host__ __device__ constexpr bool tf32(MmaKind kind) { return plain(kind) == MmaKind::tf32_f32; }

// 32-bit words of one row of a or b (both depths fill 8 words), and of one row of c or d.
constexpr int kRowWords = 8;
__host__ __device__ constexpr int out_words(MmaKind kind) { return half_accum(kind) ? 4 : 8; }

// One warp's operands of an m16n8 tile: A 4 words, B 2 words, accumulators 4 fp32 or 2 packed half2.
struct Fragment {
  uint32_t a[4], b[2], c[4];
};

#define VOXMMA_MMA_F32(SHAPE, TYPE)                                     \
  asm volatile("mma.sync.aligned." SHAPE ".row.col.f32." TYPE "." TYPE  \
               ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "                    \
               "{%8,%9}, {%0,%1,%2,%3};"                                \
               : "+r"(f.c[0]), "+r"(f.c[1]), "+r"(f.c[2]), "+r"(f.c[3]) \
               : "r"(f.a[0]), "r"(f.a[1]), "r"(f.a[2]), "r"(f.a[3]), "r"(f.b[0]), "r"(f.b[1]))

template <MmaKind kKind>
__device__ void mma(Fragment& f) {
  if constexpr (kKind == MmaKind::f16_f16) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0,%1}, {%2,%3,%4,%5}, {%6,%7}, {%0,%1};"
                 : "+r"(f.c[0]), "+r"(f.c[1])
                 : "r"(f.a[0]), "r"(f.a[1]), "r"(f.a[2]), "r"(f.a[3]), "r"(f.b[0]), "r"(f.b[1]));
  } else if constexpr (kKind == MmaKind::f16_f32) {
    VOXMMA_MMA_F32("m16n8k16", "f16");
  } else if constexpr (kKind == MmaKind::bf16_f32) {
    VOXMMA_MMA_F32("m16n8k16", "bf16");
  } else {
    VOXMMA_MMA_F32("m16n8k8", "tf32");
  }
}
#undef VOXMMA_MMA_F32

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// No-swizzle, K-major B of 8 rows: two 8 x 16-byte core matrices, 128 bytes apart.
__device__ uint64_t b_descriptor(const void* shared) {
  const uint64_t address = __cvta_generic_to_shared(shared);
  return ((address & 0x3FFFF) >> 4) | (uint64_t(128 >> 4) << 16) | (uint64_t(128 >> 4) << 32);
}

#define VOXMMA_WGMMA_F32(SHAPE, TYPE, TAIL)                                \
  asm volatile("wgmma.mma_async.sync.aligned." SHAPE ".f32." TYPE "." TYPE \
               " {%0,%1,%2,%3}, {%4,%5,%6,%7}, %8, "                       \
               "1, 1, 1" TAIL ";"                                          \
               : "+r"(f.c[0]), "+r"(f.c[1]), "+r"(f.c[2]), "+r"(f.c[3])    \
               : "r"(f.a[0]), "r"(f.a[1]), "r"(f.a[2]), "r"(f.a[3]), "l"(b))

template <MmaKind kKind>
__device__ void wgmma(Fragment& f, uint64_t b) {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  if constexpr (kKind == MmaKind::f16_f16) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f16.f16.f16 {%0,%1}, {%2,%3,%4,%5}, %6, 1, 1, 1, 0;"
                 : "+r"(f.c[0]), "+r"(f.c[1])
                 : "r"(f.a[0]), "r"(f.a[1]), "r"(f.a[2]), "r"(f.a[3]), "l"(b));
  } else if constexpr (kKind == MmaKind::f16_f32) {
    VOXMMA_WGMMA_F32("m64n8k16", "f16", ", 0");
  } else if constexpr (kKind == MmaKind::bf16_f32) {
    VOXMMA_WGMMA_F32("m64n8k16", "bf16", ", 0");
  } else {
    VOXMMA_WGMMA_F32("m64n8k8", "tf32", "");
  }
  asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
}
#undef VOXMMA_WGMMA_F32
#endif

// A block holds four warps: four tiles for mma.sync, one tile for wgmma (whose warps 1 to 3 carry zero rows).
template <MmaKind kKind>
__global__ void __launch_bounds__(4 * kWarp)
    probe_kernel(const uint32_t* __restrict__ a, const uint32_t* __restrict__ b, const uint32_t* __restrict__ c,
                 uint32_t* __restrict__ d, int64_t tiles) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int64_t tile = is_wgmma(kKind) ? int64_t(blockIdx.x) : int64_t(blockIdx.x) * 4 + warp;
  const bool active = tile < tiles && (!is_wgmma(kKind) || warp == 0);
  const int row = lane / 4, column = lane % 4;
  constexpr int kOut = out_words(kKind), kPairs = half_accum(kKind) ? 1 : 2;
  // In words both depths look alike: column and column + 4 of rows row and row + 8 (tf32 word = 1 value, else 2).
  Fragment f{};
  if (active) {
    a += tile * 16 * kRowWords;
    b += tile * 8 * kRowWords;
    c += tile * 16 * kOut;
    d += tile * 16 * kOut;
    for (int i = 0; i < 4; ++i) f.a[i] = a[(row + 8 * (i % 2)) * kRowWords + column + 4 * (i / 2)];
    for (int i = 0; i < 2; ++i) f.b[i] = b[row * kRowWords + column + 4 * i];
    for (int i = 0; i < 2 * kPairs; ++i) f.c[i] = c[(row + 8 * (i / kPairs)) * kOut + column * kPairs + i % kPairs];
  }
  if constexpr (is_wgmma(kKind)) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    __shared__ alignas(128) uint32_t shared_b[2 * 8 * 4];  // [core matrix][row][16 bytes]
    if (warp == 0)
      for (int i = 0; i < 2; ++i) shared_b[(i * 8 + row) * 4 + column] = f.b[i];
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    wgmma<plain(kKind)>(f, b_descriptor(shared_b));
#else
    return;  // supported() refuses the kind where this build would run
#endif
  } else {
    mma<kKind>(f);
  }
  if (active)
    for (int i = 0; i < 2 * kPairs; ++i) d[(row + 8 * (i / kPairs)) * kOut + column * kPairs + i % kPairs] = f.c[i];
}

template <MmaKind kKind>
cudaError_t probe(const void* a, const void* b, const void* c, void* d, int64_t tiles, cudaStream_t stream) {
  const int64_t blocks = is_wgmma(kKind) ? tiles : (tiles + 3) / 4;
  if (blocks > std::numeric_limits<int>::max()) return cudaErrorInvalidValue;
  if (blocks == 0) return cudaSuccess;
  probe_kernel<kKind>
      <<<unsigned(blocks), 4 * kWarp, 0, stream>>>(static_cast<const uint32_t*>(a), static_cast<const uint32_t*>(b),
                                                   static_cast<const uint32_t*>(c), static_cast<uint32_t*>(d), tiles);
  return cudaGetLastError();
}

constexpr int kChains = 8;     // independent accumulators a warp keeps in flight
constexpr int kRateWarps = 8;  // warps of a block; two blocks fit on a multiprocessor
// The best of many short runs: on a GPU that others use too, most runs fit between two of their time slices.
constexpr int kRateRuns = 16;
constexpr double kRateSeconds = 3e-4;

template <MmaKind kKind>
__global__ void __launch_bounds__(kRateWarps* kWarp, 2) rate_kernel(int iterations, uint32_t* sink) {
  Fragment f[kChains];
  for (int i = 0; i < kChains; ++i) {
    for (uint32_t& word : f[i].a) word = 0x2C002C00u + threadIdx.x;  // fp16 1/16 and near; small in every format
    for (uint32_t& word : f[i].b) word = 0x2C002C00u + i;
    for (uint32_t& word : f[i].c) word = 0;
  }
  for (int step = 0; step < iterations; ++step)
#pragma unroll
    for (int i = 0; i < kChains; ++i) mma<kKind>(f[i]);
  uint32_t all = 0;
  for (int i = 0; i < kChains; ++i) all ^= f[i].c[0] ^ f[i].c[1];
  if (iterations < 0) *sink = all;  // never taken: keeps the accumulators alive
}

template <MmaKind kKind>
cudaError_t rate(double* tflops, cudaStream_t stream) {
  int device = 0, sms = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  cudaEvent_t start = nullptr, stop = nullptr;
  if (error == cudaSuccess) error = cudaEventCreate(&start);
  if (error == cudaSuccess) error = cudaEventCreate(&stop);
  const double flops_per_step = 2.0 * sms * kRateWarps * kChains * 2.0 * 16 * 8 * (tf32(kKind) ? 8 : 16);
  int iterations = 256;
  double best = 0;
  for (int run = 0; run < kRateRuns && error == cudaSuccess; ++run) {  // the first ones also wake the clocks
    error = cudaEventRecord(start, stream);
    if (error == cudaSuccess) {
      rate_kernel<kKind><<<2 * sms, kRateWarps * kWarp, 0, stream>>>(iterations, nullptr);
      error = cudaGetLastError();
    }
    float ms = 0;
    if (error == cudaSuccess) error = cudaEventRecord(stop, stream);
    if (error == cudaSuccess) error = cudaEventSynchronize(stop);
    if (error == cudaSuccess) error = cudaEventElapsedTime(&ms, start, stop);
    if (error != cudaSuccess) break;
    const double seconds = std::max(double(ms) * 1e-3, 1e-6);
    const double rate = flops_per_step * iterations / seconds;
    best = std::max(best, rate);
    iterations = int(std::clamp(kRateSeconds * best / flops_per_step, 256.0, 4e6));
  }
  *tflops = best * 1e-12;
  if (start) cudaEventDestroy(start);
  if (stop) cudaEventDestroy(stop);
  return error;
}

// What the current device lacks for a kind, as an error.
cudaError_t supported(int kind) {
  if (kind < 0 || kind >= kMmaKinds) return cudaErrorInvalidValue;
  int device = 0, major = 0, minor = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  if (error != cudaSuccess) return error;
#ifdef VOXMMA_SM90  // the build holds sm_90a code
  const bool wgmma_here = major == 9 && minor == 0;
#else
  const bool wgmma_here = false;
#endif
  const bool here = is_wgmma(MmaKind(kind)) ? wgmma_here : major >= 8;
  return here ? cudaSuccess : cudaErrorNotSupported;
}

}  // namespace

cudaError_t mma_probe(int kind, const void* a, const void* b, const void* c, void* d, int64_t tiles,
                      cudaStream_t stream) {
  if (tiles < 0) return cudaErrorInvalidValue;
  if (cudaError_t error = supported(kind); error != cudaSuccess) return error;
  switch (MmaKind(kind)) {
    case MmaKind::f16_f32: return probe<MmaKind::f16_f32>(a, b, c, d, tiles, stream);
    case MmaKind::f16_f16: return probe<MmaKind::f16_f16>(a, b, c, d, tiles, stream);
    case MmaKind::bf16_f32: return probe<MmaKind::bf16_f32>(a, b, c, d, tiles, stream);
    case MmaKind::tf32_f32: return probe<MmaKind::tf32_f32>(a, b, c, d, tiles, stream);
    case MmaKind::wgmma_f16_f32: return probe<MmaKind::wgmma_f16_f32>(a, b, c, d, tiles, stream);
    case MmaKind::wgmma_f16_f16: return probe<MmaKind::wgmma_f16_f16>(a, b, c, d, tiles, stream);
    case MmaKind::wgmma_bf16_f32: return probe<MmaKind::wgmma_bf16_f32>(a, b, c, d, tiles, stream);
    case MmaKind::wgmma_tf32_f32: return probe<MmaKind::wgmma_tf32_f32>(a, b, c, d, tiles, stream);
  }
  return cudaErrorInvalidValue;
}

cudaError_t mma_rate(int kind, double* tflops, cudaStream_t stream) {
  if (kind < 0 || is_wgmma(MmaKind(kind))) return cudaErrorInvalidValue;
  if (cudaError_t error = supported(kind); error != cudaSuccess) return error;
  switch (MmaKind(kind)) {
    case MmaKind::f16_f32: return rate<MmaKind::f16_f32>(tflops, stream);
    case MmaKind::f16_f16: return rate<MmaKind::f16_f16>(tflops, stream);
    case MmaKind::bf16_f32: return rate<MmaKind::bf16_f32>(tflops, stream);
    default: return rate<MmaKind::tf32_f32>(tflops, stream);
  }
}

}  // namespace voxmma
