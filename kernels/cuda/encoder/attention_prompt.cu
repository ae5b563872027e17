// Attention of a prompt's chunk to its cache where queries are few: as in attention.cu, but the keys of
// a block's queries are shared between two groups of warps, so that the longest block, which has the
// last queries and all keys before them, takes half the time. sm_80 class, heads of 128 channels.
//
//     a block      64 queries of one head; two groups of 4 warps, each warp 16 queries
//     a group      every other tile of 64 keys, two of them in shared memory (cp.async)
//     at the end   the second group leaves its results in shared memory, the first one adds them
#include "attention.cuh"
#include "hopper.h"
#include "mma.cuh"
#include "prompt_sm90.h"
#include "status.h"

namespace qwen_vl {
namespace {

constexpr int kDim = 128, kQueries = 64, kKeys = 64, kGroups = 2, kStages = 2;
constexpr int kGroupThreads = 128, kThreads = kGroups * kGroupThreads;
constexpr int kStride = kDim + 8;  // elements; an odd number of 16-byte chunks: no bank conflicts
constexpr int kChunks = kDim / 8, kSteps = kDim / 16;
constexpr int kTileBytes = kKeys * kStride * 2;
constexpr int kRingBytes = kStages * 2 * kTileBytes;
constexpr int kSharedBytes = kQueries * kStride * 2 + kGroups * kRingBytes;
// A lane's numbers that one group leaves for the other: results, largest scores and sums.
constexpr int kLeft = kDim / 8 * 4 + 4;
static_assert(kSharedBytes <= 163 * 1024, "what a block may take on sm_87");
static_assert(kLeft * kGroupThreads * 4 <= kRingBytes, "results lie where keys lay");

template <int kCount, class T>
__device__ inline void load_rows(uint32_t to, const T* from, int64_t stride, int first, int end,
                                 int thread) {
#pragma unroll
  for (int i = thread; i < kQueries * kChunks; i += kCount) {
    const int row = i / kChunks, chunk = i % kChunks;
    const bool there = first + row < end;
    const T* const at = from + static_cast<int64_t>(there ? first + row : first) * stride + chunk * 8;
    copy_or_zero(to + (row * kStride + chunk * 8) * 2, at, there);
  }
}
static_assert(kQueries == kKeys, "one function loads both");

__device__ inline void group_wait(int group) {
  asm volatile("bar.sync %0, %1;" ::"r"(1 + group), "n"(kGroupThreads) : "memory");
}

template <class T>
__global__ void __launch_bounds__(kThreads, 1) attend_prompt(const Attention<T> p, int tail) {
  extern __shared__ __align__(16) uint8_t memory[];
  const int head = blockIdx.y, lane = threadIdx.x % 32;
  const int group = threadIdx.x / kGroupThreads, thread = threadIdx.x % kGroupThreads;
  const int warp = thread / 32;
  const int count = static_cast<int>(p.span->count), past = static_cast<int>(p.span->start);
  // Those with most keys start first.
  const int tile_of_queries = tail ? (count - 1) / kQueries : static_cast<int>(gridDim.x - 1 - blockIdx.x);
  const int first_query = tile_of_queries * kQueries;
  const int end_query = min(first_query + kQueries, count), end_key = past + end_query;
  if (first_query >= end_query) return;
  const T* const keys = reinterpret_cast<const T*>(p.span->cache) + p.layer * p.span->layer_step +
                        head / p.group * p.span->head_step;
  const T* const values = keys + p.span->value_step;

  const uint32_t queries_at = shared_address(memory);
  const uint32_t ring_at = queries_at + kQueries * kStride * 2 + group * kRingBytes;
  load_rows<kThreads>(queries_at, p.q + head * p.q_head, p.q_row, first_query, end_query, threadIdx.x);
  const int tiles = (end_key + kKeys - 1) / kKeys;
  // Number i of a group is tile i * kGroups + group.
  const int own = (tiles - group + kGroups - 1) / kGroups;
  const auto load = [&](int i) {
    if (i < own) {
      const uint32_t to = ring_at + i % kStages * 2 * kTileBytes;
      const int first = (i * kGroups + group) * kKeys;
      load_rows<kGroupThreads>(to, keys, kDim, first, end_key, thread);
      load_rows<kGroupThreads>(to + kTileBytes, values, kDim, first, end_key, thread);
    }
    commit_async();
  };
  load(0);
  load(1);
  wait_async<1>();
  __syncthreads();

  uint32_t queries[kSteps][4];
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    load_matrices(queries[step], queries_at + ((warp * 16 + lane % 16) * kStride + step * 16 +
                                               lane / 16 * 8) * 2);
  }
  float result[kDim / 8][4] = {};
  Softmax softmax;
  const int query = first_query + warp * 16 + lane / 4;

