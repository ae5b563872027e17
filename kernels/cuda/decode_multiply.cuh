// One item of weights times the activations, on tensor cores.
//
// mma.m16n8k16 takes 16 outputs' weights as A and up to 8 sequences' activations as B. A sum does
// not care in which order its inputs come, so a lane takes 16 bytes of a row as they lie: its four
// lanes of a row then hold neighbouring pieces, and the activations are stored in shared memory in
// the order that fits (place_chunk). Nothing is exchanged between lanes, for any form of weights.
#ifndef QWEN_VL_DECODE_MULTIPLY_CUH_
#define QWEN_VL_DECODE_MULTIPLY_CUH_

#include "decode_types.cuh"

namespace qwen_vl {
namespace decode {

// Where the chunk of inputs 8c .. 8c+7 lies in a sequence's activations, in chunks.
template <int kForm>
__device__ inline int place_chunk(int c) {
  constexpr int kPer = form_chunks(kForm), kBlock = 4 * kPer;
  const int in = c % kBlock;
  return c - in + in % kPer * 4 + in / kPer;
}

// Packs 8 activations in the order in which codes come out of their words.
template <class T, int kForm>
__device__ inline uint4 pack_chunk(const float (&v)[8]) {
  using P = Pair<T>;
  if constexpr (kForm == kFloat) {
    return make_uint4(P::pack(v[0], v[1]), P::pack(v[2], v[3]), P::pack(v[4], v[5]),
                      P::pack(v[6], v[7]));
  } else if constexpr (kForm == kInt4) {
    return make_uint4(P::pack(v[0], v[4]), P::pack(v[1], v[5]), P::pack(v[2], v[6]),
                      P::pack(v[3], v[7]));
  } else {
    return make_uint4(P::pack(v[0], v[2]), P::pack(v[1], v[3]), P::pack(v[4], v[6]),
                      P::pack(v[5], v[7]));
  }
}

// What a code c is as a number of T before scale and zero point: c + kBias<T>.
template <class T>
__device__ constexpr float nibble_bias() {
  return std::is_same<T, __half>::value ? 1024.f : 128.f;
}

// Codes 0 to 15 in bits 0-3 and 16-19 -> two numbers, each nibble_bias too large. Exact.
template <class T>
__device__ inline uint32_t nibbles(uint32_t w) {
  constexpr uint32_t kMagic = std::is_same<T, __half>::value ? 0x64006400u : 0x43004300u;
  return and_or<0x000f000fu, kMagic>(w);
}

// Bytes 0 and 2 of a word -> two numbers, exact. Signed codes; unsigned ones come 128 too small.
template <class T, bool kSigned>
__device__ inline uint32_t bytes02(uint32_t w) {
  if constexpr (std::is_same<T, __half>::value) {
    // 1024 + code + 128 in a mantissa of 10 bits.
    const uint32_t v = kSigned ? (w & 0x00ff00ffu) ^ 0x64806480u : (w & 0x00ff00ffu) | 0x64006400u;
    const uint32_t base = 0x64806480u;  // 1152
    const __half2 d = __hsub2(*reinterpret_cast<const __half2*>(&v),
                              *reinterpret_cast<const __half2*>(&base));
    return *reinterpret_cast<const uint32_t*>(&d);
  } else {
    // A mantissa of 7 bits holds 128 + the low bits; the eighth bit moves what is subtracted.
    const uint32_t v = (w & 0x007f007fu) | 0x43004300u;
    const uint32_t base = ((kSigned ? w : ~w) & 0x00800080u) | 0x43004300u;  // 128 or 256
    const __nv_bfloat162 d = __hsub2(*reinterpret_cast<const __nv_bfloat162*>(&v),
                                     *reinterpret_cast<const __nv_bfloat162*>(&base));
    return *reinterpret_cast<const uint32_t*>(&d);
  }
}

// Four words of codes of rows g and g + 8 times two chunks of activations (int8), or each word
// times its own chunk (int4).
template <class T, int kForm>
__device__ inline void multiply_words(float (&c)[4], const uint4& low, const uint4& high,
                                      const uint4 (&x)[form_chunks(kForm)]) {
  const uint32_t lo[4] = {low.x, low.y, low.z, low.w}, hi[4] = {high.x, high.y, high.z, high.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (kForm == kInt4) {
      Pair<T>::mma(c, nibbles<T>(lo[i]), nibbles<T>(hi[i]), nibbles<T>(lo[i] >> 4),
                   nibbles<T>(hi[i] >> 4), x[i].x, x[i].y);
      Pair<T>::mma(c, nibbles<T>(lo[i] >> 8), nibbles<T>(hi[i] >> 8), nibbles<T>(lo[i] >> 12),
                   nibbles<T>(hi[i] >> 12), x[i].z, x[i].w);
    } else {
      constexpr bool kSigned = kForm == kInt8;
      const uint4& y = x[i / 2];
      Pair<T>::mma(c, bytes02<T, kSigned>(lo[i]), bytes02<T, kSigned>(hi[i]),
                   bytes02<T, kSigned>(lo[i] >> 8), bytes02<T, kSigned>(hi[i] >> 8),
                   i % 2 ? y.z : y.x, i % 2 ? y.w : y.y);
    }
  }
}

// Adds an item to the sums of a tile; c[0] and c[1] are two chains, to be added in the end.
//
// slot: the lane's 16 bytes in the ring; scales: the item's; act: the lane's first chunk at the
// item's inputs; live: the lane's column is a sequence; sums: of activations [group][kRows], at the
// item's first group.
template <class T, int kForm>
__device__ inline void multiply_item(float (&c2)[2][4], const uint8_t* slot, const uint32_t* scales,
                                     const uint8_t* act, bool live, const float* sums, int group) {
  const int lane = threadIdx.x % 32, t = lane % 4, g = lane / 4;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float(&c)[4] = c2[h];
    const uint4 low = load16(slot + h * 512), high = load16(slot + 1024 + h * 512);
    uint4 x[form_chunks(kForm)];
#pragma unroll
    for (int i = 0; i < form_chunks(kForm); ++i) {
      x[i] = make_uint4(0, 0, 0, 0);
      if (live) x[i] = load16(act + (h * form_chunks(kForm) + i) * 64);
    }
    if constexpr (kForm == kFloat) {
      Pair<T>::mma(c, low.x, high.x, low.y, high.y, x[0].x, x[0].y);
      Pair<T>::mma(c, low.z, high.z, low.w, high.w, x[0].z, x[0].w);
    } else if constexpr (kForm == kInt8) {
      multiply_words<T, kForm>(c, low, high, x);
    } else {
      // Groups within the half item: those of under 128 (64) inputs are told apart by lanes.
      constexpr int kHalf = form_inputs(kForm) / 2;
      const int parts = group >= kHalf ? 1 : kHalf / group;
      for (int q = 0; q < parts; ++q) {
        float sum[4] = {0.f, 0.f, 0.f, 0.f};
        if (parts == 1) {
          multiply_words<T, kForm>(sum, low, high, x);
        } else {
          uint4 y[form_chunks(kForm)];
#pragma unroll
          for (int i = 0; i < form_chunks(kForm); ++i)
            y[i] = t * parts / 4 == q ? x[i] : make_uint4(0, 0, 0, 0);
          multiply_words<T, kForm>(sum, low, high, y);
        }
        const int at = (h * kHalf) / group + q;
        // A group of more than half an item is met twice: the second time the sum of its
        // activations has been taken off already.
        const bool again = group > kHalf && h;
        const float2 x2 = again ? make_float2(0.f, 0.f)
                                : *reinterpret_cast<const float2*>(sums + at * kRows + 2 * t);
        const float bias = kForm == kInt4 ? nibble_bias<T>() : -128.f;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float2 s = __half22float2(
              *reinterpret_cast<const __half2*>(scales + at * kTile + g + 8 * r));
          c[2 * r] += s.x * (sum[2 * r] - (bias + s.y) * x2.x);
          c[2 * r + 1] += s.x * (sum[2 * r + 1] - (bias + s.y) * x2.y);
        }
      }
    }
  }
}

}  // namespace decode
}  // namespace qwen_vl
#endif  // QWEN_VL_DECODE_MULTIPLY_CUH_
