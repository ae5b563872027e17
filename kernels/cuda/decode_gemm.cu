// Prompts through quantised weights: a tensor-core product that dequantises into its tiles.
//
// The sm_80 class: cp.async brings activations and codes in four stages, each tile of codes is
// turned into bf16 or fp16 once for all its rows of activations, ldmatrix and mma.sync do the rest.
// A code is read from memory once for every 64 or 128 rows. Group scales are applied in float
// before the one rounding, as the twin does; scales of outputs at the end, to exact sums of codes.
#include <algorithm>

#include "../cpu/check.h"
#include "decode_multiply.cuh"

namespace qwen_vl {
namespace decode {

constexpr int kGemmThreads = 256, kStages = 4;
constexpr int kTileN = 128, kTileK = 64;

struct Gemm {
  const void *x, *weight, *scales, *zeros, *bias;
  void* out;
  int rows, inputs, outputs, group;
};

__device__ inline void matrices(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// Place of the 16-byte chunk c of row r in a tile whose rows are 128 bytes.
__device__ inline int chunk_at(int r, int c) { return r * 128 + ((c ^ (r & 7)) << 4); }

// Bytes 0..3 of a word as numbers in their own order.
template <class T, bool kSigned>
__device__ inline uint2 bytes_in_order(uint32_t w) {
  const uint32_t even = bytes02<T, kSigned>(w), odd = bytes02<T, kSigned>(w >> 8);
  return make_uint2(__byte_perm(even, odd, 0x5410), __byte_perm(even, odd, 0x7632));
}

// Two codes with scale and zero point, rounded once. 2^23 + code is exact.
template <class T>
__device__ inline uint32_t scaled(uint32_t a, uint32_t b, float zero, float scale) {
  const float base = 8388608.f + zero;
  return Pair<T>::pack((__uint_as_float(0x4b000000u | a) - base) * scale,
                       (__uint_as_float(0x4b000000u | b) - base) * scale);
}

template <class T, int kForm, int kTileM>
__global__ void __launch_bounds__(kGemmThreads) quant_gemm(const Gemm p) {
  constexpr int kCodeRow = kForm == kInt4 ? kTileK / 2 : kTileK;  // bytes
  constexpr int kXBytes = kTileM * kTileK * 2, kCodeBytes = kTileN * kCodeRow;
  constexpr int kWBytes = kTileN * kTileK * 2;
  constexpr int kRowTiles = kTileM / 32;  // of 16 rows, for each of two warps across
  extern __shared__ __align__(128) uint8_t shared[];
  uint8_t* const codes = shared + kStages * kXBytes;
  uint8_t* const weights = codes + kStages * kCodeBytes;
  const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
  const int warp_m = warp % 2 * (kTileM / 2), warp_n = warp / 2 * 32;
  const int n0 = blockIdx.x * kTileN, m0 = blockIdx.y * kTileM;
  const int steps = (p.inputs + kTileK - 1) / kTileK;
  const int row_bytes = kForm == kInt4 ? p.inputs / 2 : p.inputs;

  auto load = [&](int step) {
    if (step < steps) {
      const uint32_t x_to = shared_of(shared + step % kStages * kXBytes);
      for (int i = tid; i < kTileM * 8; i += kGemmThreads) {
        const int r = i / 8, c = i % 8, k = step * kTileK + c * 8;
        const bool in = m0 + r < p.rows && k < p.inputs;
        copy16(x_to + chunk_at(r, c),
               static_cast<const T*>(p.x) + static_cast<int64_t>(in ? m0 + r : 0) * p.inputs +
                   (in ? k : 0), in);
      }
      const uint32_t c_to = shared_of(codes + step % kStages * kCodeBytes);
      constexpr int kPer = kCodeRow / 16;
      for (int i = tid; i < kTileN * kPer; i += kGemmThreads) {
        const int r = i / kPer, c = i % kPer, at = step * kCodeRow + c * 16;
        const bool in = n0 + r < p.outputs && at < row_bytes;
        copy16(c_to + i * 16,
               static_cast<const uint8_t*>(p.weight) +
                   static_cast<int64_t>(in ? n0 + r : 0) * row_bytes + (in ? at : 0), in);
      }
    }
    commit();
  };

  // A thread turns 32 codes of one row.
  const int own_row = tid / 2, own_half = tid % 2;
  const bool own_in = n0 + own_row < p.outputs;
  const int groups = grouped(kForm) ? p.inputs / p.group : 1;
  float next_scale = 0.f, next_zero = 0.f;
  auto look_up = [&](int step) {
    if constexpr (grouped(kForm)) {
      const int k = step * kTileK + own_half * 32;
      if (own_in && k < p.inputs) {
        const int64_t at = static_cast<int64_t>(n0 + own_row) * groups + k / p.group;
        next_scale = __half2float(__ldg(static_cast<const __half*>(p.scales) + at));
        next_zero = kForm == kInt4 ? __ldg(static_cast<const uint8_t*>(p.zeros) + at)
                                   : __ldg(static_cast<const int16_t*>(p.zeros) + at);
      }
    }
  };
  auto convert = [&](int step) {
    if (step >= steps) return;
    const uint8_t* from = codes + step % kStages * kCodeBytes + own_row * kCodeRow +
                          own_half * (kCodeRow / 2);
    uint8_t* to = weights + step % 2 * kWBytes;
    const float scale = next_scale, zero = next_zero;
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // 8 codes a chunk
      uint32_t d[4];
      if constexpr (kForm == kInt4) {
        const uint32_t w = *reinterpret_cast<const uint32_t*>(from + 4 * i);
#pragma unroll
        for (int j = 0; j < 4; ++j)
          d[j] = scaled<T>(w >> (8 * j) & 15, w >> (8 * j + 4) & 15, zero, scale);
      } else {
        const uint2 w = *reinterpret_cast<const uint2*>(from + 8 * i);
        if constexpr (kForm == kInt8) {
          const uint2 a = bytes_in_order<T, true>(w.x), b = bytes_in_order<T, true>(w.y);
          d[0] = a.x; d[1] = a.y; d[2] = b.x; d[3] = b.y;
        } else {
          d[0] = scaled<T>(w.x & 255, w.x >> 8 & 255, zero, scale);
          d[1] = scaled<T>(w.x >> 16 & 255, w.x >> 24, zero, scale);
          d[2] = scaled<T>(w.y & 255, w.y >> 8 & 255, zero, scale);
          d[3] = scaled<T>(w.y >> 16 & 255, w.y >> 24, zero, scale);
        }
      }
      *reinterpret_cast<uint4*>(to + chunk_at(own_row, own_half * 4 + i)) =
          make_uint4(d[0], d[1], d[2], d[3]);
    }
  };

  float acc[kRowTiles][4][4] = {};
  load(0);
  load(1);
  load(2);
  look_up(0);
  wait_groups<2>();
  __syncthreads();
  convert(0);
  look_up(1);
  for (int step = 0; step < steps; ++step) {
    wait_groups<1>();
    __syncthreads();
    load(step + 3);
    convert(step + 1);
    look_up(step + 2);
    const uint32_t x_at = shared_of(shared + step % kStages * kXBytes);
    const uint32_t w_at = shared_of(weights + step % 2 * kWBytes);
#pragma unroll
    for (int k = 0; k < kTileK / 16; ++k) {
      uint32_t b[2][4];  // two tiles of 8 outputs each: k low, k high
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int r = warp_n + j * 16 + lane / 16 * 8 + lane % 8, c = k * 2 + lane / 8 % 2;
        matrices(b[j], w_at + chunk_at(r, c));
      }
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        uint32_t a[4];
        const int r = warp_m + i * 16 + lane % 16, c = k * 2 + lane / 16;
        matrices(a, x_at + chunk_at(r, c));
#pragma unroll
        for (int j = 0; j < 4; ++j)
          Pair<T>::mma(acc[i][j], a[0], a[1], a[2], a[3], b[j / 2][j % 2 * 2],
                       b[j / 2][j % 2 * 2 + 1]);
      }
    }
  }
  const int g = lane / 4, t = lane % 4;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int n = n0 + warp_n + j * 8 + 2 * t;
    if (n >= p.outputs) continue;
    float2 scale = make_float2(1.f, 1.f), bias = make_float2(0.f, 0.f);
    if (kForm == kInt8) scale = *reinterpret_cast<const float2*>(
        static_cast<const float*>(p.scales) + n);
    if (p.bias)
      bias = Pair<T>::unpack(*reinterpret_cast<const uint32_t*>(static_cast<const T*>(p.bias) + n));
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int m = m0 + warp_m + i * 16 + g + 8 * h;
        if (m < p.rows)
          *reinterpret_cast<uint32_t*>(static_cast<T*>(p.out) +
                                       static_cast<int64_t>(m) * p.outputs + n) =
              Pair<T>::pack(acc[i][j][2 * h] * scale.x + bias.x,
                            acc[i][j][2 * h + 1] * scale.y + bias.y);
      }
    }
  }
}

