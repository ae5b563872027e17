// Attention within segments on Hopper's wgmma, for heads of 80 channels; compiled for sm_90a.
//
//     a block      stays, and takes tiles of 128 queries of one head: four warps copy, two
//                  warpgroups have 64 queries each, which stay in registers
//     a step       the scores of the next keys and the result of the last ones are in the tensor
//                  cores together while the softmax of the next begins (FlashAttention-3, Shah et
//                  al. 2024)
//     a product    scores m64n112k16 in 5 steps, result m64n80k16 in 7: 80 channels cost 80
//     ring         five tiles of 112 keys and values. A copying warp fills every fourth tile and
//                  waits for it alone: the fence that shows copies to the tensor cores also waits
//                  for all that its thread has under way
#include "attention.cuh"
#include "hopper.h"
#include "mma.cuh"
#include "wgmma.cuh"

namespace qwen_vl {
namespace {

constexpr int kDim = 80, kChunks = kDim / 8;
constexpr int kQueries = QWEN_VL_TILE_ROWS, kKeys = 112;
constexpr int kCopyWarps = 4, kGroups = 2, kGroupThreads = 128;
constexpr int kThreads = kCopyWarps * 32 + kGroups * kGroupThreads;
constexpr int kCopyRegisters = 56, kGroupRegisters = 224;
constexpr int kStages = 5;
// From one column of 16-byte chunks to the next: eight chunks of a row lie in different banks.
constexpr int kQueryStep = kQueries * 16 + 16, kKeyStep = kKeys * 16 + 16;
constexpr int kQueryBytes = (kChunks * kQueryStep + 127) / 128 * 128;
constexpr int kTileBytes = (kChunks * kKeyStep + 127) / 128 * 128;
constexpr int kRingBytes = kStages * 2 * kTileBytes;
constexpr int kSharedBytes = kQueryBytes + kRingBytes + 2 * kStages * 8;
static_assert(kSharedBytes <= 226 * 1024, "what a block may take");

// What a block works on: one tile of queries of one head.
struct Item {
  int first_query, end_query, first_key, end_key, head, tiles;

