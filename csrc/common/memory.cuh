// Shared memory as mma.sync and wgmma kernels use it, by 32-bit address: swizzle, cp.async, ldmatrix, mbarrier.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace voxmma {

// Where the 16-byte piece `piece` of row `row` lies in a row of `row_bytes` bytes (conv.h). 8 rows that follow each
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

__device__ __forceinline__ void cp_async16(uint32_t dst, const void* src) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\n" ::"r"(dst), "l"(src) : "memory");
}
// Through L1, for what CTAs of a multiprocessor share.
__device__ __forceinline__ void cp_async16_cached(uint32_t dst, const void* src) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16;\n" ::"r"(dst), "l"(src) : "memory");
}
// Copies `bytes` (0..16) of 16, the rest becomes zero. Nothing is read when bytes == 0.
__device__ __forceinline__ void cp_async16(uint32_t dst, const void* src, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(dst), "l"(src), "r"(bytes) : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
template <int N>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(N) : "memory");
}

// Those that were not committed, too.
__device__ __forceinline__ void cp_async_wait_all() { asm volatile("cp.async.wait_all;\n" ::: "memory"); }

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

// Arrivals of a warp that gives a buffer back. One is enough behind a __syncwarp that orders the reads of its lanes before
// it, but compute-sanitizer's racecheck does not carry that order over to the barrier (a 60-line kernel of two warps
// shows it), so a build with VOXMMA_RACECHECK lets every lane arrive.
#if defined(VOXMMA_RACECHECK)
inline constexpr int kReleases = 32;
#else
inline constexpr int kReleases = 1;
#endif

// mbarrier of sm_80 and newer. `count` arrivals complete a phase; wait(parity) returns once phase `parity` is complete.
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
// sm90.cuh has one for Hopper kernels, which may sleep longer.
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

}  // namespace voxmma
