// Products with INT8 and INT4 weights in integers: inputs as two bytes each, exact sums.
//
// The inputs of a step share a scale: x = scale * (256 high + low), 16 bits of the largest of them,
// where bf16 has 8 of each. Codes are A of an integer product as they are, a sequence's high and
// low bytes two of its eight columns. No code becomes a float, no sum depends on an order.
#ifndef QWEN_VL_CHAIN_CODES_CUH_
#define QWEN_VL_CHAIN_CODES_CUH_

#include "types.cuh"

namespace qwen_vl {
namespace chain {

constexpr float kLevels = 127 * 256;  // of the largest input; its high byte is 127

// In a sequence's row of inputs: where low bytes start (off the banks that high bytes of the same
// step lie in), and where the scale and the sum of each step's inputs are.
__host__ __device__ constexpr int low_at(int form, int inputs) {
  return inputs + (form == kInt4 ? 16 : 64);
}
__host__ __device__ constexpr int sums_at(int inputs) { return 2 * inputs + 64; }
__host__ __device__ constexpr int codes_bytes(int form, int inputs) {
  return sums_at(inputs) + (inputs / step_inputs(form) + 1) / 2 * 16;
}

// Stores inputs 8c .. 8c+7 of a sequence; all lanes of a warp call it, with neighbouring c.
//
// real: there are such inputs. A number that is none makes the scale of its step such a one.
template <int kForm>
__device__ inline void store_codes(uint8_t* row, int inputs, int c, bool real,
                                   const float (&v)[8]) {
  constexpr int kLanes = step_inputs(kForm) / 8;
  uint32_t top = 0;
  float sum = 0.f;
#pragma unroll
  for (int k = 0; k < 8; ++k) top = max(top, __float_as_uint(v[k]) & 0x7fffffffu);
  if (grouped(kForm)) {
#pragma unroll
    for (int k = 0; k < 4; ++k) sum += v[2 * k] + v[2 * k + 1];
  }
#pragma unroll
  for (int d = kLanes / 2; d > 0; d /= 2) {
    top = max(top, __shfl_xor_sync(0xffffffffu, top, d));
    if (grouped(kForm)) sum += __shfl_xor_sync(0xffffffffu, sum, d);
  }
  const float most = __uint_as_float(top);
  const float inverse = most >= 1e-30f ? kLevels * reciprocal(most) : 0.f;
  // The lowest bits of 1.5 * 2^23 + n are those of n; 128 more, so that the low byte's half is
  // rounded into the high one.
  uint32_t bits[8];
#pragma unroll
  for (int k = 0; k < 8; ++k) bits[k] = __float_as_uint(fmaf(v[k], inverse, 12583040.f));
  uint32_t high[2], low[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    // As codes come out of their words: even inputs before odd ones, or in their order.
    constexpr int kStep = kForm == kInt4 ? 2 : 1;
    const int at = kForm == kInt4 ? i : 4 * i;
    const uint32_t a = __byte_perm(bits[at], bits[at + kStep], 0x5410);
    const uint32_t b = __byte_perm(bits[at + 2 * kStep], bits[at + 3 * kStep], 0x5410);
    high[i] = __byte_perm(a, b, 0x7531);
    low[i] = __byte_perm(a, b, 0x6420) ^ 0x80808080u;
  }
  if (!real) return;
  *reinterpret_cast<uint2*>(row + c * 8) = make_uint2(high[0], high[1]);
  *reinterpret_cast<uint2*>(row + low_at(kForm, inputs) + c * 8) = make_uint2(low[0], low[1]);
  if (c % kLanes == 0)
    reinterpret_cast<float2*>(row + sums_at(inputs))[c / kLanes] =
        make_float2(most * (1.f / kLevels), sum * inverse);
}

// Adds a step to the sums of four sequences' rows g and g + 8; a lane has those of sequence t.
//
// low, high: the lane's codes of both outputs; x: its bytes of the inputs, of column g; scale: of
// the codes, half scale and zero point, the second output's 32 bytes on; sums: of sequence t.
template <int kForm>
__device__ inline void multiply_codes(float (&c)[2], const uint4& low, const uint4& high,
                                      const uint8_t* x, float2 first, float2 second, float2 sums) {
  const uint32_t lo[4] = {low.x, low.y, low.z, low.w}, hi[4] = {high.x, high.y, high.z, high.w};
  int part[2][4] = {};
  const uint4 b = decode::load16(x);
  if constexpr (kForm == kInt4) {
    const uint4 b2 = decode::load16(x + 16);
    const uint32_t in[8] = {b.x, b.y, b.z, b.w, b2.x, b2.y, b2.z, b2.w};
#pragma unroll
    for (int i = 0; i < 4; ++i)
      mma_codes<false>(part[i % 2], lo[i] & 0x0f0f0f0fu, hi[i] & 0x0f0f0f0fu,
                       lo[i] >> 4 & 0x0f0f0f0fu, hi[i] >> 4 & 0x0f0f0f0fu, in[2 * i],
                       in[2 * i + 1]);
  } else {
    mma_codes<kForm == kInt8>(part[0], lo[0], hi[0], lo[1], hi[1], b.x, b.y);
    mma_codes<kForm == kInt8>(part[1], lo[2], hi[2], lo[3], hi[3], b.z, b.w);
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float all = static_cast<float>((part[0][2 * r] + part[1][2 * r]) * 256 +
                                         (part[0][2 * r + 1] + part[1][2 * r + 1]));
    const float2 s = r ? second : first;
    if (grouped(kForm)) {
      c[r] = fmaf(fmaf(-s.y, sums.y, all), s.x * sums.x, c[r]);
    } else {
      c[r] = fmaf(all, sums.x, c[r]);
    }
  }
}

}  // namespace chain
}  // namespace qwen_vl
#endif  // QWEN_VL_CHAIN_CODES_CUH_
