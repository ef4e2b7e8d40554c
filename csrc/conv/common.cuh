// Helpers shared by every convolution kernel: types, asynchronous copies, ldmatrix, swizzle, stores, launch.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "voxmma/kernels.h"

namespace voxmma {

// ---- types -----------------------------------------------------------------------------------------------------
template <DType D>
struct TypeOf;
template <>
struct TypeOf<DType::f16> {
  using type = __half;
};
template <>
struct TypeOf<DType::bf16> {
  using type = __nv_bfloat16;
};
template <>
struct TypeOf<DType::f32> {
  using type = float;
};
template <>
struct TypeOf<DType::f64> {
  using type = double;
};
template <DType D>
using type_of = typename TypeOf<D>::type;

constexpr int dtype_bytes(DType d) { return d == DType::f64 ? 8 : d == DType::f32 ? 4 : 2; }
constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// One rounding, to nearest even, whatever the pair of types.
template <class To, class From>
__device__ __forceinline__ To convert(From v) {
  if constexpr (std::is_same_v<To, From>) {
    return v;
  } else if constexpr (std::is_same_v<From, __half>) {
    return convert<To>(__half2float(v));
  } else if constexpr (std::is_same_v<From, __nv_bfloat16>) {
    return convert<To>(__bfloat162float(v));
  } else if constexpr (std::is_same_v<To, __half>) {
    if constexpr (std::is_same_v<From, double>)
      return __double2half(v);
    else
      return __float2half_rn(v);
  } else if constexpr (std::is_same_v<To, __nv_bfloat16>) {
    if constexpr (std::is_same_v<From, double>)
      return __double2bfloat16(v);
    else
      return __float2bfloat16_rn(v);
  } else {
    return static_cast<To>(v);
  }
}

// Two floats as one 32-bit register of a 16-bit type, x in the low half.
template <class T>
__device__ __forceinline__ uint32_t pack2(float x, float y) {
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 v = __floats2half2_rn(x, y);
    return reinterpret_cast<const uint32_t&>(v);
  } else {
    const __nv_bfloat162 v = __floats2bfloat162_rn(x, y);
    return reinterpret_cast<const uint32_t&>(v);
  }
}

__device__ __forceinline__ float2 unpack_half2(uint32_t v) {
  return __half22float2(reinterpret_cast<const __half2&>(v));
}

// ---- shared memory -----------------------------------------------------------------------------------------------
// Where the 16-byte piece `piece` of row `row` lies in a row of `row_bytes` bytes (kernels.h). 8 rows that follow each
// other, or any 8 rows with different low bits, put the same piece into 8 different groups of four banks.
__host__ __device__ constexpr int swizzle(int row, int piece, int row_bytes) {
  return row_bytes == 128 || row_bytes == 256 ? piece ^ (row & 7)
         : row_bytes == 64                    ? piece ^ ((row >> 1) & 3)
         : row_bytes == 32                    ? piece ^ ((row >> 2) & 1)
                                              : piece;
}

__device__ __forceinline__ uint32_t smem_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Copies `bytes` (0..16) of 16, the rest becomes zero. Nothing is read when bytes == 0.
__device__ __forceinline__ void cp_async16(uint32_t dst, const void* src, int bytes = 16) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(dst), "l"(src), "r"(bytes) : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
template <int N>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(N) : "memory");
}

