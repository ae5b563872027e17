// Which instance of the step kernel takes a model's forms of weights; a file a dtype instantiates
// it, so that they compile beside each other.
#ifndef QWEN_VL_CUDA_DECODE_FORMS_CUH_
#define QWEN_VL_CUDA_DECODE_FORMS_CUH_

#include "decode_kernels.h"
#include "decode_step.cuh"

namespace qwen_vl {
namespace decode {

// The kernel for activations of type T, or nullptr where there is none for these forms.
template <typename T>
const void* step_kernel(int form, int head_form) {
  switch (form * 4 + head_form) {
    case kFloat * 4 + kFloat: return reinterpret_cast<const void*>(decode_step<T, kFloat, kFloat>);
    case kInt8 * 4 + kInt8: return reinterpret_cast<const void*>(decode_step<T, kInt8, kInt8>);
    case kInt4 * 4 + kInt8: return reinterpret_cast<const void*>(decode_step<T, kInt4, kInt8>);
    case kInt4 * 4 + kFloat: return reinterpret_cast<const void*>(decode_step<T, kInt4, kFloat>);
    case kInt8Group * 4 + kFloat:
      return reinterpret_cast<const void*>(decode_step<T, kInt8Group, kFloat>);
    default: return nullptr;
  }
}

}  // namespace decode
}  // namespace qwen_vl
#endif  // QWEN_VL_CUDA_DECODE_FORMS_CUH_
