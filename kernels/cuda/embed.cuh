// uint8 patches times the folded patch embedding, on tensor cores of the sm_80 class.
//
// A block keeps kBlockRows patches in shared memory, as (byte - 128) in the weights' dtype: exact
// in bf16 and fp16. The weights run through a ring of kStages tiles of 32 features (cp.async), all
// columns of the block's share one after the other, so that a patch is read, or made, once.
//
//     shared memory    patches   kBlockRows x (padded features * 2 + 16) bytes
//                      weights   kStages x kBlockColumns x 64 bytes, 16-byte chunks swizzled
//     a warp           32 rows x 32 columns: 2 x 4 products m16n8k16
#ifndef QWEN_VL_CUDA_EMBED_CUH_
#define QWEN_VL_CUDA_EMBED_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <ptx.cuh>

#include "resample.cuh"

namespace qwen_vl {

constexpr int kEmbedThreads = 256;
constexpr int kStages = 4;
constexpr int kStepFeatures = QWEN_VL_FEATURES_STEP;

// Shapes for stills (588 features) and for pairs of frames (1176). With twice the features half the
// patches fit into an Orin's 163 KB.
template <int kFeatures_>
struct Shape {
  static constexpr int kFeatures = kFeatures_;
  static constexpr int kBlockRows = kFeatures == QWEN_VL_FEATURES ? 64 : 32;
  static constexpr int kBlockColumns = kFeatures == QWEN_VL_FEATURES ? 128 : 256;
  static constexpr int kWarpRows = kBlockRows / 32;
  static constexpr int kWarpColumns = kBlockColumns / 32;
  static constexpr int kPadded = (kFeatures + kStepFeatures - 1) / kStepFeatures * kStepFeatures;
  static constexpr int kSteps = kPadded / kStepFeatures;
  // An odd number of 16-byte chunks: eight rows of a matrix lie in eight different bank groups.
  static constexpr int kRowBytes = kPadded * 2 + 16;
  static constexpr int kPatchBytes = kBlockRows * kRowBytes;
  static constexpr int kTileBytes = kBlockColumns * kStepFeatures * 2;
  static constexpr int kSharedBytes = kPatchBytes + kStages * kTileBytes;
  static_assert(kWarpRows * kWarpColumns * 32 == kEmbedThreads, "eight warps of 32x32");
  static_assert(QWEN_VL_WIDTH_STEP % kBlockColumns == 0, "weights are padded to whole tiles");
  static_assert(kRowBytes / 16 % 2 == 1, "rows of patches must not share banks");
  static_assert(kSharedBytes <= 163 * 1024, "what a block may take on sm_87");
};

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
  static constexpr bool kTakesWeightSpace = false;

  template <class S, class T>
  __device__ void load(const Units& units, int first_unit, uint8_t* rows, uint8_t*) const {
    constexpr int kWords = S::kFeatures / 4;
    for (int i = threadIdx.x; i < S::kBlockRows * kWords; i += kEmbedThreads) {
      const int row = i / kWords, word = i % kWords, place = first_unit + row / 4;
      uint2 value = {0, 0};
      if (place < units.count) {
        const int64_t patch = static_cast<int64_t>(units.at(place)) * 4 + row % 4;
        value = centred(__ldg(reinterpret_cast<const uint32_t*>(patches + patch * S::kFeatures) + word),
                        T());
      }
      *reinterpret_cast<uint2*>(rows + row * S::kRowBytes + word * 8) = value;
    }
  }
};

// Patches that are made from the frame on the way; they never leave shared memory.
struct FromFrame {
  Picture picture;
  static constexpr bool kTakesWeightSpace = true;

