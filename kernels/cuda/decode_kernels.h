// Which compiled form of the step kernel fits a model; one source file a dtype (they take long).
#ifndef QWEN_VL_DECODE_KERNELS_H_
#define QWEN_VL_DECODE_KERNELS_H_

namespace qwen_vl {
namespace decode {

// Null for a pair of forms that is not compiled.
const void* step_kernel_bf16(int form, int head_form);
const void* step_kernel_fp16(int form, int head_form);

}  // namespace decode
}  // namespace qwen_vl
#endif  // QWEN_VL_DECODE_KERNELS_H_