// Four 8x8 matrices of 16-bit values: lanes 8 t .. 8 t + 7 give the row addresses of matrix t, r[t] receives it.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// mbarrier of sm_80 and newer. `count` arrivals complete a phase; wait(parity) returns once phase `parity` is complete.
// Arrivals of a warp that gives a buffer back. One is enough behind a __syncwarp, but compute-sanitizer's racecheck does
// not follow that (sm90.cuh), so a build with VOXMMA_RACECHECK lets every lane arrive.
#if defined(VOXMMA_RACECHECK)
inline constexpr int kReleases = 32;
#else
inline constexpr int kReleases = 1;
#endif
__device__ __forceinline__ void mbarrier_init(uint32_t bar, int count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;\n" ::"r"(bar), "r"(count) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive(uint32_t bar) {
  asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}\n" ::"r"(bar) : "memory");
}
// Arrives once, when every cp.async this thread has issued so far has landed.
__device__ __forceinline__ void mbarrier_arrive_cp_async(uint32_t bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];\n" ::"r"(bar) : "memory");
}
__device__ __forceinline__ void mbarrier_wait(uint32_t bar, int parity) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900  // may suspend the thread instead of spinning
#define VOXMMA_MBARRIER_TEST "mbarrier.try_wait"
#else
#define VOXMMA_MBARRIER_TEST "mbarrier.test_wait"
#endif
  asm volatile("{\n.reg .pred done;\nWAIT:\n" VOXMMA_MBARRIER_TEST
               ".parity.shared.b64 done, [%0], %1;\n@done bra.uni DONE;\n"
               "bra.uni WAIT;\nDONE:\n}\n" ::"r"(bar),
               "r"(parity)
               : "memory");
#undef VOXMMA_MBARRIER_TEST
}

// ---- global memory -----------------------------------------------------------------------------------------------
__device__ __forceinline__ Pass load_pass(const PlanView& plan, int pass) {
  const int4 v = __ldg(reinterpret_cast<const int4*>(plan.passes) + pass);
  return {v.x, v.y, v.z, v.w};
}

__device__ __forceinline__ ScheduledTile load_scheduled(const ScheduledTile* schedule, int64_t position) {
  const int4 v = __ldg(reinterpret_cast<const int4*>(schedule) + position);
  return {v.x, v.y, v.z, v.w};
}

// Position in the schedule of the tile that worker `index` of `count` takes in a round. They are dealt out in turn and,
// in the next round, in the opposite order: of a list sorted by cost everybody gets nearly the same sum.
__device__ __forceinline__ uint32_t dealt(uint32_t round, uint32_t index, uint32_t count) {
  return round * count + (round & 1 ? count - 1 - index : index);
}

// A launch with fewer items (tile, block of output channels, group) than multiprocessors has each of them shared by
// several CTAs: a part takes the products of some chunks of input channels under some offsets, and the fp32 sums of the
// parts are added in their order. The parts of an item follow each other, chunks fastest.
inline constexpr int kMaxParts = 8;
struct Parts {
  int chunks = 1, offsets = 1;  // kMaxParts at most together, and no more than there are of each
  __host__ __device__ int count() const { return chunks * offsets; }
  // Chunks of part `rank` are chunk(rank, n) .. chunk_end(rank, n) - 1, of n.
  __device__ int chunk(int rank, int n) const { return n * (rank % chunks) / chunks; }
  __device__ int chunk_end(int rank, int n) const { return n * (rank % chunks + 1) / chunks; }
  // Offsets of part `rank`, as bits of a pass: bit j is offset k_begin + j. At least one of every part, over all passes.
  __device__ uint32_t offsets_of(int rank, int volume, const Pass& pass) const {
    const auto below = [&](int k) {  // bits of the pass's offsets that are less than k
      const int bits = min(max(k - pass.k_begin, 0), pass.k_count);
      return bits == 32 ? ~0u : (1u << bits) - 1;
    };
    return below(volume * (rank / chunks + 1) / offsets) & ~below(volume * (rank / chunks) / offsets);
  }
};

