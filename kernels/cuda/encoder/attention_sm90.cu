// Attention within segments on Hopper's wgmma and copy engine, for heads of 80 channels; compiled for
// sm_90a.
//
//     a block      stays, and takes tiles of 128 queries of one head: a thread copies, two
//                  warpgroups have 64 queries each, which stay in registers
//     a step       the scores of the next 160 keys and the result of the last ones are in the tensor
//                  cores together; the softmax of the next runs meanwhile, and also while the other
//                  warpgroup's products do, since the two take turns (FlashAttention-3, Shah et al.
//                  2024)
//     a product    scores m64n160k16 in 5 steps, result m64n80k16 in 10: 80 channels cost 80
//     ring         three tiles of keys and three of values, each copied as one box of five columns of
//                  16 channels. A box may reach beyond its segment: such keys are hidden
#include "attention.cuh"
#include "copy_engine.cuh"
#include "hopper.h"
#include "mma.cuh"
#include "wgmma.cuh"

namespace qwen_vl {
namespace {

constexpr int kDim = 80, kColumns = kDim / 16;
constexpr int kGroups = 2, kGroupRows = 64, kGroupThreads = 128, kKeys = 160;
static_assert(kGroups * kGroupRows == QWEN_VL_TILE_ROWS, "a group for each half of a tile");
constexpr int kThreads = (1 + kGroups) * kGroupThreads;
constexpr int kCopyRegisters = 24, kGroupRegisters = 240;
constexpr int kStages = 3;
constexpr int kQueryStep = kGroupRows * kColumnBytes, kKeyStep = kKeys * kColumnBytes;
constexpr int kQueryBytes = kColumns * kQueryStep, kTileBytes = kColumns * kKeyStep;
constexpr int kBarriers = 2 + 4 * kStages;
constexpr int kAlignment = 1024;
constexpr int kSharedBytes =
    kGroups * kQueryBytes + kStages * 2 * kTileBytes + kBarriers * 8 + kAlignment;
static_assert(kSharedBytes <= 227 * 1024, "what a block may take");

// What a block works on: one tile of queries of one head.
struct Item {
  int first_query, end_query, first_key, end_key, head, tiles;

  __device__ Item(const int4* list, int tile_count, int number) : head(number / tile_count) {
    const int4 tile = list[number % tile_count];
    first_query = tile.x, end_query = tile.y, first_key = tile.z, end_key = tile.w;
    tiles = first_query < end_query ? (end_key - first_key + kKeys - 1) / kKeys : 0;
  }
};

// Where things lie in shared memory. A slot's barriers: of keys and of values, full and empty.
struct Places {
  uint32_t queries, ring, queries_full, queries_empty, barriers;

  __device__ explicit Places(uint32_t start) : queries((start + kAlignment - 1) / kAlignment * kAlignment) {
    ring = queries + kGroups * kQueryBytes;
    queries_full = ring + kStages * 2 * kTileBytes;
    queries_empty = queries_full + 8;
    barriers = queries_full + 16;
  }
  __device__ uint32_t tile(int slot, bool values) const {
    return ring + (2 * slot + values) * kTileBytes;
  }
  __device__ uint32_t full(int slot, bool values) const { return barriers + (4 * slot + values) * 8; }
  __device__ uint32_t empty(int slot, bool values) const { return full(slot, values) + 16; }
};

// The running softmax of attention.cuh with two differences. The number that scores are held against
// follows the largest one only when that is 2^8 ahead, as in FlashAttention-4: most
// tiles shrink nothing. And powers are taken where they stand in the source.
struct LazySoftmax {
  float base[2], sum[2];

  __device__ static float power(float x) {
    float y;
    asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }

  __device__ static float largest(const float (&s)[kKeys / 8][4], int row, float most) {
    float other = most;
#pragma unroll
    for (int i = 0; i < kKeys / 8; ++i) {
      most = fmaxf(most, s[i][2 * row]);
      other = fmaxf(other, s[i][2 * row + 1]);
    }
    return quad_max(fmaxf(most, other));
  }

