// From the warps' sums to outputs: what is added, turned, activated, and where it goes.
#ifndef QWEN_VL_CHAIN_FINISH_CUH_
#define QWEN_VL_CHAIN_FINISH_CUH_

#include "../decode_choose.cuh"
#include "stage.cuh"

namespace qwen_vl {
namespace chain {

// The beginning of a block's shared memory.
template <int kN>
struct Rows {
  qwen_vl_decode_row row[kN];
  float squares[kN * kSquares];
  Best best[kN * kWarps];
};
template <int kN>
constexpr int kActAt = (sizeof(Rows<kN>) + 127) / 128 * 128;

// A lane's sums of a tile: of rows g and g + 8.
//
// Of a product in halves, c[i] are two chains of instructions as the tensor cores have them, to be
// added in the end: columns 2t and 2t + 1 of row g, then of row g + 8. Of one in integers, c[i]
// begins with both rows of sequence t + 4 i.
using Sums = float[2][4];

// Leaves a piece of a tile that one warp has multiplied, and begins anew. Pieces of a line of steps
// are cut where a tile or a warp's share ends, so tile + warp tells them apart.
template <int kForm, int kN>
__device__ inline void store_part(float* parts, int piece, Sums& c) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  float* const to = parts + piece * 16 * kN + g * kN;
  constexpr int kSecond = 8 * kN;
  if constexpr (kForm == kFloat && kN > 1) {
    float2* const pair = reinterpret_cast<float2*>(to) + t;
    pair[0] = make_float2(c[0][0] + c[1][0], c[0][1] + c[1][1]);
    pair[kSecond / 2] = make_float2(c[0][2] + c[1][2], c[0][3] + c[1][3]);
  } else if constexpr (kForm == kFloat) {
    if (t == 0) {
      to[0] = c[0][0] + c[1][0];
      to[kSecond] = c[0][2] + c[1][2];
    }
  } else {
#pragma unroll
    for (int i = 0; i < (kN > 1 ? 2 : 1); ++i) {
      if (kN > 1 || t == 0) {
        to[t + 4 * i] = c[i][0];
        to[t + 4 * i + kSecond] = c[i][1];
      }
    }
  }
#pragma unroll
  for (int k = 0; k < 4; ++k) c[0][k] = c[1][k] = 0.f;
}

// The warps that have steps of a tile: the first, and the last << 16.
__device__ inline int span_of(int from, int steps, int items) {
  return ((from + 1) * kWarps - 1) / items | ((from + steps) * kWarps - 1) / items << 16;
}

// Both outputs of a pair for one sequence.
template <int kOp, int kN>
__device__ inline float2 gather(const float* parts, const int* spans, int pair, int column) {
  const int tile = pair / 8, span = spans[tile], w0 = span & 0xffff, more = (span >> 16) - w0;
  const float* at = parts + (tile + w0) * 16 * kN + pair % 8 * kN + column;
  float2 v = make_float2(0.f, 0.f);
  // Matrices with few outputs, whose tiles have pieces of all warps: all reads at once.
  constexpr int kAtOnce = kOp == kQkv || kOp == kOut ? kWarps : 4;
#pragma unroll 1
  for (int first = 0; first <= more; first += kAtOnce) {
#pragma unroll
    for (int w = 0; w < kAtOnce; ++w) {
      if (first + w <= more) {
        v.x += at[(first + w) * 16 * kN];
        v.y += at[(first + w) * 16 * kN + 8 * kN];
      }
    }
  }
  return v;
}

// Scales of a pair's outputs; only INT8 leaves them to the end.
template <int kForm>
__device__ inline float2 scales_of(const Product& p, int pair) {
  if (kForm != kInt8) return make_float2(1.f, 1.f);
  const float* at = static_cast<const float*>(p.scales) + pair + (pair & ~7);
  return make_float2(__ldg(at), __ldg(at + 8));
}

// What outputs need besides their sum, for the first that a thread finishes asked for ahead: the
// scales of a pair, its biases and how it is turned, or the residual under it.
struct Extra {
  float low, high;
  float2 turn, scale;

