// uint8 patches times the folded patch embedding, on tensor cores of the sm_80 class.
//
// Patches stay bytes until they are in registers, where a byte becomes (byte - 128), exact in bf16 and
// fp16. Steps of 32 features run through a ring of kStages tiles (cp.async).
//
//     project   128 or 64 rows x 128 columns a block; bytes and weights both run through the ring
//     embed     64 rows a block, made from the frame, resident; the weights of all columns run by
//
// The order of features within a step is free, as long as both operands keep it. A lane of quad q
// takes the features 8q to 8q+7 of a row, one load of 8 bytes, and of a column of weights, one load of
// 16; each half of them is a product's k = 2q, 2q+1, 2q+8, 2q+9.
#ifndef QWEN_VL_CUDA_EMBED_CUH_
#define QWEN_VL_CUDA_EMBED_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <ptx.cuh>

#include "strip.cuh"

namespace qwen_vl {

constexpr int kEmbedThreads = 256;
constexpr int kStages = 6;
constexpr int kStep = QWEN_VL_FEATURES_STEP;
constexpr int kTileColumns = 128;
constexpr int kWeightTile = kTileColumns * kStep * 2;  // bytes

template <int kFeatures>
constexpr int kPaddedFeatures = (kFeatures + kStep - 1) / kStep * kStep;

static_assert(QWEN_VL_WIDTH_STEP % kTileColumns == 0, "weights are padded to whole tiles");

// Four bytes less 128 each, exact. fp16: 0x6400 | byte is 1024 + byte.
__device__ inline uint2 centred(uint32_t bytes, __half) {
  const uint32_t low = __byte_perm(bytes, 0x64646464, 0x4140);
  const uint32_t high = __byte_perm(bytes, 0x64646464, 0x4342);
  const __half2 offset = __half2half2(__ushort_as_half(0x6480));  // 1152
  const __half2 a = __hsub2(*reinterpret_cast<const __half2*>(&low), offset);
  const __half2 b = __hsub2(*reinterpret_cast<const __half2*>(&high), offset);
  return {*reinterpret_cast<const uint32_t*>(&a), *reinterpret_cast<const uint32_t*>(&b)};
}

// bf16 has 7 bits after the leading one: 0x4300 | (byte & 127) is 128 + (byte & 127), from which
// 256 is taken, or 128 where the byte's high bit is set (0x4380 and 0x4300 differ in that bit).
__device__ inline uint32_t centred_pair(uint32_t pair) {
  const uint32_t value = (pair & 0x007f007f) | 0x43004300;
  const uint32_t offset = (pair & 0x00800080) ^ 0x43804380;
  const __nv_bfloat162 r = __hsub2(*reinterpret_cast<const __nv_bfloat162*>(&value),
                                   *reinterpret_cast<const __nv_bfloat162*>(&offset));
  return *reinterpret_cast<const uint32_t*>(&r);
}
__device__ inline uint2 centred(uint32_t bytes, __nv_bfloat16) {
  return {centred_pair(__byte_perm(bytes, 0, 0x4140)), centred_pair(__byte_perm(bytes, 0, 0x4342))};
}

// Which unit stands at a place of the output.
struct Units {
  const int32_t* list;  // null: all, in order
  int count;

  __device__ int at(int i) const { return list ? list[i] : i; }
};

// Patches that are in memory already.
struct FromPatches {
  const uint8_t* patches;
};

// Patches that are made from the frame on the way; they never leave shared memory.
struct FromFrame {
  Picture picture;
  StripPlan plan;  // bytes 0: strips do not fit, unit after unit in chunks

