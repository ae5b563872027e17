// Attention of a prompt's chunk to its cache on Hopper's wgmma and copy engine, heads of 128 channels;
// compiled for sm_90a.
//
//     a block      64 queries of one head; two warpgroups share their keys, every other tile of 64
//                  each, so that the longest block, which has the last queries, takes half the time
//     a step       the scores of the group's next tile and the result of its last one are in the
//                  tensor cores together; the softmax of the next runs meanwhile, beside the products
//                  of the other group
//     ring         three tiles of keys and values a group, copied as boxes of eight columns of 16
//                  channels. Where the cache lies is known on the device alone: its description is
//                  in memory, beside the span
//     at the end   the second group leaves its results in shared memory, the first one adds them
#include "attention.cuh"
#include "copy_engine.cuh"
#include "launch.cuh"
#include "mma.cuh"
#include "prompt_sm90.h"
#include "wgmma_prompt.cuh"

namespace qwen_vl {
namespace {

constexpr int kDim = 128, kColumns = kDim / 16;
constexpr int kQueries = 64, kKeys = 64, kGroups = 2, kStages = 3;
constexpr int kGroupThreads = 128, kThreads = kGroups * kGroupThreads;
constexpr int kStep = kKeys * kColumnBytes, kTileBytes = kColumns * kStep;
static_assert(kQueries == kKeys, "boxes of queries and of keys are of one size");
constexpr int kRingBytes = kStages * 2 * kTileBytes;
constexpr int kAlignment = 1024;
constexpr int kBarriers = 2 + kGroups * kStages * 2;
constexpr int kSharedBytes = kTileBytes + kGroups * kRingBytes + kBarriers * 8 + kAlignment;
static_assert(kSharedBytes <= 227 * 1024, "what a block may take");
// Numbers of a lane that one group leaves for the other: results, bases and sums.
constexpr int kLeft = kDim / 8 * 4 + 4;
static_assert(kLeft * kGroupThreads * 4 <= kRingBytes, "results lie where keys lay");

template <class T>
struct Prompt {
  T* out;
  const qwen_vl_span* span;
  const CUtensorMap* cache;
  int heads, kv_heads, layer, tail;
  float scale;  // of scores, times log2(e)
};

__device__ inline void copy_tile(uint32_t to, const CUtensorMap* map, int row, int head,
                                 uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, "
      "%3, %2, %4}], [%5];" ::"r"(to),
      "l"(map), "r"(0), "r"(row), "r"(head), "r"(barrier)
      : "memory");
}

using Scores = float[kKeys / 8][4];

// The running softmax of attention.cuh, with powers that are taken where they stand in the source.
struct PinnedSoftmax : Softmax {
  __device__ static float power(float x) {
    float y;
    asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }

  __device__ float2 step(Scores& s, float scale) {
    float correction[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float most = largest[r], other = largest[r];
#pragma unroll
      for (int i = 0; i < kKeys / 8; ++i) {
        most = fmaxf(most, s[i][2 * r]);
        other = fmaxf(other, s[i][2 * r + 1]);
      }
      most = quad_max(fmaxf(most, other));
      // A row that has seen no key yet: 0 in place of -inf keeps NaN out.
      const float base = most == -INFINITY ? 0.0f : most * scale;
      correction[r] = power(largest[r] * scale - base);
      largest[r] = most;
      float even = 0.0f, odd = 0.0f;
#pragma unroll
      for (int i = 0; i < kKeys / 8; ++i) {
        s[i][2 * r] = power(fmaf(s[i][2 * r], scale, -base));
        s[i][2 * r + 1] = power(fmaf(s[i][2 * r + 1], scale, -base));
        even += s[i][2 * r];
        odd += s[i][2 * r + 1];
      }
      sum[r] = sum[r] * correction[r] + even + odd;
    }
    return {correction[0], correction[1]};
  }

