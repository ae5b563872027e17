// Products with an activation or a rotation in the epilogue, on Hopper's wgmma and copy engine;
// compiled for sm_90a. cuBLASLt has no such epilogue, so that its result would be read and written
// once more.
//
//     a block      stays, and takes tiles of 128 rows x 256 or 208 outputs (2 x 96 of gates and what
//                  they let through; two or three heads of 80); a warpgroup copies, also for the next
//                  tile, two multiply 64 rows each
//     a head       lies in one thread's sums as far as its rows reach: channel c, and c + 40, which
//                  it turns with
//     a cluster    two blocks with the same rows: each copies half of them to both
//     ring         four stages of 64 inputs
#include "copy_engine.cuh"
#include "epilogue.cuh"
#include "hopper.h"
#include "launch.cuh"
#include "mma.cuh"
#include "status.h"
#include "vector.cuh"
#include "wgmma_products.cuh"

namespace qwen_vl {
namespace {

constexpr int kRows = 128, kDepth = 64, kStages = 4, kCluster = 2;
constexpr int kThreads = 384, kConsumerWarps = 8;
constexpr int kRowBytes = kDepth * 2;

constexpr int kHeadDim = 80;

// What becomes of the sums. kGated: half of a tile's columns are gates, the others what they let
// through.
enum class End { kQuickGelu, kGated, kRotated };

template <End kEnd_, int kColumns_>
struct Tile {
  static constexpr End kEnd = kEnd_;
  static constexpr bool kGated = kEnd == End::kGated;
  static constexpr int kColumns = kColumns_;
  static constexpr int kOuts = kGated ? kColumns / 2 : kColumns;  // columns of the result
  static constexpr int kXBytes = kRows * kRowBytes;
  static constexpr int kStageBytes = kXBytes + kColumns * kRowBytes;
  // Biases of both groups, for this tile and the next.
  static constexpr int kBiasBytes = 2 * 2 * kColumns * 2;
  static constexpr int kSharedBytes = kStages * (kStageBytes + 16) + kBiasBytes + 1024;
};

template <class T>
struct Args {
  const T* bias;  // null: none
  T* out;
  int rows, outs, ins;
  const int2* spots;    // where rows stand
  const float2* turns;  // [position][kHeadDim / 4], cosine and sine
};

// Adds biases; `bias` holds two columns of each of the tile's fours of lanes.
template <class T, int kTiles>
__device__ inline void add_bias(float (&sums)[kTiles][4], const uint32_t* bias, int lane) {
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    const uint32_t raw = bias[i * 4 + lane % 4];
    const float2 two = widen(*reinterpret_cast<const typename Pair<T>::type*>(&raw));
#pragma unroll
    for (int k = 0; k < 4; ++k) sums[i][k] += k % 2 ? two.y : two.x;
  }
}

// Rotates the heads of a tile from number `first` on, those before `end` of all, as rotary.cu does:
// the first half of a head's turning channels goes with the row's first coordinate.
template <class T, int kTiles>
__device__ inline void rotate(float (&sums)[kTiles][4], const Args<T>& p, int row, int first, int end,
                              int lane) {
  constexpr int kHeads = kTiles * 8 / kHeadDim;
  constexpr int kHalf = kHeadDim / 2 / 8, kQuarter = kHeadDim / 4;  // tiles, channels
  if (first >= end) return;
#pragma unroll
  for (int side = 0; side < 2; ++side) {
    const int2 spot = row + side * 8 < p.rows ? p.spots[row + side * 8] : int2{0, 0};
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const int channel = i * 8 + lane % 4 * 2;
      const float2* const at = p.turns + (channel < kQuarter ? spot.x * kQuarter + channel
                                                             : spot.y * kQuarter + channel - kQuarter);
      // Cosine and sine of this channel and of the next.
      const float4 both = *reinterpret_cast<const float4*>(at);
#pragma unroll
      for (int head = 0; head < kHeads; ++head) {
        if (first + head >= end) break;
        float* const low = sums[head * 2 * kHalf + i] + side * 2;
        float* const high = sums[head * 2 * kHalf + kHalf + i] + side * 2;
        const float a = low[0], b = high[0], c = low[1], d = high[1];
        low[0] = a * both.x - b * both.y;
        high[0] = b * both.x + a * both.y;
        low[1] = c * both.z - d * both.w;
        high[1] = d * both.z + c * both.w;
      }
    }
  }
}

