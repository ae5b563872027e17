// The step kernel for bf16 models, in every form of weights.
#include "decode_kernels.h"
#include "decode_step.cuh"

namespace qwen_vl {
namespace decode {

const void* step_kernel_bf16(int form, int head_form) {
  using T = __nv_bfloat16;
  const int pair = form * 4 + head_form;
  switch (pair) {
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
