// Eight 16-bit floats at a time, and sums over a warp.
#ifndef QWEN_VL_CUDA_ENCODER_VECTOR_CUH_
#define QWEN_VL_CUDA_ENCODER_VECTOR_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace qwen_vl {

__device__ inline float2 widen(__nv_bfloat162 x) { return __bfloat1622float2(x); }
__device__ inline float2 widen(__half2 x) { return __half22float2(x); }

template <class T>
struct Pair;
template <>
struct Pair<__nv_bfloat16> {
  using type = __nv_bfloat162;
  static __device__ type of(float low, float high) { return __floats2bfloat162_rn(low, high); }
};
template <>
struct Pair<__half> {
  using type = __half2;
  static __device__ type of(float low, float high) { return __floats2half2_rn(low, high); }
};

// Two floats rounded into one register.
template <class T>
__device__ inline uint32_t narrow(float low, float high) {
  const auto pair = Pair<T>::of(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

struct Eight {
  float v[8];

  template <class T>
  static __device__ Eight load(const T* p) {
    const uint4 raw = *reinterpret_cast<const uint4*>(p);
    return of<T>(raw);
  }

  template <class T>
  static __device__ Eight of(uint4 raw) {
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
    Eight r;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 two = widen(*reinterpret_cast<const typename Pair<T>::type*>(&words[i]));
      r.v[2 * i] = two.x;
      r.v[2 * i + 1] = two.y;
    }
    return r;
  }

  template <class T>
  __device__ void store(T* p) const {
    *reinterpret_cast<uint4*>(p) = {narrow<T>(v[0], v[1]), narrow<T>(v[2], v[3]),
                                    narrow<T>(v[4], v[5]), narrow<T>(v[6], v[7])};
  }

  // Codes of values times `inverse`, which keeps them within 127.
  __device__ void store_s8(int8_t* p, float inverse) const {
    uint32_t words[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int code = __float2int_rn(v[i] * inverse);
      words[i / 4] |= static_cast<uint32_t>(code & 255) << (i % 4 * 8);
    }
    *reinterpret_cast<uint2*>(p) = {words[0], words[1]};
  }
};

__device__ inline float warp_sum(float x) {
#pragma unroll
  for (int step = 16; step; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

__device__ inline float warp_max(float x) {
#pragma unroll
  for (int step = 16; step; step /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
  return x;
}

}  // namespace qwen_vl
#endif  // QWEN_VL_CUDA_ENCODER_VECTOR_CUH_
