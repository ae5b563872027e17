// What the kernels of the chain share: sizes, places in memory, the rows of a step.
#ifndef QWEN_VL_CHAIN_TYPES_CUH_
#define QWEN_VL_CHAIN_TYPES_CUH_

#include "../decode_multiply.cuh"
#include "chain_ptx.cuh"

namespace qwen_vl {
namespace chain {

using decode::Best;
using decode::Pair;
using decode::grouped;
using decode::kFloat;
using decode::kInt4;
using decode::kInt8;
using decode::kInt8Group;
using decode::kRows;

constexpr int kWarps = 12, kThreads = 32 * kWarps;
// Blocks that a multiprocessor shall have room for: one of a kernel, and one of the next.
constexpr int kResident = 2;
// Steps that a warp copies ahead. The inputs of several sequences take room, most of all those of
// the down projection: there are kernels for fewer steps, so that one fits beside the next. Gate and
// up have most to read: of one sequence they may have some of the down projection's room.
constexpr int kAhead = 7, kAheadGate = 9;
constexpr int kAheadMany[] = {7, 5}, kAheadDown[] = {6, 4, 3};
constexpr int kStepRow = 64;   // bytes of one output's weights that a warp multiplies at a time
constexpr int kGroup = 128;    // inputs that share a scale, of the forms that have groups
constexpr int kMaxParts = 16;  // that attention to one cache is cut into
constexpr int kPartRows = 128;  // positions of a part, unless there would be more parts than that
constexpr int kMaxWidth = 4096, kSquares = kMaxWidth / 256;
constexpr int kPad = 64;       // bytes; keeps rows of activations off each other's banks

enum Op { kQkv, kOut, kGateUp, kDown, kHead };

// Inputs of a step.
__host__ __device__ constexpr int step_inputs(int form) {
  return form == kFloat ? kStepRow / 2 : form == kInt4 ? kStepRow * 2 : kStepRow;
}

// Bytes of a step in the ring of a warp.
__host__ __device__ constexpr int slot_bytes(int form) { return grouped(form) ? 1024 + 64 : 1024; }

// Everything that all kernels of a step know.
struct Model {
  int width, mlp, heads, kv_heads, dim_shift, vocab, layers, count;
  float eps, by_width;              // by_width: 1 / width
  const void* embedding;
  const float* frequencies;
  qwen_vl_decode_row* state;            // [kRows] by slot; written by the last kernel of a step
  const qwen_vl_decode_launch* launch;  // written before a step begins
  float* x;                             // residual, [count][width]
  float2* turn;                         // cosine and sine of the rotation, [count][head_dim / 2]
  void *q, *parts, *act;                // T [count][heads][D]; [count][heads][kMaxParts][D]; [count][mlp]
  float2* part_scale;                   // [count][heads][kMaxParts]: maximum and sum
  Best* best;                           // [blocks of the head][kRows]
};

// One matrix and what belongs to it. A pair is two outputs that one lane holds: channels that
// rotate together, gate and up of a channel, or rows g and g + 8 of sixteen.
struct Product {
  Model m;
  const void *weight, *scales;
  const void *norm, *bias;
  int layer, steps, row_bytes, groups;
  int pace;                         // clocks between the steps asked for before the kernel waits
  int every, over;                  // pairs of a block, and blocks that have one more
  int64_t other;                    // bytes from the first output of a pair to the second
  int act_stride;                   // bytes of a sequence's inputs in shared memory
  int at_ring, at_spans, at_parts;  // in shared memory, after the inputs
};

struct Attention {
  Model m;
  int layer;
};
// First output of a pair.
template <int kOp>
__device__ inline int pair_row(const Model& m, int pair) {
  if (kOp == kGateUp) return pair;
  if (kOp == kQkv) {
    const int shift = m.dim_shift - 1;
    return pair + ((pair >> shift) << shift);
  }
  return pair + (pair & ~7);
}
template <int kOp>
__device__ inline int other_row(const Model& m) {
  return kOp == kGateUp ? m.mlp : kOp == kQkv ? 1 << (m.dim_shift - 1) : 8;
}

__host__ __device__ inline int part_count(int length) {
  const int n = (length + kPartRows - 1) / kPartRows;
  return n < kMaxParts ? n : kMaxParts;
}
__host__ __device__ inline int part_size(int length) {
  const int n = part_count(length);
  return ((length + n - 1) / n + 15) / 16 * 16;
}

// Positions that a sequence attends to, the new one included.
__device__ inline int positions(const qwen_vl_decode_row& r) {
  return static_cast<int>(min(static_cast<int64_t>(r.length) + 1, r.capacity));
}

}  // namespace chain
}  // namespace qwen_vl
#endif  // QWEN_VL_CHAIN_TYPES_CUH_
