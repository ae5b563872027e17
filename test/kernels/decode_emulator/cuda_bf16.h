// bfloat16 as far as the decode step uses it.
#ifndef EMULATOR_CUDA_BF16_H_
#define EMULATOR_CUDA_BF16_H_

#include "cuda_runtime.h"

struct __nv_bfloat16 {
  uint16_t bits = 0;

  __nv_bfloat16() = default;
  explicit __nv_bfloat16(float value) {
    uint32_t wide;
    std::memcpy(&wide, &value, 4);
    const bool nan = (wide & 0x7fffffffu) > 0x7f800000u;
    bits = nan ? 0x7fff : static_cast<uint16_t>((wide + 0x7fff + (wide >> 16 & 1)) >> 16);
  }
  operator float() const { return __uint_as_float(static_cast<uint32_t>(bits) << 16); }
};
struct __nv_bfloat162 { __nv_bfloat16 x, y; };

inline __nv_bfloat162 __hsub2(__nv_bfloat162 a, __nv_bfloat162 b) {
  return {__nv_bfloat16(float(a.x) - float(b.x)), __nv_bfloat16(float(a.y) - float(b.y))};
}
inline __nv_bfloat162 __floats2bfloat162_rn(float a, float b) {
  return {__nv_bfloat16(a), __nv_bfloat16(b)};
}

#endif  // EMULATOR_CUDA_BF16_H_
