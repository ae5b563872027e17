// What the files compiled for sm_90a offer; no_wgmma.cu stands in where they are left out.
#ifndef QWEN_VL_CUDA_ENCODER_HOPPER_H_
#define QWEN_VL_CUDA_ENCODER_HOPPER_H_

#include <cuda_runtime_api.h>

#include "qwen_vl_encoder.h"

namespace qwen_vl {

// False where the library was built without them.
bool wgmma_built();

// Bytes that launch_wgmma needs on the current device; all 0 before the first launch, and after each.
size_t wgmma_workspace();

// args: Attention<T> of segments, T by dtype; q is that of all rows. `least`: steps that are worth a
// block of their own. Returns a cudaError_t.
int launch_wgmma(int dtype, const void* args, int rows, int tiles, int heads, int least,
                 void* workspace, cudaStream_t stream);

// quick_gelu(x * weight^T + bias), or silu(x * gates^T) * (x * others^T), weight being gates, then
// others; product.outs counts columns of the result. Returns a cudaError_t.
int launch_activated(const qwen_vl_product& product, bool gated, const void* x, const void* weight,
                     const void* bias, void* out, cudaStream_t stream);

// Queries, keys and values of the encoder: x * weight^T + bias, queries and keys rotated.
int launch_rotated(const qwen_vl_product& product, const void* x, const void* weight,
                   const void* bias, const int32_t* spots, const float* turns, void* out,
                   cudaStream_t stream);

}  // namespace qwen_vl
#endif  // QWEN_VL_CUDA_ENCODER_HOPPER_H_