  // What can be read before the kernel waits, and what cannot.
  template <class T, int kForm, int kOp>
  __device__ void fetch_early(const Product& p, int pair) {
    scale = scales_of<kForm>(p, pair);
    if constexpr (kOp == kQkv) {
      const T* bias = static_cast<const T*>(p.bias) + pair_row<kOp>(p.m, pair);
      low = static_cast<float>(bias[0]);
      high = static_cast<float>(bias[other_row<kOp>(p.m)]);
    }
  }
  template <int kOp>
  __device__ void fetch_late(const Product& p, int s, int pair) {
    if constexpr (kOp == kQkv) {
      const int half = other_row<kOp>(p.m);
      turn = __ldcg(p.m.turn + s * half + (pair & (half - 1)));
    } else if constexpr (kOp == kOut || kOp == kDown) {
      const float* x = p.m.x + s * p.m.width + pair_row<kOp>(p.m, pair);
      low = __ldcg(x);
      high = __ldcg(x + 8);
    }
  }
};

// What makes a row of unit mean square out of the residual, as it was staged.
template <class T>
__device__ inline float norm_scale(const Product& p, const float* squares, int row) {
  float sum = 0.f;
  for (int i = 0; i < p.m.width / 256; ++i) sum += squares[row * kSquares + i];
  return rsqrtf(sum * p.m.by_width + p.m.eps) * (1.f / kStagedScale<T>);
}

template <class T>
__device__ inline void finish_qkv(const Product& p, const qwen_vl_decode_row& r, int s, int pair,
                                  float2 v, const Extra& extra) {
  const int shift = p.m.dim_shift, half = 1 << (shift - 1);
  const int head = pair >> (shift - 1), d = pair & (half - 1);
  v.x = fmaf(v.x, extra.scale.x, extra.low);
  v.y = fmaf(v.y, extra.scale.y, extra.high);
  T* to;
  if (head < p.m.heads) {
    to = static_cast<T*>(p.m.q) + ((s * p.m.heads + head) << shift) + d;
  } else {
    if (r.length >= r.capacity) return;
    const int64_t plane = p.layer * 2 * p.m.kv_heads + head - p.m.heads;
    to = static_cast<T*>(r.cache) + ((plane * r.capacity + r.length) << shift) + d;
  }
  if (head < p.m.heads + p.m.kv_heads)
    v = make_float2(fmaf(v.x, extra.turn.x, -v.y * extra.turn.y),
                    fmaf(v.y, extra.turn.x, v.x * extra.turn.y));
  to[0] = T(v.x);
  to[half] = T(v.y);
}

__device__ inline void take_logit(Best& b, const qwen_vl_decode_row& r, const uint8_t* mask,
                                  float* logits, float v, int token) {
  if (!isfinite(v)) b.broken = 1;
  if (mask && !mask[token]) v = -INFINITY;
  if (logits) logits[token] = v;
  decode::consider(b, v, token);
  if (r.temperature > 0.f && v != -INFINITY)
    decode::consider_noisy(b, v, v / r.temperature + decode::gumbel(r.seed, r.length, token),
                           token);
}

template <class T, int kForm, int kOp, int kN>
__device__ inline void finish(const Product& p, const float* parts, const int* spans,
                              Rows<kN>& rows, Extra& extra, int first, int mine,
                              int count) {
  if constexpr (kOp == kHead) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
    for (int s = 0; s < count; ++s) {
      const uint8_t* const mask = p.m.launch->mask[s];
      float* logits = p.m.launch->logits;
      if (logits) logits += static_cast<int64_t>(s) * p.m.vocab;
      const float norm = norm_scale<T>(p, rows.squares, s);
      Best b = decode::no_logits();
#pragma unroll 1
      for (int i = threadIdx.x; i < mine; i += kThreads) {
        const float2 v = gather<kOp, kN>(parts, spans, i, s);
        const float2 scale = scales_of<kForm>(p, first + i);
        const int token = pair_row<kOp>(p.m, first + i);
        take_logit(b, rows.row[s], mask, logits, v.x * (scale.x * norm), token);
        take_logit(b, rows.row[s], mask, logits, v.y * (scale.y * norm), token + 8);
      }
      for (int d = 16; d > 0; d /= 2) b = decode::merged(b, decode::shuffled(b, d));
      if (lane == 0) rows.best[s * kWarps + warp] = b;
    }
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < count) {
      const int s = threadIdx.x;
      Best b = rows.best[s * kWarps];
      for (int w = 1; w < kWarps; ++w) b = decode::merged(b, rows.best[s * kWarps + w]);
      p.m.best[blockIdx.x * kRows + s] = b;
    }
  } else {
#pragma unroll 1
    for (int i = threadIdx.x; i < mine * count; i += kThreads) {
      const int s = kN == 1 ? 0 : i / mine, local = i - s * mine, pair = first + local;
      if (i >= kThreads) {
        extra.template fetch_early<T, kForm, kOp>(p, pair);
        extra.template fetch_late<kOp>(p, s, pair);
      }
      float2 v = gather<kOp, kN>(parts, spans, local, s);
      if constexpr (kOp == kQkv || kOp == kGateUp) {
        const float norm = norm_scale<T>(p, rows.squares, s);
        v.x *= norm;
        v.y *= norm;
      }
      // Fused by hand, so that the kernels for one sequence and for several round alike.
      if constexpr (kOp == kQkv) {
        finish_qkv<T>(p, rows.row[s], s, pair, v, extra);
      } else if constexpr (kOp == kGateUp) {
        v.x *= extra.scale.x;
        v.y *= extra.scale.y;
        static_cast<T*>(p.m.act)[static_cast<int64_t>(s) * p.m.mlp + place_input<kForm>(pair)] =
            T(quotient(v.x, 1.f + __expf(-v.x)) * v.y);
      } else {
        float* x = p.m.x + s * p.m.width + pair_row<kOp>(p.m, pair);
        x[0] = fmaf(v.x, extra.scale.x, extra.low);
        x[8] = fmaf(v.y, extra.scale.y, extra.high);
      }
    }
  }
}

}  // namespace chain
}  // namespace qwen_vl
#endif  // QWEN_VL_CHAIN_FINISH_CUH_
