// The chain's kernels for bf16 models, in every form of weights.
#include "forms.cuh"

namespace qwen_vl {
namespace chain {

const void* product_bf16(int form, int op, int rows, bool wide, int ahead) {
  return product_kernel<__nv_bfloat16>(form, op, rows, wide, ahead);
}
const void* embed_bf16() { return reinterpret_cast<const void*>(embed<__nv_bfloat16>); }
const void* attention_bf16(int dim) { return attention_kernel<__nv_bfloat16>(dim); }

}  // namespace chain
}  // namespace qwen_vl
