// Gated products of a prompt on Hopper's wgmma and copy engine: out = silu(x * gates^T) * (x * others^T),
// compiled for sm_90a. A prompt has few rows: what counts is that all of them meet a column of weights
// at once, and that the columns are shared out evenly over the device.
//
//     a block      stays, and takes tiles of 72 outputs (72 gates and 72 others): 125 for the 2B
//                  model's 8960, of 132 multiprocessors. A warpgroup copies; either three multiply 64
//                  rows each, or two 128
//     a cluster    two blocks with the same rows: each copies half of them to both
//     ring         four stages of 64 inputs; those of weights are on their way while the kernel before
//                  still writes the rows
#include "copy_engine.cuh"
#include "epilogue.cuh"
#include "launch.cuh"
#include "mma.cuh"
#include "prompt_sm90.h"
#include "wgmma_products.cuh"

namespace qwen_vl {
namespace {

constexpr int kSetRows = 64;  // of a product
constexpr int kOuts = 72, kColumns = 2 * kOuts, kTiles = kOuts / 8;
constexpr int kDepth = 64, kStages = 4, kCluster = 2;
constexpr int kRowBytes = kDepth * 2;
constexpr int kCopyRegisters = 24;

// kSets: products of a group side by side.
template <int kGroups_, int kSets_>
struct Shape {
  static constexpr int kSets = kSets_, kGroupRows = kSets * kSetRows;
  static constexpr int kRows = kGroups_ * kGroupRows;
  static constexpr int kConsumerWarps = 4 * kGroups_, kThreads = 128 * (1 + kGroups_);
  static constexpr int kGroupRegisters = kSets == 1 ? 152 : 240;
  static constexpr int kXBytes = kRows * kRowBytes, kStageBytes = kXBytes + kColumns * kRowBytes;
  static constexpr int kSharedBytes = kStages * (kStageBytes + 16) + 1024;
  static_assert(kXBytes % 1024 == 0 && kOuts * kRowBytes % 1024 == 0, "swizzled by 1024 bytes");
  static_assert(kSharedBytes <= 227 * 1024, "what a block may take");
};
using Few = Shape<3, 1>;
using Many = Shape<2, 2>;

#define QWEN_VL_R4(x, i) "+f"(x[i][0]), "+f"(x[i][1]), "+f"(x[i][2]), "+f"(x[i][3])

#define QWEN_VL_TILE_144(type)                                                                    \
  asm volatile(                                                                                   \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %74, 0;\n"                                                \
      "wgmma.mma_async.sync.aligned.m64n144k16.f32." type "." type " {"                           \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "               \
      "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "               \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, "               \
      "%47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "               \
      "%62, %63, %64, %65, %66, %67, %68, %69, %70, %71}, "                                       \
      "%72, %73, p, 1, 1, 0, 0;\n}"                                                               \
      : QWEN_VL_R4(c, 0), QWEN_VL_R4(c, 1), QWEN_VL_R4(c, 2), QWEN_VL_R4(c, 3),                   \
        QWEN_VL_R4(c, 4), QWEN_VL_R4(c, 5), QWEN_VL_R4(c, 6), QWEN_VL_R4(c, 7),                   \
        QWEN_VL_R4(c, 8), QWEN_VL_R4(c, 9), QWEN_VL_R4(c, 10), QWEN_VL_R4(c, 11),                 \
        QWEN_VL_R4(c, 12), QWEN_VL_R4(c, 13), QWEN_VL_R4(c, 14), QWEN_VL_R4(c, 15),               \
        QWEN_VL_R4(c, 16), QWEN_VL_R4(c, 17)                                                      \
      : "l"(a), "l"(b), "r"(static_cast<int>(add)))

// c[64x144] (+)= a[64x16] * b[144x16]^T, both in shared memory, K-major.
__device__ inline void multiply_tile(float (&c)[18][4], uint64_t a, uint64_t b, bool add,
                                     __nv_bfloat16) {
  QWEN_VL_TILE_144("bf16");
}
__device__ inline void multiply_tile(float (&c)[18][4], uint64_t a, uint64_t b, bool add, __half) {
  QWEN_VL_TILE_144("f16");
}

#undef QWEN_VL_TILE_144
#undef QWEN_VL_R4

// What a block works on: a cluster's number `item` of all tiles.
template <class S>
struct Item {
  int first_row, first_out;