template <class T, class S>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    multiply_and(const __grid_constant__ CUtensorMap x_map,
                      const __grid_constant__ CUtensorMap weight_map, const Args<T> p) {
  extern __shared__ uint8_t memory[];
  const uint32_t ring_at = (shared_address(memory) + 1023) / 1024 * 1024;
  const uint32_t full_at = ring_at + kStages * S::kStageBytes, empty_at = full_at + kStages * 8;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t rank = cluster_rank();
  const int steps = p.ins / kDepth;
  const int row_tiles = (p.rows + kRows - 1) / kRows;
  const int column_pairs = (p.outs + kCluster * S::kOuts - 1) / (kCluster * S::kOuts);
  const int pairs = row_tiles * column_pairs, stride = gridDim.x / kCluster;
  if (threadIdx.x == 0) {
#pragma unroll
    for (int i = 0; i < kStages; ++i) {
      barrier_init(full_at + i * 8, 1);
      barrier_init(empty_at + i * 8, kCluster * kConsumerWarps);
    }
    publish_barriers();
  }
  cluster_sync();
  begin_after_previous();

  if (warp < 4) {
    // One lane copies; the others of its warp wait for it, so that all arrive at the end together.
    if (threadIdx.x == 0) {
      int count = 0;
      for (int pair = blockIdx.x / kCluster; pair < pairs; pair += stride) {
        const int first_row = pair % row_tiles * kRows;
        const int first_out = (pair / row_tiles * kCluster + static_cast<int>(rank)) * S::kOuts;
        for (int step = 0; step < steps; ++step, ++count) {
          const int slot = count % kStages;
          const uint32_t full = full_at + slot * 8, at = ring_at + slot * S::kStageBytes;
          if (count >= kStages) barrier_wait(empty_at + slot * 8, (count / kStages - 1) & 1);
          barrier_expect(full, S::kStageBytes);
          copy_box_to((1 << kCluster) - 1, at + rank * (S::kXBytes / kCluster), x_map,
                      step * kDepth, first_row + static_cast<int>(rank) * (kRows / kCluster), full);
          const uint32_t weights_at = at + S::kXBytes;
          copy_box(weights_at, weight_map, step * kDepth, first_out, full);
          if (S::kGated) {
            copy_box(weights_at + S::kOuts * kRowBytes, weight_map, step * kDepth,
                     p.outs + first_out, full);
          }
        }
      }
    }
    __syncwarp();
  } else {
    const int group = warp / 4 - 1;
    uint8_t* const biases = memory + (empty_at + kStages * 8 - shared_address(memory)) +
                            group * 2 * S::kColumns * 2;
    int count = 0, turn = 0;
    for (int pair = blockIdx.x / kCluster; pair < pairs; pair += stride, turn ^= 1) {
      const int first_row = pair % row_tiles * kRows;
      const int first_out = (pair / row_tiles * kCluster + static_cast<int>(rank)) * S::kOuts;
      uint32_t* const bias = reinterpret_cast<uint32_t*>(biases + turn * S::kColumns * 2);
      if (!S::kGated) {
        const int place = threadIdx.x % 128, column = first_out + 2 * place;
        uint32_t two = 0;
        if (p.bias && 2 * place < S::kOuts && column < p.outs) {
          two = *reinterpret_cast<const uint32_t*>(p.bias + column);
        }
        if (2 * place < S::kOuts) bias[place] = two;
      }
      float sums[S::kColumns / 8][4];
      for (int step = 0; step < steps; ++step, ++count) {
        const int slot = count % kStages;
        const uint32_t at = ring_at + slot * S::kStageBytes;
        barrier_wait(full_at + slot * 8, count / kStages & 1);
        const uint64_t x = swizzled_matrix(at + group * 64 * kRowBytes);
        const uint64_t weight = swizzled_matrix(at + S::kXBytes);
        wgmma_begin();
#pragma unroll
        for (int part = 0; part < kDepth / 16; ++part) {
          multiply_tile(sums, x + part * 2, weight + part * 2, step + part > 0, T());
        }
        wgmma_commit();
        // The step before is done: both blocks may copy into its place.
        wgmma_wait<1>();
        if (step > 0 && lane < kCluster) {
          barrier_arrive_at(empty_at + (count - 1) % kStages * 8, lane);
        }
      }
      wgmma_wait<0>();
      if (lane < kCluster) barrier_arrive_at(empty_at + (count - 1) % kStages * 8, lane);
      // The group's biases are there.
      if (!S::kGated) named_wait<128>(1 + group);

      const int row = first_row + group * 64 + warp % 4 * 16 + lane / 4;
      constexpr int kTiles = S::kOuts / 8;
      if constexpr (!S::kGated) add_bias<T>(sums, bias, lane);
      if constexpr (S::kEnd == End::kRotated) {
        // Queries and keys are two thirds of all heads.
        rotate(sums, p, row, first_out / kHeadDim, p.outs / kHeadDim / 3 * 2, lane);
      }
#pragma unroll
      for (int four = 0; four < kTiles; four += 4) {
        // The last four may have tiles of those before: they are written twice.
        const int i = four < kTiles - 4 ? four : kTiles - 4;
        uint32_t words[2][4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          float c[4];
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            c[k] = sums[i + j][k];
            if (S::kGated) c[k] *= sigmoid<T>(c[k]) * sums[(i + j + kTiles) % (S::kColumns / 8)][k];
            if (S::kEnd == End::kQuickGelu) c[k] *= sigmoid<T>(1.702f * c[k]);
          }
          words[0][j] = narrow<T>(c[0], c[1]);
          words[1][j] = narrow<T>(c[2], c[3]);
        }
        const int column = first_out + (i + lane % 4) * 8;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint4 eight = gather_tile(words[half], lane);
          if (row + half * 8 < p.rows && column < p.outs) {
            *reinterpret_cast<uint4*>(p.out + static_cast<int64_t>(row + half * 8) * p.outs +
                                      column) = eight;
          }
        }
      }
    }
  }
  // A block's shared memory has to outlive what the other one still sends there.
  cluster_sync();
}

