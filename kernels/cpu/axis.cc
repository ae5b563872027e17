// Pillow's 8-bit weights (src/libImaging/Resample.c), in double precision with every product and
// sum rounded on its own: the file is compiled with -ffp-contract=off.
#include "axis.h"

#include <algorithm>
#include <cmath>

namespace qwen_vl {
namespace {

// Cubic convolution with a = -0.5 (Keys, 1981); the order of operations decides the last bit.
double bicubic(double distance) {
  const double x = std::fabs(distance);
  if (x < 1.0) return (1.5 * x - 2.5) * x * x + 1.0;
  if (x < 2.0) return (((x - 5.0) * x + 8.0) * x - 4.0) * -0.5;
  return 0.0;
}

int32_t to_fixed(double weight) {
  const double scaled = weight * (1 << kPrecision);
  return static_cast<int32_t>(weight < 0 ? scaled - 0.5 : scaled + 0.5);
}

}  // namespace

Axis make_axis(int in, int out) {
  Axis axis;
  axis.in = in;
  axis.out = out;
  axis.start.resize(out);
  axis.end.resize(out);
  if (in == out) {  // Pillow leaves such an axis alone.
    axis.taps = 1;
    axis.weights.assign(out, 1 << kPrecision);
    for (int i = 0; i < out; ++i) {
      axis.start[i] = i;
      axis.end[i] = i + 1;
    }
    return axis;
  }
  const double scale = static_cast<double>(in) / out;
  const double stretch = std::max(scale, 1.0);
  const double support = 2.0 * stretch;
  const double inverse = 1.0 / stretch;
  for (int i = 0; i < out; ++i) {
    const double center = (i + 0.5) * scale;
    axis.start[i] = std::max(static_cast<int>(center - support + 0.5), 0);
    axis.end[i] = std::min(static_cast<int>(center + support + 0.5), in);
    axis.taps = std::max(axis.taps, axis.end[i] - axis.start[i]);
  }
  axis.weights.assign(static_cast<size_t>(out) * axis.taps, 0);
  std::vector<double> exact(axis.taps);
  for (int i = 0; i < out; ++i) {
    const double center = (i + 0.5) * scale;
    const int start = axis.start[i], count = axis.end[i] - start;
    double sum = 0.0;
    for (int k = 0; k < count; ++k) {
      exact[k] = bicubic((k + start - center + 0.5) * inverse);
      sum += exact[k];
    }
    for (int k = 0; k < count; ++k) {
      axis.weights[static_cast<size_t>(i) * axis.taps + k] = to_fixed(exact[k] / sum);
    }
  }
  return axis;
}

}  // namespace qwen_vl
