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
  int group_shift;  // of chunks to groups
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
    if (real && (c & (lanes - 1)) == 0) s.sums[(c >> s.group_shift) * kRows + row] = sum;
  }
}

// Inputs behind the last, up to whole items, are zero.
template <int kForm>
__device__ inline void pad_inputs(const Staged& s, int count, int inputs) {
  constexpr int kItemInputs = form_inputs(kForm);
  if (inputs % kItemInputs == 0) return;
  const int end = (inputs / kItemInputs + 1) * kItemInputs, lanes = s.group / 8;
  for (int row = 0; row < count; ++row) {
    for (int c = inputs / 8 + threadIdx.x; c < end / 8; c += kThreads) {
      *reinterpret_cast<uint4*>(s.act + row * s.stride + place_chunk<kForm>(c) * 16) =
          make_uint4(0, 0, 0, 0);
      if (grouped(kForm) && (c & (lanes - 1)) == 0)
        s.sums[(c >> s.group_shift) * kRows + row] = 0.f;
    }
  }
}

// x = from + parts (or the embedding of `tokens`), stored to `to` by all blocks together and
// staged as norm(x) * weight. The sums wait in shared memory behind the staged inputs.
template <class T, int kForm>
__device__ void stage_norm(const Params& p, const Staged& s, const float* from, const float* parts,
                           int part_count, const int* tokens, float* to, const void* weight,
                           float* squares) {
  const int width = p.m.width, per = width / 256, units = p.l.count * per;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  uint8_t* const kept = s.act + s.stride - width * 4 - kActPad;
#pragma unroll 1
  for (int unit = warp; unit < units; unit += kThreads / 32) {
    const int row = divided(unit, p.by_norm_units), k = (unit - row * per) * 256 + lane * 8;
    float v[8];
    if (tokens) {
      const int token = tokens[row];
      uint4 raw = make_uint4(0, 0, 0, 0);
      if (static_cast<unsigned>(token) < static_cast<unsigned>(p.m.vocab))
        raw = __ldg(reinterpret_cast<const uint4*>(static_cast<const T*>(p.m.embedding) +
                                                   static_cast<int64_t>(token) * width + k));
      unpack8<T>(raw, v);
    } else {
      const float* at = from + row * width + k;
      const float4 a = load_far(at), b = load_far(at + 4);
      v[0] = a.x; v[1] = a.y; v[2] = a.z; v[3] = a.w;
      v[4] = b.x; v[5] = b.y; v[6] = b.z; v[7] = b.w;
#pragma unroll 3
      for (int q = 0; q < part_count; ++q) {
        const float* more = parts + (q * kRows + row) * width + k;
        const float4 c = load_far(more), d = load_far(more + 4);
        v[0] += c.x; v[1] += c.y; v[2] += c.z; v[3] += c.w;
        v[4] += d.x; v[5] += d.y; v[6] += d.z; v[7] += d.w;
      }
    }
    float sum = 0.f;
#pragma unroll
    for (int j = 0; j < 8; ++j) sum += v[j] * v[j];
#pragma unroll
    for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
    if (lane == 0) squares[unit] = sum;
    float4* keep = reinterpret_cast<float4*>(kept + row * s.stride + k * 4);
    keep[0] = make_float4(v[0], v[1], v[2], v[3]);
    keep[1] = make_float4(v[4], v[5], v[6], v[7]);
    const int piece = (row * width + k) / 8;
    if (to && piece - divided(piece, p.by_blocks) * p.m.blocks == static_cast<int>(blockIdx.x)) {
      float4* out = reinterpret_cast<float4*>(to + row * width + k);
      out[0] = keep[0];
      out[1] = keep[1];
    }
  }
  __syncthreads();
#pragma unroll 1
  for (int unit = warp; unit < units; unit += kThreads / 32) {
    const int row = divided(unit, p.by_norm_units), c = (unit - row * per) * 32 + lane;
    const uint4 raw = __ldg(reinterpret_cast<const uint4*>(static_cast<const T*>(weight) + c * 8));
    float sum = 0.f;
    for (int j = 0; j < per; ++j) sum += squares[row * per + j];
    const float scale = rsqrtf(sum / width + p.m.eps);
    const float4* keep = reinterpret_cast<const float4*>(kept + row * s.stride + c * 32);
    const float4 a = keep[0], b = keep[1];
    float n[8];
    unpack8<T>(raw, n);
    n[0] *= a.x * scale; n[1] *= a.y * scale; n[2] *= a.z * scale; n[3] *= a.w * scale;
    n[4] *= b.x * scale; n[5] *= b.y * scale; n[6] *= b.z * scale; n[7] *= b.w * scale;
    store_chunk<T, kForm>(s, row, c, n, true);
  }
  pad_inputs<kForm>(s, p.l.count, width);
  __syncthreads();
}

