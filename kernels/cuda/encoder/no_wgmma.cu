// Stands in for attention_sm90.cu where the library is built without Hopper.
#include "attention.cuh"

namespace qwen_vl {

bool wgmma_built() { return false; }

int launch_wgmma(int, const void*, int, int, cudaStream_t) { return cudaErrorNotSupported; }

}  // namespace qwen_vl
