// Products with an activation or a rotation in the epilogue: what is handed over is checked here, the
// work is products_sm90.cu's.
#include "hopper.h"
#include "status.h"

using namespace qwen_vl;

extern "C" int qwen_vl_multiply_activated(const qwen_vl_product* product, int32_t activation,
                                          const void* x, const void* weight, const void* bias,
                                          void* out, void* stream, char* message, size_t size) {
  if (!product) return refuse(QWEN_VL_NULL_POINTER, message, size, "product: a null pointer");
  const qwen_vl_product& p = *product;
  int status = check_half(p.dtype, "product with activation", message, size);
  if (!status) status = check_pointers("product with activation", message, size, x, weight, out);
  if (status) return status;
  const bool gated = activation == QWEN_VL_SILU;
  if (activation != QWEN_VL_QUICK_GELU && !gated) {
    return refuse(QWEN_VL_BAD_ENCODING, message, size,
                  "product with activation %d: quick-GELU (0) and gated SiLU (3) are possible",
                  activation);
  }
  if (p.rows < 1 || p.outs < 8 || p.outs % 8 || p.ins < 64 || p.ins % 64 || p.add ||
      (p.bias && (gated || !bias)) || !aligned(bias)) {
    return refuse(QWEN_VL_BAD_SIZE, message, size,
                  "product with activation of %d rows with %d x %d: inputs must be a multiple of 64, "
                  "outputs of 8; nothing can be added, and no bias to gates",
                  p.rows, p.outs, p.ins);
  }
  if (!qwen_vl_attention_has(QWEN_VL_WGMMA)) {
    return refuse(QWEN_VL_BAD_ENCODING, message, size,
                  "product with activation: this device or library has no wgmma form");
  }
  const int error = launch_activated(p, gated, x, weight, p.bias ? bias : nullptr, out,
                                     static_cast<cudaStream_t>(stream));
  if (error) {
    return refuse(QWEN_VL_CUDA_ERROR, message, size, "product with activation: %s (CUDA error %d)",
                  cudaGetErrorString(static_cast<cudaError_t>(error)), error);
  }
  return launched("product with activation", message, size);
}

extern "C" int qwen_vl_multiply_rotated(const qwen_vl_product* product, const void* x,
                                        const void* weight, const void* bias, const int32_t* spots,
                                        const float* turns, void* out, void* stream, char* message,
                                        size_t size) {
  if (!product) return refuse(QWEN_VL_NULL_POINTER, message, size, "product: a null pointer");
  const qwen_vl_product& p = *product;
  int status = check_half(p.dtype, "rotated product", message, size);
  if (!status) {
    status = check_pointers("rotated product", message, size, x, weight, bias,
                            static_cast<const void*>(spots), static_cast<const void*>(turns), out);
  }
  if (status) return status;
  constexpr int kHead = 3 * 80;  // queries, keys and values of one
  if (p.rows < 1 || p.outs < kHead || p.outs % kHead || p.ins < 64 || p.ins % 64 || p.add ||
      !p.bias) {
    return refuse(QWEN_VL_BAD_SIZE, message, size,
                  "rotated product of %d rows with %d x %d: inputs must be a multiple of 64, outputs "
                  "of %d; there is a bias, and nothing can be added",
                  p.rows, p.outs, p.ins, kHead);
  }
  if (!qwen_vl_attention_has(QWEN_VL_WGMMA)) {
    return refuse(QWEN_VL_BAD_ENCODING, message, size,
                  "rotated product: this device or library has no wgmma form");
  }
  const int error = launch_rotated(p, x, weight, bias, spots, turns, out,
                                   static_cast<cudaStream_t>(stream));
  if (error) {
    return refuse(QWEN_VL_CUDA_ERROR, message, size, "rotated product: %s (CUDA error %d)",
                  cudaGetErrorString(static_cast<cudaError_t>(error)), error);
  }
  return launched("rotated product", message, size);
}
