// Rotary embeddings (Su et al. 2021): of the encoder's grid, and of the prompt's three axes
// (M-RoPE), there together with the way of keys and values into the cache. Angles, sines and
// products are float32; the rotated values are rounded once.
#include "launch.cuh"
#include "status.h"
#include "vector.cuh"

namespace qwen_vl {
namespace {

constexpr int kThreads = 128;
constexpr int kHeadsAThread = 4;

// Turns channel c with c + half: (a, b) -> (a cos - b sin, b cos + a sin).
__device__ inline void turn(Eight& low, Eight& high, const float2 (&angles)[8]) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float a = low.v[j], b = high.v[j];
    low.v[j] = a * angles[j].x - b * angles[j].y;
    high.v[j] = b * angles[j].x + a * angles[j].y;
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    rotate_grid(T* qkv, const int2* spots, const float2* turns, int rows, int heads, int head_dim) {
  const int half = head_dim / 2, quarter = head_dim / 4, chunks = half / 8;
  const int groups = 2 * heads / kHeadsAThread;
  const int i = blockIdx.x * kThreads + threadIdx.x;
  begin_after_previous();
  if (i >= rows * chunks * groups) return;
  const int chunk = i % chunks, group = i / chunks % groups, row = i / chunks / groups;
  T* const at = qkv + (static_cast<int64_t>(row) * 3 * heads + group * kHeadsAThread) * head_dim +
                chunk * 8;
  // All on their way before the first is waited for.
  const int2 spot = spots[row];
  uint4 raw[kHeadsAThread][2];
#pragma unroll
  for (int h = 0; h < kHeadsAThread; ++h) {
    raw[h][0] = *reinterpret_cast<const uint4*>(at + h * head_dim);
    raw[h][1] = *reinterpret_cast<const uint4*>(at + h * head_dim + half);
  }
  float2 angles[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const int c = chunk * 8 + j;
    angles[j] = c < quarter ? turns[spot.x * quarter + c] : turns[spot.y * quarter + c - quarter];
  }
#pragma unroll
  for (int h = 0; h < kHeadsAThread; ++h) {
    Eight low = Eight::of<T>(raw[h][0]), high = Eight::of<T>(raw[h][1]);
    turn(low, high, angles);
    low.store(at + h * head_dim);
    high.store(at + h * head_dim + half);
  }
}

__global__ void __launch_bounds__(kThreads)
    make_turns(const int64_t* positions, const int32_t* axes, const float* frequencies, float2* turns,
               int rows, int half) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= rows * half) return;
  const int row = i / half, c = i % half;
  const float angle =
      static_cast<float>(positions[static_cast<int64_t>(axes[c]) * rows + row]) * frequencies[c];
  float s, k;
  sincosf(angle, &s, &k);
  turns[i] = {k, s};
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    rotate_text(T* qkv, const float2* turns, const qwen_vl_span* span, int layer, int rows,
                int heads, int kv_heads, int head_dim) {
  const int half = head_dim / 2, chunks = half / 8, all = heads + 2 * kv_heads;
  const int i = blockIdx.x * kThreads + threadIdx.x;
  begin_after_previous();
  if (i >= rows * all * chunks) return;
  const int chunk = i % chunks, head = i / chunks % all, row = i / chunks / all;
  // Rows that only fill the bucket: their keys and values must not reach the cache.
  if (row >= span->count) return;
  T* const at = qkv + (static_cast<int64_t>(row) * all + head) * head_dim + chunk * 8;
  Eight low = Eight::load(at), high = Eight::load(at + half);
  if (head < heads + kv_heads) {
    float2 angles[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) angles[j] = turns[static_cast<int64_t>(row) * half + chunk * 8 + j];
    turn(low, high, angles);
  }
  T* to = at;
  if (head >= heads) {
    const bool is_value = head >= heads + kv_heads;
    to = reinterpret_cast<T*>(span->cache) + layer * span->layer_step +
         (is_value ? span->value_step : 0) +
         (head - heads - (is_value ? kv_heads : 0)) * span->head_step +
         (span->start + row) * head_dim + chunk * 8;
  }
  low.store(to);
  high.store(to + half);
}

unsigned blocks(int64_t threads) {
  return static_cast<unsigned>((threads + kThreads - 1) / kThreads);
}

int check(const qwen_vl_heads* heads, char* message, size_t size) {
  if (!heads) return refuse(QWEN_VL_NULL_POINTER, message, size, "rotation: a null pointer");
  if (heads->rows < 1 || heads->heads < 1 || heads->kv_heads < 1 || heads->head_dim % 16 ||
      heads->head_dim < 16) {
    return refuse(QWEN_VL_BAD_SIZE, message, size,
                  "rotation of %d rows, %d and %d heads of %d: channels must be a multiple of 16",
                  heads->rows, heads->heads, heads->kv_heads, heads->head_dim);
  }
  return check_half(heads->dtype, "rotation", message, size);
}

}  // namespace
}  // namespace qwen_vl

