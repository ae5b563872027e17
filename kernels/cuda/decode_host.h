// What the C interfaces of both forms of the decode step check alike.
#ifndef QWEN_VL_DECODE_HOST_H_
#define QWEN_VL_DECODE_HOST_H_

#include <cuda_runtime.h>

#include <cstddef>

#include "../cpu/check.h"
#include "qwen_vl_decode.h"

namespace qwen_vl {
namespace decode {

// Turns an error of CUDA's into a status and a sentence.
inline int failed(cudaError_t error, const char* what, char* message, size_t size) {
  if (error == cudaSuccess) return QWEN_VL_OK;
  cudaGetLastError();  // so that the next call does not report it again
  return refuse(QWEN_VL_CUDA_ERROR, message, size, "%s: %s (CUDA error %d)", what,
                cudaGetErrorString(error), static_cast<int>(error));
}

// Refuses a launch of no or too many sequences or steps; `fits` tells whether so many sequences fit
// one launch.
template <class Fits>
int check_launch(const qwen_vl_decode_launch& launch, const Fits& fits, char* message,
                 size_t size) {
  constexpr int kMost = QWEN_VL_DECODE_ROWS;
  if (launch.count < 1 || launch.count > kMost || launch.steps < 1 || !fits(launch.count))
    return refuse(QWEN_VL_BAD_SIZE, message, size, "%d steps of %d sequences", launch.steps,
                  launch.count);
  for (int i = 0; i < launch.count; ++i)
    if (launch.slot[i] < 0 || launch.slot[i] >= kMost)
      return refuse(QWEN_VL_BAD_SIZE, message, size, "slot %d of %d", launch.slot[i], kMost);
  if (launch.logits && launch.steps != 1)
    return refuse(QWEN_VL_BAD_SIZE, message, size, "logits of %d steps at once", launch.steps);
  return QWEN_VL_OK;
}

}  // namespace decode
}  // namespace qwen_vl
#endif  // QWEN_VL_DECODE_HOST_H_
