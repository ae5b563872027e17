// Halves as far as the kernels use them.
#ifndef EMULATOR_CUDA_FP16_H_
#define EMULATOR_CUDA_FP16_H_

#include <cmath>

#include "cuda_runtime.h"

struct __half {
  uint16_t bits = 0;

  operator float() const {
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    const float value = exponent == 31 ? INFINITY
                        : exponent     ? std::ldexp(1024.0f + fraction, exponent - 25)
                                       : std::ldexp(static_cast<float>(fraction), -24);
    return bits >> 15 ? -value : value;
  }
  static __half from(float value) {
    __half h;
    const float size = std::fabs(value);
    int exponent = 0;
    std::frexp(size, &exponent);
    // Spacing of halves at this size; nearbyint rounds to even.
    const float unit = std::ldexp(1.0f, std::max(exponent - 11, -24));
    const float rounded = std::nearbyint(size / unit) * unit;
    uint16_t bits;
    if (rounded >= 65520.0f) {
      bits = 0x7c00;
    } else if (rounded < std::ldexp(1.0f, -14)) {
      bits = static_cast<uint16_t>(std::ldexp(rounded, 24));
    } else {
      std::frexp(rounded, &exponent);
      bits = static_cast<uint16_t>((exponent + 14) * 1024 +
                                   (static_cast<int>(std::ldexp(rounded, 11 - exponent)) - 1024));
    }
    h.bits = static_cast<uint16_t>(bits | (std::signbit(value) ? 0x8000 : 0));
    return h;
  }
};
struct __half2 { __half x, y; };

inline __half __ushort_as_half(uint16_t bits) {
  __half h;
  h.bits = bits;
  return h;
}
inline __half2 __half2half2(__half h) { return {h, h}; }
inline __half2 __hsub2(__half2 a, __half2 b) {
  return {__half::from(float(a.x) - float(b.x)), __half::from(float(a.y) - float(b.y))};
}
inline __half2 __floats2half2_rn(float a, float b) { return {__half::from(a), __half::from(b)}; }

#endif  // EMULATOR_CUDA_FP16_H_