// The whole matrix as T, for products of so many rows that another library's kernels, which read
// it from memory again, are faster. A thread turns 8 codes of a row.
template <class T, int kForm>
__global__ void __launch_bounds__(kGemmThreads) dequantise(const Gemm p) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kGemmThreads + threadIdx.x;
  const int per = p.inputs / 8;
  if (i >= static_cast<int64_t>(p.outputs) * per) return;
  const int row = static_cast<int>(i / per);
  const int k = static_cast<int>(i - static_cast<int64_t>(row) * per) * 8;
  float scale, zero = 0.f;
  if constexpr (kForm == kInt8) {
    scale = __ldg(static_cast<const float*>(p.scales) + row);
  } else {
    const int64_t at = static_cast<int64_t>(row) * (p.inputs / p.group) + k / p.group;
    scale = __half2float(__ldg(static_cast<const __half*>(p.scales) + at));
    zero = kForm == kInt4 ? __ldg(static_cast<const uint8_t*>(p.zeros) + at)
                          : __ldg(static_cast<const int16_t*>(p.zeros) + at);
  }
  uint32_t d[4];
  if constexpr (kForm == kInt4) {
    const uint32_t w = __ldg(static_cast<const uint32_t*>(p.weight) + i);
#pragma unroll
    for (int j = 0; j < 4; ++j)
      d[j] = scaled<T>(w >> (8 * j) & 15, w >> (8 * j + 4) & 15, zero, scale);
  } else {
    // Signed codes as unsigned ones with a zero point of 128.
    const uint2 w = __ldg(static_cast<const uint2*>(p.weight) + i);
    const uint32_t flip = kForm == kInt8 ? 0x80808080u : 0u;
    const uint32_t a = w.x ^ flip, b = w.y ^ flip;
    if (kForm == kInt8) zero = 128.f;
    d[0] = scaled<T>(a & 255, a >> 8 & 255, zero, scale);
    d[1] = scaled<T>(a >> 16 & 255, a >> 24, zero, scale);
    d[2] = scaled<T>(b & 255, b >> 8 & 255, zero, scale);
    d[3] = scaled<T>(b >> 16 & 255, b >> 24, zero, scale);
  }
  static_cast<uint4*>(p.out)[i] = make_uint4(d[0], d[1], d[2], d[3]);
}

