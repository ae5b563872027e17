// One unit (28x28 pixels, 4 patches) of the resized picture by one block of threads.
//
// The same integers as the CPU kernel's scalar form. The camera pixels that a unit needs are staged
// in shared memory (pinned memory of an Orin is not cached), resampled along one axis into a second
// buffer, and summed along the other. Where a strong reduction needs more pixels than shared memory
// holds, both steps run chunk by chunk, and unfinished sums wait in shared memory.
#ifndef QWEN_VL_CUDA_RESAMPLE_CUH_
#define QWEN_VL_CUDA_RESAMPLE_CUH_

#include <cstdint>

#include "../cpu/axis.h"
#include "../cpu/yuv.h"
#include "qwen_vl_kernels.h"

namespace qwen_vl {

constexpr int kUnit = QWEN_VL_UNIT;
constexpr int kPatch = QWEN_VL_PATCH;
constexpr int kArea = kPatch * kPatch;
constexpr int kUnitBytes = 4 * QWEN_VL_FEATURES;
constexpr int kUnitWords = kUnitBytes / 4;

constexpr int kStageBytes = 12 * 1024;  // camera pixels
constexpr int kPassBytes = 6 * 1024;    // after the first pass
constexpr int kSumBytes = kUnitBytes * 4;
constexpr int kResampleBytes = kStageBytes + kPassBytes + kSumBytes;

struct DeviceAxis {
  const int32_t* start;
  const int32_t* end;
  const int32_t* weights;  // [out][taps]
  int taps;
};

// A frame and how it is resized.
struct Picture {
  const uint8_t* data[2];
  int64_t step[2];
  int64_t size;  // of the first plane, bytes
  int encoding;
  int width;
  int height;
  int channels;  // bytes of a pixel in the stage: as the camera sent it, or 3 for YUV
  bool reversed;
  bool columns_first;
  int unit_columns;
  DeviceAxis x, y;
};

__device__ inline int clip8(int sum) {
  return min(max(sum >> kPrecision, 0), 255);
}

__device__ inline void load_yuv(const Picture& p, int row, int column, uint8_t* out) {
  const uint8_t* line = p.data[0] + row * p.step[0];
  int y, u, v;
  if (p.encoding == QWEN_VL_NV12 || p.encoding == QWEN_VL_NV21) {
    const uint8_t* pair = p.data[1] + (row >> 1) * p.step[1] + (column & ~1);
    const int first = p.encoding == QWEN_VL_NV12 ? 0 : 1;
    y = line[column];
    u = pair[first];
    v = pair[1 - first];
  } else {
    const uint8_t* pair = line + (column & ~1) * 2;
    const int luma = p.encoding == QWEN_VL_YUYV ? 0 : 1;
    y = pair[(column & 1) * 2 + luma];
    u = pair[1 - luma];
    v = pair[3 - luma];
  }
  const int light = max(y - 16, 0) * kYuvLuma + kYuvHalf;
  const int cu = u - 128, cv = v - 128;
  out[0] = min(max((light + kYuvRedV * cv) >> kYuvShift, 0), 255);
  out[1] = min(max((light + kYuvGreenV * cv + kYuvGreenU * cu) >> kYuvShift, 0), 255);
  out[2] = min(max((light + kYuvBlueU * cu) >> kYuvShift, 0), 255);
}

// Camera pixels [row0, row1) x [column0, column1) in shared memory. Packed pixels are copied in
// aligned words, so that a row keeps the misalignment that it has in the camera's memory.
struct Stage {
  uint8_t* bytes;
  int pitch;
  int row0, column0;

  __device__ static int pitch_of(const Picture& p, int columns) {
    return (columns * p.channels + 3 + 3) & ~3;
  }

  __device__ int shift(const Picture& p, int row) const {
    if (p.encoding >= QWEN_VL_NV12) return 0;
    return static_cast<int>(
        (reinterpret_cast<uintptr_t>(p.data[0]) + row * p.step[0] + column0 * p.channels) & 3);
  }

  // First byte of a channel of a pixel.
  __device__ const uint8_t* at(const Picture& p, int row, int column, int channel) const {
    return bytes + (row - row0) * pitch + shift(p, row) + (column - column0) * p.channels + channel;
  }

  __device__ void fill(const Picture& p, int row1, int column1, int threads) const {
    const int rows = row1 - row0, columns = column1 - column0;
    if (p.encoding >= QWEN_VL_NV12) {
      for (int i = threadIdx.x; i < rows * columns; i += threads) {
        const int r = i / columns, c = i % columns;
        load_yuv(p, row0 + r, column0 + c, bytes + r * pitch + c * 3);
      }
      return;
    }
    const int words = pitch / 4;
    const int length = columns * p.channels;
    for (int i = threadIdx.x; i < rows * words; i += threads) {
      const int r = i / words, w = i % words;
      const int offset = shift(p, row0 + r);
      const uint8_t* from = p.data[0] + (row0 + r) * p.step[0] + column0 * p.channels - offset;
      uint8_t* to = bytes + r * pitch;
      // Words that the row does not fill are copied byte by byte: nothing outside is read.
      if (4 * w >= offset && 4 * w + 4 <= offset + length) {
        reinterpret_cast<uint32_t*>(to)[w] = __ldg(reinterpret_cast<const uint32_t*>(from) + w);
      } else {
        for (int b = max(4 * w, offset); b < min(4 * w + 4, offset + length); ++b) to[b] = from[b];
      }
    }
  }
};

// What byte o of a unit's 2352 is: patch (of 4), channel, row and column within the unit.
struct Spot {
  int channel, row, column;