  // Units from place `first` on, to rows of `pitch` bytes; a place beyond the last is left as it is.
  template <int kUnits>
  __device__ void make(const Units& units, int first, uint8_t* rows, int pitch,
                       uint8_t* space) const {
    const int count = min(kUnits, units.count - first);
    for (int slot = 0; slot < count;) {
      const int unit = units.at(first + slot);
      uint8_t* const to = rows + slot * 4 * pitch;
      int together = 1;
      if (plan.bytes) {
        if (slot + 1 < count && units.at(first + slot + 1) == unit + 1 &&
            (unit + 1) % picture.unit_columns) {
          together = kStrip;
        }
        resample_strip<kEmbedThreads>(picture, plan, unit, together, space, to, pitch);
      } else {
        resample_unit<kEmbedThreads>(picture, unit, space, [&](int word, uint32_t bytes) {
          *reinterpret_cast<uint32_t*>(to + word / (kUnitWords / 4) * pitch +
                                       word % (kUnitWords / 4) * 4) = bytes;
        });
      }
      slot += together;
      __syncthreads();
    }
  }
};

__device__ inline uint32_t two(float a, float b, __nv_bfloat16) {
  const __nv_bfloat162 v = __floats2bfloat162_rn(a, b);
  return *reinterpret_cast<const uint32_t*>(&v);
}
__device__ inline uint32_t two(float a, float b, __half) {
  const __half2 v = __floats2half2_rn(a, b);
  return *reinterpret_cast<const uint32_t*>(&v);
}

// Lane q of four gets the q-th word of each of them, in their order.
__device__ inline void transpose_quad(uint32_t (&w)[4], int q) {
  const bool odd = q & 1, upper = q & 2;
  const uint32_t a = __shfl_xor_sync(~0u, odd ? w[0] : w[1], 1);
  const uint32_t b = __shfl_xor_sync(~0u, odd ? w[2] : w[3], 1);
  if (odd) {
    w[0] = a;
    w[2] = b;
  } else {
    w[1] = a;
    w[3] = b;
  }
  const uint32_t c = __shfl_xor_sync(~0u, upper ? w[0] : w[2], 2);
  const uint32_t d = __shfl_xor_sync(~0u, upper ? w[1] : w[3], 2);
  if (upper) {
    w[0] = c;
    w[1] = d;
  } else {
    w[2] = c;
    w[3] = d;
  }
}

// Writes 8 columns of one row, whose values lie with four lanes two by two: v[j] are columns
// 8 * j + 2 * q and the next. 16-bit outputs are exchanged first, so that a lane writes 16 bytes.
template <class Out>
__device__ void write_row(const float2 (&v)[4], int q, Out* row, int column, int width) {
  if constexpr (sizeof(Out) == 4) {
    for (int j = 0; j < 4; ++j) {
      const int at = column + 8 * j + 2 * q;
      if (at < width) *reinterpret_cast<float2*>(row + at) = v[j];
    }
  } else {
    uint32_t w[4];
    for (int j = 0; j < 4; ++j) w[j] = two(v[j].x, v[j].y, Out());
    transpose_quad(w, q);
    const int at = column + 8 * q;
    if (at < width) *reinterpret_cast<uint4*>(row + at) = make_uint4(w[0], w[1], w[2], w[3]);
  }
}

// How a block's eight warps share its tile: kWarpRows rows x kWarpColumns columns each.
template <int kRows>
struct Warps {
  static constexpr int kDown = 2, kAcross = 8 / kDown;
  static constexpr int kWarpRows = kRows / kDown, kWarpColumns = kTileColumns / kAcross;
  static constexpr int kBlocks = kWarpRows / 16, kGroups = kWarpColumns / 8;
};

// One step of 32 features: the bytes of `left` (rows kRowPitch apart) times the weights of `right`.
// Both point to what this lane reads first.
template <class T, int kRows, int kRowPitch>
__device__ inline void multiply_step(const uint8_t* left, const uint8_t* right,
                                     float (&sums)[Warps<kRows>::kBlocks][Warps<kRows>::kGroups][4]) {
  using W = Warps<kRows>;
  uint2 bytes[W::kBlocks][2];
#pragma unroll
  for (int i = 0; i < W::kBlocks; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      bytes[i][h] = *reinterpret_cast<const uint2*>(left + (i * 16 + h * 8) * kRowPitch);
    }
  }
#pragma unroll
  for (int first = 0; first < W::kGroups; first += 4) {
    uint4 b[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      b[j] = *reinterpret_cast<const uint4*>(right + (first + j) * 8 * kStep * 2);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < W::kBlocks; ++i) {
        const uint2 upper = centred(half ? bytes[i][0].y : bytes[i][0].x, T());
        const uint2 lower = centred(half ? bytes[i][1].y : bytes[i][1].x, T());
        const uint32_t a[4] = {upper.x, lower.x, upper.y, lower.y};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          multiply(sums[i][first + j], a, half ? b[j].z : b[j].x, half ? b[j].w : b[j].y, T());
        }
      }
    }
  }
}

// Scale, bias, what is to be added, out. `row` and `column` are the warp's first.
template <class Out, int kRows>
__device__ inline void write_tile(
    const float (&sums)[Warps<kRows>::kBlocks][Warps<kRows>::kGroups][4], int row, int rows,
    int column, int width, float scale, const float* bias, const float* addend, Out* out) {
  using W = Warps<kRows>;
  const int lane = threadIdx.x % 32, q = lane % 4, g = lane / 4;
#pragma unroll
  for (int first = 0; first < W::kGroups; first += 4) {
    const int left = column + first * 8;
    float2 offset[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      offset[j] = bias ? *reinterpret_cast<const float2*>(bias + left + 8 * j + 2 * q)
                       : make_float2(0.0f, 0.0f);
    }
#pragma unroll
    for (int i = 0; i < W::kBlocks; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int at_row = row + i * 16 + h * 8 + g;
        const bool inside = at_row < rows;
        float2 v[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float(&sum)[4] = sums[i][first + j];
          v[j] = make_float2(sum[2 * h] * scale + offset[j].x, sum[2 * h + 1] * scale + offset[j].y);
          const int at = left + 8 * j + 2 * q;
          if (addend && inside && at < width) {
            const float2 more = *reinterpret_cast<const float2*>(
                addend + static_cast<int64_t>(at_row) * width + at);
            v[j].x += more.x;
            v[j].y += more.y;
          }
        }
        // All lanes take part in the exchange; those beyond the last row write nothing.
        write_row(v, q, out + static_cast<int64_t>(inside ? at_row : 0) * width, left,
                  inside ? width : 0);
      }
    }
  }
}

