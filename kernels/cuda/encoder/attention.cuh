// What both forms of attention share: the arguments and the running softmax.
#ifndef QWEN_VL_CUDA_ENCODER_ATTENTION_CUH_
#define QWEN_VL_CUDA_ENCODER_ATTENTION_CUH_

#include <cuda_runtime_api.h>

#include "qwen_vl_encoder.h"
#include "vector.cuh"

namespace qwen_vl {

constexpr float kLog2E = 1.4426950408889634f;

// Strides are in elements.
template <class T>
struct Attention {
  const T* q;
  const T* k;
  const T* v;
  T* out;
  int64_t q_row, kv_row, out_row;
  int64_t q_head, kv_head, out_head;
  int group;           // query heads that share one of keys and values
  float scale;         // of scores, times log2(e): the softmax works with powers of two
  const int4* tiles;   // segments: (first query, end, first key, end)
  const qwen_vl_span* span;  // cache: where the chunk stands
  int layer;
};

// (row, column) -> the four lanes that hold a row of a 16x8 product agree on a number.
__device__ inline float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ inline float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

__device__ inline float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The softmax of the two rows that a lane holds, taken over tiles of keys (Milakov and Gimelshein
// 2018; Dao 2023): of each row the largest score so far, and this lane's share of the sum.
struct Softmax {
  float largest[2] = {-INFINITY, -INFINITY};
  float sum[2] = {0.0f, 0.0f};

  // Turns scores into numerators and returns by how much earlier ones shrink.
  template <int kTiles>
  __device__ float2 step(float (&s)[kTiles][4], float scale) {
    float correction[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float most = largest[r];
#pragma unroll
      for (int i = 0; i < kTiles; ++i) most = fmaxf(most, fmaxf(s[i][2 * r], s[i][2 * r + 1]));
      most = quad_max(most);
      // A row that has seen no key yet: 0 in place of -inf keeps NaN out.
      const float base = most == -INFINITY ? 0.0f : most * scale;
      correction[r] = power_of_two(largest[r] * scale - base);
      largest[r] = most;
      float even = 0.0f, odd = 0.0f;
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        s[i][2 * r] = power_of_two(fmaf(s[i][2 * r], scale, -base));
        s[i][2 * r + 1] = power_of_two(fmaf(s[i][2 * r + 1], scale, -base));
        even += s[i][2 * r];
        odd += s[i][2 * r + 1];
      }
      sum[r] = sum[r] * correction[r] + even + odd;
    }
    return {correction[0], correction[1]};
  }

  __device__ float2 inverse() const {
    const float a = quad_sum(sum[0]), b = quad_sum(sum[1]);
    return {a > 0.0f ? 1.0f / a : 0.0f, b > 0.0f ? 1.0f / b : 0.0f};
  }
};

}  // namespace qwen_vl
#endif  // QWEN_VL_CUDA_ENCODER_ATTENTION_CUH_