template <class T, int kForm, int kTileM>
cudaError_t launch_gemm(const Gemm& p, cudaStream_t stream) {
  constexpr int kBytes = kStages * (kTileM * kTileK * 2 +
                                    kTileN * (kForm == kInt4 ? kTileK / 2 : kTileK)) +
                         2 * kTileN * kTileK * 2;
  const auto kernel = quant_gemm<T, kForm, kTileM>;
  const cudaError_t e =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (e) return e;
  const dim3 grid((p.outputs + kTileN - 1) / kTileN, (p.rows + kTileM - 1) / kTileM);
  kernel<<<grid, kGemmThreads, kBytes, stream>>>(p);
  return cudaGetLastError();
}

template <class T, int kForm>
cudaError_t launch_rows(const Gemm& p, cudaStream_t stream) {
  if (!p.x) {
    const int64_t pieces = static_cast<int64_t>(p.outputs) * (p.inputs / 8);
    dequantise<T, kForm><<<static_cast<unsigned>((pieces + kGemmThreads - 1) / kGemmThreads),
                           kGemmThreads, 0, stream>>>(p);
    return cudaGetLastError();
  }
  return p.rows <= 64 ? launch_gemm<T, kForm, 64>(p, stream)
                      : launch_gemm<T, kForm, 128>(p, stream);
}

template <class T>
cudaError_t launch_form(int form, const Gemm& p, cudaStream_t stream) {
  return form == kInt8 ? launch_rows<T, kInt8>(p, stream)
         : form == kInt4 ? launch_rows<T, kInt4>(p, stream)
                         : launch_rows<T, kInt8Group>(p, stream);
}

}  // namespace decode
}  // namespace qwen_vl

extern "C" QWEN_VL_API int qwen_vl_quant_gemm(const qwen_vl_quant_product* product, void* stream,
                                              char* message, size_t size) {
  using namespace qwen_vl;
  using namespace qwen_vl::decode;
  if (!product || !product->weight || !product->scales || !product->out)
    return refuse(QWEN_VL_NULL_POINTER, message, size, "no weight, scales or output");
  const qwen_vl_quant_product& q = *product;
  const bool groups = q.form == kInt4 || q.form == kInt8Group;
  if ((q.form != kInt8 && !groups) || q.dtype < 0 || q.dtype > 1 || (groups && !q.zeros))
    return refuse(QWEN_VL_BAD_ENCODING, message, size, "weights of form %d, dtype %d", q.form,
                  q.dtype);
  if (q.rows < 1 || q.inputs < 32 || q.inputs % 32 || q.outputs < 2 || q.outputs % 2 ||
      (groups && (q.group < 32 || q.group % 32 || q.inputs % q.group)))
    return refuse(QWEN_VL_BAD_SIZE, message, size,
                  "%d rows, %d inputs in groups of %d, %d outputs: inputs and groups must be "
                  "multiples of 32, outputs of 2", q.rows, q.inputs, q.group, q.outputs);
  const Gemm p = {q.x, q.weight, q.scales, q.zeros, q.bias, q.out,
                  q.rows, q.inputs, q.outputs, q.group};
  const cudaStream_t queue = static_cast<cudaStream_t>(stream);
  const cudaError_t e = q.dtype == 0 ? launch_form<__nv_bfloat16>(q.form, p, queue)
                                     : launch_form<__half>(q.form, p, queue);
  if (!e) return QWEN_VL_OK;
  cudaGetLastError();
  return refuse(QWEN_VL_CUDA_ERROR, message, size, "product of %d rows: %s", q.rows,
                cudaGetErrorString(e));
}