// The parts that make a launch of `items` shortest, 1 where the multiprocessors have enough to do. In units of one step
// (an offset and a chunk): a CTA starts in kStart of them, extra(parts) is what adding the sums takes, and
// at_once(parts) items run at a time.
template <class AtOnce, class Extra>
inline Parts share_items(int64_t items, int chunks, int volume, int sm_count, AtOnce at_once, Extra extra) {
  constexpr int64_t kStart = 8;
  Parts best;
  if (items >= sm_count) return best;
  int64_t least = (kStart + int64_t{chunks} * volume) * 15 / 16;
  for (int parts = 2; parts <= kMaxParts; ++parts) {
    for (int c = parts; c >= 1; --c) {  // a chunk's rows are gathered by all its parts, so rather more parts of those
      if (parts % c != 0 || c > chunks || parts / c > volume) continue;
      const int64_t steps = ceil_div(chunks, c) * ceil_div(volume, parts / c);
      const int64_t took = ceil_div(items, at_once(parts)) * (kStart + steps + extra(parts));
      if (took >= least) continue;
      least = took;
      best.chunks = c;
      best.offsets = parts / c;
    }
  }
  return best;
}

// Can rows of `ld` elements of `bytes` bytes each, entered at multiples of `step` elements, take 16-byte accesses?
inline bool rows_aligned16(const void* base, int64_t ld, int64_t step, int bytes) {
  return reinterpret_cast<uintptr_t>(base) % 16 == 0 && ld * bytes % 16 == 0 && step * bytes % 16 == 0;
}

// Stores 8 NB columns of one output row from an accumulator laid out as mma m16n8 and wgmma leave it: of the eight
// columns of block j, lane q = lane & 3 of a quad holds 2 q and 2 q + 1, returned by get(j) as a float2.
// All 32 lanes call; the four lanes of a quad pass the same row (null: nothing is stored). `cols` columns exist;
// `vec`: the row is 16-byte aligned. 16-bit rows leave in 16-byte pieces, after a 4x4 transposition inside the quad.
template <class T, int NB, class Get>
__device__ __forceinline__ void store_row(T* row, int cols, bool vec, Get get) {
  const int q = threadIdx.x & 3;
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int j = 0; j < NB; ++j) {
      const float2 v = get(j);
      const int col = 8 * j + 2 * q;
      if (row == nullptr) continue;
      if (vec && col + 2 <= cols) {
        *reinterpret_cast<float2*>(row + col) = v;
      } else {
        if (col < cols) row[col] = v.x;
        if (col + 1 < cols) row[col + 1] = v.y;
      }
    }
  } else {
    static_assert(NB % 4 == 0, "16-bit rows are stored in groups of four 8-column blocks");
#pragma unroll
    for (int j = 0; j < NB; j += 4) {
      uint32_t p[4];  // p[i]: block j + i, columns 2 q and 2 q + 1
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 v = get(j + i);
        p[i] = pack2<T>(v.x, v.y);
      }
#pragma unroll
      for (int i = 0; i < 4; i += 2) {  // swap bit 0 of (lane, register)
        const uint32_t got = __shfl_xor_sync(~0u, q & 1 ? p[i] : p[i + 1], 1);
        if (q & 1)
          p[i] = got;
        else
          p[i + 1] = got;
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {  // swap bit 1
        const uint32_t got = __shfl_xor_sync(~0u, q & 2 ? p[i] : p[i + 2], 2);
        if (q & 2)
          p[i] = got;
        else
          p[i + 2] = got;
      }
      const int col = 8 * (j + q);  // p now holds all eight columns of block j + q
      if (row == nullptr || col >= cols) continue;
      if (vec && col + 8 <= cols) {
        *reinterpret_cast<uint4*>(row + col) = make_uint4(p[0], p[1], p[2], p[3]);
      } else {
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          const uint16_t bits = static_cast<uint16_t>(e & 1 ? p[e / 2] >> 16 : p[e / 2] & 0xffff);
          if (col + e < cols) reinterpret_cast<uint16_t*>(row)[col + e] = bits;
        }
      }
    }
  }
}

// ---- host --------------------------------------------------------------------------------------------------------
// Lets `kernel` have `smem` bytes of dynamic shared memory; asks the driver once a kernel and device.
cudaError_t allow_shared(const void* kernel, size_t smem);

