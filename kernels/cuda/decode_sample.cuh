// Sampling among the most probable tokens (top-k, then top-p), from stored logits.
#ifndef QWEN_VL_DECODE_SAMPLE_CUH_
#define QWEN_VL_DECODE_SAMPLE_CUH_

#include "decode_choose.cuh"

namespace qwen_vl {
namespace decode {

constexpr int kSampleThreads = 1024, kBins = 2048;
constexpr float kMassUnit = 1099511627776.f;  // 2^40: masses add up exactly, in any order

// Floats in the order of unsigned numbers.
__device__ inline uint32_t order_of(float v) {
  const uint32_t b = __float_as_uint(v);
  return b & 0x80000000u ? ~b : b | 0x80000000u;
}

struct Selection {
  unsigned long long bins[kBins];
  unsigned long long above, target;
  uint32_t chosen;
};

// Finds the first bin, from the top, where the weight above it and its own reach the target.
__device__ inline void find_bin(Selection& s, int bins) {
  const int lane = threadIdx.x, per = bins / 32;
  unsigned long long own = 0;
  for (int i = 0; i < per; ++i) own += s.bins[bins - 1 - lane * per - i];
  unsigned long long upto = own;
  for (int d = 1; d < 32; d *= 2) {
    const unsigned long long o = __shfl_up_sync(0xffffffffu, upto, d);
    if (lane >= d) upto += o;
  }
  const unsigned reached = __ballot_sync(0xffffffffu, s.above + upto >= s.target);
  const int winner = reached ? __ffs(reached) - 1 : 31;
  if (lane == winner) {
    unsigned long long above = s.above + upto - own;
    int bin = bins - 1 - lane * per;
    for (int i = 0; i + 1 < per && above + s.bins[bin] < s.target; ++i) above += s.bins[bin--];
    s.above = above;
    s.chosen = bin;
  }
}

// Returns the order of the logit at which the weights of all logits from the top down, of order
// `floor` and above, reach a share of their sum (by mass), or a count.
__device__ inline uint32_t select(Selection& s, const float* logits, int vocab, uint32_t floor,
                                  float top, float temperature, bool by_mass, double target) {
  uint32_t prefix = 0, mask = 0;
  for (int shift = 21, bits = 11; bits; bits = shift == 0 ? 0 : shift == 10 ? 10 : 11,
           shift = shift == 21 ? 10 : 0) {
    const int bins = 1 << bits;
    for (int i = threadIdx.x; i < bins; i += kSampleThreads) s.bins[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < vocab; i += kSampleThreads) {
      const float v = logits[i];
      const uint32_t order = order_of(v);
      if (v == -INFINITY || order < floor || (order & mask) != prefix) continue;
      const unsigned long long weight =
          by_mass ? static_cast<unsigned long long>(__expf((v - top) / temperature) * kMassUnit)
                  : 1ull;
      atomicAdd(&s.bins[order >> shift & (bins - 1)], weight);
    }
    __syncthreads();
    if (threadIdx.x == 0 && mask == 0) {
      unsigned long long total = 0;
      if (by_mass)
        for (int i = 0; i < bins; ++i) total += s.bins[i];
      s.above = 0;
      s.target = by_mass ? static_cast<unsigned long long>(target * static_cast<double>(total))
                         : static_cast<unsigned long long>(target);
    }
    __syncthreads();
    if (threadIdx.x < 32) find_bin(s, bins);
    __syncthreads();
    prefix |= s.chosen << shift;
    mask |= static_cast<uint32_t>(bins - 1) << shift;
    if (shift == 0) break;
  }
  return prefix;
}

// A block a sequence; those without a filter have been chosen in the step itself. Both forms of the
// step have a copy.
static __global__ void __launch_bounds__(kSampleThreads) sample_filtered(const Params p) {
  __shared__ Selection selection;
  __shared__ Best whole, drawn[kSampleThreads / 32];
  const int s = blockIdx.x, lane = threadIdx.x % 32;
  qwen_vl_decode_row& state = p.state[p.l.slot[s]];
  const qwen_vl_decode_row r = state;
  if (r.temperature <= 0.f || (r.top_k <= 0 && r.top_p >= 1.f)) return;
  const float* logits = p.l.logits + static_cast<int64_t>(s) * p.m.vocab;
  if (threadIdx.x < 32) {
    Best b = no_logits();
    for (int i = lane; i < p.m.blocks; i += 32) b = merged(b, p.best[i * kRows + s]);
    for (int d = 16; d > 0; d /= 2) b = merged(b, shuffled(b, d));
    if (lane == 0) whole = b;
  }
  __syncthreads();
  uint32_t floor = 0;
  if (r.top_k > 0 && r.top_k < p.m.vocab)
    floor = select(selection, logits, p.m.vocab, floor, whole.top, r.temperature, false, r.top_k);
  if (r.top_p < 1.f)
    floor = select(selection, logits, p.m.vocab, floor, whole.top, r.temperature, true, r.top_p);
  Best b = no_logits();
  for (int i = threadIdx.x; i < p.m.vocab; i += kSampleThreads) {
    const float v = logits[i];
    // The step has counted this position already.
    if (v != -INFINITY && order_of(v) >= floor)
      consider_noisy(b, v, v / r.temperature + gumbel(r.seed, r.length - 1, i), i);
  }
  for (int d = 16; d > 0; d /= 2) b = merged(b, shuffled(b, d));
  if (lane == 0) drawn[threadIdx.x / 32] = b;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int w = 1; w < kSampleThreads / 32; ++w) b = merged(b, drawn[w]);
  const int stuck = *reinterpret_cast<volatile int*>(p.stuck);
  publish(p.l.results + p.l.slot[s] * QWEN_VL_DECODE_RESULTS + r.serial % QWEN_VL_DECODE_RESULTS,
          b.drawn_token, __expf(b.drawn - whole.top) / whole.sum, whole.top - whole.second,
          (whole.broken ? 0 : QWEN_VL_RESULT_FINITE) | (stuck ? QWEN_VL_RESULT_STUCK : 0),
          r.serial);
  state.token = b.drawn_token;
  state.serial = r.serial + 1;
}

}  // namespace decode
}  // namespace qwen_vl
#endif  // QWEN_VL_DECODE_SAMPLE_CUH_
