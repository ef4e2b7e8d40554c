// Two questions put to the matrix units themselves: what do they compute, bit by bit, and how fast are they.
// The first validates the tests' emulator, the second tells the gate whether fp16 accumulation is faster on a board.
#pragma once

#include <cstdint>

#include "voxmma/device.h"

namespace voxmma {

#pragma GCC visibility push(default)  // device.h

// kind = instruction of one m16n8 tile: mma.sync m16n8k16 (tf32: m16n8k8), or wgmma m64n8k16 (k8) from 4 on.
enum class MmaKind : int {
  f16_f32 = 0,
  f16_f16 = 1,
  bf16_f32 = 2,
  tf32_f32 = 3,
  wgmma_f16_f32 = 4,
  wgmma_f16_f16 = 5,
  wgmma_bf16_f32 = 6,
  wgmma_tf32_f32 = 7,
};
inline constexpr int kMmaKinds = 8;

// d[t] = a[t] b[t]^T + c[t], one instruction a tile. Row-major device arrays: a (tiles, 16, k), b (tiles, 8, k), c and
// d (tiles, 16, 8); k = 16, tf32: 8. a and b hold fp16, bf16 or fp32 words (tf32: passed as they are, the low 13 bits
// are the hardware's to ignore); c and d fp32, for f16_f16 kinds fp16.
// Errors: cudaErrorInvalidValue (unknown kind, negative tiles), cudaErrorNotSupported (wgmma away from sm_90a builds,
// bf16 or tf32 before sm_80).
cudaError_t mma_probe(int kind, const void* a, const void* b, const void* c, void* d, int64_t tiles, cudaStream_t);

// Dense rate of a mma.sync kind (0..3) on the current device, in TFLOP/s: all multiprocessors busy, operands in
// registers, the best of 16 runs, about 5 ms. Waits for the stream. Errors as above, and whatever the launch reports.
cudaError_t mma_rate(int kind, double* tflops, cudaStream_t);

#pragma GCC visibility pop

}  // namespace voxmma
