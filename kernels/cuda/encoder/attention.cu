// Attention on tensor cores of the sm_80 class: scores and weights of keys never leave registers
// (FlashAttention-2, Dao 2023), heads of 64, 80 and 128 channels at their own cost.
//
//     a block      4 warps of 32 queries of one head (16 of a prompt, which has few); 64 keys at a
//                  time, two tiles of keys and values in shared memory (cp.async)
//     a product    m16n8k16; 80 channels are 5 steps of scores and 10 columns of results
//     rows         in shared memory are an odd number of 16-byte chunks apart: no bank conflicts
#include "attention.cuh"
#include "hopper.h"
#include "mma.cuh"
#include "status.h"

namespace qwen_vl {
namespace {

constexpr int kThreads = 128;
constexpr int kKeys = 64;
constexpr int kStages = 2;

// kSub: sets of 16 queries of a warp.
template <int kDim_, int kSub_>
struct Shape {
  static constexpr int kDim = kDim_, kSub = kSub_;
  static constexpr int kQueries = 64 * kSub;
  static constexpr int kStride = kDim + 8;  // elements
  static constexpr int kTile = kKeys * kStride;
  static constexpr int kSharedBytes = (kQueries * kStride + 2 * kStages * kTile) * 2;
  static constexpr int kChunks = kDim / 8;
  static constexpr int kSteps = kDim / 16;
  static_assert(kStride / 8 % 2 == 1, "rows must not share banks");
  static_assert(kSharedBytes <= 163 * 1024, "what a block may take on sm_87");
};

template <class S, int kRows, class T>
__device__ inline void load_rows(uint32_t to, const T* from, int64_t stride, int first, int end) {
#pragma unroll
  for (int i = threadIdx.x; i < kRows * S::kChunks; i += kThreads) {
    const int row = i / S::kChunks, chunk = i % S::kChunks;
    const bool there = first + row < end;
    const T* const at = from + (there ? first + row : first) * stride + chunk * 8;
    copy_or_zero(to + (row * S::kStride + chunk * 8) * 2, at, there);
  }
}

template <class T, class S, bool kCached>
__global__ void __launch_bounds__(kThreads) attend(const Attention<T> p) {
  constexpr int kDim = S::kDim, kSub = S::kSub;
  extern __shared__ __align__(16) uint8_t memory[];
  const int head = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int first_query, end_query, first_key, end_key, past = 0;
  const T *keys = p.k, *values = p.v;
  if (kCached) {
    // Those with most keys start first.
    first_query = (gridDim.x - 1 - blockIdx.x) * S::kQueries;
    end_query = min(first_query + S::kQueries, static_cast<int>(p.span->count));
    past = static_cast<int>(p.span->start);
    first_key = 0;
    end_key = past + end_query;
    keys = reinterpret_cast<const T*>(p.span->cache) + p.layer * p.span->layer_step +
           head / p.group * p.span->head_step;
    values = keys + p.span->value_step;
  } else {
    const int4 tile = p.tiles[blockIdx.x];
    first_query = tile.x, end_query = tile.y, first_key = tile.z, end_key = tile.w;
    keys += head / p.group * p.kv_head;
    values += head / p.group * p.kv_head;
  }
  if (first_query >= end_query) return;

  const uint32_t queries_at = shared_address(memory);
  const uint32_t ring_at = queries_at + S::kQueries * S::kStride * 2;
  load_rows<S, S::kQueries>(queries_at, p.q + head * p.q_head, p.q_row, first_query, end_query);
  const int tiles = (end_key - first_key + kKeys - 1) / kKeys;
  const auto load = [&](int tile) {
    if (tile < tiles) {
      const uint32_t to = ring_at + tile % kStages * 2 * S::kTile * 2;
      const int first = first_key + tile * kKeys;
      load_rows<S, kKeys>(to, keys, p.kv_row, first, end_key);
      load_rows<S, kKeys>(to + S::kTile * 2, values, p.kv_row, first, end_key);
    }
    commit_async();
  };
  load(0);
  wait_async<0>();
  __syncthreads();

  uint32_t queries[kSub][S::kSteps][4];
#pragma unroll
  for (int sub = 0; sub < kSub; ++sub) {
    const int row = (warp * kSub + sub) * 16 + lane % 16;
#pragma unroll
    for (int step = 0; step < S::kSteps; ++step) {
      load_matrices(queries[sub][step],
                    queries_at + (row * S::kStride + step * 16 + lane / 16 * 8) * 2);
    }
  }
  float result[kSub][kDim / 8][4] = {};
  Softmax softmax[kSub];

  for (int tile = 0; tile < tiles; ++tile) {
    if (tile) __syncthreads();  // the next tile goes where the last one lies
    load(tile + 1);
    wait_async<1>();
    __syncthreads();
    const uint32_t keys_at = ring_at + tile % kStages * 2 * S::kTile * 2;
    const uint32_t values_at = keys_at + S::kTile * 2;
    float scores[kSub][kKeys / 8][4] = {};
#pragma unroll
    for (int step = 0; step < S::kSteps; ++step) {
#pragma unroll
      for (int pair = 0; pair < kKeys / 16; ++pair) {
        uint32_t b[4];
        const int row = pair * 16 + lane / 16 * 8 + lane % 8;
        load_matrices(b, keys_at + (row * S::kStride + step * 16 + lane / 8 % 2 * 8) * 2);
#pragma unroll
        for (int sub = 0; sub < kSub; ++sub) {
          multiply(scores[sub][2 * pair], queries[sub][step], b[0], b[1], T());
          multiply(scores[sub][2 * pair + 1], queries[sub][step], b[2], b[3], T());
        }
      }
    }
    const int base = first_key + tile * kKeys;
    uint32_t weights[kSub][kKeys / 16][4];
#pragma unroll
    for (int sub = 0; sub < kSub; ++sub) {
      // The last key that each of the lane's two rows may see, counted from this tile's first.
      const int query = first_query + (warp * kSub + sub) * 16 + lane / 4;
      const int last = end_key - 1 - base;
      const int low = kCached ? min(past + query - base, last) : last;
      const int high = kCached ? min(past + query + 8 - base, last) : last;
      if (min(low, high) < kKeys - 1) {
#pragma unroll
        for (int i = 0; i < kKeys / 8; ++i) {
          const int key = i * 8 + lane % 4 * 2;
          if (key > low) scores[sub][i][0] = -INFINITY;
          if (key + 1 > low) scores[sub][i][1] = -INFINITY;
          if (key > high) scores[sub][i][2] = -INFINITY;
          if (key + 1 > high) scores[sub][i][3] = -INFINITY;
        }
      }
      const float2 shrink = softmax[sub].step(scores[sub], p.scale);
#pragma unroll
      for (int i = 0; i < kDim / 8; ++i) {
        result[sub][i][0] *= shrink.x;
        result[sub][i][1] *= shrink.x;
        result[sub][i][2] *= shrink.y;
        result[sub][i][3] *= shrink.y;
      }
#pragma unroll
      for (int i = 0; i < kKeys / 16; ++i) {
        float(*s)[4] = scores[sub] + 2 * i;
        weights[sub][i][0] = narrow<T>(s[0][0], s[0][1]);
        weights[sub][i][1] = narrow<T>(s[0][2], s[0][3]);
        weights[sub][i][2] = narrow<T>(s[1][0], s[1][1]);
        weights[sub][i][3] = narrow<T>(s[1][2], s[1][3]);
      }
    }
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
#pragma unroll
      for (int pair = 0; pair < kDim / 16; ++pair) {
        uint32_t b[4];
        const int row = step * 16 + lane % 16;
        load_transposed(b, values_at + (row * S::kStride + pair * 16 + lane / 16 * 8) * 2);
#pragma unroll
        for (int sub = 0; sub < kSub; ++sub) {
          multiply(result[sub][2 * pair], weights[sub][step], b[0], b[1], T());
          multiply(result[sub][2 * pair + 1], weights[sub][step], b[2], b[3], T());
        }
      }
    }
  }

#pragma unroll
  for (int sub = 0; sub < kSub; ++sub) {
    const float2 inverse = softmax[sub].inverse();
    const int query = first_query + (warp * kSub + sub) * 16 + lane / 4;
    T* const to = p.out + query * p.out_row + head * p.out_head + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < kDim / 8; ++i) {
      if (query < end_query) {
        *reinterpret_cast<uint32_t*>(to + i * 8) =
            narrow<T>(result[sub][i][0] * inverse.x, result[sub][i][1] * inverse.x);
      }
      if (query + 8 < end_query) {
        *reinterpret_cast<uint32_t*>(to + 8 * p.out_row + i * 8) =
            narrow<T>(result[sub][i][2] * inverse.y, result[sub][i][3] * inverse.y);
      }
    }
  }
}