  __device__ Item(int item, int pairs, uint32_t rank)
      : first_row(item / pairs * S::kRows),
        first_out((item % pairs * kCluster + static_cast<int>(rank)) * kOuts) {}
};

template <class T>
__device__ inline void write(const float (&sums)[18][4], T* out, int rows, int outs, int row,
                             int first_out, int lane) {
  uint32_t words[2][kTiles];
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    float c[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) c[k] = sums[i][k] * sigmoid<T>(sums[i][k]) * sums[i + kTiles][k];
    words[0][i] = narrow<T>(c[0], c[1]);
    words[1][i] = narrow<T>(c[2], c[3]);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const bool there = row + half * 8 < rows;
    T* const to = out + static_cast<int64_t>(row + half * 8) * outs;
#pragma unroll
    for (int i = 0; i + 4 <= kTiles; i += 4) {
      const uint32_t four[4] = {words[half][i], words[half][i + 1], words[half][i + 2],
                                words[half][i + 3]};
      const uint4 eight = gather_tile(four, lane);
      const int column = first_out + (i + lane % 4) * 8;
      if (there && column < outs) *reinterpret_cast<uint4*>(to + column) = eight;
    }
    static_assert(kTiles % 4 == 1, "one tile is left");
    const int column = first_out + (kTiles - 1) * 8 + lane % 4 * 2;
    if (there && column < outs) *reinterpret_cast<uint32_t*>(to + column) = words[half][kTiles - 1];
  }
}

// The stages, as a group sees them.
struct Ring {
  uint32_t x, weights, full, empty;

