// INT8 products on tensor cores of the sm_80 class, with scales, bias and residual applied to the
// exact int32 sums: nothing but 16-bit floats is written.
//
//     a block      8 warps, 128 rows x 128 columns; a warp 64 x 32 as 4 x 4 products m16n8k32
//     ring         three stages of 128 inputs (cp.async); a row is 8 chunks of 16 bytes, and chunk c
//                  of row r lies in place c ^ (r % 8): no bank conflicts
#include "mma.cuh"
#include "status.h"
#include "vector.cuh"

namespace qwen_vl {
namespace {

constexpr int kRows = 128, kColumns = 128, kDepth = 128;
constexpr int kThreads = 256, kStages = 3;
constexpr int kTile = kRows * kDepth;
constexpr int kSharedBytes = kStages * 2 * kTile;
static_assert(kSharedBytes <= 163 * 1024, "what a block may take on sm_87");

template <class T>
struct Product {
  const int8_t* x;
  const int8_t* weight;
  const float* x_scales;
  const float* weight_scales;
  const T* bias;
  const T* add;
  T* out;
  int rows, outs, ins;
};

__device__ inline void load_tile(uint32_t to, const int8_t* from, int first, int end, int stride) {
#pragma unroll
  for (int i = 0; i < kTile / 16 / kThreads; ++i) {
    const int place = i * kThreads + threadIdx.x, row = place / 8, chunk = place % 8;
    const bool there = first + row < end;
    copy_or_zero(to + row * kDepth + (chunk ^ (row % 8)) * 16,
                 from + static_cast<int64_t>(there ? first + row : first) * stride + chunk * 16,
                 there);
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) multiply_rows(const Product<T> p) {
  extern __shared__ __align__(128) uint8_t memory[];
  const uint32_t ring_at = shared_address(memory);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first_row = blockIdx.x * kRows, first_column = blockIdx.y * kColumns;
  const int warp_row = warp / 4 * 64, warp_column = warp % 4 * 32;
  const int steps = p.ins / kDepth;
  const auto load = [&](int step) {
    if (step < steps) {
      const uint32_t to = ring_at + step % kStages * 2 * kTile;
      load_tile(to, p.x + step * kDepth, first_row, p.rows, p.ins);
      load_tile(to + kTile, p.weight + step * kDepth, first_column, p.outs, p.ins);
    }
    commit_async();
  };
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) load(i);
  int sums[4][4][4] = {};
  for (int step = 0; step < steps; ++step) {
    wait_async<kStages - 2>();
    __syncthreads();
    load(step + kStages - 1);
    const uint32_t x_at = ring_at + step % kStages * 2 * kTile, weight_at = x_at + kTile;
#pragma unroll
    for (int part = 0; part < kDepth / 32; ++part) {
      uint32_t a[4][4], b[2][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = warp_row + i * 16 + lane % 16, chunk = part * 2 + lane / 16;
        load_matrices(a[i], x_at + row * kDepth + (chunk ^ (row % 8)) * 16);
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int row = warp_column + j * 16 + lane / 16 * 8 + lane % 8;
        const int chunk = part * 2 + lane / 8 % 2;
        load_matrices(b[j], weight_at + row * kDepth + (chunk ^ (row % 8)) * 16);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          multiply_s8(sums[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
        }
      }
    }
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int column = first_column + warp_column + j * 8 + lane % 4 * 2;
    if (column >= p.outs) continue;
    const float2 scale = *reinterpret_cast<const float2*>(p.weight_scales + column);
    float2 bias = {0.0f, 0.0f};
    if (p.bias) bias = widen(*reinterpret_cast<const typename Pair<T>::type*>(p.bias + column));
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int row = first_row + warp_row + i / 2 * 16 + i % 2 * 8 + lane / 4;
      if (row >= p.rows) continue;
      const float own = p.x_scales[row];
      const int64_t at = static_cast<int64_t>(row) * p.outs + column;
      float low = static_cast<float>(sums[i / 2][j][i % 2 * 2]) * own * scale.x + bias.x;
      float high = static_cast<float>(sums[i / 2][j][i % 2 * 2 + 1]) * own * scale.y + bias.y;
      if (p.add) {
        const float2 more = widen(*reinterpret_cast<const typename Pair<T>::type*>(p.add + at));
        low += more.x;
        high += more.y;
      }
      *reinterpret_cast<uint32_t*>(p.out + at) = narrow<T>(low, high);
    }
  }
}

template <class T>
cudaError_t launch(const Product<T>& p, cudaStream_t stream) {
  const cudaError_t error = cudaFuncSetAttribute(
      multiply_rows<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error) return error;
  // Rows first: blocks that run together share the weights' columns.
  const dim3 grid((p.rows + kRows - 1) / kRows, (p.outs + kColumns - 1) / kColumns);
  multiply_rows<T><<<grid, kThreads, kSharedBytes, stream>>>(p);
  return cudaSuccess;
}

}  // namespace
}  // namespace qwen_vl

using namespace qwen_vl;

extern "C" int qwen_vl_multiply_s8(const qwen_vl_product* product, const int8_t* x,
                                   const float* x_scales, const int8_t* weight,
                                   const float* weight_scales, const void* bias, const void* add,
                                   void* out, void* stream, char* message, size_t size) {
  if (!product || (product->bias && !bias) || (product->add && !add)) {
    return refuse(QWEN_VL_NULL_POINTER, message, size, "int8 product: a null pointer");
  }
  const qwen_vl_product& s = *product;
  int status = check_half(s.dtype, "int8 product", message, size);
  if (!status) {
    status = check_pointers("int8 product", message, size, static_cast<const void*>(x),
                            static_cast<const void*>(x_scales), static_cast<const void*>(weight),
                            static_cast<const void*>(weight_scales), out);
  }
  if (!status && !aligned(bias, add)) {
    status = refuse(QWEN_VL_BAD_OUTPUT, message, size,
                    "int8 product: a pointer is not aligned to 16 bytes");
  }
  if (status) return status;
  if (s.rows < 1 || s.outs < 8 || s.outs % 8 || s.ins < kDepth || s.ins % kDepth) {
    return refuse(QWEN_VL_BAD_SIZE, message, size,
                  "int8 product of %d rows with %d x %d: inputs must be a multiple of %d, outputs "
                  "of 8", s.rows, s.outs, s.ins, kDepth);
  }
  const auto run = [&](auto type) {
    using T = decltype(type);
    return launch<T>({x, weight, x_scales, weight_scales,
                      s.bias ? static_cast<const T*>(bias) : nullptr,
                      s.add ? static_cast<const T*>(add) : nullptr, static_cast<T*>(out), s.rows,
                      s.outs, s.ins},
                     static_cast<cudaStream_t>(stream));
  };
  const cudaError_t error = s.dtype == QWEN_VL_BF16 ? run(__nv_bfloat16()) : run(__half());
  if (error) {
    return refuse(QWEN_VL_CUDA_ERROR, message, size, "int8 product: %s (CUDA error %d)",
                  cudaGetErrorString(error), static_cast<int>(error));
  }
  return launched("int8 product", message, size);
}
