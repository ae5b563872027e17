// What a call says when it cannot do its work, and the checks that several files share.
#ifndef QWEN_VL_CUDA_ENCODER_STATUS_H_
#define QWEN_VL_CUDA_ENCODER_STATUS_H_

#include <cuda_runtime_api.h>

#include <cstdarg>
#include <cstdio>

#include "qwen_vl_encoder.h"

namespace qwen_vl {

// Writes one sentence into message (cut at its size) and returns status.
__attribute__((format(printf, 4, 5))) inline int refuse(int status, char* message, size_t size,
                                                        const char* format, ...) {
  if (message && size) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, size, format, arguments);
    va_end(arguments);
  }
  return status;
}

// Turns the outcome of a launch into a status.
inline int launched(const char* what, cudaError_t error, char* message, size_t size) {
  if (error == cudaSuccess) return QWEN_VL_OK;
  cudaGetLastError();  // it is told here, and not again at the next call
  return refuse(QWEN_VL_CUDA_ERROR, message, size, "%s: %s (CUDA error %d)", what,
                cudaGetErrorString(error), static_cast<int>(error));
}

inline int launched(const char* what, char* message, size_t size) {
  return launched(what, cudaGetLastError(), message, size);
}

template <class... P>
bool aligned(const P*... pointers) {
  return ((reinterpret_cast<uintptr_t>(pointers) % 16 == 0) && ...);
}

template <class... P>
int check_pointers(const char* what, char* message, size_t size, const P*... pointers) {
  if (!(pointers && ...)) {
    return refuse(QWEN_VL_NULL_POINTER, message, size, "%s: a null pointer", what);
  }
  if (!aligned(pointers...)) {
    return refuse(QWEN_VL_BAD_OUTPUT, message, size, "%s: a pointer is not aligned to 16 bytes",
                  what);
  }
  return QWEN_VL_OK;
}

inline int check_half(int dtype, const char* what, char* message, size_t size) {
  if (dtype == QWEN_VL_BF16 || dtype == QWEN_VL_FP16) return QWEN_VL_OK;
  return refuse(QWEN_VL_BAD_ENCODING, message, size, "%s: dtype %d; bf16 (0) and fp16 (1) are "
                "possible", what, dtype);
}

}  // namespace qwen_vl
#endif  // QWEN_VL_CUDA_ENCODER_STATUS_H_
