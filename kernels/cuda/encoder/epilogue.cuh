// What products do with their sums before they are written, in registers.
#ifndef QWEN_VL_CUDA_ENCODER_EPILOGUE_CUH_
#define QWEN_VL_CUDA_ENCODER_EPILOGUE_CUH_

#include <type_traits>

#include "vector.cuh"

namespace qwen_vl {

// sigmoid(x): for bf16, which has 8 bits, by the approximate tanh, which has 11.
template <class T>
__device__ inline float sigmoid(float x) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    float y;
    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(0.5f * x));
    return fmaf(0.5f, y, 0.5f);
  } else {
    return __fdividef(1.0f, 1.0f + __expf(fminf(-x, 80.0f)));
  }
}

// Four lanes hold two columns of each of four tiles of eight; afterwards lane i has all of tile i.
__device__ inline uint4 gather_tile(const uint32_t (&w)[4], int lane) {
  uint32_t r[4];
  // A 4x4 transposition in two exchanges: with the neighbour, then with the other pair.
  const bool odd = lane & 1, upper = lane & 2;
  uint32_t a0 = odd ? w[0] : w[1], a1 = odd ? w[2] : w[3];
  a0 = __shfl_xor_sync(~0u, a0, 1);
  a1 = __shfl_xor_sync(~0u, a1, 1);
  // Pairs: columns of tile (lane & 1) and of tile 2 + (lane & 1).
  const uint32_t p0 = odd ? a0 : w[0], p1 = odd ? w[1] : a0;
  const uint32_t q0 = odd ? a1 : w[2], q1 = odd ? w[3] : a1;
  uint32_t b0 = upper ? p0 : q0, b1 = upper ? p1 : q1;
  b0 = __shfl_xor_sync(~0u, b0, 2);
  b1 = __shfl_xor_sync(~0u, b1, 2);
  r[0] = upper ? b0 : p0;
  r[1] = upper ? b1 : p1;
  r[2] = upper ? q0 : b0;
  r[3] = upper ? q1 : b1;
  return {r[0], r[1], r[2], r[3]};
}

}  // namespace qwen_vl
#endif  // QWEN_VL_CUDA_ENCODER_EPILOGUE_CUH_
