// Inputs of a product into shared memory, as the B operand of its tensor-core instructions.
#ifndef QWEN_VL_CHAIN_STAGE_CUH_
#define QWEN_VL_CHAIN_STAGE_CUH_

#include "codes.cuh"

namespace qwen_vl {
namespace chain {

using decode::unpack8;

// Where input i of a sequence lies in memory between gate and up and down, in elements.
template <int kForm>
__device__ inline int place_input(int i) {
  return kForm == kFloat ? decode::place_chunk<kFloat>(i >> 3) * 8 + (i & 7) : i;
}

// Stores inputs 8c .. 8c+7 of a sequence; all lanes of a warp call it, with neighbouring c.
template <class T, int kForm>
__device__ inline void store_inputs(uint8_t* row, int inputs, int c, bool real,
                                    const float (&v)[8]) {
  if constexpr (kForm == kFloat) {
    if (real)
      *reinterpret_cast<uint4*>(row + decode::place_chunk<kFloat>(c) * 16) =
          decode::pack_chunk<T, kFloat>(v);
  } else {
    store_codes<kForm>(row, inputs, c, real, v);
  }
}

__device__ inline float squares_of(const float (&v)[8]) {
  float sum = 0.f;
#pragma unroll
  for (int j = 0; j < 8; ++j) sum += v[j] * v[j];
  return sum;
}
__device__ inline void load_floats(float (&v)[8], const float4 a, const float4 b) {
  v[0] = a.x; v[1] = a.y; v[2] = a.z; v[3] = a.w;
  v[4] = b.x; v[5] = b.y; v[6] = b.z; v[7] = b.w;
}

// Rows are staged before their mean square is known; finish() divides by it. Halves are kept from
// overflow by a power of two.
template <class T>
constexpr float kStagedScale = std::is_same<T, __half>::value ? 0.015625f : 1.f;

// Rows of the residual times the weights of a norm, which are read before the kernel waits.
//
// kChunks: of 8 inputs that a thread has of a row. The sum of a row's squares is put together in
// the same order however many rows there are.
template <class T, int kForm, int kN, int kChunks>
struct Norm {
  uint4 weight[kChunks];

  __device__ void before(const Product& p) {
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
      const int c = threadIdx.x + j * kThreads;
      if (c * 8 < p.m.width) weight[j] = __ldg(static_cast<const uint4*>(p.norm) + c);
    }
  }

  // raw: floats [count][width] where there is more than one row.
  __device__ void after(const Product& p, uint8_t* act, float* raw, float* squares) {
    const int width = p.m.width, count = kN == 1 ? 1 : p.m.count;
    if (kN > 1) {
      for (int row = 0; row < count; ++row) {
#pragma unroll
        for (int j = 0; j < kChunks; ++j) {
          const int c = threadIdx.x + j * kThreads;
          if (c * 8 < width) {
            const uint32_t to = decode::shared_of(raw + row * width + c * 8);
            decode::copy16(to, p.m.x + row * width + c * 8, true);
            decode::copy16(to + 16, p.m.x + row * width + c * 8 + 4, true);
          }
        }
      }
      decode::commit();
      decode::wait_groups<0>();  // a thread reads only what it copied itself
    }
#pragma unroll 2
    for (int row = 0; row < count; ++row) {
      float sum = 0.f;
#pragma unroll
      for (int j = 0; j < kChunks; ++j) {
        const int c = threadIdx.x + j * kThreads;
        if (c * 8 < width) sum += stage(p, act, raw, row, j, c);
      }
#pragma unroll
      for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
      if (threadIdx.x % 32 == 0) squares[row * kWarps + threadIdx.x / 32] = sum;
    }
  }

