// A strip of units (28x28 pixels, 4 patches each) side by side, by one block of threads.
//
// The same integers as resample.cuh, for pictures whose strip fits into shared memory as a whole.
// Camera pixels of the strip are read once and put word-aligned into shared memory (pinned memory of
// an Orin is not cached), with the weights beside them; a warp takes a row, its lanes the columns, so
// that a weight is loaded once for three channels and nothing is divided by what is only known at
// run time.
//
//     rows first      stage [rows][pitch] -> pass [rows][3][28 * units] -> patches
//     columns first   stage [rows][pitch] -> pass [28][pitch]           -> patches
#ifndef QWEN_VL_CUDA_STRIP_CUH_
#define QWEN_VL_CUDA_STRIP_CUH_

#include "resample.cuh"

namespace qwen_vl {

// Units of a strip at most. Neighbours share the columns that their filters reach over.
constexpr int kStrip = 2;

// How strips of a picture lie in shared memory; made by the host.
struct StripPlan {
  int rows;   // of camera pixels, at most
  int pitch;  // bytes of a staged row, a multiple of 4
  int stage;  // where the parts begin, bytes; weights and starts lie in front
  int pass;
  int bytes;  // of all, without the patches
};

// Makes the plan for strips of `units`; bytes may be more than a block can have.
inline StripPlan plan_strip(const Axis& x, const Axis& y, int channels, bool columns_first,
                            int units) {
  StripPlan plan = {};
  int columns = 0;
  const int step = units * kUnit;
  for (int at = 0; at < x.out; at += step) {
    const int last = std::min(at + step, x.out) - 1;
    columns = std::max(columns, x.end[last] - x.start[at]);
  }
  for (int at = 0; at < y.out; at += kUnit) {
    plan.rows = std::max(plan.rows, y.end[at + kUnit - 1] - y.start[at]);
  }
  // A filter that ends before the others goes on over weights of 0: there must be memory.
  plan.rows += y.taps;
  plan.pitch = ((columns + x.taps) * channels + 3) & ~3;
  plan.stage = (kStrip * kUnit * (x.taps + 1) + kUnit * (y.taps + 1)) * 4;
  plan.pass = plan.stage + plan.rows * plan.pitch;
  const int64_t pass = columns_first ? int64_t{kUnit} * plan.pitch
                                     : int64_t{plan.rows} * 3 * kStrip * kUnit;
  const int64_t all = int64_t{plan.stage} + int64_t{plan.rows} * plan.pitch + pass;
  plan.bytes = all > (1 << 30) ? 1 << 30 : static_cast<int>((all + 15) & ~15);
  return plan;
}

// Four bytes of a packed camera row, whose aligned words lie `shift` bytes before them.
__device__ inline uint32_t unaligned_word(const uint8_t* from, int shift) {
  const auto* const at = reinterpret_cast<const uint32_t*>(from - shift);
  return __byte_perm(__ldg(at), shift ? __ldg(at + 1) : 0, 0x3210 + 0x1111 * shift);
}

// Copies packed camera rows so that their first pixel is aligned to a word.
template <int kThreads>
__device__ void stage_rows(const Picture& p, int row_begin, int rows, int column, int length,
                           int pitch, uint8_t* stage) {
  constexpr int kWarps = kThreads / 32, kBatch = 4;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint8_t* const first =
      p.data[0] + row_begin * p.step[0] + static_cast<int64_t>(column) * p.channels;
  const uint8_t* const last = first + (rows - 1) * p.step[0] + length;
  if (first - 3 >= p.data[0] && last + 7 <= p.data[0] + p.size) {
    // Neighbours are read with the rows, but nothing outside the plane; several rows on the way.
    for (int r = warp; r < rows; r += kBatch * kWarps) {
      for (int w = lane; 4 * w < length; w += 32) {
        uint32_t words[kBatch];
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
          const uint8_t* const from = first + min(r + j * kWarps, rows - 1) * p.step[0] + 4 * w;
          words[j] = unaligned_word(from, static_cast<int>(reinterpret_cast<uintptr_t>(from) & 3));
        }
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
          if (r + j * kWarps < rows) {
            reinterpret_cast<uint32_t*>(stage + (r + j * kWarps) * pitch)[w] = words[j];
          }
        }
      }
    }
  } else {
    for (int r = warp; r < rows; r += kWarps) {
      for (int b = lane; b < length; b += 32) stage[r * pitch + b] = first[r * p.step[0] + b];
    }
  }
}