// The products of gate and up, as they were stored.
template <class T, int kForm>
__device__ void stage_copy(const Params& p, const Staged& s) {
  const int per = p.m.mlp / 8, total = p.l.count * per;
#pragma unroll 4
  for (int i = threadIdx.x; i - static_cast<int>(threadIdx.x % 32) < total; i += kThreads) {
    const bool real = i < total;
    const int row = real ? divided(i, p.by_mlp) : 0, c = real ? i - row * per : 0;
    const uint4 raw = load_far16(static_cast<const T*>(p.act) + row * p.m.mlp + c * 8);
    if constexpr (kForm == kFloat) {
      if (real) *reinterpret_cast<uint4*>(s.act + row * s.stride + c * 16) = raw;
    } else {
      float v[8];
      unpack8<T>(raw, v);
      store_chunk<T, kForm>(s, row, c, v, real);
    }
  }
  pad_inputs<kForm>(s, p.l.count, p.m.mlp);
  __syncthreads();
}

// What attention gave, its parts put together.
template <class T, int kForm>
__device__ void stage_attention(const Params& p, const Staged& s, const int* splits) {
  const int dim = p.m.head_dim, shift = dim == 128 ? 4 : 3;
  const int per = p.m.heads << shift, total = p.l.count * per;
#pragma unroll 1
  for (int i = threadIdx.x; i - static_cast<int>(threadIdx.x % 32) < total; i += kThreads) {
    const bool real = i < total;
    const int j = real ? i : 0, head = j >> shift, d = (j - (head << shift)) * 8;
    const int row = divided(j, p.by_attention), count = splits[row];
    const float2* scale = p.attention_scale + head * kMaxSplits;
    const float* from = p.attention + static_cast<int64_t>(head) * kMaxSplits * dim + d;
    float v[8] = {}, sum = 0.f, top = -INFINITY;
#pragma unroll 4
    for (int q = 0; q < count; ++q) {
      const float2 ms = __ldcg(scale + q);
      const float4 a = load_far(from + q * dim), b = load_far(from + q * dim + 4);
      const float high = fmaxf(top, ms.x);
      const float old = exp2f(top - high), f = ms.x == -INFINITY ? 0.f : exp2f(ms.x - high);
      const float keep = top == -INFINITY ? 0.f : old;
      top = high;
      sum = sum * keep + f * ms.y;
      v[0] = v[0] * keep + f * a.x; v[1] = v[1] * keep + f * a.y;
      v[2] = v[2] * keep + f * a.z; v[3] = v[3] * keep + f * a.w;
      v[4] = v[4] * keep + f * b.x; v[5] = v[5] * keep + f * b.y;
      v[6] = v[6] * keep + f * b.z; v[7] = v[7] * keep + f * b.w;
    }
    const float one = 1.f / sum;
#pragma unroll
    for (int k = 0; k < 8; ++k) v[k] *= one;
    store_chunk<T, kForm>(s, row, j - row * per, v, real);
  }
  pad_inputs<kForm>(s, p.l.count, p.m.heads * dim);
  __syncthreads();
}

}  // namespace decode
}  // namespace qwen_vl
#endif  // QWEN_VL_DECODE_STAGE_CUH_
