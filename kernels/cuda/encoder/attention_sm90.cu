// Attention within segments on Hopper's wgmma and copy engine, for heads of 80 channels; compiled for
// sm_90a.
//
//     a block      stays, and takes its share of all steps (attention_share.cuh): a thread copies,
//                  three warpgroups have 64 queries of one head each
//     a step       the scores of the next 112 keys and the result of the last ones are in the tensor
//                  cores together; the softmax of the next runs meanwhile, and also while the other
//                  warpgroups' products do, since they take turns (FlashAttention-3, Shah et al. 2024)
//     a product    scores m64n112k16 in 5 steps, result m64n80k16 in 7: 80 channels cost 80
//     ring         four tiles of keys and four of values, each copied as one box of five columns of
//                  16 channels. A box may reach beyond its segment: such keys are hidden
#include "attention.cuh"
#include "attention_share.cuh"
#include "copy_engine.cuh"
#include "hopper.h"
#include "launch.cuh"
#include "lazy_softmax.cuh"
#include "ptx.cuh"
#include "wgmma.cuh"

namespace qwen_vl {
namespace {

constexpr int kDim = 80, kColumns = kDim / 16;
constexpr int kGroups = 3, kGroupRows = 64, kGroupThreads = 128, kKeys = 112;
constexpr int kThreads = (1 + kGroups) * kGroupThreads;
constexpr int kCopyRegisters = 32, kGroupRegisters = 160;
constexpr int kStages = 4;
constexpr int kQueryStep = kGroupRows * kColumnBytes, kKeyStep = kKeys * kColumnBytes;
constexpr int kQueryBytes = kColumns * kQueryStep, kTileBytes = kColumns * kKeyStep;
constexpr int kBarriers = 2 + 4 * kStages;
constexpr int kAlignment = 1024;
constexpr int kSharedBytes =
    kGroups * kQueryBytes + kStages * 2 * kTileBytes + kBarriers * 8 + kAlignment;
static_assert(kSharedBytes <= 227 * 1024, "what a block may take");

// A thread's results, and what its two rows are held against and sum up to.
constexpr int kLeft = kDim / 8 * 4 + 4;
using Work = Share<kGroups * kGroupRows, kKeys>;
using Others = Exchange<kLeft, kGroupThreads, kGroups>;
using RunningSoftmax = LazySoftmax<kKeys / 8>;

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

// Adds the results of the blocks after this one, which have the other steps of a part's queries.
__device__ inline void add_others(float (&result)[kDim / 8][4], RunningSoftmax& softmax, float scale,
                                  const Part& part, const Work& share,
                                  const Others& others) {
  int missing = part.steps - part.end_step;
  for (int block = blockIdx.x + 1; missing > 0; ++block) {
    float theirs[kLeft];
    others.take(block, theirs);
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float base = theirs[kLeft - 4 + row], largest = fmaxf(softmax.base[row], base);
      const float mine = RunningSoftmax::power((softmax.base[row] - largest) * scale);
      const float other = RunningSoftmax::power((base - largest) * scale);
#pragma unroll
      for (int i = 0; i < kDim / 8 * 2; ++i) {
        float& to = result[i / 2][2 * row + i % 2];
        to = to * mine + theirs[i / 2 * 4 + 2 * row + i % 2] * other;
      }
      softmax.sum[row] = softmax.sum[row] * mine + theirs[kLeft - 2 + row] * other;
      softmax.base[row] = largest;
    }
    missing -= share.size(block);
  }
}

// Copies queries, keys and values of every part of a block's share.
__device__ inline void copy_parts(const CUtensorMap& queries, const CUtensorMap& keys,
                                  Work& share, const Places& at, int heads) {
  int count = 0, turn = 0;  // tiles of keys and parts so far
  for (Part part; share.next(&part); ++turn) {
    if (turn) barrier_wait(at.queries_empty, (turn - 1) & 1);
    barrier_expect(at.queries_full, kGroups * kQueryBytes);
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      copy_box(at.queries + group * kQueryBytes, queries, 0, part.first_query + group * kGroupRows,
               part.head * kColumns, at.queries_full);
    }
    for (int step = part.first_step; step < part.end_step; ++step, ++count) {
      const int slot = count % kStages;
#pragma unroll
      for (int values = 0; values < 2; ++values) {
        if (count >= kStages) barrier_wait(at.empty(slot, values), (count / kStages - 1) & 1);
        barrier_expect(at.full(slot, values), kTileBytes);
        copy_box(at.tile(slot, values), keys, 0, part.first_key + step * kKeys,
                 ((1 + values) * heads + part.head) * kColumns, at.full(slot, values));
      }
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads, 1)
    attend(const __grid_constant__ CUtensorMap query_map,
           const __grid_constant__ CUtensorMap key_map, const Attention<T> p, int heads,
           int tile_count, int least, void* workspace) {
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
  // The list does not wait for the kernel before: it is older.
  Work share(p.tiles, tile_count, heads, least, lane);
  begin_after_previous();

  if (warp < kGroupThreads / 32) {
    registers_down<kCopyRegisters>();
    if (threadIdx.x == 0) copy_parts(query_map, key_map, share, at, heads);
  } else {
    registers_up<kGroupRegisters>();
    const int group = threadIdx.x / kGroupThreads - 1, thread = threadIdx.x % kGroupThreads;
    // Named barriers; 0 is that of the whole block. A group's turn comes when the one before has
    // issued its products.
    const int my_turn = 1 + group, next_turn = 1 + (group + 1) % kGroups;
    const int meeting = 1 + kGroups + group;
    const Others others(workspace, group, thread, meeting);
    if (group == kGroups - 1) named_arrive<2 * kGroupThreads>(next_turn);
    int count = 0, turn = 0;
    for (Part part; share.next(&part); ++turn) {
      barrier_wait(at.queries_full, turn & 1);
      float result[kDim / 8][4] = {};
      float scores[kKeys / 8][4];
      uint32_t weights[kKeys / 16][4];
      RunningSoftmax softmax;
      const auto slot = [&](int tile) { return (count + tile) % kStages; };
      const auto wait_full = [&](int tile, bool values) {
        barrier_wait(at.full(slot(tile), values), (count + tile) / kStages & 1);
      };
      const auto give_back = [&](int tile, bool values, bool now = true) {
        if (lane == 0 && now) barrier_arrive(at.empty(slot(tile), values));
      };
      const auto multiply_keys = [&](int tile) {
        const uint64_t keys = matrix(at.tile(slot(tile), false), kKeyStep);
        const uint64_t queries = matrix(at.queries + group * kQueryBytes, kQueryStep);
        wgmma_begin();
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
          multiply_scores(scores, queries + i * (kQueryStep >> 4), keys + i * (kKeyStep >> 4), i > 0,
                          T());
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

      // Keys and tiles of keys of the part.
      const int keys = part.end_key - part.first_key - part.first_step * kKeys;
      const int last = part.end_step - part.first_step - 1;
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
        named_arrive<2 * kGroupThreads>(next_turn);
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
      __syncwarp();
      if (lane == 0) barrier_arrive(at.queries_empty);
      wait_full(last, true);
      if (keys < (last + 1) * kKeys) {
        wipe(at.tile(slot(last), true), keys - last * kKeys, thread);
        named_wait<kGroupThreads>(meeting);
      }
      multiply_values(last);
      wgmma_wait<0>();
      give_back(last, true);
      count += last + 1;

      if (!part.begins()) {
        float mine[kLeft];
#pragma unroll
        for (int i = 0; i < kLeft - 4; ++i) mine[i] = result[i / 4][i % 4];
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          mine[kLeft - 4 + row] = softmax.base[row];
          mine[kLeft - 2 + row] = softmax.sum[row];
        }
        others.leave(mine);
        continue;
      }
      if (!part.ends()) add_others(result, softmax, p.scale, part, share, others);

      const float inverse[2] = {1.0f / quad_sum(softmax.sum[0]), 1.0f / quad_sum(softmax.sum[1])};
      const int query = part.first_query + group * kGroupRows + warp % 4 * 16 + lane / 4;
      T* const to = p.out + query * p.out_row + part.head * p.out_head + lane % 4 * 2;
#pragma unroll
      for (int i = 0; i < kDim / 8 * 2; ++i) {
        const float* const two = result[i / 2] + i % 2 * 2;
        if (query + i % 2 * 8 < part.end_query) {
          *reinterpret_cast<uint32_t*>(to + i % 2 * 8 * p.out_row + i / 2 * 8) =
              narrow<T>(two[0] * inverse[i % 2], two[1] * inverse[i % 2]);
        }
      }
    }
    // The last group's last arrival.
    if (group == 0) named_wait<2 * kGroupThreads>(my_turn);
  }
}

int processors() {
  int device, count;
  const bool known = !cudaGetDevice(&device) &&
                     !cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  return known ? count : 1;
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
int launch(int dtype, const void* args, int rows, int tiles, int heads, int least, void* workspace,
           cudaStream_t stream) {
  const Attention<T>& p = *static_cast<const Attention<T>*>(args);
  CUtensorMap query_map, key_map;
  if (!describe_heads(&query_map, dtype, p.q, rows, heads, kGroupRows) ||
      !describe_heads(&key_map, dtype, p.q, rows, heads, kKeys)) {
    return cudaErrorInvalidValue;
  }
  const cudaError_t error = cudaFuncSetAttribute(
      attend<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error) return error;
  return launch_early(attend<T>, processors(), kThreads, kSharedBytes, stream, query_map, key_map, p,
                      heads, tiles, least, workspace);
}

}  // namespace

bool wgmma_built() { return true; }

size_t wgmma_workspace() { return Others::bytes(processors()); }

int launch_wgmma(int dtype, const void* args, int rows, int tiles, int heads, int least,
                 void* workspace, cudaStream_t stream) {
  const auto go = dtype == QWEN_VL_BF16 ? launch<__nv_bfloat16> : launch<__half>;
  return go(dtype, args, rows, tiles, heads, least, workspace, stream);
}

}  // namespace qwen_vl
