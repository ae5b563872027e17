// Kernels whose start overlaps the end of the kernel before them (programmatic dependent launch of
// Hopper; before it they start one after the other).
#ifndef QWEN_VL_CUDA_ENCODER_LAUNCH_CUH_
#define QWEN_VL_CUDA_ENCODER_LAUNCH_CUH_

#include <cuda_runtime.h>

#include <utility>

namespace qwen_vl {

// What kernels before have written may be read, and what they read be written over. Every thread of a
// kernel that launch_early launches calls it before it touches memory. From then on the next one
// may start.
__device__ inline void begin_after_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Launches a kernel that calls begin_after_previous.
template <class... P, class... A>
cudaError_t launch_early(void (*kernel)(P...), unsigned blocks, unsigned threads, size_t shared,
                         cudaStream_t stream, A&&... arguments) {
  int device, major;
  cudaError_t error = cudaGetDevice(&device);
  if (!error) error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error) return error;
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = major >= 9;
  return cudaLaunchKernelEx(&config, kernel, std::forward<A>(arguments)...);
}

}  // namespace qwen_vl
#endif  // QWEN_VL_CUDA_ENCODER_LAUNCH_CUH_
