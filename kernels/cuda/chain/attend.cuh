// Grouped-query attention of one position to a cache, cut along the cache over blocks and warps.
#ifndef QWEN_VL_CHAIN_ATTEND_CUH_
#define QWEN_VL_CHAIN_ATTEND_CUH_

#include "types.cuh"

namespace qwen_vl {
namespace chain {

constexpr int kAttendWarps = 8, kAttendThreads = 32 * kAttendWarps;
constexpr int kEdge = kAttendWarps * 4;  // of two maxima and two sums, of warps and pairs of heads
constexpr int kAttendBytes = (kAttendWarps * 8 * 32 + kEdge) * 16;

// One part of one group of heads of one sequence: a block each, [count][kv heads][kMaxParts].
//
// Scores of 16 positions are a product with keys as A and queries as B, the mix one with values as
// A and probabilities as B; values and probabilities are transposed between registers. Keys and
// values of earlier steps are read before the kernel waits. A part is stored divided by its sum.
template <class T, int kDim>
__global__ void __launch_bounds__(kAttendThreads, 2) attention(const __grid_constant__ Attention p) {
  let_next_start();
  QWEN_VL_DYNAMIC_SHARED(shared);
  float4* const mixes = reinterpret_cast<float4*>(shared);
  float4* const edge = mixes + kAttendWarps * 8 * 32;
  constexpr int kBlocks = kDim / 32;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int part = blockIdx.x % kMaxParts, unit = blockIdx.x / kMaxParts;
  const int s = unit / p.m.kv_heads, kv = unit - s * p.m.kv_heads;
  const int group = p.m.heads / p.m.kv_heads;
  // Blocks without work stay as long as the others: where they left early, the next kernel would
  // put two of its blocks on one multiprocessor.
  if (s >= p.m.count) {
    await_previous();
    return;
  }
  const qwen_vl_decode_row r = p.m.state[p.m.launch->slot[s]];
  const int length = positions(r), size = part_size(length);
  if (part >= part_count(length)) {
    await_previous();
    return;
  }
  const int begin = min(length, part * size), end = min(length, begin + size);

  const int64_t plane = static_cast<int64_t>(p.layer) * 2 * p.m.kv_heads + kv;
  const T* const keys = static_cast<const T*>(r.cache) + plane * r.capacity * kDim + 8 * t;
  const int64_t values = static_cast<int64_t>(p.m.kv_heads) * r.capacity * kDim;
  int at = begin + 16 * warp;
  uint4 k[2][kBlocks] = {}, v[2][kBlocks] = {};
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = at + g + 8 * h;
    const T* from = keys + static_cast<int64_t>(row) * kDim;
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) load_weights(k[h][i], from + i * 32, row < min(end, r.length));
#pragma unroll
    for (int i = 0; i < kBlocks; ++i)
      load_weights(v[h][i], from + values + i * 32, row < min(end, r.length));
  }

  await_previous();
  uint4 q[kBlocks] = {};
  const T* const queries =
      static_cast<const T*>(p.m.q) + (s * p.m.heads + kv * group + g) * kDim + 8 * t;
#pragma unroll
  for (int i = 0; i < kBlocks; ++i)
    if (g < group) q[i] = __ldcg(reinterpret_cast<const uint4*>(queries + i * 32));
  auto load_row = [&](int h, int row) {
    const T* from = keys + static_cast<int64_t>(row) * kDim;
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      k[h][i] = __ldcg(reinterpret_cast<const uint4*>(from + i * 32));
      v[h][i] = __ldcg(reinterpret_cast<const uint4*>(from + values + i * 32));
    }
  };
#pragma unroll
  for (int h = 0; h < 2; ++h)
    if (at + g + 8 * h < end && at + g + 8 * h >= r.length) load_row(h, at + g + 8 * h);

  const float unit_scale = rsqrtf(static_cast<float>(kDim)) * 1.4426950408889634f;
  float top[2] = {-INFINITY, -INFINITY}, sum[2] = {0.f, 0.f}, acc[2 * kBlocks][4] = {};
  while (at < end) {
    float c[2][4] = {};
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      Pair<T>::mma(c[0], k[0][i].x, k[1][i].x, k[0][i].y, k[1][i].y, q[i].x, q[i].y);
      Pair<T>::mma(c[1], k[0][i].z, k[1][i].z, k[0][i].w, k[1][i].w, q[i].z, q[i].w);
    }
    // A row past the end has no key; its probability is zero.
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float low = at + g < end ? (c[0][j] + c[1][j]) * unit_scale : -INFINITY;
      float high = at + g + 8 < end ? (c[0][2 + j] + c[1][2 + j]) * unit_scale : -INFINITY;
      float m = fmaxf(low, high);
