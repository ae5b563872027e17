// Gated products of a prompt: what the caller handed over is checked here, the work is
// products_gated_sm90.cu's.
#include "hopper.h"
#include "prompt_sm90.h"
#include "status.h"

using namespace qwen_vl;

extern "C" int qwen_vl_multiply_gated(const qwen_vl_product* product, const void* x,
                                      const void* weight, void* out, void* stream, char* message,
                                      size_t size) {
  if (!product) return refuse(QWEN_VL_NULL_POINTER, message, size, "gated product: a null pointer");
  const qwen_vl_product& p = *product;
  int status = check_half(p.dtype, "gated product", message, size);
  if (!status) {
    status = check_pointers("gated product", message, size, x, weight, static_cast<const void*>(out));
  }
  if (status) return status;
  if (p.rows < 1 || p.outs < 8 || p.outs % 8 || p.ins < 64 || p.ins % 64 || p.bias || p.add) {
    return refuse(QWEN_VL_BAD_SIZE, message, size,
                  "gated product of %d rows with %d x %d: inputs must be a multiple of 64, outputs of "
                  "8; there is no bias, and nothing can be added",
                  p.rows, p.outs, p.ins);
  }
  if (!qwen_vl_attention_has(QWEN_VL_WGMMA)) {
    return refuse(QWEN_VL_BAD_ENCODING, message, size,
                  "gated product: this device or library has no wgmma form");
  }
  const int error = launch_gated(p, x, weight, out, static_cast<cudaStream_t>(stream));
  if (error) {
    return refuse(QWEN_VL_CUDA_ERROR, message, size, "gated product: %s (CUDA error %d)",
                  cudaGetErrorString(static_cast<cudaError_t>(error)), error);
  }
  return launched("gated product", message, size);
}