template <class T, int kDim, bool kCached>
cudaError_t launch(const Attention<T>& p, int tiles, int heads, cudaStream_t stream) {
  using S = Shape<kDim, kCached ? 1 : 2>;
  const auto kernel = attend<T, S, kCached>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, S::kSharedBytes);
  if (error) return error;
  kernel<<<dim3(tiles, heads), kThreads, S::kSharedBytes, stream>>>(p);
  return cudaSuccess;
}

int check(const qwen_vl_heads* heads, char* message, size_t size) {
  if (!heads) return refuse(QWEN_VL_NULL_POINTER, message, size, "attention: a null pointer");
  const int dim = heads->head_dim;
  if (heads->rows < 1 || heads->heads < 1 || heads->kv_heads < 1 ||
      heads->heads % heads->kv_heads || (dim != 64 && dim != 80 && dim != 128)) {
    return refuse(QWEN_VL_BAD_SIZE, message, size,
                  "attention of %d rows, %d and %d heads of %d channels: 64, 80 or 128 channels and "
                  "whole groups of heads are possible",
                  heads->rows, heads->heads, heads->kv_heads, dim);
  }
  return check_half(heads->dtype, "attention", message, size);
}

template <class T>
Attention<T> of_qkv(const qwen_vl_heads& h, const void* qkv, void* out, float scale) {
  const int64_t all = h.heads + 2 * h.kv_heads;
  Attention<T> p = {};
  p.q = static_cast<const T*>(qkv);
  p.k = p.q + h.heads * h.head_dim;
  p.v = p.k + h.kv_heads * h.head_dim;
  p.out = static_cast<T*>(out);
  p.q_row = p.kv_row = all * h.head_dim;
  p.q_head = p.kv_head = p.out_head = h.head_dim;
  p.out_row = h.heads * h.head_dim;
  p.group = h.heads / h.kv_heads;
  p.scale = scale * kLog2E;
  return p;
}

