// The first kernel of a step: the embedding of each sequence's token becomes its residual, its
// position the angles by which queries and keys are turned.
#ifndef QWEN_VL_CHAIN_EMBED_CUH_
#define QWEN_VL_CHAIN_EMBED_CUH_

#include "types.cuh"

namespace qwen_vl {
namespace chain {

constexpr int kEmbedThreads = 256;

// A block a sequence. A token outside the vocabulary has no embedding; choose() says so.
template <class T>
__global__ void __launch_bounds__(kEmbedThreads) embed(const __grid_constant__ Model m) {
  let_next_start();
  const int s = blockIdx.x, half = 1 << (m.dim_shift - 1);
  const qwen_vl_decode_row r = m.state[m.launch->slot[s]];
  for (int i = threadIdx.x; i < half; i += kEmbedThreads) {
    float2 turn;
    sincosf(static_cast<float>(r.length + r.offset) * m.frequencies[i], &turn.y, &turn.x);
    m.turn[s * half + i] = turn;
  }
  const int token = r.token;
  const bool known = static_cast<unsigned>(token) < static_cast<unsigned>(m.vocab);
  for (int c = threadIdx.x; c * 8 < m.width; c += kEmbedThreads) {
    uint4 raw = make_uint4(0, 0, 0, 0);
    if (known)
      raw = __ldg(reinterpret_cast<const uint4*>(static_cast<const T*>(m.embedding) +
                                                 static_cast<int64_t>(token) * m.width) + c);
    float v[8];
    decode::unpack8<T>(raw, v);
    float4* const x = reinterpret_cast<float4*>(m.x + s * m.width + c * 8);
    x[0] = make_float4(v[0], v[1], v[2], v[3]);
    x[1] = make_float4(v[4], v[5], v[6], v[7]);
  }
}

}  // namespace chain
}  // namespace qwen_vl
#endif  // QWEN_VL_CHAIN_EMBED_CUH_
