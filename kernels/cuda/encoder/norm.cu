// Layer norm and root-mean-square norm, a warp a row (four where rows are long), the row in registers:
// read once, written once, as 16-bit floats or as int8 with a scale.
//
// Layer norm: Ba, Kiros and Hinton 2016; RMS norm: Zhang and Sennrich 2019. Mean and variance are
// taken one after the other (not as a difference of large sums), all in float32.
#include "launch.cuh"
#include "status.h"
#include "vector.cuh"

namespace qwen_vl {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32;
constexpr int kWarpWidth = 2048;  // of rows that a warp takes
constexpr float kLargestCode = 127.0f;

template <class T>
struct Norm {
  const T* x;
  const T* weight;
  const T* bias;  // null: root mean square
  T* out;         // null: int8
  int8_t* codes;
  float* scales;
  int rows, width;
  float eps;
};

// Sum or largest over the warps of a row; `shared` is written by this call alone.
template <int kRowWarps, class F>
__device__ inline float over_row(float x, float* shared, F combine) {
  if constexpr (kRowWarps > 1) {
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
    __syncthreads();
    x = shared[0];
#pragma unroll
    for (int i = 1; i < kRowWarps; ++i) x = combine(x, shared[i]);
  }
  return x;
}
template <int kRowWarps>
__device__ inline float row_sum(float x, float* shared) {
  return over_row<kRowWarps>(warp_sum(x), shared, [](float a, float b) { return a + b; });
}
template <int kRowWarps>
__device__ inline float row_max(float x, float* shared) {
  return over_row<kRowWarps>(warp_max(x), shared, [](float a, float b) { return fmaxf(a, b); });
}

// kRowWarps: 1, or all of a block; kChunks: 16-byte chunks a thread holds.
template <class T, int kRowWarps, int kChunks>
__global__ void __launch_bounds__(kThreads) norm_rows(const Norm<T> p) {
  static_assert(kRowWarps == 1 || kRowWarps == kWarps, "rows of a block end together");
  __shared__ float shared[3][kWarps];
  constexpr int kStep = 32 * kRowWarps;
  const int64_t row = blockIdx.x * (kWarps / kRowWarps) + threadIdx.x / kStep;
  const int place = threadIdx.x % kStep, chunks = p.width / 8;
  begin_after_previous();
  if (row >= p.rows) return;
  uint4 raw[kChunks], weights[kChunks], biases[kChunks];
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    const int chunk = i * kStep + place;
    raw[i] = weights[i] = biases[i] = {0, 0, 0, 0};
    if (chunk < chunks) {
      raw[i] = *reinterpret_cast<const uint4*>(p.x + row * p.width + chunk * 8);
      // On their way while the sums are taken.
      weights[i] = *reinterpret_cast<const uint4*>(p.weight + chunk * 8);
      if (p.bias) biases[i] = *reinterpret_cast<const uint4*>(p.bias + chunk * 8);
    }
  }
  Eight values[kChunks];
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    values[i] = Eight::of<T>(raw[i]);
#pragma unroll
    for (float v : values[i].v) sum += v;
  }
  const float mean = p.bias ? row_sum<kRowWarps>(sum, shared[0]) / p.width : 0.0f;
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    if (i * kStep + place < chunks) {
#pragma unroll
      for (float v : values[i].v) squares += (v - mean) * (v - mean);
    }
  }
  const float factor = rsqrtf(row_sum<kRowWarps>(squares, shared[1]) / p.width + p.eps);
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    const int chunk = i * kStep + place;
    const Eight weight = Eight::of<T>(weights[i]), bias = Eight::of<T>(biases[i]);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      values[i].v[j] = (values[i].v[j] - mean) * factor * weight.v[j] + bias.v[j];
      largest = fmaxf(largest, fabsf(values[i].v[j]));
    }
    if (p.out && chunk < chunks) values[i].store(p.out + row * p.width + chunk * 8);
  }
  if (p.out) return;
  largest = fmaxf(row_max<kRowWarps>(largest, shared[2]), 1e-12f);
  if (place == 0) p.scales[row] = largest / kLargestCode;
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    const int chunk = i * kStep + place;
    if (chunk < chunks) {
      values[i].store_s8(p.codes + row * p.width + chunk * 8, kLargestCode / largest);
    }
  }
}

template <class T>
cudaError_t launch(const Norm<T>& p, cudaStream_t stream) {
  if (p.width > kWarpWidth) {
    return launch_early(norm_rows<T, kWarps, 4>, p.rows, kThreads, 0, stream, p);
  }
  const auto go = [&](auto kernel) {
    return launch_early(kernel, (p.rows + kWarps - 1) / kWarps, kThreads, 0, stream, p);
  };
  if (p.width <= 512) return go(norm_rows<T, 1, 2>);
  if (p.width <= 1024) return go(norm_rows<T, 1, 4>);
  if (p.width <= 1280) return go(norm_rows<T, 1, 5>);
  if (p.width <= 1536) return go(norm_rows<T, 1, 6>);
  return go(norm_rows<T, 1, 8>);
}

int norm(const qwen_vl_rows* rows, const void* x, const void* weight, const void* bias, float eps,
         void* out, int8_t* codes, float* scales, void* stream, char* message, size_t size) {
  if (!rows || !x || !weight || (!out && (!codes || !scales))) {
    return refuse(QWEN_VL_NULL_POINTER, message, size, "norm: a null pointer");
  }
  if (!aligned(x, weight, bias, out, codes)) {
    return refuse(QWEN_VL_BAD_OUTPUT, message, size, "norm: a pointer is not aligned to 16 bytes");
  }
  const int status = check_half(rows->dtype, "norm", message, size);
  if (status) return status;
  if (rows->rows < 1 || rows->width < 8 || rows->width % 8 || rows->width > 4096) {
    return refuse(QWEN_VL_BAD_SIZE, message, size,
                  "norm of %d rows of %d: rows of 8 to 4096 elements, a multiple of 8, are possible",
                  rows->rows, rows->width);
  }
  const auto run = [&](auto type) {
    using T = decltype(type);
    return launch<T>(
        {static_cast<const T*>(x), static_cast<const T*>(weight), static_cast<const T*>(bias),
         static_cast<T*>(out), codes, scales, rows->rows, rows->width, eps},
        static_cast<cudaStream_t>(stream));
  };
  const cudaError_t error = rows->dtype == QWEN_VL_BF16 ? run(__nv_bfloat16()) : run(__half());
  return launched("norm", error, message, size);
}

}  // namespace
}  // namespace qwen_vl

extern "C" int qwen_vl_norm(const qwen_vl_rows* rows, const void* x, const void* weight,
                            const void* bias, float eps, void* out, void* stream, char* message,
                            size_t size) {
  if (!out) return qwen_vl::refuse(QWEN_VL_NULL_POINTER, message, size, "norm: a null pointer");
  return qwen_vl::norm(rows, x, weight, bias, eps, out, nullptr, nullptr, stream, message, size);
}

extern "C" int qwen_vl_norm_s8(const qwen_vl_rows* rows, const void* x, const void* weight,
                               const void* bias, float eps, int8_t* out, float* scales,
                               void* stream, char* message, size_t size) {
  return qwen_vl::norm(rows, x, weight, bias, eps, nullptr, out, scales, stream, message, size);
}
