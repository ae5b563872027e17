// Grouped-query attention of one position to a cache, cut along the cache over blocks and warps.
#ifndef QWEN_VL_DECODE_ATTEND_CUH_
#define QWEN_VL_DECODE_ATTEND_CUH_

#include "decode_types.cuh"

namespace qwen_vl {
namespace decode {

// Parts that a cache of `length` is cut into: a part costs its block time, and the parts cost every
// block time when they are put together. Nothing but the length counts: a sequence's sums are the
// same whoever is beside it.
__device__ inline int split_count(int length) {
  const int few = min(5, (length + 127) / 128);
  return min(kMaxSplits, max(few, __float2int_rn(sqrtf(length / 48.f))));
}

// The keys and values that a warp of a part reads first, on their way into the L2 cache.
template <class T>
__device__ inline void prefetch_cache(const Params& p, const T* keys, int64_t values, int begin,
                                      int end) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int lines = p.m.head_dim * 2 / 128, at = begin + 16 * warp;
  for (int i = lane; i < 16 * lines; i += 32) {
    const int position = at + i / lines;
    if (warp < kAttendWarps && position < end) {
      const T* line = keys + static_cast<int64_t>(position) * p.m.head_dim + i % lines * 64;
      prefetch_l2(line);
      prefetch_l2(line + values);
    }
  }
}

// One part: up to 8 query heads of a group of one sequence, positions [begin, end).
//
// Scores of 16 positions are a product with keys as A and queries as B, the mix one with values as
// A and probabilities as B; values and probabilities are transposed between registers.
//
// queries: T [heads of the group][D]; keys: of position 0; values: elements from keys to values;
// out: [heads][kMaxSplits][D] at this part; scale: [heads][kMaxSplits] (maximum, sum) alike;
// scratch: kAttendBytes; edge: floats [2][kAttendWarps][8].
template <class T>
__device__ void attend(const Params& p, const T* queries, int heads, const T* keys, int64_t values,
                       int begin, int end, float* out, float2* scale, uint8_t* scratch,
                       float* edge) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int dim = p.m.head_dim, blocks = dim / 32;
  float top[2] = {-INFINITY, -INFINITY}, sum[2] = {0.f, 0.f}, acc[8][4] = {};
  if (warp < kAttendWarps) {
    uint4 q[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      q[i] = make_uint4(0, 0, 0, 0);
      if (i < blocks && g < heads) q[i] = load_far16(queries + g * dim + i * 32 + 8 * t);
    }
    const float unit = rsqrtf(static_cast<float>(dim)) * 1.4426950408889634f;
    for (int at = begin + 16 * warp; at < end; at += 16 * kAttendWarps) {
      const T* low = keys + static_cast<int64_t>(min(at + g, end - 1)) * dim + 8 * t;
      const T* high = keys + static_cast<int64_t>(min(at + g + 8, end - 1)) * dim + 8 * t;
      float c[4] = {};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i < blocks) {
          const uint4 a = load_far16(low + i * 32), b = load_far16(high + i * 32);
          Pair<T>::mma(c, a.x, b.x, a.y, b.y, q[i].x, q[i].y);
          Pair<T>::mma(c, a.z, b.z, a.w, b.w, q[i].z, q[i].w);
        }
      }
      // A row past the end repeats the last one; its probability is zero.
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        c[j] = at + g < end ? c[j] * unit : -INFINITY;
        c[2 + j] = at + g + 8 < end ? c[2 + j] * unit : -INFINITY;
        float m = fmaxf(c[j], c[2 + j]);
#pragma unroll
        for (int d = 4; d < 32; d *= 2) m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, d));
        m = fmaxf(m, top[j]);
        const float keep = exp2f(top[j] - m);
        top[j] = m;
        c[j] = exp2f(c[j] - m);
        c[2 + j] = exp2f(c[2 + j] - m);
        sum[j] = sum[j] * keep + c[j] + c[2 + j];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          acc[i][j] *= keep;
          acc[i][2 + j] *= keep;
        }
      }
      const uint32_t b0 = transpose8(Pair<T>::pack(c[0], c[1]));
      const uint32_t b1 = transpose8(Pair<T>::pack(c[2], c[3]));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (2 * half >= blocks) break;
        uint4 v0[2], v1[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          v0[i] = load_far16(low + values + (2 * half + i) * 32);
          v1[i] = load_far16(high + values + (2 * half + i) * 32);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float(&even)[4] = acc[4 * half + 2 * i], (&odd)[4] = acc[4 * half + 2 * i + 1];
          Pair<T>::mma(even, transpose8(v0[i].x), transpose8(v0[i].y), transpose8(v1[i].x),
                       transpose8(v1[i].y), b0, b1);
          Pair<T>::mma(odd, transpose8(v0[i].z), transpose8(v0[i].w), transpose8(v1[i].z),
                       transpose8(v1[i].w), b0, b1);
        }
      }
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int d = 4; d < 32; d *= 2) sum[j] += __shfl_xor_sync(0xffffffffu, sum[j], d);
    }
    if (g == 0) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        edge[warp * 8 + 2 * t + j] = top[j];
        edge[(kAttendWarps + warp) * 8 + 2 * t + j] = sum[j];
      }
    }
  }
  __syncthreads();
  // All warps' sums on one scale, then warps 4 to 7 onto 0 to 3, then these four by all threads.
  if (warp < kAttendWarps) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float m = -INFINITY;