  __device__ explicit Spot(int o) {
    const int patch = o / QWEN_VL_FEATURES, feature = o % QWEN_VL_FEATURES;
    const int pixel = feature % kArea;
    channel = feature / kArea;
    row = (patch >> 1) * kPatch + pixel / kPatch;
    column = (patch & 1) * kPatch + pixel % kPatch;
  }
};

// The second pass over the taps that lie in one chunk [from, to) of rows or columns; `term(position,
// tap)` is a pixel after the first pass. Finished words go to emit.
template <int kThreads, class Along, class Term, class Emit>
__device__ void second_pass(const DeviceAxis& axis, int from, int to, bool first, bool last,
                            int* sums, Along along, Term term, Emit emit) {
  for (int word = threadIdx.x; word < kUnitWords; word += kThreads) {
    uint32_t bytes = 0;
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      const Spot spot(4 * word + b);
      const int position = along(spot), start = axis.start[position];
      const int32_t* weights = axis.weights + static_cast<int64_t>(position) * axis.taps - start;
      int sum = first ? kHalf : sums[4 * word + b];
      const int end = min(axis.end[position], to);
      for (int tap = max(start, from); tap < end; ++tap) {
        sum += term(spot, tap) * __ldg(weights + tap);
      }
      if (!last) sums[4 * word + b] = sum;
      bytes |= static_cast<uint32_t>(clip8(sum)) << 8 * b;
    }
    if (last) emit(word, bytes);
  }
}

// Calls emit(word, four bytes) for every word of the unit, each from one of kThreads threads. All
// threads of the block call this; `shared` (kResampleBytes) may be used again after a
// __syncthreads().
template <int kThreads, class Emit>
__device__ void resample_unit(const Picture& p, int unit, uint8_t* shared, Emit emit) {
  uint8_t* const pass = shared + kStageBytes;
  int* const sums = reinterpret_cast<int*>(pass + kPassBytes);
  const int y0 = unit / p.unit_columns * kUnit, x0 = unit % p.unit_columns * kUnit;
  const int row_begin = p.y.start[y0], row_end = p.y.end[y0 + kUnit - 1];
  const int column_begin = p.x.start[x0], column_end = p.x.end[x0 + kUnit - 1];
  const auto column_of = [&](int channel) {
    return p.encoding == QWEN_VL_MONO8 ? 0 : p.reversed ? 2 - channel : channel;
  };

  if (!p.columns_first) {
    const int pitch = Stage::pitch_of(p, column_end - column_begin);
    const int fit = min(kStageBytes / pitch, kPassBytes / (3 * kUnit));
    for (int row = row_begin; row < row_end; row += fit) {
      const int last = min(row + fit, row_end);
      const Stage stage = {shared, pitch, row, column_begin};
      stage.fill(p, last, column_end, kThreads);
      __syncthreads();
      for (int i = threadIdx.x; i < (last - row) * 3 * kUnit; i += kThreads) {
        const int r = row + i / (3 * kUnit), channel = i / kUnit % 3, x = x0 + i % kUnit;
        const int start = p.x.start[x], count = p.x.end[x] - start;
        const uint8_t* from = stage.at(p, r, start, column_of(channel));
        const int32_t* weights = p.x.weights + static_cast<int64_t>(x) * p.x.taps;
        int sum = kHalf;
        for (int k = 0; k < count; ++k) sum += from[k * p.channels] * __ldg(weights + k);
        pass[i] = clip8(sum);
      }
      __syncthreads();
      second_pass<kThreads>(
          p.y, row, last, row == row_begin, last == row_end, sums,
          [&](const Spot& spot) { return y0 + spot.row; },
          [&](const Spot& spot, int r) {
            return pass[((r - row) * 3 + spot.channel) * kUnit + spot.column];
          },
          emit);
    }
  } else {
    const int rows = row_end - row_begin;
    const int fit = min((kStageBytes / rows - 6) / p.channels, kPassBytes / (3 * kUnit));
    for (int column = column_begin; column < column_end; column += fit) {
      const int last = min(column + fit, column_end), columns = last - column;
      const Stage stage = {shared, Stage::pitch_of(p, columns), row_begin, column};
      stage.fill(p, row_end, last, kThreads);
      __syncthreads();
      for (int i = threadIdx.x; i < 3 * kUnit * columns; i += kThreads) {
        const int y = y0 + i / (3 * columns), channel = i / columns % 3, c = column + i % columns;
        const int start = p.y.start[y], end = p.y.end[y];
        const int32_t* weights = p.y.weights + static_cast<int64_t>(y) * p.y.taps - start;
        int sum = kHalf;
        for (int r = start; r < end; ++r) {
          sum += *stage.at(p, r, c, column_of(channel)) * __ldg(weights + r);
        }
        pass[i] = clip8(sum);
      }
      __syncthreads();
      second_pass<kThreads>(
          p.x, column, last, column == column_begin, last == column_end, sums,
          [&](const Spot& spot) { return x0 + spot.column; },
          [&](const Spot& spot, int c) {
            return pass[(spot.row * 3 + spot.channel) * columns + c - column];
          },
          emit);
    }
  }
}

// The smallest stage that resample_unit can work with, for the host's check: one row, or one
// column, of what the widest unit needs.
inline int64_t smallest_stage(const Axis& x, const Axis& y, int channels, bool columns_first) {
  int64_t most = 0;
  const Axis& axis = columns_first ? y : x;
  for (int at = 0; at < axis.out; at += kUnit) {
    const int64_t span = axis.end[at + kUnit - 1] - axis.start[at];
    const int64_t bytes = columns_first ? span * (channels + 6) : span * channels + 6;
    most = bytes > most ? bytes : most;
  }
  return most;
}

}  // namespace qwen_vl
#endif  // QWEN_VL_CUDA_RESAMPLE_CUH_
