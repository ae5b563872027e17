// Attention within segments on Hopper's wgmma, for heads of 80 channels; compiled for sm_90a.
//
//     a block      two warpgroups of 64 queries each, which stay in registers; one block on a
//                  multiprocessor
//     a step       the scores of the next keys and the result of the last ones are in the tensor
//                  cores together; the groups take turns, so that one multiplies while the other
//                  takes exponentials (FlashAttention-3, Shah et al. 2024)
//     a product    scores m64nKk16 in 5 steps, result m64n80k16: 80 channels cost 80
//     ring         five tiles of keys and values, filled by all threads (cp.async), three ahead;
//                  a group may be one tile ahead of the other
#include "attention.cuh"
#include "hopper.h"
#include "mma.cuh"
#include "wgmma.cuh"

namespace qwen_vl {
namespace {

#ifndef KSTAGES
#define KSTAGES 5
#endif
#ifndef ORDER
#define ORDER 1
#endif
#ifndef KEYS
#define KEYS 112
#endif
constexpr int kDim = 80;
constexpr int kChunks = kDim / 8;
constexpr int kQueries = QWEN_VL_TILE_ROWS;
constexpr int kKeys = KEYS;
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kStages = KSTAGES;
constexpr int kAhead = kStages - 2;
constexpr int kQueryBytes = kQueries * kDim * 2;
constexpr int kTileBytes = kKeys * kDim * 2;
constexpr int kRingBytes = kStages * 2 * kTileBytes;
constexpr int kSharedBytes = kQueryBytes + kRingBytes + 2 * kStages * 8;
// A warp copies 16 rows of two chunks at a time: whole 32-byte sectors, whole core matrices.
constexpr int kRowPieces = kKeys / 16;
constexpr int kPieces = kRowPieces * (kChunks / 2);
static_assert(kSharedBytes <= 226 * 1024, "what a block may take");

template <class T>
__device__ inline void pack(uint32_t (&weights)[kKeys / 16][4], const float (&scores)[kKeys / 8][4]) {
#pragma unroll
  for (int i = 0; i < kKeys / 16; ++i) {
    weights[i][0] = narrow<T>(scores[2 * i][0], scores[2 * i][1]);
    weights[i][1] = narrow<T>(scores[2 * i][2], scores[2 * i][3]);
    weights[i][2] = narrow<T>(scores[2 * i + 1][0], scores[2 * i + 1][1]);
    weights[i][3] = narrow<T>(scores[2 * i + 1][2], scores[2 * i + 1][3]);
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
__global__ void __launch_bounds__(kThreads, 1) attend(const Attention<T> p) {
  extern __shared__ __align__(128) uint8_t memory[];
  const int4 tile = p.tiles[blockIdx.x];
  const int first_query = tile.x, end_query = tile.y, first_key = tile.z, end_key = tile.w;
  if (first_query >= end_query) return;
  const int head = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const T* const queries_from = p.q + head * p.q_head;
  const uint32_t queries_at = shared_address(memory);
  const uint32_t ring_at = queries_at + kQueryBytes;
  const int piece_row = lane % 16, piece_chunk = lane / 16;

#pragma unroll
  for (int i = warp; i < kQueries / 16 * (kChunks / 2); i += kWarps) {
    const int row = i % (kQueries / 16) * 16 + piece_row;
    const int chunk = i / (kQueries / 16) * 2 + piece_chunk;
    const bool there = first_query + row < end_query;
    copy_or_zero(queries_at + chunk * kQueries * 16 + row * 16,
                 queries_from + (there ? first_query + row : first_query) * p.q_row + chunk * 8,
                 there);
  }
  const int tiles = (end_key - first_key + kKeys - 1) / kKeys;
  const T* const keys_from = p.k + head * p.kv_head + piece_chunk * 8;
  const int64_t values_after = p.v - p.k;
  const uint32_t full_at = ring_at + kRingBytes, empty_at = full_at + kStages * 8;
  if (threadIdx.x == 0) {
#pragma unroll
    for (int i = 0; i < kStages; ++i) {
      barrier_init(full_at + i * 8, kThreads);
      barrier_init(empty_at + i * 8, kWarps);
    }
  }
  commit_async();
  __syncthreads();
  const auto load = [&](int number) {
    if (number >= tiles) return;
    const int slot = number % kStages;
    if (number >= kStages) barrier_wait(empty_at + slot * 8, (number / kStages - 1) & 1);
    const uint32_t to =
        ring_at + slot * 2 * kTileBytes + piece_chunk * kKeys * 16 + piece_row * 16;
    const int first = first_key + number * kKeys + piece_row;
#pragma unroll
    for (int i = 0; i < (kPieces + kWarps - 1) / kWarps; ++i) {
      const int piece = warp + i * kWarps;
      if (kPieces % kWarps && piece >= kPieces) break;
      const int row = piece % kRowPieces * 16, pair = piece / kRowPieces;
      const bool there = first + row < end_key;
      const T* const from = keys_from + (there ? first + row : first_key) * p.kv_row + pair * 16;
      const uint32_t at = to + pair * 2 * kKeys * 16 + row * 16;
      copy_or_zero(at, from, there);
      copy_or_zero(at + kTileBytes, from + values_after, there);
    }
    barrier_arrive_with_copies(full_at + slot * 8);
  };
  const auto wait_full = [&](int number) {
    barrier_wait(full_at + number % kStages * 8, number / kStages & 1);
    publish_shared();
  };
#pragma unroll
  for (int i = 0; i < kAhead; ++i) load(i);
  // The queries were committed before the tiles.
  wait_async<0>();
  __syncthreads();

  uint32_t queries[kDim / 16][4];
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
    load_matrices(queries[step], queries_at + (2 * step + lane / 16) * kQueries * 16 +
                                     (warp * 16 + lane % 16) * 16);
  }
  float result[kDim / 8][4] = {};
  float scores[kKeys / 8][4];
  uint32_t weights[kKeys / 16][4];
  Softmax softmax;
  const auto multiply_keys = [&](int number) {
    const uint64_t keys =
        matrix(ring_at + number % kStages * 2 * kTileBytes, kKeys * 16, 128);
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
      multiply_scores(scores, queries[step], keys + step * (2 * kKeys * 16 >> 4), step > 0, T());
    }
    wgmma_commit();
  };
  const auto multiply_values = [&](int number) {
    const uint64_t values =
        matrix(ring_at + number % kStages * 2 * kTileBytes + kTileBytes, 128, kKeys * 16);
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
      multiply_result(result, weights[step], values + step * (16 * 16 >> 4), T());
    }
    wgmma_commit();
  };