  template <class S, class T>
  __device__ void load(const Units& units, int first_unit, uint8_t* rows, uint8_t* space) const {
    static_assert(kStages * S::kTileBytes >= kResampleBytes, "resampling borrows the weights' ring");
    for (int slot = 0; slot < S::kBlockRows / 4; ++slot) {
      uint8_t* const to = rows + slot * 4 * S::kRowBytes;
      if (first_unit + slot >= units.count) {
        for (int i = threadIdx.x; i < kUnitWords; i += kEmbedThreads) {
          *reinterpret_cast<uint2*>(to + i / (kUnitWords / 4) * S::kRowBytes +
                                    i % (kUnitWords / 4) * 8) = {0, 0};
        }
        continue;
      }
      resample_unit<kEmbedThreads>(
          picture, units.at(first_unit + slot), space, [&](int word, uint32_t bytes) {
            *reinterpret_cast<uint2*>(to + word / (kUnitWords / 4) * S::kRowBytes +
                                      word % (kUnitWords / 4) * 8) = centred(bytes, T());
          });
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

template <class T, class Out, class S, class Source>
__global__ void __launch_bounds__(kEmbedThreads, 2)
    embed(Source source, Units units, const T* weights, const float* bias, const float* addend,
          Out* out, int width, int tiles_each) {
  extern __shared__ __align__(128) uint8_t shared[];
  uint8_t* const rows = shared;
  uint8_t* const ring = shared + S::kPatchBytes;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warp_row = warp / S::kWarpColumns * 32, warp_column = warp % S::kWarpColumns * 32;
  const int first_unit = blockIdx.x * (S::kBlockRows / 4);
  const int tiles = (width + S::kBlockColumns - 1) / S::kBlockColumns;
  const int first_tile = blockIdx.y * tiles_each;
  const int count = (min(first_tile + tiles_each, tiles) - first_tile) * S::kSteps;

  const auto fetch = [&](int step) {
    if (step < count) {
      const int column = (first_tile + step / S::kSteps) * S::kBlockColumns;
      const int feature = step % S::kSteps * kStepFeatures;
      const uint32_t to = shared_address(ring + step % kStages * S::kTileBytes);
      for (int i = threadIdx.x; i < S::kBlockColumns * 4; i += kEmbedThreads) {
        const int n = i / 4, chunk = i % 4;
        copy_async(to + n * 64 + (chunk ^ (n >> 1 & 3)) * 16,
                   weights + static_cast<int64_t>(column + n) * S::kPadded + feature + chunk * 8);
      }
    }
    commit_async();  // also an empty group: waiting counts groups
  };
  if constexpr (!Source::kTakesWeightSpace) {
    for (int s = 0; s < kStages - 1; ++s) fetch(s);
  }

  source.template load<S, T>(units, first_unit, rows, ring);
  constexpr int kTail = (S::kPadded - S::kFeatures) / 4;
  for (int i = threadIdx.x; i < S::kBlockRows * kTail; i += kEmbedThreads) {
    *reinterpret_cast<uint2*>(rows + i / kTail * S::kRowBytes + S::kFeatures * 2 + i % kTail * 8) =
        {0, 0};
  }
  if constexpr (Source::kTakesWeightSpace) {
    __syncthreads();
    for (int s = 0; s < kStages - 1; ++s) fetch(s);
  }

  const uint32_t a_address = shared_address(rows + (warp_row + lane % 16) * S::kRowBytes) +
                             lane / 16 * 16;
  const int b_row = warp_column + (lane / 16) * 8 + lane % 8, b_chunk = lane / 8 & 1;
  float sums[2][4][4] = {};
  for (int step = 0; step < count; ++step) {
    wait_async<kStages - 2>();
    __syncthreads();  // this tile has arrived for all, and all are done with the one before it
    fetch(step + kStages - 1);
    const int k = step % S::kSteps;
    const uint32_t tile = shared_address(ring + step % kStages * S::kTileBytes);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t a[2][4], b[2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        load_matrices(a[i], a_address + i * 16 * S::kRowBytes + (k * kStepFeatures + half * 16) * 2);
        const int n = b_row + i * 16;
        load_matrices(b[i], tile + n * 64 + ((half * 2 + b_chunk) ^ (n >> 1 & 3)) * 16);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          multiply(sums[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1], T());
        }
      }
    }
    if (k != S::kSteps - 1) continue;

    // All features are in: bias, what is to be added, out.
    const int column = (first_tile + step / S::kSteps) * S::kBlockColumns + warp_column;
    const int q = lane % 4;
    float2 offset[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      offset[j] = bias ? *reinterpret_cast<const float2*>(bias + column + 8 * j + 2 * q)
                       : make_float2(0.0f, 0.0f);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = first_unit * 4 + warp_row + i * 16 + h * 8 + lane / 4;
        const bool inside = row < units.count * 4;
        float2 v[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          v[j] = make_float2(sums[i][j][2 * h] + offset[j].x, sums[i][j][2 * h + 1] + offset[j].y);
          const int at = column + 8 * j + 2 * q;
          if (addend && inside && at < width) {
            const float2 more = *reinterpret_cast<const float2*>(
                addend + static_cast<int64_t>(row) * width + at);
            v[j].x += more.x;
            v[j].y += more.y;
          }
        }
        // All lanes take part in the exchange; those beyond the last row write nothing.
        write_row(v, q, out + static_cast<int64_t>(inside ? row : 0) * width, column,
                  inside ? width : 0);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[i][j][e] = 0.0f;
      }
    }
  }
  wait_async<0>();
}

}  // namespace qwen_vl
#endif  // QWEN_VL_CUDA_EMBED_CUH_