// Patches in memory to embeddings: a tile of kRows x kTileColumns a block. kSteps of 32 features
// arrive kTogether at a time, in a ring of kDeep places.
constexpr int kTogether = 2, kDeep = 3;

template <int kRows>
constexpr int kProjectBytes = kDeep * kTogether * (kWeightTile + kRows * kStep);

template <class T, class Out, int kFeatures, int kRows>
__global__ void __launch_bounds__(kEmbedThreads, 2)
    project(FromPatches source, Units units, const T* weights, const float* bias, float scale,
            const float* addend, Out* out, int width) {
  extern __shared__ __align__(128) uint8_t shared[];
  using W = Warps<kRows>;
  constexpr int kPadded = kPaddedFeatures<kFeatures>, kSteps = kPadded / kStep;
  constexpr int kTile = kWeightTile + kRows * kStep, kSlot = kTogether * kTile;
  constexpr int kFull = kSteps / kTogether, kLeft = kSteps % kTogether;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, q = lane % 4, g = lane / 4;
  const int warp_row = warp / W::kAcross * W::kWarpRows;
  const int warp_column = warp % W::kAcross * W::kWarpColumns;
  const int first_unit = blockIdx.x * (kRows / 4), column = blockIdx.y * kTileColumns;

  // What this thread brings in each step: four bytes of some patches, 16 of some columns' weights.
  // Beyond the last patch it is the last one's: nothing is written of them.
  constexpr int kCopies = kRows * kStep / 4 / kEmbedThreads;
  const uint8_t* from[kCopies];
#pragma unroll
  for (int j = 0; j < kCopies; ++j) {
    const int row = threadIdx.x / 8 + j * (kEmbedThreads / 8);
    const int place = min(first_unit + row / 4, units.count - 1);
    from[j] = source.patches + (static_cast<int64_t>(units.at(place)) * 4 + row % 4) * kFeatures +
              threadIdx.x % 8 * 4;
  }
  const T* weight = weights + static_cast<int64_t>(column + threadIdx.x / 4) * kPadded +
                    threadIdx.x % 4 * 8;
  const uint32_t first_slot = shared_address(shared) + threadIdx.x * 16;
  const uint32_t first_row_slot = shared_address(shared) + kWeightTile + threadIdx.x * 4;
  // The last step goes beyond a patch; weights there are 0, but memory may end.
  const bool in_last = threadIdx.x % 8 * 4 < kFeatures - (kSteps - 1) * kStep;
  int filled = 0;  // bytes from the ring's start to the place that is filled next
  const auto fetch = [&](int turn) {
#pragma unroll
    for (int t = 0; t < kTogether; ++t) {
      const int step = turn * kTogether + t;
      if (step >= kSteps) break;
      const uint32_t to = filled + t * kTile;
#pragma unroll
      for (int j = 0; j < kTileColumns * 4 / kEmbedThreads; ++j) {
        copy_async(first_slot + to + j * kEmbedThreads * 16,
                   weight + j * (kEmbedThreads / 4) * kPadded + t * kStep);
      }
      const bool there = step < kSteps - 1 || in_last;
#pragma unroll
      for (int j = 0; j < kCopies; ++j) {
        copy_async_word(first_row_slot + to + j * kEmbedThreads * 4,
                        there ? from[j] + t * kStep : source.patches, there);
      }
    }
#pragma unroll
    for (int j = 0; j < kCopies; ++j) from[j] += kTogether * kStep;
    weight += kTogether * kStep;
    filled = filled == (kDeep - 1) * kSlot ? 0 : filled + kSlot;
    commit_async();  // also an empty group: waiting counts groups
  };
  for (int turn = 0; turn < kDeep - 1; ++turn) fetch(turn);

  float sums[W::kBlocks][W::kGroups][4] = {};
  const uint8_t* const first_left = shared + kWeightTile + (warp_row + g) * kStep + q * 8;
  const uint8_t* const first_right = shared + (warp_column + g) * kStep * 2 + q * 16;
  int used = 0;
  const auto arrived = [&] {
    wait_async<kDeep - 2>();
    __syncthreads();  // for all, and all are done with the place that is filled next
  };
#pragma unroll 1
  for (int turn = 0; turn < kFull; ++turn) {
    arrived();
#pragma unroll
    for (int t = 0; t < kTogether; ++t) {
      multiply_step<T, kRows, kStep>(first_left + used + t * kTile, first_right + used + t * kTile,
                                     sums);
      if (t == 0) fetch(turn + kDeep - 1);
    }
    used = used == (kDeep - 1) * kSlot ? 0 : used + kSlot;
  }
  if constexpr (kLeft > 0) {
    arrived();
#pragma unroll
    for (int t = 0; t < kLeft; ++t) {
      multiply_step<T, kRows, kStep>(first_left + used + t * kTile, first_right + used + t * kTile,
                                     sums);
    }
  }
  wait_async<0>();
  write_tile<Out, kRows>(sums, first_unit * 4 + warp_row, units.count * 4, column + warp_column,
                         width, scale, bias, addend, out);
}