  // Whose turn it is to start products: barrier 1 for the first group, 2 for the second.
  const int own = 1 + warp / 4, other = 3 - own;
  wait_full(0);
  wgmma_begin();
  multiply_keys(0);
  if (ORDER && own == 2 && tiles > 1) named_arrive<kThreads>(other);
  wgmma_wait<0>();
  hide(scores, end_key - first_key, lane);
  softmax.step(scores, p.scale);
  pack<T>(weights, scores);
  for (int number = 1; number < tiles; ++number) {
    wait_full(number);
    if (ORDER) named_wait<kThreads>(own);
    wgmma_begin();
    multiply_keys(number);
    multiply_values(number - 1);
    if (ORDER && (own == 1 || number + 1 < tiles)) named_arrive<kThreads>(other);
    load(number + kAhead - 1);
    wgmma_wait<1>();
    hide(scores, end_key - first_key - number * kKeys, lane);
    const float2 shrink = softmax.step(scores, p.scale);
    wgmma_wait<0>();
    if (lane == 0) barrier_arrive(empty_at + (number - 1) % kStages * 8);
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
  multiply_values(tiles - 1);
  wgmma_wait<0>();

  const float2 inverse = softmax.inverse();
  const int query = first_query + warp * 16 + lane / 4;
  T* const to = p.out + query * p.out_row + head * p.out_head + lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < kDim / 8; ++i) {
    if (query < end_query) {
      *reinterpret_cast<uint32_t*>(to + i * 8) =
          narrow<T>(result[i][0] * inverse.x, result[i][1] * inverse.x);
    }
    if (query + 8 < end_query) {
      *reinterpret_cast<uint32_t*>(to + 8 * p.out_row + i * 8) =
          narrow<T>(result[i][2] * inverse.y, result[i][3] * inverse.y);
    }
  }
}

template <class T>
int launch(const void* args, int tiles, int heads, cudaStream_t stream) {
  const cudaError_t error = cudaFuncSetAttribute(
      attend<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error) return error;
  attend<T><<<dim3(tiles, heads), kThreads, kSharedBytes, stream>>>(
      *static_cast<const Attention<T>*>(args));
  return cudaSuccess;
}

}  // namespace

bool wgmma_built() { return true; }

int launch_wgmma(int dtype, const void* args, int tiles, int heads, cudaStream_t stream) {
  return dtype == QWEN_VL_BF16 ? launch<__nv_bfloat16>(args, tiles, heads, stream)
                               : launch<__half>(args, tiles, heads, stream);
}

}  // namespace qwen_vl