// Sums over the taps of one output column for each channel.
template <int kChannels>
__device__ inline void sum_columns(const uint8_t* from, const int* weights, int taps,
                                   int (&sums)[kChannels < 3 ? 1 : 3]) {
  constexpr int kCount = kChannels < 3 ? 1 : 3;
#pragma unroll
  for (int c = 0; c < kCount; ++c) sums[c] = kHalf;
#pragma unroll 4
  for (int t = 0; t < taps; ++t) {
    const int weight = weights[t];
#pragma unroll
    for (int c = 0; c < kCount; ++c) sums[c] += from[t * kChannels + c] * weight;
  }
}

// Sums over the taps of one output row for four bytes side by side.
__device__ inline uint32_t sum_rows(const uint8_t* from, int pitch, const int* weights, int taps) {
  int sums[4] = {kHalf, kHalf, kHalf, kHalf};
#pragma unroll 4
  for (int t = 0; t < taps; ++t) {
    const uint32_t word = *reinterpret_cast<const uint32_t*>(from + t * pitch);
    const int weight = weights[t];
#pragma unroll
    for (int b = 0; b < 4; ++b) sums[b] += static_cast<int>(word >> 8 * b & 255) * weight;
  }
  uint32_t bytes = 0;
#pragma unroll
  for (int b = 0; b < 4; ++b) bytes |= static_cast<uint32_t>(clip8(sums[b])) << 8 * b;
  return bytes;
}

// Where byte (channel, row, column) of a unit lies among its four patches.
__device__ inline int place(int patch_pitch, int channel, int row, int column) {
  const int lower = row >= kPatch, right = column >= kPatch;
  return (lower * 2 + right) * patch_pitch + channel * kArea + (row - lower * kPatch) * kPatch +
         column - right * kPatch;
}

template <int kThreads, int kChannels>
__device__ void sum_strip(const Picture& p, const StripPlan& plan, int units, const uint8_t* shared,
                          uint8_t* pass, uint8_t* out, int patch_pitch) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  constexpr int kWarps = kThreads / 32, kColumns = kStrip * kUnit;
  constexpr int kCount = kChannels < 3 ? 1 : 3;
  const int* const x_start = reinterpret_cast<const int*>(shared);
  const int* const y_start = x_start + kColumns;
  const int* const x_weights = y_start + kUnit;
  const int* const y_weights = x_weights + kColumns * p.x.taps;
  const uint8_t* const stage = shared + plan.stage;
  const int columns = units * kUnit;
  const bool reversed = p.reversed;
  if (!p.columns_first) {
    const int rows = y_start[kUnit - 1] + p.y.taps;
    for (int r = warp; r < rows; r += kWarps) {
      for (int x = lane; x < columns; x += 32) {
        int sums[kCount];
        sum_columns<kChannels>(stage + r * plan.pitch + x_start[x] * kChannels,
                               x_weights + x * p.x.taps, p.x.taps, sums);
        uint8_t* const to = pass + r * 3 * kColumns + x;
#pragma unroll
        for (int c = 0; c < 3; ++c) {
          to[(reversed ? 2 - c : c) * kColumns] = static_cast<uint8_t>(clip8(sums[c % kCount]));
        }
      }
    }
    __syncthreads();
    constexpr int kQuads = kColumns / 4;
    for (int i = threadIdx.x; i < kUnit * 3 * kQuads; i += kThreads) {
      const int y = i / (3 * kQuads), channel = i / kQuads % 3, quad = i % kQuads;
      if (4 * quad >= columns) continue;
      const uint32_t bytes =
          sum_rows(pass + (y_start[y] * 3 + channel) * kColumns + 4 * quad, 3 * kColumns,
                   y_weights + y * p.y.taps, p.y.taps);
      const int unit = quad / (kUnit / 4), x = quad % (kUnit / 4) * 4;
      uint8_t* const to = out + unit * 4 * patch_pitch;
      // A row of a patch has 14 bytes: two bytes never part, four may.
      *reinterpret_cast<uint16_t*>(to + place(patch_pitch, channel, y, x)) =
          static_cast<uint16_t>(bytes);
      *reinterpret_cast<uint16_t*>(to + place(patch_pitch, channel, y, x + 2)) =
          static_cast<uint16_t>(bytes >> 16);
    }
  } else {
    for (int y = warp; y < kUnit; y += kWarps) {
      const int words = plan.pitch / 4;
      for (int w = lane; w < words; w += 32) {
        reinterpret_cast<uint32_t*>(pass + y * plan.pitch)[w] =
            sum_rows(stage + y_start[y] * plan.pitch + 4 * w, plan.pitch, y_weights + y * p.y.taps,
                     p.y.taps);
      }
    }
    __syncthreads();
    for (int y = warp; y < kUnit; y += kWarps) {
      for (int x = lane; x < columns; x += 32) {
        int sums[kCount];
        sum_columns<kChannels>(pass + y * plan.pitch + x_start[x] * kChannels,
                               x_weights + x * p.x.taps, p.x.taps, sums);
        uint8_t* const to = out + x / kUnit * 4 * patch_pitch;
#pragma unroll
        for (int c = 0; c < 3; ++c) {
          to[place(patch_pitch, reversed ? 2 - c : c, y, x % kUnit)] =
              static_cast<uint8_t>(clip8(sums[c % kCount]));
        }
      }
    }
  }
}