  // Arrives at a barrier that nobody waits for: sums are never negative, but have to be there. Left
  // to itself the compiler waits for the result right after the scores, and nothing overlaps.
  __device__ void hold(uint32_t spare, int lane) const {
    if (lane == 0 && !(sum[0] + sum[1] < 0.0f)) barrier_arrive(spare);
  }
};

// Hides the keys that a query must not see; `low` and `high`: the last one that the lane's rows may,
// counted from the tile's first.
__device__ inline void hide(Scores& scores, int low, int high, int lane) {
#pragma unroll
  for (int i = 0; i < kKeys / 8; ++i) {
    const int key = i * 8 + lane % 4 * 2;
    if (key > low) scores[i][0] = -INFINITY;
    if (key + 1 > low) scores[i][1] = -INFINITY;
    if (key > high) scores[i][2] = -INFINITY;
    if (key + 1 > high) scores[i][3] = -INFINITY;
  }
}

// Zeros in place of values from row `left` on: what nobody has written yet need not be finite.
__device__ inline void wipe(uint32_t values, int left, int thread) {
  constexpr int kPieces = kDim / 8;  // of 16 bytes
  for (int i = left * kPieces + thread; i < kKeys * kPieces; i += kGroupThreads) {
    const uint32_t at = values + i % kPieces / 2 * kStep + i / kPieces * kColumnBytes + i % 2 * 16;
    asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(0) : "memory");
  }
  publish_shared();
}

