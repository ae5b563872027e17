// NEON of ARMv8.2 with the dot product (Cortex-A78AE has it; it has no SVE and no I8MM). SDOT
// multiplies signed bytes only: pixels are taken as pixel - 128, and 128 times the sum of the
// weights is added to what the sum starts from. Weights are cut as for AVX-512.
#include "ops.h"

#if defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)

#include <arm_neon.h>

#include "limbs.h"
#include "qwen_vl_kernels.h"
#include "yuv.h"

namespace {

struct V {
  static constexpr int kIsa = QWEN_VL_ISA_NEON;
  static constexpr int kLanes = 16, kRows = 32, kTaps = 4, kLimbs = 3;

  static int32_t pack_start(int32_t sum) { return qwen_vl::kHalf + 128 * sum; }
  static void pack_group(const int32_t* weights, int32_t* words) {
    qwen_vl::cut_into_bytes(weights, words);
  }

  using Vec = uint8x16_t;

  static Vec load(const uint8_t* p) { return vld1q_u8(p); }
  static void store(Vec v, uint8_t* p) { vst1q_u8(p, v); }
  static Vec load_lanes(const uint8_t* const* row) { return load(row[0]); }
  static void store_lanes(Vec v, uint8_t* p, ptrdiff_t) { store(v, p); }
  static Vec interleave_low(Vec a, Vec b) { return vzip1q_u8(a, b); }
  static Vec interleave_high(Vec a, Vec b) { return vzip2q_u8(a, b); }

  struct Sum { int32x4_t limb[3][4]; };

  static void clear(Sum& sum) {
    for (auto& limb : sum.limb) {
      for (int32x4_t& v : limb) v = vdupq_n_s32(0);
    }
  }
  static int8x16_t four(uint16x8_t v) {
    return vreinterpretq_s8_u8(veorq_u8(vreinterpretq_u8_u16(v), vdupq_n_u8(0x80)));
  }
  static void add(Sum& sum, const uint8_t* p, ptrdiff_t step, const int32_t* words) {
    const Vec a = load(p), b = load(p + step), c = load(p + 2 * step), d = load(p + 3 * step);
    const uint16x8_t ab_low = vreinterpretq_u16_u8(vzip1q_u8(a, b));
    const uint16x8_t ab_high = vreinterpretq_u16_u8(vzip2q_u8(a, b));
    const uint16x8_t cd_low = vreinterpretq_u16_u8(vzip1q_u8(c, d));
    const uint16x8_t cd_high = vreinterpretq_u16_u8(vzip2q_u8(c, d));
    const int8x16_t fours[4] = {
        four(vzip1q_u16(ab_low, cd_low)), four(vzip2q_u16(ab_low, cd_low)),
        four(vzip1q_u16(ab_high, cd_high)), four(vzip2q_u16(ab_high, cd_high))};
    for (int limb = 0; limb < 3; ++limb) {
      const int8x16_t weights = vreinterpretq_s8_s32(vdupq_n_s32(words[limb]));
      for (int i = 0; i < 4; ++i) {
        sum.limb[limb][i] = vdotq_s32(sum.limb[limb][i], fours[i], weights);
      }
    }
  }
  static Vec finish(const Sum& sum, int32_t start) {
    const int32x4_t bias = vdupq_n_s32(start);
    int32x4_t value[4];
    for (int i = 0; i < 4; ++i) {
      const int32x4_t high = vaddq_s32(vshlq_n_s32(sum.limb[0][i], 8), sum.limb[1][i]);
      const int32x4_t low = vaddq_s32(sum.limb[2][i], bias);
      value[i] = vaddq_s32(vshlq_n_s32(high, 8), low);
    }
    // 22 bits in two steps: the narrowing shift takes 16 of them at most.
    const int16x8_t first = vcombine_s16(vshrn_n_s32(value[0], 16), vshrn_n_s32(value[1], 16));
    const int16x8_t second = vcombine_s16(vshrn_n_s32(value[2], 16), vshrn_n_s32(value[3], 16));
    return vcombine_u8(vqshrun_n_s16(first, qwen_vl::kPrecision - 16),
                       vqshrun_n_s16(second, qwen_vl::kPrecision - 16));
  }

  static void widen(const uint8_t* p, int subtract, int32x4_t* out) {
    const Vec v = load(p);
    const int16x8_t by = vdupq_n_s16(static_cast<int16_t>(subtract));
    const int16x8_t low = vsubq_s16(vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(v))), by);
    const int16x8_t high = vsubq_s16(vreinterpretq_s16_u16(vmovl_high_u8(v)), by);
    out[0] = vmovl_s16(vget_low_s16(low));
    out[1] = vmovl_high_s16(low);
    out[2] = vmovl_s16(vget_low_s16(high));
    out[3] = vmovl_high_s16(high);
  }
  static void narrow(const int32x4_t* value, uint8_t* p) {
    const int16x8_t low = vcombine_s16(vshrn_n_s32(value[0], 16), vshrn_n_s32(value[1], 16));
    const int16x8_t high = vcombine_s16(vshrn_n_s32(value[2], 16), vshrn_n_s32(value[3], 16));
    store(vcombine_u8(vqshrun_n_s16(low, qwen_vl::kYuvShift - 16),
                      vqshrun_n_s16(high, qwen_vl::kYuvShift - 16)), p);
  }
  static void yuv(const uint8_t* y, const uint8_t* u, const uint8_t* v, uint8_t* r, uint8_t* g,
                  uint8_t* b) {
    using namespace qwen_vl;
    int32x4_t above[4], cu[4], cv[4], red[4], green[4], blue[4];
    widen(y, 16, above);
    widen(u, 128, cu);
    widen(v, 128, cv);
    for (int i = 0; i < 4; ++i) {
      const int32x4_t luma = vmlaq_n_s32(vdupq_n_s32(kYuvHalf),
                                         vmaxq_s32(above[i], vdupq_n_s32(0)), kYuvLuma);
      red[i] = vmlaq_n_s32(luma, cv[i], kYuvRedV);
      green[i] = vmlaq_n_s32(vmlaq_n_s32(luma, cv[i], kYuvGreenV), cu[i], kYuvGreenU);
      blue[i] = vmlaq_n_s32(luma, cu[i], kYuvBlueU);
    }
    narrow(red, r);
    narrow(green, g);
    narrow(blue, b);
  }
};

}  // namespace

#include "ops_inl.h"

namespace qwen_vl {
const Ops* neon_ops() { return &kOps; }
}  // namespace qwen_vl

#else

namespace qwen_vl {
const Ops* neon_ops() { return nullptr; }
}  // namespace qwen_vl

#endif
