// What is done number by number, in one pass: activations between the two products of an MLP, 16-bit
// floats to 16-bit floats or to int8 with a scale a row; the gated form of the decoder; and the bytes
// of patches to floats.
#include "launch.cuh"
#include "status.h"
#include "vector.cuh"

namespace qwen_vl {
namespace {

constexpr int kThreads = 256;
// Chunks of 16 bytes that a thread has on their way.
constexpr int kAtOnce = 4;
constexpr int kRowThreads = 128;
// Chunks that a thread of activate_rows_s8 keeps in registers: 8192 elements a row.
constexpr int kRowChunks = 8;

template <int kKind>
__device__ inline float activation(float x) {
  // exp(-x) of a very negative x is infinite, and x / infinity the 0 that it should be.
  if (kKind == QWEN_VL_QUICK_GELU) return __fdividef(x, 1.0f + __expf(fminf(-1.702f * x, 80.0f)));
  if (kKind == QWEN_VL_SILU) return __fdividef(x, 1.0f + __expf(fminf(-x, 80.0f)));
  if (kKind == QWEN_VL_GELU) return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f));
  const float inner = 0.79788456080286536f * (x + 0.044715f * x * x * x);
  return 0.5f * x * (1.0f + tanhf(inner));
}

template <class T, int kKind>
__global__ void __launch_bounds__(kThreads) activate(const T* x, T* out, int64_t chunks) {
  begin_after_previous();
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads * kAtOnce + threadIdx.x;
  uint4 raw[kAtOnce];
#pragma unroll
  for (int j = 0; j < kAtOnce; ++j) {
    const int64_t i = first + j * kThreads;
    if (i < chunks) raw[j] = *reinterpret_cast<const uint4*>(x + i * 8);
  }
#pragma unroll
  for (int j = 0; j < kAtOnce; ++j) {
    const int64_t i = first + j * kThreads;
    if (i >= chunks) break;
    Eight values = Eight::of<T>(raw[j]);
#pragma unroll
    for (float& v : values.v) v = activation<kKind>(v);
    values.store(out + i * 8);
  }
}

template <class T, int kKind>
__global__ void __launch_bounds__(kThreads) gate(const T* x, T* out, int rows, int width) {
  begin_after_previous();
  const int chunks = width / 8;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= static_cast<int64_t>(rows) * chunks) return;
  const int64_t row = i / chunks;
  const T* const from = x + row * 2 * width + i % chunks * 8;
  Eight values = Eight::load(from);
  const Eight factors = Eight::load(from + width);
#pragma unroll
  for (int j = 0; j < 8; ++j) values.v[j] = activation<kKind>(values.v[j]) * factors.v[j];
  values.store(out + i * 8);
}

// Rows of `width` bytes, a multiple of 4, to rows of `chunks` chunks of 8 floats: byte - 128, which every
// 16-bit format holds exactly, and zeros behind the bytes.
template <class T>
__global__ void __launch_bounds__(kThreads)
    centre(const uint8_t* x, T* out, int rows, int width, int chunks) {
  begin_after_previous();
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= rows * chunks) return;
  const int column = i % chunks * 8;
  const uint8_t* const from = x + static_cast<int64_t>(i / chunks) * width + column;
  Eight values = {};
#pragma unroll
  for (int half = 0; half < 8; half += 4) {
    if (column + half >= width) break;
    const uchar4 four = *reinterpret_cast<const uchar4*>(from + half);
    values.v[half] = four.x - 128;
    values.v[half + 1] = four.y - 128;
    values.v[half + 2] = four.z - 128;
    values.v[half + 3] = four.w - 128;
  }
  values.store(out + static_cast<int64_t>(i) * 8);
}

template <class T, int kKind>
__global__ void __launch_bounds__(kRowThreads)
    activate_rows_s8(const T* x, int8_t* out, float* scales, int width) {
  begin_after_previous();
  __shared__ float shared[kRowThreads / 32];
  const int64_t row = blockIdx.x;
  Eight values[kRowChunks];
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < kRowChunks; ++i) {
    const int column = (i * kRowThreads + threadIdx.x) * 8;
    if (column >= width) break;
    values[i] = Eight::load(x + row * width + column);
#pragma unroll
    for (float& v : values[i].v) {
      v = activation<kKind>(v);
      largest = fmaxf(largest, fabsf(v));
    }
  }
  largest = warp_max(largest);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = largest;
  __syncthreads();
  largest = 1e-12f;
#pragma unroll
  for (float other : shared) largest = fmaxf(largest, other);
  if (threadIdx.x == 0) scales[row] = largest / 127.0f;
#pragma unroll
  for (int i = 0; i < kRowChunks; ++i) {
    const int column = (i * kRowThreads + threadIdx.x) * 8;
    if (column >= width) break;
    values[i].store_s8(out + row * width + column, 127.0f / largest);
  }
}

int check(const qwen_vl_rows* rows, int kind, int most, char* message, size_t size) {
  if (!rows) return refuse(QWEN_VL_NULL_POINTER, message, size, "activation: a null pointer");
  if (rows->rows < 1 || rows->width < 8 || rows->width % 8 || rows->width > most) {
    return refuse(QWEN_VL_BAD_SIZE, message, size,
                  "activation of %d rows of %d: rows of 8 to %d elements, a multiple of 8, are "
                  "possible", rows->rows, rows->width, most);
  }
  if (kind < QWEN_VL_QUICK_GELU || kind > QWEN_VL_SILU) {
    return refuse(QWEN_VL_BAD_ENCODING, message, size, "activation %d: 0 to %d are possible", kind,
                  QWEN_VL_SILU);
  }
  return check_half(rows->dtype, "activation", message, size);
}

