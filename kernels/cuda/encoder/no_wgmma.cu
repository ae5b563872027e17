// Stands in for the files compiled for sm_90a where the library is built without Hopper.
#include "hopper.h"
#include "prompt_sm90.h"

namespace qwen_vl {

bool wgmma_built() { return false; }

size_t wgmma_workspace() { return 0; }

int launch_wgmma(int, const void*, int, int, int, int, void*, cudaStream_t) {
  return cudaErrorNotSupported;
}

int launch_activated(const qwen_vl_product&, bool, const void*, const void*, const void*, void*,
                     cudaStream_t) {
  return cudaErrorNotSupported;
}

int launch_rotated(const qwen_vl_product&, const void*, const void*, const void*, const int32_t*,
                   const float*, void*, cudaStream_t) {
  return cudaErrorNotSupported;
}

int describe_cache(const qwen_vl_span&, int, int, int, void*) { return cudaErrorNotSupported; }

int launch_prompt(const qwen_vl_heads&, const void*, const qwen_vl_span*, const void*, int, float, int,
                  void*, cudaStream_t) {
  return cudaErrorNotSupported;
}

int launch_gated(const qwen_vl_product&, const void*, const void*, void*, cudaStream_t) {
  return cudaErrorNotSupported;
}

}  // namespace qwen_vl
