// Activations of an op into shared memory, as the B operand of its products.
#ifndef QWEN_VL_DECODE_STAGE_CUH_
#define QWEN_VL_DECODE_STAGE_CUH_

#include "decode_multiply.cuh"
#include "decode_stream.cuh"
#include "decode_tables.cuh"

namespace qwen_vl {
namespace decode {

// Where an op's activations go.
struct Staged {
  uint8_t* act;  // [sequence] rows of act_stride bytes
  float* sums;   // [group][kRows], of grouped forms
  int stride, group;
};

// Stores inputs 8c .. 8c+7 of a sequence and counts them into the sums of their group.
//
// All lanes of a warp call it, with neighbouring chunks of one kind; `real` for those that exist.
template <class T, int kForm>
__device__ inline void store_chunk(const Staged& s, int row, int c, const float (&v)[8],
                                   bool real) {
  const uint4 packed = pack_chunk<T, kForm>(v);
  if (real) {
    *reinterpret_cast<uint4*>(s.act + row * s.stride + place_chunk<kForm>(c) * 16) = packed;
  }
  if constexpr (grouped(kForm)) {
    // Of the numbers that are multiplied, so after rounding.
    float r[8];
    unpack8<T>(packed, r);
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += r[i];
    const int lanes = s.group / 8;
    for (int d = lanes / 2; d > 0; d /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
    if (real && c % lanes == 0) s.sums[c / lanes * kRows + row] = sum;
  }
}

// Inputs behind the last, up to whole items, are zero.
template <int kForm>
__device__ inline void pad_inputs(const Staged& s, int count, int inputs) {
  constexpr int kItemInputs = form_inputs(kForm);
  const int end = (inputs + kItemInputs - 1) / kItemInputs * kItemInputs;
  const int more = (end - inputs) / 8;
  for (int i = threadIdx.x; i < count * more; i += kThreads) {
    const int c = inputs / 8 + i % more;
    *reinterpret_cast<uint4*>(s.act + i / more * s.stride + place_chunk<kForm>(c) * 16) =
        make_uint4(0, 0, 0, 0);
    if (grouped(kForm) && c % (s.group / 8) == 0)
      s.sums[c / (s.group / 8) * kRows + i / more] = 0.f;
  }
}

// x = from + parts (or the embedding of `tokens`), stored to `to` by all blocks together and
// staged as norm(x) * weight.
template <class T, int kForm, int kUnits>
__device__ void stage_norm(const Params& p, const Staged& s, const float* from, const float* parts,
                           int part_count, const int* tokens, float* to, const void* weight,
                           float* squares) {
  const int width = p.m.width, per = width / 256, units = p.l.count * per;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float v[kUnits][8];
  uint4 w[kUnits];
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    const int unit = warp + i * kWarps;
    if (unit < units) {
      const int row = unit / per, k = unit % per * 256 + lane * 8;
      w[i] = __ldg(reinterpret_cast<const uint4*>(static_cast<const T*>(weight) + k));
      if (tokens) {
        const int token = tokens[row];
        uint4 raw = make_uint4(0, 0, 0, 0);
        if (static_cast<unsigned>(token) < static_cast<unsigned>(p.m.vocab))
          raw = __ldg(reinterpret_cast<const uint4*>(
              static_cast<const T*>(p.m.embedding) + static_cast<int64_t>(token) * width + k));
        unpack8<T>(raw, v[i]);
      } else {
        const float* at = from + row * width + k;
        const float4 a = load_far(at), b = load_far(at + 4);
        v[i][0] = a.x; v[i][1] = a.y; v[i][2] = a.z; v[i][3] = a.w;
        v[i][4] = b.x; v[i][5] = b.y; v[i][6] = b.z; v[i][7] = b.w;
#pragma unroll 2
        for (int q = 0; q < part_count; ++q) {
          const float* more = parts + (q * kRows + row) * width + k;
          const float4 c = load_far(more), d = load_far(more + 4);
          v[i][0] += c.x; v[i][1] += c.y; v[i][2] += c.z; v[i][3] += c.w;
          v[i][4] += d.x; v[i][5] += d.y; v[i][6] += d.z; v[i][7] += d.w;
        }
      }
      float sum = 0.f;
#pragma unroll
      for (int j = 0; j < 8; ++j) sum += v[i][j] * v[i][j];
#pragma unroll
      for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
      if (lane == 0) squares[unit] = sum;
    }
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    const int unit = warp + i * kWarps;
    if (unit < units) {
      const int row = unit / per, c = unit % per * 32 + lane;
      float sum = 0.f;
      for (int j = 0; j < per; ++j) sum += squares[row * per + j];
      const float scale = rsqrtf(sum / width + p.m.eps);
      if (to && (row * (width / 8) + c) % gridDim.x == blockIdx.x) {
        float4* out = reinterpret_cast<float4*>(to + row * width + c * 8);
        out[0] = make_float4(v[i][0], v[i][1], v[i][2], v[i][3]);
        out[1] = make_float4(v[i][4], v[i][5], v[i][6], v[i][7]);
      }
      float n[8];
      unpack8<T>(w[i], n);
#pragma unroll
      for (int j = 0; j < 8; ++j) n[j] *= v[i][j] * scale;
      store_chunk<T, kForm>(s, row, c, n, true);
    }
  }
  pad_inputs<kForm>(s, p.l.count, width);
  __syncthreads();
}

template <class T, int kForm>
__device__ inline void stage_norm_of(const Params& p, const Staged& s, const float* from,
                                     const float* parts, int part_count, const int* tokens,
                                     float* to, const void* weight, float* squares) {
  // One sequence takes few registers.
  if (p.l.count * p.m.width <= 256 * kWarps) {
    stage_norm<T, kForm, 1>(p, s, from, parts, part_count, tokens, to, weight, squares);
  } else {
    stage_norm<T, kForm, kNormUnits>(p, s, from, parts, part_count, tokens, to, weight, squares);
  }
}

// The products of gate and up, as they were stored.
template <class T, int kForm>
__device__ void stage_copy(const Params& p, const Staged& s) {
  const int per = p.m.mlp / 8, total = p.l.count * per;
  for (int i = threadIdx.x; i - static_cast<int>(threadIdx.x % 32) < total; i += kThreads) {
    const bool real = i < total;
    const int row = real ? i / per : 0, c = real ? i % per : 0;
    float v[8];
    unpack8<T>(load_far16(static_cast<const T*>(p.act) + row * p.m.mlp + c * 8), v);
    store_chunk<T, kForm>(s, row, c, v, real);
  }
  pad_inputs<kForm>(s, p.l.count, p.m.mlp);
  __syncthreads();
}

// What attention gave, its parts put together.
template <class T, int kForm>
__device__ void stage_attention(const Params& p, const Staged& s, int splits) {
  const int dim = p.m.head_dim, per = p.m.heads * dim / 8, total = p.l.count * per;
  for (int i = threadIdx.x; i - static_cast<int>(threadIdx.x % 32) < total; i += kThreads) {
    const bool real = i < total;
    const int j = real ? i : 0, head = j / (dim / 8), d = j % (dim / 8) * 8;  // of all sequences
    const float2* scale = p.attention_scale + head * kMaxSplits;
    const float* from = p.attention + static_cast<int64_t>(head) * kMaxSplits * dim + d;
    float top = -INFINITY;
    for (int q = 0; q < splits; ++q) top = fmaxf(top, __ldcg(scale + q).x);
    float v[8] = {}, sum = 0.f;
#pragma unroll 4
    for (int q = 0; q < splits; ++q) {
      const float2 ms = __ldcg(scale + q);
      const float4 a = load_far(from + q * dim), b = load_far(from + q * dim + 4);
      const float f = exp2f(ms.x - top);
      sum += f * ms.y;
      v[0] += f * a.x; v[1] += f * a.y; v[2] += f * a.z; v[3] += f * a.w;
      v[4] += f * b.x; v[5] += f * b.y; v[6] += f * b.z; v[7] += f * b.w;
    }
    const float one = 1.f / sum;
#pragma unroll
    for (int k = 0; k < 8; ++k) v[k] *= one;
    store_chunk<T, kForm>(s, j / per, j % per, v, real);
  }
  pad_inputs<kForm>(s, p.l.count, p.m.heads * dim);
  __syncthreads();
}

}  // namespace decode
}  // namespace qwen_vl
#endif  // QWEN_VL_DECODE_STAGE_CUH_
