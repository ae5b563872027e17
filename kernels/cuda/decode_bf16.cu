// The step kernel for bf16 models, in every form of weights.
#include "decode_forms.cuh"

namespace qwen_vl {
namespace decode {

const void* step_kernel_bf16(int form, int head_form) {
  return step_kernel<__nv_bfloat16>(form, head_form);
}

}  // namespace decode
}  // namespace qwen_vl
