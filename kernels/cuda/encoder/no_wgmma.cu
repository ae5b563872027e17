// Stands in for attention_sm90.cu and products_sm90.cu where the library is built without Hopper.
#include "hopper.h"

namespace qwen_vl {

bool wgmma_built() { return false; }

int launch_wgmma(int, const void*, int, int, int, cudaStream_t) { return cudaErrorNotSupported; }

int launch_activated(const qwen_vl_product&, bool, const void*, const void*, const void*, void*,
                     cudaStream_t) {
  return cudaErrorNotSupported;
}

int launch_rotated(const qwen_vl_product&, const void*, const void*, const void*, const int32_t*,
                   const float*, void*, cudaStream_t) {
  return cudaErrorNotSupported;
}

}  // namespace qwen_vl