  __device__ void add(float (&s)[kKeys / 8][4], float scale) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float offset = base[row] * scale;
      float even = 0.0f, odd = 0.0f;
#pragma unroll
      for (int i = 0; i < kKeys / 8; ++i) {
        s[i][2 * row] = power(fmaf(s[i][2 * row], scale, -offset));
        s[i][2 * row + 1] = power(fmaf(s[i][2 * row + 1], scale, -offset));
        even += s[i][2 * row];
        odd += s[i][2 * row + 1];
      }
      sum[row] += even + odd;
    }
  }

  // Turns the first scores into numerators.
  __device__ void begin(float (&s)[kKeys / 8][4], float scale) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      base[row] = largest(s, row, -INFINITY);
      // Nothing but -inf: 0 in its place keeps NaN out.
      if (base[row] == -INFINITY) base[row] = 0.0f;
      sum[row] = 0.0f;
    }
    add(s, scale);
  }

  // The same with later ones; true, for the whole warp, where results so far have to shrink.
  __device__ bool step(float (&s)[kKeys / 8][4], float scale, float (&shrink)[2]) {
    constexpr float kAhead = 8.0f;
    const float most[2] = {largest(s, 0, base[0]), largest(s, 1, base[1])};
    const bool shrinks = __any_sync(
        ~0u, (most[0] - base[0]) * scale > kAhead || (most[1] - base[1]) * scale > kAhead);
    if (shrinks) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        shrink[row] = power((base[row] - most[row]) * scale);
        base[row] = most[row];
        sum[row] *= shrink[row];
      }
    }
    add(s, scale);
    return shrinks;
  }
};

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

// Zeros in place of a tile's values from row `left` on: what belongs to another segment may not be
// finite, and a weight of zero would not hide that.
__device__ inline void wipe(uint32_t values, int left, int thread) {
  constexpr int kPieces = kDim / 8;  // of 16 bytes
  for (int i = left * kPieces + thread; i < kKeys * kPieces; i += kGroupThreads) {
    const uint32_t at =
        values + i % kPieces / 2 * kKeyStep + i / kPieces * kColumnBytes + i % 2 * 16;
    asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(0) : "memory");
  }
  publish_shared();
}

template <class T>
__device__ inline void pack(uint32_t (&weights)[kKeys / 16][4],
                            const float (&scores)[kKeys / 8][4]) {
#pragma unroll
  for (int i = 0; i < kKeys / 16 * 4; ++i) {
    const float* const two = scores[i / 4 * 2 + i % 4 / 2] + i % 2 * 2;
    weights[i / 4][i % 4] = narrow<T>(two[0], two[1]);
  }
}