  // Returns the sum of squares of chunk c.
  __device__ float stage(const Product& p, uint8_t* act, const float* raw, int row, int j,
                         int c) {
    float v[8], n[8];
    if (kN > 1) {
      const float4* kept = reinterpret_cast<const float4*>(raw + row * p.m.width + c * 8);
      load_floats(v, kept[0], kept[1]);
    } else {
      const float4* from = reinterpret_cast<const float4*>(p.m.x + row * p.m.width + c * 8);
      load_floats(v, __ldcg(from), __ldcg(from + 1));
    }
    unpack8<T>(weight[j], n);
#pragma unroll
    for (int k = 0; k < 8; ++k) n[k] *= v[k] * kStagedScale<T>;
    // Widths are multiples of 256: the lanes of a warp have inputs all, or none.
    store_inputs<T, kForm>(act + row * p.act_stride, p.m.width, c, true, n);
    return squares_of(v);
  }
};

// What attention gave, its parts put together: two lanes a chunk, sixteen apart, take turns.
template <class T, int kForm, int kN>
__device__ inline void stage_attention(const Product& p, uint8_t* act,
                                       const qwen_vl_decode_row* rows) {
  constexpr int kAtOnce = 4;
  const int shift = p.m.dim_shift - 3, per = p.m.heads << shift, lane = threadIdx.x % 32;
  const int total = (kN == 1 ? 1 : p.m.count) * per, two = 2 << shift;
#pragma unroll 1
  for (int i = threadIdx.x / 32 * 16 + lane % 16; i < total; i += kThreads / 2) {
    const int row = kN == 1 ? 0 : i / per, c = i - row * per, head = row * p.m.heads + (c >> shift);
    const int parts = part_count(positions(rows[row]));
    const int whose = head * kMaxParts + lane / 16;
    const float2* scale = p.m.part_scale + whose;
    const uint4* from = static_cast<const uint4*>(p.m.parts) + (whose << shift) +
                        (c & ((1 << shift) - 1));
    float v[8] = {}, sum = 0.f, top = -INFINITY;
#pragma unroll 1
    for (int first = lane / 16; first < parts; first += 2 * kAtOnce) {
      float2 ms[kAtOnce];
      uint4 raw[kAtOnce];
#pragma unroll
      for (int q = 0; q < kAtOnce; ++q) {
        ms[q] = make_float2(-INFINITY, 0.f);
        raw[q] = make_uint4(0, 0, 0, 0);
        if (first + 2 * q < parts) {
          ms[q] = __ldcg(scale + 2 * q);
          raw[q] = __ldcg(from + q * two);
        }
      }
      scale += 2 * kAtOnce;
      from += kAtOnce * two;
      float high = top;
#pragma unroll
      for (int q = 0; q < kAtOnce; ++q) high = fmaxf(high, ms[q].x);
      const float keep = top == -INFINITY ? 0.f : power2(top - high);
      top = high;
      sum *= keep;
#pragma unroll
      for (int k = 0; k < 8; ++k) v[k] *= keep;
#pragma unroll
      for (int q = 0; q < kAtOnce; ++q) {
        const float f = ms[q].x == -INFINITY ? 0.f : ms[q].y * power2(ms[q].x - high);
        float o[8];
        unpack8<T>(raw[q], o);
        sum += f;
#pragma unroll
        for (int k = 0; k < 8; ++k) v[k] += f * o[k];
      }
    }
    const float high = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 16));
    const float keep = top == -INFINITY ? 0.f : power2(top - high);
    sum *= keep;
    const float one = quotient(1.f, sum + __shfl_xor_sync(0xffffffffu, sum, 16));
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      v[k] *= keep;
      v[k] = (v[k] + __shfl_xor_sync(0xffffffffu, v[k], 16)) * one;
    }
    store_inputs<T, kForm>(act + row * p.act_stride, per * 8, c, true, v);
  }
}

// The products of gate and up: as codes, or as they lie in memory, which is how they shall lie in
// shared memory.
template <class T, int kForm, int kN>
__device__ inline void stage_hidden(const Product& p, uint8_t* act) {
  const int per = p.m.mlp / 8, count = kN == 1 ? 1 : p.m.count;
  if constexpr (kN == 1 || kForm != kFloat) {
    // Not by asynchronous copies, which would be waited for with those of weights.
    constexpr int kAtOnce = kForm == kFloat ? 5 : 3;
    for (int row = 0; row < count; ++row) {
      const uint4* from = static_cast<const uint4*>(p.m.act) + static_cast<int64_t>(row) * per;
      uint8_t* const to = act + row * p.act_stride;
#pragma unroll 1
      for (int first = threadIdx.x; first - threadIdx.x % 32 < per; first += kAtOnce * kThreads) {
        uint4 raw[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          raw[i] = make_uint4(0, 0, 0, 0);
          if (first + i * kThreads < per) raw[i] = __ldcg(from + first + i * kThreads);
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const int c = first + i * kThreads;
          if constexpr (kForm == kFloat) {
            if (c < per) *reinterpret_cast<uint4*>(to + c * 16) = raw[i];
          } else {
            float v[8];
            unpack8<T>(raw[i], v);
            store_codes<kForm>(to, p.m.mlp, c, c < per, v);
          }
        }
      }
    }
  } else {
    for (int row = 0; row < count; ++row) {
      const uint8_t* from =
          static_cast<const uint8_t*>(p.m.act) + static_cast<int64_t>(row) * per * 16;
      const uint32_t to = decode::shared_of(act + row * p.act_stride);
      for (int c = threadIdx.x; c < per; c += kThreads)
        decode::copy16(to + c * 16, from + c * 16, true);
    }
    decode::commit();
    decode::wait_groups<0>();
  }
}

}  // namespace chain
}  // namespace qwen_vl
#endif  // QWEN_VL_CHAIN_STAGE_CUH_
