// Layer norm and root-mean-square norm, a warp a row, the row in registers: read once, written
// once, as 16-bit floats or as int8 with a scale.
//
// Layer norm: Ba, Kiros and Hinton 2016; RMS norm: Zhang and Sennrich 2019. Mean and variance are
// taken one after the other (not as a difference of large sums), all in float32.
#include "status.h"
#include "vector.cuh"

namespace qwen_vl {
namespace {

constexpr int kWarps = 4;
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

// kChunks: 16-byte chunks a lane holds.
template <class T, int kChunks>
__global__ void __launch_bounds__(kWarps * 32) norm_rows(const Norm<T> p) {
  const int row = blockIdx.x * kWarps + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (row >= p.rows) return;
  const int chunks = p.width / 8;
  const T* const from = p.x + static_cast<int64_t>(row) * p.width;
  Eight values[kChunks];
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    const int chunk = i * 32 + lane;
    if (chunk < chunks) {
      values[i] = Eight::load(from + chunk * 8);
    } else {
#pragma unroll
      for (float& v : values[i].v) v = 0.0f;
    }
#pragma unroll
    for (float v : values[i].v) sum += v;
  }
  // On their way while the sums are taken.
  uint4 weights[kChunks], biases[kChunks];
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    const int chunk = i * 32 + lane;
    if (chunk < chunks) {
      weights[i] = *reinterpret_cast<const uint4*>(p.weight + chunk * 8);
      if (p.bias) biases[i] = *reinterpret_cast<const uint4*>(p.bias + chunk * 8);
    }
  }
  const float mean = p.bias ? warp_sum(sum) / p.width : 0.0f;
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    if (i * 32 + lane < chunks) {
#pragma unroll
      for (float v : values[i].v) squares += (v - mean) * (v - mean);
    }
  }
  const float factor = rsqrtf(warp_sum(squares) / p.width + p.eps);
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    const int chunk = i * 32 + lane;
    if (chunk >= chunks) continue;
    const Eight weight = Eight::of<T>(weights[i]);
#pragma unroll
    for (int j = 0; j < 8; ++j) values[i].v[j] = (values[i].v[j] - mean) * factor * weight.v[j];
    if (p.bias) {
      const Eight bias = Eight::of<T>(biases[i]);
#pragma unroll
      for (int j = 0; j < 8; ++j) values[i].v[j] += bias.v[j];
    }
    if (p.out) {
      values[i].store(p.out + static_cast<int64_t>(row) * p.width + chunk * 8);
    } else {
#pragma unroll
      for (float v : values[i].v) largest = fmaxf(largest, fabsf(v));
    }
  }
  if (p.out) return;
  largest = fmaxf(warp_max(largest), 1e-12f);
  if (lane == 0) p.scales[row] = largest / kLargestCode;
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    const int chunk = i * 32 + lane;
    if (chunk < chunks) {
      values[i].store_s8(p.codes + static_cast<int64_t>(row) * p.width + chunk * 8,
                         kLargestCode / largest);
    }
  }
}

template <class T>
void launch(const Norm<T>& p, cudaStream_t stream) {
  const dim3 grid((p.rows + kWarps - 1) / kWarps);
  const int lanes = (p.width / 8 + 31) / 32;
  if (lanes <= 2) {
    norm_rows<T, 2><<<grid, kWarps * 32, 0, stream>>>(p);
  } else if (lanes <= 5) {  // 1280
    norm_rows<T, 5><<<grid, kWarps * 32, 0, stream>>>(p);
  } else if (lanes == 6) {  // 1536
    norm_rows<T, 6><<<grid, kWarps * 32, 0, stream>>>(p);
  } else {  // up to 4096
    norm_rows<T, 16><<<grid, kWarps * 32, 0, stream>>>(p);
  }
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
    launch<T>({static_cast<const T*>(x), static_cast<const T*>(weight), static_cast<const T*>(bias),
               static_cast<T*>(out), codes, scales, rows->rows, rows->width, eps},
              static_cast<cudaStream_t>(stream));
  };
  if (rows->dtype == QWEN_VL_BF16) {
    run(__nv_bfloat16());
  } else {
    run(__half());
  }
  return launched("norm", message, size);
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