bool describe_matrix(CUtensorMap* map, int dtype, const void* data, int rows, int ins,
                     int box_rows) {
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(ins), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(ins) * 2};
  const cuuint32_t box[2] = {kDepth, static_cast<cuuint32_t>(box_rows)};
  return describe(map, dtype, data, sizes, strides, box, CU_TENSOR_MAP_SWIZZLE_128B);
}

int clusters() {
  int device, processors;
  const bool known =
      !cudaGetDevice(&device) &&
      !cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  return known && processors >= kCluster ? processors / kCluster : 1;
}

// Pairs of tiles of a product, each of which is a cluster's.
int pairs(const qwen_vl_product& s, int outs) {
  return (s.rows + kRows - 1) / kRows * ((s.outs + kCluster * outs - 1) / (kCluster * outs));
}

// Columns of tiles of so many outputs that the busiest cluster computes.
int most(const qwen_vl_product& s, int outs) {
  const int all = clusters();
  return (pairs(s, outs) + all - 1) / all * outs;
}

template <class T, class S>
int launch(const qwen_vl_product& s, const void* x, const void* weight, const Args<T>& args,
           cudaStream_t stream) {
  CUtensorMap x_map, weight_map;
  const int weights = S::kGated ? 2 * s.outs : s.outs;
  if (!describe_matrix(&x_map, s.dtype, x, s.rows, s.ins, kRows / kCluster) ||
      !describe_matrix(&weight_map, s.dtype, weight, weights, s.ins, S::kOuts)) {
    return cudaErrorInvalidValue;
  }
  const auto kernel = multiply_and<T, S>;
  const cudaError_t error = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, S::kSharedBytes);
  if (error) return error;
  const int wanted = pairs(s, S::kOuts), all = clusters();
  return launch_early(kernel, kCluster * (wanted < all ? wanted : all), kThreads, S::kSharedBytes,
                      stream, x_map, weight_map, args);
}

// A narrower tile where it leaves the busiest cluster a tenth less to do: it copies more for its work.
template <class T, End kEnd, int kWide, int kNarrow>
int launch_fitting(const qwen_vl_product& s, const void* x, const void* weight, const Args<T>& args,
                   cudaStream_t stream) {
  if (10 * most(s, kNarrow) <= 9 * most(s, kWide)) {
    return launch<T, Tile<kEnd, kNarrow>>(s, x, weight, args, stream);
  }
  return launch<T, Tile<kEnd, kWide>>(s, x, weight, args, stream);
}

template <class T>
Args<T> arguments(const qwen_vl_product& s, const void* bias, void* out) {
  return {static_cast<const T*>(bias), static_cast<T*>(out), s.rows, s.outs, s.ins, nullptr, nullptr};
}

}  // namespace

int launch_activated(const qwen_vl_product& s, bool gated, const void* x, const void* weight,
                     const void* bias, void* out, cudaStream_t stream) {
  const auto run = [&](auto type) {
    using T = decltype(type);
    const Args<T> args = arguments<T>(s, bias, out);
    return gated ? launch<T, Tile<End::kGated, 192>>(s, x, weight, args, stream)
                 : launch_fitting<T, End::kQuickGelu, 256, 208>(s, x, weight, args, stream);
  };
  return s.dtype == QWEN_VL_BF16 ? run(__nv_bfloat16()) : run(__half());
}

int launch_rotated(const qwen_vl_product& s, const void* x, const void* weight, const void* bias,
                   const int32_t* spots, const float* turns, void* out, cudaStream_t stream) {
  const auto run = [&](auto type) {
    using T = decltype(type);
    Args<T> args = arguments<T>(s, bias, out);
    args.spots = reinterpret_cast<const int2*>(spots);
    args.turns = reinterpret_cast<const float2*>(turns);
    return launch_fitting<T, End::kRotated, 3 * kHeadDim, 2 * kHeadDim>(s, x, weight, args, stream);
  };
  return s.dtype == QWEN_VL_BF16 ? run(__nv_bfloat16()) : run(__half());
}

}  // namespace qwen_vl
