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

// Two numbers of a - b, both of them small integers: exact.
template <class T>
__device__ inline uint32_t minus(uint32_t a, uint32_t b) {
  using Two = std::conditional_t<std::is_same<T, __half>::value, __half2, __nv_bfloat162>;
  const Two d = __hsub2(*reinterpret_cast<const Two*>(&a), *reinterpret_cast<const Two*>(&b));
  return *reinterpret_cast<const uint32_t*>(&d);
}

// Adds a step to the sums; two chains of instructions, to be added in the end.
//
// slot: the lane's 16 bytes of its first output, those of the second 512 further on; scales: half
// scale and zero point of the first, those of the second 32 further on; x: the lane's inputs.
template <class T, int kForm>
__device__ inline void multiply(float (&c)[2][4], const uint8_t* slot, const uint8_t* scales,
                                const uint8_t* x) {
  const uint4 low = decode::load16(slot), high = decode::load16(slot + 512);
  uint4 b[form_chunks(kForm)];
#pragma unroll
  for (int i = 0; i < form_chunks(kForm); ++i) b[i] = decode::load16(x + i * 64);
  if constexpr (kForm == kFloat) {
    Pair<T>::mma(c[0], low.x, high.x, low.y, high.y, b[0].x, b[0].y);
    Pair<T>::mma(c[1], low.z, high.z, low.w, high.w, b[0].z, b[0].w);
  } else {
    using decode::bytes02;
    using decode::nibbles;
    const uint32_t lo[4] = {low.x, low.y, low.z, low.w};
    const uint32_t hi[4] = {high.x, high.y, high.z, high.w};
    float own[2][4] = {};
    float2 first = make_float2(0.f, 0.f), second = first;  // scale and zero point
    uint32_t zero = 0, other = 0;
    if constexpr (grouped(kForm)) {
      first = __half22float2(*reinterpret_cast<const __half2*>(scales));
      second = __half22float2(*reinterpret_cast<const __half2*>(scales + 32));
      const float bias = kForm == kInt4 ? decode::nibble_bias<T>() : -128.f;
      zero = Pair<T>::pack(first.y + bias, first.y + bias);
      other = Pair<T>::pack(second.y + bias, second.y + bias);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kForm == kInt4) {
#pragma unroll
        for (int h = 0; h < 2; ++h)
          Pair<T>::mma(own[h], minus<T>(nibbles<T>(lo[i] >> (8 * h)), zero),
                       minus<T>(nibbles<T>(hi[i] >> (8 * h)), other),
                       minus<T>(nibbles<T>(lo[i] >> (8 * h + 4)), zero),
                       minus<T>(nibbles<T>(hi[i] >> (8 * h + 4)), other), h ? b[i].z : b[i].x,
                       h ? b[i].w : b[i].y);
      } else if constexpr (kForm == kInt8) {
        Pair<T>::mma(c[i % 2], bytes02<T, true>(lo[i]), bytes02<T, true>(hi[i]),
                     bytes02<T, true>(lo[i] >> 8), bytes02<T, true>(hi[i] >> 8),
                     i % 2 ? b[i / 2].z : b[i / 2].x, i % 2 ? b[i / 2].w : b[i / 2].y);
      } else {
        Pair<T>::mma(own[i % 2], minus<T>(bytes02<T, false>(lo[i]), zero),
                     minus<T>(bytes02<T, false>(hi[i]), other),
                     minus<T>(bytes02<T, false>(lo[i] >> 8), zero),
                     minus<T>(bytes02<T, false>(hi[i] >> 8), other),
                     i % 2 ? b[i / 2].z : b[i / 2].x, i % 2 ? b[i / 2].w : b[i / 2].y);
      }
    }
    if constexpr (grouped(kForm)) {
#pragma unroll
      for (int k = 0; k < 4; ++k)
        c[k / 2][k] += (k < 2 ? first.x : second.x) * (own[0][k] + own[1][k]);
    }
  }
}

template <class T, int kForm, int kOp, int kN, int kChunks, int kSteps>
__global__ void __launch_bounds__(kThreads, kResident) product(const __grid_constant__ Product p) {
  if (!p.late) let_next_start();
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
#pragma unroll 1
  for (int j = 0; j < min(kSteps, own); ++j) copy();
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
    norm.after(p, act, parts, rows.squares);
  } else if constexpr (kOp == kOut) {
    stage_attention<T, kForm, kN>(p, act, rows.row);
  } else {
    stage_copy<kN>(p, act);
  }
  __syncthreads();
  if (p.late) let_next_start();

  // Columns without a sequence repeat one; nobody reads their sums.
  const uint8_t* const inputs = act + (kN == 1 ? 0 : min(g, count - 1) * p.act_stride) + t * 16;
  constexpr int kStepAct = form_chunks(kForm) * 64;
  float acc[2][4] = {};
  if (own == 0) store_part<kN>(parts, tile + warp, acc);
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
      multiply<T, kForm>(acc, ring + use, ring + use + 1024 + g * 4 - lane * 16,
                         inputs + step * kStepAct);
      use = use + kSlot == kSteps * kSlot ? 0 : use + kSlot;
      ++step;
      if (grouped(kForm)) __syncwarp();
      if (more > 0) {
        copy();
      } else {
        decode::commit();
      }
    }
    store_part<kN>(parts, tile + warp, acc);
  }
  __syncthreads();
  finish<T, kForm, kOp, kN>(p, parts, spans, rows, extra, first, mine, count);
}

}  // namespace chain
}  // namespace qwen_vl
#endif  // QWEN_VL_CHAIN_PRODUCT_CUH_