  __device__ void wait(int count) const {
    barrier_wait(full + count % kStages * 8, count / kStages & 1);
  }
  // Both blocks may copy into its place.
  __device__ void give_back(int count, int lane) const {
    if (lane < kCluster) barrier_arrive_at(empty + count % kStages * 8, lane);
  }
};

// Multiplies and writes a group's part of a tile; `count`: steps that came before.
template <class S, class T>
__device__ inline void multiply_sets(const Ring& ring, int steps, int count, T* out, int rows,
                                     int outs, int row, int first_out, int lane) {
  float sums[S::kSets][kColumns / 8][4];
  for (int step = 0; step < steps; ++step) {
    const int at = (count + step) % kStages * S::kStageBytes;
    ring.wait(count + step);
    const uint64_t x = swizzled_matrix(ring.x + at), weight = swizzled_matrix(ring.weights + at);
    wgmma_begin();
#pragma unroll
    for (int part = 0; part < kDepth / 16; ++part) {
#pragma unroll
      for (int set = 0; set < S::kSets; ++set) {
        multiply_tile(sums[set], x + set * (kSetRows * kRowBytes >> 4) + part * 2, weight + part * 2,
                      step + part > 0, T());
      }
    }
    wgmma_commit();
    // The step before is done.
    wgmma_wait<1>();
    if (step > 0) ring.give_back(count + step - 1, lane);
  }
  wgmma_wait<0>();
  ring.give_back(count + steps - 1, lane);
#pragma unroll
  for (int set = 0; set < S::kSets; ++set) {
    write(sums[set], out, rows, outs, row + set * kSetRows, first_out, lane);
  }
}

template <class T, class S>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(S::kThreads, 1)
    multiply_gated(const __grid_constant__ CUtensorMap x_map,
                   const __grid_constant__ CUtensorMap weight_map, T* out, int rows, int outs,
                   int ins) {
  extern __shared__ uint8_t memory[];
  const uint32_t ring_at = (shared_address(memory) + 1023) / 1024 * 1024;
  const uint32_t full_at = ring_at + kStages * S::kStageBytes, empty_at = full_at + kStages * 8;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t rank = cluster_rank();
  const int steps = ins / kDepth;
  const int pairs = (outs + kCluster * kOuts - 1) / (kCluster * kOuts);
  const int items = (rows + S::kRows - 1) / S::kRows * pairs, stride = gridDim.x / kCluster;
  if (threadIdx.x == 0) {
    fetch_map(x_map);
    fetch_map(weight_map);
#pragma unroll
    for (int i = 0; i < kStages; ++i) {
      barrier_init(full_at + i * 8, 1);
      barrier_init(empty_at + i * 8, kCluster * S::kConsumerWarps);
    }
    publish_barriers();
  }
  cluster_sync();

  if (warp < 4) {
    registers_down<kCopyRegisters>();
    // One lane copies; the others of its warp wait for it, so that all arrive at the end together.
    if (threadIdx.x == 0) {
      const int own = static_cast<int>(rank);
      const auto copy_weights = [&](const Item<S>& item, int step, int slot) {
        const uint32_t full = full_at + slot * 8;
        const uint32_t to = ring_at + slot * S::kStageBytes + S::kXBytes;
        barrier_expect(full, S::kStageBytes);
        copy_box(to, weight_map, step * kDepth, item.first_out, full);
        copy_box(to + kOuts * kRowBytes, weight_map, step * kDepth, outs + item.first_out, full);
      };
      const auto copy_rows = [&](const Item<S>& item, int step, int slot) {
        copy_box_to((1 << kCluster) - 1,
                    ring_at + slot * S::kStageBytes + own * (S::kXBytes / kCluster), x_map,
                    step * kDepth, item.first_row + own * (S::kRows / kCluster), full_at + slot * 8);
      };
      const Item<S> first(blockIdx.x / kCluster, pairs, rank);
      const int ahead = min(kStages, steps);
      for (int step = 0; step < ahead; ++step) copy_weights(first, step, step);
      begin_after_previous();
      for (int step = 0; step < ahead; ++step) copy_rows(first, step, step);
      int count = ahead, step = ahead;
      for (int number = blockIdx.x / kCluster; number < items; number += stride, step = 0) {
        const Item<S> item(number, pairs, rank);
        for (; step < steps; ++step, ++count) {
          const int slot = count % kStages;
          if (count >= kStages) barrier_wait(empty_at + slot * 8, (count / kStages - 1) & 1);
          copy_weights(item, step, slot);
          copy_rows(item, step, slot);
        }
      }
    }
    __syncwarp();
  } else {
    registers_up<S::kGroupRegisters>();
    begin_after_previous();
    const int group = warp / 4 - 1;
    const Ring ring = {ring_at + group * S::kGroupRows * kRowBytes, ring_at + S::kXBytes, full_at,
                       empty_at};
    int count = 0;
    for (int number = blockIdx.x / kCluster; number < items; number += stride) {
      const Item<S> item(number, pairs, rank);
      const int first_row = item.first_row + group * S::kGroupRows;
      const int row = first_row + warp % 4 * 16 + lane / 4;
      if (first_row < rows) {
        multiply_sets<S>(ring, steps, count, out, rows, outs, row, item.first_out, lane);
      } else {  // another block waits for this one
        for (int step = 0; step < steps; ++step) {
          ring.wait(count + step);
          ring.give_back(count + step, lane);
        }
      }
      count += steps;
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

template <class T, class S>
int launch(const qwen_vl_product& s, const void* x, const void* weight, void* out,
           cudaStream_t stream) {
  CUtensorMap x_map, weight_map;
  if (!describe_matrix(&x_map, s.dtype, x, s.rows, s.ins, S::kRows / kCluster) ||
      !describe_matrix(&weight_map, s.dtype, weight, 2 * s.outs, s.ins, kOuts)) {
    return cudaErrorInvalidValue;
  }
  const auto kernel = multiply_gated<T, S>;
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           S::kSharedBytes);
  int device, processors;
  if (!error) error = cudaGetDevice(&device);
  if (!error) error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (error) return error;
  const int items = (s.rows + S::kRows - 1) / S::kRows *
                    ((s.outs + kCluster * kOuts - 1) / (kCluster * kOuts));
  const int clusters = items < processors / kCluster ? items : processors / kCluster;
  return launch_early(kernel, kCluster * clusters, S::kThreads, S::kSharedBytes, stream, x_map,
                      weight_map, static_cast<T*>(out), s.rows, s.outs, s.ins);
}

}  // namespace

int launch_gated(const qwen_vl_product& s, const void* x, const void* weight, void* out,
                 cudaStream_t stream) {
  const auto run = [&](auto type) {
    using T = decltype(type);
    // A tile takes as long as it has rows, whether they are there or not.
    const auto rows = [&](int tile) { return (s.rows + tile - 1) / tile * tile; };
    return rows(Few::kRows) < rows(Many::kRows) ? launch<T, Few>(s, x, weight, out, stream)
                                                : launch<T, Many>(s, x, weight, out, stream);
  };
  return s.dtype == QWEN_VL_BF16 ? run(__nv_bfloat16()) : run(__half());
}

}  // namespace qwen_vl
