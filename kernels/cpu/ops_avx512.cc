// AVX-512 with VNNI: 64 lanes, taps in fours. VPDPBUSD multiplies four unsigned bytes with four
// signed ones and adds them up, so a weight is cut into three signed bytes: (c2 * 2^8 + c1) * 2^8 + c0.
#include "ops.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__)

#include <immintrin.h>

#include "limbs.h"
#include "qwen_vl_kernels.h"
#include "yuv.h"

namespace {

struct V {
  static constexpr int kIsa = QWEN_VL_ISA_AVX512;
  static constexpr int kLanes = 64, kRows = 64, kTaps = 4, kLimbs = 3;

  static int32_t pack_start(int32_t) { return qwen_vl::kHalf; }
  static void pack_group(const int32_t* weights, int32_t* words) {
    qwen_vl::cut_into_bytes(weights, words);
  }

  using Vec = __m512i;

  static Vec load(const uint8_t* p) { return _mm512_loadu_si512(p); }
  static void store(Vec v, uint8_t* p) { _mm512_storeu_si512(p, v); }
  static __m128i load16(const uint8_t* p) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  }
  static Vec load_lanes(const uint8_t* const* row) {
    Vec v = _mm512_castsi128_si512(load16(row[0]));
    v = _mm512_inserti32x4(v, load16(row[16]), 1);
    v = _mm512_inserti32x4(v, load16(row[32]), 2);
    return _mm512_inserti32x4(v, load16(row[48]), 3);
  }
  static void store_lanes(Vec v, uint8_t* p, ptrdiff_t step) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_castsi512_si128(v));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 16 * step), _mm512_extracti32x4_epi32(v, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 32 * step), _mm512_extracti32x4_epi32(v, 2));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 48 * step), _mm512_extracti32x4_epi32(v, 3));
  }
  static Vec interleave_low(Vec a, Vec b) { return _mm512_unpacklo_epi8(a, b); }
  static Vec interleave_high(Vec a, Vec b) { return _mm512_unpackhi_epi8(a, b); }

  struct Sum { __m512i limb[3][4]; };

  static void clear(Sum& sum) {
    for (auto& limb : sum.limb) {
      for (Vec& v : limb) v = _mm512_setzero_si512();
    }
  }
  static void add(Sum& sum, const uint8_t* p, ptrdiff_t step, const int32_t* words) {
    const Vec a = load(p), b = load(p + step), c = load(p + 2 * step), d = load(p + 3 * step);
    const Vec ab_low = _mm512_unpacklo_epi8(a, b), ab_high = _mm512_unpackhi_epi8(a, b);
    const Vec cd_low = _mm512_unpacklo_epi8(c, d), cd_high = _mm512_unpackhi_epi8(c, d);
    const Vec fours[4] = {
        _mm512_unpacklo_epi16(ab_low, cd_low), _mm512_unpackhi_epi16(ab_low, cd_low),
        _mm512_unpacklo_epi16(ab_high, cd_high), _mm512_unpackhi_epi16(ab_high, cd_high)};
    for (int limb = 0; limb < 3; ++limb) {
      const Vec weights = _mm512_set1_epi32(words[limb]);
      for (int i = 0; i < 4; ++i) {
        sum.limb[limb][i] = _mm512_dpbusd_epi32(sum.limb[limb][i], fours[i], weights);
      }
    }
  }
  static Vec finish(const Sum& sum, int32_t start) {
    const Vec bias = _mm512_set1_epi32(start);
    Vec value[4];
    for (int i = 0; i < 4; ++i) {
      const Vec high =
          _mm512_add_epi32(_mm512_slli_epi32(sum.limb[0][i], 8), sum.limb[1][i]);
      const Vec low = _mm512_add_epi32(sum.limb[2][i], bias);
      value[i] = _mm512_srai_epi32(_mm512_add_epi32(_mm512_slli_epi32(high, 8), low),
                                   qwen_vl::kPrecision);
    }
    return _mm512_packus_epi16(_mm512_packs_epi32(value[0], value[1]),
                               _mm512_packs_epi32(value[2], value[3]));
  }

  static Vec widen(const uint8_t* p) { return _mm512_cvtepu8_epi32(load16(p)); }
  static Vec times(Vec v, int factor) {
    return _mm512_mullo_epi32(v, _mm512_set1_epi32(factor));
  }
  static void narrow(Vec value, uint8_t* p) {
    const Vec clipped = _mm512_max_epi32(value, _mm512_setzero_si512());
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtusepi32_epi8(clipped));
  }
  static void yuv(const uint8_t* y, const uint8_t* u, const uint8_t* v, uint8_t* r, uint8_t* g,
                  uint8_t* b) {
    using namespace qwen_vl;
    for (int i = 0; i < kLanes; i += 16) {
      const Vec above = _mm512_max_epi32(_mm512_sub_epi32(widen(y + i), _mm512_set1_epi32(16)),
                                         _mm512_setzero_si512());
      const Vec luma = _mm512_add_epi32(times(above, kYuvLuma), _mm512_set1_epi32(kYuvHalf));
      const Vec cu = _mm512_sub_epi32(widen(u + i), _mm512_set1_epi32(128));
      const Vec cv = _mm512_sub_epi32(widen(v + i), _mm512_set1_epi32(128));
      narrow(_mm512_srai_epi32(_mm512_add_epi32(luma, times(cv, kYuvRedV)), kYuvShift), r + i);
      narrow(_mm512_srai_epi32(
                 _mm512_add_epi32(luma, _mm512_add_epi32(times(cv, kYuvGreenV),
                                                         times(cu, kYuvGreenU))),
                 kYuvShift),
             g + i);
      narrow(_mm512_srai_epi32(_mm512_add_epi32(luma, times(cu, kYuvBlueU)), kYuvShift), b + i);
    }
  }
};

}  // namespace

#include "ops_inl.h"

namespace qwen_vl {
const Ops* avx512_ops() { return &kOps; }
}  // namespace qwen_vl

#else

namespace qwen_vl {
const Ops* avx512_ops() { return nullptr; }
}  // namespace qwen_vl

#endif