template <int kKind>
struct Kind {
  static constexpr int value = kKind;
};

// Calls f(T(), Kind<k>()).
template <class F>
void dispatch(int dtype, int kind, F f) {
  const auto with = [&](auto type) {
    switch (kind) {
      case QWEN_VL_QUICK_GELU: f(type, Kind<QWEN_VL_QUICK_GELU>()); break;
      case QWEN_VL_GELU: f(type, Kind<QWEN_VL_GELU>()); break;
      case QWEN_VL_GELU_TANH: f(type, Kind<QWEN_VL_GELU_TANH>()); break;
      default: f(type, Kind<QWEN_VL_SILU>());
    }
  };
  if (dtype == QWEN_VL_BF16) {
    with(__nv_bfloat16());
  } else {
    with(__half());
  }
}

unsigned blocks(int64_t chunks) { return static_cast<unsigned>((chunks + kThreads - 1) / kThreads); }

}  // namespace
}  // namespace qwen_vl

using namespace qwen_vl;

extern "C" int qwen_vl_activate(const qwen_vl_rows* rows, int32_t kind, const void* x, void* out,
                                void* stream, char* message, size_t size) {
  int status = check(rows, kind, 1 << 20, message, size);
  if (!status) status = check_pointers("activation", message, size, x, out);
  if (status) return status;
  const int64_t chunks = static_cast<int64_t>(rows->rows) * rows->width / 8;
  cudaError_t error;
  dispatch(rows->dtype, kind, [&](auto type, auto k) {
    using T = decltype(type);
    error = launch_early(activate<T, decltype(k)::value>, blocks((chunks + kAtOnce - 1) / kAtOnce),
                         kThreads, 0, static_cast<cudaStream_t>(stream), static_cast<const T*>(x),
                         static_cast<T*>(out), chunks);
  });
  return launched("activation", error, message, size);
}

extern "C" int qwen_vl_gate(const qwen_vl_rows* rows, int32_t kind, const void* x, void* out,
                            void* stream, char* message, size_t size) {
  int status = check(rows, kind, 1 << 20, message, size);
  if (!status) status = check_pointers("gated activation", message, size, x, out);
  if (status) return status;
  const int64_t chunks = static_cast<int64_t>(rows->rows) * rows->width / 8;
  cudaError_t error;
  dispatch(rows->dtype, kind, [&](auto type, auto k) {
    using T = decltype(type);
    error = launch_early(gate<T, decltype(k)::value>, blocks(chunks), kThreads, 0,
                         static_cast<cudaStream_t>(stream), static_cast<const T*>(x),
                         static_cast<T*>(out), rows->rows, rows->width);
  });
  return launched("gated activation", error, message, size);
}

extern "C" int qwen_vl_activate_s8(const qwen_vl_rows* rows, int32_t kind, const void* x,
                                   int8_t* out, float* scales, void* stream, char* message,
                                   size_t size) {
  int status = check(rows, kind, kRowThreads * kRowChunks * 8, message, size);
  if (!status) status = check_pointers("activation to int8", message, size, x, out);
  if (!status && !scales) {
    status = refuse(QWEN_VL_NULL_POINTER, message, size, "activation to int8: a null pointer");
  }
  if (status) return status;
  cudaError_t error;
  dispatch(rows->dtype, kind, [&](auto type, auto k) {
    using T = decltype(type);
    error = launch_early(activate_rows_s8<T, decltype(k)::value>, rows->rows, kRowThreads, 0,
                         static_cast<cudaStream_t>(stream), static_cast<const T*>(x), out, scales,
                         rows->width);
  });
  return launched("activation to int8", error, message, size);
}

extern "C" int qwen_vl_centre(const qwen_vl_rows* rows, int32_t bytes, const uint8_t* x, void* out,
                              void* stream, char* message, size_t size) {
  if (!rows) return refuse(QWEN_VL_NULL_POINTER, message, size, "bytes: a null pointer");
  int status = check_half(rows->dtype, "bytes", message, size);
  if (!status) {
    status = check_pointers("bytes", message, size, static_cast<const void*>(x),
                            static_cast<const void*>(out));
  }
  if (status) return status;
  if (rows->rows < 1 || bytes < 4 || bytes % 4 || rows->width < bytes || rows->width % 8 ||
      static_cast<int64_t>(rows->rows) * rows->width > INT32_MAX) {
    return refuse(QWEN_VL_BAD_SIZE, message, size,
                  "%d rows of %d bytes to %d floats: multiples of 4 and 8, and no fewer, are possible",
                  rows->rows, bytes, rows->width);
  }
  const int chunks = rows->width / 8;
  const auto run = [&](auto type) {
    using T = decltype(type);
    return launch_early(centre<T>, blocks(static_cast<int64_t>(rows->rows) * chunks), kThreads, 0,
                        static_cast<cudaStream_t>(stream), x, static_cast<T*>(out), rows->rows,
                        bytes, chunks);
  };
  const cudaError_t error = rows->dtype == QWEN_VL_BF16 ? run(__nv_bfloat16()) : run(__half());
  return launched("bytes", error, message, size);
}