using namespace qwen_vl;

extern "C" int qwen_vl_rotate_grid(const qwen_vl_heads* heads, void* qkv, const int32_t* spots,
                                   const float* turns, void* stream, char* message, size_t size) {
  int status = check(heads, message, size);
  if (!status) status = check_pointers("rotation", message, size, qkv, static_cast<const void*>(spots),
                                       static_cast<const void*>(turns));
  if (status) return status;
  if (heads->heads * 2 % kHeadsAThread) {
    return refuse(QWEN_VL_BAD_SIZE, message, size, "rotation of %d heads: a multiple of %d is needed",
                  heads->heads, kHeadsAThread / 2);
  }
  const int64_t threads = static_cast<int64_t>(heads->rows) * (heads->head_dim / 16) *
                          (2 * heads->heads / kHeadsAThread);
  const auto run = [&](auto type) {
    using T = decltype(type);
    return launch_early(rotate_grid<T>, blocks(threads), kThreads, 0,
                        static_cast<cudaStream_t>(stream), static_cast<T*>(qkv),
                        reinterpret_cast<const int2*>(spots), reinterpret_cast<const float2*>(turns),
                        heads->rows, heads->heads, heads->head_dim);
  };
  const cudaError_t error = heads->dtype == QWEN_VL_BF16 ? run(__nv_bfloat16()) : run(__half());
  return launched("rotation", error, message, size);
}

extern "C" int qwen_vl_turns(int32_t rows, int32_t half, const int64_t* positions,
                             const int32_t* axes, const float* frequencies, float* turns,
                             void* stream, char* message, size_t size) {
  if (!positions || !axes || !frequencies || !turns) {
    return refuse(QWEN_VL_NULL_POINTER, message, size, "turns: a null pointer");
  }
  if (rows < 1 || half < 1) {
    return refuse(QWEN_VL_BAD_SIZE, message, size, "turns of %d rows of %d", rows, half);
  }
  make_turns<<<blocks(static_cast<int64_t>(rows) * half), kThreads, 0,
               static_cast<cudaStream_t>(stream)>>>(positions, axes, frequencies,
                                                    reinterpret_cast<float2*>(turns), rows, half);
  return launched("turns", message, size);
}

extern "C" int qwen_vl_rotate_text(const qwen_vl_heads* heads, void* qkv, const float* turns,
                                   const qwen_vl_span* span, int32_t layer, void* stream,
                                   char* message, size_t size) {
  int status = check(heads, message, size);
  if (!status) status = check_pointers("rotation", message, size, qkv, static_cast<const void*>(turns));
  if (!status && !span) status = refuse(QWEN_VL_NULL_POINTER, message, size, "rotation: a null pointer");
  if (status) return status;
  const int64_t threads = static_cast<int64_t>(heads->rows) * (heads->heads + 2 * heads->kv_heads) *
                          (heads->head_dim / 16);
  const auto run = [&](auto type) {
    using T = decltype(type);
    return launch_early(rotate_text<T>, blocks(threads), kThreads, 0,
                        static_cast<cudaStream_t>(stream), static_cast<T*>(qkv),
                        reinterpret_cast<const float2*>(turns), span, layer, heads->rows,
                        heads->heads, heads->kv_heads, heads->head_dim);
  };
  const cudaError_t error = heads->dtype == QWEN_VL_BF16 ? run(__nv_bfloat16()) : run(__half());
  return launched("rotation", error, message, size);
}
