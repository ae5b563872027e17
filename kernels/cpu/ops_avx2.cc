// AVX2: 32 lanes, taps in pairs. VPMADDWD multiplies pairs of 16-bit words, so a weight is cut in
// two: high * 2^11 + low with |low| <= 2^10 and |high| < 2^13. Both sums fit an int32, since a
// limb is never larger than its weight.
#include "ops.h"

#if defined(__AVX2__)

#include <immintrin.h>

#include "qwen_vl_kernels.h"
#include "yuv.h"

namespace {

constexpr int kLowBits = 11;

inline int32_t words_of(int32_t a, int32_t b) {
  return static_cast<int32_t>((static_cast<uint32_t>(b) << 16) | (static_cast<uint32_t>(a) & 0xffff));
}

struct V {
  static constexpr int kIsa = QWEN_VL_ISA_AVX2;
  static constexpr int kLanes = 32, kRows = 32, kTaps = 2, kLimbs = 2;

  static int32_t pack_start(int32_t) { return qwen_vl::kHalf; }
  static void pack_group(const int32_t* weights, int32_t* words) {
    int32_t high[2], low[2];
    for (int k = 0; k < 2; ++k) {
      high[k] = (weights[k] + (1 << (kLowBits - 1))) >> kLowBits;
      low[k] = weights[k] - high[k] * (1 << kLowBits);
    }
    words[0] = words_of(high[0], high[1]);
    words[1] = words_of(low[0], low[1]);
  }

  using Vec = __m256i;

  static Vec load(const uint8_t* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
  static void store(Vec v, uint8_t* p) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v);
  }
  static __m128i load16(const uint8_t* p) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  }
  static void store16(__m128i v, uint8_t* p) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), v);
  }
  static Vec load_lanes(const uint8_t* const* row) {
    return _mm256_inserti128_si256(_mm256_castsi128_si256(load16(row[0])), load16(row[16]), 1);
  }
  static void store_lanes(Vec v, uint8_t* p, ptrdiff_t step) {
    store16(_mm256_castsi256_si128(v), p);
    store16(_mm256_extracti128_si256(v, 1), p + 16 * step);
  }
  static Vec interleave_low(Vec a, Vec b) { return _mm256_unpacklo_epi8(a, b); }
  static Vec interleave_high(Vec a, Vec b) { return _mm256_unpackhi_epi8(a, b); }

  struct Sum { __m256i high[4], low[4]; };

  static void clear(Sum& sum) {
    for (int i = 0; i < 4; ++i) sum.high[i] = sum.low[i] = _mm256_setzero_si256();
  }
  static void add(Sum& sum, const uint8_t* p, ptrdiff_t step, const int32_t* words) {
    const Vec a = load(p), b = load(p + step), zero = _mm256_setzero_si256();
    const Vec first = _mm256_unpacklo_epi8(a, b), second = _mm256_unpackhi_epi8(a, b);
    const Vec pairs[4] = {
        _mm256_unpacklo_epi8(first, zero), _mm256_unpackhi_epi8(first, zero),
        _mm256_unpacklo_epi8(second, zero), _mm256_unpackhi_epi8(second, zero)};
    const Vec high = _mm256_set1_epi32(words[0]), low = _mm256_set1_epi32(words[1]);
    for (int i = 0; i < 4; ++i) {
      sum.high[i] = _mm256_add_epi32(sum.high[i], _mm256_madd_epi16(pairs[i], high));
      sum.low[i] = _mm256_add_epi32(sum.low[i], _mm256_madd_epi16(pairs[i], low));
    }
  }
  static Vec finish(const Sum& sum, int32_t start) {
    const Vec bias = _mm256_set1_epi32(start);
    Vec value[4];
    for (int i = 0; i < 4; ++i) {
      const Vec low = _mm256_add_epi32(sum.low[i], bias);
      value[i] = _mm256_srai_epi32(
          _mm256_add_epi32(_mm256_slli_epi32(sum.high[i], kLowBits), low), qwen_vl::kPrecision);
    }
    return _mm256_packus_epi16(_mm256_packs_epi32(value[0], value[1]),
                               _mm256_packs_epi32(value[2], value[3]));
  }

  static Vec widen(const uint8_t* p) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  }
  static Vec times(Vec v, int factor) {
    return _mm256_mullo_epi32(v, _mm256_set1_epi32(factor));
  }
  // 32 values of four vectors in order: packing works within lanes, so quarters change places.
  static Vec narrow(const Vec* value) {
    const Vec packed = _mm256_packus_epi16(_mm256_packs_epi32(value[0], value[1]),
                                           _mm256_packs_epi32(value[2], value[3]));
    return _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  }
  static void yuv(const uint8_t* y, const uint8_t* u, const uint8_t* v, uint8_t* r, uint8_t* g,
                  uint8_t* b) {
    using namespace qwen_vl;
    const Vec zero = _mm256_setzero_si256();
    Vec red[4], green[4], blue[4];
    for (int i = 0; i < 4; ++i) {
      const Vec above = _mm256_max_epi32(
          _mm256_sub_epi32(widen(y + 8 * i), _mm256_set1_epi32(16)), zero);
      const Vec luma = _mm256_add_epi32(times(above, kYuvLuma), _mm256_set1_epi32(kYuvHalf));
      const Vec cu = _mm256_sub_epi32(widen(u + 8 * i), _mm256_set1_epi32(128));
      const Vec cv = _mm256_sub_epi32(widen(v + 8 * i), _mm256_set1_epi32(128));
      red[i] = _mm256_srai_epi32(_mm256_add_epi32(luma, times(cv, kYuvRedV)), kYuvShift);
      green[i] = _mm256_srai_epi32(
          _mm256_add_epi32(luma, _mm256_add_epi32(times(cv, kYuvGreenV), times(cu, kYuvGreenU))),
          kYuvShift);
      blue[i] = _mm256_srai_epi32(_mm256_add_epi32(luma, times(cu, kYuvBlueU)), kYuvShift);
    }
    store(narrow(red), r);
    store(narrow(green), g);
    store(narrow(blue), b);
  }
};

}  // namespace

#include "ops_inl.h"

namespace qwen_vl {
const Ops* avx2_ops() { return &kOps; }
}  // namespace qwen_vl

#else

namespace qwen_vl {
const Ops* avx2_ops() { return nullptr; }
}  // namespace qwen_vl

#endif
