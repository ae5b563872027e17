// The plain twin: what the vector forms are held against, and what runs on other processors.
#include <algorithm>
#include <cstring>

#include "axis.h"
#include "qwen_vl_kernels.h"
#include "yuv.h"

namespace {

inline uint8_t clip(int32_t value) {
  return static_cast<uint8_t>(value < 0 ? 0 : value > 255 ? 255 : value);
}

struct V {
  static constexpr int kIsa = QWEN_VL_ISA_SCALAR;
  static constexpr int kLanes = 16, kRows = 16, kTaps = 1, kLimbs = 1;

  static int32_t pack_start(int32_t) { return qwen_vl::kHalf; }
  static void pack_group(const int32_t* weights, int32_t* words) { words[0] = weights[0]; }

  struct Vec { uint8_t byte[kLanes]; };

  static Vec load(const uint8_t* p) {
    Vec v;
    std::memcpy(v.byte, p, kLanes);
    return v;
  }
  static void store(const Vec& v, uint8_t* p) { std::memcpy(p, v.byte, kLanes); }
  static Vec load_lanes(const uint8_t* const* row) { return load(row[0]); }
  static void store_lanes(const Vec& v, uint8_t* p, ptrdiff_t) { store(v, p); }

  static Vec interleave_low(const Vec& a, const Vec& b) {
    Vec v;
    for (int i = 0; i < 8; ++i) {
      v.byte[2 * i] = a.byte[i];
      v.byte[2 * i + 1] = b.byte[i];
    }
    return v;
  }
  static Vec interleave_high(const Vec& a, const Vec& b) {
    Vec v;
    for (int i = 0; i < 8; ++i) {
      v.byte[2 * i] = a.byte[i + 8];
      v.byte[2 * i + 1] = b.byte[i + 8];
    }
    return v;
  }

  struct Sum { int32_t lane[kLanes]; };

  static void clear(Sum& sum) { std::fill(sum.lane, sum.lane + kLanes, 0); }
  static void add(Sum& sum, const uint8_t* p, ptrdiff_t, const int32_t* words) {
    for (int i = 0; i < kLanes; ++i) sum.lane[i] += p[i] * words[0];
  }
  static Vec finish(const Sum& sum, int32_t start) {
    Vec v;
    for (int i = 0; i < kLanes; ++i) v.byte[i] = clip((sum.lane[i] + start) >> qwen_vl::kPrecision);
    return v;
  }

  static void yuv(const uint8_t* y, const uint8_t* u, const uint8_t* v, uint8_t* r, uint8_t* g,
                  uint8_t* b) {
    using namespace qwen_vl;
    for (int i = 0; i < kLanes; ++i) {
      const int luma = std::max(y[i] - 16, 0) * kYuvLuma + kYuvHalf;
      const int cu = u[i] - 128, cv = v[i] - 128;
      r[i] = clip((luma + kYuvRedV * cv) >> kYuvShift);
      g[i] = clip((luma + kYuvGreenV * cv + kYuvGreenU * cu) >> kYuvShift);
      b[i] = clip((luma + kYuvBlueU * cu) >> kYuvShift);
    }
  }
};

}  // namespace

#include "ops_inl.h"

namespace qwen_vl {
const Ops* scalar_ops() { return &kOps; }
}  // namespace qwen_vl
