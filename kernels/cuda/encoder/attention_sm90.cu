// Attention within segments on Hopper's wgmma, for heads of 80 channels; compiled for sm_90a.
//
//     a block      two warpgroups of 64 queries each, 64 keys at a time; two blocks on a
//                  multiprocessor, so that one multiplies while the other takes exponentials
//     a product    scores m64n64k16 in 5 steps, result m64n80k16 in 4: 80 channels cost 80
//     ring         three tiles of keys and values, filled by cp.async two tiles ahead
#include <ptx.cuh>

#include "attention.cuh"
#include "wgmma.cuh"

namespace qwen_vl {
namespace {

constexpr int kDim = 80;
constexpr int kChunks = kDim / 8;
constexpr int kQueries = QWEN_VL_TILE_ROWS;
constexpr int kKeys = 64;
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kStages = 3;
constexpr int kQueryBytes = kQueries * kDim * 2;
constexpr int kTileBytes = kKeys * kDim * 2;
constexpr int kSharedBytes = kQueryBytes + kStages * 2 * kTileBytes;
// A warp copies 16 rows of two chunks at a time: whole 32-byte sectors, whole core matrices.
constexpr int kPiecesATile = kKeys / 16 * (kChunks / 2);
constexpr int kPiecesAWarp = 2 * kPiecesATile / kWarps;
static_assert(2 * kSharedBytes <= 226 * 1024, "two blocks on a multiprocessor");
static_assert(2 * kPiecesATile % kWarps == 0, "every warp copies as much");

__device__ inline void copy_or_zero(uint32_t to, const void* from, bool there) {
  const int bytes = there ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
               : "memory");
}

template <class T>
__global__ void __launch_bounds__(kThreads, 2) attend(const Attention<T> p) {
  extern __shared__ __align__(128) uint8_t memory[];
  const int4 tile = p.tiles[blockIdx.x];
  const int first_query = tile.x, end_query = tile.y, first_key = tile.z, end_key = tile.w;
  if (first_query >= end_query) return;
  const int head = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int group = warp / 4;
  const T* const queries = p.q + head * p.q_head;
  const uint32_t queries_at = shared_address(memory);
  const uint32_t ring_at = queries_at + kQueryBytes;
  const int piece_row = lane % 16, piece_chunk = lane / 16;

#pragma unroll
  for (int i = warp; i < kQueries / 16 * (kChunks / 2); i += kWarps) {
    const int row = i % (kQueries / 16) * 16 + piece_row;
    const int chunk = i / (kQueries / 16) * 2 + piece_chunk;
    const bool there = first_query + row < end_query;
    copy_or_zero(queries_at + chunk * kQueries * 16 + row * 16,
                 queries + (there ? first_query + row : first_query) * p.q_row + chunk * 8, there);
  }
  const int tiles = (end_key - first_key + kKeys - 1) / kKeys;
  const auto load = [&](int number) {
    if (number < tiles) {
      const uint32_t to = ring_at + number % kStages * 2 * kTileBytes;
      const int first = first_key + number * kKeys;
#pragma unroll
      for (int i = 0; i < kPiecesAWarp; ++i) {
        const int piece = warp + i * kWarps, inside = piece % kPiecesATile;
        const int row = inside % (kKeys / 16) * 16 + piece_row;
        const int chunk = inside / (kKeys / 16) * 2 + piece_chunk;
        const bool there = first + row < end_key;
        const T* const from = (piece < kPiecesATile ? p.k : p.v) + head * p.kv_head +
                              (there ? first + row : first) * p.kv_row + chunk * 8;
        copy_or_zero(to + (piece < kPiecesATile ? 0 : kTileBytes) + chunk * kKeys * 16 + row * 16,
                     from, there);
      }
    }
    commit_async();
  };
  load(0);
  load(1);

  float result[kDim / 8][4] = {};
  Softmax softmax;
  const uint64_t queries_matrix = matrix(queries_at + group * 64 * 16, kQueries * 16, 128);
  for (int number = 0; number < tiles; ++number) {
    wait_async<1>();
    publish_shared();
    __syncthreads();
    load(number + 2);  // where the tile before lay, which both groups have done with
    const uint32_t at = ring_at + number % kStages * 2 * kTileBytes;
    const uint64_t keys = matrix(at, kKeys * 16, 128);
    const uint64_t values = matrix(at + kTileBytes, 128, kKeys * 16);
    float scores[kKeys / 8][4];
    wgmma_begin();
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
      multiply_scores(scores, queries_matrix + step * (2 * kQueries * 16 >> 4),
                      keys + step * (2 * kKeys * 16 >> 4), step > 0, T());
    }
    wgmma_commit();
    wgmma_wait<0>();
    const int left = end_key - first_key - number * kKeys;
    if (left < kKeys) {
#pragma unroll
      for (int i = 0; i < kKeys / 8; ++i) {
        const int key = i * 8 + lane % 4 * 2;
        if (key >= left) scores[i][0] = scores[i][2] = -INFINITY;
        if (key + 1 >= left) scores[i][1] = scores[i][3] = -INFINITY;
      }
    }
    const float2 shrink = softmax.step(scores, p.scale);
#pragma unroll
    for (int i = 0; i < kDim / 8; ++i) {
      result[i][0] *= shrink.x;
      result[i][1] *= shrink.x;
      result[i][2] *= shrink.y;
      result[i][3] *= shrink.y;
    }
    uint32_t weights[kKeys / 16][4];
#pragma unroll
    for (int i = 0; i < kKeys / 16; ++i) {
      weights[i][0] = narrow<T>(scores[2 * i][0], scores[2 * i][1]);
      weights[i][1] = narrow<T>(scores[2 * i][2], scores[2 * i][3]);
      weights[i][2] = narrow<T>(scores[2 * i + 1][0], scores[2 * i + 1][1]);
      weights[i][3] = narrow<T>(scores[2 * i + 1][2], scores[2 * i + 1][3]);
    }
    wgmma_begin();
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
      multiply_result(result, weights[step], values + step * (16 * 16 >> 4), T());
    }
    wgmma_commit();
    wgmma_wait<0>();
  }

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
