// Which compiled kernel fits: one source file a dtype, since they take long.
#ifndef QWEN_VL_CHAIN_KERNELS_H_
#define QWEN_VL_CHAIN_KERNELS_H_

namespace qwen_vl {
namespace chain {

// Null where nothing is compiled. rows: 1, or QWEN_VL_DECODE_ROWS for more; wide: rows have more
// than 8 inputs for each thread of a block; ahead: as choose_ahead says.
const void* product_bf16(int form, int op, int rows, bool wide, int ahead);
const void* product_fp16(int form, int op, int rows, bool wide, int ahead);
const void* embed_bf16();
const void* embed_fp16();
const void* attention_bf16(int dim);
const void* attention_fp16(int dim);

}  // namespace chain
}  // namespace qwen_vl
#endif  // QWEN_VL_CHAIN_KERNELS_H_
