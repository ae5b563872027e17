// Halves as far as the decode step uses them.
#ifndef EMULATOR_CUDA_FP16_H_
#define EMULATOR_CUDA_FP16_H_

#include "cuda_runtime.h"

struct __half {
  _Float16 value = 0;

  __half() = default;
  explicit __half(float v) : value(static_cast<_Float16>(v)) {}
  operator float() const { return static_cast<float>(value); }
};
struct __half2 { __half x, y; };

inline __half2 __hsub2(__half2 a, __half2 b) {
  return {__half(float(a.x) - float(b.x)), __half(float(a.y) - float(b.y))};
}
inline __half2 __floats2half2_rn(float a, float b) { return {__half(a), __half(b)}; }
inline float2 __half22float2(__half2 v) { return {float(v.x), float(v.y)}; }

#endif  // EMULATOR_CUDA_FP16_H_
