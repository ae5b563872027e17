// What the parts of the decode step share: sizes, parameters, small instructions.
#ifndef QWEN_VL_DECODE_TYPES_CUH_
#define QWEN_VL_DECODE_TYPES_CUH_

#include <cstdint>
#include <type_traits>

#include "decode_ptx.cuh"
#include "qwen_vl_decode.h"

namespace qwen_vl {
namespace decode {

// Warps that multiply. One more meets the other blocks: it has no copies under way that a fence
// could wait for. Twelve warps leave 168 registers a thread and next to nothing is spilled: with so
// much shared memory in use the first-level cache is too small for the spills of a block.
constexpr int kWarps = 11, kThreads = 32 * (kWarps + 1);
constexpr int kServiceThread = 32 * kWarps;
constexpr int kRows = QWEN_VL_DECODE_ROWS;
constexpr int kTile = 16;                    // outputs that a warp computes at a time
constexpr int kItemRow = 128;                // bytes of one output's weights in an item
constexpr int kItem = kTile * kItemRow;
constexpr int kMaxLayers = 96;
constexpr int kMaxSplits = 16;               // parts that attention to one cache is cut into
constexpr int kAttendWarps = 8;
constexpr int kAttendBytes = 4 * 4096;       // shared memory of attention besides its maxima
constexpr int kActPad = 64;                  // keeps rows of activations off each other's banks

enum Op { kQkv, kOut, kGateUp, kDown, kHead, kOps };
enum Form { kFloat, kInt8, kInt4, kInt8Group };

// Bytes of k weights of one output; weights in an item's row.
__host__ __device__ constexpr int form_bytes(int form, int k) {
  return form == kFloat ? 2 * k : form == kInt4 ? k / 2 : k;
}
__host__ __device__ constexpr int form_inputs(int form) {
  return form == kFloat ? 64 : form == kInt4 ? 256 : 128;
}
__host__ __device__ constexpr bool grouped(int form) { return form == kInt4 || form == kInt8Group; }
// Chunks of 8 activations that a lane multiplies with one 16-byte load of weights.
__host__ __device__ constexpr int form_chunks(int form) {
  return form == kFloat ? 1 : form == kInt4 ? 4 : 2;
}
// Bytes of an item's scales in its slot of the ring.
__host__ __device__ constexpr int scale_bytes(int form, int group) {
  return form == kFloat ? 0 : form == kInt8 ? 4 * kTile : form_inputs(form) / group * 4 * kTile;
}

struct Best {  // of the logits of one sequence that a block computed
  float top, second, sum;  // largest two; sum of exp(logit - top)
  int token;
  float noisy, drawn;  // largest logit / temperature + noise, and the logit behind it
  int drawn_token, broken;
};

struct Params {
  qwen_vl_decode_model m;
  qwen_vl_decode_launch l;
  qwen_vl_decode_row* state;
  float *x[2], *part_out, *part_down, *attention;
  float2* attention_scale;
  void *q, *act;
  Best* best;
  unsigned long long* arrived;
  int* stuck;
  int depth, slot_bytes, act_stride;
  // 2^32 / n, rounded up: i / n is the high word of i * it, for all small i. 0 stands for n = 1.
  uint32_t by_norm_units, by_attention, by_mlp, by_blocks;
  int offset_slots, offset_act, offset_sums, offset_tables;  // in shared memory, after the ring
};

constexpr int kMaxDepth = 12;
// Waits until at most `left` groups are under way.
template <int kLeft = kMaxDepth - 1>
__device__ inline void wait_for(int left) {
  if constexpr (kLeft == 0) {
    wait_groups<0>();
  } else if (left == kLeft) {
    wait_groups<kLeft>();
  } else {
    wait_for<kLeft - 1>(left);
  }
}

__device__ inline uint4 load16(const uint8_t* at) { return *reinterpret_cast<const uint4*>(at); }
__device__ inline int divided(int i, uint32_t by) {
  return by ? static_cast<int>(__umulhi(static_cast<uint32_t>(i), by)) : i;
}
template <class T>
struct Pair;
template <>
struct Pair<__nv_bfloat16> {
  static __device__ uint32_t pack(float low, float high) {
    const __nv_bfloat162 v = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&v);
  }
  static __device__ float2 unpack(uint32_t v) {
    return make_float2(__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000u));
  }
  static __device__ void mma(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                             uint32_t b0, uint32_t b1) {
    mma_bf16(c, a0, a1, a2, a3, b0, b1);
  }
};
template <>
struct Pair<__half> {
  static __device__ uint32_t pack(float low, float high) {
    const __half2 v = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&v);
  }
  static __device__ float2 unpack(uint32_t v) {
    return __half22float2(*reinterpret_cast<const __half2*>(&v));
  }
  static __device__ void mma(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                             uint32_t b0, uint32_t b1) {
    mma_fp16(c, a0, a1, a2, a3, b0, b1);
  }
};

template <class T>
__device__ inline void unpack8(uint4 raw, float (&out)[8]) {
  const uint32_t w[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 v = Pair<T>::unpack(w[i]);
    out[2 * i] = v.x;
    out[2 * i + 1] = v.y;
  }
}

// Reads of what other blocks wrote in this launch: past the first-level cache.
__device__ inline float4 load_far(const float* p) {
  return __ldcg(reinterpret_cast<const float4*>(p));
}
__device__ inline uint4 load_far16(const void* p) {
  return __ldcg(reinterpret_cast<const uint4*>(p));
}

// Cuts a workspace up from its start, in pieces that begin at multiples of 256 bytes.
struct Workspace {
  uint8_t* const start;
  int64_t used = 0;

  explicit Workspace(uint8_t* at) : start(at) {}
  uint8_t* operator()(int64_t bytes) {
    uint8_t* const piece = start + used;
    used += (bytes + 255) / 256 * 256;
    return piece;
  }
};

}  // namespace decode
}  // namespace qwen_vl
#endif  // QWEN_VL_DECODE_TYPES_CUH_