  __device__ Item(const int4* list, int tile_count, int number) : head(number / tile_count) {
    const int4 tile = list[number % tile_count];
    first_query = tile.x, end_query = tile.y, first_key = tile.z, end_key = tile.w;
    tiles = first_query < end_query ? (end_key - first_key + kKeys - 1) / kKeys : 0;
  }
};

template <class T>
__device__ inline void pack(uint32_t (&weights)[kKeys / 16][4],
                            const float (&scores)[kKeys / 8][4]) {
#pragma unroll
  for (int i = 0; i < kKeys / 16 * 4; ++i) {
    const float* const two = scores[i / 4 * 2 + i % 4 / 2] + i % 2 * 2;
    weights[i / 4][i % 4] = narrow<T>(two[0], two[1]);
  }
}

// Hides what lies after the segment's end; `left` keys of the tile are inside.
__device__ inline void hide(float (&scores)[kKeys / 8][4], int left, int lane) {
  if (left >= kKeys) return;
#pragma unroll
  for (int i = 0; i < kKeys / 8; ++i) {
    const int key = i * 8 + lane % 4 * 2;
    if (key >= left) scores[i][0] = scores[i][2] = -INFINITY;
    if (key + 1 >= left) scores[i][1] = scores[i][3] = -INFINITY;
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads, 1)
    attend(const Attention<T> p, int tile_count, int items) {
  extern __shared__ __align__(128) uint8_t memory[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t queries_at = shared_address(memory), ring_at = queries_at + kQueryBytes;
  const uint32_t full_at = ring_at + kRingBytes, empty_at = full_at + kStages * 8;
  if (threadIdx.x == 0) {
#pragma unroll
    for (int i = 0; i < kStages; ++i) {
      barrier_init(full_at + i * 8, 1);
      barrier_init(empty_at + i * 8, kGroups * kGroupThreads / 32);
    }
  }
  __syncthreads();

  if (warp < kCopyWarps) {
    registers_down<kCopyRegisters>();
    int count = 0;  // tiles of keys so far, of all items
    for (int number = blockIdx.x; number < items; number += gridDim.x) {
      const Item item(p.tiles, tile_count, number);
      const T* const keys = p.k + item.head * p.kv_head;
      const int64_t values_after = p.v - p.k;
      for (int tile = 0; tile < item.tiles; ++tile, ++count) {
        if (count % kCopyWarps != warp) continue;
        const int slot = count % kStages;
        if (count >= kStages) barrier_wait(empty_at + slot * 8, (count / kStages - 1) & 1);
        const uint32_t to = ring_at + slot * 2 * kTileBytes;
        const int first = item.first_key + tile * kKeys;
#pragma unroll 5
        for (int i = lane; i < kKeys * kChunks; i += 32) {
          const int row = i / kChunks, chunk = i % kChunks;
          const bool there = first + row < item.end_key;
          const T* const from = keys + (there ? first + row : first) * p.kv_row + chunk * 8;
          const uint32_t at = to + chunk * kKeyStep + row * 16;
          copy_or_zero(at, from, there);
          copy_or_zero(at + kTileBytes, from + values_after, there);
        }
        commit_async();
        wait_async<0>();
        publish_shared();
        __syncwarp();
        if (lane == 0) barrier_arrive(full_at + slot * 8);
      }
    }
  } else {
    registers_up<kGroupRegisters>();
    const int group = (warp - kCopyWarps) / 4, thread = threadIdx.x % kGroupThreads;
    const int first_row = group * 64 + thread / 32 * 16;
    const int meeting = 1 + group;  // barrier 0 is that of the whole block
    int count = 0;
    for (int number = blockIdx.x; number < items; number += gridDim.x) {
      const Item item(p.tiles, tile_count, number);
      if (!item.tiles) continue;
      named_wait<kGroupThreads>(meeting);  // all have read their last queries
      const T* const queries_from = p.q + item.head * p.q_head;
#pragma unroll
      for (int i = thread; i < 64 * kChunks; i += kGroupThreads) {
        const int row = group * 64 + i / kChunks, chunk = i % kChunks;
        const bool there = item.first_query + row < item.end_query;
        copy_or_zero(queries_at + chunk * kQueryStep + row * 16,
                     queries_from +
                         (there ? item.first_query + row : item.first_query) * p.q_row + chunk * 8,
                     there);
      }
      commit_async();
      wait_async<0>();
      named_wait<kGroupThreads>(meeting);
      uint32_t queries[kDim / 16][4];
#pragma unroll
      for (int step = 0; step < kDim / 16; ++step) {
        load_matrices(queries[step], queries_at + (2 * step + lane / 16) * kQueryStep +
                                         (first_row + lane % 16) * 16);
      }
      float result[kDim / 8][4] = {};
      float scores[kKeys / 8][4];
      uint32_t weights[kKeys / 16][4];
      Softmax softmax;
      const auto wait_full = [&](int tile) {
        barrier_wait(full_at + (count + tile) % kStages * 8, (count + tile) / kStages & 1);
      };
      const auto multiply_keys = [&](int tile) {
        const uint64_t keys =
            matrix(ring_at + (count + tile) % kStages * 2 * kTileBytes, kKeyStep, 128);
#pragma unroll
        for (int step = 0; step < kDim / 16; ++step) {
          multiply_scores(scores, queries[step], keys + step * (2 * kKeyStep >> 4), step > 0, T());
        }
        wgmma_commit();
      };
      const auto multiply_values = [&](int tile) {
        const uint64_t values = matrix(
            ring_at + (count + tile) % kStages * 2 * kTileBytes + kTileBytes, 128, kKeyStep);
#pragma unroll
        for (int step = 0; step < kKeys / 16; ++step) {
          multiply_result(result, weights[step], values + step * (16 * 16 >> 4), T());
        }
        wgmma_commit();
      };
      const auto give_back = [&](int tile) {
        if (lane == 0) barrier_arrive(empty_at + (count + tile) % kStages * 8);
      };

      wait_full(0);
      wgmma_begin();
      multiply_keys(0);
      wgmma_wait<0>();
      hide(scores, item.end_key - item.first_key, lane);
      softmax.step(scores, p.scale);
      pack<T>(weights, scores);
      for (int tile = 1; tile < item.tiles; ++tile) {
        wait_full(tile);
        wgmma_begin();
        multiply_keys(tile);
        multiply_values(tile - 1);
        wgmma_wait<1>();
        hide(scores, item.end_key - item.first_key - tile * kKeys, lane);
        const float2 shrink = softmax.step(scores, p.scale);
        wgmma_wait<0>();
        give_back(tile - 1);
#pragma unroll
        for (int i = 0; i < kDim / 8; ++i) {
          result[i][0] *= shrink.x;
          result[i][1] *= shrink.x;
          result[i][2] *= shrink.y;
          result[i][3] *= shrink.y;
        }
        pack<T>(weights, scores);
      }
      wgmma_begin();
      multiply_values(item.tiles - 1);
      wgmma_wait<0>();
      give_back(item.tiles - 1);
      count += item.tiles;

      const float2 inverse = softmax.inverse();
      const int query = item.first_query + first_row + lane / 4;
      T* const to = p.out + query * p.out_row + item.head * p.out_head + lane % 4 * 2;
#pragma unroll
      for (int i = 0; i < kDim / 8; ++i) {
        if (query < item.end_query) {
          *reinterpret_cast<uint32_t*>(to + i * 8) =
              narrow<T>(result[i][0] * inverse.x, result[i][1] * inverse.x);
        }
        if (query + 8 < item.end_query) {
          *reinterpret_cast<uint32_t*>(to + 8 * p.out_row + i * 8) =
              narrow<T>(result[i][2] * inverse.y, result[i][3] * inverse.y);
        }
      }
    }
  }
}

template <class T>
int launch(const void* args, int tiles, int heads, cudaStream_t stream) {
  int device, processors;
  cudaError_t error = cudaGetDevice(&device);
  if (!error) {
    error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  }
  if (!error) {
    error = cudaFuncSetAttribute(attend<T>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 kSharedBytes);
  }
  if (error) return error;
  const int items = tiles * heads;
  attend<T><<<items < processors ? items : processors, kThreads, kSharedBytes, stream>>>(
      *static_cast<const Attention<T>*>(args), tiles, items);
  return cudaSuccess;
}

}  // namespace

bool wgmma_built() { return true; }

int launch_wgmma(int dtype, const void* args, int tiles, int heads, cudaStream_t stream) {
  return dtype == QWEN_VL_BF16 ? launch<__nv_bfloat16>(args, tiles, heads, stream)
                               : launch<__half>(args, tiles, heads, stream);
}

}  // namespace qwen_vl