// A frame to embeddings: kRows patches a block, made once, times the weights of all its columns.
template <class T, class Out, int kRows>
__global__ void __launch_bounds__(kEmbedThreads, 2)
    embed(FromFrame source, Units units, const T* weights, const float* bias, float scale, Out* out,
          int width, int tiles_each) {
  extern __shared__ __align__(128) uint8_t shared[];
  using W = Warps<kRows>;
  constexpr int kPadded = kPaddedFeatures<QWEN_VL_FEATURES>, kSteps = kPadded / kStep;
  static_assert(kPadded / 32 % 4 == 3, "four rows must not share banks");
  uint8_t* const rows = shared;
  uint8_t* const ring = shared + kRows * kPadded;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, q = lane % 4, g = lane / 4;
  const int warp_row = warp / W::kAcross * W::kWarpRows;
  const int warp_column = warp % W::kAcross * W::kWarpColumns;
  const int first_unit = blockIdx.x * (kRows / 4);
  const int tiles = (width + kTileColumns - 1) / kTileColumns;
  const int first_tile = blockIdx.y * tiles_each;
  const int count = (min(first_tile + tiles_each, tiles) - first_tile) * kSteps;

  const T* const weight = weights +
                          static_cast<int64_t>(first_tile * kTileColumns + threadIdx.x / 4) * kPadded +
                          threadIdx.x % 4 * 8;
  const uint32_t first_slot = shared_address(ring) + threadIdx.x * 16;
  const auto fetch = [&](int step) {
    if (step < count) {
      const T* const from = weight + step / kSteps * (kTileColumns * kPadded) + step % kSteps * kStep;
#pragma unroll
      for (int j = 0; j < kTileColumns * 4 / kEmbedThreads; ++j) {
        copy_async(first_slot + step % kStages * kWeightTile + j * kEmbedThreads * 16,
                   from + j * (kEmbedThreads / 4) * kPadded);
      }
    }
    commit_async();
  };
  for (int s = 0; s < kStages - 1; ++s) fetch(s);

  // Bytes that no frame fills count 128, that is 0; from the last feature to kPadded weights are 0.
  for (int i = threadIdx.x; i < kRows * kPadded / 4; i += kEmbedThreads) {
    reinterpret_cast<uint32_t*>(rows)[i] = 0x80808080;
  }
  __syncthreads();
  source.make<kRows / 4>(units, first_unit, rows, kPadded, ring + kStages * kWeightTile);

  float sums[W::kBlocks][W::kGroups][4] = {};
  const uint8_t* const first_left = rows + (warp_row + g) * kPadded + q * 8;
  const uint8_t* const first_right = ring + (warp_column + g) * kStep * 2 + q * 16;
  for (int step = 0; step < count; ++step) {
    wait_async<kStages - 2>();
    __syncthreads();
    fetch(step + kStages - 1);
    const int k = step % kSteps;
    multiply_step<T, kRows, kPadded>(first_left + k * kStep,
                                     first_right + step % kStages * kWeightTile, sums);
    if (k != kSteps - 1) continue;
    write_tile<Out, kRows>(sums, first_unit * 4 + warp_row, units.count * 4,
                           (first_tile + step / kSteps) * kTileColumns + warp_column, width, scale,
                           bias, nullptr, out);
#pragma unroll
    for (auto& block : sums) {
#pragma unroll
      for (auto& group : block) {
#pragma unroll
        for (float& sum : group) sum = 0.0f;
      }
    }
  }
  wait_async<0>();
}

}  // namespace qwen_vl
#endif  // QWEN_VL_CUDA_EMBED_CUH_