  for (int i = 0; i < own; ++i) {
    if (i) {
      group_wait(group);  // the next tile goes where the last one lies
      load(i + 1);
      wait_async<1>();
      group_wait(group);
    }
    const uint32_t keys_at = ring_at + i % kStages * 2 * kTileBytes;
    const uint32_t values_at = keys_at + kTileBytes;
    float scores[kKeys / 8][4] = {};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int pair = 0; pair < kKeys / 16; ++pair) {
        uint32_t b[4];
        const int row = pair * 16 + lane / 16 * 8 + lane % 8;
        load_matrices(b, keys_at + (row * kStride + step * 16 + lane / 8 % 2 * 8) * 2);
        multiply(scores[2 * pair], queries[step], b[0], b[1], T());
        multiply(scores[2 * pair + 1], queries[step], b[2], b[3], T());
      }
    }
    const int base = (i * kGroups + group) * kKeys, last = end_key - 1 - base;
    // The last key that each of the lane's two rows may see, counted from this tile's first.
    const int low = min(past + query - base, last), high = min(past + query + 8 - base, last);
    if (min(low, high) < kKeys - 1) {
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j) {
        const int key = j * 8 + lane % 4 * 2;
        if (key > low) scores[j][0] = -INFINITY;
        if (key + 1 > low) scores[j][1] = -INFINITY;
        if (key > high) scores[j][2] = -INFINITY;
        if (key + 1 > high) scores[j][3] = -INFINITY;
      }
    }
    const float2 shrink = softmax.step(scores, p.scale);
#pragma unroll
    for (int j = 0; j < kDim / 8; ++j) {
      result[j][0] *= shrink.x;
      result[j][1] *= shrink.x;
      result[j][2] *= shrink.y;
      result[j][3] *= shrink.y;
    }
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
      float(*s)[4] = scores + 2 * step;
      const uint32_t weights[4] = {narrow<T>(s[0][0], s[0][1]), narrow<T>(s[0][2], s[0][3]),
                                   narrow<T>(s[1][0], s[1][1]), narrow<T>(s[1][2], s[1][3])};
#pragma unroll
      for (int pair = 0; pair < kDim / 16; ++pair) {
        uint32_t b[4];
        const int row = step * 16 + lane % 16;
        load_transposed(b, values_at + (row * kStride + pair * 16 + lane / 16 * 8) * 2);
        multiply(result[2 * pair], weights, b[0], b[1], T());
        multiply(result[2 * pair + 1], weights, b[2], b[3], T());
      }
    }
  }

  wait_async<0>();
  // [number][lane]: lanes side by side.
  float* const left = reinterpret_cast<float*>(memory + kQueries * kStride * 2 + kRingBytes) + thread;
  if (group == 1) {
    group_wait(group);  // all of its warps are done with the keys that lay here
#pragma unroll
    for (int j = 0; j < kDim / 8; ++j) {
#pragma unroll
      for (int c = 0; c < 4; ++c) left[(j * 4 + c) * kGroupThreads] = result[j][c];
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      left[(kDim / 2 + r) * kGroupThreads] = softmax.largest[r];
      left[(kDim / 2 + 2 + r) * kGroupThreads] = softmax.sum[r];
    }
  }
  __syncthreads();
  if (group == 1) return;
  float mine[2], theirs[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float other = left[(kDim / 2 + r) * kGroupThreads];
    // The first group has every query's first key: its largest score is a number.
    const float most = fmaxf(softmax.largest[r], other);
    mine[r] = power_of_two((softmax.largest[r] - most) * p.scale);
    theirs[r] = power_of_two((other - most) * p.scale);
    softmax.sum[r] =
        softmax.sum[r] * mine[r] + left[(kDim / 2 + 2 + r) * kGroupThreads] * theirs[r];
  }
  const float2 inverse = softmax.inverse();
  T* const to = p.out + static_cast<int64_t>(query) * p.out_row + head * p.out_head + lane % 4 * 2;
#pragma unroll
  for (int j = 0; j < kDim / 8; ++j) {
    float sum[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      sum[c] = (result[j][c] * mine[c / 2] + left[(j * 4 + c) * kGroupThreads] * theirs[c / 2]) *
               (c < 2 ? inverse.x : inverse.y);
    }
    if (query < end_query) *reinterpret_cast<uint32_t*>(to + j * 8) = narrow<T>(sum[0], sum[1]);
    if (query + 8 < end_query) {
      *reinterpret_cast<uint32_t*>(to + 8 * p.out_row + j * 8) = narrow<T>(sum[2], sum[3]);
    }
  }
}

template <class T>
cudaError_t launch(const qwen_vl_heads& h, const void* qkv, const qwen_vl_span* span, int layer,
                   float scale, int tail, void* out, cudaStream_t stream) {
  Attention<T> p = {};
  p.q = static_cast<const T*>(qkv);
  p.out = static_cast<T*>(out);
  p.q_row = static_cast<int64_t>(h.heads + 2 * h.kv_heads) * kDim;
  p.q_head = p.out_head = kDim;
  p.out_row = static_cast<int64_t>(h.heads) * kDim;
  p.group = h.heads / h.kv_heads;
  p.scale = scale * kLog2E;
  p.span = span;
  p.layer = layer;
  const auto kernel = attend_prompt<T>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error) return error;
  const int tiles = tail ? 1 : (h.rows + kQueries - 1) / kQueries;
  kernel<<<dim3(tiles, h.heads), kThreads, kSharedBytes, stream>>>(p, tail);
  return cudaSuccess;
}