template <class T>
__global__ void __launch_bounds__(kThreads, 1)
    attend_prompt(const __grid_constant__ CUtensorMap query_map, const Prompt<T> p) {
  extern __shared__ uint8_t memory[];
  const uint32_t start = shared_address(memory);
  const uint32_t queries_at = (start + kAlignment - 1) / kAlignment * kAlignment;
  const int group = threadIdx.x / kGroupThreads, thread = threadIdx.x % kGroupThreads;
  const int warp = thread / 32, lane = threadIdx.x % 32, head = blockIdx.x % p.heads;
  const uint32_t ring_at = queries_at + kTileBytes + group * kRingBytes;
  const uint32_t queries_full = queries_at + kTileBytes + kGroups * kRingBytes;
  const uint32_t spare = queries_full + 8, full_at = queries_full + 16 + group * kStages * 16;
  if (threadIdx.x == 0) {
    fetch_map(query_map);
    for (int i = 0; i < kBarriers; ++i) barrier_init(queries_full + i * 8, 1);
    publish_barriers();
  }
  // The span was there before the first of the chunk's kernels began.
  const int count = static_cast<int>(p.span->count), past = static_cast<int>(p.span->start);
  // Those with most keys start first.
  const int number = p.tail ? (count - 1) / kQueries
                            : static_cast<int>(gridDim.x - 1 - blockIdx.x) / p.heads;
  const int first_query = number * kQueries;
  const int end_query = min(first_query + kQueries, count), end_key = past + end_query;
  __syncthreads();
  begin_after_previous();
  if (first_query >= end_query) return;

  const int tiles = (end_key + kKeys - 1) / kKeys;
  const int kv_head = head / (p.heads / p.kv_heads);
  // Number i of a group is tile i * kGroups + group.
  const int own = (tiles - group + kGroups - 1) / kGroups;
  const auto slot = [&](int i) { return ring_at + i % kStages * 2 * kTileBytes; };
  const auto full = [&](int i, int values) { return full_at + (i % kStages * 2 + values) * 8; };
  const auto load = [&](int i) {
    if (i >= own) return;
#pragma unroll
    for (int values = 0; values < 2; ++values) {
      barrier_expect(full(i, values), kTileBytes);
      copy_tile(slot(i) + values * kTileBytes, p.cache, (i * kGroups + group) * kKeys,
                (p.layer * 2 + values) * p.kv_heads + kv_head, full(i, values));
    }
  };
  if (thread == 0) {
    if (group == 0) {
      barrier_expect(queries_full, kTileBytes);
      copy_box(queries_at, query_map, 0, first_query, head * kColumns, queries_full);
    }
    // The description was written by a copy, not by the copy engine's own means.
    asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(p.cache) : "memory");
#pragma unroll
    for (int i = 0; i < kStages; ++i) load(i);
  }
  uint32_t queries[kColumns][4];
  barrier_wait(queries_full, 0);
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    const int row = warp * 16 + lane % 16, half = lane / 16 ^ (row / 4 & 1);
    load_matrices(queries[i], queries_at + i * kStep + row * kColumnBytes + half * 16);
  }

  float result[kDim / 8][4] = {};
  Scores scores;
  uint32_t weights[kKeys / 16][4];
  PinnedSoftmax softmax;
  const int query = first_query + warp * 16 + lane / 4;
  const auto wait_full = [&](int i, int values) { barrier_wait(full(i, values), i / kStages & 1); };
  const auto multiply_keys = [&](int i) {
    const uint64_t keys = matrix(slot(i), 16);
    wgmma_begin();
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      multiply_scores(scores, queries[j], keys + j * (kStep >> 4), j > 0, T());
    }
    wgmma_commit();
  };
  const auto multiply_values = [&](int i) {
    const uint64_t values = matrix(slot(i) + kTileBytes, kStep);
    wgmma_begin();
#pragma unroll
    for (int j = 0; j < kKeys / 16; ++j) {
      multiply_result(result, weights[j], values + j * (2 * kAtomBytes >> 4), T());
    }
    wgmma_commit();
  };
  const auto hide_later = [&](int i) {
    const int base = (i * kGroups + group) * kKeys;
    if (past + first_query - base >= kKeys - 1 && end_key - base >= kKeys) return;
    const int last = end_key - 1 - base;
    hide(scores, min(past + query - base, last), min(past + query + 8 - base, last), lane);
  };
  const auto pack = [&] {
#pragma unroll
    for (int j = 0; j < kKeys / 16 * 4; ++j) {
      const float* const two = scores[j / 4 * 2 + j % 4 / 2] + j % 2 * 2;
      weights[j / 4][j % 4] = narrow<T>(two[0], two[1]);
    }
  };
  if (own) {
    wait_full(0, 0);
    multiply_keys(0);
    wgmma_wait<0>();
    hide_later(0);
    softmax.step(scores, p.scale);
    pack();
    for (int i = 1; i < own; ++i) {
      wait_full(i, 0);
      multiply_keys(i);
      wait_full(i - 1, 1);
      multiply_values(i - 1);
      wgmma_wait<1>();
      hide_later(i);
      const float2 shrink = softmax.step(scores, p.scale);
      softmax.hold(spare, lane);
      wgmma_wait<0>();
      named_wait<kGroupThreads>(1 + group);  // all of the group are done with the last tile
      if (thread == 0) load(i - 1 + kStages);
#pragma unroll
      for (int j = 0; j < kDim / 8; ++j) {
        result[j][0] *= shrink.x;
        result[j][1] *= shrink.x;
        result[j][2] *= shrink.y;
        result[j][3] *= shrink.y;
      }
      pack();
    }
    wait_full(own - 1, 1);
    const int left = end_key - ((own - 1) * kGroups + group) * kKeys;
    if (left < kKeys) {
      wipe(slot(own - 1) + kTileBytes, left, thread);
      named_wait<kGroupThreads>(1 + group);
    }
    multiply_values(own - 1);
    wgmma_wait<0>();
  }

  // [number][lane]: lanes side by side.
  float* const other = reinterpret_cast<float*>(memory + (queries_at - start) + kTileBytes +
                                                kRingBytes) + thread;
  if (group == 1) {
    named_wait<kGroupThreads>(1 + group);  // all of its warps are done with the keys that lay here
#pragma unroll
    for (int j = 0; j < kDim / 8 * 4; ++j) other[j * kGroupThreads] = result[j / 4][j % 4];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      other[(kDim / 2 + r) * kGroupThreads] = softmax.largest[r];
      other[(kDim / 2 + 2 + r) * kGroupThreads] = softmax.sum[r];
    }
  }
  __syncthreads();
  if (group == 1) return;
  float mine[2], theirs[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float there = other[(kDim / 2 + r) * kGroupThreads];
    // The first group has every query's first key: its largest score is a number.
    const float most = fmaxf(softmax.largest[r], there);
    mine[r] = power_of_two((softmax.largest[r] - most) * p.scale);
    theirs[r] = power_of_two((there - most) * p.scale);
    softmax.sum[r] =
        softmax.sum[r] * mine[r] + other[(kDim / 2 + 2 + r) * kGroupThreads] * theirs[r];
  }
  const float2 inverse = softmax.inverse();
  const int64_t out_row = static_cast<int64_t>(p.heads) * kDim;
  T* const to = p.out + query * out_row + head * kDim + lane % 4 * 2;