// Resamples `units` units (at most kStrip, all in one row) from unit `first` on. Patch j of unit i
// begins at out + (4 * i + j) * patch_pitch, which is even. `shared` has plan.bytes. All threads of the
// block call this; the patches are there after a __syncthreads().
template <int kThreads>
__device__ void resample_strip(const Picture& p, const StripPlan& plan, int first, int units,
                               uint8_t* shared, uint8_t* out, int patch_pitch) {
  constexpr int kWarps = kThreads / 32, kColumns = kStrip * kUnit;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int y0 = first / p.unit_columns * kUnit, x0 = first % p.unit_columns * kUnit;
  const int columns = units * kUnit;
  const int row_begin = p.y.start[y0], row_end = p.y.end[y0 + kUnit - 1];
  const int column_begin = p.x.start[x0], column_end = p.x.end[x0 + columns - 1];
  int* const tables = reinterpret_cast<int*>(shared);
  uint8_t* const stage = shared + plan.stage;

  for (int i = threadIdx.x; i < columns; i += kThreads) {
    tables[i] = p.x.start[x0 + i] - column_begin;
  }
  for (int i = threadIdx.x; i < kUnit; i += kThreads) {
    tables[kColumns + i] = p.y.start[y0 + i] - row_begin;
  }
  int* const weights = tables + kColumns + kUnit;
  for (int i = threadIdx.x; i < columns * p.x.taps; i += kThreads) {
    weights[i] = __ldg(p.x.weights + x0 * p.x.taps + i);
  }
  for (int i = threadIdx.x; i < kUnit * p.y.taps; i += kThreads) {
    weights[kColumns * p.x.taps + i] = __ldg(p.y.weights + y0 * p.y.taps + i);
  }
  const int length = column_end - column_begin;
  if (p.encoding >= QWEN_VL_NV12) {
    for (int r = warp; r < row_end - row_begin; r += kWarps) {
      for (int c = lane; c < length; c += 32) {
        load_yuv(p, row_begin + r, column_begin + c, stage + r * plan.pitch + c * 3);
      }
    }
  } else {
    stage_rows<kThreads>(p, row_begin, row_end - row_begin, column_begin, length * p.channels,
                         plan.pitch, stage);
  }
  __syncthreads();
  if (p.channels == 1) {
    sum_strip<kThreads, 1>(p, plan, units, shared, shared + plan.pass, out, patch_pitch);
  } else if (p.channels == 3) {
    sum_strip<kThreads, 3>(p, plan, units, shared, shared + plan.pass, out, patch_pitch);
  } else {
    sum_strip<kThreads, 4>(p, plan, units, shared, shared + plan.pass, out, patch_pitch);
  }
}

}  // namespace qwen_vl
#endif  // QWEN_VL_CUDA_STRIP_CUH_