template <class T, bool kCached>
cudaError_t by_dim(const qwen_vl_heads& h, const Attention<T>& p, int tiles, cudaStream_t stream) {
  if (h.head_dim == 64) return launch<T, 64, kCached>(p, tiles, h.heads, stream);
  if (h.head_dim == 80) return launch<T, 80, kCached>(p, tiles, h.heads, stream);
  // 128 channels of two sets of rows do not fit into the registers.
  if constexpr (kCached) return launch<T, 128, kCached>(p, tiles, h.heads, stream);
  return cudaErrorInvalidValue;
}

}  // namespace
}  // namespace qwen_vl

using namespace qwen_vl;

extern "C" int qwen_vl_attend_segments(const qwen_vl_heads* heads, int32_t form, const void* qkv,
                                       const int32_t* tiles, int32_t tile_count, float scale,
                                       void* out, void* workspace, void* stream, char* message,
                                       size_t size) {
  int status = check(heads, message, size);
  if (!status) {
    status = check_pointers("attention", message, size, qkv, static_cast<const void*>(tiles), out);
  }
  if (status) return status;
  if (heads->kv_heads != heads->heads || heads->head_dim == 128 || tile_count < 1) {
    return refuse(QWEN_VL_BAD_SIZE, message, size,
                  "attention of segments: %d and %d heads of %d channels, %d tiles",
                  heads->heads, heads->kv_heads, heads->head_dim, tile_count);
  }
  if (form != QWEN_VL_MMA && (heads->head_dim != 80 || !qwen_vl_attention_has(form))) {
    return refuse(QWEN_VL_BAD_ENCODING, message, size,
                  "attention: this device or library has no wgmma form for %d channels",
                  heads->head_dim);
  }
  const bool hopper = form != QWEN_VL_MMA;
  if (hopper && (!workspace || !aligned(workspace))) {
    return refuse(QWEN_VL_NULL_POINTER, message, size,
                  "attention: the wgmma form needs a workspace, aligned to 16 bytes");
  }
  const auto s = static_cast<cudaStream_t>(stream);
  const auto run = [&](auto type) {
    using T = decltype(type);
    Attention<T> p = of_qkv<T>(*heads, qkv, out, scale);
    p.tiles = reinterpret_cast<const int4*>(tiles);
    if (hopper) {
      const int least = form == QWEN_VL_WGMMA ? 8 : 2;
      return launch_wgmma(heads->dtype, &p, heads->rows, tile_count, heads->heads, least, workspace,
                          s);
    }
    return static_cast<int>(by_dim<T, false>(*heads, p, tile_count, s));
  };
  const int error = heads->dtype == QWEN_VL_BF16 ? run(__nv_bfloat16()) : run(__half());
  if (error) {
    return refuse(QWEN_VL_CUDA_ERROR, message, size, "attention: %s (CUDA error %d)",
                  cudaGetErrorString(static_cast<cudaError_t>(error)), error);
  }
  return launched("attention", message, size);
}