#pragma unroll
  for (int j = 0; j < kDim / 8; ++j) {
    float sum[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      sum[c] = (result[j][c] * mine[c / 2] + other[(j * 4 + c) * kGroupThreads] * theirs[c / 2]) *
               (c < 2 ? inverse.x : inverse.y);
    }
    if (query < end_query) *reinterpret_cast<uint32_t*>(to + j * 8) = narrow<T>(sum[0], sum[1]);
    if (query + 8 < end_query) {
      *reinterpret_cast<uint32_t*>(to + 8 * out_row + j * 8) = narrow<T>(sum[2], sum[3]);
    }
  }
}

template <class T>
int launch(const qwen_vl_heads& h, const void* qkv, const qwen_vl_span* span, const void* map,
           int layer, float scale, int tail, void* out, cudaStream_t stream) {
  const auto size = [](int64_t x) { return static_cast<cuuint64_t>(x); };
  const int64_t width = static_cast<int64_t>(h.heads + 2 * h.kv_heads) * kDim;
  const cuuint64_t sizes[3] = {16, size(h.rows), size(width / 16)};
  const cuuint64_t strides[2] = {size(width * 2), kColumnBytes};
  const cuuint32_t box[3] = {16, kQueries, kColumns};
  CUtensorMap query_map;
  if (!describe(&query_map, h.dtype, qkv, sizes, strides, box, CU_TENSOR_MAP_SWIZZLE_32B)) {
    return cudaErrorInvalidValue;
  }
  const auto kernel = attend_prompt<T>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error) return error;
  const int tiles = tail ? 1 : (h.rows + kQueries - 1) / kQueries;
  const Prompt<T> p = {static_cast<T*>(out), span, static_cast<const CUtensorMap*>(map), h.heads,
                       h.kv_heads, layer, tail, scale * kLog2E};
  return launch_early(kernel, tiles * h.heads, kThreads, kSharedBytes, stream, query_map, p);
}

}  // namespace

int describe_cache(const qwen_vl_span& span, int dtype, int capacity, int heads_of_layers,
                   void* map) {
  const auto size = [](int64_t x) { return static_cast<cuuint64_t>(x); };
  const cuuint64_t sizes[4] = {16, size(capacity), kColumns, size(heads_of_layers)};
  const cuuint64_t strides[3] = {kDim * 2, kColumnBytes, size(span.head_step * 2)};
  const cuuint32_t box[4] = {16, kKeys, kColumns, 1};
  return describe(static_cast<CUtensorMap*>(map), dtype, reinterpret_cast<const void*>(span.cache),
                  sizes, strides, box, CU_TENSOR_MAP_SWIZZLE_32B)
             ? cudaSuccess
             : cudaErrorInvalidValue;
}

int launch_prompt(const qwen_vl_heads& heads, const void* qkv, const qwen_vl_span* span,
                  const void* map, int layer, float scale, int tail, void* out,
                  cudaStream_t stream) {
  return heads.dtype == QWEN_VL_BF16
             ? launch<__nv_bfloat16>(heads, qkv, span, map, layer, scale, tail, out, stream)
             : launch<__half>(heads, qkv, span, map, layer, scale, tail, out, stream);
}

}  // namespace qwen_vl
