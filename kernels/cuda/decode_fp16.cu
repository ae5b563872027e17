// The step kernel for fp16 models, in every form of weights.
#include "decode_forms.cuh"

namespace qwen_vl {
namespace decode {

const void* step_kernel_fp16(int form, int head_form) {
  return step_kernel<__half>(form, head_form);
}

}  // namespace decode
}  // namespace qwen_vl
