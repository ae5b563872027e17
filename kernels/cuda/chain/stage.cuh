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

// Chunks of the rows of a step, a thread's own first: neighbouring lanes have neighbouring chunks.
struct Chunk {
  int row = 0, c;
  // per: chunks of a row.
  __device__ Chunk(int per) : c(threadIdx.x) { settle(per); }
  __device__ void next(int per) {
    c += kThreads;
    settle(per);
  }
  __device__ void settle(int per) {
    while (c >= per) {
      c -= per;
      ++row;
    }
  }
};

// Rows of the residual times the weights of a norm.
//
// kChunks: of 8 inputs that a thread has of a row. Of one row the weights are read before the
// kernel waits. squares: [kN][kSquares], sums of 256 inputs, put together in the same order however
// many rows there are. Widths are multiples of 256: the lanes of a warp have inputs all, or none.
template <class T, int kForm, int kN, int kChunks>
struct Norm {
  uint4 weight[kChunks];

  __device__ void before(const Product& p) {
    if (kN > 1) return;
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
      const int c = threadIdx.x + j * kThreads;
      if (c * 8 < p.m.width) weight[j] = __ldg(static_cast<const uint4*>(p.norm) + c);
    }
  }

  __device__ void after(const Product& p, uint8_t* act, float* squares) {
    const int per = p.m.width / 8;
    if constexpr (kN == 1) {
#pragma unroll
      for (int j = 0; j < kChunks; ++j) {
        const int c = threadIdx.x + j * kThreads;
        const float4* const from = reinterpret_cast<const float4*>(p.m.x) + 2 * c;
        if (c < per) stage(p, act, squares, 0, c, weight[j], __ldcg(from), __ldcg(from + 1));
      }
    } else {
      constexpr int kAtOnce = 2;
      Chunk at(per);
      while (at.row < p.m.count) {
        float4 x[kAtOnce][2];
        uint4 w[kAtOnce];
        int rows[kAtOnce], c[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          rows[i] = at.row;
          c[i] = at.c;
          if (at.row < p.m.count) {
            const float4* const from =
                reinterpret_cast<const float4*>(p.m.x + at.row * p.m.width) + 2 * at.c;
            x[i][0] = __ldcg(from);
            x[i][1] = __ldcg(from + 1);
            w[i] = __ldg(static_cast<const uint4*>(p.norm) + at.c);
          }
          at.next(per);
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i)
          if (rows[i] < p.m.count)
            stage(p, act, squares, rows[i], c[i], w[i], x[i][0], x[i][1]);
      }
    }
  }

  __device__ void stage(const Product& p, uint8_t* act, float* squares, int row, int c, uint4 w,
                        float4 low, float4 high) {
    float v[8], n[8];
    load_floats(v, low, high);
    unpack8<T>(w, n);
#pragma unroll
    for (int k = 0; k < 8; ++k) n[k] *= v[k] * kStagedScale<T>;
    store_inputs<T, kForm>(act + row * p.act_stride, p.m.width, c, true, n);
    float sum = squares_of(v);
#pragma unroll
    for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
    if (c % 32 == 0) squares[row * kSquares + c / 32] = sum;
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
// shared memory. Not by asynchronous copies, which would be waited for with those of weights.
template <class T, int kForm, int kN>
__device__ inline void stage_hidden(const Product& p, uint8_t* act) {
  constexpr int kAtOnce = kForm == kFloat ? 5 : 3;
  const int per = p.m.mlp / 8, count = kN == 1 ? 1 : p.m.count;
  const uint4* const from = static_cast<const uint4*>(p.m.act);
  Chunk at(per);
  // Whole warps: all lanes take part in what they do together.
#pragma unroll 1
  for (int first = threadIdx.x; first - static_cast<int>(threadIdx.x) % 32 < count * per;
       first += kAtOnce * kThreads) {
    uint4 raw[kAtOnce];
    int rows[kAtOnce], c[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      rows[i] = at.row;
      c[i] = at.c;
      raw[i] = make_uint4(0, 0, 0, 0);
      if (at.row < count) raw[i] = __ldcg(from + first + i * kThreads);
      at.next(per);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      uint8_t* const row = act + (kN == 1 ? 0 : min(rows[i], count - 1) * p.act_stride);
      if constexpr (kForm == kFloat) {
        if (rows[i] < count) *reinterpret_cast<uint4*>(row + c[i] * 16) = raw[i];
      } else {
        float v[8];
        unpack8<T>(raw[i], v);
        store_codes<kForm>(row, p.m.mlp, c[i], rows[i] < count, v);
      }
    }
  }
}

}  // namespace chain
}  // namespace qwen_vl
#endif  // QWEN_VL_CHAIN_STAGE_CUH_