// Launches `kernel` over blocks (folded into grid.x), asking for `smem` bytes of dynamic shared memory.
template <class... Params, class... Args>
cudaError_t launch_kernel(void (*kernel)(Params...), int64_t blocks, int threads, size_t smem, cudaStream_t stream,
                          Args... args) {
  if (blocks == 0) return cudaSuccess;
  if (blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
  const cudaError_t status = allow_shared(reinterpret_cast<const void*>(kernel), smem);
  if (status != cudaSuccess) return status;
  kernel<<<dim3(static_cast<unsigned>(blocks)), threads, smem, stream>>>(args...);
  return cudaGetLastError();
}

inline size_t no_workspace(const ConvArgs&) { return 0; }

// Parts of a kernel whose CTAs leave their sums in memory, [parts][n_out][groups * c_out], for reduce_parts. A step takes
// about half a microsecond; adding up a launch and the time of its bytes.
inline Parts share_items(const ConvArgs& args, int64_t items, int chunks, int ctas_an_sm, int dtype_bytes) {
  constexpr int64_t kLaunch = 4, kBytes = 1'000'000;  // steps, and bytes written and read in one
  const int64_t bytes = args.plan.n_out * args.groups * args.c_out * dtype_bytes;
  return share_items(
      items, chunks, args.plan.kernel_volume, args.sm_count,
      [&](int parts) { return std::max<int64_t>(1, int64_t{ctas_an_sm} * args.sm_count / parts); },
      [&](int parts) { return kLaunch + parts * bytes / kBytes; });
}
inline size_t parts_workspace(const ConvArgs& args, const Parts& parts, int dtype_bytes) {
  if (parts.count() == 1) return 0;
  return static_cast<size_t>(parts.count()) * args.plan.n_out * args.groups * args.c_out * dtype_bytes;
}
// The launch that leaves the parts' sums, of type `acc`, in the workspace; `args` as they are where nothing is shared.
inline ConvArgs parts_args(ConvArgs args, const Parts& parts, DType acc) {
  if (parts.count() == 1) return args;
  args.out = args.workspace;
  args.ldo = static_cast<int64_t>(args.groups) * args.c_out;
  args.out_dtype = acc;
  args.bias = nullptr;
  return args;
}
// Adds them in order, then the bias, and rounds once. Does nothing where nothing is shared. Defined in pack.cu.
cudaError_t reduce_parts(const ConvArgs& args, const Parts& parts, DType acc, cudaStream_t stream);

// Number of parts the tiles are split into by a wgrad kernel that starts `blocks` CTAs a part and leaves `count` partial
// sums of `bytes` bytes: two waves of CTAs, at most 256 MB, never more than there are tiles, at least 1.
inline int wgrad_splits(const ConvArgs& args, int64_t blocks, int64_t count, int bytes) {
  int64_t splits = 2 * static_cast<int64_t>(args.sm_count) / (blocks > 0 ? blocks : 1);
  const int64_t most = (int64_t{256} << 20) / (count * bytes > 0 ? count * bytes : 1);
  if (splits > most) splits = most;
  if (splits > args.plan.tiles) splits = args.plan.tiles;
  return static_cast<int>(splits < 1 ? 1 : splits);
}

// Bytes of a wgrad kernel's partial sums. A single split writes dW itself.
inline size_t wgrad_workspace(int splits, int64_t count, int bytes) {
  return splits == 1 ? 0 : static_cast<size_t>(splits) * count * bytes;
}

// out[i] = sum over s, in order, of partial[s][i]; partial is fp32 or fp64 (`acc`). Defined in pack.cu.
// `pairs`, of a wgrad with fp16 or bf16 operands (`in`) whose kernel multiplies rows without a neighbour by zeros: a sum
// that is not finite is made again, from pairs alone.
cudaError_t reduce_splits(const void* partial, DType acc, int splits, int64_t count, void* out, DType out_dtype,
                          cudaStream_t stream, const ConvArgs* pairs = nullptr, DType in = DType::f32);

}  // namespace voxmma
