// bfloat16 as far as the kernels use it.
#ifndef EMULATOR_CUDA_BF16_H_
#define EMULATOR_CUDA_BF16_H_

#include "cuda_runtime.h"

struct __nv_bfloat16 {
  uint16_t bits = 0;

  operator float() const {
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
  }
  static __nv_bfloat16 from(float value) {
    uint32_t wide;
    std::memcpy(&wide, &value, 4);
    __nv_bfloat16 b;
    b.bits = static_cast<uint16_t>((wide + 0x7fff + (wide >> 16 & 1)) >> 16);
    return b;
  }
};
struct __nv_bfloat162 { __nv_bfloat16 x, y; };

inline __nv_bfloat162 __hsub2(__nv_bfloat162 a, __nv_bfloat162 b) {
  return {__nv_bfloat16::from(float(a.x) - float(b.x)),
          __nv_bfloat16::from(float(a.y) - float(b.y))};
}
inline __nv_bfloat162 __floats2bfloat162_rn(float a, float b) {
  return {__nv_bfloat16::from(a), __nv_bfloat16::from(b)};
}

#endif  // EMULATOR_CUDA_BF16_H_