#pragma unroll
      for (int w = 0; w < kAttendWarps; ++w) m = fmaxf(m, edge[w * 8 + 2 * t + j]);
      const float keep = m == -INFINITY ? 0.f : exp2f(top[j] - m);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        acc[i][j] *= keep;
        acc[i][2 + j] *= keep;
      }
    }
  }
  float4* mine = reinterpret_cast<float4*>(scratch) + warp % 4 * 256 + lane;
  if (warp >= 4 && warp < 8) {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      mine[i * 32] = make_float4(acc[i][0], acc[i][1], acc[i][2], acc[i][3]);
  }
  __syncthreads();
  if (warp < 4) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float4 o = mine[i * 32];
      mine[i * 32] = make_float4(acc[i][0] + o.x, acc[i][1] + o.y, acc[i][2] + o.z,
                                 acc[i][3] + o.w);
    }
  }
  __syncthreads();
  const float2* all = reinterpret_cast<const float2*>(scratch);
  // Element pair e: of matrix i, lane l, rows of the first or second half.
  for (int e = threadIdx.x; e < 512; e += kThreads) {
    const int i = e / 64, l = e % 64 / 2, half = e % 2;
    float2 v = make_float2(0.f, 0.f);
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const float2 o = all[w * 512 + e];
      v.x += o.x;
      v.y += o.y;
    }
    const int row = l / 4, head = l % 4 * 2;
    const int d = i / 2 * 32 + row / 2 * 8 + row % 2 + i % 2 * 4 + half * 2;
    if (d < dim) {
      if (head < heads) out[static_cast<int64_t>(head) * kMaxSplits * dim + d] = v.x;
      if (head + 1 < heads) out[static_cast<int64_t>(head + 1) * kMaxSplits * dim + d] = v.y;
    }
  }
  if (threadIdx.x < heads) {
    const int h = threadIdx.x;
    float m = -INFINITY, total = 0.f;
#pragma unroll
    for (int w = 0; w < kAttendWarps; ++w) m = fmaxf(m, edge[w * 8 + h]);
#pragma unroll
    for (int w = 0; w < kAttendWarps; ++w) {
      const float o = edge[w * 8 + h];
      if (o != -INFINITY) total += edge[(kAttendWarps + w) * 8 + h] * exp2f(o - m);
    }
    scale[h * kMaxSplits] = make_float2(m, total);
  }
  __syncthreads();
}

}  // namespace decode
}  // namespace qwen_vl
#endif  // QWEN_VL_DECODE_ATTEND_CUH_
