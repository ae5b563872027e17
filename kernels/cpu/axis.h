// Resampling tables of one axis.
#ifndef QWEN_VL_CPU_AXIS_H_
#define QWEN_VL_CPU_AXIS_H_

#include <cstdint>
#include <vector>

namespace qwen_vl {

// Bits after the point of a weight, as in Pillow's 8-bit resampler: 32 less 8 of the pixel and 2
// for sums below 0 and above 255.
constexpr int kPrecision = 32 - 8 - 2;
constexpr int32_t kHalf = 1 << (kPrecision - 1);

// For each output position the input positions [start, end) and their weights.
//
// A weight is at most 1.125 * 2^22: inside a picture the filter's lobes sum to 1 and its peak is
// 1; at an edge a cut negative lobe makes the rest larger, 0.5625 / 0.5 at the worst. So a weight
// fits 24 signed bits, and a sum of weights times pixels an int32.
struct Axis {
  int in = 0;
  int out = 0;
  int taps = 0;  // of the widest output; other outputs' weights end in zeros
  std::vector<int32_t> start;
  std::vector<int32_t> end;
  std::vector<int32_t> weights;  // [out][taps]

  bool identity() const { return in == out; }
};

// Pillow's bicubic filter (a = -0.5), widened by in / out where the picture shrinks.
Axis make_axis(int in, int out);

}  // namespace qwen_vl
#endif  // QWEN_VL_CPU_AXIS_H_
