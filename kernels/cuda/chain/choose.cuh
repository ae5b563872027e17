// The last kernel of a step: the next token of every sequence, handed to the host.
#ifndef QWEN_VL_CHAIN_CHOOSE_CUH_
#define QWEN_VL_CHAIN_CHOOSE_CUH_

#include "../decode_choose.cuh"
#include "types.cuh"

namespace qwen_vl {
namespace chain {

// A warp a sequence. blocks: of the head, each of which left its best logits.
struct Choice {
  Model m;
  int blocks;
};

__device__ inline void choose(const Choice& p) {
  let_next_start();
  await_previous();
  const int s = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (s >= p.m.count) return;
  const qwen_vl_decode_launch& l = *p.m.launch;
  Best b = decode::no_logits();
  constexpr int kAtOnce = 5;
  for (int first = lane; first < p.blocks; first += 32 * kAtOnce) {
    union { Best best; float4 raw[2]; } o[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const float4* from = reinterpret_cast<const float4*>(
          p.m.best + min(first + 32 * j, p.blocks - 1) * kRows + s);
      o[j].raw[0] = __ldcg(from);
      o[j].raw[1] = __ldcg(from + 1);
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j)
      if (first + 32 * j < p.blocks) b = decode::merged(b, o[j].best);
  }
  for (int d = 16; d > 0; d /= 2) b = decode::merged(b, decode::shuffled(b, d));
  if (lane != 0) return;
  qwen_vl_decode_row r = p.m.state[l.slot[s]];
  const bool draws = r.temperature > 0.f;
  const bool filtered = draws && (r.top_k > 0 || r.top_p < 1.f);  // chosen by sample_filtered
  const bool sound =
      !b.broken && static_cast<unsigned>(r.token) < static_cast<unsigned>(p.m.vocab);
  const int token = draws ? b.drawn_token : b.token;
  if (!filtered)
    decode::publish(l.results + l.slot[s] * QWEN_VL_DECODE_RESULTS +
                        r.serial % QWEN_VL_DECODE_RESULTS,
                    token, __expf((draws ? b.drawn : b.top) - b.top) / b.sum, b.top - b.second,
                    sound ? QWEN_VL_RESULT_FINITE : 0, r.serial);
  r.token = token;
  r.length += 1;
  r.serial += filtered ? 0 : 1;
  p.m.state[l.slot[s]] = r;
}

}  // namespace chain
}  // namespace qwen_vl
#endif  // QWEN_VL_CHAIN_CHOOSE_CUH_
