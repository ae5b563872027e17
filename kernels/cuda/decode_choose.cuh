// Choosing a token: what is kept of the logits while they are computed, and the noise of sampling.
#ifndef QWEN_VL_DECODE_CHOOSE_CUH_
#define QWEN_VL_DECODE_CHOOSE_CUH_

#include "decode_types.cuh"

namespace qwen_vl {
namespace decode {

// Noise of the Gumbel distribution that depends on nothing but seed, position and token:
// the token with the largest logit / temperature + noise is a draw from the softmax. It is not the
// draw of torch's generator. Bits by the finaliser of splitmix64 (Steele et al. 2014).
__device__ inline float gumbel(uint64_t seed, int position, int token) {
  const uint64_t place = (static_cast<uint64_t>(position) << 32) + static_cast<uint32_t>(token);
  uint64_t z = seed + 0x9e3779b97f4a7c15ull * (place + 1);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  z ^= z >> 31;
  const float u = (static_cast<float>(static_cast<uint32_t>(z >> 32)) + 0.5f) * 2.3283064e-10f;
  return -logf(-log1pf(-u));
}

__device__ inline Best no_logits() {
  return Best{-INFINITY, -INFINITY, 0.f, 0, -INFINITY, -INFINITY, 0, 0};
}

// Takes one logit in; tokens come in rising order.
__device__ inline void consider(Best& b, float v, int token) {
  if (v == -INFINITY) return;
  if (v > b.top) {
    b.sum = b.sum * __expf(b.top - v) + 1.f;
    b.second = b.top;
    b.top = v;
    b.token = token;
  } else {
    b.sum += __expf(v - b.top);
    b.second = fmaxf(b.second, v);
  }
}
__device__ inline void consider_noisy(Best& b, float v, float noisy, int token) {
  if (noisy > b.noisy) {
    b.noisy = noisy;
    b.drawn = v;
    b.drawn_token = token;
  }
}

__device__ inline Best merged(const Best& a, const Best& b) {
  const bool first = a.top > b.top || (a.top == b.top && a.token < b.token);
  const bool drawn = a.noisy > b.noisy || (a.noisy == b.noisy && a.drawn_token < b.drawn_token);
  const float low = first ? b.top : a.top, low_sum = first ? b.sum : a.sum;
  Best r;
  r.top = first ? a.top : b.top;
  r.token = first ? a.token : b.token;
  r.second = fmaxf(first ? a.second : b.second, low);
  r.sum = (first ? a.sum : b.sum) + (low == -INFINITY ? 0.f : low_sum * __expf(low - r.top));
  r.noisy = drawn ? a.noisy : b.noisy;
  r.drawn = drawn ? a.drawn : b.drawn;
  r.drawn_token = drawn ? a.drawn_token : b.drawn_token;
  r.broken = a.broken | b.broken;
  return r;
}
__device__ inline Best shuffled(const Best& b, int distance) {
  Best r;
  constexpr uint32_t kAll = 0xffffffffu;
  r.top = __shfl_xor_sync(kAll, b.top, distance);
  r.second = __shfl_xor_sync(kAll, b.second, distance);
  r.sum = __shfl_xor_sync(kAll, b.sum, distance);
  r.token = __shfl_xor_sync(kAll, b.token, distance);
  r.noisy = __shfl_xor_sync(kAll, b.noisy, distance);
  r.drawn = __shfl_xor_sync(kAll, b.drawn, distance);
  r.drawn_token = __shfl_xor_sync(kAll, b.drawn_token, distance);
  r.broken = __shfl_xor_sync(kAll, b.broken, distance);
  return r;
}

// Hands a result to the host: the fields first, then the word that says they are there.
__device__ inline void publish(qwen_vl_decode_result* to, int token, float probability,
                               float margin, int flags, int64_t serial) {
  to->token = token;
  to->probability = probability;
  to->margin = margin;
  to->flags = flags;
  to->at = clock_ns();
  __threadfence_system();
  *reinterpret_cast<volatile int64_t*>(&to->ready) = serial + 1;
}

}  // namespace decode
}  // namespace qwen_vl
#endif  // QWEN_VL_DECODE_CHOOSE_CUH_
