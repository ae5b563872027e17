// One matrix times the sequences of a step: a kernel of the chain.
//
// A block has a share of the outputs. Its work is a line of steps - tiles of 8 pairs of outputs, 64
// bytes of each output's inputs at a time - of which every warp has an equal piece. A warp copies
// kSteps steps of weights ahead into shared memory, the first of them before the kernel waits for
// the one before it; a lane copies what it multiplies itself. Sums of the warps meet in shared
// memory.
#ifndef QWEN_VL_CHAIN_PRODUCT_CUH_
#define QWEN_VL_CHAIN_PRODUCT_CUH_

#include "finish.cuh"
#include "stage.cuh"

namespace qwen_vl {
namespace chain {

// Where a lane finds the inputs of its columns, and what else a product in integers needs of them.
template <int kForm, int kN>
struct Inputs {
  static constexpr int kHalves = kN > 1 && kForm != kFloat ? 2 : 1;  // of four sequences each
  const uint8_t* x[kHalves];
  const uint8_t* sums[kHalves];

  // Columns without a sequence repeat one; nobody reads their sums.
  __device__ Inputs(const Product& p, const uint8_t* act, int inputs, int count) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    if constexpr (kForm == kFloat) {
      x[0] = sums[0] = act + (kN == 1 ? 0 : min(g, count - 1) * p.act_stride) + t * 16;
    } else {
      const uint8_t* const own = act + g % 2 * low_at(kForm, inputs) + t * (step_inputs(kForm) / 4);
#pragma unroll
      for (int i = 0; i < kHalves; ++i) {
        x[i] = own + (kN == 1 ? 0 : min(g / 2 + 4 * i, count - 1) * p.act_stride);
        sums[i] = act + sums_at(inputs) + (kN == 1 ? 0 : min(t + 4 * i, count - 1) * p.act_stride);
      }
    }
  }
};

// Adds a step to the sums.
//
// slot: the lane's 16 bytes of its first output, those of the second 512 further on; scales: half
// scale and zero point of the first, those of the second 32 further on.
template <class T, int kForm, int kN>
__device__ inline void multiply(Sums& c, const uint8_t* slot, const uint8_t* scales,
                                const Inputs<kForm, kN>& in, int step, int count) {
  const uint4 low = decode::load16(slot), high = decode::load16(slot + 512);
  if constexpr (kForm == kFloat) {
    const uint4 b = decode::load16(in.x[0] + step * kStepRow);
    Pair<T>::mma(c[0], low.x, high.x, low.y, high.y, b.x, b.y);
    Pair<T>::mma(c[1], low.z, high.z, low.w, high.w, b.z, b.w);
  } else {
    float2 first = make_float2(0.f, 0.f), second = first;  // scale and zero point
    if constexpr (grouped(kForm)) {
      first = __half22float2(*reinterpret_cast<const __half2*>(scales));
      second = __half22float2(*reinterpret_cast<const __half2*>(scales + 32));
    }
#pragma unroll
    for (int i = 0; i < in.kHalves; ++i) {
      if (i > 0 && count <= 4 * i) break;
      float both[2] = {c[i][0], c[i][1]};
      multiply_codes<kForm>(both, low, high, in.x[i] + step * step_inputs(kForm), first, second,
                            *reinterpret_cast<const float2*>(in.sums[i] + step * 8));
      c[i][0] = both[0];
      c[i][1] = both[1];
    }
  }
}

template <class T, int kForm, int kOp, int kN, int kChunks, int kSteps>
__global__ void __launch_bounds__(kThreads, kResident) product(const __grid_constant__ Product p) {
  let_next_start();
  QWEN_VL_DYNAMIC_SHARED(shared);
  float* const parts = reinterpret_cast<float*>(shared + p.at_parts);
  int* const spans = reinterpret_cast<int*>(shared + p.at_spans);
  Rows<kN>& rows = *reinterpret_cast<Rows<kN>*>(shared);
  uint8_t* const act = shared + kActAt<kN>;

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int count = kN == 1 ? 1 : p.m.count, block = blockIdx.x;
  const int first = block * p.every + min(block, p.over), mine = p.every + (block < p.over);
  const int tiles = (mine + 7) / 8, items = tiles * p.steps;
  const int begin = items * warp / kWarps, own = items * (warp + 1) / kWarps - begin;
  int tile = begin / p.steps, step = begin - tile * p.steps;

  // Where the next step to be copied lies, and where it goes.
  constexpr int kSlot = slot_bytes(kForm);
  uint8_t* const ring = shared + p.at_ring + warp * kSteps * kSlot + lane * 16;
  const uint8_t *at = nullptr, *scale = nullptr;
  bool real = false;
  int copied_tile = tile, copied_step = step, fill = 0;
  auto seek = [&]() {
    const int local = copied_tile * 8 + g, pair = first + local;
    real = local < mine;
    at = static_cast<const uint8_t*>(p.weight) + t * 16 + copied_step * kStepRow +
         static_cast<int64_t>(pair_row<kOp>(p.m, pair)) * p.row_bytes;
    if (grouped(kForm))
      scale = static_cast<const uint8_t*>(p.scales) +
              (static_cast<int64_t>(pair / 8) * p.groups * 16 + pair % 8) * 4;
  };
  auto copy = [&]() {
    if (real) {
      const uint32_t to = decode::shared_of(ring + fill);
      copy_weights(to, at);
      copy_weights(to + 512, at + p.other);
      if constexpr (grouped(kForm)) {
        // Lanes t = 0 and 1 copy for all of their pair.
        if (t < 2)
          copy4(to - lane * 16 + 1024 + t * 32 + g * 4,
                scale + copied_step * step_inputs(kForm) / kGroup * 64 + t * 32);
      }
    }
    decode::commit();
    at += kStepRow;
    fill = fill + kSlot == kSteps * kSlot ? 0 : fill + kSlot;
    if (++copied_step == p.steps) {
      copied_step = 0;
      ++copied_tile;
      seek();
    }
  };
  constexpr bool kRowsNeeded = kOp == kQkv || kOp == kOut || kOp == kHead;
  if (kRowsNeeded && static_cast<int>(threadIdx.x) < count)
    rows.row[threadIdx.x] = p.m.state[p.m.launch->slot[threadIdx.x]];
  seek();
  // Not all at once where the kernel before this one would wait for its inputs behind them.
  const uint32_t start = clock32();
#pragma unroll 1
  for (int j = 1; j <= min(kSteps, own); ++j) {
    copy();
    if constexpr (kOp == kGateUp)
      while (static_cast<int>(clock32() - start) < j * p.pace) nap();
  }
  Norm<T, kForm, kN, kChunks> norm;
  constexpr bool kNorms = kOp == kQkv || kOp == kGateUp || kOp == kHead;
  if constexpr (kNorms) norm.before(p);
#pragma unroll 1
  for (int i = threadIdx.x; i < tiles; i += kThreads) spans[i] = span_of(i * p.steps, p.steps, items);
  __syncthreads();
  const int s = kN == 1 ? 0 : threadIdx.x / max(mine, 1);
  const int pair = first + threadIdx.x - s * mine;
  Extra extra;
  if (kOp != kHead && s < count && pair < first + mine)
    extra.template fetch_early<T, kForm, kOp>(p, pair);

  await_previous();
  if (s < count && pair < first + mine) extra.template fetch_late<kOp>(p, s, pair);
  if constexpr (kNorms) {
    norm.after(p, act, rows.squares);
  } else if constexpr (kOp == kOut) {
    stage_attention<T, kForm, kN>(p, act, rows.row);
  } else {
    stage_hidden<T, kForm, kN>(p, act);
  }
  __syncthreads();

  const Inputs<kForm, kN> inputs(p, act, p.steps * step_inputs(kForm), count);
  Sums acc = {};
  if (own == 0) store_part<kForm, kN>(parts, tile + warp, acc);
  if (own < kSteps) decode::wait_groups<0>();
  // One loop for all steps, which is less code: where nothing is left to be copied, an empty group
  // keeps the count.
  int use = 0, more = own - kSteps;
  for (int left = own; left > 0; step = 0, ++tile) {
    const int piece = min(left, p.steps - step);
    left -= piece;
#pragma unroll 1
    for (int i = 0; i < piece; ++i, --more) {
      decode::wait_groups<kSteps - 1>();
      if (grouped(kForm)) __syncwarp();
      multiply<T, kForm, kN>(acc, ring + use, ring + use + 1024 + g * 4 - lane * 16, inputs, step,
                             count);
      use = use + kSlot == kSteps * kSlot ? 0 : use + kSlot;
      ++step;
      if (grouped(kForm)) __syncwarp();
      if (more > 0) {
        copy();
      } else {
        decode::commit();
      }
    }
    store_part<kForm, kN>(parts, tile + warp, acc);
  }
  __syncthreads();
  finish<T, kForm, kOp, kN>(p, parts, spans, rows, extra, first, mine, count);
}

}  // namespace chain
}  // namespace qwen_vl
#endif  // QWEN_VL_CHAIN_PRODUCT_CUH_
