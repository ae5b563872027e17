// What files compiled for sm_90a offer to prompts; no_wgmma.cu stands in where they are left out.
#ifndef QWEN_VL_CUDA_ENCODER_PROMPT_SM90_H_
#define QWEN_VL_CUDA_ENCODER_PROMPT_SM90_H_

#include <cuda_runtime_api.h>

#include "qwen_vl_prompt.h"

namespace qwen_vl {

// Writes a CUtensorMap (128 bytes) of a cache whose layers, keys and values and heads lie one after
// the other. Returns a cudaError_t, as the other function does.
int describe_cache(const qwen_vl_span& span, int dtype, int capacity, int heads_of_layers,
                   void* map);

// map: on the device, what describe_cache wrote.
int launch_prompt(const qwen_vl_heads& heads, const void* qkv, const qwen_vl_span* span,
                  const void* map, int layer, float scale, int tail, void* out,
                  cudaStream_t stream);

// silu(x * gates^T) * (x * others^T); weight: gates, then others; outs counts columns of the result.
int launch_gated(const qwen_vl_product& product, const void* x, const void* weight, void* out,
                 cudaStream_t stream);

}  // namespace qwen_vl
#endif  // QWEN_VL_CUDA_ENCODER_PROMPT_SM90_H_