// Copies queries, keys and values of every item of a block.
template <class T>
__device__ inline void copy_items(const CUtensorMap& queries, const CUtensorMap& keys,
                                  const Attention<T>& p, const Places& at, int heads,
                                  int tile_count, int items) {
  int count = 0, turn = 0;  // tiles of keys and items so far
  for (int number = blockIdx.x; number < items; number += gridDim.x) {
    const Item item(p.tiles, tile_count, number);
    if (!item.tiles) continue;
    if (turn) barrier_wait(at.queries_empty, (turn - 1) & 1);
    ++turn;
    barrier_expect(at.queries_full, kGroups * kQueryBytes);
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      copy_box(at.queries + group * kQueryBytes, queries, 0, item.first_query + group * kGroupRows,
               item.head * kColumns, at.queries_full);
    }
    for (int tile = 0; tile < item.tiles; ++tile, ++count) {
      const int slot = count % kStages;
#pragma unroll
      for (int values = 0; values < 2; ++values) {
        if (count >= kStages) barrier_wait(at.empty(slot, values), (count / kStages - 1) & 1);
        barrier_expect(at.full(slot, values), kTileBytes);
        copy_box(at.tile(slot, values), keys, 0, item.first_key + tile * kKeys,
                 ((1 + values) * heads + item.head) * kColumns, at.full(slot, values));
      }
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads, 1)
    attend(const __grid_constant__ CUtensorMap query_map,
           const __grid_constant__ CUtensorMap key_map, const Attention<T> p, int heads,
           int tile_count, int items) {
  extern __shared__ uint8_t memory[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Places at(shared_address(memory));
  if (threadIdx.x == 0) {
    constexpr int kWarps = kGroups * kGroupThreads / 32;
    fetch_map(query_map);
    fetch_map(key_map);
    barrier_init(at.queries_full, 1);
    barrier_init(at.queries_empty, kWarps);
#pragma unroll
    for (int i = 0; i < 2 * kStages; ++i) {
      barrier_init(at.full(i / 2, i % 2), 1);
      barrier_init(at.empty(i / 2, i % 2), kWarps);
    }
    publish_barriers();
  }
  __syncthreads();

  if (warp < kGroupThreads / 32) {
    registers_down<kCopyRegisters>();
    if (threadIdx.x == 0) copy_items(query_map, key_map, p, at, heads, tile_count, items);
  } else {
    registers_up<kGroupRegisters>();
    const int group = threadIdx.x / kGroupThreads - 1, thread = threadIdx.x % kGroupThreads;
    // Named barriers; 0 is that of the whole block. A group's turn comes when the other one has
    // issued its products.
    const int my_turn = 1 + group, other_turn = 2 - group, meeting = 3 + group;
    if (group == 1) named_arrive<2 * kGroupThreads>(other_turn);
    int count = 0, turn = 0;
    for (int number = blockIdx.x; number < items; number += gridDim.x) {
      const Item item(p.tiles, tile_count, number);
      if (!item.tiles) continue;
      barrier_wait(at.queries_full, turn & 1);
      ++turn;
      uint32_t queries[kColumns][4];
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        const int row = warp % 4 * 16 + lane % 16, half = lane / 16 ^ (row / 4 & 1);
        load_matrices(queries[i], at.queries + group * kQueryBytes + i * kQueryStep +
                                      row * kColumnBytes + half * 16);
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(at.queries_empty);

      float result[kDim / 8][4] = {};
      float scores[kKeys / 8][4];
      uint32_t weights[kKeys / 16][4];
      LazySoftmax softmax;
      const auto slot = [&](int tile) { return (count + tile) % kStages; };
      const auto wait_full = [&](int tile, bool values) {
        barrier_wait(at.full(slot(tile), values), (count + tile) / kStages & 1);
      };
      const auto give_back = [&](int tile, bool values, bool now = true) {
        if (lane == 0 && now) barrier_arrive(at.empty(slot(tile), values));
      };
      const auto multiply_keys = [&](int tile) {
        const uint64_t keys = matrix(at.tile(slot(tile), false), 16);
        wgmma_begin();
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
          multiply_scores(scores, queries[i], keys + i * (kKeyStep >> 4), i > 0, T());
        }
        wgmma_commit();
      };
      const auto multiply_values = [&](int tile) {
        const uint64_t values = matrix(at.tile(slot(tile), true), kKeyStep);
        wgmma_begin();
#pragma unroll
        for (int i = 0; i < kKeys / 16; ++i) {
          multiply_result(result, weights[i], values + i * (2 * kAtomBytes >> 4), T());
        }
        wgmma_commit();
      };

      const int keys = item.end_key - item.first_key, last = item.tiles - 1;
      wait_full(0, false);
      multiply_keys(0);
      wgmma_wait<0>();
      give_back(0, false);
      hide(scores, keys, lane);
      softmax.begin(scores, p.scale);
      pack<T>(weights, scores);
      for (int tile = 1; tile <= last; ++tile) {
        wait_full(tile, false);
        named_wait<2 * kGroupThreads>(my_turn);
        multiply_keys(tile);
        wait_full(tile - 1, true);
        multiply_values(tile - 1);
        named_arrive<2 * kGroupThreads>(other_turn);
        wgmma_wait<1>();
        hide(scores, keys - tile * kKeys, lane);
        float shrink[2];
        const bool shrinks = softmax.step(scores, p.scale, shrink);
        // Sums are never negative. Left to itself the compiler waits for the result right after the
        // scores, and nothing overlaps: an arrival that depends on the sums keeps the wait behind them.
        give_back(tile, false, !(softmax.sum[0] + softmax.sum[1] < 0.0f));
        wgmma_wait<0>();
        give_back(tile - 1, true);
        if (shrinks) {
#pragma unroll
          for (int i = 0; i < kDim / 8 * 4; ++i) result[i / 4][i % 4] *= shrink[i % 4 / 2];
        }
        pack<T>(weights, scores);
      }
      wait_full(last, true);
      if (keys < item.tiles * kKeys) {
        wipe(at.tile(slot(last), true), keys - last * kKeys, thread);
        named_wait<kGroupThreads>(meeting);
      }
      multiply_values(last);
      wgmma_wait<0>();
      give_back(last, true);
      count += item.tiles;

      const float inverse[2] = {1.0f / quad_sum(softmax.sum[0]), 1.0f / quad_sum(softmax.sum[1])};
      const int query = item.first_query + group * kGroupRows + warp % 4 * 16 + lane / 4;
      T* const to = p.out + query * p.out_row + item.head * p.out_head + lane % 4 * 2;
#pragma unroll
      for (int i = 0; i < kDim / 8 * 2; ++i) {
        const float* const two = result[i / 2] + i % 2 * 2;
        if (query + i % 2 * 8 < item.end_query) {
          *reinterpret_cast<uint32_t*>(to + i % 2 * 8 * p.out_row + i / 2 * 8) =
              narrow<T>(two[0] * inverse[i % 2], two[1] * inverse[i % 2]);
        }
      }
    }
    // The other group's last arrival.
    if (group == 0) named_wait<2 * kGroupThreads>(my_turn);
  }
}

// Boxes of `box_rows` rows of one head's queries, keys or values.
bool describe_heads(CUtensorMap* map, int dtype, const void* qkv, int rows, int heads, int box_rows) {
  const auto size = [](int64_t x) { return static_cast<cuuint64_t>(x); };
  const cuuint64_t sizes[3] = {16, size(rows), size(3 * heads * kColumns)};
  const cuuint64_t strides[2] = {size(3 * heads * kDim * 2), kColumnBytes};
  const cuuint32_t box[3] = {16, static_cast<cuuint32_t>(box_rows), kColumns};
  return describe(map, dtype, qkv, sizes, strides, box, CU_TENSOR_MAP_SWIZZLE_32B);
}

template <class T>
int launch(int dtype, const void* args, int rows, int tiles, int heads, cudaStream_t stream) {
  const Attention<T>& p = *static_cast<const Attention<T>*>(args);
  CUtensorMap query_map, key_map;
  if (!describe_heads(&query_map, dtype, p.q, rows, heads, kGroupRows) ||
      !describe_heads(&key_map, dtype, p.q, rows, heads, kKeys)) {
    return cudaErrorInvalidValue;
  }
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
      query_map, key_map, p, heads, tiles, items);
  return cudaSuccess;
}

}  // namespace

bool wgmma_built() { return true; }

int launch_wgmma(int dtype, const void* args, int rows, int tiles, int heads, cudaStream_t stream) {
  return dtype == QWEN_VL_BF16 ? launch<__nv_bfloat16>(dtype, args, rows, tiles, heads, stream)
                               : launch<__half>(dtype, args, rows, tiles, heads, stream);
}

}  // namespace qwen_vl