extern "C" int qwen_vl_attend_cache(const qwen_vl_heads* heads, const void* qkv,
                                    const qwen_vl_span* span, int32_t layer, float scale, void* out,
                                    void* stream, char* message, size_t size) {
  int status = check(heads, message, size);
  if (!status) status = check_pointers("attention", message, size, qkv, out);
  if (!status && !span) status = refuse(QWEN_VL_NULL_POINTER, message, size, "attention: a null pointer");
  if (status) return status;
  const auto s = static_cast<cudaStream_t>(stream);
  const auto run = [&](auto type) {
    using T = decltype(type);
    Attention<T> p = of_qkv<T>(*heads, qkv, out, scale);
    p.span = span;
    p.layer = layer;
    p.kv_row = heads->head_dim;
    return by_dim<T, true>(*heads, p, (heads->rows + 63) / 64, s);
  };
  const cudaError_t error = heads->dtype == QWEN_VL_BF16 ? run(__nv_bfloat16()) : run(__half());
  if (error) {
    return refuse(QWEN_VL_CUDA_ERROR, message, size, "attention: %s (CUDA error %d)",
                  cudaGetErrorString(error), static_cast<int>(error));
  }
  return launched("attention", message, size);
}

extern "C" uint64_t qwen_vl_attention_workspace(int32_t form) {
  return form != QWEN_VL_MMA && qwen_vl_attention_has(form) ? wgmma_workspace() : 0;
}

extern "C" int qwen_vl_attention_has(int32_t form) {
  int device, major = 0;
  if (cudaGetDevice(&device) ||
      cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device)) {
    cudaGetLastError();
    return 0;
  }
  if (form == QWEN_VL_MMA) return major >= 8;
  const bool known = form == QWEN_VL_WGMMA || form == QWEN_VL_WGMMA_FINE;
  return known && major == 9 && wgmma_built();
}