__global__ void copy_last(const uint4* a, const uint4* b, const qwen_vl_span* span, uint4* out,
                          int chunks) {
  const int64_t row = span->count - 1;
  for (int i = threadIdx.x; i < 2 * chunks; i += blockDim.x) {
    out[i] = i < chunks ? a[row * chunks + i] : b[row * chunks + i - chunks];
  }
}

}  // namespace
}  // namespace qwen_vl

using namespace qwen_vl;

extern "C" int qwen_vl_cache_map(const qwen_vl_heads* heads, const qwen_vl_span* span,
                                 int32_t layers, int32_t capacity, void* map, char* message,
                                 size_t size) {
  if (!heads || !span || !map) {
    return refuse(QWEN_VL_NULL_POINTER, message, size, "cache map: a null pointer");
  }
  const int64_t head_step = static_cast<int64_t>(capacity) * kDim;
  if (heads->head_dim != kDim || heads->kv_heads < 1 || layers < 1 || capacity < 1 ||
      span->head_step != head_step || span->value_step != heads->kv_heads * head_step ||
      span->layer_step != 2 * span->value_step) {
    return refuse(QWEN_VL_BAD_SIZE, message, size,
                  "cache map of %d heads of %d channels, %d layers, %d positions: heads of %d that "
                  "lie one after the other are possible",
                  heads->kv_heads, heads->head_dim, layers, capacity, kDim);
  }
  const int status = check_half(heads->dtype, "cache map", message, size);
  if (status) return status;
  if (!qwen_vl_attention_has(QWEN_VL_WGMMA)) {
    return refuse(QWEN_VL_BAD_ENCODING, message, size,
                  "cache map: this device or library has no wgmma form");
  }
  const int error =
      describe_cache(*span, heads->dtype, capacity, layers * 2 * heads->kv_heads, map);
  return error ? refuse(QWEN_VL_CUDA_ERROR, message, size, "cache map: the driver refuses")
               : QWEN_VL_OK;
}

extern "C" int qwen_vl_attend_prompt(const qwen_vl_heads* heads, const void* qkv,
                                     const qwen_vl_span* span, const void* map, int32_t layer,
                                     float scale, int32_t tail, void* out, void* stream,
                                     char* message, size_t size) {
  if (!heads || !span) return refuse(QWEN_VL_NULL_POINTER, message, size, "attention: a null pointer");
  if (heads->rows < 1 || heads->heads < 1 || heads->kv_heads < 1 ||
      heads->heads % heads->kv_heads || heads->head_dim != kDim) {
    return refuse(QWEN_VL_BAD_SIZE, message, size,
                  "attention of a prompt of %d rows, %d and %d heads of %d channels: %d channels and "
                  "whole groups of heads are possible",
                  heads->rows, heads->heads, heads->kv_heads, heads->head_dim, kDim);
  }
  int status = check_half(heads->dtype, "attention", message, size);
  if (!status) status = check_pointers("attention", message, size, qkv, static_cast<const void*>(out));
  if (status) return status;
  const auto s = static_cast<cudaStream_t>(stream);
  int error;
  if (map) {
    error = launch_prompt(*heads, qkv, span, map, layer, scale, tail, out, s);
  } else if (heads->dtype == QWEN_VL_BF16) {
    error = launch<__nv_bfloat16>(*heads, qkv, span, layer, scale, tail, out, s);
  } else {
    error = launch<__half>(*heads, qkv, span, layer, scale, tail, out, s);
  }
  if (error) {
    return refuse(QWEN_VL_CUDA_ERROR, message, size, "attention: %s (CUDA error %d)",
                  cudaGetErrorString(static_cast<cudaError_t>(error)), error);
  }
  return launched("attention", message, size);
}

extern "C" int qwen_vl_last_rows(const qwen_vl_rows* rows, const void* a, const void* b,
                                 const qwen_vl_span* span, void* out, void* stream, char* message,
                                 size_t size) {
  if (!rows || !span) return refuse(QWEN_VL_NULL_POINTER, message, size, "last rows: a null pointer");
  int status = check_half(rows->dtype, "last rows", message, size);
  if (!status) {
    status = check_pointers("last rows", message, size, a, b, static_cast<const void*>(out));
  }
  if (status) return status;
  if (rows->rows < 1 || rows->width < 8 || rows->width % 8) {
    return refuse(QWEN_VL_BAD_SIZE, message, size,
                  "last of %d rows of %d: a multiple of 8 is needed", rows->rows, rows->width);
  }
  copy_last<<<1, 512, 0, static_cast<cudaStream_t>(stream)>>>(
      static_cast<const uint4*>(a), static_cast<const uint4*>(b), span, static_cast<uint4*>(out),
      rows->width / 8);
  return launched("last rows", message, size);
}