#pragma unroll
      for (int d = 4; d < 32; d *= 2) m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, d));
      m = fmaxf(m, top[j]);
      const float before = top[j];
      top[j] = m;
      c[0][j] = low = power2(low - m);
      c[0][2 + j] = high = power2(high - m);
      if (before != -INFINITY) {
        const float keep = power2(before - m);
        sum[j] *= keep;
#pragma unroll
        for (int i = 0; i < 2 * kBlocks; ++i) {
          acc[i][j] *= keep;
          acc[i][2 + j] *= keep;
        }
      }
      sum[j] += low + high;
    }
    const uint32_t b0 = decode::transpose8(Pair<T>::pack(c[0][0], c[0][1]));
    const uint32_t b1 = decode::transpose8(Pair<T>::pack(c[0][2], c[0][3]));
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      using decode::transpose8;
      Pair<T>::mma(acc[2 * i], transpose8(v[0][i].x), transpose8(v[0][i].y),
                   transpose8(v[1][i].x), transpose8(v[1][i].y), b0, b1);
      Pair<T>::mma(acc[2 * i + 1], transpose8(v[0][i].z), transpose8(v[0][i].w),
                   transpose8(v[1][i].z), transpose8(v[1][i].w), b0, b1);
    }
    at += 16 * kAttendWarps;
    if (at < end) {
#pragma unroll
      for (int h = 0; h < 2; ++h)
        if (at + g + 8 * h < end) load_row(h, at + g + 8 * h);
    }
  }
#pragma unroll
  for (int j = 0; j < 2; ++j) {
#pragma unroll
    for (int d = 4; d < 32; d *= 2) sum[j] += __shfl_xor_sync(0xffffffffu, sum[j], d);
  }
  if (g == 0) edge[warp * 4 + t] = make_float4(top[0], top[1], sum[0], sum[1]);
#pragma unroll
  for (int i = 0; i < 2 * kBlocks; ++i)
    mixes[(warp * 8 + i) * 32 + lane] = make_float4(acc[i][0], acc[i][1], acc[i][2], acc[i][3]);
  __syncthreads();

  // A thread puts four numbers of two heads together: of matrix i, as lane `lane` held them.
  const int warps = min(kAttendWarps, (end - begin + 15) / 16), i = warp;
  const int64_t head = s * p.m.heads + kv * group;
  if (i < 2 * kBlocks) {
    float high[2] = {-INFINITY, -INFINITY}, total[2] = {0.f, 0.f};
    float4 mix = make_float4(0.f, 0.f, 0.f, 0.f), e[kAttendWarps];
#pragma unroll
    for (int w = 0; w < kAttendWarps; ++w) {
      e[w] = edge[w * 4 + t];
      if (w < warps) {
        high[0] = fmaxf(high[0], e[w].x);
        high[1] = fmaxf(high[1], e[w].y);
      }
    }
#pragma unroll
    for (int w = 0; w < kAttendWarps; ++w) {
      if (w < warps) {
        const float f0 = power2(e[w].x - high[0]), f1 = power2(e[w].y - high[1]);
        const float4 o = mixes[(w * 8 + i) * 32 + lane];
        total[0] += f0 * e[w].z;
        total[1] += f1 * e[w].w;
        mix.x += f0 * o.x;
        mix.y += f1 * o.y;
        mix.z += f0 * o.z;
        mix.w += f1 * o.w;
      }
    }
    const float one[2] = {warps ? 1.f / total[0] : 0.f, warps ? 1.f / total[1] : 0.f};
    const int d = i / 2 * 32 + g / 2 * 8 + g % 2 + i % 2 * 4;
    T* const out = static_cast<T*>(p.m.parts) + (head * kMaxParts + part) * kDim + d;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int h = 2 * t + j;
      if (h < group) {
        out[static_cast<int64_t>(h) * kMaxParts * kDim] = T((j ? mix.y : mix.x) * one[j]);
        out[static_cast<int64_t>(h) * kMaxParts * kDim + 2] = T((j ? mix.w : mix.z) * one[j]);
        if (i == 0 && g == 0)
          p.m.part_scale[(head + h) * kMaxParts + part] = make_float2(high[j], total[j]);
      }
    }
  }
}

}  // namespace chain
}  // namespace qwen_vl
#endif  // QWEN_VL_CHAIN_ATTEND_CUH_
