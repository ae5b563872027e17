// The chain's kernels for fp16 models, in every form of weights.
#include "forms.cuh"

namespace qwen_vl {
namespace chain {

const void* product_fp16(int form, int op, int rows, bool wide, int ahead) {
  return product_kernel<__half>(form, op, rows, wide, ahead);
}
const void* embed_fp16() { return reinterpret_cast<const void*>(embed<__half>); }
const void* attention_fp16(int dim) { return attention_kernel<__half>(dim); }

}  // namespace chain
}  // namespace qwen_vl
