// The running softmax of attention_sm90.cu.
#ifndef QWEN_VL_CUDA_ENCODER_LAZY_SOFTMAX_CUH_
#define QWEN_VL_CUDA_ENCODER_LAZY_SOFTMAX_CUH_

#include "attention.cuh"

namespace qwen_vl {

// The running softmax of attention.cuh with two differences. The number that scores are held against
// follows the largest one only when that is 2^8 ahead, as in FlashAttention-4: most
// tiles shrink nothing. And powers are taken where they stand in the source.
template <int kTiles>
struct LazySoftmax {
  float base[2], sum[2];

  __device__ static float power(float x) {
    float y;
    asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }

  __device__ static float largest(const float (&s)[kTiles][4], int row, float most) {
    float other = most;
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      most = fmaxf(most, s[i][2 * row]);
      other = fmaxf(other, s[i][2 * row + 1]);
    }
    return quad_max(fmaxf(most, other));
  }

  __device__ void add(float (&s)[kTiles][4], float scale) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float offset = base[row] * scale;
      float even = 0.0f, odd = 0.0f;
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        s[i][2 * row] = power(fmaf(s[i][2 * row], scale, -offset));
        s[i][2 * row + 1] = power(fmaf(s[i][2 * row + 1], scale, -offset));
        even += s[i][2 * row];
        odd += s[i][2 * row + 1];
      }
      sum[row] += even + odd;
    }
  }

  // Turns the first scores into numerators.
  __device__ void begin(float (&s)[kTiles][4], float scale) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      base[row] = largest(s, row, -INFINITY);
      // Nothing but -inf: 0 in its place keeps NaN out.
      if (base[row] == -INFINITY) base[row] = 0.0f;
      sum[row] = 0.0f;
    }
    add(s, scale);
  }

  // The same with later ones; true, for the whole warp, where results so far have to shrink.
  __device__ bool step(float (&s)[kTiles][4], float scale, float (&shrink)[2]) {
    constexpr float kAhead = 8.0f;
    const float most[2] = {largest(s, 0, base[0]), largest(s, 1, base[1])};
    const bool shrinks = __any_sync(
        ~0u, (most[0] - base[0]) * scale > kAhead || (most[1] - base[1]) * scale > kAhead);
    if (shrinks) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        shrink[row] = power((base[row] - most[row]) * scale);
        base[row] = most[row];
        sum[row] *= shrink[row];
      }
    }
    add(s, scale);
    return shrinks;
  }
};

}  // namespace qwen_vl
#endif  // QWEN_VL_CUDA_ENCODER_LAZY_SOFTMAX_CUH_
